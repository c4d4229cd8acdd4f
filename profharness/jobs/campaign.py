"""Divide a run into a campaign. A campaign consists of groups of cells that run on several lanes.

The folder of a campaign is a run folder, and its run.json lists all cells. Each group has a separate
run folder. The folder is named `groups/<group>.<host>.part` while the group runs, and
`groups/<group>` when the group is finished. The results of the cells are read from the folders of
finished groups. A campaign has no state other than these files.

The scheduler assigns one group at a time to each lane until all groups are finished. The scheduler
also handles retries, failing lanes, progress and interrupts. A `Transport` runs the groups, so the
scheduler works in the same way for lanes of this host and of other hosts.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import xxhash

from profharness.attention.backends import find_backends, fingerprints
from profharness.attention.costs import compulsory_bytes, flops
from profharness.device_types import CPU, CUDA, DEVICE_TYPES
from profharness.errors import CaptureError, Interrupted, TraceFormatError, UnwritableError, counted
from profharness.files import atomic_file
from profharness.jobs.lane import PART, UNPACKING, Plain, make_part, publish, results_in
from profharness.logs import duration
from profharness.processes import defer_signals, raise_deferred_signals
from profharness.recording.capture import locked
from profharness.recording.profilers import find_profilers
from profharness.recording.supervise import Progress, Step
from profharness.run import (
    CAMPAIGN_FILE,
    GROUP_NAME,
    GROUPS_FOLDER,
    Cell,
    Run,
    read_part,
    read_run,
    unwritable,
    write_run,
)

SCHEMA = "profharness.campaign/1"
# Estimated duration of a group per process. Starting a worker (5.5 s on an H200) adds less than 10
# %.
GROUP_S = 60.0
# Minimum duration of the last groups. They are short, so that all lanes end at about the same time.
SMALLEST_S = 20.0
GROUPS_A_LANE = 20  # maximum number of groups per lane; the groups of a larger campaign are longer
# Maps each command to its fixed overhead per cell, in seconds.
PREPARED_S = {"capture": 0.15, "bench": 0.4, "verify": 0.3}
TURNS_S = 0.2  # duration of a benchmark measurement that soon reaches its precision
CALLS = {"bench": 60, "verify": 20}
WRAPPED_S = 2.0  # additional time of a cell under nsys or ncu
TRIES = 3  # maximum number of attempts to run a group
LANE_TRIES = 3  # a lane gets no more groups after this many different groups failed in a row
POLL_S = 0.1
LEAVING_S = 5.0
LANES_S = 30.0  # maximum time to wait for a lane to appear or to come back

OnStep = Callable[[str, Plain], None]


@dataclass(frozen=True)
class Group:
    """Cells that the same lane runs one after another."""

    group: str  # name of the group: a hash of its cells and of all options that affect the results
    cells: tuple[str, ...]
    seconds: float  # estimated duration


@dataclass(frozen=True)
class Campaign:
    """The contents of campaign.json. The cells, the protocol and the profilers are in run.json."""

    backends: tuple[str, ...]  # backends as named by the user
    groups: tuple[Group, ...]
    gpu: str | None = None  # GPU class of the lanes that may run the campaign
    python: str | None = None  # interpreter of the worker, or None for the default
    schema: str = SCHEMA


def cut_groups(
    run: Run, backends: Sequence[str], lanes: int, gpu: str | None = None
) -> list[Group]:
    """Divide a run into groups, and return the groups in order of decreasing duration.

    All cells of a config are in the same group. A group takes about one minute per process, or a
    twentieth of the work of a lane if this is longer. If there are several lanes, the last groups
    are shorter.
    """
    units = []
    for _, unit in itertools.groupby(run.cells, key=lambda cell: cell.asked or cell.config.label):
        cells = list(unit)
        units.append((sum(_estimate_s(cell, run) for cell in cells), cells))
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
            # groups with the same work, backend code and options have the same name
            work = [(cell.config.label, cell.backend, cell.case) for cell in gathered]
            used = sorted(code.keys() & {cell.backend for cell in gathered})
            asked = work, {each: code[each] for each in used}, run.profilers, run.protocol
            key = msgspec.json.encode((*asked, run.bench, run.kind, gpu))
            name = xxhash.xxh3_128_hexdigest(key)[:16]
            groups.append(Group(name, names, round(seconds, 3)))
            gathered, seconds = [], 0.0
    return sorted(groups, key=lambda group: -group.seconds)


def _estimate_s(cell: Cell, run: Run) -> float:
    """Estimate from FLOPs and bytes how long a cell takes in all processes together."""
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


def write_campaign(folder: Path, campaign: Campaign) -> None:
    """Turn a run folder into the folder of a campaign by writing campaign.json atomically."""
    (folder / GROUPS_FOLDER).mkdir(exist_ok=True)
    with atomic_file(folder / CAMPAIGN_FILE, force=True) as file:
        file.write(msgspec.json.format(msgspec.json.encode(campaign), indent=1))


def is_campaign(folder: Path) -> bool:
    """Return whether a run folder belongs to a campaign."""
    return (folder / CAMPAIGN_FILE).is_file()


def read_campaign(folder: Path) -> Campaign:
    """Read campaign.json of a run folder.

    Raise TraceFormatError if the file is missing or invalid.
    """
    path = folder / CAMPAIGN_FILE
    try:
        campaign = read_part(path, Campaign, f"a campaign with schema {SCHEMA}")
    except FileNotFoundError as error:
        raise TraceFormatError(path, f"cannot be read: {error.strerror}") from None
    if campaign.schema != SCHEMA:
        raise TraceFormatError(path, f"schema {campaign.schema!r}", expected=SCHEMA)
    # groups are also folders, so a name must not be a path that leads out of the campaign
    if not all(GROUP_NAME.fullmatch(group.group) for group in campaign.groups):
        raise TraceFormatError(path, "a group has an invalid name", expected=f"schema {SCHEMA}")
    return campaign


def group_folder(folder: Path, group: str) -> Path:
    """Return the run folder of a finished group."""
    return folder / GROUPS_FOLDER / group


def open_groups(folder: Path, campaign: Campaign) -> list[Group]:
    """Return the unfinished groups of a campaign in their original order."""
    return [group for group in campaign.groups if not group_folder(folder, group.group).is_dir()]


def make_spec(folder: Path, campaign: Campaign, run: Run, group: Group) -> Plain:
    """Return a description of a group, as a dict of plain values that can be sent to a lane.

    The `root` key contains the parent of the group's folder, and `run` contains the record of a run
    that has only the cells of the group, without results.
    """
    cells = (cell for cell in run.cells if cell.cell in set(group.cells))
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
        periods=(),
    )
    return {
        "root": str((folder / GROUPS_FOLDER).absolute()),
        "group": group.group,
        "run": msgspec.to_builtins(record),
        "backends": list(campaign.backends),
        "python": campaign.python,
    }


def _fail_group(folder: Path, spec: Plain, why: str) -> None:
    """Publish the folder of a group that no lane could finish.

    Existing results are kept. All cells without a result get the status `crashed`.
    """
    final = group_folder(folder, spec["group"])
    parts = final.parent.glob(f"{final.name}.*{PART}")
    fullest = max(parts, key=results_in, default=final.with_name(f"{final.name}.failed{PART}"))
    make_part(fullest, spec)
    run = read_run(fullest)
    cells = tuple(
        replace(cell, status="crashed", message=why) if cell.status == "pending" else cell
        for cell in run.cells
    )
    write_run(fullest, replace(run, cells=cells))
    publish(fullest, final)


def merge(folder: Path) -> Run:
    """Write the results of all finished groups into run.json, and return the run."""
    run = read_run(folder)
    write_run(folder, run)
    return run


def is_of_class(lane: Plain, gpu: str | None) -> bool:
    """Return whether a lane belongs to a GPU class, which is a word in the name of its GPU.

    For example, the `H100` class contains lanes with the GPU `NVIDIA H100 80GB HBM3`. The class
    `cpu` contains the lanes without a GPU. Case is ignored. If `gpu` is None, the result is True.
    """
    return gpu is None or gpu.casefold() in str(lane.get("gpu") or CPU).casefold().split()


class Transport(Protocol):
    """Runs groups on lanes.

    A lane is represented by the dict that `describe_lane` returns, with its name under the key
    `lane`.
    """

    def lanes(self) -> list[Plain]:
        """Return the lanes that are currently available."""

    def submit(self, lane: Plain, spec: Plain, on_step: OnStep, /) -> None:
        """Start a group on a lane, and return without waiting for it.

        `on_step` may be called in any thread, with the lane's name and a step of a cell.
        """

    def next_done(self, timeout_s: float, /) -> tuple[str, Plain] | None:
        """Return the name of a lane and the outcome of its group, or None after the timeout.

        The outcome is the return value of `run_group`. If the group succeeded, its finished folder
        is in the folder of the campaign. If the folder cannot be written there, the outcome
        contains the reason under the `unwritable` key.
        """

    def end(self, lane: Plain, /) -> None:
        """Terminate the group that is running on a lane, without waiting for it to end.

        A second call for the same group kills the group.
        """

    def close(self) -> None:
        """Close the connections to all lanes. Running groups continue."""


@dataclass
class _Task:
    """A group of the campaign in `folder`, and the failures of the group so far."""

    folder: Path
    campaign: Campaign
    run: Run
    group: Group
    errors: list[str] = field(default_factory=list)
    failed_on: set[str] = field(default_factory=set)  # names of the lanes on which the group failed

    @property
    def final(self) -> Path:
        return group_folder(self.folder, self.group.group)

    @property
    def spec(self) -> Plain:
        return make_spec(self.folder, self.campaign, self.run, self.group)

    @property
    def steps(self) -> int:
        return len(self.group.cells) * self.run.protocol.processes

    def is_suitable(self, lane: _Lane) -> bool:
        return is_of_class(lane.description, self.campaign.gpu)


@dataclass
class _Lane:
    """A lane and the group that it runs."""

    description: Plain
    task: _Task | None = None
    done: int = 0  # number of finished cells in the current group
    failed: set[str] = field(default_factory=set)  # groups that failed since the last success

    def release(self) -> _Task | None:
        task, self.task = self.task, None
        return task


class CampaignScheduler:
    """Runs campaigns, one per GPU class, on the lanes of one transport.

    `why_not` returns the reason why a lane cannot be used, or None if it can be used. `on_group` is
    called with the folder of each finished group, even if an earlier client finished the group.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        transport: Transport,
        progress: Progress | None = None,
        why_not: Callable[[Plain], str | None] = lambda _: None,
        on_group: Callable[[Path], None] | None = None,
    ) -> None:
        self.folders = folders
        self.transport = transport
        self._progress = progress or (lambda _: None)
        self._why_not = why_not
        self._on_group = on_group or (lambda _: None)
        tasks = []
        for folder in folders:
            campaign, self._run = read_campaign(folder), read_run(folder)
            tasks += [_Task(folder, campaign, self._run, group) for group in campaign.groups]
        self._finished = [task.final for task in tasks if task.final.is_dir()]
        self._queue = deque(task for task in tasks if not task.final.is_dir())
        self._lanes: dict[str, _Lane] = {}
        self._rejected: dict[str, str] = {}  # reason why a lane gets no groups, by lane
        self._reported: set[str] = set()  # printed warnings, and GPU classes with such a warning
        self._some_vanished = False  # whether a lane has disappeared
        self._groups, self._total = len(tasks), sum(task.steps for task in tasks)
        self._groups_done = self._groups - len(self._queue)
        self._done = self._total - sum(task.steps for task in self._queue)
        self._suitable_at = time.monotonic()  # last time when a waiting group had a suitable lane
        self._estimated = self._measured = 0.0  # seconds of the groups finished by this client

    def carry_out(self) -> list[Run]:
        """Run all groups, write run.json of each campaign, and return the runs.

        After an interrupt, start no new groups, and raise Interrupted when the running groups have
        ended. After a second interrupt, end the running groups and raise Interrupted. Raise
        CaptureError if no lane is left, and UnwritableError if a folder cannot be written to.
        """
        with ExitStack() as locks, defer_signals():
            for folder in self.folders:
                locks.enter_context(locked(folder))
            for final in self._finished:
                self._on_group(final)
            try:
                self._feed_until_done()
            except OSError as error:
                place = f"{error.filename or 'its groups'}: {error.strerror}"
                raise unwritable(self._unfinished(), place) from None
            finally:
                # write the results of finished groups even if other groups are unfinished
                runs = [merge(folder) for folder in self.folders]
            for folder in self.folders:
                _tidy(folder)
        return runs

    def _feed_until_done(self) -> None:
        feeding = True
        try:
            while self._queue or self._busy():
                try:
                    raise_deferred_signals()
                    self._update_lanes()
                    if feeding:
                        self._feed()
                    elif not self._busy():
                        raise Interrupted(self._unfinished())
                    done = self.transport.next_done(POLL_S)
                    if done is not None:
                        self._process_outcome(*done)
                    self._require_lanes()
                except Interrupted:
                    raise
                except KeyboardInterrupt as stop:
                    # SIGTERM, SIGHUP and a second interrupt end the groups immediately
                    if not feeding or type(stop) is not KeyboardInterrupt:
                        raise Interrupted(self._unfinished()) from stop
                    feeding = False
                    self._notify(
                        f"finishing {counted(len(self._busy()), 'running group')} before stopping; "
                        "press Ctrl-C again to stop immediately"
                    )
        finally:
            self._end_all()

    def _end_all(self) -> None:
        """Terminate all running groups, and kill groups that are still running after LEAVING_S."""
        for _ in range(2):
            for lane in self._busy():
                self.transport.end(lane.description)
            deadline = time.monotonic() + LEAVING_S
            while self._busy() and time.monotonic() < deadline:
                # the loss of the scheduler has already been reported
                with suppress(CaptureError):
                    done = self.transport.next_done(POLL_S)
                    if done is not None and done[0] in self._lanes:
                        self._lanes[done[0]].release()
        for lane in self._lanes.values():
            lane.release()

    def _unfinished(self) -> Path:
        """Return the folder of the first campaign that has unfinished groups."""
        left = {task.folder for task in (*self._running(), *self._queue)}
        return next((folder for folder in self.folders if folder in left), self.folders[0])

    def _busy(self) -> list[_Lane]:
        return [lane for lane in self._lanes.values() if lane.task is not None]

    def _running(self) -> list[_Task]:
        return [lane.task for lane in self._lanes.values() if lane.task is not None]

    def _update_lanes(self) -> None:
        """Add new lanes. Remove lanes that are gone, and retry or give up the groups they ran."""
        here = {description["lane"]: description for description in self.transport.lanes()}
        for name, description in here.items():
            if name in self._lanes or name in self._rejected:
                continue
            why = "; ".join(description.get("problems") or ()) or self._why_not(description)
            if why:
                self._reject(name, why)
                continue
            self._lanes[name] = _Lane(description)
            if warning := description.get("warning"):
                self._notify_once(f"warning: {warning}")
        for name in self._lanes.keys() - here.keys():
            self._some_vanished = True
            lane = self._lanes.pop(name)
            if (task := lane.release()) is not None:
                self._retry_or_give_up(lane, task, "the lane has ended")

    def _feed(self) -> None:
        for name, lane in tuple(self._lanes.items()):
            if lane.task is None and (task := self._next(name, lane)) is not None:
                lane.task, lane.done = task, 0
                self.transport.submit(lane.description, task.spec, self._step)

    def _next(self, name: str, lane: _Lane) -> _Task | None:
        """Return the first waiting group that a lane may run, or None.

        If a group has failed on a lane, the lane retries the group only after the group has failed on
        all other suitable lanes.
        """
        for task in tuple(self._queue):
            if not task.is_suitable(lane) or (
                name in task.failed_on and not self._suitable(task) <= task.failed_on
            ):
                continue
            self._queue.remove(task)
            if not task.final.is_dir():
                return task
            # another lane has already finished the group
            self._count_finished(task)
        return None

    def _suitable(self, task: _Task) -> set[str]:
        return {name for name, lane in self._lanes.items() if task.is_suitable(lane)}

    def _process_outcome(self, name: str, outcome: Mapping[str, Any]) -> None:
        lane = self._lanes.get(name)
        if lane is None or lane.task is None or lane.task.group.group != outcome["group"]:
            return  # the lane no longer runs this group
        task, error = lane.task, outcome["error"]
        lane.release()
        if outcome.get("unwritable"):
            # The disk of this host cannot be written to, so the results of other lanes would be
            # lost too. The lane keeps the result of this group.
            raise UnwritableError(outcome["unwritable"])
        if error is None and task.final.is_dir():
            lane.failed.clear()
            self._estimated += task.group.seconds
            self._measured += float(outcome["seconds"])
            self._count_finished(task)
            self._notify(self._summary(name, float(outcome["seconds"])))
            return
        why = str(error or "no run folder was written for the group")
        if outcome.get("lost"):
            self._reject(name, why)
            self._queue.appendleft(task)  # this does not count as a failure of the group
        else:
            self._retry_or_give_up(lane, task, why)

    def _retry_or_give_up(self, lane: _Lane, task: _Task, why: str) -> None:
        """Put a failed group at the end of the queue. After TRIES failures, give the group up."""
        name = lane.description["lane"]
        lane.failed.add(task.group.group)
        task.errors.append(f"{name}: {why}")
        task.failed_on.add(name)
        if len(lane.failed) >= LANE_TRIES and name in self._lanes:
            # Several groups failed on this lane, so the lane is the cause. Its failures do not
            # count as failures of the groups.
            self._reject(name, f"{LANE_TRIES} groups failed in a row; the last error: {why}")
            for waiting in (task, *self._queue, *self._running()):
                kept = [text for text in waiting.errors if not text.startswith(f"{name}: ")]
                waiting.errors = kept
        if len(task.errors) < TRIES:
            self._notify(f"{name}: group {task.group.group} failed and will run again: {why}")
            self._queue.append(task)
            return
        words = f"the group failed {TRIES} times; the last error: {task.errors[-1]}"
        self._notify(f"skipping group {task.group.group}: {words}")
        _fail_group(task.folder, task.spec, words)
        self._count_finished(task)

    def _require_lanes(self) -> None:
        """Warn about GPU classes without a lane.

        Raise CaptureError if none of the waiting groups has had a suitable lane for LANES_S.
        """
        waiting = {task.campaign.gpu: task for task in self._queue}
        without = {gpu for gpu, task in waiting.items() if not self._suitable(task)}
        if self._busy() or without < waiting.keys() or not waiting:
            self._suitable_at = time.monotonic()
        # wait for lanes that are gone or have not appeared yet, but not for rejected lanes
        patience_s = LANES_S if self._some_vanished or self._lanes or not self._rejected else 0.0
        over = time.monotonic() - self._suitable_at > patience_s
        classes = sorted(filter(None, without))
        if self._lanes or over:
            for gpu in classes:
                count = sum(task.campaign.gpu == gpu for task in self._queue)
                self._notify_once(
                    f"warning: {counted(count, 'group is', 'groups are')} waiting, because no lane has a {gpu}",
                    gpu,
                )
        if not over or not without:
            return
        reasons = "; ".join(f"{name}: {why}" for name, why in self._rejected.items())
        raise CaptureError(
            f"no lane is left for {counted(len(self._queue), 'group')}"
            f"{' of ' if classes else ''}{', '.join(classes)}"
            f"{f' ({reasons})' if reasons else ''}; finished groups are kept; to resume the run, use: "
            f"profharness capture --resume {self._unfinished()}"
        )

    def _reject(self, name: str, why: str) -> None:
        """Stop using a lane, and notify the user of the reason."""
        self._lanes.pop(name, None)
        self._rejected[name] = why
        self._notify(f"warning: {name} gets no more groups: {why}")

    def _count_finished(self, task: _Task) -> None:
        self._groups_done += 1
        self._done += task.steps
        self._on_group(task.final)

    def _summary(self, name: str, seconds: float) -> str:
        """Return a text about the progress, with an estimate of the remaining time."""
        text = f"{name}: {self._groups_done} of {self._groups} groups, {seconds:.1f} s"
        rest = sum(task.group.seconds for task in self._queue)
        rest += sum(task.group.seconds / 2 for task in self._running())
        if not rest:
            return text
        left = rest * self._measured / max(1e-9, self._estimated) / max(1, len(self._lanes))
        return f"{text}; about {duration(left)} left"

    def _step(self, name: str, row: Plain) -> None:
        """Pass a step of a lane on to the progress callback."""
        lane = self._lanes.get(name)
        if lane is None or lane.task is None:
            return
        cells = lane.task.run.cells
        cell = next((each for each in cells if each.cell == row["cell"]), None)
        if cell is None:
            return
        if row["notice"]:
            self._notify(f"{name}: {row['notice']}")
            return
        lane.done = row["done"]
        message = row.get("message")
        now = Cell(cell.cell, cell.config, cell.backend, row["status"], message, case=cell.case)
        self._progress(Step(self._finished_cells(), self._total, now, row["stage"], lane=name))

    def _finished_cells(self) -> int:
        return min(self._total, self._done + sum(lane.done for lane in self._busy()))

    def _notify(self, text: str) -> None:
        cell = self._run.cells[0]
        self._progress(Step(self._finished_cells(), self._total, cell, "", notice=text))

    def _notify_once(self, text: str, key: str = "") -> None:
        if (key or text) not in self._reported:
            self._reported.add(key or text)
            self._notify(text)


def _tidy(folder: Path) -> None:
    """Remove logs, and the partial folders of groups that other lanes have finished.

    Lanes that crashed or disappeared may have left such files behind.
    """
    groups = folder / GROUPS_FOLDER
    for part in groups.glob(f"*{PART}"):
        if group_folder(folder, part.name.partition(".")[0]).is_dir():
            shutil.rmtree(part, ignore_errors=True)
    for log in groups.glob(".*.log"):
        log.unlink(missing_ok=True)
    for unfinished in groups.glob(f".*{UNPACKING}"):
        shutil.rmtree(unfinished, ignore_errors=True)
