"""Predict the attention calls of a program on another GPU, from dispatch rules and an atlas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from profharness.atlas.model import Estimate, as_sampled
from profharness.atlas.predictions import (
    Place,
    contiguous_note,
    disagreement,
    place_estimates,
)
from profharness.attention.config import AUTO, SDPA_BACKENDS, Config, parse_config, sdpa_setting
from profharness.attention.dispatch.machine import from_config, permitted
from profharness.attention.dispatch.predict import predict
from profharness.commands._answers import WARM_KERNELS
from profharness.errors import NotFoundError
from profharness.program.layer_map import (
    THROUGH_SDPA,
    Forecast,
    LayerForecast,
    LayerMap,
    LayerRow,
    PredictedTime,
    allowed_setting,
    join_numbered,
    no_choice,
    short_module,
)
from profharness.stats import THRESHOLD
from profharness.traces.kernel_names import parse_kernel_name

SOURCES = ("measured", "model", "floor")  # sources of times, from the most to the least certain
CHOICES = {
    "none": "no backend supports the call on this GPU, so PyTorch raises an error",
    "unknown": "the rules do not determine PyTorch's choice on this GPU",
}
NO_CONFIG = "no config describes the call"

Points = Sequence[tuple[str, float]]
# (config, allowed backends). The allowed backends are a string that `sdpa_setting` accepts, such as
# `flash+math`. The string is empty if the program allowed no backend.
ForecastQuery = tuple[Config, str]
# (PyTorch's choice, estimates of all backends, estimates of the backends that support the config)
Prediction = tuple[str, Mapping[str, Estimate], Mapping[str, Estimate]]
Weighted = Sequence[tuple[Estimate, float]]  # estimates, each with a number of calls


def forecast_map(layers: LayerMap, place: Place, doubt: str = "") -> LayerMap:
    """Return the layer map with an additional forecast for the GPU `place`.

    `doubt` is the reason why this GPU has no atlas, or empty. Raise NotFoundError if no call can be
    predicted.
    """
    by_step = any(row.calls is not None for row in layers.rows)
    whys = [_why_not(row, by_step) for row in layers.rows]
    points: list[Points] = [
        () if why else row.points or row.program_points or _as_sdpa(row)
        for row, why in zip(layers.rows, whys, strict=True)
    ]
    queries = [
        [(parse_config(label), allowed_setting(row.asked)) for label, _ in own]
        for row, own in zip(layers.rows, points, strict=True)
    ]
    asked = dict.fromkeys(query for own in queries for query in own)
    if not asked:
        reasons = "; ".join(dict.fromkeys(filter(None, whys)))
        raise NotFoundError(f"no call of run {layers.name} can be predicted: {reasons}")
    answers = dict(zip(asked, _predictions(list(asked), place), strict=True))
    rows, made = [], []
    for row, why, own, weights in zip(layers.rows, whys, queries, points, strict=True):
        calls = sum(weight for _, weight in weights)
        made.append((row.calls if by_step else row.program_calls) or calls)
        forecast = LayerForecast(predicted_reason=why)
        if own:
            predictions = [answers[query] for query in own]
            forecast = _row(predictions, [weight for _, weight in weights])
        rows.append(replace(forecast, predicted_gpu=place.gpu))
    # A step of the program contains on average this number of steps of the phase of a row.
    parts = [(row.steps or 0) / max(len(layers.steps), 1) if by_step else 1 for row in layers.rows]
    totals = [(row.predicted_total_ns or 0) * part for row, part in zip(rows, parts, strict=True)]
    if whole := sum(totals):
        rows = [
            replace(row, predicted_share=total / whole)
            if row.predicted_total_ns is not None
            else row
            for row, total in zip(rows, totals, strict=True)
        ]
    timed = [
        (row, calls, part)
        for row, calls, part in zip(rows, made, parts, strict=True)
        if row.predicted_ns is not None
    ]
    mean = _time(timed)
    calls = sum(calls * part for _, calls, part in timed)
    result = Forecast(
        gpu=place.gpu,
        torch=place.release,
        machine=place.text if place.atlas else None,
        cudnn=place.rules.cudnn,
        of="step" if by_step else "program",
        ns=mean.ns,
        low_ns=mean.low_ns,
        high_ns=mean.high_ns,
        saves_ns=sum(
            (row.predicted_saves_ns or 0) * part for row, _, part in timed if row.predicted_certain
        ),
        calls=calls,
        unpredicted_calls=sum(c * part for c, part in zip(made, parts, strict=True)) - calls,
        conclusions=(),
        rows=tuple(rows),
        groups=tuple(_times_by_phase(layers, rows, made)) or (mean,),
    )
    configs = [as_sampled(config) for config, _ in asked]
    texts = (
        *_conclusions(result, layers.processes),
        *filter(None, (doubt, place.others, disagreement(place, configs))),
        *_doubts(layers, configs),
        *filter(None, [_contiguous(answers.values())]),
        *_left_out(layers, rows),
    )
    result = replace(result, conclusions=texts)
    return replace(layers, forecasts=(*layers.forecasts, result))


def _time(
    timed: Iterable[tuple[LayerForecast, float, float]], phase: str | None = None
) -> PredictedTime:
    """Return the total time of rows, given the number of calls and the weight of each row."""
    ns = low = high = 0.0
    for row, calls, part in timed:
        ns += (row.predicted_total_ns or 0) * part
        low += (row.predicted_low_ns or 0) * calls * part
        high += (row.predicted_high_ns or 0) * calls * part
    return PredictedTime(phase, ns, low, high)


def _times_by_phase(
    layers: LayerMap, rows: Sequence[LayerForecast], made: Sequence[float]
) -> Iterator[PredictedTime]:
    """Yield the predicted time of a step of each phase with predicted rows."""
    for phase in dict.fromkeys(row.step_phase for row in layers.rows if row.step_phase):
        timed = [
            (row, calls, 1.0)
            for own, row, calls in zip(layers.rows, rows, made, strict=True)
            if own.step_phase == phase and row.predicted_ns is not None
        ]
        if timed:
            yield _time(timed, phase)


def _as_sdpa(row: LayerRow) -> Points:
    """Return the config of eager attention as a call of scaled_dot_product_attention."""
    if row.kind != "eager" or row.config is None:
        return ()
    return ((row.config, row.calls or row.program_calls or 1),)


def _why_not(row: LayerRow, by_step: bool) -> str | None:
    """Return the reason why a row cannot be predicted, or None if it can."""
    if _as_sdpa(row):
        return None
    if row.kind == "eager":
        return (
            f"{no_choice(row)}, and its shapes are unknown; record the trace with "
            "record_shapes=True"
        )
    if row.kind not in THROUGH_SDPA:
        return no_choice(row) or f"{row.kind} is not scaled_dot_product_attention"
    if by_step and row.calls is None:
        return "no recorded step contains these calls"
    if row.points or row.program_points:
        return None
    return "; ".join(row.reasons[:1]) or NO_CONFIG


def _predictions(asked: Sequence[ForecastQuery], place: Place) -> Iterator[Prediction]:
    names = (AUTO, *SDPA_BACKENDS)
    found = iter(place_estimates(place, [config for config, _ in asked], names))
    for config, allowed in asked:
        estimates = {name: next(found) for name in names}
        params = from_config(config)
        prediction = predict(params, place.rules)
        choice = prediction.choice if allowed else "none"
        if allowed not in ("", AUTO):
            choice = predict(permitted(params, sdpa_setting(allowed)), place.rules).choice
        backends = prediction.backends
        own = estimates.pop(AUTO)
        if choice == prediction.choice and own.kernel_us and choice in estimates:
            estimates[choice] = own  # as in `predict`
        supported = {name: each for name, each in estimates.items() if backends[name].eligible}
        yield choice, estimates, supported


def _row(predictions: Sequence[Prediction], weights: Sequence[float]) -> LayerForecast:
    choices = dict.fromkeys(choice for choice, _, _ in predictions)
    backend = " and ".join(sorted(choices))
    if failed := [CHOICES[name] for name in choices if name in CHOICES]:
        return LayerForecast(predicted_backend=backend, predicted_reason="; ".join(failed))
    chosen = [estimates[choice] for choice, estimates, _ in predictions]
    weighted = list(zip(chosen, weights, strict=True))
    ns, low, high = (_total(weighted, name) for name in ("kernel_us", "low_us", "high_us"))
    calls = sum(weights)
    # without a time, only a lower bound is known
    source = max((each.source for each in chosen), key=SOURCES.index)
    middle = chosen[(len(chosen) - 1) // 2]
    forecast = LayerForecast(
        predicted_backend=backend,
        predicted_source="floor" if ns is None else source,
        predicted_kernels=tuple(parse_kernel_name(each.kernel).short for each in middle.launches),
        predicted_ns=ns / calls if ns is not None and calls else None,
        predicted_low_ns=low / calls if low is not None and calls else None,
        predicted_high_ns=high / calls if high is not None and calls else None,
        predicted_total_ns=ns,
        predicted_reason=next((each.outside for each in chosen if each.outside), None),
    )
    others: dict[str, tuple[float, Weighted]] = {}  # the time and estimates of each backend
    for name in SDPA_BACKENDS:
        estimates = [supported.get(name) for _, _, supported in predictions]
        known = [each for each in estimates if each is not None]
        timed = list(zip(known, weights, strict=False))
        time = _total(timed, "kernel_us")
        if time is not None and len(known) == len(predictions):
            others[name] = time, timed
    if ns is None or not others:
        return forecast
    best = min(others, key=lambda name: others[name][0])
    least, best_timed = others[best]
    if least >= ns or best == backend:
        return replace(
            forecast,
            predicted_best=backend,
            predicted_best_ns=forecast.predicted_ns,
            predicted_saves_ns=0.0,
            predicted_certain=True,
        )
    limit = _total(best_timed, "high_us")
    apart = low is not None and limit is not None and low > limit
    return replace(
        forecast,
        predicted_best=best,
        predicted_best_ns=least / calls,
        predicted_saves_ns=ns - least,
        # Measured cells have no interval. Repeated measurements of a cell agree within THRESHOLD.
        predicted_certain=apart and ns > (1 + THRESHOLD) * least,
    )


def _total(weighted: Weighted, name: str) -> float | None:
    """Return the sum of the times `name` of all calls in ns, or None if a time is unknown."""
    times = [(getattr(estimate, name), calls) for estimate, calls in weighted]
    if any(us is None for us, _ in times):
        return None
    return sum((1e3 * us * calls for us, calls in times), 0.0)


def _conclusions(forecast: Forecast, processes: int) -> Iterator[str]:
    if not forecast.calls:
        return
    if processes > 1 and forecast.of != "step":
        yield f"The times are totals over all {processes} processes."
    yield WARM_KERNELS


def _contiguous(predictions: Iterable[Prediction]) -> str:
    """Return a note on the chosen backends whose times are those of contiguous tensors, or ""."""
    return contiguous_note(
        choice
        for choice, estimates, _ in predictions
        if choice in estimates and estimates[choice].timed_as
    )


def _doubts(layers: LayerMap, configs: Sequence[Config]) -> Iterator[str]:
    if any(map(_as_sdpa, layers.rows)):
        yield (
            "The prediction replaces eager attention by scaled_dot_product_attention without a "
            "mask, because the mask is unknown."
        )
    if layers.gpu is None and all(config.dtype == "fp32" for config in configs):
        yield (
            "All calls use fp32, as is usual on a CPU. If the program uses fp16 or bf16 on a GPU, "
            "observe it with that dtype."
        )


def _left_out(layers: LayerMap, rows: Sequence[LayerForecast]) -> Iterator[str]:
    """Yield a sentence for each reason why rows have no predicted time."""
    names: dict[str, list[str]] = {}
    for row, forecast in zip(layers.rows, rows, strict=True):
        if forecast.predicted_ns is None:
            reason = forecast.predicted_reason or "only a lower bound is known"
            names.setdefault(reason, []).append(short_module(row.module) or row.config or row.kind)
    for reason, modules in names.items():
        yield f"No time for {join_numbered(modules)}: {reason}."
