"""tiled without a GPU: refused arguments, empty inputs, and the memory of its barriers."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from tiled_emulated import KERNELS, tiled
from torch._subclasses.fake_tensor import FakeTensorMode

from profharness.attention.backends import find_backend
from profharness.attention.config import expand_configs

FP16, BF16 = torch.float16, torch.bfloat16


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[torch.Tensor, int]]:
    """Simulate a capture on GPU 3, whose barrier words are in CPU memory. Return them."""
    words = {3: (torch.zeros((12, 32), dtype=torch.int32), 0)}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(tiled, "_of_captures", words)
    monkeypatch.setattr(
        tiled, "_zeroed", lambda _, units: torch.zeros((units, 32), dtype=torch.int32)
    )
    return words


def places(words: torch.Tensor) -> set[int]:
    return {words.data_ptr() + 128 * each for each in range(len(words))}


def test_every_captured_launch_has_its_own_barriers(
    capturing: dict[int, tuple[torch.Tensor, int]],
) -> None:
    handed = [tiled._counters(3, units) for units in (1, 7, 3)]
    assert [tuple(each.shape) for each in handed] == [(1, 32), (7, 32), (3, 32)]
    assert all(each.is_contiguous() for each in handed)
    assert len(set().union(*map(places, handed))) == 11
    # all from the memory that was zeroed before the capture
    assert set().union(*map(places, handed)) < places(capturing[3][0])


@pytest.mark.usefixtures("capturing")
def test_barrier_words_of_a_capture_belong_to_one_launch() -> None:
    """They are zeroed when that graph is replayed. Another graph that shared them would find
    arbitrary values before, and would lose its count whenever the first graph is replayed.
    """
    handed = [tiled._counters(3, units) for units in (10, 5, 4)]
    assert len(set().union(*map(places, handed))) == 19
    made = handed[1]
    assert not places(handed[2]) & places(made._base if made._base is not None else made)


def test_captures_of_two_gpus_share_no_barriers(
    capturing: dict[int, tuple[torch.Tensor, int]],
) -> None:
    capturing[4] = (torch.zeros((12, 32), dtype=torch.int32), 0)
    assert not places(tiled._counters(3, 5)) & places(tiled._counters(4, 5))
    assert places(tiled._counters(4, 5)) < places(capturing[4][0])


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("1,4,64,8192,fp32", None),
        ("1,8,1,576,bf16,kv_heads=1,seq_kv=100000", None),
        ("2,8,512,64,fp16,causal", None),
        ("2,8,512,64,fp16,bwd", "no backward"),
        ("2,8,512,64,fp16,head_dim_v=32", "the same head_dim"),
        ("1,1,16,8200,fp16", "supports head_dim up to 8192"),
        ("1,1,4194241,64,fp16,seq_kv=64", "supports up to 4194240 query rows"),
        ("1,1,4194240,64,fp16,seq_kv=64", None),
    ],
)
def test_supports(config: str, reason: str | None) -> None:
    (parsed,) = expand_configs(config)
    told = find_backend(str(KERNELS / "tiled.py")).supports(parsed)
    assert told is None if reason is None else reason in str(told)


def gpu(*shape: int, dtype: torch.dtype = FP16, device: str = "cuda:0") -> torch.Tensor:
    """Return a tensor that claims to be on a GPU. It has no memory."""
    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype, device=device)


Q = (1, 4, 64, 128)
REFUSED: dict[str, tuple[Callable[[], list[torch.Tensor]], type[Exception], str]] = {
    "cpu": (
        lambda: [torch.zeros(Q)] * 3,
        NotImplementedError,
        "requires q, k and v on one GPU, not on cpu, cpu, cpu",
    ),
    "keys on the cpu": (
        lambda: [gpu(*Q), torch.zeros(Q, dtype=FP16), gpu(*Q)],
        NotImplementedError,
        "requires q, k and v on one GPU, not on cuda:0, cpu, cuda:0",
    ),
    "two gpus": (
        lambda: [gpu(*Q), gpu(*Q), gpu(*Q, device="cuda:1")],
        NotImplementedError,
        "requires q, k and v on one GPU, not on cuda:0, cuda:0, cuda:1",
    ),
    "dtype": (
        lambda: [gpu(*Q, dtype=torch.float64)] * 3,
        NotImplementedError,
        "requires fp16, bf16 or fp32 for all of q, k and v, not torch.float64",
    ),
    "two dtypes": (
        lambda: [gpu(*Q), gpu(*Q, dtype=BF16), gpu(*Q)],
        NotImplementedError,
        "not torch.float16, torch.bfloat16, torch.float16",
    ),
    "value dim": (
        lambda: [gpu(*Q), gpu(*Q), gpu(1, 4, 64, 64)],
        NotImplementedError,
        "requires the same batch and head_dim for q, k and v, not (1, 4, 64, 128), (1, 4, 64, 128), "
        "(1, 4, 64, 64)",
    ),
    "values": (
        lambda: [gpu(*Q), gpu(*Q), gpu(1, 4, 63, 128)],
        NotImplementedError,
        "(1, 4, 63, 128)",
    ),
    "batch": (
        lambda: [gpu(*Q), *[gpu(2, 4, 64, 128)] * 2],
        NotImplementedError,
        "requires the same batch",
    ),
    "head dim": (
        lambda: [gpu(*Q), *[gpu(1, 4, 64, 64)] * 2],
        NotImplementedError,
        "requires the same batch and head_dim",
    ),
    "head dim too large": (
        lambda: [gpu(1, 1, 16, 8200)] * 3,
        NotImplementedError,
        "supports head_dim up to 8192 and up to 4194240 query rows, not 8200 and 16",
    ),
    "rows too many": (
        lambda: [gpu(1, 1, 65535 * 64 + 1, 16), *[gpu(1, 1, 9, 16)] * 2],
        NotImplementedError,
        "not 16 and 4194241",
    ),
    "gradient": (
        lambda: [gpu(*Q), gpu(*Q).requires_grad_(), gpu(*Q)],
        NotImplementedError,
        "has no backward kernel",
    ),
    "heads": (
        lambda: [gpu(*Q), *[gpu(1, 2, 64, 128)] * 2],
        ValueError,
        "4 query heads and 2 key heads require enable_gqa",
    ),
}


@pytest.mark.parametrize("function", [tiled.attention, tiled.one_block, tiled.one_cluster])
@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_calls_are_refused_with_a_reason(
    name: str, function: Callable[..., torch.Tensor]
) -> None:
    make, kind, message = REFUSED[name]
    with pytest.raises(kind, match=re.escape(message)):
        function(*make())


def test_key_heads_must_divide_the_query_heads() -> None:
    k = gpu(1, 3, 64, 128)
    with pytest.raises(ValueError, match="4 query heads and 3 key heads"):
        tiled.attention(gpu(*Q), k, k, enable_gqa=True)


@pytest.mark.parametrize(
    ("shape", "keys"),
    [((0, 4, 64, 128), 64), ((1, 4, 0, 128), 64), ((1, 4, 64, 128), 0), ((1, 4, 64, 0), 64)],
)
def test_empty_inputs_give_zeros(shape: tuple[int, int, int, int], keys: int) -> None:
    k = gpu(shape[0], shape[1], keys, shape[3])
    with FakeTensorMode():
        out = tiled.attention(gpu(*shape), k, k)
    assert (tuple(out.shape), out.dtype, str(out.device)) == (shape, FP16, "cuda:0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "_check", lambda *_: None)
        q, k = torch.ones(shape, dtype=FP16), torch.ones(k.shape, dtype=FP16)
        assert torch.equal(tiled.attention(q, k, k), torch.zeros(shape, dtype=FP16))
