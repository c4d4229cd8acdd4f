"""Answers of `explain` as a Document: a verdict line, the backends with all reasons, advice with
code, and what casts doubt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import Any

from profharness.answers.explain.maps import Bisection, Edge, Map, value_text
from profharness.answers.explain.rules import (
    FIELDS,
    SCHEMA,
    Explanation,
    MatrixRow,
    chosen,
    environment_text,
    explanation_record,
)
from profharness.dispatch.advice import Advice, BackendAnswer
from profharness.views.document import Block, Code, Column, Document, Heading, Note, Table

COLUMNS = (
    Column("backend", "backend", repeat=False),
    Column("eligible", "eligible", repeat=False),
    Column("first", ""),
    Column("code", "reason"),
    Column("source", "source"),
    Column("message", "what it says", shrink=True),
)
FIRST = "first"  # marks the reason that PyTorch stops at
_STATES = {True: "yes", False: "no", None: "unknown"}
_NO_CHOICE = ("none", "error")


def explain_document(
    answers: Sequence[Explanation], *, full: bool = False, named: Sequence[str] = ()
) -> Document:
    """The answer of `profharness explain` for configs one by one. full shows messages whole, named
    are the backends that were asked about.
    """
    blocks = [block for each in answers for block in answer_blocks(each, full=full, named=named)]
    return Document(
        schema=SCHEMA,
        title="Why this kernel",
        blocks=tuple(blocks),
        fields=FIELDS,
        records=tuple(explanation_record(answer) for answer in answers),
    )


def answer_blocks(
    answer: Explanation, *, full: bool = False, named: Sequence[str] = ()
) -> list[Block]:
    """Heading, verdict, table, advice and doubts of one config. Advice on a backend that takes the
    config anyhow is shown where it is named, or where its gain is known.
    """
    blocks: list[Block] = [Heading(answer.config, environment_text(answer)), Note(verdict(answer))]
    if answer.error:
        blocks.append(Note(answer.error, "error", "error"))
    if answer.backends:
        blocks.append(_table(answer.backends))
    blocks += _witnesses(answer)
    if full:
        blocks += [
            Note(f"{reason.code}: {reason.message}", side.backend)
            for side in answer.backends
            for reason in side.reasons
        ]
    for side in answer.backends:
        for advice in side.advice:
            if full or side.eligible is not True or side.backend in named or advice.gain:
                blocks += _advice(side.backend, advice)
    blocks += [Note(text, "caveat", "warning") for text in answer.caveats]
    return blocks


def verdict(answer: Explanation) -> str:
    """One sentence: what `auto` runs, why, and why not each of the others."""
    choice = chosen(answer)
    if choice == "unknown":
        lead = "what auto runs is not known"
    elif choice in _NO_CHOICE:
        lead = "auto raises, because no backend takes this config"
    else:
        lead = f"auto runs {choice}, because {_because(choice, answer)}"
    tried = answer.priority_order or [side.backend for side in answer.backends]
    others = [
        f"{side.backend} would be refused: "
        + (side.reasons[0].message.rstrip(".") if side.reasons else "no reason given")
        for side in answer.backends
        if side.backend != choice and side.eligible is False and side.backend in tried
    ]
    later = [side.backend for side in answer.backends if side.backend != choice and side.eligible]
    if later and choice not in ("unknown", *_NO_CHOICE):
        take, come = ("takes", "comes") if len(later) == 1 else ("take", "come")
        others.append(f"{_and(later)} {take} it too, but {come} later in the order")
    others += [
        f"whether {side.backend} takes it is not known"
        for side in answer.backends
        if side.eligible is None
    ]
    return "; ".join([lead, *others]) + "."


def _because(choice: str, answer: Explanation) -> str:
    order = answer.priority_order
    if choice not in order:
        return "it takes this config"
    before = order[: order.index(choice)]
    if not before:
        return "it comes first in the priority order and takes this config"
    refused = {side.backend for side in answer.backends if side.eligible is False}
    if not refused.issuperset(before):
        return "PyTorch says so"
    come, are = ("comes", "is") if len(before) == 1 else ("come", "are")
    return f"{_and(before)}, which {come} before it in the priority order, {are} refused"


def _and(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _table(backends: Sequence[BackendAnswer]) -> Table:
    rows: list[tuple[Any, ...]] = []
    for side in backends:
        state = _STATES[side.eligible]
        if not side.reasons:
            rows.append((side.backend, state, "", "", "", ""))
        for index, reason in enumerate(side.reasons):
            mark = FIRST if index == 0 and side.eligible is False else ""
            rows.append((side.backend, state, mark, reason.code, reason.source, reason.message))
    return Table(COLUMNS, tuple(rows))


def _witnesses(answer: Explanation) -> list[Block]:
    """What rules, PyTorch and a stored run say, where at least two say something."""
    if answer.agree is None:
        return []
    witnesses = {
        "the rules predict": answer.predicted,
        "PyTorch says": answer.choice,
        "a stored run shows": answer.observed,
    }
    text = ", ".join(f"{who} {name}" for who, name in witnesses.items() if name)
    if answer.agree:
        return [Note(text, "agree")]
    return [Note(f"mismatch: {text}", "agree", "warning")]


def _advice(backend: str, advice: Advice) -> list[Block]:
    parts = [advice.change.rstrip(".")]
    if advice.verified:
        parts.append("asked again: eligible")
    elif advice.verified is False:
        parts.append("asked again: still refused")
    if advice.choice:
        parts.append(f"auto then runs {advice.choice}")
    if advice.gain is not None:
        factor, word = (advice.gain, "faster") if advice.gain >= 1 else (1 / advice.gain, "slower")
        parts.append(
            f"measured {factor:.2f}x {word} (the call alone, not what prepares its inputs)"
        )
    note = Note("; ".join(parts), f"for {backend}")
    return [note, Code(advice.code)] if advice.code else [note]


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


def matrix_document(
    matrices: Sequence[Sequence[MatrixRow]], *, full: bool = False, backends: Sequence[str] = ()
) -> Document:
    """Releases side by side, oldest first; ► marks a release whose choice differs from the one
    before. full adds every release's own answer; backends are those that have a column.
    """
    shown = backends or SHOWN_BACKENDS
    columns = (
        Column("flip", ""),
        Column("release", "torch"),
        Column("choice", "choice"),
        *(Column(name, name) for name in shown),
        Column("changes", "what changed", shrink=True),
    )
    blocks: list[Block] = []
    records = []
    for matrix in matrices:
        first = matrix[0].explanation
        blocks.append(Heading(first.config, first.environment.get("gpu") or "CPU"))
        rows, notes = [], []
        for row in matrix:
            answer = row.explanation
            release, changes = answer.environment["torch"], "; ".join(row.changes)
            states = [_state(answer, name) for name in shown]
            mark = FLIP if row.flips else ""
            rows.append((mark, release, answer.predicted, *states, changes))
            notes += [Note(f"{release}: {changes}", FLIP)] if row.flips else []
            extra = {"flips": row.flips, "changes": list(row.changes)}
            records.append(explanation_record(answer) | extra)
        blocks.append(Table(columns, tuple(rows)))
        blocks += notes or [Note(f"the choice is {first.predicted} in all of them")]
        if full:
            blocks += [b for row in matrix for b in answer_blocks(row.explanation, full=True)]
    fields = (*FIELDS, "flips", "changes")
    return Document(SCHEMA, "Choice by release", tuple(blocks), fields, tuple(records))


def _state(answer: Explanation, name: str) -> str | None:
    """`yes`, `unknown`, or why not; None where the place does not have the backend."""
    side = next((each for each in answer.backends if each.backend == name), None)
    if side is None:
        return None
    if side.eligible is False and side.reasons:
        return f"no: {side.reasons[0].code}"
    return _STATES[side.eligible]


def map_document(
    maps: Sequence[Map], answers: Sequence[Explanation], *, where: str, full: bool = False
) -> Document:
    """Maps with their legend and edges; the records are the answers behind them. full adds every
    config's own answer.
    """
    blocks: list[Block] = []
    for drawn in maps:
        blocks += _map_blocks(drawn, where)
    if full:
        blocks += [block for answer in answers for block in answer_blocks(answer, full=True)]
    return Document(
        schema=SCHEMA,
        title="Backend by shape",
        blocks=tuple(blocks),
        fields=FIELDS,
        records=tuple(explanation_record(answer) for answer in answers),
        extra={"maps": [map_record(drawn) for drawn in maps]},
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
        "edges": [asdict(edge) for edge in each.edges],
    }


def _map_blocks(each: Map, where: str) -> list[Block]:
    columns = tuple(
        Column(f"c{index}", value_text(value), right=True)
        for index, value in enumerate(each.column_values)
    )
    head = f"{each.rows} \\ {each.columns}" if each.rows else each.columns
    rows = tuple(
        (
            value_text(row),
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
    notes = [Note(_edge_text(edge, each), "edge") for edge in each.edges]
    left = len(notes) - MAX_EDGES
    if left > 0:
        notes[MAX_EDGES:] = [Note(f"{left} more (--format json has them all)", "edge")]
    return [*blocks, *(notes or [Note("none: the choice is the same everywhere", "edge")])]


def _edge_text(edge: Edge, each: Map) -> str:
    values = f"{value_text(edge.before)} → {value_text(edge.after)}"
    text = f"{edge.along} {values}: {edge.choice_before} → {edge.choice_after}"
    if not each.rows:
        return text
    other = each.columns if edge.along == each.rows else each.rows
    if edge.everywhere:
        return f"{text} at every {other}"
    shown = ", ".join(value_text(value) for value in edge.at[:MAX_VALUES])
    more = len(edge.at) - MAX_VALUES
    return f"{text} at {other} {shown}" + (f" and {more} more" if more > 0 else "")


def _letter(choice: str | None) -> str | None:
    return None if choice is None else LETTERS.get(choice, choice)


def _meaning(choice: str) -> str:
    return {"none": "PyTorch raises", "unknown": "not known"}.get(choice, choice)


def bisect_document(bisections: Sequence[Bisection], *, where: str) -> Document:
    """The stretches between flips of each bisection, and how many values were asked."""
    columns = (
        Column("first", "from", right=True),
        Column("last", "to", right=True),
        Column("choice", "choice"),
        Column("again", "again"),
    )
    blocks: list[Block] = []
    records = []
    for bisection in bisections:
        rows = [astuple(stretch) for stretch in bisection.stretches]
        blocks += [
            Heading(f"{bisection.config}, {bisection.name} varies", where),
            Table(columns, tuple(_folded(rows))),
            Note(_asked_text(bisection)),
        ]
        records += [
            dict(zip(BISECT_FIELDS, (bisection.config, bisection.name, *row), strict=True))
            for row in rows
        ]
    asked = [
        {
            "config": bisection.config,
            "property": bisection.name,
            "asked": bisection.asked,
            "possible": bisection.possible,
        }
        for bisection in bisections
    ]
    return Document(
        schema=BISECT_SCHEMA,
        title="Where the choice flips",
        blocks=tuple(blocks),
        fields=BISECT_FIELDS,
        records=tuple(records),
        extra={"asked": asked},
    )


def _folded(rows: Sequence[tuple[int, int, str]]) -> list[tuple[str, str, str, str]]:
    """Table rows; two stretches that come again and again at one distance are one pair of rows."""
    folded = []
    place = 0
    while place < len(rows):
        repeats = _repeats(rows, place)
        width = 2 if repeats >= MIN_REPEATS else 1
        for offset, (first, last, choice) in enumerate(rows[place : place + width]):
            again = ""
            if width == 2:
                step = rows[place + 2][0] - rows[place][0]
                again = f"every {step:,} up to {rows[place + offset + 2 * (repeats - 1)][1]:,}"
            folded.append((f"{first:,}", f"{last:,}", choice, again))
        place += 2 * repeats if width == 2 else 1
    return folded


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


def _asked_text(bisection: Bisection) -> str:
    """How sure the stretches are."""
    count = len(bisection.asked)
    flips = len(bisection.flips)
    exact = f"{flips} flip{'s' if flips != 1 else ''}, exact: the values on both sides were asked"
    if count == bisection.possible:
        return f"{exact}; all {count:,} values were asked"
    return (
        f"{exact}; asked {count:,} of {bisection.possible:,} values; between two asked values with the "
        "same choice it is taken to stay the same (--format json lists what was asked)"
    )
