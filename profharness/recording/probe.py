"""Start short-lived workers that report on the machine.

They report the environment, the usable backends, the peaks of the device, and PyTorch's dispatch
decisions.
"""

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
from profharness.attention.backends.serving import SERVING_BACKENDS
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
SERVED_CONFIG = "2,2,1,64,seq_kv=64,page=16"  # for the backends of serving engines
IMPORT_TIMEOUT_S = 60.0
PROBE_PROTOCOL = Protocol(iterations=1, warmup=0, samples=0, timeout_s=180)


@dataclass(frozen=True)
class BackendState:
    """The result of a backend on the probe config."""

    backend: str
    summary: str
    runs: bool
    reason: str | None  # why the backend did not run, or None if it ran
    device: str
    status: str = "ok"  # status of the cell
    code: str | None = None  # code of the first refusal


def probe_environment() -> dict[str, Any] | str:
    """Return the environment of a worker, or an error message if no worker starts."""
    try:
        with tempfile.TemporaryDirectory(prefix="profharness-") as folder:
            return worker_environment(Path(folder), PROBE_PROTOCOL)
    except CaptureError as error:
        return str(error)


def probe_interpreter(name: str, wrapped: Sequence[str] = ()) -> tuple[str, str]:
    """Check that a worker can run in another Python, given by its path or its name on PATH.

    Return the path of that Python and a text with its version and its version of torch. `wrapped`
    lists profilers such as nsys, for which that Python also needs the package nvtx. Raise
    CaptureError if a worker cannot run in it.
    """
    path = shutil.which(name)
    if path is None:
        raise CaptureError("no such program; pass the path of a Python that has torch")
    # do not resolve symlinks, because the path of a virtual environment selects its packages
    path = str(Path(path).absolute())
    with tempfile.TemporaryDirectory(prefix="profharness-") as folder:
        try:
            environment = worker_environment(Path(folder), PROBE_PROTOCOL, path)
        except OSError as error:
            raise CaptureError(f"cannot be started: {error.strerror}") from None
    if wrapped:
        done = run_briefly([path, "-c", "import nvtx"], IMPORT_TIMEOUT_S)
        if done is None or done.returncode:
            raise CaptureError(
                f"{', '.join(wrapped)} require the package nvtx in that Python; install it "
                f"with `{path} -m pip install nvtx`"
            )
    return path, f"{name}: torch {environment['torch']}, Python {environment['python']}"


def probe_backends() -> list[BackendState]:
    """Run one small config on every backend, including `kernels/` and installed packages.

    Raise CaptureError if no worker starts.
    """
    backends = dict(BACKENDS)
    ambiguous = {}
    for name in implementation_names():
        try:
            # a built-in backend of the same name takes precedence
            backends.setdefault(name, find_backend(name))
        except UsageError as error:
            # two packages provide a backend of this name; still probe the other backends
            ambiguous[name] = str(error)
    serving = {each.name for each in SERVING_BACKENDS}
    states = []
    for text, names in (
        (PROBE_CONFIG, [name for name in backends if name not in serving]),
        (SERVED_CONFIG, [name for name in backends if name in serving]),
    ):
        with tempfile.TemporaryDirectory(prefix="profharness-") as folder:
            options = CaptureOptions(("events",), Path(folder), PROBE_PROTOCOL)
            run = read_run(capture([parse_config(text)], names, options))
        device = str(run.environment.get("gpu") or run.environment.get("device_type"))
        states += [
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
    order = list(backends)
    states.sort(key=lambda state: order.index(state.backend))
    return states + [
        BackendState(name, "entry points", False, reason, device, "error")
        for name, reason in ambiguous.items()
    ]


@dataclass(frozen=True)
class Measured:
    """The measured peaks of a device, which `Store.add_peaks` stores."""

    peaks: Peaks
    environment: dict[str, Any]
    created: str = ""  # time of the measurement in UTC, in ISO 8601 format


def measure_peaks(device: str = "auto", timeout_s: float = 180.0) -> Measured:
    """Measure the memory bandwidth and FLOP rates of a device, which takes a few seconds.

    `device` is `cuda`, `cpu` or `auto`. Raise CaptureError if the measuring process fails or takes
    longer than `timeout_s`.
    """
    with tempfile.TemporaryDirectory(prefix="profharness-") as name:
        folder = Path(name)
        plan = Plan((), Protocol(device=device), (), os.getpid())
        (folder / PLAN_FILE).write_bytes(msgspec.json.encode(plan))
        argv = worker_argv(folder, ["profharness.recording.worker.peaks"])
        done = run_briefly(argv, timeout_s, child_environment())
        if done is None:
            raise CaptureError(
                f"measuring the peak rates of {device} took more than {timeout_s:g} s and "
                "was stopped; use --peaks data-sheet to avoid the measurement"
            )
        path = folder / PEAKS_FILE
        if done.returncode != 0 or not path.exists():
            stderr_tail = " / ".join(done.stderr.strip().splitlines()[-2:])[:500]
            raise CaptureError(
                f"measuring the peak rates of {device} failed (exit code {done.returncode}): "
                f"{stderr_tail}; run `profharness doctor` to see what is missing, or use --peaks "
                "data-sheet to avoid the measurement"
            )
        measured = read_json(path, Measured)
    return replace(measured, created=datetime.now(UTC).isoformat(timespec="seconds"))


AskProgress = Callable[[int, int, str], None]
"""A function that is called with the number of finished configs, the number of all configs, and the
label of the config that was finished last.
"""


def ask(
    configs: Sequence[Config],
    *,
    device: str = "auto",
    advice: bool = True,
    timeout_s: float = 120,
    progress: AskProgress | None = None,
    asked: str = AUTO,
) -> tuple[list[LiveAnswer], dict[str, Any]]:
    """Query PyTorch's dispatch decisions. Return one result per config, and the environment.

    `asked` is `auto`, or a set or order of backends such as `flash+math`. `device` is `cuda`, `cpu`
    or `auto`. `timeout_s` limits the time for one config. If the worker dies or exceeds the limit,
    the result contains an error. Raise CaptureError if no worker starts.
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
                with contextlib.suppress(*NOT_A_RECORD):  # the line may be incomplete after a crash
                    answer = decode_json(line, LiveAnswer)
                    answers[answer.cell] = answer
    for cell in cells:
        if cell.cell not in answers:
            message = ended[cell.cell].message if cell.cell in ended else None
            error = f"PyTorch gave no answer: {message or 'its process ended unexpectedly'}"
            answers[cell.cell] = LiveAnswer(cell.cell, cell.config.label, error=error)
    return [answers[cell.cell] for cell in cells], environment


def ask_argv(folder: Path, *, advice: bool) -> list[str]:
    """Return the command line of the worker's program that queries PyTorch."""
    options = () if advice else ("--no-advice",)
    return worker_argv(folder, ["profharness.recording.worker.ask", *options])
