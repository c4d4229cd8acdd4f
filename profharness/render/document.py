"""Documents, which contain blocks such as tables and notes for people, and records for programs."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import msgspec

from profharness.columns import Column
from profharness.errors import one_line
from profharness.logs import duration
from profharness.render.colors import STYLES
from profharness.units import (
    UNITS,
    common_unit,
    memory_figure,
    rate_figure,
    ratio_text,
    share_figure,
    time_figure,
    time_text,
)

KINDS: dict[str, str] = {
    "lines": "y over x on two logarithmic axes, with one line and one shape of mark per series",
    "dots": "one row per label (y), with one mark per series at x on a logarithmic axis",
    "stack": "one bar per label (y), split into series by x; `label` is the text beside the bar",
    "map": "a grid of x and y; the colour and the letter of each field show its series",
    "roofline": "FLOP/s (y) over FLOP per byte (x) on logarithmic axes, with a line for each roof",
    "dumbbell": "one row per label (y) with two joined marks (series) at x on a logarithmic axis",
}
"""Maps each kind of chart to its description. `charts.DRAWERS` has a function for each kind."""
PLAIN_KINDS = frozenset({"stack"})  # kinds that a page draws without the `report` extra


@dataclass(frozen=True, slots=True)
class Roof:
    """A limit in a roofline chart: bandwidth times intensity, but at most the peak FLOP/s."""

    label: str
    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart of rows. Text formats omit charts, because the document also has a table of the values.

    `x`, `y`, `series`, `low`, `high` and `label` are keys of the rows.
    """

    kind: str
    """A key of KINDS."""
    title: str
    rows: tuple[Mapping[str, Any], ...]
    x: str
    """Key of the x values. The title of the axis contains their unit."""
    y: str
    series: str
    x_title: str = ""
    y_title: str = ""
    caption: str = ""
    roofs: tuple[Roof, ...] = ()
    """The limits in a chart of the kind `roofline`."""
    low: str = ""
    """Key of the lower end of an interval of y (`lines`) or x (`dots`). Rows may lack this key."""
    high: str = ""
    """Key of the upper end of the interval."""
    label: str = ""
    """Key of the text of a mark. Rows may lack this key."""
    marks: tuple[tuple[float, str], ...] = ()
    """Texts at positions on the x axis of a `lines` chart, such as a crossover of two lines."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown chart kind {self.kind!r}; choose one of {', '.join(KINDS)}")
        for row in self.rows:
            missing = {self.x, self.y, self.series} - set(row)
            if missing:
                raise ValueError(f"a row of chart {self.title!r} has no {', '.join(missing)}")

    def plain_rows(self) -> list[dict[str, Any]]:
        """Return the rows with the fixed keys x, y, series, low, high and label.

        A drawing library could parse other keys as paths or expressions. `low` and `high` are either
        both numbers or both None.
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


FLOPS = "FLOP/s"
"""The title of an axis of rates in FLOP/s."""


def axis_text(value: float, title: str) -> str:
    """Format a value of the axis with this title. Values in µs and in FLOP/s get their units."""
    if title.startswith("µs"):
        return time_text(1e3 * value)
    if title == FLOPS:
        return f"{value / 1e12:,.4g} TFLOP/s"
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def axis_title(title: str) -> str:
    """Return the title of an axis as a chart shows it.

    Leave out µs, because the values show their units. Rates in FLOP/s are shown in TFLOP/s.
    """
    return "TFLOP/s" if title == FLOPS else title.replace("µs", "time")


MISSING = "-"
"""Displayed in place of a missing value."""
NO_VALUES = (None, "", ())


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading above the blocks that follow it."""

    text: str
    detail: str = ""
    level: int = 2
    """2 for a section, 3 for a subsection."""
    folded: bool = False
    """Whether a page hides the section until the reader opens it."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of raw values. Times are in ns, sizes in bytes, and shares between 0 and 1."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[Any, ...], ...]
    bars: tuple[str, ...] = ()
    """Keys of the columns whose values a page also draws as bars. All bars have the same scale."""
    colored_by: str = ""
    """Key of the column with the backends that give the bars their colours."""
    drawn: bool = False
    """Whether the chart before the table shows all values, so that a page shows only the chart."""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"a row has {len(row)} values for {len(self.columns)} columns")

    @classmethod
    def of(cls, columns: Sequence[Column], items: Iterable[Any]) -> Table:
        """Build a table with one row per item. The key of a column names an attribute or a dict key.

        If an item is a tuple of objects, take the value from the first object that has the key. Omit
        optional columns without values.
        """
        rows = list(items)
        shown = filled_columns(columns, rows, [each.key for each in columns if each.optional])
        return cls(
            tuple(shown), tuple(tuple(_value(row, column.key) for column in shown) for row in rows)
        )


def filled_columns(
    columns: Iterable[Column], items: Iterable[Any], optional: Collection[str] | None = None
) -> list[Column]:
    """Return the columns that have a value in at least one item.

    Omit only columns whose keys are in `optional`. If `optional` is None, omit any empty column.
    """
    rows = list(items)
    return [
        column
        for column in columns
        if (optional is not None and column.key not in optional)
        or any(_value(row, column.key) not in NO_VALUES for row in rows)
    ]


def _value(item: Any, key: str) -> Any:
    if isinstance(item, tuple) and not hasattr(item, "_fields"):
        parts = (
            part for part in item if (key in part if isinstance(part, dict) else hasattr(part, key))
        )
        part = next(parts, None)
        return None if part is None else _value(part, key)
    return item[key] if isinstance(item, dict) else getattr(item, key)


@dataclass(frozen=True, slots=True)
class Note:
    """A remark for the reader."""

    text: str
    label: str = ""
    """The subject, such as a backend."""
    level: str = "note"
    """`note`, `warning`, `error` or `hint`.

    A hint names an option of the command line, so pages and Markdown omit it.
    """


@dataclass(frozen=True, slots=True)
class More:
    """Something that --full also shows, as a noun phrase.

    A terminal names all of them in one line at the end. Pages and Markdown omit them.
    """

    text: str


# Words of lower case that may start a sentence.
_NAMES = frozenset({*STYLES, "ncu", "nsys", "torch", "profharness"})
_FIRST_WORD = re.compile(r"[a-z]+(?=[ ,])")
_NO_SENTENCE = re.compile(r"[a-z]+: |\S+ → ")
_WHOLE = re.compile(r"[.!?:…]$|[.!?] [(\[].*[)\]]$")
_COMMAND = re.compile(r"(?:^|: )(?:profharness|pip|python) [^`]*$")


def shown_note(note: Note) -> Note:
    """Return a note as people read it.

    Notes without a label and warnings are sentences: they start with a capital and end with a full
    stop. A command at the end has no full stop, so that it can be copied. Other notes complete
    their labels, and are shown as they are, like warnings such as `mismatch: …` and
    `5.09 → 76.0 MiB (more)`.
    """
    text = one_line(note.text)
    if not text or (note.label and (note.level != "warning" or _NO_SENTENCE.match(text))):
        return note
    word = _FIRST_WORD.match(text)
    if word and word[0] not in _NAMES:
        text = f"{text[0].upper()}{text[1:]}"
    ended = _WHOLE.search(text) or _COMMAND.search(text)
    return replace(note, text=text if ended else f"{text}.")


def status_note(status: str, reason: str, label: str, *, where: str = "") -> Note:
    """Return a note about a backend that did not run, with level `note` for a refusal, else `error`.

    `where` names the configs, such as ` on 2 of 4 configs`.
    """
    level = "note" if status == "refused" else "error"
    return Note(f"{status}{where}: {reason}", label, level)


def merged_notes(notes: Iterable[Note]) -> list[Note]:
    """Merge notes with the same text and level, and join their labels."""
    labels: dict[tuple[str, str], dict[str, None]] = {}
    for note in notes:
        labels.setdefault((note.text, note.level), {})[note.label] = None
    return [
        Note(text, ", ".join(filter(None, names)), level) for (text, level), names in labels.items()
    ]


@dataclass(frozen=True, slots=True)
class Code:
    """Python code to copy. Renderers neither wrap nor cut the lines."""

    text: str


@dataclass(frozen=True, slots=True)
class Span:
    """A mark on a timeline. Times are in ns from the start of the timeline."""

    start_ns: int
    duration_ns: int
    name: str
    series: str
    """The name that determines the colour, such as a backend or a kind of work."""
    detail: str = ""
    """Further text about the mark, such as a module."""


@dataclass(frozen=True, slots=True)
class Lane:
    """A row of a timeline, with spans sorted by start."""

    name: str
    spans: tuple[Span, ...]
    visited: bool = False
    """Whether the reader can jump to the marked spans of the lane."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Lanes of spans. The reader of a page can zoom a timeline. Other formats omit timelines."""

    title: str
    lanes: tuple[Lane, ...]
    duration_ns: int
    marked: tuple[str, ...] = ()
    """The series that are drawn above other series. The reader can jump to their spans."""
    caption: str = ""


Block = Heading | Table | Note | More | Code | Chart | Timeline


@dataclass(frozen=True, slots=True)
class Document:
    """The result of a command, independent of the output format."""

    schema: str
    """Name and version of the JSON format, such as `profharness.kernels/1`."""
    title: str
    blocks: tuple[Block, ...]
    """The content for people."""
    fields: tuple[str, ...]
    """Keys of the records in order."""
    records: tuple[Mapping[str, Any], ...]
    """The content for programs."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further top-level keys of the JSON output."""
    about: str = ""
    """Description of the content, for the message after a file is written."""
    answer: tuple[str, ...] = ()
    """One to three sentences that answer the question. Every format shows them first."""
    subtitle: str = ""
    """Line below the title in HTML and Markdown, such as the GPU of a run."""
    full_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Maps shortened names in tables and timelines to full names. Pages show these on demand."""


def _count(value: Any) -> str:
    return f"{value:,.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else f"{value:,}"


def _figures(value: float) -> str:
    """Format with four significant figures and without an exponent: `0.001514`, `12.35`, `1,235`."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    # A float has 15 reliable decimal digits.
    digits = min(max(3 - math.floor(math.log10(abs(value))), 0), 15)
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _price(value: float) -> str:
    if value >= 0.1:
        return f"{value:,.2f}"
    return f"{value:.4f}" if value >= 0.0001 else "<0.0001"


def _duration(time_ns: float) -> str:
    """Format a time with three significant figures, or in minutes and hours if it is long."""
    return time_text(time_ns) if time_ns < 1e10 else duration(time_ns / 1e9)


def _times(value: Any, each: Callable[[float], str]) -> str:
    """Format a time. Format a pair of times as `before → after`, or as one time if they are equal."""
    texts = [MISSING if time is None else each(time) for time in _numbers(value)]
    return " → ".join(dict.fromkeys(texts))


def _interval(value: tuple[float, float | None], each: Callable[[float], str]) -> str:
    """Format the ends of an interval of times, or one time if the ends look equal.

    An interval without an upper end is a lower bound.
    """
    low, high = value
    if high is None:
        return f"at least {each(low)}"
    return " to ".join(dict.fromkeys((each(low), each(high))))


def _numbers(value: Any) -> tuple[float | None, ...]:
    return value if isinstance(value, tuple) else (value,)


FORMATS: dict[str, Callable[[Any], str]] = {
    "text": str,
    "count": _count,
    "figures": _figures,
    "tenths": lambda value: f"{value:,.1f}".removesuffix(".0"),
    "short": lambda value: f"{value:.3g}",
    "time": functools.partial(_times, each=time_text),
    "interval": functools.partial(_interval, each=time_text),
    "kib": lambda value: f"{value / 1024:,.1f}",
    "mib": memory_figure,
    "percent": share_figure,
    "spread": lambda value: "busy" if value > 1 else share_figure(value),
    "load": lambda value: f"{100 * value:.1f}{'!' if value > 1 else ''}",
    "flag": lambda value: "yes" if value else "no",
    "triple": lambda value: ",".join(map(str, value)),
    "ratio": ratio_text,
    "excess": lambda value: ratio_text(1 + value),
    "mega": lambda value: rate_figure(value / 1e6),
    "giga": lambda value: rate_figure(value / 1e9),
    "tera": lambda value: rate_figure(value / 1e12),
    "duration": _duration,
    "price": _price,
    "names": lambda value: ", ".join(map(str, value)) or MISSING,
}
for _unit in UNITS:
    _figure = functools.partial(time_figure, unit=_unit)
    FORMATS[f"time {_unit}"] = functools.partial(_times, each=_figure)
    FORMATS[f"interval {_unit}"] = functools.partial(_interval, each=_figure)


def without_empty_columns(document: Document) -> Document:
    """Remove columns without values, except columns of the importance `key` or `answer`.

    Keep a column if another table with the same columns has a value in this column.
    """
    filled: dict[tuple[Column, ...], set[int]] = {}
    for block in document.blocks:
        if isinstance(block, Table):
            shown = filled.setdefault(block.columns, set())
            for row in block.rows:
                shown.update(at for at, value in enumerate(row) if value not in NO_VALUES)
    kept = {
        columns: [
            at
            for at, column in enumerate(columns)
            if not shown or at in shown or not at or column.importance in ("key", "answer")
        ]
        for columns, shown in filled.items()
    }
    return replace(
        document,
        blocks=tuple(
            replace(
                block,
                columns=tuple(block.columns[at] for at in kept[block.columns]),
                rows=tuple(tuple(row[at] for at in kept[block.columns]) for row in block.rows),
            )
            if isinstance(block, Table)
            else block
            for block in document.blocks
        ),
    )


def as_page(document: Document) -> Document:
    """Return the document without a first heading that repeats its title.

    The detail of the heading becomes the subtitle. A terminal does not show titles.
    """
    first = next(iter(document.blocks), None)
    if not isinstance(first, Heading) or first.text != document.title:
        return document
    subtitle = " · ".join(filter(None, (document.subtitle, first.detail)))
    return replace(document, blocks=document.blocks[1:], subtitle=subtitle)


def for_reading(document: Document) -> Document:
    """Return the document for people: without empty columns, and with suitable units."""
    return with_time_units(without_empty_columns(document))


def with_time_units(document: Document) -> Document:
    """Return the document with one unit for all times of a column, which the title names.

    Tables with the same columns, and columns with the same scale, have the same unit. Renderers for
    people call this function.
    """
    tables = [block for block in document.blocks if isinstance(block, Table)]
    times: dict[tuple[Column, ...], dict[str, list[float]]] = {}
    for table in tables:
        own = times.setdefault(table.columns, {})
        for place, scale in enumerate(_scales(table.columns)):
            if scale is not None:
                column = own.setdefault(scale, [])
                column.extend(time for row in table.rows for time in _times_of(row[place]))
    shown = {columns: _columns_in_units(columns, own) for columns, own in times.items()}
    blocks = (
        replace(block, columns=shown[block.columns]) if isinstance(block, Table) else block
        for block in document.blocks
    )
    return replace(document, blocks=tuple(blocks))


def _scales(columns: Sequence[Column]) -> list[str | None]:
    """Return the scale of each column of times, and None for other columns."""
    return [
        each.scale or each.key if each.format in ("time", "interval") else None for each in columns
    ]


def _times_of(value: Any) -> Iterator[float]:
    return (abs(each) for each in _numbers(value) if each and not isinstance(each, str))


def _columns_in_units(
    columns: Sequence[Column], times: Mapping[str, Sequence[float]]
) -> tuple[Column, ...]:
    return tuple(
        column if scale is None else _column_in_unit(column, common_unit(times[scale]))
        for column, scale in zip(columns, _scales(columns), strict=True)
    )


def _column_in_unit(column: Column, unit: str) -> Column:
    return replace(column, title=column.title.replace("µs", unit), format=f"{column.format} {unit}")


def field_names(row_type: Any) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass in order."""
    return tuple(item.name for item in fields(row_type))


def record(item: object, names: Iterable[str] = ()) -> dict[str, Any]:
    """Convert a dataclass to a dict of JSON types. `names` selects and orders the fields."""
    plain: dict[str, Any] = msgspec.to_builtins(item)
    return {name: plain[name] for name in names} if names else plain


def format_value(column: Column, value: Any) -> str:
    """Format a value as one line. Format None as `-`, and do not apply formats to strings."""
    if value is None:
        return MISSING
    return one_line(value if isinstance(value, str) else FORMATS[column.format](value))


def formatted_rows(table: Table) -> list[list[str]]:
    """Format all rows. Omit repeated values in leading columns with `repeat=False`."""
    result: list[list[str]] = []
    previous: list[str] = []
    leading = leading_columns(table)
    for row in table.rows:
        texts = [
            format_value(column, value) for column, value in zip(table.columns, row, strict=True)
        ]
        shown = list(texts)
        for index in range(leading):
            if not previous or texts[: index + 1] != previous[: index + 1]:
                break
            shown[index] = ""
        result.append(shown)
        previous = texts
    return result


def leading_columns(table: Table) -> int:
    """Return the number of leading columns with `repeat=False`."""
    return next(
        (at for at, column in enumerate(table.columns) if column.repeat), len(table.columns)
    )
