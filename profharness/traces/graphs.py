"""Find the attention calls that CUDA graphs replay.

A single API call launches all kernels of a replay, so the kernels do not lie in any op. If the trace
contains the capture of the graph, the captured ops describe the kernels. Otherwise, only the names
of the kernels describe them. A graph that was captured on one stream replays its nodes in the order
of their capture.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from profharness.trace import AttentionCall, CallSpan, ProgramStep
from profharness.traces.attention_calls import AttentionCalls, module_names, step_at
from profharness.traces.attribution import Source
from profharness.traces.columns import GpuRows, Ints, LaunchRows, distinct
from profharness.traces.intervals import SpanTree, nothing
from profharness.traces.kernel_names import ATTENTION_FAMILIES, parse_kernel_name

_API = r"(?:cuda|cu|hip)"
REPLAY = re.compile(rf"{_API}GraphLaunch\w*")
BEGIN = re.compile(rf"{_API}StreamBeginCapture\w*")
END = re.compile(rf"{_API}StreamEndCapture\w*")
NODE = re.compile(rf"{_API}\w*?(?:Launch(?:Cooperative)?Kernel|Memcpy|Memset)\w*")
KINDS = ("kernel", "memcpy", "memset")
NO_SHAPES = "recorded in a CUDA graph; its shapes are not in the trace"


@dataclass(frozen=True, slots=True)
class _Replay:
    """The kernels, memcpys and memsets of one launch of a graph, in order.

    `rows` contains their indices among all GPU rows, `kernels` their ids, and `kinds` their indices
    in KINDS. `ordered` is True if all of them ran on one stream.
    """

    thread: int
    start: int
    rows: Ints
    kernels: Ints
    kinds: Ints
    ordered: bool


@dataclass(frozen=True, slots=True)
class _Capture:
    """The launches that a capture recorded, in order.

    `kinds` contains the index in KINDS of each launch, and `spans` the index of the attention call's
    span that contains it, or -1.
    """

    kinds: Ints
    spans: Ints


def replayed(
    source: Source,
    calls: AttentionCalls,
    steps: Sequence[ProgramStep],
    threads: Sequence[tuple[int, int]],
    base: int,
) -> AttentionCalls:
    """Return the given calls together with the calls that CUDA graphs replay.

    If the trace contains the capture of a graph, every replay repeats the captured calls. The calls
    of the first replay replace the captured calls, because a capture runs no kernel. If the trace
    does not contain the capture, each uninterrupted sequence of attention kernels is a call.

    `threads` contains the (pid, tid) of each thread index. `base` is the number of nanoseconds to add
    to every time. The times of `calls` and `steps` already include `base`.
    """
    marks = _marked(source, REPLAY)
    if not len(marks.start):
        return calls
    replays = _replays(source, marks)
    captures = _captures(source, calls, threads)
    result = _ReplayedCalls(calls)
    tree = SpanTree(source.tables.modules)
    around = tree.around((replay.thread, replay.start) for replay in replays)
    for replay, modules in zip(replays, around, strict=True):
        pid, tid = threads[replay.thread]
        start = replay.start + base
        place: dict[str, Any] = {
            "graph": True, "step": step_at(steps, start), "pid": pid, "tid": tid,
            "start_ns": start, "duration_ns": 0,
        }  # fmt: skip
        if capture := _capture_of(replay, captures, calls):
            result.copy(replay, capture, place)
        else:
            blank = replace(_BLANK, modules=module_names(modules), **place)
            result.by_kernels(replay, list(_groups(source, replay)), blank)
    return result.finish()


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
)


class _ReplayedCalls:
    """Collects the replayed calls, their spans, and the GPU rows in each span."""

    def __init__(self, calls: AttentionCalls) -> None:
        self._before = calls
        self._calls = list(calls.calls)
        self._spans = list(calls.spans)
        self._replaced: set[int] = set()
        # Calls that were found through their kernels, and whose backward has not been found yet
        self._waiting: list[int] = []
        self._rows: list[Ints] = []
        self._row_spans: list[Ints] = []

    def copy(self, replay: _Replay, capture: _Capture, place: dict[str, Any]) -> None:
        """Add the calls of a capture for one replay."""
        numbers: dict[int, int] = {}
        to = nothing(len(self._before.spans) + 1)
        for span in distinct(capture.spans[capture.spans >= 0]):
            captured, direction = self._spans[span].call, self._spans[span].direction
            if captured not in numbers:
                numbers[captured] = self._copied(captured, place)
            to[span] = self._span(numbers[captured], direction)
        self._take(replay.rows, to[capture.spans])

    def _copied(self, captured: int, place: dict[str, Any]) -> int:
        call = replace(self._before.calls[captured], **place)
        if captured not in self._replaced:  # replace the captured call, which ran no kernel
            self._replaced.add(captured)
            self._calls[captured] = call
            return captured
        self._calls.append(call)
        return len(self._calls) - 1

    def by_kernels(
        self, replay: _Replay, groups: Sequence[tuple[bool, list[int]]], blank: AttentionCall
    ) -> None:
        """Add a call for each group of forward kernels.

        A group of backward kernels is assigned to the last call that has no backward yet.
        """
        for backward, places in groups:
            if not backward:
                self._calls.append(blank)
                self._waiting.append(len(self._calls) - 1)
                number = self._waiting[-1]
            elif self._waiting:
                number = self._waiting.pop()
                self._calls[number] = replace(self._calls[number], backward=True)
            else:
                continue
            span = self._span(number, "backward" if backward else "forward")
            self._take(replay.rows[places], np.full(len(places), span, np.int64))

    def _span(self, call: int, direction: str) -> int:
        self._spans.append(CallSpan(call, direction))
        return len(self._spans) - 1

    def _take(self, rows: Ints, spans: Ints) -> None:
        self._rows.append(rows[spans >= 0])
        self._row_spans.append(spans[spans >= 0])

    def finish(self) -> AttentionCalls:
        """Return all calls, sorted by start."""
        order = sorted(range(len(self._calls)), key=lambda at: self._calls[at].start_ns)
        number = {at: place for place, at in enumerate(order)}
        rows = np.concatenate([nothing(0), *self._rows])
        sort = np.argsort(rows)
        return replace(
            self._before,
            calls=tuple(self._calls[at] for at in order),
            spans=tuple(CallSpan(number[span.call], span.direction) for span in self._spans),
            rows=rows[sort],
            row_spans=np.concatenate([nothing(0), *self._row_spans])[sort],
        )


def _marked(source: Source, rule: re.Pattern[str]) -> LaunchRows:
    """Return the API calls whose name matches a pattern, sorted by start."""
    wanted = np.array([bool(rule.fullmatch(name)) for name in source.tables.apis], np.bool_)
    parts = [np.empty((len(LaunchRows._fields), 0), np.int64)]
    if wanted.any():
        for block in source.tables.launches:
            rows = np.array(source.launches([block]))
            parts.append(rows[:, wanted[LaunchRows(*rows).api]])
    selected = np.concatenate(parts, axis=1)
    return LaunchRows(*selected[:, np.argsort(LaunchRows(*selected).start, kind="stable")])


def _rows_of(source: Source, correlations: Ints) -> tuple[Ints, GpuRows]:
    """Return the indices and the columns of the GPU rows that have one of these correlation ids."""
    parts, places = [np.empty((len(GpuRows._fields), 0), np.int64)], [nothing(0)]
    before = 0
    for block in source.tables.gpu:
        rows = source.gpu([block])
        hit = np.flatnonzero(np.isin(rows.correlation, correlations))
        parts.append(np.array([column[hit] for column in rows]))
        places.append(hit + before)
        before += block.rows
    return np.concatenate(places), GpuRows(*np.concatenate(parts, axis=1))


def _replays(source: Source, launches: LaunchRows) -> list[_Replay]:
    """Return the replays that ran at least one kernel, in the order of their launches."""
    places, rows = _rows_of(source, launches.correlation)
    kind_of = {kind: number for number, kind in enumerate(KINDS)}
    kinds = np.array([kind_of[kind] for kind, _ in source.tables.kernels], np.int64)
    order = np.lexsort((rows.start, rows.stream, rows.correlation))
    starts = np.flatnonzero(np.diff(rows.correlation[order], prepend=-2))
    of = dict(
        zip(rows.correlation[order][starts].tolist(), np.split(order, starts[1:]), strict=True)
    )
    made = []
    for correlation, thread, start in zip(
        *(column.tolist() for column in (launches.correlation, launches.thread, launches.start)),
        strict=True,
    ):
        if (mine := of.pop(correlation, None)) is not None:
            kernels = rows.kernel[mine]
            ordered = len(np.unique(rows.stream[mine])) == 1
            made.append(_Replay(thread, start, places[mine], kernels, kinds[kernels], ordered))
    return made


def _captures(
    source: Source, calls: AttentionCalls, threads: Sequence[tuple[int, int]]
) -> list[_Capture]:
    """Return the captures in a trace.

    Captures of one process that overlap are left out, because it is unknown which of them recorded
    a launch.
    """
    if not calls.calls:
        return []
    pids = np.array([pid for pid, _ in threads], np.int64)
    begin, end = _marked(source, BEGIN), _marked(source, END)
    nodes = _marked(source, NODE) if len(begin.start) else begin
    ran = np.isin(nodes.correlation, _rows_of(source, nodes.correlation)[1].correlation)
    kinds = [
        next((k for k in (1, 2) if KINDS[k] in name.lower()), 0) for name in source.tables.apis
    ]
    kind = np.array(kinds, np.int64)[nodes.api]
    made = []
    for low, high, pid in _windows(begin, end, pids):
        inside = (pids[nodes.thread] == pid) & (nodes.start > low) & (nodes.start < high)
        mine = np.flatnonzero(inside & ~ran)
        made.append(_Capture(kind[mine], calls.lookup(nodes.thread[mine], nodes.start[mine])))
    return made


def _windows(begin: LaunchRows, end: LaunchRows, pids: Ints) -> Iterator[tuple[int, int, int]]:
    """Yield the (begin, end, pid) of each capture that does not overlap another capture of its
    process.
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
    """Return the capture that recorded the nodes of a replay.

    Return None if no capture fits, or if several captures fit and contain different calls.
    """
    if not replay.ordered:
        return None
    fitting = [
        c for c in captures if np.array_equal(c.kinds, replay.kinds) and (c.spans >= 0).any()
    ]
    identities = {
        tuple(_call_identity(calls, span) for span in capture.spans.tolist()) for capture in fitting
    }
    return fitting[0] if len(identities) == 1 else None


def _call_identity(calls: AttentionCalls, span: int) -> tuple[object, ...]:
    """Return the properties by which two captured calls are compared."""
    if span < 0:
        return ()
    call = calls.calls[calls.spans[span].call]
    return (calls.spans[span].direction, call.op, call.tensors, call.modules, call.config)


def _groups(source: Source, replay: _Replay) -> Iterator[tuple[bool, list[int]]]:
    """Divide the attention kernels of a replay into groups.

    A group consists of consecutive kernels. All of them belong to the forward or all to the backward,
    and no kernel occurs twice. Yield for each group whether it is a backward, and the indices of its
    kernels in the replay.
    """
    names = list(source.tables.kernels)
    parsed = {at: parse_kernel_name(names[at][1]) for at in distinct(replay.kernels)}
    attention = {at: name for at, name in parsed.items() if name.family in ATTENTION_FAMILIES}
    group: list[int] = []
    seen: list[int] = []
    backward = False
    for place, kernel in enumerate(replay.kernels.tolist()):
        name = attention.get(kernel)
        bwd = name is not None and (name.family.endswith("_bwd") or name.direction == "bwd")
        if group and (name is None or bwd != backward or kernel in seen):
            yield backward, group
            group, seen = [], []
        if name is not None:
            group.append(place)
            seen.append(kernel)
            backward = bwd
    if group:
        yield backward, group
