"""Find the atlas of a GPU and release, and predict configs from it.

A prediction contains the backend that PyTorch chooses, its kernels and time, the fastest backend,
and the time lost if PyTorch does not choose the fastest backend.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from profharness.atlas.data import (
    BACKENDS,
    NOTHING,
    SETTLED,
    SUFFIX,
    VERSIONS,
    Atlas,
    Launch,
    Machine,
    atlas_files,
    packaged_atlases,
    read_atlas,
)
from profharness.atlas.model import (
    Estimate,
    as_sampled,
    estimate,
    measured_estimate,
    measured_rows,
)
from profharness.atlas.shards import read_shards
from profharness.attention.config import AUTO, SDPA_BACKENDS, Config, require_configs
from profharness.attention.dispatch import rocm
from profharness.attention.dispatch.advice import PredictedTimes
from profharness.attention.dispatch.machine import Machine as RuleMachine
from profharness.attention.dispatch.machine import (
    Release,
    default_release,
    from_config,
    gpu_title,
    installed_release,
    known_releases,
    machine_for,
    machine_of,
    parse_release,
    release_text,
    require_known,
)
from profharness.attention.dispatch.predict import judge
from profharness.columns import VS_FASTEST, column
from profharness.device_types import CPU, CUDA
from profharness.devices import (
    Gpu,
    context_text,
    find_gpu,
    have_same_rates,
    pytorch_text,
    short_device_name,
)
from profharness.environment import gpu_name
from profharness.errors import (
    ProfharnessError,
    UnknownNameError,
    UsageError,
    choose_from,
    join_and,
    printable_path,
)
from profharness.rows import MEASURED, MODEL, Refusal
from profharness.traces.kernel_names import parse_kernel_name
from profharness.units import as_long, time_text

PACKAGE, USER = "package", "user"
REPEATS = 0.03  # 90 % of times differ by at most this share if measured again on another H200
CONTIGUOUS = (
    "The strides of the calls determine the predicted backends, but the times are for contiguous "
    "tensors."
)
MATH_COPIES = "math also copies tensors that are not contiguous, and these copies take extra time."
MAX_EXAMPLES = 3  # maximum number of cells that a message lists
TIMED = (
    *("source", "choice", "kernel_ns", "low_ns", "high_ns", "graph_ns", "bottleneck"),
    *("best", "best_ns", "regret", "certain", "outside", "timed_as"),
)


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


def user_folder(named: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of the user's atlases, by default `$XDG_DATA_HOME/profharness/atlases`."""
    if named is not None:
        return Path(named)
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "profharness" / "atlases"


def known_atlases(named: str | os.PathLike[str] | None = None) -> list[Entry]:
    """Return the atlases of the package, followed by the atlases of the user.

    A file in the user's folder that is not a valid atlas is logged and skipped. If an atlas of the
    package cannot be read, raise the errors of `read_atlas`.
    """
    entries = [*map(_packaged_entry, packaged_atlases())]
    for path in atlas_files(user_folder(named)):
        try:
            entries.append(Entry(path, USER, read_atlas(path)))
        except ProfharnessError as error:
            _log_once(f"{error} (skipped)")
    return entries


@cache  # files of the package do not change, and reading one takes 40 ms
def _packaged_entry(path: Path) -> Entry:
    return Entry(path, PACKAGE, read_atlas(path))


@cache
def _log_once(text: str) -> None:
    logging.getLogger(__name__).warning(text)


def same_machine(one: Machine, other: Machine) -> bool:
    """Return whether GPU, torch, CUDA, cuDNN and driver are the same."""
    return all(getattr(one, name) == getattr(other, name) for name in VERSIONS)


def same_gpu(one: str, other: str) -> bool:
    """Return whether two names stand for the same GPU.

    Two variants of a board are different GPUs if the rates in their data sheets differ.
    """
    names = set()
    for text in (one, other):
        known = _known_gpu(text)
        names.add(known.name if known else re.sub(r"[^a-z0-9]|nvidia", "", text.lower()))
    return len(names) == 1 and have_same_rates(one, other)


def _known_gpu(name: str) -> Gpu | None:
    try:
        return find_gpu(name)
    except UsageError:
        return None


def read_any(path: Path) -> Atlas:
    """Read an atlas from a `.npz` file, from shards (JSON lines), or from an archive of shards.

    Raise the errors of `read_atlas` and `read_shards`.
    """
    if not path.exists():
        raise UsageError(f"{printable_path(path)}: no such file; pass an atlas or its shards")
    if path.is_file() and path.suffix != ".jsonl" and not path.name.endswith(".tar.xz"):
        return read_atlas(path)
    return read_shards(path)


def find_entries(entries: Sequence[Entry], name: str) -> list[Entry]:
    """Return the atlases of the machine that `name` selects.

    `name` is the name or path of an atlas, or the name of a GPU. Raise NotFoundError if nothing
    matches, or if the atlases of the GPU belong to several machines.
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
    fault = "several atlases match" if fitting else "no atlas or file"
    raise UnknownNameError(f"{fault} {printable_path(name)!r}; choose from {names}")


@dataclass(frozen=True, slots=True)
class Place:
    """A GPU and a PyTorch release.

    `atlas` is None if no atlas was measured on this GPU with this release. `asked` is the GPU's
    name in the table of GPUs, or its compute capability if the table does not contain the GPU.
    `own` contains the user's atlases of the same machine. Their cells take precedence over the
    cells of `atlas`. `others` describes atlases of other versions, which are not used.
    """

    gpu: str
    release: str
    rules: RuleMachine
    asked: str
    atlas: Atlas | None = None
    own: tuple[Atlas, ...] = ()
    others: str = ""

    @property
    def text(self) -> str:
        """Describe the place completely, with the driver and the build of PyTorch."""
        return self.described(full=True)

    def described(self, *, full: bool = False) -> str:
        """Describe the place, as in `H200, torch 2.11.0, cuDNN 91900`. If `full` is set, add the
        driver and the build of PyTorch.
        """
        if self.atlas is not None:
            return context_text(self.atlas.machine.environment, full=full)
        known = {"gpu": self.gpu, "torch": self.release, "cudnn": self.rules.cudnn}
        return context_text(known, "no atlas", full=full)


def find_place(
    entries: Sequence[Entry],
    gpu: str | None,
    torch: str | None,
    *,
    driver: str | None = None,
    like: Mapping[str, Any] | None = None,
) -> tuple[Place, str]:
    """Return the place for a GPU and a release, and the reason if there is no atlas for them.

    The reason is "" if there is an atlas. If several atlases match, prefer the atlas that has most
    versions in common with the environment `like`. Raise UsageError for an unknown GPU or release.
    """
    gpu = gpu or default_gpu(entries)
    if gpu.lower() == CPU:
        raise UsageError(
            "there are no atlases for CPUs; `profharness explain --gpu cpu` shows which backend "
            "PyTorch chooses on a CPU"
        )
    fitting = [entry for entry in entries if same_gpu(gpu, entry.atlas.machine.gpu)]
    releases = {parse_release(entry.atlas.machine.torch) for entry in fitting}
    release = release_for(entries, [gpu])[0] if torch is None else parse_release(torch)
    found = [entry for entry in fitting if parse_release(entry.atlas.machine.torch) == release]
    if asked := [entry for entry in found if driver in (None, entry.atlas.machine.driver)]:
        return _best_place(asked, like or {}), ""
    rules, name = machine_for(gpu, release_text(release)), gpu_title(gpu)
    if release not in releases:
        require_known(release, rules.architecture)
    full = name if same_gpu(gpu, name) else gpu
    place = Place(full, release_text(rules.torch), rules, name)
    what = f"{short_device_name(place.gpu)} with {pytorch_text(place.release)}"
    if found:
        what += f" and driver {driver}"
        drivers = dict.fromkeys(str(entry.atlas.machine.driver) for entry in found)
        there = f"this GPU has atlases for driver {', '.join(drivers)}"
    elif releases:
        names = [pytorch_text(release_text(each)) for each in sorted(releases)]
        there = f"this GPU has atlases for {join_and(names)}"
    else:
        gpus = dict.fromkeys(short_device_name(entry.atlas.machine.gpu) for entry in entries)
        there = f"there are atlases for {', '.join(gpus) or 'no GPU'}"
    return place, f"no time can be predicted, because there is no atlas for {what}; {there}"


def release_for(entries: Sequence[Entry], gpus: Sequence[str]) -> tuple[Release, str]:
    """Return the default release for GPUs, and a clause that says why it is used.

    Several GPUs get the same release, so that only the GPUs differ: a release with an atlas for at
    least one of them, if possible. Raise UsageError for an unknown GPU without an atlas.
    """
    measured = {gpu: _releases(entries, gpu) for gpu in gpus}
    usable = []  # of each GPU: releases whose rules are known, or that have an atlas
    for gpu in gpus:
        if not measured[gpu]:
            gpu_title(gpu)
        amd = rocm.find_amd_gpu(gpu)
        known = known_releases(None if amd is None else amd.architecture)
        usable.append({*known} | measured[gpu])
    common = set.intersection(*usable)
    release = default_release(common & set().union(*measured.values()) or common)
    with_atlas = [
        short_device_name(gpu) for gpu, releases in measured.items() if release in releases
    ]
    why = (
        f"the newest release with an atlas for {join_and(with_atlas)}"
        if with_atlas
        else "the newest release whose dispatch rules are known"
    )
    installed = installed_release()
    if installed == release:
        why = "which is installed"
    elif installed is not None:
        why += f" (installed: {pytorch_text(release_text(installed))})"
    chosen = pytorch_text(release_text(release))
    return release, f"Using {chosen}, {why}; specify another with --torch"


def _releases(entries: Sequence[Entry], gpu: str) -> set[Release]:
    """Return the releases with an atlas of a GPU."""
    machines = [entry.atlas.machine for entry in entries]
    return {parse_release(each.torch) for each in machines if same_gpu(gpu, each.gpu)}


def assumed_release(gpu: str | None) -> str:
    """Return the release to assume for a program on a GPU, or on a CPU, whose release is unknown."""
    return release_text(
        default_release() if gpu is None else release_for(known_atlases(), [gpu])[0]
    )


def default_gpu(entries: Sequence[Entry]) -> str:
    """Return this machine's GPU if it has an atlas. Otherwise, return the only GPU with an atlas.

    Raise UsageError if no GPU or several GPUs have atlases.
    """
    gpus = list(dict.fromkeys(entry.atlas.machine.gpu for entry in entries))
    own = gpu_name()
    if own is not None and any(same_gpu(own, gpu) for gpu in gpus):
        return own
    if len(gpus) == 1:
        return gpus[0]
    known = (
        f"there are atlases for {', '.join(map(short_device_name, gpus))}"
        if gpus
        else "there is no atlas"
    )
    raise UsageError(f"no GPU was given, and {known}; add --gpu NAME, such as --gpu H200")


def _best_place(found: Sequence[Entry], like: Mapping[str, Any]) -> Place:
    """Return the best machine among several atlases of one GPU and release.

    Prefer the machine that has the most versions in common with `like`, then a machine whose atlas
    is in the package and has a model, then the machine with the most cells. The place contains all
    atlases of that machine.
    """

    def fit(entry: Entry) -> tuple[int, bool, int]:
        known = entry.atlas.machine.environment
        alike = sum(like.get(name) in (None, value) for name, value in known.items())
        return alike, entry.origin == PACKAGE, len(entry.atlas)

    best = max(found, key=fit).atlas.machine
    alike = [entry.atlas for entry in found if same_machine(entry.atlas.machine, best)]
    # known_atlases returns the package's atlas first, and the model was fitted to that atlas
    atlas, *own = alike
    others = []
    for entry in found:
        machine = entry.atlas.machine
        names = [name for name in VERSIONS if getattr(machine, name) != getattr(best, name)]
        versions = ", ".join(f"{name} {getattr(machine, name)}" for name in names)
        if versions:
            others.append(f"{versions} ({entry.origin}, {len(entry.atlas):,} cells)")
    text = (
        (
            f"the prediction uses the atlas for driver {best.driver} and cuDNN {best.cudnn}; "
            f"other atlases of this GPU and release are not used: {'; '.join(others)}"
        )
        if others
        else ""
    )
    known = _known_gpu(best.gpu)
    capability = ".".join(map(str, known.capability)) if known else best.capability
    rules = machine_of(best.environment | {"capability": capability})
    name, asked = (known.name, known.name) if known else (best.gpu, rules.sm)
    return Place(name, release_text(rules.torch), rules, asked, atlas, tuple(own), text)


def place_estimates(
    place: Place, configs: Sequence[Config], backends: Sequence[str]
) -> list[Estimate]:
    """Return an estimate for each config on each backend, sorted by config and then by backend.

    Measurements in the user's own atlases take precedence. If the layout of a config has no times,
    the rules for this layout determine the backend, and the times are those of `as_sampled`.
    """
    estimates = _exact_estimates(place, configs, backends)
    sampled = list(map(as_sampled, configs))
    wanted = [
        (at, config)
        for at, estimate in enumerate(estimates)
        if (config := sampled[at // len(backends)]) != configs[at // len(backends)]
        and estimate.choice is not None
        and estimate.kernel_us is None
    ]
    others = list({config: None for _, config in wanted})
    found = iter(_exact_estimates(place, others, BACKENDS) if others else ())
    times = {config: _times_by_choice([next(found) for _ in BACKENDS]) for config in others}
    for at, config in wanted:
        own, other = estimates[at], times[config].get(str(estimates[at].choice))
        if other is not None and other.kernel_us is None:
            estimates[at] = replace(estimates[at], outside=other.outside)
        elif other is not None:
            asked = configs[at // len(backends)]
            estimates[at] = replace(
                other,
                backend=own.backend,
                choice=own.choice,
                status=own.status,
                # The scale does not change the time.
                timed_as=None if replace(asked, scale=None) == config else config,
            )
    return estimates


def _times_by_choice(estimates: Iterable[Estimate]) -> dict[str, Estimate]:
    """Map each backend to the estimate for one config, which may come from a call of `auto`."""
    found = {each.backend: each for each in estimates}
    auto = found.pop(AUTO)
    if auto.choice in found and auto.source == MEASURED != found[auto.choice].source:
        found[auto.choice] = auto
    return found


def _exact_estimates(
    place: Place, configs: Sequence[Config], backends: Sequence[str]
) -> list[Estimate]:
    asked = (place.atlas, configs, backends, place.asked, place.release)
    estimates = estimate(*asked, rules=place.rules)
    for atlas in place.own:
        for at, row in enumerate(measured_rows(atlas, configs, backends)):
            if row != NOTHING and (cell := atlas.cell(row)).status in SETTLED:
                estimates[at] = measured_estimate(cell)
    return estimates


def disagreement(place: Place, configs: Sequence[Config]) -> str:
    """Describe the cells whose results differ between the user's atlases and the package's atlas.

    Only cells of the given configs are compared. Return "" if all results agree.
    """
    if place.atlas is None:
        return ""
    differing = []
    for atlas in place.own:
        rows = [row for row in atlas.rows(configs, BACKENDS) if row != NOTHING]
        for cell in map(atlas.cell, rows):
            known = place.atlas.find(cell.config, cell.backend)
            if known is not None and (what := known.difference(cell)):
                differing.append(f"{cell.config.label} {cell.backend}: {what[0]} {what[1]}")
    if not differing:
        return ""
    return (
        f"your own atlas of this machine and {place.atlas.source} disagree on "
        f"{len(differing):,} cells; your own atlas is used: {'; '.join(differing[:MAX_EXAMPLES])}"
    )


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The prediction for a config on a backend."""

    config: Annotated[str, column("config", meaning="label of the attention problem")]
    backend: Annotated[
        str, column("backend", importance="key", repeat=False, meaning="the backend")
    ]
    gpu: Annotated[str, column(meaning="the GPU")]
    torch: Annotated[str, column(meaning="release of PyTorch")]
    source: Annotated[
        str,
        column(
            "source",
            meaning="`measured` if the atlas contains the cell, `model` if the time is interpolated by "
            "the model, `floor` if no time is known",
        ),
    ]
    status: Annotated[str, column(meaning="`ok`, `refused`, `unknown`, or the kind of failure")]
    choice: Annotated[
        str | None,
        column(
            "predicted backend",
            importance="answer",
            meaning="the backend that the dispatch rules predict for `auto`, or `none` if PyTorch "
            "raises an error; in tables, a forced backend is named itself",
        ),
    ]
    reasons: Annotated[tuple[Refusal, ...], column(meaning="why the backend refuses the config")]
    kernel_ns: Annotated[
        int | None,
        column(
            "predicted µs/call",
            "time",
            importance="answer",
            scale="call",
            meaning="kernel time of the call",
        ),
    ]
    low_ns: Annotated[
        int | None,
        column(
            meaning="lower end of the 90 % interval for the time; if the source is `floor`, the "
            "roofline bound",
        ),
    ]
    high_ns: Annotated[
        int | None,
        column(
            meaning="upper end of the 90 % interval for the time",
        ),
    ]
    error: Annotated[float | None, column(meaning="relative error of the model")]
    graph_ns: Annotated[
        int | None,
        column(
            "predicted graph µs/call",
            "time",
            importance="detail",
            scale="call",
            meaning="time of a CUDA graph replay of the call",
        ),
    ]
    bottleneck: Annotated[
        str | None, column("bottleneck", shrink=True, meaning="what limits the time")
    ]
    best: Annotated[
        str | None,
        column("fastest", importance="answer", meaning="the fastest backend whose time is known"),
    ] = None
    best_ns: Annotated[
        int | None,
        column("predicted fastest µs/call", "time", scale="call", meaning="time of `best`"),
    ] = None
    regret: Annotated[
        float | None,
        column(
            VS_FASTEST,
            "excess",
            importance="answer",
            meaning="how much longer `kernel_ns` is than `best_ns` (kernel_ns / best_ns - 1); "
            "tables show the ratio of the times",
        ),
    ] = None
    certain: Annotated[
        bool | None,
        column(meaning="true if the intervals of `kernel_ns` and `best_ns` do not overlap"),
    ] = None
    """The interval of a measured time t in this comparison is t * (1 ± REPEATS)."""
    outside: Annotated[str | None, column(meaning="why the time is unknown")] = None
    timed_as: Annotated[
        str | None,
        column(
            meaning="label of the contiguous version of the config, to which the times refer; null "
            "if it is the same as `config`"
        ),
    ] = None
    kernels: Annotated[tuple[Launch, ...] | None, column(meaning="the kernels of a call")] = None

    @property
    def interval(
        self,
    ) -> Annotated[
        tuple[int, int | None] | None,
        column(
            "90 % interval",
            "interval",
            importance="detail",
            scale="call",
            meaning="90 % interval for the time; if the source is `floor`, the roofline bound",
        ),
    ]:
        """The interval of the time, or None if the time was measured."""
        return None if self.low_ns is None else (self.low_ns, self.high_ns)


BOUND = "floor µs/call"
"""The title of a column of intervals if all times have the source `floor`."""
FIELDS = tuple(field.name for field in fields(Predicted))


@dataclass(frozen=True, slots=True)
class Asked:
    """Predictions for configs.

    `doubt` explains why times are missing or may be wrong. `answers` contains a tuple of rows for
    each config. `backends` contains the backends to show.
    """

    place: Place
    doubt: str
    answers: list[tuple[Predicted, ...]]
    backends: tuple[str, ...]

    def of(self, answer: Iterable[Predicted]) -> list[Predicted]:
        """Return the rows of an answer for the backends to show."""
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
    for name in backends:
        if name not in (*BACKENDS, "all"):
            raise UsageError(
                f"--backend {name!r}: atlases contain only PyTorch's own backends; "
                f"{choose_from(name, BACKENDS)}"
            )
    shown = BACKENDS if not backends or "all" in backends else tuple(dict.fromkeys(backends))
    require_configs(configs)
    place, doubt = find_place(known_atlases(folder), gpu, torch, driver=driver)
    doubts = (doubt, place.others, disagreement(place, configs))
    return Asked(place, "\n".join(filter(None, doubts)), predict_all(place, configs), shown)


def place_at(environment: Mapping[str, Any]) -> Place | None:
    """Return the place for the GPU and release of a run's environment.

    Return None if there is no atlas for them. If several atlases match, prefer the atlas that has
    most versions in common with the environment.
    """
    gpu, torch = str(environment.get("gpu")), str(environment.get("torch"))
    try:
        place, doubt = find_place(known_atlases(), gpu, torch, like=environment)
    except UsageError:  # an unknown GPU
        return None
    return None if doubt else place


def timed_place(gpu: str, rules: RuleMachine) -> tuple[Place | None, str]:
    """Return the place with an atlas for a GPU, release and cuDNN version, and the reason if there
    is none.

    The reason is "" if there is a place, or if the GPU has no atlas at all.
    """
    like = {"torch_cuda": rules.cuda, "cudnn": rules.cudnn}
    entries = known_atlases()
    place, doubt = find_place(entries, gpu, release_text(rules.torch), like=like)
    if doubt:
        known = any(same_gpu(gpu, entry.atlas.machine.gpu) for entry in entries)
        return None, doubt if known else ""
    if place.rules.cudnn != rules.cudnn:
        return None, f"no time: the atlas is for {place.described()}, not for cuDNN {rules.cudnn}"
    return place, ""


def prediction_record(answer: Sequence[Predicted]) -> dict[str, Any]:
    """Return the prediction for `auto` as a record with the keys of TIMED.

    The key `statement` contains a sentence that describes the prediction.
    """
    return {"statement": statement(answer)} | {name: getattr(answer[0], name) for name in TIMED}


def saving(before: Predicted | None, after: Predicted) -> PredictedTimes | None:
    """Return the times of a call before and after a change. Return None if the new time is unknown."""
    if after.kernel_ns is None:
        return None
    if before is None or before.kernel_ns is None:
        return PredictedTimes(None, after.kernel_ns, None, None, after.source)
    old, new = (_bounds(each.source, each.low_ns, each.high_ns) for each in (before, after))
    measured = before.source == after.source == MEASURED
    return PredictedTimes(
        before_ns=before.kernel_ns,
        after_ns=after.kernel_ns,
        speed_up=before.kernel_ns / after.kernel_ns,
        certain=old[0] > new[1] or new[0] > old[1],
        source=MEASURED if measured else MODEL,
    )


def predict_all(place: Place, configs: Sequence[Config]) -> list[tuple[Predicted, ...]]:
    """Return the predictions for each config, first for `auto` and then for each PyTorch backend.

    `auto` and the backend that PyTorch chooses for it make the same call. If only one of them was
    measured, its result is used for both.
    """
    resolved = [config.resolve(CUDA) for config in configs]
    estimates = iter(place_estimates(place, resolved, BACKENDS))
    answers = []
    for config in resolved:
        estimated = {backend: next(estimates) for backend in BACKENDS}
        auto = estimated[AUTO]
        if auto.choice in SDPA_BACKENDS and auto.status == "ok":
            for known, other in ((AUTO, auto.choice), (auto.choice, AUTO)):
                if estimated[known].source == MEASURED != estimated[other].source:
                    estimated[other] = replace(estimated[known], backend=other, choice=auto.choice)
        timed = [each for name, each in estimated.items() if each.kernel_us and name != AUTO]
        best = min(timed, key=lambda each: each.kernel_us or 0, default=None)
        answers.append(tuple(_row(config, each, best, place) for each in estimated.values()))
    return answers


def _row(config: Config, estimated: Estimate, best: Estimate | None, place: Place) -> Predicted:
    choice, reasons = None, tuple[Refusal, ...]()
    if estimated.backend == AUTO:
        choice = estimated.choice or ("unknown" if estimated.status == "unknown" else "none")
    elif estimated.status == "refused":
        verdict = judge(estimated.backend, from_config(config), place.rules)
        reasons = verdict.certain or verdict.reasons
    regret = certain = None
    if best is not None and best.kernel_us and estimated.kernel_us is not None:
        same = best.backend in (estimated.backend, estimated.choice)
        regret = 0.0 if same else max(0.0, estimated.kernel_us / best.kernel_us - 1)
        slow, fast = (_bounds(each.source, each.low_us, each.high_us) for each in (estimated, best))
        certain = same or slow[0] > fast[1]
    return Predicted(
        config=config.label,
        backend=estimated.backend,
        gpu=place.gpu,
        torch=place.release,
        source=estimated.source,
        status="refused" if estimated.status == "none" else estimated.status,
        choice=choice,
        reasons=reasons,
        kernel_ns=nanoseconds(estimated.kernel_us),
        low_ns=nanoseconds(estimated.low_us),
        high_ns=nanoseconds(estimated.high_us),
        error=estimated.error,
        graph_ns=nanoseconds(estimated.graph_us),
        bottleneck=estimated.bottleneck,
        best=None if best is None else best.backend,
        best_ns=None if best is None else nanoseconds(best.kernel_us),
        regret=regret,
        certain=certain,
        outside=estimated.outside or None,
        timed_as=None if estimated.timed_as is None else estimated.timed_as.label,
        kernels=tuple(estimated.launches) or None,
    )


def _bounds(source: str, low: float | None, high: float | None) -> tuple[float, float]:
    """Return the interval of a time, which is wider for a measured time (see REPEATS)."""
    bounds = low or 0.0, math.inf if high is None else high
    return (bounds[0] * (1 - REPEATS), bounds[1] * (1 + REPEATS)) if source == MEASURED else bounds


def nanoseconds(us: float | None) -> int | None:
    """Convert microseconds to whole nanoseconds."""
    return None if us is None else round(1e3 * us)


def statement(answer: Sequence[Predicted]) -> str:
    """Describe the backend that `auto` selects, its time, and the fastest backend."""
    auto = answer[0]
    if auto.choice == "none":
        return "PyTorch is predicted to raise an error, because no backend accepts this config."
    if auto.choice == "unknown":
        return (
            "It is unknown which backend auto selects, because the rules do not cover this release."
        )
    runs = "runs" if auto.source == MEASURED else "is predicted to run"
    lead = f"auto {runs} {auto.choice!s}"
    if auto.kernel_ns is None:
        bound = f", at least {time_text(auto.low_ns)} by the roofline" if auto.low_ns else ""
        return f"{lead}; its time is unknown{bound}."
    lead = f"{lead} in {_time(auto)}"
    if auto.best is None or auto.regret is None:
        return f"{lead}."
    if auto.best == auto.choice:
        return f"{lead}; no other backend that accepts the call is faster."
    best = next(row for row in answer if row.backend == auto.best)
    fastest = str(auto.best)
    if not auto.certain:
        return f"{lead}; {fastest} may be faster: {_time(best)}, but the intervals overlap."
    return (
        f"{lead}; {fastest} is the fastest: {_time(best)}. auto takes {as_long(1 + auto.regret)}."
    )


def _time(row: Predicted) -> str:
    """Format a time such as `41.2 µs (measured)`, or a predicted time with its interval."""
    text = time_text(row.kernel_ns or 0)
    if row.source != MODEL or row.low_ns is None or row.high_ns is None:
        return f"{text} ({row.source})"
    return f"{text} ({time_text(row.low_ns)} to {time_text(row.high_ns)})"


def timing_note(rows: Iterable[Predicted]) -> str:
    """Return a text about rows with the times of contiguous tensors, or "" if there are none."""
    return contiguous_note(row.backend for row in rows if row.timed_as)


def contiguous_note(backends: Iterable[str]) -> str:
    """Return a text about backends with the times of contiguous tensors, or "" if there are none."""
    names = set(backends)
    texts = [CONTIGUOUS] if names else []
    return " ".join([*texts, MATH_COPIES] if "math" in names else texts)


def predicted_record(row: Predicted) -> dict[str, Any]:
    """Return the JSON record of a prediction. Times are in ns, and each kernel is a dict."""
    record = {name: getattr(row, name) for name in FIELDS}
    record["reasons"] = [asdict(reason) for reason in row.reasons]
    record["kernels"] = None if row.kernels is None else list(map(launch_record, row.kernels))
    return record


def launch_record(launch: Launch) -> dict[str, Any]:
    """Return a launch as a dict with the same keys as a row of the `kernels` command.

    The grid, block, registers and shared memory of a memset are None.
    """
    return {
        "kernel": launch.kernel,
        "kernel_short": parse_kernel_name(launch.kernel).short,
        "grid": launch.grid,
        "block": launch.block,
        "registers_per_thread": launch.registers,
        "shared_bytes": launch.shared_bytes,
        "duration_ns": nanoseconds(launch.time_us),
    }


def flat_record(row: Predicted) -> dict[str, Any]:
    """Return a prediction as a flat row of a data frame.

    The row contains the short names of kernels and the codes of reasons.
    """
    record = predicted_record(row)
    names = [each["kernel_short"] for each in record["kernels"] or ()]
    return record | {
        "reasons": "; ".join(reason.code for reason in row.reasons),
        "kernels": "; ".join(names) or None,
    }
