"""What the dispatch rules say of a stored cell, from the environment that its run was made in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from profharness.config import Config, parse_config

if TYPE_CHECKING:
    from profharness.dispatch import AttentionParams, Machine

FORCED = ("flash", "efficient", "cudnn", "math")
ELIGIBLE = "eligible"
REFUSED = "refused"
_FLAGS = {name: f"sdp_{name}" for name in FORCED}
_VARIABLES = (
    # variable, value that puts cuDNN back, first release that reads it
    ("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1", (2, 10)),
    ("TORCH_CUDNN_SDPA_PREFERRED", "0", (2, 9)),
)


def machine_of(environment: Mapping[str, Any]) -> Machine | None:
    """The machine that a stored environment describes; None where it says too little, or where the
    rules of its PyTorch release are not known.
    """
    device, torch = environment.get("device_type"), environment.get("torch")
    if device not in ("cuda", "cpu") or not torch:
        return None
    from profharness.dispatch.machine import RELEASES, Machine, parse_release
    from profharness.errors import UsageError

    try:
        release = parse_release(str(torch))
        major, _, minor = str(environment.get("capability") or "0.0").partition(".")
        capability = (int(major), int(minor))
    except (UsageError, ValueError):
        return None
    wheel = RELEASES.get(release)
    if wheel is None or (device == "cuda" and capability == (0, 0)):
        return None
    cuda = environment.get("torch_cuda")
    return Machine(
        torch=release,
        capability=capability,
        cudnn=environment.get("cudnn"),
        cuda=cuda,
        cudnn_compiled=wheel.cudnn_compiled if cuda == wheel.cuda else None,
        cudnn_preferred=_preferred(environment.get("env") or {}, release),
        cudnn_nested=(environment.get("env") or {}).get("TORCH_CUDNN_SDPA_NESTED_TENSOR_ENABLED")
        == "1",
    )


def params_of(config: Config, environment: Mapping[str, Any]) -> AttentionParams:
    """What the dispatcher saw of a config on `auto`: the runtime flags and the activated flash
    implementation are the environment's.
    """
    from profharness.dispatch.params import FLASH_IMPLS, from_config

    enabled = frozenset(name for name, flag in _FLAGS.items() if environment.get(flag) is not False)
    impl = environment.get("flash_attention_impl")
    params = from_config(config, str(environment.get("device_type")))
    return replace(params, enabled=enabled, flash_impl=impl if impl in FLASH_IMPLS else "FA2")


def predicted(
    config: Config, backend: str, environment: Mapping[str, Any], machine: Machine
) -> str | None:
    """What the rules say of a cell: for `auto` and `all-disabled` the backend that PyTorch takes,
    or `none` where it raises; for a forced backend `eligible` or `refused`. None where they cannot
    tell, and for backends that PyTorch's dispatcher does not know.
    """
    from profharness.dispatch.predict import judge, predict

    params = params_of(config, environment)
    if backend in FORCED:
        alone = replace(params, enabled=frozenset({backend}))
        eligible = judge(backend, alone, machine).eligible
        return None if eligible is None else ELIGIBLE if eligible else REFUSED
    if backend == "all-disabled":
        params = replace(params, enabled=frozenset({"cudnn"}))
    elif backend != "auto":
        return None
    choice = predict(params, machine).choice
    return None if choice == "unknown" else choice


class Predictions:
    """Predictions for the cells of one answer; environments and cells that are the same are judged
    once.
    """

    def __init__(self) -> None:
        self._environments: dict[int, tuple[Mapping[str, Any], Machine | None]] = {}
        self._known = lru_cache(maxsize=4096)(self._ask)

    def add(self, environment_id: int, environment: Mapping[str, Any]) -> None:
        """Make an environment known by its id."""
        self._environments[environment_id] = (environment, machine_of(environment))

    def has(self, environment_id: int) -> bool:
        """Whether `add` has seen this id."""
        return environment_id in self._environments

    def of(self, label: str, backend: str, environment_id: int) -> str | None:
        """`predicted` for a config's label in an environment."""
        if self._environments[environment_id][1] is None:
            return None
        return self._known(label, backend, environment_id)

    def _ask(self, label: str, backend: str, environment_id: int) -> str | None:
        environment, machine = self._environments[environment_id]
        if machine is None or backend not in (*FORCED, "auto", "all-disabled"):
            return None
        return predicted(parse_config(label), backend, environment, machine)


def _preferred(variables: Mapping[str, str], release: tuple[int, ...]) -> bool | None:
    """False where a variable that this release reads puts cuDNN back in the order."""
    for name, value, since in _VARIABLES:
        read = release >= since and (name != "TORCH_CUDNN_SDPA_PREFERRED" or release < (2, 10))
        if read and variables.get(name) == value:
            return False
    return None
