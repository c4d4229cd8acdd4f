"""Raw reports of nsys and ncu hold the environment of their process; their exports are copied."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import IO

from profharness.errors import MissingExtraError, ProfharnessError, TraceFormatError, UsageError
from profharness.parse.ncu_csv import PUSH_POP, START_END, nvtx_ranges, read_table, read_text
from profharness.parse.ncu_readers import report_to_csv
from profharness.parse.nsys_export import opened
from profharness.parse.packed import SUFFIX, unpacked
from profharness.profilers import require_tool
from profharness.profilers.base import ToolError
from profharness.profilers.nsys import export_report
from profharness.scrub.text import Cleaner, names_in, private_names

EMPTIED = ("Host Name", "Process Name")
NUMBERED = ("Process ID",)
NVTX = (PUSH_POP, START_END)
EXPECTED = "a CSV of ncu (--csv --page raw)"


def private_names_in(path: Path) -> frozenset[str]:
    """Host and user names that the CSV tells of. Raises TraceFormatError as `scrub_ncu` does."""
    text = read_text(path)
    head, rows = read_table(text, path)
    at = head.index("Host Name") if "Host Name" in head else None
    hosts = set() if at is None else {row[at] for row in rows} - {""}
    return private_names(hosts) | names_in([text])


def private_cells(path: Path, opened: IO[bytes], cleaner: Cleaner) -> list[tuple[str, str, str]]:
    """Column, kind and text of what only the columns of an ncu table tell: hosts, processes, and what
    stands in NVTX names between colons. The table need not be whole.
    """
    findings: dict[tuple[str, str, str], None] = {}
    head: list[str] = []
    file = io.TextIOWrapper(opened, encoding="utf-8-sig", errors="replace", newline="")
    try:
        for row in csv.reader(file):
            if not head:
                head = row if "ID" in row[:1] and "Kernel Name" in row else []
                continue
            for name, value in zip(head, row, strict=False):
                if name in EMPTIED and value:
                    findings[name, "private column", "names a host or a process"] = None
                elif name in NVTX:
                    texts = _nvtx_texts(name, value)
                    findings |= {
                        (name, *match): None for text in texts for match in cleaner.find(text)
                    }
    except csv.Error as error:
        if head:
            raise TraceFormatError(path, f"cannot be read: {error}", expected=EXPECTED) from None
    finally:
        file.detach()
    return sorted(findings)


def _nvtx_texts(column: str, cell: str) -> list[str]:
    """The domains and names of an NVTX cell, longest first."""
    ranges = nvtx_ranges(cell, numbered=column == START_END)
    texts = {text for item in ranges for text in (item.domain, item.name)}
    return sorted(texts, key=lambda text: (-len(text), text))


def _clean_cell(column: str, cell: str, cleaner: Cleaner) -> str:
    """In NVTX cells each name is cleaned by itself: the colons around it are not part of it."""
    if column in NVTX:
        for text in _nvtx_texts(column, cell):
            clean = cleaner.clean(text)
            cell = cell.replace(text, clean) if clean != text else cell
    return cleaner.clean(cell)


def scrub_ncu(path: Path, out: IO[bytes], cleaner: Cleaner) -> None:
    """Write the table alone: names emptied, processes numbered, texts cleaned.

    Raises TraceFormatError for another kind of CSV, and for one that is cut off.
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
            cells.append(_clean_cell(name, value, cleaner))
        writer.writerow(cells)
    text.detach()


NSYS_REPORT = ".nsys-rep"
NCU_REPORT = ".ncu-rep"
# Suffix of a report, packed or not: what its export ends in.
EXPORTS = {
    f"{NSYS_REPORT}{SUFFIX}": ".sqlite",
    f"{NCU_REPORT}{SUFFIX}": ".csv",
    NSYS_REPORT: ".sqlite",
    NCU_REPORT: ".csv",
}
# What splits the name of a trace, longest first.
SUFFIXES = (".json.gz", ".sqlite.gz", ".csv.gz", *EXPORTS)


class StaleExportError(ProfharnessError):
    """The export beside a report cannot be trusted, and another one cannot be made."""


def split_name(name: str) -> tuple[str, str]:
    """Stem and suffix; the suffixes of reports and packed traces are in small letters."""
    for suffix in SUFFIXES:
        if name.lower().endswith(suffix):
            return name[: -len(suffix)], suffix
    return Path(name).stem, Path(name).suffix


def check_name(source: Path, output: Path) -> None:
    """Raises UsageError when the name of a copy promises what the copy cannot be."""
    (_, suffix), (stem, wrong) = split_name(source.name), split_name(output.name)
    made = EXPORTS.get(suffix)
    if made is None:
        if wrong in EXPORTS:
            message = f"{output}: a copy is never a {wrong}; keep the suffix of {source.name}"
            raise UsageError(message)
    elif not output.name.lower().endswith((made, f"{made}{SUFFIX}")):
        stem = stem if wrong in EXPORTS else output.stem
        raise UsageError(
            f"{output}: the copy of a {suffix} is a {made}, because a report holds the "
            f"environment of its process; name it {stem}{made}"
        )


def exported(report: Path, made: Path) -> Path:
    """The export beside the report if it is newer and of that product, else a new one at `made`.

    Raises StaleExportError where the one beside it will not do and none can be made, and what the
    exporters raise.
    """
    stem, suffix = split_name(report.name)
    beside = report.with_name(f"{stem}{EXPORTS[suffix]}")
    doubt = _doubt(beside, report) if beside.is_file() else None
    if beside.is_file() and doubt is None:
        return beside
    made.parent.mkdir(parents=True, exist_ok=True)
    try:
        with unpacked(report) as plain:
            if made.suffix == ".sqlite":
                export_report(plain, made, require_tool("nsys").path)
            else:
                report_to_csv(plain, made)
    except (ToolError, MissingExtraError) as error:
        if doubt is None:
            raise
        raise StaleExportError(
            f"{report}: {beside.name} beside it {doubt}, so it is not used in its place, and "
            f"another export cannot be made: {error}"
        ) from None
    return made


def _doubt(export: Path, report: Path) -> str | None:
    """Why an export is not to be taken for that of the report; None when it may be."""
    if export.stat().st_mtime_ns < report.stat().st_mtime_ns:
        return "is older than the report"
    try:
        if export.suffix == ".csv":
            read_table(read_text(export), export)
        else:
            with opened(export, export):
                pass
    except TraceFormatError:
        return f"is no whole export of {'ncu' if export.suffix == '.csv' else 'nsys'}"
    return None
