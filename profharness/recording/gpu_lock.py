"""A host-wide lock per GPU: at most one measuring process uses it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from profharness.device_types import CPU
from profharness.environment import VisibleGpu, visible_gpus
from profharness.files import LOCKS, open_lock_file, try_lock
from profharness.processes import STEP_S, raise_deferred_signals


@contextlib.contextmanager
def gpu_locked(
    device: str, notify: Callable[[str], None], folder: Path = LOCKS
) -> Iterator[tuple[int, ...]]:
    """Hold the lock of the GPU that a worker on this device would use.

    Wait while another process holds it; `notify` gets a sentence about that. Hold nothing on a CPU,
    or if the lock file cannot be created. Yield the descriptors that children must inherit: the
    lock lasts as long as any of them.
    """
    gpu = next(iter(visible_gpus()), None) if device != CPU else None
    descriptor = open_lock_file(lock_file(gpu, folder)) if gpu else None
    if gpu is None or descriptor is None:
        yield ()
        return
    try:
        if not try_lock(descriptor, fcntl.LOCK_EX):
            notify(
                f"another profharness measures on {gpu.name} ({gpu.key}): waiting for its end; "
                "CUDA_VISIBLE_DEVICES chooses another GPU"
            )
            while not try_lock(descriptor, fcntl.LOCK_EX):
                raise_deferred_signals()
                time.sleep(STEP_S)
        yield (descriptor,)
    finally:
        os.close(descriptor)


def lock_file(gpu: VisibleGpu, folder: Path = LOCKS) -> Path:
    return folder / f"profharness-{gpu.key}.gpu"
