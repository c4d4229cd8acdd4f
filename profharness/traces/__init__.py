"""Parse the files of profilers, which may be compressed with gzip.

`open_trace` selects the parser for a file by its name and its content.
"""

from __future__ import annotations

import importlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import IO, cast

from isal import igzip_lib

from profharness.errors import (
    NotATraceError,
    ProfharnessError,
    TraceFormatError,
    printable_path,
)
from profharness.files import InputFile, is_store, open_input
from profharness.trace import Trace

# Version of the interface of the compiled module. It must equal FORM in scanner.c.
FORM = 4
try:
    from profharness.traces._scanner import FORM as COMPILED
    from profharness.traces._scanner import Scanner as Scanner
    from profharness.traces._scanner import parents as parents
except ImportError:  # installed without a C compiler
    COMPILED = 0
if COMPILED != FORM:  # compiled from an older source
    Scanner = parents = None  # type: ignore[assignment, misc]

GZIP = b"\x1f\x8b"
GZIP_SUFFIX = ".gz"
# The maximum ratio of the unpacked size to the size of the file. gzip makes traces 10 to 40 times
# smaller, and the most repetitive traces 150 times. The highest ratio that gzip can reach is 1030.
MAX_RATIO = 200
# Up to this number of bytes are unpacked even if the ratio is higher than MAX_RATIO, because gzip
# makes an empty nsys export 700 times smaller.
ALWAYS_UNPACKED = 16 << 20
_INPUT = 64 * 1024
_WHOLE = "a complete gzip file"
_Damage = cast("type[Exception]", igzip_lib.error)  # the type stubs of isal do not declare a class

PARSERS: dict[str, str] = {
    "chrome": "profharness.traces.chrome:parse_chrome",
    "nsys": "profharness.traces.nsys:parse_nsys",
    "ncu": "profharness.traces.ncu:parse_ncu",
    "rocpd": "profharness.traces.rocpd:parse_rocpd",
    "rpd": "profharness.traces.rpd:parse_rpd",
    "rocprof": "profharness.traces.rocprof_table:parse_rocprof",
    "rocprofv3-json": "profharness.traces.rocprofv3_json:parse_rocprofv3_json",
    "rocprof-csv": "profharness.traces.rocprof_table:parse_rocprof_csv",
}
_PLAIN_SUFFIXES = {
    ".json": "chrome", ".ncu-rep": "ncu", ".csv": "ncu", ".sqlite": "nsys", ".nsys-rep": "nsys",
    ".db": "rocpd", ".rpd": "rpd",
}  # fmt: skip
SUFFIXES = _PLAIN_SUFFIXES | {f"{end}{GZIP_SUFFIX}": name for end, name in _PLAIN_SUFFIXES.items()}
DATABASES = (".db", ".db.gz", ".rpd", ".rpd.gz")  # suffixes that any program may use
SQLITE = b"SQLite format 3\0"
STARTS: dict[bytes, str] = {
    SQLITE: "nsys",  # nsys's parser rejects other SQLite files
    b"NVR\0": "ncu",
}
# The parsers of other SQLite files, by a statement in their schema. The statements of a schema are
# at the start of a file, because programs create the tables first.
SCHEMAS: dict[str, re.Pattern[bytes]] = {
    "rocpd": re.compile(rb"\brocpd_kernel_dispatch"),
    "rpd": re.compile(rb"\brocpd_kernelapi\b"),
    "rocprof": re.compile(rb"CREATE TABLE [\"'`\[]?KERN\b"),
}
UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # byte order marks; in PowerShell, `>` writes UTF-16
# ncu's header is searched in this number of bytes, because the output of the profiled program may
# precede the header.
SNIFFED = 1 << 20
NCU_HEADER = re.compile(r'\s*"?ID"?,.*"?Kernel Name"?(?:,|\s*$)')
# The first line of a CSV of rocprofv3 or rocprof names the kernel or the direction of a copy.
ROCM_HEADER = re.compile(
    r"(?=.*\b(?:kernel_?name|direction)\b)(?=.*\b(?:start_timestamp|beginns)\b)", re.IGNORECASE
)
ROCPROFV3_JSON = re.compile(rb'(?:\xef\xbb\xbf)?\s*\{\s*"rocprofiler-sdk-tool"')
EXPECTED = (
    "a Kineto trace (.json), an Nsight Systems export or report (.sqlite, .nsys-rep), "
    "an Nsight Compute report (.ncu-rep, .csv), a rocprofv3 or rocprof file (.db, .json, .csv), "
    "an rpd database (.rpd), a gzip-compressed copy of one of these, or a run folder"
)


def load_parser(name: str) -> Callable[..., Trace]:
    """Import and return the parser that is registered as `name`."""
    module, attribute = PARSERS[name].split(":")
    parser: Callable[..., Trace] = getattr(importlib.import_module(module), attribute)
    return parser


def sniff(path: Path) -> str | None:
    """Return the name of the parser for a file, or None if no parser can read the file.

    The suffix of the file determines the parser. If the suffix is unknown, the first bytes of the
    file determine the parser. Raise TraceFormatError if the file cannot be read.
    """
    lower = path.name.lower()
    head, packed = _first_bytes(path, 64)
    if head.startswith(SQLITE):
        return _sqlite_parser(path)
    for suffix, name in SUFFIXES.items():
        if lower.endswith(suffix):
            if name == "chrome" and ROCPROFV3_JSON.match(head):
                return "rocprofv3-json"
            return name if ".csv" not in suffix else _csv_parser(path)
    for start, name in STARTS.items():
        if head.startswith(start):
            return name
    stripped = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    return "chrome" if packed or stripped[:1] in (b"{", b"[") else None


def is_trace(path: Path) -> bool:
    """Return whether a file in a folder is a trace that should be read.

    A CSV or a `.db` is a trace only if a profiler wrote it. A report of nsys is
    not read if the folder also contains the export of the report. A compressed file other than a
    `.json.gz` is not read if the folder also contains the unpacked file.
    """
    lower = path.name.lower()
    plain = path.with_name(path.name[:-3]) if lower.endswith(".gz") else path
    if lower.endswith((".nsys-rep", ".nsys-rep.gz")):
        export = plain.with_suffix(".sqlite")
        if export.is_file() or export.with_name(f"{export.name}.gz").is_file():
            return False
    if plain != path and not lower.endswith(".json.gz") and plain.is_file():
        return False
    if lower.endswith(DATABASES) and (is_store(path) or _sqlite_parser(path) == STARTS[SQLITE]):
        return False
    return lower.endswith(tuple(SUFFIXES)) and sniff(path) is not None


def open_trace(path: Path, captures: Sequence[Path] = ()) -> Trace:
    """Parse a trace file, which may be compressed with gzip.

    `captures` are Kineto traces that contain the captures of the CUDA graphs in a Kineto trace.
    Raise TraceFormatError, which names `path`, if no parser can read the file.
    """
    name = sniff(path)
    if name is None:
        raise NotATraceError(path, "not a trace that profharness can read", expected=EXPECTED)
    if name == "chrome":  # this parser unpacks the file itself
        return load_parser(name)(path, captures)
    if name == "rocprofv3-json":  # so does this parser
        return load_parser(name)(path)
    with unpacked(path) as plain:  # the file is not needed after its parser returns
        return load_parser(name)(plain)


def _sqlite_parser(path: Path) -> str:
    """Return the name of the parser for an SQLite file."""
    data, _ = _first_bytes(path, SNIFFED)
    return next((name for name, mark in SCHEMAS.items() if mark.search(data)), STARTS[SQLITE])


def _csv_parser(path: Path) -> str | None:
    """Return the name of the parser for a CSV, or None if no profiler wrote it."""
    data, _ = _first_bytes(path, SNIFFED)
    text = data.decode("utf-16" if data.startswith(UTF_16) else "utf-8-sig", errors="replace")
    lines = re.split(r"[\n\r]", text)
    if ROCM_HEADER.match(lines[0]):
        return "rocprof-csv"
    return "ncu" if any(map(NCU_HEADER.match, lines)) else None


def _first_bytes(path: Path, size: int) -> tuple[bytes, bool]:
    """Return the first bytes of the unpacked content of a file, and whether the file is compressed.

    Return fewer bytes if the content is shorter or the file is damaged.
    """
    file, packed = open_file(path)
    data = b""
    # If the file is damaged, the error is reported later, when the whole file is read
    with closing(file), suppress(TraceFormatError, OSError):
        while len(data) < size and (more := file.read(size - len(data))):
            data += more
    return data, packed


class GzipReader:
    """Reads the content of a gzip file, and verifies the checksum of every member."""

    def __init__(self, path: Path, raw: InputFile) -> None:
        self._path = path
        self._raw = raw
        self._limit = max(ALWAYS_UNPACKED, MAX_RATIO * raw.size)
        self._member = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
        self._next = b""  # input that has not been decompressed yet
        self._done = 0

    def read(self, size: int) -> bytes:
        """Return up to `size` more bytes. Return no bytes at the end.

        Raise TraceFormatError if the file is damaged, or if its content is larger than MAX_RATIO
        and ALWAYS_UNPACKED allow.
        """
        data = b""
        while not data:
            if self._member.eof and not self._start_member():
                return b""
            data = self._decompress(size)
        self._done += len(data)
        if self._done > self._limit:
            message = (
                f"the file unpacks to more than {self._limit:,} bytes, which is {MAX_RATIO} times "
                "its size; to read it anyway, unpack it and pass the unpacked file"
            )
            raise self._error(message, expected="a smaller file")
        return data

    def close(self) -> None:
        self._raw.close()

    def _decompress(self, size: int) -> bytes:
        if self._member.needs_input and not self._next:
            self._next = self._input()
            if not self._next:
                raise self._error("the gzip stream is truncated")
        data, self._next = self._next, b""
        try:
            return self._member.decompress(data, size)
        except _Damage as error:
            raise self._error(
                f"the gzip stream is damaged before byte {self._raw.tell():,} of the compressed "
                f"file: {error}"
            ) from None

    def _start_member(self) -> bool:
        """Start to read the next gzip member, or return False if only zeros follow."""
        rest = self._member.unused_data.lstrip(b"\0")
        while len(rest) < len(GZIP) and (more := self._input()):
            rest = (rest + more).lstrip(b"\0")
        if not rest:
            return False
        if not rest.startswith(GZIP):
            raise self._error("there is other data after the gzip stream")
        self._member = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)
        self._next = rest
        return True

    def _input(self) -> bytes:
        try:
            return self._raw.read(_INPUT)
        except OSError as error:
            raise self._error(f"cannot be read: {error.strerror}") from None

    def _error(self, message: str, *, expected: str = _WHOLE) -> TraceFormatError:
        return TraceFormatError(self._path, message, offset=self._done, expected=expected)


def open_file(path: Path) -> tuple[InputFile | GzipReader, bool]:
    """Open a file. Return a reader of its content, and whether the file is compressed with gzip.

    Whether the file is compressed is determined by its content, not by its name. Raise
    TraceFormatError if the file cannot be opened or read.
    """
    try:
        raw = open_input(path)
        try:
            packed = raw.read(len(GZIP)) == GZIP
            raw.seek(0)
        except OSError:
            raw.close()
            raise
    except OSError as error:
        raise TraceFormatError(path, f"cannot be read: {error.strerror}") from None
    return (GzipReader(path, raw) if packed else raw), packed


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Yield the path of a file that has the unpacked content of `path`.

    If `path` is compressed, this is a temporary file. Otherwise, it is `path` itself.
    Errors that are raised inside the `with` block always name `path`. Raise TraceFormatError if the
    file is damaged or cannot be read.
    """
    file, packed = open_file(path)
    with closing(file), ExitStack() as stack:
        if not packed:
            yield path
            return
        with without_room():
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="profharness-"))
            plain = Path(folder) / path.name.removesuffix(GZIP_SUFFIX)
            with plain.open("wb") as out:
                shutil.copyfileobj(cast("IO[bytes]", file), out, 1 << 20)
        with errors_that_name(plain, path):
            yield plain


@contextmanager
def errors_that_name(plain: Path, path: Path) -> Iterator[None]:
    """Name `path` instead of the temporary file `plain` in errors inside the `with` block."""
    try:
        yield
    except ProfharnessError as error:
        shown, given = printable_path(plain), printable_path(path)
        error.args = tuple(
            arg.replace(shown, given) if isinstance(arg, str) else arg for arg in error.args
        )
        if isinstance(error, TraceFormatError):
            error.path = path
        raise


@contextmanager
def without_room() -> Iterator[None]:
    """Convert an OSError from writing a temporary file to a ProfharnessError with a remedy."""
    try:
        yield
    except OSError as error:
        message = f"{tempfile.gettempdir()}: cannot write a temporary file: {error.strerror}"
        raise ProfharnessError(f"{message}; choose another folder with TMPDIR") from None
