"""Check that profharness reports a foreign process that computes on the GPU.

A process that only has a context must not be reported, and a second capture must wait for the
first. Exit with 1 otherwise. Takes less than a minute.

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
import select, sys, torch
kept = torch.ones(1 << 12, 1 << 12, device="cuda")
torch.cuda.synchronize()
print("ready", flush=True)
while {computes} and not select.select([sys.stdin], [], [], 0)[0]:
    kept @ kept
    torch.cuda.synchronize()
sys.stdin.read()
"""
# A backend that reports its start, and continues on request.
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
    """Wait for a capture, print its output, and return its problems."""
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
        results["alone: nothing is reported"] = alone == ()

        for what, computes, sentence in (
            ("idle", False, "another process is idle on the GPU: nothing is reported"),
            ("busy", True, "another process computes on the GPU: it is reported"),
        ):
            other = subprocess.Popen(
                [sys.executable, "-c", OTHER.format(computes=computes)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert other.stdout is not None
            other.stdout.readline()
            found = problems(folder, what, capture(folder, what, "math"))
            other.communicate("")
            results[sentence] = told(found, "another process") is computes

        began, go, text = (folder / each for each in ("began", "go", "slow.py"))
        text.write_text(WAITING.format(mine=str(began), other=str(go)))
        first = capture(folder, "first", f"{text}:attention")
        wait_for(began, first)
        second = capture(folder, "second", "math")
        assert second.stdout is not None
        said = second.stdout.readline()
        go.touch()
        results["two captures at once: the second waits and reports that"] = (
            "waiting: another" in said
        )
        for each, process in (("first", first), ("second", second)):
            found = problems(folder, each, process)
            results[f"two at once: the {each} has the GPU to itself"] = found == ()
    for what, well in results.items():
        print(f"{'ok  ' if well else 'FAIL'} {what}")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
