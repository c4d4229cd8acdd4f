"""Write the part of a report on a program: step, layers, kernels, advice and timeline."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from profharness.atlas.predictions import Place
from profharness.attention.dispatch.advice import FLEX
from profharness.attention.dispatch.by_rule import Explanation
from profharness.columns import Column, pick
from profharness.commands.explain.answer import (
    Way,
    change_texts,
    ranked_ways,
    short_change_text,
    shown_ways,
)
from profharness.commands.explain.faster import explained_calls, faster_text, faster_ways
from profharness.commands.explain.savings import (
    matters,
    needs_preparation,
    own_place,
    saved_ns,
    saving_text,
)
from profharness.commands.layers.answer import idle_time, what_to_change
from profharness.errors import counted
from profharness.program.layer_map import (
    CHANGE_CODE,
    FOREACH,
    FP32_PRODUCTS,
    LayerMap,
    LayerRow,
    OtherWork,
    actual_backend,
    module_name,
    short_module,
)
from profharness.program.step_times import (
    ATTENTION,
    IDLE,
    KINDS,
    UNKNOWN,
    KernelTime,
    ProgramTimes,
    kind_of,
    times_by_phase,
)
from profharness.render.colors import ATTENTION as ATTENTION_ON
from profharness.render.document import (
    Block,
    Chart,
    Code,
    Heading,
    Lane,
    Note,
    Span,
    Table,
    Timeline,
    record,
)
from profharness.rows import CallRow, RangeRow, StepLaunch
from profharness.store import Store
from profharness.traces.ops import EVALUATION
from profharness.units import share_text, time_text

MOST_KERNELS = 15
REASONS_TOLD = 2  # maximum number of reasons for backends in the answer
MOST_RANGES = 4  # maximum depth of nested ranges on a timeline
MOST_LISTED = 100  # maximum number of kernels in the table below a timeline
WORK_TITLES = {
    FP32_PRODUCTS: "Compute the fp32 matrix products in bf16",
    FOREACH: "Use a fused optimizer",
}
OBSERVED = "profharness-attention:"  # ranges that the observer opens around attention calls
RANGES, CPU = "range", "CPU"
PARTS = (
    *pick(LayerRow, "step_phase"),
    *pick(KernelTime, "kind"),
    Column("ns", "mean µs/step", "time", meaning="time per step"),
    *pick(LayerRow, "step_share"),
)
TOP_KERNELS = pick(KernelTime, "kernel_short", "launches", "total_ns", "share", "kind", "layer")
LAYER_TIMES = (
    *pick(LayerRow, "step_phase"),
    Column("layer", "module"),
    Column("backend", "ran"),
    Column("ns", "mean µs/step", "time", meaning="attention time per step"),
    Column("share", "% of GPU time", "percent"),
)
LISTED = (
    Column("start_ns", "start µs", "time", scale="timeline", meaning="time since the step began"),
    Column("duration_ns", "duration µs", "time", meaning="duration of the launch"),
    Column("lane", "stream", optional=True),
    Column("name", "kernel", shrink=True),
    Column("series", "kind"),
    Column("detail", "layer or op", shrink=True),
)


@dataclass(frozen=True, slots=True)
class ProgramParts:
    """The parts of a report on a program, in order of appearance. `record` is for the JSON form."""

    step: tuple[Block, ...] = ()
    layers: tuple[Block, ...] = ()
    """A folded table of each layer, which therefore follows all other blocks on the layers."""
    kernels: tuple[Block, ...] = ()
    timeline: tuple[Block, ...] = ()
    times: Mapping[str | None, ProgramTimes] = field(default_factory=dict)
    """The times of each phase, or the times of all steps under the key None."""
    record: dict[str, Any] | None = None


def program_parts(
    store: Store, run: str, layers: LayerMap | None, names: Mapping[str, str]
) -> ProgramParts:
    """Return the parts of the report on a run. `names` is the result of `longer_names`.

    Return empty parts if the run has cells or has no kernels on a GPU.
    """
    if store.cells(run):
        return ProgramParts()
    calls = store.calls(run)
    # reading the steps of a large trace takes seconds, and the layer map has already done it
    steps = layers.steps if layers and layers.steps else store.steps(run)
    found = times_by_phase(store, steps, calls, layers.step_phases if layers else {})
    if not found:
        return ProgramParts()
    divided = len(found) > 1
    phases = {phase: times for phase, times in found.items() if phase or not divided}
    made = {"run": run} | _record(found[None])
    made["phases"] = [{"phase": phase} | _record(found[phase]) for phase in phases if phase]
    return ProgramParts(
        tuple(_step_bars(phases)),
        tuple(_each_layer(phases, calls, layers)) if layers else (),
        tuple(chain.from_iterable(_kernel_blocks(*phase, names) for phase in phases.items())),
        tuple(_timeline_blocks(store, run, next(iter(phases.values())), calls, names)),
        phases,
        made,
    )


def _record(times: ProgramTimes) -> dict[str, Any]:
    return {
        "steps": len(times.steps),
        "step_ns": times.step_ns,
        "parts": [
            {"kind": kind, "backend": backend, "ns": ns, "share": ns / times.step_ns}
            for (kind, backend), ns in _ordered(times)
        ],
        "kernels": [record(row) for row in times.kernels],
    }


def compared_steps(programs: Mapping[str, Mapping[str | None, ProgramTimes]]) -> list[Block]:
    """Return a chart that compares the steps of programs by kind of work.

    Return an empty list for fewer than two programs.
    """
    if sum(map(bool, programs.values())) < 2:
        return []
    timed = {
        f"{name}, {phase}" if phase else name: times
        for name, phases in programs.items()
        for phase, times in phases.items()
    }
    # The last part of each bar has its label.
    rows = tuple(
        {
            "run": name,
            "µs": times.parts.get(part, 0) / 1e3,
            "kind": _series(*part),
            "label": _step_text(times) if part[0] == IDLE else "",
        }
        for part in sorted(
            dict.fromkeys(
                part for times in timed.values() for part in (*times.parts, (IDLE, None))
            ),
            key=lambda part: KINDS.index(part[0]),
        )
        for name, times in timed.items()
        if times.parts.get(part)
    )
    chart = Chart("stack", "", rows, "µs", "run", "kind", "µs per step", label="label")
    return [Heading("The steps compared"), chart]


def _ordered(times: ProgramTimes) -> list[tuple[tuple[str, str | None], float]]:
    return sorted(times.parts.items(), key=lambda part: (KINDS.index(part[0][0]), -part[1]))


def _series(kind: str, backend: str | None) -> str:
    """Return the name of a series. Attention has the colour of its backend."""
    return f"{ATTENTION_ON}{backend or UNKNOWN}" if kind == ATTENTION else kind


def _step_text(times: ProgramTimes) -> str:
    """Return the duration of a step. The mean of several steps is called so."""
    return f"{'mean ' if len(times.steps) > 1 else ''}{time_text(times.step_ns)}"


def _step_bars(phases: Mapping[str | None, ProgramTimes]) -> Iterator[Block]:
    """Yield a chart and a table with the step of each phase."""
    details, bars, parts = [], [], []
    for phase, times in phases.items():
        count, time = len(times.steps), _step_text(times)
        name = f"{count} steps" if count > 1 else times.steps[0].name
        of_phase = f"{phase} {time} ({counted(count, 'step')})"
        details.append(of_phase if phase else f"{time}, {name}")
        bar = f"{phase or 'step'}, mean of {count} steps:" if count > 1 else phase or "step"
        for (kind, backend), ns in _ordered(times):
            series, share = _series(kind, backend), ns / times.step_ns
            label = f"{time_text(ns)} · {share_text(share)}"
            bars.append({"step": bar, "µs": ns / 1e3, "kind": series, "label": label})
            parts.append({"step_phase": phase, "kind": series, "ns": ns, "step_share": share})
    yield Heading("The step" if len(phases) == 1 else "Steps by phase", "; ".join(details))
    caption = "The shares refer to the whole step, including the time in which the GPU is idle."
    if len(phases) > 1:
        caption += " Kernels that overlap count once here, but in full in the tables below."
    if len(phases) > 1 and any(len(times.steps) > 1 for times in phases.values()):
        caption += (
            " The shares are means of all steps, unlike the figures of the median step below."
        )
    chart = Chart("stack", "", tuple(bars), "µs", "step", "kind", "µs", label="label")
    yield replace(chart, caption=caption)
    yield replace(Table.of(PARTS, parts), drawn=True)


def _each_layer(
    phases: Mapping[str | None, ProgramTimes], calls: Sequence[CallRow], layers: LayerMap
) -> Iterator[Block]:
    """Yield a folded table of the attention time of each layer, in the order of the program.

    Yield nothing if no row of `layers` has several layers, because its table then has these times.
    """
    rows: list[dict[str, Any]] = []
    for phase, times in phases.items():
        steps = {(step.trace, step.step) for step in times.steps}
        spent: dict[tuple[str, str], float] = {}
        for call in calls:
            name = module_name(call)
            if name is None or not call.kernels or (call.trace, call.step) not in steps:
                continue
            layer = short_module(name) or name, actual_backend(call) or UNKNOWN
            ns = sum(kernel.total_ns for kernel in call.kernels)
            spent[layer] = spent.get(layer, 0) + ns / len(steps)
        idle = times.parts.get((IDLE, None), 0)
        busy = layers.of_phase(phase).gpu_ns or times.step_ns - idle
        rows += [
            {"step_phase": phase, "layer": name, "backend": ran, "ns": ns, "share": ns / busy}
            for (name, ran), ns in spent.items()
            if ns
        ]
    if len(rows) > len(layers.rows):
        count = counted(len({row["layer"] for row in rows}), "layer")
        yield Heading("Attention of each layer", count, level=3, folded=True)
        yield replace(Table.of(LAYER_TIMES, rows), bars=("ns",), colored_by="backend")


def _kernel_blocks(
    phase: str | None, times: ProgramTimes, names: Mapping[str, str]
) -> Iterator[Block]:
    shown = times.kernels[:MOST_KERNELS]
    whole = len(times.kernels)
    several_kinds = len({row.kernel for row in times.kernels}) < whole
    rows = "rows, one per kernel and kind" if several_kinds else "kernels"
    detail = f"the {len(shown)} longest of {whole} {rows}" if whole > len(shown) else ""
    yield Heading(f"Top kernels of {phase} steps" if phase else "Top kernels", detail)
    lines = [
        ({"kernel_short": names[row.kernel]} if row.kernel in names else {}, row) for row in shown
    ]
    yield Table.of(TOP_KERNELS, lines)


def _timeline_blocks(
    store: Store,
    run: str,
    times: ProgramTimes,
    calls: Sequence[CallRow],
    names: Mapping[str, str],
) -> Iterator[Block]:
    step, streams = times.middle, _stream_lanes(times, names)
    lanes = [*_range_lanes(store.ranges(run), times), *_call_lane(times, calls), *streams]
    series = dict.fromkeys(span.series for lane in lanes for span in lane.spans)
    marked = tuple(name for name in series if name.startswith(ATTENTION_ON))
    several = (
        f"{len(times.steps)} steps; this one has the median duration"
        if len(times.steps) > 1
        else ""
    )
    yield Heading("Timeline", f"{step.name}, {time_text(step.duration_ns)}")
    yield Timeline(
        f"Timeline of {step.name}", tuple(lanes), max(step.duration_ns, 1), marked, several and f"{several}."
    )  # fmt: skip
    spans = [
        (lane.name if len(streams) > 1 else None, span) for lane in streams for span in lane.spans
    ]
    listed = sorted(spans, key=lambda each: -each[1].duration_ns)[:MOST_LISTED]
    listed.sort(key=lambda each: each[1].start_ns)
    few = f"the {len(listed)} longest of {len(spans)} launches" if len(spans) > len(listed) else ""
    yield Heading("The timeline as a table", few, 3, folded=True)
    yield Table.of(LISTED, [({"lane": lane}, span) for lane, span in listed])


def _stream_lanes(times: ProgramTimes, names: Mapping[str, str]) -> list[Lane]:
    streams: dict[int | None, list[StepLaunch]] = {}
    for launch in times.launches:
        streams.setdefault(launch.stream, []).append(launch)
    ordered = sorted(streams.items(), key=lambda item: (item[0] is None, item[0]))
    return [
        Lane(
            "GPU" if stream is None else f"GPU stream {stream}",
            tuple(_spans(times, launches, names)),
            visited=True,
        )
        for stream, launches in ordered
    ]


def _spans(
    times: ProgramTimes, launches: Sequence[StepLaunch], names: Mapping[str, str]
) -> Iterator[Span]:
    for launch in launches:
        owner, kind = times.owner(launch), kind_of(launch)
        backend = times.backend(launch)
        path = launch.op_path.split(";") if launch.op_path else ()
        # An op of the autograd engine repeats the name of the op inside it.
        op = " › ".join(each for each in path if not each.startswith(EVALUATION))
        detail = (short_module(owner.module) or "") if owner else op
        if owner and launch.direction != "forward":
            detail = f"{detail}, {launch.direction}".removeprefix(", ")
        yield Span(
            launch.start_ns - times.middle.start_ns,
            launch.duration_ns,
            names.get(launch.kernel, launch.kernel_short),
            _series(kind, backend),
            detail,
        )


def _call_lane(times: ProgramTimes, calls: Sequence[CallRow]) -> list[Lane]:
    """Return a lane of the attention calls on the CPU.

    Return an empty list for replays of a graph.
    """
    step = times.middle
    spans = [
        Span(
            max(call.start_ns - step.start_ns, 0),
            call.duration_ns,
            short_module(module_name(call)) or call.op,
            _series(ATTENTION, actual_backend(call)),
            call.config or "",
        )
        for call in sorted(calls, key=lambda call: call.start_ns)
        if call.trace == step.trace
        and call.duration_ns > 0
        and 0 <= call.start_ns - step.start_ns < step.duration_ns
    ]
    return [Lane("CPU: attention calls", tuple(spans))] if spans else []


def _range_lanes(ranges: Sequence[RangeRow], times: ProgramTimes) -> list[Lane]:
    """Return lanes of the ranges on the thread that has the most ranges."""
    step = times.middle
    end = step.start_ns + step.duration_ns
    inside = [
        each
        for each in ranges
        if each.start_ns < end
        and each.start_ns + each.duration_ns > step.start_ns
        and not each.name.startswith(OBSERVED)
    ]
    if not inside:
        return []
    threads: dict[tuple[int, int], list[RangeRow]] = {}
    for each in inside:
        threads.setdefault((each.pid, each.tid), []).append(each)
    own = max(threads.values(), key=len)
    depths: dict[int, int] = {}
    lanes: list[list[Span]] = []
    for each in sorted(own, key=lambda each: (each.start_ns, -each.duration_ns)):
        depth = depths[each.id] = depths.get(each.parent or -1, -1) + 1
        if depth >= MOST_RANGES:
            continue
        begin = max(each.start_ns, step.start_ns)
        length = min(each.start_ns + each.duration_ns, end) - begin
        if depth == len(lanes):
            lanes.append([])
        lanes[depth].append(Span(begin - step.start_ns, length, each.name, RANGES))
    return [
        Lane("CPU: ranges" if not depth else "", tuple(spans)) for depth, spans in enumerate(lanes)
    ]


@dataclass(frozen=True, slots=True)
class ProgramAdvice:
    """What a report says on the reasons for the backends of a program, and on what to change."""

    sentences: tuple[str, ...] = ()
    """Sentences for the answer: the reasons of the costliest layers."""
    blocks: tuple[Block, ...] = ()
    details: tuple[Block, ...] = ()
    """A folded section with the possible changes of a program without other advice on attention."""


def program_advice(layers: LayerMap) -> ProgramAdvice:
    """Return the reasons for the backends of a program, and the advice with its code.

    The advice of `layers` is for layers that math or eager attention computes. For the other layers,
    only a change after which another backend is faster is given, as `explain` finds it. The changes
    are in the order of the sentences of the answer: attention, other work, idle GPU.
    """
    ordered = sorted(layers.rows, key=lambda row: -row.total_ns)
    whys = dict.fromkeys(row.why for row in ordered if row.why)
    reasons = [f"{why}." for why in list(whys)[:REASONS_TOLD]]
    explained = explained_calls(layers) if matters(layers) else []
    notes = list(_advice_notes(layers))
    # A change of several layers has its code once.
    codes = CHANGE_CODE | {
        _key(way): way.advice.code for answer in explained for way in ranked_ways(answer)
    }
    blocks: list[Block] = []
    for note, text in notes:
        blocks.append(note)
        if code := codes.pop(text, ""):
            blocks.append(Code(code))
    told = {text for _, text in notes}
    for answer, way in faster_ways(explained):
        told.add(_key(way))
        text, code = faster_text(layers, answer, way), way.advice.code
        blocks += change_blocks(text, answer.config, code, _also_covered(layers, code))
    shown = {block.text for block in blocks if isinstance(block, Code)}
    for work, share in layers.notable_work.items():
        if work.code not in shown:
            blocks += _other_work_advice(work, share)
    blocks += _idle_advice(layers)
    others = tuple(_other_changes(explained, told))
    head = (Heading("Advice"),) if blocks else ()
    if not told:
        return ProgramAdvice(tuple(reasons), (*head, *blocks), others)
    return ProgramAdvice(tuple(reasons), (*head, *blocks, *others))


def change_blocks(sentence: str, config: str, code: str, more: str = "") -> Iterator[Block]:
    """Yield a change of a config under a heading, with its code and a note on what it saves.

    `sentence` is the change, a colon and what it saves. `more` is another sentence for the note.
    """
    change, _, saving = sentence.partition(": ")
    yield Heading(change, "" if config in change else config, level=3)
    if code:
        yield Code(code)
    yield Note(f"{saving[0].upper()}{saving[1:]} {more}".rstrip())


def _idle_advice(layers: LayerMap) -> Iterator[Block]:
    """Yield the idle time and its remedy, if the GPU waits for the CPU to launch kernels."""
    idle = idle_time(layers)
    if idle is None or not idle.remedy:
        return
    remedy = f"{idle.remedy[0].upper()}{idle.remedy[1:]}."
    yield Heading("Reduce the launch overhead", f"the GPU is idle for {idle.share}", level=3)
    yield Code(idle.code) if idle.code else Note(remedy)


def _also_covered(layers: LayerMap, code: str) -> str:
    """Return a sentence on the matrix products that the code of a change of attention also covers."""
    for work, share in layers.notable_work.items():
        if work.code == code:
            return (
                "torch.autocast also speeds up the fp32 matrix products outside attention, which "
                f"take {share_text(share)} of the GPU time."
            )
    return ""


def _other_work_advice(work: OtherWork, share: float) -> list[Block]:
    """Return the change to kernels outside attention, with its code."""
    of = f"{share_text(share)} of the GPU time"
    return [Heading(WORK_TITLES[work.kind], of, level=3), Code(work.code)]


def _key(way: Way) -> str:
    """Return a change as the advice of `layers` gives it."""
    return f"{way.backend}: {way.advice.change}"


def _other_changes(answers: Sequence[Explanation], told: Collection[str]) -> Iterator[Block]:
    """Yield a folded section with the changes that `explain` shows, except those in `told`.

    A change that applies to several configs is given once.
    """
    configs: dict[tuple[str, str], list[str]] = {}
    for answer in answers:
        for way in shown_ways(answer, (), full=False):
            if _key(way) not in told:
                # The explanation of flex_attention is needed, because it is another function.
                flex = way.advice.steps == FLEX
                text = " ".join(change_texts(way)) if flex else short_change_text(way)
                configs.setdefault((text, way.advice.code), []).append(answer.config)
    if not configs:
        return
    subjects = {change: ", ".join(dict.fromkeys(labels)) for change, labels in configs.items()}
    same = next(iter(subjects.values())) if len(set(subjects.values())) == 1 else ""
    title = "Other changes" if told else "Possible changes"
    detail = same or counted(len(configs), "change")
    yield Heading(title, detail, level=3 if told else 2, folded=True)
    for (text, code), subject in subjects.items():
        yield Note(text, "" if same else subject)
        if code:
            yield Code(code)


def _advice_notes(layers: LayerMap) -> Iterator[tuple[Note, str]]:
    """Yield the advice on a program's layers, with the time that each change saves per step."""
    place = own_place(layers)
    notes = {
        Note(f"{sentence}. {_saving(row, text, layers, place)}".rstrip(), label): text
        for row in layers.rows
        for label in [short_module(row.module) or row.config or row.kind]
        for text, sentence in zip(row.advice, what_to_change(row), strict=True)
    }
    yield from notes.items()


def _saving(row: LayerRow, text: str, layers: LayerMap, place: Place | None) -> str:
    """Return a sentence on the predicted savings of a change, or else on the time of the calls."""
    spent = row.kernel_ns
    if not spent or row.saves_ns is not None:  # advice of a bench has its own figures
        return ""
    saved, steps = saved_ns(row, text, layers, place), layers.of_phase(row.step_phase)
    if saved is not None:
        share = f" ({share_text(saved / steps.gpu_ns)} of GPU time)" if steps.gpu_ns else ""
        predicted = saving_text(
            [(row.step_phase, saved)], prepares=needs_preparation(row, text, layers)
        )
        return f"{predicted[0].upper()}{predicted[1:]}{share}."
    whole, of = (steps.gpu_ns, "GPU time") if steps.gpu_ns else (steps.step_ns, "step")
    share = f" ({share_text(spent / whole)} of the {of})" if whole else ""
    step = f"{row.step_phase} step" if row.step_phase else "step"
    return f"These calls take {time_text(spent)} per {step}{share}. A change cannot save more than that time."
