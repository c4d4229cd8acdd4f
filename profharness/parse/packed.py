"""Files as they lie on disk, plain or inside gzip: their first bytes, all of them as a stream, or
unpacked beside.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import IO, cast

from isal import igzip_lib

from profharness.errors import ProfharnessError, TraceFormatError, shown
from profharness.files import InputFile, open_input

GZIP = b"\x1f\x8b"
SUFFIX = ".gz"
# Traces pack 10 to 40 times, the most repetitive ones 150 times; gzip itself goes to 1030.
MAX_RATIO = 200
ALWAYS_UNPACKED = 16 << 20  # bytes, however small the file: an empty export of nsys packs 700 times
_INPUT = 64 * 1024
_WHOLE = "a whole gzip file"
_Damage = cast("type[Exception]", igzip_lib.error)  # isal's stubs say that it is an instance


class GzipReader:
    """The content of a gzip file, with every member's checksum proved."""

    def __init__(self, path: Path, raw: InputFile) -> None:
        self._path = path
        self._raw = raw
        self._limit = max(ALWAYS_UNPACKED, MAX_RATIO * raw.size)
        self._member = self._new_member()
        self._next = b""  # input that no member has seen
        self._done = 0

    def read(self, size: int) -> bytes:
        """At most `size` bytes more, none at the end.

        Raises TraceFormatError for damage, for what is no gzip behind a member, and for more than
        MAX_RATIO times the file's size.
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
        """Go on behind a whole member; False at the end, where zeros may stand as padding."""
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
    """The content of a file, and whether it was inside gzip, whatever its name says.

    Raises TraceFormatError for what `open_input` does not open.
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
    """Whether a file begins as gzip does, whatever its name. Raises TraceFormatError."""
    file, packed = open_file(path)
    file.close()
    return packed


def first_bytes(path: Path, size: int) -> bytes:
    """The first `size` bytes of the content; fewer of a short or damaged file.

    Raises TraceFormatError as `open_file` does.
    """
    file, _ = open_file(path)
    data = b""
    with closing(file), suppress(TraceFormatError, OSError):  # who reads the whole says so
        while len(data) < size and (more := file.read(size - len(data))):
            data += more
    return data


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The file itself, or what it packs as a temporary file of the same name without `.gz`, which
    is gone afterwards. Errors raised within name `path`.

    Raises TraceFormatError for a damaged or unreadable file.
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
    """Raise ProfharnessError where a temporary file cannot be written."""
    try:
        yield
    except OSError as error:
        message = f"{tempfile.gettempdir()}: a temporary file cannot be written: {error.strerror}"
        raise ProfharnessError(f"{message}; name another folder in TMPDIR") from None


def _rename(error: ProfharnessError, plain: Path, path: Path) -> None:
    error.args = tuple(
        arg.replace(shown(plain), shown(path)) if isinstance(arg, str) else arg
        for arg in error.args
    )
    if isinstance(error, TraceFormatError):
        error.path = path
