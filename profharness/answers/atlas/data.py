"""An atlas in memory and in its file: measured cells of one GPU as columns of integers.

The file has a magic, a version, a checksum, a JSON header and one compressed block a column. Columns
are unpacked when they are asked for. docs/atlas.md describes it.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from profharness.answers.atlas.archive import shard_lines
from profharness.answers.atlas.checks import (
    BACKENDS,
    CHOICES,
    LARGEST,
    STATUSES,
    machine_fault,
    parsed,
)
from profharness.answers.atlas.packed import DECODER_BYTES, Block, Integers, pack_column
from profharness.config import Config
from profharness.errors import ProfharnessError, UsageError, shown
from profharness.files import atomic_file, decode_json, read_input
from profharness.run import NOT_A_RECORD

MAGIC = b"phatlas\n"
VERSION = 1
HEAD = struct.Struct(
    "<8sII32s"
)  # magic, version, bytes of the header, checksum of all that follows
SUFFIX = ".atlas"
PACKAGED = Path(__file__).parent
MAX_HEADER = 1 << 24  # bytes; that of 47,000 cells has 0.3 million
NUMBERS = ("batch", "num_heads", "num_kv_heads", "seq_len_q", "seq_len_kv", "head_dim")
KEY = (*NUMBERS, "variant", "backend")
# How many values each column has: of cells, of launch kinds, of distinct sequences, of their launches, or of
# all timed launches.
COLUMNS = {
    **dict.fromkeys(KEY, "cells"),
    **dict.fromkeys(("regime", "status", "choice", "message"), "cells"),
    **dict.fromkeys(("kernel_ns", "graph_ns", "peak_bytes", "sequence"), "cells"),
    **dict.fromkeys(("kernel", "block_x", "block_y", "block_z"), "kinds"),
    **dict.fromkeys(("registers", "shared_bytes"), "kinds"),
    "length": "sequences",
    **dict.fromkeys(("kind", "grid_x", "grid_y", "grid_z"), "launches"),
    "time_ns": "times",
}
# The most values of a column, so many a byte of all packed columns: a forged count is refused before
# memory is taken. Real columns have less than one.
MOST_A_BYTE = 8
MOST = {
    "cells": 250_000,
    "kinds": 250_000,
    "sequences": 250_000,
    "launches": 4_000_000,
    "times": 4_000_000,
}
TABLES = ("variants", "backends", "regimes", "statuses", "choices", "messages", "kernels")
# the column that indexes each table
INDEXED = dict(
    zip(
        ("variant", "backend", "regime", "status", "choice", "message", "kernel"),
        TABLES,
        strict=True,
    )
)
NOTHING = -1
Dim3 = tuple[int, int, int]


VERSIONS = ("gpu", "torch", "cuda", "cudnn", "driver")  # of a Machine, which set atlases apart


@dataclass(frozen=True)
class Machine:
    """What an atlas was measured on. cudnn is 91900 for 9.19.0."""

    gpu: str
    torch: str
    cuda: str | None = None
    cudnn: int | None = None
    driver: str | None = None
    capability: str | None = None
    num_sms: int | None = None
    l2_bytes: int | None = None

    @property
    def name(self) -> str:
        """For a file: `h200-torch2.11.0-cuda13.0-cudnn91900-driver580.159.04`."""
        gpu = self.gpu.lower().replace("nvidia", "").strip().replace(" ", "-")
        parts = [gpu, f"torch{self.torch.split('+')[0]}"]
        parts += [f"cuda{self.cuda}"] if self.cuda else []
        parts += [f"cudnn{self.cudnn}"] if self.cudnn else []
        parts += [f"driver{self.driver}"] if self.driver else []
        # what a foreign file calls its machine must not lead out of a folder
        return re.sub(r"[^\w.-]+", "-", "-".join(parts)).lstrip("-.")


class Launch(NamedTuple):
    """One kernel of a call. None where there is no such thing, as of a memset."""

    kernel: str
    grid: Dim3 | None
    block: Dim3 | None
    registers: int | None
    shared_bytes: int | None
    time_us: float | None


@dataclass(frozen=True)
class AtlasCell:
    """A config on a backend, as measured. Times are None where it was refused."""

    config: Config
    backend: str
    regime: str
    status: str
    choice: str | None
    launches: tuple[Launch, ...]
    kernel_us: float | None
    graph_us: float | None
    peak_bytes: int | None
    message: str | None


@dataclass(frozen=True)
class Atlas:
    """The cells of one machine. tables hold texts, and variants what a config has besides its
    NUMBERS; blocks are the columns that are not unpacked yet.
    """

    machine: Machine
    tables: Mapping[str, tuple[Any, ...]]
    counts: Mapping[str, int]
    columns: dict[str, Integers] = field(default_factory=dict)
    blocks: Mapping[str, Block] = field(default_factory=dict)
    source: str = ""

    def __len__(self) -> int:
        return self.counts["cells"]

    def column(self, name: str) -> Integers:
        """The values of a column. Raises ProfharnessError for a damaged file."""
        if name not in self.columns:
            values = self.blocks[name].unpack()
            least, bound = self._bounds(name)
            if len(values) and not least <= values.min() <= values.max() < bound:
                raise ProfharnessError(
                    f"{self.source}: column {name} of the atlas is damaged; get it again"
                )
            self.columns[name] = values
        return self.columns[name]

    def _bounds(self, name: str) -> tuple[int, int]:
        """The least value of a column, and what all are less than."""
        if name in INDEXED:
            return 0, len(self.tables[INDEXED[name]])
        if name == "length":
            return 0, self.counts["launches"] + 1
        if name in ("sequence", "kind"):
            return (NOTHING if name == "sequence" else 0), self.counts[f"{name}s"]
        return (1 if name in NUMBERS else NOTHING), LARGEST

    def check(self) -> None:
        """Unpack all columns. Raises ProfharnessError where one is damaged or does not fit the others."""
        for name in COLUMNS:
            self.column(name)
        for name in ("starts", "time_starts"):
            getattr(self, name)
        for what in ("grid", "block"):
            absent = [self.column(f"{what}_{axis}") == NOTHING for axis in "xyz"]
            if not all(np.array_equal(absent[0], other) for other in absent[1:]):
                raise ProfharnessError(
                    f"{self.source}: a {what} in the atlas is damaged; get it again"
                )

    @cached_property
    def starts(self) -> Integers:
        """Where the launches of each distinct sequence begin, and after the last one their number."""
        return self._edges(self.column("length"), "launches")

    @cached_property
    def time_starts(self) -> Integers:
        """Where the times of each cell's launches begin, and after the last one their number."""
        sequence = self.column("sequence")
        lengths = np.append(self.column("length"), 0)[sequence]  # -1 is the 0 at the end
        return self._edges(lengths, "times")

    def _edges(self, lengths: Integers, total: str) -> Integers:
        edges = np.concatenate([[0], np.cumsum(lengths)])
        if (len(lengths) and lengths.min() < 0) or edges[-1] != self.counts[total]:
            raise ProfharnessError(
                f"{self.source}: the lengths in the atlas disagree; get it again"
            )
        return edges

    @cached_property
    def _rows(self) -> dict[bytes, int]:
        keys = np.stack([self.column(name) for name in KEY], axis=1)
        data, width = keys.tobytes(), keys.shape[1] * keys.itemsize
        return {data[row * width : (row + 1) * width]: row for row in range(len(self))}

    @cached_property
    def _codes(self) -> dict[tuple[Any, ...], int]:
        """The variants by what `variant_of` makes of a config."""
        return {
            variant_of(_config(dict.fromkeys(NUMBERS, 1), fields)): code
            for code, fields in enumerate(self.tables["variants"])
        }

    def rows(self, configs: Iterable[Config], backends: Iterable[str]) -> list[int]:
        """The row of each config on each backend, in the order configs x backends; -1 for none."""
        table = self.tables["backends"]
        codes = [table.index(name) if name in table else NOTHING for name in backends]
        known, rows = self._codes, self._rows
        found = []
        for config in configs:
            numbers = [getattr(config, name) for name in NUMBERS]
            variant = known.get(variant_of(config), NOTHING)
            found += [
                rows.get(struct.pack("<8q", *numbers, variant, code), NOTHING) for code in codes
            ]
        return found

    def find(self, config: Config, backend: str) -> AtlasCell | None:
        """The measured cell, if there is one."""
        (row,) = self.rows([config], [backend])
        return None if row == NOTHING else self.cell(row)

    def cells(self) -> Iterator[AtlasCell]:
        """All cells, in the order in which they were measured."""
        return map(self.cell, range(len(self)))

    def config(self, row: int) -> Config:
        """The config of a cell."""
        numbers = {name: int(self.column(name)[row]) for name in NUMBERS}
        return _config(numbers, self.tables["variants"][self.column("variant")[row]])

    def cell(self, row: int) -> AtlasCell:
        """One cell."""
        return AtlasCell(
            self.config(row),
            **{name: self._text(name, row) for name in ("backend", "regime", "status")},
            choice=self._text("choice", row) or None,
            launches=self.launches(row),
            kernel_us=self._us("kernel_ns", row),
            graph_us=self._us("graph_ns", row),
            peak_bytes=None
            if self.column("peak_bytes")[row] == NOTHING
            else int(self.column("peak_bytes")[row]),
            message=self._text("message", row) or None,
        )

    def launches(self, row: int) -> tuple[Launch, ...]:
        """The kernels of a cell in their order, with their times."""
        sequence = self.column("sequence")[row]
        if sequence == NOTHING:
            return ()
        first, times = self.starts[sequence], self.time_starts[row]
        return tuple(
            self.launch(first + at)._replace(
                time_us=float(self.column("time_ns")[times + at]) / 1e3
            )
            for at in range(self.column("length")[sequence])
        )

    def launch(self, index: int) -> Launch:
        """A launch of a distinct sequence, without a time."""
        kind = self.column("kind")[index]
        grid = _dim3(*(self.column(f"grid_{axis}")[index] for axis in "xyz"))
        block = _dim3(*(self.column(f"block_{axis}")[kind] for axis in "xyz"))
        registers, shared = (int(self.column(name)[kind]) for name in ("registers", "shared_bytes"))
        return Launch(
            self.tables["kernels"][self.column("kernel")[kind]],
            grid,
            block,
            None if registers == NOTHING else registers,
            None if shared == NOTHING else shared,
            None,
        )

    def _text(self, name: str, row: int) -> str:
        return str(self.tables[INDEXED[name]][self.column(name)[row]])

    def _us(self, name: str, row: int) -> float | None:
        value = self.column(name)[row]
        return None if value == NOTHING else float(value) / 1e3


def variant_of(config: Config) -> tuple[Any, ...]:
    """What a config has besides its NUMBERS."""
    others: tuple[Any, ...] = _others(config)
    return others


VARIANT = tuple(each.name for each in fields(Config) if each.name not in NUMBERS)
_others = attrgetter(*VARIANT)
_DEFAULTS = {each.name: each.default for each in fields(Config)}


def _config(numbers: Mapping[str, int], variant: Mapping[str, Any]) -> Config:
    """A config of its numbers and of the rest in JSON, which has lists for tuples."""
    values: dict[str, Any] = {**numbers, **variant}
    values = {
        name: tuple(each) if isinstance(each, list) else each for name, each in values.items()
    }
    return Config(**values)


def _dim3(x: int, y: int, z: int) -> Dim3 | None:
    return None if x == NOTHING else (int(x), int(y), int(z))


def _ns(us: float | None) -> int:
    return NOTHING if us is None else round(us * 1e3)


class _Table(dict[Any, int]):
    """Numbers its keys in the order in which they come."""

    def __missing__(self, key: Any) -> int:
        self[key] = len(self)
        return self[key]


def atlas_of(machine: Machine, cells: Iterable[AtlasCell], source: str = "") -> Atlas:
    """The atlas of some cells, in their order; of two with the same config and backend the first. Raises
    UsageError for more of them than an atlas has.
    """
    tables = {name: _Table() for name in TABLES}
    kinds, sequences = _Table(), _Table()
    rows: list[tuple[int, ...]] = []
    times: list[int] = []
    seen = set()
    for cell in cells:
        if (cell.config, cell.backend) in seen:
            continue
        seen.add((cell.config, cell.backend))
        sequence = NOTHING
        if cell.launches:
            parts = []
            for launch in cell.launches:
                name = tables["kernels"][launch.kernel]
                block = launch.block or (NOTHING,) * 3
                rest = (NOTHING if each is None else each for each in launch[3:5])
                parts.append((kinds[(name, *block, *rest)], *(launch.grid or (NOTHING,) * 3)))
            sequence = sequences[tuple(parts)]
            times += [_ns(launch.time_us) for launch in cell.launches]
        given = zip(VARIANT, variant_of(cell.config), strict=True)
        variant = json.dumps({name: each for name, each in given if each != _DEFAULTS[name]})
        row = (
            *(getattr(cell.config, name) for name in NUMBERS),
            tables["variants"][variant],
            tables["backends"][cell.backend],
            tables["regimes"][cell.regime],
            tables["statuses"][cell.status],
            tables["choices"][cell.choice or ""],
            tables["messages"][cell.message or ""],
            _ns(cell.kernel_us),
            _ns(cell.graph_us),
            NOTHING if cell.peak_bytes is None else cell.peak_bytes,
            sequence,
        )
        rows.append(row)
        if len(rows) > MOST["cells"] or len(times) > MOST["times"]:
            raise UsageError(
                f"{source}: more than {MOST['cells']:,} cells or {MOST['times']:,} launches in one atlas"
            )
    launches = [launch for sequence in sequences for launch in sequence]
    values = [
        *_columns(rows, "cells"),
        *_columns(kinds, "kinds"),
        *_columns([(len(sequence),) for sequence in sequences], "sequences"),
        *_columns(launches, "launches"),
        *_columns([(time,) for time in times], "times"),
    ]
    columns = dict(zip(COLUMNS, values, strict=True))
    counts = {COLUMNS[name]: len(column) for name, column in columns.items()}
    texts = {name: tuple(table) for name, table in tables.items()}
    texts["variants"] = tuple(map(json.loads, texts["variants"]))
    return Atlas(machine, texts, counts, columns, source=source)


def _columns(rows: Iterable[tuple[int, ...]], kind: str) -> Integers:
    width = sum(each == kind for each in COLUMNS.values())
    return np.array(list(rows), np.int64).reshape(-1, width).T


def write_atlas(atlas: Atlas, path: Path, *, force: bool = False) -> None:
    """Write it to a file, whole or not at all. Raises UsageError where there is one already."""
    packed = {name: pack_column(atlas.column(name)) for name in COLUMNS}
    header = {
        "machine": asdict(atlas.machine),
        "counts": dict(atlas.counts),
        "tables": {name: list(atlas.tables[name]) for name in TABLES},
        "columns": {name: [width, len(data)] for name, (data, width) in packed.items()},
    }
    text = lzma.compress(json.dumps(header, sort_keys=True, separators=(",", ":")).encode())
    body = text + b"".join(data for data, _ in packed.values())
    with atomic_file(path, force=force) as file:
        file.write(HEAD.pack(MAGIC, VERSION, len(text), hashlib.sha256(body).digest()) + body)


def read_atlas(path: Path) -> Atlas:
    """The atlas of a file. Raises UsageError for one that is no atlas or of another version, and
    ProfharnessError for one that was cut short or changed.
    """
    name = shown(path)
    try:
        data = read_input(path)
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}; give the path of an atlas") from None
    if len(data) < HEAD.size or not data.startswith(MAGIC):
        raise UsageError(
            f"{name}: not an atlas; `profharness atlas list` names those that are there"
        )
    _, version, length, checksum = HEAD.unpack_from(data)
    if version != VERSION:
        raise UsageError(
            f"{name}: an atlas of version {version}; this profharness reads version {VERSION}"
        )
    body = memoryview(data)[HEAD.size :]
    if hashlib.sha256(body).digest() != checksum:
        raise ProfharnessError(
            f"{name}: the atlas was cut short or changed (checksum); get it again"
        )
    try:
        decoder = lzma.LZMADecompressor(memlimit=DECODER_BYTES)
        header = decoder.decompress(body[:length], max_length=MAX_HEADER)
        if not decoder.eof:
            raise ValueError
        return _atlas(decode_json(header, _Header), body[length:], name)
    except (lzma.LZMAError, EOFError, UsageError, ValueError, KeyError, *NOT_A_RECORD):
        raise ProfharnessError(f"{name}: the header of the atlas is forged; get it again") from None


class _Header(msgspec.Struct):
    """What stands before the columns, as far as its types go."""

    machine: dict[str, str | int | None]
    counts: dict[str, int]
    columns: dict[str, tuple[int, int]]
    tables: dict[str, list[Any]]


def _atlas(header: _Header, body: memoryview, source: str) -> Atlas:
    """The atlas of a header and the columns behind it. Raises ValueError and the like for a forged one."""
    counts, tables = header.counts, header.tables
    for kind, most in MOST.items():
        if not 0 <= counts[kind] <= min(most, MOST_A_BYTE * len(body)):
            raise ValueError
    blocks, at = {}, 0
    for name, kind in COLUMNS.items():
        width, length = header.columns[name]
        if width not in (1, 2, 4, 8) or length < 0:
            raise ValueError
        blocks[name] = Block(body[at : at + length], counts[kind], width, source)
        at += length
    if at != len(body):
        raise ValueError
    allowed = {"backends": BACKENDS, "statuses": STATUSES, "choices": (*CHOICES, "")}
    for name in TABLES:
        if name == "variants":
            for variant in tables[name]:
                _check_variant(variant)
        elif not all(isinstance(each, str) for each in tables[name]) or not set(
            tables[name]
        ) <= set(allowed.get(name, tables[name])):
            raise ValueError
    machine = msgspec.convert(header.machine, Machine)
    if machine_fault(asdict(machine)) or asdict(machine).keys() < header.machine.keys():
        raise ValueError
    return Atlas(
        machine, {n: tuple(tables[n]) for n in TABLES}, counts, blocks=blocks, source=source
    )


def _check_variant(variant: Any) -> None:
    """Raise ValueError or UsageError for what no config has besides its numbers."""
    if not isinstance(variant, dict) or not variant.keys() <= set(VARIANT):
        raise ValueError
    parsed(msgspec.convert(dict.fromkeys(NUMBERS, 1) | variant, Config).label)


def packaged_atlases() -> tuple[Path, ...]:
    """The atlases that are part of the package."""
    return tuple(sorted(PACKAGED.glob(f"*{SUFFIX}")))


def find_atlas(gpu: str, torch: str | None = None) -> Atlas | None:
    """The packaged atlas of a GPU, and of a PyTorch release if one is said (`2.11` or `2.11.0`)."""
    for path in packaged_atlases():
        atlas = read_atlas(path)
        release = atlas.machine.torch.split("+")[0]
        plain = [
            text.lower().replace("nvidia", "").replace(" ", "") for text in (gpu, atlas.machine.gpu)
        ]
        if plain[0] == plain[1] and (
            torch is None or f"{release}.".startswith(f"{torch.split('+')[0]}.")
        ):
            return atlas
    return None


def machine_of(environment: Mapping[str, Any]) -> Machine:
    """The machine of a run's or a shard's environment."""
    other = {"cuda": "torch_cuda"}
    told = {each.name: environment.get(other.get(each.name, each.name)) for each in fields(Machine)}
    return Machine(**told)  # type: ignore[arg-type]


def cell_of(row: Mapping[str, Any]) -> AtlasCell:
    """The cell of a line of a shard. Lines kept apart from an atlas may lack regime and times."""
    if not isinstance(row["backend"], str):
        raise TypeError(f"backend {row['backend']!r}")
    names = row.get("kernels") or ()
    times = row.get("kernel_us_each") or (None,) * len(names)
    launches = (
        Launch(name, _triple(grid), _triple(block), registers, shared, time)
        for (name, grid, block, registers, shared), time in zip(names, times, strict=True)
    )
    return AtlasCell(
        config=parsed(row["config"]),
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


def _triple(sizes: list[int] | None) -> Dim3 | None:
    return (sizes[0], sizes[1], sizes[2]) if sizes else None


def read_shards(path: Path) -> Atlas:
    """The atlas of a folder or archive of shards that scripts/make_atlas.py wrote, without cells
    that failed. Raises UsageError where they are of two machines or of none.
    """
    machines: set[Machine] = set()

    def cells() -> Iterator[AtlasCell]:
        for row in shard_lines(path):
            if "environment" in row:
                machines.add(machine_of(row["environment"]))
            elif row["status"] in ("ok", "refused"):
                yield cell_of(row)

    try:
        made = atlas_of(Machine("", ""), cells(), shown(path))
    except ProfharnessError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise UsageError(
            f"{shown(path)}: a line is no cell of an atlas ({type(error).__name__}: {error})"
        ) from None
    if len(machines) != 1:
        names = ", ".join(sorted(machine.name for machine in machines)) or "no machine"
        raise UsageError(f"{shown(path)}: shards of {names}; an atlas is of one machine")
    machine = machines.pop()
    if fault := machine_fault(asdict(machine)):
        raise UsageError(f"{shown(path)}: {fault}")
    return Atlas(machine, made.tables, made.counts, made.columns, source=made.source)
