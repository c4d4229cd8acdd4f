"""Exports through a real child process: complete or not at all, with no process left."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_tools import Behaviour, Scenario, environments, install, invocations
from waiting import PATIENCE_S, alive, start_limits_with, until, written_pid

from profharness import processes
from profharness.recording.profilers.base import ToolError
from profharness.recording.profilers.nsys import export_report


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    path = tmp_path / "prepared.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT)")
    connection.commit()
    connection.close()
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def tool(folder: Path, behaviour: Behaviour) -> Path:
    install(folder / "bin", Scenario(export=behaviour))
    return folder / "bin" / "nsys"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_export_appears_under_its_name(tmp_path: Path, prepared: Path, out: Path) -> None:
    nsys = tool(tmp_path, Behaviour(report_file=str(prepared)))
    (out / "a.sqlite").write_bytes(b"an old one")
    export_report(tmp_path / "a.nsys-rep", out / "a.sqlite", nsys)
    assert (out / "a.sqlite").read_bytes() == prepared.read_bytes()
    assert names(out) == ["a.sqlite"]
    log = tmp_path / "bin" / "invocations.jsonl"
    (argv,) = invocations(log)
    assert argv[1:4] == ["export", "--type=sqlite", "--force-overwrite=true"]
    assert argv[4].startswith(f"--output={out}/.a.sqlite.")
    assert argv[5:] == [str(tmp_path / "a.nsys-rep")]
    assert environments(log)[0]["LC_ALL"] == "C"


FAILURES = {
    "garbage": (1, "Version tag is not found in the stream.", "report_damaged"),
    "empty": (1, "Exportation error: Cannot read from stream.", "report_damaged"),
    "truncated": (1, "Section Table Reference magic number mismatch.", "report_damaged"),
    "newer": (1, "Exportation error: ProtobufParseException", "version_mismatch"),
    "newer, old nsys": (
        1,
        "Exportation error: Version not supported: 36398880",
        "version_mismatch",
    ),
    "newer, old nsys, by name": (
        1,
        "Version number is invalid: 2023@4@4@54-234433681190v0",
        "version_mismatch",
    ),
    "loader": (
        127,
        "nsys: error while loading shared libraries: libelf.so.1: cannot open shared object file",
        "tool_library_missing",
    ),
    "unknown words": (1, "Exportation error: no idea", "export_failed"),
    "no words": (1, "", "export_failed"),
    "a signal": (-1, "", "export_failed"),
    "well, it says": (0, "", "export_empty"),
}


@pytest.mark.parametrize(
    ("case", "left"),
    [
        *((case, "new") for case in FAILURES),
        *((case, left) for case in ("well, it says", "a signal") for left in ("empty", "none")),
    ],
)
def test_failed_export_leaves_nothing(case: str, left: str, tmp_path: Path, out: Path) -> None:
    returncode, text, code = FAILURES[case]
    behaviour = Behaviour(stderr=text + "\n", returncode=returncode, report=left)
    with pytest.raises(ToolError) as caught:
        export_report(tmp_path / "a.nsys-rep", out / "a.sqlite", tool(tmp_path, behaviour))
    assert caught.value.problem.code == code
    assert names(out) == []


def test_failed_export_leaves_the_old_file(tmp_path: Path, out: Path) -> None:
    (out / "a.sqlite").write_bytes(b"an old one")
    with pytest.raises(ToolError, match=r"\[export_failed\]"):
        export_report(
            tmp_path / "a.nsys-rep", out / "a.sqlite", tool(tmp_path, Behaviour(returncode=1))
        )
    assert (out / "a.sqlite").read_bytes() == b"an old one"
    assert names(out) == ["a.sqlite"]


@pytest.mark.parametrize("ignore_signals", [False, True])
def test_hanging_export_is_ended(
    ignore_signals: bool, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nsys = hanging(tmp_path, ignore_signals)
    start_limits_with(monkeypatch, lambda: written_pid(tmp_path / "pid"))
    with pytest.raises(ToolError, match=r"took too long.*\[timeout\]"):
        export_report(tmp_path / "a.nsys-rep", out / "a.sqlite", nsys, timeout_s=1.0)
    assert names(out) == []
    assert not alive(int((tmp_path / "pid").read_text()))


def test_interrupted_export_leaves_no_process_and_no_file(tmp_path: Path, out: Path) -> None:
    nsys = hanging(tmp_path, ignore_signals=False)
    code = (
        "from pathlib import Path; from profharness.recording.profilers.nsys import export_report;"
        f"export_report(Path('a.nsys-rep'), Path({str(out / 'a.sqlite')!r}), Path({str(nsys)!r}))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stderr=subprocess.PIPE, start_new_session=True
    )
    until(lambda: written_pid(tmp_path / "pid"), process)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert b"KeyboardInterrupt" in stderr
    assert names(out) == []
    assert not alive(int((tmp_path / "pid").read_text()))


def test_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=r"\[output_unwritable\]"):
        export_report(
            tmp_path / "a.nsys-rep", tmp_path / "no" / "a.sqlite", tool(tmp_path, Behaviour())
        )


def test_missing_tool_is_reported(tmp_path: Path, out: Path) -> None:
    with pytest.raises(ToolError, match=r"\[tool_missing\]"):
        export_report(tmp_path / "a.nsys-rep", out / "a.sqlite", tmp_path / "no" / "nsys")
    assert names(out) == []


def test_interrupt_during_the_start_of_an_export_leaves_no_process(
    tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    children = []

    class Interrupted(processes.ProcessGroup):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            children.append(self)
            signal.raise_signal(signal.SIGINT)

    nsys = hanging(tmp_path, ignore_signals=False)
    monkeypatch.setattr(processes, "ProcessGroup", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_report(tmp_path / "a.nsys-rep", out / "a.sqlite", nsys)
    assert [child.returncode for child in children] != [None]
    assert not alive(children[0].pid)


def hanging(folder: Path, ignore_signals: bool) -> Path:
    """Write an nsys that stores its pid (which exec keeps) and hangs in its export."""
    real = tool(folder, Behaviour(hang=True, ignore_signals=ignore_signals))
    wrapper = folder / "wrapper"
    wrapper.write_text(f'#!/bin/sh\necho $$ > {folder}/pid\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    return wrapper
