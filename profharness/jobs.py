"""The main job as one function: capture into a run folder, then take the folder into the store."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from profharness.backends import ALL, CPU_BACKENDS, DEFAULT_BACKENDS, KERNELS, expand_backends
from profharness.cases import VerificationRow
from profharness.config import Config
from profharness.environment import gpu_present
from profharness.errors import ProfharnessError
from profharness.profilers import find_profilers, require_tools
from profharness.run import BenchPlan, Run, read_run
from profharness.runner import CaptureOptions, capture, resume
from profharness.runner.capture import VerifyOptions, interrupts_name, plan_cells, verify
from profharness.runner.supervise import Progress

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
    chosen = expand_backends(backends or (ALL,), default_backends(options.protocol.device))
    plan_cells(configs, chosen)  # what cannot be meant is told before anything is made
    require_tools(find_profilers(options.profilers))
    with _opened_meanwhile(store):
        folder = capture(configs, chosen, options, progress)
    return _take_in(folder, store)


def bench_into_store(
    configs: Sequence[Config],
    backends: Sequence[str],
    store: Path,
    options: CaptureOptions | None = None,
    progress: Progress | None = None,
) -> Captured:
    """Time the backends of each config in turns and ingest the run; `all` among the backends stands
    for the default ones of this machine's device. The kernel measurement brings traces with it.
    """
    options = options or CaptureOptions()
    plan = options.bench or BenchPlan()
    default = default_backends(options.protocol.device)
    named = expand_backends(backends or (ALL,), default)
    traced = "kernel" in plan.measurements and default == DEFAULT_BACKENDS
    chosen = replace(options, bench=plan, profilers=("torch",) if traced else ("events",))
    return capture_into_store(configs, named, store, chosen, progress)


def resume_into_store(folder: Path, store: Path, progress: Progress | None = None) -> Captured:
    """Finish an interrupted run and ingest it, in place of what the store had of it."""
    with _opened_meanwhile(store):
        resume(folder, progress)
    return _take_in(folder, store)


def default_backends(device: str = "auto") -> tuple[str, ...]:
    """auto flash efficient cudnn math where there is an NVIDIA GPU, else auto flash math."""
    wanted = device if device != "auto" else ("cuda" if gpu_present() else "cpu")
    return DEFAULT_BACKENDS if wanted == "cuda" else CPU_BACKENDS


@contextlib.contextmanager
def _opened_meanwhile(store: Path) -> Iterator[None]:
    """Makes the store while the worker starts: its schema and imports cost as long as a cell.

    Whatever is wrong with the store shows when the run is taken in, with the run folder complete.
    """

    def prepare() -> None:
        from profharness.store import ingest_path, open_store

        _ = ingest_path
        with contextlib.suppress(ProfharnessError):
            open_store(store, write=True).close()

    thread = threading.Thread(target=prepare, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _take_in(folder: Path, store: Path) -> Captured:
    """The run folder into the store; an interrupt names the folder, which is whole by now."""
    from profharness.store import ingest_path

    with interrupts_name(folder):
        return Captured(folder, read_run(folder), ingest_path(store, folder))


@dataclass(frozen=True)
class Verified:
    """What a verification left: the run folder, the run's id and its checks."""

    folder: Path
    run: str
    rows: tuple[VerificationRow, ...]


def every_backend(named: Sequence[str], default: Sequence[str]) -> list[str]:
    """The backends to verify: no name is `all,kernels`; the words are those of `expand_backends`."""
    return expand_backends(named or (ALL, KERNELS), default)


def verify_into_store(
    configs: Sequence[Config],
    backends: Sequence[str],
    store: Path,
    options: VerifyOptions | None = None,
    progress: Progress | None = None,
) -> Verified:
    """Verify and ingest. A wrong backend is a row, not an error. Raises UsageError for what cannot
    be meant, CaptureError if no worker starts.
    """
    from profharness.store import ingest_path, open_store

    folder = verify(configs, backends, options, progress)
    with interrupts_name(folder):
        (result,) = ingest_path(store, folder)
    with open_store(store) as opened:
        rows = tuple(opened.verifications(result.run))
    return Verified(folder, result.run, rows)
