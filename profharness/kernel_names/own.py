"""Kernels of the implementations in kernels/, whose names carry no library: what their template
arguments mean.
"""

from __future__ import annotations

import re

from profharness.kernel_names.text import (
    Head,
    KernelName,
    integer,
    join_short,
    reduced_arguments,
    short_type,
    template_arguments,
)

_CUDA = frozenset({"single_query", "single_query_attention", "tiled_attention", "combine_splits"})
# A Triton kernel has no parameter list in its name; a CUDA kernel of the same name has.
_TRITON = re.compile(r"flash_(?:forward|backward_(?:dkdv|dq|delta))$")
_DTYPES = frozenset({"fp16", "bf16", "fp32"})
# the template parameters of tiled_attention in kernels/tiled.cu
TILED_PARAMETERS = (
    *("T", "BM", "BN", "BK", "CHUNK", "PC", "STAGES", "VALUE_STAGES"),
    *("ONE", "GRID", "SPLIT", "PER_SM"),
)
_TILED_STAGES = TILED_PARAMETERS.index("STAGES")
_TILED_FLAGS = {TILED_PARAMETERS.index(name): name.lower() for name in ("ONE", "GRID", "SPLIT")}


def parse_own(text: str, head: Head) -> KernelName | None:
    """The kernel of kernels/ that a normalised name stands for; None if it is none.

    CUDA kernels are `name<T, …>`, `tiled_attention<T, BM, BN, …>` with a tile of BM queries and BN
    keys. They are of family `other`, as any CUDA kernel of no known library.
    """
    if _TRITON.match(text):
        direction = "bwd" if "backward" in text else "fwd"
        return KernelName(head.name, text, "triton", "triton", direction=direction)
    if head.path not in _CUDA:
        return None
    arguments = template_arguments(text, head.end)
    word = short_type(arguments[0]) if arguments else ""
    sizes = [integer(argument) for argument in arguments[1:3]]
    if head.path != "tiled_attention" or len(sizes) < 2 or None in sizes:
        shown, sizes = reduced_arguments(arguments), [None, None]
    else:
        shown = [word, f"{sizes[0]}x{sizes[1]}", *_rest(arguments)]
    is_whole = sizes[0] is not None and len(arguments) == len(TILED_PARAMETERS)
    return KernelName(
        head.name,
        join_short(head.base, *shown),
        "other",
        "unknown",
        dtype=word if word in _DTYPES else None,
        tile_m=sizes[0],
        tile_n=sizes[1],
        stages=integer(arguments[_TILED_STAGES]) if is_whole else None,
        direction="fwd",
    )


def _rest(arguments: list[str]) -> list[str]:
    """What follows type and tile: the numbers, and the flags that are set by their names."""
    if len(arguments) != len(TILED_PARAMETERS):
        return reduced_arguments(arguments[3:])
    words = [
        _TILED_FLAGS[place] if place in _TILED_FLAGS and argument == "true" else argument
        for place, argument in enumerate(arguments)
    ]
    return [word for word in words[3:] if word != "false"]
