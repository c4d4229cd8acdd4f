"""The store file: its tables and views, and how it is opened.

Migrations are made with sqlite_utils and never edited after a release. The launches of a trace have
consecutive ids, so a range of ids stands for an index on trace_id.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from profharness.errors import NotFoundError, StoreError

APPLICATION_ID = 0x70726F66  # "prof", so that a foreign SQLite file is recognised
SCHEMA_VERSION = 13  # 1 to 12 were never released
MIGRATION_SET = "profharness"
BUSY_SECONDS = 600.0
WHOLLY_CHECKED_BYTES = 32 << 20  # some 0.2 s
SMALL_TABLES = (
    *("environments", "runs", "devices", "configs", "cells", "refusals", "traces", "trace_cells"),
    *("kernels", "launch_configs", "op_paths", "apis", "range_names"),
)
MAGIC = b"SQLite format 3\0"
Answer = TypeVar("Answer")

# peaks does not refer to environments: these go with the last run that has them, peaks stay.
TABLES = """
CREATE TABLE environments (
    id INTEGER PRIMARY KEY, hash TEXT NOT NULL UNIQUE, data TEXT NOT NULL) STRICT;

CREATE TABLE runs (
    id INTEGER PRIMARY KEY, run TEXT NOT NULL UNIQUE, created TEXT NOT NULL,
    source TEXT NOT NULL CHECK (source IN ('capture', 'trace')), kind TEXT NOT NULL,
    path TEXT NOT NULL,
    content_hash TEXT NOT NULL, environment_id INTEGER NOT NULL REFERENCES environments(id),
    device TEXT, torch TEXT, profilers TEXT NOT NULL, protocol TEXT, bench TEXT, note TEXT,
    profharness TEXT,
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
_LAUNCHES_OF_TRACES = """FROM traces t JOIN runs r ON r.id = t.run_id
    JOIN launches l ON l.id BETWEEN t.first_launch_id AND t.last_launch_id
    JOIN kernels k ON k.id = l.kernel_id JOIN launch_configs lc ON lc.id = l.launch_config_id
    LEFT JOIN cells c ON c.id = l.cell_id LEFT JOIN configs cf ON cf.id = c.config_id"""

# kernel_groups and sample_summary serve the store itself; docs/design.md lists the other views.
VIEWS = {
    "kernel_launches": f"""
        SELECT r.run, cf.label AS config, c.backend, t.profiler, rn.name AS range,
            k.name AS kernel, k.short AS kernel_short, k.family, {_RESOURCES}, l.stream, l.device,
            l.start_ns, l.duration_ns, k.kind AS kernel_kind, c.cell, l.iteration,
            o.path AS op_path, o.sdpa_op, a.name AS api, l.correlation, l.graph_node, l.pid, l.tid,
            l.launch_ns, l.bytes, l.id AS launch_id
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
            g.launch_config_id, g.op_path_id, c.config_id, r.id AS run_id, r.created
        FROM launch_groups g JOIN traces t ON t.id = g.trace_id JOIN runs r ON r.id = t.run_id
        JOIN kernels k ON k.id = g.kernel_id JOIN launch_configs lc ON lc.id = g.launch_config_id
        LEFT JOIN cells c ON c.id = g.cell_id LEFT JOIN configs cf ON cf.id = c.config_id
        LEFT JOIN trace_cells tc ON tc.trace_id = g.trace_id AND tc.cell_id = g.cell_id
        LEFT JOIN range_names rn ON rn.id = g.range_name_id
        LEFT JOIN op_paths o ON o.id = g.op_path_id""",
    "kernel_summary": f"""
        SELECT run, config, backend, profiler, range, kernel, kernel_short, family, {_RESOURCES},
            device, launches, launches_per_call, duration_ns, total_ns, min_ns, max_ns, first_ns,
            kernel_kind, cell, status, op_path, sdpa_op
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
    "cell_summary": """
        SELECT r.run, c.cell, cf.label AS config, c.backend, c.status, c.message, c.choice,
            c.sdpa_op, c.iterations,
            (SELECT group_concat(code, ',') FROM
                (SELECT code FROM refusals f WHERE f.cell_id = c.id ORDER BY f.ordinal)
            ) AS refusal_codes,
            coalesce(e.samples, o.samples) AS event_samples,
            coalesce(e.median_ns, o.median_ns) AS event_median_ns,
            coalesce(e.min_ns, o.min_ns) AS event_min_ns,
            coalesce(e.max_ns, o.max_ns) AS event_max_ns,
            g.samples AS graph_samples, g.median_ns AS graph_median_ns,
            g.min_ns AS graph_min_ns, g.max_ns AS graph_max_ns, w.samples AS wall_samples,
            w.median_ns AS wall_median_ns, w.min_ns AS wall_min_ns, w.max_ns AS wall_max_ns,
            c.peak_memory_bytes, c.warnings,
            o.samples AS cold_samples, o.median_ns AS cold_median_ns, o.min_ns AS cold_min_ns,
            o.max_ns AS cold_max_ns, a.samples AS eager_samples, a.median_ns AS eager_median_ns,
            a.min_ns AS eager_min_ns, a.max_ns AS eager_max_ns, h.samples AS host_samples,
            h.median_ns AS host_median_ns, h.min_ns AS host_min_ns, h.max_ns AS host_max_ns
        FROM cells c JOIN runs r ON r.id = c.run_id JOIN configs cf ON cf.id = c.config_id
        LEFT JOIN sample_summary e ON e.cell_id = c.id AND e.measurement = 'event'
        LEFT JOIN sample_summary g ON g.cell_id = c.id AND g.measurement = 'graph'
        LEFT JOIN sample_summary w ON w.cell_id = c.id AND w.measurement = 'wall'
        LEFT JOIN sample_summary o ON o.cell_id = c.id AND o.measurement = 'cold'
        LEFT JOIN sample_summary a ON a.cell_id = c.id AND a.measurement = 'eager'
        LEFT JOIN sample_summary h ON h.cell_id = c.id AND h.measurement = 'host'""",
}


def migrate(connection: sqlite3.Connection) -> None:
    """Bring the schema up to date inside the caller's open write transaction."""
    from sqlite_utils import Database, Migrations  # imports pandas; an up-to-date store needs none

    migrations = Migrations(MIGRATION_SET)
    migrations(name="013_initial")(_initial)
    migrations.apply(Database(connection))
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _initial(db: Any) -> None:
    for statement in _statements():
        db.execute(statement)


def _statements() -> Iterator[str]:
    """What makes the schema, each as SQLite keeps its text."""
    yield from (text.strip() for text in TABLES.split(";"))
    yield from (f"CREATE VIEW {name} AS {select}" for name, select in VIEWS.items())


def insert_row(connection: sqlite3.Connection, table: str, row: Mapping[str, object]) -> int:
    """Insert a row given by its columns' names; its id."""
    marks = ", ".join("?" * len(row))
    cursor = connection.execute(
        f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values())
    )
    return int(cursor.lastrowid or 0)


def forget_run(connection: sqlite3.Connection, run: str) -> bool:
    """Delete a run and all that hangs on it inside the caller's transaction; whether there was one.

    Children go first and launches by their ids, so that it is quick and right with foreign keys on
    or off.
    """
    row = connection.execute("SELECT id FROM runs WHERE run = ?", (run,)).fetchone()
    if row is None:
        return False
    for ids in connection.execute(
        "SELECT first_launch_id, last_launch_id FROM traces WHERE run_id = ?", row
    ).fetchall():
        connection.execute("DELETE FROM metrics WHERE launch_id BETWEEN ? AND ?", ids)
        connection.execute("DELETE FROM launches WHERE id BETWEEN ? AND ?", ids)
    trace_ids = "trace_id IN (SELECT id FROM traces WHERE run_id = ?)"
    call_ids = f"call_id IN (SELECT id FROM calls WHERE {trace_ids})"
    cell_ids = "cell_id IN (SELECT id FROM cells WHERE run_id = ?)"
    for tables, where in (
        (("call_kernels",), call_ids),
        (("launch_groups", "trace_cells", "ranges", "calls", "steps"), trace_ids),
        (("samples", "refusals", "verifications"), cell_ids),
        (("traces", "cells", "devices", "templates"), "run_id = ?"),
        (("runs",), "id = ?"),
    ):
        for table in tables:
            connection.execute(f"DELETE FROM {table} WHERE {where}", row)
    connection.execute("DELETE FROM environments WHERE id NOT IN (SELECT environment_id FROM runs)")
    return True


def connect(
    path: Path, *, write: bool, foreign_keys: bool = True, any_thread: bool = False
) -> sqlite3.Connection:
    """A connection in autocommit mode to an up-to-date store; with write, one is made if need be.
    any_thread: others than this thread may read with it.

    Raises NotFoundError when there is no store to read. Raises StoreError for a file that is
    foreign, damaged, or of another schema, which stays untouched.
    """
    if write and not path.exists() and not path.parent.is_dir():
        raise StoreError(f"{path}: its folder does not exist; create it or name another --store")
    if not write and not path.exists():
        raise NotFoundError(
            f"{path}: no store here; `profharness ingest FILE` or `profharness capture` makes one, "
            "--store names another"
        )
    _check_header(path)
    try:
        if write:
            return waiting(lambda: _open_writer(path, foreign_keys))
        return waiting(lambda: _open_reader(path, any_thread))
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if is_damage(error):
            raise damaged(path, error) from None
        raise StoreError(f"{path}: cannot be used as a store: {error}") from None


def damaged(path: Path, detail: object, what: str = "damaged inside") -> StoreError:
    """The error for a store that must not be used, with the way to a new one."""
    return StoreError(
        f"{path}: {what}, left as it is ({detail}); rebuild it from the run folders: "
        "profharness ingest traces/runs --store NEW"
    )


def is_damage(error: BaseException) -> bool:
    """Whether an error of reading a store can only come of damage to its file."""
    if isinstance(error, UnicodeDecodeError | json.JSONDecodeError):
        return True
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or (
        isinstance(error, sqlite3.Error) and "decode to UTF-8" in str(error)
    )


def find_damage(connection: sqlite3.Connection, *tables: str) -> str | None:
    """The first thing that SQLite finds wrong with its file, or with these tables; None if all is
    well. Reads all of it, at some 200 MB a second.
    """
    try:
        for name in tables or ("1",):
            (text,) = connection.execute(f"PRAGMA quick_check({name})").fetchone()
            if text != "ok":
                return str(text).splitlines()[-1]
    except sqlite3.DatabaseError as error:
        if is_damage(error):
            return str(error)
        raise
    return None


@cache
def _check_file(path: str, inode: int) -> None:  # noqa: ARG001
    """Raise StoreError for a damaged file, once a process: a run among many pays no more for it.

    Of a large store the tables are looked at that every ingest reads.
    """
    with closing(_raw(Path(path), "mode=ro")) as connection:
        large = Path(path).stat().st_size > WHOLLY_CHECKED_BYTES
        detail = find_damage(connection, *(SMALL_TABLES if large else ()))
    if detail:
        raise damaged(Path(path), detail)


def waiting(action: Callable[[], Answer]) -> Answer:
    """The action's answer, tried again while SQLite says busy.

    SQLite skips its own busy handler where waiting could deadlock, as in the switch to WAL or the
    recovery of one.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return action()
        except sqlite3.OperationalError as error:
            if not _is_busy(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """A write transaction: committed whole, or rolled back on any exception, Ctrl-C included."""
    waiting(lambda: connection.execute("BEGIN IMMEDIATE"))
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _is_busy(error: sqlite3.OperationalError) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
    )


def _check_header(path: Path) -> None:
    """Refuse a foreign file before SQLite opens it: opening may already replay a foreign WAL."""
    try:
        with path.open("rb") as file:
            header = file.read(100)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be read: {error.strerror}; name another --store"
        ) from None
    if not header:
        return
    if header[:16] != MAGIC[: len(header)] or len(header) < 100:
        raise StoreError(f"{path}: not an SQLite file, left as it is; name another --store")
    if int.from_bytes(header[68:72], "big") not in (0, APPLICATION_ID):
        raise _foreign(path)


def _foreign(path: Path) -> StoreError:
    return StoreError(
        f"{path}: an SQLite file of another program, left as it is; name another --store"
    )


def _raw(path: Path, mode: str, *, any_thread: bool = False) -> sqlite3.Connection:
    """A connection that distrusts the file: malformed cells are found, its schema calls nothing."""
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{mode}",
        timeout=BUSY_SECONDS,
        isolation_level=None,
        uri=True,
        check_same_thread=not any_thread,
    )
    connection.execute("PRAGMA cell_size_check = ON")
    connection.execute("PRAGMA trusted_schema = OFF")
    return connection


def _is_made(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the file has this schema; False for an empty one. Raises StoreError for any other."""
    application, version, objects = (
        connection.execute(query).fetchone()[0]
        for query in (
            "PRAGMA application_id",
            "PRAGMA user_version",
            "SELECT count(*) FROM sqlite_master",
        )
    )
    if application != APPLICATION_ID:
        if application or version or objects:
            raise _foreign(path)
        return False
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path}: made by a newer profharness (schema {version}, this one knows "
            f"{SCHEMA_VERSION}); upgrade profharness or name another --store"
        )
    if version < SCHEMA_VERSION:
        raise StoreError(
            f"{path}: made by an unreleased profharness (schema {version}); delete it or name "
            "another --store, then take the run folders in again: profharness ingest FOLDER"
        )
    _check_schema(connection, path)
    return True


def _check_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Raise StoreError where a table, index or view of ours is missing or altered, or a trigger is
    there: it would run at the next ingest. What else is in the file is its owner's.
    """
    found = connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    have = {sql for _, _, sql in found}
    wrong = [
        f"has no {' '.join(sql.split()[1:3])} as it was made"
        for sql in _statements()
        if sql not in have
    ]
    wrong += [f"holds a trigger, {name!r}" for kind, name, _ in found if kind == "trigger"]
    if wrong:
        raise damaged(path, wrong[0], "not as profharness made it")


def _open_writer(path: Path, foreign_keys: bool) -> sqlite3.Connection:
    if path.exists() and path.stat().st_size:
        with closing(_raw(path, "mode=ro")) as probe:
            _is_made(probe, path)
        _check_file(str(path.absolute()), path.stat().st_ino)
    connection = _raw(path, "mode=rwc")
    try:
        if not _is_made(connection, path):
            with transaction(connection):
                if not _is_made(connection, path):  # another process may have been quicker
                    migrate(connection)
        if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
            connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")
    except BaseException:
        connection.close()
        raise
    return connection


def _open_reader(path: Path, any_thread: bool) -> sqlite3.Connection:
    """A connection that cannot write rows; an immutable one on a medium that is read-only."""
    for mode in ("mode=rw", "mode=ro&immutable=1"):
        connection = _raw(path, mode, any_thread=any_thread)
        try:
            if not _is_made(connection, path):
                raise NotFoundError(f"{path}: an empty store; `profharness ingest FILE` fills it")
            connection.execute("PRAGMA query_only = ON")
        except sqlite3.OperationalError as error:
            connection.close()
            if _is_busy(error) or mode != "mode=rw":
                raise
        except BaseException:
            connection.close()
            raise
        else:
            return connection
    raise StoreError(f"{path}: cannot be opened")
