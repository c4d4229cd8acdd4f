"""Run the code of advice on a GPU, and compare its result with the call that it replaces."""

from __future__ import annotations

import pytest

from profharness.attention.config import parse_config
from profharness.attention.dispatch.advice import PACK, advise, rule_choice, rule_oracle
from profharness.attention.dispatch.machine import machine_for
from profharness.jobs.into_store import default_backends

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(default_backends() == default_backends("cpu"), reason="no NVIDIA GPU"),
]

BERT = "8,12,384,64,fp32,mask=bool,mask_shape=b1qk,layout=bshd"
CASES = (
    BERT,
    BERT.replace("fp32", "bf16"),
    "3,8,200,128,fp16,kv_heads=2,mask=float,mask_shape=b11k,scale=0.5",
)


@pytest.mark.parametrize("release", [(2, 11, 0), (2, 9, 1)])
@pytest.mark.parametrize("text", CASES)
def test_packed_sequences_have_the_result_of_the_padding_mask(
    text: str, release: tuple[int, ...]
) -> None:
    """With the kernels of varlen_attn, and before PyTorch 2.10 with a jagged nested tensor."""
    import torch
    import torch.nn.functional as F

    config = parse_config(text)
    machine = machine_for("H200", "2.11")
    found = advise(config, "flash", rule_oracle(machine), rule_choice(machine), release=release)
    code = next(advice.code for advice in found if advice.steps == PACK)
    assert ("varlen_attn" in code) is (release >= (2, 10))
    dtype = getattr(
        torch, {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[str(config.dtype)]
    )
    batch, keys = config.batch, config.seq_len_kv
    generator = torch.Generator("cuda").manual_seed(1)
    sizes = [
        (batch, heads, keys, config.head_dim) for heads in (config.num_heads, config.num_kv_heads)
    ]
    q, k, v = (
        torch.randn(size, generator=generator, dtype=dtype, device="cuda")
        for size in (sizes[0], sizes[1], sizes[1])
    )
    tokens = torch.arange(keys, device="cuda")
    lengths = torch.arange(1, batch + 1, device="cuda") * keys // batch
    real = tokens < lengths[:, None]
    seen = real[:, None, None].expand(batch, 1, keys if "b1qk" in text else 1, keys)
    hidden = torch.zeros(seen.shape, dtype=dtype, device="cuda")
    hidden = hidden.masked_fill(~seen, torch.finfo(dtype).min)
    space = {"q": q, "k": k, "v": v, "attn_mask": seen if config.mask == "bool" else hidden}
    exec(code, space)
    out = space["out"]
    expected = F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), seen, scale=config.scale, enable_gqa=True
    )
    assert out.shape == expected.shape and out.dtype == dtype
    difference = (out - expected).transpose(1, 2)[real].abs().max()
    assert float(difference) < 3e-2
