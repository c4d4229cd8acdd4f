"""Run a group of cells on a lane, which is one GPU or some of the cores of a host.

The arguments and results of `run_group` are plain values, so any transport can call the function on
any host. The group runs in a child process that ends with the calling thread. The child process
calls `main`, which runs the group and publishes the finished folder. A lane that cannot access the
folder of the campaign sends the folder of the group as an archive.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

import msgspec

from profharness import __version__
from profharness.environment import VISIBLE, driver_version, hashed_key, visible_gpus
from profharness.errors import CaptureError, ProfharnessError, TraceFormatError, UnwritableError
from profharness.files import hold_lock_file, open_input
from profharness.processes import child_environment, kill_group, read_end, start_python
from profharness.recording.capture import LOCK_FILE, carry_on, write_folder
from profharness.recording.supervise import Step
from profharness.rows import HOSTED, NCU, SHARED_CORES
from profharness.run import GPU, RUN_FILE, Problem, Run, read_run, unwritable, write_run

CHILD = (
    "import sys; from profharness.processes import end_with_parent; "
    "end_with_parent(int(sys.argv[1])); from profharness.jobs.lane import main; main()"
)
LAST_WORDS = 500  # maximum number of characters of a dead child's output in a message
ENDED_S = 2.0
PART = ".part"  # suffix of the folder of an unfinished group
UNPACKING = ".unpacking"  # suffix of a folder while it is unpacked
QUIET_S = 0.2  # minimum time between two printed steps that are not results
LEAVING_S = 10.0  # maximum time to wait until a killed lane releases the folder of its group
FAILED = ("crashed", "error", "timeout")
SHARED_HOST = Problem(
    GPU,
    "shared_host",
    SHARED_CORES,
    "use fewer lanes (--scheduler local:1 uses one), or give each lane two cores",
)

Plain = dict[str, Any]
_children: set[subprocess.Popen[bytes]] = set()  # child processes that run groups


def describe_lane(uuid: str | None = None) -> Plain:
    """Return a description of the lane of this process, or of the lane of the GPU with a UUID.

    The `problems` key contains the reasons why the lane cannot run any group.
    """
    gpus = visible_gpus()
    gpu = next((each for each in gpus if uuid in (None, each.uuid)), None)
    problems = [] if gpu or uuid is None else [f"the GPU {uuid} does not respond"]
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
    """Return a hash that identifies this host until it reboots, without its name or address."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return hashed_key(f"{socket.gethostname()} {boot}")


def _own_part(spec: Mapping[str, Any]) -> Path:
    """Return the folder of a group that runs on this host and is not finished."""
    return Path(spec["root"]) / f"{spec['group']}.{host_key()}{PART}"


def run_group(
    spec: Mapping[str, Any],
    on_step: Callable[[Plain], None] = lambda _: None,
    on_start: Callable[[subprocess.Popen[bytes]], None] = lambda _: None,
) -> Plain:
    """Run a group that `make_spec` described, and return its outcome. Raise no exception.

    The outcome has the keys `group`, `folder`, `seconds`, `error` (None on success) and `lost` (the
    reason why the lane cannot run any more groups, or None). If the spec sets `pack`, the outcome
    also contains an archive of the folder and the hash of the archive. If the group failed, the
    archive contains the partial results.

    The spec may contain `uuid` (the UUID of the GPU to use), `gpu_key` (the key of this GPU) and
    `cpus` (the cores to use). `on_step` is called with each reported step of a cell, and `on_start`
    with the child process.
    """
    begin = time.monotonic()
    final = Path(spec["root"]) / spec["group"]
    outcome: Plain = {"error": None, "lost": None}
    try:
        if not final.is_dir():
            outcome |= _in_child(spec, on_step, on_start)
        if spec.get("pack"):
            left = final if final.is_dir() else _own_part(spec)
            if outcome["error"] is None or results_in(left) > 0:
                packed = pack(left)
                outcome |= {"packed": packed, "hash": archive_hash(packed)}
    except OSError as error:
        outcome["error"] = outcome["lost"] = str(error)
    except Exception as error:
        # report even a bug in this program to the caller
        outcome["error"] = f"{type(error).__name__}: {error}"
    return {
        "group": spec["group"],
        "folder": str(final),
        "seconds": round(time.monotonic() - begin, 3),
        **outcome,
    }


def _in_child(
    spec: Mapping[str, Any],
    on_step: Callable[[Plain], None],
    on_start: Callable[[subprocess.Popen[bytes]], None],
) -> Plain:
    root = Path(spec["root"])
    root.mkdir(parents=True, exist_ok=True)
    environment = child_environment()
    if spec.get("uuid"):
        environment[VISIBLE] = spec["uuid"]
    with contextlib.ExitStack() as cleanup:
        # each lane has its own TMPDIR, because ncu's lock file in TMPDIR blocks ncu on all GPUs
        if NCU in spec["run"]["profilers"]:
            own = tempfile.TemporaryDirectory(prefix="profharness-", ignore_cleanup_errors=True)
            environment["TMPDIR"] = cleanup.enter_context(own)
        # the log is not in the folder of the group, because the child may replace that folder
        log = root / f".{spec['group']}.{host_key()}.log"
        cleanup.callback(log.unlink, missing_ok=True)
        with log.open("wb") as errors:
            child = start_python(
                CHILD, str(os.getpid()), stderr=errors, env=environment, start_new_session=True
            )
        cleanup.callback(_end_child, child)
        _children.add(child)
        on_start(child)
        assert child.stdin is not None and child.stdout is not None
        outcome: Plain | None = None
        with contextlib.suppress(BrokenPipeError), child.stdin:
            child.stdin.write(json.dumps({**spec, "part": str(_own_part(spec))}).encode())
        for line in child.stdout:
            with contextlib.suppress(ValueError):  # a crash may cut off a line
                row = json.loads(line)
                if "error" in row:
                    outcome = row
                else:
                    on_step(row)
        code = child.wait()
        if outcome is None:
            name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            words = read_end(log).strip()[-LAST_WORDS:].splitlines()[-2:]
            tail = f"; its last output: {' / '.join(words)}" if words else ""
            outcome = {"error": f"the process of the group crashed: {name}{tail}", "lost": None}
        return outcome


def _end_child(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        kill_group(child, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(ENDED_S)
        kill_group(child)
    _children.discard(child)
    if child.stdout is not None:
        child.stdout.close()


def run_spec(text: str) -> Plain:
    """Run a group whose spec is a JSON text, and return its outcome.

    In the spec, `seen` is the path of the campaign file. If this host cannot access that file, the
    group runs below the `scratch` folder, and the outcome contains the folder as an archive.
    """
    spec = json.loads(text)
    if "seen" in spec and not Path(spec["seen"]).exists():
        spec |= {"root": spec["scratch"], "pack": True}
    return run_group(spec)


def end_groups(at_once: bool) -> None:
    """Terminate the child processes that run groups, or kill them if `at_once` is set.

    Return before the child processes have ended.
    """
    for child in tuple(_children):
        kill_group(child, signal.SIGKILL if at_once else signal.SIGTERM)


def main() -> None:
    """Read a spec from stdin, run its group, and print each step and the outcome as lines of JSON.

    In the spec, `root` and `group` are the parent and the name of the finished folder, and `part`
    is the folder of the unfinished group. `run`, `backends` and `python` describe the work.
    `gpu_key` identifies the GPU, and `cpus` are the cores to use. `shares_cores` is set if other
    lanes use the same cores.
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
        try:
            carry_on(part, _StepPrinter())
        except UnwritableError:
            raise
        except CaptureError:
            if results_in(part) != 0:
                raise
            carry_on(part, _StepPrinter())  # no cell has a result, so try once more
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGTERM)
    except (UnwritableError, OSError) as failure:
        error = lost = str(failure)
    except ProfharnessError as failure:
        error = str(failure)
    if lost is None and (lost := _lost_gpu(spec.get("gpu_key"), part, error)):
        # delete the results, because the failed GPU may have caused the errors of the cells
        shutil.rmtree(part, ignore_errors=True)
        error = lost
    elif error is not None and results_in(part) < 1:
        lost = error  # no cell has a result, so other groups would fail here too
    if error is None:
        try:
            finish(part, spec)
        except (ProfharnessError, OSError) as failure:
            error = lost = str(failure)
    print(json.dumps({"error": error, "lost": lost}), flush=True)


def finish(part: Path, spec: Mapping[str, Any]) -> None:
    """Publish a finished group. If lanes share cores, add a warning to cells with host times."""
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
    """Create the folder in which a group runs, unless there is a folder that can be resumed."""
    if (part / RUN_FILE).is_file():
        return
    # the process that created the folder was killed before it wrote run.json
    shutil.rmtree(part, ignore_errors=True)
    run = msgspec.convert(spec["run"], type=Run)
    write_folder(part.parent, run, spec["backends"], spec["python"], part.name)


def results_in(part: Path) -> int:
    """Return the number of cells that have a result, or -1 if the folder is not a run folder."""
    with contextlib.suppress(ProfharnessError, OSError):
        return sum(cell.status != "pending" for cell in read_run(part).cells)
    return -1


def _wait_for_predecessor(part: Path) -> None:
    """Wait until another process that ran this group has released the folder of the group.

    Such a process may still be ending after its lane was killed.
    """
    deadline = time.monotonic() + LEAVING_S
    while time.monotonic() < deadline:
        with hold_lock_file(part / LOCK_FILE) as holder:
            if holder is None:
                return
        time.sleep(QUIET_S)


def _lost_gpu(gpu_key: str | None, part: Path, error: str | None) -> str | None:
    """Return the reason why the GPU of the lane cannot be used any more, or None.

    The GPU is checked only if the group or one of its cells failed.
    """
    if gpu_key is None:
        return None
    if error is None and not any(cell.status in FAILED for cell in read_run(part).cells):
        return None
    if any(gpu.key == gpu_key for gpu in visible_gpus()):
        return None
    return "the lane's GPU no longer responds"


class _StepPrinter:
    """Prints all results and notices of a run, and at most one other step every QUIET_S seconds."""

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
            "message": None if step.cell.outcome == step.cell.status else step.cell.message,
        }
        print(json.dumps(row), flush=True)


def pack(folder: Path) -> bytes:
    """Return a tar archive of a folder, without hidden files, links, owners and times."""
    buffer = io.BytesIO()
    # the archive is not compressed, because traces are already compressed
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder)
            hidden = any(part.startswith(".") for part in name.parts)
            if not hidden and path.is_file() and not path.is_symlink():
                member = tarfile.TarInfo(name.as_posix())
                with open_input(path, within=folder) as file:
                    member.size = file.size
                    archive.addfile(member, cast("IO[bytes]", file))
    return buffer.getvalue()


def archive_hash(data: bytes) -> str:
    """Return a hash of an archive. The archives of equal folders are equal."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def unpack(data: bytes, folder: Path, expected: str) -> bool:
    """Create a folder from an archive of `pack`. Return False if the folder already exists.

    The folder is created either completely or not at all. Raise CaptureError if the hash of the
    archive is not `expected`, if the archive contains no run.json, or if it contains a link or a
    path outside of the folder. Raise UnwritableError if the folder cannot be written.
    """
    if folder.exists():
        return False
    if archive_hash(data) != expected:
        raise CaptureError(f"{folder.name}: the archive sent by the lane does not match its hash")
    part = folder.with_name(f".{folder.name}.{os.urandom(6).hex()}{UNPACKING}")
    try:
        part.mkdir(parents=True)
        _extract(data, part)
        read_run(part)
        return publish(part, folder)
    except (tarfile.TarError, TraceFormatError) as error:
        raise CaptureError(
            f"{folder}: the archive sent by the lane is not a run folder: {error}"
        ) from None
    except OSError as error:
        # the message contains the folder of the campaign, because the user can resume it
        raise unwritable(folder.parent.parent, f"{folder.name}: {error.strerror}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _extract(data: bytes, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for member in archive:
            name = PurePosixPath(member.name)
            path = folder.joinpath(*name.parts)
            plain = member.isreg() and not member.issparse() and "\0" not in member.name
            # `pack` adds no hidden names. This also excludes `..`, which begins with a dot.
            hidden = any(part.startswith(".") for part in name.parts)
            content = archive.extractfile(member) if plain else None
            if content is None or name.is_absolute() or hidden or not name.parts or path.exists():
                raise CaptureError(
                    f"the archive sent by the lane contains {member.name!r}, which is not allowed"
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            with content, path.open("xb") as file:
                shutil.copyfileobj(content, file)


def publish(part: Path, final: Path) -> bool:
    """Rename the folder of a finished group to its final name.

    Return False if another lane has already published the group.
    """
    try:
        part.rename(final)
    except OSError:
        if not final.is_dir():
            raise
        shutil.rmtree(part, ignore_errors=True)
        return False
    return True
