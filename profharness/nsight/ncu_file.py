"""The outer form of an .ncu-rep: that it is one, that it is whole, and which ncu wrote it.

Source of facts: NVIDIA's ProfilerReport.proto (in Nsight Compute, extras/FileFormat) and a report
of ncu 2025.3. After the magic comes a sized FileHeader, then blocks: a sized BlockHeader whose
field 2 counts results, field 3 holds the session and field 5 the bytes of payload that follow.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from profharness.errors import TraceFormatError

MAGIC = b"NVR\0"
EXPECTED = "a report that `ncu -o` wrote"
SIZE = struct.Struct("<I")
VARINT, EIGHT_BYTES, SIZED, FOUR_BYTES = 0, 1, 2, 5  # wire types of protobuf
RESULTS, SESSION, PAYLOAD = 2, 3, 5
MAX_HEADER = 1 << 28
_VERSION = re.compile(rb"(\d{4}\.\d+\.\d+(?:\.\d+)?) \(build \d+\)")


@dataclass(frozen=True, slots=True)
class NcuFile:
    """results counts what was profiled; version is that of the ncu that wrote the file, None if it
    does not say.
    """

    results: int
    version: str | None


def check_file(path: Path) -> NcuFile:
    """Walk the blocks of a report. Raises TraceFormatError, with the offset, when the file is
    something else, cut off or damaged: `ncu_report` reads such a file as far as it goes and says
    nothing.
    """
    try:
        with path.open("rb") as file:
            return _walk(path, file, path.stat().st_size)
    except OSError as error:
        raise TraceFormatError(path, f"cannot be read: {error.strerror}") from None


def _walk(path: Path, file: BinaryIO, size: int) -> NcuFile:
    if file.read(len(MAGIC)) != MAGIC:
        raise TraceFormatError(path, "not an Nsight Compute report", expected=EXPECTED)
    _sized(path, file, size)
    results, version = 0, None
    while file.tell() < size:
        begin = file.tell()
        header = _sized(path, file, size)
        try:
            numbers, session = _fields(header)
        except (IndexError, ValueError):
            raise TraceFormatError(
                path, "a damaged block", offset=begin, expected=EXPECTED
            ) from None
        results += numbers.get(RESULTS, 0)
        found = None if version else _VERSION.search(session)
        version = found[1].decode() if found else version
        _inside(path, file, numbers.get(PAYLOAD, 0), size)
        file.seek(numbers.get(PAYLOAD, 0), 1)
    return NcuFile(results, version)


def _sized(path: Path, file: BinaryIO, size: int) -> bytes:
    """The bytes after a 32-bit count of them."""
    _inside(path, file, SIZE.size, size)
    (count,) = SIZE.unpack(file.read(SIZE.size))
    _inside(path, file, count, size)
    if count > MAX_HEADER:
        message = f"a header of {count} bytes"
        raise TraceFormatError(path, message, offset=file.tell(), expected=EXPECTED)
    return file.read(count)


def _inside(path: Path, file: BinaryIO, count: int, size: int) -> None:
    if file.tell() + count > size:
        raise TraceFormatError(
            path,
            "the report is cut off",
            offset=size,
            expected=f"{file.tell() + count - size} more bytes; copy or capture it again",
        )


def _fields(message: bytes) -> tuple[dict[int, int], bytes]:
    """The numbers of a protobuf message by field, and its session's bytes."""
    numbers: dict[int, int] = {}
    session = b""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        field, wire = key >> 3, key & 7
        if wire == VARINT:
            numbers[field], place = _varint(message, place)
            continue
        if wire == SIZED:
            count, place = _varint(message, place)
        elif wire in (EIGHT_BYTES, FOUR_BYTES):
            count = 8 if wire == EIGHT_BYTES else 4
        else:
            raise ValueError(wire)
        if place + count > len(message):
            raise ValueError(count)
        if field == SESSION:
            session = message[place : place + count]
        place += count
    return numbers, session


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError(place)
