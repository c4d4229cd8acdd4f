"""Select the stored run that a command shows.

A run can be given by its id, by a prefix of its id, by its name, or by the name of its trace. `latest`
selects the newest run that has the data that the command needs.
"""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import msgspec

from profharness.attention.config import (
    MOST_NAMED,
    Config,
    held_configs_text,
    nearest_config,
    parse_config,
)
from profharness.errors import (
    AmbiguousNameError,
    NotFoundError,
    UnknownNameError,
    counted,
    did_you_mean,
    join_few,
    near_names,
    with_clause,
)
from profharness.files import shell_command
from profharness.rows import LAUNCH_PROFILERS
from profharness.store.names import StoredRun, match_path, name_runs, newest_of, typed_path
from profharness.store.tables import records

Need = Literal[
    "run",
    "kernels",
    "kernels of configs",
    "times",
    "attention calls",
    "traced attention calls",
    "attention calls or configs",
    "cells",
]
"""The data that a command needs. Any captured, timed or ingested run satisfies the need `run`."""

# If no run has kernels, select any run, because its cells show why there are no kernels.
KERNELS_ELSE_CELLS: tuple[Need, ...] = ("kernels", "run")
_some = partial(join_few, most=MOST_NAMED)
SHOWN_RUNS = 3  # maximum number of runs that the message about an unknown run names
LATEST = "latest"
ALL_RUNS = "all"
_BACK = re.compile(rf"{LATEST}(?:~([0-9]{{1,9}}))?")
CHECKED, EXPLAINED = "verify", "explain"  # kinds of runs that `latest` skips
BENCHED = "bench"
# `created` has a resolution of one second, so ids order the runs of the same second
NEWEST_FIRST = "ORDER BY r.created DESC, r.id DESC"

_OLDER: ContextVar[dict[str | None, str] | None] = ContextVar("older", default=None)

# SQL conditions on a trace t, a cell c and a run r
_REQUESTED = "(SELECT value FROM json_each(:profilers))"
# A cell that ended without a result counts as data, because running it again gives no result.
_NO_RESULT = "c.status NOT IN ('ok', 'pending')"
_RECORDED = f"EXISTS (SELECT 1 FROM json_each(r.profilers) WHERE value IN {_REQUESTED})"
_LAUNCHED = f"""EXISTS (SELECT 1 FROM trace_cells tc JOIN traces t ON t.id = tc.trace_id
    WHERE tc.cell_id = c.id AND tc.launches > 0 AND t.profiler IN {_REQUESTED})"""
_KERNELS = f"({_LAUNCHED} OR ({_NO_RESULT} AND {_RECORDED}))"
_TIMES = f"""({_NO_RESULT} OR {_LAUNCHED}
    OR EXISTS (SELECT 1 FROM samples s WHERE s.cell_id = c.id))"""
_TRACED = f"""EXISTS (SELECT 1 FROM traces t
    WHERE t.run_id = r.id AND t.launches > 0 AND t.profiler IN {_REQUESTED})"""
_CALLED = """EXISTS (SELECT 1 FROM calls a JOIN traces t ON t.id = a.trace_id
    WHERE t.run_id = r.id)"""
_OBSERVED = "EXISTS (SELECT 1 FROM templates o WHERE o.run_id = r.id)"
_SOME_CELL = "EXISTS (SELECT 1 FROM cells c WHERE c.run_id = r.id AND {})"
_CONDITIONS: dict[Need, tuple[str, str]] = {
    "run": ("1", "1"),
    "kernels": (f"({_TRACED} OR {_SOME_CELL.format(_KERNELS)})", _KERNELS),
    "kernels of configs": (_SOME_CELL.format(_KERNELS), _KERNELS),
    "times": (_SOME_CELL.format(_TIMES), _TIMES),
    "attention calls": (f"({_CALLED} OR {_OBSERVED})", "1"),
    "traced attention calls": (_CALLED, "1"),
    "attention calls or configs": (
        f"({_CALLED} OR {_OBSERVED} OR {_SOME_CELL.format('1')})",
        "1",
    ),
    "cells": (_SOME_CELL.format("1"), "1"),
}
"""Maps each need to two SQL conditions.

The first condition is true if run r satisfies the need for any config. The second condition is true
if cell c satisfies the need.
"""


@dataclass(frozen=True)
class Selection:
    """A selection of stored rows. An empty filter selects all rows."""

    run: str | None = None
    """An id, a unique prefix of an id, a name, the name of a trace, `latest`, `latest~N` or `all`.

    None means the newest run that has all the configs on all the backends. `latest` is the same run
    for all configs and backends.
    """
    configs: Sequence[Config] = ()
    backends: Sequence[str] = ()
    profilers: Sequence[str] = ()


@contextlib.contextmanager
def older_runs() -> Iterator[Mapping[str | None, str]]:
    """Yield a mapping that receives a sentence for each `latest` that is not the newest run."""
    older: dict[str | None, str] = {}
    token = _OLDER.set(older)
    try:
        yield older
    finally:
        _OLDER.reset(token)


class RunFinder:
    """Queries that find runs in a store."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self.connection = connection

    def resolve(self, ref: str | None) -> str:
        """Return the id of a run given by an id, a unique prefix, its name, a trace, or `latest~N`.

        If `ref` is None, return the latest run. Raise NotFoundError if no run or more than one run
        matches. The message lists candidates.
        """
        return self.find_run(Selection(ref), "run")

    def find_runs(self, selection: Selection, *needs: Need) -> str:
        """Return `all` if all runs are selected. Otherwise, return the result of `find_run`."""
        return ALL_RUNS if selection.run == ALL_RUNS else self.find_run(selection, *needs)

    def find_run(self, selection: Selection, *needs: Need) -> str:
        """Return the id of the selected run.

        `latest` and None select the newest run that satisfies a need, and None only a run with all
        selected configs and backends. If no run satisfies the first need, try the second need, and
        so on. The default need is `kernels`. Raise NotFoundError if no run or more than one run
        matches. The message lists candidates.
        """
        ref = LATEST if selection.run is None else selection.run
        runs = self.stored_runs()
        ids = [each.run for each in runs]
        if not runs:
            raise NotFoundError(
                f"{self.path} contains no runs; create one with `profharness capture`"
            )
        # an id may also be the prefix of another id
        if ref in ids:
            return ref
        if back := _BACK.fullmatch(ref):
            return self._latest(selection, needs or ("kernels",), int(back[1] or 0))
        names = name_runs(runs)
        named = [run for run, name in names.items() if name == ref]
        # an empty string is a prefix of every id
        begun = [run for run in ids if ref and run.startswith(ref)]
        for matching in (named, begun, match_path(ref, runs), self._with_trace(ref, runs)):
            if len(matching) == 1:
                return matching[0]
            if matching:
                could = _some([names[run] for run in matching])
                raise AmbiguousNameError(f"run {ref!r} is ambiguous; choose from {could}")
        near = near_names(ref, [*names.values(), *ids, *[LATEST] * ref.isalpha()])
        there = did_you_mean(near) or f"choose from {join_few([*names.values()], SHOWN_RUNS)}"
        if len(names) > SHOWN_RUNS:
            listing = shell_command("runs", store=self.path)
            there = with_clause(there, f"to list all runs, use: {listing}")
        raise UnknownNameError(f"no run {ref!r} in {self.path}; {there}")

    def run_name(self, run: str) -> str:
        """Return the name of a run in the output of this command."""
        return self.run_names().get(run, run)  # another process may have deleted it

    def run_names(self) -> dict[str, str]:
        """Return the names of all runs, as `name_runs` chooses them.

        A run that the user typed as a file or folder is named by the typed path in this command.
        """
        runs = self.stored_runs()
        return name_runs(replace(each, path=typed_path(each.run, each.path)) for each in runs)

    def path_of(self, run: str) -> str:
        """Return the file or folder from which a run was ingested, or "" if it is not stored."""
        row = self.connection.execute("SELECT path FROM runs WHERE run = ?", (run,)).fetchone()
        return str(row[0]) if row else ""

    def run_reference(self, run: str) -> str:
        """Return the text with which a user can select a run.

        Return the name of the run, or the id if another file in the working folder has this name.
        If the user typed a file that is stored under another name, return the typed path.
        """
        name, typed = self.run_name(run), typed_path(run, self.path_of(run))
        if name == run:
            return run
        path = Path(typed)
        if Path(name).exists():
            return name if path.exists() and path.samefile(name) else run
        if run in match_path(name, self.stored_runs()):
            return name
        return typed if path.exists() else run

    def has(self, run: str, need: Need) -> bool:
        """Return whether a run satisfies a need for any config."""
        return self._is(run, _CONDITIONS[need][0])

    def shown_by(self, run: str) -> str:
        """Return the command that shows the contents of a run.

        Choose `bench` for the times of a benchmark. For other runs, choose the first of `layers`,
        `kernels`, `bench` and `report` for which the run has data.
        """
        command = "report"
        if self.has(run, "attention calls"):
            command = "layers"
        elif self._is(run, f"r.kind = '{BENCHED}'") and self.has(run, "times"):
            command = "bench"
        elif self.has(run, "kernels"):
            command = "kernels"
        elif self.has(run, "times") and not self._is(run, f"r.kind = '{CHECKED}'"):
            command = "bench"
        return shell_command(command, self.run_reference(run), store=self.path)

    def backends(self) -> list[str]:
        """Return the names of the backends of all stored cells, in alphabetical order."""
        rows = self.connection.execute("SELECT DISTINCT backend FROM cells ORDER BY backend")
        return [str(name) for (name,) in rows]

    def lack_of_kernels(self, run: str) -> str | None:
        """Return a message if a run has no kernels, else None.

        The message describes how the run was made, and contains the command that shows the run.
        """
        if self.has(run, "kernels"):
            return None
        query = "SELECT kind, profilers FROM runs WHERE run = ?"
        kind, profilers = self.connection.execute(query, (run,)).fetchone()
        how = " ".join((kind, *(f"--profiler {name}" for name in json.loads(profilers))))
        name = self.run_name(run)
        return f"run {name} ({how}) has no kernels; to see it, use: {self.shown_by(run)}"

    def require_cells(
        self, run: str, configs: Sequence[Config] = (), backends: Sequence[str] = ()
    ) -> None:
        """Raise NotFoundError unless a run has cells of each of the given configs and backends.

        Raise UsageError for an unknown backend.
        """
        query = (
            "SELECT cf.label, c.backend FROM cells c JOIN runs r ON r.id = c.run_id "
            "JOIN configs cf ON cf.id = c.config_id WHERE r.run = ? ORDER BY c.id"
        )
        cells = self.connection.execute(query, (run,)).fetchall()
        labels = list(dict.fromkeys(label for label, _ in cells))
        held = list(dict.fromkeys(backend for _, backend in cells))
        self.check_backends([backend for backend in backends if backend not in held])
        name = self.run_name(run)
        if not cells:
            query = "SELECT kind FROM runs WHERE run = ?"
            (kind,) = self.connection.execute(query, (run,)).fetchone()
            raise NotFoundError(
                f"run {name} ({kind}) has no cells; to show it, use: {self.shown_by(run)}"
            )
        stored = [parse_config(label) for label in labels]
        for config in configs:
            if not any(map(config.matches, stored)):
                raise NotFoundError(
                    f"run {name} has no cell for config {config}; {held_configs_text(config, labels)}"
                )
        for backend in backends:
            if backend not in held:
                raise NotFoundError(
                    f"run {name} has no cell for backend {backend}; it has {join_few(held, MOST_NAMED)}"
                )

    def check_backends(self, names: Sequence[str]) -> None:
        """Raise UsageError if a backend is neither stored nor known on this machine."""
        stored = self.backends() if names else []
        for name in names:
            if name not in stored:
                # imported here because it searches for implementations
                from profharness.attention.backends import find_backend

                find_backend(name, stored=stored)

    def no_such_cell(self, run: str) -> NotFoundError:
        """Return the error for a config and a backend that no cell of a run, or of `all`, has."""
        where = "the store" if run == ALL_RUNS else f"run {self.run_name(run)}"
        see = shell_command("kernels", self.run_reference(run), store=self.path)
        return NotFoundError(
            f"{where} has no cell with these configs and backends; to show its cells, use: {see}"
        )

    def config_ids(self, configs: Sequence[Config]) -> list[int]:
        """Return the ids of stored configs that match any of the given configs.

        A config without a dtype matches any dtype.
        """
        rows = records(self.connection, "SELECT * FROM configs")
        stored = msgspec.convert(rows, list[Config], strict=False)
        return [
            row["id"]
            for row, config in zip(rows, stored, strict=True)
            if any(wanted.matches(config) for wanted in configs)
        ]

    def _with_trace(self, name: str, runs: Sequence[StoredRun]) -> list[str]:
        """Return the ids of the runs with a trace file of this name, only the newest of each path."""
        found = self.connection.execute(
            "SELECT r.run FROM traces t JOIN runs r ON r.id = t.run_id WHERE t.path = ?", (name,)
        )
        having = {run for (run,) in found}
        return [*newest_of(each for each in runs if each.run in having).values()]

    def _is(self, run: str, condition: str) -> bool:
        query = f"SELECT 1 FROM runs r WHERE r.run = :run AND {condition}"
        values = {"run": run, "profilers": json.dumps(LAUNCH_PROFILERS)}
        return self.connection.execute(query, values).fetchone() is not None

    def stored_runs(self) -> list[StoredRun]:
        """Return the ids and paths of all runs, newest first."""
        rows = self.connection.execute(f"SELECT run, source, path FROM runs r {NEWEST_FIRST}")
        return [StoredRun(*row) for row in rows]

    def _matching(self, selection: Selection, need: Need) -> Iterator[str]:
        """Yield the runs that satisfy a need for all selected configs and backends, newest first.

        Ignore runs of `explain` unless configs are selected.
        """
        ids = [self.config_ids([config]) for config in selection.configs]
        if not all(ids):
            return
        values: dict[str, Any] = {
            "profilers": json.dumps(tuple(selection.profilers or LAUNCH_PROFILERS)),
            "kinds": json.dumps([CHECKED] if ids else [CHECKED, EXPLAINED]),
            "configs": json.dumps(ids[0] if ids else []),
        }
        of_run, of_cell = _CONDITIONS[need]
        has_first = (
            "r.id IN (SELECT run_id FROM cells WHERE config_id IN "
            "(SELECT value FROM json_each(:configs)))"
        )
        runs = self.connection.execute(
            f"SELECT r.id, r.run FROM runs r WHERE {of_run} AND {has_first if ids else '1'} "
            f"AND r.kind NOT IN (SELECT value FROM json_each(:kinds)) {NEWEST_FIRST}",
            values,
        ).fetchall()
        any_config: list[list[int | None]] = [[None]]
        for run_id, run in runs:
            present: set[tuple[int | None, str | None]] = {(None, None)}
            for config_id, name in self.connection.execute(
                "SELECT c.config_id, c.backend FROM cells c JOIN runs r ON r.id = c.run_id "
                f"WHERE r.id = :run AND {of_cell}",
                values | {"run": run_id},
            ):
                present |= {(config_id, name), (config_id, None), (None, name)}
            if all(
                any((config_id, name) in present for config_id in any_of)
                for any_of in ids or any_config
                for name in selection.backends or (None,)
            ):
                yield str(run)

    def _latest(self, selection: Selection, needs: Sequence[Need], back: int) -> str:
        """Skip the `back` newest matching runs, and return the next matching run.

        Raise NotFoundError if there are too few matching runs.
        """
        if selection.run is not None:
            # A run that the user named is not replaced by an older run that has the configs.
            selection = replace(selection, configs=(), backends=())
        for need in needs:
            # evaluated lazily, because each run costs a query
            runs = list(islice(self._matching(selection, need), back + 1))
            if back < len(runs):
                self._note_older(runs[back], back, selection, need)
                return runs[back]
            if runs:
                break
        what = _described(selection, needs[0])
        if runs:
            raise NotFoundError(
                f"{LATEST}~{back}: only {counted(len(runs), 'stored run has', 'stored runs have')} {what}: "
                f"{_some(list(map(self.run_name, runs)))}"
            )
        same_configs = Selection(None, selection.configs)
        others = [each.run for each in self.stored_runs()] if not selection.configs else []
        run = next(chain(self._matching(same_configs, "run"), others), None)
        lack = None if run is None else self.lack_of_kernels(run)
        self.check_backends(selection.backends)
        hint = lack or f"to see what is stored, use: {shell_command('runs', store=self.path)}"
        # If a run has the configs, it lacks something else.
        near = self._near_configs(selection.configs) if run is None else []
        hint = with_clause(did_you_mean(near), hint) if near else hint
        raise NotFoundError(f"no stored run has {what}; {hint}")

    def _note_older(self, run: str, back: int, selection: Selection, need: Need) -> None:
        """Let `older_runs` receive a sentence if the selected run is not the newest of all runs."""
        if (older := _OLDER.get()) is None:
            return
        older.pop(selection.run, None)
        newest = self.stored_runs()[back].run
        name, what = self.run_name(run), _described(selection, need)
        if back and newest != run:
            older[selection.run] = (
                f"Using {name} as {selection.run}, which counts only runs that have {what}."
            )
        elif newest != run:
            query = "SELECT kind FROM runs WHERE run = ?"
            (kind,) = self.connection.execute(query, (newest,)).fetchone()
            older[selection.run] = (
                f"Using {name}, the latest run that has {what}, not the newest run, "
                f"{self.run_name(newest)} ({kind})."
            )

    def _near_configs(self, configs: Sequence[Config]) -> list[str]:
        """Return the stored config that is most similar to the first config that is not stored."""
        labels = [label for (label,) in self.connection.execute("SELECT label FROM configs")]
        stored = list(map(parse_config, labels))
        absent = (each for each in configs if not any(map(each.matches, stored)))
        return next((nearest_config(each, labels) for each in absent), [])


def _described(selection: Selection, need: Need) -> str:
    """Return what a run must have, such as `kernels of b2-…-fp16 on flash, math`."""
    word = need.removesuffix(" of configs") if selection.configs else need
    parts: list[tuple[str, Sequence[str]]] = [
        ("of", [config.label for config in selection.configs]),
        ("on", selection.backends),
    ]
    words = [word if word != "run" else "been captured, timed or ingested"]
    words += [f"{of} {_some(names)}" for of, names in parts if names]
    named = () if {*LAUNCH_PROFILERS} <= {*selection.profilers} else selection.profilers
    if named and need.startswith("kernels"):
        words.append(f"under {' or '.join(named)}")  # one of the profilers is enough
    return " ".join(words)
