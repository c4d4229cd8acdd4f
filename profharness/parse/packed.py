"""Traces inside gzip: their first bytes, and the whole of them in a temporary file."""

from __future__ import annotations

import gzip
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from profharness.errors import ProfharnessError, TraceFormatError

GZIP = b"\x1f\x8b"
SUFFIX = ".gz"
_DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error)


def is_packed(path: Path) -> bool:
    """Whether a file is named `*.gz` and begins as gzip does. Raises OSError."""
    if not path.name.lower().endswith(SUFFIX):
        return False
    with path.open("rb") as file:
        return file.read(len(GZIP)) == GZIP


def first_bytes(path: Path, size: int) -> bytes:
    """The first `size` bytes, uncompressed; fewer where the file, or its whole part, is shorter.
    Raises OSError.
    """
    if not is_packed(path):
        with path.open("rb") as file:
            return file.read(size)
    data = b""
    try:
        with gzip.open(path, "rb") as packed:
            while len(data) < size and (more := packed.read(min(size - len(data), 1 << 13))):
                data += more
    except _DAMAGE:
        pass  # who reads the whole says so
    return data


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The file itself, or what it packs as a temporary file of the same name without `.gz`, which
    is gone afterwards. Errors raised within name `path`.

    Raises TraceFormatError for a damaged or unreadable file.
    """
    with tempfile.TemporaryDirectory(prefix="profharness-") as folder:
        try:
            if not is_packed(path):
                plain = path
            else:
                plain = Path(folder) / path.name[: -len(SUFFIX)]
                with gzip.open(path, "rb") as packed, plain.open("wb") as out:
                    shutil.copyfileobj(packed, out, 1 << 20)
        except _DAMAGE as error:
            raise TraceFormatError(
                path, f"cannot be decompressed: {error}", expected="a whole gzip file"
            ) from None
        except OSError as error:
            raise TraceFormatError(path, f"cannot be read: {error.strerror}") from None
        try:
            yield plain
        except ProfharnessError as error:
            if plain != path:
                _rename(error, plain, path)
            raise


def _rename(error: ProfharnessError, plain: Path, path: Path) -> None:
    error.args = tuple(
        arg.replace(str(plain), str(path)) if isinstance(arg, str) else arg for arg in error.args
    )
    if isinstance(error, TraceFormatError):
        error.path = path
