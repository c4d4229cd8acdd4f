"""What can be done for the store while workers measure: making it, and parsing traces."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import profharness.store as stores
from profharness.errors import ProfharnessError
from profharness.processes import STEP_S, deferred, let_through
from profharness.profilers import PROFILERS
from profharness.rows import COLD, EAGER, GRAPH
from profharness.run import read_run
from profharness.runner.supervise import Progress, Step
from profharness.store.trace_cache import ParsedTraceCache

LEAVING_S = 5.0  # that an interrupted job waits for the store to be made
ENOUGH_CPUS = 4  # with fewer, parsing would take time from the worker's own calls
ON_GPU = frozenset((EAGER, COLD, GRAPH))
LOWEST = 19  # priority that a thread can have


class BackgroundIngest:
    """A thread beside a capture. It makes the store, whose schema and imports cost as long as a cell,
    then parses the traces of cells and groups that have ended. `parsed` contains them.

    What goes wrong here shows when the run is taken in, with the run folder complete. What is parsed
    stays in memory, so that a process that is killed leaves nothing half done.
    """

    def __init__(self, store: Path) -> None:
        self.parsed = ParsedTraceCache()
        self._store = store
        self._ended: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._taken: frozenset[int] | None = None  # cores of lanes; None: there are none
        self._left = False
        self._parses = (os.cpu_count() or 1) >= ENOUGH_CPUS
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def hears(self, progress: Progress | None) -> Progress:
        """A progress that passes each step on, and has the traces of cells timed on a GPU parsed. Times
        by the CPU's clock would be disturbed by that.
        """

        def hear(step: Step) -> None:
            if self._parses and ON_GPU & step.cell.samples.keys():
                for path in step.traces:
                    self._ended.put(path)
            if progress is not None:
                progress(step)

        return hear

    def lanes(self, descriptions: Sequence[dict[str, Any]]) -> None:
        """Yield to these lanes, and keep off the cores that they are bound to, where there are others."""
        self._taken = frozenset(cpu for lane in descriptions for cpu in lane.get("cpus") or ())

    def group(self, folder: Path) -> None:
        """Have the traces of a group that is done parsed."""
        if self._parses:
            self._ended.put(folder)

    def finish(self) -> None:
        """Wait until the store is made and all is parsed; interrupts come through. What is left is parsed
        here: the thread may yield to other work on this host.
        """
        with contextlib.suppress(queue.Empty):
            while (path := self._ended.get_nowait()) is not None:
                self._parse(path)
                let_through()
        self._ended.put(None)
        while self._thread.is_alive():
            self._thread.join(STEP_S)
            let_through()

    def leave(self) -> None:
        """Wait for LEAVING_S at most, and parse no more."""
        self._left = True
        self._ended.put(None)
        self._thread.join(LEAVING_S)

    def _run(self) -> None:
        _ = stores.ingest_path  # imports the parsers
        with contextlib.suppress(ProfharnessError, OSError):
            stores.open_store(self._store, write=True).close()
        while (path := self._ended.get()) is not None and not self._left:
            self._step_back()
            self._parse(path)

    def _parse(self, path: Path) -> None:
        for trace in _traces_of(path) if path.is_dir() else (path,):
            if not self._left:
                self.parsed.add(trace)

    def _step_back(self) -> None:
        """Let this thread yield to lanes."""
        # elsewhere these calls know processes only
        if self._taken is not None and sys.platform == "linux":
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
                if others := os.sched_getaffinity(0) - self._taken:
                    os.sched_setaffinity(0, others)


def _traces_of(group: Path) -> list[Path]:
    """The traces of cells timed on a GPU; not those of profilers that wrap the worker, whose tools it takes
    to read them.
    """
    with contextlib.suppress(ProfharnessError, OSError):
        run = read_run(group)
        if any(ON_GPU & cell.samples.keys() for cell in run.cells):
            inside = {name for name, profiler in PROFILERS.items() if profiler.session is None}
            return [group / trace.path for trace in run.traces if trace.profiler in inside]
    return []


@contextlib.contextmanager
def open_background_ingest(store: Path) -> Iterator[BackgroundIngest]:
    """Does that beside the block. Signals are deferred: an exception amid an import would leave a lock
    for which the thread waits.
    """
    with deferred():
        background = BackgroundIngest(store)
        try:
            yield background
        except BaseException:
            background.leave()
            raise
        background.finish()
