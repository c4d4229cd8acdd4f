"""Checks of what is installed and works, each with a remedy; nothing is changed, no kernel is
launched.
"""

from __future__ import annotations

import platform
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

COMMAND_TIMEOUT_S = 20.0
TORCH_MIN = (2, 5)
SQLITE_MIN = (3, 37, 0)  # STRICT tables

# Where the tools are when they are not on PATH; the last match of a pattern is the newest.
NSYS_PLACES = (
    "/opt/nvidia/nsight-systems/*/bin/nsys",
    "/opt/nvidia/nsight-systems-cli/*/bin/nsys",
    "/usr/local/cuda*/bin/nsys",
    "/opt/nvidia/nsight-compute/*/host/target-linux-x64/nsys",
)
NCU_PLACES = ("/opt/nvidia/nsight-compute/*/ncu", "/usr/local/cuda*/bin/ncu")
DRIVER_PARAMETERS = Path("/proc/driver/nvidia/params")


@dataclass(frozen=True)
class Check:
    """One finding. state: `ok`, `warning` (works, but less than it could), `missing`, or `absent`
    (optional, not there).
    """

    name: str
    state: str
    detail: str
    remedy: str = ""


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
    from profharness.environment import driver

    version = driver().get("driver")
    if version:
        return Check("driver", "ok", str(version))
    return Check("driver", "absent", "no NVIDIA driver answers")


def check_tool(name: str, places: tuple[str, ...], remedy: str) -> Check:
    """A profiler's executable on PATH, or where its installers put it."""
    found = shutil.which(name)
    where = "on PATH"
    if found is None:
        candidates = [
            str(path) for pattern in places for path in sorted(Path("/").glob(pattern.lstrip("/")))
        ]
        if not candidates:
            return Check(name, "absent", "not found", remedy)
        found, where = candidates[-1], f"not on PATH: {candidates[-1]}"
    return Check(name, "ok", f"{_tool_version(found)}, {where}")


def check_counters(text: str | None) -> Check:
    """Whether ordinary users may read hardware counters; text is the driver's parameter file, None
    if there is none.
    """
    if text is None:
        return Check("counters", "absent", "no NVIDIA kernel driver is loaded")
    if "RmProfilingAdminOnly: 0" in text:
        return Check("counters", "ok", "every user may read hardware counters")
    remedy = (
        "run ncu as root or with CAP_SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0 "
        "(ERR_NVGPUCTRPERM is the error that ncu gives otherwise)"
    )
    return Check("counters", "warning", "only an administrator may read hardware counters", remedy)


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


def check_packages() -> list[Check]:
    """Optional packages by extra."""
    extras = {"ncu-report": "ncu"}
    checks = []
    for package, extra in extras.items():
        try:
            checks.append(Check(package, "ok", metadata.version(package)))
        except metadata.PackageNotFoundError:
            checks.append(
                Check(package, "absent", "not installed", f'pip install "profharness[{extra}]"')
            )
    return checks


def run_checks(store: Path, probe: Callable[[], dict[str, Any] | str]) -> list[Check]:
    """All checks in the order of the report; probe asks a worker for its environment."""
    environment = probe()
    parameters = DRIVER_PARAMETERS.read_text() if DRIVER_PARAMETERS.exists() else None
    return [
        check_python(),
        check_torch(environment),
        *check_cuda(environment),
        check_tool(
            "nsys", NSYS_PLACES, "install Nsight Systems, or Nsight Compute, which carries an nsys"
        ),
        check_tool("ncu", NCU_PLACES, "install Nsight Compute"),
        check_counters(parameters),
        check_sqlite(),
        check_store(store),
        *check_packages(),
    ]


def _tool_version(path: str) -> str:
    try:
        done = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not answer --version ({type(error).__name__})"
    lines = [line for line in done.stdout.splitlines() if "ersion" in line]
    return lines[-1].strip() if lines else f"--version gave exit code {done.returncode}"
