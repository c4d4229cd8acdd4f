"""The kernels of steps, checked on the committed traces of models."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from chart_samples import NASTY

from profharness.program.step_times import (
    ATTENTION,
    IDLE,
    OPTIMIZER,
    OTHER,
    PRODUCTS,
    kind_of,
    split_step,
    times_by_phase,
)
from profharness.render.document import Document, Lane, Span, Timeline
from profharness.render.html import render_html
from profharness.render.timeline import MOST_SPANS, draw_timeline
from profharness.rows import STEP_END, StepLaunch, StepRow
from profharness.store import ingest_path, open_store
from profharness.store.queries import _idle

MODELS = Path(__file__).resolve().parents[1] / "traces" / "models"
TRACES = sorted(path.name for path in MODELS.iterdir() if path.name != "README.md")


@pytest.mark.parametrize("name", TRACES)
def test_launches_of_steps_are_those_of_the_calls(name: str, tmp_path: Path) -> None:
    ingest_path(tmp_path / "store.db", MODELS / name)
    with open_store(tmp_path / "store.db") as store:
        calls, steps = store.calls(), store.steps()
        found = Counter[tuple[int, int, str | None, str]]()
        for step, launches in zip(steps, store.step_launches(steps), strict=True):
            for launch in launches:
                if launch.call is not None:
                    key = step.trace, launch.call, launch.direction, launch.kernel_short
                    found[key] += launch.duration_ns
        times = times_by_phase(store, steps, calls, {}).get(None)
    wanted = Counter[tuple[int, int, str | None, str]]()
    for call in calls:
        for kernel in call.kernels:
            key = call.trace, call.call, kernel.direction, kernel.kernel_short
            wanted[key] += kernel.total_ns
    # steps may lack calls of other steps, but has all kernels of its calls
    assert found == {key: wanted[key] for key in found}
    assert times is not None
    assert sum(times.parts.values()) == pytest.approx(times.step_ns)
    mean = sum(step.duration_ns for step in times.steps) / len(times.steps)
    assert times.step_ns == pytest.approx(mean)
    totals = [row.total_ns for row in times.kernels]
    assert totals == sorted(totals, reverse=True)
    assert sum(row.share for row in times.kernels) == pytest.approx(1)
    assert any(kind == ATTENTION for kind, _ in times.parts) == bool(found)


def test_the_launches_of_a_trace_are_read_once_for_all_its_steps(tmp_path: Path) -> None:
    """Each query reads all launches of the trace, because they have no index by time."""
    ingest_path(tmp_path / "store.db", MODELS / "llama_graph_train.json.gz")
    with open_store(tmp_path / "store.db") as store:
        steps, statements = store.steps(), list[str]()
        assert len(steps) > 1
        store.connection.set_trace_callback(statements.append)
        launches, gaps = list(store.step_launches(steps)), store.gaps(steps)
        store.connection.set_trace_callback(None)
    assert sum(" launches l " in statement for statement in statements) == 2
    for step, own in zip(steps, launches, strict=True):
        end = step.start_ns + step.duration_ns
        assert own and all(step.start_ns <= each.start_ns < end for each in own)
    assert gaps and all(
        any(0 <= gap.start_ns - step.start_ns < step.duration_ns for step in steps) for gap in gaps
    )


def test_the_gaps_at_the_ends_of_a_step_count(tmp_path: Path) -> None:
    """Bug: the GPU waits 3.37 of 6.27 idle ms for its first kernel, but this was no gap."""
    ingest_path(tmp_path / "store.db", MODELS / "bert_fp32.json.gz")
    with open_store(tmp_path / "store.db") as store:
        (step,) = store.steps()
        gaps = store.gaps([step])
    first = gaps[0]
    assert first.start_ns == step.start_ns and round(first.duration_ns / 1e6, 2) == 3.37
    alone = [(step.start_ns + 10, 20, 0, "k", None, step.start_ns + 5)]
    ends = [(gap.start_ns - step.start_ns, gap.kernel_short) for gap in _idle(step, alone)]
    assert ends == [(0, "k"), (30, STEP_END)]


def launch(start: int, length: int, family: str, stream: int = 7) -> StepLaunch:
    return StepLaunch(0, stream, start, length, family, family, family, "kernel", None, None, None)


def test_time_at_once_counts_for_the_first_kind() -> None:
    step = StepRow(1, 0, "step", 100, 100, 0)
    launches = [
        launch(110, 40, "flash"),
        launch(120, 60, "gemm", 8),
        launch(190, 30, "collective", 9),
    ]
    parts = split_step(step, launches, [None, None, None])
    assert parts == {
        (ATTENTION, "flash"): 40,
        (PRODUCTS, None): 30,
        ("communication", None): 10,  # the step ends before the kernel
        (IDLE, None): 20,
    }


@pytest.mark.parametrize(
    ("around", "family", "kind"),
    [
        ("Optimizer.step#AdamW.step", "other", OPTIMIZER),
        ("Optimizer.step#AdamW.step", "gemm", PRODUCTS),
        ("Optimizer.step#AdamW.step", "memcpy", "memory copies"),
        ("Optimizer.zero_grad#AdamW.zero_grad", "other", OTHER),
        ("Optimizer.step#LBFGS.step", "other", OTHER),  # runs the model in its steps
        (None, "other", OTHER),
    ],
)
def test_the_range_around_a_launch_tells_an_optimizer(
    around: str | None, family: str, kind: str
) -> None:
    assert kind_of(launch(0, 10, family)._replace(range=around)) == kind


@pytest.mark.parametrize("name", ["llama_train.json.gz", "llama_train_nsys"])
def test_the_kernels_of_an_optimizer_have_their_own_kind(name: str, tmp_path: Path) -> None:
    """Bug: the optimizer took 27 % of the GPU time, and the bar of the step had `other kernels`."""
    ingest_path(tmp_path / "store.db", MODELS / name)
    with open_store(tmp_path / "store.db") as store:
        steps = store.steps()
        times = times_by_phase(store, steps, store.calls(), {})[None]
        foreach = sum(store.foreach_ns(steps).values())
    own = [row for row in times.kernels if row.kind == OPTIMIZER]
    assert times.parts[OPTIMIZER, None] == pytest.approx(sum(row.total_ns for row in own))
    assert foreach <= sum(row.total_ns for row in own) * len(times.steps) < 1.1 * foreach
    assert all(
        "multi_tensor_apply" not in row.kernel_short for row in times.kernels if row.kind == OTHER
    )


def test_data_of_a_timeline_stay_data() -> None:
    spans = (Span(0, 5, NASTY, NASTY, NASTY), Span(7, 3, "</script>", "math"))
    timeline = Timeline(NASTY, (Lane(NASTY, spans),), 10)
    html = render_html(Document("t/1", "t", (timeline,), (), ()))
    text = re.findall(r'<script type="application/json">(.*?)</script>', html)
    assert len(text) == 1
    data = json.loads(text[0])
    assert data["lanes"][0]["spans"][:2] == [0, 5]
    assert data["lanes"][0]["spans"][5:7] == [7, 3]
    assert "</script>" in data["texts"]
    assert html.count("</script>") == 2
    assert NASTY not in html


def test_a_long_timeline_keeps_the_longest_marks() -> None:
    spans = tuple(Span(10 * n, 1 + (n % 3 == 0), "kernel", "math") for n in range(60_000))
    html = draw_timeline(Timeline("t", (Lane("GPU", spans),), 600_000), 1)
    assert "The 20,000 shortest marks are not shown." in html
    assert len(html) < 1_000_000
    data = json.loads(re.findall(r'<script type="application/json">(.*?)</script>', html)[0])
    lengths = data["lanes"][0]["spans"][1::5]
    assert len(lengths) == MOST_SPANS
    assert lengths.count(2) == 20_000
