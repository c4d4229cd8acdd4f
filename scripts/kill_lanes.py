"""Kill processes of a campaign at random moments, and check the results.

Send SIGKILL to the client, a lane's child or a worker, then run `capture --resume`. No cell may be
lost or counted twice, and every process must end after the client.

    python scripts/kill_lanes.py --trials 100 [--kills 3] [--seed 0] [--torch]

Without --torch, the worker is a stand-in that starts in 20 ms. The processes, folders, journals and
traces are the same, and there are many more moments in which a process can be killed. The stand-in
waits for a permit before each cell, and each kill grants a few permits. A campaign therefore cannot
end before its kills, even on a fast machine. A process that outlives its client cannot end just
because its work is done.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from profharness.store import ingest_path

ROOT = Path(__file__).resolve().parents[1]
MARK = "PROFHARNESS_KILLED"  # environment variable of all processes of a trial: its folder
ORPHAN_S = 60.0  # far beyond what a loaded machine needs to end a process
PATIENCE_S = 600.0
CONFIGS = "1,1,{8:128:+8},8,fp32"
BACKENDS = "auto,math"
CELLS = 32
SAMPLES = 3
PERMITS = 6  # cells that may run between two kills, at most
assert 3 * PERMITS < CELLS, "three kills at least before the end"
CLIENT = """
import sys
from profharness.jobs import campaign, background_ingest
campaign.GROUP_S = campaign.SMALLEST_S = 1.0
background_ingest.ENOUGH_CPUS = 1  # traces are parsed while lanes work
from profharness.cli import main
main()
"""
WORKER = """#!{python} -IS
import gzip, json, os, select, sys, threading, time
if sys.argv[1] == "-c":
    sys.exit()  # it has whatever package it is asked for
folder = sys.argv[-1]
plan = json.load(open(folder + "/plan.json"))
def leave():
    try:
        select.select([os.pidfd_open(plan["parent"])], [], [])
    finally:  # the parent may have ended before
        os._exit(71)
threading.Thread(target=leave, daemon=True).start()
journal = open(folder + "/journal.jsonl", "a", buffering=1)
def write(**entry):
    print(json.dumps(entry), file=journal)
permits = os.environ.get("PROFHARNESS_KILLED", "") + "/permits"
def take_permit():
    while os.path.isdir(permits):
        try:
            return os.unlink(permits + "/" + os.listdir(permits)[0])
        except (OSError, IndexError):
            time.sleep(0.005)
write(event="environment", environment={{"device_type": "cpu", "torch": "2.0", "python": "3"}})
for cell in plan["cells"]:
    write(event="begin", cell=cell["cell"])
    take_permit()
    if "666" in json.dumps(cell["config"]):
        os.kill(plan["parent"], 9)  # a poison
        time.sleep(60)
    time.sleep(0.02)
    samples = [1000] * plan["protocol"]["samples"]
    if "torch" in plan["profilers"]:
        same = {{"ph": "X", "pid": 1, "tid": 1, "dur": 9}}
        events = [
            same | {{"cat": "user_annotation", "name": "profharness:" + cell["cell"], "ts": 10}},
            same | {{"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 11, "dur": 1,
                    "args": {{"correlation": 1}}}},
            same | {{"cat": "kernel", "name": "k", "pid": 0, "ts": 13, "dur": 2,
                    "args": {{"correlation": 1, "device": 0, "stream": 7}}}},
        ]
        with gzip.open(folder + "/" + cell["cell"] + ".torch.json.gz", "wt") as trace:
            json.dump({{"traceEvents": events}}, trace)
    write(event="end", cell=cell["cell"], result=cell | {{"status": "ok", "samples": {{"cold": samples}}}})
os._exit(0)
"""


@dataclass
class Trial:
    """A campaign in its own folder, and the kills of its processes."""

    place: Path
    random: Random
    torch: bool = False
    killed: list[str] = field(default_factory=list)
    slowest_s: float = 0.0  # longest time until all processes had ended after the client

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        """Start the client, with groups of a second."""
        with (self.place / "client.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-c", CLIENT, "capture", *words],
                cwd=self.place,
                env=importable()
                | {MARK: str(self.place)}
                | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def first(self) -> subprocess.Popen[bytes]:
        words = ["--scheduler", "local:3", "--device", "cpu", "--samples", str(SAMPLES)]
        words += ["--config", CONFIGS, "--backend", BACKENDS]
        if self.torch:
            return self.start(*words, "--profiler", "events")
        return self.start(*words, "--profiler", "torch", "--python", str(stand_in(self.place)))

    def processes(self) -> dict[int, str]:
        """Return the live processes of the trial: process id -> `client`, `lane` or `worker`."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                # an ended process has no command line
                command = (folder / "cmdline").read_bytes()
                if command and f"{MARK}={self.place}".encode() in (folder / "environ").read_bytes():
                    lane = b"profharness.jobs.lane" in command
                    worker = (
                        b"foreign_python.py" in command
                        or b"profharness.recording.worker" in command
                    )
                    found[int(folder.name)] = "lane" if lane else "worker" if worker else "client"
        return found

    def kill_one(self, client: subprocess.Popen[bytes]) -> bool:
        """Kill a process of a random kind, if there is one. Return whether it was the client."""
        there = self.processes()
        kind = self.random.choice(["client", "lane", "lane", "worker", "worker"])
        pids = [pid for pid, name in there.items() if name == kind]
        if not pids:
            return False
        pid = self.random.choice(pids)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self.killed.append(kind)
        return pid == client.pid

    def orphans(self) -> dict[int, str]:
        """Return the processes that do not end after the client."""
        begin = time.monotonic()
        while (left := self.processes()) and time.monotonic() - begin < ORPHAN_S:
            time.sleep(0.02)
        self.slowest_s = max(self.slowest_s, time.monotonic() - begin)
        return left

    def grant_permits(self) -> None:
        """Let the stand-ins run a few more cells."""
        for number in range(self.random.randint(0, PERMITS)):
            (self.place / "permits" / f"{len(self.killed)}-{number}").touch()

    def faults(self, kills: int) -> list[str]:
        """Kill that many processes, resume to the end, and return what is wrong."""
        if not self.torch:
            (self.place / "permits").mkdir()
            self.grant_permits()
        client = self.first()
        faults: list[str] = []
        begin = time.monotonic()
        while len(self.killed) < kills and time.monotonic() - begin < PATIENCE_S:
            if client.poll() is not None:
                if self.run_folder() is not None:
                    break
                # a kill ended the probe of the workers' interpreter: nothing was planned yet
                client = self.first()
            time.sleep(self.random.uniform(0.0, 1.2))
            before = len(self.killed)
            client_killed = self.kill_one(client)
            if not self.torch and len(self.killed) > before:
                self.grant_permits()
            if client_killed:
                client.wait()
                if left := self.orphans():
                    faults.append(f"orphans after the client: {left}")
                # without a run folder there is nothing to resume
                client = self.start("--resume", "latest") if self.run_folder() else self.first()
        if not self.torch:
            (self.place / "permits").rename(self.place / "unused permits")
        if client.wait(PATIENCE_S) and self.run_folder() is None:
            client = self.first()
        elif client.returncode and self.gave_up_lanes():
            client = self.start("--resume", "latest")
        code = client.wait(PATIENCE_S)
        if code and "is finished" not in self.log() and "has anything left" not in self.log():
            faults.append(f"the client ended with {code}: {self.log()[-1500:]}")
        if left := self.orphans():
            faults.append(f"orphans at the end: {left}")
        return faults + self.wrong_cells()

    def gave_up_lanes(self) -> bool:
        """Return whether the client ended because of kills in a row on its last lane."""
        *_, last = self.log().splitlines() or [""]
        # three lost groups, or two workers killed at their start
        hits = len(self.killed) - self.killed.count("client")
        return last.startswith("error: no lane is left") and hits >= 2

    def log(self) -> str:
        return (self.place / "client.log").read_text(errors="replace")

    def run_folder(self) -> Path | None:
        return next((path.parent for path in self.place.glob("traces/runs/*/campaign.json")), None)

    def wrong_cells(self) -> list[str]:
        """Return what is wrong with the campaign, and with the store after another ingest."""
        folder = self.run_folder()
        if folder is None:
            return ["there is no campaign"]
        ingest_path(self.place / "profharness.db", folder)
        cells = json.loads((folder / "run.json").read_bytes())["cells"]
        status = collections.Counter(cell["status"] for cell in cells)
        faults = []
        # a killed worker crashed at its cell, and a group may have been hit three times
        hits = self.killed.count("worker")
        gave_up = sum("failed 3 times" in (cell["message"] or "") for cell in cells)
        if status["ok"] + status["crashed"] != CELLS or status["crashed"] > hits + gave_up:
            faults.append(f"{dict(status)} after {self.killed}")
        if gave_up and self.killed.count("lane") + self.killed.count("client") < 3:
            faults.append(f"{gave_up} cells were given up after {self.killed}")
        with contextlib.closing(sqlite3.connect(self.place / "profharness.db")) as store:
            stored = store.execute(
                "SELECT count(*), count(DISTINCT cell), sum(status = 'ok') FROM cells"
            ).fetchone()
            samples, launches = store.execute(
                "SELECT (SELECT count(*) FROM samples), (SELECT count(*) FROM launches)"
            ).fetchone()
        if stored != (CELLS, CELLS, status["ok"]):
            faults.append(f"the store has {stored} cells")
        if not self.torch and samples != SAMPLES * status["ok"]:
            faults.append(f"the store has {samples} samples of {status['ok']} cells")
        if not self.torch and launches != status["ok"]:
            faults.append(f"the store has {launches} launches of {status['ok']} cells")
        if left := [path.name for path in (folder / "groups").iterdir() if path.suffix == ".part"]:
            faults.append(f"parts are left: {left}")
        return faults


def importable() -> dict[str, str]:
    """Return the environment with the checkout first on the path."""
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), before]))}


def stand_in(place: Path) -> Path:
    """Write an executable that takes the place of a Python with torch, and return its path."""
    path = place / "worker"
    path.write_text(WORKER.format(python=sys.executable))
    path.chmod(0o755)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=re.split(r"\n\n", __doc__ or "")[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--kills", type=int, help="in each trial; default: 1 to 4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--torch", action="store_true", help="real workers instead of stand-ins")
    options = parser.parse_args()
    kinds: collections.Counter[str] = collections.Counter()
    slowest_s = 0.0
    failed = 0
    for number in range(options.trials):
        random = Random(f"{options.seed}/{number}")
        place = Path(tempfile.mkdtemp(prefix="kill-lanes-"))
        trial = Trial(place, random, options.torch)
        faults = trial.faults(options.kills or random.randint(1, 4))
        kinds.update(trial.killed)
        slowest_s = max(slowest_s, trial.slowest_s)
        failed += bool(faults)
        print(
            f"{number}: killed {', '.join(trial.killed) or 'nothing'}: {faults or 'ok'}", flush=True
        )
        if not faults:
            shutil.rmtree(place)
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    print(
        f"{options.trials} trials, {sum(kinds.values())} SIGKILLs ({counts}), {failed} with a fault; "
        f"all processes ended within {slowest_s:.2f} s after their client"
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
