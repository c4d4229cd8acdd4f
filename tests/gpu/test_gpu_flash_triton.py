"""flash_triton on a GPU: correct with pointers and with TMA, its tuning recorded, captured in a
CUDA graph.

Compiling a tile takes a second or two. All tests but one select their tiles; that one measures two.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from profharness.attention.backends import find_backend
from profharness.attention.cases import failures
from profharness.attention.config import expand_configs
from profharness.jobs.into_store import default_backends, verify_into_store
from profharness.run import CaptureOptions, Protocol

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(default_backends() == default_backends("cpu"), reason="no NVIDIA GPU"),
]

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
PASSES = ("forward", "backward_kv", "backward_q")
FORCED = f"""
import functools
import sys

sys.path.append({str(KERNELS)!r})

import flash_triton
from flash_triton import supports, tuning


@functools.cache
def tile(name, head_dim, dtype):
    return flash_triton.choices_of(name, head_dim, dtype, tma=False)[-1]


def attention(q, k, v, **arguments):
    for name in {PASSES}:
        flash_triton.force(name, tile(name, q.shape[-1], q.dtype))
    return flash_triton.attention(q, k, v, **arguments)
"""
"""flash_triton with one tile for each head_dim and dtype, for a worker."""
CONFIGS = (
    *("2,4,256,80,fp16,causal,bwd", "2,8,256,128,bf16,causal,kv_heads=2,bwd"),
    *("1,4,300,256,bf16,bwd", "1,2,200,64,fp32,causal,bwd"),
)


def test_is_right_in_every_case(tmp_path: Path) -> None:
    path = tmp_path / "forced_tiles.py"
    path.write_text(FORCED)
    options = CaptureOptions(
        out=tmp_path / "runs",
        protocol=Protocol(0, 0, 0, timeout_s=300.0),
        cases=("fewer_queries", "transposed"),
        grad=True,
    )
    configs = [each for text in CONFIGS for each in expand_configs(text)]
    done = verify_into_store(configs, [str(path)], tmp_path / "store.db", options)
    wrong = failures(done)
    assert not wrong, "\n".join(f"{row.case} {row.what}: {row.message}" for row in wrong)
    checked = {(row.asked, row.case) for row in done if row.passed is True}
    assert len(checked) == 3 * len(CONFIGS)
    assert {row.what for row in done if row.passed} >= {"out", "dq", "dk", "dv"}


@pytest.fixture
def flash_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the module, without forced tiles before and after."""
    monkeypatch.syspath_prepend(str(KERNELS))
    import flash_triton as module

    yield module
    for name in PASSES:
        module.force(name, None)


def tensors(dtype: str, *, grad: bool = False) -> tuple[Any, ...]:
    import torch

    make = {"device": "cuda", "dtype": getattr(torch, dtype), "requires_grad": grad}
    return tuple(torch.randn(2, 4, 512, 64, **make) for _ in range(3))


def test_tma_is_right_and_gives_the_same_bits_twice(flash_triton: Any) -> None:
    import torch

    q, k, v = tensors("float16", grad=True)
    for name in PASSES:
        choices = flash_triton.choices_of(name, 64, torch.float16, tma=True)
        flash_triton.force(name, next(each for each in choices if each.kwargs["TMA"]))
    weight = torch.randn_like(q)
    runs = []
    for _ in range(2):
        out = flash_triton.attention(q, k, v, is_causal=True)
        runs.append((out, *torch.autograd.grad(out, (q, k, v), weight)))
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))
    told = flash_triton.tuning()
    assert {told[name]["variant"] for name in PASSES} == {"tma"}
    doubles = [each.detach().double().requires_grad_() for each in (q, k, v)]
    wanted = find_backend("naive").load()(*doubles, is_causal=True)
    wanted_all = (wanted, *torch.autograd.grad(wanted, doubles, weight.double()))
    for got, right in zip(runs[0], wanted_all, strict=True):
        assert float((got.detach().double() - right.detach()).norm() / right.detach().norm()) < 2e-3


def test_is_captured_in_a_graph_after_one_call(flash_triton: Any) -> None:
    import torch

    q, k, v = tensors("float16")
    tile = flash_triton.choices_of("forward", 64, torch.float16, tma=False)[-1]
    flash_triton.force("forward", tile)
    expected = flash_triton.attention(q, k, v, is_causal=True).clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_triton.attention(q, k, v, is_causal=True)
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_measures_its_tiles_and_reports_the_selected_one(flash_triton: Any) -> None:
    import torch

    q, k, v = tensors("float32")
    choices = flash_triton.choices_of("forward", 64, torch.float32, tma=False)
    assert len(choices) == 2
    out = flash_triton.attention(q, k, v)
    told = flash_triton.tuning()["forward"]
    tiles = [(each.kwargs["BLOCK_M"], each.kwargs["BLOCK_N"], each.num_warps) for each in choices]
    assert (told["BLOCK_M"], told["BLOCK_N"], told["num_warps"]) in tiles
    wanted = find_backend("naive").load()(q.double(), k.double(), v.double())
    assert float((out.double() - wanted).norm() / wanted.norm()) < 2e-6
