"""Classify masks by their contents: nothing, causal, key padding, a window, a bias, or other."""

from __future__ import annotations

from typing import Any

import torch

MOST_BYTES = 16 << 20


def contents(mask: Any) -> dict[str, Any] | None:
    """Return the class of a mask and its properties. Return None for a mask that is too large or must
    not be read now.
    """
    if type(mask) not in (torch.Tensor, torch.nn.Parameter) or mask.device.type == "meta":
        return None
    if mask.numel() == 0 or not 2 <= mask.dim() <= 4 or _busy():
        return None
    size = 1
    for length, stride in zip(mask.shape, mask.stride(), strict=True):
        size *= length if stride else 1
    if size * mask.element_size() > MOST_BYTES:
        return None
    # Read broadcast dims only once.
    distinct = mask.detach()[
        tuple(slice(0, 1) if s == 0 else slice(None) for s in mask.stride()[:-2])
    ]
    if distinct.numel() * mask.element_size() > MOST_BYTES:
        return None
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return None
    with torch.no_grad():
        return _classify(distinct.to("cpu"))


def of_blocks(mask: Any) -> dict[str, Any]:
    """Return the properties of a block mask of flex_attention, whose function defines its contents."""
    if mask is None:
        return {"contents": "none"}
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    if type(mask.kv_num_blocks) is not torch.Tensor or _busy() or capturing:
        return {"contents": "block_mask"}
    with torch.no_grad():
        return {"contents": "block_mask", "masked": float(mask.sparsity()) / 100}


def _busy() -> bool:
    """Return whether a dispatch mode, a function transform or a profiler would record our ops."""
    functorch = getattr(torch._C, "_functorch", None)
    return bool(
        torch._C._len_torch_dispatch_stack()
        or (functorch is not None and functorch.peek_interpreter_stack() is not None)
        or torch.autograd._profiler_enabled()
    )


def _classify(mask: Any) -> dict[str, Any]:
    rows, columns = mask.shape[-2:]
    if mask.dtype == torch.bool:
        kept = mask
    else:
        values = mask.float()
        lowest = torch.finfo(mask.dtype).min / 2
        kept = values > lowest
        if bool((values[kept] != 0).any()):
            return {"contents": "bias", "masked": _share(kept)}
    masked = _share(kept)
    if masked == 0.0:
        return {"contents": "nothing", "masked": masked}
    flat = kept.reshape(-1, rows, columns)
    if rows > 1:
        lower = torch.ones(rows, columns, dtype=torch.bool)
        for name, offset in (("causal", 0), ("causal_lower_right", columns - rows)):
            if bool((flat == lower.tril(offset)).all()):
                return {"contents": name, "masked": masked}
    if bool((flat == flat[:, :1]).all()):
        return {"contents": "key_padding", "masked": masked}
    if rows == columns:
        padding = flat.any(dim=1, keepdim=True)
        if bool((flat == (padding & lower.tril())).all()):
            return {"contents": "causal_and_key_padding", "masked": masked}
    window = _window(flat, columns - rows)
    if window is not None:
        return {"contents": "window", "masked": masked, "window": window}
    return {"contents": "other", "masked": masked}


def _share(kept: Any) -> float:
    return 1.0 - float(kept.float().mean())


def _window(flat: Any, offset: int) -> list[int] | None:
    """Return how far a band extends to the left and right of the diagonal, or None if it is not a band."""
    rows, columns = flat.shape[-2:]
    distance = torch.arange(columns)[None, :] - torch.arange(rows)[:, None] - offset
    inside = distance[flat[0]]
    if inside.numel() == 0:
        return None
    left, right = int(inside.min()), int(inside.max())
    band = (distance >= left) & (distance <= right)
    return [-left, right] if bool((flat == band).all()) else None
