"""Query the store. Most queries return objects of the classes in `profharness.rows`.

This module imports neither numpy nor pandas.
"""

from __future__ import annotations

import json
import sqlite3
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, fields, replace
from functools import cache
from heapq import nlargest
from itertools import chain, groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from profharness.attention.cases import VerificationRow
from profharness.attention.config import Config, parse_config
from profharness.device_types import device_name
from profharness.devices import MEASURED, Device, Occupancy, Peaks, data_sheet, occupancy
from profharness.errors import ProfharnessError
from profharness.rows import (
    PRODUCT_FAMILIES,
    STEP_END,
    WHOLE_TRACE,
    CallKernel,
    CallRow,
    CallSignature,
    CellRow,
    GapRow,
    KernelRow,
    LaunchRow,
    RangeRow,
    Refusal,
    RunRow,
    StepLaunch,
    StepRow,
    Triple,
    triple,
)
from profharness.stats import Series
from profharness.store.names import StoredRun, name_runs
from profharness.store.schema import (
    connect,
    damaged,
    find_damage,
    is_altered,
    is_damage,
    transaction,
)
from profharness.store.selection import ALL_RUNS, NEWEST_FIRST, Need, RunFinder, Selection
from profharness.store.steps import step_rows
from profharness.store.tables import (
    GROUP_KEYS,
    columns_of,
    forget_run,
    insert_row,
    records,
    rows_of,
)

if TYPE_CHECKING:
    from profharness.run import Problem
    from profharness.traces.engine_log import EngineLog

Record = dict[str, Any]
Metrics = dict[str, tuple[float, str]]

# Errors that can occur while reading a damaged file. Only such an error causes a check of the file.
OF_DAMAGE = (
    *(sqlite3.Error, ValueError, LookupError, TypeError, ArithmeticError, msgspec.MsgspecError),
)
GAPS = 5  # number of gaps to return
FORWARD = ("out", "inputs")  # values of `VerificationRow.what` for the forward pass
_SAME_ENVIRONMENT = ("torch", "gpu", "device_type", "flash_attention_impl", "cudnn")
_CELL_FIELDS = tuple(field.name for field in fields(CellRow))
_KERNEL_FIELDS = tuple(field.name for field in fields(KernelRow))
# The launches of a trace in a period of time. `busy_until` is the latest end of the earlier
# launches on the same device in this period.
# the launches l on the GPUs of a trace, with their kernels k and op paths o
_ON_GPUS = """traces t JOIN launches l ON l.id BETWEEN t.first_launch_id AND t.last_launch_id
    JOIN kernels k ON k.id = l.kernel_id LEFT JOIN op_paths o ON o.id = l.op_path_id
    WHERE t.id = ? AND l.duration_ns IS NOT NULL AND l.device >= 0"""
# the innermost range around a launch l, such as `Optimizer.step#AdamW.step`
_RANGE = """(SELECT n.name FROM ranges r JOIN range_names n ON n.id = r.name_id
    WHERE r.id = l.range_id)"""


class Store(RunFinder):
    """An open store. Use it as a context manager.

    If `run` is None, a query selects the latest run. A filter that is None selects all rows.
    """

    def __enter__(self) -> Store:
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        """Close the store. If a damaged file caused the error, raise StoreError instead."""
        with closing(self.connection):
            if isinstance(error, OF_DAMAGE) and not isinstance(error, ProfharnessError):
                known = is_damage(error) or is_altered(error)
                detail = error if known else find_damage(self.connection)
                if detail:
                    raise damaged(self.path, detail) from None

    def close(self) -> None:
        """Close the connection. Do not use the store afterwards."""
        self.connection.close()

    def runs(self) -> list[RunRow]:
        """Return all runs, newest first."""
        rows = rows_of(
            self.connection,
            RunRow,
            "SELECT *, run AS name, (SELECT count(*) FROM cells c WHERE c.run_id = r.id) AS cells, "
            "(SELECT count(*) FROM cells c WHERE c.run_id = r.id "
            "AND c.status IN ('oom', 'error', 'crashed', 'timeout')) AS failed_cells, "
            "(SELECT coalesce(sum(launches), 0) FROM traces t WHERE t.run_id = r.id) AS launches "
            f"FROM runs r {NEWEST_FIRST}",
        )
        # not from another query, because another process may store a run meanwhile
        names = name_runs(StoredRun(row.run, row.source, row.path) for row in rows)
        return [replace(row, name=names[row.run]) for row in rows]

    def warnings(self, runs: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """Return the ingest warnings of these runs. Omit runs without warnings."""
        wanted = set(runs)
        rows = self.connection.execute(
            f"SELECT run, warnings FROM runs r WHERE warnings <> '[]' {NEWEST_FIRST}"
        )
        return {run: tuple(json.loads(texts)) for run, texts in rows if run in wanted}

    def environment(self, run: str | None = None) -> dict[str, Any]:
        """Return the environment of a run as a dict of JSON values."""
        query = "(SELECT data FROM environments WHERE id = environment_id)"
        environment: dict[str, Any] = self._decoded(query, run)
        return environment

    def engine(self, run: str | None = None) -> EngineLog | None:
        """Return the records on attention in the log of a run's serving engine.

        Return None if there is no log.
        """
        from profharness.traces.engine_log import EngineLog

        query = "SELECT * FROM runs WHERE run = ?"
        (row,) = records(self.connection, query, (self.resolve(run),))
        found = row.get("engine")  # a store of an earlier version does not have the column
        return None if found is None else msgspec.convert(found, EngineLog)

    def problems(self, run: str | None = None) -> tuple[Problem, ...]:
        """Return the problems of a run's profilers, with remedies.

        Return an empty tuple for a foreign trace.
        """
        from profharness.run import Problem

        return msgspec.convert(self._decoded("problems", run), tuple[Problem, ...])

    def protocol(self, run: str) -> dict[str, Any]:
        """Return the fields of a run's `run.Protocol`, or an empty dict for a foreign trace."""
        return self._decoded("protocol", run) or {}

    def bench_plan(self, run: str) -> dict[str, Any]:
        """Return the fields of a run's `run.BenchPlan`.

        Return an empty dict unless the run was made by `bench`.
        """
        return self._decoded("bench", run) or {}

    def _decoded(self, column: str, run: str | None) -> Any:
        """Return the decoded JSON value of a column of `runs`, or None for NULL."""
        query = f"SELECT {column} FROM runs WHERE run = ?"
        (text,) = self.connection.execute(query, (self.resolve(run),)).fetchone()
        return json.loads(text) if text else None

    def devices(self, run: str | None = None) -> list[Device]:
        """Return the GPUs that the traces of a run describe, sorted by index."""
        return rows_of(
            self.connection,
            Device,
            'SELECT d.*, device_index AS "index" FROM devices d JOIN runs r ON r.id = d.run_id '
            "WHERE r.run = ? ORDER BY device_index",
            (self.resolve(run),),
        )

    def device_name(self, run: str | None = None) -> str | None:
        """Return the name of the GPU on which a run was recorded.

        Return the name of the processor if the run used no GPU.
        """
        name = device_name(self.environment(run))
        return name or next((device.name for device in self.devices(run)), None)

    def peaks(self, run: str | None = None, source: str | None = None) -> Peaks | None:
        """Return the latest measured peaks of a run's device, or else the peaks of a data sheet.

        `source` restricts the result to `measured` or `data sheet`.
        """
        device = self.device_name(run)
        if device is None:
            return None
        if source in (None, MEASURED):
            measured = rows_of(
                self.connection,
                Peaks,
                f"SELECT *, '{MEASURED}' AS source FROM peaks WHERE device = ? "
                "ORDER BY id DESC LIMIT 1",
                (device,),
            )
            if measured:
                return measured[0]
        if source == MEASURED:
            return None
        sizes = (each.num_sms for each in self.devices(run) if each.name == device)
        return data_sheet(device, next(sizes, None))

    def add_peaks(self, peaks: Peaks, created: str, environment: Mapping[str, Any]) -> None:
        """Insert peaks with the environment in which they were measured.

        The store must be opened with `write`.
        """
        row = asdict(peaks) | {"created": created, "environment": environment}
        row["flops_per_s"] = json.dumps(peaks.flops_per_s)  # in the order of the measurement
        del row["source"]  # always `measured`, because other peaks are not stored
        with transaction(self.connection):
            insert_row(self.connection, "peaks", row)

    def delete_run(self, ref: str) -> str:
        """Delete a run with all its rows and return its id.

        The store must be opened with `write`.
        """
        name = self.resolve(ref)
        with transaction(self.connection):
            forget_run(self.connection, name)
        return name

    def rows(
        self, selection: Selection, *, by_op: bool = False, needs: Sequence[Need] = ()
    ) -> tuple[list[KernelRow], list[CellRow]]:
        """Return the selected kernels and cells of the run that `find_runs` selects.

        Raise NotFoundError if no run matches.
        """
        run = self.find_runs(selection, *needs)
        configs, backends = selection.configs or None, selection.backends or None
        profilers = selection.profilers or None
        kernels = self.kernels(
            run, configs=configs, backends=backends, profilers=profilers, by_op=by_op
        )
        return kernels, self.cells(run, configs=configs, backends=backends)

    def _where(
        self,
        run: str | None,
        need: Need,
        configs: Sequence[Config] | None = None,
        **filters: Iterable[Any] | None,
    ) -> tuple[str, list[Any]]:
        """Return an SQL condition and its parameters.

        The condition selects rows by run, by config, and by the values of other columns.
        """
        name = self.find_runs(Selection(run), need)
        filters["run"] = None if name == ALL_RUNS else [name]
        filters["config_id"] = None if configs is None else self.config_ids(configs)
        given = {column: list(values) for column, values in filters.items() if values is not None}
        conditions = [f"{name} IN ({', '.join('?' * len(given[name]))})" for name in given]
        return " AND ".join(conditions) or "1", [*chain.from_iterable(given.values())]

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

        `run` is None for the latest run with kernels, or `all` for the whole store. A config
        without a dtype matches any dtype. If `by_op` is True, return one row per op path.
        Otherwise, `op_path` is the op path with the most launches.
        """
        where, values = self._where(
            run,
            "kernels",
            configs,
            by_op=[by_op],
            backend=backends,
            profiler=profilers,
            cell=cells,
        )
        # A share is relative to the total time of the cell, or of the range if there is no cell. The
        # share is unknown if the time of any row in this total is unknown.
        rows = records(
            self.connection,
            "SELECT *, CASE WHEN count(*) OVER whole = count(total_ns) OVER whole "
            f"THEN total(total_ns) OVER whole END AS whole_ns FROM kernel_groups WHERE {where} "
            "WINDOW whole AS (PARTITION BY trace_id, cell_id, iif(cell_id IS NULL, range_name_id, 0)) "
            "ORDER BY created DESC, run_id DESC, cell_id, trace_id, first_ns, group_id",
            values,
        )
        occupancy_of = self._occupancies()
        metrics = self._group_metrics(rows, by_op)
        return [
            _kernel_row(row, occupancy_of, values)
            for row, values in zip(rows, metrics, strict=True)
        ]

    def _occupancies(self) -> Callable[..., Occupancy | None]:
        rows = records(self.connection, 'SELECT *, device_index AS "index" FROM devices')
        devices = {(row["run_id"], row["index"]): msgspec.convert(row, Device) for row in rows}

        @cache
        def occupancy_of(
            run_id: int,
            index: int,
            block: Triple | None,
            registers: tuple[int | None, int | None, int | None],
            shared: int | None,
        ) -> Occupancy | None:
            device = devices.get((run_id, index))
            vector, accum, scalar = registers
            if device is None or block is None or vector is None or shared is None:
                return None
            threads = block[0] * block[1] * block[2]
            return occupancy(
                threads, vector, shared, device, accum_registers=accum, scalar_registers=scalar
            )

        return occupancy_of

    def _group_metrics(self, rows: Sequence[Record], by_op: bool) -> list[Metrics]:
        """Return the metrics of each row of `kernel_groups`, as medians over the launches."""
        keys = ("trace_id", *(GROUP_KEYS if by_op else GROUP_KEYS[:-1]))
        groups = [tuple(row[name] for name in keys) for row in rows]
        found: dict[tuple[Any, ...], dict[tuple[str, str], list[float]]]
        found = {group: {} for group in groups}
        columns = ("g.name_id" if name == "range_name_id" else f"l.{name}" for name in keys)
        # CROSS JOIN fixes the order of the loops. A trace without metrics then needs only one lookup.
        for name, unit, value, *group in self.connection.execute(
            f"SELECT m.name, m.unit, m.value, {', '.join(columns)} FROM traces t "
            "CROSS JOIN metrics m ON m.launch_id BETWEEN t.first_launch_id AND t.last_launch_id "
            "CROSS JOIN launches l ON l.id = m.launch_id LEFT JOIN ranges g ON g.id = l.range_id "
            "WHERE t.id IN (SELECT value FROM json_each(?)) "
            "AND coalesce(l.cell_id, 0) IN (SELECT value FROM json_each(?))",
            (
                json.dumps(list({row["trace_id"] for row in rows})),
                json.dumps(list({row["cell_id"] or 0 for row in rows})),
            ),
        ):
            if (of_group := found.get(tuple(group))) is not None:
                of_group.setdefault((name, unit), []).append(value)
        medians = {
            group: {name: (median(values), unit) for (name, unit), values in sorted(each.items())}
            for group, each in found.items()
        }
        return [medians[group] for group in groups]

    def cells(
        self,
        run: str | None = None,
        *,
        configs: Sequence[Config] | None = None,
        backends: Sequence[str] | None = None,
    ) -> list[CellRow]:
        """Return cells in the order of the run. If `run` is `all`, return all stored cells."""
        where, values = self._where(run, "run", configs, backend=backends)
        rows = records(
            self.connection,
            "SELECT c.*, r.run, cf.label AS config FROM cells c JOIN runs r ON r.id = c.run_id "
            f"JOIN configs cf ON cf.id = c.config_id WHERE {where} {NEWEST_FIRST}, c.id",
            values,
        )
        for row in rows:
            samples = self.connection.execute(
                "SELECT measurement, process, turn, duration_ns FROM samples WHERE cell_id = ? "
                "ORDER BY measurement, ordinal",
                (row["id"],),
            )
            row["samples"] = {
                name: _series(list(values)) for name, values in groupby(samples, itemgetter(0))
            }
            row["warnings"] = tuple(row["warnings"])
            row["refusals"] = tuple(
                rows_of(
                    self.connection,
                    Refusal,
                    "SELECT * FROM refusals WHERE cell_id = ? ORDER BY ordinal",
                    (row["id"],),
                )
            )
        return [
            CellRow(**{name: row[name] for name in _CELL_FIELDS if name in row}) for row in rows
        ]

    def verifications(self, run: str | None = None) -> list[VerificationRow]:
        """Return the checks of a `verify` run, in the order of the run."""
        return self._checks("r.run = ? ORDER BY c.id, v.ordinal", self.resolve(run))

    def _checks(self, where: str, *values: str) -> list[VerificationRow]:
        return rows_of(
            self.connection,
            VerificationRow,
            'SELECT v.*, r.run, cf.label AS config, v.case_name AS "case", c.backend, c.status '
            "FROM verifications v JOIN cells c ON c.id = v.cell_id JOIN runs r ON r.id = c.run_id "
            f"JOIN configs cf ON cf.id = c.config_id WHERE {where}",
            values,
        )

    def verdicts(self, run: str | None = None) -> dict[tuple[str, str], bool]:
        """Map (config label, backend) of the cells of a run to whether the cell passed its checks.

        Also use checks of other runs with the same device, the same PyTorch and the same recorded
        backend code. If a check was repeated, use only the latest result. For a cell without a
        backward pass, ignore checks of gradients.

        A cell fails if any check failed. A cell passes only if its own config was checked,
        including the gradients if the cell has a backward pass. Omit other cells.
        """
        run = self.resolve(run)
        here = self.environment(run)
        stored = self.connection.execute(
            "SELECT r.run, e.data FROM runs r JOIN environments e ON e.id = r.environment_id "
            "WHERE r.id IN (SELECT c.run_id FROM cells c JOIN verifications v ON v.cell_id = c.id)"
        )
        environments = {name: json.loads(data) for name, data in stored}
        # The key is a problem and a backend. The inner key consists of a case, the checked value,
        # and whether the cell's own config was checked.
        latest: dict[tuple[Config, str], dict[tuple[str, str, bool], bool]] = {}
        # oldest first, so that a later check replaces an earlier one
        for row in self._checks("v.passed IS NOT NULL ORDER BY r.created, r.id"):
            there, backend = environments[row.run], row.backend
            if all(there.get(key) == here.get(key) for key in _SAME_ENVIRONMENT) and (
                (there.get("backend_code") or {}).get(backend)
                == (here.get("backend_code") or {}).get(backend)
            ):
                problem = _problem(row.asked)
                own = _problem(row.config) == problem
                latest.setdefault((problem, backend), {})[row.case, row.what, own] = bool(
                    row.passed
                )
        cells = self.connection.execute(
            "SELECT DISTINCT cf.label, c.backend FROM cells c JOIN runs r ON r.id = c.run_id "
            "JOIN configs cf ON cf.id = c.config_id WHERE r.run = ?",
            (run,),
        )
        by_cell = {}
        for label, backend in cells:
            bwd = parse_config(label).bwd
            passed = {
                check: passed
                for check, passed in latest.get((_problem(label), backend), {}).items()
                if bwd or check[1] in FORWARD
            }
            directions = {what in FORWARD for _, what, own in passed if own}
            if not all(passed.values()):
                by_cell[label, backend] = False
            elif directions >= {True, not bwd}:
                by_cell[label, backend] = True
        return by_cell

    def wrong(self, run: str | None = None) -> set[tuple[str, str]]:
        """Return (config label, backend) of each cell that failed a check.

        Such cells must not be ranked.
        """
        return {cell for cell, passed in self.verdicts(run).items() if not passed}

    def calls(self, run: str | None = None) -> list[CallRow]:
        """Return the attention calls of a traced program, sorted by trace and start time."""
        name = self.resolve(run)
        kernels: dict[int, list[CallKernel]] = {}
        # stores of old versions lack these columns
        known = columns_of(self.connection, "launch_configs")
        of_amd = "".join(f", l.{name}" for name in _REGISTERS[1:] if name in known)
        for call, *values in self.connection.execute(
            "SELECT k.call_id, k.direction, n.name, n.short, n.family, k.launches, k.total_ns, "
            "n.kind, l.grid_x, l.grid_y, l.grid_z, l.block_x, l.block_y, l.block_z, "
            "l.registers_per_thread, "
            f"coalesce(l.shared_bytes, l.static_shared_bytes + l.dynamic_shared_bytes){of_amd} "
            "FROM call_kernels k JOIN kernels n ON n.id = k.kernel_id "
            "JOIN calls c ON c.id = k.call_id JOIN launch_configs l ON l.id = k.launch_config_id "
            "JOIN traces t ON t.id = c.trace_id JOIN runs r ON r.id = t.run_id WHERE r.run = ? "
            "ORDER BY k.call_id, k.first_ns",
            (name,),
        ):
            grid, block = triple(*values[7:10]), triple(*values[10:13])
            fields = [*values[:7], grid, block, *values[13:]]
            kernels.setdefault(call, []).append(CallKernel(*fields))
        rows = records(
            self.connection,
            "SELECT c.*, r.run, c.trace_id AS trace, c.ordinal AS call, cf.label AS config, "
            "c.template_id AS template FROM calls c JOIN traces t ON t.id = c.trace_id "
            "JOIN runs r ON r.id = t.run_id LEFT JOIN configs cf ON cf.id = c.config_id "
            "WHERE r.run = ? ORDER BY c.id",
            (name,),
        )
        for row in rows:
            row["kernels"] = kernels.get(row["id"], ())
        return msgspec.convert(rows, list[CallRow], strict=False)

    def templates(self, run: str | None = None) -> list[CallSignature]:
        """Return the kinds of calls in an observed program, sorted by process and first call."""
        return rows_of(
            self.connection,
            CallSignature,
            "SELECT o.*, o.id AS template, cf.label AS config FROM templates o "
            "JOIN runs r ON r.id = o.run_id LEFT JOIN configs cf ON cf.id = o.config_id "
            "WHERE r.run = ? ORDER BY o.id",
            (self.resolve(run),),
        )

    def steps(self, run: str | None = None) -> list[StepRow]:
        """Return the steps of a run's traces, with the time in which the GPU was busy.

        If a trace has no steps, return one step that contains all launches of the trace.
        """
        rows: list[StepRow] = []
        for trace, first, last in self.connection.execute(
            "SELECT t.id, min(l.start_ns), max(l.start_ns + coalesce(l.duration_ns, 0)) "
            "FROM traces t JOIN runs r ON r.id = t.run_id "
            "JOIN launches l ON l.id BETWEEN t.first_launch_id AND t.last_launch_id "
            "WHERE r.run = ? GROUP BY t.id",
            (self.resolve(run),),
        ).fetchall():
            steps = self.connection.execute(
                "SELECT ordinal, name, start_ns, duration_ns FROM steps WHERE trace_id = ? "
                "ORDER BY ordinal",
                (trace,),
            ).fetchall() or [(0, WHOLE_TRACE, first, last - first)]
            launches = self.connection.execute(
                "SELECT device, start_ns, start_ns + duration_ns, coalesce(launch_ns, start_ns) "
                "FROM launches l JOIN traces t "
                "ON l.id BETWEEN t.first_launch_id AND t.last_launch_id WHERE t.id = ? "
                "AND duration_ns IS NOT NULL AND device >= 0 ORDER BY start_ns, l.id",
                (trace,),
            )
            rows += step_rows(trace, steps, launches)
        return rows

    def step_launches(self, steps: Sequence[StepRow]) -> Iterator[list[StepLaunch]]:
        """Yield for each step the GPU launches that started in the step, sorted by start.

        For each kernel of an attention call, the store contains the first launch and the number of
        launches. The following launches of this kernel, up to this number, belong to the same call.
        """
        for trace, group in groupby(steps, key=attrgetter("trace")):
            own = list(group)
            launches = self._in_steps(
                "SELECT l.start_ns, l.kernel_id, l.launch_config_id, l.device, l.stream, l.start_ns, "
                f"l.duration_ns, k.name, k.short, k.family, k.kind, o.path, NULL, NULL, {_RANGE} "
                f"FROM {_ON_GPUS} AND l.start_ns >= ? AND l.start_ns < ? ORDER BY l.start_ns, l.id",
                trace,
                own,
            )
            calls = self._in_steps(
                "SELECT k.first_ns, k.kernel_id, k.launch_config_id, k.launches, c.ordinal, "
                "k.direction FROM calls c JOIN call_kernels k ON k.call_id = c.id "
                "WHERE c.trace_id = ? AND k.first_ns >= ? AND k.first_ns < ? ORDER BY k.first_ns",
                trace,
                own,
            )
            yield from map(_with_calls, launches, calls)

    def products_ns(self, steps: Sequence[StepRow], dtype: str) -> int:
        """Return the total time, in ns, of the matrix products in a dtype that start in the steps."""
        products = f"k.family IN {PRODUCT_FAMILIES} AND k.dtype = '{dtype}'"
        return self._kernels_ns(steps, products).total()

    def foreach_ns(self, steps: Sequence[StepRow]) -> Counter[str]:
        """Return the total times, in ns, of the foreach kernels that start in the steps, by the
        range around their launch, such as `Optimizer.step#AdamW.step`.

        The kernels of fused optimizers have the same name, but other functors.
        """
        return self._kernels_ns(
            steps, "k.short LIKE 'multi_tensor_apply%' AND k.short NOT LIKE '%fused%'"
        )

    def _kernels_ns(self, steps: Sequence[StepRow], kernels: str) -> Counter[str]:
        """Return the total times, in ns, of kernels that start in the steps, by the range around
        their launch, or "" if there is none. `kernels` is a condition in SQL.
        """
        totals: Counter[str] = Counter()
        for trace, group in groupby(steps, key=attrgetter("trace")):
            launches = self._in_steps(
                f"SELECT l.start_ns, l.duration_ns, coalesce({_RANGE}, '') "
                f"FROM {_ON_GPUS} AND l.start_ns >= ? AND l.start_ns < ? AND {kernels} "
                "ORDER BY l.start_ns, l.id",
                trace,
                list(group),
            )
            for _, duration, name in chain.from_iterable(launches):
                totals[name] += duration
        return totals

    def has_detailed_trace(self, run: str) -> bool:
        """Return whether torch.profiler recorded shapes or stacks, which slows the CPU."""
        details = " OR ".join(
            f"json_extract(t.environment, '$.{key}')" for key in ("record_shapes", "with_stack")
        )
        query = (
            "SELECT EXISTS (SELECT 1 FROM traces t JOIN runs r ON r.id = t.run_id "
            f"WHERE r.run = ? AND t.profiler = 'torch' AND ({details}))"
        )
        return bool(self.connection.execute(query, (self.resolve(run),)).fetchone()[0])

    def gaps(self, steps: Sequence[StepRow]) -> list[GapRow]:
        """Return the longest periods within the steps in which a device was idle."""
        gaps: list[GapRow] = []
        for trace, group in groupby(steps, key=attrgetter("trace")):
            steps_of = list(group)
            launches = self._in_steps(
                "SELECT l.start_ns, l.duration_ns, l.device, k.short, o.path, l.launch_ns "
                f"FROM {_ON_GPUS} AND l.start_ns >= ? AND l.start_ns < ? ORDER BY l.start_ns, l.id",
                trace,
                steps_of,
            )
            found = chain.from_iterable(map(_idle, steps_of, launches))
            gaps += nlargest(GAPS, found, key=attrgetter("duration_ns"))
        return nlargest(GAPS, gaps, key=attrgetter("duration_ns"))

    def _in_steps(
        self, query: str, trace: int, steps: Sequence[StepRow]
    ) -> Iterator[list[tuple[Any, ...]]]:
        """Yield for each step of a trace the query rows with a time in the step.

        The query must be sorted by the first column, which contains the time. Run the query only
        once, because the table has no index on this column. The steps are sorted and do not overlap.
        """
        last = steps[-1].start_ns + steps[-1].duration_ns
        rows = self.connection.execute(query, (trace, steps[0].start_ns, last))
        row = rows.fetchone()
        for step in steps:
            found, end = [], step.start_ns + step.duration_ns
            while row is not None and row[0] < end:
                if row[0] >= step.start_ns:
                    found.append(row)
                row = rows.fetchone()
            yield found

    def launches(
        self, run: str | None = None, *, profiler: str | None = None, cell: str | None = None
    ) -> Iterator[LaunchRow]:
        """Yield the launches of all traces of a run, in the order of the trace files."""
        where, values = self._where(
            self.find_run(Selection(run)),
            "kernels",
            profiler=None if profiler is None else [profiler],
            cell=None if cell is None else [cell],
        )
        columns = ", ".join(LaunchRow._fields)
        query = f"SELECT {columns} FROM kernel_launches WHERE {where}"
        return map(LaunchRow._make, self.connection.execute(query, values))

    def launch_metrics(self, launch_id: int) -> Metrics:
        """Map ncu's metric names to the values and units of one launch's hardware counters."""
        rows = self.connection.execute(
            "SELECT name, value, unit FROM metrics WHERE launch_id = ? ORDER BY name", (launch_id,)
        )
        return {name: (value, unit) for name, value, unit in rows}

    def ranges(self, run: str | None = None) -> list[RangeRow]:
        """Return the user ranges of a run's traces, in the order of the traces."""
        rows = self.connection.execute(
            "SELECT g.id, t.profiler, n.name, g.start_ns, g.duration_ns, g.pid, g.tid, "
            "g.parent_id, c.cell, g.iteration FROM ranges g JOIN traces t ON t.id = g.trace_id "
            "JOIN runs r ON r.id = t.run_id JOIN range_names n ON n.id = g.name_id "
            "LEFT JOIN cells c ON c.id = g.cell_id WHERE r.run = ? ORDER BY g.id",
            (self.resolve(run),),
        )
        return list(map(RangeRow._make, rows))


def _with_calls(
    rows: Iterable[tuple[Any, ...]], calls: Iterable[tuple[Any, ...]]
) -> list[StepLaunch]:
    """Return the launches of a step together with their attention calls."""
    launches: list[StepLaunch] = []
    places: dict[tuple[int, int], list[int]] = {}
    for place, (_, kernel, config, *values) in enumerate(rows):
        launches.append(StepLaunch._make(values))
        places.setdefault((kernel, config), []).append(place)
    for first, kernel, config, number, call, direction in calls:
        own = places.get((kernel, config), [])
        begin = bisect_left(own, first, key=lambda place: launches[place].start_ns)
        for place in own[begin : begin + number]:
            launches[place] = launches[place]._replace(call=call, direction=direction)
    return launches


def _idle(step: StepRow, launches: Iterable[tuple[Any, ...]]) -> Iterator[GapRow]:
    """Yield the periods within a step in which a device that works in the step was idle."""
    busy_until: dict[int, int] = {}
    for start, duration, device, kernel, path, launched in launches:
        until = busy_until.get(device, step.start_ns)
        if start > until:
            yield GapRow(device, until, start - until, kernel, path, launched)
        busy_until[device] = max(until, start + duration)
    end = step.start_ns + step.duration_ns
    for device, until in busy_until.items():
        if end > until:
            yield GapRow(device, until, end - until, STEP_END, None, None)


def open_store(path: Path, *, write: bool = False) -> Store:
    """Open a store for reading, or for writing if `write` is True.

    If `write` is True, create a missing store. Raise NotFoundError if there is no store to read.
    Raise StoreError if the file belongs to another program or was written by a newer version. Such a
    file is not changed.
    """
    return Store(path, connect(path, write=write))


_REGISTERS = ("registers_per_thread", "accum_registers_per_thread", "scalar_registers")


def _kernel_row(
    row: Record, occupancy_of: Callable[..., Occupancy | None], metrics: Metrics
) -> KernelRow:
    grid, block = (triple(*(row[f"{name}_{axis}"] for axis in "xyz")) for name in ("grid", "block"))
    shared = row["shared_bytes"]
    if shared is None and None not in (row["static_shared_bytes"], row["dynamic_shared_bytes"]):
        shared = row["static_shared_bytes"] + row["dynamic_shared_bytes"]
    registers = tuple(map(row.get, _REGISTERS))  # stores of old versions lack the last two
    occupied = occupancy_of(row["run_id"], row["device"], block, registers, shared)
    return KernelRow(
        **{name: row[name] for name in _KERNEL_FIELDS if name in row},
        grid=grid,
        block=block,
        share=row["total_ns"] / row["whole_ns"] if row["whole_ns"] else None,
        occupancy=occupied.fraction if occupied else None,
        occupancy_limiter=occupied.limiter if occupied else None,
        shared_share=occupied.shared_share if occupied else None,
        metrics=metrics,
    )


def _series(rows: Sequence[tuple[str, int | None, int | None, int]]) -> Series:
    """Return the samples of one measurement, with their processes and turns if both are known."""
    turns = [(*key, len(list(part))) for key, part in groupby(rows, itemgetter(1, 2))]
    return Series.of((row[3] for row in rows), [turn for turn in turns if None not in turn])


def _problem(label: str) -> Config:
    return replace(parse_config(label), bwd=False, dropout=0.0)


def median(numbers: Sequence[float]) -> float:
    """Return the median of a nonempty sequence."""
    # Do not use `statistics.median`, because importing `statistics` takes longer than most commands.
    ordered, middle = sorted(numbers), len(numbers) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
