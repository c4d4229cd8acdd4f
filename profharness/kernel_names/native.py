"""PyTorch's own kernels of at::native: softmax, elementwise, reductions, copies, named by their
functor.
"""

from __future__ import annotations

import re

from profharness.kernel_names.text import (
    DTYPES,
    Head,
    KernelName,
    generic_short,
    integer,
    join_short,
    template_arguments,
)


def parse_native(text: str, head: Head) -> KernelName | None:
    """The at::native kernel that a normalised name stands for; None if it is none."""
    base = head.base
    if _SOFTMAX.match(base):
        return _softmax(text, head)
    if match := _ELEMENTWISE.match(base):
        return _elementwise(text, head, match)
    if base in ("reduce_kernel", "reduce_1Block_kernel"):
        return _reduce(text, head)
    if "CatArrayBatchedCopy" in base or base in _COPIES:
        return KernelName(head.name, generic_short(text, head), "copy", "aten")
    if base.startswith(("triu_tril_kernel", "fused_dropout_kernel")):
        return KernelName(head.name, generic_short(text, head), "elementwise", "aten")
    if head.path.startswith(("at::", "c10::", "at_cuda_detail::")):
        return KernelName(head.name, generic_short(text, head), "other", "aten")
    return None


_SOFTMAX = re.compile(
    r"cunn_(?:Spatial)?SoftMax(?:Forward|Backward)|(?:masked_)?(?:log_)?softmax_warp_(?:for|back)ward"
)
_ELEMENTWISE = re.compile(r"(\w*elementwise)\w*_kernel\w*|\w*elementwise_kernel\w*", re.ASCII)
_COPIES = {"copy_device_to_device", "batched_copy", "copy_kernel"}
_TYPES = "|".join(sorted(map(re.escape, DTYPES), key=len, reverse=True))
_PLAIN_TYPE = rf"{_TYPES}|bool|unsigned char|signed char|short|int|long"
_FUNCTION = re.compile(r"([A-Za-z_]\w*?)(?:<[^<>()]{0,200}>)?\(at::(?:Tensor|TensorIter\w*)\b")
_FUNCTOR = re.compile(rf"([A-Za-z_]\w*[Ff]unctor\w*)(?:<({_PLAIN_TYPE})[,>])?")
_LAMBDA = re.compile(rf"\{{lambda\((?:bool, )?({_PLAIN_TYPE})[,)]")
_WRAPPERS = {"BinaryFunctor", "UnaryFunctor", "func_wrapper_t"}
_SUFFIX = re.compile(r"_kernel(?:_cuda|_impl(?:_cuda)?)?$")
_OTHER_TYPES = {"unsigned char": "uint8", "signed char": "int8", "int": "int32", "long": "int64"}


def _word(name: str | None) -> str | None:
    return (DTYPES.get(name) or _OTHER_TYPES.get(name) or name) if name else None


def _functor(argument: str) -> tuple[str | None, str | None]:
    """What an elementwise kernel computes and on which type; the innermost functor, or the
    function around a lambda.
    """
    scalar = _LAMBDA.search(argument)
    for match in _FUNCTION.finditer(argument):
        if not match[1].startswith("gpu_kernel"):
            return _SUFFIX.sub("", match[1]), _word(scalar[1]) if scalar else None
    found = [match for match in _FUNCTOR.finditer(argument) if match[1] not in _WRAPPERS]
    if not found:
        return None, _word(scalar[1]) if scalar else None
    last = found[-1]
    inner = last[1]
    outer = found[0][1]
    if outer in ("AUnaryFunctor", "BUnaryFunctor") and inner != outer:
        return f"{outer.removesuffix('Functor')}<{inner}>", _word(last[2])
    return inner, _word(last[2])


def _elementwise(text: str, head: Head, _match: re.Match[str]) -> KernelName:
    arguments = template_arguments(text, head.end, limit=8)
    numbers = [argument for argument in arguments if integer(argument) is not None]
    body = next(
        (argument for argument in arguments if "::" in argument or "unctor" in argument), ""
    )
    functor, dtype = _functor(body[:2000])
    if functor is None and body:
        functor = re.split(r"[<({]", body, maxsplit=1)[0].rsplit("::", 1)[-1] or None
    is_copy = functor is not None and bool(re.fullmatch(r"\w*copy(?:_kernel_cuda)?\w*", functor))
    base = head.base.removesuffix("_kernel")
    leading = numbers[: len(numbers) if head.base.startswith(("vec", "elem")) else 0]
    shown_dtype = dtype if dtype != "fp32" else None
    return KernelName(
        head.name,
        join_short(base, *leading[:2], functor, shown_dtype).replace(",", ", "),
        "copy" if is_copy else "elementwise",
        "aten",
        dtype=dtype if dtype in DTYPES.values() else None,
    )


_REDUCTION = re.compile(r"\b(\w+)_kernel_cuda\w*\(|\b(\w+_functor|\w+Ops?|\w+Op)\b(?<!ReduceOp)")


def _reduce(text: str, head: Head) -> KernelName:
    arguments = template_arguments(text, head.end, limit=4)
    numbers = [argument for argument in arguments if integer(argument) is not None]
    body = arguments[-1][:2000] if arguments else ""
    found = _REDUCTION.search(body)
    dtype = re.search(rf"ReduceOp<({_PLAIN_TYPE}),", body)
    word = _word(dtype[1]) if dtype else None
    operation = (found[1] or found[2]) if found else None
    shown = word if word != "fp32" else None
    return KernelName(
        head.name,
        join_short("reduce_kernel", *numbers[:2], operation, shown).replace(",", ", "),
        "reduce",
        "aten",
        dtype=word if word in DTYPES.values() else None,
    )


def _softmax(text: str, head: Head) -> KernelName:
    """`softmax_warp_forward<in, out, acc, log2 columns, log, masked, warp>`; cunn_ kernels say
    vector width or type first.
    """
    arguments = template_arguments(text, head.end, limit=8)
    types = [DTYPES[argument] for argument in arguments if argument in DTYPES]
    numbers = [argument for argument in arguments if integer(argument) is not None]
    flags = [argument == "true" for argument in arguments if argument in ("true", "false")]
    is_backward = "ackward" in head.base
    is_warp = "warp" in head.base
    # the accumulator is fp32 for 16-bit tensors, and so may be one side of the operation
    dtype = next((one for one in types if one != "fp32"), types[0] if types else None)
    pair = "/".join(dict.fromkeys(types)) or None
    is_log = bool(flags and flags[0]) or "LogSoftMax" in text[:600]
    masked = is_warp and len(flags) > 1 and flags[1]
    size = numbers[0] if numbers else None
    return KernelName(
        head.name,
        join_short(head.base, pair, size, "log" if is_log else None, "masked" if masked else None),
        "softmax",
        "aten",
        dtype=dtype,
        direction="bwd" if is_backward else "fwd",
    )
