"""A worker in a Python that has torch but no other dependency of profharness."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import venv
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from click.testing import CliRunner

from profharness.attention.config import parse_config
from profharness.cli import cli
from profharness.commands.repro import repro_script
from profharness.processes import WORKER_SCRIPT
from profharness.rows import Refusal
from profharness.run import Cell, JournalEntry, Plan, Problem, Protocol, read_run, write_run

ROOT = Path(__file__).resolve().parents[2]
TORCH_ALONE = (
    *("torch", "torchgen", "functorch", "typing_extensions.py", "sympy", "mpmath", "networkx"),
    *("jinja2", "markupsafe", "filelock", "fsspec"),
)
ABSENT = ("profharness", "msgspec", "isal", "nvtx", "numpy", "click", "pandas")


def by_path(path: Path) -> ModuleType:
    """Load a module that belongs to no package."""
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def torch_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a virtual environment with only torch and its dependencies. Return its Python."""
    folder = tmp_path_factory.mktemp("alone")
    venv.create(folder / "venv", with_pip=False)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    for name in TORCH_ALONE:
        spec = importlib.util.find_spec(name.removesuffix(".py"))
        if (
            spec is not None and spec.origin is not None
        ):  # releases of torch have different dependencies
            path = Path(spec.origin)
            (packages / name).symlink_to(path if name.endswith(".py") else path.parent)
    python = folder / "venv" / "bin" / "python"
    find = "import importlib.util as u, sys; print([n for n in sys.argv[1:] if u.find_spec(n)])"
    done = subprocess.run(
        [python, "-I", "-c", find, *ABSENT], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
    return python


def capture(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Run `capture`. Return the exit code, stdout, and stderr with the error."""
    places = ("--store", str(folder / "s.db"), "--out", str(folder / "runs"), "--device", "cpu")
    counts = ("--samples", "2", "--iterations", "1", "--warmup", "0")
    done = CliRunner().invoke(cli, ["capture", *places, *counts, *arguments])
    return done.exit_code, done.stdout, f"{done.stderr}{done.exception or ''}"


def test_one_interpreter_runs_and_a_missing_one_is_reported_first(
    tmp_path: Path, torch_alone: Path
) -> None:
    asked = ("--config", "1,2,32,16,causal,bwd", "--backend", "math,naive,cudnn")
    code, out, told = capture(
        tmp_path, *asked, "--python", str(torch_alone), "--python", "nowhere/python"
    )
    assert code != 0
    assert (
        "1 of 2 interpreters could not be used" in told
        and told.count("nowhere/python: no such program") == 2
    )
    assert told.index("left out: nowhere/python") < told.index(f"{torch_alone}: torch ")
    (folder,) = (tmp_path / "runs").iterdir()
    run = read_run(folder)
    assert [cell.status for cell in run.cells] == ["ok", "ok", "refused"]
    assert run.environment["torch"] and run.cells[0].samples["wall"] and run.run in out
    assert str(torch_alone) not in (folder / "run.json").read_text()
    assert {path.name for path in folder.iterdir()} == {
        *("c0001.torch.json.gz", "c0002.torch.json.gz", "run.json"),
    }
    shown = CliRunner().invoke(cli, ["kernels", "--store", str(tmp_path / "s.db")])
    assert "bmm" in shown.stdout

    # the same interpreter must continue the run
    pending = replace(run.cells[0], status="pending", samples={}, turns={})
    write_run(folder, replace(run, cells=(pending, *run.cells[1:])))
    (folder / "python").write_text(str(tmp_path / "gone"))
    code, _, told = capture(tmp_path, "--resume", str(folder))
    assert code != 0 and "which no longer exists" in told
    (folder / "python").write_text(str(torch_alone))
    assert capture(tmp_path, "--resume", str(folder))[0] == 0
    assert read_run(folder).cells[0].samples["wall"]
    assert not (folder / "python").exists()


def test_a_cell_as_a_script_needs_torch_alone(tmp_path: Path, torch_alone: Path) -> None:
    config = parse_config("1,2,8,16,bwd,mask=bool,layout=strided_last")
    path = tmp_path / "repro.py"
    path.write_text(repro_script(config, "math", "cpu"))
    done = subprocess.run([torch_alone, "-I", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "grad_value: (1, 2, 8, 16) torch.float32 sha256" in done.stdout


def test_without_torch_nothing_is_measured(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    code, _, told = capture(tmp_path, "--python", str(tmp_path / "bare" / "bin" / "python"))
    assert code != 0
    assert "torch is not installed in this Python" in told
    assert "1 of 1 interpreters could not be used" in told
    assert not (tmp_path / "runs").exists()


def test_the_stand_in_reads_and_writes_like_msgspec() -> None:
    stand_in = by_path(WORKER_SCRIPT.with_name("standins.py"))
    cell = Cell(
        *("c1", parse_config("1,2,8,8,fp16,q_strides=128x64x8x1"), "auto", "ok", "späte"),
        samples={"wall": [1, 2]},
        refusals=(Refusal("mask", "no"),),
        turns={"wall": [(0, 1, 2)]},
        tuning={"a": [1.5, None, True]},
        clocks={"mhz": 1.0},
    )
    plan = Plan((cell,), Protocol(metrics=("m",)), ("torch",), 7)
    problem = Problem("gpu", "shared", "m", "r", cells=("c1",))
    for value in (plan, JournalEntry("end", "c1", cell), JournalEntry("problem", problem=problem)):
        assert stand_in.json.decode(msgspec.json.encode(value), type=type(value)) == value
        assert msgspec.json.decode(stand_in.json.encode(value), type=type(value)) == value
    assert stand_in.json.encode([float("nan"), float("inf")]) == b"[null,null]"
    with pytest.raises(TypeError):
        stand_in.json.encode(object())
    with pytest.raises(stand_in.MsgspecError):
        stand_in.json.decode(b"{")


def test_the_oldest_torch_is_the_required_one() -> None:
    script = by_path(WORKER_SCRIPT)
    required = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert required is not None and script.dotted(script.OLDEST_TORCH) == required[1]


def test_the_oldest_python_can_read_what_a_worker_imports() -> None:
    oldest = by_path(WORKER_SCRIPT).OLDEST_PYTHON
    package = ROOT / "profharness"
    paths = [*package.glob("*.py"), *(package / "recording" / "worker").rglob("*.py")]
    paths += (package / "attention").rglob("*.py")
    for path in paths:
        ast.parse(path.read_text(), str(path), feature_version=oldest)
