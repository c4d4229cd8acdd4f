"""Cells timed by several fresh worker processes: what each adds, the cost of one that fails, and
their rows in the store.
"""

from __future__ import annotations

import gzip
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from waiting import PATIENCE_S
from written_samples import STUDY, answer, cell, steady

from profharness import stats
from profharness.attention.config import expand_configs, parse_config
from profharness.commands.bench.tables import bench_document
from profharness.jobs.into_store import Captured, bench_into_store, resume_into_store
from profharness.measurements.evaluation import BenchResult, evaluate_bench
from profharness.measurements.measurements import all_samples
from profharness.recording.supervise import Step
from profharness.recording.worker.bench import Contestant
from profharness.recording.worker.cell import call_sums, with_torch_profiler
from profharness.recording.worker.timing import L2Flush
from profharness.recording.worker.workspace import Workspace
from profharness.render.renderers import RENDERERS
from profharness.run import (
    JOURNAL_FILE,
    BenchPlan,
    CaptureOptions,
    Cell,
    JournalEntry,
    Plan,
    Protocol,
    read_run,
    with_result,
    write_run,
)
from profharness.store import ingest_path, open_store

TRACES = Path(__file__).parents[2] / "traces"
ONCE = """
import os
from pathlib import Path
import torch.nn.functional as F

mark = Path(__file__ + ".mark")

def attention(q, k, v, *, is_causal=False, scale=None, enable_gqa=False):
    if mark.exists() and mark.read_text() != str(os.getpid()):
        raise ValueError("only once")
    mark.write_text(str(os.getpid()))
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
"""


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    return []


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory, steps: list[Step]) -> Captured:
    """Return a run of two processes. One backend runs only in the first, one is refused."""
    folder = tmp_path_factory.mktemp("processes")
    (folder / "once.py").write_text(ONCE)
    options = CaptureOptions(
        out=folder / "runs",
        protocol=Protocol(2, 1, 0, PATIENCE_S, 7, "cpu", processes=2),
        bench=BenchPlan(iterations=31),
    )
    backends = ["math", str(folder / "once.py"), "cudnn"]
    configs = expand_configs("1,1,16,8")
    return bench_into_store(configs, backends, folder / "store.db", options, steps.append)


def test_each_process_adds_its_samples_by_turns(captured: Captured) -> None:
    math, _, refused = captured.run.cells
    turns = math.turns["wall"]
    assert (math.status, math.process) == ("ok", 1)
    assert len(math.samples["wall"]) == 31 == sum(number for _, _, number in turns)
    assert [sum(n for process, _, n in turns if process == each) for each in (0, 1)] == [16, 15]
    assert [process for process, _, _ in turns] == sorted(process for process, _, _ in turns)
    assert len(set(map(tuple, turns))) == len(turns) > 2
    assert refused.status == "refused" and not refused.turns


def test_a_process_that_fails_costs_its_samples_alone(captured: Captured) -> None:
    once = captured.run.cells[1]
    assert once.status == "ok"
    assert {process for process, _, _ in once.turns["wall"]} == {0}
    (warning,) = once.warnings
    assert warning.startswith("process 2 ended as error, so it gave no samples: ")
    assert "only once" in warning


def test_progress_counts_every_process(captured: Captured, steps: list[Step]) -> None:
    assert {step.total for step in steps} == {2 * len(captured.run.cells)}
    done = [step.done for step in steps]
    assert done == sorted(done) and done[-1] == steps[-1].total


def test_the_store_and_the_answer_know_the_processes(captured: Captured) -> None:
    store = captured.folder.parents[1] / "store.db"
    with open_store(store) as opened:
        found: BenchResult = evaluate_bench(opened)
        samples = opened.cells()[0].samples["wall"]
    assert isinstance(samples, stats.Series)
    assert list(map(list, samples.turns)) == list(map(list, captured.run.cells[0].turns["wall"]))
    row = found.rows[0]
    assert row.processes == 2 and row.between_processes_ns is not None
    text = RENDERERS["table"](bench_document(found), width=160)
    assert "in 2 processes" in text and "±% processes" in text
    told = json.loads(RENDERERS["json"](bench_document(found, raw=True)))["rows"][0]
    assert told["turns"] == list(map(list, samples.turns))
    assert sum(turn[2] for turn in told["turns"]) == len(told["samples_ns"])


def test_a_run_that_ended_between_processes_goes_on_there(captured: Captured) -> None:
    """With a journal of the first process only, the second one runs."""
    run = captured.run
    first = [
        replace(
            each,
            process=0,
            samples={name: values[:16] for name, values in each.samples.items()},
            turns={name: [t for t in turns if t[0] == 0] for name, turns in each.turns.items()},
        )
        for each in run.cells
    ]
    write_run(captured.folder, replace(run, cells=tuple(first)))
    (captured.folder / JOURNAL_FILE).touch()
    again = resume_into_store(captured.folder, captured.folder.parents[1] / "again.db")
    assert again.run.cells[0].samples["wall"][:16] == run.cells[0].samples["wall"][:16]
    assert len(again.run.cells[0].samples["wall"]) == 31
    assert again.run.cells[0].process == 1


def test_a_journal_adds_later_processes_to_what_was_saved(tmp_path: Path) -> None:
    """The writer was killed after it saved the first process."""
    config = parse_config("1,1,16,8,fp32")
    pending = Cell("c0001", config, "math")
    first = replace(pending, status="ok", samples={"wall": [1, 2]}, turns={"wall": [(0, 0, 2)]})
    second = replace(
        first, samples={"wall": [3]}, turns={"wall": [(1, 0, 1)]}, process=1, clocks={"sm_mhz": 5}
    )
    run = read_run(answer_folder(tmp_path))
    lines = [JournalEntry("end", cell="c0001", result=each) for each in (first, second, second)]
    data = b"\n".join(map(msgspec.json.encode, lines))
    for saved in (pending, first, with_result(first, second)):
        folder = tmp_path / str(saved.process) / saved.status
        folder.mkdir(parents=True)
        write_run(folder, replace(run, cells=(saved,)))
        (folder / JOURNAL_FILE).write_bytes(data)
        (found,) = read_run(folder).cells
        assert found.samples == {"wall": [1, 2, 3]}
        assert [tuple(turn) for turn in found.turns["wall"]] == [(0, 0, 2), (1, 0, 1)]
        assert found.clocks == {"sm_mhz": 5}


def answer_folder(tmp_path: Path) -> Path:
    found = answer(tmp_path, [cell(STUDY, "auto", {"cold": steady(80_000)})])
    return tmp_path / found.run


def test_clocks_of_processes_become_one() -> None:
    cell = Cell("c", parse_config("1,1,16,8,fp32"), "math", "ok")
    clocks = {"sm_mhz": 1000, "sm_mhz_min": 900, "sm_mhz_max": 1100, "throttle_reasons": 1}
    more = {"sm_mhz": 1300, "sm_mhz_min": 1200, "sm_mhz_max": 1400, "throttle_reasons": 4}
    first = replace(cell, clocks=clocks | {"readings": 1})
    found = with_result(first, replace(cell, process=1, clocks=more | {"readings": 2}))
    assert found.clocks == {
        "sm_mhz": 1200, "sm_mhz_min": 900, "sm_mhz_max": 1400, "throttle_reasons": 5, "readings": 3,
    }  # fmt: skip


def test_kernel_times_of_a_process_are_those_of_a_stored_trace(tmp_path: Path) -> None:
    """Sum each real trace by the worker and through the store."""
    folder = TRACES / "h200-torch2.11"
    ingest_path(tmp_path / "s.db", folder)
    with open_store(tmp_path / "s.db") as opened:
        cells = [cell for cell in opened.cells() if cell.status == "ok"]
        stored = all_samples(opened, cells[0].run, cells)
    compared = 0
    for each in cells:
        path = folder / f"{each.cell}.torch.json.gz"
        sums = call_sums(gzip.decompress(path.read_bytes()), f"profharness:{each.cell}")
        assert sums == pytest.approx(stored[each.config, each.backend]["kernel"], abs=8)
        compared += 1
    assert compared > 10


class Recorded:
    """A session of the profiler whose trace was recorded on an H200."""

    def __init__(self, packed: Path) -> None:
        self.packed = packed

    def __enter__(self) -> Recorded:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def export_chrome_trace(self, path: str) -> None:
        Path(path).write_bytes(gzip.decompress(self.packed.read_bytes()))


def test_a_run_without_its_traces_keeps_all_kernel_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes keep their turns, and none counts twice if the traces exist too."""
    source, cells = TRACES / "h200-torch2.11", []
    run = read_run(source)
    for name in ("whole", "bare"):
        (tmp_path / name).mkdir()
    plan = Plan((), Protocol(iterations=5), ("torch",), 0)
    workspace = Workspace("cpu", tmp_path / "whole", plan, None, L2Flush(), {})
    for pending in (replace(each, status="pending") for each in run.cells[:3]):
        kept = pending
        session = Recorded(source / f"{pending.cell}.torch.json.gz")
        monkeypatch.setattr("profharness.recording.worker.cell.profile", lambda s=session, **_: s)
        for process in range(3):
            timed = Contestant(replace(pending, process=process), nullcontext, int, 1, {})
            timed.keep_sums(with_torch_profiler(timed.call, timed.cell, workspace))
            told = {"samples": timed.samples, "turns": timed.turns}
            kept = with_result(kept, replace(timed.cell, status="ok", **told))
        cells.append(kept)
    names = {each.cell for each in cells}
    traces = tuple(trace for trace in run.traces if names.issuperset(trace.cells))
    write_run(tmp_path / "whole", replace(run, cells=tuple(cells), traces=traces))
    write_run(tmp_path / "bare", replace(run, run="bare", cells=tuple(cells), traces=()))
    sides = []
    for name, held in (("whole", run.run), ("bare", "bare")):
        ingest_path(tmp_path / "s.db", tmp_path / name)
        with open_store(tmp_path / "s.db") as opened:
            sides.append(all_samples(opened, held, opened.cells(held)))
    assert sides[0] == sides[1] and len(traces) == len(cells) == len(sides[0]) == 3
    for told in (side[place]["kernel"] for side in sides for place in side):
        assert isinstance(told, stats.Series)
        assert [tuple(turn) for turn in told.turns] == [(0, 0, 5), (1, 0, 5), (2, 0, 5)]
