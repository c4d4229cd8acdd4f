"""Named questions to the store, answered with the rows of `profharness.rows`; imports neither numpy
nor pandas.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from itertools import chain, groupby, starmap
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profharness.devices import Device, Occupancy, occupancy
from profharness.errors import ProfharnessError
from profharness.rows import (
    CallRow,
    CallSignature,
    CellRow,
    GapRow,
    KernelRow,
    LaunchRow,
    RangeRow,
    RankLaunches,
    RankRow,
    Refusal,
    RunRow,
    StepRow,
    Triple,
    triple,
)
from profharness.stats import Series
from profharness.store.calls import call_rows, gap_rows, step_rows, template_rows
from profharness.store.ranks import rank_launches, rank_rows
from profharness.store.schema import (
    connect,
    damaged,
    find_damage,
    forget_run,
    is_damage,
    transaction,
)
from profharness.store.selection import (
    ALL_RUNS,
    Need,
    Selection,
    find_run,
    has,
    lack_of_kernels,
    matching_configs,
    shown_by,
)
from profharness.store.verifications import (
    device_name,
    find_peaks,
    insert_peaks,
    verdicts,
    verification_rows,
)

if TYPE_CHECKING:
    from profharness.cases import VerificationRow
    from profharness.config import Config
    from profharness.devices import Peaks
    from profharness.run import Problem

Record = dict[str, Any]
Metrics = dict[str, tuple[float, str]]

FAILED = ("oom", "error", "crashed", "timeout")
# What reading garbage can raise; whether the file is damaged is looked at only then.
OF_DAMAGE = (sqlite3.Error, ValueError, LookupError, TypeError, ArithmeticError)
UNKNOWN = float("nan")  # a sum with one part unknown is unknown, and so are all shares of it
_DEVICE_COLUMNS = ", ".join(
    "device_index" if field.name == "index" else f"d.{field.name}" for field in fields(Device)
)
_CELL_FIELDS = tuple(field.name for field in fields(CellRow))
_KERNEL_FIELDS = tuple(field.name for field in fields(KernelRow))
_GROUP_KEYS = ("trace_id", "cell_id", "range_name_id", "kernel_id", "launch_config_id", "device")


def _series(rows: Sequence[tuple[str, int | None, int | None, int]]) -> Series:
    """The samples of one measurement with their processes and turns, where those are known."""
    turns = [
        (process, turn, len(list(part)))
        for (process, turn), part in groupby(rows, itemgetter(1, 2))
    ]
    complete = [(process, turn, n) for process, turn, n in turns if None not in (process, turn)]
    return Series.of((row[3] for row in rows), complete)


def _records(connection: sqlite3.Connection, sql: str, values: Sequence[Any] = ()) -> list[Record]:
    cursor = connection.execute(sql, values)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]


def _where(filters: Mapping[str, Iterable[Any] | None]) -> tuple[str, list[Any]]:
    """A condition on columns and its values; a filter that is None does not filter."""
    given = {column: list(values) for column, values in filters.items() if values is not None}
    conditions = [f"{name} IN ({', '.join('?' * len(given[name]))})" for name in given]
    return " AND ".join(conditions) or "1", [*chain.from_iterable(given.values())]


class Store:
    """An open store. Use it as a context manager; every method answers with plain rows."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self.connection = connection

    def __enter__(self) -> Store:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        """Raises StoreError in place of an error that comes of a file damaged inside."""
        try:
            if isinstance(error, OF_DAMAGE) and not isinstance(error, ProfharnessError):
                detail = error if is_damage(error) else find_damage(self.connection)
                if detail:
                    raise damaged(self.path, detail) from None
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection; the store must not be used after it."""
        self.connection.close()

    def runs(self) -> list[RunRow]:
        """All runs, newest first."""
        failed = ", ".join(f"'{status}'" for status in FAILED)
        rows = _records(
            self.connection,
            "SELECT run, created, source, kind, path, device, torch, profilers, warnings, "
            "rank, world_size, host_key, gpu_key, "
            "(SELECT count(*) FROM cells c WHERE c.run_id = r.id) AS cells, (SELECT count(*) "
            f"FROM cells c WHERE c.run_id = r.id AND c.status IN ({failed})) AS failed_cells, "
            "(SELECT coalesce(sum(launches), 0) FROM traces t WHERE t.run_id = r.id) AS launches "
            "FROM runs r ORDER BY created DESC, id DESC",
        )
        lists = ("profilers", "warnings")
        return [
            RunRow(**(row | {name: tuple(json.loads(row[name])) for name in lists})) for row in rows
        ]

    def warnings(self, runs: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """What was wrong with the traces of these runs when they were taken in; runs without are
        left out.
        """
        rows = self.connection.execute(
            "SELECT run, warnings FROM runs WHERE warnings <> '[]' ORDER BY created DESC, id DESC"
        )
        stored = {run: tuple(json.loads(texts)) for run, texts in rows}
        wanted = set(runs)
        return {run: texts for run, texts in stored.items() if run in wanted}

    def resolve(self, ref: str) -> str:
        """The id of the run meant by an id, a unique prefix, `latest` or `latest~N`.

        Raises NotFoundError, naming candidates, when no run or more than one is meant.
        """
        return self.find_run(Selection(ref), "run")

    def find_run(self, selection: Selection, *needs: Need) -> str:
        """The id of the selected run. `latest`, or none, is the newest one that has what is needed: the
        first of the needs that any run has, by default kernels.

        Raises NotFoundError where there is none.
        """
        return find_run(self.connection, self.path, selection, needs or ("kernels",))

    def find_runs(self, selection: Selection, *needs: Need) -> str:
        """As `find_run`, or `all`."""
        is_all = selection.run == ALL_RUNS
        return ALL_RUNS if is_all else self.find_run(selection, *needs)

    def shown_by(self, run: str) -> str:
        """The command that shows what a run has."""
        return shown_by(self.connection, self.path, run)

    def lack_of_kernels(self, run: str) -> str | None:
        """Says that a run has no kernels and what shows the rest of it; None where it has some."""
        return lack_of_kernels(self.connection, self.path, run)

    def has(self, run: str, need: Need) -> bool:
        """Whether a run has what a question needs."""
        return has(self.connection, run, need)

    def rows(
        self, selection: Selection, *, by_op: bool = False, needs: Sequence[Need] = ()
    ) -> tuple[list[KernelRow], list[CellRow]]:
        """The selected kernels and cells of the run that has what is needed. Raises NotFoundError
        where no run is meant.
        """
        run = self.find_runs(selection, *needs)
        configs, backends = selection.configs or None, selection.backends or None
        profilers = selection.profilers or None
        kernels = self.kernels(
            run, configs=configs, backends=backends, profilers=profilers, by_op=by_op
        )
        return kernels, self.cells(run, configs=configs, backends=backends)

    def kernels(
        self,
        run: str | None = None,
        *,
        configs: Sequence[Config] | None = None,
        backends: Sequence[str] | None = None,
        profilers: Sequence[str] | None = None,
        cells: Sequence[str] | None = None,
        by_op: bool = False,
    ) -> list[KernelRow]:
        """What ran, one row per cell, profiler, range, kernel, launch configuration and device.

        run None is the latest with kernels, `all` the whole store; None for a filter means no
        filter. A config without dtype matches any dtype.
        by_op keeps launches from different op paths apart; otherwise op_path is that of most
        launches.
        """
        where, values = _where(
            {
                "by_op": [by_op],
                "run": self._selected(run, "kernels"),
                "config_id": matching_configs(self.connection, configs),
                "backend": backends,
                "profiler": profilers,
                "cell": cells,
            }
        )
        rows = _records(
            self.connection,
            f"SELECT * FROM kernel_groups WHERE {where} "
            "ORDER BY created DESC, run_id DESC, cell_id, trace_id, first_ns, group_id",
            values,
        )
        # a share is of the cell's launches, or of the range's without a cell
        wholes = [
            (
                row["trace_id"],
                row["cell_id"],
                row["range_name_id"] if row["cell_id"] is None else None,
            )
            for row in rows
        ]
        totals: dict[tuple[Any, ...], float] = {}
        for whole, row in zip(wholes, rows, strict=True):
            part = UNKNOWN if row["total_ns"] is None else row["total_ns"]
            totals[whole] = totals.get(whole, 0) + part
        occupancy_of = _occupancies(self.connection)
        metrics = _group_metrics(self.connection, rows, by_op)
        return [
            _kernel_row(row, totals[whole], occupancy_of, values)
            for row, whole, values in zip(rows, wholes, metrics, strict=True)
        ]

    def _named(self, run: str | None) -> str:
        return self.find_run(Selection(run), "run")

    def _selected(self, run: str | None, need: Need) -> list[str] | None:
        """The runs that a question is about: None for `all`, else one."""
        name = self.find_runs(Selection(run), need)
        return None if name == ALL_RUNS else [name]

    def backends(self) -> list[str]:
        """The names of all backends that any stored cell ran on, in alphabetical order."""
        rows = self.connection.execute("SELECT DISTINCT backend FROM cells ORDER BY backend")
        return [str(row[0]) for row in rows]

    def cells(
        self,
        run: str | None = None,
        *,
        configs: Sequence[Config] | None = None,
        backends: Sequence[str] | None = None,
    ) -> list[CellRow]:
        """Cells in the run's order; run None is the latest, `all` the whole store."""
        where, values = _where(
            {
                "run": self._selected(run, "run"),
                "config_id": matching_configs(self.connection, configs),
                "backend": backends,
            }
        )
        rows = _records(
            self.connection,
            "SELECT c.*, r.run, cf.label AS config FROM cells c JOIN runs r ON r.id = c.run_id "
            f"JOIN configs cf ON cf.id = c.config_id WHERE {where} "
            "ORDER BY r.created DESC, r.id DESC, c.id",
            values,
        )
        return [self._cell(row) for row in rows]

    def _cell(self, row: Record) -> CellRow:
        samples = self.connection.execute(
            "SELECT measurement, process, turn, duration_ns FROM samples WHERE cell_id = ? "
            "ORDER BY measurement, ordinal",
            (row["id"],),
        )
        refusals = self.connection.execute(
            "SELECT code, message, source FROM refusals WHERE cell_id = ? ORDER BY ordinal",
            (row["id"],),
        )
        decoded = {
            "refusals": tuple(starmap(Refusal, refusals)),
            "warnings": tuple(json.loads(row["warnings"])),
            "samples": {
                name: _series(list(values)) for name, values in groupby(samples, itemgetter(0))
            },
            "clocks": json.loads(row["clocks"]),
            "tuning": json.loads(row["tuning"]) if row["tuning"] else None,
        }
        return CellRow(**({name: row[name] for name in _CELL_FIELDS if name in row} | decoded))

    def environment(self, run: str | None = None) -> dict[str, Any]:
        """The environment that a run was made in: flat keys to JSON values."""
        row = self.connection.execute(
            "SELECT e.data FROM environments e JOIN runs r ON r.environment_id = e.id "
            "WHERE r.run = ?",
            (self._named(run),),
        ).fetchone()
        data: dict[str, Any] = json.loads(row[0])
        return data

    def peaks(self, run: str | None = None, source: str | None = None) -> Peaks | None:
        """Peaks of the run's device; source (`measured`, `data sheet`) asks for one kind alone."""
        return find_peaks(self.connection, self.device_name(run), source)

    def device_name(self, run: str | None = None) -> str | None:
        """The run's GPU, else its processor, as its environment or its traces tell it."""
        name = device_name(self.environment(run))
        return name or next((device.name for device in self.devices(run)), None)

    def add_peaks(self, peaks: Peaks, created: str, environment: Mapping[str, Any]) -> None:
        """Keep measured peaks. Needs a store opened with write."""
        with transaction(self.connection):
            insert_peaks(self.connection, peaks, created, environment)

    def verifications(self, run: str | None = None) -> list[VerificationRow]:
        """The checks of a run of `verify` (None: the latest run), in its order."""
        return verification_rows(self.connection, self._named(run))

    def verdicts(self, run: str | None = None) -> dict[tuple[str, str], bool]:
        """(config label, backend) of the run's cells to whether checks in this store, made on the
        same device with the same torch and code, show it to be right; unchecked ones are left out.
        """
        return verdicts(self.connection, self._named(run))

    def wrong(self, run: str | None = None) -> set[tuple[str, str]]:
        """(config label, backend) of the run's cells that are shown to be wrong; never rank these."""
        return {place for place, right in self.verdicts(run).items() if not right}

    def problems(self, run: str | None = None) -> tuple[Problem, ...]:
        """What the profilers of a run failed to do, and what helps; empty for a foreign trace."""
        from profharness.run import Problem

        row = self.connection.execute(
            "SELECT problems FROM runs WHERE run = ?", (self._named(run),)
        ).fetchone()
        return tuple(
            Problem(**{**problem, "cells": tuple(problem["cells"])})
            for problem in json.loads(row[0])
        )

    def devices(self, run: str | None = None) -> list[Device]:
        """The GPUs that the traces of a run describe, by index."""
        rows = self.connection.execute(
            f"SELECT {_DEVICE_COLUMNS} FROM devices d JOIN runs r ON r.id = d.run_id "
            "WHERE r.run = ? ORDER BY device_index",
            (self._named(run),),
        )
        return list(starmap(Device, rows))

    def calls(self, run: str | None = None) -> list[CallRow]:
        """The attention calls of a program that was traced."""
        return call_rows(self.connection, self._named(run))

    def templates(self, run: str | None = None) -> list[CallSignature]:
        """The kinds of calls of a program that was observed, with how often each was made."""
        return template_rows(self.connection, self._named(run))

    def steps(self, run: str | None = None) -> list[StepRow]:
        """The steps of a run's traces, with how long the GPU was busy."""
        return step_rows(self.connection, self._named(run))

    def gaps(self, steps: Sequence[StepRow]) -> list[GapRow]:
        """The largest stretches within steps in which a GPU had nothing to do."""
        return gap_rows(self.connection, steps)

    def launches(
        self, run: str | None = None, *, profiler: str | None = None, cell: str | None = None
    ) -> Iterator[LaunchRow]:
        """Stream the launches of a run, trace by trace in the order of their files."""
        name = self.find_run(Selection(run))
        where, values = _where(
            {
                "run": [name],
                "profiler": None if profiler is None else [profiler],
                "cell": None if cell is None else [cell],
            }
        )
        columns = ", ".join(LaunchRow._fields)
        rows = self.connection.execute(
            f"SELECT {columns} FROM kernel_launches WHERE {where}", values
        )
        return map(LaunchRow._make, rows)

    def ranks(self, refs: Sequence[str] = ()) -> list[RankRow]:
        """The ranks of a job, by their numbers. refs are runs, prefixes of runs or folders; none is
        the newest job, one run the job that it is of. Raises NotFoundError.
        """
        return rank_rows(self.connection, self.path, refs)

    def rank_launches(self, ranks: Sequence[RankRow]) -> RankLaunches:
        """What the ranks launched, summed up by range, kernel and launch configuration."""
        return rank_launches(self.connection, ranks)

    def protocol(self, run: str) -> dict[str, Any]:
        """How a run's cells were run, by the names of `run.Protocol`; empty for a foreign trace."""
        (text,) = self.connection.execute(
            "SELECT protocol FROM runs WHERE run = ?", (self.resolve(run),)
        ).fetchone()
        return json.loads(text) if text else {}

    def bench_plan(self, run: str) -> dict[str, Any]:
        """By what plan a run's cells were timed, by the names of `run.BenchPlan`; empty for a run
        that is no bench.
        """
        (text,) = self.connection.execute(
            "SELECT bench FROM runs WHERE run = ?", (self.resolve(run),)
        ).fetchone()
        return json.loads(text) if text else {}

    def launch_metrics(self, launch_id: int) -> Metrics:
        """The hardware counters of one launch, with their units, by ncu's names."""
        rows = self.connection.execute(
            "SELECT name, value, unit FROM metrics WHERE launch_id = ? ORDER BY name", (launch_id,)
        )
        return {name: (value, unit) for name, value, unit in rows}

    def ranges(self, run: str | None = None) -> list[RangeRow]:
        """The user ranges of a run's traces, in trace order."""
        rows = self.connection.execute(
            "SELECT g.id, t.profiler, n.name, g.start_ns, g.duration_ns, g.pid, g.tid, "
            "g.parent_id, c.cell, g.iteration FROM ranges g JOIN traces t ON t.id = g.trace_id "
            "JOIN runs r ON r.id = t.run_id JOIN range_names n ON n.id = g.name_id "
            "LEFT JOIN cells c ON c.id = g.cell_id WHERE r.run = ? ORDER BY g.id",
            (self._named(run),),
        )
        return list(map(RangeRow._make, rows))

    def delete_run(self, ref: str) -> str:
        """Delete a run and all that hangs on it; its id. Needs a store opened with write."""
        name = self.resolve(ref)
        with transaction(self.connection):
            forget_run(self.connection, name)
        return name


def open_store(path: Path, *, write: bool = False) -> Store:
    """Open a store to read, or to write (then it is created where missing).

    Raises NotFoundError when there is none to read, StoreError for a foreign or newer file, which
    stays untouched.
    """
    return Store(path, connect(path, write=write))


def _kernel_row(
    row: Record,
    whole_ns: float,
    occupancy_of: Callable[..., Occupancy | None],
    metrics: Metrics,
) -> KernelRow:
    grid, block = (triple(*(row[f"{name}_{axis}"] for axis in "xyz")) for name in ("grid", "block"))
    shared = row["shared_bytes"]
    if shared is None and None not in (row["static_shared_bytes"], row["dynamic_shared_bytes"]):
        shared = row["static_shared_bytes"] + row["dynamic_shared_bytes"]
    occupied = occupancy_of(
        row["run_id"], row["device"], block, row["registers_per_thread"], shared
    )
    return KernelRow(
        **{name: row[name] for name in _KERNEL_FIELDS if name in row},
        grid=grid,
        block=block,
        share=row["total_ns"] / whole_ns if whole_ns > 0 else None,
        occupancy=occupied.fraction if occupied else None,
        occupancy_limiter=occupied.limiter if occupied else None,
        shared_share=occupied.shared_share if occupied else None,
        metrics=metrics,
    )


def _occupancies(connection: sqlite3.Connection) -> Callable[..., Occupancy | None]:
    rows = connection.execute(f"SELECT run_id, {_DEVICE_COLUMNS} FROM devices d")
    devices = {row[:2]: Device(*row[1:]) for row in rows}

    @cache
    def occupancy_of(
        run_id: int, index: int, block: Triple | None, registers: int | None, shared: int | None
    ) -> Occupancy | None:
        device = devices.get((run_id, index))
        if device is None or block is None or registers is None or shared is None:
            return None
        return occupancy(block[0] * block[1] * block[2], registers, shared, device)

    return occupancy_of


def _group_metrics(
    connection: sqlite3.Connection, rows: Sequence[Record], by_op: bool
) -> list[Metrics]:
    """For each row of `kernel_groups` the median of every metric over its launches, with the unit;
    empty where there is none. A trace without metrics costs one lookup.
    """
    spans = [
        span
        for trace_id in {row["trace_id"] for row in rows}
        for span in connection.execute(
            "SELECT first_launch_id, last_launch_id FROM traces WHERE id = ? AND EXISTS (SELECT 1 "
            "FROM metrics WHERE launch_id BETWEEN first_launch_id AND last_launch_id)",
            (trace_id,),
        )
    ]
    if not spans:
        return [{} for _ in rows]
    names = (*_GROUP_KEYS, "op_path_id") if by_op else _GROUP_KEYS
    groups = [tuple(row[name] for name in names) for row in rows]
    metrics: dict[tuple[Any, ...], Metrics] = {}
    for span in spans:
        metrics |= _medians(connection, span, names, set(groups))
    return [metrics.get(group, {}) for group in groups]


def _medians(
    connection: sqlite3.Connection,
    span: tuple[int, int],
    names: Sequence[str],
    groups: set[tuple[Any, ...]],
) -> dict[tuple[Any, ...], Metrics]:
    """Medians over the launches of a span of ids, by group; names are those of a group's values."""
    columns = ("g.name_id" if name == "range_name_id" else f"l.{name}" for name in names)
    launches = connection.execute(
        f"SELECT l.id, {', '.join(columns)} FROM launches l "
        "LEFT JOIN ranges g ON g.id = l.range_id WHERE l.id BETWEEN ? AND ?",
        span,
    )
    group_of = {row[0]: row[1:] for row in launches if row[1:] in groups}
    values: dict[tuple[Any, ...], dict[tuple[str, str], list[float]]] = {}
    for launch, name, unit, value in connection.execute(
        "SELECT launch_id, name, unit, value FROM metrics WHERE launch_id BETWEEN ? AND ? "
        "ORDER BY launch_id, name",
        (min(group_of, default=0), max(group_of, default=-1)),
    ):
        if launch in group_of:
            of_group = values.setdefault(group_of[launch], {})
            of_group.setdefault((name, unit), []).append(value)
    return {
        group: {name: (median(numbers), unit) for (name, unit), numbers in of_group.items()}
        for group, of_group in values.items()
    }


def median(numbers: Sequence[float]) -> float:
    # The module statistics takes longer to import than most answers take.
    ordered, middle = sorted(numbers), len(numbers) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
