"""Leases on groups: one holder at a time, and what becomes of those that stop beating."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

from waiting import until

from profharness.jobs.lease import Lease, Watch, read_holder
from profharness.processes import child_environment

BEAT_S = 0.02
HOLD = """
import sys, time
from pathlib import Path
from profharness.jobs.lease import Lease
assert Lease(Path(sys.argv[1])).take()
print("taken", flush=True)
time.sleep(86400)
"""


def from_elsewhere(path: Path) -> str:
    """Let the lease of this process look like one of another host; its text."""
    holder = read_holder(path)
    assert holder is not None
    path.write_text(json.dumps(asdict(replace(holder, host="node7 pid:[1]", token="other"))))
    return path.read_text()


def test_one_holds_a_lease_and_gives_it_back(tmp_path: Path) -> None:
    path = tmp_path / "group"
    first, second = Lease(path, beat_s=BEAT_S), Lease(path, beat_s=BEAT_S)
    assert first.take()
    assert not second.take()
    holder = read_holder(path)
    assert holder is not None and holder.pid == os.getpid() and not holder.has_ended()
    second.end()
    assert path.exists()
    first.end()
    assert list(tmp_path.iterdir()) == []
    assert second.take()
    second.end()


def test_a_lease_that_beats_is_not_stale_and_one_that_stands_still_is(tmp_path: Path) -> None:
    path, watch = tmp_path / "group", Watch(BEAT_S)
    lease = Lease(path, beat_s=BEAT_S)
    assert lease.take()
    until(lambda: (holder := read_holder(path)) is not None and holder.beat >= 5)
    lease.end()
    still = Lease(path, beat_s=3600)
    assert still.take()
    from_elsewhere(path)
    assert not watch.is_stale(path)
    until(lambda: watch.is_stale(path))
    watch.clear(path)
    assert list(tmp_path.iterdir()) == []


def test_the_lease_of_a_process_that_was_killed_is_stale_at_once(tmp_path: Path) -> None:
    path = tmp_path / "group"
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, env=child_environment()
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"taken\n"
    watch = Watch(3600)
    assert not watch.is_stale(path)
    child.kill()
    child.wait()
    child.stdout.close()
    assert watch.is_stale(path)


def test_a_holder_whose_lease_was_taken_over_hears_of_it(tmp_path: Path) -> None:
    path, lost = tmp_path / "group", threading.Event()
    lease = Lease(path, lost.set, BEAT_S)
    assert lease.take()
    from_elsewhere(path)
    until(lost.is_set)
    lease.end()
    assert path.exists()


def test_a_lease_that_was_made_meanwhile_is_put_back(tmp_path: Path) -> None:
    path, watch = tmp_path / "group", Watch(0)
    lease = Lease(path, beat_s=3600)
    assert lease.take()
    from_elsewhere(path)
    assert watch.is_stale(path)
    path.unlink()  # another watcher has taken it over meanwhile
    assert lease.take()
    watch.clear(path)
    holder = read_holder(path)
    assert holder is not None and not holder.has_ended()
    lease.end()
    assert list(tmp_path.iterdir()) == []
