"""The inputs of a prediction: a machine (PyTorch release, compute capability, cuDNN) and the
parameters of one SDPA call.

Table rows in this package are NamedTuples, because creating a dataclass slows the start of
commands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, NamedTuple, TypeVar

from profharness.attention.config import SDPA_BACKENDS, Config, SdpaSetting, outside_sdpa
from profharness.attention.dispatch import rocm
from profharness.device_types import CPU, CUDA
from profharness.devices import find_gpu
from profharness.dtypes import DTYPES
from profharness.errors import UsageError

Value = TypeVar("Value")
Release = tuple[int, ...]


class Wheel(NamedTuple):
    """The CUDA and cuDNN versions of one build of a PyTorch release.

    cuDNN versions have the format of cudnnGetVersion(): 9.19.0 is 91900, and 8.9.2 is 8902.
    """

    cuda: str | None
    cudnn: int | None
    """The cuDNN version that the wheel requires at run time."""
    cudnn_compiled: int | None = None
    """The cuDNN version with which PyTorch was compiled. CUDAHooks::versionCuDNN() returns it."""


# The releases whose rules were read from their binaries. The rules of all other releases count as
# unknown and are never guessed from neighbouring releases.
RELEASES: dict[Release, Wheel] = {
    (2, 5, 0): Wheel("12.4", 90100, 90100),
    (2, 5, 1): Wheel("12.4", 90100, 90100),
    (2, 6, 0): Wheel("12.4", 90100, 90100),
    (2, 7, 0): Wheel("12.6", 90501, 90501),
    (2, 7, 1): Wheel("12.6", 90501, 90501),
    (2, 8, 0): Wheel("12.8", 91002, 90800),
    (2, 9, 0): Wheel("12.8", 91002, 90800),
    (2, 9, 1): Wheel("12.8", 91002, 90800),
    (2, 10, 0): Wheel("12.8", 91002, 91002),
    (2, 11, 0): Wheel("13.0", 91900, 91900),
    (2, 12, 0): Wheel("13.0", 92000, 92000),
    (2, 12, 1): Wheel("13.0", 92000, 92000),
    (2, 13, 0): Wheel("13.0", 92000, 92000),
    (2, 14, 0): Wheel("13.0", 92400, 92400),
    (2, 14, 1): Wheel("13.0", 92400, 92400),
    (2, 15, 0): Wheel("13.2", 92600, 92600),
}
OLDEST: Release = (2, 5)
# Builds for CUDA versions other than that of the PyPI wheel. The cu130 build of 2.9.1 tries cuDNN
# first, so it was compiled with cuDNN 9.9 or newer. At run time, it needs cuDNN 9.13.0, according to
# PyTorch's build scripts.
OTHER_BUILDS: dict[Release, tuple[Wheel, ...]] = {
    (2, 9, 1): (Wheel("13.0", 91300, 90900),),
}


@dataclass(frozen=True)
class Machine:
    """The properties of a machine that affect PyTorch's choice. None means unknown."""

    torch: Release
    capability: tuple[int, int] = (0, 0)
    cudnn: int | None = None
    """The cuDNN version at run time as an integer: 9.19.0 is 91900."""
    cuda: str | None = None
    cudnn_compiled: int | None = None
    """The cuDNN version that PyTorch was built with, or the oldest version that it may have been
    built with.
    """
    cudnn_preferred: bool | None = None
    """False if the environment lowers the priority of cuDNN, with TORCH_CUDNN_SDPA_DEPRIORITIZED=1
    (2.10 and newer) or TORCH_CUDNN_SDPA_PREFERRED=0 (2.9). None means PyTorch's default.
    """
    architecture: str | None = None
    """The architecture of an AMD GPU, such as `gfx942`. None on any other GPU."""
    aotriton: rocm.Version | None = None
    """The version of AOTriton on an AMD GPU."""
    fa_library: str = rocm.AOTRITON
    """The library that the program prefers on an AMD GPU, which is one of rocm.LIBRARIES."""
    experimental: bool = False
    """Whether the environment enables AOTriton's experimental architectures."""

    @property
    def known(self) -> bool:
        """Whether the rules cover this release."""
        return self.torch in known_releases(self.architecture)

    @property
    def is_rocm(self) -> bool:
        """Whether the machine is an AMD GPU."""
        return self.architecture is not None

    @property
    def aotriton_versions(self) -> tuple[rocm.Version, ...]:
        """The versions of AOTriton that the machine may have."""
        if self.aotriton is not None:
            return (self.aotriton,)
        return rocm.RELEASES.get(self.torch, ())

    @property
    def major(self) -> int:
        return self.capability[0]

    @property
    def sm(self) -> str:
        """The capability in the format of PyTorch's messages, such as `9.0`."""
        return f"{self.capability[0]}.{self.capability[1]}"


def known_releases(architecture: str | None = None) -> Collection[Release]:
    """Return the releases whose rules are known, on AMD GPUs if an architecture is given."""
    return RELEASES.keys() if architecture is None else rocm.RELEASES.keys()


def require_known(release: Release, architecture: str | None = None) -> Release:
    """Return the release. Raise UsageError if its rules are unknown, on AMD GPUs if an architecture
    is given.
    """
    if release not in known_releases(architecture):
        raise UsageError(unknown_text([release], architecture))
    return release


def unknown_text(missing: Collection[Release], architecture: str | None = None) -> str:
    """Return a clause that names the missing releases and the releases whose rules are known.

    For missing releases that are newer than all known releases, name only the newest known release.
    """
    known = known_releases(architecture)
    same = [number for number in known if {number[:2]} == {release[:2] for release in missing}]
    releases, names = (", ".join(map(release_text, each)) for each in (missing, same or known))
    offered = f"known releases: {names}"
    if not same and min(missing) > max(known):
        offered = f"the newest known release is {release_text(max(known))}"
    where = "" if architecture is None else " on AMD GPUs"
    return f"the dispatch rules of PyTorch {releases}{where} are unknown; {offered}"


def installed_release() -> Release | None:
    """Return the release of the environment's PyTorch, or None. PyTorch is not imported."""
    try:
        return parse_release(metadata.version("torch"))
    except (metadata.PackageNotFoundError, UsageError):  # none, or a development version
        return None


def default_release(measured: Collection[Release] = (), architecture: str | None = None) -> Release:
    """Return the default release for another GPU.

    Prefer the installed release, then the newest release whose rules are known. If an architecture
    is given, these are the rules for AMD GPUs. `measured` contains the releases with an atlas of
    the GPU. If `measured` is not empty, return one of these releases, because only these releases
    have times.
    """
    known, installed = measured or known_releases(architecture), installed_release()
    return installed if installed is not None and installed in known else max(known)


def machine_for(
    gpu: str,
    release: str | Release,
    cudnn: int | str | None = None,
    cuda: str | None = None,
    cudnn_compiled: int | str | None = None,
    *,
    aotriton: str | None = None,
    fa_library: str = rocm.AOTRITON,
    experimental: bool = False,
) -> Machine:
    """Return the machine that has this GPU and the release's build for this CUDA version.

    If `cuda` is None, the build is the PyPI wheel. `cudnn` and `cudnn_compiled` replace the
    versions of the build. The other parameters apply only to AMD GPUs, whose build is PyTorch's own
    for ROCm. Raise UsageError for an unknown GPU.
    """
    number = parse_release(release) if isinstance(release, str) else release
    if (amd := rocm.find_amd_gpu(gpu)) is not None:
        versions = rocm.RELEASES.get(number, ())
        only = versions[0] if len(versions) == 1 else None
        return Machine(
            torch=number,
            capability=amd.capability,
            architecture=amd.architecture,
            aotriton=only if aotriton is None else rocm.parse_aotriton(aotriton),
            fa_library=fa_library,
            experimental=experimental,
        )
    wheel = build_of(number, cuda) or Wheel(cuda, None)
    return Machine(
        torch=number,
        capability=find_gpu(gpu).capability,
        cudnn=wheel.cudnn if cudnn is None else parse_cudnn(cudnn),
        cuda=cuda or wheel.cuda,
        cudnn_compiled=wheel.cudnn_compiled
        if cudnn_compiled is None
        else parse_cudnn(cudnn_compiled),
    )


def gpu_title(gpu: str) -> str:
    """Return the name of a GPU in the tables. Raise UsageError for an unknown GPU."""
    amd = rocm.find_amd_gpu(gpu)
    return find_gpu(gpu).name if amd is None else amd.name


def build_of(release: Release, cuda: str | None = None) -> Wheel | None:
    """Return the build of a release for a CUDA version such as 13.0 or 13.0.1. If `cuda` is None,
    return the PyPI wheel. Return None if the build is unknown.
    """
    wheel = RELEASES.get(release)
    if wheel is None or cuda is None:
        return wheel
    builds = (wheel, *OTHER_BUILDS.get(release, ()))
    short = ".".join(cuda.split(".")[:2])
    return next((build for build in builds if build.cuda == short), None)


def parse_cudnn(value: int | str) -> int:
    """Parse `9.19.0`, `9.19.0.56`, `91900` or 91900 as 91900. Raise UsageError for other text."""
    text = str(value).strip()
    if match := re.fullmatch(r"(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?:\.\d+)?", text):
        major = int(match[1])
        # From cuDNN 9 on, the major version is multiplied by 10,000.
        scale = 10_000 if major >= 9 else 1_000
        return major * scale + int(match[2]) * 100 + int(match[3] or 0)
    if re.fullmatch(r"\d{4,6}", text):
        return int(text)
    raise UsageError(f"invalid cuDNN version {value!r}; write, for example, 9.19.0 or 91900")


def parse_release(text: str) -> Release:
    """Parse a PyTorch version such as `2.8`, `2.9.1` or `2.11.0+cu130`. If the text has no patch
    number, use the newest known patch release. Raise UsageError if the text is not a version.
    """
    match = re.fullmatch(r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?:\+[\w.]+)?", text.strip())
    if not match:
        raise UsageError(f"invalid PyTorch release {text!r}; write, for example, 2.8 or 2.9.1")
    if match[3] is not None:
        return (int(match[1]), int(match[2]), int(match[3]))
    minor = (int(match[1]), int(match[2]))
    return max((release for release in RELEASES if release[:2] == minor), default=(*minor, 0))


def _parse_range(first: str, last: str) -> tuple[list[Release], set[Release]]:
    """Return two lists for a range: the releases with known rules, and the releases with unknown
    rules.
    """
    low, high = parse_release(first), parse_release(last)
    if low < OLDEST:
        require_known(low)
    low = low if first.count(".") > 1 else (*low[:2], 0)
    text = f"release range '{first.strip()}..{last.strip()}'"
    if low > high:
        raise UsageError(f"{text} is empty: its first release is newer than its last")
    releases = [release for release in RELEASES if low <= release <= high]
    if not releases:
        raise UsageError(f"{text}: {unknown_text([low, high])}")
    unknown = {low, high} - RELEASES.keys()
    newest = max(RELEASES)
    if high[0] == newest[0]:
        # List later minor versions without patch releases, because it is unknown which ones exist.
        unknown |= {(high[0], minor, 0) for minor in range(newest[1] + 1, high[1])}
    return releases, unknown


def parse_releases(text: str, architecture: str | None = None) -> list[Release]:
    """Parse `2.5..2.15` (every known release from 2.5.0 to the newest 2.15), `2.8,2.10`, `2.9.1` or
    a combination of these. Return the releases, oldest first. Raise UsageError for a release whose
    rules are unknown, on AMD GPUs if an architecture is given, and for a range that is empty,
    begins before 2.5 or contains no known release.
    """
    found: set[Release] = set()
    for part in text.split(","):
        first, dots, last = part.partition("..")
        if dots:
            found |= set(_parse_range(first, last)[0])
        else:
            found.add(require_known(parse_release(part), architecture))
    return sorted(found)


def skipped_releases(text: str) -> list[Release]:
    """Return the releases in the ranges of `text` that the rules do not cover, oldest first."""
    ranges = [part.split("..", 1) for part in text.split(",") if ".." in part]
    return sorted({release for first, last in ranges for release in _parse_range(first, last)[1]})


def release_text(release: Release) -> str:
    """Format `(2, 9, 1)` as `2.9.1`."""
    return ".".join(map(str, release))


class Mask(NamedTuple):
    """An attn_mask. A `bool` mask selects scores, and a `float` mask is added to the scores."""

    shape: tuple[int, ...]
    kind: str = "float"
    requires_grad: bool = False
    last_stride: int = 1


@dataclass(frozen=True)
class AttentionParams:
    """The parameters of one scaled_dot_product_attention call on dense tensors.

    query is [batch, heads, seq_q, head_dim], key [batch_kv, kv_heads, seq_kv, head_dim], value
    [batch_kv, kv_heads_v, seq_kv, head_dim_v]. If batch_kv, kv_heads_v or head_dim_v is None, the
    value of batch, kv_heads or head_dim applies.
    """

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_kv: int
    head_dim: int
    dtype: str = "fp16"
    device: str = CUDA
    batch_kv: int | None = None
    kv_heads_v: int | None = None
    head_dim_v: int | None = None
    ndim: int = 4
    """The number of dimensions of query, key and value."""
    enable_gqa: bool = False
    is_causal: bool = False
    mask: Mask | None = None
    dropout: float = 0.0
    requires_grad: bool = False
    """Whether grad mode is on and query, key or value requires a gradient."""
    last_stride: int = 1
    batch_stride_zero: bool = False
    storage_offset_bytes: int = 0
    """The storage offset of query, key and value, in bytes."""
    deterministic: str = "off"
    """The mode of torch.use_deterministic_algorithms: `off`, `error` or `warn_only`."""
    enabled: frozenset[str] = frozenset(SDPA_BACKENDS)
    """The backends whose runtime flag is on."""
    priority: tuple[str, ...] = ()
    """The backends that the caller put first (`set_priority=True`), in order."""
    flash_impl: str = "FA2"
    """The active version of FlashAttention: `FA2`, `FA3` or `FA4`."""
    outside: str | None = None
    """Why no call of `scaled_dot_product_attention` computes the config, or None if a call does."""

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def value_heads(self) -> int:
        return self.kv_heads if self.kv_heads_v is None else self.kv_heads_v

    @property
    def key_batch(self) -> int:
        return self.batch if self.batch_kv is None else self.batch_kv

    @property
    def same_heads(self) -> bool:
        return self.heads == self.kv_heads == self.value_heads

    @property
    def query_sizes(self) -> list[int]:
        return [self.batch, self.heads, self.seq_q, self.head_dim]

    @property
    def key_sizes(self) -> list[int]:
        return [self.key_batch, self.kv_heads, self.seq_kv, self.head_dim]

    @property
    def value_sizes(self) -> list[int]:
        return [self.key_batch, self.value_heads, self.seq_kv, self.value_dim]


def from_config(config: Config, device: str = CUDA) -> AttentionParams:
    """Return the parameters of the call that the worker makes for a config on `cuda` or `cpu`, with
    default flags. A window is passed as a mask.
    """
    config = config.sdpa_call()
    dtype = str(config.resolve(device).dtype)
    mask = None
    if config.mask != "none":
        kind = "bool" if config.mask.startswith("bool") else "float"
        last = config.mask_strides[-1] if config.mask_strides else 1
        mask = Mask(config.mask_dims, kind, config.mask == "float_grad", last)
    strides = [given for given in (config.q_strides, config.k_strides, config.v_strides) if given]
    return AttentionParams(
        batch=config.batch,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        seq_q=config.seq_len_q,
        seq_kv=config.seq_len_kv,
        head_dim=config.head_dim,
        batch_kv=config.kv_batch,
        head_dim_v=config.head_dim_v,
        dtype=dtype,
        device=device,
        enable_gqa=config.num_kv_heads != config.num_heads,
        is_causal=config.causal,
        mask=mask,
        dropout=config.dropout,
        requires_grad=config.bwd,
        last_stride=max(
            (given[-1] for given in strides), default=2 if config.layout == "strided_last" else 1
        ),
        batch_stride_zero=config.layout == "broadcast_batch"
        or (config.batch > 1 and any(given[0] == 0 for given in strides)),
        storage_offset_bytes=DTYPES[dtype].bytes if config.layout == "offset1" else 0,
        deterministic="error" if config.deterministic else "off",
        outside=outside_sdpa(config),
    )


# the first release in which sdpa_kernel has the parameter set_priority
SETS_PRIORITY: Release = (2, 6)


def permitted(params: AttentionParams, setting: SdpaSetting | None) -> AttentionParams:
    """Return the parameters with only the backends of the setting enabled. If the setting is None,
    return the parameters unchanged.
    """
    if setting is None:
        return params
    priority = setting.backends if setting.ordered else ()
    return replace(params, enabled=frozenset(setting.backends), priority=priority)


def machine_of(environment: Mapping[str, Any]) -> Machine:
    """Return the machine that a recorded environment describes. Invalid values are unknown."""
    try:
        release = parse_release(str(environment.get("torch", "")))
    except UsageError:
        release = (0, 0, 0)
    cuda = _of_kind(environment.get("torch_cuda"), str)
    build = build_of(release, cuda) if cuda else None
    variables: Mapping[str, Any] = _of_kind(environment.get("env"), dict) or {}
    # PyTorch 2.9 and later releases use different variables to lower the priority of cuDNN.
    variable, off = ("TORCH_CUDNN_SDPA_PREFERRED", "0")
    if release >= (2, 10):
        variable, off = ("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    capability = re.fullmatch(r"([0-9]{1,3})\.([0-9]{1,3})", str(environment.get("capability")))
    if (amd := _amd_gpu(environment)) is not None:
        return _amd_machine(release, amd, environment)
    if environment.get("torch_hip") or "rocm" in str(environment.get("torch")):
        return Machine((0, 0, 0))  # a ROCm build whose GPU is unknown has no known rules
    return Machine(
        torch=release,
        capability=(int(capability[1]), int(capability[2])) if capability else (0, 0),
        cudnn=_of_kind(environment.get("cudnn"), int),
        cuda=cuda,
        cudnn_compiled=build.cudnn_compiled if build else None,
        cudnn_preferred=False if variables.get(variable) == off else None,
    )


def _amd_gpu(environment: Mapping[str, Any]) -> rocm.AmdGpu | None:
    """Return the AMD GPU of an environment, or None if the environment names none."""
    given = (environment.get("architecture"), environment.get("gpu"))
    found = (rocm.find_amd_gpu(text) for text in given if isinstance(text, str))
    return next(filter(None, found), None)


def _amd_machine(release: Release, amd: rocm.AmdGpu, environment: Mapping[str, Any]) -> Machine:
    variables: Mapping[str, Any] = _of_kind(environment.get("env"), dict) or {}
    library = environment.get("fa_library")
    if variables.get(rocm.PREFER_CK_VARIABLE) == "1":
        library = rocm.CK
    try:
        aotriton = _of_kind(environment.get("aotriton"), str)
        machine = machine_for(amd.architecture, release, aotriton=aotriton)
    except UsageError:
        machine = machine_for(amd.architecture, release)
    return replace(
        machine,
        fa_library=library if library in rocm.LIBRARIES else rocm.AOTRITON,
        experimental=variables.get(rocm.EXPERIMENTAL_VARIABLE) == "1",
    )


def _of_kind(value: object, kind: type[Value]) -> Value | None:
    return value if isinstance(value, kind) else None


def rules_know(environment: Mapping[str, Any]) -> bool:
    """Return whether the rules cover the environment's release, device and capability."""
    machine, device = machine_of(environment), environment.get("device_type")
    return machine.known and (device == CPU or (device == CUDA and machine.capability != (0, 0)))


def with_flags(environment: Mapping[str, Any]) -> Callable[[AttentionParams], AttentionParams]:
    """Return a function that applies the runtime flags and the FlashAttention version of a recorded
    environment to the parameters of a call.
    """
    on = frozenset(name for name in SDPA_BACKENDS if environment.get(f"sdp_{name}") is not False)
    activated = str(environment.get("flash_attention_impl"))
    impl = activated if activated in ("FA2", "FA3", "FA4") else "FA2"
    return lambda params: replace(params, enabled=on, flash_impl=impl)
