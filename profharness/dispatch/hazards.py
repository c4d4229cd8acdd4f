"""Calls that PyTorch dispatches and that then fail: the dispatcher says yes, the kernel does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from profharness.dispatch import checks as c
from profharness.dispatch.machine import Machine, Release
from profharness.dispatch.params import AttentionParams


class Hazard(NamedTuple):
    """What happens when `backend` gets a call that `applies` in these releases; until: the first
    release without it.
    """

    backend: str
    since: Release
    until: Release
    applies: Callable[[AttentionParams, Machine], bool]
    text: str


# Seen on an H200 with 2.11; the alignment has been checked by the dispatcher since 2.13.
HAZARDS = (
    Hazard("efficient", (2, 5), (2, 13), c.misaligned,
           "The storage offset is not aligned: the efficient kernel can die with `CUDA error: misaligned address`, "
           "which ends the process's CUDA context. Copy the inputs with clone() first."),
    Hazard("cudnn", (2, 11), (2, 12), lambda p, _: p.batch_stride_zero and p.head_dim != p.value_dim,
           "The batch is expanded with stride 0 and head_dim_v differs from head_dim: cuDNN raises `The stride for "
           "the last dimension … should be 1`. Make the inputs contiguous first."),
)  # fmt: skip


def hazards(backend: str, params: AttentionParams, machine: Machine) -> tuple[str, ...]:
    """Known failures of a call on a backend that the dispatcher lets through; each says what to do."""
    if params.device != "cuda":
        return ()
    return tuple(
        hazard.text
        for hazard in HAZARDS
        if hazard.backend == backend
        and hazard.since <= machine.torch < hazard.until
        and hazard.applies(params, machine)
    )
