"""Captures onto full and read-only disks, on real file systems."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import PATIENCE_S

from profharness.run import read_run


def mount(folder: Path, options: str) -> bool:
    argv = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Return an empty folder where a file system can be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not mount(folder, "size=64k"):
        pytest.skip("mounting a tmpfs needs root")
    subprocess.run(["umount", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


def capture(disk: Path, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    argv = [
        *(sys.executable, "-m", "profharness", "capture", "--device", "cpu", "--samples", "0"),
        *("--out", str(disk / "runs"), "--store", str(disk.parent / "s.db"), *more),
    ]
    return subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, **environment},
        check=False,
    )


WORK = ("--config", "1,2,64,16", "--backend", "math,flash", "--iterations", "20")


@pytest.mark.parametrize("size", ["8k", "40k", "200k"])
def test_full_disk_costs_no_cell(disk: Path, size: str) -> None:
    assert mount(disk, f"size={size}")
    done = capture(disk, *WORK)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (line,) = [each for each in done.stderr.splitlines() if each.startswith("error: ")]
    assert "No space left on device" in line
    left = [path.name for path in disk.rglob("*") if path.is_file()]
    assert [name for name in left if name.endswith((".tmp", ".json")) and name[0] in ".c"] == []
    folders = list((disk / "runs").glob("*")) if (disk / "runs").exists() else []
    for folder in folders:
        assert {cell.status for cell in read_run(folder).cells} <= {"pending", "ok"}
        assert f"--resume {folder}" in line
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        resumed = capture(disk, "--resume", str(folder))
        assert resumed.returncode == 0, resumed.stderr
        run = read_run(folder)
        assert [cell.status for cell in run.cells] == ["ok", "ok"]
        assert [len(trace.cells) for trace in run.traces] == [1, 1]


def test_read_only_disk_is_reported_before_anything_runs(disk: Path) -> None:
    assert mount(disk, "ro")
    done = capture(disk, *WORK)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: cannot create the run folder")
    assert "Read-only file system" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["kineto_h200.json.gz", "nsys_h200.sqlite.gz"])
def test_full_tmpdir_prints_one_line_and_stores_nothing(disk: Path, name: str) -> None:
    assert mount(disk, "size=8k")
    trace = Path(__file__).resolve().parents[1] / "data" / name
    store = disk.parent / "s.db"
    done = subprocess.run(
        [sys.executable, "-m", "profharness", "ingest", str(trace), "--store", str(store)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "TMPDIR": str(disk)},
        check=False,
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    (line, _) = [each for each in done.stderr.splitlines() if each.startswith("error: ")]
    assert str(trace) in line or str(disk) in line
    assert "No space left on device" in line
    assert list(disk.rglob("*")) == []


def test_deleted_run_folder_is_reported(tmp_path: Path) -> None:
    """A backend that deletes the run folder is the easiest way to lose it during a run."""
    source = tmp_path / "gone.py"
    source.write_text(
        "import shutil\n"
        "def attention(query, key, value, **_):\n"
        f"    shutil.rmtree({str(tmp_path / 'runs')!r}, ignore_errors=True)\n"
        "    return query.clone()\n"
    )
    work = ("--config", "1,2,64,16", "--backend", f"{source}:attention")
    done = capture(tmp_path / "x", *work, "--out", str(tmp_path / "runs"))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "No such file or directory" in done.stderr.splitlines()[-1]
