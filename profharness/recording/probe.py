"""Short-lived workers that report the environment, usable backends, peaks, and PyTorch's choices."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from profharness.attention.backends import BACKENDS, find_backend
from profharness.attention.backends.sources import implementation_names
from profharness.attention.config import AUTO, Config, parse_config
from profharness.attention.dispatch.advice import ANSWERS_FILE, LiveAnswer
from profharness.devices import PEAKS_FILE, Peaks
from profharness.errors import CaptureError, UsageError
from profharness.files import decode_json, read_json, read_lines
from profharness.processes import child_environment, run_briefly
from profharness.recording.capture import capture
from profharness.recording.supervise import run_cells, worker_argv, worker_environment
from profharness.run import (
    NOT_A_RECORD,
    PLAN_FILE,
    CaptureOptions,
    Cell,
    JournalEntry,
    Plan,
    Protocol,
    read_run,
)

PROBE_CONFIG = "1,2,64,64"
IMPORT_TIMEOUT_S = 60.0
PROBE_PROTOCOL = Protocol(iterations=1, warmup=0, samples=0, timeout_s=180)


@dataclass(frozen=True)
class BackendState:
    """Whether a backend ran the probe config."""

    backend: str
    summary: str
    runs: bool
    reason: str | None  # the message if it did not run
    device: str
    status: str = "ok"  # of the cell
    code: str | None = None  # code of the first refusal


def probe_environment() -> dict[str, Any] | str:
    """Return the environment of a worker, or a message if none starts."""
    try:
        with tempfile.TemporaryDirectory(prefix="profharness-") as folder:
            return worker_environment(Path(folder), PROBE_PROTOCOL)
    except CaptureError as error:
        return str(error)


def probe_interpreter(name: str, wrapped: Sequence[str] = ()) -> tuple[str, str]:
    """Start a worker in a Python, given by its path or its name on PATH.

    Return its path, and a text with its versions. `wrapped` are profilers that will run around it,
    which need the package nvtx there. Raise CaptureError if it cannot be used.
    """
    path = shutil.which(name)
    if path is None:
        raise CaptureError("no such program; name a Python that has torch")
    # do not resolve the link of a virtual environment, which selects its packages
    path = str(Path(path).absolute())
    with tempfile.TemporaryDirectory(prefix="profharness-") as folder:
        try:
            environment = worker_environment(Path(folder), PROBE_PROTOCOL, path)
        except OSError as error:
            raise CaptureError(f"does not start: {error.strerror}") from None
    if wrapped:
        done = run_briefly([path, "-c", "import nvtx"], IMPORT_TIMEOUT_S)
        if done is None or done.returncode:
            raise CaptureError(
                f"{', '.join(wrapped)} need the package nvtx there: {path} -m pip install nvtx"
            )
    return path, f"{name}: torch {environment['torch']}, Python {environment['python']}"


def probe_backends() -> list[BackendState]:
    """Run one small config on every backend, including `kernels/` and entry points.

    Raise CaptureError if no worker starts.
    """
    backends = dict(BACKENDS)
    ambiguous = {}
    for name in implementation_names():
        try:
            # built-in backends take precedence
            backends.setdefault(name, find_backend(name))
        except UsageError as error:
            # two packages may offer the same name; probe the others all the same
            ambiguous[name] = str(error)
    with tempfile.TemporaryDirectory(prefix="profharness-") as folder:
        options = CaptureOptions(("events",), Path(folder), PROBE_PROTOCOL)
        run = read_run(capture([parse_config(PROBE_CONFIG)], list(backends), options))
    device = str(run.environment.get("gpu") or run.environment.get("device_type"))
    states = [
        BackendState(
            cell.backend,
            backends[cell.backend].summary,
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


@dataclass(frozen=True)
class Measured:
    """Measured peaks, stored by `Store.add_peaks`."""

    peaks: Peaks
    environment: dict[str, Any]
    created: str = ""  # ISO 8601, UTC


def measure_peaks(device: str = "auto", timeout_s: float = 180.0) -> Measured:
    """Measure copy bandwidth and matrix rates on `cuda`, `cpu` or `auto`; this takes seconds.

    Raise CaptureError with the last lines of the process's output if it died or took longer than
    timeout_s.
    """
    with tempfile.TemporaryDirectory(prefix="profharness-") as name:
        folder = Path(name)
        plan = Plan((), Protocol(device=device), (), os.getpid())
        (folder / PLAN_FILE).write_bytes(msgspec.json.encode(plan))
        argv = worker_argv(folder, ["profharness.recording.worker.peaks"])
        done = run_briefly(argv, timeout_s, child_environment())
        if done is None:
            raise CaptureError(
                f"measuring the peaks of {device} took more than {timeout_s:g} s and was ended; "
                "--peaks data-sheet does without"
            )
        path = folder / PEAKS_FILE
        if done.returncode != 0 or not path.exists():
            stderr_tail = " / ".join(done.stderr.strip().splitlines()[-2:])[:500]
            raise CaptureError(
                f"measuring the peaks of {device} failed (exit code {done.returncode}): {stderr_tail}; "
                "`profharness doctor` shows what is missing, --peaks data-sheet does without"
            )
        measured = read_json(path, Measured)
    return replace(measured, created=datetime.now(UTC).isoformat(timespec="seconds"))


AskProgress = Callable[[int, int, str], None]
"""Takes the number of finished configs, the total, and the label of the last finished one."""


def ask(
    configs: Sequence[Config],
    *,
    device: str = "auto",
    advice: bool = True,
    timeout_s: float = 120,
    progress: AskProgress | None = None,
    asked: str = AUTO,
) -> tuple[list[LiveAnswer], dict[str, Any]]:
    """Return PyTorch's answer for each config, in order, and the environment of the process.

    `asked` is `auto`, or a set or order of backends. `device` is `cuda`, `cpu` or `auto`.
    `timeout_s` limits one config. If the process died or took too long, the answer has an error.
    Raise CaptureError if no process starts.
    """
    cells = tuple(Cell(f"c{index:04d}", config, asked) for index, config in enumerate(configs, 1))
    environment: dict[str, Any] = {}
    ended: dict[str, Cell] = {}

    def on_entry(entry: JournalEntry) -> None:
        if entry.environment is not None:
            environment.update(entry.environment)
        if entry.event == "end" and entry.result is not None:
            ended[entry.result.cell] = entry.result
            if progress is not None:
                progress(len(ended), len(cells), entry.result.config.label)

    with tempfile.TemporaryDirectory(prefix="profharness-") as name:
        folder = Path(name)
        protocol = Protocol(device=device, timeout_s=timeout_s)
        command = partial(ask_argv, advice=advice)
        run_cells(folder, cells, protocol, (), on_entry, command=command)
        answers: dict[str, LiveAnswer] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in read_lines(folder / ANSWERS_FILE):
                with contextlib.suppress(*NOT_A_RECORD):  # a crash may have cut a line short
                    answer = decode_json(line, LiveAnswer)
                    answers[answer.cell] = answer
    for cell in cells:
        if cell.cell not in answers:
            message = ended[cell.cell].message if cell.cell in ended else None
            error = f"PyTorch could not be asked: {message or 'its process left no answer'}"
            answers[cell.cell] = LiveAnswer(cell.cell, cell.config.label, error=error)
    return [answers[cell.cell] for cell in cells], environment


def ask_argv(folder: Path, *, advice: bool) -> list[str]:
    """Return the argv of the program that queries PyTorch."""
    options = () if advice else ("--no-advice",)
    return worker_argv(folder, ["profharness.recording.worker.ask", *options])
