"""Compile flash_triton's kernels for sm_90 without a GPU, and print their resources.

A separate program, because the tests interpret triton elsewhere. It prints one JSON object per tile
with registers, stack bytes (spills) and shared bytes. `compiled.py every` compiles all tiles of the
tables (two minutes), otherwise only the first of each.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.append(str(Path(__file__).resolve().parents[2] / "kernels"))

import _flash_triton_kernels as kernels
import _flash_triton_tiles as tiles

SPILLS = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")
DTYPES = {"fp16": 2, "bf16": 2, "fp32": 4}


def compile_tile(
    name: str,
    head_dim: int,
    dtype: str,
    tile: tuple[int, int, int, int],
    *,
    causal: bool = False,
    tma: bool = False,
    ones: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return the registers, stack bytes and shared bytes of a tile, its instruction counts, and the
    seconds of its compilation.
    """
    kernel = kernels.PASSES[name]
    block_d = tiles.block_d(head_dim)
    meta = {"D": head_dim, "CAUSAL": causal, "SAVE": True, "BLOCK_D": block_d}
    if name == "backward_delta":
        meta |= {"BLOCK_M": tile[0]}
        options = {"num_warps": tile[2], "num_stages": tile[3]}
    else:
        config = tiles.config(tile, tma=tma)
        meta |= config.kwargs
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    source = _source(kernel, meta, dtype, tma=tma, ones=ones)
    begin = time.perf_counter()
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    seconds = time.perf_counter() - begin
    ptx = made.asm["ptx"]
    return {
        **_resources(made.asm["cubin"]),
        "shared_bytes": made.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "cp_async": ptx.count("cp.async.cg") + ptx.count("cp.async.ca"),
        "tma_loads": ptx.count("cp.async.bulk.tensor"),
        "seconds": round(seconds, 1),
    }


def _source(
    kernel: Any, meta: dict[str, Any], dtype: str, *, tma: bool, ones: tuple[str, ...]
) -> ASTSource:
    """Return the kernel with the arguments of a call with contiguous tensors. `ones` are 1."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, argument in enumerate(kernel.arg_names):
        if argument in meta:
            signature[argument] = "constexpr"
            constants[(place,)] = meta[argument]
        elif argument.endswith("_desc"):
            rows = meta["BLOCK_M" if argument[0] in "qg" else "BLOCK_N"]
            shape = f"[1, 1, {rows}, {meta['BLOCK_D']}]"
            signature[argument] = f"tensordesc<{dtype}{shape}>" if tma else "constexpr"
            if not tma:
                constants[(place,)] = None
        elif argument in ones or re.fullmatch(r"\w+_d", argument):
            signature[argument] = "constexpr"
            constants[(place,)] = 1
        elif re.fullmatch(r"d?[qkvog]_[bhs]", argument):
            signature[argument] = "i32"
            if meta["BLOCK_D"] == meta["D"]:
                attributes[(place,)] = [["tt.divisibility", 16]]
        elif argument in ("heads", "group", "sq", "skv", "padded", "span"):
            signature[argument] = "i32"
            if argument == "padded":
                attributes[(place,)] = [["tt.divisibility", 16]]
        elif argument in ("scale", "qk_scale"):
            signature[argument] = "fp32"
        else:
            single = argument in ("lse", "delta")
            signature[argument] = "*fp32" if single else f"*{dtype}"
            attributes[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def _resources(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = SPILLS.search(told)
    if found is None:
        raise ValueError(f"cuobjdump told no resources: {told}")
    return {"registers": int(found[1]), "stack_bytes": int(found[2]), "local_bytes": int(found[4])}


def jobs(every: bool) -> Iterator[dict[str, Any]]:
    """Yield the compilations: each tile of the tables, or the first of each at head_dim 64 and 128."""
    for table, dtype, variants in (
        (tiles.HALF, "bf16", (False, True)),
        (tiles.TMA_ALONE, "bf16", (True,)),
        (tiles.SINGLE, "fp32", (False,)),
    ):
        for name, by_size in table.items():
            for head_dim, found in by_size.items():
                wanted = found if every else found[: int(dtype == "bf16" and head_dim < 256)]
                for tile in wanted:
                    for tma in variants:
                        yield {
                            "name": name, "head_dim": head_dim, "dtype": dtype, "tile": tile,
                            "tma": tma, "causal": True,
                        }  # fmt: skip


if __name__ == "__main__":
    for job in jobs(sys.argv[1:] == ["every"]):
        print(json.dumps({**job, **compile_tile(**job)}), flush=True)
