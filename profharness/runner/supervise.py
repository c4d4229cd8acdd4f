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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from profharness.errors import CaptureError
from profharness.record import JOURNAL_FILE, PLAN_FILE, Cell, JournalEntry, Plan, Protocol

POLL_S = 0.01
START_TIMEOUT_S = 300.0  # importing torch and opening a CUDA context on a slow disk
LOG_FILE = "worker.log"
LOG_TAIL_BYTES = 4000


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


def run_cells(
    folder: Path,
    cells: Sequence[Cell],
    protocol: Protocol,
    profilers: tuple[str, ...],
    on_entry: Callable[[JournalEntry], None],
    wrap: Callable[[list[str]], list[str]] = lambda argv: argv,
) -> None:
    """Run cells until each has an `end` entry in the journal; on_entry hears every entry, also
    those written here.

    Raises CaptureError when a worker cannot even start; on any exception (KeyboardInterrupt too)
    the worker is ended first.
    """
    pending = {cell.cell: cell for cell in cells}
    journal = _Journal(folder / JOURNAL_FILE)
    while pending:
        plan = Plan(tuple(pending.values()), protocol, profilers, os.getpid())
        (folder / PLAN_FILE).write_bytes(msgspec.json.encode(plan))
        watch = _Watch(since=time.monotonic())
        with _worker(wrap(worker_argv(folder)), folder) as process:
            returncode = _follow(process, journal, watch, pending, protocol.timeout_s, on_entry)
        _take(journal.entries(), watch, pending, on_entry)
        if watch.cell is not None:
            _bury(folder, watch, returncode, pending, journal, on_entry)
        elif pending and not watch.told_environment:
            raise CaptureError(_start_failure(folder, returncode))


def worker_environment(folder: Path, protocol: Protocol) -> dict[str, Any]:
    """What a worker on this machine says of its environment. Raises CaptureError when it cannot
    start.
    """
    heard: list[JournalEntry] = []
    journal = _Journal(folder / JOURNAL_FILE)
    (folder / PLAN_FILE).write_bytes(msgspec.json.encode(Plan((), protocol, (), os.getpid())))
    watch = _Watch(since=time.monotonic())
    with _worker(worker_argv(folder), folder) as process:
        returncode = _follow(process, journal, watch, {}, protocol.timeout_s, heard.append)
    _take(journal.entries(), watch, {}, heard.append)
    if not heard or heard[0].environment is None:
        raise CaptureError(_start_failure(folder, returncode))
    return heard[0].environment


def _follow(
    process: subprocess.Popen[bytes],
    journal: _Journal,
    watch: _Watch,
    pending: dict[str, Cell],
    timeout_s: float,
    on_entry: Callable[[JournalEntry], None],
) -> int | None:
    """Until the worker ends: its return code, or None if it had to be killed for taking too long."""
    while process.poll() is None:
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
            watch.cell, watch.since = None, time.monotonic()
        on_entry(entry)


def _bury(
    folder: Path,
    watch: _Watch,
    returncode: int | None,
    pending: dict[str, Cell],
    journal: _Journal,
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
        tail = _log_tail(folder)
        message += f"; its last words: {tail}" if tail else ""
    result = replace(cell, status=status, message=message)
    entry = JournalEntry("end", cell=cell.cell, result=result)
    journal.append(entry)
    on_entry(entry)


def _how(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


def _log_tail(folder: Path) -> str:
    """The last non-empty line or two that the worker wrote to stderr."""
    try:
        data = (folder / LOG_FILE).read_bytes()[-LOG_TAIL_BYTES:]
    except OSError:
        return ""
    lines = [line.strip() for line in data.decode(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-2:])[:500]


def _start_failure(folder: Path, returncode: int | None) -> str:
    how = "it gave no sign of life" if returncode is None else _how(returncode)
    tail = _log_tail(folder)
    words = f": {tail}" if tail else ""
    return f"the worker process did not start ({how}){words}; `profharness doctor` shows what is missing"


@contextlib.contextmanager
def _worker(argv: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker in a process group of its own; at the end of the block nothing of the group is left."""
    with (folder / LOG_FILE).open("ab") as log:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=_child_environment(),
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def _child_environment() -> dict[str, str]:
    """This process's environment with profharness importable, behind whatever the user put on the
    path.
    """
    root = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{root}" if path else root}


class _Journal:
    """The journal as the parent reads it: whole lines as they come."""

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
