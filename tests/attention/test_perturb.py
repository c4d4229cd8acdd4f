"""Compare blockers found by perturbing one property at a time with the rules, which know all reasons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from profharness.attention.config import LAYOUTS, MASKS, Config, parse_config
from profharness.attention.dispatch.advice import (
    PROPERTIES,
    blockers,
    difficult_properties,
    keep_only,
    make_easy,
    rule_oracle,
)
from profharness.attention.dispatch.machine import RELEASES, Machine, from_config, machine_for
from profharness.attention.dispatch.predict import Eligibility, judge

H200 = machine_for("H200", "2.11")


def first_only(machine: Machine) -> Callable[[Config, str], Eligibility]:
    """Return an oracle of the rules that reports only the first reason, like PyTorch."""
    ask = rule_oracle(machine)

    def oracle(config: Config, backend: str) -> Eligibility:
        answer = ask(config, backend)
        return answer._replace(reasons=answer.reasons[:1])

    return oracle


def found(text: str, backend: str, machine: Machine = H200) -> dict[str, tuple[str, ...]]:
    """Return the properties by reason code."""
    answer = blockers(parse_config(text), backend, first_only(machine))
    return {reason.code: properties for properties, reason in answer}


def test_every_blocking_property_is_named() -> None:
    assert found("2,8,512,100,fp32,mask=bool,layout=strided_last", "flash") == {
        "mask": ("mask",),
        "dtype": ("dtype",),
        "last_dim_stride": ("layout",),
    }
    assert found("2,8,512,100,fp32,kv_heads=2,mask=float_grad,deterministic", "cudnn") == {
        "deterministic": ("deterministic",),
        "dtype": ("dtype",),
        "mask_grad": ("mask",),
        "head_dim_multiple": ("head_dim remainder",),
    }


def test_the_first_blocker_is_pytorchs_first_reason() -> None:
    config = parse_config("2,8,512,100,fp32,layout=strided_last,mask=bool")
    for backend in ("flash", "efficient", "cudnn"):
        _, first = blockers(config, backend, first_only(H200))[0]
        assert first.message == judge(backend, from_config(config), H200).reasons[0].message


def test_later_reasons_have_the_order_of_the_properties() -> None:
    text = "2,8,512,100,fp32,mask=float_grad,dropout=0.5,deterministic,layout=strided_last"
    # before any other check, cuDNN 9.12 is refused for dropout
    assert list(found(text, "cudnn", machine_for("H200", "2.10", 91200))) == [
        "dropout",
        "dtype",
        "mask_grad",
        "deterministic",
        "last_dim_stride",
        "head_dim_multiple",
    ]


def test_properties_that_block_only_together() -> None:
    a6000 = machine_for("RTX A6000", "2.11")
    assert found("1,8,1,64,seq_kv=64,causal", "flash") == {
        "causal_non_square": ("causal", "lengths")
    }
    assert found("1,8,1,64,seq_kv=64,dropout=0.5", "cudnn") == {
        "seq_len_one": ("dropout", "lengths")
    }
    assert found("1,8,64,200,bwd", "flash", a6000) == {"head_dim_training": ("bwd", "head_dim")}
    assert found("1,8,64,256,bwd,dropout=0.5", "flash", a6000) == {
        "head_dim_training": ("dropout", "bwd", "head_dim")
    }


def test_two_reasons_of_one_number_are_separate() -> None:
    assert found("1,8,64,300", "cudnn") == {
        "head_dim": ("head_dim",),
        "head_dim_multiple": ("head_dim remainder",),
    }


def test_a_reason_of_only_the_easy_dtype_is_not_reported() -> None:
    """fp32 requires a multiple of 4, fp16 of 8."""
    assert found("1,8,64,100,fp32,kv_heads=2", "efficient") == {"num_heads": ("kv_heads",)}
    assert found("1,8,64,99,fp32,kv_heads=2", "efficient") == {
        "num_heads": ("kv_heads",),
        "head_dim_multiple": ("head_dim remainder",),
    }


def test_a_missing_backend_is_the_only_reason() -> None:
    v100 = machine_for("V100", "2.11")
    config = parse_config("2,8,512,100,fp32,mask=bool")
    ((properties, reason),) = blockers(config, "flash", first_only(v100))
    assert (properties, reason.code) == ((), "capability")
    assert "sm 7.0" in reason.message


def test_an_unknown_release_has_no_blockers() -> None:
    assert blockers(parse_config("2,8,512,64"), "flash", first_only(Machine((3, 0, 0)))) == ()


def test_a_text_contains_the_requested_sizes() -> None:
    answer = blockers(
        parse_config("3,8,1,64,seq_kv=77,causal,mask=bool"), "flash", rule_oracle(H200)
    )
    (text,) = [reason.message for _, reason in answer if reason.code == "causal_non_square"]
    assert "seqlen_q: 1 seqlen_k: 77" in text


def test_a_set_of_more_than_three_properties_is_found() -> None:
    together = {"mask", "dropout", "causal", "bwd"}

    def oracle(config: Config, _: str) -> Eligibility:
        return Eligibility(not together <= set(difficult_properties(config)))

    config = parse_config("1,2,32,64,mask=bool,dropout=0.5,causal,bwd,layout=bshd")
    ((properties, _),) = blockers(config, "flash", oracle)
    assert set(properties) == together


numbers = st.sampled_from([1, 2, 8, 63, 64, 100, 128, 192, 200, 256, 300])
configs = st.builds(
    Config,
    batch=st.sampled_from([1, 2, 5, 65536]),
    num_heads=st.sampled_from([8, 65536]),
    num_kv_heads=st.sampled_from([1, 2, 8]),
    seq_len_q=st.sampled_from([1, 7, 192, 512]),
    seq_len_kv=st.sampled_from([1, 7, 192, 512]),
    head_dim=numbers,
    head_dim_v=st.none() | numbers,
    dtype=st.sampled_from(["fp16", "bf16", "fp32"]),
    causal=st.booleans(),
    mask=st.sampled_from(MASKS),
    dropout=st.sampled_from([0.0, 0.0, 0.1, 0.5]),
    layout=st.sampled_from(LAYOUTS),
    bwd=st.booleans(),
    deterministic=st.booleans(),
).map(lambda c: replace(c, head_dim_v=None) if c.head_dim_v == c.head_dim else c)
machines = st.builds(
    machine_for,
    st.sampled_from(["V100", "T4", "A100", "RTX A6000", "H200", "B200", "RTX 5090"]),
    st.sampled_from(sorted(RELEASES)),
)
backends = st.sampled_from(["flash", "efficient", "cudnn"])


@settings(max_examples=400)
@given(configs, machines, backends)
@example(Config(1, 8, 2, 7, 7, 192, "fp16", head_dim_v=128, mask="float_grad"), H200, "cudnn")
def test_blockers_are_empty_if_and_only_if_eligible_and_easing_them_helps(
    config: Config, machine: Machine, backend: str
) -> None:
    oracle = first_only(machine)
    answer = blockers(config, backend, oracle)
    verdict = judge(backend, from_config(config), machine)
    assert (answer != ()) == (verdict.eligible is False)
    if not answer or answer[0][0] == ():
        return
    names = {name for properties, _ in answer for name in properties}
    assert names <= set(difficult_properties(config))
    assert oracle(make_easy(config, names), backend).eligible is not False
    # each property is a blocker on its own: making only the others easy is not enough
    for blocker in answer:
        others = {name for other in answer if other is not blocker for name in other[0]}
        assert oracle(make_easy(config, others - set(blocker[0])), backend).eligible is False
    known = {reason.code for reason in verdict.certain}
    if config.head_dim == 1:
        known.add("last_dim_stride")  # a stride that only matters once head_dim is padded
    assert {reason.code for _, reason in answer} <= known


@settings(max_examples=200)
@given(configs)
@example(Config(1, 8, 8, 7, 7, 127, "fp16", head_dim_v=64))
def test_properties_are_independent_and_complete(config: Config) -> None:
    base = keep_only(config, ())
    found = make_easy(config, difficult_properties(config))
    # a head_dim of 128 is as easy as one of 64, and differs from a head_dim_v of 64
    assert found == base or (config.head_dim_v, found.head_dim) == (64, 128)
    assert replace(found, head_dim=64) == replace(base, head_dim=64)
    assert keep_only(config, difficult_properties(config)) == config
    assert difficult_properties(base) == ()
    assert base.num_heads % base.num_kv_heads == 0


def test_two_pairs_that_share_a_property_are_both_found() -> None:
    machine = machine_for("H200", "2.15", 92501)
    text = "1,8,1,64,seq_kv=64,dropout=0.5,bwd"
    assert found(text, "cudnn", machine) == {
        "seq_len_one": ("dropout", "lengths"),
        "known_bug": ("bwd", "lengths"),
    }


@pytest.mark.parametrize("name", PROPERTIES)
def test_every_property_can_be_a_blocker(name: str) -> None:
    """Each registered property is reported if the oracle refuses it, alone and by its name."""
    text = (
        "3,16,7,300,bf16,kv_heads=4,head_dim_v=99,mask=bool,dropout=0.5,causal,deterministic,bwd,"
        "layout=bshd,kv_batch=1"
    )
    config = parse_config(text.replace("300", "299"))

    def oracle(asked: Config, _: str) -> Eligibility:
        return Eligibility(PROPERTIES[name](asked) == asked)

    assert (name,) in [properties for properties, _ in blockers(config, "flash", oracle)]
