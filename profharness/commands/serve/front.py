"""Create the first page of `serve`, with the stored runs, slow programs and changes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import combinations, islice
from typing import Any

from profharness.columns import pick
from profharness.commands.bench.answer import bench_answer
from profharness.commands.diff import diff_document
from profharness.commands.diff.compare import diff_cells, find_sides
from profharness.commands.layers.tables import layers_document
from profharness.commands.runs import shown_values
from profharness.errors import ProfharnessError
from profharness.measurements.evaluation import evaluate_bench
from profharness.program.layer_map import find_layers
from profharness.program.matching import find_program, match_layers
from profharness.render.document import Table, formatted_rows
from profharness.rows import RunRow
from profharness.stats import NOTABLE_LOSS
from profharness.store import Store

MAX_RUNS = 30
MAX_ANSWERS = 8  # maximum number of programs, and of captures, that are examined, newest first
MAX_SLOW = 3
REPORT = "/-/report/"
RUN_COLUMNS = pick(
    RunRow, "kind", "created", "device", "torch", "cells", "failed_cells", "launches"
)

STYLE = """<style>
.wide { overflow-x: auto; }
.wide th, .wide td { border-bottom: 1px solid #ccc; padding: 0.2em 1em 0.2em 0; white-space: nowrap; }
.metadata-description li { margin: 0.3em 0; }
</style>"""

Known = dict[tuple[str, ...], Any]
"""Maps a question and the contents of the runs in the question to the computed answer."""


def front_page(
    store: Store, known: Known, questions: Iterable[tuple[str, str, str]]
) -> tuple[str, Known]:
    """Return the page as HTML, and the results on the page.

    Pass these results as `known` for the next page to avoid computing them again. `questions`
    contains the address, title and description of each predefined query.
    """
    page = _Page(store, known)
    runs = store.runs()
    sections = (
        ("What is stored", page.stored(runs)),
        ("What is slow", page.slow(runs)),
        ("What changed", page.changed(runs)),
        ("Questions", _list(_question(*each) for each in questions)),
    )
    text = STYLE + "".join(f"<h2>{title}</h2>{body}" for title, body in sections)
    return text, page.used


@dataclass(frozen=True, slots=True)
class _Slow:
    """The answer about a run, and the time or loss that determines the rank of the run."""

    amount: float = 0.0
    answer: tuple[str, ...] = ()
    modules: frozenset[str] = frozenset()


class _Page:
    """The parts of the page for one state of the store."""

    def __init__(self, store: Store, known: Known) -> None:
        self.store, self.known = store, known
        self.used: Known = {}
        query = "SELECT run, content_hash FROM runs"
        self.contents: dict[str, str] = dict(store.connection.execute(query).fetchall())

    def stored(self, runs: Sequence[RunRow]) -> str:
        shown = runs[:MAX_RUNS]
        cells = formatted_rows(Table.of(RUN_COLUMNS, [(shown_values(row), row) for row in shown]))
        rows = [
            (_report(row.name, row.run), *map(escape, texts))
            for row, texts in zip(shown, cells, strict=True)
        ]
        more = f"<p>{len(runs) - MAX_RUNS} older runs are not listed.</p>"
        table = _table(("run", *(column.title for column in RUN_COLUMNS)), rows)
        return table + (more if len(runs) > MAX_RUNS else "")

    def slow(self, runs: Sequence[RunRow]) -> str:
        """Return the programs with the longest attention time, and the captures with the largest
        loss of `auto`.
        """
        programs = ((row, self._answered(self._layers, row.run)) for row in self._programs(runs))
        captures = (row for row in runs if row.cells)
        losses = (
            (row, self._answered(self._losses, row.run)) for row in islice(captures, MAX_ANSWERS)
        )
        parts = [
            ("Programs by attention time per step", _ranked(programs)),
            ("Captures by slowdown of <code>auto</code>", _ranked(losses)),
        ]
        found = "".join(f"<p>{title}:</p>{_list(lines)}" for title, lines in parts if lines)
        return (
            found or "<p>No program has attention kernels, and auto is not slow in any capture.</p>"
        )

    def changed(self, runs: Sequence[RunRow]) -> str:
        """Return the changes from the previous to the newest run, for programs and for captures."""
        names = {row.run: row.name for row in runs}
        lines = []
        for old, new in self._pairs(runs):
            with contextlib.suppress(ProfharnessError):  # another process may have deleted a run
                sentences = self._result(("changed", old, new), partial(self._diff, old, new))
                address = f"{REPORT}{escape(old)}/{escape(new)}"
                title = f"{escape(names[old])} → {escape(names[new])}"
                lines.append(f'<a href="{address}">{title}</a>: {escape(" ".join(sentences))}')
        return _list(lines) or "<p>No two stored runs have the same program or configs.</p>"

    def _programs(self, runs: Sequence[RunRow]) -> Iterator[RunRow]:
        """Yield the newest runs that recorded attention calls of a program."""
        found = (row for row in runs if self.store.has(row.run, "attention calls"))
        return islice(found, MAX_ANSWERS)

    def _answered(self, find: Callable[[str], _Slow], run: str) -> _Slow:
        with contextlib.suppress(ProfharnessError):  # another process may have deleted the run
            return find(run)
        return _Slow()

    def _losses(self, run: str) -> _Slow:
        """Return the answer of `bench` for a capture, and the largest significant loss of `auto`."""
        found: _Slow = self._result(("losses", run), partial(self._find_losses, run))
        return found

    def _find_losses(self, run: str) -> _Slow:
        result = evaluate_bench(self.store, run)
        worst = max((loss.regret for loss in result.losses if loss.real), default=0.0)
        return _Slow(worst if worst > NOTABLE_LOSS else 0.0, bench_answer(result)[:1])

    def _layers(self, run: str) -> _Slow:
        """Return the answer of `layers` for a run, and the attention time per step."""
        found: _Slow = self._result(("layers", run), partial(self._find_layers, run))
        return found

    def _find_layers(self, run: str) -> _Slow:
        layers = find_layers(self.store, run)
        modules = frozenset(row.module for row in layers.rows if row.module)
        return _Slow(layers.attention_ns, layers_document(layers).answer[:1], modules)

    def _pairs(self, runs: Sequence[RunRow]) -> Iterator[tuple[str, str]]:
        """Yield the older and the newer run of each comparison.

        Compare the two newest versions of one program, and the two newest captures that have a
        config and backend in common.
        """
        programs = (row.run for row in self._programs(runs))
        for new, old in combinations(programs, 2):
            alike = self._layers(new).modules & self._layers(old).modules
            if alike and self._result(("matched", old, new), partial(self._match, old, new)):
                yield old, new
                break
        captures = [row.run for row in runs if row.cells]
        for run in captures[:MAX_ANSWERS]:
            before = self.store.connection.execute(BEFORE, {"run": run}).fetchone()
            if before:
                yield str(before[0]), run
                break

    def _match(self, *runs: str) -> bool:
        """Return whether two programs share most layers, with a backward pass in both or neither."""
        programs = [find_program(self.store, run) for run in runs]
        layers = match_layers([each for each in programs if each])
        shared = [
            {side.backward_ns is None for side in layer.sides if side}
            for layer in layers
            if None not in layer.sides
        ]
        return 2 * len(shared) > len(layers) and all(len(kinds) == 1 for kinds in shared)

    def _diff(self, old: str, new: str) -> tuple[str, ...]:
        diff = diff_cells(*find_sides(self.store, old, new))
        return diff_document(diff).answer

    def _result(self, question: tuple[str, ...], find: Callable[[], Any]) -> Any:
        """Return the result from the previous page if the runs are unchanged, or else compute it."""
        _, *runs = question
        key = (*question, *(self.contents[run] for run in runs if run in self.contents))
        if key not in self.used:
            self.used[key] = self.known[key] if key in self.known else find()
        return self.used[key]


BEFORE = """SELECT r.run FROM runs a
    JOIN cells x ON x.run_id = a.id
    JOIN cells y ON y.config_id = x.config_id AND y.backend = x.backend
    JOIN runs r ON r.id = y.run_id AND r.kind = a.kind
    WHERE a.run = :run AND (r.created, r.id) < (a.created, a.id)
    ORDER BY r.created DESC, r.id DESC LIMIT 1"""


def _report(name: str, run: str) -> str:
    return f'<a href="{REPORT}{escape(run)}">{escape(name)}</a>'


def _ranked(found: Iterable[tuple[RunRow, _Slow]]) -> list[str]:
    """Return a line for each of the MAX_SLOW slowest runs, slowest first."""
    slow = sorted((each for each in found if each[1].amount), key=lambda each: -each[1].amount)
    return [
        f"{_report(row.name, row.run)}: {escape(' '.join(each.answer))}"
        for row, each in slow[:MAX_SLOW]
    ]


def _question(address: str, title: str, text: str) -> str:
    return f'<a href="{escape(address)}">{escape(title)}</a>: {escape(text)}'


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{line}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def _table(titles: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'
