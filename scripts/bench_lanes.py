"""Measure the cost and speed-up of lanes: the scheduler's time per group and cell, the fixed cost
of a group, and, on a host with two or more GPUs, a sweep on one GPU against two.

    python scripts/bench_lanes.py [--configs SWEEP] [--alone SWEEP] [--measurement NAME]
        [--processes N] [--keep FOLDER]
    python scripts/bench_lanes.py --scheduler tls://head:8786
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from profharness.attention.config import expand_configs  # noqa: E402
from profharness.environment import visible_gpus  # noqa: E402
from profharness.jobs import campaign  # noqa: E402
from profharness.jobs.campaign import CampaignScheduler, OnStep, Plain  # noqa: E402
from profharness.jobs.lane import (  # noqa: E402
    make_part,
    publish,
    run_group,
)
from profharness.processes import child_environment  # noqa: E402
from profharness.recording.capture import plan_capture, write_folder  # noqa: E402
from profharness.run import CaptureOptions, Protocol, Run  # noqa: E402

SWEEP = "2,16,{256:5248:+128},128,bf16"  # 40 configs
EVERY_THIRD = "2,16,{384:4992:+384},128,bf16"  # a third of them; all would take 7 minutes
SOME_AGAIN = "2,16,{384:4992:+1152},128,bf16"  # a part of those
BACKENDS = "flash,cudnn,efficient"
MEASUREMENTS = ("graph", "kernel", "cold")
WITHIN = {"graph": 0.01, "kernel": 0.01, "cold": 0.03}
DEVICE: tuple[str, ...] = ()  # for the sweep: that of this host


@dataclass(frozen=True)
class Sampling:
    """The measurement of each cell in a sweep, and the number of processes."""

    measurements: tuple[str, ...] = MEASUREMENTS
    processes: int = 1


# one group per config, so that both runs have the same groups
CLIENT = """
from profharness.jobs import campaign
campaign.GROUP_S = campaign.SMALLEST_S = 0.1
campaign.GROUPS_A_LANE = 10_000
from profharness.cli import main
main()
"""


class Instant:
    """A transport whose lanes finish every group immediately. spent_s is its own time."""

    def __init__(self, lanes: int) -> None:
        self._names = [f"cpu {index}" for index in range(lanes)]
        self._done: list[tuple[str, Plain]] = []
        self.spent_s = 0.0

    def lanes(self) -> list[Plain]:
        return [{"lane": name} for name in self._names]

    def submit(self, lane: Plain, spec: Plain, _: OnStep) -> None:
        begin = time.process_time()
        make_group(spec)
        told = {"group": spec["group"], "error": None, "seconds": 1.0}
        self._done.append((lane["lane"], told))
        self.spent_s += time.process_time() - begin

    def next_done(self, _: float) -> tuple[str, Plain] | None:
        return self._done.pop(0) if self._done else None

    def end(self, lane: Plain) -> None:
        pass


def make_group(spec: Plain) -> None:
    """Create the folder of a group as a lane would."""
    final = Path(spec["root"]) / spec["group"]
    part = final.with_name(f"{final.name}.here.part")
    for cell in spec["run"]["cells"]:
        cell |= {"status": "ok", "samples": {"cold": [1000] * 100, "graph": [1000] * 100}}
    make_part(part, spec)
    publish(part, final)


def dask_rows(out: Path, url: str) -> Iterator[tuple[str, str, str]]:
    """Measure the cost per group as wall time and CPU seconds of the client. The lanes of the Dask
    scheduler find each group finished.
    """
    from profharness.jobs.cluster import Cluster

    class Quick(Cluster):
        """Creates each group before it is submitted. spent_s is its own time."""

        spent = (0.0, 0.0)

        def submit(self, lane: Plain, spec: Plain, on_step: OnStep) -> None:
            begin = clocks()
            make_group(spec)
            wall, cpu = since(begin)
            self.spent = self.spent[0] + wall, self.spent[1] + cpu
            super().submit(lane, spec, on_step)

    def measured(text: str, a_group: int) -> tuple[float, float, int, int]:
        folder, made, run = planned(text, out, a_group)
        transport = Quick(url, insecure=True)
        transport.lanes()
        begin = clocks()
        CampaignScheduler([folder], transport).carry_out()
        wall, cpu = since(begin)
        transport.close()
        wall, cpu = wall - transport.spent[0], cpu - transport.spent[1]
        return wall, cpu, len(made.groups), len(run.cells)

    wall, cpu, groups, _ = measured("1,1,{8:2400:+8},8,fp32", 1)
    a_group = wall / groups
    figure = f"{a_group * 1e3:.1f} ms, {cpu / groups * 1e3:.1f} CPU ms of the client"
    yield "Dask, a group", figure, "≤ 20 ms"
    wall, _, groups, cells = measured("1,{1:10:+1},{8:2400:+8},8,fp32", 100)
    yield "Dask, a cell", f"{max(0, wall - groups * a_group) / cells * 1e3:.2f} ms", "≤ 1 ms"


def clocks() -> tuple[float, float]:
    """Return wall time and the CPU time of this process, in seconds."""
    return time.perf_counter(), time.process_time()


def since(begin: tuple[float, float]) -> tuple[float, float]:
    return time.perf_counter() - begin[0], time.process_time() - begin[1]


def planned(
    text: str, out: Path, a_group: int, device: str = "cpu"
) -> tuple[Path, campaign.Campaign, Run]:
    """Make a campaign with this many cells per group."""
    options = CaptureOptions(("events",), out, Protocol(device=device, samples=5, iterations=1))
    run, _ = plan_capture(expand_configs(text), ("auto",), options)
    names = [cell.cell for cell in run.cells]
    parts = [tuple(names[at : at + a_group]) for at in range(0, len(names), a_group)]
    groups = tuple(campaign.Group(f"{at:016x}", part, 1.0) for at, part in enumerate(parts))
    made = campaign.Campaign(("auto",), groups)
    folder = write_folder(out, run, ("auto",))
    campaign.write_campaign(folder, made)
    return folder, made, run


def scheduler_s(out: Path, text: str, a_group: int) -> tuple[float, int, int]:
    """Return the scheduler's CPU seconds for a campaign, the number of groups, and of cells."""
    folder, made, run = planned(text, out, a_group)
    transport = Instant(4)
    begin = time.process_time()
    CampaignScheduler([folder], transport).carry_out()
    return time.process_time() - begin - transport.spent_s, len(made.groups), len(run.cells)


def scheduler_rows(out: Path) -> Iterator[tuple[str, str, str]]:
    """Derive the cost per group from many small groups, and the cost per cell from few large ones."""
    seconds, groups, _ = scheduler_s(out, "1,1,{8:2400:+8},8,fp32", 1)
    a_group = seconds / groups
    yield "scheduler, a group", f"{a_group * 1e3:.2f} ms", "≤ 20 ms"
    seconds, groups, cells = scheduler_s(out, "1,{1:10:+1},{8:2400:+8},8,fp32", 100)
    yield "scheduler, a cell", f"{(seconds - groups * a_group) / cells * 1e3:.3f} ms", "≤ 1 ms"


def fixed_row(out: Path) -> tuple[str, str, str]:
    """Measure the fixed cost of a group in wall time and CPU seconds. The group has one tiny cell
    on this host's device; the wall time of the cell itself is subtracted.
    """
    folder, made, run = planned("1,1,64,64,fp32", out, 1, "auto")
    walls, cpus = [], []
    for _ in range(3):
        spec = campaign.make_spec(folder, made, run, made.groups[0])
        begin = children_s()
        told = run_group(spec | {"root": tempfile.mkdtemp(dir=out)})
        cpus.append(children_s() - begin)
        record = json.loads((Path(told["folder"]) / "run.json").read_bytes())
        walls.append(told["seconds"] - record["cells"][0]["duration_ns"] / 1e9)
    wall, cpu = statistics.median(walls), statistics.median(cpus)
    part = min(wall, cpu) / (campaign.GROUP_S + min(wall, cpu))
    figure = f"{wall:.2f} s, {cpu:.2f} CPU s; {part:.1%} of {campaign.GROUP_S:g} s of work plus this cost"
    return "fixed cost of a group", figure, "≤ 10 %"


def children_s() -> float:
    """Return the CPU seconds of the children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@dataclass(frozen=True)
class Swept:
    """A bench on lanes: seconds until the last group and until the client finished, the record of
    each group, and the time of each on its lane.
    """

    last_s: float
    end_s: float
    records: dict[str, dict[str, Any]]
    groups_s: list[float]

    def rate(self, seconds: float) -> float:
        return len(self.records) / seconds

    def text(self) -> str:
        cells = [
            sum(cell["duration_ns"] for cell in record["cells"]) for record in self.records.values()
        ]
        return (
            f"{len(self.records)} groups in {self.last_s:.1f} s, all in {self.end_s:.1f} s; a group "
            f"{statistics.mean(self.groups_s):.2f} s, its cells {statistics.mean(cells) / 1e9:.2f} s"
        )


def sweep(out: Path, lanes: int, text: str, name: str, how: Sampling) -> Swept:
    """Run a bench on this many lanes."""
    place = out / name
    words = ["bench", "--config", text, "--backend", BACKENDS, "--processes", str(how.processes)]
    # unreachable, so that every cell uses its full time
    words += ["--precision", "0.01%", "--max-time", "2s", "--scheduler", f"local:{lanes}"]
    words += [word for each in how.measurements for word in ("--measurement", each)]
    words += ["--out", str(place), "--store", f"{place}.db", "-o", f"{place}.json", *DEVICE]
    begin, clock = time.monotonic(), time.time()
    with Path(f"{place}.log").open("w") as log:
        command = [sys.executable, "-P", "-c", CLIENT, *words]
        subprocess.run(command, env=child_environment(), stdout=log, stderr=log, check=True)
    end_s = time.monotonic() - begin
    (groups,) = place.glob("*/groups")
    # the folder changes last when the last group is renamed
    last_s = groups.stat().st_mtime - clock
    records = {
        path.parent.name: json.loads(path.read_bytes()) for path in groups.glob("*/run.json")
    }
    told = re.findall(r" groups, ([\d.]+) s", Path(f"{place}.log").read_text())
    return Swept(last_s, end_s, records, list(map(float, told)))


def ratios(alone: Swept, other: Swept, name: str) -> list[float]:
    """Return, for each cell that the same GPU ran in both sweeps, the ratio of its medians."""
    found = []
    for group, record in other.records.items():
        before = alone.records.get(group)
        if before is None or before["environment"].get("gpu_key") != record["environment"].get(
            "gpu_key"
        ):
            continue
        for cell, first in zip(record["cells"], before["cells"], strict=True):
            if cell["samples"].get(name) and first["samples"].get(name):
                medians = [statistics.median(each["samples"][name]) for each in (cell, first)]
                found.append(medians[0] / medians[1])
    return sorted(found)


def ratio_rows(
    alone: Swept, other: Swept, what: str, names: Sequence[str]
) -> Iterator[tuple[str, str, str]]:
    for name in names:
        values = ratios(alone, other, name)
        if not values:
            yield f"{name}: {what} / alone", "no cell ran on the same GPU", ""
            continue
        off = sum(abs(value - 1) > WITHIN[name] for value in values)
        figure = f"{statistics.median(values):.4f} ({values[0]:.3f} to {values[-1]:.3f})"
        limit = f"within {WITHIN[name]:.0%}; {off} of {len(values)} cells are not"
        yield f"{name}: {what} / alone", figure, limit


def two_gpu_rows(
    out: Path, alone: str, text: str, again: str = SOME_AGAIN, how: Sampling | None = None
) -> Iterator[tuple[str, str, str]]:
    """Compare groups per second on two GPUs and on one, which runs every third config of the sweep.
    Some of these run alone once more, to show the difference between undisturbed runs.
    """
    how = how or Sampling()
    one = sweep(out, 1, alone, "on1", how)
    yield "one GPU", one.text(), ""
    two = sweep(out, 2, text, "on2", how)
    yield "two GPUs", two.text(), ""
    keys = {record["environment"].get("gpu_key") for record in two.records.values()}
    yield "groups, GPUs that ran some", f"{len(two.records)}, {len(keys)}", "≥ 40, 2"
    times = two.rate(two.last_s) / one.rate(one.last_s)
    yield "ratio of groups per second on two GPUs, until the last group", f"{times:.3f}", "≥ 1.9"
    times = two.rate(two.end_s) / one.rate(one.end_s)
    yield "the same, with the ingest and the final table", f"{times:.3f}", "≥ 1.9"
    yield from ratio_rows(one, two, "both busy", how.measurements)
    once_more = sweep(out, 1, again, "on1-again", how)
    yield from ratio_rows(one, once_more, "alone once more", how.measurements)


def rows(out: Path, alone: str, text: str, how: Sampling) -> Iterator[tuple[str, str, str]]:
    yield from scheduler_rows(out)
    yield fixed_row(out)
    if len(visible_gpus()) > 1:
        yield from two_gpu_rows(out, alone, text, how=how)
    else:
        yield "a sweep on two GPUs", "not measured", "this host has fewer"


def main() -> None:
    parser = argparse.ArgumentParser(description=re.split(r"\n\n", __doc__ or "")[0])
    parser.add_argument("--configs", default=SWEEP, help="configs of the sweep on two GPUs")
    parser.add_argument("--alone", default=EVERY_THIRD, help="configs of the sweep on one GPU")
    parser.add_argument(
        "--measurement",
        action="append",
        choices=MEASUREMENTS,
        help="measurements of the sweeps (default: all)",
    )
    parser.add_argument(
        "--processes", type=int, default=1, help="processes per config in the sweeps (default: 1)"
    )
    parser.add_argument("--scheduler", help="a Dask scheduler; measure only its cost per group")
    parser.add_argument("--keep", type=Path, help="folder for the results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = options.keep or Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        print("| what | figure | wanted |\n|---|---:|---|", flush=True)
        how = Sampling(tuple(options.measurement or MEASUREMENTS), options.processes)
        asked = out, options.alone, options.configs, how
        for row in dask_rows(out, options.scheduler) if options.scheduler else rows(*asked):
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
