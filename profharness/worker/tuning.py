"""What an implementation chose for its last call: tiles, stages, a variant."""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from profharness.backends import Attention, ImplementationError


def tuning_of(attention: Attention | None) -> dict[str, Any] | None:
    """The answer of `tuning()`, an attribute of the function or of the module that defines it; None
    where there is neither, or no choice was made. Raises ImplementationError for an answer that is
    not a dict that JSON can hold.
    """
    module = sys.modules.get(getattr(attention, "__module__", None) or "")
    tuning = getattr(attention, "tuning", None) or getattr(module, "tuning", None)
    if not callable(tuning):
        return None
    answer = tuning()
    if answer is None:
        return None
    try:
        if not isinstance(answer, dict):
            raise TypeError
        found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(answer))
    except (TypeError, ValueError, OverflowError):
        raise ImplementationError(
            f"tuning() returned {answer!r}; it must return a dict that JSON can hold, or None"
        ) from None
    return found
