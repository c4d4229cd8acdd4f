"""The whole answer for configs: live or by rule, joined with the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from profharness.answers.explain.model import Advice, Explanation, chosen
from profharness.answers.explain.rules import Place
from profharness.config import Config, parse_config

if TYPE_CHECKING:
    from profharness.rows import CellRow
    from profharness.store import Store


def explain_all(
    configs: Sequence[Config],
    places: Sequence[Place] = (),
    *,
    backends: Sequence[str] = (),
    advice: bool = True,
    device: str = "auto",
    timeout_s: float = 120.0,
    store: Path | None = None,
) -> list[Explanation]:
    """One answer per config and place, places side by side for each config; without places PyTorch
    on this machine is asked. backends limits the advice; a store adds what was seen and the gains.
    Raises CaptureError if PyTorch cannot be asked at all.
    """
    if places:
        from profharness.answers.explain.rules import explain_by_rule

        found = [
            explain_by_rule(config, place, backends=backends, advice=advice)
            for config in configs
            for place in places
        ]
    else:
        from profharness.answers.explain.live import explain_live

        found = explain_live(
            configs, backends=backends, advice=advice, device=device, timeout_s=timeout_s
        )
    return found if store is None else with_store(found, store)


MEASUREMENTS = ("graph", "event", "wall")  # the first that both sides have counts


def with_store(answers: Sequence[Explanation], path: Path) -> list[Explanation]:
    """The answers with observed, agree and the gains that the store can tell; a store that is not
    there tells nothing. Raises StoreError for a file that is no store.
    """
    if not path.exists():
        return [settle(answer) for answer in answers]
    from profharness.store import open_store

    with open_store(path) as store:
        memory = _Memory(store, answers)
        return [settle(_joined(answer, memory)) for answer in answers]


def settle(answer: Explanation) -> Explanation:
    """The answer with `agree` filled: whether the witnesses that say something say the same; None
    where fewer than two do.
    """
    told = [answer.predicted, answer.choice, answer.observed]
    known = [each for each in told if each not in (None, "unknown")]
    return replace(answer, agree=len(set(known)) == 1 if len(known) > 1 else None)


class _Memory:
    """What a store has of the answers' configs and of the advised ones, read once."""

    def __init__(self, store: Store, answers: Sequence[Explanation]) -> None:
        self.store = store
        self._environments: dict[str, dict[str, Any]] = {}
        self._cells: dict[str, list[CellRow]] = {}
        labels = dict.fromkeys(
            label for answer in answers for label in (answer.config, *_advised(answer))
        )
        for cell in store.cells("all", configs=[parse_config(label) for label in labels]):
            self._cells.setdefault(cell.config, []).append(cell)

    def environment(self, run: str) -> dict[str, Any]:
        """A run's environment."""
        if run not in self._environments:
            self._environments[run] = self.store.environment(run)
        return self._environments[run]

    def cells(self, label: str, here: dict[str, Any]) -> list[CellRow]:
        """Cells of a config, newest run first, made on such a device with such a release."""
        found = self._cells.get(label, [])
        return [cell for cell in found if _alike(self.environment(cell.run), here)]


def _advised(answer: Explanation) -> list[str]:
    """The labels of the configs that the advice leads to."""
    advice = [each for side in answer.backends for each in side.advice]
    return [each.config for each in advice if each.config is not None]


def _joined(answer: Explanation, memory: _Memory) -> Explanation:
    cells = memory.cells(answer.config, answer.environment)
    observed = answer.observed or next(
        (seen for cell in cells if cell.backend == "auto" and (seen := _seen(cell, memory))), None
    )
    backends = tuple(
        replace(
            side,
            advice=tuple(_with_gain(each, side.backend, answer, memory) for each in side.advice),
        )
        for side in answer.backends
    )
    replaced = [text for cell in cells if (text := _replaced(cell, memory))]
    caveats = (*answer.caveats, *replaced[:1])
    return replace(answer, observed=observed, backends=backends, caveats=caveats)


def _replaced(cell: CellRow, memory: _Memory) -> str | None:
    """What torch.compile put in the place of the plain form, None for any other cell."""
    from profharness.answers.agreement import replacement, replacement_text
    from profharness.rows import NAIVE_COMPILED

    if cell.backend != NAIVE_COMPILED:
        return None
    found = replacement(cell, memory.store.kernels(cell.run, cells=[cell.cell]))
    return f"{cell.backend}: {replacement_text([found])}, in run {cell.run}" if found else None


def _seen(cell: CellRow, memory: _Memory) -> str | None:
    """The backend that a cell's op, else its kernels, show; `none` where PyTorch refused."""
    from profharness.answers.expect import backend_of_op, ran_backends

    if cell.status == "refused":
        return "none"
    if cell.status != "ok":
        return None
    if (backend := backend_of_op(cell.sdpa_op)) is not None:
        return backend
    ran = ran_backends(memory.store.kernels(cell.run, cells=[cell.cell]))
    return ran.pop() if len(ran) == 1 else None


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two environments have the same PyTorch release and the same device; what one does not
    tell does not count.
    """

    def version(environment: dict[str, Any]) -> str:
        return str(environment.get("torch", "")).split("+")[0]

    if version(one) != version(other) or one.get("device_type") != other.get("device_type"):
        return False
    keys = ("capability", "cudnn")
    return all(
        one.get(key) == other.get(key)
        for key in keys
        if one.get(key) is not None and other.get(key) is not None
    )


def _with_gain(advice: Advice, backend: str, answer: Explanation, memory: _Memory) -> Advice:
    """Time before over time after, from the newest run that has both, else from two runs on alike
    machines.
    """
    if advice.config is None or advice.gain is not None:
        return advice
    before = _timed(memory.cells(answer.config, answer.environment), ("auto", chosen(answer)))
    after = _timed(memory.cells(advice.config, answer.environment), (backend,))
    if advice.choice == backend:
        autos = _timed(memory.cells(advice.config, answer.environment), ("auto",))
        after = after or autos
    pairs = [(one, other) for one in before for other in after]
    pairs.sort(key=lambda pair: pair[0].run != pair[1].run)
    for one, other in pairs:
        if _gpu(memory.environment(one.run)) != _gpu(memory.environment(other.run)):
            continue
        for name in MEASUREMENTS:
            times = [cell.samples.get(name) for cell in (one, other)]
            if times[0] and times[1]:
                return replace(advice, gain=median(times[0]) / median(times[1]))
    return advice


def _timed(cells: Sequence[CellRow], backends: Sequence[str | None]) -> list[CellRow]:
    """Cells with samples, in the order of the backends."""
    ran = [cell for cell in cells if cell.status == "ok" and cell.samples]
    return [cell for name in backends for cell in ran if cell.backend == name]


def _gpu(environment: dict[str, Any]) -> object:
    return environment.get("gpu") or environment.get("cpu")


def to_measure(answers: Sequence[Explanation]) -> dict[tuple[str, ...], list[Config]]:
    """What has to be captured to tell every gain: backends to configs."""
    wanted: dict[Config, dict[str, None]] = {}
    for answer in answers:
        for side in answer.backends:
            for advice in side.advice:
                if advice.config is None:
                    continue
                wanted.setdefault(parse_config(answer.config), {})["auto"] = None
                wanted.setdefault(parse_config(advice.config), {})[side.backend] = None
    jobs: dict[tuple[str, ...], list[Config]] = {}
    for config, backends in wanted.items():
        jobs.setdefault(tuple(backends), []).append(config)
    return jobs
