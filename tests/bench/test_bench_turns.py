"""Benches with real worker processes: turns, counts, stopping conditions, and the effect of a cell
that raises, dies or hangs on the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import HANG, PATIENCE_S

from profharness import stats
from profharness.attention.config import expand_configs
from profharness.errors import UsageError
from profharness.jobs.into_store import Captured, bench_into_store, resume_into_store
from profharness.recording.supervise import Step
from profharness.recording.worker.bench import (
    COPIES_MAX,
    MAX_SAMPLES,
    Contestant,
    copies_of,
    narrow,
    rotating,
    take_turns,
)
from profharness.recording.worker.timing import NeverHeldError
from profharness.run import (
    BENCH_FILE,
    RUN_FILE,
    BenchPlan,
    CaptureOptions,
    Cell,
    Protocol,
    make_plan,
    parse_precision,
    parse_seconds,
    read_run,
    turn_order,
    write_run,
)

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
    assert (captured.folder / BENCH_FILE).exists()


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


def contestant(name: str, samples: Sequence[int]) -> Contestant:
    """Return a real contestant whose sampler yields numbers in a fixed cycle."""
    import contextlib

    cycle = rotating([lambda value=value: value for value in samples])
    cell = Cell(name, expand_configs(CONFIG)[0], name)
    sampler = {"wall": lambda count: {"wall": [cycle() for _ in range(count)]}}
    return Contestant(cell, contextlib.nullcontext, lambda: None, 1000, sampler)


def race(contestants: Sequence[Contestant], plan: BenchPlan) -> list[Contestant]:
    def fail(_: Contestant, error: Exception) -> None:
        raise error

    return take_turns(contestants, plan, 0, lambda _: None, lambda *_: [], fail)


def test_a_narrow_interval_ends_the_sampling_and_a_wide_one_goes_on() -> None:
    steady = contestant("steady", [1000, 1001, 999])
    # no two turns are equal, unlike those of a short pattern
    unruly = contestant("unruly", Random(1).choices([1000, 9000, 2000, 16000], k=997))
    plan = BenchPlan(precision=0.01, max_time_s=60)
    assert race([steady, unruly], plan) == [steady, unruly]
    assert 20 <= len(steady.samples["wall"]) < 100
    assert len(unruly.samples["wall"]) > 10 * len(steady.samples["wall"])
    assert len(unruly.samples["wall"]) <= MAX_SAMPLES + 25
    assert narrow(steady.samples["wall"], plan.precision)


def test_a_call_without_one_measurement_has_the_others() -> None:
    """A secondary value of a measurement is stored with it."""
    waits = contestant("waits", [1000, 1001])

    def cold(_: int) -> dict[str, list[int]]:
        raise NeverHeldError("it waits for the GPU")

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


@pytest.mark.parametrize(("text", "value"), [("1%", 0.01), ("0.5 %", 0.005), ("0.02", 0.02)])
def test_a_precision_is_read(text: str, value: float) -> None:
    assert parse_precision(text) == pytest.approx(value)


@pytest.mark.parametrize(("text", "value"), [("30s", 30), ("500ms", 0.5), ("2m", 120), ("3", 3)])
def test_a_time_is_read(text: str, value: float) -> None:
    assert parse_seconds(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "0", "100%", "-1%", "fast"])
def test_what_is_no_precision_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write 1%"):
        parse_precision(text)


def test_an_unknown_measurement_is_refused() -> None:
    with pytest.raises(UsageError, match="cold, graph, kernel, eager"):
        make_plan(["wall"], 0.01, 1.0)
