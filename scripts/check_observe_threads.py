"""Run a program whose threads train under `observe`, and compare it with the program alone.

python scripts/check_observe_threads.py [--runs 5] [--threads 8] [--calls 8] [--device cuda]

Prints how many runs ended with the same exit code and output, and in how many all attention calls
were counted. Exits with 1 if any run differs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """
import sys, threading, torch, torch.nn.functional as F
device, threads, calls = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def train():
    for _ in range(calls):
        q = torch.randn(2, 4, 64, 64, device=device, requires_grad=True)
        F.scaled_dot_product_attention(q, q, q).sum().backward()
started = [threading.Thread(target=train) for _ in range(threads)]
for thread in started: thread.start()
for thread in started: thread.join()
print("trained")
"""
TIMEOUT_S = 120


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--calls", type=int, default=8, help="per thread")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    same = counted = 0
    with tempfile.TemporaryDirectory() as scratch:
        program = Path(scratch) / "program.py"
        program.write_text(PROGRAM)
        arguments = [options.device, str(options.threads), str(options.calls)]
        command = [sys.executable, str(program), *arguments]
        alone = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        observe = [sys.executable, "-m", "profharness", "observe", "--out", f"{scratch}/runs"]
        observe += ["--store", f"{scratch}/store.db", "--", *command]
        for _ in range(options.runs):
            done = subprocess.run(observe, capture_output=True, text=True, timeout=TIMEOUT_S)
            same += (done.returncode, done.stdout) == (alone.returncode, alone.stdout)
            found = re.search(r"([\d,]+) attention calls", done.stderr)
            calls = int(found[1].replace(",", "")) if found else 0
            counted += calls == options.threads * options.calls
    print(f"{same} of {options.runs} runs ended like the program alone")
    print(f"{counted} of {options.runs} runs count all {options.threads * options.calls} calls")
    return 0 if same == counted == options.runs else 1


if __name__ == "__main__":
    sys.exit(main())
