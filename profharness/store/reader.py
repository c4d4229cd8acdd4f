"""A process that reads sources for another one: a task a line on stdin, for each a line on stdout.

A task is `{store, shard, source}`; the answer is what became of the source (`IngestResult`, with
`content_hash` and `whole`), or `{error}`. Where the source is not in the store yet, its rows are in the shard.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import sys
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from profharness.errors import NotFoundError, ProfharnessError, shown
from profharness.store.ingest import IngestResult, ingest_source, unchanged
from profharness.store.schema import connect, make_shard
from profharness.store.sources import read_source

Plain = dict[str, Any]


def main() -> None:
    """Answer until stdin ends. SIGTERM ends it in order: a tool that it has started ends with it."""
    signal.signal(signal.SIGTERM, _stop)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="surrogateescape")
    os.dup2(2, 1)  # what a library prints is no answer
    for line in sys.stdin.buffer:
        task = json.loads(line)
        answers.write(json.dumps(answered(task)) + "\n")
        answers.flush()


def _stop(number: int, _: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once is enough
    raise SystemExit(128 + number)


def answered(task: Plain) -> Plain:
    """The answer to one task."""
    path = Path(task["source"])
    try:
        return _read(Path(task["store"]), Path(task["shard"]), path)
    except ProfharnessError as error:
        return {"error": str(error)}
    except OSError as error:  # TMPDIR is full, the file went away
        reason = error.strerror or f"{type(error).__name__}: {error}"
        return {"error": f"{shown(path)}: {error.filename or 'TMPDIR'}: {reason}"}
    except sqlite3.Error as error:
        return {"error": f"{shown(path)}: its shard {task['shard']} cannot be written: {error}"}
    except MemoryError:
        return {"error": f"{shown(path)}: there was not enough memory to read it"}


def _read(store: Path, shard: Path, path: Path) -> Plain:
    source = read_source(path)
    whole = all(raw.problem is None for raw in source.raws)
    told = {"content_hash": source.content_hash, "whole": whole}
    with ExitStack() as opened:
        stored = None
        with contextlib.suppress(NotFoundError):  # while it is being made there is none yet
            stored = opened.enter_context(closing(connect(store, write=False)))
            if same := unchanged(stored, source):
                return _plain(same) | told
        shard.unlink(missing_ok=True)  # of a reader that was ended
        made = opened.enter_context(closing(make_shard(shard, stored)))
        result = ingest_source(shard, lambda: made, source, None)
        return _plain(result) | told


def _plain(result: IngestResult) -> Plain:
    paths = {"source": os.fspath(result.source), "kept": result.kept and os.fspath(result.kept)}
    return asdict(result) | paths
