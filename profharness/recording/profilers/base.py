"""The base of all profilers: tools, sessions (one start of the worker), and failure rules."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from profharness.errors import ProfharnessError
from profharness.processes import find_workers, kill, kill_group, wait_for
from profharness.run import Problem, Protocol, TraceFile

SHUTDOWN_TIMEOUT_S = 20.0
SHUTDOWN_AT_ONCE_S = 3.0
# A file written after `started` may have an earlier time: the kernel uses the time of its last tick,
# and some file systems store whole or even seconds only.
TICK_S = 0.1
WHOLE_SECONDS_S = 2.0
LAST_LINES = 3
LAST_CHARACTERS = 400
# Texts shared by the rules of several tools.
NO_SANDBOX = "profile on a virtual machine or bare metal; `--profiler torch` works without {tool}"
OWN_TMPDIR = "set TMPDIR to a folder that exists and is writable"
TOOL_OPTIONS = "install a version from 2022.4 to 2026.2, or see `{tool} --help` for its options"


class ToolError(ProfharnessError):
    """A call of a profiler's tool failed."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(f"{problem.message}; {problem.remedy} [{problem.code}]")
        self.problem = problem


@dataclass(frozen=True)
class FailureRule:
    """A text that identifies a failure."""

    code: str
    # Searched with `^` and `$` at line ends; `\A` matches before the line on how the tool ended
    # (`exit code 1`, `signal 9`).
    pattern: str
    # message and remedy may contain the pattern's groups in braces, and {report}, the output file.
    message: str
    remedy: str
    quoted: bool = False  # append the last lines of the text to the message
    written: bool = True  # also applies if a report was written
    late: bool = False  # applies if the tool took too long, and only then

    def problem(
        self, profiler: str, report: Path, groups: dict[str, str | None], text: str = ""
    ) -> Problem:
        """Return the failure as a problem, with its placeholders filled in."""
        blanks = {"report": report.name, **groups}
        message = self.message.format(**blanks) + (quoted(text) if self.quoted else "")
        return Problem(profiler, self.code, message, self.remedy.format(**blanks))


LIBRARY_MISSING = FailureRule(
    "tool_library_missing",
    r"error while loading shared libraries: (?P<library>[^:\s]+)",
    "a program did not start for want of the library {library}, and there is no {report}",
    "install the package that has it (libelf1 for libelf.so.1, libdw1 for libdw.so.1)",
)


def match_rules(
    profiler: str,
    rules: Sequence[FailureRule],
    returncode: int | None,
    text: str,
    report: Path,
    *,
    written: bool = False,
) -> Problem | None:
    """Return the problem of the first matching rule.

    `returncode` is None if the tool was ended because it took too long.
    """
    late = returncode is None
    head = "" if returncode is None else f"{how_ended(returncode)}\n"
    for rule in rules:
        if rule.late == late and (rule.written or not written):
            match = re.search(rule.pattern, head + text, re.MULTILINE)
            if match:
                return rule.problem(profiler, report, match.groupdict(), text)
    if not late:
        return None
    return Problem(
        profiler,
        "timeout",
        f"{profiler} took too long and was ended before {report.name} was complete",
        "allow more time with --timeout, or give it less to do: fewer cells, smaller configs, "
        "fewer metrics",
    )


def diagnose(
    profiler: str,
    rules: Sequence[FailureRule],
    returncode: int | None,
    text: str,
    report: Path,
    started: float,
) -> Problem | None:
    """Return why a tool left no usable report, or None if it did.

    `returncode` is None if the tool was ended because it took too long. `text` is the output of the
    tool and its target. `started` is `time.time()` before the start. The exit code proves nothing:
    nsys exits with 0 without a report, and with the target's code although the report is fine.
    """
    state = report_state(report, started)
    fresh = state == "fresh"
    problem = match_rules(profiler, rules, returncode, text, report, written=fresh)
    if problem is not None or returncode is None or fresh:
        return problem
    what, remedy = _NO_REPORT[state]
    message = f"{profiler} ended ({how_ended(returncode)}) {what.format(report=report.name)}"
    return Problem(profiler, f"report_{state}", message + quoted(text), remedy)


_NO_REPORT = {
    "missing": (
        "without writing {report}",
        "run `profharness doctor`; see the log for what the tool and the target wrote",
    ),
    "empty": ("and left {report} empty", "see whether the disk is full, then run again"),
    "stale": (
        "and left the older {report} as it was",
        "remove the old report or write to a new folder, then run again",
    ),
}


def report_damaged(profiler: str, report: Path, why: str) -> Problem:
    """Return the problem of a report that cannot be read. `why` is the reader's message."""
    return Problem(
        profiler,
        "report_damaged",
        f"{profiler} left {report.name}, which cannot be read: {why}",
        "see whether the disk is full and whether something ended the tool while it wrote, then "
        "capture again",
    )


def report_state(report: Path, started: float) -> str:
    """Return `missing`, `empty`, `stale` (older than `started`, a `time.time()`) or `fresh`."""
    try:
        stat = report.stat()
    except OSError:
        return "missing"
    if not report.is_file() or stat.st_size == 0:
        return "empty"
    slack = WHOLE_SECONDS_S if stat.st_mtime_ns % 1_000_000_000 == 0 else TICK_S
    return "stale" if stat.st_mtime < started - slack else "fresh"


def quoted(text: str) -> str:
    """Return the last lines of a tool's output in one line, to be quoted in an error message."""
    # progress bars end lines with a carriage return
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    tail = " / ".join(lines[-LAST_LINES:])
    if len(tail) > LAST_CHARACTERS:
        tail = "…" + tail[-LAST_CHARACTERS:]
    return f"; its output: {tail}" if tail else ""


def how_ended(returncode: int) -> str:
    """Return `exit code 1` or `signal 9`."""
    return f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"


@dataclass(frozen=True)
class Tool:
    """An executable of a profiler."""

    name: str
    path: Path
    version: str | None  # None if it does not print one
    on_path: bool  # whether the shell finds it by name


def version_key(text: str | Path) -> tuple[int, ...]:
    """Return the numbers in a version or a path, so that 2025.10 sorts after 2025.9."""
    return tuple(int(number) for number in re.findall(r"\d+", str(text)))


def output_argument(report: Path, suffix: str) -> str:
    """Return a report's path as an argument of nsys or ncu, which expand %p, %h and %q{NAME}.

    Raise ValueError for another suffix, to which the tool would append its own.
    """
    if report.suffix != suffix:
        raise ValueError(f"{report}: the report must end in {suffix}")
    return str(report).replace("%", "%%")


# Seconds that an ended tool gets to write its report after each signal: the interrupt, the end of
# the worker, and SIGTERM. The second is for an interrupt by the user.
GRACE_S = (30.0, 60.0, 10.0)
HURRIED_S = (10.0, 5.0, 2.0)

Outcome = tuple[TraceFile | None, Problem | None]
"""The trace and the problem that a start of the worker left."""


class Session:
    """One start of the worker, without a tool around it."""

    wrapped = False
    notify: Callable[[str], None] = staticmethod(lambda _: None)  # receives messages for the user
    logs: tuple[Path, ...] = ()  # logs of a tool besides the worker's log

    def argv(self, command: list[str]) -> list[str]:
        return command

    def environment(self, base: dict[str, str]) -> dict[str, str]:
        return base

    def end(self, process: subprocess.Popen[bytes], *, hurry: bool = False) -> None:  # noqa: ARG002
        """End the process. A bare worker has nothing to write, so kill it at once.

        `hurry` is set after an interrupt by the user.
        """
        kill_group(process)

    def clear(self, process: subprocess.Popen[bytes], *, at_once: bool = False) -> None:  # noqa: ARG002
        """Kill everything the process left running, however it ended."""
        kill_group(process)

    def close(
        self,
        returncode: int | None,  # noqa: ARG002
        text: str,  # noqa: ARG002
        cells: tuple[str, ...],  # noqa: ARG002
        *,
        interrupted: bool,  # noqa: ARG002
    ) -> Outcome:
        """Return what the process left. Called at most once, after its end.

        `returncode` is None if it took too long or the user interrupted it. `text` is all output of
        the process and the worker, and `cells` those that have a result from this start.
        """
        return None, None

    def discard(self) -> None:
        """Remove temporary files. Called once, last of all."""


@dataclass
class ToolSession(Session):
    """One start of the worker under a profiler's tool."""

    tool: Tool
    report: Path  # the tool's own file, with a fresh name for each start
    protocol: Protocol
    notify: Callable[[str], None] = lambda _: None
    grace_s: Sequence[float] = field(default_factory=lambda: GRACE_S)

    wrapped = True

    def __post_init__(self) -> None:
        self.scratch = Path(tempfile.mkdtemp(prefix=f"profharness-{self.tool.name}-"))
        self.started = time.time()

    def close(
        self, returncode: int | None, text: str, cells: tuple[str, ...], *, interrupted: bool
    ) -> Outcome:
        """Return the trace if it contains kernels, or the problem."""
        name = self.tool.name
        try:
            problem, path = self.judge(returncode, text)
        except ToolError as error:
            problem, path = error.problem, None
        # the rules see that a tool was ended, but not that the user did it
        if interrupted and problem is not None and problem.code == "timeout":
            problem = Problem(
                name,
                "interrupted",
                f"{name} was interrupted before {self.report.name} was complete",
                "`profharness capture --resume RUN` does what is left",
            )
        if problem is not None:
            raw = "\n".join(text.splitlines()[-20:])
            problem = replace(problem, raw=raw, cells=cells)
        return TraceFile(name, path.name, cells) if path else None, problem

    def discard(self) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)

    def judge(self, returncode: int | None, text: str) -> tuple[Problem | None, Path | None]:
        """Return the problem, if any, and the file to ingest, if one can be read."""
        raise NotImplementedError

    def end(self, process: subprocess.Popen[bytes], *, hurry: bool = False) -> None:
        """End the tool so that it can write its report, then with stronger signals.

        With `hurry`, wait less and report to the user why ending takes time.
        """
        grace_s = self.grace_s
        if hurry:
            grace_s = list(map(min, grace_s, HURRIED_S))
            self.notify(
                f"ending {self.tool.name} so that its report is written "
                "(Ctrl-C again ends it at once)…"
            )
        steps: Sequence[Callable[[], None]] = (
            lambda: self.interrupt(process),
            # a tool writes its report after its target has ended
            lambda: self.signal_workers(signal.SIGKILL),
            lambda: kill(process.pid, signal.SIGTERM),
        )
        for act, seconds in zip(steps, grace_s, strict=True):
            act()
            if wait_for(process, seconds):
                return
        kill_group(process)

    def clear(self, process: subprocess.Popen[bytes], *, at_once: bool = False) -> None:
        """Kill what is left. A killed tool leaves its target, which has its own session."""
        kill_group(process)
        if find_workers(self.report.parent):
            self.force(process.pid, SHUTDOWN_AT_ONCE_S if at_once else SHUTDOWN_TIMEOUT_S)
            self.signal_workers(signal.SIGKILL)

    def signal_workers(self, number: signal.Signals) -> None:
        """Send a signal to the worker, whatever its process session."""
        for pid in find_workers(self.report.parent):
            kill(pid, number)

    def interrupt(self, process: subprocess.Popen[bytes]) -> None:
        """Interrupt the tool so that it writes its report and ends."""
        raise NotImplementedError

    def force(self, pid: int, timeout_s: float) -> None:
        """Remove processes that survive the tool."""
