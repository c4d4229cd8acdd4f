"""The records of a diff and their JSON form."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import msgspec

from profharness.answers.layers.observed_calls import ObservedCalls
from profharness.rows import CallRow, CellRow, KernelRow, StepRow

Verdict = Literal["same", "faster", "slower", "changed", "added", "removed", "unknown"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
BACKEND_CHANGED = "backend-changed"
"""The gate's name for a layer that another backend computes."""
CostVerdict = Literal["same", "more", "less", "refused", "accepted"]
COSTS = MEMORY, LAUNCHES, REFUSED = "memory", "launches", "refused"
"""The gate's names for a candidate that needs more memory or launches, or refuses what the baseline
runs.
"""
SCHEMA = "profharness.diff/1"
MIN_LAUNCHES = 3
RESOLUTION_NS = 64  # two ticks of the 32 ns clock of device timestamps


@dataclass(frozen=True, slots=True)
class Program:
    """The attention calls of a program."""

    calls: tuple[CallRow, ...]  # in traces
    steps: tuple[StepRow, ...] = ()
    device: str | None = None  # name of its GPU, if known
    # one call for each observed kind of which some calls are in no trace
    untraced: tuple[CallRow, ...] = ()
    observed: ObservedCalls = field(default_factory=lambda: ObservedCalls((), ()))


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a diff. Kernels without a config are grouped by their range."""

    label: str
    cells: tuple[CellRow, ...] = ()
    kernels: tuple[KernelRow, ...] = ()
    backend: str | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    program: Program | None = None  # the calls of a run that is no capture


@dataclass(frozen=True, slots=True)
class Change:
    """A property of a row that differs. A tuple of values if a side has several kernels."""

    field: str
    baseline: Any
    candidate: Any


@dataclass(frozen=True, slots=True)
class EnvChange:
    """A key of the environments that differs."""

    key: str
    baseline: Any
    candidate: Any
    explains: str | None  # what such a change can cause; None: nothing


@dataclass(frozen=True, slots=True)
class DiffRow:
    """One role of one config on both sides. Times are ns per call."""

    config: str
    backend_baseline: str | None
    backend_candidate: str | None
    role: str  # `call`, `status`, a role of answers/roles, or `kernels` for their sum
    baseline: tuple[KernelRow, ...] = ()
    candidate: tuple[KernelRow, ...] = ()
    ratio: float | None = None  # candidate over baseline
    verdict: Verdict = "unknown"
    reasons: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    # The kernels' identity, launch properties or status differ, whatever the verdict on the time.
    changed: bool = False
    composite: bool = False  # a fused kernel on one side, math kernels on the other
    baseline_ns: float | None = None
    candidate_ns: float | None = None
    basis: str | None = None  # what was timed


@dataclass(frozen=True, slots=True)
class Cost:
    """One of COSTS of one config on both sides."""

    config: str
    backend_baseline: str | None
    backend_candidate: str | None
    what: str
    baseline: float | str  # bytes at the peak, launches per call, or how the cell ended
    candidate: float | str
    verdict: CostVerdict  # `accepted`: only the baseline refuses
    ratio: float | None = None  # candidate over baseline


@dataclass(frozen=True, slots=True)
class LayerSide:
    """Equal calls of equal layers on one side. config, phase, mode and sdpa_op are those of the
    call of median length.
    """

    module: str | None  # layer numbers in braces
    config: str | None
    calls: float | None  # per step; None without a recorded step
    phase: str | None
    mode: str
    ran: str | None  # what computed the calls; None if unknown
    sdpa_op: str | None
    forward_ns: float | None  # median of one call's kernels, like backward_ns
    backward_ns: float | None
    asked: str | None = None  # recorded by the observer, like choice, mask and program_calls
    choice: str | None = None
    mask: str | None = None
    program_calls: int | None = None
    # The configs to time instead of the calls, with the number of calls per step, else of the whole
    # program. Empty if no config replays them.
    points: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class MatchedLayers:
    """Equal layers of several programs, None for a program without them."""

    direction: str
    sides: tuple[LayerSide | None, ...]
    call_ns: tuple[float | None, ...]  # medians of one call's kernels; None if unknown
    basis: str | None  # what was timed on all that have times
    reasons: tuple[tuple[str, ...], ...]  # differences of each from the first that has the layers


@dataclass(frozen=True, slots=True)
class LayerDiff:
    """Equal layers on both sides, None for a side without them."""

    direction: str
    baseline: LayerSide | None = None
    candidate: LayerSide | None = None
    ratio: float | None = None  # time of a call, candidate over baseline
    basis: str | None = None  # what was timed
    verdict: Verdict = "unknown"  # `changed` if another backend or mode ran, else speed
    speed: Verdict = "unknown"  # the verdict on the times
    changed: bool = False
    backend_changed: bool = False  # both are known and differ
    reasons: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The layers' module, else the config of their calls."""
        side = self.baseline or self.candidate
        assert side is not None
        return side.module or side.config or "a call"


@dataclass(frozen=True, slots=True)
class Diff:
    """All rows in the order of the baseline's configs, and the differences of the environments."""

    baseline: str
    candidate: str
    environment: tuple[EnvChange, ...]
    rows: tuple[DiffRow, ...]
    layers: tuple[LayerDiff, ...] = ()  # of two programs with attention calls
    # Both sides record their PyTorch. A trace alone records little, so that its lack of differences
    # is no evidence.
    environment_told: bool = True
    costs: tuple[Cost, ...] = ()

    def verdicts(self) -> Counter[str]:
        """Count the rows per verdict."""
        return Counter(row.verdict for row in self.rows)

    def fails(self, on: Set[str]) -> list[DiffRow]:
        """Return the rows whose verdict is in `on`. `changed` also matches changed rows with
        another verdict.
        """
        return [row for row in self.rows if row.verdict in on or (row.changed and "changed" in on)]

    def failing_costs(self, on: Set[str]) -> list[Cost]:
        """Return the costs in `on` that are higher on the candidate or refused only there."""
        return [row for row in self.costs if row.what in on and row.verdict in ("more", REFUSED)]

    def failing_layers(self, on: Set[str]) -> list[LayerDiff]:
        """Return the layers whose verdict or speed is in `on`. BACKEND_CHANGED matches those of
        another backend.
        """
        return [
            row
            for row in self.layers
            if row.verdict in on
            or (row.speed in on and row.baseline and row.candidate)
            or (row.backend_changed and BACKEND_CHANGED in on)
        ]

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts, lists and scalars under schema `profharness.diff/1`. `layers` and
        `costs` are left out if empty, `environment_told` if true.
        """
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self, enc_hook=str))
        for name in ("layers", "costs"):
            if not plain[name]:
                del plain[name]
        if self.environment_told:
            del plain["environment_told"]
        return {"schema": SCHEMA, **plain}


# What a change of a key can cause, in order of weight. The sentences describe PyTorch's dispatch on
# CUDA: its order of backends and the checks of their constraints.
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
# Keys of the trace file, not of the machine.
OF_A_FILE = frozenset({"schemaVersion", "trace_id", "traceName", "displayTimeUnit"})
# Which of several equal GPUs it was. GPUs of two models differ in more keys than these.
OF_ONE_GPU = frozenset({"gpu_key", "env.CUDA_VISIBLE_DEVICES"})
UNIMPORTANT = re.compile(
    r"^(created|run|note|path|time(stamp)?|profharness|python|platform|host\w*)$"
)


def environment_changes(
    base_env: Mapping[str, Any], cand_env: Mapping[str, Any]
) -> list[EnvChange]:
    """Return every key other than OF_A_FILE and OF_ONE_GPU whose value differs, with nested dicts
    flattened to dotted keys. A key that a side lacks is no difference, except in a section that
    both have, such as `env`: there it is None. Keys that can explain other kernels or times come
    first.
    """
    both = base_env.keys() & cand_env.keys()
    base, cand = ({key: env[key] for key in both} for env in (base_env, cand_env))
    base, cand = flatten(base), flatten(cand)
    weighed = []
    for key in (base.keys() | cand.keys()) - OF_A_FILE - OF_ONE_GPU:
        if base.get(key) != cand.get(key):
            weight, explains = _weight(key)
            weighed.append((weight, EnvChange(key, base.get(key), cand.get(key), explains)))
    return [change for _, change in sorted(weighed, key=lambda pair: (pair[0], pair[1].key))]


def _weight(key: str) -> tuple[int, str | None]:
    """Return the position of a key in the order of weight, and what a change of it can cause, if
    known.
    """
    for weight, (pattern, sentence) in enumerate(EXPLAINS):
        if pattern.fullmatch(key):
            return weight, sentence
    return len(EXPLAINS) + bool(UNIMPORTANT.match(key)), None


def flatten(environment: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts to dotted keys. Tuples become lists, so that a stored and a fresh
    environment are equal.
    """
    flat: dict[str, Any] = {}
    for key, value in environment.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = list(value) if isinstance(value, tuple) else value
    return flat
