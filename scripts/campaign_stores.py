"""Trials of the fault campaign on a store in use: signals, several writers, a reader that keeps it
open, and a file that vanishes.
`STORE_TRIALS` has one row per kind, like `TRIALS` of campaign_trials.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from campaign_inputs import DATA, RUN
from campaign_trials import PATIENCE_S, Bench, Outcome, counted, interrupted, until, whole

TRACE = DATA / "kineto_h200.json.gz"
# Keeps a store open as soon as it exists, while its process opens and closes it repeatedly; at the
# end it prints the runs that it sees.
READER = """
import json, select, sys
from pathlib import Path
from profharness.errors import NotFoundError
from profharness.store import open_store

kept = None
while not select.select([sys.stdin], [], [], 0.01)[0]:
    try:
        store = open_store(Path("s.db"))
    except NotFoundError:
        continue
    store.runs()
    kept, store = kept or store, None
print(json.dumps(sorted(row.run for row in kept.runs())))
"""


@contextlib.contextmanager
def reading(bench: Bench, place: Path) -> Iterator[Callable[[], str]]:
    """Let another process keep the store open. The returned function reports what is wrong with the
    runs it sees.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", READER],
        cwd=place,
        env=bench.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    def ask() -> str:
        seen = process.communicate("\n", PATIENCE_S)[0].strip().rpartition("\n")[2]
        wanted = json.dumps([run for run, *_ in counted(place / "s.db")])
        return (
            ""
            if seen == wanted
            else f"a process that keeps the store open sees {seen}, not {wanted}"
        )

    try:
        yield ask
    finally:
        process.kill()
        process.communicate()


def kill_ingest(bench: Bench, deadline: float) -> Iterator[Outcome]:
    """Send a signal during an ingest, or remove the store's file. The next ingest must restore a
    complete store.
    """
    words = ["ingest", str(RUN), str(TRACE), "--store", "s.db"]
    reference = bench.place()
    began = time.monotonic()
    code, told = bench.run(reference, *words)
    took = time.monotonic() - began
    if code != 0:
        yield Outcome("ingest", "a whole ingest fails", told)
        return
    wanted = counted(reference / "s.db")
    for _ in until(deadline, 2):
        place = bench.place()
        with reading(bench, place) as ask:
            wrong, what = interrupted(bench, place, words, took)
            wrong = wrong or whole(place / "s.db")
            if not wrong:
                code, told = bench.run(place, *words)
                if code != 0 or counted(place / "s.db") != wanted:
                    wrong, what = "the next ingest differs", f"{what}\n{told}"
            wrong = wrong or ask()
        yield Outcome(what, wrong, what)
        shutil.rmtree(place)
        yield vanishing(bench, words, took, len(wanted))


def runs_in(store: Path) -> int:
    """Return the number of runs in a store, 0 if it does not exist yet."""
    with contextlib.suppress(sqlite3.OperationalError):
        return len(counted(store)) if store.exists() else 0
    return 0


def vanishing(bench: Bench, words: Sequence[str], longest: float, runs: int) -> Outcome:
    """Rename the store during an ingest. Either all runs are stored, or the exit code is 1 and the
    reported count is right.
    """
    place = bench.place()
    store, other, log = place / "s.db", place / "renamed.db", bench.folder / f"{place.name}.log"
    process = bench.start(place, *words, log=log)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(longest * bench.random.random())
    with contextlib.suppress(FileNotFoundError):
        store.rename(other)
    code = process.wait(PATIENCE_S)
    told = log.read_text(errors="replace")
    here, there = map(runs_in, (store, other))
    # the last line is about all sources, those before it about one each
    *_, found = (None, *re.finditer(r"(\d+) of (\d+) (?:stored: |sources could not)", told))
    what, wrong = "the store is renamed", whole(store) or whole(other)
    if code == 0 and max(here, there) < runs:
        wrong = f"exit 0 with {here} and {there} of {runs} runs stored"
    if found:
        count, total = map(int, found.groups())
        stored = count if found[0].endswith("stored: ") else total - count
        if (stored, total) != (here, runs):
            wrong = f"{found[0]}where {here} of {runs} are"
    if wrong:
        return Outcome(what, wrong, told)
    shutil.rmtree(place)
    return bench.fault(words, code, told, (0, 1))


def writers(bench: Bench, deadline: float) -> Iterator[Outcome]:
    """Ingest traces into one store with eight processes at once, and with one more afterwards. All
    must be stored, none may fail because of a lock, and a process that keeps the store open must
    see them.
    """
    text = gzip.decompress(TRACE.read_bytes())
    for _ in until(deadline, 1):
        place = bench.place()
        processes = []
        with reading(bench, place) as ask:
            for number in range(8):
                (place / f"t{number}.json").write_bytes(
                    text + b" " * (number // 2)
                )  # each content twice
                log = bench.folder / f"{place.name}-{number}.log"
                words = ["ingest", f"t{number}.json", "--store", "s.db"]
                processes.append((bench.start(place, *words, log=log), log, words))
            for process, log, words in processes:
                code = process.wait(PATIENCE_S)
                yield bench.fault(words, code, log.read_text(errors="replace"), (0,))
            words = ["ingest", str(RUN), "--store", "s.db"]
            yield bench.fault(words, *bench.run(place, *words), (0,))
            wrong = whole(place / "s.db")
            if not wrong and runs_in(place / "s.db") != 5:
                wrong = f"{runs_in(place / 's.db')} runs instead of 5"
            wrong = wrong or ask()
        yield Outcome("the store of eight writers", wrong)
        shutil.rmtree(place)


STORE_TRIALS: dict[str, Callable[[Bench, float], Iterator[Outcome]]] = {
    "kill-ingest": kill_ingest,
    "writers": writers,
}
