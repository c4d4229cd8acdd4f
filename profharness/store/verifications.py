"""Query the checks of `verify` and the verdicts on cells, and store and query measured peaks."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from profharness.attention.cases import VerificationRow
from profharness.attention.config import Config, parse_config
from profharness.devices import MEASURED, Peaks, data_sheet
from profharness.store.tables import insert_row, records

_ROWS = """SELECT r.run, v.asked, cf.label AS config, v.case_name AS "case", c.backend, v.what,
    v.error, v.allowance, v.relative_error, v.relative_allowance, v.passed, v.message, c.status
    FROM verifications v JOIN cells c ON c.id = v.cell_id JOIN runs r ON r.id = c.run_id
    JOIN configs cf ON cf.id = c.config_id"""
_SAME_ENVIRONMENT = ("torch", "gpu", "device_type", "flash_attention_impl", "cudnn")
FORWARD = ("out", "inputs")


def verification_rows(connection: sqlite3.Connection, run: str) -> list[VerificationRow]:
    """Return all checks of a run, in the order of the run."""
    return _rows(connection, "WHERE r.run = ? ORDER BY c.id, v.ordinal", run)


def _rows(connection: sqlite3.Connection, where: str, *values: str) -> list[VerificationRow]:
    rows = records(connection, f"{_ROWS} {where}", values)
    passed = {0: False, 1: True, None: None}
    return [VerificationRow(**(row | {"passed": passed[row["passed"]]})) for row in rows]


def verdicts(connection: sqlite3.Connection, run: str) -> dict[tuple[str, str], bool]:
    """Return whether each (config label, backend) of the run's cells passed its checks.

    Checks of all runs are used that had the same device, the same PyTorch and, for a backend whose
    code is recorded, the same code. If a check was repeated, only its latest result is used. If any
    check failed, the cell failed. Checks of gradients are ignored for a cell without a backward
    pass. A cell passes only if its own config was checked, including the gradients if the cell has
    a backward pass.
    """
    here = _environments(connection, "r.run = ?", run).get(run, {})
    verified = "r.id IN (SELECT c.run_id FROM cells c JOIN verifications v ON v.cell_id = c.id)"
    environments = {
        name: environment
        for name, environment in _environments(connection, verified).items()
        if all(environment.get(key) == here.get(key) for key in _SAME_ENVIRONMENT)
    }
    # by problem and backend, then by case, checked value, and whether the cell's own config was
    # checked
    latest: dict[tuple[Config, str], dict[tuple[str, str, bool], bool]] = {}
    # oldest first, so that a later check replaces an earlier one
    for row in _rows(connection, "WHERE v.passed IS NOT NULL ORDER BY r.created, r.id"):
        environment = environments.get(row.run)
        if environment is not None and _code(environment, row.backend) == _code(here, row.backend):
            problem = _problem(row.asked)
            checks = latest.setdefault((problem, row.backend), {})
            own = _problem(row.config) == problem
            checks[row.case, row.what, own] = bool(row.passed)
    cells = connection.execute(
        "SELECT DISTINCT cf.label, c.backend FROM cells c JOIN runs r ON r.id = c.run_id "
        "JOIN configs cf ON cf.id = c.config_id WHERE r.run = ?",
        (run,),
    )
    by_cell = {}
    for label, backend in cells:
        bwd = parse_config(label).bwd
        passed = {
            check: passed
            for check, passed in latest.get((_problem(label), backend), {}).items()
            if bwd or check[1] in FORWARD
        }
        directions = {what in FORWARD for _, what, own in passed if own}
        if not all(passed.values()):
            by_cell[label, backend] = False
        elif directions >= {True, not bwd}:
            by_cell[label, backend] = True
    return by_cell


def _problem(label: str) -> Config:
    return replace(parse_config(label), bwd=False, dropout=0.0)


def _environments(
    connection: sqlite3.Connection, where: str, *values: str
) -> dict[str, dict[str, Any]]:
    rows = connection.execute(
        "SELECT r.run, e.data FROM runs r JOIN environments e ON e.id = r.environment_id "
        f"WHERE {where}",
        values,
    )
    return {run: json.loads(data) for run, data in rows}


def _code(environment: Mapping[str, Any], backend: str) -> Any:
    return (environment.get("backend_code") or {}).get(backend)


def insert_peaks(
    connection: sqlite3.Connection, peaks: Peaks, created: str, environment: Mapping[str, Any]
) -> None:
    """Insert measured peaks with the environment in which they were measured."""
    row = asdict(peaks) | {"created": created, "flops_per_s": json.dumps(peaks.flops_per_s)}
    row["environment"] = json.dumps(environment, sort_keys=True)
    del row["source"]  # only measured peaks are stored
    insert_row(connection, "peaks", row)


def find_peaks(
    connection: sqlite3.Connection, device: str | None, source: str | None
) -> Peaks | None:
    """Return the measured peaks of a device, or the peaks in its data sheet if none are stored.

    `source` restricts the result to measured peaks or to the data sheet.
    """
    if device is None:
        return None
    if source in (None, MEASURED):
        row = connection.execute(
            "SELECT bandwidth_bytes_per_s, flops_per_s, l2_bytes, num_sms, origin FROM peaks "
            "WHERE device = ? ORDER BY id DESC LIMIT 1",
            (device,),
        ).fetchone()
        if row:
            return Peaks(device, MEASURED, row[0], json.loads(row[1]), *row[2:])
    return None if source == MEASURED else data_sheet(device)
