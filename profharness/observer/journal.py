"""What an observed process writes down: one file a process, a line an event, each appended at once."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

SCHEMA = "profharness.observed/1"
OPTIONS_FILE = "observe.json"


class Journal:
    """`<pid>.jsonl` in a run folder; after a fork the child has one of its own. folder None: nothing
    is written.
    """

    def __init__(self, folder: str | None) -> None:
        self.folder = folder
        self.pid = 0
        self.descriptor = -1

    def write(self, event: str, **fields: Any) -> None:
        """Append a line. Raises OSError."""
        if self.folder is None:
            return
        if self.pid != os.getpid():
            self._open()
        line = json.dumps({"event": event, **fields}, separators=(",", ":"), allow_nan=False)
        data = line.encode("utf-8", "replace") + b"\n"
        while data:
            data = data[os.write(self.descriptor, data) :]

    def _open(self) -> None:
        assert self.folder is not None
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.pid = os.getpid()
        path = os.path.join(self.folder, f"{self.pid}.jsonl")  # noqa: PTH118
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self.descriptor = os.open(path, flags, 0o644)


def say(text: str) -> None:
    """A line to stderr; one that takes nothing changes nothing."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"profharness: {text}", file=sys.stderr, flush=True)


def read_options(folder: str) -> dict[str, Any]:
    """The options that `profharness observe` left in the run folder."""
    with open(os.path.join(folder, OPTIONS_FILE), encoding="utf-8") as file:  # noqa: PTH118
        options: dict[str, Any] = json.load(file)
        return options
