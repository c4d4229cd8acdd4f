"""Facts of 2.0 to 2.4, and of the patch releases that differ from their neighbours: one call each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from profharness.config import parse_config
from profharness.dispatch.early import doubts
from profharness.dispatch.machine import AttentionParams, Machine, Mask, from_config, machine_for
from profharness.dispatch.predict import judge, predict, priority_order

PLAIN = AttentionParams(16, 8, 8, 512, 512, 64)
MASKED = {"mask": Mask((512, 512))}
NESTED = {"nested": True}
TRAINS = {"requires_grad": True}
OLDEST, NEWEST = "2.0.1", "2.4.1"
ALL = "2.0.1 2.1.0 2.1.2 2.2.2 2.3.1 2.4.1"


def codes(backend: str, machine: Machine, **changes: Any) -> list[str]:
    return [reason.code for reason in judge(backend, replace(PLAIN, **changes), machine).reasons]


# backend, code, GPU, changes of the plain call, releases that refuse, releases that do not
FACTS: list[tuple[str, str, str, dict[str, Any], str, str]] = [
    ("flash", "capability", "H100", {}, "2.0.1", "2.1.2 2.2.2 2.4.1"),
    ("flash", "capability", "T4", {}, "2.2.2 2.4.1", "2.0.1 2.1.2"),
    ("flash", "capability", "RTX 5090", {}, ALL, "2.7.0"),
    ("flash", "dtype", "A100", {"dtype": "bf16"}, "", ALL),
    ("flash", "dtype", "T4", {"dtype": "bf16"}, "2.0.1 2.1.2", ""),
    ("flash", "head_dim_multiple", "A100", {"head_dim": 100}, "2.0.1 2.1.2", "2.2.2 2.4.1"),
    ("flash", "head_dim_multiple", "A100", {"head_dim": 256}, "2.0.1 2.1.2", "2.2.2 2.4.1"),
    ("flash", "head_dim", "A100", {"head_dim": 264}, "2.2.2 2.4.1", ""),
    ("flash", "head_dim_training", "RTX 4090", TRAINS | {"head_dim": 72}, "2.0.1 2.1.2", "2.2.2 2.3.1"),
    ("flash", "head_dim_training", "H100", TRAINS | {"head_dim": 72}, "2.0.1", "2.1.2"),
    ("flash", "head_dim_training", "RTX 4090", TRAINS | {"head_dim": 256}, "2.2.2", "2.3.1 2.4.1"),
    ("flash", "head_dim_training", "RTX 4090", TRAINS | {"head_dim": 224}, "2.2.2 2.3.1", ""),
    ("flash", "mask", "A100", MASKED, ALL, ""),
    ("flash", "dropout", "A100", {"dropout": 0.1}, "", ALL),
    ("flash", "causal_non_square", "A100", {"is_causal": True, "seq_q": 64}, "2.2.2 2.4.1", "2.0.1 2.1.2"),
    ("flash", "seq_len_zero", "A100", {"seq_q": 0}, "2.1.2 2.2.2 2.4.1", "2.0.1"),
    ("flash", "last_dim_stride", "A100", {"last_stride": 2}, "2.1.2 2.2.2 2.4.1", "2.0.1"),
    ("flash", "last_dim_stride", "A100", {"last_stride": 2, "head_dim": 1}, "2.2.2", "2.3.1 2.4.1"),
    ("flash", "nested", "A100", NESTED, "2.0.1", "2.1.2 2.2.2"),
    ("flash", "nested", "A100", NESTED | TRAINS | {"kv_heads": 1}, "2.2.2 2.4.1", ""),
    ("flash", "num_heads", "A100", {"kv_heads": 2}, ALL, ""),
    ("flash", "num_heads", "A100", {"batch_kv": 1}, ALL, ""),
    ("efficient", "num_heads", "A100", {"kv_heads": 2}, ALL, ""),
    ("efficient", "capability", "RTX 5090", {}, "2.1.2 2.2.2 2.4.1", "2.0.1"),
    ("efficient", "head_dim", "RTX 4090", {"head_dim": 72}, "2.0.1", "2.1.2 2.2.2"),
    ("efficient", "head_dim", "H100", {"head_dim": 72}, "2.0.1", "2.1.2"),
    ("efficient", "head_dim", "A100", {"head_dim": 72}, "", "2.0.1"),
    ("efficient", "head_dim_multiple", "A100", {"head_dim": 100}, ALL, ""),
    ("efficient", "head_dim_multiple", "A100", {"head_dim": 100, "dtype": "fp32"}, "", ALL),
    ("efficient", "mask", "A100", MASKED, "2.0.1", "2.1.0 2.1.2 2.2.2 2.4.1"),
    ("efficient", "dropout", "A100", {"dropout": 0.1}, "2.0.1", "2.1.2 2.4.1"),
    ("efficient", "deterministic", "A100", {"deterministic": "error"}, "2.0.1", "2.1.2 2.4.1"),
    ("efficient", "deterministic", "A100", {"deterministic": "warn_only"}, "", "2.0.1"),
    ("efficient", "dtype", "T4", {"dtype": "bf16"}, "2.2.2 2.4.1", "2.0.1 2.1.2"),
    ("efficient", "dtype", "sm52", {"dtype": "bf16"}, "2.1.2", "2.0.1"),
    ("efficient", "seq_len_zero", "A100", {"seq_kv": 0}, "2.1.2 2.2.2", "2.0.1"),
    ("efficient", "last_dim_stride", "A100", {"mask": Mask((512, 512), last_stride=2)}, "2.1.2 2.4.1", ""),
    ("efficient", "last_dim_stride", "A100", {"last_stride": 2, "head_dim": 1}, "2.1.2 2.4.1", "2.0.1"),
    ("efficient", "nested", "A100", NESTED | TRAINS, ALL, ""),
    ("efficient", "seq_len_one", "A100", NESTED | {"seq_q": 1}, "2.0.1", "2.1.2"),
    ("cudnn", "not_in_release", "H100", {}, "2.0.1 2.1.2 2.2.2", "2.3.1 2.4.1"),
    ("cudnn", "runtime_disabled", "H100", {}, "2.3.1 2.4.1", "2.2.2"),
    *[(name, "no_argument", "H100", {"enable_gqa": True, "kv_heads": 2}, ALL, "2.5.0")
      for name in ("flash", "efficient", "math")],
    ("math", "no_argument", "A100", {"scaled": True}, "2.0.1", "2.1.2 2.4.1"),
    ("flash", "not_in_release", "sm90", {"device": "cpu"}, "2.0.1", "2.1.2"),
    ("flash", "mask", "sm90", MASKED | {"device": "cpu"}, "2.1.2 2.2.2", "2.3.1 2.4.1"),
    ("flash", "dtype", "sm90", {"device": "cpu"}, "2.1.2 2.2.2", "2.3.1 2.4.1"),
    ("flash", "dropout", "sm90", {"device": "cpu", "dropout": 0.1}, "2.1.2 2.4.1", ""),
    ("cudnn", "head_dim", "H100", {"head_dim": 256}, "2.7.0 2.7.1 2.9.0", "2.8.0 2.9.1 2.12.0 2.14.0"),
]  # fmt: skip


@pytest.mark.parametrize(("backend", "word", "gpu", "changes", "refused", "taken"), FACTS)
def test_a_fact_of_the_releases(
    backend: str, word: str, gpu: str, changes: dict[str, Any], refused: str, taken: str
) -> None:
    answers = {
        release: word in codes(backend, machine_for(gpu, release), **changes)
        for release in f"{refused} {taken}".split()
    }
    assert answers == dict.fromkeys(refused.split(), True) | dict.fromkeys(taken.split(), False)


E, F = "efficient", "flash"


@pytest.mark.parametrize(
    ("release", "changes", "first"),
    [
        ("2.0.1", {}, F),
        ("2.0.1", {"head_dim": 128}, E),
        ("2.0.1", {"batch": 7, "seq_q": 128}, E),  # 56 heads of two blocks
        ("2.0.1", {"batch": 7, "seq_q": 127}, F),
        ("2.0.1", {"batch": 15, "heads": 4, "kv_heads": 4}, F),  # 60 heads are not few
        ("2.0.1", TRAINS, F),
        ("2.0.1", NESTED, E),
        ("2.1.2", {"head_dim": 128}, E),
        ("2.1.2", TRAINS, E),
        ("2.1.2", TRAINS | {"seq_q": 768}, F),  # 6 * 128 = 768 is not more
        ("2.1.2", TRAINS | {"seq_q": 767}, E),
        ("2.1.2", TRAINS | {"seq_q": 768, "head_dim": 128}, F),
        ("2.1.2", {"ndim": 3, "head_dim": 128}, F),
        ("2.2.2", {"head_dim": 128}, F),
        ("2.2.2", TRAINS, F),
    ],
)
def test_the_preference_for_efficient_in_2_0_and_2_1(
    release: str, changes: dict[str, Any], first: str
) -> None:
    call = replace(PLAIN, **changes)
    order = priority_order(call, machine_for("A100", release))
    assert order == (first, {E: F, F: E}[first], "math")


@pytest.mark.parametrize(
    ("release", "choice"), [("2.0.1", "math"), ("2.1.2", "flash"), ("2.4.0", "flash")]
)
def test_the_order_on_a_cpu(release: str, choice: str) -> None:
    call = replace(PLAIN, device="cpu", dtype="fp32")
    assert predict(call, machine_for("sm90", release)).choice == choice
    no_math = replace(call, enabled=frozenset())
    assert predict(no_math, machine_for("sm90", release)).choice == (
        "math" if release == "2.0.1" else "none"
    )


def test_cudnn_of_2_3_and_2_4_is_behind_a_variable() -> None:
    third, fourth = (
        replace(machine_for("H100", release), cudnn_enabled=True) for release in ("2.3.1", "2.4.1")
    )
    strange = replace(PLAIN, dtype="fp32", head_dim=63, requires_grad=True, **MASKED)
    answer = predict(strange, third)
    assert (answer.choice, answer.priority_order[0]) == ("cudnn", "cudnn")
    assert "lose its mask" in answer.hazards[0]
    assert judge("cudnn", strange, fourth).eligible is False
    assert judge("cudnn", PLAIN, fourth).eligible is None  # its layout rule was not read
    assert [reason.code for reason in judge("cudnn", PLAIN, fourth).reasons] == ["layout"]
    for release in ("2.3.1", "2.4.1"):
        assert predict(PLAIN, machine_for("H100", release)).choice == "flash"


def test_the_head_dim_limit_of_cudnn_hangs_on_the_build_until_2_9_0() -> None:
    call = replace(PLAIN, head_dim=256)

    def eligible(release: str, **changes: Any) -> bool | None:
        return judge("cudnn", call, replace(machine_for("H100", release), **changes)).eligible

    assert eligible("2.8.0", cudnn=90100) is True  # whatever is loaded
    assert eligible("2.9.0", cudnn=91300) is False
    assert eligible("2.9.0", cudnn=None) is False
    assert eligible("2.9.0", cudnn_compiled=91000) is True
    assert eligible("2.9.0", cudnn_compiled=None) is None
    assert eligible("2.9.1", cudnn=90900) is False


def test_like_releases_answer_alike() -> None:
    calls = [
        replace(PLAIN, **changes)
        for changes in ({}, TRAINS, MASKED, {"head_dim": 256}, {"head_dim": 100}, {"seq_q": 1})
    ]
    for gpu in ("H100", "A100", "B200"):
        for first, second in (
            *(("2.1.0", "2.1.2"), ("2.1.1", "2.1.2"), ("2.2.0", "2.2.2"), ("2.3.0", "2.3.1")),
            *(("2.4.0", "2.4.1"), ("2.7.0", "2.7.1"), ("2.12.0", "2.12.1"), ("2.14.0", "2.14.1")),
        ):
            machines = machine_for(gpu, first), machine_for(gpu, second)
            for call in calls:
                assert predict(call, machines[0]) == predict(call, machines[1])


def test_what_was_not_read_is_a_doubt() -> None:
    machine = machine_for("A100", "2.2")
    both = replace(PLAIN, is_causal=True, **MASKED)
    assert judge("efficient", both, machine).eligible is None
    assert predict(both, machine).choice == "unknown"
    unlike = predict(replace(PLAIN, is_causal=True, seq_q=256), machine_for("A100", "2.1"))
    assert unlike.choice == "flash" and "is not known" in unlike.hazards[0]
    assert any("preprocessing of attn_mask" in text for text in doubts((2, 1, 0)))
    assert not any("preprocessing of attn_mask" in text for text in doubts((2, 1, 1)))
    assert doubts((2, 5, 0)) == ()
    assert (
        judge("flash", replace(PLAIN, **NESTED, kv_heads=1), machine_for("A100", "2.1")).eligible
        is None
    )


def test_a_config_with_a_scale_or_groups_becomes_the_arguments_of_the_call() -> None:
    grouped = from_config(parse_config("2,8,64,64,kv_heads=2,fp16"))
    assert grouped.enable_gqa and predict(grouped, machine_for("A100", "2.2")).choice == "none"
    scaled = from_config(parse_config("2,8,64,64,scale=0.5,fp16"))
    assert predict(scaled, machine_for("A100", "2.0")).choice == "none"
    assert predict(scaled, machine_for("A100", "2.2")).choice == "flash"


def test_the_texts_of_the_heads() -> None:
    call = replace(PLAIN, kv_heads=2)
    for release, text in (
        ("2.0.1", "Both fused kernels requires query, key and value to have the same batch_size"),
        ("2.4.1", "For dense inputs, both fused kernels require query, key and value to have the"),
        ("2.14.0", "For dense input, both fused kernels require query, key and value to have the"),
        ("2.14.0", "Key sizes(): [16, 2, 512, 64], Value sizes(): [16, 2, 512, 64] instead. To"),
    ):
        messages = [r.message for r in judge("flash", call, machine_for("A100", release)).reasons]
        assert text in messages[0]
