"""Show the figures of a device: sizes, clocks, limits and ridge points, with the source of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from profharness.columns import Column
from profharness.devices import DeviceFact
from profharness.render.document import Block, Heading, Table

COLUMNS = (
    Column("name", "figure", repeat=False),
    Column("value", "value", right=True),
    Column("unit", "unit"),
    Column("source", "source"),
)


def device_blocks(name: str | None, facts: Sequence[DeviceFact]) -> list[Block]:
    """Return the section about a device. Empty if nothing is known of it."""
    if not facts:
        return []
    rows = tuple((fact.name, _text(fact.value), fact.unit, fact.source) for fact in facts)
    return [Heading("Device", name or ""), Table(COLUMNS, rows)]


def _text(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.1f}".removesuffix(".0")


def device_record(name: str | None, facts: Sequence[DeviceFact]) -> dict[str, Any]:
    """Return the JSON record of a device."""
    return {"device": name, "facts": [fact._asdict() for fact in facts]}
