"""Find the runs in a folder that were started but not finished."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from profharness.columns import column
from profharness.errors import ProfharnessError
from profharness.files import open_lock_file, shell_command, try_lock
from profharness.jobs import fleet
from profharness.jobs.campaign import is_campaign
from profharness.recording.capture import LOCK_FILE, why_not_resumed
from profharness.run import JOURNAL_FILE, OBSERVE, RUN_FILE, Run, read_run, run_kind

UNFINISHED, RUNNING = "unfinished", "running"


@dataclass(frozen=True, slots=True)
class UnfinishedRun:
    """A run folder that has cells without a result, or an observed program that was interrupted."""

    run: Annotated[str, column("run", meaning="id of the run")]
    kind: Annotated[str, column("kind", meaning="the command that started the run")]
    created: Annotated[
        str, column("created", importance="normal", meaning="start of the run, in UTC")
    ]
    status: Annotated[
        str, column("status", meaning="`unfinished`, or `running` while a process works on the run")
    ]
    done: Annotated[int, column("done", "count", meaning="number of cells that have a result")]
    cells: Annotated[int, column("cells", "count", meaning="number of cells")]
    path: Annotated[str, column(meaning="run folder")]
    command: Annotated[
        str | None,
        column(
            meaning="the command that resumes the run, or that stores the results of a run that "
            "cannot be resumed"
        ),
    ]
    resumable: Annotated[bool, column(meaning="whether `capture --resume` can finish the run")]


def find_unfinished(out: Path, stored: Container[str], store: Path) -> list[UnfinishedRun]:
    """Return the unfinished runs in a folder, newest first.

    The folders of `stored` runs are not read. Folders that cannot be read are left out.
    """
    found: list[UnfinishedRun] = []
    with contextlib.suppress(OSError):
        for path in sorted(out.glob(f"*/{RUN_FILE}"), reverse=True):
            if path.parent.name not in stored:
                with contextlib.suppress(ProfharnessError, OSError):
                    found += _unfinished(path.parent, store)
    return found


def _unfinished(folder: Path, store: Path) -> Iterator[UnfinishedRun]:
    run = read_run(folder)
    done = sum(cell.status != "pending" for cell in run.cells)
    if done == len(run.cells) and not (folder / JOURNAL_FILE).exists() and not _is_cut(run):
        return
    why = fleet.why_campaign_not_resumed if is_campaign(folder) else why_not_resumed
    resumable = why(folder, run) is None
    command = ("capture", "--resume") if resumable else ("ingest",)
    running = _is_locked(folder)
    yield UnfinishedRun(
        run=run.run,
        kind=run_kind(run),
        created=run.created,
        status=RUNNING if running else UNFINISHED,
        done=done,
        cells=len(run.cells),
        path=str(folder),
        command=None if running else shell_command(*command, str(folder), store=store),
        resumable=resumable,
    )


def _is_cut(run: Run) -> bool:
    """Return whether an observed program has started but not ended."""
    return run.kind == OBSERVE and any(each.seconds is None for each in run.periods)


def _is_locked(folder: Path) -> bool:
    """Return whether a process is working on a run."""
    if not (folder / LOCK_FILE).exists():
        return False
    descriptor = open_lock_file(folder / LOCK_FILE)
    if descriptor is None:
        return False
    try:
        return not try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)
