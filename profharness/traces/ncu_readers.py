"""Read an .ncu-rep with the `ncu_report` package, else with the same module inside Nsight Compute,
else with ncu itself.
"""

from __future__ import annotations

import csv
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from profharness.errors import MissingExtraError, ProfharnessError, TraceFormatError
from profharness.files import read_input
from profharness.processes import run_to_end
from profharness.recording.profilers import find_tool
from profharness.recording.profilers.ncu import NcuFile, check_file, child_environment, csv_argv
from profharness.rows import NCU
from profharness.traces.ncu_csv import OWN_COLUMNS, PUSH_POP, START_END, read_csv_text
from profharness.traces.ncu_launches import (
    CONSTANTS,
    DEVICE_PREFIX,
    NcuLaunch,
    NcuReport,
    NvtxRange,
    Triple,
)
from profharness.traces.ncu_native import find_extras, has_package, read_native

IMPORT_TIMEOUT_S = 600.0
UNKNOWN_ID = "0"
COLUMNS = tuple(column for column in OWN_COLUMNS if column != "Kernel Time")


def report_to_csv(report: Path, output: Path) -> None:
    """Write an .ncu-rep as `ncu --csv --page raw --print-units base --print-kernel-base mangled`
    prints it. `parse_ncu` reads the same launches and metrics from the CSV.

    Doubles are written in full, whereas ncu rounds to two decimals. Process ids and the threads of
    ranges are 0, process and host names are empty. Raise the errors of `read_report`.
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
    """Return the cells of ncu's own columns, in the order of COLUMNS."""
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


def _dims(launch: NcuLaunch, what: str, triple: Triple | None) -> str:
    values = [launch.values.get(f"launch__{what}_dim_{axis}") for axis in "xyz"]
    numbers = triple or [int(value) for value in values if value is not None]
    return f"({', '.join(map(str, numbers))})" if len(numbers) == 3 else ""


def _items(ranges: tuple[NvtxRange, ...], *, numbered: bool = False) -> str:
    """Return an NVTX cell: domain, name, four unknown fields, the message's type, and the name
    again.
    """
    return "  ".join(
        f'"{f"{place}:" if numbered else ""}{item.domain}:{item.name}:none:none:none:none:ASCII:{item.name}"'
        for place, item in enumerate(ranges)
    )


class MissingReaderError(MissingExtraError):
    """No program on this machine can read an .ncu-rep."""

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
    """Return the kernels of a report. `file` is the result of `check_file`.

    Raise TraceFormatError if no reader understands the report, and MissingReaderError if there is
    no reader.
    """
    if not file.results:
        return NcuReport([], {})
    tried = []
    for name, report in _attempts(path):
        if isinstance(report, NcuReport):
            return _counted(report, file)
        tried.append(f"{name} ({report})" if report else name)
    if not tried:
        raise MissingReaderError(path)
    made = f"ncu {file.version}" if file.version else "an unknown ncu"
    raise TraceFormatError(
        path,
        f"a report of {made} that {' and '.join(tried)} cannot read",
        expected="a whole report no newer than its reader; copy it again, pip install -U "
        "ncu-report, or use a newer ncu",
    )


def _attempts(path: Path) -> Iterator[tuple[str, NcuReport | str]]:
    """Yield the name of each available reader, and its report or a description of its failure,
    which is "" if the reader does not know the file.
    """
    if has_package() and (report := read_native(path)) is not None:
        yield "ncu_report", report
    tool = find_tool(NCU)
    if tool is None:
        return
    folder = find_extras(tool.path)
    if folder is not None and (report := read_native(path, folder)) is not None:
        yield "Nsight Compute's ncu_report", report
    output = import_csv(tool.path, path)
    yield "ncu --import", "" if output is None else read_csv_text(output, path)


def _counted(report: NcuReport, file: NcuFile) -> NcuReport:
    """Return the report, with a warning if the file's blocks count more results than were read."""
    readable = len(report.launches) + report.skipped
    if readable == file.results:
        return report
    text = f"the file counts {file.results} results, {readable} of them could be read"
    return replace(report, warnings=(*report.warnings, text))


def import_csv(ncu: Path, report: Path, *, timeout_s: float = IMPORT_TIMEOUT_S) -> str | None:
    """Return the CSV that `ncu --import` prints, or None if ncu cannot read the report.

    Raise TraceFormatError if ncu does not start or takes longer than `timeout_s`.
    """
    argv = csv_argv(ncu, report.resolve())
    if "--print-kernel-base" not in argv:
        argv += ["--print-kernel-base", "mangled"]
    with tempfile.TemporaryDirectory(prefix="profharness-ncu-") as name:
        folder = Path(name)
        output, environment = folder / "output", child_environment(os.environ, folder)
        options = {"cwd": folder, "stderr": subprocess.DEVNULL}
        try:
            returncode = run_to_end(argv, output, environment, timeout_s, **options)
        except OSError as error:
            raise TraceFormatError(report, f"{ncu} does not start: {error.strerror}") from None
        if returncode is None:
            message = f"{ncu} --import took more than {timeout_s:g} s and was ended"
            raise TraceFormatError(report, message)
        return read_input(output).decode("utf-8", "replace") if returncode == 0 else None
