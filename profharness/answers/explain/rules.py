"""Where a config is explained for: the GPU, PyTorch release and cuDNN that a user names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from profharness import environment as nvml
from profharness.answers.explain.model import Advice, BackendAnswer, Explanation
from profharness.config import Config
from profharness.devices import GPUS, find_gpu
from profharness.dispatch import BACKENDS, Prediction, Verdict, from_config, predict
from profharness.dispatch.machine import (
    RELEASES,
    Machine,
    build_of,
    machine_for,
    parse_release,
    parse_releases,
    release_text,
)
from profharness.dispatch.predict import undecided
from profharness.errors import UsageError
from profharness.rows import Refusal

CPU = "cpu"


@dataclass(frozen=True)
class Place:
    """A machine that the rules are asked about. gpu is its name, None for the CPU; pinned: cuDNN's
    version is the one that the release's build for this CUDA brings, not one that was given.
    """

    machine: Machine
    device: str
    gpu: str | None
    pinned: bool = True

    @property
    def environment(self) -> dict[str, Any]:
        """Flat keys, named as a run's environment names them; None where it is not known."""
        machine = self.machine
        told: dict[str, Any] = {
            "torch": release_text(machine.torch),
            "torch_cuda": machine.cuda,
            "device_type": self.device,
        }
        if self.device == "cuda":
            told |= {"gpu": self.gpu, "capability": machine.sm, "cudnn": machine.cudnn}
        return told

    @property
    def text(self) -> str:
        """`torch 2.8.0, RTX A6000 (sm 8.6), cuDNN 91002, CUDA 12.8`."""
        machine = self.machine
        parts = [f"torch {release_text(machine.torch)}"]
        if self.device == "cpu":
            return f"{parts[0]}, CPU"
        parts.append(f"{self.gpu} (sm {machine.sm})")
        parts.append(f"cuDNN {machine.cudnn or 'unknown'}")
        return ", ".join([*parts, f"CUDA {machine.cuda or 'unknown'}"])


def named_places(
    torch: str | None,
    gpu: str | None,
    cudnn: str | None = None,
    cuda: str | None = None,
    cudnn_compiled: str | None = None,
) -> list[Place]:
    """The places that a user names, none where PyTorch itself is meant. Raises UsageError for a
    cuDNN or CUDA without a place to be in.
    """
    if torch is not None or gpu is not None:
        return find_places(torch, gpu, cudnn, cuda, cudnn_compiled)
    for name, value in (("cudnn", cudnn), ("cuda", cuda), ("cudnn-compiled", cudnn_compiled)):
        if value is not None:
            raise UsageError(
                f"--{name} is for an answer by rule; add --torch or --gpu. "
                "Live, PyTorch's own version counts"
            )
    return []


def find_places(
    torch: str | None,
    gpu: str | None,
    cudnn: str | None = None,
    cuda: str | None = None,
    cudnn_compiled: str | None = None,
) -> list[Place]:
    """One place per release meant, oldest first.

    torch: `2.8`, `2.9.1`, `2.5..2.15`, `2.8,2.10`; None means the installed release. A single
    release need not be one that the rules know. gpu: a name, a capability such as sm90, or `cpu`;
    None means this machine's GPU, as NVML tells. cudnn is the version at run time, cudnn_compiled
    the one that PyTorch was built with. Raises UsageError for what is no version, and for a GPU
    that is not known.
    """
    releases = parse_releases(torch) if torch is not None else [_installed()]
    if cuda is not None and not _is_version(cuda):
        raise UsageError(f"CUDA version {cuda!r} is not a version; write 12.8")
    if (gpu or "").lower() == CPU:
        if (cudnn, cuda, cudnn_compiled) != (None, None, None):
            raise UsageError(
                "--cudnn, --cuda and --cudnn-compiled say nothing about a CPU; leave them out"
            )
        return [Place(Machine(torch=release), "cpu", None) for release in releases]
    name = gpu or nvml.gpu_name()
    if name is None:
        names = ", ".join(each.name for each in GPUS)
        raise UsageError(
            f"this machine has no NVIDIA GPU: add --gpu NAME; known are {names}; "
            "a capability such as sm90 works too, and `cpu`"
        )
    found = find_gpu(name).name
    machines = [machine_for(name, each, cudnn, cuda, cudnn_compiled) for each in releases]
    return [
        Place(each, "cuda", found, cudnn is None and build_of(each.torch, cuda) is not None)
        for each in machines
    ]


def _installed() -> tuple[int, ...]:
    """The installed torch's release, read from its package's metadata: torch is not imported."""
    from importlib import metadata

    try:
        return parse_release(metadata.version("torch"))
    except metadata.PackageNotFoundError:
        raise UsageError(
            "--gpu without --torch means the installed torch, and none is installed; "
            "add --torch, for example --torch 2.11"
        ) from None


def _is_version(text: str) -> bool:
    parts = text.split(".")
    return len(parts) in (2, 3) and all(part.isdecimal() for part in parts)


CPU_BACKENDS = ("flash", "math")
COMPARED = ("flash", "efficient", "cudnn")
FACTS = {
    "cudnn": "cuDNN's version (--cudnn VERSION)",
    "cuda": "the CUDA version that PyTorch was built for (--cuda VERSION)",
    "cudnn_compiled": "the cuDNN version that PyTorch was compiled with (--cudnn-compiled VERSION)",
}


@dataclass(frozen=True)
class MatrixRow:
    """One release: its answer, whether the choice differs from the release before, and what else
    does, as sentences.
    """

    release: str
    explanation: Explanation
    flips: bool
    changes: tuple[str, ...]


@dataclass(frozen=True)
class Matrix:
    """One config over releases, oldest first. gpu None: the CPU."""

    config: str
    gpu: str | None
    rows: tuple[MatrixRow, ...]


def explain_by_rule(
    config: Config, place: Place, *, backends: Sequence[str] = (), advice: bool = True
) -> Explanation:
    """What the rules say of a config on a place: choice is None (PyTorch was not asked), each
    backend has all reasons against it, the one that PyTorch stops at first. backends limits the
    advice.
    """
    config = config.resolve(place.device)
    prediction = predict(from_config(config, place.device), place.machine)
    order = prediction.priority_order or (BACKENDS if place.device == "cuda" else CPU_BACKENDS)
    answers = []
    for name in order:
        verdict = prediction.backends[name]
        wanted = advice and (name in backends if backends else name != "math")
        found = _advice(config, name, place) if wanted else ()
        answers.append(BackendAnswer(name, verdict.eligible, _reasons(verdict), found))
    return Explanation(
        config=config.label,
        environment=place.environment,
        source="rules",
        priority_order=prediction.priority_order,
        predicted=prediction.choice,
        choice=None,
        observed=None,
        agree=None,
        backends=tuple(answers),
        caveats=(*prediction.hazards, *_doubts(place, prediction)),
    )


def choices_by_rule(configs: Sequence[Config], place: Place) -> list[str]:
    """Only what `auto` takes, one answer a config."""
    return [predict(from_config(each, place.device), place.machine).choice for each in configs]


def matrix(config: Config, places: Sequence[Place]) -> Matrix:
    """One config over several releases."""
    told = [explain_by_rule(config, place, advice=False) for place in places]
    changes = [(), *(_changes(before, after) for before, after in pairwise(told))]
    rows = []
    for index, (place, answer) in enumerate(zip(places, told, strict=True)):
        flips = index > 0 and answer.predicted != told[index - 1].predicted
        release = release_text(place.machine.torch)
        rows.append(MatrixRow(release, answer, flips, tuple(changes[index])))
    return Matrix(told[0].config, places[0].gpu, tuple(rows))


def _changes(before: Explanation, after: Explanation) -> tuple[str, ...]:
    """What is different, the likely cause of another choice first."""
    found = []
    if before.predicted != after.predicted:
        found.append(f"choice {before.predicted} → {after.predicted}")
    if before.priority_order != after.priority_order:
        order = " > ".join(after.priority_order) or "unknown"
        found.append(f"order {order}")
    for name in COMPARED:
        one, other = _side(before, name), _side(after, name)
        if one is None or other is None or one.eligible == other.eligible:
            continue
        cause = (other if other.eligible is not True else one).reasons
        state = {True: "takes it", False: "refuses it", None: "unknown"}[other.eligible]
        lead = "no longer: " if other.eligible else ""
        found.append(f"{name} {state}" + (f" ({lead}{cause[0].code})" if cause else ""))
    one, other = (side.environment.get("cudnn") for side in (before, after))
    if found and one != other:
        found.append(f"cuDNN {one} → {other}")
    return tuple(found)


def _side(answer: Explanation, backend: str) -> BackendAnswer | None:
    return next((each for each in answer.backends if each.backend == backend), None)


def _reasons(verdict: Verdict) -> tuple[Refusal, ...]:
    ordered = sorted(verdict.reasons, key=lambda reason: not reason.first)
    return tuple(Refusal(reason.code, reason.message, "rule") for reason in ordered)


def _advice(config: Config, backend: str, place: Place) -> tuple[Advice, ...]:
    """Changes that the rules confirm; empty where nothing about the config helps."""
    from profharness.dispatch.advice import advise
    from profharness.dispatch.perturb import rule_choice, rule_oracle

    oracle = rule_oracle(place.machine, place.device)
    choose = rule_choice(place.machine, place.device)
    return tuple(advice_of(each) for each in advise(config, backend, oracle, choose))


def advice_of(found: object) -> Advice:
    """The engine's advice as the answer's: the engine may not know the classes above its layer."""
    names = ("change", "code", "config", "verified", "choice")
    return Advice(**{name: getattr(found, name) for name in names if hasattr(found, name)})


def _doubts(place: Place, prediction: Prediction) -> list[str]:
    """What the rules rest on where that is not certain, and what holds wherever PyTorch chooses."""

    return [
        *_unread(place),
        *_build(place),
        *_missing(place, prediction),
        COMPILED,
        *((ALLOW_SET, LEGACY) if place.device == "cuda" else ()),
    ]


def _unread(place: Place) -> list[str]:
    """Of a release outside the table: which ones are in it."""
    release = place.machine.torch
    if place.machine.known:
        return []
    near = [release_text(each) for each in RELEASES if each[:2] == release[:2]]
    known = near or [release_text(each) for each in RELEASES]
    return [
        f"The rules of PyTorch {release_text(release)} were not read; known "
        f"{'is' if len(known) == 1 else 'are'} {', '.join(known)}."
    ]


def _build(place: Place) -> list[str]:
    """Where cuDNN's version comes from, or that it is not known."""
    machine = place.machine
    if place.device != "cuda" or not machine.known:
        return []
    if place.pinned:
        pypi = RELEASES[machine.torch].cuda == machine.cuda
        wheel = f"{'PyPI wheel' if pypi else 'build of this release'} for CUDA {machine.cuda}"
        return [
            f"cuDNN {machine.cudnn} is what the {wheel} brings; another build or a cuDNN found "
            "earlier on the library path may choose otherwise (--cudnn VERSION)."
        ]
    if machine.cudnn is None:
        return [
            f"Which cuDNN PyTorch {release_text(machine.torch)} for CUDA {machine.cuda} brings is "
            "not known here (--cudnn VERSION)."
        ]
    return []


def _missing(place: Place, prediction: Prediction) -> list[str]:
    """What would have to be known to decide, where the rules cannot."""
    if prediction.choice != "unknown" or not place.machine.known:
        return []
    found = []
    if not prediction.priority_order:
        facts = " and ".join(FACTS[name] for name in undecided(place.machine, place.device))
        found.append(f"the order of the backends hangs on {facts}")
    names = [name for name, each in prediction.backends.items() if each.eligible is None]
    if names:
        text = "their" if len(names) > 1 else "its"
        found.append(
            f"whether {' and '.join(names)} can take it is not known, as {text} reasons say"
        )
    return [f"The rules cannot decide this call: {'; '.join(found)}."]


COMPILED = (
    "Under torch.compile the choice is made when the graph is traced, and stays as it was then."
)
ALLOW_SET = (
    "sdpa_kernel([...]) says which backends are allowed, not in which order, unless set_priority=True "
    "(PyTorch 2.8 and newer)."
)
LEGACY = "The legacy sdp_kernel with its three flags off leaves cuDNN on."
