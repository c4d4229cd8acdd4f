"""The rows of a bench, and the doubts about a measurement. A measurement is doubtful if the clocks
changed or were throttled, if the samples disagree, or if a rate is above the limits of the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from profharness import stats
from profharness.attention import costs
from profharness.attention.config import Config, parse_config
from profharness.devices import MB, Peaks, flop_peak
from profharness.errors import NotFoundError, join_few
from profharness.measurements.agreement import with_predictions
from profharness.rows import (
    COLD,
    CPU_WAIT,
    EAGER,
    EVENT,
    HOST,
    HOSTED,
    KERNEL,
    MEASUREMENTS,
    SHARED_CORES,
    TORCH,
    CellRow,
)
from profharness.store import Store

CLOCK_MOVED = 0.05
# from this share of time in which the worker waited for a CPU, the machine is reported as busy
BUSY = 0.1
# from this ratio of an interval's half width to the median, the median is meaningless
UNKNOWN = 1.0
UNSTEADY = (
    "machine too busy for this figure: half its 95 % interval is wider than the median; measure "
    "again when nothing else runs"
)
FEW_SAMPLES = 5
SHOWN_NAMES = 8
# The bits of NVML's clocks event reasons that say that a clock was reduced (nvml.h,
# nvmlClocksEventReason*).
THROTTLES = {
    0x4: "the power limit (software power cap)",
    0x8: "a hardware slowdown",
    0x20: "temperature (software thermal slowdown)",
    0x40: "temperature (hardware thermal slowdown)",
    0x80: "the power supply (hardware power brake)",
}


class Rates(NamedTuple):
    """The rates of a call, the work that they are computed from, and the limits of the device."""

    flops_per_s: float | None
    bytes_per_s: float | None
    efficiency: float | None
    against: str | None  # the peak that limits the call
    flops: int
    moved_bytes: int
    peaks: Peaks | None
    rate: tuple[str, float] | None


def doubts(
    measurement: str,
    samples: Sequence[int],
    interval: stats.Interval | None,
    cell: CellRow,
    rates: Rates,
    precision: float,
) -> tuple[str, ...]:
    """Return one sentence for each doubt about a measurement, the most serious doubt first. An
    interval is wide if its half width is more than `precision` times the median.
    """
    texts = [*rates_above_ceiling(measurement, rates), *clock_doubts(cell.clocks)]
    texts += host_doubts(cell, measurement)
    if len(samples) < FEW_SAMPLES or interval is None:
        return (*texts, f"only {len(samples)} samples")
    if stats.is_bimodal(samples):
        texts.append("the samples have two modes, so the median may jump between them")
    half = half_width(interval.low, interval.high, stats.summarize(samples).median)
    if half > UNKNOWN:
        texts.append(UNSTEADY)
    elif half > precision:
        texts.append(f"the median is known to ±{half:.1%} only (asked for: ±{precision:.1%})")
    return tuple(texts)


def rates_above_ceiling(measurement: str, rates: Rates) -> tuple[str, ...]:
    """Return a sentence for each rate that is above the limit of the device. The sentence contains
    an explanation.
    """
    peaks, texts = rates.peaks, []
    if peaks is None:
        return ()
    width = peaks.bandwidth_bytes_per_s
    if width and rates.bytes_per_s and rates.bytes_per_s > width:
        texts.append(
            f"{rates.bytes_per_s / width:.0%} of the memory's {width / 1e9:,.4g} GB/s "
            f"({peaks.source}): {_why_bytes(measurement, rates, width)}"
        )
    if rates.rate and rates.flops_per_s and rates.flops_per_s > rates.rate[1]:
        name, peak = rates.rate
        reason = "check that the output is right and that the peak is this device's"
        if name == "fp32":
            reason = "tensor cores may have been used (TF32 or a split of fp32)"
        share = rates.flops_per_s / peak
        texts.append(f"{share:.0%} of {peak / 1e12:,.4g} TFLOP/s {name} ({peaks.source}): {reason}")
    return tuple(texts)


def _why_bytes(measurement: str, rates: Rates, width: float) -> str:
    """Explain why a rate can be above that of the memory, which is that data in the L2 cache is not
    read from memory.
    """
    moved, l2_bytes = rates.moved_bytes, rates.peaks.l2_bytes if rates.peaks else None
    size = f"the working set of {moved / MB:,.1f} MB"
    if l2_bytes is None:
        return f"{size} may fit in L2, whose size is not known"
    l2 = f"the L2 of {l2_bytes / MB:,.0f} MB"
    flushed = (
        "; it was flushed, but the output may stay there" if measurement in (COLD, EVENT) else ""
    )
    if moved <= l2_bytes:
        return f"{size} fits in {l2}{flushed or ', so this is not the rate of the memory'}"
    if (rates.bytes_per_s or 0) / width <= moved / (moved - l2_bytes):
        return f"a part of {size} can stay in {l2}{flushed}"
    return f"{size} is so much larger than {l2} that this is no reason; do not use the figure"


def clock_doubts(clocks: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the doubts that follow from the clocks of a cell and from its reasons for throttling."""
    texts = []
    low, high = clocks.get("sm_mhz_min"), clocks.get("sm_mhz_max")
    if low and high and (high - low) / high > CLOCK_MOVED:
        texts.append(f"the SM clock moved between {low:g} and {high:g} MHz")
    bits = int(clocks.get("throttle_reasons") or 0)
    reasons = [text for bit, text in THROTTLES.items() if bits & bit]
    if reasons:
        texts.append(f"the clock was held back by {' and '.join(reasons)}")
    return tuple(texts)


def host_doubts(cell: CellRow, measurement: str) -> tuple[str, ...]:
    """Return the doubts about a measurement that includes host time: lanes that ran in parallel,
    and a busy CPU.
    """
    if measurement not in HOSTED:
        return ()
    texts = [SHARED_CORES] if SHARED_CORES in cell.warnings else []
    if (share := cell.clocks.get(CPU_WAIT) or 0) > BUSY:
        texts.append(f"machine busy: {share:.0%} of the time the worker waited for a CPU")
    return tuple(texts)


def half_width(low: float, high: float, median: float) -> float:
    """Return the ratio of an interval's half width to the median."""
    return (high - low) / 2 / max(median, 1.0)  # samples are whole nanoseconds


CHOSEN = "auto"
# By (config, backend) and measurement: the nanoseconds per call of each sample.
Samples = dict[tuple[str, str], dict[str, tuple[int, ...]]]
Baseline = Config | str  # a config, or the name of a backend
# if no baseline is given, speed-ups refer to the first of these that was measured
REFERENCES = ("naive", "math")


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One measurement of one cell. A cell without samples has one row with measurement None."""

    run: str
    config: str
    backend: str
    status: str
    message: str | None
    measurement: str | None = None
    samples: int = 0
    median_ns: float | None = None
    low_ns: float | None = None  # 95 % confidence interval of the median, by `stats.interval`
    high_ns: float | None = None
    mean_ns: float | None = None
    std_ns: float | None = None
    min_ns: float | None = None
    flops_per_s: float | None = None
    bytes_per_s: float | None = None
    efficiency: float | None = None  # share of the peak that `against` names
    against: str | None = None
    speedup: float | None = None  # the median of `baseline` divided by this median
    baseline: str | None = None
    # this median divided by the median of the fastest correct backend, minus 1
    regret: float | None = None
    # whether the output was found correct; None if it was not verified
    verified: bool | None = None
    doubts: tuple[str, ...] = ()
    # Median of the host's own time per eager call. Only the row of `eager` has this value.
    host_ns: float | None = None
    p90_ns: float | None = None
    p99_ns: float | None = None
    queries_per_s: float | None = None  # query rows per second, counted over all heads
    sequences_per_s: float | None = None  # sequences per second, counted over the batch
    peak_memory_bytes: int | None = None
    processes: int | None = None
    # half width of the interval if only the differences between turns are considered
    between_turns_ns: float | None = None
    # half width of the interval if only the differences between processes are considered
    between_processes_ns: float | None = None

    @property
    def ranked(self) -> bool:
        """Whether the row can be compared with others: the cell ran, and no check found its output
        wrong.
        """
        return self.status == "ok" and self.verified is not False and self.median_ns is not None

    def is_wide(self, precision: float) -> bool:
        """Return whether the interval is wider than `precision` allows. If so, this is the last of
        the doubts.
        """
        half = self.half
        return self.samples >= FEW_SAMPLES and half is not None and precision < half <= UNKNOWN

    @property
    def half(self) -> float | None:
        """The ratio of the interval's half width to the median."""
        if self.low_ns is None or self.high_ns is None or self.median_ns is None:
            return None
        return half_width(self.low_ns, self.high_ns, self.median_ns)


def bench_rows(
    store: Store,
    run: str,
    cells: Sequence[CellRow],
    samples: Samples,
    convention: str,
    precision: float,
    baseline: Baseline | None,
) -> list[BenchRow]:
    """Return the rows of the cells of a run, in order. `with_speedup` describes the speed-ups."""
    peaks, tf32 = store.peaks(run), bool(store.environment(run).get("tf32"))
    right = store.verdicts(run)
    rows = []
    for cell in cells:
        place = cell.config, cell.backend
        row = BenchRow(run, *place, cell.status, cell.message, verified=right.get(place))
        row = replace(row, peak_memory_bytes=cell.peak_memory_bytes)
        if cell.status != "ok" or not samples[place]:
            rows.append(row)
            continue
        config = parse_config(cell.config)
        for name, values in samples[place].items():
            x, interval = stats.summarize(values), stats.interval(values)
            calls_per_s = 1e9 / max(x.median, 1.0)  # samples are whole nanoseconds
            rates = rates_of(config, x.median, peaks, convention, tf32=tf32)
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
                flops_per_s=rates.flops_per_s,
                bytes_per_s=rates.bytes_per_s,
                efficiency=rates.efficiency,
                against=rates.against,
                host_ns=host_ns(cell) if name == EAGER else None,
                doubts=doubts(name, values, interval, cell, rates, precision),
            )
            rows.append(measured)
    return with_regret(with_speedup(rows, baseline))


def host_ns(cell: CellRow) -> float | None:
    """Return the median of the host's own time per eager call, or None if it was not measured."""
    values = cell.samples.get(HOST)
    return stats.summarize(values).median if values else None


def run_cells(
    store: Store,
    run: str,
    configs: Sequence[Config] | None = None,
    backends: Sequence[str] | None = None,
    baseline: Baseline | None = None,
) -> list[CellRow]:
    """Return the cells of a run on the selected configs and backends, and those of the baseline. If
    there are several equal cells, return the first. Raise NotFoundError if the run has no cell of a
    config or backend.
    """
    cells: dict[tuple[str, str], CellRow] = {}
    for cell in with_predictions(store, store.cells(run)):
        cells.setdefault((cell.config, cell.backend), cell)
    held = {label: parse_config(label) for label, _ in cells}
    named = [("the baseline", baseline)] if isinstance(baseline, Config) else []
    if isinstance(baseline, str) and backends is not None:
        backends = list(dict.fromkeys([baseline, *backends]))
    named += [("config", config) for config in configs or ()]
    for what, config in named:
        if not any(map(config.matches, held.values())):
            raise NotFoundError(
                f"run {run} has no cell of {what} {config}; it has {join_few(held, SHOWN_NAMES)}"
            )
    names = dict.fromkeys(backend for _, backend in cells)
    for name in backends or ((baseline,) if isinstance(baseline, str) else ()):
        if name not in names:
            raise NotFoundError(
                f"run {run} has no cell of backend {name}; it has {join_few(names, SHOWN_NAMES)}"
            )
    kept = [
        cell
        for (label, backend), cell in cells.items()
        if (configs is None or any(config.matches(held[label]) for _, config in named))
        and (backends is None or backend in backends)
    ]
    if not kept and (configs or backends):
        raise NotFoundError(f"run {run} has no cell of these configs on these backends")
    return kept


def all_samples(store: Store, run: str, cells: Sequence[CellRow]) -> Samples:
    """Return the samples of the cells. The measurement `kernel` is the time of all kernels of a
    profiled call. If the run was made with an older version, its samples of the first process are
    taken from the torch traces.
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


def rates_of(
    config: Config, median_ns: float, peaks: Peaks | None, convention: str, *, tf32: bool = False
) -> Rates:
    """Return the rates of a call. Its efficiency is relative to the peak that limits the call,
    which is the one that would take longer on its own.
    """
    work, moved = costs.flops(config, convention), costs.compulsory_bytes(config)
    seconds = median_ns / 1e9
    if seconds <= 0:
        return Rates(None, None, None, None, work, moved, peaks, None)
    rate = flop_peak(peaks, str(config.dtype), tf32=tf32) if peaks else None
    width = peaks.bandwidth_bytes_per_s if peaks else None
    bounds = []
    if rate is not None and peaks is not None:
        text = f"{rate[1] / 1e12:,.4g} TFLOP/s {rate[0]} ({peaks.source})"
        bounds.append((work / rate[1], text))
    if width and peaks is not None:
        bounds.append((moved / width, f"{width / 1e9:,.4g} GB/s ({peaks.source})"))
    least, against = max(bounds) if len(bounds) == 2 else (None, None)
    efficiency = least / seconds if least is not None else None
    return Rates(work / seconds, moved / seconds, efficiency, against, work, moved, peaks, rate)


def with_speedup(rows: Sequence[BenchRow], baseline: Baseline | None = None) -> list[BenchRow]:
    """Return the rows with their speed-ups. If `baseline` is a backend, they are relative to this
    backend on the same config. If it is a config, they are relative to this config on `auto`, or on
    the row's own backend. Otherwise they are relative to `naive` or `math` on the same config.
    """
    medians = {
        (row.config, row.backend, row.measurement): row.median_ns for row in rows if row.ranked
    }
    result = []
    for row in rows:
        references = (baseline,) if isinstance(baseline, str) else REFERENCES
        places = [(row.config, name) for name in references]
        if isinstance(baseline, Config):
            dtype = baseline.dtype or parse_config(row.config).dtype
            label = replace(baseline, dtype=dtype).label
            places = [(label, CHOSEN), (label, row.backend)]
        place = next((place for place in places if (*place, row.measurement) in medians), None)
        if row.ranked and place and row.median_ns and (ns := medians[*place, row.measurement]):
            text = " ".join(place) if isinstance(baseline, Config) else place[1]
            row = replace(row, speedup=ns / row.median_ns, baseline=text)
        result.append(row)
    return result


def with_regret(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """Return the rows with their regret, which is the cost relative to the fastest correct backend
    on the same config.
    """
    fastest: dict[tuple[str, str | None], float] = {}
    for row in rows:
        if row.ranked and row.median_ns:
            key = (row.config, row.measurement)
            fastest[key] = min(fastest.get(key, row.median_ns), row.median_ns)
    return [
        replace(row, regret=row.median_ns / fastest[row.config, row.measurement] - 1)
        if row.ranked and row.median_ns
        else row
        for row in rows
    ]
