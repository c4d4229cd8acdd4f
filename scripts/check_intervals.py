"""Check the intervals of `bench` and the gate of `diff` on equal runs, and on runs with 5 % more
work.

python scripts/check_intervals.py --record 16 --slower 4 --out DIR   # on a GPU: about 50 s per run
python scripts/check_intervals.py --data DIR [DIR …]                 # print the figures, without a GPU
python scripts/check_intervals.py --data DIR [DIR …] --pack FILE     # pack the runs as traces/intervals.tar.xz
python scripts/check_intervals.py --data traces/intervals.tar.xz     # print the figures of such a file

Runs are paired within each folder, for example one folder per GPU; with --across, across all
folders. --pack writes scrubbed runs without traces, with the kernels' times as samples.

Each run is a separate bench. The backends of `repeats.py`, which the script writes to DIR, make
the same call 20 times, in the slower runs 21 times: 5 % more for the GPU and for the CPU.
"""

from __future__ import annotations

import argparse
import itertools
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from _frame import pack_files, without_traces

from profharness import stats
from profharness.attention.config import expand_configs
from profharness.commands.diff.compare import Side, diff_cells
from profharness.jobs.into_store import PROFILED_CALLS, bench_into_store, device_type
from profharness.measurements.measurements import all_samples
from profharness.rows import MEASUREMENTS, CellRow
from profharness.run import BenchPlan, CaptureOptions, Protocol, read_run
from profharness.scrub import scrub
from profharness.store import Selection, Store, ingest_path, open_store

ALIKE, SLOWER = "alike", "slower"
REPEATS = {ALIKE: 20, SLOWER: 21}
REPEATED = "repeats.py:"
OVERLAP, FALSE_ALARMS, FOUND = 0.95, 0.01, 0.95  # targets
CONFIGS = {
    "cuda": (
        *("2,8,512,64,fp16", "1,32,1,128,bf16,kv_heads=8,seq_kv=4096"),
        *("2,8,1024,64,fp16,causal", "4,8,256,128,bf16", "1,8,2048,64,fp16", "2,8,512,64,fp32"),
    ),
    "cpu": ("1,4,128,32,fp32", "1,2,64,32,fp32,causal"),
}
BACKENDS = {"cuda": ("flash", "efficient", "cudnn", "math"), "cpu": ("auto", "math")}
REPEATING = {"cuda": ("flash", "efficient"), "cpu": ("math",)}
SOURCE = """
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

REPEATS = {repeats}


def repeated(backend):
    def attention(q, k, v, *, is_causal=False, scale=None, enable_gqa=False):
        with sdpa_kernel(backend):
            for _ in range(REPEATS):
                output = scaled_dot_product_attention(
                    q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
                )
        return output

    return attention


flash = repeated(SDPBackend.FLASH_ATTENTION)
efficient = repeated(SDPBackend.EFFICIENT_ATTENTION)
math = repeated(SDPBackend.MATH)
"""


@dataclass(frozen=True)
class Recorded:
    """One stored run. `kind` is ALIKE or SLOWER."""

    kind: str
    side: Side
    samples: dict[tuple[str, str], dict[str, tuple[int, ...]]]


def record(out: Path, counts: dict[str, int], device: str, plan: BenchPlan, processes: int) -> None:
    """Bench this many runs of each kind into folders of `out`. Existing runs count."""
    protocol = Protocol(PROFILED_CALLS, 5, 0, 120.0, 42, device, processes=processes)
    kind_of_device = device_type(device)
    configs = [config for text in CONFIGS[kind_of_device] for config in expand_configs(text)]
    # the slower runs are distributed among the others, so that a drift of the machine affects both
    order = sorted(
        ((place + 0.5) / count, kind) for kind, count in counts.items() for place in range(count)
    )
    for number, (_, kind) in enumerate(order, start=1):
        folder = out / kind
        folder.mkdir(parents=True, exist_ok=True)
        (out / "repeats.py").write_text(SOURCE.format(repeats=REPEATS[kind]))
        mine = [f"{out / 'repeats.py'}:{name}" for name in REPEATING[kind_of_device]]
        begin = time.monotonic()
        options = CaptureOptions(out=folder, protocol=protocol, bench=plan)
        backends = [*BACKENDS[kind_of_device], *mine]
        with tempfile.TemporaryDirectory() as scratch:
            captured = bench_into_store(configs, backends, Path(scratch) / "s.db", options)
        statuses = Counter(cell.status for cell in captured.run.cells)
        told = ", ".join(f"{count} {status}" for status, count in statuses.items())
        told += f"; {time.monotonic() - begin:.0f} s"
        print(f"{number} of {len(order)}, {kind}: {captured.run.run}: {told}", flush=True)


def run_folders(data: Path) -> Iterator[tuple[str, Path]]:
    """Yield the finished runs in `data` with their kind."""
    for kind in REPEATS:
        for folder in sorted(path.parent for path in (data / kind).glob("*/run.json")):
            if all(cell.status != "pending" for cell in read_run(folder).cells):
                yield kind, folder
            else:
                print(f"{folder}: is unfinished and is not counted", flush=True)


def pack(data: Sequence[Path], target: Path) -> None:
    """Pack the runs of the folders into one archive, scrubbed, with samples only."""
    with tempfile.TemporaryDirectory() as scratch:
        for folder in data:
            for kind, run in run_folders(folder):
                place = Path(scratch) / folder.resolve().name / kind / run.name
                place.parent.mkdir(parents=True, exist_ok=True)
                scrub(run, place)
                without_traces(place)
        pack_files(Path(scratch), Path(scratch).rglob("run.json"), target)
    print(f"{target}: {target.stat().st_size / 1e3:,.0f} kB")


def unpacked(data: Path, scratch: Path) -> list[Path]:
    """Return a folder of runs itself, or the folders in an archive."""
    if data.is_dir():
        return [data]
    with tarfile.open(data) as archive:
        archive.extractall(scratch, filter="data")
    return sorted(path for path in scratch.iterdir() if (path / ALIKE).is_dir())


def read(data: Path, store: Path) -> list[Recorded]:
    """Return all runs in `data`, as read from the store."""
    kinds = {}
    for kind, folder in run_folders(data):
        ingest_path(store, folder)
        kinds[read_run(folder).run] = kind
    with open_store(store) as opened:
        return [recorded(opened, run, kind) for run, kind in kinds.items()]


def recorded(store: Store, run: str, kind: str) -> Recorded:
    kernels, cells = store.rows(Selection(run))
    done = tuple(renamed(cell) for cell in cells if cell.status == "ok")
    own = tuple(replace(row, backend=short(row.backend or "")) for row in kernels)
    side = Side(run, done, own, None, store.environment(run))
    return Recorded(kind, side, all_samples(store, run, done))


def renamed(cell: CellRow) -> CellRow:
    return replace(cell, backend=short(cell.backend))


def short(backend: str) -> str:
    """Return the file name of a backend in a file, independent of its folder."""
    return Path(backend).name


def pairs(series: Sequence[Sequence[Recorded]]) -> list[tuple[Recorded, Recorded]]:
    """Return every two equal runs of a series, in the order of their creation."""
    return [
        pair
        for runs in series
        for pair in itertools.combinations((run for run in runs if run.kind == ALIKE), 2)
    ]


def overlaps(series: Sequence[Sequence[Recorded]]) -> dict[str, tuple[int, int, float]]:
    """Return, by measurement: cells whose intervals overlap, cells of all pairs, and the median
    half width.
    """
    alike = [run for runs in series for run in runs if run.kind == ALIKE]
    intervals = {
        (run.side.label, place, name): found
        for run in alike
        for place, series in run.samples.items()
        for name, values in series.items()
        if (found := stats.interval(values)) is not None
    }
    result = {}
    for name in MEASUREMENTS:
        places = {place for _, place, each in intervals if each == name}
        both = [
            (intervals[a.side.label, place, name], intervals[b.side.label, place, name])
            for a, b in pairs(series)
            for place in sorted(places)
            if (a.side.label, place, name) in intervals and (b.side.label, place, name) in intervals
        ]
        if both:
            halves = [
                (each.high - each.low) / (each.high + each.low)
                for (_, _, own), each in intervals.items()
                if own == name
            ]
            hits = sum(a.low <= b.high and b.low <= a.high for a, b in both)
            result[name] = hits, len(both), stats.summarize(halves).median
    return result


def slower_cells(baseline: Recorded, candidate: Recorded, *, repeated: bool) -> tuple[int, int]:
    """Return how many cells `diff --fail-on slower` reports, and out of how many. With `repeated`,
    count only those of repeats.py.
    """
    diff = diff_cells(baseline.side, candidate.side)
    cells = {(row.config, row.backend_baseline) for row in diff.rows if row.role == "call"}
    named = {(row.config, row.backend_baseline) for row in diff.fails(frozenset({"slower"}))}
    if repeated:
        cells = {cell for cell in cells if str(cell[1]).startswith(REPEATED)}
    return len(named & cells), len(cells)


def verdict(share: float, wanted: float, *, at_least: bool) -> str:
    good = share >= wanted if at_least else share <= wanted
    sign = "at least" if at_least else "at most"
    return f"{'reached' if good else 'MISSED'} ({sign} {wanted:.0%})"


def report(series: Sequence[Sequence[Recorded]]) -> None:
    """Print the figures of the runs."""
    counts = Counter(run.kind for runs in series for run in runs)
    like = pairs(series)
    if not like:
        raise SystemExit("two equal runs are needed: --record 2 or more")
    print(f"{counts[ALIKE]} equal runs in {len(like)} pairs; {counts[SLOWER]} slower runs")
    for name, (hits, total, half) in overlaps(series).items():
        told = verdict(hits / total, OVERLAP, at_least=True)
        print(f"{name:7} intervals overlap {hits / total:7.2%} of {total}, ±{half:.2%}: {told}")
    both_ways = [pair for a, b in like for pair in ((a, b), (b, a))]
    alarms = [slower_cells(a, b, repeated=False) for a, b in both_ways]
    named, total = (sum(column) for column in zip(*alarms, strict=True))
    told = verdict(named / total, FALSE_ALARMS, at_least=False)
    print(f"false alarms of --fail-on slower {named / total:.2%} of {total} cells: {told}")
    slow = [
        (a, b) for runs in series for a in runs for b in runs if (a.kind, b.kind) == (ALIKE, SLOWER)
    ]
    if slow:
        finds = [slower_cells(a, b, repeated=True) for a, b in slow]
        named, total = (sum(column) for column in zip(*finds, strict=True))
        told = verdict(named / total, FOUND, at_least=True)
        print(f"slow-downs of 5 % found {named / total:.2%} of {total} cells: {told}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", type=int, metavar="N", help="equal runs to record")
    parser.add_argument("--slower", type=int, default=0, metavar="M", help="slower runs to record")
    parser.add_argument("--out", type=Path, help="folder for the run folders")
    parser.add_argument(
        "--data", type=Path, nargs="+", help="print the figures of the runs in these folders"
    )
    parser.add_argument(
        "--pack", type=Path, metavar="FILE", help="pack the runs into this file instead"
    )
    parser.add_argument("--across", action="store_true", help="pair the runs of all folders")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--max-time", type=float, default=0.3, help="seconds of sampling per cell")
    options = parser.parse_args()
    if options.record is not None:
        if options.out is None:
            parser.error("--record needs --out")
        counts = {ALIKE: options.record, SLOWER: options.slower}
        plan = BenchPlan(max_time_s=options.max_time)
        record(options.out.resolve(), counts, options.device, plan, options.processes)
    given = options.data or [options.out]
    if None in given:
        parser.error("pass --record N --out DIR, or --data DIR")
    if options.pack is not None:
        pack(given, options.pack)
        return
    with tempfile.TemporaryDirectory() as scratch:
        series = read_all(given, Path(scratch))
        report([list(itertools.chain(*series))] if options.across else series)


def read_all(data: Sequence[Path], scratch: Path) -> list[list[Recorded]]:
    """Return the runs of each folder, including those in archives."""
    places = [unpacked(path, scratch / str(number)) for number, path in enumerate(data)]
    folders = list(itertools.chain(*places))
    return [read(path, scratch / f"{number}.db") for number, path in enumerate(folders)]


if __name__ == "__main__":
    main()
