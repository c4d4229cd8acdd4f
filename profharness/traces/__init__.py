"""Parse profilers' files. `open_trace` selects the parser by a file's content and name."""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from profharness.errors import TraceFormatError
from profharness.files import open_input
from profharness.trace import Trace
from profharness.traces.packed import SUFFIX, first_bytes, is_packed, unpacked

PARSERS: dict[str, str] = {
    "chrome": "profharness.traces.chrome:parse_chrome",
    "nsys": "profharness.traces.nsys:parse_nsys",
    "ncu": "profharness.traces.ncu:parse_ncu",
}
_PLAIN_SUFFIXES = {
    ".json": "chrome", ".ncu-rep": "ncu", ".csv": "ncu", ".sqlite": "nsys", ".nsys-rep": "nsys",
}  # fmt: skip
SUFFIXES = _PLAIN_SUFFIXES | {f"{end}{SUFFIX}": name for end, name in _PLAIN_SUFFIXES.items()}
STARTS: dict[bytes, str] = {
    b"SQLite format 3\0": "nsys",  # other SQLite files are refused there
    b"NVR\0": "ncu",
}
UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # PowerShell's `>` writes it
MAX_LINE = 1 << 22  # characters in a line of ncu's output
SNIFFED = 1 << 20  # bytes searched for ncu's header, which may follow the program's own output
NCU_HEADER = re.compile(r'\s*"?ID"?,.*"?Kernel Name"?(?:,|\s*$)')
EXPECTED = (
    "a Kineto trace (.json), an Nsight Systems export or report (.sqlite, .nsys-rep), "
    "an Nsight Compute report (.ncu-rep, .csv), each also as .gz, or a run folder"
)


def load_parser(name: str) -> Callable[[Path], Trace]:
    """Import and return the parser registered as `name`. Raise KeyError for any other name."""
    module, attribute = PARSERS[name].split(":")
    parser: Callable[[Path], Trace] = getattr(importlib.import_module(module), attribute)
    return parser


def sniff(path: Path) -> str | None:
    """Return the name of the parser for a file, by suffix or else by first bytes, or None.

    Raise TraceFormatError if the file cannot be read.
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
    """Return whether a file found in a folder is a trace. A CSV counts only if ncu wrote it.

    An nsys report does not count if its export is in the same folder. A gzip file does not count if
    the unpacked file is.
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
    """Parse a trace file, plain or gzip.

    Raise TraceFormatError, which names the file as given, if no parser matches or the parser
    refuses the file.
    """
    name = sniff(path)
    if name is None:
        raise TraceFormatError(path, "not a trace that profharness can read", expected=EXPECTED)
    if name == "chrome":  # reads gzip itself
        return load_parser(name)(path)
    with unpacked(path) as plain:  # the other parsers read the whole file before they return
        return load_parser(name)(plain)


def is_ncu_csv(path: Path) -> bool:
    """Return whether ncu's header line is in the first MiB of a file. Raise TraceFormatError."""
    lines = re.split(r"[\n\r]", decode_text(first_bytes(path, SNIFFED)))
    return any(map(NCU_HEADER.match, lines))


def lines_of(source: str | Path, path: Path) -> Iterator[str]:
    """Yield the lines of a text, or of a file in UTF-8 or UTF-16. Only line feeds end a line.

    Raise TraceFormatError, which names `path`, if the file cannot be read or a line exceeds
    MAX_LINE.
    """
    if isinstance(source, str):
        yield from (match[0] for match in re.finditer(r"[^\n]*\n|[^\n]+", source))
        return
    try:
        with open_input(source) as raw:
            encoding = "utf-16" if raw.read(2) in UTF_16 else "utf-8-sig"
            raw.seek(0)
            file = io.TextIOWrapper(io.BufferedReader(raw), encoding, "replace", newline="\n")
            while line := file.readline(MAX_LINE + 1):
                if len(line) > MAX_LINE:
                    message = f"a line of more than {MAX_LINE:,} characters"
                    raise TraceFormatError(path, message, expected=EXPECTED)
                yield line
    except OSError as error:
        raise TraceFormatError(path, f"cannot be read: {error.strerror}") from None


def decode_text(data: bytes) -> str:
    """Decode UTF-8, or UTF-16 with a byte order mark, with replacement characters for bad bytes."""
    if data.startswith(UTF_16):
        return data.decode("utf-16", errors="replace")
    return data.decode("utf-8-sig", errors="replace")
