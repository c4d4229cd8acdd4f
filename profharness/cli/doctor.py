"""`profharness doctor`: what is installed and works."""

from __future__ import annotations

from pathlib import Path

import click

from profharness.cli._options import emit, output_options, store_option
from profharness.doctor import run_checks
from profharness.views.doctor import doctor_document


@click.command()
@output_options
@store_option
@click.pass_context
def command(
    ctx: click.Context, format_: str | None, output: Path | None, force: bool, store: Path
) -> None:
    """Check Python, torch, CUDA, GPU, driver, compilers, nsys, ncu, extras, permissions and the store.

    Whatever is missing comes with its remedy; exit code 1 if something that every capture needs is
    missing. Nothing is changed.

    \b
    Example:
      profharness doctor
    """
    # loads what starts workers, which --help does not need
    from profharness.runner.probe import probe_environment

    checks = run_checks(store, probe_environment)
    emit(doctor_document(checks), format_, output, force=force)
    ctx.exit(1 if any(check.state == "missing" for check in checks) else 0)
