"""`profharness scrub`: a copy of a run or a trace that is fit to publish."""

from __future__ import annotations

from pathlib import Path

import click

from profharness.cli._options import hint, quiet_stdout
from profharness.errors import GateError, TraceFormatError, UsageError


@click.command()
@click.argument("source", metavar="RUN_FOLDER_OR_FILE", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="OUT",
    help="Where the copy goes.  [default: <name>-scrubbed beside the source]",
)
@click.option("--force", is_flag=True, help="Replace an earlier copy.")
@click.option(
    "--check", is_flag=True, help="Only look for what is private; exit 3 if there is any."
)
def command(source: Path, output: Path | None, force: bool, check: bool) -> None:
    """Make a copy of a run folder or a trace that is fit to publish.

    Host and user names, passwords and tokens, paths, command lines, environment variables,
    addresses and ids of the GPU are gone; kernels, launches, ranges and times are kept. A raw
    report of nsys or ncu is replaced by its export: the one beside it if it is newer, else a new
    one. Files that run.json does not name are left out. The source is never changed, and
    a copy in which the audit still finds something is thrown away.

    \b
    Example:
      profharness scrub traces/runs/20261121-152530-4142
      profharness scrub --check traces/runs
    """
    from profharness.scrub import audit, scrub

    if check:
        if output is not None or force:
            raise UsageError("--check only reads; it goes without -o and --force")
        if not source.exists():
            raise TraceFormatError(source, "no such file or folder")
        findings = audit(source)
        with quiet_stdout() as stream:
            stream.write("".join(f"{finding}\n" for finding in findings).encode())
        if findings:
            raise GateError(
                f"{source}: {len(findings)} private thing(s); "
                "`profharness scrub` makes a copy without"
            )
        hint(f"{source}: nothing private found")
        return
    done = scrub(source, output, force=force)
    for name, instead in done.replaced:
        hint(f"replaced {name} by {instead}")
    for name in done.left_out:
        hint(f"left out {name}")
    hint(f"wrote {done.output}: {len(done.files)} file(s); the audit found nothing private")
