"""Render documents for terminals with rich. Numbers are never cut."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from rich.console import Console
from rich.text import Text

from profharness.attention.config import without_strides
from profharness.columns import Column
from profharness.errors import join_and, join_few, one_line, printable, wrapped
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
    for_reading,
    formatted_rows,
    shown_note,
)
from profharness.render.fitting import (
    GAP,
    INDENT,
    Layout,
    cell_len,
    chunks,
    fit_columns,
    is_key,
    natural_layout,
    split_title,
)

MAX_LABEL = 16  # maximum width of the label column of notes; a longer label gets a line of its own
LONG_VALUE = 24  # width above which a value has a line of its own in a block of names and values
DEEPEST = 6  # the deepest level of a heading
SHOWN_TITLES = 8  # maximum number of hidden columns in the line below a table
NOTE_STYLES = {"note": "", "warning": "yellow", "error": "red"}

Rows = list[list[str]]
Layouts = Mapping[tuple[Column, ...], Layout]


def render_table(
    document: Document,
    *,
    width: int = 100,
    cut: bool = False,
    color: bool = False,
    full: bool = False,
) -> str:
    """Render headings, aligned tables and notes, wrapped at `width`.

    Tables with the same columns have the same column widths, and share a header if nothing stands
    between them. If `cut` is set, fit tables to `width` with `fit_columns`. If `full` is set, show every column.
    """
    document = for_reading(document)
    tables = [block for block in document.blocks if isinstance(block, Table)]
    rows = [formatted_rows(table) for table in tables]
    layouts = _layouts(tables, rows, width if cut else None, full=full)
    pairs = list(zip(tables, rows, strict=True))
    short = [_shortened(own, layouts[table.columns]) for table, own in pairs]
    last_short = max((at for at, each in enumerate(short) if each), default=-1)
    shortened = list(dict.fromkeys(chain.from_iterable(short)))
    more = [block.text for block in document.blocks if isinstance(block, More)]
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=color,
        color_system="standard" if color else None,
        legacy_windows=False,
        # rich would read COLUMNS and NO_COLOR, which the caller already considered
        _environ={},
    )
    shown = {
        one_line(columns[at].title)
        for columns, layout in layouts.items()
        for at in {*range(len(columns))}.difference(layout.hidden)
    }
    titles = (
        one_line(columns[at].title) for columns, layout in layouts.items() for at in layout.hidden
    )
    # a title that another table shows would seem to be missing there
    hidden = [title for title in titles if title not in shown]
    # a note that explains a column is useless without the column
    blocks = [
        block
        for block in document.blocks
        if not (isinstance(block, Note) and not full and block.label and block.label in hidden)
    ]
    labels = (len(one_line(block.label)) for block in blocks if isinstance(block, Note))
    label_width = max((size for size in labels if size <= MAX_LABEL), default=0)
    for sentence in document.answer:
        _print_note(console, Note(sentence), 0, width)
    if document.answer and document.blocks:
        console.print()
    previous: Block | None = None
    table_count = 0
    for block in _without_empty_headings(blocks):
        # a table of the document contains the values of a chart or timeline
        if isinstance(block, Chart | Timeline):
            continue
        if isinstance(block, Heading):
            if previous is not None:
                console.print()
            _print_heading(console, block, width if cut else None)
        elif isinstance(block, Code):
            for line in printable(block.text).splitlines():
                text = f"    {line}".rstrip()
                # Do not interpret brackets in code as styles.
                console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif isinstance(block, Table):
            if isinstance(previous, Note | Table):
                console.print()
            layout = layouts[block.columns]
            # A table directly below a table with the same columns continues it.
            titled = not isinstance(previous, Table) or block.columns != previous.columns
            _print_table(console, block.columns, rows[table_count], layout, width, titled=titled)
            if table_count == last_short:
                for line in _whole_texts(shortened, width) if full else ():
                    console.print(Text(line, style="dim"), soft_wrap=True)
            table_count += 1
        elif isinstance(block, More):
            continue
        else:
            if isinstance(previous, Code):
                console.print()
            _print_note(console, shown_note(block), label_width, width)
        previous = block
    if not full:
        if isinstance(previous, Code):
            console.print()
        more = [*(["whole names"] if shortened else []), *more]
        _print_more(console, list(dict.fromkeys(more)), list(dict.fromkeys(hidden)), width)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def _layouts(
    tables: Sequence[Table], rows: Sequence[Rows], width: int | None, *, full: bool
) -> Layouts:
    """Return one layout for all tables with the same columns. If `width` is None, do not limit it."""
    joined: dict[tuple[Column, ...], Rows] = {}
    starts: dict[tuple[Column, ...], set[int]] = {}
    for table, own in zip(tables, rows, strict=True):
        all_rows = joined.setdefault(table.columns, [])
        starts.setdefault(table.columns, set()).add(len(all_rows))
        all_rows.extend(own)
    return {
        columns: natural_layout(columns, own)
        if width is None
        else fit_columns(columns, own, width, full=full, starts=starts[columns])
        for columns, own in joined.items()
    }


def _without_empty_headings(blocks: Sequence[Block]) -> list[Block]:
    """Return the blocks without the headings of charts, which a terminal does not show.

    Keep a heading that also has other contents.
    """
    shown: list[Block] = []
    filled = 0  # headings of this level and above have contents
    below: Block | None = None
    for block in reversed(blocks):
        if isinstance(block, Heading):
            if block.level > filled and isinstance(below, Chart | Timeline):
                continue
            filled = block.level - 1
        elif not isinstance(block, Chart | Timeline):
            filled = DEEPEST
        shown.append(block)
        below = block
    return shown[::-1]


def _print_heading(console: Console, heading: Heading, width: int | None) -> None:
    title, detail = one_line(heading.text), one_line(heading.detail)
    if width is not None and cell_len(title) > width:
        title = without_strides(title)
    apart = width is not None and cell_len(title) + GAP + cell_len(detail) > width
    line = Text("\n".join(_wrapped(title, width)), style="bold")
    if detail:
        rest = "\n".join(["", *_wrapped(detail, width)]) if apart else f"{' ' * GAP}{detail}"
        line.append(rest, style="not bold dim")
    console.print(line, soft_wrap=True)


def _wrapped(text: str, width: int | None) -> list[str]:
    if width is None or cell_len(text) <= width:
        return [text]
    return wrapped(text, width)


def _print_table(
    console: Console,
    columns: Sequence[Column],
    rows: Rows,
    layout: Layout,
    width: int,
    *,
    titled: bool,
) -> None:
    """Print a table. If `titled` is false, omit the titles and the texts that all rows share."""
    for at in layout.shared if titled and rows else ():
        title = one_line(columns[at].title)
        for line in _named_lines(title, rows[0][at], cell_len(title) + GAP, width):
            console.print(Text(line), soft_wrap=True)
    if layout.records or (layout.blocks and len(rows) == 1):
        lines = "\n".join(_record_lines(columns, rows, width))
        console.file.write(f"{lines}\n" if lines else "")
        return
    for number, part in enumerate(layout.parts):
        if number:
            console.print()
        if titled or layout.blocks:
            for text in _title_lines(columns, part):
                console.print(Text(text, style="dim"), soft_wrap=True)
        # rich takes long for long tables, and rows have no styles
        console.file.write("".join(f"{line}\n" for line in _row_lines(columns, rows, part)))


def _record_lines(columns: Sequence[Column], rows: Rows, width: int) -> Iterator[str]:
    """Yield a block of lines for each row, with blank lines between them.

    A single row has a line for each column. If there are several rows, the columns that identify a
    row, and long texts, have a line of their own. The other values follow as pairs of a name and a
    value, aligned in columns.
    """
    titles = [one_line(column.title) for column in columns]
    longest = [max((cell_len(row[at]) for row in rows), default=0) for at in range(len(columns))]
    every = range(len(columns))
    keys = [at for at in every if is_key(columns[at], at)]
    alone = (
        [*every]
        if len(rows) == 1
        else [*keys, *(at for at in every if at not in keys and longest[at] > LONG_VALUE)]
    )
    pairs = [at for at in every if at not in alone]
    lead = max((cell_len(titles[at]) for at in alone), default=0) + GAP
    room = width - INDENT + 2 * GAP
    count = max(
        (
            n
            for n in range(1, len(pairs) + 1)
            if sum(_pair_widths(pairs, n, titles, longest)) <= room
        ),
        default=1,
    )
    widths = _pair_widths(pairs, count, titles, longest)
    names = [
        max((cell_len(titles[at]) for at in pairs[own::count]), default=0) for own in range(count)
    ]
    previous: list[str] = []
    for number, row in enumerate(rows):
        if number:
            yield ""
        # a blank cell repeats the value above
        cells = [
            text or (previous[at] if previous and at in keys and not columns[at].repeat else "")
            for at, text in enumerate(row)
        ]
        previous = cells
        for at in alone:
            yield from _named_lines(titles[at], cells[at], lead, width)
        for begin in range(0, len(pairs), count):
            line = (
                _padded(
                    f"{_padded(titles[at], names[own], False)}{' ' * GAP}{cells[at]}", size, False
                )
                for own, (at, size) in enumerate(
                    zip(pairs[begin : begin + count], widths, strict=False)
                )
            )
            yield f"{' ' * INDENT}{''.join(line)}".rstrip()


def _named_lines(name: str, value: str, lead: int, width: int) -> Iterator[str]:
    """Yield a name and its value, which begins at `lead` and continues below its beginning."""
    for part, text in enumerate(chunks(value, max(width - lead, 1))):
        yield f"{_padded('' if part else name, lead, False)}{text}".rstrip()


def _pair_widths(
    pairs: Sequence[int], count: int, titles: Sequence[str], longest: Sequence[int]
) -> list[int]:
    """Return the widths of `count` columns of names and values, each with the space behind it."""
    return [
        max((cell_len(titles[at]) for at in pairs[own::count]), default=0)
        + max((longest[at] for at in pairs[own::count]), default=0)
        + 3 * GAP
        for own in range(count)
    ]


def _title_lines(columns: Sequence[Column], layout: Layout) -> Iterator[str]:
    """Yield the lines with the titles of each line of a row."""
    for number, line in enumerate(layout.lines):
        titles = [split_title(one_line(columns[at].title), layout.widths[at]) for at in line]
        for part in (0, 1):
            cells = (
                _padded(title[part], layout.widths[at], columns[at].right)
                for at, title in zip(line, titles, strict=True)
            )
            text = _joined(cells, number)
            if text.strip() or (part and len(layout.lines) == 1):
                yield text


def _row_lines(columns: Sequence[Column], rows: Rows, layout: Layout) -> Iterator[str]:
    cells: list[dict[str, list[str]]] = []
    for at, column in enumerate(columns):
        cuts, size = layout.cuts.get(at, {}), layout.widths[at]
        texts = dict.fromkeys(row[at] for row in rows)
        cells.append(
            {
                text: [
                    _padded(part, size, column.right) for part in chunks(cuts.get(text, text), size)
                ]
                for text in texts
            }
        )
    blanks = [" " * size for size in layout.widths]
    for row in rows:
        for number, line in enumerate(layout.lines):
            repeated = number < len(layout.lines) - 1 and not any(row[at] for at in line)
            if repeated or not line:
                continue  # the values stand above
            parts = [cells[at][row[at]] for at in line]
            yield _joined((part[0] for part in parts), number)
            for count in range(1, max(map(len, parts))):
                rest = (
                    part[count] if count < len(part) else blanks[at]
                    for at, part in zip(line, parts, strict=True)
                )
                yield _joined(rest, number)


def _joined(cells: Iterator[str], number: int) -> str:
    return f"{' ' * (INDENT if number else 0)}{(' ' * GAP).join(cells)}".rstrip()


def _padded(text: str, width: int, right: bool) -> str:
    blanks = " " * (width - cell_len(text))
    return f"{blanks}{text}" if right else f"{text}{blanks}"


def _print_more(console: Console, more: Sequence[str], hidden: Sequence[str], width: int) -> None:
    """Print what --full also shows: the things in `more`, and columns that the tables hide."""
    titles = [title for title in hidden if title]
    columns = join_few(titles, SHOWN_TITLES)
    if more:
        these = "this column" if len(titles) == 1 else "these columns"
        things = join_and([*more, these] if columns else more)
        text = f"--full also shows {things}{f': {columns}' if columns else '.'}"
    elif columns:
        text = f"--full also shows: {columns}"
    else:
        return
    console.print(Text("\n".join(_wrapped(text, width)), style="dim"), soft_wrap=True)


def _shortened(rows: Rows, layout: Layout) -> list[str]:
    """Return the texts that a table shortens, except for those whose beginning it shows."""
    return [
        text
        for at, cuts in layout.cuts.items()
        for text in dict.fromkeys(row[at] for row in rows)
        if not text.startswith(cuts.get(text, text))
    ]


def _whole_texts(shortened: Sequence[str], width: int) -> Iterator[str]:
    """Yield lines with shortened texts in full."""
    if shortened:
        yield "names in full:"
    for text in shortened:
        # The indentation separates the last item from a note that follows.
        yield from (f"{' ' * INDENT}{line}" for line in chunks(text, max(width - INDENT, 1)))


def _print_note(console: Console, note: Note, label_width: int, width: int) -> None:
    label, text = one_line(note.label), one_line(note.text)
    indent = label_width + GAP if label else 0
    lead = f"{label:<{label_width}}{' ' * GAP}" if label else ""
    lines: list[str] = []
    if len(label) > label_width:
        indent, lead = 2 * GAP, f"{label}{' ' * GAP}"
        if len(lead) + len(text) > width:
            lines, lead = _wrapped(label, width), " " * indent
    lines += wrapped(text, max(width, indent + 20), " " * indent, lead) or [lead]
    style = NOTE_STYLES.get(note.level, "")
    console.print(Text("\n".join(lines), style=style), soft_wrap=True)
