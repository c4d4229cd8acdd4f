"""Parsers: a profiler's file to a Trace. `open_trace` finds the right one by content, then by
name.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path

from profharness.errors import TraceFormatError
from profharness.parse.packed import SUFFIX, first_bytes, is_packed, unpacked
from profharness.trace import Trace

PARSERS: dict[str, str] = {
    "chrome": "profharness.parse.chrome:parse_chrome",
    "nsys": "profharness.parse.nsys:parse_nsys",
    "ncu": "profharness.parse.ncu:parse_ncu",
}
_PLAIN_SUFFIXES = {
    ".json": "chrome", ".ncu-rep": "ncu", ".csv": "ncu", ".sqlite": "nsys", ".nsys-rep": "nsys",
}  # fmt: skip
SUFFIXES = _PLAIN_SUFFIXES | {f"{end}{SUFFIX}": name for end, name in _PLAIN_SUFFIXES.items()}
STARTS: dict[bytes, str] = {
    b"SQLite format 3\0": "nsys",  # which says what else an SQLite file is
    b"NVR\0": "ncu",
}
SNIFFED = 1 << 20  # a program may print this much before ncu prints its table
NCU_HEADER = re.compile(r'\s*"?ID"?,.*"?Kernel Name"?(?:,|\s*$)')
EXPECTED = (
    "a Kineto trace (.json), an Nsight Systems export or report (.sqlite, .nsys-rep), "
    "an Nsight Compute report (.ncu-rep, .csv), each also as .gz, or a run folder"
)


def load_parser(name: str) -> Callable[[Path], Trace]:
    """The parser registered as `name`, imported only now. Raises KeyError for any other name."""
    module, attribute = PARSERS[name].split(":")
    parser: Callable[[Path], Trace] = getattr(importlib.import_module(module), attribute)
    return parser


def sniff(path: Path) -> str | None:
    """The parser's name for a file: by suffix, else by its first bytes; None when neither tells.

    Raises TraceFormatError when the file cannot be read.
    """
    lower = path.name.lower()
    head = first_bytes(path, 64)
    for suffix, name in SUFFIXES.items():
        if lower.endswith(suffix):
            return name if ".csv" not in suffix or is_ncu_csv(path) else None
    for start, name in STARTS.items():
        if head.startswith(start):
            return name
    stripped = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if stripped[:1] in (b"{", b"[") or is_packed(path):
        return "chrome"
    return None


def is_trace(path: Path) -> bool:
    """Whether a file found in a folder is to be taken in: by suffix, a CSV only if it is ncu's.

    An nsys report counts only without its export beside it, a packed file only without the plain.
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
    """Parse any trace file, also one inside gzip; errors name the file as it was given.

    Raises TraceFormatError when no parser takes it or the parser refuses it.
    """
    name = sniff(path)
    if name is None:
        raise TraceFormatError(path, "not a trace that profharness can read", expected=EXPECTED)
    if name == "chrome":  # reads gzip itself
        return load_parser(name)(path)
    with unpacked(path) as plain:  # parsers of the other two read all before they return
        return load_parser(name)(plain)


def is_ncu_csv(path: Path) -> bool:
    """Whether a file, plain or packed, has ncu's header line in its first MiB. Raises TraceFormatError."""
    return any(map(NCU_HEADER.match, decode_text(first_bytes(path, SNIFFED)).splitlines()))


def decode_text(data: bytes) -> str:
    """UTF-8 or UTF-16 with a byte order mark; what is neither becomes a replacement character."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):  # PowerShell's `>` writes UTF-16
        return data.decode("utf-16", errors="replace")
    return data.decode("utf-8-sig", errors="replace")
