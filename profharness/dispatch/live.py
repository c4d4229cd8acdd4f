"""What PyTorch itself answered about a config."""

from __future__ import annotations

from dataclasses import dataclass

from profharness.dispatch.advice import Advice
from profharness.dispatch.perturb import Blocker

ANSWERS_FILE = "answers.jsonl"


@dataclass(frozen=True)
class LiveBackend:
    """One backend's answer. can_use: what `can_use_*_attention` says, None where there is no such
    function or it was not asked.
    """

    backend: str
    eligible: bool | None
    blockers: tuple[Blocker, ...] = ()
    advice: tuple[Advice, ...] = ()
    can_use: bool | None = None


@dataclass(frozen=True)
class LiveAnswer:
    """One config's answers; cell is the id that the question came with, config its label. choice is
    a backend or `none` where PyTorch raises. error: why nothing could be asked.
    """

    cell: str
    config: str
    choice: str | None = None
    priority_order: tuple[str, ...] = ()
    backends: tuple[LiveBackend, ...] = ()
    error: str | None = None
