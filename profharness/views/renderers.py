"""The renderers: each turns a Document into text; RENDERERS names them for `--format`."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from profharness.views.document import (
    Chart,
    Code,
    Column,
    Document,
    Heading,
    Note,
    Table,
    formatted_rows,
    one_line,
)
from profharness.views.terminal import render_table

TRIPLES = ("grid", "block")  # split into _x, _y, _z in a CSV, as the store's views do


class Renderer(Protocol):
    """A renderer is pure; width (in characters) and color matter to the terminal only."""

    def __call__(self, document: Document, *, width: int = 100, color: bool = False) -> str:
        """The whole text, with a final line break."""
        ...


def _plain(value: Any) -> Any:
    """The value in JSON's types; NaN and the infinities, which JSON does not have, become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def render_json(document: Document, *, width: int = 100, color: bool = False) -> str:
    """`{"schema": …, "rows": […], …}`, one record a line, so that it greps and diffs well."""
    del width, color
    rows = ",\n".join(f"  {_dumps(record)}" for record in document.records)
    parts = [
        f'"schema": {_dumps(document.schema)}',
        f'"rows": [\n{rows}\n]' if rows else '"rows": []',
    ]
    parts += [f"{_dumps(str(key))}: {_dumps(value)}" for key, value in document.extra.items()]
    return "{" + ",\n".join(parts) + "}\n"


def render_jsonl(document: Document, *, width: int = 100, color: bool = False) -> str:
    """The records alone, one JSON object a line; what stands beside them is in `json` only."""
    del width, color
    return "".join(f"{_dumps(record)}\n" for record in document.records)


def _dumps(value: Any) -> str:
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def render_csv(document: Document, *, width: int = 100, color: bool = False) -> str:
    """The records under a header row; null is empty, grid and block take three columns each, other
    nested values are JSON."""
    del width, color
    out = io.StringIO()
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
        # Python before 3.13 does not quote a lone carriage return.
        return [value.replace("\r\n", "\n").replace("\r", "\n")]
    return ["" if value is None else value]


# An underscore inside a word is plain text in GitHub's Markdown; everywhere else it may open
# emphasis.
_MARKDOWN_SPECIAL = re.compile(r"[\\`*|\[\]~]|(?<![^\W_])_|_(?![^\W_])")


def escape_markdown(text: str) -> str:
    """Text that GitHub-flavoured Markdown shows as it stands, also inside a table cell."""
    text = _MARKDOWN_SPECIAL.sub(lambda match: "\\" + match.group(), one_line(text))
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def render_markdown(
    document: Document, *, width: int = 100, color: bool = False, images: Sequence[str] = ()
) -> str:
    """GitHub-flavoured Markdown: headings, pipe tables, notes as list items.

    images: the address of a picture for each chart, in their order; without them charts are left
    out.
    """
    del width, color
    left = iter(images)
    parts = [f"# {escape_markdown(document.title)}"]
    for block in document.blocks:
        text = _markdown_chart(block, left) if isinstance(block, Chart) else _markdown_block(block)
        follows_note = isinstance(block, Note) and parts[-1].startswith("- ")
        if follows_note:
            parts[-1] += "\n" + text
        elif text:
            parts.append(text)
    return "\n\n".join(parts) + "\n"


def _markdown_chart(chart: Chart, images: Iterator[str]) -> str:
    image = next(images, None)
    return f"![{escape_markdown(chart.title)}](<{image}>)" if image else ""


def _markdown_block(block: Heading | Note | Code | Table) -> str:
    match block:
        case Heading(text, detail, level):
            return f"{'#' * level} {escape_markdown(text)}" + (
                f" ({escape_markdown(detail)})" if detail else ""
            )
        case Note(text, label):
            return (
                "- " + (f"**{escape_markdown(label)}**: " if label else "") + escape_markdown(text)
            )
        case Code(text):
            return f"```python\n{text}\n```"
        case Table():
            return _markdown_table(block)


def _markdown_table(table: Table) -> str:
    def row(cells: list[str]) -> str:
        return "| " + " | ".join(escape_markdown(cell) for cell in cells) + " |"

    def rule(column: Column) -> str:
        return "---:" if column.right else ":---"

    lines = [row([column.title for column in table.columns])]
    lines.append("| " + " | ".join(rule(column) for column in table.columns) + " |")
    lines += [row(cells) for cells in formatted_rows(table)]
    return "\n".join(lines)


def render_html(document: Document, *, width: int = 100, color: bool = False) -> str:
    """One page that needs nothing beside it; imported when somebody asks for one."""
    from profharness.views.html import render_html as render

    return render(document, width=width, color=color)


RENDERERS: dict[str, Renderer] = {
    "table": render_table,
    "json": render_json,
    "jsonl": render_jsonl,
    "csv": render_csv,
    "md": render_markdown,
    "html": render_html,
}
