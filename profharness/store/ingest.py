"""Ingest run folders and trace files into the store.

Each run is stored in one transaction. Nothing changes if stored content or a copy of a stored folder
is ingested again. A run with an unreadable raw trace is stored without that trace. A damaged or
smaller run folder never replaces a complete run.
"""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from profharness.device_types import device_name
from profharness.errors import StoreError, TraceFormatError, counted, join_few, printable_path
from profharness.files import shell_command
from profharness.processes import garbage_collection_off
from profharness.rows import NCU
from profharness.run import OBSERVE, RUN_FILE, Cell, Problem, Protocol, Run, run_kind, run_times
from profharness.stats import Series
from profharness.store.archives import member_source, members
from profharness.store.groups import TIMED, DeviceTimes
from profharness.store.insert import Inserted, insert_journals, insert_trace
from profharness.store.ranks import split_rank
from profharness.store.schema import (
    Writer,
    connect,
    damaged,
    is_altered,
    is_damage,
    transaction,
    waiting,
)
from profharness.store.sources import (
    ParsedTraces,
    Raw,
    Source,
    find_sources,
    is_archive,
    read_source,
)
from profharness.store.tables import (
    config_ids,
    fields_of,
    forget_run,
    insert_row,
    insert_rows,
    insert_statement,
    records,
    row_id,
    to_json,
)
from profharness.trace import Trace
from profharness.traces import open_trace
from profharness.traces.engine_log import read_engine_log

if TYPE_CHECKING:
    from profharness.traces.observed import Journals

Progress = Callable[[str, int, int], None]
Contents = dict[tuple[str, str], int]
"""Numbers of the items in a run, by pairs such as ("measurements of cell", "c0001")."""

UNREADABLE = "trace_unreadable"
MEASURED, LAUNCHED = "measurements of cell", "launches of"
PENDING = "pending"
FEW = 5  # maximum number of sources or losses that a message lists
MAX_COUNTS_SHOWN = 20
MAX_INT = (1 << 63) - 1  # the largest integer in SQLite
LAST_SECOND = 253402300799.0  # end of the year 9999, the latest time that datetime supports
TRACE_ID = "trace-"  # start of the id of a run that was made from a trace file
EPOCH_NS = (10**18, 4 * 10**18)  # 2001 to 2096; times in this range are Unix times


@dataclass(frozen=True, slots=True)
class IngestResult:
    """The result of ingesting one source."""

    run: str
    status: str  # `new`, `unchanged` or `replaced`
    source: Path
    launches: int  # number of launches now stored
    cells: int  # number of cells now stored
    warnings: tuple[str, ...] = ()
    """Warnings stored with the run. Each warning begins with the name of a trace or a cell."""
    kept: Path | None = None  # folder of the stored run if the source is a copy of this folder

    @property
    def is_trace(self) -> bool:
        """Whether the source is a trace file, and not a run folder."""
        return self.run.startswith(TRACE_ID)


_Parsed = tuple[Raw, Trace]


class _RawError(Exception):
    """A raw trace cannot be read. The arguments are the Raw and the TraceFormatError."""


def ingest_path(
    store: Path,
    source: Path,
    *,
    progress: Progress | None = None,
    cache: ParsedTraces | None = None,
    companions: Sequence[Path] = (),
) -> list[IngestResult]:
    """Ingest a run folder, a trace file, an archive of traces, or all sources below a folder.

    Sources are ingested in sorted order. `progress` is called with the name of a trace, the number
    of launches read so far, and the total number of launches of the trace. `cache` contains traces
    that were already parsed. `companions` are files that describe a single trace file, as in
    `read_source`. An unreadable trace of a run folder becomes a problem and a warning of the stored
    run.

    If a source cannot be read, ingest the other sources, and then raise TraceFormatError. Rows of
    this source that are already stored are kept. A missing store is not created if no source can be
    read. Raise StoreError if the store cannot be used or does not contain the written runs.
    """
    results: list[IngestResult] = []
    failures: list[TraceFormatError] = []
    # The store is opened late, so that an unreadable source does not create a store. Foreign keys
    # are not checked, because six checks per launch would double the time to write a launch, and
    # all ids are assigned by this program.
    with closing(Writer(store)) as writer:
        for path in find_sources(source):
            read = None
            try:
                if is_archive(path):
                    _ingest_archive(store, writer, path, progress, results)
                    continue
                read = read_source(path, companions)
                results.append(ingest_source(store, writer, read, progress, cache))
            except TraceFormatError as error:
                failures.append(error)
            except StoreError as error:
                if read is None or read.run is None:
                    raise
                raise StoreError(
                    f"{error}\nthe run is kept in {path}; to ingest this folder into another store, use: "
                    f"profharness ingest {path} --store OTHER"
                ) from None
    require_stored(store, results, len(failures))
    if failures:
        raise failures[0]
    return results


def _ingest_archive(
    store: Path,
    writer: Callable[[], sqlite3.Connection],
    path: Path,
    progress: Progress | None,
    results: list[IngestResult],
) -> None:
    """Ingest each trace in an archive, and append the results.

    Raise TraceFormatError at the end if a trace cannot be read, or if the archive is damaged or
    contains no trace.
    """
    failures, before = [], len(results)
    with members(path) as unpacked:
        for plain, shown in unpacked:
            try:
                with member_source(plain, shown) as source:
                    results.append(ingest_source(store, writer, source, progress))
            except TraceFormatError as error:
                failures.append(error)
    if failures and len(results) > before:
        unread = counted(len(failures), "trace")
        message = f"cannot read {unread} in this archive; the other traces were stored"
        raise TraceFormatError(path, message, expected=f"whole traces: {failures[0]}")
    if failures:
        raise failures[0]


def require_stored(store: Path, results: Sequence[IngestResult], failed: int = 0) -> None:
    """Raise StoreError if the store lacks runs that were written to it.

    Reopen the store for this check, because SQLite keeps writing to a file that was deleted or
    replaced.
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
            f"{store}: {count} of {total:,} sources were stored, because the file was deleted, "
            "replaced or damaged at the same time; to ingest the missing sources, use: "
            f"{shell_command('ingest', *names, store=store)}"
        )


def ingest_source(
    store: Path,
    writer: Callable[[], sqlite3.Connection],
    source: Source,
    progress: Progress | None,
    cache: ParsedTraces | None = None,
) -> IngestResult:
    """Parse and store one source. Raise the errors of `ingest_path`.

    `writer` opens the store. If there is no store, `writer` is called only after the traces are
    parsed.
    """
    try:
        return _ingest_source(store, writer, source, progress, cache)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        if is_damage(error) or is_altered(error):
            raise damaged(store, error) from None
        raise StoreError(
            f"{store}: cannot write to the store: {error}; fix this problem and repeat the command, "
            "or choose another store with --store; sources that are already stored are kept"
        ) from None


@garbage_collection_off()
def _ingest_source(
    store: Path,
    writer: Callable[[], sqlite3.Connection],
    source: Source,
    progress: Progress | None,
    cache: ParsedTraces | None,
) -> IngestResult:
    if source.run is not None:
        _check_record(source.path / RUN_FILE, source.run)
    # check before parsing, and again below, because another process may store the source first
    same = waiting(lambda: unchanged(writer(), source)) if store.exists() else None
    if same:
        return same
    journals = None
    if source.run is not None and source.run.kind == OBSERVE:
        from profharness.traces.observed import read_journals

        journals = read_journals(source.path)
    # if a trace of a run turns out to be unreadable, start again without it
    while True:
        with ExitStack() as opened:
            try:
                whole = [raw for raw in source.raws if raw.problem is None]
                parsed = [_open(raw, source.captures, opened, cache) for raw in whole]
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


def _open(
    raw: Raw, captures: Sequence[Path], opened: ExitStack, cache: ParsedTraces | None
) -> _Parsed:
    """Parse a trace up to its first batch.

    Most of the work happens here, before the store is locked.
    """
    try:
        kept = cache.take(raw.path, raw.content_hash) if cache is not None else None
        trace = kept or open_trace(raw.path, captures)
        opened.callback(trace.close)
        if raw.profiler not in (None, trace.profiler):
            raise TraceFormatError(raw.path, f"a trace of {trace.profiler}", expected=raw.profiler)
        batches = trace.batches()
        first = list(islice(batches, 1))
    except TraceFormatError as error:
        raise _RawError(raw, error) from None
    return raw, replace(trace, batches=lambda: chain(first, batches))


def _check_record(path: Path, run: Run) -> None:
    """Raise TraceFormatError if a run record contains values that cannot be stored."""
    (name, count), *_ = Counter(cell.cell for cell in run.cells).most_common(1) or [("", 0)]
    if count > 1:
        raise TraceFormatError(
            path, f"{count} cells have the name {name!r}", expected="unique names"
        )
    for cell in run.cells:
        # tuning is stored as text
        if _largest(msgspec.to_builtins(replace(cell, tuning=None))) > MAX_INT:
            raise TraceFormatError(
                path,
                f"cell {cell.cell!r} contains a number that is too large",
                expected="at most 64 bits",
            )


def _largest(value: object) -> int:
    """Return the largest absolute value of all integers in nested data, or 0 if there are none."""
    if isinstance(value, dict):
        return max(map(_largest, value.values()), default=0)
    if isinstance(value, list | tuple):
        if set(map(type, value)) == {int}:  # a fast path for thousands of samples
            largest: int = max(max(value), -min(value))
            return largest
        return max(map(_largest, value), default=0)
    return abs(value) if isinstance(value, int) else 0


def unchanged(connection: sqlite3.Connection, source: Source) -> IngestResult | None:
    """Return the result for a source that is already stored, or that is a copy of a stored run.

    Return None for other sources.
    """
    run, kept = source.run, None
    if run and all(raw.problem is None for raw in source.raws):
        kept = _original(connection, source.path, run)
    where, value = ("run", run.run) if run and kept else ("content_hash", source.content_hash)
    query = (
        "SELECT *, (SELECT count(*) FROM cells c WHERE c.run_id = r.id) AS number_of_cells, "
        "(SELECT coalesce(sum(launches), 0) FROM traces t WHERE t.run_id = r.id) AS launches "
        f"FROM runs r WHERE {where} = ?"
    )
    row = next(iter(records(connection, query, (value,))), None)
    # a store of an earlier version does not have the column
    if row is None or (source.companions and row.get("recorded_with") != _hashes(source)):
        return None
    return IngestResult(
        *(row["run"], "unchanged", source.path, row["launches"], row["number_of_cells"]),
        *(tuple(row["warnings"]), kept),
    )


def add_rank(connection: sqlite3.Connection, run: str, file: str) -> None:
    """Store the rank in the name of a copy of a trace, unless the rank of the run is known."""
    named, _ = split_rank({}, file)
    if named["rank"] is not None:
        with transaction(connection):
            connection.execute(
                "UPDATE runs SET rank = ? WHERE run = ? AND source = 'trace' AND rank IS NULL",
                (named["rank"], run),
            )


def _hashes(source: Source) -> dict[str, str]:
    """Map the names of the companions of a source to their content hashes."""
    return {printable_path(each.path.name): each.content_hash for each in source.companions}


def _original(connection: sqlite3.Connection, folder: Path, run: Run) -> Path | None:
    """If `folder` is a copy of the folder of a stored run, return the original, else None."""
    row = connection.execute("SELECT path FROM runs WHERE run = ?", (run.run,)).fetchone()
    if row is None:
        return None
    source = Path(row[0])
    # if the original folder was deleted, the copy replaces it
    if not (source / RUN_FILE).is_file() or source.resolve() == folder.resolve():
        return None
    here = {
        (MEASURED, cell.cell): sum(map(len, cell.samples.values())) + len(cell.checks)
        for cell in run.cells
        if cell.status != PENDING
    }
    there = _stored_contents(connection, run.run)
    # traces are compared by path, because their numbers of launches are unknown before parsing
    traces = {(LAUNCHED, trace.path) for trace in run.traces}
    same = (
        here.items() <= there.items()
        and {(what, name) for what, name in there if name} == here.keys() | traces
    )
    return source if same else None


def _stored_contents(connection: sqlite3.Connection, run: str) -> Contents:
    """Return the contents of a stored run, or an empty dict if the run is not stored."""
    rows = connection.execute(
        f"SELECT '{MEASURED}', cell, (SELECT count(*) FROM samples s WHERE s.cell_id = c.id) "
        "+ (SELECT count(*) FROM verifications v WHERE v.cell_id = c.id) FROM cells c "
        f"JOIN runs r ON r.id = c.run_id WHERE r.run = :run AND status <> '{PENDING}' "
        f"UNION ALL SELECT '{LAUNCHED}', t.path, t.launches FROM traces t "
        "JOIN runs r ON r.id = t.run_id WHERE r.run = :run "
        "UNION ALL SELECT 'observed calls', '', sum(calls) FROM templates o "
        "JOIN runs r ON r.id = o.run_id WHERE r.run = :run GROUP BY r.id",
        {"run": run},
    )
    return {(what, name): number for what, name, number in rows}


def require_no_less(
    connection: sqlite3.Connection, source: Source, run: str, before: Contents
) -> None:
    """Raise TraceFormatError if the stored run lacks contents of `before`."""
    after = _stored_contents(connection, run)
    missing = []
    for (what, name), number in before.items():
        lost = number - after.get((what, name), 0)
        if lost > 0:
            missing.append(f"{lost:,} {what} {name}".strip())
        elif what == MEASURED and (what, name) not in after:
            missing.append(f"the result of cell {name}")
    if missing:
        problems = [raw.problem for raw in source.raws if raw.problem is not None]
        reason = f" ({problems[0]})" if problems else ""
        raise TraceFormatError(
            source.path,
            (
                f"contains less of run {run} than the store, so the store was not changed; missing: "
                f"{join_few(missing, FEW)}{reason}; to ingest this folder anyway, first delete the "
                f"stored run; to delete it, use: profharness runs --delete {run}"
            ),
        )


def _write(
    connection: sqlite3.Connection,
    source: Source,
    parsed: list[_Parsed],
    journals: Journals | None,
    progress: Progress | None,
) -> IngestResult:
    run = source.run
    # the name depends only on the content, so a renamed copy of a trace is the same run
    name = run.run if run else f"{TRACE_ID}{source.content_hash[:10]}"
    query = "SELECT 1 FROM runs WHERE run = ?"
    status = "replaced" if connection.execute(query, (name,)).fetchone() else "new"
    before = _stored_contents(connection, name)
    # if the new run contains less, require_no_less raises an error, which rolls this back
    forget_run(connection, name)
    run_id = _insert_run(connection, source, name, parsed)
    # the launches of an observed program belong to no cell
    planned = run is not None and run.kind != OBSERVE
    cells = _insert_cells(connection, run_id, run.cells) if run and planned else None
    # if there are no cells, all launches are kept, as for a foreign trace
    shown = [raw.name if run else printable_path(source.path.name) for raw, _ in parsed]
    results = [
        _insert_raw(connection, run_id, item, cells or None, progress and partial(progress, label))
        for label, item in zip(shown, parsed, strict=True)
    ]
    warnings = [f"not ingested: {raw.problem}" for raw in source.raws if raw.problem is not None]
    warnings += [
        f"{label}: {text}"
        for label, (_, trace) in zip(shown, parsed, strict=True)
        for text in trace.warnings
    ]
    if journals is not None:
        traced = list(chain.from_iterable(trace.calls for _, trace in parsed))
        warnings += insert_journals(connection, run_id, journals, traced)
    for label, result in zip(shown, results, strict=True):
        warnings += [
            f"{label}: contains a range of the unknown cell {c}" for c in result.unknown_cells
        ]
    if run and cells is not None:
        warnings += [text for _, trace in parsed for text in _unmeasured(run.protocol, trace)]
        profilers = [trace.profiler for _, trace in parsed]
        results_of = list(zip(profilers, results, strict=True))
        warnings += _update_cells(connection, run, cells, results_of)
    if run is None and parsed[0][1].profiler != NCU:
        _set_span(connection, run_id)
    connection.execute("UPDATE runs SET warnings = ? WHERE id = ?", (to_json(warnings), run_id))
    require_no_less(connection, source, name, before)
    launches = sum(result.launches for result in results)
    return IngestResult(name, status, source.path, launches, len(cells or ()), tuple(warnings))


def _insert_run(
    connection: sqlite3.Connection, source: Source, name: str, parsed: list[_Parsed]
) -> int:
    run = source.run
    environment_of_run = run.environment if run else parsed[0][1].environment
    identity, environment = split_rank(environment_of_run, None if run else source.raws[0].name)
    logs = [read_engine_log(each.path) for each in source.companions if each.is_log]
    devices = [device.name for _, trace in parsed for device in trace.devices]
    torch = environment.get("torch")
    data = to_json(environment)
    digest = xxhash.xxh3_128_hexdigest(data.encode())
    row: dict[str, Any] = {
        "run": name,
        "created": run.created if run else _created(parsed[0][0].path, parsed[0][1]),
        "source": "capture" if run else "trace",
        "kind": run_kind(run) if run else "trace",
        "path": printable_path(source.path),
        "content_hash": source.content_hash,
        "environment_id": row_id(
            connection, "environments", {"hash": digest}, lambda: {"data": data}
        ),
        "device": devices[0] if devices else device_name(environment),
        "torch": None if torch is None else str(torch),
        "profilers": run.profilers if run else (parsed[0][1].profiler,),
        **identity,
        "recorded_with": _hashes(source) if source.companions else None,
        "engine": next((asdict(log) for log in logs if log), None),
        "problems": [],
        "warnings": [],  # updated after everything is inserted
    }
    if run:
        unreadable = (
            Problem(
                raw.profiler or "",
                UNREADABLE,
                raw.problem,
                (
                    f"restore {raw.name} from an intact copy, or capture again with --profiler "
                    f"{raw.profiler}"
                ),
                cells=raw.cells,
            )
            for raw in source.raws
            if raw.problem is not None
        )
        row |= {
            "protocol": asdict(run.protocol),
            "bench": asdict(run.bench) if run.bench else None,
            "note": run.note,
            "profharness": run.profharness,
            "problems": (*run.problems, *unreadable),
            **asdict(run_times(run)),
        }
    return insert_row(connection, "runs", row)


def _set_span(connection: sqlite3.Connection, run_id: int) -> None:
    """Set the duration of a foreign trace to the time between the first and the last event.

    Do not use this function for a trace of ncu, because ncu repeats each kernel.
    """
    connection.execute(
        "WITH own AS (SELECT id FROM traces WHERE run_id = :run) "
        "UPDATE runs SET (duration_ns, lanes_ns) = (SELECT max(last) - min(first), "
        "max(last) - min(first) FROM ("
        # each table by its index, because a store may have many other traces
        "SELECT start_ns AS first, end_ns AS last FROM device_times WHERE trace_id IN own "
        "UNION ALL SELECT start_ns, start_ns + duration_ns FROM ranges WHERE trace_id IN own "
        "UNION ALL SELECT start_ns, start_ns + duration_ns FROM steps WHERE trace_id IN own)) "
        "WHERE id = :run",
        {"run": run_id},
    )


def _created(path: Path, trace: Trace) -> str:
    """Return the date and time at which a foreign trace was recorded.

    Use the date in the trace. If the trace has no date, use the start of the first range, provided
    that ranges have Unix times. Otherwise, use the modification time of the file. If that is 0, as
    for a file from an archive without dates, use the current time.
    """
    stamps = [] if trace.created_s is None else [trace.created_s * 10**9]
    starts = stamps + [item.start_ns for item in trace.ranges[:1]]
    modified = path.stat().st_mtime
    seconds = min(modified, LAST_SECOND) if modified > 0 else time.time()
    if starts and EPOCH_NS[0] < starts[0] < EPOCH_NS[1]:
        seconds = starts[0] / 1e9
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def _insert_cells(
    connection: sqlite3.Connection, run_id: int, cells: Sequence[Cell]
) -> dict[str, int]:
    """Insert cells with their samples, refusals and checks. Return their row ids by name."""
    configs = config_ids(connection, (cell.config for cell in cells))
    ids = {}
    for cell in cells:
        row = fields_of(connection, "cells", cell)
        row |= {"run_id": run_id, "config_id": configs[cell.config], "tuning": cell.tuning or None}
        ids[cell.cell] = insert_row(connection, "cells", row)
        for ordinal, refusal in enumerate(cell.refusals):
            row = {"cell_id": ids[cell.cell], "ordinal": ordinal, **asdict(refusal)}
            insert_row(connection, "refusals", row)
        of_case = {"asked": cell.asked or cell.config.label, "case_name": cell.case or ""}
        for ordinal, check in enumerate(cell.checks):
            row = {"cell_id": ids[cell.cell], "ordinal": ordinal, **of_case, **asdict(check)}
            insert_row(connection, "verifications", row)
    samples = (
        (ids[cell.cell], name, ordinal, *sample)
        for cell in cells
        for name, values in cell.samples.items()
        for ordinal, sample in enumerate(_with_turns(values, cell.turns.get(name, ())))
    )
    columns = ("cell_id", "measurement", "ordinal", "duration_ns", "process", "turn")
    insert_rows(connection, "samples", columns, samples)
    return ids


def _with_turns(
    values: Sequence[int], turns: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int | None, int | None]]:
    """Yield samples with their process and turn. Process and turn are None if unknown."""
    known = [turn[:2] for turn in Series.of(values, turns).turns for _ in range(turn.samples)]
    for index, value in enumerate(values):
        yield value, *(known[index] if known else (None, None))


def _insert_raw(
    connection: sqlite3.Connection,
    run_id: int,
    parsed: _Parsed,
    cells: dict[str, int] | None,
    progress: Callable[[int, int], None] | None,
) -> Inserted:
    raw, trace = parsed
    done = 0

    def advance(launches: int) -> None:
        nonlocal done
        done += launches
        if progress:
            progress(done, trace.num_launches)

    times = DeviceTimes()
    # Busy times of cells would be meaningless, because their calls run one at a time.
    watched = cells is None and trace.profiler in TIMED
    batches = times.watch(trace.batches()) if watched else trace.batches()
    try:
        row = fields_of(connection, "traces", raw, trace)
        row |= {"run_id": run_id, "path": raw.name}
        # insert_trace sets these values at the end
        row |= dict.fromkeys(("launches", "dropped", "first_launch_id", "last_launch_id"), 0)
        trace_id = insert_row(connection, "traces", row)
        for device in trace.devices:
            row = {"run_id": run_id, "device_index": device.index, **asdict(device)}
            del row["index"]
            # fill in values that are missing in earlier traces of the run
            filled = ", ".join(f"{name} = coalesce({name}, excluded.{name})" for name in row)
            statement = insert_statement("devices", dict.fromkeys(row, "?"))
            statement += f" ON CONFLICT DO UPDATE SET {filled}"
            connection.execute(statement, list(row.values()))
        inserted = insert_trace(connection, trace_id, trace, batches, cells, advance)
        kernels = list(zip(trace.kernels, trace.kernel_kinds, strict=True))
        times.insert(connection, trace_id, kernels)
        return inserted
    except TraceFormatError as error:
        raise _RawError(raw, error) from None
    except (ValueError, OverflowError) as error:
        unstorable = TraceFormatError(raw.path, f"contains a value that cannot be stored: {error}")
        raise _RawError(raw, unstorable) from None


def _unmeasured(protocol: Protocol, trace: Trace) -> list[str]:
    """Return a warning if an ncu trace lacks requested metrics."""
    if trace.profiler != NCU or not trace.num_launches:
        return []
    from profharness.recording.profilers.ncu import QUERY_METRICS, unmeasured

    names = ", ".join(unmeasured(protocol.metrics, trace.metrics.names if trace.metrics else ()))
    return [f"ncu did not measure {names}; {QUERY_METRICS}"] if names else []


def _update_cells(
    connection: sqlite3.Connection,
    run: Run,
    ids: dict[str, int],
    results: list[tuple[str, Inserted]],
) -> list[str]:
    """Store the SDPA op of each cell and the warnings about its traces. Return new warnings."""
    warnings = []
    for cell in run.cells:
        traces = [
            (profiler, *result.cells[cell.cell])
            for profiler, result in results
            if cell.cell in result.cells
        ]
        fresh = []
        for _, counts, _ in traces:
            if len(set(counts)) > 1:
                shown = [
                    *map(str, counts[:MAX_COUNTS_SHOWN]),
                    *(["…"] if len(counts) > MAX_COUNTS_SHOWN else []),
                ]
                fresh.append(f"kernel count differs between calls: {','.join(shown)}")
        fresh = list(dict.fromkeys(fresh))
        covering = dict.fromkeys(raw.profiler for raw in run.traces if cell.cell in raw.cells)
        launching = {profiler for profiler, counts, _ in traces if any(counts)}
        if cell.status == "ok":
            fresh += [
                f"the {profiler} trace contains no launch of this cell"
                for profiler in covering
                if profiler not in launching
            ]
        op = next((op for *_, op in traces if op), None)
        connection.execute(
            "UPDATE cells SET sdpa_op = ?, warnings = ? WHERE id = ?",
            (op, to_json([*cell.warnings, *fresh]), ids[cell.cell]),
        )
        warnings += [f"{cell.cell}: {text}" for text in fresh]
    return warnings
