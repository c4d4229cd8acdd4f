"""Show the answers of `doctor` and `backends`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from profharness.columns import Column
from profharness.render.document import Block, Document, Note, Table, record

if TYPE_CHECKING:
    from profharness.commands.doctor.checks import Check
    from profharness.recording.probe import BackendState


LEVELS = {"missing": "error", "warning": "warning"}


def doctor_document(checks: Sequence[Check], lanes: Sequence[Mapping[str, Any]] = ()) -> Document:
    """Return the document of `doctor`: one row per check, then remedies. JSON also contains what
    each lane reported.
    """
    columns = (
        Column("name", "check"),
        Column("state", "state"),
        Column("detail", "found", shrink=True),
    )
    notes = tuple(
        Note(check.remedy, check.name, LEVELS.get(check.state, "note"))
        for check in checks
        if check.remedy
    )
    blocks: tuple[Block, ...] = (Table.of(columns, checks), *notes)
    fields = ("name", "state", "detail", "remedy")
    extra = {"lanes": [dict(lane) for lane in lanes]} if lanes else {}
    records = tuple(map(record, checks))
    return Document("profharness.doctor/1", "Doctor", blocks, fields, records, extra)


def backends_document(states: Sequence[BackendState]) -> Document:
    """Return the document of `backends`: one row per backend, then why some are unavailable."""
    columns = (
        Column("backend", "backend"),
        Column("runs", "runs here"),
        Column("device", "device"),
        Column("summary", "what it is", shrink=True),
    )
    rows = tuple(
        (state.backend, "yes" if state.runs else "no", state.device, state.summary)
        for state in states
    )
    notes = tuple(
        Note((state.reason or "no reason given").splitlines()[0], state.backend)
        for state in states
        if not state.runs
    )
    blocks: tuple[Block, ...] = (Table(columns, rows), *notes)
    fields = ("backend", "runs", "reason", "device", "summary", "status", "code")
    return Document(
        "profharness.backends/1", "Backends", blocks, fields, tuple(map(record, states))
    )
