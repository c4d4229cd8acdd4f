"""Compare CPU time and peak memory of an ingest with json.load and HolisticTraceAnalysis.

Each measurement is a fresh process, and the programs take turns. The table shows the CPU seconds of
a program and its children, in total and per 100 MB of JSON. The table also shows how many times
longer json.load takes, by CPU seconds and by wall time. Each program reads the file once before it
is measured, so that the file is in the page cache.

python scripts/bench_ingest.py [--rounds N] [--parse-only] [--hta] [--large] [TRACE…]
"""

from __future__ import annotations

import gzip
import statistics
import sys
import tempfile
from pathlib import Path

from _frame import cost, in_turns, output, parser
from make_trace import DEFAULT, STACKED, make_trace

MADE_BYTES, LARGE_BYTES = 10**8, 10**9
# json.dumps(indent=1) makes 250 MB of them
INDENTED_BYTES = 187 * 10**6
INDENTED = "attention, indented"
# Traces of attention alone, and of one program recorded without stacks, with stacks, and with so many
# that they are two thirds of the file. All but the indented one have the layout of libkineto.
MADE = {
    "attention": (DEFAULT, "attention"),
    INDENTED: (DEFAULT, "attention"),
    "program": (STACKED, "bare"),
    "program with stacks": (STACKED, "attention"),
    "program, mostly stacks": (STACKED, "stack"),
}
LARGE = {
    "large program": (STACKED, "bare"),
    "large, mostly stacks": (STACKED, "stack"),
}
READ = "with path.open('rb', buffering=0) as file:\n    while file.read(1 << 20):\n        pass"
CPU = "cpu = lambda: sum(sum(resource.getrusage(who)[:2]) for who in (0, -1))\nbefore = cpu()"
PARSE = "trace = parse_chrome(path); list(map(len, (b.kernel for b in trace.batches())))"
SUBJECTS = {
    "json.load": ("import gzip\nread = gzip.open if path.suffix == '.gz' else open",
                  "json.load(read(path))"),
    "parse": ("from profharness.traces.chrome import parse_chrome", PARSE),
    "ingest": ("from profharness.store import ingest_path", "ingest_path(store, path)"),
    "on one CPU": ("import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
                   "from profharness.store import ingest_path", "ingest_path(store, path)"),
    "hta": ("from hta.common.trace import parse_trace_file", "parse_trace_file(str(path))"),
}  # fmt: skip


def main() -> None:
    """Measure each trace and print one line per program."""
    made = parser(__doc__, rounds=3)
    made.add_argument(
        "trace",
        type=Path,
        nargs="*",
        help="default: generated traces of 100 MB, and an indented one of 250 MB",
    )
    made.add_argument(
        "--large",
        action="store_true",
        help="make two traces of 1 GB instead, each read on one CPU and on all; json.load needs 5 GB",
    )
    made.add_argument("--parse-only", action="store_true", help="parse only, without a store")
    made.add_argument("--hta", action="store_true", help="include HolisticTraceAnalysis")
    options = made.parse_args()
    ours = "parse" if options.parse_only else "ingest"
    subjects = ["json.load", ours, *(["hta"] if options.hta else [])]
    subjects += ["on one CPU"] if options.large else []
    kinds, size = (LARGE, LARGE_BYTES) if options.large else (MADE, MADE_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        traces = options.trace or [Path(folder) / f"{name}.json" for name in kinds]
        for (source, profile), path in zip(
            kinds.values(), () if options.trace else traces, strict=False
        ):
            indented = path.stem == INDENTED
            make_trace(source, path, INDENTED_BYTES if indented else size, profile)
            if indented:
                indent(path)
        print(
            f"{'trace':28} {'what':10} {'CPU s':>9} {'per 100 MB':>11} {'MB RSS':>8} "
            f"{'json.load / it':>15} {'by wall':>8}"
        )
        for path in traces:
            report(path, subjects, options.rounds)


def indent(path: Path) -> None:
    """Write the events of a trace over many lines, as editors and other tools do.

    This runs in a process of its own, because processes inherit the peak memory of their parent.
    """
    program = (
        "import json, sys; trace = json.load(open(sys.argv[1])); "
        "json.dump(trace, open(sys.argv[1], 'w'), indent=1)"
    )
    output([sys.executable, "-c", program, str(path)])


def report(path: Path, subjects: list[str], rounds: int) -> None:
    """Measure one trace. Each ingest writes a new store."""

    def measure(subject: str) -> list[float]:
        with tempfile.TemporaryDirectory() as folder:
            setup, work = SUBJECTS[subject]
            work += "\nextra.append(cpu() - before)"
            return cost(f"{setup}\n{READ}\n{CPU}", work, path, Path(folder) / "store.db")

    measured = in_turns(subjects, measure, rounds)
    size = len(gzip.decompress(path.read_bytes())) if path.suffix == ".gz" else path.stat().st_size
    wall, medians = (
        {name: statistics.median(run[at] for run in runs) for name, runs in measured.items()}
        for at in (0, 2)
    )
    for subject, median in medians.items():
        peak = max(run[1] for run in measured[subject])
        above = (times["json.load"] / times[subject] for times in (medians, wall))
        print(
            f"{path.name:28} {subject:10} {median:9.2f} {median / size * 1e8:11.2f} {peak:8.0f} "
            "{:15.1f} {:8.1f}".format(*above)
        )


if __name__ == "__main__":
    main()
