"""Tests of errors that a command raises before it starts a worker or prints anything."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from profharness import processes
from profharness.cli import cli
from profharness.errors import UsageError

CONFIG = "1,4,128,64"
TYPOS = {
    "backend": ("capture", "bench", "verify", "kernels", "analyze"),
    "config": ("capture", "bench", "verify", "kernels", "analyze"),
    "run-on": ("capture", "bench", "verify"),
    "gpu": ("capture", "bench", "verify", "kernels"),
}
WRONG = {
    "backend": (CONFIG, "--backend", "flas"),
    "config": (f"{CONFIG},fp17",),
    "run-on": (CONFIG, "--run-on", "H2O0"),
    "gpu": (CONFIG, "--gpu", "H2O0"),
}


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in TYPOS.items() for name in names]
)
def test_a_typo_is_an_error_before_anything_starts(
    kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: `kernels CONFIG --backend flas` printed that it captures the config on flas."""
    monkeypatch.chdir(tmp_path)
    started: list[object] = []
    monkeypatch.setattr(processes.PrewarmedWorker, "start", lambda: started.append(1))
    monkeypatch.setattr(
        "profharness.jobs.into_store.open_background_ingest", lambda _: started.append(1)
    )
    done = CliRunner().invoke(cli, [name, *WRONG[kind]])
    assert isinstance(done.exception, UsageError), done.output
    assert not started and not done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["capture", "bench", "verify"])
def test_a_run_that_needs_a_missing_gpu_leaves_no_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: `runs` listed an unfinished run that could never be resumed on this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = CliRunner().invoke(cli, [name, CONFIG, "--device", "cuda", "--backend", "math"])
    assert "no GPU; use --device cpu" in str(done.exception), done.output
    assert not list(tmp_path.glob("traces/runs/*"))


def test_gpu_as_an_old_spelling_of_run_on_explains_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: `capture --gpu H200` named only --run-on, and did not mention predictions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("profharness.jobs.fleet.visible_gpus", list)
    for flag in ("--gpu", "--run-on"):
        done = CliRunner().invoke(cli, ["capture", CONFIG, flag, "H2O0"])
        said = str(done.exception)
        assert said.startswith("H2O0: no lane has this GPU; this host has ")
        assert "--run-on, also spelled --gpu here" in said
        assert "profharness predict CONFIG --gpu H2O0" in said


@pytest.mark.parametrize("content", [b"no trace", b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xab"])
def test_any_unreadable_file_exits_with_2(content: bytes, tmp_path: Path) -> None:
    """Bug: a truncated gzip file exited with 1, and a file of another kind with 2."""
    file = tmp_path / "trace.json.gz"
    file.write_bytes(content)
    done = CliRunner().invoke(cli, ["layers", str(file), "--store", str(tmp_path / "s.db")])
    assert getattr(done.exception, "exit_code", None) == 2, done.output
