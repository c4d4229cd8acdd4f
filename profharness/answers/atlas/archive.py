"""The lines of shards, from their folder, their archive (.tar.xz) or one file, in bounded memory."""

from __future__ import annotations

import io
import json
import lzma
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from profharness.answers.atlas.checks import line_fault
from profharness.answers.atlas.packed import DECODER_BYTES
from profharness.errors import UsageError, shown
from profharness.files import LINE_BYTES, InputFile, is_heavy, open_input, read_lines

MAX_RATIO = 200  # shards pack 40 times, xz can reach 7000
ALWAYS_UNPACKED = 16 << 20
SHARD_VERSION = 1  # of the JSON lines of scripts/make_atlas.py
SKIPPED = (tarfile.DIRTYPE, tarfile.XHDTYPE, tarfile.XGLTYPE, *b"LK")  # other names, times, owners


class XzReader(io.RawIOBase):
    """The content of an .xz file. Raises LZMAError for damage, and for more than MAX_RATIO times its size."""

    def __init__(self, file: InputFile) -> None:
        self._file = file
        self._decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=DECODER_BYTES)
        self._left = max(ALWAYS_UNPACKED, MAX_RATIO * file.size)

    def readable(self) -> bool:
        """Whether it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer."""
        data = b""
        while not data and not self._decoder.eof:
            packed = self._file.read(1 << 16) if self._decoder.needs_input else b""
            if not packed and self._decoder.needs_input:
                raise lzma.LZMAError("the file is cut short")
            data = self._decoder.decompress(packed, len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise lzma.LZMAError(f"it unpacks to more than {MAX_RATIO} times its size")
        buffer[: len(data)] = data
        return len(data)


def shard_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a folder of shards, of their archive, or of one file of lines. The last line of
    a shard may have been cut off. Raises UsageError for anything else.
    """
    try:
        for source, number, line in _source_lines(path):
            if (row := _row(line, f"{source}, line {number}")) is not None:
                yield row
    except OSError as error:
        raise UsageError(f"{shown(path)}: cannot be read: {error.strerror}") from None


def _row(line: bytes, place: str) -> dict[str, Any] | None:
    """A line as what it says, None where it is cut off. Raises UsageError."""
    try:
        row = None if is_heavy(line) else json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        if not line.endswith(b"\n"):
            return None
        raise UsageError(f"{place}: not a line of an atlas")
    if row.get("atlas", SHARD_VERSION) != SHARD_VERSION:
        raise UsageError(f"{place}: not a shard of an atlas of version {SHARD_VERSION}")
    if fault := line_fault(row):
        raise UsageError(f"{place}: {fault}")
    return row


def _source_lines(path: Path) -> Iterator[tuple[str, int, bytes]]:
    """Yield the lines of shards with their file and number.

    Raises UsageError for what is no whole archive, and OSError for what cannot be read.
    """
    if path.is_dir():
        for each in sorted(path.glob("shard-*.jsonl")):
            yield from _numbered(shown(each), read_lines(each))
    elif path.name.endswith(".tar.xz"):
        try:
            with open_input(path) as file, io.BufferedReader(XzReader(file), 1 << 20) as plain:
                yield from _members(path, cast("IO[bytes]", plain))
        except (tarfile.TarError, lzma.LZMAError) as error:
            raise UsageError(f"{shown(path)}: not a whole archive of shards ({error})") from None
    else:
        yield from _numbered(shown(path), read_lines(path))


def _numbered(source: str, lines: Iterator[bytes]) -> Iterator[tuple[str, int, bytes]]:
    return ((source, number, line) for number, line in enumerate(lines, start=1))


def _members(path: Path, file: IO[bytes]) -> Iterator[tuple[str, int, bytes]]:
    """The lines of the members of a tar file, by its blocks of 512 bytes: nothing is extracted, and
    what headers for long names hold is passed over.
    """
    while len(block := file.read(tarfile.BLOCKSIZE)) == tarfile.BLOCKSIZE:
        if not any(block):
            return
        member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        name = f"{shown(path)}, {shown(member.name)}"
        lines = _lines(file, member.size)
        if member.isreg():
            yield from _numbered(name, lines)
        elif member.type not in SKIPPED:
            raise UsageError(f"{name}: no regular file; an archive of shards has nothing else")
        for _ in lines:
            pass
        file.read(-member.size % tarfile.BLOCKSIZE)
    raise tarfile.ReadError("the archive is cut short")


def _lines(file: IO[bytes], size: int) -> Iterator[bytes]:
    """The lines of the next `size` bytes."""
    while size > 0:
        line = file.readline(min(size, LINE_BYTES))
        if not line:
            raise tarfile.ReadError("the archive is cut short")
        if len(line) == LINE_BYTES:
            raise tarfile.ReadError(f"a line of more than {LINE_BYTES:,} bytes")
        size -= len(line)
        yield line
