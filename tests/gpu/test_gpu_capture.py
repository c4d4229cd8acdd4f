"""Captures on a real GPU: the attribution of launches, and the consequences of a broken CUDA context."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from profharness.attention.config import expand_configs
from profharness.jobs.into_store import capture_into_store, default_backends
from profharness.run import CaptureOptions, Protocol
from profharness.store import ingest_path, open_store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(default_backends() == default_backends("cpu"), reason="no NVIDIA GPU"),
]

QUICK = Protocol(iterations=3, warmup=1, samples=5)
MATH_OP = "aten::_scaled_dot_product_attention_math"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with forward, backward and decode cells on every backend."""
    folder = tmp_path_factory.mktemp("gpu")
    texts = (
        "2,8,512,64",
        "2,8,1024,64,causal,bwd",
        "1,32,1,128,bf16,kv_heads=8,seq_kv=4096",
    )
    configs = [config for text in texts for config in expand_configs(text)]
    options = CaptureOptions(out=folder / "runs", protocol=QUICK)
    captured = capture_into_store(configs, default_backends("cuda"), folder / "store.db", options)
    assert {cell.status for cell in captured.run.cells} <= {"ok", "refused"}
    assert not [warning for result in captured.ingested for warning in result.warnings]
    return folder / "store.db"


def test_every_ok_cell_has_its_backends_op_and_kernels(store: Path) -> None:
    with open_store(store) as opened:
        cells = {(cell.config, cell.backend): cell for cell in opened.cells("latest")}
        rows = opened.kernels("latest")
    ops = {"flash": "flash", "efficient": "efficient", "cudnn": "cudnn"}
    for (config, backend), cell in cells.items():
        if cell.status != "ok":
            continue
        families = {row.family for row in rows if (row.config, row.backend) == (config, backend)}
        assert families
        if backend in ops:
            assert ops[backend] in str(cell.sdpa_op)
            assert any(family.startswith(ops[backend]) for family in families)
        if backend == "math":
            assert cell.sdpa_op == MATH_OP
            assert families >= {"softmax"}


def test_backward_kernels_of_the_autograd_thread_are_in_their_cell(store: Path) -> None:
    with open_store(store) as opened:
        rows = opened.kernels("latest", configs=expand_configs("2,8,1024,64,causal,bwd"))
    for backend in ("flash", "efficient", "cudnn"):
        mine = [row for row in rows if row.backend == backend]
        assert f"{backend}_bwd" in {row.family for row in mine}
        assert {row.launches_per_call for row in mine} <= {float(n) for n in range(1, 9)}


def test_launch_configurations_and_occupancy(store: Path) -> None:
    with open_store(store) as opened:
        rows = opened.kernels("latest", configs=expand_configs("2,8,512,64"), backends=["flash"])
    main = next(row for row in rows if row.family in ("flash", "flash_splitkv"))
    assert main.grid is not None and main.block is not None
    assert main.registers_per_thread and main.shared_bytes
    assert main.static_shared_bytes is None
    assert main.occupancy and main.occupancy_limiter


def test_a_misaligned_tensor_costs_only_its_own_cell(tmp_path: Path) -> None:
    configs = expand_configs("2,8,512,64,fp16,layout=offset1") + expand_configs("2,8,512,64,fp16")
    options = CaptureOptions(out=tmp_path / "runs", protocol=QUICK)
    names = ("flash", "efficient", "math")
    captured = capture_into_store(configs, names, tmp_path / "store.db", options)
    statuses = {(cell.config.layout, cell.backend): cell.status for cell in captured.run.cells}
    assert statuses["offset1", "flash"] in ("ok", "crashed")
    assert statuses["offset1", "math"] == "ok"
    assert {statuses["contiguous", name] for name in names} == {"ok"}


def test_out_of_memory_is_a_status_and_the_next_cell_runs(tmp_path: Path) -> None:
    configs = expand_configs("4,64,65536,128,fp16") + expand_configs("1,1,64,64,fp16")
    options = CaptureOptions(out=tmp_path / "runs", protocol=QUICK)
    captured = capture_into_store(configs, ("math",), tmp_path / "store.db", options)
    assert [cell.status for cell in captured.run.cells] == ["oom", "ok"]


GRAPH_REPLAY = """
import sys, torch
from torch.profiler import profile
x = torch.randn(64, 64, device="cuda")
for _ in range(3): x @ x
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    for _ in range(4): y = torch.softmax(x @ x, -1)
graph.replay(); torch.cuda.synchronize()
with profile() as session:
    for _ in range(5): graph.replay()
    torch.cuda.synchronize()
session.export_chrome_trace(sys.argv[1])
"""


def test_graph_replays_are_not_lost(tmp_path: Path) -> None:
    trace = tmp_path / "graph.json"
    subprocess.run([sys.executable, "-c", GRAPH_REPLAY, str(trace)], check=True, timeout=300)
    kernels = trace.read_text().count('"cat": "kernel"')
    assert kernels >= 5 * 8
    ingest_path(tmp_path / "store.db", trace)
    with open_store(tmp_path / "store.db") as store:
        rows = store.kernels("latest")
    assert sum(row.launches for row in rows if row.kernel_kind == "kernel") == kernels


def test_the_gate_reports_what_ran(store: Path) -> None:
    argv = [
        *(sys.executable, "-m", "profharness", "kernels", "--store", str(store)),
        *("--config", "2,8,512,64", "--backend", "flash"),
    ]
    assert subprocess.run([*argv, "--expect", "flash"], capture_output=True).returncode == 0
    assert subprocess.run([*argv, "--expect", "cudnn"], capture_output=True).returncode == 3
