"""Show where the warps of a kernel in kernels/ spend their time: samples of ncu by code section and
stall reason.

python scripts/warp_samples.py 4,4,128,4096,fp16                       # of `tiled`; needs ncu and ncu-report
python scripts/warp_samples.py 1,4,64,8192,fp32 --backend single_query

A section is code that is executed equally often: a loop or a phase. Each line shows the address,
the number of instructions, how often a warp executes an instruction, and the share of all samples.
The line ends with the most frequent instructions, and the stall reasons (in ncu's names) in percent
of all samples.
"""

from __future__ import annotations

import argparse
import collections
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REASON = "smsp__pcsamp_warps_issue_stalled_"
LEAST = 0.01  # share of all samples below which nothing is printed


@dataclass
class Stretch:
    """Adjacent instructions that are executed equally often."""

    start: int
    executed: int
    instructions: int = 0
    samples: int = 0
    opcodes: collections.Counter[str] = field(default_factory=collections.Counter)
    reasons: collections.Counter[str] = field(default_factory=collections.Counter)


def by_address(metric: Any) -> dict[int, int]:
    """Return the instances of a metric that has one per instruction."""
    addresses = metric.correlation_ids()
    return {addresses.as_uint64(i): metric.as_uint64(i) for i in range(metric.num_instances())}


def stretches(action: Any) -> list[Stretch]:
    """Return the code of the kernel from its start."""
    executed = by_address(action.metric_by_name("inst_executed"))
    reasons: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for name in action.metric_names():
        if name.startswith(REASON) and not name.endswith("not_issued"):
            metric = action.metric_by_name(name)
            for address, count in by_address(metric).items() if metric.num_instances() else ():
                reasons[address][name.removeprefix(REASON)] += count
    found: list[Stretch] = []
    for address in sorted(executed):
        if not found or found[-1].executed != executed[address]:
            found.append(Stretch(address, executed[address]))
        words = action.sass_by_pc(address).split()
        opcode = words[1] if words[0].startswith("@") else words[0]
        found[-1].instructions += 1
        found[-1].samples += sum(reasons[address].values())
        found[-1].opcodes[opcode.split(".")[0]] += 1
        found[-1].reasons.update(reasons[address])
    return found


def show(action: Any) -> None:
    """Print one line for each relevant section."""
    found = stretches(action)
    total = max(1, sum(each.samples for each in found))
    spent = action.metric_by_name("gpu__time_duration.sum")
    took = f", {spent.as_double() / 1000:.1f} us under ncu" if spent is not None else ""
    print(f"{action.name()}: {total} samples{took}")
    for each in found:
        if each.samples < LEAST * total:
            continue
        opcodes = " ".join(f"{name} {count}" for name, count in each.opcodes.most_common(4))
        reasons = ", ".join(
            f"{name} {100 * count / total:.1f}" for name, count in each.reasons.most_common(3)
        )
        print(
            f"{each.start - found[0].start:6x} {each.instructions:5} x {each.executed:6} "
            f"{100 * each.samples / total:5.1f} %  {opcodes}  ({reasons})"
        )


def call(text: str, backend: str) -> None:
    """Make the calls that ncu records: one call after one that compiles."""
    import torch

    from profharness.attention.backends import find_backend
    from profharness.attention.config import parse_config
    from profharness.recording.worker.attention import make_call, make_inputs

    config, found = parse_config(text), find_backend(backend)
    attention = found.load() if found.load else None
    forward = make_call(config, make_inputs(config, "cuda", 0), attention)
    with found.context():
        for _ in range(2):
            forward()
    torch.cuda.synchronize()


def main() -> None:
    """Run ncu and print its samples, or act as the process that ncu records."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config")
    parser.add_argument("--backend", default="tiled")
    parser.add_argument("--kernel", default="tiled_attention|single_query|flash_forward")
    parser.add_argument("--call", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.call:
        call(asked.config, asked.backend)
        return
    import ncu_report

    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "samples.ncu-rep")
        argv = [
            *("ncu", "--clock-control", "none", "--section", "SourceCounters"),
            *("--metrics", "gpu__time_duration.sum", "-k", f"regex:{asked.kernel}"),
            *("--launch-skip", "1", "--launch-count", "1", "-o", str(report)),
            *(sys.executable, __file__, asked.config, "--backend", asked.backend, "--call"),
        ]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode or not report.exists():
            raise SystemExit(f"{' '.join(argv)}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        context = ncu_report.load_report(str(report))
        show(context.range_by_idx(0).action_by_idx(0))


if __name__ == "__main__":
    main()
