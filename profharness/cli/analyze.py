"""`profharness analyze`: what holds each backend back, with the evidence."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from profharness.cli._options import (
    backend_option,
    config_options,
    emit,
    hint,
    output_options,
    read_configs,
    store_option,
)
from profharness.files import check_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from profharness.rows import CellRow


@click.command()
@config_options
@backend_option
@click.option(
    "--run",
    "run",
    metavar="RUN",
    help="An id, a unique prefix, latest or latest~1.  [default: the latest that has them]",
)
@click.option(
    "--peaks",
    "peaks_from",
    type=click.Choice(["measure", "data-sheet"]),
    help="measure: measure this machine's device now and keep it; data-sheet: the built-in table.  "
    "[default: what the store has measured, measured once if the cells ran on a GPU like this "
    "machine's, else the table]",
)
@click.option("--full", is_flag=True, help="Every finding, with all of its evidence.")
@output_options
@store_option
def command(
    config: tuple[str, ...],
    configs_file: Path | None,
    backend: tuple[str, ...],
    run: str | None,
    peaks_from: str | None,
    full: bool,
    format_: str | None,
    output: Path | None,
    force: bool,
    store: Path,
) -> None:
    """Say what holds each backend back, with the evidence.

    Answers from stored rows like `kernels`: without --config every config of the latest run; with
    --config the latest run that has them, which is captured first if there is none. Counters of
    ncu are used where a run has them.

    Each finding is measured (a counter or a timing) or derived (a formula or a launch
    configuration), and names its figures. TFLOP/s and GB/s rest on exact FLOPs and compulsory
    bytes over the time of the column `of`. Configs that differ in one number give a sweep table.

    \b
    Examples:
      profharness analyze --config 2,8,512,64
      profharness analyze --config '1,4,64,{512,2048,4096,8192},fp32' --peaks measure
    """
    from profharness.answers.analyze.answer import analyze_rows
    from profharness.cli.kernels import find_rows, stored_names
    from profharness.errors import NotFoundError
    from profharness.views.analyze import analyze_document

    check_output(output, force=force)
    configs = read_configs(config, configs_file)
    rows, cells = find_rows(store, run, configs, stored_names(backend), ())
    if not cells:
        raise NotFoundError(
            "analyze needs the configs of a captured run; a foreign trace has none, "
            "`profharness kernels` shows its kernels"
        )
    if peaks_from == "measure":
        _measure(store, cells)
    elif peaks_from is None:
        _measure_once(store, cells)
    document = analyze_document(analyze_rows(store, cells, rows, peaks_from), full=full)
    emit(document, format_, output, force=force)


def _measure_once(path: Path, cells: Sequence[CellRow]) -> None:
    """Measure if the cells ran on a GPU like this machine's and the store has no measurement."""
    from profharness.devices import MEASURED
    from profharness.environment import gpu_name
    from profharness.errors import CaptureError
    from profharness.store import open_store

    with open_store(path) as store:
        runs = tuple(dict.fromkeys(cell.run for cell in cells))
        lacking = {
            store.environment(run).get("gpu")
            for run in runs
            if store.peaks(run, MEASURED) is None and store.environment(run).get("gpu")
        }
    if not lacking or gpu_name() not in lacking:
        return
    try:
        _measure(path, cells)
    except CaptureError as error:
        hint(f"{error}; going on with the data sheet")


def _measure(path: Path, cells: Sequence[CellRow]) -> None:
    from profharness.answers.analyze.answer import measure_here

    hint("measuring copy bandwidth and matrix rates, some seconds")
    measure_here(path, cells)
