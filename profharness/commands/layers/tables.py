"""Show the attention of a program: a row per group of like layers, reasons and advice, steps and
gaps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from profharness.columns import Column, pick
from profharness.program.layer_map import (
    NO_MASK,
    NO_MASK_EFFECT,
    Forecast,
    LayerForecast,
    LayerMap,
    LayerRow,
    short_module,
)
from profharness.render.document import (
    Block,
    Document,
    Heading,
    Note,
    Table,
    field_names,
    filled_columns,
    record,
)

SCHEMA = "profharness.layers/1"
FORECAST_FIELDS = field_names(LayerForecast)
FIELDS = (*field_names(LayerRow), *FORECAST_FIELDS)
COLUMNS = pick(
    LayerRow,
    *("module", "calls", "program_calls", "config", "phase", "mode", "mask", "asked", "ran"),
    *("forward_ns", "backward_ns", "share", "step_share", "site"),
)
OF_SOME = ("module", "backward_ns", "program_calls", "mask", "asked", "site")
OF_STEPS = ("calls", "forward_ns", "share", "step_share")
KERNELS = pick(LayerRow, "module", "kernels")
GAPS = (
    Column("duration_ns", "idle µs", "us"),
    Column("kernel_short", "ended by", shrink=True),
    Column("op", "launched by", shrink=True),
    Column("late", "asked for, µs into the gap", right=True),
)
REGRET = pick(LayerRow, "best", "saves_ns")
OF_FORECAST = tuple(name for name in field_names(Forecast) if name != "rows")
FORECAST = (
    *pick(LayerRow, "module", "config"),
    *pick(LayerForecast, "predicted_backend", "predicted_ns", "predicted_low_ns"),
    *pick(LayerForecast, "predicted_high_ns", "predicted_source", "predicted_total_ns"),
    *pick(LayerForecast, "predicted_share", "predicted_best", "predicted_saves_ns"),
)


def layers_document(layers: LayerMap, *, full: bool = False) -> Document:
    """Return the document of `layers`. With `full`, it contains whole module names, kernels and
    gaps.
    """
    lines = [line_of(row, full) for row in layers.rows]
    optional = (*OF_SOME, *(() if layers.steps else OF_STEPS))
    columns = (*COLUMNS, *(REGRET if layers.regret else ()))
    blocks: list[Block] = [Heading(f"Attention of run {layers.run}", _summary(layers))]
    blocks.append(Table.of(filled_columns(columns, lines, optional), lines))
    for row in layers.rows:
        blocks += _notes(row, full)
    if layers.regret:
        timed = f"{layers.regret.measurement} times of bench run {layers.regret.run}"
        blocks += [Heading("Regret", timed, 3), *map(Note, layers.regret.conclusions)]
    blocks += [Note(text, "", "warning") for text in layers.caveats]
    for forecast in layers.forecasts:
        blocks += _forecast_blocks(forecast, lines, full)
    if full:
        blocks += [Heading("Kernels", "in order of their first launch", 3)]
        named = zip(lines, layers.rows, strict=True)
        blocks.append(Table.of(KERNELS, (line | {"kernels": row.kernels} for line, row in named)))
    if full and layers.gaps:
        blocks += [Heading("Where the GPU waited", "the largest gaps", 3), _gaps(layers)]
    extra = {
        "steps": [record_of(step) for step in layers.steps],
        "gaps": [record_of(gap) for gap in layers.gaps],
        "caveats": list(layers.caveats),
        "regret": record(layers.regret) if layers.regret else None,
        "predicted": forecast_record(layers.forecasts[0]) if layers.forecasts else None,
    }
    untold = (LayerForecast(),) * len(layers.rows)
    records = tuple(
        record(row) | record(beside)
        for told in [forecast.rows for forecast in layers.forecasts] or [untold]
        for row, beside in zip(layers.rows, told, strict=True)
    )
    return Document(SCHEMA, "Layers", tuple(blocks), FIELDS, records, extra)


def forecast_record(forecast: Forecast) -> dict[str, Any]:
    """Return the JSON record of a prediction without its rows."""
    return record(forecast, OF_FORECAST)


def _forecast_blocks(
    forecast: Forecast, lines: Sequence[dict[str, Any]], full: bool
) -> Iterator[Block]:
    """Yield the prediction for another GPU, largest time first, and its conclusions."""
    where = forecast.machine or f"{forecast.gpu}, torch {forecast.torch}, no atlas"
    whole = "a step" if forecast.of == "step" else "the whole program"
    yield Heading(f"Predicted for {where}", f"µs and saving of {whole}")
    rows = [
        {name: line[name] for name in ("module", "config")} | record(told)
        for line, told in zip(lines, forecast.rows, strict=True)
    ]
    rows.sort(key=lambda row: -(row["predicted_total_ns"] or 0))
    yield Table.of(FORECAST, rows)
    yield from map(Note, forecast.conclusions)
    if full:
        yield Heading("Predicted kernels", "of a call of median size", 3)
        yield Table.of(
            (KERNELS[0], *pick(LayerForecast, "predicted_kernels")),
            rows,
        )


def record_of(row: Any) -> dict[str, Any]:
    """Convert a named tuple to a dict."""
    return dict(row._asdict())


def line_of(row: LayerRow, full: bool) -> dict[str, Any]:
    """Return the values that the table shows for a row."""
    line = {column.key: getattr(row, column.key) for column in (*COLUMNS, *REGRET)}
    if not full:
        line["module"] = short_module(row.module)
    if row.direction != "forward":
        line["phase"] = row.direction
    if row.kind == "fast_path" and row.mode == "eager":
        line["mode"] = "fast path"
    line["config"] = _config(row)
    if row.mask == NO_MASK:
        line["mask"] = None
    return line


def _dims_text(dims: Sequence[Sequence[int] | None]) -> str | None:
    """Return a text such as `dims q 8x64, k v 32x64` for a call without a config. None without
    dims.
    """
    names: dict[str, list[str]] = {}
    for name, sizes in zip(("q", "k", "v", "mask"), dims, strict=False):
        if sizes:
            names.setdefault("x".join(map(str, sizes)), []).append(name)
    text = ", ".join(f"{' '.join(tensors)} {sizes}" for sizes, tensors in names.items())
    return f"dims {text}" if text else None


def _config(row: LayerRow) -> str | None:
    if row.config is None:
        return _dims_text(row.dims)
    if row.lengths is None or row.lengths[0] == row.lengths[1]:
        return row.config
    return f"{row.config} (seq_kv {row.lengths[0]} to {row.lengths[1]})"


def _summary(layers: LayerMap) -> str:
    """Return a text such as `step 8.08 ms, GPU busy 1.57 ms (19 %), attention 0.10 ms`."""
    if not layers.steps:
        made = sum(row.program_calls or 0 for row in layers.rows)
        return f"{made:,} calls of {layers.processes} process(es), counted" if made else ""
    step, busy = layers.step_ns, layers.busy_ns
    measured = [row for row in layers.rows if row.forward_ns is not None]
    attention = sum(row.kernel_ns for row in measured)
    count = len(layers.steps)
    name = layers.steps[0].name if count == 1 else f"{count} steps of"
    share = f" ({busy / step:.0%})" if step else ""
    parts = [f"{name} {step / 1e6:,.2f} ms"]
    if busy:
        parts.append(f"GPU busy {busy / 1e6:,.2f} ms{share}")
    else:
        parts.append("no kernels recorded" + (", times are of CPU ops" if measured else ""))
    return ", ".join([*parts, *([f"attention {attention / 1e6:,.2f} ms"] if measured else [])])


def _notes(row: LayerRow, full: bool) -> Iterator[Note]:
    label = line_of(row, full)["module"] or row.config or row.kind
    doubtful = row.ran in ("math", "eager") or row.mask == NO_MASK_EFFECT
    level = "warning" if doubtful else "note"
    for reason in row.reasons:
        yield Note(reason, label, level)
    for advice in row.advice:
        yield Note(f"would help: {advice}", label, level)


def _gaps(layers: LayerMap) -> Table:
    rows = []
    for gap in layers.gaps:
        late = None if gap.launch_ns is None else (gap.launch_ns - gap.start_ns) / 1e3
        op = gap.op_path.rpartition(";")[2] if gap.op_path else None
        lateness = None if late is None else f"{late:,.1f}" if late > 0 else "before it"
        rows.append(record_of(gap) | {"op": op, "late": lateness})
    return Table.of(GAPS, rows)
