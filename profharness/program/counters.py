"""The hardware counters of one kernel, which the presets of `--metrics` collect."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from profharness.columns import column
from profharness.errors import percent
from profharness.recording.profilers.ncu import (
    ACTIVE_THREADS,
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

SHARES = {
    "fma_pipe": FMA_PIPE,
    "sm_throughput": SM_THROUGHPUT,
    "dram_throughput": DRAM_THROUGHPUT,
    "l2_throughput": L2_THROUGHPUT,
    "l1_throughput": L1_THROUGHPUT,
    "l1_hit_rate": L1_HIT_RATE,
    "l2_hit_rate": L2_HIT_RATE,
    "issue_active": ISSUE_ACTIVE,
}
Metrics = Mapping[str, tuple[float, str]]
Value = float | None


@dataclass(frozen=True, slots=True)
class Counters:
    """The counters of a kernel. Shares range from 0 to 1. A missing counter is None."""

    tensor_pipe: Annotated[
        Value,
        column(
            "% tensor",
            "percent",
            importance="normal",
            meaning="share of cycles in which the tensor pipe is active",
        ),
    ] = None
    tensor_instructions: float | None = None
    fma_pipe: Annotated[
        Value,
        column(
            "% FMA",
            "percent",
            importance="detail",
            meaning="share of cycles in which the FMA pipe is active",
        ),
    ] = None
    sm_throughput: Annotated[
        Value, column("% SM", "percent", meaning="SM throughput as a share of the peak")
    ] = None
    dram_throughput: Annotated[
        Value,
        column(
            "% DRAM",
            "percent",
            importance="normal",
            meaning="DRAM throughput as a share of the peak",
        ),
    ] = None
    l2_throughput: Annotated[
        Value, column("% L2", "percent", meaning="L2 throughput as a share of the peak")
    ] = None
    l1_throughput: Annotated[
        Value,
        column(
            "% L1", "percent", importance="detail", meaning="L1 throughput as a share of the peak"
        ),
    ] = None
    l1_hit_rate: Annotated[
        Value,
        column(
            "% L1 hits",
            "percent",
            importance="detail",
            meaning="share of sectors that hit in the L1 cache",
        ),
    ] = None
    l2_hit_rate: Annotated[
        Value, column("% L2 hits", "percent", meaning="share of sectors that hit in the L2 cache")
    ] = None
    load_sectors: Annotated[
        Value,
        column(
            "sectors/ld", "figures", importance="detail", meaning="32-byte sectors per load request"
        ),
    ] = None
    store_sectors: Annotated[
        Value,
        column(
            "sectors/st",
            "figures",
            importance="detail",
            meaning="32-byte sectors per store request",
        ),
    ] = None
    bank_conflicts: Annotated[
        Value,
        column(
            "% conflicts",
            "percent",
            importance="detail",
            meaning="share of shared-memory passes that are due to bank conflicts",
        ),
    ] = None
    issue_active: Annotated[
        Value,
        column(
            "% issued",
            "percent",
            importance="detail",
            meaning="share of cycles in which an instruction is issued",
        ),
    ] = None
    active_threads: Annotated[
        Value,
        column(
            "threads/warp",
            "tenths",
            importance="detail",
            meaning="mean number of active threads per instruction, out of 32",
        ),
    ] = None
    # The share of each warp state in the time of all resident warps, in descending order.
    warp_states: dict[str, float] = field(default_factory=dict)

    @property
    def stall(
        self,
    ) -> Annotated[
        str | None,
        column(
            "most stalled by", importance="normal", meaning="most frequent reason why warps wait"
        ),
    ]:
        """The most frequent state of resident warps that do not issue, with its share."""
        state = next((name for name in self.warp_states if name != "selected"), None)
        return state and f"{state} {percent(self.warp_states[state])}"


def read_counters(metrics: Metrics) -> Counters:
    """Return the counters of a kernel. The keys of `metrics` are ncu's metric names."""
    tensor = _share(metrics, TENSOR_PIPE_OF_ADA)
    conflicts, passes = metric(metrics, BANK_CONFLICTS), metric(metrics, SHARED_WAVEFRONTS)
    states = {name: value for name in WARP_STATES if (value := metric(metrics, warp_state(name)))}
    whole = sum(states.values())
    # ncu reports 0 sectors per request if there are no requests
    loads, stores = metric(metrics, LOAD_REQUESTS), metric(metrics, STORE_REQUESTS)
    return Counters(
        tensor_pipe=_share(metrics, TENSOR_PIPE) if tensor is None else tensor,
        tensor_instructions=metric(metrics, TENSOR_INSTRUCTIONS),
        load_sectors=metric(metrics, LOAD_SECTORS) if loads else None,
        store_sectors=metric(metrics, STORE_SECTORS) if stores else None,
        active_threads=metric(metrics, ACTIVE_THREADS),
        bank_conflicts=conflicts / passes if conflicts is not None and passes else None,
        warp_states={
            name: states[name] / whole for name in sorted(states, key=lambda name: -states[name])
        },
        **{name: _share(metrics, own) for name, own in SHARES.items()},
    )


def metric(metrics: Metrics, name: str) -> float | None:
    """Return the value of a metric, or None if the metric is missing or is not a finite number."""
    value = metrics[name][0] if name in metrics else None
    return value if value is not None and math.isfinite(value) else None


def _share(metrics: Metrics, name: str) -> float | None:
    value = metric(metrics, name)
    return None if value is None else value / 100
