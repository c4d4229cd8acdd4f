"""Scanning in one process or two: this process takes the even ranges of a file, a child the odd
ones.
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

from profharness.errors import TraceFormatError
from profharness.parse.chrome_columns import Collector, NeedExactTimes, Spool, Tables
from profharness.parse.chrome_events import Events
from profharness.parse.chrome_read import Layout, Window
from profharness.parse.chrome_scan import FOREVER, Part, Scanner

RANGE = 8 * 1024 * 1024
CHILD = "from profharness.parse.chrome_worker import main; main()"  # -m would pickle as __main__


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
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(file.fileno())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(file.fileno(),),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
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
