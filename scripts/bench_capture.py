"""Wall time of a whole capture (8 configs x 5 backends, ingest included) over a bare script with the same calls.

python scripts/bench_capture.py [--rounds N]
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from _frame import bare_calls, capture, in_turns, parser, print_ratio, print_times, seconds


def measure(subject: str) -> float:
    """Seconds of one of the two, in a new folder."""
    with tempfile.TemporaryDirectory() as folder:
        return seconds(bare_calls() if subject == "bare" else capture(Path(folder)))


def main() -> None:
    """Interleave the two and print medians and the ratio."""
    rounds = parser(__doc__, rounds=5).parse_args().rounds
    in_turns(("bare", "capture"), measure, 1)  # warms the file cache
    times = in_turns(("bare", "capture"), measure, rounds)
    print_times(times)
    print_ratio(times, "capture", "bare")


if __name__ == "__main__":
    main()
