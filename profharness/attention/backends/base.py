"""The interface of a backend: its inputs and its call, which configs it cannot compute, and why it may
be unavailable.

The functions for inputs work on tensors and on source text. The worker uses them to create tensors, and
`repro` uses them to write a script.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from profharness.attention.config import Config
from profharness.device_types import CUDA
from profharness.errors import ProfharnessError
from profharness.rows import Refusal

Attention = Callable[..., Any]
"""A function attention(q, k, v, *, is_causal, scale, enable_gqa) on tensors in SDPA's layout: q is
[B, Hq, Sq, D], k is [B, Hkv, Skv, D] and v is [B, Hkv, Skv, Dv]. It returns a tensor [B, Hq, Sq,
Dv] with the dtype and the device of q. is_causal has the same meaning as in SDPA: row i attends to
columns 0 to i, even if Sq and Skv differ.
"""


class RefusedError(ProfharnessError):
    """The backend refuses a config. `code` is `absent` or `unsupported`, and the text of the
    exception is the reason.
    """

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.refusals: tuple[Refusal, ...] = (Refusal(code, reason),)


class ImplementationError(ProfharnessError):
    """A user's implementation cannot be loaded or violates the contract."""


def no_reason(*_: object) -> str | None:
    return None


@dataclass(frozen=True)
class Backend:
    """A way to compute attention."""

    name: str
    summary: str
    devices: tuple[str, ...]
    """The device types that the backend can run on."""
    context: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """Return a context manager. The call runs inside this context."""
    load: Callable[[], Attention] | None = None
    """Return the function that computes attention, in the worker. If it is None, the backend calls
    `scaled_dot_product_attention` with all arguments of the config.
    """
    supports: Callable[[Config], str | None] = no_reason
    """Return why the backend cannot compute a config, or None if it can."""
    absent: Callable[[], str | None] = no_reason
    """Return why the backend is not available in the worker, or None if it is."""
    tuning: Callable[[], Any] = no_reason
    """Return the tuning parameters of the last call, if the loaded function has no `tuning`."""
    refuses: tuple[type[Exception], ...] = ()
    """The exceptions that count as a refusal if the first call raises them."""
    source: str | None = None
    """Where the implementation is: `/folder/file.py:function` or `package.module:function`."""
    file: Path | None = None
    """The file that contains the implementation."""
    packages: tuple[str, ...] = ()
    """The distributions that the backend depends on."""
    isolated: bool = False
    """Whether the backend runs code that is not part of PyTorch, so its cells need their own process."""


GpuBackend = functools.partial(Backend, devices=(CUDA,), refuses=(Exception,))
"""A backend of a library. Every exception that its first call raises counts as a refusal."""


def outside_contract(config: Config) -> str | None:
    """Return why no `Attention` function can compute the config, or None if such a function can.
    The arguments of an `Attention` function include no mask and no dropout.
    """
    if config.mask != "none":
        return f"an attention mask (mask={config.mask}) cannot be passed; causal can"
    if config.dropout:
        return "dropout cannot be passed"
    if config.kv_batch is not None:
        return f"key and value have another batch (kv_batch={config.kv_batch})"
    return None


def check_limits(
    *,
    dtypes: tuple[str, ...] = (),
    square_causal: bool = False,
    same_head_dim: bool = False,
    max_head_dim: int | None = None,
    forward_only: bool = False,
    one_batch: bool = False,
) -> Callable[[Config], str | None]:
    """Return a `supports` function that checks common limits.

    Set `square_causal` if the causal mask of the backend is undefined for different seq_q and
    seq_kv, or is then not aligned to the top left like SDPA's mask.
    """

    def supports(config: Config) -> str | None:
        if reason := outside_contract(config):
            return reason
        if dtypes and config.dtype not in dtypes:
            return f"takes {' and '.join(dtypes)}, not {config.dtype}"
        if square_causal and config.causal and config.seq_len_q != config.seq_len_kv:
            return "its causal mask is that of SDPA only where seq_q = seq_kv"
        if same_head_dim and config.value_dim != config.head_dim:
            return "takes one head_dim for query, key and value"
        if max_head_dim is not None and config.head_dim > max_head_dim:
            return f"takes head_dim up to {max_head_dim}"
        if forward_only and config.bwd:
            return "computes no gradient; leave bwd out"
        if one_batch and config.batch != 1:
            return "this call takes one sequence, so batch must be 1"
        return None

    return supports


def needs_module(module: str, install: str) -> Callable[[], str | None]:
    """Return an `absent` function that checks whether a module is installed. `install` is the
    command that installs it.
    """
    text = f"package {module} is not installed ({install})"
    return lambda: text if find_module(module) is None else None


def find_module(name: str) -> ModuleSpec | None:
    """Return the spec of a module, or None if it is not installed. Nothing is imported, not even
    the parent packages of the module.
    """
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # an imported module that has no spec
        return None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    return spec


def refuse_if_unloadable(name: str, load: Callable[[], Attention]) -> Callable[[], Attention]:
    """Return a function that calls `load` and turns its exceptions into an `absent` refusal."""

    def wrapped() -> Attention:
        try:
            return load()
        except RefusedError:
            raise
        except Exception as error:
            text = f"{name} is installed but cannot be loaded: {type(error).__name__}: {error}"
            raise RefusedError("absent", text) from error

    return wrapped


Fill = Callable[..., Any]
"""A function that returns a new tensor. Its arguments are the sizes of the dimensions."""


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call: query [B, Hq, Sq, D], key [B, Hkv, Skv, D], value [B, Hkv, Skv, Dv], and
    the gradient of the output [B, Hq, Sq, Dv]. grad and mask are None if the config has no backward
    or no mask.
    """

    query: Any
    key: Any
    value: Any
    grad: Any
    mask: Any


def build_inputs(config: Config, normal: Fill, kept: Fill, *, written: bool = True) -> Inputs:
    """Return the inputs. Their values are drawn in the order of the fields.

    `normal` fills tensors with numbers, and `kept` fills a bool mask. If `written` is false, the
    tensors have no values and `grad` is None.
    """

    def tensor(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> Any:
        made = laid_out(config.layout, shape, strides, normal)
        return made.requires_grad_() if config.bwd else made

    keys = (config.key_batch, config.num_kv_heads, config.seq_len_kv)
    queries = (config.batch, config.num_heads, config.seq_len_q, config.head_dim)
    return Inputs(
        tensor(queries, config.q_strides),
        tensor((*keys, config.head_dim), config.k_strides),
        tensor((*keys, config.value_dim), config.v_strides),
        normal(*output_shape(config)) if config.bwd and written else None,
        _mask(config, normal, kept, written),
    )


def output_shape(config: Config) -> tuple[int, int, int, int]:
    """Return the shape of the output, [B, Hq, Sq, Dv]."""
    return config.output_batch, config.num_heads, config.seq_len_q, config.value_dim


def laid_out(
    layout: str, shape: tuple[int, ...], strides: tuple[int, ...] | None, fill: Fill
) -> Any:
    """Return a tensor with the given strides, or with the given layout if `strides` is None."""
    if strides:
        elements = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        return fill(elements).as_strided(shape, strides)
    batch, heads, rows, head_dim = shape
    if layout == "bshd":
        return fill(batch, rows, heads, head_dim).transpose(1, 2)
    if layout == "strided_last":
        return fill(batch, heads, rows, 2 * head_dim)[..., ::2]
    if layout == "offset1":
        return fill(batch * heads * rows * head_dim + 1)[1:].view(shape)
    if layout == "broadcast_batch":
        return fill(1, heads, rows, head_dim).expand(shape)
    return fill(*shape)


def _mask(config: Config, normal: Fill, kept: Fill, written: bool) -> Any:
    if config.mask == "none":
        return None
    shape, strides = config.mask_dims, config.mask_strides
    fill = normal if config.mask.startswith("float") else kept
    mask = laid_out("contiguous", shape, strides, fill) if strides else fill(*shape)
    if fill is normal:
        return mask.requires_grad_() if config.mask == "float_grad" else mask
    # a dimension with stride 0 has only one element in memory, so write to that element alone
    if strides:
        stored = tuple(size if stride else 1 for size, stride in zip(shape, strides, strict=True))
        mask = mask.as_strided(stored, strides)
    if written:
        # without a key to attend to, the result of a row would be NaN by definition
        mask[..., 0] = True
    return mask.as_strided(shape, strides) if strides else mask


def call_arguments(config: Config, mask: Any, *, own: bool) -> dict[str, Any]:
    """Return the keyword arguments of the call. If `own` is true, return those of an `Attention`
    function, which takes no mask and no dropout.
    """
    grouped = config.num_kv_heads != config.num_heads
    arguments: dict[str, Any] = {"is_causal": config.causal, "scale": config.scale}
    if not own:
        arguments |= {"attn_mask": mask, "dropout_p": config.dropout}
    if own or grouped:
        arguments["enable_gqa"] = grouped
    return arguments


def choice_arguments(config: Config, mask: Any) -> dict[str, Any]:
    """Return the keyword arguments of `_fused_sdp_choice`."""
    grouped = config.num_kv_heads != config.num_heads
    return call_arguments(config, mask, own=False) | {"enable_gqa": grouped}


def leaf_names(config: Config) -> list[str]:
    """Return the names of the inputs that receive a gradient in the backward pass."""
    return ["query", "key", "value", *(["mask"] if config.mask == "float_grad" else [])]
