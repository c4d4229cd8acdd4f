"""Compare the cells of two sides, paired by config, and their kernels, paired by role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from profharness import stats
from profharness.commands.diff.result import (
    LAUNCHES,
    MEMORY,
    REFUSED,
    Change,
    Cost,
    CostVerdict,
    Diff,
    DiffRow,
    Side,
)
from profharness.device_types import CPU
from profharness.measurements.measurements import clock_doubts, host_doubts
from profharness.program.changes import MIN_LAUNCHES, RESOLUTION_NS, Verdict, environment_changes
from profharness.program.matching import diff_layers
from profharness.program.roles import ROLES, by_role, launches_per_call, role_order
from profharness.rows import CALL_MEASUREMENTS, KERNEL, TRACE_PROFILERS, CellRow, KernelRow
from profharness.traces.kernel_names import parse_kernel_name

Groups = dict[str, tuple[KernelRow, ...]]

FORWARD = (
    *("attention", "combine", "qk", "softmax", "softmax_guard", "pv", "qk+pv"),
    *("mask", "scale", "dropout", "cast", "copy"),
)
BACKWARD = (
    *("attention_bwd", "bwd_preprocess", "bwd_postprocess", "gemm_bwd", "bwd_init"),
    *(name for name in ROLES if name.endswith("_bwd") or name[:2] in ("dV", "dP", "dK", "dQ")),
)
COMPOSITES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("attention", ("qk", "qk+pv"), FORWARD),
    ("attention_bwd", ("gemm_bwd", "dV", "dV+dP", "dK", "dK+dQ"), BACKWARD),
)
MERGES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("qk+pv", ("qk", "pv")),
    ("dV+dP", ("dV", "dP")),
    ("dK+dQ", ("dK", "dQ")),
    ("gemm_bwd", ("dV", "dP", "dV+dP", "dK", "dQ", "dK+dQ")),
)
FIELDS = (
    *("kernel", "tile", "grid", "block", "registers_per_thread"),
    *("shared_bytes", "static_shared_bytes", "dynamic_shared_bytes", "launches_per_call"),
)
NO_CONFIG = "(no config)"
MAX_CLOCK_RATIO = 1.05
PROFILED = "profiler launches"
KERNELS_ROLE = "kernels"  # the row of all kernels of a call, timed by samples


@dataclass(frozen=True, slots=True)
class _Cell:
    """A config on one side, with its cell (if there is one) and the kernel rows of all profilers."""

    config: str
    backend: str | None
    cell: CellRow | None = None
    kernels: tuple[KernelRow, ...] = ()

    def of(self, profiler: str | None) -> tuple[KernelRow, ...]:
        return tuple(row for row in self.kernels if row.profiler == profiler)


def diff_cells(baseline: Side, candidate: Side, *, threshold: float = stats.THRESHOLD) -> Diff:
    """Compare the cells of two sides. If a side names a backend, cells are paired by config, and a side
    that names no backend uses the backend of the other side. If neither side names a backend, cells
    are paired by config and backend. `threshold` is the smallest relative change that is reported.
    """
    if baseline.backend is None or candidate.backend is None:
        backend = baseline.backend or candidate.backend
        baseline, candidate = (replace(side, backend=backend) for side in (baseline, candidate))
    by_config = baseline.backend is not None
    base, cand = _cells(baseline, by_config), _cells(candidate, by_config)
    rows: list[DiffRow] = []
    costs: list[Cost] = []
    # not a union of sets, so that the rows keep the order of the sides
    for key in [*base, *(key for key in cand if key not in base)]:
        rows += _diff_pair(baseline, candidate, base.get(key), cand.get(key), threshold)
        if key in base and key in cand:
            costs += _costs(base[key], cand[key])
    changed = environment_changes(baseline.environment, candidate.environment)
    before, after = baseline.program, candidate.program
    layers = diff_layers(before, after, threshold) if before and after else ()
    described = all(side.environment.get("torch") for side in (baseline, candidate))
    return Diff(
        *(baseline.label, candidate.label, tuple(changed), tuple(rows), layers, described),
        costs=tuple(costs),
    )


def _costs(base: _Cell, cand: _Cell) -> Iterable[Cost]:
    """Yield the refusal, memory and launch costs of a cell that both sides have."""
    if base.cell is None or cand.cell is None:
        return
    cells = base.cell, cand.cell
    profilers = common_profiler(base.kernels, cand.kernels)
    kernels = base.of(profilers[0]), cand.of(profilers[1])
    yield from refusal_cost(*cells)
    yield from memory_cost(*cells)
    yield from launch_cost(*cells, kernels, (_call_count(kernels[0]), _call_count(kernels[1])))


def _cells(side: Side, by_config: bool) -> dict[tuple[str, str | None], _Cell]:
    """Return the cells of a side, in order, by the key on which they are paired."""
    cells: dict[tuple[str, str | None], _Cell] = {}
    for cell in side.cells:
        if side.backend in (None, cell.backend):
            key = cell.config, None if by_config else cell.backend
            cells.setdefault(key, _Cell(cell.config, cell.backend, cell))
    for row in side.kernels:
        if side.backend in (None, row.backend):
            config = row.config or row.range or NO_CONFIG
            key = config, None if by_config else row.backend
            entry = cells.get(key, _Cell(config, row.backend))
            cells[key] = replace(entry, kernels=(*entry.kernels, row))
    return cells


def _diff_pair(
    baseline: Side, candidate: Side, base: _Cell | None, cand: _Cell | None, threshold: float
) -> Iterable[DiffRow]:
    if base is None or cand is None:
        return _one_sided(base, cand)
    backends = {"backend_baseline": base.backend, "backend_candidate": cand.backend}
    pair = {"config": base.config, **backends}
    rows: list[DiffRow] = []
    doubts = incomparable(baseline, candidate, base.cell, cand.cell)
    if base.cell and cand.cell:
        row = status_row(pair, base.cell, cand.cell)
        rows.append(row or call_row(pair, base.cell, cand.cell, doubts, threshold))
    return rows + _kernel_rows(pair, base, cand, doubts, threshold)


def _one_sided(base: _Cell | None, cand: _Cell | None) -> list[DiffRow]:
    """Return the rows of a config that is present on only one side."""
    here = base or cand
    assert here is not None
    template = DiffRow(
        config=here.config,
        backend_baseline=base.backend if base else None,
        backend_candidate=cand.backend if cand else None,
        role="call",
        verdict="removed" if base else "added",
        reasons=(f"the {'candidate' if base else 'baseline'} has no such config",),
    )
    rows = [template] if here.cell else []
    own = here.of(common_profiler(here.kernels, here.kernels)[0])
    side = "baseline" if base else "candidate"
    for role, kernels in grouped(own).items():
        values: dict[str, Any] = {
            side: kernels,
            f"{side}_ns": kernels_call_ns(kernels, _call_count(own)),
        }
        rows.append(replace(template, role=role, basis=PROFILED, **values))
    return rows


def _kernel_rows(
    pair: dict[str, Any], base: _Cell, cand: _Cell, doubts: Sequence[str], threshold: float
) -> list[DiffRow]:
    profilers = common_profiler(base.kernels, cand.kernels)
    kernels = base.of(profilers[0]), cand.of(profilers[1])
    if all(profilers) and profilers[0] != profilers[1]:
        doubts = (*doubts, f"times come from different profilers ({profilers[0]}, {profilers[1]})")
    calls = _call_count(kernels[0]), _call_count(kernels[1])
    allowance = stats.process_allowance(
        *(_process_times(*side) for side in zip((base, cand), kernels, calls, strict=True))
    )
    left, right, composite = aligned(grouped(kernels[0]), grouped(kernels[1]))
    rows = []
    unseen = _why_unknown(base, kernels[0], "baseline") or _why_unknown(
        cand, kernels[1], "candidate"
    )
    # A set has no order. Roles without a rank are sorted by name.
    for role in sorted({*left, *right}, key=lambda name: (role_order(name), name)):
        sides = left.get(role, ()), right.get(role, ())
        row = _kernel_row(pair | {"role": role}, sides, calls, doubts, threshold, allowance)
        if unseen is not None:
            row = replace(row, verdict="unknown", reasons=(unseen,))
        if role in composite:
            text = "a fused kernel against the kernels of math: each side's whole direction"
            row = replace(row, composite=True, reasons=(text, *row.reasons))
        rows.append(row)
    return rows + _sum_rows(pair, base, cand, doubts, threshold, kernels)


def _sum_rows(
    pair: dict[str, Any],
    base: _Cell,
    cand: _Cell,
    doubts: Sequence[str],
    threshold: float,
    kernels: tuple[tuple[KernelRow, ...], tuple[KernelRow, ...]],
) -> list[DiffRow]:
    """Compare the total time of a call's kernels, if a side has no kernel rows (for example because
    its trace was deleted). Otherwise, return no row.
    """
    if all(kernels) or base.cell is None or cand.cell is None:
        return []
    sides = base.cell.samples, cand.cell.samples
    if not all(side.get(KERNEL) for side in sides):
        return []
    return [_timed_row(DiffRow(**pair, role=KERNELS_ROLE), KERNEL, *sides, doubts, threshold)]


def _process_times(side: _Cell, kernels: Sequence[KernelRow], calls: int) -> list[float]:
    """Return the total time of a call's kernels, in ns, for each process that measured it."""
    traced = kernels_call_ns(kernels, calls)
    samples = side.cell.samples.get(KERNEL, ()) if side.cell else ()
    medians = stats.process_medians(samples)
    if not traced:
        return []
    # in runs of older versions, only the trace contains the times of the first process
    return medians if stats.of_first_process(samples) else [traced, *medians]


def _why_unknown(side: _Cell, kernels: Sequence[KernelRow], name: str) -> str | None:
    """Return why the launches of a side are unknown, or None if they are known or it refused."""
    if kernels or side.cell is None or side.cell.status == "refused":
        return None
    if side.cell.status == "ok":
        return f"no profiler recorded the kernels of the {name}"
    return f"the {name} has no kernels, for its cell ended as {side.cell.status}"


def _kernel_row(
    pair: dict[str, Any],
    sides: tuple[tuple[KernelRow, ...], tuple[KernelRow, ...]],
    calls: tuple[int, int],
    doubts: Sequence[str],
    threshold: float,
    allowance: float | None,
) -> DiffRow:
    times = kernels_call_ns(sides[0], calls[0]), kernels_call_ns(sides[1], calls[1])
    differing = changes(*sides) if all(sides) else ()
    verdict: Verdict
    reasons: tuple[str, ...]
    if not all(sides):
        here, verdict = ("baseline", "removed") if sides[0] else ("candidate", "added")
        reasons = (f"only the {here} launches it",)
    elif doubts:
        verdict, reasons = "changed" if differing else "unknown", tuple(doubts)
    else:
        verdict, reason = speed(*sides, calls, threshold, allowance)
        reasons = (reason,)
        if differing and verdict in ("same", "unknown"):
            verdict = "changed"
    return DiffRow(
        **pair,
        baseline=sides[0],
        candidate=sides[1],
        ratio=times[1] / times[0] if times[0] and times[1] else None,
        verdict=verdict,
        reasons=reasons,
        changes=differing,
        changed=bool(differing),
        baseline_ns=times[0],
        candidate_ns=times[1],
        basis=PROFILED,
    )


def _call_count(rows: Sequence[KernelRow]) -> int:
    """Estimate the number of calls by assuming that the rarest kernel runs once per call."""
    return min((row.launches for row in rows), default=1) or 1


def incomparable(
    baseline: Side, candidate: Side, base_cell: CellRow | None, cand_cell: CellRow | None
) -> tuple[str, ...]:
    """Return the reasons why the times of the two sides cannot be compared, if there are any."""
    base, cand = baseline.environment, candidate.environment
    reasons = []
    for key, text in (("device_type", "kinds of device differ"), ("gpu", "the GPUs differ")):
        if base.get(key) is not None and cand.get(key) is not None and base[key] != cand[key]:
            reasons.append(f"{text} ({base[key]} and {cand[key]})")
    on_cpu = base.get("device_type") == cand.get("device_type") == CPU
    # the key `gpu` does not name the CPU
    if on_cpu and base.get("cpu") != cand.get("cpu"):
        reasons.append(f"the CPUs differ ({base.get('cpu')} and {cand.get('cpu')})")
    clocks = [cell.clocks.get("sm_mhz", 0) if cell else 0 for cell in (base_cell, cand_cell)]
    if all(clocks) and max(clocks) / min(clocks) > MAX_CLOCK_RATIO:
        reasons.append(f"SM clocks differ by more than 5 % ({clocks[0]:g} and {clocks[1]:g} MHz)")
    return tuple(reasons)


def status_row(pair: dict[str, Any], baseline: CellRow, candidate: CellRow) -> DiffRow | None:
    """Compare the statuses of two cells. Return None if both are `ok`. The verdict is `same` if both
    cells have the same status and the same refusal codes.
    """
    if baseline.status == candidate.status == "ok":
        return None
    statuses = baseline.status, candidate.status
    codes = _codes(baseline), _codes(candidate)
    differing = [Change("status", *statuses)] if statuses[0] != statuses[1] else []
    differing += [Change("refusals", *codes)] if codes[0] != codes[1] else []
    return DiffRow(
        **pair,
        role="status",
        verdict="changed" if differing else "same",
        reasons=(f"baseline: {_ending(baseline)}", f"candidate: {_ending(candidate)}"),
        changes=tuple(differing),
        changed=bool(differing),
    )


def call_row(
    pair: dict[str, Any],
    baseline: CellRow,
    candidate: CellRow,
    doubts: Sequence[str],
    threshold: float,
) -> DiffRow:
    """Compare the latency of the call by the first measurement in CALL_MEASUREMENTS on both sides."""
    differing = [
        Change(name, *values)
        for name in ("sdpa_op", "choice", "peak_memory_bytes")
        if None not in (values := (getattr(baseline, name), getattr(candidate, name)))
        and values[0] != values[1]
    ]
    row = DiffRow(**pair, role="call", changes=tuple(differing))
    samples = baseline.samples, candidate.samples
    basis = next(
        (name for name in CALL_MEASUREMENTS if all(side.get(name) for side in samples)), None
    )
    if basis is None:
        reason = "no unprofiled measurement that both sides have"
        return replace(row, reasons=(*doubts, reason))
    timed = _timed_row(row, basis, *samples, doubts, threshold)
    return replace(timed, reasons=(*timed.reasons, *_one_sided_doubts(baseline, candidate, basis)))


def _timed_row(
    row: DiffRow,
    basis: str,
    baseline: Mapping[str, Sequence[int]],
    candidate: Mapping[str, Sequence[int]],
    doubts: Sequence[str],
    threshold: float,
) -> DiffRow:
    """Compare the samples of a measurement that both sides have, and add the verdict to the row."""
    base, cand = baseline[basis], candidate[basis]
    compared = stats.compare(base, cand, threshold=threshold)
    return replace(
        row,
        ratio=compared.ratio,
        verdict="unknown" if doubts else compared.verdict,
        reasons=(*doubts, compared.reason),
        baseline_ns=stats.summarize(base).median,
        candidate_ns=stats.summarize(cand).median,
        basis=basis,
    )


def _one_sided_doubts(baseline: CellRow, candidate: CellRow, basis: str) -> tuple[str, ...]:
    """Return the doubts from clocks and parallel lanes that affect the times of only one side."""
    sides = {
        side: (*clock_doubts(cell.clocks), *host_doubts(cell, basis))
        for side, cell in (("baseline", baseline), ("candidate", candidate))
    }
    shared = set(sides["baseline"]) & set(sides["candidate"])
    return tuple(
        f"{side}: {text}" for side, texts in sides.items() for text in texts if text not in shared
    )


def _codes(cell: CellRow) -> tuple[str, ...]:
    # sorted, because a different order of the refusals is not a difference
    return tuple(sorted({refusal.code for refusal in cell.refusals}))


def _ending(cell: CellRow) -> str:
    codes = f" [{', '.join(_codes(cell))}]" if cell.refusals else ""
    return f"{cell.status}{codes}" + (f": {cell.reason}" if cell.reason else "")


def grouped(rows: Iterable[KernelRow]) -> Groups:
    """Group the rows of one cell by role, in the order of ROLES."""
    groups = by_role(rows)
    return {name: tuple(groups[name]) for name in sorted(groups, key=role_order)}


def aligned(baseline: Groups, candidate: Groups) -> tuple[Groups, Groups, set[str]]:
    """Express both sides in the same roles, and return them with the set of composite roles.

    If one side has a fused kernel and the other has the kernels of math, each direction (forward or
    backward) becomes one role. If one side cannot separate two products, they are merged on both.
    """
    composite: set[str] = set()
    for name, math, whole in COMPOSITES:
        fused = [name in side for side in (baseline, candidate)]
        maths = [any(part in side for part in math) for side in (baseline, candidate)]
        if (fused[0] and maths[1]) or (fused[1] and maths[0]):
            baseline, candidate = _merged(baseline, name, whole), _merged(candidate, name, whole)
            composite.add(name)
    for name, parts in MERGES:
        if name in baseline or name in candidate:
            baseline = _merged(baseline, name, (name, *parts))
            candidate = _merged(candidate, name, (name, *parts))
    return baseline, candidate, composite


def common_profiler(
    baseline: Sequence[KernelRow], candidate: Sequence[KernelRow]
) -> tuple[str | None, str | None]:
    """Return the profiler to use on each side. If both sides have a profiler in common, use it on
    both. Profilers are preferred in the order of TRACE_PROFILERS.
    """
    base, cand = {row.profiler for row in baseline}, {row.profiler for row in candidate}
    both = _preferred(base & cand)
    return (both, both) if both else (_preferred(base), _preferred(cand))


def changes(baseline: Sequence[KernelRow], candidate: Sequence[KernelRow]) -> tuple[Change, ...]:
    """Return the fields in FIELDS that differ. An unknown value does not count as a change."""
    sides = [[_properties(row) for row in rows] for rows in (baseline, candidate)]
    if Counter(sides[0]) == Counter(sides[1]):
        return ()
    differing = []
    for place, name in enumerate(FIELDS):
        base, cand = (tuple(row[place] for row in rows) for rows in sides)
        if len(base) == len(cand):
            pairs = zip(base, cand, strict=True)
            differs = any(None not in pair and pair[0] != pair[1] for pair in pairs)
        else:
            differs = any(value is not None for value in base + cand)
        if differs:
            values = (side[0] if len(side) == 1 else side for side in (base, cand))
            differing.append(Change(name, *values))
    return tuple(differing)


def kernels_call_ns(rows: Sequence[KernelRow], calls: int) -> float | None:
    """Return the time of the kernels in one call: the median launch time of each row times its
    launches per call, summed over the rows. Return None if a time is missing.
    """
    return _sum_per_call(rows, [row.duration_ns for row in rows], calls) if rows else None


def speed(
    baseline: Sequence[KernelRow],
    candidate: Sequence[KernelRow],
    calls: tuple[int, int],
    threshold: float,
    allowance: float | None = None,
) -> tuple[Verdict, str]:
    """Compare the medians and ranges of the launches, and return the verdict (same, faster, slower or
    unknown) with its reason. `allowance` is the largest ratio (1 or more) between processes that run
    the same code, or None if it is unknown.
    """
    times = kernels_call_ns(baseline, calls[0]), kernels_call_ns(candidate, calls[1])
    if not times[0] or not times[1]:
        return "unknown", "no duration on one side"
    ratio = times[1] / times[0]
    launches = [min(row.launches for row in rows) for rows in (baseline, candidate)]
    basis = f"medians of {launches[0]} and {launches[1]} profiled launches"
    change = f"{(ratio - 1) * 100:+.1f} %"
    if min(launches) < MIN_LAUNCHES:
        return "unknown", f"too few launches ({basis}, {change}; {MIN_LAUNCHES} are needed)"
    if not stats.beyond(ratio, threshold):
        return "same", f"{basis}: {change}, within the {threshold * 100:g} % threshold"
    if abs(times[1] - times[0]) <= RESOLUTION_NS * max(len(baseline), len(candidate)):
        return "same", f"{basis}: {change}, within the clock's resolution"
    base_range, cand_range = _range(baseline, calls[0]), _range(candidate, calls[1])
    apart = not base_range[0] <= times[1] <= base_range[1]
    if not (apart and not cand_range[0] <= times[0] <= cand_range[1]):
        return "unknown", f"{basis}: {change}, but the ranges of single launches overlap"
    if allowance is not None and max(ratio, 1 / ratio) <= allowance:
        apart_by = f"like processes differ by up to {(allowance - 1) * 100:.1f} %"
        return "unknown", f"{basis}: {change}, but {apart_by}"
    return ("slower" if ratio > 1 else "faster"), f"{basis}: {change}, beyond either side's range"


def _merged(groups: Groups, name: str, parts: Sequence[str]) -> Groups:
    rows = [row for part in groups if part in parts for row in groups[part]]
    rest = {part: group for part, group in groups.items() if part not in parts}
    return rest | {name: tuple(sorted(rows, key=lambda row: row.first_ns))} if rows else rest


def _preferred(profilers: set[str]) -> str | None:
    ranked = (name for name in TRACE_PROFILERS if name in profilers)
    # the smallest name, because sets are unordered
    return next(ranked, min(profilers, default=None))


def _range(rows: Sequence[KernelRow], calls: int) -> tuple[float, float]:
    low = _sum_per_call(rows, [row.min_ns for row in rows], calls)
    high = _sum_per_call(rows, [row.max_ns for row in rows], calls)
    return low or 0.0, high or 0.0


def _sum_per_call(rows: Sequence[KernelRow], times: list[int | None], calls: int) -> float | None:
    """Multiply each row's time by its launches per call and sum up. Return None if a time is None."""
    present = [time for time in times if time is not None]
    if len(present) < len(rows):
        return None
    return sum(
        time * launches_per_call(row, calls) for time, row in zip(present, rows, strict=True)
    )


def _properties(row: KernelRow) -> tuple[Any, ...]:
    """Return a kernel's values of FIELDS. The tile is parsed from the kernel's name."""
    tile = parse_kernel_name(row.kernel, row.kernel_kind).tile
    return tuple(tile if name == "tile" else getattr(row, name) for name in FIELDS)


MEMORY_THRESHOLD = 0.01
"""The smallest relative change of peak memory that is reported. Peaks are repeatable to the byte,
but the allocator rounds each allocation up to 512 bytes."""


def memory_cost(baseline: CellRow, candidate: CellRow) -> Iterator[Cost]:
    """Compare the peak memory if both sides report it. Runs on a CPU report no peak memory."""
    peaks = baseline.peak_memory_bytes, candidate.peak_memory_bytes
    if peaks[0] and peaks[1]:
        same = not stats.beyond(peaks[1] / peaks[0], MEMORY_THRESHOLD)
        yield _cost(MEMORY, baseline, candidate, (peaks[0], peaks[1]), same=same)


def launch_cost(
    baseline: CellRow,
    candidate: CellRow,
    kernels: tuple[Sequence[KernelRow], Sequence[KernelRow]],
    calls: tuple[int, int],
) -> Iterator[Cost]:
    """Compare the launches of one call, including copies, if one profiler recorded both sides.
    `calls` is the number of calls on each side, used for rows that do not record it.
    """
    if all(kernels) and kernels[0][0].profiler == kernels[1][0].profiler:
        counts = [
            round(sum(launches_per_call(row, number) for row in rows), 2)
            for rows, number in zip(kernels, calls, strict=True)
        ]
        same = counts[0] == counts[1]
        yield _cost(LAUNCHES, baseline, candidate, (counts[0], counts[1]), same=same)


def refusal_cost(baseline: CellRow, candidate: CellRow) -> Iterator[Cost]:
    """Yield whether a config is newly refused or accepted. Skip cells that failed otherwise."""
    statuses = baseline.status, candidate.status
    verdicts: dict[tuple[str, str], CostVerdict] = {
        ("ok", "refused"): "refused",
        ("refused", "ok"): "accepted",
    }
    same = statuses[0] == statuses[1] in ("ok", "refused")
    if same or statuses in verdicts:
        pair = baseline.config, baseline.backend, candidate.backend
        yield Cost(*pair, REFUSED, *statuses, verdict=verdicts.get(statuses, "same"))


def _cost(
    what: str, baseline: CellRow, candidate: CellRow, values: tuple[float, float], *, same: bool
) -> Cost:
    ratio = values[1] / values[0] if values[0] else None
    verdict: CostVerdict = "same" if same else "more" if values[1] > values[0] else "less"
    pair = baseline.config, baseline.backend, candidate.backend
    return Cost(*pair, what, *values, verdict=verdict, ratio=ratio)
