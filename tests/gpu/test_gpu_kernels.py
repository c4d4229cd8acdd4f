"""Kernels compiled by CudaSource on a real GPU: single_query against fp64, launches in a CUDA graph
and from other threads, and errors of wrong launches.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from profharness.attention.backends import find_backend
from profharness.attention.backends.cuda_launch import CudaKernel, LaunchError
from profharness.attention.backends.cuda_source import CudaSource

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
SCALE = """
extern "C" __global__ void scaled(float* out, const float* in, float factor, int count) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) out[at] = in[at] * factor;
}
extern "C" __global__ void wide(long long* out, long long value) { out[0] = value; }
extern "C" __global__ void ranks(int* out) {
    extern __shared__ int shared[];
    shared[threadIdx.x] = 1;
    unsigned rank, size;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    if (threadIdx.x == 0) out[blockIdx.x] = rank * 100 + size;
}
"""
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> CudaSource:
    path = tmp_path_factory.mktemp("cuda") / "small.cu"
    path.write_text(SCALE)
    return CudaSource(path)


@pytest.fixture(scope="module")
def scaled(source: CudaSource) -> CudaKernel:
    return source.kernel("scaled")


def run(scaled: CudaKernel, out: Any, tensor: Any, factor: float) -> None:
    scaled.launch((tensor.numel() + 127) // 128, 128, out, tensor, factor, tensor.numel())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "rows", "columns", "head_dim", "value_dim", "scale"),
    [
        (2, 2, 2, 64, 64, 64, 64, None),
        (1, 4, 2, 33, 65, 128, 128, 0.5),
        (1, 8, 1, 65, 33, 40, 72, None),
        (3, 2, 2, 1, 300, 80, 80, None),
        (1, 1, 1, 1, 1, 1, 1, None),
        (1, 2, 1, 5, 7, 33, 300, None),
        (1, 4, 4, 16, 16, 8192, 8192, None),
        (1, 1, 1, 300, 1000, 512, 512, None),
        (2, 4, 2, 17, 17, 2048, 64, 0.1),
        (1, 1, 1, 2, 24576, 16, 16, None),
    ],
)
def test_single_query_agrees_with_naive_in_fp64(
    batch: int, heads: int, kv_heads: int, rows: int, columns: int, head_dim: int, value_dim: int,
    scale: float | None, is_causal: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    make = {"device": "cuda", "dtype": dtype}
    q = torch.randn(batch, heads, rows, head_dim, **make)
    k = torch.randn(batch, kv_heads, columns, head_dim, **make)
    v = torch.randn(batch, kv_heads, columns, value_dim, **make)
    check(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=heads != kv_heads)


def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> None:
    naive = find_backend(str(KERNELS / "naive.py")).load()
    single_query = find_backend(str(KERNELS / "single_query.py")).load()
    out = single_query(q, k, v, **arguments)
    assert out.dtype == q.dtype
    wanted = naive(q.double(), k.double(), v.double(), **arguments)
    torch.testing.assert_close(out.double(), wanted, atol=TOLERANCE[q.dtype], rtol=1e-2)


def test_single_query_takes_strided_inputs() -> None:
    torch.manual_seed(0)
    make = {"device": "cuda", "dtype": torch.float16}
    q = torch.randn(2, 50, 4, 64, **make).transpose(1, 2)
    k = torch.randn(2, 4, 64, 70, **make).transpose(2, 3)
    v = torch.randn(1, 4, 70, 128, **make)[..., 3:67].expand(2, -1, -1, -1)
    check(q, k, v, is_causal=True, scale=None, enable_gqa=False)


def test_single_query_has_no_gradient() -> None:
    single_query = find_backend(str(KERNELS / "single_query.py")).load()
    q = torch.randn(1, 1, 4, 8, device="cuda", requires_grad=True)
    arguments = {"is_causal": False, "scale": None, "enable_gqa": False}
    with pytest.raises(NotImplementedError, match="no backward"):
        single_query(q, q, q, **arguments)
    with torch.no_grad():
        assert single_query(q, q, q, **arguments).shape == q.shape


def test_a_launch_in_a_cuda_graph_runs_at_replay(scaled: CudaKernel) -> None:
    tensor, out = torch.ones(1000, device="cuda"), torch.zeros(1000, device="cuda")
    run(scaled, out, tensor, 2.0)
    out.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(scaled, out, tensor, 3.0)
    run(scaled, torch.empty_like(out), tensor, 9.0)  # must not change the captured arguments
    torch.cuda.synchronize()
    assert out.sum().item() == 0
    tensor.fill_(5.0)
    graph.replay()
    assert torch.equal(out, torch.full_like(out, 15.0))


def test_a_launch_is_on_the_current_stream(scaled: CudaKernel) -> None:
    out = torch.zeros(1, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        run(scaled, out, torch.ones(1, device="cuda"), 4.0)
        done = stream.record_event()
    assert not done.query()
    done.synchronize()
    assert out.item() == 4.0


def test_threads_that_never_touched_the_gpu_can_launch(scaled: CudaKernel) -> None:
    tensors = [torch.full((64,), float(n), device="cuda") for n in range(8)]
    outs = [torch.zeros(64, device="cuda") for _ in tensors]
    torch.cuda.synchronize()
    threads = [
        threading.Thread(target=lambda n=n: [run(scaled, outs[n], tensors[n], 2.0) for _ in range(200)])
        for n in range(8)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert [out[0].item() for out in outs] == [2.0 * n for n in range(8)]


def test_a_launch_in_a_backward_pass(scaled: CudaKernel) -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            return tensor * 2

        @staticmethod
        def backward(_ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            grad = grads[0].contiguous()
            out = torch.empty_like(grad)
            run(scaled, out, grad, 2.0)
            return out

    tensor = torch.ones(100, device="cuda", requires_grad=True)
    Doubled.apply(tensor).sum().backward()
    assert tensor.grad is not None and torch.equal(tensor.grad, torch.full_like(tensor, 2.0))


def test_a_64_bit_argument(source: CudaSource) -> None:
    out = torch.zeros(1, dtype=torch.int64, device="cuda")
    source.kernel("wide").launch(1, 1, out, np.int64(2**40 + 1))
    assert out.item() == 2**40 + 1
    with pytest.raises(
        LaunchError, match=r"wide expects arguments of \[8, 8\] bytes, but the call passes \[8, 4\]"
    ):
        source.kernel("wide").launch(1, 1, out, 1)


def test_wrong_launches_are_reported_and_keep_the_context_alive(scaled: CudaKernel) -> None:
    out = torch.zeros(4, device="cuda")
    with pytest.raises(LaunchError, match="expects arguments"):
        scaled.launch(1, 32, out, out, 1.0)
    with pytest.raises(LaunchError, match="CUDA_ERROR_INVALID_VALUE"):
        scaled.launch(1, 4096, out, out, 1.0, 4)
    run(scaled, out, torch.ones_like(out), 2.0)
    assert out.tolist() == [2.0] * 4


def test_a_kernel_is_loaded_once_and_reports_its_resources(source: CudaSource) -> None:
    scaled = source.kernel("scaled")
    assert source.kernel("scaled") is scaled
    assert 0 < scaled.registers < 64
    assert (scaled.local_bytes, scaled.static_shared_bytes) == (0, 0)
    assert scaled.blocks_per_sm(256) >= 4


def test_shared_memory_beyond_48_kb(source: CudaSource) -> None:
    kernel = source.kernel("ranks", shared_bytes=96 * 1024)
    assert kernel.blocks_per_sm(32) in (1, 2)
    out = torch.zeros(3, dtype=torch.int32, device="cuda")
    kernel.launch(3, 32, out)
    assert out.tolist() == [1, 1, 1]
    with pytest.raises(LaunchError, match="of shared memory"):
        source.kernel("ranks", shared_bytes=4 << 20)


@pytest.mark.parametrize("size", [2, 8, 16])
def test_clusters(source: CudaSource, size: int) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("clusters of 16 are a thing of compute capability 9.0 and 10.0")
    kernel = source.kernel("ranks", shared_bytes=1024, cluster=size)
    out = torch.zeros(2 * size, dtype=torch.int32, device="cuda")
    kernel.launch(2 * size, 32, out)
    assert out.tolist() == [rank * 100 + size for rank in range(size)] * 2
    assert kernel.max_active_clusters(2 * size, 32, size) >= 1
    kernel.launch(2 * size, 32, out, cluster=(1, 1, 1))
    assert out.tolist() == [1] * (2 * size)


def test_a_launch_costs_little(scaled: CudaKernel) -> None:
    out = torch.zeros(128, device="cuda")
    run(scaled, out, out, 1.0)
    best = 1.0
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(200):
            scaled.launch(1, 128, out, out, 1.0, 128)
        best = min(best, (time.perf_counter() - begin) / 200)
    torch.cuda.synchronize()
    assert best < 20e-6, f"{best * 1e6:.1f} µs a launch"
