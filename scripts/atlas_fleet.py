"""Measure an atlas on several GPUs of a host: one process per GPU measures its part of the plan
into the folder of its class.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path
from typing import Any

from profharness.errors import UsageError
from profharness.jobs.fleet import local_lanes

SCRIPT = Path(__file__).with_name("make_atlas.py")
PASSED_ON = ("seconds", "seed", "device", "workers", "batch", "cells", "longest")


def measure_on_lanes(options: argparse.Namespace) -> int:
    """Measure on each lane. Return the highest exit code of the processes."""
    kind, _, count = options.scheduler.partition(":")
    if kind != "local" or (count and not count.isdigit()) or count == "0":
        raise UsageError(
            f"--scheduler {options.scheduler}: only local and local:N are supported; on other hosts, run `measure` "
            "with --part K/N in separate jobs"
        )
    if options.part != (0, 1):
        raise UsageError("--scheduler sets --part for each GPU; omit one of these options")
    lanes = local_lanes(int(count) if count else None, options.device)
    classes = defaultdict(list)
    for lane in lanes:
        classes[class_name(lane)].append(lane)
    processes = [
        started(lane, options, options.folder / name, f"{place}/{len(alike)}")
        for name, alike in classes.items()
        for place, lane in enumerate(alike)
    ]
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for process, reader in processes:
            reader.join()
            process.wait()
    except KeyboardInterrupt:
        for process, _ in processes:
            process.send_signal(signal.SIGINT)
        for process, _ in processes:
            process.wait()
        raise
    return max(process.returncode for process, _ in processes)


def class_name(lane: dict[str, Any]) -> str:
    """Return the folder name of a lane: `nvidia-h200`, or `cpu`."""
    return re.sub(r"[^a-z0-9]+", "-", str(lane["gpu"] or "cpu").lower()).strip("-")


def started(
    lane: dict[str, Any], options: argparse.Namespace, folder: Path, part: str
) -> tuple[subprocess.Popen[str], threading.Thread]:
    """Start the process of a lane, and a thread that prints its output after the lane's name."""
    argv = [sys.executable, str(SCRIPT), "measure", str(folder), "--part", part]
    argv += ["--parent", str(os.getpid())]
    for name in PASSED_ON:
        argv += [f"--{name}", str(getattr(options, name))]
    visible = {"CUDA_VISIBLE_DEVICES": lane["uuid"]} if lane.get("uuid") else {}
    process = subprocess.Popen(
        argv,
        env=os.environ | visible,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C is passed on once, from here
    )
    reader = threading.Thread(target=repeat, args=(lane["lane"], process), daemon=True)
    reader.start()
    return process, reader


def repeat(name: str, process: subprocess.Popen[str]) -> None:
    """Print the lines of a lane as they arrive."""
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            print(f"{name}: {line}", end="", flush=True)
