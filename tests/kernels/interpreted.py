"""Run flash_triton on a CPU under Triton's interpreter, and compare with naive.py in fp64.

A separate program, because the interpreter is selected when triton is first imported. It prints one
JSON object per case with the largest errors of output and gradients, and the result of tuning().
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "kernels"))


@dataclass(frozen=True)
class Case:
    """One problem. `layout` is the name of a function in LAYOUTS."""

    heads: tuple[int, int]
    lengths: tuple[int, int]
    head_dim: int
    dtype: str = "float32"
    causal: bool = False
    bwd: bool = True
    scale: float | None = None
    layout: str = "contiguous"


CASES = {
    "fp16": Case((2, 2), (70, 130), 64, "float16"),
    "bf16_causal": Case((2, 2), (130, 130), 64, "bfloat16", causal=True),
    "fp32_causal": Case((1, 1), (130, 130), 64, causal=True),
    "tma_head_dim_72": Case((2, 1), (70, 100), 72, "float16", causal=True),
    "head_dim_33": Case((2, 1), (70, 100), 33, "float16", causal=True),
    "head_dim_1": Case((1, 1), (20, 20), 1),
    "head_dim_96": Case((1, 1), (40, 70), 96),
    "head_dim_256": Case((1, 1), (66, 40), 256, "bfloat16"),
    "one": Case((1, 1), (1, 1), 16, causal=True),
    "decode": Case((4, 1), (1, 100), 64, "float16"),
    "multiples": Case((1, 1), (128, 128), 32, "float16", causal=True),
    "fewer_queries": Case((2, 2), (33, 100), 16, causal=True),
    "more_queries": Case((2, 2), (130, 33), 16, causal=True),
    "gqa": Case((6, 2), (33, 33), 16, causal=True),
    "negative_scale": Case((1, 1), (65, 65), 16, causal=True, scale=-0.4),
    "zero_scale": Case((1, 1), (65, 65), 16, causal=True, scale=0.0),
    "bshd": Case((2, 2), (65, 65), 24, "float16", layout="bshd"),
    "strided_last": Case((2, 2), (33, 33), 24, layout="strided_last"),
    "broadcast": Case((2, 2), (40, 40), 16, "float16", layout="broadcast"),
    "offset": Case((2, 2), (40, 40), 16, "float16", layout="offset"),
    "forward": Case((2, 2), (70, 70), 16, bwd=False),
}
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "contiguous": lambda t: t,
    "bshd": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "strided_last": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    "broadcast": lambda t: t[:1].expand(2, -1, -1, -1),
    "offset": lambda t: t.new_zeros(t.numel() + 1)[1:].view(t.shape).copy_(t),
}


def run(case: Case) -> dict[str, Any]:
    """Return the largest absolute difference of each result from the fp64 reference."""
    import flash_triton
    import naive
    import torch

    torch.manual_seed(0)
    sizes = zip((case.heads[0], case.heads[1], case.heads[1]), _lengths(case), strict=True)
    dtype = getattr(torch, case.dtype)
    shapes = [(2, heads, length, case.head_dim) for heads, length in sizes]
    given = [LAYOUTS[case.layout](torch.randn(shape).to(dtype)).detach() for shape in shapes]
    own = [each.requires_grad_(case.bwd) for each in given]
    exact = [each.detach().double().requires_grad_(case.bwd) for each in own]
    options = {"is_causal": case.causal, "enable_gqa": True, "scale": case.scale}
    got = [flash_triton.attention(*own, **options)]
    expected = [naive.attention(*exact, **options)]
    if case.bwd:
        grad = torch.randn(got[0].shape).to(dtype)
        got += torch.autograd.grad(got[0], own, grad)
        expected += torch.autograd.grad(expected[0], exact, grad.double())
    errors = [float((one - other).abs().max()) for one, other in zip(got, expected, strict=True)]
    return {
        "errors": dict(zip(("out", "dq", "dk", "dv"), errors, strict=False)),
        "needs_grad": got[0].requires_grad,
        "tuning": flash_triton.tuning(),
    }


def _lengths(case: Case) -> tuple[int, int, int]:
    return case.lengths[0], case.lengths[1], case.lengths[1]


if __name__ == "__main__":
    for name, case in CASES.items():
        print(json.dumps({"case": name, **run(case)}), flush=True)
