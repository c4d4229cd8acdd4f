"""Declare the title, the format and the description of each field of a result row.

The dataclass of a row declares each field once, as
`Annotated[int | None, column("µs", "time", meaning="…")]`. Tables, CSV, JSON, pages, the glossary and
docs/reference.md are derived from these declarations.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, get_type_hints

NUMERIC = frozenset({
    "count", "figures", "short", "tenths", "time", "time µs", "time ms", "time s", "kib", "mib",
    "percent", "interval", "interval µs", "interval ms", "interval s", "spread",
    "load", "triple", "ratio", "excess", "mega", "giga", "tera", "duration", "price",
})  # fmt: skip
"""Formats whose columns are aligned to the right."""

Importance = Literal["key", "answer", "normal", "detail"]
"""The importance of a column, which decides whether a narrow terminal shows the column.

A `key` column identifies a row, and an `answer` column contains the result. Both are always visible.
If other columns do not fit, `detail` columns are hidden first and then `normal` columns, from the
right. Rows take a second line rather than hide a `normal` column, but not for a `detail`. Of the
same importance, a column with a greater `spare` is hidden before a column with a smaller `spare`.
A detail with a `spare` above 1 is shown only in rows of one line, although a second line would have
room for it, so that a wider terminal does not hide it.
"""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table, or one field of a record."""

    key: str  # name of the attribute or dict key that contains the value
    title: str = ""  # heading in tables, empty for a field that only JSON and CSV contain
    format: str = "text"  # a key of `profharness.render.document.FORMATS`
    right: bool = False  # whether to align right; always true for numeric formats
    # None means `key` for the first column and for columns with `repeat=False`, else `normal`
    importance: Importance | None = None
    spare: int = 0  # order in which columns of one importance are hidden, greatest first
    shrink: bool = False  # whether the values may be cut in a narrow terminal
    wrap: bool = False  # whether long values continue on further lines in a narrow terminal
    scale: str = ""  # columns of times with the same scale have the same unit
    repeat: bool = True  # whether to print a value that is equal to the value above it
    optional: bool = False  # whether tables omit the column if no row has a value
    meaning: str = ""  # short description for the glossary and the reference page
    json_key: str = ""  # key in JSON and CSV if it differs from `key`

    def __post_init__(self) -> None:
        if self.format in NUMERIC:
            object.__setattr__(self, "right", True)


SPEED_UP = (
    "the baseline's time divided by the candidate's time, so above 1 if the candidate is faster"
)
"""The meaning of each column of speed-ups."""

VS_FASTEST = "time vs fastest"
"""The title of each column with the time of a backend over that of the fastest, above 1 if slower."""

column = functools.partial(Column, "")
"""Create a column for the annotation of a field. `columns_of` uses the field's name as the key."""


@functools.cache
def columns_of(row_type: Any) -> Mapping[str, Column]:
    """Return the declared columns of a row type by key. Properties follow the fields."""
    hints = get_type_hints(row_type, include_extras=True)
    names = [each.name for each in fields(row_type)] if is_dataclass(row_type) else row_type._fields
    found = {name: hints[name] for name in names}
    for name, member in vars(row_type).items():
        if isinstance(member, property) and member.fget is not None:
            found[name] = get_type_hints(member.fget, include_extras=True).get("return")
    declared = {}
    for name, hint in found.items():
        for each in getattr(hint, "__metadata__", ()):
            if isinstance(each, Column):
                declared[name] = replace(each, key=name)
    return declared


def pick(row_type: Any, *names: str) -> tuple[Column, ...]:
    """Return the named columns in this order. Without names, return all columns with a title."""
    declared = columns_of(row_type)
    return tuple(
        declared[name] for name in names or (key for key in declared if declared[key].title)
    )
