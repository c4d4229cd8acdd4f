"""Time and peak memory of profharness' ingest against json.load and HolisticTraceAnalysis,
interleaved, each in a fresh process.

python scripts/bench_ingest.py [--rounds N] [--parse-only] [--hta] [TRACE…]
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from _frame import cost, in_turns, parser
from make_trace import DEFAULT, make_trace

MADE_BYTES = 10**8
PARSE = "trace = parse_chrome(path); list(map(len, (b.kernel for b in trace.batches())))"
SUBJECTS = {
    "json.load": ("import gzip\nread = gzip.open if path.suffix == '.gz' else open",
                  "json.load(read(path))"),
    "parse": ("from profharness.parse.chrome import parse_chrome", PARSE),
    "ingest": ("from profharness.store import ingest_path", "ingest_path(store, path)"),
    "hta": ("from hta.common.trace import parse_trace_file", "parse_trace_file(str(path))"),
}  # fmt: skip


def main() -> None:
    """Measure each trace and print a line for each subject."""
    made = parser(__doc__, rounds=3)
    made.add_argument("trace", type=Path, nargs="*", help="by default one of 100 MB is made")
    made.add_argument("--parse-only", action="store_true", help="leave the store out")
    made.add_argument("--hta", action="store_true", help="HolisticTraceAnalysis too")
    options = made.parse_args()
    ours = "parse" if options.parse_only else "ingest"
    subjects = ["json.load", ours, *(["hta"] if options.hta else [])]
    with tempfile.TemporaryDirectory() as folder:
        traces = options.trace or [Path(folder) / "made.json"]
        if not options.trace:
            make_trace(DEFAULT, traces[0], MADE_BYTES, "attention")
        print(f"{'trace':28} {'what':10} {'median s':>9} {'MB RSS':>8} {'json.load / it':>15}")
        for path in traces:
            report(path, subjects, options.rounds)


def report(path: Path, subjects: list[str], rounds: int) -> None:
    """Measure one trace, every ingest into a store of its own."""

    def measure(subject: str) -> list[float]:
        with tempfile.TemporaryDirectory() as folder:
            return cost(*SUBJECTS[subject], path, Path(folder) / "store.db")

    measured = in_turns(subjects, measure, rounds)
    medians = {name: statistics.median(run[0] for run in runs) for name, runs in measured.items()}
    for subject, median in medians.items():
        peak = max(run[1] for run in measured[subject])
        above = medians["json.load"] / median
        print(f"{path.name:28} {subject:10} {median:9.2f} {peak:8.0f} {above:15.1f}")


if __name__ == "__main__":
    main()
