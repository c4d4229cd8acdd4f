"""Many answers at once as Documents: releases side by side, maps of backends by shape, and edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from profharness.explanation import SCHEMA, Explanation
from profharness.report.document import Block, Column, Document, Heading, Note, Table
from profharness.report.explain_view import FIELDS, answer_blocks, explanation_record

if TYPE_CHECKING:
    from profharness.explaining.bisect import Bisection
    from profharness.explaining.maps import Edge, Map
    from profharness.explaining.offline import Matrix

BISECT_SCHEMA = "profharness.bisect/1"
BISECT_FIELDS = ("config", "property", "first", "last", "choice")
LETTERS = {
    "flash": "F",
    "efficient": "E",
    "cudnn": "C",
    "math": "M",
    "overrideable": "O",
    "none": "x",
    "unknown": "?",
}
SHOWN_BACKENDS = ("flash", "efficient", "cudnn")
MAX_EDGES = 40
MAX_VALUES = 6
MIN_REPEATS = 3
FLIP = "►"
_STATES = {True: "yes", None: "unknown"}


def matrix_document(matrices: Sequence[Matrix], *, full: bool = False) -> Document:
    """Releases side by side, oldest first; ► marks a release whose choice differs from the one
    before. full adds every release's own answer.
    """
    columns = (
        Column("flip", ""),
        Column("release", "torch"),
        Column("choice", "choice"),
        *(Column(name, name) for name in SHOWN_BACKENDS),
        Column("changes", "what changed", shrink=True),
    )
    blocks: list[Block] = []
    records = []
    for matrix in matrices:
        blocks.append(Heading(matrix.config, matrix.gpu or "CPU"))
        rows = []
        for row in matrix.rows:
            answer = row.explanation
            states = [_state(answer, name) for name in SHOWN_BACKENDS]
            mark = FLIP if row.flips else ""
            changes = "; ".join(row.changes)
            rows.append((mark, row.release, answer.predicted, *states, changes))
            extra = {"flips": row.flips, "changes": list(row.changes)}
            records.append(explanation_record(answer) | extra)
        blocks.append(Table(columns, tuple(rows)))
        blocks += _flip_notes(matrix)
        if full:
            blocks += [b for row in matrix.rows for b in answer_blocks(row.explanation, full=True)]
    fields = (*FIELDS, "flips", "changes")
    return Document(SCHEMA, "Choice by release", tuple(blocks), fields, tuple(records))


def _flip_notes(matrix: Matrix) -> list[Note]:
    flips = [row for row in matrix.rows if row.flips]
    if not flips:
        return [Note(f"the choice is {matrix.rows[0].explanation.predicted} in all of them")]
    return [Note(f"{row.release}: {'; '.join(row.changes)}", FLIP) for row in flips]


def _state(answer: Explanation, name: str) -> str | None:
    """`yes`, `unknown`, or why not; None where the place does not have the backend."""
    side = next((each for each in answer.backends if each.backend == name), None)
    if side is None:
        return None
    if side.eligible is False:
        return f"no: {side.reasons[0].code}" if side.reasons else "no"
    return _STATES[side.eligible]


def map_document(
    maps: Sequence[Map], answers: Sequence[Explanation], *, where: str, full: bool = False
) -> Document:
    """Maps with their legend and edges; the records are the answers behind them. full adds every
    config's own answer.
    """
    blocks: list[Block] = []
    for each in maps:
        blocks += _map_blocks(each, where)
    if full:
        blocks += [block for answer in answers for block in answer_blocks(answer, full=True)]
    return Document(
        schema=SCHEMA,
        title="Backend by shape",
        blocks=tuple(blocks),
        fields=FIELDS,
        records=tuple(explanation_record(answer) for answer in answers),
        extra={"maps": [map_record(each) for each in maps]},
    )


def map_record(each: Map) -> dict[str, Any]:
    """The JSON record of one map: axes, choices row by row (null: not asked), and edges."""
    return {
        "fixed": dict(each.fixed),
        "rows": each.rows or None,
        "columns": each.columns,
        "row_values": list(each.row_values) if each.rows else None,
        "column_values": list(each.column_values),
        "choices": [
            [each.cells.get((row, column)) for column in each.column_values]
            for row in each.row_values
        ],
        "edges": [_edge_record(edge) for edge in each.edges],
    }


def _edge_record(edge: Edge) -> dict[str, Any]:
    names = ("along", "before", "after", "choice_before", "choice_after", "everywhere")
    return {name: getattr(edge, name) for name in names} | {"at": list(edge.at)}


def _map_blocks(each: Map, where: str) -> list[Block]:
    columns = tuple(Column(f"c{i}", _word(v), right=True) for i, v in enumerate(each.column_values))
    head = f"{each.rows} \\ {each.columns}" if each.rows else each.columns
    rows = tuple(
        (
            _word(row),
            *(_letter(each.cells.get((row, column))) for column in each.column_values),
        )
        for row in each.row_values
    )
    used = sorted(set(each.cells.values()))
    legend = ", ".join(f"{_letter(choice)} {_meaning(choice)}" for choice in used)
    blocks: list[Block] = [
        Heading(f"{head}{f'  {each.title}' if each.title else ''}", where),
        Table((Column("row", each.rows, right=True), *columns), rows),
        Note(legend, "legend"),
    ]
    across = each.rows or "all"
    notes = [Note(_edge_text(edge, each, across), "edge") for edge in each.edges]
    left = len(notes) - MAX_EDGES
    if left > 0:
        notes[MAX_EDGES:] = [Note(f"{left} more (--format json has them all)", "edge")]
    return [*blocks, *(notes or [Note("none: the choice is the same everywhere", "edge")])]


def _edge_text(edge: Edge, each: Map, across: str) -> str:
    values = f"{_word(edge.before)} → {_word(edge.after)}"
    text = f"{edge.along} {values}: {edge.choice_before} → {edge.choice_after}"
    if not each.rows:
        return text
    other = each.columns if edge.along == each.rows else across
    if edge.everywhere:
        return f"{text} at every {other}"
    shown = ", ".join(_word(value) for value in edge.at[:MAX_VALUES])
    more = len(edge.at) - MAX_VALUES
    return f"{text} at {other} {shown}" + (f" and {more} more" if more > 0 else "")


def _word(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _letter(choice: str | None) -> str | None:
    return None if choice is None else LETTERS.get(choice, choice)


def _meaning(choice: str) -> str:
    return {"none": "PyTorch raises", "unknown": "not known"}.get(choice, choice)


def bisect_document(found: Sequence[Bisection], *, where: str) -> Document:
    """The stretches between flips of each bisection, and how many values were asked."""
    columns = (
        Column("first", "from", right=True),
        Column("last", "to", right=True),
        Column("choice", "choice"),
        Column("again", "again"),
    )
    blocks: list[Block] = []
    records = []
    for each in found:
        blocks.append(Heading(f"{each.config}, {each.name} varies", where))
        rows = [(one.first, one.last, one.choice) for one in each.stretches]
        blocks.append(Table(columns, tuple(_folded(rows))))
        blocks.append(Note(_asked_text(each)))
        records += [
            dict(zip(BISECT_FIELDS, (each.config, each.name, *row), strict=True)) for row in rows
        ]
    asked = [
        {"config": each.config, "property": each.name, "asked": list(each.asked)}
        | {"possible": each.possible}
        for each in found
    ]
    title = "Where the choice flips"
    return Document(
        BISECT_SCHEMA, title, tuple(blocks), BISECT_FIELDS, tuple(records), {"asked": asked}
    )


def _folded(rows: Sequence[tuple[int, int, str]]) -> list[tuple[str, str, str, str]]:
    """Table rows; two stretches that come again and again at one distance are told once."""
    found = []
    place = 0
    while place < len(rows):
        repeats = _repeats(rows, place)
        told = rows[place : place + (2 if repeats >= MIN_REPEATS else 1)]
        for offset, (first, last, choice) in enumerate(told):
            again = ""
            if len(told) == 2:
                step = rows[place + 2][0] - rows[place][0]
                again = f"every {step:,} up to {rows[place + offset + 2 * (repeats - 1)][1]:,}"
            found.append((f"{first:,}", f"{last:,}", choice, again))
        place += 2 * repeats if len(told) == 2 else 1
    return found


def _repeats(rows: Sequence[tuple[int, int, str]], place: int) -> int:
    """How often the two stretches at `place` come one after the other, in equal steps."""
    count = 1
    pair = rows[place : place + 2]
    following = rows[place + 2 : place + 4]
    if len(following) < 2:
        return count
    step = following[0][0] - pair[0][0]
    while len(following) == 2 and all(
        (first + count * step, last + count * step, choice) == other
        for (first, last, choice), other in zip(pair, following, strict=True)
    ):
        count += 1
        following = rows[place + 2 * count : place + 2 * count + 2]
    return count


def _asked_text(each: Bisection) -> str:
    """How sure the stretches are."""
    count = len(each.asked)
    flips = len(each.flips)
    told = f"{flips} flip{'s' if flips != 1 else ''}, exact: the values on both sides were asked"
    if count == each.possible:
        return f"{told}; all {count:,} values were asked"
    return (
        f"{told}; asked {count:,} of {each.possible:,} values; between two asked values with the "
        "same choice it is taken to stay the same (--format json lists what was asked)"
    )
