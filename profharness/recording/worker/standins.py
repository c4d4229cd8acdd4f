"""Minimal replacements of msgspec, isal and nvtx for a Python that does not have these packages.

The replacement of msgspec converts between dataclasses and JSON. It does not check types, because
profharness itself writes the JSON. The replacement of nvtx records no ranges, so nsys and ncu need
the real package.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip as igzip
import json as standard
import math
import types
import typing
from typing import Any

__all__ = [
    "DecodeError",
    "MsgspecError",
    "Struct",
    "annotate",
    "end_range",
    "igzip",
    "json",
    "start_range",
]


class MsgspecError(Exception):
    """The base class of all errors of msgspec."""


class DecodeError(MsgspecError):
    """Raised by `json.decode` if the data is not JSON."""


class Struct:
    """A base class that makes each of its subclasses a dataclass."""

    def __init_subclass__(cls, **options: Any) -> None:
        dataclasses.dataclass(**options)(cls)


def _plain(value: Any) -> Any:
    """Convert a value to types that the standard `json` can encode. NaN and infinities become None.

    Raise TypeError if a type is not supported.
    """
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
    """Convert a decoded JSON value to the type `wanted`, which may contain dataclasses."""
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
        """Encode a value as JSON. Raise TypeError if a type is not supported."""
        return standard.dumps(_plain(value), separators=(",", ":"), ensure_ascii=False).encode()

    @staticmethod
    def decode(data: bytes, *, type: Any = Any) -> Any:
        """Decode JSON to a value of the given type. Raise DecodeError if the data is not JSON."""
        try:
            return _typed(standard.loads(data), type)
        except ValueError as error:
            raise DecodeError(str(error)) from None


def annotate(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context manager that does nothing."""
    return contextlib.nullcontext()


def start_range(*_: Any, **__: Any) -> None:
    """Do nothing."""


end_range = start_range
