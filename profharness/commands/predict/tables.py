"""Show the answer of `predict`: a config with its backends and kernels, or maps over ranges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from profharness.atlas.data import VERSIONS
from profharness.atlas.predictions import (
    FIELDS,
    Place,
    Predicted,
    launch_record,
    predicted_record,
    statement,
)
from profharness.attention.config import AUTO, parse_config
from profharness.attention.dispatch.advice import call_code
from profharness.columns import Column, pick
from profharness.commands.explain.maps import Map, draw_maps, value_text
from profharness.commands.explain.tables import map_blocks, map_record, map_table
from profharness.render.document import (
    Block,
    Chart,
    Code,
    Document,
    Heading,
    Note,
    Table,
    filled_columns,
    status_note,
)
from profharness.rows import KernelRow

SCHEMA = "profharness.predict/1"
TITLE = "What a GPU would do"
Answer = tuple[Predicted, ...]  # one row per backend of a config
BACKEND_COLUMNS = (
    Column("backend", "backend"),
    Column("choice", "takes"),
    Column("source", "source"),
    Column("kernel_ns", "µs", "us"),
    Column("low_ns", "from", "us"),
    Column("high_ns", "to", "us"),
    Column("graph_ns", "graph µs", "us"),
    Column("regret", "loses%", "percent"),
    Column("bottleneck", "bottleneck", shrink=True),
)
INTERVAL = ("low_ns", "high_ns")
KERNEL_COLUMNS = (
    Column("backend", "backend", repeat=False),
    *pick(KernelRow, "kernel_short", "grid", "block", "shared_bytes", "registers_per_thread"),
    *pick(KernelRow, "duration_ns"),
)
LOSS_COLUMNS = (
    Column("config", "config"),
    Column("choice", "auto takes"),
    Column("kernel_ns", "µs", "us"),
    Column("best", "best"),
    Column("best_ns", "its µs", "us"),
    Column("regret", "loses%", "percent"),
    Column("source", "source"),
)
MUCH = 0.1  # minimum regret of a config that is mentioned
SHOWN_LOSSES = 12
SHOWN_CHARTS = 4  # maximum number of maps of each kind that are drawn
SHOWN_OUTSIDE = 4
REGRETS = ((0.01, "none"), (0.1, "to 10 %"), (0.5, "to 50 %"), (1.0, "to 2x"))
MOST = "over 2x"
UNKNOWN = "not known"


def predict_document(
    answers: Sequence[Answer],
    place: Place,
    backends: Sequence[str],
    *,
    full: bool = False,
    charts: bool = False,
) -> Document:
    """Return one config with its kernels, or several as maps.

    `backends` are those with a row. With `full`, each config has its own section. `charts` draws
    the maps.
    """
    blocks: list[Block] = []
    extra: dict[str, Any] = {"atlas": atlas_record(place)}
    if len(answers) > 1:
        maps = _maps(answers, AUTO if AUTO in backends else backends[0])
        blocks += _summary(answers)
        blocks += [block for drawn in maps for block in _drawn_blocks(drawn, place)]
        if charts:
            blocks += _charts(answers, maps, backends)
        extra["maps"] = list(map(_drawn_record, maps))
    if len(answers) == 1 or full:
        for answer in answers:
            blocks += config_blocks(answer, place, backends, full=full)
            if charts:
                blocks += _time_charts([answer], backends)
    rows = [row for answer in answers for row in answer if row.backend in backends]
    records = tuple(map(predicted_record, rows))
    return Document(SCHEMA, TITLE, tuple(blocks), FIELDS, records, extra, about=place.text)


def atlas_record(place: Place) -> dict[str, Any] | None:
    """Return the JSON record of the atlas: the machine it was measured on, and its cells. None
    without one.
    """
    if place.atlas is None:
        return None
    machine = place.atlas.machine
    cells = {"cells": len(place.atlas), "own_cells": sum(map(len, place.own))}
    return {name: getattr(machine, name) for name in VERSIONS} | cells


def config_blocks(
    answer: Answer, place: Place, backends: Sequence[str], *, full: bool = False
) -> list[Block]:
    """Return verdict, backends, kernels and refusals of a config.

    If all backends are shown, only `auto` and the best one show their kernels, unless `full`.
    """
    some = {AUTO, answer[0].best} if len(backends) == len(answer) and not full else {*backends}
    shown = [row for row in answer if row.backend in backends]
    blocks: list[Block] = [Heading(answer[0].config, place.text), Note(statement(answer))]
    if ran := [row for row in shown if row.status == "ok"]:
        # measured times have no prediction interval
        measured = all(row.source == "measured" for row in ran)
        hidden = INTERVAL if measured else ()
        columns = [each for each in BACKEND_COLUMNS if each.key not in hidden]
        blocks.append(Table.of(filled_columns(columns, ran), ran))
    kernels = [
        launch_record(launch) | {"backend": row.backend}
        for row in shown
        if row.backend in some and not (row.backend == answer[0].choice and AUTO in some)
        for launch in row.kernels or ()
    ]
    if kernels:
        blocks += [Heading("Kernels of a call", level=3), Table.of(KERNEL_COLUMNS, kernels)]
    auto = answer[0]
    if auto.best and auto.certain and (auto.regret or 0) > MUCH:
        config = parse_config(auto.config)
        code = Code(call_code(config, config, auto.best))
        blocks += [Note(f"to have {auto.best} compute it", "instead"), code]
    for row in shown:
        if row.status != "ok":
            said = "; ".join(reason.message for reason in row.reasons) or _unreasoned(row)
            blocks.append(status_note(row.status, said, row.backend))
    outside = dict.fromkeys(row.outside for row in shown if row.outside)
    return [*blocks, *(Note(text, "no time", "warning") for text in outside if text)]


def _unreasoned(row: Predicted) -> str:
    """Return the text for a refusal without a recorded reason."""
    if row.status == "unknown":
        return "the rules of this release do not tell"
    return (
        "PyTorch refused it when the atlas was measured" if row.source == "measured" else "by rule"
    )


def _summary(answers: Sequence[Answer]) -> Iterator[Block]:
    """Yield what `auto` loses over all configs, and where the figures come from."""
    autos = [answer[0] for answer in answers]
    sources = Counter(row.source for row in autos)
    known = [row for row in autos if row.regret is not None]
    lossy = sorted(
        (row for row in known if row.certain and (row.regret or 0) > MUCH),
        key=lambda row: -(row.regret or 0),
    )
    told = ", ".join(f"{count:,} {source}" for source, count in sources.items())
    yield Heading("In short", f"{len(answers):,} configs: {told}")
    if known:
        text = f"auto loses more than {MUCH:.0%} on {len(lossy):,} of {len(known):,} configs"
        if lossy:
            worst = lossy[0]
            text += f", most on {worst.config}: {worst.regret:.0%} over {worst.best}"
        yield Note(f"{text}.")
    if lossy:
        yield Table.of(LOSS_COLUMNS, lossy[:SHOWN_LOSSES])
        if len(lossy) > SHOWN_LOSSES:
            yield Note(f"{len(lossy) - SHOWN_LOSSES:,} more (--format json has them all)")
    outside = Counter(row.outside for row in autos if row.outside)
    for text, count in outside.most_common(SHOWN_OUTSIDE):
        yield Note(f"{count:,} configs: {text}", "no time", "warning")


_Drawn = tuple[Map, list[list[Predicted | None]]]  # a map of choices, predictions of its cells


def _texts(
    rows: Sequence[Sequence[Predicted | None]], show: Callable[[Predicted], str | None]
) -> list[list[str | None]]:
    return [[None if row is None else show(row) for row in line] for line in rows]


def _drawn_blocks(drawn: _Drawn, place: Place) -> Iterator[Block]:
    axes, rows = drawn
    yield from map_blocks(axes, place.text)
    yield Heading("Kernel time in µs", "- where it is not known", level=3)
    yield map_table(axes, _texts(rows, _short_time))
    yield Heading("What is lost against the best backend, in %", level=3)
    yield map_table(axes, _texts(rows, _short_regret))


def _drawn_record(drawn: _Drawn) -> dict[str, Any]:
    axes, rows = drawn
    figures = {
        name: [[row and getattr(row, name) for row in line] for line in rows]
        for name in ("kernel_ns", "regret", "best", "source")
    }
    return map_record(axes) | figures


def _short_time(row: Predicted) -> str | None:
    return None if row.kernel_ns is None else f"{row.kernel_ns / 1e3:.4g}"


def _short_regret(row: Predicted) -> str | None:
    return None if row.regret is None else f"{100 * row.regret:.0f}{'' if row.certain else '?'}"


def _maps(answers: Sequence[Answer], asked: str) -> list[_Drawn]:
    rows = [row for answer in answers for row in answer if row.backend == asked]
    configs = [parse_config(row.config) for row in rows]
    choices = [answer[0].choice or "unknown" for answer in answers]
    maps = draw_maps(configs, choices)
    numbered = draw_maps(configs, [str(number) for number in range(len(rows))], with_edges=False)
    return [
        (
            drawn,
            [[None if at is None else rows[int(at)] for at in line] for line in numbers.choices],
        )
        for drawn, numbers in zip(maps, numbered, strict=True)
    ]


def _charts(
    answers: Sequence[Answer], maps: Sequence[_Drawn], backends: Sequence[str]
) -> Iterator[Chart]:
    for drawn in maps[:SHOWN_CHARTS]:
        yield _map_chart(drawn, "What auto takes", lambda row: row.choice or UNKNOWN)
        yield _map_chart(drawn, "What is lost against the best backend", _regret_class)
    yield from _time_charts(answers, backends)


def _map_chart(drawn: _Drawn, what: str, show: Callable[[Predicted], str]) -> Chart:
    (axes, rows), cells = drawn, []
    for value, line in zip(axes.row_values, rows, strict=True):
        for column, row in zip(axes.column_values, line, strict=True):
            if row is not None:
                place = {"x": value_text(column), "y": value_text(value)}
                cells.append(place | {"shown": show(row), "label": row.config})
    title = f"{what}, {axes.title}".rstrip(", ")
    names = ("x", "y", "shown", axes.columns, axes.rows)
    return Chart("map", title, tuple(cells), *names, label="label")


def _regret_class(row: Predicted) -> str:
    if row.regret is None:
        return UNKNOWN
    return next((text for most, text in REGRETS if row.regret <= most), MOST)


def _time_charts(answers: Sequence[Answer], backends: Sequence[str]) -> list[Chart]:
    rows = [
        row
        for answer in answers
        for row in answer
        if row.backend in backends and row.kernel_ns is not None
    ]
    medians = [(row.config, row.backend, float(row.kernel_ns or 0)) for row in rows]
    intervals = {
        (row.config, row.backend): (float(row.low_ns), float(row.high_ns))
        for row in rows
        if row.low_ns is not None and row.high_ns is not None
    }
    # imports the store and all of bench
    from profharness.commands.bench.tables import latency_charts
    from profharness.measurements.measurements import AXES

    return latency_charts(medians, "kernel time, predicted", intervals, axes=AXES)


AGAINST_COLUMNS = (
    Column("config", "config", repeat=False),
    Column("backend", "backend"),
    Column("ran_ns", "ran µs", "us"),
    Column("kernel_ns", "atlas µs", "us"),
    Column("low_ns", "from", "us"),
    Column("high_ns", "to", "us"),
    Column("ratio", "ran to atlas", "ratio"),
    Column("source", "source"),
    Column("kernels", "same kernels"),
    Column("best", "best there"),
    Column("regret", "loses%", "percent"),
)


def against_blocks(rows: Sequence[dict[str, Any]]) -> list[Block]:
    """Return a table of the times of a run's kernels beside those in the atlas of its machine.

    Return no blocks if there is no atlas.
    """
    if not rows:
        return []
    words = {True: "yes", False: "no", None: None}
    shown = [row | {"kernels": words[row["same_kernels"]]} for row in rows]
    modelled = [row["inside"] for row in rows if row["inside"] is not None]
    text = f"{sum(modelled)} of {len(modelled)} times that the model tells lie in its 90 % interval"
    heading = Heading("Against the atlas", "what cells of such a machine took")
    return [heading, Note(f"{text}."), Table.of(AGAINST_COLUMNS, shown)]
