"""Run a group of cells on a lane, which is one GPU or some of the cores of a host.

`run_group` takes and returns plain values, so that any transport can call it on any host. The group
runs in a child process that ends with the calling thread. `main` is the program of that process: it
runs the group and publishes the finished folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from profharness import __version__
from profharness.environment import VISIBLE, driver_version, hashed_key, visible_gpus
from profharness.errors import CaptureError, ProfharnessError, UnwritableError
from profharness.files import hold_lock_file
from profharness.jobs.run_archive import content_hash, pack, publish
from profharness.processes import child_environment, kill_group, read_end, start_python
from profharness.recording.capture import LOCK_FILE, carry_on, write_folder
from profharness.recording.supervise import Step
from profharness.rows import HOSTED, NCU, SHARED_CORES
from profharness.run import GPU, RUN_FILE, Problem, Run, read_run, write_run

CHILD = (
    "import sys; from profharness.processes import end_with_parent; "
    "end_with_parent(int(sys.argv[1])); from profharness.jobs.lane import main; main()"
)
LAST_WORDS = 500
ENDED_S = 2.0
PART = ".part"
QUIET_S = 0.2  # minimum time between two printed steps that are not results
LEAVING_S = 10.0  # maximum time to wait until a killed lane releases the folder of its group
FAILED = ("crashed", "error", "timeout")
SHARED_HOST = Problem(
    GPU,
    "shared_host",
    SHARED_CORES,
    "run fewer lanes, as --scheduler local:1 does, or give each two cores of its own",
)

Plain = dict[str, Any]
_children: set[subprocess.Popen[bytes]] = set()  # child processes that run groups


def describe_lane(uuid: str | None = None) -> Plain:
    """Describe the lane of this process, or the lane of the GPU with the given UUID.

    `problems` lists the reasons why the lane cannot run anything.
    """
    gpus = visible_gpus()
    gpu = next((each for each in gpus if uuid in (None, each.uuid)), None)
    problems = [] if gpu or uuid is None else [f"the GPU {uuid} does not answer"]
    torch = None
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        problems.append("torch is not installed")
    return {
        "gpu": gpu.name if gpu else None,
        "gpu_key": gpu.key if gpu else None,
        "memory_bytes": gpu.memory_bytes if gpu else None,
        "driver": driver_version(),
        "torch": torch,
        "python": platform.python_version(),
        "profharness": __version__,
        "host_key": host_key(),
        "problems": problems,
    }


def host_key() -> str:
    """Return a key of this host that changes when it boots, and that reveals no name or address."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return hashed_key(f"{socket.gethostname()} {boot}")


def own_part(final: Path) -> Path:
    """Return the folder in which the lanes of this host run a group until it is finished."""
    return final.with_name(f"{final.name}.{host_key()}{PART}")


def run_group(
    spec: Mapping[str, Any],
    on_step: Callable[[Plain], None] = lambda _: None,
    on_start: Callable[[subprocess.Popen[bytes]], None] = lambda _: None,
) -> Plain:
    """Run a group that `make_spec` described, and return its outcome. Never raise an exception.

    The outcome has the keys `group`, `folder`, `seconds`, `attempt`, `error` (None on success) and
    `lost` (the reason why the lane cannot run any more groups, or None). If the spec sets `pack`,
    the outcome also contains an archive of the folder and its hash. If the group failed, the archive
    contains the partial results.

    The spec may contain `uuid` (the GPU to run on), `gpu_key` (the key of this GPU) and `cpus` (the
    cores to use). `on_step` is called with the progress of the cells, and `on_start` with the child
    process.
    """
    begin = time.monotonic()
    final = Path(spec["root"]) / spec["group"]
    outcome: Plain = {"error": None, "lost": None}
    try:
        if not final.is_dir():
            outcome |= _in_child(spec, on_step, on_start)
        if spec.get("pack"):
            left = final if final.is_dir() else own_part(final)
            if outcome["error"] is None or results_in(left) > 0:
                outcome |= {"content_hash": content_hash(left), "packed": pack(left)}
    except OSError as error:
        outcome["error"] = outcome["lost"] = str(error)
    except Exception as error:
        # a bug in this program must still reach the caller
        outcome["error"] = f"{type(error).__name__}: {error}"
    return {
        "group": spec["group"],
        "folder": str(final),
        "attempt": spec.get("attempt", 1),
        "seconds": round(time.monotonic() - begin, 3),
        **outcome,
    }


def _in_child(
    spec: Mapping[str, Any],
    on_step: Callable[[Plain], None],
    on_start: Callable[[subprocess.Popen[bytes]], None],
) -> Plain:
    environment = child_environment()
    part = own_part(Path(spec["root"]) / spec["group"])
    if spec.get("uuid"):
        environment[VISIBLE] = spec["uuid"]
    # ncu's lock file in TMPDIR excludes other ncu processes, even on other GPUs
    own = tempfile.mkdtemp(prefix="profharness-") if NCU in spec["run"]["profilers"] else None
    if own:
        environment["TMPDIR"] = own
    root = Path(spec["root"])
    root.mkdir(parents=True, exist_ok=True)
    # the log is not in the folder of the group, because the child may replace that
    log = root / f".{spec['group']}.{host_key()}.log"
    with log.open("wb") as errors:
        child = start_python(
            CHILD, str(os.getpid()), stderr=errors, env=environment, start_new_session=True
        )
    _children.add(child)
    on_start(child)
    assert child.stdin is not None and child.stdout is not None
    outcome: Plain | None = None
    try:
        with contextlib.suppress(BrokenPipeError), child.stdin:
            child.stdin.write(json.dumps({**spec, "part": str(part)}).encode())
        for line in child.stdout:
            with contextlib.suppress(ValueError):  # a line cut short by a crash
                row = json.loads(line)
                if "error" in row:
                    outcome = row
                else:
                    on_step(row)
        child.wait()
    finally:
        if child.poll() is None:
            kill_group(child, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(ENDED_S)
            kill_group(child)
        _children.discard(child)
        child.stdout.close()
        words = read_end(log).strip()[-LAST_WORDS:]
        log.unlink(missing_ok=True)
        if own:
            shutil.rmtree(own, ignore_errors=True)
    if outcome is None:
        how = child.wait()
        name = signal.Signals(-how).name if how < 0 else f"exit code {how}"
        tail = f"; its last output: {' / '.join(words.splitlines()[-2:])}" if words else ""
        outcome = {"error": f"the process of the group died: {name}{tail}", "lost": None}
    return outcome


def run_spec(text: str) -> Plain:
    """Run a group whose spec is JSON text. The transport does not need to inspect a text.

    `seen` is the path of the campaign file. If this host cannot access that file, the group runs
    below the folder `scratch`, and the outcome contains the finished folder as an archive.
    """
    spec = json.loads(text)
    if "seen" in spec and not Path(spec["seen"]).exists():
        spec |= {"root": spec["scratch"], "pack": True}
    return run_group(spec)


def end_groups(at_once: bool) -> None:
    """Terminate the child processes that run groups, or kill them if `at_once` is set.

    Do not wait until they have ended.
    """
    for child in tuple(_children):
        kill_group(child, signal.SIGKILL if at_once else signal.SIGTERM)


def main() -> None:
    """Read a spec from stdin, run its group, and print each step and the outcome as lines of JSON.

    In the spec, `root` and `group` are the parent and the name of the finished folder, and `part` is
    the folder of the unfinished group. `run`, `backends` and `python` describe the work. `gpu_key`
    and `cpus` are the GPU and the cores to use, and `shares_cores` is set if other lanes use these
    cores too.
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
    """Run the unfinished cells. If no worker starts, try once more.

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
    """Publish a group. If lanes shared cores, add a warning to all cells that have host times."""
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
    # the process that created the folder was killed before it wrote run.json
    shutil.rmtree(part, ignore_errors=True)
    run = msgspec.convert(spec["run"], type=Run)
    write_folder(part.parent, run, spec["backends"], spec["python"], part.name)


def results_in(part: Path) -> int:
    """Return the number of cells that have a result, or -1 if the folder is no run folder."""
    with contextlib.suppress(ProfharnessError, OSError):
        return sum(cell.status != "pending" for cell in read_run(part).cells)
    return -1


def _wait_for_predecessor(part: Path) -> None:
    """Wait until a killed lane that ran this group has ended its processes."""
    deadline = time.monotonic() + LEAVING_S
    while time.monotonic() < deadline:
        with hold_lock_file(part / LOCK_FILE) as holder:
            if holder is None:
                return
        time.sleep(QUIET_S)


def _lost_gpu(gpu_key: str | None, part: Path, error: str | None) -> str | None:
    """Return why the lane's GPU is unusable, or None.

    The GPU is unusable if a cell or the group failed and the GPU does not answer any more.
    """
    if gpu_key is None:
        return None
    if error is None and not any(cell.status in FAILED for cell in read_run(part).cells):
        return None
    if any(gpu.key == gpu_key for gpu in visible_gpus()):
        return None
    return "its GPU does not answer any more"


class _Steps:
    """Prints the steps of a run: all results and notices, and other steps at most every QUIET_S."""

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
