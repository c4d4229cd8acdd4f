"""Find the attention calls of a program among the ops of a trace.

For each call, this module determines the op that the program called, the op that computed the
attention, the tensors, the nn.Modules around the call, and the time spans of its forward and
backward passes.

Ops with equal arguments share one `OpArguments` object, so calls with the same arguments are
described only once.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from profharness.attention.config import Config
from profharness.errors import UsageError
from profharness.trace import AttentionCall, CallSpan, ProgramStep, Range, TensorArgument
from profharness.traces import ops as torch_ops
from profharness.traces.columns import Ints, nothing
from profharness.traces.intervals import AutogradNodes, Intervals, SpanTree
from profharness.traces.ops import (
    EVALUATION,
    FAST,
    INNER,
    LAYER,
    MODULE,
    OUTER,
    PRODUCTS,
    SOFTMAX,
    TRITON,
    HostSpan,
    flag,
    tensor_argument,
)
from profharness.traces.steps import Moments, find_steps, outermost, step_at

# Names of modules such as `Dropout_0`. A call inside such a module is assigned to its parent
# module.
PASSED_THROUGH = re.compile(r"(?:Softmax|Dropout)\w*_\d+")
MARKER = "profharness-attention:"  # prefix of range names; a module's dotted path follows

_Stretch = tuple[int, str, int, int, int]
"""One span of a call: the index of the call, the direction, the thread, the start and the end."""


@dataclass(frozen=True, slots=True)
class AttentionCalls:
    """The attention calls of a trace, and the time spans of their forward and backward passes."""

    calls: tuple[AttentionCall, ...]  # sorted by start
    spans: tuple[CallSpan, ...]
    intervals: Intervals  # thread, start and stop of each span
    # Kernels that a CUDA graph launched lie in no interval. `rows` contains the numbers of these
    # launches in ascending order, and `row_spans` the index of each launch's span.
    rows: Ints = field(default_factory=lambda: nothing(0))
    row_spans: Ints = field(default_factory=lambda: nothing(0))
    warnings: tuple[str, ...] = ()  # describe contradictions in the trace, with counts

    def lookup(self, thread: Ints, t: Ints, first: int | None = None) -> Ints:
        """Return the index of the innermost span at each (thread, t), or -1 if there is no span.

        For consecutive launches of the trace, `first` is the number of the first launch.
        """
        rows = np.append(self.intervals.rows, -1)
        spans = rows[self.intervals.innermost(thread, t)]
        if first is not None and len(self.rows):
            low, high = np.searchsorted(self.rows, [first, first + len(t)])
            spans[self.rows[low:high] - first] = self.row_spans[low:high]
        return spans


@dataclass(frozen=True, slots=True, eq=False)
class _Signature:
    """The properties that all calls with equal op arguments have in common."""

    kind: str
    op: str
    sdpa_op: str | None
    tensors: tuple[TensorArgument | None, ...]
    flags: dict[str, Any]
    unrecorded: str | None  # describes which property the trace does not record


@dataclass(frozen=True, slots=True)
class _ForwardCall:
    signature: _Signature
    compiled: bool
    recompute: bool
    modules: tuple[str, ...]
    thread: int
    start: int
    end: int
    sequences: frozenset[int]  # autograd's sequence numbers of the ops


def find_calls(
    details: Sequence[HostSpan],
    evaluations: AutogradNodes,
    modules: Iterable[HostSpan],
    flows: Ints,
    ranges: Sequence[Range],
    threads: Sequence[tuple[int, int]],
    base: int,
    work: Moments,
) -> tuple[AttentionCalls, tuple[ProgramStep, ...]]:
    """Return the attention calls and the steps of a trace.

    `Attribution` describes `flows`, `threads` and `base`. The times of `ranges` include `base`.
    `find_steps` describes `work`.
    """
    moments = np.array([(op.thread, op.start) for op in details], np.int64).reshape(-1, 2).T
    tree = SpanTree([*evaluations.around(*moments), *details])
    module_tree = SpanTree(modules)
    drafts = _Forward(tree, module_tree).calls()
    stretches: list[_Stretch] = [
        (index, "recompute" if draft.recompute else "forward", draft.thread, draft.start, draft.end)
        for index, draft in enumerate(drafts)
    ]
    doubts = Counter[str]()
    stretches += _backward(drafts, tree, evaluations, flows, doubts)
    with_backward = {index for index, direction, *_ in stretches if direction == "backward"}
    last = max((evaluations.last, *(op.end for op in details)))
    starts = [draft.start for draft in drafts if not draft.recompute]
    around = outermost(module_tree, evaluations)
    steps = find_steps(ranges, around, starts, work, threads=threads, base=base, last=last)
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
    reasons = [draft.signature.unrecorded for draft in drafts]
    texts = torch_ops.warnings(reasons, doubts, module_tree.overlaps())
    return AttentionCalls(tuple(calls), spans, Intervals(*columns), warnings=texts), steps


def module_names(chain: Sequence[HostSpan]) -> tuple[str, ...]:
    """Return the names of the modules in a chain, such as `LlamaAttention_0`, outermost first.

    Softmax and dropout modules at the inner end of the chain are left out.
    """
    found = [module.name.removeprefix(MODULE) for module in chain]
    while found and PASSED_THROUGH.fullmatch(found[-1]):
        found.pop()
    return tuple(found)


@cache
def _kind(name: str) -> str | None:
    if torch_ops.BACKWARD.fullmatch(name) or name.startswith(EVALUATION):
        return None
    if name == OUTER:
        return "sdpa"
    if name in (LAYER, FAST):
        return "fast_path"
    rules = {"inner": INNER, "flex": torch_ops.FLEX, "custom": torch_ops.PACKAGES}
    return next((kind for kind, rule in rules.items() if rule.fullmatch(name)), None)


@cache
def _matches(rule: re.Pattern[str], name: str) -> bool:
    return bool(rule.fullmatch(name))


class _Forward:
    """Finds the forward passes of attention calls. Ops are identified by indices into `tree`."""

    def __init__(self, tree: SpanTree, modules: SpanTree) -> None:
        self._tree, self._ops = tree, tree.spans
        self._compiled = tree.below([_matches(torch_ops.REGION, op.name) for op in self._ops])
        self._recompute = tree.below([op.name.startswith(EVALUATION) for op in self._ops])
        parts = (*PRODUCTS, *SOFTMAX)
        places = [at for at, op in enumerate(self._ops) if op.name in parts or _kind(op.name)]
        around = modules.around((self._ops[at].thread, self._ops[at].start) for at in places)
        self._modules = dict(zip(places, map(module_names, around), strict=True))
        self._signatures: dict[tuple[Any, ...], _Signature | None] = {}

    def calls(self) -> list[_ForwardCall]:
        is_root = self._roots()
        inside: dict[int, list[int]] = {at: [] for at, mine in enumerate(is_root) if mine}
        roots: list[int] = []
        for at, above in enumerate(self._tree.above):
            root = -1 if above < 0 else above if is_root[above] else roots[above]
            roots.append(root)
            if root >= 0:
                inside[root].append(at)
        found = [self._fused(root, children) for root, children in inside.items()]
        found += self._eager({*inside, *(at for at, root in enumerate(roots) if root >= 0)})
        return sorted(found, key=lambda call: (call.start, call.thread))

    def _roots(self) -> list[bool]:
        """Return for each op whether it is the outermost op of an attention call."""
        kinds = [_kind(op.name) for op in self._ops]
        # The op of an encoder layer is a call only if the trace contains no attention op inside it
        split: set[int] = set()
        if "fast_path" in kinds:
            for at, kind in enumerate(kinds):
                if kind not in (None, "fast_path") or self._ops[at].name == FAST:
                    above = self._tree.ancestors(at)
                    split.update(outer for outer in above if kinds[outer] == "fast_path")
        own = [kind is not None and at not in split for at, kind in enumerate(kinds)]
        below = self._tree.below(own)
        return [mine and not covered for mine, covered in zip(own, below, strict=True)]

    def _call(self, at: int, signature: _Signature, end: int, **more: Any) -> _ForwardCall:
        op = self._ops[at]
        given = {"compiled": self._compiled[at], "sequences": frozenset[int](), **more}
        return _ForwardCall(
            signature,
            recompute=self._recompute[at],
            modules=self._modules[at],
            thread=op.thread,
            start=op.start,
            end=end,
            **given,
        )

    def _fused(self, root: int, inside: Sequence[int]) -> _ForwardCall:
        ops = [self._ops[at] for at in (root, *inside)]
        above = (self._ops[at].name for at in self._tree.ancestors(root))
        layer = next((name for name in above if name in (LAYER, FAST)), None)
        key = (layer, *((op.name, op.arguments) for op in ops))
        if (signature := self._signatures.get(key)) is None:
            signature = self._signatures[key] = _fused_signature(ops, layer)
        sequences = frozenset(op.sequence for op in ops if op.sequence >= 0)
        # The names of some flex_attention ops show whether Inductor compiled them
        if ops[0].name.startswith(TRITON) or ops[0].name == torch_ops.UNFUSED_FLEX:
            compiled = ops[0].name != torch_ops.UNFUSED_FLEX
            return self._call(root, signature, ops[0].end, sequences=sequences, compiled=compiled)
        return self._call(root, signature, ops[0].end, sequences=sequences)

    def _eager(self, taken: set[int]) -> Iterator[_ForwardCall]:
        """Yield the calls of eager attention.

        Such a call consists of a matrix product, a softmax and a matrix product in the same module.
        """
        parts = (*PRODUCTS, *SOFTMAX)
        waiting: dict[tuple[int, tuple[str, ...]], list[int]] = defaultdict(list)
        for at, op in enumerate(self._ops):
            if op.name not in parts or at in taken:
                continue
            above = [self._ops[outer].name for outer in self._tree.ancestors(at)]
            if any(
                n in (torch_ops.LINEAR, *parts) or torch_ops.BACKWARD.fullmatch(n) for n in above
            ):
                continue
            recent = waiting[op.thread, self._modules[at]]
            recent.append(at)
            if op.name not in PRODUCTS or len(recent) < 3:
                continue
            scores, softmax = (self._ops[part] for part in recent[-3:-1])
            if scores.name not in PRODUCTS or softmax.name not in SOFTMAX:
                continue
            key = ("eager", scores.name, scores.arguments, op.arguments)
            if key not in self._signatures:
                self._signatures[key] = _eager_signature(scores, op)
            if (signature := self._signatures[key]) is not None:
                yield self._call(recent[-3], signature, op.end)
                recent.clear()


def _fused_signature(ops: Sequence[HostSpan], layer: str | None) -> _Signature:
    """Return the signature of a call.

    `ops` are the ops of the call, outermost first. `layer` is the encoder layer's op around the
    call.
    """
    kind = _kind(ops[0].name) or "custom"
    # Under autocast, the outer op calls itself again with cast tensors, which are used to compute
    # the attention. So the last outer op describes the call.
    outer = next((op for op in reversed(ops) if op.name == OUTER), None)
    inner = next((op for op in ops if INNER.fullmatch(op.name)), None)
    described = outer or inner or ops[0]
    letters, places = torch_ops.argument_positions(described.name)
    tensors = tuple(tensor_argument(described, letters.find(letter)) for letter in "qkvm")
    flags = {name: flag(described, place) for name, place in places.items()}
    if inner is not None:
        place = torch_ops.POSITIONS.get(inner.name, ("", {}))[1].get("backward")
        flags["backward"] = place is not None and flag(inner, place)
    unrecorded = torch_ops.doubt(described, letters, places) if outer or inner else None
    packed = (op for op in ops if torch_ops.sizes(op.arguments.dims, torch_ops.CUMULATED))
    if tensors[0] is None and (first := next(packed, None)):
        tensors = (*(tensor_argument(first, place) for place in range(3)), None)
        unrecorded = torch_ops.VARLEN
    if kind == "custom":
        unrecorded = (
            f"{described.name} belongs to another package, so its arguments are not read; to "
            "compare backends for a config that you write by hand, use: profharness bench "
            "2,8,512,64"
        )
    elif kind == "flex":
        unrecorded = "the trace does not record the mask or the score function of flex_attention"
    elif not described.arguments.dims:
        unrecorded = torch_ops.NO_SHAPES
    return _Signature(
        kind="fast_path" if layer else kind,
        op=layer or ops[0].name,
        sdpa_op=inner.name if inner else ops[0].name if kind in ("custom", "flex") else None,
        tensors=tensors,
        flags=flags,
        unrecorded=unrecorded,
    )


def _eager_signature(scores: HostSpan, output: HostSpan) -> _Signature | None:
    """Return the signature of eager attention, or None if the shapes of its matrix products do not
    match.
    """
    query, keys = (tensor_argument(scores, place) for place in (0, 1))
    weights, value = (tensor_argument(output, place) for place in (0, 1))
    if not (query and keys and weights and value):
        return _Signature("eager", scores.name, None, (None,) * 4, {}, torch_ops.NO_SHAPES)
    if len(query.dims) < 3 or len(keys.dims) < 2 or query.dims[-1] != keys.dims[-2]:
        return None
    if weights.dims[-2:] != (query.dims[-2], keys.dims[-1]):
        return None
    key = TensorArgument((*keys.dims[:-2], keys.dims[-1], keys.dims[-2]), None, keys.dtype)
    tensors = (replace(query, strides=None), key, replace(value, strides=None), None)
    unrecorded = "the mask of eager attention is unknown"
    return _Signature("eager", scores.name, None, tensors, {}, unrecorded)


def _backward(
    drafts: Sequence[_ForwardCall],
    tree: SpanTree,
    evaluations: AutogradNodes,
    flows: Ints,
    doubts: Counter[str],
) -> Iterator[_Stretch]:
    """Yield the time spans of the backward pass of each call.

    The arrows that start in the ops of a call lead to its backward pass. If the trace has no
    arrows, forward and backward ops are matched by autograd's sequence numbers. Compiled code has
    neither arrows nor sequence numbers, so a gradient in compiled code is assigned to the last call
    that has the same shapes and no backward pass yet.
    """
    gradients = _gradients(tree)
    around = (tree.spans[outer] for at, _ in gradients for outer in tree.ancestors(at))
    computing = {span[1:4] for span in around if span.name.startswith(EVALUATION)}
    arrived = _by_arrows(drafts, evaluations, flows)
    taken = {node[1:4] for nodes in arrived.values() for node in nodes}
    astray = not computing <= taken  # whether some gradient of attention has no arrow
    for call, nodes in arrived.items():
        keys = {node[1:4] for node in nodes}
        # The backward of a fused op is a single op
        forward = drafts[call].signature.sdpa_op or ""
        is_fused = bool(INNER.fullmatch(forward)) and "math" not in forward
        if astray and is_fused and not keys & computing:
            doubts[torch_ops.CONTRADICTED] += 1
            taken -= keys
            continue
        yield from (_stretch(call, node) for node in nodes)
    open_calls = [index for index, draft in enumerate(drafts) if not draft.recompute]
    begin = [draft.start for draft in drafts].__getitem__
    # Inductor's kernels that belong to a gradient and precede its template kernel
    parts: list[HostSpan] = []
    for at, op in gradients:
        compiled = op.name.startswith(TRITON)
        if compiled and not op.name.startswith(torch_ops.TRITON_TEMPLATE):
            parts.append(op)
            continue
        above = [tree.spans[index] for index in tree.ancestors(at)]
        node = next((span for span in above if span.name.startswith(EVALUATION)), op)
        if node[1:4] in taken:
            continue
        sequences = {span.sequence for span in above if span.sequence >= 0}
        shapes = [torch_ops.sizes(op.arguments.dims, at + (not compiled)) for at in (0, 1)]
        for place in reversed(range(bisect_left(open_calls, op.start, key=begin))):
            draft = drafts[open_calls[place]]
            if sequences and not len(flows):
                fits = bool(draft.sequences & sequences)
            else:
                dims = [tensor.dims if tensor else () for tensor in draft.signature.tensors[:2]]
                fits = draft.compiled and shapes == dims
            if fits:
                call = open_calls.pop(place)
                yield _stretch(call, op if draft.compiled else node)
                for part in parts:
                    if part.thread == op.thread and part.start >= node.start:
                        yield _stretch(call, part)
                break
        else:
            doubts[torch_ops.ORPHANS] += 1
        parts.clear()


def _stretch(index: int, op: HostSpan) -> _Stretch:
    return index, "backward", op.thread, op.start, op.end


def _by_arrows(
    drafts: Sequence[_ForwardCall], evaluations: AutogradNodes, flows: Ints
) -> dict[int, list[HostSpan]]:
    """Return the autograd nodes to which arrows from the ops of each call lead.

    If arrows of several calls lead to a node, the node belongs to the call whose arrow starts
    first.
    """
    spans = [(draft.thread, draft.start, draft.end) for draft in drafts]
    forward = Intervals(*np.array(spans, np.int64).reshape(-1, 3).T)
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
    """Return the index and the op of each outermost op that computes a gradient of attention.

    The result is sorted by start.
    """
    own = [_matches(torch_ops.GRADIENT, op.name) for op in tree.spans]
    below = tree.below(own)
    found = [(at, op) for at, op in enumerate(tree.spans) if own[at] and not below[at]]
    return sorted(found, key=lambda item: int(item[1].start))


def _paths(
    drafts: Sequence[_ForwardCall],
    ranges: Sequence[Range],
    threads: Sequence[tuple[int, int]],
    base: int,
) -> list[str | None]:
    """Return the module path of each call, from the name of the marker range around it, or None."""
    numbers = {thread: number for number, thread in enumerate(threads)}
    starts = ((row, row.start_ns - base) for row in ranges if row.name.startswith(MARKER))
    markers = SpanTree(
        HostSpan(row.name, start, start + row.duration_ns, numbers.get((row.pid, row.tid), -1))
        for row, start in starts
    )
    around = markers.around((draft.thread, draft.start) for draft in drafts)
    return [chain[-1].name.removeprefix(MARKER) if chain else None for chain in around]


def _replay(signature: _Signature, has_backward: bool) -> tuple[bool, Config | None, str | None]:
    """Return whether a call has a backward pass, the config that replays the call, and a reason.

    If no config describes the call, the config is None and the reason explains why. Otherwise, the
    reason names properties of the call that the config does not describe, or is None.
    """
    flags = dict(signature.flags)
    backward = bool(flags.pop("backward", False)) or has_backward
    config, reason, why = None, signature.unrecorded, None
    by_itself = torch_ops.BY_ITSELF.format(op="")
    # The arguments of such calls do not have the form that scaled_dot_product_attention expects
    is_unlike = reason == torch_ops.VARLEN or bool(reason and reason.endswith(by_itself))
    if signature.kind != "custom" and signature.tensors[0] and not is_unlike:
        try:
            config = torch_ops.replay_config(signature.tensors, backward=backward, **flags)
        except UsageError as error:
            why = str(error)
        if signature.kind in ("eager", "flex") and reason and why:  # report both reasons
            reason = f"{why}; {reason}"
        reason = reason or why
    elif reason is None:
        reason = "the trace does not show the shapes of this call"
    return backward, config, reason
