"""Write the output of commands: results to stdout or a file, hints and progress to stderr.

Commands called as Python functions or by the MCP server print nothing, since only the command line
enters `on_terminal`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click
from click.core import ParameterSource

from profharness.commands._options import Option, Parameter
from profharness.environment import missing_packages
from profharness.errors import (
    MissingExtraError,
    ProfharnessError,
    UsageError,
    one_line,
    printable,
)
from profharness.files import atomic_file, check_output
from profharness.render.document import Chart, Document
from profharness.render.renderers import RENDERERS, render_markdown

if TYPE_CHECKING:
    from profharness.jobs.into_store import Listener
    from profharness.recording.supervise import Progress, Step
    from profharness.run import Cell


FORMATS = ("table", "json", "jsonl", "csv", "md", "html")
SUFFIX_FORMATS = {**{f".{name}": name for name in FORMATS[1:]}, ".htm": "html", ".txt": "table"}
STDOUT = Path("-")
DEFAULT_WIDTH = 100  # also the maximum number of characters of `progress_line`
MEASURED = "profharness.measured"
HINTS = "profharness.hints"
_terminal = [False]


@contextlib.contextmanager
def on_terminal(shown: bool = True) -> Iterator[None]:
    """Enable hints and progress within the block, in all threads. Disable them if `shown` is False."""
    before = _terminal[0]
    _terminal[0] = shown
    try:
        yield
    finally:
        _terminal[0] = before


def check_file(ctx: click.Context, _: click.Parameter, output: Path | None) -> Path | None:
    """Return the file of -o, None for `-`.

    Raise UsageError before any work if the file could not be written, or if its name has no known
    suffix.
    """
    if ctx.resilient_parsing or ctx.params.get("deleted"):
        return output  # nothing will be written
    if output == STDOUT:
        return None
    if output is not None:
        # `export` has no --format, so its file may have any suffix
        if "format" in ctx.params and not ctx.params["format"]:
            check_suffix(output)
        check_output(output, force=ctx.params["force"])
    elif ctx.params["force"]:
        raise UsageError("--force requires -o FILE")
    return output


def check_suffix(output: Path) -> None:
    """Raise UsageError for a file whose suffix is not that of a format."""
    if output.suffix.lower() not in SUFFIX_FORMATS:
        suffixes = " ".join(SUFFIX_FORMATS)
        raise UsageError(f"-o {output}: no format has this suffix; use --format, or {suffixes}")


FORMAT_OPTION = Option(
    ("--format",),
    type=click.Choice(FORMATS),
    help="Format of the result.  [default: that of the suffix of -o, else table]",
    click={"is_eager": True},  # -o is checked against it
)
OUTPUT_OPTION = Option(
    ("-o", "--output"),
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the result to this file. `-` means stdout, the default.",
    click={"callback": check_file},
)
FORCE_OPTION = Option(
    ("--force",),
    help="Overwrite the output file if it exists.",
    click={"is_eager": True},  # the callback of -o reads it
)
OUTPUT_PARAMETERS = (
    Parameter("format", str, None, FORMAT_OPTION),
    Parameter("output", Path, None, OUTPUT_OPTION),
    Parameter("force", bool, False, FORCE_OPTION),
)
"""The parameters of each command that shows a document."""


def echo(text: str) -> None:
    """Print a line of the result to stdout, with control characters escaped."""
    click.echo(printable(text))


def hint(text: str) -> None:
    """Print a line to stderr on the command line. A stderr that cannot be written to is ignored."""
    if is_command_line():
        with contextlib.suppress(OSError):
            click.echo(printable(text), err=True)


def hint_after(text: str) -> None:
    """Print a line to stderr after the result, on the command line."""
    if is_command_line():
        click.get_current_context().meta.setdefault(HINTS, []).append(text)


def live(text: str = "") -> None:
    """Replace the last line on the terminal (stderr). An empty text clears it."""
    click.echo(f"\r\x1b[K{printable(text)}", file=_screen(), nl=False)


def _screen() -> IO[str]:
    """Return stderr for output that moves the cursor."""
    return getattr(sys.stderr, "screen", sys.stderr)


def is_command_line() -> bool:
    """Return whether the command line runs this, not Python code or an MCP tool."""
    return _terminal[0]


def chosen_format(format_: str | None, output: Path | None) -> str:
    """Return the format of --format, else that of the suffix of -o, else `table`."""
    return format_ or SUFFIX_FORMATS.get(output.suffix.lower() if output else "", "table")


def require_charts(format_: str | None, output: Path | None) -> None:
    """Raise MissingExtraError if the format needs charts and they cannot be drawn.

    Called before anything is measured.
    """
    chosen = chosen_format(format_, output)
    if missing_packages("report") and (chosen == "html" or (chosen == "md" and output is not None)):
        raise MissingExtraError("drawing a chart", "report")


@contextlib.contextmanager
def measured(*show: str) -> Iterator[None]:
    """Wrap the output of a new measurement. On an error, first report that the result is stored.

    `show` has the arguments that print the result again, without --store.
    """
    try:
        yield
    except (ProfharnessError, OSError):
        again = shlex.join(["profharness", *show, *store_arguments()])
        hint(f"what was measured is stored; see it with: {again}")
        raise


def keep_measured(*show: str) -> None:
    """Make the command report, if it cannot print its result, that the measurement is stored.

    `show` has the arguments that print the result again, without --store.
    """
    if is_command_line():
        click.get_current_context().meta[MEASURED] = show


def store_arguments() -> list[str]:
    """Return `--store FILE` if the command was called with it."""
    context = click.get_current_context()
    # the default and the environment variable also apply to the printed command
    if context.get_parameter_source("store") is not ParameterSource.COMMANDLINE:
        return []
    return ["--store", str(context.params["store"])]


def emit(
    document: Document,
    format: str | None,
    output: Path | None = None,
    *,
    force: bool = False,
    images: str = "svg",
) -> None:
    """Render the document to the file, or to stdout without one.

    Without a format the file's suffix decides; the default is `table`. `images` is the format of the
    charts beside a Markdown file, `svg` or `png`.
    """
    chosen = chosen_format(format, output)
    detail = f": {document.about}" if document.about else ""
    if chosen == "md" and output is not None:
        charts = _write_markdown(document, output, images, force=force)
        hint(f"wrote {output}" + (f" and {charts} charts beside it" if charts else "") + detail)
        return
    if chosen == "table":
        # loads rich, which only this format needs
        from profharness.render.terminal import render_table

        on_terminal = output is None and sys.stdout.isatty()
        # https://no-color.org: any value that is not empty counts
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        width = shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns
        # a file or a pipe gets no escape codes
        color = on_terminal and not plain
        text = render_table(document, width=width, cut=on_terminal, color=color)
    else:
        text = RENDERERS[chosen](document)
    if output is not None:
        with atomic_file(output, force=force) as file:
            file.write(text.encode())
        hint(f"wrote {output}{detail}")
        return
    # A table uses the terminal's encoding. The other formats are for programs and are UTF-8.
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8") if chosen == "table" else "utf-8"
    with quiet_stdout() as stream:
        # a character that the encoding lacks must not lose the whole answer
        stream.write(text.encode(encoding, "replace"))


def _write_markdown(document: Document, output: Path, images: str, *, force: bool) -> int:
    """Write the page and one picture for each chart beside it. Return the number of pictures."""
    charts = [block for block in document.blocks if isinstance(block, Chart)]
    paths = [
        output.with_name(f"{output.stem}-{number}.{images}") for number in range(1, len(charts) + 1)
    ]
    # check all of them first: an existing picture found half-way would leave a partial page
    for path in paths:
        check_output(path, force=force)
    for number, (path, chart) in enumerate(zip(paths, charts, strict=True), start=1):
        content = _picture(chart, number, images)
        with atomic_file(path, force=force) as file:
            file.write(content)
    # write the page last, so that it never refers to a missing picture
    with atomic_file(output, force=force) as file:
        file.write(render_markdown(document, images=[path.name for path in paths]).encode())
    return len(paths)


def _picture(chart: Chart, number: int, kind: str) -> bytes:
    from profharness.render.charts import draw_png, draw_svg

    return draw_png(chart) if kind == "png" else draw_svg(chart, number, alone=True).encode()


@contextlib.contextmanager
def quiet_stdout() -> Iterator[IO[bytes]]:
    """Return binary stdout for a result. Ignore a reader that closes the pipe early (`| head`)."""
    sys.stdout.flush()
    stream = sys.stdout.buffer
    try:
        yield stream
        stream.flush()
    except BrokenPipeError:
        # Buffered output would raise again when the interpreter closes stdout.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


@contextlib.contextmanager
def capture_progress() -> Iterator[Progress]:
    """Return a `Progress` for `capture`: a bar if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield _line
        return
    # rich is only loaded for a terminal
    from rich import console, progress

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
    )
    screen = console.Console(file=_screen())
    with progress.Progress(*columns, console=screen, transient=True) as bar:
        whole = bar.add_task("starting the worker", total=None)
        # each lane has its own row below the total
        lanes: dict[str, progress.TaskID] = {}

        def show(step: Step) -> None:
            if step.notice is not None:
                hint(step.notice)
                return
            now = printable(f"{_place(step.cell)}: {step.stage}")
            if step.lane and step.lane not in lanes:
                lanes[step.lane] = bar.add_task("", total=None)
            if step.lane:
                bar.update(lanes[step.lane], description=f"{printable(step.lane)}: {now}")
                now = f"{len(lanes)} lanes"
            bar.update(whole, completed=step.done, total=step.total, description=now)

        yield show


def run_listener(progress: bool | None) -> Listener:
    """Return the listener of a job: hints and a bar on the command line, else a line of progress."""
    from profharness.jobs.into_store import Listener  # loads what runs workers

    if is_command_line():
        return Listener(hint, capture_progress)
    return Listener(progress=functools.partial(progress_line, progress))


@contextlib.contextmanager
def progress_line(wanted: bool | None) -> Iterator[Progress | None]:
    """Yield a progress callback that keeps one line up to date, or None if no line is displayed.

    The line is written to stdout in a notebook, and to stderr otherwise. If `wanted` is None, the
    line is displayed only in notebooks and on terminals.
    """
    ipython = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    notebook = hasattr(ipython, "kernel")
    stream = sys.stdout if notebook else sys.stderr
    if not (wanted if wanted is not None else notebook or stream.isatty()):
        yield None
        return
    width = 0

    def show(step: Step) -> None:
        nonlocal width
        where = f"[{step.done}/{step.total}] {step.cell.config} {step.cell.backend}: {step.stage}"
        line = one_line(step.notice or where)[:DEFAULT_WIDTH]
        stream.write(f"\r{line.ljust(width)}")
        stream.flush()
        width = len(line)

    try:
        yield show
    finally:
        if width:
            stream.write("\n")


def _line(step: Step) -> None:
    cell = step.cell
    if step.notice is not None:
        hint(step.notice)
    # a log gets one line per finished cell
    elif cell.status != "pending" and step.stage == cell.status:
        lane = f"{step.lane}: " if step.lane else ""
        hint(f"[{step.done}/{step.total}] {lane}{_place(cell)}: {step.stage}")


def _place(cell: Cell) -> str:
    """Return config, backend and, for a check of `verify`, the case."""
    case = f" ({cell.case})" if cell.case else ""
    return f"{cell.config} {cell.backend}{case}"
