"""Find the stored runs that are the ranks of one job, and their launches.

The rank, host and GPU of a run are separated from its environment.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from profharness.environment import hashed_key
from profharness.errors import NotFoundError
from profharness.rows import TRACE_PROFILERS, DeviceTime, RankKernel, RankLaunches, RankRow
from profharness.store.selection import Selection, find_run
from profharness.store.tables import records

DISTRIBUTED = "distributedInfo"  # name of a section in the header of a Kineto trace
NUMBERS, KEYS = ("rank", "world_size"), ("host_key", "gpu_key")
MAX_RANK = 1 << 24
# file names of tensorboard_trace_handler: HOST_PID.NANOSECONDS.pt.trace.json
TENSORBOARD = re.compile(r"(?P<host>.+)_\d+\.\d{10,}\.pt\.trace\.json(?:\.gz)?")
NAMED_RANK = re.compile(r"(?<![a-z])rank[._-]?(\d{1,7})(?!\d)", re.IGNORECASE)
# The rank is taken from the run, or from the trace if the run has no rank, because a run may
# contain the traces of several ranks.
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


def split_place(
    environment: Mapping[str, object], name: str | None = None
) -> tuple[dict[str, int | str | None], dict[str, object]]:
    """Return the columns of `runs` that identify a rank, and the environment without these values.

    The columns are rank, world_size, and hashes of the host and the GPU. Unknown values are None.
    The runs of one job differ only in these values, and have the same environment otherwise. `name`
    is the name of a trace file outside of a run folder. The rank and the host are taken from it if
    the environment does not contain them. The number of ranks in the header of a Kineto trace stays
    in the environment, because environments with different numbers of ranks do differ.
    """
    rest = dict(environment)
    section = rest.get(DISTRIBUTED)
    distributed = dict(section) if isinstance(section, Mapping) else {}
    values = {key: rest.pop(key, None) for key in (*NUMBERS, *KEYS)}
    inner = distributed.pop("rank", None)
    if distributed:
        rest[DISTRIBUTED] = distributed
    else:
        rest.pop(DISTRIBUTED, None)
    rank = rank_number(inner if values["rank"] is None else values["rank"])
    size = values["world_size"]
    size = rank_number(distributed.get("world_size") if size is None else size)
    host, gpu = (str(key) if isinstance(key, str) else None for key in map(values.get, KEYS))
    if name is not None:
        rank = _rank_of(name) if rank is None else rank
        made = TENSORBOARD.fullmatch(name)
        host = hashed_key(made["host"]) if host is None and made else host
    return {"rank": rank, "world_size": size, "host_key": host, "gpu_key": gpu}, rest


def rank_number(value: object) -> int | None:
    """Return a rank or number of ranks that is given as an integer or a decimal string.

    Return None for other values.
    """
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 9:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value <= MAX_RANK else None


def _rank_of(name: str) -> int | None:
    named = NAMED_RANK.findall(name)
    return int(named[0]) if len(named) == 1 else None


def rank_rows(connection: sqlite3.Connection, path: Path, refs: Sequence[str]) -> list[RankRow]:
    """Return the ranks of the job that `refs` select. Each rank is taken from its newest run.

    Raises NotFoundError if fewer than two ranks match.
    """
    stored = _members(connection)
    wanted = _wanted(connection, path, refs, stored)
    members = _by_rank([record for record in stored if record["run"] in wanted])
    if len(members) < 2:
        which = f"run {min(wanted)} is" if wanted else "the store holds"
        what = "the only rank of its job here" if wanted else "no job of several ranks"
        raise NotFoundError(f"{path}: {which} {what}; {NEED}")
    environments = _environments(connection)
    times = _times(connection)
    rows = [_row(traces, environments, times) for traces in members]
    return sorted(rows, key=lambda row: (row.rank is None, row.rank or 0, row.name))


def _members(connection: sqlite3.Connection) -> list[Record]:
    """Return all traces that have launches. The traces of the newest run come first."""
    rows = records(
        connection,
        f"{_MEMBERS} WHERE t.launches > 0 AND r.kind NOT IN {_NOT_JOBS} "
        "ORDER BY r.created DESC, r.id DESC, t.id",
    )
    # traces may contain any values here
    return [row | {key: rank_number(row[key]) for key in RANK_COLUMNS} for row in rows]


def _wanted(
    connection: sqlite3.Connection, path: Path, refs: Sequence[str], stored: Sequence[Record]
) -> set[str]:
    """Return the ids of the selected runs."""
    if not refs:
        return _newest_job(stored)
    runs: set[str] = set()
    for ref in refs:
        below = {record["run"] for record in stored if _is_below(record["path"], ref)}
        begun = {record["run"] for record in stored if ref and record["run"].startswith(ref)}
        runs |= below or begun or {find_run(connection, path, Selection(ref), ("kernels",))}
    if len(runs) == 1:
        (run,) = runs
        own = [record for record in stored if record["run"] == run]
        return runs if len(_by_rank(own)) > 1 or not own else _job_of(own[0], stored)
    return runs


def _newest_job(stored: Sequence[Record]) -> set[str]:
    """Return the runs of the newest job.

    This is the job of the newest trace that has a rank. If no trace has a rank, it is the job of
    the newest trace file that has others of the same kind in its folder.
    """
    ranked = next((record for record in stored if record["rank"] is not None), None)
    if ranked is not None:
        return _job_of(ranked, stored)
    for record in stored:
        if record["source"] == "trace" and len(job := _job_of(record, stored)) > 1:
            return job
    return set()


def _job_of(record: Record, stored: Sequence[Record]) -> set[str]:
    """Return the runs in the same folder with the same number of ranks.

    If ranks are missing in that folder, search its parent folders too.
    """
    size = _size(record)
    ranked = record["rank"] is not None
    alike = [
        other
        for other in stored
        if _size(other) == size
        and (other["rank"] is not None) == ranked
        and other["source"] == record["source"]
    ]
    folder = Path(record["path"]).parent
    job = [other for other in alike if Path(other["path"]).parent == folder]
    # if each host has a folder of its own, the other ranks are below the parent or grandparent
    # folder
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
    """Return whether the source of a run is below the folder `ref`.

    Compare both the recorded path and the absolute path.
    """
    folder = Path(ref)
    if not ref or folder in Path(path).parents:
        return bool(ref)
    return folder.is_dir() and folder.resolve() in Path(path).absolute().parents


def _by_rank(stored: Sequence[Record]) -> list[list[Record]]:
    """Return the traces of each rank.

    The traces of a rank are from its newest run and from one profiler.
    """
    members: dict[object, list[Record]] = {}
    for record in stored:
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
    """Return the launches of ranks, summed by range, kernel and launch configuration."""
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
        # a cell is identified by its config and backend, because runs have cells of their own
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
