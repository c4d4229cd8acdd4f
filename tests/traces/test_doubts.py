"""Traces that lack or contradict information about attention calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Model, record

from profharness.trace import Trace
from profharness.traces.chrome import parse_chrome

SDPA = "scaled_dot_product"
Events = list[dict[str, Any]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, x = Model(), torch.randn(3, 16, 32)
    path = tmp_path_factory.mktemp("whole") / "t.json"
    return record(path, lambda: model(x).sum().backward())


def forward_ops(events: Events) -> Events:
    ops = (event for event in events if event.get("cat") == "cpu_op" and SDPA in event["name"])
    return [event for event in ops if "backward" not in event["name"]]


def arrows(events: Events, phase: str) -> Events:
    return [e for e in events if e.get("cat") == "fwdbwd" and e["ph"] == phase]


def without(key: str) -> Callable[[Events], None]:
    def change(events: Events) -> None:
        for event in forward_ops(events):
            event["args"].pop(key, None)

    return change


def shorten_dims(events: Events) -> None:
    for event in forward_ops(events):
        event["args"]["Input Dims"] = event["args"]["Input Dims"][:2]


def shorten_strides(events: Events) -> None:
    for event in forward_ops(events):
        event["args"]["Input Strides"] = [row[:2] for row in event["args"]["Input Strides"]]


def lose_every_second_end(events: Events) -> None:
    lost = [id(event) for event in arrows(events, "f")[::2]]
    events[:] = [event for event in events if id(event) not in lost]


def lose_arrows(events: Events) -> None:
    events[:] = [event for event in events if event.get("cat") != "fwdbwd"]


def turn_arrows(events: Events) -> None:
    ends = arrows(events, "f")
    for event, number in zip(ends, [e["id"] for e in ends[1:] + ends[:1]], strict=True):
        event["id"] = number


def stretch_modules(events: Events) -> None:
    for event in events:
        if event["name"].startswith("nn.Module: Attention"):
            event["dur"] += 1e6


def lose_shapes_of_one(events: Events) -> None:
    first = min(e["ts"] for e in forward_ops(events) if e["name"].startswith("aten::scaled"))
    for event in forward_ops(events):
        if event["ts"] == first:
            del event["args"]["Input Dims"]


def parsed(whole: Path, folder: Path, change: Callable[[Events], None]) -> Trace:
    trace = json.loads(whole.read_text())
    change(trace["traceEvents"])
    (folder / "odd.json").write_text(json.dumps(trace))
    return parse_chrome(folder / "odd.json")


@pytest.mark.parametrize(
    ("change", "warning"),
    [
        (shorten_dims, "2 attention calls: the shapes in the trace are not those of query"),
        (shorten_strides, "2 attention calls: the trace does not tell the strides"),
        (without("Concrete Inputs"), "2 attention calls: the trace does not tell is_causal"),
        (lose_shapes_of_one, "1 of 2 attention calls have no shapes"),
        (lose_every_second_end, "arrows from forward to backward have one end alone"),
        (lose_arrows, "to 2 backward ops of attention: their time is in no layer"),
        (turn_arrows, "the arrows of 2 attention calls lead to other backward ops"),
        (stretch_modules, "calls of modules begin in another and end after it"),
    ],
)
def test_contradictions_in_a_trace_are_counted(
    whole: Path, change: Callable[[Events], None], warning: str, tmp_path: Path
) -> None:
    with closing(parsed(whole, tmp_path, change)) as trace:
        assert len(trace.calls) == 2
        assert any(warning in text for text in trace.warnings), trace.warnings


@pytest.mark.parametrize("key", ["Input Strides", "Concrete Inputs"])
def test_a_call_that_needs_guessing_has_no_config(whole: Path, key: str, tmp_path: Path) -> None:
    with closing(parsed(whole, tmp_path, without(key))) as trace:
        assert all(call.reason for call in trace.calls)


def test_arrows_to_other_ops_do_not_add_time_to_a_call(whole: Path, tmp_path: Path) -> None:
    with closing(parsed(whole, tmp_path, turn_arrows)) as trace:
        assert {span.direction for span in trace.call_spans} == {"forward"}


def test_a_complete_trace_has_no_warnings(whole: Path) -> None:
    with closing(parse_chrome(whole)) as trace:
        assert trace.warnings == ()
