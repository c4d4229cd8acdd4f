"""What the commands share: options, where results go, and the progress of a capture."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from profharness.config import (
    Config,
    expand_configs,
    grammar_lines,
    parse_config_lines,
)
from profharness.environment import lacking
from profharness.errors import MissingExtraError, ProfharnessError, UsageError, printable
from profharness.files import (
    DEFAULT_STORE,
    RUNS_FOLDER,
    STORE_VARIABLE,
    atomic_file,
    check_output,
    read_input,
)
from profharness.run import DEVICES, PROCESSES, Fleet, gpu_classes
from profharness.views.document import Chart, Document
from profharness.views.renderers import RENDERERS, render_markdown

if TYPE_CHECKING:
    from profharness.run import Cell
    from profharness.runner.supervise import Progress, Step


F = TypeVar("F", bound=Callable[..., Any])
FORMATS = ("table", "json", "jsonl", "csv", "md", "html")
SUFFIX_FORMATS = {**{f".{name}": name for name in FORMATS[1:]}, ".htm": "html", ".txt": "table"}
STDOUT = Path("-")
DEFAULT_WIDTH = 100


store_option = click.option(
    "--store",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar=STORE_VARIABLE,
    default=DEFAULT_STORE,
    show_default=True,
    show_envvar=True,
    help="The SQLite file with everything that was captured or ingested.",
)


class FiniteRange(click.FloatRange):
    """A number in a range; `nan` and `inf` lie in none."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number


def complete_backends(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """The names that go on from what was typed, the last one after a comma."""
    # every command imports this file, and a completion alone needs these names
    from profharness.backends import ALL, BACKENDS, KERNELS
    from profharness.backends.sources import implementation_names

    before, comma, last = incomplete.rpartition(",")
    names = dict.fromkeys([*BACKENDS, *implementation_names(), ALL, KERNELS])
    return [f"{before}{comma}{name}" for name in names if name.startswith(last)]


def complete_runs(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """`latest` and the stored ids that go on from what was typed; none where no store can be read."""
    from profharness.store import open_store

    path = ctx.params.get("store") or os.environ.get(STORE_VARIABLE, DEFAULT_STORE)
    names = ["latest"]
    # what is printed here would land in the line that the user is typing
    with contextlib.suppress(Exception), open_store(Path(path)) as opened:
        names += [row.run for row in opened.runs()]
    return [name for name in names if name.startswith(incomplete)]


def complete_sides(ctx: click.Context, option: click.Parameter, incomplete: str) -> list[str]:
    """What a side of a diff may be: a run or a backend."""
    runs = complete_runs(ctx, option, incomplete)
    return runs + complete_backends(ctx, option, incomplete)


backend_option = click.option(
    "--backend",
    multiple=True,
    metavar="NAME",
    shell_complete=complete_backends,
    help="auto, flash, efficient, cudnn, math, …, a set of these (flash+math), an order "
    "(cudnn-then-flash, or 'cudnn>flash' in quotes), file.py:function; all: PyTorch's own on this "
    "device; kernels: what lies in kernels/. Repeatable, or separated by commas.",
)
out_option = click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=RUNS_FOLDER.as_posix(),
    show_default=True,
    help="Where run folders go.",
)
atlas_option = click.option(
    "--atlas",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Where your own atlases lie.  [default: $XDG_DATA_HOME/profharness/atlases]",
)
driver_option = click.option(
    "--driver",
    metavar="VERSION",
    help="Of several atlases of this GPU and release that of this driver.  [default: the best]",
)
device_option = click.option(
    "--device", type=click.Choice(DEVICES), default="auto", show_default=True
)
format_option = click.option(
    "--format",
    "format_",
    type=click.Choice(FORMATS),
    is_eager=True,  # -o is checked against it
    help="How to print the result.  [default: by the name of -o, else table]",
)


def config_options(function: F, repeat: str = " Repeatable.") -> F:
    """--config (many) and --configs FILE as `config: tuple[str, ...]` and `configs_file: Path |
    None`. `{grammar}` in the command's help becomes the options of a config. repeat: what --config's
    own help says of several.
    """
    lines = "\n      ".join(grammar_lines())
    function.__doc__ = (function.__doc__ or "").replace("{grammar}", lines)
    function = click.option(
        "--configs",
        "configs_file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Read configs from a file, one a line; # starts a comment.",
    )(function)
    return click.option(
        "--config",
        multiple=True,
        metavar="CONFIG",
        help=f"batch,heads,seq_len,head_dim and more, as in 2,8,512,64,bf16,causal.{repeat}",
    )(function)


def timeout_option(default_s: float, text: str) -> Callable[[F], F]:
    """--timeout as `timeout_s: float`; text is its help."""
    return click.option(
        "--timeout",
        "timeout_s",
        type=FiniteRange(0.1),
        default=int(default_s),
        show_default=True,
        help=text,
    )


def processes_option(default: int) -> Callable[[F], F]:
    """--processes as `processes: int`."""
    return click.option(
        "--processes",
        type=click.IntRange(*PROCESSES),
        default=default,
        show_default=True,
        help="Fresh worker processes that each time every cell; intervals and verdicts then know how "
        "much processes differ.",
    )


def scheduler_options(function: F) -> F:
    """--scheduler, --gpu and --insecure as `fleet: Fleet`."""

    @functools.wraps(function)
    def command(
        *arguments: Any,
        scheduler: str | None,
        gpu: tuple[str, ...],
        insecure: bool,
        submit: bool,
        **rest: Any,
    ) -> Any:
        if submit and not (scheduler or "").startswith("slurm:"):
            raise UsageError("--submit sends the script of --scheduler slurm:FILE; name one")
        fleet = Fleet(scheduler, gpu_classes(gpu), insecure, submit)
        return function(*arguments, fleet=fleet, **rest)

    wrapped: Any = click.option(
        "--submit", is_flag=True, help="Send the script of --scheduler slurm:FILE with sbatch."
    )(command)
    wrapped = click.option(
        "--insecure", is_flag=True, help="Let a scheduler on another host be without TLS."
    )(wrapped)
    wrapped = click.option(
        "--gpu",
        multiple=True,
        metavar="CLASS",
        help="Run every config on each of these classes of GPU, such as H100,H200.",
    )(wrapped)
    return click.option(  # type: ignore[no-any-return]
        "--scheduler",
        metavar="WHERE",
        help="Run on lanes side by side: local is one a visible GPU, local:2 is two; tls://head:8786 those "
        "of a Dask scheduler; slurm:FILE writes an array job.  [default: local where there are several "
        "GPUs]",
    )(wrapped)


def gate_options(function: F) -> F:
    """--fail-on and --expect of `answers.layer_gates` as `fail_on` and `expect`, tuples of texts."""
    function = click.option(
        "--expect",
        multiple=True,
        metavar="BACKEND@GLOB",
        help="Exit 3 unless this backend ran in all modules that the glob matches, at least one: "
        "flash@'model.layers.*', or flash,cudnn@'*' for either. Repeatable.",
    )(function)
    return click.option(
        "--fail-on",
        multiple=True,
        metavar="GATE",
        help="Exit 3 on math-fallback, eager-attention, backend-changed, unseen (what ran is not "
        "told); of an observed program noop-mask, asked-not-ran too. Repeatable, or by commas.",
    )(function)


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
        if "format_" in ctx.params and not ctx.params["format_"]:
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


def output_options(function: F) -> F:
    """--format, -o and --force as `format_: str | None`, `output: Path | None`, `force: bool`."""
    return file_options(format_option(function))


def file_options(function: F) -> F:
    """-o FILE and --force as `output: Path | None` and `force: bool`."""
    function = click.option(
        # eager: the callback of -o reads it
        "--force",
        is_flag=True,
        is_eager=True,
        help="Overwrite the file of -o.",
    )(function)
    return click.option(
        "-o",
        "--output",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        callback=check_file,
        help="Write the result to a file instead of stdout, which is `-`.",
    )(function)


def read_configs(config: Sequence[str], configs_file: Path | None) -> list[Config]:
    """The configs of --config and --configs, each once. Raises UsageError naming the token that is
    wrong."""
    configs = [expanded for text in config for expanded in expand_configs(text)]
    if configs_file is not None:
        try:
            # Windows editors put a byte order mark before the first config
            text = read_input(configs_file).decode("utf-8-sig")
        except OSError as error:
            raise UsageError(
                f"--configs {configs_file}: cannot be read: {error.strerror}"
            ) from None
        except UnicodeDecodeError as error:
            raise UsageError(f"--configs {configs_file}: cannot be read: {error}") from None
        read = parse_config_lines(text.splitlines(), str(configs_file))
        if not read:
            raise UsageError(f"--configs {configs_file}: not a single config in it")
        configs += read
    # a config that is given twice is one cell, and cells keep the order of the command line
    return list(dict.fromkeys(configs))


def echo(text: str) -> None:
    """A line of the result to stdout, with escapes for what a terminal would obey."""
    click.echo(printable(text))


def hint(text: str) -> None:
    """As `echo`, to stderr, which never is part of the result; a stderr that is full fails nothing."""
    with contextlib.suppress(OSError):
        click.echo(printable(text), err=True)


def live(text: str = "") -> None:
    """A line to stderr, a terminal, in the place of the one before; nothing: clear it."""
    click.echo(f"\r\x1b[K{printable(text)}", file=_screen(), nl=False)


def _screen() -> IO[str]:
    """stderr for what moves the cursor."""
    return getattr(sys.stderr, "screen", sys.stderr)


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
    format_: str | None,
    output: Path | None = None,
    *,
    force: bool = False,
    images: str = "svg",
    about: str = "",
) -> None:
    """Render the document to the file, else to stdout. Without a format, the file's suffix
    decides, else `table`. images: what the charts beside a Markdown file are, `svg` or `png`.
    about: what a file is about, for the line that says that it was written."""
    format_ = chosen_format(format_, output)
    detail = f": {about}" if about else ""
    if format_ == "md" and output is not None:
        charts = _write_markdown(document, output, images, force=force)
        hint(f"wrote {output}" + (f" and {charts} charts beside it" if charts else "") + detail)
        return
    if format_ == "table":
        from profharness.views.terminal import render_table  # loads rich, for this format alone

        on_terminal = output is None and sys.stdout.isatty()
        # no-color.org: any value but an empty one counts
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        width = shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns
        # a file or a pipe gets no escape codes, whatever the terminal can show
        color = on_terminal and not plain
        text = render_table(document, width=width, cut=on_terminal, color=color)
    else:
        text = RENDERERS[format_](document)
    if output is not None:
        with atomic_file(output, force=force) as file:
            file.write(text.encode())
        hint(f"wrote {output}{detail}")
        return
    # people read a table in the terminal's charset; programs read the other formats, as UTF-8
    encoding = (getattr(sys.stdout, "encoding", None) or "utf-8") if format_ == "table" else "utf-8"
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
