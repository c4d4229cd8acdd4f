"""Render documents as text. RENDERERS contains a function for each `--format`."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from profharness.errors import one_line, printable
from profharness.render.document import (
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
    for_reading,
    formatted_rows,
    shown_note,
)

TRIPLES = ("grid", "block")  # keys that CSV splits into _x, _y and _z, like the views of the store


def _plain(value: Any) -> Any:
    """Convert a value to JSON types. Replace NaN and infinities with None, because JSON has neither."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def render_json(document: Document) -> str:
    """Render `{"schema": …, "rows": […], …}` with one record per line, for grep and diff."""
    rows = ",\n".join(f"  {_dumps(record)}" for record in document.records)
    parts = [
        f'"schema": {_dumps(document.schema)}',
        *([f'"answer": {_dumps(document.answer)}'] if document.answer else []),
        f'"rows": [\n{rows}\n]' if rows else '"rows": []',
    ]
    parts += [f"{_dumps(str(key))}: {_dumps(value)}" for key, value in document.extra.items()]
    return "{" + ",\n".join(parts) + "}\n"


def render_jsonl(document: Document) -> str:
    """Render only the records, with one JSON object per line."""
    return "".join(f"{_dumps(record)}\n" for record in document.records)


def _dumps(value: Any) -> str:
    # Letters beyond ASCII stay readable, but unprintable characters are escaped.
    text = json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


def render_csv(document: Document) -> str:
    """Render a header row and the records. Write None as an empty cell.

    Write `grid` and `block` as three columns each, and escape texts with `harmless`.
    """
    out = io.StringIO()
    # the csv module writes \r\n by default
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([name for key in document.fields for name in _csv_names(key)])
    for record in document.records:
        writer.writerow(
            [cell for key in document.fields for cell in _csv_cells(key, record.get(key))]
        )
    return out.getvalue()


def _csv_names(key: str) -> list[str]:
    return [f"{key}_{axis}" for axis in "xyz"] if key.endswith(TRIPLES) else [key]


def _csv_cells(key: str, value: Any) -> list[Any]:
    value = _plain(value)
    if key.endswith(TRIPLES):
        return ["", "", ""] if value is None else list(value)
    if isinstance(value, bool):
        return ["true" if value else "false"]
    if isinstance(value, dict | list):
        return [_dumps(value)]
    if isinstance(value, str):
        return [harmless(value)]
    return ["" if value is None else value]


# Matches the first visible character. According to OWASP ("CSV Injection"), a spreadsheet evaluates
# a text as a formula if this character is = + - or @, also in full width. A tab or a line break at
# the start may end the cell.
_FIRST = re.compile(r"[\s\u200b-\u200f\u2060-\u2064\ufeff]*+(.)", re.DOTALL)
_SIGNS = frozenset("=+-@")


def harmless(text: str) -> str:
    """Escape the text of a CSV cell for spreadsheets and terminals.

    Put an apostrophe before a text that a spreadsheet could interpret as a formula. Escape
    unprintable characters, and replace all line ends with single newlines.
    """
    # Python before 3.13 does not quote a lone carriage return.
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = printable(text)
    first = _FIRST.match(text)
    sign = unicodedata.normalize("NFKC", first[1]) if first else ""
    return f"'{text}" if sign in _SIGNS or text.startswith(("\t", "\n")) else text


# An underscore inside a word is plain text in GitHub's Markdown. Elsewhere it may start emphasis.
_MARKDOWN_SPECIAL = re.compile(r"[\\`*|\[\]~]|(?<![^\W_])_|_(?![^\W_])")


def escape_markdown(text: str) -> str:
    """Escape a text for GitHub-flavoured Markdown, inside and outside of tables."""
    text = _MARKDOWN_SPECIAL.sub(lambda match: "\\" + match.group(), one_line(text))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def render_markdown(document: Document, images: Sequence[str] = ()) -> str:
    """Render GitHub-flavoured Markdown. `images` are the paths of the charts in order."""
    document = as_page(for_reading(document))
    left = iter(images)
    parts = [f"# {escape_markdown(document.title)}"]
    if document.subtitle:
        parts.append(escape_markdown(document.subtitle))
    if document.answer:
        parts.append(escape_markdown(" ".join(document.answer)))
    for block in document.blocks:
        text = _markdown_block(block, left)
        if text and isinstance(block, Note) and parts[-1].startswith("- "):
            parts[-1] += "\n" + text
        elif text:
            parts.append(text)
    return "\n\n".join(parts) + "\n"


def _markdown_block(block: Block, images: Iterator[str]) -> str:
    match block:
        case Heading(text, detail, level):
            aside = f" ({escape_markdown(detail)})" if detail else ""
            return f"{'#' * level} {escape_markdown(text)}{aside}"
        case Note(level="hint") | More():
            return ""
        case Note(label=label):
            lead = f"**{escape_markdown(label)}**: " if label else ""
            return f"- {lead}{escape_markdown(shown_note(block).text)}"
        case Code(text):
            return f"```python\n{printable(text)}\n```"
        case Chart():
            # in angle brackets a path may contain blanks and parentheses
            image = next(images, None)
            return f"![{escape_markdown(block.title)}](<{image}>)" if image else ""
        case Timeline():
            return ""
        case Table(columns):
            rules = ["---:" if column.right else ":---" for column in columns]
            rows = [[column.title for column in columns], *formatted_rows(block)]
            lines = [[escape_markdown(cell) for cell in row] for row in rows]
            lines.insert(1, rules)
            return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _render_table(document: Document, **options: Any) -> str:
    from profharness.render.terminal import render_table  # imports rich

    return render_table(document, **options)


def _render_html(document: Document) -> str:
    from profharness.render.html import render_html  # imports templates and hashes

    return render_html(for_reading(document))


# Maps each format to the function that renders a Document as text.
RENDERERS: dict[str, Callable[..., str]] = {
    "table": _render_table,
    "json": render_json,
    "jsonl": render_jsonl,
    "csv": render_csv,
    "md": render_markdown,
    "html": _render_html,
}
