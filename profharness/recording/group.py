"""The program of a lane's child process. It runs one group and publishes the finished folder."""

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
from profharness.files import hold_lock_file
from profharness.recording.capture import LOCK_FILE, carry_on, write_folder
from profharness.recording.supervise import Step
from profharness.rows import HOSTED, SHARED_CORES
from profharness.run import GPU, RUN_FILE, Problem, Run, read_run, write_run

PART = ".part"
QUIET_S = 0.2  # minimum time between two printed steps that are not results
LEAVING_S = 10.0  # wait for a killed predecessor to release the group's folder
FAILED = ("crashed", "error", "timeout")
SHARED_HOST = Problem(
    GPU,
    "shared_host",
    SHARED_CORES,
    "run fewer lanes, as --scheduler local:1 does, or give each two cores of its own",
)


def main() -> None:
    """Read a spec from stdin; print a JSON line for each step and one for the outcome.

    The spec has `root` and `group` (parent and name of the final folder), `part` (the folder until
    then), `run`, `backends` and `python` (what is run), `gpu_key` and `cpus` (where), and
    `shares_cores` (with other lanes).
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    spec = json.load(sys.stdin)
    if spec.get("cpus"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, spec["cpus"])
    part, error, lost = Path(spec["part"]), None, None
    try:
        make_part(part, spec)
        _wait_for_predecessor(part)
        _carry_on(part)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGTERM)
    except (UnwritableError, OSError) as failure:
        error = lost = str(failure)
    except ProfharnessError as failure:
        error = str(failure)
    if lost is None and (lost := _lost_gpu(spec.get("gpu_key"), part, error)):
        # results on a failed GPU say nothing about the cells
        shutil.rmtree(part, ignore_errors=True)
        error = lost
    elif error is not None and results_in(part) < 1:
        lost = error  # no worker starts here, so other groups would fail too
    if error is None:
        try:
            finish(part, spec)
        except (ProfharnessError, OSError) as failure:
            error = lost = str(failure)
    print(json.dumps({"error": error, "lost": lost}), flush=True)


def _carry_on(part: Path) -> None:
    """Run what is left. Retry once if no worker starts, before the lane is given up.

    Raise what `carry_on` raises.
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
    """Publish a group. If lanes shared cores, add a warning to cells with host times."""
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
    """Create the folder in which a group runs, unless it can be resumed."""
    if (part / RUN_FILE).is_file():
        return
    shutil.rmtree(part, ignore_errors=True)  # its writer was killed before run.json existed
    run = msgspec.convert(spec["run"], type=Run)
    write_folder(part.parent, run, spec["backends"], spec["python"], part.name)


def publish(part: Path, final: Path) -> bool:
    """Publish a finished group. Return False if another lane did it first."""
    try:
        part.rename(final)
    except OSError:
        if not final.is_dir():
            raise
        shutil.rmtree(part, ignore_errors=True)
        return False
    return True


def results_in(part: Path) -> int:
    """Return the number of cells with a result, or -1 if the folder is no run folder."""
    with contextlib.suppress(ProfharnessError, OSError):
        return sum(cell.status != "pending" for cell in read_run(part).cells)
    return -1


def _wait_for_predecessor(part: Path) -> None:
    """Wait while a lane that was just killed still ends what it ran."""
    deadline = time.monotonic() + LEAVING_S
    while time.monotonic() < deadline:
        with hold_lock_file(part / LOCK_FILE) as holder:
            if holder is None:
                return
        time.sleep(QUIET_S)


def _lost_gpu(gpu_key: str | None, part: Path, error: str | None) -> str | None:
    """Return why the lane's GPU is unusable, if a cell failed and the GPU does not answer."""
    if gpu_key is None:
        return None
    if error is None and not any(cell.status in FAILED for cell in read_run(part).cells):
        return None
    if any(gpu.key == gpu_key for gpu in visible_gpus()):
        return None
    return "its GPU does not answer any more"


class _Steps:
    """Prints the steps of a run: all results, and other steps at most every QUIET_S."""

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
