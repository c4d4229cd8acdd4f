"""Replace raw reports of nsys and ncu with exports, and scrub exports of ncu.

Raw reports are never copied, because they contain the environment of the profiled process.
"""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import IO

from profharness.errors import MissingExtraError, ProfharnessError, TraceFormatError, UsageError
from profharness.recording.profilers import require_tool
from profharness.recording.profilers.base import ToolError
from profharness.recording.profilers.nsys import export_report
from profharness.rows import NSYS
from profharness.scrub.allowed import NUMBER_CELL, Scrubber
from profharness.traces import GZIP_SUFFIX, unpacked
from profharness.traces.ncu_csv import PUSH_POP, START_END, nvtx_ranges, read_table, read_text
from profharness.traces.ncu_readers import report_to_csv
from profharness.traces.nsys_export import opened

EMPTIED = ("Host Name", "Process Name")
NUMBERED = ("Process ID",)
NVTX = (PUSH_POP, START_END)
TEXTS = ("Kernel Name", "device__attribute_display_name", *NVTX)
EXPECTED = "a CSV file from ncu (--csv --page raw)"
_NVTX_REST = re.compile(r"(?:[\s\"<>:;,0-9]|none|default domain|ASCII|Unicode|Registered)*")
_TRIPLE = re.compile(r"\([0-9]{1,10}, [0-9]{1,10}, [0-9]{1,10}\)")


def scrub_ncu(path: Path, out: IO[bytes], scrubber: Scrubber) -> None:
    """Write a scrubbed copy of a CSV file of ncu.

    The copy contains only the table. Host and process names are emptied, process ids are replaced
    with small numbers, and texts are cleaned. Raise TraceFormatError if the file is another kind of
    CSV or is cut off.
    """
    whole = read_text(path)
    head, rows = read_table(whole, path)
    text = io.TextIOWrapper(out, encoding="utf-8", newline="", write_through=True)
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow([scrubber.clean(name, where="header") for name in head])
    if not whole.lstrip("\ufeff\n").startswith(('"ID"', "ID,")):
        scrubber.record("text", "lines before the table", "header")
    numbers: dict[str, str] = {"": ""}
    for row in rows:
        cells = []
        for name, value in zip(head, row, strict=True):
            cleaned = "" if name in EMPTIED else _clean_cell(name, value, scrubber)
            if name in NUMBERED:
                cleaned = numbers.setdefault(value, str(len(numbers)))
            if cleaned != value and (name in EMPTIED or name in NUMBERED):
                scrubber.record("column", "names a host or a process", name)
            cells.append(cleaned)
        writer.writerow(cells)
    text.detach()


def _clean_cell(column: str, cell: str, scrubber: Scrubber) -> str:
    """Return the cleaned text of a cell of the CSV.

    In a column of NVTX ranges, each domain and each name is cleaned separately.
    """
    if column in NUMBERED or _TRIPLE.fullmatch(cell):
        return cell
    if NUMBER_CELL.fullmatch(cell) and column not in TEXTS and scrubber.is_known_key(column):
        return cell
    if column not in NVTX:
        return scrubber.clean(cell, where=column)
    ranges = nvtx_ranges(cell, numbered=column == START_END)
    texts = {text for item in ranges for text in item}
    cleaned = cell
    for text in sorted(texts, key=lambda text: (-len(text), text)):
        cleaned = cleaned.replace(text, scrubber.clean(text, where=column))
    # apart from domains and names, the cell may contain only punctuation, numbers and words of ncu
    left = cell
    for text in sorted(texts, key=len, reverse=True):
        left = left.replace(text, "")
    return cleaned if _NVTX_REST.fullmatch(left) else scrubber.clean(cell, where=column)


EXPORTS = {
    f"{report}{packed}": export
    for packed in (GZIP_SUFFIX, "")
    for report, export in ((".nsys-rep", ".sqlite"), (".ncu-rep", ".csv"))
}
"""Maps the suffix of a raw report, which may be compressed, to the suffix of its export."""
SUFFIXES = (".json.gz", ".sqlite.gz", ".csv.gz", ".db.gz", *EXPORTS)
"""Suffixes that `split_name` recognizes."""


class StaleExportError(ProfharnessError):
    """The export beside a report is invalid or too old, and no other export can be made."""


def split_name(name: str) -> tuple[str, str]:
    """Split a file name into its stem and suffix.

    The suffix of a report or a compressed trace is returned in lower case.
    """
    for suffix in SUFFIXES:
        if name.lower().endswith(suffix):
            return name[: -len(suffix)], suffix
    return Path(name).stem, Path(name).suffix


def check_name(source: Path, output: Path) -> None:
    """Raise UsageError if the suffix of an output file does not fit the copy of the source."""
    (_, suffix), (stem, wrong) = split_name(source.name), split_name(output.name)
    made = EXPORTS.get(suffix)
    if made is None:
        if wrong in EXPORTS:
            message = (
                f"{output}: the copy cannot be a {wrong} file; keep the suffix of {source.name}"
            )
            raise UsageError(message)
    elif not output.name.lower().endswith((made, f"{made}{GZIP_SUFFIX}")):
        stem = stem if wrong in EXPORTS else output.stem
        raise UsageError(
            f"{output}: a {suffix} file contains the environment of its process, so its copy "
            f"is a {made} file; name the copy {stem}{made}"
        )


def exported(report: Path, made: Path) -> Path:
    """Return the path of an export of a report.

    If the export beside the report is valid and not older than the report, return the path of this
    export. Otherwise, export the report to `made`. Raise StaleExportError if the existing export is
    invalid or too old and no other export can be made. If there is no export, raise any error of
    the exporter.
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
                export_report(plain, made, require_tool(NSYS).path)
            else:
                report_to_csv(plain, made)
    except (ToolError, MissingExtraError) as error:
        if doubt is None:
            raise
        raise StaleExportError(
            f"{report}: {doubt}, and a new export cannot be made: {error}"
        ) from None
    return made


def _doubt(export: Path, report: Path) -> str | None:
    """Return why an export cannot be used instead of a report, or None if it can be used."""
    if export.stat().st_mtime_ns < report.stat().st_mtime_ns:
        return f"the existing export {export.name} is older than the report"
    try:
        if export.suffix == ".csv":
            read_table(read_text(export), export)
        else:
            with opened(export, export):
                pass
    except TraceFormatError:
        tool = "ncu" if export.suffix == ".csv" else "nsys"
        return f"the existing file {export.name} is not a complete {tool} export"
    return None
