"""Shows on a real GPU that two users of it are told: captures alone, beside a foreign process, and two at
once. Exit code 1 where something that should be told is not. Takes less than a minute.

    python scripts/check_shared_gpu.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from profharness.run import Problem, read_run

LIMIT_S = 120.0
OTHER = """
import sys, torch
kept = torch.ones(1 << 20, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.read()
"""
# A backend that says that it runs and goes on when the other one does, or is done.
WAITING = """
import pathlib, time
import torch

def attention(query, key, value, **options):
    pathlib.Path({mine!r}).touch()
    while not pathlib.Path({other!r}).exists():
        time.sleep(0.05)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)
"""


def capture(folder: Path, name: str, backend: str) -> subprocess.Popen[str]:
    argv = [
        *(sys.executable, "-m", "profharness", "capture", "--config", "1,4,256,64,fp16"),
        *("--backend", backend, "--profiler", "events", "--samples", "5", "--device", "cuda"),
        *("--out", str(folder / name), "--store", str(folder / f"{name}.db")),
    ]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def problems(folder: Path, name: str, process: subprocess.Popen[str]) -> tuple[Problem, ...]:
    """What a capture found, after its end; prints what it said."""
    output, _ = process.communicate(timeout=LIMIT_S)
    print(f"--- {name}: exit code {process.returncode}\n{output.rstrip()}")
    (run,) = (folder / name).iterdir()
    return read_run(run).problems if process.returncode == 0 else ()


def told(found: tuple[Problem, ...], text: str) -> bool:
    return any(problem.code == "gpu_shared" and text in problem.message for problem in found)


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not path.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)


def main() -> int:
    results: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = problems(folder, "alone", capture(folder, "alone", "math"))
        results["alone: nothing is told"] = alone == ()

        other = subprocess.Popen(
            [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert other.stdout is not None
        other.stdout.readline()
        found = problems(folder, "beside", capture(folder, "beside", "math"))
        other.communicate("")
        results["beside a foreign process: NVML tells it"] = told(found, "another process")

        began, done = (folder / each for each in ("second-began", "first-done"))
        for each, mine, waited in (
            ("first", folder / "first-began", began),
            ("second", began, done),
        ):
            (folder / f"{each}.py").write_text(WAITING.format(mine=str(mine), other=str(waited)))
        first = capture(folder, "first", f"{folder / 'first.py'}:attention")
        wait_for(folder / "first-began", first)
        second = capture(folder, "second", f"{folder / 'second.py'}:attention")
        found = problems(folder, "first", first)
        done.touch()
        results["two at once: the lock tells the first"] = told(found, "another profharness")
        results["two at once: NVML tells the first"] = told(found, "another process")
        found = problems(folder, "second", second)
        results["two at once: the lock tells the second"] = told(found, "another profharness")
        results["two at once: NVML tells the second"] = told(found, "another process")
    for what, well in results.items():
        print(f"{'ok  ' if well else 'FAIL'} {what}")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
