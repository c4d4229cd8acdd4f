"""Measure `ranks` and `ingest --scheduler local` on jobs made from a real trace.

python scripts/bench_ranks.py fleets [--fleets N] [--ranks N]     GPUs named in even and uneven jobs
python scripts/bench_ranks.py many [--ranks N]                    how long a job of many ranks takes
python scripts/bench_ranks.py ingest [--files N] [--mb N]         many files into one store, twice
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _frame import HERE, output
from make_ranks import Fleet, make_ranks, read
from make_trace import STACKED

from profharness.commands.ranks.outliers import compare_ranks
from profharness.jobs.parallel_ingest import ingested, readers_of
from profharness.store import ingest_path, open_store

SLOW = 1.05
OF_A_GPU = ("kernel", "cuda_runtime", "user_annotation", "gpu_memcpy", "gpu_memset")
# relates CPU seconds on a busy machine to those on a free one
JSON_LOAD = (
    "import json, sys, time\nwith open(sys.argv[1]) as file:\n    json.load(file)\n"
    "print(time.process_time())"
)
WHOLE = (1000, 100)  # files and MB each, to which the ingest is projected


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its finished children."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (0, -1))


def cost(work: Callable[[], object]) -> tuple[float, float]:
    """Return the CPU seconds and seconds of some work."""
    cpu, begin = cpu_seconds(), time.perf_counter()
    work()
    return cpu_seconds() - cpu, time.perf_counter() - begin


def small() -> dict[str, Any]:
    """Return the real step, reduced to what the comparison needs, so that thousands of files are
    made quickly.
    """
    trace = read()
    trace["traceEvents"] = [
        event
        for event in trace["traceEvents"]
        if event.get("cat") in OF_A_GPU or event.get("ph") == "M"
    ]
    return trace


def fleets(count: int, ranks: int) -> None:
    """Run `ranks` on even jobs and on equally many jobs with one GPU that is 5 % slow, and print
    its findings.
    """
    trace = small()
    named: Counter[str] = Counter()
    ratios = []
    with tempfile.TemporaryDirectory() as name:
        for seed in range(2 * count):
            slow = {seed % ranks: SLOW} if seed >= count else {}
            folder, store = Path(name) / f"job{seed}", Path(name) / f"{seed}.db"
            for path in make_ranks(trace, folder, Fleet(ranks, seed, slow)):
                ingest_path(store, path)
                path.unlink()
            with open_store(store) as opened:
                answer = compare_ranks(opened)
            store.unlink()
            told = {each.ranks for each in answer.findings}
            right = (f"rank {seed % ranks}",)
            named["false" if told - ({right} if slow else set()) else "none false"] += 1
            if slow:
                named["slow named" if right in told else "slow missed"] += 1
                ratios += [row.ratio or 0 for row in answer.rows if row.rank == seed % ranks]
    print(f"{count} even jobs and {count} with a GPU {SLOW - 1:.0%} slow, of {ranks} ranks each")
    print(f"jobs with a false name      {named['false']} of {2 * count}")
    print(f"slow GPUs named             {named['slow named']} of {count}")
    print(f"their ratios                {min(ratios):.3f} to {max(ratios):.3f}")


def many(ranks: int) -> None:
    """Run `ranks` on one job of many ranks, one of them slow."""
    with tempfile.TemporaryDirectory() as name:
        store = Path(name) / "s.db"
        job = Path(name) / "job"
        make_ranks(small(), job, Fleet(ranks, 1, {ranks // 3: SLOW}))
        print(
            "ingest      CPU s {:.1f}, s {:.1f}".format(
                *cost(lambda: ingested(store, [job], "local"))
            )
        )
        command = [sys.executable, "-m", "profharness", "ranks", "--store", str(store)]
        shown: list[str] = []

        def ask() -> None:
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            shown.append(done.stdout)

        costs = [cost(ask) for _ in range(5)]
        print(f"ranks       CPU s {min(c for c, _ in costs):.2f}, s {min(s for _, s in costs):.2f}")
        with open_store(store) as opened:
            groups = opened.connection.execute("SELECT count(*) FROM launch_groups").fetchone()[0]
        print(
            f"of {ranks} ranks, {groups:,} groups of launches, {store.stat().st_size / 1e6:.0f} MB"
        )
        print("\n".join(shown[-1].splitlines()[:4]))


def ingest(files: int, megabytes: int) -> None:
    """Ingest trace files of different ranks with one process per CPU, then once more."""
    with tempfile.TemporaryDirectory() as name:
        job, store = Path(name) / "job", Path(name) / "s.db"
        job.mkdir()
        first = Path(name) / "first.json"
        # in another process: a process inherits the peak memory of its parent
        make = (sys.executable, str(HERE / "make_trace.py"), str(first), "--profile", "bare")
        output([*make, "--size", f"{megabytes}MB", "--source", str(STACKED)])
        for rank in range(files):
            told = json.dumps({"distributedInfo": {"rank": rank, "world_size": files}})
            with first.open("rb") as body, (job / f"rank{rank}.json").open("wb") as target:
                target.write(told[:-1].encode() + b",")
                body.seek(1)
                shutil.copyfileobj(body, target, 1 << 20)
        first.unlink()
        size = sum(path.stat().st_size for path in job.iterdir())
        cpus = len(readers_of("local"))
        cpu, seconds = cost(lambda: ingested(store, [job], "local"))
        again, again_s = cost(lambda: ingested(store, [job], "local"))
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        alone = float(output([sys.executable, "-c", JSON_LOAD, str(job / "rank0.json")]))
        with open_store(store) as opened:
            (launches,) = opened.connection.execute("SELECT count(*) FROM launches").fetchone()
        whole = WHOLE[0] * WHOLE[1] * 1e6
        print(
            f"{files} files, {size / 1e9:.2f} GB, {launches:,} launches; {cpus} CPUs, load {os.getloadavg()[0]:.1f}"
        )
        print(f"{'':24}{'CPU s':>8}{'s':>8}{'CPU s / 100 MB':>16}")
        print(f"{'json.load of one':24}{alone:8.1f}{'':8}{alone / size * files * 1e8:16.3f}")
        print(f"{'ingest':24}{cpu:8.1f}{seconds:8.1f}{cpu / size * 1e8:16.3f}")
        print(f"{'again':24}{again:8.1f}{again_s:8.1f}{again / size * 1e8:16.3f}")
        print(f"peak of a process       {peak:8.0f} MB")
        held = store.stat().st_size
        print(f"store                   {held / 1e6:8.0f} MB, {held / launches:.0f} B a launch")
        minutes = cpu / size * whole / cpus / 60
        print(f"{WHOLE[0]:,} x {WHOLE[1]} MB on {cpus} free CPUs: {minutes:.1f} min")


def main() -> None:
    """Run one of the measurements."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("what", choices=("fleets", "many", "ingest"))
    made.add_argument("--fleets", type=int, default=100)
    made.add_argument("--ranks", type=int)
    made.add_argument("--files", type=int, default=40)
    made.add_argument("--mb", type=int, default=100)
    options = made.parse_args()
    if options.what == "fleets":
        fleets(options.fleets, options.ranks or 8)
    elif options.what == "many":
        many(options.ranks or 1000)
    else:
        ingest(options.files, options.mb)


if __name__ == "__main__":
    main()
