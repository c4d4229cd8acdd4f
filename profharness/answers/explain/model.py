"""Why a backend was chosen: what `explain` answers for one config on one machine, live or by rule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from profharness.rows import Refusal

SCHEMA = "profharness.explain/1"


@dataclass(frozen=True)
class Advice:
    """One change that would make a backend eligible.

    change is a sentence, code the Python to write; config the changed config's label, None where
    the grammar cannot say it. verified: asked again, with the change, the backend was eligible
    (None: could not be asked). choice: what `auto` takes then. gain: time before over time after,
    where both were measured.
    """

    change: str
    code: str
    config: str | None = None
    verified: bool | None = None
    choice: str | None = None
    gain: float | None = None


@dataclass(frozen=True)
class BackendAnswer:
    """One backend's side of it. eligible None: not known. reasons are all that stand in the way,
    the one that PyTorch stops at first.
    """

    backend: str
    eligible: bool | None
    reasons: tuple[Refusal, ...] = ()
    advice: tuple[Advice, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """One config's answer. source is `live` (PyTorch was asked) or `rules`.

    predicted is what the rules say, choice what PyTorch says (None where it was not asked),
    observed what a stored run's op or kernels show; each a backend, `none` (PyTorch raises) or
    `unknown`. agree: whether those that are known are the same. priority_order is empty where it
    is not known. caveats are sentences on what casts doubt.
    """

    config: str
    environment: dict[str, Any]
    source: str
    priority_order: tuple[str, ...]
    predicted: str | None
    choice: str | None
    observed: str | None
    agree: bool | None
    backends: tuple[BackendAnswer, ...]
    caveats: tuple[str, ...] = field(default=())
    error: str | None = None


FIELDS = (
    *("config", "source", "environment", "priority_order", "predicted", "choice", "observed"),
    *("agree", "backends", "caveats", "error"),
)


def explanation_record(answer: Explanation) -> dict[str, Any]:
    """The JSON record of one answer, keys as in FIELDS."""
    return {
        "config": answer.config,
        "source": answer.source,
        "environment": dict(answer.environment),
        "priority_order": list(answer.priority_order),
        "predicted": answer.predicted,
        "choice": answer.choice,
        "observed": answer.observed,
        "agree": answer.agree,
        "backends": [_backend_record(side) for side in answer.backends],
        "caveats": list(answer.caveats),
        "error": answer.error,
    }


def _backend_record(side: BackendAnswer) -> dict[str, Any]:
    reasons = [
        {"code": each.code, "message": each.message, "source": each.source} for each in side.reasons
    ]
    names = ("change", "code", "config", "verified", "choice", "gain")
    advice = [{name: getattr(each, name) for name in names} for each in side.advice]
    return {
        "backend": side.backend,
        "eligible": side.eligible,
        "reasons": reasons,
        "advice": advice,
    }


def flat_record(answer: Explanation) -> dict[str, Any]:
    """One flat row for a data frame: no nested values, `<backend>_eligible` and `<backend>_reasons`
    (codes, the first one first) for each backend.
    """
    told = answer.environment
    row: dict[str, Any] = {"config": answer.config, "source": answer.source}
    row |= {key: told.get(key) for key in ("torch", "device_type", "gpu", "capability", "cudnn")}
    row["priority_order"] = " > ".join(answer.priority_order) or None
    row |= {key: getattr(answer, key) for key in ("predicted", "choice", "observed", "agree")}
    for side in answer.backends:
        row[f"{side.backend}_eligible"] = side.eligible
        row[f"{side.backend}_reasons"] = "; ".join(each.code for each in side.reasons)
    return row | {"error": answer.error}


def environment_text(answer: Explanation) -> str:
    """`torch 2.8.0, RTX A6000, cuDNN 91002, by rule`."""
    told = answer.environment
    parts = [f"torch {told['torch']}"] if told.get("torch") else []
    device = told.get("gpu") or {"cpu": "CPU"}.get(str(told.get("device_type")))
    parts += [str(device)] if device else []
    parts += [f"cuDNN {told['cudnn']}"] if told.get("cudnn") else []
    return ", ".join([*parts, "by rule" if answer.source == "rules" else "live"])


def chosen(answer: Explanation) -> str:
    """What `auto` takes: PyTorch's own answer, or the rules' where those were asked; `unknown` where
    PyTorch was asked and gave none.
    """
    told = answer.predicted if answer.source == "rules" else answer.choice
    return told or "unknown"
