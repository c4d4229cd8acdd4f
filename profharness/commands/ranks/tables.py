"""Show the ranks of a job: findings, then one row per rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from profharness.columns import pick
from profharness.commands.ranks.comparison import CODES, RankComparison, RankFigures
from profharness.errors import join_few
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

SCHEMA = "profharness.ranks/1"
SHARES = ("idle_share", "collective_share", "exposed_share")
FIELDS = (*field_names(RankFigures), *SHARES)
COLUMNS = pick(
    RankFigures,
    *("label", "run", "device", "ratio", "compute_ns", "span_ns", *SHARES, "attention", "findings"),
)
ROWS_SHOWN = 32  # in a larger job, ranks with findings come first
LABELS_SHOWN = 8


def ranks_document(answer: RankComparison, *, full: bool = False) -> Document:
    """Return the document of `ranks`. With `full`, it contains every rank of a large job."""
    lines = [_line(row) for row in answer.rows]
    apart = [line for line in lines if line["findings"]]
    others = [line for line in lines if not line["findings"]]
    shown = lines if full or len(lines) <= ROWS_SHOWN else [*apart, *others][:ROWS_SHOWN]
    left_out = len(lines) - len(shown)
    columns = [
        column
        for column in filled_columns(COLUMNS, lines)
        if column.key != "device" or len({line["device"] for line in lines}) > 1
    ]
    blocks: list[Block] = [Heading("Ranks", _summary(answer)), *_notes(answer)]
    blocks.append(Table.of(columns, shown))
    if left_out:
        blocks.append(Note(f"{left_out:,} more ranks, without a finding: --full shows them"))
    blocks += [Note(text, "", "warning") for text in answer.caveats]
    extra = {
        "findings": [record(finding) for finding in answer.findings],
        "codes": CODES,
        "world_size": answer.world_size,
        "hosts": answer.hosts,
        "spread": answer.spread,
        "threshold": answer.threshold,
        "caveats": list(answer.caveats),
    }
    records = tuple(_line(row) for row in answer.rows)
    return Document(SCHEMA, "Ranks", tuple(blocks), FIELDS, records, extra)


def _line(row: RankFigures) -> dict[str, Any]:
    return record(row) | {name: getattr(row, name) for name in SHARES}


def _summary(answer: RankComparison) -> str:
    """Return a line such as `8 of 8 ranks on 2 hosts, compute within 0.4 %; collectives 12 % of the
    span, 3 % exposed`.
    """
    rows = answer.rows
    of = f" of {answer.world_size}" if answer.world_size else ""
    where = f" on {answer.hosts} hosts" if answer.hosts and answer.hosts > 1 else ""
    parts = [f"{len(rows)}{of} ranks{where}"]
    if answer.spread is not None:
        parts.append(f"their compute times spread by {answer.spread:.1%}")
    shares = [_middle([getattr(row, name) for row in rows]) for name in SHARES]
    if shares[0] is not None:
        parts.append(f"GPUs idle for {shares[0]:.0%} of the span")
    if shares[1]:
        parts.append(f"collectives take {shares[1]:.1%} of it, {shares[2]:.1%} exposed")
    return ", ".join(parts)


def _middle(values: Sequence[float | None]) -> float | None:
    known = sorted(value for value in values if value is not None)
    return known[len(known) // 2] if known else None


def _notes(answer: RankComparison) -> Iterator[Note]:
    for finding in answer.findings:
        labels = join_few(finding.ranks, LABELS_SHOWN)
        yield Note(
            finding.sentence, f"{finding.code}: {labels}" if labels else finding.code, "warning"
        )
    if not answer.findings:
        yield Note(
            "no rank is set apart: pace, attention, kernels, software and waits are alike on all"
        )
