"""The files of an observed process: a journal with one line per event, and the counts of calls."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import sys
from typing import Any

from profharness.recording.observer.hook import append

# Number of int64 columns of a row: the index of the template plus 1 (0 in an unused row), the batch
# size, the query length, the key length (each -1 if unknown), and the number of calls.
ROW = 5
FIRST_ROWS = 100
SIZE = ctypes.sizeof(ctypes.c_int64)

_mmap = ctypes.CDLL(None, use_errno=True).mmap  # unlike mmap.mmap, it keeps no descriptor open
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)


class Journal:
    """The files `<pid>.jsonl` and `<pid>.counts` in a run folder.

    A forked child has its own files. If files of the same pid already exist, as after `os.exec`,
    the new names begin with `<pid>-2`. If `folder` is None, nothing is written.
    """

    def __init__(self, folder: str | None) -> None:
        self.folder = folder
        self.begin()

    def begin(self) -> None:
        name, number = str(os.getpid()), 1
        while self.folder is not None and os.path.exists(f"{self.folder}/{name}.jsonl"):  # noqa: PTH110
            number += 1
            name = f"{os.getpid()}-{number}"
        self.name = name

    def path(self, suffix: str) -> str | None:
        return None if self.folder is None else f"{self.folder}/{self.name}{suffix}"

    def write(self, event: str, **fields: Any) -> None:
        """Append an event as a line of JSON. Raise OSError if it cannot be written."""
        path = self.path(".jsonl")
        if path is None:
            return
        line = json.dumps({"event": event, **fields}, separators=(",", ":"), allow_nan=False)
        append(path, line.encode("utf-8", "replace") + b"\n")


def print_error(text: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"profharness: {text}", file=sys.stderr, flush=True)


class Counts:
    """The numbers of calls by template and lengths, in rows of a memory-mapped file.

    The file is complete even if the process is killed. If `path` is None, the rows exist only in
    memory.
    """

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.rows: dict[tuple[int, tuple[int, ...]], tuple[Any, int]] = {}
        self.room = 0
        self.cells: Any = None

    def row(self, template: int, lengths: tuple[int, ...]) -> tuple[Any, int]:
        found = self.rows.get((template, lengths))
        if found is not None:
            return found
        if self.path is None:
            found = [0], 0
        else:
            if len(self.rows) >= self.room:
                self._grow(self.path)
            first = len(self.rows) * ROW
            key = [template + 1, *(lengths or (-1, -1, -1))]
            for at, number in enumerate(key, start=first):
                self.cells[at] = number
            found = self.cells, first + ROW - 1
        self.rows[template, lengths] = found
        return found

    def of_template(self, template: int) -> int:
        return sum(
            cells[at] for (number, _), (cells, at) in list(self.rows.items()) if number == template
        )

    def open(self) -> None:
        """Create the file, even for a process without countable calls. Raise OSError."""
        if self.path is not None and not self.room:
            self._grow(self.path)

    def _grow(self, path: str) -> None:
        added = self.room or FIRST_ROWS
        append(path, bytes(added * ROW * SIZE))  # access beyond the end of the file raises SIGBUS
        self.room += added
        numbers = self.room * ROW
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            access = mmap.PROT_READ | mmap.PROT_WRITE
            address = _mmap(None, numbers * SIZE, access, mmap.MAP_SHARED, descriptor, 0)
        finally:
            os.close(descriptor)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
        # The file stays mapped, because a thread may still count calls while Python shuts down.
        mapped = (ctypes.c_int64 * numbers).from_address(address)
        self.cells = memoryview(mapped).cast("B").cast("q")
