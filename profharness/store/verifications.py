"""The checks of `verify` in the store: in with their cells, out as rows, and which backends they
show to be wrong in the surroundings of a run.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from profharness.config import Config, parse_config

if TYPE_CHECKING:
    from profharness.cases import VerificationRow
    from profharness.devices import Peaks
    from profharness.run import Cell


_ROWS = """SELECT r.run, v.asked, cf.label, v.case_name, c.backend, v.what, v.error, v.allowance,
    v.relative_error, v.relative_allowance, v.passed, v.message, c.status
    FROM verifications v JOIN cells c ON c.id = v.cell_id JOIN runs r ON r.id = c.run_id
    JOIN configs cf ON cf.id = c.config_id"""
_SURROUNDINGS = ("torch", "gpu", "device_type", "flash_attention_impl", "cudnn")
FORWARD = ("out", "inputs")


def insert_verifications(
    connection: sqlite3.Connection, cells: Iterable[Cell], ids: Mapping[str, int]
) -> None:
    """Keep the checks of the cells, whose ids are given by their names."""
    connection.executemany(
        "INSERT INTO verifications (cell_id, ordinal, asked, case_name, what, error, allowance, "
        "relative_error, relative_allowance, passed, message) VALUES (?,?,?,?,?,?,?,?,?,?,?)",
        (
            (
                ids[cell.cell], ordinal, cell.asked or cell.config.label, cell.case or "",
                check.what, check.error, check.allowance, check.relative_error,
                check.relative_allowance, None if check.passed is None else int(check.passed),
                check.message,
            )
            for cell in cells
            for ordinal, check in enumerate(cell.checks)
        ),
    )  # fmt: skip


def verification_rows(connection: sqlite3.Connection, run: str) -> list[VerificationRow]:
    """All checks of a run, in its order."""
    found = connection.execute(f"{_ROWS} WHERE r.run = ? ORDER BY c.id, v.ordinal", (run,))
    return [_row(row) for row in found]


def wrong_backends(connection: sqlite3.Connection, run: str) -> set[tuple[str, str]]:
    """(config label, backend) of the run's cells that a check in this store shows to be wrong.

    Checks count that were made by any run on the same device with the same torch and, for an
    implementation, the same code. Of each check the latest counts. A check of a gradient says
    nothing against a forward cell.
    """
    mine = _environments(connection, "r.run = ?", (run,))
    here = next(iter(mine.values()), {})
    runs = _environments(connection, "r.id IN (SELECT c.run_id FROM cells c "
                         "JOIN verifications v ON v.cell_id = c.id)", ())  # fmt: skip
    alike = {
        name: each for name, each in runs.items() if _surroundings(each) == _surroundings(here)
    }
    latest: dict[tuple[Config, str], dict[tuple[str, str], bool]] = {}
    for row in connection.execute(f"{_ROWS} WHERE v.passed IS NOT NULL ORDER BY r.created, r.id"):
        told = _row(row)
        if told.run in alike and _code(alike[told.run], told.backend) == _code(here, told.backend):
            known = latest.setdefault((_problem(told.asked), told.backend), {})
            known[(told.case, told.what)] = bool(told.passed)
    cells = connection.execute(
        "SELECT DISTINCT cf.label, c.backend FROM cells c JOIN runs r ON r.id = c.run_id "
        "JOIN configs cf ON cf.id = c.config_id WHERE r.run = ?",
        (run,),
    )
    return {
        (label, backend)
        for label, backend in cells
        if _is_wrong(latest.get((_problem(label), backend), {}), parse_config(label).bwd)
    }


def _is_wrong(known: Mapping[tuple[str, str], bool], bwd: bool) -> bool:
    return any(not passed for (_, what), passed in known.items() if bwd or what in FORWARD)


def _problem(label: str) -> Config:
    return replace(parse_config(label), bwd=False, dropout=0.0)


def _environments(
    connection: sqlite3.Connection, where: str, values: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    found = connection.execute(
        "SELECT r.run, e.data FROM runs r JOIN environments e ON e.id = r.environment_id "
        f"WHERE {where}",
        values,
    )
    return {run: json.loads(data) for run, data in found}


def _surroundings(environment: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(environment.get(key) for key in _SURROUNDINGS)


def _code(environment: Mapping[str, Any], backend: str) -> Any:
    return (environment.get("backend_code") or {}).get(backend)


def _row(row: tuple[Any, ...]) -> VerificationRow:
    from profharness.cases import VerificationRow

    passed = None if row[10] is None else bool(row[10])
    return VerificationRow(*(*row[:10], passed, *row[11:]))


def device_name(environment: Mapping[str, Any]) -> str | None:
    """The name under which a device's peaks are kept: the GPU's, else the processor's."""
    gpu = environment.get("gpu")
    if gpu or environment.get("device_type") == "cuda":
        return str(gpu) if gpu else None
    cpu = environment.get("cpu")
    return str(cpu) if cpu else None


def insert_peaks(
    connection: sqlite3.Connection, peaks: Peaks, created: str, environment: Mapping[str, Any]
) -> None:
    """Keep one measurement with the environment that it was made in."""
    connection.execute(
        "INSERT INTO peaks (device, created, bandwidth_bytes_per_s, flops_per_s, l2_bytes, "
        "num_sms, origin, environment) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (
            peaks.device,
            created,
            peaks.bandwidth_bytes_per_s,
            json.dumps(peaks.flops_per_s),
            peaks.l2_bytes,
            peaks.num_sms,
            peaks.origin,
            json.dumps(environment, sort_keys=True),
        ),
    )


def measured_peaks(connection: sqlite3.Connection, device: str) -> Peaks | None:
    """The newest measurement of a device; None where there is none."""
    row = connection.execute(
        "SELECT bandwidth_bytes_per_s, flops_per_s, l2_bytes, num_sms, origin FROM peaks "
        "WHERE device = ? ORDER BY id DESC LIMIT 1",
        (device,),
    ).fetchone()
    if row is None:
        return None
    from profharness.devices import MEASURED, Peaks

    return Peaks(device, MEASURED, row[0], json.loads(row[1]), *row[2:])


def peaks_of(
    connection: sqlite3.Connection, environment: Mapping[str, Any], source: str | None
) -> Peaks | None:
    """Peaks of an environment's device: measured if there, else from the data sheet. source asks
    for one of the two alone.
    """
    from profharness.devices import MEASURED, data_sheet

    device = device_name(environment)
    if device is None:
        return None
    if source in (None, MEASURED):
        found = measured_peaks(connection, device)
        if found is not None or source == MEASURED:
            return found
    return data_sheet(device)
