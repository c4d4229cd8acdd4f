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
    chosen,
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
    from profharness.recording.probe import AskProgress
    from profharness.store import Store


def with_store(answers: Sequence[Explanation], path: Path) -> list[Explanation]:
    """Return the explanations with observed, agree and gains. Raise StoreError for a file that is
    no store.
    """
    if not path.exists():
        return list(answers)
    # loads sqlite, which an explanation by rule does not need
    from profharness.store import open_store

    with open_store(path) as store:
        cells = _StoredCells(store, answers)
        return [settle(cells.join(answer)) for answer in answers]


class _StoredCells:
    """The stored cells of the explained and of the advised configs, read once."""

    def __init__(self, store: Store, answers: Sequence[Explanation]) -> None:
        self.store = store
        self.environment = cache(store.environment)
        self.cells: dict[str, list[CellRow]] = {}
        labels = [answer.config for answer in answers]
        labels += [label for answer in answers for _, label in _advised(answer)]
        configs = [parse_config(label) for label in dict.fromkeys(labels)]
        for cell in store.cells("all", configs=configs):
            self.cells.setdefault(cell.config, []).append(cell)

    def join(self, answer: Explanation) -> Explanation:
        """Add the backend that was observed, a caveat if torch.compile replaced the plain form, and
        the gains of advice.
        """
        cells = self._alike(answer.config, answer)
        seen = (self._backend_seen(cell) for cell in cells if cell.backend == answer.asked)
        compiled = [cell for cell in cells if cell.backend == NAIVE_COMPILED]
        caveats = (
            f"{cell.backend}: {replacement_text(backend)}, in run {cell.run}"
            for cell in compiled
            if (backend := replaced_by(cell, self._kernels(cell))) is not None
        )
        return replace(
            answer,
            observed=answer.observed or next(filter(None, seen), None),
            backends=tuple(
                replace(
                    side, advice=tuple(self._gain(a, side.backend, answer) for a in side.advice)
                )
                for side in answer.backends
            ),
            caveats=(*answer.caveats, *itertools.islice(caveats, 1)),
        )

    def _alike(self, label: str, answer: Explanation) -> list[CellRow]:
        """Return the cells of a config on the same device and release, newest run first. Values that
        an environment lacks are not compared.
        """
        target, alike = answer.environment, []
        for cell in self.cells.get(label, []):
            run = self.environment(cell.run)
            releases = {str(each.get("torch", "")).split("+")[0] for each in (run, target)}
            if len(releases) == 1 and run.get("device_type") == target.get("device_type"):
                pairs = ((run.get(key), target.get(key)) for key in ("capability", "cudnn"))
                if all(None in pair or pair[0] == pair[1] for pair in pairs):
                    alike.append(cell)
        return alike

    def _kernels(self, cell: CellRow) -> list[KernelRow]:
        return self.store.kernels(cell.run, cells=[cell.cell])

    def _backend_seen(self, cell: CellRow) -> str | None:
        """Return the backend that a cell's op, else its kernels, show; `none` if PyTorch refused."""
        if cell.status != "ok":
            return "none" if cell.status == "refused" else None
        if (backend := backend_of_op(cell.sdpa_op)) is not None:
            return backend
        ran = ran_backends(self._kernels(cell))
        return ran.pop() if len(ran) == 1 else None

    def _gain(self, advice: Advice, backend: str, answer: Explanation) -> Advice:
        """Add the gain, time before over after: from the newest run with both, else from two runs
        on equal machines.
        """
        if advice.config is None or advice.gain is not None:
            return advice
        advised = self._alike(advice.config, answer)
        before = _timed(self._alike(answer.config, answer), answer.asked, chosen(answer))
        after = _timed(advised, backend)
        if not after and advice.choice == backend:
            after = _timed(advised, answer.asked)
        pairs = [(old, new) for old in before for new in after]
        pairs.sort(key=lambda pair: pair[0].run != pair[1].run)
        for old, new in pairs:
            devices = {device_name(self.environment(cell.run)) for cell in (old, new)}
            for name in CALL_MEASUREMENTS if len(devices) == 1 else ():
                if old.samples.get(name) and new.samples.get(name):
                    gain = median(old.samples[name]) / median(new.samples[name])
                    return replace(advice, gain=gain)
        return advice


def _advised(answer: Explanation) -> list[tuple[str, str]]:
    """Return the backend and the label of the changed config for each advice that has one."""
    return [
        (side.backend, advice.config)
        for side in answer.backends
        for advice in side.advice
        if advice.config is not None
    ]


def _timed(cells: Sequence[CellRow], *backends: str) -> list[CellRow]:
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


CUDNN_SWITCHES = "TORCH_CUDNN_SDPA_"
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

    answers, environment = ask(
        configs, device=device, advice=advice, timeout_s=timeout_s, progress=progress, asked=asked
    )
    return [
        _explanation(config, asked, answer, environment, backends or SDPA_BACKENDS)
        for config, answer in zip(configs, answers, strict=True)
    ]


def _explanation(
    config: Config,
    asked: str,
    answer: LiveAnswer,
    environment: Mapping[str, Any],
    advised: Sequence[str],
) -> Explanation:
    device = str(environment.get("device_type", CPU))
    config = config.resolve(device)
    machine = machine_of(environment)
    params = permitted(with_flags(environment)(from_config(config, device)), sdpa_setting(asked))
    prediction = predict(params, machine)
    sides = answer.backends or sides_by_rule(prediction, SDPA_BACKENDS)
    # only what the choice depends on
    facts = {key: environment[key] for key in DECIDING if environment.get(key) is not None}
    facts["flags"] = {
        name: environment[f"sdp_{name}"] for name in SDPA_BACKENDS if f"sdp_{name}" in environment
    }
    variables = environment.get("env") or {}
    if switches := {key: variables[key] for key in variables if key.startswith(CUDNN_SWITCHES)}:
        facts["env"] = switches
    caveats = [*hazards(answer.choice or prediction.choice, params, machine)]
    caveats += _caveats(environment, answer.backends)
    if params.priority:
        caveats.append(FIRST_CHOICE if is_gpu(device) else CPU_IGNORES)
    explanation = Explanation(
        config=config.label,
        environment=facts,
        source="live",
        priority_order=answer.priority_order or prediction.priority_order,
        predicted=prediction.choice,
        choice=answer.choice,
        backends=tuple(
            side if side.backend in advised else replace(side, advice=()) for side in sides
        ),
        caveats=tuple(caveats),
        error=answer.error,
        asked=asked,
    )
    return settle(explanation)


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
