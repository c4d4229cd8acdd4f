"""Memory that is handed out as uninitialised holds a known pattern, so that an element that a
kernel never writes shows.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Iterator
from typing import Any

import torch

NAN_BYTE = 0xFF  # repeated, it is NaN in fp16, bf16, fp32 and fp64
OTHER_BYTE = 0x42  # repeated, a finite number in all of them

COPIES = 4  # of each size: output, gradients and workspaces come from the freed ones
_M_PERTURB = -6  # glibc: fill what malloc hands out with the complement of a byte


@contextlib.contextmanager
def poisoned(byte: int, like: Iterable[Any], device: str) -> Iterator[None]:
    """Within: memory comes filled with `byte`, as far as that can be had.

    On CUDA, free blocks of the caching allocator are filled, those of the sizes of `like` among
    them; memory that the driver hands out anew, or to another stream, is not. On a CPU with glibc,
    malloc fills what it hands out, but for the first 16 bytes of a block of up to 1 KiB that comes
    from its thread cache; elsewhere only freed blocks of those sizes are filled.
    """
    sizes = sorted({tensor.numel() * tensor.element_size() for tensor in like})
    _fill_freed(byte, sizes, device)
    if device == "cuda":
        _fill_free_blocks(byte)
        yield
        return
    perturb = _mallopt()
    perturb(_M_PERTURB, byte ^ 0xFF | 0x100)  # the bit above the byte: 0 would switch it off
    try:
        yield
    finally:
        perturb(_M_PERTURB, 0)


def poison_value(byte: int, dtype: Any) -> float:
    """What an element of that dtype holds if nothing was written to it."""
    width = torch.empty((), dtype=dtype).element_size()
    return float(torch.tensor([byte] * width, dtype=torch.uint8).view(dtype)[0])


def _fill_freed(byte: int, sizes: list[int], device: str) -> None:
    held = [
        torch.empty(size, dtype=torch.uint8, device=device).fill_(byte)
        for size in sizes
        for _ in range(COPIES)
    ]
    if device == "cuda":
        torch.cuda.synchronize()
    held.clear()


def _fill_free_blocks(byte: int) -> None:
    """All free blocks that the current stream may be given: asked for by size, each comes back."""
    held = []
    stream = torch.cuda.current_stream().cuda_stream
    for segment in torch.cuda.memory_snapshot():
        if segment["stream"] != stream or segment.get("segment_pool_id", (0, 0)) != (0, 0):
            continue
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                continue
            try:
                made = torch.empty(block["size"], dtype=torch.uint8, device="cuda")
            except torch.cuda.OutOfMemoryError:
                continue
            held.append(made.fill_(byte))
    torch.cuda.synchronize()
    held.clear()


def _mallopt() -> Any:
    """glibc's mallopt, or a function that does nothing where the C library has none."""
    try:
        return ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return lambda *_: 0
