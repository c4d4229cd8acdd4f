"""What an implementation chose for its last call: tiles, stages, a variant."""

from __future__ import annotations

from typing import Any

import msgspec

from profharness.backends import Attention, Backend, ImplementationError


def tuning_of(backend: Backend, attention: Attention | None) -> dict[str, Any] | None:
    """What the loaded function says of its last call by an attribute `tuning`, else what its backend
    says; None where neither says anything. Raises ImplementationError for an answer that is not a
    dict that JSON can hold.
    """
    own = getattr(attention, "tuning", None)
    answer = own() if callable(own) else backend.tuning()
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
