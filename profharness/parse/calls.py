"""Attention calls of a program, from the ops that a trace recorded: which op was asked for, which one
computed it, with what tensors, in which modules, and where its forward and backward ran.

Op names and positions are those of PyTorch's native_functions.yaml, 2.5 to 2.13.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from profharness.config import DTYPES as CONFIG_DTYPES
from profharness.config import Config, parse_config
from profharness.errors import UsageError
from profharness.parse.columns import Ints
from profharness.parse.join import Intervals
from profharness.trace import AttentionCall, CallSpan, Range, Step, TensorArgument

OUTER = "aten::scaled_dot_product_attention"
LAYER, FAST = "aten::_transformer_encoder_layer_fwd", "aten::_native_multi_head_attention"
INNER = re.compile(
    r"aten::_scaled_dot_product_(?:flash|efficient|cudnn|fused|attention_math)\w*"
    r"|aten::_(?:flash|efficient|cudnn)_attention_forward"
)
FLEX = re.compile(r"triton_\w*flex_attention\w*|flex_attention\w*")
PACKAGES = re.compile(
    r"FlashAttn\w*Func|flash_attn\w*::\w+|(?:xformers\w*|_?vllm\w*|sglang|sgl_kernel|flashinfer"
    r"|sageattention|aiter|transformer_engine\w*)::\w*(?:attention|attn|fmha|flash|mha|mla)\w*"
)
BACKWARD = re.compile(r"(?i)\S*(?:backward|bwd)\w*")
PRODUCTS = ("aten::matmul", "aten::bmm", "aten::baddbmm", "aten::einsum")
SOFTMAX = ("aten::softmax", "aten::_softmax", "aten::_safe_softmax")
LINEAR = "aten::linear"  # its products are no attention's
EVALUATION = "autograd::engine::evaluate_function: "
REGION = re.compile(r"Torch-Compiled Region.*|CompiledFunction\w*|## Call CompiledFxGraph .*")
GRADIENT = re.compile(r"aten::\w*attention\w*backward\w*")
MODULE = "nn.Module: "
PASSED_THROUGH = re.compile(r"(?:Softmax|Dropout)\w*_\d+")  # they belong to their parent's attention
MARKER = "profharness-attention:"  # a range with a module's dotted path
NAMES = {"c10::Half": "fp16", "c10::BFloat16": "bf16", "float": "fp32", "double": "fp64"}
NO_SHAPES = "the trace has no shapes; record it with record_shapes=True"
SCALE_DIGITS = 1e-4  # a trace tells a scale with six digits

# Where each op has query, key, value and mask, and its flags, by position.
_INNER = "_scaled_dot_product_"
POSITIONS: dict[str, tuple[str, dict[str, int]]] = {
    OUTER: ("qkvm", {"dropout": 4, "causal": 5, "scale": 6, "gqa": 7}),
    f"aten::{_INNER}flash_attention": ("qkv", {"dropout": 3, "causal": 4, "scale": 6}),
    f"aten::{_INNER}flash_attention_for_cpu": ("qkv  m", {"dropout": 3, "causal": 4, "scale": 6}),
    f"aten::{_INNER}efficient_attention": (
        "qkvm", {"backward": 4, "dropout": 5, "causal": 6, "scale": 7}),
    f"aten::{_INNER}cudnn_attention": (
        "qkvm", {"backward": 4, "dropout": 5, "causal": 6, "scale": 8}),
    f"aten::{_INNER}attention_math": ("qkvm", {"dropout": 4, "causal": 5, "scale": 7, "gqa": 8}),
}  # fmt: skip


@cache
def is_detailed(name: str) -> bool:
    """Whether an op is kept on its own, beside the columns of all ops."""
    return name.startswith(EVALUATION) or has_arguments(name) or bool(REGION.fullmatch(name))


@cache
def has_arguments(name: str) -> bool:
    """Whether an op's arguments are kept."""
    if name in (OUTER, LAYER, FAST, LINEAR, *PRODUCTS, *SOFTMAX):
        return True
    return any(rule.fullmatch(name) for rule in (INNER, FLEX, PACKAGES, GRADIENT))


class Detail(NamedTuple):
    """An op that is kept on its own. Times are ns, thread an index, sequence autograd's number."""

    name: str
    start: int
    end: int
    thread: int
    dims: Sequence[Any] = ()
    strides: Sequence[Any] = ()
    types: Sequence[Any] = ()
    values: Sequence[Any] = ()
    sequence: int = -1


class Flow(NamedTuple):
    """An arrow from a moment of a forward op to one of its backward op."""

    thread: int
    start: int
    to_thread: int
    end: int


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls in order of their start, their stretches, and where those lie: thread, start, stop."""

    calls: tuple[AttentionCall, ...]
    spans: tuple[CallSpan, ...]
    intervals: Intervals

    def lookup(self, thread: Ints, t: Ints) -> Ints:
        """For each (thread, t) the index of the span, -1 for none."""
        rows = np.append(self.intervals.rows, -1)
        return rows[self.intervals.innermost(thread, t)]


class Tree:
    """Spans of threads in order of (thread, start, longest first), and what encloses what."""

    def __init__(self, spans: Iterable[Any]) -> None:
        given = list(spans)
        columns = ([getattr(span, name) for span in given] for name in ("thread", "start", "end"))
        self.intervals = Intervals.build(*(np.array(column, np.int64) for column in columns))
        self.spans = [given[row] for row in self.intervals.rows.tolist()]
        self.above = self.intervals.enclosing().tolist()

    def ancestors(self, at: int) -> Iterator[int]:
        """What encloses a span, innermost first."""
        while (at := self.above[at]) >= 0:
            yield at

    def around(self, thread: int, t: int) -> list[Any]:
        """The spans open at a moment of a thread, outermost first."""
        at = int(self.intervals.innermost(np.array([thread]), np.array([t]))[0])
        return [self.spans[index] for index in self.intervals.chain(at, t)]


@dataclass(frozen=True, slots=True)
class _Draft:
    """A call before its backward is known."""

    kind: str
    op: str
    sdpa_op: str | None
    compiled: bool
    recompute: bool
    modules: tuple[str, ...]
    tensors: tuple[TensorArgument | None, ...]
    flags: dict[str, Any]
    unsaid: str | None  # what a config does not say of it
    thread: int
    start: int
    end: int
    sequences: frozenset[int]


def find_calls(
    details: Iterable[Detail],
    flows: Iterable[Flow],
    modules: Iterable[Detail],
    ranges: Sequence[Range],
    threads: Sequence[tuple[int, int]],
    base: int,
) -> tuple[Calls, tuple[Step, ...]]:
    """The attention calls of a trace, and its steps.

    threads: (pid, tid) by thread index; base: ns to add to every time that is given here, which the
    ranges have already.
    """
    tree, around = Tree(details), Tree(modules)
    roots = list(_roots(tree))
    inside: dict[int, list[int]] = {root: [] for root in roots}
    for at in range(len(tree.spans)):
        root = next((above for above in tree.ancestors(at) if above in inside), None)
        if root is not None:
            inside[root].append(at)
    drafts = [_fused(tree, root, children, around) for root, children in inside.items()]
    drafts += _eager(tree, inside, around)
    drafts.sort(key=lambda draft: (draft.start, draft.thread))
    stretches = [
        (index, "recompute" if draft.recompute else "forward", draft.thread, draft.start, draft.end)
        for index, draft in enumerate(drafts)
    ]
    stretches += _backward(drafts, tree, list(flows))
    with_backward = {index for index, direction, *_ in stretches if direction == "backward"}
    steps = _steps(ranges, around, base)
    calls = tuple(
        _call(draft, index in with_backward, threads[draft.thread], base, steps, ranges)
        for index, draft in enumerate(drafts)
    )
    columns = np.array([stretch[2:] for stretch in stretches], np.int64).reshape(-1, 3).T
    spans = tuple(CallSpan(index, direction) for index, direction, *_ in stretches)
    return Calls(calls, spans, Intervals.build(*columns)), steps


def _kind(name: str) -> str | None:
    if BACKWARD.fullmatch(name) or name.startswith(EVALUATION):
        return None
    if name == OUTER:
        return "sdpa"
    if name in (LAYER, FAST):
        return "fast_path"
    rules = {"inner": INNER, "flex": FLEX, "custom": PACKAGES}
    return next((kind for kind, rule in rules.items() if rule.fullmatch(name)), None)


def _roots(tree: Tree) -> Iterator[int]:
    """The op of each call: the outermost one, but below an encoder layer's op the attention in it
    rather than the layer, where the trace tells them apart.
    """
    kinds = [_kind(op.name) for op in tree.spans]
    split = set()  # fast-path ops with something more exact inside
    for at, kind in enumerate(kinds):
        if kind not in (None, "fast_path") or tree.spans[at].name == FAST:
            split.update(above for above in tree.ancestors(at) if kinds[above] == "fast_path")
    for at, kind in enumerate(kinds):
        if kind and at not in split:
            above = {kinds[above] for above in tree.ancestors(at) if above not in split}
            if above <= {None}:
                yield at


def _context(tree: Tree, at: int, modules: Tree) -> dict[str, Any]:
    """What surrounds a call: compiled code, a backward, modules."""
    names = [tree.spans[above].name for above in tree.ancestors(at)]
    op = tree.spans[at]
    chain = [module.name.removeprefix(MODULE) for module in modules.around(op.thread, op.start)]
    while chain and PASSED_THROUGH.fullmatch(chain[-1]):
        chain.pop()
    return {
        "compiled": any(map(REGION.fullmatch, names)),
        "recompute": any(name.startswith(EVALUATION) for name in names),
        "modules": tuple(chain),
        "thread": op.thread,
        "start": op.start,
    }


def _fused(tree: Tree, root: int, inside: Sequence[int], modules: Tree) -> _Draft:
    ops = [tree.spans[at] for at in (root, *inside)]
    kind = _kind(ops[0].name) or "custom"
    above = [tree.spans[at].name for at in tree.ancestors(root)]
    # Autocast calls the outer op again with cast tensors: those were computed with.
    outer = next((op for op in reversed(ops) if op.name == OUTER), None)
    inner = next((op for op in ops if INNER.fullmatch(op.name)), None)
    told = outer or inner or ops[0]
    names, places = POSITIONS.get(told.name, ("qkv", {}))
    tensors = tuple(_tensor(told, names.find(name)) for name in "qkvm")
    flags = {name: _flag(told, place) for name, place in places.items()}
    if inner is not None:
        place = POSITIONS.get(inner.name, ("", {}))[1].get("backward")
        flags["backward"] = place is not None and _flag(inner, place)
    layer = next((name for name in above if name in (LAYER, FAST)), None)
    unsaid = None
    if tensors[0] is None and (packed := next((op for op in ops if _sizes(op.dims, 0)), None)):
        tensors = tuple(_tensor(packed, place) if place < 3 else None for place in range(4))
        unsaid = "sequences of unequal length in one tensor (varlen), which no config says"
    if kind == "custom":
        unsaid = f"{told.name} is an op of a package; a config replays scaled_dot_product_attention"
    elif kind == "flex":
        unsaid = "the mask and the score function of flex_attention are not told"
    elif not told.dims:
        unsaid = NO_SHAPES
    context = _context(tree, root, modules)
    if kind == "flex":
        context["compiled"] = context["compiled"] or ops[0].name.startswith("triton")
    return _Draft(
        kind="fast_path" if layer else kind,
        op=layer or ops[0].name,
        sdpa_op=inner.name if inner else ops[0].name if kind in ("custom", "flex") else None,
        tensors=tensors,
        flags=flags,
        unsaid=unsaid,
        end=ops[0].end,
        sequences=frozenset(op.sequence for op in ops if op.sequence >= 0),
        **context,
    )


def _tensor(op: Detail, place: int) -> TensorArgument | None:
    dims = _sizes(op.dims, place)
    if not dims:
        return None
    strides = _sizes(op.strides, place)
    kind = op.types[place] if place < len(op.types) else None
    return TensorArgument(
        dims,
        strides if len(strides) == len(dims) else None,
        NAMES.get(kind, kind) if isinstance(kind, str) and kind else None,
    )


def _sizes(lists: Sequence[Any], place: int) -> tuple[int, ...]:
    """The numbers of one argument; empty where it has none."""
    given = lists[place] if 0 <= place < len(lists) else None
    if not isinstance(given, list | tuple):
        return ()
    whole = all(type(item) is int and 0 <= item < 1 << 62 for item in given)
    return tuple(given) if whole else ()


def _flag(op: Detail, place: int) -> Any:
    """A flag or a number; None where it is None or not told."""
    text = op.values[place] if place < len(op.values) else ""
    if text in ("True", "False"):
        return text == "True"
    try:
        return float(text) if isinstance(text, str) and text else None
    except ValueError:
        return None


def _eager(tree: Tree, fused: dict[int, list[int]], modules: Tree) -> Iterator[_Draft]:
    """Attention in plain ops: a product, a softmax over its result and a product with that, next to
    each other in one module of one thread.
    """
    taken = {*fused, *(child for children in fused.values() for child in children)}
    waiting: dict[tuple[int, tuple[str, ...]], list[int]] = defaultdict(list)
    for at, op in enumerate(tree.spans):
        kind = "p" if op.name in PRODUCTS else "s" if op.name in SOFTMAX else None
        if kind is None or at in taken:
            continue
        names = [tree.spans[above].name for above in tree.ancestors(at)]
        if any(name in (LINEAR, *PRODUCTS, *SOFTMAX) or BACKWARD.fullmatch(name) for name in names):
            continue
        chain = _context(tree, at, modules)["modules"]
        recent = waiting[op.thread, chain]
        recent.append(at)
        if kind == "p" and len(recent) >= 3 and (draft := _plain(tree, recent[-3:], modules)):
            waiting[op.thread, chain] = []
            yield draft


def _plain(tree: Tree, places: Sequence[int], modules: Tree) -> _Draft | None:
    scores, softmax, output = (tree.spans[at] for at in places)
    if scores.name not in PRODUCTS or softmax.name not in SOFTMAX:
        return None
    query, keys = (_tensor(scores, place) for place in (0, 1))
    weights, value = (_tensor(output, place) for place in (0, 1))
    tensors: tuple[TensorArgument | None, ...] = (None,) * 4
    unsaid: str | None = NO_SHAPES
    if query and keys and weights and value:
        if query.dims[-1] != keys.dims[-2:-1][0] if len(keys.dims) > 1 else True:
            return None
        if weights.dims[-2:] != (query.dims[-2], keys.dims[-1]) or len(query.dims) < 3:
            return None
        key = TensorArgument((*keys.dims[:-2], keys.dims[-1], keys.dims[-2]), None, keys.dtype)
        tensors = (replace(query, strides=None), key, replace(value, strides=None), None)
        unsaid = "eager attention; what it masks is not told"
    return _Draft(
        kind="eager",
        op=scores.name,
        sdpa_op=None,
        tensors=tensors,
        flags={},
        unsaid=unsaid,
        end=output.end,
        sequences=frozenset(),
        **_context(tree, places[0], modules),
    )


def _backward(
    drafts: Sequence[_Draft], tree: Tree, flows: Sequence[Flow]
) -> Iterator[tuple[int, str, int, int, int]]:
    """The stretches of the calls' backwards: where the arrows from a call's ops lead; without arrows
    by autograd's sequence numbers; in compiled code, which has neither, by shape from the end.
    """
    evaluations = Tree(op for op in tree.spans if op.name.startswith(EVALUATION))
    forward = Intervals.build(
        *np.array([(d.thread, d.start, d.end) for d in drafts], np.int64).reshape(-1, 3).T
    )
    taken = set()
    arrows = np.array(flows, np.int64).reshape(-1, 4).T
    owners = forward.innermost(arrows[0], arrows[1])
    for owner, flow in zip(owners.tolist(), flows, strict=True):
        around = evaluations.around(flow.to_thread, flow.end) if owner >= 0 else []
        if around and (key := around[-1][1:4]) not in taken:
            taken.add(key)
            yield _stretch(int(forward.rows[owner]), around[-1])
    open_calls = [index for index, draft in enumerate(drafts) if not draft.recompute]
    gradients = [
        (at, op) for at, op in enumerate(tree.spans) if GRADIENT.fullmatch(op.name)
        and not any(GRADIENT.fullmatch(tree.spans[above].name) for above in tree.ancestors(at))
    ]
    for at, op in sorted(gradients, key=lambda item: item[1].start):
        above = [tree.spans[index] for index in tree.ancestors(at)]
        node = next((span for span in above if span.name.startswith(EVALUATION)), op)
        if node[1:4] in taken:
            continue
        sequences = {span.sequence for span in above if span.sequence >= 0}
        shapes = [_sizes(op.dims, place) for place in (1, 2)]
        matching = [
            index for index in open_calls
            if drafts[index].start < op.start and (
                bool(drafts[index].sequences & sequences) if sequences and not flows
                else drafts[index].compiled and shapes == _shapes(drafts[index]))
        ]
        if matching:
            open_calls.remove(matching[-1])
            yield _stretch(matching[-1], op if drafts[matching[-1]].compiled else node)


def _shapes(draft: _Draft) -> list[tuple[int, ...]]:
    return [tensor.dims if tensor else () for tensor in draft.tensors[:2]]


def _stretch(index: int, op: Detail) -> tuple[int, str, int, int, int]:
    return index, "backward", op.thread, op.start, op.end


def _call(
    draft: _Draft,
    has_backward: bool,
    thread: tuple[int, int],
    base: int,
    steps: Sequence[Step],
    ranges: Sequence[Range],
) -> AttentionCall:
    start = draft.start + base
    flags = dict(draft.flags)
    backward = bool(flags.pop("backward", False)) or has_backward
    config, reason = None, draft.unsaid
    if draft.kind != "custom" and draft.tensors[0] is not None:
        try:
            config = replay_config(draft.tensors, backward=backward, **flags)
        except UsageError as error:
            reason = reason or str(error)
    elif reason is None:
        reason = "the trace does not tell the shapes of this call"
    inside = [row for row in ranges if row.name.startswith(MARKER) and (row.pid, row.tid) == thread]
    marker = [row for row in inside if row.start_ns <= start < row.start_ns + row.duration_ns]
    step = (k for k, s in enumerate(steps) if s.start_ns <= start < s.start_ns + s.duration_ns)
    return AttentionCall(
        kind=draft.kind,
        op=draft.op,
        sdpa_op=draft.sdpa_op,
        compiled=draft.compiled,
        recompute=draft.recompute,
        backward=backward,
        modules=draft.modules,
        path=marker[-1].name.removeprefix(MARKER) if marker else None,
        step=next(step, None),
        config=config,
        reason=reason,
        tensors=draft.tensors,
        pid=thread[0],
        tid=thread[1],
        start_ns=start,
        duration_ns=draft.end - draft.start,
    )


def _steps(ranges: Sequence[Range], modules: Tree, base: int) -> tuple[Step, ...]:
    """ProfilerStep ranges; else from optimizer step to optimizer step; else outermost modules."""
    numbered = [row for row in ranges if row.name.startswith("ProfilerStep#")]
    if numbered:
        return tuple(Step(row.name, row.start_ns, row.duration_ns) for row in numbered)
    ends = [row for row in ranges if row.name.startswith("Optimizer.step#")]
    if ends:
        first = min(row.start_ns for row in ranges)
        borders = [first, *(row.start_ns + row.duration_ns for row in ends)]
        return tuple(
            Step(row.name, begin, end - begin)
            for row, begin, end in zip(ends, borders, borders[1:], strict=False)
        )
    outermost = (span for span, above in zip(modules.spans, modules.above, strict=True) if above < 0)
    return tuple(
        Step(span.name.removeprefix(MODULE), span.start + base, span.end - span.start)
        for span in sorted(outermost, key=lambda span: int(span.start))
    )


def replay_config(
    tensors: Sequence[TensorArgument | None],
    *,
    causal: bool | None = None,
    dropout: float | None = None,
    scale: float | None = None,
    gqa: bool | None = None,
    backward: bool = False,
) -> Config:
    """The config that replays a call on query, key, value and mask. Raises UsageError for a call
    that no config says.
    """
    query, key, value, mask = tensors
    if query is None or key is None or value is None:
        raise UsageError("not all of query, key and value are told")
    shapes = (query.dims, key.dims, value.dims)
    if any(len(dims) != 4 for dims in shapes):
        raise UsageError(f"query, key and value have {', '.join(map(_joined, shapes))}, not 4 dims")
    if not (dtype := _dtype(query, key, value)):
        raise UsageError("the trace does not tell the dtype")
    batch, heads, rows, head_dim = query.dims
    key_batch, kv_heads, columns, _ = key.dims
    if value.dims[:3] != key.dims[:3] or key.dims[3] != head_dim or 0 in (*query.dims, *value.dims):
        raise UsageError(f"shapes do not agree: {', '.join(map(_joined, shapes))}")
    if kv_heads != heads and gqa is False:
        raise UsageError(f"{kv_heads} key heads for {heads} heads without enable_gqa")
    tokens = [batch, heads, rows, head_dim, dtype, f"seq_kv={columns}", f"kv_heads={kv_heads}"]
    tokens += [f"head_dim_v={value.dims[3]}", f"kv_batch={key_batch}"]
    tokens += [name for name, said in (("causal", causal), ("bwd", backward)) if said]
    if dropout:
        tokens.append(f"dropout={dropout}")
    if scale is not None and not math.isclose(scale, head_dim**-0.5, rel_tol=SCALE_DIGITS):
        tokens.append(f"scale={scale}")
    tokens += _layout_tokens({"q": query, "k": key, "v": value})
    if mask is not None:
        tokens += _mask_tokens(mask, dtype, (max(batch, key_batch), heads, rows, columns))
    return parse_config(",".join(map(str, tokens)))


def _joined(dims: Sequence[int]) -> str:
    return "x".join(map(str, dims))


def _dtype(*tensors: TensorArgument) -> str | None:
    dtypes = {tensor.dtype for tensor in tensors}
    if dtypes == {None}:
        return None
    if len(dtypes) > 1 or not dtypes <= {*CONFIG_DTYPES}:
        raise UsageError(f"configs have no dtype {', '.join(sorted(map(str, dtypes)))}")
    return str(dtypes.pop())


def _in_order(dims: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor whose dims lie in memory in an order, outermost first."""
    strides, stride = [0] * len(dims), 1
    for place in reversed(order):
        strides[place] = stride
        stride *= dims[place]
    return tuple(strides)


def _lies(tensor: TensorArgument, order: Sequence[int]) -> bool:
    """Whether it lies in that order; a dim of size 1 may have any stride."""
    if tensor.strides is None:
        return True
    wanted = _in_order(tensor.dims, order)
    triples = zip(tensor.dims, tensor.strides, wanted, strict=True)
    return all(size == 1 or stride == want for size, stride, want in triples)


def _layout_tokens(tensors: dict[str, TensorArgument]) -> Iterator[str]:
    odd = {name: t for name, t in tensors.items() if not _lies(t, range(4))}
    if odd and all(_lies(tensor, (0, 2, 1, 3)) for tensor in tensors.values()):
        yield "layout=bshd"
        return
    for name, tensor in odd.items():
        yield f"{name}_strides={_joined(tensor.strides or ())}"


def _mask_tokens(mask: TensorArgument, dtype: str, whole: Sequence[int]) -> Iterator[str]:
    if mask.dtype not in ("bool", dtype, None):
        raise UsageError(f"a mask of {mask.dtype} for {dtype} inputs")
    letters = ""
    for letter, size, dim in zip("kqhb", whole[::-1], mask.dims[::-1], strict=False):
        if dim not in (1, size):
            raise UsageError(f"a mask of {_joined(mask.dims)}")
        # A dim that is 1 and has to be: the grammar's own shapes write q and k, and 1 for others.
        letters = (letter if dim == size and (dim > 1 or letter in "qk") else "1") + letters
    if len(mask.dims) not in (2, 3, 4):
        raise UsageError(f"a mask of {len(mask.dims)} dims")
    yield "mask=bool" if mask.dtype == "bool" else "mask=float"
    yield f"mask_shape={letters}"
    if not _lies(mask, range(len(mask.dims))):
        yield f"mask_strides={_joined(mask.strides or ())}"
