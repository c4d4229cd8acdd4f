"""Options that several commands share, so that each is spelled and explained once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from profharness.config import Config


F = TypeVar("F", bound=Callable[..., Any])
FORMATS = ("table", "json", "jsonl", "csv", "md", "html")


def store_option(function: F) -> F:
    """--store PATH as `store: Path`."""
    return click.option(
        "--store",
        type=click.Path(dir_okay=False, path_type=Path),
        envvar="PROFHARNESS_STORE",
        default="profharness.db",
        show_default=True,
        show_envvar=True,
        help="The SQLite file with everything that was captured or ingested.",
    )(function)


def config_options(function: F) -> F:
    """--config (many) and --configs FILE as `config: tuple[str, ...]` and `configs_file: Path |
    None`."""
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
        help="batch,heads,seq_len,head_dim and more, as in 2,8,512,64,bf16,causal. Repeatable.",
    )(function)


def backend_option(function: F) -> F:
    """--backend (many, or separated by commas) as `backend: tuple[str, ...]`; see `split_names`."""
    return click.option(
        "--backend",
        multiple=True,
        metavar="NAME",
        help="auto, flash, efficient, cudnn, math, …, file.py:function; all: PyTorch's own on this "
        "device; kernels: what lies in kernels/. Repeatable, or separated by commas.",
    )(function)


def out_option(function: F) -> F:
    """--out DIRECTORY as `out: Path`."""
    return click.option(
        "--out",
        type=click.Path(file_okay=False, path_type=Path),
        default="traces/runs",
        show_default=True,
        help="Where run folders go.",
    )(function)


def device_option(function: F) -> F:
    """--device as `device: str`: auto, cuda or cpu."""
    return click.option(
        "--device", type=click.Choice(["auto", "cuda", "cpu"]), default="auto", show_default=True
    )(function)


def output_options(function: F) -> F:
    """--format, -o and --force as `format_: str | None`, `output: Path | None`, `force: bool`."""
    function = click.option(
        "--format",
        "format_",
        type=click.Choice(FORMATS),
        help="How to print the result.  [default: by the name of -o, else table]",
    )(function)
    return file_options(function)


def file_options(function: F) -> F:
    """-o FILE and --force as `output: Path | None` and `force: bool`."""
    function = click.option("--force", is_flag=True, help="Overwrite the file of -o.")(function)
    return click.option(
        "-o",
        "--output",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Write the result to a file instead of stdout.",
    )(function)


def split_names(values: Sequence[str]) -> tuple[str, ...]:
    """`("flash,math", "auto")` -> `("flash", "math", "auto")`, each name once."""
    names = (name.strip() for value in values for name in value.split(","))
    return tuple(dict.fromkeys(name for name in names if name))


def read_configs(config: Sequence[str], configs_file: Path | None) -> list[Config]:
    """The configs of --config and --configs, each once. Raises UsageError naming the token that is
    wrong."""
    from profharness.config import expand_configs, parse_config_lines
    from profharness.errors import UsageError

    found = [each for text in config for each in expand_configs(text)]
    if configs_file is not None:
        try:
            lines = configs_file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--configs {configs_file}: cannot be read: {error}") from None
        read = parse_config_lines(lines, str(configs_file))
        if not read:
            raise UsageError(f"--configs {configs_file}: not a single config in it")
        found += read
    return list(dict.fromkeys(found))
