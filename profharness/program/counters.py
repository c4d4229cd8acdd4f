"""The hardware counters of one kernel, which the presets of `--metrics` collect."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from profharness.columns import column
from profharness.recording.profilers.ncu import (
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
Value = float | None


@dataclass(frozen=True, slots=True)
class Counters:
    """The counters of a kernel launch, or None if not collected. Shares are from 0 to 1."""

    tensor_pipe: Annotated[Value, column("tensor%", "percent", meaning="share of cycles")] = None
    tensor_instructions: float | None = None
    fma_pipe: Annotated[Value, column("FMA%", "percent", meaning="share of cycles")] = None
    sm_throughput: Annotated[Value, column("SM%", "percent", meaning="share of its peak")] = None
    dram_throughput: Annotated[Value, column("DRAM%", "percent", meaning="share of its peak")] = (
        None
    )
    l2_throughput: Annotated[Value, column("L2%", "percent", meaning="share of its peak")] = None
    l1_throughput: Annotated[Value, column("L1%", "percent", meaning="share of its peak")] = None
    l1_hit_rate: Annotated[Value, column("L1 hit%", "percent", meaning="share of sectors")] = None
    l2_hit_rate: Annotated[Value, column("L2 hit%", "percent", meaning="share of sectors")] = None
    load_sectors: Annotated[Value, column("sectors/ld", "figures", meaning="per request")] = None
    store_sectors: Annotated[Value, column("sectors/st", "figures", meaning="per request")] = None
    bank_conflicts: Annotated[Value, column("conflict%", "percent", meaning="share of passes")] = (
        None
    )
    issue_active: Annotated[Value, column("issue%", "percent", meaning="share of cycles")] = None
    # The share of each state in the time of all resident warps, in descending order.
    warp_states: dict[str, float] = field(default_factory=dict)

    @property
    def stall(
        self,
    ) -> Annotated[
        str | None, column("most stalled by", meaning="what most resident warps wait for")
    ]:
        """The most frequent state of resident warps that do not issue, with its share."""
        state = next((name for name in self.warp_states if name != "selected"), None)
        return state and f"{state} {self.warp_states[state]:.0%}"


def read_counters(metrics: Metrics) -> Counters:
    """Return the counters of a kernel. The keys of `metrics` are ncu's names."""
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
    """Return the value of a metric, or None if ncu has no number for it."""
    value = metrics[name][0] if name in metrics else None
    return value if value is not None and math.isfinite(value) else None


def _share(metrics: Metrics, name: str) -> float | None:
    value = metric(metrics, name)
    return None if value is None else value / 100


def _ratio(metrics: Metrics, part: str, whole: str) -> float | None:
    above, below = metric(metrics, part), metric(metrics, whole)
    return above / below if above is not None and below else None


def _of_requests(metrics: Metrics, name: str, requests: str) -> float | None:
    """Return the sectors per request, or None without a request, for which ncu reports 0."""
    return metric(metrics, name) if metric(metrics, requests) else None


def _warp_states(metrics: Metrics) -> dict[str, float]:
    values = {name: metric(metrics, warp_state(name)) for name in WARP_STATES}
    known = {name: value for name, value in values.items() if value}
    whole = sum(known.values())
    ranked = sorted(known, key=lambda name: -known[name])
    return {name: known[name] / whole for name in ranked}
