"""Where atlases lie, and which one answers: those of the package and those that a user added."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from profharness.answers.atlas.answer import (
    Place,
    Predicted,
    place_named,
    place_of,
    predict_all,
    same_gpu,
    shown_backends,
    statement,
)
from profharness.answers.atlas.data import (
    SUFFIX,
    Atlas,
    Machine,
    packaged_atlases,
    read_atlas,
    read_shards,
)
from profharness.config import Config
from profharness.dispatch.machine import RELEASES, parse_release, release_text
from profharness.dispatch.machine import Machine as RuleMachine
from profharness.environment import gpu_name
from profharness.errors import NotFoundError, UsageError, shown

PACKAGE, USER = "package", "user"
FIELDS = (
    *("name", "origin", *(each.name for each in fields(Machine))),
    *("cells", "statuses", "regimes", "path"),
)


def user_folder(named: Path | None = None) -> Path:
    """Where a user's own atlases lie: `$XDG_DATA_HOME/profharness/atlases` unless a folder is named."""
    if named is not None:
        return named
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "profharness" / "atlases"


@dataclass(frozen=True, slots=True)
class Entry:
    """An atlas that is there, and whose it is: PACKAGE or USER."""

    path: Path
    origin: str
    atlas: Atlas

    @property
    def name(self) -> str:
        """What a command may call it."""
        return self.path.name.removesuffix(SUFFIX)


def known_atlases(named: Path | None = None) -> list[Entry]:
    """All that are there, the user's own in a folder that may be named. One of these takes the place of the
    package's of the same name. Raises what `read_atlas` raises.
    """
    found: dict[str, Entry] = {}
    folder = user_folder(named)
    own = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
    for origin, paths in ((PACKAGE, packaged_atlases()), (USER, own)):
        for path in paths:
            entry = Entry(path, origin, read_atlas(path))
            found[entry.name] = entry
    return list(found.values())


def entry_record(entry: Entry) -> dict[str, Any]:
    """The JSON record of one atlas: its machine, and how many cells it has of what."""
    atlas = entry.atlas
    counts = {
        table: dict(Counter(atlas.tables[table][code] for code in atlas.column(column).tolist()))
        for table, column in (("statuses", "status"), ("regimes", "regime"))
    }
    place = {"name": entry.name, "origin": entry.origin, "path": str(entry.path)}
    record = place | asdict(atlas.machine) | counts | {"cells": len(atlas)}
    return {name: record[name] for name in FIELDS}


def find_place(
    entries: Sequence[Entry], gpu: str | None, torch: str | None, *, own: str | None = None
) -> tuple[Place, str]:
    """The place that a user names, and a sentence on why it has no atlas, empty where it has. own: this
    machine's GPU. Raises UsageError for a GPU or a release that is none.
    """
    gpu = gpu or default_gpu(entries, own)
    if gpu.lower() == "cpu":
        raise UsageError(
            "an atlas is of a GPU; what a CPU takes says `profharness explain --gpu cpu`"
        )
    fitting = [entry for entry in entries if same_gpu(gpu, entry.atlas.machine.gpu)]
    releases = {parse_release(entry.atlas.machine.torch) for entry in fitting}
    release = parse_release(torch) if torch is not None else max(releases, default=max(RELEASES))
    found = [entry for entry in fitting if parse_release(entry.atlas.machine.torch) == release]
    if found:
        # a user's own before the package's
        return place_of(max(found, key=lambda entry: entry.origin == USER).atlas), ""
    there = f"its atlases are of torch {', '.join(map(release_text, sorted(releases)))}"
    gpus = ", ".join(dict.fromkeys(entry.atlas.machine.gpu for entry in entries)) or "no GPU"
    place = place_named(gpu, release_text(release))
    return place, (
        f"no atlas of {place.gpu} with torch {place.release}, so there is no time: "
        f"{there if releases else f'there are atlases of {gpus}'}"
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """An answer: where it is about, why there is no atlas if there is none, a tuple of rows for each config,
    and the backends to show.
    """

    place: Place
    doubt: str
    answers: list[tuple[Predicted, ...]]
    backends: tuple[str, ...]

    def of(self, answer: Iterable[Predicted]) -> list[Predicted]:
        """The rows of the backends to show."""
        return [row for row in answer if row.backend in self.backends]


def predicted(
    configs: Sequence[Config],
    backends: Sequence[str] = (),
    gpu: str | None = None,
    torch: str | None = None,
    folder: str | os.PathLike[str] | None = None,
) -> Asked:
    """What a GPU does with configs; folder holds the user's own atlases. Raises UsageError for what
    cannot be meant, and what `read_atlas` raises.
    """
    shown_names = shown_backends(backends)
    if not configs:
        raise UsageError("predict needs a config: 2,8,512,64,bf16 with --config, or --configs FILE")
    entries = known_atlases(None if folder is None else Path(folder))
    place, doubt = find_place(entries, gpu, torch, own=None if gpu else gpu_name())
    return Asked(place, doubt, predict_all(place, configs), shown_names)


def place_at(gpu: str, torch: str) -> Place | None:
    """The place of a run's GPU and release, where there is an atlas of it."""
    try:
        place, doubt = find_place(known_atlases(), gpu, torch)
    except UsageError:  # a GPU that no table has
        return None
    return None if doubt else place


TIMED = (
    *("source", "choice", "kernel_ns", "low_ns", "high_ns", "graph_ns", "bottleneck"),
    *("best", "best_ns", "regret", "certain", "outside"),
)


def timed(config: Config, gpu: str, rules: RuleMachine) -> dict[str, Any] | None:
    """What `auto` takes in time there, and the best backend, with a sentence; None where no atlas is of this
    GPU, release and cuDNN.
    """
    place, doubt = find_place(known_atlases(), gpu, release_text(rules.torch))
    if doubt or place.rules.cudnn != rules.cudnn:
        return None
    (answer,) = predict_all(place, [config])
    return {"statement": statement(answer)} | {name: getattr(answer[0], name) for name in TIMED}


def default_gpu(entries: Sequence[Entry], own: str | None) -> str:
    """The GPU that is meant where none is named: this machine's own if an atlas has it, else the only
    one. Raises UsageError that names those there are.
    """
    gpus = list(dict.fromkeys(entry.atlas.machine.gpu for entry in entries))
    if own is not None and any(same_gpu(own, gpu) for gpu in gpus):
        return own
    if len(gpus) == 1:
        return gpus[0]
    known = f"there are atlases of {', '.join(gpus)}" if gpus else "there is no atlas"
    raise UsageError(f"which GPU is not said, and {known}; add --gpu NAME, such as --gpu H200")


def find_entry(entries: Sequence[Entry], name: str) -> Entry:
    """The atlas of a name, the only one of a GPU, or that of a path. Raises NotFoundError, UsageError."""
    for entry in entries:
        if name in (entry.name, entry.path.name):
            return entry
    fitting = [each for each in entries if same_gpu(each.atlas.machine.gpu, name)]
    if len(fitting) == 1:
        return fitting[0]
    path = Path(name)
    if path.exists():
        return Entry(path, USER, read_any(path))
    names = ", ".join(entry.name for entry in fitting or entries) or "none"
    fault = "more than one atlas is of" if fitting else "no atlas and no file is called"
    raise NotFoundError(f"{fault} {shown(name)!r}; there are {names}")


def read_any(path: Path) -> Atlas:
    """The atlas of a packed file, of shards or of their archive. Raises what the readers raise."""
    if not path.exists():
        raise UsageError(f"{shown(path)}: there is no such file; give an atlas, or shards of one")
    if path.is_file() and path.suffix != ".jsonl" and not path.name.endswith(".tar.xz"):
        return read_atlas(path)
    return read_shards(path)
