"""The journal as the parent process reads it, and adds to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from profharness.record import JournalEntry


class Journal:
    """journal.jsonl from where it ended when this was made: whole lines as they come."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() else 0
        self._rest = b""

    def entries(self) -> Iterator[JournalEntry]:
        """Entries written since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(msgspec.MsgspecError):
                yield msgspec.json.decode(line, type=JournalEntry)

    def append(self, entry: JournalEntry) -> None:
        """Write an entry of the parent's own, on a line of its own even after a line that a crash
        cut short.
        """
        data = (b"\n" if self._rest else b"") + msgspec.json.encode(entry) + b"\n"
        with self._path.open("ab") as file:
            file.write(data)
        self._offset += len(data)
        self._rest = b""
