"""Dispatch on AMD GPUs: facts of the releases and of AOTriton, and what `explain` says."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import profharness
from profharness.attention.config import SDPA_BACKENDS, parse_config
from profharness.attention.dispatch import rocm
from profharness.attention.dispatch.advice import advise, rule_choice, rule_oracle
from profharness.attention.dispatch.by_rule import explain_by_rule, named_platforms
from profharness.attention.dispatch.machine import (
    AttentionParams,
    Machine,
    Mask,
    default_release,
    machine_for,
    machine_of,
    rules_know,
)
from profharness.attention.dispatch.predict import code, judge, predict
from profharness.commands.explain import answer as sentences
from profharness.errors import UsageError

PLAIN = AttentionParams(2, 8, 8, 512, 512, 64)
ROCM_ORDER = ("flash", "efficient", "math")
ALL = "2.5.0 2.6 2.7 2.8 2.9 2.10 2.11 2.12 2.13 2.14"
GQA: dict[str, Any] = {"kv_heads": 2, "enable_gqa": True}


def codes(backend: str, machine: Machine, **changes: Any) -> set[str]:
    return {reason.code for reason in judge(backend, replace(PLAIN, **changes), machine).reasons}


# backend, code, GPU, changes of the plain call, releases that refuse, releases that do not
FACTS: list[tuple[str, str, str, dict[str, Any], str, str]] = [
    # head_dim: AOTriton 0.9 raised the limit from 256 to 512
    *[
        (backend, "head_dim", "MI300X", {"head_dim": dim}, refused, taken)
        for backend in ("flash", "efficient")
        for dim, refused, taken in (
            (256, "", ALL),
            (264, "2.5.0 2.6", "2.7 2.8 2.9 2.13 2.14"),
            (512, "2.5.0 2.5.1 2.6", "2.7 2.12 2.13 2.14"),
            (520, ALL, ""),
        )
    ],
    ("flash", "head_dim", "MI300X", {"head_dim": 257}, "2.6", "2.7 2.14"),
    ("flash", "head_dim", "MI300X", {"head_dim": 513}, ALL, ""),
    ("flash", "head_dim", "gfx1100", {"head_dim": 264}, "2.6 2.9 2.10 2.11 2.12", "2.7 2.8 2.13 2.14"),
    ("efficient", "head_dim", "gfx1151", {"head_dim": 264}, "2.9 2.12", "2.13 2.14"),
    ("flash", "head_dim", "gfx1201", {"head_dim": 264}, "", "2.9 2.12"),
    # flash wants equal dims, efficient only before AOTriton 0.12
    ("flash", "head_dim", "MI300X", {"head_dim": 192, "head_dim_v": 128}, ALL, ""),
    ("efficient", "head_dim", "MI300X", {"head_dim": 192, "head_dim_v": 128}, "2.5.0 2.8 2.12", "2.13 2.14"),
    ("efficient", "head_dim_multiple", "MI300X", {"head_dim": 100}, "2.9 2.10 2.12 2.13 2.14", "2.5.0 2.8"),
    ("efficient", "head_dim_multiple", "MI300X", {"head_dim": 100, "dtype": "fp32"}, "", ALL),
    ("efficient", "head_dim_multiple", "MI300X", {"head_dim": 64, "head_dim_v": 36}, "2.13 2.14", ""),
    ("flash", "head_dim_multiple", "MI300X", {"head_dim": 100}, "", ALL),
    # architectures
    *[
        (backend, word, gpu, {}, refused, taken)
        for backend in ("flash", "efficient")
        for word, gpu, refused, taken in (
            ("capability", "MI210", "", ALL),
            ("capability", "MI300A", "", ALL),
            ("experimental", "MI325X", "", ALL),
            ("capability", "MI355X", "2.5.0 2.6", "2.7 2.8 2.14"),
            ("experimental", "MI350X", "2.7", "2.8 2.9 2.13 2.14"),
            ("capability", "gfx1030", ALL, ""),
            ("experimental", "gfx1100", "2.5.0 2.5.1 2.9", "2.6 2.7 2.8 2.10 2.13"),
            ("capability", "gfx1201", "2.5.0 2.6", "2.7 2.14"),
            ("experimental", "gfx1201", "2.7", "2.8 2.14"),
            ("experimental", "gfx1151", "2.9 2.12", "2.13 2.14"),
        )
    ],
    # masks, dropout, causal, dtypes, strides, grouped heads
    ("flash", "mask", "MI300X", {"mask": Mask((512, 512))}, ALL, ""),
    ("efficient", "mask", "MI300X", {"mask": Mask((512, 512))}, "", ALL),
    ("flash", "dropout", "MI300X", {"dropout": 0.1}, "", ALL),
    ("efficient", "dropout", "MI300X", {"dropout": 0.1}, "", ALL),
    ("flash", "causal_non_square", "MI300X", {"is_causal": True, "seq_q": 256}, ALL, ""),
    ("efficient", "causal_non_square", "MI300X", {"is_causal": True, "seq_q": 256}, "", ALL),
    ("flash", "dtype", "MI300X", {"dtype": "fp32"}, ALL, ""),
    ("efficient", "dtype", "MI300X", {"dtype": "fp32"}, "", ALL),
    ("efficient", "dtype", "MI210", {"dtype": "bf16"}, "", ALL),
    ("efficient", "dtype", "MI300X", {"dtype": "fp64"}, ALL, ""),
    ("flash", "last_dim_stride", "MI300X", {"last_stride": 2}, ALL, ""),
    ("efficient", "last_dim_stride", "MI300X", {"last_stride": 2}, ALL, ""),
    ("efficient", "alignment", "MI300X", {"storage_offset_bytes": 2}, "", ALL),
    ("flash", "num_heads", "MI300X", GQA, "2.5.0 2.5.1", "2.6 2.8 2.14"),
    ("efficient", "num_heads", "MI300X", GQA, ALL, ""),
    ("flash", "num_heads", "MI300X", {"kv_heads": 1}, "2.6 2.13", "2.14"),
    ("efficient", "num_heads", "MI300X", {"kv_heads": 1}, "2.13 2.14", ""),
    ("flash", "seq_len_zero", "MI300X", {"seq_kv": 0}, ALL, ""),
    ("flash", "deterministic", "MI300X", {"deterministic": "error"}, "", ALL),
    ("efficient", "deterministic", "MI300X", {"deterministic": "error"}, "", ALL),
    # PyTorch's check for sm120 also matches RDNA 4, whose capability is 12.0
    *[
        ("flash", "head_dim_training", gpu, {"head_dim": 224, "requires_grad": True}, refused, taken)
        for gpu, refused, taken in (("gfx1201", "2.8 2.14", "2.6"), ("MI300X", "", ALL))
    ],
    ("cudnn", "not_compiled", "MI300X", {}, ALL, ""),
    ("math", "runtime_disabled", "MI300X", {"enabled": frozenset({"flash"})}, ALL, ""),
    ("math", "causal_mask", "MI300X", {"mask": Mask((512, 512)), "is_causal": True}, ALL, ""),
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


def test_flash_comes_first_and_cudnn_never() -> None:
    for release in ALL.split():
        told = predict(PLAIN, machine_for("MI300X", release))
        assert (told.choice, told.priority_order) == ("flash", ROCM_ORDER)
    first = predict(replace(PLAIN, priority=("efficient", "flash")), machine_for("MI300X", "2.9"))
    assert first.choice == "efficient"
    only = predict(replace(PLAIN, enabled=frozenset({"cudnn"})), machine_for("MI300X", "2.9"))
    assert only.choice == "none"


def test_the_text_of_each_refusal_has_its_code() -> None:
    call = replace(PLAIN, head_dim=1000, head_dim_v=999, mask=Mask((512, 512)), is_causal=True)
    for release in ALL.split():
        for gpu in ("MI300X", "MI355X", "gfx1030", "gfx1201", "gfx1100"):
            machine = replace(machine_for(gpu, release), aotriton=None)
            for backend in SDPA_BACKENDS:
                for reason in judge(backend, call, machine).reasons:
                    assert code(reason.message) == reason.code
                    assert "{" not in reason.message


def test_the_experimental_variable_and_the_version_change_the_answer() -> None:
    machine = machine_for("MI355X", "2.7")
    assert predict(PLAIN, machine).choice == "math"
    assert predict(PLAIN, replace(machine, experimental=True)).choice == "flash"
    assert predict(PLAIN, machine_for("MI355X", "2.7", aotriton="0.10b")).choice == "flash"
    # a build of 2.13 with an older AOTriton applies the rule for nested tensors to all calls
    older = machine_for("MI300X", "2.13", aotriton="0.11.2b")
    assert codes("efficient", older, head_dim=264) == {"head_dim_multiple"}
    assert codes("efficient", older, head_dim=256) == set()


def test_ck_is_accepted_without_a_look() -> None:
    experimental = machine_for("MI355X", "2.9", fa_library="ck", aotriton="0.9")
    assert codes("flash", experimental) == codes("efficient", experimental) == set()
    ck = machine_for("MI300X", "2.13", fa_library="ck")
    assert codes("efficient", ck, dtype="fp32") == {"dtype"}
    told = predict(replace(PLAIN, head_dim=320), ck)
    assert told.choice == "flash"
    assert "at most 256" in told.hazards[0]
    # PyTorch does not accept CK there
    assert "capability" in codes("flash", machine_for("gfx1030", "2.13", fa_library="ck"))
    assert codes("efficient", machine_for("MI210", "2.13", fa_library="ck"), dtype="fp32") == set()
    early = machine_for("MI355X", "2.6", fa_library="ck")
    assert codes("flash", early) == {"capability"}


def test_what_the_sources_leave_open_is_unknown() -> None:
    verdict = judge("efficient", replace(PLAIN, head_dim=100), machine_for("MI300X", "2.9"))
    assert verdict.eligible is None
    assert verdict.reasons[0].message.startswith(
        "It is unknown whether this release has this check"
    )
    machine = machine_for("gfx1250", "2.14")
    assert machine.aotriton is None
    assert machine.aotriton_versions == ((0, 12, 1), (0, 13, 0))
    # both possible versions have the same limits
    assert predict(PLAIN, machine_for("MI300X", "2.14")).choice == "flash"
    assert predict(PLAIN, machine_for("MI300X", "2.15")).choice == "unknown"


def test_hazards() -> None:
    causal = replace(PLAIN, is_causal=True, seq_q=256)
    early, later = (predict(causal, machine_for("MI300X", release)) for release in ("2.5", "2.6"))
    assert early.choice == later.choice == "efficient"
    assert "last key" in early.hazards[0]
    assert later.hazards == ()
    wide = replace(PLAIN, head_dim=512)
    assert "148967" in predict(wide, machine_for("MI300X", "2.7")).hazards[0]
    assert predict(wide, machine_for("MI300X", "2.8")).hazards == ()
    masked = replace(PLAIN, head_dim=100, mask=Mask((512, 512)))
    assert "16 bytes" in predict(masked, machine_for("MI300X", "2.8")).hazards[0]


@pytest.mark.parametrize(
    ("text", "name", "architecture", "capability"),
    [
        ("MI300X", "MI300X", "gfx942", (9, 4)),
        ("mi250x", "MI250X", "gfx90a", (9, 0)),
        ("AMD Instinct MI300X VF", "MI300X", "gfx942", (9, 4)),
        ("AMD Instinct MI210", "MI210", "gfx90a", (9, 0)),
        ("gfx942:sramecc+:xnack-", "gfx942", "gfx942", (9, 4)),
        ("gfx1100", "gfx1100", "gfx1100", (11, 0)),
        ("MI355X", "MI355X", "gfx950", (9, 5)),
    ],
)
def test_names_of_gpus(
    text: str, name: str, architecture: str, capability: tuple[int, int]
) -> None:
    found = rocm.find_amd_gpu(text)
    assert found is not None
    assert (found.name, found.architecture, found.capability) == (name, architecture, capability)


@pytest.mark.parametrize("text", ["H100", "sm90", "9.4", "cpu", "MI999", "gfx", "H100,MI300X", ""])
def test_other_names_are_no_amd_gpu(text: str) -> None:
    assert rocm.find_amd_gpu(text) is None


def test_versions_of_aotriton() -> None:
    for text, version in (("0.9.2b", (0, 9, 2)), ("0.10", (0, 10, 0)), (" 0.11b ", (0, 11, 0))):
        assert rocm.parse_aotriton(text) == version
    assert rocm.version_text((0, 10, 0)) == "0.10b"
    assert rocm.version_text((0, 9, 2)) == "0.9.2b"
    for wrong in ("9", "b", "0.9.2.1", "latest"):
        with pytest.raises(UsageError, match="invalid AOTriton version"):
            rocm.parse_aotriton(wrong)
    assert rocm.kernels_of((0, 9, 2)) == rocm.VERSIONS[0, 9, 0]
    assert rocm.kernels_of((0, 1, 0)) == rocm.VERSIONS[0, 7, 0]
    assert {v for versions in rocm.RELEASES.values() for v in versions} <= {
        *rocm.VERSIONS,
        (0, 9, 2),
    }


def test_an_environment_becomes_the_same_machine() -> None:
    for given in ({}, {"fa_library": "ck"}, {"experimental": True}, {"aotriton": "0.10b"}):
        (platform,) = named_platforms("2.9", "MI300X", **given)  # type: ignore[arg-type]
        assert machine_of(platform.environment) == platform.machine
        assert rules_know(platform.environment)
    recorded = {"torch": "2.8.0+rocm6.4", "device_type": "cuda", "gpu": "AMD Instinct MI300X"}
    assert machine_of(recorded) == machine_for("MI300X", "2.8.0")
    variables = {"TORCH_ROCM_FA_PREFER_CK": "1", "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "1"}
    machine = machine_of(recorded | {"env": variables})
    assert (machine.fa_library, machine.experimental) == ("ck", True)
    # a ROCm build on a GPU that is not in the table
    other = recorded | {"gpu": "AMD Radeon Graphics", "capability": "11.0"}
    assert not rules_know(other)


def test_the_default_release_has_known_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    from profharness.attention.dispatch import machine

    monkeypatch.setattr(machine, "installed_release", lambda: (2, 15, 0))
    assert default_release() == (2, 15, 0)
    assert default_release(architecture="gfx942") == max(rocm.RELEASES)


def test_the_answer_names_the_op_and_the_library() -> None:
    def said(text: str, torch: str = "2.7", gpu: str = "MI300X", **given: Any) -> str:
        (platform,) = named_platforms(torch, gpu, **given)
        answer = explain_by_rule(parse_config(text), platform)
        return " ".join([*sentences.explain_answer(answer), *answer.caveats])

    text = said("2,8,512,64,bf16")
    assert "run flash (computed by AOTriton 0.9.2b) on an MI300X, its first choice" in text
    assert "The answer assumes AOTriton 0.9.2b" in text
    for word in ("cuDNN", "CUDA", "Hopper", "FA3", "sdp_kernel leaves"):
        assert word not in text
    assert "efficient (computed by CK)" in said("2,8,512,64,mask=bool", fa_library="ck")
    assert "USE_ROCM_CK_SDPA" in said("2,8,512,64", fa_library="ck")
    assert "USE_ROCM_CK_SDPA" not in said("2,8,512,64", "2.13", fa_library="ck")
    refused = said("2,8,512,64", "2.13", "MI210", fa_library="ck")
    assert "PyTorch does not accept CK on gfx90a" in refused
    assert "exists only in 2.7 and newer" in said("2,8,512,64", "2.6", fa_library="ck")
    assert "run math on a gfx1030" in said("2,8,512,64", gpu="gfx1030")
    assert "AOTriton 0.12.1b or 0.13b" in said("2,8,512,64", "2.14")


def test_advice_makes_sense_on_amd() -> None:
    machine = machine_for("MI355X", "2.7")
    config = parse_config("2,8,512,64,bf16")
    asked = rule_oracle(machine), rule_choice(machine)
    (advice,) = advise(config, "flash", *asked)
    assert "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1" in advice.change
    assert advice.verified is None
    assert "os.environ" in advice.code
    machine = machine_for("MI300X", "2.9")
    asked = rule_oracle(machine), rule_choice(machine)
    texts = [
        each.change
        for text in ("2,8,512,64,head_dim_v=32", "2,8,512,64,mask=bool", "2,8,512,64,fp32")
        for each in advise(parse_config(text), "flash", *asked)
    ]
    assert any("pad both head_dim" in text for text in texts)
    assert not any("cudnn" in text.lower() for text in texts)
    for gpu, needed in (("MI300X", False), ("H100", True)):
        (platform,) = named_platforms("2.9", gpu)
        answer = explain_by_rule(parse_config("2,8,512,64,mask=bool"), platform, asked="flash>math")
        codes_shown = [each.code for side in answer.backends for each in side.advice]
        assert any("_fused_sdp_choice" in each for each in codes_shown) is needed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": "MI300X", "cudnn": "9.10.0"}, "--cudnn applies only to an NVIDIA GPU"),
        ({"gpu": "MI300X", "cuda": "12.8"}, "--cuda applies only to an NVIDIA GPU"),
        ({"gpu": "H100", "aotriton": "0.9"}, "--aotriton applies only to an AMD GPU"),
        ({"gpu": "H100", "rocm_fa": "ck"}, "--rocm-fa applies only to an AMD GPU"),
        ({"gpu": "cpu", "aotriton_experimental": True}, "do not apply to a CPU"),
        ({"gpu": "MI300X", "aotriton": "new"}, "invalid AOTriton version"),
        ({"gpu": "MI300X", "engine": "sglang"}, "SGLang do not cover AMD GPUs"),
        ({"gpu": "gfx1100", "engine": "vllm"}, "do not cover gfx1100"),
        (
            {"gpu": "MI300X", "engine": "vllm", "engine_version": "0.20"},
            "releases 0.25.1 to 0.33.0 do",
        ),
        ({"aotriton": "0.9"}, "--aotriton requires --torch or --gpu"),
    ],
)
def test_options_that_do_not_fit_the_gpu(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        profharness.explain("2,8,512,64", **options)


def test_a_frame_and_a_range_of_releases() -> None:
    made = profharness.explain("2,8,512,512,bf16", gpu="MI300X", torch="2.5..2.13")
    assert [*made["predicted"].unique()] == ["math", "flash"]
    assert {answer.computed_by for answer in made.attrs["answers"]} >= {None, "AOTriton 0.12b"}
    record = json.loads(json.dumps(made.attrs["answers"][-1].environment))
    assert record["architecture"] == "gfx942"
    assert record["aotriton"] == "0.12b"
    assert {*made["architecture"]} == {"gfx942"}
    assert made["computed_by"].iloc[-1] == "AOTriton 0.12b"


def test_predict_gives_the_choice_without_a_time() -> None:
    made = profharness.predict("2,8,512,64,bf16", gpu="MI300X", torch="2.9")
    (row,) = made[made["backend"] == "auto"].to_dict("records")
    assert row["choice"] == "flash"
    assert "no atlas for MI300X" in made.attrs["doubt"]


def _trace(calls: list[tuple[str, list[int], str]]) -> dict[str, Any]:
    """Return a Kineto trace of an MI300X with calls of SDPA: the op, the sizes and is_causal."""
    events = []
    for number, (op, sizes, causal) in enumerate(calls):
        args = {
            "Input Dims": [sizes, sizes, sizes, [], [], [], [], []],
            "Input type": ["c10::BFloat16"] * 3 + ["", "Scalar", "Scalar", "", "Scalar"],
            "Concrete Inputs": ["", "", "", "", "0.", causal, "", "False"],
        }
        for name, start in (("aten::scaled_dot_product_attention", 0), (op, 1)):
            event = {"ph": "X", "pid": 1, "tid": 1, "name": name, "args": args}
            events.append(event | {"ts": 100 * number + start, "dur": 50 - 2 * start})
    device = {"name": "AMD Instinct MI300X VF", "computeMajor": 9, "computeMinor": 4}
    return {"deviceProperties": [device], "traceEvents": events}


@pytest.mark.parametrize(
    ("op", "status", "said"),
    [
        ("aten::_scaled_dot_product_flash_attention", 0, "2/2 agree as in 2.7.0, 2.7.1"),
        ("aten::_scaled_dot_product_attention_math", 1, "1/2 agree in 2.5.0 1 ran math"),
    ],
)
def test_the_rules_are_held_against_traces(tmp_path: Path, op: str, status: int, said: str) -> None:
    flash = "aten::_scaled_dot_product_flash_attention"
    calls = [
        (flash, [1, 12, 77, 64], "True"),
        (op, [1, 12, 77, 512 if not status else 64], "False"),
    ]
    (tmp_path / "trace.json").write_text(json.dumps(_trace(calls)))
    command = [sys.executable, "scripts/check_rocm_dispatch.py", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (status, "")
    assert said in done.stdout


@pytest.mark.parametrize("value", ["x", 5, [1], {"a": 1}, True])
def test_an_invalid_version_of_aotriton_in_an_environment_is_unknown(value: object) -> None:
    """Bug: a recorded environment with such a value raised an exception."""
    environment = {"torch": "2.9.1+rocm6.4", "architecture": "gfx942", "aotriton": value}
    assert machine_of(environment) == machine_for("MI300X", "2.9.1")


def test_a_recorded_environment_names_its_architecture() -> None:
    environment = {"torch": "2.9.1+rocm6.4", "architecture": "gfx950", "gpu": "AMD Radeon Graphics"}
    assert machine_of(environment).architecture == "gfx950"
