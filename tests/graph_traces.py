"""Make small Kineto traces of captured and replayed CUDA graphs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Flash_fwd_params)"
OP = "aten::scaled_dot_product_attention"
SHAPE, OTHER = [2, 4, 64, 32], [2, 4, 128, 32]


def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur,
            "args": args}  # fmt: skip


def captured(at: float, dims: list[int], launched: int = 2) -> list[dict[str, Any]]:
    """Return a capture of one call and a kernel after it."""
    shapes = [dims] * 3
    op = event("cpu_op", OP, at + 2, 3)
    strides = [[math.prod(dims[n + 1 :]) for n in range(4)]] * 3
    values = ["", "", "", "", "0.", "False", ""]
    op["args"] = {"Input Dims": shapes, "Input Strides": strides}
    op["args"] |= {"Input type": ["float"] * 3, "Concrete Inputs": values}
    calls = [
        event("cuda_runtime", "cudaLaunchKernel", at + 3 + 4 * n, 1, correlation=int(at) + n)
        for n in range(launched)
    ]
    begin = event("cuda_runtime", "cudaStreamBeginCapture", at, 1, correlation=int(at) + 50)
    end = event("cuda_runtime", "cudaStreamEndCapture", at + 20, 1, correlation=int(at) + 51)
    return [begin, op, *calls, end]


def replay(at: float, names: list[str], streams: tuple[int, ...] = (7,)) -> list[dict[str, Any]]:
    """Return a replay of kernels of 1 µs each, on the streams in turn."""
    launch = event("cuda_runtime", "cudaGraphLaunch", at, 2, correlation=int(at))
    return [launch] + [
        event("kernel", name, at + 5 + n, 1, correlation=int(at), stream=streams[n % len(streams)])
        for n, name in enumerate(names)
    ]


def decode(batch: int, at: float) -> list[dict[str, Any]]:
    """Return the replay of a decoding step, which an engine annotates."""
    step = event("user_annotation", f"execute_context_0(0)_generation_{batch}({batch})", at - 1, 9)
    return [step, *replay(at, [FLASH, "gemm"])]


def recording(folder: Path, batch: int, dims: list[int], *kernels: str) -> Path:
    """Write a trace that contains only the capture of a graph, as engines record it at startup."""
    events = [event("user_annotation", f"capture_{batch}_FULL", 995, 30), *captured(1000, dims)]
    launches = [one for one in events if one["name"] == "cudaLaunchKernel"]
    for launch, kernel in zip(launches, kernels, strict=False):
        launch["args"]["kernel"] = kernel  # as ROCm records it
    path = folder / f"capture_{batch}.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path
