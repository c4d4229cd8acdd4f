"""Sliding windows: their definition, the backends that compute them, and the advice on them."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profharness.atlas.predictions import find_place, known_atlases, place_estimates
from profharness.attention.backends import BACKENDS, find_backend
from profharness.attention.backends.base import window_size
from profharness.attention.backends.libraries import flash_attn, flashinfer, xformers
from profharness.attention.config import SDPA_BACKENDS, Config, parse_config
from profharness.attention.dispatch.by_rule import explain_by_rule, named_platforms
from profharness.attention.dispatch.machine import RELEASES, from_config, machine_for
from profharness.attention.dispatch.predict import predict
from profharness.recording.worker.attention import flex, make_call, make_inputs, sdpa_mask
from profharness.recording.worker.verify import GRADIENTS, attend

windowed = st.builds(
    lambda group, kv_heads, rows, columns, causal, window: Config(
        *(2, group * kv_heads, kv_heads, rows, columns, 4, "fp32"),
        causal=causal,
        bwd=True,
        window=window,
    ),
    *[st.integers(1, 2)] * 2,
    *[st.integers(1, 12)] * 2,
    st.booleans(),
    st.integers(1, 14),
)


def seen(config: Config, row: int, column: int) -> bool:
    """Return whether a query attends to a key, as docs/configs.md defines it."""
    assert config.window is not None
    if config.causal:
        return row - config.window < column <= row
    return abs(row - column) < config.window


def by_definition(config: Config, inputs: Any) -> torch.Tensor:
    """Return the output, computed in fp64 one query at a time."""
    out = torch.zeros(*inputs.query.shape, dtype=torch.float64)
    group = config.num_heads // config.num_kv_heads
    for batch in range(config.batch):
        for head in range(config.num_heads):
            keys, values = (
                each[batch, head // group].detach().double() for each in (inputs.key, inputs.value)
            )
            for row in range(config.seq_len_q):
                kept = [j for j in range(config.seq_len_kv) if seen(config, row, j)]
                if kept:  # the output of a query without keys is 0
                    query = inputs.query[batch, head, row].detach().double()
                    weights = torch.softmax(keys[kept] @ query / math.sqrt(4), 0)
                    out[batch, head, row] = weights @ values[kept]
    return out


@settings(max_examples=60, deadline=None)
@given(windowed)
def test_reference_naive_and_sdpa_agree_with_the_definition(config: Config) -> None:
    inputs = make_inputs(config, "cpu", 1)
    wanted = by_definition(config, inputs)
    reference = attend(config, inputs, torch.float64)[0]
    torch.testing.assert_close(reference["out"], wanted, rtol=1e-11, atol=1e-11)
    mask = [[seen(config, i, j) for j in range(config.seq_len_kv)] for i in range(config.seq_len_q)]
    assert sdpa_mask(config, inputs).tolist() == mask
    naive = find_backend("naive")
    assert naive.supports(config) is None
    assert naive.load is not None
    for attention in (naive.load(), None):
        forward = make_call(replace(config, bwd=False), inputs, attention)()
        torch.testing.assert_close(forward.double(), wanted, rtol=1e-4, atol=1e-5)
        for name, gradient in zip(GRADIENTS, make_call(config, inputs, attention)(), strict=True):
            torch.testing.assert_close(gradient.double(), reference[name], rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("text", ["causal,window=3", "window=5", "causal", "causal,window=1"])
def test_flex_passes_a_window_as_a_block_mask(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    config = parse_config(f"1,4,40,16,fp32,kv_heads=2,seq_kv=24,{text}")
    inputs = make_inputs(config, "cpu", 1)
    out = make_call(config, inputs, flex(None))()
    wanted = attend(config, inputs, torch.float64)[0]["out"]
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-5)
    assert BACKENDS["flex"].supports(config) is None


def bottom_right(q: Any, k: Any, v: Any, left: int, right: int) -> torch.Tensor:
    """Return attention on [B, H, S, D] with flash-attn's window, where -1 means no limit."""
    rows, columns = q.shape[2], k.shape[2]
    i = torch.arange(rows)[:, None] + columns - rows
    j = torch.arange(columns)
    mask = (i - j <= left) if left >= 0 else torch.ones(rows, columns, dtype=torch.bool)
    mask = mask & (j - i <= right) if right >= 0 else mask
    function = torch.nn.functional.scaled_dot_product_attention
    return function(q, k, v, attn_mask=mask, enable_gqa=True)


def as_bshd(*tensors: Any) -> list[Any]:
    return [tensor.transpose(1, 2) for tensor in tensors]


class LocalCausal:
    """Stands in for LowerTriangularFromBottomRightMask of xformers."""

    def make_local_attention(self, window: int) -> tuple[int, int]:
        return window - 1, 0  # xformers counts the keys of the window, with the diagonal


def stand_ins() -> dict[str, ModuleType | SimpleNamespace]:
    """Return packages whose functions have the documented parameters for a window."""

    def flash_attn_func(q: Any, k: Any, v: Any, *, window_size: Any, **_: Any) -> Any:
        return bottom_right(*as_bshd(q, k, v), *window_size).transpose(1, 2)

    def memory_efficient_attention(q: Any, k: Any, v: Any, *, attn_bias: Any, **_: Any) -> Any:
        return bottom_right(*as_bshd(q, k, v), *attn_bias).transpose(1, 2)

    def single_prefill(
        q: Any, k: Any, v: Any, *, causal: Any, window_left: int, **options: Any
    ) -> Any:
        assert options["kv_layout"] == "NHD"  # fa3 kernels end the process for HND
        assert options["backend"] == "auto" or not q.is_contiguous()
        heads = (each.transpose(0, 1)[None] for each in (q, k, v))
        return bottom_right(*heads, window_left, causal - 1)[0].transpose(0, 1)

    biases = SimpleNamespace(
        LowerTriangularFromBottomRightMask=LocalCausal,
        LocalAttentionFromBottomRightMask=lambda left, right: (left, right),
    )
    ops = SimpleNamespace(
        LowerTriangularMask=None,
        fmha=SimpleNamespace(attn_bias=biases),
        memory_efficient_attention=memory_efficient_attention,
    )
    return {
        "flash_attn": SimpleNamespace(flash_attn_func=flash_attn_func),
        "xformers": ModuleType("xformers"),
        "xformers.ops": ops,
        "flashinfer": SimpleNamespace(single_prefill_with_kv_cache=single_prefill),
    }


@pytest.mark.parametrize("load", [flash_attn, xformers, flashinfer])
@pytest.mark.parametrize("causal", [True, False])
def test_packages_get_a_window_in_their_own_terms(
    load: Callable[[], Any], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, module in stand_ins().items():
        monkeypatch.setitem(sys.modules, name, module)
    config = parse_config(f"1,2,12,8,fp16,window=4{',causal' if causal else ''}")
    backend = BACKENDS[load.__name__.replace("flash_attn", "flash-attn")]
    if load is flashinfer and not causal:
        assert backend.supports(config) == "supports a window only with a causal mask"
        return
    assert backend.supports(config) is None
    assert "seq_q must equal seq_kv" in str(backend.supports(replace(config, seq_len_kv=16)))
    config = replace(config, dtype="fp32")
    inputs = make_inputs(config, "cpu", 1)
    out = make_call(config, inputs, load())()
    torch.testing.assert_close(out, make_call(config, inputs)(), rtol=1e-5, atol=1e-5)


def test_window_size_is_flash_attns() -> None:
    assert window_size(None, False) == (-1, -1)
    assert window_size(None, True) == (-1, 0)
    assert window_size(128, True) == (127, 0)
    assert window_size(128, False) == (127, 127)


def test_functions_without_a_window_refuse_it(tmp_path: Path) -> None:
    config = parse_config("1,2,64,16,fp16,window=8")
    for name in ("fa3", "fa4", "sage"):
        assert BACKENDS[name].supports(config) == "does not support a sliding window (window=8)"
    for name, extra in (("without", ""), ("with", ", window=None")):
        file = tmp_path / f"{name}.py"
        file.write_text(f"def attention(q, k, v, *, is_causal, scale, enable_gqa{extra}): ...\n")
        reason = find_backend(f"{file}:attention").supports(config)
        assert reason == (None if extra else "does not support a sliding window (window=8)")
    assert "window" in inspect.signature(find_backend("naive").load()).parameters  # type: ignore[misc]


def explained(text: str) -> Any:
    (platform,) = named_platforms("2.11", "H200")
    return explain_by_rule(parse_config(text), platform)


def test_explain_tells_what_a_window_costs_and_advises_flex() -> None:
    answer = explained("1,2,4096,64,bf16,causal,window=128")
    assert answer.caveats[0].startswith(
        "SDPA has no window argument: the window becomes a bool attn_mask of shape [4096, 4096]"
    )
    assert "(16.0 MiB), which flash refuses" in answer.caveats[0]
    assert "keeps only 3.1 %" in answer.caveats[0]
    (flash,) = (side for side in answer.backends if side.backend == "flash")
    assert flash.eligible is False
    (advice,) = flash.advice
    assert "BlockMask" in advice.change
    assert "(i - 128 < j) & (j <= i)" in advice.code
    wide = explained("1,2,64,64,bf16,causal,window=64")
    (flash,) = (side for side in wide.backends if side.backend == "flash")
    assert flash.advice[0].config == "b1-h2-s64-d64-bf16-causal"
    assert "hides no key" in flash.advice[0].change


@pytest.mark.parametrize("gpu", ["H200", "A100", "cpu"])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("mask=bool_2d", "mask=bool"),
        ("mask=bool,mask_shape=qk", "mask=bool"),
        ("mask=float,mask_shape=1k", "mask=float,mask_shape=111k"),
        ("mask=float_bh", "mask=float,mask_shape=bhqk"),
        ("window=8", "mask=bool"),
        ("window=8,causal", "mask=bool"),
    ],
)
def test_masks_with_one_call_have_one_choice(gpu: str, one: str, other: str) -> None:
    for release in RELEASES:
        for shape in (
            "2,8,64,64,fp16",
            "2,8,1,128,bf16,seq_kv=100,bwd",
            "1,4,33,100,fp32,kv_heads=2",
        ):
            configs = [parse_config(f"{shape},{text}") for text in (one, other)]
            device = "cpu" if gpu == "cpu" else "cuda"
            machine = machine_for("H200" if gpu == "cpu" else gpu, ".".join(map(str, release)))
            found = [predict(from_config(config, device), machine) for config in configs]
            assert found[0].choice == found[1].choice
            for name in SDPA_BACKENDS:
                assert found[0].backends[name].eligible == found[1].backends[name].eligible


def test_masks_with_one_call_have_one_time() -> None:
    place, _ = find_place(known_atlases(), "H200", "2.11")
    masks = ("mask=bool", "mask=bool_2d", "mask=bool,mask_shape=qk", "window=9", "window=9,causal")
    configs = [parse_config(f"1,32,2048,128,bf16,{mask}") for mask in masks]
    for backend in ("auto", *SDPA_BACKENDS):
        first, *rest = place_estimates(place, configs, [backend])
        assert rest == [first] * 4
        assert (first.kernel_us is None) == (backend == "flash")
