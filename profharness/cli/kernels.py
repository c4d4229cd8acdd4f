"""`profharness kernels`: what each backend launched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from profharness.cli._options import (
    backend_option,
    capture_progress,
    config_options,
    emit,
    hint,
    output_options,
    read_configs,
    split_names,
    store_option,
)
from profharness.files import check_output
from profharness.rows import TRACE_PROFILERS

if TYPE_CHECKING:
    from profharness.config import Config
    from profharness.rows import CellRow, KernelRow

    Answer = tuple[list[KernelRow], list[CellRow]]


@click.command()
@config_options
@backend_option
@click.option(
    "--profiler",
    multiple=True,
    type=click.Choice([*TRACE_PROFILERS, "all"]),
    help="Only what this profiler saw; all: every profiler side by side. Repeatable.  [default: the "
    "first of torch, nsys and ncu that the run has]",
)
@click.option(
    "--run",
    "run",
    metavar="RUN",
    help="An id, a unique prefix, latest, latest~1 or all.  [default: the latest that has them]",
)
@click.option("--full", is_flag=True, help="Whole kernel names.")
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
    answers; if there is none,
    they are captured first. KiB is shared memory, n/call launches per call, µs the median of one
    launch, share% the part of
    the cell's time on the device, occ% the theoretical occupancy. A value that the profiler cannot
    know shows as -.

    --profiler all puts the witnesses side by side: the same kernel's time under torch, nsys and
    ncu, its counters, and every point on which they disagree; with --run all each profiler's
    newest run that has the config counts.

    \b
    Examples:
      profharness kernels --config 2,8,512,64 --backend auto,math --format csv
      profharness kernels --config 2,8,512,64 --profiler all
      profharness kernels --config 2,8,512,64 --steps
    """
    from profharness.answers.agreement import check_expected_names
    from profharness.errors import UsageError

    side_by_side = "all" in profiler
    wanted = TRACE_PROFILERS if side_by_side else profiler
    expected = split_names(expect)
    check_expected_names(expected)
    if steps and len(wanted) > 1:
        raise UsageError("--steps sums up what one profiler saw; name one with --profiler")
    check_output(output, force=force)
    configs = read_configs(config, configs_file)
    rows, cells = find_rows(store, run, configs, stored_names(backend), wanted, by_op=steps)
    if not profiler:
        rows = _first_profiler(rows)
    if steps:
        from profharness.views.steps import steps_document

        document = steps_document(rows, cells)
    elif side_by_side:
        from profharness.views.kernels import witness_document

        document = witness_document(rows, cells, full=full)
    else:
        from profharness.views.kernels import kernels_document

        document = kernels_document(rows, cells, full=full)
    emit(document, format_, output, force=force)
    if format_ == "csv" or (format_ is None and output and output.suffix == ".csv"):
        _tell_without_kernels(cells)
    if expected:
        _gate(expected, rows, cells)


def stored_names(values: tuple[str, ...]) -> tuple[str, ...]:
    """Backends as cells name them: `all` means no filter, a file is known by its reduced name."""
    names = split_names(values)
    if not names:
        return ()
    from profharness.backends import ALL, find_backend
    from profharness.errors import UsageError

    found = []
    for name in () if ALL in names else names:
        try:
            found.append(find_backend(name).name)
        except UsageError:
            found.append(name)  # of another machine, perhaps; the store knows
    return tuple(found)


def _first_profiler(rows: list[KernelRow]) -> list[KernelRow]:
    """Of each run the rows of one profiler; what the others saw is said on stderr."""
    seen: dict[str, set[str]] = {}
    for row in rows:
        seen.setdefault(row.run, set()).add(row.profiler)
    chosen = {
        run: next((name for name in TRACE_PROFILERS if name in names), min(names))
        for run, names in seen.items()
    }
    if any(len(names) > 1 for names in seen.values()):
        more = sorted(set().union(*seen.values()) - set(chosen.values()))
        hint(f"{', '.join(more)} saw these kernels too; --profiler all shows all side by side")
    return [row for row in rows if row.profiler == chosen[row.run]]


def find_rows(
    store: Path,
    run: str | None,
    configs: Sequence[Config],
    backends: tuple[str, ...],
    profilers: tuple[str, ...],
    *,
    by_op: bool = False,
) -> Answer:
    """The rows asked for; captures them where no run is named and the store does not have them."""
    from profharness.errors import NotFoundError

    try:
        rows, cells = _stored(store, run, configs, backends, profilers, by_op)
    except NotFoundError:
        if not configs or run is not None:
            raise
        rows, cells = [], []
    if not rows and not cells and configs and run is None:
        run = _capture(store, configs, backends, profilers)
        rows, cells = _stored(store, run, configs, backends, profilers, by_op)
    if not rows and not cells:
        raise NotFoundError(_nothing(run, configs, backends, profilers))
    return rows, cells


def _stored(
    path: Path,
    run: str | None,
    configs: Sequence[Config],
    backends: tuple[str, ...],
    profilers: tuple[str, ...],
    by_op: bool,
) -> Answer:
    from profharness.answers.prediction import with_predictions
    from profharness.store import open_store

    with open_store(path) as store:
        if run is None:
            run = (
                store.latest_run_with(configs, backends or None)
                if configs
                else store.resolve("latest")
            )
            if run is None:
                return [], []
        elif run != "all":
            run = store.resolve(run)
        chosen = backends or None
        rows = store.kernels(
            run,
            configs=configs or None,
            backends=chosen,
            profilers=profilers or None,
            by_op=by_op,
        )
        cells = store.cells(run, configs=configs or None, backends=chosen)
        return rows, with_predictions(store, cells)


def _capture(
    store: Path,
    configs: Sequence[Config],
    backends: tuple[str, ...],
    profilers: tuple[str, ...],
) -> str:
    """Capture what the store does not have, and return the new run's id."""
    from profharness.jobs import capture_into_store
    from profharness.runner import CaptureOptions

    named = ", ".join(backends) if backends else "the usual backends"
    hint(f"{store} has no answer yet: capturing {len(configs)} config(s) on {named}")
    options = CaptureOptions(profilers or ("torch",))
    with capture_progress() as progress:
        return capture_into_store(configs, backends, store, options, progress).run.run


def _nothing(
    run: str | None,
    configs: Sequence[Config],
    backends: tuple[str, ...],
    profilers: tuple[str, ...],
) -> str:
    asked = [f"config {config}" for config in configs]
    asked += [f"backend {name}" for name in backends] + [f"profiler {name}" for name in profilers]
    where = {None: "the latest run", "all": "the store"}.get(run, f"run {run}")
    what = ", ".join(asked) or "kernels"
    return f"{where} has nothing of: {what}; `profharness runs` lists what is stored"


def _tell_without_kernels(cells: Sequence[CellRow]) -> None:
    """A CSV has rows of kernels only; who gave none is told on stderr."""
    from profharness.views.kernels import cell_notes

    for cell in cells:
        if cell.status != "ok":
            note = cell_notes(cell, [])[0]
            hint(f"{cell.config} {note.label}: {note.text}")


def _gate(expected: Sequence[str], rows: Sequence[KernelRow], cells: Sequence[CellRow]) -> None:
    from profharness.answers.agreement import unmet_expectations
    from profharness.errors import GateError

    lines = unmet_expectations(expected, rows, cells)
    if lines:
        raise GateError(f"--expect {','.join(expected)} is not met: " + "\n  ".join(lines))
