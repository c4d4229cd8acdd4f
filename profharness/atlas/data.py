"""Store the measured cells of one GPU as columns of integers, in memory and in a `.npz` file.

docs/atlas.md describes the file.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from profharness.atlas.checks import (
    BACKENDS,
    CHOICES,
    LARGEST,
    STATUSES,
    Dim3,
    machine_fault,
    parse_label,
)
from profharness.atlas.npz import MAGIC, read_arrays, write_arrays
from profharness.attention.config import Config
from profharness.errors import ProfharnessError, UsageError, printable_path
from profharness.files import decode_json, open_input
from profharness.run import NOT_A_RECORD

VERSION = 2
SUFFIX, MODEL_SUFFIX = ".npz", ".model.npz"
OLD_MAGIC = b"phatlas\n"  # first bytes of files before version 2
PACKAGED = Path(__file__).parent
NUMBERS = ("batch", "num_heads", "num_kv_heads", "seq_len_q", "seq_len_kv", "head_dim")
KEY = (*NUMBERS, "variant", "backend")
# The columns, and the items for which they have values. `cells` have one value per cell. A launch
# kind is a kernel with its block, registers and shared memory. Equal sequences of launches are
# stored once: `sequences` have one value per distinct sequence, and `launches` one per launch of a
# distinct sequence. `times` have one value per launch of each cell.
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
MAX_COUNTS = {
    "cells": 250_000,
    "kinds": 250_000,
    "sequences": 250_000,
    "launches": 4_000_000,
    "times": 4_000_000,
}
MAX_HEADER_BYTES = 8_000_000  # maximum size of the machine and the tables as JSON, in bytes
# Columns whose values are indices into a table, and the names of these tables.
TABLES = {
    "variant": "variants",
    "backend": "backends",
    "regime": "regimes",
    "status": "statuses",
    "choice": "choices",
    "message": "messages",
    "kernel": "kernels",
}
MAX_TIME_GAP = 0.5  # maximum relative difference between two times of one cell
NOTHING = -1  # stands for a missing value in a column
VERSIONS = (
    "gpu",
    "torch",
    "cuda",
    "cudnn",
    "driver",
)  # fields by which two machines are distinguished
WIDTHS = Counter(COLUMNS.values())  # number of columns for each kind of item
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Machine:
    """The GPU and software on which an atlas was measured."""

    gpu: str
    torch: str
    cuda: str | None = None
    cudnn: int | None = None  # 91900 for 9.19.0
    driver: str | None = None
    capability: str | None = None
    num_sms: int | None = None
    l2_bytes: int | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, Any]) -> Machine:
        """Return the machine that the environment of a run or shard describes."""
        renamed = {"cuda": "torch_cuda"}
        names = (each.name for each in fields(cls))
        return cls(**{name: environment.get(renamed.get(name, name)) for name in names})  # type: ignore[arg-type]

    @property
    def environment(self) -> dict[str, Any]:
        """Return the fields as a dict with the keys of an environment."""
        values = asdict(self)
        return {"torch_cuda": values.pop("cuda"), **values}

    @property
    def name(self) -> str:
        """Return a file name such as `h200-torch2.11.0-cuda13.0-cudnn91900-driver580.159.04`."""
        gpu = self.gpu.lower().replace("nvidia", "").strip().replace(" ", "-")
        parts = [gpu, f"torch{self.torch.split('+')[0]}"]
        parts += [f"cuda{self.cuda}"] if self.cuda else []
        parts += [f"cudnn{self.cudnn}"] if self.cudnn else []
        parts += [f"driver{self.driver}"] if self.driver else []
        # a name from a foreign file must not lead to a path outside the folder
        return re.sub(r"[^\w.-]+", "-", "-".join(parts)).lstrip("-.")


class Launch(NamedTuple):
    """One kernel of a call. A memset has neither a grid nor registers."""

    kernel: str
    grid: Dim3 | None
    block: Dim3 | None
    registers: int | None
    shared_bytes: int | None
    time_us: float | None


def _kinds(launches: Iterable[Launch]) -> list[tuple[Any, ...]]:
    return [launch[:5] for launch in launches]


@dataclass(frozen=True)
class AtlasCell:
    """The result of a config on a backend. A config that the backend refused has no times."""

    config: Config
    backend: str
    regime: str  # the group of configs that it was sampled for, such as `decode`
    status: str
    choice: str | None
    launches: tuple[Launch, ...]
    kernel_us: float | None
    graph_us: float | None
    peak_bytes: int | None
    message: str | None

    def difference(self, other: AtlasCell) -> tuple[str, str] | None:
        """Compare this result with another one. Return the first field that differs and a
        description.

        Return None if the results agree. Fields that one of the results lacks are not compared.
        """
        values: tuple[tuple[str, Any, Any], ...] = (
            ("status", self.status, other.status),
            ("choice", self.choice, other.choice),
            ("kernels", _kinds(self.launches), _kinds(other.launches)),
        )
        for name, old, new in values:
            if old == new or not old or not new:
                continue
            if name != "kernels":
                return name, f"{old} ↔ {new}"
            if len(old) != len(new):
                return name, f"{len(old)} and {len(new)} launches"
            return name, "other kernels or launch configurations"
        if self.kernel_us and other.kernel_us:
            low, high = sorted((self.kernel_us, other.kernel_us))
            if high / low - 1 > MAX_TIME_GAP:
                return "times", f"{self.kernel_us:g} ↔ {other.kernel_us:g} µs"
        return None


@dataclass(frozen=True)
class Atlas:
    """The cells of one machine."""

    machine: Machine
    tables: Mapping[
        str, tuple[Any, ...]
    ]  # a variant contains the fields of a config that are not in NUMBERS
    columns: Mapping[str, Integers]
    source: str = ""  # path of the file, for messages

    def __len__(self) -> int:
        return len(self.columns["status"])

    @cached_property
    def starts(self) -> Integers:
        """Return the index of the first launch of each distinct sequence, followed by the number of launches."""
        return _edges(self.columns["length"])

    @cached_property
    def time_starts(self) -> Integers:
        """Return the index of the first launch time of each cell, followed by the number of times."""
        # a cell without launches has the sequence -1, which selects the appended length 0
        return _edges(np.append(self.columns["length"], 0)[self.columns["sequence"]])

    @cached_property
    def _rows(self) -> dict[bytes, int]:
        keys = np.stack([self.columns[name] for name in KEY], axis=1)
        data, width = keys.tobytes(), keys.shape[1] * keys.itemsize
        return {data[row * width : (row + 1) * width]: row for row in range(len(self))}

    @cached_property
    def _variants(self) -> dict[tuple[Any, ...], int]:
        return {
            variant_of(_config(dict.fromkeys(NUMBERS, 1), fields)): code
            for code, fields in enumerate(self.tables["variants"])
        }

    def rows(self, configs: Iterable[Config], backends: Iterable[str]) -> list[int]:
        """Return the row of each config on each backend, in the order configs x backends.

        The row is NOTHING if the atlas does not contain the cell.
        """
        table = self.tables["backends"]
        codes = [table.index(name) if name in table else NOTHING for name in backends]
        known, rows = self._variants, self._rows
        found = []
        for config in configs:
            numbers = [getattr(config, name) for name in NUMBERS]
            variant = known.get(variant_of(config), NOTHING)
            found += [
                rows.get(struct.pack("<8q", *numbers, variant, code), NOTHING) for code in codes
            ]
        return found

    def find(self, config: Config, backend: str) -> AtlasCell | None:
        """Return the cell of a config on a backend, or None if it was not measured."""
        (row,) = self.rows([config], [backend])
        return None if row == NOTHING else self.cell(row)

    def cells(self) -> Iterator[AtlasCell]:
        """Yield all cells in the order in which they were measured."""
        return map(self.cell, range(len(self)))

    def config(self, row: int) -> Config:
        """Return the config of a cell."""
        numbers = {name: int(self.columns[name][row]) for name in NUMBERS}
        return _config(numbers, self.tables["variants"][self.columns["variant"][row]])

    def cell(self, row: int) -> AtlasCell:
        """Return one cell."""
        peak_bytes = int(self.columns["peak_bytes"][row])
        return AtlasCell(
            config=self.config(row),
            backend=self._text("backend", row),
            regime=self._text("regime", row),
            status=self._text("status", row),
            choice=self._text("choice", row) or None,
            launches=self.launches(row),
            kernel_us=self._us("kernel_ns", row),
            graph_us=self._us("graph_ns", row),
            peak_bytes=None if peak_bytes == NOTHING else peak_bytes,
            message=self._text("message", row) or None,
        )

    def launches(self, row: int) -> tuple[Launch, ...]:
        """Return the launches of a cell in order, with their times."""
        sequence = self.columns["sequence"][row]
        if sequence == NOTHING:
            return ()
        first, last = self.starts[sequence : sequence + 2].tolist()
        times = self.columns["time_ns"][self.time_starts[row] :][: last - first].tolist()
        return tuple(
            self._launch(index, time / 1e3)
            for index, time in zip(range(first, last), times, strict=True)
        )

    def _launch(self, index: int, time_us: float) -> Launch:
        kind = self.columns["kind"][index]
        registers, shared_bytes = (
            int(self.columns[name][kind]) for name in ("registers", "shared_bytes")
        )
        return Launch(
            kernel=self.tables["kernels"][self.columns["kernel"][kind]],
            grid=_dim3(*(self.columns[f"grid_{axis}"][index] for axis in "xyz")),
            block=_dim3(*(self.columns[f"block_{axis}"][kind] for axis in "xyz")),
            registers=None if registers == NOTHING else registers,
            shared_bytes=None if shared_bytes == NOTHING else shared_bytes,
            time_us=time_us,
        )

    def _text(self, name: str, row: int) -> str:
        return str(self.tables[TABLES[name]][self.columns[name][row]])

    def _us(self, name: str, row: int) -> float | None:
        value = self.columns[name][row]
        return None if value == NOTHING else float(value) / 1e3


def variant_of(config: Config) -> tuple[Any, ...]:
    """Return the values of the fields of a config that are not in NUMBERS."""
    others: tuple[Any, ...] = _variant(config)
    return others


VARIANT = tuple(each.name for each in fields(Config) if each.name not in NUMBERS)
_variant = attrgetter(*VARIANT)
_DEFAULTS = {each.name: each.default for each in fields(Config)}


def _config(numbers: Mapping[str, int], variant: Mapping[str, Any]) -> Config:
    # tuples were stored as JSON lists
    others: dict[str, Any] = {
        name: tuple(each) if isinstance(each, list) else each for name, each in variant.items()
    }
    values: dict[str, Any] = {**numbers, **others}
    return Config(**values)


def _dim3(x: int, y: int, z: int) -> Dim3 | None:
    return None if x == NOTHING else (int(x), int(y), int(z))


def _ns(us: float | None) -> int:
    return NOTHING if us is None else round(us * 1e3)


def _names(kind: str) -> list[str]:
    return [name for name, each in COLUMNS.items() if each == kind]


def _edges(lengths: Integers) -> Integers:
    return np.concatenate([[0], np.cumsum(lengths)])


class _Builder:
    """Build the columns and tables of an atlas while cells are added.

    Columns are arrays and keys are bytes, because tuples of integers would take ten times the
    memory.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._columns = {kind: array("q") for kind in MAX_COUNTS}  # row by row
        self._tables: dict[str, dict[Any, int]] = {name: {} for name in TABLES.values()}
        self._variants: list[dict[str, Any]] = []
        self._text_bytes = 0
        self._cells: set[bytes] = set()
        self._kinds: dict[bytes, int] = {}
        self._sequences: dict[bytes, int] = {}

    def add(self, cell: AtlasCell) -> None:
        """Add a cell. Ignore it if a cell with its config and backend was added before."""
        identity = (
            *(getattr(cell.config, name) for name in NUMBERS),
            self._variant(cell.config),
            self._code("backends", cell.backend),
        )
        key = array("q", identity).tobytes()
        if key in self._cells:
            return
        self._cells.add(key)
        sequence = self._sequence(cell.launches)
        self._append("times", [_ns(launch.time_us) for launch in cell.launches])
        self._append(
            "cells",
            (
                *identity,
                self._code("regimes", cell.regime),
                self._code("statuses", cell.status),
                self._code("choices", cell.choice or ""),
                self._code("messages", cell.message or ""),
                _ns(cell.kernel_us),
                _ns(cell.graph_us),
                NOTHING if cell.peak_bytes is None else cell.peak_bytes,
                sequence,
            ),
        )

    def columns(self) -> dict[str, Integers]:
        """Return the columns by name."""
        columns: dict[str, Integers] = {}
        for kind, values in self._columns.items():
            table = np.asarray(values, np.int64).reshape(-1, WIDTHS[kind]).T
            columns.update(zip(_names(kind), table, strict=True))
        return columns

    def tables(self) -> dict[str, tuple[Any, ...]]:
        """Return the tables by name."""
        tables = {name: tuple(table) for name, table in self._tables.items()}
        return tables | {"variants": tuple(self._variants)}

    def _append(self, kind: str, values: Sequence[int]) -> None:
        column = self._columns[kind]
        if len(column) + len(values) > WIDTHS[kind] * MAX_COUNTS[kind]:
            raise UsageError(f"{self._source}: more than {MAX_COUNTS[kind]:,} {kind} in one atlas")
        column.extend(values)

    def _variant(self, config: Config) -> int:
        table, key = self._tables["variants"], variant_of(config)
        if key not in table:
            values = zip(VARIANT, key, strict=True)
            text = json.dumps({name: each for name, each in values if each != _DEFAULTS[name]})
            self._count_text(text)
            self._variants.append(json.loads(text))
            table[key] = len(table)
        return table[key]

    def _code(self, name: str, text: str) -> int:
        table = self._tables[name]
        if text not in table:
            self._count_text(json.dumps(text))
            table[text] = len(table)
        return table[text]

    def _count_text(self, text: str) -> None:
        self._text_bytes += len(text) + 1
        if self._text_bytes > MAX_HEADER_BYTES:
            raise UsageError(
                f"{self._source}: more than {MAX_HEADER_BYTES:,} bytes of names and messages in "
                "one atlas"
            )

    def _kind(self, launch: Launch) -> int:
        numbers = (*(launch.block or (NOTHING,) * 3), launch.registers, launch.shared_bytes)
        values = array("q", (NOTHING if each is None else each for each in numbers))
        values.insert(0, self._code("kernels", launch.kernel))
        key = values.tobytes()
        if key not in self._kinds:
            self._append("kinds", values)
            self._kinds[key] = len(self._kinds)
        return self._kinds[key]

    def _sequence(self, launches: Sequence[Launch]) -> int:
        if not launches:
            return NOTHING
        values = array("q")
        for launch in launches:
            values.extend((self._kind(launch), *(launch.grid or (NOTHING,) * 3)))
        # The key is a digest, because keeping the launches a second time would need more memory.
        key = hashlib.blake2b(values, digest_size=16).digest()
        if key not in self._sequences:
            self._append("sequences", (len(launches),))
            self._append("launches", values)
            self._sequences[key] = len(self._sequences)
        return self._sequences[key]


def build_atlas(machine: Machine, cells: Iterable[AtlasCell], source: str = "") -> Atlas:
    """Return an atlas of cells, in their order.

    If several cells have the same config and backend, keep the first of them. Raise UsageError if
    the atlas would exceed MAX_COUNTS or MAX_HEADER_BYTES.
    """
    builder = _Builder(source)
    for cell in cells:
        builder.add(cell)
    return Atlas(machine, builder.tables(), builder.columns(), source)


def write_atlas(atlas: Atlas, path: Path, *, force: bool = False) -> None:
    """Write an atlas atomically.

    Raise UsageError if the file exists and `force` is False, or if the header is longer than
    MAX_HEADER_BYTES.
    """
    header = {
        "version": VERSION,
        "machine": asdict(atlas.machine),
        "tables": {name: list(atlas.tables[name]) for name in TABLES.values()},
    }
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER_BYTES:
        raise UsageError(
            f"{path}: more than {MAX_HEADER_BYTES:,} bytes of names and messages in one atlas"
        )
    arrays = {name: narrowed(atlas.columns[name]) for name in COLUMNS}
    write_arrays({"header": np.frombuffer(text, np.uint8), **arrays}, path, force=force)


def narrowed(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Convert integers to the narrowest signed dtype that can represent all of them."""
    largest = int(np.abs(values).max(initial=0))
    return values.astype(next(f"<i{n}" for n in (1, 2, 4, 8) if largest < 1 << (8 * n - 1)))


def read_atlas(path: Path) -> Atlas:
    """Read an atlas.

    Raise UsageError if the file cannot be read, is not an atlas or has another version. Raise
    ProfharnessError if the file was cut short, changed or forged.
    """
    name = printable_path(path)
    try:
        with open_input(path) as file:
            start = file.read(len(OLD_MAGIC))
        if start == OLD_MAGIC:
            raise UsageError(
                f"{name}: an atlas in the format before .npz; export it as .jsonl with the version "
                "that wrote it, or run `profharness atlas add` on its shards or store"
            )
        if not start.startswith(MAGIC):
            raise UsageError(
                f"{name}: not an atlas; `profharness atlas list` prints the known ones"
            )
        counts = {name: MAX_COUNTS[kind] for name, kind in COLUMNS.items()}
        arrays = read_arrays(path, {"header": MAX_HEADER_BYTES, **counts})
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}; give the path of an atlas") from None
    try:
        header = decode_json(arrays.pop("header").tobytes(), _Header)
        if header.version != VERSION:
            raise UsageError(
                f"{name}: an atlas of version {header.version}; this profharness reads version {VERSION}"
            )
        machine = msgspec.convert(header.machine, Machine)
        if machine_fault(machine.environment) or asdict(machine).keys() < header.machine.keys():
            raise ValueError
        tables = _checked_tables(header.tables)
    except (ValueError, TypeError, KeyError, *NOT_A_RECORD):
        raise ProfharnessError(f"{name}: the header of the atlas is forged; get it again") from None
    _check_columns(arrays, tables, name)
    # pop() frees each array as soon as it is converted to a column
    columns = {each: arrays.pop(each).astype(np.int64, copy=False) for each in COLUMNS}
    atlas = Atlas(machine, tables, columns, name)
    for edges, column in ((atlas.starts, "kind"), (atlas.time_starts, "time_ns")):
        if edges[-1] != len(columns[column]):
            raise ProfharnessError(f"{name}: the lengths in the atlas disagree; get it again")
    return atlas


class _Header(msgspec.Struct):
    version: int
    machine: dict[str, str | int | None]
    tables: dict[str, list[Any]]


def _checked_tables(tables: Mapping[str, list[Any]]) -> dict[str, tuple[Any, ...]]:
    """Return the tables of a header as tuples.

    Raise ValueError, TypeError, KeyError or a msgspec error if a table is invalid.
    """
    allowed = {"backends": BACKENDS, "statuses": STATUSES, "choices": (*CHOICES, "")}
    checked = {name: tuple(tables[name]) for name in TABLES.values()}
    for name, table in checked.items():
        if name == "variants":
            for variant in table:
                if not isinstance(variant, dict) or not variant.keys() <= set(VARIANT):
                    raise ValueError
                try:
                    config = msgspec.convert(dict.fromkeys(NUMBERS, 1) | variant, Config)
                    parse_label(config.label)
                except UsageError as error:
                    raise ValueError from error
        elif not all(isinstance(each, str) for each in table) or not set(table) <= set(
            allowed.get(name, table)
        ):
            raise ValueError
    return checked


def _check_columns(
    arrays: Mapping[str, npt.NDArray[Any]], tables: Mapping[str, tuple[Any, ...]], source: str
) -> None:
    """Raise ProfharnessError if columns have different lengths or contain values out of bounds."""
    counts: dict[str, int] = {}
    for name, kind in COLUMNS.items():
        count = counts.setdefault(kind, len(arrays[name]))
        if arrays[name].shape != (count,) or arrays[name].dtype.kind != "i":
            raise ProfharnessError(f"{source}: column {name} of the atlas is forged; get it again")
    for name, values in arrays.items():
        least, bound = (1 if name in NUMBERS else NOTHING), LARGEST
        if name in TABLES:
            least, bound = 0, len(tables[TABLES[name]])
        elif name == "length":
            least, bound = 0, counts["launches"] + 1
        elif name in ("sequence", "kind"):
            least, bound = (NOTHING if name == "sequence" else 0), counts[f"{name}s"]
        if len(values) and not least <= values.min() <= values.max() < bound:
            raise ProfharnessError(f"{source}: column {name} of the atlas is damaged; get it again")
    for what in ("grid", "block"):
        absent = [arrays[f"{what}_{axis}"] == NOTHING for axis in "xyz"]
        if not all(np.array_equal(absent[0], other) for other in absent[1:]):
            raise ProfharnessError(f"{source}: a {what} in the atlas is damaged; get it again")


def packaged_atlases() -> tuple[Path, ...]:
    """Return the paths of the atlases in the package."""
    return atlas_files(PACKAGED)


def atlas_files(folder: Path) -> tuple[Path, ...]:
    """Return the paths of the atlases in a folder. Files of models are excluded."""
    paths = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else ()
    return tuple(path for path in paths if not path.name.endswith(MODEL_SUFFIX))
