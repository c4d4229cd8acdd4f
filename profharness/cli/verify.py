"""`profharness verify`: backends and implementations against an fp64 reference."""

from __future__ import annotations

from pathlib import Path

import click

from profharness.cli._options import (
    backend_option,
    capture_progress,
    config_options,
    device_option,
    emit,
    out_option,
    output_options,
    read_configs,
    split_names,
    store_option,
)
from profharness.files import check_output


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
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0.1),
    default=120,
    show_default=True,
    help="Seconds that one case of one backend may take.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the inputs.")
@device_option
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
    from profharness.cases import STANDARD, failures
    from profharness.errors import GateError, UsageError
    from profharness.jobs import default_backends, every_backend, verify_into_store
    from profharness.run import Protocol
    from profharness.runner.capture import VerifyOptions
    from profharness.views.verify import verify_document

    configs = read_configs(config, configs_file)
    if not configs:
        raise UsageError("no config: say --config 2,8,512,64 (or --configs FILE)")
    check_output(output, force=force)
    protocol = Protocol(0, 0, 0, timeout_s, seed, device)
    options = VerifyOptions(split_names(cases) or (STANDARD,), grad, out, protocol)
    names = every_backend(split_names(backend), default_backends(device))
    with capture_progress() as progress:
        verified = verify_into_store(configs, names, store, options, progress)
    emit(verify_document(verified.rows, full=full), format_, output, force=force)
    wrong = failures(verified.rows)
    if wrong:
        told = ", ".join(dict.fromkeys(row.backend for row in wrong))
        raise GateError(f"{len(wrong)} of {len(verified.rows)} checks failed; wrong: {told}")
