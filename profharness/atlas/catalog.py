"""Find the atlases of the package and of the user, and select one for a GPU and release."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from profharness.atlas.answer import (
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
from profharness.atlas.data import (
    SUFFIX,
    VERSIONS,
    Atlas,
    Machine,
    atlas_files,
    packaged_atlases,
    read_atlas,
)
from profharness.atlas.shards import read_shards
from profharness.attention.config import Config
from profharness.attention.dispatch.machine import RELEASES, parse_release, release_text
from profharness.attention.dispatch.machine import Machine as RuleMachine
from profharness.device_types import CPU
from profharness.environment import gpu_name
from profharness.errors import NotFoundError, ProfharnessError, UsageError, printable_path

PACKAGE, USER = "package", "user"
FIELDS = (
    *("name", "origin", *(each.name for each in fields(Machine))),
    *("cells", "statuses", "regimes", "path"),
)


def user_folder(named: Path | None = None) -> Path:
    """Return the folder of the user's atlases, by default `$XDG_DATA_HOME/profharness/atlases`."""
    if named is not None:
        return named
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "profharness" / "atlases"


@dataclass(frozen=True, slots=True)
class Entry:
    """An atlas with its path and its origin, which is PACKAGE or USER."""

    path: Path
    origin: str
    atlas: Atlas

    @property
    def name(self) -> str:
        """Return the name that identifies the atlas in commands."""
        return self.path.name.removesuffix(SUFFIX)


def known_atlases(named: Path | None = None) -> list[Entry]:
    """Return the atlases of the package, followed by those of the user.

    A file in the user's folder that is not a valid atlas is logged and skipped. If an atlas of the
    package cannot be read, raise the errors of `read_atlas`.
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
    """Return whether GPU, torch, CUDA, cuDNN and driver are the same."""
    return all(getattr(one, name) == getattr(other, name) for name in VERSIONS)


def entry_record(entry: Entry) -> dict[str, Any]:
    """Return the JSON record of an atlas.

    It contains the machine, and the number of cells by status and by regime.
    """
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
    """Return the GPU and release that a user named, and the reason why there is no atlas of them.

    The reason is "" if there is an atlas. `own` is the name of this machine's GPU. If several
    atlases match, those with the versions of the environment `like` are preferred. Raise UsageError
    for an unknown GPU or release.
    """
    gpu = gpu or default_gpu(entries, own)
    if gpu.lower() == CPU:
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
    """Return the best machine among several atlases of one GPU and release.

    Prefer the machine that has the most versions in common with `like`, then a machine whose atlas
    is in the package and has a model, then the machine with the most cells. The place contains all
    atlases of that machine.
    """
    wanted = Machine.from_environment(like)

    def fit(entry: Entry) -> tuple[int, bool, int]:
        machine = entry.atlas.machine
        alike = sum(getattr(wanted, name) in (None, getattr(machine, name)) for name in VERSIONS)
        return alike, entry.origin == PACKAGE, len(entry.atlas)

    best = max(found, key=fit).atlas.machine
    alike = [entry for entry in found if same_machine(entry.atlas.machine, best)]
    # known_atlases returns the package's atlas first, and the model was fitted to that atlas
    first, *rest = [entry.atlas for entry in alike]
    others = [entry for entry in found if not same_machine(entry.atlas.machine, best)]
    return replace(place_of(first), own=tuple(rest), others=_others_text(best, others))


def _others_text(best: Machine, others: Sequence[Entry]) -> str:
    """List the atlases of other versions, which are not used. Return "" if no such atlas exists."""
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
    """Predictions for configs.

    `doubt` explains why a time is missing or may be wrong, and `answers` has a tuple of rows for
    each config. `backends` are the backends to show.
    """

    place: Place
    doubt: str
    answers: list[tuple[Predicted, ...]]
    backends: tuple[str, ...]

    def of(self, answer: Iterable[Predicted]) -> list[Predicted]:
        """Return the rows of the backends to show."""
        return [row for row in answer if row.backend in self.backends]


def predicted(
    configs: Sequence[Config],
    backends: Sequence[str] = (),
    gpu: str | None = None,
    torch: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    driver: str | None = None,
) -> Asked:
    """Predict configs on a GPU. `folder` contains the user's own atlases.

    Raise UsageError for an unknown GPU, release or backend, and the errors of `read_atlas`.
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
    """Find the atlas for the GPU and the PyTorch release in a run's environment. Return None if there
    is no such atlas.

    If several atlases match, prefer one that was recorded with the same library versions.
    """
    gpu, torch = str(environment.get("gpu")), str(environment.get("torch"))
    try:
        place, doubt = find_place(known_atlases(), gpu, torch, like=environment)
    except UsageError:  # an unknown GPU
        return None
    return None if doubt else place


TIMED = (
    *("source", "choice", "kernel_ns", "low_ns", "high_ns", "graph_ns", "bottleneck"),
    *("best", "best_ns", "regret", "certain", "outside"),
)


def timed(config: Config, gpu: str, rules: RuleMachine) -> tuple[dict[str, Any] | None, str]:
    """Return the prediction for `auto` on a GPU, and the reason why there is no prediction.

    The prediction contains a sentence that describes it, and the reason is "" then. If there is no
    atlas of this GPU, release and cuDNN version, return None and the reason. The reason is also ""
    if the GPU has no atlas at all.
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
    """Return the default GPU.

    This is the GPU of this machine if it has an atlas, else the only GPU that has one. Raise
    UsageError if no GPU or more than one GPU has an atlas. The message lists the GPUs.
    """
    gpus = list(dict.fromkeys(entry.atlas.machine.gpu for entry in entries))
    if own is not None and any(same_gpu(own, gpu) for gpu in gpus):
        return own
    if len(gpus) == 1:
        return gpus[0]
    known = f"there are atlases of {', '.join(gpus)}" if gpus else "there is no atlas"
    raise UsageError(f"which GPU is not said, and {known}; add --gpu NAME, such as --gpu H200")


def find_entries(entries: Sequence[Entry], name: str) -> list[Entry]:
    """Return the atlases of one machine.

    `name` is the name or path of an atlas, or the name of a GPU whose atlases are all of one
    machine. Raise NotFoundError if nothing matches or if several machines match.
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
    raise NotFoundError(f"{fault} {printable_path(name)!r}; there are {names}")


def read_any(path: Path) -> Atlas:
    """Read an atlas from a `.npz` file, from shards (JSON lines), or from an archive of shards.

    Raise the errors of `read_atlas` and `read_shards`.
    """
    if not path.exists():
        raise UsageError(
            f"{printable_path(path)}: there is no such file; give an atlas, or shards of one"
        )
    if path.is_file() and path.suffix != ".jsonl" and not path.name.endswith(".tar.xz"):
        return read_atlas(path)
    return read_shards(path)
