"""Types of parameters that several commands share, each with its command-line option."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import click
from click.shell_completion import CompletionItem

from profharness.attention.config import (
    FLAGS,
    KEYED,
    POSITIONS,
    SDPA_BACKENDS,
    Config,
    expand_configs,
    parse_config_lines,
    split_names,
)
from profharness.commands._options import Duration, Fraction, Option
from profharness.commands._output import FORCE_OPTION, FORMAT_OPTION, FULL_OPTION, OUTPUT_OPTION
from profharness.commands._runs import (
    RUN_TEXT,
    find_one,
    find_only,
    find_several,
    find_side,
    require_file,
)
from profharness.dtypes import CONFIG_DTYPES
from profharness.errors import UsageError
from profharness.files import (
    DEFAULT_STORE,
    RUNS_FOLDER,
    STORE_VARIABLE,
    default_store,
    read_input,
)
from profharness.rows import LAUNCH_PROFILERS
from profharness.run import (
    DEVICES,
    LONGEST_S,
    PROCESSES,
    SEEDS,
    SHORTEST_S,
    SHORTEST_SAMPLING_S,
    Fleet,
    Protocol,
    gpu_classes,
    gpu_names,
)
from profharness.stats import THRESHOLD

PathLike = str | os.PathLike[str]
Names = str | Sequence[str]
ConfigLike = str | Config | Iterable[str | Config] | None
CONFIGS_BYTES = 10_000_000  # maximum size of a file of configs
MAX_TOOL_CONFIGS = 1000  # maximum number of configs in a call of an MCP tool
EVERY_PROFILER = "all"


Complete = Callable[[click.Context, click.Parameter, str], list[str]]
"""A function that returns the completions of an incomplete word."""


def complete_backends(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Complete the last name in a list of backends, or in a set or an order of SDPA's backends."""
    # every command imports this file, but only completion needs these names
    from profharness.attention.backends import ALL, BACKENDS, KERNELS
    from profharness.attention.backends.sources import implementation_names

    before, last = _last_item(incomplete)
    joined = re.fullmatch(r"(.*(\+|>|-then-))(.*)", last)
    if joined is None:
        names = [*BACKENDS, *implementation_names(), ALL, KERNELS]
        return _continued(before, last, names)
    used = re.split(r"\+|>|-then-", joined[1])
    return _continued(before + joined[1], joined[3], [n for n in SDPA_BACKENDS if n not in used])


def complete_names(names: Callable[[], Iterable[str]]) -> Complete:
    """Return a function that completes the last name in a list of names separated by commas."""

    def complete(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
        before, last = _last_item(incomplete)
        return _continued(before, last, names())

    return complete


def _last_item(text: str) -> tuple[str, str]:
    """Split a text after its last comma."""
    before, comma, last = text.rpartition(",")
    return before + comma, last


def _continued(before: str, last: str, names: Iterable[str]) -> list[str]:
    """Return `before` with each of the names that starts with `last`. Case does not matter."""
    start = last.lower()
    return [before + name for name in dict.fromkeys(names) if name.lower().startswith(start)]


def complete_configs(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Complete the last token of a config."""
    before, last = _last_item(incomplete)
    plain = re.sub(r"\{[^{}]*\}", "", before)  # a comma in a set does not end a token
    if plain.count(",") < len(POSITIONS) or "{" in plain:
        return []  # numbers, or a set that is not closed yet
    key, equals, word = last.partition("=")
    if equals:
        option = KEYED.get(key)
        return _continued(f"{before}{key}=", word, option.allowed if option else ())
    used = {token.partition("=")[0] for token in before.split(",")}
    words = [*CONFIG_DTYPES, *FLAGS, *(f"{name}=" for name in KEYED)]
    return _continued(before, last, [each for each in words if each.rstrip("=") not in used])


def complete_gpus(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Complete the last name in a list of GPUs. GPUs with an atlas come first."""
    from profharness.atlas.data import packaged_atlases, read_atlas
    from profharness.devices import ARCHITECTURES, GPUS, find_gpu

    names: list[str] = []
    for path in packaged_atlases():
        with contextlib.suppress(Exception):  # see complete_runs
            names.append(find_gpu(read_atlas(path).machine.gpu).name)
    before, last = _last_item(incomplete)
    return _continued(before, last, [*names, *(gpu.name for gpu in GPUS), *ARCHITECTURES])


def require_one(command: str, what: str) -> Callable[[str], None]:
    """Return a function that raises UsageError for several GPUs or releases."""

    def check(value: str) -> None:
        if "," in value or ".." in value:
            raise UsageError(f"{command} predicts for one {what}; name only one {what}")

    return check


def gpu_option(
    text: str,
    *,
    only_of: str = "",
    default: str = "",
    tool: str = "",
    tool_examples: tuple[str, ...] = (),
) -> Option:
    """Return the option --gpu. `only_of` is the name of a command that accepts only one GPU."""
    names = "one GPU, such as H200" if only_of else "one GPU (H200) or several (H200,A100)"
    return Option(
        ("--gpu",),
        complete=complete_gpus,
        metavar="NAME" if only_of else "NAME,…",
        check=require_one(only_of, "GPU") if only_of else gpu_names,
        help=f"{text} Name {names}." + (f"  [default: {default}]" if default else ""),
        tool=tool + (f" The default is {default}." if default else ""),
        tool_examples=tool_examples,
    )


def complete_releases(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Complete a release of PyTorch with known rules, or the end of a range of releases."""
    from profharness.attention.dispatch.machine import RELEASES, release_text

    names = {".".join(map(str, release[:2])): None for release in sorted(RELEASES, reverse=True)}
    exact = [release_text(release) for release in RELEASES]
    start = incomplete.rfind("..") + 2 if ".." in incomplete else incomplete.rfind(",") + 1
    before, last = incomplete[:start], incomplete[start:]
    return _continued(before, last, [*names, *exact] if last.count(".") == 2 else names)


def complete_engine_releases(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Complete a release of the engine of --engine, or the end of a range of releases."""
    from profharness.attention.engines import ENGINES, rules_of

    engine = ctx.params.get("engine") or next(iter(ENGINES))
    start = incomplete.rfind("..") + 2 if ".." in incomplete else incomplete.rfind(",") + 1
    return _continued(incomplete[:start], incomplete[start:], reversed(rules_of(engine).releases))


def complete_runs(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name or the id of a stored run, `latest`, or the path of a file."""
    from profharness.store import open_store

    names = ["latest"]
    # Suppress errors, because a traceback would appear in the line that the user is typing.
    with contextlib.suppress(Exception), open_store(store_path(ctx.params.get("store"))) as opened:
        for row in opened.runs():
            names += dict.fromkeys((row.name, row.run))
    matching = [CompletionItem(name) for name in names if name.startswith(incomplete)]
    # The shell completes the path of a file. Bash forgets the items before this one.
    return [CompletionItem(incomplete, type="file"), *matching]


def complete_configs_and_runs(
    ctx: click.Context, option: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete an argument that is a config or a run."""
    configs = map(CompletionItem, complete_configs(ctx, option, incomplete))
    return [*complete_runs(ctx, option, incomplete), *configs]


def complete_sides(
    ctx: click.Context, option: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete an argument of `diff`, which is a run or a backend."""
    backends = map(CompletionItem, complete_backends(ctx, option, incomplete))
    return [*complete_runs(ctx, option, incomplete), *backends]


def store_path(store: PathLike | None) -> Path:
    """Return the path of the store. None means $PROFHARNESS_STORE or the default path."""
    return default_store() if store is None else Path(store)


def config_list(configs: ConfigLike) -> list[Config]:
    """Return the configs without duplicates. None means no configs.

    Raise UsageError for a text that is not a config, and for an empty list.
    """
    if configs is None:
        return []
    is_single = isinstance(configs, str | Config) or not isinstance(configs, Iterable)
    items: list[Any] = [configs] if is_single else [*configs]  # type: ignore[misc]
    if not items:
        raise UsageError("configs is empty")
    expanded: list[list[Config]] = []
    for item in items:
        if not isinstance(item, str | Config):
            raise UsageError(
                f"{item!r} is not a config; write a string such as '2,8,512,64', or a Config"
            )
        if isinstance(item, str) and RUN_TEXT.fullmatch(item):
            require_file(item)
            raise UsageError(
                f"{item} is not a config, such as 2,8,512,64,bf16; if it is a trace file or a "
                f"run, to show its attention, use: profharness layers {shlex.quote(item)}"
            )
        expanded.append([item] if isinstance(item, Config) else expand_configs(item))
    return list(dict.fromkeys(config for group in expanded for config in group))


def read_config_file(path: Path) -> list[Config]:
    """Return the configs in a file, one per line. Raise UsageError if a line is invalid."""
    try:
        # Windows editors put a byte order mark before the first config
        text = read_input(path, limit=CONFIGS_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"--configs {path}: cannot read the file: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--configs {path}: cannot read the file: {error}") from None
    configs = parse_config_lines(text.splitlines(), str(path))
    if not configs:
        raise UsageError(f"--configs {path}: the file contains no config")
    return configs


def tool_configs(text: str) -> list[Config]:
    """Return the configs in a text, one per line. Raise UsageError if there are too many configs."""
    configs = parse_config_lines(text.splitlines(), "config")
    if len(configs) > MAX_TOOL_CONFIGS:
        raise UsageError(
            f"{len(configs):,} configs are too many for one call; pass at most {MAX_TOOL_CONFIGS:,}"
        )
    return configs


def require_profilers(names: Names) -> None:
    """Raise UsageError for a name that is neither `all` nor a profiler that records launches."""
    for name in split_names(names):
        if name not in (*LAUNCH_PROFILERS, EVERY_PROFILER):
            known = ", ".join((*LAUNCH_PROFILERS, EVERY_PROFILER))
            raise UsageError(f"unknown profiler {name!r}; choose from {known}")


def tool_backends(text: str) -> tuple[str, ...]:
    """Return the backends that an MCP client named. Raise UsageError for a file or a module.

    A client must not choose which files the server reads.
    """
    # imported here because most commands have no backends
    from profharness.attention.backends.sources import is_source_name

    names = split_names(text)
    for name in names:
        if is_source_name(name):
            raise UsageError(
                f"backend {name!r}: MCP tools do not accept files or modules as backends"
            )
    return names


class SeedRange(click.IntRange):
    """The seeds of torch.Generator. The limits are shown as powers of two."""

    def __init__(self) -> None:
        super().__init__(*SEEDS)

    def _describe_range(self) -> str:
        return "-2^63<=x<2^64"


def config_option(repeat: str = " Repeatable.") -> Option:
    """Return the option --config. Its help text ends with `repeat`."""
    return Option(
        ("--config",),
        metavar="CONFIG",
        multiple=True,
        complete=complete_configs,
        help="A config: batch,heads,seq_len,head_dim and options, such as 2,8,512,64,bf16,causal. "
        f"Without a dtype, a config runs in fp16 on a GPU and in fp32 on a CPU.{repeat}",
        file_flag="--configs",
        file_help="Read configs from a file with one config per line. Text after # is a comment.",
        read_file=read_config_file,
        tool="An attention config, or several, one per line.",
        tool_examples=("2,8,512,64,bf16", "2,8,{64:8192:*2},128,bf16,causal"),
        tool_value=tool_configs,
    )


def backend_names(backends: Names | None) -> tuple[str, ...]:
    """Split names of backends to run. Raise UsageError for an unknown name, before a worker starts."""
    names = split_names(backends)
    if names:
        # every command imports this file, but only commands that run backends need these names
        from profharness.attention.backends import check_names

        check_names(names)
    return names


Store = Annotated[
    PathLike | None,
    Option(
        ("--store",),
        type=click.Path(dir_okay=False, path_type=Path),
        help="The SQLite file with all captured and ingested runs.",
        click={
            "default": DEFAULT_STORE,
            "envvar": STORE_VARIABLE,
            "show_default": True,
            "show_envvar": True,
        },
    ),
]
Configs = Annotated[ConfigLike, config_option()]
ConfigArguments = Annotated[ConfigLike, replace(config_option(), as_arguments="[CONFIG]...")]
"""The type of the configs of a command whose positional arguments are configs."""
OneConfig = Annotated[
    ConfigLike, config_option(" Only one config is allowed, because a script contains one cell.")
]
SEVERAL_VALUES = "Separate several values by commas, or repeat the option."
BACKEND_TEXT = (
    "A backend (such as auto, flash, efficient, cudnn or math), a set (flash+math), an order "
    "(cudnn-then-flash, or 'cudnn>flash' in quotes) or your own function (file.py:function)."
)
BACKENDS_OPTION = Option(
    ("--backend",),
    multiple=True,
    metavar="NAME",
    complete=complete_backends,
    help=f"{BACKEND_TEXT} `all` means PyTorch's own backends on this device, and `kernels` means the "
    f"backends in kernels/. {SEVERAL_VALUES}",
    tool="Use only these backends, separated by commas; files and modules are not accepted. "
    "Default: all.",
    tool_value=tool_backends,
    tool_examples=("auto,flash,math",),
)
Backends = Annotated[Names | None, BACKENDS_OPTION]


def backends_option(default: str) -> Option:
    """Return the option --backend of a command that runs the `default` backends."""
    return replace(BACKENDS_OPTION, help=f"{BACKENDS_OPTION.help}  [default: {default}]")


BackendsToRun = Annotated[Names | None, backends_option("all")]
"""Like `Backends`, for a command that runs all of PyTorch's own backends by default."""
RUN_TOOL = (
    "A stored run: an id, a unique prefix of an id, the name of an ingested file, latest or "
    "latest~1. Default: the latest run that has the requested data."
)
RUN_TOOL_EXAMPLES = ("latest", "latest~1")
RUN_WORDS = (
    "RUN is a trace file, a run folder, the name of an ingested file, a run id or its "
    "beginning, latest or latest~1. A file that is not stored yet is ingested first."
)
ONE_RUN = Option(
    metavar="[RUN]",
    complete=complete_runs,
    find=find_one,
    old_flags=("--run",),
    tool=RUN_TOOL,
    tool_examples=RUN_TOOL_EXAMPLES,
)
SEVERAL_RUNS = replace(
    ONE_RUN, metavar="[RUN]...", find=find_several, tool_value=lambda text: (text,)
)
SIDE_OPTION = Option(complete=complete_sides, find=find_side)
OneRun = Annotated[PathLike | None, ONE_RUN]
"""A run that a command shows. None means the latest run that has the data of the command."""
RunOrConfigs = Annotated[
    PathLike | None,
    replace(
        ONE_RUN,
        metavar="[CONFIG|RUN]...",
        complete=complete_configs_and_runs,
        configs="configs",
    ),
]
"""Like `OneRun`, for a command whose arguments may also be configs."""
RUN_OPTION = replace(ONE_RUN, flags=("--run",), old_flags=(), tool="", click={"hidden": True})
RunOfBackends = Annotated[
    PathLike | None, replace(RUN_OPTION, configs="configs", sides=("baseline", "candidate"))
]
"""The run of a command whose positional arguments are two sides, configs, and the run of the sides."""
RunAmongConfigs = Annotated[PathLike | None, replace(RUN_OPTION, find=find_only, configs="configs")]
"""The run of a command whose positional arguments are configs or one run."""
ConfigOrRunArguments = Annotated[
    ConfigLike,
    replace(config_option(), as_arguments="[CONFIG|RUN]...", complete=complete_configs_and_runs),
]
"""Like `ConfigArguments`, for a command that has a parameter of the type `RunAmongConfigs` or
`RunOfBackends`."""
Runs = Annotated[PathLike, SEVERAL_RUNS]
"""The type of the `*runs` parameter of a command that shows several runs."""
DEFAULT_RELEASE = "the installed release or, if the atlases of the GPU cover only other releases, the newest of them"
"""The default of --torch, for the help text and for MCP tools."""


def release_option(command: str, text: str) -> Option:
    """Return the option --torch of a command that predicts for one release."""
    return Option(
        ("--torch",),
        complete=complete_releases,
        metavar="RELEASE",
        check=require_one(command, "release"),
        help=f"{text}  [default: {DEFAULT_RELEASE}]",
        tool=f"The PyTorch release. The default is {DEFAULT_RELEASE}.",
        tool_examples=("2.11",),
    )


Driver = Annotated[
    str | None,
    Option(
        ("--driver",),
        metavar="VERSION",
        help="Use the atlas that was measured with this driver version.  [default: the best match]",
    ),
]
AtlasFolder = Annotated[
    PathLike | None,
    Option(
        ("--atlas",),
        type=click.Path(file_okay=False, path_type=Path),
        help="The folder that contains your own atlases.  [default: "
        "$XDG_DATA_HOME/profharness/atlases]",
    ),
]


def device_option(text: str, auto: str = "a GPU if there is one") -> Option:
    """Return the option --device. `auto` says what the value auto means."""
    return Option(("--device",), type=click.Choice(DEVICES), help=f"{text} `auto` means {auto}.")


Device = Annotated[str, device_option("The device to run on.")]
Seed = Annotated[int, Option(("--seed",), type=SeedRange(), help="Random seed for the inputs.")]
OutFolder = Annotated[
    PathLike,
    Option(
        ("--out",),
        type=click.Path(file_okay=False, path_type=Path),
        help="The folder in which run folders are created.",
        click={"default": RUNS_FOLDER.as_posix(), "show_default": True},
    ),
]
OutputFile = Annotated[PathLike | None, OUTPUT_OPTION]
Format = Annotated[str | None, FORMAT_OPTION]
Force = Annotated[bool, FORCE_OPTION]
Full = Annotated[bool, FULL_OPTION]
Scheduler = Annotated[
    str | None,
    Option(
        ("--scheduler",),
        metavar="WHERE",
        help="Run on several lanes in parallel. local means one lane per visible GPU, local:2 means two "
        "lanes, and tls://head:8786 means the lanes of a Dask scheduler.  [default: local if there are "
        "several GPUs]",
    ),
]
GpuClasses = Annotated[
    Names,
    Option(
        ("--run-on",),
        old_flags=("--gpu",),
        complete=complete_gpus,
        multiple=True,
        metavar="CLASS",
        help="Run every config on each of the given GPU classes, for example H100,H200.",
    ),
]
Insecure = Annotated[
    bool,
    Option(("--insecure",), help="Allow a connection without TLS to a scheduler on another host."),
]
Processes = Annotated[
    int,
    Option(
        ("--processes",),
        type=click.IntRange(*PROCESSES),
        help="Time every cell in this many fresh worker processes. With several processes, "
        "intervals and verdicts account for the variation between processes.",
    ),
]
ShowProgress = bool | None
"""Whether a Python function shows its progress. None means only on terminals and in notebooks."""


def threshold_option(text: str, tool: str = "") -> Option:
    """Return the option --threshold, the smallest relative difference that counts as a change."""
    return Option(
        ("--threshold",),
        type=Fraction(0, min_open=True),
        metavar="FRACTION",
        help=text,
        tool=tool,
        click={"default": f"{THRESHOLD:.0%}", "show_default": True},
    )


def timeout_option(text: str) -> Option:
    """Return the option --timeout, a time limit."""
    return duration_option("--timeout", text, Protocol.timeout_s, SHORTEST_S)


def duration_option(
    flag: str, text: str, default: float | None = None, shortest: float = SHORTEST_SAMPLING_S
) -> Option:
    """Return an option whose value is a duration."""
    shown = {} if default is None else {"default": f"{default:g}s", "show_default": True}
    limits = Duration(shortest, LONGEST_S)
    return Option((flag,), type=limits, metavar="DURATION", help=text, click=shown)


def fleet(
    scheduler: str | None, gpu: Names = (), insecure: bool = False, device: str = "auto"
) -> Fleet:
    """Return the scheduler and GPU classes of a run.

    Raise UsageError for a class named twice, and for a class that this host lacks, before a worker
    starts.
    """
    chosen = Fleet(scheduler, gpu_classes(gpu), insecure)
    if chosen.gpus:
        # imported here because only lanes need it
        from profharness.jobs.fleet import require_lanes

        require_lanes(chosen, device)
    return chosen
