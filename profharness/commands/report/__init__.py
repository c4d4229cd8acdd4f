"""`profharness report`: write stored runs as one page."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from profharness.commands._command import command, declaration_of, document
from profharness.commands._options import Option
from profharness.commands._output import FORMATS, SUFFIX_FORMATS, chosen_format, emit
from profharness.commands._types import (
    Force,
    Format,
    OutputFile,
    Store,
    complete_runs,
    store_path,
)
from profharness.commands.report.contents import report_document
from profharness.errors import UsageError
from profharness.files import atomic_file, check_output
from profharness.render.document import Chart, Document
from profharness.render.renderers import RENDERERS
from profharness.store import open_store

ReportedRuns = Annotated[str, Option(metavar="[RUN]...", complete=complete_runs)]
WithBench = Annotated[
    bool | None,
    Option(
        ("--bench/--no-bench",),
        help="Include intervals, rates and doubts.  [default: for runs of `bench`]",
    ),
]
NoCharts = Annotated[
    bool, Option(("--no-charts",), help="Leave out charts, which need the extra `report`.")
]
Images = Annotated[
    Literal["svg", "png"],
    Option(("--images",), help="Format of the charts beside a Markdown file."),
]


@dataclass(frozen=True)
class Report:
    """A report with its output file and format."""

    document: Document
    path: Path | None
    format: str | None
    force: bool


def _write_text(made: Report) -> str:
    """Write the report to its file, if it has one, and return it as text."""
    chosen = chosen_format(made.format, made.path) if made.format or made.path else "html"
    text = RENDERERS[chosen](made.document)
    if made.path is not None:
        with atomic_file(made.path, force=made.force) as file:
            file.write(text.encode())
    return text


@command("report", frame=_write_text)
def report(
    *runs: ReportedRuns,
    path: OutputFile = None,
    format: Format = None,
    force: Force = False,
    bench: WithBench = None,
    store: Store = None,
) -> Report:
    """Write a report on stored runs: cells, latency, kernels, problems, environment.

    RUN is an id, a unique prefix, latest or latest~1; the default is the latest run. For two runs, the
    report shows what changed from the first to the second. For several programs, or benchmarks on
    several classes of GPU, it has a table with one column per class. An HTML report is a single file
    that needs no network. The charts of a Markdown report are separate files: out-1.svg and so on.

    \b
    Example:
      profharness report latest -o report.html

    In Python the result is the text of the report: html, md, json, jsonl or csv.
    """
    if path is not None:
        suffix = Path(path).suffix.lower()
        if format is None and suffix not in SUFFIX_FORMATS:
            known = ", ".join(FORMATS)
            raise UsageError(f"no format {suffix[1:]!r} of a report; known are {known}")
        check_output(Path(path), force=force)
    with open_store(store_path(store)) as opened:
        made = report_document(opened, runs or ("latest",), bench=bench)
    return Report(made, None if path is None else Path(path), format, force)


@document(report)
def show(made: Report, *, no_charts: NoCharts = False, images: Images = "svg") -> None:
    """Write the report to stdout or the file, with its charts beside a Markdown file."""
    page = made.document
    if no_charts:
        kept = tuple(block for block in page.blocks if not isinstance(block, Chart))
        page = replace(page, blocks=kept)
    named = ", ".join(entry["run"] for entry in page.extra["runs"])
    about = f"run {named}" if len(page.extra["runs"]) == 1 else f"runs {named}"
    emit(replace(page, about=about), made.format, made.path, force=made.force, images=images)


DECLARATION = declaration_of(report)
