"""Rows as pandas DataFrames; the only module of the store that imports pandas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from statistics import median
from typing import Any

import pandas as pd

from profharness.rows import Refusal
from profharness.store.queries import Store

_TRIPLES = ("grid", "block")


def to_frame(rows: Sequence[Any]) -> pd.DataFrame:
    """A frame with flat columns, one row each.

    A grid or block becomes three columns (`grid_x`, …), a tuple of texts one text joined by "; ",
    raw samples a count and a median
    (`event_samples`, `event_median_ns`), metrics one column each under the profiler's own name,
    without the unit, other dicts one column a key. Unknown values are missing,
    never 0.
    """
    return pd.DataFrame([_flat(row) for row in rows])


def query(store: Store, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> pd.DataFrame:
    """The answer to any SELECT over the store's tables and views."""
    cursor = store.connection.execute(sql, params)
    columns = [column[0] for column in cursor.description or ()]
    return pd.DataFrame(cursor.fetchall(), columns=columns)


def _flat(row: Any) -> dict[str, Any]:
    if is_dataclass(row):
        pairs = [(field.name, getattr(row, field.name)) for field in fields(row)]
    else:
        pairs = list(row._asdict().items())
    flat: dict[str, Any] = {}
    for name, value in pairs:
        flat |= _columns(name, value)
    return flat


def _columns(name: str, value: Any) -> dict[str, Any]:
    if name in _TRIPLES:
        return dict(zip((f"{name}_{axis}" for axis in "xyz"), value or (None,) * 3, strict=True))
    if name == "samples":
        return {
            key: found
            for kind, numbers in value.items()
            for key, found in (
                (f"{kind}_samples", len(numbers)),
                (f"{kind}_median_ns", median(numbers) if numbers else None),
            )
        }
    if name == "metrics":
        return {key: number for key, (number, _) in value.items()}
    if isinstance(value, dict):
        return {f"{name}_{key}": inner for key, inner in value.items()}
    if isinstance(value, tuple):
        heads = (item.code if isinstance(item, Refusal) else item for item in value)
        return {name: "; ".join(str(head) for head in heads)}
    return {name: value}
