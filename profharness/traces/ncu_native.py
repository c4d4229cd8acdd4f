"""Read reports through NVIDIA's `ncu_report` module in child processes.

A damaged report can make the module abort, run forever or use all memory, and the module frees no
memory. Each child writes its part of the report as msgpack.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from profharness.files import read_input
from profharness.processes import child_environment, run_to_end
from profharness.traces.ncu_launches import (
    CONSTANTS,
    LaunchCompactor,
    NcuLaunch,
    NcuReport,
    NvtxRange,
)

MODULE = "ncu_report"
EXTRAS = Path("extras", "python", f"{MODULE}.py")
CHILD = "from profharness.traces.ncu_native import main; main()"
KERNEL = 0  # IAction.workload_type(); from 1 on ranges, command lists and graphs
STRING, FLOATS, INTEGERS = 2, (3, 4), (5, 6)  # IMetric.kind()
MAX_INDEX = 1 << 31  # of a device or stream; larger values are -1 in an unsigned field
MAX_NAMES = 1 << 16  # ranges open at one launch

# A real report of 1.2 MB takes 0.4 s of processor time and 180 MB, 120 of them for the library.
CPU_S, CPU_S_PER_MB = 12.0, 4.0
ENOUGH_KIB, MOST_BYTES = (
    240 << 10,
    450 << 20,
)  # memory at which a child leaves the rest to the next, and its limit
WAITING = 4  # wall time per processor time, for a child that sleeps or shares its processor
NO_MODULE, NOTHING_FOUND, NO_MEMORY = 3, 4, 5  # exit codes of the child


class _Launch(msgspec.Struct, array_like=True):
    """A kernel. `values` and `texts` are keyed by the metric's index in `_Report.names`."""

    name: str
    device: int
    stream: int | None
    values: dict[int, float]
    texts: dict[int, str]
    start_end: list[tuple[str, str]]
    push_pop: list[tuple[str, str]]


class _Report(msgspec.Struct, array_like=True):
    """The message that the child writes."""

    names: list[str]
    units: list[str]
    launches: list[_Launch]
    skipped: int
    unreadable: int
    rest: int | None  # the first result left to the next child


def has_package() -> bool:
    """Return whether a module `ncu_report` is installed, without importing it."""
    try:
        return importlib.util.find_spec(MODULE) is not None
    except (ImportError, ValueError):
        return False


def find_extras(ncu: Path) -> Path | None:
    """Return the folder of the `ncu_report` module that belongs to an ncu, or None."""
    for folder in ncu.resolve().parents[:5]:
        if (folder / EXTRAS).is_file():
            return (folder / EXTRAS).parent
    return None


def read_native(path: Path, folder: Path | None = None) -> NcuReport | str | None:
    """Read a report through the installed module, or through that in `folder`.

    Return None if the module cannot be imported, "" if it finds nothing, as it does for unknown
    files, else the report or a description of the failure.
    """
    size = path.stat().st_size
    seconds = math.ceil(CPU_S + CPU_S_PER_MB * size / 1e6)
    until, compactor = _children_s() + seconds, LaunchCompactor(path, size)
    launches: list[NcuLaunch] = []
    units: dict[str, str] = {}
    skipped = unreadable = 0
    first: int | None = 0
    while first is not None:
        left = math.ceil(until - _children_s())
        part = _read_part(path, folder, first, left) if left > 0 else _failure(None, seconds)
        if not isinstance(part, _Report):
            return part
        launches += map(compactor.compact, _unpacked(part, compactor))
        units.update(zip(part.names, part.units, strict=True))
        skipped, unreadable = skipped + part.skipped, unreadable + part.unreadable
        first = part.rest
    doubt = f"{unreadable} names or metrics in the report could not be read"
    return NcuReport(launches, units, skipped, (doubt,) if unreadable else ())


def _children_s() -> float:
    """Return the processor time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _read_part(path: Path, folder: Path | None, first: int, seconds: int) -> _Report | str | None:
    """Return the results from `first` on that a child reads, or a failure as `read_native` does."""
    limits = (str(seconds), str(MOST_BYTES), str(first))
    with tempfile.TemporaryDirectory(prefix="profharness-ncu-") as name:
        output = Path(name) / "output"
        argv = [sys.executable, "-c", CHILD, str(path.resolve()), str(output), *limits]
        argv += [] if folder is None else [str(folder)]
        log, environment = Path(os.devnull), child_environment()
        code = run_to_end(argv, log, environment, seconds * WAITING, cwd=name)
        if code == NO_MODULE:
            return None
        if code == NOTHING_FOUND:
            return ""
        if code != 0:
            return _failure(code, seconds)
        try:
            return msgspec.msgpack.decode(read_input(output), type=_Report)
        except (OSError, msgspec.MsgspecError):
            return "ended without a result"


def _failure(code: int | None, seconds: int) -> str:
    if code is None or code == -getattr(signal, "SIGXCPU", 0):
        return f"was ended after {seconds} s of work"
    if code == NO_MEMORY:
        return "took too much memory"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(-code).name}"
    return f"failed with code {code}"


def _unpacked(report: _Report, compactor: LaunchCompactor) -> Iterator[NcuLaunch]:
    names = report.names
    for launch in report.launches:
        # each child reads the constants of a device again
        left_out = CONSTANTS if compactor.has(launch.device) else ()
        kept = [place for place in launch.values if not names[place].startswith(left_out)]
        yield NcuLaunch(
            name=launch.name,
            values={names[place]: launch.values[place] for place in kept},
            texts={
                names[place]: sys.intern(text)
                for place, text in launch.texts.items()
                if not names[place].startswith(left_out)
            },
            device=launch.device,
            stream=launch.stream,
            start_end=tuple(NvtxRange(*pair) for pair in launch.start_end),
            push_pop=tuple(NvtxRange(*pair) for pair in launch.push_pop),
        )


def main() -> None:
    """Run the child with the arguments REPORT OUTPUT SECONDS BYTES FIRST [FOLDER]."""
    report, output, seconds, size, first, *folder = sys.argv[1:]
    with contextlib.suppress(ValueError, OSError):  # the parent's limit still applies
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 1))
        resource.setrlimit(resource.RLIMIT_AS, (int(size), int(size)))
    sys.path[:0] = folder
    try:
        module = importlib.import_module(MODULE)
    except ImportError:
        sys.exit(NO_MODULE)
    try:
        context = module.load_report(report)
        if not context.num_ranges():
            sys.exit(NOTHING_FOUND)
        Path(output).write_bytes(msgspec.msgpack.encode(_Reader().read(context, int(first))))
    except MemoryError:
        sys.exit(NO_MEMORY)


def _peak_kib() -> int:
    """Return the peak memory of this process. `ru_maxrss` would include that of the parent before exec."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


class _Reader:
    """Reads a report through the module. Results that the module returns as None are counted."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}
        self.units: list[str] = []
        self.devices: set[int] = set()
        self.unreadable = 0

    def read(self, context: Any, first: int) -> _Report:
        """Return the results from `first` on, until the memory limit."""
        parts = [context.range_by_idx(place) for place in range(context.num_ranges())]
        results = [(part, index) for part in parts for index in range(part.num_actions())]
        launches: list[_Launch] = []
        done, rest = first, None
        for part, index in results[first:]:
            action = part.action_by_idx(index)
            if action.workload_type() == KERNEL:
                launches.append(self._launch(action))
            done += 1
            if _peak_kib() > ENOUGH_KIB:
                rest = done if done < len(results) else None
                break
        skipped = done - first - len(launches)
        return _Report(list(self.places), self.units, launches, skipped, self.unreadable, rest)

    def _launch(self, action: Any) -> _Launch:
        device = _index(action, "launch__device_id")
        if device is None:
            device = _index(action, "device__attribute_device_index") or 0
        launch = _Launch("", device, _index(action, "launch__stream_id"), {}, {}, [], [])
        launch.name = self._text(action.name(action.NameBase_MANGLED)) or ""
        for name in action.metric_names():
            if not (device in self.devices and name.startswith(CONSTANTS)):
                self._add(launch, name, action.metric_by_name(name))
        self.devices.add(device)
        if (state := action.nvtx_state()) is not None:
            for domain in map(state.domain_by_id, sorted(state.domains())):
                launch.start_end += self._ranges(domain, domain.start_end_ranges())
                launch.push_pop += self._ranges(domain, domain.push_pop_ranges())
        return launch

    def _add(self, launch: _Launch, raw_name: str, metric: Any) -> None:
        name = self._text(raw_name)
        if metric is None or not name:
            self.unreadable += 1
            return
        place = self.places.setdefault(name, len(self.places))
        if place == len(self.units):
            self.units.append(self._text(metric.unit()) or "")
        kind = metric.kind()
        if kind == STRING:
            launch.texts[place] = self._text(metric.as_string()) or ""
        elif kind in FLOATS or kind in INTEGERS:
            value = float(metric.as_uint64() if kind in INTEGERS else metric.as_double())
            if math.isfinite(value):
                launch.values[place] = value

    def _ranges(self, domain: Any, names: Any) -> list[tuple[str, str]]:
        title = self._text(domain.name()) or ""
        return [(title, self._text(name) or "") for name in list(names)[:MAX_NAMES]]

    def _text(self, value: object) -> str | None:
        """Return a text without lone surrogates, which SWIG makes of bytes that are not UTF-8."""
        if not isinstance(value, str):
            self.unreadable += 1
            return None
        return value.encode("utf-8", "replace").decode("utf-8")


def _index(action: Any, name: str) -> int | None:
    metric = action.metric_by_name(name)
    number = None if metric is None else int(metric.as_uint64())
    return None if number is None or number >= MAX_INDEX else number
