"""Create the store and parse traces while workers measure."""

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
from profharness.processes import STEP_S, defer_signals, raise_deferred_signals
from profharness.recording.profilers import PROFILERS
from profharness.recording.supervise import Progress, Step
from profharness.rows import COLD, EAGER, GRAPH
from profharness.run import read_run
from profharness.store.sources import ParsedTraceCache

LEAVING_S = 5.0  # maximum time that an interrupted job waits for the store to be created
ENOUGH_CPUS = 4  # with fewer CPUs, parsing would slow down the calls of the worker
ON_GPU = frozenset((EAGER, COLD, GRAPH))
LOWEST = 19  # the lowest priority of a thread


class BackgroundIngest:
    """A thread that creates the store and then parses traces during a capture.

    The thread is useful because creating the store takes as long as a cell. The parsed traces are
    kept in memory, in `parsed`, so a killed process leaves no files behind. Errors are ignored
    here, because the later ingest of the whole run folder reports them.
    """

    def __init__(self, store: Path) -> None:
        self.parsed = ParsedTraceCache()
        self._store = store
        self._ended: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._lane_cpus: frozenset[int] | None = None  # None if there are no lanes
        self._left = False
        self._parses = (os.cpu_count() or 1) >= ENOUGH_CPUS
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wrap_progress(self, progress: Progress | None) -> Progress:
        """Return a progress callback that forwards each step and queues the traces of its cell.

        Cells that were timed on the CPU are not queued, because parsing would disturb their times.
        """

        def forward(step: Step) -> None:
            if self._parses and ON_GPU & step.cell.samples.keys():
                for path in step.traces:
                    self._ended.put(path)
            if progress is not None:
                progress(step)

        return forward

    def lanes(self, descriptions: Sequence[dict[str, Any]]) -> None:
        """Lower the thread's priority, and if possible, exclude the lanes' cores from its affinity."""
        self._lane_cpus = frozenset(cpu for lane in descriptions for cpu in lane.get("cpus") or ())

    def group(self, folder: Path) -> None:
        """Queue the traces of a finished group."""
        if self._parses:
            self._ended.put(folder)

    def finish(self) -> None:
        """Wait until the store is created and all traces are parsed.

        Raise any interrupt that occurs while waiting.
        """
        # parse the remaining traces here, because the background thread may have a low priority
        with contextlib.suppress(queue.Empty):
            while (path := self._ended.get_nowait()) is not None:
                self._parse(path)
                raise_deferred_signals()
        self._ended.put(None)
        while self._thread.is_alive():
            self._thread.join(STEP_S)
            raise_deferred_signals()

    def leave(self) -> None:
        """Stop parsing, and wait at most LEAVING_S for the thread to end."""
        self._left = True
        self._ended.put(None)
        self._thread.join(LEAVING_S)

    def _run(self) -> None:
        _ = stores.ingest_path  # imports the parsers
        with contextlib.suppress(ProfharnessError, OSError):
            stores.open_store(self._store, write=True).close()
        while (path := self._ended.get()) is not None and not self._left:
            self._lower_priority()
            self._parse(path)

    def _parse(self, path: Path) -> None:
        for trace in _traces_of(path) if path.is_dir() else (path,):
            if not self._left:
                self.parsed.add(trace)

    def _lower_priority(self) -> None:
        # on other systems, these calls affect the process and not only the thread
        if self._lane_cpus is not None and sys.platform == "linux":
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
                if others := os.sched_getaffinity(0) - self._lane_cpus:
                    os.sched_setaffinity(0, others)


def _traces_of(group: Path) -> list[Path]:
    """Return the traces of a group if any of its cells was timed on a GPU."""
    with contextlib.suppress(ProfharnessError, OSError):
        run = read_run(group)
        if any(ON_GPU & cell.samples.keys() for cell in run.cells):
            # omit the traces of nsys and ncu, because their parsers would start the tools
            inside = {name for name, profiler in PROFILERS.items() if profiler.session is None}
            return [group / trace.path for trace in run.traces if trace.profiler in inside]
    return []


@contextlib.contextmanager
def open_background_ingest(store: Path) -> Iterator[BackgroundIngest]:
    """Yield a BackgroundIngest, and end its thread after the block."""
    # an interrupt during an import would leave an import lock for which the thread waits forever
    with defer_signals():
        background = BackgroundIngest(store)
        try:
            yield background
        except BaseException:
            background.leave()
            raise
        background.finish()
