"""The SQL of the store's tables and views, and the insertion and deletion of their rows.

The launches of a trace have consecutive ids, so a range of ids replaces an index on trace_id.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from profharness.attention.config import Config

# one statement for many rows takes half the time of one statement per row
ROWS_PER_STATEMENT = 64
T = TypeVar("T")
JSON_COLUMNS = frozenset({
    "profilers", "warnings", "problems", "protocol", "bench", "clocks", "tuning", "modules",
    "tensors", "lengths", "recorded_with", "engine", "flops_per_s",
    "lens", "mla", "q_strides", "k_strides", "v_strides", "mask_strides",
})  # fmt: skip
"""Columns that contain JSON, which `records` decodes."""

# Columns that identify a group of launches in a trace. The last column is used only if launches are
# grouped by op path.
GROUP_KEYS = (
    "cell_id", "range_name_id", "kernel_id", "launch_config_id", "device", "op_path_id"
)  # fmt: skip

# The `peaks` table does not refer to `environments`, because an environment is deleted with its
# last run.
TABLES = """
CREATE TABLE environments (
    id INTEGER PRIMARY KEY, hash TEXT NOT NULL UNIQUE, data TEXT NOT NULL) STRICT;

CREATE TABLE runs (
    id INTEGER PRIMARY KEY, run TEXT NOT NULL UNIQUE, created TEXT NOT NULL,
    source TEXT NOT NULL CHECK (source IN ('capture', 'trace')), kind TEXT NOT NULL,
    path TEXT NOT NULL,
    content_hash TEXT NOT NULL, environment_id INTEGER NOT NULL REFERENCES environments(id),
    device TEXT, torch TEXT, profilers TEXT NOT NULL, protocol TEXT, bench TEXT, note TEXT,
    profharness TEXT, rank INTEGER, world_size INTEGER, host_key TEXT, gpu_key TEXT,
    problems TEXT NOT NULL, warnings TEXT NOT NULL) STRICT;
CREATE INDEX runs_created ON runs(created, id);
CREATE INDEX runs_content ON runs(content_hash);
CREATE INDEX runs_environment ON runs(environment_id);

CREATE TABLE devices (
    run_id INTEGER NOT NULL REFERENCES runs(id) ON DELETE CASCADE, device_index INTEGER NOT NULL,
    name TEXT NOT NULL, compute_major INTEGER NOT NULL, compute_minor INTEGER NOT NULL,
    num_sms INTEGER NOT NULL, total_memory_bytes INTEGER, max_threads_per_block INTEGER,
    max_threads_per_sm INTEGER, registers_per_block INTEGER, registers_per_sm INTEGER,
    shared_bytes_per_block INTEGER, shared_bytes_per_block_optin INTEGER,
    shared_bytes_per_sm INTEGER, warp_size INTEGER NOT NULL,
    PRIMARY KEY (run_id, device_index)) STRICT, WITHOUT ROWID;

CREATE TABLE configs (
    id INTEGER PRIMARY KEY, label TEXT NOT NULL, batch INTEGER NOT NULL, num_heads INTEGER NOT NULL,
    num_kv_heads INTEGER NOT NULL, seq_len_q INTEGER NOT NULL, seq_len_kv INTEGER NOT NULL,
    head_dim INTEGER NOT NULL, head_dim_v INTEGER, dtype TEXT, causal INTEGER NOT NULL,
    mask TEXT NOT NULL, dropout REAL NOT NULL, scale REAL, layout TEXT NOT NULL,
    bwd INTEGER NOT NULL, deterministic INTEGER NOT NULL, kv_batch INTEGER, mask_shape TEXT,
    q_strides TEXT, k_strides TEXT, v_strides TEXT, mask_strides TEXT) STRICT;
CREATE INDEX configs_label ON configs(label);

CREATE TABLE cells (
    id INTEGER PRIMARY KEY, run_id INTEGER NOT NULL REFERENCES runs(id) ON DELETE CASCADE,
    cell TEXT NOT NULL, config_id INTEGER NOT NULL REFERENCES configs(id), backend TEXT NOT NULL,
    status TEXT NOT NULL, message TEXT, choice TEXT, sdpa_op TEXT, iterations INTEGER NOT NULL,
    peak_memory_bytes INTEGER, duration_ns INTEGER, clocks TEXT NOT NULL, warnings TEXT NOT NULL,
    tuning TEXT, UNIQUE (run_id, cell)) STRICT;
CREATE INDEX cells_config ON cells(config_id);

CREATE TABLE samples (
    cell_id INTEGER NOT NULL REFERENCES cells(id) ON DELETE CASCADE, measurement TEXT NOT NULL,
    ordinal INTEGER NOT NULL, duration_ns INTEGER NOT NULL, process INTEGER, turn INTEGER,
    PRIMARY KEY (cell_id, measurement, ordinal)) STRICT, WITHOUT ROWID;

CREATE TABLE refusals (
    cell_id INTEGER NOT NULL REFERENCES cells(id) ON DELETE CASCADE, ordinal INTEGER NOT NULL,
    code TEXT NOT NULL, message TEXT NOT NULL, source TEXT NOT NULL,
    PRIMARY KEY (cell_id, ordinal)) STRICT, WITHOUT ROWID;

CREATE TABLE verifications (
    cell_id INTEGER NOT NULL REFERENCES cells(id) ON DELETE CASCADE, ordinal INTEGER NOT NULL,
    asked TEXT NOT NULL, case_name TEXT NOT NULL, what TEXT NOT NULL, passed INTEGER, message TEXT,
    error REAL, allowance REAL, relative_error REAL, relative_allowance REAL,
    PRIMARY KEY (cell_id, ordinal)) STRICT, WITHOUT ROWID;

CREATE TABLE peaks (
    id INTEGER PRIMARY KEY, device TEXT NOT NULL, created TEXT NOT NULL, bandwidth_bytes_per_s REAL,
    flops_per_s TEXT NOT NULL, l2_bytes INTEGER, num_sms INTEGER, origin TEXT NOT NULL,
    environment TEXT NOT NULL) STRICT;
CREATE INDEX peaks_device ON peaks(device, id);

CREATE TABLE traces (
    id INTEGER PRIMARY KEY, run_id INTEGER NOT NULL REFERENCES runs(id) ON DELETE CASCADE,
    profiler TEXT NOT NULL, path TEXT NOT NULL, content_hash TEXT NOT NULL,
    launches INTEGER NOT NULL, dropped INTEGER NOT NULL, skipped INTEGER NOT NULL,
    environment TEXT NOT NULL, first_launch_id INTEGER NOT NULL,
    last_launch_id INTEGER NOT NULL) STRICT;
CREATE INDEX traces_run ON traces(run_id);

CREATE TABLE trace_cells (
    trace_id INTEGER NOT NULL REFERENCES traces(id) ON DELETE CASCADE,
    cell_id INTEGER NOT NULL REFERENCES cells(id) ON DELETE CASCADE, calls INTEGER NOT NULL,
    start_ns INTEGER NOT NULL, launches INTEGER NOT NULL,
    PRIMARY KEY (trace_id, cell_id)) STRICT, WITHOUT ROWID;
CREATE INDEX trace_cells_cell ON trace_cells(cell_id);

CREATE TABLE kernels (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL, kind TEXT NOT NULL, short TEXT NOT NULL,
    family TEXT NOT NULL, backend TEXT, arch TEXT, dtype TEXT, head_dim INTEGER, tile_m INTEGER,
    tile_n INTEGER, tile_k INTEGER, stages INTEGER, warps INTEGER, direction TEXT,
    causal INTEGER, dropout INTEGER, UNIQUE (name, kind)) STRICT;

CREATE TABLE launch_configs (
    id INTEGER PRIMARY KEY, grid_x INTEGER, grid_y INTEGER, grid_z INTEGER, block_x INTEGER,
    block_y INTEGER, block_z INTEGER, registers_per_thread INTEGER, static_shared_bytes INTEGER,
    dynamic_shared_bytes INTEGER, shared_bytes INTEGER) STRICT;
CREATE INDEX launch_configs_key ON launch_configs(
    grid_x, grid_y, grid_z, block_x, registers_per_thread, shared_bytes);

CREATE TABLE op_paths (id INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE, sdpa_op TEXT) STRICT;
CREATE TABLE apis (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE) STRICT;
CREATE TABLE range_names (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE) STRICT;

CREATE TABLE ranges (
    id INTEGER PRIMARY KEY, trace_id INTEGER NOT NULL REFERENCES traces(id) ON DELETE CASCADE,
    name_id INTEGER NOT NULL REFERENCES range_names(id),
    cell_id INTEGER REFERENCES cells(id) ON DELETE CASCADE, iteration INTEGER,
    parent_id INTEGER REFERENCES ranges(id) DEFERRABLE INITIALLY DEFERRED,
    start_ns INTEGER NOT NULL, duration_ns INTEGER NOT NULL, pid INTEGER NOT NULL,
    tid INTEGER NOT NULL) STRICT;
CREATE INDEX ranges_trace ON ranges(trace_id);
CREATE INDEX ranges_cell ON ranges(cell_id) WHERE cell_id IS NOT NULL;
CREATE INDEX ranges_parent ON ranges(parent_id) WHERE parent_id IS NOT NULL;

CREATE TABLE launches (
    id INTEGER PRIMARY KEY, trace_id INTEGER NOT NULL REFERENCES traces(id) ON DELETE CASCADE,
    cell_id INTEGER REFERENCES cells(id) ON DELETE CASCADE, iteration INTEGER,
    kernel_id INTEGER NOT NULL REFERENCES kernels(id),
    launch_config_id INTEGER NOT NULL REFERENCES launch_configs(id),
    op_path_id INTEGER REFERENCES op_paths(id),
    range_id INTEGER REFERENCES ranges(id) ON DELETE SET NULL,
    api_id INTEGER REFERENCES apis(id), device INTEGER NOT NULL, stream INTEGER,
    correlation INTEGER, graph_node INTEGER, pid INTEGER, tid INTEGER, launch_ns INTEGER,
    start_ns INTEGER NOT NULL, duration_ns INTEGER, bytes INTEGER) STRICT;
CREATE INDEX launches_cell ON launches(cell_id) WHERE cell_id IS NOT NULL;

CREATE TABLE launch_groups (
    id INTEGER PRIMARY KEY, trace_id INTEGER NOT NULL REFERENCES traces(id) ON DELETE CASCADE,
    by_op INTEGER NOT NULL, cell_id INTEGER REFERENCES cells(id) ON DELETE CASCADE,
    range_name_id INTEGER REFERENCES range_names(id),
    kernel_id INTEGER NOT NULL REFERENCES kernels(id),
    launch_config_id INTEGER NOT NULL REFERENCES launch_configs(id),
    op_path_id INTEGER REFERENCES op_paths(id), device INTEGER NOT NULL, launches INTEGER NOT NULL,
    total_ns INTEGER, median_ns INTEGER, min_ns INTEGER, max_ns INTEGER,
    first_ns INTEGER NOT NULL) STRICT;
CREATE INDEX launch_groups_trace ON launch_groups(trace_id, by_op);
CREATE INDEX launch_groups_cell ON launch_groups(cell_id) WHERE cell_id IS NOT NULL;

CREATE TABLE device_times (
    trace_id INTEGER NOT NULL REFERENCES traces(id) ON DELETE CASCADE, device INTEGER NOT NULL,
    launches INTEGER NOT NULL, start_ns INTEGER NOT NULL, end_ns INTEGER NOT NULL,
    busy_ns INTEGER NOT NULL, collective_ns INTEGER NOT NULL, exposed_ns INTEGER NOT NULL,
    PRIMARY KEY (trace_id, device)) STRICT, WITHOUT ROWID;

CREATE TABLE steps (
    trace_id INTEGER NOT NULL REFERENCES traces(id) ON DELETE CASCADE, ordinal INTEGER NOT NULL,
    name TEXT NOT NULL, start_ns INTEGER NOT NULL, duration_ns INTEGER NOT NULL,
    PRIMARY KEY (trace_id, ordinal)) STRICT, WITHOUT ROWID;

CREATE TABLE templates (
    id INTEGER PRIMARY KEY, run_id INTEGER NOT NULL REFERENCES runs(id) ON DELETE CASCADE,
    pid INTEGER NOT NULL, rank INTEGER, kind TEXT NOT NULL, op TEXT NOT NULL, name TEXT, path TEXT,
    compiled INTEGER NOT NULL, recompute INTEGER NOT NULL, backward INTEGER NOT NULL,
    modules TEXT NOT NULL, config_id INTEGER REFERENCES configs(id), reason TEXT, tensors TEXT NOT NULL,
    calls INTEGER NOT NULL, lengths TEXT NOT NULL, asked TEXT, enabled TEXT NOT NULL, choice TEXT,
    ran TEXT, mask TEXT, file TEXT, line INTEGER, function TEXT) STRICT;
CREATE INDEX templates_run ON templates(run_id);

CREATE TABLE calls (
    id INTEGER PRIMARY KEY, trace_id INTEGER NOT NULL REFERENCES traces(id) ON DELETE CASCADE,
    ordinal INTEGER NOT NULL, step INTEGER, kind TEXT NOT NULL, op TEXT NOT NULL, sdpa_op TEXT,
    compiled INTEGER NOT NULL, graph INTEGER NOT NULL, recompute INTEGER NOT NULL,
    backward INTEGER NOT NULL, path TEXT,
    modules TEXT NOT NULL, config_id INTEGER REFERENCES configs(id), reason TEXT,
    tensors TEXT NOT NULL, pid INTEGER NOT NULL, tid INTEGER NOT NULL, start_ns INTEGER NOT NULL,
    duration_ns INTEGER NOT NULL, template_id INTEGER REFERENCES templates(id)) STRICT;
CREATE INDEX calls_template ON calls(template_id) WHERE template_id IS NOT NULL;
CREATE INDEX calls_trace ON calls(trace_id);
CREATE INDEX calls_config ON calls(config_id) WHERE config_id IS NOT NULL;

CREATE TABLE call_kernels (
    call_id INTEGER NOT NULL REFERENCES calls(id) ON DELETE CASCADE, direction TEXT NOT NULL,
    kernel_id INTEGER NOT NULL REFERENCES kernels(id),
    launch_config_id INTEGER NOT NULL REFERENCES launch_configs(id), launches INTEGER NOT NULL,
    total_ns INTEGER NOT NULL, first_ns INTEGER NOT NULL,
    PRIMARY KEY (call_id, direction, kernel_id, launch_config_id)) STRICT, WITHOUT ROWID;

CREATE TABLE metrics (
    launch_id INTEGER NOT NULL REFERENCES launches(id) ON DELETE CASCADE, name TEXT NOT NULL,
    value REAL NOT NULL, unit TEXT NOT NULL,
    PRIMARY KEY (launch_id, name)) STRICT, WITHOUT ROWID
"""


_RESOURCES = """grid_x, grid_y, grid_z, block_x, block_y, block_z, registers_per_thread,
    static_shared_bytes, dynamic_shared_bytes, shared_bytes"""
ROCM_RESOURCES = ", accum_registers_per_thread, scalar_registers, scratch_bytes_per_thread"
"""Columns that schema 19 added at the end of the views."""
_LAUNCHES_OF_TRACES = """FROM traces t JOIN runs r ON r.id = t.run_id
    JOIN launches l ON l.id BETWEEN t.first_launch_id AND t.last_launch_id
    JOIN kernels k ON k.id = l.kernel_id JOIN launch_configs lc ON lc.id = l.launch_config_id
    LEFT JOIN cells c ON c.id = l.cell_id LEFT JOIN configs cf ON cf.id = c.config_id"""

_STATISTICS = ("samples", "median_ns", "min_ns", "max_ns")
_SUMMARIES = " ".join(
    f"LEFT JOIN sample_summary {name} ON {name}.cell_id = c.id AND {name}.measurement = '{name}'"
    for name in ("event", "graph", "wall", "cold", "eager", "host")
)


def _statistics(measurement: str) -> str:
    return ", ".join(f"{measurement}.{name} AS {measurement}_{name}" for name in _STATISTICS)


# kernel_groups and sample_summary are internal; docs/contracts.md lists the other views.
VIEWS = {
    "kernel_launches": f"""
        SELECT r.run, cf.label AS config, c.backend, t.profiler, rn.name AS range,
            k.name AS kernel, k.short AS kernel_short, k.family, {_RESOURCES}, l.stream, l.device,
            l.start_ns, l.duration_ns, k.kind AS kernel_kind, c.cell, l.iteration,
            o.path AS op_path, o.sdpa_op, a.name AS api, l.correlation, l.graph_node, l.pid, l.tid,
            l.launch_ns, l.bytes, l.id AS launch_id{ROCM_RESOURCES}
        {_LAUNCHES_OF_TRACES}
        LEFT JOIN ranges g ON g.id = l.range_id LEFT JOIN range_names rn ON rn.id = g.name_id
        LEFT JOIN op_paths o ON o.id = l.op_path_id LEFT JOIN apis a ON a.id = l.api_id""",
    "kernel_groups": f"""
        SELECT r.run, cf.label AS config, c.backend, t.profiler, rn.name AS range,
            k.name AS kernel, k.short AS kernel_short, k.family, {_RESOURCES}, g.device,
            g.launches, CAST(g.launches AS REAL) / tc.calls AS launches_per_call,
            g.median_ns AS duration_ns, g.total_ns, g.min_ns, g.max_ns, g.first_ns,
            k.kind AS kernel_kind, c.cell, c.status, o.path AS op_path, o.sdpa_op,
            g.id AS group_id, g.by_op, g.trace_id, g.cell_id, g.range_name_id, g.kernel_id,
            g.launch_config_id, g.op_path_id, c.config_id, r.id AS run_id, r.created{ROCM_RESOURCES}
        FROM launch_groups g JOIN traces t ON t.id = g.trace_id JOIN runs r ON r.id = t.run_id
        JOIN kernels k ON k.id = g.kernel_id JOIN launch_configs lc ON lc.id = g.launch_config_id
        LEFT JOIN cells c ON c.id = g.cell_id LEFT JOIN configs cf ON cf.id = c.config_id
        LEFT JOIN trace_cells tc ON tc.trace_id = g.trace_id AND tc.cell_id = g.cell_id
        LEFT JOIN range_names rn ON rn.id = g.range_name_id
        LEFT JOIN op_paths o ON o.id = g.op_path_id""",
    "kernel_summary": f"""
        SELECT run, config, backend, profiler, range, kernel, kernel_short, family, {_RESOURCES},
            device, launches, launches_per_call, duration_ns, total_ns, min_ns, max_ns, first_ns,
            kernel_kind, cell, status, op_path, sdpa_op{ROCM_RESOURCES}
        FROM kernel_groups WHERE by_op = 0""",
    "kernel_metrics": f"""
        SELECT r.run, cf.label AS config, c.backend, c.cell, k.name AS kernel,
            k.short AS kernel_short, lc.grid_x, lc.grid_y, lc.grid_z, lc.block_x, lc.block_y,
            lc.block_z, m.name AS metric, m.value, m.unit, l.id AS launch_id
        {_LAUNCHES_OF_TRACES} JOIN metrics m ON m.launch_id = l.id""",
    "attention_calls": """
        SELECT r.run, t.profiler, t.path AS trace, c.ordinal AS call, s.name AS step,
            coalesce(c.path, (SELECT group_concat(m.value, '.') FROM json_each(c.modules) m))
                AS module,
            cf.label AS config, c.kind, c.op, c.sdpa_op,
            CASE WHEN c.graph THEN 'graph' WHEN c.compiled THEN 'compile' ELSE 'eager' END
                AS mode, c.recompute,
            c.backward, sum(k.total_ns) FILTER (WHERE k.direction <> 'backward') AS forward_ns,
            sum(k.total_ns) FILTER (WHERE k.direction = 'backward') AS backward_ns,
            coalesce(sum(k.launches), 0) AS launches, c.reason,
            c.config_id IS NOT NULL AND c.reason IS NULL AS replayable, c.start_ns, c.duration_ns,
            o.asked, o.choice, o.mask, o.file, o.line
        FROM calls c JOIN traces t ON t.id = c.trace_id JOIN runs r ON r.id = t.run_id
        LEFT JOIN steps s ON s.trace_id = c.trace_id AND s.ordinal = c.step
        LEFT JOIN configs cf ON cf.id = c.config_id LEFT JOIN call_kernels k ON k.call_id = c.id
        LEFT JOIN templates o ON o.id = c.template_id
        GROUP BY c.id""",
    "observed_calls": """
        SELECT r.run, o.pid, o.rank, coalesce(o.path, (
                SELECT group_concat(m.value, '.') FROM json_each(o.modules) m)) AS module,
            cf.label AS config, o.kind, CASE o.compiled WHEN 1 THEN 'compile' ELSE 'eager' END AS mode,
            o.recompute, o.backward, o.calls, o.lengths, o.asked, o.enabled, o.choice, o.ran, o.mask,
            o.file, o.line, o.function, o.reason FROM templates o JOIN runs r ON r.id = o.run_id
        LEFT JOIN configs cf ON cf.id = o.config_id""",
    "sample_summary": """
        SELECT cell_id, measurement, count(*) AS samples, min(duration_ns) AS min_ns,
            max(duration_ns) AS max_ns, avg(duration_ns) AS mean_ns,
            avg(duration_ns) FILTER (WHERE place IN ((total + 1) / 2, total / 2 + 1)) AS median_ns
        FROM (SELECT cell_id, measurement, duration_ns,
                row_number() OVER (
                    PARTITION BY cell_id, measurement ORDER BY duration_ns) AS place,
                count(*) OVER (PARTITION BY cell_id, measurement) AS total
            FROM samples)
        GROUP BY cell_id, measurement""",
    "cell_summary": f"""
        SELECT r.run, c.cell, cf.label AS config, c.backend, c.status, c.message, c.choice,
            c.sdpa_op, c.iterations,
            (SELECT group_concat(code, ',') FROM
                (SELECT code FROM refusals f WHERE f.cell_id = c.id ORDER BY f.ordinal)
            ) AS refusal_codes,
            {", ".join(f"coalesce(event.{name}, cold.{name}) AS event_{name}" for name in _STATISTICS)},
            {_statistics("graph")}, {_statistics("wall")}, c.peak_memory_bytes, c.warnings,
            {_statistics("cold")}, {_statistics("eager")}, {_statistics("host")}
        FROM cells c JOIN runs r ON r.id = c.run_id JOIN configs cf ON cf.id = c.config_id
        {_SUMMARIES}""",
}


def records(
    connection: sqlite3.Connection, sql: str, values: Sequence[Any] = ()
) -> list[dict[str, Any]]:
    """Return the rows of a query as dicts from column names to values. Decode JSON_COLUMNS."""
    cursor = connection.execute(sql, values)
    names = [column[0] for column in cursor.description]
    rows = [dict(zip(names, row, strict=True)) for row in cursor]
    for name in JSON_COLUMNS.intersection(names):
        for row in rows:
            row[name] = None if row[name] is None else json.loads(row[name])
    return rows


def rows_of(
    connection: sqlite3.Connection, kind: type[T], sql: str, values: Sequence[Any] = ()
) -> list[T]:
    """Return the rows of a query as objects of a class. Ignore columns without a field."""
    return msgspec.convert(records(connection, sql, values), list[kind], strict=False)  # type: ignore[valid-type]


def insert_statement(table: str, marks: Mapping[str, str], rows: int = 1) -> str:
    """Return the statement that inserts rows. `marks` maps columns to parameters or expressions."""
    row = f"({', '.join(marks.values())})"
    return f"INSERT INTO {table} ({', '.join(marks)}) VALUES {', '.join([row] * rows)}"


def insert_row(connection: sqlite3.Connection, table: str, row: Mapping[str, object]) -> int:
    """Insert a row and return its id. Store tuples, lists and dicts as JSON."""
    statement = insert_statement(table, dict.fromkeys(row, "?"))
    return int(connection.execute(statement, list(map(_encoded, row.values()))).lastrowid or 0)


def insert_rows(
    connection: sqlite3.Connection,
    table: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
) -> None:
    """Insert rows. The values of each row must be in the order of `columns`."""
    marks = dict.fromkeys(columns, "?")
    whole = insert_statement(table, marks, ROWS_PER_STATEMENT)
    left = iter(rows)
    while block := list(islice(left, ROWS_PER_STATEMENT)):
        is_whole = len(block) == ROWS_PER_STATEMENT
        statement = whole if is_whole else insert_statement(table, marks, len(block))
        connection.execute(statement, list(chain.from_iterable(block)))


def columns_of(connection: sqlite3.Connection, table: str) -> dict[str, bool]:
    """Map the columns of a table to whether the column is NOT NULL."""
    rows = connection.execute('SELECT name, "notnull" FROM pragma_table_info(?)', (table,))
    return {name: bool(never_null) for name, never_null in rows}


def fields_of(connection: sqlite3.Connection, table: str, *records: object) -> dict[str, Any]:
    """Return the attributes of `records` that have the same names as columns of a table."""
    names = columns_of(connection, table)
    return {
        name: getattr(record, name) for record in records for name in names if hasattr(record, name)
    }


def to_json(value: object) -> str:
    """Convert a value to canonical JSON. Equal values are converted to equal strings."""
    return json.dumps(
        value,
        sort_keys=True,
        separators=(",", ":"),
        default=lambda item: msgspec.to_builtins(item, enc_hook=str),
    )


def _encoded(value: object) -> object:
    return to_json(value) if isinstance(value, tuple | list | dict) else value


def row_id(
    connection: sqlite3.Connection,
    table: str,
    key: Mapping[str, object],
    more: Callable[[], Mapping[str, object]] = dict,
) -> int:
    """Return the id of the row with a key, which may contain NULLs.

    If there is no such row, insert a row with the key and the columns that `more` returns.
    """
    where, values = " AND ".join(f"{column} IS ?" for column in key), map(_encoded, key.values())
    existing = connection.execute(f"SELECT id FROM {table} WHERE {where}", list(values)).fetchone()
    return int(existing[0]) if existing else insert_row(connection, table, {**key, **more()})


def config_ids(
    connection: sqlite3.Connection, configs: Iterable[Config | None]
) -> dict[Config | None, int | None]:
    """Return the ids of attention configs. Insert missing configs, and return None for None."""
    ids: dict[Config | None, int | None] = {None: None}
    # not a set, because the order of a set, and so the ids, would differ between processes
    for config in dict.fromkeys(configs):
        if config is not None:
            ids[config] = row_id(connection, "configs", {"label": config.label, **asdict(config)})
    return ids


def forget_run(connection: sqlite3.Connection, run: str) -> None:
    """Delete a run with all its rows in the caller's transaction. Ignore a missing run.

    Rows that refer to other rows are deleted first, so that this works with and without foreign key
    checks. Launches are deleted by their ids, which is fast.
    """
    row = connection.execute("SELECT id FROM runs WHERE run = ?", (run,)).fetchone()
    if row is None:
        return
    for ids in connection.execute(
        "SELECT first_launch_id, last_launch_id FROM traces WHERE run_id = ?", row
    ).fetchall():
        connection.execute("DELETE FROM metrics WHERE launch_id BETWEEN ? AND ?", ids)
        connection.execute("DELETE FROM launches WHERE id BETWEEN ? AND ?", ids)
    of_trace = "trace_id IN (SELECT id FROM traces WHERE run_id = ?)"
    of_cell = "cell_id IN (SELECT id FROM cells WHERE run_id = ?)"
    for tables, where in (
        ("call_kernels", f"call_id IN (SELECT id FROM calls WHERE {of_trace})"),
        ("launch_groups device_times trace_cells ranges calls steps", of_trace),
        ("samples refusals verifications", of_cell),
        ("traces cells devices templates", "run_id = ?"),
        ("runs", "id = ?"),
    ):
        for table in tables.split():
            connection.execute(f"DELETE FROM {table} WHERE {where}", row)
    connection.execute("DELETE FROM environments WHERE id NOT IN (SELECT environment_id FROM runs)")
