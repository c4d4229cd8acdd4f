"""Select the stored run that a command shows.

A run can be given by its id or a prefix of it. `latest` selects the newest run that has the
data that the command needs.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Literal

from profharness.attention.config import FLAGS, STRIDES, Config
from profharness.errors import NotFoundError, join_few
from profharness.files import shell_command
from profharness.rows import TRACE_PROFILERS
from profharness.run import OBSERVE

Need = Literal[
    "run", "kernels", "kernels of configs", "times", "attention calls", "traced attention calls"
]
"""The data that a command needs. `run` is satisfied by any run that a user captured, timed or
ingested."""

# if there are no kernels, the cells show why
KERNELS_ELSE_CELLS: tuple[Need, ...] = ("kernels", "run")
_some = partial(join_few, most=8)
LATEST = "latest"
ALL_RUNS = "all"
_BACK = re.compile(rf"{LATEST}(?:~([0-9]{{1,9}}))?")
CHECKED, EXPLAINED = "verify", "explain"  # kinds of runs that `latest` skips
_CONFIG_FIELDS = tuple(field.name for field in fields(Config))

_ASKED = "(SELECT value FROM json_each(:profilers))"
_NO_RESULT = "c.status NOT IN ('ok', 'pending')"  # a failed cell counts as data, because running it again gives no more
_WATCHED = f"EXISTS (SELECT 1 FROM json_each(r.profilers) WHERE value IN {_ASKED})"
_LAUNCHED = f"""EXISTS (SELECT 1 FROM trace_cells tc JOIN traces t ON t.id = tc.trace_id
    WHERE tc.cell_id = c.id AND tc.launches > 0 AND t.profiler IN {_ASKED})"""
_KERNELS = f"({_LAUNCHED} OR ({_NO_RESULT} AND {_WATCHED}))"
_TIMES = f"""({_NO_RESULT} OR {_LAUNCHED}
    OR EXISTS (SELECT 1 FROM samples s WHERE s.cell_id = c.id))"""
_TRACED = f"""EXISTS (SELECT 1 FROM traces t
    WHERE t.run_id = r.id AND t.launches > 0 AND t.profiler IN {_ASKED})"""
_OF_CELL: dict[Need, str] = {
    "run": "1",
    "kernels": _KERNELS,
    "kernels of configs": _KERNELS,
    "times": _TIMES,
    "attention calls": "1",
    "traced attention calls": "1",
}
"""SQL conditions that are true if a cell c of a run r satisfies a need."""


def _some_cell(need: Need) -> str:
    return f"EXISTS (SELECT 1 FROM cells c WHERE c.run_id = r.id AND {_OF_CELL[need]})"


_CALLED = """EXISTS (SELECT 1 FROM calls a JOIN traces t ON t.id = a.trace_id
    WHERE t.run_id = r.id)"""
_OF_RUN: dict[Need, str] = {
    "run": "1",
    "kernels": f"({_TRACED} OR {_some_cell('kernels')})",
    "kernels of configs": _some_cell("kernels of configs"),
    "times": _some_cell("times"),
    "attention calls": f"({_CALLED} OR EXISTS (SELECT 1 FROM templates o WHERE o.run_id = r.id))",
    "traced attention calls": _CALLED,
}
"""SQL conditions that are true if a run r satisfies a need for any config."""


@dataclass(frozen=True)
class Selection:
    """A selection of stored rows. An empty filter selects all rows."""

    run: str | None = None
    """an id, a unique prefix, `latest`, `latest~N` or `all`

    None means `latest`, the newest run that has all the configs on all the backends.
    """
    configs: Sequence[Config] = ()
    backends: Sequence[str] = ()
    profilers: Sequence[str] = ()


def matching_configs(
    connection: sqlite3.Connection, configs: Sequence[Config] | None
) -> list[int] | None:
    """Return the ids of stored configs that match any of the configs.

    Return None, which means no filter, if `configs` is None.

    A config without a dtype matches any dtype.
    """
    if configs is None:
        return None
    rows = connection.execute(f"SELECT id, {', '.join(_CONFIG_FIELDS)} FROM configs").fetchall()
    matching = []
    for row in rows:
        values = dict(zip(_CONFIG_FIELDS, row[1:], strict=True))
        values |= {name: tuple(json.loads(values[name])) for name in STRIDES if values[name]}
        stored = Config(**(values | {name: bool(values[name]) for name in FLAGS}))
        if any(config.matches(stored) for config in configs):
            matching.append(row[0])
    return matching


def find_run(
    connection: sqlite3.Connection, path: Path, selection: Selection, needs: Sequence[Need]
) -> str:
    """Return the id of the selected run of the store at `path`.

    `latest` selects the newest run that satisfies a need. If no run satisfies the first need, the
    second need is tried, and so on. Raises NotFoundError if no run or more than one run matches.
    The message lists candidates.
    """
    ref = LATEST if selection.run is None else selection.run
    names = _names(connection)
    if not names:
        raise NotFoundError(f"{path} holds no run; `profharness capture` makes one")
    # a complete id may also be the prefix of another one
    if ref in names:
        return ref
    if back := _BACK.fullmatch(ref):
        return _latest(connection, path, selection, needs, int(back[1] or 0))
    # an empty string is a prefix of every id
    matching = [name for name in names if ref and name.startswith(ref)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise NotFoundError(f"run {ref!r} is ambiguous; it could be {_some(matching)}")
    raise NotFoundError(f"no run {ref!r} in {path}; there are {_some(names)}")


def answering_runs(
    connection: sqlite3.Connection, selection: Selection, need: Need
) -> Iterator[str]:
    """Yield the ids of runs that satisfy a need for all selected configs and backends, newest
    first.

    Runs of `explain` count only if configs are selected.
    """
    ids = [matching_configs(connection, [config]) or [] for config in selection.configs]
    if not all(ids):
        return
    values = {
        "profilers": json.dumps(tuple(selection.profilers or TRACE_PROFILERS)),
        "kinds": json.dumps([CHECKED] if ids else [CHECKED, EXPLAINED]),
        "configs": json.dumps(ids[0] if ids else []),
    }
    has_first = "r.id IN (SELECT run_id FROM cells WHERE config_id IN (SELECT value FROM json_each(:configs)))"
    runs = connection.execute(
        f"SELECT r.id, r.run FROM runs r WHERE {_OF_RUN[need]} AND {has_first if ids else '1'} "
        "AND r.kind NOT IN (SELECT value FROM json_each(:kinds)) "
        "ORDER BY r.created DESC, r.id DESC",
        values,
    ).fetchall()
    backends = selection.backends or (None,)
    places: Sequence[Sequence[int | None]] = ids or [[None]]
    wanted = [(any_of, name) for any_of in places for name in backends]
    for run_id, run in runs:
        present: set[tuple[int | None, str | None]] = {(None, None)}
        for config_id, name in connection.execute(
            "SELECT c.config_id, c.backend FROM cells c JOIN runs r ON r.id = c.run_id "
            f"WHERE r.id = :run AND {_OF_CELL[need]}",
            values | {"run": run_id},
        ):
            present |= {(config_id, name), (config_id, None), (None, name)}
        if all(
            any((wanted_id, name) in present for wanted_id in any_of) for any_of, name in wanted
        ):
            yield str(run)


def shown_by(connection: sqlite3.Connection, path: Path, run: str) -> str:
    """Return the command that shows the contents of a run.

    It shows the calls of an observed program, else kernels, else calls, else times, else the
    report.
    """
    if _has(connection, run, f"r.kind = '{OBSERVE}' AND {_OF_RUN['attention calls']}"):
        return shell_command("layers", run, store=path)
    if _has(connection, run, _OF_RUN["kernels"]):
        return shell_command("kernels", "--run", run, store=path)
    if _has(connection, run, _OF_RUN["attention calls"]):
        return shell_command("layers", run, store=path)
    if _has(connection, run, f"r.kind <> '{CHECKED}' AND {_OF_RUN['times']}"):
        return shell_command("bench", "--run", run, store=path)
    return shell_command("report", run, store=path)


def lack_of_kernels(connection: sqlite3.Connection, path: Path, run: str) -> str | None:
    """Return a message if a run has no kernels, else None.

    The message contains how the run was made and the command that shows the run.
    """
    if _has(connection, run, _OF_RUN["kernels"]):
        return None
    row = connection.execute("SELECT kind, profilers FROM runs WHERE run = ?", (run,)).fetchone()
    how = " ".join((row[0], *(f"--profiler {name}" for name in json.loads(row[1]))))
    return f"run {run} ({how}) has no kernels; see it with: {shown_by(connection, path, run)}"


def has(connection: sqlite3.Connection, run: str, need: Need) -> bool:
    """Return whether a run satisfies a need for any config."""
    return _has(connection, run, _OF_RUN[need])


def _has(connection: sqlite3.Connection, run: str, condition: str) -> bool:
    query = f"SELECT 1 FROM runs r WHERE r.run = :run AND {condition}"
    values = {"run": run, "profilers": json.dumps(TRACE_PROFILERS)}
    return connection.execute(query, values).fetchone() is not None


def _latest(
    connection: sqlite3.Connection,
    path: Path,
    selection: Selection,
    needs: Sequence[Need],
    back: int,
) -> str:
    """Return the newest matching run, or the one `back` runs before it. Raises NotFoundError."""
    runs: list[str] = []
    for need in needs:
        # evaluated lazily, because each run costs a query
        runs = runs or list(islice(answering_runs(connection, selection, need), back + 1))
    if back < len(runs):
        return runs[back]
    what = _wanted(selection, needs[0])
    if runs:
        raise NotFoundError(
            f"{LATEST}~{back}: only {len(runs)} stored run(s) have {what}: {_some(runs)}"
        )
    raise NotFoundError(f"no stored run has {what}; {_instead(connection, path, selection)}")


def _wanted(selection: Selection, need: Need) -> str:
    """Describe the data that no run has, as in `kernels of b2-…-fp16 on flash, math`."""
    word = need.removesuffix(" of configs") if selection.configs else need
    word = "been captured, timed or ingested" if need == "run" else word
    parts: list[tuple[str, Sequence[str]]] = [
        ("of", [config.label for config in selection.configs]),
        ("on", selection.backends),
        ("under", selection.profilers if need.startswith("kernels") else ()),
    ]
    return " ".join([word, *(f"{of} {_some(names)}" for of, names in parts if names)])


def _instead(connection: sqlite3.Connection, path: Path, selection: Selection) -> str:
    """Return a hint for the case that no run matches.

    It names the command that shows the newest run with the configs, or the command that lists all
    runs.
    """
    same_configs = Selection(None, selection.configs)
    others = _names(connection) if not selection.configs else []
    run = next(chain(answering_runs(connection, same_configs, "run"), others), None)
    lack = None if run is None else lack_of_kernels(connection, path, run)
    return lack or f"see what is stored with: {shell_command('runs', store=path)}"


def _names(connection: sqlite3.Connection) -> list[str]:
    """Return the ids of all runs, newest first."""
    # `created` has a resolution of one second. If two runs were created in the same second, the one
    # with the higher id is newer.
    rows = connection.execute("SELECT run FROM runs ORDER BY created DESC, id DESC")
    return [str(row[0]) for row in rows]
