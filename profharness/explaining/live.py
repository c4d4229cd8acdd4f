"""PyTorch's own answers: the worker is asked, and the rules stand beside it as a second witness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from profharness.config import Config, parse_config
from profharness.errors import CaptureError
from profharness.explanation import Explanation


def explain_live(
    configs: Sequence[Config],
    *,
    backends: Sequence[str] = (),
    advice: bool = True,
    device: str = "auto",
    timeout_s: float = 120.0,
) -> list[Explanation]:
    """One answer a config from PyTorch on this machine. backends limits the advice. Raises
    CaptureError if no worker starts or answers.
    """
    from profharness.runner.ask import ask

    found = ask(configs, device=device, advice=advice, timeout_s=timeout_s)
    return [_limited(_with_prediction(answer), backends) for answer in found]


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
    from profharness.report.explain_view import environment_text

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
    from profharness.dispatch.told import is_told, machine_of
    from profharness.store.prediction import predicted

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
