"""Build the document of `layers`: attention layers, reasons, advice, steps and gaps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from profharness.atlas.predictions import BOUND
from profharness.attention.dispatch.by_rule import Explanation
from profharness.attention.dispatch.machine import release_text
from profharness.columns import Column, pick
from profharness.commands.explain.answer import Way
from profharness.commands.explain.faster import faster_changes, faster_text
from profharness.commands.explain.savings import Change, matters
from profharness.commands.layers.answer import (
    layers_answer,
    lead_length,
    other_work_answer,
    told_change,
    what_to_change,
)
from profharness.devices import context_text, short_device_name
from profharness.errors import counted, join_and, join_few
from profharness.files import default_store, shell_command
from profharness.program.layer_map import (
    NO_MASK,
    NO_MASK_EFFECT,
    Forecast,
    LayerForecast,
    LayerMap,
    LayerRow,
    is_explained,
    short_module,
)
from profharness.program.matching import ran_text
from profharness.program.phases import (
    USUAL_PAGE,
    PhaseRow,
    busy_share,
    middle_steps,
    phases_detail,
    shown_attention,
    shown_phase,
    step_place,
    step_title,
)
from profharness.program.regret import phase_backends
from profharness.render.document import (
    MISSING,
    Block,
    Document,
    Heading,
    Note,
    Table,
    field_names,
    filled_columns,
    record,
)
from profharness.traces.engine_log import EngineLog
from profharness.traces.engine_steps import DECODE, PREFILL
from profharness.units import share_text, time_text

SCHEMA = "profharness.layers/1"
EAGER = "eager"
BOTH_IN_A_STEP = (
    "Each step consists of a prefill and the decoding that follows. The numbers "
    "of calls and the times in each row are means over these steps."
)
CONTEXT = "CONTEXT"  # the word for an unknown context length in the example of a config
SEE_ADVICE = "To see the reasons and the code for attention, use"
LABELS_SHOWN = 3  # maximum number of layers that the label of a note names
FORECAST_FIELDS = field_names(LayerForecast)
_OF_ROW = field_names(LayerRow)
FIELDS = (_OF_ROW[0], "run_name", *_OF_ROW[1:], *FORECAST_FIELDS)
COLUMNS = pick(
    LayerRow,
    *("module", "config", "calls", "program_calls", "attention", "phase"),
    *("mode", "mask", "asked"),
    *("ran", "forward_ns", "backward_ns", "share", "step_share", "site"),
)
OF_SOME = (
    *("module", "backward_ns", "program_calls", "config", "attention", "phase", "mode", "mask"),
    *("asked", "site", "share"),
)
OF_STEPS = ("calls", "forward_ns", "step_share")
KERNELS = pick(LayerRow, "module", "step_phase", "kernels")
GAPS = (
    Column("duration_ns", "idle µs", "time", meaning="length of the gap"),
    Column("kernel_short", "ended by", shrink=True, meaning="the kernel that follows the gap"),
    Column("op_path", "launched by", shrink=True, meaning="the op that launched the kernel"),
    Column(
        "launch_ns",
        "launched after",
        right=True,
        meaning="when the kernel that ended the gap was launched. JSON contains the time of the "
        "launch. Tables show the time from the start of the gap to the launch, or `before it` if "
        "the kernel was launched before the gap began",
    ),
)
PHASES = pick(PhaseRow)
REGRET = pick(LayerRow, "best", "saves_ns")
OF_FORECAST = tuple(name for name in field_names(Forecast) if name != "rows")
# first columns of a table with columns for each GPU
GPU_LAYER = (
    *pick(LayerRow, "module"),
    *(replace(each, importance="normal") for each in pick(LayerRow, "config")),
    *pick(LayerRow, "calls", "step_phase"),
)
PREDICTED = (
    *pick(LayerForecast, "predicted_backend", "predicted_ns", "predicted_interval"),
    *pick(LayerForecast, "predicted_source", "predicted_total_ns"),
    *pick(LayerForecast, "predicted_share", "predicted_best", "predicted_saves_ns"),
)
FORECAST = (*GPU_LAYER, *PREDICTED)
OF_BEST = ("predicted_best", "predicted_saves_ns")


def phase_blocks(layers: LayerMap, level: int) -> list[Block]:
    """Return a heading and the table of the phases, or no blocks if there are no phases."""
    if not layers.phases:
        return []
    rows = [record(row) | {"phase": shown_phase(row.phase)} for row in layers.phases]
    table = Table.of(PHASES, rows)
    detail = phases_detail(layers.phases)
    detail += f"; with bench run {layers.benched}" if layers.benched else ""
    return [Heading("Phases", detail, level), table]


def layers_document(layers: LayerMap, *, full: bool = False, of_several: bool = False) -> Document:
    """Return the document of `layers`. If `of_several` is set, the document has no answer.

    Predictions for several GPUs add a table with one column per GPU, and the JSON key `classes`.
    """
    lines = list(_lines(layers.rows, full))
    optional = (*OF_SOME, *(() if layers.steps else OF_STEPS))
    columns = (*COLUMNS, *(REGRET if layers.regret else ()))
    if len(layers.steps) > 1 and not full:
        # The share refers to the mean step, but the heading shows the median step.
        columns = tuple(each for each in columns if each.key != "step_share")
    blocks: list[Block] = [Heading(f"Attention of run {layers.name}", _summary(layers))]
    blocks.append(Table.of(filled_columns(columns, lines, optional), lines))
    if any(row.mean_config for row in layers.rows):
        blocks.append(Note(_mean_lengths(layers.rows)))
    if layers.engine:
        blocks += _engine_notes(layers.engine)
    if not layers.step_phases and {PREFILL, DECODE} <= {row.phase for row in layers.rows}:
        blocks.append(Note(BOTH_IN_A_STEP))
    blocks += phase_blocks(layers, level=3)
    for forecast in layers.forecasts:
        blocks += _forecast_blocks(forecast, lines, full)
    if layers.regret:
        timed = f"{layers.regret.measurement} times of bench run {layers.regret.run}"
        blocks += [Heading("Savings", timed, 3), *map(Note, layers.regret.conclusions)]
    change = None if of_several else told_change(layers)
    blocks += _notes(layers, full, change.text if change else None, advise=matters(layers))
    if change and change.assumes:
        blocks.append(Note(change.assumes))
    blocks += _hand_written(layers)
    if change and change.why_unknown and change.saves is None:
        blocks.append(Note(f"The saving is not predicted, because {change.why_unknown}."))
    faster: tuple[str, ...] = ()
    ways = faster_changes(layers) if _forecast_of_same_gpu(layers) else []
    if not of_several and _forecast_of_same_gpu(layers):
        faster, hints = faster_change(layers, ways, change)
        blocks += hints
    if not of_several and not layers.forecasts:
        faster = (*faster, *other_work_answer(layers))
    blocks += [Note(text, "", "warning") for text in layers.caveats]
    if full:
        blocks += [Heading("Kernels", "in order of first launch", 3)]
        named = zip(lines, layers.rows, strict=True)
        blocks.append(Table.of(KERNELS, (line | {"kernels": row.kernels} for line, row in named)))
    if full and layers.gaps:
        blocks += [Heading("Where the GPU waited", "the largest gaps", 3), _gaps(layers)]
    extra = {
        "steps": [
            step._asdict() | {"phase": layers.step_phases.get(step_place(step))}
            for step in layers.steps
        ],
        "phases": list(map(record, layers.phases)),
        "engine": asdict(layers.engine) if layers.engine else None,
        "gaps": [gap._asdict() for gap in layers.gaps],
        "caveats": list(layers.caveats),
        "regret": record(layers.regret) if layers.regret else None,
        "predicted": record(layers.forecasts[0], OF_FORECAST) if layers.forecasts else None,
    }
    if len(layers.forecasts) > 1:
        blocks += _forecast_table(layers, lines)
        extra["classes"] = [record(forecast, OF_FORECAST) for forecast in layers.forecasts]
    predictions = [forecast.rows for forecast in layers.forecasts]
    advised: dict[tuple[str | None, str | None], str] = {
        (answer.config, answer.observed): f"{way.backend}: {way.advice.change}"
        for answer, way in ways
    }
    records = tuple(
        record(_with_advice(row, advised.get((row.config, row.ran))))
        | {"run_name": layers.name}
        | record(prediction)
        for rows in predictions or [(LayerForecast(),) * len(layers.rows)]
        for row, prediction in zip(layers.rows, rows, strict=True)
    )
    answer = () if of_several else layers_answer(layers, change)
    lead = lead_length(layers)
    return Document(
        SCHEMA,
        "Layers",
        tuple(blocks),
        FIELDS,
        records,
        extra,
        answer=(*answer[:lead], *faster, *answer[lead:]),
    )


def _with_advice(row: LayerRow, text: str | None) -> LayerRow:
    """Return a row with another piece of advice, if there is one."""
    return replace(row, advice=(*row.advice, text)) if text else row


def _forecast_of_same_gpu(layers: LayerMap) -> bool:
    """Return whether predictions, if there are any, are for the GPU and release of the run."""
    if not layers.forecasts:
        return True
    if len(layers.forecasts) > 1 or layers.platform is None or layers.gpu is None:
        return False
    (forecast,) = layers.forecasts
    same_gpu = short_device_name(forecast.gpu) == short_device_name(layers.gpu)
    return same_gpu and forecast.torch == release_text(layers.platform.machine.torch)


def faster_change(
    layers: LayerMap, ways: Sequence[tuple[Explanation, Way]], change: Change | None = None
) -> tuple[tuple[str, ...], tuple[Note, ...]]:
    """Return a sentence on the change that makes the costliest call faster, and the command that
    explains the backends, with the code of this change or of `change`.

    `ways` are the results of `faster_changes`. Return no sentence if there are none, and no command
    if `explain` has neither reasons nor code.
    """
    told = tuple(faster_text(layers, *found) for found in ways[:1])
    if not told and not (change and change.code) and not any(map(is_explained, layers.rows)):
        return (), ()
    return told, (Note(f"{SEE_ADVICE}: {layers.command('explain')}", level="hint"),)


def _engine_notes(log: EngineLog) -> Iterator[Note]:
    """Yield notes about the backend that the engine chose, and about the backends it refused."""
    name = " ".join(filter(None, (log.engine, log.version))) or "the engine"
    if log.backend:
        others = f" out of {', '.join(log.candidates)}" if log.candidates else ""
        yield Note(f"The log of {name} names the backend {log.backend}{others}.")
    elif log.engine:
        yield Note(f"The log of {name} does not name the attention backend.")
    for backend, reasons in log.refusals.items():
        yield Note("; ".join(reasons), f"{backend} refused")
    if log.cubins:
        yield Note(f"FlashInfer loaded {join_few(list(log.cubins), LABELS_SHOWN)}.")


def _forecast_blocks(
    forecast: Forecast, lines: Sequence[dict[str, Any]], full: bool
) -> Iterator[Block]:
    known = {"gpu": forecast.gpu, "torch": forecast.torch, "cudnn": forecast.cudnn}
    where = context_text(known, *([] if forecast.machine else ["no atlas"]))
    if full and forecast.machine:
        where = forecast.machine
    whole = "a step" if forecast.of == "step" else "the whole program"
    whole = "a step of the phase" if len(forecast.groups) > 1 else whole
    yield Heading(f"Predicted kernel times of {whole}", where)
    rows = [
        {column.key: line[column.key] for column in GPU_LAYER}
        | record(row)
        | {"predicted_interval": row.predicted_interval}
        # The answer counts only certain savings.
        | ({"predicted_saves_ns": None} if row.predicted_certain is False else {})
        for line, row in zip(lines, forecast.rows, strict=True)
    ]
    rows.sort(key=lambda row: -(row["predicted_total_ns"] or 0))
    faster = any(row.predicted_saves_ns for row in forecast.rows)
    columns = [
        each
        for each in filled_columns(FORECAST, rows, ("predicted_interval", "predicted_saves_ns"))
        if faster or each.key not in OF_BEST
    ]
    if all(row["predicted_ns"] is None for row in rows):
        columns = [
            replace(each, title=BOUND) if each.key == "predicted_interval" else each
            for each in columns
        ]
    if forecast.of != "step":
        columns = [replace(each, title=each.title.replace("/step", " in all")) for each in columns]
    yield Table.of(columns, rows)
    if not faster and any(row["predicted_best"] for row in rows):
        yield Note("No other backend that accepts the calls is predicted to be faster.")
    if any(row.predicted_certain is False for row in forecast.rows):
        yield Note(
            "No saving is given where the predicted times of both backends do not clearly differ."
        )
    yield from map(Note, forecast.conclusions)
    if full:
        yield Heading("Predicted kernels", "for the call with the median length", 3)
        yield Table.of((KERNELS[0], *pick(LayerForecast, "predicted_kernels")), rows)


def _forecast_table(layers: LayerMap, lines: Sequence[dict[str, Any]]) -> Iterator[Block]:
    first, *others = layers.forecasts
    measured = any(row.forward_ns is not None for row in layers.rows)
    gpus = [forecast.gpu for forecast in layers.forecasts]
    names = [f"{gpu} predicted" for gpu in gpus]
    if measured:
        gpus.insert(0, short_device_name(layers.gpu) if layers.gpu else "here")
        names.insert(0, f"{gpus[0]} measured")
    whole = "a step" if first.of == "step" else "the whole program"
    whole = "a step of the phase" if len(first.groups) > 1 else whole
    yield Heading("GPUs compared", f"predicted time of the kernels of {whole}")
    rows = []
    for at, (row, line) in enumerate(zip(layers.rows, lines, strict=True)):
        spent = None if row.forward_ns is None else row.kernel_ns
        cells = [(row.ran, spent)] if measured else []
        predicted = [forecast.rows[at] for forecast in layers.forecasts]
        cells += [(each.predicted_backend, each.predicted_total_ns) for each in predicted]
        backends = figures(cells[measured:])["ran"]  # only the predicted ones
        layer = {column.key: line[column.key] for column in GPU_LAYER}
        rows.append(layer | figures(cells) | {"ran": backends})
    per = "µs/step" if first.of == "step" else "µs in all"
    columns = figure_columns(names, "predicted backend", per, gpus)
    # A GPU without any time has no speed-up either.
    optional = [each.key for each in columns if each.format == "ratio"]
    yield Table.of(filled_columns((*GPU_LAYER, *columns), rows, optional), rows)
    for forecast in others:
        pairs = [
            (here.predicted_backend, there.predicted_backend)
            for here, there in zip(first.rows, forecast.rows, strict=True)
        ]
        both = [pair for pair in pairs if all(pair)]
        apart = sum(here != there for here, there in both)
        if both:
            rows_apart = f"{apart} of {counted(len(both), 'row')}"
            yield Note(
                f"PyTorch chooses the same backends on {forecast.gpu} and {first.gpu}."
                if not apart
                else f"PyTorch chooses a different backend on {forecast.gpu} than on {first.gpu} for "
                f"{rows_apart}."
            )


def figure_columns(
    names: Sequence[str], backend: str, time: str, gpus: Sequence[str] | None = None
) -> list[Column]:
    """Return columns for the backends, the time on each GPU, and speed-ups over the first GPU.

    `names` are the titles of the times, each followed by `time`, such as `median µs/call`.
    `backend` is the title of the column with the backends.
    `gpus` are the titles of the speed-ups, by default the same as `names`.
    """
    columns = [Column("ran", backend, importance="answer")]
    columns += [
        Column(f"us{at}", f"{name} {time}".strip(), "time", importance="answer", scale="call")
        for at, name in enumerate(names)
    ]
    columns += [
        Column(
            f"times{at}",
            f"{name} speed-up",
            "ratio",
            importance="answer",
        )
        for at, name in enumerate((gpus or names)[1:], 1)
    ]
    return columns


def figures(cells: Sequence[tuple[str | None, float | None]]) -> dict[str, Any]:
    """Return the values of `figure_columns`, given the backend and its time in ns on each GPU.

    Different backends are joined to one value, such as `flash → cudnn`.
    """
    backends = [backend or MISSING for backend, _ in cells]
    ran = backends[0] if len(set(backends)) == 1 else " → ".join(backends)
    values: dict[str, Any] = {"ran": ran}
    base = cells[0][1]
    for at, (_, ns) in enumerate(cells):
        values |= {f"us{at}": ns, f"times{at}": base / ns if base and ns else None}
    return values


def _lines(rows: Sequence[LayerRow], full: bool) -> Iterator[dict[str, Any]]:
    """Yield the values of the table of layers, and the phase of the steps if the rows differ in it."""
    several = len({row.step_phase for row in rows}) > 1
    kinds = shown_attention(row.config for row in rows)
    for row, attention in zip(rows, kinds, strict=True):
        step_phase = shown_phase(row.step_phase) if several else None
        yield _line(row, full) | {"attention": attention, "step_phase": step_phase}


def _line(row: LayerRow, full: bool) -> dict[str, Any]:
    line = {column.key: getattr(row, column.key) for column in (*COLUMNS, *REGRET)}
    if not full:
        line["module"] = short_module(row.module)
    # The phase of the steps says more than the phase of the call, which the config shows too.
    line["phase"] = shown_phase(row.step_phase or row.phase)
    if row.direction != "forward":
        line["phase"] = row.direction
    if row.mode == "eager":
        # Only the exceptions are shown, because `eager` is also a kind of attention.
        line["mode"] = "fast path" if row.kind == "fast_path" else None
    line["config"] = _config(row)
    line["ran"] = ran_text(row)
    if row.mask == NO_MASK:
        line["mask"] = None
    return line


def _dims_text(dims: Sequence[Sequence[int] | None]) -> str | None:
    names: dict[str, list[str]] = {}
    for name, sizes in zip(("q", "k", "v", "mask"), dims, strict=False):
        if sizes:
            names.setdefault("x".join(map(str, sizes)), []).append(name)
    text = ", ".join(f"{' '.join(tensors)} {sizes}" for sizes, tensors in names.items())
    return f"dims {text}" if text else None


def _config(row: LayerRow) -> str | None:
    if row.config is None:
        return row.mean_config or _dims_text(row.dims)
    if row.lengths is None or row.lengths[0] == row.lengths[1]:
        return row.config
    return f"{row.config} (seq_kv {row.lengths[0]} to {row.lengths[1]})"


def _mean_lengths(rows: Sequence[LayerRow]) -> str:
    """Return a sentence on the configs of rows whose calls no config describes."""
    # Only these configs have a page size.
    which = "with page= " if any(row.config for row in rows) else ""
    return f"The lengths in the configs {which}are the mean lengths of the requests in a step."


def _summary(layers: LayerMap) -> str:
    """Return the name and the duration of the steps, such as `LlamaForCausalLM_0, 9.63 ms`."""
    if not layers.steps:
        made = sum(row.program_calls or 0 for row in layers.rows)
        processes = f" in {layers.processes} processes" if layers.processes > 1 else ""
        return f"{counted(made, 'call')}{processes}" if made else ""
    steps = layers.steps
    count = len(steps)
    name = step_title(steps[0].name) if count == 1 else f"{count} steps"
    shown = middle_steps(steps)
    if len(layers.phases) > 1:
        # The table of phases has the figures of the median step of each phase.
        name += f" ({', '.join(f'{phase.steps} {phase.phase}' for phase in layers.phases)})"
        shown = list(steps)
        took = f"{time_text(layers.step_ns * count)} in all"
    elif count > 1:
        middle = sum(step.duration_ns for step in shown) / len(shown)
        took = f"median {time_text(middle)}, mean {time_text(layers.step_ns)}"
    else:
        took = time_text(layers.step_ns)
    if not layers.step_ns:
        return name
    of = " of the median step" if 1 <= len(shown) < count else ""
    busy = busy_share(shown)
    return f"{name}, {took}" + (f", GPU busy {share_text(busy)}{of}" if busy else "")


def _notes(layers: LayerMap, full: bool, told: str | None, *, advise: bool) -> Iterator[Note]:
    """Yield notes with advice, then notes with reasons. Merge equal notes of several rows.

    `told` is the advice that the answer contains. If `advise` is False, no note has advice.
    """
    advised = [
        replace(row, advice=tuple(text for text in row.advice if text != told))
        for row in layers.rows
    ]
    for label, text, level in (
        *(_merged(advised, full, what_to_change) if advise else ()),
        *_merged(
            layers.rows,
            full,
            lambda row: () if row.kind == "replay" else layers.shown_reasons(row),
        ),
    ):
        yield Note(text, label, level)


def _hand_written(layers: LayerMap) -> Iterator[Note]:
    """Yield the command that compares backends for the calls of another package, if there are any.

    The annotations of an engine's steps give configs with the mean lengths of the requests. If the
    trace does not show the shapes, give an example with the known numbers.
    """
    if not any(row.kind == "custom" and row.reasons for row in layers.rows):
        return
    configs = dict.fromkeys(label for phase in layers.phases for label, _ in phase.points)
    lead, options = "to compare backends for these calls", list[str]()
    if configs:
        lead += " at their mean lengths, use: "
        options = ["--backend", ",".join(phase_backends(layers))]
    else:
        lead += " with configs that you write by hand, use: "
    command = shell_command(
        "bench", *(configs or ["CONFIG"]), *options, store=layers.store or default_store()
    )
    yield Note(f"{lead}{command}", level="hint")
    if not configs and (examples := list(filter(None, map(_example, layers.phases)))):
        yield Note(
            f"for example, the mean requests and lengths of the steps give {join_and(examples)}; "
            f"replace the words in capitals with {'the context and ' * (CONTEXT in str(examples))}the "
            "sizes of the model",
            level="hint",
        )


def _example(phase: PhaseRow) -> str:
    """Return a config with the mean requests and lengths of a phase, or "".

    Words in capitals replace the numbers that the annotations of the engine do not contain.
    """
    requests, tokens, keys = phase.mean_requests, phase.mean_new_tokens, phase.mean_keys
    if not requests or not tokens:
        return ""
    batch, length = round(requests), round(tokens / requests)
    context = CONTEXT if keys is None else str(round(keys / requests))
    if phase.phase == DECODE:
        return f"{batch},HEADS,1,HEAD_DIM,seq_kv={context} ({phase.phase})"
    if phase.phase == PREFILL:
        # Without a known context, assume that no token was computed before.
        cached = "" if context in (CONTEXT, str(length)) else f"seq_kv={context},page={USUAL_PAGE},"
        return f"{batch},HEADS,{length},HEAD_DIM,{cached}causal ({phase.phase})"
    return ""


def _merged(
    rows: Sequence[LayerRow], full: bool, texts_of: Callable[[LayerRow], Iterable[str]]
) -> Iterator[tuple[str, str, str]]:
    """Yield the label, the text and the level of each distinct text."""
    found: dict[str, dict[str, bool]] = {}
    names = set()
    for row in rows:
        label = _line(row, full)["module"] or row.config or row.kind
        names.add(label)
        doubtful = row.ran in ("math", "eager") or row.mask == NO_MASK_EFFECT
        for text in texts_of(row):
            labels = found.setdefault(text, {})
            labels[label] = labels.get(label, False) or doubtful
    for text, labels in found.items():
        level = "warning" if any(labels.values()) else "note"
        of_all = len(labels) == len(names)
        yield "" if of_all else join_few(list(labels), LABELS_SHOWN), text, level


def _gaps(layers: LayerMap) -> Table:
    rows = []
    for gap in layers.gaps:
        late = None if gap.launch_ns is None else gap.launch_ns - gap.start_ns
        op = gap.op_path.rpartition(";")[2] if gap.op_path else None
        lateness = None if late is None else time_text(late) if late > 0 else "before it"
        rows.append(gap._asdict() | {"op_path": op, "launch_ns": lateness})
    return Table.of(GAPS, rows)
