"""Identify kernels by their names.

`parse_kernel_name` parses the name of a GPU function or an ATen op. It determines the family, the
backend, the compile-time properties and a short name. This module contains the rules for the
kernels in the namespace at::native, for the kernels in the folder kernels/ and for ATen ops.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from profharness.dtypes import CONFIG_DTYPES, OF_CPP_TYPE
from profharness.traces.kernel_names.attention import parse_library
from profharness.traces.kernel_names.meanings import FAMILIES, TILED, TILED_FLAGS
from profharness.traces.kernel_names.serving import parse_serving
from profharness.traces.kernel_names.text import (
    Head,
    KernelName,
    canonical,
    generic_short,
    integer,
    join_short,
    normalise,
    reduced_arguments,
    short_type,
    shorten,
    split_head,
    template_arguments,
)

__all__ = [
    "ATTENTION_FAMILIES",
    "COLLECTIVE",
    "FAMILIES",
    "KernelName",
    "canonical",
    "parse_kernel_name",
]

ATTENTION_FAMILIES = frozenset(
    family
    for family in FAMILIES
    if family.startswith(("flash", "efficient", "cudnn", "flex", "fmha", "aotriton", "ck", "aiter"))
)
"""The families whose kernels compute only attention."""
COLLECTIVE = "collective"
"""The family of kernels that communicate between GPUs."""
_TRANSFER = re.compile(r"\[?(?:CUDA )?(Memcpy|Memset)\b", re.IGNORECASE)
# ATen ops that each run one kernel, by the family of this kernel.
_GROUPS = {
    "gemm": """bmm mm addmm baddbmm addbmm mkldnn_linear mkldnn_matmul _int_mm _scaled_mm
        _addmm_activation""",
    "gemv": "mv addmv addmv_ dot vdot",
    "softmax": """softmax _softmax _safe_softmax log_softmax _log_softmax _softmax_backward_data
        _log_softmax_backward_data""",
    "copy": "copy_ clone contiguous _to_copy cat _cat stack repeat index_copy_",
    "memset": "fill_ zero_ zeros ones full zeros_like ones_like full_like new_zeros new_ones",
    "elementwise": """add sub rsub mul div neg exp exp2 log sqrt rsqrt pow abs where masked_fill
        tril triu relu gelu silu sigmoid tanh sin cos eq ne lt le gt ge logical_not logical_and
        logical_or bitwise_not bitwise_and maximum minimum clamp reciprocal native_dropout
        native_dropout_backward bernoulli isinf isnan isneginf remainder floor ceil round sign
        addcmul addcdiv lerp threshold_backward gelu_backward silu_backward sigmoid_backward
        tanh_backward uniform normal exponential random_""",
    "reduce": """sum mean amax amin max min argmax argmin all any prod norm linalg_vector_norm
        logsumexp var std var_mean std_mean nansum""",
}
_FAMILY = {op: family for family, ops in _GROUPS.items() for op in ops.split()}
_ATTENTION = {
    "flash_attention": "flash",
    "efficient_attention": "efficient",
    "cudnn_attention": "cudnn",
}


@lru_cache(maxsize=16384)
def parse_kernel_name(name: str, kind: str = "kernel") -> KernelName:
    """Parse a kernel name in the spelling of any profiler.

    `kind` is `kernel`, `memcpy`, `memset` or `op`. If no rule matches the name, the family is
    `other`. Only the first 16 KiB of the name are read. This function never raises an exception.
    """
    if kind == "op":
        return _op(name)
    transfer = _TRANSFER.match(name)
    if kind in ("memcpy", "memset") or transfer:
        family = transfer[1].lower() if transfer else kind
        return KernelName(name, shorten(name), family, "cuda")
    text = normalise(name)
    head = split_head(text, name)
    for parse in (parse_library, _native, _own, parse_serving):
        kernel = parse(text, head)
        if kernel is not None:  # the first parser that recognizes the name decides
            return replace(kernel, short=shorten(kernel.short))
    return KernelName(name, shorten(generic_short(text, head)), "other", "unknown")


def _native(text: str, head: Head) -> KernelName | None:
    base = head.base
    if _SOFTMAX.match(base):
        return _softmax(text, head)
    if _ELEMENTWISE.match(base):
        return _elementwise(text, head)
    if base in ("reduce_kernel", "reduce_1Block_kernel"):
        return _reduce(text, head)
    if "CatArrayBatchedCopy" in base or base in _COPIES:
        family = "copy"
    elif base.startswith(_ON_ELEMENTS):
        family = "elementwise"
    elif head.path.startswith(("at::", "c10::", "at_cuda_detail::")):
        family = "norm" if _NORM.search(base) else "other"
    else:
        return None
    direction = "bwd" if family == "norm" and "ackward" in base else None
    return KernelName(head.name, generic_short(text, head), family, "aten", direction=direction)


_NORM = re.compile(
    r"(?:[lL]ayer|[bB]atch|[gG]roup|[rR]ms)_?[nN]orm|RowwiseMoments|GammaBetaBackward"
)
_SOFTMAX = re.compile(
    r"cunn_(?:Spatial)?SoftMax(?:Forward|Backward)|(?:masked_)?(?:log_)?softmax_warp_(?:for|back)ward"
)
_ELEMENTWISE = re.compile(r"\w*elementwise\w*_kernel", re.ASCII)
_COPIES = {
    *("copy_device_to_device", "batched_copy", "copy_kernel", "vectorized_gather_kernel"),
    *("indexSelectSmallIndex", "indexSelectLargeIndex"),
}
# The last kernel applies an operation, such as a step of an optimizer, to each tensor of a list.
_ON_ELEMENTS = ("triu_tril_kernel", "fused_dropout_kernel", "multi_tensor_apply_kernel")
_TYPES = "|".join(sorted(map(re.escape, OF_CPP_TYPE), key=len, reverse=True))
_PLAIN_TYPE = rf"{_TYPES}|bool|unsigned char|signed char|short|int|long"
_FUNCTION = re.compile(r"([A-Za-z_]\w*?)(?:<[^<>()]{0,200}>)?\(at::(?:Tensor|TensorIter\w*)\b")
_FUNCTOR = re.compile(rf"([A-Za-z_]\w*[Ff]unctor\w*)(?:<({_PLAIN_TYPE})[,>])?")
_LAMBDA = re.compile(rf"\{{lambda\((?:bool, )?({_PLAIN_TYPE})[,)]")
# Matches the template argument that contains the operation. In a short name, a copy is a single
# word such as `direct_copy`.
_COMPUTES = re.compile(r"::|unctor|^\w*copy\w*$", re.ASCII)
_WRAPPERS = {"BinaryFunctor", "UnaryFunctor", "func_wrapper_t"}
_SUFFIX = re.compile(r"_kernel(?:_cuda|_impl(?:_cuda)?)?$")
_OTHER_TYPES = {"unsigned char": "uint8", "signed char": "int8", "int": "int32", "long": "int64"}


def _type_name(match: re.Match[str] | None, group: int = 1) -> str | None:
    name = match[group] if match else None
    return (OF_CPP_TYPE.get(name) or _OTHER_TYPES.get(name) or name) if name else None


def _functor(argument: str) -> tuple[str | None, str | None]:
    """Return the innermost functor or function in a template argument, and its dtype."""
    scalar = _type_name(_LAMBDA.search(argument))
    for match in _FUNCTION.finditer(argument):
        if not match[1].startswith("gpu_kernel"):
            return _SUFFIX.sub("", match[1]), scalar
    functors = [match for match in _FUNCTOR.finditer(argument) if match[1] not in _WRAPPERS]
    if not functors:
        return None, scalar
    outer, inner, dtype = functors[0][1], functors[-1][1], _type_name(functors[-1], 2)
    if outer in ("AUnaryFunctor", "BUnaryFunctor") and inner != outer:
        return f"{outer.removesuffix('Functor')}<{inner}>", dtype
    return inner, dtype


def _elementwise(text: str, head: Head) -> KernelName:
    arguments, numbers = _arguments(text, head)
    body = next(filter(_COMPUTES.search, arguments), "")
    functor, dtype = _functor(body[:2000])
    if functor is None and body:
        functor = re.split(r"[<({]", body, maxsplit=1)[0].rsplit("::", 1)[-1] or None
    is_copy = functor is not None and bool(re.fullmatch(r"\w*copy(?:_kernel_cuda)?\w*", functor))
    leading = numbers[:2] if head.base.startswith(("vec", "elem")) else []
    parts = [head.base.removesuffix("_kernel"), *leading, functor]
    return _computed(head, parts, "copy" if is_copy else "elementwise", dtype)


_REDUCTION = re.compile(r"\b(\w+)_kernel_cuda\w*\(|\b(\w+_functor|\w+Ops?|\w+Op)\b(?<!ReduceOp)")


def _reduce(text: str, head: Head) -> KernelName:
    arguments, numbers = _arguments(text, head, limit=4)
    body = arguments[-1][:2000] if arguments else ""
    operation = _REDUCTION.search(body)
    dtype = re.search(rf"ReduceOp<({_PLAIN_TYPE}),", body)
    parts = ["reduce_kernel", *numbers[:2], (operation[1] or operation[2]) if operation else None]
    return _computed(head, parts, "reduce", _type_name(dtype))


def _arguments(text: str, head: Head, limit: int = 8) -> tuple[list[str], list[str]]:
    arguments = template_arguments(text, head.end, limit)
    return arguments, [argument for argument in arguments if integer(argument) is not None]


def _computed(head: Head, parts: list[str | None], family: str, dtype: str | None) -> KernelName:
    base, *rest = parts  # a short name does not contain fp32, because that is the default
    short = join_short(str(base), *rest, dtype if dtype != "fp32" else None).replace(",", ", ")
    dtype = dtype if dtype in OF_CPP_TYPE.values() else None
    return KernelName(head.name, short, family, "aten", dtype=dtype)


def _softmax(text: str, head: Head) -> KernelName:
    """Parse a name such as `softmax_warp_forward<in, out, acc, log2 columns, log, masked, warp>`,
    or a name that starts with `cunn_`.
    """
    arguments, numbers = _arguments(text, head)
    types = [OF_CPP_TYPE[argument] for argument in arguments if argument in OF_CPP_TYPE]
    flags = [argument == "true" for argument in arguments if argument in ("true", "false")]
    # Prefer a 16-bit type, because the accumulator for 16-bit tensors is fp32, and either the input
    # or the output may be fp32 too.
    dtype = next((word for word in types if word != "fp32"), types[0] if types else None)
    is_log = bool(flags and flags[0]) or "LogSoftMax" in text[:600]
    is_masked = "warp" in head.base and len(flags) > 1 and flags[1]
    parts = ("/".join(dict.fromkeys(types)), *numbers[:1], is_log and "log", is_masked and "masked")
    direction = "bwd" if "ackward" in head.base else "fwd"
    short = join_short(head.base, *parts)
    return KernelName(head.name, short, "softmax", "aten", dtype=dtype, direction=direction)


_CUDA = frozenset({"single_query", "single_query_attention", "tiled_attention", "combine_splits"})
# Matches the Triton kernels in the folder kernels/. The pattern does not match CUDA kernels of the
# same name, because their names also contain a parameter list.
_TRITON = re.compile(r"flash_(?:forward|backward_(?:dkdv|dq|delta))$")


def _own(text: str, head: Head) -> KernelName | None:
    """Parse a kernel from the folder kernels/, such as `tiled_attention<T, BM, BN, …>` with a tile
    of BM queries and BN keys.
    """
    if _TRITON.match(text):
        direction = "bwd" if "backward" in text else "fwd"
        return KernelName(head.name, text, "triton", "triton", direction=direction)
    if head.path not in _CUDA:
        return None
    arguments = template_arguments(text, head.end)
    word = short_type(arguments[0]) if arguments else ""
    sizes = [integer(argument) for argument in arguments[1:3]]
    shown, stages = reduced_arguments(arguments), None
    if head.path != "tiled_attention" or len(sizes) < 2 or None in sizes:
        sizes = [None, None]
    else:
        rest = reduced_arguments(arguments[3:])
        if len(arguments) == len(TILED):
            by_name = dict(zip(TILED, arguments, strict=True))
            stages = integer(by_name["STAGES"])
            flags = {name: flag for name, flag in TILED_FLAGS.items() if by_name[name] == "true"}
            values = list((by_name | flags).values())[3:]
            rest = [value for value in values if value != "false"]
        shown = [word, f"{sizes[0]}x{sizes[1]}", *rest]
    return KernelName(
        head.name,
        join_short(head.base, *shown),
        "other",
        "unknown",
        dtype=word if word in CONFIG_DTYPES else None,
        tile_m=sizes[0],
        tile_n=sizes[1],
        stages=stages,
        direction="fwd",
    )


def _op(op: str) -> KernelName:
    name = op.rpartition("::")[2].partition(".")[0]
    family = _FAMILY.get(name) or _FAMILY.get(name.removesuffix("_")) or "other"
    direction = "bwd" if "_backward" in name else None
    for word, attention in _ATTENTION.items():
        if word in name:
            is_backward = name.endswith("_backward") or "_backward_" in name or "_bwd" in name
            family = f"{attention}_bwd" if is_backward else attention
            direction = "bwd" if is_backward else "fwd"
    short = shorten(op.removeprefix("aten::"))
    return KernelName(op, short, family, "aten", direction=direction)
