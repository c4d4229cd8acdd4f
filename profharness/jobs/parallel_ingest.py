"""Ingest many sources in parallel. Worker processes parse the sources, and this process stores them.

A source is a run folder or a trace. Sources are stored in order, so the store is the same as after
a sequential ingest. Each source is stored completely or not at all. The next ingest stores the
missing sources.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import select
import signal
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import profharness.store as stores
from profharness.errors import ProfharnessError, StoreError, UsageError, printable_path
from profharness.processes import (
    END_GRACE_S,
    child_environment,
    delay_signals,
    end_marked,
    kill_group,
    new_mark,
    start_python,
)
from profharness.store.ingest import ingest_source
from profharness.store.schema import (
    Writer,
    refuse_network,
    require_writable,
)
from profharness.store.sources import Source, find_sources, is_archive
from profharness.trace import LaunchBatch, Trace

if TYPE_CHECKING:
    from profharness.store import IngestResult

WORKER = (
    "import sys; from profharness.processes import end_with_parent; "
    "end_with_parent(int(sys.argv[1])); from profharness.store.ingest_worker import main; main()"
)
LOCAL = "local"
TRIES = 2  # attempts to read a source whose worker is killed, perhaps because memory ran out
STEP_S = 0.2
# Maximum time to wait for a worker to end. It first ends its tool within 2 * END_GRACE_S.
LEAVING_S = 2 * END_GRACE_S + 1
LOG_BYTES, ERROR_CHARS = 4096, 300


@dataclass(frozen=True, slots=True)
class IngestOutcome:
    """The results of ingesting a source, or an error that contains its path."""

    source: Path
    results: tuple[IngestResult, ...] = ()
    error: str | None = None


class WorkerLostError(Exception):
    """A worker ended before it replied."""


def readers_of(scheduler: str) -> list[int]:
    """Return a list with the CPU of each worker.

    `local` selects one worker per usable CPU, and `local:N` selects N workers. Raise UsageError if
    the scheduler is unknown.
    """
    cpus = sorted(os.sched_getaffinity(0))
    name, colon, number = scheduler.partition(":")
    if name != LOCAL or (colon and not (number.isdecimal() and 0 < int(number) <= 1024)):
        raise UsageError(
            f"--scheduler {scheduler}: use `local` (one process per CPU) or `local:N`; sources "
            "are read on this host, so first copy the traces of other hosts to this host"
        )
    count = int(number) if colon else len(cpus)
    return [cpus[index % len(cpus)] for index in range(count)]


class _Worker:
    """A process that reads one source at a time.

    If the process dies, a new process reads the next source.
    """

    def __init__(self, store: Path, cpu: int) -> None:
        self._store, self._cpu = store, cpu
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] = io.BytesIO()
        self._source: Path | None = None
        self._streams = False
        self._mark: dict[str, str] = {}

    def start(self, path: Path) -> None:
        """Start reading a source. If this fails, the `source` method raises the error."""
        with contextlib.suppress(OSError):
            self._request("source", path)
            self._source = path

    def source(self, path: Path, waiting: Callable[[], None]) -> Source:
        """Return a source, and call `waiting` repeatedly while it is being read.

        Raise WorkerLostError if the worker ends, or the error that occurs while the source is read.
        """
        if self._source != path:
            self._request("source", path)
        self._source = None
        assert self._process is not None and self._process.stdout is not None
        while not select.select([self._process.stdout], [], [], STEP_S)[0]:
            waiting()
        source: Source = self._reply()
        return source

    def take(self, path: Path, _: str) -> Trace:
        """Return a trace of the source. Raise any error of the parser."""
        self._request("trace", path)
        trace: Trace
        trace, first = self._reply()
        return replace(trace, close=self._skip_rest, batches=lambda: self._batches(path, first))

    def _batches(self, path: Path, first: list[LaunchBatch]) -> Iterator[LaunchBatch]:
        yield from first
        self._request("batches", path)
        self._streams = True
        while (batch := self._reply()) is not None:
            yield batch
        self._streams = False

    def _skip_rest(self) -> None:
        """End the process if it still sends batches, which would be mistaken for its next reply."""
        if self._streams:
            self.end()

    def _start(self) -> subprocess.Popen[bytes]:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed with the process
        self._mark = new_mark()
        process = start_python(
            WORKER,
            *(str(os.getpid()), os.fspath(self._store)),
            env=child_environment() | self._mark,
            stderr=self._log,
            start_new_session=True,
        )
        # the process may have ended already, and only Linux has this function
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setaffinity(process.pid, {self._cpu})
        return process

    def _request(self, name: str, path: Path) -> None:
        if self._process is None:
            with delay_signals():
                self._process = self._start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # reading the reply then raises the error
            self._process.stdin.write(pickle.dumps((name, path)))
            self._process.stdin.flush()

    def _reply(self) -> Any:
        assert self._process is not None and self._process.stdout is not None
        try:
            reply = pickle.load(self._process.stdout)
        except (EOFError, pickle.UnpicklingError):
            raise WorkerLostError(self._end_lost(self._process)) from None
        except BaseException:
            self.end()  # otherwise, the rest of the reply would be read as the next reply
            raise
        if isinstance(reply, Exception):
            self._streams = False
            raise reply
        return reply

    def _end_lost(self, process: subprocess.Popen[bytes]) -> str:
        """Clean up after a process that ended unexpectedly, and return a description of its end."""
        with delay_signals():
            self._close_pipes()
            _wait(process, time.monotonic() + LEAVING_S)
            self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - LOG_BYTES))
            lines = self._log.read().decode(errors="replace").strip().splitlines()[-1:]
            self.join(0.0)
        code = process.returncode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        if code == -signal.SIGKILL:
            how += ", probably because the system ran out of memory"
        return ": ".join(
            [f"the process that read this source {how}", *(each[:ERROR_CHARS] for each in lines)]
        )

    def _close_pipes(self) -> None:
        assert self._process is not None
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # an unread request is lost
                    stream.close()

    def kill(self, number: signal.Signals) -> None:
        """Send a signal to the process and its group."""
        # the pid of an ended process may already belong to another process
        if self._process is not None and self._process.poll() is None:
            kill_group(self._process, number)

    def end(self) -> None:
        """End the process and its tools. The next request starts another process."""
        with delay_signals():
            self.leave()
            self.join(time.monotonic() + LEAVING_S)

    def leave(self) -> None:
        """Terminate the process without waiting until it has ended."""
        if self._process is not None:
            self._close_pipes()  # the process may be blocked until its reply is read
            self.kill(signal.SIGTERM)

    def join(self, deadline: float) -> None:
        """Wait until the process ends, and kill it at `deadline`. End the tools that it started."""
        process, self._process, self._source, self._streams = self._process, None, None, False
        if process is None:
            return
        _wait(process, deadline)
        self._log.close()
        if process.returncode < 0:
            end_marked(self._mark)


def _wait(process: subprocess.Popen[bytes], deadline: float) -> None:
    try:
        process.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        kill_group(process)
        process.wait()


@contextlib.contextmanager
def _workers(store: Path, cpus: Iterable[int]) -> Iterator[list[_Worker]]:
    """Yield one worker for each element of `cpus`, and end the workers after the block."""
    workers = [_Worker(store, cpu) for cpu in cpus]
    try:
        yield workers
    finally:
        with delay_signals():
            for worker in workers:
                worker.leave()
            deadline = time.monotonic() + LEAVING_S
            for worker in workers:
                worker.join(deadline)


def ingest_sources(
    store: Path,
    sources: Sequence[Path],
    cpus: Sequence[int],
    waiting: Callable[[], None] = lambda: None,
) -> Generator[IngestOutcome, None, None]:
    """Ingest sources with one worker for each element of `cpus`, and yield the outcomes in order.

    Each worker parses at most one source in advance, so the number of workers limits the memory in
    use. `waiting` is called repeatedly while no source is ready. Close the generator to end the
    workers early. Raise StoreError if the store cannot be used.
    """
    refuse_network(store)
    require_writable(store)
    with (
        closing(Writer(store)) as writer,
        _workers(store, cpus[: len(sources)]) as workers,
    ):
        for worker, path in zip(workers, sources, strict=False):
            worker.start(path)
        for index, path in enumerate(sources):
            worker = workers[index % len(workers)]
            outcome = _ingest(store, writer, worker, path, waiting)
            if index + len(workers) < len(sources):
                worker.start(sources[index + len(workers)])
            yield outcome


def _ingest(
    store: Path,
    writer: Callable[[], sqlite3.Connection],
    worker: _Worker,
    path: Path,
    waiting: Callable[[], None],
) -> IngestOutcome:
    name, fault = printable_path(path), ""
    for _ in range(TRIES):
        try:
            source = worker.source(path, waiting)
            return IngestOutcome(path, (ingest_source(store, writer, source, None, worker),))
        except WorkerLostError as error:
            fault = f"{name}: {error}"
            continue
        except StoreError:
            raise
        except ProfharnessError as error:
            fault = str(error)
        except MemoryError:
            fault = f"{name}: not enough memory to read this source"
        except OSError as error:  # for example, TMPDIR is full or the file was deleted
            reason = error.strerror or f"{type(error).__name__}: {error}"
            fault = f"{name}: {error.filename or 'TMPDIR'}: {reason}"
        break
    return IngestOutcome(path, error=fault)


def ingested(store: Path, paths: Sequence[Path], scheduler: str | None) -> list[IngestResult]:
    """Ingest all sources at or below the given paths.

    If `scheduler` is None, this process parses the sources without workers. Raise TraceFormatError
    if a path contains no sources. If workers could not read some sources, raise ProfharnessError
    after all other sources are ingested.
    """
    if scheduler is None or any(map(is_archive, paths)):
        results = [result for path in paths for result in stores.ingest_path(store, path)]
        stores.require_stored(store, results)
        return results
    cpus = readers_of(scheduler)
    sources = [source for path in paths for source in find_sources(path)]
    with closing(ingest_sources(store, sources, cpus)) as ingesting:
        outcomes = list(ingesting)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    results = [result for outcome in outcomes for result in outcome.results]
    stores.require_stored(store, results, len(errors))
    if errors:
        raise ProfharnessError("\n".join(errors))
    return results
