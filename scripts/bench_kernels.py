"""Time every implementation in kernels/ and PyTorch's own backends by CUDA graph replay, and
compare the best ones with the lower bound of the device and with targets.

python scripts/bench_kernels.py --json out.json
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from profharness import bench
from profharness.attention import costs
from profharness.attention.backends import expand_backends
from profharness.attention.config import SDPA_BACKENDS, Config, expand_configs
from profharness.devices import Peaks, data_sheet
from profharness.errors import ProfharnessError
from profharness.measurements.agreement import replacement_notes
from profharness.measurements.evaluation import BenchResult

TABLE = (
    *("1,1,16,8192,fp32", "1,1,16,8192,fp16"),
    *("1,4,64,512,fp32", "1,4,64,2048,fp32", "1,4,64,4096,fp32"),
    *("1,4,64,8192,fp32", "1,4,64,8192,fp16"),
    *("4,4,128,4096,fp32", "4,4,128,4096,fp16", "8,4,128,2048,fp16"),
)
BF16 = tuple(text.replace("fp16", "bf16") for text in TABLE if "fp16" in text)
QUICK = ("1,1,16,8192,fp32", "1,4,64,2048,fp32", "4,4,128,4096,fp16")
PEERS = ("auto", *SDPA_BACKENDS, "naive", "naive-compiled")
TRITON, TRITON_CONFIG, TRITON_PEER = "flash_triton", "4,16,4096,128,bf16", "cudnn"
MEAN_TARGET, WORST_TARGET, FLOOR_TARGET, TRITON_TARGET = 0.4, 0.8, 1.5, 0.6
LARGE_BYTES = 32_000_000
# share of the data sheet's bandwidth that a copy reaches: 4.3 of 4.8 TB/s on an H200
REACHED = 4.3 / 4.8
RANKING = "graph"
TIME_S, QUICK_TIME_S = 0.4, 0.15  # sampling time per cell


@dataclass(frozen=True)
class Shape:
    """One config: the lower bound, the best implementation of kernels/ and the best peer, in ns per
    call (None if there is none). `ratio` is best / peer, `to_floor` is best / floor.
    """

    config: str
    bytes: int
    floor_ns: float | None
    floor_by: str | None
    best: str | None
    best_ns: float | None
    peer: str | None
    peer_ns: float | None
    ratio: float | None
    to_floor: float | None
    times_ns: dict[str, float]


@dataclass(frozen=True)
class Target:
    """A target. `met` is None if nothing relevant was measured."""

    what: str
    limit: float
    value: float | None
    met: bool | None


def floor_of(config: Config, peaks: Peaks | None) -> tuple[float, str] | None:
    """Return the lower bound in ns and its cause. The bound is the time of the compulsory bytes (Q,
    K, V, O) at the bandwidth of a copy, or of the products at the data sheet's rate for the dtype.
    """
    rate = peaks.flops_per_s.get(str(config.dtype)) if peaks else None
    if peaks is None or not peaks.bandwidth_bytes_per_s or not rate:
        return None
    memory = costs.compulsory_bytes(config) / (peaks.bandwidth_bytes_per_s * REACHED) * 1e9
    products = costs.flops(config) / rate * 1e9
    return max((memory, "bytes"), (products, "FLOP"))


def shape_of(config: Config, times_ns: Mapping[str, float], peaks: Peaks | None) -> Shape:
    """Return the figures of one config from the ns by backend. A backend that is not a peer is one
    of kernels/.
    """
    floor = floor_of(config, peaks)
    own = {name: time for name, time in times_ns.items() if name not in PEERS}
    peers = {name: time for name, time in times_ns.items() if name in PEERS}
    best, peer = _fastest(own), _fastest(peers)
    best_ns, peer_ns = own.get(best or ""), peers.get(peer or "")
    floor_ns, floor_by = floor or (None, None)
    return Shape(
        config=config.label,
        bytes=costs.compulsory_bytes(config),
        floor_ns=floor_ns,
        floor_by=floor_by,
        best=best,
        best_ns=best_ns,
        peer=peer,
        peer_ns=peer_ns,
        ratio=best_ns / peer_ns if best_ns and peer_ns else None,
        to_floor=best_ns / floor_ns if best_ns and floor_ns else None,
        times_ns=dict(times_ns),
    )


def _fastest(times_ns: Mapping[str, float]) -> str | None:
    return min(times_ns, key=lambda name: times_ns[name], default=None)


def geometric_mean(ratios: Sequence[float]) -> float | None:
    """Return the geometric mean of positive numbers, or None if there are none."""
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else None


def targets_of(shapes: Sequence[Shape], triton: Shape | None) -> list[Target]:
    """Return all targets, evaluated on these shapes. `triton` is the shape for flash_triton against
    cuDNN.
    """
    table = {config.label for text in TABLE for config in expand_configs(text)}
    in_table = [each.ratio for each in shapes if each.ratio and each.config in table]
    ratios = [each.ratio for each in shapes if each.ratio]
    found = [
        _at_most("geometric mean of best over peer, shapes of the table", MEAN_TARGET,
                 geometric_mean(in_table)),
        _at_most("geometric mean of best over peer, all shapes", MEAN_TARGET,
                 geometric_mean(ratios)),
        _at_most("worst ratio of best over peer", WORST_TARGET, max(ratios, default=None)),
    ]  # fmt: skip
    found += [
        _at_most(f"best over floor, {each.config}", FLOOR_TARGET, each.to_floor)
        for each in shapes
        if each.bytes > LARGE_BYTES
    ]
    share = None
    if triton is not None and {TRITON, TRITON_PEER} <= triton.times_ns.keys():
        share = triton.times_ns[TRITON_PEER] / triton.times_ns[TRITON]
    met = None if share is None else share >= TRITON_TARGET
    what = f"TFLOP/s of {TRITON} over {TRITON_PEER} at {TRITON_CONFIG}"
    return [*found, Target(what, TRITON_TARGET, share, met)]


def _at_most(what: str, limit: float, value: float | None) -> Target:
    return Target(what, limit, value, None if value is None else value <= limit)


def measured(
    configs: Iterable[str], backends: Sequence[str], folder: Path, time_s: float
) -> BenchResult:
    """Run a bench whose backends take turns on each config. Raise ProfharnessError if it fails."""
    frame = bench(
        list(configs),
        backends,
        measurements=(RANKING,),
        max_time_s=time_s,
        store=folder / "store.db",
        out=folder / "runs",
    )
    answer: BenchResult = frame.attrs["answer"]
    return answer


def shapes_of(answer: BenchResult, peaks: Peaks | None) -> list[Shape]:
    """Return the shapes of a bench, by the measurement that ranks its backends."""
    times: dict[str, dict[str, float]] = {}
    for row in answer.rows:
        mine = times.setdefault(row.config, {})
        if row.measurement == answer.ranking and row.ranked and row.median_ns:
            mine[row.backend] = row.median_ns
    return [
        shape_of(config, found, peaks)
        for label, found in times.items()
        for config in expand_configs(label)
    ]


def absent(answer: BenchResult) -> list[str]:
    """Return one line for each backend and each reason why it has no time for a config."""
    timed = {(row.config, row.backend) for row in answer.rows if row.median_ns}
    found: dict[tuple[str, str], list[str]] = {}
    for cell in answer.cells:
        if (cell.config, cell.backend) in timed and not cell.warnings:
            continue
        text = cell.message or "; ".join(cell.warnings) or "too slow for a CUDA graph"
        text = f"{cell.status}: {text.splitlines()[0][:160]}"
        found.setdefault((cell.backend, text), []).append(cell.config)
    return [
        f"{backend}, {configs[0] if len(configs) == 1 else f'{len(configs)} configs'}, {text}"
        for (backend, text), configs in found.items()
    ]


def told(answer: BenchResult) -> list[str]:
    """Return notes that apply to all figures, one sentence per line."""
    env, lines = answer.environment, []
    lines.append(
        "fp32 products may use TF32, so naive, math and naive-compiled are not comparable"
        if env.get("tf32")
        else "TF32 is off for the matrix products of naive, math and naive-compiled "
        "(float32_matmul_precision highest, allow_tf32 False): true fp32"
    )
    lines += [f"{where}: {text}" for where, text in replacement_notes(answer.cells)]
    lines.append("outputs are not checked here; `profharness verify` checks them")
    return lines


def table(shapes: Sequence[Shape]) -> str:
    """Return the shapes as aligned lines, with times in µs."""
    head = ("config", "floor", "by", "best of kernels/", "µs", "best peer", "µs", "ratio", "/floor")
    lines = [head]
    lines += [
        (
            *(each.config, _us(each.floor_ns), each.floor_by or "-"),
            *(each.best or "-", _us(each.best_ns), each.peer or "-", _us(each.peer_ns)),
            *(_number(each.ratio), _number(each.to_floor)),
        )
        for each in shapes
    ]
    widths = [max(len(line[place]) for line in lines) for place in range(len(head))]
    left = (0, 2, 3, 5)
    return "\n".join(
        "  ".join(
            text.ljust(width) if place in left else text.rjust(width)
            for place, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _us(value_ns: float | None) -> str:
    return "-" if value_ns is None else f"{value_ns / 1e3:.2f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def verdict(target: Target) -> str:
    """Return `met`, `missed`, or that nothing was measured."""
    word = {True: "met", False: "missed", None: "not measured"}[target.met]
    value = "" if target.value is None else f" {target.value:.3g}"
    side = ">=" if target.what.startswith("TFLOP/s") else "<="
    return f"{word}: {target.what}{value} (target {side} {target.limit:g})"


def report(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure, print the results as they come, and return the figures. Raise ProfharnessError."""
    start = time.perf_counter()
    own = asked.kernels.split(",") if asked.kernels else expand_backends(["kernels"], ())
    own = [name for name in own if name not in PEERS]
    texts = asked.config or (QUICK if asked.quick else (*TABLE, *BF16))
    budget_s = QUICK_TIME_S if asked.quick else TIME_S
    answer = measured(texts, [*own, *PEERS], folder, budget_s)
    device = str(answer.environment.get("gpu") or answer.environment.get("cpu"))
    peaks = data_sheet(device)
    shapes, graph = shapes_of(answer, peaks), answer.ranking == RANKING
    print(f"{device}, torch {answer.environment.get('torch')}, µs by {answer.ranking}\n")
    print(table(shapes))
    lines = [*told(answer), *absent(answer)]
    triton = None
    targets: list[Target] = []
    if not graph:
        lines.append(
            "CUDA-graph times need an NVIDIA GPU and a torch with CUDA; these are wall-clock times "
            "of this CPU, so no target is evaluated"
        )
    else:
        if TRITON in own and not asked.config and not asked.quick:
            peers = measured([TRITON_CONFIG], [TRITON, TRITON_PEER, "flash"], folder, budget_s)
            (triton,) = shapes_of(peers, peaks)
            lines += absent(peers)
        targets = targets_of(shapes, triton)
    if peaks is None:
        lines.append(f"no data sheet of {device} is known, so there is no floor")
    print("\n" + "\n".join([*lines, *map(verdict, targets)]))
    seconds = time.perf_counter() - start
    print(f"{seconds:.0f} s")
    return {
        "environment": answer.environment,
        "measurement": answer.ranking,
        "peaks": asdict(peaks) if peaks else None,
        "shapes": [asdict(each) for each in shapes],
        "triton": asdict(triton) if triton else None,
        "targets": [asdict(each) for each in targets],
        "notes": lines,
        "seconds": seconds,
    }


def main() -> None:
    """Print the report. The exit code is 0 even if targets are missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument(
        "--config", action="append", help="config to measure instead of the table; repeatable"
    )
    parser.add_argument("--quick", action="store_true", help="three shapes, fewer samples")
    parser.add_argument(
        "--kernels", metavar="NAME,NAME", help="measure only these files of the folder kernels/"
    )
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = report(asked, Path(folder))
        except ProfharnessError as error:
            print(f"nothing was measured: {error}")
            found = {"error": str(error)}
    if asked.json is not None:
        asked.json.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
