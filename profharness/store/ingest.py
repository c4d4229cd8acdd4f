"""Ingest run folders and trace files into the store.

Each run is stored in one transaction. Ingesting stored content again changes nothing. A run with an
unreadable raw trace is stored without that trace.
"""

from __future__ import annotations

import gc
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from profharness.device_types import device_name
from profharness.errors import StoreError, TraceFormatError, printable_path
from profharness.files import shell_command
from profharness.rows import NCU
from profharness.run import (
    OBSERVE,
    RUN_FILE,
    BenchPlan,
    Cell,
    Problem,
    Protocol,
    Run,
    read_plan,
    run_kind,
)
from profharness.store.groups import TIMED, DeviceTimes
from profharness.store.guards import (
    check_record,
    check_tables,
    kept_elsewhere,
    require_no_less,
    stored_contents,
)
from profharness.store.insert import (
    CellTrace,
    Inserted,
    insert_trace,
    placed_samples,
)
from profharness.store.ranks import split_place
from profharness.store.schema import (
    Writer,
    connect,
    damaged,
    is_altered,
    is_damage,
    transaction,
    waiting,
)
from profharness.store.sources import ParsedTraces, Raw, Source, find_sources, read_source
from profharness.store.tables import (
    config_ids,
    forget_run,
    insert_row,
    insert_rows,
    row_id,
    to_json,
)
from profharness.trace import Trace
from profharness.traces import open_trace

if TYPE_CHECKING:
    from profharness.traces.observed import Journals

Progress = Callable[[str, int, int], None]

UNREADABLE = "trace_unreadable"
FEW = 5  # maximum number of sources that a message lists
LAST_SECOND = 253402300799.0  # end of the year 9999, the latest time that datetime supports
EPOCH_NS = (10**18, 4 * 10**18)  # 2001 to 2096: a trace clock in this range is Unix time


@dataclass(frozen=True, slots=True)
class IngestResult:
    """The result of ingesting one source."""

    run: str
    status: str
    """`new`, `unchanged` or `replaced`"""
    source: Path
    launches: int
    """number of launches now stored"""
    cells: int
    """number of cells now stored"""
    warnings: tuple[str, ...] = ()
    """warnings stored with the run; each begins with its trace or cell"""
    kept: Path | None = None
    """folder that the run was ingested from, if the source is a copy of it"""


_Parsed = tuple[Raw, Trace]


class _RawError(Exception):
    """Reading a raw trace failed. The arguments are the Raw and the TraceFormatError."""


def ingest_path(
    store: Path,
    source: Path,
    *,
    progress: Progress | None = None,
    cache: ParsedTraces | None = None,
) -> list[IngestResult]:
    """Ingest a run folder, a trace file, or all of them below a folder, in sorted order.

    `progress` is called with the name of the trace, the number of launches stored so far and the
    total. `cache` contains traces that were parsed before. An unreadable trace of a run folder
    becomes a problem and a warning of the stored run.

    All sources are ingested before TraceFormatError is raised for one that cannot be read. Rows
    that the store already has of that source are kept. A missing store is not created if no source
    can be read. Raises StoreError if the store cannot be used or does not contain what was written
    to it.
    """
    results, failures = [], []
    # The store is opened late, so that an unreadable source does not create a store. Foreign keys
    # are not checked: six per launch would double the cost of writing it, and all ids are assigned
    # here.
    with closing(Writer(store)) as writer:
        for path in find_sources(source):
            try:
                read = read_source(path)
                results.append(ingest_source(store, writer, read, progress, cache))
            except TraceFormatError as error:
                failures.append(error)
            except StoreError as error:
                raise StoreError(f"{error}{_remedy(read)}") from None
            except (sqlite3.Error, UnicodeDecodeError) as error:
                if is_damage(error) or is_altered(error):
                    raise damaged(store, error) from None
                message = f"{store}: cannot be written: {error}; name another --store"
                raise StoreError(f"{message}{_remedy(read)}") from None
    require_stored(store, results, len(failures))
    if failures:
        raise failures[0]
    return results


def require_stored(store: Path, results: Sequence[IngestResult], failed: int = 0) -> None:
    """Raise StoreError if the store lacks runs that were written to it.

    The store is reopened, because SQLite keeps writing to a file that was deleted or replaced.
    `failed` is the number of other sources that could not be ingested.
    """
    query, stored = "SELECT 1 FROM runs WHERE run = ?", set()
    with suppress(StoreError, sqlite3.Error), closing(connect(store, write=False)) as connection:
        stored = {each.run for each in results if connection.execute(query, (each.run,)).fetchone()}
    lost = [result.source for result in results if result.run not in stored]
    if lost:
        count, total = len(results) - len(lost), len(results) + failed
        names = [str(path) for path in lost] if len(lost) <= FEW else ["SOURCE..."]
        raise StoreError(
            f"{store}: {count} of {total} stored: the file was deleted, replaced or damaged while it was "
            f"written; take in what is missing: {shell_command('ingest', *names, store=store)}"
        )


def _remedy(source: Source) -> str:
    """Return a hint how to ingest a run folder into another store, or "" for a trace file."""
    if source.run is None:
        return ""
    return (
        f"\nthe run is kept in {source.path}; to take it in: "
        f"profharness ingest {source.path} --store OTHER"
    )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disable the cyclic garbage collector.

    Ingesting millions of rows creates no cycles, and the collector takes about 10 % of the time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@_uncollected()
def ingest_source(
    store: Path,
    writer: Callable[[], sqlite3.Connection],
    source: Source,
    progress: Progress | None,
    cache: ParsedTraces | None = None,
) -> IngestResult:
    """Parse and store one source.

    `writer` opens the store. It is called only once the source is known to be readable. If a trace
    of a run turns out to be unreadable, ingesting the run starts again without it. Raises the
    errors of `ingest_path` and those of SQLite.
    """
    if source.run is not None:
        check_record(source.path / RUN_FILE, source.run)
    # checked before parsing, and again in the transaction: another process may store it first
    same = waiting(lambda: unchanged(writer(), source)) if store.exists() else None
    if same:
        return same
    journals = None
    if source.run is not None and source.run.kind == OBSERVE:
        from profharness.traces.observed import read_journals

        journals = read_journals(source.path)
    while True:
        with ExitStack() as opened:
            try:
                whole = [raw for raw in source.raws if raw.problem is None]
                parsed = [_open(raw, opened, cache) for raw in whole]
                connection = writer()
                with transaction(connection):
                    return unchanged(connection, source) or _write(
                        connection, source, parsed, journals, progress
                    )
            except _RawError as failure:
                failed, error = failure.args
                if source.run is None:
                    raise error from None
                bad = replace(failed, problem=str(error))
                raws = tuple(bad if raw is failed else raw for raw in source.raws)
                source = replace(source, raws=raws)


def _open(raw: Raw, opened: ExitStack, cache: ParsedTraces | None) -> _Parsed:
    """Parse a trace up to its first batch.

    This is most of the work, and it is done before the store is locked.
    """
    try:
        kept = cache.take(raw.path, raw.content_hash) if cache is not None else None
        trace = kept or open_trace(raw.path)
        opened.callback(trace.close)
        if raw.profiler not in (None, trace.profiler):
            raise TraceFormatError(raw.path, f"a trace of {trace.profiler}", expected=raw.profiler)
        check_tables(raw.path, trace)
        batches = trace.batches()
        first = list(islice(batches, 1))
    except TraceFormatError as error:
        raise _RawError(raw, error) from None
    return raw, replace(trace, batches=lambda: chain(first, batches))


def unchanged(connection: sqlite3.Connection, source: Source) -> IngestResult | None:
    """Return the result for a source that is already stored, or that is a copy of a stored run.

    Return None for other sources.
    """
    run, kept = source.run, None
    if run and all(raw.problem is None for raw in source.raws):
        kept = kept_elsewhere(connection, source.path, run)
    where, value = ("run", run.run) if run and kept else ("content_hash", source.content_hash)
    row = connection.execute(
        "SELECT run, (SELECT count(*) FROM cells c WHERE c.run_id = r.id), "
        "(SELECT coalesce(sum(launches), 0) FROM traces t WHERE t.run_id = r.id), warnings "
        f"FROM runs r WHERE {where} = ?",
        (value,),
    ).fetchone()
    if row is None:
        return None
    name, cells, launches, warnings = row
    texts = tuple(json.loads(warnings))
    return IngestResult(name, "unchanged", source.path, launches, cells, texts, kept)


def _write(
    connection: sqlite3.Connection,
    source: Source,
    parsed: list[_Parsed],
    journals: Journals | None,
    progress: Progress | None,
) -> IngestResult:
    run = source.run
    # the name depends only on the content, so a renamed copy of a trace is the same run
    name = run.run if run else f"trace-{source.content_hash[:10]}"
    before = stored_contents(connection, name)
    # require_no_less at the end rolls this back if the new run contains less
    forget_run(connection, name)
    run_id = _insert_run(connection, source, name, parsed)
    _insert_devices(connection, run_id, [trace for _, trace in parsed])
    # the launches of an observed program belong to no cell
    planned = run is not None and run.kind != OBSERVE
    cells = _insert_cells(connection, run_id, run.cells) if run and planned else None
    # without cells all launches are kept, as for a foreign trace
    results = [_insert_raw(connection, run_id, item, cells or None, progress) for item in parsed]
    warnings = [f"not taken in: {raw.problem}" for raw in source.raws if raw.problem is not None]
    warnings += [f"{raw.name}: {text}" for raw, trace in parsed for text in trace.warnings]
    if journals is not None:
        from profharness.store.insert_calls import insert_journals

        traced = list(chain.from_iterable(trace.calls for _, trace in parsed))
        warnings += insert_journals(connection, run_id, journals, traced)
    for (raw, _), result in zip(parsed, results, strict=True):
        warnings += [f"{raw.name}: range of unknown cell {c}" for c in result.unknown_cells]
    if run and cells is not None:
        warnings += [text for _, trace in parsed for text in _unmeasured(run.protocol, trace)]
        profilers = [trace.profiler for _, trace in parsed]
        warnings += _update_cells(
            connection, run, cells, list(zip(profilers, results, strict=True))
        )
    connection.execute("UPDATE runs SET warnings = ? WHERE id = ?", (to_json(warnings), run_id))
    lost = [raw.problem for raw in source.raws if raw.problem is not None]
    require_no_less(connection, source.path, name, before, lost)
    return IngestResult(
        name,
        "new" if before is None else "replaced",
        source.path,
        sum(result.launches for result in results),
        len(cells or ()),
        tuple(warnings),
    )


def _insert_run(
    connection: sqlite3.Connection, source: Source, name: str, parsed: list[_Parsed]
) -> int:
    run = source.run
    environment_of_run = run.environment if run else parsed[0][1].environment
    place, environment = split_place(environment_of_run, None if run else source.path.name)
    devices = [device.name for _, trace in parsed for device in trace.devices]
    torch = environment.get("torch")
    data = to_json(environment)
    digest = xxhash.xxh3_128_hexdigest(data.encode())
    row = {
        "run": name,
        "created": run.created if run else _created(source.path, parsed[0][1]),
        "source": "capture" if run else "trace",
        "kind": run_kind(source.path, run) if run else "trace",
        "path": printable_path(source.path),
        "content_hash": source.content_hash,
        "environment_id": row_id(
            connection, "environments", {"hash": digest}, lambda: {"data": data}
        ),
        "device": devices[0] if devices else device_name(environment),
        "torch": None if torch is None else str(torch),
        "profilers": to_json(list(run.profilers if run else (parsed[0][1].profiler,))),
        "protocol": to_json(asdict(run.protocol)) if run else None,
        "bench": to_json(asdict(plan)) if (plan := _bench_plan(source)) else None,
        "note": run.note if run else None,
        "profharness": run.profharness if run else None,
        **place,
        "problems": to_json([asdict(problem) for problem in _problems(source)]),
        "warnings": "[]",  # updated after everything is inserted
    }
    return insert_row(connection, "runs", row)


def _bench_plan(source: Source) -> BenchPlan | None:
    """Return the plan in the run record, or the plan in the run folder if the record has none.

    Raises TraceFormatError if the plan in the folder cannot be read.
    """
    if source.run is None or source.run.bench is not None:
        return source.run.bench if source.run else None
    return read_plan(source.path)


def _created(path: Path, trace: Trace) -> str:
    """Return when a foreign trace was recorded.

    Use the date in the trace, else its clock if that is Unix time, else the file's modification
    time.
    """
    stamps = [] if trace.created_s is None else [trace.created_s * 10**9]
    starts = stamps + [item.start_ns for item in trace.ranges[:1]]
    seconds = min(max(path.stat().st_mtime, 0.0), LAST_SECOND)
    if starts and EPOCH_NS[0] < starts[0] < EPOCH_NS[1]:
        seconds = starts[0] / 1e9
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _problems(source: Source) -> tuple[Problem, ...]:
    """Return the problems in run.json, and a problem for each unreadable trace."""
    if source.run is None:
        return ()
    unreadable = (
        Problem(
            raw.profiler or "",
            UNREADABLE,
            raw.problem,
            f"copy {raw.name} again if another copy is whole, or capture again with "
            f"--profiler {raw.profiler}",
            cells=raw.cells,
        )
        for raw in source.raws
        if raw.problem is not None
    )
    return (*source.run.problems, *unreadable)


def _insert_devices(connection: sqlite3.Connection, run_id: int, traces: list[Trace]) -> None:
    """Insert one row per device. Values that a trace lacks are taken from the other traces."""
    merged: dict[int, dict[str, object]] = {}
    for device in chain.from_iterable(trace.devices for trace in traces):
        values = asdict(device)
        row = merged.setdefault(device.index, values)
        row.update({key: value for key, value in values.items() if row[key] is None})
    for index, row in merged.items():
        del row["index"]
        insert_row(connection, "devices", {"run_id": run_id, "device_index": index, **row})


def _insert_cells(
    connection: sqlite3.Connection, run_id: int, cells: Sequence[Cell]
) -> dict[str, int]:
    """Insert cells with their samples, refusals and checks. Return their row ids by name."""
    configs = config_ids(connection, (cell.config for cell in cells))
    ids = {
        cell.cell: _insert_cell(connection, run_id, cell, configs[cell.config]) for cell in cells
    }
    insert_rows(
        connection,
        "samples",
        ("cell_id", "measurement", "ordinal", "duration_ns", "process", "turn"),
        (
            (ids[cell.cell], name, ordinal, *sample)
            for cell in cells
            for name, values in cell.samples.items()
            for ordinal, sample in enumerate(placed_samples(values, cell.turns.get(name, ())))
        ),
    )
    for cell in cells:
        for ordinal, refusal in enumerate(cell.refusals):
            row = {"cell_id": ids[cell.cell], "ordinal": ordinal, **asdict(refusal)}
            insert_row(connection, "refusals", row)
        for ordinal, check in enumerate(cell.checks):
            row = {
                "cell_id": ids[cell.cell],
                "ordinal": ordinal,
                "asked": cell.asked or cell.config.label,
                "case_name": cell.case or "",
                **asdict(check),
            }
            insert_row(connection, "verifications", row)
    return ids


def _insert_cell(connection: sqlite3.Connection, run_id: int, cell: Cell, config_id: int) -> int:
    same = ("cell", "backend", "status", "message", "choice", "iterations", "peak_memory_bytes",
            "duration_ns")  # fmt: skip
    row = {name: getattr(cell, name) for name in same}
    row |= {"run_id": run_id, "config_id": config_id, "clocks": to_json(cell.clocks)}
    row |= {"warnings": to_json(cell.warnings)}
    row |= {"tuning": to_json(cell.tuning) if cell.tuning else None}
    return insert_row(connection, "cells", row)


def _insert_raw(
    connection: sqlite3.Connection,
    run_id: int,
    parsed: _Parsed,
    cells: dict[str, int] | None,
    progress: Progress | None,
) -> Inserted:
    raw, trace = parsed
    row = {
        "run_id": run_id,
        "profiler": trace.profiler,
        "path": raw.name,
        "content_hash": raw.content_hash,
        "skipped": trace.skipped,
        "environment": to_json(trace.environment),
        # insert_trace updates these at the end
        **dict.fromkeys(("launches", "dropped", "first_launch_id", "last_launch_id"), 0),
    }
    done = 0

    def advance(launches: int) -> None:
        nonlocal done
        done += launches
        if progress:
            progress(raw.name, done, trace.num_launches)

    times = DeviceTimes()
    # the calls of cells run one at a time, so their busy times would be meaningless
    watched = cells is None and trace.profiler in TIMED
    batches = times.watch(trace.batches()) if watched else trace.batches()
    try:
        trace_id = insert_row(connection, "traces", row)
        inserted = insert_trace(connection, trace_id, trace, batches, cells, advance)
        times.insert(
            connection, trace_id, list(zip(trace.kernels, trace.kernel_kinds, strict=True))
        )
        return inserted
    except TraceFormatError as error:
        raise _RawError(raw, error) from None
    except (ValueError, OverflowError) as error:
        unstorable = TraceFormatError(raw.path, f"holds what cannot be stored: {error}")
        raise _RawError(raw, unstorable) from None


def _unmeasured(protocol: Protocol, trace: Trace) -> list[str]:
    """Return a warning if an ncu trace lacks requested metrics."""
    if trace.profiler != NCU or not trace.num_launches:
        return []
    from profharness.recording.profilers.ncu_metrics import QUERY_METRICS, unmeasured

    names = ", ".join(unmeasured(protocol.metrics, trace.metrics.names if trace.metrics else ()))
    return [f"ncu measured no {names}; {QUERY_METRICS}"] if names else []


def _update_cells(
    connection: sqlite3.Connection,
    run: Run,
    ids: dict[str, int],
    results: list[tuple[str, Inserted]],
) -> list[str]:
    """Store the SDPA ops and warnings of cells that result from traces. Return the new warnings."""
    by_cell: dict[str, list[tuple[str, CellTrace]]] = {}
    for profiler, result in results:
        for trace in result.cells:
            by_cell.setdefault(trace.cell, []).append((profiler, trace))
    warnings = []
    for cell in run.cells:
        traces = by_cell.get(cell.cell, [])
        fresh = list(dict.fromkeys(text for _, trace in traces if (text := trace.warning())))
        covering = dict.fromkeys(raw.profiler for raw in run.traces if cell.cell in raw.cells)
        launching = {profiler for profiler, trace in traces if any(trace.launches_per_call)}
        if cell.status == "ok":
            fresh += [
                f"the {profiler} trace holds no launch of this cell"
                for profiler in covering
                if profiler not in launching
            ]
        ops = [trace.sdpa_op for _, trace in traces if trace.sdpa_op]
        connection.execute(
            "UPDATE cells SET sdpa_op = ?, warnings = ? WHERE id = ?",
            (ops[0] if ops else None, to_json([*cell.warnings, *fresh]), ids[cell.cell]),
        )
        warnings += [f"{cell.cell}: {text}" for text in fresh]
    return warnings
