"""Campaigns as arrays of Slurm: a stand-in for sbatch runs the script that is written."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from kill_lanes import stand_in
from lane_stand_ins import GPU, fake_nvml, falling_worker

import profharness.jobs.campaign as campaigns
from profharness.cli.main import cli
from profharness.config import expand_configs
from profharness.doctor import check_lanes, check_slurm
from profharness.environment import visible_gpus
from profharness.errors import CaptureError, Planned, UsageError
from profharness.jobs import capture_into_store, resume_into_store
from profharness.jobs.slurm import Task, script_file
from profharness.run import CaptureOptions, Fleet, Protocol, read_run
from profharness.runner.gpu_lock import lock_file
from profharness.store import ingest_path, open_store

# Runs the tasks of an array side by side, as Slurm does on idle hosts.
SBATCH = """#!/bin/bash
last=$(sed -n 's/^#SBATCH --array=0-//p' "$1")
for index in $(seq 0 "$last"); do SLURM_ARRAY_TASK_ID=$index bash "$1" & done >tasks.log 2>&1
wait
echo "Submitted batch job 7"
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an sbatch on PATH, where each config is a group."""
    tool = tmp_path / "bin" / "sbatch"
    tool.parent.mkdir()
    tool.write_text(SBATCH)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(campaigns, "GROUP_S", 0.01)
    monkeypatch.setattr(campaigns, "SMALLEST_S", 0.01)
    return tmp_path


def planned(
    place: Path, fleet: Fleet, device: str = "cpu", lengths: str = "8,16", python: str | None = None
) -> str:
    protocol = Protocol(iterations=1, warmup=0, samples=1, device=device)
    options = CaptureOptions(("events",), place / "runs", protocol, python=python, fleet=fleet)
    with pytest.raises(Planned) as said:
        configs = expand_configs(f"1,1,{{{lengths}}},8,fp32")
        capture_into_store(configs, ["math"], place / "store.db", options)
    return str(said.value)


def test_an_array_runs_each_group_once(place: Path) -> None:
    text = planned(place, Fleet("slurm:sweep.sbatch", submit=True))
    assert "an array of 2 task(s)" in text and "Submitted batch job 7" in text
    (folder,) = (place / "runs").iterdir()
    log = (place / "tasks.log").read_text()
    assert len(re.findall(r"^group \w+: [\d.]+ s$", log, re.MULTILINE)) == 2
    assert list((folder / "leases").iterdir()) == []
    (result,) = ingest_path(place / "store.db", folder)
    with open_store(place / "store.db") as opened:
        assert [cell.status for cell in opened.cells(result.run)] == ["ok", "ok"]
    with pytest.raises(UsageError, match="is finished"):
        resume_into_store(folder, place / "store.db")


def test_the_script_asks_for_a_gpu_of_the_class(place: Path) -> None:
    text = planned(place, Fleet("slurm:sweep.sbatch", ("H100", "H200")), "cuda")
    assert "sbatch sweep-h100.sbatch" in text and "sbatch sweep-h200.sbatch" in text
    script = (place / "sweep-h200.sbatch").read_text()
    assert "#SBATCH --array=0-1\n" in script and "#SBATCH --gres=gpu:h200:1\n" in script
    (folder,) = (place / "runs").glob("*-h200")
    assert f"profharness lane {folder} --index" in script
    with pytest.raises(CaptureError, match="no GPU is visible here; it has no GPU, not a H200"):
        Task(folder, 0, print).carry_out()
    with pytest.raises(CaptureError, match="this host has no GPU for them"):
        resume_into_store(folder, place / "store.db")


def test_a_host_where_no_worker_starts_leaves_its_groups_to_others(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(place, Fleet("slurm:sweep.sbatch"))
    (folder,) = (place / "runs").iterdir()
    # a host whose torch starts nowhere
    monkeypatch.setenv("PYTHONPATH", str(place / "broken"))
    (place / "broken" / "torch").mkdir(parents=True)
    (place / "broken" / "torch" / "__init__.py").write_text("raise ImportError('no libcuda')")
    with pytest.raises(CaptureError, match=r"this lane can run no group: .*no libcuda"):
        Task(folder, 1, print, beat_s=0.05).carry_out()
    assert {cell.status for cell in read_run(folder).cells} == {"pending"}
    assert len(campaigns.open_groups(folder, campaigns.read_campaign(folder))) == 2


def test_a_gpu_that_falls_off_leaves_its_group_to_others(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = place / f"gpu-{os.getpid()}"
    monkeypatch.syspath_prepend(fake_nvml(place))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(place / "nvml"))
    monkeypatch.setenv(GPU, str(gpu))
    gpu.touch()
    (lock,) = map(lock_file, visible_gpus())
    python = str(falling_worker(place))
    planned(place, Fleet("slurm:sweep.sbatch"), "cuda", lengths="8", python=python)
    (folder,) = (place / "runs").iterdir()
    with pytest.raises(CaptureError, match="its GPU does not answer any more"):
        Task(folder, 0, print, beat_s=0.05).carry_out()
    assert list((folder / "leases").iterdir()) == []
    # where there is a GPU
    gpu.touch()
    run = Task(folder, 0, print, beat_s=0.05).carry_out()
    assert run is not None and [cell.status for cell in run.cells] == ["ok"]
    lock.unlink()


def test_a_group_that_fails_three_times_is_given_up(place: Path) -> None:
    # the stand-in of a worker kills what runs the group at this length
    planned(place, Fleet("slurm:sweep.sbatch"), lengths="8,666", python=str(stand_in(place)))
    (folder,) = (place / "runs").iterdir()
    said: list[str] = []
    task = Task(folder, 1, said.append, beat_s=0.05)
    poison = {cell.cell for cell in read_run(folder).cells if cell.config.seq_len_q == 666}
    groups = tuple(group for group in task._campaign.groups if poison & set(group.cells))
    task._campaign = replace(task._campaign, groups=groups)
    run = task.carry_out()
    assert run is not None and task.done == 0
    crashed, pending = sorted(run.cells, key=lambda cell: cell.status)
    assert crashed.status == "crashed" and "failed 3 times" in str(crashed.message)
    assert pending.status == "pending"
    assert sum("failed" in line for line in said) == 3


def test_a_group_that_takes_its_lane_with_it_three_times_is_given_up(place: Path) -> None:
    planned(place, Fleet("slurm:sweep.sbatch"), lengths="8")
    (folder,) = (place / "runs").iterdir()
    (group,) = campaigns.read_campaign(folder).groups
    # two that were killed with their children, and left no word; then a third
    (folder / "leases" / f"{group.group}.errors").write_text("killed\nkilled\n")
    (folder / "leases" / f"{group.group}.begun").write_text("0 node7 4711")
    said: list[str] = []
    run = Task(folder, 0, said.append, beat_s=0.05).carry_out()
    assert run is not None and [cell.status for cell in run.cells] == ["crashed"]
    assert "process 4711 of host node7 ended in the middle" in str(run.cells[0].message)


def test_what_is_refused_leaves_no_planned_folder(place: Path) -> None:
    for out, file in (("a b", "sweep.sbatch"), ("runs", "missing/sweep.sbatch")):
        options = CaptureOptions(
            ("events",), place / out, Protocol(device="cpu"), fleet=Fleet(f"slurm:{file}")
        )
        with pytest.raises(UsageError):
            capture_into_store(expand_configs("1,1,8,8"), ["math"], place / "s.db", options)
        assert not (place / out).exists()
    planned(place, Fleet("slurm:sweep.sbatch"), lengths="8")
    (folder,) = (place / "runs").iterdir()
    with pytest.raises(UsageError, match="sbatch FILE"):
        resume_into_store(folder, place / "s.db", lanes=Fleet("slurm:other.sbatch"))


def test_a_file_that_is_there_is_not_overwritten(place: Path) -> None:
    (place / "sweep.sbatch").write_text("mine")
    with pytest.raises(UsageError, match="already exists"):
        script_file("slurm:sweep.sbatch", None, 1, place)
    with pytest.raises(UsageError, match="names no file"):
        script_file("slurm:", None, 1, place)
    done = CliRunner().invoke(cli, ["capture", "--config", "1,1,8,8", "--submit"])
    assert isinstance(done.exception, UsageError) and "--submit" in str(done.exception)


def test_lanes_that_differ_are_told() -> None:
    same = {"profharness": "0.1.0", "torch": "2.11", "driver": "580", "problems": [], "gpu": "H200"}
    lanes = [
        {**same, "lane": "a", "python": "3.11", "gpu_key": "k"},
        {**same, "lane": "b", "python": "3.12", "gpu_key": "k", "torch": "2.10"},
        {"lane": "c", "problems": ["ModuleNotFoundError: No module named 'profharness'"]},
    ]
    checks = {check.name: check for check in check_lanes(lanes, "0.2.0")}
    assert checks["c"].state == "warning" and "No module" in checks["c"].detail
    assert checks["lanes: torch"].detail == "2.11: a; 2.10: b"
    assert checks["lanes: profharness"].detail == "0.1.0: a, b; 0.2.0: here"
    assert checks["lanes: python"].state == "ok"
    assert checks["lanes: GPU"].detail == "a, b have the same one"
    assert [check.state for check in check_lanes([], "0.1.0")] == ["missing"]


def test_a_host_without_slurm_is_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_slurm().state == "ok"
    monkeypatch.setenv("PATH", str(place))
    assert check_slurm().remedy
