"""The interface of a backend, and the inputs of a call.

A backend computes attention, and explains why it cannot compute a config or is not available. The
functions that build inputs create tensors in the worker, and source text in `repro`, which writes a
script.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from profharness.attention.config import Config, outside_sdpa
from profharness.device_types import CUDA
from profharness.errors import ProfharnessError
from profharness.rows import Refusal

Attention = Callable[..., Any]
"""A function attention(q, k, v, *, is_causal, scale, enable_gqa) on tensors in SDPA's layout: q is
[B, Hq, Sq, D], k is [B, Hkv, Skv, D] and v is [B, Hkv, Skv, Dv]. The function returns a tensor [B,
Hq, Sq, Dv] with the dtype and the device of q. is_causal has the same meaning as in SDPA: row i
attends to columns 0 to i, even if Sq and Skv differ. A function with a further argument `window`
also computes sliding windows: row i attends to the columns above i - window, and below i + window
if is_causal is not set. With `softcap`, the scores s become softcap·tanh(s / softcap) before they
are masked. With `sinks`, a tensor [Hq], each head has one more logit in its softmax, without a
value. An argument is passed only if the config has the feature.
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
    """An implementation of attention, such as `flash` or a user's file."""

    name: str
    summary: str
    devices: tuple[str, ...]
    """The device types that the backend can run on."""
    context: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """Returns the context manager in which the call runs."""
    load: Callable[[], Attention] | None = None
    """Returns the function that computes attention. Only the worker calls `load`. If `load` is
    None, the backend calls `scaled_dot_product_attention` with all arguments of the config.
    """
    supports: Callable[[Config], str | None] = outside_sdpa
    """Returns why the backend cannot compute a config, or None if the backend can compute it."""
    absent: Callable[[], str | None] = no_reason
    """Returns why the backend is not available in the worker, or None if it is available."""
    tuning: Callable[[], Any] = no_reason
    """Returns the tuning parameters of the last call. If the loaded function has an attribute
    `tuning`, the attribute is called instead.
    """
    refuses: tuple[type[Exception], ...] = ()
    """The exceptions that count as a refusal if the first call raises them."""
    source: str | None = None
    """The location of a user's implementation, such as `/folder/file.py:function` or
    `package.module:function`. None for other backends.
    """
    file: Path | None = None
    """The file that contains a user's implementation."""
    packages: tuple[str, ...] = ()
    """The Python packages whose versions are recorded for the backend."""
    isolated: bool = False
    """Whether the cells of the backend run in a separate process, so that side effects of the
    backend do not change other results.
    """


GpuBackend = functools.partial(Backend, devices=(CUDA,), refuses=(Exception,))
"""Create a backend that needs a GPU. Any exception in the first call counts as a refusal.
"""


def outside_contract(config: Config, takes: Collection[str] = ()) -> str | None:
    """Return why an `Attention` function cannot compute the config, or None if it can compute it.

    An `Attention` function has no arguments for a mask or dropout, and requires the same batch size
    for query, key and value. `takes` contains the features that the function computes.
    """
    for name, text in config.features.items():
        if name not in takes:
            what = f"a sliding window ({text})" if name == "window" else text
            return f"does not support {what}"
    if config.mask != "none":
        return f"supports causal masking, but no other attention mask (mask={config.mask})"
    if config.dropout:
        return "does not support dropout"
    if config.kv_batch is not None:
        return f"requires the same batch size for query, key and value (kv_batch={config.kv_batch})"
    return None


WINDOW = ("window",)
takes_window = functools.partial(outside_contract, takes=WINDOW)
"""A `supports` function for an `Attention` function that computes sliding windows."""


def check_limits(
    *,
    takes: Collection[str] = (),
    dtypes: tuple[str, ...] = (),
    square_causal: bool = False,
    same_head_dim: bool = False,
    max_head_dim: int | None = None,
    forward_only: bool = False,
    one_batch: bool = False,
) -> Callable[[Config], str | None]:
    """Return a `supports` function that checks common limits.

    `takes` contains the features that the backend computes. Set `square_causal` if the backend does
    not align its causal mask and its window to the top left, as SDPA does, when seq_q and seq_kv
    differ.
    """

    def supports(config: Config) -> str | None:
        if reason := outside_contract(config, takes):
            return reason
        if dtypes and config.dtype not in dtypes:
            return f"supports only {' and '.join(dtypes)}, not {config.dtype}"
        if square_causal and config.seq_len_q != config.seq_len_kv:
            if config.window is not None:
                return (
                    "aligns the window with the last key, unlike SDPA, so seq_q must equal seq_kv"
                )
            if config.causal:
                return "matches SDPA's causal mask only if seq_q equals seq_kv"
        if same_head_dim and config.value_dim != config.head_dim:
            return "requires the same head_dim for query, key and value"
        if max_head_dim is not None and config.head_dim > max_head_dim:
            return f"supports head_dim up to {max_head_dim}"
        if forward_only and config.bwd:
            return "does not compute gradients; leave out bwd"
        if one_batch and config.batch != 1:
            return "supports one sequence per call, so batch must be 1"
        return None

    return supports


def needs_module(module: str, install: str) -> Callable[[], str | None]:
    """Return an `absent` function that checks whether a module is installed. `install` is the
    command that installs it.
    """
    text = f"package {module} is not installed ({install})"
    return lambda: text if find_module(module) is None else None


def find_module(name: str) -> ModuleSpec | None:
    """Return the spec of a module, or None if the module is not installed.

    Nothing is imported, not even the parent packages of the module.
    """
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # the module is imported, but has no spec
        return None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    return spec


def refuse_if_unloadable(name: str, load: Callable[[], Attention]) -> Callable[[], Attention]:
    """Return a function that calls `load`. If `load` raises an exception, the returned function
    raises a RefusedError with the code `absent`.
    """

    def wrapped() -> Attention:
        try:
            return load()
        except RefusedError:
            raise
        except Exception as error:
            text = f"{name} is installed but cannot be loaded: {type(error).__name__}: {error}"
            raise RefusedError("absent", text) from error

    return wrapped


@dataclass(frozen=True)
class Prepared:
    """A call whose cache and plan are prepared, so that it only launches kernels.

    An `Attention` function whose attribute `prepare` is a function (config, inputs) -> Prepared is
    never called itself.
    """

    call: Callable[[], Any]
    unpack: Callable[[Any], Any]
    """Converts the output of `call` to [B, Hq, Sq, Dv]. This conversion is not timed."""


Fill = Callable[..., Any]
"""A function that returns a new tensor. Its arguments are the sizes of the dimensions."""


@dataclass(frozen=True)
class Inputs:
    """The tensors of one call: query [B, Hq, Sq, D], key [B, Hkv, Skv, D], value [B, Hkv, Skv, Dv],
    gradient of the output [B, Hq, Sq, Dv], mask, and sinks [Hq].

    `grad` is None if the config has no backward pass. `mask` is None if the config has no mask.
    `sinks` is None if the config has no sinks. A call that needs a mask for a window creates this
    mask itself. With `mla`, the value is a part of the key.
    """

    query: Any
    key: Any
    value: Any
    grad: Any
    mask: Any
    sinks: Any = None


def build_inputs(config: Config, normal: Fill, kept: Fill, *, written: bool = True) -> Inputs:
    """Create the inputs of one call, in the order of the fields of Inputs.

    `normal` creates tensors of numbers, and `kept` creates a bool mask. Set `written` to False if
    these functions leave the values undefined. In this case, `grad` is None.
    """

    def tensor(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> Any:
        made = laid_out(config.layout, shape, strides, normal)
        return made.requires_grad_() if config.bwd else made

    keys = (config.key_batch, config.num_kv_heads, config.seq_len_kv)
    queries = (config.batch, config.num_heads, config.seq_len_q, config.head_dim)
    query = tensor(queries, config.q_strides)
    key = tensor((*keys, config.head_dim), config.k_strides)
    value = (
        key[..., : config.value_dim]
        if config.mla
        else tensor((*keys, config.value_dim), config.v_strides)
    )
    return Inputs(
        *(query, key, value),
        normal(*output_shape(config)) if config.bwd and written else None,
        _mask(config, normal, kept, written),
        normal(config.num_heads) if config.sinks else None,
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
    # a dimension with stride 0 has only one element in memory, so write only to this element
    if strides:
        stored = tuple(size if stride else 1 for size, stride in zip(shape, strides, strict=True))
        mask = mask.as_strided(stored, strides)
    if written:
        # let each query attend to the first key, because the output is NaN for a query without keys
        mask[..., 0] = True
    return mask.as_strided(shape, strides) if strides else mask


def call_arguments(config: Config, mask: Any, *, own: bool, sinks: Any = None) -> dict[str, Any]:
    """Return the keyword arguments for a call of SDPA. If `own` is true, return the keyword
    arguments for an `Attention` function, which has no mask and no dropout.

    For a config with a window, the `mask` for SDPA is the mask of the window.
    """
    grouped = config.num_kv_heads != config.num_heads
    causal = config.causal if own else config.sdpa_call().causal
    arguments: dict[str, Any] = {"is_causal": causal, "scale": config.scale}
    if not own:
        arguments |= {"attn_mask": mask, "dropout_p": config.dropout}
    else:
        optional = {"window": config.window, "softcap": config.softcap, "sinks": sinks}
        arguments |= {name: value for name, value in optional.items() if value is not None}
    if own or grouped:
        arguments["enable_gqa"] = grouped
    return arguments


def window_size(window: int | None, is_causal: bool) -> tuple[int, int]:
    """Return (left, right) for flash-attn, the numbers of keys before and after its own position to
    which a query attends. -1 means all keys.
    """
    side = -1 if window is None else window - 1
    return side, 0 if is_causal else side


def choice_arguments(config: Config, mask: Any) -> dict[str, Any]:
    """Return the keyword arguments for torch's `_fused_sdp_choice`."""
    grouped = config.num_kv_heads != config.num_heads
    return call_arguments(config, mask, own=False) | {"enable_gqa": grouped}


def leaf_names(config: Config) -> list[str]:
    """Return the names of the inputs that receive a gradient in the backward pass."""
    return ["query", "key", "value", *(["mask"] if config.mask == "float_grad" else [])]
