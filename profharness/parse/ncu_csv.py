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
from dataclasses import dataclass
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

WITNESSES = 1000  # numbers that have to tell their decimal mark
_MARKS = " \u00a0\u202f'\u2019\ufffd"  # what locales put between thousands besides , and .
_NUMBER = re.compile(r"[+-]?\d[\d.,]*(?:[eE][+-]?\d+)?")
_NO_MARKS = str.maketrans(dict.fromkeys(_MARKS))
_PLAIN = re.compile(r"-?\d+(?:\.\d+)?")
_TRIPLE = re.compile(r"\(\s*(\d+),\s*(\d+),\s*(\d+)\s*\)")
_ITEM_TAIL = r":[^:]*:[^:]*:[^:]*:[^:]*:[^:]*"  # payload type and value, colour type and value, …
_ITEM = re.compile(rf"(?P<domain>.*?):(?P<name>.+){_ITEM_TAIL}:(?P=name)", re.DOTALL)
_ITEM_PLAIN = re.compile(rf"(?P<domain>.*?):(?P<name>.+?){_ITEM_TAIL}:[^:]*", re.DOTALL)

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
    """A report's kernels and units by metric; skipped counts whole ranges and graphs."""

    launches: list[NcuLaunch]
    units: dict[str, str]
    skipped: int = 0


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

    Raises TraceFormatError as `read_table` does, and for metrics under labels.
    """
    columns, records = read_table(text, path)
    if _is_long(columns):
        return _report(*_widen(columns, records, path))
    return _report(columns, records[0], [row for row in records if row[0]])


def read_table(text: str, path: Path) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of ncu's table; all rows have the header's columns. The first row
    holds the units (its ID is empty), except in the long form.

    Raises TraceFormatError where the header, the units or a row are missing or cut off.
    """
    lines = text.splitlines()
    at = next((at for at, line in enumerate(lines) if NCU_HEADER.match(line)), None)
    if at is None:
        raise TraceFormatError(path, "no header line of ncu's CSV", expected=EXPECTED)
    header = lines[at].strip()
    if _is_open(header):
        raise TraceFormatError(path, f"the header is cut off; {AGAIN}", expected=EXPECTED)
    columns = _cells(header)
    ended = text.endswith(("\n", "\r"))
    records = list(_records(lines[at + 1 :], columns, path, header=header, ended=ended))
    if not records or (records[0][0] and not _is_long(columns)):
        missing = "first row" if _is_long(columns) else "row of units"
        message = f"no {missing} behind the header, so the table is cut off; {AGAIN}"
        raise TraceFormatError(path, message, expected=EXPECTED)
    return columns, records


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
        # a name may hold colons: the message at the end repeats it
        match = _ITEM.fullmatch(item) or _ITEM_PLAIN.fullmatch(item)
        if match:
            ranges.append(NvtxRange(match["domain"] or DEFAULT_DOMAIN, match["name"]))
    return tuple(ranges)


def _cells(line: str) -> list[str]:
    return next(csv.reader([line]), [])


def _is_long(columns: list[str]) -> bool:
    return set(LONG_COLUMNS) <= set(columns)


def _is_open(line: str) -> bool:
    """Whether a line ends inside a cell: a quote is open, or the last of quoted cells has none."""
    line = line.rstrip()
    return line.count('"') % 2 == 1 or (line.startswith('"') and not line.endswith('"'))


def _records(
    lines: list[str], columns: list[str], path: Path, *, header: str, ended: bool
) -> Iterator[list[str]]:
    """The unit row and the kernels' rows; other lines are not ncu's table.

    ncu quotes every cell, what a spreadsheet saved may not: such rows are looked for once the
    header or a row is of that kind. ended: the last line has its line break.
    """
    bare = not header.startswith('"')
    for count, line in enumerate(lines, start=1):
        if not line.startswith(('"', ",")) and not line[:1].isdigit():
            continue
        try:
            cells = _cells(line)
        except csv.Error as error:
            if not line.startswith('"'):
                continue
            raise _bad_row(path, count, f"cannot be read ({error})") from None
        if cells == columns or (cells[0] and not cells[0].isdecimal()):
            continue
        quoted = line.startswith('"')
        whole = len(cells) == len(columns)
        if not (quoted or whole or (bare and len(cells) > 1)):
            continue  # a program's own numbers
        last = count == len(lines) and not ended
        if (quoted and _is_open(line)) or (not quoted and last and not line.endswith('"')):
            raise _bad_row(path, count, "is cut off")
        if not whole:
            raise _bad_row(path, count, f"has {len(cells)} of {len(columns)} columns")
        bare = bare or not quoted
        yield cells


def _bad_row(path: Path, count: int, what: str) -> TraceFormatError:
    message = f"line {count} after the header {what}; {AGAIN}"
    return TraceFormatError(path, message, expected=EXPECTED)


def _widen(
    columns: list[str], records: list[list[str]], path: Path
) -> tuple[list[str], list[str], list[list[str]]]:
    """The long form as columns, units and rows by kernel. Rows without a metric are only advice."""
    place = {name: index for index, name in enumerate(columns)}
    name_at, unit_at, value_at = (place[name] for name in LONG_COLUMNS)
    own = [name for name in columns if name in OWN_COLUMNS]
    units: dict[str, str] = {}
    kernels: dict[str, tuple[list[str], dict[str, str]]] = {}
    for row in records:
        name = row[name_at]
        _, metrics = kernels.setdefault(row[0], ([row[place[column]] for column in own], {}))
        if "__" not in name:
            if name:
                message = (
                    f"metrics under labels such as {name!r}; export the report with --page raw"
                )
                raise TraceFormatError(path, message, expected=EXPECTED)
            continue
        if units.setdefault(name, row[unit_at]) != row[unit_at]:
            message = f"{name} in {units[name]} and in {row[unit_at]}; export with --page raw"
            raise TraceFormatError(path, message, expected=EXPECTED)
        metrics[name] = row[value_at]
    rows = [[*head, *(cells.get(name, "") for name in units)] for head, cells in kernels.values()]
    return [*own, *units], ["" for _ in own] + list(units.values()), rows


def _report(columns: list[str], units: list[str], rows: list[list[str]]) -> NcuReport:
    place = {name: index for index, name in enumerate(columns)}
    metrics = [(name, index) for name, index in place.items() if name not in OWN_COLUMNS]
    variable = [pair for pair in metrics if not pair[0].startswith(CONSTANTS)]
    mark = decimal_mark(row[index] for row in rows for _, index in metrics)
    devices: set[int] = set()
    launches = []
    for row in rows:
        device = (_whole(row[place["Device"]]) if "Device" in place else None) or 0
        shown = variable if device in devices else metrics
        devices.add(device)
        launches.append(_launch(row, place, shown, mark, device))
    return NcuReport(launches, {name: units[index] for name, index in metrics})


def _launch(
    row: list[str], place: dict[str, int], metrics: list[tuple[str, int]], mark: str, device: int
) -> NcuLaunch:
    values: dict[str, float] = {}
    texts: dict[str, str] = {}
    for name, index in metrics:
        cell = row[index]
        value = number(cell, mark)
        if value is not None:
            values[name] = value
        elif cell:
            texts[name] = cell
    own = {column: row[place[column]] for column in OWN_COLUMNS if column in place}
    return NcuLaunch(
        name=own["Kernel Name"],
        values=values,
        texts=texts,
        device=device,
        stream=_whole(own.get("Stream", "")),
        start_end=nvtx_ranges(own.get(START_END, ""), numbered=True),
        push_pop=nvtx_ranges(own.get(PUSH_POP, "")),
        grid=_triple(own.get("Grid Size", "")),
        block=_triple(own.get("Block Size", "")),
    )


def _whole(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _triple(text: str) -> Triple | None:
    match = _TRIPLE.fullmatch(text.strip())
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


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
