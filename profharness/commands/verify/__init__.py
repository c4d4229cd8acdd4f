"""`profharness verify`: check backends and implementations against an fp64 reference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from profharness.attention.cases import VerificationRow, failures
from profharness.attention.config import split_names
from profharness.commands._command import command, declaration_of, document, gate
from profharness.commands._options import Option
from profharness.commands._output import keep_measured, run_listener
from profharness.commands._types import (
    Backends,
    Configs,
    Device,
    GpuClasses,
    Insecure,
    Names,
    OutFolder,
    Scheduler,
    Seed,
    ShowProgress,
    Store,
    config_list,
    fleet,
    store_path,
    timeout_option,
)
from profharness.commands.verify.tables import verify_document
from profharness.errors import GateError, UsageError
from profharness.files import RUNS_FOLDER
from profharness.render.document import Document
from profharness.run import CaptureOptions, Protocol
from profharness.store import to_frame

if TYPE_CHECKING:
    import pandas as pd

    from profharness.jobs.into_store import Verified

Grad = Annotated[
    bool, Option(("--grad",), help="Also verify the gradients, as for configs with bwd.")
]
Cases = Annotated[
    Names | None,
    Option(
        ("--cases",),
        multiple=True,
        metavar="NAME",
        help="standard (default); none for only the config itself; or names of cases. Repeatable, or "
        "separated by commas.",
    ),
]
Timeout = Annotated[float, timeout_option("Time limit of one case on one backend, in seconds.")]
Full = Annotated[bool, Option(("--full",), help="Show every check, with its figures.")]


def _to_frame(verified: Verified) -> pd.DataFrame:
    return to_frame(verified.rows, VerificationRow)


@command("verify", frame=_to_frame)
def verify(
    configs: Configs,
    backends: Backends = None,
    *,
    grad: Grad = False,
    cases: Cases = None,
    timeout_s: Timeout = Protocol.timeout_s,
    seed: Seed = Protocol.seed,
    device: Device = Protocol.device,
    scheduler: Scheduler = None,
    gpu: GpuClasses = (),
    insecure: Insecure = False,
    out: OutFolder = RUNS_FOLDER,
    store: Store = None,
    progress: ShowProgress = None,
) -> Verified:
    """Check backends and implementations against an fp64 reference.

    The allowed error of a result is twice the error of plain attention in the same dtype on the same
    inputs. Each result is computed twice: on memory filled with NaN, and on memory with other
    contents. --cases standard adds odd lengths, other head counts, layouts and extreme values to each
    config. The store records wrong results, and bench does not rank them.

    The default of --backend is all,kernels: PyTorch's backends and the implementations in kernels/.
    The exit code is 3 if any result is wrong. A refused call is skipped.

    \b
    Example:
      profharness verify --config 1,4,256,64,causal --backend all,my.py:attention --grad
      profharness verify --config 2,8,512,64 --cases seq_1,large --format json

    In Python the result has one row per check. `passed` is False for a wrong result and None for a
    skipped check. Raise CaptureError if no worker starts.
    """
    # loads what runs workers, which --help does not need
    from profharness.jobs.into_store import verify_into_store

    chosen = config_list(configs)
    if not chosen:
        raise UsageError("no config: say --config 2,8,512,64 (or --configs FILE)")
    protocol = Protocol(timeout_s=timeout_s, seed=seed, device=device)
    options = CaptureOptions(
        out=Path(out),
        protocol=protocol,
        fleet=fleet(scheduler, gpu, insecure),
        cases=split_names(cases) or ("standard",),
        grad=grad,
    )
    with run_listener(progress).progress() as show_progress:
        return verify_into_store(
            chosen, split_names(backends), store_path(store), options, show_progress
        )


@document(verify)
def show(verified: Verified, *, full: Full = False) -> Document:
    """Return the document."""
    keep_measured("report", verified.run)
    return verify_document(verified.rows, full=full)


@gate(verify)
def check(verified: Verified) -> None:
    """Raise GateError if any check failed."""
    wrong = failures(verified.rows)
    if wrong:
        backends = ", ".join(dict.fromkeys(row.backend for row in wrong))
        raise GateError(f"{len(wrong)} of {len(verified.rows)} checks failed; wrong: {backends}")


DECLARATION = declaration_of(verify)
