"""Measures the peaks of this machine's device in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from profharness.errors import CaptureError
from profharness.peaks import PEAKS_FILE, Peaks

TIMEOUT_S = 180.0
TAIL_CHARS = 500


@dataclass(frozen=True)
class Measured:
    """Measured peaks, and when and in which environment; what `Store.add_peaks` keeps."""

    peaks: Peaks
    environment: dict[str, Any]
    created: str = field(default="")


def measure_peaks(device: str = "auto", timeout_s: float = TIMEOUT_S) -> Measured:
    """Measure copy bandwidth and matrix rates on `cuda`, `cpu` or what `auto` finds; some seconds.

    Raises CaptureError with the process's last words if it died or took longer than timeout_s.
    """
    with tempfile.TemporaryDirectory(prefix="profharness-") as name:
        folder = Path(name)
        argv = [sys.executable, "-P", "-m", "profharness.worker.peaks"]
        argv += [name, device, str(os.getpid())]
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout_s,
                check=False,
                env=_importable(),
            )
        except subprocess.TimeoutExpired:
            raise CaptureError(
                f"measuring the peaks of {device} took more than {timeout_s:g} s and was ended; "
                "--peaks data-sheet does without"
            ) from None
        path = folder / PEAKS_FILE
        if done.returncode != 0 or not path.exists():
            words = " / ".join(done.stderr.strip().splitlines()[-2:])[:TAIL_CHARS]
            raise CaptureError(
                f"measuring the peaks of {device} failed (exit code {done.returncode}): {words}; "
                "`profharness doctor` shows what is missing, --peaks data-sheet does without"
            )
        found = msgspec.json.decode(path.read_bytes(), type=Measured)
    return Measured(found.peaks, found.environment, datetime.now(UTC).isoformat(timespec="seconds"))


def _importable() -> dict[str, str]:
    """This process's environment with profharness importable, behind the user's own path."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{root}" if path else root}
