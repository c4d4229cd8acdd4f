"""What can be done for the store while the worker measures: making it, and parsing traces."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import profharness.store as stores
from profharness.errors import ProfharnessError
from profharness.processes import STEP_S, deferred, let_through
from profharness.rows import COLD, EAGER, GRAPH
from profharness.runner.supervise import Progress, Step
from profharness.store.ahead import ReadAhead

LEAVING_S = 5.0  # that an interrupted job waits for the store to be made
ENOUGH_CPUS = 4  # with fewer, parsing would take time from the worker's own calls
ON_GPU = frozenset((EAGER, COLD, GRAPH))


class Meanwhile:
    """A thread beside a capture. It makes the store, whose schema and imports cost as long as a cell,
    then parses the traces of cells that have ended. ahead: what it has parsed.

    What goes wrong here shows when the run is taken in, with the run folder complete.
    """

    def __init__(self, store: Path) -> None:
        self.ahead = ReadAhead()
        self._store = store
        self._traces: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
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
                    self._traces.put(path)
            if progress is not None:
                progress(step)

        return hear

    def finish(self) -> None:
        """Wait until the store is made and all is parsed; interrupts come through."""
        self._traces.put(None)
        while self._thread.is_alive():
            self._thread.join(STEP_S)
            let_through()

    def leave(self) -> None:
        """Wait for LEAVING_S at most, and parse no more."""
        self._left = True
        self._traces.put(None)
        self._thread.join(LEAVING_S)

    def _run(self) -> None:
        _ = stores.ingest_path  # imports the parsers
        with contextlib.suppress(ProfharnessError, OSError):
            stores.open_store(self._store, write=True).close()
        while (path := self._traces.get()) is not None and not self._left:
            self.ahead.add(path)


@contextlib.contextmanager
def opened_meanwhile(store: Path) -> Iterator[Meanwhile]:
    """Does that beside the block. Signals are deferred: an exception amid an import would leave a lock
    for which the thread waits.
    """
    with deferred():
        meanwhile = Meanwhile(store)
        try:
            yield meanwhile
        except BaseException:
            meanwhile.leave()
            raise
        meanwhile.finish()
