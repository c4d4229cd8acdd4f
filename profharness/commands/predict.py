"""`profharness predict`: predict the backend and time of configs on a GPU, using an atlas."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from profharness.atlas.data import VERSIONS
from profharness.atlas.predictions import (
    BOUND,
    FIELDS,
    Asked,
    Place,
    Predicted,
    default_gpu,
    flat_record,
    known_atlases,
    predicted,
    predicted_record,
    statement,
    timing_note,
)
from profharness.atlas.rows import kernel_rows
from profharness.attention.config import AUTO, parse_config, split_names
from profharness.attention.dispatch.advice import call_code
from profharness.attention.dispatch.by_rule import condition
from profharness.columns import Column, pick
from profharness.commands._answers import same_as_fastest, split_text
from profharness.commands._command import command, declaration_of, document
from profharness.commands._options import Option
from profharness.commands._output import chosen_format, hint, shared_release
from profharness.commands._types import (
    AtlasFolder,
    Backends,
    ConfigArguments,
    Driver,
    Format,
    OutputFile,
    config_list,
    gpu_option,
    release_option,
)
from profharness.commands.explain.maps import Map, are_sparse, draw_maps, value_text
from profharness.commands.explain.tables import map_blocks, map_record, map_table
from profharness.commands.kernels.tables import call_table
from profharness.devices import with_article
from profharness.errors import counted
from profharness.render.document import (
    Block,
    Chart,
    Code,
    Document,
    Heading,
    More,
    Note,
    Table,
    filled_columns,
    merged_notes,
    status_note,
)
from profharness.rows import FLOOR, MEASURED, times_word
from profharness.run import gpu_names, require_distinct
from profharness.stats import NOTABLE_LOSS
from profharness.store import frame
from profharness.units import as_long, ratio_text, share_text, time_text

if TYPE_CHECKING:
    import pandas as pd


SCHEMA = "profharness.predict/1"
Answer = tuple[Predicted, ...]  # the predictions for one config, one per backend, `auto` first
BACKEND_COLUMNS = pick(
    Predicted,
    *("backend", "choice", "source", "kernel_ns", "interval", "graph_ns", "regret"),
)
LOSS_COLUMNS = (
    *pick(Predicted, "config"),
    *pick(Predicted, "choice", "source", "kernel_ns", "best", "best_ns", "regret"),
)
GPU_COLUMNS = (
    replace(*pick(Predicted, "gpu"), title="GPU"),
    replace(*pick(Predicted, "torch"), title="torch"),
    *pick(Predicted, "choice", "source", "kernel_ns", "interval"),
    *pick(Predicted, "best", "best_ns", "regret"),
)
SHOWN_LOSSES = 12
SHOWN_CHARTS = 4  # maximum number of maps that are drawn as charts
SHOWN_OUTSIDE = 4
REGRETS = (
    (0.01, "under 1.01x"),
    (0.1, "1.01x to 1.10x"),
    (0.5, "1.10x to 1.50x"),
    (1.0, "1.50x to 2.00x"),
    (math.inf, "over 2.00x"),
)
UNKNOWN = "unknown"
MARK = "*"  # marks a time that the atlas measured
WINDOW = (
    "SDPA receives the window as a bool mask, so the times are those of calls with a mask. "
    "flex_attention skips the masked blocks, but the atlas has no times for flex_attention."
)


def places_document(
    found: Sequence[Asked], *, full: bool = False, charts: bool = False
) -> Document:
    """Return the document of `predict` for several GPUs.

    One config gets a table with a row per GPU, and several configs get the document of each GPU.
    """
    pages = [
        predict_document(each.answers, each.place, each.backends, full=full, charts=charts)
        for each in found
    ]
    answers = [each.answers[0] for each in found]
    told = [text for page in pages for text in page.answer]
    several = len(found[0].answers) > 1
    if not several:
        told = [
            f"On {with_article(each.place.gpu)}, {page.answer[0][:1].lower()}{page.answer[0][1:]}"
            for each, page in zip(found, pages, strict=True)
        ]
    blocks: list[Block] = []
    if not several:
        rows = [answer[0] for answer in answers]
        blocks += [
            Heading(rows[0].config, "auto on each GPU"),
            Table.of(_of_sources(GPU_COLUMNS, rows), rows),
        ]
    if several or full:
        blocks += [block for page in pages for block in page.blocks]
    return replace(
        pages[0],
        title="Predictions for several GPUs",
        blocks=tuple(blocks),
        records=tuple(record for page in pages for record in page.records),
        extra={"places": [{"about": page.about, **page.extra} for page in pages]},
        about="; ".join(str(page.about) for page in pages),
        answer=tuple(told),
    )


def predict_document(
    answers: Sequence[Answer],
    place: Place,
    backends: Sequence[str],
    *,
    full: bool = False,
    charts: bool = False,
) -> Document:
    """Return the document of `predict`, which shows one config with its kernels, or several as
    maps.

    The tables and records contain only the rows for `backends`. If `full` is set, each config also
    has its own section. If `charts` is set, the document also has charts.
    """
    blocks: list[Block] = []
    where = place.described(full=full)
    extra: dict[str, Any] = {"atlas": None}
    if place.atlas is not None:
        machine = {name: getattr(place.atlas.machine, name) for name in VERSIONS}
        cells = {"cells": len(place.atlas), "own_cells": sum(map(len, place.own))}
        extra["atlas"] = machine | cells
    if len(answers) > 1:
        maps = _maps(answers, AUTO if AUTO in backends else backends[0])
        blocks += _summary(answers)
        if are_sparse([axes for axes, _ in maps]):
            blocks += _list_blocks(answers, backends, where)
        else:
            for axes, cells_of in maps:
                blocks += _map_blocks(axes, cells_of, where)
        if charts:
            for axes, cells_of in maps[:SHOWN_CHARTS]:
                blocks += _map_charts(axes, cells_of)
            blocks += _time_charts(answers, backends)
        extra["maps"] = [
            map_record(axes)
            | {
                name: [[row and getattr(row, name) for row in line] for line in cells_of]
                for name in ("kernel_ns", "regret", "best", "source")
            }
            for axes, cells_of in maps
        ]
    if len(answers) == 1 or full:
        for answer in answers:
            blocks += _config_blocks(answer, place, backends, full=full, several=len(answers) > 1)
            if charts:
                blocks += _time_charts([answer], backends)
    rows = [row for answer in answers for row in answer if row.backend in backends]
    records = tuple(map(predicted_record, rows))
    title = "What a GPU would do"
    told, about = predict_answer(answers, place), place.text
    return Document(SCHEMA, title, tuple(blocks), FIELDS, records, extra, about, told)


def predict_answer(answers: Sequence[Answer], place: Place) -> tuple[str, ...]:
    """Return sentences on the fastest backend, and on what `auto` runs and how much slower it is."""
    if len(answers) == 1:
        return (statement(answers[0]),)
    autos = [answer[0] for answer in answers]
    gpu = with_article(place.gpu)
    best, chosen = (
        Counter(map(str, filter(None, each)))
        for each in (
            (row.best for row in autos),
            (row.choice for row in autos if row.choice not in ("none", "unknown")),
        )
    )
    total = len(autos)
    if best and all(row.best == row.choice and (row.regret or 0) <= NOTABLE_LOSS for row in autos):
        return (
            f"On {gpu}, auto is predicted to run the fastest backend: {split_text(best, total)}.",
        )
    takes = (
        f"auto chooses {split_text(chosen, total)}"
        if chosen
        else "auto does not choose a known backend"
    )
    if best:
        fastest = f"the fastest backend is predicted to be {split_text(best, total)}"
        sentences = [f"On {gpu}, {fastest}; {takes}."]
    else:
        sentences = [f"On {gpu}, {takes}, according to PyTorch's dispatch rules."]
    known = [row for row in autos if row.regret is not None]
    lossy = _lossy(autos)
    much = share_text(NOTABLE_LOSS)
    unsure = sum((row.regret or 0) > NOTABLE_LOSS for row in known) - len(lossy)
    if lossy:
        worst = lossy[0]
        may = f" (and perhaps on {unsure:,} more)" if unsure else ""
        sentences.append(
            f"On {len(lossy):,} of {counted(len(known), 'config')}{may}, auto takes more than "
            f"{as_long(1 + NOTABLE_LOSS, 'the fastest backend')}. The worst case is {worst.config}, where auto "
            f"takes {as_long(1 + (worst.regret or 0))} as {worst.best!s}."
        )
    elif unsure:
        sentences.append(
            f"On {unsure:,} of {counted(len(known), 'config')}, auto may take more than "
            f"{as_long(1 + NOTABLE_LOSS, 'the fastest backend')}, but the prediction intervals overlap."
        )
    elif known:
        which = "" if len(known) == len(autos) else f" whose times are known ({len(known):,})"
        sentences.append(f"auto is within {much} of the fastest backend on every config{which}.")
    else:
        sentences.append("No times are known.")
    return tuple(sentences)


def _lossy(autos: Sequence[Predicted]) -> list[Predicted]:
    """Return the predictions in which `auto` is certainly much slower, in descending order."""
    lossy = [row for row in autos if row.certain and (row.regret or 0) > NOTABLE_LOSS]
    return sorted(lossy, key=lambda row: -(row.regret or 0))


def _config_blocks(
    answer: Answer, place: Place, backends: Sequence[str], *, full: bool, several: bool
) -> Iterator[Block]:
    """Yield a summary, a table of backends with the refusals, and a table of kernels for one config.

    If all backends are shown and `full` is not set, the table of kernels contains only those of
    `auto` and of the best backend.
    """
    auto = answer[0]
    some = {AUTO, auto.best} if len(backends) == len(answer) and not full else {*backends}
    shown = [row for row in answer if row.backend in backends]
    ran = [row for row in shown if row.status == "ok"]
    fastest = {row.backend for row in ran if row.regret == 0}
    where = place.described(full=full)
    yield Heading(
        auto.config, f"{'measured on' if _all_measured(ran) else 'predicted for'} {where}"
    )
    if several:
        yield Note(statement(answer))
    if ran:
        lines = [_line(row, fastest) for row in shown]
        columns = _of_sources(BACKEND_COLUMNS, ran)
        yield Table.of(filled_columns(columns, lines), lines)
    yield from merged_notes(_status_note(row) for row in shown if row.status != "ok")
    kernels = [
        kernel
        for row in shown
        if row.backend in some and not (row.backend == auto.choice and AUTO in some)
        for kernel in kernel_rows(row, place)
    ]
    if kernels:
        yield Heading("Kernels of a call", level=3)
        yield call_table(kernels, full=full)
    if auto.best and auto.certain and (auto.regret or 0) > NOTABLE_LOSS:
        config = parse_config(auto.config)
        yield Note(f"The following code runs {auto.best}:")
        yield Code(call_code(config, config, auto.best))
    if note := timing_note(shown):
        yield Note(note)
    for text in dict.fromkeys(row.outside for row in shown):
        if text:
            yield Note(f"No time is predicted: {text}", level="warning")
    if parse_config(auto.config).window is not None:
        yield Note(WINDOW)


def _line(row: Predicted, fastest: Collection[str]) -> tuple[Any, ...]:
    """Return a line of the table of backends.

    The line of a backend that does not run the config shows its status in place of its time.
    """
    if row.status != "ok":
        return ({"backend": row.backend, "kernel_ns": row.status},)
    # PyTorch runs the backend that is forced.
    choice = row.choice or row.backend
    same = same_as_fastest(row.backend, choice, fastest)
    return {"choice": choice, "regret": same or row.regret}, row


def _status_note(row: Predicted) -> Note:
    """Return a note that says why a backend does not run a config, or that the rules do not say."""
    config = parse_config(row.config)
    reasons = "; ".join(condition(config, reason) for reason in row.reasons) or "by rule"
    if not row.reasons and row.status == "unknown":
        reasons = "the rules do not cover this release"
    elif not row.reasons and row.source == MEASURED:
        reasons = "PyTorch refused the config when the atlas was measured"
    return status_note(row.status, reasons, row.backend)


def _all_measured(rows: Sequence[Predicted]) -> bool:
    """Return whether the times of all these rows, at least one, were measured."""
    return bool(rows) and all(row.source == MEASURED for row in rows)


def _of_sources(columns: Iterable[Column], rows: Iterable[Predicted]) -> list[Column]:
    """Return the columns of a table whose times are measured, predicted or both.

    If all times have the same source, omit the column that names it. The titles say `measured` if
    all times are measured, which then have no interval, and `predicted` otherwise.
    """
    sources = {row.source for row in rows}
    hidden = {"source"} if len(sources) < 2 else set[str]()
    what = times_word(sources)
    titles = {
        "kernel_ns": f"{what} µs/call",
        "graph_ns": f"{what} graph µs/call",
    }
    if sources == {MEASURED}:
        hidden.add("interval")
    elif sources == {FLOOR}:
        titles["interval"] = BOUND
    return [
        replace(each, title=titles.get(each.key, each.title))
        for each in columns
        if each.key not in hidden
    ]


def _summary(answers: Sequence[Answer]) -> Iterator[Block]:
    autos = [answer[0] for answer in answers]
    if lossy := _lossy(autos):
        yield Heading(
            "Where auto is slower", f"more than {as_long(1 + NOTABLE_LOSS, 'the fastest')}"
        )
        shown = lossy[:SHOWN_LOSSES]
        yield Table.of(_of_sources(LOSS_COLUMNS, shown), shown)
        if len(lossy) > SHOWN_LOSSES:
            yield Note(f"{len(lossy) - SHOWN_LOSSES:,} more; the JSON has them all")
    if note := timing_note(autos):
        yield Note(note)
    outside = Counter(row.outside for row in autos if row.outside)
    for reason, count in outside.most_common(SHOWN_OUTSIDE):
        yield Note(
            f"No time is predicted for {counted(count, 'config')}: {reason}", level="warning"
        )


Cells = list[list[Predicted | None]]  # the predictions in a map, row by row, None if missing


def _maps(answers: Sequence[Answer], backend: str) -> list[tuple[Map, Cells]]:
    """Return maps of the choices of `auto`, each with the predictions for one backend."""
    rows = [row for answer in answers for row in answer if row.backend == backend]
    configs = [parse_config(row.config) for row in rows]
    maps = draw_maps(configs, [answer[0].choice or "unknown" for answer in answers])
    numbered = draw_maps(configs, list(map(str, range(len(rows)))), with_edges=False)
    return [
        (axes, [[None if at is None else rows[int(at)] for at in line] for line in numbers.choices])
        for axes, numbers in zip(maps, numbered, strict=True)
    ]


def _map_blocks(axes: Map, cells: Cells, where: str) -> Iterator[Block]:
    yield from map_blocks(axes, where, predicted=True)
    shown = [row for line in cells for row in line if row is not None]
    marks = ["- means unknown"] if any(row.kernel_ns is None for row in shown) else []
    measured = any(row.source == MEASURED for row in shown)
    marks += [f"{MARK} is measured"] if measured else []
    yield Heading("Predicted kernel time", ", ".join(marks), level=3)
    yield map_table(axes, [[_time_cell(row) for row in line] for line in cells])
    marks = ["? means that the intervals overlap"] if any(r.certain is False for r in shown) else []
    yield Heading("Predicted time relative to the fastest backend", ", ".join(marks), level=3)
    yield map_table(
        axes,
        [
            [
                f"{ratio_text(1 + row.regret)}{'' if row.certain else '?'}"
                if row and row.regret is not None
                else None
                for row in line
            ]
            for line in cells
        ],
    )


def _list_blocks(answers: Sequence[Answer], backends: Sequence[str], where: str) -> Iterator[Block]:
    """Yield a table with the prediction for one backend and the best backend for each config."""
    backend = AUTO if AUTO in backends else backends[0]
    rows = [row for answer in answers for row in answer if row.backend == backend]
    lines = [({"choice": row.choice or row.status}, row) for row in rows]
    columns = _of_sources(LOSS_COLUMNS, rows)
    if backend != AUTO:
        columns = [each for each in columns if each.key != "choice"]
    title = "Measured times" if _all_measured(rows) else "Predicted times"
    yield Heading(title, f"{where}, backend {backend}")
    yield Table.of(filled_columns(columns, lines), lines)
    yield More("an explanation of each config")


def _time_cell(row: Predicted | None) -> str | None:
    if row is None or row.kernel_ns is None:
        return None
    return f"{time_text(row.kernel_ns)}{MARK if row.source == MEASURED else ''}"


def _map_charts(axes: Map, cells: Cells) -> Iterator[Chart]:
    points: list[dict[str, Any]] = []
    for value, line in zip(axes.row_values, cells, strict=True):
        for column, row in zip(axes.column_values, line, strict=True):
            if row is not None:
                regret = math.nan if row.regret is None else row.regret
                lost = next((text for most, text in REGRETS if regret <= most), UNKNOWN)
                cell = {"x": value_text(column), "y": value_text(value), "label": row.config}
                points.append(cell | {"choice": row.choice or UNKNOWN, "lost": lost})
    for key, what in (
        ("choice", "What auto chooses"),
        ("lost", "Time vs fastest backend"),
    ):
        title = f"{what}, {axes.title}".rstrip(", ")
        names = ("x", "y", key, axes.columns, axes.rows)
        yield Chart("map", title, tuple(points), *names, label="label")


def _time_charts(answers: Sequence[Answer], backends: Sequence[str]) -> list[Chart]:
    rows = [row for answer in answers for row in answer if row.backend in backends]
    medians = [
        (row.config, row.backend, float(row.kernel_ns)) for row in rows if row.kernel_ns is not None
    ]
    intervals = {
        (row.config, row.backend): (float(row.low_ns), float(row.high_ns))
        for row in rows
        if row.low_ns is not None and row.high_ns is not None
    }
    # Imported here because only charts need the tables of `bench`.
    from profharness.commands.bench.tables import latency_charts
    from profharness.measurements.measurements import AXES

    return latency_charts(medians, "kernel time, predicted", intervals, axes=AXES)


GpuName = Annotated[
    str | None,
    gpu_option(
        "The GPU to predict for, which may be any GPU known to `explain --gpu`.",
        default="the local GPU if it has an atlas, else the only one with an atlas",
        tool="The name of a GPU, or the names of several GPUs.",
        tool_examples=("H200", "H200,A100"),
    ),
]
Release = Annotated[
    str | None, release_option("predict", "The PyTorch release, such as 2.11 or 2.11.0.")
]
Full = Annotated[bool, Option(("--full",), help="Also show each config separately.")]


def _to_frame(found: Sequence[Asked]) -> pd.DataFrame:
    rows = [row for each in found for answer in each.answers for row in each.of(answer)]
    made = frame(list(map(flat_record, rows)))
    places, doubts = ("; ".join(dict.fromkeys(texts)) for texts in _texts(found))
    made.attrs |= {"answers": rows, "place": places, "doubt": doubts}
    return made


def _texts(found: Sequence[Asked]) -> tuple[list[str], list[str]]:
    """Return the descriptions of the GPUs, and the doubts about their predictions."""
    return [each.place.text for each in found], [each.doubt for each in found if each.doubt]


@command(
    "predict",
    frame=_to_frame,
    tool="Use this tool to predict the time of a config, or its fastest backend, on a GPU. To find "
    "out why PyTorch chooses a backend, use `explain`.",
)
def predict(
    configs: ConfigArguments,
    backends: Backends = None,
    *,
    gpu: GpuName = None,
    torch: Release = None,
    driver: Driver = None,
    atlas: AtlasFolder = None,
) -> list[Asked]:
    """Predict the backend and the time of a call on a GPU that you do not have.

    The output says which backend PyTorch chooses, which kernels that backend runs, how long it
    takes, and which backend would be fastest.

    Predictions for a GPU come from its atlas, which contains thousands of measured cells and a
    model fitted to them. The source of a prediction is `measured` if the atlas contains the cell,
    and `model` if the fitted model predicts the time, with a 90 % interval. The source is `floor`
    if the GPU or the release has no atlas, or if the config lies outside the range that the atlas
    covers. A prediction with the source `floor` contains only the roofline bound and the backend
    that the dispatch rules choose. With several configs, the output consists of maps that show the
    chosen backend, its time, and the ratio of its time to that of the best backend. Neither torch
    nor a store is needed.

    \b
    Examples:
      profharness predict 16,32,1,128,bf16,seq_kv=4096,kv_heads=8 --gpu H200
      profharness predict '2,16,{512:8192:*2},{64,128,256},bf16' --gpu H200 -o maps.html
      profharness predict 2,8,4096,128,bf16,causal --gpu H200,H100,MI300X
      profharness predict --configs FILE --gpu H200 --format csv

    In Python, the result has one row per config and backend, with times in ns. A row with the
    source `floor` has no time, and low_ns is the roofline bound. Kernels have their short names.
    `attrs["answers"]` has the full rows, `attrs["place"]` has the machine, and `attrs["doubt"]` has
    any doubts.
    """
    asked, names = config_list(configs), split_names(backends)
    gpus = gpu_names(gpu) if gpu else (default_gpu(known_atlases(atlas)),)
    release = shared_release(gpus, torch, atlas)
    found = [predicted(asked, names, each, release, atlas, driver) for each in gpus]
    if gpu is None:
        place = found[0].place.described()
        hint(f"The prediction is for {place}. Choose another GPU with --gpu.")
    else:
        require_distinct(gpu_names(gpu), [each.place.gpu for each in found])
    return found


@document(predict)
def show(
    found: list[Asked], *, full: Full = False, format: Format = None, output: OutputFile = None
) -> Document:
    """Return the document that shows the predictions, with charts if the format supports them."""
    path = None if output is None else Path(output)
    charts = chosen_format(format, path) in ("html", "md")
    if len(found) > 1:
        shown = places_document(found, full=full, charts=charts)
    else:
        (only,) = found
        shown = predict_document(only.answers, only.place, only.backends, full=full, charts=charts)
    doubts = [*dict.fromkeys(line for text in _texts(found)[1] for line in text.splitlines())]
    notes = (Note(text, level="warning") for text in doubts)
    return replace(shown, blocks=(*shown.blocks, *notes), extra={**shown.extra, "caveats": doubts})


DECLARATION = declaration_of(predict)
