"""tiled on a GPU of compute capability 9.0: as right as plain attention in the same dtype, in a CUDA graph,
on two streams at once and over many grid-wide launches.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from profharness.backends import find_backend

sys.path.append(str(Path(__file__).resolve().parents[2] / "kernels"))

import tiled
from _tiled_plan import Plan

KERNELS = Path(tiled.__file__).parent
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
FLOOR = {FP32: 2**-22, FP16: 2**-12, BF16: 2**-9}
"""Of a relative error: what is below is rounding of exp2 and of the result."""

CASES = [  # batch, heads, kv_heads, rows, keys, head_dim, dtype, causal, layout
    # one key tile: the shapes it is made for
    (1, 1, 1, 16, 16, 8192, FP32, False, "bhsd"),
    (1, 1, 1, 16, 16, 8192, FP16, True, "bhsd"),
    (1, 4, 4, 64, 64, 512, FP32, True, "bhsd"),
    (1, 4, 4, 64, 64, 8192, FP32, False, "bhsd"),
    (1, 4, 4, 64, 64, 8192, BF16, True, "bshd"),
    (4, 4, 4, 128, 128, 4096, FP32, False, "bhsd"),
    (4, 4, 2, 128, 128, 4096, FP16, True, "bhsd"),
    (8, 4, 4, 128, 128, 2048, BF16, False, "bhsd"),
    # one key tile: what does not fill it
    (1, 1, 1, 1, 1, 1, FP32, False, "bhsd"),
    (2, 8, 2, 1, 128, 576, BF16, False, "bhsd"),
    (1, 2, 1, 65, 100, 1000, FP32, True, "bshd"),
    (3, 5, 1, 65, 33, 77, FP16, False, "offset"),
    (16, 32, 8, 65, 128, 513, FP16, True, "bhsd"),  # far more blocks than SMs: clusters
    (16, 8, 8, 128, 100, 1024, FP32, False, "bshd"),
    # many key tiles
    (1, 4, 4, 1000, 1000, 64, FP16, True, "bhsd"),
    (2, 4, 2, 300, 500, 1000, FP32, True, "bshd"),
    (1, 2, 2, 65, 1000, 8192, BF16, False, "bhsd"),
    (1, 1, 1, 129, 1025, 4100, FP32, True, "bhsd"),
    (2, 16, 16, 512, 512, 256, BF16, True, "bshd"),
    # keys split over blocks
    (1, 8, 1, 1, 20000, 576, BF16, False, "bhsd"),
    (1, 2, 2, 3, 4097, 130, FP32, False, "offset"),
    (1, 2, 1, 200, 4000, 192, FP16, True, "bshd"),
]  # fmt: skip


def tensors(
    batch: int, heads: int, kv_heads: int, rows: int, keys: int, head_dim: int,
    dtype: torch.dtype, layout: str = "bhsd", seed: int = 0,
) -> list[torch.Tensor]:  # fmt: skip
    """q, k, v as the layout says: `bshd` lies [B, S, H, D], `offset` starts at an odd address."""
    torch.manual_seed(seed)
    make: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    made = []
    for count, length in ((heads, rows), (kv_heads, keys), (kv_heads, keys)):
        if layout == "bshd":
            tensor = torch.randn(batch, length, count, head_dim, **make).transpose(1, 2)
        elif layout == "offset":
            tensor = torch.randn(batch, count, length, head_dim + 3, **make)[..., 3:]
        else:
            tensor = torch.randn(batch, count, length, head_dim, **make)
        made.append(tensor)
    return made


def errors(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any
) -> tuple[float, float]:
    """Of `out` and of naive in the inputs' dtype, against naive in fp64 and relative to its norm."""
    naive = find_backend(str(KERNELS / "naive.py")).load()
    wanted = naive(q.double(), k.double(), v.double(), **arguments)
    plain = naive(q, k, v, **arguments)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert bool(out.isfinite().all())
    own, naives = (float((each.double() - wanted).norm() / wanted.norm()) for each in (out, plain))
    return own, naives


def check(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any
) -> None:
    own, plain = errors(out, q, k, v, **more)
    assert own <= 2 * plain + FLOOR[q.dtype], f"error {own:.2e}, naive's {plain:.2e}"


@pytest.fixture(autouse=True)
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for compute capability 9.0")


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """What torch.empty gives holds NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_it_is_as_right_as_naive(case: tuple[Any, ...]) -> None:
    shape, (dtype, causal, layout) = case[:6], case[6:]
    q, k, v = tensors(*shape, dtype, layout)
    arguments = {"is_causal": causal, "scale": None, "enable_gqa": shape[1] != shape[2]}
    with poisoned():
        out = tiled.attention(q, k, v, **arguments)
    check(out, q, k, v, **arguments)


PLANS = {
    "grid": (Plan(4, 64, 64, 32, 64, 64, 3, 2, 8, grid=True), (1, 4, 4, 64, 64, 512, FP32)),
    "grid16": (Plan(2, 16, 64, 64, 64, 64, 2, 2, 32, grid=True), (1, 2, 1, 20, 50, 2000, FP16)),
    "cluster": (Plan(4, 64, 64, 32, 64, 64, 3, 2, 8), (1, 4, 4, 64, 64, 512, FP32)),
    "cluster16": (Plan(2, 16, 16, 64, 64, 64, 2, 2, 16), (2, 4, 2, 16, 16, 1024, BF16)),
    "tiles": (Plan(2, 64, 64, 64, 128, 128, 3, 2, 4, one=False), (1, 2, 2, 100, 500, 512, FP16)),
    "tilesgrid": (
        Plan(4, 32, 64, 32, 64, 64, 3, 2, 4, one=False, grid=True), (1, 2, 2, 100, 500, 250, FP32),
    ),
    "splits": (
        Plan(2, 16, 64, 64, 128, 128, 3, 2, 2, splits=4, one=False), (1, 4, 1, 16, 1000, 256, BF16),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_a_given_plan_is_right(name: str) -> None:
    plan, shape = PLANS[name]
    q, k, v = tensors(*shape)
    for causal in (False, True):
        with poisoned():
            out = tiled.run(plan, q, k, v, is_causal=causal, scale=0.1)
        check(out, q, k, v, is_causal=causal, scale=0.1, enable_gqa=shape[1] != shape[2])


@pytest.mark.parametrize("name", PLANS)
def test_a_cuda_graph_gives_it_again(name: str) -> None:
    plan, shape = PLANS[name]
    sets = [tensors(*shape, seed=seed) for seed in range(3)]
    wanted = [tiled.run(plan, *each).clone() for each in sets]
    inputs = [each.clone() for each in sets[0]]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tiled.run(plan, *inputs)
    for turn in range(50):
        for to, each in zip(inputs, sets[turn % 3], strict=True):
            to.copy_(each)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, wanted[turn % 3]), f"replay {turn}"


def finish(seconds: float = 20) -> None:
    """Waits for the GPU, but not for ever: blocks that wait for each other in vain never end."""
    done = torch.cuda.Event()
    done.record()
    end = time.monotonic() + seconds
    while not done.query():
        assert time.monotonic() < end, f"the GPU was still busy after {seconds} s"
        time.sleep(0.001)


@pytest.mark.parametrize("names", [("grid", "grid"), ("grid16", "grid"), ("tilesgrid", "cluster")])
def test_two_streams_at_once(names: tuple[str, str]) -> None:
    work = []
    for seed, name in enumerate(names):
        plan, shape = PLANS[name]
        inputs = tensors(*shape, seed=seed)
        work.append((plan, inputs, tiled.run(plan, *inputs)))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in work]
    outs: list[list[torch.Tensor]] = [[], []]
    for _ in range(100):
        for stream, (plan, inputs, _wanted), made in zip(streams, work, outs, strict=True):
            with torch.cuda.stream(stream):
                made.append(tiled.run(plan, *inputs))
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    finish()
    for (_, _, wanted), made in zip(work, outs, strict=True):
        assert all(torch.equal(out, wanted) for out in made)


def test_grid_launches_leave_their_barriers_ready() -> None:
    """200 launches of 32 tiles use all words of the barriers more than once."""
    plan = Plan(2, 64, 64, 64, 64, 64, 2, 2, 4, grid=True)
    assert tiled.COUNTERS < 200 * 32
    q, k, v = tensors(1, 32, 32, 64, 64, 256, FP16)
    first = tiled.run(plan, q, k, v)
    check(first, q, k, v)
    outs = [tiled.run(plan, q, k, v) for _ in range(200)]
    finish()
    assert all(torch.equal(out, first) for out in outs)
    words, _ = tiled._counters[q.device.index]
    assert not bool(words.any())


def test_it_tells_its_plan_and_has_no_gradient() -> None:
    q, k, v = tensors(1, 4, 4, 64, 64, 512, FP32)
    tiled.attention(q, k, v)
    told = tiled.tuning()
    assert told is not None and told["parts"] * told["chunk"] >= 512
    with pytest.raises(NotImplementedError, match="no backward"):
        tiled.attention(q.requires_grad_(), k, v)
    with torch.no_grad():
        assert tiled.attention(q, k, v).shape == q.shape
