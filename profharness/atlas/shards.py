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
from typing import IO, Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from profharness.atlas.data import (
    LARGEST,
    NUMBERS,
    SETTLED,
    Atlas,
    AtlasCell,
    Count,
    Dim3,
    Launch,
    Machine,
    Text,
    build_atlas,
    field_error,
    parse_label,
)
from profharness.device_types import CUDA
from profharness.errors import ProfharnessError, UsageError, printable_path
from profharness.files import LINE_BYTES, InputFile, open_input, read_lines

DECODER_BYTES = 128 << 20  # maximum memory of an LZMA decoder; the strongest preset needs 65 MB
MAX_RATIO = 200  # maximum compression ratio; shards have about 40, xz can reach 7,000
ALWAYS_UNPACKED = 16 << 20  # unpacked size in bytes up to which the ratio is not limited
MAX_LINE_BYTES = 1 << 20  # maximum size of a line; decoding needs 40 times as much memory
SHARD_VERSION = 1
# Types of tar members that are not files, such as folders, headers and long names.
SKIPPED = (tarfile.DIRTYPE, tarfile.XHDTYPE, tarfile.XGLTYPE, *b"LK")
Microseconds = Annotated[float, Meta(ge=0, lt=LARGEST / 1e3)]


class _Line(msgspec.Struct):
    """A line of a shard. It contains either the environment or a cell."""

    atlas: int | None = None
    environment: dict[str, Any] | None = None
    config: Text | None = None
    backend: Literal["auto", "flash", "efficient", "cudnn", "math"] | None = None
    status: Literal["ok", "refused", "oom", "error"] | None = None
    choice: Literal["flash", "efficient", "cudnn", "math", "none", "unknown"] | None = None
    regime: str | None = None
    kernels: list[tuple[Text, Dim3 | None, Dim3 | None, Count | None, Count | None]] | None = None
    kernel_us_each: list[Microseconds | None] | None = None
    kernel_us: Microseconds | None = None
    graph_us: Microseconds | None = None
    peak_bytes: Count | None = None
    message: str | None = None

    def check(self) -> None:
        """Raise UsageError if the machine or the config is invalid, or if a field is missing."""
        if self.environment is not None:
            Machine.from_environment(self.environment)
        elif self.atlas is None:
            for name in ("config", "backend", "status"):
                if getattr(self, name) is None:
                    raise UsageError(f"no {name}")
        if self.config is not None:
            config = parse_label(self.config)
            if min(getattr(config, name) for name in NUMBERS) < 1:
                raise UsageError(f"config {self.config!r}: sizes must be positive")


class _XzReader(io.RawIOBase):
    """The unpacked content of an .xz file.

    Reading raises LZMAError if the file is damaged or unpacks to more than MAX_RATIO times its
    size.
    """

    def __init__(self, file: InputFile) -> None:
        self._file = file
        self._decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=DECODER_BYTES)
        self._left = max(ALWAYS_UNPACKED, MAX_RATIO * file.size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data and not self._decoder.eof:
            packed = self._file.read(1 << 16) if self._decoder.needs_input else b""
            if not packed and self._decoder.needs_input:
                raise lzma.LZMAError("the file is truncated")
            data = self._decoder.decompress(packed, len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise lzma.LZMAError(f"the file unpacks to more than {MAX_RATIO} times its size")
        buffer[: len(data)] = data
        return len(data)


def shard_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the parsed lines of all shards in a folder or an archive (.tar.xz), or of one shard.

    If the last line has no newline and is not valid JSON, it was cut off and is skipped. Raise
    UsageError for any other invalid line.
    """
    try:
        for source, lines in _sources(path):
            for number, line in enumerate(lines, start=1):
                try:
                    row = _parse_line(line)
                except UsageError as error:
                    raise UsageError(f"{source}, line {number}: {error}") from None
                if row is not None:
                    yield row
    except OSError as error:
        raise UsageError(f"{printable_path(path)}: cannot be read: {error.strerror}") from None
    except (tarfile.TarError, lzma.LZMAError) as error:
        raise UsageError(
            f"{printable_path(path)}: not a complete archive of shards ({error})"
        ) from None


def _parse_line(line: bytes) -> dict[str, Any] | None:
    if len(line) > MAX_LINE_BYTES:
        raise UsageError(f"more than {MAX_LINE_BYTES:,} bytes")
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        if not line.endswith(b"\n"):
            return None
        raise UsageError("the line is not a JSON object")
    if row.get("atlas", SHARD_VERSION) != SHARD_VERSION:
        raise UsageError(f"not a shard of an atlas of version {SHARD_VERSION}")
    try:
        msgspec.convert(row, _Line).check()
    except msgspec.ValidationError as error:
        raise UsageError(field_error(error, row)) from None
    return row


def _sources(path: Path) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Yield the name and the lines of each shard."""
    if path.is_dir():
        for each in sorted(path.glob("shard-*.jsonl")):
            yield printable_path(each), read_lines(each)
    elif path.name.endswith(".tar.xz"):
        with open_input(path) as file, io.BufferedReader(_XzReader(file), 1 << 20) as plain:
            yield from _members(path, cast("IO[bytes]", plain))
    else:
        yield printable_path(path), read_lines(path)


def _members(path: Path, file: IO[bytes]) -> Iterator[tuple[str, Iterator[bytes]]]:
    # read block by block, because tarfile would load a header with a long name into memory
    while len(block := file.read(tarfile.BLOCKSIZE)) == tarfile.BLOCKSIZE:
        if not any(block):
            return
        member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        name = f"{printable_path(path)}, {printable_path(member.name)}"
        lines = _lines(file, member.size)
        if member.isreg():
            yield name, lines
        elif member.type not in SKIPPED:
            raise UsageError(
                f"{name}: not a regular file; an archive of shards contains only regular files"
            )
        for _ in lines:
            pass
        file.read(-member.size % tarfile.BLOCKSIZE)
    raise tarfile.ReadError("the archive is truncated")


def _lines(file: IO[bytes], size: int) -> Iterator[bytes]:
    while size > 0:
        line = file.readline(min(size, LINE_BYTES))
        if not line:
            raise tarfile.ReadError("the archive is truncated")
        if len(line) == LINE_BYTES:
            raise tarfile.ReadError(f"a line has more than {LINE_BYTES:,} bytes")
        size -= len(line)
        yield line


def parse_cell(row: Mapping[str, Any]) -> AtlasCell:
    """Convert a line of a shard to a cell. The line may lack the regime and the times.

    Raise ValueError if the numbers of times and launches differ.
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
    """Read shards into an atlas. Skip cells that failed.

    Raise UsageError if a line is invalid, or if the shards name no machine or several machines.
    """
    source = printable_path(path)
    machines: set[Machine] = set()

    def cells() -> Iterator[AtlasCell]:
        for row in shard_lines(path):
            if "environment" in row:
                machines.add(Machine.from_environment(row["environment"]))
                if len(machines) > 1:
                    names = ", ".join(sorted(machine.name for machine in machines))
                    raise UsageError(
                        f"{source}: contains shards of {names}, but an atlas belongs to one machine"
                    )
            elif row.get("status") in SETTLED:
                yield parse_cell(row)

    try:
        atlas = build_atlas(Machine(), cells(), source)
    except ProfharnessError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise UsageError(
            f"{source}: a line is not a cell of an atlas ({type(error).__name__}: {error})"
        ) from None
    machine = machines.pop() if machines else Machine()
    machine.require_gpu_and_release(source)
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
