"""Shell completion as a shell asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from profharness.store import ingest_path

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "traces" / "h200-torch2.11"


def completed(folder: Path, *words: str) -> list[str]:
    """What bash is offered for the last word."""
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from profharness.cli import cli; cli(prog_name='profharness')",
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "_PROFHARNESS_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(["profharness", *words]),
            "COMP_CWORD": str(len(words)),
        },
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a store and an implementation."""
    made = tmp_path_factory.mktemp("completion")
    ingest_path(made / "profharness.db", RUN)
    (made / "kernels").mkdir()
    (made / "kernels" / "flashy.py").write_text("")
    return made


def test_backends_runs_and_sides_are_offered(folder: Path) -> None:
    assert completed(folder, "capture", "--backend", "flash")[0] == "flash"
    assert "flashy" in completed(folder, "capture", "--backend", "fl")
    assert completed(folder, "capture", "--backend", "auto,cud") == ["auto,cudnn"]
    (path, latest, name, run) = completed(folder, "kernels", "")
    assert latest == "latest" and path == ""  # bash completes the path
    assert name == RUN.name
    assert completed(folder, "kernels", "--run", "") == [path, latest, name, run]
    assert completed(folder, "export", run[:4]) == [run[:4], run]
    assert completed(folder, "diff", "latest", "mat") == ["mat", "math"]
    assert run in completed(folder, "diff", "")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("capture", "--backend", "flash+ma"), ["flash+math"]),
        (("capture", "--backend", "auto,cudnn-then-fl"), ["auto,cudnn-then-flash"]),
        (("explain", "--backend", "flash+math+"), ["flash+math+efficient", "flash+math+cudnn"]),
        (("explain", "--gpu", "h20"), ["H200"]),
        (("layers", "--gpu", "H200,h100"), ["H200,H100", "H200,H100 PCIe"]),
        (("predict", "--torch", "2.1"), ["2.15", "2.14", "2.13", "2.12", "2.11", "2.10"]),
        (("explain", "--torch", "2.5..2.15"), ["2.5..2.15"]),
        (("explain", "--torch", "2.11,2.9."), ["2.11,2.9.0", "2.11,2.9.1"]),
        (("layers", "--fail-on", "math-fallback,eager"), ["math-fallback,eager-attention"]),
        (("diff", "--fail-on", "sl"), ["slower"]),
        (("ranks", "--fail-on", "slow-g"), ["slow-gpu"]),
        (("kernels", "--expect", "mat"), ["math"]),
        (("layers", "--expect", "mat"), ["math"]),
        (("bench", "--measurement", "cold,gr"), ["cold,graph"]),
        (("capture", "--profiler", "torch,ns"), ["torch,nsys"]),
        (("capture", "--metrics", "ten"), ["tensor"]),
        (("verify", "--cases", "head_dim_o"), ["head_dim_odd"]),
        (
            ("explain", "2,8,512,64,bf16,ca"),
            ["2,8,512,64,bf16,ca", "2,8,512,64,bf16,causal"],  # the first is a file
        ),
        (("kernels", "--config", "2,8,512,64,mask=bool_"), ["2,8,512,64,mask=bool_2d"]),
        (("kernels", "--config", "2,8,512,64,causal,ca"), []),
        (("kernels", "--config", "2,8,{1,2},"), []),
    ],
)
def test_names_are_offered(words: tuple[str, ...], offered: list[str], tmp_path: Path) -> None:
    assert completed(tmp_path, *words) == offered


def test_gpus_with_an_atlas_come_first(tmp_path: Path) -> None:
    assert completed(tmp_path, "predict", "--gpu", "")[0] == "H200"


def test_without_a_store_nothing_breaks(tmp_path: Path) -> None:
    assert completed(tmp_path, "kernels", "") == ["", "latest"]
    (tmp_path / "profharness.db").write_text("no store")
    assert completed(tmp_path, "export", "2") == ["2"]


def test_a_trace_is_completed_by_its_file_name(folder: Path) -> None:
    ingest_path(folder / "traces.db", ROOT / "traces" / "models" / "vit.json.gz")
    words = ("--store", "traces.db")
    assert completed(folder, "layers", *words, "vi") == ["vi", "vit.json.gz"]
    assert len(completed(folder, "layers", *words, "trace-")) == 2
