"""Measured peaks of devices: kept once per measurement, the newest of a device answers."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from profharness.peaks import Peaks

# No reference to environments: they go with the last run that has them, a measurement stays.
TABLES_5 = (
    """CREATE TABLE peaks (
        id INTEGER PRIMARY KEY, device TEXT NOT NULL, created TEXT NOT NULL,
        bandwidth_bytes_per_s REAL, flops_per_s TEXT NOT NULL, l2_bytes INTEGER, num_sms INTEGER,
        origin TEXT NOT NULL, environment TEXT NOT NULL) STRICT""",
    "CREATE INDEX peaks_device ON peaks(device, id)",
)


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
    from profharness.peaks import MEASURED, Peaks

    return Peaks(device, MEASURED, row[0], json.loads(row[1]), *row[2:])


def peaks_of(
    connection: sqlite3.Connection, environment: Mapping[str, Any], source: str | None
) -> Peaks | None:
    """Peaks of an environment's device: measured if there, else from the data sheet. source asks
    for one of the two alone.
    """
    from profharness.peaks import MEASURED, data_sheet

    device = device_name(environment)
    if device is None:
        return None
    if source in (None, MEASURED):
        found = measured_peaks(connection, device)
        if found is not None or source == MEASURED:
            return found
    return data_sheet(device)
