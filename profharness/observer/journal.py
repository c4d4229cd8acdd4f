"""What an observed process writes down: one file a process, a line an event, each appended at once."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from profharness.observer.hook import append

SCHEMA = "profharness.observed/1"
OPTIONS_FILE = "observe.json"


class Journal:
    """The files `<pid>.jsonl` and `<pid>.counts` in a run folder; after a fork the child has its own.
    A process whose number was taken before, as after os.exec, is `<pid>-2`. folder None: nothing is
    written.
    """

    def __init__(self, folder: str | None) -> None:
        self.folder = folder
        self.begin()

    def begin(self) -> None:
        """Choose the names of this process's files."""
        name, number = str(os.getpid()), 1
        while self.folder is not None and os.path.exists(f"{self.folder}/{name}.jsonl"):  # noqa: PTH110
            number += 1
            name = f"{os.getpid()}-{number}"
        self.name = name

    def path(self, suffix: str) -> str | None:
        """A file of this process."""
        return None if self.folder is None else f"{self.folder}/{self.name}{suffix}"

    def write(self, event: str, **fields: Any) -> None:
        """Append a line. Raises OSError."""
        path = self.path(".jsonl")
        if path is None:
            return
        line = json.dumps({"event": event, **fields}, separators=(",", ":"), allow_nan=False)
        append(path, line.encode("utf-8", "replace") + b"\n")


def say(text: str) -> None:
    """A line to stderr; one that takes nothing changes nothing."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"profharness: {text}", file=sys.stderr, flush=True)


def read_options(folder: str) -> dict[str, Any]:
    """The options that `profharness observe` left in the run folder."""
    with open(os.path.join(folder, OPTIONS_FILE), encoding="utf-8") as file:  # noqa: PTH118
        options: dict[str, Any] = json.load(file)
        return options
