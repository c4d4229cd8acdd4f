"""`profharness repro`: write a cell as a Python script that needs only torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import click

from profharness.attention.backends import stored_names
from profharness.attention.config import split_names
from profharness.commands._command import as_is, command, declaration_of, document
from profharness.commands._options import Option
from profharness.commands._output import hint, quiet_stdout
from profharness.commands._types import (
    Backends,
    Force,
    OneConfig,
    OutputFile,
    Store,
    complete_runs,
    config_list,
    store_path,
)
from profharness.commands.repro.program import asked_cell, repro_script, stored_cell
from profharness.files import atomic_file, check_output
from profharness.run import DEVICES, SEEDS
from profharness.store import Selection, open_store

CellRun = Annotated[
    str | None,
    Option(
        ("--run",),
        metavar="RUN",
        complete=complete_runs,
        help="A stored run that has the cell. The script has its seed, device and result.  [default: none]",
    ),
]
ScriptDevice = Annotated[
    str,
    Option(
        ("--device",),
        type=click.Choice(DEVICES),
        help="The device of the script. auto means that of the run, or without --run a GPU if there is one.",
    ),
]
Seed = Annotated[
    int | None,
    Option(
        ("--seed",),
        type=click.IntRange(*SEEDS),
        help="Seed of the inputs.  [default: the run's, else 0]",
    ),
]


@command("repro", frame=as_is)
def repro(
    configs: OneConfig = None,
    backend: Backends = None,
    *,
    run: CellRun = None,
    device: ScriptDevice = "auto",
    seed: Seed = None,
    output: OutputFile = None,
    force: Force = False,
    store: Store = None,
) -> str:
    """Write one cell as a Python script that needs only torch, for a PyTorch issue.

    The script creates the same inputs (shapes, dtype, strides, mask, seed) and calls the backend as
    profharness does. It prints PyTorch's choice, every warning, a checksum of each result and the
    time of a call. If PyTorch refuses the call, the script prints PyTorch's message and exits 1. The
    source of an implementation is included in the script.

    Without --run, --config and --backend (default: auto) define the call; nothing is measured and no
    store is read. With --run, they select a cell of that run, and the script starts with its stored
    results.

    \b
    Examples:
      profharness repro --config 2,8,512,64,bf16,causal --backend cudnn -o repro.py
      profharness repro --run latest --config 2,8,512,64 --backend flash -o repro.py

    In Python the result is the script's text.
    """
    if output is not None:
        check_output(Path(output), force=force)
    chosen, backends = config_list(configs), split_names(backend)
    if run is None:
        cell = asked_cell(chosen, backends)
    else:
        with open_store(store_path(store)) as opened:
            cell = stored_cell(opened, Selection(run, chosen, stored_names(backends)))
    cell = replace(
        cell,
        device=cell.device if device == "auto" else device,
        seed=cell.seed if seed is None else seed,
    )
    text = repro_script(cell)
    if output is not None:
        with atomic_file(Path(output), force=force) as file:
            file.write(text.encode())
    return text


@document(repro)
def show(text: str, *, output: OutputFile = None) -> None:
    """Print the script, or the command that runs the written file."""
    if output is not None:
        hint(f"wrote {output}; run it with: python {output}")
        return
    with quiet_stdout() as stream:
        stream.write(text.encode())


DECLARATION = declaration_of(repro)
