"""Make the traces of a job's ranks from one real trace. Each rank's kernels take the real times
multiplied by the pace of its GPU and noise, and an all-reduce of all ranks ends each.

python scripts/make_ranks.py FOLDER [--ranks N] [--slow RANK=1.05]… [--flash RANK]… [--seed N]
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from make_trace import STACKED

Event = dict[str, Any]
# Standard deviations: GPUs of one model, one kernel on one GPU, launches of it. Two H200s of a host
# lay 0.3 % apart in their medians, single kernels up to 3 %.
GPU_SD, KERNEL_SD, LAUNCH_SD = 0.003, 0.01, 0.02
LATE_US, REDUCE_US = 20.0, 150.0
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
FLASH = (
    "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, "
    "cutlass::half_t, Flash_kernel_traits<64, 128, 128, 4, cutlass::half_t> >, false, true, false, "
    "false, false, true, false, false>(flash::Flash_fwd_params)"
)
CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop"


@dataclass(frozen=True)
class Fleet:
    """The irregularities of a job. `slow`: ranks and their slow-down factor. `flash`: ranks that
    use flash attention. `fewer`: ranks without the last kernel. `driver`: ranks with another
    driver.
    """

    ranks: int = 8
    seed: int = 0
    slow: Mapping[int, float] = field(default_factory=dict)
    flash: Sequence[int] = ()
    fewer: Sequence[int] = ()
    driver: Sequence[int] = ()
    gpu_sd: float = GPU_SD


def read(source: Path = STACKED) -> Event:
    """Return a real trace without its Python frames, which only make the files larger."""
    trace: Event = json.loads(gzip.decompress(source.read_bytes()))
    trace["traceEvents"] = [
        event for event in trace["traceEvents"] if event.get("cat") != "python_function"
    ]
    return trace


def make_ranks(trace: Event, folder: Path, fleet: Fleet) -> list[Path]:
    """Write `rank<N>.json` for each rank of a fleet. Return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    kernels.sort(key=lambda event: event["ts"])
    launch = next(event for event in trace["traceEvents"] if event.get("cat") == "cuda_runtime")
    others = [event for event in trace["traceEvents"] if event.get("cat") != "kernel"]
    paced = [_paced(kernels, fleet, rank) for rank in range(fleet.ranks)]
    arrivals = [_end(events) + LATE_US for events in paced]
    paths = []
    for rank, events in enumerate(paced):
        correlation = max(event["args"]["correlation"] for event in kernels) + 1
        begin = arrivals[rank]
        reduced = copy.deepcopy(events[-1]) | {"name": NCCL, "ts": begin}
        # all ranks leave an all-reduce at the same time
        reduced["dur"] = max(arrivals) + REDUCE_US - begin
        reduced["args"] |= {"correlation": correlation, "grid": [16, 1, 1], "block": [544, 1, 1]}
        called = copy.deepcopy(launch)
        called["ts"] = begin - 10
        called["dur"] = 5.0
        called["args"] |= {"correlation": correlation}
        called["args"].pop("External id", None)
        header = {key: value for key, value in trace.items() if key != "traceEvents"}
        if rank in fleet.driver:
            header["cuda_driver_version"] = 12080
        header["distributedInfo"] = {
            "backend": "nccl",
            "rank": rank,
            "world_size": fleet.ranks,
        }
        whole = {**header, "traceEvents": [*others, called, *events, reduced]}
        paths.append(folder / f"rank{rank}.json")
        paths[-1].write_text(json.dumps(whole))
    return paths


def _paced(kernels: list[Event], fleet: Fleet, rank: int) -> list[Event]:
    """Return the kernels of a rank in the original order, with its own times."""
    noise = random.Random(f"{fleet.seed} {rank}")
    gpu = fleet.slow.get(rank, 1.0) * noise.gauss(1, fleet.gpu_sd)
    pace: dict[str, float] = {}
    made: list[Event] = []
    ends: dict[tuple[int, int], float] = {}
    for event in kernels[: len(kernels) - (rank in fleet.fewer)]:
        args = event["args"]
        stream = (args["device"], args["stream"])
        own = pace.setdefault(event["name"], noise.gauss(1, KERNEL_SD))
        duration = event["dur"] * gpu * own * noise.gauss(1, LAUNCH_SD)
        begin = max(event["ts"], ends.get(stream, 0.0))
        ends[stream] = begin + duration
        name = FLASH if rank in fleet.flash and event["name"].startswith(CUDNN) else event["name"]
        made.append({**event, "name": name, "ts": round(begin, 3), "dur": round(duration, 3)})
    return made


def _end(events: list[Event]) -> float:
    return float(max(event["ts"] + event["dur"] for event in events))


def main() -> None:
    """Write the files of one job."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("folder", type=Path)
    made.add_argument("--ranks", type=int, default=8)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--slow", action="append", default=[], metavar="RANK=FACTOR")
    made.add_argument("--flash", action="append", default=[], type=int, metavar="RANK")
    options = made.parse_args()
    slow = {int(rank): float(pace) for rank, pace in (text.split("=") for text in options.slow)}
    fleet = Fleet(options.ranks, options.seed, slow, options.flash)
    print(f"{len(make_ranks(read(), options.folder, fleet))} files in {options.folder}")


if __name__ == "__main__":
    main()
