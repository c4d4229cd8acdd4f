"""Find the attention calls of a program among the ops of a trace.

For each call, this module determines the op that the program called, the op that computed the
attention, the tensors, the nn.Modules around the call, and the time spans of its forward and its
backward.

Ops with equal arguments share one `OpArguments` object, so calls that have the same arguments are
described only once, however often the program makes them.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from profharness.attention.config import Config
from profharness.errors import UsageError
from profharness.trace import AttentionCall, CallSpan, ProgramStep, Range, TensorArgument
from profharness.traces.columns import Ints
from profharness.traces.intervals import AutogradNodes, Intervals, SpanTree, nothing
from profharness.traces.ops import (
    BACKWARD,
    EVALUATION,
    FAST,
    FLEX,
    GRADIENT,
    INNER,
    LAYER,
    LINEAR,
    MODULE,
    OUTER,
    PACKAGES,
    PRODUCTS,
    REGION,
    SOFTMAX,
    TRITON,
    TRITON_TEMPLATE,
    UNFUSED_FLEX,
    HostSpan,
    is_fused,
)
from profharness.traces.replay import (
    CONTRADICTED,
    NO_SHAPES,
    ORPHANS,
    POSITIONS,
    VARLEN,
    doubt,
    flag,
    is_packed,
    is_unlike_sdpa,
    replay_config,
    sizes,
    tensor_argument,
    warnings,
)

# Modules inside an attention module. A call in one of them is assigned to the module's parent.
PASSED_THROUGH = re.compile(r"(?:Softmax|Dropout)\w*_\d+")
MARKER = "profharness-attention:"  # prefix of a range whose name contains a module's dotted path


@dataclass(frozen=True, slots=True)
class AttentionCalls:
    """The attention calls of a trace, and the time spans in which their forward and backward ran."""

    calls: tuple[AttentionCall, ...]  # sorted by start
    spans: tuple[CallSpan, ...]
    intervals: Intervals  # thread, start and stop of each span
    # Kernels that a CUDA graph launched lie in no interval. `rows` contains the numbers of these
    # launches in ascending order, and `row_spans` the index of the span of each.
    rows: Ints = field(default_factory=lambda: nothing(0))
    row_spans: Ints = field(default_factory=lambda: nothing(0))
    warnings: tuple[str, ...] = ()  # describe contradictions in the trace, with counts

    def lookup(self, thread: Ints, t: Ints, first: int | None = None) -> Ints:
        """Return the index of the innermost span at each (thread, t), or -1 if there is no span.

        If the lookup is for consecutive launches, `first` is the number of the first launch within
        the trace.
        """
        rows = np.append(self.intervals.rows, -1)
        spans = rows[self.intervals.innermost(thread, t)]
        if first is not None and len(self.rows):
            low, high = np.searchsorted(self.rows, [first, first + len(t)])
            spans[self.rows[low:high] - first] = self.row_spans[low:high]
        return spans


class _Context:
    """Knows the surroundings of each op that may belong to an attention call.

    The surroundings are compiled regions, autograd nodes and nn.Modules. Ops are identified by their
    index in the tree.
    """

    def __init__(self, ops: SpanTree, modules: Iterable[HostSpan]) -> None:
        self.modules = SpanTree(modules)
        self._ops = ops
        self._compiled = ops.below([_is_region(op.name) for op in ops.spans])
        self._recompute = ops.below([op.name.startswith(EVALUATION) for op in ops.spans])
        places = [at for at, op in enumerate(ops.spans) if _kind(op.name) or _part(op.name)]
        moments = ((ops.spans[at].thread, ops.spans[at].start) for at in places)
        chains = (module_names(chain) for chain in self.modules.around(moments))
        self.of = dict(zip(places, chains, strict=True))

    def draft(
        self,
        at: int,
        signature: _CallSignature,
        *,
        end: int,
        sequences: frozenset[int],
        compiled: bool | None = None,
    ) -> _ForwardCall:
        """Return the call that the op at index `at` makes.

        If `compiled` is given, it says whether the call is compiled. Otherwise, the call is compiled
        if the op lies in a compiled region.
        """
        op = self._ops.spans[at]
        return _ForwardCall(
            signature,
            compiled=self._compiled[at] if compiled is None else compiled,
            recompute=self._recompute[at],
            modules=self.of[at],
            thread=op.thread,
            start=op.start,
            end=end,
            sequences=sequences,
        )


def module_names(chain: Sequence[HostSpan]) -> tuple[str, ...]:
    """Return the names of the modules in a chain, such as `LlamaAttention_0`.

    Softmax and dropout modules at the inner end of the chain are left out.
    """
    names = [module.name.removeprefix(MODULE) for module in chain]
    while names and PASSED_THROUGH.fullmatch(names[-1]):
        names.pop()
    return tuple(names)


@dataclass(frozen=True, slots=True)
class _ForwardCall:
    """The forward of an attention call. Its backward has not been found yet."""

    signature: _CallSignature
    compiled: bool
    recompute: bool
    modules: tuple[str, ...]
    thread: int
    start: int
    end: int
    sequences: frozenset[int]


def find_calls(
    details: Sequence[HostSpan],
    evaluations: AutogradNodes,
    modules: Iterable[HostSpan],
    flows: Ints,
    ranges: Sequence[Range],
    threads: Sequence[tuple[int, int]],
    base: int,
) -> tuple[AttentionCalls, tuple[ProgramStep, ...]]:
    """Return the attention calls and the steps of a trace.

    `flows` contains rows of `Flow`. `threads` contains the (pid, tid) of each thread index. `base` is
    the number of nanoseconds to add to every time. The times of `ranges` already include `base`.
    """
    moments = np.array([(op.thread, op.start) for op in details], np.int64).reshape(-1, 2).T
    tree = SpanTree([*evaluations.around(*moments), *details])
    inside = _inside(tree)
    context = _Context(tree, modules)
    signatures: dict[tuple[Any, ...], _CallSignature] = {}
    drafts = [
        _fused(tree, root, children, context, signatures) for root, children in inside.items()
    ]
    drafts += _eager(tree, inside, context, signatures)
    drafts.sort(key=lambda draft: (draft.start, draft.thread))
    stretches = [
        (index, "recompute" if draft.recompute else "forward", draft.thread, draft.start, draft.end)
        for index, draft in enumerate(drafts)
    ]
    doubts = Counter[str]()
    stretches += _backward(drafts, tree, evaluations, flows, doubts)
    with_backward = {index for index, direction, *_ in stretches if direction == "backward"}
    last = max((*evaluations.rows.end.tolist(), *(op.end for op in details)), default=0)
    steps = _steps(ranges, _outermost(context.modules, evaluations), base, last)
    paths = _paths(drafts, ranges, threads, base)
    replay = cache(_replay)
    calls = []
    for index, draft in enumerate(drafts):
        signature = draft.signature
        backward, config, reason = replay(signature, index in with_backward)
        calls.append(
            AttentionCall(
                kind=signature.kind,
                op=signature.op,
                sdpa_op=signature.sdpa_op,
                compiled=draft.compiled,
                recompute=draft.recompute,
                backward=backward,
                modules=draft.modules,
                config=config,
                reason=reason,
                tensors=signature.tensors,
                path=paths[index],
                step=step_at(steps, draft.start + base),
                pid=threads[draft.thread][0],
                tid=threads[draft.thread][1],
                start_ns=draft.start + base,
                duration_ns=draft.end - draft.start,
            )
        )
    columns = np.array([stretch[2:] for stretch in stretches], np.int64).reshape(-1, 3).T
    spans = tuple(CallSpan(index, direction) for index, direction, *_ in stretches)
    texts = warnings(
        [draft.signature.unrecorded for draft in drafts], doubts, context.modules.overlaps()
    )
    return AttentionCalls(tuple(calls), spans, Intervals.build(*columns), warnings=texts), steps


@cache
def _kind(name: str) -> str | None:
    if BACKWARD.fullmatch(name) or name.startswith(EVALUATION):
        return None
    if name == OUTER:
        return "sdpa"
    if name in (LAYER, FAST):
        return "fast_path"
    rules = {"inner": INNER, "flex": FLEX, "custom": PACKAGES}
    return next((kind for kind, rule in rules.items() if rule.fullmatch(name)), None)


@cache
def _part(name: str) -> str | None:
    """Return `p` if the op is a matrix product, `s` if it is a softmax, and None otherwise."""
    return "p" if name in PRODUCTS else "s" if name in SOFTMAX else None


@cache
def _is_region(name: str) -> bool:
    return bool(REGION.fullmatch(name))


@cache
def _is_gradient(name: str) -> bool:
    return bool(GRADIENT.fullmatch(name))


def _roots(tree: SpanTree) -> list[bool]:
    """Return for each op whether it is the outermost op of an attention call.

    An op of an encoder layer counts only if the trace does not contain the attention op inside it.
    """
    kinds = [_kind(op.name) for op in tree.spans]
    split: set[int] = set()  # fast-path ops that contain the attention op itself
    if "fast_path" in kinds:
        for at, kind in enumerate(kinds):
            if kind not in (None, "fast_path") or tree.spans[at].name == FAST:
                split.update(above for above in tree.ancestors(at) if kinds[above] == "fast_path")
    own = [kind is not None and at not in split for at, kind in enumerate(kinds)]
    below = tree.below(own)
    return [mine and not covered for mine, covered in zip(own, below, strict=True)]


def _inside(tree: SpanTree) -> dict[int, list[int]]:
    """Return a dict that maps the index of each call's outermost op to the indices of the ops inside
    it.
    """
    is_root = _roots(tree)
    inside: dict[int, list[int]] = {at: [] for at, mine in enumerate(is_root) if mine}
    of: list[int] = []
    for at, above in enumerate(tree.above):
        root = -1 if above < 0 else above if is_root[above] else of[above]
        of.append(root)
        if root >= 0:
            inside[root].append(at)
    return inside


@dataclass(frozen=True, slots=True, eq=False)
class _CallSignature:
    """The properties that all calls with equal op arguments have in common.

    `unrecorded` says which part of the call the trace does not record, or is None.
    """

    kind: str
    op: str
    sdpa_op: str | None
    tensors: tuple[TensorArgument | None, ...]
    flags: dict[str, Any]
    unrecorded: str | None


def _fused(
    tree: SpanTree,
    root: int,
    inside: Sequence[int],
    context: _Context,
    signatures: dict[tuple[Any, ...], _CallSignature],
) -> _ForwardCall:
    ops = [tree.spans[at] for at in (root, *inside)]
    above = (tree.spans[at].name for at in tree.ancestors(root))
    layer = next((name for name in above if name in (LAYER, FAST)), None)
    key = (layer, *((op.name, op.arguments) for op in ops))
    if (signature := signatures.get(key)) is None:
        signature = signatures[key] = _fused_signature(ops, layer)
    return context.draft(
        root,
        signature,
        end=ops[0].end,
        sequences=frozenset(op.sequence for op in ops if op.sequence >= 0),
        compiled=_is_compiled_flex(ops[0].name),
    )


def _is_compiled_flex(name: str) -> bool | None:
    """Return whether Inductor compiled a flex_attention op.

    Return None if the name of the op does not tell.
    """
    if name.startswith(TRITON):
        return True
    return False if name == UNFUSED_FLEX else None


def _fused_signature(ops: Sequence[HostSpan], layer: str | None) -> _CallSignature:
    """Describe a call by its ops.

    `ops` starts with the outermost op. `layer` is the name of the encoder layer's op that encloses
    the ops, or None if there is no such op.
    """
    kind = _kind(ops[0].name) or "custom"
    # Autocast calls the outer op a second time, with tensors that it has cast. The attention is
    # computed with these tensors.
    outer = next((op for op in reversed(ops) if op.name == OUTER), None)
    inner = next((op for op in ops if INNER.fullmatch(op.name)), None)
    described = outer or inner or ops[0]
    names, places = POSITIONS.get(described.name, ("qkv", {}))
    tensors = tuple(tensor_argument(described, names.find(name)) for name in "qkvm")
    flags = {name: flag(described, place) for name, place in places.items()}
    if inner is not None:
        place = POSITIONS.get(inner.name, ("", {}))[1].get("backward")
        flags["backward"] = place is not None and flag(inner, place)
    unrecorded = doubt(described, names, places) if outer or inner else None
    if tensors[0] is None and (packed := next(filter(is_packed, ops), None)):
        tensors = tuple(tensor_argument(packed, place) if place < 3 else None for place in range(4))
        unrecorded = VARLEN
    if kind == "custom":
        unrecorded = (
            f"{described.name} is an op of a package; a config replays scaled_dot_product_attention"
        )
    elif kind == "flex":
        unrecorded = "the mask and the score function of flex_attention are not told"
    elif not described.arguments.dims:
        unrecorded = NO_SHAPES
    return _CallSignature(
        kind="fast_path" if layer else kind,
        op=layer or ops[0].name,
        sdpa_op=inner.name if inner else ops[0].name if kind in ("custom", "flex") else None,
        tensors=tensors,
        flags=flags,
        unrecorded=unrecorded,
    )


def _eager(
    tree: SpanTree,
    fused: dict[int, list[int]],
    context: _Context,
    signatures: dict[tuple[Any, ...], _CallSignature],
) -> Iterator[_ForwardCall]:
    """Yield the calls of eager attention, which consists of plain ops.

    The ops are a matrix product, a softmax and another matrix product, which follow each other in
    the same module of the same thread.
    """
    taken = {*fused, *(child for children in fused.values() for child in children)}
    waiting: dict[tuple[int, tuple[str, ...]], list[int]] = defaultdict(list)
    for at, op in enumerate(tree.spans):
        kind = _part(op.name)
        if kind is None or at in taken:
            continue
        names = [tree.spans[above].name for above in tree.ancestors(at)]
        if any(name in (LINEAR, *PRODUCTS, *SOFTMAX) or BACKWARD.fullmatch(name) for name in names):
            continue
        recent = waiting[op.thread, context.of[at]]
        recent.append(at)
        if (
            kind == "p"
            and len(recent) >= 3
            and (draft := _plain(tree, recent[-3:], context, signatures))
        ):
            recent.clear()
            yield draft


def _plain(
    tree: SpanTree,
    places: Sequence[int],
    context: _Context,
    signatures: dict[tuple[Any, ...], _CallSignature],
) -> _ForwardCall | None:
    scores, softmax, output = (tree.spans[at] for at in places)
    if scores.name not in PRODUCTS or softmax.name not in SOFTMAX:
        return None
    key = ("eager", scores.name, scores.arguments, output.arguments)
    if (signature := signatures.get(key)) is None:
        made = _eager_signature(scores, output)
        if made is None:
            return None
        signature = signatures[key] = made
    return context.draft(places[0], signature, end=output.end, sequences=frozenset())


def _eager_signature(scores: HostSpan, output: HostSpan) -> _CallSignature | None:
    """Describe eager attention by its two matrix products.

    Return None if the shapes of the products do not match.
    """
    query, keys = (tensor_argument(scores, place) for place in (0, 1))
    weights, value = (tensor_argument(output, place) for place in (0, 1))
    if not (query and keys and weights and value):
        return _CallSignature("eager", scores.name, None, (None,) * 4, {}, NO_SHAPES)
    if len(query.dims) < 3 or len(keys.dims) < 2 or query.dims[-1] != keys.dims[-2]:
        return None
    if weights.dims[-2:] != (query.dims[-2], keys.dims[-1]):
        return None
    key = TensorArgument((*keys.dims[:-2], keys.dims[-1], keys.dims[-2]), None, keys.dtype)
    tensors = (replace(query, strides=None), key, replace(value, strides=None), None)
    unrecorded = "eager attention; what it masks is not told"
    return _CallSignature("eager", scores.name, None, tensors, {}, unrecorded)


def _backward(
    drafts: Sequence[_ForwardCall],
    tree: SpanTree,
    evaluations: AutogradNodes,
    flows: Ints,
    doubts: Counter[str],
) -> Iterator[tuple[int, str, int, int, int]]:
    """Yield the time spans of the calls' backwards.

    The arrows that start in a call's ops lead to its backward. If the trace has no arrows, the
    forward and the backward are matched by autograd's sequence number. Compiled code has neither
    arrows nor sequence numbers. There, a gradient is assigned to the last call that has the same
    shapes and no backward yet.
    """
    gradients = _gradients(tree)
    around = (tree.spans[outer] for at, _ in gradients for outer in tree.ancestors(at))
    computing = {span[1:4] for span in around if span.name.startswith(EVALUATION)}
    arrived = _by_arrows(drafts, evaluations, flows)
    taken = {node[1:4] for nodes in arrived.values() for node in nodes}
    astray = not computing <= taken  # there is a gradient of attention to which no arrow leads
    for call, nodes in arrived.items():
        keys = {node[1:4] for node in nodes}
        if astray and is_fused(drafts[call].signature.sdpa_op) and not keys & computing:
            doubts[CONTRADICTED] += 1
            taken -= keys
            continue
        yield from (_stretch(call, node) for node in nodes)
    open_calls = [index for index, draft in enumerate(drafts) if not draft.recompute]
    begin = [draft.start for draft in drafts].__getitem__
    # Inductor's kernels that belong to a gradient and precede its template kernel
    parts: list[HostSpan] = []
    for at, op in gradients:
        if op.name.startswith(TRITON) and not op.name.startswith(TRITON_TEMPLATE):
            parts.append(op)
            continue
        above = [tree.spans[index] for index in tree.ancestors(at)]
        node = next((span for span in above if span.name.startswith(EVALUATION)), op)
        if node[1:4] in taken:
            continue
        sequences = {span.sequence for span in above if span.sequence >= 0}
        shapes = [
            sizes(op.arguments.dims, at)
            for at in ((0, 1) if op.name.startswith(TRITON) else (1, 2))
        ]
        matching = next(
            (
                at
                for at in reversed(range(bisect_left(open_calls, op.start, key=begin)))
                if (
                    bool(drafts[open_calls[at]].sequences & sequences)
                    if sequences and not len(flows)
                    else drafts[open_calls[at]].compiled
                    and shapes == _shapes(drafts[open_calls[at]])
                )
            ),
            None,
        )
        if matching is not None:
            call = open_calls.pop(matching)
            yield _stretch(call, op if drafts[call].compiled else node)
            own = [part for part in parts if part.thread == op.thread and part.start >= node.start]
            yield from (_stretch(call, part) for part in own)
        else:
            doubts[ORPHANS] += 1
        parts.clear()


def _by_arrows(
    drafts: Sequence[_ForwardCall], evaluations: AutogradNodes, flows: Ints
) -> dict[int, list[HostSpan]]:
    """Return for each call the autograd nodes to which the arrows from its ops lead.

    If arrows from several calls lead to the same node, the node belongs to the call whose arrow
    starts first.
    """
    forward = Intervals.build(
        *np.array([(d.thread, d.start, d.end) for d in drafts], np.int64).reshape(-1, 3).T
    )
    arrows = flows.T
    owners = forward.innermost(arrows[0], arrows[1])
    mine = np.flatnonzero(owners >= 0)
    nodes = evaluations.intervals.innermost(*arrows[2:, mine]).tolist()
    owner: dict[int, int] = {}
    for call, at in zip(forward.rows[owners[mine]].tolist(), nodes, strict=True):
        if at >= 0:
            owner.setdefault(at, call)
    found: dict[int, list[HostSpan]] = defaultdict(list)
    ops = evaluations.ops(np.array(list(owner), np.int64))
    for op, call in zip(ops, owner.values(), strict=True):
        found[call].append(op)
    return found


def _gradients(tree: SpanTree) -> list[tuple[int, HostSpan]]:
    """Return the outermost ops that compute a gradient of attention.

    Each op comes with its index. The ops are sorted by start.
    """
    own = [_is_gradient(op.name) for op in tree.spans]
    below = tree.below(own)
    found = [(at, op) for at, op in enumerate(tree.spans) if own[at] and not below[at]]
    return sorted(found, key=lambda item: int(item[1].start))


def _shapes(draft: _ForwardCall) -> list[tuple[int, ...]]:
    return [tensor.dims if tensor else () for tensor in draft.signature.tensors[:2]]


def _stretch(index: int, op: HostSpan) -> tuple[int, str, int, int, int]:
    return index, "backward", op.thread, op.start, op.end


def _paths(
    drafts: Sequence[_ForwardCall],
    ranges: Sequence[Range],
    threads: Sequence[tuple[int, int]],
    base: int,
) -> list[str | None]:
    """Return for each call the dotted module path in the name of the marker range around it.

    The path is None if there is no marker range around the call.
    """
    numbers = {thread: number for number, thread in enumerate(threads)}
    starts = ((row, row.start_ns - base) for row in ranges if row.name.startswith(MARKER))
    markers = SpanTree(
        HostSpan(row.name, start, start + row.duration_ns, numbers.get((row.pid, row.tid), -1))
        for row, start in starts
    )
    around = markers.around((draft.thread, draft.start) for draft in drafts)
    return [chain[-1].name.removeprefix(MARKER) if chain else None for chain in around]


def _replay(
    signature: _CallSignature, has_backward: bool
) -> tuple[bool, Config | None, str | None]:
    """Derive the config that replays a call.

    Return three values: whether the call has a backward pass; the config, or None if there is none;
    and a text. The text says why there is no config, or which properties of the call the config
    does not describe.
    """
    flags = dict(signature.flags)
    backward = bool(flags.pop("backward", False)) or has_backward
    config, reason, why = None, signature.unrecorded, None
    if signature.kind != "custom" and signature.tensors[0] and not is_unlike_sdpa(reason):
        try:
            config = replay_config(signature.tensors, backward=backward, **flags)
        except UsageError as error:
            why = str(error)
        if signature.kind in ("eager", "flex") and reason and why:  # report both reasons
            reason = f"{why}; {reason}"
        reason = reason or why
    elif reason is None:
        reason = "the trace does not tell the shapes of this call"
    return backward, config, reason


def _outermost(modules: SpanTree, evaluations: AutogradNodes) -> list[HostSpan]:
    """Return the calls of outermost modules, sorted by start.

    Calls during a backward pass are left out, because they repeat earlier calls.
    """
    spans = [span for span, above in zip(modules.spans, modules.above, strict=True) if above < 0]
    moments = np.array([(span.thread, span.start) for span in spans], np.int64).reshape(-1, 2).T
    around = evaluations.intervals.innermost(*moments).tolist()
    kept = (span for span, node in zip(spans, around, strict=True) if node < 0)
    return sorted(kept, key=lambda span: int(span.start))


def _steps(
    ranges: Sequence[Range], outermost: Sequence[HostSpan], base: int, last: int
) -> tuple[ProgramStep, ...]:
    """Return the steps of a program.

    The steps are the ProfilerStep ranges. If the trace has no such ranges, each step ends with an
    Optimizer.step range. If there are no such ranges either, a step lasts from one call of an
    outermost module to the next call. The last step then extends to the last op, because the
    backward pass runs after the call of the module.
    """
    numbered = [row for row in ranges if row.name.startswith("ProfilerStep#")]
    if numbered:
        rows = sorted(numbered, key=lambda row: row.start_ns)
        return tuple(ProgramStep(row.name, row.start_ns, row.duration_ns) for row in rows)
    ends = [row for row in ranges if row.name.startswith("Optimizer.step#")]
    if ends:
        first = min(row.start_ns for row in ranges)
        borders = [first, *(row.start_ns + row.duration_ns for row in ends)]
        return tuple(
            ProgramStep(row.name, begin, end - begin)
            for row, begin, end in zip(ends, borders, borders[1:], strict=False)
        )
    borders_behind = [*(int(span.start) for span in outermost[1:]), last]
    return tuple(
        ProgramStep(
            span.name.removeprefix(MODULE), span.start + base, max(span.end, end) - span.start
        )
        for span, end in zip(outermost, borders_behind, strict=False)
    )


def step_at(steps: Sequence[ProgramStep], t: int) -> int | None:
    """Return the index of the step that contains the time `t`, or None if no step contains it."""
    at = bisect_right(steps, t, key=lambda step: step.start_ns) - 1
    return at if at >= 0 and t < steps[at].start_ns + steps[at].duration_ns else None
