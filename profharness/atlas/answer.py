"""Predict configs on a GPU from its atlas.

A prediction contains the backend that PyTorch chooses, its kernels and time, the fastest backend,
and the time lost if PyTorch does not choose the fastest one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from profharness.atlas.checks import BACKENDS, MAX_EXAMPLES, SETTLED
from profharness.atlas.data import NOTHING, Atlas, Launch, Machine
from profharness.atlas.model import Estimate, estimate, measured_estimate
from profharness.attention.config import AUTO, SDPA_BACKENDS, Config
from profharness.attention.dispatch.machine import Machine as RuleMachine
from profharness.attention.dispatch.machine import (
    from_config,
    machine_for,
    machine_of,
    release_text,
)
from profharness.attention.dispatch.predict import judge
from profharness.device_types import CUDA
from profharness.devices import Gpu, data_sheet, find_gpu
from profharness.errors import UsageError
from profharness.rows import Refusal
from profharness.traces.kernel_names import parse_kernel_name

MEASURED = "measured"
REPEATS = 0.03  # relative difference of 90 % of the times if measured again on another H200


@dataclass(frozen=True, slots=True)
class Place:
    """A GPU and a PyTorch release.

    `atlas` is None if no atlas was measured on this GPU with this release. `asked` is the GPU's
    name in the table of GPUs, or its compute capability if the table does not contain it. `own`
    contains the user's atlases of the same machine. Their cells take precedence over those of
    `atlas`. `others` describes the atlases of other versions, which are not used.
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
        """Return a text such as `NVIDIA H200, torch 2.11.0+cu130, cuDNN 91900, driver 580.159.04`."""
        if self.atlas is not None:
            return machine_text(self.atlas.machine)
        cudnn = f", cuDNN {self.rules.cudnn}" if self.rules.cudnn else ""
        return f"{self.gpu}, torch {self.release}{cudnn}, no atlas"


def machine_text(machine: Machine) -> str:
    """Describe a machine in one line."""
    driver = f", driver {machine.driver}" if machine.driver else ""
    return f"{machine.gpu}, torch {machine.torch}, cuDNN {machine.cudnn}{driver}"


def place_of(atlas: Atlas) -> Place:
    """Return the place where an atlas was measured.

    Its GPU may be missing from the table of GPUs.
    """
    machine = atlas.machine
    known = known_gpu(machine.gpu)
    capability = f"{known.capability[0]}.{known.capability[1]}" if known else machine.capability
    environment = {"torch": machine.torch, "torch_cuda": machine.cuda, "cudnn": machine.cudnn}
    rules = machine_of(environment | {"capability": capability})
    name = known.name if known else machine.gpu
    return Place(name, release_text(rules.torch), rules, known.name if known else rules.sm, atlas)


def place_estimates(
    place: Place, configs: Sequence[Config], backends: Sequence[str]
) -> list[Estimate]:
    """Return an estimate for each config on each backend, in the order configs x backends.

    The user's own measurements take precedence.
    """
    asked = (place.atlas, configs, backends, place.asked, place.release)
    estimates = estimate(*asked, rules=place.rules)
    for atlas in place.own:
        for at, row in enumerate(atlas.rows(configs, backends)):
            if row != NOTHING and (cell := atlas.cell(row)).status in SETTLED:
                estimates[at] = measured_estimate(cell)
    return estimates


def disagreement(place: Place, configs: Sequence[Config]) -> str:
    """Describe the cells of these configs whose results differ between the user's atlases and the
    package's atlas. Return "" if all results agree.
    """
    if place.atlas is None or not place.own:
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
    first = "; ".join(differing[:MAX_EXAMPLES])
    return (
        f"your own atlas of this machine and {place.atlas.source} disagree on {len(differing):,} cells, "
        f"and your own answer: {first}"
    )


def place_named(gpu: str, torch: str) -> Place:
    """Return a place without an atlas. Raise UsageError for an unknown GPU or release."""
    rules, name = machine_for(gpu, torch), find_gpu(gpu).name
    shown = name if same_gpu(gpu, name) else gpu
    return Place(shown, release_text(rules.torch), rules, name)


def known_gpu(name: str) -> Gpu | None:
    """Return the row of a GPU in the table of GPUs, or None if the table does not contain it."""
    try:
        return find_gpu(name)
    except UsageError:
        return None


def same_gpu(one: str, other: str) -> bool:
    """Return whether two names mean the same GPU.

    Two variants of a board are different GPUs if their data sheets give different rates.
    """
    names, rates = set(), set()
    for text in (one, other):
        known, sheet = known_gpu(text), data_sheet(text)
        names.add(known.name if known else re.sub(r"[^a-z0-9]|nvidia", "", text.lower()))
        if sheet is not None:  # no data sheet is found if the user spells the name differently
            rates.add((*sheet.flops_per_s.items(), sheet.bandwidth_bytes_per_s))
    return len(names) == 1 and len(rates) < 2


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The prediction for a config on a backend.

    `source` is `measured` if the atlas contains the cell, and `model` if the model interpolates
    between measured cells. It is `floor` if no time is known. Then low_ns is the roofline bound.
    Otherwise low_ns and high_ns are the limits of the 90 % interval, and `error` is the relative
    error of the model. `choice` is the backend that the dispatch rules choose for `auto`. `reasons`
    explains why the backend refuses the config. `best` is the fastest backend whose time is known,
    and `regret` is kernel_ns / best_ns - 1. `certain` is whether the intervals of this backend and
    of the fastest one are disjoint. The interval of a measured time is the time plus or minus
    REPEATS.
    """

    config: str
    backend: str
    gpu: str
    torch: str
    source: str
    status: str
    choice: str | None
    reasons: tuple[Refusal, ...]
    kernel_ns: int | None
    low_ns: int | None
    high_ns: int | None
    error: float | None
    graph_ns: int | None
    bottleneck: str | None
    best: str | None = None
    best_ns: int | None = None
    regret: float | None = None
    certain: bool | None = None
    outside: str | None = None
    kernels: tuple[Launch, ...] | None = None


FIELDS = tuple(field.name for field in fields(Predicted))


def predict_all(place: Place, configs: Sequence[Config]) -> list[tuple[Predicted, ...]]:
    """Return a tuple for each config, with the prediction for `auto` and then for each PyTorch
    backend.

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
        answers.append(_rows(config, estimated, place))
    return answers


def _rows(config: Config, estimated: Mapping[str, Estimate], place: Place) -> tuple[Predicted, ...]:
    """Return the rows of a config, with the best backend and the regret of each row."""
    timed = [each for name, each in estimated.items() if each.kernel_us and name != AUTO]
    best = min(timed, key=lambda each: each.kernel_us or 0, default=None)
    label = config.label
    return tuple(
        Predicted(
            config=label,
            backend=each.backend,
            gpu=place.gpu,
            torch=place.release,
            source=each.source,
            status="refused" if each.status == "none" else each.status,
            choice=_choice(each),
            reasons=_reasons(config, each, place),
            kernel_ns=nanoseconds(each.kernel_us),
            low_ns=nanoseconds(each.low_us),
            high_ns=nanoseconds(each.high_us),
            error=each.error,
            graph_ns=nanoseconds(each.graph_us),
            bottleneck=each.bottleneck,
            best=None if best is None else best.backend,
            best_ns=None if best is None else nanoseconds(best.kernel_us),
            regret=(regret := None if best is None else _regret(each, best)),
            certain=None if best is None or regret is None else _is_certain(each, best),
            outside=each.outside or None,
            kernels=tuple(each.launches) if each.launches else None,
        )
        for each in estimated.values()
    )


def _choice(estimated: Estimate) -> str | None:
    """Return the backend that PyTorch chooses for `auto`, or `none` if PyTorch raises an error.

    Return None if the estimate is for another backend than `auto`.
    """
    if estimated.backend != AUTO:
        return None
    return estimated.choice or ("unknown" if estimated.status == "unknown" else "none")


def _reasons(config: Config, estimated: Estimate, place: Place) -> tuple[Refusal, ...]:
    if estimated.status != "refused" or estimated.backend == AUTO:
        return ()
    verdict = judge(estimated.backend, from_config(config), place.rules)
    return verdict.certain or verdict.reasons


def _regret(estimated: Estimate, best: Estimate) -> float | None:
    if estimated.kernel_us is None or not best.kernel_us:
        return None
    same = best.backend in (estimated.backend, estimated.choice)
    return 0.0 if same else max(0.0, estimated.kernel_us / best.kernel_us - 1)


def _is_certain(estimated: Estimate, best: Estimate) -> bool:
    same = best.backend in (estimated.backend, estimated.choice)
    return same or _bounds(estimated)[0] > _bounds(best)[1]


def _bounds(estimated: Estimate) -> tuple[float, float]:
    """Return the lower and upper limit of a time.

    Widen a measured time by REPEATS to both sides.
    """
    low, high = estimated.low_us or 0.0, estimated.high_us or math.inf
    return (
        (low * (1 - REPEATS), high * (1 + REPEATS)) if estimated.source == MEASURED else (low, high)
    )


def nanoseconds(us: float | None) -> int | None:
    return None if us is None else round(1e3 * us)


def statement(answer: Sequence[Predicted]) -> str:
    """Describe which backend PyTorch chooses, its time, the fastest backend, and the time that `auto` loses."""
    auto = answer[0]
    lead = f"auto takes {auto.choice}"
    if auto.choice == "none":
        return "auto raises: no backend takes this config."
    if auto.choice == "unknown":
        return "what auto takes is not known: the rules of this release do not tell."
    if auto.kernel_ns is None:
        bound = "" if not auto.low_ns else f", and not below {_us(auto.low_ns)} by the roofline"
        return f"{lead} by rule; its time is not known{bound}."
    lead = f"{lead}: {_time(auto)}"
    if auto.best is None or auto.regret is None:
        return f"{lead}."
    if auto.best == auto.choice:
        return f"{lead}; no other backend with a known time is faster."
    best = next(row for row in answer if row.backend == auto.best)
    if not auto.certain:
        return f"{lead}; {auto.best} may be faster: {_time(best)}, which the intervals leave open."
    return f"{lead}; {auto.best} is the fastest: {_time(best)}. auto loses {auto.regret:.0%}."


def _time(row: Predicted) -> str:
    """Return a text such as `41.20 µs, measured`.

    A time from the model is shown with its interval.
    """
    text = _us(row.kernel_ns)
    if row.source != "model" or row.low_ns is None or row.high_ns is None:
        return f"{text}, {row.source}"
    return f"{text} ({row.low_ns / 1e3:.2f} to {row.high_ns / 1e3:.2f}) by the model"


def _us(ns: int | None) -> str:
    return "-" if ns is None else f"{ns / 1e3:.2f} µs"


def predicted_record(row: Predicted) -> dict[str, Any]:
    """Return the JSON record of a prediction. Times are in ns, and each kernel is a dict."""
    record = {name: getattr(row, name) for name in FIELDS}
    record["reasons"] = [asdict(reason) for reason in row.reasons]
    record["kernels"] = None if row.kernels is None else list(map(launch_record, row.kernels))
    return record


def launch_record(launch: Launch) -> dict[str, Any]:
    """Return a launch as a dict with the keys of a row of `kernels`.

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

    Kernels are given by their short names, and reasons by their codes.
    """
    record = predicted_record(row)
    names = [each["kernel_short"] for each in record["kernels"] or ()]
    return record | {
        "reasons": "; ".join(reason.code for reason in row.reasons),
        "kernels": "; ".join(names) or None,
    }


def shown_backends(names: Sequence[str]) -> tuple[str, ...]:
    """Return the backends to show. An empty sequence means all backends.

    Raise UsageError for a backend that is not one of PyTorch's.
    """
    for name in names:
        if name not in (*BACKENDS, "all"):
            raise UsageError(
                f"--backend {name!r}: an atlas has {', '.join(BACKENDS)}; name one of them"
            )
    return BACKENDS if not names or "all" in names else tuple(dict.fromkeys(names))
