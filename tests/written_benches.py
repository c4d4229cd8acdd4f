"""Store `bench` runs with given samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profharness.attention.config import parse_config
from profharness.run import Cell, Protocol, Run, write_run
from profharness.store import ingest_path

CPU = {"device_type": "cpu", "torch": "2.11.0"}
US = 1000


def steady(nanoseconds: int) -> list[int]:
    return [nanoseconds + nanoseconds * offset // 1000 for offset in (-1, 0, 0, 1)] * 5


def bench_run(
    store: Path,
    name: str,
    times: Mapping[tuple[str, str], Any],
    environment: Mapping[str, Any] = CPU,
    *,
    measurement: str = "event",
    choice: str = "flash",
) -> str:
    """Store a run with these median times in ns, by config and backend. Return its id.

    `choice` is the backend that `auto` selected. On a CPU the measurement is `wall`.
    """
    measured = measurement if environment["device_type"] == "cuda" else "wall"
    cells = tuple(
        Cell(
            f"c{number:04d}", parse_config(config), backend, status="ok",
            samples={measured: ns if isinstance(ns, list) else steady(ns)},
            choice=choice if backend == "auto" else None,
        )
        for number, ((config, backend), ns) in enumerate(times.items(), start=1)
    )  # fmt: skip
    run = Run(
        f"20260101-000000-{name}", "2026-01-01T00:00:00+00:00", ("events",), Protocol(), cells,
        dict(environment), kind="bench",
    )  # fmt: skip
    place = store.parent / run.run
    place.mkdir(exist_ok=True)
    write_run(place, run)
    ingest_path(store, place)
    return run.run
