"""Find the stored runs that are the ranks of one job, and their launches."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from profharness.errors import NotFoundError
from profharness.rows import TRACE_PROFILERS, DeviceTime, RankKernel, RankLaunches, RankRow
from profharness.store.rank_identity import rank_number
from profharness.store.selection import Selection, find_run

# the rank of the run, else that of the trace: a run may contain the traces of several ranks
_MEMBERS = """
    SELECT r.id, r.run, r.created, r.path, r.source, r.device, r.world_size, r.host_key, r.gpu_key,
        r.environment_id, t.id AS trace, t.path AS file, t.profiler, t.launches,
        coalesce(r.rank, json_extract(t.environment, '$.distributedInfo.rank')) AS rank,
        json_extract(t.environment, '$.distributedInfo.world_size') AS size
    FROM runs r JOIN traces t ON t.run_id = r.id"""
RANK_COLUMNS = ("rank", "size")  # columns that come from traces
_NOT_JOBS = "('verify', 'explain')"
NEED = (
    "`profharness ingest FOLDER` takes the traces of a job's ranks in; "
    "`profharness ranks RUN RUN …` compares the runs that are named"
)
Record = dict[str, Any]


def rank_rows(connection: sqlite3.Connection, path: Path, refs: Sequence[str]) -> list[RankRow]:
    """Return the ranks of the job that `refs` select, each from its newest run.

    Raises NotFoundError if fewer than two ranks match.
    """
    records = _members(connection)
    wanted = _wanted(connection, path, refs, records)
    members = _by_rank([record for record in records if record["run"] in wanted])
    if len(members) < 2:
        which = f"run {min(wanted)} is" if wanted else "the store holds"
        what = "the only rank of its job here" if wanted else "no job of several ranks"
        raise NotFoundError(f"{path}: {which} {what}; {NEED}")
    environments = _environments(connection)
    times = _times(connection)
    rows = [_row(traces, environments, times) for traces in members]
    return sorted(rows, key=lambda row: (row.rank is None, row.rank or 0, row.name))


def _members(connection: sqlite3.Connection) -> list[Record]:
    """Return all traces with launches, those of the newest run first."""
    cursor = connection.execute(
        f"{_MEMBERS} WHERE t.launches > 0 AND r.kind NOT IN {_NOT_JOBS} "
        "ORDER BY r.created DESC, r.id DESC, t.id"
    )
    names = [column[0] for column in cursor.description]
    records = [dict(zip(names, row, strict=True)) for row in cursor]
    # these values come from traces unchecked
    return [record | {key: rank_number(record[key]) for key in RANK_COLUMNS} for record in records]


def _wanted(
    connection: sqlite3.Connection, path: Path, refs: Sequence[str], records: Sequence[Record]
) -> set[str]:
    """Return the ids of the selected runs."""
    if not refs:
        return _newest_job(records)
    runs: set[str] = set()
    for ref in refs:
        below = {record["run"] for record in records if _is_below(record["path"], ref)}
        begun = {record["run"] for record in records if ref and record["run"].startswith(ref)}
        runs |= below or begun or {find_run(connection, path, Selection(ref), ("kernels",))}
    if len(runs) == 1:
        (run,) = runs
        own = [record for record in records if record["run"] == run]
        return runs if len(_by_rank(own)) > 1 or not own else _job_of(own[0], records)
    return runs


def _newest_job(records: Sequence[Record]) -> set[str]:
    """Return the job of the newest trace with a rank, else of the newest trace with neighbours."""
    ranked = next((record for record in records if record["rank"] is not None), None)
    if ranked is not None:
        return _job_of(ranked, records)
    for record in records:
        if record["source"] == "trace" and len(job := _job_of(record, records)) > 1:
            return job
    return set()


def _job_of(record: Record, records: Sequence[Record]) -> set[str]:
    """Return the runs in the same folder with the same number of ranks.

    If ranks are missing there, include the folders around it.
    """
    size = _size(record)
    ranked = record["rank"] is not None
    alike = [
        other
        for other in records
        if _size(other) == size
        and (other["rank"] is not None) == ranked
        and other["source"] == record["source"]
    ]
    folder = Path(record["path"]).parent
    job = [other for other in alike if Path(other["path"]).parent == folder]
    # with one folder per host, the ranks are one or two folders deeper
    for around in list(folder.parents)[:2]:
        ranks = {other["rank"] for other in job}
        if size is None or len(ranks) >= size:
            break
        wider = [other for other in alike if around in Path(other["path"]).parents]
        if len({other["rank"] for other in wider}) > len(ranks):
            job = wider
    return {other["run"] for other in job}


def _size(record: Record) -> int | None:
    size: int | None = record["size"] if record["world_size"] is None else record["world_size"]
    return size


def _is_below(path: str, ref: str) -> bool:
    """Return whether a run's source lies below a folder, by its recorded or its resolved path."""
    folder = Path(ref)
    if not ref or folder in Path(path).parents:
        return bool(ref)
    return folder.is_dir() and folder.resolve() in Path(path).absolute().parents


def _by_rank(records: Sequence[Record]) -> list[list[Record]]:
    """Return the traces of each rank, from its newest run and from one profiler."""
    members: dict[object, list[Record]] = {}
    for record in records:
        key = record["run"] if record["rank"] is None else record["rank"]
        traces = members.setdefault(key, [])
        if not traces or traces[0]["run"] == record["run"]:
            traces.append(record)
    chosen = []
    for traces in members.values():
        first = min((trace["profiler"] for trace in traces), key=TRACE_PROFILERS.index)
        chosen.append([trace for trace in traces if trace["profiler"] == first])
    return chosen


def _row(
    traces: list[Record],
    environments: dict[int, dict[str, Any]],
    times: dict[int, list[DeviceTime]],
) -> RankRow:
    first = traces[0]
    ids = tuple(trace["trace"] for trace in traces)
    return RankRow(
        run=first["run"],
        rank=first["rank"],
        world_size=_size(first),
        host_key=first["host_key"],
        gpu_key=first["gpu_key"],
        name=first["file"] if first["source"] == "trace" else first["run"],
        created=first["created"],
        device=first["device"],
        environment=environments[first["environment_id"]],
        traces=ids,
        times=tuple(time for trace in ids for time in times.get(trace, ())),
    )


def _environments(connection: sqlite3.Connection) -> dict[int, dict[str, Any]]:
    rows = connection.execute("SELECT id, data FROM environments")
    return {number: json.loads(data) for number, data in rows}


def _times(connection: sqlite3.Connection) -> dict[int, list[DeviceTime]]:
    times: dict[int, list[DeviceTime]] = {}
    columns = ", ".join(DeviceTime._fields)
    for trace, *values in connection.execute(f"SELECT trace_id, {columns} FROM device_times"):
        times.setdefault(trace, []).append(DeviceTime(*values))
    return times


def rank_launches(connection: sqlite3.Connection, ranks: Sequence[RankRow]) -> RankLaunches:
    """Return the launches of ranks, from the stored groups."""
    traces = json.dumps([trace for rank in ranks for trace in rank.traces])
    places = {0: "", **dict(connection.execute("SELECT id, name FROM range_names").fetchall())}
    cells: dict[int, int] = {}
    numbers: dict[str, int] = {}
    for cell, text in connection.execute(
        "SELECT c.id, cf.label || ' ' || c.backend FROM cells c JOIN configs cf "
        "ON cf.id = c.config_id WHERE c.id IN (SELECT cell_id FROM trace_cells WHERE trace_id IN "
        "(SELECT value FROM json_each(?)))",
        (traces,),
    ):
        # cells differ between runs, but a config on a backend is the same place in all of them
        cells[cell] = numbers.setdefault(text, -1 - len(numbers))
        places[cells[cell]] = text
    groups = connection.execute(
        "SELECT trace_id, coalesce(range_name_id, 0), kernel_id, launch_config_id, launches, "
        "coalesce(total_ns, -1), coalesce(cell_id, 0) FROM launch_groups WHERE by_op = 0 "
        "AND device >= 0 AND trace_id IN (SELECT value FROM json_each(?))",
        (traces,),
    ).fetchall()
    if cells:
        groups = [(row[0], cells[row[6]] if row[6] else row[1], *row[2:]) for row in groups]
    kernels = {
        number: RankKernel(*values)
        for number, *values in connection.execute(
            "SELECT id, name, short, family, kind FROM kernels"
        )
    }
    return RankLaunches(groups, places, kernels)
