"""Show the attention of a program with one column per kind of GPU, measured or predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from profharness.columns import Column, columns_of, pick
from profharness.commands.layers.tables import (
    forecast_record,
    layers_document,
    line_of,
)
from profharness.program.by_gpu import (
    BenchedCall,
    GpuBench,
    GpuLayers,
    LayerBenches,
    LayersByGpu,
    with_bench_maps,
)
from profharness.program.layer_map import LayerMap, LayerRow, short_module
from profharness.program.matching import MatchedLayers
from profharness.render.document import Block, Document, Heading, Note, Table, record

LAYER = pick(LayerRow, "module", "config")
CALLS = columns_of(LayerRow)["calls"]


def layers_by_gpu_document(answer: LayersByGpu, *, full: bool = False) -> Document:
    """Return the map of each run, and a table with one column per GPU.

    The rows are those of all runs. Further JSON keys are those of the first run, `classes` and
    `layers`. A single run has its usual document.
    """
    documents = [layers_document(each.layers, full=full) for each in answer.classes]
    first = documents[0]
    if len(documents) < 2:
        return first
    return Document(
        first.schema,
        first.title,
        (
            *chain.from_iterable(each.blocks for each in documents),
            *layers_by_gpu_blocks(answer, full),
        ),
        first.fields,
        tuple(chain.from_iterable(each.records for each in documents)),
        {**first.extra, **layers_by_gpu_record(answer)},
    )


def layers_by_gpu_record(answer: LayersByGpu) -> dict[str, Any]:
    """Return the JSON keys of the GPUs and of the matched layers."""
    return {
        "classes": [_class_record(each) for each in answer.classes],
        "layers": [record(row) for row in answer.rows],
    }


def forecasts_document(layers: LayerMap, *, full: bool = False) -> Document:
    """Return the map with predictions for other GPUs. For several, each has a column, and JSON the
    key `classes`.
    """
    document = layers_document(layers, full=full)
    if len(layers.forecasts) < 2:
        return document
    classes = [forecast_record(forecast) for forecast in layers.forecasts]
    return replace(
        document,
        blocks=(*document.blocks, *_forecast_blocks(layers, full)),
        extra={**document.extra, "classes": classes},
    )


def _class_record(item: GpuLayers) -> dict[str, object]:
    """Return the JSON record of one GPU. Times are per step."""
    return {
        "run": item.layers.run,
        "device": item.device,
        "steps": len(item.layers.steps),
        "step_ns": item.layers.step_ns,
        "busy_ns": item.layers.busy_ns,
        "attention_ns": item.attention_ns,
        "changes": list(item.changes),
    }


def figure_columns(names: Sequence[str], does: Sequence[str]) -> list[Column]:
    """Return columns for the backend and its time on each GPU, and for the speed-ups against the
    first.
    """
    columns = []
    for at, (name, verb) in enumerate(zip(names, does, strict=True)):
        columns.append(Column(f"ran{at}", f"{name} {verb}"))
        columns.append(Column(f"us{at}", f"{name} µs", "us"))
    columns += [
        Column(f"times{at}", f"speed-up of {name}", "ratio") for at, name in enumerate(names[1:], 1)
    ]
    return columns


def figures(backends: Sequence[str | None], times: Sequence[float | None]) -> dict[str, Any]:
    """Return the values of `figure_columns`. Speed-ups are relative to the first GPU."""
    values: dict[str, Any] = {f"ran{at}": backend for at, backend in enumerate(backends)}
    base = times[0]
    for at, ns in enumerate(times):
        values[f"us{at}"] = ns
        values[f"times{at}"] = base / ns if base and ns else None
    return values


def layers_by_gpu_blocks(answer: LayersByGpu, full: bool = False) -> Iterator[Block]:
    """Yield the table with one column per GPU, the times per step, and differences between the
    GPUs.
    """
    names = [each.name for each in answer.classes]
    yield Heading("classes", f"{len(names)} of them, medians of one call's kernels")
    rows = []
    ordered = sorted(answer.rows, key=lambda row: -_spent(row))
    for row in ordered:
        side = next(filter(None, row.sides))
        ran = [each.ran if each else None for each in row.sides]
        line = {
            "module": layer_name(row, full=full),
            "config": side.config,
            "calls": side.calls,
        }
        rows.append(line | figures(ran, row.call_ns))
    yield Table.of((*LAYER, CALLS, *figure_columns(names, ["ran"] * len(names))), rows)
    yield from map(Note, _step_texts(answer))
    for row, line in zip(ordered, rows, strict=True):
        for text in _reasons(row, names):
            yield Note(text, str(line["module"] or line["config"] or "a call"))


def layer_name(row: MatchedLayers, *, full: bool) -> str | None:
    """Return the module in the first program with these layers, and the direction unless it is
    forward.
    """
    side = next(filter(None, row.sides))
    name = side.module if full else short_module(side.module)
    return f"{name or ''} ({row.direction})" if row.direction != "forward" else name


def _spent(row: MatchedLayers) -> float:
    """Return the time per step on the first GPU that has it, or per call without recorded steps."""
    spent = (
        ns * (side.calls or 1)
        for side, ns in zip(row.sides, row.call_ns, strict=True)
        if side and ns is not None
    )
    return next(spent, 0)


def _step_texts(answer: LayersByGpu) -> Iterator[str]:
    """Yield sentences on the time per step on each GPU, and on rows with another backend than on
    the first.
    """
    first, *others = answer.classes
    for at, other in enumerate(others, 1):
        shared = [
            (row.sides[0].ran, side.ran)
            for row in answer.rows
            if row.sides[0] and (side := row.sides[at])
        ]
        if not shared:
            yield f"{other.name} has no layer in common with {first.name}; are they of one model?"
        elif first.attention_ns and other.attention_ns:
            yield (
                f"attention of a step: {first.attention_ns / 1e6:,.2f} ms on {first.name}, "
                f"{other.attention_ns / 1e6:,.2f} ms on {other.name} "
                f"({first.attention_ns / other.attention_ns:.2f}x)"
            )
        if both := [(here, there) for here, there in shared if here and there]:
            apart = sum(here != there for here, there in both)
            yield (
                f"on {other.name} another backend than on {first.name} runs for {apart} of "
                f"{len(both)} rows"
            )
        if other.changes:
            yield f"{other.name} differs in more than the GPU: {', '.join(other.changes)}"


def _reasons(row: MatchedLayers, names: Sequence[str]) -> Iterator[str]:
    """Yield how a row differs between GPUs, or that a GPU has no such layers."""
    for name, side, reasons in zip(names, row.sides, row.reasons, strict=True):
        if side is None:
            yield f"{name} has no such layer of these sizes"
        elif reasons:
            yield f"on {name} {'; '.join(reasons)}"
    if row.basis == "forward" and any(side and side.backward_ns is not None for side in row.sides):
        yield "not each class has a backward, so that times are of forward alone"


def _forecast_blocks(layers: LayerMap, full: bool) -> Iterator[Block]:
    """Yield the table with one column per predicted GPU, after the measured times of the program."""
    forecasts = layers.forecasts
    spent = [
        None if row.forward_ns is None else row.forward_ns + (row.backward_ns or 0)
        for row in layers.rows
    ]
    measured = any(ns is not None for ns in spent)
    names = [forecast.gpu for forecast in forecasts]
    does = ["takes"] * len(names)
    if measured:
        names.insert(0, f"measured {layers.gpu or 'here'}")
        does.insert(0, "ran")
    whole = "a step" if forecasts[0].of == "step" else "the whole program"
    yield Heading("classes", f"{len(forecasts)} of them, predicted kernels of {whole}")
    rows = []
    for at, row in enumerate(layers.rows):
        line = line_of(row, full)
        told = [forecast.rows[at] for forecast in forecasts]
        ran = [row.ran] if measured else []
        ran += [each.predicted_backend for each in told]
        times = [spent[at]] if measured else []
        times += [each.predicted_total_ns for each in told]
        rows.append({name: line[name] for name in ("module", "config")} | figures(ran, times))
    yield Table.of((*LAYER, *figure_columns(names, does)), rows)
    releases = dict.fromkeys(forecast.torch for forecast in forecasts)
    if len(releases) > 1:
        there = ", ".join(f"{forecast.torch} for {forecast.gpu}" for forecast in forecasts)
        yield Note(f"predicted for several releases of torch ({there}); --torch names one for all")
    for forecast in forecasts[1:]:
        pairs = zip(forecasts[0].rows, forecast.rows, strict=True)
        both = [
            (here.predicted_backend, there.predicted_backend)
            for here, there in pairs
            if here.predicted_backend and there.predicted_backend
        ]
        apart = sum(here != there for here, there in both)
        yield Note(
            f"{forecast.gpu} takes another backend than {forecasts[0].gpu} for {apart} of {len(both)} rows"
        )


def benches_document(
    programs: LayersByGpu, benches: LayerBenches, *, full: bool = False
) -> Document:
    """Return the map of each program with its benchmark, then the benchmarks side by side.

    JSON keys are those of `layers_by_gpu_document`, `benches` and `benched`.
    """
    document = layers_by_gpu_document(with_bench_maps(programs, benches), full=full)
    return replace(
        document,
        blocks=(*document.blocks, *bench_blocks(benches, full=full)),
        extra={**document.extra, **bench_record(benches)},
    )


def bench_record(answer: LayerBenches) -> dict[str, Any]:
    """Return the JSON keys of the benchmarks, and of their figures for each layer."""
    return {
        "benches": [_bench_record(each) for each in answer.classes],
        "benched": [
            {
                "direction": row.direction,
                "sides": [record(side) if side else None for side in row.sides],
                "calls": [record(call) for call in calls],
            }
            for row, calls in zip(answer.rows, answer.calls, strict=True)
        ],
    }


def _bench_record(item: GpuBench) -> dict[str, Any]:
    regret = item.layers.regret if item.layers else None
    return {
        **record(replace(item, layers=None), ("run", "device", "measurement", "changes", "doubts")),
        "program": item.layers.run if item.layers else None,
        "regret": record(regret) if regret else None,
    }


def bench_blocks(answer: LayerBenches, *, full: bool = False) -> Iterator[Block]:
    """Yield the table with one column per GPU, sums over all layers, and what is unknown."""
    names = [each.name for each in answer.classes]
    yield Heading(
        "classes in benches", f"µs of one call; {', '.join(map(_bench_text, answer.classes))}"
    )
    lines = []
    both = zip(answer.rows, answer.calls, strict=True)
    for row, calls in sorted(both, key=lambda pair: -_benched(pair[1])):
        side = next(filter(None, row.sides))
        # for recomputed calls only the forward is timed
        middle = side.points[(len(side.points) - 1) // 2][0] if side.points else side.config
        place = {"module": layer_name(row, full=full), "config": middle}
        lines.append(place | _line(calls, answer.classes))
    columns = (*LAYER, *figure_columns(names, ["runs"] * len(names)), *_best_columns(names))
    yield Table.of(columns, lines)
    yield from map(Note, _sums(answer))
    for each in answer.classes:
        if each.changes:
            changes = ", ".join(each.changes)
            yield Note(f"the bench of {each.name} differs in more than the GPU: {changes}")
        for doubt in each.doubts:
            yield Note(doubt, each.name, "warning")
    for row, calls in zip(answer.rows, answer.calls, strict=True):
        for text in dict.fromkeys(call.doubt for call in calls if call.doubt):
            yield Note(text, layer_name(row, full=full) or "a call", "warning")


def _bench_text(item: GpuBench) -> str:
    """Return a text such as `NVIDIA H200: kernel times of run ID`."""
    if item.run is None:
        return f"{item.name}: no bench"
    return f"{item.name}: {item.measurement} times of run {item.run}"


def _best_columns(names: Sequence[str]) -> Iterator[Column]:
    for at, name in enumerate(names):
        yield Column(f"best{at}", f"{name} best")
        yield Column(f"best_us{at}", f"{name} best µs", "us")


def _line(calls: Sequence[BenchedCall], classes: Sequence[GpuBench]) -> dict[str, Any]:
    """Return the values of a layer for all columns. Different measurements have no speed-up."""
    best = [(f"best{at}", call.best) for at, call in enumerate(calls)]
    best_us = [(f"best_us{at}", call.best_ns) for at, call in enumerate(calls)]
    ran = figures([call.backend for call in calls], [call.ns for call in calls])
    unlike = [
        (f"times{at}", None)
        for at, each in enumerate(classes)
        if each.measurement != classes[0].measurement
    ]
    return {**ran, **dict(unlike), **dict(best), **dict(best_us)}


def _benched(calls: Sequence[BenchedCall]) -> float:
    """Return the time of all calls on the first GPU that has it."""
    return next(filter(None, map(_total, calls)), 0)


def _sums(answer: LayerBenches) -> Iterator[str]:
    """Yield sentences on the time of all layers on each GPU, and on what the fastest backends save."""
    sides = [side for row in answer.rows for side in row.sides if side]
    whole = "a step" if all(side.calls is not None for side in sides) else "the whole program"
    first, *others = answer.classes
    for at, other in enumerate(others, 1):
        if None not in (first.run, other.run) and first.measurement != other.measurement:
            yield (
                f"{first.measurement} times on {first.name} and {other.measurement} times on {other.name} "
                "do not compare"
            )
            continue
        totals = [(_total(calls[0]), _total(calls[at])) for calls in answer.calls]
        shared = [pair for pair in totals if all(pair)]
        if not shared:
            yield f"no layer has a time on both {first.name} and {other.name}"
            continue
        here, there = map(sum, zip(*shared, strict=True))
        yield (
            f"attention of {whole} in these benches: {_ms(here)} on {first.name}, {_ms(there)} on "
            f"{other.name} ({here / there:.2f}x), of {len(shared)} of {len(totals)} rows"
        )
    for each, column in zip(answer.classes, zip(*answer.calls, strict=True), strict=True):
        saved = sum(
            _total(call) - (call.best_ns or 0) * (call.calls or 0) for call in column if call.ns
        )
        if saved > 0:
            yield f"on {each.name} the fastest correct backends save {_ms(saved)} of the kernels of {whole}"


def _total(call: BenchedCall) -> float:
    return (call.ns or 0) * (call.calls or 0)


def _ms(ns: float) -> str:
    return f"{ns / 1e6:,.3f} ms"
