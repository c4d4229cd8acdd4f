"""Query the store. Most queries return objects of the classes in `profharness.rows`.

This module imports neither numpy nor pandas.
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

from profharness.device_types import device_name
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
    is_altered,
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
from profharness.store.tables import GROUP_KEYS, forget_run, records
from profharness.store.verifications import (
    find_peaks,
    insert_peaks,
    verdicts,
    verification_rows,
)

if TYPE_CHECKING:
    from profharness.attention.cases import VerificationRow
    from profharness.attention.config import Config
    from profharness.devices import Peaks
    from profharness.run import Problem

Record = dict[str, Any]
Metrics = dict[str, tuple[float, str]]

FAILED = ("oom", "error", "crashed", "timeout")
# Errors that reading a damaged file can raise. The file is checked only after one of them.
OF_DAMAGE = (sqlite3.Error, ValueError, LookupError, TypeError, ArithmeticError)
UNKNOWN = float(
    "nan"
)  # if a part of a sum is unknown, the sum and all shares of the sum are unknown
_DEVICE_COLUMNS = ", ".join(
    "device_index" if field.name == "index" else f"d.{field.name}" for field in fields(Device)
)
_CELL_FIELDS = tuple(field.name for field in fields(CellRow))
_KERNEL_FIELDS = tuple(field.name for field in fields(KernelRow))


def _series(rows: Sequence[tuple[str, int | None, int | None, int]]) -> Series:
    """Return the samples of one measurement, with their processes and turns if both are known."""
    turns = [
        (process, turn, len(list(part)))
        for (process, turn), part in groupby(rows, itemgetter(1, 2))
    ]
    complete = [(process, turn, n) for process, turn, n in turns if None not in (process, turn)]
    return Series.of((row[3] for row in rows), complete)


def _where(filters: Mapping[str, Iterable[Any] | None]) -> tuple[str, list[Any]]:
    """Return an SQL condition on columns and its parameters. Filters that are None are ignored."""
    given = {column: list(values) for column, values in filters.items() if values is not None}
    conditions = [f"{name} IN ({', '.join('?' * len(given[name]))})" for name in given]
    return " AND ".join(conditions) or "1", [*chain.from_iterable(given.values())]


class Store:
    """An open store. Use it as a context manager."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self.connection = connection

    def __enter__(self) -> Store:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        """Close the store. If a damaged file caused the error, raise StoreError instead of it."""
        try:
            if isinstance(error, OF_DAMAGE) and not isinstance(error, ProfharnessError):
                known = is_damage(error) or is_altered(error)
                detail = error if known else find_damage(self.connection)
                if detail:
                    raise damaged(self.path, detail) from None
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection. The store cannot be used afterwards."""
        self.connection.close()

    def runs(self) -> list[RunRow]:
        """Return all runs, newest first."""
        failed = ", ".join(f"'{status}'" for status in FAILED)
        rows = records(
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
        """Return the warnings from ingesting these runs. Runs without warnings are omitted."""
        rows = self.connection.execute(
            "SELECT run, warnings FROM runs WHERE warnings <> '[]' ORDER BY created DESC, id DESC"
        )
        stored = {run: tuple(json.loads(texts)) for run, texts in rows}
        wanted = set(runs)
        return {run: texts for run, texts in stored.items() if run in wanted}

    def resolve(self, ref: str | None) -> str:
        """Return the id of a run given by an id, a unique prefix, `latest` or `latest~N`.

        None selects the latest run. Raises NotFoundError if no run or more than one run matches.
        The message lists candidates.
        """
        return self.find_run(Selection(ref), "run")

    def find_run(self, selection: Selection, *needs: Need) -> str:
        """Return the id of the selected run.

        `latest` and None select the newest run that satisfies a need. If no run satisfies the first
        need, the second need is tried, and so on. The default need is `kernels`.
        Raises NotFoundError if no run matches.
        """
        return find_run(self.connection, self.path, selection, needs or ("kernels",))

    def find_runs(self, selection: Selection, *needs: Need) -> str:
        """Return `all` if all runs are selected, else the id of the run that `find_run` returns."""
        is_all = selection.run == ALL_RUNS
        return ALL_RUNS if is_all else self.find_run(selection, *needs)

    def shown_by(self, run: str) -> str:
        """Return the command that shows the contents of a run."""
        return shown_by(self.connection, self.path, run)

    def lack_of_kernels(self, run: str) -> str | None:
        """Return a message if a run has no kernels, else None.

        The message contains the command that shows the run.
        """
        return lack_of_kernels(self.connection, self.path, run)

    def has(self, run: str, need: Need) -> bool:
        """Return whether a run satisfies a need."""
        return has(self.connection, run, need)

    def rows(
        self, selection: Selection, *, by_op: bool = False, needs: Sequence[Need] = ()
    ) -> tuple[list[KernelRow], list[CellRow]]:
        """Return the selected kernels and cells of the run that `find_runs` selects.

        Raises NotFoundError if no run matches.
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
        """Return one row per cell, profiler, range, kernel, launch configuration and device.

        `run` is None for the latest run with kernels, or `all` for the whole store. A filter that
        is None selects all rows. A config without a dtype matches any dtype. If `by_op` is True,
        return one row per op path. Otherwise `op_path` is the op path with the most launches.
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
        rows = records(
            self.connection,
            f"SELECT * FROM kernel_groups WHERE {where} "
            "ORDER BY created DESC, run_id DESC, cell_id, trace_id, first_ns, group_id",
            values,
        )
        # a share is relative to the total time of the cell, or of the range if there is no cell
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

    def _selected(self, run: str | None, need: Need) -> list[str] | None:
        """Return a filter for the selected run, or None if all runs are selected."""
        name = self.find_runs(Selection(run), need)
        return None if name == ALL_RUNS else [name]

    def backends(self) -> list[str]:
        """Return the names of the backends of all stored cells, in alphabetical order."""
        rows = self.connection.execute("SELECT DISTINCT backend FROM cells ORDER BY backend")
        return [str(row[0]) for row in rows]

    def cells(
        self,
        run: str | None = None,
        *,
        configs: Sequence[Config] | None = None,
        backends: Sequence[str] | None = None,
    ) -> list[CellRow]:
        """Return cells in the run's order.

        `run` is None for the latest run, or `all` for the whole store.
        """
        where, values = _where(
            {
                "run": self._selected(run, "run"),
                "config_id": matching_configs(self.connection, configs),
                "backend": backends,
            }
        )
        rows = records(
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
        """Return the environment of a run as a dict of JSON values."""
        row = self.connection.execute(
            "SELECT e.data FROM environments e JOIN runs r ON r.environment_id = e.id "
            "WHERE r.run = ?",
            (self.resolve(run),),
        ).fetchone()
        data: dict[str, Any] = json.loads(row[0])
        return data

    def peaks(self, run: str | None = None, source: str | None = None) -> Peaks | None:
        """Return the peaks of the run's device, optionally from one source.

        The sources are `measured` and `data sheet`.
        """
        return find_peaks(self.connection, self.device_name(run), source)

    def device_name(self, run: str | None = None) -> str | None:
        """Return the name of the GPU on which a run was recorded, or of the processor if it used no GPU."""
        name = device_name(self.environment(run))
        return name or next((device.name for device in self.devices(run)), None)

    def add_peaks(self, peaks: Peaks, created: str, environment: Mapping[str, Any]) -> None:
        """Insert measured peaks. The store must be opened with `write`."""
        with transaction(self.connection):
            insert_peaks(self.connection, peaks, created, environment)

    def verifications(self, run: str | None = None) -> list[VerificationRow]:
        """Return the checks of a run of `verify`, in the order of the run.

        None selects the latest run.
        """
        return verification_rows(self.connection, self.resolve(run))

    def verdicts(self, run: str | None = None) -> dict[tuple[str, str], bool]:
        """Return whether each (config label, backend) of the run's cells passed its checks.

        Only checks on the same device with the same torch and code count. Unchecked cells are
        omitted.
        """
        return verdicts(self.connection, self.resolve(run))

    def wrong(self, run: str | None = None) -> set[tuple[str, str]]:
        """Return the (config label, backend) of cells whose checks failed.

        They must not be ranked.
        """
        return {place for place, right in self.verdicts(run).items() if not right}

    def problems(self, run: str | None = None) -> tuple[Problem, ...]:
        """Return the problems of a run's profilers, with remedies.

        The result is empty for a foreign trace.
        """
        from profharness.run import Problem

        return tuple(
            Problem(**{**problem, "cells": tuple(problem["cells"])})
            for problem in self._decoded("problems", run)
        )

    def devices(self, run: str | None = None) -> list[Device]:
        """Return the GPUs that the traces of a run describe, sorted by index."""
        rows = self.connection.execute(
            f"SELECT {_DEVICE_COLUMNS} FROM devices d JOIN runs r ON r.id = d.run_id "
            "WHERE r.run = ? ORDER BY device_index",
            (self.resolve(run),),
        )
        return list(starmap(Device, rows))

    def calls(self, run: str | None = None) -> list[CallRow]:
        """Return the attention calls of a traced program."""
        return call_rows(self.connection, self.resolve(run))

    def templates(self, run: str | None = None) -> list[CallSignature]:
        """Return the distinct calls of an observed program, with their counts."""
        return template_rows(self.connection, self.resolve(run))

    def steps(self, run: str | None = None) -> list[StepRow]:
        """Return the steps of a run's traces, with how long the GPU was busy in each."""
        return step_rows(self.connection, self.resolve(run))

    def gaps(self, steps: Sequence[StepRow]) -> list[GapRow]:
        """Return the largest idle times of GPUs within steps."""
        return gap_rows(self.connection, steps)

    def launches(
        self, run: str | None = None, *, profiler: str | None = None, cell: str | None = None
    ) -> Iterator[LaunchRow]:
        """Stream the launches of a run by trace, in the order of the trace files."""
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
        """Return the ranks of a job, sorted by rank.

        `refs` are runs, prefixes of runs or folders. Without `refs`, the newest job is selected. A
        single run selects the job that it belongs to. Raises NotFoundError if fewer than two ranks
        match.
        """
        return rank_rows(self.connection, self.path, refs)

    def rank_launches(self, ranks: Sequence[RankRow]) -> RankLaunches:
        """Return the launches of ranks, summed by range, kernel and launch configuration."""
        return rank_launches(self.connection, ranks)

    def protocol(self, run: str) -> dict[str, Any]:
        """Return the fields of a run's `run.Protocol`. The result is empty for a foreign trace."""
        return self._decoded("protocol", run) or {}

    def bench_plan(self, run: str) -> dict[str, Any]:
        """Return the fields of a run's `run.BenchPlan`.

        The result is empty unless `bench` made the run.
        """
        return self._decoded("bench", run) or {}

    def _decoded(self, column: str, run: str | None) -> Any:
        """Return the decoded JSON value of a column of `runs`, or None for NULL."""
        (text,) = self.connection.execute(
            f"SELECT {column} FROM runs WHERE run = ?", (self.resolve(run),)
        ).fetchone()
        return json.loads(text) if text else None

    def launch_metrics(self, launch_id: int) -> Metrics:
        """Return the hardware counters of one launch, with their units, by the names that ncu uses."""
        rows = self.connection.execute(
            "SELECT name, value, unit FROM metrics WHERE launch_id = ? ORDER BY name", (launch_id,)
        )
        return {name: (value, unit) for name, value, unit in rows}

    def ranges(self, run: str | None = None) -> list[RangeRow]:
        """Return the user ranges of a run's traces, in trace order."""
        rows = self.connection.execute(
            "SELECT g.id, t.profiler, n.name, g.start_ns, g.duration_ns, g.pid, g.tid, "
            "g.parent_id, c.cell, g.iteration FROM ranges g JOIN traces t ON t.id = g.trace_id "
            "JOIN runs r ON r.id = t.run_id JOIN range_names n ON n.id = g.name_id "
            "LEFT JOIN cells c ON c.id = g.cell_id WHERE r.run = ? ORDER BY g.id",
            (self.resolve(run),),
        )
        return list(map(RangeRow._make, rows))

    def delete_run(self, ref: str) -> str:
        """Delete a run with all its rows and return its id.

        The store must be opened with `write`.
        """
        name = self.resolve(ref)
        with transaction(self.connection):
            forget_run(self.connection, name)
        return name


def open_store(path: Path, *, write: bool = False) -> Store:
    """Open a store for reading, or for writing if `write` is True.

    A missing store is created if `write` is True.

    Raises NotFoundError if there is no store to read. Raises StoreError if the file belongs to
    another program or was written by a newer version. Such a file is not changed.
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
    """Return the metrics of each row of `kernel_groups`.

    The value of a metric is the median over the launches of the row. A trace without metrics costs
    only one lookup.
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
    names = ("trace_id", *(GROUP_KEYS if by_op else GROUP_KEYS[:-1]))
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
    """Return the median of each metric by group, for the launches in a range of ids.

    `names` are the columns that form a group's key.
    """
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
    # importing the module statistics takes longer than most commands
    ordered, middle = sorted(numbers), len(numbers) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
