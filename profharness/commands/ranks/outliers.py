"""Compare the ranks of a job by the times, counts and families of the kernels they launched."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from profharness.commands.ranks.comparison import (
    LATE,
    MISSING,
    OTHER_ATTENTION,
    OTHER_GPU,
    OTHER_KERNELS,
    OTHER_SOFTWARE,
    SIGMAS,
    SLOW_GPU,
    SLOW_KERNELS,
    WAIT_SHARE,
    WAITS,
    RankComparison,
    RankFigures,
    RankFinding,
)
from profharness.errors import NotFoundError, join_few
from profharness.program.changes import environment_changes
from profharness.rows import RankKernel, RankLaunches, RankRow
from profharness.stats import THRESHOLD
from profharness.traces.kernel_names import ATTENTION_FAMILIES, COLLECTIVE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Figures = NDArray[np.float64]
    Column = NDArray[np.int64]
    from profharness.rows import RankRow
    from profharness.store import Store

# factor from the median absolute deviation to the standard deviation of a normal distribution
MAD_TO_SIGMA = 1.4826
# maximum number of ranks for which a rank is left out of the median that it is compared with;
# in a larger job, a single rank hardly changes the median
LEFT_OUT_UP_TO = 32


@dataclass(frozen=True, slots=True)
class Launched:
    """The number and the total time of the launches, by rank (row) and key (column).

    A key consists of a range, a kernel and its launch configuration.
    """

    count: Figures
    total: Figures  # in ns; NaN if the time of a launch is unknown
    place: Column
    kernel: Column
    kernels: dict[int, RankKernel]
    places: dict[int, str]

    @property
    def computes(self) -> NDArray[np.bool_]:
        """Return a mask of the keys that are compute kernels, neither copies nor collectives."""
        wanted = [
            n for n, k in self.kernels.items() if k.kind == "kernel" and k.family != COLLECTIVE
        ]
        return np.isin(self.kernel, wanted)


def launched(ranks: Sequence[RankRow], launches: RankLaunches) -> Launched:
    """Return the launches as matrices, with one row for each rank, in the order of `ranks`."""
    table = np.array(launches.groups, np.int64).reshape(-1, 7)
    owner = {trace: row for row, rank in enumerate(ranks) for trace in rank.traces}
    traces, which = np.unique(table[:, 0], return_inverse=True)
    row = np.array([owner[trace] for trace in traces.tolist()], np.int64)[which]
    keys, column = _unique(table[:, 1:4])
    shape = (len(ranks), len(keys))
    cell = row * shape[1] + column
    times = np.where(table[:, 5] < 0, np.nan, table[:, 5])
    length = shape[0] * shape[1]
    count: Figures = np.bincount(cell, table[:, 4], length).astype(float).reshape(shape)
    total: Figures = np.bincount(cell, times, length).astype(float).reshape(shape)
    return Launched(count, total, keys[:, 0], keys[:, 1], launches.kernels, launches.places)


def _unique(columns: Column) -> tuple[Column, Column]:
    """Return the distinct rows, and the index of each row among them."""
    key = np.zeros(len(columns), np.int64)
    for values in columns.T:
        _, inverse = np.unique(values, return_inverse=True)
        _, key = np.unique(key * (inverse.max(initial=0) + 1) + inverse, return_inverse=True)
    _, first = np.unique(key, return_index=True)
    return columns[first], key


@dataclass(frozen=True, slots=True)
class Paces:
    """The time of each rank's kernels relative to the other ranks."""

    ratio: Figures  # NaN for a rank that has no kernel in common with another rank
    broad: Figures  # share of the rank's compute time that is spent in slow kernels
    worst: Column  # the key that loses the most time against the other ranks
    worst_ratio: Figures  # ratio of the mean time of that key to the median of the other ranks


def paces(table: Launched, members: Sequence[int], slow: float) -> Paces:
    """Return the paces of the ranks in the rows `members`, in that order.

    A kernel is slow if it takes more than `slow` times as long as on the other ranks.
    """
    rows = np.asarray(members)
    count, total = table.count[rows], table.total[rows]
    keys = table.computes & ((count > 0).sum(axis=0) > 1)
    count, total = count[:, keys], total[:, keys]
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(count > 0, total / count, np.nan)
    usual = _medians_of_others(mean)
    known = np.isfinite(mean) & np.isfinite(usual) & (usual > 0)
    mean, usual = np.where(known, mean, 0), np.where(known, usual, 0)
    own, expected = (mean * count).sum(axis=1), (usual * count).sum(axis=1)
    is_slow = mean > slow * usual
    lost = np.where(known, (mean - usual) * count, -np.inf)
    places = np.flatnonzero(keys)
    worst = lost.argmax(axis=1) if len(places) else np.zeros(len(rows), np.int64)
    with np.errstate(invalid="ignore", divide="ignore"):
        each = mean / usual
        return Paces(
            ratio=own / expected,
            broad=(mean * count * is_slow).sum(axis=1) / own,
            worst=places[worst] if len(places) else worst,
            worst_ratio=each[np.arange(len(rows)), worst] if len(places) else own,
        )


def _medians_of_others(values: Figures) -> Figures:
    """Return, for each element, the median of the other elements in its column."""
    if len(values) > LEFT_OUT_UP_TO:
        return np.broadcast_to(_medians(values), values.shape)
    rows = range(len(values))
    return np.stack([_medians(np.delete(values, row, axis=0)) for row in rows])


def _medians(values: Figures) -> Figures:
    """Return the median of each column, ignoring NaN. It is NaN if a column has no other value.

    This is faster than `numpy.nanmedian`.
    """
    ordered = np.sort(values, axis=0)  # places NaN at the end
    known = np.isfinite(values).sum(axis=0)
    at = np.arange(values.shape[1])
    low, high = np.maximum(known - 1, 0) // 2, np.minimum(known // 2, len(values) - 1)
    middle: Figures = (ordered[low, at] + ordered[high, at]) / 2
    return np.where(known > 0, middle, np.nan)


def center(values: Figures) -> tuple[float, float]:
    """Return (the median, the standard deviation estimated from the median absolute deviation)."""
    middle = float(np.median(values))
    return middle, MAD_TO_SIGMA * float(np.median(np.abs(values - middle)))


def outside(values: Figures, sigmas: float) -> tuple[Figures, Figures]:
    """Return (how far each value lies above the median of the other values, how far it may lie).

    The second array has `sigmas` times the standard deviation of the other values, estimated from
    their median absolute deviation. NaN is ignored.
    """
    known = np.flatnonzero(np.isfinite(values))
    above, reach = np.full(len(values), np.nan), np.full(len(values), np.nan)
    if len(known) < 2:
        return above, reach
    seen = values[known]
    if len(seen) > LEFT_OUT_UP_TO:
        middle, sigma = center(seen)
        above[known] = seen - middle
        reach[known] = sigmas * sigma
        return above, reach
    for place, index in enumerate(known):
        middle, sigma = center(np.delete(seen, place))
        above[index] = values[index] - middle
        reach[index] = sigmas * sigma
    return above, reach


def attention(table: Launched) -> tuple[list[int], list[dict[int, frozenset[str]]]]:
    """Return (the ranges in which attention ran, the attention families of each rank by range)."""
    names = {number: kernel.family for number, kernel in table.kernels.items()}
    keys = [
        key
        for key, number in enumerate(table.kernel.tolist())
        if names[number] in ATTENTION_FAMILIES
    ]
    ran: list[dict[int, set[str]]] = [{} for _ in table.count]
    for key in keys:
        place, family = int(table.place[key]), names[int(table.kernel[key])]
        for row in np.flatnonzero(table.count[:, key]).tolist():
            ran[row].setdefault(place, set()).add(family)
    places = list(dict.fromkeys(table.place[keys].tolist()))
    return places, [
        {place: frozenset(families) for place, families in rank.items()} for rank in ran
    ]


def uneven(table: Launched) -> Iterator[tuple[int, int, Column]]:
    """Yield (range, kernel, launches by rank) for each kernel whose ranks launched it unequally often."""
    keys = np.flatnonzero(
        np.isin(table.kernel, [n for n, kernel in table.kernels.items() if kernel.kind == "kernel"])
    )
    if not len(keys):
        return
    pairs, column = _unique(np.stack([table.place[keys], table.kernel[keys]], axis=1))
    order = np.argsort(column, kind="stable")
    begins = np.flatnonzero(np.r_[True, np.diff(column[order]) != 0])
    counts = np.add.reduceat(table.count[:, keys[order]], begins, axis=1).astype(np.int64)
    for index in np.flatnonzero((counts != counts[:1]).any(axis=0)).tolist():
        yield int(pairs[index, 0]), int(pairs[index, 1]), counts[:, index]


# A GPU is called slow if a larger share of its compute time than this is spent in slow kernels.
BROAD = 0.5
NAMES_SHOWN, RANKS_SHOWN = 3, 8


def compare_ranks(
    store: Store, refs: Sequence[str] = (), threshold: float = THRESHOLD
) -> RankComparison:
    """Compare the ranks that `refs` select. See `Store.ranks` for the syntax.

    A GPU is reported as slow only if its ratio exceeds 1 by more than `threshold`. Raise
    NotFoundError if fewer than two ranks have kernels.
    """
    ranks = store.ranks(refs)
    table = launched(ranks, store.rank_launches(ranks))
    if (table.count.sum(axis=1) > 0).sum() < 2:
        raise NotFoundError(
            f"{store.path}: {len(ranks)} ranks, and no two with kernels on a GPU to compare"
        )
    places, families = attention(table)
    rows = [_figures(rank, row, table, families[row]) for row, rank in enumerate(ranks)]
    rows, slow = _slow(rows, ranks, table, threshold)
    findings = [
        *slow,
        *_other_attention(rows, places, families, table),
        *_other_kernels(rows, families, table),
        *_other_software(rows, ranks),
        *_other_gpu(rows),
        *_waits(rows),
        *_late(rows, table),
        *_missing(ranks),
    ]
    codes: dict[str, list[str]] = {}
    for finding in findings:
        for label in finding.ranks:
            codes.setdefault(label, []).append(finding.code)
    ratios = np.array([row.ratio for row in rows if row.ratio is not None])
    _, spread = center(ratios)
    hosts = {rank.host_key for rank in ranks}
    return RankComparison(
        rows=tuple(
            replace(row, findings=tuple(dict.fromkeys(codes.get(row.label, ())))) for row in rows
        ),
        findings=tuple(findings),
        world_size=max((rank.world_size or 0 for rank in ranks), default=0) or None,
        hosts=None if None in hosts else len(hosts),
        spread=spread if len(ratios) > 2 else None,
        threshold=threshold,
        caveats=tuple(_caveats(rows, ranks)),
    )


def _figures(
    rank: RankRow, row: int, table: Launched, families: Mapping[int, frozenset[str]]
) -> RankFigures:
    compute = np.nansum(table.total[row, table.computes])
    span = sum(time.end_ns - time.start_ns for time in rank.times)
    timed = bool(rank.times)
    return RankFigures(
        rank=rank.rank,
        label=rank.label,
        run=rank.run,
        device=rank.device,
        host_key=rank.host_key,
        gpu_key=rank.gpu_key,
        launches=int(table.count[row].sum()),
        ratio=None,
        compute_ns=int(compute),
        span_ns=span if timed else None,
        idle_ns=span - sum(time.busy_ns for time in rank.times) if timed else None,
        collective_ns=sum(time.collective_ns for time in rank.times) if timed else None,
        exposed_ns=sum(time.exposed_ns for time in rank.times) if timed else None,
        attention=tuple(sorted(set().union(*families.values()))),
    )


def _slow(
    rows: list[RankFigures], ranks: Sequence[RankRow], table: Launched, threshold: float
) -> tuple[list[RankFigures], list[RankFinding]]:
    """Compute the ratio of each rank. Return (the rows with their ratios, findings on slow ranks).

    A GPU is only compared with GPUs of the same model.
    """
    findings, made = [], list(rows)
    models: dict[str | None, list[int]] = {}
    for index, rank in enumerate(ranks):
        models.setdefault(rank.device, []).append(index)
    for members in models.values():
        if len(members) < 2:
            continue
        pace = paces(table, members, 1 + threshold / 2)
        _, reach = outside(pace.ratio, SIGMAS)
        for place, index in enumerate(members):
            ratio = float(pace.ratio[place])
            if not np.isfinite(ratio):
                continue
            made[index] = replace(rows[index], ratio=ratio)
            if ratio - 1 <= max(threshold, float(np.nan_to_num(reach[place]))):
                continue
            label = rows[index].label
            than = "than the same kernels on the median of the other ranks"
            share = float(pace.broad[place])
            if share > BROAD:
                text = (
                    f"compute kernels take {ratio - 1:.1%} longer {than}; "
                    f"{share:.0%} of their time lies in kernels that are slower"
                )
                findings.append(RankFinding(SLOW_GPU, (label,), text))
                continue
            kernel = table.kernels[int(table.kernel[pace.worst[place]])].short
            text = (
                f"{kernel} takes {float(pace.worst_ratio[place]):.2f} times as long {than}; most of "
                f"its other kernels do not, all compute kernels together take {ratio - 1:.1%} longer"
            )
            findings.append(RankFinding(SLOW_KERNELS, (label,), text))
    return made, findings


def _majority(values: Sequence[Hashable]) -> tuple[Hashable, int] | None:
    """Return (the value that most ranks have, the number of ranks that have it).

    If there are two ranks, the value of the first rank counts. Return None if no value has a
    majority.
    """
    (value, number), *_ = Counter(values).most_common(1)
    if len(values) == 2:
        return values[0], number
    return (value, number) if 2 * number > len(values) else None


def _other_attention(
    rows: Sequence[RankFigures],
    places: Sequence[int],
    families: Sequence[Mapping[int, frozenset[str]]],
    table: Launched,
) -> Iterator[RankFinding]:
    """Yield a finding for each set of ranks that ran other attention kernels than most ranks.

    A finding lists all ranges in which these ranks deviate in the same way.
    """
    found: dict[tuple[int, frozenset[str], Any, int], list[int]] = {}
    for place in places:
        sets = [rank.get(place, frozenset()) for rank in families]
        usual = _majority(sets)
        for index, ran in enumerate(sets):
            if usual and ran != usual[0] and ran:
                found.setdefault((index, ran, *usual), []).append(place)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for (index, *kind), where in found.items():
        alike.setdefault((*kind, tuple(where)), []).append(index)
    for (ran, usual_set, number, where), indices in alike.items():
        others = " + ".join(sorted(usual_set)) or "no attention kernel"
        text = (
            f"attention ran {' + '.join(sorted(ran))}, on {number} of {len(rows)} ranks {others}"
            f"{_in_places([table.places[place] for place in where])}"
        )
        yield RankFinding(OTHER_ATTENTION, _labels(rows, indices), text)


def _in_places(names: Sequence[str]) -> str:
    """Return ` (in 'step' and 2 more ranges)`. Return an empty text if no range has a name."""
    named = [name for name in names if name]
    if not named:
        return ""
    more = f" and {len(named) - 1} more" if len(named) > 1 else ""
    return f" (in {named[0]!r}{more})"


def _other_kernels(
    rows: Sequence[RankFigures],
    families: Sequence[Mapping[int, frozenset[str]]],
    table: Launched,
) -> Iterator[RankFinding]:
    """Yield a finding for each set of ranks whose launch counts deviate from those of most ranks."""
    seen: dict[int, dict[str, list[str]]] = {}
    for place, kernel, counts in uneven(table):
        numbers = counts.tolist()
        usual = _majority(numbers)
        if usual is None:
            continue
        name = table.kernels[kernel].short
        typical = _majority([rank.get(place, frozenset()) for rank in families])
        for index, number in enumerate(numbers):
            # `_other_attention` reports the kernels of another backend
            ran = families[index].get(place, frozenset())
            chose = bool(ran) and typical is not None and ran != typical[0]
            if number == usual[0] or (
                chose and table.kernels[kernel].family in _own(families, place)
            ):
                continue
            kind = "lacks" if not number else "alone has" if not usual[0] else "launches"
            often = f" {number:,} times, not {usual[0]:,}" if kind == "launches" else ""
            seen.setdefault(index, {}).setdefault(kind, []).append(f"{name}{often}")
    alike: dict[str, list[int]] = {}
    for index, kinds in seen.items():
        parts = [
            f"{kind} {_some(kinds[kind])}"
            for kind in ("lacks", "alone has", "launches")
            if kind in kinds
        ]
        alike.setdefault("; ".join(parts), []).append(index)
    for text, indices in alike.items():
        several = len(indices) > 1
        sentence = (
            text.replace("lacks", "lack").replace("alone has", "alone have") if several else text
        )
        yield RankFinding(OTHER_KERNELS, _labels(rows, indices), f"against most ranks: {sentence}")


def _own(families: Sequence[Mapping[int, frozenset[str]]], place: int) -> frozenset[str]:
    return frozenset().union(*(rank.get(place, frozenset()) for rank in families))


def _some(names: Sequence[str]) -> str:
    unique = list(dict.fromkeys(names))
    more = len(unique) - NAMES_SHOWN
    return ", ".join(unique[:NAMES_SHOWN]) + (f" and {more} more kernels" if more > 0 else "")


def _other_software(rows: Sequence[RankFigures], ranks: Sequence[RankRow]) -> Iterator[RankFinding]:
    texts = [json.dumps(rank.environment, sort_keys=True, default=str) for rank in ranks]
    base: dict[str, Any] = {}
    split: set[str] = set()  # keys for which no value is shared by most ranks
    for key in dict.fromkeys(key for rank in ranks for key in rank.environment):
        values = [json.dumps(rank.environment.get(key), sort_keys=True) for rank in ranks]
        usual = _majority(values)
        if usual is None:
            split.add(key)
        else:
            base[key] = json.loads(str(usual[0]))
    alike: dict[str, list[int]] = {}
    for index, text in enumerate(texts):
        alike.setdefault(text, []).append(index)
    for indices in alike.values():
        environment = ranks[indices[0]].environment
        own = {key: value for key, value in environment.items() if key not in split}
        for change in environment_changes(base, own):
            text = f"{change.key} is {change.candidate}, on most ranks {change.baseline}"
            if change.explains:
                text += f": {change.explains}"
            yield RankFinding(OTHER_SOFTWARE, _labels(rows, indices), text)


def _other_gpu(rows: Sequence[RankFigures]) -> Iterator[RankFinding]:
    models = [row.device for row in rows]
    usual = _majority(models)
    for model in dict.fromkeys(models):
        if usual and model != usual[0]:
            indices = [index for index, name in enumerate(models) if name == model]
            text = f"runs on {model or 'a GPU that is not told'}, most ranks on {usual[0]}"
            yield RankFinding(OTHER_GPU, _labels(rows, indices), text)


def _waits(rows: Sequence[RankFigures]) -> Iterator[RankFinding]:
    shares = np.array([np.nan if row.idle_share is None else row.idle_share for row in rows])
    above, reach = outside(shares, SIGMAS)
    for index, row in enumerate(rows):
        if above[index] > max(WAIT_SHARE, float(np.nan_to_num(reach[index]))):
            usual = shares[index] - above[index]
            text = f"its GPU is idle for {shares[index]:.0%} of its span, those of the others for {usual:.0%}"
            yield RankFinding(WAITS, (row.label,), text)


def _late(rows: Sequence[RankFigures], table: Launched) -> Iterator[RankFinding]:
    """Report ranks that spend the least time in collectives, so that other ranks wait for them.

    Only ranks that ran the usual number of collectives are compared.
    """
    numbers = [n for n, kernel in table.kernels.items() if kernel.family == COLLECTIVE]
    counts = table.count[:, np.isin(table.kernel, numbers)].sum(axis=1).astype(int).tolist()
    usual = _majority(counts)
    if usual is None or not usual[0]:
        return
    spent = np.array(
        [
            row.collective_share if number == usual[0] and row.span_ns else np.nan
            for row, number in zip(rows, counts, strict=True)
        ],
        float,
    )
    above, reach = outside(-spent, SIGMAS)
    for index, row in enumerate(rows):
        if above[index] > max(WAIT_SHARE, float(np.nan_to_num(reach[index]))):
            usual_share = spent[index] + above[index]
            text = (
                f"spends {spent[index]:.0%} of its span in collectives, the others {usual_share:.0%}: "
                "they wait for it there"
            )
            yield RankFinding(LATE, (row.label,), text)


def _missing(ranks: Sequence[RankRow]) -> Iterator[RankFinding]:
    size = max((rank.world_size or 0 for rank in ranks), default=0)
    absent = sorted(set(range(size)) - {rank.rank for rank in ranks if rank.rank is not None})
    if absent and any(rank.rank is not None for rank in ranks):
        names = join_few([str(rank) for rank in absent], RANKS_SHOWN)
        yield RankFinding(MISSING, (), f"of {size} ranks these are not stored: {names}")


def _caveats(rows: Sequence[RankFigures], ranks: Sequence[RankRow]) -> Iterator[str]:
    """Yield sentences about what the figures do not show."""
    if all(row.span_ns is None for row in rows):
        yield "waits and communication are not told: cells are captured one by one"
    if all(rank.rank is None for rank in ranks):
        yield (
            "no trace tells its rank (Kineto does once torch.distributed is initialised; a name such as "
            "rank3.json does too): they are named by their files"
        )
    alone = sorted({str(row.device) for row in rows if row.ratio is None})
    if alone:
        yield f"no other rank has kernels like those on {', '.join(alone)}, so their pace is not told"


def _labels(rows: Sequence[RankFigures], indices: Sequence[int]) -> tuple[str, ...]:
    return tuple(rows[index].label for index in indices)
