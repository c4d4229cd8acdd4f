"""Measure every tile of kernels/flash_triton.py on a GPU, with cuDNN's and PyTorch's flash
attention for comparison.

python scripts/tune_flash_triton.py [OUT.json] [--forward-only]

Prints TFLOP/s per tile. A causal config counts half the scores, a backward pass 2.5 times the
forward pass. Times are medians of whole calls, including launches.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels"))

SHAPES = (  # batch, heads, seq_len, head_dim, causal, backward
    (4, 16, 4096, 128, False, True),
    (4, 16, 4096, 128, True, False),
    (4, 16, 4096, 64, True, False),
    (4, 8, 4096, 256, False, False),
)
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
WARMUP_MS, REP_MS = 5, 30

Row = dict[str, Any]


def median_ms(call: Callable[[], Any]) -> float:
    """Return the median of a call in ms, measured with CUDA events and with L2 flushed before each."""
    import triton.testing

    return float(triton.testing.do_bench(call, warmup=WARMUP_MS, rep=REP_MS, return_mode="median"))


def measured(call: Callable[[], Any], flops: float) -> Row:
    """Return ms and tflops, with the seconds of compiling and measuring, or the error."""
    begin = time.perf_counter()
    try:
        call()
        ms = median_ms(call)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}
    taken = time.perf_counter() - begin
    return {"ms": ms, "tflops": flops / ms / 1e9, "seconds": round(taken, 2)}


def forward_rows(shape: tuple[Any, ...], tensors: tuple[Any, ...]) -> Iterator[Row]:
    """Yield the result of each tile of the forward pass, of autotuning, and of the peers."""
    import flash_triton as mine

    batch, heads, length, head_dim, causal, _ = shape
    flops = 4 * batch * heads * length**2 * head_dim / (2 if causal else 1)
    q, k, v = tensors

    def call() -> Any:
        return mine.attention(q, k, v, is_causal=causal)

    for tile in mine.choices_of("forward", head_dim, q.dtype, tma=True):
        mine.force("forward", tile)
        yield {"pass": "forward", **mine.tiles.facts(tile), **measured(call, flops)}
    mine.force("forward", None)
    found = measured(call, flops)
    yield {"pass": "forward", **mine.tuning()["forward"], "autotuned": True, **found}
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for name, backend in PEERS.items():
        with sdpa_kernel(backend):
            found = measured(lambda: sdpa(q, k, v, is_causal=causal), flops)
        yield {"pass": "forward", "peer": name, **found}


def backward_rows(shape: tuple[Any, ...], tensors: tuple[Any, ...]) -> Iterator[Row]:
    """Yield the result of each tile of the two backward kernels (with the first tile of the other
    one), and of the peers. The figure is for the whole backward pass.
    """
    import flash_triton as mine

    batch, heads, length, head_dim, causal, _ = shape
    flops = 10 * batch * heads * length**2 * head_dim / (2 if causal else 1)
    own = tuple(each.detach().requires_grad_() for each in tensors)
    out = mine.attention(*own, is_causal=causal)
    grad = torch.randn_like(out)

    def call() -> Any:
        return torch.autograd.grad(out, own, grad, retain_graph=True)

    names = ("backward_kv", "backward_q")
    choices = {name: mine.choices_of(name, head_dim, tensors[0].dtype, tma=True) for name in names}
    for name in names:
        for each in names:
            mine.force(each, choices[each][0])
        for tile in choices[name]:
            mine.force(name, tile)
            yield {"pass": name, **mine.tiles.facts(tile), **measured(call, flops)}
    for each in names:
        mine.force(each, None)
    yield {"pass": "backward", "autotuned": True, **measured(call, flops), "tuning": mine.tuning()}
    for name, backend in PEERS.items():
        with sdpa_kernel(backend):
            theirs = torch.nn.functional.scaled_dot_product_attention(*own, is_causal=causal)
            found = measured(
                lambda out=theirs: torch.autograd.grad(out, own, grad, retain_graph=True), flops
            )
        yield {"pass": "backward", "peer": name, **found}


def line(row: Row) -> str:
    """Format one row."""
    tile = "x".join(str(row[each]) for each in ("BLOCK_M", "BLOCK_N") if each in row)
    what = row.get("peer") or ("autotuned " if row.get("autotuned") else "") + tile
    rest = " ".join(
        f"{row[each]}" for each in ("num_warps", "num_stages", "variant") if each in row
    )
    figure = row.get("error") or f"{row['ms']:8.3f} ms {row['tflops']:7.1f} TFLOP/s"
    return f"{row['pass']:12}{what:20}{rest:16}{figure}  {row.get('seconds', math.nan):5.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--forward-only", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = []
    torch.manual_seed(0)
    for shape in SHAPES:
        batch, heads, length, head_dim, causal, backward = shape
        size = (batch, heads, length, head_dim)
        tensors = tuple(torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        label = f"{batch},{heads},{length},{head_dim},bf16{',causal' if causal else ''}"
        print(label, flush=True)
        asked = [forward_rows] if options.forward_only or not backward else [
            forward_rows, backward_rows,
        ]  # fmt: skip
        for ask in asked:
            for row in ask(shape, tensors):
                rows.append({"config": label, **row})
                print(" ", line(row), flush=True)
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
