"""Tells a refusal from a failure, and finds the reasons that PyTorch gave for it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch

from profharness.dispatch.reasons import clean, code, is_header
from profharness.record import Refusal

REFUSALS = ("No available kernel", "No viable backend")
HEADERS = {"memory": "efficient", "flash": "flash", "cudnn": "cudnn"}


@contextlib.contextmanager
def heard_warnings(texts: list[str]) -> Iterator[None]:
    """Adds to `texts` all warnings raised inside, also by what raises, and TORCH_WARN_ONCE ones
    however often they came.
    """
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                yield
            finally:
                texts += [str(warning.message) for warning in caught]
    finally:
        torch.set_warn_always(before)


def is_refusal(error: BaseException) -> bool:
    """Whether an exception says that no permitted backend takes the call."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in REFUSALS)


def refusals(backend: str, texts: list[str], error: BaseException) -> tuple[Refusal, ...]:
    """The reasons for `backend` among the warnings (all of them for `auto` and the like), or the
    error itself, inferred.
    """
    found: list[Refusal] = []
    subject = ""
    for text in map(clean, texts):
        if is_header(text):
            subject = HEADERS.get(text.split()[0].lower(), "")
            continue
        if not subject or subject == backend:
            found.append(Refusal(code(text), text))
        elif backend not in HEADERS.values():
            found.append(Refusal(code(text), f"{subject}: {text}"))
    if not found and REFUSALS[1] in str(error):
        found.append(Refusal("runtime_disabled", str(error).splitlines()[0]))
    elif not found:
        found.append(
            Refusal("no_text", f"PyTorch gave no reason: {str(error).splitlines()[0]}", "inferred")
        )
    return tuple(dict.fromkeys(found))
