"""The main job as one function: capture into a run folder, then take the folder into the store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from profharness.backends import CPU_BACKENDS, DEFAULT_BACKENDS
from profharness.config import Config
from profharness.record import Run, read_run
from profharness.runner import CaptureOptions, capture, resume
from profharness.runner.capture import Progress

if TYPE_CHECKING:
    from profharness.store import IngestResult


@dataclass(frozen=True)
class Captured:
    """What a capture left: the run folder, its record, and what the store made of it."""

    folder: Path
    run: Run
    ingested: list[IngestResult]


def capture_into_store(
    configs: Sequence[Config],
    backends: Sequence[str],
    store: Path,
    options: CaptureOptions | None = None,
    progress: Progress | None = None,
) -> Captured:
    """Capture and ingest; no backends means the default ones of this machine's device."""
    options = options or CaptureOptions()
    chosen = backends or default_backends(options.protocol.device)
    return _take_in(capture(configs, chosen, options, progress), store)


def resume_into_store(folder: Path, store: Path, progress: Progress | None = None) -> Captured:
    """Finish an interrupted run and ingest it, in place of what the store had of it."""
    return _take_in(resume(folder, progress), store)


def default_backends(device: str = "auto") -> tuple[str, ...]:
    """auto flash efficient cudnn math where there is an NVIDIA GPU, else auto flash math."""
    wanted = device if device != "auto" else ("cuda" if _gpu_present() else "cpu")
    return DEFAULT_BACKENDS if wanted == "cuda" else CPU_BACKENDS


def _take_in(folder: Path, store: Path) -> Captured:
    from profharness.store import ingest_path

    return Captured(folder, read_run(folder), ingest_path(store, folder))


def _gpu_present() -> bool:
    """Asks NVML, not torch: the parent process never imports torch."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return False
    try:
        return int(pynvml.nvmlDeviceGetCount()) > 0
    finally:
        pynvml.nvmlShutdown()
