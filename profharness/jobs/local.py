"""Lanes of this host: one per visible GPU, or some cores each. A thread waits for each child."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from profharness.device_types import CPU
from profharness.environment import VisibleGpu, visible_gpus
from profharness.errors import UsageError
from profharness.jobs.lane import SHARED_HOST, describe_lane, run_group
from profharness.jobs.scheduler import OnStep
from profharness.processes import kill_group

OWN = ("uuid", "gpu_key", "cpus")  # keys of a lane that say where its groups run
CORES = 2  # minimum per GPU lane; with fewer, lanes share all cores
SYSFS = Path("/sys")

Plain = dict[str, Any]


def local_lanes(count: int | None, device: str) -> list[Plain]:
    """Return the lanes of this host, named `gpu 0` or `cpu 0`.

    There is one lane per visible GPU, limited to the first `count`. Without a GPU, or on device
    `cpu`, there are `count` lanes, or one. Raise UsageError if there are fewer GPUs than `count`.
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
        raise UsageError(f"--scheduler local:{count}: {len(gpus)} GPU(s) are visible here")
    chosen = gpus[:count]
    return [
        {**describe_lane(gpu.uuid), "lane": f"gpu {index}", "uuid": gpu.uuid, "cpus": cpus}
        for index, (gpu, cpus) in enumerate(zip(chosen, gpu_cores(chosen), strict=True))
    ]


def gpu_cores(gpus: Sequence[VisibleGpu], sysfs: Path = SYSFS) -> list[list[int]]:
    """Return the cores of each GPU's lane, close to the GPU and used by no other lane.

    The lists are empty if some lane would have fewer than CORES.
    """
    allowed = os.sched_getaffinity(0)
    near = []
    for gpu in gpus:
        cores = allowed
        with contextlib.suppress(OSError, ValueError):
            text = (sysfs / "bus/pci/devices" / gpu.bus / "local_cpulist").read_text("ascii")
            cores = (parse_cores(text) & allowed) or allowed
        near.append(_by_core(cores, sysfs))
    return split_cores(near, CORES)


def parse_cores(text: str) -> set[int]:
    """Parse a set of cores as the kernel writes it (`0-3,8`). Raise ValueError."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def _by_core(cpus: set[int], sysfs: Path) -> list[int]:
    """Sort CPUs so that threads of a physical core are neighbors and lanes do not share a core."""

    def place(cpu: int) -> tuple[int, int]:
        path = sysfs / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        try:
            return min(parse_cores(path.read_text("ascii")), default=cpu), cpu
        except (OSError, ValueError):
            return cpu, cpu

    return sorted(cpus, key=place)


def split_cores(near: Sequence[Sequence[int]], least: int) -> list[list[int]]:
    """Split the cores equally among the lanes that are close to the same ones.

    Return empty lists if some lane would have fewer than `least` cores.
    """
    parts = []
    for index, cores in enumerate(near):
        alike = [place for place, other in enumerate(near) if set(other) & set(cores)]
        size = len(cores) // len(alike)
        if size < least:
            return [[] for _ in near]
        begin = alike.index(index) * size
        parts.append(list(cores[begin : begin + size]))
    # equal sizes: torch's number of threads is part of a run's environment
    size = min(map(len, parts), default=0)
    return [part[:size] for part in parts]


class LocalLanes:
    """Transport to lanes of this host."""

    def __init__(self, lanes: Sequence[Plain]) -> None:
        shared = [lane for lane in lanes if not lane["cpus"]] if len(lanes) > 1 else []
        warning = {"warning": f"{SHARED_HOST.message}; {SHARED_HOST.remedy}"} if shared else {}
        self._lanes = {lane["lane"]: {**lane, **warning} for lane in lanes}
        self._done: queue.SimpleQueue[tuple[str, Plain]] = queue.SimpleQueue()
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._terminated: set[int] = set()  # pids of children that got SIGTERM

    def lanes(self) -> list[Plain]:
        """Return all lanes, in order."""
        return list(self._lanes.values())

    def submit(self, lane: Plain, spec: Plain, on_step: OnStep) -> None:
        """Run a group on a lane, in a thread."""
        name = lane["lane"]
        own = {key: lane[key] for key in OWN if lane.get(key)}
        own["shares_cores"] = "warning" in lane

        def work() -> None:
            outcome = run_group(
                {**spec, **own}, partial(on_step, name), partial(self._children.__setitem__, name)
            )
            self._children.pop(name, None)
            self._done.put((name, outcome))

        # daemon: this process can exit at once, and the child ends with its thread
        threading.Thread(target=work, daemon=True, name=name).start()

    def next_done(self, timeout_s: float) -> tuple[str, Plain] | None:
        """Return the next finished group and its lane, or None after the timeout."""
        with contextlib.suppress(queue.Empty):
            return self._done.get(timeout=timeout_s)
        return None

    def end(self, lane: Plain) -> None:
        """Terminate a lane's child process and everything it started; kill it the second time.

        The partial result is kept so that it can be resumed.
        """
        child = self._children.get(lane["lane"])
        if child is not None:
            first = child.pid not in self._terminated
            self._terminated.add(child.pid)
            kill_group(child, signal.SIGTERM if first else signal.SIGKILL)

    def close(self) -> None:
        """Do nothing: no connection is open."""
