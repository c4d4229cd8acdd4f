"""`profharness repro`: write a cell as a Python script that needs only torch.

The script creates the same inputs and makes the same call as a capture, because both use the
functions of backends/base.py.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partialmethod
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from profharness import __version__
from profharness.attention.backends import ALL, KERNELS, find_backend, stored_names
from profharness.attention.backends.base import (
    Backend,
    build_inputs,
    call_arguments,
    choice_arguments,
    leaf_names,
    outside_contract,
)
from profharness.attention.backends.sources import (
    OPTIONAL,
    find_implementation,
    fingerprint,
    parts_of,
)
from profharness.attention.config import (
    Config,
    parse_config,
    require_configs,
    sdpa_setting,
    split_names,
)
from profharness.attention.dispatch.advice import setting_code, window_condition
from profharness.commands._command import as_is, command, declaration_of, document
from profharness.commands._options import Option
from profharness.commands._output import hint, quiet_stdout
from profharness.commands._runs import has_run, run_text
from profharness.commands._types import (
    BACKEND_TEXT,
    BACKENDS_OPTION,
    Force,
    Names,
    OneConfig,
    OutputFile,
    RunOrConfigs,
    SeedRange,
    Store,
    config_list,
    device_option,
    store_path,
)
from profharness.commands.repro.texts import (
    ACTIVATED,
    COMPILED,
    DISABLED,
    FILE,
    FIRST_CHOICE,
    FLEX,
    PLAIN,
    REFUSED,
    SCRIPT,
    SDPA,
)
from profharness.device_types import CUDA
from profharness.dtypes import DTYPES
from profharness.errors import (
    UsageError,
    join_and,
    join_few,
    one_line,
    printable,
)
from profharness.files import atomic_file, check_output
from profharness.rows import NAIVE_COMPILED, CellRow
from profharness.run import SEED
from profharness.store import ALL_RUNS, Selection, open_store
from profharness.units import time_text

SHOWN = 6  # maximum number of candidates that an error lists
_OWN_IMPORT = re.compile(r"^(?:from|import) profharness\b", re.MULTILINE)
_DERIVED = ("key_batch", "output_batch", "mask_dims", "value_dim", "label")

OneBackend = Annotated[
    Names | None,
    replace(
        BACKENDS_OPTION,
        help=f"{BACKEND_TEXT} A script runs one backend.  [default: auto; with RUN, that of the cell]",
        tool="",
    ),
]
ScriptDevice = Annotated[
    str,
    device_option(
        "The device on which the script runs.", "the device of RUN, else a GPU if there is one"
    ),
]
Seed = Annotated[
    int | None,
    Option(
        ("--seed",),
        type=SeedRange(),
        help=f"Random seed for the inputs.  [default: the run's seed, else {SEED}]",
    ),
]


@command("repro", frame=as_is)
def repro(
    configs: OneConfig = None,
    backend: OneBackend = None,
    *,
    run: RunOrConfigs = None,
    device: ScriptDevice = "auto",
    seed: Seed = None,
    output: OutputFile = None,
    force: Force = False,
    store: Store = None,
) -> str:
    """Write one cell as a Python script that needs only torch.

    The script can be attached to a PyTorch issue. It creates the same inputs as profharness
    (shapes, dtype, strides, mask, seed) and calls the backend in the same way. The script prints
    PyTorch's choice, every warning, a checksum of each result and the time of a call. If PyTorch
    refuses the call, the script prints PyTorch's message and exits with code 1. If the backend is a
    function in a file, the script includes the source of the file.

    If only CONFIG is given, the call is defined by CONFIG and --backend (default: auto); nothing is
    measured and no store is read. If RUN is given, CONFIG and --backend select a cell of that run,
    and the script contains the seed, the device and the results of the cell. Without CONFIG and RUN,
    the latest run with cells is used.

    \b
    Examples:
      profharness repro 2,8,512,64,bf16,causal --backend cudnn -o repro.py
      profharness repro latest 2,8,512,64 --backend flash -o repro.py

    In Python the result is the script's text.
    """
    if output is not None:
        check_output(Path(output), force=force)
    chosen, names = config_list(configs), split_names(backend)
    if run is None and (chosen or not has_run("cells", store_path(store))):
        require_configs(chosen, runs=True)
        if len(chosen) > 1:
            raise UsageError(f"a script contains one cell; name one config, not {len(chosen)}")
        if len(names) > 1 or {*names} & {ALL, KERNELS}:
            named = ",".join(names)
            raise UsageError(
                f"a script runs only one backend, not {named}; name one with --backend"
            )
        text = repro_script(
            chosen[0], names[0] if names else "auto", device, SEED if seed is None else seed
        )
    else:
        text = _stored_script(
            store_path(store), Selection(run_text(run), chosen, stored_names(names)), device, seed
        )
    if output is not None:
        with atomic_file(Path(output), force=force) as file:
            file.write(text.encode())
    return text


@document(repro)
def show(text: str, *, output: OutputFile = None) -> None:
    """Print the script. If it was written to a file, print the command that runs the file."""
    if output is not None:
        hint(f"wrote {output}; to run it, use: python {output}")
        return
    with quiet_stdout() as stream:
        stream.write(text.encode())


def _stored_script(path: Path, selection: Selection, device: str, seed: int | None) -> str:
    """Return the script of the selected cell. Raise UsageError if several cells are selected."""
    with open_store(path) as store:
        run = store.find_runs(selection, "cells", "run")
        cells = store.cells(
            run, configs=selection.configs or None, backends=selection.backends or None
        )
        if not cells:
            if run != ALL_RUNS:
                store.require_cells(run, selection.configs, selection.backends)
            raise store.no_such_cell(run)
        if len(cells) > 1:
            named = [f"{cell.config} {cell.backend}" for cell in cells]
            raise UsageError(
                f"{len(named)} cells of run {store.run_name(run)} match; choose one with CONFIG and --backend: "
                f"{join_few(named, SHOWN)}"
            )
        (cell,) = cells
        environment = store.environment(cell.run)
        if device == "auto":
            device = environment.get("device_type", "auto")
        if seed is None:
            seed = store.protocol(cell.run).get("seed", SEED)
    record = _record(cell, environment)
    return repro_script(parse_config(cell.config), cell.backend, device, seed, record)


def _record(cell: CellRow, environment: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines about the stored results of a cell and about its machine."""
    keys = ("torch", "torch_git", "torch_cuda", "gpu", "cudnn", "driver", "cpu", "triton")
    place = ", ".join(f"{key} {environment[key]}" for key in keys if environment.get(key))
    yield f"Run {cell.run}: {cell.status}" + (f": {cell.message}" if cell.message else "")
    yield from (f"Refusal {refusal.code}: {refusal.message}" for refusal in cell.refusals)
    if cell.choice:
        yield f"Choice: {cell.choice}"
    for name, samples in cell.samples.items():
        if samples:
            yield f"Time, {name}: median {time_text(statistics.median(samples))} of {len(samples)}"
    yield f"Environment: {place}"
    if environment.get("env"):
        texts = (f"{name}={value}" for name, value in environment["env"].items())
        yield f"Variables: {' '.join(texts)}"
    code = (environment.get("backend_code") or {}).get(cell.backend)
    if code and fingerprint(find_backend(cell.backend)) != code:
        yield (
            f"The code of {cell.backend} has changed since this run, when its fingerprint was "
            f"{code}"
        )


def repro_script(
    config: Config,
    backend_name: str,
    device: str = "auto",
    seed: int = SEED,
    record: Iterable[str] = (),
) -> str:
    """Return the script of a cell. `record` contains lines about the stored results of the cell.

    `device` is `cuda`, `cpu` or `auto`. Raise UsageError for a backend that scripts do not support.
    """
    backend = find_backend(backend_name)
    config = config.resolve(device) if device != "auto" else config
    needs, setup = _setup(backend, config, device)
    own = backend.load is not None
    mask = TensorText("mask")
    dtype = 'torch.float16 if DEVICE == "cuda" else torch.float32'
    if config.dtype:
        dtype = f"torch.{DTYPES[config.dtype].torch}"
    automatic = '"cuda" if torch.cuda.is_available() else "cpu"'
    choice = "" if own else f"    print_choice({_keywords(choice_arguments(config, mask))})\n"
    call, results = "(forward(),)", ["output"]
    if config.bwd:
        leaves = leaf_names(config)
        call = f"torch.autograd.grad(forward(), ({', '.join(leaves)}), grad)"
        results = [f"grad_{name}" for name in leaves]
    notes = (f"Written by profharness {__version__}; needs {needs}.", *record)
    return SCRIPT.format(
        title=one_line(f"{config.label} on {backend.name}"),
        notes="\n".join(f"# {one_line(note)}" for note in notes),
        device=automatic if device == "auto" else f'"{device}"',
        dtype=dtype,
        seed=seed,
        deterministic=config.deterministic,
        setup=setup,
        inputs="\n".join(_inputs(config) if own else chain(_inputs(config), _window(config))),
        arguments=_keywords(call_arguments(config, mask, own=own)),
        choice=choice,
        call=call,
        names=", ".join(f'"{name}"' for name in results),
    )


def _setup(backend: Backend, config: Config, device: str) -> tuple[str, str]:
    """Return the script's requirements, and the source that defines `attention` and `context`."""
    name = backend.name
    if config.is_served or config.sinks or (config.softcap and backend.source is None):
        texts = join_and([text for name, text in config.features.items() if name != "window"])
        raise UsageError(f"--backend {name}: repro has no script for {texts}")
    if backend.load is None and (reason := backend.supports(config)):
        raise UsageError(f"--backend {name}: {reason}")
    if name == "auto":
        return "torch alone", PLAIN
    if name == "all-disabled":
        return "torch alone", DISABLED
    if (setting := sdpa_setting(name)) is not None:
        before = FIRST_CHOICE if setting.ordered else ""
        return "torch alone", SDPA.format(before=before, kernel=setting_code(setting))
    if backend.source is not None:
        return _source(backend.source, config)
    reason = backend.supports(config.resolve(CUDA))
    if device not in (*backend.devices, "auto"):
        reason = f"profharness does not run {name} on {device}"
    refused = REFUSED.format(text=f"refused: {reason}") if reason else ""
    if name in ("fa3", "fa4"):
        needs = "torch and FlashAttention's package"
        return needs, refused + ACTIVATED.format(impl=name.upper())
    if name in ("flex", "flex-flash"):
        options = {"BACKEND": "FLASH"} if name == "flex-flash" else None
        attended = "j <= i" if config.window is None else window_condition(config)
        return "torch and triton", refused + FLEX.format(options=options, attended=attended)
    if name == NAIVE_COMPILED and (plain := find_implementation("naive")) and plain.source:
        _, text = _source(plain.source, config)
        return "torch and triton", refused + text + COMPILED
    raise UsageError(
        f"--backend {name}: repro supports PyTorch's own backends, flex and implementations "
        "in files, but has no script for backends of other packages"
    )


def _source(source: str, config: Config) -> tuple[str, str]:
    """Return the script's requirements, and the source that loads an implementation.

    The source contains the files of the implementation, or imports a module of a package.
    """
    place, _, function = source.rpartition(":")
    properties = {field.name: getattr(config, field.name) for field in fields(config)}
    properties |= {name: getattr(config, name) for name in _DERIVED}
    asked = FILE.format(
        properties=",\n    ".join(f"{name}={value!r}" for name, value in properties.items()),
        function=function,
        reason=outside_contract(config, OPTIONAL),
        load="{load}",
    )
    if not place.endswith(".py"):
        return f"torch and {place.partition('.')[0]}", asked.replace(
            "{load}", f"module = importlib.import_module({place!r})"
        )
    file = Path(place)
    parts = {path.resolve(): content for path, content in parts_of(file).items()}
    root = os.path.commonpath([path.parent for path in parts])
    texts = {}
    for path in sorted(parts):
        try:
            texts[os.path.relpath(path, root)] = parts[path].decode()
        except UnicodeDecodeError:
            raise UsageError(f"{path.name} is not UTF-8 text, so repro cannot include it") from None
    needs = "profharness[kernels]" if any(map(_OWN_IMPORT.search, texts.values())) else "torch"
    written = "".join(f"    {name!r}: {_literal(text)},\n" for name, text in texts.items())
    main = os.path.relpath(file.resolve(), root)
    load = f"FILES = {{\n{written}}}\nmodule = module_of(FILES, {main!r})"
    return f"{needs}, and what the file imports", asked.replace("{load}", load)


def _literal(text: str) -> str:
    """Return a text as a Python literal, if possible as a raw string."""
    if printable(text) == text and "'''" not in text and not text.endswith(("'", "\\")):
        return f"r'''{text}'''"
    return repr(text)


@dataclass
class TensorText:
    """A substitute for a tensor that records the Python expression that creates the tensor."""

    text: str
    lines: list[str] = field(default_factory=list)  # statements before the expression

    def __repr__(self) -> str:
        return self.text

    def _then(self, operation: str, *arguments: object) -> TensorText:
        named = ", ".join(map(repr, arguments))
        return TensorText(f"{self.text}.{operation}({named})", self.lines)

    as_strided = partialmethod(_then, "as_strided")
    expand = partialmethod(_then, "expand")
    requires_grad_ = partialmethod(_then, "requires_grad_")
    transpose = partialmethod(_then, "transpose")
    view = partialmethod(_then, "view")

    def __getitem__(self, index: object) -> TensorText:
        return TensorText(f"{self.text}[{_index(index)}]", self.lines)

    def __setitem__(self, index: object, value: object) -> None:
        self.lines += [f"mask = {self.text}", f"mask[{_index(index)}] = {value!r}"]
        self.text = "mask"


def _index(index: object) -> str:
    if isinstance(index, tuple):
        return ", ".join(map(_index, index))
    if isinstance(index, slice):
        ends = ["" if end is None else str(end) for end in (index.start, index.stop)]
        return ":".join([*ends, *([] if index.step is None else [str(index.step)])])
    return "..." if index is Ellipsis else repr(index)


def _inputs(config: Config) -> Iterator[str]:
    """Yield statements that create the inputs in the same order as the worker.

    The script draws the same random numbers only in this order.
    """

    def filled(name: str) -> Callable[..., TensorText]:
        return lambda *shape: TensorText(f"{name}({', '.join(map(str, shape))})")

    inputs = build_inputs(config, filled("normal"), filled("kept"))
    for name in (item.name for item in fields(inputs)):
        made = getattr(inputs, name)
        if isinstance(made, TensorText):
            yield from made.lines
        if repr(made) != name and (name == "mask" or made is not None):
            yield f"{name} = {made!r}"


def _window(config: Config) -> Iterator[str]:
    """Yield statements that create the mask of a window, if the config has a window."""
    if config.window is not None:
        yield f"i = torch.arange({config.seq_len_q}, device=DEVICE)[:, None]"
        yield f"j = torch.arange({config.seq_len_kv}, device=DEVICE)"
        yield f"mask = {window_condition(config)}"


def _keywords(arguments: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


DECLARATION = declaration_of(repro)
