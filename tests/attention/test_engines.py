"""The rules of serving engines: the tables, what `explain --engine` answers, and the import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import profharness
from profharness.attention.config import parse_config
from profharness.attention.engines import ENGINES, engine_releases, rules_of, select
from profharness.cli import cli
from profharness.errors import UsageError

SCRIPTS = Path(__file__).parents[2] / "scripts"
SINKS = "1,64,1,64,kv_heads=8,seq_kv=4096,sinks"
MLA_FP8 = "1,128,1,576,kv_heads=1,mla=512+64,kv_dtype=fp8"


def ask(*words: str) -> Any:
    return CliRunner().invoke(cli, ["explain", *words])


def answer(*words: str) -> dict[str, Any]:
    result = ask(*words, "--format", "json")
    assert result.exit_code == 0, result.output
    read: dict[str, Any] = json.loads(result.stdout)
    return read


# The sources are public: vllm-project/vllm#40153, #36702, the pages "Attention Backend Feature
# Support" of each release, and SGLang's "Attention Backend" page.
@pytest.mark.parametrize(
    ("engine", "release", "config", "capability", "chosen"),
    [
        ("vllm", "0.19.1", SINKS, (12, 0), "TRITON_ATTN"),
        ("vllm", "0.19.1", SINKS, (9, 0), "FLASH_ATTN"),
        ("vllm", "0.19.1", SINKS, (10, 0), "FLASHINFER"),
        ("vllm", "0.25.1", "1,32,512,128,kv_heads=8,causal", (9, 0), "FLASH_ATTN"),
        ("vllm", "0.25.1", "1,32,512,128,kv_heads=8,causal", (10, 0), "FLASHINFER"),
        ("vllm", "0.25.1", "1,32,1,128,kv_heads=8,kv_dtype=fp8", (8, 0), "FLASHINFER"),
        ("vllm", "0.25.1", MLA_FP8, (9, 0), "FLASHMLA"),
        ("vllm", "0.25.1", "1,128,1,576,kv_heads=1,mla=512+64", (9, 0), "FLASH_ATTN_MLA"),
        ("vllm", "0.25.1", MLA_FP8, (10, 0), "FLASHINFER_MLA"),
        ("vllm", "0.33.0", "1,32,1,128,kv_heads=8", "gfx942", "ROCM_ATTN"),
        ("vllm", "0.25.1", "1,32,1,512", "gfx950", "ROCM_AITER_UNIFIED_ATTN"),
        ("vllm", "0.33.0", SINKS, "gfx942", "ROCM_AITER_UNIFIED_ATTN"),
        ("vllm", "0.33.0", SINKS, "gfx90a", "TRITON_ATTN"),
        ("vllm", "0.30.0", "1,128,1,576,kv_heads=1,mla=512+64", "gfx942", "TRITON_MLA"),
        ("sglang", "0.5.6", "1,32,1,128", (10, 0), "flashinfer"),
        ("sglang", "0.5.7", "1,32,1,128", (10, 0), "trtllm_mha"),
        ("sglang", "0.5.23", "1,32,1,128", (9, 0), "fa3"),
        ("sglang", "0.5.10", "1,32,1,64,sinks", (8, 0), "flashinfer"),
        ("sglang", "0.5.11", "1,32,1,64,sinks", (8, 0), "triton"),
    ],
)
def test_the_choice_of_a_release(
    engine: str, release: str, config: str, capability: tuple[int, int] | str, chosen: str
) -> None:
    assert select(engine, release, parse_config(config), "a GPU", capability).chosen == chosen


def test_the_reasons_are_those_that_vllm_logs() -> None:
    made = select("vllm", "0.16.0", parse_config(SINKS), "sm120", (12, 0))
    assert [(each.backend, each.reasons) for each in made.candidates] == [
        ("FLASH_ATTN", ("sink setting not supported",)),
        ("FLASHINFER", ("sink setting not supported",)),
        ("TRITON_ATTN", ()),
        ("FLEX_ATTENTION", ("sink setting not supported",)),
    ]


@pytest.mark.parametrize(
    ("head_dim", "capability", "release", "variant"),
    [
        (128, (9, 0), "0.25.1", "FlashAttention 3"),
        (128, (8, 0), "0.25.1", "FlashAttention 2"),
        (512, (9, 0), "0.33.0", "FlashAttention 4"),
    ],
)
def test_the_version_of_flash_attention(
    head_dim: int, capability: tuple[int, int], release: str, variant: str
) -> None:
    config = parse_config(f"1,32,512,{head_dim},causal")
    made = select("vllm", release, config, "a GPU", capability)
    assert (made.chosen, made.variant) == ("FLASH_ATTN", variant)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_candidate_of_every_release_has_rules(engine: str) -> None:
    rules = rules_of(engine)
    for release in rules.releases:
        covered = {
            each
            for row in rules.orders
            for each in row["capabilities"]
            # the rules of AMD GPUs begin later
            if not each.startswith("gfx") or any(rules.rows(rules.orders, release, each))
        }
        for capability in covered:
            for mla in (False, True):
                for heads in (8, 64):
                    facts = {"heads": heads, "head_dim": 576 if mla else 128, "causal": True}
                    found = rules.candidates(release, capability, mla=mla, facts=facts)
                    assert found, (release, capability, mla)
                    assert all(rules.places[each.since] <= rules.places[release] for each in found)


@pytest.mark.parametrize(
    ("text", "releases"),
    [
        ("0.25", ["0.25.1"]),
        ("0.25.0", ["0.25.0"]),
        ("0.17..0.19", ["0.17.1", "0.18.1", "0.19.1"]),
        ("0.19,0.17", ["0.17.1", "0.19.1"]),
    ],
)
def test_releases(text: str, releases: list[str]) -> None:
    assert engine_releases("vllm", text) == releases


def test_the_default_is_the_newest_release() -> None:
    assert engine_releases("vllm", None) == [rules_of("vllm").releases[-1]]


@pytest.mark.parametrize("text", ["0.1", "0.9..0.12", "newest", "0.25.9", "", "9"])
def test_an_unknown_release_is_an_error(text: str) -> None:
    with pytest.raises(UsageError):
        engine_releases("vllm", text)


def test_explain_names_the_candidates_and_what_to_set() -> None:
    result = ask(MLA_FP8, "--engine", "vllm", "--engine-version", "0.25", "--gpu", "H100")
    assert result.exit_code == 0
    assert " ".join(result.stdout.split()).startswith(
        "vLLM 0.25.1 runs FLASHMLA on an H100, because it refuses FLASH_ATTN_MLA "
    )
    rows = answer(MLA_FP8, "--engine", "vllm", "--engine-version", "0.25", "--gpu", "H100")["rows"]
    of = {row["backend"]: row for row in rows}
    assert of["FLASH_ATTN_MLA"]["setting"] == "--kv-cache-dtype auto"
    assert of["FLASHMLA"]["verdict"] == "runs"
    assert of["TRITON_MLA"]["setting"] == "--attention-backend TRITON_MLA"
    assert of["FLASHINFER_MLA"]["reasons"][0] == "compute capability not supported"


def test_explain_shows_where_the_choice_changed() -> None:
    words = (SINKS, "--engine", "vllm", "--engine-version", "0.16..0.33", "--gpu", "sm120")
    result = ask(*words)
    told = "vLLM runs TRITON_ATTN from 0.16.0 to 0.27.1 and FLASHINFER from 0.28.0 on."
    assert result.stdout.startswith(f"{told}\n")
    table = result.stdout.split("\n\n")[1]
    assert "0.28.0 to 0.33.0  FLASHINFER" in table
    releases = {row["release"] for row in answer(*words)["rows"]}
    assert len(releases) == len(engine_releases("vllm", "0.16..0.33"))


def test_a_backend_that_is_not_the_default_of_sglang_is_not_called_refused() -> None:
    words = ("1,32,1,128", "--engine", "sglang", "--engine-version", "0.5.23", "--gpu", "A100")
    rows = {row["backend"]: row for row in answer(*words)["rows"]}
    assert {name: row["verdict"] for name, row in rows.items()} == {
        "fa3": "not default",
        "trtllm_mha": "not default",
        "flashinfer": "runs",
        "triton": "not tried",
    }
    assert "whether another backend works on this GPU is unknown" in " ".join(
        ask(*words).stdout.split()
    )


def test_a_page_that_no_candidate_before_takes_is_a_reason() -> None:
    paged = "1,128,1,576,kv_heads=1,mla=512+64,page=32"
    rows = answer(paged, "--engine", "vllm", "--engine-version", "0.25", "--gpu", "H100")["rows"]
    (row,) = (row for row in rows if row["backend"] == "FLASHMLA")
    assert row["reasons"] == ["block_size not supported"]
    assert row["setting"].startswith("no --block-size")


def test_python_returns_a_row_for_each_candidate() -> None:
    made = profharness.explain(SINKS, engine="vllm", engine_version="0.19", gpu="sm120")
    assert list(made[made.verdict == "runs"].backend) == ["TRITON_ATTN"]
    assert made.attrs["selections"][0].chosen == "TRITON_ATTN"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--engine-version", "0.25"), "--engine-version requires --engine"),
        (("--engine", "vllm", "--torch", "2.11", "--gpu", "H100"), "--torch is about PyTorch"),
        (("--engine", "vllm", "--engine-version", "0.1", "--gpu", "H100"), "do not cover vLLM 0.1"),
        (("--engine", "vllm", "--gpu", "V100"), "do not cover V100 (compute capability 7.0)"),
        (("--engine", "vllm", "--gpu", "H10O"), "unknown GPU 'H10O'"),
        (("--engine", "tgi", "--gpu", "H100"), "'tgi' is not one of"),
    ],
)
def test_wrong_usage_is_refused(words: tuple[str, ...], message: str) -> None:
    result = ask("1,32,1,128", *words)
    assert result.stdout == ""
    if not isinstance(result.exception, UsageError):  # Click itself refused the command line
        assert (result.exit_code, message in result.stderr) == (2, True)
    else:
        assert message in str(result.exception)


def test_a_bidirectional_config_is_doubted() -> None:
    result = ask("2,8,512,64", "--engine", "vllm", "--gpu", "H100")
    assert "The config is bidirectional; for a decoder, add causal" in result.stdout


VLLM = {  # a tree in the layout of vLLM, with two backends
    "vllm/__init__.py": "",
    "vllm/envs.py": "",
    "vllm/platforms/interface.py": """
import enum
from typing import NamedTuple
class PlatformEnum(enum.Enum):
    CUDA = 1
class DeviceCapability(NamedTuple):
    major: int
    minor: int
class Platform:
    pass
""",
    "vllm/platforms/cuda.py": """
import pynvml
from functools import cache
from vllm.v1.attention.backends.registry import AttentionBackendEnum as B
@cache
def _get_backend_priorities(use_mla, device_capability, num_heads=None):
    if device_capability.major == 10:
        return [B.SLOW, B.FAST]
    return [B.FAST, B.SLOW]
""",
    "vllm/v1/attention/backend.py": """
import torch
class AttentionBackend:
    @classmethod
    def validate_configuration(cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink,
                               device_capability):
        return cls.check(head_size, kv_cache_dtype, block_size, has_sink, device_capability)
""",
    "vllm/v1/attention/backends/__init__.py": "",
    "vllm/v1/attention/backends/registry.py": """
import enum
from vllm.utils.import_utils import resolve
class AttentionBackendEnum(enum.Enum):
    FAST = "Fast"
    SLOW = "Slow"
    def get_class(self):
        import vllm.v1.attention.backends.both as both
        return getattr(both, self.value)
""",
    "vllm/v1/attention/backends/fa_utils.py": """
from vllm.platforms import current_platform
def get_flash_attn_version(head_size=None):
    major = current_platform.get_device_capability().major
    return 3 if major == 9 and head_size <= 256 else 2
""",
    "vllm/v1/attention/backends/both.py": """
import triton
from vllm.v1.attention.backend import AttentionBackend
@triton.jit
def kernel(x: tl.constexpr):
    pass
class Fast(AttentionBackend):
    @classmethod
    def check(cls, head_size, kv_cache_dtype, block_size, has_sink, capability):
        reasons = []
        if capability.major < 9:
            reasons.append("needs SM 9")
        if kv_cache_dtype.startswith("fp8") and head_size > 256:
            reasons.append("no wide fp8")
        if block_size not in (None, 64):
            reasons.append("page of 64 only")
        return reasons
class Slow(AttentionBackend):
    @classmethod
    def check(cls, *_):
        return []
""",
}
SGLANG = """
def _get_default_attn_backend(self, use_mla_backend, model_config):
    if not use_mla_backend:
        if is_hopper_with_cuda_12_3() and is_no_spec_infer_or_topk_one(self):
            return "fa3"
        elif is_hip():
            return "aiter"
        return "flashinfer" if is_flashinfer_available() else "triton"
    elif is_sm100_supported():
        return "flashinfer"
    else:
        return "triton"
"""


def imported(tmp_path: Path, engine: str, release: str, files: dict[str, str]) -> Any:
    folder = tmp_path / f"{engine}-{release}"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    script = SCRIPTS / "import_engine_rules.py"
    command = [sys.executable, str(script), engine, str(folder), "--out", str(tmp_path / "rules")]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_rules_are_imported_from_the_functions_of_a_tree(tmp_path: Path) -> None:
    done = imported(tmp_path, "vllm", "1.2.3", VLLM)
    assert done.returncode == 0, done.stderr
    assert "3,600 have the same accepted backends, and 3,600 also the same reasons" in done.stdout
    rules = json.loads((tmp_path / "rules" / "vllm.json").read_text())
    assert rules["releases"] == ["1.2.3"]
    (fast,) = (
        row
        for row in rules["refusals"]
        if row["backend"] == "FAST" and not row["mla"] and "9.0" in row["capabilities"]
    )
    assert fast["refusals"] == [
        {"page": [1, 8, 16, 32, 128, 256], "reason": "page of 64 only"},
        {"head_dim": [[264, 1024, 8]], "kv_dtype": ["fp8_e4m3"], "reason": "no wide fp8"},
        {"head_dim": [[264, 1024, 8]], "kv_dtype": ["fp8_e5m2"], "reason": "no wide fp8"},
    ]


def test_rules_are_imported_from_the_conditions_of_sglang(tmp_path: Path) -> None:
    done = imported(tmp_path, "sglang", "1.2", {"python/sglang/srt/server_args.py": SGLANG})
    assert done.returncode == 0, done.stderr
    rules = json.loads((tmp_path / "rules" / "sglang.json").read_text())
    orders = {row["mla"]: row["backends"] for row in rules["orders"]}
    assert orders == {False: ["fa3", "flashinfer", "triton"], True: ["flashinfer", "triton"]}


@pytest.mark.parametrize(
    ("engine", "files", "message"),
    [
        ("sglang", {"python/sglang/srt/a.py": "x = 1"}, "no statement that selects"),
        (
            "sglang",
            {"python/sglang/srt/a.py": SGLANG.replace("is_hip()", "is_new_device()")},
            "is_new_device",
        ),
        ("vllm", {"vllm/__init__.py": ""}, "vllm-1.2"),
    ],
)
def test_a_tree_without_rules_changes_nothing(
    tmp_path: Path, engine: str, files: dict[str, str], message: str
) -> None:
    done = imported(tmp_path, engine, "1.2", files)
    assert done.returncode == 1
    assert message in done.stderr
    assert not list((tmp_path / "rules").glob("*"))


def test_what_the_switch_of_aiter_changes_is_said() -> None:
    decode = parse_config("1,64,1,64,kv_heads=8,sinks")
    made = select("vllm", "0.33.0", decode, "MI300X", "gfx942")
    assert made.chosen == "ROCM_AITER_UNIFIED_ATTN"
    (doubt,) = made.doubts
    assert "With VLLM_ROCM_USE_AITER=1, vLLM also considers ROCM_AITER_FA and runs" in doubt
    assert select("vllm", "0.33.0", decode, "MI210", "gfx90a").doubts == ()


def test_explain_answers_for_an_amd_gpu() -> None:
    made = profharness.explain("1,32,1,128,kv_heads=8", engine="vllm", gpu="MI300X")
    assert made["backend"].iloc[0] == "ROCM_ATTN"
    assert {*made["verdict"]} == {"runs", "accepted", "refused"}
    assert {*made["gpu"]} == {"MI300X"}
