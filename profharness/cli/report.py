"""`profharness report`: stored runs as one page to read, to send or to feed to another program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from profharness.cli._options import FORMATS, SUFFIX_FORMATS, emit, file_options, store_option
from profharness.errors import UsageError
from profharness.store import open_store
from profharness.views.document import Chart


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option(
    "--format",
    "format_",
    type=click.Choice(FORMATS),
    help="How to write it.  [default: by the name of -o, else table]",
)
@file_options
@click.option("--no-charts", is_flag=True, help="Leave charts out; they need the extra `report`.")
@click.option(
    "--images",
    type=click.Choice(["svg", "png"]),
    default="svg",
    show_default=True,
    help="What the charts beside a Markdown file are.",
)
@click.option(
    "--bench/--no-bench",
    default=None,
    help="With intervals, rates and doubts.  [default: for runs that `bench` made]",
)
@store_option
def command(
    runs: tuple[str, ...],
    format_: str | None,
    output: Path | None,
    force: bool,
    no_charts: bool,
    images: str,
    bench: bool | None,
    store: Path,
) -> None:
    """Write a report on stored runs: cells, latency, kernels, problems, environment.

    RUN is an id, a unique prefix, latest or latest~1; the latest if none is given. Of two runs the
    report also says what changed from the first to the second. An HTML report is one file that
    needs no network; beside a Markdown file its charts are files of their own, out-1.svg and so on.

    \b
    Example:
      profharness report latest -o report.html
    """
    from profharness.views.report import report_document

    if format_ is None and output is not None:
        format_ = SUFFIX_FORMATS.get(output.suffix.lower())
        if format_ is None:
            suffixes = " ".join(SUFFIX_FORMATS)
            raise UsageError(f"-o {output}: no format has this suffix; use --format, or {suffixes}")
    with open_store(store) as opened:
        document = report_document(opened, runs or ("latest",), bench=bench)
    if no_charts:
        kept = tuple(block for block in document.blocks if not isinstance(block, Chart))
        document = replace(document, blocks=kept)
    emit(document, format_ or "table", output, force=force, images=images)
