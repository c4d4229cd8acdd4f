"""ncu's CSV: the table of `--csv --page raw`, and the long form with one line a metric.

Lines are read one by one, because a program's own output may stand between them. Numbers may
stand in any locale.
"""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from profharness.errors import TraceFormatError
from profharness.parse import NCU_HEADER, decode_text

DEFAULT_DOMAIN = "<default domain>"
DURATION = "gpu__time_duration.sum"
DEVICE_PREFIX = "device__attribute_"
CONSTANTS = (DEVICE_PREFIX, "nvlink__")  # facts of the machine, the same for every kernel

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
WITNESSES = 1000  # numbers that have to tell their decimal mark
_MARKS = " \u00a0\u202f'\u2019\ufffd"  # what locales put between thousands besides , and .
_NUMBER = re.compile(r"[+-]?\d[\d.,]*(?:[eE][+-]?\d+)?")
_NO_MARKS = str.maketrans(dict.fromkeys(_MARKS))
_PLAIN = re.compile(r"-?\d+(?:\.\d+)?")
_WHOLE = re.compile(r"\d{1,18}")  # an integer that the store can hold
_TRIPLE = re.compile(r"\(\s*(\d{1,18}),\s*(\d{1,18}),\s*(\d{1,18})\s*\)")
_NO_VALUE = re.compile(r"(?:\(!\)\s*)?(?:n/?a|[+-]?nan|[+-]?inf(?:inity)?|-*)", re.IGNORECASE)
_PROFILED = re.compile(r'==PROF== Profiling "')  # ncu says so for each result, before the table
ITEM_TAIL = 5  # parts between a range's name and its message: payload, colour, type of message
MAX_DOMAIN_PARTS = 8  # parts of a domain's name, which may hold colons
MOST = 0.9  # of the kernels: a metric that so many have is missing in the others

Triple = tuple[int, int, int]


class NvtxRange(NamedTuple):
    """One NVTX range that was open at a launch."""

    domain: str
    name: str


@dataclass(frozen=True, slots=True)
class NcuLaunch:
    """One profiled kernel.

    name is the mangled name, or ncu's demangled text where a CSV has nothing else. values are the
    numeric metrics in the units of the report, texts the others; device attributes stand only in
    the first launch of each device. push_pop lists each domain's stack, outermost first. grid and
    block are a CSV's own columns, None elsewhere.
    """

    name: str
    values: dict[str, float]
    texts: dict[str, str]
    device: int = 0
    stream: int | None = None
    start_end: tuple[NvtxRange, ...] = ()
    push_pop: tuple[NvtxRange, ...] = ()
    grid: Triple | None = None
    block: Triple | None = None


@dataclass(frozen=True, slots=True)
class NcuReport:
    """A report's kernels and units by metric; skipped counts whole ranges and graphs. warnings say
    what of the file could not be read or looks incomplete.
    """

    launches: list[NcuLaunch]
    units: dict[str, str]
    skipped: int = 0
    warnings: tuple[str, ...] = ()


@dataclass(slots=True)
class Doubts:
    """What is doubtful in a table: how often, and the line of the first behind the header."""

    counts: Counter[str] = field(default_factory=Counter)
    lines: dict[str, int] = field(default_factory=dict)

    def add(self, text: str, line: int | None = None) -> None:
        """Count one more; `{n}` in the text stands for the count."""
        self.counts[text] += 1
        if line is not None:
            self.lines.setdefault(text, line)

    def texts(self) -> tuple[str, ...]:
        """One warning for each kind, in the order of the first of each."""
        at = {text: f" (line {line} after the header)" for text, line in self.lines.items()}
        return tuple(
            text.replace("{n}", str(count)) + at.get(text, "")
            for text, count in self.counts.items()
        )


class Row(NamedTuple):
    """One row of the table and its line, counted from the header's."""

    line: int
    cells: list[str]


def read_csv_file(path: Path) -> NcuReport:
    """The kernels of a CSV file. Raises TraceFormatError as `read_table` does."""
    return read_csv_text(read_text(path), path)


def read_text(path: Path) -> str:
    """The text of a CSV file, UTF-8 or UTF-16. Raises TraceFormatError if it cannot be read."""
    try:
        return decode_text(path.read_bytes())
    except OSError as error:
        raise TraceFormatError(path, f"cannot be read: {error.strerror}") from None


def read_csv_text(text: str, path: Path) -> NcuReport:
    """The kernels of ncu's CSV output; errors name `path`.

    Raises TraceFormatError as `read_table` does, for metrics under labels, and for a device that is
    no number.
    """
    doubts = Doubts()
    columns, rows = _table(text, path, doubts)
    kernels = [row for row in rows if row.cells[0]]
    if _is_long(columns):
        units, gathered = _gathered(columns, kernels, path, doubts)
        _check_ids([block.id for block in gathered], text, doubts)
        cells = (cell for block in gathered for _, cell in block.metrics)
        return _report(units, gathered, decimal_mark(cells), path, doubts)
    kernels = _distinct(kernels, doubts)
    _check_ids([int(row.cells[0]) for row in kernels], text, doubts)
    places = [place for place, name in enumerate(columns) if name not in OWN_COLUMNS]
    mark = decimal_mark(row.cells[place] for row in kernels for place in places)
    units, blocks = _blocks(columns, rows[0].cells, kernels, doubts)
    return _report(units, blocks, mark, path, doubts)


def read_table(text: str, path: Path) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of ncu's table; all rows have the header's columns. The first row
    holds the units (its ID is empty), except in the long form.

    Raises TraceFormatError where the header, the units or a row are missing or cut off.
    """
    columns, rows = _table(text, path, Doubts())
    return columns, [row.cells for row in rows]


def _table(text: str, path: Path, doubts: Doubts) -> tuple[list[str], list[Row]]:
    lines = text.splitlines()
    at = next((at for at, line in enumerate(lines) if NCU_HEADER.match(line)), None)
    if at is None:
        raise TraceFormatError(path, "no header line of ncu's CSV", expected=EXPECTED)
    header = lines[at].strip()
    if _is_open(header):
        raise TraceFormatError(path, f"the header is cut off; {AGAIN}", expected=EXPECTED)
    columns = _cells(header)
    ended = text.endswith(("\n", "\r"))
    rows = list(_records(lines[at + 1 :], columns, path, doubts, header=header, ended=ended))
    if not rows or (rows[0].cells[0] and not _is_long(columns)):
        missing = "first row" if _is_long(columns) else "row of units"
        message = f"no {missing} behind the header, so the table is cut off; {AGAIN}"
        raise TraceFormatError(path, message, expected=EXPECTED)
    return columns, rows


def decimal_mark(cells: Iterable[str]) -> str:
    """The decimal mark, `.` or `,`, that a file's numbers agree with; `.` where nothing tells.

    `1.234,5` and `0,25` tell; `84,480` alone could be either.
    """
    marks = Counter(islice(filter(None, map(_mark, cells)), WITNESSES))
    return "," if marks[","] > marks["."] else "."


def number(text: str, mark: str = ".") -> float | None:
    """A number as printed with that decimal mark; None for anything else, infinities included."""
    if mark == "." and _PLAIN.fullmatch(text):  # nearly all; the rest of this costs five times more
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


def nvtx_ranges(cell: str, *, numbered: bool = False) -> tuple[NvtxRange, ...]:
    """The ranges of an NVTX cell, in its order; numbered: each begins with its id (start/end)."""
    body = re.sub(r'^\s*\d+\s+(?=")', "", cell).strip()
    ranges = []
    for item in body[1:-1].split('"  "') if body.startswith('"') else [body]:
        item = re.sub(r"^\d+:", "", item) if numbered else item
        if (parsed := _nvtx_range(item.split(":"))) is not None:
            ranges.append(parsed)
    return tuple(ranges)


def _nvtx_range(parts: list[str]) -> NvtxRange | None:
    """One item's parts between its colons. A name may hold colons: the message at the end repeats it,
    and where it does not, all that could be the name is taken for it.
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


def _is_long(columns: list[str]) -> bool:
    return set(LONG_COLUMNS) <= set(columns)


def _is_open(line: str) -> bool:
    """Whether a line ends inside a cell: a quote is open, or the last of quoted cells has none."""
    line = line.rstrip()
    return line.count('"') % 2 == 1 or (line.startswith('"') and not line.endswith('"'))


def _records(
    lines: list[str], columns: list[str], path: Path, doubts: Doubts, *, header: str, ended: bool
) -> Iterator[Row]:
    """The unit row and the kernels' rows. Other lines are not ncu's table, but those that look like
    a row are counted.

    ncu quotes every cell, what a spreadsheet saved may not: such rows are looked for once the
    header or a row is of that kind. ended: the last line has its line break.
    """
    bare = not header.startswith('"')
    for count, line in enumerate(lines, start=1):
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
            continue  # a program's own numbers
        last = count == len(lines) and not ended
        if (quoted and _is_open(line)) or (not quoted and last and not line.endswith('"')):
            raise _bad_row(path, count, "is cut off")
        if not whole:
            raise _bad_row(path, count, f"has {len(cells)} of {len(columns)} columns")
        bare = bare or not quoted
        yield Row(count, cells)


def _resembles(line: str, columns: list[str], *, bare: bool) -> bool:
    """Whether a line that is no row has so many borders of cells that it must have been one."""
    quoted = line.count('","') >= max(3, len(columns) // 2)
    return quoted or (bare and line.count(",") >= max(5, len(columns) - 2))


def _bad_row(path: Path, count: int, what: str) -> TraceFormatError:
    message = f"line {count} after the header {what}; {AGAIN}"
    return TraceFormatError(path, message, expected=EXPECTED)


class Block(NamedTuple):
    """One kernel: the cells of ncu's own columns, and names and cells of its metrics."""

    line: int
    id: int
    own: dict[str, str]
    metrics: Iterable[tuple[str, str]]


def _distinct(rows: list[Row], doubts: Doubts) -> list[Row]:
    """The rows without exact copies of earlier ones, which a file that was doubled has."""
    seen: set[int] = set()
    kept = []
    for row in rows:
        if (key := hash(tuple(row.cells))) in seen:
            doubts.add("{n} rows are exact copies of earlier ones and are left out", row.line)
            continue
        seen.add(key)
        kept.append(row)
    return kept


def _blocks(
    columns: list[str], units: list[str], rows: list[Row], doubts: Doubts
) -> tuple[dict[str, str], Iterator[Block]]:
    """Units and kernels of the wide form."""
    place = {name: index for index, name in enumerate(columns)}
    if len(place) < len(columns):
        doubts.add("columns stand twice in the header; the last of each counts")
    own = [(name, index) for name, index in place.items() if name in OWN_COLUMNS]
    metrics = [(name, index) for name, index in place.items() if name not in OWN_COLUMNS]
    if odd := [name for name, _ in metrics if "__" not in name]:
        shown = ", ".join(repr(name[:40]) for name in odd[:3])
        doubts.add(f"{len(odd)} columns of unknown names: {shown}")
    names, places = [name for name, _ in metrics], [index for _, index in metrics]
    blocks = (
        Block(
            line,
            int(cells[0]),
            {name: cells[index] for name, index in own},
            zip(names, map(cells.__getitem__, places), strict=True),
        )
        for line, cells in rows
    )
    return {name: units[index] for name, index in metrics}, blocks


def _gathered(
    columns: list[str], rows: list[Row], path: Path, doubts: Doubts
) -> tuple[dict[str, str], list[Block]]:
    """Units and kernels of the long form. Rows without a metric are only advice."""
    place = {name: index for index, name in enumerate(columns)}
    name_at, unit_at, value_at = (place[name] for name in LONG_COLUMNS)
    own = [(name, place[name]) for name in columns if name in OWN_COLUMNS]
    units: dict[str, str] = {}
    kernels: dict[int, tuple[Row, dict[str, str]]] = {}
    for row in rows:
        line, cells = row
        name, unit = cells[name_at], cells[unit_at]
        first, metrics = kernels.setdefault(int(cells[0]), (row, {}))
        if any(first.cells[index] != cells[index] for key, index in own if key != "ID"):
            doubts.add("{n} rows disagree with the first row of their kernel, which counts", line)
        if "__" not in name:
            if name:
                message = (
                    f"metrics under labels such as {name[:40]!r}; export the report with --page raw"
                )
                raise TraceFormatError(path, message, expected=EXPECTED)
            continue
        if units.setdefault(name, unit) != unit:
            message = (
                f"{name[:80]} in {units[name][:40]} and in {unit[:40]}; export with --page raw"
            )
            raise TraceFormatError(path, message, expected=EXPECTED)
        if name in metrics:
            doubts.add("{n} rows tell a metric of a kernel again; the first counts", line)
        metrics.setdefault(name, cells[value_at])
    _check_metrics([metrics for _, metrics in kernels.values()], doubts)
    blocks = [
        Block(row.line, number, {key: row.cells[index] for key, index in own}, metrics.items())
        for number, (row, metrics) in kernels.items()
    ]
    return units, blocks


def _check_metrics(kernels: list[dict[str, str]], doubts: Doubts) -> None:
    """Doubt kernels that lack what nearly all others have, as the last one of a file cut off does."""
    have = Counter(name for metrics in kernels for name in metrics)
    enough = max(2, min(len(kernels) - 1, MOST * len(kernels)))
    common = {name for name, count in have.items() if count >= enough}
    for metrics in kernels:
        if missing := len(common - metrics.keys()):
            doubts.counts["{n} values are missing that nearly all other kernels have"] += missing


def _check_ids(ids: list[int], text: str, doubts: Doubts) -> None:
    """Doubt tables with gaps or repetitions in their ids, or with fewer than ncu says it profiled."""
    distinct = set(ids)
    if gaps := max(distinct, default=-1) + 1 - len(distinct):
        doubts.counts["the ids of kernels have gaps: {n} are missing"] = gaps
    if again := len(ids) - len(distinct):
        doubts.counts["{n} kernels have the id of an earlier one; these may be several tables"] = (
            again
        )
    profiled = len(_PROFILED.findall(text))
    if profiled > len(ids):
        doubts.add(f"ncu says that it profiled {profiled} kernels, the table has {len(ids)}")


def _report(
    units: dict[str, str], blocks: Iterable[Block], mark: str, path: Path, doubts: Doubts
) -> NcuReport:
    constants = frozenset(name for name in units if name.startswith(CONSTANTS))
    devices: set[int] = set()
    launches, lines = [], []
    for block in blocks:
        device = _device(block, path)
        left_out = constants if device in devices else frozenset()
        launches.append(_launch(block, mark, device, left_out, doubts))
        lines.append(block.line)
        devices.add(device)
    numeric = {name for launch in launches for name in launch.values}
    for line, launch in zip(lines, launches, strict=True):
        for name, text in launch.texts.items():
            if name in numeric and not _NO_VALUE.fullmatch(text):
                doubts.add("{n} values of metrics are no numbers and are left out", line)
    return NcuReport(launches, units, warnings=doubts.texts())


def _device(block: Block, path: Path) -> int:
    text = block.own.get("Device", "")
    if text and not _WHOLE.fullmatch(text):
        raise _bad_row(path, block.line, f"has {text[:40]!r} for a device")
    return int(text or 0)


def _launch(
    block: Block, mark: str, device: int, left_out: frozenset[str], doubts: Doubts
) -> NcuLaunch:
    """left_out: metrics that stand in an earlier launch of the device."""
    values: dict[str, float] = {}
    texts: dict[str, str] = {}
    for name, cell in block.metrics:
        if name in left_out:
            continue
        value = number(cell, mark)
        if value is not None:
            values[name] = value
        elif cell:
            texts[name] = cell
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


def _stream(block: Block, doubts: Doubts) -> int | None:
    text = block.own.get("Stream", "")
    if not text or _WHOLE.fullmatch(text):
        return int(text) if text else None
    doubts.add("{n} cells of Stream could not be read", block.line)
    return None


def _triple(block: Block, column: str, doubts: Doubts) -> Triple | None:
    text = block.own.get(column, "").strip()
    match = _TRIPLE.fullmatch(text)
    if match:
        return int(match[1]), int(match[2]), int(match[3])
    if text:
        doubts.add(f"{{n}} cells of {column} could not be read", block.line)
    return None


def _mark(text: str) -> str | None:
    """The decimal mark that one number gives away."""
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
        return other  # two of the same mark stand between thousands
    return last if len(tail) != 3 or len(head) > 3 or head.startswith("0") else None
