"""Group the steps of a program by phase, and compute the work of attention in each phase."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, quantiles
from typing import Annotated, NamedTuple

from profharness.attention.config import CACHE_DTYPES, Config, parse_config
from profharness.columns import column
from profharness.devices import Peaks, roofline_ns
from profharness.dtypes import CONFIG_DTYPES, DTYPES
from profharness.errors import counted, join_and
from profharness.rows import WHOLE_TRACE, CallRow, StepRow
from profharness.trace import LAUNCHED_WITHOUT_OP, NO_OP
from profharness.traces.engine_steps import (
    DECODE,
    MIXED,
    PREFILL,
    VERIFY,
    BatchPart,
    EngineStep,
    parse_engine_step,
)
from profharness.units import as_fast

Number = float | None
Place = tuple[int, int | None]  # the trace and the step of a call
TRAIN, OTHER = "train", "other"  # phases of steps without an annotation
SELF, CROSS = "self", "cross"  # kinds of attention
USUAL_PAGE = 16  # vLLM's default
PAGES = (8, 16, 32, 64, 128, 256)
OVER = 1.02  # a rate above this share of the data sheet's is doubtful


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """The steps of one phase. FLOPs and bytes include all attention calls of a step."""

    phase: Annotated[
        str,
        column(
            "phase",
            importance="key",
            meaning="`prefill`, `decode`, `mixed`, `verify` (decoding that checks drafted tokens), "
            "`draft`, `diffusion` or `idle`, from the annotations of the engine; without "
            "annotations, `prefill`, `decode`, `mixed`, `train` or `other`, from the calls",
        ),
    ]
    steps: Annotated[int, column("steps", "count", importance="answer", meaning="number of steps")]
    requests: Annotated[Number, column(meaning="median number of requests per step")]
    new_tokens: Annotated[Number, column(meaning="median number of tokens that a step processes")]
    mean_requests: Annotated[Number, column(meaning="mean number of requests per step")]
    mean_new_tokens: Annotated[
        Number, column(meaning="mean number of tokens that a step processes")
    ]
    mean_keys: Annotated[
        Number,
        column(
            meaning="mean number of tokens per step that the requests attend to, including new ones"
        ),
    ]
    median_step_requests: Annotated[
        Number, column("requests", "tenths", meaning="number of requests in the median step")
    ]
    median_step_new_tokens: Annotated[
        Number,
        column("new tokens", "tenths", meaning="number of tokens that the median step computes"),
    ]
    step_ns: Annotated[
        float,
        column(
            "median µs/step",
            "time",
            importance="answer",
            scale="step",
            meaning="median duration of a step",
        ),
    ]
    mean_ns: Annotated[
        float,
        column("mean µs/step", "time", importance="detail", scale="step", meaning="mean duration"),
    ]
    step_p90_ns: Annotated[
        float,
        column(
            "p90 µs/step",
            "time",
            importance="detail",
            scale="step",
            meaning="90th percentile of the step duration",
        ),
    ]
    busy_share: Annotated[
        Number, column(meaning="share of the total step time during which a kernel was running")
    ]
    median_step_busy_share: Annotated[
        Number,
        column(
            "median % busy",
            "percent",
            meaning="share of the median step during which a kernel was running",
        ),
    ]
    attention_ns: Annotated[
        float,
        column(
            "mean attention µs/step",
            "time",
            importance="answer",
            scale="attention",
            meaning="mean attention kernel time per step",
        ),
    ]
    attention_share: Annotated[
        Number,
        column("% of GPU time", "percent", meaning="attention's share of the GPU's busy time"),
    ]
    flops: Annotated[
        Number,
        column(meaning="mean attention FLOPs per step, from the lengths in the annotations"),
    ]
    bytes: Annotated[
        Number,
        column(
            meaning="mean attention bytes per step if Q, K and V are each read once and the output "
            "is written once"
        ),
    ]
    flops_per_s: Annotated[
        Number,
        column("TFLOP/s", "tera", meaning="FLOPs divided by the attention kernel time"),
    ]
    bytes_per_s: Annotated[
        Number,
        column("GB/s", "giga", meaning="bytes divided by the attention kernel time"),
    ]
    roofline_share: Annotated[
        Number,
        column(
            "% of roofline",
            "percent",
            meaning="shortest attention time that the matrix rate and the bandwidth in the data "
            "sheet allow, divided by the attention kernel time",
        ),
    ]
    tokens_per_s: Annotated[
        Number, column(meaning="new tokens in all steps divided by the total time of the steps")
    ]
    median_step_tokens_per_s: Annotated[
        Number,
        column(
            "tokens/s",
            "figures",
            importance="answer",
            optional=True,
            meaning="`new tokens` divided by the median duration; empty if drafted tokens are checked, "
            "because some of them are rejected",
        ),
    ]
    points: Annotated[
        tuple[tuple[str, float], ...],
        column(
            meaning="the configs of the step with the median FLOPs, each with its number of calls; "
            "the lengths in a config are the mean lengths in the step"
        ),
    ] = ()
    fastest: Annotated[
        str | None,
        column(
            "fastest",
            optional=True,
            meaning="with --bench: the fastest correct backend in the benchmark",
        ),
    ] = None
    fastest_ns: Annotated[
        Number,
        column(
            "mean fastest µs/step",
            "time",
            scale="attention",
            optional=True,
            meaning="with --bench: attention time per step on the fastest backend",
        ),
    ] = None
    saves_ns: Annotated[
        Number,
        column(
            "saves µs/step",
            "time",
            scale="attention",
            optional=True,
            meaning="with --bench: attention time that the fastest backend saves per step",
        ),
    ] = None
    fastest_tokens_per_s: Annotated[
        Number, column(meaning="with --bench: `tokens_per_s` if each step took `saves_ns` less")
    ] = None
    fastest_median_step_tokens_per_s: Annotated[
        Number,
        column(
            "tokens/s then",
            "figures",
            optional=True,
            meaning="with --bench: `tokens/s` if the saving shortened the median step by the same "
            "share as the mean step",
        ),
    ] = None
    doubts: Annotated[tuple[str, ...], column(meaning="why a figure is missing or doubtful")] = ()


class HeadShape(NamedTuple):
    """The sizes of an attention call that do not depend on the lengths of the requests."""

    heads: int
    kv_heads: int
    qk_dim: int
    v_dim: int
    item_bytes: int | None
    kv_item_bytes: int | None


class Work(NamedTuple):
    """The FLOPs and bytes of attention. The bytes are None if a dtype is unknown."""

    flops: int
    bytes: int | None


def step_phases(steps: Sequence[StepRow], calls: Iterable[CallRow]) -> dict[Place, str]:
    """Return the phase of each step. Return an empty dict if the program has no phases.

    The phases are those in the annotations of an engine. Without annotations, the attention calls
    of a step give its phase. Then the program has phases only if some steps do nothing but decode,
    and others prefill.
    """
    batches = {step_place(step): parse_engine_step(step.name) for step in steps}
    if any(batches.values()):
        return {place: batch.phase if batch else OTHER for place, batch in batches.items()}
    found: dict[Place, set[str | None]] = defaultdict(set)
    for call in calls:
        found[call.trace, call.step].add(phase_of(call))
    phases = {place: _phase_of_calls(found[place]) for place in batches}
    names = set(phases.values())
    return phases if DECODE in names and names & {PREFILL, MIXED} else {}


def step_place(step: StepRow) -> Place:
    """Return the place of the calls in a step.

    A trace without steps counts as one step, but the `step` of its calls is None.
    """
    return step.trace, None if step.name == WHOLE_TRACE else step.step


def phase_of(call: CallRow) -> str | None:
    """Return the phase of a call: `train`, `decode`, `prefill`, `self` or `cross`.

    `self` is attention over a whole sequence without a known causal mask, as in an encoder. Return
    None if the shapes of the call are unknown.
    """
    if call.backward or call.recompute:
        return TRAIN
    if call.config is None:
        return None
    config = parse_config(call.config)
    if config.seq_len_q == config.seq_len_kv:
        return PREFILL if config.causal else SELF
    return DECODE if config.seq_len_q == 1 else CROSS


def shown_phase(phase: str | None) -> str | None:
    """Return the phase that a table shows. Return None for a kind of attention."""
    return {TRAIN: "training", SELF: None, CROSS: None}.get(phase, phase) if phase else None


def attention_kind(label: str | None) -> str | None:
    """Return whether a config is `self` or `cross` attention, or None if this is unknown.

    A single query can attend to the keys of its own sequence or of another one.
    """
    if label is None:
        return None
    config = parse_config(label)
    if config.seq_len_q == config.seq_len_kv or config.causal:
        return SELF
    return None if config.seq_len_q == 1 else CROSS


def shown_attention(labels: Iterable[str | None]) -> list[str | None]:
    """Return the kinds of attention that a table shows, or only None if no config is `cross`."""
    kinds = [attention_kind(label) for label in labels]
    return kinds if CROSS in kinds else [None] * len(kinds)


def _phase_of_calls(phases: set[str | None]) -> str:
    """Return the phase of a step whose calls have these phases."""
    if TRAIN in phases:
        return TRAIN
    known = phases - {None}
    if DECODE in known:
        return DECODE if known == {DECODE} else MIXED
    # The calls of a prefill with a padding mask are `self`.
    return PREFILL if known & {PREFILL, SELF} else OTHER


def steps_by_phase(
    steps: Iterable[StepRow], phases: Mapping[Place, str]
) -> dict[str | None, list[StepRow]]:
    """Return the steps of each phase. The phase that takes the most time comes first.

    All steps have the phase None if `phases`, the result of `step_phases`, is empty.
    """
    groups: dict[str | None, list[StepRow]] = {}
    for step in steps:
        groups.setdefault(phases.get(step_place(step)), []).append(step)
    longest = sorted(groups, key=lambda name: -sum(step.duration_ns for step in groups[name]))
    return {name: groups[name] for name in longest}


def find_phases(
    steps: Sequence[StepRow],
    calls: Iterable[CallRow],
    phases: Mapping[Place, str],
    peaks: Peaks | None,
) -> tuple[PhaseRow, ...]:
    """Return the phases of a program. The phase that takes the most time comes first.

    `phases` is the result of `step_phases`. `peaks` are the limits of the GPU, or None if they are
    unknown.
    """
    of_steps: dict[Place, list[CallRow]] = defaultdict(list)
    for call in calls:
        of_steps[call.trace, call.step].append(call)
    groups = steps_by_phase(steps, phases)
    return tuple(_phase(name, group, of_steps, peaks) for name, group in groups.items() if name)


def phases_detail(phases: Iterable[PhaseRow]) -> str:
    """Return the text beside the heading of a table of phases."""
    rows = list(phases)
    of_step = [
        title
        for title, name in (
            ("% busy", "median_step_busy_share"),
            ("tokens/s", "median_step_tokens_per_s"),
        )
        if any(getattr(row, name) is not None for row in rows)
    ]
    first = f"{join_and(of_step)} of the median step; " if of_step else ""
    return f"{first}attention as the mean of all steps"


def middle_steps(steps: Sequence[StepRow]) -> list[StepRow]:
    """Return the step of median duration, or the two steps whose mean duration is the median."""
    ordered = sorted(steps, key=lambda step: step.duration_ns)
    return ordered[(len(ordered) - 1) // 2 : len(ordered) // 2 + 1]


def slow_steps(steps: Sequence[StepRow]) -> list[StepRow]:
    """Return the steps that take more than twice the median."""
    if not steps:
        return []
    limit = 2 * median(step.duration_ns for step in steps)
    return [step for step in steps if step.duration_ns > limit]


def busy_share(steps: Sequence[StepRow]) -> Number:
    """Return the share of the steps' time during which the GPUs were busy.

    Return None if it is unknown, or if no GPU was used.
    """
    busy = sum(step.busy_ns * step.devices for step in steps)
    long = sum(step.duration_ns * step.devices for step in steps)
    return busy / long if busy and long else None


def in_phase(phase: str | None, sentence: str) -> str:
    """Return a sentence that begins with the phase that it describes, if there is one."""
    return sentence if phase is None else f"In {phase} steps, {sentence[0].lower()}{sentence[1:]}"


def step_title(name: str) -> str:
    """Return a short title for the name of a step, such as `decode step of 32 requests`."""
    batch = parse_engine_step(name)
    if batch is None:
        return name
    of = f" of {counted(batch.requests, 'request')}" if batch.requests else ""
    tokens = f" and {counted(batch.new_tokens, 'new token')}" if of and batch.new_tokens else ""
    return f"{batch.phase} step{of}{tokens}"


def _phase(
    name: str,
    group: Sequence[StepRow],
    of_steps: Mapping[Place, Sequence[CallRow]],
    peaks: Peaks | None,
) -> PhaseRow:
    count = len(group)
    calls = [of_steps.get(step_place(step), ()) for step in group]
    annotated = [parse_engine_step(step.name) for step in group]
    batches = [batch for batch in annotated if batch]
    durations = [step.duration_ns for step in group]
    busy = sum(step.busy_ns * step.devices for step in group)
    attention = sum(kernel.total_ns for each in calls for call in each for kernel in call.kernels)
    works, doubts = [], set()
    for batch, each in zip(annotated, calls, strict=True):
        work, missing = step_work(batch, each) if batch else (None, None)
        works.append(work)
        doubts.update([missing] if missing else [])
    done = [work for work in works if work]
    # Steps without a figure would lower a mean, so the phase has no figure either.
    whole = done if len(done) == count and attention else []
    flops = sum(work.flops for work in whole) if whole else None
    sizes = [work.bytes for work in whole]
    moved = None if not sizes or None in sizes else sum(size or 0 for size in sizes)
    dtype = _dtype(calls)
    limit = roofline_ns(peaks, dtype, flops, moved)
    tokens = [batch.new_tokens for batch in batches if batch.new_tokens is not None]
    requests = [batch.requests for batch in batches if batch.requests is not None]
    whole_tokens = sum(tokens) if len(tokens) == count and name != VERIFY else None
    middle = middle_steps(group)
    of_middle = [batch for step in middle if (batch := parse_engine_step(step.name))]
    middle_tokens = _mean([batch.new_tokens for batch in of_middle])
    rate = None if whole_tokens is None or middle_tokens is None else 1e9 * middle_tokens
    if limit and limit > OVER * attention:
        doubts.add(
            f"attention in {name} steps seems {as_fast(limit / attention)} as the data sheet "
            "allows, so the lengths, shapes or kernels do not match the annotation"
        )
    return PhaseRow(
        phase=name,
        steps=count,
        requests=median(requests) if requests else None,
        new_tokens=median(tokens) if tokens else None,
        mean_requests=fmean(requests) if requests else None,
        mean_new_tokens=fmean(tokens) if tokens else None,
        mean_keys=_mean([batch.keys for batch in batches]),
        median_step_requests=_mean([batch.requests for batch in of_middle]),
        median_step_new_tokens=middle_tokens,
        step_ns=median(durations),
        mean_ns=sum(durations) / count,
        step_p90_ns=quantiles(durations, n=10, method="inclusive")[-1]
        if count > 1
        else durations[0],
        busy_share=busy_share(group),
        median_step_busy_share=busy_share(middle),
        attention_ns=attention / count,
        attention_share=attention / max(busy, attention) if busy else None,
        flops=None if flops is None else flops / count,
        bytes=None if moved is None else moved / count,
        flops_per_s=None if flops is None else 1e9 * flops / attention,
        bytes_per_s=None if moved is None else 1e9 * moved / attention,
        roofline_share=limit / attention if limit else None,
        tokens_per_s=None if whole_tokens is None else 1e9 * whole_tokens / sum(durations),
        median_step_tokens_per_s=None if rate is None else rate / median(durations),
        points=_median_points(batches, calls, works) if whole else (),
        doubts=tuple(sorted(doubts)),
    )


def merged_doubts(phases: Sequence[PhaseRow]) -> tuple[str, ...]:
    """Return the doubts of all phases. A doubt that phases share is one sentence on all of them."""
    names: dict[str, list[str]] = {}
    for row in phases:
        for doubt in row.doubts:
            names.setdefault(doubt.replace(f" {row.phase} step", " {} step"), []).append(row.phase)
    return tuple(
        doubt.replace("{}", " or ".join(filter(None, [", ".join(most), last])))
        for doubt, (*most, last) in names.items()
    )


def _mean(values: Sequence[int | None]) -> Number:
    """Return the mean of values, or None if there are none or one of them is unknown."""
    known = [value for value in values if value is not None]
    return fmean(known) if known and len(known) == len(values) else None


def step_work(batch: EngineStep, calls: Sequence[CallRow]) -> tuple[Work | None, str | None]:
    """Return (the work of a step's attention calls or None, the reason for None).

    A call computes either all requests of the step, or only the prefilled or the decoded requests,
    depending on its number of tokens. Padded calls compute all requests.
    """
    parts = [part for part in (batch.prefill, batch.decode) if part]
    if not calls:
        return None, f"no attention kernel was found in some {batch.phase} steps"
    if not parts or any(part.scores is None or part.keys is None for part in parts):
        return None, (
            f"the annotations of {batch.phase} steps do not contain the sums of the sequence "
            "lengths, so FLOPs and bytes are unknown"
        )
    flops, moved = 0, 0
    known = True
    for call in calls:
        shape = head_shape(call)
        if shape is None:
            unknown = [each for each in calls if head_shape(each) is None]
            count = f"{len(unknown)} of {len(calls)}"
            which = f"all {len(calls)}" if len(unknown) == len(calls) > 1 else count
            which += f" attention calls of a {batch.phase} step"
            if all(each.reason == NO_OP for each in unknown):
                return None, f"the kernels of {which} {LAUNCHED_WITHOUT_OP}"
            return None, f"{which} lack shapes, so FLOPs and bytes are unknown"
        for part in _call_parts(batch, call):
            work = part_work(part, shape)
            flops += work.flops
            known = known and work.bytes is not None
            moved += work.bytes or 0
    return Work(flops, moved if known else None), None


def described_calls(calls: Sequence[CallRow], steps: Sequence[StepRow]) -> list[CallRow]:
    """Return the calls. Calls in an engine's steps get a config with the mean lengths of the step.

    A call is unchanged if it has a config, if its shapes or lengths are unknown, or if it computes
    both prefilled and decoded requests.
    """
    batches = {(step.trace, step.step): parse_engine_step(step.name) for step in steps}
    made = []
    for call in calls:
        batch = batches.get((call.trace, call.step)) if call.step is not None else None
        parts = _call_parts(batch, call) if batch and call.config is None else []
        config = part_config(parts[0], call) if len(parts) == 1 else None
        made.append(replace(call, config=config.label, reason=None) if config else call)
    return made


def mean_config(calls: Sequence[CallRow], steps: Sequence[StepRow]) -> Config | None:
    """Return the config of the median call if the lengths in each step were the mean lengths.

    Return None if a call has a config, or if `described_calls` does not describe all calls.
    """
    if any(call.config for call in calls):
        return None
    labels = [call.config for call in described_calls(calls, steps)]
    configs = [parse_config(label) for label in labels if label]
    if not configs or len(configs) < len(labels):
        return None
    ordered = sorted(configs, key=lambda config: config.seq_len_kv)
    return ordered[len(ordered) // 2]


def mean_work(calls: Sequence[CallRow], steps: Sequence[StepRow]) -> Work | None:
    """Return the mean work of calls in an engine's steps, from the exact lengths.

    Return None if a call is in no step of an engine, or if its shapes or lengths are unknown.
    """
    batches = {(step.trace, step.step): parse_engine_step(step.name) for step in steps}
    flops, moved = 0, 0
    for call in calls:
        batch = batches.get((call.trace, call.step)) if call.step is not None else None
        work = step_work(batch, [call])[0] if batch else None
        if work is None or work.bytes is None:
            return None
        flops, moved = flops + work.flops, moved + work.bytes
    return Work(round(flops / len(calls)), round(moved / len(calls))) if calls else None


def _call_parts(batch: EngineStep, call: CallRow) -> list[BatchPart]:
    """Return the part of the batch with the same number of tokens as the call, or all parts."""
    parts = [part for part in (batch.prefill, batch.decode) if part]
    dims = call.dims[0] or (0,)
    alone = [part for part in parts if len(parts) > 1 and part.queries == dims[0]]
    return alone or parts


def _median_points(
    batches: Sequence[EngineStep],
    calls: Sequence[Sequence[CallRow]],
    works: Sequence[Work | None],
) -> tuple[tuple[str, float], ...]:
    """Return (config, number of calls) pairs of the step with the median FLOPs."""
    order = sorted(range(len(batches)), key=lambda at: works[at] or Work(0, None))
    at = order[len(order) // 2]
    counts: Counter[str] = Counter()
    for call in calls[at]:
        for part in _call_parts(batches[at], call):
            config = part_config(part, call)
            if config is None:
                return ()
            counts[config.label] += 1
    return tuple((label, float(count)) for label, count in counts.items())


def part_config(part: BatchPart, call: CallRow) -> Config | None:
    """Return the config of a call whose requests all have the mean length.

    The page size is taken from a cache [pages, page, heads, dim], and is USUAL_PAGE otherwise. Return
    None if the shapes, the dtype or the lengths are unknown, or if no config can express the batch.
    """
    shape = head_shape(call)
    query, key = (tensor or {} for tensor in call.tensors[:2])
    dtype, kv_dtype = query.get("dtype"), key.get("dtype")
    if shape is None or dtype not in CONFIG_DTYPES or not part.requests:
        return None
    if not part.queries or not part.keys or shape.qk_dim != shape.v_dim:
        return None
    queries = max(1, round(part.queries / part.requests))
    dims = tuple(key.get("dims") or ())
    page = dims[-3] if len(dims) >= 4 and dims[-3] in PAGES else USUAL_PAGE
    return Config(
        batch=part.requests,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        seq_len_q=queries,
        seq_len_kv=max(queries, round(part.keys / part.requests)),
        head_dim=shape.qk_dim,
        dtype=dtype,
        causal=queries > 1,
        page=page,
        kv_dtype=kv_dtype if kv_dtype != dtype and kv_dtype in CACHE_DTYPES else None,
    )


def part_work(part: BatchPart, shape: HeadShape) -> Work:
    """Return the work of one attention call. Raise ValueError if a sum of lengths is unknown.

    The FLOPs are 2·h·(d_qk + d_v) per score. The call reads Q, reads K and V of all tokens, and
    writes the output. Keys that a window hides are counted, because annotations do not contain
    window sizes.
    """
    if part.scores is None or part.queries is None or part.keys is None:
        raise ValueError("the sums of the sequence lengths are unknown")
    dims = shape.qk_dim + shape.v_dim
    flops = 2 * shape.heads * dims * part.scores
    if shape.item_bytes is None or shape.kv_item_bytes is None:
        return Work(flops, None)
    queries = part.queries * shape.heads * dims * shape.item_bytes
    return Work(flops, queries + part.keys * shape.kv_heads * dims * shape.kv_item_bytes)


def head_shape(call: CallRow) -> HeadShape | None:
    """Return the numbers of heads and the head dimensions of a call, or None if they are unknown.

    Engines pass Q as [tokens, heads, dim], and K and V as [tokens, heads, dim] or as a paged cache
    that ends with [heads, dim].
    """
    query, key, value = (tensor or {} for tensor in call.tensors[:3])
    item, kv_item = (_item_bytes(tensor.get("dtype")) for tensor in (query, key))
    if call.config:
        config = parse_config(call.config)
        heads = config.num_heads, config.num_kv_heads
        return HeadShape(*heads, config.head_dim, config.value_dim, item, kv_item or item)
    q, k, v = (tuple(tensor.get("dims") or ()) for tensor in (query, key, value))
    if len(k) < 3 or len(v) < 3 or len(q) not in (2, 3):
        return None
    kv_heads, qk_dim, v_dim = k[-2], k[-1], v[-1]
    if len(q) == 2:  # heads and dim are one axis
        q = (q[0], q[1] // qk_dim, qk_dim) if qk_dim and q[1] % qk_dim == 0 else (0, 0, 0)
    if q[2] != qk_dim or not kv_heads or not q[1] or q[1] % kv_heads:
        return None
    return HeadShape(q[1], kv_heads, qk_dim, v_dim, item, kv_item)


def _item_bytes(dtype: str | None) -> int | None:
    return DTYPES[dtype].bytes if dtype in DTYPES else None


def _dtype(calls: Iterable[Sequence[CallRow]]) -> str | None:
    names = {(call.tensors[0] or {}).get("dtype") for each in calls for call in each}
    return names.pop() if len(names) == 1 else None
