"""The terminal renderer: tables that keep every number whole in any width, drawn with rich."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from profharness.views.document import (
    Block,
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

GAP = 2
MIN_SHRUNK = 12
NOTE_STYLES = {"note": "", "warning": "yellow", "error": "red"}


def render_table(document: Document, *, width: int = 100, color: bool = False) -> str:
    """Headings, aligned tables and wrapped notes; lines grow past width rather than cut a number.
    Tables with the same columns share their widths.
    """
    widths = _shared_widths([block for block in document.blocks if isinstance(block, Table)], width)
    needed = [sum(columns) + GAP * (len(columns) - 1) for columns in widths.values()]
    console = Console(
        file=io.StringIO(),
        width=max([width, *needed]),
        force_terminal=color,
        color_system="standard" if color else None,
        legacy_windows=False,
        _environ={},
    )
    label_width = max((len(b.label) for b in document.blocks if isinstance(b, Note)), default=0)
    previous: Block | None = None
    for block in document.blocks:
        if isinstance(block, Chart):
            continue
        if isinstance(block, Heading):
            if previous is not None:
                console.print()
            _print_heading(console, block)
        elif isinstance(block, Code):
            for line in block.text.splitlines():
                text = f"    {line}" if line else ""
                console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif isinstance(block, Table):
            if isinstance(previous, Note):
                console.print()
            _print_table(console, block, widths[block.columns])
        else:
            _print_note(console, block, label_width, width)
        previous = block
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n" if text else ""


def _shared_widths(tables: Iterable[Table], width: int) -> dict[tuple[Column, ...], list[int]]:
    """Column widths by column set, shrinkable columns cut to fit width."""
    natural: dict[tuple[Column, ...], list[int]] = {}
    for table in tables:
        sizes = natural.setdefault(table.columns, [cell_len(c.title) for c in table.columns])
        for row in formatted_rows(table):
            sizes[:] = [max(size, cell_len(text)) for size, text in zip(sizes, row, strict=True)]
    return {columns: fit_widths(columns, sizes, width) for columns, sizes in natural.items()}


def fit_widths(columns: tuple[Column, ...], sizes: list[int], width: int) -> list[int]:
    """The widths with shrinkable columns cut, the widest first, down to MIN_SHRUNK."""
    sizes = list(sizes)
    excess = sum(sizes) + GAP * (len(sizes) - 1) - width
    shrinkable = [index for index, column in enumerate(columns) if column.shrink]
    while excess > 0:
        widest = max(shrinkable, key=lambda index: sizes[index], default=None)
        if widest is None or sizes[widest] <= MIN_SHRUNK:
            break
        sizes[widest] -= 1
        excess -= 1
    return sizes


def _print_heading(console: Console, heading: Heading) -> None:
    line = Text(one_line(heading.text), style="bold")
    if heading.detail:
        line.append(f"  {one_line(heading.detail)}", style="not bold dim")
    console.print(line, soft_wrap=True)


def _print_table(console: Console, table: Table, widths: list[int]) -> None:
    grid = RichTable(
        box=None, padding=(0, GAP, 0, 0), pad_edge=False, collapse_padding=True, header_style="dim"
    )
    for column, size in zip(table.columns, widths, strict=True):
        grid.add_column(
            Text(column.title),
            width=size,
            no_wrap=True,
            overflow="ellipsis",
            justify="right" if column.right else "left",
        )
    for row in formatted_rows(table):
        grid.add_row(*(Text(text) for text in row))
    console.print(grid)


def _print_note(console: Console, note: Note, label_width: int, width: int) -> None:
    indent = label_width + GAP if note.label else 0
    lead = f"{one_line(note.label):<{indent}}"
    body = textwrap.fill(
        one_line(note.text),
        width=max(width, indent + 20),
        initial_indent=lead,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    text = Text(body, style=NOTE_STYLES.get(note.level, ""))
    console.print(text, soft_wrap=True)
