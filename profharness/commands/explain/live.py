"""Explain by PyTorch's own choice: query a worker, and compare with the rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from profharness.attention.config import AUTO, SDPA_BACKENDS, Config, sdpa_setting
from profharness.attention.dispatch.advice import BackendAnswer, LiveAnswer
from profharness.attention.dispatch.by_rule import (
    ALLOW_SET,
    COMPILED,
    CPU_IGNORES,
    FIRST_CHOICE,
    LEGACY,
    Explanation,
    settle,
    sides_by_rule,
)
from profharness.attention.dispatch.checks import hazards
from profharness.attention.dispatch.machine import from_config, machine_of, permitted, with_flags
from profharness.attention.dispatch.predict import predict
from profharness.device_types import CPU, is_gpu, on_gpu
from profharness.recording.probe import AskProgress, ProbeResult, ask

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
