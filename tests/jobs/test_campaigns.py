"""Campaigns on lanes of CPU cores: groups, kills, interrupts, and failing groups and lanes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from kill_lanes import CELLS, Trial, stand_in
from waiting import until

from profharness.attention.config import expand_configs
from profharness.errors import CaptureError, Interrupted, UnwritableError, UsageError
from profharness.files import atomic_file
from profharness.jobs import background_ingest, campaign
from profharness.jobs.campaign import (
    Campaign,
    CampaignScheduler,
    Group,
    OnStep,
    Plain,
    cut_groups,
    group_folder,
    make_spec,
    write_campaign,
)
from profharness.jobs.into_store import capture_into_store, resume_into_store
from profharness.jobs.lane import archive_hash, finish, make_part, pack, publish, unpack
from profharness.logs import duration
from profharness.recording.capture import plan_capture, write_folder
from profharness.recording.supervise import Step
from profharness.rows import SHARED_CORES
from profharness.run import (
    BenchPlan,
    CaptureOptions,
    Fleet,
    Protocol,
    Run,
    gpu_classes,
    read_record,
    read_run,
    write_run,
)
from profharness.store import ingest, ingest_path, open_store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes end with their parents")


def planned(text: str, out: Path, kind: str = "events", **protocol: Any) -> Run:
    settings = Protocol(device="cpu", samples=3, iterations=1, **protocol)
    options = CaptureOptions((kind,), out, settings)
    return plan_capture(expand_configs(text), ("auto", "math"), options)[0]


def test_group_has_all_backends_of_a_config(tmp_path: Path) -> None:
    run = planned("1,8,{512:65536:*2},64", tmp_path)
    bench = replace(run, bench=BenchPlan(), protocol=replace(run.protocol, device="cuda"))
    for each, lanes in ((run, 1), (run, 2), (bench, 2), (bench, 8)):
        groups = cut_groups(each, ("auto", "math"), lanes)
        named = [cell for group in groups for cell in group.cells]
        assert sorted(named) == [cell.cell for cell in run.cells]
        of = {cell: group.group for group in groups for cell in group.cells}
        for first, second in zip(run.cells[::2], run.cells[1::2], strict=True):
            assert of[first.cell] == of[second.cell]
        seconds = [group.seconds for group in groups]
        assert seconds[0] == max(seconds)


def test_many_configs_make_about_twenty_shrinking_groups_per_lane(tmp_path: Path) -> None:
    run = planned("1,8,{64:64000:+64},64", tmp_path)
    seconds = [group.seconds for group in cut_groups(run, ("auto", "math"), 2)]
    assert seconds[0] >= campaign.GROUP_S
    assert min(seconds[:-1]) >= campaign.SMALLEST_S
    assert seconds[-2] < seconds[0] / 2
    assert 20 <= len(seconds) <= 60
    alone = [group.seconds for group in cut_groups(run, ("auto", "math"), 1)]
    assert min(alone[:-1]) >= campaign.GROUP_S


def test_little_work_makes_one_group(tmp_path: Path) -> None:
    run = planned("1,1,{8:64:+8},8", tmp_path)
    assert len(cut_groups(run, ("auto", "math"), 8)) == 1


def test_group_name_is_a_hash_of_cells_protocol_and_class(tmp_path: Path) -> None:
    run = planned("1,1,16,8", tmp_path)
    ((group,), (other,), (again,), (of_class,)) = (
        cut_groups(run, ("auto", "math"), 1),
        cut_groups(replace(run, protocol=replace(run.protocol, seed=7)), ("auto", "math"), 1),
        cut_groups(planned("1,1,16,8", tmp_path / "other"), ("auto", "math"), 1),
        cut_groups(run, ("auto", "math"), 1, "H100"),
    )
    assert group == again
    assert len({group.group, other.group, of_class.group}) == 3


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "GROUP_S", 0.5)
    monkeypatch.setattr(campaign, "SMALLEST_S", 0.5)


def options(place: Path, lanes: int = 2, profiler: str = "events") -> CaptureOptions:
    """Return capture options for lanes whose workers are stand-ins."""
    settings = Protocol(device="cpu", samples=3, iterations=1)
    fleet = Fleet(f"local:{lanes}")
    return CaptureOptions(
        (profiler,), place / "runs", settings, python=str(stand_in(place)), fleet=fleet
    )


@pytest.mark.usefixtures("small_groups")
def test_campaign_is_one_run_with_every_cell_once(tmp_path: Path) -> None:
    steps: list[Step] = []
    store = tmp_path / "s.db"
    configs = expand_configs("1,1,{8:64:+8},8")
    captured = capture_into_store(configs, ("auto", "math"), store, options(tmp_path), steps.append)
    assert [cell.status for cell in captured.run.cells] == ["ok"] * 16
    assert len(list((captured.folder / "groups").iterdir())) > 1
    assert {step.lane for step in steps if not step.notice} == {"cpu 0", "cpu 1"}
    assert max(step.done for step in steps) == 16
    assert any("groups" in (step.notice or "") and "left" in step.notice for step in steps)
    with open_store(store) as opened:
        (row,) = opened.runs()
    assert (row.run, row.cells) == (captured.run.run, 16)
    with pytest.raises(UsageError, match="finished"):
        resume_into_store(captured.folder, store)


@pytest.mark.usefixtures("small_groups")
def test_traces_of_finished_groups_are_parsed_while_lanes_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_ingest, "ENOUGH_CPUS", 1)
    late: list[Path] = []
    parse = ingest.open_trace
    monkeypatch.setattr(ingest, "open_trace", lambda path, *_: late.append(path) or parse(path))
    made, configs = options(tmp_path, profiler="torch"), expand_configs("1,1,{8:32:+8},8")
    captured = capture_into_store(configs, ("auto", "math"), tmp_path / "s.db", made)
    (result,) = captured.ingested
    assert result.launches == len(captured.run.cells) == 8
    # one group is lost and repeated; the others are parsed too
    shutil.rmtree(next((captured.folder / "groups").iterdir()))
    again = resume_into_store(captured.folder, tmp_path / "again.db", lanes=Fleet("local:2"))
    assert again.ingested == [result]
    assert late == []
    assert ingest_path(tmp_path / "plain.db", captured.folder) == [result]
    assert len(late) == 8


@pytest.mark.usefixtures("small_groups")
def test_only_the_poison_group_fails_and_keeps_its_output(tmp_path: Path) -> None:
    configs = expand_configs("1,1,{8,16,24,666},8")
    store = tmp_path / "s.db"
    captured = capture_into_store(configs, ("auto",), store, options(tmp_path))
    status = {cell.config.seq_len_q: cell for cell in captured.run.cells}
    crashed = status[666]
    assert crashed.status == "crashed"
    assert "failed 3 times" in str(crashed.message)
    assert "SIGKILL" in str(crashed.message)
    assert Counter(cell.status for cell in captured.run.cells)["ok"] >= 2


def test_a_dozen_kills_neither_lose_nor_duplicate_a_cell(tmp_path: Path) -> None:
    trial = Trial(tmp_path, Random(7))
    assert trial.faults(12) == []
    assert len(trial.killed) >= 3


def test_interrupt_lets_groups_end_and_campaign_resumes(tmp_path: Path) -> None:
    trial = Trial(tmp_path, Random(0))
    client = trial.first()
    until(lambda: "ok" in trial.log(), client)
    os.killpg(client.pid, signal.SIGINT)
    assert client.wait() == 130
    assert trial.orphans() == {}
    assert "before stopping; " in trial.log()
    assert "--resume" in trial.log()
    folder = trial.run_folder()
    assert folder is not None
    before = Counter(cell.status for cell in read_run(folder).cells)
    assert before["ok"]
    resume_into_store(folder, tmp_path / "profharness.db", lanes=Fleet("local:2"))
    assert len(read_run(folder).cells) == CELLS
    assert trial.wrong_cells() == []


class Lanes:
    """A transport in this process; `fates` decides what happens to a group on a lane."""

    def __init__(self, *names: str) -> None:
        self.here = [{"lane": name} for name in names]
        self.fates: dict[str, Any] = {}
        self.given: list[tuple[str, str]] = []
        self.ended: list[str] = []
        self._done: list[tuple[str, Plain]] = []

    def lanes(self) -> list[Plain]:
        return self.here

    def submit(self, lane: Plain, spec: Plain, on_step: OnStep, /) -> None:
        name, group = lane["lane"], spec["group"]
        self.given.append((name, group))
        told: Plain = {"group": group, "error": None, "lost": None, "seconds": 1.0}
        fate = self.fates.get(name, self.fates.get(group))
        if fate == "vanish":
            self.here = [each for each in self.here if each["lane"] != name]
            return
        if fate == "busy":
            return
        if fate is not None:
            told |= fate
        else:
            part = Path(spec["root"]) / f"{group}.x.part"
            for cell in spec["run"]["cells"]:
                on_step(name, {"cell": cell["cell"], "status": "ok", "stage": "ok", "done": 1,
                               "notice": None})  # fmt: skip
                cell |= {"status": "ok", "samples": {"wall": [1, 2, 3]}}
            make_part(part, spec)
            publish(part, Path(spec["root"]) / group)
        self._done.append((name, told))

    def next_done(self, _: float, /) -> tuple[str, Plain] | None:
        return self._done.pop(0) if self._done else None

    def end(self, lane: Plain, /) -> None:
        self.ended.append(lane["lane"])
        self._done.append((lane["lane"], {}))


def window(
    place: Path, lanes: Lanes, count: int = 6, **named: Any
) -> tuple[CampaignScheduler, list[str]]:
    """Make a campaign with groups of one config each. Return its scheduler and its notices."""
    run = planned(f"1,1,{{8:{8 * count}:+8}},8", place)
    pairs = [run.cells[at : at + 2] for at in range(0, len(run.cells), 2)]
    groups = tuple(
        Group(f"g{at}", tuple(cell.cell for cell in pair), 1.0) for at, pair in enumerate(pairs)
    )
    folder = write_folder(place, run, ("auto", "math"))
    made = Campaign(("auto", "math"), groups)
    write_campaign(folder, made)
    said: list[str] = []
    return CampaignScheduler(
        [folder], lanes, lambda step: said.append(step.notice or ""), **named
    ), said


def carried_out(made: CampaignScheduler) -> set[str]:
    """Carry out a campaign, and return the statuses of its cells."""
    made.carry_out()
    return {cell.status for cell in read_run(made.folders[0]).cells}


def test_group_of_a_vanished_lane_runs_elsewhere(tmp_path: Path) -> None:
    lanes = Lanes("a", "b")
    lanes.fates["a"] = "vanish"
    made, _ = window(tmp_path, lanes)
    assert carried_out(made) == {"ok"}
    assert [group for name, group in lanes.given if name == "a"] == ["g0"]


@pytest.mark.parametrize(
    ("outcome", "groups", "why"),
    [
        ({"error": "no GPU", "lost": "no GPU"}, 1, "no GPU"),
        ({"error": "no disk"}, 3, "3 groups failed in a row; the last error: no disk"),
    ],
)
def test_failing_lane_gets_no_more_groups(
    tmp_path: Path, outcome: Plain, groups: int, why: str
) -> None:
    lanes = Lanes("a", "b")
    lanes.fates["a"] = outcome
    made, said = window(tmp_path, lanes, 12)
    assert carried_out(made) == {"ok"}
    assert sum(name == "a" for name, _ in lanes.given) == groups
    assert f"warning: a gets no more groups: {why}" in said


def test_error_without_lanes_says_how_to_resume(tmp_path: Path) -> None:
    lanes = Lanes("a")
    lanes.fates["a"] = {"error": "no disk"}
    made, _ = window(tmp_path, lanes)
    with pytest.raises(CaptureError, match=r"no disk.*capture --resume"):
        made.carry_out()
    assert {cell.status for cell in read_run(made.folders[0]).cells} == {"pending"}
    lanes.fates.clear()
    assert carried_out(CampaignScheduler(made.folders, lanes)) == {"ok"}


def test_full_disk_ends_the_client_but_counts_as_no_failure(tmp_path: Path) -> None:
    lanes = Lanes("a")
    lanes.fates["g1"] = {"unwritable": "groups: No space left on device"}
    made, said = window(tmp_path, lanes)
    folder = made.folders[0]
    planned_run = (folder / "run.json").read_bytes()
    with pytest.raises(UnwritableError, match="No space left"):
        made.carry_out()
    # as if the client had been killed before merging
    (folder / "run.json").write_bytes(planned_run)
    statuses = Counter(cell.status for cell in read_run(folder).cells)
    assert statuses == {"ok": 2, "pending": 10}
    assert [group for _, group in lanes.given] == ["g0", "g1"]
    assert not any("will run again" in text for text in said)
    lanes.fates.clear()
    assert carried_out(CampaignScheduler(made.folders, lanes)) == {"ok"}


def test_client_killed_before_merging_is_resumed(tmp_path: Path) -> None:
    made, _ = window(tmp_path, Lanes("a"))
    folder = made.folders[0]
    planned_run = (folder / "run.json").read_bytes()
    made.carry_out()
    (folder / "run.json").write_bytes(planned_run)
    captured = resume_into_store(folder, tmp_path / "s.db")
    assert {cell.status for cell in captured.run.cells} == {"ok"}
    assert read_record(folder) == read_run(folder)
    with pytest.raises(UsageError, match=r"is finished, .*`profharness ingest "):
        resume_into_store(folder, tmp_path / "s.db")


def test_worker_killed_at_its_start_costs_no_lane(tmp_path: Path) -> None:
    trap, worker = tmp_path / "trap", stand_in(tmp_path)
    trap.touch()
    first, rest = worker.read_text().split("\n", 1)
    dies = f"import os\nif os.path.exists({str(trap)!r}): os.unlink({str(trap)!r}); os.kill(os.getpid(), 9)"
    given = options(tmp_path, 1)
    worker.write_text("\n".join((first, dies, rest)))
    captured = capture_into_store(expand_configs("1,1,8,8"), ("math",), tmp_path / "s.db", given)
    assert not trap.exists()
    assert [cell.status for cell in captured.run.cells] == ["ok"]


def test_cells_measured_on_shared_cores_have_a_warning(tmp_path: Path) -> None:
    made, _ = window(tmp_path, Lanes("a"), 2)
    (folder,) = made.folders
    planned_run, groups = read_run(folder), campaign.read_campaign(folder)
    for number, shares in enumerate((True, False)):
        spec = make_spec(folder, groups, planned_run, groups.groups[number])
        first, second = spec["run"]["cells"]
        first |= {"status": "ok", "samples": {"wall": [1, 2, 3]}}
        second |= {"status": "ok", "samples": {"kernel": [1, 2, 3]}}
        part = Path(spec["root"]) / f"{spec['group']}.x.part"
        make_part(part, spec)
        finish(part, {**spec, "shares_cores": shares})
    run = read_run(folder)
    assert [SHARED_CORES in cell.warnings for cell in run.cells] == [True, False, False, False]
    assert [problem.code for problem in run.problems] == ["shared_host"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("H100,h100", "are the same GPU"),
        ("cpu,CPU", "are the same GPU"),
        (" , ", "a GPU name is empty"),
        ("", "a GPU name is empty"),
        (("H100", "H200,"), "a GPU name is empty"),
    ],
)
def test_unnamed_and_duplicate_gpu_classes_are_refused(given: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        gpu_classes(given)
    assert gpu_classes(("H100,H200", "B200")) == ("H100", "H200", "B200")


def test_lane_with_a_problem_gets_no_group(tmp_path: Path) -> None:
    lanes = Lanes("a", "b")
    lanes.here[0]["problems"] = ["torch is not installed"]
    made, said = window(tmp_path, lanes, why_not=lambda _: None)
    made.carry_out()
    assert {name for name, _ in lanes.given} == {"b"}
    assert any("torch is not installed" in text for text in said)


def test_finished_groups_are_not_repeated(tmp_path: Path) -> None:
    lanes = Lanes("a")
    made, _ = window(tmp_path, lanes)
    made.carry_out()
    lanes.given.clear()
    record = (made.folders[0] / "run.json").read_bytes()
    CampaignScheduler([made.folders[0]], lanes).carry_out()
    assert lanes.given == []
    assert (made.folders[0] / "run.json").read_bytes() == record


@pytest.mark.parametrize("what", ["run", "output", "archive"])
def test_hosts_with_equal_process_ids_can_share_a_folder(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = window(tmp_path, Lanes("a"), 1)
    (folder,) = made.folders
    recorded, data = read_run(folder), pack(folder)

    def write() -> None:
        if what == "run":
            write_run(folder, recorded)
        elif what == "output":
            with atomic_file(folder / "report.html", force=True) as output:
                output.write(b"<html>")
        else:
            unpack(data, group_folder(folder, "g0"), archive_hash(data))

    others = [write]
    for name, moved in (("replace", Path.replace), ("rename", Path.rename)):

        def late(path: Path, target: Path, moved: Any = moved) -> Path:
            # the other host finishes just before this one
            while others:
                others.pop()()
            return moved(path, target)

        monkeypatch.setattr(Path, name, late)
    monkeypatch.setattr(os, "getpid", lambda: 7)
    write()
    monkeypatch.undo()
    assert not others and read_run(folder).cells == recorded.cells
    assert [path for path in folder.rglob(".*") if path.name != ".lock"] == []


def test_second_interrupt_ends_the_lanes(tmp_path: Path) -> None:
    lanes = Lanes("a")
    lanes.fates["a"] = "busy"
    made, said = window(tmp_path, lanes)
    calls = 0

    def interrupt(_: float) -> None:
        nonlocal calls
        calls += 1
        if calls in (1, 3):
            signal.raise_signal(signal.SIGINT)
        return lanes._done.pop(0) if lanes._done else None  # type: ignore[return-value]

    lanes.next_done = interrupt  # type: ignore[method-assign,assignment]
    with pytest.raises(Interrupted):
        made.carry_out()
    assert lanes.ended == ["a"]
    assert any("Ctrl-C again" in text for text in said)
    assert not group_folder(made.folders[0], "g0").exists()


def test_invalid_campaign_file_is_refused(tmp_path: Path) -> None:
    made, _ = window(tmp_path, Lanes("a"))
    path = made.folders[0] / "campaign.json"
    for text, words in (("{", "not a campaign"), (json.dumps({"backends": []}), "not a campaign")):
        path.write_text(text)
        with pytest.raises(Exception, match=words):
            campaign.read_campaign(made.folders[0])


@pytest.mark.parametrize(
    ("seconds", "text"), [(3.2, "3 s"), (89, "89 s"), (600, "10 min"), (9000, "2.5 h")]
)
def test_duration_has_two_digits(seconds: float, text: str) -> None:
    assert duration(seconds) == text
