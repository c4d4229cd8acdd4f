"""Read files that may be gzip: their first bytes, a stream, or an unpacked copy."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import IO, cast

from isal import igzip_lib

from profharness.errors import ProfharnessError, TraceFormatError, printable_path
from profharness.files import InputFile, open_input

GZIP = b"\x1f\x8b"
SUFFIX = ".gz"
# Traces compress 10 to 40 times, the most repetitive ones 150 times; the limit of gzip is 1030.
MAX_RATIO = 200
# Bytes, whatever the file's size: an empty nsys export compresses 700 times
ALWAYS_UNPACKED = 16 << 20
_INPUT = 64 * 1024
_WHOLE = "a whole gzip file"
_Damage = cast("type[Exception]", igzip_lib.error)  # isal's stubs declare an instance


class GzipReader:
    """The content of a gzip file. The checksum of every member is verified."""

    def __init__(self, path: Path, raw: InputFile) -> None:
        self._path = path
        self._raw = raw
        self._limit = max(ALWAYS_UNPACKED, MAX_RATIO * raw.size)
        self._member = self._new_member()
        self._next = b""  # input that no member has consumed
        self._done = 0

    def read(self, size: int) -> bytes:
        """Return up to `size` more bytes, none at the end.

        Raise TraceFormatError for damage, for data other than gzip after a member, and for more
        than MAX_RATIO times the file's size.
        """
        data = b""
        while not data:
            if self._member.eof and not self._start_member():
                return b""
            data = self._decompress(size)
        self._done += len(data)
        if self._done > self._limit:
            message = f"unpacks to more than {self._limit:,} bytes, {MAX_RATIO} times its size"
            raise self._error(
                message, expected="less; if it is to be read, unpack it and give the plain file"
            )
        return data

    def close(self) -> None:
        """Close the file."""
        self._raw.close()

    def _decompress(self, size: int) -> bytes:
        if self._member.needs_input and not self._next:
            self._next = self._input()
            if not self._next:
                raise self._error("the gzip stream is cut short")
        data, self._next = self._next, b""
        try:
            return self._member.decompress(data, size)
        except _Damage as error:
            place = f"before byte {self._raw.tell():,} of the packed file"
            raise self._error(f"the gzip stream is damaged {place}: {error}") from None

    def _start_member(self) -> bool:
        """Start the next member. Return False at the end, which zeros may pad."""
        rest = self._member.unused_data.lstrip(b"\0")
        while len(rest) < len(GZIP) and (more := self._input()):
            rest = (rest + more).lstrip(b"\0")
        if not rest:
            return False
        if not rest.startswith(GZIP):
            raise self._error("something that is no gzip follows the whole gzip stream")
        self._member, self._next = self._new_member(), rest
        return True

    def _input(self) -> bytes:
        try:
            return self._raw.read(_INPUT)
        except OSError as error:
            raise self._error(f"cannot be read: {error.strerror}") from None

    @staticmethod
    def _new_member() -> igzip_lib.IgzipDecompressor:
        return igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)

    def _error(self, message: str, *, expected: str = _WHOLE) -> TraceFormatError:
        return TraceFormatError(self._path, message, offset=self._done, expected=expected)


def open_file(path: Path) -> tuple[InputFile | GzipReader, bool]:
    """Open a file. Return its content, and whether it was gzip, whatever its name.

    Raise TraceFormatError if `open_input` cannot open it.
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


def is_packed(path: Path) -> bool:
    """Return whether a file is gzip, whatever its name. Raise TraceFormatError."""
    file, packed = open_file(path)
    file.close()
    return packed


def first_bytes(path: Path, size: int) -> bytes:
    """Return the first `size` bytes of the content, fewer if the file is short or damaged.

    Raise TraceFormatError as `open_file` does.
    """
    file, _ = open_file(path)
    data = b""
    # Reading the whole file reports the error
    with closing(file), suppress(TraceFormatError, OSError):
        while len(data) < size and (more := file.read(size - len(data))):
            data += more
    return data


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Yield the file itself, or the unpacked content as a temporary file named without `.gz`.

    Errors raised in the block name `path`. Raise TraceFormatError for a damaged or unreadable file.
    """
    file, packed = open_file(path)
    with closing(file), ExitStack() as stack:
        if not packed:
            yield path
            return
        with without_room():
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="profharness-"))
            plain = Path(folder) / path.name.removesuffix(SUFFIX)
            with plain.open("wb") as out:
                shutil.copyfileobj(cast("IO[bytes]", file), out, 1 << 20)
        try:
            yield plain
        except ProfharnessError as error:
            _rename(error, plain, path)
            raise


@contextmanager
def without_room() -> Iterator[None]:
    """Raise ProfharnessError if a temporary file cannot be written."""
    try:
        yield
    except OSError as error:
        message = f"{tempfile.gettempdir()}: a temporary file cannot be written: {error.strerror}"
        raise ProfharnessError(f"{message}; name another folder in TMPDIR") from None


def _rename(error: ProfharnessError, plain: Path, path: Path) -> None:
    error.args = tuple(
        arg.replace(printable_path(plain), printable_path(path)) if isinstance(arg, str) else arg
        for arg in error.args
    )
    if isinstance(error, TraceFormatError):
        error.path = path
