"""What around the tools can make them fail: permissions, folders, other tools, a sandbox."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from profharness.doctor.model import Check

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
