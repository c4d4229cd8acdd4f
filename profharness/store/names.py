"""Name stored runs.

A run made from a trace is named by the file, or by the folder if the user gave a folder that contains
only this trace. A run folder is named by the id of its run, or by the folder if the folder has
another name.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

TRACE = "trace"  # the source of a run that was made from a trace file

_TYPED: ContextVar[Mapping[str, str]] = ContextVar("typed", default={})  # noqa: B039 # never changed


@dataclass(frozen=True, slots=True)
class StoredRun:
    """The id of a stored run, and the file or folder from which it was ingested."""

    run: str
    source: str
    path: str


def name_runs(runs: Iterable[StoredRun]) -> dict[str, str]:
    """Map the id of each run to its name. `runs` must be sorted, newest first.

    The name of a trace, or of a folder that the user named, is the shortest end of its path that no
    other of these runs has, at least the last part. If the same path was ingested with different
    contents, only the newest run is named by the path. Older runs are named by their ids.
    """
    names: dict[str, str] = {}
    newest: dict[str, str] = {}
    for each in runs:
        by_path = each.source == TRACE or Path(each.path).name not in ("", each.run)
        if not by_path or newest.setdefault(each.path, each.run) != each.run:
            names[each.run] = each.run
    count = Counter(ending for path in newest for ending in _endings(path))
    for path, run in newest.items():
        names[run] = next((ending for ending in _endings(path) if count[ending] == 1), path)
    return names


@contextlib.contextmanager
def typed_names() -> Iterator[None]:
    """Forget the calls of `name_as_typed` at the end of a command."""
    token = _TYPED.set(_TYPED.get())
    try:
        yield
    finally:
        _TYPED.reset(token)


def name_as_typed(run: str, path: str) -> None:
    """Let the output of this command name a stored run by the file or folder that the user typed."""
    _TYPED.set({**_TYPED.get(), run: path})


def typed_path(run: str, path: str) -> str:
    """Return the file or folder that the user typed for a run, by default the stored `path`."""
    return _TYPED.get().get(run, path)


def match_path(text: str, runs: Iterable[StoredRun]) -> list[str]:
    """Return the ids of the runs whose path is `text` or ends with `text`, newest first.

    If the same path was ingested with different contents, return only the newest run.
    """
    wanted = str(Path(text))
    return [run for path, run in newest_of(runs).items() if text and wanted in _endings(path)]


def newest_of(runs: Iterable[StoredRun]) -> dict[str, str]:
    """Map each path to the id of the newest run. `runs` must be sorted, newest first."""
    newest: dict[str, str] = {}
    for each in runs:
        newest.setdefault(each.path, each.run)
    return newest


def _endings(path: str) -> Iterator[str]:
    """Yield the last part of a path, the last two parts, and so on."""
    parts = Path(path).parts
    for start in reversed(range(len(parts))):
        yield str(Path(*parts[start:]))
