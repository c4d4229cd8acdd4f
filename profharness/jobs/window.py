"""The window: feeds lanes with one group each, whatever brings it there, until all groups are done.

It knows no transport: the same code decides on retries, lanes that fail, progress and interrupts for
lanes of this host and of many.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from profharness.errors import CaptureError, Interrupted
from profharness.jobs.campaign import (
    Campaign,
    Group,
    fail_group,
    group_folder,
    make_spec,
    merge,
    open_groups,
    tidy,
    unpack,
)
from profharness.processes import deferred, let_through
from profharness.run import Cell, Run, read_run
from profharness.runner.capture import locked
from profharness.runner.supervise import Progress, Step

TRIES = 3  # of a group
LANE_TRIES = 3  # groups in a row that a lane may fail at without any success
POLL_S = 0.1
LEAVING_S = 5.0
LANES_S = 30.0  # that the first lane may take to come up

Plain = dict[str, Any]
OnStep = Callable[[str, Plain], None]


class Transport(Protocol):
    """What brings groups to lanes. A lane is a dict of `describe_lane` with its name under `lane`."""

    def lanes(self) -> list[Plain]:
        """The lanes that are there now; one that is gone is not among them."""
        ...

    def submit(self, lane: Plain, spec: Plain, on_step: OnStep) -> None:
        """Have a lane run a group. on_step may be told the lane's name and its steps, in any thread."""
        ...

    def next_done(self, timeout_s: float) -> tuple[str, Plain] | None:
        """A lane's name and what `run_group` returned there; None when nothing came in that time."""
        ...

    def end(self, lane: Plain) -> None:
        """End what a lane does; called once more, at once. Does not wait for it."""
        ...


@dataclass
class _Task:
    """A group with what became of it so far."""

    group: Group
    errors: list[str] = field(default_factory=list)
    failed_on: set[str] = field(default_factory=set)


@dataclass
class _Lane:
    """A lane that has a group: done counts the cells of it that have ended."""

    description: Plain
    task: _Task | None = None
    done: int = 0
    failed: list[str] = field(default_factory=list)  # its errors since its last success


class Window:
    """One campaign on the lanes of one transport. why_not: why a lane cannot take part."""

    def __init__(
        self,
        folder: Path,
        campaign: Campaign,
        transport: Transport,
        progress: Progress | None = None,
        why_not: Callable[[Plain], str | None] = lambda _: None,
    ) -> None:
        self.folder, self.campaign, self.transport = folder, campaign, transport
        self.run = read_run(folder)
        self.cells = {cell.cell: cell for cell in self.run.cells}
        self._progress = progress or (lambda _: None)
        self._why_not = why_not
        self._queue = deque(_Task(group) for group in open_groups(folder, campaign))
        self._lanes: dict[str, _Lane] = {}
        self._out: dict[str, str] = {}  # lane to why it gets no group
        self._total = len(self.run.cells) * self.run.protocol.processes
        opened = {cell for task in self._queue for cell in task.group.cells}
        self._done = (len(self.run.cells) - len(opened)) * self.run.protocol.processes
        self._groups_done = len(campaign.groups) - len(self._queue)
        self._begin = time.monotonic()
        self._estimated = self._measured = 0.0

    def carry_out(self) -> Run:
        """All groups, then the campaign's run.json. Raises Interrupted after the first interrupt, once
        the groups that run have ended, or at the second; CaptureError when no lane is left.
        """
        with locked(self.folder), deferred():
            try:
                self._feed_until_done()
            finally:
                # what the lanes have done is told even where they did not do all
                run = merge(self.folder, self.campaign)
            tidy(self.folder)
            return run

    def _feed_until_done(self) -> None:
        feeding, waited = True, time.monotonic()
        try:
            while self._queue or self._busy():
                try:
                    let_through()
                    self._look()
                    if feeding:
                        self._feed()
                    elif not self._busy():
                        raise Interrupted(self.folder)
                    done = self.transport.next_done(POLL_S)
                    if done is not None:
                        self._take(*done)
                    self._require_lanes(waited)
                except KeyboardInterrupt as stop:
                    # a signal that ends (TERM, HUP) waits for nothing, nor does a second interrupt
                    if not feeding or type(stop) is not KeyboardInterrupt:
                        raise Interrupted(self.folder) from stop
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
                done = self.transport.next_done(POLL_S)
                if done is not None and done[0] in self._lanes:
                    self._lanes[done[0]].task = None

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
            else:
                self._lanes[name] = _Lane(description)
        for name in [name for name in self._lanes if name not in here]:
            lane = self._lanes.pop(name)
            if lane.task is not None:
                self._failed(lane, lane.task, "its lane is gone")

    def _feed(self) -> None:
        for name, lane in self._lanes.items():
            if lane.task is None and (task := self._next(name)) is not None:
                lane.task, lane.done = task, 0
                spec = make_spec(self.folder, self.campaign, self.run, task.group)
                spec["attempt"] = len(task.errors) + 1
                self.transport.submit(lane.description, spec, self._step)

    def _next(self, lane: str) -> _Task | None:
        """The first group that did not fail on this lane, unless it failed on every other too."""
        for task in self._queue:
            if lane not in task.failed_on or self._lanes.keys() <= task.failed_on:
                self._queue.remove(task)
                return task
        return None

    def _take(self, name: str, told: Mapping[str, Any]) -> None:
        lane = self._lanes.get(name)
        if lane is None or lane.task is None or lane.task.group.group != told["group"]:
            return  # of a lane that was given up
        task, lane.task = lane.task, None
        if told["error"] is None and told.get("packed"):
            unpack(told["packed"], group_folder(self.folder, task.group.group))
        if told["error"] is None and group_folder(self.folder, task.group.group).is_dir():
            lane.failed.clear()
            self._estimated += task.group.seconds
            self._measured += float(told["seconds"])
            self._count(task)
            self._say(self._standing(name, float(told["seconds"])))
            return
        why = str(told["error"] or "it left no run folder")
        if told.get("lost"):
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
            task.errors.pop()
        if len(task.errors) < TRIES:
            self._say(f"{name}: group {task.group.group} failed, and is tried again: {why}")
            self._queue.append(task)
            return
        words = f"the group failed {TRIES} times; the last time: {task.errors[-1]}"
        self._say(f"group {task.group.group} is given up: {words}")
        spec = make_spec(self.folder, self.campaign, self.run, task.group)
        fail_group(self.folder, spec, words)
        self._count(task)

    def _require_lanes(self, waited: float) -> None:
        if self._lanes:
            return
        if self._out or time.monotonic() - waited > LANES_S:
            reasons = "; ".join(f"{name}: {why}" for name, why in self._out.items())
            raise CaptureError(
                f"no lane is left for {len(self._queue)} group(s){f' ({reasons})' if reasons else ''}; "
                f"what is done is kept, go on with: profharness capture --resume {self.folder}"
            )

    def _leave_out(self, name: str, why: str) -> None:
        self._out[name] = why
        self._say(f"warning: {name} gets no more groups: {why}")

    def _count(self, task: _Task) -> None:
        self._groups_done += 1
        self._done += len(task.group.cells) * self.run.protocol.processes

    def _standing(self, name: str, seconds: float) -> str:
        """How far it is, and how long the rest will take by the groups that are done."""
        text = f"{name}: {self._groups_done} of {len(self.campaign.groups)} groups, {seconds:.1f} s"
        rest = sum(task.group.seconds for task in self._queue)
        rest += sum(lane.task.group.seconds / 2 for lane in self._busy() if lane.task)
        if not rest:
            return text
        left = rest * self._measured / max(1e-9, self._estimated) / max(1, len(self._lanes))
        return f"{text}; about {duration(left)} left"

    def _step(self, name: str, row: Plain) -> None:
        """A step that a lane tells of."""
        lane, cell = self._lanes.get(name), self.cells.get(row["cell"])
        if lane is None or cell is None or lane.task is None:
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
        cell = next(iter(self.cells.values()))
        self._progress(Step(self._so_far(), self._total, cell, "", notice=text))


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `2.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
