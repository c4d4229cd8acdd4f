"""Sweeps along one axis of a bench. They show which backend leads, where another overtakes it,
where a rate drops, how dtypes compare, and how peak memory grows with the length.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from profharness import stats
from profharness.attention.config import OWN_CHOICE, Config, parse_config, pytorch_chooses
from profharness.dtypes import CONFIG_DTYPES
from profharness.measurements.measurements import BenchRow

SamplesOf = Callable[[BenchRow], tuple[int, ...]]
Ran = Mapping[tuple[str, str], str | None]  # the backend that ran, by config and backend
DROP = 1.5  # minimum ratio of the rates at neighbouring values for which a drop is reported
BENT = 0.3  # minimum difference between the exponents at both ends for which both are reported
MIB = 1 << 20


class Axis(NamedTuple):
    """One property in which configs differ."""

    key: str
    title: str
    token: str  # a pattern that matches the axis in the label of a config
    value: Callable[[Config], int]


LENGTH = Axis("seq_len", "sequence length", r"-s(?:kv)?\d+(?=-)", lambda c: c.seq_len_kv)
AXES = (
    Axis("batch", "batch", r"^b\d+-", lambda c: c.batch),
    Axis("heads", "heads", r"-h\d+(?=-)", lambda c: c.num_heads),
    LENGTH,
    Axis("head_dim", "head_dim", r"-d\d+(?=-|$)", lambda c: c.head_dim),
)
DTYPE_TOKEN = rf"-(?:{'|'.join(CONFIG_DTYPES)})(?=-|$)"


def family(label: str, token: str) -> str:
    """Return the label of a config without the part that `token` matches."""
    return re.sub(token, "", label, count=1)


def families(labels: Sequence[str], axis: Axis) -> dict[str, dict[int, str]]:
    """Group configs that differ in this axis only. The result maps the shared part of the label to
    the labels of the configs by value, in ascending order. Each group has at least two values.
    """
    groups: dict[str, dict[int, str]] = {}
    for label in dict.fromkeys(labels):
        groups.setdefault(family(label, axis.token), {})[axis.value(parse_config(label))] = label
    return {name: dict(sorted(group.items())) for name, group in groups.items() if len(group) > 1}


@dataclass(frozen=True, slots=True)
class AxisEvent:
    """A change between two neighbouring values of an axis."""

    # `crossover` means that `backend` overtakes `other`. `end` means that `backend` replaces
    # `other`, which has no figure. `drop` means that the rate of `backend` falls by `factor`.
    kind: str
    backend: str
    before: int
    after: int
    text: str
    other: str | None = None
    factor: float | None = None

    @property
    def mark(self) -> str:
        """The text that marks the event in a chart, such as `math 3.1x slower than at 1,024`."""
        if self.kind == "crossover":
            return f"{self.backend} overtakes {self.other}"
        if self.kind == "end":
            return f"{self.other} ends"
        return f"{self.backend} {self.factor:.1f}x slower than at {self.before:,}"

    @property
    def place(self) -> float:
        """The position of the event's mark on a logarithmic axis."""
        between = math.sqrt(self.before * self.after)
        return float(self.after) if self.kind == "drop" else between


@dataclass(frozen=True, slots=True)
class Growth:
    """The growth of a backend's peak memory with the length, to which a power function is fitted."""

    backend: str
    points: tuple[tuple[int, int], ...]  # pairs of a length and a number of bytes
    order: float  # the exponent of the power
    first: float  # exponent of the power between the first two points
    last: float  # exponent of the power between the last two points

    @property
    def text(self) -> str:
        """A text such as `math S^1.94, 2.1 to 512 MiB`. It says so if there are too few points for
        a power function, or if the function does not fit.
        """
        low, high = (size / MIB for _, size in (self.points[0], self.points[-1]))
        sizes = f"{low:,.4g} to {high:,.4g} MiB"
        if len(self.points) == 2:
            return f"{self.backend} S^{self.order:.2f} by two points alone, {sizes}"
        if abs(self.last - self.first) > BENT:
            bent = f"S^{self.first:.2f} at first, S^{self.last:.2f} at the end"
            return f"{self.backend} {bent}, {sizes}"
        return f"{self.backend} S^{self.order:.2f}, {sizes}"


@dataclass(frozen=True, slots=True)
class Sweep:
    """A group of configs that differ in one axis only, and the events along this axis."""

    axis: str
    title: str
    name: str  # the part of the label that all configs share
    values: tuple[int, ...]
    labels: tuple[str, ...]
    events: tuple[AxisEvent, ...]
    statement: str
    growth: tuple[Growth, ...] = ()


def sweeps(rows: Sequence[BenchRow], samples_of: SamplesOf, ran: Ran) -> tuple[Sweep, ...]:
    """Return the sweeps over the rows of one measurement. They are sorted by axis, and the longest
    sweep of an axis comes first.
    """
    ranked = [row for row in rows if row.ranked and row.median_ns]
    places = {(row.config, row.backend): row for row in ranked}
    found = []
    for axis in AXES:
        groups = families([row.config for row in ranked], axis)
        for name, group in sorted(groups.items(), key=lambda item: -len(item[1])):
            lines = _lines(group, places)
            if not lines:
                continue
            rivals = _rivals(lines, ran)
            events = (*_crossovers(lines, rivals, samples_of), *_drops(lines, samples_of, ran))
            growth = _growths(lines) if axis is LENGTH else ()
            values, labels = tuple(group), tuple(group.values())
            told = _statement(rivals, events)
            sweep = Sweep(axis.key, axis.title, name, values, labels, events, told, growth)
            found.append(sweep)
    return tuple(found)


Lines = dict[str, dict[int, BenchRow]]  # rows by backend and by value of the axis


def _lines(group: Mapping[int, str], places: Mapping[tuple[str, str], BenchRow]) -> Lines:
    """Return the rows of each backend that was measured at two or more values."""
    backends = dict.fromkeys(backend for _, backend in places)
    lines = {
        backend: {
            value: places[label, backend]
            for value, label in group.items()
            if (label, backend) in places
        }
        for backend in backends
    }
    return {backend: line for backend, line in lines.items() if len(line) > 1}


def _rivals(lines: Lines, ran: Ran) -> Lines:
    """Return the lines without duplicate measurements. If a setting lets PyTorch choose, and
    PyTorch chose a backend that was measured at the same value, both are one backend that was
    measured twice. The row of the setting is then left out.
    """

    def is_another(row: BenchRow, value: int) -> bool:
        took = ran.get((row.config, row.backend))
        return not pytorch_chooses(row.backend) or value not in lines.get(took or "", {})

    kept = {
        name: {value: row for value, row in line.items() if is_another(row, value)}
        for name, line in lines.items()
    }
    return {name: line for name, line in kept.items() if line}


def _leaders(rivals: Lines) -> dict[int, BenchRow]:
    leaders: dict[int, BenchRow] = {}
    for line in rivals.values():
        for value, row in line.items():
            if value not in leaders or _ns(row) < _ns(leaders[value]):
                leaders[value] = row
    return dict(sorted(leaders.items()))


def _ns(row: BenchRow) -> float:
    return float(row.median_ns or 0)


def _crossovers(lines: Lines, rivals: Lines, samples_of: SamplesOf) -> list[AxisEvent]:
    """Return the events at which the fastest backend changes. The backend changes because the
    samples on both sides show it, or because the previous leader has no figure.
    """

    def ahead(one: str, other: str, value: int) -> bool:
        rows = lines[one].get(value), lines[other].get(value)
        if rows[0] is None or rows[1] is None:
            return False
        return stats.compare(samples_of(rows[1]), samples_of(rows[0])).verdict == "faster"

    events, leads = [], [(value, row.backend) for value, row in _leaders(rivals).items()]
    place, leader = leads[0]
    for value, backend in leads[1:]:
        if value not in lines[leader]:
            text = f"{leader} has no figure at {value:,}, where {backend} is fastest"
            events.append(AxisEvent("end", backend, place, value, text, other=leader))
            leader = backend
        elif backend != leader and ahead(backend, leader, value):
            if ahead(leader, backend, place):
                text = f"{backend} overtakes {leader} between {place:,} and {value:,}"
                events.append(AxisEvent("crossover", backend, place, value, text, other=leader))
            leader = backend
        if backend == leader:
            place = value
    return events


def _drops(lines: Lines, samples_of: SamplesOf, ran: Ran) -> list[AxisEvent]:
    """Return the events at which the samples show a much lower rate than at the previous value, the
    largest drop first.
    """
    events = []
    for backend, line in lines.items():
        for (before, old), (after, new) in pairwise(line.items()):
            if not old.flops_per_s or not new.flops_per_s:
                continue
            factor = old.flops_per_s / new.flops_per_s
            like_work = _scaled(samples_of(old), _ns(new) / _ns(old) / factor)
            if factor < DROP or stats.compare(like_work, samples_of(new)).verdict != "slower":
                continue
            took = [ran.get((row.config, backend)) for row in (old, new)]
            why = ""
            if pytorch_chooses(backend) and None not in took and took[0] != took[1]:
                why = f" (it took {took[1]} instead of {took[0]})"
            text = f"{backend} does {factor:.1f}x less work a second at {after:,} than at {before:,}{why}"
            events.append(AxisEvent("drop", backend, before, after, text, factor=factor))
    return sorted(events, key=lambda event: -(event.factor or 0))


def _scaled(samples: Sequence[int], factor: float) -> stats.Series:
    """Return the samples that `factor` times the work would have at the same rate."""
    turns = samples.turns if isinstance(samples, stats.Series) else ()
    return stats.Series.of((round(sample * factor) for sample in samples), turns)


SHOWN_EVENTS = 4
# minimum ratio of an inner maximum of the rate to the rates at both ends for which it is reported
SUMMIT = 1.05


def _statement(rivals: Lines, events: Sequence[AxisEvent]) -> str:
    """Return one or two sentences about which backend leads at which values, about the rates, and
    about the events.
    """
    leaders = _leaders(rivals)
    values = list(leaders)
    crossings = [event for event in events if event.kind != "drop"]
    names = dict.fromkeys(row.backend for row in leaders.values())
    if len(rivals) == 1:
        lead = ""
    elif len(names) == 1:
        lead = f"{next(iter(names))} has the lowest median at all {len(values)} values; "
    elif crossings:
        lead = f"{'; '.join(event.text for event in crossings)}; "
    else:
        spans = [f"{row.backend} at {value:,}" for value, row in leaders.items()]
        lead = f"the lowest median is that of {', '.join(spans)}; "
    rates = {value: row.flops_per_s / 1e12 for value, row in leaders.items() if row.flops_per_s}
    rate = ""
    if len(rates) > 1:
        (first, low), *_, (last, high) = rates.items()
        rate = f"the best rate goes from {low:,.4g} TFLOP/s at {first:,} to {high:,.4g} at {last:,}"
        top = max(rates, key=lambda value: rates[value])
        if rates[top] > SUMMIT * max(low, high):
            rate += f", and is {rates[top]:,.4g} at {top:,}"
    drops = [event.text for event in events if event.kind == "drop"]
    more = f" and {len(drops) - SHOWN_EVENTS} more" if len(drops) > SHOWN_EVENTS else ""
    fall = f". Drops: {'; '.join(drops[:SHOWN_EVENTS])}{more}" if drops else ""
    return f"{lead}{rate}{fall}".removesuffix("; ")


def _growths(lines: Lines) -> tuple[Growth, ...]:
    """Return the growth of peak memory of each backend whose peak memory is known at two or more
    lengths.
    """
    found = []
    for backend, line in lines.items():
        points = tuple(
            (value, row.peak_memory_bytes) for value, row in line.items() if row.peak_memory_bytes
        )
        if len(points) > 1:
            ends = _exponent(points[:2]), _exponent(points[-2:])
            found.append(Growth(backend, points, _exponent(points), *ends))
    return tuple(found)


def _exponent(points: Sequence[tuple[int, int]]) -> float:
    """Return the exponent of the points, which is the slope of a least-squares line through their
    logarithms.
    """
    xs, ys = ([math.log(value) for value in values] for values in zip(*points, strict=True))
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread


@dataclass(frozen=True, slots=True)
class DtypePair:
    """A comparison of two dtypes on otherwise equal configs and backends."""

    dtype: str
    other: str
    counts: Mapping[str, int]
    statement: str


WORDS: dict[str, str] = {
    "same": f"as fast (within {stats.THRESHOLD:.0%})",
    "faster": "faster",
    "slower": "slower",
    "unknown": "not told apart",
}


def dtype_pairs(rows: Sequence[BenchRow], samples_of: SamplesOf) -> tuple[DtypePair, ...]:
    """Compare every dtype with each dtype that comes before it in CONFIG_DTYPES."""
    cells: dict[tuple[str, str], dict[str, BenchRow]] = {}
    for row in rows:
        if row.ranked and row.backend not in OWN_CHOICE:
            dtype = str(parse_config(row.config).dtype)
            cells.setdefault((family(row.config, DTYPE_TOKEN), row.backend), {})[dtype] = row
    pairs = []
    for number, dtype in enumerate(CONFIG_DTYPES):
        for other in CONFIG_DTYPES[:number]:
            both = [
                (cell[other], cell[dtype]) for cell in cells.values() if {other, dtype} <= {*cell}
            ]
            if both:
                pairs.append(_dtype_pair(dtype, other, both, samples_of))
    return tuple(pairs)


def _dtype_pair(
    dtype: str,
    other: str,
    both: Sequence[tuple[BenchRow, BenchRow]],
    samples_of: SamplesOf,
) -> DtypePair:
    verdicts: dict[str, list[tuple[BenchRow, BenchRow]]] = {}
    for old, new in both:
        speed: str = stats.compare(samples_of(old), samples_of(new)).verdict
        verdicts.setdefault(speed, []).append((old, new))
    parts = []
    for verdict, words in WORDS.items():
        own = verdicts.get(verdict, [])
        if not own:
            continue
        text = f"{words} in {len(own)}"
        if verdict in ("faster", "slower"):
            old, new = max(own, key=lambda pair: abs(math.log(_ns(pair[1]) / _ns(pair[0]))))
            ratio = _ns(new) / _ns(old)
            factor = ratio if verdict == "slower" else 1 / ratio
            most = "up to " if len(own) > 1 else ""
            text += f" ({most}{factor:.2f}x, {new.backend} on {family(new.config, DTYPE_TOKEN)})"
        parts.append(text)
    counted = f"of {len(both)} pair{'s' if len(both) > 1 else ''} of cells"
    statement = f"{dtype} against {other}, {counted}: {', '.join(parts)}"
    counts = {verdict: len(own) for verdict, own in verdicts.items()}
    return DtypePair(dtype, other, counts, statement)
