"""Blockers, compared with the rules, which know all reasons; and advice: which changes it suggests, whether
the rules accept them, and whether its code does what it claims.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from profharness.attention.config import LAYOUTS, MASKS, Config, parse_config
from profharness.attention.dispatch.advice import (
    CHANGES,
    MAX_ADVICE,
    MAX_CHANGES,
    OUTSIDE,
    PROPERTIES,
    Advice,
    advise,
    blockers,
    call_code,
    difficult_properties,
    keep_only,
    make_easy,
    rule_choice,
    rule_oracle,
)
from profharness.attention.dispatch.machine import RELEASES, Machine, from_config, machine_for
from profharness.attention.dispatch.predict import Eligibility, judge, predict
from profharness.rows import Refusal

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
    assert found(
        "1,8,1,64,seq_kv=64,dropout=0.5,bwd", "cudnn", machine_for("H200", "2.15", 92501)
    ) == {
        "seq_len_one": ("dropout", "lengths"),
        "known_bug": ("bwd", "lengths"),
    }


def test_reasons_of_the_head_dim() -> None:
    assert found("1,8,64,300", "cudnn") == {
        "head_dim": ("head_dim",),
        "head_dim_multiple": ("head_dim remainder",),
    }
    # fp32 requires a multiple of 4, and only the easy dtype, fp16, one of 8
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


@pytest.mark.parametrize("name", PROPERTIES)
def test_every_property_can_be_a_blocker(name: str) -> None:
    """Each registered property is reported if the oracle refuses it, alone and by its name."""
    text = (
        "3,16,7,300,bf16,kv_heads=4,head_dim_v=99,mask=bool,dropout=0.5,causal,deterministic,bwd,"
        "layout=bshd,kv_batch=1"
    )
    if name == "window":
        text = text.replace("mask=bool", "window=5")
    config = parse_config(text.replace("300", "299"))

    def oracle(asked: Config, _: str) -> Eligibility:
        return Eligibility(PROPERTIES[name](asked) == asked)

    assert (name,) in [properties for properties, _ in blockers(config, "flash", oracle)]


# Runs the code of several pieces of advice on CPU tensors next to the original call, and compares.
RUN = r"""
import json, sys
import torch
import torch.nn.functional as F
from profharness.attention.config import parse_config
from profharness.recording.worker.attention import make_forward, make_inputs

TOLERANCE = {"fp32": (1e-5, 1e-5), "bf16": (2e-2, 2e-2), "fp16": (3e-3, 3e-3)}
torch.set_num_threads(1)
for line in sys.stdin:
    label, code = json.loads(line)
    config = parse_config(label)
    inputs = make_inputs(config, "cpu", 1)
    expected = make_forward(config, inputs)()
    space = {"q": inputs.query, "k": inputs.key, "v": inputs.value, "attn_mask": inputs.mask}
    exec(code, space)
    out = space["out"]
    relative, absolute = TOLERANCE[config.dtype]
    same = out.shape == expected.shape and out.dtype == expected.dtype
    close = same and torch.allclose(out, expected, relative, absolute)
    print(json.dumps([same, bool(close), out.requires_grad]))
    torch.use_deterministic_algorithms(False)
"""


def ways(text: str, backend: str, machine: Machine = H200) -> tuple[Advice, ...]:
    return advise(parse_config(text), backend, first_only(machine), rule_choice(machine))


def steps(text: str, backend: str, machine: Machine = H200) -> list[tuple[str, ...]]:
    return [way.steps for way in ways(text, backend, machine)]


def run_codes(cases: list[tuple[str, str]]) -> list[tuple[bool, bool, bool]]:
    root = Path(__file__).resolve().parents[2]
    lines = "".join(json.dumps(case) + "\n" for case in cases)
    done = subprocess.run(
        [sys.executable, "-c", RUN], input=lines, text=True, capture_output=True, cwd=root
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


GQA_2_13 = machine_for("H200", "2.13")
A6000 = machine_for("RTX A6000", "2.11")
B200 = machine_for("B200", "2.14", 92000)


@pytest.mark.parametrize(
    ("text", "backend", "machine", "first"),
    [
        ("2,8,512,64,fp32", "flash", H200, ("bf16",)),
        ("2,8,512,64,bf16", "efficient", machine_for("T4", "2.11"), ("fp16",)),
        ("2,8,512,100,fp16", "cudnn", H200, ("pad head_dim",)),
        ("2,8,512,100,fp16", "efficient", H200, ("pad head_dim",)),
        ("2,8,512,64,fp16,kv_heads=2", "efficient", GQA_2_13, ("expand kv heads",)),
        ("2,8,512,64,fp16,layout=strided_last", "flash", H200, ("contiguous",)),
        ("2,8,512,64,fp16,layout=offset1", "efficient", GQA_2_13, ("aligned copy",)),
        ("2,8,512,64,fp16,deterministic", "cudnn", H200, ("not deterministic",)),
        ("2,8,512,64,fp16,mask=bool", "flash", H200, ("causal for mask",)),
        ("2,8,512,64,fp16,mask=float_grad", "cudnn", H200, ("detach mask",)),
        ("2,8,512,64,fp16,head_dim_v=32", "flash", H200, ("equal head_dim_v",)),
        ("2,8,512,64,fp16,dropout=0.1", "cudnn", GQA_2_13, ("dropout in sixteenths",)),
        ("2,8,8,64,fp16,seq_kv=1", "cudnn", H200, ("pad keys",)),
        ("2,8,1,64,fp16,seq_kv=64", "cudnn", B200, ("pad queries",)),
        ("2,8,64,64,fp16,causal,seq_kv=99", "flash", H200, ("slice keys",)),
        ("2,8,1,64,fp16,causal,seq_kv=99", "flash", H200, ("no causal",)),
        ("2,8,64,200,fp16,bwd", "flash", A6000, ("pad head_dim to 256",)),
        ("2,8,64,64,bf16", "flash", H200, ("name it",)),
        ("2,8,64,100,fp32,mask=float_grad", "cudnn", H200, ("bf16", "detach mask", "pad head_dim")),
    ],
)  # fmt: skip
def test_the_first_advice(
    text: str, backend: str, machine: Machine, first: tuple[str, ...]
) -> None:
    found = ways(text, backend, machine)
    assert found[0].steps == first
    assert found[0].verified is True


@pytest.mark.parametrize(
    ("text", "backend", "machine"),
    [
        ("2,8,512,512,fp16", "flash", H200),  # no head_dim above 256
        ("2,8,512,64,fp16", "flash", machine_for("V100", "2.11")),  # compute capability
        ("2,8,512,64,fp16", "cudnn", H200),  # auto selects it without a change
        ("2,8,512,64,fp16", "cudnn", Machine((3, 0, 0))),  # nothing is known
    ],
)
def test_no_change_gives_no_advice(text: str, backend: str, machine: Machine) -> None:
    assert ways(text, backend, machine) == ()


@pytest.mark.parametrize(
    ("text", "backend", "padded"),
    [
        ("2,8,512,100,fp16", "cudnn", "head_dim from 100 to 104"),
        ("2,8,512,64,fp16,head_dim_v=60", "cudnn", "head_dim_v from 60 to 64"),
        ("2,8,512,100,fp16,head_dim_v=60", "cudnn", "head_dim from 100 to 104 and head_dim_v from 60 to 64"),
    ],
)  # fmt: skip
def test_padding_names_each_change_once(text: str, backend: str, padded: str) -> None:
    """Bug: pad head_dim from 100 to 104 (head_dim_v from 100 to 104)."""
    (way, *_) = ways(text, backend)
    assert way.change == f"pad {padded}, keep the scale and slice the output"


def test_advice_to_leave_out_dropout_says_that_it_changes_training() -> None:
    (_, way) = ways("2,8,1,64,fp16,seq_kv=64,dropout=0.1", "cudnn")
    assert way.change == (
        "leave out dropout (dropout_p=0), but only in inference, because this changes training"
    )


def test_only_advice_that_changes_inputs_prepares_them() -> None:
    for text, prepares in (("head_dim_v=32", True), ("mask=bool", False), ("layout=bshd", False)):
        (way, *_) = ways(f"2,8,512,64,fp16,{text}", "flash")
        assert way.prepares is prepares, way.steps


def test_advice_requests_the_backend_if_auto_selects_another() -> None:
    (way, *_) = ways("2,8,512,64,fp16,mask=bool", "flash")
    assert (way.choice, way.config) == ("cudnn", "b2-h8-s512-d64-fp16-causal")
    assert "SDPBackend.FLASH_ATTENTION" in way.code
    (way,) = ways("2,8,512,64,fp16,layout=strided_last", "flash", machine_for("A100", "2.8"))
    assert way.choice == "flash"
    assert "sdpa_kernel" not in way.code


def test_a_required_mask_gets_unverified_flex_attention() -> None:
    (*_, flex) = ways("2,8,512,64,fp16,mask=float,kv_heads=2,scale=0.5", "flash")
    assert flex.verified is None
    assert flex.config is None
    for words in ("score + bias[b, h, i, j]", "scale=0.5", "enable_gqa=True"):
        assert words in flex.code


@pytest.mark.parametrize("reason", sorted(OUTSIDE))
def test_advice_that_no_config_expresses(reason: str) -> None:
    config = parse_config("2,8,16,64,fp32,mask=bool")
    (way,) = advise(
        config, "efficient", lambda *_: Eligibility(False, (Refusal(reason, ""),)), lambda _: "math"
    )
    assert way.verified is None
    compile(way.code, "advice", "exec")
    if reason == "runtime_disabled":
        assert "enable_mem_efficient_sdp(True)" in way.code


@settings(max_examples=300)
@given(configs, machines)
def test_every_advice_makes_its_backend_eligible(config: Config, machine: Machine) -> None:
    for backend in ("flash", "efficient", "cudnn"):
        found = advise(config, backend, first_only(machine), rule_choice(machine))
        assert len(found) <= MAX_ADVICE
        counts = [len(way.steps) for way in found if way.verified]
        assert counts == sorted(counts)
        for way in found:
            assert len(way.steps) <= MAX_CHANGES
            compile(way.code, "advice", "exec")
            if way.config is None:
                continue
            changed = from_config(parse_config(way.config))
            assert judge(backend, changed, machine).eligible is True
            expected = backend if way.steps == ("name it",) else predict(changed, machine).choice
            assert way.choice == expected


def test_advice_has_the_fewest_changes() -> None:
    """Checked by brute force over all single changes and pairs."""
    oracle = rule_oracle(H200)
    for text in ("2,8,64,100,fp32,mask=float_grad", "2,8,1,64,fp32,dropout=0.1,seq_kv=1"):
        config = parse_config(text)
        (way, *_) = advise(config, "cudnn", oracle, rule_choice(H200))
        reach = {config}
        for _ in range(len(way.steps) - 1):
            reach |= {new for old in reach for c in CHANGES if (new := c.apply(old)) is not None}
        assert not any(oracle(each, "cudnn").eligible for each in reach)


EXAMPLES = {
    "contiguous": "2,4,24,16,fp32,layout=strided_last",
    "aligned copy": "2,4,24,16,fp32,layout=offset1",
    "pad head_dim": "2,4,24,20,fp32,head_dim_v=11",
    "equal head_dim_v": "2,4,24,32,fp32,head_dim_v=16",
    "pad head_dim to 256": "2,4,24,200,fp32,bwd",
    "expand kv heads": "2,4,24,16,fp32,kv_heads=2,causal",
    "detach mask": "2,4,24,16,fp32,mask=float_grad",
    "slice keys": "2,4,8,16,fp32,causal,seq_kv=24",
    "no causal": "2,4,1,16,fp32,causal,seq_kv=24",
    "pad queries": "2,4,1,16,fp32,seq_kv=24,scale=0.3",
    "pad keys": "2,4,8,16,fp32,seq_kv=1",
    "triangle in the mask": "2,4,8,16,fp32,seq_kv=24,causal,mask=float_bh",
    "no window": "2,4,24,16,fp32,causal,window=24",
    "causal for mask": "2,4,24,16,fp32,mask=bool",
    "no mask": "2,4,24,16,fp32,mask=float",
    "no padding": "2,4,24,16,fp32,mask=bool,mask_shape=b1qk",
    "causal without padding": "2,4,24,16,fp32,mask=bool,mask_shape=b1qk",
    "bf16": "2,4,24,16,fp32,mask=float",
    "fp16": "2,4,24,16,bf16,mask=float_bh",
    "dropout in sixteenths": "2,4,24,16,fp32,dropout=0.1",
    "no dropout": "2,4,24,16,fp32,dropout=0.1",
    "not deterministic": "2,4,24,16,fp32,deterministic",
    "no gradients": "2,4,24,16,fp32,bwd",
}


def test_the_code_of_every_change_runs_and_exact_changes_keep_the_result() -> None:
    assert set(EXAMPLES) == {change.name for change in CHANGES}
    cases, changes = [], []
    for change in CHANGES:
        config = parse_config(EXAMPLES[change.name])
        changed = change.apply(config)
        assert changed is not None and changed != config, change.name
        assert "{" not in change.text.format(b=config, a=changed, dims="", causal="")
        cases.append((config.label, call_code(config, changed)))
        assert ("clone()" in cases[-1][1]) is (change.name == "aligned copy")  # not contiguous()
        changes.append(change)
    for change, (same, close, requires_grad) in zip(changes, run_codes(cases), strict=True):
        assert same, f"{change.name}: another shape or dtype"
        assert close or not change.exact, change.name
        assert requires_grad is (change.name == "pad head_dim to 256"), change.name


def test_programs_of_several_changes() -> None:
    masked = parse_config("2,4,24,16,fp32,mask=bool")
    triangle = parse_config("2,4,24,16,fp32,causal,mask=bool_2d")
    config = parse_config(
        "2,4,24,20,fp32,kv_heads=2,mask=float_grad,layout=strided_last,head_dim_v=12"
    )
    windows = [parse_config(f"2,4,24,16,fp32,{text}") for text in ("window=5", "causal,window=7")]
    names = ("contiguous", "pad head_dim", "expand kv heads", "detach mask", "equal head_dim_v")
    changed = config
    for change in CHANGES:
        if change.name in names:
            changed = change.apply(changed) or changed
    cases = [
        (masked.label, call_code(masked, replace(masked, mask="none"))),  # another result
        (triangle.label, call_code(triangle, replace(triangle, causal=False), "math")),
        (config.label, call_code(config, changed, "math")),
        *((each.label, call_code(each, each, "math")) for each in windows),
    ]
    assert [close for _, close, _ in run_codes(cases)] == [False, True, True, True, True]


# Runs the code of advice to pack sequences, and compares the tokens that are not padding. The kernels
# of varlen_attn need a GPU, so a loop over the sequences takes their place.
RUN_PACKED = r"""
import json, sys
import torch
import torch.nn.functional as F
import torch.nn.attention.varlen as varlen

def loop(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    assert query.dtype in (torch.float16, torch.bfloat16) and query.shape[1] == key.shape[1]
    assert cu_seq_q.dtype == torch.int32 and (cu_seq_q.diff() <= max_q).all()
    parts = [each.tensor_split(cu_seq_q[1:-1].tolist()) for each in (query, key, value)]
    return torch.cat([
        F.scaled_dot_product_attention(*(each.transpose(0, 1) for each in sequence), scale=scale)
        .transpose(0, 1)
        for sequence in zip(*parts)
    ])

varlen.varlen_attn = loop
torch.set_num_threads(1)
for line in sys.stdin:
    kind, shape, kv_heads, dtype, scale, code = json.loads(line)
    torch.manual_seed(1)
    dtype = getattr(torch, dtype)
    q = torch.randn(3, 4, 24, 16, dtype=dtype)
    k, v = (torch.randn(3, kv_heads, 24, 16, dtype=dtype) for _ in range(2))
    tokens = torch.arange(24)
    # padding at the end, none, and at the start
    real = torch.stack([tokens < 9, tokens >= 0, tokens >= 7])
    seen = real[:, None, None].expand(3, 1, 24 if shape == "b1qk" else 1, 24)
    hidden = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    space = {"q": q, "k": k, "v": v, "attn_mask": seen if kind == "bool" else hidden}
    expected = F.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=True)
    exec(code, space)
    difference = (space["out"] - expected).transpose(1, 2)[real].abs().max()
    same = space["out"].shape == expected.shape and space["out"].dtype == expected.dtype
    print(json.dumps([same, float(difference)]))
"""
DTYPES_OF = {"fp32": "float32", "bf16": "bfloat16"}


@pytest.mark.parametrize("release", [None, (2, 10, 0), (2, 9, 1)])
def test_packed_sequences_have_the_result_of_the_padding_mask(
    release: tuple[int, ...] | None,
) -> None:
    lines = []
    for kind, shape, kv_heads, dtype, scale in (
        ("bool", "b1qk", 4, "fp32", None),
        ("float", "b11k", 2, "bf16", 0.5),
    ):
        config = parse_config(
            f"3,4,24,16,{dtype},kv_heads={kv_heads},mask={kind},mask_shape={shape}"
            + (f",scale={scale}" if scale else "")
        )
        found = advise(config, "flash", first_only(H200), rule_choice(H200), release=release)
        first = found[0] if release is None else next(w for w in found if w.steps == ("pack",))
        assert first.steps == ("pack",) and first.verified is None
        jagged = release == (2, 9, 1) or (release == (2, 10, 0) and scale is not None)
        assert ("nested_tensor_from_jagged" in first.code) is jagged
        assert ("varlen_attn" in first.code) is not jagged
        lines.append(json.dumps([kind, shape, kv_heads, DTYPES_OF[dtype], scale, first.code]))
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", RUN_PACKED],
        input="\n".join(lines),
        text=True,
        capture_output=True,
        cwd=root,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = list(map(json.loads, done.stdout.splitlines()))
    assert len(results) == len(lines)
    assert all(same and difference < 3e-2 for same, difference in results)


def test_only_a_mask_that_all_sequences_share_is_probably_causal() -> None:
    """Bug: the first advice on a padding mask was to pass is_causal=True instead."""
    shared = [("causal for mask",), ("no mask",)]
    for text in ("mask=bool_2d", "mask=bool", "mask=bool,mask_shape=bhqk"):
        assert steps(f"2,8,512,64,fp16,{text}", "flash")[:2] == shared, text
    of_one = "1,8,512,64,fp16,mask=bool,mask_shape=b1qk"
    expanded = "2,8,512,64,fp16,mask=bool,mask_shape=b1qk,mask_strides=0x0x512x1"
    for text in (of_one, expanded):
        assert set(shared) < set(steps(text, "flash")), text
    padded = [
        way for way in ways("2,8,512,64,fp16,mask=bool,mask_shape=b1qk", "flash") if way.verified
    ]
    assert [way.steps for way in padded] == [("no padding",), ("causal without padding",)]
    assert all(way.change.startswith("if no sequence is padded") for way in padded)
    first = min(padded, key=lambda way: way.rank)
    assert first is padded[0] and "is_causal" not in first.code
    of_keys = ways("2,8,512,64,fp16,mask=bool,mask_shape=b11k", "flash")
    assert "if no sequence is padded, leave out attn_mask" in [
        way.change.partition("; ")[0] for way in of_keys
    ]


def test_only_a_mask_that_may_hide_padding_gets_the_advice_to_pack() -> None:
    padding = "2,8,512,64,fp16,mask=bool,mask_shape="
    assert steps(f"{padding}b1qk", "flash") == [
        ("pack",), ("no padding",), ("causal without padding",), ("flex",)
    ]  # fmt: skip
    # the same for every query, so it is not causal
    assert steps(f"{padding}b11k", "flash") == [("pack",), ("no padding",), ("flex",)]
    for text in (
        "2,8,512,64,fp16,mask=bool",
        f"{padding}bhqk",
        f"{padding}b1q1",
        f"{padding}b1qk,dropout=0.1",
        "2,8,512,64,fp16,seq_kv=96,mask=bool,mask_shape=b1qk",
    ):
        assert ("pack",) not in steps(text, "flash")
    for gpu in ("T4", "V100"):  # flash refuses packed sequences too
        machine = machine_for(gpu, "2.11")
        found = advise(
            parse_config(f"{padding}b1qk"), "flash", first_only(machine), rule_choice(machine)
        )
        assert ("pack",) not in [each.steps for each in found]


def test_packing_fails_loudly_if_the_last_query_is_padding() -> None:
    """Bug: a sequence with padding at its end was dropped if the mask also hid padded queries."""
    import torch

    config = parse_config("2,4,24,16,bf16,mask=bool,mask_shape=b1qk")
    code = advise(config, "flash", first_only(H200), rule_choice(H200))[0].code
    real = torch.arange(24) < torch.tensor([9, 24])[:, None]
    seen = real[:, None, :, None] & real[:, None, None, :]
    q = k = v = torch.zeros(2, 4, 24, 16, dtype=torch.bfloat16)
    with pytest.raises(AssertionError):
        exec(code, {"q": q, "k": k, "v": v, "attn_mask": seen})


def test_flex_attention_has_the_result_of_the_mask() -> None:
    cases = []
    for mask in ("mask=bool", "mask=bool_2d", "mask=float_bh", "window=5", "causal,window=7"):
        text = f"2,4,24,16,fp32,kv_heads=2,scale=0.3,{mask}"
        (*_, flex) = ways(text.replace("fp32", "fp16"), "flash")
        code = flex.code.replace("torch.compile(flex_attention)", "flex_attention")
        cases.append((parse_config(text).label, code))
    for same, close, _ in run_codes(cases):
        assert same and close
