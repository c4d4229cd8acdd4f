"""flash_triton without a GPU: correct under Triton's interpreter, compiled for sm_90 without
spills, refused where it cannot run, its tuning stored with the cell.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import interpreted
import pytest
from click.testing import CliRunner

from profharness.attention.backends import find_backend
from profharness.attention.config import parse_config
from profharness.cli import cli
from profharness.run import read_run

pytest.importorskip("triton")

HERE = Path(__file__).parent
# for results of magnitude 1 to 4: the last digit of a dtype times the length of a row's sum
ALLOWED = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 8e-2}
MAX_SHARED_BYTES = 227 * 1024  # per block on sm_90
MAX_STACK_BYTES = 48  # with Triton 3.9; 16 with 3.6
OFFERS = """
import sys, torch
asked = []
def attention(q, k, v, *, is_causal=False, scale=None, enable_gqa=False):
    asked.append(q.shape)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
def tuning():
    return {answer}
"""


def told(program: str, *arguments: str, **variables: str) -> list[dict[str, Any]]:
    """Run a program of this folder. Return its JSON lines."""
    done = subprocess.run(
        [sys.executable, HERE / program, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


# the fixtures are slow: one process creates them once
pytestmark = pytest.mark.xdist_group("flash-triton")


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    lines = told("interpreted.py", TRITON_INTERPRET="1")
    return {line["case"]: line for line in lines}


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    cache = tmp_path_factory.mktemp("triton")
    return told("compiled.py", TRITON_CACHE_DIR=str(cache), TRITON_INTERPRET="0")


@pytest.mark.parametrize("name", interpreted.CASES)
def test_results_agree_with_naive_in_fp64(results: dict[str, dict[str, Any]], name: str) -> None:
    case, errors = interpreted.CASES[name], results[name]["errors"]
    assert list(errors) == (["out", "dq", "dk", "dv"] if case.bwd else ["out"])
    assert max(errors.values()) < ALLOWED[case.dtype], errors


def test_tuning_has_the_tiles_of_the_last_call(results: dict[str, dict[str, Any]]) -> None:
    tuning = results["fp16"]["tuning"]
    assert set(tuning) == {"forward", "backward_kv", "backward_q"}
    assert set(tuning["forward"]) == {
        *("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "variant"),
    }
    assert set(results["forward"]["tuning"]) == {"forward"}
    assert not results["forward"]["needs_grad"]


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("fp16", "tma"), ("tma_head_dim_72", "tma"), ("bshd", "tma"),
        ("head_dim_33", "pointers"), ("fp32_causal", "pointers"), ("offset", "pointers"),
        ("broadcast", "pointers"),
    ],
)  # fmt: skip
def test_tma_reads_aligned_rows_only(
    results: dict[str, dict[str, Any]], name: str, variant: str
) -> None:
    assert results[name]["tuning"]["forward"]["variant"] == variant


def test_default_tiles_fit_an_sm_90(builds: list[dict[str, Any]]) -> None:
    for build in builds:
        assert build["stack_bytes"] <= MAX_STACK_BYTES, build
        assert build["shared_bytes"] <= MAX_SHARED_BYTES, build
    assert {(build["name"], build["tma"]) for build in builds} >= {
        (name, tma) for name in ("forward", "backward_kv", "backward_q") for tma in (False, True)
    }


def test_half_runs_on_tensor_cores_and_loads_run_ahead(builds: list[dict[str, Any]]) -> None:
    for build in builds:
        assert build["wgmma"] > 0, build
        assert (build["tma_loads"] > 0) == build["tma"], build
        assert build["tma"] or build["cp_async"] > 0, build


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1,2,64,320,fp16", "up to 256"),
        ("1,2,64,64,fp16,head_dim_v=32", "the same head_dim"),
        ("1,2,64,64,fp16,dropout=0.5", "dropout"),
        ("1,2,64,64,fp16,mask=bool", "mask"),
    ],
)
def test_unsupported_configs_have_a_reason(text: str, reason: str) -> None:
    backend = find_backend("flash_triton")
    assert reason in (backend.supports(parse_config(text)) or "")
    assert backend.supports(parse_config("1,2,64,256,fp16,causal,kv_heads=1")) is None


def run_cli(folder: Path, *arguments: str) -> str:
    store = ("--store", str(folder / "store.db"), "--out", str(folder / "runs"))
    done = CliRunner().invoke(cli, [*arguments, *store])
    assert done.exit_code == 0, done.output
    return done.stdout


def captured(folder: Path, backend: str) -> Any:
    run_cli(
        folder,
        *("capture", "--config", "1,2,16,16,fp32", "--backend", backend, "--device", "cpu"),
        *("--iterations", "1", "--samples", "0"),
    )
    (run,) = (folder / "runs").iterdir()
    return read_run(run).cells[0]


def test_a_cpu_without_the_interpreter_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cell = captured(tmp_path, "flash_triton")
    assert (cell.status, cell.tuning) == ("refused", None)
    assert "TRITON_INTERPRET=1" in (cell.message or "")


def test_tuning_is_in_the_record_and_in_the_json(tmp_path: Path) -> None:
    """Applies to any implementation whose tuning() returns a choice after a call.

    A worker that compiles nothing does not load torch's compiler, which takes as long as loading
    torch.
    """
    file = tmp_path / "mine.py"
    answer = "{'calls': len(asked) > 0, 'compiler': 'torch._dynamo' in sys.modules}"
    file.write_text(OFFERS.replace("{answer}", answer))
    expected = {"calls": True, "compiler": False}
    assert captured(tmp_path, str(file)).tuning == expected
    store = ("--store", str(tmp_path / "store.db"))
    shown = CliRunner().invoke(cli, ["kernels", "--format", "json", *store])
    assert [cell["tuning"] for cell in json.loads(shown.stdout)["cells"]] == [expected]
    config = (
        "--config",
        "1,2,16,16,fp32",
        "--device",
        "cpu",
        "--iterations",
        "5",
        "--processes",
        "1",
    )
    text = run_cli(tmp_path, "bench", *config, "--backend", f"{file},math", "--format", "json")
    cells = {cell["backend"]: cell["tuning"] for cell in json.loads(text)["cells"]}
    assert cells == {"mine.py": expected, "math": None}


@pytest.mark.parametrize("answer", ["[1, 2]", "{'tile': object()}"])
def test_tuning_that_json_cannot_represent_is_an_error(tmp_path: Path, answer: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OFFERS.replace("{answer}", answer))
    cell = captured(tmp_path, str(file))
    assert cell.status == "error"
    assert "tuning() returned" in (cell.message or "")
