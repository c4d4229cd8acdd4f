"""Find the attention calls that have no op: calls in CUDA graphs, and calls of bare kernels.

A single API call launches all kernels of a replay, so the kernels do not lie in any op. If the
trace, or another trace of the same program, contains the capture of the graph, the ops that were
captured describe the kernels. Otherwise, only the names of the kernels are known. A graph that was
captured on one stream replays its nodes in the order of their capture.

Libraries such as FlashInfer launch kernels without any op. The names of these kernels and the
module around the launch identify the call.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from profharness.errors import join_few, one_line
from profharness.files import open_input
from profharness.trace import NO_OP, NO_SHAPES, AttentionCall, CallSpan, ProgramStep
from profharness.traces.attention_calls import AttentionCalls, module_names
from profharness.traces.attribution import Attribution
from profharness.traces.columns import (
    CUDA_API,
    Flags,
    GpuRows,
    Ids,
    Ints,
    LaunchRows,
    Tables,
    distinct,
    nothing,
)
from profharness.traces.engine_steps import CAPTURE, parse_engine_step
from profharness.traces.intervals import SpanTree
from profharness.traces.kernel_names import ATTENTION_FAMILIES, parse_kernel_name
from profharness.traces.steps import GRAPH_LAUNCH, step_at

BEGIN = re.compile(rf"{CUDA_API}StreamBeginCapture\w*")
END = re.compile(rf"{CUDA_API}StreamEndCapture\w*")
NODE = re.compile(rf"{CUDA_API}\w*?(?:Launch(?:Cooperative)?Kernel|Memcpy|Memset)\w*")
KINDS = ("kernel", "memcpy", "memset")
SNIFFED = 4096  # bytes that show whether a file contains annotations
MAX_ANNOTATIONS = 64 << 20  # bytes
_ANNOTATIONS = re.compile(rb'\s*\{\s*(?:\}|"\d+"\s*:)')

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
NO_THREAD = (0, 0)  # the process and the thread of a kernel without an API call
_BARE = replace(_BLANK, kind="custom", op="kernel launch", reason=NO_OP, graph=False)


@dataclass(frozen=True, slots=True)
class GraphCapture:
    """The launches that the capture of a graph recorded, in order. They become nodes of the graph."""

    kinds: Ints  # index of each launch's kind in KINDS
    spans: Ints  # index in `calls` of the span that contains each launch, or -1
    calls: AttentionCalls
    stacks: tuple[tuple[str, ...], ...]  # the ops around each launch, outermost first
    modules: tuple[tuple[str, ...], ...]  # the nn.Modules around each launch, outermost first
    kernels: tuple[str | None, ...]  # name of each kernel, or None if the trace does not tell it
    batch: int | None  # size of the batch in the name of the range around the capture


@dataclass(frozen=True, slots=True)
class ReplayedOps:
    """The ops that launched the nodes of replayed graphs when the graphs were captured."""

    rows: Ints  # indices of launches in ascending order
    row_stacks: Ints  # index in `stacks` for each of them
    stacks: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class _Replay:
    """The kernels, memcpys and memsets of one launch of a graph, in order."""

    thread: int
    start: int
    rows: Ints  # indices of the activities among all GPU rows
    kernels: Ints  # kernel id of each row
    names: tuple[str, ...]  # name of each row's kernel
    kinds: Ints  # index of each row's kind in KINDS
    nodes: Ints  # id of each row's node in the graph, or -1
    ordered: bool  # whether all rows ran on one stream


def read_annotations(path: Path) -> dict[int, str] | None:
    """Return the names that `mark_kernels` gave to nodes of CUDA graphs, by node id.

    PyTorch writes the names as JSON: `{"4294967301": [{"name": "layers.0.attention"}]}`. Inner
    scopes come first. Earlier releases write a string in place of the dict. Return None if a file
    has another form, and raise OSError if it cannot be read.
    """
    with closing(open_input(path)) as file:
        data = file.read(SNIFFED)
        if not _ANNOTATIONS.match(data):  # do not read all of a trace, which is read later
            return None
        data += file.read(MAX_ANNOTATIONS + 1 - len(data))
    if len(data) > MAX_ANNOTATIONS:
        return None
    try:
        found = msgspec.json.decode(data, type=dict[int, Any])
    except msgspec.DecodeError:
        return None
    return {node: name for node, value in found.items() if (name := _annotation(value))}


def _annotation(value: object) -> str | None:
    if isinstance(value, list):
        return next(filter(None, map(_annotation, value)), None)
    if isinstance(value, dict):
        for key in ("module_fqn", "name", "str"):
            if isinstance(value.get(key), str):
                return one_line(value[key])
        return None
    return one_line(value) if isinstance(value, str) else None


def replayed(
    tables: Tables,
    calls: AttentionCalls,
    steps: Sequence[ProgramStep],
    threads: Sequence[tuple[int, int]],
    base: int,
    *,
    kernels: Sequence[tuple[str, str]],
    own: Sequence[GraphCapture] = (),
    recorded: Mapping[str, Sequence[GraphCapture]] = MappingProxyType({}),
    annotations: Mapping[int, str] | None = None,
) -> tuple[AttentionCalls, ReplayedOps]:
    """Return the given calls together with the calls that CUDA graphs replay, and the replayed ops.

    If a capture of the graph is known, every replay repeats the captured calls. `own` are the
    captures in this trace. The calls of the first replay replace the calls of a capture, because a
    capture runs no kernel. `recorded` maps the names of other files to the captures in them. If no
    capture is known, each uninterrupted sequence of attention kernels is a call, whose module is
    the annotation of its first node. `annotations` maps node ids to such names.

    `kernels` contains the (kind, name) of each kernel id. `Attribution` describes `threads` and
    `base`. The times of `calls` and `steps` include `base`.
    """
    result = _ReplayedCalls(calls)
    marks = tables.calls_of(GRAPH_LAUNCH)
    replays = _replays(tables, marks, kernels) if len(marks.start) else []
    tree = SpanTree(tables.modules)
    around = tree.around((replay.thread, replay.start) for replay in replays)
    others = [capture for captures in recorded.values() for capture in captures]
    fitted: Counter[bool] = Counter()
    misfits: Counter[str] = Counter()
    named: set[int] = set()
    for replay, modules in zip(replays, around, strict=True):
        pid, tid = threads[replay.thread]
        start = replay.start + base
        step = step_at(steps, start)
        place: dict[str, Any] = {
            "graph": True, "step": step, "pid": pid, "tid": tid, "start_ns": start, "duration_ns": 0,
        }  # fmt: skip
        batch = parse_engine_step(steps[step].name) if step is not None else None
        tokens = batch.new_tokens if batch else None
        capture = _capture_of(replay, own, tokens) or _capture_of(replay, others, tokens)
        if others:
            fitted[capture is not None] += 1
            misfits.update([] if capture else [_misfit(replay, others)])
        blank = replace(_BLANK, modules=module_names(modules), **place)
        if capture:
            result.copy(replay, capture, place)
        elif annotations:
            result.label(replay, list(map(annotations.get, replay.nodes.tolist())))
        named.update(replay.nodes.tolist())
        result.add(replay, _groups(kernels, replay, capture), blank, capture, annotations)
    texts = [
        (
            f"{count:,} of {fitted.total():,} graph replays do not match the capture in "
            f"{join_few(list(recorded), 2)} ({reason}); their kernels have no ops or shapes"
        )
        for reason, count in misfits.most_common(1)
    ]
    if annotations and (lacking := annotations.keys() - named):
        texts.append(
            f"{len(lacking):,} of {len(annotations):,} annotations describe nodes that no "
            "replay in this trace contains"
        )
    for rows, thread, start, around_it in _bare_kernels(tables, calls, tree, kernels):
        pid, tid = threads[thread] if thread >= 0 else NO_THREAD
        moment = start + base
        step = step_at(steps, moment)
        call = replace(_BARE, modules=around_it, step=step, pid=pid, tid=tid, start_ns=moment)
        result.add_kernels(call, rows)
    made = result.finish()
    return replace(made, warnings=(*made.warnings, *texts)), result.ops()


def _bare_kernels(
    tables: Tables,
    calls: AttentionCalls,
    tree: SpanTree,
    kernels: Sequence[tuple[str, str]],
) -> Iterator[tuple[Ints, int, int, tuple[str, ...]]]:
    """Yield the GPU rows, the thread, the launch and the modules of calls that have no op.

    A call consists of consecutive attention kernels, launched in one call of a module, in which no
    kernel occurs twice. If the file records no API calls, the start of a kernel on the GPU takes the
    place of its launch, and the thread is -1.
    """
    wanted = [
        number
        for number, (kind, name) in enumerate(kernels)
        if kind == "kernel" and _is_forward_attention(name)
    ]
    if not wanted:
        return
    places, rows = _rows_where(tables, lambda gpu: np.isin(gpu.kernel, wanted))
    keys, thread, launch = _direct_launches(tables, rows.correlation)
    at = np.searchsorted(keys, rows.correlation)
    known = at < len(keys)
    known[known] = keys[at[known]] == rows.correlation[known]
    mine = np.flatnonzero(known)
    thread, launch = thread[at[mine]], launch[at[mine]]
    if not tables.launches:
        mine = np.arange(len(places))
        thread, launch = nothing(len(mine)), rows.start
    free = calls.lookup(thread, launch) < 0
    mine, thread, launch = mine[free], thread[free], launch[free]
    order = np.lexsort((launch, rows.stream[mine], rows.device[mine], thread))
    mine, thread, launch = mine[order], thread[order], launch[order]
    moments = list(zip(thread.tolist(), launch.tolist(), strict=True))
    group: list[int] = []
    before: tuple[object, ...] | None = None
    for place, (moment, around) in enumerate(zip(moments, tree.around(moments), strict=True)):
        place_of = (moment[0], int(rows.device[mine[place]]), int(rows.stream[mine[place]]))
        where = (*place_of, tuple((span.name, span.start) for span in around))
        inside = {kernels[rows.kernel[mine[each]]] for each in group}
        if group and (where != before or kernels[rows.kernel[mine[place]]] in inside):
            yield _bare(group, places, mine, moments, tree)
            group = []
        group.append(place)
        before = where
    if group:
        yield _bare(group, places, mine, moments, tree)


def _bare(
    group: Sequence[int],
    places: Ints,
    mine: Ints,
    moments: Sequence[tuple[int, int]],
    tree: SpanTree,
) -> tuple[Ints, int, int, tuple[str, ...]]:
    thread, launch = moments[group[0]]
    (around,) = tree.around([(thread, launch)])
    return places[mine[list(group)]], thread, launch, module_names(around)


@cache
def _is_forward_attention(name: str) -> bool:
    parsed = parse_kernel_name(name)
    backward = parsed.family.endswith("_bwd") or parsed.direction == "bwd"
    return parsed.family in ATTENTION_FAMILIES and not backward


def _direct_launches(tables: Tables, correlations: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the sorted correlation ids of API calls that launch one kernel, their threads and times."""
    graphs = [number for name, number in tables.apis.items() if GRAPH_LAUNCH.fullmatch(name)]
    low, high = int(correlations.min(initial=0)), int(correlations.max(initial=-1))
    parts = [np.empty((len(LaunchRows._fields), 0), np.int64)]
    for block in tables.launches:
        if block.low <= high and block.high >= low:
            part = tables.spool.read(block)
            rows = LaunchRows(*part)
            parts.append(
                part[:, np.isin(rows.correlation, correlations) & ~np.isin(rows.api, graphs)]
            )
    found = LaunchRows(*np.concatenate(parts, axis=1))
    keys, first = np.unique(found.correlation, return_index=True)
    return keys, found.thread[first], found.start[first]


class _ReplayedCalls:
    """Collects the replayed calls, their spans and ops, and the GPU rows of each."""

    def __init__(self, calls: AttentionCalls) -> None:
        self._before = calls
        self._calls = list(calls.calls)
        self._spans = list(calls.spans)
        self._replaced: set[int] = set()
        # Calls that were recognized by the names of their kernels, and have no backward yet
        self._waiting: list[int] = []
        self._rows = [nothing(0)]
        self._row_spans = [nothing(0)]
        self._stacks = Ids()
        self._op_rows = [nothing(0)]
        self._row_stacks = [nothing(0)]

    def copy(self, replay: _Replay, capture: GraphCapture, place: dict[str, Any]) -> None:
        """Add the calls and the ops of a capture for one replay."""
        numbers: dict[int, int] = {}
        source = capture.calls
        to = nothing(len(source.spans) + 1)
        for span in distinct(capture.spans[capture.spans >= 0]):
            captured, direction = source.spans[span].call, source.spans[span].direction
            if captured not in numbers:
                number = len(self._calls)
                if source is self._before and captured not in self._replaced:
                    # the captured call ran no kernel, so the first replay replaces it
                    number = captured
                    self._replaced.add(captured)
                self._calls[number : number + 1] = [replace(source.calls[captured], **place)]
                numbers[captured] = number
            to[span] = self._add_span(numbers[captured], direction)
        found = to[capture.spans]
        self._rows.append(replay.rows[found >= 0])
        self._row_spans.append(found[found >= 0])
        self._op_rows.append(replay.rows)
        self._row_stacks.append(self._stacks.column(list(capture.stacks)))

    def label(self, replay: _Replay, names: Sequence[str | None]) -> None:
        """Add the annotations of a replay's nodes as the ops that launched them."""
        known = np.array([name is not None for name in names], bool)
        self._op_rows.append(replay.rows[known])
        self._row_stacks.append(self._stacks.column([(name,) for name in names if name]))

    def ops(self) -> ReplayedOps:
        rows = np.concatenate(self._op_rows)
        sort = np.argsort(rows)
        return ReplayedOps(rows[sort], np.concatenate(self._row_stacks)[sort], tuple(self._stacks))

    def add(
        self,
        replay: _Replay,
        groups: Iterator[tuple[bool, list[int]]],
        blank: AttentionCall,
        capture: GraphCapture | None,
        annotations: Mapping[int, str] | None,
    ) -> None:
        """Add a call for each group of forward kernels that belong to no captured call.

        The module and the op of a call are the module and the op around the capture of its first
        kernel. A group of backward kernels is assigned to the last call that has no backward.
        """
        for backward, places in groups:
            if not backward:
                call = blank
                if capture is not None:
                    stack, modules = capture.stacks[places[0]], capture.modules[places[0]]
                    op = stack[-1] if stack else blank.op
                    call = replace(blank, op=op, modules=modules or blank.modules, reason=NO_OP)
                elif name := (annotations or {}).get(int(replay.nodes[places[0]])):
                    call = replace(blank, modules=(name,))
                self._calls.append(call)
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

    def add_kernels(self, call: AttentionCall, rows: Ints) -> None:
        """Add a call whose forward pass consists of these GPU rows."""
        self._calls.append(call)
        span = self._add_span(len(self._calls) - 1, "forward")
        self._rows.append(rows)
        self._row_spans.append(np.full(len(rows), span, np.int64))

    def _add_span(self, call: int, direction: str) -> int:
        self._spans.append(CallSpan(call, direction))
        return len(self._spans) - 1

    def finish(self) -> AttentionCalls:
        if len(self._spans) == len(self._before.spans):
            return self._before
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
    return _rows_where(tables, lambda rows: np.isin(rows.correlation, correlations))


def _rows_where(tables: Tables, holds: Callable[[GpuRows], Flags]) -> tuple[Ints, GpuRows]:
    """Return the indices and the columns of the GPU rows for which `holds` is true."""
    parts, places = [np.empty((len(GpuRows._fields), 0), np.int64)], [nothing(0)]
    before = 0
    for block in tables.gpu:
        rows = tables.spool.read(block)
        hit = np.flatnonzero(holds(GpuRows(*rows)))
        parts.append(rows[:, hit])
        places.append(hit + before)
        before += block.rows
    return np.concatenate(places), GpuRows(*np.concatenate(parts, axis=1))


def _replays(
    tables: Tables, launches: LaunchRows, known: Sequence[tuple[str, str]]
) -> list[_Replay]:
    """Return the replays that ran at least one kernel, in the order of their launches."""
    places, rows = _rows_of(tables, launches.correlation)
    kinds = np.array([KINDS.index(kind) for kind, _ in known], np.int64)
    texts = [name for _, name in known]
    order = np.lexsort((rows.start, rows.stream, rows.correlation))
    sorted_keys = rows.correlation[order]
    starts = np.flatnonzero(np.diff(sorted_keys, prepend=-2))
    of = dict(zip(sorted_keys[starts].tolist(), np.split(order, starts[1:]), strict=True))
    made = []
    for correlation, _, thread, start in np.array(launches).T.tolist():
        if (mine := of.pop(correlation, None)) is not None:
            kernels = rows.kernel[mine]
            ordered = len(np.unique(rows.stream[mine])) == 1
            names = tuple(texts[kernel] for kernel in kernels.tolist())
            made.append(
                _Replay(
                    thread,
                    start,
                    places[mine],
                    kernels,
                    names,
                    kinds[kernels],
                    rows.node[mine],
                    ordered,
                )
            )
    return made


def find_captures(
    tables: Tables, at: Attribution, threads: Sequence[tuple[int, int]]
) -> list[GraphCapture]:
    """Return the captures of graphs in a trace.

    The attention calls of the trace are the calls of `at`.
    """
    begin, end = tables.calls_of(BEGIN), tables.calls_of(END)
    if not len(begin.start):
        return []
    pids = np.array([pid for pid, _ in threads], np.int64)
    nodes = tables.calls_of(NODE)
    ran = np.isin(nodes.correlation, _rows_of(tables, nodes.correlation)[1].correlation)
    kinds = [next((k for k in (1, 2) if KINDS[k] in name.lower()), 0) for name in tables.apis]
    kind = np.array(kinds, np.int64)[nodes.api]
    made = []
    tree = SpanTree(tables.modules)
    for low, high, pid in _windows(begin, end, pids):
        inside = (pids[nodes.thread] == pid) & (nodes.start > low) & (nodes.start < high)
        mine = np.flatnonzero(inside & ~ran)
        thread, start = nodes.thread[mine], nodes.start[mine]
        names = [tables.launched.get(number) for number in nodes.correlation[mine].tolist()]
        modules = tree.around(zip(thread.tolist(), start.tolist(), strict=True))
        steps = [
            parse_engine_step(row.name)
            for row in at.ranges.rows
            if row.pid == pid and row.start_ns <= low + at.base < row.start_ns + row.duration_ns
        ]
        batch = next((step.requests for step in steps if step and step.phase == CAPTURE), None)
        made.append(
            GraphCapture(
                kind[mine],
                at.calls.lookup(thread, start),
                at.calls,
                tuple(at.stacks.names(at.stacks.lookup(thread, start))),
                tuple(map(module_names, modules)),
                tuple(names),
                batch,
            )
        )
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
    replay: _Replay, captures: Sequence[GraphCapture], tokens: int | None
) -> GraphCapture | None:
    """Return the capture that recorded the nodes of a replay, or None if this is not certain.

    Engines capture a graph for each of several batch sizes. If several captures fit, use the one
    with the smallest batch that is large enough for the tokens of the step.
    """
    if not replay.ordered:
        return None

    def identity(capture: GraphCapture) -> tuple[object, ...]:
        made: list[tuple[object, ...] | None] = []
        for span in capture.spans.tolist():
            if span >= 0:
                found = capture.calls.spans[span]
                call = capture.calls.calls[found.call]
                made.append((found.direction, call.op, call.tensors, call.modules, call.config))
            else:
                made.append(None)
        return (*made, capture.stacks)

    fitting = [
        capture
        for capture in captures
        if not _differences(replay, capture)
        and (tokens is None or (capture.batch or tokens) >= tokens)
    ]
    if tokens is not None and len(fitting) > 1:
        least = min(capture.batch or tokens for capture in fitting)
        fitting = [capture for capture in fitting if (capture.batch or tokens) == least]
    return fitting[0] if len({identity(capture) for capture in fitting}) == 1 else None


def _differences(replay: _Replay, capture: GraphCapture) -> int:
    """Count the nodes of a capture that differ from those of a replay in kind or name.

    If the numbers of nodes differ, all are different.
    """
    if len(capture.kinds) != len(replay.kinds):
        return max(len(capture.kinds), len(replay.kinds))
    if not np.array_equal(capture.kinds, replay.kinds):
        return int(np.count_nonzero(capture.kinds != replay.kinds))
    pairs = zip(capture.kernels, replay.names, strict=True)
    return sum(name is not None and name != other for name, other in pairs)


def _misfit(replay: _Replay, captures: Sequence[GraphCapture]) -> str:
    """Return why no capture matches a replay."""
    if not replay.ordered:
        return "a replay ran on several streams"
    closest = min(captures, key=lambda capture: _differences(replay, capture))
    here, there = len(replay.kinds), len(closest.kinds)
    if here != there:
        return f"a replay has {here:,} kernels and copies, but the closest capture has {there:,}"
    if count := _differences(replay, closest):
        return f"{count:,} of {here:,} kernels have different names"
    if len(captures) == 1:
        return f"the capture's batch size of {closest.batch} is smaller than the step's"
    return "several captures match, but their shapes differ"


def _groups(
    kernels: Sequence[tuple[str, str]], replay: _Replay, capture: GraphCapture | None
) -> Iterator[tuple[bool, list[int]]]:
    """Yield (is backward, indices in the replay) for each group of attention kernels.

    Kernels of captured attention calls are left out. A group consists of consecutive kernels of one
    direction. No kernel occurs twice in a group.
    """
    parsed = {at: parse_kernel_name(kernels[at][1]) for at in distinct(replay.kernels)}
    attention = {at: name for at, name in parsed.items() if name.family in ATTENTION_FAMILIES}
    group: dict[tuple[str, str], int] = {}  # maps a kernel to an index in the replay
    backward = False
    captured = [False] * len(replay.kernels) if capture is None else capture.spans >= 0
    for place, kernel in enumerate(replay.kernels.tolist()):
        name = None if captured[place] else attention.get(kernel)
        bwd = name is not None and (name.family.endswith("_bwd") or name.direction == "bwd")
        if group and (name is None or bwd != backward or kernels[kernel] in group):
            yield backward, list(group.values())
            group = {}
        if name is not None:
            group[kernels[kernel]] = place
            backward = bwd
    if group:
        yield backward, list(group.values())
