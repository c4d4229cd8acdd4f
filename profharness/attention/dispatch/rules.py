"""Dispatch rules: one table per backend, in the order in which PyTorch checks them.

The rules come from the dispatch functions in the binaries of the releases in machine.RELEASES, from
the public source of PyTorch's sdp_utils, and from measurements on an H200 (2.11) and on a CPU
(2.13). To add a release, add a row to machine.RELEASES, and edit the conditions and tables in this
module if the release differs from its predecessor. `predict.py` applies the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from profharness.attention.dispatch.machine import OLDEST, AttentionParams, Machine, Release
from profharness.device_types import CUDA
from profharness.dtypes import DTYPES, HALF
from profharness.rows import DISABLED

Condition = Callable[[AttentionParams, Machine], bool | None]
"""The condition of a check. It returns True if the backend refuses the call, False if it accepts
the call, and None if this is unknown.
"""
Message = str | Callable[[AttentionParams, Machine], str]
Dtypes = Callable[[AttentionParams, Machine], tuple[str, ...]]
NEVER: Release = (99,)


class Rule(NamedTuple):
    """One condition under which a backend refuses a call, or accepts the call but then fails."""

    code: str
    """The reason code, such as `head_dim`."""
    check: str
    """The PyTorch function that contains the condition."""
    refuses: Condition
    message: Message
    """The text of PyTorch's message. It is a function, or a format string over `p` (the params) and
    `m` (the machine).
    """
    since: Release = OLDEST
    until: Release = NEVER
    """The first release without the rule."""

    def text(self, params: AttentionParams, machine: Machine) -> str:
        """Return the message with its values filled in."""
        if callable(self.message):
            return self.message(params, machine)
        return self.message.format(p=params, m=machine)


def newest_sm(machine: Machine) -> tuple[int, int]:
    """Return the newest architecture that the fused backends of a release accept."""
    if machine.torch < (2, 7):
        return (9, 0)
    return (12, 0) if machine.torch < (2, 8) else (12, 1)


def sm90(machine: Machine) -> bool:
    return machine.capability == (9, 0)


def takes_d256(machine: Machine) -> bool:
    """Return whether PyTorch 2.14 and newer accept a head_dim of 256 for cuDNN. On sm 10.7, this
    needs cuDNN 9.25.1 or newer.
    """
    too_new = machine.capability == (10, 7) and (machine.cudnn or 0) <= 92500
    return (sm90(machine) or machine.major == 10) and not too_new


def cudnn_head_dim_limit(params: AttentionParams, machine: Machine) -> int:
    """Return the largest head_dim that cuDNN accepts. The fields `cudnn` and `cudnn_compiled` of
    the machine must be known.
    """
    torch, cudnn = machine.torch, machine.cudnn or 0
    if torch < (2, 8):
        return 128
    # The binaries up to 2.9.0 call versionCuDNN(), which returns the version of the build. Binaries
    # from 2.9.1 on call cudnnGetVersion(). In the 2.9.0 wheels, the limit is therefore always 128.
    if torch < (2, 9, 1):
        cudnn = machine.cudnn_compiled or 0
    large_dims, oldest = sm90(machine), 90501 if torch < (2, 9) else 91000
    unequal_dims = torch >= (2, 11) and machine.major == 10
    if torch >= (2, 14):
        large_dims, oldest = takes_d256(machine), 92201
        unequal_dims |= sm90(machine)
    if large_dims and cudnn >= oldest:
        return 256
    is_192_128 = (params.head_dim, params.value_dim) == (192, 128)
    return 192 if unequal_dims and cudnn >= 91100 and is_192_128 else 128


def gemm_alignment(params: AttentionParams, machine: Machine) -> int:
    """Return the number by which head_dim must be divisible for the efficient kernels."""
    half = params.dtype in HALF
    if machine.major >= 8:
        return 8 if half else 4
    return 8 if machine.major == 7 and half else 1


def alignment_bytes(params: AttentionParams, machine: Machine) -> int:
    """Return the number by which storage offsets, in bytes, must be divisible."""
    return gemm_alignment(params, machine) * DTYPES[params.dtype].bytes


def low_precision(_: AttentionParams, machine: Machine) -> tuple[str, ...]:
    return HALF if machine.major >= 8 else ("fp16",)


def flash_dtypes(params: AttentionParams, machine: Machine) -> tuple[str, ...]:
    fa3 = params.flash_impl == "FA3" and machine.major >= 9 and machine.torch >= (2, 11)
    return ("fp8_e4m3", *HALF) if fa3 else low_precision(params, machine)


def training_large_heads(params: AttentionParams, machine: Machine) -> bool:
    """Return whether the backward pass of flash has too little shared memory for the head_dim.

    This affects sm86 to sm89. It also affects sm120 from release 2.7 on, and sm121 from release 2.15
    on. Their shared memory is too small for a head_dim in (192, 224]. With dropout, it is also too
    small for a larger head_dim.
    """
    newest = 1 if machine.torch >= (2, 15) else 0
    small = (8, 6) <= machine.capability <= (8, 9) or (
        machine.torch >= (2, 7) and (12, 0) <= machine.capability <= (12, newest)
    )
    large = 192 < params.head_dim <= 224 or (params.head_dim > 224 and params.dropout > 0)
    return params.requires_grad and small and large


def heads_not_divisible(params: AttentionParams, _: Machine) -> bool:
    groups = (params.kv_heads, params.value_heads)
    return params.enable_gqa and any(params.heads % max(heads, 1) for heads in groups)


def mask_rows(params: AttentionParams, _: Machine) -> bool:
    """Return whether the last two dimensions of attn_mask cannot be broadcast to the sequence
    lengths.
    """
    mask = params.mask
    if mask is None or len(mask.shape) < 2:
        return False
    return mask.shape[-2] not in (params.seq_q, 1) or mask.shape[-1] not in (params.seq_kv, 1)


def mask_shape(params: AttentionParams, machine: Machine) -> bool:
    """Return whether attn_mask has other dimensions before the last two than batch and heads."""
    mask = params.mask
    if mask is None or mask_rows(params, machine) or len(mask.shape) == 2:
        return False
    lead = mask.shape[:-2]
    return len(lead) != 2 or lead[0] not in (params.batch, 1) or lead[1] not in (params.heads, 1)


def misaligned(params: AttentionParams, machine: Machine) -> bool:
    return machine.major >= 8 and params.storage_offset_bytes % alignment_bytes(params, machine) > 0


def cudnn_backward_dims(params: AttentionParams, machine: Machine) -> bool:
    """Return whether cuDNN has no backward pass for the head dims. If one of them exceeds 128, only
    the pairs (192, 128) and (256, 256) have a backward pass.
    """
    pair = (params.head_dim, params.value_dim)
    has_backward = max(pair) <= 128 or pair in ((192, 128), (256, 256))
    supported = takes_d256(machine) and (machine.cudnn or 0) > 92200
    return params.requires_grad and supported and not has_backward


def decode_disabled(params: AttentionParams, machine: Machine) -> bool:
    """Return whether the cuDNN version corrupts single-query calls on SM 10.x and 11.x."""
    version = machine.cudnn or 0
    affected = 91900 <= version <= 92500 and version != 92401
    return params.seq_q == 1 and machine.major in (10, 11) and affected


def non_finite_gradients(params: AttentionParams, machine: Machine) -> bool:
    """Return whether cuDNN can produce non-finite gradients. This happens before 9.26 on SM90, in
    non-causal training with a seq_kv of 64 modulo 128.
    """
    shape = not params.is_causal and params.seq_kv % 128 == 64
    return params.requires_grad and sm90(machine) and shape and (machine.cudnn or 0) < 92600


def fa4_capability(params: AttentionParams, machine: Machine) -> bool | None:
    """Return whether FA4 is active on a GPU whose compute capability it does not support.

    Return None if this is unknown, which applies to 9.x and 10.x other than 9.0 and 10.0.
    """
    if params.flash_impl != "FA4" or machine.capability in ((9, 0), (10, 0)):
        return False
    return None if machine.major in (9, 10) else True


# Known failures of a backend that accepts the call. They were observed on an H200 with 2.11. From
# 2.13 on, the dispatcher checks the alignment itself.
HAZARDS: dict[str, tuple[Rule, ...]] = {
    "efficient": (Rule(
        "alignment", "kernel", misaligned,
        "The storage offset is not aligned, so the efficient kernel can fail with `CUDA error: misaligned address`, "
        "after which the process cannot use CUDA. Copy the inputs with clone() first.",
        until=(2, 13)),),
    "cudnn": (Rule(
        "last_dim_stride", "kernel", lambda p, _: p.batch_stride_zero and p.head_dim != p.value_dim,
        "The batch is expanded with stride 0 and head_dim_v differs from head_dim, so cuDNN raises `The stride for "
        "the last dimension … should be 1`. Make the inputs contiguous first.",
        (2, 11), (2, 12)),),
}  # fmt: skip


_SIZES = "Query.sizes(): {p.query_sizes}, Key.sizes(): {p.key_sizes}, Value.sizes(): {p.value_sizes} instead."
# Up to 2.14, the message about the number of heads is worded differently from the message about the
# batch size.
_HEADS_SIZES = "Query.sizes(): {p.query_sizes}, Key sizes(): {p.key_sizes}, Value sizes(): {p.value_sizes} instead."
_DENSE_HEADS = (
    "For dense input, both fused kernels require query, key and value to have the same num_heads. "
    + _HEADS_SIZES
)
_EXPAND = " To broadcast dense inputs, try using unsqueeze and expand_to before passing them into the kernel."
DIMS = "Got Query.size(-1): {p.head_dim}, Key.size(-1): {p.head_dim}, Value.size(-1): {p.value_dim} instead."
_GROUPS = "Got input Key sizes(): {p.kv_heads}, Value sizes(): {p.value_heads}, Query sizes(): {p.heads} instead."
_MASK_SHAPES = (
    "Please use the following attn mask shapes: 2d - ({{Q_seq_len, 1}}  x {{KV_seq_len, 1}}); "
    "4d - ({{Batch, 1}} x {{Num_heads, 1}} x {{Q_seq_len, 1}}  x {{KV_seq_len, 1}})"
)


def capability_rule(kernel: str, oldest: tuple[int, int]) -> Rule:
    def text(_: AttentionParams, machine: Machine) -> str:
        major, minor = newest_sm(machine)
        return (
            f"{kernel} only supports gpu architectures in the range [sm{oldest[0]}{oldest[1]}, sm{major}{minor}]. "
            f"Attempting to run on a sm {machine.sm} gpu."
        )

    return Rule(
        "capability", "hardware", lambda _, m: not oldest <= m.capability <= newest_sm(m), text
    )


def dtype_rule(allowed: Dtypes) -> Rule:
    def text(params: AttentionParams, machine: Machine) -> str:
        names = ", ".join(DTYPES[name].message for name in allowed(params, machine))
        got = DTYPES[params.dtype].message
        return (
            f"Expected query, key and value to all be of dtype: {{{names}}}. "
            f"Got Query dtype: {got}, Key dtype: {got}, and Value dtype: {got} instead."
        )

    return Rule("dtype", "dtypes", lambda p, m: p.dtype not in allowed(p, m), text)


# Rules that several tables share.
ON_DEVICE = Rule(
    "not_on_cuda", "on_device", lambda p, _: p.device != CUDA,
    "All tensors need to be on cuda device. Got query on device: {p.device}, key on device: {p.device}, "
    "value on device: {p.device}",
)  # fmt: skip
FOUR_D = Rule(
    # From 2.14 on, the front end adds a batch dimension to 3-D inputs.
    "not_4d", "tensor_shapes", lambda p, m: p.ndim not in ((3, 4) if m.torch >= (2, 14) else (4,)),
    "All fused kernels requires query, key and value to be 4 dimensional, but got Query dim: {p.ndim}, "
    "Key dim: {p.ndim}, Value dim: {p.ndim} instead.",
)  # fmt: skip
ZERO_LENGTH = Rule(
    "seq_len_zero", "nonzero_lengths", lambda p, _: 0 in (p.seq_q, p.seq_kv),
    "All fused kernels do not support zero seq_len_q or seq_len_kv.",
)  # fmt: skip


# check_attn_mask_shape has three conditions. PyTorch has no text for the first two.
MASK_RULES = (
    Rule("mask_grad", "mask_shape", lambda p, _: p.mask is not None and p.mask.requires_grad,
         "attn_mask requires a gradient."),
    Rule("mask_shape", "mask_shape", mask_rows,
         "The last two dimensions of attn_mask do not fit. " + _MASK_SHAPES),
    Rule("mask_shape", "mask_shape", mask_shape, _MASK_SHAPES),
)  # fmt: skip


def stride_rule(singleton_ok: bool, mask_matters: bool = True) -> Rule:
    """Return a rule that refuses a last dimension whose stride is not 1.

    If `singleton_ok` is true, a head_dim of 1 may have any stride. If `mask_matters` is true, the
    rule also checks attn_mask.
    """

    def refuses(params: AttentionParams, _: Machine) -> bool:
        inputs = params.last_stride != 1 and not (singleton_ok and params.head_dim == 1)
        mask = params.mask is not None and params.mask.last_stride != 1
        return inputs or (mask_matters and mask)

    def text(params: AttentionParams, _: Machine) -> str:
        step = params.last_stride
        inputs = (
            "All fused kernels require the last dimension of the input to have stride 1. "
            f"Got Query.stride(-1): {step}, Key.stride(-1): {step}, Value.stride(-1): {step}"
        )
        if params.mask is None:
            return inputs
        return (
            f"{inputs}, Attn_mask.stride(-1): {params.mask.last_stride} (GPU backends require attn_mask's last "
            "dimension to have stride 1 while the CPU does not)."
        )

    return Rule("last_dim_stride", "last_stride", refuses, text)


def head_rules(
    gqa: Release, since: Release = OLDEST, same_kv: bool = True, mqa: Release = (2, 14)
) -> tuple[Rule, ...]:
    """Return the rules of check_batch_size_and_num_heads_dense.

    From release `gqa` on, the backend supports enable_gqa. From release `mqa` on, it broadcasts a
    single key and value head even without enable_gqa. If `same_kv` is true, calls with enable_gqa
    need the same number of heads in key and value.
    """

    def heads_differ(params: AttentionParams, machine: Machine) -> bool:
        one_head = machine.torch >= mqa and params.kv_heads == params.value_heads == 1
        return not (params.same_heads or one_head)

    def differ(params: AttentionParams, machine: Machine) -> str:
        late = f"For dense inputs, both fused kernels require query, key and value to have the same num_heads. {_SIZES}"
        text = _DENSE_HEADS if machine.torch < (2, 15) else late
        return (text + _EXPAND).format(p=params)

    def rule(refuses: Condition, message: Message, since: Release, until: Release = NEVER) -> Rule:
        return Rule("num_heads", "num_heads", refuses, message, since, until)

    def unequal(params: AttentionParams, _: Machine) -> bool:
        return same_kv and params.enable_gqa and params.kv_heads != params.value_heads

    start = max(since, gqa)
    same = "Both fused kernels require key and value to have the same num_heads"
    divide = "the number of heads in key/value must divide number of heads in query."
    return (
        Rule("batch_size", "num_heads", lambda p, _: p.key_batch != p.batch,
             "For dense inputs, both fused kernels require query, key and value to have the same batch_size. "
             + _SIZES + _EXPAND, since),
        rule(heads_differ, differ, since, gqa),
        rule(lambda p, m: not p.enable_gqa and heads_differ(p, m), differ, start),
        rule(unequal, same + " and batch_size but got: Key sizes: {p.key_sizes}, Value sizes: {p.value_sizes}, "
             "Query sizes: {p.query_sizes} instead.", start, (2, 15)),
        rule(unequal, same + ". Got Key num_heads: {p.kv_heads}, Value num_heads: {p.value_heads} instead.",
             max(start, (2, 15))),
        rule(heads_not_divisible,
             "FlashAttentionV2 only supports grouped query attention, where " + divide + _GROUPS, start, (2, 8)),
        rule(heads_not_divisible, "T" + divide[1:] + _GROUPS, max(start, (2, 8))),
    )  # fmt: skip


def grid_rule(backend: str, check: str, since: Release) -> Rule:
    text = f"{backend} does not support batch size or num_heads greater than 65535. "
    return Rule("grid_size", check, lambda p, _: max(p.batch, p.heads) > 65535,
                text + "Got batch size: {p.batch}, num_heads: {p.heads}", since)  # fmt: skip


NO_MASK = Rule(
    "mask", "for_attn_mask", lambda p, _: p.mask is not None,
    "Flash Attention does not support non-null attn_mask.",
)  # fmt: skip
TRAINING_LARGE_HEADS = Rule(
    "head_dim_training", "head_dim_gt192", training_large_heads,
    "Flash attention currently doesn't support training with head_dim ∈ (192, 224] or (head_dim ∈ (224, 256] "
    "and dropout > 0.0) on gpu architectures in the range[sm86, sm89]. Attempting to run with dropout set to: "
    "{p.dropout} and head_dim: {p.head_dim} on a sm {m.sm} gpu.",
)  # fmt: skip
SQUARE_CAUSAL = Rule(
    "causal_non_square", "causal_non_square", lambda p, _: p.is_causal and p.seq_q != p.seq_kv,
    "Flash attention does not support the is_causal flag when seqlen_q != seqlen_k. Got seqlen_q: {p.seq_q} "
    "seqlen_k: {p.seq_kv}. If you would like to use causal attention with non-square masks, please see "
    "CausalAttnMask.",
)  # fmt: skip


def disabled(backend: str, name: str, since: Release = OLDEST, until: Release = NEVER) -> Rule:
    text = f"{name} attention has been runtime disabled."
    code = DISABLED
    return Rule(code, code, lambda p, _: backend not in p.enabled, text, since, until)


FLASH = (
    disabled("flash", "Flash"),
    ON_DEVICE,
    FOUR_D,
    NO_MASK,
    Rule("capability", "fa4_constraints", fa4_capability,
         "FA4 requires compute capability 9.0 or 10.0.", (2, 15)),
    Rule("dropout", "fa4_constraints", lambda p, _: p.flash_impl == "FA4" and p.dropout > 0,
         "FA4 does not support dropout.", (2, 15)),
    # it is unknown which head dims FA4 supports
    Rule("head_dim", "fa4_constraints", lambda p, _: None if p.flash_impl == "FA4" else False,
         "FA4 does not support the provided head dimensions.", (2, 15)),
    Rule("head_dim", "head_dim_size", lambda p, _: p.head_dim != p.value_dim or p.head_dim > 256,
         "Flash attention requires q,k,v to have the same last dimension and to be less than or equal to 256. "
         + DIMS),
    capability_rule("Flash attention", (8, 0)),
    TRAINING_LARGE_HEADS,
    SQUARE_CAUSAL,
    dtype_rule(flash_dtypes),
    *head_rules(gqa=(2, 5)),
    grid_rule("Flash attention", "grid_size", (2, 15)),
    ZERO_LENGTH,
    stride_rule(singleton_ok=True),
)  # fmt: skip


EFFICIENT = (
    disabled("efficient", "Memory Efficient"),
    ON_DEVICE,
    capability_rule("Mem Efficient Attention", (5, 0)),
    FOUR_D,
    Rule("head_dim_multiple", "head_dim_size",
         lambda p, m: any(dim == 0 or dim % gemm_alignment(p, m) for dim in (p.head_dim, p.value_dim)),
         lambda p, m: "Mem efficient attention requires last dimension of inputs to be divisible by "
         f"{gemm_alignment(p, m)}. " + DIMS.format(p=p)),
    Rule("alignment", "data_ptr_alignment", misaligned,
         lambda p, m: "Mem efficient attention on sm80 or newer requires q, k, and v storage offsets * element_size "
         f"to be aligned to {alignment_bytes(p, m)} bytes. Got {p.storage_offset_bytes} bytes.",
         (2, 13)),
    ZERO_LENGTH,
    stride_rule(singleton_ok=False),
    *head_rules(gqa=(2, 14)),
    dtype_rule(lambda _, m: ("fp16", "fp32", "bf16") if m.major >= 8 else ("fp16", "fp32")),
)  # fmt: skip


CUDNN = (
    Rule("dropout", "version_dropout", lambda p, m: p.dropout > 0 and 91100 < (m.cudnn or 0) < 91400,
         "{m.cudnn} cuDNN version does not support dropout in SDPA (9.11 - 9.13).", (2, 9)),
    disabled("cudnn", "CuDNN", until=(2, 9)),
    disabled("cudnn", "cuDNN", (2, 9)),
    ON_DEVICE,
    FOUR_D,
    Rule("deterministic", "deterministic", lambda p, _: p.deterministic == "error",
         "cuDNN SDPA is not deterministic."),
    dtype_rule(low_precision),
    *MASK_RULES,
    capability_rule("cuDNN MHA", (8, 0)),
    Rule("dropout", "cudnn_dropout", lambda p, _: (p.dropout * 16) % 1 != 0,
         "cuDNN dropout probability resolution is limited to 1/16.Use a dropout probability that is a multiple of "
         "1/16 to select the cuDNN backend", (2, 12)),
    ZERO_LENGTH,
    stride_rule(singleton_ok=True),
    *head_rules(gqa=(2, 8), since=(2, 8), same_kv=False),
    grid_rule("cuDNN SDPA", "cudnn_shapes", (2, 13)),
    Rule("head_dim", "cudnn_shapes", lambda p, m: max(p.head_dim, p.value_dim) > cudnn_head_dim_limit(p, m),
         lambda p, m: f"head_dim should be no more than {cudnn_head_dim_limit(p, m)}"),
    Rule("head_dim_multiple", "cudnn_shapes", lambda p, _: p.head_dim % 8 != 0 or p.value_dim % 8 != 0,
         "head_dim should be a multiple of 8"),
    Rule("seq_len_one", "cudnn_shapes", lambda p, _: None if p.seq_kv == 1 else False,
         "cudnn SDPA does not support key/value sequence length 1.", until=(2, 6)),
    Rule("seq_len_one", "cudnn_shapes", lambda p, _: p.seq_q == 1 or p.seq_kv == 1,
         "cudnn SDPA does not support sequence length 1.", (2, 6), (2, 9)),
    Rule("seq_len_one", "cudnn_shapes", lambda p, _: p.seq_kv == 1,
         "cudnn SDPA does not support key/value sequence length 1.", (2, 9)),
    Rule("seq_len_one", "cudnn_shapes", lambda p, _: p.seq_q == 1 and p.dropout > 0,
         "cudnn SDPA does not support query sequence length 1 with dropout.", (2, 9)),
    Rule("decode_disabled", "cudnn_shapes", decode_disabled,
         "cuDNN SDPA decode is disabled for cuDNN versions 9.19-9.25.0 (except 9.24.1) on SM 10.x and 11.x.",
         (2, 14)),
    Rule("head_dim_training", "d256_bprop_head_dim", cudnn_backward_dims,
         "cuDNN SDPA on SM 9.0/10.x does not support backward with these head dimensions. Got d_qk: {p.head_dim}, "
         "d_v: {p.value_dim}", (2, 14)),
    Rule("known_bug", "sm90_gradients", non_finite_gradients,
         "cuDNN SDPA before version 9.26 can produce non-finite query gradients on SM90 for non-causal attention "
         "when the key/value sequence length is 64 modulo 128.", (2, 15)),
)  # fmt: skip


# The dispatcher does not check whether a call has both a mask and is_causal. If it selects math,
# the code of math raises an exception. The fused backends apply both the mask and is_causal
# (measured on an H100 with 2.11 and on a CPU with 2.13).
RAISED_LATER = "causal_mask"
CAUSAL_MASK = (
    "_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True"
)
MATH = (
    disabled("math", "Math"),
    Rule(RAISED_LATER, "math_call",
         lambda p, _: p.is_causal and p.mask is not None and 0 not in (p.seq_q, p.seq_kv), CAUSAL_MASK),
)  # fmt: skip
CPU_FLASH = (
    disabled("flash", "Flash"),
    Rule("dropout", "dropout", lambda p, _: p.dropout > 0,
         "Both fused kernels do not support non-zero dropout."),
    FOUR_D,
    *head_rules(gqa=(2, 5)),
    Rule("num_heads", "num_heads", lambda p, _: None if p.enable_gqa and not p.same_heads else False,
         _DENSE_HEADS, until=(2, 13)),
    *MASK_RULES,
    Rule("head_dim", "head_dim_size", lambda p, _: p.head_dim != p.value_dim,
         "Flash attention requires q,k,v to have the same last dimension. " + DIMS),
    ZERO_LENGTH,
    stride_rule(singleton_ok=False, mask_matters=False),
    dtype_rule(lambda *_: ("fp32", "fp64", "bf16", "fp16")),
)  # fmt: skip
