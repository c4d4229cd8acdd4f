"""`runs` shows what was begun and not finished, how long a run took, and what it cost."""

from __future__ import annotations

import contextlib
import fcntl
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import profharness
from profharness.attention.config import parse_config
from profharness.cli import cli
from profharness.recording.capture import LOCK_FILE, resume
from profharness.run import OBSERVE, Cell, Period, Protocol, Run, RunTimes, run_times, write_run
from profharness.store import ingest_path, open_store

MODELS = Path(__file__).resolve().parents[2] / "traces" / "models"
HALF, ALL, CHECKED = "20990101-000000-0001", "20990101-000000-0002", "20990101-000000-0003"
NOON = "2099-01-01T12:00:00.000+00:00"
QUARTER = "2099-01-01T12:15:00.000+00:00"
HOUR_NS = 3600 * 10**9


def written(out: Path, name: str, *statuses: str, **more: Any) -> Run:
    """Write a run folder with a cell for each status."""
    config = parse_config("1,1,8,8,fp32")
    cells = tuple(
        Cell(f"c{index:04d}", config, "math", status) for index, status in enumerate(statuses)
    )
    protocol = Protocol(iterations=1, warmup=0, samples=1, device="cpu")
    run = Run(name, NOON, ("events",), protocol, cells, kind="capture")
    (out / name).mkdir(parents=True)
    write_run(out / name, replace(run, **more))
    return replace(run, **more)


def invoke(folder: Path, *arguments: str) -> Result:
    with contextlib.chdir(folder):
        return CliRunner().invoke(cli, ["runs", *arguments])


def answer(folder: Path, *arguments: str) -> Any:
    return json.loads(invoke(folder, *arguments, "--format", "json").stdout)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The default folder of runs, with a finished run, an interrupted one and an interrupted check."""
    out = tmp_path / "traces" / "runs"
    written(out, HALF, "ok", "pending")
    written(out, ALL, "ok", "refused")
    run = written(out, CHECKED, "pending", kind="verify")
    write_run(out / CHECKED, replace(run, cells=(replace(run.cells[0], case="shifted"),)))
    return out


def test_unfinished_runs_are_listed_with_the_command_that_resumes_them(out: Path) -> None:
    folder = out.parents[1]
    found = answer(folder)
    assert found["rows"] == []
    checked, half = found["unfinished"]
    assert (half["run"], half["status"], half["done"], half["cells"]) == (HALF, "unfinished", 1, 2)
    assert half["command"] == f"profharness capture --resume traces/runs/{HALF}"
    assert not checked["resumable"] and checked["command"].startswith("profharness ingest")
    shown = invoke(folder).stdout
    assert f"to resume the run, use: {half['command']}" in " ".join(shown.split())
    with contextlib.chdir(folder):
        resume(Path(shlex.split(half["command"])[-1]))
    assert [each["run"] for each in answer(folder)["unfinished"]] == [CHECKED]


def test_a_run_that_a_process_works_on_is_running(out: Path) -> None:
    with (out / HALF / LOCK_FILE).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        half = answer(out.parents[1])["unfinished"][1]
    assert half["status"] == "running" and half["command"] is None


def test_a_stored_or_unreadable_folder_is_not_listed(out: Path) -> None:
    folder = out.parents[1]
    (out / CHECKED / "run.json").write_text("{")
    ingest_path(folder / "profharness.db", out / HALF)
    assert answer(folder)["unfinished"] == []


def test_an_interrupted_observation_is_listed_until_it_ends(tmp_path: Path) -> None:
    out = tmp_path / "traces" / "runs"
    run = written(out, HALF, kind=OBSERVE, periods=(Period(NOON),))
    (row,) = answer(tmp_path)["unfinished"]
    assert row["kind"] == OBSERVE and not row["resumable"]
    write_run(out / HALF, replace(run, periods=(Period(NOON, 1.0),)))
    ingest_path(tmp_path / "profharness.db", MODELS / "vit.json.gz")
    assert answer(tmp_path)["unfinished"] == []


@pytest.mark.parametrize(
    ("periods", "times"),
    [
        ((), RunTimes()),
        ((Period(NOON, 1800),), RunTimes("2099-01-01T12:30:00+00:00", HOUR_NS // 2, HOUR_NS // 2)),
        # two lanes at the same time
        (
            (Period(NOON, 1800), Period(QUARTER, 1800)),
            RunTimes("2099-01-01T12:45:00+00:00", HOUR_NS * 3 // 4, HOUR_NS),
        ),
        # interrupted and resumed
        (
            (Period(NOON, 60), Period(QUARTER, 60)),
            RunTimes("2099-01-01T12:16:00+00:00", HOUR_NS // 30, HOUR_NS // 30),
        ),
        # killed and resumed
        ((Period(NOON), Period(QUARTER, 60)), RunTimes("2099-01-01T12:16:00+00:00")),
        ((Period(NOON, 60), Period(QUARTER)), RunTimes()),
        ((Period("yesterday", 60),), RunTimes()),
        ((Period(NOON, 1e300),), RunTimes()),
        ((Period(NOON, 1e10),), RunTimes("2415-11-22T05:46:40+00:00")),  # 2^63 ns are 292 years
        ((Period(NOON, 1e11),) * 999, RunTimes()),  # more than a timedelta can have
        ((Period(NOON, -1),), RunTimes()),
        ((Period(NOON, float("nan")),), RunTimes()),
        ((Period("2099-01-01T12:00:00", 1), Period(NOON, 1)), RunTimes()),
    ],
)
def test_times_of_a_run_follow_from_its_periods(
    periods: tuple[Period, ...], times: RunTimes
) -> None:
    run = Run("r", NOON, (), Protocol(), (), periods=periods)
    assert run_times(run) == times


def test_the_price_of_a_run_is_that_of_all_its_lanes(tmp_path: Path) -> None:
    out = tmp_path / "traces" / "runs"
    written(out, ALL, "ok", periods=(Period(NOON, 1800), Period(QUARTER, 1800)))
    written(out, HALF, "ok")
    for source in (out, MODELS / "vit.json.gz"):
        ingest_path(tmp_path / "profharness.db", source)
    rows = {row["name"]: row for row in answer(tmp_path, "--price-per-hour", "2.5")["rows"]}
    assert rows[ALL]["ended"] == "2099-01-01T12:45:00+00:00"
    assert rows[ALL]["duration_ns"] == HOUR_NS * 3 // 4 and rows[ALL]["cost"] == 2.5
    unknown = rows[HALF]["ended"], rows[HALF]["duration_ns"], rows[HALF]["cost"]
    assert unknown == (None, None, None)
    assert rows["vit.json.gz"]["ended"] is None
    with open_store(tmp_path / "profharness.db") as store:
        steps = store.steps("vit.json.gz")
    assert rows["vit.json.gz"]["duration_ns"] >= max(step.duration_ns for step in steps)
    assert {row["cost"] for row in answer(tmp_path)["rows"]} == {None}
    assert "cost" not in invoke(tmp_path).stdout
    with contextlib.chdir(tmp_path):
        assert list(profharness.runs()["duration_ns"].notna()) == [True, False, True]
