"""PyTorch's own answers: the worker is asked, and the rules stand beside it as a second witness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from profharness.answers.explain.model import Advice, BackendAnswer, Explanation
from profharness.answers.explain.rules import ALLOW_SET, COMPILED, LEGACY
from profharness.config import Config, parse_config
from profharness.dispatch import BACKENDS, Prediction, from_config, hazards, predict
from profharness.dispatch.advice import Advice as Way
from profharness.dispatch.advice import LiveAnswer, LiveBackend
from profharness.dispatch.machine import machine_of, with_flags
from profharness.errors import CaptureError
from profharness.rows import Refusal
from profharness.run import Cell
from profharness.runner.probe import Asked, AskProgress, ask


def explain_live(
    configs: Sequence[Config],
    *,
    backends: Sequence[str] = (),
    advice: bool = True,
    device: str = "auto",
    timeout_s: float = 120.0,
    progress: AskProgress | None = None,
) -> list[Explanation]:
    """One answer a config from PyTorch on this machine. backends limits the advice. Raises
    CaptureError if no worker starts or answers.
    """
    found = ask(configs, device=device, advice=advice, timeout_s=timeout_s, progress=progress)
    return [_limited(_with_prediction(_explain(asked)), backends) for asked in found]


def live_choices(
    configs: Sequence[Config],
    *,
    device: str = "auto",
    timeout_s: float = 120.0,
    required: bool = False,
) -> tuple[list[str], str]:
    """Only what `auto` takes (`unknown` where PyTorch could not be asked), and a text of where.
    required: raise CaptureError if it could be asked about none of them.
    """
    from profharness.answers.explain.model import environment_text

    found = explain_live(configs, advice=False, device=device, timeout_s=timeout_s)
    if required:
        require_answer(found)
    return [answer.choice or "unknown" for answer in found], environment_text(found[0])


def require_answer(answers: Sequence[Explanation]) -> None:
    """Raise CaptureError if there are answers, and PyTorch gave none of them."""
    if not answers or any(answer.error is None for answer in answers):
        return
    first, *others = answers
    more = f" (and of {len(others)} more)" if others else ""
    raise CaptureError(
        f"no config was answered: {first.config}{more}: {first.error}; --timeout SECONDS gives "
        "PyTorch more time, --torch and --gpu ask the rules instead"
    )


def _with_prediction(answer: Explanation) -> Explanation:
    """With what the rules say, where whoever answered left that out."""
    if answer.predicted is not None:
        return answer
    from profharness.answers.prediction import predicted
    from profharness.dispatch.machine import is_told, machine_of

    if not is_told(answer.environment):
        return answer
    machine = machine_of(answer.environment)
    said = predicted(parse_config(answer.config), "auto", answer.environment, machine)
    return replace(answer, predicted=said)


def _limited(answer: Explanation, backends: Sequence[str]) -> Explanation:
    if not backends:
        return answer
    sides = tuple(
        side if side.backend in backends else replace(side, advice=()) for side in answer.backends
    )
    return replace(answer, backends=sides)


TOLD = ("torch", "torch_cuda", "gpu", "capability", "cudnn", "device_type", "flash_attention_impl")


def _explain(asked: Asked) -> Explanation:
    cell, answer, environment = asked.cell, asked.answer, asked.environment
    device = str(environment.get("device_type", "cpu"))
    config = cell.config.resolve(device)
    machine = machine_of(environment)
    params = with_flags(environment)(from_config(config, device))
    prediction = predict(params, machine)
    if answer is None:
        answer = LiveAnswer(cell.cell, config.label, error=_lost(asked.ended))
    taken = answer.choice or prediction.choice
    return Explanation(
        config=config.label,
        environment=_surroundings(environment),
        source="live",
        priority_order=answer.priority_order or prediction.priority_order,
        predicted=prediction.choice,
        choice=answer.choice,
        observed=None,
        agree=_agree(prediction.choice, answer.choice),
        backends=tuple(_backend(each) for each in answer.backends) or _by_rule(prediction),
        caveats=(*hazards(taken, params, machine), *_doubts(environment, answer)),
        error=answer.error,
    )


def _lost(ended: Cell | None) -> str:
    message = ended.message if ended is not None else None
    return f"PyTorch could not be asked: {message or 'its process left no answer'}"


def _agree(predicted: str, choice: str | None) -> bool | None:
    return None if choice is None or predicted == "unknown" else predicted == choice


def _backend(live: LiveBackend) -> BackendAnswer:
    reasons = [
        Refusal(each.reason.code, each.reason.message, each.reason.source) for each in live.blockers
    ]
    return BackendAnswer(
        live.backend,
        live.eligible,
        tuple(dict.fromkeys(reasons)),
        tuple(_advice(way) for way in live.advice),
    )


def _advice(way: Way) -> Advice:
    return Advice(way.change, way.code, way.config, way.verified, way.choice)


def _by_rule(prediction: Prediction) -> tuple[BackendAnswer, ...]:
    """What the rules say, where PyTorch gave no answer."""
    return tuple(
        BackendAnswer(
            name,
            prediction.backends[name].eligible,
            tuple(Refusal(r.code, r.message, "rule") for r in prediction.backends[name].reasons),
        )
        for name in BACKENDS
    )


def _surroundings(environment: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the choice, and no more."""
    found = {key: environment[key] for key in TOLD if environment.get(key) is not None}
    found["flags"] = {
        name: environment[f"sdp_{name}"] for name in BACKENDS if f"sdp_{name}" in environment
    }
    variables = environment.get("env") or {}
    switches = {name: variables[name] for name in variables if name.startswith("TORCH_CUDNN_SDPA_")}
    return found | ({"env": switches} if switches else {})


def _doubts(environment: Mapping[str, Any], answer: LiveAnswer) -> list[str]:
    doubts = [COMPILED]
    if environment.get("device_type") == "cuda":
        doubts.append(ALLOW_SET)
        if environment.get("sdp_cudnn"):
            doubts.append(LEGACY)
    impl = environment.get("flash_attention_impl")
    if impl:
        doubts.append(
            f"{impl} is activated: flash runs its kernels instead of FA2's, and a call that it does not support "
            "raises instead of taking another backend."
        )
    for each in answer.backends:
        if None not in (each.eligible, each.can_use) and each.eligible != each.can_use:
            says = "yes" if each.can_use else "no"
            doubts.append(
                f"PyTorch answers twice and differently: can_use_{each.backend}_attention says {says}, a call that "
                f"may take {each.backend} alone would{' ' if each.eligible else ' not '}run."
            )
    return doubts
