"""Run a program with the observer, and write the recorded attention calls to a run folder."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from profharness.errors import CaptureError, TraceFormatError
from profharness.processes import run_in_place, with_startup
from profharness.recording.capture import locked, new_run, write_folder
from profharness.recording.profilers import find_profilers, require_tools
from profharness.recording.profilers.base import ToolError
from profharness.recording.profilers.nsys import child_environment, export_report, profile_argv
from profharness.rows import NSYS, TORCH
from profharness.run import (
    OBSERVE,
    ObserveOptions,
    Period,
    Problem,
    Protocol,
    Run,
    TraceFile,
    observed_journals,
    observed_rows,
    write_run,
)

OBSERVER = Path(__file__).resolve().parent / "observer"
FOLDER = "PROFHARNESS_OBSERVE"  # read by observer/startup/sitecustomize.py
OPTIONS_FILE, PROCESSES_FILE = "observe.json", "processes.jsonl"
TOOL_ONLY = ("TMPDIR", "LC_ALL")  # changed for nsys only; the program keeps its own values
NOT_CAPTURED = Protocol(iterations=0, warmup=0, samples=0, timeout_s=0.0)
# observer/window.py writes this text to the journal as the reason for an unrecorded step
ELSEWHERE = "attention ran in other threads, but the profiler records only the main thread"
RECORD_THREAD = (
    "to time attention in other threads, record these threads with torch.profiler "
    "(record_shapes=True), then run profharness ingest"
)
CAPTURE_RANGE = ("--capture-range=cudaProfilerApi", "--capture-range-end=stop")


@dataclass(frozen=True)
class Observed:
    """The result of running a program with the observer."""

    folder: Path
    run: Run
    code: int  # the program's exit code, or 128 + the number of the signal that ended it
    why: str | None = None  # why nothing was recorded, in which case the folder was removed
    reported: bool = True  # whether the observer ran in at least one process


def observe(argv: Sequence[str], options: ObserveOptions) -> Observed:
    """Run a program with the observer and create a run folder with the records.

    If nothing was recorded, remove the folder and the parents created for it. Raise CaptureError if
    the program does not start, and ToolError if nsys is requested but missing.
    """
    tools = require_tools(find_profilers([NSYS] if options.profiler == NSYS else []))
    profilers = () if options.profiler == "none" else (options.profiler,)
    new_parents = [each for each in (options.out, *options.out.parents) if not each.exists()]
    run = new_run(OBSERVE, NOT_CAPTURED, (), profilers, options.note)
    folder = write_folder(options.out, run, ())
    shared = {key: value for key, value in asdict(options).items() if key not in ("out", "note")}
    (folder / OPTIONS_FILE).write_text(json.dumps(shared), encoding="utf-8")
    # make every Python process of the program load the observer when it starts
    environment = with_startup({**os.environ, FOLDER: str(folder.resolve())}, OBSERVER / "startup")
    report = folder / "nsys-1.nsys-rep"
    period, began = Period.begin(), time.monotonic()
    write_run(folder, replace(run, periods=(period,)))
    try:
        with locked(folder):
            if tools:
                code = _run_under_nsys(tools[NSYS].path, report, argv, environment)
            else:
                code = run_in_place(argv, environment)
    except OSError as error:
        _remove(folder, new_parents)
        raise CaptureError(f"{argv[0]}: cannot be started: {error.strerror}") from None
    period = period.end(time.monotonic() - began)
    code = code if code >= 0 else 128 - code
    why = why_silent(folder)
    if why is not None:
        reported = any(_read(folder / PROCESSES_FILE))
        _remove(folder, new_parents)
        return Observed(folder, run, code, why, reported)
    problems = _export(report, tools[NSYS].path) if tools else ()
    traces = [TraceFile(TORCH, path.name) for path in sorted(folder.glob("*.torch.json.gz"))]
    traces += [TraceFile(NSYS, path.name) for path in sorted(folder.glob("nsys-*.sqlite"))]
    run = replace(
        run,
        problems=(*problems, *_window_problems(folder, options)),
        traces=tuple(traces),
        profilers=tuple(dict.fromkeys(trace.profiler for trace in traces)),
        periods=(period,),
        environment=next((row["environment"] for row in _rows(folder, "start")), {}),
    )
    write_run(folder, run)
    return Observed(folder, run, code)


def _remove(folder: Path, parents: Sequence[Path]) -> None:
    """Remove a folder, and those of its parents that are empty, innermost first."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # another run may use a parent
        for parent in parents:
            parent.rmdir()


def _run_under_nsys(
    tool: Path, report: Path, argv: Sequence[str], environment: Mapping[str, str]
) -> int:
    if shutil.which(argv[0]) is None:  # otherwise nsys would report this with a message of its own
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    with tempfile.TemporaryDirectory(prefix="profharness-nsys-") as scratch:
        unset = [part for name in TOOL_ONLY if name not in environment for part in ("-u", name)]
        kept = [f"{name}={environment[name]}" for name in TOOL_ONLY if name in environment]
        command = profile_argv(tool, report, ["env", *unset, *kept, *argv])
        command[2:2] = CAPTURE_RANGE
        return run_in_place(command, child_environment(environment, Path(scratch)))


def why_silent(folder: Path) -> str | None:
    """Return why no process of the program recorded attention, or None if a process did."""
    if next(_rows(folder, "template"), None) is not None:
        return None
    failed = next(_rows(folder, "failed"), None)
    if failed is not None:
        return f"recording failed: {failed['why']}"
    reported = {row.get("event") for row in _read(folder / PROCESSES_FILE)}
    if not reported:
        return (
            "no Python process was observed: the program clears its environment, is not a Python "
            "program, or runs Python with -I, -E or -S, which disable the observer"
        )
    if "torch" not in reported:
        return "none of the program's processes imported torch"
    return (
        "torch was imported, but scaled_dot_product_attention was never called from Python; "
        "to find attention in plain matrix products, in other packages or in the fast path of "
        "nn.TransformerEncoder, record a trace with torch.profiler (record_shapes=True), then run "
        "profharness ingest"
    )


def _window_problems(folder: Path, options: ObserveOptions) -> Iterator[Problem]:
    """Yield a problem if no step was recorded, or if calls are missing in the recorded steps."""
    windows = list(_rows(folder, "window"))
    closed = [row for row in windows if row.get("state") == "closed"]
    if closed:
        missed = sum(row.get("elsewhere", 0) for row in closed)
        if missed:
            text = (
                f"{missed:,} calls ran in other threads while the main thread was recorded; these "
                "calls are counted, but not timed"
            )
            yield Problem(options.profiler, "threads_not_recorded", text, RECORD_THREAD)
    elif options.profiler == TORCH:
        yield Problem(TORCH, "no_step", *_why_no_step(folder, windows, options))


def _why_no_step(
    folder: Path, windows: Sequence[Mapping[str, Any]], options: ObserveOptions
) -> tuple[str, str]:
    again = "record from the first call with `profharness observe --warmup 0 -- PROGRAM`, or run more steps"
    if all(row.get("compiled") for row in _rows(folder, "template")):
        why = (
            "only compiled code calls attention, and in compiled code a step ends only when "
            "optimizer.step() is called"
        )
        again = (
            "record the program with torch.profiler (record_shapes=True), then run profharness "
            "ingest"
        )
    elif not windows:
        why = (
            f"the profiler starts after {options.warmup} steps in a row without a new kind of "
            "call, but the program ended earlier"
        )
        if all(row.get("grad") for row in _rows(folder, "template")):
            why += "; with gradients enabled, passes count as steps only after an optimizer has stepped"
    else:
        why = windows[-1].get("why", "the process ended while the profiler was recording")
        if why == ELSEWHERE:
            again = RECORD_THREAD
    return f"no step was recorded, so the calls have no times: {why}", again


def _rows(folder: Path, event: str) -> Iterator[dict[str, Any]]:
    for path in observed_journals(folder):
        yield from (row for row in _read(path) if row.get("event") == event)


def _read(path: Path) -> Iterator[dict[str, Any]]:
    # ignore damaged files here, because `ingest` reports them
    with contextlib.suppress(TraceFormatError):
        yield from filter(None, observed_rows(path))


def _export(report: Path, tool: Path) -> tuple[Problem, ...]:
    if not report.exists():
        text = "nsys wrote no report, because the program ended before recording began"
        return (Problem(NSYS, "capture_range_missed", text, "use --warmup 0, or run more steps"),)
    try:
        export_report(report, report.with_suffix(".sqlite"), tool)
    except ToolError as error:
        return (error.problem,)
    return ()
