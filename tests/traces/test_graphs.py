"""Find attention in replays of CUDA graphs by the capture in the trace, else by kernel names."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from graph_traces import FLASH, OP, OTHER, SHAPE, captured, decode, event, recording, replay

from profharness.trace import NO_SHAPES, Trace
from profharness.traces.chrome import parse_chrome

MODELS = Path(__file__).resolve().parents[2] / "traces" / "models"
FLASH_BWD = FLASH.replace("fwd", "bwd")


def launches(trace: Trace) -> Counter[tuple[int, str]]:
    """Return the number of launches of each direction of each call."""
    spans = (at for batch in trace.batches() for at in batch.call_span.tolist() if at >= 0)
    placed = [trace.call_spans[at] for at in spans]
    return Counter((span.call, span.direction) for span in placed)


def test_a_replay_has_the_calls_of_its_capture() -> None:
    with closing(parse_chrome(MODELS / "llama_graph_train.json.gz")) as trace:
        replays = [call for call in trace.calls if call.graph]
        assert len(replays) == 6 and len({call.start_ns for call in replays}) == 2
        assert [call.modules[-1] for call in replays] == [
            f"LlamaAttention_{layer}" for layer in (0, 1, 2)
        ] * 2  # fmt: skip
        (label,) = {call.config.label for call in replays if call.config}
        assert label.startswith("b2-h32-s1024-d64-bf16-") and label.endswith("-bwd")
        counts = launches(trace)
        numbers = [at for at, call in enumerate(trace.calls) if call.graph]
        assert {counts[at, "forward"] for at in numbers} == {5}
        assert {counts[at, "backward"] for at in numbers} == {4}


def test_a_replay_without_its_capture_has_calls_by_kernels() -> None:
    with closing(parse_chrome(MODELS / "llama_graph.json.gz")) as trace:
        assert [(call.kind, call.config, call.reason) for call in trace.calls] == [
            ("replay", None, NO_SHAPES)
        ] * 3
        assert launches(trace) == {(at, "forward"): 1 for at in range(3)}


def parsed(folder: Path, *events: list[dict[str, Any]]) -> Trace:
    path = folder / "t.json"
    path.write_text(json.dumps({"traceEvents": [e for part in events for e in part]}, indent=1))
    return parse_chrome(path)


def reasons(trace: Trace) -> list[str | None]:
    return [call.reason for call in trace.calls if call.graph]


def test_ambiguous_captures_are_not_used(tmp_path: Path) -> None:
    captures = captured(1000, SHAPE), captured(2000, OTHER)
    with closing(parsed(tmp_path, *captures, replay(5000, [FLASH, "gemm"]))) as trace:
        assert reasons(trace) == [NO_SHAPES]
        assert len(trace.calls) == 3
    same = captured(1000, SHAPE), captured(2000, SHAPE)
    with closing(parsed(tmp_path, *same, replay(5000, [FLASH, "gemm"]))) as trace:
        assert reasons(trace) == [None]
    other_size = captured(1000, SHAPE), captured(2000, OTHER, launched=3)
    with closing(parsed(tmp_path, *other_size, replay(5000, [FLASH, "gemm", "gemm"]))) as trace:
        assert [call.config.seq_len_q for call in trace.calls if call.graph and call.config] == [
            128
        ]


def test_replays_with_ambiguous_order_are_described_by_kernels(tmp_path: Path) -> None:
    with closing(
        parsed(tmp_path, captured(1000, SHAPE), replay(5000, [FLASH, "gemm"], (7, 8)))
    ) as trace:
        assert reasons(trace) == [NO_SHAPES]
    begin = event("cuda_runtime", "cudaStreamBeginCapture", 1001, 1, correlation=60)
    end = event("cuda_runtime", "cudaStreamEndCapture", 1019, 1, correlation=61)
    overlapping = [*captured(1000, SHAPE), begin, end]
    with closing(parsed(tmp_path, overlapping, replay(5000, [FLASH, "gemm"]))) as trace:
        assert reasons(trace) == [NO_SHAPES]


def test_a_backward_in_its_own_graph_belongs_to_the_last_call(tmp_path: Path) -> None:
    forward = replay(1000, [FLASH, "gemm", FLASH, "gemm"])
    backward = replay(2000, [FLASH_BWD, "gemm", FLASH_BWD])
    with closing(parsed(tmp_path, forward, backward, replay(3000, [FLASH_BWD]))) as trace:
        assert [call.backward for call in trace.calls] == [True, True]
        assert launches(trace) == {
            (call, direction): 1 for call in (0, 1) for direction in ("forward", "backward")
        }
        (batch,) = trace.batches()
        order = [trace.call_spans[at].call for at in batch.call_span.tolist() if at >= 0]
        assert order == [0, 1, 1, 0]


def test_a_graph_without_attention_has_no_calls(tmp_path: Path) -> None:
    with closing(parsed(tmp_path, replay(1000, ["gemm", "triton_poi_fused_add"]))) as trace:
        assert trace.calls == ()


def test_captures_without_a_replay_stay_unchanged(tmp_path: Path) -> None:
    kernel = event("kernel", "gemm", 90, 1, correlation=3)
    with closing(parsed(tmp_path, captured(1000, SHAPE), [kernel])) as trace:
        assert [(call.graph, call.reason) for call in trace.calls] == [(False, None)]


def replays_with(folder: Path, events: list[dict[str, Any]], *captures: Path) -> Trace:
    path = folder / "t.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return parse_chrome(path, captures)


def test_the_capture_in_another_file_describes_the_replays(tmp_path: Path) -> None:
    files = [recording(tmp_path, 8, SHAPE), recording(tmp_path, 32, OTHER)]
    for batch, length in ((5, 64), (8, 64), (9, 128)):
        with closing(replays_with(tmp_path, decode(batch, 5000), *files)) as trace:
            (call,) = trace.calls
            assert call.config and call.config.seq_len_q == length
            assert (call.graph, call.step, call.op) == (True, 0, OP)
            assert launches(trace) == {(0, "forward"): 1}
            (batches,) = trace.batches()
            assert [trace.op_paths[at] for at in batches.op_path.tolist() if at >= 0] == [OP]
            assert trace.warnings == ()


def test_a_capture_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    def check(reason: str, capture: Path, events: list[dict[str, Any]]) -> None:
        with closing(replays_with(tmp_path, events, capture)) as trace:
            assert reasons(trace) == [NO_SHAPES]
            assert not any(path == OP for path in trace.op_paths)
            (warning,) = trace.warnings
            assert warning.startswith(
                f"1 of 1 graph replays do not match the capture in {capture.name}"
            )
            assert reason in warning

    check("capture's batch size of 8", recording(tmp_path, 8, SHAPE), decode(9, 5000))
    longer = [*decode(8, 5000), event("kernel", "more", 5009, 1, correlation=5000, stream=7)]
    check(
        "has 3 kernels and copies, but the closest capture has 2",
        recording(tmp_path, 8, SHAPE),
        longer,
    )
    named = recording(tmp_path, 8, SHAPE, FLASH, "another")
    check("1 of 2 kernels have different names", named, decode(8, 5000))


def test_captured_kernels_without_an_attention_op_have_modules_and_ops(tmp_path: Path) -> None:
    file = recording(tmp_path, 8, SHAPE)
    data = json.loads(file.read_text())
    for one in data["traceEvents"]:
        one["name"] = one["name"].replace(OP, "engine::decode")
    module = event("python_function", "nn.Module: RadixAttention_3", 1001, 12)
    data["traceEvents"].insert(0, module)
    file.write_text(json.dumps(data))
    with closing(replays_with(tmp_path, decode(8, 5000), file)) as trace:
        (call,) = trace.calls
        assert (call.kind, call.op, call.modules) == (
            *("replay", "engine::decode"),
            ("RadixAttention_3",),
        )
