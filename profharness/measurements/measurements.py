"""The rows of a benchmark, warnings about unreliable measurements, and sweeps.

A sweep varies one property of the configs, such as the sequence length. The sweep shows which
backend is fastest at each value, where a rate drops, and how peak memory grows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from statistics import linear_regression
from typing import Annotated, Any, NamedTuple

from profharness import stats
from profharness.attention import costs
from profharness.attention.config import (
    ALL_DISABLED,
    OWN_CHOICE,
    Config,
    parse_config,
    pytorch_chooses,
)
from profharness.columns import SPEED_UP, VS_FASTEST, column
from profharness.devices import Peaks, flop_peak
from profharness.dtypes import CONFIG_DTYPES
from profharness.errors import counted, percent
from profharness.measurements.agreement import with_predictions
from profharness.rows import (
    COLD,
    CPU_WAIT,
    EAGER,
    EVENT,
    GRAPH,
    HOST,
    HOSTED,
    KERNEL,
    MEASUREMENTS,
    SHARED_CORES,
    TORCH,
    WALL,
    CellRow,
    KernelRow,
)
from profharness.store import Store
from profharness.units import MIB, as_long, by_how_much, memory_text, rate_figure, ratio_text

CLOCK_MOVED = 0.05
# The machine is reported as busy if the worker waited for a CPU for more than this share of time.
BUSY = 0.1
# The median is meaningless if the half-width of its interval exceeds this multiple of the median.
UNKNOWN = 1.0
UNSTEADY = (
    "the half-width of the 95 % interval exceeds the median, because the machine was too busy; "
    "measure again when nothing else is running"
)
FEW_SAMPLES = 5
# Maps the bits of NVML's clocks event reasons to causes of a reduced clock (see
# nvmlClocksEventReason* in nvml.h).
THROTTLES = {
    0x4: "its power limit (software power cap)",
    0x8: "a hardware slowdown",
    0x20: "its temperature (software thermal slowdown)",
    0x40: "its temperature (hardware thermal slowdown)",
    0x80: "its power supply (hardware power brake)",
}


def _doubts(
    row: BenchRow,
    samples: Sequence[int],
    cell: CellRow,
    peaks: Peaks | None,
    rate: tuple[str, float] | None,
    precision: float,
) -> tuple[str, ...]:
    """Return warnings about a row. `rate` is the name and the FLOP/s of the device's peak."""
    texts = list(_rate_doubts(row, peaks, rate)) if peaks else []
    texts += [*clock_doubts(cell.clocks), *host_doubts(cell, str(row.measurement))]
    half = row.half
    if row.samples < FEW_SAMPLES or half is None:
        return (*texts, f"only {counted(row.samples, 'sample')}")
    if stats.is_bimodal(samples):
        texts.append("the samples have two modes, so the median may jump between them")
    if half > UNKNOWN:
        texts.append(UNSTEADY)
    elif half > precision:
        texts.append(
            f"the median is known only to ±{percent(half, 1)} (requested: ±{percent(precision, 1)})"
        )
    return tuple(texts)


def _rate_doubts(row: BenchRow, peaks: Peaks, rate: tuple[str, float] | None) -> Iterator[str]:
    width = peaks.bandwidth_bytes_per_s
    if width and row.bytes_per_s and row.bytes_per_s > width:
        excess = row.bytes_per_s / width
        reason = _why_bytes(row, peaks.l2_bytes, excess)
        yield (
            f"the rate is {percent(excess)} of the memory bandwidth of {width / 1e9:,.4g} GB/s "
            f"({peaks.source}): {reason}"
        )
    if rate and row.flops_per_s and row.flops_per_s > rate[1]:
        name, peak = rate
        reason = "check that the output is correct and that the peak belongs to this device"
        if name == "fp32":
            reason = "tensor cores may have been used (TF32, or fp32 split into smaller numbers)"
        share = row.flops_per_s / peak
        yield (
            f"the rate is {percent(share)} of the peak of {peak / 1e12:,.4g} TFLOP/s {name} "
            f"({peaks.source}): {reason}"
        )


def _why_bytes(row: BenchRow, l2_bytes: int | None, excess: float) -> str:
    """Explain why a rate exceeds the memory bandwidth. The data may be in the L2 cache."""
    moved = costs.compulsory_bytes(parse_config(row.config))
    size = f"the working set of {memory_text(moved)}"
    if l2_bytes is None:
        return f"{size} may fit in the L2, whose size is unknown"
    l2 = f"the L2 of {memory_text(l2_bytes)}"
    flushed = ""
    if row.measurement in (COLD, EVENT):
        flushed = "; the L2 was flushed, but the output may stay in it"
    if moved <= l2_bytes:
        return f"{size} fits in {l2}{flushed or ', so this is not the rate of the memory'}"
    if excess <= moved / (moved - l2_bytes):
        return f"part of {size} can stay in {l2}{flushed}"
    return (
        f"{size} is much larger than {l2}, so the L2 does not explain the rate; do not use this "
        "figure"
    )


def clock_doubts(clocks: Mapping[str, Any]) -> tuple[str, ...]:
    """Return warnings if the SM clock changed while a cell was timed, or was throttled."""
    texts = []
    low, high = clocks.get("sm_mhz_min"), clocks.get("sm_mhz_max")
    if low and high and (high - low) / high > CLOCK_MOVED:
        texts.append(f"the SM clock varied (lowest {low:g} MHz, highest {high:g} MHz)")
    bits = int(clocks.get("throttle_reasons") or 0)
    reasons = [text for bit, text in THROTTLES.items() if bits & bit]
    if reasons:
        texts.append(f"the GPU lowered its clock because of {' and '.join(reasons)}")
    return tuple(texts)


def host_doubts(cell: CellRow, measurement: str) -> tuple[str, ...]:
    """Return warnings about a busy machine if the measurement includes host time."""
    if measurement not in HOSTED:
        return ()
    texts = [SHARED_CORES] if SHARED_CORES in cell.warnings else []
    if (share := cell.clocks.get(CPU_WAIT) or 0) > BUSY:
        texts.append(
            f"the worker waited for a CPU for {percent(share)} of the time, "
            "because the machine was busy"
        )
    return tuple(texts)


AGAIN = "capture again when nothing else is running"
SCATTERED = 1.5
"""The machine is reported as busy if the mean and the median time of ops differ by this factor."""


def busy_text(rows: Sequence[KernelRow], cells: Sequence[CellRow]) -> str | None:
    """Return a warning that the times of ops are unreliable because the CPU was busy, or None.

    A busy CPU interrupts some ops and not others, so the mean of their times and the median differ.
    Kernels on a GPU are not interrupted.
    """
    factors: dict[tuple[str, str, str | None], float] = {}
    for cell in cells:
        own = [
            (row.total_ns / row.launches, row.duration_ns, row.launches_per_call or 1)
            for row in rows
            if (row.run, row.cell, row.kernel_kind) == (cell.run, cell.cell, "op")
            if row.total_ns and row.duration_ns and row.launches
        ]
        if own:
            mean, median = (sum(row[at] * row[2] for row in own) for at in (0, 1))
            factors[cell.run, cell.config, cell.backend] = max(mean / median, median / mean)
    scattered = {key: factor for key, factor in factors.items() if factor > SCATTERED}
    waits = [cell for cell in cells if (cell.clocks.get(CPU_WAIT) or 0) > BUSY]
    waited = max((cell.clocks[CPU_WAIT] for cell in waits), default=0)
    if not factors or not (scattered or waited):
        return None
    why = f"the worker waited for a CPU for {percent(waited)} of the time"
    if scattered:
        (_, config, backend), most = max(scattered.items(), key=lambda item: item[1])
        why = (
            f"the mean and the median time of the ops differ by a factor of up to {most:.1f} "
            f"({backend} on {config})"
        )
    return f"the machine was busy: {why}; {AGAIN}"


def is_disturbed(rows: Sequence[KernelRow], cell: CellRow) -> bool:
    """Return whether the warning of `busy_text` applies to the times of a cell."""
    return busy_text(rows, [cell]) is not None


BASES = {
    COLD: ("cold calls", "with the caches flushed before each call"),
    GRAPH: ("CUDA-graph replays", "with warm caches and no launch cost"),
    KERNEL: ("kernel times", "of profiled calls with warm caches"),
    EAGER: ("eager calls", "including the launch cost"),
    EVENT: ("cold calls", "timed by an older version of profharness"),
    WALL: ("wall-clock times", "of calls on the CPU"),
}
"""Maps each measurement to the name of its samples in headings and sentences, and to what they include."""


def basis_text(measurement: str | None, *, conditions: bool = False) -> str:
    """Return what a median is a median of, such as `cold calls`.

    If `conditions` is set, also say what the samples include.
    """
    name, how = BASES.get(measurement or "", (f"samples of {measurement}", ""))
    return f"{name} ({how})" if conditions and how else name


def compared_by(measurement: str | None) -> str:
    """Return what a comparison is based on, such as `in cold calls` or `by kernel times`."""
    name = basis_text(measurement)
    return f"{'by' if name.endswith('times') else 'in'} {name}"


def basis_detail(measurement: str | None) -> str:
    """Return the detail of a heading above medians and rates."""
    return f"medians and rates of {basis_text(measurement)}"


CHOSEN = "auto"
# Samples in nanoseconds per call, by (config, backend) and then by measurement.
Samples = dict[tuple[str, str], dict[str, tuple[int, ...]]]
Baseline = Config | str  # a config, or the name of a backend
Ran = Mapping[tuple[str, str], str | None]  # the backend that ran, by config and requested backend
# Without a baseline, speed-ups are relative to the first of these backends that was measured.
REFERENCES = ("naive", "math")


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One measurement of one cell. A cell without samples has one row with measurement None."""

    run: Annotated[str, column(meaning="id of the run")]
    config: Annotated[str, column("config", repeat=False, meaning="label of the attention problem")]
    backend: Annotated[str, column("backend", importance="key", meaning="the requested backend")]
    status: Annotated[str, column(meaning="`ok`, `refused`, or the kind of failure")]
    message: Annotated[str | None, column(meaning="why the cell failed")]
    measurement: Annotated[str | None, column(meaning="the measurement, such as `cold`")] = None
    samples: Annotated[int, column(meaning="number of samples")] = 0
    median_ns: Annotated[
        float | None,
        column(
            "median µs/call",
            "time",
            importance="answer",
            scale="samples",
            meaning="median of the samples",
        ),
    ] = None
    low_ns: Annotated[
        float | None, column(meaning="lower end of the 95 % confidence interval of the median")
    ] = None
    high_ns: Annotated[
        float | None, column(meaning="upper end of the 95 % confidence interval of the median")
    ] = None
    mean_ns: Annotated[
        float | None,
        column(
            "mean µs/call",
            "time",
            importance="detail",
            scale="samples",
            meaning="mean of the samples",
        ),
    ] = None
    std_ns: Annotated[
        float | None,
        column(
            "std µs/call",
            "time",
            importance="detail",
            scale="samples",
            meaning="standard deviation of the samples",
        ),
    ] = None
    min_ns: Annotated[float | None, column(meaning="shortest sample")] = None
    flops_per_s: Annotated[
        float | None, column("TFLOP/s", "tera", optional=True, meaning="FLOPs per second")
    ] = None
    bytes_per_s: Annotated[
        float | None,
        column(
            "GB/s",
            "giga",
            importance="detail",
            optional=True,
            meaning="compulsory bytes per second",
        ),
    ] = None
    efficiency: Annotated[
        float | None,
        column(
            "% of roofline",
            "load",
            optional=True,
            meaning="the rate divided by the peak rate that limits it",
        ),
    ] = None
    against: Annotated[
        str | None, column(meaning="the peak rate on which `efficiency` is based")
    ] = None
    speedup: Annotated[
        float | None,
        column(
            "speed-up",
            "ratio",
            importance="answer",
            optional=True,
            meaning=SPEED_UP,
        ),
    ] = None
    baseline: Annotated[str | None, column(meaning="the baseline of the speed-up")] = None
    regret: Annotated[
        float | None,
        column(
            VS_FASTEST,
            "excess",
            importance="answer",
            optional=True,
            meaning="how much longer the median is than the median of the fastest backend with "
            "correct output (not counting `all-disabled`, nor `auto` if the backend that it ran was "
            "measured, too); tables show the ratio of the medians, or `= cudnn` for `auto` if it ran "
            "cudnn and cudnn is the fastest",
        ),
    ] = None
    verified: Annotated[
        bool | None,
        column(
            "verified",
            importance="answer",
            optional=True,
            meaning="whether the output is correct; null if unknown",
        ),
    ] = None
    doubts: Annotated[tuple[str, ...], column(meaning="reasons to doubt the figure")] = ()
    host_ns: Annotated[
        float | None, column(meaning="median of the host's own time per `eager` call")
    ] = None
    p90_ns: Annotated[float | None, column(meaning="90th percentile of the samples")] = None
    p99_ns: Annotated[float | None, column(meaning="99th percentile of the samples")] = None
    queries_per_s: Annotated[
        float | None,
        column(
            "Mquery/s",
            "mega",
            importance="detail",
            meaning="number of query rows processed per second, where a call processes batch x "
            "heads x queries of them; tables show millions",
        ),
    ] = None
    sequences_per_s: Annotated[
        float | None,
        column(
            "sequences/s",
            "figures",
            importance="detail",
            optional=True,
            meaning="number of sequences processed per second",
        ),
    ] = None
    peak_memory_bytes: Annotated[
        int | None, column(meaning="peak memory of a call, excluding its inputs")
    ] = None
    processes: Annotated[
        int | None, column(meaning="number of processes in which the samples were taken")
    ] = None
    between_turns_ns: Annotated[
        float | None,
        column(
            meaning="half-width of the 95 % interval, computed only from the differences between a "
            "backend's turns (its blocks of consecutive calls)"
        ),
    ] = None
    between_processes_ns: Annotated[
        float | None,
        column(
            meaning="half-width of the 95 % interval, computed only from the differences between "
            "processes"
        ),
    ] = None

    @property
    def ranked(self) -> bool:
        """Whether the row can be ranked. A ranked row needs a median and no failed check."""
        return self.status == "ok" and self.verified is not False and self.median_ns is not None

    @property
    def busy(self) -> bool:
        """Whether the machine was too busy for this figure to support any conclusion."""
        return _too_wide(self.samples, self.half)

    def is_wide(self, precision: float) -> bool:
        """Return whether `doubts` includes the warning that the interval exceeds `precision`."""
        half = self.half
        return self.samples >= FEW_SAMPLES and half is not None and precision < half <= UNKNOWN

    @property
    def half(
        self,
    ) -> Annotated[
        float | None,
        column(
            "±%",
            "spread",
            importance="answer",
            meaning="half-width of the 95 % interval of the median, or `busy` if the half-width "
            "exceeds the median",
        ),
    ]:
        """The half-width of the interval, divided by the median."""
        if self.low_ns is None or self.high_ns is None or self.median_ns is None:
            return None
        return _half(self.low_ns, self.high_ns, self.median_ns)

    @property
    def half_between_processes(
        self,
    ) -> Annotated[
        float | None,
        column(
            "±% processes",
            "spread",
            importance="detail",
            optional=True,
            meaning="`between_processes_ns` divided by the median",
        ),
    ]:
        """`between_processes_ns` divided by the median, or None if `between_processes_ns` is
        unknown.
        """
        return self.between_processes_ns and self.between_processes_ns / (self.median_ns or 1.0)


def _half(low_ns: float, high_ns: float, median_ns: float) -> float:
    # The median may be 0, because samples are whole nanoseconds.
    return (high_ns - low_ns) / 2 / max(median_ns, 1.0)


def _too_wide(count: int, half: float | None) -> bool:
    return count >= FEW_SAMPLES and (half or 0) > UNKNOWN


def unusable_measurements(cell: CellRow) -> tuple[str, ...]:
    """Return the measurements of a cell whose times support no conclusion, by the rule of `bench`.

    The machine was too busy while it took them (see `BenchRow.busy`).
    """

    def is_unusable(values: tuple[int, ...]) -> bool:
        interval = stats.interval(values)
        if interval is None:
            return False
        half = _half(interval.low, interval.high, stats.summarize(values).median)
        return _too_wide(len(values), half)

    return tuple(name for name, values in cell.samples.items() if is_unusable(values))


def usable_times(cell: CellRow) -> CellRow:
    """Return the cell without the samples of its `unusable_measurements`."""
    unusable = unusable_measurements(cell)
    kept = {name: values for name, values in cell.samples.items() if name not in unusable}
    return replace(cell, samples=kept) if unusable else cell


def bench_rows(
    store: Store,
    run: str,
    cells: Sequence[CellRow],
    samples: Samples,
    convention: str,
    precision: float,
    baseline: Baseline | None,
    ran: Ran,
) -> list[BenchRow]:
    """Return the rows of cells, in the order of the cells. See `with_speedup` for `baseline`."""
    peaks, tf32 = store.peaks(run), bool(store.environment(run).get("tf32"))
    right = store.verdicts(run)
    rows = []
    for cell in cells:
        key = cell.config, cell.backend
        row = BenchRow(
            *(run, *key, cell.status, cell.message),
            verified=right.get(key),
            peak_memory_bytes=cell.peak_memory_bytes,
        )
        if cell.status != "ok" or not samples[key]:
            rows.append(row)
            continue
        config, host = parse_config(cell.config), cell.samples.get(HOST)
        rate = flop_peak(peaks, str(config.dtype), tf32=tf32) if peaks else None
        for name, values in samples[key].items():
            x, interval = stats.summarize(values), stats.interval(values)
            calls_per_s = 1e9 / max(x.median, 1.0)  # a sample in whole ns may be 0
            measured = replace(
                row,
                measurement=name,
                samples=x.n,
                median_ns=x.median,
                low_ns=interval.low if interval else None,
                high_ns=interval.high if interval else None,
                processes=interval.processes if interval else None,
                between_turns_ns=interval.between_turns if interval else None,
                between_processes_ns=interval.between_processes if interval else None,
                mean_ns=x.mean,
                std_ns=x.std,
                min_ns=x.min,
                p90_ns=x.p90,
                p99_ns=x.p99,
                queries_per_s=config.batch * config.num_heads * config.seq_len_q * calls_per_s,
                sequences_per_s=config.batch * calls_per_s,
                host_ns=stats.summarize(host).median if host and name == EAGER else None,
                **_rates(config, x.median, peaks, rate, convention),
            )
            doubts = _doubts(measured, values, cell, peaks, rate, precision)
            rows.append(replace(measured, doubts=doubts))
    return with_regret(with_speedup(rows, baseline), ran)


def run_cells(
    store: Store,
    run: str,
    configs: Sequence[Config] | None = None,
    backends: Sequence[str] | None = None,
    baseline: Baseline | None = None,
) -> list[CellRow]:
    """Return the cells of the selected configs and backends, and the cells of the baseline, without
    duplicates. Raise NotFoundError if the run has no cell of a given config or backend.
    """
    cells: dict[tuple[str, str], CellRow] = {}
    for cell in with_predictions(store, store.cells(run)):
        cells.setdefault((cell.config, cell.backend), cell)
    held = {label: parse_config(label) for label, _ in cells}
    named = [baseline] if isinstance(baseline, Config) else []
    if isinstance(baseline, str) and backends is not None:
        backends = list(dict.fromkeys([baseline, *backends]))
    named += configs or ()
    needed = backends or ([baseline] if isinstance(baseline, str) else [])
    store.require_cells(run, named, needed)
    kept = [
        cell
        for (label, backend), cell in cells.items()
        if (configs is None or any(config.matches(held[label]) for config in named))
        and (backends is None or backend in backends)
    ]
    if not kept and (configs or backends):
        raise store.no_such_cell(run)
    return kept


def all_samples(store: Store, run: str, cells: Sequence[CellRow]) -> Samples:
    """Return the samples of the cells. A sample of `kernel` is the time of all kernels in a call.

    Runs of older versions do not store the `kernel` samples of the first process. They are computed
    from the torch trace.
    """
    ok = {cell.cell for cell in cells if cell.status == "ok"}
    sums: dict[str, dict[int, int]] = {}
    for launch in store.launches(run, profiler=TORCH):
        if launch.cell not in ok or launch.iteration is None or launch.kernel_kind == "op":
            continue
        if launch.duration_ns is not None:
            calls = sums.setdefault(launch.cell, {})
            calls[launch.iteration] = calls.get(launch.iteration, 0) + launch.duration_ns
    samples: Samples = {}
    for cell in cells:
        merged = dict(cell.samples)
        others = merged.get(KERNEL, ())
        if cell.cell in sums and not stats.of_first_process(others):
            traced = tuple(sums[cell.cell].values())
            turns = others.turns if isinstance(others, stats.Series) else ()
            merged[KERNEL] = stats.Series.of((*traced, *others), [(0, 0, len(traced)), *turns])
        samples[cell.config, cell.backend] = {
            name: merged[name] for name in MEASUREMENTS if merged.get(name)
        }
    return samples


def _rates(
    config: Config,
    median_ns: float,
    peaks: Peaks | None,
    rate: tuple[str, float] | None,
    convention: str,
) -> dict[str, Any]:
    """Return the rates of a call as fields of a BenchRow.

    The efficiency is the shortest possible time of the call divided by its measured time. The
    shortest possible time is the time of the computation or of the memory traffic at the device's
    peak, whichever is longer.
    """
    seconds = median_ns / 1e9
    if seconds <= 0:
        return {}
    work, moved = costs.flops(config, convention), costs.compulsory_bytes(config)
    found: dict[str, Any] = {"flops_per_s": work / seconds, "bytes_per_s": moved / seconds}
    if peaks and rate and (width := peaks.bandwidth_bytes_per_s):
        least, against = max(
            (work / rate[1], f"{rate[1] / 1e12:,.4g} TFLOP/s {rate[0]} ({peaks.source})"),
            (moved / width, f"{width / 1e9:,.4g} GB/s ({peaks.source})"),
        )
        found |= {"efficiency": least / seconds, "against": against}
    return found


def with_speedup(rows: Sequence[BenchRow], baseline: Baseline | None = None) -> list[BenchRow]:
    """Return the rows with their speed-ups over a baseline.

    If `baseline` is a backend, a row is compared with this backend on the row's config. If it is a
    config, a row is compared with this config on `auto`, or else on the row's backend. If it is
    None, a row is compared with `naive`, or else with `math`, on the row's config.
    """
    medians = {
        (row.config, row.backend, row.measurement): row.median_ns for row in rows if row.ranked
    }
    result = []
    for row in rows:
        references = (baseline,) if isinstance(baseline, str) else REFERENCES
        cells = [(row.config, name) for name in references]
        if isinstance(baseline, Config):
            dtype = baseline.dtype or parse_config(row.config).dtype
            label = replace(baseline, dtype=dtype).label
            cells = [(label, CHOSEN), (label, row.backend)]
        cell = next((cell for cell in cells if (*cell, row.measurement) in medians), None)
        if row.ranked and cell and row.median_ns and (ns := medians[*cell, row.measurement]):
            text = " ".join(cell) if isinstance(baseline, Config) else cell[1]
            row = replace(row, speedup=ns / row.median_ns, baseline=text)
        result.append(row)
    return result


def with_regret(rows: Sequence[BenchRow], ran: Ran) -> list[BenchRow]:
    """Return the rows with the `regret` field filled in.

    The regret is relative to the fastest correct backend on the same config, among the `contenders`.
    It is 0 for `auto` if `auto` is faster than all other backends, as it ran one of them.
    """
    medians: dict[tuple[str, str | None], dict[str, float]] = {}
    for row in rows:
        if row.ranked and row.median_ns:
            medians.setdefault((row.config, row.measurement), {})[row.backend] = row.median_ns
    names = {key: contenders(own) for key, own in medians.items()}
    fastest = {
        (config, measurement): min(
            medians[config, measurement][name]
            for name in without_choice(own, ran.get((config, CHOSEN)))
        )
        for (config, measurement), own in names.items()
    }
    return [
        replace(row, regret=max(0.0, row.median_ns / fastest[row.config, row.measurement] - 1))
        if row.median_ns and row.backend in names.get((row.config, row.measurement), ())
        else row
        for row in rows
    ]


def fastest_backends(rows: Iterable[BenchRow]) -> dict[str, set[str]]:
    """Return the fastest backends of each config. The rows have one measurement."""
    found: dict[str, set[str]] = {}
    for row in rows:
        if row.regret == 0:
            found.setdefault(row.config, set()).add(row.backend)
    return found


def contenders(backends: Collection[str]) -> Collection[str]:
    """Return the backends of one config that can be the fastest.

    `all-disabled` is left out if there are others, because it is no backend of its own: it is
    another way to run cudnn.
    """
    return [name for name in backends if name != ALL_DISABLED] or backends


def without_choice(backends: Collection[str], choice: str | None) -> Collection[str]:
    """Return the backends without `auto` if the backend that it ran is one of them.

    Both cells then measure the same kernels, so `auto` cannot be faster than this backend.
    """
    return [name for name in backends if name != CHOSEN] if choice in backends else backends


SamplesOf = Callable[[BenchRow], tuple[int, ...]]
DROP = 1.5  # a drop is reported if the rate falls by at least this factor
BENT = 0.3  # both exponents of a Growth are shown if they differ by more than this value


class Axis(NamedTuple):
    """A property in which the configs of a sweep differ."""

    key: str
    title: str
    token: str  # a pattern that matches the property in the label of a config
    value: Callable[[Config], int]


LENGTH = Axis("seq_len", "sequence length", r"-s(?:kv)?\d+(?=-)", lambda c: c.seq_len_kv)
AXES = (
    Axis("batch", "batch", r"^b\d+-", lambda c: c.batch),
    Axis("heads", "heads", r"-h\d+(?=-)", lambda c: c.num_heads),
    LENGTH,
    Axis("head_dim", "head_dim", r"-d\d+(?=-|$)", lambda c: c.head_dim),
)
DTYPE_TOKEN = rf"-(?:{'|'.join(CONFIG_DTYPES)})(?=-|$)"


def family(label: str, token: str) -> str:
    """Return the label of a config without the part that `token` matches."""
    return re.sub(token, "", label, count=1)


def families(labels: Sequence[str], axis: Axis) -> dict[str, dict[int, str]]:
    """Group the labels of configs that differ only in this axis.

    The outer keys are labels without the axis. The inner keys are the values of the axis, in
    ascending order. Each group has at least two values.
    """
    groups: dict[str, dict[int, str]] = {}
    for label in dict.fromkeys(labels):
        groups.setdefault(family(label, axis.token), {})[axis.value(parse_config(label))] = label
    return {name: dict(sorted(group.items())) for name, group in groups.items() if len(group) > 1}


@dataclass(frozen=True, slots=True)
class AxisEvent:
    """A change between two neighbouring values of an axis."""

    # `crossover` means that `backend` overtakes `other`. `end` means that `other` has no median at
    # `after`, so `backend` is the fastest there. `drop` means that the rate of `backend` falls by
    # `factor`.
    kind: str
    backend: str
    before: int
    after: int
    text: str
    other: str | None = None
    factor: float | None = None

    @property
    def mark(self) -> str:
        """The text that marks the event in a chart, such as `math 3.10x per FLOP vs 1,024`."""
        if self.kind == "crossover":
            return f"{self.backend} overtakes {self.other}"
        if self.kind == "end":
            return f"{self.other} ends"
        return f"{self.backend} {ratio_text(self.factor or 1)} per FLOP vs {self.before:,}"

    @property
    def place(self) -> float:
        """The position of the event's mark on a logarithmic axis."""
        between = math.sqrt(self.before * self.after)
        return float(self.after) if self.kind == "drop" else between


@dataclass(frozen=True, slots=True)
class Growth:
    """The growth of a backend's peak memory with the sequence length, as a power function."""

    backend: str
    points: tuple[tuple[int, int], ...]  # pairs of a length and a number of bytes
    order: float  # the exponent of the power function that fits all points
    first: float  # the exponent between the first two points
    last: float  # the exponent between the last two points

    @property
    def text(self) -> str:
        """A text such as `math needs 2.1 to 512 MiB (growing as S^1.94)`."""
        low, high = (size / MIB for _, size in (self.points[0], self.points[-1]))
        growth = f"S^{self.order:.2f}"
        if len(self.points) == 2:
            growth += ", from only two points"
        elif abs(self.last - self.first) > BENT:
            growth = f"S^{self.first:.2f} at first and as S^{self.last:.2f} at the end"
        return f"{self.backend} needs {low:,.4g} to {high:,.4g} MiB (growing as {growth})"


@dataclass(frozen=True, slots=True)
class Sweep:
    """A group of configs that differ in one axis only, and the events along this axis."""

    axis: str
    title: str
    name: str  # the part of the label that all configs share
    values: tuple[int, ...]
    labels: tuple[str, ...]
    events: tuple[AxisEvent, ...]
    statement: str
    growth: tuple[Growth, ...] = ()


def sweeps(rows: Sequence[BenchRow], samples_of: SamplesOf, ran: Ran) -> tuple[Sweep, ...]:
    """Return the sweeps in rows of one measurement. The longest sweeps of an axis come first."""
    ranked = [row for row in rows if row.ranked and row.median_ns]
    places = {(row.config, row.backend): row for row in ranked}
    found = []
    for axis in AXES:
        groups = families([row.config for row in ranked], axis)
        for name, group in sorted(groups.items(), key=lambda item: -len(item[1])):
            lines = _lines(group, places)
            if not lines:
                continue
            rivals = _rivals(lines, ran)
            events = (*_crossovers(lines, rivals, samples_of, ran), *_drops(lines, samples_of, ran))
            growth = _growths(lines) if axis is LENGTH else ()
            sweep = Sweep(
                *(axis.key, axis.title, name, tuple(group), tuple(group.values())),
                *(events, _statement(rivals, events, ran), growth),
            )
            found.append(sweep)
    return tuple(found)


Lines = dict[str, dict[int, BenchRow]]  # rows by backend and by value of the axis


def _lines(group: Mapping[int, str], places: Mapping[tuple[str, str], BenchRow]) -> Lines:
    backends = dict.fromkeys(backend for _, backend in places)
    lines = {
        backend: {
            value: places[label, backend]
            for value, label in group.items()
            if (label, backend) in places
        }
        for backend in backends
    }
    return {backend: line for backend, line in lines.items() if len(line) > 1}


def _rivals(lines: Lines, ran: Ran) -> Lines:
    """Return the lines without the rows for which PyTorch chose a backend that was also measured
    separately.
    """

    def is_another(row: BenchRow, value: int) -> bool:
        took = ran.get((row.config, row.backend))
        return not pytorch_chooses(row.backend) or value not in lines.get(took or "", {})

    kept = {
        name: {value: row for value, row in line.items() if is_another(row, value)}
        for name, line in lines.items()
    }
    return {name: line for name, line in kept.items() if line}


def _leaders(rivals: Lines) -> dict[int, BenchRow]:
    leaders: dict[int, BenchRow] = {}
    for line in rivals.values():
        for value, row in line.items():
            if value not in leaders or _ns(row) < _ns(leaders[value]):
                leaders[value] = row
    return dict(sorted(leaders.items()))


def _ns(row: BenchRow) -> float:
    return float(row.median_ns or 0)


def _crossovers(lines: Lines, rivals: Lines, samples_of: SamplesOf, ran: Ran) -> list[AxisEvent]:
    """Return an event for each point of the axis at which the samples show a new fastest backend.

    There is also an event at each point where the fastest backend so far has no median.
    """

    def ahead(one: str, other: str, value: int) -> bool:
        rows = lines[one].get(value), lines[other].get(value)
        if rows[0] is None or rows[1] is None:
            return False
        # A difference between `auto` and the backend that it ran is noise.
        took = [ran.get((row.config, row.backend)) for row in rows if row]
        if took[0] is not None and took[0] == took[1]:
            return False
        return stats.compare(samples_of(rows[1]), samples_of(rows[0])).verdict == "faster"

    events, leads = [], [(value, row.backend) for value, row in _leaders(rivals).items()]
    place, leader = leads[0]
    for value, backend in leads[1:]:
        if value not in lines[leader]:
            text = f"{leader} has no time at {value:,}, where {backend} is fastest"
            events.append(AxisEvent("end", backend, place, value, text, other=leader))
            leader = backend
        elif backend != leader and ahead(backend, leader, value):
            if ahead(leader, backend, place):
                text = f"{backend} overtakes {leader} between {place:,} and {value:,}"
                events.append(AxisEvent("crossover", backend, place, value, text, other=leader))
            leader = backend
        if backend == leader:
            place = value
    return events


def _drops(lines: Lines, samples_of: SamplesOf, ran: Ran) -> list[AxisEvent]:
    """Return an event for each value at which a backend's rate is much lower than at the previous
    value. The largest drop comes first.
    """
    events = []
    for backend, line in lines.items():
        for (before, old), (after, new) in pairwise(line.items()):
            if not old.flops_per_s or not new.flops_per_s:
                continue
            factor = old.flops_per_s / new.flops_per_s
            # the times that the new config would take at the old rate
            samples, work = samples_of(old), _ns(new) / _ns(old) / factor
            turns = samples.turns if isinstance(samples, stats.Series) else ()
            like_work = stats.Series.of((round(sample * work) for sample in samples), turns)
            if factor < DROP or stats.compare(like_work, samples_of(new)).verdict != "slower":
                continue
            took = [ran.get((row.config, backend)) for row in (old, new)]
            why = ""
            if pytorch_chooses(backend) and None not in took and took[0] != took[1]:
                why = f" (it ran {took[1]} instead of {took[0]})"
            text = f"{backend} takes {as_long(factor)} per FLOP at {after:,} as at {before:,}{why}"
            events.append(AxisEvent("drop", backend, before, after, text, factor=factor))
    return sorted(events, key=lambda event: -(event.factor or 0))


SHOWN_EVENTS = 4
# The maximum rate is reported if it exceeds the rates at both ends of the axis by this factor.
SUMMIT = 1.05


def _statement(rivals: Lines, events: Sequence[AxisEvent], ran: Ran) -> str:
    leaders = _leaders(rivals)
    values = list(leaders)
    crossings = [event for event in events if event.kind != "drop"]
    names = dict.fromkeys(row.backend for row in leaders.values())
    if len(rivals) == 1:
        lead = ""
    elif len(names) == 1:
        every = "both" if len(values) == 2 else f"all {len(values)}"
        lead = f"{next(iter(names))} has the lowest median at {every} values; "
    elif crossings:
        lead = f"{'; '.join(event.text for event in crossings)}; "
    else:
        # PyTorch may choose another backend for auto at each value.
        spans = [
            f"{(pytorch_chooses(row.backend) and ran.get((row.config, row.backend))) or row.backend} "
            f"at {value:,}"
            for value, row in leaders.items()
        ]
        lead = f"the lowest median belongs to {', '.join(spans)}; "
    rates = {value: row.flops_per_s / 1e12 for value, row in leaders.items() if row.flops_per_s}
    rate = ""
    if len(rates) > 1:
        (first, low), *_, (last, high) = rates.items()
        rate = (
            f"the best rate changes from {rate_figure(low)} TFLOP/s at {first:,} to "
            f"{rate_figure(high)} at {last:,}"
        )
        top = max(rates, key=lambda value: rates[value])
        if rates[top] > SUMMIT * max(low, high):
            rate += f", with a maximum of {rate_figure(rates[top])} at {top:,}"
    drops = [event.text for event in events if event.kind == "drop"]
    more = f" and {len(drops) - SHOWN_EVENTS} more" if len(drops) > SHOWN_EVENTS else ""
    fall = f". Drops: {'; '.join(drops[:SHOWN_EVENTS])}{more}" if drops else ""
    return f"{lead}{rate}{fall}".removesuffix("; ")


def _growths(lines: Lines) -> tuple[Growth, ...]:
    found = []
    for backend, line in lines.items():
        points = tuple(
            (value, row.peak_memory_bytes) for value, row in line.items() if row.peak_memory_bytes
        )
        if len(points) > 1:
            ends = _exponent(points[:2]), _exponent(points[-2:])
            found.append(Growth(backend, points, _exponent(points), *ends))
    return tuple(found)


def _exponent(points: Sequence[tuple[int, int]]) -> float:
    xs, ys = ([math.log(value) for value in values] for values in zip(*points, strict=True))
    return linear_regression(xs, ys).slope


@dataclass(frozen=True, slots=True)
class DtypePair:
    """A comparison of two dtypes on otherwise equal configs and backends."""

    dtype: str
    other: str
    counts: Mapping[str, int]
    statement: str


WORDS: dict[str, str] = {
    "same": f"as fast (within {percent(stats.THRESHOLD)})",
    "faster": "faster",
    "slower": "slower",
    "unknown": "not significantly different",
}


def dtype_pairs(rows: Sequence[BenchRow], samples_of: SamplesOf) -> tuple[DtypePair, ...]:
    """Compare every dtype with each dtype that comes before it in CONFIG_DTYPES."""
    cells: dict[tuple[str, str], dict[str, BenchRow]] = {}
    for row in rows:
        if row.ranked and row.backend not in OWN_CHOICE:
            dtype = str(parse_config(row.config).dtype)
            cells.setdefault((family(row.config, DTYPE_TOKEN), row.backend), {})[dtype] = row
    pairs = []
    for other, dtype in combinations(CONFIG_DTYPES, 2):
        both = [(cell[other], cell[dtype]) for cell in cells.values() if {other, dtype} <= {*cell}]
        if both:
            pairs.append(_dtype_pair(dtype, other, both, samples_of))
    return tuple(pairs)


def _dtype_pair(
    dtype: str,
    other: str,
    both: Sequence[tuple[BenchRow, BenchRow]],
    samples_of: SamplesOf,
) -> DtypePair:
    verdicts: dict[str, list[tuple[BenchRow, BenchRow]]] = {}
    for old, new in both:
        speed: str = stats.compare(samples_of(old), samples_of(new)).verdict
        verdicts.setdefault(speed, []).append((old, new))
    parts = []
    for verdict, words in WORDS.items():
        own = verdicts.get(verdict, [])
        if not own:
            continue
        text = f"{words} in {'all' if len(own) == len(both) > 1 else len(own)}"
        if verdict in ("faster", "slower"):
            old, new = max(own, key=lambda pair: abs(math.log(_ns(pair[1]) / _ns(pair[0]))))
            speed_up = by_how_much(_ns(old) / _ns(new))
            most = "up to " if len(own) > 1 else ""
            text += f" ({most}{speed_up}, {new.backend} on {family(new.config, DTYPE_TOKEN)})"
        parts.append(text)
    number = counted(len(both), "pair of cells", "pairs of cells")
    statement = f"compared with {other} in {number}, {dtype} is {', '.join(parts)}"
    counts = {verdict: len(own) for verdict, own in verdicts.items()}
    return DtypePair(dtype, other, counts, statement)
