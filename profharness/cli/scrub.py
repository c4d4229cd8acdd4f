"""`profharness scrub`: a copy of a run or a trace that is fit to publish."""

from __future__ import annotations

from pathlib import Path

import click

from profharness.cli._options import complete_runs, hint, quiet_stdout, store_option
from profharness.errors import GateError, UsageError, printable


@click.command()
@click.argument("source", metavar="RUN_OR_FILE", shell_complete=complete_runs)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="OUT",
    help="Where the copy goes.  [default: <name>-scrubbed beside the source]",
)
@click.option("--force", is_flag=True, help="Replace an earlier copy.")
@click.option(
    "--check", is_flag=True, help="Only report what would be replaced; exit 3 if there is any."
)
@store_option
def command(source: str, output: Path | None, force: bool, check: bool, store: Path) -> None:
    """Make a copy of a run or a trace that is fit to publish.

    The run is a stored one (an id, a unique prefix, latest, latest~1) or a run folder; the trace
    is a file.

    The copy keeps what is known to be harmless: kernels, operators, modules, shapes, times, versions
    and known messages. All other text is replaced by `removed_1`, `removed_2` and so on, the same
    number for the same text. A raw report of nsys or ncu is replaced by its export: the one beside it
    if it is newer, else a new one. Other files are left out. The source is never changed, and a copy
    that fails its audit is deleted.

    \b
    Example:
      profharness scrub latest
      profharness scrub traces/runs/20261121-152530-4142
      profharness scrub --check traces/runs
    """
    # loads what runs workers, which --help does not need
    from profharness.jobs import find_source
    from profharness.scrub import audit, scrub

    if check:
        if output is not None or force:
            raise UsageError("--check only reads; it goes without -o and --force")
        place = find_source(source, store)
        findings = audit(place)
        with quiet_stdout() as stream:
            stream.write("".join(f"{printable(str(finding))}\n" for finding in findings).encode())
        if findings:
            raise GateError(
                f"{place}: {len(findings)} thing(s) not known to be harmless; "
                "`profharness scrub` makes a copy without"
            )
        hint(f"{place}: nothing to replace")
        return
    done = scrub(find_source(source, store), output, force=force)
    for name, instead in done.replaced:
        hint(f"replaced {name} by {instead}")
    for name in done.left_out:
        hint(f"left out {name}")
    hint(f"wrote {done.output}: {len(done.files)} file(s); the audit found nothing to replace")
