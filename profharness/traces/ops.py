"""Describe the attention ops of PyTorch: their names, their arguments, and the config of a call.

The parsers store ops as objects if they are attention ops, ops that eager attention consists of, or
ops that show where the backward of attention ran. The names and the positions of arguments match
the native_functions.yaml of PyTorch 2.5 to 2.13.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from profharness.attention.config import Config, parse_config
from profharness.dtypes import CONFIG_DTYPES, OF_CPP_TYPE
from profharness.errors import UsageError, with_count
from profharness.trace import TensorArgument

OUTER = "aten::scaled_dot_product_attention"
LAYER, FAST = "aten::_transformer_encoder_layer_fwd", "aten::_native_multi_head_attention"
INNER = re.compile(
    r"aten::_scaled_dot_product_(?:flash|efficient|cudnn|fused|attention_math)\w*"
    r"|aten::_(?:flash|efficient|cudnn)_attention_forward"
)
UNFUSED_FLEX = "FlexAttentionAutogradOp"  # flex_attention that has a gradient and is not compiled
FLEX = re.compile(rf"triton_\w*flex_attention\w*|flex_attention\w*|{UNFUSED_FLEX}")
PACKAGES = re.compile(
    r"FlashAttn\w*Func|flash_attn\w*::\w+|(?:xformers\w*|_?vllm\w*|sglang|sgl_kernel|flashinfer"
    r"|sageattention|aiter|transformer_engine\w*)::\w*(?:attention|attn|fmha|flash|mha|mla)\w*"
    r"|sglang_profiler::\w*paged_attention\w*"
)
BACKWARD = re.compile(r"(?i)\S*(?:backward|bwd)\w*")
PRODUCTS = ("aten::matmul", "aten::bmm", "aten::baddbmm", "aten::einsum")
SOFTMAX = ("aten::softmax", "aten::_softmax", "aten::_safe_softmax")
LINEAR = "aten::linear"  # the matrix products inside this op do not belong to attention
EVALUATION = "autograd::engine::evaluate_function: "
REGION = re.compile(r"Torch-Compiled Region.*|CompiledFunction\w*|## Call CompiledFxGraph .*")
GRADIENT = re.compile(r"aten::\w*attention\w*backward\w*|triton_\w*flex_attention_backward\w*")
# Prefixes of the names of all Inductor kernels, and of Inductor's kernels made from a template
TRITON, TRITON_TEMPLATE = "triton_", "triton_tem_"
MODULE = "nn.Module: "

# The positions of the arguments of each op. The letters q, k, v and m in the string are at the
# positions of query, key, value and mask. The dict contains the positions of the flags.
_INNER = "aten::_scaled_dot_product_"
POSITIONS: dict[str, tuple[str, dict[str, int]]] = {
    OUTER: ("qkvm", {"dropout": 4, "causal": 5, "scale": 6, "gqa": 7}),
    f"{_INNER}flash_attention": ("qkv", {"dropout": 3, "causal": 4, "scale": 6}),
    f"{_INNER}flash_attention_for_cpu": ("qkv  m", {"dropout": 3, "causal": 4, "scale": 6}),
    f"{_INNER}efficient_attention": (
        "qkvm", {"backward": 4, "dropout": 5, "causal": 6, "scale": 7}),
    f"{_INNER}cudnn_attention": ("qkvm", {"backward": 4, "dropout": 5, "causal": 6, "scale": 8}),
    f"{_INNER}attention_math": ("qkvm", {"dropout": 4, "causal": 5, "scale": 7, "gqa": 8}),
}  # fmt: skip
# Ops of packages whose first arguments are not query, key and value. SGLang's shape profiler numbers
# the functions that it wraps.
_OF_PACKAGES = {"sglang_profiler::attention_paged_attention_ragged": "  qkv"}
# Relative tolerance for a scale, because a trace contains only six digits of it
SCALE_DIGITS = 1e-4
CUMULATED = 4  # position of the cumulative lengths in the arguments of ops for packed sequences

NO_SHAPES = (
    "the trace has no shapes; record it with record_shapes=True, or under nsys with "
    "--pytorch=autograd-shapes-nvtx"
)
VARLEN = (
    "one tensor contains sequences of different lengths (varlen), which a config cannot describe"
)
NESTED = (
    "the trace does not record the shapes of query, key and value (nested tensors are one cause)"
)
UNREADABLE = "the shapes in the trace are not the shapes of query, key and value"
NO_STRIDES = "the trace does not record the strides of query, key and value"
NO_CAUSAL = "the trace does not record is_causal"
BY_ITSELF = "{op} was called directly, but a config describes only scaled_dot_product_attention"
ORPHANS = (
    "{n} attention backward [op has|ops have] no arrow from a forward op in the trace, so [its|their] "
    "time is not assigned to a layer"
)
CONTRADICTED = (
    "the arrows from {n} attention [call|calls] lead to backward ops that belong to other ops, so "
    "the backward pass of [this call|these calls] is unknown"
)
OVERLAPS = (
    "{n} module [call begins inside another call and ends|calls begin inside another call and end] "
    "after it, so the layers may be wrong"
)


@dataclass(frozen=True, slots=True, eq=False)
class OpArguments:
    """The arguments of an op that the trace records, by position.

    Ops that have equal arguments share one object. Objects are hashed by identity, so that they can
    be keys of a dict.
    """

    dims: Sequence[Any] = ()
    strides: Sequence[Any] = ()
    types: Sequence[Any] = ()
    values: Sequence[Any] = ()


NO_ARGUMENTS = OpArguments()


class HostSpan(NamedTuple):
    """A time span on a CPU thread, such as an op, the call of an nn.Module or a range."""

    name: str
    start: int  # ns
    end: int  # ns
    thread: int  # index into the threads of the trace
    arguments: OpArguments = NO_ARGUMENTS
    sequence: int = -1  # autograd's sequence number, the same for forward and backward


def argument_positions(name: str) -> tuple[str, dict[str, int]]:
    """Return the positions of the tensors and of the flags in the arguments of an op.

    POSITIONS describes the result. The positions of an unknown op are those of query, key and value.
    """
    of_package = _OF_PACKAGES.get(re.sub(r"_\d+$", "", name), "qkv")
    return POSITIONS.get(name, (of_package, {}))


@cache
def has_arguments(name: str) -> bool:
    """Return whether the arguments of an op are stored."""
    if name in (OUTER, LAYER, FAST, *PRODUCTS, *SOFTMAX):
        return True
    return any(rule.fullmatch(name) for rule in (INNER, FLEX, PACKAGES, GRADIENT))


@cache
def is_detailed(name: str) -> bool:
    """Return whether an op is stored as an object, in addition to its row in the columns."""
    return name == LINEAR or bool(REGION.fullmatch(name)) or has_arguments(name)


def tensor_argument(op: HostSpan, place: int) -> TensorArgument | None:
    dims = sizes(op.arguments.dims, place)
    if not dims:
        return None
    strides = sizes(op.arguments.strides, place)
    kind = op.arguments.types[place] if place < len(op.arguments.types) else None
    return TensorArgument(
        dims,
        strides if len(strides) == len(dims) else None,
        OF_CPP_TYPE.get(kind, kind) if isinstance(kind, str) and kind else None,
    )


def sizes(lists: Sequence[Any], place: int) -> tuple[int, ...]:
    """Return the sizes in the argument at a position, or () if it is not a list of sizes."""
    given = lists[place] if 0 <= place < len(lists) else None
    if not isinstance(given, list | tuple):
        return ()
    whole = all(type(item) is int and 0 <= item < 1 << 62 for item in given)
    return tuple(given) if whole else ()


def flag(op: HostSpan, place: int) -> Any:
    """Return the argument at a position as a bool or a float, or None if it is not recorded."""
    text = op.arguments.values[place] if place < len(op.arguments.values) else ""
    if text in ("True", "False"):
        return text == "True"
    try:
        return float(text) if isinstance(text, str) and text else None
    except ValueError:
        return None


def doubt(op: HostSpan, names: str, places: Mapping[str, int]) -> str | None:
    """Return why the recorded arguments of an op do not suffice for a config, or None if they
    suffice.

    `names` and `places` are the values in POSITIONS for the op. nsys records only the dims. For
    such an op, `replay_config` reports that the dtype is missing.
    """
    given = op.arguments
    if not given.dims:
        return NO_SHAPES
    if not places:
        return BY_ITSELF.format(op=op.name)
    at = [names.find(name) for name in "qkv"]
    if not any(given.dims[place] for place in at if place < len(given.dims)):
        return NESTED
    dims = [sizes(given.dims, place) for place in at]
    if not all(dims):
        return UNREADABLE
    if not given.types:
        return None
    if any(
        len(sizes(given.strides, place)) != len(mine) for place, mine in zip(at, dims, strict=True)
    ):
        return NO_STRIDES
    if "causal" in places and flag(op, places["causal"]) is None:
        return NO_CAUSAL
    return None


def warnings(
    reasons: Sequence[str | None], counted: Mapping[str, int], overlaps: int
) -> tuple[str, ...]:
    """Return one warning for each kind of problem, with its count.

    `reasons` has one element for each call. `overlaps` is the number of calls of modules that
    overlap.
    """
    counts = Counter(reasons)
    texts = [
        with_count(f"{{n}} attention [call|calls]: {text}", counts[text])
        for text in (UNREADABLE, NO_STRIDES, NO_CAUSAL)
        if counts[text]
    ]
    if 0 < counts[NO_SHAPES] < len(reasons):
        texts.append(
            f"{counts[NO_SHAPES]:,} of {len(reasons):,} attention calls have no shapes, but the "
            "others do"
        )
    numbers = {**counted, OVERLAPS: overlaps}
    return (*texts, *(with_count(text, n) for text, n in numbers.items() if n))


def replay_config(
    tensors: Sequence[TensorArgument | None],
    *,
    causal: bool | None = None,
    dropout: float | None = None,
    scale: float | None = None,
    gqa: bool | None = None,
    backward: bool = False,
) -> Config:
    """Return the config that replays a call with a query, key, value and mask.

    Raise UsageError if no config describes the call.
    """
    query, key, value, mask = tensors
    if query is None or key is None or value is None:
        raise UsageError("the trace does not record the query, the key or the value")
    shapes = (query.dims, key.dims, value.dims)
    if any(len(dims) != 4 for dims in shapes):
        raise UsageError(
            f"query, key and value have the shapes {', '.join(map(_joined, shapes))}, but a "
            "config requires 4 dimensions"
        )
    if not (dtype := _dtype(query, key, value)):
        raise UsageError("the trace does not record the dtype")
    batch, heads, rows, head_dim = query.dims
    key_batch, kv_heads, columns, _ = key.dims
    if value.dims[:3] != key.dims[:3] or key.dims[3] != head_dim or 0 in (*query.dims, *value.dims):
        raise UsageError(f"the shapes are inconsistent: {', '.join(map(_joined, shapes))}")
    if kv_heads != heads and gqa is False:
        raise UsageError(
            f"{kv_heads} key heads do not match {heads} query heads without enable_gqa"
        )
    tokens = [batch, heads, rows, head_dim, dtype, f"seq_kv={columns}", f"kv_heads={kv_heads}"]
    tokens += [f"head_dim_v={value.dims[3]}", f"kv_batch={key_batch}"]
    tokens += [name for name, is_set in (("causal", causal), ("bwd", backward)) if is_set]
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
        raise UsageError(f"a config cannot have the dtype {', '.join(sorted(map(str, dtypes)))}")
    return str(dtypes.pop())


def _is_stored(tensor: TensorArgument, order: Sequence[int]) -> bool:
    """Return whether a tensor's dims are stored in `order`, outermost first, without gaps.

    The stride of a dim of size 1 does not matter. Return True if the strides are unknown.
    """
    stride = 1
    for place in reversed(order):
        size = tensor.dims[place]
        if tensor.strides is not None and size != 1 and tensor.strides[place] != stride:
            return False
        stride *= size
    return True


def _layout_tokens(tensors: dict[str, TensorArgument]) -> Iterator[str]:
    odd = {name: t for name, t in tensors.items() if not _is_stored(t, range(4))}
    if odd and all(_is_stored(tensor, (0, 2, 1, 3)) for tensor in tensors.values()):
        yield "layout=bshd"
        return
    for name, tensor in odd.items():
        yield f"{name}_strides={_joined(tensor.strides or ())}"


def _mask_tokens(mask: TensorArgument, dtype: str, whole: Sequence[int]) -> Iterator[str]:
    if mask.dtype not in ("bool", dtype, None):
        raise UsageError(
            f"a config cannot describe a mask of dtype {mask.dtype} for {dtype} inputs"
        )
    letters = ""
    for letter, size, dim in zip("kqhb", whole[::-1], mask.dims[::-1], strict=False):
        if dim not in (1, size):
            raise UsageError(f"a config cannot describe a mask of shape {_joined(mask.dims)}")
        # If the dim and the size are both 1, the grammar of configs expects the letters q and k,
        # but the digit 1 instead of h and b.
        letters = (letter if dim == size and (dim > 1 or letter in "qk") else "1") + letters
    if len(mask.dims) not in (2, 3, 4):
        raise UsageError(f"a config cannot describe a mask with {len(mask.dims)} dimensions")
    yield "mask=bool" if mask.dtype == "bool" else "mask=float"
    yield f"mask_shape={letters}"
    if not _is_stored(mask, range(len(mask.dims))):
        yield f"mask_strides={_joined(mask.strides or ())}"
