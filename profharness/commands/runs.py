"""`profharness runs`: list stored runs, or delete some."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from profharness.columns import Column, pick
from profharness.commands._command import command, declaration_of, document
from profharness.commands._options import Option
from profharness.commands._output import hint
from profharness.commands._types import Names, Store, store_path
from profharness.devices import short_device_name, short_release
from profharness.errors import counted, join_and
from profharness.files import RUNS_FOLDER
from profharness.render.document import Block, Document, Heading, Note, Table, record
from profharness.rows import RunRow
from profharness.store import open_store, to_frame

if TYPE_CHECKING:
    import pandas as pd

    from profharness.jobs.unfinished import UnfinishedRun

RUN_FIELDS = (
    *("run", "created", "source", "device", "torch", "profilers"),
    *("cells", "failed_cells", "launches", "path", "kind", "warnings"),
    *("rank", "world_size", "host_key", "gpu_key", "name"),
    *("ended", "duration_ns", "lanes_ns"),
)
COST = Column(
    "cost",
    "cost",
    "price",
    importance="answer",
    meaning="`lanes_ns` multiplied by --price-per-hour, if given",
)
RUN_COLUMNS = (
    *pick(RunRow, "name", "rank", "kind", "created", "duration_ns"),
    COST,
    *pick(RunRow, "device", "torch", "profilers", "cells", "failed_cells", "launches"),
)
KIND_WORDS = {
    "bench": "benchmark",
    "explain": "measured explanation",
    "observe": "observed program",
    "verify": "verification",
}
"""Maps the kind of a run to the noun in sentences and tables."""
UNFINISHED_COLUMNS = ("run", "kind", "created", "status", "done", "cells")
OF_TRACE = "that of a trace includes the time outside its steps"
NS_PER_HOUR = 3600 * 10**9
Deleted = Annotated[
    Names,
    Option(
        ("--delete",),
        multiple=True,
        metavar="RUN",
        help="Delete a run. Repeatable.",
        click={"is_eager": True},  # parsed before -o, because `check_file` reads it
    ),
]


PricePerHour = Annotated[
    float | None,
    Option(
        ("--price-per-hour",),
        type=click.FloatRange(0, min_open=True),
        metavar="PRICE",
        help="Show the cost of each run, given the hourly price of one GPU (or of the machine).",
    ),
]


@dataclass(frozen=True)
class RunsFound:
    """The stored runs, and the folders of unfinished runs."""

    rows: list[RunRow]
    unfinished: list[UnfinishedRun]


def _to_frame(found: RunsFound) -> pd.DataFrame:
    made = to_frame(found.rows, RunRow)
    made.attrs["unfinished"] = list(map(record, found.unfinished))
    return made


@command(
    "runs",
    frame=_to_frame,
    tool="Use this tool first to find out which runs are stored.",
    fill={"runs_folder": RUNS_FOLDER.as_posix()},
)
def runs(*, deleted: Deleted = (), store: Store = None) -> RunsFound:
    """List stored and unfinished runs, newest first.

    A run that was ingested from a trace is named after the file, or after the folder if the folder
    was given and contains only this trace. Interrupted runs in
    {runs_folder} are listed after the stored runs, with the commands that resume them.

    `duration` is the time that profharness spent on a run, or the time that a trace covers,
    including the time outside of its steps. With --price-per-hour, the `cost` column shows
    the price of the run's duration on all GPUs that the run used.

    --delete removes a run from the store, but keeps the run folder and the traces. To restore a
    deleted run, ingest the run folder or the trace again.

    \b
    Examples:
      profharness runs --format json
      profharness runs --price-per-hour 2.50

    In Python `attrs["unfinished"]` contains the unfinished runs.
    """
    path = store_path(store)
    names = (deleted,) if isinstance(deleted, str) else tuple(deleted)
    if not path.exists() and not names and (unfinished := _unfinished((), path)):
        return RunsFound([], unfinished)
    with open_store(path, write=bool(names)) as opened:
        # Look up all runs before deleting any, so that `latest~1` keeps its meaning.
        for run in dict.fromkeys([opened.resolve(name) for name in names]):
            name = opened.run_name(run)
            opened.delete_run(run)
            hint(f"deleted {name}")
        rows = opened.runs()
    unfinished = _unfinished({row.run for row in rows}, path)
    if not rows and not unfinished and not names:
        hint(
            f"{path} has no runs; create a run with `profharness capture` or `profharness ingest "
            "FILE`"
        )
    return RunsFound(rows, unfinished)


def _unfinished(stored: Collection[str], store: Path) -> list[UnfinishedRun]:
    if not RUNS_FOLDER.is_dir():
        return []
    # imported here because it loads the code that runs workers
    from profharness.jobs.unfinished import find_unfinished

    return find_unfinished(RUNS_FOLDER, stored, store)


@document(runs)
def show(
    found: RunsFound, *, deleted: Deleted = (), price_per_hour: PricePerHour = None
) -> Document | None:
    """Return a document with one row per run, or None if --delete was given."""
    if deleted:
        return None
    rows = found.rows
    costs = [_cost(row, price_per_hour) for row in rows]
    lines = [
        ({"cost": cost, "created": _minute(row.created), **shown_values(row)}, row)
        for row, cost in zip(rows, costs, strict=True)
    ]
    notes = warning_notes({row.name: row.warnings for row in rows if row.warnings})
    ranked = any(row.rank is not None for row in rows)
    left_out = {"rank"} if not ranked else set()
    left_out |= {"cost"} if price_per_hour is None else set()
    columns = [column for column in RUN_COLUMNS if column.key not in left_out]
    blocks: list[Block] = [Table.of(columns, lines)] if rows else []
    if any(row.kind == "trace" and row.duration_ns is not None for row in rows):
        blocks.append(Note(OF_TRACE, "duration"))
    blocks += notes
    blocks += _unfinished_blocks(found.unfinished)
    fields = (*RUN_FIELDS, COST.key)
    records = tuple(
        record(row, RUN_FIELDS) | {COST.key: cost} for row, cost in zip(rows, costs, strict=True)
    )
    extra = {"unfinished": list(map(record, found.unfinished)), "price_per_hour": price_per_hour}
    schema, told = "profharness.runs/1", runs_answer(rows, len(found.unfinished))
    return Document(schema, "Runs", tuple(blocks), fields, records, extra, answer=told)


def runs_answer(rows: Sequence[RunRow], unfinished: int = 0) -> tuple[str, ...]:
    """Return sentences about the stored runs of each kind, the newest run and unfinished runs."""
    sentences = ["No runs are stored."]
    if rows:
        kinds = Counter(row.kind for row in rows)
        parts = join_and(
            [counted(count, KIND_WORDS.get(kind, kind)) for kind, count in kinds.most_common()]
        )
        stored = f"{counted(len(rows), 'run')} stored" if len(kinds) > 1 else f"{parts} stored"
        of = f" ({parts})" if len(kinds) > 1 else ""
        sentences = [f"{stored}{of}. The newest is {rows[0].name}."]
    if unfinished:
        sentences.append(f"{counted(unfinished, 'run')} unfinished.")
    return tuple(sentences)


def shown_values(row: RunRow) -> dict[str, str | int | None]:
    """Return the kind, the cells, the device and the release of a run as tables show them."""
    return {
        "kind": KIND_WORDS.get(row.kind, row.kind),
        "cells": row.cells or None,  # a trace has no cells
        "failed_cells": row.failed_cells if row.cells else None,
        "device": row.device and short_device_name(row.device),
        "torch": row.torch and short_release(row.torch),
    }


def _minute(time: str) -> str:
    """Shorten a time in ISO 8601 format to `2026-01-31 12:00`."""
    return time[:16].replace("T", " ")


def _cost(row: RunRow, price_per_hour: float | None) -> float | None:
    if price_per_hour is None or row.lanes_ns is None:
        return None
    return row.lanes_ns / NS_PER_HOUR * price_per_hour


def _unfinished_blocks(runs: Sequence[UnfinishedRun]) -> Iterator[Block]:
    if not runs:
        return
    count = f"{len(runs)} in {RUNS_FOLDER}"
    yield Heading("Unfinished runs", count)
    lines = [
        (
            {"created": _minute(each.created), "kind": KIND_WORDS.get(each.kind, each.kind)},
            each,
        )
        for each in runs
    ]
    yield Table.of(pick(type(runs[0]), *UNFINISHED_COLUMNS), lines)
    for each in runs:
        if each.command is not None:
            what = "resume the run" if each.resumable else "store the finished cells"
            yield Note(f"to {what}, use: {each.command}", each.run)


def with_warnings(document: Document, warnings: Mapping[str, Sequence[str]]) -> Document:
    """Add warnings about runs to a document, as one note per run. JSON contains all warnings."""
    blocks = (*document.blocks, *warning_notes(warnings))
    listed = [{"run": run, "text": text} for run, texts in warnings.items() for text in texts]
    return replace(document, blocks=blocks, extra={**document.extra, "warnings": listed})


def warning_notes(warnings: Mapping[str, Sequence[str]]) -> list[Note]:
    """Return one note per run, with the first warning and the number of warnings."""
    notes = []
    for run, texts in warnings.items():
        several = len(texts) > 1
        count = f"first of {len(texts)} warnings: " if several else ""
        more = "; to show all warnings, use: profharness runs --format json" if several else ""
        text = texts[0].removeprefix(f"{run}: ")  # the label names the run
        notes.append(Note(f"{count}{text}{more}", run, "warning"))
    return notes


DECLARATION = declaration_of(runs)
