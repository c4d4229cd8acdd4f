"""Run `profharness new-kernel`: its files run, are correct, and overwrite nothing."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG, PATIENCE_S

from profharness.attention.backends.templates import KINDS, check_text, kernel_text
from profharness.attention.config import expand_configs
from profharness.jobs.into_store import verify_into_store
from profharness.recording.capture import capture
from profharness.run import CaptureOptions, Protocol, read_run

ROOT = Path(__file__).resolve().parents[2]


def profharness(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "profharness", "new-kernel", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_kernel_is_right_or_skips_with_a_reason(kind: str, tmp_path: Path) -> None:
    option = [] if kind == "torch" else [f"--{kind}"]
    done = profharness(tmp_path, "mine", *option)
    assert (done.returncode, done.stderr) == (0, "")
    assert "pytest tests/test_mine.py" in done.stdout
    assert "--backend mine,math" in done.stdout
    argv = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "tests"]
    checked = subprocess.run(
        argv,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode in (0, 5), checked.stdout  # 5: all tests were skipped
    if kind == "torch" or (kind == "triton" and importlib.util.find_spec("triton")):
        assert "8 passed" in checked.stdout
    else:
        assert "passed" in checked.stdout or "needs" in checked.stdout


def test_the_test_of_a_new_kernel_can_fail(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "tests").mkdir()
    wrong = kernel_text("mine", "torch").replace("column > row", "column >= row")
    (tmp_path / "kernels" / "mine.py").write_text(wrong)
    (tmp_path / "tests" / "test_mine.py").write_text(
        check_text("mine", "torch", "../kernels/mine.py")
    )
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "4 failed, 4 passed" in done.stdout


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    assert profharness(tmp_path, "mine", "--out", "sub/own").returncode == 0
    kernel = tmp_path / "sub" / "own" / "mine.py"
    assert (tmp_path / "sub" / "tests" / "test_mine.py").exists()
    kernel.write_text("mine = 1\n")
    again = profharness(tmp_path, "mine", "--triton", "--out", "sub/own")
    assert again.returncode == 2
    assert "already exists" in again.stderr
    kernel.unlink()
    again = profharness(tmp_path, "mine", "--out", "sub/own")
    assert "test_mine.py already exists" in again.stderr
    assert not kernel.exists()


@pytest.mark.parametrize(
    "name", ["kernels", "naive", "not-a-name", "_hidden", "a/b", "class", "sys"]
)
def test_invalid_names_are_refused(name: str, tmp_path: Path) -> None:
    done = profharness(tmp_path, name)
    assert done.returncode == 2
    assert re.search(r"use letters, digits and _|already exists", done.stderr)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_follows_the_contract(kind: str) -> None:
    text = kernel_text("mine", kind)
    tree = ast.parse(text)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    arguments = functions["attention"].args
    assert [argument.arg for argument in arguments.args] == ["q", "k", "v"]
    keywords = [argument.arg for argument in arguments.kwonlyargs]
    assert keywords == ["is_causal", "scale", "enable_gqa"]
    assert "supports" in functions
    assert "{name}" not in text
    assert ast.parse(check_text("mine", kind, "../kernels/mine.py"))


@pytest.mark.usefixtures("hanging")
def test_a_template_runs_as_a_backend_and_long_compiles_are_named(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(kernel_text("made", "torch"))
    (tmp_path / "slow.py").write_text(f"import os, time\n{HANG}\n")
    (tmp_path / "dies.py").write_text("import os\nos.abort()\n")
    files = [str(tmp_path / name) for name in ("made.py", "slow.py", "dies.py")]
    protocol = Protocol(iterations=1, warmup=0, samples=0, timeout_s=PATIENCE_S, device="cpu")
    options = CaptureOptions(("events",), tmp_path / "runs", protocol)
    record = read_run(capture(expand_configs("1,2,40,16,causal,bwd"), files, options))
    told = {cell.backend: (cell.status, str(cell.message)) for cell in record.cells}
    assert {cell.config.dtype for cell in record.cells} == {"fp32"}  # including crashed cells
    assert told["made.py"][0] == "ok"
    assert told["slow.py"][0] == "timeout"
    assert (
        "the worker did not finish the loading, compilation or first call of the backend in time"
        in told["slow.py"][1]
    )
    assert told["dies.py"][0] == "crashed"
    stage = "the loading, compilation or first call of the backend"
    assert f"the worker died during {stage}" in told["dies.py"][1]


def test_two_kinds_at_once_are_refused(tmp_path: Path) -> None:
    done = profharness(tmp_path, "both", "--triton", "--cuda")
    assert done.returncode == 2 and "choose either --triton or --cuda" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_triton_kernel_that_cannot_run_is_refused_and_not_wrong(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(kernel_text("mine", "triton"))
    (tmp_path / "bare.py").write_text("import triton_of_no_release\n")
    (tmp_path / "lacks.py").write_text("raise ModuleNotFoundError('none', name='triton')\n")
    names = [str(tmp_path / name) for name in ("mine.py", "bare.py", "lacks.py")]
    config = expand_configs("1,2,16,16,fp32")
    protocol = Protocol(iterations=1, warmup=0, samples=0, timeout_s=PATIENCE_S, device="cpu")
    options = CaptureOptions(("events",), tmp_path / "runs", protocol)
    record = read_run(capture(config, [*names, "flex"], options))
    told = {cell.backend: (cell.status, str(cell.message)) for cell in record.cells}
    assert told["mine.py"][0] == told["lacks.py"][0] == told["flex"][0] == "refused"
    assert "Triton" in told["mine.py"][1] and "needs Triton" in told["lacks.py"][1]
    assert told["bare.py"][0] == "error"  # an unknown module in the file is the file's own mistake
    assert "profharness does not run flex on cpu" in told["flex"][1]
    checks = CaptureOptions(out=tmp_path / "runs", protocol=protocol, cases=("none",))
    verified = verify_into_store(config, names[:1], tmp_path / "s.db", checks)
    assert {row.passed for row in verified} == {None}
