"""Where the output of commands goes: results to stdout or a file, hints and progress to stderr.

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

from profharness.environment import lacking
from profharness.errors import MissingExtraError, ProfharnessError, UsageError, printable
from profharness.files import atomic_file, check_output
from profharness.views.document import Chart, Document
from profharness.views.renderers import RENDERERS, render_markdown

if TYPE_CHECKING:
    from profharness.jobs import Listener
    from profharness.run import Cell
    from profharness.runner.supervise import Progress, Step


FORMATS = ("table", "json", "jsonl", "csv", "md", "html")
SUFFIX_FORMATS = {**{f".{name}": name for name in FORMATS[1:]}, ".htm": "html", ".txt": "table"}
STDOUT = Path("-")
DEFAULT_WIDTH = 100
_terminal: list[bool | None] = [None]  # None: a command of Click is active in this thread


@contextlib.contextmanager
def on_terminal(shown: bool = True) -> Iterator[None]:
    """Print hints and progress within the block, in all threads; or, for False, do not."""
    before = _terminal[0]
    _terminal[0] = shown
    try:
        yield
    finally:
        _terminal[0] = before


def check_file(ctx: click.Context, _: click.Parameter, output: Path | None) -> Path | None:
    """The file of -o, None for `-`. Refuses before any work what could not be written at its end, and
    a name that says no format.
    """
    if ctx.resilient_parsing or ctx.params.get("deleted"):
        return output  # nothing will be written
    if output == STDOUT:
        return None
    if output is not None:
        # `export` has no --format, so its file may have any suffix
        formats = [ctx.params[name] for name in ("format", "format_") if name in ctx.params]
        if formats and not any(formats):
            check_suffix(output)
        check_output(output, force=ctx.params["force"])
    elif ctx.params["force"]:
        raise UsageError("--force means the file of -o; name one")
    return output


def check_suffix(output: Path) -> None:
    """Raise UsageError for a file whose name says no format."""
    if output.suffix.lower() not in SUFFIX_FORMATS:
        suffixes = " ".join(SUFFIX_FORMATS)
        raise UsageError(f"-o {output}: no format has this suffix; use --format, or {suffixes}")


FORMAT_OPTION = click.Option(
    ("format", "--format"),
    type=click.Choice(FORMATS),
    is_eager=True,  # -o is checked against it
    help="How to print the result.  [default: by the name of -o, else table]",
)
FORCE_OPTION = click.Option(
    ("--force",),
    is_flag=True,
    is_eager=True,  # the callback of -o reads it
    help="Overwrite the file of -o.",
)
OUTPUT_OPTION = click.Option(
    ("-o", "--output"),
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    callback=check_file,
    help="Write the result to a file instead of stdout, which is `-`.",
)
FILE_OPTIONS = (OUTPUT_OPTION, FORCE_OPTION)


def echo(text: str) -> None:
    """Print a line of the result to stdout, with control characters escaped."""
    click.echo(printable(text))


def hint(text: str) -> None:
    """Print a line to stderr on the command line. A stderr that cannot be written to is ignored."""
    if is_command_line():
        with contextlib.suppress(OSError):
            click.echo(printable(text), err=True)


def live(text: str = "") -> None:
    """A line to stderr, a terminal, in the place of the one before; nothing: clear it."""
    click.echo(f"\r\x1b[K{printable(text)}", file=_screen(), nl=False)


def _screen() -> IO[str]:
    """stderr for what moves the cursor."""
    return getattr(sys.stderr, "screen", sys.stderr)


def is_command_line() -> bool:
    """Return whether a command of the command line runs, not a Python function or an MCP tool."""
    shown = _terminal[0]
    return click.get_current_context(silent=True) is not None if shown is None else shown


def chosen_format(format_: str | None, output: Path | None) -> str:
    """The format of --format, else what the suffix of -o says, else `table`."""
    return format_ or SUFFIX_FORMATS.get(output.suffix.lower() if output else "", "table")


def require_charts(format_: str | None, output: Path | None) -> None:
    """Before anything is measured. Raises MissingExtraError where charts could not be drawn."""
    chosen = chosen_format(format_, output)
    if lacking("report") and (chosen == "html" or (chosen == "md" and output is not None)):
        raise MissingExtraError("drawing a chart", "report")


@contextlib.contextmanager
def measured(*show: str) -> Iterator[None]:
    """Around the output of what was just measured: an error says first that it is stored. show: the
    arguments that show it again, but for --store.
    """
    try:
        yield
    except (ProfharnessError, OSError):
        again = shlex.join(["profharness", *show, *store_arguments()])
        hint(f"what was measured is stored; see it with: {again}")
        raise


def store_arguments() -> list[str]:
    """`--store FILE`, where the command was told so."""
    context = click.get_current_context()
    # a default and the environment variable hold for the printed command as well
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
    about: str = "",
) -> None:
    """Render the document to the file, else to stdout. Without a format, the file's suffix
    decides, else `table`. images: what the charts beside a Markdown file are, `svg` or `png`.
    about: what a file is about, for the line that says that it was written."""
    chosen = chosen_format(format, output)
    detail = f": {about}" if about else ""
    if chosen == "md" and output is not None:
        charts = _write_markdown(document, output, images, force=force)
        hint(f"wrote {output}" + (f" and {charts} charts beside it" if charts else "") + detail)
        return
    if chosen == "table":
        from profharness.views.terminal import render_table  # loads rich, for this format alone

        on_terminal = output is None and sys.stdout.isatty()
        # no-color.org: any value but an empty one counts
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        width = shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns
        # a file or a pipe gets no escape codes, whatever the terminal can show
        color = on_terminal and not plain
        text = render_table(document, width=width, cut=on_terminal, color=color)
    else:
        text = RENDERERS[chosen](document)
    if output is not None:
        with atomic_file(output, force=force) as file:
            file.write(text.encode())
        hint(f"wrote {output}{detail}")
        return
    # people read a table in the terminal's charset; programs read the other formats, as UTF-8
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8") if chosen == "table" else "utf-8"
    with quiet_stdout() as stream:
        # a sign that the charset lacks must not cost the whole answer
        stream.write(text.encode(encoding, "replace"))


def _write_markdown(document: Document, output: Path, images: str, *, force: bool) -> int:
    """The page and, beside it, a picture for each of its charts; their number."""
    charts = [block for block in document.blocks if isinstance(block, Chart)]
    paths = [
        output.with_name(f"{output.stem}-{number}.{images}") for number in range(1, len(charts) + 1)
    ]
    # all of them first: an old picture found half-way would leave a page in part
    for path in paths:
        check_output(path, force=force)
    for number, (path, chart) in enumerate(zip(paths, charts, strict=True), start=1):
        content = _picture(chart, number, images)
        with atomic_file(path, force=force) as file:
            file.write(content)
    # the page comes last, so that it never names a picture that is not there
    with atomic_file(output, force=force) as file:
        file.write(render_markdown(document, images=[path.name for path in paths]).encode())
    return len(paths)


def _picture(chart: Chart, number: int, kind: str) -> bytes:
    from profharness.views.charts import draw_png, draw_svg

    return draw_png(chart) if kind == "png" else draw_svg(chart, number, alone=True).encode()


@contextlib.contextmanager
def quiet_stdout() -> Iterator[IO[bytes]]:
    """Binary stdout for a result; a reader that goes away early (`| head`) ends the writing
    without a complaint."""
    sys.stdout.flush()
    stream = sys.stdout.buffer
    try:
        yield stream
        stream.flush()
    except BrokenPipeError:
        # What is still buffered would raise once more when the interpreter closes stdout.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


@contextlib.contextmanager
def capture_progress() -> Iterator[Progress]:
    """A `Progress` for `capture`; a bar where stderr is a terminal."""
    if not sys.stderr.isatty():
        yield _line
        return
    # rich is loaded for a terminal alone
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
        # a lane has a row of its own below that of all cells
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
    """Return what hears of a job: hints and a bar on the command line, else a line of progress."""
    from profharness.jobs import Listener  # loads what runs workers
    from profharness.jobs.progress import shown

    if is_command_line():
        return Listener(hint, capture_progress)
    return Listener(progress=functools.partial(shown, progress))


def _line(step: Step) -> None:
    cell = step.cell
    if step.notice is not None:
        hint(step.notice)
    # a log gets one line a cell, when it ends
    elif cell.status != "pending" and step.stage == cell.status:
        lane = f"{step.lane}: " if step.lane else ""
        hint(f"[{step.done}/{step.total}] {lane}{_place(cell)}: {step.stage}")


def _place(cell: Cell) -> str:
    """Config and backend, and the case that a check of `verify` is of."""
    case = f" ({cell.case})" if cell.case else ""
    return f"{cell.config} {cell.backend}{case}"
