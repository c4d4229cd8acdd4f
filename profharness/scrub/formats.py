"""The writer for each kind of trace, and how a trace is opened."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import IO

from profharness.files import open_input
from profharness.scrub.kineto import scrub_kineto
from profharness.scrub.nsys import scrub_nsys
from profharness.scrub.replace import Scrubber
from profharness.scrub.reports import scrub_ncu
from profharness.traces.nsys_export import MAGIC
from profharness.traces.packed import unpacked

Writer = Callable[[Path, IO[bytes], Scrubber], None]


def writer_of(path: Path) -> Writer:
    """Return the function that writes the scrubbed copy of an unpacked trace."""
    with open_input(path) as file:
        head = file.read(len(MAGIC))
    if head == MAGIC:
        return scrub_nsys
    return scrub_ncu if path.name.lower().endswith(".csv") else scrub_kineto


def as_plain_file(path: Path) -> AbstractContextManager[Path]:
    """Return the file itself, or an unpacked export or CSV. The Kineto reader unpacks by itself."""
    return nullcontext(path) if path.name.lower().endswith(".json.gz") else unpacked(path)
