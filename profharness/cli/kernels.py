"""`profharness kernels`: what each backend launched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from profharness.answers.agreement import (
    check_expected_names,
    predicted_rows,
    unmet_expectations,
)
from profharness.cli._options import (
    atlas_option,
    backend_option,
    capture_progress,
    chosen_format,
    complete_runs,
    config_options,
    driver_option,
    emit,
    hint,
    output_options,
    read_configs,
    store_option,
)
from profharness.config import Config, split_names
from profharness.errors import GateError, NotFoundError, UsageError
from profharness.files import shell_command
from profharness.rows import TRACE_PROFILERS, CellRow, KernelRow, of_first_profiler
from profharness.store import ALL_RUNS, KERNELS_ELSE_CELLS, Need, Selection, open_store
from profharness.views.document import Document
from profharness.views.kernels import cell_notes, kernels_document, witness_document
from profharness.views.runs import warning_notes, with_warnings

EVERY_PROFILER = "all"
GPU_ALONE = (
    "--torch, --driver and --atlas belong to --gpu NAME, which predicts; leave --run, --profiler and "
    "--steps out"
)
NAMES = """
Names are short ones, which only a terminal cuts; --full shows them whole. In <64,64x128,w4> stand
the head dimension, the tile of queries x keys and the warps of a block; m8,split2 are the rows of a
block and the most splits that it combines; knob_7 is cuDNN's number of a variant.
`profharness explain-kernel NAME` says any name in words.
"""


@click.command(epilog=NAMES)
@config_options
@backend_option
@click.option(
    "--profiler",
    multiple=True,
    type=click.Choice([*TRACE_PROFILERS, EVERY_PROFILER]),
    help="Only what this profiler saw; all: every profiler side by side. Repeatable.  [default: the "
    "first of torch, nsys and ncu that the run has]",
)
@click.option(
    "--run",
    "run",
    metavar="RUN",
    shell_complete=complete_runs,
    help="An id, a unique prefix, latest, latest~1 or all.  [default: the latest that has them]",
)
@click.option(
    "--gpu",
    metavar="NAME",
    help="Predict instead, by the atlas of this GPU (H200); no store is read and nothing runs.",
)
@click.option("--torch", metavar="RELEASE", help="Of --gpu: the release.  [default: the newest]")
@driver_option
@atlas_option
@click.option(
    "--full",
    is_flag=True,
    help="Kernels under their whole names, ops of next to no time too; with --profiler all every "
    "counter that ncu took.",
)
@click.option(
    "--steps",
    is_flag=True,
    help="Sum the kernels up by step (QK^T, softmax, PV, casts, launch gaps), with memory and "
    "speed-up of the backends.",
)
@click.option(
    "--expect",
    multiple=True,
    metavar="NAME",
    help="Exit 3 unless every cell ran this backend or kernel family. Repeatable: any of them.",
)
@output_options
@store_option
def command(
    config: tuple[str, ...],
    configs_file: Path | None,
    backend: tuple[str, ...],
    profiler: tuple[str, ...],
    run: str | None,
    gpu: str | None,
    torch: str | None,
    driver: str | None,
    atlas: Path | None,
    full: bool,
    steps: bool,
    expect: tuple[str, ...],
    format_: str | None,
    output: Path | None,
    force: bool,
    store: Path,
) -> None:
    """Show which kernels each backend launched.

    Without --config: every config of the latest run. With --config, the latest run that has them
    answers; if there is none, they are captured first. smem KiB is shared memory, smem% its part of
    an SM's, n/call launches per call, µs the median of one launch, µs/call the mean time of all its
    launches in a call (of a foreign trace: total µs), share% the part of the cell's time on the
    device, occ% the theoretical occupancy. A value that the profiler cannot know shows as -.

    --profiler all puts the witnesses side by side: the same kernel's time under torch, nsys and
    ncu, its counters, and every point on which they disagree; with --run all each profiler's
    newest run that has the config counts.

    \b
    Examples:
      profharness kernels --config 2,8,512,64 --backend auto,math --format csv
      profharness kernels --config 2,8,512,64 --profiler all
      profharness kernels --config 2,8,512,64,bf16 --gpu H200
    """
    profilers = TRACE_PROFILERS if EVERY_PROFILER in profiler else profiler
    check_expected_names(expected := split_names(expect))
    if gpu or torch or driver or atlas:
        if gpu is None or run is not None or profiler or steps:
            raise UsageError(GPU_ALONE)
        configs = read_configs(config, configs_file)
        rows, cells = predict_kernels(configs, split_names(backend), gpu, torch, atlas, driver)
        emit(kernels_document(rows, cells, full=full), format_, output, force=force)
        if chosen_format(format_, output) == "csv":
            _hint_omitted(cells, {})
        return _judge(expected, rows, cells, every_run=False)
    if steps and len(profilers) > 1:
        raise UsageError("--steps sums up what one profiler saw; name one with --profiler")
    selection = read_selection(run, config, configs_file, backend, profilers)
    rows, cells = find_rows(store, selection, by_op=steps)
    # each profiler of a run saw the same launches: all their rows would count them again
    if not profiler:
        rows = _first_profiler(rows)
    document = rows_document(store, rows, cells, profilers=profiler, steps=steps, full=full)
    emit(document, format_, output, force=force)
    _hint_layers(store, rows, cells)
    if chosen_format(format_, output) == "csv":
        _hint_omitted(cells, _warnings(store, rows, cells))
    return _judge(expected, rows, cells, every_run=run == ALL_RUNS)


def rows_document(
    store: Path,
    rows: Sequence[KernelRow],
    cells: Sequence[CellRow],
    *,
    profilers: Sequence[str] = (),
    steps: bool = False,
    full: bool = False,
) -> Document:
    """The selected rows as the answer of `kernels`. profilers: the names asked for, or `all`."""
    side_by_side = EVERY_PROFILER in profilers
    make = _steps_document if steps else witness_document if side_by_side else kernels_document
    return with_warnings(make(rows, cells, full=full), _warnings(store, rows, cells))


def predict_kernels(
    configs: Sequence[Config],
    backends: Sequence[str],
    gpu: str,
    torch: str | None,
    folder: Path | None = None,
    driver: str | None = None,
) -> tuple[list[KernelRow], list[CellRow]]:
    """Rows of an atlas and its model, without any store."""
    from profharness.answers.atlas.rows import predicted_rows as rows_of_atlas  # loads numpy

    rows, cells, doubt = rows_of_atlas(configs, backends, gpu, torch, folder, driver)
    if doubt:
        hint(doubt)
    return rows, cells


def _steps_document(
    rows: Sequence[KernelRow], cells: Sequence[CellRow], *, full: bool = False
) -> Document:
    from profharness.views.steps import steps_document  # for this one option

    return steps_document(rows, cells, full=full)


def _judge(
    expected: Sequence[str], rows: list[KernelRow], cells: list[CellRow], *, every_run: bool
) -> None:
    """The gate of --expect, if anything is expected. Of every run, those that have no kernels and cannot
    know are left out.
    """
    watched = {row.run for row in rows}
    judged = [cell for cell in cells if cell.run in watched or not every_run]
    failed = unmet_expectations(expected, rows, judged) if expected else []
    if failed:
        raise GateError(f"--expect {','.join(expected)} is not met: " + "\n  ".join(failed))


def read_selection(
    run: str | None,
    config: Sequence[str],
    configs_file: Path | None,
    backend: Sequence[str],
    profilers: Sequence[str] = (),
) -> Selection:
    """What --run, --config, --configs and --backend select. Raises UsageError."""
    configs, backends = read_configs(config, configs_file), split_names(backend)
    if backends:
        # finds implementations, which only a filter by backend needs
        from profharness.backends import stored_names

        backends = stored_names(backends)
    return Selection(run, configs, backends, profilers)


def find_rows(
    store: Path,
    selection: Selection,
    *,
    by_op: bool = False,
    needs: Sequence[Need] = KERNELS_ELSE_CELLS,
) -> tuple[list[KernelRow], list[CellRow]]:
    """The selected rows of the latest run that has the first of the needs that any run has.

    Configs without the first of them are captured if no run is named. A hint tells of a run without
    kernels.
    """
    capturing = selection.configs and selection.run is None
    try:
        # an older run that merely has the cells would keep the configs from being captured
        chosen = needs[:1] if capturing else needs
        rows, cells = predicted_rows(store, selection, by_op=by_op, needs=chosen)
    except NotFoundError:
        if not capturing:
            raise
        from profharness.jobs import Listener, capture_missing

        selection = capture_missing(store, selection, Listener(hint, capture_progress))
        rows, cells = predicted_rows(store, selection, by_op=by_op)
    if not rows and selection.run != ALL_RUNS:
        with open_store(store) as opened:
            lack = opened.lack_of_kernels(cells[0].run)
        if lack is not None:
            hint(lack)
    return rows, cells


def _warnings(
    store: Path, rows: Sequence[KernelRow], cells: Sequence[CellRow]
) -> dict[str, tuple[str, ...]]:
    """What was wrong with the traces of the runs that answer."""
    with open_store(store) as opened:
        return opened.warnings({row.run for row in rows} | {cell.run for cell in cells})


def _hint_omitted(cells: Sequence[CellRow], warnings: Mapping[str, Sequence[str]]) -> None:
    """What a CSV, which has rows of kernels only, does not hold."""
    for cell in cells:
        if cell.status != "ok":
            note = cell_notes(cell, [])[0]
            hint(f"{cell.config} {note.label}: {note.text}")
    for note in warning_notes(warnings):
        hint(f"warning: {note.label}: {note.text}")


def _hint_layers(path: Path, rows: Sequence[KernelRow], cells: Sequence[CellRow]) -> None:
    """Name the command that shows a program's attention, where the rows are of one program."""
    runs = {row.run for row in rows}
    if cells or len(runs) != 1:
        return
    (run,) = runs
    with open_store(path) as store:
        has_calls = store.has(run, "attention calls")
    if has_calls:
        hint(f"see its attention layer by layer with: {shell_command('layers', run, store=path)}")


def _first_profiler(rows: list[KernelRow]) -> list[KernelRow]:
    """Of each run the rows of one profiler; a hint names the others that saw it."""
    kept = of_first_profiler(rows)
    # a set's order would differ from run to run
    others = sorted({row.profiler for row in rows} - {row.profiler for row in kept})
    if others:
        hint(f"{', '.join(others)} saw these kernels too; --profiler all shows all side by side")
    return kept
