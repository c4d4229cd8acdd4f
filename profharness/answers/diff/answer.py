"""Pairs the cells of two sides by config, their kernels by role, and builds the rows of the
diff."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from profharness import stats
from profharness.answers.diff.kernels import (
    Groups,
    aligned,
    call_ns,
    changes,
    common_profiler,
    grouped,
)
from profharness.answers.diff.kernels import speed as launch_speed
from profharness.answers.diff.model import Change, Diff, DiffRow, Side, Verdict, environment_changes
from profharness.answers.roles import role_order
from profharness.errors import NotFoundError
from profharness.rows import CellRow, KernelRow

if TYPE_CHECKING:
    from profharness.config import Config
    from profharness.store import Store


NO_CONFIG = "(no config)"


@dataclass(frozen=True, slots=True)
class _Cell:
    """What one side knows about one config: its cell, if any, and the kernel rows of every
    profiler."""

    config: str
    backend: str | None
    cell: CellRow | None = None
    kernels: tuple[KernelRow, ...] = ()

    def of(self, profiler: str | None) -> tuple[KernelRow, ...]:
        return tuple(row for row in self.kernels if row.profiler == profiler)


def diff_cells(baseline: Side, candidate: Side, *, threshold: float = stats.THRESHOLD) -> Diff:
    """The diff of two sides: backends of one run, or runs.

    Sides that both name a backend pair by config, else by config and backend; a side that names
    none takes over the
    other's. Kernel rows of one profiler are compared: one that both sides have if possible, torch
    before nsys before ncu.
    threshold is the smallest relative change of a time that counts.
    """
    if baseline.backend is None or candidate.backend is None:
        backend = baseline.backend or candidate.backend
        baseline, candidate = (
            replace(baseline, backend=backend),
            replace(candidate, backend=backend),
        )
    by_config = baseline.backend is not None
    base, cand = _cells(baseline, by_config), _cells(candidate, by_config)
    rows: list[DiffRow] = []
    for key in [*base, *(key for key in cand if key not in base)]:
        rows += _diff_pair(baseline, candidate, base.get(key), cand.get(key), threshold)
    changed = environment_changes(baseline.environment, candidate.environment)
    return Diff(baseline.label, candidate.label, tuple(changed), tuple(rows))


def _cells(side: Side, by_config: bool) -> dict[tuple[str, str | None], _Cell]:
    """One side's cells by what they pair on, in the order of its rows."""
    found: dict[tuple[str, str | None], _Cell] = {}

    def key(config: str, backend: str | None) -> tuple[str, str | None]:
        return config, None if by_config else backend

    for cell in side.cells:
        if side.backend in (None, cell.backend):
            at = key(cell.config, cell.backend)
            found.setdefault(at, _Cell(cell.config, cell.backend, cell))
    for row in side.kernels:
        if side.backend not in (None, row.backend):
            continue
        config = row.config or row.range or NO_CONFIG
        at = key(config, row.backend)
        known = found.get(at, _Cell(config, row.backend))
        found[at] = replace(known, kernels=(*known.kernels, row))
    return found


def _diff_pair(
    baseline: Side, candidate: Side, base: _Cell | None, cand: _Cell | None, threshold: float
) -> Iterable[DiffRow]:
    if base is None or cand is None:
        return _one_sided(base, cand)
    rows: list[DiffRow] = []
    doubts = incomparable(baseline, candidate, base.cell, cand.cell)
    if base.cell and cand.cell:
        status = status_row(base.config, base.cell, cand.cell)
        if status is None:
            rows.append(call_row(base.config, base.cell, cand.cell, doubts, threshold))
        else:
            rows.append(status)
    return rows + _kernel_rows(base, cand, doubts, threshold)


def _one_sided(base: _Cell | None, cand: _Cell | None) -> list[DiffRow]:
    """A config that only one side has."""
    here = base or cand
    assert here is not None
    missing, verdict = ("candidate", "removed") if base else ("baseline", "added")
    profiler = common_profiler(here.kernels, here.kernels)[0]
    chosen = here.of(profiler)
    template = DiffRow(
        config=here.config,
        backend_baseline=base.backend if base else None,
        backend_candidate=cand.backend if cand else None,
        role="call",
        baseline=(),
        candidate=(),
        ratio=None,
        verdict="removed" if verdict == "removed" else "added",
        reasons=(f"the {missing} has no such config",),
        changes=(),
    )
    rows = [template] if here.cell else []
    for role, kernels in grouped(chosen).items():
        time = call_ns(kernels, _least(chosen))
        rows.append(
            replace(
                template,
                role=role,
                baseline=kernels if base else (),
                candidate=() if base else kernels,
                baseline_ns=time if base else None,
                candidate_ns=None if base else time,
                basis="profiler launches",
            )
        )
    return rows


def _kernel_rows(
    base: _Cell, cand: _Cell, doubts: Sequence[str], threshold: float
) -> list[DiffRow]:
    profilers = common_profiler(base.kernels, cand.kernels)
    kernels = base.of(profilers[0]), cand.of(profilers[1])
    if all(profilers) and profilers[0] != profilers[1]:
        doubts = (*doubts, f"times come from different profilers ({profilers[0]}, {profilers[1]})")
    calls = _least(kernels[0]), _least(kernels[1])
    groups: tuple[Groups, Groups] = grouped(kernels[0]), grouped(kernels[1])
    left, right, composite = aligned(*groups)
    rows = []
    for role in sorted({*left, *right}, key=lambda name: (role_order(name), name)):
        sides = left.get(role, ()), right.get(role, ())
        row = _kernel_row(role, sides, calls, doubts, threshold)
        if role in composite:
            text = "a fused kernel against the kernels of math: each side's whole direction"
            row = replace(row, composite=True, reasons=(text, *row.reasons))
        rows.append(replace(row, config=base.config, backend_baseline=base.backend))
    return [replace(row, backend_candidate=cand.backend) for row in rows]


def _kernel_row(
    role: str,
    sides: tuple[tuple[KernelRow, ...], tuple[KernelRow, ...]],
    calls: tuple[int, int],
    doubts: Sequence[str],
    threshold: float,
) -> DiffRow:
    """One role; config and backends are the caller's to fill in."""
    times = call_ns(sides[0], calls[0]), call_ns(sides[1], calls[1])
    found = changes(*sides) if all(sides) else ()
    verdict: Verdict
    reasons: tuple[str, ...]
    if not all(sides):
        here, verdict = ("baseline", "removed") if sides[0] else ("candidate", "added")
        reasons = (f"only the {here} launches it",)
    elif doubts:
        verdict, reasons = "changed" if found else "unknown", tuple(doubts)
    else:
        verdict, reason = launch_speed(*sides, calls, threshold)
        reasons = (reason,)
        if found and verdict in ("same", "unknown"):
            verdict = "changed"
    return DiffRow(
        config="",
        backend_baseline=None,
        backend_candidate=None,
        role=role,
        baseline=sides[0],
        candidate=sides[1],
        ratio=times[1] / times[0] if times[0] and times[1] else None,
        verdict=verdict,
        reasons=reasons,
        changes=found,
        changed=bool(found),
        baseline_ns=times[0],
        candidate_ns=times[1],
        basis="profiler launches",
    )


def _least(rows: Sequence[KernelRow]) -> int:
    """The calls that launches without a known number of calls stand for: the rarest kernel runs
    once a call."""
    return min((row.launches for row in rows), default=1) or 1


MEASUREMENTS = ("graph", "event", "wall")
MAX_CLOCK_RATIO = 1.05


def incomparable(
    baseline: Side, candidate: Side, base_cell: CellRow | None, cand_cell: CellRow | None
) -> tuple[str, ...]:
    """Why times of the two sides must not be compared; empty when they may be."""
    base, cand = baseline.environment, candidate.environment
    reasons = []
    for key, text in (("device_type", "kinds of device differ"), ("gpu", "the GPUs differ")):
        if base.get(key) is not None and cand.get(key) is not None and base[key] != cand[key]:
            reasons.append(f"{text} ({base[key]} and {cand[key]})")
    on_cpu = base.get("device_type") == cand.get("device_type") == "cpu"
    if on_cpu and base.get("cpu") != cand.get("cpu"):
        reasons.append(f"the CPUs differ ({base.get('cpu')} and {cand.get('cpu')})")
    clocks = [cell.clocks.get("sm_mhz", 0) if cell else 0 for cell in (base_cell, cand_cell)]
    if all(clocks) and max(clocks) / min(clocks) > MAX_CLOCK_RATIO:
        reasons.append(f"SM clocks differ by more than 5 % ({clocks[0]:g} and {clocks[1]:g} MHz)")
    return tuple(reasons)


def status_row(config: str, baseline: CellRow, candidate: CellRow) -> DiffRow | None:
    """How the cells ended; None where both are ok, `same` where both have one status and codes."""
    if baseline.status == candidate.status == "ok":
        return None
    codes = [_codes(cell) for cell in (baseline, candidate)]
    differing = []
    if baseline.status != candidate.status:
        differing.append(Change("status", baseline.status, candidate.status))
    if codes[0] != codes[1]:
        differing.append(Change("refusals", codes[0], codes[1]))
    return DiffRow(
        config=config,
        backend_baseline=baseline.backend,
        backend_candidate=candidate.backend,
        role="status",
        baseline=(),
        candidate=(),
        ratio=None,
        verdict="changed" if differing else "same",
        reasons=(f"baseline: {_told(baseline)}", f"candidate: {_told(candidate)}"),
        changes=tuple(differing),
        changed=bool(differing),
    )


def call_row(
    config: str, baseline: CellRow, candidate: CellRow, doubts: Sequence[str], threshold: float
) -> DiffRow:
    """Latency of the whole call, unprofiled: graph replay if both sides have it, events, or
    wall."""
    basis = next((n for n in MEASUREMENTS if _has(baseline, n) and _has(candidate, n)), None)
    verdict: Verdict = "unknown"
    ratio: float | None = None
    reasons = ["no unprofiled measurement that both sides have"]
    times: tuple[float, float] | tuple[None, None] = (None, None)
    if basis is not None:
        samples = baseline.samples[basis], candidate.samples[basis]
        compared = stats.compare(*samples, threshold=threshold)
        ratio, verdict, reasons = compared.ratio, compared.verdict, [compared.reason]
        times = stats.summarize(samples[0]).median, stats.summarize(samples[1]).median
    if doubts:
        verdict = "unknown"
    found = [
        Change(name, getattr(baseline, name), getattr(candidate, name))
        for name in ("sdpa_op", "choice", "peak_memory_bytes")
        if _known_to_differ(getattr(baseline, name), getattr(candidate, name))
    ]
    return DiffRow(
        config=config,
        backend_baseline=baseline.backend,
        backend_candidate=candidate.backend,
        role="call",
        baseline=(),
        candidate=(),
        ratio=ratio,
        verdict=verdict,
        reasons=(*doubts, *reasons),
        changes=tuple(found),
        baseline_ns=times[0],
        candidate_ns=times[1],
        basis=basis,
    )


def _codes(cell: CellRow) -> tuple[str, ...]:
    return tuple(sorted({refusal.code for refusal in cell.refusals}))


def _told(cell: CellRow) -> str:
    texts = [cell.message] if cell.message else [refusal.message for refusal in cell.refusals]
    codes = f" [{', '.join(_codes(cell))}]" if cell.refusals else ""
    return f"{cell.status}{codes}" + (f": {'; '.join(texts)}" if texts else "")


def _has(cell: CellRow, measurement: str) -> bool:
    return bool(cell.samples.get(measurement))


def _known_to_differ(baseline: object, candidate: object) -> bool:
    return baseline is not None and candidate is not None and baseline != candidate


def find_side(store: Store, text: str, configs: Sequence[Config]) -> Side:
    """The rows that RUN, RUN:BACKEND or a backend of the latest run stands for. Raises
    NotFoundError."""
    latest = store.latest_run_with(configs) if configs else None
    if ":" in text:
        ref, _, backend = text.partition(":")
        run = store.resolve(ref)
        _require_backend(backend, [cell.backend for cell in store.cells(run)], run)
    else:
        run, backend = latest or store.resolve("latest"), text
        known = dict.fromkeys(cell.backend for cell in store.cells(run))
        if text not in known:
            try:
                run, backend = store.resolve(text), ""
            except NotFoundError:
                raise NotFoundError(
                    f"{text!r} is neither a run nor a backend of the latest run {run} "
                    f"(it has {', '.join(known) or 'none'})"
                ) from None
    chosen = configs or None
    return Side(
        label=f"{run}:{backend}" if backend else run,
        cells=tuple(store.cells(run, configs=chosen)),
        kernels=tuple(store.kernels(run, configs=chosen)),
        backend=backend or None,
        environment=store.environment(run),
    )


def _require_backend(backend: str, known: Sequence[str], run: str) -> None:
    if backend not in known:
        has = ", ".join(dict.fromkeys(known)) or "none"
        raise NotFoundError(f"run {run} has no backend {backend!r}; it has {has}")
