"""The code that all programs of the worker share.

The code reads the plan, writes the journal, and ends the process when the parent ends.
"""

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
    EXIT_NO_GPU,
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
    """Raised if the CUDA context is lost, after which this process cannot run any other cell.

    The exception's only argument is the result of the cell.
    """


def exit_unwritable(what: str) -> NoReturn:
    """Print why the run folder is not writable, and exit with EXIT_UNWRITABLE."""
    with contextlib.suppress(OSError):
        print(f"{UNWRITABLE}{what}", file=sys.stderr, flush=True)
    raise SystemExit(EXIT_UNWRITABLE)


def end_with(parent: int) -> None:
    """Wait until the process with the ID `parent` ends, then end this process."""
    try:
        descriptor = os.pidfd_open(parent)
    except (AttributeError, OSError):
        with contextlib.suppress(ProcessLookupError):
            while True:
                with contextlib.suppress(PermissionError):  # the process runs under another user
                    os.kill(parent, 0)
                time.sleep(PARENT_POLL_S)
    else:
        select.select([descriptor], [], [])
    os._exit(EXIT_PARENT_GONE)


Stage = Callable[[str], None]
# These errors mean that the run folder is not writable. Other errors, such as too many open files,
# are problems of the process.
FOLDER_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOENT, errno.ENOTDIR, errno.EIO, errno.ESTALE),
)


class JournalWriter:
    """Appends entries to the journal of a run.

    The file is opened anew for each entry, because a backend may close any descriptors of the
    process.
    """

    def __init__(self, folder: Path) -> None:
        self._path = str(folder / JOURNAL_FILE)
        self._pid = os.getpid()
        # keep the original functions, because a backend may replace them in `os`
        self._os = os.open, os.write, os.close, os.fstat, os.getpid, os._exit

    def __call__(self, entry: JournalEntry) -> None:
        """Append one entry. Exit if the run folder is not writable."""
        open_file, write, close, stat, getpid, leave = self._os
        if getpid() != self._pid:
            leave(1)  # this is a forked child of a backend, which must not continue the run
        data = msgspec.json.encode(entry) + b"\n"
        try:
            for number in range(3):
                try:
                    stat(number)
                except OSError:  # otherwise the journal could become stdout or stderr
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
    """Return a function that calls `write` and then writes the problems that `watch` has found.

    Querying the GPU is slow, so skip it for most entries, but never for the end of the cell `last`.
    """

    def write_and_report(entry: JournalEntry) -> None:
        write(entry)
        at_once = entry.event == "end" and entry.cell == last
        for problem in watch.problems(at_once=at_once):
            write(JournalEntry("problem", problem=problem))

    return write_and_report


def run_arguments(arguments: Sequence[str], warmup: CudaWarmup | None = None) -> NoReturn:
    """Run the program that the arguments `[MODULE [ARGUMENT ...]] FOLDER` name, and exit."""
    module = arguments[0] if arguments[1:] else "profharness.recording.worker.cell"
    run_program(Path(arguments[-1]), module, warmup)


def starts_cuda(plan: Plan) -> bool:
    return plan.protocol.device != CPU and not plan.wrapped


def run_program(folder: Path, module: str, warmup: CudaWarmup | None = None) -> NoReturn:
    """Read the plan in a folder, run the `body` function of a module on it, and exit.

    The exit code is 0 if all cells were run, EXIT_NO_GPU if the plan needs a GPU but torch finds none,
    EXIT_DEAD_CONTEXT if the CUDA context was lost and the remaining cells need a new process, and
    EXIT_UNWRITABLE if the run folder is not writable.
    """
    # needed because a backend may change the working directory or replace functions of `os`
    folder, leave = folder.absolute(), os._exit
    # Remove Python's handler of SIGINT, because it would not run while a call waits inside CUDA.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    wake_with_parent()
    start_log()
    plan = msgspec.json.decode((folder / PLAN_FILE).read_bytes(), type=Plan)
    threading.Thread(target=end_with, args=(plan.parent,), daemon=True).start()
    write: Write = JournalWriter(folder)
    if warmup is None and starts_cuda(plan):
        warmup = CudaWarmup()
    gc.disable()  # while modules are imported, collections would find no garbage
    # imported here because this loads torch, which is slow, and the parent may end meanwhile
    from profharness.recording.worker import environment, isolation, timing

    device = plan.protocol.device
    if device == "auto":
        device = environment.default_device()
    elif is_gpu(device) and not is_gpu(environment.default_device()):
        leave(EXIT_NO_GPU)
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
        gc.freeze()  # so that garbage collections during a cell skip all objects of the imports
        gc.enable()
        body(timing.Workspace(device, folder, plan, sources, cells, keys, write))
    except DeadContextError as dead:
        write(JournalEntry("end", cell=dead.args[0].cell, result=dead.args[0]))
        code = EXIT_DEAD_CONTEXT
    except SystemExit as stop:
        if stop.code != EXIT_UNWRITABLE:
            raise
        code = EXIT_UNWRITABLE
    if plan.wrapped:  # exit normally, because nsys and ncu write their last records at exit
        sys.exit(code)
    leave(code)  # All data is on disk, so skip the slow shutdown of torch and CUDA.


def run_each(workspace: Workspace, run_one: Callable[[Cell, Stage], Cell]) -> None:
    """Call `run_one` for each cell, and write the cell's begin, stages and end to the journal."""
    write = workspace.write
    for cell in workspace.cells:
        write(JournalEntry("begin", cell=cell.cell))

        def stage(name: str, cell_id: str = cell.cell) -> None:
            write(JournalEntry("stage", cell=cell_id, stage=name))

        write(JournalEntry("end", cell=cell.cell, result=run_one(cell, stage)))
