"""Streams and a working folder that cannot be used: one line of error, exit code 1."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S

from profharness.store.schema import connect

RUN = f"exec {sys.executable} -m profharness "


def shell(text: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", text],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a store that holds nothing."""
    connect(tmp_path / "profharness.db", write=True).close()
    return tmp_path


@pytest.mark.parametrize("command", ["--version", "--help", "runs --format json", "kernels --help"])
@pytest.mark.parametrize(
    ("stream", "why"), [("> /dev/full", "No space left"), (">&-", "Bad file descriptor")]
)
def test_a_stdout_that_takes_nothing(folder: Path, command: str, stream: str, why: str) -> None:
    before = (folder / "profharness.db").read_bytes()
    done = shell(f"{RUN}{command} {stream}", folder)
    assert done.returncode == 1
    *hints, line = done.stderr.splitlines()
    assert line.startswith(f"error: stdout: {why}"), done.stderr
    assert len(hints) == (1 if command.startswith("runs") else 0), done.stderr
    assert (folder / "profharness.db").read_bytes() == before


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_however_python_buffers(folder: Path, unbuffered: str) -> None:
    done = shell(f"{RUN}--version > /dev/full", folder, PYTHONUNBUFFERED=unbuffered)
    assert (done.returncode, done.stderr.startswith("error: stdout: ")) == (1, True)
    assert shell(f"{RUN}--version", folder, PYTHONUNBUFFERED=unbuffered).stdout.endswith("\n")


@pytest.mark.parametrize("stream", ["2> /dev/full", "2>&-"])
def test_a_stderr_that_takes_nothing_changes_no_exit_code(folder: Path, stream: str) -> None:
    assert shell(f"{RUN}runs --format json {stream}", folder).returncode == 0
    assert shell(f"{RUN}runs --no-such {stream}", folder).returncode == 2
    assert shell(f"{RUN}kernels --run nothing {stream}", folder).returncode == 2


def test_all_streams_closed(folder: Path) -> None:
    assert shell(f"{RUN}runs --format json <&- >&- 2>&-", folder).returncode == 1


@pytest.mark.parametrize("command", ["ingest x.json", "capture --config 1,1,8,8", "runs"])
def test_a_deleted_working_folder_is_told(tmp_path: Path, command: str) -> None:
    place = tmp_path / "gone"
    place.mkdir()
    root = Path(__file__).resolve().parents[2]
    done = shell(f"cd {place} && rmdir {place} && {RUN}{command}", tmp_path, PYTHONPATH=str(root))
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) <= 4, done.stderr


INTERRUPTED_IMPORT = """
import os, runpy, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "profharness.errors":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
sys.argv = ["profharness", "runs"]
runpy.run_module("profharness", run_name="__main__")
"""


def test_interrupt_while_modules_are_imported_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
