"""GPUs as traces describe them. What no GPU has is left out, with a warning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from profharness.devices import Device
from profharness.parse.columns import MAX_TEXT, whole

CORE_FIELDS = ("compute_major", "compute_minor", "num_sms")
LARGEST = {"total_memory_bytes": 1 << 50, "warp_size": 1 << 10}
LARGEST_OF_OTHERS = 1 << 24
REPLACED = "\ufffd"  # stands for what is no character
SHOWN = 40  # characters of a value in a message


def make_device(
    index: object, name: object, limits: Mapping[str, object]
) -> tuple[Device | None, list[str]]:
    """(a Device of fields by name, warnings on values that cannot be).

    The device is None without an index, a name or one of the core figures. None stands for what is
    not told.
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
    """A figure that a GPU may have, else None."""
    number = whole(value)
    return None if number is None or number > LARGEST.get(field, LARGEST_OF_OTHERS) else number
