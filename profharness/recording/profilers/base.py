"""Tools, sessions and failure rules of profilers. A session is one start of the worker."""

from __future__ import annotations

import re
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from profharness.errors import ProfharnessError, TraceFormatError
from profharness.files import open_input
from profharness.processes import find_workers, kill, kill_group, wait_for
from profharness.run import Problem, Protocol, TraceFile

SQLITE_MAGIC = b"SQLite format 3\0"
SHUTDOWN_TIMEOUT_S = 20.0
SHUTDOWN_AT_ONCE_S = 3.0
# A file written after `started` may have an earlier modification time. The kernel uses the time of
# its last tick, and some file systems store only whole or even seconds.
TICK_S = 0.1
WHOLE_SECONDS_S = 2.0
LAST_LINES = 3
LAST_CHARACTERS = 400
# Texts that the rules of several tools share.
NO_SANDBOX = "profile on a virtual machine or bare metal; `--profiler torch` works without {tool}"
OWN_TMPDIR = "set TMPDIR to a folder that exists and is writable"
TOOL_OPTIONS = (
    "install a version from 2022.4 to 2026.2, or see `{tool} --help` for the options of the "
    "installed version"
)


class ToolError(ProfharnessError):
    """A call of a profiler's tool failed."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(f"{problem.message}; {problem.remedy} [{problem.code}]")
        self.problem = problem


@dataclass(frozen=True)
class FailureRule:
    """A failure of a tool, and the pattern by which the tool's output identifies it."""

    code: str
    # Regular expression whose `^` and `$` match in every line. The output is preceded by a line
    # such as `exit code 1` or `signal 9`, so `\A` matches before that line.
    pattern: str
    # The message and the remedy may contain the names of the pattern's groups in braces, and
    # `{report}`, the name of the output file.
    message: str
    remedy: str
    quoted: bool = False  # append the last lines of the output to the message
    written: bool = True  # whether the rule also applies if a report was written
    late: bool = False  # True if the rule applies only to a tool that took too long

    def problem(
        self, profiler: str, report: Path, groups: dict[str, str | None], text: str = ""
    ) -> Problem:
        """Return the failure as a problem, with all placeholders in its texts replaced."""
        blanks = {"report": report.name, **groups}
        message = self.message.format(**blanks) + (quoted(text) if self.quoted else "")
        return Problem(profiler, self.code, message, self.remedy.format(**blanks))


LIBRARY_MISSING = FailureRule(
    "tool_library_missing",
    r"error while loading shared libraries: (?P<library>[^:\s]+)",
    (
        "a program did not start because the library {library} is missing, so {report} was "
        "not written"
    ),
    (
        "install the package that contains the library (libelf1 for libelf.so.1, libdw1 for "
        "libdw.so.1)"
    ),
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
    """Return the problem of the first rule that matches, or None.

    `returncode` is None if the tool was ended because it took too long. If no rule matches in this
    case, return a problem with the code `timeout`.
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
        f"{profiler} took too long and was stopped before {report.name} was complete",
        "allow more time with --timeout, or use fewer cells, smaller configs or fewer metrics",
    )


def diagnose(
    profiler: str,
    rules: Sequence[FailureRule],
    returncode: int | None,
    text: str,
    report: Path,
    started: float,
) -> Problem | None:
    """Return the problem if a tool wrote no usable report, or None if the report is usable.

    `returncode` is None if the tool was ended because it took too long. `text` is the output of the
    tool and its target. `started` is the result of `time.time()` before the tool started. The exit
    code alone is not enough, because nsys may return 0 although it wrote no report, and returns the
    exit code of the target even if the report is complete.
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
        "run `profharness doctor`, and see the log for the output of the tool and of the program",
    ),
    "empty": ("and left {report} empty", "check whether the disk is full, then try again"),
    "stale": (
        "without changing the older {report}",
        "remove the old report or write to a new folder, then try again",
    ),
}


def report_damaged(profiler: str, report: Path, why: str) -> Problem:
    """Return the problem of a report that cannot be read. `why` is the message of the reader."""
    return Problem(
        profiler,
        "report_damaged",
        f"{profiler} wrote {report.name}, but it cannot be read: {why}",
        (
            "check whether the disk is full, or whether the tool was killed while writing, then "
            "capture again"
        ),
    )


def report_state(report: Path, started: float) -> str:
    """Return the state of a report: `missing`, `empty`, `fresh`, or `stale` if it is older than
    `started`, which is in seconds since 1970.
    """
    try:
        stat = report.stat()
    except OSError:
        return "missing"
    if not report.is_file() or stat.st_size == 0:
        return "empty"
    slack = WHOLE_SECONDS_S if stat.st_mtime_ns % 1_000_000_000 == 0 else TICK_S
    return "stale" if stat.st_mtime < started - slack else "fresh"


def count_rows(path: Path, table: str, expected: str) -> int:
    """Return the number of rows of all tables of an SQLite file whose names match a GLOB pattern.

    Return 0 if there is no such table. Raise TraceFormatError if the file is damaged. The error says
    that the file should be what `expected` describes.
    """
    with open_input(path) as file:
        size, header = file.size, file.read(100)
    if not header.startswith(SQLITE_MAGIC) or len(header) < 100:
        raise TraceFormatError(path.name, "not an SQLite file", expected=expected)
    page = int.from_bytes(header[16:18], "big")
    # A page size of 65,536 is stored as 1. The number of pages in the header is valid only if both
    # change counters in the header are equal.
    whole = int.from_bytes(header[28:32], "big") * (65536 if page == 1 else page)
    if header[24:28] == header[92:96] and size < whole:
        raise TraceFormatError(path.name, "cut off", offset=size, expected=f"{whole} bytes")
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
    try:
        select = "SELECT name FROM sqlite_master WHERE type = 'table' AND name GLOB ?"
        names = [name for (name,) in connection.execute(select, (table,))]
        quoted_names = ['"' + name.replace('"', '""') + '"' for name in names]
        return sum(
            int(connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0])
            for name in quoted_names
        )
    except sqlite3.DatabaseError as error:
        raise TraceFormatError(path.name, f"damaged: {error}") from None
    finally:
        connection.close()


def quoted(text: str) -> str:
    """Return the last lines of a tool's output as one line, to append it to an error message."""
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
    version: str | None  # None if the tool prints no version
    on_path: bool  # whether the shell finds this executable by name


def version_key(text: str | Path) -> tuple[int, ...]:
    """Return the numbers in a version or a path, so that 2025.10 sorts after 2025.9."""
    return tuple(int(number) for number in re.findall(r"\d+", str(text)))


def output_argument(report: Path, suffix: str) -> str:
    """Return the path of a report as an argument of nsys or ncu.

    Percent signs are escaped, because nsys and ncu expand %p, %h and %q{NAME}. Raise ValueError if
    the path does not end in `suffix`, because the tool would then append the suffix.
    """
    if report.suffix != suffix:
        raise ValueError(f"{report}: the report must end in {suffix}")
    return str(report).replace("%", "%%")


# Seconds to wait for a tool to write its report after the tool is interrupted, after the worker is
# killed, and after the tool gets SIGTERM. HURRIED_S applies after an interrupt by the user.
GRACE_S = (30.0, 60.0, 10.0)
HURRIED_S = (10.0, 5.0, 2.0)

Outcome = tuple[TraceFile | None, Problem | None]
"""The trace and the problem that result from one start of the worker. Either may be None."""


class Session:
    """One start of the worker without a tool."""

    wrapped = False
    notify: Callable[[str], None] = staticmethod(lambda _: None)  # receives messages for the user
    logs: tuple[Path, ...] = ()  # log files of the tool, in addition to the worker's log

    def argv(self, command: list[str]) -> list[str]:
        return command

    def environment(self, base: dict[str, str]) -> dict[str, str]:
        return base

    def end(self, process: subprocess.Popen[bytes], *, hurry: bool = False) -> None:  # noqa: ARG002
        """Kill the process at once, because a worker without a tool has no report to write.

        `hurry` is set after an interrupt by the user.
        """
        kill_group(process)

    def clear(self, process: subprocess.Popen[bytes], *, at_once: bool = False) -> None:  # noqa: ARG002
        """Kill all processes that the ended process has left running in its process group."""
        kill_group(process)

    def close(
        self,
        returncode: int | None,  # noqa: ARG002
        text: str,  # noqa: ARG002
        cells: tuple[str, ...],  # noqa: ARG002
        *,
        interrupted: bool,  # noqa: ARG002
    ) -> Outcome:
        """Return the trace and the problem of the ended process. This is called at most once.

        `returncode` is None if the process took too long or the user interrupted it. `text` is all
        output of the process and the worker. `cells` are the cells that have a result from this
        start of the worker.
        """
        return None, None

    def discard(self) -> None:
        """Remove temporary files. This is called once, after all other methods."""


@dataclass
class ToolSession(Session):
    """One start of the worker under a profiler's tool."""

    tool: Tool
    report: Path  # the file that the tool writes, with a new name for each start
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
        """Return the trace if it can be read, and the problem if there is one."""
        name = self.tool.name
        try:
            problem, path = self.judge(returncode, text)
        except ToolError as error:
            problem, path = error.problem, None
        # the rules cannot distinguish an interrupt by the user from a timeout
        if interrupted and problem is not None and problem.code == "timeout":
            problem = Problem(
                name,
                "interrupted",
                f"{name} was interrupted before {self.report.name} was complete",
                "resume with `profharness capture --resume RUN`",
            )
        if problem is not None:
            raw = "\n".join(text.splitlines()[-20:])
            problem = replace(problem, raw=raw, cells=cells)
        return TraceFile(name, path.name, cells) if path else None, problem

    def discard(self) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)

    def judge(self, returncode: int | None, text: str) -> tuple[Problem | None, Path | None]:
        """Return the problem and the path of the file to ingest. Both values may be None."""
        raise NotImplementedError

    def end(self, process: subprocess.Popen[bytes], *, hurry: bool = False) -> None:
        """Interrupt the tool so that the tool writes its report.

        Use stronger signals if the tool does not end.

        If `hurry` is set, wait for a shorter time, and notify the user why this takes time.
        """
        grace_s = self.grace_s
        if hurry:
            grace_s = list(map(min, grace_s, HURRIED_S))
            self.notify(
                f"stopping {self.tool.name}, which is still writing its report (press Ctrl-C "
                "again to stop it now)…"
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
        """Kill the tool, and then the worker, which runs in its own process session."""
        kill_group(process)
        if find_workers(self.report.parent):
            self.force(process.pid, SHUTDOWN_AT_ONCE_S if at_once else SHUTDOWN_TIMEOUT_S)
            self.signal_workers(signal.SIGKILL)

    def signal_workers(self, number: signal.Signals) -> None:
        """Send a signal to the worker, even if it is in another process session."""
        for pid in find_workers(self.report.parent):
            kill(pid, number)

    def interrupt(self, process: subprocess.Popen[bytes]) -> None:
        """Interrupt the tool so that the tool writes its report and ends."""
        raise NotImplementedError

    def force(self, pid: int, timeout_s: float) -> None:
        """End processes of the tool that are still running after the tool was killed."""
