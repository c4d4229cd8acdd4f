"""`profharness repro`: a cell as a Python script of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from profharness.answers.repro import asked_cell, repro_script, stored_cell
from profharness.backends import stored_names
from profharness.cli._options import (
    backend_option,
    complete_runs,
    config_options,
    device_option,
    file_options,
    hint,
    quiet_stdout,
    read_configs,
    store_option,
)
from profharness.config import split_names
from profharness.files import atomic_file
from profharness.run import SEEDS
from profharness.store import Selection, open_store


@click.command()
@partial(config_options, repeat=" Once: a script is of one cell.")
@backend_option
@click.option(
    "--run",
    "run",
    metavar="RUN",
    shell_complete=complete_runs,
    help="A stored run that has the cell: its seed, device and result.  [default: no run is read]",
)
@device_option
@click.option(
    "--seed",
    type=click.IntRange(*SEEDS),
    help="Of the inputs.  [default: the run's, else 0]",
)
@file_options
@store_option
def command(
    config: tuple[str, ...],
    configs_file: Path | None,
    backend: tuple[str, ...],
    run: str | None,
    device: str,
    seed: int | None,
    output: Path | None,
    force: bool,
    store: Path,
) -> None:
    """Write one cell as a Python script that needs torch alone: what an issue of PyTorch wants.

    The script makes the very inputs (shapes, dtype, strides, mask, seed), calls the backend as
    profharness does, and prints PyTorch's choice, every warning, a checksum of each result and the
    time of a call. What was refused is refused there too, with PyTorch's own text, and the script
    exits 1. Files of an implementation are written into it.

    Without --run, --config and --backend (auto, if left out) say what to call; nothing is measured
    and no store is read. With --run they choose the cell of that run, and what was stored of it
    stands in the script's first lines.

    \b
    Examples:
      profharness repro --config 2,8,512,64,bf16,causal --backend cudnn -o repro.py
      profharness repro --run latest --config 2,8,512,64 --backend flash -o repro.py
    """
    configs, backends = read_configs(config, configs_file), split_names(backend)
    if run is None:
        cell = asked_cell(configs, backends)
    else:
        with open_store(store) as opened:
            cell = stored_cell(opened, Selection(run, configs, stored_names(backends)))
    if device != "auto":
        cell = replace(cell, device=device)
    if seed is not None:
        cell = replace(cell, seed=seed)
    text = repro_script(cell).encode()
    if output is None:
        with quiet_stdout() as stream:
            stream.write(text)
        return
    with atomic_file(output, force=force) as file:
        file.write(text)
    hint(f"wrote {output}; run it with: python {output}")
