"""`profharness verify`: backends and implementations against an fp64 reference."""

from __future__ import annotations

from pathlib import Path

import click

from profharness.cases import failures
from profharness.cli._options import (
    backend_option,
    capture_progress,
    config_options,
    device_option,
    emit,
    measured,
    out_option,
    output_options,
    read_configs,
    scheduler_options,
    store_option,
    timeout_option,
)
from profharness.config import split_names
from profharness.errors import GateError, UsageError
from profharness.run import Fleet, Protocol, VerifyOptions
from profharness.views.verify import verify_document


@click.command()
@config_options
@backend_option
@click.option("--grad", is_flag=True, help="Verify the gradients too, as for configs with bwd.")
@click.option(
    "--cases",
    multiple=True,
    metavar="NAME",
    help="standard (default), none for the config alone, or names of cases, separated by commas.",
)
@click.option("--full", is_flag=True, help="A line for every check, with its figures.")
@timeout_option(Protocol.timeout_s, "Seconds that one case of one backend may take.")
@click.option(
    "--seed", type=int, default=Protocol.seed, show_default=True, help="Seed of the inputs."
)
@device_option
@scheduler_options
@out_option
@output_options
@store_option
def command(
    config: tuple[str, ...],
    configs_file: Path | None,
    backend: tuple[str, ...],
    grad: bool,
    cases: tuple[str, ...],
    full: bool,
    timeout_s: float,
    seed: int,
    device: str,
    fleet: Fleet,
    out: Path,
    format_: str | None,
    output: Path | None,
    force: bool,
    store: Path,
) -> None:
    """Hold backends and implementations against an fp64 reference.

    A result may be off by twice the error that plain attention in the same dtype makes on the same
    inputs, not by a constant. It is computed on memory filled with NaN, then once more on memory
    with other contents. --cases standard adds odd lengths, other head counts, layouts and extreme
    values to each config. What is wrong is kept in the store, and bench does not rank it.

    Without --backend: all,kernels, which is PyTorch's backends and what lies in kernels/. Exits
    with 3 if anything is wrong. A refusal is no pass and no failure: it is skipped.

    \b
    Example:
      profharness verify --config 1,4,256,64,causal --backend all,my.py:attention --grad
      profharness verify --config 2,8,512,64 --cases seq_1,large --format json
    """
    # loads what runs workers, which --help does not need
    from profharness.jobs import verify_into_store

    configs = read_configs(config, configs_file)
    if not configs:
        raise UsageError("no config: say --config 2,8,512,64 (or --configs FILE)")
    protocol = Protocol(timeout_s=timeout_s, seed=seed, device=device)
    options = VerifyOptions(split_names(cases) or VerifyOptions.cases, grad, out, protocol, fleet)
    with capture_progress() as progress:
        verified = verify_into_store(configs, split_names(backend), store, options, progress)
    with measured("report", verified.run):
        emit(verify_document(verified.rows, full=full), format_, output, force=force)
    wrong = failures(verified.rows)
    if wrong:
        backends = ", ".join(dict.fromkeys(row.backend for row in wrong))
        raise GateError(f"{len(wrong)} of {len(verified.rows)} checks failed; wrong: {backends}")
