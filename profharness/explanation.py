"""Why a backend was chosen: what `explain` answers for one config on one machine, live or by rule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from profharness.record import Refusal

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
