"""Build the documents of `explain` for single configs, releases, maps and bisections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from profharness.attention.config import AUTO, SDPA_BACKENDS, parse_config
from profharness.attention.dispatch.advice import THEN_SELECT, BackendAnswer
from profharness.attention.dispatch.by_rule import (
    ALLOW_SET,
    COMPILED,
    FIELDS,
    LEGACY,
    SCHEMA,
    Explanation,
    MatrixRow,
    chosen,
    conditions,
    environment_text,
    explanation_record,
    unread,
    why_ran,
)
from profharness.columns import Column, pick
from profharness.commands.explain.answer import (
    Way,
    bisect_answer,
    compares_gpus,
    explain_answer,
    gpu_of,
    hidden_blocks,
    map_answer,
    matrix_answer,
    program_answer,
    saving_texts,
    shown_ways,
    told_way,
    unpredicted_texts,
)
from profharness.commands.explain.maps import Bisection, Map, Stretch, are_sparse, value_text
from profharness.errors import counted, join_and, join_few
from profharness.render.document import (
    Block,
    Code,
    Document,
    Heading,
    More,
    Note,
    Table,
    filled_columns,
)
from profharness.rows import Refusal

if TYPE_CHECKING:
    from profharness.commands.explain.calls import ProgramCalls

VERDICTS = {True: "could run", False: "refused", None: "unknown"}
RUNS = "runs"


COLUMNS = (
    *pick(BackendAnswer, "backend"),
    replace(pick(BackendAnswer, "eligible")[0], title="verdict"),
    *pick(BackendAnswer, "predicted_ns"),
    *pick(Refusal, "code", "source", "message"),
)
LIST_COLUMNS = (
    Column("config", "config", importance="key", shrink=True),
    Column("choice", "predicted backend", importance="answer"),
    Column("others", "could also run", importance="detail", wrap=True),
    Column("refused", "refused", importance="answer", wrap=True),
)
PROGRAM_COLUMNS = (
    LIST_COLUMNS[0],
    Column("ran", "ran", importance="answer"),
    Column("mean", "mean µs/call", "time", importance="answer"),
    LIST_COLUMNS[1],
    Column("faster", "faster", importance="answer", optional=True),
    Column("faster_ns", "predicted µs/call", "time", importance="answer", optional=True),
    *LIST_COLUMNS[2:],
)
FULL_HINT = More("an explanation of each config")
GENERAL = (COMPILED, ALLOW_SET, LEGACY)
"""Caveats that apply to every config."""
CODE_FOLLOWS = "The following code makes the advised change:"
NO_REASON = {"code": "", "source": "", "message": ""}
SOURCES = {"rules": "rule"}
"""Maps the source of an explanation to the source of its reasons if they have different names."""


def explain_document(
    answers: Sequence[Explanation], *, full: bool = False, named: Sequence[str] = ()
) -> Document:
    """Return the document of `explain` that explains each config separately.

    If `full` is set, messages are not truncated. `named` contains the backends of --backend, whose
    advice is always shown. If it is not empty, the tables have only these backends.
    """
    several = len(answers) > 1
    blocks = [
        block
        for answer in answers
        for block in answer_blocks(answer, full=full, named=named, summary=several)
    ]
    records = tuple(map(explanation_record, answers))
    told = map_answer(answers) if several else explain_answer(answers[0], named)
    return Document(SCHEMA, "Why this kernel", tuple(blocks), FIELDS, records, answer=told)


def answer_blocks(
    answer: Explanation,
    *,
    full: bool = False,
    named: Sequence[str] = (),
    summary: bool = False,
    told: bool = True,
) -> Iterator[Block]:
    """Yield the heading, table of reasons, advice and caveats for one config.

    If `summary` is set, also yield the sentences of `explain_answer`. `told` says whether the reader
    sees these sentences, here or at the top of the document. If `full` is set, yield the complete
    messages of PyTorch, all advice, and the caveats that apply to every config. If `named` is not
    empty, the table has only these backends.
    """
    yield Heading(answer.config, environment_text(answer))
    if summary:
        yield Note(" ".join(explain_answer(answer, named)))
    if answer.error:
        yield Note(answer.error, "error", "error")
    sides = [side for side in answer.backends if not named or side.backend in named]
    if sides and not _nothing_known(answer):
        rows: list[tuple[Any, ...]] = []
        for side in sides:
            runs = side.backend == chosen(answer)
            state: dict[str, Any] = {"eligible": RUNS if runs else VERDICTS[side.eligible]}
            if side.predicted_ns is None:
                state["predicted_ns"] = ""  # a refused backend has no time that is missing
            texts = conditions(parse_config(answer.config), side)
            reasons = [
                each if full else replace(each, message=text)
                for each, text in zip(side.reasons, texts, strict=True)
            ]
            rows += [(state, side, reason) for reason in reasons or (NO_REASON,)]
        source = SOURCES.get(answer.source, answer.source)  # the heading names it
        same = all(each.source == source for side in sides for each in side.reasons)
        columns = [each for each in COLUMNS if not (same and each.key == "source")]
        yield Table.of(filled_columns(columns, rows, ("predicted_ns", *NO_REASON)), rows)
    yield from _agreement(answer, full=full)
    yield from _advice(answer, named, full=full, told=told)
    caveats = [text for text in answer.caveats if full or text not in GENERAL]
    yield from (Note(text, level="warning") for text in caveats)


def _agreement(answer: Explanation, *, full: bool) -> Iterator[Note]:
    """Yield a sentence on whether the rules, PyTorch and a stored run agree, if they do not."""
    if answer.agree:
        sources = {
            "the rules": answer.predicted,
            "PyTorch": answer.choice,
            "a stored run": answer.observed,
        }
        known = [source for source, choice in sources.items() if choice not in (None, "unknown")]
        if full:
            agreed = next(each for each in sources.values() if each not in (None, "unknown"))
            text = f"{join_and(known)} agree: {agreed}."
            yield Note(f"{text[0].upper()}{text[1:]}")
    elif answer.agree is False:
        clauses = {
            "the rules predict {}": answer.predicted,
            "PyTorch chooses {}": answer.choice,
            "a stored run shows {}": answer.observed,
        }
        text = join_and(
            [
                clause.format(choice)
                for clause, choice in clauses.items()
                if choice not in (None, "unknown")
            ]
        )
        yield Note(text, "mismatch", "warning")


def _nothing_known(answer: Explanation) -> bool:
    """Return whether the choice is unknown because the rules do not cover the release."""
    return answer.choice is None and unread([answer]) is not None


def _advice(
    answer: Explanation, named: Sequence[str], *, full: bool, told: bool
) -> Iterator[Block]:
    """Yield the advice. Its conditions are said once.

    By default, only the first advice and that on named backends have code, and the advice that the
    answer describes has only its code.
    """
    first = told_way(answer, named) if told else None
    said: set[str] = set()
    if first is not None:
        _new_sentences(first.advice.change, said)
    shown = shown_ways(answer, named, full=full)
    without_code = False
    for at, way in enumerate(shown):
        if way == first and not full:
            texts = [CODE_FOLLOWS]
        else:
            texts = [_way_text(way, answer.asked, said, full=full), *saving_texts(way)]
            texts += unpredicted_texts(answer, way)
        yield Note(" ".join(texts), f"to run {way.runs}")
        if way.advice.code and (full or at == 0 or way.backend in named):
            yield Code(way.advice.code)
        else:
            without_code |= bool(way.advice.code)
    if without_code:
        yield More("the code of the other changes")
    if not full:
        yield from hidden_blocks(answer, shown)


def _new_sentences(change: str, said: set[str]) -> str:
    """Return the description of a change without the explanations in `said`, and add its own.

    The explanation of a step follows its colon, and the steps are separated by semicolons.
    """
    texts = []
    for step in change.split("; "):
        what, colon, why = step.partition(": ")
        # A step whose explanation was given is known, so a few words name it.
        texts.append(what.partition(" instead of ")[0] if why in said else f"{what}{colon}{why}")
        said |= {why} if why else set()
    return "; ".join(texts)


def _condition_first(change: str) -> str:
    """Return a change that starts with its condition: `If attn_mask hides nothing: leave it out`."""
    condition, comma, steps = change.partition(", ")
    if comma and condition.startswith("if "):
        first, *others = steps.split("; ")
        joint = " and " if len(others) == 1 and ": " not in steps else "; "
        change = f"{condition}: {joint.join([first, *others])}"
    return f"{change[0].upper()}{change[1:]}"


def _way_text(way: Way, asked: str, said: set[str], *, full: bool) -> str:
    """Return sentences on a change, and on the backend that PyTorch chooses after it."""
    advice, backend = way.advice, way.backend
    # The sentence below says that sdpa_kernel is needed.
    change = advice.change.partition(f"; {THEN_SELECT}")[0].rstrip(".")
    parts = [_condition_first(_new_sentences(change, said))]
    if advice.verified is False:
        parts.append(f"Checked: PyTorch still refuses {backend}")
    elif advice.verified and full:
        parts.append(f"Checked: {backend} accepts this")
    if advice.choice == backend and full:
        parts.append(f"{asked} then runs {backend}")
    elif advice.choice and advice.choice != backend:
        lead = "Without sdpa_kernel PyTorch" if asked == AUTO else f"Without it {asked}"
        parts.append(f"{lead} still picks {advice.choice}")
    return f"{'. '.join(parts)}."


LETTERS: dict[str | None, str] = {
    "flash": "F",
    "efficient": "E",
    "cudnn": "C",
    "math": "M",
    "overrideable": "O",
    "none": "x",
    "unknown": "?",
}
MEANINGS = {"none": "PyTorch raises", "unknown": "unknown"}
CONFIGS_NAMED = 2  # maximum number of configs that the label of a note names
MAX_EDGES = 40
MAX_VALUES = 6
MIN_REPEATS = 3
FLIP = "►"


def matrix_document(
    matrices: Sequence[Sequence[MatrixRow]], *, full: bool = False, backends: Sequence[str] = ()
) -> Document:
    """Return the document that compares the choices of several releases, oldest first, or of GPUs.

    `►` marks each row whose choice differs from the row before. If `full` is set, the document also
    has the explanation for each row. `backends` contains the backends to show as
    columns. By default, these are PyTorch's own backends.
    """
    names = {
        side.backend for matrix in matrices for row in matrix for side in row.explanation.backends
    }
    shown = backends or tuple(name for name in SDPA_BACKENDS if name in names)
    by_gpu = compares_gpus(matrices)
    columns = (
        Column("flip", "", importance="answer"),
        Column("where", "GPU" if by_gpu else "torch", importance="key"),
        Column("choice", "predicted backend", importance="answer"),
        *(Column(name, name) for name in shown),
        Column("changes", "what changed", wrap=True),
    )
    blocks: list[Block] = []
    records = []
    for matrix in matrices:
        first = matrix[0].explanation
        where = f"torch {first.environment['torch']}" if by_gpu else gpu_of(first)
        asked = "" if first.asked == AUTO else f", {first.asked}"
        rows, notes = [], list[Note]()
        for row in matrix:
            answer, changes = row.explanation, "; ".join(row.changes)
            key = gpu_of(answer) if by_gpu else answer.environment["torch"]
            mark = FLIP if row.flips else ""
            states = {
                side.backend: RUNS
                if side.backend == chosen(answer)
                else f"{VERDICTS[False]}: {side.reasons[0].code}"
                if side.eligible is False and side.reasons
                else VERDICTS[side.eligible]
                for side in answer.backends
            }
            rows.append((mark, key, answer.predicted, *map(states.get, shown), changes))
            extra = {"flips": row.flips, "changes": list(row.changes)}
            records.append(explanation_record(answer) | extra)
        missing = unread(row.explanation for row in matrix)
        errors = dict.fromkeys(row.explanation.error for row in matrix)
        notes += [Note(text, level="warning") for text in (*errors, missing) if text]
        blocks += [Heading(first.config, f"{where}{asked}"), Table(columns, tuple(rows)), *notes]
        if full:
            explained = (row.explanation for row in matrix)
            blocks += [
                b for each in explained for b in answer_blocks(each, full=True, summary=True)
            ]
    fields = (*FIELDS, "flips", "changes")
    title, told = f"Choice by {'GPU' if by_gpu else 'release'}", matrix_answer(matrices)
    return Document(SCHEMA, title, tuple(blocks), fields, tuple(records), answer=told)


def map_document(
    maps: Sequence[Map], answers: Sequence[Explanation], *, where: str, full: bool = False
) -> Document:
    """Return the document that shows maps of choices, with one record per explanation.

    Configs that do not form a grid are shown as a list. If `full` is set, the document also has the
    explanation of every config.
    """
    predicted = answers[0].source == "rules"
    if are_sparse(maps):
        blocks = [*_list_blocks(answers, where, predicted=predicted, full=full)]
        blocks += [] if full else [FULL_HINT]
    else:
        blocks = [b for drawn in maps for b in map_blocks(drawn, where, predicted=predicted)]
    if full:
        blocks += [b for each in answers for b in answer_blocks(each, full=True, summary=True)]
    if missing := unread(answers):
        blocks.append(Note(missing, level="warning"))
    records = tuple(map(explanation_record, answers))
    extra = {"maps": [map_record(drawn) for drawn in maps]}
    title, told = "Backend by shape", map_answer(answers)
    return Document(SCHEMA, title, tuple(blocks), FIELDS, records, extra=extra, answer=told)


def program_document(
    program: ProgramCalls,
    answers: Sequence[Explanation],
    *,
    full: bool = False,
    named: Sequence[str] = (),
    ways: Mapping[str, Way] | None = None,
) -> Document:
    """Return the document that explains the backends of a program, with one record per explanation.

    A single config is explained in detail. Several configs are shown as a list, with a sentence for
    each distinct reason. `ways` maps configs to the changes that make them faster.
    """
    if len(answers) == 1:
        unlike = answers[0].agree is False
        # The answer already says that the rules predict the backend that ran.
        only = answers[0] if unlike else replace(answers[0], agree=None)
        blocks = list(answer_blocks(only, full=full, named=named, told=not unlike))
    else:
        where = environment_text(replace(answers[0], asked=AUTO))
        blocks = list(
            _list_blocks(answers, where, predicted=True, of_program=True, full=full, ways=ways)
        )
        whys: dict[str, list[str]] = {}
        for answer in answers:
            if why := why_ran(answer, answer.observed) or _first_choice(answer):
                whys.setdefault(why, []).append(answer.config)
        blocks += [
            Note(why, "" if len(configs) == len(answers) else join_few(configs, CONFIGS_NAMED))
            for why, configs in whys.items()
        ]
        for answer in answers if full else ():
            blocks += answer_blocks(answer, full=True, named=named, summary=True)
    blocks += [Note(f"Not explained: {text}.") for text in program.left_out]
    if len(answers) > 1 and not full:
        blocks.append(FULL_HINT)
    if program.assumed:
        blocks.append(Note(program.assumed, "", "warning"))
    records = tuple(
        explanation_record(answer) | {"modules": list(call.modules)}
        for answer, call in zip(answers, program.calls, strict=True)
    )
    extra = {"run": program.run}
    told = program_answer(program, answers, named)
    fields = (*FIELDS, "modules")
    return Document(SCHEMA, "Why these kernels", tuple(blocks), fields, records, extra, answer=told)


def _first_choice(answer: Explanation) -> str:
    """Return a sentence that PyTorch prefers the backend that ran, or "" if it does not."""
    first = answer.priority_order[:1] == (answer.observed,)
    return f"{answer.observed} is PyTorch's first choice." if first else ""


def unexplained_document(program: ProgramCalls) -> Document:
    """Return the document of a program whose backends PyTorch does not choose, with any advice."""
    change = program.change
    told = (
        f"In {program.name}, {'; '.join(program.left_out)}.",
        *([f"{change[0].upper()}{change[1:]}."] if change else []),
    )
    blocks: tuple[Block, ...] = (Note(CODE_FOLLOWS), Code(program.code)) if program.code else ()
    if program.assumes:
        blocks = (*blocks, Note(program.assumes))
    if not change:
        blocks = (Note(f"to show its attention, use: {program.shown_by}", level="hint"),)
    fields, extra = (*FIELDS, "modules"), {"run": program.run}
    return Document(SCHEMA, "Why these kernels", blocks, fields, (), extra, answer=told)


def _refused(side: BackendAnswer) -> str:
    """Return a backend with the code of the first reason against it, such as `flash: mask`."""
    return f"{side.backend}: {side.reasons[0].code}" if side.reasons else side.backend


def _list_blocks(
    answers: Sequence[Explanation],
    where: str,
    *,
    predicted: bool,
    of_program: bool = False,
    full: bool = False,
    ways: Mapping[str, Way] | None = None,
) -> Iterator[Block]:
    """Yield a table with the choice for each config, and the backends that are refused.

    If `full` is set, the table also has the other backends that could run. For a program, the table
    also has the backend that ran, and the one that is faster after a change in `ways`.
    """
    yield Heading("Predicted backends" if predicted else "Backends", where)
    lines = []
    for answer in answers:
        sides = {
            state: [side for side in answer.backends if side.eligible is state]
            for state in VERDICTS
        }
        choice = chosen(answer)
        way = (ways or {}).get(answer.config)
        lines.append(
            {
                "config": answer.config,
                "ran": answer.observed,
                "mean": answer.observed_ns,
                "choice": choice,
                "faster": way.runs if way and way.times else None,
                "faster_ns": way.times.after_ns if way and way.times else None,
                "others": ", ".join(side.backend for side in sides[True] if side.backend != choice),
                "refused": ", ".join(map(_refused, sides[False])),
            }
        )
    known = PROGRAM_COLUMNS if of_program else LIST_COLUMNS
    columns = [column for column in known if full or column.key != "others"]
    keys = {column.key for column in columns} - {"mean"}
    yield Table.of(filled_columns(columns, lines, keys), lines)


def map_record(drawn: Map) -> dict[str, Any]:
    """Return the JSON record of a map, with its axes, its choices row by row, and its edges.

    A choice that was not queried is null.
    """
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
    """Return a table with the axes of a map and one text per cell, given row by row."""
    columns = (
        Column(f"c{index}", value_text(value), right=True)
        for index, value in enumerate(drawn.column_values)
    )
    rows = tuple(
        (value_text(value), *line) for value, line in zip(drawn.row_values, texts, strict=True)
    )
    return Table((Column("row", drawn.rows, right=True), *columns), rows)


def map_blocks(drawn: Map, where: str, *, predicted: bool) -> Iterator[Block]:
    """Yield a map of choices as a heading, a table of letters, a legend, and a list of edges."""
    head = f"{drawn.rows} \\ {drawn.columns}" if drawn.rows else drawn.columns
    lead = "Predicted backend: " if predicted else ""
    yield Heading(f"{lead}{head}  {drawn.title}".rstrip(), where)
    yield map_table(
        drawn, [[LETTERS.get(choice, choice) for choice in line] for line in drawn.choices]
    )
    used = sorted(set(drawn.cells.values()))
    legend = (f"{LETTERS.get(choice, choice)} {MEANINGS.get(choice, choice)}" for choice in used)
    yield Note(", ".join(legend), "legend")
    for edge in drawn.edges[:MAX_EDGES]:
        values = f"{value_text(edge.before)} → {value_text(edge.after)}"
        text = f"{edge.along} {values}: {edge.choice_before} → {edge.choice_after}"
        other = drawn.columns if edge.along == drawn.rows else drawn.rows
        if drawn.rows and edge.everywhere:
            text += f" at every {other}"
        elif drawn.rows:
            text += f" at {other} {join_few([value_text(each) for each in edge.at], MAX_VALUES)}"
        yield Note(text, "edge")
    if len(drawn.edges) > MAX_EDGES:
        yield Note(f"{len(drawn.edges) - MAX_EDGES} more; the JSON has them all", "edge")
    if not drawn.edges and used != ["unknown"]:
        yield Note("the choice is the same everywhere on the map")


def bisect_document(bisections: Sequence[Bisection], *, where: str) -> Document:
    """Return the document of bisections.

    It shows the ranges of values with the same choice, and how many values were checked.
    """
    columns = (*pick(Stretch), Column("again", "again"))
    blocks: list[Block] = []
    records, probed = [], []
    for bisection in bisections:
        varied = {"config": bisection.config, "property": bisection.name}
        count, text = len(bisection.asked), counted(len(bisection.flips), "change")
        if count == bisection.possible:
            text += f"; all {count:,} values were checked"
        else:
            text += (
                f"; {count:,} of {bisection.possible:,} values were checked, including those on "
                "both sides of each change; between two checked values with the same choice, "
                "more changes are possible (the JSON lists the checked values)"
            )
        blocks += [
            Heading(f"{bisection.config}, {bisection.name} varies", where),
            Table.of(columns, _folded(bisection.stretches)),
            Note(text),
        ]
        records += [varied | asdict(stretch) for stretch in bisection.stretches]
        probed.append(varied | {"asked": bisection.asked, "possible": bisection.possible})
    return Document(
        schema="profharness.bisect/1",
        title="Where the choice changes",
        blocks=tuple(blocks),
        fields=("config", "property", "first", "last", "choice"),
        records=tuple(records),
        extra={"asked": probed},
        answer=bisect_answer(bisections),
    )


def _folded(stretches: Sequence[Stretch]) -> Iterator[tuple[dict[str, str], Stretch]]:
    """Yield table rows. If two stretches repeat in equal steps, only the first pair gets rows.

    For example, a choice may repeat at every multiple of 8.
    """
    place = 0
    while place < len(stretches):
        pair, count, step = stretches[place : place + 2], 1, 0
        while following := stretches[place + 2 * count : place + 2 * count + 2]:
            step = stretches[place + 2].first - pair[0].first
            move = count * step
            if following != tuple(
                Stretch(each.first + move, each.last + move, each.choice) for each in pair
            ):
                break
            count += 1
        if count < MIN_REPEATS:
            yield {"again": ""}, pair[0]
            place += 1
            continue
        for offset, each in enumerate(pair):
            last = stretches[place + offset + 2 * (count - 1)].last
            yield {"again": f"every {step:,} up to {last:,}"}, each
        place += 2 * count
