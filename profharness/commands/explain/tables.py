"""Show the answers of `explain`: single configs, releases, maps and bisections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import Any

from profharness.attention.config import AUTO, SDPA_BACKENDS, sdpa_setting
from profharness.attention.dispatch.advice import Advice, BackendAnswer
from profharness.attention.dispatch.by_rule import (
    FIELDS,
    FUSED_BACKENDS,
    SCHEMA,
    Explanation,
    MatrixRow,
    chosen,
    environment_text,
    explanation_record,
    unread,
)
from profharness.columns import Column, pick
from profharness.commands.explain.maps import Bisection, Edge, Map, Stretch, value_text
from profharness.errors import join_few
from profharness.render.document import Block, Code, Document, Heading, Note, Table
from profharness.rows import Refusal

COLUMNS = (
    *pick(BackendAnswer, "backend", "eligible"),
    Column("first", ""),
    *pick(Refusal, "code", "source", "message"),
)
NO_REASON = {"first": "", "code": "", "source": "", "message": ""}
FIRST = "first"  # marks the reason at which PyTorch stops
_STATES = {True: "yes", False: "no", None: "unknown"}


def explain_document(
    answers: Sequence[Explanation], *, full: bool = False, named: Sequence[str] = ()
) -> Document:
    """Return the document of `explain` for single configs.

    With `full`, messages are not cut. `named` are the backends given on the command line.
    """
    blocks = [b for answer in answers for b in answer_blocks(answer, full=full, named=named)]
    records = tuple(map(explanation_record, answers))
    return Document(SCHEMA, "Why this kernel", tuple(blocks), FIELDS, records)


def answer_blocks(
    answer: Explanation, *, full: bool = False, named: Sequence[str] = ()
) -> list[Block]:
    """Return heading, verdict, table, advice and doubts of one config.

    Advice on an eligible backend is shown only if the backend is named or its gain is known.
    """
    blocks: list[Block] = [Heading(answer.config, environment_text(answer)), Note(verdict(answer))]
    if answer.prediction is not None:
        blocks.append(Note(answer.prediction["statement"], "time"))
    if answer.error:
        blocks.append(Note(answer.error, "error", "error"))
    if answer.backends and not _nothing_known(answer):
        blocks.append(_table(answer.backends))
    if answer.agree is not None:
        blocks.append(_witnesses(answer))
    if full:
        blocks += [
            Note(f"{reason.code}: {reason.message}", side.backend)
            for side in answer.backends
            for reason in side.reasons
        ]
    for side in answer.backends:
        for advice in side.advice:
            if full or side.eligible is not True or side.backend in named or advice.gain:
                blocks += _advice(side.backend, advice, answer.asked)
    blocks += [Note(text, "caveat", "warning") for text in answer.caveats]
    return blocks


def verdict(answer: Explanation) -> str:
    """Return one sentence on what `auto` or the setting runs, why, and why not the others."""
    choice = chosen(answer)
    if _nothing_known(answer):
        return f"what {answer.asked} runs is not known, nor which backends take this config."
    if choice == "unknown":
        lead = f"what {answer.asked} runs is not known"
    elif choice == "none":
        lead = _why_none(answer)
    else:
        lead = f"{answer.asked} runs {choice}, because {_because(choice, answer)}"
    allowed = _permitted(answer)
    others = [
        f"{side.backend} would be refused: "
        + (side.reasons[0].message.rstrip(".") if side.reasons else "no reason given")
        for side in answer.backends
        if side.backend != choice
        and side.eligible is False
        and (not answer.priority_order or side.backend in answer.priority_order)
        and side.backend in allowed
    ]
    later = [side.backend for side in answer.backends if side.backend != choice and side.eligible]
    if later and choice not in ("unknown", "none"):
        take, come = ("takes", "comes") if len(later) == 1 else ("take", "come")
        others.append(f"{_and(later)} {take} it too, but {come} later in the order")
    others += [
        f"whether {side.backend} takes it is not known"
        for side in answer.backends
        if side.eligible is None
    ]
    if ruled_out := [name for name in SDPA_BACKENDS if name not in allowed]:
        others.append(f"{_and(ruled_out)} {'is' if len(ruled_out) == 1 else 'are'} not permitted")
    return "; ".join([lead, *others]) + "."


def _nothing_known(answer: Explanation) -> bool:
    """Return whether the rules do not cover the release. A caveat states this."""
    return answer.choice is None and unread([answer]) is not None


def _why_none(answer: Explanation) -> str:
    taking = [side.backend for side in answer.backends if side.eligible]
    if not taking:
        which = "no backend" if answer.asked == AUTO else "no backend of it"
        return f"{answer.asked} raises, because {which} takes this config"
    takes = "takes" if len(taking) == 1 else "take"
    return f"{answer.asked} raises: PyTorch settles on math, though {_and(taking)} alone {takes} this config"


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
    before = tuple(name for name in before if name in _permitted(answer))
    if not before:
        return "it is the first of them in the priority order and takes this config"
    come, are = ("comes", "is") if len(before) == 1 else ("come", "are")
    return f"{_and(before)}, which {come} before it in the priority order, {are} refused"


def _permitted(answer: Explanation) -> tuple[str, ...]:
    setting = sdpa_setting(answer.asked)
    return SDPA_BACKENDS if setting is None else setting.backends


def _and(names: Sequence[str]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def _table(backends: Sequence[BackendAnswer]) -> Table:
    rows: list[tuple[Any, ...]] = []
    for side in backends:
        state = {"eligible": _STATES[side.eligible]}
        if not side.reasons:
            rows.append((state | NO_REASON, side))
        for reason in side.reasons:
            stops = reason is side.reasons[0] and side.eligible is False
            rows.append((state | {"first": FIRST if stops else ""}, side, reason))
    return Table.of(COLUMNS, rows)


def _witnesses(answer: Explanation) -> Note:
    """Return a note with the answers of the rules, of PyTorch and of a stored run."""
    witnesses = {
        "the rules predict": answer.predicted,
        "PyTorch says": answer.choice,
        "a stored run shows": answer.observed,
    }
    text = ", ".join(f"{witness} {choice}" for witness, choice in witnesses.items() if choice)
    return Note(text, "agree") if answer.agree else Note(f"mismatch: {text}", "agree", "warning")


def _advice(backend: str, advice: Advice, asked: str) -> list[Block]:
    parts = [advice.change.rstrip(".")]
    if advice.verified is not None:
        parts.append(f"asked again: {'eligible' if advice.verified else 'still refused'}")
    if advice.choice:
        parts.append(f"{asked} then runs {advice.choice}")
    if advice.gain is not None:
        factor, word = (advice.gain, "faster") if advice.gain >= 1 else (1 / advice.gain, "slower")
        parts.append(
            f"measured {factor:.2f}x {word} (the call alone, not what prepares its inputs)"
        )
    return [Note("; ".join(parts), f"for {backend}"), *([Code(advice.code)] if advice.code else ())]


LETTERS: dict[str | None, str] = {
    "flash": "F",
    "efficient": "E",
    "cudnn": "C",
    "math": "M",
    "overrideable": "O",
    "none": "x",
    "unknown": "?",
}
MEANINGS = {"none": "PyTorch raises", "unknown": "not known"}
MAX_EDGES = 40
MAX_VALUES = 6
MIN_REPEATS = 3
FLIP = "►"


def matrix_document(
    matrices: Sequence[Sequence[MatrixRow]], *, full: bool = False, backends: Sequence[str] = ()
) -> Document:
    """Return the document for several releases, oldest first.

    `►` marks a release with another choice than the one before. With `full`, it contains the answer
    for every release. `backends` are those with a column.
    """
    shown = backends or FUSED_BACKENDS
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
        where = first.environment.get("gpu") or "CPU"
        asked = "" if first.asked == AUTO else f", {first.asked}"
        blocks.append(Heading(first.config, f"{where}{asked}"))
        rows, notes = [], []
        for row in matrix:
            answer = row.explanation
            release, changes = answer.environment["torch"], "; ".join(row.changes)
            states = {side.backend: _state(side) for side in answer.backends}
            mark = FLIP if row.flips else ""
            rows.append((mark, release, answer.predicted, *map(states.get, shown), changes))
            notes += [Note(f"{release}: {changes}", FLIP)] if row.flips else []
            extra = {"flips": row.flips, "changes": list(row.changes)}
            records.append(explanation_record(answer) | extra)
        blocks.append(Table(columns, tuple(rows)))
        missing = unread(row.explanation for row in matrix)
        if not notes and not (missing and first.predicted == "unknown"):
            notes.append(Note(f"the choice is {first.predicted} in all of them"))
        errors = dict.fromkeys(row.explanation.error for row in matrix)
        notes += [Note(error, "caveat", "warning") for error in errors if error]
        blocks += [*notes, *([Note(missing, "caveat", "warning")] if missing else ())]
        if full:
            blocks += [b for row in matrix for b in answer_blocks(row.explanation, full=True)]
    fields = (*FIELDS, "flips", "changes")
    return Document(SCHEMA, "Choice by release", tuple(blocks), fields, tuple(records))


def _state(side: BackendAnswer) -> str:
    """Return `yes`, `unknown`, or the reason for a refusal."""
    if side.eligible is False and side.reasons:
        return f"no: {side.reasons[0].code}"
    return _STATES[side.eligible]


def map_document(
    maps: Sequence[Map], answers: Sequence[Explanation], *, where: str, full: bool = False
) -> Document:
    """Return the document of maps with legends and edges. Its records are the answers.

    With `full`, it contains the answer for every config.
    """
    blocks = [block for drawn in maps for block in map_blocks(drawn, where)]
    if full:
        blocks += [block for answer in answers for block in answer_blocks(answer, full=True)]
    if missing := unread(answers):
        blocks.append(Note(missing, "caveat", "warning"))
    records = tuple(map(explanation_record, answers))
    extra = {"maps": [map_record(drawn) for drawn in maps]}
    return Document(SCHEMA, "Backend by shape", tuple(blocks), FIELDS, records, extra=extra)


def map_record(drawn: Map) -> dict[str, Any]:
    """Return the JSON record of a map: axes, choices row by row (null if not evaluated) and edges."""
    return {
        "fixed": dict(drawn.fixed),
        "shared": dict(drawn.shared),
        "rows": drawn.rows or None,
        "columns": drawn.columns,
        "row_values": list(drawn.row_values) if drawn.rows else None,
        "column_values": list(drawn.column_values),
        "choices": drawn.choices,
        "edges": [asdict(edge) for edge in drawn.edges],
    }


def map_table(drawn: Map, texts: Sequence[Sequence[str | None]]) -> Table:
    """Return a table with the axes of a map and a text per cell."""
    columns = (
        Column(f"c{index}", value_text(value), right=True)
        for index, value in enumerate(drawn.column_values)
    )
    rows = tuple(
        (value_text(value), *line) for value, line in zip(drawn.row_values, texts, strict=True)
    )
    return Table((Column("row", drawn.rows, right=True), *columns), rows)


def map_blocks(drawn: Map, where: str) -> list[Block]:
    """Return heading, letters, legend and edges of a map of choices."""
    head = f"{drawn.rows} \\ {drawn.columns}" if drawn.rows else drawn.columns
    letters = [[LETTERS.get(choice, choice) for choice in line] for line in drawn.choices]
    used = sorted(set(drawn.cells.values()))
    legend = (f"{LETTERS.get(choice, choice)} {MEANINGS.get(choice, choice)}" for choice in used)
    blocks: list[Block] = [
        Heading(f"{head}  {drawn.title}".rstrip(), where),
        map_table(drawn, letters),
        Note(", ".join(legend), "legend"),
    ]
    notes = [Note(_edge_text(edge, drawn), "edge") for edge in drawn.edges]
    left = len(notes) - MAX_EDGES
    if left > 0:
        notes[MAX_EDGES:] = [Note(f"{left} more (--format json has them all)", "edge")]
    if not notes and used != ["unknown"]:
        notes.append(Note("none: the choice is the same everywhere", "edge"))
    return [*blocks, *notes]


def _edge_text(edge: Edge, drawn: Map) -> str:
    values = f"{value_text(edge.before)} → {value_text(edge.after)}"
    text = f"{edge.along} {values}: {edge.choice_before} → {edge.choice_after}"
    if not drawn.rows:
        return text
    other = drawn.columns if edge.along == drawn.rows else drawn.rows
    if edge.everywhere:
        return f"{text} at every {other}"
    places = join_few([value_text(value) for value in edge.at], MAX_VALUES)
    return f"{text} at {other} {places}"


def bisect_document(bisections: Sequence[Bisection], *, where: str) -> Document:
    """Return the document of bisections: stretches between flips, and the number of evaluated
    values.
    """
    columns = (*pick(Stretch), Column("again", "again"))
    blocks: list[Block] = []
    records, probed = [], []
    for bisection in bisections:
        varied = {"config": bisection.config, "property": bisection.name}
        blocks += [
            Heading(f"{bisection.config}, {bisection.name} varies", where),
            Table(columns, tuple(_folded([astuple(stretch) for stretch in bisection.stretches]))),
            Note(_probes_text(bisection)),
        ]
        records += [varied | asdict(stretch) for stretch in bisection.stretches]
        probed.append(varied | {"asked": bisection.asked, "possible": bisection.possible})
    return Document(
        schema="profharness.bisect/1",
        title="Where the choice flips",
        blocks=tuple(blocks),
        fields=("config", "property", "first", "last", "choice"),
        records=tuple(records),
        extra={"asked": probed},
    )


def _folded(rows: Sequence[tuple[int, int, str]]) -> list[tuple[int, int, str, str]]:
    """Return table rows. Two stretches that alternate in equal steps are folded into one pair of
    rows.
    """
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
            folded.append((first, last, choice, again))
        place += 2 * repeats if width == 2 else 1
    return folded


def _repeats(rows: Sequence[tuple[int, int, str]], place: int) -> int:
    """Return how often the two stretches at `place` alternate in equal steps."""
    count = 1
    while following := rows[place + 2 * count : place + 2 * count + 2]:
        move = count * (rows[place + 2][0] - rows[place][0])
        pair = [
            (first + move, last + move, choice) for first, last, choice in rows[place : place + 2]
        ]
        if following != pair:
            break
        count += 1
    return count


def _probes_text(bisection: Bisection) -> str:
    """Describe how certain the stretches are."""
    count, flips = len(bisection.asked), len(bisection.flips)
    exact = f"{flips} flip{'s' if flips != 1 else ''}, exact: the values on both sides were asked"
    if count == bisection.possible:
        return f"{exact}; all {count:,} values were asked"
    return (
        f"{exact}; asked {count:,} of {bisection.possible:,} values; between two asked values with the "
        "same choice it is taken to stay the same (--format json lists what was asked)"
    )
