"""Show the answer of `verify`: a row per config and backend, failed checks, and skipped cases."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from profharness.attention.cases import VerificationRow, failures
from profharness.columns import Column
from profharness.render.document import Block, Document, Heading, Note, Table, field_names, record

SCHEMA = "profharness.verify/1"
FIELDS = field_names(VerificationRow)
SUMMARY = (
    Column("backend", "backend"),
    Column("verdict", "verdict"),
    Column("passed", "passed", "count"),
    Column("failed", "failed", "count"),
    Column("skipped", "skipped", "count"),
    Column("worst", "error/allowance", right=True),
    Column("case", "largest in", shrink=True),
)
CHECKS = (
    Column("case", "case"),
    Column("backend", "backend"),
    Column("what", "what"),
    Column("error", "error", right=True),
    Column("allowance", "allowance", right=True),
    Column("relative_error", "relative", right=True),
    Column("relative_allowance", "allowance", right=True),
    Column("passed", "verdict"),
)
SHOWN = 3  # maximum number of cases that are shown for a wrong backend without --full
VERDICTS = {True: "passed", False: "FAILED", None: "skipped"}


def verify_document(rows: Sequence[VerificationRow], *, full: bool = False) -> Document:
    """Return the document of `verify`. With `full`, the table has a row for every check."""
    blocks: list[Block] = []
    for config, group in groupby(rows, key=lambda row: row.asked):
        blocks += _config_blocks(config, list(group), full)
    return Document(SCHEMA, "Verification", tuple(blocks), FIELDS, tuple(map(record, rows)))


def _config_blocks(config: str, rows: list[VerificationRow], full: bool) -> Iterator[Block]:
    cases = len(dict.fromkeys(row.case for row in rows))
    yield Heading(config, f"{cases} case{'s' if cases != 1 else ''} against fp64")
    backends = dict.fromkeys(row.backend for row in rows)
    yield Table(
        SUMMARY,
        tuple(_summary(name, [row for row in rows if row.backend == name]) for name in backends),
    )
    if full:
        numbers = ("error", "allowance", "relative_error", "relative_allowance")
        lines = [
            record(row) | {name: _number(getattr(row, name)) for name in numbers} for row in rows
        ]
        yield Table.of(CHECKS, [line | {"passed": VERDICTS[line["passed"]]} for line in lines])
    for name in backends:
        yield from _faults(name, [row for row in failures(rows) if row.backend == name], full)
    yield from _remarks(rows)


def _faults(backend: str, rows: list[VerificationRow], full: bool) -> Iterator[Note]:
    """Yield notes on the faults of a backend: the first failed check of each case in full."""
    cases = [(case, list(group)) for case, group in groupby(rows, key=lambda row: row.case)]
    shown = cases if full else cases[:SHOWN]
    for case, (first, *others) in shown:
        also = f"; also {', '.join(row.what for row in others)}" if others and not full else ""
        text = f"{case} ({first.config}), {first.what}: {first.message}{also}"
        yield Note(text, backend, "error")
        if full:
            for row in others:
                yield Note(f"{case}, {row.what}: {row.message}", backend, "error")
    if len(cases) > len(shown):
        more = ", ".join(case for case, _ in cases[len(shown) :])
        yield Note(f"wrong in these cases too (--full says how): {more}", backend, "error")


def _summary(backend: str, rows: list[VerificationRow]) -> tuple[object, ...]:
    counts = [sum(row.passed is verdict for row in rows) for verdict in (True, False, None)]
    verdict = "WRONG" if counts[1] else "right" if counts[0] else "skipped"
    ratios = [
        (row.error / row.allowance, row.case)
        for row in rows
        if row.error is not None and row.allowance
    ]
    worst, case = max(ratios, default=(None, ""), key=lambda pair: pair[0])
    return (backend, verdict, *counts, _number(worst), case)


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.3g}"


def _remarks(rows: list[VerificationRow]) -> Iterator[Note]:
    """Yield skipped cases with their reasons, and other messages. Cases with one message share a
    note.
    """
    cases: dict[tuple[str, str, str], dict[str, None]] = {}
    for row in rows:
        if row.passed is None and row.message:
            key = "skipped ", row.message.removeprefix("skipped: ")
        elif row.passed and row.message:
            # Leave out the figure, because it differs between cases.
            text = row.message.partition(" differ by up to")[0]
            key = "", f"passed, but {text.removesuffix(': two calls on the same inputs')}"
        else:
            continue
        cases.setdefault((row.backend, *key), {}).setdefault(row.case)
    for (backend, word, text), names in cases.items():
        yield Note(f"{word}{', '.join(names)}: {text}", backend)
