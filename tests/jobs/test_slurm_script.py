"""The sbatch script of docs/scale.md, run by stand-ins for `sbatch` and `srun`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from dask_tls import tls_variables
from waiting import until

from profharness.processes import child_environment
from profharness.store import open_store

PAGE = Path(__file__).resolve().parents[2] / "docs" / "scale.md"
TASKS = 2
STAND_INS = {
    # Starts the script in the background on this host, as Slurm does on the first node of a job.
    "sbatch": """#!/bin/bash
setsid bash "$1" >lanes-7.log 2>&1 &
echo $! >job.pid
echo "Submitted batch job 7"
""",
    # Starts one process per task.
    "srun": f"""#!/bin/bash
for task in $(seq {TASKS}); do "$@" --local-directory scratch-$task & done
wait
""",
    "dask": f"""#!/bin/bash
command=$1
shift
exec {sys.executable} -m distributed.cli.dask_$command "$@"
""",
}


def script() -> str:
    (text,) = re.findall(r"^```bash\n(#!/bin/bash\n.*?)^```$", PAGE.read_text(), re.M | re.S)
    return str(text)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Submit the script in a folder, and kill its processes at the end."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in STAND_INS.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name, value in tls_variables(tmp_path).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "lanes.sbatch").write_text(script())
    submitted = subprocess.run(
        ["sbatch", "lanes.sbatch"],
        cwd=tmp_path,
        env=child_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert submitted.stdout == "Submitted batch job 7\n"
    try:
        yield tmp_path
    finally:
        os.killpg(int((tmp_path / "job.pid").read_text()), signal.SIGKILL)


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "profharness", *words],
        cwd=folder,
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def test_script_has_at_most_ten_lines() -> None:
    assert len(script().splitlines()) <= 10


def test_capture_runs_on_the_workers_of_a_job(job: Path) -> None:
    until(lambda: (job / "lanes.json").exists() and (job / "lanes.json").read_text() != "")
    address = json.loads((job / "lanes.json").read_text())["address"]
    assert address.startswith("tls://")

    def both_tasks_are_lanes() -> bool:
        answer = run(job, "doctor", "--scheduler", address, "--format", "json")
        return len(json.loads(answer.stdout).get("lanes", ())) == TASKS

    until(both_tasks_are_lanes)
    done = run(
        *(job, "capture", "--scheduler", address, "--config", "1,1,{8,16},8,fp32"),
        *("--backend", "math", "--profiler", "events", "--samples", "1"),
    )
    assert done.returncode == 0, done.stderr
    (campaign,) = (job / "traces" / "runs").glob("*/campaign.json")
    with open_store(job / "profharness.db") as store:
        cells = store.cells(campaign.parent.name)
    assert [cell.status for cell in cells] == ["ok", "ok"]
