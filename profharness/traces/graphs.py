"""Find the attention calls that CUDA graphs replay.

A single API call launches all kernels of a replay, so the kernels do not lie in any op. If the
trace contains the capture of the graph, the ops that were captured describe the kernels. Otherwise,
only the names of the kernels are known. A graph that was captured on one stream replays its nodes
in the order of their capture.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from profharness.trace import AttentionCall, CallSpan, ProgramStep
from profharness.traces.attention_calls import AttentionCalls, module_names
from profharness.traces.columns import (
    CUDA_API,
    GpuRows,
    Ints,
    LaunchRows,
    Tables,
    distinct,
    nothing,
)
from profharness.traces.intervals import SpanTree
from profharness.traces.kernel_names import ATTENTION_FAMILIES, parse_kernel_name
from profharness.traces.steps import GRAPH_LAUNCH, step_at

BEGIN = re.compile(rf"{CUDA_API}StreamBeginCapture\w*")
END = re.compile(rf"{CUDA_API}StreamEndCapture\w*")
NODE = re.compile(rf"{CUDA_API}\w*?(?:Launch(?:Cooperative)?Kernel|Memcpy|Memset)\w*")
KINDS = ("kernel", "memcpy", "memset")
NO_SHAPES = "recorded in a CUDA graph; its shapes are not in the trace"

_BLANK = AttentionCall(
    kind="replay",
    op="cudaGraphLaunch",
    sdpa_op=None,
    compiled=False,
    recompute=False,
    backward=False,
    modules=(),
    config=None,
    reason=NO_SHAPES,
    tensors=(None,) * 4,
    graph=True,
)
_Capture = tuple[Ints, Ints]
"""Two columns that describe the launches in a capture, in order.

The first column contains the index of each launch's kind in KINDS. The second column contains the
index of the attention call's span that contains the launch, or -1.
"""


@dataclass(frozen=True, slots=True)
class _Replay:
    """The kernels, memcpys and memsets of one launch of a graph, in order."""

    thread: int
    start: int
    rows: Ints  # indices of the activities among all GPU rows
    kernels: Ints  # kernel id of each row
    kinds: Ints  # index of each row's kind in KINDS
    ordered: bool  # whether all rows ran on one stream


def replayed(
    tables: Tables,
    calls: AttentionCalls,
    steps: Sequence[ProgramStep],
    threads: Sequence[tuple[int, int]],
    base: int,
) -> AttentionCalls:
    """Return the given calls together with the calls that CUDA graphs replay.

    If the trace contains the capture of a graph, every replay repeats the captured calls. The calls
    of the first replay replace the captured calls, because a capture runs no kernel. If the trace
    does not contain the capture, each uninterrupted sequence of attention kernels is a call.

    `Attribution` describes `threads` and `base`. The times of `calls` and `steps` include `base`.
    """
    marks = tables.calls_of(GRAPH_LAUNCH)
    if not len(marks.start):
        return calls
    replays = _replays(tables, marks)
    captures = _captures(tables, calls, threads)
    result = _ReplayedCalls(calls)
    tree = SpanTree(tables.modules)
    around = tree.around((replay.thread, replay.start) for replay in replays)
    for replay, modules in zip(replays, around, strict=True):
        pid, tid = threads[replay.thread]
        start = replay.start + base
        place: dict[str, Any] = {
            "graph": True, "step": step_at(steps, start), "pid": pid, "tid": tid,
            "start_ns": start, "duration_ns": 0,
        }  # fmt: skip
        if capture := _capture_of(replay, captures, calls):
            result.copy(replay, capture[1], place)
        else:
            blank = replace(_BLANK, modules=module_names(modules), **place)
            result.add(replay, _groups(tables, replay), blank)
    return result.finish()


class _ReplayedCalls:
    """Collects the replayed calls, their spans, and the GPU rows in each span."""

    def __init__(self, calls: AttentionCalls) -> None:
        self._before = calls
        self._calls = list(calls.calls)
        self._spans = list(calls.spans)
        self._replaced: set[int] = set()
        # Calls that were recognized by the names of their kernels, and have no backward yet
        self._waiting: list[int] = []
        self._rows = [nothing(0)]
        self._row_spans = [nothing(0)]

    def copy(self, replay: _Replay, spans: Ints, place: dict[str, Any]) -> None:
        """Add the calls of a capture for one replay.

        `spans` contains the span of each captured launch, or -1.
        """
        numbers: dict[int, int] = {}
        to = nothing(len(self._before.spans) + 1)
        for span in distinct(spans[spans >= 0]):
            captured, direction = self._spans[span].call, self._spans[span].direction
            if captured not in numbers:
                number = captured if captured not in self._replaced else len(self._calls)
                self._replaced.add(captured)
                # the captured call ran no kernel, so the first replay replaces it
                self._calls[number : number + 1] = [replace(self._before.calls[captured], **place)]
                numbers[captured] = number
            to[span] = self._add_span(numbers[captured], direction)
        found = to[spans]
        self._rows.append(replay.rows[found >= 0])
        self._row_spans.append(found[found >= 0])

    def add(
        self, replay: _Replay, groups: Iterator[tuple[bool, list[int]]], blank: AttentionCall
    ) -> None:
        """Add a call for each group of forward kernels.

        A group of backward kernels is assigned to the last call that has no backward.
        """
        for backward, places in groups:
            if not backward:
                self._calls.append(blank)
                number = len(self._calls) - 1
                self._waiting.append(number)
            elif self._waiting:
                number = self._waiting.pop()
                self._calls[number] = replace(self._calls[number], backward=True)
            else:
                continue
            span = self._add_span(number, "backward" if backward else "forward")
            self._rows.append(replay.rows[places])
            self._row_spans.append(np.full(len(places), span, np.int64))

    def _add_span(self, call: int, direction: str) -> int:
        self._spans.append(CallSpan(call, direction))
        return len(self._spans) - 1

    def finish(self) -> AttentionCalls:
        order = sorted(range(len(self._calls)), key=lambda at: self._calls[at].start_ns)
        number = {at: place for place, at in enumerate(order)}
        rows = np.concatenate(self._rows)
        sort = np.argsort(rows)
        return replace(
            self._before,
            calls=tuple(self._calls[at] for at in order),
            spans=tuple(CallSpan(number[span.call], span.direction) for span in self._spans),
            rows=rows[sort],
            row_spans=np.concatenate(self._row_spans)[sort],
        )


def _rows_of(tables: Tables, correlations: Ints) -> tuple[Ints, GpuRows]:
    """Return the indices and the columns of the GPU rows that have one of these correlation ids."""
    parts, places = [np.empty((len(GpuRows._fields), 0), np.int64)], [nothing(0)]
    before = 0
    for block in tables.gpu:
        rows = tables.spool.read(block)
        hit = np.flatnonzero(np.isin(GpuRows(*rows).correlation, correlations))
        parts.append(rows[:, hit])
        places.append(hit + before)
        before += block.rows
    return np.concatenate(places), GpuRows(*np.concatenate(parts, axis=1))


def _replays(tables: Tables, launches: LaunchRows) -> list[_Replay]:
    """Return the replays that ran at least one kernel, in the order of their launches."""
    places, rows = _rows_of(tables, launches.correlation)
    kinds = np.array([KINDS.index(kind) for kind, _ in tables.kernels], np.int64)
    order = np.lexsort((rows.start, rows.stream, rows.correlation))
    sorted_keys = rows.correlation[order]
    starts = np.flatnonzero(np.diff(sorted_keys, prepend=-2))
    of = dict(zip(sorted_keys[starts].tolist(), np.split(order, starts[1:]), strict=True))
    made = []
    for correlation, _, thread, start in np.array(launches).T.tolist():
        if (mine := of.pop(correlation, None)) is not None:
            kernels = rows.kernel[mine]
            ordered = len(np.unique(rows.stream[mine])) == 1
            made.append(_Replay(thread, start, places[mine], kernels, kinds[kernels], ordered))
    return made


def _captures(
    tables: Tables, calls: AttentionCalls, threads: Sequence[tuple[int, int]]
) -> list[_Capture]:
    if not calls.calls:
        return []
    pids = np.array([pid for pid, _ in threads], np.int64)
    begin, end = tables.calls_of(BEGIN), tables.calls_of(END)
    nodes = tables.calls_of(NODE) if len(begin.start) else begin
    ran = np.isin(nodes.correlation, _rows_of(tables, nodes.correlation)[1].correlation)
    kinds = [next((k for k in (1, 2) if KINDS[k] in name.lower()), 0) for name in tables.apis]
    kind = np.array(kinds, np.int64)[nodes.api]
    made = []
    for low, high, pid in _windows(begin, end, pids):
        inside = (pids[nodes.thread] == pid) & (nodes.start > low) & (nodes.start < high)
        mine = np.flatnonzero(inside & ~ran)
        made.append((kind[mine], calls.lookup(nodes.thread[mine], nodes.start[mine])))
    return made


def _windows(begin: LaunchRows, end: LaunchRows, pids: Ints) -> Iterator[tuple[int, int, int]]:
    """Yield the (begin, end, pid) of each capture.

    Overlapping captures of one process are left out, because it is unknown which of them recorded a
    launch.
    """
    moments = sorted(
        (int(pids[thread]), start, opens)
        for rows, opens in ((begin, True), (end, False))
        for thread, start in zip(rows.thread.tolist(), rows.start.tolist(), strict=True)
    )
    process, depth, low, alone = -1, 0, 0, False
    for pid, start, opens in moments:
        if pid != process:
            process, depth = pid, 0
        if opens:
            low, alone = start, depth == 0
            depth += 1
        else:
            depth = max(depth - 1, 0)
            if alone and depth == 0:
                yield low, start, pid
            alone = False


def _capture_of(
    replay: _Replay, captures: Sequence[_Capture], calls: AttentionCalls
) -> _Capture | None:
    """Return the capture that recorded the nodes of a replay, or None if this is not certain."""
    if not replay.ordered:
        return None

    def identity(span: int) -> tuple[object, ...]:
        if span < 0:
            return ()
        call, direction = calls.calls[calls.spans[span].call], calls.spans[span].direction
        return direction, call.op, call.tensors, call.modules, call.config

    fitting = [
        (kinds, spans)
        for kinds, spans in captures
        if np.array_equal(kinds, replay.kinds) and (spans >= 0).any()
    ]
    identities = {tuple(map(identity, spans.tolist())) for _, spans in fitting}
    return fitting[0] if len(identities) == 1 else None


def _groups(tables: Tables, replay: _Replay) -> Iterator[tuple[bool, list[int]]]:
    """Yield (is backward, indices in the replay) for each group of attention kernels.

    A group consists of consecutive kernels of one direction. No kernel occurs twice in a group.
    """
    kernels = list(tables.kernels)
    parsed = {at: parse_kernel_name(kernels[at][1]) for at in distinct(replay.kernels)}
    attention = {at: name for at, name in parsed.items() if name.family in ATTENTION_FAMILIES}
    group: dict[int, int] = {}  # maps a kernel id to an index in the replay
    backward = False
    for place, kernel in enumerate(replay.kernels.tolist()):
        name = attention.get(kernel)
        bwd = name is not None and (name.family.endswith("_bwd") or name.direction == "bwd")
        if group and (name is None or bwd != backward or kernel in group):
            yield backward, list(group.values())
            group = {}
        if name is not None:
            group[kernel] = place
            backward = bwd
    if group:
        yield backward, list(group.values())
