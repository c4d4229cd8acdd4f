"""One start of the worker: bare, or under nsys or ncu, which have to be called, ended and judged
each in its own way.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from profharness.errors import TraceFormatError
from profharness.nsight import ncu, nsys
from profharness.nsight.failures import (
    Failure,
    NsightError,
    diagnose_ncu,
    diagnose_nsys,
    interrupted,
    no_cuda_events,
    report_damaged,
)
from profharness.nsight.ncu_file import check_file
from profharness.nsight.tools import Tool
from profharness.record import Problem, Protocol, TraceFile
from profharness.runner.interrupts import wait_for

Argv = list[str]

KERNEL_TABLE = "CUPTI_ACTIVITY_KIND_KERNEL"
SQLITE_MAGIC = b"SQLite format 3\0"
SHUTDOWN_TIMEOUT_S = 20.0
SHUTDOWN_AT_ONCE_S = 3.0


@dataclass(frozen=True)
class Grace:
    """Seconds that an ended tool gets to write its report, after each stronger signal."""

    interrupt_s: float = 30.0
    worker_s: float = 60.0
    terminate_s: float = 10.0

    def at_most(self, other: Grace) -> Grace:
        """The shorter of each."""
        return Grace(
            min(self.interrupt_s, other.interrupt_s),
            min(self.worker_s, other.worker_s),
            min(self.terminate_s, other.terminate_s),
        )


HURRIED = Grace(10.0, 5.0, 2.0)  # the user waits


@dataclass(frozen=True)
class Ended:
    """How one start went: returncode None means that it was ended, because it took too long or the
    user interrupted it; text is what the process and the worker wrote; cells are those with a
    result from it.
    """

    returncode: int | None
    text: str
    cells: tuple[str, ...]
    interrupted: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a start left besides the journal's results."""

    trace: TraceFile | None = None
    problem: Problem | None = None


class Session:
    """The worker without any program around it."""

    wrapped = False

    def argv(self, command: Argv) -> Argv:
        """The argv that is started."""
        return command

    def environment(self, base: dict[str, str]) -> dict[str, str]:
        """The environment that it is started with."""
        return base

    def end(self, process: subprocess.Popen[bytes], *, hurry: bool = False) -> None:  # noqa: ARG002
        """End it, at once: the bare worker has nothing to write. hurry: the user interrupted."""
        kill_group(process)

    def clear(self, process: subprocess.Popen[bytes], *, at_once: bool = False) -> None:  # noqa: ARG002
        """Leave nothing running, whether the process was ended or ended by itself."""
        kill_group(process)

    def close(self, ended: Ended) -> Outcome:  # noqa: ARG002
        """What it left; called once at most, after the process has ended."""
        return Outcome()

    def discard(self) -> None:
        """Remove what it needed for itself; called once, last of all."""


def _silent(_: str) -> None:
    """For callers who need not know what is waited for."""


@dataclass
class NsightSession(Session):
    """The worker under nsys or ncu. report is the tool's own file, a fresh name for each start;
    tell hears what the user has to wait for.
    """

    profiler: str
    tool: Tool
    report: Path
    protocol: Protocol
    grace: Grace = field(default_factory=Grace)
    tell: Callable[[str], None] = _silent

    wrapped = True

    def __post_init__(self) -> None:
        self.scratch = Path(tempfile.mkdtemp(prefix=f"profharness-{self.profiler}-"))
        self.started = time.time()

    def close(self, ended: Ended) -> Outcome:
        """The trace, if there is one that tells of kernels, else what went wrong."""
        try:
            failure, trace = self.judge(ended)
        except NsightError as error:
            failure, trace = error.failure, None
        if ended.interrupted and failure is not None and failure.code == "timeout":
            failure = interrupted(self.profiler, self.report)
        file = TraceFile(self.profiler, trace.name, ended.cells) if trace else None
        if failure is None:
            return Outcome(file)
        raw = "\n".join(ended.text.splitlines()[-20:])
        problem = Problem(
            self.profiler, failure.code, failure.message, failure.remedy, raw, ended.cells
        )
        return Outcome(file, problem)

    def discard(self) -> None:
        """Remove the temporary folder, with what the tool left in it."""
        shutil.rmtree(self.scratch, ignore_errors=True)

    def judge(self, ended: Ended) -> tuple[Failure | None, Path | None]:
        """The failure, if any, and the file to ingest, if there is one that can be read."""
        raise NotImplementedError

    def end(self, process: subprocess.Popen[bytes], *, hurry: bool = False) -> None:
        """First what lets the report still be written, then by force; in a hurry after less time,
        and not without a word.
        """
        grace = self.grace.at_most(HURRIED) if hurry else self.grace
        if hurry:
            self.tell(
                f"ending {self.profiler} so that its report is written "
                "(Ctrl-C again ends it at once)…"
            )
        waits: Sequence[tuple[Callable[[], None], float]] = (
            (lambda: self.interrupt(process), grace.interrupt_s),
            (lambda: self.signal_workers(signal.SIGKILL), grace.worker_s),
            (lambda: kill(process.pid, signal.SIGTERM), grace.terminate_s),
        )
        for act, seconds in waits:
            act()
            if wait_for(process, seconds):
                return
        kill_group(process)

    def clear(self, process: subprocess.Popen[bytes], *, at_once: bool = False) -> None:
        """A tool that was killed leaves its target, in a session of its own."""
        kill_group(process)
        if find_workers(self.report.parent):
            self.force(process.pid, SHUTDOWN_AT_ONCE_S if at_once else SHUTDOWN_TIMEOUT_S)
            self.signal_workers(signal.SIGKILL)

    def signal_workers(self, number: signal.Signals) -> None:
        """Send a signal to the worker, whatever session it is in."""
        for pid in find_workers(self.report.parent):
            kill(pid, number)

    def interrupt(self, process: subprocess.Popen[bytes]) -> None:
        """Ask for the end."""
        raise NotImplementedError

    def force(self, pid: int, timeout_s: float) -> None:
        """Clear away what survives the tool's own death."""


class NsysSession(NsightSession):
    """Under `nsys profile`; the report is exported to SQLite at once, by the nsys that wrote it."""

    def argv(self, command: Argv) -> Argv:
        return nsys.profile_argv(self.tool.path, self.report, command)

    def environment(self, base: dict[str, str]) -> dict[str, str]:
        return nsys.child_environment(base, self.scratch)

    def judge(self, ended: Ended) -> tuple[Failure | None, Path | None]:
        failure = diagnose_nsys(ended.returncode, ended.text, self.report, self.started)
        if not self.report.exists():
            return failure, None
        exported = self.report.with_suffix(".sqlite")
        nsys.export_report(self.report, exported, self.tool.path)
        try:
            kernels = count_kernels(exported)
        except TraceFormatError as error:
            return report_damaged("nsys", exported, str(error)), None
        if kernels == 0:
            failure = failure or no_cuda_events(self.report)
        return failure, exported

    def interrupt(self, process: subprocess.Popen[bytes]) -> None:
        kill(process.pid, signal.SIGINT)

    def force(self, pid: int, timeout_s: float) -> None:
        """nsys leaves a daemon in a session of its own, which holds the target."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                nsys.shutdown_argv(self.tool.path, pid),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_s,
                check=False,
            )


class NcuSession(NsightSession):
    """Under `ncu`, one process for all cells of a start."""

    @property
    def log(self) -> Path:
        """ncu's own words, apart from the worker's."""
        return self.scratch / "ncu.log"

    def argv(self, command: Argv) -> Argv:
        return ncu.profile_argv(
            self.tool.path,
            self.report,
            command,
            log=self.log,
            metrics=self.protocol.metrics,
            sections=self.protocol.sections,
            version=self.tool.version,
        )

    def environment(self, base: dict[str, str]) -> dict[str, str]:
        return ncu.child_environment(base, self.scratch)

    def judge(self, ended: Ended) -> tuple[Failure | None, Path | None]:
        said = self.log.read_text(errors="replace") if self.log.exists() else ""
        text = f"{ended.text}\n{said}"
        failure = diagnose_ncu(ended.returncode, text, self.report, self.started)
        if not self.report.exists():
            return failure, None
        try:
            check_file(self.report)
        except TraceFormatError as error:
            return failure or report_damaged("ncu", self.report, str(error)), None
        return failure, self.report

    def interrupt(self, process: subprocess.Popen[bytes]) -> None:  # noqa: ARG002
        """ncu writes its report when its target ends, however that ends."""
        self.signal_workers(signal.SIGTERM)


def count_kernels(export: Path) -> int:
    """Kernels in an nsys export; 0 where the table is missing too. Raises TraceFormatError for a
    file that is no SQLite database or is cut off.
    """
    with export.open("rb") as file:
        header = file.read(100)
    if not header.startswith(SQLITE_MAGIC) or len(header) < 100:
        raise TraceFormatError(export.name, "not an SQLite file", expected="an export of nsys")
    page = int.from_bytes(header[16:18], "big")
    # 1 stands for 65,536; a writer that does not keep the count leaves the two counters different
    expected = int.from_bytes(header[28:32], "big") * (65536 if page == 1 else page)
    size = export.stat().st_size
    if header[24:28] == header[92:96] and size < expected:
        raise TraceFormatError(export.name, "cut off", offset=size, expected=f"{expected} bytes")
    connection = sqlite3.connect(f"{export.absolute().as_uri()}?mode=ro", uri=True)
    try:
        return int(connection.execute(f"SELECT count(*) FROM {KERNEL_TABLE}").fetchone()[0])
    except sqlite3.OperationalError:
        return 0
    except sqlite3.DatabaseError as error:
        raise TraceFormatError(export.name, f"damaged: {error}") from None
    finally:
        connection.close()


def find_workers(folder: Path) -> list[int]:
    """Processes of this Python whose last argument is the run folder: its workers, also those that
    a dead tool has left behind.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")[:-1]
        except OSError:
            continue
        if words and words[0] == os.fsencode(sys.executable) and words[-1] == os.fsencode(folder):
            found.append(int(path.name))
    return found


def kill(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may be gone already."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
