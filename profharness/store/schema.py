"""The store's tables and views, as sqlite_utils migrations that are never edited after a release.

The launches of a trace have consecutive ids, so a range of ids stands for an index on trace_id.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    pass


APPLICATION_ID = 0x70726F66  # "prof", so that a foreign SQLite file is recognised
SCHEMA_VERSION = 6
MIGRATION_SET = "profharness"


TABLES_1 = (
    """CREATE TABLE environments (
        id INTEGER PRIMARY KEY, hash TEXT NOT NULL UNIQUE, data TEXT NOT NULL) STRICT""",
    """CREATE TABLE runs (
        id INTEGER PRIMARY KEY, run TEXT NOT NULL UNIQUE, created TEXT NOT NULL,
        source TEXT NOT NULL CHECK (source IN ('capture', 'trace')), path TEXT NOT NULL,
        content_hash TEXT NOT NULL, environment_id INTEGER NOT NULL REFERENCES environments(id),
        device TEXT, torch TEXT, profilers TEXT NOT NULL, protocol TEXT, note TEXT,
        profharness TEXT) STRICT""",
    "CREATE INDEX runs_created ON runs(created, id)",
    "CREATE INDEX runs_content ON runs(content_hash)",
    "CREATE INDEX runs_environment ON runs(environment_id)",
    """CREATE TABLE devices (
        run_id INTEGER NOT NULL REFERENCES runs(id) ON DELETE CASCADE,
        device_index INTEGER NOT NULL,
        name TEXT NOT NULL, compute_major INTEGER NOT NULL, compute_minor INTEGER NOT NULL,
        num_sms INTEGER NOT NULL, total_memory_bytes INTEGER, max_threads_per_block INTEGER,
        max_threads_per_sm INTEGER, registers_per_block INTEGER, registers_per_sm INTEGER,
        shared_bytes_per_block INTEGER, shared_bytes_per_block_optin INTEGER,
        shared_bytes_per_sm INTEGER, warp_size INTEGER NOT NULL,
        PRIMARY KEY (run_id, device_index)) STRICT, WITHOUT ROWID""",
    """CREATE TABLE configs (
        id INTEGER PRIMARY KEY, label TEXT NOT NULL, batch INTEGER NOT NULL,
        num_heads INTEGER NOT NULL, num_kv_heads INTEGER NOT NULL, seq_len_q INTEGER NOT NULL,
        seq_len_kv INTEGER NOT NULL, head_dim INTEGER NOT NULL, dtype TEXT, causal INTEGER NOT NULL,
        mask TEXT NOT NULL, dropout REAL NOT NULL, scale REAL, layout TEXT NOT NULL,
        bwd INTEGER NOT NULL) STRICT""",
    "CREATE INDEX configs_label ON configs(label)",
    """CREATE TABLE cells (
        id INTEGER PRIMARY KEY, run_id INTEGER NOT NULL REFERENCES runs(id) ON DELETE CASCADE,
        cell TEXT NOT NULL, config_id INTEGER NOT NULL REFERENCES configs(id),
        backend TEXT NOT NULL,
        status TEXT NOT NULL, message TEXT, choice TEXT, sdpa_op TEXT, iterations INTEGER NOT NULL,
        peak_memory_bytes INTEGER, duration_ns INTEGER, clocks TEXT NOT NULL,
        warnings TEXT NOT NULL, UNIQUE (run_id, cell)) STRICT""",
    "CREATE INDEX cells_config ON cells(config_id)",
    """CREATE TABLE samples (
        cell_id INTEGER NOT NULL REFERENCES cells(id) ON DELETE CASCADE, measurement TEXT NOT NULL,
        ordinal INTEGER NOT NULL, duration_ns INTEGER NOT NULL,
        PRIMARY KEY (cell_id, measurement, ordinal)) STRICT, WITHOUT ROWID""",
    """CREATE TABLE refusals (
        cell_id INTEGER NOT NULL REFERENCES cells(id) ON DELETE CASCADE, ordinal INTEGER NOT NULL,
        code TEXT NOT NULL, message TEXT NOT NULL, source TEXT NOT NULL,
        PRIMARY KEY (cell_id, ordinal)) STRICT, WITHOUT ROWID""",
    """CREATE TABLE traces (
        id INTEGER PRIMARY KEY, run_id INTEGER NOT NULL REFERENCES runs(id) ON DELETE CASCADE,
        profiler TEXT NOT NULL, path TEXT NOT NULL, content_hash TEXT NOT NULL,
        launches INTEGER NOT NULL, dropped INTEGER NOT NULL, skipped INTEGER NOT NULL,
        warnings TEXT NOT NULL, environment TEXT NOT NULL,
        first_launch_id INTEGER NOT NULL, last_launch_id INTEGER NOT NULL) STRICT""",
    "CREATE INDEX traces_run ON traces(run_id)",
    """CREATE TABLE trace_cells (
        trace_id INTEGER NOT NULL REFERENCES traces(id) ON DELETE CASCADE,
        cell_id INTEGER NOT NULL REFERENCES cells(id) ON DELETE CASCADE, calls INTEGER NOT NULL,
        start_ns INTEGER NOT NULL, launches INTEGER NOT NULL,
        PRIMARY KEY (trace_id, cell_id)) STRICT, WITHOUT ROWID""",
    "CREATE INDEX trace_cells_cell ON trace_cells(cell_id)",
    """CREATE TABLE kernels (
        id INTEGER PRIMARY KEY, name TEXT NOT NULL, kind TEXT NOT NULL, short TEXT NOT NULL,
        family TEXT NOT NULL, backend TEXT, arch TEXT, dtype TEXT, head_dim INTEGER, tile_m INTEGER,
        tile_n INTEGER, stages INTEGER, warps INTEGER, direction TEXT, causal INTEGER,
        dropout INTEGER, UNIQUE (name, kind)) STRICT""",
    """CREATE TABLE launch_configs (
        id INTEGER PRIMARY KEY, grid_x INTEGER, grid_y INTEGER, grid_z INTEGER, block_x INTEGER,
        block_y INTEGER, block_z INTEGER, registers_per_thread INTEGER, static_shared_bytes INTEGER,
        dynamic_shared_bytes INTEGER, shared_bytes INTEGER) STRICT""",
    """CREATE INDEX launch_configs_key ON launch_configs(
        grid_x, grid_y, grid_z, block_x, registers_per_thread, shared_bytes)""",
    """CREATE TABLE op_paths (
        id INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE, sdpa_op TEXT) STRICT""",
    "CREATE TABLE apis (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE) STRICT",
    "CREATE TABLE range_names (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE) STRICT",
    """CREATE TABLE ranges (
        id INTEGER PRIMARY KEY, trace_id INTEGER NOT NULL REFERENCES traces(id) ON DELETE CASCADE,
        name_id INTEGER NOT NULL REFERENCES range_names(id),
        cell_id INTEGER REFERENCES cells(id) ON DELETE CASCADE, iteration INTEGER,
        parent_id INTEGER REFERENCES ranges(id) DEFERRABLE INITIALLY DEFERRED,
        start_ns INTEGER NOT NULL, duration_ns INTEGER NOT NULL, pid INTEGER NOT NULL,
        tid INTEGER NOT NULL) STRICT""",
    "CREATE INDEX ranges_trace ON ranges(trace_id)",
    "CREATE INDEX ranges_cell ON ranges(cell_id) WHERE cell_id IS NOT NULL",
    "CREATE INDEX ranges_parent ON ranges(parent_id) WHERE parent_id IS NOT NULL",
    """CREATE TABLE launches (
        id INTEGER PRIMARY KEY, trace_id INTEGER NOT NULL REFERENCES traces(id) ON DELETE CASCADE,
        cell_id INTEGER REFERENCES cells(id) ON DELETE CASCADE, iteration INTEGER,
        kernel_id INTEGER NOT NULL REFERENCES kernels(id),
        launch_config_id INTEGER NOT NULL REFERENCES launch_configs(id),
        op_path_id INTEGER REFERENCES op_paths(id),
        range_id INTEGER REFERENCES ranges(id) ON DELETE SET NULL,
        api_id INTEGER REFERENCES apis(id), device INTEGER NOT NULL, stream INTEGER,
        correlation INTEGER, graph_node INTEGER, pid INTEGER, tid INTEGER, launch_ns INTEGER,
        start_ns INTEGER NOT NULL, duration_ns INTEGER NOT NULL, bytes INTEGER) STRICT""",
    "CREATE INDEX launches_cell ON launches(cell_id) WHERE cell_id IS NOT NULL",
    """CREATE TABLE launch_groups (
        id INTEGER PRIMARY KEY, trace_id INTEGER NOT NULL REFERENCES traces(id) ON DELETE CASCADE,
        by_op INTEGER NOT NULL, cell_id INTEGER REFERENCES cells(id) ON DELETE CASCADE,
        range_name_id INTEGER REFERENCES range_names(id),
        kernel_id INTEGER NOT NULL REFERENCES kernels(id),
        launch_config_id INTEGER NOT NULL REFERENCES launch_configs(id),
        op_path_id INTEGER REFERENCES op_paths(id), device INTEGER NOT NULL,
        launches INTEGER NOT NULL, total_ns INTEGER NOT NULL, median_ns INTEGER NOT NULL,
        min_ns INTEGER NOT NULL, max_ns INTEGER NOT NULL, first_ns INTEGER NOT NULL) STRICT""",
    "CREATE INDEX launch_groups_trace ON launch_groups(trace_id, by_op)",
    "CREATE INDEX launch_groups_cell ON launch_groups(cell_id) WHERE cell_id IS NOT NULL",
    """CREATE TABLE metrics (
        launch_id INTEGER NOT NULL REFERENCES launches(id) ON DELETE CASCADE, name TEXT NOT NULL,
        value REAL, text TEXT, unit TEXT, PRIMARY KEY (launch_id, name)) STRICT, WITHOUT ROWID""",
)


TABLES_2 = (
    "ALTER TABLE configs ADD COLUMN head_dim_v INTEGER",
    "ALTER TABLE configs ADD COLUMN deterministic INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE runs ADD COLUMN problems TEXT NOT NULL DEFAULT '[]'",
)


TABLES_6 = ("ALTER TABLE cells ADD COLUMN tuning TEXT",)


GEOMETRY = """lc.grid_x, lc.grid_y, lc.grid_z, lc.block_x, lc.block_y, lc.block_z,
    lc.registers_per_thread, lc.static_shared_bytes, lc.dynamic_shared_bytes, lc.shared_bytes"""


VIEWS_1 = {
    "kernel_launches": f"""
        SELECT r.run, cf.label AS config, c.backend, t.profiler, rn.name AS range,
            k.name AS kernel, k.short AS kernel_short, k.family, {GEOMETRY}, l.stream, l.device,
            l.start_ns, l.duration_ns, k.kind AS kernel_kind, c.cell, l.iteration,
            o.path AS op_path, o.sdpa_op, a.name AS api, l.correlation, l.graph_node, l.pid, l.tid,
            l.launch_ns, l.bytes, l.id AS launch_id
        FROM traces t JOIN runs r ON r.id = t.run_id
        JOIN launches l ON l.id BETWEEN t.first_launch_id AND t.last_launch_id
        JOIN kernels k ON k.id = l.kernel_id JOIN launch_configs lc ON lc.id = l.launch_config_id
        LEFT JOIN cells c ON c.id = l.cell_id LEFT JOIN configs cf ON cf.id = c.config_id
        LEFT JOIN ranges g ON g.id = l.range_id LEFT JOIN range_names rn ON rn.id = g.name_id
        LEFT JOIN op_paths o ON o.id = l.op_path_id LEFT JOIN apis a ON a.id = l.api_id""",
    "kernel_summary": f"""
        SELECT r.run, cf.label AS config, c.backend, t.profiler, rn.name AS range,
            k.name AS kernel, k.short AS kernel_short, k.family, {GEOMETRY}, g.device, g.launches,
            CAST(g.launches AS REAL) / tc.calls AS launches_per_call, g.median_ns AS duration_ns,
            g.total_ns, g.min_ns, g.max_ns, g.first_ns, k.kind AS kernel_kind, c.cell, c.status,
            o.path AS op_path, o.sdpa_op
        FROM launch_groups g JOIN traces t ON t.id = g.trace_id JOIN runs r ON r.id = t.run_id
        JOIN kernels k ON k.id = g.kernel_id JOIN launch_configs lc ON lc.id = g.launch_config_id
        LEFT JOIN cells c ON c.id = g.cell_id LEFT JOIN configs cf ON cf.id = c.config_id
        LEFT JOIN trace_cells tc ON tc.trace_id = g.trace_id AND tc.cell_id = g.cell_id
        LEFT JOIN range_names rn ON rn.id = g.range_name_id
        LEFT JOIN op_paths o ON o.id = g.op_path_id
        WHERE g.by_op = 0""",
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
    "cell_summary": """
        SELECT r.run, c.cell, cf.label AS config, c.backend, c.status, c.message, c.choice,
            c.sdpa_op, c.iterations,
            (SELECT group_concat(code, ',') FROM
                (SELECT code FROM refusals f WHERE f.cell_id = c.id ORDER BY f.ordinal)
            ) AS refusal_codes,
            e.samples AS event_samples, e.median_ns AS event_median_ns, e.min_ns AS event_min_ns,
            e.max_ns AS event_max_ns, g.samples AS graph_samples, g.median_ns AS graph_median_ns,
            g.min_ns AS graph_min_ns, g.max_ns AS graph_max_ns, w.samples AS wall_samples,
            w.median_ns AS wall_median_ns, w.min_ns AS wall_min_ns, w.max_ns AS wall_max_ns,
            c.peak_memory_bytes, c.warnings
        FROM cells c JOIN runs r ON r.id = c.run_id JOIN configs cf ON cf.id = c.config_id
        LEFT JOIN sample_summary e ON e.cell_id = c.id AND e.measurement = 'event'
        LEFT JOIN sample_summary g ON g.cell_id = c.id AND g.measurement = 'graph'
        LEFT JOIN sample_summary w ON w.cell_id = c.id AND w.measurement = 'wall'""",
}


# A launch whose time was not measured has the duration -1 in its table, for the column is NOT NULL;
# the same holds for the four times of a group with such a launch. Views and queries tell NULL.
VIEWS_3 = {
    "kernel_launches": VIEWS_1["kernel_launches"].replace(
        "l.duration_ns,", "nullif(l.duration_ns, -1) AS duration_ns,"
    ),
    "kernel_summary": VIEWS_1["kernel_summary"]
    .replace("g.median_ns AS duration_ns", "nullif(g.median_ns, -1) AS duration_ns")
    .replace(
        "g.total_ns, g.min_ns, g.max_ns,",
        "nullif(g.total_ns, -1) AS total_ns, nullif(g.min_ns, -1) AS min_ns, "
        "nullif(g.max_ns, -1) AS max_ns,",
    ),
    "kernel_metrics": """
        SELECT r.run, cf.label AS config, c.backend, c.cell, k.name AS kernel,
            k.short AS kernel_short, lc.grid_x, lc.grid_y, lc.grid_z, lc.block_x, lc.block_y,
            lc.block_z, m.name AS metric, m.value, m.unit, l.id AS launch_id
        FROM traces t JOIN runs r ON r.id = t.run_id
        JOIN launches l ON l.id BETWEEN t.first_launch_id AND t.last_launch_id
        JOIN metrics m ON m.launch_id = l.id
        JOIN kernels k ON k.id = l.kernel_id JOIN launch_configs lc ON lc.id = l.launch_config_id
        LEFT JOIN cells c ON c.id = l.cell_id LEFT JOIN configs cf ON cf.id = c.config_id""",
}


def migrate(connection: sqlite3.Connection) -> None:
    """Bring the schema up to date inside the caller's open write transaction.

    sqlite_utils (which imports pandas) is loaded here only: an up-to-date store never pays for it.
    """
    from sqlite_utils import Database, Migrations

    migrations = Migrations(MIGRATION_SET)
    migrations(name="001_initial")(_initial)
    migrations(name="002_problems")(_problems)
    migrations(name="003_metrics")(_metrics)
    migrations(name="004_verifications")(_verifications)
    migrations(name="005_peaks")(_peaks)
    migrations(name="006_tuning")(_tuning)
    migrations.apply(Database(connection))
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def forget_run(connection: sqlite3.Connection, run: str) -> bool:
    """Delete a run and all that hangs on it inside the caller's transaction; whether there was one.

    Children go first and launches by their ids, so that it is quick and right with foreign keys on
    or off.
    """
    found = connection.execute("SELECT id FROM runs WHERE run = ?", (run,)).fetchone()
    if found is None:
        return False
    for first, last in connection.execute(
        "SELECT first_launch_id, last_launch_id FROM traces WHERE run_id = ?", found
    ).fetchall():
        for table, column in (("metrics", "launch_id"), ("launches", "id")):
            connection.execute(f"DELETE FROM {table} WHERE {column} BETWEEN ? AND ?", (first, last))
    for table in ("launch_groups", "trace_cells", "ranges"):
        connection.execute(
            f"DELETE FROM {table} WHERE trace_id IN (SELECT id FROM traces WHERE run_id = ?)", found
        )
    for table in ("samples", "refusals", "verifications"):
        connection.execute(
            f"DELETE FROM {table} WHERE cell_id IN (SELECT id FROM cells WHERE run_id = ?)", found
        )
    for table in ("traces", "cells", "devices"):
        connection.execute(f"DELETE FROM {table} WHERE run_id = ?", found)
    connection.execute("DELETE FROM runs WHERE id = ?", found)
    connection.execute("DELETE FROM environments WHERE id NOT IN (SELECT environment_id FROM runs)")
    return True


def _initial(db: Any) -> None:
    for statement in TABLES_1:
        db.execute(statement)
    for name, select in VIEWS_1.items():
        db.create_view(name, select)


def _problems(db: Any) -> None:
    for statement in TABLES_2:
        db.execute(statement)


def _metrics(db: Any) -> None:
    for name, select in VIEWS_3.items():
        db.create_view(name, select, replace=True)


def _verifications(db: Any) -> None:
    for statement in TABLES_4:
        db.execute(statement)


def _peaks(db: Any) -> None:
    for statement in TABLES_5:
        db.execute(statement)


def _tuning(db: Any) -> None:
    for statement in TABLES_6:
        db.execute(statement)


TABLES_4 = (
    """CREATE TABLE verifications (
        cell_id INTEGER NOT NULL REFERENCES cells(id) ON DELETE CASCADE, ordinal INTEGER NOT NULL,
        asked TEXT NOT NULL, case_name TEXT NOT NULL, what TEXT NOT NULL, error REAL,
        allowance REAL, relative_error REAL, relative_allowance REAL, passed INTEGER, message TEXT,
        PRIMARY KEY (cell_id, ordinal)) STRICT, WITHOUT ROWID""",
)


# No reference to environments: they go with the last run that has them, a measurement stays.
TABLES_5 = (
    """CREATE TABLE peaks (
        id INTEGER PRIMARY KEY, device TEXT NOT NULL, created TEXT NOT NULL,
        bandwidth_bytes_per_s REAL, flops_per_s TEXT NOT NULL, l2_bytes INTEGER, num_sms INTEGER,
        origin TEXT NOT NULL, environment TEXT NOT NULL) STRICT""",
    "CREATE INDEX peaks_device ON peaks(device, id)",
)
