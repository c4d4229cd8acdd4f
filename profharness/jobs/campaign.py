"""Divide a run into a campaign, whose groups of cells run on lanes, each in its own run folder.

The campaign's folder is a run folder too. Its run.json lists all cells, and readers take their
results from the finished groups in `groups/<group>`. A group in progress is in
`groups/<group>.<host>.part`. There is no state besides these files.
"""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from profharness.attention.backends import find_backends, fingerprints
from profharness.attention.costs import compulsory_bytes, flops
from profharness.device_types import CPU, CUDA, DEVICE_TYPES
from profharness.errors import TraceFormatError
from profharness.jobs.lane import PART, make_part, results_in
from profharness.jobs.run_archive import UNPACKING, publish
from profharness.recording.profilers import find_profilers
from profharness.run import (
    CAMPAIGN_FILE,
    GROUP_NAME,
    GROUPS_FOLDER,
    Cell,
    Run,
    read_part,
    read_run,
    write_run,
)

SCHEMA = "profharness.campaign/1"
# Estimated work per group and process; starting a worker (5.5 s on an H200) adds at most a tenth.
GROUP_S = 60.0
SMALLEST_S = 20.0  # minimum work of the last groups, so that all lanes end at about the same time
GROUPS_A_LANE = 20  # maximum number of groups per lane; a larger campaign gets longer groups
# Command -> fixed overhead per cell, in seconds.
PREPARED_S = {"capture": 0.15, "bench": 0.4, "verify": 0.3}
TURNS_S = 0.2  # duration of a benchmark measurement that becomes precise quickly
CALLS = {"bench": 60, "verify": 20}
WRAPPED_S = 2.0  # additional time of a cell under nsys or ncu


@dataclass(frozen=True)
class Group:
    """Cells that the same lane runs one after the other."""

    group: str  # hash of the work and of the way it is done
    cells: tuple[str, ...]
    seconds: float  # estimated duration


@dataclass(frozen=True)
class Campaign:
    """The contents of campaign.json. run.json has the cells, protocol and profilers."""

    backends: tuple[str, ...]  # names as the user requested them
    groups: tuple[Group, ...]
    gpu: str | None = None  # the GPU class that may run it
    python: str | None = None  # another interpreter for the worker
    schema: str = SCHEMA


def cut_groups(
    run: Run, backends: Sequence[str], lanes: int, gpu: str | None = None
) -> list[Group]:
    """Divide a run into groups, and return the longest group first.

    All cells of a config are in the same group.

    A group has about a minute of estimated work per process, or a twentieth of its lane's work if
    that is more. With several lanes, the last groups are smaller.
    """
    units = []
    for _, unit in itertools.groupby(run.cells, key=lambda cell: cell.asked or cell.config.label):
        cells = list(unit)
        units.append((sum(estimate_s(cell, run) for cell in cells), cells))
    units.sort(key=lambda unit: -unit[0])
    left = sum(seconds for seconds, _ in units)
    processes = run.protocol.processes
    largest = max(GROUP_S * processes, left / max(1, lanes) / GROUPS_A_LANE)
    smallest = max(SMALLEST_S * processes, largest / 8)
    groups: list[Group] = []
    gathered: list[Cell] = []
    seconds = 0.0
    code = fingerprints(find_backends(backends).values())
    for number, (more, cells) in enumerate(units, 1):
        gathered += cells
        seconds += more
        last_ones = max(smallest, left / (2 * lanes)) if lanes > 1 else largest
        if seconds >= min(largest, last_ones) or number == len(units):
            left -= seconds
            # the cells of a group are in the order of the run
            gathered.sort(key=lambda cell: cell.cell)
            names = tuple(cell.cell for cell in gathered)
            groups.append(Group(_hash(gathered, run, code, gpu), names, round(seconds, 3)))
            gathered, seconds = [], 0.0
    return sorted(groups, key=lambda group: -group.seconds)


def estimate_s(cell: Cell, run: Run) -> float:
    """Estimate how long a cell takes in all processes, from its FLOPs and bytes."""
    device = DEVICE_TYPES[CPU if run.protocol.device == CPU else CUDA]
    config = cell.config.resolve(device.name)
    call = flops(config) / device.flops_per_s + compulsory_bytes(config) / device.bytes_per_s
    kind = run.kind if run.kind in PREPARED_S else "capture"
    protocol = run.protocol
    if run.bench is not None:
        turns = len(run.bench.on(device.name)) * (TURNS_S + CALLS["bench"] * call)
        longest = run.bench.max_time_s / protocol.processes
        return (PREPARED_S["bench"] + min(turns, longest)) * protocol.processes
    calls = protocol.iterations + protocol.warmup + 3 * protocol.samples
    wrapped = sum(profiler.session is not None for profiler in find_profilers(run.profilers))
    own = PREPARED_S[kind] + CALLS.get(kind, calls) * call
    return own * protocol.processes + WRAPPED_S * wrapped


def _hash(cells: Sequence[Cell], run: Run, code: dict[str, str], gpu: str | None) -> str:
    """Hash the configs, cases, backends, code, options and GPU class of a group."""
    work = [(cell.config.label, cell.backend, cell.case) for cell in cells]
    used = {name: code[name] for name in sorted({cell.backend for cell in cells} & code.keys())}
    asked = work, used, run.profilers, run.protocol, run.bench, run.kind, gpu
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(asked))[:16]


def write_campaign(folder: Path, campaign: Campaign) -> None:
    """Turn a run folder into the folder of a campaign by writing campaign.json atomically."""
    (folder / GROUPS_FOLDER).mkdir(exist_ok=True)
    temporary = folder / f".{CAMPAIGN_FILE}.{os.urandom(6).hex()}"
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(campaign), indent=1))
    temporary.replace(folder / CAMPAIGN_FILE)


def is_campaign(folder: Path) -> bool:
    """Return whether a run folder belongs to a campaign."""
    return (folder / CAMPAIGN_FILE).is_file()


def read_campaign(folder: Path) -> Campaign:
    """Read campaign.json of a run folder. Raise TraceFormatError if it is missing or invalid."""
    path = folder / CAMPAIGN_FILE
    try:
        campaign = read_part(path, Campaign, f"a campaign of schema {SCHEMA}")
    except FileNotFoundError as error:
        raise TraceFormatError(path, f"cannot be read: {error.strerror}") from None
    if campaign.schema != SCHEMA:
        raise TraceFormatError(path, f"schema {campaign.schema!r}", expected=SCHEMA)
    # the names are used as folder names, so they must not lead outside of the folder
    if not all(GROUP_NAME.fullmatch(group.group) for group in campaign.groups):
        raise TraceFormatError(path, "a group has no proper name", expected=f"schema {SCHEMA}")
    return campaign


def group_folder(folder: Path, group: str) -> Path:
    """Return the run folder of a finished group."""
    return folder / GROUPS_FOLDER / group


def open_groups(folder: Path, campaign: Campaign) -> list[Group]:
    """Return the groups that are not finished, in order."""
    return [group for group in campaign.groups if not group_folder(folder, group.group).is_dir()]


def make_spec(folder: Path, campaign: Campaign, run: Run, group: Group) -> dict[str, Any]:
    """Describe a group for a lane, as a dict of plain values.

    `root` is the parent of the group's folder. `run` is the record of the group without any results.
    """
    wanted = set(group.cells)
    cells = tuple(cell for cell in run.cells if cell.cell in wanted)
    record = replace(
        run,
        run=f"{run.run}-{group.group[:8]}",
        cells=tuple(
            Cell(cell.cell, cell.config, cell.backend, case=cell.case, asked=cell.asked)
            for cell in cells
        ),
        environment={},
        traces=(),
        problems=(),
    )
    return {
        "root": str((folder / GROUPS_FOLDER).absolute()),
        "group": group.group,
        "run": msgspec.to_builtins(record),
        "backends": list(campaign.backends),
        "python": campaign.python,
        "seconds": group.seconds,
    }


def fail_group(folder: Path, spec: dict[str, Any], why: str) -> None:
    """Publish a group that no lane could run.

    Existing results are kept, and all other cells get the status `crashed`.
    """
    final = group_folder(folder, spec["group"])
    part = fullest_part(final) or final.with_name(f"{spec['group']}.failed{PART}")
    make_part(part, spec)
    run = read_run(part)
    cells = tuple(
        replace(cell, status="crashed", message=why) if cell.status == "pending" else cell
        for cell in run.cells
    )
    write_run(part, replace(run, cells=cells))
    publish(part, final)


def fullest_part(final: Path) -> Path | None:
    """Return the unfinished folder of a group that contains the most results.

    Return None if the group has no unfinished folder.
    """
    return max(final.parent.glob(f"{final.name}.*{PART}"), key=results_in, default=None)


def merge(folder: Path) -> Run:
    """Write the results of all finished groups into run.json, and return the run."""
    run = read_run(folder)
    write_run(folder, run)
    return run


def tidy(folder: Path) -> None:
    """Remove what lanes that disappeared have left behind of groups that other lanes finished."""
    groups = folder / GROUPS_FOLDER
    for part in groups.glob(f"*{PART}"):
        if group_folder(folder, part.name.partition(".")[0]).is_dir():
            shutil.rmtree(part, ignore_errors=True)
    for log in groups.glob(".*.log"):
        log.unlink(missing_ok=True)
    for unfinished in groups.glob(f".*{UNPACKING}"):
        shutil.rmtree(unfinished, ignore_errors=True)
