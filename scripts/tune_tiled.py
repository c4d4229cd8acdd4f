"""Compare plans of kernels/tiled.py on a GPU. Every plan is checked, then timed as a CUDA graph.

python scripts/tune_tiled.py                          # the shapes of the benchmark, with promising plans
python scripts/tune_tiled.py --shape 1,4,64,512,fp32  # one shape
python scripts/tune_tiled.py --json plans.json

The plans of each shape are sorted by time. A line shows the median time of a graph replay and its
ratio to the fastest time. The plan selected by choose_plan() is marked.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from bench_kernels import TABLE

from profharness.attention.config import parse_config
from profharness.recording.worker.attention import torch_dtype
from profharness.recording.worker.timing import open_graph

FOLDER = Path(__file__).resolve().parents[1] / "kernels"
sys.path.append(str(FOLDER))

import _tiled_plan as plans  # noqa: E402

SAMPLES = 15
WORTH = 1.6


def candidates(problem: plans.Problem, multiprocessors: int) -> list[plans.Plan]:
    """Return the selected plan, then the others. The others are every row tile, number of parts and
    exchange whose estimated time is at most WORTH times the best, each also with half of the
    stages.
    """
    chosen = plans.choose_plan(problem, multiprocessors)
    found = {chosen: None}
    least = plans.expected_us(chosen, problem, multiprocessors)
    for plan in plans.one_tile_plans(problem, multiprocessors):
        if plans.expected_us(plan, problem, multiprocessors) <= WORTH * least:
            found[plan] = None
            if plan.stages > 3:
                found[plans.replace(plan, stages=plan.stages // 2 + 1)] = None
    return list(found)


def problem_of(shape: str) -> tuple[plans.Problem, torch.dtype, tuple[int, int, int, int]]:
    """Parse a config without options, such as those of TABLE."""
    config = parse_config(shape)
    dtype = torch_dtype(config.dtype)
    size = (config.batch, config.num_heads, config.seq_len_q, config.head_dim)
    heads = config.batch * config.num_heads
    return (
        plans.Problem(heads, config.seq_len_q, config.seq_len_kv, config.head_dim, dtype.itemsize),
        dtype,
        size,
    )


def precompile(names: list[str], arch: str) -> None:
    """Fill the cache, with one process per core."""
    with concurrent.futures.ProcessPoolExecutor() as pool:
        list(pool.map(_compile, names, itertools.repeat(arch)))


def _compile(name: str, arch: str) -> None:
    from profharness.attention.backends.cuda_source import CudaSource

    CudaSource(FOLDER / "tiled.cu").cubin([name], arch)


def median_us(call: Any) -> float:
    """Return the median of a prepared call in a CUDA graph with warm L2."""
    return statistics.median(open_graph(call, 1)(SAMPLES)["graph"]) / 1000


def instance(dtype: torch.dtype, plan: plans.Plan) -> str:
    """Return the name expression of a plan's kernel."""
    import tiled

    return plan.instance(tiled.TYPES[dtype])


def measure(shape: str) -> list[dict[str, Any]]:
    """Return one row per plan, the fastest first."""
    import tiled

    problem, dtype, size = problem_of(shape)
    count = torch.cuda.get_device_properties(0).multi_processor_count
    torch.manual_seed(0)
    q, k, v = (torch.randn(size, device="cuda", dtype=dtype) for _ in range(3))
    scores = q.double() @ k.double().transpose(-1, -2) / math.sqrt(size[-1])
    right = torch.softmax(scores, -1) @ v.double()
    rows = []
    for number, plan in enumerate(candidates(problem, count)):
        row: dict[str, Any] = {"shape": shape, "plan": plan.template, "chosen": number == 0}
        row.update(plan.described())
        try:
            out = tiled.run(plan, q, k, v)
            torch.cuda.synchronize()
            row["error"] = float((out.double() - right).norm() / right.norm())
            row["us"] = median_us(lambda plan=plan: tiled.run(plan, q, k, v))
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
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    parser.add_argument("--top", type=int, default=4, help="plans to print for each shape")
    options = parser.parse_args()
    shapes = options.shape or TABLE
    count = torch.cuda.get_device_properties(0).multi_processor_count
    names = set()
    for shape in shapes:
        problem, dtype, _ = problem_of(shape)
        names |= {instance(dtype, plan) for plan in candidates(problem, count)}
    print(f"{torch.cuda.get_device_name()}: {len(names)} instances to compile", flush=True)
    precompile(sorted(names), "sm_90a")
    everything = []
    for shape in shapes:
        rows = measure(shape)
        everything += rows
        fastest = rows[0].get("us", math.nan)
        wrong = sum("failed" in row or not row["error"] < 1e-2 for row in rows)
        print(f"\n{shape}: {len(rows)} plans, {wrong} wrong or failed")
        for rank, row in enumerate(rows, start=1):
            if rank <= options.top or row["chosen"] or "failed" in row:
                mark = "chosen" if row["chosen"] else ""
                told = row.get("failed") or f"{row['us']:8.2f} us {row['us'] / fastest:5.2f}"
                words = (
                    f"{row['exchange']:8}{row['tile']:9}x {row['parts']:3} parts  <{row['plan']}>"
                )
                print(f"{rank:4} {told}  {words} {mark}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(everything))


if __name__ == "__main__":
    main()
