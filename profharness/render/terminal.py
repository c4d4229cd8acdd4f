"""Render documents for terminals with rich. Numbers are never cut, whatever the width."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

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
    formatted_rows,
)

GAP = 2
MIN_SHRUNK = 12
MAX_LABEL = 44  # maximum width of the label column of notes; a longer label extends into the text
ROUNDS = 4  # maximum number of attempts to make shortened names distinct; two are usually enough
_WORD_END = re.compile(r"[^\W_]*$")
NOTE_STYLES = {"note": "", "warning": "yellow", "error": "red"}


def render_table(
    document: Document, *, width: int = 100, cut: bool = False, color: bool = False
) -> str:
    """Render headings, aligned tables and notes, wrapped at `width`.

    Tables with the same columns have the same column widths. If `cut` is set, names are shortened so
    that tables fit the width.
    """
    tables = [block for block in document.blocks if isinstance(block, Table)]
    widths = _shared_widths(tables, width if cut else None)
    needed = [sum(columns) + GAP * (len(columns) - 1) for columns in widths.values()]
    console = Console(
        file=io.StringIO(),
        # Otherwise rich would cut the numbers of a wider table.
        width=max([width, *needed]),
        force_terminal=color,
        color_system="standard" if color else None,
        legacy_windows=False,
        # rich would read COLUMNS and NO_COLOR, which the caller already considered
        _environ={},
    )
    labels = (len(b.label) for b in document.blocks if isinstance(b, Note))
    label_width = min(max(labels, default=0), MAX_LABEL)
    for sentence in document.answer:
        _print_note(console, Note(sentence), 0, width)
    if document.answer and document.blocks:
        console.print()
    previous: Block | None = None
    for block in document.blocks:
        # a table of the document has the values of the chart
        if isinstance(block, Chart):
            continue
        if isinstance(block, Heading):
            if previous is not None:
                console.print()
            _print_heading(console, block)
        elif isinstance(block, Code):
            for line in printable(block.text).splitlines():
                text = f"    {line}" if line else ""
                # Do not interpret brackets in code as styles.
                console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif isinstance(block, Table):
            if isinstance(previous, Note):
                console.print()
            _print_table(console, block, widths[block.columns])
        else:
            _print_note(console, block, label_width, width)
        previous = block
    text = console.file.getvalue()  # type: ignore[attr-defined]
    # remove the blanks with which rich pads cells
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n" if text else ""


def _shared_widths(
    tables: Iterable[Table], width: int | None
) -> dict[tuple[Column, ...], list[int]]:
    """Return column widths that are shared by all tables with the same columns.

    If `width` is set, shrinkable columns are narrowed so that the tables fit.
    """
    natural: dict[tuple[Column, ...], list[int]] = {}
    for table in tables:
        sizes = natural.setdefault(
            table.columns, [cell_len(one_line(c.title)) for c in table.columns]
        )
        for row in formatted_rows(table):
            sizes[:] = [max(size, cell_len(text)) for size, text in zip(sizes, row, strict=True)]
    if width is None:
        return natural
    return {columns: fit_widths(columns, sizes, width) for columns, sizes in natural.items()}


def fit_widths(columns: tuple[Column, ...], sizes: list[int], width: int) -> list[int]:
    """Narrow the widest shrinkable columns until the table fits, but not below MIN_SHRUNK."""
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
            Text(one_line(column.title)),
            width=size,
            no_wrap=True,
            overflow="ellipsis",
            justify="right" if column.right else "left",
        )
    rows = formatted_rows(table)
    shown = [
        distinct_cuts([row[place] for row in rows], size) if column.shrink else {}
        for place, (column, size) in enumerate(zip(table.columns, widths, strict=True))
    ]
    for row in rows:
        grid.add_row(*(Text(cuts.get(text, text)) for cuts, text in zip(shown, row, strict=True)))
    console.print(grid)


def distinct_cuts(texts: Iterable[str], width: int) -> dict[str, str]:
    """Map each text that is longer than `width` to a shortened text.

    Texts with the same beginning are shortened so that their differences remain visible.
    """
    cuts = {text: f"{_fitting(text, width - 1)}…" for text in texts if cell_len(text) > width}
    for _ in range(ROUNDS):
        alike: dict[str, list[str]] = {}
        for text, cut in cuts.items():
            alike.setdefault(cut, []).append(text)
        for group in alike.values():
            if len(group) > 1:
                cuts |= {text: _from_difference(text, group, width) for text in group}
    return cuts


def _from_difference(text: str, group: Sequence[str], width: int) -> str:
    """Shorten a text to the common prefix of the group, an ellipsis, and the part that differs."""
    shared = min(group)
    other = max(group)  # the common prefix of the least and the greatest text is common to all
    while not other.startswith(shared):
        shared = shared[:-1]
    head = _fitting(shared, width // 3)
    word = len(shared) - len(_WORD_END.search(shared)[0])  # type: ignore[index]
    start = word if len(shared) - word <= width // 4 else len(shared)
    rest, room = text[start:], width - cell_len(head) - 1
    if cell_len(rest) > room:
        return f"{head}…{_fitting(rest, room - 1)}…"
    return f"{head}…{_fitting(text[::-1], room)[::-1]}"


def _fitting(text: str, width: int) -> str:
    end = min(len(text), max(width, 0))
    while cell_len(text[:end]) > width:
        end -= 1
    return text[:end]


def _print_note(console: Console, note: Note, label_width: int, width: int) -> None:
    indent = label_width + GAP if note.label else 0
    lead = f"{one_line(note.label):<{label_width}}{' ' * GAP}" if note.label else ""
    body = textwrap.fill(
        one_line(note.text),
        width=max(width, indent + 20),
        initial_indent=lead,
        subsequent_indent=" " * indent,
        # A path that is broken into lines cannot be copied.
        break_long_words=False,
        break_on_hyphens=False,
    )
    text = Text(body, style=NOTE_STYLES.get(note.level, ""))
    console.print(text, soft_wrap=True)
