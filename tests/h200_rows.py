"""Rows of a real H200 trace (torch 2.11, three profiled calls per cell) for the tests of roles and diff."""

from __future__ import annotations

import json
import statistics
from functools import cache
from pathlib import Path
from typing import Any

from profharness.rows import CellRow, KernelRow

DATA = Path(__file__).parent / "data" / "h200_kernel_rows.json"
CALLS = 3


@cache
def kernel_rows(run: str = "h200") -> tuple[KernelRow, ...]:
    """Return all rows. config and backend are the two halves of the trace's annotation."""
    data = json.loads(DATA.read_text())
    return tuple(_row(run, data, entry) for entry in data["rows"])


def rows_of(config: str, backend: str) -> list[KernelRow]:
    """Return the rows of one cell."""
    found = [row for row in kernel_rows() if (row.config, row.backend) == (config, backend)]
    assert found, f"no rows of {config} on {backend}"
    return found


def cell(config: str, backend: str, **values: Any) -> CellRow:
    """Return a successful cell without samples. `values` override its fields."""
    defaults: dict[str, Any] = {
        "run": "h200",
        "cell": f"{config}/{backend}",
        "config": config,
        "backend": backend,
        "status": "ok",
        "message": None,
        "choice": None,
        "sdpa_op": None,
        "iterations": CALLS,
        "refusals": (),
        "warnings": (),
    }
    return CellRow(**(defaults | values))


def _row(run: str, data: dict[str, Any], entry: dict[str, Any]) -> KernelRow:
    config, backend = entry["cell"].split("/")
    times = entry["durations_ns"]
    kernel = data["kernels"][entry["kernel"]]
    return KernelRow(
        run=run,
        config=config,
        backend=backend,
        cell=entry["cell"],
        profiler="torch",
        status="ok",
        range=entry["cell"],
        kernel=kernel,
        kernel_short=kernel[:60],
        kernel_kind=entry["kind"],
        family=entry["family"],
        grid=tuple(entry["grid"]) if entry["grid"] else None,
        block=tuple(entry["block"]) if entry["block"] else None,
        registers_per_thread=entry["registers"],
        static_shared_bytes=None,
        dynamic_shared_bytes=None,
        shared_bytes=entry["shared"],
        launches=len(times),
        launches_per_call=len(times) / CALLS,
        duration_ns=round(statistics.median(times)),
        total_ns=sum(times),
        min_ns=min(times),
        max_ns=max(times),
        share=None,
        first_ns=entry["first_ns"],
        op_path=data["op_paths"][entry["op_path"]] or None,
        sdpa_op=None,
        occupancy=None,
        occupancy_limiter=None,
        device=0,
    )
