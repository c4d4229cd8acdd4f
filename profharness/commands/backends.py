"""`profharness backends`: list which backends run here, and why the others do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from profharness.columns import Column
from profharness.commands._command import command, declaration_of, document
from profharness.commands._types import Full
from profharness.errors import join_and
from profharness.render.document import Block, Document, More, Note, Table, merged_notes, record
from profharness.store import to_frame

if TYPE_CHECKING:
    import pandas as pd

    from profharness.recording.probe import BackendState


def _to_frame(states: list[BackendState]) -> pd.DataFrame:
    from profharness.recording.probe import BackendState

    return to_frame(states, BackendState)


@command("backends", frame=_to_frame)
def list_backends() -> list[BackendState]:
    """Show which backends run on this machine, and why the others do not.

    Each backend is tried on one small config in a worker process. The list includes your own
    implementations in kernels/ and those from installed packages (entry points of the group
    profharness.attention.backends). --full shows the complete reasons.

    \b
    Example:
      profharness backends --format json
    """
    # loads the code that starts workers, which --help does not need
    from profharness.recording.probe import probe_backends

    return probe_backends()


REASONS = {"no_device": "requires a GPU", "absent": "not available", "unsupported": "refused"}
"""Maps the code of a refusal to its short form. `--full` shows the reason itself."""


@document(list_backends)
def show(states: list[BackendState], *, full: Full = False) -> Document:
    """Return a document with one row per backend.

    If `full` is set, the document also has the complete reasons why some backends do not run.
    """
    columns = (
        Column("backend", "backend"),
        Column("runs", "runs here", importance="answer"),
        Column("summary", "what it is", wrap=True),
    )
    rows = tuple((state.backend, _runs(state), state.summary) for state in states)
    notes = [
        Note((state.reason or "no reason recorded").splitlines()[0], state.backend)
        for state in states
        if not state.runs
    ]
    blocks: tuple[Block, ...] = (Table(columns, rows),)
    if notes:
        blocks += tuple(merged_notes(notes)) if full else (More("why the others do not run"),)
    fields = ("backend", "runs", "reason", "device", "summary", "status", "code")
    records = tuple(map(record, states))
    told = backends_answer(states)
    return Document("profharness.backends/1", "Backends", blocks, fields, records, answer=told)


def _runs(state: BackendState) -> str:
    return "yes" if state.runs else REASONS.get(state.code or "", state.status)


def backends_answer(states: Sequence[BackendState]) -> tuple[str, ...]:
    """Return a sentence on which backends run here."""
    running = [state.backend for state in states if state.runs]
    if not running:
        return (f"None of the {len(states)} backends can run here.",)
    devices = join_and([*dict.fromkeys(state.device for state in states if state.runs)])
    verb = "runs" if len(running) == 1 else "run"
    lead = f"{len(running)} of {len(states)} backends {verb} here ({devices})"
    return (f"{lead}: {join_and(running)}.",)


DECLARATION = declaration_of(list_backends)
