"""What a backend is: how it is called, what it cannot express, and why it may be absent."""

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

from profharness.config import Config
from profharness.errors import ProfharnessError
from profharness.rows import Refusal

Attention = Callable[..., Any]
"""attention(q, k, v, *, is_causal, scale, enable_gqa) on tensors in SDPA's layout: q [B, Hq, Sq, D],
k [B, Hkv, Skv, D], v [B, Hkv, Skv, Dv]; returns [B, Hq, Sq, Dv] in q's dtype, on q's device.
is_causal is SDPA's: row i attends to columns 0..i, also where Sq and Skv differ.
"""


class RefusedError(ProfharnessError):
    """A backend does not take a config. code is `absent` or `unsupported`; the text is the reason."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.refusals: tuple[Refusal, ...] = (Refusal(code, reason),)


class ImplementationError(ProfharnessError):
    """An implementation of the user's cannot be loaded or breaks the contract."""


def nothing(*_: object) -> str | None:
    return None


@dataclass(frozen=True)
class Backend:
    """A way to compute attention.

    devices are where it can exist; context opens the state in which the call runs. load gives the
    callable, inside the worker; without it the call is `scaled_dot_product_attention` with all its
    arguments. absent says why it is not there (worker only), supports why it cannot take a config;
    None: nothing stands against it. tuning tells what the last call ran with, where the loaded
    function has no `tuning` of its own. Exceptions of `refuses` in the first call are refusals,
    others errors. source says where the worker finds an implementation: `/folder/file.py:function`
    or `package.module:function`; file is its file, packages are the distributions it rests on.
    isolated: code that is not PyTorch's own runs, so its cells need a process of their own.
    """

    name: str
    summary: str
    devices: tuple[str, ...]
    context: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    load: Callable[[], Attention] | None = None
    supports: Callable[[Config], str | None] = nothing
    absent: Callable[[], str | None] = nothing
    tuning: Callable[[], Any] = nothing
    refuses: tuple[type[Exception], ...] = ()
    source: str | None = None
    file: Path | None = None
    packages: tuple[str, ...] = ()
    isolated: bool = False


GpuBackend = functools.partial(Backend, devices=("cuda",), refuses=(Exception,))
"""A backend of a library: what its first call raises is its way to refuse."""


def outside_contract(config: Config) -> str | None:
    """Why no `Attention` can take the config: its arguments have no mask and no dropout."""
    if config.mask != "none":
        return f"an attention mask (mask={config.mask}) cannot be passed; causal can"
    if config.dropout:
        return "dropout cannot be passed"
    if config.kv_batch is not None:
        return f"key and value have another batch (kv_batch={config.kv_batch})"
    return None


HALF = ("fp16", "bf16")


def wants(
    *,
    dtypes: tuple[str, ...] = (),
    square_causal: bool = False,
    same_head_dim: bool = False,
    max_head_dim: int | None = None,
    forward_only: bool = False,
    one_batch: bool = False,
) -> Callable[[Config], str | None]:
    """A `supports` function made of the usual limits.

    square_causal: its causal mask is not aligned to the first row and column as SDPA's is (or not
    defined), so the two agree only where seq_q = seq_kv.
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
    """An `absent` function: the module must be there. install is what to do about it."""

    def absent() -> str | None:
        if find_module(module) is not None:
            return None
        return f"package {module} is not installed ({install})"

    return absent


def find_module(name: str) -> ModuleSpec | None:
    """Return the spec of a module, or None. Nothing is imported, not even the packages above it."""
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


def loaded(name: str, load: Callable[[], Attention]) -> Callable[[], Attention]:
    """A `load` whose failure is an `absent` refusal: installed, but of no use here."""

    def wrapped() -> Attention:
        try:
            return load()
        except RefusedError:
            raise
        except Exception as error:
            text = f"{name} is installed but cannot be loaded: {type(error).__name__}: {error}"
            raise RefusedError("absent", text) from error

    return wrapped
