"""Compare the attention of one model on several GPU models, layer by layer."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from profharness.attention.config import AUTO, SDPA_BACKENDS
from profharness.device_types import device_name
from profharness.errors import NotFoundError, UsageError
from profharness.measurements.evaluation import TIMED, BenchResult, backend_of_cell, evaluate_bench
from profharness.program.changes import environment_changes
from profharness.program.layer_map import LayerMap, find_layers
from profharness.program.matching import LayerSide, MatchedLayers, find_program, match_layers
from profharness.program.regret import MEASUREMENTS, BenchTimes, bench_doubts, regret_map
from profharness.store import Selection, Store

# keys of an environment that describe versions
SOFTWARE = ("torch", "torch_cuda", "cudnn", "driver")


@dataclass(frozen=True, slots=True)
class GpuLayers:
    """One run and its device."""

    name: str  # name of the device, followed by the run if two runs have the same device
    device: str
    layers: LayerMap
    attention_ns: float
    changes: tuple[str, ...]  # versions that differ from the versions of the first run


@dataclass(frozen=True, slots=True)
class LayersByGpu:
    """The maps of several runs, and the layers that match across the runs."""

    classes: tuple[GpuLayers, ...]
    rows: tuple[MatchedLayers, ...]


def find_layers_by_gpu(
    store: Store, runs: Sequence[str], *, torch: str | None = None
) -> LayersByGpu:
    """Compare several runs with the first run. `torch` has the same meaning as in `find_layers`.
    Raise NotFoundError for a run without attention calls, and UsageError for a run that captured
    configs instead of a program.
    """
    if captures := [run for run in runs if store.cells(run)]:
        remedy = "leave it out"
        if len(captures) == len(runs):
            remedy = f"compare such runs with profharness report {' '.join(runs)}"
        raise UsageError(f"run {captures[0]} is of configs, and layers are a program's; {remedy}")
    return compare_maps(store, [find_layers(store, run, torch=torch) for run in runs])


def find_programs(store: Store, runs: Sequence[str]) -> LayersByGpu:
    """Compare those of the runs that recorded programs. There may be only one such run, or none."""
    maps = []
    for run in runs:
        with contextlib.suppress(NotFoundError):  # the run is a trace that contains no attention
            maps += [] if store.cells(run) else [find_layers(store, run)]
    return compare_maps(store, maps)


def compare_maps(store: Store, maps: Sequence[LayerMap]) -> LayersByGpu:
    """Compare programs, given their maps."""
    runs = [layers.run for layers in maps]
    environments = [store.environment(run) for run in runs]
    devices = [
        layers.gpu or device_name(environment) or "CPU"
        for layers, environment in zip(maps, environments, strict=True)
    ]
    alike = Counter(devices)
    classes = tuple(
        GpuLayers(
            name=device if alike[device] == 1 else f"{device} ({layers.run})",
            device=device,
            layers=layers,
            attention_ns=sum(row.kernel_ns for row in layers.rows),
            changes=software_changes(environments[0], environment),
        )
        for device, layers, environment in zip(devices, maps, environments, strict=True)
    )
    programs = [find_program(store, run, ()) for run in runs]
    return LayersByGpu(classes, match_layers([each for each in programs if each is not None]))


def software_changes(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the versions that differ between two environments, in the form `torch 2.11.0 →
    2.12.0`.
    """
    return tuple(
        f"{each.key} {each.baseline} → {each.candidate}"
        for each in environment_changes(one, other)
        if each.key in SOFTWARE
    )


@dataclass(frozen=True, slots=True)
class BenchedCall:
    """The times of a layer in the bench on one GPU model. They are average nanoseconds per call."""

    # The backend that runs on this GPU. On the program's own GPU, it is the backend that ran in the
    # program. On any other GPU, it is the backend that PyTorch chose in the bench among those that
    # the program allowed. None if unknown.
    backend: str | None = None
    ns: float | None = None
    # the fastest correct backend, or the backend that runs if the samples show no other to be
    # faster
    best: str | None = None
    best_ns: float | None = None
    calls: float | None = None  # calls per step, or of the whole program if no step was recorded
    doubt: str | None = None  # a sentence about what is unknown


@dataclass(frozen=True, slots=True)
class GpuBench:
    """A bench and its GPU."""

    name: str
    device: str
    run: str | None  # None if no bench ran on the program's GPU; measurement is then None too
    measurement: str | None
    # The map of the program that ran on this GPU model, with the savings of the fastest backends.
    # None if no program ran on it.
    layers: LayerMap | None
    changes: tuple[str, ...] = ()  # versions that differ from the versions of the first bench
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerBenches:
    """Several benches of the same layers."""

    classes: tuple[GpuBench, ...]
    rows: tuple[MatchedLayers, ...]
    calls: tuple[tuple[BenchedCall, ...], ...]  # by layer, then by GPU


_Pair = tuple[GpuLayers | None, BenchResult | None]


def find_benches(store: Store, programs: LayersByGpu, names: Sequence[str]) -> LayerBenches:
    """Return each program together with the bench on its GPU. If there is only one program, return
    each bench instead. Raise UsageError for a bench that fits no program, and for two benches on
    the same GPU. Raise NotFoundError for a bench that has no time of the layers.
    """
    benches = _benches(store, names)
    several = len(programs.classes) > 1
    pairs = _by_program(programs, benches) if several else _by_bench(programs, benches)
    columns = []
    for place, (program, bench) in enumerate(pairs):
        sides = [row.sides[place if several else 0] for row in programs.rows]
        column = [_benched_call(side, bench, own=program is not None) for side in sides]
        if bench is not None:
            run = programs.classes[place if several else 0].layers.run
            _require_times(bench, run, column)
        columns.append(column)
    first = next(bench for _, bench in pairs if bench is not None)
    return LayerBenches(
        tuple(_bench_class(store, program, bench, first) for program, bench in pairs),
        programs.rows,
        tuple(zip(*columns, strict=True)),
    )


def _benches(store: Store, names: Sequence[str]) -> list[BenchResult]:
    """Return the stored benches. If possible, they are ranked by a measurement that all of them
    have.
    """
    runs = [store.find_run(Selection(name), *TIMED) for name in names]
    if twice := [run for run in runs if runs.count(run) > 1]:
        raise UsageError(f"--bench names run {twice[0]} twice; name it once")
    for rank_by in (MEASUREMENTS, MEASUREMENTS[1:]):
        benches = [evaluate_bench(store, run, rank_by=rank_by) for run in runs]
        if len({bench.ranking for bench in benches}) == 1:
            return benches
    return [evaluate_bench(store, run, rank_by=MEASUREMENTS) for run in runs]


def _by_program(programs: LayersByGpu, benches: Sequence[BenchResult]) -> list[_Pair]:
    """Pair each program with the benchmark that ran on the same GPU, or with None."""
    of_none = [
        bench for bench in benches if all(not _fits(each, bench) for each in programs.classes)
    ]
    if of_none:
        raise UsageError(
            f"run {of_none[0].run} was timed on {device_of(of_none[0])}, where none of these programs ran; "
            "name one program alone, and benches of any GPUs stand beside each other"
        )
    pairs: list[_Pair] = []
    for each in programs.classes:
        fitting = [bench for bench in benches if _fits(each, bench)]
        _require_apart(fitting)
        pairs.append((each, fitting[0] if fitting else None))
    return pairs


def _by_bench(programs: LayersByGpu, benches: Sequence[BenchResult]) -> list[_Pair]:
    """Return each bench, together with the program if the program ran on this GPU model."""
    (only,) = programs.classes
    devices = [device_of(bench) for bench in benches]
    for device in devices:
        _require_apart(
            [bench for bench, own in zip(benches, devices, strict=True) if own == device]
        )
    return [(only if _fits(only, bench) else None, bench) for bench in benches]


def _require_apart(benches: Sequence[BenchResult]) -> None:
    """Raise UsageError if there are two benches of the same GPU."""
    if len(benches) > 1:
        one, other = benches[:2]
        raise UsageError(
            f"--bench: runs {one.run} and {other.run} were both timed on {device_of(one)}; name one a class"
        )


def _fits(program: GpuLayers, bench: BenchResult) -> bool:
    """Return whether a bench ran on the device of the program."""
    return bench.gpu == program.layers.gpu


def device_of(bench: BenchResult) -> str:
    """Return the name of the GPU of a bench, or of its CPU if it ran on a CPU."""
    environment = bench.environment
    return device_name(environment) or "a CPU"


def _require_times(bench: BenchResult, program: str, column: Sequence[BenchedCall]) -> None:
    """Raise NotFoundError if a bench has no time of any of the layers."""
    if any(call.ns is not None or call.best_ns is not None for call in column):
        return
    doubts = "; ".join(dict.fromkeys(call.doubt for call in column if call.doubt))
    remedy = ""
    if any(call.calls for call in column):
        remedy = f": bench what `profharness layers {program} --regret --configs` prints"
    raise NotFoundError(
        f"run {bench.run} has no time of a layer of run {program} ({doubts}){remedy}"
    )


def _bench_class(
    store: Store, program: GpuLayers | None, bench: BenchResult | None, first: BenchResult
) -> GpuBench:
    """Return the description of a bench and its GPU, with the doubts about it. `first` is the bench
    whose versions it is compared with.
    """
    layers = program.layers if program else None
    if bench is None:
        assert program is not None
        doubt = f"no bench of {program.device} is named, so none of its times is told"
        return GpuBench(program.name, program.device, None, None, layers, (), (doubt,))
    doubts = bench_doubts(bench)
    if layers is not None:
        if changes := software_changes(store.environment(layers.run), bench.environment):
            doubts.append(
                f"run {bench.run} has other versions than the program: {', '.join(changes)}"
            )
        try:
            layers = regret_map(layers, bench)
        except NotFoundError as error:
            doubts.append(f"what the best backends save is not told: {error}")
    return GpuBench(
        name=program.name if program else device_of(bench),
        device=device_of(bench),
        run=bench.run,
        measurement=bench.ranking,
        layers=layers,
        changes=software_changes(first.environment, bench.environment),
        doubts=tuple(doubts),
    )


def _benched_call(side: LayerSide | None, bench: BenchResult | None, *, own: bool) -> BenchedCall:
    """Return the result of a bench for equal calls. The result is empty if there is no bench or if
    there are no calls. If `own` is true, the bench ran on the program's own GPU.
    """
    if side is None or bench is None:
        return BenchedCall()
    if not side.points:
        return BenchedCall(doubt="no config replays these calls")
    calls, times = sum(weight for _, weight in side.points), BenchTimes.of(bench)
    ran = side.ran if own and side.ran in SDPA_BACKENDS else None
    asked = ran or (AUTO if side.asked is None else side.asked.replace(",", "+"))
    best = times.fastest(side.points) if times.everywhere(side.points) else None
    least = times.total(side.points, best) if best else None
    spent = times.total(side.points, asked)
    if spent is None:
        lacks = next(label for label, _ in side.points if times.median(label, asked) is None)
        so = "" if ran else ", so what PyTorch takes there is not told"
        doubt = f"run {bench.run} has no correct {asked} of {lacks}{so}"
        return BenchedCall(None, None, best, _per_call(least, calls), calls, doubt)
    backend = ran or _chosen_backend(bench, side, asked) or asked
    verdict = times.verdict(side.points, asked, than=best) if best else "same"
    unclear = verdict == "unknown" and best != backend and (least or spent) < spent
    doubt = f"{backend} is not told apart from {best}, which has the lower median"
    # a lower median alone may be noise
    if verdict != "slower" or best == backend:
        best, least = backend, spent
    return BenchedCall(
        backend, spent / calls, best, _per_call(least, calls), calls, doubt if unclear else None
    )


def _per_call(ns: float | None, calls: float) -> float | None:
    return None if ns is None else ns / calls


def _chosen_backend(bench: BenchResult, side: LayerSide, asked: str) -> str | None:
    """Return the backend that PyTorch chose in the bench among the allowed backends, or several
    backends if the choice depends on the length. Return None if it is unknown.
    """
    labels = {label for label, _ in side.points}
    cells = [cell for cell in bench.cells if cell.backend == asked and cell.config in labels]
    taken = Counter(backend_of_cell(cell) for cell in cells)
    return None if None in taken else " and ".join(sorted(map(str, taken))) or None


def with_bench_maps(programs: LayersByGpu, benches: LayerBenches) -> LayersByGpu:
    """Return the programs, with their maps replaced by the maps of the benches on the same GPUs."""
    maps = {each.layers.run: each.layers for each in benches.classes if each.layers is not None}
    classes = tuple(
        replace(each, layers=maps.get(each.layers.run, each.layers)) for each in programs.classes
    )
    return replace(programs, classes=classes)
