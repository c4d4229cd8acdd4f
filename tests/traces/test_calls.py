"""Attention calls in real traces of small models on the CPU, also in traces that lack information."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import Model, record

from profharness.errors import UsageError
from profharness.trace import AttentionCall, TensorArgument, Trace
from profharness.traces.chrome import parse_chrome
from profharness.traces.ops import replay_config


def traced(folder: Path, work: Callable[[], Any], **options: Any) -> Trace:
    return parse_chrome(record(folder / "t.json", work, **options))


def labels(calls: tuple[AttentionCall, ...]) -> list[str | None]:
    return [call.config.label if call.config else None for call in calls]


LAID_OUT = "q_strides=1024x8x64x1-k_strides=1024x8x64x1-v_strides=1024x8x64x1"


def test_calls_have_configs_modules_and_launches(tmp_path: Path) -> None:
    model, x = Model(), torch.randn(3, 16, 32)
    with torch.no_grad(), closing(traced(tmp_path, lambda: model(x))) as trace:
        calls = trace.calls
        assert labels(calls) == [f"b3-h4-kv2-s16-d8-fp32-causal-{LAID_OUT}"] * 2
        assert [call.modules for call in calls] == [
            ("Model_0", "Attention_0"),
            ("Model_0", "Attention_1"),
        ]
        assert {(call.kind, call.op, call.reason, call.step) for call in calls} == {
            ("sdpa", "aten::scaled_dot_product_attention", None, 0)
        }
        assert [step.name for step in trace.steps] == ["Model_0"]
        spans = Counter(at for batch in trace.batches() for at in batch.call_span.tolist())
        assert spans[0] == spans[1] > 0 and spans[-1] > spans[0]


def test_a_backward_belongs_to_its_call(tmp_path: Path) -> None:
    model, x = Model(), torch.randn(3, 16, 32)
    with closing(traced(tmp_path, lambda: model(x).sum().backward())) as trace:
        assert [call.backward for call in trace.calls] == [True, True]
        assert all(str(label).endswith("-bwd") for label in labels(trace.calls))
        assert {(span.call, span.direction) for span in trace.call_spans} == {
            (call, direction) for call in (0, 1) for direction in ("forward", "backward")
        }
        # the last layer's gradients come first
        first = {}
        for batch in trace.batches():
            for at, start in zip(batch.call_span.tolist(), batch.start_ns.tolist(), strict=True):
                if at >= 0 and trace.call_spans[at].direction == "backward":
                    first.setdefault(trace.call_spans[at].call, start)
        assert first[1] < first[0]


def test_calls_with_equal_arguments_share_their_tensors_in_any_layout(tmp_path: Path) -> None:
    q = torch.randn(1, 2, 16, 8)
    attention = torch.nn.functional.scaled_dot_product_attention

    def work() -> None:
        for _ in range(5):
            attention(q, q, q)
            attention(q, q, q, is_causal=True)

    traced(tmp_path, work).close()
    path = tmp_path / "t.json"
    content = json.loads(path.read_text())
    for options in ({}, {"indent": 1}, {"sort_keys": True}, {"separators": (",", ":")}):
        path.write_text(json.dumps(content, **options))
        with closing(parse_chrome(path)) as trace:
            assert len(trace.calls) == 10
            assert len({id(call.tensors) for call in trace.calls}) == 2


def test_a_recomputed_forward_is_recognized(tmp_path: Path) -> None:
    model, x = Model(again=True), torch.randn(3, 16, 32)
    with closing(traced(tmp_path, lambda: model(x).sum().backward())) as trace:
        assert Counter(call.recompute for call in trace.calls) == {False: 2, True: 2}
        assert [step.name for step in trace.steps] == ["Model_0"]
        assert Counter(span.direction for span in trace.call_spans)["recompute"] == 2
        assert Counter(span.direction for span in trace.call_spans)["backward"] == 2


def test_eager_attention_is_found_by_its_products(tmp_path: Path) -> None:
    model, x = Model(eager=True), torch.randn(3, 16, 32)
    with closing(traced(tmp_path, lambda: model(x).sum().backward())) as trace:
        assert [call.kind for call in trace.calls] == ["eager", "eager"]
        assert labels(trace.calls) == ["b3-h4-s16-d8-fp32-bwd"] * 2
        assert [call.modules[-1] for call in trace.calls] == ["Attention_0", "Attention_1"]
        assert "the mask of eager attention is unknown" in str(trace.calls[0].reason)
        directions = Counter(span.direction for span in trace.call_spans)
        assert directions["backward"] > 2  # the gradients of each product and of the softmax


def test_projections_and_other_products_are_not_attention(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Softmax(-1), torch.nn.Linear(8, 8))
    x, w = torch.randn(2, 4, 8), torch.randn(2, 8, 4)

    def work() -> Any:
        return model(x), (x @ w) @ x

    with closing(traced(tmp_path, work)) as trace:
        assert trace.calls == ()


@pytest.mark.parametrize("padded", [False, True])
def test_the_fast_path_of_an_encoder(tmp_path: Path, padded: bool) -> None:
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(3, 16, 32)
    mask = torch.arange(16)[None] >= torch.tensor([16, 9, 4])[:, None] if padded else None
    with (
        torch.no_grad(),
        closing(traced(tmp_path, lambda: model(x, src_key_padding_mask=mask))) as trace,
    ):
        assert [call.kind for call in trace.calls] == ["fast_path"] * 2
        assert [call.modules[-1] for call in trace.calls] == [
            "TransformerEncoderLayer_0",
            "TransformerEncoderLayer_1",
        ]


def test_autocast_computes_in_the_cast_dtype(tmp_path: Path) -> None:
    model, x = Model(), torch.randn(3, 16, 32)
    mask = torch.ones(3, 1, 16, 16, dtype=torch.bool)

    def work() -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x, mask)

    with torch.no_grad(), closing(traced(tmp_path, work)) as trace:
        assert [
            str(label).split("-layout")[0].split("-q_st")[0] for label in labels(trace.calls)
        ] == ["b3-h4-kv2-s16-d8-bf16-mask=bool-mask_shape=b1qk"] * 2


def test_a_trace_without_shapes_or_stacks_recommends_recording_them(tmp_path: Path) -> None:
    model, x = Model(), torch.randn(3, 16, 32)
    plain = {"record_shapes": False, "with_stack": False}
    with torch.no_grad(), closing(traced(tmp_path, lambda: model(x), **plain)) as trace:
        assert labels(trace.calls) == [None, None]
        assert "record_shapes=True" in str(trace.calls[0].reason)
        assert [call.modules for call in trace.calls] == [(), ()]


def test_damaged_arguments_do_not_remove_calls(tmp_path: Path) -> None:
    model, x = Model(), torch.randn(3, 16, 32)
    with closing(traced(tmp_path, lambda: model(x).sum().backward())) as whole:
        assert len(whole.calls) == 2
    path = tmp_path / "t.json"
    for old, new in (
        ('"Input Dims": [[3, 4, 16, 8]', '"Input Dims": [[3, -4, 16, 8]'),
        ('"Input Strides"', '"Input Nothing"'),
        ('"Concrete Inputs": ["", "", "", ""', '"Concrete Inputs": [7, {}, "", ""'),
    ):
        text = path.read_text()
        assert old in text
        (tmp_path / "odd.json").write_text(text.replace(old, new))
        with closing(parse_chrome(tmp_path / "odd.json")) as odd:
            assert len(odd.calls) == 2


def tensors(*shapes: tuple[int, ...], mask: TensorArgument | None = None) -> list[Any]:
    return [*(TensorArgument(shape, None, "fp16") for shape in shapes), mask]


Q = (2, 8, 64, 32)


@pytest.mark.parametrize(
    ("given", "flags", "label"),
    [
        (tensors(Q, Q, Q), {"scale": 0.176777}, "b2-h8-s64-d32-fp16"),
        (tensors(Q, Q, Q), {"scale": 1.0, "causal": True}, "b2-h8-s64-d32-fp16-causal-scale=1"),
        (tensors(Q, (1, 8, 9, 32), (1, 8, 9, 16)), {}, "b2-h8-kb1-sq64-skv9-d32-dv16-fp16"),
        (
            tensors(Q, Q, Q, mask=TensorArgument((2, 1, 1, 64), (64, 64, 64, 1), "bool")),
            {},
            "b2-h8-s64-d32-fp16-mask=bool-mask_shape=b11k",
        ),
        (
            tensors(Q, Q, Q, mask=TensorArgument((64, 64), (0, 1), "fp16")),
            {"dropout": 0.1, "backward": True},
            "b2-h8-s64-d32-fp16-mask=float-mask_shape=qk-dropout=0.1-mask_strides=0x1-bwd",
        ),
    ],
)
def test_a_call_becomes_a_config(given: list[Any], flags: dict[str, Any], label: str) -> None:
    assert replay_config(given, **flags).label == label


@pytest.mark.parametrize(
    ("given", "flags", "reason"),
    [
        (tensors((8, 64, 32), Q, Q), {}, "requires 4 dimensions"),
        (tensors(Q, (2, 4, 64, 32), (2, 4, 64, 32)), {"gqa": False}, "without enable_gqa"),
        (tensors(Q, Q, (2, 8, 63, 32)), {}, "are inconsistent"),
        (tensors(Q, (3, 8, 64, 32), (3, 8, 64, 32)), {}, "kv_batch=3"),
        (
            tensors(Q, Q, Q, mask=TensorArgument((2, 3, 64, 64), None, "bool")),
            {},
            "mask of shape 2x3",
        ),
        (tensors(Q, Q, Q, mask=TensorArgument((64, 64), None, "fp32")), {}, "mask of dtype fp32"),
        ([TensorArgument(Q, None, "fp64")] * 3 + [None], {}, "fp64"),
        ([TensorArgument(Q, None, None)] * 3 + [None], {}, "does not record the dtype"),
    ],
)
def test_a_call_that_no_config_describes_is_refused(
    given: list[Any], flags: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UsageError, match=reason):
        replay_config(given, **flags)


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
        (shorten_dims, "2 attention calls: the shapes in the trace are not the shapes of query"),
        (shorten_strides, "2 attention calls: the trace does not record the strides"),
        (without("Concrete Inputs"), "2 attention calls: the trace does not record is_causal"),
        (lose_shapes_of_one, "1 of 2 attention calls have no shapes"),
        (lose_every_second_end, "forward-to-backward arrows have only one end"),
        (lose_arrows, "2 attention backward ops have no arrow from a forward op in the trace"),
        (
            turn_arrows,
            "the arrows from 2 attention calls lead to backward ops that belong to other ops",
        ),
        (stretch_modules, "module calls begin inside another call and end after it"),
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
