"""Measures plans of kernels/tiled.py against each other on a GPU: every plan is checked, then timed as a CUDA graph.

python scripts/tune_tiled.py                          # the shapes of the benchmark, the plans worth trying
python scripts/tune_tiled.py --shape 1,4,64,512,fp32  # one shape
python scripts/tune_tiled.py --json plans.json

For each shape the plans come fastest first, with the median time of a graph replay and its ratio to the
fastest; the one that choose_plan() takes is marked.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).resolve().parents[1] / "kernels"
sys.path.append(str(FOLDER))

import _tiled_plan as plans  # noqa: E402

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SHAPES = (
    "1,1,16,8192,fp32",
    "1,1,16,8192,fp16",
    "1,4,64,512,fp32",
    "1,4,64,2048,fp32",
    "1,4,64,4096,fp32",
    "1,4,64,8192,fp32",
    "1,4,64,8192,fp16",
    "4,4,128,4096,fp32",
    "4,4,128,4096,fp16",
    "8,4,128,2048,fp16",
)
CALLS, SAMPLES = 20, 15


def candidates(problem: plans.Problem, multiprocessors: int) -> Iterator[plans.Plan]:
    """Every plan of the grid below that fits: one key tile, all blocks at once."""
    keys = max(16, 1 << (problem.keys - 1).bit_length())
    size = problem.element_bytes
    for rows, parts in itertools.product((16, 32, 64, 128), (1, 2, 4, 8, 16, 32, 64)):
        if rows > max(16, problem.rows):
            continue
        blocks = math.ceil(problem.rows / rows) * problem.heads * parts
        chunk = math.ceil(problem.head_dim / parts)
        chunk = max(64, 1 << (chunk - 1).bit_length())
        if chunk > 1024 or blocks > 2 * multiprocessors or blocks < multiprocessors // 10:
            continue
        if math.ceil(problem.head_dim / chunk) != parts:
            continue
        for grid in (False, True):
            if (not grid and parts > plans.MAX_CLUSTER) or (
                grid and (parts == 1 or blocks > multiprocessors)
            ):
                continue
            for slice_ in (32, 64) if size == 4 else (64,):
                columns = min(chunk, 512, 32768 // rows // (2 if size == 2 and rows == 128 else 1))
                wide = 128 if rows == 16 and chunk >= 128 else slice_
                yield from _staged(
                    problem, rows, keys, min(wide, chunk), chunk, columns, parts, grid
                )


def _staged(
    problem: plans.Problem,
    rows: int,
    keys: int,
    slice_: int,
    chunk: int,
    columns: int,
    parts: int,
    grid: bool,
) -> Iterator[plans.Plan]:
    seen = set()
    for stages, per_sm in itertools.product((3, 8), (1, 2)):
        if per_sm == 2 and grid:
            continue
        limit = plans.SHARED_BYTES if per_sm == 1 else plans.SHARED_BYTES_OF_TWO
        for values in (33, 17, 15, 12, 10, 8, 6, 5, 4, 3, 2):
            plan = plans.Plan(
                problem.element_bytes, rows, keys, slice_, chunk, columns,
                min(stages, chunk // slice_ + 1), values, parts, grid=grid, per_sm=per_sm,
            )  # fmt: skip
            values = min(values, plan.units + 1)
            plan = plans.replace(plan, value_stages=values)
            if plan.shared_bytes <= limit and values >= 2:
                if plan not in seen:
                    seen.add(plan)
                    yield plan
                break


def problem_of(shape: str) -> tuple[plans.Problem, torch.dtype, tuple[int, int, int, int]]:
    """`batch,heads,rows,head_dim,dtype`."""
    *numbers, dtype = shape.split(",")
    batch, heads, rows, head_dim = map(int, numbers)
    size = DTYPES[dtype].itemsize
    return (
        plans.Problem(batch * heads, rows, rows, head_dim, size),
        DTYPES[dtype],
        (batch, heads, rows, head_dim),
    )


def precompile(names: list[str], arch: str) -> None:
    """Fill the cache by as many processes as there are cores."""
    with concurrent.futures.ProcessPoolExecutor() as pool:
        list(pool.map(_compile, names, itertools.repeat(arch)))


def _compile(name: str, arch: str) -> None:
    from profharness.backends.cuda_source import CudaSource

    CudaSource(FOLDER / "tiled.cu").cubin([name], arch)


def median_us(call: Any) -> float:
    """Of a call in a CUDA graph of CALLS calls, L2 warm."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                call()
    times = []
    for _ in range(SAMPLES):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / CALLS)
    return statistics.median(times)


def measure(shape: str, chosen: list[plans.Plan] | None = None) -> list[dict[str, Any]]:
    """A row for each plan, the fastest first."""
    import tiled

    problem, dtype, size = problem_of(shape)
    count = torch.cuda.get_device_properties(0).multi_processor_count
    torch.manual_seed(0)
    q, k, v = (torch.randn(size, device="cuda", dtype=dtype) for _ in range(3))
    right = (
        torch.softmax(q.double() @ k.double().transpose(-1, -2) / math.sqrt(size[-1]), -1)
        @ v.double()
    )
    rows = []
    for plan in chosen if chosen is not None else list(candidates(problem, count)):
        row: dict[str, Any] = {
            "shape": shape,
            "plan": plan.template,
            "parts": plan.parts,
            **plan.described(),
        }
        try:
            out = tiled.run(plan, q, k, v)
            torch.cuda.synchronize()
            row["error"] = float((out.double() - right).norm() / right.norm())
            row["us"] = median_us(lambda plan=plan: tiled.run(plan, q, k, v))
            kernel = tiled.SOURCE.kernel(
                f"tiled_attention<{tiled.TYPES[dtype]}, {plan.template}>",
                shared_bytes=plan.shared_bytes,
                cluster=1 if plan.grid else plan.parts,
            )
            row.update(registers=kernel.registers, local=kernel.local_bytes)
        except Exception as error:
            row["failed"] = f"{type(error).__name__}: {error}"[:200]
        rows.append(row)
    return sorted(rows, key=lambda row: row.get("us", math.inf))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", action="append", help="batch,heads,rows,head_dim,dtype; default: the ten"
    )
    parser.add_argument("--json", type=Path, help="write all rows there")
    parser.add_argument("--top", type=int, default=6, help="plans to print for each shape")
    options = parser.parse_args()
    shapes = options.shape or list(SHAPES)
    count = torch.cuda.get_device_properties(0).multi_processor_count
    names = set()
    for shape in shapes:
        problem, dtype, _ = problem_of(shape)
        element = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "float"}[dtype]
        names |= {
            f"tiled_attention<{element}, {plan.template}>" for plan in candidates(problem, count)
        }
    print(f"{len(names)} instances to compile", flush=True)
    precompile(sorted(names), "sm_90a")
    everything = []
    for shape in shapes:
        rows = measure(shape)
        everything += rows
        bad = [
            row
            for row in rows
            if "failed" in row or row["error"] > 1e-2 or math.isnan(row["error"])
        ]
        print(f"\n{shape}: {len(rows)} plans, {len(bad)} wrong or failed")
        for row in rows[: options.top] + bad[:2]:
            print("  ", {key: value for key, value in row.items() if key != "shape"}, flush=True)
    if options.json:
        options.json.write_text(json.dumps(everything))


if __name__ == "__main__":
    main()
