"""Summarize a stored run: what ran, what was refused and why, what auto cost, what to change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from profharness.device_types import device_name
from profharness.measurements.agreement import backend_that_ran
from profharness.measurements.evaluation import Loss, evaluate_bench
from profharness.rows import CALL_MEASUREMENTS, CellRow
from profharness.stats import THRESHOLD
from profharness.store import Store


@dataclass(frozen=True, slots=True)
class Summary:
    """Sentences in reading order."""

    sentences: tuple[str, ...]
    code: str = ""  # selects the fastest backend where auto cost the most


def summarize_run(store: Store, run: str, cells: Sequence[CellRow]) -> Summary:
    """Return the summary of a run, empty for one without cells."""
    if not cells:
        return Summary(())
    sentences = [_what_ran(store, run, cells), *_refused(cells), *_failed(cells)]
    code = ""
    if any(cell.samples.get(name) for cell in cells for name in CALL_MEASUREMENTS):
        losses = evaluate_bench(store, run).losses
        real = [loss for loss in losses if loss.real]
        code = real[0].code if real else ""
        sentences += _auto(cells, losses)
    problems = store.problems(run)
    if problems:
        sentences.append(
            f"{_count(len(problems), 'problem')} of profilers or of the GPU: see below."
        )
    return Summary(tuple(sentences), code)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _what_ran(store: Store, run: str, cells: Sequence[CellRow]) -> str:
    environment = store.environment(run)
    configs = dict.fromkeys(cell.config for cell in cells)
    backends = dict.fromkeys(cell.backend for cell in cells)
    counts = Counter(cell.status for cell in cells)
    ended = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    device = device_name(environment) or "an unknown device"
    what = f"{_count(len(configs), 'config')} on {_count(len(backends), 'backend')}"
    torch = environment.get("torch") or "of an unknown release"
    return f"{what} ({', '.join(backends)}) make {_count(len(cells), 'cell')}: {ended}; {device}, torch {torch}."


def _refused(cells: Sequence[CellRow]) -> Iterator[str]:
    """Yield one sentence on all refusals, with the codes of their reasons."""
    parts = []
    for backend in dict.fromkeys(cell.backend for cell in cells):
        own = [cell for cell in cells if cell.backend == backend]
        refused = [cell for cell in own if cell.status == "refused"]
        codes = dict.fromkeys(reason.code for cell in refused for reason in cell.refusals)
        if refused:
            why = ", ".join(codes) or "no reason told"
            parts.append(f"{backend} {len(refused)} of {len(own)} ({why})")
    if parts:
        yield f"Refused: {'; '.join(parts)}."


def _failed(cells: Sequence[CellRow]) -> Iterator[str]:
    failed = [cell for cell in cells if cell.status not in ("ok", "refused")]
    if failed:
        first = failed[0]
        yield (
            f"{_count(len(failed), 'cell')} failed, the first: {first.backend} on {first.config} "
            f"({first.status})."
        )


def _auto(cells: Sequence[CellRow], losses: Sequence[Loss]) -> Iterator[str]:
    """Yield auto's choice, its cost relative to the best, and what to change."""
    took = Counter(
        backend_that_ran(cell) or "an unknown backend"
        for cell in cells
        if cell.backend == "auto" and cell.status == "ok"
    )
    if took:
        yield f"auto took {_named(took)}."
    if not losses:
        return
    real = [loss for loss in losses if loss.real]
    unknown = sum(loss.open for loss in losses)
    doubt = f"; on {_count(unknown, 'config')} the two are not told apart" if unknown else ""
    compared = _count(len(losses), "config")
    if not real:
        yield (
            f"On none of {compared} was another backend shown to be faster than auto by "
            f"{THRESHOLD:.0%}{doubt}: nothing to change."
        )
        return
    worst = real[0]
    yield (
        f"auto was slower than the fastest other backend on {len(real)} of {compared}, at most by "
        f"{worst.regret:.1%} ({worst.config}: {worst.chosen_ns / 1e3:,.2f} µs, {worst.best} takes "
        f"{worst.best_ns / 1e3:,.2f}){doubt}."
    )
    yield (
        f"To change: select {_named(Counter(loss.best for loss in real))}; the code below does it "
        "where auto cost most."
    )


def _named(counts: Counter[str]) -> str:
    return ", ".join(f"{name} on {_count(n, 'config')}" for name, n in counts.most_common())
