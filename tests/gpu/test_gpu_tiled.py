"""tiled on a GPU of compute capability 9.0: as accurate as plain attention in the same dtype, in a
CUDA graph, on two streams at once, and over many grid-wide launches. NVRTC takes a second per
kernel, with at most 25 kernels.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from profharness.attention.backends import find_backend

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
"""Lower bound for a relative error. Smaller errors are rounding of exp2 and of the result."""

CASES = [  # batch, heads, kv_heads, rows, keys, head_dim, dtype, causal, layout
    # one key tile: shapes that fill it
    (1, 1, 1, 16, 16, 8192, FP32, False, "bhsd"),
    (1, 4, 4, 64, 64, 512, FP32, True, "bhsd"),
    (1, 4, 4, 64, 64, 8192, BF16, True, "bshd"),
    (4, 4, 4, 128, 128, 4096, FP32, False, "bhsd"),
    (4, 4, 2, 128, 128, 4096, FP16, True, "bhsd"),
    # one key tile: shapes that do not fill it
    (1, 1, 1, 1, 1, 1, FP32, False, "bhsd"),
    (2, 8, 2, 1, 128, 576, BF16, False, "bhsd"),
    (3, 5, 1, 65, 33, 77, FP16, False, "offset"),
    (16, 32, 8, 65, 128, 513, FP16, True, "bhsd"),  # far more blocks than SMs
    # many key tiles
    (1, 4, 4, 1000, 1000, 64, FP16, True, "bhsd"),
    (2, 4, 2, 300, 500, 1000, FP32, True, "bshd"),
    # keys split over blocks
    (1, 8, 1, 1, 20000, 576, BF16, False, "bhsd"),
    (1, 2, 1, 200, 4000, 192, FP16, True, "bshd"),
]  # fmt: skip
STEP = (1, 2, 2, 64, 64, 256, BF16)


def tensors(
    batch: int, heads: int, kv_heads: int, rows: int, keys: int, head_dim: int,
    dtype: torch.dtype, layout: str = "bhsd", seed: int = 0,
) -> list[torch.Tensor]:  # fmt: skip
    """Return q, k, v in a layout: `bshd` is a transposed [B, S, H, D], `offset` starts at an odd address."""
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
    """Return the errors of `out` and of naive in the inputs' dtype, against naive in fp64 and
    relative to its norm.
    """
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
    """Fill the memory of torch.empty with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_it_is_as_accurate_as_naive(case: tuple[Any, ...]) -> None:
    shape, (dtype, causal, layout) = case[:6], case[6:]
    q, k, v = tensors(*shape, dtype, layout)
    arguments = {"is_causal": causal, "scale": None, "enable_gqa": shape[1] != shape[2]}
    with poisoned():
        out = tiled.attention(q, k, v, **arguments)
    check(out, q, k, v, **arguments)


@pytest.mark.parametrize("exchange", ["block", "cluster"])
def test_one_block_and_one_cluster_are_as_accurate_as_naive(exchange: str) -> None:
    q, k, v = tensors(*STEP)
    with poisoned():
        out = {"block": tiled.one_block, "cluster": tiled.one_cluster}[exchange](q, k, v)
    check(out, q, k, v)
    told = tiled.tuning()
    assert told is not None and told["exchange"] == exchange


PLANS = {
    "grid": (Plan(4, 64, 64, 32, 64, 64, 3, 2, 8, grid=True), (1, 4, 4, 64, 64, 512, FP32)),
    "grid16": (Plan(2, 16, 64, 64, 64, 64, 2, 2, 32, grid=True), (1, 2, 1, 20, 50, 2000, FP16)),
    "cluster": (Plan(4, 64, 64, 32, 64, 64, 3, 2, 8), (1, 4, 4, 64, 64, 512, FP32)),
    "tiles": (Plan(2, 64, 64, 64, 128, 128, 3, 2, 4, one=False), (1, 2, 2, 100, 500, 512, FP16)),
    "tilesgrid": (
        Plan(4, 32, 64, 32, 64, 64, 3, 2, 4, one=False, grid=True), (1, 2, 2, 100, 500, 250, FP32),
    ),
    "splits": (
        Plan(2, 16, 64, 64, 128, 128, 3, 2, 2, splits=4, one=False), (1, 4, 1, 16, 1000, 256, BF16),
    ),
    # wgmma; CASES contains many of its tiles
    "wide": (Plan(2, 128, 128, 64, 128, 64, 3, 3, 4), (2, 2, 2, 150, 120, 500, BF16)),
    "widegrid": (
        Plan(2, 128, 128, 64, 128, 128, 2, 2, 8, grid=True), (1, 4, 2, 200, 128, 1000, BF16),
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
def test_a_cuda_graph_repeats_the_result(name: str) -> None:
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
    """Wait for the GPU with a timeout: blocks that wait for each other in vain never end."""
    done = torch.cuda.Event()
    done.record()
    end = time.monotonic() + seconds
    while not done.query():
        assert time.monotonic() < end, f"the GPU was still busy after {seconds} s"
        time.sleep(0.001)


@pytest.mark.parametrize(
    "names", [("grid", "grid"), ("grid16", "grid"), ("tilesgrid", "cluster"), ("widegrid", "grid")]
)
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
    finish_all(streams)
    for (_, _, wanted), made in zip(work, outs, strict=True):
        assert all(torch.equal(out, wanted) for out in made)


@pytest.mark.parametrize("name", PLANS)
def test_overlapping_launches_wait_for_their_inputs(name: str) -> None:
    """A launch starts while the previous one ends. Each uses the output of the previous one as queries."""
    plan, shape = PLANS[name]
    q, k, v = tensors(*shape)

    def chain(wait: bool) -> torch.Tensor:
        x = q
        for _ in range(30):
            x = tiled.run(plan, x, k, v, scale=1.0)  # uses the memory of the last but one again
            if wait:
                torch.cuda.synchronize()
        return x

    wanted = chain(wait=True)
    assert bool(wanted.isfinite().all())
    for _ in range(5):
        out = chain(wait=False)
        finish()
        assert torch.equal(out, wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(wait=False)
    for _ in range(5):
        out.fill_(torch.nan)
        graph.replay()
        finish()
        assert torch.equal(out, wanted)


def test_two_concurrent_graphs_have_separate_barriers() -> None:
    plan, shape = PLANS["grid"]
    q, k, v = tensors(*shape)
    wanted = tiled.run(plan, q, k, v)
    torch.cuda.synchronize()
    memory, before = tiled._of_captures[q.device.index]
    graphs, outs = [], []
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outs.append([tiled.run(plan, q, k, v) for _ in range(10)])
    now, after = tiled._of_captures[q.device.index]
    assert now is memory and after == before + 2 * 10 * 4  # four tiles per launch
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    finish_all(streams)
    assert all(torch.equal(out, wanted) for out in itertools.chain(*outs))
    assert not counted(memory)


def test_every_stream_has_its_own_barriers() -> None:
    plan, shape = PLANS["grid"]
    q, k, v = tensors(*shape)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    places = []
    for stream in streams * 2:
        with torch.cuda.stream(stream):
            places.append(tiled._counters(q.device.index, 4).data_ptr())
            tiled.run(plan, q, k, v)
    finish_all(streams)
    assert places[:2] == places[2:] and abs(places[0] - places[1]) >= 4 * 128


def finish_all(streams: list[torch.cuda.Stream]) -> None:
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    finish()


def counted(words: torch.Tensor) -> bool:
    """Return whether blocks are still counted in the barriers' words. Bit 31 is the phase."""
    return bool((words & 0x7FFFFFFF).any())


def test_grid_launches_leave_their_barriers_ready() -> None:
    """For any number of tiles of the previous launches, and any number of barriers in each."""
    plan = PLANS["tilesgrid"][0]
    for heads, keys in ((8, 64), (2, 64), (4, 190), (8, 64)):
        q, k, v = tensors(1, heads, heads, 32, keys, 250, FP32)
        first = tiled.run(plan, q, k, v)
        check(first, q, k, v)
        outs = [tiled.run(plan, q, k, v) for _ in range(50)]
        finish()
        assert all(torch.equal(out, first) for out in outs)
        words = tiled._of_stream[q.device.index, torch.cuda.current_stream().cuda_stream]
        assert len(words) >= heads and not counted(words)


def test_it_reports_its_plan_and_has_no_gradient() -> None:
    q, k, v = tensors(1, 4, 4, 64, 64, 512, FP32)
    tiled.attention(q, k, v)
    told = tiled.tuning()
    assert told is not None and told["parts"] * told["chunk"] >= 512
    with pytest.raises(NotImplementedError, match="no backward"):
        tiled.attention(q.requires_grad_(), k, v)
    with torch.no_grad():
        assert tiled.attention(q, k, v).shape == q.shape
