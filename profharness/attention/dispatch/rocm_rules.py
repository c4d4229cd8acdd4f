"""Dispatch rules on AMD GPUs: the `#ifdef USE_ROCM` parts of PyTorch's sdp_utils.

The rules come from the source of sdp_utils.cpp before 2.6 and at 2.10, 2.11, 2.14 and later, and
from the pull requests between them. Anything that these sources leave open counts as unknown. The checks
that CUDA and ROCm share are imported from `rules.py`.
"""

from __future__ import annotations

from profharness.attention.dispatch.machine import OLDEST, AttentionParams, Machine, Release
from profharness.attention.dispatch.rocm import (
    AOTRITON,
    CK,
    EXPERIMENTAL_VARIABLE,
    PREFERS_CK,
    Version,
    ck_architectures,
    kernels_of,
    version_text,
)
from profharness.attention.dispatch.rules import (
    DIMS,
    FOUR_D,
    NEVER,
    NO_MASK,
    ON_DEVICE,
    SQUARE_CAUSAL,
    TRAINING_LARGE_HEADS,
    ZERO_LENGTH,
    Condition,
    Message,
    Rule,
    disabled,
    dtype_rule,
    head_rules,
    stride_rule,
)
from profharness.dtypes import CONFIG_DTYPES, HALF

ANY_VALUE_DIM: Version = (0, 12, 0)
"""The first version of AOTriton that supports a head_dim_v other than head_dim."""


def version(machine: Machine) -> Version:
    """Return the version of AOTriton. `judge` fills in an unknown version before it calls a rule."""
    return machine.aotriton or min(machine.aotriton_versions)


def library(machine: Machine) -> str:
    """Return the library that computes flash and efficient.

    CK is returned only where PyTorch accepts CK.
    """
    known = machine.torch >= PREFERS_CK
    accepted = known and machine.architecture in ck_architectures(machine.torch)
    return CK if machine.fa_library == CK and accepted else AOTRITON


def library_text(machine: Machine) -> str:
    """Return the library that computes flash and efficient, such as `AOTriton 0.11.2b` or `CK`."""
    if library(machine) == CK:
        return "CK"
    return f"AOTriton {' or '.join(map(version_text, machine.aotriton_versions))}".rstrip()


def max_head_dim(machine: Machine) -> int:
    """Return the largest head_dim that PyTorch accepts. This is the limit of AOTriton even if CK is
    preferred, because PyTorch does not check which library is used.
    """
    minor = version(machine)[:2]
    if minor == (0, 11) and str(machine.architecture).startswith("gfx11"):
        return 256
    return 512 if minor >= (0, 9) else 256


def alignment(params: AttentionParams) -> int:
    """Return the number of elements in 16 bytes.

    The efficient kernels need a multiple of this number.
    """
    return 8 if params.dtype in HALF else 4


def misaligned_dims(params: AttentionParams) -> bool:
    dims = (params.head_dim, params.value_dim)
    return any(dim == 0 or dim % alignment(params) for dim in dims)


def bad_dims(params: AttentionParams, machine: Machine) -> bool:
    return params.head_dim != params.value_dim or params.head_dim > max_head_dim(machine)


def unpadded(params: AttentionParams, machine: Machine) -> bool | None:
    """Return whether efficient refuses dims that are not multiples of 16 bytes.

    The check was added while 2.9 was being released, and it is unknown whether 2.9 has it.
    """
    refused = misaligned_dims(params)
    return None if refused and machine.torch < (2, 10) else refused


def nested_dims(params: AttentionParams, machine: Machine) -> bool:
    """Return whether PyTorch 2.13 and newer refuse the head dims with AOTriton before 0.12."""
    limits = params.head_dim % 8 or params.head_dim > 256
    old = version(machine) < ANY_VALUE_DIM
    return old and bool(limits or params.head_dim != params.value_dim)


def _unaligned_text(params: AttentionParams, _: Machine) -> str:
    return (
        "Mem efficient attention requires last dimension of inputs to be divisible by "
        f"{alignment(params)}. " + DIMS.format(p=params)
    )


def _too_large_text(params: AttentionParams, machine: Machine) -> str:
    return (
        "Mem efficient attention on ROCM requires last dimension of inputs to less or equal than "
        f"{max_head_dim(machine)}. {DIMS.format(p=params)} (Note this limit differs among "
        "architectures)"
    )


def no_kernels(_: AttentionParams, machine: Machine) -> bool:
    # If CK is preferred, PyTorch accepts every architecture without a check.
    supported = machine.architecture in kernels_of(version(machine)).architectures
    return library(machine) != CK and not supported


def experimental(_: AttentionParams, machine: Machine) -> bool:
    gated = machine.architecture in kernels_of(version(machine)).experimental
    return library(machine) != CK and gated and not machine.experimental


def hardware_rules(name: str, long_name: str, navi_name: str) -> tuple[Rule, ...]:
    """Return the rules of check_…_hardware_support, with the names in PyTorch's messages."""
    enable = f" Enable it with {EXPERIMENTAL_VARIABLE}=1."
    return (
        Rule("capability", "hardware", no_kernels,
             f"{name} was not compiled for current AMD GPU architecture. Attempting to run on architecture "
             "{m.architecture}"),
        # PyTorch 2.5 itself restricts gfx1100. Its AOTriton has no experimental architectures.
        Rule("experimental", "hardware",
             lambda _, m: m.architecture == "gfx1100" and not m.experimental,
             f"{navi_name} support on Navi31 GPU is still experimental.{enable}", until=(2, 6)),
        Rule("experimental", "hardware", experimental,
             f"{long_name} on Current AMD GPU is still experimental.{enable}", (2, 7)),
    )  # fmt: skip


_SAME_DIMS = (
    " requires q,k,v to have the same last dimension and to be less than or equal to 256. " + DIMS
)
ROCM_FLASH = (
    disabled("flash", "Flash"),
    ON_DEVICE,
    FOUR_D,
    NO_MASK,
    # PyTorch's message says 256 even if the limit is 512
    Rule("head_dim", "head_dim_size", bad_dims, "Flash attention" + _SAME_DIMS),
    *hardware_rules("Flash attention", "Flash Efficient attention", "Flash attention"),
    TRAINING_LARGE_HEADS,
    SQUARE_CAUSAL,
    dtype_rule(lambda *_: HALF),
    *head_rules(gqa=(2, 6)),
    ZERO_LENGTH,
    stride_rule(singleton_ok=True),
)


_VALUE_DIM: Release = (2, 13)
"""The first release in which the efficient backend has its own check of the head dims."""


def _own_check(code: str, refuses: Condition, message: Message) -> Rule:
    return Rule(code, "head_dim_size", refuses, message, _VALUE_DIM)


ROCM_EFFICIENT = (
    disabled("efficient", "Memory Efficient"),
    ON_DEVICE,
    *hardware_rules("Mem Efficient attention", "Mem Efficient attention", "Memory Efficient attention"),
    FOUR_D,
    Rule("head_dim", "head_dim_size", bad_dims, "Flash attention" + _SAME_DIMS, OLDEST, (2, 6)),
    Rule("head_dim", "head_dim_size", bad_dims, "Efficient attention on ROCM" + _SAME_DIMS,
         (2, 6), _VALUE_DIM),
    Rule("head_dim_multiple", "head_dim_size", unpadded, _unaligned_text, (2, 9), _VALUE_DIM),
    _own_check("head_dim_multiple", nested_dims,
         "For NestedTensor inputs, Efficient attention on ROCM  requires q,k,v to have the same last dimension and "
         "to be a multiple of 8 and less than or equal to 256. " + DIMS),
    _own_check("head_dim_multiple",
         lambda p, m: version(m) >= ANY_VALUE_DIM and misaligned_dims(p), _unaligned_text),
    _own_check("head_dim",
         lambda p, m: version(m) >= ANY_VALUE_DIM and max(p.head_dim, p.value_dim) > max_head_dim(m),
         _too_large_text),
    ZERO_LENGTH,
    stride_rule(singleton_ok=False),
    *head_rules(gqa=NEVER, mqa=NEVER),
    dtype_rule(lambda _, m: HALF if library(m) == CK and m.torch >= (2, 8) else CONFIG_DTYPES),
)  # fmt: skip
ROCM_CUDNN = (
    Rule("not_compiled", "cudnn", lambda *_: True, "Torch was not compiled with cuDNN attention."),
)


# Known and possible failures of a backend that accepts the call.
ROCM_HAZARDS: dict[str, tuple[Rule, ...]] = {
    "flash": (
        Rule("head_dim", "kernel",
             lambda p, m: library(m) == CK and p.head_dim > 256,
             "PyTorch accepts a head_dim of up to 512 for every library, but CK raises `CK only supports "
             "head dimension at most 256`.", (2, 7)),
        Rule("head_dim", "kernel",
             lambda p, m: library(m) != CK and p.head_dim > 256,
             "PyTorch 2.7 accepts a head_dim of up to 512, but its flash code may raise `only supports head dimension "
             "at most 256`: it is unknown whether 2.7 contains the fix (pull request 148967).",
             (2, 7), (2, 8)),
    ),
    "efficient": (
        Rule("causal_non_square", "kernel",
             lambda p, _: p.is_causal and p.seq_q != p.seq_kv,
             "AOTriton 0.7 aligns the causal mask with the last key if the lengths differ, but is_causal aligns it "
             "with the first key. The result may be wrong; use attn_mask instead.", until=(2, 6)),
        Rule("head_dim", "kernel",
             lambda p, m: library(m) == CK and max(p.head_dim, p.value_dim) > 256,
             "PyTorch accepts a head_dim of up to 512 for every library, but CK supports at most 256.",
             (2, 7)),
        Rule("alignment", "kernel", lambda p, _: misaligned_dims(p),
             "PyTorch accepts this head_dim, but the efficient kernels need rows whose size is a multiple of "
             "16 bytes, and PyTorch pads rows only for flash. The call may fail or return wrong values; pad "
             "head_dim first.",
             until=(2, 9)),
    ),
}  # fmt: skip
