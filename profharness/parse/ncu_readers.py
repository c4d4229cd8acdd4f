"""The ways to read an .ncu-rep, in the order of preference: the `ncu_report` package, the same
module inside Nsight Compute, and ncu itself.
"""

from __future__ import annotations

import csv
import importlib
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from profharness.errors import MissingExtraError, ProfharnessError, TraceFormatError
from profharness.parse.ncu_csv import (
    CONSTANTS,
    DEVICE_PREFIX,
    OWN_COLUMNS,
    PUSH_POP,
    START_END,
    NcuLaunch,
    NcuReport,
    NvtxRange,
    Triple,
    read_csv_text,
)
from profharness.processes import run_group
from profharness.profilers import find_tool
from profharness.profilers.ncu import NcuFile, check_file, child_environment, csv_argv

MODULE = "ncu_report"
EXTRAS = Path("extras", "python", f"{MODULE}.py")
KERNEL = 0  # IAction.workload_type(); 1 and up are ranges, command lists and graphs
STRING, FLOATS, INTEGERS = 2, (3, 4), (5, 6)  # IMetric.kind()
IMPORT_TIMEOUT_S = 600.0
UNKNOWN_ID = "0"
COLUMNS = tuple(column for column in OWN_COLUMNS if column != "Kernel Time")


def import_package() -> Any | None:
    """The installed `ncu_report` module; None where there is none or it does not load."""
    try:
        return importlib.import_module(MODULE)
    except ImportError:
        return None


def import_from_tool(ncu: Path) -> Any | None:
    """The `ncu_report` module of this ncu's Nsight Compute; its folder leaves sys.path again."""
    for folder in ncu.resolve().parents[:5]:
        if (folder / EXTRAS).is_file():
            sys.path.insert(0, str((folder / EXTRAS).parent))
            try:
                return import_package()
            finally:
                sys.path.pop(0)
    return None


def read_with(module: Any, path: Path) -> NcuReport | None:
    """The report as the module reads it; None when it finds nothing, its sign for a bad file."""
    context = module.load_report(str(path))
    if not context.num_ranges():
        return None
    units: dict[str, str] = {}
    devices: set[int] = set()
    parts = [context.range_by_idx(place) for place in range(context.num_ranges())]
    actions = [part.action_by_idx(index) for part in parts for index in range(part.num_actions())]
    kernels = [action for action in actions if action.workload_type() == KERNEL]
    launches = [_launch(action, units, devices) for action in kernels]
    return NcuReport(launches, units, skipped=len(actions) - len(kernels))


def _launch(action: Any, units: dict[str, str], devices: set[int]) -> NcuLaunch:
    device = _index(action, "launch__device_id")
    if device is None:
        device = _index(action, "device__attribute_device_index") or 0
    values: dict[str, float] = {}
    texts: dict[str, str] = {}
    for name in action.metric_names():
        if device in devices and name.startswith(CONSTANTS):
            continue
        metric = action.metric_by_name(name)
        if name not in units:
            units[name] = metric.unit()
        kind = metric.kind()
        if kind == STRING:
            texts[name] = metric.as_string()
        elif kind in FLOATS or kind in INTEGERS:
            value = float(metric.as_uint64() if kind in INTEGERS else metric.as_double())
            if math.isfinite(value):
                values[name] = value
    devices.add(device)
    start_end, push_pop = [], []
    if (state := action.nvtx_state()) is not None:
        for domain in map(state.domain_by_id, sorted(state.domains())):
            start_end += [NvtxRange(domain.name(), text) for text in domain.start_end_ranges()]
            push_pop += [NvtxRange(domain.name(), text) for text in domain.push_pop_ranges()]
    return NcuLaunch(
        name=action.name(action.NameBase_MANGLED),
        values=values,
        texts=texts,
        device=device,
        stream=_index(action, "launch__stream_id"),
        start_end=tuple(start_end),
        push_pop=tuple(push_pop),
    )


def _index(action: Any, name: str) -> int | None:
    metric = action.metric_by_name(name)
    return None if metric is None else int(metric.as_uint64())


def report_to_csv(report: Path, output: Path) -> None:
    """Write an .ncu-rep as `ncu --csv --page raw --print-units base --print-kernel-base mangled`
    prints it; `parse_ncu` reads the same launches and metrics back.

    Doubles are written in full, where ncu rounds to two decimals. Process ids and the threads of
    ranges are 0, process and host names empty. Raises what `read_report` raises.
    """
    write_csv(read_report(report, check_file(report)), output)


def write_csv(report: NcuReport, output: Path) -> None:
    """Write kernels as `report_to_csv` does."""
    names = sorted({name for row in report.launches for name in (*row.values, *row.texts)})
    constants: dict[int, NcuLaunch] = {}
    with output.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n")
        writer.writerow([*COLUMNS, *names])
        writer.writerow([*("" for _ in COLUMNS), *(report.units.get(name, "") for name in names)])
        for index, launch in enumerate(report.launches):
            source = constants.setdefault(launch.device, launch)
            sources = (source if name.startswith(CONSTANTS) else launch for name in names)
            writer.writerow([*_own(index, launch, source), *map(_value, sources, names)])


def _own(index: int, launch: NcuLaunch, source: NcuLaunch) -> list[str]:
    """The cells of ncu's own columns, in the order of COLUMNS."""
    capability = ("major", "minor")
    own = {
        "ID": str(index),
        "Process ID": UNKNOWN_ID,
        PUSH_POP: f"{UNKNOWN_ID}  {_items(launch.push_pop)}" if launch.push_pop else "",
        START_END: _items(launch.start_end, numbered=True),
        "Kernel Name": launch.name,
        "Context": _value(launch, "launch__context_id"),
        "Stream": "" if launch.stream is None else str(launch.stream),
        "Block Size": _dims(launch, "block", launch.block),
        "Grid Size": _dims(launch, "grid", launch.grid),
        "Device": str(launch.device),
        "CC": ".".join(
            _value(source, f"{DEVICE_PREFIX}compute_capability_{n}") for n in capability
        ),
    }
    return [own.get(column, "") for column in COLUMNS]


def _value(launch: NcuLaunch, name: str) -> str:
    value = launch.values.get(name)
    if value is None:
        return launch.texts.get(name, "")
    return str(int(value)) if float(value).is_integer() else repr(value)


def _dims(launch: NcuLaunch, what: str, known: Triple | None) -> str:
    values = [launch.values.get(f"launch__{what}_dim_{axis}") for axis in "xyz"]
    numbers = known or [int(value) for value in values if value is not None]
    return f"({', '.join(map(str, numbers))})" if len(numbers) == 3 else ""


def _items(ranges: tuple[NvtxRange, ...], *, numbered: bool = False) -> str:
    """An NVTX cell: domain, name, four unknown fields, the message's type, and the name again."""
    return "  ".join(
        f'"{f"{place}:" if numbered else ""}{item.domain}:{item.name}:none:none:none:none:ASCII:{item.name}"'
        for place, item in enumerate(ranges)
    )


class MissingReaderError(MissingExtraError):
    """Nothing on this machine can read an .ncu-rep."""

    def __init__(self, path: Path) -> None:
        ProfharnessError.__init__(
            self,
            f"{path}: nothing here can read an Nsight Compute report. Any one of three helps: "
            'pip install "profharness[ncu]" (the package ncu_report); '
            "Nsight Compute on PATH or named by PROFHARNESS_NCU (its extras/python is used, else "
            "ncu itself); or a CSV made where ncu is: "
            "ncu --import REPORT --csv --page raw --print-units base "
            "--print-kernel-base mangled > REPORT.csv",
        )


def read_report(path: Path, file: NcuFile) -> NcuReport:
    """The kernels of a report by the first way that can read it; file: what `check_file` said.

    Raises TraceFormatError when no way understands it, MissingReaderError when there is no way.
    """
    if not file.results:
        return NcuReport([], {})
    tried = []
    for name, report in _attempts(path):
        if report is not None:
            return report
        tried.append(name)
    if not tried:
        raise MissingReaderError(path)
    made = f"ncu {file.version}" if file.version else "an unknown ncu"
    raise TraceFormatError(
        path,
        f"a report of {made} that {' and '.join(tried)} cannot read",
        expected="a report no newer than its reader; pip install -U ncu-report, or use a newer ncu",
    )


def _attempts(path: Path) -> Iterator[tuple[str, NcuReport | None]]:
    """(name, report) of each way that this machine has; None where the way cannot read the file."""
    if (module := import_package()) is not None:
        yield "ncu_report", read_with(module, path)
    tool = find_tool("ncu")
    if tool is None:
        return
    if (module := import_from_tool(tool.path)) is not None:
        yield "Nsight Compute's ncu_report", read_with(module, path)
    output = import_csv(tool.path, path)
    yield "ncu --import", None if output is None else read_csv_text(output, path)


def import_csv(ncu: Path, report: Path, *, timeout_s: float = IMPORT_TIMEOUT_S) -> str | None:
    """What `ncu --import` prints of a report as CSV; None when it cannot read the report.

    Raises TraceFormatError when ncu does not start or takes longer than timeout_s.
    """
    argv = csv_argv(ncu, report.resolve())
    if "--print-kernel-base" not in argv:
        argv += ["--print-kernel-base", "mangled"]
    with tempfile.TemporaryDirectory(prefix="profharness-ncu-") as name:
        folder = Path(name)
        output, environment = folder / "output", child_environment(os.environ, folder)
        options = {"cwd": folder, "stderr": subprocess.DEVNULL}
        try:
            returncode = run_group(argv, output, environment, timeout_s, **options)
        except OSError as error:
            raise TraceFormatError(report, f"{ncu} does not start: {error.strerror}") from None
        if returncode is None:
            message = f"{ncu} --import took more than {timeout_s:g} s and was ended"
            raise TraceFormatError(report, message)
        return output.read_bytes().decode("utf-8", "replace") if returncode == 0 else None
