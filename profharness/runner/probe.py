"""Questions to a short-lived worker: what the environment is, and which backends run here."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profharness.backends import BACKENDS, find_backend, implementation_names
from profharness.config import parse_config
from profharness.errors import CaptureError, UsageError
from profharness.record import Protocol, read_run
from profharness.runner.capture import CaptureOptions, capture
from profharness.runner.supervise import worker_environment

PROBE_CONFIG = "1,2,64,64"
PROBE_PROTOCOL = Protocol(iterations=1, warmup=0, samples=0, timeout_s=180)


@dataclass(frozen=True)
class BackendState:
    """Whether a backend ran the probe config here, and what it or PyTorch said if not.

    status is the cell's, code that of its first refusal, or None.
    """

    backend: str
    summary: str
    runs: bool
    reason: str | None
    device: str
    status: str = "ok"
    code: str | None = None


def probe_environment() -> dict[str, Any] | str:
    """The environment of a worker, or the text of why none starts."""
    with tempfile.TemporaryDirectory(prefix="profharness-") as folder:
        try:
            return worker_environment(Path(folder), PROBE_PROTOCOL)
        except CaptureError as error:
            return str(error)


def probe_backends() -> list[BackendState]:
    """Run one small config on every backend, on the implementations in `kernels/` and on those of
    entry points, each call real. Raises CaptureError if no worker starts.
    """
    found = dict(BACKENDS)
    ambiguous = {}
    for name in implementation_names():
        try:
            found.setdefault(name, find_backend(name))
        except UsageError as error:
            ambiguous[name] = str(error)
    with tempfile.TemporaryDirectory(prefix="profharness-") as folder:
        options = CaptureOptions(("events",), Path(folder), PROBE_PROTOCOL)
        run = read_run(capture([parse_config(PROBE_CONFIG)], list(found), options))
    device = str(run.environment.get("gpu") or run.environment.get("device_type"))
    states = [
        BackendState(
            cell.backend,
            found[cell.backend].summary,
            cell.status == "ok",
            cell.message,
            device,
            cell.status,
            cell.refusals[0].code if cell.refusals else None,
        )
        for cell in run.cells
    ]
    return states + [
        BackendState(name, "entry points", False, reason, device, "error")
        for name, reason in ambiguous.items()
    ]
