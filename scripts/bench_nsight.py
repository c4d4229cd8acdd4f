"""Compare the wall time of captures under nsys and ncu (8 configs x 5 backends, including export
and ingest) with the bare tools on a bare script with the same calls.

python scripts/bench_nsight.py [--rounds N]
"""

from __future__ import annotations

import sqlite3
import statistics
import tempfile
from contextlib import closing
from pathlib import Path

from _frame import bare_calls, capture, in_turns, parser, print_ratio, print_times, seconds

from profharness.recording.profilers import require_tool
from profharness.run import Protocol

FIRST_CALL = 1
TRACED = str(Protocol().warmup + Protocol().iterations + FIRST_CALL)
REPLAYED = str(Protocol().warmup + FIRST_CALL + 1)
RATIOS = (("nsys capture", "nsys"), ("ncu capture", "ncu"), ("ncu capture", "ncu in ranges"))


def commands(folder: Path) -> dict[str, list[str]]:
    """Return the commands to time, by name."""
    nsys, ncu = (str(require_tool(name).path) for name in ("nsys", "ncu"))
    duration = [ncu, "--metrics", "gpu__time_duration.sum", "-f", "-o", str(folder / "bare")]
    in_range = ["--nvtx", "--nvtx-include", "profharness@bare"]
    trace = ["--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--force-overwrite=true"]
    traced = [*trace, f"--output={folder / 'bare'}", *bare_calls("--calls", TRACED)]
    replayed = bare_calls("--calls", REPLAYED)
    return {
        "script": replayed,
        "nsys": [nsys, "profile", *traced],
        "nsys capture": capture(folder, "--profiler", "nsys"),
        "ncu": [*duration, *replayed],
        "ncu in ranges": [*duration, *in_range, *bare_calls("--calls", REPLAYED, "--range")],
        "ncu capture": capture(folder, "--profiler", "ncu"),
    }


def main() -> None:
    """Interleave all commands and print medians and ratios."""
    rounds = parser(__doc__, rounds=3).parse_args().rounds
    launches = 0

    def measure(subject: str) -> float:
        nonlocal launches
        with tempfile.TemporaryDirectory() as folder:
            taken = seconds(commands(Path(folder))[subject])
            if subject == "ncu capture":
                with closing(sqlite3.connect(Path(folder) / "store.db")) as store:
                    (launches,) = store.execute("SELECT count(*) FROM launches").fetchone()
        return taken

    subjects = list(commands(Path()))
    in_turns(subjects, measure, 1)  # warm the file cache
    times = in_turns(subjects, measure, rounds)
    print_times(times)
    for name, floor in RATIOS:
        print_ratio(times, name, floor)
    above = statistics.median(times["ncu capture"]) - statistics.median(times["script"])
    each = f"{1000 * above / launches:.1f} ms each"
    print(f"{launches} kernels under ncu: {each} above the script without a profiler")


if __name__ == "__main__":
    main()
