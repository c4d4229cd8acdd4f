"""Check the numbers and the descriptions of GPUs in traces.

Impossible values are left out. A warning reports them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from profharness.devices import Device

MAX_NS = 1 << 61
MAX_TEXT = 200  # maximum number of characters of a text from a header
CORE_FIELDS = ("compute_major", "compute_minor", "num_sms")
LARGEST = {"total_memory_bytes": 1 << 50, "warp_size": 1 << 10}
LARGEST_OF_OTHERS = 1 << 24
REPLACED = "\ufffd"  # the replacement character
SHOWN = 40  # maximum number of characters of a value in a message


def whole(value: object) -> int | None:
    """Return the value if it is an integer from 0 to 2**62 - 1. Otherwise, return None."""
    is_whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62
    return cast(int, value) if is_whole else None


def make_device(
    index: object, name: object, limits: Mapping[str, object]
) -> tuple[Device | None, list[str]]:
    """Return a Device with the given properties, and warnings about impossible values.

    A property that is missing or impossible becomes None. If the index, the name or one of
    CORE_FIELDS is missing or impossible, return None in place of the Device.
    """
    kept: dict[str, Any] = {field: _possible(field, value) for field, value in limits.items()}
    given = {**limits, "index": index, "name": name}
    used = {**kept, "index": whole(index), "name": name if isinstance(name, str) else None}
    warnings = [
        f"device {str(index)[:SHOWN]}: {field} cannot be {str(value)[:SHOWN]}; it is left out"
        for field, value in given.items()
        if value is not None and used[field] is None
    ]
    if isinstance(name, str) and REPLACED in name:
        warnings.append(f"device {str(index)[:SHOWN]}: its name holds what is no character")
    if None in (used["index"], used["name"], *(used[field] for field in CORE_FIELDS)):
        return None, warnings
    used |= {"name": used["name"][:MAX_TEXT], "warp_size": used["warp_size"] or 32}
    return Device(**used), warnings


def _possible(field: str, value: object) -> int | None:
    """Return the value if a GPU can have that value in the field. Otherwise, return None."""
    number = whole(value)
    return None if number is None or number > LARGEST.get(field, LARGEST_OF_OTHERS) else number
