"""Parse Nsight Compute's reports (.ncu-rep) and CSV tables, including the hardware counters.

ncu runs kernels one at a time and records no start times. The parser therefore invents start times:
the first launch starts at 0, and each launch starts when the previous launch ends. The launches are
in the order in which ncu profiled them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from profharness.devices import Device
from profharness.errors import TraceFormatError, counted
from profharness.recording.profilers.ncu import check_file
from profharness.rows import NCU
from profharness.trace import (
    NONE,
    HardwareMetrics,
    LaunchBatch,
    LaunchConfig,
    Range,
    Trace,
    range_cell,
)
from profharness.traces.columns import MAX_NS, NCU_KEYS, Ids, make_device, whole
from profharness.traces.demangle import canonical_names
from profharness.traces.ncu_csv import (
    CONSTANTS,
    DEFAULT_DOMAIN,
    DEVICE_PREFIX,
    DURATION,
    NcuLaunch,
    NcuReport,
    Triple,
    check_shape,
    read_csv_text,
)
from profharness.traces.ncu_readers import read_report

OWN_DOMAIN = "profharness"
NO_NAME = "unknown"
# Duration that is assumed for a kernel whose time is unknown, to keep the launches in order.
UNKNOWN_STEP_NS = 1
# Units of time in ncu's output. ncu writes long words until 2024 and abbreviations from 2025 on.
NANOSECONDS = {
    "ns": 1.0, "nsecond": 1.0, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6,
    "s": 1e9, "second": 1e9,
}  # fmt: skip
EXACT_BYTES = ("", "byte", "byte/block")  # values in any other unit of memory are rounded
MAX_SIZE = 1 << 62  # `whole` accepts only values below this
SHARED = "launch__shared_mem_per_block"
SIZES = ("launch__grid_", "launch__block_", "launch__registers_per_thread", SHARED)


def parse_ncu(path: Path) -> Trace:
    """Parse an .ncu-rep, or a .csv that `ncu --csv --page raw` printed.

    The long form of the CSV, which has one metric per line, is also accepted.

    Mangled names are demangled to the text that Kineto prints. If a CSV contains only names that
    ncu demangled, these names are used. The duration of a kernel is unknown if its time was not
    measured. The process, the thread and the launch time are always unknown. Consecutive launches
    in a range are treated as one call of the range. The name of a range is `domain:name`, except
    that ranges of the domain `profharness` and of the default domain have no prefix. All numeric
    metrics are kept except `device__attribute_*` and `nvlink__*`.

    Raise TraceFormatError if the file is in neither format, truncated or unreadable. Raise
    MissingReaderError if no program on this machine can read the report.
    """
    path = Path(path)
    if path.name.lower().endswith(".csv"):
        return _trace(read_csv_text(path, path), {}, path)
    file = check_file(path)
    environment: dict[str, object] = {"ncu_version": file.version} if file.version else {}
    trace = _trace(read_report(path, file), environment, path)
    return replace(trace, created_s=file.created_s)


def nanoseconds(value: float, unit: str) -> int:
    """Convert a time from ncu's output to nanoseconds, and round it."""
    return round(value * NANOSECONDS[unit])


def _trace(report: NcuReport, environment: dict[str, object], path: Path) -> Trace:
    launches, units = report.launches, report.units
    durations = [_duration(launch, units) for launch in launches]
    if sum(durations) >= MAX_NS:
        message = f"the kernel times add up to {sum(durations) / 1e9:.0f} s, which is too long"
        raise TraceFormatError(path, message, expected="plausible times")
    configs, kernels = Ids(), Ids()
    names = [launch.name or NO_NAME for launch in launches]
    canonical, intricate = canonical_names(names)
    steps = np.array([UNKNOWN_STEP_NS if ns == NONE else ns for ns in durations], np.int64)
    ends = np.cumsum(steps, dtype=np.int64)
    starts = ends - steps
    ranges, inner, cells = _ranges(launches, starts.tolist(), ends.tolist())
    columns = {
        "kernel": kernels.column([canonical[name] for name in names]),
        "launch_config": configs.column([_launch_config(launch, units) for launch in launches]),
        "range": inner,
        "cell_range": cells,
        "device": [launch.device for launch in launches],
        "stream": [NONE if launch.stream is None else launch.stream for launch in launches],
        "start_ns": starts,
        "duration_ns": durations,
    }
    devices, odd = _devices(launches)
    unknown = [NONE] * len(launches)
    batch = LaunchBatch(
        *(np.array(columns.get(item.name, unknown), np.int64) for item in fields(LaunchBatch))
    )
    return Trace(
        profiler=NCU,
        devices=devices,
        environment=environment,
        kernels=list(kernels),
        kernel_kinds=["kernel"] * len(kernels),
        launch_configs=list(configs),
        op_paths=[],
        apis=[],
        ranges=ranges,
        num_launches=len(launches),
        skipped=report.skipped,
        batches=lambda: iter([batch] if launches else []),
        close=lambda: None,
        warnings=(*report.warnings, *odd, *intricate, *_warnings(report, durations)),
        metrics=_metrics(report, durations, path),
    )


def _duration(launch: NcuLaunch, units: dict[str, str]) -> int:
    value, unit = launch.values.get(DURATION), units.get(DURATION, "")
    if value is None or unit not in NANOSECONDS or not 0 <= value * NANOSECONDS[unit] < MAX_NS:
        return NONE
    return nanoseconds(value, unit)


def _launch_config(launch: NcuLaunch, units: dict[str, str]) -> LaunchConfig:
    static, dynamic = (
        _whole(launch, name) if units.get(name, "") in EXACT_BYTES else None
        for name in (f"{SHARED}_static", f"{SHARED}_dynamic")
    )
    return LaunchConfig(
        grid=launch.grid or _dims(launch, "grid"),
        block=launch.block or _dims(launch, "block"),
        registers_per_thread=_whole(launch, "launch__registers_per_thread"),
        static_shared_bytes=static,
        dynamic_shared_bytes=dynamic,
        shared_bytes=None if static is None or dynamic is None else static + dynamic,
    )


def _dims(launch: NcuLaunch, what: str) -> Triple | None:
    """Return the dimensions of the grid or block, or None if they are unknown.

    If only the product of the dimensions is known and is 1, all dimensions are 1.
    """
    x, y, z = (_whole(launch, f"launch__{what}_dim_{axis}") for axis in "xyz")
    if x is not None and y is not None and z is not None:
        return x, y, z
    return (1, 1, 1) if launch.values.get(f"launch__{what}_size") == 1 else None


def _whole(launch: NcuLaunch, name: str) -> int | None:
    """Return a metric as an integer, or None if it is missing or impossible for a count.

    Counts are doubles in old reports.
    """
    value = launch.values.get(name)
    return None if value is None else whole(round(value))


def _open_ranges(launch: NcuLaunch) -> list[str]:
    """Return the names of the ranges that were open at a launch, outermost first.

    ncu does not record how ranges of different domains are nested. The range of a cell is assumed
    to be the outermost range, so that no other range divides it into several calls.
    """
    plain = (OWN_DOMAIN, DEFAULT_DOMAIN)
    ranges = (*launch.start_end, *launch.push_pop)
    names = [name if domain in plain else f"{domain}:{name}" for domain, name in ranges]
    return sorted(dict.fromkeys(names), key=lambda name: range_cell(name) is None)


def _ranges(
    launches: list[NcuLaunch], starts: list[int], ends: list[int]
) -> tuple[list[Range], list[int], list[int]]:
    """Return all ranges, and for each launch the index of its innermost range and of its cell."""
    opened: list[tuple[str, int, int | None]] = []  # name, start and parent of each range
    stops: list[int] = []
    stack: list[int] = []
    inner, cells = [], []
    for launch, start, end in zip(launches, starts, ends, strict=True):
        names = _open_ranges(launch)
        kept = 0
        while kept < min(len(stack), len(names)) and opened[stack[kept]][0] == names[kept]:
            kept += 1
        del stack[kept:]
        for name in names[kept:]:
            opened.append((name, start, stack[-1] if stack else None))
            stops.append(end)
            stack.append(len(opened) - 1)
        for index in stack:
            stops[index] = end
        inner.append(stack[-1] if stack else NONE)
        owners = [index for index in stack if range_cell(opened[index][0]) is not None]
        cells.append(owners[-1] if owners else NONE)
    ranges = [
        Range(name, start, stop - start, NONE, NONE, parent)
        for (name, start, parent), stop in zip(opened, stops, strict=True)
    ]
    return ranges, inner, cells


def _devices(launches: list[NcuLaunch]) -> tuple[tuple[Device, ...], list[str]]:
    devices: dict[int, Device] = {}
    warnings: dict[str, None] = {}
    for launch in launches:
        if launch.device not in devices:
            limits = {
                field: _whole(launch, DEVICE_PREFIX + attribute)
                for field, attribute in NCU_KEYS.items()
            }
            name = launch.texts.get(f"{DEVICE_PREFIX}display_name") or None
            device, texts = make_device(launch.device, name, limits)
            warnings |= dict.fromkeys(texts)
            if device:
                devices[launch.device] = device
    return tuple(devices[index] for index in sorted(devices)), list(warnings)


def _metrics(report: NcuReport, durations: list[int], path: Path) -> HardwareMetrics | None:
    """Return all numeric metrics, sorted by name, without the constants of the machine."""
    seen = {name for launch in report.launches for name in launch.values}
    names = sorted(name for name in seen if not name.startswith(CONSTANTS))
    if not names:
        return None
    filled = sum(len(launch.values) for launch in report.launches)
    check_shape(path, len(report.launches), len(names), filled)
    place = {name: index for index, name in enumerate(names)}
    values = np.full((len(report.launches), len(names)), np.nan)
    for row, launch in zip(values, report.launches, strict=True):
        for name, value in launch.values.items():
            if name in place:
                row[place[name]] = value
    if DURATION in place and report.units.get(DURATION, "") in NANOSECONDS:
        values[np.array(durations) == NONE, place[DURATION]] = np.nan
    return HardwareMetrics(names, [report.units.get(name, "") for name in names], values)


def _warnings(report: NcuReport, durations: list[int]) -> Iterator[str]:
    launches, units = report.launches, report.units
    of = f"of {counted(len(launches), 'kernel')} have"
    if not launches:
        yield "the report contains no kernels; an ncu filter may have excluded them all"
    untimed = [
        DURATION in launch.values
        for launch, ns in zip(launches, durations, strict=True)
        if ns == NONE
    ]
    unit = units.get(DURATION, "")
    if (impossible := sum(untimed)) and unit not in NANOSECONDS:
        yield f"{impossible} {of} no time, because the unit of {DURATION} is {unit[:40]!r}"
    elif impossible:
        yield f"{impossible} {of} a negative or implausible time, which is ignored"
    if missing := len(untimed) - impossible:
        yield f"{missing} {of} no time; add {DURATION} to the metrics that ncu measures"
    if nameless := sum(not launch.name for launch in launches):
        yield f"{nameless} {of} no name"
    sizes = [name for name in units if name.startswith(SIZES)]
    figures = (launch.values.get(name) for launch in launches for name in sizes)
    if odd := sum(not 0 <= value < MAX_SIZE for value in figures if value is not None):
        yield f"{odd} launch sizes (grid, block, registers or memory) are impossible"
    if report.skipped:
        yield f"{report.skipped} results for whole ranges or graphs are skipped"
    shared = (unit for name, unit in units.items() if name.startswith(SHARED))
    if rounded := next((unit for unit in shared if unit not in EXACT_BYTES), None):
        yield (
            f"shared memory sizes are ignored, because they are rounded to {rounded[:40]}; "
            "export with --print-units base"
        )
