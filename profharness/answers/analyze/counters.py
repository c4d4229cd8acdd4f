"""Hardware counters of one kernel, as figures: what the presets of `--metrics` count."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from profharness.profilers.ncu_metrics import (
    BANK_CONFLICTS,
    DRAM_THROUGHPUT,
    FMA_PIPE,
    ISSUE_ACTIVE,
    L1_HIT_RATE,
    L1_THROUGHPUT,
    L2_HIT_RATE,
    L2_THROUGHPUT,
    LOAD_REQUESTS,
    LOAD_SECTORS,
    SHARED_WAVEFRONTS,
    SM_THROUGHPUT,
    STORE_REQUESTS,
    STORE_SECTORS,
    TENSOR_INSTRUCTIONS,
    TENSOR_PIPE,
    TENSOR_PIPE_OF_ADA,
    WARP_STATES,
    warp_state,
)

Metrics = Mapping[str, tuple[float, str]]


@dataclass(frozen=True, slots=True)
class Counters:
    """What ncu counted of a kernel's launch; None where it was not asked for.

    Pipes, throughputs and issue_active are shares of the cycles or of the peak, 0 to 1, hit rates
    of the sectors, bank_conflicts of the passes of shared memory. Sectors are those of a request.
    warp_states are shares of the time of all resident warps, the largest first.
    """

    tensor_pipe: float | None = None
    tensor_instructions: float | None = None
    fma_pipe: float | None = None
    sm_throughput: float | None = None
    dram_throughput: float | None = None
    l2_throughput: float | None = None
    l1_throughput: float | None = None
    l1_hit_rate: float | None = None
    l2_hit_rate: float | None = None
    load_sectors: float | None = None
    store_sectors: float | None = None
    bank_conflicts: float | None = None
    issue_active: float | None = None
    warp_states: dict[str, float] = field(default_factory=dict)


def read_counters(metrics: Metrics) -> Counters:
    """The figures of a kernel's metrics, by ncu's names."""
    tensor = _share(metrics, TENSOR_PIPE_OF_ADA)
    return Counters(
        tensor_pipe=_share(metrics, TENSOR_PIPE) if tensor is None else tensor,
        tensor_instructions=metric(metrics, TENSOR_INSTRUCTIONS),
        fma_pipe=_share(metrics, FMA_PIPE),
        sm_throughput=_share(metrics, SM_THROUGHPUT),
        dram_throughput=_share(metrics, DRAM_THROUGHPUT),
        l2_throughput=_share(metrics, L2_THROUGHPUT),
        l1_throughput=_share(metrics, L1_THROUGHPUT),
        l1_hit_rate=_share(metrics, L1_HIT_RATE),
        l2_hit_rate=_share(metrics, L2_HIT_RATE),
        load_sectors=_of_requests(metrics, LOAD_SECTORS, LOAD_REQUESTS),
        store_sectors=_of_requests(metrics, STORE_SECTORS, STORE_REQUESTS),
        bank_conflicts=_ratio(metrics, BANK_CONFLICTS, SHARED_WAVEFRONTS),
        issue_active=_share(metrics, ISSUE_ACTIVE),
        warp_states=_warp_states(metrics),
    )


def metric(metrics: Metrics, name: str) -> float | None:
    """The value of a metric; None where ncu has none, or none that is a number."""
    value = metrics[name][0] if name in metrics else None
    return value if value is not None and math.isfinite(value) else None


def _share(metrics: Metrics, name: str) -> float | None:
    value = metric(metrics, name)
    return None if value is None else value / 100


def _ratio(metrics: Metrics, part: str, whole: str) -> float | None:
    above, below = metric(metrics, part), metric(metrics, whole)
    return above / below if above is not None and below else None


def _of_requests(metrics: Metrics, name: str, requests: str) -> float | None:
    """Sectors a request; None for a kernel that made no such request, for which ncu says 0."""
    return metric(metrics, name) if metric(metrics, requests) else None


def _warp_states(metrics: Metrics) -> dict[str, float]:
    values = {name: metric(metrics, warp_state(name)) for name in WARP_STATES}
    known = {name: value for name, value in values.items() if value}
    whole = sum(known.values())
    ranked = sorted(known, key=lambda name: -known[name])
    return {name: known[name] / whole for name in ranked}
