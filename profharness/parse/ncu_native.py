"""NVIDIA's `ncu_report` module in child processes, because a damaged report can make it abort, run for
ever or take all memory, and because it gives no memory back. Each child writes what it read as msgpack.
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
from profharness.parse.ncu_csv import CONSTANTS, Keeper, NcuLaunch, NcuReport, NvtxRange
from profharness.processes import child_environment, run_group

MODULE = "ncu_report"
EXTRAS = Path("extras", "python", f"{MODULE}.py")
CHILD = "from profharness.parse.ncu_native import main; main()"
KERNEL = 0  # IAction.workload_type(); 1 and up are ranges, command lists and graphs
STRING, FLOATS, INTEGERS = 2, (3, 4), (5, 6)  # IMetric.kind()
MAX_INDEX = 1 << 31  # of a device or stream; more stands for -1 in a field without sign
MAX_NAMES = 1 << 16  # of ranges open at one launch

# A real report of 1.2 MB takes 0.4 s of processor time and 180 MB, 120 of them for the library.
CPU_S, CPU_S_PER_MB = 12.0, 4.0
ENOUGH_KIB, MOST_BYTES = (
    240 << 10,
    450 << 20,
)  # where a child leaves the rest to the next; its limit
WAITING = 4  # times as long by the clock, for a child that sleeps or shares its processor
NO_MODULE, NOTHING_FOUND, NO_MEMORY = 3, 4, 5  # exit codes of the child


class _Launch(msgspec.Struct, array_like=True):
    """One kernel; values and texts by the metric's place in `_Report.names`."""

    name: str
    device: int
    stream: int | None
    values: dict[int, float]
    texts: dict[int, str]
    start_end: list[tuple[str, str]]
    push_pop: list[tuple[str, str]]


class _Report(msgspec.Struct, array_like=True):
    """What the child writes."""

    names: list[str]
    units: list[str]
    launches: list[_Launch]
    skipped: int
    unreadable: int
    rest: int | None  # the first result that is left to another child


def has_package() -> bool:
    """Whether a module `ncu_report` is installed; it is not loaded."""
    try:
        return importlib.util.find_spec(MODULE) is not None
    except (ImportError, ValueError):
        return False


def find_extras(ncu: Path) -> Path | None:
    """The folder of the `ncu_report` module that this ncu's Nsight Compute brings."""
    for folder in ncu.resolve().parents[:5]:
        if (folder / EXTRAS).is_file():
            return (folder / EXTRAS).parent
    return None


def read_native(path: Path, folder: Path | None = None) -> NcuReport | str | None:
    """The report as the module reads it, the installed one or that in `folder`.

    None where the module does not load, "" where it finds nothing, which is its sign for a file it
    does not know; else how it failed.
    """
    size = path.stat().st_size
    seconds = math.ceil(CPU_S + CPU_S_PER_MB * size / 1e6)
    until, keeper = _children_s() + seconds, Keeper(path, size)
    launches: list[NcuLaunch] = []
    units: dict[str, str] = {}
    skipped = unreadable = 0
    first: int | None = 0
    while first is not None:
        left = math.ceil(until - _children_s())
        part = _read_part(path, folder, first, left) if left > 0 else _failure(None, seconds)
        if not isinstance(part, _Report):
            return part
        launches += map(keeper.keep, _unpacked(part, keeper))
        units.update(zip(part.names, part.units, strict=True))
        skipped, unreadable = skipped + part.skipped, unreadable + part.unreadable
        first = part.rest
    doubt = f"{unreadable} names or metrics in the report could not be read"
    return NcuReport(launches, units, skipped, (doubt,) if unreadable else ())


def _children_s() -> float:
    """Processor time of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _read_part(path: Path, folder: Path | None, first: int, seconds: int) -> _Report | str | None:
    """What a child reads from that result on, or the same as `read_native` where it reads nothing."""
    limits = (str(seconds), str(MOST_BYTES), str(first))
    with tempfile.TemporaryDirectory(prefix="profharness-ncu-") as name:
        output = Path(name) / "output"
        argv = [sys.executable, "-c", CHILD, str(path.resolve()), str(output), *limits]
        argv += [] if folder is None else [str(folder)]
        log, environment = Path(os.devnull), child_environment()
        code = run_group(argv, log, environment, seconds * WAITING, cwd=name)
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


def _unpacked(report: _Report, keeper: Keeper) -> Iterator[NcuLaunch]:
    names = report.names
    for launch in report.launches:
        # each child reads the constants of a device anew
        left_out = CONSTANTS if keeper.has(launch.device) else ()
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
    """Entry of the child: REPORT OUTPUT SECONDS BYTES FIRST [FOLDER]."""
    report, output, seconds, size, first, *folder = sys.argv[1:]
    with contextlib.suppress(ValueError, OSError):  # the parent's limit still holds
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
    """Reads a report through the module; what it gives None for is passed over and counted."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}
        self.units: list[str] = []
        self.devices: set[int] = set()
        self.unreadable = 0

    def read(self, context: Any, first: int) -> _Report:
        """The results from that one on, until enough memory is taken."""
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
        """A text as UTF-8 can hold it: SWIG makes lone surrogates of bytes that are none."""
        if not isinstance(value, str):
            self.unreadable += 1
            return None
        return value.encode("utf-8", "replace").decode("utf-8")


def _index(action: Any, name: str) -> int | None:
    metric = action.metric_by_name(name)
    number = None if metric is None else int(metric.as_uint64())
    return None if number is None or number >= MAX_INDEX else number
