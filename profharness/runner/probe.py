"""Questions to a short-lived worker: what the environment is, and which backends run here."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profharness.backends import BACKENDS
from profharness.config import parse_config
from profharness.errors import CaptureError
from profharness.record import Protocol, read_run
from profharness.runner.capture import CaptureOptions, capture
from profharness.runner.supervise import worker_environment

PROBE_CONFIG = "1,2,64,64"
PROBE_PROTOCOL = Protocol(iterations=1, warmup=0, samples=0, timeout_s=60)


@dataclass(frozen=True)
class BackendState:
    """Whether a backend ran the probe config here, and what it or PyTorch said if not."""

    backend: str
    summary: str
    runs: bool
    reason: str | None
    device: str


def probe_environment() -> dict[str, Any] | str:
    """The environment of a worker, or the text of why none starts."""
    with tempfile.TemporaryDirectory(prefix="profharness-") as folder:
        try:
            return worker_environment(Path(folder), PROBE_PROTOCOL)
        except CaptureError as error:
            return str(error)


def probe_backends() -> list[BackendState]:
    """Run one small config on every backend, each call real. Raises CaptureError if no worker
    starts.
    """
    with tempfile.TemporaryDirectory(prefix="profharness-") as folder:
        options = CaptureOptions(("events",), Path(folder), PROBE_PROTOCOL)
        run = read_run(capture([parse_config(PROBE_CONFIG)], list(BACKENDS), options))
    device = str(run.environment.get("gpu") or run.environment.get("device_type"))
    return [
        BackendState(
            cell.backend, BACKENDS[cell.backend].summary, cell.status == "ok", cell.message, device
        )
        for cell in run.cells
    ]
