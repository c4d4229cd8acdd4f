"""Explain configs, live or by rule, together with what a store has recorded and measured."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from profharness.attention.config import AUTO, SDPA_BACKENDS, Config, parse_config, sdpa_setting
from profharness.attention.dispatch.advice import Advice, BackendAnswer, LiveAnswer
from profharness.attention.dispatch.by_rule import (
    ALLOW_SET,
    COMPILED,
    CPU_IGNORES,
    FIRST_CHOICE,
    LEGACY,
    Explanation,
    Platform,
    chosen,
    explain_by_rule,
    settle,
    sides_by_rule,
)
from profharness.attention.dispatch.machine import from_config, machine_of, permitted, with_flags
from profharness.attention.dispatch.predict import predict
from profharness.attention.dispatch.rules import hazards
from profharness.device_types import CPU, device_name, is_gpu, on_gpu
from profharness.errors import CaptureError
from profharness.measurements.agreement import (
    backend_of_op,
    ran_backends,
    replaced_by,
    replacement_text,
)
from profharness.rows import CALL_MEASUREMENTS, NAIVE_COMPILED, CellRow, KernelRow

if TYPE_CHECKING:
    from profharness.recording.probe import AskProgress, ProbeResult
    from profharness.store import Store


def explain_all(
    configs: Sequence[Config],
    platforms: Sequence[Platform] = (),
    *,
    backends: Sequence[str] = (),
    advice: bool = True,
    device: str = "auto",
    timeout_s: float = 120.0,
    store: Path | None = None,
    asked: str = AUTO,
) -> list[Explanation]:
    """Return one explanation per config and platform, for `auto` or a setting. Without platforms, ask
    PyTorch on this machine. `backends` limits the advice. A store adds what ran and the gains.
    Raise CaptureError if PyTorch cannot be asked at all.
    """
    if platforms:
        answers = [
            explain_by_rule(config, platform, backends=backends, advice=advice, asked=asked)
            for config in configs
            for platform in platforms
        ]
    else:
        answers = explain_live(
            configs,
            backends=backends,
            advice=advice,
            device=device,
            timeout_s=timeout_s,
            asked=asked,
        )
    return answers if store is None else with_store(answers, store)


def with_store(answers: Sequence[Explanation], path: Path) -> list[Explanation]:
    """Return the explanations with observed, agree and gains. Raise StoreError for a file that is
    no store.
    """
    if not path.exists():
        return list(answers)
    # loads sqlite, which an explanation by rule does not need
    from profharness.store import open_store

    with open_store(path) as store:
        memory = _StoredCells(store, answers)
        return [settle(_joined(answer, memory)) for answer in answers]


class _StoredCells:
    """The stored cells of the explained and of the advised configs, read once."""

    def __init__(self, store: Store, answers: Sequence[Explanation]) -> None:
        self.store = store
        self.environment = cache(store.environment)
        self._cells: dict[str, list[CellRow]] = {}
        labels = [answer.config for answer in answers]
        labels += [label for answer in answers for _, label in _advised(answer)]
        configs = [parse_config(label) for label in dict.fromkeys(labels)]
        for cell in store.cells("all", configs=configs):
            self._cells.setdefault(cell.config, []).append(cell)

    def cells(self, label: str, environment: dict[str, Any]) -> list[CellRow]:
        """Return the cells of a config on the same device and release, newest run first."""
        cells = self._cells.get(label, [])
        return [cell for cell in cells if _same_machine(self.environment(cell.run), environment)]

    def kernels(self, cell: CellRow) -> list[KernelRow]:
        """Return the kernels that a cell launched."""
        return self.store.kernels(cell.run, cells=[cell.cell])


def _advised(answer: Explanation) -> list[tuple[str, str]]:
    """Return the backend and the label of the changed config for each advice that has one."""
    return [
        (side.backend, advice.config)
        for side in answer.backends
        for advice in side.advice
        if advice.config is not None
    ]


def _joined(answer: Explanation, memory: _StoredCells) -> Explanation:
    cells = memory.cells(answer.config, answer.environment)
    seen = (_backend_seen(cell, memory) for cell in cells if cell.backend == answer.asked)
    # torch.compile replaced the plain form
    caveats = (
        f"{cell.backend}: {replacement_text(backend)}, in run {cell.run}"
        for cell in cells
        if cell.backend == NAIVE_COMPILED
        and (backend := replaced_by(cell, memory.kernels(cell))) is not None
    )
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
        caveats=(*answer.caveats, *itertools.islice(caveats, 1)),
    )


def _backend_seen(cell: CellRow, memory: _StoredCells) -> str | None:
    """Return the backend that a cell's op, else its kernels, show; `none` if PyTorch refused."""
    if cell.status != "ok":
        return "none" if cell.status == "refused" else None
    if (backend := backend_of_op(cell.sdpa_op)) is not None:
        return backend
    ran = ran_backends(memory.kernels(cell))
    return ran.pop() if len(ran) == 1 else None


def _same_machine(run: dict[str, Any], target: dict[str, Any]) -> bool:
    """Return whether release and device are equal, as far as both environments have them."""
    releases = {str(environment.get("torch", "")).split("+")[0] for environment in (run, target)}
    if len(releases) > 1 or run.get("device_type") != target.get("device_type"):
        return False
    return all(
        run[key] == target[key]
        for key in ("capability", "cudnn")
        if run.get(key) is not None and target.get(key) is not None
    )


def _with_gain(advice: Advice, backend: str, answer: Explanation, memory: _StoredCells) -> Advice:
    """Add the gain, time before over after: from the newest run with both, else from two runs on
    equal machines.
    """
    if advice.config is None or advice.gain is not None:
        return advice
    before = _timed(memory.cells(answer.config, answer.environment), (answer.asked, chosen(answer)))
    advised = memory.cells(advice.config, answer.environment)
    after = _timed(advised, (backend,))
    if advice.choice == backend:
        after = after or _timed(advised, (answer.asked,))
    pairs = [(old, new) for old in before for new in after]
    pairs.sort(key=lambda pair: pair[0].run != pair[1].run)
    for old, new in pairs:
        if device_name(memory.environment(old.run)) != device_name(memory.environment(new.run)):
            continue
        for name in CALL_MEASUREMENTS:
            if old.samples.get(name) and new.samples.get(name):
                return replace(advice, gain=median(old.samples[name]) / median(new.samples[name]))
    return advice


def _timed(cells: Sequence[CellRow], backends: Sequence[str]) -> list[CellRow]:
    """Return the cells with samples, in the order of the backends."""
    ran = [cell for cell in cells if cell.status == "ok" and cell.samples]
    return [cell for name in backends for cell in ran if cell.backend == name]


def require_answer(answers: Sequence[Explanation]) -> None:
    """Raise CaptureError if PyTorch failed on every one of the explanations."""
    if not answers or any(answer.error is None for answer in answers):
        return
    more = f" (and of {len(answers) - 1} more)" if len(answers) > 1 else ""
    raise CaptureError(
        f"no config was answered: {answers[0].config}{more}: {answers[0].error}; --timeout SECONDS "
        "gives PyTorch more time, --torch and --gpu ask the rules instead"
    )


def to_measure(answers: Sequence[Explanation]) -> dict[tuple[str, ...], list[Config]]:
    """Return what must be captured to know every gain: backends to configs."""
    backends_of: dict[Config, dict[str, None]] = {}
    for answer in answers:
        for backend, label in _advised(answer):
            backends_of.setdefault(parse_config(answer.config), {})[answer.asked] = None
            backends_of.setdefault(parse_config(label), {})[backend] = None
    jobs: dict[tuple[str, ...], list[Config]] = {}
    for config, backends in backends_of.items():
        jobs.setdefault(tuple(backends), []).append(config)
    return jobs


DECIDING = (
    "torch",
    "torch_cuda",
    "gpu",
    "capability",
    "cudnn",
    "device_type",
    "flash_attention_impl",
)


def explain_live(
    configs: Sequence[Config],
    *,
    backends: Sequence[str] = (),
    advice: bool = True,
    device: str = "auto",
    timeout_s: float = 120.0,
    progress: AskProgress | None = None,
    asked: str = AUTO,
) -> list[Explanation]:
    """Return one explanation per config from PyTorch on this machine, for `auto` or a setting.
    `backends` limits the advice. Raise CaptureError if no worker starts or replies.
    """
    # starts a worker, which imports torch
    from profharness.recording.probe import ask

    results = ask(
        configs, device=device, advice=advice, timeout_s=timeout_s, progress=progress, asked=asked
    )
    return [_explanation(result, backends or SDPA_BACKENDS) for result in results]


def _explanation(result: ProbeResult, advised: Sequence[str]) -> Explanation:
    environment = result.environment
    device = str(environment.get("device_type", CPU))
    config = result.cell.config.resolve(device)
    machine = machine_of(environment)
    asked = result.cell.backend
    params = permitted(with_flags(environment)(from_config(config, device)), sdpa_setting(asked))
    prediction = predict(params, machine)
    answer = result.answer
    if answer is None:
        message = result.ended.message if result.ended is not None else None
        error = f"PyTorch could not be asked: {message or 'its process left no answer'}"
        answer = LiveAnswer(result.cell.cell, config.label, error=error)
    sides = answer.backends or sides_by_rule(prediction, SDPA_BACKENDS)
    explanation = Explanation(
        config=config.label,
        environment=_decisive_environment(environment),
        source="live",
        priority_order=answer.priority_order or prediction.priority_order,
        predicted=prediction.choice,
        choice=answer.choice,
        backends=tuple(
            side if side.backend in advised else replace(side, advice=()) for side in sides
        ),
        caveats=(
            *hazards(answer.choice or prediction.choice, params, machine),
            *_caveats(environment, answer.backends),
            *((_of_order(device),) if params.priority else ()),
        ),
        error=answer.error,
        asked=asked,
    )
    return settle(explanation)


def _of_order(device: str) -> str:
    return FIRST_CHOICE if is_gpu(device) else CPU_IGNORES


def _decisive_environment(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return only the part of the environment that the choice depends on."""
    facts = {key: environment[key] for key in DECIDING if environment.get(key) is not None}
    facts["flags"] = {
        name: environment[f"sdp_{name}"] for name in SDPA_BACKENDS if f"sdp_{name}" in environment
    }
    variables = environment.get("env") or {}
    switches = {name: variables[name] for name in variables if name.startswith("TORCH_CUDNN_SDPA_")}
    return facts | ({"env": switches} if switches else {})


def _caveats(environment: Mapping[str, Any], sides: Sequence[BackendAnswer]) -> list[str]:
    sentences = [COMPILED]
    if on_gpu(environment):
        sentences.append(ALLOW_SET)
        if environment.get("sdp_cudnn"):
            sentences.append(LEGACY)
    impl = environment.get("flash_attention_impl")
    if impl:
        sentences.append(
            f"{impl} is activated: flash runs its kernels instead of FA2's, and a call that it does not support "
            "raises instead of taking another backend."
        )
    for side in sides:
        if None not in (side.eligible, side.can_use) and side.eligible != side.can_use:
            says = "yes" if side.can_use else "no"
            sentences.append(
                f"PyTorch answers twice and differently: can_use_{side.backend}_attention says {says}, a call that "
                f"may take {side.backend} alone would{' ' if side.eligible else ' not '}run."
            )
    return sentences
