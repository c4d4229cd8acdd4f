"""The HTML renderer: one file that needs no network, with charts as inline SVG, a table of
contents, and tables that sort and filter."""

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
from profharness.views.document import (
    Block,
    Chart,
    Code,
    Document,
    Heading,
    Note,
    Table,
    format_value,
)

FILTER_FROM = 8  # a table with fewer rows is read faster than it is filtered
DEEPEST = 3  # level of the headings in the table of contents
LONGEST_ENTRY = 120  # characters of a heading in the table of contents


def render_html(document: Document) -> str:
    """A whole page that opens from disk; its policy forbids the network. Raises MissingExtraError
    for charts without the extra `report`.
    """
    style, script = _asset("page.css"), _asset("page.js")
    page = _Page()
    body = "\n".join(page.block(block) for block in document.blocks)
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        # the page's own script, by its hash: nothing that came with the data runs
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
    return files("profharness.views").joinpath("assets", name).read_text(encoding="utf-8")


def _text(value: str) -> str:
    """Text as HTML shows it as it stands, in an element or a quoted attribute."""
    return escape(one_line(value), quote=True)


@dataclass
class _Page:
    """What has been rendered so far: the headings with their anchors, and the number of charts."""

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
                # not _text: the lines of code stay lines
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
        """An id made of letters, digits and hyphens, unlike all before it."""
        stem = re.sub(r"[^a-z0-9]+", "-", text[:LONGEST_ENTRY].lower()).strip("-") or "part"
        name, count = stem, 1
        while name in self.anchors or name in ("content", "theme"):
            count += 1
            name = f"{stem}-{count}"
        self.anchors.add(name)
        return name

    def _chart(self, chart: Chart) -> str:
        from profharness.views.charts import draw_svg

        self.charts += 1
        caption = f"<figcaption>{_text(chart.caption)}</figcaption>" if chart.caption else ""
        svg = draw_svg(chart, self.charts)
        return f'<figure><div class="scroll" tabindex="0">{svg}</div>{caption}</figure>'


def _contents(headings: Sequence[tuple[str, Heading]]) -> str:
    """The table of contents: sections, and their parts one level below."""
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
    """At most LONGEST_ENTRY characters, both ends kept: a range may be named by a whole page."""
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
    """Repeated values are shown too, for sorting; data-v holds the number to sort by."""
    for column, value in zip(columns, row, strict=True):
        text = _text(format_value(column, value))
        number = _sort_number(value)
        sort = f' data-v="{number!r}"' if number is not None else ""
        yield f"<td{_right(column)}{sort}>{text}</td>"


def _sort_number(value: Any) -> float | int | None:
    # a bool is an int too
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value if value == value else None  # NaN sorts as what is not known
    if isinstance(value, tuple) and len(value) == 3 and all(isinstance(n, int) for n in value):
        # a grid sorts by its size
        return math.prod(value)
    return None


def _right(column: Column) -> str:
    return ' class="r"' if column.right else ""
