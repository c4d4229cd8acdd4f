"""The steps of programs: which ranges they are, how long they last, and how busy the GPU is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from step_traces import Event, annotation, attention, engine, iterations, module, work, written

from profharness.rows import StepRow
from profharness.store import ingest_path, open_store
from profharness.store.steps import step_rows
from profharness.trace import Range
from profharness.traces import steps
from profharness.traces.chrome import parse_chrome
from profharness.traces.steps import find_steps

MODELS = Path(__file__).resolve().parents[2] / "traces" / "models"


def steps_of(folder: Path, events: Sequence[Event]) -> list[tuple[str, float, float]]:
    """Return the name, start and duration of each step in µs."""
    with closing(parse_chrome(written(folder, events))) as trace:
        return [(step.name, step.start_ns / 1e3, step.duration_ns / 1e3) for step in trace.steps]


def rows_of(folder: Path, path: Path) -> list[StepRow]:
    ingest_path(folder / "store.db", path)
    with open_store(folder / "store.db") as store:
        return store.steps()


@pytest.mark.parametrize("name", ["step", "iteration {}", "train/batch_{}"])
def test_a_repeated_range_of_the_user_is_a_step(tmp_path: Path, name: str) -> None:
    assert steps_of(tmp_path, [*iterations(name)]) == [
        (name.format(0), 0, 100),
        (name.format(1), 100, 100),
        (name.format(2), 200, 90),
    ]


def test_the_outer_of_several_repeated_ranges_is_a_step(tmp_path: Path) -> None:
    inner = [annotation("micro", 100 * at + half, 40) for at in range(3) for half in (5, 48)]
    moved = [one | {"ts": one["ts"]} for one in iterations("iteration {}")]
    epoch = [annotation("epoch", 0, 400)]
    names = [name for name, *_ in steps_of(tmp_path, [*epoch, *moved, *inner])]
    assert names == ["iteration 0", "iteration 1", "iteration 2"]


def test_ranges_inside_a_module_are_parts_of_a_step(tmp_path: Path) -> None:
    events = [one for one in iterations("phase {}") if not one["name"].startswith("Optimizer")]
    assert [name for name, *_ in steps_of(tmp_path, [module("Model_0", 0, 300), *events])] == [
        "Model_0"
    ]


def test_the_steps_of_the_profiler_come_first(tmp_path: Path) -> None:
    events = [*iterations("iteration {}"), annotation("ProfilerStep#7", 5, 295)]
    assert steps_of(tmp_path, events) == [("ProfilerStep#7", 5, 295)]


def test_an_optimizer_ends_a_step_that_has_the_name_of_the_module(tmp_path: Path) -> None:
    events = []
    for at in (0, 500):
        for call in (0, 100):  # gradients of two calls are accumulated
            events += [module("Model_0", at + call, 80), attention(at + call + 10)]
            events += work(at + call + 1, at + call + 11, at + call + 15, 20)
        events.append(annotation("Optimizer.step#SGD.step", at + 300, 50))
    assert steps_of(tmp_path, events) == [("Model_0", 0, 500), ("Model_0", 500, 350)]


def test_samplers_and_logits_processors_start_no_step(tmp_path: Path) -> None:
    events = []
    for at in (0, 500, 1000):
        events += [module("Model_0", at, 80), attention(at + 10), module("Sampler_0", at + 90, 20)]
        events += [*work(at + 1, at + 11, at + 15, 20), module("LogitsProcessor_0", at + 80, 9)]
    assert steps_of(tmp_path, events)[:2] == [("Model_0", 0, 500), ("Model_0", 500, 500)]


def test_modules_that_follow_each_other_are_one_step(tmp_path: Path) -> None:
    events = [
        one
        for at in (0, 500)
        for block in range(3)
        for one in (module(f"Block_{block}", at + 100 * block, 80), attention(at + 100 * block))
    ]
    names = [(name, start) for name, start, _ in steps_of(tmp_path, events)]
    assert names == [("Block_0", 0), ("Block_0", 500)]


def test_optimizers_name_steps_by_the_innermost_range_around_their_end() -> None:
    ranges = [Range("job", 0, 1000, 1, 1), Range("epoch", 1, 899, 1, 1)]
    ranges += [Range(f"phase {at}", at, 80, 1, 1) for at in (100, 300)]
    ranges += [Range("Optimizer.step#SGD.step", at, 10, 1, 1) for at in (150, 350, 500, 950)]
    found = find_steps(
        ranges, [], [], lambda: np.array([], np.int64), threads=[(1, 1)], base=0, last=1000
    )
    assert [step.name for step in found] == ["phase 100", "phase 300", "epoch", "job"]
    assert [step.start_ns for step in found] == [0, 160, 360, 510]


def test_the_steps_of_many_ranges_do_not_take_quadratic_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Count the names that are matched, and the moments that are looked up in groups of ranges."""
    matched, looked_up, searchsorted = [], [], np.searchsorted

    class Framework:
        def match(self, name: str) -> bool:
            matched.append(name)
            return name.startswith("Optimizer")

    def counted(a: Any, v: Any, side: Any = "left") -> Any:
        looked_up.append(np.size(v))
        return searchsorted(a, v, side=side)

    monkeypatch.setattr(steps, "FRAMEWORK", Framework())
    monkeypatch.setattr(np, "searchsorted", counted)
    words = ["".join(pair) for pair in product("abcdefgh", repeat=2)]
    pairs = [Range(word, 10 * at, 5, 1, 1) for word in words for at in range(2)]
    nested = [Range(word * 4, at, 20_000 - at, 1, 1) for at, word in enumerate(words)]
    ends = [Range("Optimizer.step#A.step", 100 * at, 50, 1, 1) for at in range(1, 101)]
    ranges, work = [*pairs, *nested, *ends], np.arange(10_000)
    found = find_steps(ranges, [], [], lambda: work, threads=[(1, 1)], base=0, last=20_000)
    assert len(found) == len(ends)
    assert len(matched) <= 2 * len(ranges)
    assert sum(looked_up) <= 4 * len(ranges)


@pytest.mark.parametrize(
    "form",
    [
        "execute_context_0(0)_generation_1(1)",
        "execute_32_context_0(sq0sk0sqsq0sqsk0)_generation_32(sq32sk55086sqsq32sqsk55086)",
        "context_1(512)_generation_3(3)",
        "execute_new_1_cached_4",
        "step[DECODE bs=32]",
        "step[EXTEND bs=15 toks=15360]",
    ],
)
def test_an_engine_annotates_its_steps(tmp_path: Path, form: str) -> None:
    assert [step[0] for step in steps_of(tmp_path, engine(form))] == [form] * 5


def test_the_work_of_asynchronous_steps_extends_them(tmp_path: Path) -> None:
    """The program needs 110 µs a step and the GPU 5 ms, so that a step lasts 5 ms."""
    rows = rows_of(tmp_path, written(tmp_path, engine("execute_context_0(0)_generation_8(8)")))
    assert [row.duration_ns for row in rows] == [5_200_000, *[5_000_000] * 4]
    assert [row.busy_ns for row in rows] == [5_000_000] * 5
    ends = [row.start_ns + row.duration_ns for row in rows]
    assert [row.start_ns for row in rows[1:]] == ends[:-1]


def test_a_step_has_only_its_own_time_on_several_streams_and_gpus() -> None:
    steps = [(0, "a", 0, 100), (1, "b", 100, 100)]
    # two streams of one GPU at the same time, a kernel of `a` that runs until 150, and one of `b`
    launches = [
        (0, 10, 60, 5),
        (0, 20, 70, 6),
        (0, 70, 150, 8),
        (1, 80, 120, 9),
        (0, 160, 190, 101),
    ]
    a, b = step_rows(1, steps, launches)
    assert (a.start_ns, a.duration_ns, b.start_ns, b.duration_ns) == (0, 150, 150, 50)
    assert (a.busy_ns, b.busy_ns) == ((140 + 40) // 2, 30 // 2)
    assert a.devices == b.devices == 2


def test_training_is_headed_by_its_module_and_replays_by_their_range(tmp_path: Path) -> None:
    (training,) = rows_of(tmp_path, MODELS / "llama_train.json.gz")
    assert training.name == "LlamaForCausalLM_0"
    graph = rows_of(tmp_path, MODELS / "llama_graph_train.json.gz")
    assert [row.name for row in graph] == ["step", "step"]  # and not the capture of 1.3 s
    assert all(0.9 < row.busy_ns / row.duration_ns <= 1 for row in graph)
