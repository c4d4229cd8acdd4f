"""Show the answer of `explain-kernel`: kernel names in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from profharness.columns import Column
from profharness.errors import UsageError
from profharness.render.document import Block, Document, Heading, Note, Table, record
from profharness.traces.kernel_names import canonical
from profharness.traces.kernel_names.parts import FACTS, Description, describe

SCHEMA = "profharness.kernel_name/1"
FIELDS = (
    *("name", "kernel", "short", "family", "library", "meaning"),
    *FACTS,
    *("parts", "unknown", "untold"),
)
COLUMNS = (
    Column("token", "part", shrink=True),
    Column("parameter", "is"),
    Column("meaning", "means"),
)


def described(names: Sequence[str]) -> list[Description]:
    """Return the description of each name. Raise UsageError for an empty one."""
    if not all(name.strip() for name in names):
        raise UsageError("NAME is empty; give a kernel's name as `profharness kernels` shows it")
    return [describe(name) for name in names]


def names_document(descriptions: Sequence[Description]) -> Document:
    """Return the document of `explain-kernel`: the meaning of the parts of each name, and what they
    leave open.
    """
    blocks = [block for description in descriptions for block in _blocks(description)]
    records = tuple(map(name_record, descriptions))
    return Document(SCHEMA, "Kernel names in words", tuple(blocks), FIELDS, records)


def name_record(description: Description) -> dict[str, Any]:
    """Return the JSON record of one name."""
    kernel = description.kernel
    return {
        "name": kernel.name,
        "kernel": canonical(kernel.name),
        **{name: getattr(kernel, name) for name in ("short", "family")},
        "library": description.library,
        "meaning": description.meaning,
        **{name: getattr(kernel, name) for name in FACTS},
        "parts": [record(part) for part in description.parts],
        "unknown": list(description.unknown),
        "untold": list(description.untold),
    }


def _blocks(description: Description) -> list[Block]:
    kernel = description.kernel
    blocks: list[Block] = [Heading(kernel.short, f"family {kernel.family}")]
    if not description.is_known:
        return [*blocks, Note(description.meaning, "unknown", "warning")]
    blocks.append(Note(description.meaning))
    rows = [
        (part.token, part.parameter, "not known" if part.meaning is None else part.meaning)
        for part in description.parts
    ]
    if rows:
        blocks.append(Table(COLUMNS, tuple(rows)))
    if description.untold:
        text = f"{', '.join(description.untold)}: the name does not say"
        blocks.append(Note(text, "open"))
    return blocks
