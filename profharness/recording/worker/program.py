"""The frame of the worker's programs: plan, journal, end with the parent, and exit."""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from profharness.attention.backends import read_sources
from profharness.device_types import CPU, is_gpu
from profharness.logs import start_log
from profharness.processes import wake_with_parent
from profharness.recording.worker.gpu_watch import CudaWarmup, GpuWatch, open_watch

if TYPE_CHECKING:
    from profharness.recording.worker.timing import Workspace, Write
from profharness.run import (
    EXIT_UNWRITABLE,
    JOURNAL_FILE,
    PLAN_FILE,
    UNWRITABLE,
    Cell,
    JournalEntry,
    Plan,
)

EXIT_DEAD_CONTEXT = 70
EXIT_PARENT_GONE = 71
PARENT_POLL_S = 0.5


class DeadContextError(Exception):
    """The CUDA context is lost, so this process cannot continue. `args` contains the cell's result."""


def exit_unwritable(what: str) -> NoReturn:
    """End the program because the run folder is not writable, and print why."""
    with contextlib.suppress(OSError):
        print(f"{UNWRITABLE}{what}", file=sys.stderr, flush=True)
    raise SystemExit(EXIT_UNWRITABLE)


def end_with(parent: int) -> None:
    """End this process when its parent ends, in whichever way."""
    try:
        descriptor = os.pidfd_open(parent)
    except (AttributeError, OSError):
        with contextlib.suppress(ProcessLookupError):
            while True:
                with contextlib.suppress(PermissionError):  # belongs to another user and is alive
                    os.kill(parent, 0)
                time.sleep(PARENT_POLL_S)
    else:
        select.select([descriptor], [], [])
    os._exit(EXIT_PARENT_GONE)


Stage = Callable[[str], None]
# Errors of a run folder that is not writable. Others, such as too many open files, are the process's.
FOLDER_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOENT, errno.ENOTDIR, errno.EIO, errno.ESTALE),
)


class JournalWriter:
    """Append to the journal of a run.

    Open the file for each entry, because a backend may close all descriptors of its process or
    reuse their numbers.
    """

    def __init__(self, folder: Path) -> None:
        self._path = str(folder / JOURNAL_FILE)
        self._pid = os.getpid()
        # store these functions before a backend can replace them
        self._os = os.open, os.write, os.close, os.fstat, os.getpid, os._exit

    def __call__(self, entry: JournalEntry) -> None:
        """Append one entry. End the program if the run folder is not writable."""
        open_file, write, close, stat, getpid, leave = self._os
        if getpid() != self._pid:
            leave(1)  # a fork that a backend left behind
        data = msgspec.json.encode(entry) + b"\n"
        try:
            for number in range(3):
                try:
                    stat(number)
                except OSError:  # else printed text would end up in the journal
                    open_file(os.devnull, os.O_RDWR)
            journal = open_file(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                while data:
                    data = data[write(journal, data) :]
            finally:
                close(journal)
        except OSError as error:
            if error.errno not in FOLDER_ERRORS:
                raise
            exit_unwritable(f"{JOURNAL_FILE}: {error.strerror}")


def watched_write(watch: GpuWatch, write: Write, last: str) -> Write:
    """Return a write function that also reports the GPU watch's observations.

    An observation takes as long as many calls, so not every cell has one, but the last one does.
    """

    def write_and_report(entry: JournalEntry) -> None:
        write(entry)
        at_once = entry.event == "end" and entry.cell == last
        for problem in watch.problems(at_once=at_once):
            write(JournalEntry("problem", problem=problem))

    return write_and_report


def run_arguments(arguments: Sequence[str], warmup: CudaWarmup | None = None) -> NoReturn:
    """Run the program of a command line `[MODULE [ARGUMENT ...]] FOLDER`."""
    module = arguments[0] if arguments[1:] else "profharness.recording.worker.cell"
    run_program(Path(arguments[-1]), module, warmup)


def starts_cuda(plan: Plan) -> bool:
    return plan.protocol.device != CPU and not plan.wrapped


def run_program(folder: Path, module: str, warmup: CudaWarmup | None = None) -> NoReturn:
    """Run a plan by the `body` of a module, and exit.

    The exit code is 0 on completion, EXIT_DEAD_CONTEXT if a new process has to continue after the
    cell in the DeadContextError, and EXIT_UNWRITABLE if the run folder is not writable.
    """
    # a backend may change the working directory, and replace functions of os
    folder, leave = folder.absolute(), os._exit
    # remove Python's handler, so that an interrupt also ends a program that waits inside CUDA
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    wake_with_parent()
    start_log()
    plan = msgspec.json.decode((folder / PLAN_FILE).read_bytes(), type=Plan)
    threading.Thread(target=end_with, args=(plan.parent,), daemon=True).start()
    write: Write = JournalWriter(folder)
    if warmup is None and starts_cuda(plan):
        warmup = CudaWarmup()
    gc.disable()  # loaded modules contain no garbage
    # loads torch, so after the parent's watch
    from profharness.recording.worker import environment, isolation, timing

    device = plan.protocol.device
    if device == "auto":
        device = environment.default_device()
    watch = None
    if is_gpu(device) and plan.cells:
        watch = warmup.watch() if warmup is not None else open_watch()
    keys = environment.collect(device)
    code = 0
    try:
        write(JournalEntry("environment", environment=keys))
        watched = watch is not None and watch.begin(environment.gpu_uuid(), plan.parent)
        sources = read_sources(folder)
        cells, owner = isolation.cells_here(plan, sources, device)
        if watch is not None and watched:
            write = watched_write(watch, write, cells[-1].cell)
        write = isolation.checked_write(write, keys.get("gpu", ""), alone=bool(owner))
        body = importlib.import_module(module).body
        gc.freeze()  # collections during a cell can skip it
        gc.enable()
        body(timing.Workspace(device, folder, plan, sources, cells, keys, write))
    except DeadContextError as dead:
        write(JournalEntry("end", cell=dead.args[0].cell, result=dead.args[0]))
        code = EXIT_DEAD_CONTEXT
    except SystemExit as stop:
        if stop.code != EXIT_UNWRITABLE:
            raise
        code = EXIT_UNWRITABLE
    if plan.wrapped:  # what a profiler injected writes its last records at exit
        sys.exit(code)
    leave(code)  # Everything is on disk, and shutting down torch and CUDA would only take time.


def run_each(workspace: Workspace, run_one: Callable[[Cell, Stage], Cell]) -> None:
    """Run the cells one after another. Write the begin, stages and end of each to the journal."""
    write = workspace.write
    for cell in workspace.cells:
        write(JournalEntry("begin", cell=cell.cell))

        def stage(name: str, cell_id: str = cell.cell) -> None:
            write(JournalEntry("stage", cell=cell_id, stage=name))

        write(JournalEntry("end", cell=cell.cell, result=run_one(cell, stage)))
