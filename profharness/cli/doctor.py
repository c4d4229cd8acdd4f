"""`profharness doctor`: what is installed and works."""

from __future__ import annotations

from pathlib import Path

import click

from profharness import __version__
from profharness.cli._options import emit, output_options, store_option
from profharness.doctor import check_lanes, run_checks
from profharness.jobs.fleet import describe_lanes
from profharness.run import Fleet
from profharness.views.doctor import doctor_document


@click.command()
@output_options
@store_option
@click.option(
    "--scheduler",
    metavar="WHERE",
    help="Check the lanes of local or tls://head:8786 too: who is there, and what does not match.",
)
@click.option("--insecure", is_flag=True, help="Let that scheduler be without TLS.")
@click.pass_context
def command(
    ctx: click.Context,
    format_: str | None,
    output: Path | None,
    force: bool,
    store: Path,
    scheduler: str | None,
    insecure: bool,
) -> None:
    """Check Python, torch, CUDA, GPU, driver, compilers, nsys, ncu, extras, permissions and the store.

    Whatever is missing comes with its remedy; exit code 1 if something that every capture needs is
    missing. Nothing is changed.

    \b
    Examples:
      profharness doctor
      profharness doctor --scheduler tls://head:8786
    """
    # loads what starts workers, which --help does not need
    from profharness.runner.probe import probe_environment

    lanes = describe_lanes(Fleet(scheduler, insecure=insecure)) if scheduler else ()
    checks = run_checks(store, probe_environment)
    if scheduler is not None:
        checks += check_lanes(lanes, __version__)
    emit(doctor_document(checks, lanes), format_, output, force=force)
    ctx.exit(1 if any(check.state == "missing" for check in checks) else 0)
