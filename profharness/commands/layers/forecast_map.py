"""Forecast the attention calls of a program on another GPU.

Dispatch rules predict the backend of each call. The atlas of that GPU gives the time of its kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from profharness.atlas.model import Estimate
from profharness.atlas.predictions import Place, disagreement, machine_text, place_estimates
from profharness.attention.config import AUTO, SDPA_BACKENDS, Config, parse_config, sdpa_setting
from profharness.attention.dispatch.machine import from_config, permitted
from profharness.attention.dispatch.predict import predict
from profharness.errors import NotFoundError
from profharness.program.layer_map import (
    Forecast,
    LayerForecast,
    LayerMap,
    LayerRow,
    join_numbered,
)
from profharness.stats import THRESHOLD
from profharness.traces.kernel_names import parse_kernel_name

OF_SDPA = ("sdpa", "inner")  # kinds of calls for which PyTorch chooses the backend
SOURCES = ("measured", "model", "floor")  # sources of times, from the most to the least certain
WHY_NOT = {
    "eager": "eager attention calls no backend",
    "flex": "flex_attention calls no backend of scaled_dot_product_attention",
    "custom": "a package's own attention",
    "fast_path": "nn.TransformerEncoder's fast path has an op of its own",
    "replay": "its shapes are not told",
}
CHOICES = {
    "none": "no backend takes it there: PyTorch raises",
    "unknown": "the rules do not know what PyTorch takes there",
}
NO_CONFIG = "no config says the call"

Points = Sequence[tuple[str, float]]
ForecastQuery = tuple[Config, str]  # a config, and the backends that the program allowed


@dataclass(frozen=True, slots=True)
class _Prediction:
    """The backend that PyTorch chooses for a config on the other GPU, and those that support it."""

    choice: str
    takers: tuple[str, ...]
    estimates: Mapping[str, Estimate]


@dataclass(frozen=True, slots=True)
class _Total:
    """The total time of the calls with several configs, in nanoseconds.

    `ns` and `high` are None if only a lower bound is known for one of the configs.
    """

    ns: float | None
    low: float | None
    high: float | None


def forecast_map(layers: LayerMap, place: Place, doubt: str = "") -> LayerMap:
    """Return the layer map with an additional forecast, for the GPU of `place`.

    `doubt` is the reason why this GPU has no atlas. Raise NotFoundError if no call of the map can
    be predicted.
    """
    by_step = any(row.calls is not None for row in layers.rows)
    points = [
        () if _why_not(row, by_step) else row.points or row.program_points for row in layers.rows
    ]
    asked = {
        (parse_config(label), _allowed(row)): None
        for row, own in zip(layers.rows, points, strict=True)
        for label, _ in own
    }
    if not asked:
        whys = [why for row in layers.rows if (why := _why_not(row, by_step))]
        raise NotFoundError(
            f"no call of run {layers.run} can be predicted: {'; '.join(dict.fromkeys(whys))}"
        )
    answers = dict(zip(asked, _predictions(list(asked), place), strict=True))
    rows = [
        _row(row, own, answers) if own else LayerForecast(predicted_reason=_why_not(row, by_step))
        for row, own in zip(layers.rows, points, strict=True)
    ]
    whole = sum(row.predicted_total_ns or 0 for row in rows)
    if whole:
        rows = [
            replace(row, predicted_share=row.predicted_total_ns / whole)
            if row.predicted_total_ns is not None
            else row
            for row in rows
        ]
    apart = disagreement(place, [_as_sampled(config) for config, _ in asked])
    doubts = (doubt, place.others, apart, *_doubts(layers, asked))
    rows = [replace(row, predicted_gpu=place.gpu) for row in rows]
    forecast = _forecast(layers, place, by_step, rows, points, doubts)
    return replace(layers, forecasts=(*layers.forecasts, forecast))


def _allowed(row: LayerRow) -> str:
    """Return the backends that the program allowed, in the notation of `sdpa_setting`.

    Return an empty text if the program allowed no backend.
    """
    return AUTO if row.asked is None else row.asked.replace(",", "+")


def _why_not(row: LayerRow, by_step: bool) -> str | None:
    """Return why a row has no prediction, or None if it has one."""
    if row.kind not in OF_SDPA:
        return WHY_NOT.get(row.kind, f"{row.kind} is not scaled_dot_product_attention")
    if by_step and row.calls is None:
        return "no recorded step shows these calls"
    if row.points or row.program_points:
        return None
    return "; ".join(row.reasons[:1]) or NO_CONFIG


def _predictions(asked: Sequence[ForecastQuery], place: Place) -> Iterator[_Prediction]:
    """Yield the backend that PyTorch chooses for each config, among those that the program allowed."""
    configs = [_as_sampled(config) for config, _ in asked]
    found = iter(place_estimates(place, configs, SDPA_BACKENDS))
    for config, allowed in asked:
        estimates = {name: next(found) for name in SDPA_BACKENDS}
        params = from_config(config)
        prediction = predict(params, place.rules)
        takers = tuple(name for name in SDPA_BACKENDS if prediction.backends[name].eligible)
        choice = prediction.choice
        if not allowed:
            choice = "none"
        elif allowed != AUTO:
            setting = sdpa_setting(allowed)
            choice = predict(permitted(params, setting), place.rules).choice
        yield _Prediction(choice, takers, estimates)


def _as_sampled(config: Config) -> Config:
    """Return the config with contiguous tensors and the default scale, as atlases measure it."""
    return replace(config.contiguous(), mask_strides=None, scale=None)


def _row(
    row: LayerRow, points: Points, answers: Mapping[ForecastQuery, _Prediction]
) -> LayerForecast:
    weighted = [(answers[parse_config(label), _allowed(row)], calls) for label, calls in points]
    choices = dict.fromkeys(answer.choice for answer, _ in weighted)
    backend = " and ".join(sorted(choices))
    if failed := [CHOICES[name] for name in choices if name in CHOICES]:
        return LayerForecast(predicted_backend=backend, predicted_reason="; ".join(failed))
    chosen = [(answer.estimates[answer.choice], calls) for answer, calls in weighted]
    total = _total(chosen)
    everywhere = [
        name for name in SDPA_BACKENDS if all(name in answer.takers for answer, _ in weighted)
    ]
    others = {
        name: _total([(answer.estimates[name], calls) for answer, calls in weighted])
        for name in everywhere
    }
    middle, _ = chosen[(len(chosen) - 1) // 2]
    calls = sum(weight for _, weight in weighted)
    outside = next((item.outside for item, _ in chosen if item.outside), None)
    forecast = LayerForecast(
        predicted_backend=backend,
        predicted_source="floor" if total.ns is None else _least_sure(chosen),
        predicted_kernels=tuple(parse_kernel_name(each.kernel).short for each in middle.launches),
        predicted_ns=_share(total.ns, calls),
        predicted_low_ns=_share(total.low, calls),
        predicted_high_ns=_share(total.high, calls),
        predicted_total_ns=total.ns,
        predicted_reason=outside,
    )
    return _with_best(forecast, total, others, calls)


def _least_sure(estimates: Iterable[tuple[Estimate, float]]) -> str:
    """Return the least certain source of the estimates."""
    return max((item.source for item, _ in estimates), key=SOURCES.index)


def _with_best(
    forecast: LayerForecast, total: _Total, others: Mapping[str, _Total], calls: float
) -> LayerForecast:
    """Add the fastest backend, and the time that it would save, to the forecast."""
    times = {name: other.ns for name, other in others.items() if other.ns is not None}
    if total.ns is None or not times:
        return forecast
    best = min(times, key=lambda name: times[name])
    if times[best] >= total.ns or best == forecast.predicted_backend:
        return replace(
            forecast,
            predicted_best=forecast.predicted_backend,
            predicted_best_ns=forecast.predicted_ns,
            predicted_saves_ns=0.0,
            predicted_certain=True,
        )
    low, high = total.low, others[best].high
    told_apart = low is not None and high is not None and low > high
    return replace(
        forecast,
        predicted_best=best,
        predicted_best_ns=times[best] / calls,
        predicted_saves_ns=total.ns - times[best],
        # Measured cells have no interval. Repeated measurements of a cell agree within THRESHOLD.
        predicted_certain=told_apart and total.ns > (1 + THRESHOLD) * times[best],
    )


def _total(estimates: Iterable[tuple[Estimate, float]]) -> _Total:
    kept = list(estimates)

    def of(name: str) -> float | None:
        whole = 0.0
        for item, calls in kept:
            us: float | None = getattr(item, name)
            if us is None:
                return None
            whole += 1e3 * us * calls
        return whole

    return _Total(of("kernel_us"), of("low_us"), of("high_us"))


def _share(ns: float | None, calls: float) -> float | None:
    return ns / calls if ns is not None and calls else None


def _forecast(
    layers: LayerMap,
    place: Place,
    by_step: bool,
    rows: Sequence[LayerForecast],
    points: Sequence[Points],
    doubts: Sequence[str],
) -> Forecast:
    made = [
        (row.calls if by_step else row.program_calls) or sum(calls for _, calls in own)
        for row, own in zip(layers.rows, points, strict=True)
    ]
    timed = [
        (row, calls) for row, calls in zip(rows, made, strict=True) if row.predicted_ns is not None
    ]
    ns = sum(row.predicted_total_ns or 0 for row, _ in timed)
    low, high = (
        sum((getattr(row, name) or 0) * calls for row, calls in timed)
        for name in ("predicted_low_ns", "predicted_high_ns")
    )
    calls = sum(calls for _, calls in timed)
    forecast = Forecast(
        gpu=place.gpu,
        torch=place.release,
        machine=machine_text(place.atlas.machine) if place.atlas else None,
        of="step" if by_step else "program",
        ns=ns,
        low_ns=low,
        high_ns=high,
        saves_ns=sum(row.predicted_saves_ns or 0 for row, _ in timed if row.predicted_certain),
        calls=calls,
        unpredicted_calls=sum(made) - calls,
        conclusions=(),
        rows=tuple(rows),
    )
    texts = (
        *_conclusions(forecast, layers.processes),
        *filter(None, doubts),
        *_left_out(layers, rows),
    )
    return replace(forecast, conclusions=texts)


def _conclusions(forecast: Forecast, processes: int) -> Iterator[str]:
    whole = "a step" if forecast.of == "step" else "the whole program"
    whole += f" ({processes} processes)" if processes > 1 else ""
    sources = Counter(row.predicted_source for row in forecast.rows if row.predicted_source)
    if not forecast.calls:
        return
    known = ", ".join(f"{sources[name]} {name}" for name in SOURCES if sources[name])
    yield (
        f"predicted, not measured: {_ms(forecast.ns)} ({_ms(forecast.low_ns)} to "
        f"{_ms(forecast.high_ns)}) of attention kernels in {whole}; rows by source: {known}"
    )
    if forecast.saves_ns:
        yield f"other backends save {_ms(forecast.saves_ns)} of it, beyond the intervals"
    yield (
        "kernel times with the L2 as warm as a call leaves it: neither launches, nor the pauses between "
        "kernels, nor what else the program does is in them"
    )


def _doubts(layers: LayerMap, asked: Iterable[ForecastQuery]) -> Iterator[str]:
    """Report properties of the calls that the atlas does not cover."""
    configs = [config for config, _ in asked]
    if any(_as_sampled(config) != config for config in configs):
        yield (
            "the choice is that of the calls as they are, times are those of tensors that lie in order"
        )
    dtypes = list(dict.fromkeys(str(config.dtype) for config in configs))
    if layers.gpu is None and dtypes == ["fp32"]:
        yield (
            "all calls are fp32, as the program made them on the CPU; where it takes fp16 or bf16 on a "
            "GPU, observe it so"
        )


def _left_out(layers: LayerMap, rows: Sequence[LayerForecast]) -> Iterator[str]:
    """Yield a sentence for each reason why rows have no predicted time."""
    names: dict[str, list[str]] = {}
    for row, forecast in zip(layers.rows, rows, strict=True):
        if forecast.predicted_ns is None:
            reason = forecast.predicted_reason or "no time is known, the bound alone"
            names.setdefault(reason, []).append(row.module or row.config or row.kind)
    for reason, modules in names.items():
        yield f"no time of {join_numbered(modules)}: {reason}"


def _ms(ns: float) -> str:
    return f"{ns / 1e6:,.3f} ms"
