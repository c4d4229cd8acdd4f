"""The kernels of two cells, grouped by role and compared: what they are, and what they take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from profharness import stats
from profharness.answers.diff.model import Change, Verdict
from profharness.answers.roles import ROLES, by_role, launches_per_call, role_order
from profharness.kernel_names import parse_kernel_name
from profharness.rows import TRACE_PROFILERS, KernelRow

Groups = dict[str, tuple[KernelRow, ...]]


MIN_LAUNCHES = 3
RESOLUTION_NS = 64  # two ticks of the 32 ns clock that device timestamps are read from
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


def grouped(rows: Iterable[KernelRow]) -> Groups:
    """The rows of one cell by role, in the order of ROLES."""
    groups = by_role(rows)
    return {name: tuple(groups[name]) for name in sorted(groups, key=role_order)}


def aligned(baseline: Groups, candidate: Groups) -> tuple[Groups, Groups, set[str]]:
    """Both sides in the same terms, and which roles are composite.

    Where one side has a fused kernel and the other the math kernels, a direction is one row.
    Where one side could not tell two matrix products apart, they are one row on both sides.
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
    """The profilers to compare, one that both sides have if possible, as TRACE_PROFILERS rank."""
    base, cand = {row.profiler for row in baseline}, {row.profiler for row in candidate}
    both = _preferred(base & cand)
    return (both, both) if both else (_preferred(base), _preferred(cand))


def changes(baseline: Sequence[KernelRow], candidate: Sequence[KernelRow]) -> tuple[Change, ...]:
    """The identity and launch properties that differ; an unknown value is no change."""
    sides = [[_properties(row) for row in rows] for rows in (baseline, candidate)]
    if Counter(sides[0]) == Counter(sides[1]):
        return ()
    differing = []
    for place, name in enumerate(FIELDS):
        base, cand = (tuple(row[place] for row in rows) for rows in sides)
        if _differs(base, cand):
            differing.append(Change(name, _scalar(base), _scalar(cand)))
    return tuple(differing)


def call_ns(rows: Sequence[KernelRow], calls: int) -> float | None:
    """Median time of a launch times launches per call, summed over rows.

    None without rows, or where one has no time. calls are for a row without launches per call.
    """
    return _summed(rows, [row.duration_ns for row in rows], calls) if rows else None


def speed(
    baseline: Sequence[KernelRow],
    candidate: Sequence[KernelRow],
    calls: tuple[int, int],
    threshold: float,
) -> tuple[Verdict, str]:
    """same, faster, slower or unknown from the launches' medians and ranges, and the reason."""
    times = (call_ns(baseline, calls[0]), call_ns(candidate, calls[1]))
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
    return ("slower" if ratio > 1 else "faster"), f"{basis}: {change}, beyond either side's range"


def _merged(groups: Groups, name: str, parts: Sequence[str]) -> Groups:
    rows = [row for part in groups if part in parts for row in groups[part]]
    rest = {part: group for part, group in groups.items() if part not in parts}
    return rest | {name: tuple(sorted(rows, key=lambda row: row.first_ns))} if rows else rest


def _preferred(profilers: set[str]) -> str | None:
    known = [name for name in TRACE_PROFILERS if name in profilers]
    return known[0] if known else min(profilers, default=None)


def _range(rows: Sequence[KernelRow], calls: int) -> tuple[float, float]:
    low = _summed(rows, [row.min_ns for row in rows], calls)
    high = _summed(rows, [row.max_ns for row in rows], calls)
    return low or 0.0, high or 0.0


def _summed(rows: Sequence[KernelRow], times: list[int | None], calls: int) -> float | None:
    """A time of each row, times its launches per call, summed; None if one is not known."""
    known = [time for time in times if time is not None]
    if len(known) < len(rows):
        return None
    return sum(time * launches_per_call(row, calls) for time, row in zip(known, rows, strict=True))


def _properties(row: KernelRow) -> tuple[Any, ...]:
    """The values of FIELDS; the tile is in the kernel's name."""
    tile = parse_kernel_name(row.kernel, row.kernel_kind).tile
    return tuple(tile if name == "tile" else getattr(row, name) for name in FIELDS)


def _differs(baseline: tuple[Any, ...], candidate: tuple[Any, ...]) -> bool:
    """Whether known values differ; sides of unlike length differ where anything is known."""
    if len(baseline) != len(candidate):
        return any(value is not None for value in (*baseline, *candidate))
    pairs = zip(baseline, candidate, strict=True)
    return any(a is not None and b is not None and a != b for a, b in pairs)


def _scalar(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 else values
