"""Measure time and peak memory of parsing nsys exports, and of bare sqlite3 reading the same rows,
interleaved and each in a fresh process.

python scripts/bench_nsys.py [--rounds N] [--launches N] [EXPORT…]
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from _frame import cost, in_turns, parser
from make_nsys import DEFAULT, make

PARSE = """
trace = parse_nsys(path)
extra = [sum(len(batch.kernel) for batch in trace.batches()), len(trace.ranges)]
trace.close()
"""
BARE = """
for table, columns in TABLES.items():
    present = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
    read = ", ".join(column for column in columns if column in present)
    where = CALLS if table.endswith("_RUNTIME") else ""
    for row in connection.execute(f"SELECT {read} FROM {table} {where}") if read else ():
        pass
"""
TABLES = """
import sqlite3
from profharness.traces.nsys import LAUNCHING, NUMBERS
from profharness.traces.nsys_export import VARIANTS
like = " OR ".join(f"value LIKE '{pattern}'" for pattern in LAUNCHING)
CALLS = f"WHERE nameId IN (SELECT id FROM StringIds WHERE {like})"
TABLES = {
    **{table: (*NUMBERS, *columns) for table, columns in VARIANTS.items()},
    "CUPTI_ACTIVITY_KIND_RUNTIME": ("correlationId", "nameId", "globalTid", "start"),
    "NVTX_EVENTS": ("start", "end", "globalTid", "eventType", "domainId", "textId", "text"),
}
connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
"""
SUBJECTS = {
    "bare sqlite3": (TABLES, BARE),
    "parse": ("from profharness.traces.nsys import parse_nsys", PARSE),
}


def main() -> None:
    """Measure each export."""
    made = parser(__doc__, rounds=3)
    made.add_argument("export", type=Path, nargs="*", help="default: a generated export")
    made.add_argument("--launches", type=int, default=1_000_000)
    options = made.parse_args()
    head = f"{'export':20} {'MB':>6} {'what':13} {'median s':>9} {'launches/s':>11} {'MB RSS':>7}"
    with tempfile.TemporaryDirectory() as folder:
        paths = options.export or [Path(folder) / "made.sqlite"]
        if not options.export:
            make(DEFAULT, paths[0], options.launches)
        print(head)
        for path in paths:
            report(path, options.rounds)


def report(path: Path, rounds: int) -> None:
    """Measure one export and print one line per subject."""
    measured = in_turns(
        list(SUBJECTS), lambda subject: cost(*SUBJECTS[subject], path, Path()), rounds
    )
    _, _, launches, ranges = measured["parse"][0]
    size = path.stat().st_size / 1e6
    for subject, runs in measured.items():
        seconds = statistics.median(run[0] for run in runs)
        peak, rate = max(run[1] for run in runs), launches / seconds
        print(f"{path.name:20} {size:6.0f} {subject:13} {seconds:9.2f} {rate:11.0f} {peak:7.0f}")
    print(f"{launches} launches, {ranges} ranges")


if __name__ == "__main__":
    main()
