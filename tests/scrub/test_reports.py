"""Raw reports are replaced by their exports, or refused if there is no valid one."""

from __future__ import annotations

import dataclasses
import gzip
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from profharness.errors import TraceFormatError, UsageError
from profharness.recording.profilers.base import ToolError
from profharness.run import TraceFile, read_run, write_run
from profharness.scrub import scrub
from profharness.scrub.reports import StaleExportError
from profharness.store import ingest_path
from profharness.traces import open_trace
from profharness.traces.ncu_readers import has_package

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
COPIER = """#!/bin/sh
case "$1" in --version) echo "NVIDIA Nsight Systems version 2025.3.2.0"; exit 0;; esac
while [ $# -gt 1 ]; do
  case "$1" in --output=*) out="${1#--output=}";; esac
  shift
done
cp "$1" "$out"
"""


def age(path: Path, seconds: int) -> None:
    """Make a file that much older."""
    at = path.stat().st_mtime - seconds
    os.utime(path, (at, at))


@pytest.fixture
def no_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder on a PATH without nsys."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/bin{os.pathsep}/usr/bin")
    monkeypatch.delenv("PROFHARNESS_NSYS", raising=False)
    return folder


@pytest.mark.parametrize("case", ["older", "damaged", "foreign"])
def test_export_of_another_report_is_not_used(
    tmp_path: Path, no_nsys: Path, nsys: Callable[[str], Path], case: str
) -> None:
    good = nsys("nsys_h200").read_bytes()
    report, export = tmp_path / "r.nsys-rep", tmp_path / "r.sqlite"
    report.write_bytes(good)  # the nsys below copies
    export.write_bytes(good[:-5000] if case == "damaged" else good if case == "older" else b"x" * 9)
    age(export if case == "older" else report, 60)
    with pytest.raises(StaleExportError, match=r"r\.sqlite is (older|not a complete nsys export)"):
        scrub(report)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["bin", "r.nsys-rep", "r.sqlite"]
    tool = no_nsys / "nsys"
    tool.write_text(COPIER)
    tool.chmod(0o755)
    done = scrub(report)
    with closing(open_trace(done.output)) as trace:  # type: ignore[type-var]
        assert trace.num_launches > 0


@pytest.mark.usefixtures("no_nsys")
def test_an_export_newer_than_the_report_is_used(
    tmp_path: Path, nsys: Callable[[str], Path]
) -> None:
    report = tmp_path / "r.nsys-rep"
    report.write_bytes(b"raw")
    with pytest.raises(ToolError, match="nsys"):
        scrub(report)
    (tmp_path / "r.sqlite").write_bytes(nsys("nsys_h200").read_bytes())
    assert scrub(report).replaced == (("r.nsys-rep", "r-scrubbed.sqlite"),)


def test_a_folder_with_a_report_and_its_export_has_one_trace(
    tmp_path: Path, nsys: Callable[[str], Path]
) -> None:
    record = read_run(ROOT / "traces" / "h200-torch2.11")
    names = [cell.cell for cell in record.cells[:2]]
    traces = (
        TraceFile("nsys", "w.nsys-rep", (names[0],)),
        TraceFile("nsys", "w.sqlite", (names[1],)),
    )
    for count in (1, 2):
        folder = tmp_path / f"run{count}"
        folder.mkdir()
        (folder / "w.nsys-rep").write_bytes(b"raw of blade17")
        (folder / "w.sqlite").write_bytes(nsys("nsys_h200").read_bytes())
        write_run(
            folder,
            dataclasses.replace(record, traces=traces[:count], profilers=("nsys",), problems=()),
        )
        done = scrub(folder)
        assert done.files == ("run.json", "w.sqlite")
        assert done.replaced == (("w.nsys-rep", "w.sqlite"),)
        assert done.left_out == ()
        assert sorted(each.name for each in done.output.iterdir()) == ["run.json", "w.sqlite"]
        assert read_run(done.output).traces == (
            TraceFile("nsys", "w.sqlite", tuple(names[:count])),
        )
        (result,) = ingest_path(tmp_path / f"{count}.db", done.output)
        assert result.cells == len(record.cells)


@pytest.mark.parametrize(
    ("source", "output", "match"),
    [
        (
            "x.ncu-rep",
            "y.ncu-rep",
            r"a \.ncu-rep file contains .* its copy is a \.csv file; name the copy y\.csv",
        ),
        ("x.ncu-rep", "y.json", r"is a \.csv"),
        ("x.nsys-rep", "y.nsys-rep", r"is a \.sqlite.*name the copy y\.sqlite"),
        ("x.nsys-rep.gz", "y.nsys-rep.gz", r"name the copy y\.sqlite"),
        ("x.json", "y.ncu-rep", "cannot be a .ncu-rep file; keep the suffix"),
    ],
)
def test_invalid_output_names_are_refused(
    tmp_path: Path, source: str, output: str, match: str
) -> None:
    (tmp_path / source).write_bytes(b"{}")
    with pytest.raises(UsageError, match=match):
        scrub(tmp_path / source, tmp_path / output)


def test_packed_reports(tmp_path: Path) -> None:
    if not has_package():
        pytest.skip("reading a report needs the package ncu-report")
    report = tmp_path / "k.ncu-rep.gz"
    report.write_bytes((DATA / "ncu_h200.ncu-rep.gz").read_bytes())
    done = scrub(report)
    assert done.output.name == "k-scrubbed.csv"
    assert open_trace(done.output).num_launches == 82
    (tmp_path / "k-2.ncu-rep.gz").write_bytes(gzip.compress(b"hello"))
    with pytest.raises(TraceFormatError, match=r"k-2\.ncu-rep\.gz: not an Nsight Compute report"):
        scrub(tmp_path / "k-2.ncu-rep.gz")
