"""Checks of what is installed and works, each with a remedy; nothing is changed, no kernel is
launched.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from profharness.doctor.profilers import check_profilers, ncu_reader
from profharness.doctor.system import (
    DRIVER_PARAMETERS,
    Check,
    check_compilers,
    check_counters,
    check_cuda,
    check_dcgm,
    check_driver,
    check_injection,
    check_python,
    check_sandbox,
    check_sqlite,
    check_store,
    check_tmpdir,
    check_torch,
    may_administer,
    process_names,
    read,
)

__all__ = ["Check", "run_checks"]


def run_checks(store: Path, probe: Callable[[], dict[str, Any] | str]) -> list[Check]:
    """All checks in the order of the report; probe asks a worker for its environment."""
    environment = probe()
    driver = None if isinstance(environment, str) else environment.get("driver")
    if driver is None:
        found = check_driver()
        driver = found.detail if found.state == "ok" else None
    return [
        check_python(),
        check_torch(environment),
        *check_cuda(environment),
        *check_compilers(environment),
        *check_profilers(driver),
        ncu_reader(),
        check_counters(read(DRIVER_PARAMETERS), privileged=may_administer()),
        check_tmpdir(Path(os.environ.get("TMPDIR") or "/tmp")),
        *check_injection(os.environ.get("CUDA_INJECTION64_PATH")),
        *check_dcgm(process_names()),
        *check_sandbox(read(Path("/proc/version"))),
        check_sqlite(),
        check_store(store),
    ]
