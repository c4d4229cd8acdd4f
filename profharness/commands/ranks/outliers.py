"""Compare the ranks of a job by the times, numbers and families of their kernels."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
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
    usual_ranks,
)
from profharness.errors import NotFoundError, UsageError, counted, join_few, percent
from profharness.program.changes import environment_changes
from profharness.rows import RankKernel, RankLaunches, RankRow
from profharness.stats import THRESHOLD
from profharness.store.ranks import rank_launches, rank_rows
from profharness.traces.kernel_names import ATTENTION_FAMILIES, COLLECTIVE
from profharness.units import as_long, share_text

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Figures = NDArray[np.float64]
    Column = NDArray[np.int64]
    from profharness.store import Store

Families = Mapping[int, frozenset[str]]  # attention families by range

# factor from the median absolute deviation to the standard deviation of a normal distribution
MAD_TO_SIGMA = 1.4826
# Up to this number of ranks, each rank is compared with the median of the other ranks. In a larger
# job, it is compared with the median of all ranks, because a single rank hardly changes the median.
LEFT_OUT_UP_TO = 32
# A GPU counts as slow if slow kernels take more than this share of its compute time.
BROAD = 0.5
# Traces without ranks are compared only if, on average, at least this share of the kernels of a trace
# ran in most of the traces.
SAME_PROGRAM = 0.5
TO_RECORD_RANKS = (
    "initialize torch.distributed before profiling, or use file names such as rank3.json"
)
NAMES_SHOWN, RANKS_SHOWN = 3, 8


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

    def of_kernels(self, numbers: Iterable[int]) -> NDArray[np.bool_]:
        """Return a boolean mask that selects the keys of these kernels."""
        return np.isin(self.kernel, list(numbers))

    @property
    def computes(self) -> NDArray[np.bool_]:
        """Return a boolean mask that selects compute kernels, without copies and collectives."""
        kernels = self.kernels.items()
        return self.of_kernels(
            n for n, each in kernels if each.kind == "kernel" and each.family != COLLECTIVE
        )


def _launched(ranks: Sequence[RankRow], launches: RankLaunches) -> Launched:
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


def _medians_of_others(values: Figures) -> Figures:
    """Return, for each element, the median of the other elements in its column."""
    if len(values) > LEFT_OUT_UP_TO:
        return np.broadcast_to(_medians(values), values.shape)
    rows = range(len(values))
    return np.stack([_medians(np.delete(values, row, axis=0)) for row in rows])


def _medians(values: Figures) -> Figures:
    """Return the median of each column, ignoring NaN. The median of a column of NaN is NaN.

    This is faster than `numpy.nanmedian`.
    """
    ordered = np.sort(values, axis=0)  # places NaN at the end
    known = np.isfinite(values).sum(axis=0)
    at = np.arange(values.shape[1])
    low, high = np.maximum(known - 1, 0) // 2, np.minimum(known // 2, len(values) - 1)
    middle: Figures = (ordered[low, at] + ordered[high, at]) / 2
    return np.where(known > 0, middle, np.nan)


def _center(values: Figures) -> tuple[float, float]:
    """Return (the median, the standard deviation estimated from the median absolute deviation)."""
    middle = float(np.median(values))
    return middle, MAD_TO_SIGMA * float(np.median(np.abs(values - middle)))


def _distances(values: Figures) -> tuple[Figures, Figures]:
    """Return (the distance of each value above the median of the other values, the allowed distance).

    The allowed distance is SIGMAS times the standard deviation of the other values. NaN is ignored.
    """
    known = np.flatnonzero(np.isfinite(values))
    above, reach = np.full(len(values), np.nan), np.full(len(values), np.nan)
    if len(known) < 2:
        return above, reach
    seen = values[known]
    whole = _center(seen)
    for place, index in enumerate(known):
        leaves_out = len(seen) <= LEFT_OUT_UP_TO
        middle, sigma = _center(np.delete(seen, place)) if leaves_out else whole
        above[index], reach[index] = values[index] - middle, SIGMAS * sigma
    return above, reach


def compare_ranks(
    store: Store, refs: Sequence[str] = (), threshold: float = THRESHOLD
) -> RankComparison:
    """Compare the ranks that `refs` select. See `rank_rows` for the syntax.

    A GPU is reported as slow only if its ratio exceeds 1 by more than `threshold`. Raise
    NotFoundError if fewer than two ranks have kernels, and UsageError if no trace records its rank
    and the traces ran different kernels.
    """
    ranks = rank_rows(store, refs)
    table = _launched(ranks, rank_launches(store, ranks))
    if (table.count.sum(axis=1) > 0).sum() < 2:
        raise NotFoundError(
            f"{store.path}: fewer than two of {len(ranks)} ranks have GPU kernels to compare"
        )
    _require_one_job(ranks, table)
    families = _attention_families(table)
    rows = [_figures(rank, row, table, families[row]) for row, rank in enumerate(ranks)]
    findings = [
        *_slow(rows, table, threshold),
        *_other_attention(rows, families, table),
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
    hosts = {rank.host_key for rank in ranks}
    names = store.run_names()
    return RankComparison(
        rows=tuple(
            replace(
                row,
                name=names.get(row.run, row.run),
                findings=tuple(dict.fromkeys(codes.get(row.label, ()))),
            )
            for row in rows
        ),
        findings=tuple(findings),
        world_size=max((rank.world_size or 0 for rank in ranks), default=0) or None,
        hosts=None if None in hosts else len(hosts),
        spread=_center(ratios)[1] if len(ratios) > 2 else None,
        threshold=threshold,
        caveats=tuple(_caveats(rows, ranks)),
    )


def _require_one_job(ranks: Sequence[RankRow], table: Launched) -> None:
    """Raise UsageError if no trace records its rank and the traces ran different kernels.

    The ranks of a job run the same program, so most kernels of each rank also run on most ranks.
    """
    if any(rank.rank is not None for rank in ranks):
        return
    ran = [np.unique(table.kernel[np.flatnonzero(counts)]) for counts in table.count]
    _, times = np.unique(np.concatenate(ran), return_counts=True)
    shared = times[2 * times > len(ran)].sum() / times.sum()
    if shared < SAME_PROGRAM:
        names = join_few([rank.name for rank in ranks], NAMES_SHOWN)
        most = "the other trace" if len(ran) == 2 else "most traces"
        raise UsageError(
            f"{names} probably do not come from the ranks of one job: no trace records its rank, "
            f"and on average only {percent(shared)} of a trace's kernels ran in {most}, too; if they "
            f"do, {TO_RECORD_RANKS}; to compare two programs, use "
            "`profharness diff A B`"
        )


def _attention_families(table: Launched) -> list[Families]:
    """Return the families of the attention kernels in each range, for each rank."""
    names = {number: kernel.family for number, kernel in table.kernels.items()}
    ran: list[dict[int, frozenset[str]]] = [{} for _ in table.count]
    for key, number in enumerate(table.kernel.tolist()):
        if names[number] in ATTENTION_FAMILIES:
            place = int(table.place[key])
            for row in np.flatnonzero(table.count[:, key]).tolist():
                ran[row][place] = ran[row].get(place, frozenset()) | {names[number]}
    return [*ran]


def _figures(rank: RankRow, row: int, table: Launched, families: Families) -> RankFigures:
    times = rank.times
    span = sum(time.end_ns - time.start_ns for time in times)
    return RankFigures(
        rank=rank.rank,
        label=rank.label,
        run=rank.run,
        name=rank.run,
        device=rank.device,
        host_key=rank.host_key,
        gpu_key=rank.gpu_key,
        launches=int(table.count[row].sum()),
        ratio=None,
        compute_ns=int(np.nansum(table.total[row, table.computes])),
        span_ns=span if times else None,
        idle_ns=span - sum(time.busy_ns for time in times) if times else None,
        collective_ns=sum(time.collective_ns for time in times) if times else None,
        exposed_ns=sum(time.exposed_ns for time in times) if times else None,
        attention=tuple(sorted(set().union(*families.values()))),
    )


def _indices(values: Iterable[Any]) -> dict[Any, list[int]]:
    """Return the indices of each distinct value."""
    found: dict[Any, list[int]] = {}
    for index, value in enumerate(values):
        found.setdefault(value, []).append(index)
    return found


def _labels(rows: Sequence[RankFigures], indices: Iterable[int]) -> tuple[str, ...]:
    return tuple(rows[index].label for index in indices)


def _usual(rows: Sequence[RankFigures]) -> str:
    return usual_ranks([row.label for row in rows])


def _others(rows: Sequence[RankFigures]) -> str:
    return "the other ranks' GPUs are idle" if len(rows) > 2 else "the other rank's GPU is idle"


def _slow(rows: list[RankFigures], table: Launched, threshold: float) -> Iterator[RankFinding]:
    """Set the ratio of each rank, and yield findings on slow ranks.

    The ratio is the time of a rank's kernels divided by the median time of the same kernels on the
    other ranks. A GPU is only compared with GPUs of the same model.
    """
    for members in _indices(row.device for row in rows).values():
        count, total = table.count[members], table.total[members]
        keys = np.flatnonzero(table.computes & ((count > 0).sum(axis=0) > 1))
        if len(members) < 2 or not len(keys):
            continue
        count, total = count[:, keys], total[:, keys]
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = np.where(count > 0, total / count, np.nan)
            usual = _medians_of_others(mean)
            known = np.isfinite(mean) & np.isfinite(usual) & (usual > 0)
            mean, usual = np.where(known, mean, 0), np.where(known, usual, 0)
            own, expected = (mean * count).sum(axis=1), (usual * count).sum(axis=1)
            ratios = own / expected
            slow = mean > (1 + threshold / 2) * usual
            broad = (mean * count * slow).sum(axis=1) / own
            each = mean / usual
        # for each rank, the key that takes the most additional time compared to the other ranks
        worst = np.where(known, (mean - usual) * count, -np.inf).argmax(axis=1)
        _, reach = _distances(ratios)
        for place, index in enumerate(members):
            ratio, part = float(ratios[place]), float(broad[place])
            if not np.isfinite(ratio):
                continue
            rows[index] = replace(rows[index], ratio=ratio)
            if ratio - 1 <= max(threshold, float(np.nan_to_num(reach[place]))):
                continue
            if part > BROAD:
                text = (
                    f"its compute kernels take {as_long(ratio)} as the "
                    "median of the same kernels on the other ranks; the slower kernels account for "
                    f"{percent(part)} of the rank's compute time"
                )
                yield RankFinding(SLOW_GPU, (rows[index].label,), text)
                continue
            key = int(worst[place])
            kernel = table.kernels[int(table.kernel[keys[key]])].short
            text = (
                f"{kernel} takes {as_long(float(each[place, key]))} as the median of the "
                f"other ranks; all compute kernels together take {as_long(ratio)}"
            )
            yield RankFinding(SLOW_KERNELS, (rows[index].label,), text)


def _majority(values: Sequence[Hashable]) -> tuple[Any, int] | None:
    """Return (the value that most ranks have, the number of ranks that have it).

    If there are two ranks, the value of the first rank counts. Return None if no value has a
    majority.
    """
    (value, number), *_ = Counter(values).most_common(1)
    if len(values) == 2:
        return values[0], number
    return (value, number) if 2 * number > len(values) else None


def _other_attention(
    rows: Sequence[RankFigures], families: Sequence[Families], table: Launched
) -> Iterator[RankFinding]:
    """Yield a finding for each set of ranks that ran other attention kernels than most ranks.

    A finding lists all ranges in which these ranks deviate in the same way.
    """
    found: dict[tuple[int, frozenset[str], Any, int], list[int]] = {}
    for place in sorted(set().union(*families)):
        sets = [rank.get(place, frozenset()) for rank in families]
        usual = _majority(sets)
        for index, ran in enumerate(sets):
            if usual and ran != usual[0] and ran:
                found.setdefault((index, ran, *usual), []).append(place)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for (index, *kind), places in found.items():
        alike.setdefault((*kind, tuple(places)), []).append(index)
    for (ran, usual_set, number, places), indices in alike.items():
        others = " + ".join(sorted(usual_set)) or "no attention kernel"
        ranks = f"{number} of {len(rows)} ranks" if len(rows) > 2 else _usual(rows)
        named = [name for place in places if (name := table.places[place])]
        more = f" and {counted(len(named) - 1, 'more range')}" if len(named) > 1 else ""
        where = f" (in {named[0]!r}{more})" if named else ""
        text = f"ran the attention kernels {' + '.join(sorted(ran))}, but {ranks} ran {others}"
        yield RankFinding(OTHER_ATTENTION, _labels(rows, indices), f"{text}{where}")


def _uneven(table: Launched) -> Iterator[tuple[int, int, list[int]]]:
    """Yield (range, kernel, launches by rank) if the ranks launched a kernel unequally often."""
    kernels = table.kernels.items()
    keys = np.flatnonzero(table.of_kernels(n for n, each in kernels if each.kind == "kernel"))
    if not len(keys):
        return
    pairs, column = _unique(np.stack([table.place[keys], table.kernel[keys]], axis=1))
    order = np.argsort(column, kind="stable")
    begins = np.flatnonzero(np.r_[True, np.diff(column[order]) != 0])
    counts = np.add.reduceat(table.count[:, keys[order]], begins, axis=1).astype(np.int64)
    for index in np.flatnonzero((counts != counts[:1]).any(axis=0)).tolist():
        yield int(pairs[index, 0]), int(pairs[index, 1]), counts[:, index].tolist()


def _other_kernels(
    rows: Sequence[RankFigures], families: Sequence[Families], table: Launched
) -> Iterator[RankFinding]:
    """Yield a finding for each set of ranks whose launch counts deviate from those of most ranks."""
    seen: dict[int, dict[str, dict[str, None]]] = {}
    for place, number, counts in _uneven(table):
        usual = _majority(counts)
        if usual is None:
            continue
        kernel = table.kernels[number]
        ran = [rank.get(place, frozenset()) for rank in families]
        typical = _majority(ran)
        for index, launches in enumerate(counts):
            # Skip kernels of another backend, because `_other_attention` reports them.
            chose = ran[index] and typical is not None and ran[index] != typical[0]
            reported = chose and kernel.family in frozenset().union(*ran)
            if launches == usual[0] or reported:
                continue
            kind = "lacks" if not launches else "alone has" if not usual[0] else "launches"
            often = f" {counted(launches, 'time')}, not {usual[0]:,}" if kind == "launches" else ""
            kinds = seen.setdefault(index, {})
            kinds.setdefault(kind, {})[f"{kernel.short}{often}"] = None
    alike: dict[str, list[int]] = {}
    for index, kinds in seen.items():
        parts = []
        for kind in ("lacks", "alone has", "launches"):
            if names := [*kinds.get(kind, ())]:
                more = len(names) - NAMES_SHOWN
                rest = f" and {more} more kernels" if more > 0 else ""
                parts.append(f"{kind} {', '.join(names[:NAMES_SHOWN])}{rest}")
        alike.setdefault("; ".join(parts), []).append(index)
    for text, indices in alike.items():
        if len(indices) > 1:
            text = text.replace("lacks", "lack").replace("alone has", "alone have")
        yield RankFinding(
            OTHER_KERNELS, _labels(rows, indices), f"compared with {_usual(rows)}: {text}"
        )


def _other_software(rows: Sequence[RankFigures], ranks: Sequence[RankRow]) -> Iterator[RankFinding]:
    base: dict[str, Any] = {}
    for key in dict.fromkeys(key for rank in ranks for key in rank.environment):
        values = [json.dumps(rank.environment.get(key), sort_keys=True) for rank in ranks]
        if usual := _majority(values):
            base[key] = json.loads(usual[0])
    texts = (json.dumps(rank.environment, sort_keys=True, default=str) for rank in ranks)
    for indices in _indices(texts).values():
        environment = ranks[indices[0]].environment
        # ignore keys for which no value is shared by most ranks
        own = {key: value for key, value in environment.items() if key in base}
        for change in environment_changes(base, own):
            usual_value = "not recorded" if change.baseline is None else change.baseline
            text = f"{change.key} is {change.candidate}, but {usual_value} on {_usual(rows)}"
            if change.explains:
                text += f": {change.explains}"
            yield RankFinding(OTHER_SOFTWARE, _labels(rows, indices), text)


def _other_gpu(rows: Sequence[RankFigures]) -> Iterator[RankFinding]:
    models = [row.device for row in rows]
    usual = _majority(models)
    for model, indices in _indices(models).items():
        if usual and model != usual[0]:
            others = "most ranks run" if len(rows) > 2 else f"{_usual(rows)} runs"
            text = f"runs on {model or 'an unknown GPU'}, but {others} on {usual[0]}"
            yield RankFinding(OTHER_GPU, _labels(rows, indices), text)


def _above(values: Figures) -> Iterator[tuple[int, float]]:
    """Yield (index, distance) of the shares that lie far above the median of the other shares."""
    above, reach = _distances(values)
    for index in np.flatnonzero(above > np.maximum(WAIT_SHARE, np.nan_to_num(reach))).tolist():
        yield index, float(above[index])


def _waits(rows: Sequence[RankFigures]) -> Iterator[RankFinding]:
    shares = np.array([np.nan if row.idle_share is None else row.idle_share for row in rows])
    for index, above in _above(shares):
        own = shares[index]
        text = (
            f"its GPU is idle for {share_text(own)} of the span, but {_others(rows)} for only "
            f"{share_text(own - above)}"
        )
        yield RankFinding(WAITS, (rows[index].label,), text)


def _late(rows: Sequence[RankFigures], table: Launched) -> Iterator[RankFinding]:
    """Yield a finding for each rank that spends little time in collectives, because others wait.

    Only ranks that ran the usual number of collectives are compared.
    """
    keys = table.of_kernels(n for n, each in table.kernels.items() if each.family == COLLECTIVE)
    counts = table.count[:, keys].sum(axis=1).astype(int).tolist()
    usual = _majority(counts)
    if usual is None or not usual[0]:
        return
    shares = [
        row.collective_share if number == usual[0] and row.span_ns else np.nan
        for row, number in zip(rows, counts, strict=True)
    ]
    spent = np.array(shares, float)
    for index, below in _above(-spent):
        text = (
            f"spends {share_text(spent[index])} of its span in collectives; the other ranks spend "
            f"{share_text(spent[index] + below)}, because they wait for this rank"
        )
        yield RankFinding(LATE, (rows[index].label,), text)


def _missing(ranks: Sequence[RankRow]) -> Iterator[RankFinding]:
    size = max((rank.world_size or 0 for rank in ranks), default=0)
    absent = sorted(set(range(size)) - {rank.rank for rank in ranks if rank.rank is not None})
    if absent and any(rank.rank is not None for rank in ranks):
        names = join_few([str(rank) for rank in absent], RANKS_SHOWN)
        yield RankFinding(MISSING, (), f"the store lacks {len(absent)} of {size} ranks: {names}")


def _caveats(rows: Sequence[RankFigures], ranks: Sequence[RankRow]) -> Iterator[str]:
    """Yield sentences about properties that could not be compared."""
    if all(row.span_ns is None for row in rows):
        yield "Idle time and communication are unknown, because configs are captured one by one."
    if all(rank.rank is None for rank in ranks):
        yield (
            "No trace records its rank, so file names are shown, and nothing shows that the traces "
            f"come from one job. To record ranks, {TO_RECORD_RANKS}."
        )
    alone = [row.label for row in rows if row.ratio is None]
    if alone and len(alone) < len(rows):
        yield (
            f"The times of {join_few(alone, RANKS_SHOWN)} cannot be compared, because no other "
            "rank ran the same kernels."
        )
