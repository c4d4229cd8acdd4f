"""The scheduler of campaigns, which gives each lane one group at a time until all groups are done.

It handles retries, failing lanes, progress and interrupts. A `Transport` runs the groups, so the
scheduler is the same for lanes of this host and of other hosts.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from profharness.device_types import CPU
from profharness.errors import CaptureError, Interrupted, UnwritableError
from profharness.jobs.campaign import (
    Campaign,
    Group,
    fail_group,
    group_folder,
    make_spec,
    merge,
    open_groups,
    read_campaign,
    tidy,
)
from profharness.jobs.progress import duration
from profharness.processes import defer_signals, raise_deferred_signals
from profharness.recording.capture import locked
from profharness.recording.supervise import Progress, Step
from profharness.run import Cell, Run, read_run, unwritable

TRIES = 3  # maximum number of attempts to run a group
LANE_TRIES = 3  # a lane gets no more groups after this many different groups failed in a row
POLL_S = 0.1
LEAVING_S = 5.0
LANES_S = 30.0  # maximum time to wait for a lane to appear or to come back

Plain = dict[str, Any]
OnStep = Callable[[str, Plain], None]


class Transport(Protocol):
    """Runs groups on lanes.

    A lane is represented by the dict that `describe_lane` returns, with its name under the key
    `lane`.
    """

    def lanes(self) -> list[Plain]:
        """Return the lanes that are currently available."""
        ...

    def submit(self, lane: Plain, spec: Plain, on_step: OnStep, /) -> None:
        """Start to run a group on a lane.

        `on_step` may be called with the lane's name and a step, in any thread.
        """
        ...

    def next_done(self, timeout_s: float, /) -> tuple[str, Plain] | None:
        """Return the name of a lane and the outcome of its group, or None after the timeout.

        The outcome is the return value of `run_group`. The finished folder of the group is then in
        the folder of the campaign. If it cannot be written there, the key `unwritable` contains the
        reason.
        """
        ...

    def end(self, lane: Plain, /) -> None:
        """Terminate the group that a lane runs, without waiting. If called again, kill the group."""
        ...

    def close(self) -> None:
        """Close the connections to all lanes. Groups of cells that are running continue."""
        ...


@dataclass(frozen=True)
class LoadedCampaign:
    """A campaign's folder, its groups and its run."""

    folder: Path
    campaign: Campaign
    run: Run

    def takes(self, lane: Plain) -> bool:
        """Return whether a lane is of the GPU class that this campaign requires."""
        return self.campaign.gpu is None or is_of_class(lane, self.campaign.gpu)


def is_of_class(lane: Plain, gpu: str) -> bool:
    """Return whether the name of a lane's GPU contains a word, ignoring case.

    `H100` matches `NVIDIA H100 80GB HBM3`. A lane without a GPU is of class `cpu`.
    """
    return gpu.casefold() in str(lane.get("gpu") or CPU).casefold().split()


@dataclass
class _Task:
    """A group of a campaign, and its failures so far."""

    loaded: LoadedCampaign
    group: Group
    errors: list[str] = field(default_factory=list)
    failed_on: set[str] = field(default_factory=set)  # names of the lanes on which it failed

    @property
    def folder(self) -> Path:
        """The folder of the group after it is finished."""
        return group_folder(self.loaded.folder, self.group.group)


@dataclass
class _Lane:
    """A lane and the group that it runs."""

    description: Plain
    task: _Task | None = None
    done: int = 0  # number of finished cells in the group
    failed: list[str] = field(default_factory=list)  # groups that failed since the last success

    def release(self) -> _Task | None:
        """Detach the lane's group, so that another lane can run it."""
        task, self.task = self.task, None
        return task


class CampaignScheduler:
    """Runs campaigns, one per GPU class, on the lanes of one transport.

    `why_not` returns why a lane cannot be used, or None if it can. `on_group` is called with the
    folder of each finished group, even if an earlier client finished the group.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        transport: Transport,
        progress: Progress | None = None,
        why_not: Callable[[Plain], str | None] = lambda _: None,
        on_group: Callable[[Path], None] | None = None,
    ) -> None:
        self.transport = transport
        self.campaigns = [
            LoadedCampaign(path, read_campaign(path), read_run(path)) for path in folders
        ]
        self._progress = progress or (lambda _: None)
        self._why_not = why_not
        self._on_group = on_group or (lambda _: None)
        self._queue = deque(
            _Task(loaded, group)
            for loaded in self.campaigns
            for group in open_groups(loaded.folder, loaded.campaign)
        )
        self._lanes: dict[str, _Lane] = {}
        self._rejected: dict[str, str] = {}  # lane -> reason why it gets no groups
        self._warned: set[str] = set()
        self._some_vanished = False  # whether a lane has disappeared
        # GPU classes already reported as having no lane
        self._classes_without_lane: set[str | None] = set()
        self._groups = sum(len(loaded.campaign.groups) for loaded in self.campaigns)
        self._groups_done = self._groups - len(self._queue)
        self._total = sum(
            len(each.run.cells) * each.run.protocol.processes for each in self.campaigns
        )
        self._done = self._total - sum(map(_steps, self._queue))
        self._suitable_at = time.monotonic()  # when a waiting group last had a suitable lane
        self._estimated = self._measured = 0.0

    def carry_out(self) -> list[Run]:
        """Run all groups, write run.json of each campaign, and return the runs.

        After the first interrupt, raise Interrupted once the running groups have ended; after the
        second one, immediately. Raise CaptureError if no lane is left, and UnwritableError if the
        folder cannot be written to.
        """
        with ExitStack() as locks, defer_signals():
            for loaded in self.campaigns:
                locks.enter_context(locked(loaded.folder))
                for group in loaded.campaign.groups:
                    if (done := group_folder(loaded.folder, group.group)).is_dir():
                        self._on_group(done)
            try:
                self._feed_until_done()
            except OSError as error:
                place = f"{error.filename or 'its groups'}: {error.strerror}"
                raise unwritable(self._unfinished(), place) from None
            finally:
                # record finished groups even if the campaign is unfinished
                runs = [merge(loaded.folder) for loaded in self.campaigns]
            for loaded in self.campaigns:
                tidy(loaded.folder)
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
                except KeyboardInterrupt as stop:
                    # SIGTERM, SIGHUP and a second interrupt end the groups immediately
                    if not feeding or type(stop) is not KeyboardInterrupt:
                        raise Interrupted(self._unfinished()) from stop
                    feeding = False
                    self._notify(
                        f"no new group starts; waiting for {len(self._busy())} running group(s), "
                        "Ctrl-C again ends them now"
                    )
        finally:
            self._end_all()

    def _end_all(self) -> None:
        """Terminate running groups, and kill those that have not ended after LEAVING_S."""
        for seconds in (LEAVING_S, LEAVING_S):
            for lane in self._busy():
                self.transport.end(lane.description)
            deadline = time.monotonic() + seconds
            while self._busy() and time.monotonic() < deadline:
                # a lost scheduler has been reported before
                with suppress(CaptureError):
                    done = self.transport.next_done(POLL_S)
                    if done is not None and done[0] in self._lanes:
                        self._lanes[done[0]].release()
        for lane in self._lanes.values():
            lane.release()

    def _unfinished(self) -> Path:
        """Return the folder of the first campaign that has groups left."""
        left = [lane.task for lane in self._busy() if lane.task] + list(self._queue)
        folders = [each.folder for each in self.campaigns if any(t.loaded is each for t in left)]
        return (folders or [self.campaigns[0].folder])[0]

    def _busy(self) -> list[_Lane]:
        return [lane for lane in self._lanes.values() if lane.task is not None]

    def _update_lanes(self) -> None:
        """Add new lanes, and put the groups of lanes that are gone back into the queue."""
        here = {description["lane"]: description for description in self.transport.lanes()}
        for name, description in here.items():
            if name in self._lanes or name in self._rejected:
                continue
            why = "; ".join(description.get("problems") or ()) or self._why_not(description)
            if why:
                self._reject(name, why)
                continue
            self._lanes[name] = _Lane(description)
            warning = description.get("warning")
            if warning and warning not in self._warned:
                self._warned.add(warning)
                self._notify(f"warning: {warning}")
        for name in [name for name in self._lanes if name not in here]:
            self._some_vanished = True
            lane = self._lanes.pop(name)
            if (task := lane.release()) is not None:
                self._retry_or_give_up(lane, task, "its lane is gone")

    def _feed(self) -> None:
        for name, lane in tuple(self._lanes.items()):
            if lane.task is None and (task := self._next(name, lane)) is not None:
                lane.task, lane.done = task, 0
                spec = _spec(task)
                spec["attempt"] = len(task.errors) + 1
                self.transport.submit(lane.description, spec, self._step)

    def _next(self, name: str, lane: _Lane) -> _Task | None:
        """Return the first waiting group that suits a lane.

        A lane gets a group that failed on it only if the group also failed on all other suitable
        lanes.
        """
        for task in tuple(self._queue):
            if not task.loaded.takes(lane.description) or (
                name in task.failed_on and not self._suitable(task) <= task.failed_on
            ):
                continue
            self._queue.remove(task)
            if not task.folder.is_dir():
                return task
            # another lane has finished it
            self._count_finished(task)
        return None

    def _suitable(self, task: _Task) -> set[str]:
        """Return the names of the lanes of a group's GPU class."""
        return {name for name, lane in self._lanes.items() if task.loaded.takes(lane.description)}

    def _process_outcome(self, name: str, outcome: Mapping[str, Any]) -> None:
        lane = self._lanes.get(name)
        if lane is None or lane.task is None or lane.task.group.group != outcome["group"]:
            return  # the lane was given up in the meantime
        task, error = lane.task, outcome["error"]
        lane.release()
        if outcome.get("unwritable"):
            # The client's disk cannot be written to, so other lanes would fail too. The lane keeps
            # its result.
            raise UnwritableError(outcome["unwritable"])
        if error is None and task.folder.is_dir():
            lane.failed.clear()
            self._estimated += task.group.seconds
            self._measured += float(outcome["seconds"])
            self._count_finished(task)
            self._notify(self._summary(name, float(outcome["seconds"])))
            return
        why = str(error or "it left no run folder")
        if outcome.get("lost"):
            del self._lanes[name]
            self._reject(name, why)
            self._queue.appendleft(task)  # does not count as a failure of the group
            return
        self._retry_or_give_up(lane, task, why)

    def _retry_or_give_up(self, lane: _Lane, task: _Task, why: str) -> None:
        """Put a failed group at the end of the queue. After TRIES failures, give it up."""
        name = lane.description["lane"]
        lane.failed.append(task.group.group)
        task.errors.append(f"{name}: {why}")
        task.failed_on.add(name)
        if len(set(lane.failed)) >= LANE_TRIES and name in self._lanes:
            # different groups failed on the lane, so it is at fault, and its failures do not count
            del self._lanes[name]
            self._reject(name, f"{LANE_TRIES} groups failed there in a row, the last one: {why}")
            busy = (other.task for other in self._busy() if other.task)
            for waiting in (task, *self._queue, *busy):
                kept = [text for text in waiting.errors if not text.startswith(f"{name}: ")]
                waiting.errors[:] = kept
        if len(task.errors) < TRIES:
            self._notify(f"{name}: group {task.group.group} failed, and is tried again: {why}")
            self._queue.append(task)
            return
        words = f"the group failed {TRIES} times; the last time: {task.errors[-1]}"
        self._notify(f"group {task.group.group} is given up: {words}")
        fail_group(task.loaded.folder, _spec(task), words)
        self._count_finished(task)

    def _require_lanes(self) -> None:
        """Warn about GPU classes that have no lane.

        Raise CaptureError if no remaining group has a lane.
        """
        waiting = {task.loaded.campaign.gpu: task for task in self._queue}
        without = {gpu for gpu, task in waiting.items() if not self._suitable(task)}
        if self._busy() or without < waiting.keys() or not waiting:
            self._suitable_at = time.monotonic()
        # lanes that disappeared may come back, rejected ones do not
        patience_s = LANES_S if self._some_vanished or self._lanes or not self._rejected else 0.0
        over = time.monotonic() - self._suitable_at > patience_s
        for gpu in (
            sorted(filter(None, without - self._classes_without_lane))
            if self._lanes or over
            else ()
        ):
            self._classes_without_lane.add(gpu)
            count = sum(task.loaded.campaign.gpu == gpu for task in self._queue)
            self._notify(f"warning: no lane has a {gpu}: {count} group(s) are waiting for one")
        if not over or not without:
            return
        reasons = "; ".join(f"{name}: {why}" for name, why in self._rejected.items())
        classes = ", ".join(sorted(filter(None, without)))
        raise CaptureError(
            f"no lane is left for {len(self._queue)} group(s){f' of {classes}' if classes else ''}"
            f"{f' ({reasons})' if reasons else ''}; finished groups are kept, resume with: "
            f"profharness capture --resume {self._unfinished()}"
        )

    def _reject(self, name: str, why: str) -> None:
        self._rejected[name] = why
        self._notify(f"warning: {name} gets no more groups: {why}")

    def _count_finished(self, task: _Task) -> None:
        self._groups_done += 1
        self._done += _steps(task)
        self._on_group(task.folder)

    def _summary(self, name: str, seconds: float) -> str:
        """Describe the progress, and estimate the remaining time from the finished groups."""
        text = f"{name}: {self._groups_done} of {self._groups} groups, {seconds:.1f} s"
        rest = sum(task.group.seconds for task in self._queue)
        rest += sum(lane.task.group.seconds / 2 for lane in self._busy() if lane.task)
        if not rest:
            return text
        left = rest * self._measured / max(1e-9, self._estimated) / max(1, len(self._lanes))
        return f"{text}; about {duration(left)} left"

    def _step(self, name: str, row: Plain) -> None:
        """Report a step of a lane to the progress callback."""
        lane = self._lanes.get(name)
        if lane is None or lane.task is None:
            return
        cells = lane.task.loaded.run.cells
        cell = next((each for each in cells if each.cell == row["cell"]), None)
        if cell is None:
            return
        if row["notice"]:
            self._notify(f"{name}: {row['notice']}")
            return
        lane.done = row["done"]
        now = Cell(cell.cell, cell.config, cell.backend, row["status"], case=cell.case)
        self._progress(Step(self._finished_cells(), self._total, now, row["stage"], lane=name))

    def _finished_cells(self) -> int:
        return min(self._total, self._done + sum(lane.done for lane in self._busy()))

    def _notify(self, text: str) -> None:
        cell = self.campaigns[0].run.cells[0]
        self._progress(Step(self._finished_cells(), self._total, cell, "", notice=text))


def _spec(task: _Task) -> Plain:
    return make_spec(task.loaded.folder, task.loaded.campaign, task.loaded.run, task.group)


def _steps(task: _Task) -> int:
    """Return the number of cells of a group, multiplied by the number of processes."""
    return len(task.group.cells) * task.loaded.run.protocol.processes
