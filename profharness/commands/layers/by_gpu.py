"""Compare the attention layers of a program between GPU models, in traces and in benchmarks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any

from profharness import stats
from profharness.atlas.predictions import assumed_release
from profharness.attention.config import AUTO, SDPA_BACKENDS
from profharness.columns import SPEED_UP, Column, pick
from profharness.commands.layers.answer import EAGER_FLEX
from profharness.commands.layers.tables import (
    GPU_LAYER,
    figure_columns,
    figures,
    layers_document,
)
from profharness.device_types import device_name
from profharness.devices import short_device_name, short_device_names
from profharness.errors import NotFoundError, UsageError, counted, join_and, join_few
from profharness.measurements.evaluation import TIMED, BenchResult, backend_of_cell, evaluate_bench
from profharness.program.changes import environment_changes
from profharness.program.gates import falls_back, is_unfused
from profharness.program.layer_map import LayerMap, LayerRow, find_layers
from profharness.program.matching import (
    CALL_TIME,
    FORWARD_TIME,
    LayerSide,
    MatchedLayers,
    find_program,
    layer_labels,
    layer_names,
    match_layers,
    opposite_layer,
    phases_distinguish,
    ran_text,
    told_ratio,
)
from profharness.program.phases import shown_phase
from profharness.program.regret import MEASUREMENTS, BenchTimes, bench_doubts, regret_map
from profharness.render.document import (
    MISSING,
    Block,
    Document,
    Heading,
    More,
    Note,
    Table,
    filled_columns,
    merged_notes,
    record,
)
from profharness.store import Selection, Store
from profharness.units import compared, ratio_text, share_figure, share_text, time_text

EAGER_OR_MATH = "eager or math attention"
GPU = Column("gpu", "GPU", importance="key")
FEW_RUNS = 4  # if more runs are named, one row for each replaces their layers
NAMES_SHOWN = 3
PAIR = (
    Column("ran", "ran", importance="answer"),
    Column("us", CALL_TIME, "time", importance="answer"),
    Column("times1", "speed-up", "ratio", importance="answer", meaning=SPEED_UP),
    Column("roofline", "% of roofline", right=True, importance="detail"),
)
"""The backends, the times as `A → B` and the speed-up of two runs."""
OVERVIEW = (
    Column("run", "run", importance="key"),
    replace(GPU, importance="normal"),
    Column("step", "mean µs/step", "time", right=True),
    Column("busy", "% busy", "percent", importance="detail", right=True),
    Column("attention", "mean attention µs/step", "time", importance="answer", right=True),
    Column("share", "% of GPU time", "percent", importance="answer", right=True),
    Column("ran", "ran", importance="answer", shrink=True),
)
SOFTWARE = ("torch", "torch_cuda", "cudnn", "driver")  # versions in an environment


@dataclass(frozen=True, slots=True)
class GpuLayers:
    """The layer map of one run, and the device of the run."""

    name: str  # name of the device, followed by the run if two runs have the same device
    device: str
    layers: LayerMap
    changes: tuple[str, ...]  # versions that differ from the versions of the first run


@dataclass(frozen=True, slots=True)
class LayersByGpu:
    """The layer maps of several runs, and the layers that match between the runs."""

    classes: tuple[GpuLayers, ...]
    rows: tuple[MatchedLayers, ...]
    left_out: tuple[str, ...] = ()  # names of runs without a program that calls attention


@dataclass(frozen=True, slots=True)
class BenchedCall:
    """The times of a layer in a benchmark on one GPU model, in average nanoseconds per call."""

    # The backend to which `ns` belongs. On the program's own GPU, it is the backend that ran in the
    # program. On any other GPU, it is the backend that PyTorch chose in the benchmark from the
    # backends that the program allowed. None if unknown.
    backend: str | None = None
    ns: float | None = None
    # The fastest correct backend. Equal to `backend` if no other backend is significantly faster.
    best: str | None = None
    best_ns: float | None = None
    calls: float | None = None  # calls per step, or of the whole program if no step was recorded
    doubt: str | None = None  # a sentence about missing or uncertain times

    @property
    def total_ns(self) -> float:
        """The time of all calls, or 0 if it is unknown."""
        return (self.ns or 0) * (self.calls or 0)


@dataclass(frozen=True, slots=True)
class GpuBench:
    """A benchmark and its GPU. `bench` is None if no benchmark ran on the program's GPU."""

    name: str
    device: str
    bench: BenchResult | None
    # The layer map of the program that ran on this GPU model, with the savings of the fastest
    # backends. None if no program ran on this GPU model.
    layers: LayerMap | None
    calls: tuple[BenchedCall, ...]  # in the order of LayersByGpu.rows
    changes: tuple[str, ...] = ()  # versions that differ from the versions of the first benchmark
    doubts: tuple[str, ...] = ()

    @property
    def measurement(self) -> str | None:
        """The measurement by which backends are ranked."""
        return self.bench.ranking if self.bench else None


def find_layers_by_gpu(
    store: Store, runs: Sequence[str], *, torch: str | None = None
) -> LayersByGpu:
    """Compare the attention layers of several runs with the layers of the first run.

    A run without attention calls, or of configs, is left out, which a caveat of the first map says.
    Raise NotFoundError if no run has attention calls, and UsageError if all runs captured configs.
    """
    captures = [run for run in runs if store.cells(run)]
    if len(captures) == len(runs):
        raise UsageError(
            f"run {store.run_name(captures[0])} contains configs, but layers shows programs; to "
            f"compare such runs, use: profharness report {' '.join(runs)}"
        )
    maps: list[LayerMap] = []
    errors: dict[str, NotFoundError] = {}
    for run in runs:
        try:
            maps.append(find_layers(store, run, torch=torch, assume=assumed_release))
        except NotFoundError as error:
            errors[store.run_name(run)] = error
    if not maps:
        raise next(iter(errors.values()))
    if errors:
        maps[0] = replace(maps[0], caveats=(left_out_text([*errors]), *maps[0].caveats))
    return replace(compare_maps(store, maps), left_out=tuple(errors))


def left_out_text(names: Sequence[str]) -> str:
    verb = "contains" if len(names) == 1 else "contain"
    return f"{join_and(list(names))} {verb} no attention call of a program and cannot be compared"


def find_programs(store: Store, runs: Sequence[str]) -> LayersByGpu:
    """Compare the runs that recorded programs, and ignore all other runs."""
    maps = []
    for run in runs:
        with contextlib.suppress(NotFoundError):  # the run is a trace that contains no attention
            maps += [] if store.cells(run) else [find_layers(store, run, assume=assumed_release)]
    return compare_maps(store, maps)


def compare_maps(store: Store, maps: Sequence[LayerMap]) -> LayersByGpu:
    """Compare programs by their layer maps."""
    environments = [store.environment(layers.run) for layers in maps]
    devices = [
        layers.gpu or device_name(environment) or ("an unnamed GPU" if layers.busy_ns else "CPU")
        for layers, environment in zip(maps, environments, strict=True)
    ]
    short = short_device_names(devices)

    def name(device: str, run: str) -> str:
        if len(set(devices)) == 1 < len(devices):
            return run  # the GPU does not distinguish the runs
        return short[device] if devices.count(device) == 1 else f"{short[device]} ({run})"

    classes = [
        GpuLayers(
            name=name(device, layers.name),
            device=device,
            layers=layers,
            changes=_software_changes(environments[0], environment),
        )
        for device, layers, environment in zip(devices, maps, environments, strict=True)
    ]
    programs = [find_program(store, layers.run) for layers in maps]
    return LayersByGpu(tuple(classes), match_layers([each for each in programs if each]))


def _software_changes(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(
        f"{each.key} {each.baseline} → {each.candidate}"
        for each in environment_changes(one, other)
        if each.key in SOFTWARE
    )


def find_benches(store: Store, programs: LayersByGpu, names: Sequence[str]) -> list[GpuBench]:
    """Return the benchmark on the GPU of each program. For one program, return all benchmarks.

    Raise UsageError for a benchmark that matches no program, and for two benchmarks on the same GPU.
    Raise NotFoundError for a benchmark that timed none of the layers.
    """
    benches = _evaluate(store, names)
    for one, other in combinations(benches, 2):
        if _device(one) == _device(other):
            raise UsageError(
                f"--bench: runs {one.run} and {other.run} were both timed on {_device(one)}; name one "
                "run per GPU model"
            )
    classes = programs.classes
    matched: list[tuple[int, GpuLayers | None, BenchResult | None]]
    if len(classes) == 1:
        (only,) = classes
        matched = [(0, only if only.layers.gpu == each.gpu else None, each) for each in benches]
    else:
        for bench in benches:
            if all(bench.gpu != each.layers.gpu for each in classes):
                raise UsageError(
                    f"run {bench.name} was timed on {_device(bench)}, but none of these programs ran on "
                    "this device; to show benchmarks from other GPUs, name only one program"
                )
        by_gpu = {bench.gpu: bench for bench in benches}
        matched = [(at, each, by_gpu.get(each.layers.gpu)) for at, each in enumerate(classes)]
    first = next(bench for _, _, bench in matched if bench)
    return [_bench_class(store, programs, *each, first) for each in matched]


def _evaluate(store: Store, names: Sequence[str]) -> list[BenchResult]:
    """Evaluate stored benchmarks. If possible, rank all backends by the same measurement."""
    runs = [store.find_run(Selection(name), *TIMED) for name in names]
    if twice := [run for run in runs if runs.count(run) > 1]:
        raise UsageError(f"--bench names run {twice[0]} twice; name each run once")
    for rank_by in (MEASUREMENTS, MEASUREMENTS[1:]):
        benches = [evaluate_bench(store, run, rank_by=rank_by) for run in runs]
        if len({bench.ranking for bench in benches}) == 1:
            return benches
    return [evaluate_bench(store, run, rank_by=MEASUREMENTS) for run in runs]


def _device(bench: BenchResult) -> str:
    return device_name(bench.environment) or "a CPU"


def _bench_class(
    store: Store,
    programs: LayersByGpu,
    at: int,
    program: GpuLayers | None,
    bench: BenchResult | None,
    first: BenchResult,
) -> GpuBench:
    """Return a benchmark with the times of the layers, and warnings about unreliable times.

    `at` is the index of the program with the layers. `program` is None if this program ran on
    another GPU. The software versions of the benchmark are compared with the versions of `first`.
    """
    sides = [row.sides[at] for row in programs.rows]
    if bench is None:
        assert program is not None
        doubt = f"--bench names no benchmark on {program.name}, so these times are missing"
        calls = (BenchedCall(),) * len(sides)
        return GpuBench(program.name, program.device, None, program.layers, calls, doubts=(doubt,))
    times = BenchTimes(bench)
    calls = tuple(_benched_call(side, bench, times, own=program is not None) for side in sides)
    if all(call.ns is None and call.best_ns is None for call in calls):
        unknown = "; ".join(dict.fromkeys(call.doubt for call in calls if call.doubt))
        run, remedy = programs.classes[at].layers.name, ""
        if any(call.calls for call in calls):
            remedy = f"; benchmark the configs that `profharness layers {run} --savings --list-configs` prints"
        raise NotFoundError(
            f"run {bench.name} has no times for the layers of run {run} ({unknown}){remedy}"
        )
    doubts, layers = bench_doubts(bench), program.layers if program else None
    if layers is not None:
        if changes := _software_changes(store.environment(layers.run), bench.environment):
            doubts.append(
                f"run {bench.name} and the program ran with different versions: {', '.join(changes)}"
            )
        try:
            layers = regret_map(layers, bench)
        except NotFoundError as error:
            doubts.append(f"the savings of the best backends are unknown: {error}")
    return GpuBench(
        name=program.name if program else short_device_name(_device(bench)),
        device=_device(bench),
        bench=bench,
        layers=layers,
        calls=calls,
        changes=_software_changes(first.environment, bench.environment),
        doubts=tuple(doubts),
    )


def _benched_call(
    side: LayerSide | None, bench: BenchResult, times: BenchTimes, *, own: bool
) -> BenchedCall:
    """Return the times of a layer. `own` tells whether the program ran on the benchmark's GPU."""
    if side is None:
        return BenchedCall()
    if not side.points:
        return BenchedCall(doubt="no config describes these calls")
    calls = sum(weight for _, weight in side.points)
    ran = side.ran if own and side.ran in SDPA_BACKENDS else None
    asked = ran or (AUTO if side.asked is None else side.asked.replace(",", "+"))
    best = times.fastest(side.points)
    least = times.total(side.points, best) if best else None
    spent = times.total(side.points, asked)
    if spent is None:
        lacks = next(label for label, _ in side.points if times.median(label, asked) is None)
        so = "" if ran else ", so PyTorch's choice is unknown"
        doubt = f"run {bench.name} has no correct {asked} result for {lacks}{so}"
        return BenchedCall(None, None, best, least and least / calls, calls, doubt)
    backend = ran or _chosen_backend(bench, side, asked) or asked
    verdict = times.verdict(side.points, asked, than=best) if best else "same"
    unclear = verdict == "unknown" and best != backend and (least or spent) < spent
    doubt = f"no significant difference between {backend} and {best}, which has the lower median"
    # Without a significant difference, the lower median of `best` may be noise.
    if verdict != "slower" or best == backend:
        best, least = backend, spent
    return BenchedCall(
        backend, spent / calls, best, least and least / calls, calls, doubt if unclear else None
    )


def _chosen_backend(bench: BenchResult, side: LayerSide, asked: str) -> str | None:
    labels = {label for label, _ in side.points}
    cells = [cell for cell in bench.cells if cell.backend == asked and cell.config in labels]
    chosen = {backend_of_cell(cell) for cell in cells}
    return None if None in chosen else " and ".join(sorted(map(str, chosen))) or None


def layers_by_gpu_document(answer: LayersByGpu, *, full: bool = False) -> Document:
    """Return a document with the layer map of each run, and a table with columns for each GPU.

    The JSON contains the rows of all runs, and the additional keys `classes` and `layers`. All other
    keys describe the first run.
    """
    several = len(answer.classes) > 1
    documents = [
        layers_document(each.layers, full=full, of_several=several) for each in answer.classes
    ]
    first = documents[0]
    if not several:
        alone = {} if not answer.left_out else layers_by_gpu_record(answer)
        return replace(first, extra={**first.extra, **alone})
    if len(answer.classes) > FEW_RUNS and not full:
        more = (
            Note(
                f"To see the layers of some programs, name at most {FEW_RUNS} runs.", level="hint"
            ),
            More("the layers of all programs"),
        )
        return replace(
            first,
            blocks=(*overview_blocks(answer), *more),
            answer=(overview_answer(answer),),
            records=tuple(chain.from_iterable(each.records for each in documents)),
            extra={**first.extra, **layers_by_gpu_record(answer)},
        )
    return replace(
        first,
        blocks=(
            *chain.from_iterable(each.blocks for each in documents),
            *layers_by_gpu_blocks(answer, full),
        ),
        answer=runs_answer(answer),
        records=tuple(chain.from_iterable(each.records for each in documents)),
        extra={**first.extra, **layers_by_gpu_record(answer)},
    )


def overview_blocks(answer: LayersByGpu) -> Iterator[Block]:
    """Yield a table with one row for each program."""
    rows = []
    for each in answer.classes:
        layers = each.layers
        names = dict.fromkeys(filter(None, map(_overview_ran, layers.rows)))
        rows.append(
            {
                "run": layers.name,
                "gpu": each.device,
                "step": layers.step_ns,
                "busy": layers.busy_ns / layers.step_ns if layers.busy_ns else None,
                # A trace without the kernels of its attention calls does not show their times.
                "attention": layers.attention_ns or None,
                "share": layers.attention_ns / layers.gpu_ns or None if layers.busy_ns else None,
                "ran": ", ".join(names),
            }
        )
    columns = filled_columns(OVERVIEW, rows)
    if len({row["gpu"] for row in rows}) == 1:
        columns = [column for column in columns if column.key != "gpu"]
    yield Table.of(columns, rows)
    left_out = left_out_text(answer.left_out) if answer.left_out else ""
    yield from merged_notes(
        [
            Note(text, "" if text == left_out else each.layers.name, "warning")
            for each in answer.classes
            for text in each.layers.caveats
            if text
            != each.layers.assumed  # the overview has no reasons, which depend on the release
        ]
    )


def _overview_ran(row: LayerRow) -> str | None:
    """Return the backend that ran. The overview has no column for the mode of flex_attention."""
    text = ran_text(row)
    return f"{text} (eager)" if row.kind == "flex" and is_unfused(row) else text


def overview_answer(answer: LayersByGpu) -> str:
    shares = sorted(
        each.layers.attention_ns / each.layers.gpu_ns
        for each in answer.classes
        if each.layers.busy_ns and each.layers.attention_ns
    )
    lead = f"{len(answer.classes)} programs"
    if not shares:
        return f"{lead}; no trace has the times of attention."
    kinds: dict[str, list[str]] = {EAGER_OR_MATH: [], EAGER_FLEX: []}
    for each in answer.classes:
        slow = [row for row in each.layers.rows if is_unfused(row) or falls_back(row)]
        for kind in {EAGER_FLEX if row.kind == "flex" else EAGER_OR_MATH for row in slow}:
            kinds[kind].append(each.layers.name)
    unfused = "".join(
        f"; {kind} runs in {join_few(names, NAMES_SHOWN)}" for kind, names in kinds.items() if names
    )
    return (
        f"{lead}: attention takes {share_text(shares[0])} to {share_text(shares[-1])} of the GPU "
        f"time{unfused}."
    )


def layers_by_gpu_record(answer: LayersByGpu) -> dict[str, Any]:
    """Return the JSON keys `classes` and `layers`. The times in `classes` are per step."""
    classes = [
        {
            "run": each.layers.run,
            "device": each.device,
            "steps": len(each.layers.steps),
            "step_ns": each.layers.step_ns,
            "busy_ns": each.layers.busy_ns,
            "attention_ns": each.layers.attention_ns,
            "changes": list(each.changes),
        }
        for each in answer.classes
    ]
    return {"classes": classes, "layers": [record(row) for row in answer.rows]}


def layers_by_gpu_blocks(answer: LayersByGpu, full: bool = False) -> Iterator[Block]:
    """Yield a table with columns for each GPU, and notes about the differences between GPUs.

    Yield nothing if no layer is common to two runs.
    """
    if all(sum(side is not None for side in row.sides) < 2 for row in answer.rows):
        return
    names = [each.name for each in answer.classes]
    pair = len(names) == 2
    lead = f"{' → '.join(names)}, " if pair else ""
    yield Heading("Runs compared", f"{lead}median kernel time per call")
    rows = []
    phase_order = list(dict.fromkeys(row.first.step_phase for row in answer.rows))
    ordered = sorted(
        answer.rows, key=lambda row: (phase_order.index(row.first.step_phase), -_spent(row))
    )
    modules = layer_names(ordered, full=full, with_config=True)
    phases = phases_distinguish(ordered, modules)
    for row, module in zip(ordered, modules, strict=True):
        side = row.first
        config = _configs(row) if pair else side.config
        line: dict[str, Any] = {"module": module, "config": config, "calls": side.calls}
        line["step_phase"] = shown_phase(row.phase) if phases else None
        ran = [ran_text(each) if each else None for each in row.sides]
        line |= figures(list(zip(ran, row.call_ns, strict=True)))
        shares = [each.roofline_share if each else None for each in row.sides]
        if pair:
            line |= {"us": row.call_ns, "roofline": _change(shares)}
        rows.append(line | {f"roofline{at}": share for at, share in enumerate(shares)})
    titles = PAIR if pair else _titles(names)
    if all(row.basis in (None, "forward") for row in answer.rows):
        titles = tuple(
            replace(each, title=each.title.replace(CALL_TIME, FORWARD_TIME)) for each in titles
        )
    optional = [each.key for each in titles if each.importance == "detail"]
    yield Table.of(filled_columns((*GPU_LAYER, *titles), rows, optional), rows)
    if full:
        yield Heading("Kernels compared", "kernels of one call, longest first", 3)
        yield Table.of(
            (*pick(LayerRow, "module"), GPU, *pick(LayerSide, "kernels")),
            _kernels(answer, ordered),
        )
    yield from map(Note, _step_texts(answer))
    for row, label in zip(ordered, layer_labels(ordered, full=full), strict=True):
        in_table = f"config: {_configs(row)}" if pair else None
        for name, each, own in zip(names, row.sides, row.reasons, strict=True):
            reasons = [reason for reason in own if reason != in_table]
            if each is None:
                size = " of this size" if row.first.sized else ""
                yield Note(f"{name} has no matching layer{size}", label)
            elif reasons:
                yield Note(f"{name}: {'; '.join(reasons)}", label)
        if row.basis == "forward" and any(
            each and each.backward_ns is not None for each in row.sides
        ):
            yield Note(
                "Only the forward pass is compared, because not all runs have a backward pass.",
                label,
            )


def _configs(row: MatchedLayers) -> str | None:
    """Return the config of a layer, or both configs if they differ between two runs."""
    known = dict.fromkeys(side.config for side in row.sides if side and side.config)
    return " → ".join(known) or None


def _kernels(answer: LayersByGpu, rows: Sequence[MatchedLayers]) -> Iterator[dict[str, Any]]:
    """Yield the forward kernels of each layer on each GPU, in the order of the rows."""
    for row, label in zip(rows, layer_labels(rows, full=True), strict=True):
        for each, side in zip(answer.classes, row.sides, strict=True):
            if side and side.kernels:
                yield {"module": label, "gpu": each.name, "kernels": side.kernels}


def _titles(names: Sequence[str]) -> tuple[Column, ...]:
    """Return the columns that compare several runs."""
    return (
        *figure_columns(names, "ran", CALL_TIME),
        *(
            Column(f"roofline{at}", f"{name} % of roofline", "percent", importance="detail")
            for at, name in enumerate(names)
        ),
    )


def _change(shares: Sequence[float | None]) -> str | None:
    """Format the shares of two runs as `2.2 → 25.0`. Return None if both are unknown."""
    if not any(share is not None for share in shares):
        return None
    return " → ".join(MISSING if share is None else share_figure(share) for share in shares)


def _spent(row: MatchedLayers) -> float:
    spent = (
        ns * (side.calls or 1)
        for side, ns in zip(row.sides, row.call_ns, strict=True)
        if side and ns is not None
    )
    return next(spent, 0)


def runs_answer(answer: LayersByGpu) -> tuple[str, ...]:
    """Return sentences that compare each other run with the first run.

    If all runs are traces of an engine, compare them phase by phase.
    """
    texts = []
    first = answer.classes[0]
    for at, other in enumerate(answer.classes[1:], 1):
        shared = [row for row in answer.rows if row.sides[0] and row.sides[at]]
        if not shared:
            text = f"{other.name} has no layer in common with {first.name}."
            texts.append(f"{text} Layers are compared by their names and the sizes of their calls.")
            continue
        for phase in dict.fromkeys(row.first.step_phase for row in shared):
            before, after = (each.layers.of_phase(phase).attention_ns for each in (first, other))
            if before and after:
                rows = [row for row in shared if row.first.step_phase == phase]
                texts.append(_compared(answer, at, (before, after), rows))
    return tuple(texts)


def _compared(
    answer: LayersByGpu, at: int, times: tuple[float, float], rows: Sequence[MatchedLayers]
) -> str:
    """Return a sentence that compares the attention of the run `at` with the first run.

    `times` are the times of attention in a step, and `rows` are the layers that both runs have. All
    rows have the same phase.
    """
    first, other = answer.classes[0], answer.classes[at]
    before, after = times
    phase = rows[0].first.step_phase
    preposition = "on" if first.device != other.device else "in"
    of_phase = [row for row in answer.rows if row.first.step_phase == phase]
    alone = _call_ratio(rows[0], at) if len(of_phase) == 1 else None
    ratio = told_ratio(after / before, alone)
    step = f"{phase} step" if phase else "step"
    change = f"({time_text(before)} → {time_text(after)} per {step})"
    if stats.beyond(ratio, stats.THRESHOLD):
        text = f"{other.name} {compared(1 / ratio, first.name)} in attention {change}"
    else:
        text = f"Attention takes as long {preposition} {other.name} as {preposition} {first.name} {change}"
    gaps = [_gap(row, at) for row in rows]
    labels = layer_labels(rows, full=False)
    gap, label = max(zip(gaps, labels, strict=True), key=lambda pair: abs(pair[0]))
    if len(rows) > 1 and gap:
        text += f"; the largest difference is in {label} ({time_text(abs(gap))})"
    ratios = [_call_ratio(row, at) for row in rows]
    if most := opposite_layer(zip(labels, ratios, gaps, strict=True), ratio):
        text += f"; it {compared(1 / most[1])} in {most[0]}"
    return f"{text}."


def _call_ratio(row: MatchedLayers, at: int) -> float | None:
    """Return the time of a call in the run `at`, divided by its time in the first run."""
    before, after = row.call_ns[0], row.call_ns[at]
    return after / before if before and after else None


def _gap(row: MatchedLayers, at: int) -> float:
    """Return the time per step of a row in the first run, minus its time in the run `at`."""
    times = []
    for place in (0, at):
        side, ns = row.sides[place], row.call_ns[place]
        if side is None or ns is None:
            return 0
        times.append(ns * (side.calls or 1))
    return times[0] - times[1]


def _step_texts(answer: LayersByGpu) -> Iterator[str]:
    first, *others = answer.classes
    for at, other in enumerate(others, 1):
        shared = [
            (row.sides[0].ran, side.ran)
            for row in answer.rows
            if row.sides[0] and (side := row.sides[at])
        ]
        if not shared:
            continue  # the answer says so
        if both := [pair for pair in shared if all(pair)]:
            apart = sum(here != there for here, there in both)
            if apart:
                yield (
                    f"{other.name} runs a different backend than {first.name} in {apart} of "
                    f"{counted(len(both), 'row')}."
                )
        if other.changes:
            also = "" if other.device == first.device else "also "
            yield f"{other.name} {also}ran with different versions: {', '.join(other.changes)}."


def benches_document(
    programs: LayersByGpu, benches: Sequence[GpuBench], *, full: bool = False
) -> Document:
    """Return a document with the layer map of each program, and a comparison of the benchmarks.

    The JSON contains the keys of `layers_by_gpu_document`, and the keys `benches` and `benched`.
    """
    maps = {each.layers.run: each.layers for each in benches if each.layers is not None}
    classes = tuple(
        replace(each, layers=maps.get(each.layers.run, each.layers)) for each in programs.classes
    )
    document = layers_by_gpu_document(replace(programs, classes=classes), full=full)
    benched = [
        {
            "direction": row.direction,
            "sides": [record(side) if side else None for side in row.sides],
            "calls": [record(each.calls[at]) for each in benches],
        }
        for at, row in enumerate(programs.rows)
    ]
    return replace(
        document,
        blocks=(*document.blocks, *_bench_blocks(programs.rows, benches, full)),
        extra={**document.extra, "benches": list(map(_bench_record, benches)), "benched": benched},
    )


def _bench_record(item: GpuBench) -> dict[str, Any]:
    regret = item.layers.regret if item.layers else None
    return {
        "run": item.bench.run if item.bench else None,
        "device": item.device,
        "measurement": item.measurement,
        "changes": list(item.changes),
        "doubts": list(item.doubts),
        "program": item.layers.run if item.layers else None,
        "regret": record(regret) if regret else None,
    }


def _bench_blocks(
    rows: Sequence[MatchedLayers], benches: Sequence[GpuBench], full: bool
) -> Iterator[Block]:
    names = [each.name for each in benches]
    timed = [
        f"{each.name}: {each.measurement} times of run {each.bench.name}"
        if each.bench
        else f"{each.name}: no benchmark"
        for each in benches
    ]
    yield Heading("Benchmarks compared", f"times of one call; {', '.join(timed)}")
    labels = layer_labels(rows, full=full, with_config=True)
    layers = list(
        zip(rows, labels, zip(*(each.calls for each in benches), strict=True), strict=True)
    )
    lines = []
    # sort by the time on the first GPU that has a time for the layer
    for row, label, calls in sorted(
        layers, key=lambda layer: -next(filter(None, (call.total_ns for call in layer[2])), 0)
    ):
        points = row.first.points
        # Use the config that was timed, because only the forward pass of recomputed calls is timed.
        config = points[(len(points) - 1) // 2][0] if points else row.first.config
        line = {"module": label, "calls": None, "step_phase": None, "config": config}
        line |= figures([(call.backend, call.ns) for call in calls])
        for at, (call, each) in enumerate(zip(calls, benches, strict=True)):
            line |= {f"best{at}": call.best, f"best_us{at}": call.best_ns}
            if each.measurement != benches[0].measurement:
                line[f"times{at}"] = None
        lines.append(line)
    best = [
        column
        for at, name in enumerate(names)
        for column in (
            Column(f"best{at}", f"{name} fastest"),
            Column(f"best_us{at}", f"{name} median fastest µs/call", "time", scale="call"),
        )
    ]
    yield Table.of((*GPU_LAYER, *figure_columns(names, "ran", "median µs/call"), *best), lines)
    yield from map(Note, _bench_sums(rows, benches))
    for each in benches:
        if each.changes:
            changes = ", ".join(each.changes)
            yield Note(f"the benchmark on {each.name} also ran with different versions: {changes}")
        for doubt in each.doubts:
            yield Note(doubt, each.name, "warning")
    for _, label, calls in layers:
        for text in dict.fromkeys(call.doubt for call in calls if call.doubt):
            yield Note(text, label, "warning")


def _bench_sums(rows: Sequence[MatchedLayers], benches: Sequence[GpuBench]) -> Iterator[str]:
    """Yield sentences about the total time on each GPU, and about the savings of other backends."""
    for phase in dict.fromkeys(row.first.step_phase for row in rows):
        places = [at for at, row in enumerate(rows) if row.first.step_phase == phase]
        own = [replace(each, calls=tuple(each.calls[at] for at in places)) for each in benches]
        yield from _sums_of_phase([rows[at] for at in places], own, phase)


def _sums_of_phase(
    rows: Sequence[MatchedLayers], benches: Sequence[GpuBench], phase: str | None
) -> Iterator[str]:
    sides = [side for row in rows for side in row.sides if side]
    whole = f"a {phase} step" if phase else "a step"
    if any(side.calls is None for side in sides):
        whole = "the whole program"
    first, *others = benches
    for other in others:
        if first.bench and other.bench and first.measurement != other.measurement:
            yield (
                f"{first.measurement} times on {first.name} and {other.measurement} times on {other.name} "
                "cannot be compared"
            )
            continue
        both = zip(first.calls, other.calls, strict=True)
        shared = [
            (one.total_ns, two.total_ns) for one, two in both if one.total_ns and two.total_ns
        ]
        if not shared:
            yield f"no layer has a time on both {first.name} and {other.name}"
            continue
        here, there = map(sum, zip(*shared, strict=True))
        yield (
            f"in these benchmarks, attention of {whole} takes {time_text(here)} on "
            f"{first.name} and {time_text(there)} on {other.name} ({ratio_text(here / there)}), "
            f"summed over {len(shared)} of {counted(len(rows), 'row')}"
        )
    for each in benches:
        saved = sum(
            call.total_ns - (call.best_ns or 0) * (call.calls or 0)
            for call in each.calls
            if call.ns
        )
        if saved > 0:
            yield (
                f"on {each.name}, the fastest correct backends save {time_text(saved)} of the "
                f"kernel time of {whole}"
            )
