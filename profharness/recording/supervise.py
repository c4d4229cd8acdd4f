"""Supervise the worker process, and record its results in run.json.

This module reads the journal while the worker runs. The module ends a worker that exceeds the time
limit. If a worker dies, the module starts a new worker for the remaining cells. run.json is always
a valid file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from profharness.attention.config import parse_config
from profharness.device_types import CPU
from profharness.environment import no_gpu_text
from profharness.errors import CaptureError, ProfharnessError, UsageError
from profharness.files import LINE_BYTES, decode_json, open_input
from profharness.processes import (
    WORKER_SCRIPT,
    PrewarmedWorker,
    ProcessGroup,
    child_environment,
    delay_signals,
    has_ended,
    orphans_adopted,
    raise_deferred_signals,
    read_end,
    start_group,
    stopped_together,
    wait_for,
)
from profharness.recording.profilers import PROFILERS, Profiler
from profharness.recording.profilers.base import Outcome, Session
from profharness.run import (
    EXIT_NO_GPU,
    EXIT_UNWRITABLE,
    GPU,
    JOURNAL_FILE,
    NOT_A_RECORD,
    PLAN_FILE,
    UNWRITABLE,
    Cell,
    Check,
    JournalEntry,
    Period,
    Plan,
    Problem,
    Protocol,
    Run,
    TraceFile,
    unwritable,
    with_result,
    write_run,
)

POLL_S = 0.01
# Do not save after every entry, because each save writes all of run.json.
SAVE_EVERY_S = 1.0
MAX_IDLE = 3  # give up after so many consecutive workers die before their first cell
START_TIMEOUT_S = 300.0  # enough for importing torch from a slow disk and creating a CUDA context
ROOM_BYTES = 1 << 16  # with less free space, a full disk is the likely reason why a worker died
TRACE_BYTES = 1 << 28  # with less free space, a trace may not fit
REAPED_S = 5.0  # maximum time to wait for a process after SIGKILL
LOG_FILE = "worker.log"
READ_BYTES = 1 << 20  # block size for reading the journal
LOG_TAIL_BYTES = 4000


@dataclass(frozen=True)
class Step:
    """A progress report about a run."""

    done: int  # number of finished cells
    total: int
    cell: Cell
    stage: str  # stage of the cell, or its status once it is finished
    notice: str | None = None  # a message for the user, for example that the run waits for a GPU
    lane: str = ""  # name of the lane, or empty if the run has no lanes
    traces: tuple[Path, ...] = ()  # paths of the traces of a cell that has just finished

    @property
    def shown_stage(self) -> str:
        """The stage, or `wrong` if `verify` found that the result of the finished cell is wrong."""
        return self.cell.outcome if self.stage == self.cell.status else self.stage


Progress = Callable[[Step], None]


def worker_argv(folder: Path, program: Sequence[str] = (), python: str | None = None) -> list[str]:
    """Return the command line of the worker.

    `program` is a module of the worker and its arguments. The default program measures cells.
    `python` is the path of another Python, which needs torch but no other package.
    """
    if python is not None:
        return [python, str(WORKER_SCRIPT), *program, str(folder)]
    # -P keeps the working directory off sys.path, because it may contain a file like torch.py
    return [sys.executable, "-P", "-m", "profharness.recording.worker", *program, str(folder)]


class _JournalReader:
    """Reads the entries that are added to a journal after this object is created."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def entries(self) -> Iterator[JournalEntry]:
        """Yield the entries written since the last call. Raise OSError if reading fails."""
        try:
            file = open_input(self._path, within=self._path.parent)
        # the worker has not created the file yet
        except FileNotFoundError:
            return
        with file:
            file.seek(self._offset)
            while data := file.read(READ_BYTES):
                self._offset += len(data)
                *lines, self._rest = (self._rest + data).split(b"\n")
                if len(self._rest) > LINE_BYTES:
                    raise OSError(
                        errno.EFBIG,
                        f"the journal contains a line of more than {LINE_BYTES:,} bytes",
                        str(self._path),
                    )
                for line in lines:
                    # ignore a line that is incomplete because the worker crashed
                    with contextlib.suppress(*NOT_A_RECORD):
                        yield decode_json(line, JournalEntry)

    def append(self, entry: JournalEntry) -> None:
        """Write an entry on behalf of a dead worker. End an incomplete last line first."""
        data = (b"\n" if self._rest else b"") + msgspec.json.encode(entry) + b"\n"
        with self._path.open("ab") as file:
            file.write(data)
        self._offset += len(data)
        self._rest = b""


@dataclass
class _WorkerProcess:
    """Starts and supervises one worker process until it ends."""

    folder: Path
    protocol: Protocol
    pending: dict[str, Cell]
    journal: _JournalReader
    on_entry: Callable[[JournalEntry], None]
    session: Session
    profilers: tuple[str, ...] = ()
    returncode: int | None = None
    cell: str | None = None
    stage: str = "start"
    has_environment: bool = False
    ended: tuple[str, ...] = ()
    stopped: bool = False  # whether the user interrupted the run
    at_once: bool = False  # whether the user interrupted twice, which loses reports of nsys or ncu
    inherited: tuple[int, ...] = ()  # file descriptors that the worker keeps open, to hold locks
    prewarmed: PrewarmedWorker | None = None  # used if its environment fits
    reported_s: float = 0.0  # duration of stops (Ctrl-Z) that a warning has already reported
    remedy: str = "`profharness doctor` shows what is missing"

    def __post_init__(self) -> None:
        self.process: ProcessGroup | None = None
        self.since = time.monotonic()
        log = self.folder / LOG_FILE
        self.log_offset = log.stat().st_size if log.exists() else 0

    def write_plan(self) -> None:
        cells, wrapped = tuple(self.pending.values()), self.session.wrapped
        plan = Plan(cells, self.protocol, self.profilers, os.getpid(), wrapped=wrapped)
        (self.folder / PLAN_FILE).write_bytes(msgspec.json.encode(plan))

    def run(self, command: list[str]) -> None:
        """Start the worker in a new process group, and wait until the worker ends.

        Finally, end all processes that the worker or its profiler has started.
        """
        mark_of_worker = self.prewarmed.mark if self.prewarmed else None
        with orphans_adopted(self.session.notify, mark_of_worker) as mark:
            try:
                # delay interrupts until `self.process` is set, because otherwise nothing could end
                # the process
                with delay_signals():
                    self.process = self._use_prewarmed(command) or start_group(
                        self.session.argv(command),
                        self.folder / LOG_FILE,
                        self.session.environment(child_environment()) | mark,
                        short=True,
                        pass_fds=self.inherited,
                    )
                    self.process.logs += self.session.logs
                with stopped_together(self.process, mark):
                    self.returncode = self._follow(self.process)
            except KeyboardInterrupt:
                self.stopped = True
                raise
            finally:
                if self.process is not None:
                    self._finish(self.process)

    def _use_prewarmed(self, command: list[str]) -> ProcessGroup | None:
        """Send the command to the prewarmed worker and return its process.

        Return None if there is no prewarmed worker. If the worker has another Python or
        environment than the command needs, end the worker and return None.
        """
        if self.prewarmed is None:
            return None
        plain = worker_argv(self.folder)[:-1]
        if command[: len(plain)] != plain or child_environment() != self.prewarmed.environment:
            self.prewarmed.end()
            return None
        arguments = command[len(plain) :]
        return self.prewarmed.send(arguments, self.folder / LOG_FILE, self.inherited)

    def _now(self) -> float:
        """Return a time in seconds that does not advance while the worker is stopped by Ctrl-Z."""
        return time.monotonic() - (self.process.paused_s if self.process else 0.0)

    def read_journal(self) -> None:
        """Process the journal entries written since the last call."""
        for entry in self.journal.entries():
            if entry.event == "environment":
                self.has_environment, self.since = True, self._now()
            elif entry.event == "begin":
                self.cell, self.stage, self.since = entry.cell, "begin", self._now()
            elif entry.event == "stage":
                self.stage = entry.stage or ""
            elif entry.event == "end":
                self.pending.pop(str(entry.cell), None)
                self.ended = (*self.ended, str(entry.cell))
                self.cell, self.since = None, self._now()
            paused_s = self.process.paused_s if self.process else 0.0
            if entry.result is not None and paused_s != self.reported_s:
                stopped_s, self.reported_s = paused_s - self.reported_s, paused_s
                warning = (
                    f"the run was suspended (Ctrl-Z) for {stopped_s:.1f} s during the measurement; "
                    "a sample may include that time"
                )
                warnings = (*entry.result.warnings, warning)
                entry = replace(entry, result=replace(entry.result, warnings=warnings))
            self.on_entry(entry)

    def end_cell(self) -> None:
        """Write the result of the cell during which the worker died."""
        cell = self.pending.pop(str(self.cell))
        # use a longer text, because not every implementation is compiled in this stage
        stage = {"compile": "the loading, compilation or first call of the backend"}.get(
            self.stage, self.stage
        )
        if self.returncode is None:
            status = "timeout"
            message = f"the worker did not finish {stage} in time and was stopped (see --timeout)"
        else:
            status, tail = "crashed", self._stderr_tail()
            message = f"the worker died during {stage}: {_describe_exit(self.returncode)}"
            message += f"; its last output: {tail}" if tail else ""
        result = replace(cell, status=status, message=message)
        entry = JournalEntry("end", cell=cell.cell, result=result)
        self.journal.append(entry)
        self.on_entry(entry)

    def failure(self) -> ProfharnessError:
        if self.returncode == EXIT_NO_GPU:
            return UsageError(no_gpu_text("use --device cpu, or leave --device out"))
        code, tail = self.returncode, self._stderr_tail()
        how = "it did not respond" if code is None else _describe_exit(code)
        return CaptureError(
            f"the worker process did not start ({how}){f': {tail}' if tail else ''}; {self.remedy}"
        )

    def _follow(self, process: subprocess.Popen[bytes]) -> int | None:
        """Read the journal until the process ends. Return the exit code, or None on timeout."""
        timeout_s = self.protocol.timeout_s
        while not has_ended(process):
            self.read_journal()
            raise_deferred_signals()
            limit = timeout_s if self.cell is not None else max(START_TIMEOUT_S, timeout_s)
            if self._now() - self.since > limit:
                return None
            time.sleep(POLL_S)
        return process.returncode

    def _finish(self, process: subprocess.Popen[bytes]) -> None:
        """End the process and clean up.

        A second interrupt by the user ends the process faster, but does not shorten the cleanup.
        """
        try:
            if not has_ended(process):
                self._end(process)
        finally:
            with delay_signals():
                self.session.clear(process, at_once=self.at_once)
                # limit the time, because a process that hangs in a driver never ends
                wait_for(process, REAPED_S)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        try:
            self.session.end(process, hurry=self.stopped)
        except KeyboardInterrupt:
            if self.stopped:
                self.at_once = True
            else:
                self.stopped = True
                self._end(process)
            raise

    def log(self) -> str:
        """Return the end of this process's output, at most MAX_TEXT_BYTES."""
        cut = self.process.cut_bytes if self.process else 0
        return read_end(self.folder / LOG_FILE, max(0, self.log_offset - cut))

    def why_unwritable(self) -> str | None:
        """Return why the worker could not write to the run folder, or None if it could.

        Check the file system first, because the worker may have died without a message.
        """
        reported = self.returncode == EXIT_UNWRITABLE
        try:
            state = os.statvfs(self.folder)
        except OSError as error:
            return error.strerror
        if state.f_flag & os.ST_RDONLY:
            return os.strerror(errno.EROFS)
        # use f_bavail, because f_bfree includes blocks that are reserved for root
        free = state.f_bavail * state.f_frsize
        if free < (TRACE_BYTES if reported else ROOM_BYTES):
            return f"{os.strerror(errno.ENOSPC)} ({free:,} bytes are free); see worker.log"
        # check the message too, because a backend may exit with the same code by chance
        _, mark, reason = self.log().rpartition(UNWRITABLE)
        return reason.splitlines()[0] if reported and mark else None

    def _stderr_tail(self) -> str:
        """Return the last one or two non-empty lines that this process wrote to its log."""
        text = self.log()[-LOG_TAIL_BYTES:]
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " / ".join(lines[-2:])[:500]


def _describe_exit(returncode: int) -> str:
    # Popen returns minus the number of the signal, but shells and nsys return 128 plus the number
    number = -returncode if returncode < 0 else returncode - 128
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"exit code {returncode}" if returncode >= 0 else f"signal {number}"


def run_cells(
    folder: Path,
    cells: Sequence[Cell],
    protocol: Protocol,
    profilers: tuple[str, ...],
    on_entry: Callable[[JournalEntry], None],
    make_session: Callable[[], Session] = Session,
    on_outcome: Callable[[Outcome], None] = lambda _: None,
    command: Callable[[Path], list[str]] = worker_argv,
    inherited: tuple[int, ...] = (),
    prewarmed: PrewarmedWorker | None = None,
) -> None:
    """Start workers until each cell has an `end` entry in the journal.

    `on_entry` is called with every journal entry, including entries that this process writes for a
    dead worker. `on_outcome` is called with the trace and the problem of each worker. Workers keep
    the file descriptors `inherited` open. `prewarmed` is used as the first worker if it fits.

    Raise CaptureError if a worker cannot start, or if MAX_IDLE consecutive workers die before their
    first cell. On any exception, including KeyboardInterrupt, end the worker first.
    """
    pending = {cell.cell: cell for cell in cells}
    journal = _JournalReader(folder / JOURNAL_FILE)
    idle = 0
    while pending:
        session = make_session()
        try:
            start = _WorkerProcess(folder, protocol, pending, journal, on_entry, session, profilers)
            start.inherited = inherited
            start.prewarmed, prewarmed = prewarmed, None
            start.write_plan()
            try:
                start.run(command(folder))
            finally:
                # read entries that were written after the last poll
                start.read_journal()
                if not start.at_once:
                    outcome = session.close(
                        start.returncode, start.log(), start.ended, interrupted=start.stopped
                    )
                    on_outcome(outcome)
        finally:
            with delay_signals():
                session.discard()
        wrote_nothing = start.cell is not None or start.returncode == EXIT_UNWRITABLE
        if wrote_nothing and (why := start.why_unwritable()):
            raise unwritable(folder, why)
        if start.cell is not None:
            start.end_cell()
        # replace a worker that dies before its first cell, unless that happens repeatedly
        idle = 0 if start.ended or start.cell else idle + 1
        if pending and idle and (not start.has_environment or idle == MAX_IDLE):
            raise start.failure()


def worker_environment(
    folder: Path,
    protocol: Protocol,
    python: str | None = None,
    prewarmed: PrewarmedWorker | None = None,
) -> dict[str, Any]:
    """Start a worker without cells and return the environment that it reports.

    Raise CaptureError if the worker cannot start.
    """
    entries: list[JournalEntry] = []
    journal = _JournalReader(folder / JOURNAL_FILE)
    start = _WorkerProcess(folder, protocol, {}, journal, entries.append, Session())
    start.prewarmed = prewarmed
    if python is not None:
        start.remedy = f"try `{shlex.quote(python)} -c 'import torch'`"
    start.write_plan()
    start.run(worker_argv(folder, python=python))
    start.read_journal()
    if not entries or entries[0].environment is None:
        raise start.failure()
    return entries[0].environment


REMEDIES = {
    "timeout": "allow more time with --timeout",
    "oom": "the profiler also needs GPU memory; free some memory, or choose a smaller config",
    "crashed": (
        "see worker.log for the worker's last output, and check whether the config also fails "
        "without this profiler"
    ),
    "error": (
        "the message comes from the backend; check whether the config also fails without "
        "this profiler"
    ),
    "refused": "check whether the config is also refused without this profiler",
}


class RunRecord:
    """The record of a run, which is updated by journal entries and saved to run.json.

    If a cell fails only in a later pass under nsys or ncu, it keeps its earlier result, and the run
    gets a problem. `code` contains the hashes and commits of the backends, which extend the
    environment.
    """

    def __init__(
        self,
        folder: Path,
        run: Run,
        progress: Progress | None = None,
        code: dict[str, dict[str, str]] | None = None,
    ) -> None:
        self.folder = folder
        self.run = run
        self._code = code
        self._cells = {cell.cell: cell for cell in run.cells}
        self._wrapped = [item for item in run.traces if PROFILERS[item.profiler].session]
        # Keep problems of the GPU, because disturbed measurements are not repeated. Drop the other
        # problems, because a resumed run retries failed passes.
        self.problems = [problem for problem in run.problems if problem.profiler == GPU]
        self._progress = progress or (lambda _: None)
        self._saved = 0.0
        self._pass: tuple[Profiler | None, int, int] = (None, 0, 0)

    def begin_pass(self, profiler: Profiler | None, process: int = 0) -> list[Cell]:
        """Begin a pass and return the cells that it has to run.

        `profiler` is nsys or ncu, or None if the worker runs without an external profiler. A pass
        without an external profiler may be repeated in new processes. `process` is the number of the
        process, starting at 0. A repetition runs only the cells that succeeded in the first process.
        """
        cells = list(self._cells.values())
        if process:
            return [
                Cell(cell.cell, cell.config, cell.backend, process=process)
                for cell in cells
                if cell.status == "ok" and cell.process < process
            ]
        todo = [cell for cell in cells if cell.status == "pending"]
        if profiler is not None:
            # skip cells that already have a trace or a problem of this profiler
            covered: list[TraceFile | Problem] = [*self._wrapped, *self.problems]
            seen = {
                cell for item in covered if item.profiler == profiler.name for cell in item.cells
            }
            todo += [cell for cell in cells if cell.status == "ok" and cell.cell not in seen]
        total = len(todo) if profiler else len(cells) * self.run.protocol.processes
        self._pass = (profiler, 0, total)
        return [replace(cell, message=None) if cell.status == "pending" else cell for cell in todo]

    def add_entry(self, entry: JournalEntry) -> None:
        """Update the run by one journal entry, and report the progress."""
        if entry.environment is not None:
            device = str(entry.environment.get("device_type", CPU))
            self._cells = {
                name: replace(cell, config=cell.config.resolve(device))
                for name, cell in self._cells.items()
            }
            # a resumed run keeps the environment of its first cells
            if not self.run.environment:
                self.run = replace(self.run, environment=entry.environment | (self._code or {}))
            return
        if entry.problem is not None:
            problem = entry.problem  # the GPU watch found a possible disturbance of the timings
            if problem not in self.problems:
                self.problems.append(problem)
                self.save()
                self.notify(f"warning: {problem.message}; {problem.remedy} [{problem.code}]")
            return
        profiler, finished, total = self._pass
        cell = self._cells[str(entry.cell)]
        stage = entry.stage or "start"
        result = entry.result
        if result is not None:
            # Take the config from `cell`, because the result of a cell during which the worker died
            # has a config without a resolved dtype.
            capture = result.case is None
            result = replace(result, config=cell.config) if capture else self._resolve_check(result)
            if profiler is None or cell.status == "pending":
                cell = self._cells[cell.cell] = with_result(cell, result)
            elif profiler is not None and result.status != "ok":
                self.problems.append(
                    Problem(
                        profiler.name,
                        f"cell_{result.status}",
                        (
                            f"{result.config} {result.backend} ended with status {result.status} "
                            f"under {profiler.name}: {result.message}"
                        ),
                        (
                            f"{REMEDIES[result.status]}, or leave out this config when you use "
                            "this profiler"
                        ),
                        cells=(result.cell,),
                    )
                )
            stage, finished = result.status, finished + 1
            self._pass = (profiler, finished, total)
        if profiler is None:
            finished = sum(map(self._turns_done, self._cells.values()))
        elif result is None:
            stage = f"{profiler.name} {stage}"
        traces = _cell_traces(self.folder, self.run.profilers, (cell,)) if result else ()
        paths = tuple(self.folder / trace.path for trace in traces)
        self._progress(Step(finished, total, cell, stage, traces=paths))
        if result is not None and time.monotonic() - self._saved > SAVE_EVERY_S:
            self.save()

    def _turns_done(self, cell: Cell) -> int:
        """Return the number of processes in which a cell is done. A failed cell counts as done in all
        processes.
        """
        if cell.status == "pending":
            return 0
        return cell.process + 1 if cell.status == "ok" else self.run.protocol.processes

    def notify(self, notice: str) -> None:
        _, finished, total = self._pass
        cell = next(iter(self._cells.values()))
        self._progress(Step(finished, total, cell, "", notice))

    def explain_pending(self) -> None:
        """Add a message to each cell without a result if a profiler's failure is the reason."""
        for cell in self._cells.values():
            if cell.status != "pending":
                continue
            reasons = [
                f"{item.profiler}: {item.message} [{item.code}]"
                for item in self.problems
                # problems of the GPU only disturb timings
                if item.profiler != GPU and (not item.cells or cell.cell in item.cells)
            ]
            if reasons:
                message = f"did not run: {'; '.join(reasons)}"
                self._cells[cell.cell] = replace(cell, message=message)
        self.save()

    def add_outcome(self, outcome: Outcome) -> None:
        """Record the trace and the problem of a worker process that ran under nsys or ncu."""
        trace, problem = outcome
        if trace is not None:
            # leave out failed cells, because the trace may contain only a part of their launches
            done = tuple(cell for cell in trace.cells if self._cells[cell].status == "ok")
            self._wrapped.append(replace(trace, cells=done))
        if problem is not None:
            self.problems.append(problem)
        if trace or problem:
            self.save()

    def begin_period(self) -> None:
        """Record that this process begins to work on the run."""
        self._began = time.monotonic()
        self.run = replace(self.run, periods=(*self.run.periods, Period.begin()))

    def end_period(self) -> None:
        """Record how long this process has worked on the run."""
        *earlier, last = self.run.periods
        last = last.end(time.monotonic() - self._began)
        self.run = replace(self.run, periods=(*earlier, last))

    def save(self) -> None:
        """Write run.json, with all traces that exist in the run folder."""
        cells = tuple(self._cells.values())
        traces = (*_cell_traces(self.folder, self.run.profilers, cells), *self._wrapped)
        self.run = replace(self.run, cells=cells, traces=traces, problems=tuple(self.problems))
        write_run(self.folder, self.run)
        self._saved = time.monotonic()

    def _resolve_check(self, result: Cell) -> Cell:
        """Resolve the default dtype in the result of a verified cell.

        If the worker died or hung, add a failed check.
        """
        device = str(self.run.environment.get("device_type", CPU))
        asked = parse_config(result.asked) if result.asked else result.config
        return replace(
            result,
            config=result.config.resolve(device),
            asked=asked.resolve(device).label,
            checks=result.checks or (Check("out", False, f"{result.status}: {result.message}"),),
        )


def _cell_traces(
    folder: Path, profilers: tuple[str, ...], cells: tuple[Cell, ...]
) -> list[TraceFile]:
    """Return the traces that profilers inside the worker wrote for successful cells."""
    return [
        TraceFile(profiler.name, path.name, (cell.cell,))
        for profiler in (PROFILERS[name] for name in profilers)
        if profiler.session is None and profiler.suffix
        for cell in cells
        if cell.status == "ok" and (path := folder / f"{cell.cell}.{profiler.suffix}").exists()
    ]
