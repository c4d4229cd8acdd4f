"""The slow kernel without a GPU: it compiles for all supported types, is correct in the emulator,
and refuses unsupported calls.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from emulator import COMPILER, emulate

from profharness.attention.backends import find_backend
from profharness.attention.backends.cuda_source import CudaSource
from profharness.attention.config import expand_configs

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "kernels" / "single_query.py"
NAMES = [f"single_query<{each}>" for each in ("float", "fp16", "bf16")]

TOLERANCE = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-4},
    torch.float16: {"atol": 1e-3, "rtol": 2e-3},
    torch.bfloat16: {"atol": 8e-3, "rtol": 1e-2},
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_it_compiles_for_every_dtype(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core: pip install 'profharness[kernels]'")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = CudaSource(FILE.with_suffix(".cu")).cubin(NAMES, arch)
    assert not made.from_cache
    assert set(made.names) == set(NAMES)
    assert all(mangled.encode() in made.cubin for mangled in made.names.values())


def emulated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> None:
    """Compare single_query in the emulator with naive in fp64. `arguments` contain scale and is_causal."""
    naive = find_backend(str(ROOT / "kernels" / "naive.py")).load()
    launch_of = find_backend(f"{FILE}:launch_of").load()
    scale, is_causal = arguments["scale"], arguments["is_causal"]
    out = torch.full((*q.shape[:3], v.shape[3]), torch.nan, dtype=q.dtype)
    name, shared_bytes, passed = launch_of(q, k, v, out, is_causal, scale)
    blocks = q.shape[0] * q.shape[1] * q.shape[2]
    emulate(
        FILE.with_suffix(".cu"), name, blocks, 256, passed,
        shared_bytes=shared_bytes, seed=blocks, together=NAMES,
    )  # fmt: skip
    wanted = naive(q.double(), k.double(), v.double(), enable_gqa=True, **arguments)
    torch.testing.assert_close(out.double(), wanted, **TOLERANCE[q.dtype])


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "rows", "columns", "head_dim", "value_dim"),
    [
        (1, 1, 1, 1, 1, 1, 1),
        (2, 4, 2, 3, 7, 33, 40),
        (1, 2, 1, 9, 5, 64, 300),
        (1, 1, 1, 2, 600, 16, 16),
    ],
)
def test_it_is_right_in_the_emulator(
    batch: int, heads: int, kv_heads: int, rows: int, columns: int, head_dim: int, value_dim: int,
    is_causal: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    torch.manual_seed(0)
    q = torch.randn(batch, heads, rows, head_dim, dtype=dtype)
    k = torch.randn(batch, kv_heads, columns, head_dim, dtype=dtype)
    v = torch.randn(batch, kv_heads, columns, value_dim, dtype=dtype)
    emulated(q, k, v, is_causal=is_causal, scale=0.3)


@pytest.mark.skipif(COMPILER is None, reason="needs g++")
def test_strided_inputs_are_right_in_the_emulator() -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 5, 4, 24).transpose(1, 2)
    k = torch.randn(2, 2, 24, 6).transpose(2, 3)
    v = torch.randn(1, 2, 6, 40)[..., 3:19].expand(2, -1, -1, -1)
    emulated(q, k, v, is_causal=True, scale=0.5)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("2,8,512,64,fp16", None),
        ("1,1,16,8192,fp32,causal", None),
        ("1,8,1,64,bf16,kv_heads=2,seq_kv=24576,head_dim_v=32", None),
        ("1,8,16,64,bf16,seq_kv=24577", "up to 24576 keys"),
        ("2,8,512,64,fp16,bwd", "no backward"),
        ("2,8,512,64,fp16,mask=bool", "mask"),
        ("2,8,512,64,fp16,dropout=0.1", "dropout"),
    ],
)
def test_supports(config: str, reason: str | None) -> None:
    (parsed,) = expand_configs(config)
    told = find_backend(str(FILE)).supports(parsed)
    assert told is None if reason is None else reason in str(told)


def test_a_cpu_is_refused_with_a_reason() -> None:
    attention = find_backend(str(FILE)).load()
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(NotImplementedError, match=r"on a GPU, not torch\.float32 on cpu"):
        attention(q, q, q, is_causal=False, scale=None, enable_gqa=False)
    with pytest.raises(ValueError, match="2 query heads and 1 key heads require enable_gqa"):
        attention(q, q[:, :1], q[:, :1], is_causal=False, scale=None, enable_gqa=False)
