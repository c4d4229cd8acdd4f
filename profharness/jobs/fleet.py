"""Execute runs on the lanes of this host or of a cluster.

On this host, each visible GPU is a lane. If there is no GPU, each lane is a part of the cores. A
lane runs one child process at a time, and a thread waits for that process. A small run uses no
lanes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

from profharness import __version__
from profharness.device_types import CPU, CUDA, is_gpu
from profharness.environment import VisibleGpu, missing_packages, visible_gpus
from profharness.errors import CaptureError, MissingExtraError, UsageError, counted
from profharness.jobs.background_ingest import BackgroundIngest
from profharness.jobs.campaign import (
    Campaign,
    CampaignScheduler,
    OnStep,
    Transport,
    cut_groups,
    is_of_class,
    merge,
    open_groups,
    read_campaign,
    write_campaign,
)
from profharness.jobs.lane import SHARED_HOST, Plain, describe_lane, run_group
from profharness.processes import PrewarmedWorker, kill_group
from profharness.recording.capture import RunFolder, finished_message, write_folder
from profharness.recording.supervise import Progress
from profharness.run import Fleet, Run, class_word, read_record, read_run

SCHEDULERS = "local, local:2, tls://head:8786"
PRIVATE = ("uuid", "cpus", "address")  # keys of a lane's description that are not displayed
# Keys of a lane's description whose values must be equal on all lanes with the same GPU model.
ONE_ENVIRONMENT = ("torch", "driver")
# Keys of a lane's description that determine on which GPU and cores its groups run.
OWN = ("uuid", "gpu_key", "cpus")
CORES = 2  # minimum number of cores per GPU lane; if there are fewer, the lanes share all cores
SYSFS = Path("/sys")


def open_transport(fleet: Fleet, device: str) -> Transport | None:
    """Return the transport to the lanes of a scheduler, or None if the run needs no lanes.

    If the user names no scheduler and this host has several GPUs, these GPUs are the lanes. Raise
    UsageError for an unknown scheduler, MissingExtraError if a package is not installed, and
    CaptureError if no scheduler answers.
    """
    if fleet.scheduler is not None and "://" in fleet.scheduler:
        return _open_cluster(fleet)
    if fleet.scheduler is None:
        several = device != CPU and len(visible_gpus()) > 1
        if not several and not fleet.gpus:
            return None
    name = "local" if fleet.scheduler is None else fleet.scheduler
    local = re.fullmatch(r"local(?::([1-9]\d{0,3}))?", name)
    if local is None:
        raise UsageError(f"unknown --scheduler {fleet.scheduler!r}; use one of {SCHEDULERS}")
    lanes = local_lanes(int(local[1]) if local[1] else None, device)
    for gpu in fleet.gpus:
        if not any(is_of_class(lane, gpu) for lane in lanes):
            here = ", ".join(sorted({str(lane["gpu"] or "no GPU") for lane in lanes}))
            raise UsageError(
                f"{gpu}: no lane has this GPU; this host has {here}. --run-on, also spelled --gpu "
                "here, chooses the GPU that runs the configs; to predict their times on a GPU that "
                f"you do not have, use `profharness predict CONFIG --gpu {gpu}`"
            )
    return LocalLanes(lanes)


def require_lanes(fleet: Fleet, device: str) -> None:
    """Raise UsageError if this host lacks a GPU class of the fleet.

    The lanes of a remote scheduler are not checked, because that takes a connection.
    """
    if (
        fleet.gpus
        and "://" not in (fleet.scheduler or "")
        and (lanes := open_transport(fleet, device))
    ):
        lanes.close()


def lanes_device(fleet: Fleet, device: str) -> str:
    """Return the device on which lanes run cells.

    If `device` is `auto` and the lanes are on other hosts, return `cuda` if any lane has a GPU, and
    `cpu` otherwise. In all other cases, return `device` unchanged.
    """
    if device != "auto" or fleet.scheduler is None or fleet.scheduler.startswith("local"):
        return device
    with closing(_open_cluster(fleet)) as cluster:
        return CUDA if any(lane.get("gpu") for lane in cluster.lanes()) else CPU


def _open_cluster(fleet: Fleet) -> Transport:
    if missing_packages("cluster"):
        raise MissingExtraError(f"--scheduler {fleet.scheduler}", "cluster")
    # loaded only here, because this module imports distributed
    cluster = import_module("profharness.jobs.cluster")
    remote: Transport = cluster.Cluster(fleet.scheduler, insecure=fleet.insecure)
    return remote


def describe_lanes(fleet: Fleet) -> tuple[Plain, ...]:
    """Return the descriptions of a scheduler's lanes. Raise any error of `open_transport`."""
    transport = open_transport(fleet, "auto")
    if transport is None:
        return ()
    with closing(transport):
        lanes = transport.lanes()
    return tuple({key: lane[key] for key in lane if key not in PRIVATE} for lane in lanes)


def run_on_lanes(
    run: Run,
    backends: Sequence[str],
    out: Path,
    fleet: Fleet,
    progress: Progress | None,
    python: str | None = None,
    background: BackgroundIngest | None = None,
    prewarmed: PrewarmedWorker | None = None,
) -> list[RunFolder]:
    """Execute a planned run as one campaign per GPU class, and return the folders of the campaigns.

    If the run needs no lanes, do nothing and return an empty list. `background` parses the traces
    of each finished group. Raise the same errors as `capture`.
    """
    transport, run_id = open_transport(fleet, run.protocol.device), run.run
    if transport is None:
        return []
    with closing(transport):
        lanes = transport.lanes()
        folders = []
        for gpu in fleet.gpus or (None,):
            count = sum(is_of_class(lane, gpu) for lane in lanes)
            if len(fleet.gpus) > 1:
                run = replace(run, run=f"{run_id}-{class_word(str(gpu))}")
            groups = cut_groups(run, backends, count, gpu)
            if fleet.scheduler is None and not fleet.gpus and len(groups) < 2:
                return []
            folders.append(write_folder(out, run, backends))
            write_campaign(folders[-1], Campaign(tuple(backends), tuple(groups), gpu, python))
        if prewarmed is not None:  # lanes start their own workers
            prewarmed.end()
        return _carry_out(folders, transport, progress, run.protocol.device, background)


def resume_on_lanes(
    folder: Path,
    fleet: Fleet,
    progress: Progress | None,
    background: BackgroundIngest | None = None,
) -> RunFolder:
    """Resume a campaign, by default on the lanes of this host.

    `background` parses the traces of each finished group. Raise UsageError if the campaign is
    finished, and the same errors as `capture`.
    """
    run, campaign = read_run(folder), read_campaign(folder)
    if why := why_campaign_not_resumed(folder, run):
        raise UsageError(f"--resume: {why}")
    device = run.protocol.device
    left = open_groups(folder, campaign)
    if left and fleet.scheduler is None and is_gpu(device) and not visible_gpus():
        merge(folder)
        raise CaptureError(
            f"{folder}: {counted(len(left), 'group needs', 'groups need')} a GPU, but this host has none; "
            "resume on a host with a GPU; to ingest the finished groups, use: profharness ingest "
            f"{folder}"
        )
    fleet = replace(fleet, gpus=(campaign.gpu,) if campaign.gpu else ())
    transport = open_transport(fleet, device) or LocalLanes(local_lanes(None, device))
    with closing(transport):
        (resumed,) = _carry_out([folder], transport, progress, device, background)
    return resumed


def why_campaign_not_resumed(folder: Path, run: Run) -> str | None:
    """Return the reason why a campaign cannot be resumed, or None if it can be resumed.

    A campaign can be resumed if a group is unfinished, or if a client was killed before it merged
    the results.
    """
    merged = all(cell.status != "pending" for cell in read_record(folder).cells)
    if not merged or open_groups(folder, read_campaign(folder)):
        return None
    return finished_message(folder, run)


def _carry_out(
    folders: Sequence[Path],
    transport: Transport,
    progress: Progress | None,
    device: str,
    background: BackgroundIngest | None,
) -> list[RunFolder]:
    on_group = None
    if background is not None:
        background.lanes(transport.lanes())
        on_group = background.group
    scheduler = CampaignScheduler(folders, transport, progress, _lane_filter(device), on_group)
    return list(map(RunFolder, folders, scheduler.carry_out()))


def _lane_filter(device: str) -> Callable[[Plain], str | None]:
    """Return a function that returns the reason why a lane cannot be used, or None.

    A lane cannot be used if this host has another version of profharness, or if the lane has no GPU
    although `cuda` is requested. All lanes with the same GPU model must have the same versions of
    torch and of the driver, because a run has only one environment.
    """
    first: dict[str | None, Plain] = {}

    def why_not(lane: Plain) -> str | None:
        if lane["profharness"] != __version__:
            return (
                f"the lane has profharness {lane['profharness']}, but this host has {__version__}"
            )
        if is_gpu(device) and lane["gpu"] is None:
            return "no GPU is assigned to the lane"
        other = first.setdefault(lane["gpu"], lane)
        for key in ONE_ENVIRONMENT:
            if lane[key] != other[key]:
                return f"the lane has {key} {lane[key]}, but {other['lane']} has {other[key]}"
        return None

    return why_not


def local_lanes(count: int | None, device: str) -> list[Plain]:
    """Return the lanes of this host, named `gpu 0` or `cpu 0`.

    Each of the first `count` visible GPUs is a lane. If `count` is None, each visible GPU is a
    lane. If there is no GPU, or if the device is `cpu`, there are `count` lanes with an equal
    number of cores, or one lane if `count` is None. Raise UsageError if there are some GPUs but
    fewer than `count`.
    """
    gpus = visible_gpus() if device != CPU else ()
    if not gpus:
        number = count or 1
        cores = split_cores([sorted(os.sched_getaffinity(0))] * number, 1)
        described = describe_lane() | {"gpu": None, "gpu_key": None, "memory_bytes": None}
        return [
            {**described, "lane": f"cpu {index}", "cpus": cpus} for index, cpus in enumerate(cores)
        ]
    if count is not None and count > len(gpus):
        raise UsageError(
            f"--scheduler local:{count}: only {counted(len(gpus), 'GPU is', 'GPUs are')} visible on "
            "this host"
        )
    chosen = gpus[:count]
    return [
        {**describe_lane(gpu.uuid), "lane": f"gpu {index}", "uuid": gpu.uuid, "cpus": cpus}
        for index, (gpu, cpus) in enumerate(zip(chosen, gpu_cores(chosen), strict=True))
    ]


def gpu_cores(gpus: Sequence[VisibleGpu], sysfs: Path = SYSFS) -> list[list[int]]:
    """Return the cores of each GPU's lane.

    The cores are close to the GPU, and no other lane uses them. Return empty lists if a lane would
    have fewer than CORES cores.
    """
    allowed = os.sched_getaffinity(0)

    def core(cpu: int) -> tuple[int, int]:
        siblings = _read_cores(sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        return min(siblings, default=cpu), cpu

    near = []
    for gpu in gpus:
        local = _read_cores(sysfs / "bus/pci/devices" / gpu.bus / "local_cpulist")
        # hardware threads of the same core are adjacent, so that they are usually in the same lane
        near.append(sorted(local & allowed or allowed, key=core))
    return split_cores(near, CORES)


def _read_cores(path: Path) -> set[int]:
    with contextlib.suppress(OSError, ValueError):
        return parse_cores(path.read_text("ascii"))
    return set()


def parse_cores(text: str) -> set[int]:
    """Parse a set of cores in the format of the Linux kernel, such as `0-3,8`.

    Raise ValueError if the text has another format.
    """
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def split_cores(near: Sequence[Sequence[int]], least: int) -> list[list[int]]:
    """Return the cores of each lane. Lanes that are close to the same cores share them equally.

    `near` contains for each lane the cores that are close to its GPU. Return empty lists if a lane
    would have fewer than `least` cores.
    """
    parts = []
    for index, cores in enumerate(near):
        alike = [number for number, other in enumerate(near) if set(other) & set(cores)]
        size = len(cores) // len(alike)
        begin = alike.index(index) * size
        parts.append(list(cores[begin : begin + size]))
    # All lanes get the same number of cores. It determines torch's number of threads, which is part
    # of the environment of a run.
    size = min(map(len, parts), default=0)
    return [part[: size if size >= least else 0] for part in parts]


class LocalLanes:
    """The transport to the lanes of this host. A lane runs each group in a child process."""

    def __init__(self, lanes: Sequence[Plain]) -> None:
        shared = [lane for lane in lanes if not lane["cpus"]] if len(lanes) > 1 else []
        warning = {"warning": f"{SHARED_HOST.message}; {SHARED_HOST.remedy}"} if shared else {}
        self._lanes = {lane["lane"]: {**lane, **warning} for lane in lanes}
        self._done: queue.SimpleQueue[tuple[str, Plain]] = queue.SimpleQueue()
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._terminated: set[int] = set()  # pids of child processes that have received SIGTERM

    def lanes(self) -> list[Plain]:
        return list(self._lanes.values())

    def submit(self, lane: Plain, spec: Plain, on_step: OnStep) -> None:
        name = lane["lane"]
        own = {key: lane[key] for key in OWN if lane.get(key)}
        own["shares_cores"] = "warning" in lane

        def work() -> None:
            outcome = run_group(
                {**spec, **own}, partial(on_step, name), partial(self._children.__setitem__, name)
            )
            self._children.pop(name, None)
            self._done.put((name, outcome))

        # The thread is a daemon, so that this process can exit at once. The child process ends with
        # its thread.
        threading.Thread(target=work, daemon=True, name=name).start()

    def next_done(self, timeout_s: float) -> tuple[str, Plain] | None:
        with contextlib.suppress(queue.Empty):
            return self._done.get(timeout=timeout_s)
        return None

    def end(self, lane: Plain) -> None:
        child = self._children.get(lane["lane"])
        if child is not None:
            first = child.pid not in self._terminated
            self._terminated.add(child.pid)
            kill_group(child, signal.SIGTERM if first else signal.SIGKILL)

    def close(self) -> None:
        pass  # no connection is open
