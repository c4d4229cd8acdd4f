"""The program of a lane's child: runs one group of a campaign in a run folder of its own, and gives the
folder its name when it is whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from profharness.environment import visible_gpus
from profharness.errors import CaptureError, ProfharnessError, UnwritableError
from profharness.files import exclusive
from profharness.rows import HOSTED, SHARED_CORES
from profharness.run import GPU, RUN_FILE, Problem, Run, read_run, write_run
from profharness.runner.capture import LOCK_FILE, carry_on, write_folder
from profharness.runner.supervise import Step

PART = ".part"
QUIET_S = 0.2  # between two steps that are told, but for results
LEAVING_S = 10.0  # that the lane before may take to let go of a group
FAILED = ("crashed", "error", "timeout")
SHARED_HOST = Problem(
    GPU,
    "shared_host",
    SHARED_CORES,
    "run fewer lanes, as --scheduler local:1 does, or give each two cores of its own",
)


def main() -> None:
    """A spec on stdin, steps and how it went on stdout, a line each. root, group: the folder's place and
    name; part: where it stands meanwhile; run, backends, python: what is run; gpu_key, cpus: where;
    shares_cores: with other lanes.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    spec = json.load(sys.stdin)
    if spec.get("cpus"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, spec["cpus"])
    part, error, lost = Path(spec["part"]), None, None
    try:
        make_part(part, spec)
        _wait_for(part)
        _carry_on(part)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGTERM)
    except (UnwritableError, OSError) as failure:
        error = lost = str(failure)
    except ProfharnessError as failure:
        error = str(failure)
    if lost is None and (lost := _lost(spec.get("gpu_key"), part, error)):
        # what failed on it says nothing of the cells
        shutil.rmtree(part, ignore_errors=True)
        error = lost
    elif error is not None and results_in(part) < 1:
        lost = error  # no worker starts here: another group fares no better
    if error is None:
        try:
            finish(part, spec)
        except (ProfharnessError, OSError) as failure:
            error = lost = str(failure)
    print(json.dumps({"error": error, "lost": lost}), flush=True)


def _carry_on(part: Path) -> None:
    """Run what is left, a second time where no worker came up: whatever killed it may be over, and the
    lane would be given up for it. Raises as `carry_on` does.
    """
    try:
        carry_on(part, _Steps())
    except UnwritableError:
        raise
    except CaptureError:
        if results_in(part) != 0:
            raise
        carry_on(part, _Steps())


def finish(part: Path, spec: Mapping[str, Any]) -> None:
    """Give a group its name; its cells tell that other lanes used the same cores, where that was so."""
    if spec.get("shares_cores"):
        run = read_run(part)
        problems = dict.fromkeys((*run.problems, SHARED_HOST))
        cells = tuple(
            replace(cell, warnings=tuple(dict.fromkeys((*cell.warnings, SHARED_CORES))))
            if set(HOSTED) & cell.samples.keys()
            else cell
            for cell in run.cells
        )
        write_run(part, replace(run, cells=cells, problems=tuple(problems)))
    publish(part, Path(spec["root"]) / spec["group"])


def make_part(part: Path, spec: Mapping[str, Any]) -> None:
    """The folder in which a group is run; one that is there already is gone on with."""
    if (part / RUN_FILE).is_file():
        return
    shutil.rmtree(part, ignore_errors=True)  # its writer was killed before it was a run folder
    run = msgspec.convert(spec["run"], type=Run)
    write_folder(part.parent, run, spec["backends"], spec["python"], part.name)


def publish(part: Path, final: Path) -> bool:
    """Give a whole group its name. Where another lane was quicker, its results stay: False."""
    try:
        part.rename(final)
    except OSError:
        if not final.is_dir():
            raise
        shutil.rmtree(part, ignore_errors=True)
        return False
    return True


def results_in(part: Path) -> int:
    """How many cells of a group's part have a result; -1 where it is no run folder."""
    with contextlib.suppress(ProfharnessError, OSError):
        return sum(cell.status != "pending" for cell in read_run(part).cells)
    return -1


def _wait_for(part: Path) -> None:
    """A lane that was just killed may still end what it ran."""
    deadline = time.monotonic() + LEAVING_S
    while time.monotonic() < deadline:
        with exclusive(part / LOCK_FILE) as holder:
            if holder is None:
                return
        time.sleep(QUIET_S)


def _lost(gpu_key: str | None, part: Path, error: str | None) -> str | None:
    """Why the GPU of the lane can compute nothing more, if something went wrong."""
    if gpu_key is None:
        return None
    if error is None and not any(cell.status in FAILED for cell in read_run(part).cells):
        return None
    if any(gpu.key == gpu_key for gpu in visible_gpus()):
        return None
    return "its GPU does not answer any more"


class _Steps:
    """Prints the steps of a run, of those without a result one in QUIET_S."""

    def __init__(self) -> None:
        self._last = 0.0

    def __call__(self, step: Step) -> None:
        now = time.monotonic()
        ended = step.stage == step.cell.status != "pending"
        if not ended and step.notice is None and now - self._last < QUIET_S:
            return
        self._last = now
        row = {
            "cell": step.cell.cell,
            "status": step.cell.status,
            "stage": step.stage,
            "done": step.done,
            "notice": step.notice,
        }
        print(json.dumps(row), flush=True)
