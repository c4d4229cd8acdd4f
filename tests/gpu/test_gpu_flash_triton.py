"""flash_triton on a GPU: right in every case, its choice recorded, captured in a CUDA graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from profharness.backends import find_backend
from profharness.config import expand_configs
from profharness.jobs import default_backends
from profharness.record import Protocol
from profharness.runner.verify import VerifyOptions
from profharness.verification import failures
from profharness.verifying import verify_into_store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(default_backends() == default_backends("cpu"), reason="no NVIDIA GPU"),
]


# a new head_dim is a sweep, so that all cases are for one config
FEW = ("seq_1", "seq_129", "fewer_queries", "more_queries", "transposed", "batch_stride_0")


@pytest.mark.parametrize(
    "text",
    [
        "2,8,256,64,fp16,bwd", "2,8,256,128,bf16,causal,kv_heads=2,bwd", "1,4,300,256,bf16,bwd",
        "2,4,256,80,fp16,causal,bwd", "1,2,200,64,fp32,causal,bwd", "1,2,100,128,fp32,bwd",
        "1,2,100,256,fp32,causal,bwd",
    ],
)  # fmt: skip
def test_is_right_in_every_case(tmp_path: Path, text: str) -> None:
    options = VerifyOptions(
        ("standard",) if text.startswith("2,8,256,64") else FEW,
        True,
        tmp_path / "runs",
        Protocol(0, 0, 0, timeout_s=300.0),
    )
    done = verify_into_store(expand_configs(text), ["flash_triton"], tmp_path / "store.db", options)
    wrong = failures(done.rows)
    assert not wrong, "\n".join(f"{row.case} {row.what}: {row.message}" for row in wrong)
    assert sum(row.passed is True for row in done.rows) > 20


def calls() -> tuple[Any, Any, Any]:
    import torch

    attention = find_backend("flash_triton").load()
    tensors = tuple(
        torch.randn(2, 4, 512, 64, device="cuda", dtype=torch.float16) for _ in range(3)
    )
    return torch, attention, tensors


def test_is_captured_in_a_graph_after_one_call() -> None:
    torch, attention, (q, k, v) = calls()
    expected = attention(q, k, v, is_causal=True).clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, is_causal=True)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_gives_the_same_bits_twice() -> None:
    torch, attention, tensors = calls()
    tensors = tuple(each.requires_grad_() for each in tensors)
    runs = []
    for _ in range(2):
        out = attention(*tensors, is_causal=True)
        runs.append((out, *torch.autograd.grad(out.float().sum(), tensors)))
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
