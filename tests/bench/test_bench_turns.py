"""Benches with real worker processes: turns, counts, stopping conditions, and the effect of a cell
that raises, dies or hangs on the others.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import HANG, PATIENCE_S
from written_samples import STUDY, answer, cell, steady

from profharness import stats
from profharness.attention.config import expand_configs, parse_config
from profharness.commands.bench.tables import bench_document
from profharness.errors import UsageError
from profharness.jobs.into_store import Captured, bench_into_store, resume_into_store
from profharness.measurements.evaluation import BenchResult, evaluate_bench
from profharness.measurements.measurements import all_samples
from profharness.recording.supervise import Step
from profharness.recording.worker.bench import (
    COPIES_MAX,
    MAX_SAMPLES,
    TimedCell,
    copies_of,
    narrow,
    rotating,
    sample_in_turns,
)
from profharness.recording.worker.cell import call_sums, with_torch_profiler
from profharness.recording.worker.timing import NotQueuedError, Workspace
from profharness.render.renderers import RENDERERS
from profharness.run import (
    JOURNAL_FILE,
    RUN_FILE,
    BenchPlan,
    CaptureOptions,
    Cell,
    JournalEntry,
    Plan,
    Protocol,
    make_plan,
    read_run,
    turn_order,
    with_result,
    write_run,
)
from profharness.store import ingest_path, open_store

CONFIG = "1,1,16,8"
LABEL = "b1-h1-s16-d8-fp32"
PROTOCOL = Protocol(2, 2, 0, PATIENCE_S, 7, "cpu")

MOODS = f"""
import os, time
import torch.nn.functional as F

calls = 0

def plain(q, k, v, *, is_causal=False, scale=None, enable_gqa=False):
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)

def raises(q, k, v, **kwargs):
    raise ValueError("no such head")

def later(act):
    def attention(q, k, v, **kwargs):
        global calls
        calls += 1
        if calls > 12:  # past the try-out, the first call and the warm-up: it is in its turns
            act()
        return plain(q, k, v, **kwargs)
    return attention

def _raise():
    raise RuntimeError("gave up in its turn")

dies = later(lambda: os._exit(9))
def _hang():
    {HANG}

hangs = later(_hang)
stumbles = later(_raise)
"""


class Listener:
    """The turns of a run in their order."""

    def __init__(self) -> None:
        self.turns: list[str] = []

    def __call__(self, step: Step) -> None:
        if step.stage == "turn":
            self.turns.append(step.cell.backend)


def run_bench(
    folder: Path,
    backends: Sequence[str],
    plan: BenchPlan,
    *,
    configs: str = CONFIG,
    protocol: Protocol = PROTOCOL,
) -> tuple[Captured, list[str]]:
    listener = Listener()
    options = CaptureOptions(out=folder / "runs", protocol=protocol, bench=plan)
    store = folder / "store.db"
    captured = bench_into_store(expand_configs(configs), backends, store, options, listener)
    return captured, listener.turns


def by_backend(captured: Captured) -> dict[str, Cell]:
    return {cell.backend.partition(":")[2] or cell.backend: cell for cell in captured.run.cells}


@pytest.fixture
def moods(tmp_path: Path) -> Path:
    path = tmp_path / "moods.py"
    path.write_text(MOODS)
    return path


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Captured, list[str]]:
    """Run sixty samples of three backends, in some rounds of turns each."""
    folder = tmp_path_factory.mktemp("exact")
    return run_bench(folder, ["auto", "math", "flash"], BenchPlan(iterations=60))


def test_iterations_fix_the_count(exact: tuple[Captured, list[str]]) -> None:
    captured, _ = exact
    assert [cell.status for cell in captured.run.cells] == ["ok"] * 3
    assert [len(cell.samples["wall"]) for cell in captured.run.cells] == [60] * 3
    assert all(min(cell.samples["wall"]) > 0 for cell in captured.run.cells)
    assert captured.run.profilers == ("events",)


def test_backends_take_turns_in_the_seeds_order(exact: tuple[Captured, list[str]]) -> None:
    _, turns = exact
    assert len(turns) >= 9  # 25 samples per turn at most, and a round that does not count
    backends = ["auto", "math", "flash"]
    for number in range(3):
        expected = [backends[place] for place in turn_order(7, LABEL, number, 3)]
        assert turns[3 * number : 3 * number + 3] == expected


@given(st.integers(), st.integers(0, 50), st.integers(1, 40))
def test_an_order_is_a_permutation_that_the_seed_repeats(
    seed: int, number: int, count: int
) -> None:
    order = turn_order(seed, LABEL, number, count)
    assert sorted(order) == list(range(count))
    assert order == turn_order(seed, LABEL, number, count)


def test_rounds_seeds_and_configs_have_orders_of_their_own() -> None:
    rounds = {tuple(turn_order(1, LABEL, number, 6)) for number in range(20)}
    seeds = {tuple(turn_order(seed, LABEL, 0, 6)) for seed in range(20)}
    configs = {tuple(turn_order(1, f"b{batch}", 0, 6)) for batch in range(20)}
    assert min(len(rounds), len(seeds), len(configs)) > 10


def timed(name: str, samples: Sequence[int]) -> TimedCell:
    """Return a real cell whose sampler yields numbers in a fixed cycle."""
    import contextlib

    cycle = rotating([lambda value=value: value for value in samples])
    cell = Cell(name, expand_configs(CONFIG)[0], name)
    sampler = {"wall": lambda count: {"wall": [cycle() for _ in range(count)]}}
    return TimedCell(cell, contextlib.nullcontext, lambda: None, 1000, sampler)


def race(timed_cells: Sequence[TimedCell], plan: BenchPlan) -> list[TimedCell]:
    def fail(_: TimedCell, error: Exception) -> None:
        raise error

    return sample_in_turns(timed_cells, plan, 0, lambda _: None, lambda *_: [], fail)


def test_a_narrow_interval_ends_the_sampling_and_a_wide_one_goes_on() -> None:
    steady = timed("steady", [1000, 1001, 999])
    # no two turns are equal, unlike those of a short pattern
    unruly = timed("unruly", Random(1).choices([1000, 9000, 2000, 16000], k=997))
    plan = BenchPlan(precision=0.01, max_time_s=60)
    assert race([steady, unruly], plan) == [steady, unruly]
    assert 20 <= len(steady.samples["wall"]) < 100
    assert len(unruly.samples["wall"]) > 10 * len(steady.samples["wall"])
    assert len(unruly.samples["wall"]) <= MAX_SAMPLES + 25
    assert narrow(steady.samples["wall"], plan.precision)


def test_a_call_without_one_measurement_has_the_others() -> None:
    """A secondary value of a measurement is stored with it."""
    waits = timed("waits", [1000, 1001])

    def cold(_: int) -> dict[str, list[int]]:
        raise NotQueuedError("it waits for the GPU")

    waits.samplers |= {"cold": cold, "eager": lambda n: {"eager": [9] * n, "host": [7] * n}}
    assert race([waits], BenchPlan(iterations=30)) == [waits]
    assert {name: len(values) for name, values in waits.samples.items()} == dict.fromkeys(
        ("wall", "eager", "host"), 30
    )
    assert waits.cell.warnings == ("no cold timing: it waits for the GPU",)


def test_what_measurements_were_called_before_is_known() -> None:
    assert make_plan(["event", "cold", "graph"], 0.01, 1.0).measurements == ("cold", "graph")
    older = BenchPlan(("event", "graph", "kernel"))
    assert older.on("cuda") == ("cold", "graph", "kernel")


def test_a_spent_budget_ends_the_sampling(tmp_path: Path) -> None:
    plan = BenchPlan(precision=1e-6, max_time_s=0.05)
    captured, _ = run_bench(tmp_path, ["math"], plan, configs="1,4,128,32")
    samples = captured.run.cells[0].samples["wall"]
    assert 5 <= len(samples) < MAX_SAMPLES


def test_precision_is_met_or_the_time_is_spent(tmp_path: Path) -> None:
    plan = BenchPlan(precision=0.5, max_time_s=30)
    captured, _ = run_bench(tmp_path, ["auto"], plan)
    samples = captured.run.cells[0].samples["wall"]
    interval = stats.median_ci(samples)
    assert interval is not None
    assert interval[1] - interval[0] <= 2 * 0.5 * stats.summarize(samples).median
    assert len(samples) < 500


def test_what_raises_is_a_row_and_the_others_are_timed(tmp_path: Path, moods: Path) -> None:
    names = ["auto", f"{moods}:raises", f"{moods}:stumbles", f"{moods}:plain"]
    captured, _ = run_bench(tmp_path, names, BenchPlan(iterations=40))
    cells = by_backend(captured)
    assert {name: cell.status for name, cell in cells.items()} == {
        "auto": "ok",
        "raises": "error",
        "stumbles": "error",
        "plain": "ok",
    }
    assert "no such head (moods.py, line" in str(cells["raises"].message)
    assert "gave up in its turn" in str(cells["stumbles"].message)
    assert not cells["stumbles"].samples
    assert len(cells["plain"].samples["wall"]) == len(cells["auto"].samples["wall"]) == 40


@pytest.mark.parametrize(("mood", "status"), [("dies", "crashed"), ("hangs", "timeout")])
@pytest.mark.usefixtures("hanging")
def test_a_dead_turn_costs_one_cell(tmp_path: Path, moods: Path, mood: str, status: str) -> None:
    names = ["auto", f"{moods}:{mood}", "math"]
    captured, _ = run_bench(tmp_path, names, BenchPlan(iterations=30))
    cells = by_backend(captured)
    assert cells[mood].status == status
    assert "wall" in str(cells[mood].message)  # the stage that it was in
    assert [len(cells[name].samples["wall"]) for name in ("auto", "math")] == [30, 30]


def test_a_cut_short_bench_resumes_as_a_bench(tmp_path: Path) -> None:
    captured, _ = run_bench(tmp_path, ["auto", "math"], BenchPlan(iterations=30))
    run = read_run(captured.folder)
    first, second = run.cells
    write_run(
        captured.folder, replace(run, cells=(first, Cell(second.cell, second.config, "math")))
    )
    again = resume_into_store(captured.folder, tmp_path / "store.db")
    assert (captured.folder / RUN_FILE).exists()
    assert again.run.cells[0] == first
    assert len(again.run.cells[1].samples["wall"]) == 30


def test_backward_and_refusals(tmp_path: Path) -> None:
    captured, _ = run_bench(
        tmp_path, ["auto", "cudnn"], BenchPlan(iterations=5), configs="1,2,16,8,causal,bwd"
    )
    auto, cudnn = captured.run.cells
    assert (auto.status, auto.choice, len(auto.samples["wall"])) == ("ok", "flash", 5)
    assert (cudnn.status, cudnn.refusals[0].code) == ("refused", "no_device")


def test_copies_exceed_twice_the_cache_within_bounds() -> None:
    assert copies_of(1 << 20, 50 << 20) == COPIES_MAX
    assert copies_of(60 << 20, 50 << 20) == 2
    assert copies_of(200 << 20, 50 << 20) == 1
    assert copies_of(4 << 30, 50 << 20) == 1


def test_rotating_calls_each_in_turn() -> None:
    seen: list[int] = []
    call = rotating([lambda: seen.append(0), lambda: seen.append(1), lambda: seen.append(2)])
    for _ in range(5):
        call()
    assert seen == [0, 1, 2, 0, 1]


def test_an_unknown_measurement_is_refused() -> None:
    with pytest.raises(UsageError, match="cold, graph, kernel, eager"):
        make_plan(["wall"], 0.01, 1.0)


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
    assert warning.startswith("process 2 has the status error and no samples: ")
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
    assert "±% processes" not in RENDERERS["table"](bench_document(found), width=160)
    text = RENDERERS["table"](bench_document(found, full=True), width=200)
    assert "in 2 processes" in text and "±% processes" in text
    assert "±% processes is the part due to differences between processes" in " ".join(text.split())
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
    workspace = Workspace("cpu", tmp_path / "whole", plan, {}, (), {}, lambda _: None)
    for pending in (replace(each, status="pending") for each in run.cells[:3]):
        kept = pending
        session = Recorded(source / f"{pending.cell}.torch.json.gz")
        monkeypatch.setattr("profharness.recording.worker.cell.profile", lambda s=session, **_: s)
        for process in range(3):
            timed = TimedCell(replace(pending, process=process), nullcontext, int, 1, {})
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


def test_kernel_times_are_read_beside_a_broken_text() -> None:
    trace = b"""{"traceEvents": [
      {"ph": "X", "cat": "user_annotation", "name": "profharness:c0001", "ts": 1, "dur": 9},
      {"ph": "X", "cat": "kernel", "name": "k", "ts": 2, "dur": 3, "args": {"x": "\xff"}},
      {"ph": "X", "cat": "user_annotation", "args": {}}]}"""
    assert call_sums(trace, "profharness:c0001") == [3000]
