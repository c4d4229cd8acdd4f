"""A bench on a real GPU: cold and eager calls, graphs and kernel times, each under its own name."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch

from profharness.attention.config import expand_configs
from profharness.jobs.into_store import bench_into_store, default_backends
from profharness.measurements.evaluation import BenchResult, evaluate_bench
from profharness.recording.worker.timing import open_graph
from profharness.run import BenchPlan, CaptureOptions, Protocol
from profharness.store import open_store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(default_backends() == default_backends("cpu"), reason="no NVIDIA GPU"),
]

SMALL = "b2-h8-s512-d64-fp16"
LARGE = "b4-h16-s4096-d128-fp16"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> BenchResult:
    folder = tmp_path_factory.mktemp("bench")
    configs = expand_configs("2,8,512,64") + expand_configs("4,16,4096,128")
    options = CaptureOptions(
        out=folder / "runs",
        protocol=Protocol(10, 20, 0, 120.0, 42),
        bench=BenchPlan(precision=0.02, max_time_s=5),
    )
    bench_into_store(configs, ["all", "naive"], folder / "store.db", options)
    with open_store(folder / "store.db") as store:
        return evaluate_bench(store)


def medians(found: BenchResult, config: str, backend: str) -> dict[str, float]:
    return {
        str(row.measurement): float(row.median_ns or 0)
        for row in found.rows
        if (row.config, row.backend) == (config, backend)
    }


def test_every_cell_has_all_times(found: BenchResult) -> None:
    assert {cell.status for cell in found.cells} <= {"ok", "refused"}
    assert set(medians(found, SMALL, "flash")) == {"cold", "graph", "kernel", "eager"}
    assert not [cell.warnings for cell in found.cells if cell.warnings]


def test_all_measurements_agree_for_a_long_kernel(found: BenchResult) -> None:
    """A call of a millisecond hides its launch. The remaining difference is the cold L2."""
    times = medians(found, LARGE, "flash")
    for name in ("cold", "graph", "eager"):
        assert times[name] == pytest.approx(times["kernel"], rel=0.1)


def test_an_eager_call_waits_for_the_host_and_a_cold_one_does_not(found: BenchResult) -> None:
    """Nine launches of math take the CPU longer than the GPU. A cold call includes none of that."""
    times = medians(found, SMALL, "math")
    (row,) = [
        row
        for row in found.rows
        if (row.config, row.backend, row.measurement) == (SMALL, "math", "eager")
    ]
    assert times["eager"] > 0.9 * times["graph"]
    assert row.host_ns is not None and times["eager"] > 0.9 * min(row.host_ns, times["graph"])
    assert times["cold"] < times["kernel"] + 60_000


def test_kernels_take_no_longer_than_the_call(found: BenchResult) -> None:
    for backend in ("flash", "math"):
        times = medians(found, SMALL, backend)
        assert times["kernel"] < 1.1 * times["cold"]
        assert times["kernel"] < 1.1 * times["graph"]


def test_graph_times_exclude_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that takes 0.3 ms longer for each replay of 0.5 ms changes no sample."""
    left = torch.randn(2048, 2048, dtype=torch.float16, device="cuda")
    left @ left  # cuBLAS creates its handle outside of a capture
    sample, replay = open_graph(lambda: left @ left, 1), torch.cuda.CUDAGraph.replay
    quick = statistics.median(sample(20)["graph"])

    def slowly(graph: Any) -> None:
        end = time.perf_counter() + 3e-4
        while time.perf_counter() < end:
            pass
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", slowly)
    slow = open_graph(lambda: left @ left, 1)
    assert statistics.median(slow(20)["graph"]) == pytest.approx(quick, rel=0.1)


def test_clocks_were_read_throughout(found: BenchResult) -> None:
    clocks = [cell.clocks for cell in found.cells if cell.status == "ok"]
    assert all(each["sm_mhz_min"] <= each["sm_mhz"] <= each["sm_mhz_max"] for each in clocks)
    assert sum(each["readings"] for each in clocks) > len(clocks)


def test_rates_stay_below_the_peaks_or_are_doubted(found: BenchResult) -> None:
    for row in found.rows:
        if row.efficiency is not None and row.efficiency > 1:
            assert any("%" in text for text in row.doubts)
    large = [row for row in found.rows if row.config == LARGE and row.backend == "flash"]
    assert all(row.efficiency is not None and 0.1 < row.efficiency < 1 for row in large)


def test_peak_memory_excludes_lasting_caches(found: BenchResult) -> None:
    """math is the first backend here that uses cuBLAS, whose workspace has 32 MiB."""
    (peak,) = {
        row.peak_memory_bytes for row in found.rows if (row.config, row.backend) == (SMALL, "math")
    }
    matrix = 2 * 8 * 512 * 512 * 4  # of scores in fp32
    assert peak is not None
    assert matrix < peak < 4 * matrix
