"""Named questions to the store, answered with the rows of `profharness.rows`. Imports neither numpy
nor pandas.
"""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from profharness.config import Config
from profharness.devices import Device, Occupancy, occupancy
from profharness.errors import NotFoundError
from profharness.rows import CellRow, KernelRow, Refusal, RunRow, Triple
from profharness.store.connection import config_ids, connect, in_list, transaction
from profharness.store.metrics import Values, group_metrics
from profharness.store.schema import forget_run
from profharness.store.verifications import (
    insert_peaks,
    peaks_of,
    verification_rows,
    wrong_backends,
)

if TYPE_CHECKING:
    from profharness.cases import VerificationRow
    from profharness.devices import Peaks
    from profharness.run import Problem


_SELECT = """
    SELECT r.run, cf.label AS config, c.backend, c.cell, t.profiler, c.status, rn.name AS range,
        k.name AS kernel, k.short AS kernel_short, k.kind AS kernel_kind, k.family,
        lc.grid_x, lc.grid_y, lc.grid_z, lc.block_x, lc.block_y, lc.block_z,
        lc.registers_per_thread, lc.static_shared_bytes, lc.dynamic_shared_bytes, lc.shared_bytes,
        g.launches, CAST(g.launches AS REAL) / tc.calls AS launches_per_call,
        nullif(g.median_ns, -1) AS duration_ns, nullif(g.total_ns, -1) AS total_ns,
        nullif(g.min_ns, -1) AS min_ns, nullif(g.max_ns, -1) AS max_ns, g.first_ns,
        o.path AS op_path, o.sdpa_op, g.device, r.id AS run_id, g.trace_id, g.cell_id,
        g.range_name_id, g.kernel_id, g.launch_config_id, g.op_path_id
    FROM launch_groups g JOIN traces t ON t.id = g.trace_id JOIN runs r ON r.id = t.run_id
    JOIN kernels k ON k.id = g.kernel_id JOIN launch_configs lc ON lc.id = g.launch_config_id
    LEFT JOIN cells c ON c.id = g.cell_id LEFT JOIN configs cf ON cf.id = c.config_id
    LEFT JOIN trace_cells tc ON tc.trace_id = g.trace_id AND tc.cell_id = g.cell_id
    LEFT JOIN range_names rn ON rn.id = g.range_name_id
    LEFT JOIN op_paths o ON o.id = g.op_path_id
"""
_IDS = (
    "trace_id", "cell_id", "range_name_id", "kernel_id", "launch_config_id", "op_path_id"
)  # fmt: skip
UNKNOWN = float("nan")  # a sum with one part unknown is unknown, and so are all shares of it
_ORDER = "ORDER BY r.created DESC, r.id DESC, c.id, g.trace_id, g.first_ns, g.id"


def kernel_rows(
    connection: sqlite3.Connection,
    run: str | None,
    configs: Sequence[Config] | None,
    backends: Sequence[str] | None,
    profilers: Sequence[str] | None,
    cells: Sequence[str] | None,
    by_op: bool,
) -> list[KernelRow]:
    """Kernel rows of one run (None: of all), filtered; in the order of cells and, within one, of
    first start.
    """
    where, values = ["g.by_op = ?"], [by_op]
    if configs is not None:
        where.append(f"c.config_id IN ({in_list(config_ids(connection, configs))})")
    for column, wanted in (
        ("r.run", None if run is None else [run]),
        ("c.backend", backends),
        ("t.profiler", profilers),
        ("c.cell", cells),
    ):
        if wanted is not None:
            where.append(f"{column} IN ({', '.join('?' * len(wanted))})")
            values += wanted  # type: ignore[arg-type]
    cursor = connection.execute(f"{_SELECT} WHERE {' AND '.join(where)} {_ORDER}", values)
    names = [column[0] for column in cursor.description]
    rows = [dict(zip(names, row, strict=True)) for row in cursor]
    totals: dict[tuple[object, ...], float] = {}
    for row in rows:
        part = UNKNOWN if row["total_ns"] is None else row["total_ns"]
        totals[_whole(row)] = totals.get(_whole(row), 0) + part
    occupied = _occupancies(connection)
    metrics = group_metrics(connection, rows, by_op=by_op)
    return [
        _kernel_row(row, totals[_whole(row)], occupied, values)
        for row, values in zip(rows, metrics, strict=True)
    ]


def _whole(row: dict[str, Any]) -> tuple[object, ...]:
    """What a row's share is a part of: its cell's launches, or its range's where there is no
    cell.
    """
    inner = row["range_name_id"] if row["cell_id"] is None else None
    return row["trace_id"], row["cell_id"], inner


def _kernel_row(
    row: dict[str, Any],
    whole_ns: float,
    occupied: Callable[..., Occupancy | None],
    metrics: Values,
) -> KernelRow:
    grid = _triple(row.pop("grid_x"), row.pop("grid_y"), row.pop("grid_z"))
    block = _triple(row.pop("block_x"), row.pop("block_y"), row.pop("block_z"))
    run_id = row.pop("run_id")
    for name in _IDS:
        del row[name]
    shared = row["shared_bytes"]
    if shared is None and None not in (row["static_shared_bytes"], row["dynamic_shared_bytes"]):
        shared = row["static_shared_bytes"] + row["dynamic_shared_bytes"]
    found = occupied(run_id, row["device"], block, row["registers_per_thread"], shared)
    return KernelRow(
        **row,
        grid=grid,
        block=block,
        share=row["total_ns"] / whole_ns if whole_ns > 0 else None,
        occupancy=found.fraction if found else None,
        occupancy_limiter=found.limiter if found else None,
        metrics=metrics,
    )


def _triple(x: int | None, y: int | None, z: int | None) -> Triple | None:
    return None if x is None or y is None or z is None else (x, y, z)


def _occupancies(connection: sqlite3.Connection) -> Callable[..., Occupancy | None]:
    columns = ", ".join(name for name in Device.__slots__ if name != "index")
    rows = connection.execute(f"SELECT run_id, device_index, {columns} FROM devices")
    devices = {(row[0], row[1]): Device(*row[1:]) for row in rows}

    @cache
    def occupied(
        run_id: int, index: int, block: Triple | None, registers: int | None, shared: int | None
    ) -> Occupancy | None:
        device = devices.get((run_id, index))
        if device is None or block is None or registers is None or shared is None:
            return None
        return occupancy(block[0] * block[1] * block[2], registers, shared, device)

    return occupied


FAILED = ("oom", "error", "crashed", "timeout")
CANDIDATES_SHOWN = 8
LATEST = "latest"
NO_PROFILERS = "[]"


class LaunchRow(NamedTuple):
    """One launch, as `Store.launches` streams them; None where a profiler cannot know. Times in ns,
    on the trace's clock.
    """

    run: str
    config: str | None
    backend: str | None
    profiler: str
    range: str | None
    kernel: str
    kernel_short: str
    family: str
    grid_x: int | None
    grid_y: int | None
    grid_z: int | None
    block_x: int | None
    block_y: int | None
    block_z: int | None
    registers_per_thread: int | None
    static_shared_bytes: int | None
    dynamic_shared_bytes: int | None
    shared_bytes: int | None
    stream: int | None
    device: int
    start_ns: int
    duration_ns: int
    kernel_kind: str
    cell: str | None
    iteration: int | None
    op_path: str | None
    sdpa_op: str | None
    api: str | None
    correlation: int | None
    graph_node: int | None
    pid: int | None
    tid: int | None
    launch_ns: int | None
    bytes: int | None
    launch_id: int


class RangeRow(NamedTuple):
    """One user range; parent is the id of the enclosing one, iteration the ordinal of the call of
    its cell.
    """

    id: int
    profiler: str
    name: str
    start_ns: int
    duration_ns: int
    pid: int
    tid: int
    parent: int | None
    cell: str | None
    iteration: int | None


class Store:
    """An open store. Use it as a context manager; every method answers with plain rows."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self.connection = connection

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the store must not be used after it."""
        self.connection.close()

    def runs(self) -> list[RunRow]:
        """All runs, newest first."""
        failed = ", ".join(f"'{status}'" for status in FAILED)
        rows = self.connection.execute(
            "SELECT run, created, source, path, device, torch, profilers, "
            "(SELECT count(*) FROM cells c WHERE c.run_id = r.id), "
            f"(SELECT count(*) FROM cells c WHERE c.run_id = r.id AND c.status IN ({failed})), "
            "(SELECT coalesce(sum(launches), 0) FROM traces t WHERE t.run_id = r.id) "
            "FROM runs r ORDER BY created DESC, id DESC"
        )
        return [RunRow(*(*row[:6], tuple(json.loads(row[6])), *row[7:])) for row in rows]

    def resolve(self, ref: str) -> str:
        """The id of the run meant by an id, a unique prefix, `latest` or `latest~N`.

        Raises NotFoundError, naming candidates, when no run or more than one is meant.
        """
        rows = self.connection.execute(
            "SELECT run, profilers FROM runs ORDER BY created DESC, id DESC"
        ).fetchall()
        names = [str(row[0]) for row in rows]
        if not names:
            raise NotFoundError(f"{self.path} holds no run; `profharness capture` makes one")
        if ref in names:
            return ref
        back = _steps_back(ref)
        if back is not None:
            # a run of `verify` has no profilers and nothing that anyone means by `latest`
            names = [str(row[0]) for row in rows if row[1] != NO_PROFILERS] or names
            if back < len(names):
                return names[back]
            raise NotFoundError(f"{ref}: the store holds only {len(names)} run(s): {_some(names)}")
        found = [name for name in names if ref and name.startswith(ref)]
        if len(found) == 1:
            return found[0]
        if found:
            raise NotFoundError(f"run {ref!r} is ambiguous; it could be {_some(found)}")
        raise NotFoundError(f"no run {ref!r} in {self.path}; there are {_some(names)}")

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

        run None is the latest, `all` the whole store; None for a filter means no filter. A config
        without dtype matches any dtype.
        by_op keeps launches from different op paths apart; otherwise op_path is that of most
        launches.
        """
        wanted = None if run == "all" else self.resolve(run or LATEST)
        return kernel_rows(self.connection, wanted, configs, backends, profilers, cells, by_op)

    def latest_run_with(
        self, configs: Sequence[Config], backends: Sequence[str] | None = None
    ) -> str | None:
        """The newest run that has cells for all the configs (on all the backends, if any are
        given).
        """
        groups = [config_ids(self.connection, [config]) for config in configs]
        if not groups or not all(groups):
            return None
        rows = self.connection.execute(
            "SELECT r.run, c.config_id, c.backend FROM runs r JOIN cells c ON c.run_id = r.id "
            f"WHERE r.profilers <> '{NO_PROFILERS}' ORDER BY r.created DESC, r.id DESC"
        )
        held: dict[str, set[tuple[int, str | None]]] = {}
        for name, config_id, backend in rows:
            held.setdefault(name, set()).update({(config_id, backend), (config_id, None)})
        needs = [(ids, backend) for ids in groups for backend in (backends or (None,))]
        for name, cells in held.items():
            if all(any((one, backend) in cells for one in ids) for ids, backend in needs):
                return name
        return None

    def cells(
        self,
        run: str | None = None,
        *,
        configs: Sequence[Config] | None = None,
        backends: Sequence[str] | None = None,
    ) -> list[CellRow]:
        """The cells of a run (None: the latest, `all`: of every run) with raw samples and refusals,
        in the run's order.
        """
        where, values = ["1"], []
        if run != "all":
            where.append("r.run = ?")
            values.append(self.resolve(run or LATEST))
        if configs is not None:
            where.append(f"c.config_id IN ({in_list(config_ids(self.connection, configs))})")
        if backends is not None:
            where.append(f"c.backend IN ({', '.join('?' * len(backends))})")
            values += backends
        rows = self.connection.execute(
            "SELECT c.id, r.run, c.cell, cf.label, c.backend, c.status, c.message, c.choice, "
            "c.sdpa_op, c.iterations, c.warnings, c.peak_memory_bytes, c.clocks, c.tuning "
            "FROM cells c JOIN runs r ON r.id = c.run_id JOIN configs cf ON cf.id = c.config_id "
            f"WHERE {' AND '.join(where)} ORDER BY r.created DESC, r.id DESC, c.id",
            values,
        )
        return [self._cell(row) for row in rows.fetchall()]

    def _cell(self, row: tuple[Any, ...]) -> CellRow:
        samples: dict[str, list[int]] = {}
        for name, value in self.connection.execute(
            "SELECT measurement, duration_ns FROM samples WHERE cell_id = ? "
            "ORDER BY measurement, ordinal",
            row[:1],
        ):
            samples.setdefault(name, []).append(value)
        refusals = self.connection.execute(
            "SELECT code, message, source FROM refusals WHERE cell_id = ? ORDER BY ordinal", row[:1]
        )
        samples_ns = {name: tuple(values) for name, values in samples.items()}
        warnings, clocks = tuple(json.loads(row[10])), json.loads(row[12])
        tuning = json.loads(row[13]) if row[13] else None
        figures = (samples_ns, row[11], clocks, None, tuning)
        values = (*row[1:10], tuple(itertools.starmap(Refusal, refusals)), warnings, *figures)
        return CellRow(*values)

    def environment(self, run: str | None = None) -> dict[str, Any]:
        """The environment that a run was made in: flat keys to JSON values."""
        row = self.connection.execute(
            "SELECT e.data FROM environments e JOIN runs r ON r.environment_id = e.id "
            "WHERE r.run = ?",
            (self.resolve(run or LATEST),),
        ).fetchone()
        data: dict[str, Any] = json.loads(row[0])
        return data

    def peaks(self, run: str | None = None, source: str | None = None) -> Peaks | None:
        """Peaks of the run's device: measured if the store has them, else from the data sheet;
        source (`measured`, `data sheet`) asks for one of the two alone.
        """
        return peaks_of(self.connection, self.environment(run), source)

    def add_peaks(self, peaks: Peaks, created: str, environment: Mapping[str, Any]) -> None:
        """Keep measured peaks. Needs a store opened with write."""
        with transaction(self.connection):
            insert_peaks(self.connection, peaks, created, environment)

    def verifications(self, run: str | None = None) -> list[VerificationRow]:
        """The checks of a run of `verify` (None: the latest run), in its order."""
        return verification_rows(self.connection, self.resolve(run or LATEST))

    def wrong(self, run: str | None = None) -> set[tuple[str, str]]:
        """(config label, backend) of the run's cells that some check in this store, made on the
        same device with the same torch and code, shows to be wrong; never rank these.
        """
        return wrong_backends(self.connection, self.resolve(run or LATEST))

    def problems(self, run: str | None = None) -> tuple[Problem, ...]:
        """What the profilers of a run failed to do, and what helps; empty for a foreign trace."""
        from profharness.run import Problem

        row = self.connection.execute(
            "SELECT problems FROM runs WHERE run = ?", (self.resolve(run or LATEST),)
        ).fetchone()
        return tuple(
            Problem(**{**problem, "cells": tuple(problem["cells"])})
            for problem in json.loads(row[0])
        )

    def devices(self, run: str | None = None) -> list[Device]:
        """The GPUs that the traces of a run describe, by index."""
        columns = ", ".join(f"d.{name}" for name in Device.__slots__ if name != "index")
        rows = self.connection.execute(
            f"SELECT d.device_index, {columns} FROM devices d JOIN runs r ON r.id = d.run_id "
            "WHERE r.run = ? ORDER BY d.device_index",
            (self.resolve(run or LATEST),),
        )
        return [Device(*row) for row in rows]

    def launches(
        self, run: str | None = None, *, profiler: str | None = None, cell: str | None = None
    ) -> Iterator[LaunchRow]:
        """Stream the launches of a run, trace by trace in the order of their files; nothing is held
        in memory.
        """
        columns = ", ".join(LaunchRow._fields)
        where, values = "run = ?", [self.resolve(run or LATEST)]
        for column, value in (("profiler", profiler), ("cell", cell)):
            if value is not None:
                where += f" AND {column} = ?"
                values.append(value)
        cursor = self.connection.execute(
            f"SELECT {columns} FROM kernel_launches WHERE {where}", values
        )
        return map(LaunchRow._make, cursor)

    def ranges(self, run: str | None = None) -> list[RangeRow]:
        """The user ranges of a run's traces, in trace order."""
        rows = self.connection.execute(
            "SELECT g.id, t.profiler, n.name, g.start_ns, g.duration_ns, g.pid, g.tid, "
            "g.parent_id, c.cell, g.iteration FROM ranges g JOIN traces t ON t.id = g.trace_id "
            "JOIN runs r ON r.id = t.run_id JOIN range_names n ON n.id = g.name_id "
            "LEFT JOIN cells c ON c.id = g.cell_id WHERE r.run = ? ORDER BY g.id",
            (self.resolve(run or LATEST),),
        )
        return [RangeRow._make(row) for row in rows]

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


def _steps_back(ref: str) -> int | None:
    """N of `latest~N`, 0 for `latest`, None for anything else."""
    head, tilde, number = ref.partition("~")
    if head != LATEST or (tilde and not number.isdecimal()):
        return None
    return int(number) if tilde else 0


def _some(names: Sequence[str]) -> str:
    more = len(names) - CANDIDATES_SHOWN
    return ", ".join(names[:CANDIDATES_SHOWN]) + (f" and {more} more" if more > 0 else "")
