"""Make a run folder for traces/: four configs on every backend, scrubbed by `profharness.scrub`.

python scripts/sample_capture.py traces/NAME --profiler torch,nsys,ncu
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from profharness.attention.config import SDPA_BACKENDS, expand_configs
from profharness.errors import ProfharnessError
from profharness.recording.capture import capture
from profharness.run import CaptureOptions, read_run
from profharness.scrub import scrub

CONFIGS = (
    "2,8,512,64,fp16",
    "2,8,1024,64,fp16,causal,bwd",
    "1,32,1,128,bf16,kv_heads=8,seq_kv=4096",
    "2,8,512,100,fp16",
)
BACKENDS = ("auto", *SDPA_BACKENDS, "all-disabled")


def arguments() -> argparse.Namespace:
    """Parse the command line: the folder, and changes to the default sample."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="the folder to make, such as traces/h200-nsys")
    parser.add_argument("--profiler", default="torch", help="names, separated by commas")
    parser.add_argument(
        "--config", action="append", help="config to use instead of the four; repeatable"
    )
    parser.add_argument("--backend", default=",".join(BACKENDS), help="names, separated by commas")
    return parser.parse_args()


def main() -> None:
    """Capture into a temporary folder, and write the scrubbed copy. If a cell failed or a profiler
    had a problem, exit with 1 and write nothing.
    """
    given = arguments()
    configs = [config for text in given.config or CONFIGS for config in expand_configs(text)]
    profilers = tuple(given.profiler.split(","))
    given.target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as out:
        options = CaptureOptions(profilers=profilers, out=Path(out), note="sample_capture.py")
        folder = capture(configs, given.backend.split(","), options)
        run = read_run(folder)
        failed = [
            f"{cell.config} {cell.backend}: {cell.status}: {cell.message}"
            for cell in run.cells
            if cell.status not in ("ok", "refused")
        ]
        failed += [f"{each.profiler}: {each.message}; {each.remedy}" for each in run.problems]
        if failed:
            sys.exit("\n".join(failed))
        done = scrub(folder, given.target)
    print(f"{len(run.cells)} cells, {len(done.files)} files, in {given.target}")
    for name in done.left_out:
        print(f"left out: {name}")


if __name__ == "__main__":
    try:
        main()
    except ProfharnessError as error:
        sys.exit(f"error: {error}")
