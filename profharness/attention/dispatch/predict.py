"""Apply the dispatch rules: predict which backend PyTorch selects and why it refuses other
backends.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from profharness.attention.config import AUTO, SDPA_BACKENDS, Config, sdpa_setting
from profharness.attention.dispatch.machine import (
    SETS_PRIORITY,
    AttentionParams,
    Machine,
    Release,
    from_config,
    machine_of,
    permitted,
    release_text,
    rules_know,
    with_flags,
)
from profharness.attention.dispatch.rocm_rules import (
    ROCM_CUDNN,
    ROCM_EFFICIENT,
    ROCM_FLASH,
    ROCM_HAZARDS,
)
from profharness.attention.dispatch.rules import (
    CPU_FLASH,
    CUDNN,
    EFFICIENT,
    FLASH,
    HAZARDS,
    MATH,
    ON_DEVICE,
    RAISED_LATER,
    Rule,
)
from profharness.device_types import CPU, CUDA
from profharness.rows import Refusal

# The order of the checks of cuDNN in releases before 2.7, and in the releases 2.7 and 2.8.
CUDNN_BEFORE_2_7 = (
    *("runtime_disabled", "nonzero_lengths", "last_stride", "on_device", "tensor_shapes"),
    *("cudnn_shapes", "deterministic", "dtypes", "mask_shape", "hardware"),
)
CUDNN_BEFORE_2_9 = (
    *("runtime_disabled", "nonzero_lengths", "on_device", "tensor_shapes", "cudnn_shapes"),
    *("deterministic", "dtypes", "mask_shape", "hardware", "last_stride", "num_heads"),
)
# PyTorch calls an AMD GPU `cuda`, but AMD GPUs have different rules and therefore their own tables.
ROCM = "rocm"
TABLES: dict[tuple[str, str], tuple[Rule, ...]] = {
    (CUDA, "flash"): FLASH,
    (CUDA, "efficient"): EFFICIENT,
    (CUDA, "cudnn"): CUDNN,
    (CUDA, "math"): MATH,
    (ROCM, "flash"): ROCM_FLASH,
    (ROCM, "efficient"): ROCM_EFFICIENT,
    (ROCM, "cudnn"): ROCM_CUDNN,
    (ROCM, "math"): MATH,
    (CPU, "flash"): CPU_FLASH,
    (CPU, "efficient"): (ON_DEVICE,),
    (CPU, "cudnn"): (ON_DEVICE,),
    (CPU, "math"): MATH,
}

# Lower-case fragments of PyTorch's refusal messages by reason code. The first code that matches is
# used.
CODES: dict[str, tuple[str, ...]] = {
    "runtime_disabled": ("has been runtime disabled",),
    "not_on_cuda": ("requires a cuda device", "need to be on cuda device"),
    "not_4d": ("to be 4 dimensional",),
    "mask": ("not support non-null attn_mask",),
    "mask_grad": ("attn_mask requires a gradient",),
    "mask_shape": ("please use the following attn mask shapes",),
    RAISED_LATER: ("explicit attn_mask should not be set when is_causal",),
    "head_dim": (
        *("same last dimension and to be less than", "q,k,v to have the same last dimension."),
        *("head_dim should be no more than", "provided head dimensions"),
        "last dimension of inputs to less or equal than",
    ),
    "head_dim_multiple": (
        *("to be a multiple of 8 and less than", "head_dim should be a multiple of"),
        "last dimension of inputs to be divisible by",
    ),
    "head_dim_training": (
        "doesn't support training with head_dim",
        "does not support backward with these head dimensions",
    ),
    "capability": (
        *("only supports gpu architectures", "compute capability"),
        "was not compiled for current amd gpu architecture",
    ),
    "experimental": ("is still experimental",),
    "not_compiled": ("was not compiled with cudnn attention",),
    "causal_non_square": ("does not support the is_causal flag when seqlen_q",),
    "dtype": (
        "expected query, key and value to all be of dtype",
        "expected query, key and value to all be of the same dtype",
        "low-precision flash attention sdpa requires fa3",
    ),
    "nested": ("nested inputs", " nt inputs", "nested tensor"),
    "num_heads": (
        *("to have the same batch_size and num_heads", "to have the same num_heads"),
        "heads in key/value must divide",
    ),
    "batch_size": ("to have the same batch_size",),
    "grid_size": ("batch size or num_heads greater than",),
    "seq_len_zero": ("do not support zero seq_len", "do not support seq_len == 0"),
    "seq_len_one": (
        *("does not support sequence length 1", "does not support key/value sequence length 1"),
        "query sequence length 1 with dropout",
    ),
    "last_dim_stride": ("last dimension of the input to have stride 1",),
    "alignment": ("storage offsets * element_size to be aligned",),
    "deterministic": ("non-deterministic algorithm", "is not deterministic"),
    "decode_disabled": ("decode is disabled",),
    "known_bug": ("non-finite query gradients",),
    "dropout": ("dropout",),
}


@lru_cache(maxsize=1024)
def active_rules(device: str, backend: str, release: Release) -> tuple[Rule, ...]:
    """Return the rules that apply in a release, in the order in which the release checks them."""
    rules = [rule for rule in TABLES[device, backend] if rule.since <= release < rule.until]
    if (device, backend) == (CUDA, "cudnn") and release < (2, 9):
        order = CUDNN_BEFORE_2_7 if release < (2, 7) else CUDNN_BEFORE_2_9
        rules.sort(key=lambda rule: order.index(rule.check))
    return tuple(rules)


def clean(text: str) -> str:
    """Remove the C++ source position that PyTorch appends to a warning."""
    return re.sub(r"\s*\(Triggered internally at .*\)\s*$", "", text, flags=re.DOTALL).strip()


def is_header(text: str) -> bool:
    """Return whether a warning only announces that reasons follow in the next warnings."""
    kernels = "memory efficient kernel|flash attention kernel|cudnn attention kernel"
    return re.match(rf"({kernels}) not used because:$", clean(text), re.IGNORECASE) is not None


def code(text: str) -> str:
    """Return the reason code of a refusal text, or `unknown`."""
    lowered = text.lower()
    found = (code for code, texts in CODES.items() if any(text in lowered for text in texts))
    return next(found, "unknown")


# Fields of Machine that may be unknown, with example values. The rules compare these fields with
# version limits, and there are example values on both sides of each limit.
MISSING: dict[str, tuple[object, ...]] = {
    "cudnn": (
        *(90000, 90501, 91000, 91100, 91101, 91400, 91501, 91900, 92201, 92400, 92401, 92402),
        *(92501, 92600),
    ),
    "cuda": ("12.9", "13.0"),
    "cudnn_compiled": (90500, 90501, 90800, 90900, 91000),
}
DEFAULT_ORDER = ("flash", "efficient", "math", "cudnn")
ROCM_ORDER = ("flash", "efficient", "math")
"""PyTorch's list also contains cudnn after math, but ROCm builds are compiled without cuDNN."""
CUDNN_FIRST = ("cudnn", "flash", "efficient", "math")
CPU_ORDER = ("flash", "math")


class Eligibility(NamedTuple):
    """Whether a backend accepts a call, and the reasons against it in PyTorch's order."""

    eligible: bool | None
    """None if it is unknown whether the backend accepts the call."""
    reasons: tuple[Refusal, ...] = ()
    certain: tuple[Refusal, ...] = ()
    """The reasons that apply for all possible values of unknown properties. PyTorch stops at the
    first of these reasons and does not report the others.
    """


class Prediction(NamedTuple):
    """The prediction of how PyTorch dispatches a call."""

    choice: str
    """The backend that PyTorch selects, `none` if PyTorch raises an exception, or `unknown`."""
    priority_order: tuple[str, ...]
    """The backends in the order in which PyTorch tries them. Empty if the order is unknown."""
    backends: Mapping[str, Eligibility]
    hazards: tuple[str, ...] = ()
    """Descriptions of the known failures of the selected backend."""


def _default_order(machine: Machine) -> tuple[str, ...]:
    """Return the order in which PyTorch tries the backends on CUDA if the caller sets none.

    PyTorch 2.9 added the overrideable backend at the end of the order. This backend is omitted,
    because PyTorch raises an exception when it reaches the backend.
    """
    if machine.is_rocm:
        return ROCM_ORDER
    release, (major, minor) = machine.torch, machine.capability
    if release < (2, 5, 1):
        return CUDNN_FIRST if major >= 9 else ("flash", "cudnn", "efficient", "math")
    if release < (2, 9) or machine.cudnn_preferred is False:
        return DEFAULT_ORDER
    if release < (2, 10):
        prefers_cudnn = (machine.cudnn_compiled or 0) >= 90900 and (major, minor) in (
            (9, 0),
            (10, 0),
        )
    else:
        cuda_13 = release >= (2, 13) and int((machine.cuda or "0").split(".")[0]) >= 13
        prefers_cudnn = (machine.cudnn or 0) > 91500 and major in (9, 10)
        prefers_cudnn &= minor in (0, 3) or cuda_13
    return CUDNN_FIRST if prefers_cudnn else DEFAULT_ORDER


def judge(backend: str, params: AttentionParams, machine: Machine) -> Eligibility:
    """Return whether a backend accepts the call, and all reasons against it."""
    if params.outside is not None:
        refusal = (Refusal("unsupported", params.outside, "rule"),)
        return Eligibility(False, refusal, refusal)
    if not machine.known:
        release = release_text(machine.torch)
        text = f"The dispatch rules of PyTorch {release} are unknown."
        return Eligibility(None, (Refusal("unknown", text, "rule"),))
    versions = ("cudnn", "cudnn_compiled") if machine.torch < (2, 9, 1) else ("cudnn", "aotriton")
    machines = _completions(machine, tuple(name for name in versions if name in _missing(machine)))
    reasons: list[Refusal] = []
    certain: list[Refusal] = []
    for rule in active_rules(_platform(params, machine), backend, machine.torch):
        answers = {rule.refuses(params, each) for each in machines}
        if answers == {False}:
            continue
        text = rule.text(params, machine)
        if machine.is_rocm and answers == {None}:
            text = f"It is unknown whether this release has this check; PyTorch might say: {text}"
        elif answers != {True}:
            text = f"This depends on versions that were not given; PyTorch might say: {text}"
        reasons.append(Refusal(rule.code, text, "rule"))
        certain += reasons[-1:] if answers == {True} else []
    eligible = False if certain else None if reasons else True
    return Eligibility(eligible, tuple(reasons), tuple(certain))


def _platform(params: AttentionParams, machine: Machine) -> str:
    """Return the first key of TABLES for a call on a machine."""
    return ROCM if machine.is_rocm and params.device == CUDA else params.device


def hazards(backend: str, params: AttentionParams, machine: Machine) -> tuple[str, ...]:
    """Return descriptions of the known failures of a call that the dispatcher accepts. Each
    description contains a remedy.
    """
    tables = {CUDA: HAZARDS, ROCM: ROCM_HAZARDS}
    rules = tables.get(_platform(params, machine), {}).get(backend, ())
    return tuple(
        rule.text(params, machine)
        for rule in rules
        if rule.since <= machine.torch < rule.until and rule.refuses(params, machine)
    )


def raises_later(verdict: Eligibility) -> bool:
    """Return whether the dispatcher accepts the call, but the backend then raises an exception."""
    return [reason.code for reason in verdict.certain] == [RAISED_LATER]


def predict(params: AttentionParams, machine: Machine) -> Prediction:
    """Predict the result of torch._fused_sdp_choice. Neither torch nor a GPU is needed."""
    verdicts = {backend: judge(backend, params, machine) for backend in SDPA_BACKENDS}
    orders = _orders(params, machine)
    choices = {choice for order in orders for choice in _choices(order, verdicts)}
    choice = choices.pop() if len(choices) == 1 else "unknown"
    order = orders[0] if len(orders) == 1 else ()
    return Prediction(choice, order, verdicts, hazards(choice, params, machine))


def predict_cell(config: Config, backend: str, environment: Mapping[str, Any]) -> str | None:
    """Predict the outcome of a cell of a run. Return None if the outcome is unknown, or if
    PyTorch's dispatcher does not know the backend.

    For `auto`, `all-disabled`, a set or an order, return the backend that PyTorch selects, or
    `none` if PyTorch raises an exception. For a single backend, return `eligible` or `refused`.
    """
    if not rules_know(environment):
        return None
    machine = machine_of(environment)
    params = with_flags(environment)(from_config(config, environment["device_type"]))
    if backend in SDPA_BACKENDS:
        alone = replace(params, enabled=frozenset({backend}))
        eligible = judge(backend, alone, machine).eligible
        return None if eligible is None else "eligible" if eligible else "refused"
    setting = sdpa_setting(backend)
    if setting is None and backend != AUTO:
        return None
    if setting is not None and setting.ordered and machine.torch < SETS_PRIORITY:
        return None
    choice = predict(permitted(params, setting), machine).choice
    return None if choice == "unknown" else choice


def every_refusal(
    config: Config, backend: str, refusals: Sequence[Refusal], environment: Mapping[str, Any]
) -> tuple[Refusal, ...]:
    """Return the refusals that PyTorch reported for a cell, and further refusals by rule.

    PyTorch stops at the first reason, so it does not report all reasons. If the rules do not cover
    the cell, return only `refusals`.
    """
    if backend not in SDPA_BACKENDS or not refusals or not rules_know(environment):
        return tuple(refusals)
    alone = replace(
        with_flags(environment)(from_config(config, environment["device_type"])),
        enabled=frozenset({backend}),
    )
    codes = {reason.code for reason in refusals}
    verdict = judge(backend, alone, machine_of(environment))
    return (*refusals, *(reason for reason in verdict.certain if reason.code not in codes))


def _choices(order: tuple[str, ...], verdicts: Mapping[str, Eligibility]) -> set[str]:
    """Return each backend that PyTorch may select, and `none` if PyTorch may raise an exception."""
    choices: set[str] = set()
    for backend in order:
        eligible = verdicts[backend].eligible
        if raises_later(verdicts[backend]):
            return choices | {"none"}
        if eligible is not False:
            choices.add(backend)
        if eligible:
            return choices
    return choices | {"none"}


def _orders(params: AttentionParams, machine: Machine) -> tuple[tuple[str, ...], ...]:
    """Return the orders in which PyTorch may try the backends. There can be several orders if a
    property of the machine is unknown. Return () if the rules do not cover the release.
    """
    if not machine.known:
        return ()
    if params.device == CPU:
        return (CPU_ORDER,)
    orders = dict.fromkeys(map(_default_order, _completions(machine, _missing(machine))))
    return tuple({tuple(dict.fromkeys((*params.priority, *order))): None for order in orders})


def undecided(params: AttentionParams, machine: Machine) -> tuple[str, ...]:
    """Return the unknown fields of the machine on which the order of the backends depends."""
    if len(_orders(params, machine)) < 2:
        return ()
    missing = _missing(machine)
    return tuple(
        name
        for name in missing
        if any(  # the order depends on this field for some values of the other fields
            len(_orders(params, each)) > 1
            for each in _completions(machine, tuple(other for other in missing if other != name))
        )
    )


def _missing(machine: Machine) -> tuple[str, ...]:
    if machine.is_rocm:
        return () if machine.aotriton is not None else ("aotriton",)
    return tuple(name for name in MISSING if getattr(machine, name) is None)


@lru_cache(maxsize=64)
def _completions(machine: Machine, missing: tuple[str, ...]) -> tuple[Machine, ...]:
    """Return copies of the machine, one for every combination of values of its missing fields."""
    known = {"aotriton": machine.aotriton_versions}
    return tuple(
        replace(machine, **dict(zip(missing, values, strict=True)))  # type: ignore[arg-type]
        for values in itertools.product(*(known.get(name) or MISSING[name] for name in missing))
    )
