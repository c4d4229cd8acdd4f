"""`profharness backends`: list which backends run here, and why the others cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from profharness.columns import Column
from profharness.commands._command import command, declaration_of, document
from profharness.errors import join_and
from profharness.render.document import Block, Document, Note, Table, merged_notes, record
from profharness.store import to_frame

if TYPE_CHECKING:
    import pandas as pd

    from profharness.recording.probe import BackendState


def _to_frame(states: list[BackendState]) -> pd.DataFrame:
    from profharness.recording.probe import BackendState

    return to_frame(states, BackendState)


@command("backends", frame=_to_frame)
def list_backends() -> list[BackendState]:
    """List the backends that can run on this machine, and explain why the others cannot.

    Each backend is tried on one small config in a worker process. The list includes your own
    implementations in kernels/ and those from installed packages (entry points of the group
    profharness.attention.backends).

    \b
    Example:
      profharness backends --format json
    """
    # loads the code that starts workers, which --help does not need
    from profharness.recording.probe import probe_backends

    return probe_backends()


@document(list_backends)
def show(states: list[BackendState]) -> Document:
    """Return a document with one row per backend, and the reasons why some cannot run."""
    columns = (
        Column("backend", "backend"),
        Column("runs", "runs here", importance="answer"),
        Column("device", "device", importance="detail"),
        Column("summary", "the kind of implementation", wrap=True),
    )
    rows = tuple(
        (state.backend, "yes" if state.runs else "no", state.device, state.summary)
        for state in states
    )
    notes = tuple(
        Note((state.reason or "no reason recorded").splitlines()[0], state.backend)
        for state in states
        if not state.runs
    )
    blocks: tuple[Block, ...] = (Table(columns, rows), *merged_notes(notes))
    fields = ("backend", "runs", "reason", "device", "summary", "status", "code")
    records = tuple(map(record, states))
    told = backends_answer(states)
    return Document("profharness.backends/1", "Backends", blocks, fields, records, answer=told)


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
