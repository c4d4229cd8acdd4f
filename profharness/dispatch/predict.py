"""Which backend PyTorch takes for a call on a machine, and why not the others: the rules applied."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from profharness.config import AUTO, SDPA_BACKENDS, Config, sdpa_setting
from profharness.dispatch.checks import hazards
from profharness.dispatch.early import EARLY
from profharness.dispatch.machine import (
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
from profharness.dispatch.rules import (
    CPU_FLASH,
    CUDNN,
    EFFICIENT,
    FLASH,
    MATH,
    ON_DEVICE,
    RAISED_LATER,
    Rule,
)
from profharness.rows import Refusal

# Where releases from 2.5 on asked in another order: its span, and PyTorch's functions in turn.
EARLIER_ORDER: dict[str, tuple[tuple[Release, Release, tuple[str, ...]], ...]] = {
    "cudnn": (
        ((2, 5), (2, 7), ("runtime_disabled", "nested", "nonzero_lengths", "last_stride", "on_device",
                  "tensor_shapes", "cudnn_shapes", "deterministic", "dtypes", "mask_shape",
                  "hardware")),
        ((2, 7), (2, 9), ("runtime_disabled", "nested", "nonzero_lengths", "on_device", "tensor_shapes",
                  "cudnn_shapes", "deterministic", "dtypes", "mask_shape", "hardware",
                  "last_stride", "num_heads")),
    ),
}  # fmt: skip


TABLES: dict[tuple[str, str], tuple[Rule, ...]] = {
    key: (*EARLY.get(key, ()), *rules)
    for key, rules in {
        ("cuda", "flash"): FLASH,
        ("cuda", "efficient"): EFFICIENT,
        ("cuda", "cudnn"): CUDNN,
        ("cuda", "math"): MATH,
        ("cpu", "flash"): CPU_FLASH,
        ("cpu", "efficient"): (ON_DEVICE,),
        ("cpu", "cudnn"): (ON_DEVICE,),
        ("cpu", "math"): MATH,
    }.items()
}

_SUFFIX = re.compile(r"\s*\(Triggered internally at .*\)\s*$", re.DOTALL)
_HEADER = re.compile(
    r"^(memory efficient kernel|flash attention kernel|cudnn attention kernel) not used because:$",
    re.IGNORECASE,
)
# Fragment (lower case) to code; first hit wins.
CODES: tuple[tuple[str, str], ...] = (
    ("has been runtime disabled", "runtime_disabled"),
    ("requires a cuda device", "not_on_cuda"),
    ("need to be on cuda device", "not_on_cuda"),
    ("to be 4 dimensional", "not_4d"),
    ("has no argument", "no_argument"),
    ("has no cudnn attention", "not_in_release"),
    ("has no flash attention for the cpu", "not_in_release"),
    ("needs to be enabled by setting", "runtime_disabled"),
    ("not support non-null attn_mask", "mask"),
    ("attn_mask requires a gradient", "mask_grad"),
    ("explicit attn_mask should not be set when is_causal", RAISED_LATER),
    ("same last dimension and to be less than or equal to", "head_dim"),
    ("only supports gpu architectures", "capability"),
    ("only supports sm", "capability"),
    ("compute capability", "capability"),
    ("doesn't support training with head_dim", "head_dim_training"),
    ("does not support the is_causal flag when seqlen_q", "causal_non_square"),
    ("expected query, key and value to all be of dtype", "dtype"),
    ("expected query, key and value to all be of the same dtype", "dtype"),
    ("low-precision flash attention sdpa requires fa3", "dtype"),
    ("nested inputs", "nested"),
    (" nt inputs", "nested"),
    ("to be a multiple of 8 and less than", "head_dim_multiple"),
    ("q,k,v to have the same last dimension.", "head_dim"),
    ("to have the same batch_size and num_heads", "num_heads"),
    ("to have the same batch_size", "batch_size"),
    ("to have the same num_heads", "num_heads"),
    ("heads in key/value must divide", "num_heads"),
    ("batch size or num_heads greater than", "grid_size"),
    ("do not support zero seq_len", "seq_len_zero"),
    ("do not support seq_len == 0", "seq_len_zero"),
    ("last dimension of the input to have stride 1", "last_dim_stride"),
    ("last dimension of inputs to be divisible by", "head_dim_multiple"),
    ("storage offsets * element_size to be aligned", "alignment"),
    ("please use the following attn mask shapes", "mask_shape"),
    ("head_dim should be no more than", "head_dim"),
    ("head_dim should be a multiple of", "head_dim_multiple"),
    ("does not support sequence length 1", "seq_len_one"),
    ("does not support key/value sequence length 1", "seq_len_one"),
    ("query sequence length 1 with dropout", "seq_len_one"),
    ("does not currently support head_dim greater than", "head_dim"),
    ("does not support sequence_length <= 1", "seq_len_one"),
    ("packed qkv layout", "layout"),
    ("inputs with requires_grad=true", "requires_grad"),
    ("non-deterministic algorithm", "deterministic"),
    ("is not deterministic", "deterministic"),
    ("nested tensor", "nested"),
    ("dropout", "dropout"),
    ("decode is disabled", "decode_disabled"),
    ("does not support backward with these head dimensions", "head_dim_training"),
    ("non-finite query gradients", "known_bug"),
    ("provided head dimensions", "head_dim"),
)


@lru_cache(maxsize=1024)
def active_rules(device: str, backend: str, release: Release, nested: bool) -> tuple[Rule, ...]:
    """The rules that a release asks for such inputs, in its order."""
    scopes = ("any", "nested" if nested else "dense")
    rules = [
        rule
        for rule in TABLES[device, backend]
        if rule.since <= release < rule.until and rule.scope in scopes
    ]
    for since, until, names in EARLIER_ORDER.get(backend, ()) if device == "cuda" else ():
        if since <= release < until:
            return tuple(sorted(rules, key=lambda rule: names.index(rule.check)))
    return tuple(rules)


def clean(text: str) -> str:
    """A warning's text without the C++ source position that PyTorch appends."""
    return _SUFFIX.sub("", text).strip()


def is_header(text: str) -> bool:
    """Whether a warning only announces the reasons that follow it."""
    return bool(_HEADER.match(clean(text)))


def code(text: str) -> str:
    """The reason code of a refusal text, `unknown` if the text is new."""
    lowered = text.lower()
    return next((code for fragment, code in CODES if fragment in lowered), "unknown")


# cuDNN versions that stand for every interval between the versions which the rules name.
CUDNN_POINTS = (
    *(90000, 90501, 91000, 91100, 91101, 91400, 91501, 91900, 92201, 92400, 92401, 92402, 92501),
    92600,
)
# What may be missing of a machine that decides the order, with values on both sides of each limit.
MISSING: dict[str, tuple[object, ...]] = {
    "cudnn": CUDNN_POINTS,
    "cuda": ("12.9", "13.0"),
    "cudnn_compiled": (90500, 90501, 90800, 90900, 91000),
}
DEFAULT_ORDER = ("flash", "efficient", "math", "cudnn")
CUDNN_FIRST = ("cudnn", "flash", "efficient", "math")
EFFICIENT_FIRST = ("efficient", "flash", "math")
WITHOUT_CUDNN = ("flash", "efficient", "math")
CPU_ORDER = ("flash", "math")


class Verdict(NamedTuple):
    """Whether a backend takes a call (None: not known), and the reasons against it in PyTorch's order.

    There are no reasons if and only if eligible is True. certain: those that do refuse; the others
    might, but cannot be decided. PyTorch stops at the first certain one and tells no other.
    """

    eligible: bool | None
    reasons: tuple[Refusal, ...] = ()
    certain: tuple[Refusal, ...] = ()


class Prediction(NamedTuple):
    """choice is a backend, `none` where PyTorch raises, `unknown` where it cannot be known.
    priority_order is empty where it is unknown. hazards: known failures of the choice.
    """

    choice: str
    priority_order: tuple[str, ...]
    backends: Mapping[str, Verdict]
    hazards: tuple[str, ...] = ()


class Priority(NamedTuple):
    """The order of a span of releases: `preferred` where `prefers` holds, else `otherwise`."""

    since: Release
    until: Release
    prefers: Callable[[AttentionParams, Machine], bool]
    preferred: tuple[str, ...] = CUDNN_FIRST
    otherwise: tuple[str, ...] = DEFAULT_ORDER


def _newer_cudnn(machine: Machine) -> bool:
    return (machine.cudnn or 0) > 91500 and machine.major in (9, 10)


def _efficient_2_0(params: AttentionParams, _: Machine) -> bool:
    """2.0 puts efficient before flash for head_dim 128, and for few heads of long queries."""
    if params.nested:
        return True
    if params.ndim != 4 or params.batch == 0:
        return False
    heads = params.batch * params.heads
    blocks = heads * (params.seq_q // 64)
    return (heads < 60 and blocks // 2 >= heads) or params.head_dim == 128


def _efficient_2_1(params: AttentionParams, machine: Machine) -> bool:
    """2.1 adds a rule of its own for training: efficient unless the queries are long."""
    if params.requires_grad and not params.nested and params.ndim == 4 and params.batch:
        return 6 * params.batch * params.heads > params.seq_q
    return _efficient_2_0(params, machine)


# The overrideable backend that 2.9 appended is left out: on CUDA, PyTorch raises when it gets there.
# Before 2.5 read in select_sdp_backend of each wheel; the preferences of 2.0 and 2.1 there and in a public
# copy of the source.
PRIORITIES = (
    Priority((2, 0), (2, 1), _efficient_2_0, EFFICIENT_FIRST, WITHOUT_CUDNN),
    Priority((2, 1), (2, 2), _efficient_2_1, EFFICIENT_FIRST, WITHOUT_CUDNN),
    Priority((2, 2), (2, 3), lambda *_: False, otherwise=WITHOUT_CUDNN),
    Priority((2, 3), (2, 5, 0), lambda *_: True),
    Priority((2, 5, 0), (2, 5, 1), lambda _, m: m.major >= 9,
             otherwise=("flash", "cudnn", "efficient", "math")),
    Priority((2, 5, 1), (2, 9), lambda *_: False),
    Priority((2, 9), (2, 10),
             lambda _, m: (m.cudnn_compiled or 0) >= 90900 and m.capability in ((9, 0), (10, 0))),
    Priority((2, 10), (2, 13), lambda _, m: _newer_cudnn(m) and m.capability[1] in (0, 3)),
    Priority((2, 13), (99,),
             lambda _, m: _newer_cudnn(m) and (m.capability[1] in (0, 3) or (m.cuda_major or 0) >= 13)),
)  # fmt: skip


def judge(backend: str, params: AttentionParams, machine: Machine) -> Verdict:
    """Whether a backend (`flash efficient cudnn math`) can take the call, with all reasons."""
    if not machine.known:
        release = release_text(machine.torch)
        text = f"The dispatch rules of PyTorch {release} were not read."
        return Verdict(None, (Refusal("unknown", text, "rule"),))
    reasons: list[Refusal] = []
    certain: list[Refusal] = []
    for rule in active_rules(params.device, backend, machine.torch, params.nested):
        answer = _ask(rule, params, machine)
        if answer is False:
            continue
        text = rule.text(params, machine)
        if answer is None:
            text = f"Cannot be known from what was given; PyTorch might say: {text}"
        reasons.append(Refusal(rule.code, text, "rule"))
        certain += reasons[-1:] if answer else []
    eligible = False if certain else None if reasons else True
    return Verdict(eligible, tuple(reasons), tuple(certain))


def raises_later(verdict: Verdict) -> bool:
    """Whether the dispatcher settles on the backend, whose own code then raises."""
    return [reason.code for reason in verdict.certain] == [RAISED_LATER]


def priority_order(params: AttentionParams, machine: Machine) -> tuple[str, ...]:
    """Backends in the order in which PyTorch tries them; empty where it cannot be known."""
    orders = _orders(params, machine)
    return orders[0] if len(orders) == 1 else ()


def predict(params: AttentionParams, machine: Machine) -> Prediction:
    """What torch._fused_sdp_choice answers, without torch and without a GPU."""
    verdicts = {backend: judge(backend, params, machine) for backend in SDPA_BACKENDS}
    orders = _orders(params, machine)
    choices = {choice for order in orders for choice in _choices(order, verdicts)}
    choice = choices.pop() if len(choices) == 1 else "unknown"
    order = orders[0] if len(orders) == 1 else ()
    return Prediction(choice, order, verdicts, hazards(choice, params, machine))


def predict_cell(config: Config, backend: str, environment: Mapping[str, Any]) -> str | None:
    """What the rules say of a cell of a run: where PyTorch chooses (`auto`, `all-disabled`, a set, an
    order) the backend that it takes, or `none` where it raises; for a forced backend `eligible` or
    `refused`. None where they cannot tell, and for backends that PyTorch's dispatcher does not know.
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
    """What PyTorch said against a backend of a refused cell, and what the rules say besides: it
    stops at the first reason. refusals are returned as they are where the rules cannot tell.
    """
    if backend not in SDPA_BACKENDS or not refusals or not rules_know(environment):
        return tuple(refusals)
    alone = replace(
        with_flags(environment)(from_config(config, environment["device_type"])),
        enabled=frozenset({backend}),
    )
    said = {reason.code for reason in refusals}
    verdict = judge(backend, alone, machine_of(environment))
    return (*refusals, *(reason for reason in verdict.certain if reason.code not in said))


def _choices(order: tuple[str, ...], verdicts: Mapping[str, Verdict]) -> set[str]:
    """Every backend that might be the first eligible one; `none` where its call then raises."""
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
    """The orders that are possible; more than one where a fact is missing, none for an unknown
    release. On a CPU PyTorch has an order of its own, which no caller changes.
    """
    if not machine.known:
        return ()
    if params.device == "cpu":
        return (CPU_ORDER if machine.torch >= (2, 1) else ("math",),)
    orders = _own_orders(params, machine)
    return tuple({tuple(dict.fromkeys((*params.priority, *order))): None for order in orders})


def _own_orders(params: AttentionParams, machine: Machine) -> tuple[tuple[str, ...], ...]:
    """Those that PyTorch itself may have on CUDA."""
    row = next(row for row in PRIORITIES if row.since <= machine.torch < row.until)
    if machine.cudnn_preferred is False and machine.torch >= (2, 9):
        return (row.otherwise,)
    worlds = _worlds(machine, _missing(machine))
    return tuple({row.preferred if row.prefers(params, w) else row.otherwise for w in worlds})


def undecided(params: AttentionParams, machine: Machine) -> tuple[str, ...]:
    """The fields of a known Machine (`cudnn cuda cudnn_compiled`) that are None and that the
    priority order of a call hangs on; empty where it is certain.
    """
    if len(_orders(params, machine)) < 2:
        return ()
    missing = _missing(machine)
    return tuple(
        name
        for name in missing
        if any(  # some values of the other facts leave the order to this one
            len(_orders(params, world)) > 1
            for world in _worlds(machine, tuple(fact for fact in missing if fact != name))
        )
    )


def _missing(machine: Machine) -> tuple[str, ...]:
    return tuple(name for name in MISSING if getattr(machine, name) is None)


@lru_cache(maxsize=64)
def _worlds(machine: Machine, missing: tuple[str, ...]) -> tuple[Machine, ...]:
    """Machines with every value that the missing facts may have."""
    return tuple(
        replace(machine, **dict(zip(missing, values, strict=True)))  # type: ignore[arg-type]
        for values in itertools.product(*(MISSING[name] for name in missing))
    )


def _ask(rule: Rule, params: AttentionParams, machine: Machine) -> bool | None:
    """A rule's answer; without a cuDNN version, the one that all versions share, else None."""
    versions = ("cudnn", "cudnn_compiled") if machine.torch < (2, 9, 1) else ("cudnn",)
    missing = tuple(name for name in versions if getattr(machine, name) is None)
    if not missing:
        return rule.refuses(params, machine)
    answers = {rule.refuses(params, world) for world in _worlds(machine, missing)}
    return answers.pop() if len(answers) == 1 else None
