"""What PyTorch itself answered about a config, and the machine and flags that a process told of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from profharness.dispatch.advice import Advice
from profharness.dispatch.machine import RELEASES, Machine, parse_release
from profharness.dispatch.params import BACKENDS, FLASH_IMPLS, AttentionParams
from profharness.dispatch.perturb import Blocker
from profharness.errors import UsageError

ANSWERS_FILE = "answers.jsonl"
UNKNOWN_RELEASE = (0, 0, 0)


@dataclass(frozen=True)
class LiveBackend:
    """One backend's answer. can_use: what `can_use_*_attention` says, None where there is no such
    function or it was not asked.
    """

    backend: str
    eligible: bool | None
    blockers: tuple[Blocker, ...] = ()
    advice: tuple[Advice, ...] = ()
    can_use: bool | None = None


@dataclass(frozen=True)
class LiveAnswer:
    """One config's answers; cell is the id that the question came with, config its label. choice is
    a backend or `none` where PyTorch raises. error: why nothing could be asked.
    """

    cell: str
    config: str
    choice: str | None = None
    priority_order: tuple[str, ...] = ()
    backends: tuple[LiveBackend, ...] = ()
    error: str | None = None


def machine_of(environment: Mapping[str, Any]) -> Machine:
    """The machine for the rules, from `environment.collect()`'s answer. A release whose text cannot
    be read is one that the rules do not know.
    """
    try:
        release = parse_release(str(environment.get("torch", "")))
    except UsageError:
        release = UNKNOWN_RELEASE
    wheel = RELEASES.get(release)
    cuda = environment.get("torch_cuda")
    variables = environment.get("env") or {}
    major, _, minor = str(environment.get("capability") or "0.0").partition(".")
    return Machine(
        torch=release,
        capability=(int(major), int(minor)),
        cudnn=environment.get("cudnn"),
        cuda=cuda,
        cudnn_compiled=wheel.cudnn_compiled if wheel and wheel.cuda == cuda else None,
        cudnn_preferred=_cudnn_preferred(release, variables),
        cudnn_nested=variables.get("TORCH_CUDNN_SDPA_NESTED_TENSOR_ENABLED") == "1",
    )


def _cudnn_preferred(release: tuple[int, ...], variables: Mapping[str, str]) -> bool | None:
    if release >= (2, 10):
        return False if variables.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1" else None
    return False if variables.get("TORCH_CUDNN_SDPA_PREFERRED") == "0" else None


def with_flags(environment: Mapping[str, Any]) -> Callable[[AttentionParams], AttentionParams]:
    """Sets what a config cannot say to what the process told: flags, and the flash implementation."""
    on = frozenset(name for name in BACKENDS if environment.get(f"sdp_{name}") is not False)
    told = str(environment.get("flash_attention_impl"))
    impl = told if told in FLASH_IMPLS else "FA2"
    return lambda params: replace(params, enabled=on, flash_impl=impl)
