"""What a store adds to the answers of `explain`: what a stored run shows, and what advice gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

from profharness.answers.agreement import backend_of_op, ran_backends, replacement, replacement_text
from profharness.answers.explain.answer import Explanation, chosen, settle
from profharness.config import parse_config
from profharness.dispatch.advice import Advice
from profharness.rows import NAIVE_COMPILED, CellRow, KernelRow
from profharness.store import Store, open_store

MEASUREMENTS = ("graph", "event", "wall")  # the first that both sides have counts


def join_store(answers: Sequence[Explanation], path: Path) -> list[Explanation]:
    """The answers with observed, agree and the gains. Raises StoreError for a file that is no store."""
    with open_store(path) as store:
        memory = _Memory(store, answers)
        return [settle(_joined(answer, memory)) for answer in answers]


class _Memory:
    """The cells that a store has of the answers' configs and of the advised ones, read once."""

    def __init__(self, store: Store, answers: Sequence[Explanation]) -> None:
        self.store = store
        self.environment = cache(store.environment)
        self._cells: dict[str, list[CellRow]] = {}
        labels = [answer.config for answer in answers]
        labels += [
            advice.config
            for answer in answers
            for side in answer.backends
            for advice in side.advice
            if advice.config is not None
        ]
        configs = [parse_config(label) for label in dict.fromkeys(labels)]
        for cell in store.cells("all", configs=configs):
            self._cells.setdefault(cell.config, []).append(cell)

    def cells(self, label: str, environment: dict[str, Any]) -> list[CellRow]:
        """Cells of a config, newest run first, made on such a device with such a release."""
        cells = self._cells.get(label, [])
        return [cell for cell in cells if _alike(self.environment(cell.run), environment)]

    def kernels(self, cell: CellRow) -> list[KernelRow]:
        """What a cell launched."""
        return self.store.kernels(cell.run, cells=[cell.cell])


def _joined(answer: Explanation, memory: _Memory) -> Explanation:
    cells = memory.cells(answer.config, answer.environment)
    autos = [cell for cell in cells if cell.backend == "auto"]
    seen = (_seen(cell, memory) for cell in autos)
    replaced = (_replaced(cell, memory) for cell in cells if cell.backend == NAIVE_COMPILED)
    caveat = next(filter(None, replaced), None)
    sides = tuple(
        replace(
            side,
            advice=tuple(_with_gain(way, side.backend, answer, memory) for way in side.advice),
        )
        for side in answer.backends
    )
    return replace(
        answer,
        observed=answer.observed or next(filter(None, seen), None),
        backends=sides,
        caveats=(*answer.caveats, *([caveat] if caveat else ())),
    )


def _replaced(cell: CellRow, memory: _Memory) -> str | None:
    """What torch.compile put in the place of the plain form; None where it put nothing."""
    found = replacement(cell, memory.kernels(cell))
    return f"{cell.backend}: {replacement_text(found.took)}, in run {cell.run}" if found else None


def _seen(cell: CellRow, memory: _Memory) -> str | None:
    """The backend that a cell's op, else its kernels, show; `none` where PyTorch refused."""
    if cell.status == "refused":
        return "none"
    if cell.status != "ok":
        return None
    if (backend := backend_of_op(cell.sdpa_op)) is not None:
        return backend
    ran = ran_backends(memory.kernels(cell))
    return ran.pop() if len(ran) == 1 else None


def _alike(run: dict[str, Any], asked: dict[str, Any]) -> bool:
    """Whether two environments have the same PyTorch release and the same device; what one does not
    tell does not count.
    """
    releases = {str(environment.get("torch", "")).split("+")[0] for environment in (run, asked)}
    if len(releases) > 1 or run.get("device_type") != asked.get("device_type"):
        return False
    return all(
        run[key] == asked[key]
        for key in ("capability", "cudnn")
        if run.get(key) is not None and asked.get(key) is not None
    )


def _with_gain(advice: Advice, backend: str, answer: Explanation, memory: _Memory) -> Advice:
    """Time before over time after, from the newest run that has both, else from two runs on alike
    machines.
    """
    if advice.config is None or advice.gain is not None:
        return advice
    before = _timed(memory.cells(answer.config, answer.environment), ("auto", chosen(answer)))
    advised = memory.cells(advice.config, answer.environment)
    after = _timed(advised, (backend,))
    if advice.choice == backend:
        after = after or _timed(advised, ("auto",))
    pairs = [(old, new) for old in before for new in after]
    pairs.sort(key=lambda pair: pair[0].run != pair[1].run)
    for old, new in pairs:
        if _gpu(memory.environment(old.run)) != _gpu(memory.environment(new.run)):
            continue
        for name in MEASUREMENTS:
            if old.samples.get(name) and new.samples.get(name):
                return replace(advice, gain=median(old.samples[name]) / median(new.samples[name]))
    return advice


def _timed(cells: Sequence[CellRow], backends: Sequence[str]) -> list[CellRow]:
    """Cells with samples, in the order of the backends."""
    ran = [cell for cell in cells if cell.status == "ok" and cell.samples]
    return [cell for name in backends for cell in ran if cell.backend == name]


def _gpu(environment: dict[str, Any]) -> object:
    return environment.get("gpu") or environment.get("cpu")
