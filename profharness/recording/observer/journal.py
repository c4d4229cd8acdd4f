"""The journal of an observed process: one file per process, one line per event."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from profharness.recording.observer.hook import append

SCHEMA = "profharness.observed/1"
OPTIONS_FILE = "observe.json"


class Journal:
    """The files `<pid>.jsonl` and `<pid>.counts` in a run folder.

    A forked child has its own files. If the files of a pid exist, as after os.exec, the name is
    `<pid>-2`. Without a folder nothing is written.
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
        """Return the path of a file of this process."""
        return None if self.folder is None else f"{self.folder}/{self.name}{suffix}"

    def write(self, event: str, **fields: Any) -> None:
        """Append a line. Raise OSError."""
        path = self.path(".jsonl")
        if path is None:
            return
        line = json.dumps({"event": event, **fields}, separators=(",", ":"), allow_nan=False)
        append(path, line.encode("utf-8", "replace") + b"\n")


def print_error(text: str) -> None:
    """Print a line to stderr. Ignore a closed or broken stderr."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        print(f"profharness: {text}", file=sys.stderr, flush=True)


def read_options(folder: str) -> dict[str, Any]:
    """Read the options that `profharness observe` wrote into the run folder."""
    with open(os.path.join(folder, OPTIONS_FILE), encoding="utf-8") as file:  # noqa: PTH118
        options: dict[str, Any] = json.load(file)
        return options
