"""Raw reports of nsys and ncu: they hold the environment of their process, so a copy is made of
their export.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from profharness.errors import MissingExtraError, ProfharnessError, TraceFormatError, UsageError
from profharness.parse import SUFFIX, unpacked
from profharness.parse.ncu_csv import read_table, read_text
from profharness.profilers import require_tool
from profharness.profilers.base import ToolError
from profharness.profilers.nsys import export_report
from profharness.scrub.text import Cleaner, names_in, private_names

EMPTIED = ("Host Name", "Process Name")
NUMBERED = ("Process ID",)
EXPECTED = "a CSV of ncu (--csv --page raw)"


def private_names_in(path: Path) -> frozenset[str]:
    """Host and user names that the CSV tells of. Raises TraceFormatError as `scrub_ncu` does."""
    text = read_text(path)
    head, rows = read_table(text, path)
    at = head.index("Host Name") if "Host Name" in head else None
    hosts = set() if at is None else {row[at] for row in rows} - {""}
    return private_names(hosts) | names_in([text])


def private_columns(path: Path) -> list[str]:
    """The columns that name a host or a process in some row; none for another kind of CSV."""
    try:
        head, rows = _read(path)
    except TraceFormatError:
        return []
    places = {name: head.index(name) for name in EMPTIED if name in head}
    found = {
        name for row in rows for name, at in places.items() if row[at : at + 1] not in ([], [""])
    }
    return sorted(found)


def scrub_ncu(path: Path, out: IO[bytes], cleaner: Cleaner) -> None:
    """Write the copy: the same columns and rows, names emptied, processes numbered, texts cleaned;
    lines around the table are left out. Raises TraceFormatError for another kind of CSV, and for
    one that is cut off.
    """
    head, rows = read_table(read_text(path), path)
    text = io.TextIOWrapper(out, encoding="utf-8", newline="", write_through=True)
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow([cleaner.clean(name) for name in head])
    numbers: dict[str, str] = {"": ""}
    for row in rows:
        cells = []
        for name, value in zip(head, row, strict=True):
            if name in EMPTIED:
                value = ""
            elif name in NUMBERED:
                value = numbers.setdefault(value, str(len(numbers)))
            cells.append(cleaner.clean(value))
        writer.writerow(cells)
    text.detach()


def _read(path: Path) -> tuple[list[str], Iterator[list[str]]]:
    """The header and what stands behind it, whole or not."""
    rows = _rows(path)
    for row in rows:
        if "ID" in row[:1] and "Kernel Name" in row:
            return row, rows
    raise TraceFormatError(path, "no header with ID and Kernel Name", expected=EXPECTED)


def _rows(path: Path) -> Iterator[list[str]]:
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            yield from csv.reader(file)
    except (OSError, csv.Error) as error:
        raise TraceFormatError(path, f"cannot be read: {error}", expected=EXPECTED) from None


NSYS_REPORT = ".nsys-rep"
NCU_REPORT = ".ncu-rep"
# Suffix of a report, packed or not: what its export ends in.
EXPORTS = {
    f"{NSYS_REPORT}{SUFFIX}": ".sqlite",
    f"{NCU_REPORT}{SUFFIX}": ".csv",
    NSYS_REPORT: ".sqlite",
    NCU_REPORT: ".csv",
}
PRODUCTS = {".sqlite": "nsys", ".csv": "ncu"}


class StaleExportError(ProfharnessError):
    """The export beside a report cannot be trusted, and another one cannot be made."""


def report_suffix(name: str) -> str | None:
    """The suffix by which a file is a raw report; None for any other."""
    return next((suffix for suffix in EXPORTS if name.lower().endswith(suffix)), None)


def check_name(source: Path, output: Path) -> None:
    """Raises UsageError when the name of a copy promises what the copy cannot be."""
    suffix = report_suffix(source.name)
    wrong = report_suffix(output.name)
    if suffix is None:
        if wrong is not None:
            raise UsageError(
                f"{output}: a copy is never a {wrong}; keep the suffix of {source.name}"
            )
        return
    made = EXPORTS[suffix]
    if not output.name.lower().endswith((made, f"{made}{SUFFIX}")):
        raise UsageError(
            f"{output}: the copy of a {suffix} is a {made}, because a report holds the "
            f"environment of its process; name it {_stem(output.name)}{made}"
        )


def exported(report: Path, made: Path) -> Path:
    """An export of the report: the one beside it if it is newer than the report and an export of
    that product, else a new one at `made`.

    Raises StaleExportError where the one beside it will not do and no tool is there to make
    another, and what the exporters raise.
    """
    suffix = report_suffix(report.name) or ""
    beside = report.with_name(report.name[: -len(suffix)] + EXPORTS[suffix])
    doubt = _doubt(beside, report) if beside.is_file() else None
    if beside.is_file() and doubt is None:
        return beside
    made.parent.mkdir(parents=True, exist_ok=True)
    try:
        with unpacked(report) as plain:
            _export(plain, made)
    except (ToolError, MissingExtraError) as error:
        if doubt is None:
            raise
        raise StaleExportError(
            f"{report}: {beside.name} beside it {doubt}, so it is not used in its place, and "
            f"another export cannot be made: {error}"
        ) from None
    return made


def _export(report: Path, output: Path) -> None:
    if report.name.lower().endswith(NSYS_REPORT):
        export_report(report, output, require_tool("nsys").path)
    else:
        from profharness.parse.ncu_readers import report_to_csv

        report_to_csv(report, output)


def _doubt(export: Path, report: Path) -> str | None:
    """Why an export is not to be taken for that of the report; None when it may be."""
    if export.stat().st_mtime_ns < report.stat().st_mtime_ns:
        return "is older than the report"
    product = PRODUCTS[export.suffix]
    try:
        _CHECKS[product](export)
    except TraceFormatError:
        return f"is no whole export of {product}"
    return None


def _check_nsys(export: Path) -> None:
    from profharness.parse.nsys_export import opened

    with opened(export, export):
        pass


def _check_ncu(export: Path) -> None:
    from profharness.parse.ncu_csv import read_table, read_text

    read_table(read_text(export), export)


_CHECKS: dict[str, Callable[[Path], None]] = {"nsys": _check_nsys, "ncu": _check_ncu}


def _stem(name: str) -> str:
    suffix = report_suffix(name)
    return name[: -len(suffix)] if suffix else Path(name).stem
