"""The main question, what ran: kernel rows from the launch groups, with shares and theoretical
occupancy.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from profharness.config import Config
from profharness.occupancy import Occupancy, occupancy
from profharness.rows import KernelRow, Triple
from profharness.store.metrics import Values, group_metrics
from profharness.store.reading import config_ids, in_list
from profharness.trace import Device

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
