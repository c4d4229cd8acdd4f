"""Make a large nsys export by replaying a real one: its tables with shifted times and ids, and more
threads and processes.
"""

from __future__ import annotations

import argparse
import gzip
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
DEFAULT = DATA / "nsys_h200_startend.sqlite.gz"
PREFIX = "CUPTI_ACTIVITY_KIND_"
TIMED = (f"{PREFIX}RUNTIME", f"{PREFIX}KERNEL", f"{PREFIX}MEMSET", "NVTX_EVENTS")
GAP_NS = 1_000_000
ROUND_IDS = 10_000  # correlation ids that one replay may use
DOMAIN_ROW = 75

Row = tuple[Any, ...]


def make(source: Path, target: Path, launches: int, processes: int = 2) -> int:
    """Write an export of at least `launches` launches to `target`. Return their number.

    The source is replayed repeatedly, in turn for each process. Each process has four threads:
    the two of the source, and two more.
    """
    target.unlink(missing_ok=True)
    target.write_bytes(gzip.decompress(source.read_bytes()))
    with closing(sqlite3.connect(target)) as connection:
        connection.execute("PRAGMA journal_mode = OFF")
        connection.execute("PRAGMA synchronous = OFF")
        sources = {name: _table(connection, name) for name in TIMED}
        per_round = sum(len(sources[name][1]) for name in TIMED[1:3])
        rounds = -(-launches // per_round)
        for name, (columns, rows) in sources.items():
            connection.execute(f"DELETE FROM {name}")
            marks = ", ".join("?" * len(columns))
            replay = _replayed(columns, rows, rounds, processes)
            connection.executemany(f"INSERT INTO {name} VALUES ({marks})", replay)
        connection.commit()
    return rounds * per_round


def _table(connection: sqlite3.Connection, name: str) -> tuple[list[str], list[Row]]:
    cursor = connection.execute(f"SELECT * FROM {name} ORDER BY start")
    return [column[0] for column in cursor.description], cursor.fetchall()


def _replayed(
    columns: list[str], rows: list[Row], rounds: int, processes: int
) -> Iterator[list[Any]]:
    """Yield the rows of one process after another, as nsys writes them."""
    at = {name: number for number, name in enumerate(columns)}
    span = _span(rows, [at[name] for name in ("start", "end") if name in at])
    kind = at.get("eventType")
    for process in range(processes):
        for number in range(process, rounds, processes):
            turn, owner = number // processes, process << 24
            shifts = {
                **dict.fromkeys(("start", "end"), number * span),
                "correlationId": turn * ROUND_IDS,
                "globalPid": owner,
                "globalTid": owner + turn % 2 * 16,
            }
            places = [(at[name], shift) for name, shift in shifts.items() if name in at]
            for row in rows:
                if kind is not None and row[kind] == DOMAIN_ROW and turn:
                    continue
                new = list(row)
                for place, shift in places:
                    if new[place] is not None:
                        new[place] += shift
                yield new


def _span(rows: list[Row], times: list[int]) -> int:
    """Return one span for all tables, three seconds, which contains the whole sample."""
    latest = max(row[column] or 0 for row in rows for column in times)
    assert latest < 3_000_000_000, "the source is longer than a replay"
    return 3_000_000_000 + GAP_NS


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--launches", type=int, default=1_000_000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--source", type=Path, default=DEFAULT, help="a gzipped export")
    options = parser.parse_args()
    count = make(options.source, options.target, options.launches, options.processes)
    size = options.target.stat().st_size / 1e6
    print(f"{options.target}: {count} launches, {size:.0f} MB")


if __name__ == "__main__":
    main()
