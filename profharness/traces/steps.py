"""Find the steps of a program in its ranges and in the calls of its modules."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from profharness.trace import ProgramStep, Range
from profharness.traces.columns import CUDA_API, Flags, Ints, Tables
from profharness.traces.engine_steps import is_engine_step
from profharness.traces.intervals import AutogradNodes, Intervals, SpanTree
from profharness.traces.ops import MODULE, HostSpan

PROFILER_STEP = "ProfilerStep#"
OPTIMIZER_STEP = "Optimizer.step#"
UNNAMED = "training step"  # the name of a step that ends with an optimizer and has no other name
# Ranges that PyTorch, its profiler, a library or an engine opens, and not the user
FRAMEWORK = re.compile(
    r"Optimizer\.|enumerate\(DataLoader\)|DistributedDataParallel|FullyShardedDataParallel|FSDP|DDP\b"
    r"|Torch-Compiled Region|TorchDynamo|## Call CompiledFxGraph|CompiledFunction|Pregraph|Inductor"
    r"|autograd::|torch::|aten::|c10d::|nccl|NCCL|gloo:|mpi:|ucc:|record_param_comms|PyTorch Profiler"
    r"|ProfilerStep|profharness|profiler::|transformer_engine|gpu_model_runner|pin_memory|capture_\d"
)
# A part of a model, which occurs several times in a step, or what follows the model in a step
PART = re.compile(
    r"(?i)att(?:entio)?n|layer|block|mlp|moe|ffn|expert|norm|embed|qkv|rope|sdpa|softmax|sampler|sampling|logits"
)
ENCLOSED = 0.9  # share of the attention calls or of the GPU's work that ranges must enclose
GRAPH_LAUNCH = re.compile(rf"{CUDA_API}GraphLaunch\w*")
_KERNEL_LAUNCH = re.compile(rf"{CUDA_API}\w*?Launch(?:Cooperative)?Kernel\w*|hipExt\w*Launch\w*")
_DIGITS = re.compile(r"\d+")

Moments = Callable[[], Ints]
_Span = tuple[str, int, int]  # name, start and end


def step_at(steps: Sequence[ProgramStep], t: int) -> int | None:
    """Return the index of the step that contains the time `t`, or None if no step contains it."""
    at = bisect_right(steps, t, key=lambda step: step.start_ns) - 1
    return at if at >= 0 and t < steps[at].start_ns + steps[at].duration_ns else None


def gpu_work(tables: Tables) -> Ints:
    """Return the times of the API calls that launch CUDA graphs, or kernels if there are no graphs."""
    graphs = tables.calls_of(GRAPH_LAUNCH).start
    return graphs if len(graphs) else tables.calls_of(_KERNEL_LAUNCH).start


def outermost(modules: SpanTree, evaluations: AutogradNodes) -> list[HostSpan]:
    """Return the calls of outermost modules outside backward passes, sorted by start."""
    spans = [span for span, above in zip(modules.spans, modules.above, strict=True) if above < 0]
    moments = np.array([(span.thread, span.start) for span in spans], np.int64).reshape(-1, 2).T
    around = evaluations.intervals.innermost(*moments).tolist()
    kept = (span for span, node in zip(spans, around, strict=True) if node < 0)
    return sorted(kept, key=lambda span: int(span.start))


def find_steps(
    ranges: Sequence[Range],
    modules: Sequence[HostSpan],
    calls: Sequence[int],
    work: Moments,
    *,
    threads: Sequence[tuple[int, int]],
    base: int,
    last: int,
) -> tuple[ProgramStep, ...]:
    """Return the steps of a program, using the first item of this list that the trace contains:

    1. the ProfilerStep ranges
    2. the user's repeated ranges around the attention calls, or around the GPU's work
    3. the annotations of an engine
    4. the calls of outermost modules, up to an optimizer's step if there is one

    `modules` are the calls of outermost modules, and `calls` the times of the attention calls.
    `work` returns the times at which the program launched the GPU's work. `last` is the end of the
    last op. The times of `ranges` include `base`; the other times do not.
    """
    numbered = _spans(row for row in ranges if row.name.startswith(PROFILER_STEP))
    if numbered:  # they may end in another order, since NVTX ranges are a stack
        return _tiled(numbered, max(end for *_, end in numbered))
    moments = np.sort(np.array(calls, np.int64)) + base
    own = _user_ranges(ranges, _in_modules(ranges, modules, threads, base), moments, work, base)
    if spans := _spans(own or _engine_ranges(ranges)):
        return _tiled(spans, last + base)
    ends = sorted(
        row.start_ns + row.duration_ns for row in ranges if row.name.startswith(OPTIMIZER_STEP)
    )
    if modules:
        spans = _by_module(_starting(modules, calls), ends, base)
        return _tiled(spans, max([last + base, *ends[-1:]]))
    return _by_optimizer(ranges, ends)


def _spans(ranges: Iterable[Range]) -> list[_Span]:
    ordered = sorted(ranges, key=lambda row: row.start_ns)
    return [(row.name, row.start_ns, row.start_ns + row.duration_ns) for row in ordered]


def _tiled(spans: Sequence[_Span], last: int) -> tuple[ProgramStep, ...]:
    """Return steps that last from the start of a span to the start of the next span.

    The last step ends at `last` or with its span.
    """
    borders = [*(start for _, start, _ in spans[1:]), *(max(end, last) for *_, end in spans[-1:])]
    return tuple(
        ProgramStep(name, start, border - start)
        for (name, start, _), border in zip(spans, borders, strict=True)
    )


def _in_modules(
    ranges: Sequence[Range],
    modules: Sequence[HostSpan],
    threads: Sequence[tuple[int, int]],
    base: int,
) -> Flags:
    """Return for each range whether it starts within the call of a module."""
    spans = [(span.thread, span.start + base, span.end + base) for span in modules]
    numbers = {thread: number for number, thread in enumerate(threads)}
    starts = [(numbers.get((row.pid, row.tid), -1), row.start_ns) for row in ranges]
    calls = Intervals(*np.array(spans, np.int64).reshape(-1, 3).T)
    inside: Flags = calls.innermost(*np.array(starts, np.int64).reshape(-1, 2).T) >= 0
    return inside


def _user_ranges(
    ranges: Sequence[Range], in_module: Flags, calls: Ints, work: Moments, base: int
) -> list[Range]:
    """Return the user's repeated ranges that enclose the attention calls, or the GPU's work.

    Ranges that differ only in numbers, such as `iteration 7`, are one group. Of several such
    groups, the outer group is returned.
    """
    groups: dict[tuple[int, int, str], list[Range]] = defaultdict(list)
    for row, inside in zip(ranges, in_module.tolist(), strict=True):
        if not inside and (pattern := _pattern(row.name)):
            groups[row.pid, row.tid, pattern].append(row)
    found: list[Range] = []
    longest, launches = 0, None
    for group in groups.values():
        group.sort(key=lambda row: row.start_ns)
        durations = np.array([row.duration_ns for row in group], np.int64)
        starts = np.array([row.start_ns for row in group], np.int64)
        ends, total = starts + durations, int(durations.sum())
        if len(group) < 2 or total <= longest or (starts[1:] < ends[:-1]).any():
            continue
        if not _enclosed(calls, starts, ends):
            launches = work() + base if launches is None else launches
            if not _enclosed(launches, starts, ends):
                continue
        found, longest = group, total
    return found


@cache
def _pattern(name: str) -> str | None:
    """Return the name of a user's range with # for numbers, or None if it cannot name a step."""
    if FRAMEWORK.match(name) or is_engine_step(name) or PART.search(name):
        return None
    return _DIGITS.sub("#", name)


def _enclosed(moments: Ints, starts: Ints, ends: Ints) -> bool:
    """Return whether spans, which do not overlap, enclose almost all of the sorted moments."""
    within = np.searchsorted(moments, ends) - np.searchsorted(moments, starts)
    return bool(len(moments)) and bool(within.sum() >= ENCLOSED * len(moments))


def _engine_ranges(ranges: Sequence[Range]) -> list[Range]:
    """Return the outermost annotations of an engine's steps, sorted by start."""
    steps: list[Range] = []
    for row in sorted(ranges, key=lambda row: (row.start_ns, -row.duration_ns)):
        end = steps[-1].start_ns + steps[-1].duration_ns if steps else row.start_ns
        if is_engine_step(row.name) and row.start_ns >= end:
            steps.append(row)
    return steps


def _starting(modules: Sequence[HostSpan], calls: Sequence[int]) -> list[HostSpan]:
    """Return the calls of modules that can start a step.

    These are the calls that contain attention. If no call contains attention, as with CUDA graphs,
    all calls except calls of samplers and similar modules can start a step.
    """
    ordered = sorted(calls)
    found = [
        span
        for span in modules
        if bisect_left(ordered, span.start) < bisect_left(ordered, span.end)
    ]
    return found or [span for span in modules if not PART.search(span.name)] or list(modules)


def _by_module(modules: Iterable[HostSpan], ends: Sequence[int], base: int) -> list[_Span]:
    """Return the name, start and end of the first call of a module in each step.

    A step contains the calls up to the end of an optimizer's step. Without an optimizer, a step
    ends before a module that was already called in the step. Calls after the last optimizer's step
    do not form a step.
    """
    spans: list[_Span] = []
    called: set[str] = set()
    before = -1
    for span in modules:
        number = bisect_right(ends, span.start + base)
        is_new = number > before if ends else not spans or span.name in called
        if is_new and (not ends or number < len(ends) or not spans):
            spans.append((span.name.removeprefix(MODULE), span.start + base, span.end + base))
            called.clear()
        before = number
        called.add(span.name)
    return spans


def _by_optimizer(ranges: Sequence[Range], ends: Sequence[int]) -> tuple[ProgramStep, ...]:
    """Return the steps of a trace without modules. Each step ends with an optimizer's step.

    The name of a step is the name of the user's range around the optimizer's step.
    """
    steps = []
    borders = [min((row.start_ns for row in ranges), default=0), *ends]
    own = _spans(row for row in ranges if not FRAMEWORK.match(row.name))
    begun = 0
    around: list[tuple[int, int]] = []  # a heap of the durations and indices of the ranges
    for begin, end in pairwise(borders):
        while begun < len(own) and own[begun][1] < end:
            _, first, last = own[begun]
            heappush(around, (last - first, begun))
            begun += 1
        while around and own[around[0][1]][2] < end:
            heappop(around)
        name = own[around[0][1]][0] if around else UNNAMED
        steps.append(ProgramStep(name, begin, end - begin))
    return tuple(steps)
