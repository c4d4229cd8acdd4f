"""The interface of a backend: how it is called, which configs it cannot compute, and why it may be
unavailable.
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
