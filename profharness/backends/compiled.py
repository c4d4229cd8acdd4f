"""torch.compile of the plain attention in kernels/naive.py, and how often Inductor put SDPA in its
place.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from profharness.backends.base import Attention, RefusedError, needs_module
from profharness.backends.sources import find_implementation
from profharness.rows import REPLACEMENTS

_PLAIN = "naive"
_MISSING = (
    "there is no kernels/naive.py in the working directory or beside the package; run in a "
    "checkout of profharness"
)


def naive_compiled_absent() -> str | None:
    """Why there is nothing to compile, or nothing to compile it with on a GPU."""
    if find_implementation(_PLAIN) is None:
        return _MISSING
    return needs_module("triton", "pip install triton")()


def load_naive_compiled() -> Attention:
    """torch.compile(naive, dynamic=False, fullgraph=True), compiled anew for each load.

    Its attribute `tuning`, a function, says how often Inductor's pattern matcher found attention in
    the graph and put scaled_dot_product_attention there (`counters["inductor"]["fuse_attention"]`
    of torch._dynamo.utils). Raises RefusedError without kernels/naive.py.
    """
    import torch
    from torch._dynamo.utils import counters

    found = find_implementation(_PLAIN)
    if found is None or found.load is None:
        raise RefusedError("absent", _MISSING)
    before = counters["inductor"]["fuse_attention"]
    compiled: Attention = torch.compile(
        code_of_its_own(found.load()),
        dynamic=False,
        fullgraph=True,
        # a graph from the cache on disk passes no pattern matcher, so nothing would be counted
        options={"fx_graph_cache": False},
    )

    def attention(
        q: Any, k: Any, v: Any, *, is_causal: bool, scale: float | None, enable_gqa: bool
    ) -> Any:
        return compiled(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)

    def tuning() -> dict[str, object]:
        return {REPLACEMENTS: counters["inductor"]["fuse_attention"] - before}

    attention.tuning = tuning  # type: ignore[attr-defined]
    return attention


def code_of_its_own(function: Any) -> Any:
    """The same function with a new code object, which is what Dynamo counts recompiles by and keeps
    graphs with: each cell starts anew, and no other compiled backend of the process loses its
    graphs, as after torch._dynamo.reset().
    """
    code = function.__code__.replace()
    new = FunctionType(
        *(code, function.__globals__, function.__name__),
        *(function.__defaults__, function.__closure__),
    )
    new.__kwdefaults__ = function.__kwdefaults__
    return new
