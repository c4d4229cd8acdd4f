"""`profharness atlas`: list, add, merge and export atlases."""

from __future__ import annotations

from pathlib import Path

import click

from profharness.answers.atlas.catalog import find_entries, known_atlases, read_any, user_folder
from profharness.answers.atlas.data import SUFFIX, write_atlas
from profharness.answers.atlas.merge import add, atlases_of_store, merge
from profharness.answers.atlas.shards import format_lines
from profharness.cli._options import (
    atlas_option,
    complete_runs,
    emit,
    file_options,
    hint,
    output_options,
)
from profharness.errors import UsageError
from profharness.files import atomic_file
from profharness.store import ALL_RUNS, open_store
from profharness.views.atlas import atlas_document

PATHS = click.argument(
    "files", nargs=-1, metavar="FILE...", type=click.Path(exists=True, path_type=Path)
)


@click.group()
def command() -> None:
    """List the atlases that `predict` uses, and add, merge or export some.

    An atlas has the results of thousands of configs on PyTorch's backends on one GPU: choice, kernels
    with launch configuration, times and memory. It belongs to a GPU, a PyTorch release, and versions
    of CUDA, cuDNN and the driver.

    \b
    Examples:
      profharness atlas list
      profharness atlas add shards
      profharness atlas add --store profharness.db
      profharness atlas export H200 -o h200.jsonl
    """


@command.command("list")
@atlas_option
@output_options
def list_(atlas: Path | None, format_: str | None, output: Path | None, force: bool) -> None:
    """List the package's atlases and the user's own.

    \b
    Examples:
      profharness atlas list
      profharness atlas list --atlas /data/atlases --format json
    """
    emit(atlas_document(known_atlases(atlas)), format_, output, force=force)


@command.command("add")
@PATHS
@click.option(
    "--store",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    envvar=None,
    metavar="STORE",
    help="Add the captures of a store, as one atlas per machine.",
)
@click.option(
    "--run",
    metavar="RUN",
    shell_complete=complete_runs,
    help="Only this run of the store.  [default: all]",
)
@atlas_option
def add_(files: tuple[Path, ...], store: Path | None, run: str | None, atlas: Path | None) -> None:
    """Add atlases to the user's own: packed ones, shards of scripts/make_atlas.py, or a store.

    New cells of a machine (GPU, torch, CUDA, cuDNN, driver) are added to the user's own atlas of it.
    Predictions use that and the package's atlas together. If the two disagree on a cell, nothing is
    added and the conflicts are printed.

    \b
    Examples:
      profharness atlas add shards
      profharness atlas add h200.npz --atlas /data/atlases
      profharness atlas add --store profharness.db --run latest
    """
    if not files and store is None:
        raise UsageError("atlas add needs a file of an atlas, or --store STORE")
    if run is not None and store is None:
        raise UsageError("--run requires --store; add --store STORE")
    made = [read_any(path) for path in files]
    if store is not None:
        with open_store(store) as opened:
            made += atlases_of_store(opened, run or ALL_RUNS)
    for each in made:
        path, count = add(each, user_folder(atlas), known_atlases(atlas))
        where = f"; in {path}" if path else ", so nothing was written"
        hint(f"{each.source}: {count:,} new cells of {len(each):,}{where}")


@command.command("merge")
@PATHS
@file_options
def merge_(files: tuple[Path, ...], output: Path | None, force: bool) -> None:
    """Merge atlases of one machine into one file.

    Atlases with conflicting cells are not merged; the conflicts are printed.

    \b
    Example:
      profharness atlas merge monday.npz tuesday.jsonl -o both.npz
    """
    if len(files) < 2 or output is None:
        raise UsageError("atlas merge needs two files or more, and -o FILE for the result")
    _check_suffix(output)
    merged = merge([read_any(path) for path in files])
    write_atlas(merged, output, force=force)
    hint(f"wrote {output}: {len(merged):,} cells of {merged.machine.name}")


@command.command("export")
@click.argument("name", metavar="NAME")
@atlas_option
@file_options
def export_(name: str, atlas: Path | None, output: Path | None, force: bool) -> None:
    """Write an atlas to a file: packed (.npz), or as JSON lines (.jsonl).

    NAME is a name from `atlas list`, a GPU, or a file. The package's atlas and your own of that machine
    are written together. `atlas add` reads both formats.

    \b
    Examples:
      profharness atlas export H200 -o h200.jsonl
      profharness atlas export shards -o mine.npz
    """
    if output is None:
        raise UsageError("atlas export needs -o FILE, ending in .npz or .jsonl")
    _check_suffix(output, ".jsonl")
    entries = find_entries(known_atlases(atlas), name)
    found = merge([entry.atlas for entry in entries]) if len(entries) > 1 else entries[0].atlas
    if output.suffix == SUFFIX:
        write_atlas(found, output, force=force)
    else:
        with atomic_file(output, force=force) as file:
            for line in format_lines(found):
                file.write(line.encode())
    hint(f"wrote {output}: {len(found):,} cells of {found.machine.name}")


def _check_suffix(output: Path, *others: str) -> None:
    if output.suffix not in (SUFFIX, *others):
        raise UsageError(f"-o {output}: name it {' or '.join(f'*{s}' for s in (SUFFIX, *others))}")
