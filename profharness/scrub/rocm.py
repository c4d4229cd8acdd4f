"""Scrub the files of AMD's profilers: databases, CSVs and JSON.

A copy contains only what is listed here. Host names, command lines, environments, addresses, and
the arguments of calls are left out. In the strings of columns, `$` marks a text, `@` a key of the
table of strings, `%` the id of a process or thread, `&` the id of a machine, and `{` the JSON that
contains the name of a range or the limits of a GPU. A column without a mark contains numbers.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sqlite3
from pathlib import Path
from typing import IO, Any

import msgspec

from profharness.errors import TraceFormatError
from profharness.scrub.allowed import NUMBER_CELL, Scrubber
from profharness.scrub.nsys import new_database
from profharness.traces.rocm import plain_name
from profharness.traces.rocpd import FORM
from profharness.traces.rocprof_table import COLUMNS
from profharness.traces.rocprofv3_json import decode_file
from profharness.traces.sqlite_file import database, quoted, table_columns

_PLACE = "id &nid %pid"
ROCPD = {
    "metadata": "id $tag $value",
    "string": "id $string",
    "info_node": "&id",
    "info_process": "%id &nid %pid",
    "info_thread": "%id &nid %pid %tid",
    "info_agent": (
        f"{_PLACE} $type absolute_index logical_index type_index $name $model_name $vendor_name "
        "$product_name $user_name {extdata"
    ),
    "info_queue": f"{_PLACE} $name",
    "info_stream": f"{_PLACE} $name",
    "info_kernel_symbol": (
        f"{_PLACE} $kernel_name $display_name kernarg_segment_size kernarg_segment_alignment "
        "group_segment_size private_segment_size sgpr_count arch_vgpr_count accum_vgpr_count"
    ),
    "info_pmc": f"{_PLACE} agent_id $target_arch $name $symbol $units $value_type",
    "event": "id @category_id stack_id parent_stack_id correlation_id {extdata",
    "pmc_event": "id event_id pmc_id value",
    "region": f"{_PLACE} %tid start end @name_id event_id",
    "kernel_dispatch": (
        f"{_PLACE} %tid agent_id kernel_id dispatch_id queue_id stream_id start end "
        "private_segment_size group_segment_size workgroup_size_x workgroup_size_y "
        "workgroup_size_z grid_size_x grid_size_y grid_size_z @region_name_id event_id"
    ),
    "memory_copy": (
        f"{_PLACE} %tid start end @name_id dst_agent_id src_agent_id size queue_id stream_id "
        "@region_name_id event_id"
    ),
}
# The tables of rocprof v1, and those of rpd, whose names do not end with an id.
OTHERS = {
    "KERN": (
        "Index $KernelName gpu-id queue-id queue-index %pid %tid grd wgr lds scr arch_vgpr "
        "accum_vgpr sgpr wave_size DispatchNs BeginNs EndNs CompleteNs DurationNs"
    ),
    "rocpd_metadata": "id $tag $value",
    "rocpd_string": "id $string",
    "rocpd_api": "id %pid %tid start end @apiName_id",
    "rocpd_op": "id gpuId queueId sequenceId start end @description_id @opType_id",
    "rocpd_api_ops": "id api_id op_id",
    "rocpd_kernelapi": (
        "api_ptr_id gridX gridY gridZ workgroupX workgroupY workgroupZ groupSegmentSize "
        "privateSegmentSize @kernelName_id"
    ),
    "rocpd_copyapi": "api_ptr_id size width height kind dstDevice srcDevice sync pinned",
}
METADATA = {"schema_version": re.compile(r"[0-9]{1,3}"), "session_count": re.compile(r"[0-9]{1,3}")}
LIMITS = (
    "cu_count", "wave_front_size", "max_waves_per_cu", "lds_size_in_kb", "gfx_target_version",
    "workgroup_max_size",
)  # fmt: skip
NAMES = "|".join(sorted(ROCPD, key=len, reverse=True))
_TABLE = re.compile(rf"rocpd_(?P<name>{NAMES})(?P<recording>_[0-9a-f]{{8}}(?:_[0-9a-f]+)+)")
_NEW = "00000000_0000_0000_0000_000000000000"  # replaces the id of a recording
GUID = "guid"  # the column with the id of the recording
_EMPTY = "('', 0, '{}')"
BATCH = 10_000
NUMBERED = ("processid", "threadid", "pid", "tid")
EMPTIED = ("guid", "sig", "obj")
TEXTS = ("kernelname", "countername", "direction", "kind", "agentid", "sourceagentid", "name",
         "destinationagentid")  # fmt: skip
JSON_IDS = ("pid", "thread_id")
# The members of objects that may have other members as well
JSON_KEYS = {
    "agents": {
        *("id", "type", "node_id", "logical_node_type_id", "product_name", "model_name", "name"),
        *(*LIMITS, "mem_banks"),
    },
    "id": {"handle"},
    "mem_banks": {"size_in_bytes"},
    "kernel_symbols": {
        *("kernel_id", "kernel_name", "formatted_kernel_name", "group_segment_size"),
        *("arch_vgpr_count", "accum_vgpr_count", "sgpr_count"),
    },
}
HEADERS = frozenset({
    *" ".join(COLUMNS.values()).split(), *NUMBERED, *EMPTIED, "kind", "kernelid", "queueindex",
    "wavesize", "dispatchns", "completens", "durationns",
})  # fmt: skip
_AGENT = re.compile(r"(?:Agent |GPU )?[0-9]{1,4}")


def scrub_rocm_database(path: Path, out: IO[bytes], scrubber: Scrubber) -> None:
    """Write a scrubbed copy of a database of rocprofv3, rpd or rocprof.

    Each process or thread id is replaced with the same small number in all tables. Texts are copied
    only if a copied row refers to them. Raise TraceFormatError if the file is not such a database.
    """
    with database(path, path, FORM) as source, new_database(path, out, scrubber) as target:
        copied = _Copy(source, target, scrubber)
        if not copied.tables:
            raise TraceFormatError(
                path, "the file contains no tables from an AMD profiler", expected=FORM.expected
            )
        copied.copy()


def clean_name(text: str, scrubber: Scrubber, where: str) -> str:
    """Return a cleaned text. The quotes and suffixes of a kernel's name remain as they are."""
    stem = plain_name(text)
    return text.replace(stem, scrubber.clean(stem, where=where), 1) if stem else ""


class _Table:
    """A table of the source: its names in the source and in the copy, and its columns by mark."""

    def __init__(self, name: str, target: str, strings: str, marked: str, present: Any) -> None:
        self.name, self.target, self.strings = name, target, strings
        words = [
            (word.lstrip("$@%&{"), word[0] if word[0] in "$@%&{" else "") for word in marked.split()
        ]
        self.marks = {column: mark for column, mark in words if column in present}
        self.left = sorted(present - self.marks.keys())
        self.guid = target[-len(_NEW) :].replace("_", "-")


class _Copy:
    """Copies the allowed contents of a database into a new file."""

    def __init__(
        self, source: sqlite3.Connection, target: sqlite3.Connection, scrubber: Scrubber
    ) -> None:
        self.source, self.target, self.scrubber = source, target, scrubber
        self.tables: list[_Table] = []
        recordings: dict[str, str] = {}
        for name, present in table_columns(source).items():
            if match := _TABLE.fullmatch(name):
                number = len(recordings) + 1
                made = f"_{_NEW[:-6]}{number:06d}"
                suffix = recordings.setdefault(match["recording"], made)
                if suffix != match["recording"]:
                    scrubber.record("id", "a recording's id", "schema")
                kind, strings = match["name"], f"rocpd_string{match['recording']}"
                table = _Table(name, f"rocpd_{kind}{suffix}", strings, ROCPD[kind], present)
            elif name in OTHERS:
                table = _Table(name, name, "rocpd_string", OTHERS[name], present)
            else:
                if not name.startswith("sqlite_") and self._has_rows(name, "1"):
                    is_known = scrubber.is_known_name(name)
                    scrubber.record("table", name if is_known else "an unknown table", "schema")
                continue
            self.tables.append(table)
        self.numbers, self.machines = self._numbers("%"), self._numbers("&")
        self.used: dict[str, set[int]] = {}  # keys of copied rows, by the table of strings

    def copy(self) -> None:
        last = [table for table in self.tables if table.name == table.strings]
        for table in [*(each for each in self.tables if each not in last), *last]:
            self._copy_table(table)
        views: dict[str, list[str]] = {}
        for table in self.tables:
            if match := _TABLE.fullmatch(table.name):
                views.setdefault(f"rocpd_{match['name']}", []).append(table.target)
        for name, parts in views.items():  # other programs read these views
            selects = " UNION ALL ".join(f"SELECT * FROM {quoted(part)}" for part in parts)
            self.target.execute(f"CREATE VIEW {name} AS {selects}")

    def _copy_table(self, table: _Table) -> None:
        place = re.sub(r"_[0-9a-f]{8}_.*", "", table.name)
        for column in table.left:
            filled = f"{quoted(column)} IS NOT NULL AND {quoted(column)} NOT IN {_EMPTY}"
            if column == GUID:
                filled = f"{GUID} IS NOT '{table.guid}'"
            if self._has_rows(table.name, filled):
                shown = f"{place}.{column}" if self.scrubber.is_known_name(column) else place
                self.scrubber.record("column", "an unknown column", shown)
        columns = list(table.marks)
        has_guid = GUID in table.left
        declared = (f"{quoted(name)}{' INTEGER PRIMARY KEY' * (name == 'id')}" for name in columns)
        names = ", ".join([*declared, *([f"{GUID} DEFAULT '{table.guid}'"] if has_guid else [])])
        self.target.execute(f"CREATE TABLE {quoted(table.target)} ({names})")
        given = ", ".join(map(quoted, columns))
        sql = f"SELECT {given} FROM {quoted(table.name)} ORDER BY rowid"
        into = (
            f"INSERT INTO {quoted(table.target)} ({given}) VALUES ({', '.join('?' * len(columns))})"
        )
        strings = [at for at, mark in enumerate(table.marks.values()) if mark == "@"]
        used = self.used.setdefault(table.strings, set())
        cursor = self.source.execute(sql)
        while rows := cursor.fetchmany(BATCH):
            kept = [done for row in rows if (done := self._row(table, place, row)) is not None]
            used.update(row[at] for row in kept for at in strings if row[at] is not None)
            self.target.executemany(into, kept)

    def _row(self, table: _Table, place: str, row: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return a row for the copy, or None if it is left out."""
        values = dict(zip(table.marks, row, strict=True))
        if table.name == table.strings and values.get("id") not in self.used[table.strings]:
            if values.get("string"):
                self.scrubber.record("text", "text that no copied row refers to", place)
            return None
        if "metadata" in place:
            form = METADATA.get(str(values.get("tag")))
            if form is None or not form.fullmatch(str(values.get("value"))):
                self.scrubber.record("row", "an unknown row", place)
                return None
            return row
        done = []
        for (column, mark), value in zip(table.marks.items(), row, strict=True):
            cleaned = self._value(mark, value, f"{place}.{column}")
            if cleaned != value and mark != "$":
                self.scrubber.record("value", "an unknown value", f"{place}.{column}")
            done.append(cleaned)
        return tuple(done)

    def _value(self, mark: str, value: Any, where: str) -> Any:
        if mark == "$":
            return clean_name(value, self.scrubber, where) if isinstance(value, str) else None
        if mark == "{":
            return self._details(value, where)
        if mark == "%":
            return self.numbers.get(value) if isinstance(value, int) else None
        if mark == "&":
            return self.machines.get(value) if isinstance(value, int) else None
        # rpd writes an empty text for an unknown number
        return value if isinstance(value, int | float) or value == "" else None

    def _details(self, text: object, where: str) -> str:
        """Return the name of a range, or the limits of a GPU, as JSON."""
        try:
            facts = json.loads(text) if isinstance(text, str) else {}
        except (ValueError, RecursionError):
            facts = {}
        if not isinstance(facts, dict):
            return "{}"
        kept: dict[str, Any] = {
            key: facts[key] for key in LIMITS if isinstance(facts.get(key), int)
        }
        banks = facts.get("mem_banks")
        sizes = (
            [bank.get("size_in_bytes") for bank in banks if isinstance(bank, dict)]
            if isinstance(banks, list)
            else []
        )
        if sizes:
            kept["mem_banks"] = [{"size_in_bytes": size} for size in sizes if isinstance(size, int)]
        if isinstance(facts.get("message"), str):
            kept["message"] = self.scrubber.clean(facts["message"], where=where)
        return text if isinstance(text, str) and kept == facts else json.dumps(kept)

    def _has_rows(self, table: str, where: str) -> bool:
        sql = f"SELECT 1 FROM {quoted(table)} WHERE {where} LIMIT 1"
        return self.source.execute(sql).fetchone() is not None

    def _numbers(self, mark: str) -> dict[int, int]:
        """Map each id to the number (0, 1, 2, …) that replaces it in the copy."""
        ids = {0}
        for table in self.tables:
            for column in [name for name, each in table.marks.items() if each == mark]:
                sql = f"SELECT DISTINCT {quoted(column)} FROM {quoted(table.name)}"
                ids.update(value for (value,) in self.source.execute(sql) if isinstance(value, int))
        return {value: number for number, value in enumerate([0, *sorted(ids - {0})])}


def scrub_rocm_csv(path: Path, out: IO[bytes], scrubber: Scrubber) -> None:
    """Write a scrubbed copy of a CSV of rocprofv3 or rocprof.

    Raise TraceFormatError if the file is cut off.
    """
    text = io.TextIOWrapper(out, encoding="utf-8", newline="", write_through=True)
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    numbers: dict[str, str] = {"": ""}
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            rows = csv.reader(file)
            head = next(rows, [])
            keys = [re.sub(r"[\W_]+", "", name).lower() for name in head]
            writer.writerow(
                [
                    name if key in HEADERS else scrubber.clean(name, where="header")
                    for name, key in zip(head, keys, strict=True)
                ]
            )
            for row in rows:
                if len(row) != len(head):
                    raise TraceFormatError(path, "a row is cut off", expected="a complete CSV")
                cells = [
                    _cell(name, key, value, numbers, scrubber)
                    for name, key, value in zip(head, keys, row, strict=True)
                ]
                writer.writerow(cells)
    except csv.Error as error:
        raise TraceFormatError(path, f"damaged: {error}", expected="a complete CSV") from None
    text.detach()


def _cell(name: str, key: str, value: str, numbers: dict[str, str], scrubber: Scrubber) -> str:
    if key in EMPTIED or key in NUMBERED:
        done = "" if key in EMPTIED else numbers.setdefault(value, str(len(numbers)))
        if done != value:
            scrubber.record("column", "names a machine or a process", name)
        return done
    is_number = re.fullmatch(r"-?[0-9]{1,20}(?:\.[0-9]{1,20})?", value) or NUMBER_CELL.fullmatch(
        value
    )
    if key not in TEXTS and is_number:
        return value
    if _AGENT.fullmatch(value):
        return value
    return clean_name(value, scrubber, name)


def scrub_rocm_json(path: Path, out: IO[bytes], scrubber: Scrubber) -> None:
    """Write a scrubbed copy of a JSON of rocprofv3, with only the members that are read.

    Raise TraceFormatError if the file is damaged, cut off or too large.
    """
    data, file = decode_file(path)
    try:
        whole = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        expected = "a JSON file from rocprofv3"
        raise TraceFormatError(path, f"damaged: {error}", expected=expected) from None
    plain = msgspec.to_builtins(file)
    ids = sorted(_ids(plain) - {0})
    cleaned = _json_value(
        plain, "", {0: 0} | {value: at for at, value in enumerate(ids, 1)}, scrubber
    )
    if cleaned != whole:
        what = "members that profharness does not read, and process ids"
        scrubber.record("members", what, "file")
    out.write(msgspec.json.encode(cleaned))


def _ids(value: Any) -> set[int]:
    """Return the ids of processes and threads in a JSON value."""
    if isinstance(value, list):
        return {each for item in value for each in _ids(item)}
    if not isinstance(value, dict):
        return set()
    own = {value[key] for key in JSON_IDS if isinstance(value.get(key), int)}
    return own | {each for item in value.values() for each in _ids(item)}


def _json_value(value: Any, key: str, numbers: dict[int, int], scrubber: Scrubber) -> Any:
    if isinstance(value, list):
        return [_json_value(item, key, numbers, scrubber) for item in value]
    if isinstance(value, dict):
        wanted = JSON_KEYS.get(key)
        return {
            name: _json_value(item, name, numbers, scrubber)
            for name, item in value.items()
            if wanted is None or name in wanted
        }
    if key in JSON_IDS:
        return numbers.get(value) if isinstance(value, int) else None
    return scrubber.clean(value, where=key) if isinstance(value, str) else value
