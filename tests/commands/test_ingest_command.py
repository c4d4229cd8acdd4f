"""`profharness ingest` as a process: what one bad source costs, and what is said of it."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest
from click.testing import CliRunner
from waiting import PATIENCE_S

from profharness.cli import cli, find_command
from profharness.errors import StoreError, TraceFormatError
from profharness.store import ingest_path

TRACE = Path(__file__).parents[1] / "data" / "kineto_h200.json.gz"
RUN = Path(__file__).parents[2] / "traces" / "h200-torch2.11"
CAPBSET_DROP = 24
DAC_OVERRIDE, DAC_READ_SEARCH = 1, 2


@pytest.fixture
def open_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder whose locked parts can be removed afterwards."""
    yield tmp_path
    for path in tmp_path.iterdir():
        path.chmod(0o700)


def obey_permissions() -> None:
    """Root without the capabilities that let it pass over file permissions."""
    libc = ctypes.CDLL(None)
    for capability in (DAC_OVERRIDE, DAC_READ_SEARCH):
        libc.prctl(CAPBSET_DROP, capability, 0, 0, 0)


def ingest(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run as somebody whom file permissions hold."""
    return subprocess.run(
        [sys.executable, "-m", "profharness", "ingest", *words, "--store", "s.db"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        preexec_fn=obey_permissions if os.geteuid() == 0 else None,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )


def unreadable(folder: Path) -> Path:
    path = folder / "secret.json"
    path.write_text("{}")
    path.chmod(0)
    return path


def test_a_source_that_cannot_be_read_costs_only_itself(open_folder: Path) -> None:
    (open_folder / "good.json.gz").write_bytes(TRACE.read_bytes())
    (open_folder / "locked").mkdir()
    (open_folder / "locked" / "a.json").write_text("{}")
    (open_folder / "locked").chmod(0)
    unreadable(open_folder)
    done = ingest(open_folder, "secret.json", "locked", "absent.json", "good.json.gz")
    assert done.returncode == 1, done.stderr
    assert "good.json.gz: new: " in done.stdout
    assert "error: secret.json: cannot be read: Permission denied" in done.stderr
    assert "error: locked/run.json: cannot be read: Permission denied" in done.stderr
    assert "3 of 4 sources could not be ingested" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_with_something_locked_gives_the_rest(open_folder: Path) -> None:
    """A file and a folder that may not be read, beside and below what may."""
    source = open_folder / "in"
    for folder in (source / "locked", source / "deep"):
        folder.mkdir(parents=True)
        (folder / "good.json.gz").write_bytes(TRACE.read_bytes())
    unreadable(source)
    (source / "locked").chmod(0)
    done = ingest(open_folder, "in")
    (source / "locked").chmod(0o700)
    assert done.returncode == 1, done.stderr
    assert "in/deep/good.json.gz: new: " in done.stdout
    assert "error: in/secret.json: cannot be read: Permission denied" in done.stderr
    assert "error: in/locked/run.json: cannot be read: Permission denied" in done.stderr
    assert "2 of 3 sources could not be ingested" in done.stderr


def test_a_report_without_its_tool_costs_only_itself(open_folder: Path) -> None:
    """The export of an nsys report needs nsys, whose failures are errors of another kind."""
    (open_folder / "a.nsys-rep").write_bytes(b"no report")
    (open_folder / "good.json.gz").write_bytes(TRACE.read_bytes())
    done = ingest(open_folder, "a.nsys-rep", "good.json.gz")
    assert done.returncode == 1, done.stderr
    assert "good.json.gz: new: " in done.stdout
    assert "1 of 2 sources could not be ingested" in done.stderr


def test_a_file_that_cannot_be_read_makes_no_store(open_folder: Path) -> None:
    unreadable(open_folder)
    done = ingest(open_folder, "secret.json")
    assert done.returncode == 1
    assert not (open_folder / "s.db").exists()


def run_with_lost_trace(folder: Path) -> str:
    """The sample run without one of its traces; that trace's name."""
    name = "c0003.torch.json.gz"
    shutil.copytree(RUN, folder / "run")
    (folder / "run" / name).unlink()
    return name


def test_strict_fails_for_warnings_and_tells_what_was_taken_in(open_folder: Path) -> None:
    name = run_with_lost_trace(open_folder)
    (open_folder / "good.json.gz").write_bytes(TRACE.read_bytes())
    assert ingest(open_folder, "--strict", "good.json.gz").returncode == 0
    assert ingest(open_folder, "run").returncode == 0
    for state in ("unchanged", "new"):
        done = ingest(open_folder, "--strict", "run", "good.json.gz")
        assert done.returncode == 1
        assert f"run: {state}, run 20261121-151544-59c7" in done.stdout
        assert f"warning: run: Not ingested: run/{name}" in done.stderr
        assert "--strict: 1 of 2 sources caused the warnings above" in done.stderr
        (open_folder / "s.db").unlink()


def test_what_was_taken_in_last_is_shown_by_the_command_at_the_end(open_folder: Path) -> None:
    """As printed; the newest run of the store may be another one."""
    (open_folder / "good.json.gz").write_bytes(TRACE.read_bytes())
    shutil.copytree(RUN, open_folder / "run")
    done = ingest(open_folder, "run", "good.json.gz")
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("To show ")]
    words = shlex.split(line.partition(", use: ")[2])
    assert words[:3] == ["profharness", "layers", "good.json.gz"]
    main = cli
    with chdir(open_folder):
        shown = CliRunner().invoke(main, [*words[1:], "--format", "json"])
    assert json.loads(shown.stdout)["rows"]
    assert "good.json.gz: new: 384 launches\n" in done.stdout
    assert "run: new, run 20261121-151544-59c7: 685 launches" in done.stdout


def test_a_warning_names_a_lone_trace_once(open_folder: Path) -> None:
    rows = (RUN.parent / "h200-torch-nsys-ncu" / "ncu-1.csv").read_text().splitlines(True)
    (open_folder / "t.csv").write_text("".join(rows[:5] + rows[6:]))
    done = ingest(open_folder, "--strict", "t.csv")
    assert done.returncode == 1 and "t.csv: new: " in done.stdout
    assert "warning: t.csv: " in done.stderr and "t.csv: t.csv" not in done.stderr


def test_runs_and_kernels_show_the_warnings_of_a_run(open_folder: Path) -> None:
    name = run_with_lost_trace(open_folder)
    ingest(open_folder, "run")
    store = ("--store", str(open_folder / "s.db"))
    for words in (
        ("runs",),
        ("kernels",),
        ("kernels", "--profiler", "all"),
        ("kernels", "--steps"),
    ):
        main = find_command(words[0])
        table = CliRunner().invoke(main, [*words[1:], *store])
        assert "First of 2 warnings: not ingested:" in " ".join(table.stdout.split())
        told = json.loads(CliRunner().invoke(main, [*words[1:], *store, "--format", "json"]).stdout)
        texts = told.get("warnings") or told["rows"][0]["warnings"]
        assert len(texts) == 2 and name in json.dumps(texts)
    csv = CliRunner().invoke(main, [*store, "--format", "csv"])
    assert "first of 2 warnings: not ingested:" in csv.stderr


def test_the_help_names_every_kind_of_source(open_folder: Path) -> None:
    text = ingest(open_folder, "--help").stdout
    for kind in (".json.gz", ".nsys-rep", ".sqlite", ".ncu-rep", ".csv", "run folder"):
        assert kind in text.lower(), kind


def test_the_command_that_shows_what_was_taken_in_works_as_printed(tmp_path: Path) -> None:
    one = ingest(tmp_path, str(TRACE))
    command = one.stderr.split("To show the run, use: ")[1].split()
    assert command == ["profharness", "layers", TRACE.name, "--store", "s.db"]
    shown = subprocess.run(
        [sys.executable, "-m", *command], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "flash" in shown.stdout
    two = ingest(tmp_path, str(TRACE), str(RUN))
    assert "To show the last of 2 runs, use: profharness kernels h200-torch2.11" in two.stderr


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (b"bad\xff\xfe.json", "bad\\udcff\\udcfe.json"),
        (b"a\nb\x1b[31m\x07.json", "a\\nb\\x1b[31m\\x07.json"),
        ("Größe \u202e.json".encode(), "Größe \\u202e.json"),
    ],
)
def test_odd_names_of_files_are_taken_in_and_shown_escaped(
    name: bytes, told: str, tmp_path: Path
) -> None:
    event = '{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,"ts":5,"dur":%s,"args":{}}'
    good = tmp_path / os.fsdecode(name)
    good.write_text('{"traceEvents": [' + event % "1" + "," + event % "-1" + "]}")
    command = [sys.executable, "-m", "profharness", "ingest"]
    store = ["--store", str(tmp_path / "s.db")]
    # by name, and found in a folder with another trace
    (tmp_path / "other.json").write_text('{"traceEvents": [' + event % "2" + "]}")
    for given, lines in ((good, 1), (tmp_path, 2)):
        done = subprocess.run([*command, given, *store], capture_output=True, check=False)
        out, err = done.stdout.decode(), done.stderr.decode()
        assert done.returncode == 0, err
        assert f"{tmp_path}/{told}: " in out and out.count("\n") == lines
        assert f"reading {tmp_path}/{told}\n" in err
        assert "\x1b" not in out + err and "\x07" not in out + err
    good.write_text("{")
    done = subprocess.run([*command, good, *store], capture_output=True, check=False)
    assert done.returncode == 1
    assert f"error: {tmp_path}/{told}, byte 1: " in done.stderr.decode()
    listed = subprocess.run(
        [sys.executable, "-m", "profharness", "runs", "--format", "json", *store],
        capture_output=True,
        check=True,
    )
    assert json.dumps(told, ensure_ascii=False)[1:-1] in listed.stdout.decode()


@pytest.mark.parametrize("more", [(), ("--scheduler", "local:2")])
def test_a_store_whose_folder_is_not_there_is_told_once(
    more: tuple[str, ...], tmp_path: Path
) -> None:
    store = tmp_path / "nowhere" / "s.db"
    words = "ingest", str(TRACE), str(RUN), "--store", str(store), *more
    done = CliRunner().invoke(cli, words)
    assert isinstance(done.exception, StoreError) and not done.output
    assert str(done.exception).endswith(
        "does not exist; create it or choose another store with --store"
    )


def test_a_pipe_is_no_missing_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(TraceFormatError, match="not a regular file"):
        ingest_path(tmp_path / "s.db", tmp_path / "pipe.json")
