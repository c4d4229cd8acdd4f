"""Facts of each release, one call at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profharness.attention.config import SDPA_BACKENDS, parse_config
from profharness.attention.dispatch.machine import (
    RELEASES,
    AttentionParams,
    Machine,
    Mask,
    from_config,
    machine_for,
)
from profharness.attention.dispatch.predict import (
    TABLES,
    code,
    judge,
    predict,
    predict_cell,
    raises_later,
    undecided,
)
from profharness.devices import GPUS

PLAIN = AttentionParams(2, 8, 8, 512, 512, 64)
CUDNN_FIRST = ("cudnn", "flash", "efficient", "math")
FLASH_FIRST = ("flash", "efficient", "math", "cudnn")


def priority_order(params: AttentionParams, machine: Machine) -> tuple[str, ...]:
    return predict(params, machine).priority_order


def codes(
    backend: str, machine: Machine, params: AttentionParams = PLAIN, **changes: Any
) -> set[str]:
    return {reason.code for reason in judge(backend, replace(params, **changes), machine).reasons}


@pytest.mark.parametrize(
    ("release", "gpu", "order"),
    [
        ("2.5.0", "H100", CUDNN_FIRST),
        ("2.5.0", "A100", ("flash", "cudnn", "efficient", "math")),
        ("2.5.1", "H100", FLASH_FIRST),
        ("2.6", "H200", FLASH_FIRST),
        ("2.8", "B200", FLASH_FIRST),
        ("2.9", "H100", FLASH_FIRST),  # the wheel was compiled with 9.8
        ("2.10", "H100", FLASH_FIRST),  # the wheel contains 9.10.2
        ("2.11", "H100", CUDNN_FIRST),
        ("2.11", "B300", CUDNN_FIRST),
        ("2.11", "A100", FLASH_FIRST),
        ("2.11", "RTX 5090", FLASH_FIRST),
        ("2.12", "sm107", FLASH_FIRST),
        ("2.13", "sm107", CUDNN_FIRST),
        ("2.15", "GH200", CUDNN_FIRST),
        ("2.15", "RTX 4090", FLASH_FIRST),
    ],
)
def test_the_order_of_each_release(release: str, gpu: str, order: tuple[str, ...]) -> None:
    machine = machine_for(gpu, release)
    assert priority_order(PLAIN, machine) == order
    assert predict(PLAIN, machine).choice == order[0]


def test_other_facts_that_decide_the_order() -> None:
    hopper = machine_for("H100", "2.10")
    assert priority_order(PLAIN, replace(hopper, cudnn=91501)) == CUDNN_FIRST
    assert priority_order(PLAIN, replace(hopper, cudnn=91500)) == FLASH_FIRST
    assert priority_order(PLAIN, replace(hopper, cudnn=None)) == ()
    assert priority_order(PLAIN, replace(hopper, cudnn=91900, cudnn_preferred=False)) == FLASH_FIRST
    built = replace(machine_for("H100", "2.9"), cudnn_compiled=91300)
    assert priority_order(PLAIN, built) == CUDNN_FIRST
    assert priority_order(PLAIN, replace(built, capability=(10, 3))) == FLASH_FIRST
    old_cuda = replace(machine_for("sm107", "2.13"), cuda="12.8")
    assert priority_order(PLAIN, old_cuda) == FLASH_FIRST
    assert priority_order(PLAIN, replace(old_cuda, cuda=None)) == ()
    assert priority_order(PLAIN, replace(old_cuda, cuda=None, capability=(9, 0))) == CUDNN_FIRST
    assert priority_order(PLAIN, machine_for("H100", "2.9", cuda="13.0")) == CUDNN_FIRST
    assert priority_order(PLAIN, machine_for("A100", "2.9", cuda="13.0")) == FLASH_FIRST


def test_fields_that_the_order_depends_on() -> None:
    assert undecided(PLAIN, machine_for("H100", "2.9")) == ()
    assert undecided(PLAIN, machine_for("H100", "2.9", cuda="12.6")) == ("cudnn_compiled",)
    assert undecided(PLAIN, machine_for("A100", "2.9", cuda="12.6")) == ()
    assert undecided(PLAIN, machine_for("H100", "2.11", cuda="12.8")) == ("cudnn",)
    bare = Machine((2, 13, 0), (10, 7))
    assert undecided(PLAIN, bare) == ("cudnn", "cuda")
    assert undecided(PLAIN, replace(bare, capability=(9, 0))) == ("cudnn",)
    assert undecided(replace(PLAIN, device="cpu"), bare) == ()
    assert undecided(PLAIN, machine_for("H100", "2.16")) == ()


@pytest.mark.parametrize("backend", ["flash", "efficient", "cudnn"])
def test_the_stride_text_has_no_tail_but_the_masks(backend: str) -> None:
    machine = machine_for("H200", "2.13")

    def said(mask: Mask | None) -> str:
        call = replace(PLAIN, last_stride=2, mask=mask)
        (text,) = [
            r.message for r in judge(backend, call, machine).reasons if r.code == "last_dim_stride"
        ]
        return text

    assert said(None).endswith("Got Query.stride(-1): 2, Key.stride(-1): 2, Value.stride(-1): 2")
    assert said(Mask((512, 512))).endswith(
        ", Value.stride(-1): 2, Attn_mask.stride(-1): 1 (GPU backends require attn_mask's last "
        "dimension to have stride 1 while the CPU does not)."
    )


# backend, code, GPU, changes of the plain call, releases that refuse, releases that do not
GQA: dict[str, Any] = {"kv_heads": 2, "enable_gqa": True}
MQA: dict[str, Any] = {"kv_heads": 1}
FACTS: list[tuple[str, str, str, dict[str, Any], str, str]] = [
    ("efficient", "num_heads", "H100", GQA, "2.5.0 2.8 2.13", "2.14 2.15"),
    ("flash", "num_heads", "H100", GQA, "", "2.5.0 2.8 2.15"),
    ("flash", "num_heads", "H100", GQA | {"kv_heads": 3}, "2.5.0 2.8 2.15", ""),
    ("flash", "num_heads", "H100", GQA | {"kv_heads_v": 4}, "2.5.0 2.14 2.15", ""),
    ("cudnn", "num_heads", "H100", GQA | {"kv_heads_v": 4}, "", "2.7 2.8 2.15"),
    ("cudnn", "num_heads", "H100", GQA | {"kv_heads": 3}, "2.8 2.15", "2.5.0 2.7"),
    *[(backend, "num_heads", "H100", MQA, "2.8 2.13", "2.14 2.15") for backend in SDPA_BACKENDS[:3]],
    ("flash", "num_heads", "H100", {"kv_heads": 2}, "2.5.0 2.15", ""),
    ("efficient", "alignment", "H100", {"storage_offset_bytes": 2}, "2.13 2.15", "2.11 2.12"),
    ("efficient", "alignment", "T4", {"storage_offset_bytes": 2}, "", "2.13 2.15"),
    ("efficient", "alignment", "H100", {"storage_offset_bytes": 16}, "", "2.13 2.15"),
    ("flash", "grid_size", "H100", {"batch": 65536}, "2.15", "2.14"),
    ("flash", "grid_size", "H100", {"batch": 65535}, "", "2.15"),
    ("cudnn", "grid_size", "H100", {"heads": 65536, "kv_heads": 65536}, "2.13 2.15", "2.12"),
    ("flash", "capability", "RTX 5090", {}, "2.5.1 2.6", "2.7 2.15"),
    ("flash", "capability", "DGX Spark", {}, "2.7", "2.8"),
    ("flash", "capability", "T4", {}, "2.5.0 2.15", ""),
    ("efficient", "capability", "T4", {}, "", "2.5.0 2.15"),
    ("cudnn", "capability", "B200", {}, "2.6", "2.7"),
    *[
        ("flash", "head_dim_training", gpu, {"head_dim": dim, "dropout": p, "requires_grad": grad}, *when)
        for gpu, dim, p, grad, when in (
            ("L40", 224, 0.0, True, ("2.5.0 2.15", "")),
            ("L40", 224, 0.0, False, ("", "2.5.0 2.15")),
            ("L40", 192, 0.0, True, ("", "2.5.0 2.15")),
            ("L40", 256, 0.0, True, ("", "2.5.0 2.15")),
            ("A40", 256, 0.1, True, ("2.5.0 2.15", "")),
            ("A100", 224, 0.0, True, ("", "2.5.0 2.15")),
            ("RTX 5090", 224, 0.0, True, ("2.7 2.15", "2.6")),
            ("DGX Spark", 224, 0.0, True, ("2.15", "2.14")),
        )
    ],
    ("cudnn", "head_dim", "H100", {"head_dim": 256}, "2.7", "2.8 2.9 2.11 2.14"),
    ("cudnn", "head_dim", "H100", {"head_dim": 264}, "2.8 2.15", ""),
    ("cudnn", "head_dim", "A100", {"head_dim": 256}, "2.11 2.15", ""),
    ("cudnn", "head_dim", "B200", {"head_dim": 256}, "2.11 2.13", "2.14"),
    ("cudnn", "head_dim", "B200", {"head_dim": 192, "head_dim_v": 128}, "2.10", "2.11 2.13 2.14"),
    ("cudnn", "head_dim_training", "H100", {"head_dim": 192, "requires_grad": True}, "2.14", "2.13"),
    ("cudnn", "head_dim_training", "H100", {"head_dim": 256, "requires_grad": True}, "", "2.14"),
    ("cudnn", "seq_len_one", "H100", {"seq_q": 1}, "2.6 2.8", "2.5.1 2.9 2.15"),
    ("cudnn", "seq_len_one", "H100", {"seq_kv": 1}, "2.5.1 2.6 2.9 2.15", ""),
    ("cudnn", "seq_len_one", "H100", {"seq_q": 1, "dropout": 0.5}, "2.9 2.15", "2.5.1"),
    ("cudnn", "decode_disabled", "B200", {"seq_q": 1}, "2.14", "2.13 2.15"),
    ("cudnn", "decode_disabled", "H100", {"seq_q": 1}, "", "2.14"),
    ("cudnn", "dropout", "H100", {"dropout": 0.1}, "2.12 2.15", "2.8 2.11"),
    ("cudnn", "dropout", "H100", {"dropout": 0.125}, "", "2.11 2.12 2.15"),
    ("cudnn", "deterministic", "H100", {"deterministic": "error"}, "2.5.0 2.15", ""),
    ("cudnn", "deterministic", "H100", {"deterministic": "warn_only"}, "", "2.5.0 2.15"),
    ("cudnn", "mask_grad", "H100", {"mask": Mask((512, 512), requires_grad=True)}, "2.5.0 2.15", ""),
    ("cudnn", "mask_shape", "H100", {"mask": Mask((1, 512, 512))}, "2.5.0 2.15", ""),
    ("cudnn", "mask_shape", "H100", {"mask": Mask((1, 8, 512, 1))}, "", "2.5.0 2.15"),
    ("efficient", "mask_grad", "H100", {"mask": Mask((512, 512), requires_grad=True)}, "", "2.15"),
    ("efficient", "last_dim_stride", "H100", {"mask": Mask((512, 512), last_stride=2)}, "2.15", ""),
    ("flash", "last_dim_stride", "H100", {"last_stride": 2, "head_dim": 1}, "", "2.5.0 2.15"),
    ("efficient", "last_dim_stride", "H100", {"last_stride": 2}, "2.5.0 2.15", ""),
    ("flash", "not_4d", "H100", {"ndim": 3}, "2.5.0 2.13", "2.14"),
    ("flash", "dtype", "H100", {"dtype": "fp8_e4m3", "flash_impl": "FA3"}, "2.10", "2.11"),
    ("flash", "dtype", "H100", {"dtype": "fp8_e4m3"}, "2.11 2.15", ""),
    ("flash", "dtype", "A100", {"dtype": "fp8_e4m3", "flash_impl": "FA3"}, "2.11", ""),
    ("flash", "dropout", "H100", {"dropout": 0.5, "flash_impl": "FA4"}, "2.15", "2.14"),
    ("flash", "capability", "A100", {"flash_impl": "FA4"}, "2.15", "2.14"),
    ("flash", "head_dim_multiple", "H100", {"head_dim": 63}, "", "2.5.0 2.15"),
    *[
        (backend, word, "H100", changes, "2.8 2.15", "")
        for backend in ("flash", "efficient", "cudnn")
        for word, changes in (
            ("runtime_disabled", {"enabled": frozenset({"math"})}),
            ("not_on_cuda", {"device": "cpu"}),
            ("not_4d", {"ndim": 5}),
            ("seq_len_zero", {"seq_kv": 0}),
            ("batch_size", {"batch_kv": 3}),
        )
        if (backend, word) != ("flash", "not_on_cuda")  # the CPU has its own flash
    ],
    ("cudnn", "runtime_disabled", "H100", {"enabled": frozenset({"flash"})}, "2.6 2.9", ""),
    ("cudnn", "batch_size", "H100", {"batch_kv": 3}, "2.8", "2.7"),
    ("efficient", "capability", "sm130", {}, "2.5.0 2.15", ""),
    ("efficient", "num_heads", "H100", {"kv_heads": 2}, "2.14", ""),
    ("efficient", "num_heads", "H100", GQA | {"kv_heads": 3}, "2.14", ""),
    ("efficient", "num_heads", "H100", GQA | {"kv_heads_v": 4}, "2.14 2.15", ""),
    ("cudnn", "mask_shape", "H100", {"mask": Mask((2, 4, 512, 512))}, "2.15", ""),
    ("cudnn", "mask_shape", "H100", {"mask": Mask((512, 511))}, "2.15", ""),
    ("math", "runtime_disabled", "H100", {"enabled": frozenset({"flash"})}, "2.15", ""),
    ("cudnn", "head_dim", "H100", {"head_dim": 256}, "2.7.0 2.7.1 2.9.0", "2.8.0 2.9.1 2.12.0 2.14.0"),
    ("flash", "dtype", "sm90", {"dtype": "fp8_e4m3", "device": "cpu"}, "2.13", ""),
    ("flash", "num_heads", "sm90", GQA | {"device": "cpu"}, "2.8", "2.13 2.15"),
    ("flash", "num_heads", "sm90", MQA | {"device": "cpu"}, "2.13", "2.14"),
]  # fmt: skip


@pytest.mark.parametrize(("backend", "word", "gpu", "changes", "refused", "taken"), FACTS)
def test_a_fact_of_the_releases(
    backend: str, word: str, gpu: str, changes: dict[str, Any], refused: str, taken: str
) -> None:
    told = {
        release: word in codes(backend, machine_for(gpu, release), **changes)
        for release in f"{refused} {taken}".split()
    }
    assert told == dict.fromkeys(refused.split(), True) | dict.fromkeys(taken.split(), False)


def test_facts_that_depend_on_the_cudnn_version() -> None:
    blackwell, hopper = machine_for("B200", "2.14"), machine_for("H100", "2.15")
    for version, disabled in ((91800, False), (91900, True), (92400, True), (92401, False),
                              (92500, True), (92501, False)):  # fmt: skip
        machine = replace(blackwell, cudnn=version)
        assert ("decode_disabled" in codes("cudnn", machine, seq_q=1)) is disabled
    training: dict[str, Any] = {"requires_grad": True, "seq_kv": 192}
    assert codes("cudnn", hopper, **training) == set()
    older = replace(hopper, cudnn=92501)
    assert codes("cudnn", older, **training) == {"known_bug"}
    assert codes("cudnn", older, **training | {"seq_kv": 256}) == set()
    assert codes("cudnn", older, **training | {"is_causal": True}) == set()
    assert codes("cudnn", older, seq_kv=192) == set()
    late = machine_for("H100", "2.9")
    for version, refused in ((91100, False), (91101, True), (91399, True), (91400, False)):
        assert ("dropout" in codes("cudnn", replace(late, cudnn=version), dropout=0.5)) is refused
    for version, refused in ((90500, True), (90501, False)):
        old = replace(machine_for("H100", "2.8"), cudnn_compiled=version)
        assert ("head_dim" in codes("cudnn", old, head_dim=256)) is refused
    for version, refused in ((92500, True), (92501, False)):
        rubin = replace(machine_for("sm107", "2.14"), cudnn=version)
        assert ("head_dim" in codes("cudnn", rubin, head_dim=256)) is refused


def test_cudnn_head_dim_limit_depends_on_the_compiled_version_until_2_9_0() -> None:
    call = replace(PLAIN, head_dim=256)

    def eligible(release: str, **changes: Any) -> bool | None:
        return judge("cudnn", call, replace(machine_for("H100", release), **changes)).eligible

    assert eligible("2.8.0", cudnn=90100) is True
    assert eligible("2.9.0", cudnn=91300) is False
    assert eligible("2.9.0", cudnn=None) is False
    assert eligible("2.9.0", cudnn_compiled=91000) is True
    assert eligible("2.9.0", cudnn_compiled=None) is None
    assert eligible("2.9.1", cudnn=90900) is False


def test_text_about_unequal_heads() -> None:
    (reason,) = judge("flash", replace(PLAIN, kv_heads=2), machine_for("A100", "2.14")).reasons
    assert reason.message.startswith(
        "For dense input, both fused kernels require query, key and value to have the"
    )
    assert (
        "Key sizes(): [2, 2, 512, 64], Value sizes(): [2, 2, 512, 64] instead. To" in reason.message
    )


def test_all_reasons_are_returned_and_the_first_is_marked() -> None:
    call = replace(PLAIN, dtype="fp32", head_dim=320, mask=Mask((512, 512)), last_stride=2)
    _, reasons, certain = judge("flash", call, machine_for("H200", "2.11"))
    assert [reason.code for reason in reasons] == ["mask", "head_dim", "dtype", "last_dim_stride"]
    assert certain == reasons
    assert "Got Query.size(-1): 320" in reasons[1].message
    assert "{Half, BFloat16}. Got Query dtype: float," in reasons[2].message


def test_the_first_reason_follows_the_order_of_the_release() -> None:
    call = replace(PLAIN, dtype="fp32", head_dim=63)
    for release, first in (
        ("2.6", "head_dim_multiple"),
        ("2.8", "head_dim_multiple"),
        ("2.9", "dtype"),
    ):
        _, reasons, certain = judge("cudnn", call, machine_for("H100", release))
        assert certain[0].code == first
        assert {reason.code for reason in reasons} == {"dtype", "head_dim_multiple"}


def test_unknown_results_are_reported() -> None:
    untested = predict(PLAIN, machine_for("H100", "2.16"))
    assert (untested.choice, untested.priority_order) == ("unknown", ())
    assert {verdict.eligible for verdict in untested.backends.values()} == {None}
    no_version = replace(machine_for("H100", "2.11"), cudnn=None)
    assert judge("cudnn", replace(PLAIN, head_dim=256), no_version).eligible is None
    assert judge("cudnn", PLAIN, no_version).eligible is True
    assert predict(PLAIN, no_version).choice == "unknown"
    # flash or cuDNN is tried first, but only math can compute the call
    assert predict(replace(PLAIN, dtype="fp64"), no_version).choice == "math"
    assert judge("cudnn", replace(PLAIN, seq_kv=1), machine_for("H100", "2.5.1")).eligible is None
    assert (
        judge("flash", replace(PLAIN, flash_impl="FA4"), machine_for("H100", "2.15")).eligible
        is None
    )
    older_cpu = predict(replace(PLAIN, device="cpu", **GQA), Machine((2, 8, 0)))
    assert older_cpu.choice == "unknown"


def test_flags() -> None:
    machine = machine_for("H200", "2.11")
    only_math = replace(PLAIN, enabled=frozenset({"math"}))
    assert predict(only_math, machine).choice == "math"
    assert codes("cudnn", machine, only_math) == {"runtime_disabled"}
    assert predict(replace(PLAIN, enabled=frozenset()), machine).choice == "none"
    no_math = replace(PLAIN, dtype="fp64", enabled=frozenset({"flash", "efficient", "cudnn"}))
    assert predict(no_math, machine).choice == "none"


def test_hazards_of_the_choice() -> None:
    offset = replace(PLAIN, dtype="fp32", storage_offset_bytes=4)
    before, after = (predict(offset, machine_for("H200", release)) for release in ("2.12", "2.13"))
    assert (before.choice, after.choice) == ("efficient", "math")
    assert "misaligned address" in before.hazards[0]
    assert after.hazards == ()
    expanded = replace(PLAIN, batch_stride_zero=True, head_dim_v=32)
    told = predict(expanded, machine_for("H200", "2.11"))
    assert told.choice == "cudnn"
    assert "stride 0" in told.hazards[0]
    assert predict(replace(expanded, head_dim_v=None), machine_for("H200", "2.11")).hazards == ()


def test_a_config_becomes_params() -> None:
    config = parse_config(
        "2,8,512,64,kv_heads=2,bf16,bwd,deterministic,mask=float_bh,layout=offset1,head_dim_v=32"
    )
    assert from_config(config) == AttentionParams(
        2, 8, 2, 512, 512, 64, dtype="bf16", head_dim_v=32, enable_gqa=True, requires_grad=True,
        deterministic="error", mask=Mask((2, 8, 512, 512)), storage_offset_bytes=2,
    )  # fmt: skip
    assert from_config(parse_config("1,1,8,8"), "cpu").dtype == "fp32"
    assert from_config(parse_config("1,1,8,8,layout=strided_last")).last_stride == 2
    assert from_config(parse_config("1,1,8,8,layout=broadcast_batch")).batch_stride_zero
    assert from_config(parse_config("1,1,8,4,mask=bool_2d")).mask == Mask((8, 8), "bool")


def test_math_raises_for_causal_with_a_mask_and_ends_the_order() -> None:
    config = parse_config("2,8,64,64,fp16,causal,mask=bool")
    for release, choice in (("2.11", "cudnn"), ("2.8", "efficient")):
        told = predict(from_config(config, "cuda"), machine_for("H200", release))
        assert told.choice == choice
        assert [reason.code for reason in told.backends["math"].reasons] == ["causal_mask"]
    grouped = replace(from_config(config, "cuda"), kv_heads=2, enable_gqa=True)
    told = predict(grouped, machine_for("H200", "2.8"))
    assert told.priority_order == ("flash", "efficient", "math", "cudnn")
    assert told.choice == "none"  # cuDNN could compute it, but comes after math
    assert told.backends["cudnn"].eligible is True
    off = replace(grouped, enabled=frozenset({"cudnn", "efficient"}))
    assert predict(off, machine_for("H200", "2.8")).choice == "cudnn"
    environment = {"torch": "2.11.0", "device_type": "cuda", "capability": "9.0", "cudnn": 91900}
    assert predict_cell(config, "math", environment) == "refused"


def test_every_rule_applies_to_some_release() -> None:
    for rules in TABLES.values():
        for rule in rules:
            active = [rule.since <= release < rule.until for release in RELEASES]
            # The span of a rule may be empty on purpose.
            assert any(active) or rule.since >= rule.until, rule


dims = st.sampled_from([1, 8, 63, 64, 128, 136, 192, 200, 224, 256, 264])
masks = st.none() | st.builds(
    Mask,
    st.sampled_from([(7, 64), (1, 1, 7, 64), (2, 8, 7, 64), (3, 7, 64), (7, 63), (4, 4, 7, 64)]),
    st.just("float"),
    st.booleans(),
    st.sampled_from([1, 2]),
)
calls = st.builds(
    AttentionParams,
    batch=st.sampled_from([1, 2, 65536]),
    heads=st.sampled_from([1, 8, 65536]),
    kv_heads=st.sampled_from([1, 2, 3, 8]),
    kv_heads_v=st.none() | st.sampled_from([1, 4]),
    batch_kv=st.none() | st.just(3),
    seq_q=st.sampled_from([0, 1, 7, 512]),
    seq_kv=st.sampled_from([0, 1, 64, 192]),
    head_dim=dims,
    head_dim_v=st.none() | dims,
    dtype=st.sampled_from(["fp16", "bf16", "fp32", "fp64", "fp8_e4m3"]),
    device=st.sampled_from(["cuda", "cuda", "cpu"]),
    ndim=st.sampled_from([3, 4, 4, 5]),
    enable_gqa=st.booleans(),
    is_causal=st.booleans(),
    mask=masks,
    dropout=st.sampled_from([0.0, 0.1, 0.5]),
    requires_grad=st.booleans(),
    last_stride=st.sampled_from([1, 2]),
    storage_offset_bytes=st.sampled_from([0, 2, 16]),
    deterministic=st.sampled_from(["off", "error", "warn_only"]),
    enabled=st.frozensets(st.sampled_from(SDPA_BACKENDS), min_size=2),
    flash_impl=st.sampled_from(["FA2", "FA3", "FA4"]),
)
machines = st.builds(
    Machine,
    torch=st.sampled_from([*RELEASES, (2, 0, 0), (3, 0, 0)]),
    capability=st.sampled_from(sorted({gpu.capability for gpu in GPUS} | {(10, 7), (11, 0)})),
    cudnn=st.none() | st.sampled_from([90100, 91002, 91300, 91900, 92401, 92500, 92600]),
    cuda=st.sampled_from([None, "12.8", "13.0"]),
    cudnn_compiled=st.sampled_from([None, 90800, 91900]),
)


@settings(max_examples=400)
@given(calls, machines)
def test_reasons_eligibility_and_choice_agree(params: AttentionParams, machine: Machine) -> None:
    prediction = predict(params, machine)
    for backend, verdict in prediction.backends.items():
        assert (not verdict.reasons) == (verdict.eligible is True)
        assert bool(verdict.certain) == (verdict.eligible is False)
        assert [reason for reason in verdict.reasons if reason in verdict.certain] == [
            *verdict.certain
        ]
        assert judge(backend, params, machine) == verdict
        for reason in verdict.reasons:
            assert "{p." not in reason.message
            # `capture` derives the same code from PyTorch's text.
            assert code(reason.message) in ({reason.code} if machine.known else {"unknown"})
    if prediction.choice in SDPA_BACKENDS and prediction.priority_order:
        order = prediction.priority_order
        before = order[: order.index(prediction.choice)]
        assert all(prediction.backends[backend].eligible is False for backend in before)
        assert prediction.backends[prediction.choice].eligible
    if prediction.choice == "none":
        order = prediction.priority_order
        if raises_later(prediction.backends["math"]) and "math" in order:
            order = order[: order.index("math")]  # PyTorch checks no backend after it.
        assert not any(prediction.backends[backend].eligible for backend in order)


@settings(max_examples=200)
@given(calls, machines.filter(lambda machine: machine.cudnn is not None))
def test_an_unknown_cudnn_version_never_contradicts_a_known_one(
    params: AttentionParams, machine: Machine
) -> None:
    blind = replace(machine, cudnn=None)
    for backend in SDPA_BACKENDS:
        seen, guess = judge(backend, params, machine), judge(backend, params, blind)
        assert guess.eligible in (None, seen.eligible)
    assert predict(params, blind).choice in ("unknown", predict(params, machine).choice)
