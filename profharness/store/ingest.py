"""Run folders and trace files into the store: one transaction a run, a no-op when the content is
already there.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path

import msgspec
import xxhash

from profharness import record
from profharness.errors import TraceFormatError
from profharness.parse import is_trace, open_trace, sniff
from profharness.store import intern
from profharness.store.connection import connect, transaction, waiting
from profharness.store.insert import Inserted, insert_trace, to_json
from profharness.store.metrics import insert_metrics
from profharness.store.schema import forget_run
from profharness.store.telling import tell_cells, unmeasured
from profharness.store.verifications import insert_verifications
from profharness.trace import Device, LaunchBatch, Trace

Progress = Callable[[str, int, int], None]

EXPECTED = "a run folder, a trace file, or a folder of these"
CHUNK = 1 << 20
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
class _Raw:
    """One raw trace file of a source."""

    profiler: str | None
    name: str
    path: Path
    content_hash: str


@dataclass(frozen=True, slots=True)
class _Source:
    """A source before it is parsed; run is None for a trace file that no run folder holds."""

    path: Path
    run: record.Run | None
    raws: tuple[_Raw, ...]
    content_hash: str


@dataclass(frozen=True, slots=True)
class _Parsed:
    raw: _Raw
    trace: Trace
    batches: Iterator[LaunchBatch]


def ingest_path(
    store: Path, source: Path, *, progress: Progress | None = None
) -> list[IngestResult]:
    """Ingest a run folder, a trace file, or every one of them below a folder, in sorted order.

    progress is called with the source's name, launches done and launches in all. Raises
    TraceFormatError for what cannot be read
    (the store then keeps what it had before that source) and StoreError for a store that cannot be
    used.
    """
    sources = find_sources(source)
    # Checking six references a launch costs as much again as writing it; all ids stem from here.
    connection = connect(store, write=True, foreign_keys=False)
    try:
        return [_ingest(connection, _source(path), progress) for path in sources]
    finally:
        connection.close()


def find_sources(path: Path) -> list[Path]:
    """The run folders and trace files that a path stands for. Raises TraceFormatError if there is
    none.
    """
    if path.is_file() or (path / record.RUN_FILE).is_file():
        return [path]
    if not path.is_dir():
        raise TraceFormatError(path, "no such file or folder", expected=EXPECTED)
    found = list(_walk(path))
    if not found:
        raise TraceFormatError(path, "nothing to ingest in this folder", expected=EXPECTED)
    return found


def _walk(folder: Path) -> Iterator[Path]:
    for entry in sorted(entry for entry in folder.iterdir() if not entry.name.startswith(".")):
        if entry.is_dir() and not entry.is_symlink():
            yield from [entry] if (entry / record.RUN_FILE).is_file() else _walk(entry)
        elif entry.is_file() and is_trace(entry) and sniff(entry):
            yield entry


def hash_file(path: Path) -> str:
    """The content hash of a file: XXH3-128 of its bytes, as hex. Raises TraceFormatError if it
    cannot be read.
    """
    digest = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
    except OSError as error:
        raise TraceFormatError(path, f"cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _source(path: Path) -> _Source:
    if path.is_file():
        content_hash = hash_file(path)
        return _Source(path, None, (_Raw(None, path.name, path, content_hash),), content_hash)
    run = record.read_run(path)
    raws = tuple(_raw(path, trace) for trace in run.traces)
    digest = xxhash.xxh3_128(msgspec.json.encode(run))
    for raw in raws:
        digest.update(raw.content_hash.encode())
    return _Source(path, run, raws, digest.hexdigest())


def _raw(folder: Path, trace: record.TraceFile) -> _Raw:
    path = folder / trace.path
    if not path.resolve().is_relative_to(folder.resolve()):
        raise TraceFormatError(
            folder / record.RUN_FILE,
            f"names a trace outside of its folder: {trace.path!r}",
            expected="a path inside the run folder",
        )
    if not path.is_file():
        raise TraceFormatError(path, "named in run.json but missing", expected="a raw trace")
    return _Raw(trace.profiler, trace.path, path, hash_file(path))


def _ingest(
    connection: sqlite3.Connection, source: _Source, progress: Progress | None
) -> IngestResult:
    unchanged = waiting(lambda: _unchanged(connection, source))
    if unchanged:
        return unchanged
    with ExitStack() as opened:
        parsed = [_open(raw, opened) for raw in source.raws]
        with transaction(connection):
            return _unchanged(connection, source) or _write(connection, source, parsed, progress)


def _open(raw: _Raw, opened: ExitStack) -> _Parsed:
    """Parse up to the first batch, so that most of the work is done before the store is locked."""
    trace = open_trace(raw.path)
    opened.callback(trace.close)
    if raw.profiler not in (None, trace.profiler):
        raise TraceFormatError(raw.path, f"a trace of {trace.profiler}", expected=raw.profiler)
    batches = trace.batches()
    first = list(islice(batches, 1))
    return _Parsed(raw, trace, chain(first, batches))


def _unchanged(connection: sqlite3.Connection, source: _Source) -> IngestResult | None:
    row = connection.execute(
        "SELECT run, (SELECT count(*) FROM cells c WHERE c.run_id = r.id), "
        "(SELECT coalesce(sum(launches), 0) FROM traces t WHERE t.run_id = r.id) "
        "FROM runs r WHERE content_hash = ?",
        (source.content_hash,),
    ).fetchone()
    return IngestResult(row[0], "unchanged", source.path, row[2], row[1]) if row else None


def _write(
    connection: sqlite3.Connection,
    source: _Source,
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
    warnings = [f"{item.raw.name}: {text}" for item in parsed for text in item.trace.warnings]
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
    connection: sqlite3.Connection, source: _Source, name: str, parsed: list[_Parsed]
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
        "problems": to_json(msgspec.to_builtins(run.problems if run else ())),
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
        "peak_memory_bytes, duration_ns, clocks, warnings) VALUES (?,?,?,?,?,?,?,?,?,?,?,?)",
        (
            run_id, cell.cell, config_id, cell.backend, cell.status, cell.message, cell.choice,
            cell.iterations, cell.peak_memory_bytes, cell.duration_ns, to_json(cell.clocks),
            to_json(list(cell.warnings)),
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
    result = insert_trace(connection, trace_id, trace, parsed.batches, cells, advance)
    if trace.metrics is not None:
        insert_metrics(connection, before + 1, trace.metrics, result.kept)
    connection.execute(
        "UPDATE traces SET launches = ?, dropped = ?, first_launch_id = ?, last_launch_id = ? "
        "WHERE id = ?",
        (result.launches, result.dropped, before + 1, before + result.launches, trace_id),
    )
    return result
