"""Read and write the CSV of Nsight Compute, and define the data structures of a report.

ncu prints two forms: the table of `--csv --page raw`, which has one kernel per line, and the long
form, which has one metric per line. The file is read line by line, because it may be large and
because the output of the profiled program may be mixed into the table. Numbers may be in the format
of any locale.
"""

from __future__ import annotations

import csv
import io
import math
import re
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path

from profharness.errors import TraceFormatError, counted, with_count
from profharness.files import open_input
from profharness.traces import NCU_HEADER, UTF_16

DEFAULT_DOMAIN = "<default domain>"
DURATION = "gpu__time_duration.sum"
PUSH_POP = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
START_END = "Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
OWN_COLUMNS = (
    "ID", "Process ID", "Process Name", "Host Name", PUSH_POP, START_END, "Kernel Name",
    "Kernel Time", "Context", "Stream", "Block Size", "Grid Size", "Device", "CC",
)  # fmt: skip
LONG_COLUMNS = ("Metric Name", "Metric Unit", "Metric Value")
WRITTEN_COLUMNS = tuple(column for column in OWN_COLUMNS if column != "Kernel Time")
UNKNOWN_ID = "0"
EXPECTED = "a table printed by `ncu --csv --page raw --print-units base`"
AGAIN = "copy the file again, or create it again with: ncu --import REPORT.ncu-rep --csv --page raw"
DAMAGED = "{n} [line looks like a damaged row and is|lines look like damaged rows and are] skipped"
MAX_LINE = 1 << 22  # maximum length of a line, in characters
WITNESSES = 1000  # maximum number of numbers that are read to find the decimal mark
# Number of parts between the name of a range and its message. These parts contain the payload, the
# colour and the type of the message.
ITEM_TAIL = 5
MAX_DOMAIN_PARTS = 8  # maximum number of colon-separated parts of a domain's name
# If at least this fraction of the kernels has a metric, the metric is reported as missing in the
# other kernels.
MOST = 0.9
DEVICE_PREFIX = "device__attribute_"
# Prefixes of metrics that are constants of the machine, so their values are the same for all
# kernels.
CONSTANTS = (DEVICE_PREFIX, "nvlink__")
# A report may use at most PLACES_A_BYTE slots of memory for each byte of the file, but MIN_PLACES
# slots are always allowed. A slot has 8 bytes.
PLACES_A_BYTE, MIN_PLACES = 0.25, 1 << 24
LAUNCH_PLACES, RANGE_PLACES, ENTRY_PLACES = 48, 24, 16  # slots per launch, range and dict entry
# A table of metrics may use at most PLACES_A_VALUE slots for each value, but MIN_TABLE_PLACES slots
# are always allowed. If a table needs more, its kernels have hardly any metrics in common.
PLACES_A_VALUE, MIN_TABLE_PLACES = 64, 1 << 20

_MARKS = " \u00a0\u202f'\u2019\ufffd"  # thousands separators of locales, in addition to , and .
_NUMBER = re.compile(r"[+-]?\d[\d.,]*(?:[eE][+-]?\d+)?")
_NO_MARKS = str.maketrans(dict.fromkeys(_MARKS))
_PLAIN = re.compile(r"-?\d+(?:\.\d+)?")
_WHOLE = re.compile(r"\d{1,18}")  # an integer that fits into the store
_TRIPLE = re.compile(r"\(\s*(\d{1,18}),\s*(\d{1,18}),\s*(\d{1,18})\s*\)")
_NO_VALUE = re.compile(r"(?:\(!\)\s*)?(?:n/?a|[+-]?nan|[+-]?inf(?:inity)?|-*)", re.IGNORECASE)
_PROFILED = '==PROF== Profiling "'  # ncu prints this before the table, once for each result

Triple = tuple[int, int, int]
NvtxRange = tuple[str, str]
"""The domain and the name of a range that was open when a kernel was launched."""
_Row = tuple[int, list[str]]
"""The line number of a row, counted from the header, and its cells."""
_KernelCells = tuple[int, dict[str, str], Iterable[tuple[str, str]]]
"""A line number, the cells of ncu's own columns by name, and the name and cell of each metric."""


@dataclass(frozen=True, slots=True)
class NcuLaunch:
    """A profiled kernel."""

    name: str  # the mangled name, or the demangled name if a CSV contains no mangled names
    # `values` contains the numeric metrics in the units of the report, and `texts` the other
    # metrics. The constants of a device are stored only in the first launch on the device.
    values: Mapping[str, float]
    texts: dict[str, str]
    device: int = 0
    stream: int | None = None
    start_end: tuple[NvtxRange, ...] = ()
    push_pop: tuple[NvtxRange, ...] = ()  # the stack of each domain, outermost range first
    grid: Triple | None = None  # `grid` and `block` are read from the columns of a CSV
    block: Triple | None = None


@dataclass(frozen=True, slots=True)
class NcuReport:
    """The kernels in a report, and the unit of each metric."""

    launches: list[NcuLaunch]
    units: dict[str, str]
    skipped: int = 0  # number of results that belong to whole ranges or graphs instead of kernels
    warnings: tuple[str, ...] = ()


class Values(Mapping[str, float]):
    """A compact mapping of the numeric metrics of a kernel.

    All kernels of a report share the dict that maps the name of a metric to its position. NaN means
    that the kernel has no value for the metric.
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
    """Converts launches to a compact form, and raises an error if a report needs too much memory.

    `devices` contains the devices whose constants are known from an earlier launch.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.devices: set[int] = set()
        self._path = path
        self._most = self._left = max(MIN_PLACES, int(size * PLACES_A_BYTE))
        self._places: dict[str, int] = {}

    def allocate(self, places: int) -> None:
        """Count slots of memory as used.

        Raise TraceFormatError if the report uses too many slots.
        """
        self._left -= places
        if self._left < 0:
            message = (
                f"the report contains more than {self._most:,} values, too many for a report of "
                "its size"
            )
            raise TraceFormatError(self._path, message, expected="fewer kernels or metrics")

    def compact(self, launch: NcuLaunch) -> NcuLaunch:
        """Convert a launch to its compact form, unless it is the first launch on its device."""
        ranges = len(launch.start_end) + len(launch.push_pop)
        self.allocate(LAUNCH_PLACES + ENTRY_PLACES * len(launch.texts) + RANGE_PLACES * ranges)
        if launch.device not in self.devices:
            self.devices.add(launch.device)
            self.allocate(ENTRY_PLACES * len(launch.values))
            return launch
        values = Values(self._places, launch.values)
        self.allocate(len(self._places))
        return replace(launch, values=values)


def check_shape(path: Path, kernels: int, metrics: int, filled: int) -> None:
    """Raise TraceFormatError if a table with `filled` values would be nearly empty."""
    if kernels * metrics > max(MIN_TABLE_PLACES, PLACES_A_VALUE * filled):
        message = (
            f"{counted(kernels, 'kernel')} and {counted(metrics, 'metric')}, but only "
            f"{counted(filled, 'value')}"
        )
        raise TraceFormatError(path, message, expected="kernels that have most metrics in common")


class TableWarnings(Counter[str]):
    """Counts warnings about a table. The count of a warning replaces `{n}` in its text.

    `lines` contains the first line that each warning concerns, counted from the header.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, int] = {}

    def add(self, text: str, line: int) -> None:
        self[text] += 1
        self.lines.setdefault(text, line)

    def texts(self) -> Iterator[str]:
        for text, count in self.items():
            at = f" (line {self.lines[text]} after the header)" if text in self.lines else ""
            yield with_count(text, count) + at


def read_csv_text(source: str | Path, path: Path) -> NcuReport:
    """Parse the CSV that ncu printed. `source` is the text itself or a file.

    Raise TraceFormatError, which contains `path`, if the table is damaged or truncated, if metrics
    have labels instead of names, or if the report needs too much memory.
    """
    table = Table(source, path)
    size = len(source) if isinstance(source, str) else source.stat().st_size
    compactor = LaunchCompactor(path, size)
    rows = (row for row in table.rows if row[1][0])
    kernels: Iterable[_KernelCells]
    if table.is_long:
        units, kernels = _gather(table, rows, compactor)
        mark = decimal_mark(cell for *_, metrics in kernels for _, cell in metrics)
    else:
        units, metrics = table.units()
        again = Table(source, path)
        mark = decimal_mark(row[place] for _, row in again.rows if row[0] for place in metrics)
        kernels = _distinct_kernels(table, rows, metrics)
    constants = frozenset(name for name in units if name.startswith(CONSTANTS))
    doubts, numeric = TableWarnings(), set[str]()
    launches, lines, ids = [], [], []
    for line, own, cells in kernels:
        device = own.get("Device", "")
        if device and not _WHOLE.fullmatch(device):
            raise _bad_row(path, line, f"has the invalid device {device[:40]!r}")
        left_out = constants if int(device or 0) in compactor.devices else frozenset()
        launch = compactor.compact(_launch(line, own, cells, mark, left_out, doubts))
        numeric.update(launch.values)
        launches.append(launch)
        lines.append(line)
        ids.append(int(own["ID"]))
    for line, launch in zip(lines, launches, strict=True):
        for name, text in launch.texts.items():
            if name in numeric and not _NO_VALUE.fullmatch(text):
                doubts.add(
                    "{n} metric [value is not a number and is|values are not numbers and are] skipped",
                    line,
                )
    further = [*_doubt_ids(ids, table.profiled), *table.odd]
    return NcuReport(launches, units, warnings=(*table.doubts.texts(), *further, *doubts.texts()))


def read_text(path: Path) -> str:
    """Return the text of a CSV file whose encoding is UTF-8 or UTF-16."""
    return "".join(_lines_of(path, path))


def read_table(text: str, path: Path) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of ncu's table, which have as many cells as the header.

    The first row contains the units and has no ID. The long form has no such row. Raise
    TraceFormatError if something is missing or truncated.
    """
    table = Table(text, path)
    first = [] if table.is_long else [table.first]
    return table.columns, [*first, *(cells for _, cells in table.rows)]


def _lines_of(source: str | Path, path: Path) -> Iterator[str]:
    """Yield the lines of a text or of a file in UTF-8 or UTF-16. Only a line feed ends a line."""
    if isinstance(source, str):
        yield from (match[0] for match in re.finditer(r"[^\n]*\n|[^\n]+", source))
        return
    try:
        with open_input(source) as raw:
            encoding = "utf-16" if raw.read(2) in UTF_16 else "utf-8-sig"
            raw.seek(0)
            file = io.TextIOWrapper(io.BufferedReader(raw), encoding, "replace", newline="\n")
            while line := file.readline(MAX_LINE + 1):
                if len(line) > MAX_LINE:
                    message = f"a line has more than {MAX_LINE:,} characters"
                    raise TraceFormatError(path, message, expected=EXPECTED)
                yield line
    except OSError as error:
        raise TraceFormatError(path, f"cannot be read: {error.strerror}") from None


class Table:
    """The table that ncu printed, in a text or a file.

    `rows` iterates over the rows after the row of units and reads the file as needed. `profiled`
    counts ncu's messages that a kernel was profiled, in the lines read so far. `doubts` contains
    warnings about lines, and `odd` contains warnings about the header. TraceFormatError is raised
    if the header, the units or a row are truncated.
    """

    def __init__(self, source: str | Path, path: Path) -> None:
        self.path = path
        self.doubts = TableWarnings()
        self.odd: list[str] = []
        self.profiled = 0
        lines = self._lines(source)
        header = next((line.strip() for line, _ in lines if NCU_HEADER.match(line)), None)
        if header is None:
            raise TraceFormatError(path, "no ncu CSV header", expected=EXPECTED)
        if _is_open(header):
            raise TraceFormatError(path, f"the header is cut off; {AGAIN}", expected=EXPECTED)
        # Whether the header or a row has no quotes. ncu quotes every cell, but a spreadsheet may
        # remove the quotes.
        self._bare = not header.startswith('"')
        self.columns = next(csv.reader([header]), [])
        self.is_long = set(LONG_COLUMNS) <= set(self.columns)
        rows = self._records(lines)
        first = next(rows, None)
        if first is None or (first[1][0] and not self.is_long):
            missing = "first row" if self.is_long else "row of units"
            message = f"there is no {missing} after the header, so the table is cut off; {AGAIN}"
            raise TraceFormatError(path, message, expected=EXPECTED)
        self.first = first[1]
        self.rows = chain([first], rows) if self.is_long else rows

    def units(self) -> tuple[dict[str, str], list[int]]:
        """Return the units of the metrics, and the positions of their columns.

        Do not call this for the long form. If several columns have the same name, the last of them
        is used.
        """
        place = {name: index for index, name in enumerate(self.columns)}
        if len(place) < len(self.columns):
            self.odd.append("the header contains duplicate columns; the last of each is used")
        metrics = [name for name in place if name not in OWN_COLUMNS]
        if odd := [name for name in metrics if "__" not in name]:
            shown = ", ".join(repr(name[:40]) for name in odd[:3])
            self.odd.append(
                f"{counted(len(odd), 'column has an unknown name', 'columns have unknown names')}: {shown}"
            )
        places = [place[name] for name in metrics]
        return dict(zip(metrics, map(self.first.__getitem__, places), strict=True)), places

    def _lines(self, source: str | Path) -> Iterator[tuple[str, bool]]:
        """Yield each line without its line break, and whether it ended with a line break."""
        for line in _lines_of(source, self.path):
            ended = line.endswith(("\n", "\r"))
            for part in _overwritten(line.rstrip("\r\n")) if "\r" in line else [line.rstrip("\n")]:
                self.profiled += part.count(_PROFILED)
                yield part, ended

    def _records(self, lines: Iterator[tuple[str, bool]]) -> Iterator[_Row]:
        """Yield the row of units and the rows of kernels, and count damaged rows."""
        width = len(self.columns)
        for count, (line, ended) in enumerate(lines, start=1):
            cells = self._row(line, count, ended=ended)
            if cells == self.columns:
                self.doubts.add("the header is repeated {n} [time|times]", count)
            elif cells is not None:
                yield count, cells
            elif line.count('","') >= max(3, width // 2) or (
                self._bare and line.count(",") >= max(5, width - 2)
            ):
                self.doubts.add(DAMAGED, count)

    def _row(self, line: str, count: int, *, ended: bool) -> list[str] | None:
        """Return the cells of a line, or None if the line is not a row.

        If the header or an earlier row has no quotes, a line that has no quotes and too few columns
        is an error. Otherwise, the profiled program is assumed to have printed such a line.
        """
        quoted = line.startswith('"')
        if not quoted and not line.startswith(",") and not line[:1].isdigit():
            return None
        try:
            cells = next(csv.reader([line]), [])
        except csv.Error as error:
            if not quoted:
                return None
            raise _bad_row(self.path, count, f"cannot be read ({error})") from None
        if cells == self.columns:
            return cells
        whole = len(cells) == len(self.columns)
        is_row = quoted or whole or (self._bare and len(cells) > 1)
        if not is_row or (cells[0] and not _WHOLE.fullmatch(cells[0])):
            return None
        if (quoted and _is_open(line)) or not (quoted or ended or line.endswith('"')):
            raise _bad_row(self.path, count, "is cut off")
        if not whole:
            raise _bad_row(
                self.path,
                count,
                f"has {counted(len(cells), 'column')} instead of {len(self.columns)}",
            )
        self._bare = self._bare or not quoted
        return cells


def _overwritten(line: str) -> Iterator[str]:
    """Split a line at carriage returns outside quotes. Progress bars write carriage returns."""
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


def _is_open(line: str) -> bool:
    """Return whether a line ends inside a cell."""
    line = line.rstrip()
    return line.count('"') % 2 == 1 or (line.startswith('"') and not line.endswith('"'))


def _bad_row(path: Path, count: int, what: str) -> TraceFormatError:
    message = f"line {count} after the header {what}; {AGAIN}"
    return TraceFormatError(path, message, expected=EXPECTED)


def decimal_mark(cells: Iterable[str]) -> str:
    """Return the decimal mark of the numbers in a file, `.` or `,`.

    Numbers such as `1.234,5` and `0,25` show the mark. `84,480` does not show it.
    """
    marks = Counter(islice(filter(None, map(_mark, cells)), WITNESSES))
    return "," if marks[","] > marks["."] else "."


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
        return other  # a mark that occurs repeatedly separates thousands
    return last if len(tail) != 3 or len(head) > 3 or head.startswith("0") else None


def number(text: str, mark: str = ".") -> float | None:
    """Parse a number with a decimal mark. Return None if the text is not a finite number."""
    # Nearly all numbers match _PLAIN. Other numbers take five times as long.
    if mark != "." or not _PLAIN.fullmatch(text):
        text = text.strip().translate(_NO_MARKS)
        if not _NUMBER.fullmatch(text):
            return None
        text = text.replace("," if mark == "." else ".", "").replace(mark, ".")
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


@lru_cache(maxsize=64)
def nvtx_ranges(cell: str, *, numbered: bool = False) -> tuple[NvtxRange, ...]:
    """Return the ranges that an NVTX cell describes, in the order of the cell.

    If `numbered` is set, the text of each range starts with an id, as for start/end ranges.
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

    `parts` is the item, split at colons. The name may contain colons, too. If the message at the
    end of the item repeats the name, this shows where the name ends. Otherwise, the name is assumed
    to be as long as possible.
    """
    for domain in range(1, min(len(parts) - ITEM_TAIL, MAX_DOMAIN_PARTS + 1)):
        count, odd = divmod(len(parts) - ITEM_TAIL - domain, 2)
        name = ":".join(parts[domain : domain + count])
        if not odd and name and parts[domain : domain + count] == parts[-count:]:
            return ":".join(parts[:domain]) or DEFAULT_DOMAIN, name
    name = ":".join(parts[1 : -ITEM_TAIL - 1])
    return (parts[0] or DEFAULT_DOMAIN, name) if name else None


def _distinct_kernels(
    table: Table, rows: Iterable[_Row], places: list[int]
) -> Iterator[_KernelCells]:
    """Yield the kernels of a table that has one kernel per line.

    Exact copies of earlier rows are left out. They occur if a file was written twice.
    """
    own = [(index, name) for index, name in enumerate(table.columns) if name in OWN_COLUMNS]
    names = [table.columns[place] for place in places]
    seen: set[int] = set()
    for line, cells in rows:
        if (key := hash(tuple(cells))) in seen:
            table.doubts.add(
                "{n} [row is an exact copy of an earlier row and is|rows are exact copies of earlier "
                "rows and are] skipped",
                line,
            )
            continue
        seen.add(key)
        metrics = zip(names, map(cells.__getitem__, places), strict=True)
        yield line, {name: cells[index] for index, name in own}, metrics


def _gather(
    table: Table, rows: Iterable[_Row], compactor: LaunchCompactor
) -> tuple[dict[str, str], list[_KernelCells]]:
    """Return the units and the kernels of the long form.

    Rows without a metric contain ncu's advice.
    """
    place = {name: index for index, name in enumerate(table.columns)}
    name_at, unit_at, value_at = (place[name] for name in LONG_COLUMNS)
    own = [(name, place[name]) for name in table.columns if name in OWN_COLUMNS]
    units: dict[str, str] = {}
    kernels: dict[int, tuple[_Row, dict[str, str]]] = {}
    for line, cells in rows:
        name, unit = sys.intern(cells[name_at]), cells[unit_at]
        (_, first), metrics = kernels.setdefault(int(cells[0]), ((line, cells), {}))
        compactor.allocate(ENTRY_PLACES if metrics else LAUNCH_PLACES + ENTRY_PLACES * len(cells))
        if any(first[index] != cells[index] for key, index in own if key != "ID"):
            table.doubts.add(
                "{n} [row disagrees|rows disagree] with the first row of the same kernel; the first row is used",
                line,
            )
        if not name:
            continue
        message = ""
        if "__" not in name:
            message = (
                f"the metrics have labels such as {name[:40]!r} instead of names; export the report"
            )
        elif units.setdefault(name, unit) != unit:
            message = (
                f"{name[:80]} has the units {units[name][:40]} and {unit[:40]}; export the report"
            )
        if message:
            message = f"{message} with --page raw"
            raise TraceFormatError(table.path, message, expected=EXPECTED)
        if name in metrics:
            table.doubts.add(
                "{n} [row repeats|rows repeat] a metric of a kernel; the first value is used", line
            )
        metrics.setdefault(name, cells[value_at])
    filled = [metrics for _, metrics in kernels.values()]
    check_shape(table.path, len(filled), len(units), sum(map(len, filled)))
    # Count missing values. For example, the last kernel in a truncated file lacks metrics.
    have = Counter(name for metrics in filled for name in metrics)
    enough = max(2, min(len(filled) - 1, MOST * len(filled)))
    common = {name for name, count in have.items() if count >= enough}
    if missing := sum(len(common - metrics.keys()) for metrics in filled):
        table.doubts[
            "{n} [value that nearly all other kernels have is|values that nearly all other kernels have are] missing"
        ] = missing
    return units, [
        (line, {key: cells[index] for key, index in own}, metrics.items())
        for (line, cells), metrics in kernels.values()
    ]


def _doubt_ids(ids: list[int], profiled: int) -> Iterator[str]:
    """Yield warnings about gaps, repetitions and missing kernels in the IDs of the kernels."""
    distinct = set(ids)
    if gaps := max(distinct, default=-1) + 1 - len(distinct):
        yield with_count("the kernel ids have gaps: {n} [id is|ids are] missing", gaps)
    if again := len(ids) - len(distinct):
        yield with_count(
            "{n} [kernel has|kernels have] the id of an earlier kernel; the file may contain several "
            "tables",
            again,
        )
    if profiled > len(ids):
        yield f"ncu reports {profiled} profiled kernels, but the table has {len(ids)}"


def _launch(
    line: int,
    own: dict[str, str],
    metrics: Iterable[tuple[str, str]],
    mark: str,
    left_out: frozenset[str],
    doubts: TableWarnings,
) -> NcuLaunch:
    """Convert the cells of a kernel to a launch, without the metrics in `left_out`."""

    def triple(column: str) -> Triple | None:
        text = own.get(column, "").strip()
        match = _TRIPLE.fullmatch(text)
        if match is None and text:
            doubts.add(f"{{n}} [cell|cells] in the column {column} could not be read", line)
        return match and (int(match[1]), int(match[2]), int(match[3]))

    values: dict[str, float] = {}
    texts: dict[str, str] = {}
    for name, cell in metrics:
        if name in left_out:
            continue
        value = number(cell, mark)
        if value is not None:
            values[name] = value
        elif cell:
            texts[name] = sys.intern(cell)
    stream = own.get("Stream", "")
    is_number = bool(_WHOLE.fullmatch(stream))
    if stream and not is_number:
        doubts.add("{n} [cell|cells] in the column Stream could not be read", line)
    return NcuLaunch(
        name=own["Kernel Name"],
        values=values,
        texts=texts,
        device=int(own.get("Device") or 0),
        stream=int(stream) if is_number else None,
        start_end=nvtx_ranges(own.get(START_END, ""), numbered=True),
        push_pop=nvtx_ranges(own.get(PUSH_POP, "")),
        grid=triple("Grid Size"),
        block=triple("Block Size"),
    )


def write_csv(report: NcuReport, output: Path) -> None:
    """Write the kernels of a report to a CSV, in the format that `report_to_csv` describes."""
    names = sorted({name for row in report.launches for name in (*row.values, *row.texts)})
    constants: dict[int, NcuLaunch] = {}
    with output.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n")
        writer.writerow([*WRITTEN_COLUMNS, *names])
        units = (report.units.get(name, "") for name in names)
        writer.writerow([*("" for _ in WRITTEN_COLUMNS), *units])
        for index, launch in enumerate(report.launches):
            source = constants.setdefault(launch.device, launch)
            sources = (source if name.startswith(CONSTANTS) else launch for name in names)
            capability = f"{DEVICE_PREFIX}compute_capability_"
            own = {
                "ID": str(index),
                "Process ID": UNKNOWN_ID,
                PUSH_POP: f"{UNKNOWN_ID}  {_items(launch.push_pop)}" if launch.push_pop else "",
                START_END: _items(launch.start_end, numbered=True),
                "Kernel Name": launch.name,
                "Context": _value(launch, "launch__context_id"),
                "Stream": "" if launch.stream is None else str(launch.stream),
                "Block Size": _dims(launch, "block", launch.block),
                "Grid Size": _dims(launch, "grid", launch.grid),
                "Device": str(launch.device),
                "CC": ".".join(_value(source, capability + part) for part in ("major", "minor")),
            }
            written = (own.get(column, "") for column in WRITTEN_COLUMNS)
            writer.writerow([*written, *map(_value, sources, names)])


def _value(launch: NcuLaunch, name: str) -> str:
    value = launch.values.get(name)
    if value is None:
        return launch.texts.get(name, "")
    return str(int(value)) if float(value).is_integer() else repr(value)


def _dims(launch: NcuLaunch, what: str, triple: Triple | None) -> str:
    values = [launch.values.get(f"launch__{what}_dim_{axis}") for axis in "xyz"]
    numbers = triple or [int(value) for value in values if value is not None]
    return f"({', '.join(map(str, numbers))})" if len(numbers) == 3 else ""


def _items(ranges: tuple[NvtxRange, ...], *, numbered: bool = False) -> str:
    """Return the text of an NVTX cell.

    Each range consists of its domain, its name, four unknown fields, the type of the message, and
    the name again.
    """
    return "  ".join(
        f'"{f"{place}:" if numbered else ""}{domain}:{name}:none:none:none:none:ASCII:{name}"'
        for place, (domain, name) in enumerate(ranges)
    )
