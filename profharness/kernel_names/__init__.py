"""Kernel identity: the canonical name of a GPU function, its family, what its name tells, and a
short name to read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

from profharness.kernel_names.attention import parse_attention
from profharness.kernel_names.libraries import parse_library
from profharness.kernel_names.native import op_family, parse_native, parse_own
from profharness.kernel_names.text import (
    Head,
    KernelName,
    canonical,
    clip,
    generic_short,
    normalise,
    split_head,
)

__all__ = ["FAMILIES", "KernelName", "canonical", "normalise", "parse_kernel_name", "short_name"]


FAMILIES = (
    "flash",
    "flash_splitkv",
    "flash_combine",
    "flash_bwd",
    "efficient",
    "efficient_bwd",
    "cudnn",
    "cudnn_bwd",
    "flex",
    "triton",
    "gemm",
    "gemv",
    "softmax",
    "elementwise",
    "reduce",
    "copy",
    "memset",
    "memcpy",
    "other",
)


# Tried in this order; the first that knows the name decides.
PARSERS: tuple[Callable[[str, Head], KernelName | None], ...] = (
    parse_attention,
    parse_library,
    parse_native,
    parse_own,
)


_TRANSFER = re.compile(r"\[?(?:CUDA )?(Memcpy|Memset)\b", re.IGNORECASE)


@lru_cache(maxsize=16384)
def parse_kernel_name(name: str, kind: str = "kernel") -> KernelName:
    """What a canonical name (or nsys's and ncu's own spelling of it) says; kind is `kernel memcpy
    memset op`.

    A name that no rule knows has family `other`. Never raises; names beyond 16 KiB are read up to
    there.
    """
    if kind == "op":
        short = clip(name.removeprefix("aten::"))
        family, direction = op_family(name)
        return KernelName(name, short, family, "aten", direction=direction)
    transfer = _TRANSFER.match(name)
    if kind in ("memcpy", "memset") or transfer:
        family = transfer[1].lower() if transfer else kind
        return KernelName(name, clip(name), family, "cuda")
    text = normalise(name)
    head = split_head(text, name)
    for parser in PARSERS:
        found = parser(text, head)
        if found is not None:
            return found.clipped()
    return KernelName(name, clip(generic_short(text, head)), "other", "unknown")


def short_name(name: str, kind: str = "kernel") -> str:
    """A name for tables, about 34 characters and at most 64: no namespaces, only what tells
    variants apart.
    """
    return parse_kernel_name(name, kind).short
