"""What the commands share: options, where results go, and the progress of a capture."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from profharness.commands._output import (
    FORMATS,
    STDOUT,
    SUFFIX_FORMATS,
    capture_progress,
    check_file,
    chosen_format,
    echo,
    emit,
    hint,
    live,
    measured,
    quiet_stdout,
    require_charts,
    store_arguments,
)
from profharness.config import (
    Config,
    expand_configs,
    grammar_lines,
    parse_config_lines,
)
from profharness.errors import UsageError
from profharness.files import DEFAULT_STORE, RUNS_FOLDER, STORE_VARIABLE, read_input
from profharness.run import DEVICES, PROCESSES, Fleet, gpu_classes

__all__ = [
    "FORMATS",
    "STDOUT",
    "SUFFIX_FORMATS",
    "capture_progress",
    "check_file",
    "chosen_format",
    "echo",
    "emit",
    "hint",
    "live",
    "measured",
    "quiet_stdout",
    "require_charts",
    "store_arguments",
]
CONFIGS_BYTES = 10_000_000  # of a file of --configs
F = TypeVar("F", bound=Callable[..., Any])


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
        **rest: Any,
    ) -> Any:
        fleet = Fleet(scheduler, gpu_classes(gpu), insecure)
        return function(*arguments, fleet=fleet, **rest)

    wrapped: Any = click.option(
        "--insecure", is_flag=True, help="Let a scheduler on another host be without TLS."
    )(command)
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
        "of a Dask scheduler.  [default: local where there are several "
        "GPUs]",
    )(wrapped)


def gate_options(function: F) -> F:
    """--fail-on and --expect of `answers.layers.gates` as `fail_on` and `expect`, tuples of texts."""
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
            text = read_input(configs_file, limit=CONFIGS_BYTES).decode("utf-8-sig")
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
