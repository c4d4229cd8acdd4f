"""ncu's CSV without host, process names and process ids."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from profharness.errors import TraceFormatError
from profharness.parse.ncu_csv import read_table, read_text
from profharness.scrub.names import names_in
from profharness.scrub.text import Cleaner, private_names

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
