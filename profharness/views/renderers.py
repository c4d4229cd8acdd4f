"""The renderers: each turns a Document into text; RENDERERS names them for `--format`."""

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
from profharness.views.document import (
    Block,
    Chart,
    Code,
    Document,
    Heading,
    Note,
    Table,
    formatted_rows,
)

TRIPLES = ("grid", "block")  # split into _x, _y, _z in a CSV, as the store's views do


def _plain(value: Any) -> Any:
    """The value in JSON's types; NaN and the infinities, which JSON does not have, become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def render_json(document: Document) -> str:
    """`{"schema": …, "rows": […], …}`, one record a line, so that it greps and diffs well."""
    rows = ",\n".join(f"  {_dumps(record)}" for record in document.records)
    parts = [
        f'"schema": {_dumps(document.schema)}',
        f'"rows": [\n{rows}\n]' if rows else '"rows": []',
    ]
    parts += [f"{_dumps(str(key))}: {_dumps(value)}" for key, value in document.extra.items()]
    return "{" + ",\n".join(parts) + "}\n"


def render_jsonl(document: Document) -> str:
    """The records alone, one JSON object a line; what stands beside them is in `json` only."""
    return "".join(f"{_dumps(record)}\n" for record in document.records)


def _dumps(value: Any) -> str:
    # names stay readable; what does not print must not reach a terminal, and some of it no encoding takes
    text = json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


def render_csv(document: Document) -> str:
    """The records under a header row; null is empty, grid and block take three columns each. Texts
    are harmless to spreadsheets and terminals (`harmless`).
    """
    out = io.StringIO()
    # csv's own line end is \r\n
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


# As OWASP has it ("CSV Injection"): a spreadsheet computes what begins with one of = + - @ in any width,
# also behind what it does not show, and takes a tab or a line break for the border of a cell.
_FIRST = re.compile(r"[\s\u200b-\u200f\u2060-\u2064\ufeff]*+(.)", re.DOTALL)
_SIGNS = frozenset("=+-@")


def harmless(text: str) -> str:
    """The text of a CSV's cell: what a spreadsheet would take for a formula gets an apostrophe in
    front, what does not print becomes its escape, a line ends with a newline alone.
    """
    # Python before 3.13 does not quote a lone carriage return.
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = printable(text)
    first = _FIRST.match(text)
    sign = unicodedata.normalize("NFKC", first[1]) if first else ""
    return f"'{text}" if sign in _SIGNS or text.startswith(("\t", "\n")) else text


# An underscore inside a word is plain text in GitHub's Markdown; everywhere else it may open
# emphasis.
_MARKDOWN_SPECIAL = re.compile(r"[\\`*|\[\]~]|(?<![^\W_])_|_(?![^\W_])")


def escape_markdown(text: str) -> str:
    """Text that GitHub-flavoured Markdown shows as it stands, also inside a table cell."""
    text = _MARKDOWN_SPECIAL.sub(lambda match: "\\" + match.group(), one_line(text))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def render_markdown(document: Document, images: Sequence[str] = ()) -> str:
    """GitHub-flavoured Markdown; images are the addresses of the charts' pictures in order."""
    left = iter(images)
    parts = [f"# {escape_markdown(document.title)}"]
    for block in document.blocks:
        text = _markdown_block(block, left)
        if isinstance(block, Note) and parts[-1].startswith("- "):
            parts[-1] += "\n" + text
        elif text:
            parts.append(text)
    return "\n\n".join(parts) + "\n"


def _markdown_block(block: Block, images: Iterator[str]) -> str:
    match block:
        case Heading(text, detail, level):
            aside = f" ({escape_markdown(detail)})" if detail else ""
            return f"{'#' * level} {escape_markdown(text)}{aside}"
        case Note(text, label):
            lead = f"**{escape_markdown(label)}**: " if label else ""
            return f"- {lead}{escape_markdown(text)}"
        case Code(text):
            return f"```python\n{printable(text)}\n```"
        case Chart():
            # in angle brackets an address may hold blanks and parentheses
            image = next(images, None)
            return f"![{escape_markdown(block.title)}](<{image}>)" if image else ""
        case Table(columns):
            rules = ["---:" if column.right else ":---" for column in columns]
            rows = [[column.title for column in columns], *formatted_rows(block)]
            lines = [[escape_markdown(cell) for cell in row] for row in rows]
            lines.insert(1, rules)
            return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _render_table(document: Document, **options: Any) -> str:
    from profharness.views.terminal import render_table  # loads rich, for this format alone

    return render_table(document, **options)


def _render_html(document: Document) -> str:
    from profharness.views.html import render_html  # templates and hashes, for this format alone

    return render_html(document)


# Each takes a Document and returns the whole text; `table` takes render_table's options too.
RENDERERS: dict[str, Callable[..., str]] = {
    "table": _render_table,
    "json": render_json,
    "jsonl": render_jsonl,
    "csv": render_csv,
    "md": render_markdown,
    "html": _render_html,
}
