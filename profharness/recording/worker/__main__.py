"""Run one program of the worker: `python -m profharness.recording.worker [MODULE [ARGUMENT ...]] FOLDER`.

Without a module, run the cells of plan.json one after another. Without any argument, load torch,
then run the arguments that arrive on the socket at stdin.
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
    """A thread that receives the arguments which another worker gets on its command line.

    It starts CUDA for a plan that needs it while torch loads. Without a parent it ends the process.
    """

    arguments: Sequence[str] = ()
    warmup: CudaWarmup | None = None

    def run(self) -> None:
        with socket.socket(fileno=os.dup(0)) as line:
            # the descriptors after the log's stay open: a lock that lasts as long as this process
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
    gc.disable()  # loaded modules contain no garbage
    order = Order(daemon=True)
    order.start()
    try:
        import torch  # noqa: F401
    finally:
        order.join()  # the error is then written to the log of the run
    run_arguments(order.arguments, order.warmup)
