"""The Python that turns the call of one config into that of another: read off from where the two
differ. Variables are q, k, v, attn_mask and out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from profharness.config import Config


TORCH_DTYPES = {"fp16": "torch.float16", "bf16": "torch.bfloat16", "fp32": "torch.float32"}
SDP_BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "math": "MATH",
}


def call_code(before: Config, after: Config, backend: str | None = None) -> str:
    """Code that has `before`'s tensors and makes `after`'s call, with an output of the shape and
    dtype of `before`'s. backend: only that one may run it (`sdpa_kernel`).
    """
    imports = ["import torch", "import torch.nn.functional as F"]
    contexts = ["torch.inference_mode()"] if before.bwd and not after.bwd else []
    if backend is not None:
        imports.append("from torch.nn.attention import SDPBackend, sdpa_kernel")
        contexts.append(f"sdpa_kernel([SDPBackend.{SDP_BACKENDS[backend]}])")
    call = f"out = F.scaled_dot_product_attention({', '.join(['q', 'k', 'v', *_arguments(after)])})"
    if contexts:
        call = f"with {', '.join(contexts)}:\n    {call}"
    return "\n".join(
        [*imports, "", *_before_call(before, after), call, *_after_call(before, after)]
    )


def _arguments(config: Config) -> Iterator[str]:
    if config.mask != "none":
        yield "attn_mask=attn_mask"
    if config.dropout:
        yield f"dropout_p={config.dropout}"
    if config.causal:
        yield "is_causal=True"
    if config.scale is not None:
        yield f"scale={config.scale!r}"
    if config.num_kv_heads != config.num_heads:
        yield "enable_gqa=True"


def _before_call(before: Config, after: Config) -> Iterator[str]:
    if before.deterministic and not after.deterministic:
        yield "torch.use_deterministic_algorithms(False)  # or (True, warn_only=True)"
    if before.layout != after.layout:
        # contiguous() gives a tensor back as it is where only its storage offset is odd
        copy = "clone" if before.layout == "offset1" else "contiguous"
        yield f"q, k, v = (each.{copy}() for each in (q, k, v))"
    yield from _lengths(before, after)
    if before.num_kv_heads != after.num_kv_heads:
        group = after.num_kv_heads // before.num_kv_heads
        yield f"k, v = (each.repeat_interleave({group}, dim=1) for each in (k, v))"
    yield from _dims(after.head_dim - before.head_dim, after.value_dim - before.value_dim)
    if before.dtype != after.dtype:
        dtype = TORCH_DTYPES[str(after.dtype)]
        yield f"q, k, v = (each.to({dtype}) for each in (q, k, v))"
        if before.mask.startswith("float") and after.mask.startswith("float"):
            yield f"attn_mask = attn_mask.to({dtype})"
    if before.mask == "float_grad" and after.mask == "float":
        yield "attn_mask = attn_mask.detach()"


def _lengths(before: Config, after: Config) -> Iterator[str]:
    queries, keys = after.seq_len_q - before.seq_len_q, after.seq_len_kv - before.seq_len_kv
    if queries > 0:
        yield f"q = F.pad(q, (0, 0, 0, {queries}))"
    if keys < 0:
        yield f"k, v = (each[:, :, :{after.seq_len_kv}] for each in (k, v))"
    if keys > 0:
        yield f"k, v = (F.pad(each, (0, 0, 0, {keys})) for each in (k, v))"
        real = f"torch.arange({after.seq_len_kv}, device=q.device) < {before.seq_len_kv}"
        yield f"attn_mask = ({real}).repeat({after.seq_len_q}, 1)"


def _dims(query: int, value: int) -> Iterator[str]:
    if query > 0 and query == value:
        yield f"q, k, v = (F.pad(each, (0, {query})) for each in (q, k, v))"
        return
    if query > 0:
        yield f"q, k = (F.pad(each, (0, {query})) for each in (q, k))"
    if value > 0:
        yield f"v = F.pad(v, (0, {value}))"


def _after_call(before: Config, after: Config) -> Iterator[str]:
    if after.seq_len_q > before.seq_len_q:
        yield f"out = out[:, :, :{before.seq_len_q}]"
    if after.value_dim > before.value_dim:
        yield f"out = out[..., :{before.value_dim}]"
    if before.dtype != after.dtype:
        yield f"out = out.to({TORCH_DTYPES[str(before.dtype)]})"
