"""Render a document as one HTML file that needs no network.

Charts are inline SVG. The page has a table of contents, and its tables can be sorted and filtered.
"""

from __future__ import annotations

import hashlib
import math
import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any

from profharness.columns import Column
from profharness.errors import one_line, printable
from profharness.render.document import (
    Block,
    Chart,
    Code,
    Document,
    Heading,
    Note,
    Table,
    format_value,
)

FILTER_FROM = 8  # minimum number of rows of a table that has a filter
DEEPEST = 3  # deepest heading level in the table of contents
LONGEST_ENTRY = 120  # maximum length of a heading in the table of contents


def render_html(document: Document) -> str:
    """Render a page whose policy forbids network access.

    Raise MissingExtraError if the document has charts and the extra `report` is not installed.
    """
    style, script = _asset("page.css"), _asset("page.js")
    page = _Page()
    body = "\n".join(page.block(block) for block in document.blocks)
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        # Only the script of the page may run. The policy identifies it by its hash.
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return _asset("page.html").format(
        policy=policy,
        title=_text(document.title),
        style=style,
        contents=_contents(page.headings),
        body=body,
        script=script,
    )


def _asset(name: str) -> str:
    return files("profharness.render").joinpath("assets", name).read_text(encoding="utf-8")


def _text(value: str) -> str:
    """Escape a text for an element or a quoted attribute."""
    return escape(one_line(value), quote=True)


@dataclass
class _Page:
    """The state of rendering: headings with their anchors, and the number of charts."""

    headings: list[tuple[str, Heading]] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    charts: int = 0
    tables: int = 0

    def block(self, block: Block) -> str:
        match block:
            case Heading():
                return self._heading(block)
            case Table():
                self.tables += 1
                named = self.headings[-1][1].text if self.headings else "table"
                return _table(block, f"t{self.tables}", named)
            case Note():
                return _note(block)
            case Code(text):
                # Unlike `_text`, this keeps the line breaks in code.
                return f'<pre tabindex="0"><code>{escape(printable(text))}</code></pre>'
            case Chart():
                return self._chart(block)

    def _heading(self, heading: Heading) -> str:
        anchor = self._anchor(heading.text)
        self.headings.append((anchor, heading))
        tag = f"h{min(max(heading.level, 2), 6)}"
        link = f'<a class="anchor" href="#{anchor}" aria-label="Link to this part">#</a>'
        return f'<{tag} id="{anchor}">{_text(heading.text)}{_detail(heading)} {link}</{tag}>'

    def _anchor(self, text: str) -> str:
        """Return a new id made of letters, digits and hyphens."""
        stem = re.sub(r"[^a-z0-9]+", "-", text[:LONGEST_ENTRY].lower()).strip("-") or "part"
        name, count = stem, 1
        while name in self.anchors or name in ("content", "theme"):
            count += 1
            name = f"{stem}-{count}"
        self.anchors.add(name)
        return name

    def _chart(self, chart: Chart) -> str:
        from profharness.render.charts import draw_svg

        self.charts += 1
        caption = f"<figcaption>{_text(chart.caption)}</figcaption>" if chart.caption else ""
        svg = draw_svg(chart, self.charts)
        return f'<figure><div class="scroll" tabindex="0">{svg}</div>{caption}</figure>'


def _contents(headings: Sequence[tuple[str, Heading]]) -> str:
    """Return the table of contents: sections and, one level below, their parts."""
    if len(headings) < 2:
        return ""
    items = "".join(
        f'<li class="level{heading.level}"><a href="#{anchor}">{_text(shortened(heading.text))}</a>'
        f"{_detail(heading, short=True) if heading.level > 2 else ''}</li>"
        for anchor, heading in headings
        if heading.level <= DEEPEST
    )
    return (
        '<nav aria-label="Contents"><details open><summary>Contents</summary>'
        f"<ol>{items}</ol></details></nav>"
    )


def _detail(heading: Heading, *, short: bool = False) -> str:
    detail = shortened(heading.detail) if short else heading.detail
    return f" <small>{_text(detail)}</small>" if detail else ""


def shortened(text: str) -> str:
    """Cut the middle of a text that is longer than LONGEST_ENTRY. The name of a range may fill a
    page.
    """
    half = LONGEST_ENTRY // 2
    return text if len(text) <= LONGEST_ENTRY else f"{text[: half - 1]}…{text[-half:]}"


def _note(note: Note) -> str:
    level = note.level if note.level in ("warning", "error") else "note"
    word = "" if level == "note" else f"{level}: "
    label = f"<b>{_text(note.label)}</b> " if note.label else ""
    return f'<p class="{level}">{label}{word}{_text(note.text)}</p>'


def _table(table: Table, ident: str, named: str) -> str:
    head = "".join(
        f'<th scope="col"{_right(column)}><button type="button">{_text(column.title) or "&nbsp;"}'
        "</button></th>"
        for column in table.columns
    )
    body = "\n".join(f"<tr>{''.join(_cells(table.columns, row))}</tr>" for row in table.rows)
    name = _text(named)
    search = ""
    if len(table.rows) >= FILTER_FROM:
        search = (
            f'<p class="filter"><label>Filter <input type="search" aria-controls="{ident}" '
            f'autocomplete="off"></label> <output>{len(table.rows)} rows</output></p>'
        )
    return (
        f'{search}<div class="scroll" tabindex="0" role="region" aria-label="Table: {name}">'
        f'<table id="{ident}"><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'
    )


def _cells(columns: Sequence[Column], row: Sequence[Any]) -> Iterator[str]:
    """Yield the cells of a row. Repeated values are shown for sorting; data-v is the number to sort
    by.
    """
    for column, value in zip(columns, row, strict=True):
        text = _text(format_value(column, value))
        number = _sort_number(value)
        sort = f' data-v="{number!r}"' if number is not None else ""
        yield f"<td{_right(column)}{sort}>{text}</td>"


def _sort_number(value: Any) -> float | int | None:
    # `bool` is a subclass of `int`.
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value if value == value else None  # NaN sorts like an unknown value
    if isinstance(value, tuple) and len(value) == 3 and all(isinstance(n, int) for n in value):
        # a grid sorts by its size
        return math.prod(value)
    return None


def _right(column: Column) -> str:
    return ' class="r"' if column.right else ""
