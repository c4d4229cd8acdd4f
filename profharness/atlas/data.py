"""Store the measured cells of one GPU as columns of integers, in memory and in a `.npz` file.

A file is checked before memory is allocated for its arrays, because it may come from an untrusted
source. docs/atlas.md describes the format.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import struct
import zipfile
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property, lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from profharness.attention.config import AUTO, SDPA_BACKENDS, Config, parse_config
from profharness.attention.dispatch.machine import parse_release
from profharness.errors import UsageError, printable_path
from profharness.files import atomic_file, decode_json, open_input, read_input
from profharness.run import NOT_A_RECORD

VERSION = 2
SUFFIX, MODEL_SUFFIX = ".npz", ".model.npz"
PACKAGED = Path(__file__).parent
STATUSES = ("ok", "refused", "oom", "error")
SETTLED = ("ok", "refused")  # statuses that stay the same when the machine runs the cell again
BACKENDS = (AUTO, *SDPA_BACKENDS)
CHOICES = (*SDPA_BACKENDS, "none", "unknown")
NUMBERS = ("batch", "num_heads", "num_kv_heads", "seq_len_q", "seq_len_kv", "head_dim")
KEY = (*NUMBERS, "variant", "backend")
# Maps each column to the kind of items for which it has values. A column of `cells` has one value
# per cell. A column of `kinds` has one value per launch kind, which is a kernel with its block,
# registers and shared memory. Equal sequences of launches are stored only once. A column of
# `sequences` has one value per distinct sequence, and a column of `launches` has one value per
# launch of a distinct sequence. The column of `times` has one value per launch of each cell.
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
# Maps each column whose values are indices to the table to which the indices refer.
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
MAX_SHOWN = 60  # maximum number of characters of a value in a message
NOTHING = -1  # stands for a missing value in a column
LARGEST = 1 << 62  # upper limit of integers, because columns have the dtype int64
VERSIONS = ("gpu", "torch", "cuda", "cudnn", "driver")  # fields that identify a machine
WIDTHS = Counter(COLUMNS.values())  # number of columns for each kind of item
VARIANT = tuple(each.name for each in fields(Config) if each.name not in NUMBERS)
variant_of = attrgetter(*VARIANT)  # returns the values of the VARIANT fields of a config
_DEFAULTS = {each.name: each.default for each in fields(Config)}

MAGIC = b"PK\3\4"
# The last record of a zip file: signature, size and offset of the directory.
END = struct.Struct("<4s8xII2x")
MAX_ENTRY = 200  # maximum size of the zip directory for each array, in bytes
MAX_RATIO = 64  # maximum compression ratio; deflate can reach 1,032
ALWAYS_UNPACKED = 1 << 20  # unpacked size in bytes up to which the ratio is not limited
START = struct.Struct("<8sH")  # magic bytes, version and header size of an array
# Matches the header of an array. This pattern replaces numpy's own parser, which evaluates the
# header as Python source and can therefore raise many kinds of errors.
HEADER = re.compile(
    rb"\{'descr': '([<|][a-z]\d)', 'fortran_order': False, "
    rb"'shape': \((\d{1,12},|\d{1,12}, ?\d{1,12})\), \} *\n"
)
DTYPES = ("|u1", "|i1", "<i2", "<i4", "<i8", "<f2", "<f4")
FORGED = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, ValueError, KeyError, OverflowError),
    *(NotImplementedError, RuntimeError, TypeError),
)

Array = npt.NDArray[Any]
Integers = npt.NDArray[np.int64]
Text = Annotated[str, Meta(pattern=r"\S")]
Count = Annotated[int, Meta(ge=0, lt=LARGEST)]
Dim3 = tuple[Count, Count, Count]


@dataclass(frozen=True)
class Machine:
    """The GPU and software on which an atlas was measured.

    Raise UsageError if `torch` is not a release.
    """

    gpu: Text = ""
    torch: Text = ""
    cuda: Text | None = None
    cudnn: Annotated[int, Meta(gt=0, lt=LARGEST)] | None = None  # 91900 for 9.19.0
    driver: Text | None = None
    capability: Text | None = None
    num_sms: Count | None = None
    l2_bytes: Count | None = None

    def __post_init__(self) -> None:
        if self.torch:
            parse_release(self.torch)

    @classmethod
    def from_environment(cls, environment: Mapping[str, Any]) -> Machine:
        """Return the machine that the environment of a run or shard describes.

        The environment may lack any of the fields. Raise UsageError if a value is invalid.
        """
        row = {**environment, "cuda": environment.get("torch_cuda")}
        row = {name: value for name, value in row.items() if value is not None}
        try:
            return msgspec.convert(row, cls)
        except msgspec.ValidationError as error:
            raise UsageError(field_error(error, row)) from None

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

    def require_gpu_and_release(self, source: str) -> None:
        """Raise UsageError if the GPU or the release is unknown."""
        for name in ("gpu", "torch"):
            if not getattr(self, name):
                raise UsageError(
                    f"{source}: {name} is missing, but an atlas needs a GPU and a PyTorch release"
                )


def field_error(error: msgspec.ValidationError, row: Mapping[str, Any]) -> str:
    """Format an error of msgspec with the field and its value, such as `cudnn -1: expected …`."""
    text, _, path = str(error).partition(" - at `$.")
    name = re.split(r"[.\[`]", path)[0]
    value = repr(row.get(name))
    shown = value if len(value) <= MAX_SHOWN else f"{value[:MAX_SHOWN]}…"
    return f"{name} {shown}: {text[:1].lower()}{text[1:]}"


@lru_cache(maxsize=16)
def parse_label(label: str) -> Config:
    """Parse the label of a config. Raise UsageError if it is invalid.

    A small cache is enough, because the cells of a config are stored one after the other.
    """
    return parse_config(label)


class Launch(NamedTuple):
    """One kernel launch of a call. A memset has neither a grid nor registers."""

    kernel: str
    grid: Dim3 | None
    block: Dim3 | None
    registers: int | None
    shared_bytes: int | None
    time_us: float | None


@dataclass(frozen=True)
class AtlasCell:
    """The result of a config on a backend. A refused config has no times."""

    config: Config
    backend: str
    regime: str  # the group of sampled configs to which the config belongs, such as `decode`
    status: str
    choice: str | None
    launches: tuple[Launch, ...]
    kernel_us: float | None
    graph_us: float | None
    peak_bytes: int | None
    message: str | None

    def difference(self, other: AtlasCell) -> tuple[str, str] | None:
        """Return the name of the first field that differs, and a description of the difference.

        Return None if the results agree. Ignore a field if one of the cells has no value for it,
        and ignore differences between times up to MAX_TIME_GAP.
        """
        for name in ("status", "choice"):
            mine, its = getattr(self, name), getattr(other, name)
            if mine and its and mine != its:
                return name, f"{mine} ↔ {its}"
        kernels = [[launch[:5] for launch in cell.launches] for cell in (self, other)]
        if all(kernels) and kernels[0] != kernels[1]:
            return "kernels", "the kernels or their launch configurations differ"
        if self.kernel_us and other.kernel_us:
            low, high = sorted((self.kernel_us, other.kernel_us))
            if high / low - 1 > MAX_TIME_GAP:
                return "times", f"{self.kernel_us:g} ↔ {other.kernel_us:g} µs"
        return None


@dataclass(frozen=True)
class Atlas:
    """The measured cells of one machine, stored as columns."""

    machine: Machine
    # Names and messages to which columns refer, and variants. A variant contains the fields of a
    # config that are not in NUMBERS.
    tables: Mapping[str, tuple[Any, ...]]
    columns: Mapping[str, Integers]
    source: str = ""  # path of the file, for messages

    def __len__(self) -> int:
        return len(self.columns["status"])

    @cached_property
    def starts(self) -> Integers:
        """Return the index of the first launch of each sequence, then the number of launches."""
        return np.concatenate([[0], np.cumsum(self.columns["length"])])

    @cached_property
    def time_starts(self) -> Integers:
        """Return the index of the first launch time of each cell, then the number of times."""
        # a cell without launches has the sequence -1, which selects the appended length 0
        lengths = np.append(self.columns["length"], 0)[self.columns["sequence"]]
        return np.concatenate([[0], np.cumsum(lengths)])

    @cached_property
    def _rows(self) -> dict[bytes, int]:
        keys = np.stack([self.columns[name] for name in KEY], axis=1)
        data, width = keys.tobytes(), keys.shape[1] * keys.itemsize
        return {data[row * width : (row + 1) * width]: row for row in range(len(self))}

    @cached_property
    def _variants(self) -> dict[tuple[Any, ...], int]:
        return {
            variant_of(_config(dict.fromkeys(NUMBERS, 1), variant)): code
            for code, variant in enumerate(self.tables["variants"])
        }

    def rows(self, configs: Iterable[Config], backends: Iterable[str]) -> list[int]:
        """Return the row of each config on each backend, sorted by config and then by backend.

        If the atlas does not contain a cell, the row is NOTHING.
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
        """Return the config of the cell in a row."""
        numbers = {name: int(self.columns[name][row]) for name in NUMBERS}
        return _config(numbers, self.tables["variants"][self.columns["variant"][row]])

    def cell(self, row: int) -> AtlasCell:
        """Return the cell in a row."""

        def text(name: str) -> str:
            return str(self.tables[TABLES[name]][self.columns[name][row]])

        def number(name: str) -> int | None:
            value = int(self.columns[name][row])
            return None if value == NOTHING else value

        return AtlasCell(
            config=self.config(row),
            backend=text("backend"),
            regime=text("regime"),
            status=text("status"),
            choice=text("choice") or None,
            launches=self.launches(row),
            kernel_us=_us(number("kernel_ns")),
            graph_us=_us(number("graph_ns")),
            peak_bytes=number("peak_bytes"),
            message=text("message") or None,
        )

    def launches(self, row: int) -> tuple[Launch, ...]:
        """Return the launches of the cell in a row, with their times."""
        sequence = self.columns["sequence"][row]
        if sequence == NOTHING:
            return ()
        first, last = self.starts[sequence : sequence + 2].tolist()
        times = self.columns["time_ns"][self.time_starts[row] :][: last - first].tolist()
        launches = []
        for index, time in zip(range(first, last), times, strict=True):
            kind = self.columns["kind"][index]
            registers, shared = (
                int(self.columns[name][kind]) for name in ("registers", "shared_bytes")
            )
            launches.append(
                Launch(
                    kernel=self.tables["kernels"][self.columns["kernel"][kind]],
                    grid=_dim3(*(self.columns[f"grid_{axis}"][index] for axis in "xyz")),
                    block=_dim3(*(self.columns[f"block_{axis}"][kind] for axis in "xyz")),
                    registers=None if registers == NOTHING else registers,
                    shared_bytes=None if shared == NOTHING else shared,
                    time_us=time / 1e3,
                )
            )
        return tuple(launches)


def _config(numbers: Mapping[str, int], variant: Mapping[str, Any]) -> Config:
    # restore tuples, which JSON stores as lists
    others = {
        name: tuple(each) if isinstance(each, list) else each for name, each in variant.items()
    }
    values: dict[str, Any] = {**numbers, **others}
    return Config(**values)


def _dim3(x: int, y: int, z: int) -> Dim3 | None:
    return None if x == NOTHING else (int(x), int(y), int(z))


def _ns(us: float | None) -> int:
    return NOTHING if us is None else round(us * 1e3)


def _us(ns: int | None) -> float | None:
    return None if ns is None else ns / 1e3


class _Builder:
    """Builds the columns and tables of an atlas while cells are added.

    Columns are arrays and keys are bytes, because tuples of integers would take ten times the
    memory.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._columns = {kind: array("q") for kind in MAX_COUNTS}  # values are stored row by row
        self._tables: dict[str, dict[str, int]] = {name: {} for name in TABLES.values()}
        self._text_bytes = 0
        self._cells: set[bytes] = set()
        self._kinds: dict[bytes, int] = {}
        self._sequences: dict[bytes, int] = {}

    def add(self, cell: AtlasCell) -> None:
        """Add a cell, unless a cell with the same config and backend was added before."""
        others = zip(VARIANT, variant_of(cell.config), strict=True)
        variant = {name: each for name, each in others if each != _DEFAULTS[name]}
        identity = (
            *(getattr(cell.config, name) for name in NUMBERS),
            self._code("variants", json.dumps(variant)),
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

    def build(self, machine: Machine) -> Atlas:
        """Return an atlas with all added cells."""
        columns: dict[str, Integers] = {}
        for kind, values in self._columns.items():
            table = np.asarray(values, np.int64).reshape(-1, WIDTHS[kind]).T
            names = [name for name, each in COLUMNS.items() if each == kind]
            columns.update(zip(names, table, strict=True))
        tables: dict[str, tuple[Any, ...]] = {
            name: tuple(table) for name, table in self._tables.items()
        }
        tables["variants"] = tuple(map(json.loads, tables["variants"]))
        return Atlas(machine, tables, columns, self._source)

    def _append(self, kind: str, values: Sequence[int]) -> None:
        column = self._columns[kind]
        if len(column) + len(values) > WIDTHS[kind] * MAX_COUNTS[kind]:
            raise UsageError(f"{self._source}: more than {MAX_COUNTS[kind]:,} {kind} in one atlas")
        column.extend(values)

    def _code(self, name: str, text: str) -> int:
        table = self._tables[name]
        if text not in table:
            self._text_bytes += len(json.dumps(text)) + 1
            if self._text_bytes > MAX_HEADER_BYTES:
                raise _too_much_text(self._source)
            table[text] = len(table)
        return table[text]

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
        # The key is a digest, because a second copy of the launches would need more memory.
        key = hashlib.blake2b(values, digest_size=16).digest()
        if key not in self._sequences:
            self._append("sequences", (len(launches),))
            self._append("launches", values)
            self._sequences[key] = len(self._sequences)
        return self._sequences[key]


def _too_much_text(source: object) -> UsageError:
    return UsageError(
        f"{source}: more than {MAX_HEADER_BYTES:,} bytes of names and messages in one atlas"
    )


def build_atlas(machine: Machine, cells: Iterable[AtlasCell], source: str = "") -> Atlas:
    """Build an atlas that contains the cells in the given order.

    If several cells have the same config and backend, keep the first of them. Raise UsageError if
    the atlas would exceed MAX_COUNTS or MAX_HEADER_BYTES.
    """
    builder = _Builder(source)
    for cell in cells:
        builder.add(cell)
    return builder.build(machine)


def write_atlas(atlas: Atlas, path: Path, *, force: bool = False) -> None:
    """Write an atlas atomically.

    Raise UsageError if the file exists and `force` is False, or if the header is longer than
    MAX_HEADER_BYTES.
    """
    header = {"version": VERSION, "machine": asdict(atlas.machine), "tables": atlas.tables}
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER_BYTES:
        raise _too_much_text(path)
    arrays = {name: narrowed(atlas.columns[name]) for name in COLUMNS}
    write_arrays({"header": np.frombuffer(text, np.uint8), **arrays}, path, force=force)


def narrowed(values: Array) -> Array:
    """Convert integers to the narrowest signed dtype that can represent all of them."""
    largest = int(np.abs(values).max(initial=0))
    return values.astype(next(f"<i{n}" for n in (1, 2, 4, 8) if largest < 1 << (8 * n - 1)))


def read_atlas(path: Path) -> Atlas:
    """Read an atlas.

    Raise UsageError if the file cannot be read, is not an atlas, has an unsupported version, or was
    cut short, changed or forged.
    """
    name = printable_path(path)
    try:
        with open_input(path) as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise UsageError(
                    f"{name} is not an atlas; list the known atlases with `profharness atlas list`"
                )
        counts = {column: MAX_COUNTS[kind] for column, kind in COLUMNS.items()}
        arrays = read_arrays(path, {"header": MAX_HEADER_BYTES, **counts})
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}; pass the path of an atlas") from None
    try:
        header = decode_json(arrays.pop("header").tobytes(), dict[str, Any])
        if header["version"] == VERSION:
            machine = msgspec.convert(header["machine"], Machine)
            machine.require_gpu_and_release(name)
            tables = _checked_tables(header["tables"])
    except (UsageError, ValueError, TypeError, KeyError, AttributeError, *NOT_A_RECORD):
        raise UsageError(
            f"{name}: the header of the atlas is invalid; get a new copy of the file"
        ) from None
    if header["version"] != VERSION:
        raise UsageError(
            f"{name}: the atlas has version {header['version']}, but this profharness reads "
            f"version {VERSION}"
        )
    _check_columns(arrays, tables, name)
    # pop() frees each array as soon as it is converted to a column
    columns = {each: arrays.pop(each).astype(np.int64, copy=False) for each in COLUMNS}
    atlas = Atlas(machine, tables, columns, name)
    for edges, column in ((atlas.starts, "kind"), (atlas.time_starts, "time_ns")):
        if edges[-1] != len(columns[column]):
            raise UsageError(
                f"{name}: the lengths in the atlas are inconsistent; get a new copy of the file"
            )
    return atlas


def _checked_tables(tables: Mapping[str, list[Any]]) -> dict[str, tuple[Any, ...]]:
    allowed = {"backends": BACKENDS, "statuses": STATUSES, "choices": (*CHOICES, "")}
    checked = {name: tuple(tables[name]) for name in TABLES.values()}
    for variant in checked["variants"]:
        _require(variant.keys() <= set(VARIANT))
        parse_label(msgspec.convert(dict.fromkeys(NUMBERS, 1) | variant, Config).label)
    for name in checked.keys() - {"variants"}:
        _require(all(isinstance(each, str) for each in checked[name]))
        _require(set(checked[name]) <= set(allowed.get(name, checked[name])))
    return checked


def _check_columns(
    arrays: Mapping[str, Array], tables: Mapping[str, tuple[Any, ...]], source: str
) -> None:
    """Raise UsageError if columns have different lengths or contain values out of bounds."""
    counts: dict[str, int] = {}
    for name, kind in COLUMNS.items():
        count = counts.setdefault(kind, len(arrays[name]))
        if arrays[name].shape != (count,) or arrays[name].dtype.kind != "i":
            raise UsageError(
                f"{source}: column {name} of the atlas is invalid; get a new copy of the file"
            )
    for name, values in arrays.items():
        least, bound = (1 if name in NUMBERS else NOTHING), LARGEST
        if name in TABLES:
            least, bound = 0, len(tables[TABLES[name]])
        elif name == "length":
            least, bound = 0, counts["launches"] + 1
        elif name in ("sequence", "kind"):
            least, bound = (NOTHING if name == "sequence" else 0), counts[f"{name}s"]
        if len(values) and not least <= values.min() <= values.max() < bound:
            raise UsageError(
                f"{source}: column {name} of the atlas is damaged; get a new copy of the file"
            )
    for what in ("grid", "block"):
        absent = [arrays[f"{what}_{axis}"] == NOTHING for axis in "xyz"]
        if not all(np.array_equal(absent[0], other) for other in absent[1:]):
            raise UsageError(
                f"{source}: a {what} in the atlas is damaged; get a new copy of the file"
            )


def packaged_atlases() -> tuple[Path, ...]:
    """Return the paths of the atlases in the package."""
    return atlas_files(PACKAGED)


def atlas_files(folder: Path) -> tuple[Path, ...]:
    """Return the paths of the atlases in a folder. Files of models are excluded.

    Return no paths if there is no such folder, or no permission to read it.
    """
    try:
        paths = sorted(folder.glob(f"*{SUFFIX}"))
    except PermissionError:
        return ()
    return tuple(path for path in paths if not path.name.endswith(MODEL_SUFFIX))


def write_arrays(arrays: Mapping[str, Array], path: Path, *, force: bool = False) -> None:
    """Write a compressed `.npz` file atomically.

    Raise UsageError if the file exists and `force` is False.
    """
    with atomic_file(path, force=force) as file:
        np.savez_compressed(file, allow_pickle=False, **dict(arrays))


def read_arrays(path: Path, counts: Mapping[str, int]) -> dict[str, Array]:
    """Read the arrays of a file.

    `counts` contains the names of the arrays, and the maximum number of values of each array. Raise
    OSError if the file cannot be read. Raise UsageError if the file contains other or larger
    arrays, or was cut short or changed.
    """
    data = read_input(path)
    try:
        # Check the size of the directory, because zipfile reads all of it. Reject zip64 records,
        # because they could declare a different size.
        signature, directory, _ = END.unpack(data[-END.size :])
        _require(signature == b"PK\5\6" and b"PK\6\7" not in data[-END.size - 20 : -END.size])
        _require(directory <= MAX_ENTRY * len(counts))
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {each.filename.removesuffix(".npy"): each for each in archive.infolist()}
            _require(members.keys() == counts.keys() and len(archive.infolist()) == len(counts))
            unpacked = sum(each.file_size for each in members.values())
            _require(unpacked <= max(ALWAYS_UNPACKED, MAX_RATIO * len(data)))
            return {name: _read_array(archive, members[name], counts[name]) for name in members}
    except FORGED:
        text = f"{printable_path(path)}: the file is truncated or was changed; get a new copy"
        raise UsageError(text) from None


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo, limit: int) -> Array:
    _require(member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))
    with archive.open(member) as file:
        magic, length = START.unpack(file.read(START.size))
        header = HEADER.fullmatch(file.read(length))
        if magic != b"\x93NUMPY\1\0" or header is None:
            raise ValueError
        dtype = np.dtype(header[1].decode())
        shape = tuple(int(size) for size in header[2].split(b",") if size)
        left = member.file_size - file.tell()
        _require(dtype.str in DTYPES and math.prod(shape) <= limit)
        _require(math.prod(shape) * dtype.itemsize == left)
        return np.frombuffer(file.read(left), dtype).reshape(shape)


def _require(condition: bool) -> None:
    if not condition:
        raise ValueError
