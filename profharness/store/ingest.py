"""Run folders and trace files into the store: one transaction a run, a no-op when the content is
already there. A raw trace of a run that cannot be read costs the run that trace alone.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path

import msgspec
import xxhash

from profharness import run as record
from profharness.devices import Device
from profharness.errors import StoreError, TraceFormatError
from profharness.parse import open_trace
from profharness.store import insert as intern
from profharness.store.connection import connect, transaction, waiting
from profharness.store.insert import CellTrace, Inserted, insert_trace, to_json
from profharness.store.metrics import insert_metrics
from profharness.store.schema import forget_run
from profharness.store.sources import Raw, Source, find_sources, problems, read_source
from profharness.store.verifications import insert_verifications
from profharness.trace import LaunchBatch, Trace


def tell_cells(
    connection: sqlite3.Connection,
    run: record.Run,
    ids: dict[str, int],
    results: list[tuple[str, Inserted]],
) -> list[str]:
    """Write what the traces say about the cells; the new warnings, each with its cell."""
    seen: dict[str, list[tuple[str, CellTrace]]] = {}
    for profiler, result in results:
        for trace in result.cells:
            seen.setdefault(trace.cell, []).append((profiler, trace))
    told = []
    for cell in run.cells:
        traces = seen.get(cell.cell, [])
        fresh = list(dict.fromkeys(text for _, trace in traces if (text := trace.warning())))
        fresh += [
            f"the {profiler} trace holds no launch of this cell"
            for profiler in _watched(run, cell)
            if not sum(sum(item.launches_per_call) for name, item in traces if name == profiler)
        ]
        ops = [trace.sdpa_op for _, trace in traces if trace.sdpa_op]
        connection.execute(
            "UPDATE cells SET sdpa_op = ?, warnings = ? WHERE id = ?",
            (ops[0] if ops else None, to_json([*cell.warnings, *fresh]), ids[cell.cell]),
        )
        told += [f"{cell.cell}: {text}" for text in fresh]
    return told


def _watched(run: record.Run, cell: record.Cell) -> list[str]:
    """The profilers that left a trace with this cell in it, which ran."""
    if cell.status != "ok":
        return []
    return list(dict.fromkeys(item.profiler for item in run.traces if cell.cell in item.cells))


def unmeasured(protocol: record.Protocol, trace: Trace) -> list[str]:
    """A warning for each metric asked for that ncu left out: it passes over names that it does not
    know, without a word.
    """
    if trace.profiler != "ncu" or not trace.num_launches:
        return []
    known = trace.metrics.names if trace.metrics else []
    return [
        f"ncu measured no {name}; `ncu --query-metrics` lists what this GPU has"
        for name in protocol.metrics
        if not any(each == name or each.startswith(f"{name}.") for each in known)
    ]


Progress = Callable[[str, int, int], None]


MAX_INT = (1 << 63) - 1  # of SQLite
EPOCH_NS = (10**18, 4 * 10**18)  # 2001 to 2096: a trace clock in this range tells the date


@dataclass(frozen=True, slots=True)
class IngestResult:
    """What became of one source: status is `new`, `unchanged` or `replaced`; launches and cells are
    those now stored.
    """

    run: str
    status: str
    source: Path
    launches: int
    cells: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Parsed:
    raw: Raw
    trace: Trace
    batches: Iterator[LaunchBatch]


class _RawError(Exception):
    """Reading a raw trace failed in the middle. args: the Raw, the TraceFormatError."""


class _Writer:
    """The store, opened when it exists or is needed: a source that cannot be read makes none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def known(self) -> sqlite3.Connection | None:
        """The connection, None while there is no file. Raises StoreError."""
        return self.open() if self._connection or self._path.exists() else None

    def open(self) -> sqlite3.Connection:
        """The connection, on a store that is made if need be. Raises StoreError."""
        if self._connection is None:
            # Checking six references a launch costs as much again as writing it; all ids stem
            # from here.
            self._connection = connect(self._path, write=True, foreign_keys=False)
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def ingest_path(
    store: Path, source: Path, *, progress: Progress | None = None
) -> list[IngestResult]:
    """Ingest a run folder, a trace file, or every one of them below a folder, in sorted order.

    progress is called with the source's name, launches done and launches in all. A run folder's
    trace that cannot be read becomes a problem of the stored run and a warning. Raises
    TraceFormatError for any other source that cannot be read (the store then keeps what it had
    before that source, and none is made), StoreError for a store that cannot be used.
    """
    writer = _Writer(store)
    results = []
    try:
        for path in find_sources(source):
            found = read_source(path)
            try:
                results.append(_ingest(writer, found, progress))
            except StoreError as error:
                raise StoreError(f"{error}{_kept(found)}") from None
            except sqlite3.Error as error:
                message = f"{store}: cannot be written: {error}; name another --store"
                raise StoreError(f"{message}{_kept(found)}") from None
    finally:
        writer.close()
    return results


def _kept(source: Source) -> str:
    """What to do with a run folder that a store did not take."""
    if source.run is None:
        return ""
    return (
        f"\nthe run is kept in {source.path}; to take it in: "
        f"profharness ingest {source.path} --store OTHER"
    )


def _ingest(writer: _Writer, source: Source, progress: Progress | None) -> IngestResult:
    """The source into the store; a run's trace that turns out unreadable is left out, at the price
    of a new start.
    """
    if source.run is not None:
        _check_record(source.path / record.RUN_FILE, source.run)
    known = writer.known()
    unchanged = waiting(lambda: _unchanged(known, source)) if known else None
    if unchanged:
        return unchanged
    while True:
        with ExitStack() as opened:
            try:
                parsed = [_open(raw, opened) for raw in source.raws if raw.problem is None]
                connection = writer.open()
                with transaction(connection):
                    return _unchanged(connection, source) or _write(
                        connection, source, parsed, progress
                    )
            except _RawError as failed:
                raw, error = failed.args
                if source.run is None:
                    raise error from None
                bad = replace(raw, problem=str(error))
                raws = tuple(bad if each is raw else each for each in source.raws)
                source = replace(source, raws=raws)


def _check_record(path: Path, run: record.Run) -> None:
    """Raise TraceFormatError for a record that parses and that the tables cannot hold: told here,
    before there is a store, and not by SQLite.
    """
    (name, count), *_ = Counter(cell.cell for cell in run.cells).most_common(1) or [("", 0)]
    if count > 1:
        raise TraceFormatError(path, f"{count} cells are called {name!r}", expected="unique names")
    for cell in run.cells:
        # tuning is kept as text
        if _largest(msgspec.to_builtins(replace(cell, tuning=None))) > MAX_INT:
            raise TraceFormatError(
                path, f"a number of cell {cell.cell!r} is too large", expected="64 bits at most"
            )


def _largest(value: object) -> int:
    """The largest absolute integer anywhere in plain data, 0 without one."""
    if isinstance(value, dict):
        return max(map(_largest, value.values()), default=0)
    if isinstance(value, list | tuple):
        return max(map(_largest, value), default=0)
    return abs(value) if isinstance(value, int) else 0


def _open(raw: Raw, opened: ExitStack) -> _Parsed:
    """Parse up to the first batch, so that most of the work is done before the store is locked."""
    try:
        trace = open_trace(raw.path)
        opened.callback(trace.close)
        if raw.profiler not in (None, trace.profiler):
            raise TraceFormatError(raw.path, f"a trace of {trace.profiler}", expected=raw.profiler)
        batches = trace.batches()
        first = list(islice(batches, 1))
    except TraceFormatError as error:
        raise _RawError(raw, error) from None
    return _Parsed(raw, trace, chain(first, batches))


def _unchanged(connection: sqlite3.Connection, source: Source) -> IngestResult | None:
    row = connection.execute(
        "SELECT run, (SELECT count(*) FROM cells c WHERE c.run_id = r.id), "
        "(SELECT coalesce(sum(launches), 0) FROM traces t WHERE t.run_id = r.id) "
        "FROM runs r WHERE content_hash = ?",
        (source.content_hash,),
    ).fetchone()
    return IngestResult(row[0], "unchanged", source.path, row[2], row[1]) if row else None


def _write(
    connection: sqlite3.Connection,
    source: Source,
    parsed: list[_Parsed],
    progress: Progress | None,
) -> IngestResult:
    run = source.run
    name = run.run if run else f"trace-{source.content_hash[:10]}"
    replaced = forget_run(connection, name)
    run_id = _insert_run(connection, source, name, parsed)
    _insert_devices(
        connection, run_id, (device for item in parsed for device in item.trace.devices)
    )
    cells = _insert_cells(connection, run_id, run.cells) if run else None
    results = [_insert_raw(connection, run_id, item, cells, progress) for item in parsed]
    warnings = [f"not taken in: {raw.problem}" for raw in source.raws if raw.problem is not None]
    warnings += [f"{item.raw.name}: {text}" for item in parsed for text in item.trace.warnings]
    for item, result in zip(parsed, results, strict=True):
        warnings += [f"{item.raw.name}: range of unknown cell {c}" for c in result.unknown_cells]
    if run:
        warnings += [text for item in parsed for text in unmeasured(run.protocol, item.trace)]
        told = [(item.trace.profiler, result) for item, result in zip(parsed, results, strict=True)]
        warnings += tell_cells(connection, run, cells or {}, told)
    return IngestResult(
        name,
        "replaced" if replaced else "new",
        source.path,
        sum(result.launches for result in results),
        len(cells or ()),
        tuple(warnings),
    )


def _insert_run(
    connection: sqlite3.Connection, source: Source, name: str, parsed: list[_Parsed]
) -> int:
    run = source.run
    environment = dict(run.environment) if run else dict(parsed[0].trace.environment)
    devices = [device.name for item in parsed for device in item.trace.devices]
    told = environment.get("gpu") or environment.get("cpu")
    data = to_json(environment)
    digest = xxhash.xxh3_128_hexdigest(data.encode())
    connection.execute(
        "INSERT INTO environments (hash, data) VALUES (?, ?) ON CONFLICT DO NOTHING", (digest, data)
    )
    profilers = run.profilers if run else (parsed[0].trace.profiler,)
    torch = environment.get("torch")
    row = {
        "run": name,
        "created": run.created if run else _created(source.path, parsed[0]),
        "source": "capture" if run else "trace",
        "path": str(source.path),
        "content_hash": source.content_hash,
        "environment_id": connection.execute(
            "SELECT id FROM environments WHERE hash = ?", (digest,)
        ).fetchone()[0],
        "device": devices[0] if devices else (str(told) if told else None),
        "torch": None if torch is None else str(torch),
        "profilers": to_json(list(profilers)),
        "protocol": to_json(msgspec.to_builtins(run.protocol)) if run else None,
        "note": run.note if run else None,
        "profharness": run.profharness if run else None,
        "problems": to_json(msgspec.to_builtins(problems(source))),
    }
    cursor = connection.execute(
        f"INSERT INTO runs ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})",
        tuple(row.values()),
    )
    return int(cursor.lastrowid or 0)


def _created(path: Path, parsed: _Parsed) -> str:
    """When a foreign trace was made: by its own clock if that tells the date, else the file's
    time.
    """
    starts = [item.start_ns for item in parsed.trace.ranges[:1]]
    seconds = path.stat().st_mtime
    if starts and EPOCH_NS[0] < starts[0] < EPOCH_NS[1]:
        seconds = starts[0] / 1e9
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _insert_devices(connection: sqlite3.Connection, run_id: int, devices: Iterator[Device]) -> None:
    """One row a device; what one trace does not tell, another may."""
    merged: dict[int, dict[str, object]] = {}
    for device in devices:
        values = {name: getattr(device, name) for name in Device.__slots__}
        known = merged.setdefault(device.index, values)
        known.update({key: value for key, value in values.items() if known.get(key) is None})
    columns = [name for name in Device.__slots__ if name != "index"]
    connection.executemany(
        f"INSERT INTO devices (run_id, device_index, {', '.join(columns)}) "
        f"VALUES ({', '.join('?' * (len(columns) + 2))})",
        [(run_id, index, *(row[name] for name in columns)) for index, row in merged.items()],
    )


def _insert_cells(
    connection: sqlite3.Connection, run_id: int, cells: tuple[record.Cell, ...]
) -> dict[str, int]:
    configs = intern.configs(connection, (cell.config for cell in cells))
    ids = {
        cell.cell: _insert_cell(connection, run_id, cell, configs[cell.config]) for cell in cells
    }
    connection.executemany(
        "INSERT INTO samples (cell_id, measurement, ordinal, duration_ns) VALUES (?, ?, ?, ?)",
        (
            (ids[cell.cell], name, ordinal, value)
            for cell in cells
            for name, values in cell.samples.items()
            for ordinal, value in enumerate(values)
        ),
    )
    connection.executemany(
        "INSERT INTO refusals (cell_id, ordinal, code, message, source) VALUES (?, ?, ?, ?, ?)",
        (
            (ids[cell.cell], ordinal, refusal.code, refusal.message, refusal.source)
            for cell in cells
            for ordinal, refusal in enumerate(cell.refusals)
        ),
    )
    insert_verifications(connection, cells, ids)
    return ids


def _insert_cell(
    connection: sqlite3.Connection, run_id: int, cell: record.Cell, config_id: int
) -> int:
    cursor = connection.execute(
        "INSERT INTO cells (run_id, cell, config_id, backend, status, message, choice, iterations, "
        "peak_memory_bytes, duration_ns, clocks, warnings, tuning) "
        "VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)",
        (
            run_id, cell.cell, config_id, cell.backend, cell.status, cell.message, cell.choice,
            cell.iterations, cell.peak_memory_bytes, cell.duration_ns, to_json(cell.clocks),
            to_json(list(cell.warnings)), to_json(cell.tuning) if cell.tuning else None,
        ),
    )  # fmt: skip
    return int(cursor.lastrowid or 0)


def _insert_raw(
    connection: sqlite3.Connection,
    run_id: int,
    parsed: _Parsed,
    cells: dict[str, int] | None,
    progress: Progress | None,
) -> Inserted:
    raw, trace = parsed.raw, parsed.trace
    cursor = connection.execute(
        "INSERT INTO traces (run_id, profiler, path, content_hash, launches, dropped, skipped, "
        "warnings, environment, first_launch_id, last_launch_id) "
        "VALUES (?, ?, ?, ?, 0, 0, ?, ?, ?, 0, 0)",
        (
            run_id, trace.profiler, raw.name, raw.content_hash, trace.skipped,
            to_json(list(trace.warnings)), to_json(trace.environment),
        ),
    )  # fmt: skip
    trace_id = int(cursor.lastrowid or 0)
    done = 0

    def advance(launches: int) -> None:
        nonlocal done
        done += launches
        if progress:
            progress(raw.name, done, trace.num_launches)

    before = connection.execute("SELECT coalesce(max(id), 0) FROM launches").fetchone()[0]
    try:
        result = insert_trace(connection, trace_id, trace, parsed.batches, cells, advance)
    except TraceFormatError as error:
        raise _RawError(raw, error) from None
    if trace.metrics is not None:
        insert_metrics(connection, before + 1, trace.metrics, result.kept)
    connection.execute(
        "UPDATE traces SET launches = ?, dropped = ?, first_launch_id = ?, last_launch_id = ? "
        "WHERE id = ?",
        (result.launches, result.dropped, before + 1, before + result.launches, trace_id),
    )
    return result
