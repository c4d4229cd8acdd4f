"""A report as CSV in ncu's raw layout, with every digit and without names of hosts, users, paths
or processes.
"""

from __future__ import annotations

import csv
from pathlib import Path

from profharness.parse.ncu_csv import OWN_COLUMNS, PUSH_POP, START_END
from profharness.parse.ncu_rows import CONSTANTS, NcuLaunch, NcuReport, NvtxRange, Triple

UNKNOWN_ID = "0"
COLUMNS = tuple(column for column in OWN_COLUMNS if column != "Kernel Time")


def report_to_csv(report: Path, output: Path) -> None:
    """Write an .ncu-rep as the table that `ncu --csv --page raw --print-units base
    --print-kernel-base mangled` prints, which `parse_ncu` reads back to the same launches and
    metrics.

    Doubles are written in full, where ncu rounds to two decimals. Process ids and the threads of
    ranges are 0, process and host names empty. Raises TraceFormatError for what is no report and
    MissingReaderError where nothing can read it.
    """
    from profharness.parse.ncu_readers import read_report

    write_csv(read_report(report), output)


def write_csv(report: NcuReport, output: Path) -> None:
    """Write kernels as `report_to_csv` does."""
    names = sorted({name for one in report.launches for name in (*one.values, *one.texts)})
    constants: dict[int, NcuLaunch] = {}
    with output.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\n")
        writer.writerow([*COLUMNS, *names])
        writer.writerow([*("" for _ in COLUMNS), *(report.units.get(name, "") for name in names)])
        for index, launch in enumerate(report.launches):
            source = constants.setdefault(launch.device, launch)
            cells = (
                _value(source if name.startswith(CONSTANTS) else launch, name) for name in names
            )
            writer.writerow([*_own(index, launch, source), *cells])


def _own(index: int, launch: NcuLaunch, source: NcuLaunch) -> list[str]:
    """The cells of ncu's own columns, in the order of COLUMNS."""
    ranges = f"{UNKNOWN_ID}  {_items(launch.push_pop)}" if launch.push_pop else ""
    own = {
        "ID": str(index),
        "Process ID": UNKNOWN_ID,
        PUSH_POP: ranges,
        START_END: _items(launch.start_end, numbered=True),
        "Kernel Name": launch.name,
        "Context": _value(launch, "launch__context_id"),
        "Stream": "" if launch.stream is None else str(launch.stream),
        "Block Size": _dims(launch, "block", launch.block),
        "Grid Size": _dims(launch, "grid", launch.grid),
        "Device": str(launch.device),
        "CC": ".".join(
            _value(source, f"device__attribute_compute_capability_{part}")
            for part in ("major", "minor")
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
    items = (
        f'"{f"{place}:" if numbered else ""}{one.domain}:{one.name}:none:none:none:none:ASCII:{one.name}"'
        for place, one in enumerate(ranges)
    )
    return "  ".join(items)
