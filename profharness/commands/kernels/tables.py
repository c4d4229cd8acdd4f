"""Build the documents of `kernels`, with one table per config and notes about backends without kernels."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby
from operator import attrgetter
from typing import Any

from profharness.columns import Column, columns_of, pick
from profharness.commands._answers import WARM_KERNELS, all_disabled_notes, cell_reason
from profharness.commands.kernels.answer import kernels_answer, noun
from profharness.errors import counted, join_and
from profharness.measurements.agreement import disagreements, replaced_by, replacement_text
from profharness.program.counters import read_counters
from profharness.render.document import (
    Block,
    Document,
    Heading,
    More,
    Note,
    Table,
    filled_columns,
    format_value,
    merged_notes,
    record,
    status_note,
)
from profharness.rows import (
    ACTIVE_WARPS,
    DRAM_READ,
    DRAM_WRITE,
    NCU,
    NSYS,
    SOURCE_WORDS,
    TORCH,
    TRACE_PROFILERS,
    CellRow,
    KernelRow,
    Triple,
    sourced,
    times_word,
)
from profharness.units import share_text, time_text

SCHEMA = "profharness.kernels/1"
KERNEL = columns_of(KernelRow)
CELL = columns_of(CellRow)
# In JSON, the fields in _BEHIND_SHARE follow `share`, and computed fields come last.
_BEHIND_SHARE = ("cell", "kernel_kind", "min_ns", "max_ns")
_COMPUTED = ("call_ns", "dram_bytes_per_s")
_names = [name for name in KERNEL if name not in (*_BEHIND_SHARE, *_COMPUTED)]
_share = _names.index("share") + 1
ROW_FIELDS = (*_names[:_share], *_BEHIND_SHARE, *_names[_share:], *_COMPUTED)
FIELDS = tuple(KERNEL[name].json_key or name for name in ROW_FIELDS)
CELL_FIELDS = (
    *("run", "cell", "config", "backend", "status", "message", "predicted", "choice", "sdpa_op"),
    *("tuning", "refusals", "warnings"),
)
MINOR_SHARES = {"op": 0.005}  # the share of a call below which kernels of a kind are folded
MINOR_SHARE = 0.01  # this share for the other kinds
_SUMS = ("launches", "launches_per_call", "total_ns", "share")
MAX_NOTES = 12
MOST_KERNELS, FEW_KERNELS = 15, 5
"""The maximum numbers of kernels that are shown without --full.

The first number applies to the longest range of a program's trace, and the second to every other
range.
"""
MOST_RANGES = 3  # maximum number of ranges of a program's trace that are shown without --full
COMPARED = (
    *("duration_ns", "registers_per_thread", "static_shared_bytes", "dynamic_shared_bytes"),
    *("shared_bytes", "launches", "launches_per_call"),
)
# Columns of the table for a single profiler.
ROW_COLUMNS = pick(
    KernelRow,
    *("backend", "profiler", "device", "kernel_short", "grid", "block", "shared_bytes"),
    *("shared_share", "registers_per_thread", "launches", "launches_per_call", "duration_ns"),
    *("call_ns", "total_ns", "share", "occupancy"),
)
# Columns of a table on a range of a program's trace, such as a step.
OF_PROGRAM = {
    "launches": replace(
        KERNEL["launches"], meaning="number of launches in the range, such as a step"
    ),
    "duration_ns": Column(
        "mean_launch_ns",
        "mean µs/launch",
        "time",
        importance="answer",
        scale="launch",
        meaning="mean time of one launch",
    ),
    "total_ns": replace(KERNEL["total_ns"], meaning="total time of the launches in the range"),
    "share": replace(
        KERNEL["share"],
        title="% of GPU time",
        meaning="share of the total time of all kernels in the trace; overlapping kernels count twice",
    ),
}
# The share in a trace with similar ranges, such as steps, of which the tables show only the longest.
OF_RANGE = replace(
    KERNEL["share"],
    title="% of range",
    meaning="the kernel's share of the total kernel time in the range",
)
# Columns of a CPU run, which has ops instead of kernels.
OF_OPS = {
    "kernel_short": replace(KERNEL["kernel_short"], title="op", meaning="name of the op"),
    "launches_per_call": replace(
        KERNEL["launches_per_call"],
        title="ops/call",
        meaning="number of times that the op runs in one call",
    ),
    "duration_ns": replace(
        KERNEL["duration_ns"], title="median µs/op", meaning="median time of the op"
    ),
    "share": replace(KERNEL["share"], meaning="the op's share of the time of all ops of the call"),
}
OF_PROGRAM_OPS = {
    "kernel_short": OF_OPS["kernel_short"],
    "launches": replace(
        OF_PROGRAM["launches"],
        title="calls",
        meaning="number of calls of the op in the range, such as a step",
    ),
    "duration_ns": replace(
        OF_PROGRAM["duration_ns"],
        title="mean µs/call",
        meaning="mean time of one call of the op, without the ops that it calls",
    ),
    "total_ns": replace(OF_PROGRAM["total_ns"], meaning="total time of the calls in the range"),
    "share": replace(
        OF_PROGRAM["share"],
        title="% of op time",
        meaning="share of the total time of all ops in the trace",
    ),
}
# Columns of the table that compares profilers. `_line` returns the values.
JOINED_COLUMNS = (
    *pick(KernelRow, "backend", "kernel_short", "grid", "block", "shared_bytes", "shared_share"),
    *pick(KernelRow, "registers_per_thread", "launches_per_call"),
    *(Column(name, f"median {name} µs/launch", "time", scale="call") for name in TRACE_PROFILERS),
    Column("achieved", "% achieved", "percent"),
    Column("dram", "DRAM KiB", "kib"),
    Column("dram_rate", "DRAM GB/s", "giga"),
    Column("tensor", "% tensor", "percent"),
    Column("l2_hits", "% L2 hits", "percent"),
    Column("disagree", "disagree", "names", importance="answer"),
)
_COUNTERS = (
    Column("metric", "metric"),
    Column("value", "value", "count", importance="answer"),
    Column("unit", "unit", importance="answer"),
)
MOST_CHARACTERS = 64  # maximum length of a name that replaces an ambiguous short name
_NAMESPACES = re.compile(r"^void |\w+::|\(anonymous namespace\)::")
_LAMBDA = re.compile(r"\{lambda\([^()]*\)#\d+\}")  # says nothing but the number of an overload
# Prefixes of launch and machine attributes, which ncu lists among its counters.
_ATTRIBUTES = ("c2clink__", "device__", "launch__", "numa__", "nvlink__", "pcie__", "profiler__")

# (run, config, range) of a heading. Only a foreign trace has a range, and it has no config.
_Scope = tuple[str, str | None, str | None]


def kernel_record(row: KernelRow) -> dict[str, Any]:
    """Return the JSON record of a kernel, with times in ns, sizes in bytes, and grid as [x, y, z]."""
    plain = record(row)
    plain |= {name: getattr(row, name) for name in _COMPUTED}
    plain["metrics"] = {
        name: {"value": value, "unit": unit} for name, (value, unit) in row.metrics.items()
    }
    return {key: plain[name] for key, name in zip(FIELDS, ROW_FIELDS, strict=True)}


def cell_record(cell: CellRow) -> dict[str, Any]:
    """Return the JSON record of one cell, without its raw samples."""
    return record(cell, CELL_FIELDS)


def longer_names(rows: Iterable[KernelRow]) -> dict[str, str]:
    """Map each kernel that shares its short name with other kernels to a distinct name."""
    alike: dict[str, dict[str, str]] = {}
    for row in rows:
        alike.setdefault(row.kernel_short, {})[row.kernel] = _plain(row.kernel)
    names: dict[str, str] = {}
    for short, plain in alike.items():
        if len(plain) > 1 and len({*plain.values()}) == 1:
            names |= dict.fromkeys(plain, short)
        elif len(plain) > 1:
            from profharness.render.fitting import distinct_cuts  # loads rich

            cuts = distinct_cuts(plain.values(), MOST_CHARACTERS)
            names |= {kernel: cuts.get(text, text) for kernel, text in plain.items()}
    return names | _numbered(names)


def _numbered(names: Mapping[str, str]) -> dict[str, str]:
    """Map each kernel whose name is equal to that of another kernel to the name with a number.

    Names differ in nothing but the number if the kernels have the same name in different namespaces.
    """
    alike: dict[str, list[str]] = {}
    for kernel, name in names.items():
        alike.setdefault(name, []).append(kernel)
    return {
        kernel: f"{name} #{number}"
        for name, kernels in alike.items()
        if len(kernels) > 1
        for number, kernel in enumerate(kernels, 1)
    }


def _plain(kernel: str) -> str:
    """Return the name of a kernel without namespaces and numbers of lambdas."""
    if kernel.startswith("_Z"):  # ROCm traces contain mangled names
        from profharness.traces.kernel_names import canonical

        kernel = canonical(kernel)
    return _LAMBDA.sub("", _NAMESPACES.sub("", kernel))


def full_name_notes(rows: Sequence[KernelRow], longer: Mapping[str, str]) -> Iterator[Block]:
    """Yield the full name of each kernel, next to its name in the tables, if they differ."""
    names = {row.kernel: longer.get(row.kernel, row.kernel_short) for row in rows}
    if notes := [Note(full, name) for full, name in names.items() if full != name]:
        yield Heading(f"Full names of the {noun(rows)}s", "", 3)
        yield from notes


def full_names(runs: Iterable[Sequence[KernelRow]]) -> dict[str, tuple[str, ...]]:
    """Map each shortened name in the tables of these runs to the full names of its kernels."""
    names: dict[str, dict[str, None]] = {}
    for rows in runs:
        longer = longer_names(rows)
        for row in rows:
            for short in {row.kernel_short, longer.get(row.kernel, row.kernel_short)}:
                names.setdefault(short, {})[row.kernel] = None
    return {short: tuple(full) for short, full in names.items() if [*full] != [short]}


def kernels_document(
    rows: Sequence[KernelRow],
    cells: Sequence[CellRow] = (),
    *,
    full: bool = False,
    contexts: Mapping[str, str] | None = None,
) -> Document:
    """Return the document of `kernels` for one profiler.

    `contexts` maps the ids of runs to the contexts that headings of configs have, such as `H200,
    torch 2.11.0, run NAME`, and the complete texts of predicted places to short texts.

    Configs are in the order of the cells, and their kernels in the order of the first launch. The
    kernels of a program's trace are sorted by their total time. Unless `full` is set, only its longest
    ranges and their longest kernels are shown.
    """
    several_runs = len({row.run for row in rows} | {cell.run for cell in cells}) > 1
    columns = kernel_columns(rows, full=full)
    shown = _with_shares_of_trace(rows)
    longer = longer_names(rows)
    line = _line_maker(rows, longer, full)
    blocks: list[Block] = []
    folds = False
    what = noun(rows)
    most = MOST_KERNELS
    ranges = dict.fromkeys(map(_scope, rows), 1) if full else _shown_ranges(rows)
    for scope in dict.fromkeys([*((c.run, c.config, None) for c in cells), *ranges]):
        run, config, range_name = scope
        kernels_of = f"of range {range_name}" if range_name else "outside of any range"
        title = config or f"{what.capitalize()}s {kernels_of}"
        own = [row for row in shown if _scope(row) == scope]
        beside = [cell for cell in cells if (cell.run, cell.config, None) == scope]
        context = (contexts or {}).get(run, f"run {run}" if several_runs else "")
        detail = context if config or several_runs else ""
        if any(row.source in SOURCE_WORDS for row in own):
            where = run if full else (contexts or {}).get(run, run)
            detail = f"{where}, from its atlas"
        if foreign := bool(own) and all(row.cell is None for row in own):
            alike = f"the longest of {ranges[scope]} similar ranges" if ranges[scope] > 1 else ""
            kernels = own if full else merge_grids(own)
            kernels.sort(key=lambda row: -(row.total_ns or 0))
            few = "" if full else _few(kernels, most, what)
            detail = ", ".join(filter(None, (detail, alike, few)))
        blocks.append(Heading(title, detail))
        left: list[Note] = []
        if foreign:
            listed = kernels if full else kernels[:most]
            blocks.append(Table.of(columns, map(line, listed)))
            left = _rest(kernels[most:], what)
            if config is None:
                most = FEW_KERNELS
        elif own:
            backends = dict.fromkeys([*(c.backend for c in beside), *(r.backend for r in own)])
            place = {backend: number for number, backend in enumerate(backends)}
            own.sort(key=lambda row: (place[row.backend], row.profiler, row.device, row.first_ns))
            lines: list[tuple[Any, ...]] = []
            for _, group in groupby(own, key=attrgetter("backend", "profiler", "device")):
                mine = list(group)
                mine = mine if full else merge_grids(mine)
                minor = [] if full else _minor(mine)
                lines += [line(row) for row in mine if row not in minor]
                if minor:
                    folds = True
                    lines.append((_folded(minor), *line(minor[0])))
            blocks.append(Table.of(columns, lines))
        if not full:
            blocks += left
            folds |= bool(left)
        notes = (
            cell_notes(cell, [row for row in own if row.cell == cell.cell], full=full)
            for cell in beside
        )
        blocks += merged_notes(chain.from_iterable(notes))
    blocks += all_disabled_notes([row.backend for row in shown])
    if full:
        from profharness.commands.kernels.sources import source_notes  # only --full needs it

        blocks += [*source_notes(rows, longer), *full_name_notes(rows, longer)]
    others = _other_ranges(rows, ranges)
    blocks += others
    if folds or others:
        blocks.append(More(f"all {what}s"))
    if not full and len({*map(_place, rows)}) < len(rows):
        blocks.append(More("a row for each launch configuration"))
    if cells and rows:
        blocks.append(Note(_about_times(rows)))
    extra = {"cells": [cell_record(cell) for cell in cells]}
    answer = kernels_answer(rows, cells)
    records = tuple(map(kernel_record, rows))
    return Document(SCHEMA, "Kernels", tuple(blocks), FIELDS, records, extra, answer=answer)


def call_table(rows: Sequence[KernelRow], *, full: bool = False) -> Table:
    """Return a table of the kernels of calls, with the columns of `kernels` and without folding."""
    lines = map(_line_maker(rows, longer_names(rows), full), rows if full else merge_grids(rows))
    return Table.of(kernel_columns(rows, full=full), list(lines))


def _line_maker(
    rows: Sequence[KernelRow], longer: Mapping[str, str], full: bool
) -> Callable[[KernelRow], tuple[dict[str, Any], KernelRow]]:
    """Return a function that makes a line of a table from one of these rows.

    Unless `full` is set, it makes a line from a row that `merge_grids` returns.
    If the times of the rows have several sources, the name of a backend is followed by its source.
    """
    mixed = len({row.source for row in rows}) > 1
    grids: dict[tuple[object, ...], set[Triple | None]] = {}
    for each in rows:
        grids.setdefault(_place(each), set()).add(each.grid)

    def line(row: KernelRow) -> tuple[dict[str, Any], KernelRow]:
        count = len(grids[_place(row)])
        values = {
            "backend": sourced(row.backend, row.source) if mixed else row.backend,
            "kernel_short": longer.get(row.kernel, row.kernel_short),
            "grid": f"{count} grids" if count > 1 and not full else row.grid,
            "mean_launch_ns": row.total_ns and row.total_ns / row.launches,
        }
        return values, row

    return line


def _about_times(rows: Sequence[KernelRow]) -> str:
    """Return a note that says what kernel times include, and which measurement to use for a program."""
    if noun(rows) == "op":
        return (
            "The time of an op excludes the ops that it calls. For the time of a call, use bench."
        )
    meaning = WARM_KERNELS
    if all(row.profiler == NCU for row in rows):
        cold = "measured with cold caches, because ncu runs each kernel on its own"
        meaning = meaning.replace("with a warm L2 cache", cold)
    return (
        f"{meaning} For the time of a call in a program, use bench: its eager time includes the cost "
        "of launches, its graph time excludes this cost, and its cold time is measured with flushed "
        "caches."
    )


def _minor(rows: Sequence[KernelRow]) -> list[KernelRow]:
    """Return the kernels of a call that take a negligible share of its time, if there are several."""
    minor = [
        row
        for row in rows
        if row.share is not None and row.share < MINOR_SHARES.get(row.kernel_kind, MINOR_SHARE)
    ]
    return minor if len(minor) > 1 else []


def _folded(rows: Sequence[KernelRow]) -> dict[str, Any]:
    """Return the values of one line for several kernels: their number and sums.

    The values in which kernels differ are blank.
    """
    blank = (
        column.key for column in ROW_COLUMNS if column.key not in ("backend", "profiler", "device")
    )
    counts = [row.launches_per_call for row in rows]
    times = [row.call_ns for row in rows]
    return {
        **dict.fromkeys(blank, ""),
        "kernel_short": f"{len(rows)} other {noun(rows)}s",
        "launches_per_call": None if None in counts else sum(filter(None, counts)),
        "call_ns": None if None in times else sum(filter(None, times)),
        "share": sum(row.share or 0 for row in rows),
    }


def _shown_ranges(rows: Sequence[KernelRow]) -> dict[_Scope, int]:
    """Map each config to 1, and each range to be shown to the number of similar ranges.

    Of similar ranges, only the longest is shown.
    """
    shown = {_scope(row): 1 for row in rows if row.config is not None}
    return shown | {scopes[0]: len(scopes) for scopes in _similar_ranges(rows)[:MOST_RANGES]}


def _similar_ranges(rows: Iterable[KernelRow]) -> list[list[_Scope]]:
    """Group the ranges of a program that differ only in numbers, as steps do, the longest first."""
    times: Counter[_Scope] = Counter()
    for row in rows:
        if row.config is None:
            times[_scope(row)] += row.total_ns or 0
    alike: dict[tuple[str, str], list[_Scope]] = {}
    for scope, _ in times.most_common():
        alike.setdefault((scope[0], re.sub(r"\d+", "#", scope[2] or "")), []).append(scope)
    return [*alike.values()]


def _are_repeated(rows: Iterable[KernelRow]) -> bool:
    """Return whether a program's trace has similar ranges."""
    return any(len(scopes) > 1 for scopes in _similar_ranges(rows))


def _with_shares_of_trace(rows: Sequence[KernelRow]) -> Sequence[KernelRow]:
    """Return the kernels of a program's trace with their shares of the trace's kernel time.

    If the trace has similar ranges, keep the shares of the range, because a table of one range would
    otherwise show only a fraction of the share that a kernel has in the program. Also keep the shares
    of captured calls.
    """
    if any(row.cell is not None for row in rows) or _are_repeated(rows):
        return rows
    times: dict[tuple[str, str], list[int | None]] = {}
    for row in rows:
        times.setdefault((row.run, row.profiler), []).append(row.total_ns)
    whole = {key: sum(filter(None, own)) for key, own in times.items() if None not in own}
    shares = [
        row.total_ns / total
        if row.total_ns is not None and (total := whole.get((row.run, row.profiler)))
        else None
        for row in rows
    ]
    return [replace(row, share=share) for row, share in zip(rows, shares, strict=True)]


def merge_grids(rows: Iterable[KernelRow]) -> list[KernelRow]:
    """Merge the rows of each kernel of a call or range, which differ in their launch configurations.

    Add up launches, times and shares. Any other value in which the rows differ becomes None.
    """
    groups: dict[tuple[object, ...], list[KernelRow]] = {}
    for row in rows:
        groups.setdefault(_place(row), []).append(row)
    return [own[0] if len(own) == 1 else _merged(own) for own in groups.values()]


def _place(row: KernelRow) -> tuple[object, ...]:
    place = row.run, row.config, row.backend, row.cell, row.range, row.profiler, row.device
    return *place, row.source, row.kernel


def _merged(rows: Sequence[KernelRow]) -> KernelRow:
    values: dict[str, Any] = {
        name: None if len({str(getattr(row, name)) for row in rows}) > 1 else getattr(rows[0], name)
        for name in KERNEL
        if name not in _COMPUTED
    }
    for name in _SUMS:
        known = [getattr(row, name) for row in rows]
        values[name] = None if None in known else sum(known)
    return KernelRow(**{**values, "first_ns": min(row.first_ns for row in rows), "metrics": {}})


def _few(kernels: Sequence[KernelRow], most: int, what: str) -> str:
    """Return a text such as `the 15 longest of 46 kernels`, or "" if all are shown."""
    return f"the {most} longest of {len(kernels)} {what}s" if len(kernels) > most else ""


def _rest(kernels: Sequence[KernelRow], what: str) -> list[Note]:
    """Return a note on kernels of a program's trace that a table omits."""
    if not kernels:
        return []
    time = time_text(sum(row.total_ns or 0 for row in kernels))
    share = share_text(sum(row.share or 0 for row in kernels))
    counts = counted(len(kernels), f"more {what}")
    return [Note(f"{counts} {_take(len(kernels))} {time} ({share})")]


def _other_ranges(rows: Sequence[KernelRow], shown: Collection[_Scope]) -> list[Note]:
    """Return a note on the ranges of a program's trace that have no table."""
    others = [row for row in rows if _scope(row) not in shown]
    if not others:
        return []
    time = time_text(sum(row.total_ns or 0 for row in others))
    count = len(set(map(_scope, others)))
    return [Note(f"{counted(count, 'more range')} {_take(count)} {time}")]


def _take(count: int) -> str:
    return "takes" if count == 1 else "take"


def call_columns(columns: Iterable[Column], rows: Iterable[KernelRow]) -> tuple[Column, ...]:
    """Return columns of captured calls, with the titles of ops if the calls ran on a CPU."""
    titles = OF_OPS if noun(rows) == "op" else {}
    return tuple(titles.get(each.key, each) for each in columns)


def kernel_columns(rows: Iterable[KernelRow], *, full: bool) -> tuple[Column, ...]:
    """Return the columns that are useful for these rows. `full` also selects the time of a launch."""
    rows = list(rows)
    foreign = bool(rows) and all(row.cell is None for row in rows)
    hidden = {"backend", "launches_per_call", "call_ns"} if foreign else {"launches", "total_ns"}
    hidden |= {name for name in ("profiler", "device") if len({getattr(r, name) for r in rows}) < 2}
    # With one launch per call, the median repeats the mean time per call.
    if not full and any(row.call_ns is not None for row in rows):
        hidden.add("duration_ns")
    if all(row.shared_share is None for row in rows):  # the device is unknown
        hidden.add("shared_share")
    columns = tuple(column for column in ROW_COLUMNS if column.key not in hidden)
    if foreign:
        own = OF_PROGRAM | (OF_PROGRAM_OPS if noun(rows) == "op" else {})
        own |= {"share": OF_RANGE} if _are_repeated(rows) else {}
        return tuple(own.get(each.key, each) for each in columns)
    columns = call_columns(columns, rows)
    sources = {row.source for row in rows}
    if not sources & SOURCE_WORDS.keys():
        return columns
    title = f"{times_word(sources)} µs/call"
    return tuple(replace(each, title=title) if each.key == "call_ns" else each for each in columns)


def _scope(row: KernelRow) -> _Scope:
    return (row.run, row.config, None if row.config is not None else row.range or "")


def cell_notes(cell: CellRow, rows: Sequence[KernelRow], *, full: bool = False) -> list[Note]:
    """Return the notes below a table: missing kernels, replacements, disagreements and warnings.

    If `full` is set, a refusal has PyTorch's own message.
    """
    notes: list[Note] = []
    if cell.status != "ok":
        notes.append(status_note(cell.status, cell_reason(cell, full=full), cell.backend))
    elif not rows:
        text = cell.message or "the requested profilers recorded no kernels"
        notes.append(Note(text, cell.backend, "warning"))
    warnings = [*disagreements(cell, rows), *cell.warnings]
    if (backend := replaced_by(cell, rows)) is not None:
        warnings.insert(0, replacement_text(backend))
    return [*notes, *(Note(text, cell.backend, "warning") for text in warnings)]


MAX_TIME_RATIO = 1.25
MIN_TIME_DIFFERENCE_NS = 2000
# kinds of rows that ncu does not see, because it profiles kernels only
UNSEEN_BY_NCU = ("memcpy", "memset", "op")
# Values that must be equal in all profilers, as (field of the row, code of a disagreement, name of
# the value).
_AGREED = (
    ("launches_per_call", "launches", "launches per call"),
    ("registers_per_thread", "registers", "registers per thread"),
    ("shared_bytes", "shared_memory", "bytes of shared memory"),
)


@dataclass(frozen=True, slots=True)
class Disagreement:
    """One disagreement between profilers."""

    code: str  # one of `missing`, `launches`, `registers`, `shared_memory` and `time`
    text: str


@dataclass(frozen=True, slots=True)
class JoinedKernel:
    """A kernel of a cell, with the row that each profiler recorded."""

    rows: dict[str, KernelRow]  # the rows of this kernel by profiler
    disagreements: tuple[Disagreement, ...] = ()

    @property
    def first(self) -> KernelRow:
        """The first row. All rows have the same config, backend, kernel name, grid and block."""
        return next(iter(self.rows.values()))

    def values(self, name: str) -> dict[str, Any]:
        """Return the values of a field by profiler, without None, in the order of TRACE_PROFILERS."""
        rows = [self.rows[profiler] for profiler in TRACE_PROFILERS if profiler in self.rows]
        values = {row.profiler: getattr(row, name) for row in rows}
        return {profiler: value for profiler, value in values.items() if value is not None}


def join_kernels(rows: Iterable[KernelRow]) -> list[JoinedKernel]:
    """Join the rows of different profilers for the same kernel (canonical name, grid and block).

    For each config and backend, only the newest run of each profiler is used. `rows` must be sorted
    from the newest run to the oldest. If profilers have several rows of a kernel, the first rows are
    joined with each other, then the second rows, and so on.
    """
    # newest run by config and backend, and then by profiler
    runs: dict[tuple[str | None, str | None], dict[str, str]] = {}
    seen = Counter[tuple[Any, ...]]()
    joined: dict[tuple[Any, ...], dict[str, KernelRow]] = {}
    for row in rows:
        newest = runs.setdefault((row.config, row.backend), {})
        if newest.setdefault(row.profiler, row.run) == row.run:
            key = (row.config, row.backend, row.kernel, row.grid, row.block)
            joined.setdefault((*key, seen[row.profiler, *key]), {})[row.profiler] = row
            seen[row.profiler, *key] += 1
    return [_with_disagreements(JoinedKernel(own), runs[key[:2]]) for key, own in joined.items()]


def _with_disagreements(kernel: JoinedKernel, profilers: Iterable[str]) -> JoinedKernel:
    """Add the disagreements between profilers.

    `profilers` contains all profilers that recorded the cell.
    """
    points = []
    for name in TRACE_PROFILERS:
        unseen = name == NCU and kernel.first.kernel_kind in UNSEEN_BY_NCU
        if name in profilers and name not in kernel.rows and not unseen:
            points.append(Disagreement("missing", f"{name} did not record the kernel"))
    for name, code, what in _AGREED:
        values = kernel.values(name)
        if len(set(values.values())) > 1:
            texts = ", ".join(f"{profiler} {value:g}" for profiler, value in values.items())
            points.append(Disagreement(code, f"{what}: {texts}"))
    return replace(kernel, disagreements=(*points, *_time_disagreements(kernel.rows)))


def _time_disagreements(rows: dict[str, KernelRow]) -> list[Disagreement]:
    """Compare kernel times between profilers. ncu may report longer times, due to cold caches."""
    torch, nsys, ncu = rows.get(TORCH), rows.get(NSYS), rows.get(NCU)
    points = []
    for warm, other, both_ways in ((torch, nsys, True), (torch or nsys, ncu, False)):
        if warm is None or other is None or not warm.duration_ns or not other.duration_ns:
            continue
        ratio = other.duration_ns / warm.duration_ns
        odd = ratio < 1 / MAX_TIME_RATIO or (both_ways and ratio > MAX_TIME_RATIO)
        if odd and abs(other.duration_ns - warm.duration_ns) > MIN_TIME_DIFFERENCE_NS:
            text = (
                f"the kernel takes {ratio:.2f} times as long under {other.profiler} as under "
                f"{warm.profiler}"
            )
            points.append(Disagreement("time", text))
    return points


def witness_document(
    rows: Sequence[KernelRow], cells: Sequence[CellRow] = (), *, full: bool = False
) -> Document:
    """Return the document of `kernels --profiler all`. `rows` must start with the newest run."""
    joined = join_kernels(rows)
    longer = longer_names(rows)
    blocks: list[Block] = []
    # List cells first, so that a config without launches keeps its position.
    configs = dict.fromkeys(
        [*(cell.config for cell in cells), *(kernel.first.config for kernel in joined)]
    )
    for config in configs:
        own = [kernel for kernel in joined if kernel.first.config == config]
        beside = [cell for cell in cells if cell.config == config]
        blocks.append(Heading(config or "Kernels outside of any config"))
        if own:
            blocks.append(_table(own, longer))
        for cell in beside:
            mine = [row for kernel in own for row in kernel.rows.values() if row.cell == cell.cell]
            blocks += cell_notes(cell, mine, full=full)
        blocks += _disagreements(own)
        if full:
            blocks += _counters(own)
    if full:
        from profharness.commands.kernels.sources import source_notes  # only --full needs it

        blocks += [*source_notes(rows, longer), *full_name_notes(rows, longer)]
    blocks += _closing(rows, joined)
    extra = {
        "cells": [cell_record(cell) for cell in cells],
        "witnesses": [witness_record(kernel) for kernel in joined],
    }
    title, records = "Kernels under every profiler", tuple(map(kernel_record, rows))
    answer = (*kernels_answer(rows, cells), *_agreement(joined))
    return Document(SCHEMA, title, tuple(blocks), FIELDS, records, extra, answer=answer)


def _agreement(joined: Sequence[JoinedKernel]) -> Iterator[str]:
    """Yield a sentence on whether the profilers agree on the kernels."""
    if len({name for kernel in joined for name in kernel.rows}) < 2:
        return
    wrong = sum(bool(kernel.disagreements) for kernel in joined)
    if wrong:
        yield f"The profilers disagree on {wrong} of {counted(len(joined), 'kernel')}."
    else:
        many = len(joined) > 2
        which = f"all {len(joined):,}" if many else "both" if len(joined) == 2 else "the"
        yield f"The profilers agree on {which} {'kernel' if len(joined) == 1 else 'kernels'}."


def witness_record(kernel: JoinedKernel) -> dict[str, Any]:
    """Return the JSON record of a kernel, with the values and disagreements of the profilers."""
    names = ("config", "backend", "kernel", "grid", "block")
    return {
        **record(kernel.first, names),
        "profilers": {
            profiler: record(row, ("run", *COMPARED)) for profiler, row in kernel.rows.items()
        },
        "disagreements": [record(point) for point in kernel.disagreements],
    }


def _table(joined: Sequence[JoinedKernel], longer: Mapping[str, str]) -> Table:
    lines = [_line(kernel, longer) for kernel in joined]
    return Table.of(filled_columns(JOINED_COLUMNS, lines), lines)


def _line(kernel: JoinedKernel, longer: Mapping[str, str]) -> dict[str, Any]:
    ncu = kernel.rows.get(NCU)
    metrics = ncu.metrics if ncu else {}
    counters = read_counters(metrics)
    moved = [metrics[name][0] for name in (DRAM_READ, DRAM_WRITE) if name in metrics]
    own = ("backend", "grid", "block")
    common = ("shared_bytes", "shared_share", "registers_per_thread", "launches_per_call")
    times = kernel.values("duration_ns")
    return {
        **{name: getattr(kernel.first, name) for name in own},
        "kernel_short": longer.get(kernel.first.kernel, kernel.first.kernel_short),
        **{name: next(iter(kernel.values(name).values()), None) for name in common},
        **{name: times.get(name) for name in TRACE_PROFILERS},
        "achieved": metrics[ACTIVE_WARPS][0] / 100 if ACTIVE_WARPS in metrics else None,
        "dram": sum(moved) if moved else None,
        "dram_rate": ncu.dram_bytes_per_s if ncu else None,
        "tensor": counters.tensor_pipe,
        "l2_hits": counters.l2_hit_rate,
        "disagree": tuple(dict.fromkeys(point.code for point in kernel.disagreements)) or "",
    }


def _disagreements(joined: Sequence[JoinedKernel]) -> list[Note]:
    notes = [
        Note(f"{kernel.first.kernel_short}: {point.text}", kernel.first.backend or "", "warning")
        for kernel in joined
        for point in kernel.disagreements
    ]
    left = len(notes) - MAX_NOTES
    if left > 0:
        notes[MAX_NOTES:] = [Note(f"{left} more disagreements; the JSON has them all")]
    return notes


def _counters(joined: Sequence[JoinedKernel]) -> list[Block]:
    blocks: list[Block] = []
    for ncu in [kernel.rows[NCU] for kernel in joined if NCU in kernel.rows]:
        # sort counters before attributes
        names = sorted(ncu.metrics, key=lambda name: (name.startswith(_ATTRIBUTES), name))
        if rows := tuple((name, *ncu.metrics[name]) for name in names):
            grid = format_value(KERNEL["grid"], ncu.grid)
            detail = ", ".join(filter(None, (ncu.backend, f"grid {grid}")))
            blocks += [Heading(ncu.kernel, detail, level=3), Table(_COUNTERS, rows)]
    return blocks


def _closing(rows: Sequence[KernelRow], joined: Sequence[JoinedKernel]) -> list[Note]:
    """Return notes on missing profilers, and on how to read the times of ncu."""
    notes = []
    absent = set(TRACE_PROFILERS) - {row.profiler for row in rows}
    if absent and rows:
        text = (
            f"{join_and([name for name in TRACE_PROFILERS if name in absent])} recorded nothing "
            "here; to record with all three, use: profharness capture --profiler "
            f"{','.join(TRACE_PROFILERS)}"
        )
        notes.append(Note(text, level="hint"))
    ratios = [
        ncu.duration_ns / warm.duration_ns
        for kernel in joined
        if (ncu := kernel.rows.get(NCU))
        and (warm := kernel.rows.get(TORCH) or kernel.rows.get(NSYS))
        and ncu.duration_ns
        and warm.duration_ns
    ]
    if ratios:
        text = (
            "Use the times from torch or nsys, and use ncu only for its counters. ncu runs each "
            f"kernel on its own with cold caches, so a kernel takes {min(ratios):.2f} to "
            f"{max(ratios):.2f} times as long as under the other profilers."
        )
        notes.append(Note(text))
    return notes
