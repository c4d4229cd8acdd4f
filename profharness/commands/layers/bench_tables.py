"""Show benchmarks of a program's layers on several kinds of GPU, with one column per GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from profharness.columns import Column
from profharness.commands.layers.gpu_tables import (
    LAYER,
    figure_columns,
    figures,
    layer_name,
    layers_by_gpu_document,
)
from profharness.program.benches import BenchedCall, GpuBench, LayerBenches, with_bench_maps
from profharness.program.by_gpu import LayersByGpu
from profharness.render.document import Block, Document, Heading, Note, Table, record


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
        "benches": [_class_record(each) for each in answer.classes],
        "benched": [
            {
                "direction": row.direction,
                "sides": [record(side) if side else None for side in row.sides],
                "calls": [record(call) for call in calls],
            }
            for row, calls in zip(answer.rows, answer.calls, strict=True)
        ],
    }


def _class_record(item: GpuBench) -> dict[str, Any]:
    regret = item.layers.regret if item.layers else None
    return {
        "run": item.run,
        "device": item.device,
        "measurement": item.measurement,
        "program": item.layers.run if item.layers else None,
        "regret": record(regret) if regret else None,
        "changes": list(item.changes),
        "doubts": list(item.doubts),
    }


def bench_blocks(answer: LayerBenches, *, full: bool = False) -> Iterator[Block]:
    """Yield the table with one column per GPU, sums over all layers, and what is unknown."""
    names = [each.name for each in answer.classes]
    yield Heading(
        "classes in benches", f"µs of one call; {', '.join(map(_bench_text, answer.classes))}"
    )
    lines = []
    both = zip(answer.rows, answer.calls, strict=True)
    for row, calls in sorted(both, key=lambda pair: -_spent(pair[1])):
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


def _spent(calls: Sequence[BenchedCall]) -> float:
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
