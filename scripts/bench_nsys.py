"""Time and peak memory of parsing nsys exports, against bare sqlite3 reading the same rows; both
interleaved, each in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from make_nsys import DEFAULT, make

CHILD = """
import json, resource, sys, time
from pathlib import Path
path = sys.argv[1]
{setup}
start = time.perf_counter()
{work}
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([seconds, peak * 1024 / 1e6, count, ranges]))
"""
PARSE = """
trace = parse_nsys(Path(path))
count, ranges = sum(len(batch.kernel) for batch in trace.batches()), len(trace.ranges)
trace.close()
"""
BARE = """
ranges = 0
for table, columns in TABLES.items():
    known = {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}
    wanted = ", ".join(column for column in columns if column in known)
    where = CALLS if table.endswith("_RUNTIME") else ""
    cursor = connection.execute(f"SELECT {wanted} FROM {table} {where}") if wanted else []
    for row in cursor:
        pass
count = 0
"""
TABLES = """
import sqlite3
from profharness.parse.nsys_read import LAUNCHING, NUMBERS, VARIANTS
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
    "parse": ("from profharness.parse.nsys import parse_nsys", PARSE),
}


def measure(subject: str, path: Path) -> tuple[float, float, int, int]:
    """(seconds, peak RSS in MB, launches, ranges) of one run in a fresh process."""
    setup, work = SUBJECTS[subject]
    code = CHILD.format(setup=setup, work=work)
    command = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{subject} failed on {path}:\n{done.stderr}")
    seconds, peak, count, ranges = json.loads(done.stdout.splitlines()[-1])
    return seconds, peak, count, ranges


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("export", type=Path, nargs="*", help="left out: one made for the purpose")
    parser.add_argument("--launches", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = list(options.export)
        if not paths:
            paths = [Path(folder) / "made.sqlite"]
            make(DEFAULT, paths[0], options.launches)
        print(
            f"{'export':20} {'MB':>6} {'what':13} {'median s':>9} {'launches/s':>11} {'MB RSS':>7}"
        )
        for path in paths:
            report(path, options.rounds)


def report(path: Path, rounds: int) -> None:
    """Measure one export and print a line per subject."""
    found: dict[str, list[tuple[float, float, int, int]]] = {subject: [] for subject in SUBJECTS}
    for _ in range(rounds):
        for subject in SUBJECTS:
            found[subject].append(measure(subject, path))
    _, _, launches, ranges = found["parse"][0]
    size = path.stat().st_size / 1e6
    for subject, runs in found.items():
        seconds = statistics.median(run[0] for run in runs)
        peak = max(run[1] for run in runs)
        rate = launches / seconds
        print(f"{path.name:20} {size:6.0f} {subject:13} {seconds:9.2f} {rate:11.0f} {peak:7.0f}")
    print(f"{launches} launches, {ranges} ranges")


if __name__ == "__main__":
    main()
