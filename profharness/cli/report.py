"""`profharness report`: stored runs as one page to read, to send or to feed to another program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from profharness.cli._options import complete_runs, emit, output_options, store_option
from profharness.store import open_store
from profharness.views.document import Chart
from profharness.views.report import report_document


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...", shell_complete=complete_runs)
@output_options
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
    report also says what changed from the first to the second; of several programs, or of benches on
    several classes of GPU, it has a table with a column a class. An HTML report is one file that
    needs no network; beside a Markdown file its charts are files of their own, out-1.svg and so on.

    \b
    Example:
      profharness report latest -o report.html
    """
    with open_store(store) as opened:
        document = report_document(opened, runs or ("latest",), bench=bench)
    if no_charts:
        kept = tuple(block for block in document.blocks if not isinstance(block, Chart))
        document = replace(document, blocks=kept)
    named = ", ".join(entry["run"] for entry in document.extra["runs"])
    about = f"run {named}" if len(document.extra["runs"]) == 1 else f"runs {named}"
    emit(document, format_, output, force=force, images=images, about=about)
