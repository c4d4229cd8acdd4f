"""Define the verdicts of a diff, and compare the environments of two runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args

from profharness.columns import column
from profharness.devices import short_device_names

Verdict = Literal["same", "faster", "slower", "changed", "added", "removed", "unknown"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
MIN_LAUNCHES = 3
RESOLUTION_NS = 64  # two ticks of the device clock, each of which is 32 ns long


@dataclass(frozen=True, slots=True)
class EnvChange:
    """A key whose values differ between two environments."""

    key: Annotated[str, column("environment", meaning="name of the property")]
    baseline: Annotated[
        Any, column("baseline", importance="answer", shrink=True, meaning="value in the baseline")
    ]
    candidate: Annotated[
        Any, column("candidate", importance="answer", shrink=True, meaning="value in the candidate")
    ]
    explains: Annotated[
        str | None,
        column(
            "what it can explain",
            wrap=True,
            meaning="how the changed property can affect kernels or times",
        ),
    ]


# Maps patterns of environment keys to the possible effect of a change. The most important keys come
# first. The texts describe how PyTorch dispatches on CUDA.
_EXPLAINS = {
    "device_type": "a CPU and a GPU run different kernels, so their times cannot be compared",
    "gpu|capability|num_sms": (
        "the GPU determines how fast kernels run, which backends are allowed, whether cuDNN is "
        "the first choice, and which tile sizes and how many splits the kernels use"
    ),
    "engine|engine_version": (
        "engine releases differ in the order of their backends and in their kernels; see "
        "`explain --engine`"
    ),
    "attention_backend": "each attention backend of an engine runs different kernels",
    "torch|torch_git": (
        "the PyTorch release determines the order of the backends, their constraints and the "
        "built-in kernels"
    ),
    "torch_cuda": (
        "the CUDA release determines which cuBLAS kernels the math backend runs and, from torch "
        "2.13 on, on which GPUs cuDNN is the first choice"
    ),
    "cudnn": (
        "cuDNN selects kernels at run time, and its head_dim limits depend on its version; from "
        "torch 2.10 on, cuDNN is the first choice on compute capability 9 and 10 if its version is "
        "newer than 9.15.0"
    ),
    r"(env\.)?TORCH_CUDNN_SDPA_DEPRIORITIZED": (
        "the value 1 removes cuDNN from the front of the backend order (torch 2.10 and newer)"
    ),
    r"(env\.)?TORCH_CUDNN_SDPA_ENABLED": (
        "the value 1 lets PyTorch choose cuDNN (torch 2.3 and 2.4)"
    ),
    r"(env\.)?TORCH_CUDNN_SDPA_PREFERRED": (
        "the value 0 prevents cuDNN from being the first choice (torch 2.9)"
    ),
    r"(env\.)?TORCH_CUDNN_SDPA_NESTED\w*": "the value 1 lets cuDNN process nested tensors",
    r"(env\.)?TORCH_CUDNN_SDPA_AVOID_RECOMPILE": (
        "the variable changes which cuDNN plan is used for a shape"
    ),
    r"(env\.)?TORCH_CUDNN_SDPA_\w+": "the variable controls the use of cuDNN attention",
    "priority_order": "PyTorch runs the first allowed backend in the priority order",
    r"sdp_\w+": "a backend that is switched off is never chosen",
    "flash_attention_impl": "a different FlashAttention generation has different kernels and limits",
    "deterministic": (
        "deterministic algorithms exclude cuDNN and change the grid of the flash backward kernel"
    ),
    "fp16_reduction_math": (
        "the setting lets the math backend compute in half precision instead of "
        "fp32, so that it needs no casts and uses other GEMM kernels"
    ),
    r"tf32|(env\.)?(NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_\w+)": (
        "the setting lets the fp32 GEMMs of math run on tensor cores"
    ),
    "triton": "a different Triton release compiles flex and Triton kernels differently",
    "flashinfer|flash-attn(-3)?|sgl-kernel|aiter|hip": (
        "the package contains attention kernels that serving engines use"
    ),
    "driver": (
        "a different driver may change the clocks, the launch cost and just-in-time compiled code"
    ),
    r"(env\.)?(CUBLAS_\w+|TORCH_BLAS_\w+|DISABLE_ADDMM_CUDA_LT)": (
        "the variable changes which GEMM cuBLAS chooses for math"
    ),
    r"(env\.)?CUDA_LAUNCH_BLOCKING": (
        "the variable makes every launch wait for its kernel, so calls take longer"
    ),
    r"(env\.)?CUDA_\w+": "the variable changes how work is launched",
    r"(env\.)?PYTORCH_(CUDA_)?ALLOC_CONF": (
        "the variable changes the cost of allocations inside a call"
    ),
    "cpu": "a different processor launches kernels and runs CPU kernels at a different speed",
    r"num_threads|(env\.)?(OMP|MKL)_NUM_THREADS": (
        "the number of threads changes the time of CPU kernels"
    ),
    r"sm_mhz|clocks\.\w+|power_limit\w*": "the same kernel takes more or less time at a different clock rate",
}
EXPLAINS = tuple((re.compile(pattern), sentence) for pattern, sentence in _EXPLAINS.items())

# Keys that describe the trace file instead of the machine.
OF_A_FILE = frozenset({"schemaVersion", "trace_id", "traceName", "displayTimeUnit"})
# Keys that identify one of several equal GPUs. They are ignored, because GPUs of different models
# also differ in other keys.
OF_ONE_GPU = frozenset({"gpu_key", "env.CUDA_VISIBLE_DEVICES"})
UNIMPORTANT = re.compile(
    r"^(created|run|note|path|time(stamp)?|profharness|python|platform|os(_kernel)?|host\w*)$"
)


def environment_changes(
    base_env: Mapping[str, Any], cand_env: Mapping[str, Any]
) -> list[EnvChange]:
    """Return the keys with different values in two environments.

    Keys that can explain different kernels or times come first. Nested dicts are flattened to dotted
    keys. A key that only one environment has is returned only if both environments have its section,
    such as `env`. Keys in OF_A_FILE and OF_ONE_GPU are ignored.
    """
    both = base_env.keys() & cand_env.keys()
    base, cand = ({key: env[key] for key in both} for env in (base_env, cand_env))
    base, cand = flatten(base), flatten(cand)
    weighed = []
    for key in (base.keys() | cand.keys()) - OF_A_FILE - OF_ONE_GPU:
        if base.get(key) != cand.get(key):
            found = (at for at, (pattern, _) in enumerate(EXPLAINS) if pattern.fullmatch(key))
            weight = next(found, len(EXPLAINS) + bool(UNIMPORTANT.match(key)))
            explains = EXPLAINS[weight][1] if weight < len(EXPLAINS) else None
            weighed.append((weight, EnvChange(key, base.get(key), cand.get(key), explains)))
    return [change for _, change in sorted(weighed, key=lambda pair: (pair[0], pair[1].key))]


def with_short_devices(change: EnvChange) -> EnvChange:
    """Return a change with the short names of the devices if it is a change of the GPU or CPU."""
    values = change.baseline, change.candidate
    if change.key not in ("gpu", "cpu") or None in values:
        return change
    baseline, candidate = short_device_names(map(str, values)).values()
    return replace(change, baseline=baseline, candidate=candidate)


def flatten(environment: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts to dotted keys such as `env.NAME`. Convert tuples to lists, as in a
    stored environment.
    """
    flat: dict[str, Any] = {}
    for key, value in environment.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = list(value) if isinstance(value, tuple) else value
    return flat
