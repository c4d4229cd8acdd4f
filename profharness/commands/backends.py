"""`profharness backends`: list which backends run here, and why the others cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from profharness.commands._command import command, declaration_of, document
from profharness.commands.doctor.tables import backends_document
from profharness.render.document import Document
from profharness.store import to_frame

if TYPE_CHECKING:
    import pandas as pd

    from profharness.recording.probe import BackendState


def _to_frame(states: list[BackendState]) -> pd.DataFrame:
    from profharness.recording.probe import BackendState

    return to_frame(states, BackendState)


@command("backends", frame=_to_frame)
def list_backends() -> list[BackendState]:
    """List which backends run here, and why the others cannot.

    Each backend is tried on one small config in a worker process. The list includes your own
    implementations in kernels/ and those of installed packages (entry points of the group
    profharness.attention.backends).

    \b
    Example:
      profharness backends --format json
    """
    # loads what starts workers, which --help does not need
    from profharness.recording.probe import probe_backends

    return probe_backends()


@document(list_backends)
def show(states: list[BackendState]) -> Document:
    """Return the document."""
    return backends_document(states)


DECLARATION = declaration_of(list_backends)
