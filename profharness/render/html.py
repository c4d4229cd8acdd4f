"""Render a document as one HTML file that needs no network.

Charts are inline SVG. The page has a table of contents, and its tables can be sorted and filtered.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Collection, Mapping
from html import escape
from importlib.resources import files
from typing import Any

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
    """Render a page whose content security policy forbids network access.

    Raise MissingExtraError if the document has charts and the extra `report` is not installed.
    """
    headings: dict[str, Heading] = {}  # by anchor
    counts = Counter[type[Block]]()
    parts = []
    if document.answer:
        sentences = "".join(f"<p>{_text(sentence)}</p>" for sentence in document.answer)
        parts.append(f'<section class="answer" aria-label="In short">{sentences}</section>')
    for block in document.blocks:
        counts[type(block)] += 1
        match block:
            case Heading():
                anchor = _new_anchor(block.text, headings)
                headings[anchor] = block
                tag = f"h{min(max(block.level, 2), 6)}"
                link = f'<a class="anchor" href="#{anchor}" aria-label="Link to this part">#</a>'
                title = f"{_text(block.text)}{_small(block.detail)} {link}"
                parts.append(f'<{tag} id="{anchor}">{title}</{tag}>')
            case Table():
                last = next(reversed(headings.values()), None)
                parts.append(_table(block, f"t{counts[Table]}", last.text if last else "table"))
            case Note():
                level = block.level if block.level in ("warning", "error") else "note"
                word = "" if level == "note" else f"{level}: "
                label = f"<b>{_text(block.label)}</b> " if block.label else ""
                parts.append(f'<p class="{level}">{label}{word}{_text(block.text)}</p>')
            case Code(text):
                # Unlike `_text`, this keeps the line breaks in code.
                parts.append(f'<pre tabindex="0"><code>{escape(printable(text))}</code></pre>')
            case Chart():
                from profharness.render.charts import draw_svg

                caption = block.caption and f"<figcaption>{_text(block.caption)}</figcaption>"
                svg = f'<div class="scroll" tabindex="0">{draw_svg(block, counts[Chart])}</div>'
                parts.append(f"<figure>{svg}{caption}</figure>")
    style, script = _asset("page.css"), _asset("page.js")
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        # Only the script of the page may run. The policy contains the hash of this script.
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return _asset("page.html").format(
        policy=policy,
        title=_text(document.title),
        style=style,
        contents=_contents(headings) if len(headings) > 1 else "",
        body="\n".join(parts),
        script=script,
    )


def _asset(name: str) -> str:
    return files("profharness.render").joinpath("assets", name).read_text(encoding="utf-8")


def _text(value: str) -> str:
    return escape(one_line(value), quote=True)


def _small(text: str) -> str:
    return f" <small>{_text(text)}</small>" if text else ""


def _new_anchor(text: str, used: Collection[str]) -> str:
    """Return an unused HTML id for a heading, made of letters, digits and hyphens."""
    stem = re.sub(r"[^a-z0-9]+", "-", text[:LONGEST_ENTRY].lower()).strip("-") or "part"
    names = (stem if count == 1 else f"{stem}-{count}" for count in itertools.count(1))
    return next(name for name in names if name not in used and name not in ("content", "theme"))


def _contents(headings: Mapping[str, Heading]) -> str:
    """Return the table of contents, with sections and subsections."""
    items = "".join(
        f'<li class="level{heading.level}"><a href="#{anchor}">{_text(shortened(heading.text))}</a>'
        f"{_small(shortened(heading.detail)) if heading.level > 2 else ''}</li>"
        for anchor, heading in headings.items()
        if heading.level <= DEEPEST
    )
    return (
        '<nav aria-label="Contents"><details open><summary>Contents</summary>'
        f"<ol>{items}</ol></details></nav>"
    )


def shortened(text: str) -> str:
    """Remove the middle of a text that is too long, such as the name of a range."""
    half = LONGEST_ENTRY // 2
    return text if len(text) <= LONGEST_ENTRY else f"{text[: half - 1]}…{text[-half:]}"


def _table(table: Table, ident: str, name: str) -> str:
    """Return an HTML table. `data-v` contains the number by which the script sorts a cell.

    Repeated values are not omitted, because the rows can be sorted.
    """
    classes = [' class="r"' if column.right else "" for column in table.columns]
    head = "".join(
        f'<th scope="col"{right}><button type="button">{_text(column.title) or "&nbsp;"}'
        "</button></th>"
        for column, right in zip(table.columns, classes, strict=True)
    )
    lines = []
    for row in table.rows:
        cells = []
        for column, right, value in zip(table.columns, classes, row, strict=True):
            number = _sort_number(value)
            sort = f' data-v="{number!r}"' if number is not None else ""
            cells.append(f"<td{right}{sort}>{_text(format_value(column, value))}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    search = ""
    if len(lines) >= FILTER_FROM:
        search = (
            f'<p class="filter"><label>Filter <input type="search" aria-controls="{ident}" '
            f'autocomplete="off"></label> <output>{len(lines)} rows</output></p>'
        )
    body = "\n".join(lines)
    return (
        f'{search}<div class="scroll" tabindex="0" role="region" aria-label="Table: {_text(name)}">'
        f'<table id="{ident}"><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'
    )


def _sort_number(value: Any) -> float | int | None:
    # `bool` is a subclass of `int`.
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value if value == value else None  # NaN sorts like an unknown value
    if isinstance(value, tuple) and len(value) == 3 and all(isinstance(n, int) for n in value):
        # a grid is sorted by the number of blocks
        return math.prod(value)
    return None
