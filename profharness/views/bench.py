"""A bench as a Document: figures of each cell, why some are missing or doubtful, regret, and what
follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from profharness.answers.agreement import replacement_notes, replacements
from profharness.config import Config, parse_config
from profharness.costs import compulsory_bytes, flops
from profharness.devices import Peaks, flop_peak
from profharness.run import WIDE
from profharness.stats import THRESHOLD
from profharness.views.cells import sweeps
from profharness.views.document import (
    Block,
    Chart,
    Code,
    Column,
    Document,
    Heading,
    Note,
    Roof,
    Table,
)

if TYPE_CHECKING:
    from profharness.answers.bench.answer import Benched, Loss
    from profharness.answers.bench.rows import BenchRow
    from profharness.rows import CellRow


SCHEMA = "profharness.bench/1"
FIELDS = (
    *("run", "config", "backend", "status", "message", "measurement", "samples", "median_ns"),
    *("low_ns", "high_ns", "mean_ns", "std_ns", "min_ns", "flops_per_s", "bytes_per_s"),
    *("efficiency", "against", "speedup", "baseline", "regret", "verified", "doubts"),
)
RAW = "samples_ns"
MEANS = {
    "event": "CUDA events, L2 flushed before each call",
    "graph": "CUDA-graph replay, L2 warm",
    "kernel": "kernels of a profiled call, L2 warm",
    "wall": "wall clock of the CPU",
}
SHOWN_CODES = 3
LOG_LINES = 6  # of what a compiler said
COLUMNS = (
    Column("config", "config", repeat=False),
    Column("backend", "backend"),
    Column("status", ""),
    Column("ranking", "µs", "us", right=True),
    Column("half", "±%", "percent", right=True),
    Column("mean", "mean", "us", right=True),
    Column("std", "std", "us", right=True),
    Column("event", "event", "us", right=True),
    Column("graph", "graph", "us", right=True),
    Column("kernel", "kernel", "us", right=True),
    Column("tflops", "TFLOP/s", right=True),
    Column("gbs", "GB/s", right=True),
    Column("efficiency", "eff%", right=True),
    Column("queries", "Mquery/s", "count", right=True),
    Column("speedup", "speed-up", "ratio", right=True),
    Column("mark", ""),
)
OPTIONAL = ("status", "event", "graph", "kernel", "tflops", "gbs", "efficiency", "speedup", "mark")
LOSS_COLUMNS = (
    Column("config", "config"),
    Column("choice", "auto took"),
    Column("auto", "auto µs", "us", right=True),
    Column("best", "fastest other"),
    Column("best_ns", "µs", "us", right=True),
    Column("regret", "regret%", "percent", right=True),
    Column("told", ""),
)


def bench_document(
    answer: Benched, *, explain: bool = False, raw: bool = False, charts: bool = True
) -> Document:
    """The answer of `profharness bench`. explain: the refusal reasons of each failed cell; raw: the
    samples in the records, under `samples_ns`; charts: with them.
    """
    blocks: list[Block] = [
        Heading(f"run {answer.run}", _where(answer)),
        _main_table(answer),
        *(_charts(answer) if charts else ()),
        Note(_header(answer), "figures"),
        *_marks(answer),
        *_replaced(answer),
        *_failed(answer, explain),
        *_doubts(answer),
        *_regret(answer),
        *_conclusion(answer),
    ]
    told = _records(answer, raw)
    return Document(
        SCHEMA,
        f"Bench of run {answer.run}",
        tuple(blocks),
        (*FIELDS, RAW) if raw else FIELDS,
        tuple(told),
        {
            "run": answer.run,
            "ranking": answer.ranking,
            "convention": answer.convention,
            "peaks": _plain(answer.peaks),
            "winners": [_plain(each) for each in answer.winners],
            "losses": [_plain(each) for each in answer.losses],
            "conclusions": list(answer.conclusions),
            "replaced": [_plain(each) for each in replacements(answer.cells)],
            "cells": [_cell(cell) for cell in answer.cells],
            "environment": answer.environment,
        },
    )


def _charts(answer: Benched) -> Iterator[Block]:
    """Latency and TFLOP/s over sequence length where configs differ in it alone, and the roofline;
    a wrong backend is in none.
    """
    from profharness.views.cells import latency_charts

    medians = [
        (row.config, row.backend, row.median_ns)
        for row in answer.ranking_rows()
        if row.median_ns and row.verified is not False
    ]
    tf32 = bool(answer.environment.get("tf32"))
    yield from latency_charts(medians, answer.ranking)
    yield from rate_blocks(medians, answer.ranking, answer.peaks, tf32=tf32)


def _plain(item: Any) -> dict[str, Any] | None:
    """A frozen dataclass as keys and values."""
    if item is None:
        return None
    return {each.name: getattr(item, each.name) for each in fields(item)}


def _records(answer: Benched, raw: bool) -> Iterator[dict[str, Any]]:
    cells = {(cell.config, cell.backend): cell.cell for cell in answer.cells}
    for row in answer.rows:
        record = _plain(row) or {}
        if raw:
            samples = answer.samples.get(cells[row.config, row.backend], {})
            record[RAW] = list(samples.get(str(row.measurement), ()))
        yield record


def _cell(cell: CellRow) -> dict[str, Any]:
    return {
        "config": cell.config,
        "backend": cell.backend,
        "status": cell.status,
        "message": cell.message,
        "choice": cell.choice,
        "peak_memory_bytes": cell.peak_memory_bytes,
        "clocks": cell.clocks,
        "tuning": cell.tuning,
        "refusals": [asdict(refusal) for refusal in cell.refusals],
        "warnings": list(cell.warnings),
    }


def _where(answer: Benched) -> str:
    told = answer.environment
    device = told.get("gpu") or told.get("cpu") or "unknown device"
    return f"{device}, torch {told.get('torch')}"


def _header(answer: Benched) -> str:
    means = MEANS.get(answer.ranking, answer.ranking)
    peaks = answer.peaks
    ceiling = "no peaks of this device are known, so there is no efficiency"
    if peaks is not None:
        ceiling = f"eff% is of the {peaks.source} peak of {peaks.device} that binds first"
    return (
        f"µs is the median of {answer.ranking} ({means}), ±% half its 95 % interval; FLOPs by the "
        f"convention {answer.convention}, bytes are the compulsory ones; {ceiling}"
    )


def _main_table(answer: Benched) -> Table:
    others = {
        (row.config, row.backend, row.measurement): row.median_ns
        for row in answer.rows
        if row.measurement != answer.ranking
    }
    doubtful = {place: number for number, place in enumerate(_doubtful(answer), start=1)}
    lines = []
    for row in answer.ranking_rows():
        values = _line(row, doubtful.get((row.config, row.backend)))
        for name in ("event", "graph", "kernel"):
            values[name] = others.get((row.config, row.backend, name), "")
        lines.append(values)
    empty = ("", None)
    shown = [
        column
        for column in COLUMNS
        if column.key not in OPTIONAL or any(line[column.key] not in empty for line in lines)
    ]
    return Table(tuple(shown), tuple(tuple(line[column.key] for column in shown) for line in lines))


def _line(row: BenchRow, doubt: int | None) -> dict[str, Any]:
    """The values of one line, by column; a row without samples says its status instead."""
    median_ns = row.median_ns
    if median_ns is None:
        empty: dict[str, Any] = {column.key: "" for column in COLUMNS}
        return empty | {"config": row.config, "backend": row.backend, "status": row.status}
    half = None
    if row.low_ns is not None and row.high_ns is not None and median_ns:
        half = (row.high_ns - row.low_ns) / 2 / median_ns
    above = row.efficiency is not None and row.efficiency > 1
    config = parse_config(row.config)
    queries = config.batch * config.num_heads * config.seq_len_q
    mark = ["[~]"] if _is_wide(row) else []
    mark += [f"[{doubt}]"] if doubt else []
    mark += ["WRONG"] if row.verified is False else []
    return {
        "config": row.config,
        "backend": row.backend,
        "status": "",
        "ranking": median_ns,
        "half": half,
        "mean": row.mean_ns,
        "std": row.std_ns,
        "tflops": _scaled(row.flops_per_s, 1e12),
        "gbs": _scaled(row.bytes_per_s, 1e9),
        "efficiency": None
        if row.efficiency is None
        else f"{100 * row.efficiency:.1f}{'!' if above else ''}",
        "queries": round(queries / median_ns * 1e3, 2) if median_ns else None,
        "speedup": row.speedup,
        "mark": " ".join(mark),
    }


def _scaled(value: float | None, unit: float) -> str | None:
    return None if value is None else f"{value / unit:,.4g}"


def _doubtful(answer: Benched) -> dict[tuple[str, str], tuple[str, ...]]:
    """Doubts by (config, backend) over all measurements; those of another than the ranking one
    are told by name. A wide interval shows in its own column.
    """
    found: dict[tuple[str, str], list[str]] = {}
    shared: dict[tuple[str, str], set[str]] = {}
    for row in sorted(answer.rows, key=lambda row: row.measurement != answer.ranking):
        key = (row.config, row.backend)
        for text in row.doubts:
            if text.startswith(WIDE) or text in shared.setdefault(key, set()):
                continue
            shared[key].add(text)
            named = text if row.measurement == answer.ranking else f"{row.measurement}: {text}"
            found.setdefault(key, []).append(named)
    order = dict.fromkeys((row.config, row.backend) for row in answer.rows)
    return {key: tuple(found[key]) for key in order if key in found}


def _is_wide(row: BenchRow) -> bool:
    return any(text.startswith(WIDE) for text in row.doubts)


def _doubts(answer: Benched) -> Iterator[Note]:
    figures = answer.figures()
    wide = sum(map(_is_wide, figures))
    if wide:
        text = f"the interval is wider than ±{answer.precision:.1%}; more samples would narrow it"
        yield Note(text, f"[~] {wide} of {len(figures)} figures", "warning")
    for number, ((config, backend), texts) in enumerate(_doubtful(answer).items(), start=1):
        yield Note("; ".join(texts), f"[{number}] {config} {backend}", "warning")


def _marks(answer: Benched) -> Iterator[Note]:
    against = dict.fromkeys(row.against for row in answer.ranking_rows() if row.against)
    if against:
        yield Note("; ".join(against), "peaks")
    baselines = dict.fromkeys(row.baseline for row in answer.ranking_rows() if row.baseline)
    if baselines:
        yield Note(f"against {'; '.join(baselines)}", "speed-up")


def _replaced(answer: Benched) -> Iterator[Note]:
    """Cells whose figures are SDPA's and not those of the form that was asked for."""
    for where, text in replacement_notes(replacements(answer.cells)):
        yield Note(text, where, "warning")


def _failed(answer: Benched, explain: bool) -> Iterator[Note]:
    """Why cells have no figure, once a reason; with explain every reason that PyTorch gave."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for cell in answer.cells:
        if cell.status == "ok":
            continue
        texts = [_opening(cell.message or cell.status)]
        if explain and cell.refusals:
            texts = [f"{refusal.message} [{refusal.code}]" for refusal in cell.refusals]
        for text in texts:
            found.setdefault((cell.backend, cell.status, text), []).append(cell.config)
    for (backend, status, text), configs in found.items():
        where = configs[0] if len(configs) == 1 else f"{len(configs)} configs"
        level = "note" if status == "refused" else "error"
        yield Note(text, f"{backend} {status}, {where}", level)


def _opening(message: str) -> str:
    """The first line; what a compiler said too, where that line announces it by a colon."""
    first, *rest = message.splitlines() or [""]
    said = [line.strip() for line in rest if line.strip()][:LOG_LINES]
    return " ".join([first, *said]) if first.endswith(":") else first


def _regret(answer: Benched) -> Iterator[Block]:
    if not answer.losses:
        return
    yield Heading("Regret", "what auto costs against the fastest correct other backend")
    lines = tuple(
        (
            each.config,
            each.choice,
            each.chosen_ns,
            each.best,
            each.best_ns,
            each.regret,
            _told(each),
        )
        for each in answer.losses
    )
    yield Table(LOSS_COLUMNS, lines)
    seen = dict.fromkeys(each.code for each in answer.losses if each.real)
    for code in list(seen)[:SHOWN_CODES]:
        labels = [each.config for each in answer.losses if each.real and each.code == code]
        more = f" and {len(labels) - SHOWN_CODES} more" if len(labels) > SHOWN_CODES else ""
        yield Note(
            f"for {', '.join(labels[:SHOWN_CODES])}{more}, the fastest backend is selected so"
        )
        yield Code(code)


def _told(loss: Loss) -> str:
    if loss.real:
        return ""
    if loss.choice == loss.best:
        return "the same one"
    if loss.verdict == "unknown":
        return f"not told apart: {loss.why_open}"
    return "auto is faster" if loss.verdict == "faster" else f"as fast, within {THRESHOLD:.0%}"


def _conclusion(answer: Benched) -> Iterator[Block]:
    if answer.conclusions:
        yield Heading("Conclusion")
        yield from (Note(text) for text in answer.conclusions)


def rate_blocks(
    medians: Sequence[tuple[str, str, float]],
    measurement: str,
    peaks: Peaks | None,
    *,
    tf32: bool = False,
    wrong: Set[tuple[str, str]] = frozenset(),
) -> list[Block]:
    """medians: config label, backend, ns. What is in wrong (config label, backend) is left out: a
    wrong answer has no rate. tf32: fp32 products may use the tensor cores.
    """
    rows = [
        (parse_config(label), backend, ns)
        for label, backend, ns in medians
        if ns > 0 and (label, backend) not in wrong
    ]
    blocks: list[Block] = list(_sweep_charts(rows, measurement))
    if peaks is not None and rows:
        blocks += _roofline(rows, measurement, peaks, tf32)
    if wrong:
        named = ", ".join(f"{backend} on {label}" for label, backend in sorted(wrong))
        blocks.append(Note(f"left out of every comparison of rates: {named}", "wrong", "error"))
    return blocks


def _sweep_charts(rows: Sequence[tuple[Config, str, float]], measurement: str) -> list[Chart]:
    charts = []
    for name, members in sweeps([config for config, _, _ in rows]).items():
        points = tuple(
            {"s": config.seq_len_kv, "rate": flops(config) / ns / 1e3, "backend": backend}
            for config, backend, ns in rows
            if config in members
        )
        title = f"TFLOP/s over sequence length, {name} ({measurement})"
        words = ("sequence length", "TFLOP/s")
        charts.append(Chart("lines", title, points, "s", "rate", "backend", *words))
    return charts


def _roofline(
    rows: Sequence[tuple[Config, str, float]], measurement: str, peaks: Peaks, tf32: bool
) -> list[Block]:
    bandwidth = peaks.bandwidth_bytes_per_s
    if not bandwidth:
        return []
    roofs = []
    for dtype in dict.fromkeys(config.dtype or "" for config, _, _ in rows):
        peak = flop_peak(peaks, dtype, tf32=tf32)
        if peak is not None:
            roofs.append(Roof(f"{peak[0]}, {peaks.source}", bandwidth, peak[1]))
    if not roofs:
        return []
    points = tuple(
        {
            "intensity": flops(config) / compulsory_bytes(config),
            "rate": flops(config) / ns * 1e9,
            "backend": backend,
        }
        for config, backend, ns in rows
    )
    caption = (
        f"Compulsory bytes, FLOPs by the convention exact; the roofs are the {peaks.source} peaks "
        f"of {peaks.device}. What sits in L2 can be above the slope."
    )
    title = f"Roofline ({measurement})"
    roofs = _merged(roofs)
    place = ("intensity", "rate", "backend")
    return [Chart("roofline", title, points, *place, caption=caption, roofs=tuple(roofs))]


def _merged(roofs: Sequence[Roof]) -> list[Roof]:
    """Roofs of the same height as one (fp16 and bf16), so that no label covers another."""
    labels: dict[tuple[float, float], list[str]] = {}
    for roof in roofs:
        labels.setdefault((roof.bytes_per_s, roof.flops_per_s), []).append(roof.label)
    return [Roof("; ".join(names), *key) for key, names in labels.items()]
