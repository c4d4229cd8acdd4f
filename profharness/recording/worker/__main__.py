"""Run a worker: `python -m profharness.recording.worker [MODULE [ARGUMENT ...]] FOLDER`

MODULE is a module with a `body` function. The default is `cell`, which measures the cells of
plan.json. Without any argument, the process loads torch while a thread waits for the arguments on
stdin, which is then a socket.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from profharness.recording.worker.gpu_watch import CudaWarmup
from profharness.recording.worker.program import run_arguments, starts_cuda
from profharness.run import PLAN_FILE, Plan

MOST_BYTES = 1 << 16
MOST_DESCRIPTORS = 8


class Order(threading.Thread):
    """A thread that receives the worker's arguments on a socket while the main thread loads torch.

    If the plan needs CUDA, the thread also starts CUDA. If the parent process closes the socket
    without sending arguments, the thread ends the process.
    """

    arguments: Sequence[str] = ()
    warmup: CudaWarmup | None = None

    def run(self) -> None:
        with socket.socket(fileno=os.dup(0)) as line:
            # The first descriptor is the log. The others stay open because they hold locks until
            # this process exits.
            text, descriptors, *_ = socket.recv_fds(line, MOST_BYTES, MOST_DESCRIPTORS)
        if not text:
            os._exit(0)
        for number in (1, 2):
            os.dup2(descriptors[0], number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        self.arguments = text.decode().split("\0")
        plan = Path(self.arguments[-1], PLAN_FILE).read_bytes()
        if starts_cuda(msgspec.json.decode(plan, type=Plan)):
            self.warmup = CudaWarmup()


if __name__ == "__main__":
    if sys.argv[1:]:
        run_arguments(sys.argv[1:])
    gc.disable()  # while modules are imported, collections would find no garbage
    order = Order(daemon=True)
    order.start()
    try:
        import torch  # noqa: F401
    finally:
        order.join()  # from here on, stderr is the log of the run, so the log contains import errors
    run_arguments(order.arguments, order.warmup)
