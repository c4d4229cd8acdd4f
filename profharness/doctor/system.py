"""Python, torch, CUDA, SQLite and the store."""

from __future__ import annotations

import platform
import sqlite3
import sys
from pathlib import Path
from typing import Any

from profharness.doctor.model import Check

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
    from profharness.environment import driver

    version = driver().get("driver")
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
