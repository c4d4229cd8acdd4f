"""Read sources in a child process. The parent process writes the sources to the store.

Requests on stdin are pickled pairs of a name and a path. Replies on stdout are also pickled.

* `source` replies with the Source at a path, and parses traces that the store does not contain.
* `trace` replies with the Trace of a file and a list that contains the first batch.
* `batches` replies with each further batch of this trace, and then with None.

If a request fails, the reply is an exception that the receiver must raise.
"""

from __future__ import annotations

import os
import pickle
import signal
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

from profharness.errors import ProfharnessError, StoreError
from profharness.store.ingest import unchanged
from profharness.store.schema import connect
from profharness.store.sources import Source, read_source
from profharness.trace import LaunchBatch, Trace
from profharness.traces import open_trace

Parsed = tuple[Trace, list[LaunchBatch], Iterator[LaunchBatch]]


class SourceReader:
    """A reader of one source at a time. It keeps parsed traces until they are requested."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._opened = ExitStack()
        self._parsed: dict[Path, Parsed | Exception] = {}
        self._rest: dict[Path, Iterator[LaunchBatch]] = {}

    def source(self, path: Path) -> Source:
        """Close the traces of the previous source and read a source.

        Also parse the traces, unless the store contains the source.
        """
        self.close()
        source = read_source(path)
        if not self._is_stored(source):
            for raw in source.raws:
                if raw.problem is None:
                    try:
                        self._parsed[raw.path] = self._parse(raw.path, source.captures)
                    except (ProfharnessError, OSError, MemoryError) as error:
                        self._parsed[raw.path] = error
        return source

    def trace(self, path: Path) -> tuple[Trace, list[LaunchBatch]]:
        """Return a trace without its batches, and a list that contains the first batch."""
        parsed = self._parsed.pop(path, None) or self._parse(path)
        if isinstance(parsed, Exception):
            raise parsed
        trace, first, self._rest[path] = parsed
        return replace(trace, batches=_nothing, close=_nothing), first

    def batches(self, path: Path) -> Iterator[LaunchBatch | None]:
        """Yield all batches of a trace except the first batch, and then None."""
        yield from self._rest.pop(path)
        yield None

    def close(self) -> None:
        """Remove the temporary files of all traces."""
        self._opened.close()
        self._parsed, self._rest = {}, {}

    def _parse(self, path: Path, captures: Sequence[Path] = ()) -> Parsed:
        trace = open_trace(path, captures)
        self._opened.callback(trace.close)
        batches = trace.batches()
        return trace, list(islice(batches, 1)), batches

    def _is_stored(self, source: Source) -> bool:
        # Ignore errors here, because the process that writes the store reports them.
        with (
            suppress(StoreError, sqlite3.Error),
            closing(connect(self._store, write=False)) as connection,
        ):
            return unchanged(connection, source) is not None
        return False


def _nothing() -> Any:
    """Do nothing. This function replaces attributes that cannot be pickled."""


def main() -> None:
    """Reply to requests until stdin ends or SIGTERM is received. Close all traces at the end."""
    signal.signal(signal.SIGTERM, _exit)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # so that the parent does not read the output of libraries as replies

    with closing(SourceReader(Path(sys.argv[2]))) as reader, suppress(EOFError, BrokenPipeError):
        while True:
            name, path = pickle.load(sys.stdin.buffer)
            # End the process if writing a reply fails, because later replies could not be read.
            for value in _replies(reader, name, path):
                pickle.dump(value, replies, pickle.HIGHEST_PROTOCOL)
                replies.flush()


def _replies(reader: SourceReader, name: str, path: Path) -> Iterator[object]:
    try:
        if name == "batches":
            yield from reader.batches(path)
        else:
            yield reader.source(path) if name == "source" else reader.trace(path)
    except (ProfharnessError, OSError, MemoryError) as error:
        yield error


def _exit(number: int, _: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
    raise SystemExit(128 + number)
