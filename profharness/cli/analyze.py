"""`profharness analyze`: what holds each backend back, with the evidence."""

from __future__ import annotations

from pathlib import Path

import click

from profharness.answers.analyze.answer import ANALYZED, analyze_here, prepare_peaks
from profharness.answers.analyze.programs import analyze_program, program_of
from profharness.cli._options import (
    backend_option,
    complete_runs,
    config_options,
    emit,
    hint,
    output_options,
    store_option,
)
from profharness.cli.kernels import find_rows, read_selection
from profharness.views.analyze import analyze_document


@click.command()
@config_options
@backend_option
@click.option(
    "--run",
    "run",
    metavar="RUN",
    shell_complete=complete_runs,
    help="An id, a unique prefix, latest or latest~1.  [default: the latest that has them]",
)
@click.option(
    "--peaks",
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
    peaks: str | None,
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

    Of a program's trace the like attention calls of its layers stand for backends: those whose
    config is known, on the time of their kernels, backward included where it was traced.

    Each finding is measured (a counter or a timing) or derived (a formula or a launch
    configuration), and names its figures. TFLOP/s and GB/s rest on exact FLOPs and compulsory
    bytes over the time of the column `of`. Configs that differ in one number give a sweep table.
    What several configs have in common is told once, and the best backend for training, prefill,
    decoding and little memory is named.

    \b
    Examples:
      profharness analyze --config 2,8,512,64
      profharness analyze --config '1,4,64,{512,2048,4096,8192},fp32' --peaks measure
      profharness ingest trace.json.gz; profharness analyze --run trace-5bbb73728d  # as ingest says
    """
    selection = read_selection(run, config, configs_file, backend)
    program = program_of(store, selection)
    if program is not None:
        prepare_peaks(store, [program], peaks, hint)
        analyses = analyze_program(store, program, selection, peaks, hint)
    else:
        rows, cells = find_rows(store, selection, needs=ANALYZED)
        analyses = analyze_here(store, cells, rows, peaks, hint)
    emit(analyze_document(analyses, full=full), format_, output, force=force)
