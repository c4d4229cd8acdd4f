"""The window: feeds lanes with one group each, whatever brings it there, until all groups are done.

It knows no transport: the same code decides on retries, lanes that fail, progress and interrupts for
lanes of this host and of many.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

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
from profharness.processes import deferred, let_through
from profharness.run import Cell, Run, read_run, unwritable
from profharness.runner.capture import locked
from profharness.runner.supervise import Progress, Step

TRIES = 3  # of a group
LANE_TRIES = 3  # groups in a row that a lane may fail at without any success
POLL_S = 0.1
LEAVING_S = 5.0
LANES_S = 30.0  # that a lane may take to come up, or to come back
CPU = "cpu"

Plain = dict[str, Any]
OnStep = Callable[[str, Plain], None]


class Transport(Protocol):
    """What brings groups to lanes. A lane is a dict of `describe_lane` with its name under `lane`."""

    def lanes(self) -> list[Plain]:
        """The lanes that are there now; one that is gone is not among them."""
        ...

    def submit(self, lane: Plain, spec: Plain, on_step: OnStep, /) -> None:
        """Have a lane run a group. on_step may be told the lane's name and its steps, in any thread."""
        ...

    def next_done(self, timeout_s: float, /) -> tuple[str, Plain] | None:
        """A lane's name and what `run_group` returned there, its folder in its place, or why that cannot
        be written to under `unwritable`; None when nothing came in that time.
        """
        ...

    def end(self, lane: Plain, /) -> None:
        """End what a lane does; called once more, at once. Does not wait for it."""
        ...

    def close(self) -> None:
        """Leave the lanes. What still runs there goes on."""
        ...


@dataclass(frozen=True)
class LoadedCampaign:
    """A campaign in its folder, with the run that it is."""

    folder: Path
    campaign: Campaign
    run: Run

    def takes(self, lane: Plain) -> bool:
        """Whether a lane is of the class of GPU that this campaign is for."""
        return self.campaign.gpu is None or is_of_class(lane, self.campaign.gpu)


def is_of_class(lane: Plain, gpu: str) -> bool:
    """Whether the name of a lane's GPU has a word: `H100` fits `NVIDIA H100 80GB HBM3`. A lane
    without a GPU is of the class `cpu`.
    """
    return gpu.casefold() in str(lane.get("gpu") or CPU).casefold().split()


@dataclass
class _Task:
    """A group with what became of it so far."""

    loaded: LoadedCampaign
    group: Group
    errors: list[str] = field(default_factory=list)
    failed_on: set[str] = field(default_factory=set)

    @property
    def folder(self) -> Path:
        """Where the group stands when it is done."""
        return group_folder(self.loaded.folder, self.group.group)


@dataclass
class _Lane:
    """A lane that has a group: done counts the cells of it that have ended."""

    description: Plain
    task: _Task | None = None
    done: int = 0
    failed: list[str] = field(default_factory=list)  # its errors since its last success

    def release(self) -> _Task | None:
        """What it had to do, which others may do now."""
        task, self.task = self.task, None
        return task


class CampaignScheduler:
    """Campaigns, one a class of GPU, on the lanes of one transport. why_not: why a lane cannot take
    part; on_group hears of the folder of each group that is done, also of those before.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        transport: Transport,
        progress: Progress | None = None,
        why_not: Callable[[Plain], str | None] = lambda _: None,
        on_group: Callable[[Path], None] = lambda _: None,
    ) -> None:
        self.transport = transport
        self.campaigns = [
            LoadedCampaign(path, read_campaign(path), read_run(path)) for path in folders
        ]
        self._progress = progress or (lambda _: None)
        self._why_not = why_not
        self._on_group = on_group
        self._queue = deque(
            _Task(loaded, group)
            for loaded in self.campaigns
            for group in open_groups(loaded.folder, loaded.campaign)
        )
        self._lanes: dict[str, _Lane] = {}
        self._out: dict[str, str] = {}  # lane to why it gets no group
        self._warned: set[str] = set()
        self._some_left = False
        self._missed: set[str | None] = set()  # classes that were told to have no lane
        self._groups = sum(len(loaded.campaign.groups) for loaded in self.campaigns)
        self._groups_done = self._groups - len(self._queue)
        self._total = sum(
            len(each.run.cells) * each.run.protocol.processes for each in self.campaigns
        )
        self._done = self._total - sum(map(_steps, self._queue))
        self._seen = time.monotonic()  # when there was a lane for a group that waits, or could be
        self._estimated = self._measured = 0.0

    def carry_out(self) -> list[Run]:
        """All groups, then run.json of each campaign. Raises Interrupted after the first interrupt, once
        the groups that run have ended, or at the second; CaptureError when no lane is left, or the
        folder cannot be written to.
        """
        with ExitStack() as locks, deferred():
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
                # an unfinished campaign also records the groups that are done
                runs = [merge(loaded.folder) for loaded in self.campaigns]
            for loaded in self.campaigns:
                tidy(loaded.folder)
        return runs

    def _feed_until_done(self) -> None:
        feeding = True
        try:
            while self._queue or self._busy():
                try:
                    let_through()
                    self._look()
                    if feeding:
                        self._feed()
                    elif not self._busy():
                        raise Interrupted(self._unfinished())
                    done = self.transport.next_done(POLL_S)
                    if done is not None:
                        self._take(*done)
                    self._require_lanes()
                except KeyboardInterrupt as stop:
                    # a signal that ends (TERM, HUP) waits for nothing, nor does a second interrupt
                    if not feeding or type(stop) is not KeyboardInterrupt:
                        raise Interrupted(self._unfinished()) from stop
                    feeding = False
                    self._say(
                        f"no new group is begun; {len(self._busy())} of them end first, Ctrl-C once "
                        "more ends them now"
                    )
        finally:
            self._end_all()

    def _end_all(self) -> None:
        """End what lanes still do: in order, and what does not end by itself in LEAVING_S at once."""
        for seconds in (LEAVING_S, LEAVING_S):
            for lane in self._busy():
                self.transport.end(lane.description)
            deadline = time.monotonic() + seconds
            while self._busy() and time.monotonic() < deadline:
                # a scheduler that is gone was told of before
                with suppress(CaptureError):
                    done = self.transport.next_done(POLL_S)
                    if done is not None and done[0] in self._lanes:
                        self._lanes[done[0]].release()
        for lane in self._lanes.values():
            lane.release()

    def _unfinished(self) -> Path:
        """The folder of the first campaign that has a group left."""
        left = [lane.task for lane in self._busy() if lane.task] + list(self._queue)
        folders = [each.folder for each in self.campaigns if any(t.loaded is each for t in left)]
        return (folders or [self.campaigns[0].folder])[0]

    def _busy(self) -> list[_Lane]:
        return [lane for lane in self._lanes.values() if lane.task is not None]

    def _look(self) -> None:
        """Which lanes are there: new ones take part, and the groups of those that are gone go back."""
        here = {description["lane"]: description for description in self.transport.lanes()}
        for name, description in here.items():
            if name in self._lanes or name in self._out:
                continue
            why = "; ".join(description.get("problems") or ()) or self._why_not(description)
            if why:
                self._leave_out(name, why)
                continue
            self._lanes[name] = _Lane(description)
            warning = description.get("warning")
            if warning and warning not in self._warned:
                self._warned.add(warning)
                self._say(f"warning: {warning}")
        for name in [name for name in self._lanes if name not in here]:
            self._some_left = True
            lane = self._lanes.pop(name)
            if (task := lane.release()) is not None:
                self._failed(lane, task, "its lane is gone")

    def _feed(self) -> None:
        for name, lane in tuple(self._lanes.items()):
            if lane.task is None and (task := self._next(name, lane)) is not None:
                lane.task, lane.done = task, 0
                spec = _spec(task)
                spec["attempt"] = len(task.errors) + 1
                self.transport.submit(lane.description, spec, self._step)

    def _next(self, name: str, lane: _Lane) -> _Task | None:
        """The first group for this lane that did not fail on it, unless it failed on every other too."""
        for task in tuple(self._queue):
            if not task.loaded.takes(lane.description) or (
                name in task.failed_on and not self._fitting(task) <= task.failed_on
            ):
                continue
            self._queue.remove(task)
            if not task.folder.is_dir():
                return task
            # another lane was quicker
            self._count(task)
        return None

    def _fitting(self, task: _Task) -> set[str]:
        """The lanes that are of the class of a group."""
        return {name for name, lane in self._lanes.items() if task.loaded.takes(lane.description)}

    def _take(self, name: str, outcome: Mapping[str, Any]) -> None:
        lane = self._lanes.get(name)
        if lane is None or lane.task is None or lane.task.group.group != outcome["group"]:
            return  # of a lane that was given up
        task, error = lane.task, outcome["error"]
        lane.release()
        if outcome.get("unwritable"):
            # of this host: no other lane fares better, and the lane still has what it did
            raise UnwritableError(outcome["unwritable"])
        if error is None and task.folder.is_dir():
            lane.failed.clear()
            self._estimated += task.group.seconds
            self._measured += float(outcome["seconds"])
            self._count(task)
            self._say(self._standing(name, float(outcome["seconds"])))
            return
        why = str(error or "it left no run folder")
        if outcome.get("lost"):
            del self._lanes[name]
            self._leave_out(name, why)
            self._queue.appendleft(task)  # it was not the group's fault
            return
        self._failed(lane, task, why)

    def _failed(self, lane: _Lane, task: _Task, why: str) -> None:
        """A try of a group came to nothing: it goes to the end of the queue, or to its end."""
        name = lane.description["lane"]
        lane.failed.append(task.group.group)
        task.errors.append(f"{name}: {why}")
        task.failed_on.add(name)
        if len(set(lane.failed)) >= LANE_TRIES and name in self._lanes:
            # other groups fail there too: it is the lane, and its failures count for no group
            del self._lanes[name]
            self._leave_out(name, f"{LANE_TRIES} groups failed there in a row, the last one: {why}")
            busy = (other.task for other in self._busy() if other.task)
            for waiting in (task, *self._queue, *busy):
                kept = [text for text in waiting.errors if not text.startswith(f"{name}: ")]
                waiting.errors[:] = kept
        if len(task.errors) < TRIES:
            self._say(f"{name}: group {task.group.group} failed, and is tried again: {why}")
            self._queue.append(task)
            return
        words = f"the group failed {TRIES} times; the last time: {task.errors[-1]}"
        self._say(f"group {task.group.group} is given up: {words}")
        fail_group(task.loaded.folder, _spec(task), words)
        self._count(task)

    def _require_lanes(self) -> None:
        """Tell of classes without a lane. Raises CaptureError where no group that is left has one."""
        waiting = {task.loaded.campaign.gpu: task for task in self._queue}
        without = {gpu for gpu, task in waiting.items() if not self._fitting(task)}
        if self._busy() or without < waiting.keys() or not waiting:
            self._seen = time.monotonic()
        # lanes that are gone may come back, those that were left out do not
        patience_s = LANES_S if self._some_left or self._lanes or not self._out else 0.0
        over = time.monotonic() - self._seen > patience_s
        for gpu in sorted(filter(None, without - self._missed)) if self._lanes or over else ():
            self._missed.add(gpu)
            count = sum(task.loaded.campaign.gpu == gpu for task in self._queue)
            self._say(f"warning: no lane is a {gpu}: its {count} group(s) wait for one")
        if not over or not without:
            return
        reasons = "; ".join(f"{name}: {why}" for name, why in self._out.items())
        classes = ", ".join(sorted(filter(None, without)))
        raise CaptureError(
            f"no lane is left for {len(self._queue)} group(s){f' of {classes}' if classes else ''}"
            f"{f' ({reasons})' if reasons else ''}; what is done is kept, go on with: "
            f"profharness capture --resume {self._unfinished()}"
        )

    def _leave_out(self, name: str, why: str) -> None:
        self._out[name] = why
        self._say(f"warning: {name} gets no more groups: {why}")

    def _count(self, task: _Task) -> None:
        self._groups_done += 1
        self._done += _steps(task)
        self._on_group(task.folder)

    def _standing(self, name: str, seconds: float) -> str:
        """How far it is, and how long the rest will take by the groups that are done."""
        text = f"{name}: {self._groups_done} of {self._groups} groups, {seconds:.1f} s"
        rest = sum(task.group.seconds for task in self._queue)
        rest += sum(lane.task.group.seconds / 2 for lane in self._busy() if lane.task)
        if not rest:
            return text
        left = rest * self._measured / max(1e-9, self._estimated) / max(1, len(self._lanes))
        return f"{text}; about {duration(left)} left"

    def _step(self, name: str, row: Plain) -> None:
        """A step that a lane tells of."""
        lane = self._lanes.get(name)
        if lane is None or lane.task is None:
            return
        cells = lane.task.loaded.run.cells
        cell = next((each for each in cells if each.cell == row["cell"]), None)
        if cell is None:
            return
        if row["notice"]:
            self._say(f"{name}: {row['notice']}")
            return
        lane.done = row["done"]
        now = Cell(cell.cell, cell.config, cell.backend, row["status"], case=cell.case)
        self._progress(Step(self._so_far(), self._total, now, row["stage"], lane=name))

    def _so_far(self) -> int:
        return min(self._total, self._done + sum(lane.done for lane in self._busy()))

    def _say(self, text: str) -> None:
        cell = self.campaigns[0].run.cells[0]
        self._progress(Step(self._so_far(), self._total, cell, "", notice=text))


def _spec(task: _Task) -> Plain:
    return make_spec(task.loaded.folder, task.loaded.campaign, task.loaded.run, task.group)


def _steps(task: _Task) -> int:
    """The cells of a group as progress counts them: once a process."""
    return len(task.group.cells) * task.loaded.run.protocol.processes
