"""`tiled.run` on the CPU: its kernels are compiled and run by the emulator instead of NVRTC and a GPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from emulator import emulate

sys.path.append(str(Path(__file__).resolve().parents[2] / "kernels"))

import tiled
from _tiled_plan import MAX_CLUSTER, SHARED_BYTES, Plan, Problem, choose_plan

__all__ = [
    "KERNELS", "MAX_CLUSTER", "SHARED_BYTES", "SOURCE", "Plan", "Problem", "choose_plan", "instance",
    "run", "tiled",
]  # fmt: skip

KERNELS = Path(tiled.__file__).parent
SOURCE = KERNELS / "tiled.cu"
TYPES = {torch.float32: "float", torch.float16: "fp16", torch.bfloat16: "bf16"}


def instance(dtype: torch.dtype, plan: Plan) -> str:
    """The kernel's name as `run` asks for it."""
    return f"tiled_attention<{TYPES[dtype]}, {plan.template}>"


@dataclass(frozen=True)
class EmulatedKernel:
    """Has the `launch` of a CudaKernel."""

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
        # the blocks of a cooperative launch that wait for each other are there as one cluster
        together = self.source.plan.parts if cooperative else self.cluster
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
        if cooperative:  # tiles run one after another here: that they shared memory would not show
            tiles = args[5].view(-1, self.source.plan.scratch_floats)
            assert not tiles[:, 0].isnan().any(), "a tile has no memory of its own for its exchange"


@dataclass(frozen=True)
class EmulatedSource:
    """Has the `kernel` of a CudaSource. together: kernels that share one compiled program;
    bytes_short: shared memory that launches lack.
    """

    plan: Plan
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
    """`tiled.run` in the emulator; what it allocates holds NaN until a kernel writes there."""
    counters = torch.zeros((1024, 32), dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "SOURCE", EmulatedSource(plan, seed, together, bytes_short))
        patch.setattr(tiled, "_counters", lambda device, units: counters[:units])
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)  # fills what torch.empty gives
        try:
            out = tiled.run(plan, q, k, v, **arguments)
        finally:
            torch.use_deterministic_algorithms(before)
    left = counters & 0x7FFFFFFF  # bit 31, the phase, may be either
    assert not left.any(), "blocks are still counted in the barriers' words after the launch"
    return out
