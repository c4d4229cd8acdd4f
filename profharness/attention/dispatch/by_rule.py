"""The records of `explain`, which explain why PyTorch selects a backend, and explanations by rule.

An explanation by rule requires neither the GPU nor the PyTorch release that it describes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Annotated, Any

import msgspec

from profharness.attention.config import (
    AUTO,
    SDPA_BACKENDS,
    Config,
    parse_config,
    pytorch_chooses,
    sdpa_setting,
    setting_name,
)
from profharness.attention.costs import score_count
from profharness.attention.dispatch import rocm
from profharness.attention.dispatch.advice import (
    FIRST_CHOICE_LINE,
    BackendAnswer,
    advise,
    rule_choice,
    rule_oracle,
)
from profharness.attention.dispatch.machine import (
    RELEASES,
    SETS_PRIORITY,
    AttentionParams,
    Machine,
    Release,
    build_of,
    default_release,
    from_config,
    gpu_title,
    known_releases,
    machine_for,
    parse_release,
    parse_releases,
    permitted,
    release_text,
    unknown_text,
)
from profharness.attention.dispatch.predict import (
    CPU_ORDER,
    ROCM_ORDER,
    Prediction,
    predict,
    undecided,
)
from profharness.attention.dispatch.rocm_rules import library, library_text
from profharness.attention.dispatch.rules import RAISED_LATER
from profharness.columns import column
from profharness.device_types import CPU, CUDA, is_gpu
from profharness.devices import context_text
from profharness.environment import gpu_name, no_gpu_text
from profharness.errors import UsageError, choose_from, join_and, join_few
from profharness.rows import DISABLED, Refusal, decisive
from profharness.units import memory_text

SCHEMA = "profharness.explain/1"


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """The explanation of the backend that computes one config.

    The fields predicted, choice and observed contain the name of a backend, `none` if PyTorch
    raises an exception, or `unknown`.
    """

    config: Annotated[str, column(meaning="label of the attention problem")]
    source: Annotated[str, column(meaning="`live` if PyTorch was queried, otherwise `rules`")]
    environment: Annotated[
        dict[str, Any], column(meaning="the properties that PyTorch's choice depends on")
    ]
    priority_order: Annotated[
        tuple[str, ...],
        column(meaning="the backends in PyTorch's priority order; empty if unknown"),
    ]
    predicted: Annotated[str | None, column(meaning="the backend that the rules predict")]
    choice: Annotated[
        str | None,
        column(meaning="the backend that PyTorch reports; null if PyTorch was not queried"),
    ] = None
    observed: Annotated[
        str | None, column(meaning="the backend shown by the op or the kernels of a stored run")
    ] = None
    observed_ns: Annotated[
        float | None,
        column(meaning="the mean kernel time of a call with this config in a program"),
    ] = None
    agree: Annotated[
        bool | None,
        column(meaning="whether the known values among predicted, choice and observed agree"),
    ] = None
    backends: Annotated[
        tuple[BackendAnswer, ...],
        column(meaning="eligibility, reasons and advice for each backend"),
    ]
    caveats: Annotated[tuple[str, ...], column(meaning="why the explanation may be wrong")] = ()
    error: Annotated[str | None, column(meaning="why PyTorch did not report its choice")] = None
    asked: Annotated[
        str,
        column(meaning="`auto`, or the set of backends or the backend order that the call allows"),
    ] = AUTO
    prediction: Annotated[
        dict[str, Any] | None,
        column(meaning="the time and the best backend, as predicted from the GPU's atlas"),
    ] = None
    computed_by: Annotated[
        str | None,
        column(
            meaning="the library that implements the predicted backend on an AMD GPU, such as `AOTriton 0.11.2b`"
        ),
    ] = None


FIELDS = tuple(field.name for field in fields(Explanation))


def explanation_record(answer: Explanation) -> dict[str, Any]:
    """Return the JSON record of one explanation, with the keys of FIELDS."""
    record: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(answer))
    for side in record["backends"]:
        del side["can_use"]
        for advice in side["advice"]:
            del advice["steps"]
    return record


def flat_record(answer: Explanation) -> dict[str, Any]:
    """Return the explanation as a flat row for a data frame. Each backend has the columns
    `<backend>_eligible` and `<backend>_reasons` (reason codes).
    """
    environment = answer.environment
    facts = ("torch", "device_type", "gpu", "capability", "cudnn")
    row: dict[str, Any] = {
        **{name: getattr(answer, name) for name in ("config", "asked", "source")},
        **{name: environment.get(name) for name in facts},
        "priority_order": " > ".join(answer.priority_order) or None,
        **{name: getattr(answer, name) for name in ("predicted", "choice", "observed", "agree")},
    }
    for side in answer.backends:
        row[f"{side.backend}_eligible"] = side.eligible
        row[f"{side.backend}_reasons"] = "; ".join(reason.code for reason in side.reasons)
    if environment.get("architecture"):  # an AMD GPU
        row |= {name: environment.get(name) for name in ("architecture", "aotriton")}
        row |= {"computed_by": answer.computed_by}
    return row | {"error": answer.error}


def environment_text(answer: Explanation) -> str:
    """Return a text such as `RTX A6000, torch 2.8.0, cuDNN 91002, by rule`."""
    source = "by rule" if answer.source == "rules" else "live"
    asked = [answer.asked] if answer.asked != AUTO else []
    return context_text(answer.environment, source, *asked)


def chosen(answer: Explanation) -> str:
    """Return the backend that the rules predict if the explanation is by rule. Otherwise, return
    the backend that PyTorch reports.
    """
    return (answer.predicted if answer.source == "rules" else answer.choice) or "unknown"


def by_preference(answer: Explanation) -> list[BackendAnswer]:
    """Return the backends in the order in which PyTorch tries them, and then all others."""
    place = {name: at for at, name in enumerate(answer.priority_order)}
    return sorted(answer.backends, key=lambda side: place.get(side.backend, len(place)))


def settle(answer: Explanation) -> Explanation:
    """Return the explanation with its field `agree` set. The field is None if fewer than two
    choices are known.
    """
    witnesses = (answer.predicted, answer.choice, answer.observed)
    names = [name for name in witnesses if name not in (None, "unknown")]
    return replace(answer, agree=len(set(names)) == 1 if len(names) > 1 else None)


@dataclass(frozen=True)
class Platform:
    """A machine and a PyTorch release to which the rules are applied."""

    machine: Machine
    device: str
    gpu: str | None  # the name of the GPU; None for the CPU
    # Whether the cuDNN version is that of a known build of the release. False if the user gave the
    # cuDNN version.
    pinned: bool = True

    @property
    def environment(self) -> dict[str, Any]:
        """The platform with the keys of a run's environment. Unknown values are None."""
        machine = self.machine
        gpu: dict[str, Any] = {"gpu": self.gpu, "capability": machine.sm, "cudnn": machine.cudnn}
        if machine.is_rocm:
            version = machine.aotriton and rocm.version_text(machine.aotriton)
            gpu |= {"architecture": machine.architecture, "aotriton": version}
            gpu |= {"fa_library": machine.fa_library}
            gpu |= {"env": {rocm.EXPERIMENTAL_VARIABLE: "1"}} if machine.experimental else {}
        return {
            "torch": release_text(machine.torch),
            "torch_cuda": machine.cuda,
            "device_type": self.device,
            **(gpu if is_gpu(self.device) else {}),
        }

    @property
    def text(self) -> str:
        """A text such as `RTX A6000 (sm 8.6), torch 2.8.0, cuDNN 91002, CUDA 12.8`."""
        machine = self.machine
        release = f"torch {release_text(machine.torch)}"
        if not is_gpu(self.device):
            return f"CPU, {release}"
        if machine.is_rocm:
            return f"{self.gpu} ({machine.architecture}), {release}, {library_text(machine)}"
        return (
            f"{self.gpu} (sm {machine.sm}), {release}, cuDNN {machine.cudnn or 'unknown'}, "
            f"CUDA {machine.cuda or 'unknown'}"
        )


def named_platforms(
    torch: str | None,
    gpu: str | None,
    cudnn: str | None = None,
    cuda: str | None = None,
    cudnn_compiled: str | None = None,
    *,
    aotriton: str | None = None,
    fa_library: str | None = None,
    experimental: bool = False,
) -> list[Platform]:
    """Return the platforms that the options name, one per release, oldest first. Return an empty
    list if neither `torch` nor `gpu` is given, which means that PyTorch itself is queried.

    `torch` is `2.8`, `2.9.1`, `2.5..2.15` or `2.8,2.10`. The default is `default_release`.
    `gpu` is a name, a capability such as sm90, an architecture of AMD such as gfx942, or `cpu`. The
    default is the GPU of this machine.
    `cudnn` is the version at run time, and `cudnn_compiled` is the version that PyTorch was built
    with. `aotriton`, `fa_library` and `experimental` describe a ROCm build, as in `Machine`.

    Raise UsageError for an invalid version, for an unknown GPU, if a version is given without
    `torch` and `gpu`, and if an option does not apply to the GPU.
    """
    versions = {"cudnn": cudnn, "cuda": cuda, "cudnn-compiled": cudnn_compiled}
    for_amd = {
        "aotriton": aotriton,
        "rocm-fa": fa_library,
        "aotriton-experimental": experimental or None,
    }
    given = [option for option, value in (versions | for_amd).items() if value is not None]
    if torch is None and gpu is None:
        if given:
            raise UsageError(
                f"--{given[0]} requires --torch or --gpu; without them, explain queries the installed "
                "PyTorch, which has its own versions"
            )
        return []
    amd = None if gpu is None else rocm.find_amd_gpu(gpu)
    architecture = None if amd is None else amd.architecture
    newest = default_release(architecture=architecture)
    releases = [newest] if torch is None else parse_releases(torch, architecture)
    if cuda is not None and not re.fullmatch(r"\d+\.\d+(\.\d+)?", cuda, re.ASCII):
        raise UsageError(f"invalid CUDA version {cuda!r}; write, for example, 12.8")
    if (gpu or "").lower() == CPU:
        if given:
            raise UsageError(
                f"options that describe a GPU build, such as --{given[0]}, do not apply to a CPU; "
                "leave them out"
            )
        return [Platform(Machine(torch=release), CPU, None) for release in releases]
    wrong = [option for option in given if (option in for_amd) is (amd is None)]
    if wrong:
        maker = "an AMD" if amd is None else "an NVIDIA"
        raise UsageError(
            f"--{wrong[0]} applies only to {maker} GPU, not to {gpu or 'this machine'}"
        )
    if amd is not None:
        return [
            Platform(
                machine_for(
                    amd.architecture,
                    release,
                    aotriton=aotriton,
                    fa_library=fa_library or rocm.AOTRITON,
                    experimental=experimental,
                ),
                CUDA,
                amd.name,
                pinned=aotriton is None,
            )
            for release in releases
        ]
    name = gpu or gpu_name()
    if name is None:
        raise UsageError(
            no_gpu_text("name a GPU or a CPU with --gpu, such as --gpu H100 or --gpu cpu")
        )
    full_name = gpu_title(name)
    return [
        Platform(
            machine_for(name, release, cudnn, cuda, cudnn_compiled),
            CUDA,
            full_name,
            pinned=cudnn is None and build_of(release, cuda) is not None,
        )
        for release in releases
    ]


FUSED_BACKENDS = tuple(name for name in SDPA_BACKENDS if name != "math")
FACTS = {
    "cudnn": "cuDNN's version (--cudnn VERSION)",
    "cuda": "the CUDA version that PyTorch was built for (--cuda VERSION)",
    "cudnn_compiled": "the cuDNN version that PyTorch was compiled with (--cudnn-compiled VERSION)",
}


@dataclass(frozen=True)
class MatrixRow:
    """The explanation for one release, and its differences from the explanation for the previous
    release.
    """

    explanation: Explanation
    flips: bool = False  # whether the selected backend differs from that of the previous release
    changes: tuple[str, ...] = ()  # the differences, as sentences


def requested_setting(names: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Split names of backends into the setting to explain and the single backends to advise on.

    The setting is a name such as `flash+math` or `cudnn>flash`. If there is no such name, it is
    `auto`. Raise UsageError for several settings, and for a name that is not one of PyTorch's own
    backends.
    """
    settings = [setting_name(name) for name in names if pytorch_chooses(name)]
    if len(settings) > 1:
        raise UsageError(
            f"explain accepts one setting at a time, not {' and '.join(settings)}; run "
            "explain once for each setting"
        )
    single = tuple(name for name in names if not pytorch_chooses(name))
    for name in single:
        if name not in SDPA_BACKENDS:
            raise UsageError(
                f"--backend {name!r}: explain covers only PyTorch's own backends; "
                f"{choose_from(name, SDPA_BACKENDS)}, or a set such as flash+math"
            )
    return (settings[0] if settings else AUTO), single


def explain_by_rule(
    config: Config,
    platform: Platform,
    *,
    backends: Sequence[str] = (),
    advice: bool = True,
    asked: str = AUTO,
) -> Explanation:
    """Explain which backend PyTorch selects for a config if `asked`, which is `auto` or a setting,
    is active. If `backends` is given, the explanation contains advice only for these backends.
    """
    config = config.resolve(platform.device)
    machine, device, setting = platform.machine, platform.device, sdpa_setting(asked)
    params = permitted(from_config(config, device), setting)
    prediction = predict(params, machine)
    usual = ROCM_ORDER if machine.is_rocm else SDPA_BACKENDS if is_gpu(device) else CPU_ORDER
    order = prediction.priority_order or usual
    sides = sides_by_rule(prediction, [name for name in SDPA_BACKENDS if name in order])
    if advice:
        oracle, choose = rule_oracle(machine, device), rule_choice(machine, device, setting)
        advised = SDPA_BACKENDS if prediction.choice == "none" else FUSED_BACKENDS
        sides = [
            replace(
                side,
                advice=tuple(
                    # On an AMD GPU, the first choice of a process keeps an order that was set.
                    replace(each, code=each.code.replace(f"{FIRST_CHOICE_LINE}\n", ""))
                    if machine.is_rocm
                    else each
                    for each in advise(config, side.backend, oracle, choose, asked, machine.torch)
                ),
            )
            if side.backend in (backends or advised) and side.backend in params.enabled
            else side
            for side in sides
        ]
    too_early = _sets_no_order(asked, machine)
    return Explanation(
        config=config.label,
        environment=platform.environment,
        source="rules",
        priority_order=() if too_early else prediction.priority_order,
        predicted="unknown" if too_early else prediction.choice,
        backends=tuple(sides),
        caveats=(
            *window_texts(config),
            *prediction.hazards,
            *_caveats(platform, params, prediction),
        ),
        error=NO_ORDER if too_early else None,
        asked=asked,
        computed_by=computed_by(prediction.choice, machine),
    )


def computed_by(choice: str, machine: Machine) -> str | None:
    """Return the library that computes a fused backend on an AMD GPU. Return None for other GPUs and
    backends.
    """
    if not machine.is_rocm or choice not in FUSED_BACKENDS:
        return None
    return library_text(machine)


NO_ORDER = (
    "PyTorch before 2.6 cannot set a backend order, because its sdpa_kernel has no "
    "set_priority parameter; join the backends with + to allow them in any order"
)


def _sets_no_order(asked: str, machine: Machine) -> bool:
    setting = sdpa_setting(asked)
    return setting is not None and setting.ordered and machine.torch < SETS_PRIORITY


def sides_by_rule(prediction: Prediction, names: Sequence[str]) -> list[BackendAnswer]:
    """Return the answer for each backend of a prediction. The reason at which PyTorch stops is
    listed first.
    """
    sides = []
    for name in names:
        verdict = prediction.backends[name]
        first = verdict.certain[:1]
        reasons = (*first, *(reason for reason in verdict.reasons if reason not in first))
        sides.append(BackendAnswer(name, verdict.eligible, reasons))
    return sides


NOT_SUPPORTED = " is not supported"


def _dims(config: Config) -> dict[str, int]:
    dims = {"head_dim": config.head_dim}
    return dims if config.value_dim == config.head_dim else dims | {"head_dim_v": config.value_dim}


def _dims_text(config: Config) -> str:
    return " with ".join(f"{name}={dim}" for name, dim in _dims(config).items())


def _number(pattern: str, message: str) -> int | None:
    found = re.search(rf"(?:{pattern}) (\d+)", message)
    return int(found[1]) if found else None


def _head_dim_text(config: Config, message: str) -> str:
    limit = _number("no more than|less than or equal to|less or equal than", message)
    for name, dim in _dims(config).items():
        if limit is not None and dim > limit:
            return f"{name}={dim} is greater than {limit}"
    return f"{_dims_text(config)}{NOT_SUPPORTED}"


def _multiple_text(config: Config, message: str) -> str:
    factor = _number("divisible by|multiple of", message)
    for name, dim in _dims(config).items():
        if factor is not None and dim % factor:
            return f"{name}={dim} is not a multiple of {factor}"
    return f"{_dims_text(config)}{NOT_SUPPORTED}"


def _one_text(config: Config, message: str) -> str:
    name = "seq_kv" if config.seq_len_kv == 1 and "query" not in message else "seq_q"
    return f"{name}=1{' with dropout' * ('dropout' in message)}{NOT_SUPPORTED}"


CONDITIONS: dict[str, str | Callable[[Config, str], str]] = {
    DISABLED: "it is disabled",
    "not_on_cuda": "the inputs are not on a GPU",
    "not_4d": "the inputs do not have 4 dimensions",
    "mask": "attn_mask is not supported",
    "mask_grad": "a mask that requires a gradient is not supported",
    "mask_shape": "the shape of attn_mask is not supported",
    RAISED_LATER: "attn_mask with is_causal is not supported",
    "head_dim": _head_dim_text,
    "head_dim_multiple": _multiple_text,
    "head_dim_training": lambda config, _: (
        f"the backward pass with {_dims_text(config)} is not supported"
    ),
    "capability": "this GPU is not supported",
    "experimental": f"support for this GPU is experimental; {rocm.EXPERIMENTAL_VARIABLE}=1 enables it",
    "not_compiled": "this build of PyTorch does not contain it",
    "causal_non_square": (
        "is_causal with seq_q={0.seq_len_q} and seq_kv={0.seq_len_kv} is not supported"
    ),
    "dtype": "{0.dtype} is not supported",
    "num_heads": "num_heads={0.num_heads} with kv_heads={0.num_kv_heads} is not supported",
    "batch_size": "the batch sizes of the inputs differ",
    "grid_size": "the batch size or the number of heads is greater than 65535",
    "seq_len_zero": "a sequence length of 0 is not supported",
    "seq_len_one": _one_text,
    "last_dim_stride": "the stride of the last dimension is not 1",
    "alignment": "the storage offset of the inputs is not aligned",
    "deterministic": "it is not deterministic",
    "decode_disabled": "a query length of 1 is not supported by this cuDNN version on this GPU",
    "known_bug": "this cuDNN version can compute non-finite gradients for these lengths",
    "dropout": "dropout={0.dropout} is not supported",
}
"""Maps the code of a reason to the condition that the call violates.

PyTorch words the same condition differently for each backend. A function gets the config and the
message of PyTorch, which contains the limits of the backend.
"""


def refused_because(answer: Explanation, sides: Iterable[BackendAnswer]) -> dict[str, list[str]]:
    """Map the reasons against each refused backend to the backends that they apply to."""
    config = parse_config(answer.config)
    backends: dict[str, list[str]] = {}
    for side in sides:
        if side.eligible is False:
            backends.setdefault(_reasons_text(config, side.reasons), []).append(side.backend)
    return backends


def refusals_text(answer: Explanation, sides: Iterable[BackendAnswer]) -> str:
    """Return a clause such as `PyTorch refuses flash (REASON)`, or "" if no backend is refused."""
    refused = refused_because(answer, sides)
    texts = [f"{join_and(names)} ({reason})" for reason, names in refused.items()]
    return f"PyTorch refuses {join_and(texts)}" if texts else ""


def _reasons_text(config: Config, reasons: Sequence[Refusal]) -> str:
    if not reasons:
        return "the reason is unknown"
    texts = list(dict.fromkeys(condition(config, each) for each in reasons))
    things = [text.removesuffix(NOT_SUPPORTED) for text in texts if text.endswith(NOT_SUPPORTED)]
    clauses = [text for text in texts if not text.endswith(NOT_SUPPORTED)]
    if things:
        verb = " are not supported" if things[1:] else NOT_SUPPORTED
        # The reason at which PyTorch stops comes first.
        clauses.insert(0 if texts[0].endswith(NOT_SUPPORTED) else 1, f"{join_and(things)}{verb}")
    return ", and ".join(clauses)


def condition(config: Config, reason: Refusal) -> str:
    """Return a clause on the condition that the call violates, worded alike for all backends.

    If the reason has no such clause, return the first sentence of its message.
    """
    text = CONDITIONS.get(reason.code)
    if text is None:
        return _first_sentence(reason)
    return text.format(config) if isinstance(text, str) else text(config, reason.message)


def short_reason(label: str, refusals: Sequence[Refusal]) -> str:
    """Return a short text on why a backend refused a config, in the words of `condition`.

    If the backend is a setting that allows several backends, the messages begin with the name of a
    backend, which the text keeps.
    """
    config, texts = parse_config(label), dict[str, None]()
    for reason in decisive(refusals):
        name, colon, message = reason.message.partition(": ")
        if colon and name in SDPA_BACKENDS:
            texts[f"{name}: {condition(config, replace(reason, message=message))}"] = None
        else:
            texts[condition(config, reason)] = None
    return "; ".join(texts)


def conditions(config: Config, side: BackendAnswer) -> list[str]:
    """Return a short text for each reason against a backend, in the words of `refused_because`."""
    if side.eligible is False:
        return [condition(config, each) for each in side.reasons]
    # It is unknown whether these conditions apply.
    return list(map(_first_sentence, side.reasons))


def _first_sentence(reason: Refusal) -> str:
    return reason.message.partition(". ")[0].rstrip(".")


def why_ran(answer: Explanation, ran: str | None) -> str | None:
    """Return a clause that says why a backend ran, or that the rules predict another backend.

    Return None if the backend is PyTorch's first choice, or if the rules do not determine the choice.
    """
    if ran not in SDPA_BACKENDS or answer.predicted in (None, "unknown"):
        return None
    if answer.predicted != ran:
        predicted = "an error" if answer.predicted == "none" else answer.predicted
        release = answer.environment["torch"]
        return f"the dispatch rules of PyTorch {release} predict {predicted}, but {ran} ran"
    setting, order = sdpa_setting(answer.asked), answer.priority_order
    allowed = SDPA_BACKENDS if setting is None else setting.backends
    before = order[: order.index(ran)] if ran in order else SDPA_BACKENDS
    sides = [each for each in answer.backends if each.backend in before and each.backend in allowed]
    refused = refusals_text(answer, sides)
    return f"{ran} ran because {refused}" if refused else None


def choices_by_rule(configs: Sequence[Config], platform: Platform, asked: str = AUTO) -> list[str]:
    """Return the backend that `auto` or a setting selects for each config, without explanations."""
    if _sets_no_order(asked, platform.machine):
        return ["unknown"] * len(configs)
    choose = rule_choice(platform.machine, platform.device, sdpa_setting(asked))
    return [choose(config) for config in configs]


def matrix(config: Config, platforms: Sequence[Platform], asked: str = AUTO) -> list[MatrixRow]:
    """Explain one config for several releases."""
    answers = [
        explain_by_rule(config, platform, advice=False, asked=asked) for platform in platforms
    ]
    rows = [
        MatrixRow(after, before.predicted != after.predicted, tuple(_changes(before, after)))
        for before, after in pairwise(answers)
    ]
    return [MatrixRow(answers[0]), *rows]


def _changes(before: Explanation, after: Explanation) -> list[str]:
    """Return the differences between two explanations, as sentences, with the choice first."""
    changes = []
    if before.predicted != after.predicted:
        changes.append(f"choice {before.predicted} → {after.predicted}")
    if before.priority_order != after.priority_order:
        changes.append(f"order {' > '.join(after.priority_order) or 'unknown'}")
    earlier = {side.backend: side for side in before.backends}
    later = {side.backend: side for side in after.backends}
    for name in FUSED_BACKENDS:
        old, new = earlier.get(name), later.get(name)
        if old is None or new is None or old.eligible == new.eligible:
            continue
        reasons = (old if new.eligible else new).reasons
        states = {True: "PyTorch accepts {}", False: "PyTorch refuses {}", None: "{} is unknown"}
        lead = "no longer: " if new.eligible else ""
        changes.append(
            states[new.eligible].format(name) + (f" ({lead}{reasons[0].code})" if reasons else "")
        )
    old_cudnn, new_cudnn = (answer.environment.get("cudnn") for answer in (before, after))
    if changes and None not in (old_cudnn, new_cudnn) and old_cudnn != new_cudnn:
        changes.append(f"cuDNN {old_cudnn} → {new_cudnn}")
    old_aotriton, new_aotriton = (each.environment.get("aotriton") for each in (before, after))
    if changes and None not in (old_aotriton, new_aotriton) and old_aotriton != new_aotriton:
        changes.append(f"AOTriton {old_aotriton} → {new_aotriton}")
    return changes


COMPILED = (
    "Under torch.compile, PyTorch chooses the backend while it traces the graph, and "
    "keeps this choice."
)
ALLOW_SET = (
    "sdpa_kernel([...]) restricts the backends, but does not set their order unless "
    "set_priority=True is passed (PyTorch 2.6 and newer)."
)
FIRST_CHOICE = (
    "In PyTorch 2.9 and newer, the first backend choice in a process on CUDA replaces any "
    "backend order that you set, and changes the order for later auto calls. Make one call "
    "before you set an order."
)
CPU_IGNORES = (
    "On a CPU, PyTorch ignores any backend order that you set, and keeps its default order "
    "(flash, then math)."
)
LEGACY = "The legacy sdp_kernel leaves cuDNN on even if all three of its flags are off."


def window_texts(config: Config) -> Iterator[str]:
    """Yield a sentence about the cost of a window in SDPA, if the config has a window."""
    if config.window is None:
        return
    rows, columns = config.seq_len_q, config.seq_len_kv
    share = score_count(config) / (config.output_batch * rows * columns)
    yield (
        f"SDPA has no window argument: the window becomes a bool attn_mask of shape [{rows}, "
        f"{columns}] ({memory_text(rows * columns)}), which flash refuses on a GPU. The "
        f"other backends compute all scores, but the window keeps only {100 * share:.2g} % "
        "of them. flex_attention skips the hidden scores."
    )


def _caveats(platform: Platform, params: AttentionParams, prediction: Prediction) -> Iterator[str]:
    """Yield assumptions that may be wrong, and caveats that apply to every choice of PyTorch."""
    machine, on_gpu = platform.machine, is_gpu(platform.device)
    release = release_text(machine.torch)
    if not machine.known:
        yield _unread([machine.torch], machine.architecture)
    elif machine.is_rocm:
        yield from _rocm_caveats(platform)
    elif on_gpu and platform.pinned:
        pypi = RELEASES[machine.torch].cuda == machine.cuda
        wheel = f"{'PyPI wheel' if pypi else 'build of this release'} for CUDA {machine.cuda}"
        yield (
            f"The answer assumes cuDNN {machine.cudnn} ({wheel}); specify another version with "
            "--cudnn."
        )
    elif on_gpu and machine.cudnn is None:
        yield (
            f"The cuDNN version that comes with PyTorch {release} for CUDA {machine.cuda} is "
            "unknown; specify it with --cudnn VERSION."
        )
    if machine.known and prediction.choice == "unknown":
        gaps = []
        if not prediction.priority_order:
            facts = " and ".join(FACTS[name] for name in undecided(params, machine))
            gaps.append(f"the order of the backends depends on {facts}")
        names = [name for name, verdict in prediction.backends.items() if verdict.eligible is None]
        if names:
            reasons = "their reasons" if len(names) > 1 else "its reasons"
            gaps.append(
                f"it is unknown whether {' and '.join(names)} can compute this call (see {reasons})"
            )
        yield f"The rules cannot determine which backend this call uses: {'; '.join(gaps)}."
    yield COMPILED
    if machine.is_rocm:
        yield ALLOW_SET
        return
    if params.priority and (not on_gpu or machine.torch >= (2, 9)):
        yield FIRST_CHOICE if on_gpu else CPU_IGNORES
    if on_gpu:
        yield from (ALLOW_SET, LEGACY)


def _rocm_caveats(platform: Platform) -> Iterator[str]:
    """Yield the assumptions about the build of PyTorch in the answer for an AMD GPU."""
    machine, release = platform.machine, release_text(platform.machine.torch)
    versions = " or ".join(map(rocm.version_text, machine.aotriton_versions))
    another = "AMD's wheels and other builds may contain a different AOTriton version"
    if platform.pinned and machine.aotriton is not None:
        yield (
            f"The answer assumes AOTriton {versions}, which PyTorch's own ROCm wheels of {release} "
            f"contain. {another}; specify the version with --aotriton VERSION."
        )
    elif machine.aotriton is None:
        yield (
            f"It is unknown whether PyTorch's own ROCm wheels of {release} contain AOTriton "
            f"{versions}. {another}; specify the version with --aotriton VERSION."
        )
    if machine.fa_library != rocm.CK:
        return
    if library(machine) != rocm.CK:
        why = f"PyTorch does not accept CK on {machine.architecture}"
        if machine.torch < rocm.PREFERS_CK:
            why = (
                f"PyTorch {release} does not accept CK, because preferred_rocm_fa_library exists "
                "only in 2.7 and newer"
            )
        yield f"{why}. AOTriton therefore computes the call."
    elif machine.torch < rocm.BUILDS_CK:
        yield (
            "CK handles the call only if PyTorch was built with USE_ROCM_CK_SDPA (before 2.9: "
            f"USE_CK_FLASH_ATTENTION). It is unknown whether the ROCm wheels of {release} were "
            "built with this option; the wheels of 2.13 were."
        )


def unread(answers: Iterable[Explanation]) -> str | None:
    """Return a sentence about the releases whose rules are unknown, or None if all are known."""
    by_rule = [answer.environment for answer in answers if answer.source == "rules"]
    missing = [
        (parse_release(environment["torch"]), environment.get("architecture"))
        for environment in by_rule
    ]
    missing = [each for each in dict.fromkeys(missing) if each[0] not in known_releases(each[1])]
    return _unread([release for release, _ in missing], missing[0][1]) if missing else None


def _unread(missing: Sequence[Release], architecture: str | None = None) -> str:
    text = unknown_text(missing, architecture)
    return f"{text[0].upper()}{text[1:]}."


def skipped_text(releases: Sequence[str]) -> str:
    """Return a sentence that lists the releases of a range whose rules are unknown."""
    return f"left out because their dispatch rules are unknown: PyTorch {join_few(releases, 6)}"
