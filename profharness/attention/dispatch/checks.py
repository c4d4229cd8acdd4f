"""The conditions in PyTorch's dispatch checks, as functions of params and machine.

Each returns True (refused), False (accepted) or None (unknown).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from profharness.attention.dispatch.machine import AttentionParams, Machine, Release
from profharness.device_types import CUDA
from profharness.dtypes import HALF

Condition = Callable[[AttentionParams, Machine], bool | None]
CPU_DTYPES = ("fp32", "fp64", "bf16", "fp16")
# The newest architecture that a release's fused backends accept.
NEWEST_SM: tuple[tuple[Release, tuple[int, int]], ...] = (
    ((2, 5), (9, 0)),
    ((2, 7), (12, 0)),
    ((2, 8), (12, 1)),
)


def runtime_cudnn(machine: Machine) -> int:
    return machine.cudnn or 0


def compiled_cudnn(machine: Machine) -> int:
    return machine.cudnn_compiled or 0


class HeadDimLimit(NamedTuple):
    """The largest head_dim that cuDNN accepts in a span of releases on some architectures."""

    since: Release
    until: Release
    """The first release without the limit."""
    limit: int
    min_cudnn: int
    fits: Callable[[Machine], bool]
    only: tuple[int, int] | None = None
    """The one pair of (head_dim, head_dim_v) that the limit applies to."""
    version: Callable[[Machine], int] = runtime_cudnn
    """The version that the release compares with `min_cudnn`."""


def sm90(machine: Machine) -> bool:
    return machine.capability == (9, 0)


def sm90_or_10x(machine: Machine) -> bool:
    return sm90(machine) or machine.major == 10


def takes_d256(machine: Machine) -> bool:
    """Return whether 2.14 and newer allow cuDNN a head_dim of 256. cuDNN 9.25.1 added sm 10.7."""
    too_new = machine.capability == (10, 7) and (machine.cudnn or 0) <= 92500
    return sm90_or_10x(machine) and not too_new


NEVER = (99,)
# The first matching row decides; without one the limit is 128. Up to 2.9.0 the binaries call
# versionCuDNN(), the build's version, from 2.9.1 on cudnnGetVersion(). The 2.9.0 wheels stop at 128.
CUDNN_HEAD_DIM = (
    HeadDimLimit((2, 8), (2, 9), 256, 90501, sm90, version=compiled_cudnn),
    HeadDimLimit((2, 9), (2, 9, 1), 256, 91000, sm90, version=compiled_cudnn),
    HeadDimLimit((2, 9, 1), (2, 14), 256, 91000, sm90),
    HeadDimLimit((2, 11), (2, 14), 192, 91100, lambda m: m.major == 10, (192, 128)),
    HeadDimLimit((2, 14), NEVER, 256, 92201, takes_d256),
    HeadDimLimit((2, 14), NEVER, 192, 91100, sm90_or_10x, (192, 128)),
)


def newest_sm(machine: Machine) -> tuple[int, int]:
    return next(sm for since, sm in reversed(NEWEST_SM) if machine.torch >= since)


def cudnn_head_dim_limit(params: AttentionParams, machine: Machine) -> int:
    """Return the largest head_dim that cuDNN accepts. Both cuDNN versions must be known."""
    pair = (params.head_dim, params.value_dim)
    for row in CUDNN_HEAD_DIM:
        if (
            row.since <= machine.torch < row.until
            and row.version(machine) >= row.min_cudnn
            and row.fits(machine)
            and row.only in (None, pair)
        ):
            return row.limit
    return 128


def gemm_alignment(params: AttentionParams, machine: Machine) -> int:
    """Return the number of elements that head_dim must be a multiple of for the efficient kernels."""
    half = params.dtype in HALF
    tensor_cores = machine.major >= 8 or (machine.major == 7 and half)
    wide = (8 if half else 4) if tensor_cores else 1
    return max(wide, 4 if machine.major >= 8 else 1)


def dims_unaligned(params: AttentionParams, machine: Machine) -> bool:
    """Return whether head_dim or head_dim_v is not a positive multiple of `gemm_alignment`."""
    dims = (params.head_dim, params.value_dim)
    return any(dim == 0 or dim % gemm_alignment(params, machine) for dim in dims)


def alignment_bytes(params: AttentionParams, machine: Machine) -> int:
    """Return the number of bytes that storage offsets must be a multiple of."""
    return gemm_alignment(params, machine) * params.itemsize


def outside(oldest: tuple[int, int]) -> Condition:
    """Return a check that the GPU is older than `oldest` or newer than the release supports."""
    return lambda _, machine: not oldest <= machine.capability <= newest_sm(machine)


def low_precision(_: AttentionParams, machine: Machine) -> tuple[str, ...]:
    """Return the 16-bit dtypes: bf16 from sm80 on."""
    return HALF if machine.major >= 8 else ("fp16",)


def flash_dtypes(params: AttentionParams, machine: Machine) -> tuple[str, ...]:
    """Return the dtypes of flash, with fp8 if FA3 is active on sm90 and newer (from 2.11 on)."""
    fa3 = params.flash_impl == "FA3" and machine.major >= 9 and machine.torch >= (2, 11)
    return ("fp8_e4m3", *HALF) if fa3 else low_precision(params, machine)


def efficient_dtypes(_: AttentionParams, machine: Machine) -> tuple[str, ...]:
    """Return the dtypes of the efficient kernels: bf16 from sm80 on."""
    return ("fp16", "fp32", "bf16") if machine.major >= 8 else ("fp16", "fp32")


def training_large_heads(params: AttentionParams, machine: Machine) -> bool:
    """Return whether flash's backward lacks shared memory for the head_dim.

    On sm86 to sm89 (from 2.7 on also sm120, from 2.15 on sm121) it does for head_dim in (192, 224],
    and for larger ones with dropout.
    """
    newest = 1 if machine.torch >= (2, 15) else 0
    small = (8, 6) <= machine.capability <= (8, 9) or (
        machine.torch >= (2, 7) and (12, 0) <= machine.capability <= (12, newest)
    )
    large = 192 < params.head_dim <= 224 or (params.head_dim > 224 and params.dropout > 0)
    return params.requires_grad and small and large


def heads_differ(gqa: bool) -> Condition:
    """Return a check for unequal heads. With `gqa`, enable_gqa allows them."""

    def check(params: AttentionParams, machine: Machine) -> bool:
        # 2.14 and newer broadcast a single key and value head without enable_gqa.
        one_head = machine.torch >= (2, 14) and params.kv_heads == params.value_heads == 1
        return not ((gqa and params.enable_gqa) or params.same_heads or one_head)

    return check


def heads_not_divisible(params: AttentionParams, _: Machine) -> bool:
    """Return whether enable_gqa is set and the key or value heads do not divide the query heads."""
    groups = (params.kv_heads, params.value_heads)
    return params.enable_gqa and any(params.heads % max(heads, 1) for heads in groups)


def strided(singleton_ok: bool, mask_matters: bool = True) -> Condition:
    """Return a check for a last dimension with a stride other than 1.

    With `singleton_ok`, a head_dim of 1 may have any stride. With `mask_matters`, the check includes
    attn_mask.
    """

    def check(params: AttentionParams, _: Machine) -> bool:
        inputs = params.last_stride != 1 and not (singleton_ok and params.head_dim == 1)
        mask = params.mask is not None and params.mask.last_stride != 1
        return inputs or (mask_matters and mask)

    return check


def mask_rows(params: AttentionParams, _: Machine) -> bool:
    """Return whether the last two dimensions of attn_mask are neither the sequence lengths nor 1."""
    mask = params.mask
    if mask is None or len(mask.shape) < 2:
        return False
    return mask.shape[-2] not in (params.seq_q, 1) or mask.shape[-1] not in (params.seq_kv, 1)


def mask_shape(params: AttentionParams, machine: Machine) -> bool:
    """Return whether attn_mask is neither 2-D nor broadcasts to [batch, heads, seq_q, seq_kv]."""
    mask = params.mask
    if mask is None or mask_rows(params, machine) or len(mask.shape) == 2:
        return False
    lead = mask.shape[:-2]
    return len(lead) != 2 or lead[0] not in (params.batch, 1) or lead[1] not in (params.heads, 1)


def misaligned(params: AttentionParams, machine: Machine) -> bool:
    """Return whether storage offsets are misaligned for the efficient kernels on sm80 and newer."""
    return machine.major >= 8 and params.storage_offset_bytes % alignment_bytes(params, machine) > 0


def cudnn_backward_dims(params: AttentionParams, machine: Machine) -> bool:
    """Return whether cuDNN has no backward for the head dims. Above 128, (192, 128) and (256, 256) do."""
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
    """Return whether cuDNN can produce non-finite gradients: before 9.26 on SM90, in non-causal training
    with seq_kv 64 modulo 128.
    """
    shape = not params.is_causal and params.seq_kv % 128 == 64
    return params.requires_grad and sm90(machine) and shape and (machine.cudnn or 0) < 92600


def fa4_capability(params: AttentionParams, machine: Machine) -> bool | None:
    """Return whether FA4 is active on an unsupported architecture. It is unknown if 10.3 is supported."""
    if params.flash_impl != "FA4" or machine.capability in ((9, 0), (10, 0)):
        return False
    return None if machine.major in (9, 10) else True


class Hazard(NamedTuple):
    """A known failure of a backend in a span of releases."""

    backend: str
    since: Release
    until: Release
    """The first release without the failure."""
    applies: Callable[[AttentionParams, Machine], bool]
    text: str


# Seen on an H200 with 2.11. The dispatcher checks the alignment from 2.13 on.
HAZARDS = (
    Hazard("efficient", (2, 5), (2, 13), misaligned,
           "The storage offset is not aligned: the efficient kernel can die with `CUDA error: misaligned address`, "
           "which ends the process's CUDA context. Copy the inputs with clone() first."),
    Hazard("cudnn", (2, 11), (2, 12), lambda p, _: p.batch_stride_zero and p.head_dim != p.value_dim,
           "The batch is expanded with stride 0 and head_dim_v differs from head_dim: cuDNN raises `The stride for "
           "the last dimension … should be 1`. Make the inputs contiguous first."),
)  # fmt: skip


def hazards(backend: str, params: AttentionParams, machine: Machine) -> tuple[str, ...]:
    """Return the known failures of a call that the dispatcher accepts, each with a remedy."""
    if params.device != CUDA:
        return ()
    return tuple(
        hazard.text
        for hazard in HAZARDS
        if hazard.backend == backend
        and hazard.since <= machine.torch < hazard.until
        and hazard.applies(params, machine)
    )
