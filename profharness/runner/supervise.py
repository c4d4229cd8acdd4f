"""Keeps a worker process going over a list of cells: reads its journal, ends it when it hangs,
replaces it when it dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from profharness.errors import CaptureError
from profharness.processes import child_environment, has_ended, held
from profharness.profilers.base import Ended, Outcome, Session
from profharness.run import JOURNAL_FILE, PLAN_FILE, Cell, JournalEntry, Plan, Protocol


class Journal:
    """journal.jsonl from where it ended when this was made: whole lines as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def entries(self) -> Iterator[JournalEntry]:
        """Entries written since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(msgspec.MsgspecError):
                yield msgspec.json.decode(line, type=JournalEntry)

    def append(self, entry: JournalEntry) -> None:
        """Write an entry of the parent's own, on a line of its own even after a line that a crash
        cut short.
        """
        data = (b"\n" if self._rest else b"") + msgspec.json.encode(entry) + b"\n"
        with self._path.open("ab") as file:
            file.write(data)
        self._offset += len(data)
        self._rest = b""


POLL_S = 0.01
START_TIMEOUT_S = 300.0  # importing torch and opening a CUDA context on a slow disk
LOG_FILE = "worker.log"
LOG_TAIL_BYTES = 4000
MAX_LOG_BYTES = 1 << 20


def worker_argv(folder: Path) -> list[str]:
    """-P: the user's own folder, which may hold a `kernels` or a `torch.py`, stays off the worker's
    path.
    """
    return [sys.executable, "-P", "-m", "profharness.worker", str(folder)]


@dataclass
class _Watch:
    """What is known of the running worker."""

    cell: str | None = None
    stage: str = "start"
    since: float = 0.0
    told_environment: bool = False
    ended: list[str] = field(default_factory=list)


@dataclass
class _Stop:
    """Whether the user has interrupted this start, and once more while it was ended."""

    asked: bool = False
    at_once: bool = False


def run_cells(
    folder: Path,
    cells: Sequence[Cell],
    protocol: Protocol,
    profilers: tuple[str, ...],
    on_entry: Callable[[JournalEntry], None],
    make_session: Callable[[], Session] = Session,
    on_outcome: Callable[[Outcome], None] = lambda _: None,
    command: Callable[[Path], list[str]] = worker_argv,
) -> None:
    """Run cells until each has an `end` entry in the journal; on_entry hears every entry, also
    those written here, on_outcome what each start of the worker left.

    Raises CaptureError when a worker cannot even start; on any exception (KeyboardInterrupt too)
    the worker is ended first, and nothing of it is left. A second interrupt ends it at once, and
    what a profiler around it would still have written is lost.
    """
    pending = {cell.cell: cell for cell in cells}
    journal = Journal(folder / JOURNAL_FILE)
    while pending:
        session = make_session()
        watch = _Watch(since=time.monotonic())
        stop = _Stop()
        returncode: int | None = None
        offset = _log_size(folder)
        try:
            plan = Plan(
                tuple(pending.values()), protocol, profilers, os.getpid(), wrapped=session.wrapped
            )
            (folder / PLAN_FILE).write_bytes(msgspec.json.encode(plan))
            try:
                with _started(session, command(folder), folder, stop) as process:
                    returncode = _follow(
                        process, journal, watch, pending, protocol.timeout_s, on_entry
                    )
            finally:
                _take(journal.entries(), watch, pending, on_entry)
                if not stop.at_once:
                    text = _log_since(folder, offset)
                    ended = Ended(returncode, text, tuple(watch.ended), stop.asked)
                    on_outcome(session.close(ended))
        finally:
            with held():
                session.discard()
        if watch.cell is not None:
            _bury(folder, offset, watch, returncode, pending, journal, on_entry)
        elif pending and not watch.told_environment:
            raise CaptureError(_start_failure(folder, offset, returncode))


def worker_environment(folder: Path, protocol: Protocol) -> dict[str, Any]:
    """What a worker on this machine says of its environment. Raises CaptureError when it cannot
    start.
    """
    heard: list[JournalEntry] = []
    journal = Journal(folder / JOURNAL_FILE)
    (folder / PLAN_FILE).write_bytes(msgspec.json.encode(Plan((), protocol, (), os.getpid())))
    watch = _Watch(since=time.monotonic())
    offset = _log_size(folder)
    with _started(Session(), worker_argv(folder), folder, _Stop()) as process:
        returncode = _follow(process, journal, watch, {}, protocol.timeout_s, heard.append)
    _take(journal.entries(), watch, {}, heard.append)
    if not heard or heard[0].environment is None:
        raise CaptureError(_start_failure(folder, offset, returncode))
    return heard[0].environment


def _follow(
    process: subprocess.Popen[bytes],
    journal: Journal,
    watch: _Watch,
    pending: dict[str, Cell],
    timeout_s: float,
    on_entry: Callable[[JournalEntry], None],
) -> int | None:
    """Until the process ends: its return code, or None if it takes too long."""
    while not has_ended(process):
        _take(journal.entries(), watch, pending, on_entry)
        limit = timeout_s if watch.cell is not None else max(START_TIMEOUT_S, timeout_s)
        if time.monotonic() - watch.since > limit:
            return None
        time.sleep(POLL_S)
    return process.returncode


def _take(
    entries: Iterator[JournalEntry],
    watch: _Watch,
    pending: dict[str, Cell],
    on_entry: Callable[[JournalEntry], None],
) -> None:
    for entry in entries:
        if entry.event == "environment":
            watch.told_environment, watch.since = True, time.monotonic()
        elif entry.event == "begin":
            watch.cell, watch.stage, watch.since = entry.cell, "begin", time.monotonic()
        elif entry.event == "stage":
            watch.stage = entry.stage or ""
        elif entry.event == "end":
            pending.pop(str(entry.cell), None)
            watch.ended.append(str(entry.cell))
            watch.cell, watch.since = None, time.monotonic()
        on_entry(entry)


def _bury(
    folder: Path,
    offset: int,
    watch: _Watch,
    returncode: int | None,
    pending: dict[str, Cell],
    journal: Journal,
    on_entry: Callable[[JournalEntry], None],
) -> None:
    """Write the result of the cell that its worker died of."""
    cell = pending.pop(str(watch.cell))
    if returncode is None:
        status, message = (
            "timeout",
            f"no answer during {watch.stage}; the worker was ended (see --timeout)",
        )
    else:
        status, message = "crashed", f"the worker died during {watch.stage}: {_how(returncode)}"
        tail = _log_tail(folder, offset)
        message += f"; its last words: {tail}" if tail else ""
    result = replace(cell, status=status, message=message)
    entry = JournalEntry("end", cell=cell.cell, result=result)
    journal.append(entry)
    on_entry(entry)


def _how(returncode: int) -> str:
    number = -returncode if returncode < 0 else returncode - 128  # 128 + n: so shells and nsys say
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"exit code {returncode}" if returncode >= 0 else f"signal {number}"


def _log_tail(folder: Path, offset: int) -> str:
    """The last non-empty line or two that the start whose log begins at offset wrote to stderr."""
    try:
        text = _log_since(folder, offset)[-LOG_TAIL_BYTES:]
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-2:])[:500]


def _start_failure(folder: Path, offset: int, returncode: int | None) -> str:
    how = "it gave no sign of life" if returncode is None else _how(returncode)
    tail = _log_tail(folder, offset)
    words = f": {tail}" if tail else ""
    return f"the worker process did not start ({how}){words}; `profharness doctor` shows what is missing"


@contextlib.contextmanager
def _started(
    session: Session, command: list[str], folder: Path, stop: _Stop
) -> Iterator[subprocess.Popen[bytes]]:
    """A worker in a process group of its own; at the end of the block nothing of it is left."""
    process: subprocess.Popen[bytes] | None = None
    try:
        with (folder / LOG_FILE).open("ab") as log, held():
            process = subprocess.Popen(
                session.argv(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=session.environment(child_environment()),
                start_new_session=True,
            )
        yield process
    except KeyboardInterrupt:
        stop.asked = True
        raise
    finally:
        if process is not None:
            _finish(session, process, stop)


def _finish(session: Session, process: subprocess.Popen[bytes], stop: _Stop) -> None:
    """End it, which a second interrupt cuts short, and clear up, which no interrupt does."""
    try:
        if not has_ended(process):
            _end(session, process, stop)
    finally:
        with held():
            session.clear(process, at_once=stop.at_once)
            process.wait()


def _end(session: Session, process: subprocess.Popen[bytes], stop: _Stop) -> None:
    try:
        session.end(process, hurry=stop.asked)
    except KeyboardInterrupt:
        if stop.asked:
            stop.at_once = True
        else:
            stop.asked = True
            _end(session, process, stop)
        raise


def _log_size(folder: Path) -> int:
    path = folder / LOG_FILE
    return path.stat().st_size if path.exists() else 0


def _log_since(folder: Path, offset: int) -> str:
    """What the last start wrote, at most MAX_LOG_BYTES of its end."""
    with (folder / LOG_FILE).open("rb") as log:
        log.seek(max(offset, _log_size(folder) - MAX_LOG_BYTES))
        return log.read().decode(errors="replace")
