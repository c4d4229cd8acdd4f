"""Parse the CSV that Nsight Compute prints, and define the data structures of a report.

ncu prints two forms: the table of `--csv --page raw`, which has one kernel per line, and the long
form, which has one metric per line. The file is read line by line, because it may be large and
because the output of the profiled program may interrupt the table. Numbers may be in the format of
any locale.
"""

from __future__ import annotations

import csv
import math
import re
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from profharness.errors import TraceFormatError
from profharness.traces import NCU_HEADER, lines_of

DEFAULT_DOMAIN = "<default domain>"
DURATION = "gpu__time_duration.sum"

PUSH_POP = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
START_END = "Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
OWN_COLUMNS = (
    "ID", "Process ID", "Process Name", "Host Name", PUSH_POP, START_END, "Kernel Name",
    "Kernel Time", "Context", "Stream", "Block Size", "Grid Size", "Device", "CC",
)  # fmt: skip
LONG_COLUMNS = ("Metric Name", "Metric Unit", "Metric Value")
EXPECTED = "a table that `ncu --csv --page raw --print-units base` printed"
AGAIN = "copy the file again, or make it again: ncu --import REPORT.ncu-rep --csv --page raw"

DAMAGED = "{n} lines look like damaged rows and are left out"
WITNESSES = 1000  # maximum number of numbers that are examined to find the decimal mark
_MARKS = " \u00a0\u202f'\u2019\ufffd"  # thousands separators of locales, in addition to , and .
_NUMBER = re.compile(r"[+-]?\d[\d.,]*(?:[eE][+-]?\d+)?")
_NO_MARKS = str.maketrans(dict.fromkeys(_MARKS))
_PLAIN = re.compile(r"-?\d+(?:\.\d+)?")
_WHOLE = re.compile(r"\d{1,18}")  # an integer that the store can hold
_TRIPLE = re.compile(r"\(\s*(\d{1,18}),\s*(\d{1,18}),\s*(\d{1,18})\s*\)")
_NO_VALUE = re.compile(r"(?:\(!\)\s*)?(?:n/?a|[+-]?nan|[+-]?inf(?:inity)?|-*)", re.IGNORECASE)
_PROFILED = '==PROF== Profiling "'  # ncu prints this before the table, once for each result
# Number of parts between the name of a range and its message. They contain the payload, the colour and
# the type of the message.
ITEM_TAIL = 5
MAX_DOMAIN_PARTS = 8  # maximum number of parts in a domain's name, which may contain colons
# If at least this fraction of the kernels has a metric, the metric is reported as missing in the other
# kernels.
MOST = 0.9

DEVICE_PREFIX = "device__attribute_"
# Prefixes of metrics that are constants of the machine, and so have the same value for every kernel.
CONSTANTS = (DEVICE_PREFIX, "nvlink__")
# A report may use at most PLACES_A_BYTE slots of memory for each byte of the file, but MIN_PLACES slots
# are always allowed. A slot has 8 bytes.
PLACES_A_BYTE, MIN_PLACES = 0.25, 1 << 24
LAUNCH_PLACES, RANGE_PLACES, ENTRY_PLACES = 48, 24, 16  # slots per launch, range and dict entry
# A table of metrics may use at most PLACES_A_VALUE slots for each value, but MIN_TABLE_PLACES slots are
# always allowed. If a table needs more, its kernels have hardly any metrics in common.
PLACES_A_VALUE, MIN_TABLE_PLACES = 64, 1 << 20

Triple = tuple[int, int, int]


class NvtxRange(NamedTuple):
    """An NVTX range that was open when a kernel was launched."""

    domain: str
    name: str


@dataclass(frozen=True, slots=True)
class NcuLaunch:
    """A profiled kernel.

    `name` is the mangled name. If a CSV does not contain the mangled name, it is the name that ncu
    demangled. `values` contains the numeric metrics in the units of the report, and `texts` contains
    the other metrics. Only the first launch on each device has the constants of the device.
    `push_pop` contains the stack of each domain, outermost range first. `grid` and `block` come from
    the columns of a CSV. They are None if the report is not a CSV.
    """

    name: str
    values: Mapping[str, float]
    texts: dict[str, str]
    device: int = 0
    stream: int | None = None
    start_end: tuple[NvtxRange, ...] = ()
    push_pop: tuple[NvtxRange, ...] = ()
    grid: Triple | None = None
    block: Triple | None = None


@dataclass(frozen=True, slots=True)
class NcuReport:
    """The kernels in a report, and the unit of each metric.

    `skipped` counts the results that belong to whole ranges or graphs instead of kernels. `warnings`
    describes parts of the file that are unreadable or incomplete.
    """

    launches: list[NcuLaunch]
    units: dict[str, str]
    skipped: int = 0
    warnings: tuple[str, ...] = ()


class Values(Mapping[str, float]):
    """A compact mapping of the numeric metrics of a kernel.

    All kernels of a report share a dict that maps the name of a metric to its position in the array of
    values. NaN in the array means that the kernel has no value for the metric.
    """

    __slots__ = ("_places", "_row")

    def __init__(self, places: dict[str, int], values: Mapping[str, float]) -> None:
        last = max((places.setdefault(name, len(places)) for name in values), default=-1)
        row = array("d", [math.nan]) * (last + 1)
        for name, value in values.items():
            row[places[name]] = value
        self._places, self._row = places, row

    def __getitem__(self, name: str) -> float:
        place = self._places[name]
        if place >= len(self._row) or math.isnan(value := self._row[place]):
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        row = zip(self._places, self._row, strict=False)
        return (name for name, value in row if not math.isnan(value))

    def __len__(self) -> int:
        return sum(not math.isnan(value) for value in self._row)


class LaunchCompactor:
    """Converts launches to a compact form, and raises an error if a report needs too much memory."""

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._most = self._left = max(MIN_PLACES, int(size * PLACES_A_BYTE))
        self._places: dict[str, int] = {}
        self._devices: set[int] = set()

    def allocate(self, places: int) -> None:
        """Count slots of memory as used. Raise TraceFormatError if the report uses too many."""
        self._left -= places
        if self._left < 0:
            message = f"more values than a report of its size has ({self._most:,} places are full)"
            raise TraceFormatError(self._path, message, expected="fewer kernels or metrics")

    def has(self, device: int) -> bool:
        """Return whether the constants of a device are known from an earlier launch."""
        return device in self._devices

    def compact(self, launch: NcuLaunch) -> NcuLaunch:
        """Convert a launch to its compact form.

        The first launch on each device is not changed. Raise TraceFormatError if the report uses too
        much memory.
        """
        ranges = len(launch.start_end) + len(launch.push_pop)
        self.allocate(LAUNCH_PLACES + ENTRY_PLACES * len(launch.texts) + RANGE_PLACES * ranges)
        if launch.device not in self._devices:
            self._devices.add(launch.device)  # this launch contains the constants of the device
            self.allocate(ENTRY_PLACES * len(launch.values))
            return launch
        values = Values(self._places, launch.values)
        self.allocate(len(self._places))
        return replace(launch, values=values)


def check_shape(path: Path, kernels: int, metrics: int, filled: int) -> None:
    """Raise TraceFormatError if a table of kernels and metrics would be nearly empty.

    `filled` is the number of values in the table.
    """
    if kernels * metrics > max(MIN_TABLE_PLACES, PLACES_A_VALUE * filled):
        message = f"{kernels} kernels with {metrics} metrics, but {filled} values"
        raise TraceFormatError(path, message, expected="kernels that have most metrics in common")


@dataclass(slots=True)
class TableWarnings:
    """Warnings about a table. Each warning has a count and the number of the first line that it
    concerns. Lines are counted from the header.
    """

    counts: Counter[str] = field(default_factory=Counter)
    lines: dict[str, int] = field(default_factory=dict)

    def add(self, text: str, line: int | None = None) -> None:
        """Count a warning. `{n}` in its text is later replaced by the count."""
        self.counts[text] += 1
        if line is not None:
            self.lines.setdefault(text, line)

    def texts(self) -> tuple[str, ...]:
        """Return the text of each warning, in the order of their first occurrence."""
        at = {text: f" (line {line} after the header)" for text, line in self.lines.items()}
        return tuple(
            text.replace("{n}", str(count)) + at.get(text, "")
            for text, count in self.counts.items()
        )


class Row(NamedTuple):
    """A row of the table. `line` is its line number, counted from the header."""

    line: int
    cells: list[str]


def read_csv_text(source: str | Path, path: Path) -> NcuReport:
    """Parse the CSV that ncu printed. `source` is the text itself or a file.

    Error messages contain `path`. Raise TraceFormatError if the table is damaged or truncated, if
    metrics have labels instead of names, if a device is not a number, or if the report needs too much
    memory.
    """
    table = Table(source, path)
    size = len(source) if isinstance(source, str) else source.stat().st_size
    compactor = LaunchCompactor(path, size)
    kernels = (row for row in table.rows if row.cells[0])
    ids: list[int] = []
    if table.is_long:
        units, gathered = _gathered(table, kernels, compactor)
        ids += (block.id for block in gathered)
        mark = decimal_mark(cell for block in gathered for _, cell in block.metrics)
        launches, doubts = _launches(gathered, mark, units, path, compactor)
    else:
        units, metrics = table.units()
        again = Table(source, path)
        values = (row.cells[place] for row in again.rows if row.cells[0] for place in metrics)
        mark = decimal_mark(values)
        blocks = _blocks(table, _distinct(kernels, table.doubts), metrics, ids)
        launches, doubts = _launches(blocks, mark, units, path, compactor)
    counted = _doubt_ids(ids, table.lines.profiled)
    warnings = (*table.doubts.texts(), *counted.texts(), *table.odd.texts(), *doubts.texts())
    return NcuReport(launches, units, warnings=warnings)


def read_text(path: Path) -> str:
    """Return the text of a CSV file whose encoding is UTF-8 or UTF-16.

    Raise TraceFormatError if the file cannot be read.
    """
    return "".join(lines_of(path, path))


def read_table(text: str, path: Path) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of ncu's table. All rows have as many cells as the header.

    The first row contains the units and has no ID. The long form has no such row. Raise
    TraceFormatError if the header, the units or a row are missing or truncated.
    """
    table = Table(text, path)
    first = [] if table.is_long else [table.first.cells]
    return table.columns, [*first, *(row.cells for row in table.rows)]


class Lines:
    """Iterates over the lines of ncu's output.

    Each element is a line without its line break, and whether the line ended with a line break.
    `profiled` counts the kernels that ncu said it profiled, in the lines read so far.
    """

    def __init__(self, source: str | Path, path: Path) -> None:
        self.profiled = 0
        self._source, self._path = source, path

    def __iter__(self) -> Iterator[tuple[str, bool]]:
        for line in lines_of(self._source, self._path):
            ended = line.endswith(("\n", "\r"))
            for part in _overwritten(line.rstrip("\r\n")) if "\r" in line else [line.rstrip("\n")]:
                self.profiled += part.count(_PROFILED)
                yield part, ended


def _overwritten(line: str) -> Iterator[str]:
    """Divide a line at carriage returns, which progress bars write.

    Carriage returns inside quotes do not count.
    """
    parts: list[str] = []
    quotes = 0
    for part in line.split("\r"):
        parts.append(part)
        quotes += part.count('"')
        if quotes % 2 == 0:
            yield "\r".join(parts)
            parts.clear()
    if parts:
        yield "\r".join(parts)


class Table:
    """The table that ncu printed, in a text or a file.

    `rows` is an iterator over the rows after the row of units. It reads the file as needed.

    Raise TraceFormatError if the header or the units are missing or truncated. The iterator raises
    TraceFormatError if a row is truncated.
    """

    def __init__(self, source: str | Path, path: Path) -> None:
        self.path = path
        self.doubts, self.odd = (
            TableWarnings(),
            TableWarnings(),
        )  # findings about lines, and about the header
        self.lines = Lines(source, path)
        lines = iter(self.lines)
        header = next((line.strip() for line, _ in lines if NCU_HEADER.match(line)), None)
        if header is None:
            raise TraceFormatError(path, "no header line of ncu's CSV", expected=EXPECTED)
        if _is_open(header):
            raise TraceFormatError(path, f"the header is cut off; {AGAIN}", expected=EXPECTED)
        self.columns = _cells(header)
        self.is_long = set(LONG_COLUMNS) <= set(self.columns)
        rows = _records(lines, self.columns, path, self.doubts, header=header)
        first = next(rows, None)
        if first is None or (first.cells[0] and not self.is_long):
            missing = "first row" if self.is_long else "row of units"
            message = f"no {missing} behind the header, so the table is cut off; {AGAIN}"
            raise TraceFormatError(path, message, expected=EXPECTED)
        self.first = first
        self.rows = chain([first], rows) if self.is_long else rows

    def units(self) -> tuple[dict[str, str], list[int]]:
        """Return the units of the metrics, and the positions of their columns.

        Call this only for the form that has one kernel per line. If several columns have the same
        name, the last of them is used.
        """
        place = {name: index for index, name in enumerate(self.columns)}
        if len(place) < len(self.columns):
            self.odd.add("columns stand twice in the header; the last of each counts")
        metrics = [name for name in place if name not in OWN_COLUMNS]
        if odd := [name for name in metrics if "__" not in name]:
            shown = ", ".join(repr(name[:40]) for name in odd[:3])
            self.odd.add(f"{len(odd)} columns of unknown names: {shown}")
        return {name: self.first.cells[place[name]] for name in metrics}, [
            place[name] for name in metrics
        ]


def decimal_mark(cells: Iterable[str]) -> str:
    """Return the decimal mark of the numbers in a file, which is `.` or `,`.

    Numbers such as `1.234,5` and `0,25` show which mark the file uses. A number such as `84,480` does
    not. Return `.` if no number shows the mark.
    """
    marks = Counter(islice(filter(None, map(_mark, cells)), WITNESSES))
    return "," if marks[","] > marks["."] else "."


def number(text: str, mark: str = ".") -> float | None:
    """Parse a number with the given decimal mark.

    Return None if the text is not a number or the number is infinite.
    """
    # Nearly all numbers match here. The rest of this function takes five times as long.
    if mark == "." and _PLAIN.fullmatch(text):
        return _finite(text)
    bare = text.strip().translate(_NO_MARKS)
    if not _NUMBER.fullmatch(bare):
        return None
    other = "," if mark == "." else "."
    return _finite(bare.replace(other, "").replace(mark, "."))


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


@lru_cache(maxsize=64)
def nvtx_ranges(cell: str, *, numbered: bool = False) -> tuple[NvtxRange, ...]:
    """Return the ranges that an NVTX cell describes, in the order of the cell.

    `numbered` says that the text of each range starts with its id, as for start/end ranges.
    """
    body = re.sub(r'^\s*\d+\s+(?=")', "", cell).strip()
    ranges = []
    for item in body[1:-1].split('"  "') if body.startswith('"') else [body]:
        item = re.sub(r"^\d+:", "", item) if numbered else item
        if (parsed := _nvtx_range(item.split(":"))) is not None:
            ranges.append(parsed)
    return tuple(ranges)


def _nvtx_range(parts: list[str]) -> NvtxRange | None:
    """Return the range that an item of an NVTX cell describes, or None if the range has no name.

    `parts` are the parts of the item between colons. The name may contain colons, too. Usually, the
    message at the end repeats the name, which shows how long the name is. Otherwise, the name is
    assumed to be as long as possible.
    """
    for domain in range(1, min(len(parts) - ITEM_TAIL, MAX_DOMAIN_PARTS + 1)):
        count, odd = divmod(len(parts) - ITEM_TAIL - domain, 2)
        name = ":".join(parts[domain : domain + count])
        if not odd and name and parts[domain : domain + count] == parts[-count:]:
            return NvtxRange(":".join(parts[:domain]) or DEFAULT_DOMAIN, name)
    name = ":".join(parts[1 : -ITEM_TAIL - 1])
    return NvtxRange(parts[0] or DEFAULT_DOMAIN, name) if name else None


def _cells(line: str) -> list[str]:
    return next(csv.reader([line]), [])


def _is_open(line: str) -> bool:
    """Return whether a line ends inside a cell.

    This is the case if a quote is open, or if the line starts with a quote but does not end with a
    quote.
    """
    line = line.rstrip()
    return line.count('"') % 2 == 1 or (line.startswith('"') and not line.endswith('"'))


def _records(
    lines: Iterator[tuple[str, bool]],
    columns: list[str],
    path: Path,
    doubts: TableWarnings,
    *,
    header: str,
) -> Iterator[Row]:
    """Yield the row of units and the rows of kernels.

    Other lines are skipped. If a skipped line resembles a row, it is counted as damaged.

    ncu quotes every cell, but a spreadsheet may remove the quotes. If the header or an earlier row has
    no quotes, a line that has no quotes and too few columns is an error. Otherwise, the profiled
    program is assumed to have printed such a line.
    """
    bare = not header.startswith('"')
    for count, (line, ended) in enumerate(lines, start=1):
        if not line.startswith(('"', ",")) and not line[:1].isdigit():
            if _resembles(line, columns, bare=bare):
                doubts.add(DAMAGED, count)
            continue
        try:
            cells = _cells(line)
        except csv.Error as error:
            if not line.startswith('"'):
                if _resembles(line, columns, bare=bare):
                    doubts.add(DAMAGED, count)
                continue
            raise _bad_row(path, count, f"cannot be read ({error})") from None
        if cells == columns:
            doubts.add("the header stands {n} times more", count)
            continue
        if cells[0] and not _WHOLE.fullmatch(cells[0]):
            if _resembles(line, columns, bare=bare):
                doubts.add(DAMAGED, count)
            continue
        quoted = line.startswith('"')
        whole = len(cells) == len(columns)
        if not (quoted or whole or (bare and len(cells) > 1)):
            if _resembles(line, columns, bare=bare):
                doubts.add(DAMAGED, count)
            continue  # the profiled program printed numbers
        if (quoted and _is_open(line)) or not (quoted or ended or line.endswith('"')):
            raise _bad_row(path, count, "is cut off")
        if not whole:
            raise _bad_row(path, count, f"has {len(cells)} of {len(columns)} columns")
        bare = bare or not quoted
        yield Row(count, cells)


def _resembles(line: str, columns: list[str], *, bare: bool) -> bool:
    """Return whether a line that is not a row contains so many cell borders that it may be a damaged
    row.
    """
    quoted = line.count('","') >= max(3, len(columns) // 2)
    return quoted or (bare and line.count(",") >= max(5, len(columns) - 2))


def _bad_row(path: Path, count: int, what: str) -> TraceFormatError:
    message = f"line {count} after the header {what}; {AGAIN}"
    return TraceFormatError(path, message, expected=EXPECTED)


class KernelCells(NamedTuple):
    """The cells of a kernel.

    `own` contains the cells of ncu's own columns by name. `metrics` contains the name and the cell of
    each metric.
    """

    line: int
    id: int
    own: dict[str, str]
    metrics: Iterable[tuple[str, str]]


def _distinct(rows: Iterable[Row], doubts: TableWarnings) -> Iterator[Row]:
    """Yield the rows that are not exact copies of earlier rows.

    A file contains copies if it was written twice.
    """
    seen: set[int] = set()
    for row in rows:
        if (key := hash(tuple(row.cells))) in seen:
            doubts.add("{n} rows are exact copies of earlier ones and are left out", row.line)
            continue
        seen.add(key)
        yield row


def _blocks(
    table: Table, rows: Iterable[Row], places: list[int], ids: list[int]
) -> Iterator[KernelCells]:
    """Yield the kernels of a table that has one kernel per line. Append their IDs to `ids`."""
    own = [(index, name) for index, name in enumerate(table.columns) if name in OWN_COLUMNS]
    names = [table.columns[place] for place in places]
    for line, cells in rows:
        ids.append(int(cells[0]))
        metrics = zip(names, map(cells.__getitem__, places), strict=True)
        yield KernelCells(line, ids[-1], {name: cells[index] for index, name in own}, metrics)


def _gathered(
    table: Table, rows: Iterable[Row], compactor: LaunchCompactor
) -> tuple[dict[str, str], list[KernelCells]]:
    """Return the units and the kernels of the long form.

    Rows that have no metric are left out, because they contain ncu's advice to the user.
    """
    place = {name: index for index, name in enumerate(table.columns)}
    name_at, unit_at, value_at = (place[name] for name in LONG_COLUMNS)
    own = [(name, place[name]) for name in table.columns if name in OWN_COLUMNS]
    units: dict[str, str] = {}
    kernels: dict[int, tuple[Row, dict[str, str]]] = {}
    for row in rows:
        line, cells = row
        name, unit = sys.intern(cells[name_at]), cells[unit_at]
        first, metrics = kernels.setdefault(int(cells[0]), (row, {}))
        compactor.allocate(ENTRY_PLACES if metrics else LAUNCH_PLACES + ENTRY_PLACES * len(cells))
        if any(first.cells[index] != cells[index] for key, index in own if key != "ID"):
            table.doubts.add(
                "{n} rows disagree with the first row of their kernel, which counts", line
            )
        if "__" not in name:
            if name:
                message = (
                    f"metrics under labels such as {name[:40]!r}; export the report with --page raw"
                )
                raise TraceFormatError(table.path, message, expected=EXPECTED)
            continue
        if units.setdefault(name, unit) != unit:
            message = (
                f"{name[:80]} in {units[name][:40]} and in {unit[:40]}; export with --page raw"
            )
            raise TraceFormatError(table.path, message, expected=EXPECTED)
        if name in metrics:
            table.doubts.add("{n} rows tell a metric of a kernel again; the first counts", line)
        metrics.setdefault(name, cells[value_at])
    filled = [metrics for _, metrics in kernels.values()]
    check_shape(table.path, len(filled), len(units), sum(map(len, filled)))
    _check_metrics(filled, table.doubts)
    blocks = [
        KernelCells(
            row.line, number, {key: row.cells[index] for key, index in own}, metrics.items()
        )
        for number, (row, metrics) in kernels.items()
    ]
    return units, blocks


def _check_metrics(kernels: list[dict[str, str]], doubts: TableWarnings) -> None:
    """Add a warning if kernels lack metrics that nearly all other kernels have.

    The last kernel in a truncated file is an example.
    """
    have = Counter(name for metrics in kernels for name in metrics)
    enough = max(2, min(len(kernels) - 1, MOST * len(kernels)))
    common = {name for name, count in have.items() if count >= enough}
    for metrics in kernels:
        if missing := len(common - metrics.keys()):
            doubts.counts["{n} values are missing that nearly all other kernels have"] += missing


def _doubt_ids(ids: list[int], profiled: int) -> TableWarnings:
    """Return warnings about gaps and repetitions in the IDs of the kernels.

    Also warn if the table contains fewer kernels than ncu profiled.
    """
    doubts = TableWarnings()
    distinct = set(ids)
    if gaps := max(distinct, default=-1) + 1 - len(distinct):
        doubts.counts["the ids of kernels have gaps: {n} are missing"] = gaps
    if again := len(ids) - len(distinct):
        doubts.counts["{n} kernels have the id of an earlier one; these may be several tables"] = (
            again
        )
    if profiled > len(ids):
        doubts.add(f"ncu says that it profiled {profiled} kernels, the table has {len(ids)}")
    return doubts


def _launches(
    blocks: Iterable[KernelCells],
    mark: str,
    units: dict[str, str],
    path: Path,
    compactor: LaunchCompactor,
) -> tuple[list[NcuLaunch], TableWarnings]:
    constants = frozenset(name for name in units if name.startswith(CONSTANTS))
    doubts = TableWarnings()
    numeric: set[str] = set()
    launches, lines = [], []
    for block in blocks:
        device = _device(block, path)
        left_out = constants if compactor.has(device) else frozenset()
        launch = _launch(block, mark, device, left_out, doubts)
        numeric.update(launch.values)
        launches.append(compactor.compact(launch))
        lines.append(block.line)
    for line, launch in zip(lines, launches, strict=True):
        for name, text in launch.texts.items():
            if name in numeric and not _NO_VALUE.fullmatch(text):
                doubts.add("{n} values of metrics are no numbers and are left out", line)
    return launches, doubts


def _device(block: KernelCells, path: Path) -> int:
    text = block.own.get("Device", "")
    if text and not _WHOLE.fullmatch(text):
        raise _bad_row(path, block.line, f"has {text[:40]!r} for a device")
    return int(text or 0)


def _launch(
    block: KernelCells, mark: str, device: int, left_out: frozenset[str], doubts: TableWarnings
) -> NcuLaunch:
    """Convert the cells of a kernel to a launch.

    `left_out` contains the metrics to ignore because an earlier launch on the device has them.
    """
    values: dict[str, float] = {}
    texts: dict[str, str] = {}
    for name, cell in block.metrics:
        if name in left_out:
            continue
        value = number(cell, mark)
        if value is not None:
            values[name] = value
        elif cell:
            texts[name] = sys.intern(cell)
    own = block.own
    return NcuLaunch(
        name=own["Kernel Name"],
        values=values,
        texts=texts,
        device=device,
        stream=_stream(block, doubts),
        start_end=nvtx_ranges(own.get(START_END, ""), numbered=True),
        push_pop=nvtx_ranges(own.get(PUSH_POP, "")),
        grid=_triple(block, "Grid Size", doubts),
        block=_triple(block, "Block Size", doubts),
    )


def _stream(block: KernelCells, doubts: TableWarnings) -> int | None:
    text = block.own.get("Stream", "")
    if not text or _WHOLE.fullmatch(text):
        return int(text) if text else None
    doubts.add("{n} cells of Stream could not be read", block.line)
    return None


def _triple(block: KernelCells, column: str, doubts: TableWarnings) -> Triple | None:
    text = block.own.get(column, "").strip()
    match = _TRIPLE.fullmatch(text)
    if match:
        return int(match[1]), int(match[2]), int(match[3])
    if text:
        doubts.add(f"{{n}} cells of {column} could not be read", block.line)
    return None


def _mark(text: str) -> str | None:
    """Return the decimal mark that a number uses, or None if the number does not show it."""
    bare = text.strip().translate(_NO_MARKS)
    if ("." not in bare and "," not in bare) or not _NUMBER.fullmatch(bare):
        return None
    digits = re.split("[eE]", bare.lstrip("+-"))[0]
    last = "." if digits.rfind(".") > digits.rfind(",") else ","
    other = "," if last == "." else "."
    head, _, tail = digits.rpartition(last)
    if other in head:
        return last if last not in head else None
    if last in head:
        return other  # repeated marks separate thousands
    return last if len(tail) != 3 or len(head) > 3 or head.startswith("0") else None
