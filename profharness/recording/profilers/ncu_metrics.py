"""The hardware counters that answers use, by ncu's names, and the presets of `--metrics`.

Which GPU has which name comes from NVIDIA's table (libnvperf_host of CUDA 13.5) for sm_80, sm_89,
sm_90, sm_100 and sm_120. All have all names except those in SOME_GPUS.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from profharness.errors import UsageError

# Tensor pipe. On Ada, only the second name counts what the first one misses.
TENSOR_PIPE = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
TENSOR_PIPE_OF_ADA = "sm__pipe_tensor_cycles_active_v2.avg.pct_of_peak_sustained_elapsed"
TENSOR_INSTRUCTIONS = "sm__inst_executed_pipe_tensor.sum"
FMA_PIPE = "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_elapsed"
SM_THROUGHPUT = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
# Memory: bytes, and throughput relative to the peak.
L1_BYTES, L2_BYTES = "l1tex__t_bytes.sum", "lts__t_bytes.sum"
DRAM_THROUGHPUT = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
L2_THROUGHPUT = "lts__throughput.avg.pct_of_peak_sustained_elapsed"
L1_THROUGHPUT = "l1tex__throughput.avg.pct_of_peak_sustained_active"
L1_HIT_RATE, L2_HIT_RATE = "l1tex__t_sector_hit_rate.pct", "lts__t_sector_hit_rate.pct"
# Sectors of 32 bytes requested by one instruction of a warp.
LOAD_SECTORS = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio"
STORE_SECTORS = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio"
LOAD_REQUESTS = "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"
STORE_REQUESTS = "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum"
# Passes of shared memory, and those added by bank conflicts.
SHARED_WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
BANK_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
# Schedulers: how often one issues, and what the other warps wait for.
ISSUE_ACTIVE = "smsp__issue_active.avg.pct_of_peak_sustained_active"
WARP_STATES = (
    *("selected", "not_selected", "wait", "barrier", "membar", "sleeping"),
    *("long_scoreboard", "short_scoreboard", "lg_throttle", "mio_throttle", "tex_throttle"),
    *("math_pipe_throttle", "gmma", "branch_resolving", "no_instruction", "imc_miss"),
    *("dispatch_stall", "drain", "misc"),
)


def warp_state(name: str) -> str:
    """Return the metric for one of WARP_STATES: warps in that state on average per issue."""
    return f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio"


_CACHES = (L1_BYTES, L2_BYTES, L1_HIT_RATE, L2_HIT_RATE)
PRESETS: dict[str, tuple[str, ...]] = {
    "tensor": (TENSOR_PIPE, TENSOR_PIPE_OF_ADA, TENSOR_INSTRUCTIONS, FMA_PIPE, SM_THROUGHPUT),
    "memory": (
        *(L1_BYTES, L2_BYTES, DRAM_THROUGHPUT, L2_THROUGHPUT, L1_THROUGHPUT),
        *(LOAD_SECTORS, LOAD_REQUESTS, STORE_SECTORS, STORE_REQUESTS),
        *(SHARED_WAVEFRONTS, BANK_CONFLICTS),
    ),
    "cache": _CACHES,
    "stalls": (ISSUE_ACTIVE, *map(warp_state, WARP_STATES)),
}
"""Preset of `--metrics` -> metrics, in addition to ncu's default ones."""
SOME_GPUS = frozenset({TENSOR_PIPE_OF_ADA, warp_state("gmma"), warp_state("imc_miss")})
"""Metrics of presets that exist only on Ada, on Hopper, or before Blackwell, in that order."""


def metric_names(asked: Sequence[str]) -> tuple[str, ...]:
    """Return the metrics that presets and names of ncu stand for, without duplicates.

    Raise UsageError for a word that is neither, which ncu would silently ignore.
    """
    names: list[str] = []
    for word in asked:
        # every name of ncu starts with its unit (`sm__`), or is a `group:` or a `regex:`
        if word not in PRESETS and "__" not in word and ":" not in word:
            raise UsageError(
                f"--metrics {word}: no preset of that name (there are {', '.join(PRESETS)}), and no "
                "metric of ncu, such as sm__inst_executed.sum"
            )
        names += PRESETS.get(word, (word,))
    return tuple(dict.fromkeys(names))


QUERY_METRICS = "`ncu --query-metrics` lists what this GPU has"


def unmeasured(asked: Sequence[str], measured: Collection[str]) -> list[str]:
    """Return the requested metrics that ncu silently skipped, without those in SOME_GPUS.

    A name without its suffix stands for any suffix.
    """
    return [
        name
        for name in asked
        if name not in SOME_GPUS
        and not any(metric == name or metric.startswith(f"{name}.") for metric in measured)
    ]
