"""Parse the files of profilers.

`open_trace` selects the parser for a file by its name and its content.
"""

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

# Version of the arguments and results of the compiled parts. scanner.c has the same number.
FORM = 4
try:
    from profharness.traces._scanner import FORM as COMPILED
    from profharness.traces._scanner import Scanner as Scanner
    from profharness.traces._scanner import parents as parents
except ImportError:  # installed without a C compiler
    COMPILED = 0
if COMPILED != FORM:  # compiled from an older source
    Scanner = parents = None  # type: ignore[assignment, misc]

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
    b"SQLite format 3\0": "nsys",  # the parser raises an error for any other SQLite file
    b"NVR\0": "ncu",
}
UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # byte order marks; `>` writes UTF-16 in PowerShell
MAX_LINE = 1 << 22  # maximum length of a line in ncu's output, in characters
# Number of bytes in which to search for ncu's header. It may follow the output of the profiled program.
SNIFFED = 1 << 20
NCU_HEADER = re.compile(r'\s*"?ID"?,.*"?Kernel Name"?(?:,|\s*$)')
EXPECTED = (
    "a Kineto trace (.json), an Nsight Systems export or report (.sqlite, .nsys-rep), "
    "an Nsight Compute report (.ncu-rep, .csv), each also as .gz, or a run folder"
)


def load_parser(name: str) -> Callable[[Path], Trace]:
    """Import and return the parser that is registered as `name`.

    Raise KeyError if no parser has that name.
    """
    module, attribute = PARSERS[name].split(":")
    parser: Callable[[Path], Trace] = getattr(importlib.import_module(module), attribute)
    return parser


def sniff(path: Path) -> str | None:
    """Return the name of the parser for a file, or None if no parser can read the file.

    The suffix of the file determines the parser. If the suffix is unknown, the first bytes determine
    it. Raise TraceFormatError if the file cannot be read.
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
    """Return whether a file in a folder is a trace that should be read.

    A CSV is a trace only if ncu wrote it. A report of nsys does not count if the folder also contains
    its export. A compressed file does not count if the folder also contains the unpacked file, except
    for a `.json.gz`.
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
    """Parse a trace file, which may be compressed with gzip.

    Raise TraceFormatError if no parser can read the file. The message contains the path as it was
    given.
    """
    name = sniff(path)
    if name is None:
        raise TraceFormatError(path, "not a trace that profharness can read", expected=EXPECTED)
    if name == "chrome":  # this parser unpacks the file itself
        return load_parser(name)(path)
    with unpacked(path) as plain:  # the other parsers read the whole file before they return
        return load_parser(name)(plain)


def is_ncu_csv(path: Path) -> bool:
    """Return whether the first MiB of a file contains the header line of ncu's CSV.

    Raise TraceFormatError if the file cannot be read.
    """
    lines = re.split(r"[\n\r]", decode_text(first_bytes(path, SNIFFED)))
    return any(map(NCU_HEADER.match, lines))


def lines_of(source: str | Path, path: Path) -> Iterator[str]:
    """Yield the lines of a text or of a file. Only a line feed ends a line.

    The encoding of the file must be UTF-8 or UTF-16. Raise TraceFormatError if the file cannot be
    read or a line is longer than MAX_LINE. The message contains `path`.
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
    """Decode data in UTF-8, or in UTF-16 if it starts with a byte order mark.

    Invalid bytes become replacement characters.
    """
    if data.startswith(UTF_16):
        return data.decode("utf-16", errors="replace")
    return data.decode("utf-8-sig", errors="replace")
