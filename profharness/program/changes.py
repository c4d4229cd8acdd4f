"""The verdicts of a diff, and the differences between the environments of two runs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from profharness.columns import column

Verdict = Literal["same", "faster", "slower", "changed", "added", "removed", "unknown"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
MIN_LAUNCHES = 3
RESOLUTION_NS = 64  # two ticks of the device clock, each of which is 32 ns long


@dataclass(frozen=True, slots=True)
class EnvChange:
    """A key whose values differ between two environments."""

    key: Annotated[str, column("environment", meaning="name of the property")]
    baseline: Annotated[
        Any, column("baseline", importance="answer", shrink=True, meaning="value of the baseline")
    ]
    candidate: Annotated[
        Any, column("candidate", importance="answer", shrink=True, meaning="value of the candidate")
    ]
    explains: Annotated[
        str | None,
        column("what it can explain", wrap=True, meaning="what such a change can cause"),
    ]


# Maps patterns of environment keys to the possible effect of a change. The most important keys come
# first. The texts describe how PyTorch dispatches on CUDA.
_EXPLAINS = {
    "device_type": "another kind of device runs other kernels; times do not compare",
    "gpu|capability|num_sms": "the GPU decides which backends are allowed, whether cuDNN comes first,"
    " tiles and the number of splits",
    "torch|torch_git": "PyTorch's release decides the order of backends, their constraints and"
    " the built-in kernels",
    "torch_cuda": "brings other cuBLAS kernels for math; from 2.13 the CUDA of the build also decides"
    " on which GPUs cuDNN comes first",
    "cudnn": "cuDNN picks its kernels at run time; from torch 2.10 one newer than 9.15.0 is the first"
    " choice on compute capability 9 and 10, and head_dim limits depend on it",
    r"(env\.)?TORCH_CUDNN_SDPA_DEPRIORITIZED": "1 takes cuDNN from the front (torch 2.10 on)",
    r"(env\.)?TORCH_CUDNN_SDPA_ENABLED": "1 lets PyTorch take cuDNN (torch 2.3 and 2.4)",
    r"(env\.)?TORCH_CUDNN_SDPA_PREFERRED": "0 keeps cuDNN from the front (torch 2.9)",
    r"(env\.)?TORCH_CUDNN_SDPA_NESTED\w*": "1 lets cuDNN take nested tensors",
    r"(env\.)?TORCH_CUDNN_SDPA_AVOID_RECOMPILE": "changes which cuDNN plan a shape gets",
    r"(env\.)?TORCH_CUDNN_SDPA_\w+": "steers the use of cuDNN attention",
    "priority_order": "the first allowed backend of this order runs",
    r"sdp_\w+": "a backend that is switched off is never chosen",
    "flash_attention_impl": "another FlashAttention generation brings other kernels and limits",
    "deterministic": "deterministic algorithms rule cuDNN out and give flash's backward another grid",
    "fp16_reduction_math": "lets math compute in half precision instead of fp32: no casts, other GEMMs",
    r"tf32|(env\.)?(NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_\w+)": "lets fp32 GEMMs of math run on tensor"
    " cores",
    "triton": "compiles flex and Triton kernels anew",
    "driver": "may change clocks, launch cost and just-in-time compiled code",
    r"(env\.)?(CUBLAS_\w+|TORCH_BLAS_\w+|DISABLE_ADDMM_CUDA_LT)": "changes cuBLAS's choice of GEMM for"
    " math",
    r"(env\.)?CUDA_LAUNCH_BLOCKING": "makes every launch wait, which lengthens calls",
    r"(env\.)?CUDA_\w+": "changes how work is launched",
    r"(env\.)?PYTORCH_(CUDA_)?ALLOC_CONF": "changes the cost of allocations inside a call",
    "cpu": "another processor launches at another pace, and runs CPU kernels at another speed",
    r"num_threads|(env\.)?(OMP|MKL)_NUM_THREADS": "changes the time of CPU kernels",
    r"sm_mhz|clocks\.\w+|power_limit\w*": "another clock gives other times for the same kernel",
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
    """Return every key whose value differs between two environments. Keys that can explain
    different kernels or times come first.

    Nested dicts are flattened to dotted keys. A key that only one environment has is returned only
    if both environments have its section, such as `env`. Keys in OF_A_FILE and OF_ONE_GPU are
    ignored.
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
