"""Start CUDA while torch loads, and watch the worker's GPU during a run.

The watch reports other processes that use the GPU, and changes of the GPU's power and clock limits.
A run never fails because of the watch.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from profharness.environment import gpu_handle
from profharness.files import LOCKS, open_lock_file, try_lock
from profharness.processes import STARTED_BY
from profharness.run import GPU, Problem

MODULE_LOADING = "CUDA_MODULE_LOADING"
LOCK_TRIES = 50
LOCK_PAUSE_S = 0.002
PERIOD_S = 0.5
NO_SAMPLES = (0, 6)  # NVML reports SUCCESS or NOT_FOUND if no process has used the GPU
# NVML's bits of throttle reasons: hardware slowdown, software thermal slowdown, hardware thermal
# slowdown and power brake.
SLOWDOWN = 0x08 | 0x20 | 0x40 | 0x80
SHARED_REMEDY = "stop the other work on this GPU, then capture again"
CAPPED_REMEDY = "check `nvidia-smi -q -d POWER,CLOCK,PERFORMANCE`, then capture again"


def is_shared(descriptor: int | None) -> bool:
    """Return whether another process also holds the GPU's lock, whose file has this descriptor.

    Return False if there is no lock file. Afterwards this process holds a shared lock, as every
    measuring process does.
    """
    if descriptor is None:
        return False
    shared = not try_lock(descriptor, fcntl.LOCK_EX)
    for _ in range(LOCK_TRIES):
        if try_lock(descriptor, fcntl.LOCK_SH):
            break
        time.sleep(LOCK_PAUSE_S)  # another process is testing the lock at this moment
    return shared


class GpuWatch:
    """Detects other users of the GPU, and changes of the GPU's limits.

    Create the watch before this process has a CUDA context. All processes that have a context at
    that time are other users. This also works in a container, where the driver reports other
    process IDs than the container.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._before = {uuid: self._pids(handle) for uuid, handle in _devices(nvml)}
        self._last_look = 0.0
        self._reported: set[str] = set()

    def begin(self, uuid: str, parent: int, folder: Path = LOCKS) -> bool:
        """Begin to watch the GPU with this UUID, or the GPU of the MIG instance with this UUID.

        Call this once the process has a CUDA context. The parent process and its ancestors do not
        count as other users. Return False if NVML does not know the GPU.
        """
        try:
            devices = dict(_devices(self._nvml))
            whole = uuid if uuid in devices else _uuid(self._nvml, gpu_handle(self._nvml, uuid))
        except Exception:
            return False
        self._handle = devices[whole]
        # all measuring processes hold a shared lock, which the system releases when they exit
        self._lock = open_lock_file(folder / f"profharness-{uuid}.lock")
        now = self._pids(self._handle)
        # keep only processes that still run, because an earlier worker may just have died
        self._others = (self._before.get(whole, set()) & now) - {os.getpid()}
        self._mine = now - self._others
        self._family = set(_ancestry(parent))
        self._began = max((sample.timeStamp for sample in self._samples(0) or ()), default=0)
        self._caps = self._read_caps()
        return True

    def problems(self, *, at_once: bool = False) -> Iterator[Problem]:
        """Yield problems that were not reported before.

        Query the GPU at most every PERIOD_S seconds, unless `at_once` is set.
        """
        if not at_once and time.monotonic() - self._last_look < PERIOD_S:
            return
        self._last_look = time.monotonic()
        if is_shared(self._lock):
            yield from self._once(
                "gpu_shared", "another profharness process is measuring on this GPU"
            )
        others = (self._others | (self._pids(self._handle) - self._mine)) - self._family
        for pid in sorted(self._computing({pid for pid in others if not _is_ours(pid)})):
            text = f"another process (PID {pid} according to the driver) is computing on this GPU"
            yield from self._once("gpu_shared", text)
        for name, now in self._read_caps().items():
            was = self._caps.get(name, now)
            if now != was:
                text = f"{name} changed from {was} to {now} during the run"
                yield from self._once("gpu_capped", text)

    def _once(self, code: str, text: str) -> Iterator[Problem]:
        if text not in self._reported:
            self._reported.add(text)
            remedy = SHARED_REMEDY if code == "gpu_shared" else CAPPED_REMEDY
            yield Problem(GPU, code, f"{text}; the measured times may be wrong", remedy)

    def _pids(self, handle: Any) -> set[int]:
        """Return the IDs of the processes that have a CUDA context on a GPU.

        The set is empty if the driver does not report them.
        """
        try:
            running = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            return {int(process.pid) for process in running}
        except Exception:
            return set()

    def _computing(self, pids: set[int]) -> set[int]:
        """Return which of the processes have computed since the watch began.

        Idle processes are left out, because a context alone does not disturb a measurement. Return
        all `pids` if the driver does not report the activity of processes, as for a MIG instance,
        or reports it under other process IDs, as in some containers.
        """
        samples = self._samples(self._began) if pids else []
        if samples is None:
            return pids
        known = {sample.pid for sample in samples} & (pids | self._pids(self._handle))
        if not known:
            try:
                busy = samples or self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu
            except Exception:
                busy = True
            if busy:
                return pids
        return pids & {sample.pid for sample in samples if sample.smUtil}

    def _samples(self, since: int) -> list[Any] | None:
        """Return NVML's samples of GPU utilization per process, taken after the time stamp `since`.

        Return None if the driver does not report them.
        """
        try:
            return list(self._nvml.nvmlDeviceGetProcessUtilization(self._handle, since))
        except Exception as error:
            return [] if getattr(error, "value", None) in NO_SAMPLES else None

    def _read_caps(self) -> dict[str, str]:
        nvml, handle = self._nvml, self._handle
        sm, memory = nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM
        watts, clock = nvml.nvmlDeviceGetEnforcedPowerLimit, nvml.nvmlDeviceGetMaxClockInfo
        chosen = nvml.nvmlDeviceGetApplicationsClock
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons
        questions: dict[str, Callable[[], str]] = {
            "the GPU's power limit": lambda: f"{watts(handle) / 1000:g} W",
            "the GPU's highest SM clock": lambda: f"{clock(handle, sm)} MHz",
            "the GPU's highest memory clock": lambda: f"{clock(handle, memory)} MHz",
            "the GPU's application clock": lambda: f"{chosen(handle, sm)} MHz",
            "the GPU's throttling due to heat or power": lambda: (
                "on" if reasons(handle) & SLOWDOWN else "off"
            ),
        }
        caps = {}
        for name, question in questions.items():
            with contextlib.suppress(Exception):  # not supported by this GPU or driver
                caps[name] = question()
        return caps


def open_watch() -> GpuWatch | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        return GpuWatch(pynvml)
    except Exception:
        return None


def _devices(nvml: Any) -> Iterator[tuple[str, Any]]:
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        yield _uuid(nvml, handle), handle


def _uuid(nvml: Any, handle: Any) -> str:
    uuid = nvml.nvmlDeviceGetUUID(handle)
    return uuid.decode() if isinstance(uuid, bytes) else str(uuid)


def _ancestry(pid: int) -> Iterator[int]:
    while pid:
        yield pid
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        except OSError:
            return
        # skip the process name in parentheses, because the name may contain spaces
        pid = int(stat.rpartition(")")[2].split()[1])


def _is_ours(pid: int) -> bool:
    """Return whether a process belongs to this worker, such as a child process of a backend.

    Child processes inherit the worker's value of the environment variable STARTED_BY.
    """
    mine = os.environ.get(STARTED_BY)
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return mine is not None and os.fsencode(f"{STARTED_BY}={mine}") in variables


class CudaWarmup:
    """A thread that creates the GPU watch and then the CUDA context of device 0.

    The thread runs while torch loads. Torch later uses the same context.
    """

    def __init__(self) -> None:
        self._watch: GpuWatch | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def watch(self) -> GpuWatch | None:
        """Wait for the thread and return the watch, or None if NVML is not available."""
        self._thread.join()
        return self._watch

    def _run(self) -> None:
        # The watch must be created before this process has a context.
        self._watch = open_watch()
        if torch_has_cuda():
            open_context()


def torch_has_cuda() -> bool:
    """Return whether the installed torch is built for CUDA, without importing torch."""
    spec = find_spec("torch")
    folders = (spec and spec.submodule_search_locations) or ()
    return any((Path(folder) / "lib" / "libtorch_cuda.so").exists() for folder in folders)


def open_context() -> bool:
    """Create the CUDA context of device 0, which torch will use. Return whether that succeeded."""
    if MODULE_LOADING not in os.environ:
        # Torch sets this variable too, because drivers before CUDA 12.2 load modules eagerly by
        # default. Leave os.environ unchanged, because the run records it.
        os.putenv(MODULE_LOADING, "LAZY")
    device, context = ctypes.c_int(), ctypes.c_void_p()
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        return bool(
            cuda.cuInit(0) == 0
            and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
            and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
        )
    except (OSError, AttributeError):
        return False
