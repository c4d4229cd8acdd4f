"""Count calls of each kind in a memory-mapped file, which survives any end of the process and counts
calls of all threads.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

from profharness.recording.observer.hook import append

ROW = 5  # int64 columns: template + 1, batch, query length, key length (or -1 each), calls
FIRST_ROWS = 100
SIZE = ctypes.sizeof(ctypes.c_int64)

_mmap = ctypes.CDLL(None, use_errno=True).mmap  # unlike mmap.mmap it keeps no descriptor open
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)


class Counts:
    """Rows of calls by template and lengths. Without a path they exist only in memory."""

    def __init__(self, path: str | None) -> None:
        self.path = path
        self.rows: dict[tuple[int, tuple[int, ...]], tuple[Any, int]] = {}
        self.room = 0
        self.cells: Any = None

    def row(self, template: int, lengths: tuple[int, ...]) -> tuple[Any, int]:
        """Return an array and the index in it that counts these calls. Raise OSError."""
        found = self.rows.get((template, lengths))
        if found is None:
            found = self.rows[template, lengths] = self._new_row(template, lengths)
        return found

    def of_template(self, template: int) -> int:
        """Return the number of calls of a template so far."""
        return sum(
            cells[at] for (number, _), (cells, at) in list(self.rows.items()) if number == template
        )

    def open(self) -> None:
        """Create the file, even for a process without countable calls. Raise OSError."""
        if self.path is not None and not self.room:
            self._grow()

    def _grow(self) -> None:
        assert self.path is not None
        added = self.room or FIRST_ROWS
        append(self.path, bytes(added * ROW * SIZE))  # access to an unallocated page raises SIGBUS
        self.room += added
        numbers = self.room * ROW
        descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            access = mmap.PROT_READ | mmap.PROT_WRITE
            address = _mmap(None, numbers * SIZE, access, mmap.MAP_SHARED, descriptor, 0)
        finally:
            os.close(descriptor)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), self.path)
        # Never unmapped: a thread may still count while the interpreter shuts down.
        mapped = (ctypes.c_int64 * numbers).from_address(address)
        self.cells = memoryview(mapped).cast("B").cast("q")

    def _new_row(self, template: int, lengths: tuple[int, ...]) -> tuple[Any, int]:
        if self.path is None:
            return [0], 0
        if len(self.rows) >= self.room:
            self._grow()
        first = len(self.rows) * ROW
        key = [template + 1, *(lengths or (-1, -1, -1))]
        for at, number in enumerate(key, start=first):
            self.cells[at] = number
        return self.cells, first + ROW - 1
