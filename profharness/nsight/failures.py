"""What nsys and ncu say when they fail, as failures with a stable code and a remedy.

The rules stand in `failure_rules`; here they are applied. Pure but for a look at the report file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from profharness.errors import ProfharnessError
from profharness.nsight.failure_rules import (
    EXPORT_RULES,
    NCU_EMPTY_RULES,
    NCU_RULES,
    NCU_TIMEOUT_RULES,
    NO_CUDA_EVENTS,
    NSYS_REPORT_RULES,
    NSYS_RULES,
    NSYS_TIMEOUT_RULES,
    Failure,
    Rule,
)

__all__ = [
    "Failure",
    "NsightError",
    "diagnose_ncu",
    "diagnose_ncu_import",
    "diagnose_nsys",
    "diagnose_nsys_export",
    "interrupted",
    "no_cuda_events",
    "report_damaged",
    "report_state",
]

# A file written after `started` may bear an earlier time: the kernel stamps with its last tick, and
# some file systems keep whole or even seconds only.
TICK_S = 0.1
WHOLE_SECONDS_S = 2.0
LAST_LINES = 3
LAST_CHARACTERS = 400

SQLITE_MAGIC = b"SQLite format 3\0"


class NsightError(ProfharnessError):
    """A call of nsys or ncu failed. raw is everything that the tool and its target wrote."""

    def __init__(self, failure: Failure, raw: str = "") -> None:
        super().__init__(f"{failure.message}; {failure.remedy} [{failure.code}]")
        self.failure = failure
        self.raw = raw


def diagnose_nsys(
    returncode: int | None, text: str, report: Path, started: float
) -> Failure | None:
    """Why `nsys profile` left no usable report; None when it did.

    returncode None: it was ended for taking too long. text: all that nsys and the target wrote.
    started: `time.time()` before the start. The exit code proves nothing either way: nsys exits 0
    without a report, and with the target's code although the report is fine.
    """
    if returncode is None:
        return _first(NSYS_TIMEOUT_RULES, text, report) or _timeout("nsys", report)
    state = report_state(report, started)
    if returncode == -9:
        return Failure(
            "killed",
            f"nsys was killed (SIGKILL) while it profiled for {report.name}",
            "end what it left behind with `nsys shutdown --kill=sigterm --session=profile-PID` "
            "(PID is that of the killed nsys); see the kernel log for out-of-memory, then run again",
        )
    if state == "fresh":
        return _first(NSYS_REPORT_RULES, text, report)
    return _first((*NSYS_RULES, *NSYS_REPORT_RULES), text, report) or _no_report(
        "nsys", returncode, text, report, state
    )


def diagnose_nsys_export(returncode: int | None, text: str, output: Path) -> Failure | None:
    """Why `nsys export` left no SQLite file at output; None when it did.

    It leaves an empty or half-filled file behind when it fails, so a file alone proves nothing.
    """
    if returncode is None:
        return _timeout("nsys export", output)
    failure = _first(EXPORT_RULES, text, output)
    if failure is not None or returncode != 0:
        return failure or Failure(
            "export_failed",
            f"nsys export failed ({_how(returncode)}){_quoted(text)}",
            "export with the nsys that made the report: `nsys export --type sqlite REPORT`",
        )
    try:
        with output.open("rb") as file:
            good = file.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC
    except OSError:
        good = False
    if good:
        return None
    return Failure(
        "export_empty",
        f"nsys export ended well but left no SQLite file{_quoted(text)}",
        "see whether the disk is full; export with the nsys that made the report",
    )


def diagnose_ncu(returncode: int | None, text: str, report: Path, started: float) -> Failure | None:
    """Why ncu left no usable report; None when it did. Arguments as for `diagnose_nsys`.

    text holds the log file as well as both streams. Error lines of ncu count even where a report
    was written: it then lacks kernels or metrics.
    """
    if returncode is None:
        return _first(NCU_TIMEOUT_RULES, text, report) or _timeout("ncu", report)
    failure = _first(NCU_RULES, text, report)
    if failure is not None:
        return failure
    state = report_state(report, started)
    target = re.search(r"^==ERROR== The application returned an error code \((\d+)\)", text, re.M)
    if state != "fresh" and target:
        return Failure(
            "target_failed",
            f"the profiled program ended with code {target[1]} before ncu wrote {report.name}"
            f"{_quoted(text)}",
            "run the program without ncu and mend it first",
        )
    failure = _first(NCU_EMPTY_RULES, text, report)
    if failure is not None:
        return failure
    if returncode < 0 and state != "fresh":
        return Failure(
            "killed",
            f"ncu was ended by {_how(returncode)} before it wrote {report.name}",
            "see the kernel log for out-of-memory, then run again with fewer cells",
        )
    return None if state == "fresh" else _no_report("ncu", returncode, text, report, state)


def diagnose_ncu_import(returncode: int | None, text: str, report: Path) -> Failure | None:
    """Why `ncu --import` printed nothing of use; text: both streams. A filter that matches nothing
    makes it exit 0 and print nothing.
    """
    if returncode is None:
        return _timeout("ncu --import", report)
    rows = [line for line in text.splitlines() if line.strip() and not line.startswith("==")]
    if returncode == 0 and rows:
        return None
    failure = _first(NCU_RULES, text, report)
    if failure is not None:
        return failure
    if returncode != 0:
        return Failure(
            "export_failed",
            f"ncu --import failed on {report.name} ({_how(returncode)}){_quoted(text)}",
            "read it with the ncu that made it, or with the package ncu-report",
        )
    return Failure(
        "no_kernels_matched",
        f"ncu --import found no kernel in {report.name}",
        "see whether the program launched kernels inside the ranges of cells",
    )


def no_cuda_events(report: Path, diagnostics: Iterable[str] = ()) -> Failure:
    """What is said of an export without kernels; diagnostics: the texts of its DIAGNOSTIC_EVENT."""
    said = [text for text in diagnostics if re.search(NO_CUDA_EVENTS.pattern, text)]
    failure = NO_CUDA_EVENTS.failure(report)
    return Failure(failure.code, failure.message + _quoted("\n".join(said)), failure.remedy)


def report_damaged(tool: str, report: Path, why: str) -> Failure:
    """What is said of a file that the tool left and that nobody can read; why: the reader's words."""
    return Failure(
        "report_damaged",
        f"{tool} left {report.name}, which cannot be read: {why}",
        "see whether the disk is full and whether something ended the tool while it wrote, then "
        "capture again",
    )


def interrupted(tool: str, report: Path) -> Failure:
    """What is said where the user ended the capture before the report was whole."""
    return Failure(
        "interrupted",
        f"{tool} was interrupted before {report.name} was complete",
        "`profharness capture --resume RUN` does what is left",
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


def _first(rules: Sequence[Rule], text: str, report: Path) -> Failure | None:
    for rule in rules:
        match = re.search(rule.pattern, text, re.MULTILINE)
        if match:
            return rule.failure(report, match.groupdict())
    return None


def _timeout(tool: str, report: Path) -> Failure:
    return Failure(
        "timeout",
        f"{tool} took too long and was ended before {report.name} was complete",
        "allow more time with --timeout, or give it less to do: fewer cells, smaller configs, "
        "fewer metrics",
    )


def _no_report(tool: str, returncode: int, text: str, report: Path, state: str) -> Failure:
    what = {
        "missing": f"{tool} ended ({_how(returncode)}) without writing {report.name}",
        "empty": f"{tool} ended ({_how(returncode)}) and left {report.name} empty",
        "stale": f"{tool} ended ({_how(returncode)}) and left the older {report.name} as it was",
    }[state]
    remedy = {
        "missing": "run `profharness doctor`; see the log for what the tool and the target wrote",
        "empty": "see whether the disk is full, then run again",
        "stale": "remove the old report or write to a new folder, then run again",
    }[state]
    return Failure(f"report_{state}", what + _quoted(text), remedy)


def _quoted(text: str) -> str:
    """The last lines of a text as a clause."""
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    tail = " / ".join(lines[-LAST_LINES:])
    if len(tail) > LAST_CHARACTERS:
        tail = "…" + tail[-LAST_CHARACTERS:]
    return f"; it said: {tail}" if tail else ""


def _how(returncode: int) -> str:
    return f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
