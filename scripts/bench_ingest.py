"""Time and peak memory of profharness' ingest against json.load and HolisticTraceAnalysis,
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

CHILD = """
import json, resource, sys, time
from pathlib import Path
what, path, store = sys.argv[1:4]
{setup}
start = time.perf_counter()
{work}
seconds = time.perf_counter() - start
peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF,
resource.RUSAGE_CHILDREN))
print(json.dumps([seconds, peak * 1024 / 1e6]))
"""
PARSE = "trace = parse_chrome(Path(path)); list(map(len, (b.kernel for b in trace.batches())))"
SUBJECTS = {
    "json.load": ("import gzip\nread = gzip.open if path.endswith('.gz') else open",
                  "json.load(read(path))"),
    "parse": ("from profharness.parse.chrome import parse_chrome", PARSE),
    "ingest": ("from profharness.store import ingest_path", "ingest_path(Path(store), Path(path))"),
    "hta": ("from hta.common.trace import parse_trace_file", "parse_trace_file(path)"),
}  # fmt: skip


def measure(subject: str, path: Path) -> tuple[float, float]:
    """(seconds, peak RSS in MB of the largest process) of one run in a fresh process."""
    setup, work = SUBJECTS[subject]
    code = CHILD.format(setup=setup, work=work)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", code, subject, str(path), f"{folder}/store.db"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{subject} failed on {path}:\n{done.stderr}")
    seconds, peak = json.loads(done.stdout.splitlines()[-1])
    return seconds, peak


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, nargs="+", help="made with scripts/make_trace.py")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parse-only", action="store_true", help="leave the store out")
    parser.add_argument("--hta", action="store_true", help="HolisticTraceAnalysis too")
    options = parser.parse_args()
    ours = "parse" if options.parse_only else "ingest"
    subjects = ["json.load", ours, *(["hta"] if options.hta else [])]
    print(f"{'trace':28} {'what':10} {'median s':>9} {'MB RSS':>8} {'json.load / it':>15}")
    for path in options.trace:
        found: dict[str, list[tuple[float, float]]] = {subject: [] for subject in subjects}
        for _ in range(options.rounds):
            for subject in subjects:
                found[subject].append(measure(subject, path))
        base = statistics.median(seconds for seconds, _ in found["json.load"])
        for subject, runs in found.items():
            seconds = statistics.median(s for s, _ in runs)
            peak = max(p for _, p in runs)
            print(f"{path.name:28} {subject:10} {seconds:9.2f} {peak:8.0f} {base / seconds:15.1f}")


if __name__ == "__main__":
    main()
