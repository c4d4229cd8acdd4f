"""Read and write shards, which are the files of JSON lines that scripts/make_atlas.py writes.

Shards can be read from a folder, an archive (.tar.xz) or a single file.
"""

from __future__ import annotations

import io
import json
import lzma
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

from profharness.atlas.checks import SETTLED, Dim3, line_fault, machine_fault, parse_label
from profharness.atlas.data import Atlas, AtlasCell, Launch, Machine, build_atlas
from profharness.device_types import CUDA
from profharness.errors import ProfharnessError, UsageError, printable_path
from profharness.files import LINE_BYTES, InputFile, open_input, read_lines

DECODER_BYTES = 128 << 20  # maximum memory of an LZMA decoder; the strongest preset needs 65 MB
MAX_RATIO = 200  # maximum compression ratio; shards have about 40, xz can reach 7,000
ALWAYS_UNPACKED = 16 << 20  # unpacked size in bytes up to which the ratio is not limited
MAX_LINE_BYTES = 1 << 20  # maximum size of a line; a decoded line takes 40 times as much
SHARD_VERSION = 1
SKIPPED = (
    tarfile.DIRTYPE,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    *b"LK",
)  # folders, headers, long names


class XzReader(io.RawIOBase):
    """A stream of the unpacked content of an .xz file.

    Reading raises LZMAError if the file is damaged or unpacks to more than MAX_RATIO times its
    size.
    """

    def __init__(self, file: InputFile) -> None:
        self._file = file
        self._decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=DECODER_BYTES)
        self._left = max(ALWAYS_UNPACKED, MAX_RATIO * file.size)

    def readable(self) -> bool:
        """Return True."""
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
    """Yield the lines of a folder of shards, of an archive of them (.tar.xz), or of one file.

    If the last line has no newline and is not valid JSON, it was cut off and is skipped. Raise
    UsageError for any other invalid line.
    """
    try:
        for source, number, line in _source_lines(path):
            if (row := _parse_line(line, f"{source}, line {number}")) is not None:
                yield row
    except OSError as error:
        raise UsageError(f"{printable_path(path)}: cannot be read: {error.strerror}") from None


def _parse_line(line: bytes, place: str) -> dict[str, Any] | None:
    if len(line) > MAX_LINE_BYTES:
        raise UsageError(f"{place}: more than {MAX_LINE_BYTES:,} bytes")
    try:
        row = json.loads(line)
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
    """Yield each line with the name of its file and its line number.

    Raise UsageError if an archive is damaged, and OSError if a file cannot be read.
    """
    if path.is_dir():
        for each in sorted(path.glob("shard-*.jsonl")):
            yield from _numbered(printable_path(each), read_lines(each))
    elif path.name.endswith(".tar.xz"):
        try:
            with open_input(path) as file, io.BufferedReader(XzReader(file), 1 << 20) as plain:
                yield from _members(path, cast("IO[bytes]", plain))
        except (tarfile.TarError, lzma.LZMAError) as error:
            raise UsageError(
                f"{printable_path(path)}: not a whole archive of shards ({error})"
            ) from None
    else:
        yield from _numbered(printable_path(path), read_lines(path))


def _numbered(source: str, lines: Iterator[bytes]) -> Iterator[tuple[str, int, bytes]]:
    return ((source, number, line) for number, line in enumerate(lines, start=1))


def _members(path: Path, file: IO[bytes]) -> Iterator[tuple[str, int, bytes]]:
    # read block by block, because tarfile would load a header with a long name into memory
    while len(block := file.read(tarfile.BLOCKSIZE)) == tarfile.BLOCKSIZE:
        if not any(block):
            return
        member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        name = f"{printable_path(path)}, {printable_path(member.name)}"
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
    """Yield the lines of the next `size` bytes."""
    while size > 0:
        line = file.readline(min(size, LINE_BYTES))
        if not line:
            raise tarfile.ReadError("the archive is cut short")
        if len(line) == LINE_BYTES:
            raise tarfile.ReadError(f"a line of more than {LINE_BYTES:,} bytes")
        size -= len(line)
        yield line


def parse_cell(row: Mapping[str, Any]) -> AtlasCell:
    """Convert a line of a shard to a cell. The regime and the times may be missing.

    Raise ValueError if the number of times is not the number of launches.
    """
    kernels = row.get("kernels") or ()
    times = row.get("kernel_us_each") or (None,) * len(kernels)
    launches = (
        Launch(name, _dim3(grid), _dim3(block), registers, shared_bytes, time)
        for (name, grid, block, registers, shared_bytes), time in zip(kernels, times, strict=True)
    )
    return AtlasCell(
        config=parse_label(row["config"]),
        backend=row["backend"],
        regime=row.get("regime") or "",
        status=row["status"],
        choice=row.get("choice"),
        launches=tuple(launches),
        kernel_us=row.get("kernel_us"),
        graph_us=row.get("graph_us"),
        peak_bytes=row.get("peak_bytes"),
        message=row.get("message"),
    )


def _dim3(sizes: list[int] | None) -> Dim3 | None:
    return (sizes[0], sizes[1], sizes[2]) if sizes else None


def read_shards(path: Path) -> Atlas:
    """Read shards into an atlas. Cells that failed are skipped.

    Raise UsageError if a line is invalid, or if the shards name no machine or several machines.
    """
    machines: set[Machine] = set()

    def not_one(names: str) -> UsageError:
        text = f"{printable_path(path)}: shards of {names}; an atlas belongs to one machine"
        return UsageError(text)

    def cells() -> Iterator[AtlasCell]:
        for row in shard_lines(path):
            if "environment" in row:
                machines.add(Machine.from_environment(row["environment"]))
                if len(machines) > 1:
                    raise not_one(", ".join(sorted(machine.name for machine in machines)))
            elif row.get("status") in SETTLED:
                yield parse_cell(row)

    try:
        atlas = build_atlas(Machine("", ""), cells(), printable_path(path))
    except ProfharnessError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise UsageError(
            f"{printable_path(path)}: a line is no cell of an atlas ({type(error).__name__}: {error})"
        ) from None
    if not machines:
        raise not_one("no machine")
    machine = machines.pop()
    if fault := machine_fault(machine.environment):
        raise UsageError(f"{printable_path(path)}: {fault}")
    return replace(atlas, machine=machine)


def format_lines(atlas: Atlas) -> Iterator[str]:
    """Yield the lines of a shard that contains all cells of an atlas."""
    environment = atlas.machine.environment | {"device_type": CUDA}
    yield json.dumps({"atlas": SHARD_VERSION, "environment": environment}) + "\n"
    for cell in atlas.cells():
        row: dict[str, Any] = {"config": cell.config.label}
        names = ("backend", "regime", "status", "choice", "graph_us", "peak_bytes", "message")
        row |= {name: getattr(cell, name) for name in names}
        if cell.launches:
            row |= {
                "kernel_us": cell.kernel_us,
                "kernel_us_each": [launch.time_us for launch in cell.launches],
                "kernels": [launch[:5] for launch in cell.launches],
            }
        yield json.dumps(row, separators=(",", ":")) + "\n"
