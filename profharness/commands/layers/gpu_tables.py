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
    short_module,
)
from profharness.program.by_gpu import GpuLayers, LayersByGpu
from profharness.program.layer_map import LayerMap, LayerRow
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
