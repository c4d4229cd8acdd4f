"""Many sources into one store: a process a CPU reads them into shards, and this one merges the shards.

Shards are merged in the order of the sources, so that the store is the same as after a direct ingest. A
source is in the store whole or not at all; what is not merged when all ends is read again the next time.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import profharness.store as stores
from profharness.errors import ProfharnessError, StoreError, UsageError, shown
from profharness.files import exclusive
from profharness.processes import END_GRACE_S, held, kill_group, read_end, start_python
from profharness.store.filesystems import refuse_network
from profharness.store.schema import Writer, damaged, is_damage, require_folder
from profharness.store.sources import find_sources

if TYPE_CHECKING:
    from profharness.store import IngestResult

READER = (
    "import sys; from profharness.processes import end_with_parent; "
    "end_with_parent(int(sys.argv[1])); from profharness.store.reader import main; main()"
)
LOCAL = "local"
LOCK = "lock"
AHEAD = 32  # shards a reader that may wait to be merged, so that a slow source fills no disk
TRIES = 2  # of a source whose reader was killed: it may be another's memory that ran out
STEP_S = 0.2
ERROR_CHARS = 300

Plain = dict[str, Any]


@dataclass(frozen=True, slots=True)
class IngestOutcome:
    """What became of a source: results, or an error that names it."""

    source: Path
    results: tuple[IngestResult, ...] = ()
    error: str | None = None


def readers_of(scheduler: str) -> list[int]:
    """The CPU of each reader of `local` (as many as this process may use) or `local:N`. Raises UsageError."""
    cpus = sorted(os.sched_getaffinity(0))
    name, colon, number = scheduler.partition(":")
    if name != LOCAL or (colon and not (number.isdecimal() and 0 < int(number) <= 1024)):
        raise UsageError(
            f"--scheduler {scheduler}: sources are read on this host, by `local` (a process a CPU) or "
            "`local:N`; traces of other hosts go into a folder that this one sees"
        )
    count = int(number) if colon else len(cpus)
    return [cpus[index % len(cpus)] for index in range(count)]


@dataclass
class _Pool:
    """Sources to be read, and what the readers' threads say of them."""

    store: Path
    folder: Path
    sources: Sequence[Path]
    slots: threading.Semaphore
    next: Iterator[int] = field(init=False)
    lock: threading.Lock = field(default_factory=threading.Lock)
    answers: queue.SimpleQueue[tuple[int, Plain]] = field(default_factory=queue.SimpleQueue)
    children: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)
    closed: bool = False

    def __post_init__(self) -> None:
        self.next = iter(range(len(self.sources)))

    def shard(self, index: int) -> Path:
        return self.folder / f"{index}.db"

    def read(self, number: int, cpu: int) -> None:
        """What a reader's thread does until no source is left."""
        child: subprocess.Popen[bytes] | None = None
        while True:
            self.slots.acquire()
            with self.lock:
                index = next(self.next, None)
            if index is None or self.closed:
                break
            answer: Plain = {}
            for _ in range(TRIES):
                try:
                    child = self._started(number, cpu) if child is None else child
                    answer = self._asked(child, index)
                except OSError as error:  # no process, no memory
                    answer = {"error": f"{shown(self.sources[index])}: {error.strerror or error}"}
                if "lost" not in answer or self.closed:
                    break
                child = None
            if "lost" in answer:
                answer = {"error": f"{shown(self.sources[index])}: {answer['lost']}"}
            self.answers.put((index, answer))
        if child is not None:
            _wait_for_end(child)

    def _log(self, number: int) -> Path:
        return self.folder / f"{number}.log"

    def _started(self, number: int, cpu: int) -> subprocess.Popen[bytes]:
        with self.lock, self._log(number).open("wb") as errors:
            if self.closed:
                raise OSError("ended")
            child = start_python(READER, str(os.getpid()), stderr=errors, start_new_session=True)
            self.children[number] = child
        with contextlib.suppress(OSError, AttributeError):  # it has ended, or there is no such call
            os.sched_setaffinity(child.pid, {cpu})
        return child

    def _asked(self, child: subprocess.Popen[bytes], index: int) -> Plain:
        assert child.stdin is not None and child.stdout is not None
        paths = {"store": self.store, "shard": self.shard(index), "source": self.sources[index]}
        line = b""
        with contextlib.suppress(BrokenPipeError):
            task = {name: os.fspath(path) for name, path in paths.items()}
            child.stdin.write(json.dumps(task).encode() + b"\n")
            child.stdin.flush()
            line = child.stdout.readline()
        if line.endswith(b"\n"):
            answer: Plain = json.loads(line)
            return answer
        code = _wait_for_end(child)
        (number,) = [key for key, value in self.children.items() if value is child]
        words = read_end(self._log(number)).strip().splitlines()[-1:]
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        if code == -signal.SIGKILL:
            how += ", as the system does where memory runs out"
        return {
            "lost": f"the process that read it {how}"
            + "".join(f": {w[:ERROR_CHARS]}" for w in words)
        }

    def close(self) -> None:
        """End all readers, and what they have started."""
        with held():
            with self.lock:
                self.closed = True
                children = list(self.children.values())
            for _ in self.threads:
                self.slots.release()
            for number in (signal.SIGTERM, signal.SIGKILL):
                for child in children:
                    # one that has ended has given its number back
                    if child.poll() is None:
                        kill_group(child, number)
                deadline = time.monotonic() + END_GRACE_S
                for child in children:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        child.wait(max(0.0, deadline - time.monotonic()))
            for thread in self.threads:
                thread.join(END_GRACE_S)


def _wait_for_end(child: subprocess.Popen[bytes]) -> int:
    """The return code of a reader that has nothing more to do, or has ended."""
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with contextlib.suppress(BrokenPipeError):  # a task that it did not read
                stream.close()
    return child.wait()


def ingest_sources(
    store: Path,
    sources: Sequence[Path],
    cpus: Sequence[int],
    waiting: Callable[[], None] = lambda: None,
) -> Generator[IngestOutcome, None, None]:
    """Read sources side by side, one reader a CPU of the list, and take them into the store; what became
    of each, in their order. waiting is called while nothing comes.

    Readers end with the iteration: close it where it ends early. Raises StoreError for a store that
    cannot be used.
    """
    refuse_network(store)
    with ExitStack() as opened:
        folder = opened.enter_context(_shard_folder(store))
        slots = threading.Semaphore(AHEAD * len(cpus))
        pool = _Pool(store, folder, sources, slots)
        opened.callback(pool.close)
        writer = opened.enter_context(closing(Writer(store)))
        for number, cpu in enumerate(cpus[: len(sources)]):
            thread = threading.Thread(target=pool.read, args=(number, cpu), daemon=True)
            pool.threads.append(thread)
            thread.start()
        held_back: dict[int, Plain] = {}
        for index, path in enumerate(sources):
            while index not in held_back:
                with contextlib.suppress(queue.Empty):
                    done, answer = pool.answers.get(timeout=STEP_S)
                    held_back[done] = answer
                    continue
                waiting()
            yield _taken(store, writer, pool.shard(index), path, held_back.pop(index))
            pool.shard(index).unlink(missing_ok=True)
            slots.release()


def ingested(store: Path, paths: Iterable[Path], scheduler: str | None) -> list[IngestResult]:
    """Take all sources of these paths in; without a scheduler this process reads them. Raises
    TraceFormatError for a path that is none, ProfharnessError for sources that readers could not take in,
    once all others are.
    """
    if scheduler is None:
        results = [result for path in paths for result in stores.ingest_path(store, path)]
        stores.require_stored(store, results)
        return results
    cpus = readers_of(scheduler)
    sources = [source for path in paths for source in find_sources(path)]
    with closing(ingest_sources(store, sources, cpus)) as taken:
        outcomes = list(taken)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    results = [result for outcome in outcomes for result in outcome.results]
    stores.require_stored(store, results, len(errors))
    if errors:
        raise ProfharnessError("\n".join(errors))
    return results


def _taken(
    store: Path,
    writer: Callable[[], sqlite3.Connection],
    shard: Path,
    path: Path,
    answer: Plain,
) -> IngestOutcome:
    if "error" in answer:
        return IngestOutcome(path, error=answer["error"])
    content_hash, whole = answer.pop("content_hash"), answer.pop("whole")
    kept = Path(answer["kept"]) if answer["kept"] else None
    texts = {"source": path, "kept": kept, "warnings": tuple(answer["warnings"])}
    result = stores.IngestResult(**answer | texts)
    if result.status == "unchanged":
        return IngestOutcome(path, (result,))
    try:
        merged = stores.merge_shard(writer(), shard, result, content_hash, whole=whole)
        return IngestOutcome(path, (merged,))
    except StoreError:
        raise
    except ProfharnessError as error:  # the store has more of this run
        return IngestOutcome(path, error=str(error))
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if is_damage(error):
            raise damaged(store, error) from None
        raise StoreError(
            f"{store}: cannot be written: {error}; what was stored stays, and the same command goes on "
            "once that is mended; or name another --store"
        ) from None


@contextmanager
def _shard_folder(store: Path) -> Iterator[Path]:
    """A folder for shards beside the store, which has room for the store too. What a killed process
    has left there goes first. Raises StoreError where there can be none.
    """
    require_folder(store)
    name = f".{store.name}.shards-"
    for left in store.parent.glob(f"{name}*"):
        with exclusive(left / LOCK) as holder:
            if holder is None:
                shutil.rmtree(left, ignore_errors=True)
    while True:
        try:
            folder = Path(tempfile.mkdtemp(prefix=name, dir=store.parent))
        except OSError as error:
            raise StoreError(
                f"{store.parent}: shards cannot be written there: {error.strerror}; "
                "name a --store elsewhere, or leave --scheduler out"
            ) from None
        with exclusive(folder / LOCK) as holder:
            # another process that looks for what was left may have taken it
            if holder is None and (folder / LOCK).exists():
                try:
                    yield folder
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
                return
