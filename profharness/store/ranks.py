"""Find the stored runs that are the ranks of one job, and the launches of these ranks.

The rank, host and GPU of a run are separated from its environment, so that all ranks of a job have
the same environment.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profharness.environment import hashed_key
from profharness.errors import NotFoundError
from profharness.rows import LAUNCH_PROFILERS, DeviceTime, RankKernel, RankLaunches, RankRow
from profharness.store.names import TRACE
from profharness.store.selection import NEWEST_FIRST, Selection
from profharness.store.tables import records

if TYPE_CHECKING:
    from profharness.store.queries import Store

DISTRIBUTED = "distributedInfo"  # name of a section in the header of a Kineto trace
IDENTITY = ("rank", "world_size", "host_key", "gpu_key")
MAX_RANK = 1 << 24
_COPIED = ("run", "rank", "host_key", "gpu_key", "created", "device")  # columns of RankRow
# File names of tensorboard_trace_handler have the form HOST_PID.NANOSECONDS.pt.trace.json.
TENSORBOARD = re.compile(r"(?P<host>.+)_\d+\.\d{10,}\.pt\.trace\.json(?:\.gz)?")
NAMED_RANK = re.compile(r"(?<![a-z])rank[._-]?(\d{1,7})(?!\d)", re.IGNORECASE)
NEED = (
    "`profharness ranks FOLDER` compares the traces in a folder; `profharness ranks RUN "
    "RUN …` compares the given runs"
)
Record = dict[str, Any]


def split_rank(
    environment: Mapping[str, object], name: str | None = None
) -> tuple[dict[str, int | str | None], dict[str, object]]:
    """Return the columns of `runs` that identify a rank, and the environment without these values.

    The columns are rank, world_size, and hashes of the host and the GPU. Unknown values are None.
    The runs of one job have the same environment except for these values. `name` is the name of a
    trace file outside of a run folder. If the environment does not contain the rank or the host,
    this name provides them. The number of ranks in the header of a Kineto trace stays in the
    environment, because this number distinguishes jobs.
    """
    rest = dict(environment)
    section = rest.pop(DISTRIBUTED, None)
    distributed = dict(section) if isinstance(section, Mapping) else {}
    rank, size, host, gpu = (rest.pop(key, None) for key in IDENTITY)
    inner = distributed.pop("rank", None)
    if distributed:
        rest[DISTRIBUTED] = distributed
    rank = rank_number(inner if rank is None else rank)
    size = rank_number(distributed.get("world_size") if size is None else size)
    host, gpu = (key if isinstance(key, str) else None for key in (host, gpu))
    if name is not None:
        named = NAMED_RANK.findall(name)
        rank = int(named[0]) if rank is None and len(named) == 1 else rank
        made = TENSORBOARD.fullmatch(name)
        host = hashed_key(made["host"]) if host is None and made else host
    return dict(zip(IDENTITY, (rank, size, host, gpu), strict=True)), rest


def rank_number(value: object) -> int | None:
    """Convert an integer or a decimal string to a rank or a number of ranks.

    Return None for other values.
    """
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 9:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value <= MAX_RANK else None


def rank_rows(store: Store, refs: Sequence[str] = ()) -> list[RankRow]:
    """Return the ranks of a job, sorted by rank.

    If several runs contain a rank, use the newest run. `refs` contains ids of runs, prefixes of
    ids, or folders. If `refs` is empty, return the newest job. If `refs` selects a single run,
    return the job of this run. Raise NotFoundError if fewer than two ranks match.
    """
    stored = _members(store.connection)
    wanted = _wanted(store, refs, stored)
    members = _by_rank([record for record in stored if record["run"] in wanted])
    if len(members) < 2:
        what = "the store contains no job with several ranks"
        if wanted:
            given = [ref for ref in refs if not Path(ref).is_dir()]
            run = store.find_run(Selection(given[0])) if given else min(wanted)
            name = store.run_name(run)
            what = f"run {name} contains the only rank of its job in the store"
        raise NotFoundError(f"{store.path}: {what}; {NEED}")
    stored_environments = store.connection.execute("SELECT id, data FROM environments")
    environments = {number: json.loads(data) for number, data in stored_environments}
    times: dict[int, list[DeviceTime]] = {}
    columns = ", ".join(DeviceTime._fields)
    for trace, *values in store.connection.execute(f"SELECT trace_id, {columns} FROM device_times"):
        times.setdefault(trace, []).append(DeviceTime(*values))
    rows = [
        RankRow(
            **{name: traces[0][name] for name in _COPIED},
            world_size=traces[0]["size"],
            name=traces[0]["file" if traces[0]["source"] == "trace" else "run"],
            environment=environments[traces[0]["environment_id"]],
            traces=tuple(trace["trace"] for trace in traces),
            times=tuple(time for trace in traces for time in times.get(trace["trace"], ())),
        )
        for traces in members
    ]
    return sorted(rows, key=lambda row: (row.rank is None, row.rank or 0, row.name))


def _members(connection: sqlite3.Connection) -> list[Record]:
    """Return all traces that have launches, newest run first.

    If a run has no rank, use the rank of the trace, because a run may contain traces of several
    ranks. The path of a trace that was given by its folder is the path of the file.
    """
    rows = records(
        connection,
        "SELECT r.run, r.created, r.path, r.source, r.device, r.host_key, r.gpu_key, "
        "r.environment_id, t.id AS trace, t.path AS file, t.profiler, "
        "coalesce(r.rank, json_extract(t.environment, '$.distributedInfo.rank')) AS rank, "
        "coalesce(world_size, json_extract(t.environment, '$.distributedInfo.world_size')) AS size "
        "FROM runs r JOIN traces t ON t.run_id = r.id "
        "WHERE t.launches > 0 AND r.kind NOT IN ('verify', 'explain') "
        f"{NEWEST_FIRST}, t.id",
    )
    # a foreign trace may contain invalid ranks
    return [
        row | {"path": _path_of(row)} | {key: rank_number(row[key]) for key in ("rank", "size")}
        for row in rows
    ]


def _path_of(record: Record) -> str:
    path = Path(record["path"])
    by_folder = record["source"] == TRACE and path.name != record["file"]
    return str(path / record["file"] if by_folder else path)


def _wanted(store: Store, refs: Sequence[str], stored: Sequence[Record]) -> set[str]:
    """Return the ids of the selected runs.

    If `refs` is empty, select the job of the newest trace that has a rank. If no trace has a rank,
    select the newest folder that contains several trace files of the same kind.
    """
    if not refs:
        for record in stored:
            if record["rank"] is not None:
                return _job_of(record, stored)
        jobs = (_job_of(record, stored) for record in stored if record["source"] == "trace")
        return next((job for job in jobs if len(job) > 1), set())
    runs: set[str] = set()
    for ref in refs:
        # compare the folder with the recorded paths, as given and as absolute paths
        folder = Path(ref)
        real = folder.resolve() if folder.is_dir() else None
        below = {
            record["run"]
            for record in stored
            if ref
            and (
                folder in Path(record["path"]).parents
                or (real and real in Path(record["path"]).absolute().parents)
            )
        }
        begun = {record["run"] for record in stored if ref and record["run"].startswith(ref)}
        runs |= below or begun or {store.find_run(Selection(ref))}
    if len(runs) == 1:
        own = [record for record in stored if record["run"] in runs]
        # A trace that records neither its rank nor the number of ranks is not known to be of a job.
        alone = not own or (own[0]["rank"] is None and own[0]["size"] is None)
        return runs if alone or len(_by_rank(own)) > 1 else _job_of(own[0], stored)
    return runs


def _job_of(record: Record, stored: Sequence[Record]) -> set[str]:
    """Return the runs in the folder of a trace that have the same number of ranks.

    If ranks are missing in this folder, search its parent folders too.
    """

    def kind(each: Record) -> tuple[object, ...]:
        return each["size"], each["rank"] is not None, each["source"]

    alike = [(Path(each["path"]), each) for each in stored if kind(each) == kind(record)]
    folder, size = Path(record["path"]).parent, record["size"]
    job = [each for path, each in alike if path.parent == folder]
    # if each host has a separate folder, find other ranks below the parent or grandparent folder
    for around in list(folder.parents)[:2]:
        ranks = {each["rank"] for each in job}
        if size is None or len(ranks) >= size:
            break
        wider = [each for path, each in alike if around in path.parents]
        if len({each["rank"] for each in wider}) > len(ranks):
            job = wider
    return {each["run"] for each in job}


def _by_rank(stored: Sequence[Record]) -> list[list[Record]]:
    """Return a list of traces for each rank.

    Use only traces of one profiler from the newest run of a rank.
    """
    members: dict[object, list[Record]] = {}
    for record in stored:
        key = record["run"] if record["rank"] is None else record["rank"]
        traces = members.setdefault(key, [])
        if not traces or traces[0]["run"] == record["run"]:
            traces.append(record)
    chosen = []
    for traces in members.values():
        first = min((trace["profiler"] for trace in traces), key=LAUNCH_PROFILERS.index)
        chosen.append([trace for trace in traces if trace["profiler"] == first])
    return chosen


def rank_launches(store: Store, ranks: Sequence[RankRow]) -> RankLaunches:
    """Return the sums of the launches of ranks, by range, kernel and launch configuration."""
    execute = store.connection.execute
    traces = (json.dumps([trace for rank in ranks for trace in rank.traces]),)
    places = {0: "", **dict(execute("SELECT id, name FROM range_names").fetchall())}
    cells: dict[int, int] = {}
    numbers: dict[str, int] = {}
    for cell, text in execute(
        "SELECT c.id, cf.label || ' ' || c.backend FROM cells c JOIN configs cf "
        "ON cf.id = c.config_id WHERE c.id IN (SELECT cell_id FROM trace_cells WHERE trace_id IN "
        "(SELECT value FROM json_each(?)))",
        traces,
    ):
        # a cell is identified by config and backend, because its id differs between runs
        cells[cell] = numbers.setdefault(text, -1 - len(numbers))
        places[cells[cell]] = text
    groups = execute(
        "SELECT trace_id, coalesce(range_name_id, 0), kernel_id, launch_config_id, launches, "
        "coalesce(total_ns, -1), coalesce(cell_id, 0) FROM launch_groups WHERE by_op = 0 "
        "AND device >= 0 AND trace_id IN (SELECT value FROM json_each(?))",
        traces,
    ).fetchall()
    if cells:
        groups = [(row[0], cells[row[6]] if row[6] else row[1], *row[2:]) for row in groups]
    kernels = execute("SELECT id, name, short, family, kind FROM kernels")
    return RankLaunches(
        groups, places, {number: RankKernel(*values) for number, *values in kernels}
    )
