"""Benches with samples written by hand, through a real store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from profharness.attention.config import parse_config
from profharness.measurements.evaluation import BenchResult, evaluate_bench
from profharness.measurements.measurements import BenchRow
from profharness.run import Cell, Protocol, Run, write_run
from profharness.store import ingest_path, open_store

# The config of the L4 autotune study with the highest bandwidth: Q, K, V and the output are 4 MiB
# each, its FLOPs 4 * 32 * 8 * 128 * 128 * 64.
STUDY = "32,8,128,64,fp16"
STUDY_BYTES = 4 * 32 * 8 * 128 * 64 * 2
STUDY_FLOPS = 4 * 32 * 8 * 128 * 128 * 64
L4 = {"device_type": "cuda", "gpu": "NVIDIA L4", "torch": "2.8.0", "tf32": False}


def steady(nanoseconds: int, count: int = 40) -> list[int]:
    """Return samples with an exact median and a spread of a fifth of a percent."""
    return [nanoseconds + nanoseconds * offset // 1000 for offset in (-1, 0, 0, 1)] * (count // 4)


def cell(config: str, backend: str, samples: Mapping[str, list[int]], **more: Any) -> Cell:
    told: dict[str, Any] = {"status": "ok", "samples": dict(samples), **more}
    return Cell(f"{config} {backend}", parse_config(config), backend, **told)


def answer(
    folder: Path, cells: Sequence[Cell], environment: Mapping[str, Any] = L4, **options: Any
) -> BenchResult:
    """Return the evaluation of a store that contains one run of these cells."""
    named = tuple(
        replace(each, cell=f"c{number:04d}") for number, each in enumerate(cells, start=1)
    )
    run = Run(
        "20260101-000000-aaaa", "2026-01-01T00:00:00+00:00", ("events",), Protocol(), named,
        dict(environment),
    )  # fmt: skip
    place = folder / run.run
    place.mkdir()
    write_run(place, run)
    ingest_path(folder / "store.db", place)
    with open_store(folder / "store.db") as store:
        return evaluate_bench(store, **options)


def timed(config: str, measurement: str = "event", /, **times: int) -> list[Cell]:
    """Return cells of one config with steady samples of these times in ns, by backend."""
    return [cell(config, backend, {measurement: steady(ns)}) for backend, ns in times.items()]


def row_of(found: BenchResult, backend: str, config: str | None = None) -> BenchRow:
    label = None if config is None else parse_config(config).label
    (row,) = [
        row
        for row in found.ranking_rows()
        if row.backend == backend and label in (None, row.config)
    ]
    return row


def regretful() -> list[Cell]:
    return [
        cell("1,1,512,64,fp16", "auto", {"event": steady(100_000)}, choice="flash"),
        cell("1,1,512,64,fp16", "flash", {"event": steady(100_000)}),
        cell("1,1,512,64,fp16", "cudnn", {"event": steady(80_000)}),
        cell("1,1,128,64,fp16", "auto", {"event": steady(369_000)}, choice="efficient"),
        cell("1,1,128,64,fp16", "math", {"event": steady(127_000)}),
        cell("1,1,64,64,fp16", "auto", {"event": steady(50_000)}, choice="flash"),
        cell("1,1,64,64,fp16", "flash", {"event": steady(50_100)}),
        cell("1,1,32,64,fp16", "auto", {"event": steady(60_000)}, choice="flash"),
        cell("1,1,32,64,fp16", "flash", {"event": steady(50_000)}),
    ]
