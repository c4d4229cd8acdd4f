"""Fit tables into the width of a terminal: shorten texts, hide columns, fold rows, and
split columns into blocks.

Shortened texts of a column remain distinct.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.cells import cell_len as _cell_len

from profharness.attention.config import without_strides
from profharness.columns import Column
from profharness.errors import NO_BREAK, one_line
from profharness.render.document import MISSING

GAP = 2
INDENT = 2  # indentation of the lines of a row after its first
COMFORTABLE = 40  # minimum width of texts if columns with details are shown
READABLE = 24  # width to which texts are shortened before other columns are hidden
MOST_LINES = (
    3  # most lines of READABLE width for a name in a block of columns; longer names are cut
)
USUAL_WIDTHS = (80, 100, 120)  # a wider terminal shows no less of a name than these
CUT_NAME = 2  # number of lines that are printed to show a name in full
LEAST_NAME = 8  # minimum width of a kernel's name before its functor
MIN_SHRUNK = 12  # width to which texts are shortened before rows are folded
LONGEST_WORD = 40  # maximum width of a word in a wrapped text; longer words are split
REPEATED = 0.25  # minimum share of the values of a group that repeat the row above
NARROWEST = 20  # minimum width that is assumed for a terminal
ROUNDS = 5  # maximum number of attempts to make shortened texts distinct; two are usually enough
SEPARATORS = (" ,", ".-_:")  # after which a long text continues on the next line
OPTIONAL = ("normal", "detail")  # importances of columns that may be hidden, most important first
CONFIG_LABEL = re.compile(r"b\d+-h\d+-\S+")
_TITLE_END = re.compile(r" |(?<=\w/)(?=\w{4})")  # where a title may be broken: `calls/` `step`
_DIMENSIONS = re.compile(r"dims .*")  # the sizes of a call that no config describes
_ARROW = " → "  # between two configs
_TOKEN_END = re.compile(r"(?<!\de)-")  # in a label, but not in a number such as 1e-05
_MODULE = re.compile(r"(?!.*\.(gz|json|db)$)[a-zA-Z][\w{},-]*(\.[\w{},-]+)+")  # no file
_IDENTIFIER = re.compile(r"[a-zA-Z0-9]+(_[a-zA-Z0-9…]*)+")
# The end of a word or an argument in a kernel's name. A number belongs to the word before it.
_TOKEN_OF_NAME = re.compile(r"_(?!\d+(_|$))|[<,] ?")
_ARGUMENT = re.compile(r"[^\s,<>…][^,<>…]*")  # a template argument of a kernel's name
_PLAIN_ARGUMENT = re.compile(
    r"[a-z]*\d[\dx]*|bool|true|false"
)  # a number, a tile, a flag or a dtype
_KERNEL = re.compile(r"([-+=] )?([a-zA-Z]+\d*_[\w…]*(<.*>)?|[a-zA-Z]\w*<.*>)")
_ARGUMENTS = re.compile(r"<[^<>]*(<[^<>]*>[^<>]*)*>")  # the template arguments of a kernel's name
_MARK = re.compile(r"[-+=] (?=\S)")  # which side of a comparison has a kernel
_WORD_END = re.compile(r"[^\W_]*$")

Texts = Sequence[str]


def cell_len(text: str) -> int:
    """Return the width of a printable text in a terminal."""
    return (
        len(text) if text.isascii() else _cell_len(text)
    )  # the latter takes several times as long


@dataclass(frozen=True, slots=True)
class Layout:
    """The lines, widths and hidden columns with which a table is printed."""

    lines: tuple[tuple[int, ...], ...]
    """The columns of each line of a row. Lines after the first are indented."""
    widths: tuple[int, ...]
    hidden: tuple[int, ...] = ()
    cuts: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """The shortened texts of each column."""
    shared: tuple[int, ...] = ()
    """Columns with the same text in all rows. The text stands above the table instead."""
    records: bool = False
    """Whether each row is printed as a list of names and values, because it is too wide for a line."""
    blocks: tuple[tuple[int, ...], ...] = ()
    """The columns of each block, if the table is printed as blocks of columns one below the other."""

    @property
    def parts(self) -> tuple[Layout, ...]:
        """The layouts of the blocks, or the layout itself if the table is printed as a whole."""
        above = self.lines[:-1]
        return tuple(replace(self, lines=(*above, block)) for block in self.blocks) or (self,)


@dataclass(frozen=True, slots=True)
class _Shrunk:
    """The least width of a column, and the texts shortened to this width."""

    width: int
    cuts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Choice:
    """The columns to show, the columns on separate lines, and the least width of each column."""

    kept: tuple[int, ...]
    stacked: tuple[int, ...]
    shrunk: tuple[_Shrunk, ...]

    @property
    def figures(self) -> tuple[int, ...]:
        """The columns that share lines."""
        return tuple(place for place in self.kept if place not in self.stacked)


def natural_layout(columns: Sequence[Column], rows: Sequence[Texts]) -> Layout:
    """Return a layout with whole texts and unlimited width."""
    titles = (cell_len(one_line(column.title)) for column in columns)
    widths = tuple(map(max, titles, map(_longest, _texts(columns, rows))))
    return Layout((tuple(range(len(columns))),), widths)


def fit_columns(
    columns: Sequence[Column],
    rows: Sequence[Texts],
    width: int,
    *,
    full: bool = False,
    starts: Collection[int] = (),
) -> Layout:
    """Return a layout of formatted rows in which no line is longer than `width`.

    The rows may be those of several tables, of which `starts` contains the numbers of the first rows.
    Print a long text that several rows share above the table. If the table is still too wide, apply
    these steps until it fits: shorten long texts, hide details, shorten texts further, hide other
    columns by importance, and fold rows into several lines. Configs and modules are not shortened,
    except for strides. If not all columns other than details fit on one line, or if fewer than
    CUT_NAME lines show a name in full, the texts that rows repeat, or else all names, have lines of
    their own above the figures. Before texts are shortened, also print the other texts above the
    table that all rows share, even the name of the rows. A column without which two rows look alike
    is never hidden, except for a grid that would cost each row a line. If `full` is set, hide
    nothing. Instead, continue texts on further lines. If that is not enough, print the table as blocks
    of columns, the most important columns first, and shorten only long texts that identify the rows.
    Print a single row, and rows that do not fit into blocks either, as lists of names and values.
    If a layout shows less of a name than the layout of a narrower terminal, use the latter.
    """
    width = max(width, NARROWEST)
    names = () if full else _shared_names(columns, rows)
    natural = natural_layout(columns, rows)
    shown = tuple(at for at in natural.lines[0] if at not in names)
    if _line_width(natural.widths, shown) <= width:
        return replace(natural, lines=(shown,), shared=names)
    if full:
        return _full_layout(columns, rows, width)
    layout = _best_layout(columns, rows, width, starts)
    narrower = max((usual for usual in USUAL_WIDTHS if usual < width), default=0)
    if not narrower or not any(map(_cut_texts, layout.cuts.values())):
        return layout
    other = fit_columns(columns, rows, narrower, starts=starts)
    return other if _shows_more_of_a_name(other, layout, columns) else layout


def _shows_more_of_a_name(layout: Layout, other: Layout, columns: Sequence[Column]) -> bool:
    """Return whether a layout shows more of a name that `other` shortens."""
    return any(
        at not in layout.hidden
        and cell_len(layout.cuts.get(at, {}).get(text, text)) > cell_len(cut)
        for at, cuts in other.cuts.items()
        if is_key(columns[at], at)
        for text, cut in _cut_texts(cuts).items()
    )


def _cut_texts(cuts: Mapping[str, str]) -> dict[str, str]:
    """Return the texts that are shortened, with their shorter forms."""
    return {text: cut for text, cut in cuts.items() if text != cut}


def _best_layout(
    columns: Sequence[Column], rows: Sequence[Texts], width: int, starts: Collection[int]
) -> Layout:
    """Return the best layout that shows the columns without which rows look alike.

    A grid is not worth another line for each row.
    """
    own = list(columns)
    layout = _least_lacking_layout(own, rows, width)
    while (place := _distinguishing(own, rows, layout, starts)) is not None:
        own[place] = replace(own[place], importance="key")
        other = _least_lacking_layout(own, rows, width)
        if own[place].right and len(other.lines) > len(layout.lines):
            break
        layout = other
    return layout


def _least_lacking_layout(columns: Sequence[Column], rows: Sequence[Texts], width: int) -> Layout:
    """Return the layout that lacks least among those that print shared texts above the table."""
    layouts = (
        _sharing_layout(columns, rows, width, shared)
        for shared in dict.fromkeys(_shared(columns, rows))
    )
    return min(_until_complete(layouts), key=_lacks)


def _until_complete(layouts: Iterable[Layout]) -> Iterator[Layout]:
    """Yield layouts up to the first that hides no column, folds no row and cuts no text."""
    for layout in layouts:
        yield layout
        if _lacks(layout) == (0, 1, 0):
            return


def _lacks(layout: Layout) -> tuple[int, int, int]:
    """Return how many columns a layout hides, how many lines a row has, and how many texts are cut."""
    cuts = sum(len(_cut_texts(own)) for own in layout.cuts.values())
    return len(layout.hidden), len(layout.lines), cuts


def _shared_names(columns: Sequence[Column], rows: Sequence[Texts]) -> tuple[int, ...]:
    """Return the columns in which several rows have the same long text.

    At every width, such a text stands above the table.
    """
    return next(_shared(columns, rows)) if len(rows) > 1 else ()


def _shared(columns: Sequence[Column], rows: Sequence[Texts]) -> Iterator[tuple[int, ...]]:
    """Yield sets of columns to print above the table, because all rows share their texts.

    The first set contains the long texts, and the second also short texts. Then come the same sets
    with the column that names the rows, which they contain from the start if there are several rows.
    """
    alike = [
        place
        for place, column in enumerate(columns)
        if column.shrink
        and len({row[place] for row in rows} - ({""} if not column.repeat else set())) == 1
        and rows[0][place] not in ("", MISSING)
    ]
    yield (
        long := tuple(
            at for at in alike if (at or len(rows) > 1) and cell_len(rows[0][at]) > READABLE
        )
    )
    short = [at for at in alike if at and columns[at].importance != "answer"]
    yield (several := tuple(sorted({*long, *short})))
    if 0 in alike:
        yield (0, *long)
        yield (0, *several)


def _distinguishing(
    columns: Sequence[Column], rows: Sequence[Texts], layout: Layout, starts: Collection[int]
) -> int | None:
    """Return the first hidden column with texts that distinguish rows which look alike without it.

    A shortened text does not count, because the part that differs may be missing. Figures do not
    count either, because they do not identify a row, except for the grid of a kernel. Rows of
    different tables need not differ.
    """
    every = range(len(columns))
    grids = [at for at in every if columns[at].format == "triple" and not columns[at].spare]
    texts = [*(at for at in every if not columns[at].right), *grids]
    found: set[int] = set()
    seen: dict[Texts, Texts] = {}
    for number, row in enumerate(_repeated(columns, rows)):
        if number in starts:
            seen = {}
        shown = tuple(
            "" if layout.cuts.get(at, {}).get(row[at], row[at]) != row[at] else row[at]
            for at in texts
            if at not in layout.hidden
        )
        other = seen.setdefault(shown, row)
        found |= {at for at in layout.hidden if at in texts and row[at] != other[at]}
    return min(found, key=texts.index, default=None)


def _repeated(columns: Sequence[Column], rows: Sequence[Texts]) -> Iterator[Texts]:
    """Yield the rows with the values that blank cells repeat from the row above."""
    row: Texts = ("",) * len(columns)
    for each in rows:
        row = tuple(
            above if not text and not column.repeat else text
            for column, text, above in zip(columns, each, row, strict=True)
        )
        yield row


def _sharing_layout(
    columns: Sequence[Column], rows: Sequence[Texts], width: int, shared: tuple[int, ...]
) -> Layout:
    """Return the layout of a table whose columns `shared` are printed above it."""
    rest = [place for place in range(len(columns)) if place not in shared]
    own = [[row[place] for place in rest] for row in rows]
    layout = _cut_layout([columns[place] for place in rest], own, width)
    sizes = dict(zip(rest, layout.widths, strict=True))
    return Layout(
        lines=tuple(tuple(rest[at] for at in line) for line in layout.lines),
        widths=tuple(sizes.get(place, 0) for place in range(len(columns))),
        hidden=tuple(rest[at] for at in layout.hidden),
        cuts={rest[at]: cuts for at, cuts in layout.cuts.items()},
        shared=shared,
    )


def _full_layout(columns: Sequence[Column], rows: Sequence[Texts], width: int) -> Layout:
    """Return a layout with whole texts, which continue on further lines."""
    every = tuple(range(len(columns)))
    titles = [title_width(one_line(column.title)) for column in columns]
    texts = _texts(columns, rows)
    whole = tuple(map(max, titles, map(_longest, texts)))
    wrapped = tuple(
        min(size, max(title, READABLE))
        if column.wrap or (column.shrink and not _has_names(own))
        else size
        for column, title, size, own in zip(columns, titles, whole, texts, strict=True)
    )
    layouts = []
    for stacked in _stackings(columns, rows, texts):
        choice = _Choice(every, stacked, tuple(map(_Shrunk, wrapped)))
        if _line_width(wrapped, choice.figures) <= _room(stacked, width):
            widths = _narrowed(whole, choice, width)
            layouts.append(Layout(_lines(choice, widths, width), tuple(widths)))
    if layouts:
        return min(layouts, key=lambda layout: sum(whole) - sum(layout.widths))
    blocks = _block_layout(columns, rows, whole, wrapped, width) if len(rows) > 1 else None
    return blocks or Layout((every,), whole, records=True)


def _room(stacked: Sequence[int], width: int) -> int:
    """Return the width of the lines that follow separate lines for the columns in `stacked`."""
    return width - (INDENT if stacked else 0)


def _block_layout(
    columns: Sequence[Column],
    rows: Sequence[Texts],
    whole: Sequence[int],
    least: Sequence[int],
    width: int,
) -> Layout | None:
    """Return a layout with blocks of columns, each of which begins with the columns that identify rows.

    The first block has the most important of the other columns. Continue the texts that identify
    rows on further lines if this leads to fewer blocks, and shorten those that would take many lines.
    Return None if a column does not fit beside them.
    """
    shared = next(_shared(columns, rows))
    shown = [at for at in range(len(columns)) if at not in shared]
    keys = [at for at in shown if is_key(columns[at], at)]
    values = sorted((at for at in shown if at not in keys), key=lambda at: _rank(columns[at], at))
    texts = _texts(columns, rows)
    groups = [
        tuple(at for at in group if at not in shared) for group in _stackings(columns, rows, texts)
    ]
    for floors in ((width, COMFORTABLE, READABLE), (MIN_SHRUNK,)):
        layouts = []
        for floor, group in itertools.product(floors, groups):
            stacked = tuple(at for at in group if at in keys)
            beside = [at for at in keys if at not in stacked]
            if len(stacked) < len(group):
                continue
            shrunk = [_Shrunk(size) for size in least]
            most = list(whole)
            for at in keys:
                title = title_width(one_line(columns[at].title))
                if _has_names(texts[at]):
                    shrunk[at] = _Shrunk(whole[at])
                elif columns[at].shrink and whole[at] <= MOST_LINES * READABLE:
                    shrunk[at] = _Shrunk(min(max(floor, title, READABLE), whole[at]))
                else:
                    shrunk[at] = _shrunk(columns[at], tuple(texts[at]), floor, title, whole[at])
                    most[at] = shrunk[at].width
            blocks = _blocks(beside, values, [s.width for s in shrunk], _room(stacked, width))
            for block in blocks:
                choice = _Choice((*stacked, *block), stacked, tuple(shrunk))
                sizes = _narrowed(most, choice, width)
                for at in (*stacked, *block):
                    most[at] = sizes[at]
            if blocks:
                cuts = {at: shrunk[at].cuts for at in keys if shrunk[at].cuts}
                rest = tuple(at for at in shown if at not in stacked)
                lines = (*_filled_lines(stacked, most, width - INDENT), rest)
                layouts.append(Layout(lines, tuple(most), cuts=cuts, shared=shared, blocks=blocks))
        if layouts:
            return min(
                layouts,
                key=lambda layout: (
                    len(layout.blocks),
                    sum(whole[at] - layout.widths[at] for at in keys),
                ),
            )
    return None


def _rank(column: Column, place: int) -> tuple[int, int]:
    """Return the rank of a column in the order of importance."""
    kind = _importance(column, place)
    return (OPTIONAL.index(kind) + 1 if kind in OPTIONAL else 0), column.spare


def _blocks(
    keys: Sequence[int], values: Sequence[int], widths: Sequence[int], width: int
) -> tuple[tuple[int, ...], ...]:
    """Return the columns of the fewest blocks that fit, or no block if a value does not fit.

    Make the blocks similarly wide, so that the last block is not a single narrow column.
    """
    fewest = len(_filled(keys, values, widths, width))
    each = (_filled(keys, values, widths, limit) for limit in range(width + 1))
    return next((blocks for blocks in each if len(blocks) == fewest), ()) if fewest else ()


def _filled(
    keys: Sequence[int], values: Sequence[int], widths: Sequence[int], width: int
) -> tuple[tuple[int, ...], ...]:
    """Return blocks with as many columns as fit, or no block if a value does not fit beside the keys."""
    blocks: list[tuple[int, ...]] = []
    for at in values:
        if blocks and _line_width(widths, (*blocks[-1], at)) <= width:
            blocks[-1] += (at,)
        elif _line_width(widths, (*keys, at)) <= width:
            blocks.append((*keys, at))
        else:
            return ()
    return tuple(blocks)


def _cut_layout(columns: Sequence[Column], rows: Sequence[Texts], width: int) -> Layout:
    """Return a layout with shortened texts and hidden columns, if they are needed to fit."""
    natural = natural_layout(columns, rows)
    every = natural.lines[0]
    if _line_width(natural.widths, every) <= width:
        return natural
    titles = [title_width(one_line(column.title)) for column in columns]
    whole = _texts(columns, rows)
    # The first layouts have the fewest lines.
    return min(
        (
            layout
            for strides in _stride_cuts(whole)
            for layout in _layouts_with(strides, columns, rows, whole, titles, width)
        ),
        key=lambda layout: (_hidden(columns, layout), *_cost(columns, rows, layout)),
    )


def _stride_cuts(texts: Sequence[Texts]) -> list[list[Mapping[str, str]]]:
    """Return the texts of each column by whole text: first without strides, and then with them."""
    short: list[Mapping[str, str]] = [_shorter_labels(own) for own in texts]
    whole: list[Mapping[str, str]] = [{text: text for text in own} for own in texts]
    return [short, whole] if short != whole else [short]


def _layouts_with(
    strides: Sequence[Mapping[str, str]],
    columns: Sequence[Column],
    rows: Sequence[Texts],
    whole: Sequence[Texts],
    titles: Sequence[int],
    width: int,
) -> Iterator[Layout]:
    """Yield a layout for each set of columns on separate lines. `strides` maps whole texts to shorter ones."""
    texts = [[cuts[text] for text in own] for cuts, own in zip(strides, whole, strict=True)]
    most = tuple(map(max, titles, map(_longest, texts)))
    for choice in _choices(columns, rows, texts, titles, most, width):
        yield _layout_of(choice, columns, texts, titles, most, width, strides)


def _hidden(columns: Sequence[Column], layout: Layout) -> int:
    """Return the number of hidden columns that are not details."""
    return sum(_importance(columns[at], at) == "normal" for at in layout.hidden)


def _cost(columns: Sequence[Column], rows: Sequence[Texts], layout: Layout) -> tuple[int, int]:
    """Return the number of lines of a table plus CUT_NAME for each row whose name is shortened or
    continues on a further line, and the number of these rows."""
    keys = [at for at in layout.cuts if is_key(columns[at], at)]
    lines, incomplete = 0, 0
    for row in rows:
        texts = [layout.cuts.get(at, {}).get(text, text) for at, text in enumerate(row)]
        parts = [
            math.ceil(cell_len(text) / max(size, 1)) or 1
            for text, size in zip(texts, layout.widths, strict=True)
        ]
        incomplete += any(texts[at] != row[at] or parts[at] > 1 for at in keys)
        for line in layout.lines:
            if line is layout.lines[-1] or any(row[at] for at in line):
                lines += max((parts[at] for at in line), default=1)
    return lines + CUT_NAME * incomplete, incomplete


def _layout_of(
    choice: _Choice,
    columns: Sequence[Column],
    texts: Sequence[Texts],
    titles: Sequence[int],
    most: tuple[int, ...],
    width: int,
    strides: Sequence[Mapping[str, str]],
) -> Layout:
    """Return the layout for a choice of columns. `strides` maps whole texts to `texts`."""
    every = range(len(columns))
    widths = _narrowed(most, choice, width)
    shortened: dict[int, Mapping[str, str]] = {}
    for place in choice.kept:
        if columns[place].wrap:
            continue
        if _has_names(texts[place]):
            shortened[place] = {}
            continue
        widths[place], shortened[place] = _cut(
            texts[place], titles[place], widths[place], choice.shrunk[place]
        )
    # Cut texts may be shorter than their column. Give the remaining width to other columns.
    for place in sorted(choice.figures, key=lambda place: most[place] - widths[place]):
        spare = _room(choice.stacked, width) - _line_width(widths, choice.figures)
        if spare > 0 and shortened.get(place):
            widest = min(widths[place] + spare, most[place])
            widths[place], shortened[place] = _cut(
                texts[place], titles[place], widest, choice.shrunk[place]
            )
    cuts = {
        place: {text: own.get(cut, cut) for text, cut in strides[place].items()}
        for place, own in shortened.items()
    }
    hidden = tuple(place for place in every if place not in choice.kept)
    # Titles have one line if there is room for all of them.
    whole = [
        max(size, cell_len(one_line(column.title)))
        for size, column in zip(widths, columns, strict=True)
    ]
    if choice.stacked and _line_width(whole, choice.figures) <= _room(choice.stacked, width):
        widths = [whole[at] if at in choice.figures else size for at, size in enumerate(widths)]
    return Layout(_lines(choice, widths, width), tuple(widths), hidden, cuts)


def _cut(texts: Texts, title: int, width: int, shrunk: _Shrunk) -> tuple[int, Mapping[str, str]]:
    """Cut the texts of a column to a width. Return the remaining width and the cuts."""
    cuts: Mapping[str, str] = distinct_cuts(texts, width)
    if not are_distinct(texts, cuts):
        # Texts that are distinct at the least width may be equal at a greater width.
        cuts = shrunk.cuts
    if not cuts:
        return width, cuts
    return min(width, max(title, _longest(cuts.get(text, text) for text in texts))), cuts


def _choices(
    columns: Sequence[Column],
    rows: Sequence[Texts],
    texts: Sequence[Texts],
    titles: Sequence[int],
    most: tuple[int, ...],
    width: int,
) -> list[_Choice]:
    """Choose the columns to show for each set of columns on separate lines, the smallest set first.

    Prefer readable texts and rows that are not folded.
    """
    kinds = [_importance(column, place) for place, column in enumerate(columns)]
    required = [place for place, kind in enumerate(kinds) if kind not in OPTIONAL]

    def shrink(floor: int) -> tuple[_Shrunk, ...]:
        each_column = zip(columns, texts, titles, most, strict=True)
        return tuple(
            _shrunk(column, tuple(own), floor, title, whole)
            for column, own, title, whole in each_column
        )

    readable, roomy = ([each.width for each in shrink(size)] for size in (READABLE, COMFORTABLE))
    # The names of kernels are whole beside details, as a wider table would otherwise show less of them.
    kernels = [any(map(_KERNEL.fullmatch, own)) for own in texts]
    roomy = [
        whole if named and is_key(columns[at], at) else least
        for at, (named, whole, least) in enumerate(zip(kernels, most, roomy, strict=True))
    ]
    one_line_titles = [cell_len(one_line(column.title)) for column in columns]
    normal, details = (
        sorted(
            (place for place, kind in enumerate(kinds) if kind == optional),
            key=lambda place: columns[place].spare,
        )
        for optional in OPTIONAL
    )

    def with_optional(stacked: tuple[int, ...], shrunk: tuple[_Shrunk, ...]) -> _Choice | None:
        """Add the optional columns that fit. Return None if the required columns do not fit."""
        kept = list(required)
        room = _room(stacked, width)

        def fits(least: Sequence[int], places: Sequence[int]) -> bool:
            return _line_width(least, [at for at in places if at not in stacked]) <= room

        least = [each.width for each in shrunk]
        if not fits(least, kept):
            return None
        for place in normal:
            if fits(readable, (*kept, place)):
                kept.append(place)
        # Stop at the first detail that does not fit. All widths then hide details in the same order.
        # Below names, details must not break the titles into several lines.
        sizes = [*map(max, roomy, one_line_titles)] if stacked else roomy
        for place in details:
            if not fits(sizes, (*kept, place)) or (stacked and columns[place].spare > 1):
                break
            kept.append(place)
        return _Choice(tuple(sorted(kept)), tuple(at for at in stacked if at in kept), shrunk)

    stackings = _stackings(columns, rows, texts)
    for floor in (READABLE, MIN_SHRUNK):
        shrunk = shrink(floor)
        choices = (with_optional(stacked, shrunk) for stacked in stackings)
        if found := [choice for choice in choices if choice]:
            return found
    stacked = _widest(columns, required, [each.width for each in shrunk], width)
    choice = with_optional(stacked, shrunk)
    return [choice or _Choice(tuple(required), stacked, shrunk)]


@functools.lru_cache(maxsize=32)  # the layouts that are compared shrink the same texts
def _shrunk(column: Column, texts: tuple[str, ...], floor: int, title: int, whole: int) -> _Shrunk:
    """Shrink a column to the least width, `floor` or more, at which texts are distinct."""
    if column.wrap:
        words = _longest(word for text in texts for word in _whole_names(text).split(" "))
        return _Shrunk(min(max(floor, title, min(words, LONGEST_WORD)), whole))
    if not column.shrink or whole <= max(floor, title) or _has_names(texts):
        return _Shrunk(whole)
    cuts = distinct_cuts(texts, _distinct_width(texts, max(floor, title)))
    return _Shrunk(max(title, _longest(cuts.get(text, text) for text in texts)), cuts)


def is_key(column: Column, place: int) -> bool:
    """Return whether a column identifies the rows of its table."""
    return _importance(column, place) == "key"


def _importance(column: Column, place: int) -> str:
    # The first column of a table and the columns that group its rows identify the rows.
    return column.importance or ("key" if place == 0 or not column.repeat else "normal")


def _groups(columns: Sequence[Column], rows: Sequence[Texts]) -> Iterator[tuple[int, ...]]:
    """Yield the first column, the first two columns, … while enough values repeat the row above."""
    for place, column in enumerate(columns[:-1]):
        if column.repeat or sum(not row[place] for row in rows) < REPEATED * len(rows):
            return
        yield tuple(range(place + 1))


def _stackings(
    columns: Sequence[Column], rows: Sequence[Texts], texts: Sequence[Texts]
) -> tuple[tuple[int, ...], ...]:
    """Return the sets of columns that may have lines of their own, starting with the empty set.

    They are the columns whose values repeat, and those of `_names`.
    """
    return tuple(dict.fromkeys(((), *_groups(columns, rows), _names(columns, texts))))


def _names(columns: Sequence[Column], texts: Sequence[Texts]) -> tuple[int, ...]:
    """Return the columns of configs, modules and kernels, and the columns before them that identify rows."""
    keys = [at for at, own in enumerate(texts) if is_key(columns[at], at) or _has_names(own)]
    named = [at for at in keys if _has_names(texts[at]) or any(map(_KERNEL.fullmatch, texts[at]))]
    return tuple(at for at in keys if at <= max(named, default=-1))


def _has_names(texts: Texts) -> bool:
    """Return whether a column contains configs or modules, which are never cut, to be copied."""
    return any(config_in(text) or _MODULE.fullmatch(text) for text in texts)


def _widest(
    columns: Sequence[Column], kept: Sequence[int], least: Sequence[int], width: int
) -> tuple[int, ...]:
    """Return the columns to move to separate lines, so that the other columns fit on one line.

    Move the first column if that is enough, because the first column names the row. Otherwise, move
    the widest columns with texts.
    """
    rest = list(kept)
    others = [place for place in kept if place]
    if 0 in kept and not columns[0].right and _line_width(least, others) <= width - INDENT:
        return (0,)
    texts = sorted((at for at in kept if not columns[at].right), key=lambda at: -least[at])
    stacked: list[int] = []
    while _line_width(least, rest) > width - INDENT and len(stacked) < len(texts) and len(rest) > 1:
        stacked.append(texts[len(stacked)])
        rest.remove(stacked[-1])
    return tuple(sorted(stacked))


def _lines(choice: _Choice, widths: Sequence[int], width: int) -> tuple[tuple[int, ...], ...]:
    """Return lines filled with the stacked columns, and then lines filled with the other columns."""
    stacked = _filled_lines(choice.stacked, widths, width - INDENT)
    room = _room(choice.stacked, width)
    if _line_width(widths, choice.figures) > room:
        room = width - INDENT
    return (*stacked, *_filled_lines(choice.figures, widths, room))


def _filled_lines(
    places: Sequence[int], widths: Sequence[int], width: int
) -> tuple[tuple[int, ...], ...]:
    """Return lines with as many columns as fit."""
    lines: list[tuple[int, ...]] = []
    for place in places:
        if lines and _line_width(widths, (*lines[-1], place)) <= width:
            lines[-1] += (place,)
        else:
            lines.append((place,))
    return tuple(lines)


def _narrowed(most: Sequence[int], choice: _Choice, width: int) -> list[int]:
    """Narrow the widest columns until the table fits, but not below their least widths."""
    sizes = [min(size, width - INDENT) for size in most]
    figures = choice.figures
    excess = _line_width(sizes, figures) - _room(choice.stacked, width)
    for _ in range(max(excess, 0)):
        wide = [place for place in figures if sizes[place] > choice.shrunk[place].width]
        if not wide:
            break
        sizes[max(wide, key=sizes.__getitem__)] -= 1
    return sizes


def _texts(columns: Sequence[Column], rows: Sequence[Texts]) -> list[list[str]]:
    """Return the distinct texts of each column."""
    return [list(dict.fromkeys(row[place] for row in rows)) for place in range(len(columns))]


def _longest(texts: Iterable[str]) -> int:
    return max(map(cell_len, texts), default=0)


def _line_width(widths: Sequence[int], places: Collection[int]) -> int:
    return sum(widths[place] for place in places) + GAP * max(len(places) - 1, 0)


def _shorter_labels(texts: Texts) -> dict[str, str]:
    """Map each text to the text without strides, unless two texts would become equal."""
    short = {text: without_strides(text) for text in texts}
    counts = Counter(short.values())
    return {text: cut if counts[cut] == 1 else text for text, cut in short.items()}


def title_width(title: str) -> int:
    """Return the least width of a title on two lines."""
    return min(max(cell_len(first), cell_len(second)) for first, second in _title_lines(title))


def split_title(title: str, width: int) -> tuple[str, str]:
    """Return two lines of a title. The first line is empty if the title fits into `width`."""
    if cell_len(title) <= width:
        return "", title
    return min(_title_lines(title), key=lambda lines: max(map(cell_len, lines)))


def _title_lines(title: str) -> Iterator[tuple[str, str]]:
    yield "", title
    for end in _TITLE_END.finditer(title):
        yield title[: end.start()].rstrip(), title[end.start() :].lstrip()


def _distinct_width(texts: Texts, floor: int) -> int:
    """Return a width of at least `floor` at which the shortened texts remain distinct."""
    low, high = floor, max(_longest(texts), floor)
    if are_distinct(texts, distinct_cuts(texts, low)):
        return low
    while high - low > 1:
        middle = (low + high) // 2
        if are_distinct(texts, distinct_cuts(texts, middle)):
            high = middle
        else:
            low = middle
    return high


def are_distinct(texts: Texts, cuts: Mapping[str, str]) -> bool:
    """Return whether distinct texts remain distinct after shortening."""
    whole = set(texts)
    return len({cuts.get(text, text) for text in whole}) == len(whole)


def distinct_cuts(texts: Iterable[str], width: int) -> dict[str, str]:
    """Map each text that is longer than `width` to a shortened text.

    Shorten texts with the same beginning so that their differences remain visible.
    """
    own = list(texts)
    marks = {text: mark[0] for text in own if (mark := _MARK.match(text))}
    if marks:  # cut the names behind the marks
        names = {text: text.removeprefix(mark) for text, mark in marks.items()}
        short = distinct_cuts(dict.fromkeys(names.values()), width - len("- "))
        marked = {
            text: f"{marks[text]}{short[name]}" for text, name in names.items() if name in short
        }
        return marked | distinct_cuts((text for text in own if text not in marks), width)
    cuts = {text: _shortened(text, width) for text in own if cell_len(text) > width}
    for attempt in range(ROUNDS):
        alike: dict[str, list[str]] = {}
        for text, cut in cuts.items():
            alike.setdefault(cut, []).append(text)
        groups = [group for group in alike.values() if len(group) > 1]
        if not groups:
            break
        for group in groups:
            shared = _common_prefix(group)
            by_word = not attempt and all(map(_KERNEL.fullmatch, group))
            shorten = _from_different_word if by_word else _from_difference
            cuts |= {text: shorten(text, shared, width) for text in group}
    return cuts


def _shortened(text: str, width: int) -> str:
    """Cut the end of a text, or the middle of a kernel's name."""
    if "<" in text and text.endswith(">"):
        return _shortened_template(text, width)
    if _IDENTIFIER.fullmatch(text):
        return _without_middle(text, width)
    return f"{fitting(text, width - 1)}…"


def _shortened_template(text: str, width: int) -> str:
    """Cut the template arguments of a kernel's name, and then the middle of the name.

    Keep the functor among the arguments, because it says what the kernel computes.
    """
    name, _, arguments = text.partition("<")
    tails = [*_tails(arguments, width // 2)]
    for tail in tails:
        lead = "" if tail == arguments else "…"
        if len(name) + 1 + len(lead) + cell_len(tail) <= width:
            room = width - 1 - cell_len(tail)
            head = _head(text, room)
            # An argument that would leave much room if it were left out is cut instead.
            return f"{head if len(head) + LEAST_NAME > room else fitting(text, room)}…{tail}"
    whole = [arguments] if cell_len(arguments) <= width // 2 else []
    for tail in (*whole, *tails) if _IDENTIFIER.fullmatch(name) else ():
        lead = "" if tail == arguments else "…"
        room = width - len("<") - len(lead) - cell_len(tail)
        if _names_functor(tail) and room >= LEAST_NAME:
            return f"{_without_middle(name, room)}<{lead}{tail}"
    if len(name) + len("<…>") <= width:
        return f"{_head(text, width - len('…>'))}…>"
    if _IDENTIFIER.fullmatch(name):
        return f"{_without_middle(name, width - len('<…>'))}<…>"
    return f"{_head(text, width - 1)}…"


def _tails(arguments: str, width: int) -> Iterator[str]:
    """Yield ends of template arguments, the best first.

    They begin with the functor, which the last end shortens to `width`, or with the last argument if
    there is no functor.
    """
    found = [*_ARGUMENT.finditer(arguments)]
    functors = [each for each in found if not _PLAIN_ARGUMENT.fullmatch(each[0])]
    if not functors:
        yield arguments[arguments.rfind(",") + 1 :].lstrip()
        return
    functor = functors[-1]
    tail = arguments[functor.start() :]
    closed = tail.count(">") - tail.count("<") - 1  # templates around the functor
    yield tail.removesuffix(">" * closed) if closed > 0 else tail
    if functor is not found[-1]:
        yield f"{functor[0]}…>"
    if cell_len(functor[0]) + len("…>") > width:
        yield f"{fitting(functor[0], width - len('…>'))}…>"


def _names_functor(arguments: str) -> bool:
    """Return whether template arguments contain more than numbers, flags and dtypes."""
    return any(not _PLAIN_ARGUMENT.fullmatch(each[0]) for each in _ARGUMENT.finditer(arguments))


def _without_middle(name: str, width: int) -> str:
    """Leave out the middle of an identifier, or its end if there is no room for its last word."""
    ends = [name[each.end() :] for each in _TOKEN_OF_NAME.finditer(name)]
    last = ends[-1] if ends and len(ends[-1]) <= 2 * width // 3 else ""
    head = _head(name, width - 1 - max(len(last), width // 3))
    if not last or not head.endswith("_"):
        return f"{_head(name, width - 1)}…"
    tail = next(end for end in ends if len(head) + 1 + len(end) <= width)
    return f"{head}…{tail}"


def _head(text: str, width: int) -> str:
    """Return the longest beginning of a kernel's name that fits and ends with a word or an argument.

    If it would be shorter than half of the width, cut within a word.
    """
    end = max((each.end() for each in _TOKEN_OF_NAME.finditer(text, 0, width)), default=0)
    return text[:end].rstrip() if 2 * end >= width else fitting(text, width)


def config_in(text: str) -> str | None:
    """Return the config, or the dimensions of a call without a config, at the start of a text."""
    found = CONFIG_LABEL.match(text) or _DIMENSIONS.fullmatch(text)
    return found and found[0]


def _common_prefix(group: Sequence[str]) -> str:
    # the common prefix of the least and the greatest text is common to all texts
    least, greatest = min(group), max(group)
    pairs = enumerate(zip(least, greatest, strict=False))
    return least[: next((at for at, (own, other) in pairs if own != other), len(least))]


def _from_difference(text: str, shared: str, width: int) -> str:
    """Shorten a text to the common prefix of its group, an ellipsis, and the part that differs."""
    word = len(shared) - len(_WORD_END.search(shared)[0])  # type: ignore[index]
    start = word if len(shared) - word <= width // 4 else len(shared)
    spare = width - 1 - cell_len(text[start:])
    head = fitting(shared, max(width // 3, spare))
    if not head:
        return f"{fitting(text, width - 1)}…"
    rest, room = text[start:], width - cell_len(head) - 1
    if cell_len(rest) > room:
        return f"{head}…{fitting(rest, room - 1)}…"
    return f"{head}…{fitting(text[::-1], room)[::-1]}"


def _from_different_word(name: str, shared: str, width: int) -> str:
    """Shorten a kernel's name to its beginning, an ellipsis, and the words or arguments that differ."""
    places = [each.end() for each in _TOKEN_OF_NAME.finditer(name)]
    start = max((place for place in places if place <= len(shared)), default=0)
    bracket = name.find("<")
    if 0 <= bracket < start:
        arguments, lead = name[start:], "<" if start == bracket + 1 else "<…"
        if len(arguments) > width // 2:
            arguments = f"{_head(arguments, width // 3 - len('…>')).rstrip('<')}…>"
        room = width - len(lead) - len(arguments)
        own = name[:bracket] if bracket <= room else _without_middle(name[:bracket], room)
        return f"{own}{lead}{arguments}"
    head = _head(name[:start], max(width // 3, width - 1 - len(name[start:])))
    room = width - len(head) - 1
    if len(name) - start > room:
        return f"{head}…{_shortened(name[start:], room)}"
    return f"{head}…{next(name[place:] for place in places if len(name) - place <= room)}"


def fitting(text: str, width: int) -> str:
    """Return the longest beginning of a text that is no wider than `width`."""
    end = min(len(text), max(width, 0))
    while cell_len(text[:end]) > width:
        end -= 1
    return text[:end]


def chunks(text: str, width: int) -> Iterator[str]:
    """Cut a text into lines.

    Do not cut a word of up to LONGEST_WORD that fits into a line. The name of a kernel is a word.
    Otherwise, end each line after a blank or a comma in the second half of the line. If there is
    none, use another separator in the second half, or else cut anywhere. Cut a config between its
    tokens, and the name of a module after a dot. Indent the lines that follow a marked name.
    """
    if mark := _MARK.match(text):
        lines = chunks(text.removeprefix(mark[0]), max(width - len(mark[0]), 1))
        yield from (
            f"{' ' * len(mark[0]) if at else mark[0]}{line}" for at, line in enumerate(lines)
        )
        return
    text = _whole_names(text)
    while cell_len(text) > width:
        line = fitting(text, width) or text[:1]
        if CONFIG_LABEL.search(text) and (end := _config_end(line)):
            yield text[:end].rstrip().replace(NO_BREAK, " ")
            text = text[end:]
            continue
        start = line.rfind(" ") + 1
        word = text[start:].partition(" ")[0]
        ends = (max(map(line.rfind, marks)) + 1 for marks in SEPARATORS)
        dot = line.rfind(".", start) + 1
        if text.startswith(" ", len(line)):
            end = len(line)
        elif dot and _MODULE.fullmatch(word):
            end = dot
        elif start and cell_len(word) <= min(width, LONGEST_WORD):
            end = start
        else:
            end = next((end for end in ends if end > len(line) // 2), len(line))
        yield text[:end].rstrip().replace(NO_BREAK, " ")
        text = text[end:].lstrip()
    yield text.replace(NO_BREAK, " ")


def _config_end(line: str) -> int:
    """Return where a line with configs ends: after the arrow between two configs, or else a token."""
    if _ARROW in line:
        return line.rindex(_ARROW) + len(_ARROW)
    return max((token.end() for token in _TOKEN_END.finditer(line)), default=0)


def _whole_names(text: str) -> str:
    """Replace the blanks in the names of kernels, so that a text is not broken there."""
    return _ARGUMENTS.sub(lambda found: found[0].replace(" ", NO_BREAK), text)
