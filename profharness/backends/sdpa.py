"""The SDPA backends of PyTorch: each is a context in which `scaled_dot_product_attention` may take
only that way.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from profharness.backends.base import Backend


def _only(name: str) -> Callable[[], AbstractContextManager[None]]:
    def context() -> AbstractContextManager[None]:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel([getattr(SDPBackend, name)])  # type: ignore[no-any-return]

    return context


@contextlib.contextmanager
def _legacy_all_disabled() -> Iterator[None]:
    """The deprecated context with its three flags off; it has no say over cuDNN by default, so
    cuDNN stays on.
    """
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        context = torch.backends.cuda.sdp_kernel(
            enable_flash=False, enable_math=False, enable_mem_efficient=False
        )
        with context:
            yield


SDPA_BACKENDS = (
    Backend(
        "auto",
        "PyTorch's own choice, all flags as they are",
        ("cuda", "cpu"),
        contextlib.nullcontext,
    ),
    Backend(
        "flash",
        "FlashAttention (FA2 built into PyTorch, or an activated FA3/FA4)",
        ("cuda", "cpu"),
        _only("FLASH_ATTENTION"),
    ),
    Backend(
        "efficient", "memory-efficient attention (CUTLASS)", ("cuda",), _only("EFFICIENT_ATTENTION")
    ),
    Backend("cudnn", "cuDNN's fused attention", ("cuda",), _only("CUDNN_ATTENTION")),
    Backend("math", "matmul, softmax, matmul as separate ATen ops", ("cuda", "cpu"), _only("MATH")),
    Backend(
        "all-disabled",
        "legacy sdp_kernel with flash, math and efficient off: leaves cuDNN on",
        ("cuda", "cpu"),
        _legacy_all_disabled,
    ),
)
