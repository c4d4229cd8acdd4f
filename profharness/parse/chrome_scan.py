"""The scan: cuts a file at event boundaries, decodes piece by piece, and says where the event
array ended.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from profharness.errors import TraceFormatError
from profharness.parse.chrome_read import BLOCK, MAX_PIECE, Layout, Window, object_end, skip_space
from profharness.parse.columns import Collector, Events, NeedExactTimes, Spool, Tables
from profharness.processes import child_environment

RANGE = 8 * 1024 * 1024

CHILD = "from profharness.parse.chrome_scan import main; main()"  # -m would pickle as __main__


@dataclass(frozen=True, slots=True)
class Request:
    """What a child has to do: the ranges `first`, `first + step`, … of a file; step 0: one range
    to the end.
    """

    path: str
    layout: Layout
    exact: bool
    first: int
    step: int
    range_bytes: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What a process found; error is a TraceFormatError's whole text, offset and expectation."""

    tables: Tables
    parts: list[Part]
    size: int
    need_exact: bool = False
    error: tuple[str, int | None, str | None] | None = None


def scan(request: Request, spool: Spool) -> Answer:
    """Scan this request's ranges into the spool. Raises TraceFormatError."""
    collector = Collector(Events(exact=request.exact), spool)
    window = Window(Path(request.path))
    parts: list[Part] = []
    try:
        scanner = Scanner(window, request.layout, collector)
        window.fill()
        index = request.first
        while True:
            width = request.range_bytes
            begin, end = (index * width, (index + 1) * width) if request.step else (0, FOREVER)
            if end > request.layout.first:
                parts.append(scanner.scan(index, max(begin, request.layout.first), end))
            if not request.step or window.eof or (parts and parts[-1].array_end is not None):
                break
            index += request.step
        return Answer(collector.tables, parts, window.end)
    except NeedExactTimes:
        return Answer(collector.tables, parts, 0, need_exact=True)
    finally:
        window.close()


def start_child(request: Request, file: BinaryIO) -> subprocess.Popen[bytes]:
    """A child that scans; it writes columns to `file` and its Answer to stdout."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(file.fileno())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(file.fileno(),),
        env=child_environment(),
    )
    assert child.stdin is not None
    child.stdin.write(pickle.dumps(request))
    child.stdin.close()
    child.stdin = None
    return child


def finish_child(child: subprocess.Popen[bytes]) -> Answer | None:
    """The child's answer; None when it died."""
    output, _ = child.communicate()
    if child.returncode:
        return None
    return cast(Answer, pickle.loads(output))


def stop_child(child: subprocess.Popen[bytes]) -> None:
    """End a child whose answer nobody needs."""
    child.kill()
    child.wait()
    if child.stdout is not None:
        child.stdout.close()


def temporary_file() -> BinaryIO:
    """A file without a name, gone when closed."""
    return cast(BinaryIO, tempfile.TemporaryFile(prefix="profharness-", buffering=0))


def main() -> None:
    """Entry of the child process."""
    request: Request = pickle.loads(sys.stdin.buffer.read())
    with os.fdopen(int(sys.argv[1]), "r+b", buffering=0) as file:
        try:
            answer: Any = scan(request, Spool(cast(BinaryIO, file)))
        except TraceFormatError as error:
            told = (str(error), error.offset, error.expected)
            answer = Answer(Tables(), [], 0, error=told)
    sys.stdout.buffer.write(pickle.dumps(answer))


FLUSH = 2 * 1024 * 1024
REACH = (
    4 * 1024 * 1024
)  # how far an event is followed over compact separators before it counts as broken
FOREVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Part:
    """One range of the file as it was scanned: array_end is the offset of the closing `]`, if it
    was met here.
    """

    index: int
    array_end: int | None
    eof: bool
    events: int  # decoded or skipped


class Scanner:
    """Scans byte ranges of one file into a collector, in ascending order."""

    def __init__(self, window: Window, layout: Layout, collector: Collector) -> None:
        self.window = window
        self.layout = layout
        self.collector = collector
        self._array_end: int | None = None

    def scan(self, index: int, begin: int, end: int) -> Part:
        """Take in every event that starts in [begin, end)."""
        window, tables = self.window, self.collector.tables
        before = tables.events + tables.skipped
        self._array_end = None
        if self._find_first(begin):
            self._scan_to(index, end)
        self.collector.flush(index)
        count = tables.events + tables.skipped - before
        return Part(index, self._array_end, window.eof and self._array_end is None, count)

    def _find_first(self, begin: int) -> bool:
        """Stand at the first event at or behind begin; False if there is none."""
        window, separator, gap = self.window, self.layout.separator, self.layout.gap
        if begin <= self.layout.first:
            window.seek(self.layout.first)
            return True
        if window.base >= begin:  # the range before this one has stopped right here
            return True
        lead = gap + 1
        window.seek(max(begin - lead, window.base))
        while True:
            at = window.buffer.find(separator, max(0, begin - lead - window.base))
            if at >= 0:
                window.seek(window.base + at + lead)
                return True
            if len(window.buffer) > 2 * len(separator):
                window.seek(window.end - len(separator))
            if not window.fill():
                return False

    def _scan_to(self, index: int, end: int) -> None:
        window, separator, lead = self.window, self.layout.separator, self.layout.gap + 1
        flushed = window.base
        wanted = 1
        stuck = False  # at the end of the file, with an event that goes on behind a separator
        while window.base < end and self._array_end is None:
            more = True
            if len(window.buffer) < wanted or separator not in window.buffer:
                more = window.fill(max(BLOCK, min(len(window.buffer), MAX_PIECE // 4)))
                if len(window.buffer) > MAX_PIECE:
                    message = "an event of more than 32 MiB"
                    raise window.error(message, offset=window.base, expected="an event")
            if more and len(window.buffer) < wanted:
                continue
            buffer = window.buffer
            stop = (
                buffer.find(separator, max(0, end - window.base - lead)) if window.end > end else -1
            )
            if stop < 0:
                stop = buffer.rfind(separator)
            final = stop < 0 or stuck
            if final and more and not stuck:
                continue
            segment = buffer if final else buffer[: stop + 1]
            used = self._segment(segment, last=final)
            if self._array_end is None:
                if final:
                    return
                whole = used == len(segment)
                window.seek(window.base + (stop + lead if whole else used))
                stuck = window.eof and not whole
                wanted = 1 if whole else 2 * len(window.buffer)
                wanted = min(wanted, REACH)
            if window.base - flushed >= FLUSH:
                self.collector.flush(index)
                flushed = window.base

    def _segment(self, segment: bytes, *, last: bool) -> int:
        """Decode whole events; returns how many bytes are done with (fewer if the last event
        goes on).
        """
        try:
            events = self.collector.events.many.decode(b"[" + segment + b"]")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return self._piecewise(segment, last=last)
        self.collector.tables.events += len(events)
        self.collector.add(events)
        return len(segment)

    def _piecewise(self, segment: bytes, *, last: bool) -> int:
        """Decode event by event, skip and count what is broken, and see the array's end."""
        separator, lead = self.layout.separator, self.layout.gap + 1
        position = 0
        while position < len(segment):
            border = segment.find(separator, position) if self.layout.certain else -1
            stop = border + 1 if border >= 0 else len(segment)
            behind = object_end(segment, position, stop)
            if behind is None:
                if border < 0 and not last and len(segment) - position < REACH:
                    return position
                border = segment.find(separator, position + 1) if border < 0 else border
                if border < 0 and last:
                    return self._lost_end(segment, position)
                self.collector.tables.skipped += 1
                if border < 0:
                    return len(segment)
                position = border + lead
                continue
            self._one(segment[position:behind])
            position = skip_space(segment, behind)
            mark = segment[position : position + 1]
            if mark == b"]":
                self._array_end = self.window.base + position
                return position
            position = self._next(segment, position, mark)
        return len(segment)

    def _next(self, segment: bytes, position: int, mark: bytes) -> int:
        """Where the next event starts, given what follows an event."""
        if mark == b",":
            position = skip_space(segment, position + 1)
            if segment[position : position + 1] in (b"{", b""):
                return position
        if not mark:
            return len(segment)
        self.collector.tables.skipped += 1
        border = segment.find(self.layout.separator, position)
        return len(segment) if border < 0 else border + self.layout.gap + 1

    def _lost_end(self, segment: bytes, position: int) -> int:
        """At the end of the file inside an event: perhaps a broken event whose array still
        closes.
        """
        tail = segment[position:].rstrip()
        border = max(tail.rfind(b"}\n  ]"), tail.rfind(b"}]"), tail.rfind(b"}\n ]"))
        if border < 0 or not tail.endswith((b"}", b"]")):
            return len(segment)
        self.collector.tables.skipped += 1
        self._array_end = self.window.base + position + tail.index(b"]", border)
        return position

    def _one(self, data: bytes) -> None:
        collector = self.collector
        known = len(collector.events.extra)
        event, bad = collector.events.decode_one(data)
        if len(collector.events.extra) != known:
            collector.register()
        if bad:
            collector.tables.skipped += 1
            return
        collector.tables.events += 1
        if event is not None:
            collector.add((event,))
