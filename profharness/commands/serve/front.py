"""The first page of `serve`: what is stored, what is slow, and what changed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from html import escape
from itertools import combinations, islice
from typing import Any

from profharness.columns import pick
from profharness.commands.diff import diff_document
from profharness.commands.diff.compare import diff_cells, find_sides
from profharness.commands.kernels.tables import kernels_document
from profharness.commands.layers.tables import layers_document
from profharness.errors import ProfharnessError
from profharness.program.layer_map import find_layers
from profharness.program.matching import find_program, match_layers
from profharness.render.document import Table, formatted_rows
from profharness.rows import RunRow
from profharness.store import Store

MAX_RUNS = 30
MAX_ANSWERS = 8
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
"""Maps what was computed for a page, and the contents that it was computed from, to the result."""


def front_page(
    store: Store, known: Known, questions: Iterable[tuple[str, str, str]]
) -> tuple[str, Known]:
    """Return the page as HTML, and the results on it, with which the next page is faster.

    `questions` are the address, title and description of each predefined query.
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


class _Page:
    """The parts of the page for one state of the store."""

    def __init__(self, store: Store, known: Known) -> None:
        self.store, self.known = store, known
        self.used: Known = {}
        query = "SELECT run, content_hash FROM runs"
        self.contents: dict[str, str] = dict(store.connection.execute(query).fetchall())

    def stored(self, runs: Sequence[RunRow]) -> str:
        shown = runs[:MAX_RUNS]
        cells = formatted_rows(Table.of(RUN_COLUMNS, shown))
        rows = [
            (_report(row.name, row.run), *map(escape, texts))
            for row, texts in zip(shown, cells, strict=True)
        ]
        more = f"<p>{len(runs) - MAX_RUNS} older runs are not listed.</p>"
        table = _table(("run", *(column.title for column in RUN_COLUMNS)), rows)
        return table + (more if len(runs) > MAX_RUNS else "")

    def slow(self, runs: Sequence[RunRow]) -> str:
        """Return the answer of `layers` for the newest programs, and of `kernels` for captures."""
        found = ((row, self._answer(row.run)) for row in runs)
        answers = (
            _report(row.name, row.run) + f": {escape(' '.join(answer))}"
            for row, answer in found
            if answer
        )
        return _list(islice(answers, MAX_ANSWERS)) or "<p>No run has attention kernels.</p>"

    def changed(self, runs: Sequence[RunRow]) -> str:
        """Return what changed from the run before to the newest run, for programs and for configs."""
        names = {row.run: row.name for row in runs}
        lines = []
        for old, new in self._pairs(runs):
            with contextlib.suppress(ProfharnessError):  # another process may have deleted a run
                sentences = self._result(("changed", old, new), partial(self._diff, old, new))
                address = f"{REPORT}{escape(old)}/{escape(new)}"
                title = f"{escape(names[old])} → {escape(names[new])}"
                lines.append(f'<a href="{address}">{title}</a>: {escape(" ".join(sentences))}')
        return _list(lines) or "<p>No two runs of the same program or configs are stored.</p>"

    def _answer(self, run: str) -> tuple[str, ...]:
        with contextlib.suppress(ProfharnessError):  # another process may have deleted the run
            if self.store.has(run, "attention calls"):
                return self._layers(run)[0]
            if self.store.has(run, "kernels"):
                found: tuple[str, ...]
                found = self._result(("kernels", run), partial(self._find_kernels, run))
                return found
        return ()

    def _find_kernels(self, run: str) -> tuple[str, ...]:
        return kernels_document(self.store.kernels(run), self.store.cells(run)).answer

    def _layers(self, run: str) -> tuple[tuple[str, ...], frozenset[str]]:
        """Return the answer of `layers` for a run, and the names of its modules."""
        found: tuple[tuple[str, ...], frozenset[str]]
        found = self._result(("layers", run), partial(self._find_layers, run))
        return found

    def _find_layers(self, run: str) -> tuple[tuple[str, ...], frozenset[str]]:
        layers = find_layers(self.store, run)
        modules = frozenset(row.module for row in layers.rows if row.module)
        return layers_document(layers).answer, modules

    def _pairs(self, runs: Sequence[RunRow]) -> Iterator[tuple[str, str]]:
        """Yield the older and the newer run of each comparison.

        These are the two newest programs with a common layer of equal size, and the two newest captures with a
        common config and backend.
        """
        programs = (row.run for row in runs if self.store.has(row.run, "attention calls"))
        for new, old in combinations(islice(programs, MAX_ANSWERS), 2):
            alike = self._layers(new)[1] & self._layers(old)[1]
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
        """Return whether two programs have a common layer of equal size."""
        programs = [find_program(self.store, run) for run in runs]
        layers = match_layers([each for each in programs if each])
        return any(None not in layer.sides for layer in layers)

    def _diff(self, old: str, new: str) -> tuple[str, ...]:
        diff = diff_cells(*find_sides(self.store, old, new))
        return diff_document(diff).answer

    def _result(self, question: tuple[str, ...], find: Callable[[], Any]) -> Any:
        """Return a result from the previous page if the runs have not changed since."""
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


def _question(address: str, title: str, text: str) -> str:
    return f'<a href="{escape(address)}">{escape(title)}</a>: {escape(text)}'


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{line}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def _table(titles: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'
