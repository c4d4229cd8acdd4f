"""The registry of backends, and the search for a backend by name. The worker contains the parts
that call torch; `libraries` contains those of other packages.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from profharness.attention.backends.base import (
    Backend,
    GpuBackend,
    check_limits,
    needs_module,
    no_reason,
    outside_contract,
    refuse_if_unloadable,
)
from profharness.attention.backends.libraries import LIBRARY_BACKENDS
from profharness.attention.backends.sources import (
    commit,
    find_implementation,
    fingerprint,
    from_source,
    implementation_names,
)
from profharness.attention.config import ALL_DISABLED, AUTO, SdpaSetting, sdpa_setting
from profharness.device_types import CUDA, DEVICE_TYPES
from profharness.dtypes import HALF
from profharness.errors import UsageError
from profharness.rows import NAIVE_COMPILED

ALL = "all"
KERNELS = "kernels"
SOURCES_FILE = "sources.json"


def _in_worker(function: str, *arguments: Any) -> Callable[[], Any]:
    """Return a call of a function of worker/attention.py, which imports torch and is loaded on the
    call.
    """

    def call() -> Any:
        module = importlib.import_module("profharness.recording.worker.attention")
        return getattr(module, function)(*arguments)

    return call


def _flash_impl(
    name: str, summary: str, module: str, remedy: str, majors: tuple[int, ...]
) -> Backend:
    return GpuBackend(
        name,
        summary,
        context=_in_worker("activated", name.upper()),
        load=_in_worker("sdpa"),
        supports=check_limits(dtypes=HALF),
        absent=_in_worker("flash_impl_absent", name.upper(), module, remedy, majors),
        isolated=True,
    )


_ALL_DEVICES = tuple(DEVICE_TYPES)


def _only(*names: str, ordered: bool = False) -> Callable[[], Any]:
    return _in_worker("only", SdpaSetting(names, ordered))


SDPA_ROWS = (
    Backend(AUTO, "PyTorch's own choice, all flags as they are", _ALL_DEVICES),
    Backend(
        "flash",
        "FlashAttention (FA2 built into PyTorch, or an activated FA3/FA4)",
        _ALL_DEVICES,
        _only("flash"),
    ),
    Backend("efficient", "memory-efficient attention (CUTLASS)", (CUDA,), _only("efficient")),
    Backend("cudnn", "cuDNN's fused attention", (CUDA,), _only("cudnn")),
    Backend("math", "matmul, softmax, matmul as separate ATen ops", _ALL_DEVICES, _only("math")),
    Backend(
        ALL_DISABLED,
        "legacy sdp_kernel with flash, math and efficient off: leaves cuDNN on",
        _ALL_DEVICES,
        _in_worker("legacy_all_disabled"),
    ),
)
DEFAULT_BACKENDS = {
    device: tuple(
        backend.name
        for backend in SDPA_ROWS
        if device in backend.devices and backend.name != ALL_DISABLED
    )
    for device in DEVICE_TYPES
}
"""Backends of a run without --backend, by the type of its device."""
TORCH_ROWS = (
    # On a CPU Inductor could write C++ for flex: no Triton kernel, half a minute to compile, no
    # backward. Uncompiled it is no fused kernel at all. Neither is what is asked for.
    GpuBackend(
        "flex",
        "flex_attention under torch.compile (Triton); causal as a block mask",
        load=refuse_if_unloadable("flex_attention", _in_worker("flex", None)),
        supports=outside_contract,
        absent=needs_module("triton", "pip install triton"),
    ),
    GpuBackend(
        "flex-flash",
        "flex_attention with kernel_options BACKEND FLASH (FA4 kernels)",
        load=refuse_if_unloadable("flex_attention", _in_worker("flex", {"BACKEND": "FLASH"})),
        supports=check_limits(dtypes=HALF),
        absent=_in_worker("flex_flash_absent"),
        packages=("flash-attn-4",),
        isolated=True,
    ),
    GpuBackend(
        "varlen",
        "torch.nn.attention.varlen; packs the inputs, a copy unless layout=bshd",
        load=_in_worker("varlen"),
        supports=check_limits(
            dtypes=HALF, square_causal=True, same_head_dim=True, max_head_dim=256
        ),
        absent=_in_worker("varlen_absent"),
    ),
    _flash_impl(
        "fa3",
        "SDPA with FlashAttention-3 in place of FA2",
        "flash_attn_interface",
        "build it from the folder hopper of flash-attention",
        (9,),
    ),
    _flash_impl(
        "fa4",
        "SDPA with FlashAttention-4 in place of FA2",
        "flash_attn.cute",
        "pip install flash-attn-4",
        (9, 10),
    ),
    # On a CPU Inductor writes C++: other kernels than those asked for, as for flex above.
    GpuBackend(
        NAIVE_COMPILED,
        "torch.compile of kernels/naive.py, which Inductor may replace by SDPA",
        load=refuse_if_unloadable(NAIVE_COMPILED, _in_worker("naive_compiled")),
        supports=outside_contract,
        absent=_in_worker("naive_compiled_absent"),
        isolated=True,
    ),
)
BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (*SDPA_ROWS, *TORCH_ROWS, *LIBRARY_BACKENDS)
}


def expand_backends(named: Sequence[str], default: Sequence[str]) -> list[str]:
    """Return the named backends without duplicates. `all` stands for PyTorch's own backends on the
    device, `kernels` for every implementation in `kernels/` folders and entry points. Raise
    UsageError for unknown names.
    """
    names: dict[str, None] = {}
    for name in named:
        if name == KERNELS:
            # the file, where the registry has another backend of that name
            names |= dict.fromkeys(
                f"{KERNELS}/{own}.py" if own in BACKENDS else own for own in implementation_names()
            )
        else:
            names |= dict.fromkeys(default if name == ALL else (name,))
    if named and not names:
        raise UsageError(
            f"--backend {','.join(named)} stands for nothing: there is no implementation in "
            "kernels/; `profharness new-kernel NAME` writes one"
        )
    return list(names)


def find_backend(text: str, sources: Mapping[str, str] | None = None) -> Backend:
    """Find a backend by name: a known source, the registry, a set or an order of SDPA's backends,
    `kernels/NAME.py`, an entry point, `file.py:function` or `package.module:function`. Raise
    UsageError that lists the known ones.
    """
    # first: a worker takes the file that its run was planned with
    if sources and text in sources:
        return from_source(text, sources[text])
    if text in BACKENDS:
        return BACKENDS[text]
    if (setting := sdpa_setting(text)) is not None:
        return _of_setting(setting)
    backend = find_implementation(text)
    if backend is None:
        names = ", ".join(dict.fromkeys([*BACKENDS, *implementation_names()]))
        raise UsageError(
            f"no backend {text!r}; known are {names}; a set such as flash+math; one of your own is "
            f"kernels/{text}.py, or given as file.py:function or package.module:function"
        )
    return backend


def _of_setting(setting: SdpaSetting) -> Backend:
    """Return SDPA with several of its backends permitted, or tried in an order."""
    names = list(setting.backends)
    summary = f"PyTorch's choice among {' and '.join(names)}"
    if setting.ordered:
        summary = f"the first of {', then '.join(names)} that takes the config"
    absent = _in_worker("priority_absent") if setting.ordered else no_reason
    context = _only(*names, ordered=setting.ordered)
    return Backend(setting.name, summary, _ALL_DEVICES, context, absent=absent)


def find_backends(texts: Iterable[str]) -> dict[str, Backend]:
    """Return the backends by name, in that order. Raise UsageError if two of them have the same
    name.
    """
    backends: dict[str, Backend] = {}
    for backend in map(find_backend, texts):
        first = backends.setdefault(backend.name, backend)
        if first.source != backend.source:
            raise UsageError(
                f"two backends would be called {backend.name!r} ({first.source} and "
                f"{backend.source}); rename one, or give their paths below the working directory"
            )
    return backends


def stored_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of backends in cells. `all` means no filter, and a file has its reduced
    name.
    """
    reduced = []
    for name in () if ALL in names else names:
        try:
            reduced.append(find_backend(name).name)
        except UsageError:
            reduced.append(name)  # of another machine, perhaps; the store knows
    return tuple(reduced)


def fingerprints(backends: Iterable[Backend]) -> dict[str, str]:
    """Return the code version of each backend that has one: `sha256:…` of a file, or a package's
    version.
    """
    versions = {backend.name: fingerprint(backend) for backend in backends}
    return {name: version for name, version in versions.items() if version is not None}


def commits(backends: Iterable[Backend]) -> dict[str, str]:
    """Return the git commit of each backend whose file is in a git work tree."""
    hashes = {backend.name: commit(backend.file) for backend in backends if backend.file}
    return {name: text for name, text in hashes.items() if text is not None}


def write_sources(folder: Path, backends: Iterable[Backend]) -> None:
    """Write the paths of implementations into a run folder for its worker. They are not in run.json
    because they belong to this machine.
    """
    sources = {backend.name: backend.source for backend in backends if backend.source}
    if sources:
        (folder / SOURCES_FILE).write_bytes(msgspec.json.encode(sources))


def read_sources(folder: Path) -> dict[str, str]:
    """Read the file of `write_sources`. Empty if it is missing."""
    try:
        return msgspec.json.decode((folder / SOURCES_FILE).read_bytes(), type=dict[str, str])
    # none was written where all backends are built in
    except FileNotFoundError:
        return {}
