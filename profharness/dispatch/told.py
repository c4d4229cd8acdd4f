"""From what a process told of its environment to what the rules ask for: the machine, flags, and the
flash implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from profharness.dispatch.machine import RELEASES, Machine, build_of, parse_release
from profharness.dispatch.params import BACKENDS, FLASH_IMPLS, AttentionParams
from profharness.errors import UsageError

UNKNOWN_RELEASE = (0, 0, 0)


def machine_of(environment: Mapping[str, Any]) -> Machine:
    """The machine for the rules, from `environment.collect()`'s answer. A release or a capability
    that cannot be read is one that the rules do not know.
    """
    try:
        release = parse_release(str(environment.get("torch", "")))
    except UsageError:
        release = UNKNOWN_RELEASE
    cuda = environment.get("torch_cuda")
    build = build_of(release, cuda) if cuda else None
    variables = environment.get("env") or {}
    return Machine(
        torch=release,
        capability=_capability(environment.get("capability")),
        cudnn=environment.get("cudnn"),
        cuda=cuda,
        cudnn_compiled=build.cudnn_compiled if build else None,
        cudnn_preferred=_cudnn_preferred(release, variables),
        cudnn_nested=variables.get("TORCH_CUDNN_SDPA_NESTED_TENSOR_ENABLED") == "1",
    )


def is_told(environment: Mapping[str, Any]) -> bool:
    """Whether an environment says enough, and of a release that the rules know."""
    machine = machine_of(environment)
    if machine.torch not in RELEASES or environment.get("device_type") not in ("cuda", "cpu"):
        return False
    return environment["device_type"] == "cpu" or machine.capability != (0, 0)


def with_flags(environment: Mapping[str, Any]) -> Callable[[AttentionParams], AttentionParams]:
    """Sets what a config cannot say to what the process told: flags, and the flash implementation."""
    on = frozenset(name for name in BACKENDS if environment.get(f"sdp_{name}") is not False)
    told = str(environment.get("flash_attention_impl"))
    impl = told if told in FLASH_IMPLS else "FA2"
    return lambda params: replace(params, enabled=on, flash_impl=impl)


def _capability(text: object) -> tuple[int, int]:
    major, _, minor = str(text or "0.0").partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


def _cudnn_preferred(release: tuple[int, ...], variables: Mapping[str, str]) -> bool | None:
    """False where a variable that this release reads puts cuDNN back in the order."""
    if release >= (2, 10):
        return False if variables.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1" else None
    return False if variables.get("TORCH_CUDNN_SDPA_PREFERRED") == "0" else None
