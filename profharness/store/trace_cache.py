"""Cache traces that are parsed before their run is complete, so that ingesting it takes less time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from profharness.errors import TraceFormatError
from profharness.store.sources import hash_file
from profharness.trace import LaunchBatch, Trace
from profharness.traces import open_trace

MOST_BYTES = 16 << 20  # of trace files; parsed traces take several times as much memory


class ParsedTraces(Protocol):
    """Traces that were parsed before, by this or another process."""

    def take(self, path: Path, content_hash: str) -> tuple[Trace, Iterator[LaunchBatch]] | None:
        """Return a parsed trace, None if it must be parsed. Raises TraceFormatError."""


class ParsedTraceCache:
    """Parsed traces by path, of at most MOST_BYTES of files. The ingest parses all others.

    Several threads may add traces. `take` must not run at the same time.
    """

    def __init__(self) -> None:
        self._kept: dict[Path, tuple[str, Trace, list[LaunchBatch]]] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, path: Path) -> None:
        """Parse a complete trace and keep it. Ignore an unreadable one: the ingest reports it."""
        with contextlib.suppress(OSError, TraceFormatError, ValueError, OverflowError):
            size = path.stat().st_size
            with self._lock:
                if path in self._kept or self._bytes + size > MOST_BYTES:
                    return
                self._bytes += size
            with contextlib.ExitStack() as failed:
                failed.callback(self._release, size)
                content_hash, trace = hash_file(path), open_trace(path)
                with contextlib.closing(trace):  # its temporary file
                    self._kept[path] = content_hash, trace, list(trace.batches())
                failed.pop_all()

    def _release(self, size: int) -> None:
        with self._lock:
            self._bytes -= size

    def take(self, path: Path, content_hash: str) -> tuple[Trace, Iterator[LaunchBatch]] | None:
        """Remove and return a parsed trace; None if there is none or the file has changed since."""
        known, trace, batches = self._kept.pop(path, (None, None, ()))
        return (trace, iter(batches)) if trace is not None and known == content_hash else None
