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
"""attention(q, k, v, *, is_causal, scale, enable_gqa) on tensors in SDPA's layout: q [B, Hq, Sq,
D], k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv]. Returns [B, Hq, Sq, Dv] in q's dtype on q's device.
is_causal has SDPA's meaning: row i attends to columns 0..i, even if Sq and Skv differ.
"""


class RefusedError(ProfharnessError):
    """A backend refuses a config. `code` is `absent` or `unsupported`; the text is the reason."""

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
    """Device types that it can run on."""
    context: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    """Opens the state in which the call runs."""
    load: Callable[[], Attention] | None = None
    """Return the callable (in the worker). Without it, the call is `scaled_dot_product_attention`
    with all its arguments.
    """
    supports: Callable[[Config], str | None] = no_reason
    """Return why it cannot compute a config, or None."""
    absent: Callable[[], str | None] = no_reason
    """Return why it is not available, or None (in the worker)."""
    tuning: Callable[[], Any] = no_reason
    """Return the parameters of the last call, if the loaded function has no `tuning` of its own."""
    refuses: tuple[type[Exception], ...] = ()
    """Exceptions in the first call that are refusals. Others are errors."""
    source: str | None = None
    """Location of an implementation: `/folder/file.py:function` or `package.module:function`."""
    file: Path | None = None
    """The implementation's file."""
    packages: tuple[str, ...] = ()
    """Distributions that it depends on."""
    isolated: bool = False
    """Whether it runs code that is not PyTorch's, so that its cells need their own process."""


GpuBackend = functools.partial(Backend, devices=(CUDA,), refuses=(Exception,))
"""A backend of a library. Every exception in its first call is a refusal."""


def outside_contract(config: Config) -> str | None:
    """Return why no `Attention` can compute the config, or None. Its arguments include no mask and
    no dropout.
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

    `square_causal` is for causal masks that are undefined, or not aligned to the top left like
    SDPA's, if seq_q and seq_kv differ.
    """

    def supports(config: Config) -> str | None:
        reason = outside_contract(config)
        if reason:
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
    """Return an `absent` function that checks for a module. `install` is the remedy."""

    def absent() -> str | None:
        if find_module(module) is not None:
            return None
        return f"package {module} is not installed ({install})"

    return absent


def find_module(name: str) -> ModuleSpec | None:
    """Return the spec of a module, or None. Nothing is imported, not even its parent packages."""
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # an imported module without a spec
        return None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(f"{spec.name}.{part}", spec.submodule_search_locations)
    return spec


def refuse_if_unloadable(name: str, load: Callable[[], Attention]) -> Callable[[], Attention]:
    """Wrap `load` so that its failure is an `absent` refusal: installed, but not usable here."""

    def wrapped() -> Attention:
        try:
            return load()
        except RefusedError:
            raise
        except Exception as error:
            text = f"{name} is installed but cannot be loaded: {type(error).__name__}: {error}"
            raise RefusedError("absent", text) from error

    return wrapped
