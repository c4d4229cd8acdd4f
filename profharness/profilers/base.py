"""One start of the worker: bare, or under nsys or ncu, which have to be called, ended and judged
each in its own way.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from profharness.processes import find_workers, kill, kill_group, wait_for
from profharness.profilers.failures import (
    Failure,
    NsightError,
    interrupted,
)
from profharness.profilers.tools import Tool
from profharness.run import Problem, Protocol, TraceFile

Argv = list[str]

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
