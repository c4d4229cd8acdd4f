"""Render a document as one HTML file that needs no network.

Charts are inline SVG or HTML, and timelines can be zoomed. Tables can be sorted and filtered. A long
page has a table of contents.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from profharness.columns import Column
from profharness.errors import MissingExtraError, install_command, printable
from profharness.render.bars import draw_bars
from profharness.render.colors import backend_styles
from profharness.render.document import (
    PLAIN_KINDS,
    Block,
    Chart,
    Code,
    Document,
    Heading,
    More,
    Note,
    Table,
    Timeline,
    as_page,
    format_value,
    formatted_rows,
    leading_columns,
    shown_note,
)
from profharness.render.html_text import marked, plain, prose, wrapping
from profharness.render.timeline import draw_timeline

FILTER_FROM = 16  # minimum number of rows in a table with a filter
CARDS_FROM = 4  # minimum number of columns in a table that a phone shows in another form
PHONE_LETTERS = 46  # maximum number of letters in a row of a table on a phone
DEEPEST = 3  # deepest heading level in the table of contents
MOST_SECTIONS = 8  # maximum number of unfolded sections on a page without a table of contents
LONG_TEXT = 16  # maximum length of a text that never wraps
HALF_LINE = 23  # minimum length of a title and a value that take a whole line of a card
MANY_CARDS = 10  # minimum number of cards of which a phone shows only the first 5 (page.css)
LONG_WORD = 40  # minimum length of a word in a table that may wrap anywhere
WHOLE_NAME = 52  # maximum length of a text that takes one line if its table has room
LONGEST_ENTRY = 120  # maximum length of a heading in the table of contents


def render_html(document: Document) -> str:
    """Render a page whose content security policy forbids network access.

    If the `report` extra is not installed, replace the charts that need it with a note.
    """
    document = as_page(document)
    headings: dict[str, Heading] = {}  # by anchor
    counts = Counter[type[Block]]()
    parts, folds = [], _Folds()
    left_out = charted = False
    for block in document.blocks:
        counts[type(block)] += 1
        after_chart, charted = charted, False
        match block:
            case Heading():
                anchor = _new_anchor(block.text, headings)
                headings[anchor] = block
                tag = f"h{min(max(block.level, 2), 6)}"
                link = f'<a class="anchor" href="#{anchor}" aria-label="Link to this section">#</a>'
                title = f"{prose(block.text)}{_small(block.detail)} {link}"
                parts.append(folds.next(block, f'<{tag} id="{anchor}">{title}</{tag}>'))
            case Table(drawn=True) if after_chart:
                pass
            case Table():
                last = next(reversed(headings.values()), None)
                name = last.text if last else document.title
                parts.append(_table(block, f"t{counts[Table]}", name, document.full_names))
            case Note(level="hint") | More():
                pass
            case Note():
                level = block.level if block.level in ("warning", "error") else "note"
                word = "" if level == "note" or block.label else f"{level}: "
                text = shown_note(block).text
                label = f"<b>{wrapping(block.label)}</b> " if block.label else ""
                parts.append(f'<p class="{level}">{label}{word}{marked(text)}</p>')
            case Code(text):
                # Unlike `plain`, this keeps the line breaks in code.
                parts.append(f'<pre tabindex="0"><code>{escape(printable(text))}</code></pre>')
            case Chart():
                drawn = _figure(block, counts[Chart])
                charted = bool(drawn)
                left_out = left_out or not drawn
                parts.append(drawn)
            case Timeline():
                parts.append(draw_timeline(block, counts[Timeline], document.full_names))
    parts.append(folds.end())
    if left_out:
        text = "Some charts are omitted. Install the `report` extra to show all charts."
        parts.append(f'<p class="note">{text} <code>{plain(install_command("report"))}</code></p>')
    script = _asset("page.js") + (_asset("timeline.js") if counts[Timeline] else "")
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        # Only the script of the page may run. The policy contains the hash of this script.
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return _asset("page.html").format(
        policy=policy,
        title=plain(document.title),
        heading=wrapping(document.title),
        subtitle=_subtitle(document.subtitle),
        style=_asset("page.css"),
        answer=_answer(document.answer),
        contents=_contents(headings),
        body="\n".join(parts),
        script=script,
    )


class _Folds:
    """The `<details>` elements of folded sections, which end before the next section."""

    def __init__(self) -> None:
        self._open: list[int] = []  # levels of the open sections

    def next(self, heading: Heading, html: str) -> str:
        """Return the HTML that ends the previous sections, followed by the heading."""
        ends = 0
        while self._open and self._open[-1] >= heading.level:
            self._open.pop()
            ends += 1
        if not heading.folded:
            return "</details>" * ends + html
        self._open.append(heading.level)
        return "</details>" * ends + f'<details class="fold"><summary>{html}</summary>'

    def end(self) -> str:
        return "</details>" * len(self._open)


def _subtitle(text: str) -> str:
    """Return the line below the title, which wraps only between its parts, such as GPU and date."""
    parts = (f"<span>{plain(part)}</span>" for part in text.split(" · "))
    return f'<p class="subtitle">{" · ".join(parts)}</p>' if text else ""


def _answer(sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    body = "".join(f"<p>{marked(sentence)}</p>" for sentence in sentences)
    return f'<section class="answer" aria-label="In short"><b>In short</b>{body}</section>'


def _figure(chart: Chart, number: int) -> str:
    """Return the figure of a chart, or an empty string if its library is not installed."""
    title = ""
    if chart.kind in PLAIN_KINDS:
        drawn = draw_bars(chart)
        title = f"<figcaption><b>{prose(chart.title)}</b></figcaption>" if chart.title else ""
    else:
        try:
            from profharness.render.charts import draw_svg
        except MissingExtraError:
            return ""
        wide, narrow = draw_svg(chart, 2 * number), draw_svg(chart, 2 * number + 1, narrow=True)
        drawn = f'<div class="scroll wide" tabindex="0">{wide}</div>'
        drawn += f'<div class="scroll narrow" tabindex="0">{narrow}</div>'
    caption = chart.caption and f"<figcaption>{marked(chart.caption)}</figcaption>"
    return f'<figure class="{chart.kind}">{title}{drawn}{caption}</figure>'


def _asset(name: str) -> str:
    return files("profharness.render").joinpath("assets", name).read_text(encoding="utf-8")


def _small(text: str) -> str:
    return f" <small>{prose(text)}</small>" if text else ""


def _new_anchor(text: str, used: Collection[str]) -> str:
    """Return an unused HTML id for a heading, made of letters, digits and hyphens."""
    stem = re.sub(r"[^a-z0-9]+", "-", text[:LONGEST_ENTRY].lower()).strip("-") or "part"
    names = (stem if count == 1 else f"{stem}-{count}" for count in itertools.count(1))
    return next(name for name in names if name not in used and name not in ("content", "theme"))


def _contents(headings: Mapping[str, Heading]) -> str:
    """Return the table of contents, with sections and subsections.

    Return an empty string for a short page.
    """
    if _unfolded(headings.values()) <= MOST_SECTIONS:
        return ""
    items = "".join(
        f'<li class="level{heading.level}"><a href="#{anchor}">{prose(shortened(heading.text))}</a>'
        f"{_small(shortened(heading.detail)) if heading.level > 2 else ''}</li>"
        for anchor, heading in headings.items()
        if heading.level <= DEEPEST
    )
    return (
        '<nav aria-label="Contents"><details><summary>Contents</summary>'
        f"<ol>{items}</ol></details></nav>"
    )


def _unfolded(headings: Iterable[Heading]) -> int:
    """Return the number of sections and subsections that are not inside a folded section."""
    count, fold = 0, math.inf  # the level of the folded section
    for heading in headings:
        if heading.level <= fold:
            fold = heading.level if heading.folded else math.inf
        count += heading.level <= DEEPEST and fold == math.inf
    return count


def shortened(text: str) -> str:
    """Shorten a long text, such as the name of a range, by removing the middle."""
    half = LONGEST_ENTRY // 2
    return text if len(text) <= LONGEST_ENTRY else f"{text[: half - 1]}…{text[-half:]}"


def _table(table: Table, ident: str, name: str, full: Mapping[str, Sequence[str]]) -> str:
    """Return an HTML table. `data-v` contains the number by which the script sorts a cell.

    A repeated value of the first `data-groups` columns has the class `same`. It is invisible, but it
    is still filtered, sorted and copied. The script sets the class again when the rows change.

    On a phone, a table of short columns has the value of a leading column on a line above its rows.
    If that does not fit, each row becomes a card, in which `data-label` names the values. A value with
    the class `l` takes a whole line.
    """
    # Names in a column with long texts may wrap between their parts.
    wide = [
        any(isinstance(row[at], str) and len(row[at]) > LONG_TEXT for row in table.rows)
        for at in range(len(table.columns))
    ]
    texts = [
        [format_value(column, value) for column, value in zip(table.columns, row, strict=True)]
        for row in table.rows
    ]
    classes = [
        "r" if column.right else "t" if long else ""
        for column, long in zip(table.columns, wide, strict=True)
    ]
    leading = leading_columns(table)
    longest = _longest_bar(table)
    colors = _bar_colors(table)
    barred = [longest > 0 and column.key in table.bars for column in table.columns]
    lengths = [max(map(len, column), default=0) for column in zip(*texts, strict=True)]
    form = ""
    if len(table.columns) >= CARDS_FROM:
        form = "narrow" if _fits_phone(table.columns, lengths, leading) else "cards"
    cards = form == "cards"
    whole_lines = [
        "l" if cards and (bar or len(column.title) + length >= HALF_LINE) else ""
        for column, length, bar in zip(table.columns, lengths, barred, strict=False)
    ]
    head = "".join(
        f'<th scope="col"{_th(column.title, own)}><button type="button"{_tip(column.meaning)}>'
        f"{plain(column.title).replace('/', '/<wbr>') or '&nbsp;'}</button></th>"
        for column, own in zip(table.columns, classes, strict=True)
    )
    lines = []
    for row, own_texts, shown_texts, color in zip(
        table.rows, texts, formatted_rows(table), colors, strict=True
    ):
        cells = []
        for at, (column, value, text) in enumerate(zip(table.columns, row, own_texts, strict=True)):
            number = _sort_number(value)
            sort = f' data-v="{number!r}"' if number is not None else ""
            same = "same" if text and not shown_texts[at] else ""
            kind = _class(classes[at], whole_lines[at], same, *_wraps(text) if wide[at] else ())
            shown = (wrapping if wide[at] else prose)(text)
            name_of = f' data-label="{plain(column.title)}"' if cards and column.title else ""
            bar = _bar(number, longest, color) if barred[at] and number else ""
            cells.append(f"<td{kind}{sort}{name_of}>{_named(shown, full.get(text, ()))}{bar}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    search = ""
    if len(lines) >= FILTER_FROM:
        search = (
            f'<p class="filter"><label>Filter <input type="search" aria-controls="{ident}" '
            f'autocomplete="off"></label> <output>{len(lines)} rows</output></p>'
        )
    body = "\n".join(lines)
    groups = f' data-groups="{leading}"' if leading else ""
    grouped = form == "narrow" and leading
    kind = _class(form, "grouped" if grouped else "")
    if grouped:
        kind += f' style="--columns:{len(table.columns) - 1}"'
    return (
        f'{search}<div class="scroll" tabindex="0" role="region" aria-label="Table: {plain(name)}">'
        f'<table id="{ident}"{kind}{groups}><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{body}</tbody></table></div>{_all_cards(len(lines)) if cards else ''}"
    )


def _all_cards(count: int) -> str:
    """Return a box below many cards. A phone shows only the first cards until it is checked."""
    if count < MANY_CARDS:
        return ""
    return f'<label class="all"><input type="checkbox"> Show all {count:,} rows</label>'


def _longest_bar(table: Table) -> float:
    """Return the value of the longest bar in a table, or 0 for a table without bars.

    The length of a bar says nothing if the table has a single row.
    """
    drawn = [at for at, column in enumerate(table.columns) if column.key in table.bars]
    values = (_sort_number(row[at]) or 0 for row in table.rows for at in drawn)
    return max(values, default=0) if len(table.rows) > 1 else 0


def _bar_colors(table: Table) -> list[str]:
    """Return the colour of the bars in each row, which is empty if no column has the backends."""
    at = next((at for at, each in enumerate(table.columns) if each.key == table.colored_by), None)
    if at is None:
        return [""] * len(table.rows)
    backends = [str(row[at]) for row in table.rows]
    names = list(dict.fromkeys(backends))
    styles = dict(zip(names, backend_styles(names), strict=True))
    return [styles[name][0] for name in backends]


def _bar(value: float, longest: float, color: str) -> str:
    """Return the bar that is drawn beside the value of a cell."""
    width = 100 * value / longest
    style = f"width:{width:.1f}%{f';background:{color}' if color else ''}"
    return f'<span class="meter" aria-hidden="true"><i style="{style}"></i></span>'


def _fits_phone(columns: Sequence[Column], lengths: Sequence[int], leading: int) -> bool:
    """Return whether the columns fit side by side on a phone, where titles wrap between words.

    A leading column takes a line of its own.
    """
    words = [_longest(column.title.split()) for column in columns]
    widths = [max(pair) + 1 for pair in zip(words, lengths, strict=False)]
    return bool(lengths) and sum(widths[min(leading, 1) :]) <= PHONE_LETTERS


def _tip(text: str) -> str:
    return f' title="{plain(text.replace("`", ""))}"' if text else ""


def _named(shown: str, full: Sequence[str]) -> str:
    """Return the HTML of a name. A shortened name can be opened to show the full names."""
    names = "".join(f"<div>{plain(name)}</div>" for name in full)
    return f'<details class="full"><summary>{shown}</summary>{names}</details>' if full else shown


def _th(title: str, classes: str) -> str:
    """Return the class of a heading. A heading with a long word may wrap anywhere."""
    return _class("w" if _longest(title.split()) >= LONG_WORD else "", classes)


def _wraps(text: str) -> tuple[str, str]:
    """Return the classes of a text that may take one line, and of one that may wrap anywhere."""
    words = re.split(r"[\s_/.,<-]+", text)
    return (
        "n" if len(text) <= WHOLE_NAME else "",
        "w" if _longest(words) >= LONG_WORD else "",
    )


def _longest(words: Sequence[str]) -> int:
    return max(map(len, words), default=0)


def _class(*names: str) -> str:
    text = " ".join(filter(None, names))
    return f' class="{text}"' if text else ""


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
