"""Write the output of commands: results to stdout or a file, hints and progress to stderr.

Python functions and MCP tools print no hints, because only the command line enables them with
`on_terminal`.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from profharness.commands._options import Option, Parameter
from profharness.device_types import CPU, on_gpu
from profharness.environment import missing_packages, no_gpu_cause
from profharness.errors import (
    ProfharnessError,
    UsageError,
    counted,
    install_command,
    one_line,
    printable,
    wrapped_for,
)
from profharness.files import atomic_file, check_output
from profharness.render.document import PLAIN_KINDS, Chart, Document, Note, shown_note
from profharness.render.renderers import RENDERERS, render_markdown

if TYPE_CHECKING:
    from profharness.jobs.into_store import Listener
    from profharness.recording.supervise import Progress, Step
    from profharness.run import Cell


FORMATS = ("table", "json", "jsonl", "csv", "md", "html")
SUFFIX_FORMATS = {**{f".{name}": name for name in FORMATS[1:]}, ".htm": "html", ".txt": "table"}
STDOUT = Path("-")
DEFAULT_WIDTH = 100  # also the maximum length of the line of `progress_line`
MEASURED = "profharness.measured"
WARNED = "profharness.warned"
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
    """Return the output file of -o, or None if it is `-`.

    Raise UsageError if the file cannot be written, or if neither --format nor the suffix of the file
    determines the format.
    """
    if ctx.resilient_parsing or ctx.params.get("deleted"):
        return output  # shell completion and `runs --delete` write no file
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
    """Raise UsageError if no output format has the suffix of the file."""
    if output.suffix.lower() not in SUFFIX_FORMATS:
        suffixes = " ".join(SUFFIX_FORMATS)
        raise UsageError(f"-o {output}: no format has this suffix; add --format, or use {suffixes}")


FORMAT_OPTION = Option(
    ("--format",),
    type=click.Choice(FORMATS),
    help="Format of the result. [default: the format that matches the suffix of -o, else table]",
    click={"is_eager": True},  # parsed before -o, because `check_file` reads it
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
    click={"is_eager": True},  # parsed before -o, because `check_file` reads it
)
FULL_OPTION = Option(("--full",), help="Show every column, on several lines if necessary.")
OUTPUT_PARAMETERS = (
    Parameter("full", bool, False, FULL_OPTION),
    Parameter("format", str, None, FORMAT_OPTION),
    Parameter("output", Path, None, OUTPUT_OPTION),
    Parameter("force", bool, False, FORCE_OPTION),
)
"""The output options of every command that displays a document."""


def echo(text: str) -> None:
    """Print a line of the result to stdout, with control characters escaped."""
    click.echo(printable(text))


def hint(text: str) -> None:
    """Print a message to stderr, but only on the command line. Write errors are ignored."""
    if is_command_line():
        with contextlib.suppress(OSError):
            click.echo(wrapped_for(sys.stderr, printable(text)), err=True)


def sentences(text: str) -> str:
    """Return each line of a text as a sentence, like a note below a table."""
    return "\n".join(shown_note(Note(line)).text for line in text.splitlines())


def hint_sentence(text: str) -> None:
    """Print clauses to stderr as sentences, one on each line."""
    hint(sentences(text))


def shared_release(
    gpus: Sequence[str], torch: str | None, atlas: str | os.PathLike[str] | None = None
) -> str | None:
    """Return the release to use for all GPUs of a call: `torch`, or else their default release.

    Print the default release and why it is used. Return None if no GPU is named.
    """
    named = [gpu for gpu in gpus if gpu.lower() != CPU]
    if torch is not None or not named:
        return torch
    from profharness.atlas.predictions import known_atlases, release_for  # loads numpy
    from profharness.attention.dispatch.machine import release_text

    release, note = release_for(known_atlases(atlas), named)
    hint_sentence(note)
    return release_text(release)


def hint_warning(source: str, text: str) -> None:
    """Print a warning about a source to stderr. A table that follows does not repeat the warning."""
    hint(f"warning: {source}{sentences(text)}")
    if is_command_line():
        click.get_current_context().meta.setdefault(WARNED, set()).add(text)


def _without_printed(document: Document) -> Document:
    """Return the document without notes that hint_warning already printed."""
    printed = click.get_current_context().meta.get(WARNED, ()) if is_command_line() else ()
    if not printed:
        return document
    kept = [
        block
        for block in document.blocks
        if not (isinstance(block, Note) and block.text.endswith(tuple(printed)))
    ]
    return replace(document, blocks=tuple(kept))


def hint_after(text: str) -> None:
    """Print a line to stderr after the result, but only on the command line."""
    if is_command_line():
        click.get_current_context().meta.setdefault(HINTS, []).append(text)


def hint_cpu(environment: Mapping[str, Any], device: str, effect: str) -> None:
    """Print after the result that no GPU was found, unless the user chose the CPU.

    `effect` says what this means for the result, and what to do about it.
    """
    if device != CPU and not on_gpu(environment):
        hint_after(shown_note(Note(f"{no_gpu_cause()}, so {effect}")).text)


CPU_RAN = (
    "the CPU ran these configs. To predict the times on a GPU, use: profharness predict CONFIG "
    "--gpu H200"
)
"""The effect of a missing GPU on a command that measures configs."""


def live(text: str = "") -> None:
    """Replace the last line on the terminal (stderr). An empty text clears the line."""
    click.echo(f"\r\x1b[K{printable(text)}", file=_screen(), nl=False)


def _screen() -> IO[str]:
    """Return a stderr that does not escape control characters, which can move the cursor."""
    return getattr(sys.stderr, "screen", sys.stderr)


def is_command_line() -> bool:
    """Return whether the command line runs the command, and not Python code or an MCP tool."""
    return _terminal[0]


def chosen_format(format_: str | None, output: Path | None) -> str:
    """Return the value of --format, or the format of the suffix of -o. The default is `table`."""
    return format_ or SUFFIX_FORMATS.get(output.suffix.lower() if output else "", "table")


def drawable(document: Document, chosen: str) -> Document:
    """Remove the charts that need the `report` extra, if this extra is not installed.

    Print a hint if a chart is left out.
    """
    if chosen not in ("html", "md") or not missing_packages("report"):
        return document
    plain = PLAIN_KINDS if chosen == "html" else ()
    kept = tuple(
        block for block in document.blocks if not isinstance(block, Chart) or block.kind in plain
    )
    if left_out := len(document.blocks) - len(kept):
        text = counted(left_out, "chart was", "charts were")
        hint(f"{text} left out; to draw all charts, run: {install_command('report')}")
    return replace(document, blocks=kept)


@contextlib.contextmanager
def measured(*show: str) -> Iterator[None]:
    """Wrap the output of a new measurement. If the output fails, print how to display it later.

    `show` contains the arguments that display the measurement again, without --store.
    """
    try:
        yield
    except (ProfharnessError, OSError):
        again = shlex.join(["profharness", *show, *store_arguments()])
        hint(f"the measured results are stored; to see them, use: {again}")
        raise


def keep_measured(*show: str) -> None:
    """Let the current command write its output within `measured`.

    `show` contains the arguments that display the measurement again, without --store.
    """
    if is_command_line():
        click.get_current_context().meta[MEASURED] = show


def store_arguments() -> list[str]:
    """Return `--store` and its value if the user passed this option, otherwise an empty list."""
    context = click.get_current_context()
    # The default and the environment variable also apply when the user runs the printed command.
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
    full: bool = False,
) -> None:
    """Render the document to the file, or to stdout if `output` is None.

    If `format` is None, the suffix of the file determines the format. The default is `table`. The
    charts of a Markdown file are written to separate files in the format `images` (`svg` or `png`).
    If `full` is set, a table shows every column. CSV and JSON Lines contain only the records, so
    print the caveats of the document as hints.
    """
    chosen = chosen_format(format, output)
    if output is not None or chosen == "html":
        document = drawable(document, chosen)
    detail = f": {document.about}" if document.about else ""
    if chosen == "md" and output is not None:
        charts = _write_markdown(document, output, images, force=force)
        beside = f" and {counted(charts, 'chart')} next to it" if charts else ""
        hint(f"wrote {output}{beside}{detail}")
        return
    if chosen == "table":
        # loads rich, which only this format needs
        from profharness.render.terminal import render_table

        on_terminal = output is None and sys.stdout.isatty()
        # Any value that is not empty disables colours (https://no-color.org).
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        # A file does not depend on the terminal from which it is written.
        terminal = shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns
        width = terminal if output is None else DEFAULT_WIDTH
        # escape codes are only for terminals
        color = on_terminal and not plain
        document = document if output else _without_printed(document)
        text = render_table(document, width=width, cut=on_terminal, color=color, full=full)
    else:
        text = RENDERERS[chosen](document)
    if chosen in ("csv", "jsonl"):  # these formats contain only the records
        for caveat in document.extra.get("caveats", ()):
            hint_after(sentences(caveat))
    if output is not None:
        with atomic_file(output, force=force) as file:
            file.write(text.encode())
        hint(f"wrote {output}{detail}")
        return
    # A table uses the terminal's encoding. The other formats are for programs and are UTF-8.
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8") if chosen == "table" else "utf-8"
    with quiet_stdout() as stream:
        # replace characters that the encoding lacks, because an error would lose the whole output
        stream.write(text.encode(encoding, "replace"))


def _write_markdown(document: Document, output: Path, images: str, *, force: bool) -> int:
    """Write a Markdown file, and each chart as an image beside it. Return the number of images."""
    charts = [block for block in document.blocks if isinstance(block, Chart)]
    paths = [
        output.with_name(f"{output.stem}-{number}.{images}") for number in range(1, len(charts) + 1)
    ]
    # Check all images first, so that an existing file does not leave the output incomplete.
    for path in paths:
        check_output(path, force=force)
    for number, (path, chart) in enumerate(zip(paths, charts, strict=True), start=1):
        content = _picture(chart, number, images)
        with atomic_file(path, force=force) as file:
            file.write(content)
    # Write the Markdown file last, so that it never refers to a missing image.
    with atomic_file(output, force=force) as file:
        file.write(render_markdown(document, images=[path.name for path in paths]).encode())
    return len(paths)


def _picture(chart: Chart, number: int, kind: str) -> bytes:
    from profharness.render.charts import draw_png, draw_svg

    return draw_png(chart) if kind == "png" else draw_svg(chart, number, alone=True).encode()


@contextlib.contextmanager
def quiet_stdout() -> Iterator[IO[bytes]]:
    """Yield the binary stdout. Ignore the error if the reader closes the pipe early (`| head`)."""
    sys.stdout.flush()
    stream = sys.stdout.buffer
    try:
        yield stream
        stream.flush()
    except BrokenPipeError:
        # Otherwise the buffered output would raise the error again when stdout is closed.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


@contextlib.contextmanager
def capture_progress() -> Iterator[Progress]:
    """Yield a callback that shows the progress as a bar on a terminal, otherwise as lines."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    # imported here because only terminals need rich
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
            now = printable(f"{_place(step.cell)}: {step.shown_stage}")
            if step.lane and step.lane not in lanes:
                lanes[step.lane] = bar.add_task("", total=None)
            if step.lane:
                bar.update(lanes[step.lane], description=f"{printable(step.lane)}: {now}")
                now = f"{len(lanes)} lanes"
            bar.update(whole, completed=step.done, total=step.total, description=now)

        yield show


def run_listener(progress: bool | None) -> Listener:
    """Return a listener that shows hints and the progress of a job on the command line.

    When a job is started from Python, the listener shows one line of progress. See `progress_line`
    for the values of `progress`.
    """
    from profharness.jobs.into_store import Listener  # loads the code that runs workers

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
        where = (
            f"[{step.done}/{step.total}] {step.cell.config} {step.cell.backend}: {step.shown_stage}"
        )
        line = one_line(step.notice or where)[:DEFAULT_WIDTH]
        stream.write(f"\r{line.ljust(width)}")
        stream.flush()
        width = len(line)

    try:
        yield show
    finally:
        if width:  # The answer takes the place of the line.
            stream.write(f"\r{' ' * width}\r")
            stream.flush()


class _Lines:
    """Prints one line for each finished cell, with the estimated remaining time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()

    def __call__(self, step: Step) -> None:
        cell = step.cell
        if step.notice is not None:
            hint(step.notice)
        elif cell.status != "pending" and step.stage == cell.status:
            lane = f"{step.lane}: " if step.lane else ""
            left = time_left(self._clock() - self._started, step.done, step.total)
            hint(f"[{step.done}/{step.total}] {lane}{_place(cell)}: {step.shown_stage}{left}")


MIN_ELAPSED_S = 5.0


def time_left(elapsed_s: float, done: int, total: int) -> str:
    """Return text such as `, about 2 min left`, or "" at the beginning and at the end."""
    if elapsed_s < MIN_ELAPSED_S or not 0 < done < total:
        return ""
    left = elapsed_s / done * (total - done)
    return f", about {left / 60:.0f} min left" if left >= 100 else f", about {left:.0f} s left"


def _place(cell: Cell) -> str:
    """Return the config and the backend of a cell, and the case if the cell belongs to `verify`."""
    case = f" ({cell.case})" if cell.case else ""
    return f"{cell.config} {cell.backend}{case}"
