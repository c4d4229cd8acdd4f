"""Makes the run folder that traces/ holds: four configs on every backend, scrubbed of host, paths and variables.

env -i PATH="$PATH" HOME=/tmp python scripts/sample_capture.py traces/NAME
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from profharness.config import expand_configs
from profharness.record import read_run, write_run
from profharness.runner import CaptureOptions, capture

CONFIGS = (
    "2,8,512,64,fp16",
    "2,8,1024,64,fp16,causal,bwd",
    "1,32,1,128,bf16,kv_heads=8,seq_kv=4096",
    "2,8,512,100,fp16",
)
BACKENDS = ("auto", "flash", "efficient", "cudnn", "math", "all-disabled")
PRIVATE_KEYS = ("host_name", "traceName", "trace_id", "distributedInfo")


def scrub_trace(source: Path, target: Path) -> None:
    """A Kineto trace without the keys that name a host, a path or a job."""
    trace = json.loads(gzip.decompress(source.read_bytes()))
    for key in PRIVATE_KEYS:
        trace.pop(key, None)
    target.write_bytes(gzip.compress(json.dumps(trace).encode(), 9, mtime=0))


def main() -> None:
    """Capture into a temporary folder, then write the scrubbed copy."""
    target = Path(sys.argv[1])
    target.mkdir(parents=True)
    configs = [config for text in CONFIGS for config in expand_configs(text)]
    with tempfile.TemporaryDirectory() as out:
        folder = capture(configs, BACKENDS, CaptureOptions(out=Path(out), note="sample_capture.py"))
        run = read_run(folder)
        for trace in run.traces:
            scrub_trace(folder / trace.path, target / trace.path)
    write_run(target, replace(run, environment={**run.environment, "env": {}}))
    failed = [cell for cell in run.cells if cell.status not in ("ok", "refused")]
    print(f"{len(run.cells)} cells, {len(failed)} failed, in {target}")
    if failed:
        shutil.rmtree(target)
        raise SystemExit(
            "\n".join(f"{cell.config} {cell.backend}: {cell.message}" for cell in failed)
        )


if __name__ == "__main__":
    main()
