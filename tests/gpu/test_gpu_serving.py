"""FlashInfer's paged attention on a GPU: right for every feature, and wrong with a wrong page table.

Each backend compiles a kernel per feature at the first use, so the configs share dtype and head_dim.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from profharness.attention.backends import BACKENDS
from profharness.attention.backends.base import find_module
from profharness.attention.cases import VerificationRow, failures
from profharness.attention.config import expand_configs, parse_config
from profharness.jobs.into_store import default_backends, verify_into_store
from profharness.run import CaptureOptions, Protocol

pytestmark = [
    pytest.mark.gpu,
    # Inductor, which compiles flex_attention, imports modules that torch itself calls deprecated.
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.skipif(default_backends() == default_backends("cpu"), reason="no NVIDIA GPU"),
    pytest.mark.skipif(find_module("flashinfer") is None, reason="FlashInfer is not installed"),
]

DECODE = "8,32,1,128,bf16,kv_heads=8,lens=100x2+777x3+2048+4096x2,page=16"
PREFILL = "4,32,200,128,bf16,kv_heads=8,lens=60+200+331+1024,page=16,causal"
LATENT = "4,128,1,576,bf16,lens=64+100+1000+2048,page=64,mla=512+64"
FA2, FA3 = "flashinfer-fa2", "flashinfer-fa3"
CUDNN, TRTLLM, FLEX = "flashinfer-cudnn", "flashinfer-trtllm", "flex-paged"
ON_BLACKWELL = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 10,
    reason="TensorRT-LLM's prefill kernels require compute capability 10.x",
)
RUNS = [
    (FA2, DECODE),
    (FA2, PREFILL),
    (FA2, f"{PREFILL},window=77"),
    (FA2, f"{DECODE},softcap=30"),
    (FA2, f"{DECODE},kv_dtype=fp8"),
    (FA2, LATENT),
    (FA3, DECODE),
    (FA3, PREFILL),
    (FA3, f"{PREFILL},window=77"),
    (FA3, LATENT),
    (FA2, f"{DECODE},sinks"),
    (FA2, f"{PREFILL},sinks,window=77"),
    (FA3, f"{PREFILL},sinks"),
    (CUDNN, DECODE),
    (CUDNN, PREFILL),
    (TRTLLM, DECODE),
    (TRTLLM, f"{DECODE},sinks"),
    (TRTLLM, f"{DECODE},causal,window=77"),
    pytest.param(TRTLLM, PREFILL, marks=ON_BLACKWELL),
    pytest.param(TRTLLM, f"{PREFILL},window=77", marks=ON_BLACKWELL),
    (FLEX, DECODE),
    (FLEX, PREFILL),
    (FLEX, f"{PREFILL},window=77"),
    (FLEX, f"{DECODE},softcap=30"),
]


def rows_of(folder: Path, config: str, backend: str, cases: str) -> list[VerificationRow]:
    options = CaptureOptions(
        out=folder / "runs", protocol=Protocol(0, 0, 0, timeout_s=300.0), cases=(cases,), grad=False
    )
    return verify_into_store(expand_configs(config), [backend], folder / "store.db", options)


@pytest.mark.parametrize(("backend", "config"), RUNS)
def test_paged_attention_is_right(tmp_path: Path, backend: str, config: str) -> None:
    rows = rows_of(tmp_path, config, backend, "standard")
    assert not failures(rows), "\n".join(f"{row.case}: {row.message}" for row in failures(rows))
    assert sum(row.passed is True for row in rows) >= 8


@pytest.mark.parametrize(
    ("backend", "config"),
    [
        (FA2, DECODE),
        (FA2, PREFILL),
        (FA2, LATENT),
        (FA3, PREFILL),
        (CUDNN, DECODE),
        (TRTLLM, DECODE),
        (FLEX, DECODE),
    ],
)
def test_a_page_table_that_is_off_by_one_is_found(
    monkeypatch: pytest.MonkeyPatch, backend: str, config: str
) -> None:
    import torch

    from profharness.attention.backends import serving
    from profharness.recording.worker.attention import make_inputs, make_output
    from profharness.recording.worker.verify import Got, compare, expect

    problem = parse_config(config)
    inputs = make_inputs(problem, "cuda", 42)
    expected = expect(problem, inputs)
    load = BACKENDS[backend].load
    assert load is not None

    def passes() -> bool | None:
        out = {"out": make_output(problem, inputs, load())}
        return compare(problem, inputs, "out", Got(out, out, {}, ()), expected).passed

    assert passes()
    right = serving.page_table

    @functools.wraps(right)
    def off_by_one(lengths: tuple[int, ...], page: int, device: object = None) -> object:
        table = right(lengths, page, device)
        table.pages.copy_(torch.roll(table.pages, 1))
        return table

    # The keys stay where the right table says, and the plan gets the wrong table.
    filled = serving.fill_pages
    monkeypatch.setattr(
        serving,
        "fill_pages",
        lambda tensor, lengths, page, _: filled(
            tensor, lengths, page, right(lengths, page, tensor.device)
        ),
    )
    monkeypatch.setattr(serving, "page_table", off_by_one)
    assert passes() is False


@pytest.mark.parametrize("backend", [FA2, FA3, CUDNN, TRTLLM, FLEX])
def test_a_prepared_call_runs_in_a_cuda_graph(backend: str) -> None:
    import torch

    from profharness.recording.worker.attention import make_forward, make_inputs

    problem = parse_config(DECODE)
    load = BACKENDS[backend].load
    assert load is not None
    call = make_forward(problem, make_inputs(problem, "cuda", 1), load())
    wanted = call().clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, wanted)
