"""`tiled.run` on the CPU: the emulator compiles and runs its kernels instead of NVRTC and a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from emulator import emulate

sys.path.append(str(Path(__file__).resolve().parents[2] / "kernels"))

import tiled
from _tiled_plan import MAX_CLUSTER, SHARED_BYTES, THREADS, Plan, Problem, choose_plan

__all__ = [
    "KERNELS", "MAX_CLUSTER", "SHARED_BYTES", "SOURCE", "THREADS", "Plan", "Problem", "call",
    "choose_plan", "instance", "run", "tiled",
]  # fmt: skip

KERNELS = Path(tiled.__file__).parent
SOURCE = KERNELS / "tiled.cu"
SCRATCH, PARTS = 5, 13
"""Positions among the arguments of tiled_attention."""


def instance(dtype: torch.dtype, plan: Plan) -> str:
    """Return the kernel's name as `run` requests it."""
    return plan.instance(tiled.TYPES[dtype])


@dataclass(frozen=True)
class EmulatedKernel:
    """Replaces a CudaKernel: it has its `launch`."""

    source: EmulatedSource
    name: str
    shared_bytes: int
    cluster: int

    def launch(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        *args: Any,
        cooperative: bool = False,
        overlap: bool = False,
    ) -> None:
        assert not (cooperative and self.cluster > 1)
        # combine_splits has no wait_for_previous() of its own
        assert overlap == self.name.startswith("tiled_attention")
        # the blocks of a cooperative launch that wait for each other are emulated as one cluster
        together = args[PARTS] if cooperative else self.cluster
        short = self.source.bytes_short if self.shared_bytes else 0
        emulate(
            SOURCE,
            self.name,
            grid,
            block,
            args,
            shared_bytes=self.shared_bytes - short,
            cluster=together,
            cooperative=cooperative,
            seed=self.source.seed,
            together=self.source.together,
        )
        if (
            cooperative
        ):  # tiles run one after another here, so sharing memory between them would not be detected
            scratch, counters = args[SCRATCH : SCRATCH + 2]
            tiles = scratch.view(len(counters), -1)
            # the last rows: factor of the old output and one over the sum, per row
            assert not tiles[:, -1].isnan().any(), (
                "a tile has no memory of its own for its exchange"
            )


@dataclass(frozen=True)
class EmulatedSource:
    """Replaces a CudaSource: it has its `kernel`.

    `together` are kernels that share one compiled program. `bytes_short` is shared memory that
    launches lack.
    """

    seed: int
    together: Sequence[str]
    bytes_short: int = 0

    def kernel(self, name: str, *, shared_bytes: int = 0, cluster: int = 1) -> EmulatedKernel:
        return EmulatedKernel(self, name, shared_bytes, cluster)


def run(
    plan: Plan,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    together: Sequence[str],
    seed: int = 0,
    bytes_short: int = 0,
    **arguments: Any,
) -> torch.Tensor:
    """Run `tiled.run` in the emulator. Its allocations contain NaN until a kernel writes them."""
    with _emulated(EmulatedSource(seed, together, bytes_short)):
        return tiled.run(plan, q, k, v, **arguments)


def call(
    function: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    multiprocessors: int,
    together: Sequence[str],
    seed: int = 0,
    **arguments: Any,
) -> torch.Tensor:
    """Run `tiled.attention`, `one_block` or `one_cluster` in the emulator, planned for a GPU with
    `multiprocessors` SMs.
    """
    with _emulated(EmulatedSource(seed, together)) as patch:
        patch.setattr(tiled, "_check", lambda *_: None)  # it refuses the CPU
        patch.setattr(tiled, "_multiprocessors", lambda _: multiprocessors)
        return function(q, k, v, **arguments)


@contextmanager
def _emulated(source: EmulatedSource) -> Iterator[pytest.MonkeyPatch]:
    counters = torch.zeros((1024, 32), dtype=torch.int32)
    counters[::3, 0] = -(2**31)  # the state after an odd number of barriers
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills the memory of torch.empty
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiled, "SOURCE", source)
            patch.setattr(tiled, "_counters", lambda _, units: counters[:units])
            yield patch
    finally:
        torch.use_deterministic_algorithms(before)
    counted = counters & 0x7FFFFFFF  # without the phase
    assert not counted.any(), "blocks are still counted in the barriers' words after the launch"
