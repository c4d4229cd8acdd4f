"""`profharness atlas`: list, add, merge and export atlases."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated

import click

from profharness.atlas.data import SUFFIX, Machine, write_atlas
from profharness.atlas.merge import add, atlases_of_store, merge
from profharness.atlas.predictions import (
    Entry,
    find_entries,
    known_atlases,
    read_any,
    user_folder,
)
from profharness.atlas.shards import format_lines
from profharness.columns import Column
from profharness.commands._command import CommandGroup, as_is, command, declaration_of, document
from profharness.commands._options import Option
from profharness.commands._output import hint
from profharness.commands._types import (
    AtlasFolder,
    Force,
    OutputFile,
    PathLike,
    complete_runs,
)
from profharness.devices import short_device_name, short_release
from profharness.errors import UsageError
from profharness.files import atomic_file
from profharness.render.document import Document, Note, Table
from profharness.store import ALL_RUNS, open_store

AtlasFiles = Annotated[
    PathLike,
    Option(metavar="FILE...", type=click.Path(exists=True, path_type=Path)),
]
CapturesStore = Annotated[
    PathLike | None,
    Option(
        ("--store",),
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        metavar="FILE",
        help="Add the captures in this store, as one atlas per machine.",
    ),
]
OnlyRun = Annotated[
    str | None,
    Option(
        ("--run",),
        metavar="RUN",
        complete=complete_runs,
        help="Add only this run from the store.  [default: all]",
    ),
]
AtlasName = Annotated[str, Option(metavar="NAME")]

SCHEMA = "profharness.atlas/1"
COLUMNS = (
    Column("name", "name"),
    Column("origin", "from", importance="detail"),
    Column("gpu", "GPU", importance="answer"),
    Column("torch", "torch", importance="answer"),
    Column("cuda", "CUDA", importance="detail"),
    Column("cudnn", "cuDNN", importance="detail"),
    Column("driver", "driver", importance="detail"),
    Column("cells", "cells", "count"),
)
FIELDS = (
    *("name", "origin", *(each.name for each in fields(Machine))),
    *("cells", "statuses", "regimes", "path"),
)


@command("list", frame=as_is)
def list_atlases(*, atlas: AtlasFolder = None) -> list[Entry]:
    """List the atlases in the package and your own atlases.

    \b
    Examples:
      profharness atlas list
      profharness atlas list --atlas /data/atlases --format json
    """
    return known_atlases(atlas)


@document(list_atlases)
def show(entries: list[Entry]) -> Document:
    """Return a document with one row per atlas."""
    records = []
    for entry in entries:
        atlas = entry.atlas
        record = asdict(atlas.machine) | {
            "name": entry.name,
            "origin": entry.origin,
            "path": str(entry.path),
            "cells": len(atlas),
        }
        for name, column in (("statuses", "status"), ("regimes", "regime")):
            codes = Counter(atlas.columns[column].tolist())
            record[name] = {atlas.tables[name][code]: count for code, count in codes.items()}
        records.append({name: record[name] for name in FIELDS})
    lines = [
        (
            {"gpu": short_device_name(each["gpu"]), "torch": short_release(each["torch"])},
            each,
        )
        for each in records
    ]
    table = Table.of(COLUMNS, lines)
    note = Note("there are no atlases; add one with `profharness atlas add FILE`")
    return Document(SCHEMA, "Atlases", (table if records else note,), FIELDS, tuple(records))


@command("add", frame=as_is)
def add_atlases(
    *files: AtlasFiles,
    store: CapturesStore = None,
    run: OnlyRun = None,
    atlas: AtlasFolder = None,
) -> None:
    """Add packed atlases, shards written by scripts/make_atlas.py, or captures in a store to your
    own atlases.

    Each machine (a combination of GPU, torch, CUDA, cuDNN and driver) has its own atlas. New cells
    are added to your own atlas of the machine on which they were measured. Predictions for a
    machine use your own atlas together with the one included in the package. If a new cell
    disagrees with a known one, nothing is added and the conflicts are printed.

    \b
    Examples:
      profharness atlas add shards
      profharness atlas add h200.npz --atlas /data/atlases
      profharness atlas add --store profharness.db --run latest
    """
    if not files and store is None:
        raise UsageError("atlas add requires an atlas file, or --store STORE")
    if run is not None and store is None:
        raise UsageError("--run requires --store; add --store STORE")
    made = [read_any(Path(path)) for path in files]
    if store is not None:
        with open_store(Path(store)) as opened:
            made += atlases_of_store(opened, run or ALL_RUNS)
    for each in made:
        path, count = add(each, user_folder(atlas), known_atlases(atlas))
        where = f"; in {path}" if path else ", so nothing was written"
        hint(f"{each.source}: {count:,} new cells of {len(each):,}{where}")


@command("merge", frame=as_is)
def merge_atlases(*files: AtlasFiles, output: OutputFile = None, force: Force = False) -> None:
    """Merge several atlases of the same machine into one file.

    Atlases with conflicting cells are not merged; the conflicts are printed.

    \b
    Example:
      profharness atlas merge monday.npz tuesday.jsonl -o both.npz
    """
    if len(files) < 2 or output is None:
        raise UsageError("atlas merge requires at least two files, and -o FILE for the result")
    path = Path(output)
    _check_suffix(path)
    merged = merge([read_any(Path(path)) for path in files])
    write_atlas(merged, path, force=force)
    hint(f"wrote {output}: {len(merged):,} cells of {merged.machine.name}")


@command("export", frame=as_is)
def export_atlas(
    name: AtlasName,
    *,
    atlas: AtlasFolder = None,
    output: OutputFile = None,
    force: Force = False,
) -> None:
    """Write an atlas to a file, either packed (.npz) or as JSON lines (.jsonl).

    NAME is a name from `atlas list`, the name of a GPU, or an atlas file. If the package and your
    own folder both have an atlas of the machine, the two atlases are combined. `atlas add` can read
    packed files and JSON lines.

    \b
    Examples:
      profharness atlas export H200 -o h200.jsonl
      profharness atlas export shards -o mine.npz
    """
    if output is None:
        raise UsageError("atlas export requires -o FILE, ending in .npz or .jsonl")
    path = Path(output)
    _check_suffix(path, ".jsonl")
    entries = find_entries(known_atlases(atlas), name)
    found = merge([entry.atlas for entry in entries]) if len(entries) > 1 else entries[0].atlas
    if path.suffix == SUFFIX:
        write_atlas(found, path, force=force)
    else:
        with atomic_file(path, force=force) as file:
            for line in format_lines(found):
                file.write(line.encode())
    hint(f"wrote {output}: {len(found):,} cells of {found.machine.name}")


def _check_suffix(output: Path, *others: str) -> None:
    if output.suffix not in (SUFFIX, *others):
        raise UsageError(
            f"-o {output}: the name must end in {' or '.join(f'*{s}' for s in (SUFFIX, *others))}"
        )


DECLARATION = CommandGroup(
    "atlas",
    """List, add, merge and export atlases for `predict`.

    An atlas contains the results of thousands of configs on PyTorch's backends on one GPU. For each
    config, an atlas records PyTorch's choice, the kernels with their launch configurations, the
    times and the memory. Each atlas is specific to one GPU, one PyTorch release, and one version each of
    CUDA, cuDNN and the driver.

    \b
    Examples:
      profharness atlas list
      profharness atlas add shards
      profharness atlas add --store profharness.db
      profharness atlas export H200 -o h200.jsonl
    """,
    (
        declaration_of(list_atlases),
        declaration_of(add_atlases),
        declaration_of(merge_atlases),
        declaration_of(export_atlas),
    ),
)
