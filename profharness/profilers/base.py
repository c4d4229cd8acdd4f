"""What every profiler has: its tool, one start of the worker under it, and the rules by which a
start is judged.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path

from profharness.errors import ProfharnessError
from profharness.processes import find_workers, kill, kill_group, wait_for
from profharness.run import Problem, Protocol, TraceFile

SHUTDOWN_TIMEOUT_S = 20.0
SHUTDOWN_AT_ONCE_S = 3.0
# A file written after `started` may bear an earlier time: the kernel stamps with its last tick, and
# some file systems keep whole or even seconds only.
TICK_S = 0.1
WHOLE_SECONDS_S = 2.0
LAST_LINES = 3
LAST_CHARACTERS = 400
# Texts that rules for several tools share.
NO_SANDBOX = "profile on a virtual machine or bare metal; `--profiler torch` works without {tool}"
OWN_TMPDIR = "set TMPDIR to a folder that exists and is writable"
TOOL_OPTIONS = "install a version from 2022.4 to 2026.2, or see `{tool} --help` for its options"
LOADER = r"error while loading shared libraries: (?P<library>[^:\s]+)"


@dataclass(frozen=True)
class Failure:
    """Why a tool left nothing to work with. code is stable; remedy says what to do."""

    code: str
    message: str
    remedy: str


class ToolError(ProfharnessError):
    """A call of a profiler's tool failed. raw is everything that the tool and its target wrote."""

    def __init__(self, failure: Failure, raw: str = "") -> None:
        super().__init__(f"{failure.message}; {failure.remedy} [{failure.code}]")
        self.failure = failure
        self.raw = raw


@dataclass(frozen=True)
class Rule:
    """A text by which a failure is known.

    pattern is searched with `^` and `$` at line ends; `\\A` begins the line that says how the tool
    ended (`exit code 1`, `signal 9`). message and remedy may name its groups in braces, and
    {report}, the name of the file that was to be written. quoted: the last lines of the text follow
    the message. written: the rule also holds where a report was written.
    """

    code: str
    pattern: str
    message: str
    remedy: str
    quoted: bool = False
    written: bool = True

    def failure(
        self, report: Path, groups: Mapping[str, str | None] | None = None, text: str = ""
    ) -> Failure:
        """The failure with its blanks filled in."""
        blanks = {"report": report.name, **(groups or {})}
        message = self.message.format(**blanks) + (quoted(text) if self.quoted else "")
        return Failure(self.code, message, self.remedy.format(**blanks))


@dataclass(frozen=True)
class Rules:
    """The rules of one tool; the first match counts. timeout: those for a tool that took too long."""

    tool: str
    rules: Sequence[Rule]
    timeout: Sequence[Rule] = ()

    def match(
        self, returncode: int | None, text: str, report: Path, *, written: bool = False
    ) -> Failure | None:
        """The failure that the rules find; returncode None: the tool was ended for its time."""
        if returncode is None:
            return _first(self.timeout, text, report) or Failure(
                "timeout",
                f"{self.tool} took too long and was ended before {report.name} was complete",
                "allow more time with --timeout, or give it less to do: fewer cells, smaller configs, "
                "fewer metrics",
            )
        rules = [rule for rule in self.rules if rule.written or not written]
        return _first(rules, text, report, head=f"{how_ended(returncode)}\n")


def diagnose(
    rules: Rules, returncode: int | None, text: str, report: Path, started: float
) -> Failure | None:
    """Why a tool left no usable report; None when it did.

    returncode None: it was ended for taking too long. text: all that the tool and its target wrote.
    started: `time.time()` before the start. The exit code proves nothing either way: nsys exits 0
    without a report, and with the target's code although the report is fine.
    """
    state = report_state(report, started)
    failure = rules.match(returncode, text, report, written=state == "fresh")
    if failure is not None or returncode is None or state == "fresh":
        return failure
    what, remedy = _NO_REPORT[state]
    message = f"{rules.tool} ended ({how_ended(returncode)}) {what.format(report=report.name)}"
    return Failure(f"report_{state}", message + quoted(text), remedy)


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


def report_damaged(tool: str, report: Path, why: str) -> Failure:
    """The failure of a tool whose report nobody can read; why: the reader's words."""
    return Failure(
        "report_damaged",
        f"{tool} left {report.name}, which cannot be read: {why}",
        "see whether the disk is full and whether something ended the tool while it wrote, then "
        "capture again",
    )


def report_state(report: Path, started: float) -> str:
    """`missing`, `empty`, `stale` (older than started, a `time.time()`) or `fresh`."""
    try:
        stat = report.stat()
    except OSError:
        return "missing"
    if not report.is_file() or stat.st_size == 0:
        return "empty"
    slack = WHOLE_SECONDS_S if stat.st_mtime_ns % 1_000_000_000 == 0 else TICK_S
    return "stale" if stat.st_mtime < started - slack else "fresh"


def _first(rules: Iterable[Rule], text: str, report: Path, head: str = "") -> Failure | None:
    for rule in rules:
        match = re.search(rule.pattern, head + text, re.MULTILINE)
        if match:
            return rule.failure(report, match.groupdict(), text)
    return None


def quoted(text: str) -> str:
    """The last lines of a text as a clause."""
    # a progress bar ends its lines with a carriage return alone
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    tail = " / ".join(lines[-LAST_LINES:])
    if len(tail) > LAST_CHARACTERS:
        tail = "…" + tail[-LAST_CHARACTERS:]
    return f"; it said: {tail}" if tail else ""


def how_ended(returncode: int) -> str:
    """`exit code 1` or `signal 9`."""
    return f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"


@dataclass(frozen=True)
class Tool:
    """One executable. version is None if it does not answer; on_path: the shell starts it by name."""

    name: str
    path: Path
    version: str | None
    on_path: bool


def version_key(text: str | Path) -> tuple[int, ...]:
    """The numbers in a version or a path, so that 2025.10 comes after 2025.9."""
    return tuple(int(number) for number in re.findall(r"\d+", str(text)))


def escape_macros(path: Path) -> str:
    """A path in which nsys and ncu expand nothing: both read %p, %h and %q{NAME} in output names."""
    return str(path).replace("%", "%%")


@dataclass(frozen=True)
class Grace:
    """Seconds that an ended tool gets to write its report, after each stronger signal."""

    interrupt_s: float = 30.0
    worker_s: float = 60.0
    terminate_s: float = 10.0

    def at_most(self, other: Grace) -> Grace:
        """The shorter of each."""
        return Grace(*map(min, astuple(self), astuple(other)))


HURRIED = Grace(10.0, 5.0, 2.0)  # the user waits


@dataclass(frozen=True)
class Ended:
    """How one start went. returncode None: it was ended, because it took too long or the user
    interrupted it. text is all that the process and the worker wrote; cells are those with a result
    from it.
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
    """One start of the worker, without any program around it."""

    wrapped = False
    notify: Callable[[str], None] = staticmethod(lambda _: None)  # takes what the user should know
    logs: tuple[Path, ...] = ()  # what a tool writes besides the worker's log

    def argv(self, command: list[str]) -> list[str]:
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


@dataclass
class ToolSession(Session):
    """The worker under a profiler's tool. report is the tool's own file, a fresh name for each
    start; notify gets the sentence on what the user has to wait for.
    """

    tool: Tool
    report: Path
    protocol: Protocol
    notify: Callable[[str], None] = lambda _: None
    grace: Grace = field(default_factory=Grace)

    wrapped = True

    def __post_init__(self) -> None:
        self.scratch = Path(tempfile.mkdtemp(prefix=f"profharness-{self.tool.name}-"))
        self.started = time.time()

    def close(self, ended: Ended) -> Outcome:
        """The trace, if there is one that tells of kernels, else what went wrong."""
        name = self.tool.name
        try:
            failure, trace = self.judge(ended)
        except ToolError as error:
            failure, trace = error.failure, None
        # the rules see that a tool was ended, not by whom
        if ended.interrupted and failure is not None and failure.code == "timeout":
            failure = Failure(
                "interrupted",
                f"{name} was interrupted before {self.report.name} was complete",
                "`profharness capture --resume RUN` does what is left",
            )
        file = TraceFile(name, trace.name, ended.cells) if trace else None
        if failure is None:
            return Outcome(file)
        raw = "\n".join(ended.text.splitlines()[-20:])
        return Outcome(
            file, Problem(name, failure.code, failure.message, failure.remedy, raw, ended.cells)
        )

    def discard(self) -> None:
        """Remove the temporary folder, with what the tool left in it."""
        shutil.rmtree(self.scratch, ignore_errors=True)

    def judge(self, ended: Ended) -> tuple[Failure | None, Path | None]:
        """The failure, if any, and the file to ingest, if there is one that can be read."""
        raise NotImplementedError

    def end(self, process: subprocess.Popen[bytes], *, hurry: bool = False) -> None:
        """First what lets the report still be written, then by force; in a hurry after less time,
        and the user is told why it takes time at all.
        """
        grace = self.grace.at_most(HURRIED) if hurry else self.grace
        if hurry:
            self.notify(
                f"ending {self.tool.name} so that its report is written "
                "(Ctrl-C again ends it at once)…"
            )
        steps: Sequence[tuple[Callable[[], None], float]] = (
            (lambda: self.interrupt(process), grace.interrupt_s),
            # a tool writes its report when its target is gone
            (lambda: self.signal_workers(signal.SIGKILL), grace.worker_s),
            (lambda: kill(process.pid, signal.SIGTERM), grace.terminate_s),
        )
        for act, seconds in steps:
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
