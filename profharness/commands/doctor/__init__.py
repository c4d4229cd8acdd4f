"""`profharness doctor`: check what is installed and works."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import click

from profharness import __version__
from profharness.commands._command import command, declaration_of, document, gate
from profharness.commands._options import Option
from profharness.commands._types import Insecure, Store, store_path
from profharness.commands.doctor.checks import Check, check_lanes, run_checks
from profharness.commands.doctor.tables import doctor_document
from profharness.render.document import Document
from profharness.run import Fleet
from profharness.store import to_frame

if TYPE_CHECKING:
    import pandas as pd

CheckedScheduler = Annotated[
    str | None,
    Option(
        ("--scheduler",),
        metavar="WHERE",
        help="Also check the lanes of this scheduler, local or tls://head:8786, and list their differences.",
    ),
]


@dataclass(frozen=True)
class Examination:
    """The checks of this machine, and the lanes of a scheduler."""

    checks: list[Check]
    lanes: tuple[dict[str, Any], ...] = ()


def _to_frame(found: Examination) -> pd.DataFrame:
    return to_frame(found.checks, Check)


@command("doctor", frame=_to_frame)
def run_doctor(
    *, scheduler: CheckedScheduler = None, insecure: Insecure = False, store: Store = None
) -> Examination:
    """Check Python, torch, CUDA, GPU, driver, compilers, nsys, ncu, extras, permissions and the store.

    Each problem is printed with a remedy. The exit code is 1 if something that every capture needs is
    missing. Nothing is changed.

    \b
    Examples:
      profharness doctor
      profharness doctor --scheduler tls://head:8786

    In Python the result has one row per check, with its state and remedy.
    """
    # loads what starts workers, which --help does not need
    from profharness.recording.probe import probe_environment

    if scheduler is None:
        return Examination(run_checks(store_path(store), probe_environment))
    from profharness.jobs.fleet import describe_lanes

    lanes = describe_lanes(Fleet(scheduler, insecure=insecure))
    checks = run_checks(store_path(store), probe_environment)
    return Examination([*checks, *check_lanes(lanes, __version__)], lanes)


@document(run_doctor)
def show(found: Examination) -> Document:
    """Return the document."""
    return doctor_document(found.checks, found.lanes)


@gate(run_doctor)
def check(found: Examination) -> None:
    """Exit with 1 if something that every capture needs is missing."""
    if any(each.state == "missing" for each in found.checks):
        click.get_current_context().exit(1)


DECLARATION = declaration_of(run_doctor)
