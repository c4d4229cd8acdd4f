"""Make small Kineto traces of programs that run steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FLASH = "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4>>(Flash_fwd_params)"
GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_cublas"
ATTENTION = "aten::scaled_dot_product_attention"
Event = dict[str, Any]


def event(cat: str, name: str, ts: float, dur: float, **args: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": args.pop("tid", 1), "ts": ts,
            "dur": dur, "args": args}  # fmt: skip


def annotation(name: str, ts: float, dur: float) -> Event:
    return event("user_annotation", name, ts, dur)


def module(name: str, ts: float, dur: float) -> Event:
    return event("python_function", f"nn.Module: {name}", ts, dur)


def attention(ts: float) -> Event:
    return event("cpu_op", ATTENTION, ts, 2)


def work(number: int, ts: float, start: float, dur: float, **gpu: Any) -> list[Event]:
    """Return an API call at `ts`, and kernels of which each lasts half of `dur` from `start` on."""
    call = event("cuda_runtime", gpu.pop("api", "cudaLaunchKernel"), ts, 1, correlation=number)
    kernels = [
        event("kernel", name, start + part, dur / 2, correlation=number,
              **{"device": 0, "stream": 7, "graph node id": 3 if "Graph" in call["name"] else 0} | gpu)
        for name, part in ((FLASH, 0), (GEMM, dur / 2))
    ]  # fmt: skip
    return [call, *kernels]


def engine(form: str, steps: int = 5) -> list[Event]:
    """Return the trace of an engine that replays a graph of 5 ms in each step of 100 µs."""
    graph = "cudaGraphLaunch"
    return [
        one
        for at in range(steps)
        for one in (
            annotation(form, 110 * at, 100),
            *work(at + 1, 110 * at + 50, 200 + 5_000 * at, 5_000, api=graph),
            annotation("gpu_model_runner: sample", 110 * at + 80, 15),
        )
    ]


def written(folder: Path, events: Sequence[Event]) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": list(events)}))
    return path


def iterations(name: str, count: int = 3) -> Iterator[Event]:
    """Yield iterations of 100 µs with an attention call, its kernels and ranges of a framework."""
    for at in range(count):
        yield annotation(name.format(at), 100 * at, 90)
        yield annotation("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 100 * at, 5)
        yield annotation("DistributedDataParallel.forward", 100 * at + 10, 40)
        yield annotation("Torch-Compiled Region: 0/0", 100 * at + 11, 38)
        yield annotation("self_attention", 100 * at + 12, 30)
        yield attention(100 * at + 20)
        yield from work(at + 1, 100 * at + 21, 100 * at + 25, 20)
        yield annotation("Optimizer.step#AdamW.step", 100 * at + 60, 20)
