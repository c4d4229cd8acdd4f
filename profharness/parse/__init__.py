"""Parsers: a profiler's file to a Trace. `open_trace` finds the right one by content, then by
name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from profharness.errors import TraceFormatError
from profharness.parse.packed import first_bytes, is_packed, unpacked
from profharness.trace import Trace

PARSERS: dict[str, str] = {
    "chrome": "profharness.parse.chrome:parse_chrome",
    "nsys": "profharness.parse.nsys:parse_nsys",
    "ncu": "profharness.parse.ncu:parse_ncu",
}
SUFFIXES: dict[str, str] = {
    ".json": "chrome",
    ".json.gz": "chrome",
    ".ncu-rep": "ncu",
    ".csv": "ncu",
    ".sqlite": "nsys",
    ".nsys-rep": "nsys",
    ".ncu-rep.gz": "ncu",
    ".csv.gz": "ncu",
    ".sqlite.gz": "nsys",
    ".nsys-rep.gz": "nsys",
}
STARTS: dict[bytes, str] = {
    b"SQLite format 3\0": "nsys",  # which says what else an SQLite file is
    b"NVR\0": "ncu",
}
EXPECTED = (
    "a Kineto trace (.json), an Nsight Systems export or report (.sqlite, .nsys-rep), "
    "an Nsight Compute report (.ncu-rep, .csv), each also as .gz, or a run folder"
)


def load_parser(name: str) -> Callable[[Path], Trace]:
    """The parser registered as `name`, imported only now. Raises KeyError for a name not
    registered.
    """
    module, attribute = PARSERS[name].split(":")
    parser: Callable[[Path], Trace] = getattr(importlib.import_module(module), attribute)
    return parser


def sniff(path: Path) -> str | None:
    """The parser's name for a file: by suffix, else by its first bytes; None when neither tells.

    Raises TraceFormatError when the file cannot be read.
    """
    lower = path.name.lower()
    try:
        head = first_bytes(path, 64)
    except OSError as error:
        raise TraceFormatError(path, f"cannot be read: {error.strerror}") from None
    for suffix, name in SUFFIXES.items():
        if lower.endswith(suffix):
            return name if ".csv" not in suffix or _is_ncu_csv(path) else None
    for start, name in STARTS.items():
        if head.startswith(start):
            return name
    stripped = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if stripped[:1] in (b"{", b"[") or is_packed(path):
        return "chrome"
    return None


def is_trace(path: Path) -> bool:
    """Whether a file that nobody named, found in a folder, is to be taken in: by suffix, a CSV only
    if it is ncu's, an nsys report only if its export is not beside it, a packed export or report
    only if it does not lie beside it unpacked.
    """
    lower = path.name.lower()
    plain = path.with_name(path.name[:-3]) if lower.endswith(".gz") else path
    if lower.endswith((".nsys-rep", ".nsys-rep.gz")):
        export = plain.with_suffix(".sqlite")
        if export.is_file() or export.with_name(f"{export.name}.gz").is_file():
            return False
    if plain != path and not lower.endswith(".json.gz") and plain.is_file():
        return False
    return lower.endswith(tuple(SUFFIXES)) and sniff(path) is not None


def open_trace(path: Path) -> Trace:
    """Parse any trace file, also one inside gzip; errors name the file as it was given. Raises
    TraceFormatError when no parser takes it or the parser refuses it.
    """
    name = sniff(path)
    if name is None:
        raise TraceFormatError(path, "not a trace that profharness can read", expected=EXPECTED)
    if name == "chrome":  # reads gzip itself
        return load_parser(name)(path)
    with unpacked(path) as plain:  # parsers of the other two read all before they return
        return load_parser(name)(plain)


def _is_ncu_csv(path: Path) -> bool:
    from profharness.parse.ncu_csv import is_ncu_csv

    return is_ncu_csv(path)
