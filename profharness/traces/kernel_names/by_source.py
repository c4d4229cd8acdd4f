"""Find the pipeline stages and the warp roles of a kernel in the source code of its library if the
name does not show them.

Each fact names the source file that contains the fact. Some kernels have no facts, because their
source is closed or was not read. Examples are the kernels of cuDNN and cuBLAS.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from profharness.traces.kernel_names.text import KernelName

STAGES, ROLES = "stages", "warp roles"


@dataclass(frozen=True, slots=True)
class SourceFact:
    """A property of a kernel that the source code of its library shows."""

    property: str  # `stages` or `warp roles`
    meaning: str
    source: str  # the release and the files in which it was read


_FA2 = "flash-attention 2.8, csrc/flash_attn/src"
_FA3 = "flash-attention 2.8, hopper"
_FLASHINFER = "FlashInfer 0.6.18, include/flashinfer/attention"
_MEM_EFF = "PyTorch 2.13, ATen/native/transformers/cuda/mem_eff_attention"
_ALIKE = "every warp both loads data and computes"

# The library, a pattern that matches the function in a short name, and the facts
FACTS = (
    (
        "flash2",
        r"flash_fwd_(?:splitkv_)?kernel",
        (
            (
                STAGES,
                (
                    "K and V have one buffer each; V is loaded during the product of Q and K, and "
                    "the next K is loaded after this product"
                ),
                f"{_FA2}/flash_fwd_kernel.h",
            ),
            (ROLES, _ALIKE, f"{_FA2}/flash_fwd_kernel.h"),
        ),
    ),
    (
        "flash2",
        r"flash_bwd_dq_dk_dv",
        (
            (
                STAGES,
                (
                    "Q has two buffers (one if No_double_buffer is set), and the output's gradient "
                    "has one buffer"
                ),
                f"{_FA2}/kernel_traits.h",
            ),
            (ROLES, _ALIKE, f"{_FA2}/flash_bwd_kernel.h"),
        ),
    ),
    (
        "fa3",
        r"FlashAttnFwdSm90",
        (
            (
                ROLES,
                (
                    "warp group 0 is the producer, which loads data; the remaining warp groups "
                    "(one to three) are the consumers, which compute"
                ),
                f"{_FA3}/flash_fwd_kernel_sm90.h",
            ),
        ),
    ),
    (
        "fa3",
        r"FlashAttnBwdSm90",
        (
            (
                ROLES,
                "warp group 0 is the producer, in which warp 0 loads data and warp 1 writes dQ; "
                "the other warp groups are the consumers, which compute",
                f"{_FA3}/flash_bwd_kernel_sm90.h",
            ),
        ),
    ),
    ("fa3", r"FlashAttnFwdSm80", ((ROLES, _ALIKE, f"{_FA3}/flash_fwd_kernel_sm80.h"),)),
    (
        "fa4",
        r"FlashAttentionForwardSm100",
        (
            (
                ROLES,
                "warps 0-3 and 4-7 compute the softmax, warps 8-11 correct the output, warp 12 "
                "computes the products, warp 13 runs the epilogue, warp 14 loads data, and warp 15 "
                "is idle (variants without TMA differ)",
                "flash-attention, flash_attn/cute/flash_fwd_sm100.py",
            ),
        ),
    ),
    (
        "flashinfer",
        r"PrefillWithKVCacheKernel",
        (
            (
                ROLES,
                "warp group 0 is the producer, which loads data; the other warp groups are the "
                "consumers, which compute",
                f"{_FLASHINFER}/hopper/prefill_sm90.cuh",
            ),
        ),
    ),
    (
        "flashinfer",
        r"(?:Batch|Single)PrefillWith(?:Paged|Ragged)?KVCacheKernel",
        ((ROLES, _ALIKE, f"{_FLASHINFER}/prefill.cuh"),),
    ),
    (
        "flashinfer",
        r"(?:BatchDecodeWithPaged|SingleDecodeWith)KVCacheKernel(?!MLA)",
        ((ROLES, _ALIKE, f"{_FLASHINFER}/decode.cuh"),),
    ),
    (
        "efficient",
        r"fmha_cutlassF_(?:b?f16)_\w+_sm80",
        (
            (
                STAGES,
                "4 buffers, or one for every 32 elements of the head dimension if this gives fewer "
                "than 4",
                f"{_MEM_EFF}/kernel_forward.h",
            ),
        ),
    ),
    ("efficient", r"fmha_cutlassF_", ((ROLES, _ALIKE, f"{_MEM_EFF}/kernel_forward.h"),)),
)
# The libraries whose kernels are those of another library
_SAME = {"flash2_pip": "flash2", "flash2_any": "flash2", "efficient_any": "efficient"}


def facts_by_source(kernel: KernelName, library: str) -> tuple[SourceFact, ...]:
    """Return the facts about stages and warp roles in the source code of a kernel's library."""
    library = _SAME.get(library, library)
    return tuple(
        SourceFact(*fact)
        for owner, pattern, facts in FACTS
        if owner == library and re.match(pattern, kernel.short)
        for fact in facts
    )


def fact_texts(facts: Iterable[SourceFact]) -> Iterator[str]:
    """Yield each fact as text that ends with the source.

    Facts from the same source share one text.
    """
    groups: dict[str, list[str]] = {}
    for fact in facts:
        groups.setdefault(fact.source, []).append(f"{fact.property.capitalize()}: {fact.meaning}")
    for source, texts in groups.items():
        yield f"{'. '.join(texts)}. By source: {source}"
