"""Read files that may be compressed with gzip.

A caller can read only the first bytes, read the content as a stream, or unpack it to a temporary file.
"""

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
# The maximum ratio of the unpacked size to the size of the file. gzip makes traces 10 to 40 times
# smaller, and the most repetitive traces 150 times. The highest ratio that gzip can reach is 1030.
MAX_RATIO = 200
# This number of bytes is unpacked even if the ratio is higher than MAX_RATIO, because gzip makes an empty
# nsys export 700 times smaller.
ALWAYS_UNPACKED = 16 << 20
_INPUT = 64 * 1024
_WHOLE = "a whole gzip file"
_Damage = cast("type[Exception]", igzip_lib.error)  # the type stubs of isal declare an instance


class GzipReader:
    """Reads the content of a gzip file, and verifies the checksum of every member."""

    def __init__(self, path: Path, raw: InputFile) -> None:
        self._path = path
        self._raw = raw
        self._limit = max(ALWAYS_UNPACKED, MAX_RATIO * raw.size)
        self._member = self._new_member()
        self._next = b""  # input that has not been decompressed yet
        self._done = 0

    def read(self, size: int) -> bytes:
        """Return up to `size` more bytes. Return no bytes at the end.

        Raise TraceFormatError if the file is damaged, if something other than gzip follows a member,
        or if the content exceeds MAX_RATIO times the size of the file.
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
        """Start to read the next member. Return False at the end of the file.

        The file may be padded with zeros.
        """
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
    """Open a file. Return a reader of its content, and whether the file is compressed with gzip.

    The name of the file does not matter. Raise TraceFormatError if the file cannot be opened or read.
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
    """Return whether a file is compressed with gzip. The name of the file does not matter.

    Raise TraceFormatError if the file cannot be opened or read.
    """
    file, packed = open_file(path)
    file.close()
    return packed


def first_bytes(path: Path, size: int) -> bytes:
    """Return the first `size` bytes of the unpacked content of a file.

    Return fewer bytes if the content is shorter or the file is damaged. Raise TraceFormatError if the
    file cannot be opened.
    """
    file, _ = open_file(path)
    data = b""
    # If the file is damaged, the error is reported later, when the whole file is read
    with closing(file), suppress(TraceFormatError, OSError):
        while len(data) < size and (more := file.read(size - len(data))):
            data += more
    return data


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Yield the path of an unpacked file.

    If the file is not compressed, this is `path` itself. Otherwise, it is a temporary file whose name
    lacks the `.gz`. Errors that are raised inside the `with` block name `path` instead of the
    temporary file. Raise TraceFormatError if the file is damaged or cannot be read.
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
    """Convert an OSError inside the `with` block to ProfharnessError.

    The block must only write a temporary file. The message suggests another folder for such files.
    """
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
