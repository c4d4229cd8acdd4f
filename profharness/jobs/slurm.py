"""Campaigns as array jobs of Slurm: the script that is sent, and what each of its tasks does.

There is no engine: tasks share the campaign's folder, and leases in it say who runs which group.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from profharness import __version__
from profharness.errors import CaptureError, UsageError
from profharness.files import atomic_file, check_output, read_input
from profharness.jobs.campaign import (
    Campaign,
    Group,
    fail_group,
    fullest_part,
    group_folder,
    make_spec,
    merge,
    open_groups,
    read_campaign,
    tidy,
)
from profharness.jobs.lane import Plain, end_groups, own_part, run_group
from profharness.jobs.lease import BEAT_S, LEASES, MISSED_BEATS, Leases, host_name
from profharness.jobs.local import OWN, local_lanes
from profharness.jobs.window import TRIES, is_of_class
from profharness.processes import let_through, run_briefly
from profharness.run import Run, class_word, read_run
from profharness.runner.group import results_in

PREFIX = "slurm:"
LANES = 50  # that a campaign is cut for
TASKS = 1000  # of an array, where Slurm is not told otherwise
LOOK_S = 1.0
SBATCH_S = 60.0
SCRIPT = """#!/bin/bash
# An array of lanes for {folder}, by profharness {version}.
# Each task runs groups until none is left. --partition, --account and --time belong here, or into
# SBATCH_PARTITION, SBATCH_ACCOUNT and SBATCH_TIMELIMIT.
#SBATCH --job-name=profharness
#SBATCH --array=0-{last}
#SBATCH --ntasks=1
#SBATCH --requeue
#SBATCH --output={folder}/slurm-%A_%a.log
{gpu}exec {command} --index "$SLURM_ARRAY_TASK_ID"
"""


def script_file(scheduler: str, gpu: str | None, classes: int, out: Path) -> Path:
    """The file of `slurm:FILE`; of several classes of GPU each has one, `sweep-h100.sbatch`. Raises
    UsageError where it is there already or cannot be, and for a folder of runs that Slurm does not take.
    """
    named = scheduler.removeprefix(PREFIX)
    if not named:
        raise UsageError("--scheduler slurm: names no file for the script, as slurm:sweep.sbatch")
    file = Path(named)
    if classes > 1:
        file = file.with_name(f"{file.stem}-{class_word(str(gpu))}{file.suffix}")
    if file.exists():
        raise UsageError(f"--scheduler slurm:{file}: already exists; name another, or delete it")
    check_output(file, force=False)
    if re.search(r"\s", str(out.absolute())):
        raise UsageError(f"{out.absolute()}: Slurm takes no blanks in paths; choose another --out")
    return file


def write_script(file: Path, folder: Path, campaign: Campaign) -> int:
    """The script that runs a campaign as an array; its tasks, one a group, TASKS at most. Raises
    UsageError.
    """
    kind = f"gpu:{class_word(campaign.gpu)}:1" if campaign.gpu else "gpu:1"
    place = folder.absolute()
    # whoever resumes the campaign beside the array knows by it
    (folder / LEASES).mkdir()
    tasks = min(TASKS, len(campaign.groups))
    text = SCRIPT.format(
        folder=place,
        version=__version__,
        last=tasks - 1,
        gpu="" if read_run(folder).protocol.device == "cpu" else f"#SBATCH --gres={kind}\n",
        command=shlex.join([sys.executable, "-P", "-m", "profharness", "lane", str(place)]),
    )
    with atomic_file(file, force=False) as output:
        output.write(text.encode())
    return tasks


def submit(file: Path) -> str:
    """Hand a script to Slurm; what it answers. Raises CaptureError."""
    done = run_briefly(["sbatch", str(file)], SBATCH_S)
    if done is None:
        raise CaptureError(
            f"sbatch does not start or answer; the script is written: send it with sbatch {file}"
        )
    if done.returncode:
        why = " ".join((done.stderr or done.stdout).split())
        raise CaptureError(f"sbatch refuses {file}: {why}; mend the script, and send it again")
    return done.stdout.strip()


class Task:
    """One lane in the folder of a campaign: the first visible GPU, or the cores it may use."""

    def __init__(
        self, folder: Path, index: int, say: Callable[[str], None], beat_s: float = BEAT_S
    ) -> None:
        self.folder, self._index, self._say, self._beat_s = folder, index, say, beat_s
        self._campaign = read_campaign(folder)
        self._run = read_run(folder)
        self._tries = folder / LEASES
        self._leases = Leases(self._tries, say, beat_s)
        self.done = 0  # groups that this lane has run

    def carry_out(self) -> Run | None:
        """Run groups until none is left that nobody works on, then tell the campaign's run.json; the run
        if all are done. Raises CaptureError for a lane of another class than the campaign's.
        """
        lane = self._lane()
        self._tries.mkdir(exist_ok=True)
        try:
            self._run_groups(lane)
        finally:
            run = merge(self.folder)
        if open_groups(self.folder, self._campaign):
            return None
        tidy(self.folder)
        return run

    def _run_groups(self, lane: Plain) -> None:
        patience = time.monotonic() + (MISSED_BEATS + 1) * self._beat_s
        while groups := open_groups(self.folder, self._campaign):
            if any(self._took(group, lane) for group in self._in_turn(groups)):
                patience = time.monotonic() + (MISSED_BEATS + 1) * self._beat_s
            elif time.monotonic() > patience:
                self._say(f"{len(groups)} group(s) are left, which other lanes work on")
                return
            else:
                let_through()
                time.sleep(min(LOOK_S, self._beat_s))

    def _lane(self) -> Plain:
        device = self._run.protocol.device
        (lane,) = local_lanes(1, device)
        if device == "cuda" and lane["gpu"] is None:
            lane["problems"] = ["no GPU is visible here"]
        if self._campaign.gpu is not None and not is_of_class(lane, self._campaign.gpu):
            lane["problems"] += [f"it has {lane['gpu'] or 'no GPU'}, not a {self._campaign.gpu}"]
        if lane["problems"]:
            raise CaptureError(
                f"{self.folder}: this lane can run no group: {'; '.join(lane['problems'])}"
            )
        return lane

    def _in_turn(self, groups: Sequence[Group]) -> list[Group]:
        """The groups that are left, from another one on for each lane, those that failed here last."""
        first = self._index % len(groups)
        turned = [*groups[first:], *groups[:first]]
        return sorted(turned, key=lambda group: len(self._errors(group)))

    def _took(self, group: Group, lane: Plain) -> bool:
        """Whether a group was free, and so was run here."""
        taken = threading.Event()

        def end_mine() -> None:
            taken.set()
            end_groups(True)

        lease = self._leases.take(group.group, end_mine)
        if lease is None:
            return False
        try:
            # another lane may have ended it a moment ago
            if group in open_groups(self.folder, self._campaign):
                self._work(group, lane, taken)
        finally:
            lease.end()
        return True

    def _work(self, group: Group, lane: Plain, taken: threading.Event) -> None:
        """Run a group. taken: set where another lane has taken its lease over, which is no failure."""
        final = group_folder(self.folder, group.group)
        own = {key: lane[key] for key in OWN if lane.get(key)}
        spec = {**make_spec(self.folder, self._campaign, self._run, group), **own}
        # of a lane of another host that is gone
        part = fullest_part(final)
        results = results_in(part) if part is not None else 0
        if part is not None and not own_part(final).exists():
            part.rename(own_part(final))
        self._note_death(group, results)
        errors = self._errors(group)
        if len(errors) >= TRIES:
            self._give_up(spec, errors)
            return
        begun = self._begun_file(group)
        begun.write_text(f"{results} {host_name().split()[0]} {os.getpid()}", encoding="utf-8")
        outcome = run_group({**spec, "attempt": len(errors) + 1})
        if not taken.is_set():
            begun.unlink(missing_ok=True)
        if outcome["error"] is None:
            self.done += 1
            self._say(f"group {group.group}: {outcome['seconds']:.1f} s")
            return
        if taken.is_set():
            self._say(f"group {group.group} was taken over by another lane")
            return
        if outcome["lost"]:
            raise CaptureError(f"{self.folder}: this lane can run no group: {outcome['error']}")
        self._note_error(group, str(outcome["error"]))
        if len(errors) + 1 >= TRIES:
            self._give_up(spec, self._errors(group))

    def _note_death(self, group: Group, results: int) -> None:
        """Count a try whose lane ended in the middle, with what it ran, as where memory is short; not
        one that had a result: lanes end for other reasons too.
        """
        with contextlib.suppress(FileNotFoundError, ValueError):
            before, host, pid = read_input(self._begun_file(group)).decode().split()
            self._begun_file(group).unlink()
            if results <= int(before):
                self._note_error(group, f"process {pid} of host {host} ended in the middle of it")

    def _note_error(self, group: Group, error: str) -> None:
        self._say(f"group {group.group} failed: {error}")
        with self._errors_file(group).open("a", encoding="utf-8") as file:
            file.write(" ".join(error.split()) + "\n")

    def _give_up(self, spec: Plain, errors: Sequence[str]) -> None:
        words = f"the group failed {TRIES} times; the last time: {errors[-1]}"
        fail_group(self.folder, spec, words)

    def _errors(self, group: Group) -> list[str]:
        """What the tries of a group by any lane ended with, a line each."""
        try:
            return read_input(self._errors_file(group)).decode(errors="replace").splitlines()
        except FileNotFoundError:
            return []

    def _errors_file(self, group: Group) -> Path:
        return self._tries / f"{group.group}.errors"

    def _begun_file(self, group: Group) -> Path:
        """There while a group is run: how many results it had before, and who runs it."""
        return self._tries / f"{group.group}.begun"
