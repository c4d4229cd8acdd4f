"""Traces that are parsed before their run is whole, so that less is left to do when it is taken in."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from profharness.errors import TraceFormatError
from profharness.parse import open_trace
from profharness.store.sources import hash_file
from profharness.trace import LaunchBatch, Trace

MOST_BYTES = 16 << 20  # of files, which take a multiple of that when they are parsed


class ReadAhead:
    """Parsed traces by their paths, of MOST_BYTES of files at most; the ingest parses the others.
    Threads add to it while none takes from it yet.
    """

    def __init__(self) -> None:
        self._kept: dict[Path, tuple[str, Trace, list[LaunchBatch]]] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, path: Path) -> None:
        """Parse a finished trace and keep it; one that cannot be read is left for the ingest to tell of."""
        with contextlib.suppress(OSError, TraceFormatError, ValueError, OverflowError):
            size = path.stat().st_size
            with self._lock:
                if path in self._kept or self._bytes + size > MOST_BYTES:
                    return
                self._bytes += size
            with contextlib.ExitStack() as failed:
                failed.callback(self._give_back, size)
                content_hash, trace = hash_file(path), open_trace(path)
                with contextlib.closing(trace):  # its temporary file
                    self._kept[path] = content_hash, trace, list(trace.batches())
                failed.pop_all()

    def _give_back(self, size: int) -> None:
        with self._lock:
            self._bytes -= size

    def take(self, path: Path, content_hash: str) -> tuple[Trace, Iterator[LaunchBatch]] | None:
        """What is kept of a file, once, if its content is still this one."""
        known, trace, batches = self._kept.pop(path, (None, None, ()))
        return (trace, iter(batches)) if trace is not None and known == content_hash else None
