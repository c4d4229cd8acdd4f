"""Ops in PyTorch's NVTX ranges: attention calls, op stacks and steps of nsys exports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from nsys_make import AUTOGRAD, MAIN, Maker, unpacked

from profharness.trace import Trace
from profharness.traces.nsys import op_arguments, parse_nsys, read_text

EVALUATE = "autograd::engine::evaluate_function: "
SECOND = MAIN + 1


@contextmanager
def parsed(path: Path) -> Iterator[Trace]:
    with closing(parse_nsys(path)) as trace:
        yield trace


def columns(trace: Trace, *names: str) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = []
    for batch in trace.batches():
        rows += zip(*(getattr(batch, name).tolist() for name in names), strict=True)
    return rows


def test_a_real_training_step_has_calls_and_steps(tmp_path: Path) -> None:
    """The counts equal those of the Kineto trace of the same step."""
    with parsed(unpacked("llama_train.nsys.sqlite.gz", tmp_path)) as trace:
        assert trace.warnings == ()
        assert [row.name for row in trace.ranges] == [
            "step",
            "Optimizer.step#AdamW.step",
            "Optimizer.zero_grad#AdamW.zero_grad",
        ]
        assert [step.name for step in trace.steps] == ["step"]  # the range around the optimizer
        query, key = (2, 32, 1024, 64), (2, 8, 1024, 64)
        for call in trace.calls:
            assert (call.kind, call.op) == ("sdpa", "aten::scaled_dot_product_attention")
            assert call.sdpa_op == "aten::_scaled_dot_product_cudnn_attention"
            assert [tensor and tensor.dims for tensor in call.tensors] == [query, key, key, None]
            assert {(t.strides, t.dtype) for t in call.tensors if t} == {(None, None)}
            assert (call.config, call.reason) == (None, "the trace does not record the dtype")
            assert (call.backward, call.step, call.tid) == (True, 0, 188)
        assert [call.start_ns for call in trace.calls] == sorted(c.start_ns for c in trace.calls)
        rows = columns(trace, "kernel", "op_path", "range", "call_span", "tid", "start_ns")
    of_calls: Counter[tuple[int, str]] = Counter()
    first: dict[int, int] = {}
    for kernel, path, _, at, tid, start in rows:
        if at < 0:
            continue
        span = trace.call_spans[at]
        of_calls[span.call, span.direction] += 1
        back = span.direction == "backward"
        if back:
            first.setdefault(span.call, start)
        assert tid == (192 if back else 188)
        ops = trace.op_paths[path].split(";")
        assert ops[0].startswith(EVALUATE if back else "aten::scaled_dot_product_attention")
        assert ("bprop" not in trace.kernels[kernel]) or back
    directions = {"forward": 2, "backward": 6}
    assert of_calls == {(c, way): n for c in range(3) for way, n in directions.items()}
    assert first[2] < first[1] < first[0]  # the last layer's gradients come first
    in_ranges = Counter(trace.ranges[place].name for _, _, place, *_ in rows)
    assert in_ranges == {"step": 426, "Optimizer.step#AdamW.step": 7}
    assert len(rows) == 433 and min(path for _, path, *_ in rows) == 0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("aten::mm, seq = 5, op_id = 7, sizes = [[2], []], input_op_ids = [(0,-1), (6,0)]",
         ("aten::mm", 5, "[[2], []], ", True)),
        ("aten::mm, seq = 0, op_id = 7", ("aten::mm", 0, None, True)),
        ("aten::mm, sizes = [[2], [3, 4", ("aten::mm", -1, "[[2], [3, 4", True)),
        ("aten::empty, op_id = 7, sizes = [[]]", ("aten::empty", -1, "[[]]", True)),
        (f"{EVALUATE}MmBackward0, op_id = 7", (f"{EVALUATE}MmBackward0", -1, None, True)),
        ("MmBackward0, seq = 5, op_id = 7", ("MmBackward0", 5, None, True)),
        ("detach, op_id = 7", ("detach", -1, None, True)),
        ("xformers::fmha, op_id = 7", ("xformers::fmha", -1, None, True)),
        ("a, b, op_id = 7", ("a, b", -1, None, False)),
        ("Optimizer.step#SGD.step, op_id = 7", ("Optimizer.step#SGD.step", -1, None, False)),
        ("Model::forward, op_id = 7, sizes = [[]]", ("Model::forward", -1, "[[]]", False)),
        ("aten::mm", None),
        ("step", None),
        ("prefill, seq = 512", None),
        ("prefill, sizes = [[1, 2]]", None),
        ("aten::mm, seq = 5 tokens", None),
        (", op_id = 7", None),
    ],
)  # fmt: skip
def test_texts_of_pytorch_are_parsed(text: str, told: tuple[Any, ...] | None) -> None:
    assert read_text(text) == told


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("[[2, 3], []], ", ((2, 3), ())),
        ("[]", ()),
        ("[[2, 3], [4", None),
        ("[" * 100_000, None),
        ("[7]", None),
    ],
)
def test_shapes_are_parsed(text: str, shapes: Any) -> None:
    arguments = op_arguments(text)
    assert (None if arguments is None else arguments.dims) == shapes


def test_ranges_keep_their_text_without_ops(tmp_path: Path) -> None:
    maker = Maker()
    maker.nvtx("request, op_id = 4", 0, 100)
    maker.nvtx("prefill, seq = 512", 100, 200)
    with parsed(maker.write(tmp_path / "user.sqlite")) as trace:
        names = [row.name for row in trace.ranges]
        assert names == ["request, op_id = 4", "prefill, seq = 512"]
    maker.nvtx("aten::mm, op_id = 5", 110, 120)
    maker.nvtx("aten::mm, op_id = 6", 130, 140, eventType=60)
    with parsed(maker.write(tmp_path / "both.sqlite")) as trace:
        names = [row.name for row in trace.ranges]
        assert names == ["request", "prefill, seq = 512", "aten::mm, op_id = 6"]


def node(maker: Maker, name: str, sequence: int, start: int) -> None:
    """Add a backward op and the evaluation around it, 80 ns long."""
    thread = {"globalTid": AUTOGRAD}
    maker.nvtx(f"{EVALUATE}{name}, op_id = {start}", start, start + 80, **thread)
    maker.nvtx(f"{name}, seq = {sequence}, op_id = {start}", start + 10, start + 70, **thread)


def attention(maker: Maker, sequence: int, start: int, sizes: str, **more: Any) -> None:
    shapes = f", sizes = {sizes}" if sizes else ""
    for place, op in enumerate(
        ("scaled_dot_product_attention", "_scaled_dot_product_flash_attention")
    ):
        text = f"aten::{op}, seq = {sequence}, op_id = {start + place}{shapes}"
        maker.nvtx(text, start + place, start + 50 - place, **more)


SIZES = "[[2, 4, 16, 8], [2, 4, 16, 8], [2, 4, 16, 8], [], [], [], [], []]"
FLASH_NODE = "ScaledDotProductFlashAttentionBackward0"


def spans(trace: Trace) -> list[tuple[int, str] | None]:
    """Return the call and the direction of each launch, by start."""
    rows = sorted(columns(trace, "start_ns", "call_span"))
    found = [trace.call_spans[at] if at >= 0 else None for _, at in rows]
    return [span and (span.call, span.direction) for span in found]


def test_an_ambiguous_sequence_number_is_resolved_by_the_op_name(tmp_path: Path) -> None:
    maker = Maker()
    attention(maker, 5, 100, SIZES)
    maker.nvtx("aten::mul, seq = 5, op_id = 1, sizes = [[2]]", 160, 170, globalTid=SECOND)
    maker.nvtx("aten::mul, seq = 6, op_id = 2, sizes = [[2]]", 180, 190, globalTid=SECOND)
    node(maker, FLASH_NODE, 5, 1000)
    for start in (110, 165, 1020):
        maker.launch(start, thread=AUTOGRAD if start > 999 else SECOND if start > 160 else MAIN)
    with parsed(maker.write(tmp_path / "clear.sqlite")) as trace:
        assert spans(trace) == [(0, "forward"), None, (0, "backward")]
        assert not any("several threads" in text for text in trace.warnings)
    attention(maker, 5, 300, SIZES, globalTid=SECOND)
    with parsed(maker.write(tmp_path / "unclear.sqlite")) as trace:
        assert spans(trace) == [(0, "forward"), None, None]
        assert any(
            text.startswith("1 backward op has a sequence number") for text in trace.warnings
        )


def test_a_backward_belongs_to_the_last_op_with_its_number(tmp_path: Path) -> None:
    maker = Maker()
    maker.nvtx("aten::add, seq = 5, op_id = 1, sizes = [[3]]", 50, 60)
    attention(maker, 5, 100, SIZES)
    node(maker, "MulBackward0", 4, 900)
    node(maker, FLASH_NODE, 5, 1000)
    for start in (110, 920, 1020, 1090):
        maker.launch(start, thread=MAIN if start == 110 else AUTOGRAD)
    with parsed(maker.write(tmp_path / "t.sqlite")) as trace:
        assert spans(trace) == [(0, "forward"), None, (0, "backward"), None]
        assert trace.calls[0].backward


def test_eager_attention_and_its_backward_are_found(tmp_path: Path) -> None:
    maker = Maker()
    shapes = {
        "bmm": "[[8, 16, 4], [8, 4, 32]]",
        "mul": "[[8, 16, 32], []]",
        "softmax": "[[8, 16, 32], [], []]",
        "matmul": "[[8, 16, 32], [8, 32, 4]]",
    }
    for place, (op, sizes) in enumerate(shapes.items()):
        start = 100 * (place + 1)
        maker.nvtx(
            f"aten::{op}, seq = {place}, op_id = {place + 1}, sizes = {sizes}", start, start + 50
        )
        maker.launch(start + 10)
    for place, op in enumerate(("Bmm", "Softmax", "Mul", "Bmm")):
        node(maker, f"{op}Backward0", 3 - place, 1000 + 100 * place)
        maker.launch(1020 + 100 * place, thread=AUTOGRAD)
    with parsed(maker.write(tmp_path / "t.sqlite")) as trace:
        assert spans(trace) == [(0, "forward")] * 4 + [(0, "backward")] * 4
        (call,) = trace.calls
        assert [t.dims for t in call.tensors if t] == [(8, 16, 4), (8, 32, 4), (8, 32, 4)]
        assert call.kind == "eager" and call.config is None
        assert str(call.reason).endswith("the mask of eager attention is unknown")
        assert "requires 4 dimensions" in str(call.reason)


@pytest.mark.parametrize(
    ("sizes", "reason", "warned"),
    [
        (SIZES, "does not record the dtype", False),
        ("", "--pytorch=autograd-shapes-nvtx", False),
        (SIZES[:-20], "--pytorch=autograd-shapes-nvtx", True),
    ],
)
def test_missing_and_truncated_sizes_are_counted(
    tmp_path: Path, sizes: str, reason: str, warned: bool
) -> None:
    maker = Maker()
    attention(maker, 5, 100, sizes)
    maker.launch(110)
    with parsed(maker.write(tmp_path / "t.sqlite")) as trace:
        (call,) = trace.calls
        assert call.config is None and reason in str(call.reason)
        assert spans(trace) == [(0, "forward")]
        assert ("2 ops have sizes that could not be read" in trace.warnings) == warned


def test_ops_beyond_one_block_keep_their_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = unpacked("llama_train.nsys.sqlite.gz", tmp_path)
    with parsed(path) as trace:
        whole = columns(trace, "op_path", "call_span"), trace.op_paths
    monkeypatch.setattr("profharness.traces.nsys.BLOCK_ROWS", 7)
    with parsed(path) as trace:
        assert (columns(trace, "op_path", "call_span"), trace.op_paths) == whole


def test_a_compiled_region_is_a_range_around_its_calls(tmp_path: Path) -> None:
    maker = Maker()
    maker.nvtx("Torch-Compiled Region: 0/0, op_id = 3", 90, 200)
    attention(maker, 5, 100, SIZES)
    maker.launch(110)
    with parsed(maker.write(tmp_path / "t.sqlite")) as trace:
        assert [row.name for row in trace.ranges] == ["Torch-Compiled Region: 0/0"]
        assert [call.compiled for call in trace.calls] == [True]
