"""Where atlases lie, and which one answers: those of the package and those that a user added."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from profharness.answers.atlas.answer import (
    Place,
    Predicted,
    disagreement,
    place_named,
    place_of,
    predict_all,
    same_gpu,
    shown_backends,
    statement,
)
from profharness.answers.atlas.data import (
    SUFFIX,
    VERSIONS,
    Atlas,
    Machine,
    atlas_files,
    packaged_atlases,
    read_atlas,
)
from profharness.answers.atlas.shards import read_shards
from profharness.config import Config
from profharness.dispatch.machine import RELEASES, parse_release, release_text
from profharness.dispatch.machine import Machine as RuleMachine
from profharness.environment import gpu_name
from profharness.errors import NotFoundError, ProfharnessError, UsageError, shown

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
    """All that are there: the package's, and the user's own in a folder that may be named. Of a file there
    that is no whole atlas a line is logged. Raises what `read_atlas` raises of the package's.
    """
    folder = user_folder(named)
    entries = [Entry(path, PACKAGE, read_atlas(path)) for path in packaged_atlases()]
    old = sorted(folder.glob("*.atlas")) if folder.is_dir() else ()
    for path in (*atlas_files(folder), *old):
        try:
            atlas = read_atlas(path)
        except ProfharnessError as error:
            _log_once(f"{error} (left out)")
            continue
        entries.append(Entry(path, USER, atlas))
    return entries


@cache
def _log_once(text: str) -> None:
    logging.getLogger(__name__).warning(text)


def same_machine(one: Machine, other: Machine) -> bool:
    """Whether two atlases are of one GPU, torch, CUDA, cuDNN and driver."""
    return all(getattr(one, name) == getattr(other, name) for name in VERSIONS)


def entry_record(entry: Entry) -> dict[str, Any]:
    """The JSON record of one atlas: its machine, and how many cells it has of what."""
    atlas = entry.atlas
    counts = {
        table: dict(Counter(atlas.tables[table][code] for code in atlas.columns[column].tolist()))
        for table, column in (("statuses", "status"), ("regimes", "regime"))
    }
    place = {"name": entry.name, "origin": entry.origin, "path": str(entry.path)}
    record = place | asdict(atlas.machine) | counts | {"cells": len(atlas)}
    return {name: record[name] for name in FIELDS}


def find_place(
    entries: Sequence[Entry],
    gpu: str | None,
    torch: str | None,
    *,
    own: str | None = None,
    driver: str | None = None,
    like: Mapping[str, Any] | None = None,
) -> tuple[Place, str]:
    """The place that a user names, and a sentence on why it has no atlas, empty where it has. own: this
    machine's GPU; like: an environment whose versions are preferred. Raises UsageError for a GPU
    or a release that is none.
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
    drivers = ", ".join(dict.fromkeys(str(entry.atlas.machine.driver) for entry in found))
    asked = [entry for entry in found if driver in (None, entry.atlas.machine.driver)]
    if asked:
        return _best_place(asked, {} if like is None else like), ""
    there = f"its atlases are of torch {', '.join(map(release_text, sorted(releases)))}"
    gpus = ", ".join(dict.fromkeys(entry.atlas.machine.gpu for entry in entries)) or "no GPU"
    place = place_named(gpu, release_text(release))
    what = f"{place.gpu} with torch {place.release}"
    if found:
        what, there = f"{what} and driver {driver}", f"its atlases are of driver {drivers}"
    return place, (
        f"no atlas of {what}, so there is no time: "
        f"{there if releases else f'there are atlases of {gpus}'}"
    )


def _best_place(found: Sequence[Entry], like: Mapping[str, Any]) -> Place:
    """Of atlases of one GPU and release the machine with most of these versions, then with a model, then with
    the most cells. The package's atlas of it comes with the user's own.
    """
    wanted = Machine.from_environment(like)

    def fit(entry: Entry) -> tuple[int, bool, int]:
        machine = entry.atlas.machine
        alike = sum(getattr(wanted, name) in (None, getattr(machine, name)) for name in VERSIONS)
        return alike, entry.origin == PACKAGE, len(entry.atlas)

    best = max(found, key=fit).atlas.machine
    alike = [entry for entry in found if same_machine(entry.atlas.machine, best)]
    # known_atlases has the package's first, and the model is of that one
    first, *rest = [entry.atlas for entry in alike]
    others = [entry for entry in found if not same_machine(entry.atlas.machine, best)]
    return replace(place_of(first), own=tuple(rest), others=_others_text(best, others))


def _others_text(best: Machine, others: Sequence[Entry]) -> str:
    """Which atlases of other versions do not answer; empty where there is none."""
    parts = []
    for entry in others:
        machine = entry.atlas.machine
        names = [name for name in VERSIONS if getattr(machine, name) != getattr(best, name)]
        versions = ", ".join(f"{name} {getattr(machine, name)}" for name in names)
        parts.append(f"{versions} ({entry.origin}, {len(entry.atlas):,} cells)")
    if not parts:
        return ""
    return (
        f"the atlas of driver {best.driver}, cuDNN {best.cudnn} answers; others of this GPU and release are "
        f"not mixed in: {'; '.join(parts)}"
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """An answer: where it is about, what a reader must know of its atlas (that there is none, others, what
    disagrees), a tuple of rows for each config, and the backends to show.
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
    driver: str | None = None,
) -> Asked:
    """What a GPU does with configs; folder holds the user's own atlases. Raises UsageError for what
    cannot be meant, and what `read_atlas` raises.
    """
    shown_names = shown_backends(backends)
    if not configs:
        raise UsageError("predict needs a config: 2,8,512,64,bf16 with --config, or --configs FILE")
    entries = known_atlases(None if folder is None else Path(folder))
    place, doubt = find_place(entries, gpu, torch, own=None if gpu else gpu_name(), driver=driver)
    doubts = (doubt, place.others, disagreement(place, configs))
    answers = predict_all(place, configs)
    return Asked(place, "\n".join(filter(None, doubts)), answers, shown_names)


def place_at(environment: Mapping[str, Any]) -> Place | None:
    """The place of a run's GPU and release, where there is an atlas of it, by its versions if there is one."""
    gpu, torch = str(environment.get("gpu")), str(environment.get("torch"))
    try:
        place, doubt = find_place(known_atlases(), gpu, torch, like=environment)
    except UsageError:  # a GPU that no table has
        return None
    return None if doubt else place


TIMED = (
    *("source", "choice", "kernel_ns", "low_ns", "high_ns", "graph_ns", "bottleneck"),
    *("best", "best_ns", "regret", "certain", "outside"),
)


def timed(config: Config, gpu: str, rules: RuleMachine) -> tuple[dict[str, Any] | None, str]:
    """What `auto` takes in time there, and the best backend, with a sentence; None where no atlas is of this
    GPU, release and cuDNN. Then comes why, empty for a GPU that no atlas is of.
    """
    like = {"torch_cuda": rules.cuda, "cudnn": rules.cudnn}
    entries = known_atlases()
    place, doubt = find_place(entries, gpu, release_text(rules.torch), like=like)
    if doubt:
        known = any(same_gpu(gpu, entry.atlas.machine.gpu) for entry in entries)
        return None, doubt if known else ""
    if place.rules.cudnn != rules.cudnn:
        return None, f"no time: the atlas is of {place.text}, not of cuDNN {rules.cudnn}"
    (answer,) = predict_all(place, [config])
    return {"statement": statement(answer)} | {name: getattr(answer[0], name) for name in TIMED}, ""


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


def find_entries(entries: Sequence[Entry], name: str) -> list[Entry]:
    """The atlases of one machine: by name, by a GPU that has one machine alone, or by path. Raises
    NotFoundError, UsageError.
    """
    named = [entry for entry in entries if name in (entry.name, entry.path.name)]
    fitting = named or [each for each in entries if same_gpu(each.atlas.machine.gpu, name)]
    if fitting and all(
        same_machine(each.atlas.machine, fitting[0].atlas.machine) for each in fitting
    ):
        return fitting
    path = Path(name)
    if path.exists():
        return [Entry(path, USER, read_any(path))]
    names = ", ".join(dict.fromkeys(entry.name for entry in fitting or entries)) or "none"
    fault = "more than one atlas is of" if fitting else "no atlas and no file is called"
    raise NotFoundError(f"{fault} {shown(name)!r}; there are {names}")


def read_any(path: Path) -> Atlas:
    """The atlas of a packed file, of shards or of their archive. Raises what the readers raise."""
    if not path.exists():
        raise UsageError(f"{shown(path)}: there is no such file; give an atlas, or shards of one")
    if path.is_file() and path.suffix != ".jsonl" and not path.name.endswith(".tar.xz"):
        return read_atlas(path)
    return read_shards(path)
