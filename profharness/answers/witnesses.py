"""The same kernels under several profilers: rows joined on canonical name, grid and block, and every
point on which the witnesses disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from profharness.rows import TRACE_PROFILERS, KernelRow, Triple

MAX_TIME_RATIO = 1.25
MIN_TIME_DIFFERENCE_NS = 2000
UNSEEN_BY_NCU = ("memcpy", "memset", "op")  # ncu profiles kernels alone


_Key = tuple[str | None, str | None, str, Triple | None, Triple | None, int]


@dataclass(frozen=True, slots=True)
class Disagreement:
    """One point. code: `missing` `launches` `registers` `shared_memory` `time`."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Witnesses:
    """One kernel of one cell as each profiler saw it; rows by profiler."""

    config: str | None
    backend: str | None
    kernel: str
    kernel_short: str
    grid: Triple | None
    block: Triple | None
    rows: dict[str, KernelRow]
    disagreements: tuple[Disagreement, ...] = field(default=())

    def value(self, name: str, *order: str) -> Any:
        """A field of the first profiler's row that knows it, in the order given (or TRACE_PROFILERS)."""
        known = (
            getattr(self.rows[profiler], name)
            for profiler in order or TRACE_PROFILERS
            if profiler in self.rows
        )
        return next((value for value in known if value is not None), None)

    def metric(self, name: str) -> float | None:
        """A counter of ncu's row."""
        row = self.rows.get("ncu")
        return row.metrics[name][0] if row is not None and name in row.metrics else None


def join(rows: Iterable[KernelRow]) -> list[Witnesses]:
    """Kernels of all cells, in the order of their first row.

    Rows may come from several runs, newest first: of each profiler the newest run that has a
    config on a backend counts. Where a profiler has several rows of one name, grid and block
    (another dynamic shared memory), they pair in the order of their first launch.
    """
    chosen: dict[tuple[str | None, str | None, str], str] = {}
    seen: dict[tuple[Any, ...], int] = {}
    joined: dict[_Key, dict[str, KernelRow]] = {}
    for row in rows:
        if chosen.setdefault((row.config, row.backend, row.profiler), row.run) != row.run:
            continue
        key = (row.config, row.backend, row.kernel, row.grid, row.block)
        place = seen[row.profiler, *key] = seen.get((row.profiler, *key), -1) + 1
        joined.setdefault((*key, place), {})[row.profiler] = row
    told: dict[tuple[str | None, str | None], set[str]] = {}
    for config, backend, profiler in chosen:
        told.setdefault((config, backend), set()).add(profiler)
    return [_witnesses(key, found, told[key[:2]]) for key, found in joined.items()]


def _witnesses(key: _Key, rows: dict[str, KernelRow], told: set[str]) -> Witnesses:
    config, backend, kernel, grid, block, _ = key
    first = next(iter(rows.values()))
    found = [*_missing(first, rows, told), *(each for check in CHECKS for each in check(rows))]
    return Witnesses(config, backend, kernel, first.kernel_short, grid, block, rows, tuple(found))


def _missing(first: KernelRow, rows: dict[str, KernelRow], told: set[str]) -> list[Disagreement]:
    expected = {name for name in told if name != "ncu" or first.kernel_kind not in UNSEEN_BY_NCU}
    absent = [name for name in TRACE_PROFILERS if name in expected - rows.keys()]
    return [Disagreement("missing", f"{name} did not see it") for name in absent]


def _differs(rows: dict[str, KernelRow], name: str, code: str, what: str) -> list[Disagreement]:
    known = {
        profiler: getattr(rows[profiler], name)
        for profiler in TRACE_PROFILERS
        if profiler in rows and getattr(rows[profiler], name) is not None
    }
    if len(set(known.values())) < 2:
        return []
    return [Disagreement(code, f"{what}: {', '.join(f'{k} {v:g}' for k, v in known.items())}")]


def _launches(rows: dict[str, KernelRow]) -> list[Disagreement]:
    return _differs(rows, "launches_per_call", "launches", "launches per call")


def _registers(rows: dict[str, KernelRow]) -> list[Disagreement]:
    return _differs(rows, "registers_per_thread", "registers", "registers per thread")


def _shared(rows: dict[str, KernelRow]) -> list[Disagreement]:
    return _differs(rows, "shared_bytes", "shared_memory", "bytes of shared memory")


def _time(rows: dict[str, KernelRow]) -> list[Disagreement]:
    """nsys against torch both ways; ncu only where it is faster, for cold caches make it slower."""
    torch, nsys, ncu = (rows.get(name) for name in TRACE_PROFILERS)
    warm = torch or nsys
    pairs = [(torch, nsys, 1 / MAX_TIME_RATIO), (warm, ncu, None)]
    found = []
    for one, other, low in pairs:
        if one is None or other is None or not one.duration_ns or not other.duration_ns:
            continue
        ratio = other.duration_ns / one.duration_ns
        odd = ratio < (low or 1 / MAX_TIME_RATIO) or (low is not None and ratio > MAX_TIME_RATIO)
        if odd and abs(other.duration_ns - one.duration_ns) > MIN_TIME_DIFFERENCE_NS:
            text = f"{other.profiler} takes {ratio:.2f} times as long as {one.profiler}"
            found.append(Disagreement("time", text))
    return found


CHECKS: tuple[Callable[[dict[str, KernelRow]], list[Disagreement]], ...] = (
    _launches,
    _registers,
    _shared,
    _time,
)


def cold_ratio(joined: Sequence[Witnesses]) -> tuple[float, float] | None:
    """How much longer ncu's kernels took than torch's (or nsys's), lowest and highest; None without
    a pair.
    """
    ratios = [
        each.rows["ncu"].duration_ns / warm.duration_ns
        for each in joined
        if "ncu" in each.rows
        and each.rows["ncu"].duration_ns
        and (warm := each.rows.get("torch") or each.rows.get("nsys"))
        and warm.duration_ns
    ]
    return (min(ratios), max(ratios)) if ratios else None
