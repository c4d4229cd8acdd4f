"""A Document: headings, tables, notes, code and charts for people, records for machines."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import msgspec

from profharness.columns import Column
from profharness.errors import one_line

# kind -> what it is; `charts.DRAWERS` has one function for each.
KINDS: dict[str, str] = {
    "lines": "y over x on two logarithmic axes, a line and a mark a series",
    "dots": "one row a label (y), a mark a series at x on a logarithmic axis",
    "stack": "one bar a label (y), cut into the series by x",
    "map": "a grid of x and y, coloured and lettered by the series",
    "roofline": "FLOP/s (y) over FLOP per byte (x), logarithmic, below the roofs",
    "dumbbell": "one row a label (y) with two marks (series) at x, joined; logarithmic",
}


@dataclass(frozen=True, slots=True)
class Roof:
    """The ceiling of a roofline: bytes a second times intensity, up to FLOP a second."""

    label: str
    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Mark:
    """A text at a place of the x axis of `lines`, such as where two lines cross."""

    x: float
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """kind is a key of KINDS; x, y and series name keys of each row, in the unit of the axis title.
    low and high name those of an interval (of y in `lines`, of x in `dots`), label that of a text
    which a mark says; rows may lack these. roofs belong to the kind `roofline`, marks to `lines`. Text formats leave
    charts out: a table has their figures.
    """

    kind: str
    title: str
    rows: tuple[Mapping[str, Any], ...]
    x: str
    y: str
    series: str
    x_title: str = ""
    y_title: str = ""
    caption: str = ""
    roofs: tuple[Roof, ...] = ()
    low: str = ""
    high: str = ""
    label: str = ""
    marks: tuple[Mark, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"chart kind {self.kind!r} is none of {', '.join(KINDS)}")
        for row in self.rows:
            missing = {self.x, self.y, self.series} - set(row)
            if missing:
                raise ValueError(f"a row of chart {self.title!r} has no {', '.join(missing)}")

    def plain_rows(self) -> list[dict[str, Any]]:
        """The rows under names of their own, which no drawing library reads as a path or an
        expression. low and high are both there or both None.
        """
        plain = []
        for row in self.rows:
            low, high = row.get(self.low), row.get(self.high)
            bounded = low is not None and high is not None
            plain.append(
                {
                    "x": row[self.x],
                    "y": row[self.y],
                    "series": str(row[self.series]),
                    "low": low if bounded else None,
                    "high": high if bounded else None,
                    "label": str(row.get(self.label) or ""),
                }
            )
        return plain


MISSING = "-"
"""Shown for a value that a profiler cannot provide."""
NO_VALUES = (None, "", ())


@dataclass(frozen=True, slots=True)
class Heading:
    """A line above what follows it. level 2 opens a section, 3 a part of one."""

    text: str
    detail: str = ""
    level: int = 2


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of raw values, one a column: durations in ns, sizes in bytes, shares 0 to 1."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row of {len(row)} values in {len(self.columns)} columns")

    @classmethod
    def of(cls, columns: Sequence[Column], items: Iterable[Any]) -> Table:
        """A row for each item: the attributes, or a dict's values, that the columns' keys name."""
        return cls(
            tuple(columns),
            tuple(tuple(_value(item, column.key) for column in columns) for item in items),
        )


def filled_columns(
    columns: Iterable[Column], items: Iterable[Any], optional: Collection[str] | None = None
) -> list[Column]:
    """Return the columns that have a value in some item.

    `optional` contains the keys of the columns that may be dropped, by default all.
    """
    rows = list(items)
    return [
        column
        for column in columns
        if (optional is not None and column.key not in optional)
        or any(_value(row, column.key) not in NO_VALUES for row in rows)
    ]


def _value(item: Any, key: str) -> Any:
    return item[key] if isinstance(item, dict) else getattr(item, key)


@dataclass(frozen=True, slots=True)
class Note:
    """One remark. level is `note`, `warning` or `error`; label names its subject (a backend)."""

    text: str
    label: str = ""
    level: str = "note"


def status_note(status: str, reason: str | None, label: str) -> Note:
    """Why something did not run. A refusal is an answer, anything else an error."""
    return Note(f"{status}: {reason}", label, "note" if status == "refused" else "error")


@dataclass(frozen=True, slots=True)
class Code:
    """Lines of Python to copy, which no renderer wraps or cuts."""

    text: str


Block = Heading | Table | Note | Code | Chart


@dataclass(frozen=True, slots=True)
class Document:
    """blocks are for people; records and extra (further top-level JSON keys) are for machines.
    schema is `profharness.<what>/<version>`; fields are the record keys in order.
    """

    schema: str
    title: str
    blocks: tuple[Block, ...]
    fields: tuple[str, ...]
    records: tuple[Mapping[str, Any], ...]
    extra: Mapping[str, Any] = field(default_factory=dict)


def _count(value: Any) -> str:
    return f"{value:,.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else f"{value:,}"


def _figures(value: float) -> str:
    """Four significant figures without an exponent: `0.001514`, `12.35`, `1,235`."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    # a float has 15 digits that can be relied on
    digits = min(max(3 - math.floor(math.log10(abs(value))), 0), 15)
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


FORMATS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "count": _count,
    "figures": _figures,
    "us": lambda value: f"{value / 1e3:.2f}",
    "ms": lambda value: f"{value / 1e6:,.2f}",
    "kib": lambda value: f"{value / 1024:.1f}",
    "mib": lambda value: _count(value / (1 << 20)),
    "percent": lambda value: f"{100 * value:.1f}",
    "triple": lambda value: ",".join(map(str, value)),
    "ratio": lambda value: f"{value:.2f}x",
    "thousandths": lambda value: f"{value:.3f}x",
    "names": lambda value: ", ".join(map(str, value)) or MISSING,
}


def field_names(row_type: Any) -> tuple[str, ...]:
    """The fields of a dataclass in order."""
    return tuple(item.name for item in fields(row_type))


def record(item: object, names: Iterable[str] = ()) -> dict[str, Any]:
    """A dataclass in JSON's types, nested ones too. names: these fields alone, in this order."""
    plain: dict[str, Any] = msgspec.to_builtins(item)
    return {name: plain[name] for name in names} if names else plain


def format_value(column: Column, value: Any) -> str:
    """The text of one value, on one line; None (not known) is `-`, text is what it is in any column:
    "" where nothing applies.
    """
    if value is None:
        return MISSING
    return one_line(value if isinstance(value, str) else FORMATS[column.format](value))


def formatted_rows(table: Table) -> list[list[str]]:
    """All rows as text. A repeated value is left out while everything left of it is the same too."""
    result: list[list[str]] = []
    previous: list[str] = []
    for row in table.rows:
        texts = [
            format_value(column, value) for column, value in zip(table.columns, row, strict=True)
        ]
        shown = list(texts)
        for index, column in enumerate(table.columns):
            if column.repeat or not previous or texts[: index + 1] != previous[: index + 1]:
                break
            shown[index] = ""
        result.append(shown)
        previous = texts
    return result
