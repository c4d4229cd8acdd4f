"""Python, torch, CUDA, SQLite and the store."""

from __future__ import annotations

import os
import platform
import re
import sqlite3
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Check:
    """One finding. state: `ok`, `warning` (works, but less than it could), `missing`, or `absent`
    (optional, not there).
    """

    name: str
    state: str
    detail: str
    remedy: str = ""


DRIVER_PARAMETERS = Path("/proc/driver/nvidia/params")
LOCK_FILE = "nsight-compute-lock"
CAP_SYS_ADMIN = 21
DCGM_PROCESSES = ("nv-hostengine", "dcgmi", "dcgm-exporter")
# gVisor answers with a version that is written into it: the first for years, later one that names it.
GVISOR = r"gvisor|^Linux version 4\.4\.0 .*Sun Jan 10 15:06:54 PST 2016"


def read(path: Path) -> str | None:
    """A small text file, None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def may_administer(status: Path = Path("/proc/self/status")) -> bool:
    """Whether this process has CAP_SYS_ADMIN; root in a container often has not."""
    match = re.search(r"^CapEff:\s*([0-9a-f]+)", read(status) or "", re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> CAP_SYS_ADMIN & 1)


def check_counters(text: str | None, *, privileged: bool = False) -> Check:
    """Whether this user may read hardware counters. text is the driver's parameter file, None if
    there is none; privileged: has CAP_SYS_ADMIN.
    """
    if text is None:
        return Check("counters", "absent", "no NVIDIA kernel driver is loaded")
    if "RmProfilingAdminOnly: 0" in text:
        return Check("counters", "ok", "every user may read hardware counters")
    if privileged:
        return Check("counters", "ok", "only an administrator may read hardware counters: you may")
    remedy = (
        "run ncu as root or with CAP_SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0 "
        "(ERR_NVGPUCTRPERM is the error that ncu gives otherwise)"
    )
    return Check("counters", "warning", "only an administrator may read hardware counters", remedy)


def check_tmpdir(folder: Path) -> Check:
    """Whether nsys and ncu can work in TMPDIR: raw files and ncu's lock file go there."""
    if not folder.is_dir() or not _may(folder, os.W_OK | os.X_OK):
        remedy = "set TMPDIR to a folder that exists and is writable"
        return Check("TMPDIR", "warning", f"{folder}: not a folder that can be written to", remedy)
    lock = folder / LOCK_FILE
    if lock.exists() and not _may(lock, os.W_OK):
        remedy = "set TMPDIR to a folder of your own when you call ncu by hand; captures do so"
        return Check("TMPDIR", "warning", f"{lock} belongs to another user", remedy)
    return Check("TMPDIR", "ok", str(folder))


def _may(path: Path, mode: int) -> bool:
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def check_injection(path: str | None) -> list[Check]:
    """Another tool that is injected into every CUDA program; path: CUDA_INJECTION64_PATH."""
    if not path:
        return []
    remedy = "unset it: nsys and ncu cannot work beside another injected tool"
    return [Check("CUDA injection", "warning", f"CUDA_INJECTION64_PATH is {path}", remedy)]


def process_names(proc: Path = Path("/proc")) -> list[str]:
    """The names of all processes that can be seen."""
    names = (read(path) for path in proc.glob("[0-9]*/comm"))
    return [name.strip() for name in names if name]


def check_dcgm(names: Iterable[str]) -> list[Check]:
    """DCGM, which can hold the hardware counters; names: of the processes that run."""
    running = sorted(set(names) & set(DCGM_PROCESSES))
    if not running:
        return []
    remedy = "if ncu finds the counters busy: `dcgmi profile --pause`, and `--resume` afterwards"
    return [
        Check("DCGM", "warning", f"{', '.join(running)} runs and may hold the counters", remedy)
    ]


def check_sandbox(version: str | None) -> list[Check]:
    """gVisor, under which neither nsys nor ncu works; version: the text of /proc/version."""
    if not version or not re.search(GVISOR, version, re.IGNORECASE):
        return []
    remedy = (
        "nsys and ncu need a virtual machine or bare metal; `--profiler torch` works without them"
    )
    return [Check("sandbox", "warning", "this is a gVisor container", remedy)]


TORCH_MIN = (2, 5)
KERNELS_REMEDY = "pip install 'profharness[kernels]'"
SQLITE_MIN = (3, 37, 0)  # STRICT tables


def check_python() -> Check:
    """The interpreter that the worker will run in too."""
    return Check("Python", "ok", f"{platform.python_version()} ({sys.implementation.name})")


def check_torch(environment: dict[str, Any] | str) -> Check:
    """torch as a worker sees it; environment is a worker's answer, or the text of its failure."""
    if isinstance(environment, str):
        remedy = (
            "install a torch for this machine: https://pytorch.org/get-started/locally (>= 2.5)"
        )
        return Check("torch", "missing", environment, remedy)
    version = str(environment["torch"])
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < TORCH_MIN:
        return Check("torch", "missing", version, "profharness needs torch >= 2.5")
    return Check("torch", "ok", version)


def check_cuda(environment: dict[str, Any] | str) -> list[Check]:
    """CUDA, cuDNN as loaded, GPU and driver; on a CPU-only machine one line that says so."""
    if isinstance(environment, str):
        return []
    if environment.get("device_type") != "cuda":
        driver = check_driver()
        if driver.state == "ok":
            remedy = "install a CUDA build of torch, or see why torch.cuda.is_available() is False"
            return [
                driver,
                Check("CUDA", "warning", "an NVIDIA driver is here but torch uses the CPU", remedy),
            ]
        return [
            Check(
                "CUDA",
                "absent",
                "no NVIDIA GPU: captures run on the CPU, where ATen ops stand for kernels",
            )
        ]
    gpu = f"{environment['gpu']}, sm {environment['capability']}, {environment['num_sms']} SMs"
    return [
        Check("CUDA", "ok", f"{environment['torch_cuda']} (as torch was built)"),
        Check("GPU", "ok", gpu),
        Check("driver", "ok", str(environment.get("driver", "unknown"))),
        Check("cuDNN", "ok", f"{environment['cudnn']} (as loaded)")
        if environment.get("cudnn")
        else Check(
            "cuDNN",
            "warning",
            "not loaded",
            "the cudnn backend needs it; reinstall torch with its CUDA packages",
        ),
    ]


def check_driver() -> Check:
    """The NVIDIA driver through NVML."""
    from profharness.environment import driver_version

    version = driver_version()
    if version:
        return Check("driver", "ok", str(version))
    return Check("driver", "absent", "no NVIDIA driver answers")


def check_compilers(environment: dict[str, Any] | str) -> list[Check]:
    """What implementations in kernels/ are compiled by: Triton as a worker sees it, and NVRTC."""
    triton = None if isinstance(environment, str) else environment.get("triton")
    return [
        Check("Triton", "ok", str(triton))
        if triton
        else Check("Triton", "absent", "not installed", KERNELS_REMEDY),
        check_nvrtc(),
    ]


def check_nvrtc() -> Check:
    """NVRTC, which compiles CUDA sources; that a driver can run them is not asked."""
    from profharness.backends.base import RefusedError
    from profharness.backends.cuda_source import nvrtc_version

    try:
        return Check("NVRTC", "ok", nvrtc_version())
    except RefusedError as error:
        return Check("NVRTC", "absent", str(error))


def check_sqlite() -> Check:
    """SQLite as Python was built with it."""
    if sqlite3.sqlite_version_info < SQLITE_MIN:
        return Check(
            "SQLite",
            "missing",
            sqlite3.sqlite_version,
            "STRICT tables need SQLite >= 3.37; use a newer Python",
        )
    return Check("SQLite", "ok", sqlite3.sqlite_version)


def check_store(path: Path) -> Check:
    """Whether the store can be made or opened; it is not created."""
    from profharness.errors import NotFoundError, ProfharnessError
    from profharness.store import open_store

    try:
        with open_store(path) as store:
            return Check("store", "ok", f"{path}: {len(store.runs())} runs")
    except NotFoundError:
        return Check("store", "ok", f"{path}: not there yet; capture or ingest makes it")
    except ProfharnessError as error:
        return Check("store", "missing", str(error), "name another file with --store")
