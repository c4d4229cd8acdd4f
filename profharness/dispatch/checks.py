"""The questions that PyTorch's dispatch checks ask, as small functions of params and machine.

Each returns True (refused), False (fine) or None (cannot be known from what was given or read).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from profharness.dispatch.machine import AttentionParams, Machine, Release

Check = Callable[[AttentionParams, Machine], bool | None]
LOW_PRECISION = ("fp16", "bf16")
CPU_DTYPES = ("fp32", "fp64", "bf16", "fp16")
# The newest architecture that each release accepts, for all fused backends that it has.
NEWEST_SM: tuple[tuple[Release, tuple[int, int]], ...] = (
    ((2, 1), (9, 0)),
    ((2, 7), (12, 0)),
    ((2, 8), (12, 1)),
)


def runtime_cudnn(machine: Machine) -> int:
    return machine.cudnn or 0


def compiled_cudnn(machine: Machine) -> int:
    return machine.cudnn_compiled or 0


class HeadDimLimit(NamedTuple):
    """cuDNN takes head_dim up to `limit` on these architectures from that cuDNN on; `only` limits
    it to one pair of (head_dim, head_dim_v). until: the first release without the row. version:
    which of the two versions the release compares.
    """

    since: Release
    until: Release
    limit: int
    min_cudnn: int
    fits: Callable[[Machine], bool]
    only: tuple[int, int] | None = None
    version: Callable[[Machine], int] = runtime_cudnn


def sm90(machine: Machine) -> bool:
    return machine.capability == (9, 0)


def sm90_or_10x(machine: Machine) -> bool:
    return sm90(machine) or machine.major == 10


def takes_d256(machine: Machine) -> bool:
    """Where 2.14 and newer give cuDNN heads of 256; 10.7 came with cuDNN 9.25.1."""
    too_new = machine.capability == (10, 7) and (machine.cudnn or 0) <= 92500
    return sm90_or_10x(machine) and not too_new


NEVER = (99,)
# First row that fits decides; 128 where none does. Until 2.9.0 the binaries call versionCuDNN(), the
# version of the build, from 2.9.1 on cudnnGetVersion(): the wheels of 2.9.0 end at 128.
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
    """The largest head_dim that the release gives cuDNN here; wants known cuDNN versions."""
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
    """Elements that head_dim must be a multiple of for the efficient kernels."""
    half = params.dtype in LOW_PRECISION
    tensor_cores = machine.major >= 8 or (machine.major == 7 and half)
    wide = (8 if half else 4) if tensor_cores else 1
    return max(wide, 4 if machine.major >= 8 else 1)


def dims_unaligned(params: AttentionParams, machine: Machine) -> bool:
    """head_dim or head_dim_v is no positive multiple of what the efficient kernels want."""
    dims = (params.head_dim, params.value_dim)
    return any(dim == 0 or dim % gemm_alignment(params, machine) for dim in dims)


def alignment_bytes(params: AttentionParams, machine: Machine) -> int:
    """Bytes that storage offsets must be a multiple of for the efficient kernels."""
    return gemm_alignment(params, machine) * params.itemsize


def outside(oldest: tuple[int, int]) -> Check:
    """The GPU is older than `oldest` or newer than the release's newest."""
    return lambda _, machine: not oldest <= machine.capability <= newest_sm(machine)


def low_precision(_: AttentionParams, machine: Machine) -> tuple[str, ...]:
    """The 16-bit types: bf16 from sm80 on."""
    return LOW_PRECISION if machine.major >= 8 else ("fp16",)


def flash_dtypes(params: AttentionParams, machine: Machine) -> tuple[str, ...]:
    """fp8 joins when FA3 is activated on sm90 and newer (2.11 and newer)."""
    fa3 = params.flash_impl == "FA3" and machine.major >= 9 and machine.torch >= (2, 11)
    return ("fp8", *LOW_PRECISION) if fa3 else low_precision(params, machine)


def efficient_dtypes(_: AttentionParams, machine: Machine) -> tuple[str, ...]:
    """What the efficient kernels compute in: bf16 from sm80 on."""
    return ("fp16", "fp32", "bf16") if machine.major >= 8 else ("fp16", "fp32")


def training_large_heads(params: AttentionParams, machine: Machine) -> bool:
    """Flash backward on sm86-sm89 (2.7: and sm120, 2.15: and sm121) has no room for head_dim in
    (192, 224], or above with dropout.
    """
    newest = 1 if machine.torch >= (2, 15) else 0
    small = (8, 6) <= machine.capability <= (8, 9) or (
        machine.torch >= (2, 7) and (12, 0) <= machine.capability <= (12, newest)
    )
    large = 192 < params.head_dim <= 224 or (params.head_dim > 224 and params.dropout > 0)
    return params.requires_grad and small and large


def heads_differ(gqa: bool) -> Check:
    """Heads differ and no flag allows it; gqa: whether the backend looks at enable_gqa."""

    def check(params: AttentionParams, machine: Machine) -> bool:
        # 2.14 and newer broadcast a single head of key and value without enable_gqa
        one_head = machine.torch >= (2, 14) and params.kv_heads == params.value_heads == 1
        return not ((gqa and params.enable_gqa) or params.same_heads or one_head)

    return check


def heads_or_batch_differ(params: AttentionParams, _: Machine) -> bool:
    """Key and value have another batch or other heads than query; before 2.5 nothing allows it."""
    return not params.same_heads or params.key_batch != params.batch


def heads_not_divisible(params: AttentionParams, _: Machine) -> bool:
    """enable_gqa, and the heads of key or value do not divide those of query."""
    groups = (params.kv_heads, params.value_heads)
    return params.enable_gqa and any(params.heads % max(heads, 1) for heads in groups)


def strided(singleton_ok: bool, mask_matters: bool = True) -> Check:
    """The last dimension is not contiguous; singleton_ok: a head_dim of 1 may lie anyhow."""

    def check(params: AttentionParams, _: Machine) -> bool:
        inputs = params.last_stride != 1 and not (singleton_ok and params.head_dim == 1)
        mask = params.mask is not None and params.mask.last_stride != 1
        return inputs or (mask_matters and mask)

    return check


def mask_rows(params: AttentionParams, _: Machine) -> bool:
    """The last two dimensions of attn_mask fit neither the sequence lengths nor 1."""
    mask = params.mask
    if mask is None or len(mask.shape) < 2:
        return False
    return mask.shape[-2] not in (params.seq_q, 1) or mask.shape[-1] not in (params.seq_kv, 1)


def mask_shape(params: AttentionParams, machine: Machine) -> bool:
    """attn_mask is neither 2-D nor a 4-D that broadcasts to [batch, heads, seq_q, seq_kv]."""
    mask = params.mask
    if mask is None or mask_rows(params, machine) or len(mask.shape) == 2:
        return False
    lead = mask.shape[:-2]
    return len(lead) != 2 or lead[0] not in (params.batch, 1) or lead[1] not in (params.heads, 1)


def nested_not_broadcastable(params: AttentionParams, _: Machine) -> bool:
    """Nested inputs whose heads or batch sizes differ and are not 1."""
    heads = {params.heads, params.kv_heads, params.value_heads} - {1}
    return len(heads) > 1 or len({params.batch, params.key_batch} - {1}) > 1


def misaligned(params: AttentionParams, machine: Machine) -> bool:
    """Storage offsets do not suit the efficient kernels (asked on sm80 and newer only)."""
    return machine.major >= 8 and params.storage_offset_bytes % alignment_bytes(params, machine) > 0


def cudnn_backward_dims(params: AttentionParams, machine: Machine) -> bool:
    """Backward of cuDNN's large heads exists for (192, 128) and (256, 256) only."""
    pair = (params.head_dim, params.value_dim)
    has_backward = max(pair) <= 128 or pair in ((192, 128), (256, 256))
    supported = takes_d256(machine) and (machine.cudnn or 0) > 92200
    return params.requires_grad and supported and not has_backward


def decode_disabled(params: AttentionParams, machine: Machine) -> bool:
    """One query on SM 10.x and 11.x with the cuDNN versions that corrupt it."""
    version = machine.cudnn or 0
    affected = 91900 <= version <= 92500 and version != 92401
    return params.seq_q == 1 and machine.major in (10, 11) and affected


def non_finite_gradients(params: AttentionParams, machine: Machine) -> bool:
    """cuDNN before 9.26 on SM90: training, not causal, seq_kv 64 modulo 128."""
    shape = not params.is_causal and params.seq_kv % 128 == 64
    return params.requires_grad and sm90(machine) and shape and (machine.cudnn or 0) < 92600


def fa4_capability(params: AttentionParams, machine: Machine) -> bool | None:
    """FA4 is activated on another architecture; whether 10.3 counts as 10.0 was not read."""
    if params.flash_impl != "FA4" or machine.capability in ((9, 0), (10, 0)):
        return False
    return None if machine.major in (9, 10) else True


class Hazard(NamedTuple):
    """What happens when `backend` gets a call that `applies` in these releases; until: the first
    release without it.
    """

    backend: str
    since: Release
    until: Release
    applies: Callable[[AttentionParams, Machine], bool]
    text: str


# Seen on an H200 with 2.11; the alignment has been checked by the dispatcher since 2.13. Those before
# 2.5 follow from what the binaries do not ask, and from the cuDNN op of 2.3 and 2.4, which has no mask.
HAZARDS = (
    Hazard("flash", (2, 0), (2, 2), lambda p, _: p.is_causal and p.seq_q != p.seq_kv,
           "This release gives flash is_causal with unlike lengths; whether its triangle then starts at the first or "
           "ends at the last key is not known. Pass a mask instead."),
    Hazard("cudnn", (2, 3), (2, 5), lambda p, _: p.mask is not None,
           "cuDNN's op of this release has no attn_mask, so the call would lose its mask. Unset "
           "TORCH_CUDNN_SDPA_ENABLED."),
    Hazard("efficient", (2, 5), (2, 13), misaligned,
           "The storage offset is not aligned: the efficient kernel can die with `CUDA error: misaligned address`, "
           "which ends the process's CUDA context. Copy the inputs with clone() first."),
    Hazard("cudnn", (2, 11), (2, 12), lambda p, _: p.batch_stride_zero and p.head_dim != p.value_dim,
           "The batch is expanded with stride 0 and head_dim_v differs from head_dim: cuDNN raises `The stride for "
           "the last dimension … should be 1`. Make the inputs contiguous first."),
)  # fmt: skip


def hazards(backend: str, params: AttentionParams, machine: Machine) -> tuple[str, ...]:
    """Known failures of a call on a backend that the dispatcher lets through; each says what to do."""
    if params.device != "cuda":
        return ()
    return tuple(
        hazard.text
        for hazard in HAZARDS
        if hazard.backend == backend
        and hazard.since <= machine.torch < hazard.until
        and hazard.applies(params, machine)
    )
