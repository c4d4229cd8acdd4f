"""What the worker uses of msgspec, for a Python that does not have it: JSON of dataclasses, written by
profharness itself, so that nothing is checked.
"""

from __future__ import annotations

import dataclasses
import json as standard
import math
import types
import typing
from typing import Any


class MsgspecError(Exception):
    """As msgspec's."""


class DecodeError(MsgspecError):
    """As msgspec's."""


class Struct:
    """A base whose subclasses are dataclasses."""

    def __init_subclass__(cls, **options: Any) -> None:
        dataclasses.dataclass(**options)(cls)


def _plain(value: Any) -> Any:
    """The value in JSON's types; a float that JSON does not have is None. Raises TypeError."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")


def _typed(value: Any, wanted: Any) -> Any:
    """JSON's types as a dataclass, or as a container of such."""
    if value is None or wanted is Any:
        return value
    origin, parts = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in (types.UnionType, typing.Union):
        parts = tuple(part for part in parts if part is not type(None))
        return _typed(value, parts[0]) if len(parts) == 1 else value
    if dataclasses.is_dataclass(wanted):
        hints = typing.get_type_hints(wanted)
        known = {key: _typed(item, hints[key]) for key, item in value.items() if key in hints}
        return wanted(**known)  # type: ignore[operator]
    if origin is dict:
        return {key: _typed(item, parts[1]) for key, item in value.items()}
    if origin is list:
        return [_typed(item, parts[0]) for item in value]
    if origin is tuple:
        each = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        return tuple(_typed(item, part) for item, part in zip(value, each, strict=True))
    return value


class json:
    """The functions of `msgspec.json`."""

    @staticmethod
    def encode(value: Any) -> bytes:
        """UTF-8 without blanks. Raises TypeError."""
        return standard.dumps(_plain(value), separators=(",", ":"), ensure_ascii=False).encode()

    @staticmethod
    def decode(data: bytes, *, type: Any = Any) -> Any:
        """Raises DecodeError for what is no JSON."""
        try:
            return _typed(standard.loads(data), type)
        except ValueError as error:
            raise DecodeError(str(error)) from None
