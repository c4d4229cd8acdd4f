"""Summarize the cost of a program's attention, the backends that ran, and the limit of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from profharness.attention.config import SDPA_BACKENDS
from profharness.commands._answers import LAUNCH_REMEDY
from profharness.commands.explain.savings import Change, main_change, matters, saving_text
from profharness.devices import short_device_name, with_article
from profharness.errors import counted, join_and, join_few
from profharness.measurements.agreement import ANOTHER_PACKAGE, backend_text
from profharness.program.gates import falls_back, is_unfused
from profharness.program.layer_map import (
    FOREACH,
    FP32_PRODUCTS,
    Forecast,
    LayerMap,
    LayerRow,
    PredictedTime,
    StepGroup,
)
from profharness.program.phases import PhaseRow, in_phase, slow_steps
from profharness.program.regret import is_launch_bound, saved
from profharness.render.document import FORMATS
from profharness.rows import STEP_END, WHOLE_TRACE, GapRow
from profharness.traces.engine_log import SGLANG, VLLM
from profharness.traces.engine_steps import engine_of_step, parse_engine_step
from profharness.units import share_text, time_text

EAGER_FLEX = "flex_attention without torch.compile"
LAUNCH_BOUND = 0.5  # the GPU is idle for at least this share of a step that launches limit
LIMITING = 0.1  # minimum share of attention in a step that attention limits
MOST_LAUNCHES = (
    0.5  # minimum share of attention in the launches whose overhead is that of attention
)
ONE_GAP = 0.5  # the answer names a gap that is a larger share of the idle time
IDLE = 0.1  # minimum idle share that the answer reports
LAYERS_NAMED = 2  # maximum number of groups of layers that the answer names
STEPS_NAMED = 3  # maximum number of slow steps that the answer names
USE_SDPA = "use scaled_dot_product_attention"
ENGINE_REMEDIES = {
    VLLM: "let vLLM use CUDA graphs (do not set --enforce-eager)",
    SGLANG: "let SGLang use CUDA graphs (do not set --disable-cuda-graph)",
}
"""Maps an engine to the remedy if the GPU waits for the CPU to launch kernels."""
OP_ENGINES = {"vllm": VLLM, "sgl_kernel": SGLANG, "sglang": SGLANG}
"""Maps the namespaces of attention ops to engines."""
COMPILE_CODE = 'model = torch.compile(model, mode="reduce-overhead")'
"""The code of LAUNCH_REMEDY."""


@dataclass(frozen=True, slots=True)
class IdleTime:
    """The time in which the GPU is idle, and what to do if it waits for the CPU to launch kernels."""

    share: str  # such as `77 % of the traced step`
    text: str  # a sentence with its cause, without the remedy and the full stop
    remedy: str = ""
    code: str = ""  # the code of the remedy; "" for an engine, which has a switch of its own

    @property
    def sentence(self) -> str:
        """The cause and the remedy in one sentence."""
        return f"{self.text}; {self.remedy}." if self.remedy else f"{self.text}."


def layers_answer(layers: LayerMap, change: Change | None = None) -> tuple[str, ...]:
    """Return a few sentences that summarize the layer map of a program.

    `change` is the advice that the answer contains.
    """
    if layers.forecasts:
        return tuple(_forecast_sentence(layers, forecast) for forecast in layers.forecasts)
    if not layers.steps:
        return _counted(layers, change)
    if layers.attention_ns and all(map(is_unfused, layers.rows)):
        subject = f"{_unfused(layers.rows)}{_where(change)}"
        if not matters(layers):
            return (f"{_cost(layers, subject)}, so another backend would save little.",)
        advice = advised_text(change) if change else USE_SDPA
        first = f"{_cost(layers, subject)}: {advice}."
        return (first, *_saving(layers), *_slow(layers), *_idle(layers, change))
    cost, ran = _cost(layers), _what_ran(layers)
    several = several_phases(layers)
    lead = (f"{cost}.", f"{ran[0].upper()}{ran[1:]}.") if several else (f"{cost}; {ran}.",)
    saving = _saving(layers) or _change(change)
    return (*lead, *saving, *_slow(layers), *_idle(layers, change))


def other_work_answer(layers: LayerMap) -> Iterator[str]:
    """Yield a sentence on each kind of kernels outside attention that could be faster, if they take
    a large share of the GPU time.
    """
    for work, share in layers.notable_work.items():
        takes = f"take {share_text(share)} of the GPU time"
        if work.kind == FP32_PRODUCTS:
            in_fp32 = any("fp32" in (row.config or "").split("-") for row in layers.rows)
            too = ", too" if in_fp32 else ""
            yield (
                f"The fp32 matrix products outside attention {takes}; bf16 (torch.autocast) speeds "
                f"these up{too}."
            )
        if work.kind == FOREACH:
            yield (
                f"The optimizer's foreach kernels {takes}; use fused=True "
                f"(torch.optim.{work.optimizer}(…, fused=True))."
            )


def several_phases(layers: LayerMap) -> bool:
    """Return whether a program has steps of several phases. The first sentence then has no backend."""
    return len({row.step_phase for row in layers.rows}) > 1


def lead_length(layers: LayerMap) -> int:
    """Return the number of sentences of an answer that say what attention costs and what ran."""
    return 2 if several_phases(layers) else 1


def _unfused(rows: Sequence[LayerRow]) -> str:
    """Return the name of attention that separate kernels compute."""
    kinds = {row.kind for row in rows}
    return EAGER_FLEX if kinds == {"flex"} else "Eager attention"


def told_change(layers: LayerMap) -> Change | None:
    """Return the advice to include in the answer, or None if there is no advice."""
    if not matters(layers):
        return None
    if layers.forecasts or (layers.regret and not all(map(is_unfused, layers.rows))):
        return None
    return main_change(layers)


def what_to_change(row: LayerRow) -> Iterator[str]:
    """Yield the advice on a row. Each text starts with a capital letter."""
    for text in row.advice:
        named = _named(text)
        yield named[0].upper() + named[1:]


def _named(text: str) -> str:
    """Return a text of advice. Replace a prefix such as `flash: ` with `to run on flash: `."""
    backend, colon, change = text.partition(": ")
    if colon and backend in SDPA_BACKENDS:
        return f"to run on {backend}: {change}"
    return text


def _where(change: Change | None) -> str:
    """Return text such as ` in LlamaAttention_{0-2}`, or "" if the layers have no names."""
    rows = change.rows if change else ()
    names = dict.fromkeys(_last_name(row.module or "") for row in rows)
    named = all(any(map(str.isalpha, name)) for name in names)
    return f" in {join_few(list(names), LAYERS_NAMED)}" if rows and named else ""


def _last_name(module: str) -> str:
    """Return the last name of a module path, such as `self_attn` or `layers.0`."""
    parts = module.split(".")
    return ".".join(parts[-2:] if parts[-1][:1] in ("{", *"0123456789") else parts[-1:])


def advised_text(change: Change) -> str:
    """Return a clause on a change, and on the time that it saves per step."""
    saves = f", {change.saving}" if change.saves else ""
    return f"{_named(change.text)}{saves}"


def _layer_count(rows: Sequence[LayerRow], *, in_all: bool) -> tuple[float, str]:
    """Return the number of layers and the noun `layer`. Return the number of calls and `call` if
    the layers cannot be distinguished, as in compiled code or in a trace without modules.

    If `in_all` is set, count the calls of all steps instead of those of one step.
    """
    if rows and all(row.names and row.mode != "compile" for row in rows):
        # The path of a recomputed layer lacks its beginning.
        first = [row for row in rows if row.direction != "recompute"] or rows
        return len({name for row in first for name in row.names}), "layer"
    return _calls(rows, in_all=in_all), "call"


def _cost(layers: LayerMap, subject: str = "Attention") -> str:
    """Return a clause with the time of attention in the steps of each phase."""
    groups = [group for group in layers.groups if group.attention_ns]
    if not groups:
        return (
            "The times of the attention calls are unknown, because the trace does not contain "
            "their kernels"
        )
    first, *others = groups
    texts = [in_phase(first.phase, f"{subject} takes {_cost_of_step(first)}")]
    texts += [f"in {group.phase or 'other'} steps, {_cost_of_step(group)}" for group in others]
    return "; ".join(texts)


def _cost_of_step(steps: StepGroup) -> str:
    """Return text such as `4 % of the GPU time (16.5 µs of 445 µs)`."""
    spent, busy = steps.attention_ns, steps.gpu_ns
    backward = sum(row.backward_ns or 0 for row in steps.rows)
    forward = sum(row.forward_ns or 0 for row in steps.rows)
    parts = f"; forward {time_text(forward)}, backward {time_text(backward)}" if backward else ""
    if busy:
        gpus = max(step.devices for step in steps.steps)
        on = f" on {gpus} GPUs" if gpus > 1 else ""
        whole = f"{share_text(spent / busy)} of the GPU time"
        return f"{whole} ({time_text(spent)} of {time_text(busy)}{on}{parts})"
    whole = f"{share_text(spent / steps.gpu_step_ns)} of the step" if steps.step_ns else "some time"
    of = f" of {time_text(steps.gpu_step_ns)}" if steps.step_ns else ""
    return f"{whole} ({time_text(spent)}{of}, times of CPU ops{parts})"


def _what_ran(layers: LayerMap) -> str:
    """Return a clause such as `all 3 layers run on cudnn, none on math`."""
    rows = layers.rows
    in_all = several_phases(layers)  # because the numbers per step of two phases do not add up
    whole, noun = _layer_count(rows, in_all=in_all)
    slow = [
        (falls_back, "fall back to math", "falls back to math"),
        (is_unfused, "compute it eagerly", "computes it eagerly"),
        (lambda row: row.ran is None, "run on an unknown backend", "runs on an unknown backend"),
    ]
    clauses = []
    for holds, several, one in slow:
        if matching := [row for row in rows if holds(row)]:
            count, of, kind = _layer_count(matching, in_all=in_all)[0], whole, noun
            of_these = {name for row in matching for name in row.names}
            others = (row for row in rows if row not in matching)
            if noun == "call" or not all(of_these.isdisjoint(row.names) for row in others):
                # Other calls of these layers are different, such as those of another phase.
                count, of = (_calls(own, in_all=in_all) for own in (matching, rows))
                kind = "call"
            spent = layers.mean((row, row.kernel_ns) for row in matching)
            cost = (
                f" ({share_text(spent / layers.gpu_ns)} of the GPU time)" if layers.gpu_ns else ""
            )
            what = several if of != 1 and count != 1 else one
            some = f"{FORMATS['count'](count)} of {counted(of, kind)}"
            if count == of:
                some = _every(of, kind) if of != 1 else "it"
            clauses.append(f"{some} {what}{cost}")
    if clauses:
        return ", ".join(clauses)
    ran = dict.fromkeys(_backend(row.ran) for row in rows)
    names = join_and(ran)
    math = "" if any("math" in name for name in ran) else ", none on math"
    if whole == 1:
        return f"it runs on {names}"
    return f"{_every(whole, noun)} run on {names}{math}"


def _every(count: float, noun: str) -> str:
    """Return `all 3 calls`, or `the 2.91 calls per step` if the steps differ."""
    text = counted(count, noun)
    return f"all {text}" if count == int(count) else f"the {text} per step"


def _backend(name: str | None) -> str:
    if name is None:
        return "an unknown backend"
    return backend_text(name).replace(ANOTHER_PACKAGE, f"{ANOTHER_PACKAGE}'s kernels")


def _calls(rows: Sequence[LayerRow], *, in_all: bool) -> float:
    if in_all:
        return sum(round((row.calls or 0) * (row.steps or 0)) for row in rows)
    return sum(row.program_calls or row.calls or 0 for row in rows)


def _change(change: Change | None) -> tuple[str, ...]:
    """Return advice on the costliest rows that math or eager attention computes."""
    if change is None:
        return ()
    text, where = _named(change.text), _where(change)
    text = f"In{where[3:]}, {text}." if where else f"{text[0].upper()}{text[1:]}."
    if change.saves is None:
        return (text,)
    saves = change.saving
    return (f"{text} {saves[0].upper()}{saves[1:]}.",)


def _saving(layers: LayerMap) -> tuple[str, ...]:
    """Return sentences about the time that the fastest backends of a benchmark would save."""
    regret = layers.regret
    if layers.benched and regret is None:
        return tuple(_phase_saving(layers, phase) for phase in layers.phases if phase.fastest)
    if regret is None:
        return ()
    return tuple(
        in_phase(
            group.phase,
            f"The fastest correct backends would save "
            f"{'at most ' if is_launch_bound(group, layers.gpu) else ''}{time_text(saves)} per step.",
        )
        for group in layers.groups
        if (saves := saved(group).saves_ns) > 0
    )


def _phase_saving(layers: LayerMap, phase: PhaseRow) -> str:
    """Return a sentence about the time that the fastest backend would save in a phase."""
    if not phase.saves_ns:
        return f"In {phase.phase} steps, {phase.fastest} is not faster than the backend that ran."
    idle = is_launch_bound(layers.of_phase(phase.phase), layers.gpu)
    told = f"{phase.fastest} would save {'at most ' if idle else ''}{time_text(phase.saves_ns)} per step"
    before, after = phase.median_step_tokens_per_s, phase.fastest_median_step_tokens_per_s
    if before and after:
        told += f" ({before:,.0f} → {after:,.0f} tokens/s)"
    return f"In {phase.phase} steps, {told}."


def _slow(layers: LayerMap) -> Iterator[str]:
    """Yield a sentence for each phase in which some steps take more than twice the median."""
    for group in layers.groups:
        slow = slow_steps(group.steps)
        if not slow:
            continue
        steps = f"{group.phase} steps" if group.phase else "steps"
        take = "takes" if len(slow) == 1 else "take"
        middle = time_text(median(step.duration_ns for step in group.steps))
        named = [
            f"step {layers.steps.index(step)} ({time_text(step.duration_ns)})" for step in slow
        ]
        yield (
            f"{len(slow)} of {len(group.steps)} {steps} {take} more than twice the median of "
            f"{middle}: {join_few(named, STEPS_NAMED)}."
        )


def _idle(layers: LayerMap, change: Change | None) -> Iterator[str]:
    """Yield a sentence about the idle time in the steps that are not slow."""
    if idle := idle_time(layers, change):
        yield idle.sentence


def idle_time(layers: LayerMap, change: Change | None = None) -> IdleTime | None:
    """Return the idle time in the steps that are not slow, or None if it is short."""
    steps = layers.usual_steps
    whole_ns, busy_ns = (
        sum(step.duration_ns for step in steps),
        sum(step.busy_ns for step in steps),
    )
    if not busy_ns or busy_ns > (1 - IDLE) * whole_ns:
        return None
    idle = 1 - busy_ns / whole_ns
    whole = "trace" if layers.steps[0].name == WHOLE_TRACE else "traced step"
    if len(steps) > 1:
        whole = "traced steps" if len(steps) == len(layers.steps) else "other steps"
    share = f"{share_text(idle)} of the {whole}"
    slowed = " (under the profiler, which slows the CPU)" if layers.detailed else ""
    text = f"The GPU is idle for {share}{slowed}"
    found = IdleTime(share, text)
    gaps = layers.usual_gaps
    one = max(gaps, key=lambda gap: gap.duration_ns, default=None)
    if one and one.duration_ns > ONE_GAP * (whole_ns - busy_ns):
        where = f"mostly in one gap of {time_text(one.duration_ns)} {_where_it_is(layers, one)}"
        return replace(found, text=f"{text}, {where}")
    known = [gap for gap in gaps if gap.launch_ns is not None]
    late = sum(gap.duration_ns for gap in known if (gap.launch_ns or 0) > gap.start_ns)
    if 2 * late < sum(gap.duration_ns for gap in known) or not known:
        return found
    if all(row.mode == "graph" for row in layers.rows):
        return replace(found, text=f"{text}, where it waits for the CPU to launch CUDA graphs")
    if idle < LAUNCH_BOUND:
        return replace(found, text=f"{text}, where it waits for the CPU to launch kernels")
    if layers.launch_share >= MOST_LAUNCHES:
        so = ", so the change above reduces it, too" if change else ""
        own = f"attention makes {share_text(layers.launch_share)} of the launches{so}"
        text = f"{text}: launch overhead is the limit, and {own}"
    elif layers.attention_ns < LIMITING * layers.gpu_step_ns:
        text = f"{text}: launch overhead, not attention, is the limit"
    else:
        so = ", so the step itself may not get shorter" if change and change.saves else ""
        text = f"{text}: launch overhead is a limit too{so}"
    if any(row.mode == "graph" for row in layers.rows):
        return replace(found, text=text)
    remedy = _engine_remedy(layers)
    if remedy is None:
        return replace(
            found, text=text, remedy=f"capture the step {LAUNCH_REMEDY}", code=COMPILE_CODE
        )
    return replace(found, text=text, remedy=remedy)


def _engine_remedy(layers: LayerMap) -> str | None:
    """Return how to use CUDA graphs in the engine that runs the program. Return None if none does."""
    logged = layers.engine.engine if layers.engine else None
    if not logged and not any(parse_engine_step(step.name) for step in layers.steps):
        return None
    known = {engine_of_step(step.name) for step in layers.steps}
    known |= {OP_ENGINES.get((row.sdpa_op or "").partition("::")[0]) for row in layers.rows}
    named = sorted({logged} if logged else known - {None}, key=str)
    engine = named[0] if len(named) == 1 else None
    return ENGINE_REMEDIES.get(str(engine), "enable CUDA graphs in the engine")


def _where_it_is(layers: LayerMap, gap: GapRow) -> str:
    if gap.kernel_short == STEP_END:
        return "after the last kernel"
    begun = [step for step in layers.steps if step.start_ns == gap.start_ns]
    if not begun:
        return f"before {gap.kernel_short}"
    where = f" of step {layers.steps.index(begun[0])}" if len(layers.steps) > 1 else ""
    return f"before the first kernel{where}"


def _counted(layers: LayerMap, change: Change | None) -> tuple[str, ...]:
    calls = sum(row.program_calls or 0 for row in layers.rows)
    ran: Counter[str] = Counter()
    for row in layers.rows:
        name = f"on {_backend(row.ran)}" if row.ran != "none" else "with an error"
        ran[name] += row.program_calls or 0
    made = (
        f"The program made {counted(calls, 'attention call')}"
        if calls
        else "The program calls attention"
    )
    where = f" in {layers.processes} processes" if layers.processes > 1 else ""
    backends = ", ".join(
        f"{count:,} {name}" if len(ran) > 1 else f"all {name}" for name, count in ran.most_common()
    )
    texts = [f"{made}{where}, {backends}." if calls else f"{made}; the number of calls is unknown."]
    return (*texts, *_change(change), "No step was recorded, so no times are known.")


def _forecast_sentence(layers: LayerMap, forecast: Forecast) -> str:
    whole = "a step" if forecast.of == "step" else "the whole program"
    ran = dict.fromkeys(
        _backend(row.predicted_backend) for row in forecast.rows if row.predicted_backend
    )
    if not forecast.calls:
        chosen = f"PyTorch is predicted to choose {join_and(ran)}" if ran else "no backend is known"
        return f"On {with_article(forecast.gpu)}, {chosen}; the times are unknown."
    saves = ""
    if forecast.saves_ns:
        a_step = " per step on average" if several_phases(layers) else ""
        saves = f"; other backends would save {time_text(forecast.saves_ns)}{a_step}"
    subject, eager = "attention", ""
    if all(row.kind == "eager" for row in layers.rows):
        subject = "scaled_dot_product_attention"
        where = f" on {with_article(layers.gpu)}" if layers.gpu else ""
        if layers.attention_ns and forecast.of == "step":
            took = time_text(layers.attention_ns)
            saving = _eager_saving(layers, forecast)
            eager = f" The eager attention in the trace takes {took}{where}{saving}."
    times = [
        f"{time_text(each.ns)} of {f'a {each.phase} step' if each.phase else whole}{_interval(each)}"
        for each in forecast.groups
    ]
    return (
        f"Predicted for {with_article(forecast.gpu)}: {subject} takes {join_and(times)}, on {join_and(ran)}{saves}."
        f"{eager}"
    )


def _eager_saving(layers: LayerMap, forecast: Forecast) -> str:
    """Return a clause on the time that SDPA is predicted to save per step on the GPU of the trace.

    Return "" if the prediction is for another GPU or does not describe all of the attention.
    """
    same = short_device_name(forecast.gpu) == short_device_name(layers.gpu or "")
    backward = any(row.backward_ns for row in layers.rows)
    if not same or backward or forecast.unpredicted_calls or len(forecast.groups) > 1:
        return ""
    saved_ns = layers.attention_ns - forecast.groups[0].ns
    return f", so the change is {saving_text([(None, saved_ns)])}" if saved_ns > 0 else ""


def _interval(times: PredictedTime) -> str:
    low, high = time_text(times.low_ns), time_text(times.high_ns)
    return f" ({low} to {high})" if low != high else ""
