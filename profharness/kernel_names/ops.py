"""Families of ATen ops, which stand for kernels on a machine without a GPU."""

from __future__ import annotations

_GROUPS = {
    "gemm": (
        "bmm mm addmm baddbmm addbmm mkldnn_linear mkldnn_matmul _int_mm _scaled_mm "
        "_addmm_activation"
    ),
    "gemv": "mv addmv addmv_ dot vdot",
    "softmax": (
        "softmax _softmax _safe_softmax log_softmax _log_softmax _softmax_backward_data "
        "_log_softmax_backward_data"
    ),
    "copy": "copy_ clone contiguous _to_copy cat _cat stack repeat index_copy_",
    "memset": "fill_ zero_ zeros ones full zeros_like ones_like full_like new_zeros new_ones",
    "elementwise": (
        "add sub rsub mul div neg exp exp2 log sqrt rsqrt pow abs where masked_fill tril "
        "triu relu gelu silu "
        "sigmoid tanh sin cos eq ne lt le gt ge logical_not logical_and logical_or "
        "bitwise_not bitwise_and "
        "maximum minimum clamp reciprocal native_dropout native_dropout_backward "
        "bernoulli isinf isnan isneginf "
        "remainder floor ceil round sign addcmul addcdiv lerp threshold_backward "
        "gelu_backward silu_backward "
        "sigmoid_backward tanh_backward uniform normal exponential random_"
    ),
    "reduce": (
        "sum mean amax amin max min argmax argmin all any prod norm linalg_vector_norm "
        "logsumexp var std "
        "var_mean std_mean nansum"
    ),
}
_FAMILY = {op: family for family, ops in _GROUPS.items() for op in ops.split()}
_ATTENTION = {
    "flash_attention": "flash",
    "efficient_attention": "efficient",
    "cudnn_attention": "cudnn",
}


def op_family(op: str) -> tuple[str, str | None]:
    """Family and direction of an op such as `aten::bmm`; `other` when it is none that stands for
    one kernel.
    """
    name = op.rpartition("::")[2].partition(".")[0]
    for word, family in _ATTENTION.items():
        if word in name:
            is_backward = name.endswith("_backward") or "_backward_" in name or "_bwd" in name
            return (f"{family}_bwd", "bwd") if is_backward else (family, "fwd")
    family = _FAMILY.get(name) or _FAMILY.get(name.removesuffix("_")) or "other"
    direction = "bwd" if "_backward" in name else None
    return family, direction
