"""FLOPs and bytes against brute force, torch's counter, and figures calculated by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profharness.attention.config import MASKS, Config, parse_config
from profharness.attention.costs import (
    compulsory_bytes,
    copy_bytes,
    flops,
    matrix_bytes,
    phases,
    tensor_bytes,
    working_set_bytes,
)
from profharness.dtypes import CONFIG_DTYPES
from profharness.errors import UsageError

small = st.integers(1, 9)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    groups, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    causal = draw(st.booleans())
    mask = "none" if causal else draw(st.sampled_from(MASKS))
    return Config(
        batch=draw(small),
        num_heads=groups * kv_heads,
        num_kv_heads=kv_heads,
        seq_len_q=draw(small),
        seq_len_kv=draw(small),
        head_dim=draw(small),
        dtype=draw(st.sampled_from(CONFIG_DTYPES)),
        causal=causal,
        mask=mask,
        dropout=draw(st.sampled_from((0.0, 0.1))),
        bwd=draw(st.booleans()),
        head_dim_v=draw(st.none() | small),
        window=None if mask != "none" else draw(st.none() | st.integers(1, 12)),
    )


def counted(config: Config) -> tuple[int, int]:
    """Count the forward FLOPs over every score, and the keys that some query attends to."""
    total, keys = 0, set()
    for row in range(config.seq_len_q):
        for column in range(config.seq_len_kv):
            window = config.window or row + config.seq_len_kv + 1
            ahead = 1 if config.causal else window
            if row - window < column < row + ahead:
                total += 2 * config.head_dim + 2 * config.value_dim
                keys.add(column)
    return total * config.batch * config.num_heads, len(keys)


@given(configs())
def test_forward_flops_and_bytes_agree_with_a_count_by_hand(config: Config) -> None:
    forward = replace(config, bwd=False)
    by_hand, keys = counted(forward)
    assert flops(forward) == by_hand
    item = {"fp16": 2, "bf16": 2, "fp32": 4}[str(config.dtype)]
    rows = config.batch * config.num_heads * config.seq_len_q
    columns = config.batch * config.num_kv_heads * keys
    dims = config.head_dim + config.value_dim
    assert compulsory_bytes(forward) == (rows + columns) * dims * item + tensor_bytes(config).mask


@given(configs())
def test_fused_phases_add_up_to_the_call(config: Config) -> None:
    forward = phases(replace(config, bwd=False))
    assert sum(phase.bytes for phase in forward) == compulsory_bytes(replace(config, bwd=False))
    assert sum(phase.flops for phase in phases(config) if phase.matmul) == flops(config)
    more = sum(phase.bytes for phase in phases(config, "fp32"))
    assert more > sum(phase.bytes for phase in forward if phase.matmul)


@settings(max_examples=12)
@given(configs())
def test_math_agrees_with_the_flop_counter_of_torch(config: Config) -> None:
    torch = pytest.importorskip("torch")
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    config = replace(config, mask="none", dropout=0.0, dtype="fp32", num_kv_heads=config.num_heads)
    config = replace(config, window=None)

    def made(rows: int, columns: int) -> object:
        shape = (config.batch, config.num_heads, rows, columns)
        return torch.randn(shape, requires_grad=config.bwd)

    tensors = (
        made(config.seq_len_q, config.head_dim),
        made(config.seq_len_kv, config.head_dim),
        made(config.seq_len_kv, config.value_dim),
    )
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):
        function = torch.nn.functional.scaled_dot_product_attention
        out = function(*tensors, is_causal=config.causal)
        if config.bwd:
            out.sum().backward()
    ours = sum(phase.flops for phase in phases(config, "fp32") if phase.matmul)
    assert counter.get_total_flops() == ours


def test_the_fused_formula_of_torch_equals_the_exact_one_without_causal() -> None:
    counter = pytest.importorskip("torch.utils.flop_counter")
    config = parse_config("2,4,256,64,fp16")
    shape = (2, 4, 256, 64)
    forward = counter.sdpa_flop_count(shape, shape, shape)
    backward = counter.sdpa_backward_flop_count(shape, shape, shape, shape)
    assert (forward, backward) == (134217728, 335544320)
    assert flops(config) == forward
    assert flops(replace(config, bwd=True)) == forward + backward


def test_the_conventions_differ_by_the_diagonal() -> None:
    config = parse_config("2,8,1024,64,fp16,causal")
    whole = 4 * 2 * 8 * 1024 * 1024 * 64
    assert flops(config, "flash-attention") == whole // 2
    assert flops(config) == 2 * 2 * 8 * 1024 * 1025 * 64
    assert flops(replace(config, bwd=True), "flash-attention") == whole // 2 * 7 // 2
    decode = parse_config("1,8,1,64,fp16,causal,seq_kv=4096")
    assert flops(decode) == 4 * 8 * 64  # top left: one query attends to one key
    assert flops(decode, "flash-attention") == 2 * 8 * (4095 + 4096) * 64
    with pytest.raises(UsageError, match="flash-attention"):
        flops(config, "mine")


def test_a_window_costs_what_it_keeps() -> None:
    config = parse_config("1,1,1024,64,fp16,causal,window=128")
    kept = 128 * 129 // 2 + (1024 - 128) * 128
    assert flops(config) == 4 * 64 * kept == flops(config, "flash-attention")
    both = replace(config, causal=False)  # every key but the diagonal counts on both sides
    assert flops(both) == 4 * 64 * (2 * kept - 1024)
    assert compulsory_bytes(config) == compulsory_bytes(replace(config, window=None))
    assert tensor_bytes(config.sdpa_call()).mask == 1024 * 1024
    # flash-attention aligns a window to the last key, so a decode step sees 128 keys, not one
    decode = parse_config("1,1,1,64,fp16,causal,seq_kv=4096,window=128")
    assert flops(decode) == 4 * 64
    assert flops(decode, "flash-attention") == 4 * 64 * 128


def test_bytes_of_the_decode_cell() -> None:
    config = parse_config("b1-h32-kv8-sq1-skv4096-d128-bf16")
    assert tensor_bytes(config).key == 8 * 4096 * 128 * 2
    assert compulsory_bytes(config) == 2 * 8 * 4096 * 128 * 2 + 2 * 32 * 128 * 2  # 16.8 MB
    assert flops(config) == 4 * 32 * 4096 * 128


def test_bytes_of_forward_and_backward() -> None:
    config = parse_config("2,8,1024,64,fp16,bwd")
    tensor, rows = 2 * 8 * 1024 * 64 * 2, 4 * 2 * 8 * 1024
    assert compulsory_bytes(config) == (4 + 5 + 3) * tensor + 2 * rows
    assert working_set_bytes(config) == (4 + 1 + 3) * tensor + rows  # no tensor twice
    assert working_set_bytes(replace(config, bwd=False)) == 4 * tensor


def test_masks_count_as_stored_and_stride_0_counts_once() -> None:
    def of(text: str) -> int:
        return compulsory_bytes(parse_config(text)) - compulsory_bytes(
            parse_config(text.split(",mask")[0])
        )

    assert of("2,8,128,64,fp16,mask=bool") == 128 * 128
    assert of("2,8,128,64,fp16,mask=float") == 128 * 128 * 2
    assert of("2,8,128,64,fp32,mask=float_bh") == 2 * 8 * 128 * 128 * 4
    broadcast = parse_config("4,8,128,64,fp16,layout=broadcast_batch")
    tensor = 8 * 128 * 64 * 2
    assert compulsory_bytes(broadcast) == 3 * tensor + 4 * tensor


def test_phases_of_the_bottleneck_study() -> None:
    """One query, 16 keys, head_dim 8192, fp32: the study's 0.47 FLOPs per byte for QK^T."""
    first, softmax, second = phases(parse_config("1,1,1,8192,fp32,seq_kv=16"))
    assert (first.flops, first.bytes) == (262144, 557056)
    assert first.intensity == pytest.approx(0.4706, abs=1e-4)
    assert softmax.intensity is None
    assert second.flops == 262144
    assert second.intensity == pytest.approx(0.4706, abs=1e-4)
    unfused = {phase.name: phase for phase in phases(parse_config("2,8,512,64,fp16"), "fp32")}
    assert list(unfused) == ["casts", "QK^T", "softmax", "PV"]
    assert unfused["softmax"].bytes == 2 * 16 * 512 * 512 * 4


def test_unfused_steps_cast_only_what_they_widen() -> None:
    """16-bit `naive` multiplies 16-bit numbers, PyTorch's math fp32 numbers."""
    config = parse_config("2,8,512,64,bf16,kv_heads=2")
    own = {phase.name: phase.bytes for phase in phases(config, "bf16")}
    wide = {phase.name: phase.bytes for phase in phases(config, "fp32")}
    assert list(own) == ["repeat K and V", "QK^T", "softmax", "PV"]
    assert list(wide) == ["repeat K and V", "casts", "QK^T", "softmax", "PV"]
    assert (own["softmax"], wide["softmax"]) == (2 * matrix_bytes(config, "bf16"), 4 * 8388608)
    query, key = 2 * 8 * 512 * 64 * 2, 2 * 2 * 512 * 64 * 2
    assert copy_bytes(config, "bf16") == 2 * 4 * key
    assert copy_bytes(config, "fp32") == 2 * 8 * key + 2 * query
    assert copy_bytes(replace(config, num_kv_heads=8), "bf16") == 0


def test_bytes_need_a_dtype() -> None:
    with pytest.raises(UsageError, match="fp16, bf16 or fp32"):
        compulsory_bytes(parse_config("2,8,512,64"))
