"""`profharness kernels`: show which kernels each backend launched."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from profharness.attention.config import Config, split_names
from profharness.commands._command import command, declaration_of, document, gate, usage
from profharness.commands._options import Option
from profharness.commands._output import (
    capture_progress,
    chosen_format,
    hint,
    hint_after,
    is_command_line,
    sentences,
    shared_release,
)
from profharness.commands._runs import run_text
from profharness.commands._types import (
    EVERY_PROFILER,
    SEVERAL_VALUES,
    AtlasFolder,
    Backends,
    Configs,
    Driver,
    Format,
    Names,
    OutputFile,
    PathLike,
    RunOrConfigs,
    Store,
    complete_names,
    config_list,
    gpu_option,
    release_option,
    require_profilers,
    store_path,
)
from profharness.commands.kernels.tables import cell_notes, kernels_document, witness_document
from profharness.commands.runs import warning_notes, with_warnings
from profharness.devices import run_context
from profharness.errors import GateResult, NotFoundError, UsageError, counted, join_and
from profharness.files import shell_command
from profharness.measurements.agreement import (
    EXPECTED,
    check_expected_names,
    predicted_rows,
    unmet_expectations,
)
from profharness.render.document import Document
from profharness.rows import LAUNCH_PROFILERS, CellRow, KernelRow, preferred_profiler_rows
from profharness.store import (
    ALL_RUNS,
    KERNELS_ELSE_CELLS,
    Need,
    Selection,
    open_store,
    to_frame,
)

if TYPE_CHECKING:
    import pandas as pd

NAMES = """
Kernel names are shortened; --full lists the full names below the tables. A narrow terminal also
shortens names and hides columns. <64,64x128,w4> means head dimension 64, a tile of 64 queries x 128
keys, and 4 warps per block. m8 means 8 rows per block. split2 means that the kernel combines at
most 2 splits. knob_7 is cuDNN's number for a variant. `profharness explain-kernel NAME` describes
any name.
"""
# The first columns of the DataFrame, because pandas prints only the first and the last columns.
FRAME_COLUMNS = (
    *("config", "backend", "kernel_short", "launches_per_call", "duration_ns", "total_ns", "share"),
)


Profilers = Annotated[
    Names | None,
    Option(
        ("--profiler",),
        complete=complete_names(lambda: (*LAUNCH_PROFILERS, EVERY_PROFILER)),
        multiple=True,
        check=require_profilers,
        metavar="NAME",
        help=f"Show only the launches that this profiler recorded: {', '.join(LAUNCH_PROFILERS)}; or "
        f"compare all profilers (all). {SEVERAL_VALUES}  [default: the first of torch, nsys and ncu "
        "that the run has]",
        tool=f"{', '.join(LAUNCH_PROFILERS)}, or all to compare them.",
    ),
]
GpuName = Annotated[
    str | None,
    gpu_option(
        "Predict the kernels on another GPU from its atlas. No kernel runs and no store is read.",
        only_of="kernels",
        tool="The name of a GPU. The kernels are predicted from the atlas of this GPU.",
        tool_examples=("H200",),
    ),
]
Release = Annotated[
    str | None, release_option("kernels", "The PyTorch release to predict for; requires --gpu.")
]
Steps = Annotated[
    bool,
    Option(
        ("--breakdown",),
        old_flags=("--steps",),
        tool_name="steps",
        help="Break each call down into steps (QK^T, softmax, PV, casts, launch gaps). Also show "
        "the memory and the relative time of each backend.",
        tool="Group the kernels by step (QK^T, softmax, PV, casts, launch gaps), and also show "
        "each backend's time relative to the time of the fastest backend.",
    ),
]
Full = Annotated[
    bool,
    Option(
        ("--full",),
        help="Show every column, every range of a program's trace, and kernels that take almost no "
        "time. List the full names of the kernels below the tables. With --profiler all, also show every ncu counter.",
    ),
]
Expected = Annotated[
    tuple[str, ...],
    Option(
        ("--expect",),
        complete=complete_names(lambda: EXPECTED),
        multiple=True,
        metavar="NAME",
        check=lambda names: check_expected_names(split_names(names)),
        help="Exit with code 3 unless this backend or kernel family ran in every cell. If the option "
        "is repeated, any of the names is accepted.",
    ),
]


@dataclass(frozen=True)
class KernelsFound:
    """The selected kernels and cells. `store` is None if an atlas predicted them."""

    rows: list[KernelRow]
    cells: list[CellRow]
    store: Path | None = None
    profilers: tuple[str, ...] = ()
    """The names passed with --profiler, such as `nsys` or `all`."""
    places: Mapping[str, str] = field(default_factory=dict)
    """The short text of each place whose kernels an atlas predicted, by its complete text."""

    def warnings(self) -> dict[str, tuple[str, ...]]:
        """Return the warnings about the traces of each run."""
        if self.store is None:
            return {}
        with open_store(self.store) as opened:
            runs = {row.run for row in self.rows} | {cell.run for cell in self.cells}
            return opened.warnings(runs)

    def names(self) -> dict[str, str]:
        """Return the name of each stored run by its id, or the short texts of places."""
        if self.store is None:
            return dict(self.places)
        with open_store(self.store) as opened:
            return opened.run_names()

    def contexts(self, *, full: bool = False) -> dict[str, str]:
        """Return the device, the release and the name of each shown run by its id, or the places."""
        if self.store is None:
            return dict(self.places)
        with open_store(self.store) as opened:
            return {
                run: run_context(opened.environment(run), opened.run_name(run), full=full)
                for run in dict.fromkeys(
                    [*(c.run for c in self.cells), *(r.run for r in self.rows)]
                )
            }


def _to_frame(found: KernelsFound) -> pd.DataFrame:
    frame = to_frame(found.rows, KernelRow)
    return frame[[*FRAME_COLUMNS, *(name for name in frame.columns if name not in FRAME_COLUMNS)]]


@command(
    "kernels",
    frame=_to_frame,
    epilog=NAMES,
    tool=(
        "Use this tool to see which kernels ran for a stored config. The `cells` key lists "
        "refusals with their reasons. The tool captures nothing, so it returns an error if no "
        "run contains the config; in this case, use `explain`. If `gpu` is given, the tool does "
        "not read the store. Like `predict`, it then predicts the kernels from an atlas of that "
        "GPU."
    ),
)
def kernels(
    configs: Configs = None,
    *,
    backends: Backends = None,
    profilers: Profilers = None,
    run: RunOrConfigs = None,
    gpu: GpuName = None,
    torch: Release = None,
    driver: Driver = None,
    atlas: AtlasFolder = None,
    steps: Steps = False,
    store: Store = None,
) -> KernelsFound:
    """Show which kernels each backend launched.

    RUN is a trace file, a run folder, a stored run, or `all` for every stored run. Without RUN,
    show the latest run. Without CONFIG, show every config of the run. If CONFIG is given without
    RUN, use the latest run that has the configs; if no run has them, capture the configs first.

    The column "smem KiB" shows the shared memory of a block, and "% of smem" shows this amount as a
    share of an SM's shared memory. The column "launches/call" shows the number of launches per
    call, and "mean µs/call" shows the mean time per call, summed over the kernel's launches. With
    --full, the column "median µs/launch" shows the median time of one launch. The column "% of
    call" shows the kernel's share of the cell's time on the device, and "% occupancy" shows the
    theoretical occupancy.
    For a program's trace, the table has the columns "mean µs/launch", "total µs" and "% of GPU
    time" instead of "mean µs/call" and "% of call". If the trace has similar ranges, such as
    numbered steps, the share is that of the longest range, and its column is "% of range". With
    --gpu, "predicted µs/call" replaces "mean µs/call". `-` means that the profiler does not record
    the value.

    --profiler all compares the profilers: it shows each kernel's time under torch, nsys and ncu,
    its ncu counters, and every disagreement between the profilers that recorded the run.

    \b
    Examples:
      profharness kernels trace.json.gz
      profharness kernels 2,8,512,64 --backend auto,math --format csv
      profharness kernels 2,8,512,64 --profiler all
      profharness kernels 2,8,512,64,bf16 --gpu H200

    In Python, nothing is captured. The result has one row per kernel and launch configuration of
    each cell. Raise NotFoundError if no stored run has the configs.
    """
    named, chosen, names = split_names(profilers), config_list(configs), split_names(backends)
    if gpu is not None:
        from profharness.atlas.rows import predicted_rows as rows_of_atlas  # loads numpy

        folder = None if atlas is None else Path(atlas)
        release = shared_release([gpu], torch, folder)
        rows, cells, place, doubt = rows_of_atlas(chosen, names, gpu, release, folder, driver)
        if doubt:
            hint_after(sentences(doubt))
        return KernelsFound(rows, cells, places={place.text: place.described()})
    watched = LAUNCH_PROFILERS if EVERY_PROFILER in named else named
    if steps and len(watched) > 1:
        raise UsageError("--breakdown uses one profiler; choose it with --profiler")
    path, selection = store_path(store), select(run_text(run), chosen, names, watched)
    rows, cells = find_rows(path, selection, by_op=steps)
    if named:
        return KernelsFound(rows, cells, path, named)
    # all profilers of a run recorded the same launches, so use only one
    kept = preferred_profiler_rows(rows)
    # sorted, because the order of a set differs between processes
    if others := sorted({row.profiler for row in rows} - {row.profiler for row in kept}):
        hint_after(
            f"{', '.join(others)} recorded these kernels too; compare the profilers with "
            "--profiler all"
        )
    return KernelsFound(kept, cells, path)


@usage(kernels)
def check_options(
    *,
    profilers: Names | None = None,
    run: PathLike | None = None,
    gpu: str | None = None,
    torch: str | None = None,
    driver: str | None = None,
    atlas: PathLike | None = None,
    steps: bool = False,
) -> None:
    """Raise UsageError for options that exclude each other or have no effect."""
    if gpu is None:
        if torch or driver or atlas:
            raise UsageError(
                "--torch, --driver and --atlas require --gpu NAME, which predicts the kernels"
            )
        return
    if run is not None:
        layers = shlex.join(["profharness", "layers", os.fspath(run), "--gpu", gpu])
        raise UsageError(
            "--gpu predicts the kernels of configs, not those of a run; name the configs. To "
            f"predict the layers of a program, use: {layers}"
        )
    if profilers or steps:
        raise UsageError(
            "--gpu runs no kernel; it cannot be combined with --profiler or --breakdown"
        )


@document(kernels)
def show(
    found: KernelsFound,
    *,
    steps: Steps = False,
    full: Full = False,
    format: Format = None,
    output: OutputFile = None,
) -> Document:
    """Return the document. If the format is CSV, which omits notes, print the notes as hints."""
    if steps:
        from profharness.commands.kernels.steps import steps_document  # only --breakdown needs it

        page = steps_document(found.rows, found.cells, full=full)
    elif EVERY_PROFILER in found.profilers:
        page = witness_document(found.rows, found.cells, full=full)
    else:
        contexts = found.contexts(full=full)
        page = kernels_document(found.rows, found.cells, full=full, contexts=contexts)
    warnings = found.warnings()
    if found.store is not None:
        _hint_layers(found.store, found.rows, found.cells)
    if chosen_format(format, None if output is None else Path(output)) == "csv":
        _hint_omitted(found.cells, warnings)
    return page if found.store is None else with_warnings(page, warnings)


@gate(kernels)
def check(
    found: KernelsFound, *, expect: Expected = (), run: RunOrConfigs = None
) -> list[GateResult]:
    """Return one result, which failed unless every cell ran one of the expected backends or families."""
    expected = split_names(expect)
    if not expected:
        return []
    watched = {row.run for row in found.rows}
    # With `all`, skip the cells of runs without kernels.
    judged = [cell for cell in found.cells if cell.run in watched or run != ALL_RUNS]
    names = found.names()
    failed = unmet_expectations(expected, found.rows, judged, names)
    ran = sum(cell.status == "ok" for cell in judged)
    number = (
        counted(ran, "cell") if ran else counted(len({row.range for row in found.rows}), "range")
    )
    passed = f"{number} checked, none ran on a backend other than {' or '.join(expected)}"
    place = join_and([*dict.fromkeys(names.get(each, each) for each in sorted(watched))] or [""])
    return [GateResult(f"--expect {','.join(expected)}", place, tuple(failed), passed)]


def select(
    run: str | None,
    configs: Sequence[Config],
    backends: Sequence[str],
    profilers: Sequence[str] = (),
) -> Selection:
    """Return the selection of rows for RUN, --config, --backend and --profiler."""
    if backends:
        # This import searches for implementations, which only a filter by backend needs.
        from profharness.attention.backends import stored_names

        backends = stored_names(backends)
    return Selection(run, configs, backends, profilers)


def find_rows(
    store: Path,
    selection: Selection,
    *,
    by_op: bool = False,
    needs: Sequence[Need] = KERNELS_ELSE_CELLS,
) -> tuple[list[KernelRow], list[CellRow]]:
    """Return the kernels and cells of the selected run, by default the latest run with the configs.

    `needs` lists what the run must contain, in order of preference. On the command line, configs
    for which no run meets the first need are captured if no run is given. If the run has no
    kernels, print why.
    """
    capturing = selection.configs and selection.run is None and is_command_line()
    try:
        # An older run that has the cells but no kernels must not prevent the capture.
        chosen = needs[:1] if capturing else needs
        rows, cells = predicted_rows(store, selection, by_op=by_op, needs=chosen)
    except NotFoundError:
        if not capturing:
            raise
        from profharness.jobs.into_store import Listener, capture_missing

        selection = capture_missing(store, selection, Listener(hint, capture_progress))
        rows, cells = predicted_rows(store, selection, by_op=by_op)
    if not rows and selection.run != ALL_RUNS:
        with open_store(store) as opened:
            lack = opened.lack_of_kernels(cells[0].run)
        if lack is not None:
            hint_after(lack)
    return rows, cells


def _hint_omitted(cells: Sequence[CellRow], warnings: Mapping[str, Sequence[str]]) -> None:
    for cell in cells:
        if cell.status != "ok":
            note = cell_notes(cell, [])[0]
            hint_after(f"{cell.config} {note.label}: {note.text}")
    for note in warning_notes(warnings):
        hint_after(f"warning: {note.label}: {note.text}")


def _hint_layers(path: Path, rows: Sequence[KernelRow], cells: Sequence[CellRow]) -> None:
    runs = {row.run for row in rows}
    if cells or len(runs) != 1 or not is_command_line():
        return
    (run,) = runs
    with open_store(path) as store:
        if store.has(run, "attention calls"):
            again = shell_command("layers", store.run_reference(run), store=path)
            hint_after(f"To see the attention of this run layer by layer, use: {again}")


DECLARATION = declaration_of(kernels)
