"""The registry of backends, and the search for a backend by name.

Backend code that calls torch is in the worker. Backend code that calls other packages is in
`libraries`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from profharness.attention.backends.base import (
    WINDOW,
    Backend,
    GpuBackend,
    check_limits,
    needs_module,
    no_reason,
    outside_contract,
    refuse_if_unloadable,
    takes_window,
)
from profharness.attention.backends.libraries import LIBRARY_BACKENDS
from profharness.attention.backends.serving import SERVING_BACKENDS
from profharness.attention.backends.sources import (
    OPTIONAL,
    commit,
    find_implementation,
    fingerprint,
    from_source,
    implementation_names,
)
from profharness.attention.config import ALL_DISABLED, AUTO, SdpaSetting, sdpa_setting
from profharness.device_types import CUDA, DEVICE_TYPES
from profharness.dtypes import HALF
from profharness.errors import UsageError, did_you_mean, near_names
from profharness.rows import NAIVE_COMPILED

ALL = "all"
KERNELS = "kernels"
SOURCES_FILE = "sources.json"


def _in_worker(function: str, *arguments: Any) -> Callable[[], Any]:
    """Return a function that calls `function` in worker/attention.py.

    That module imports torch, so the module is imported only when the returned function is called.
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


def _only(name: str) -> Callable[[], Any]:
    return _in_worker("only", SdpaSetting((name,)))


_ALL_DEVICES = tuple(DEVICE_TYPES)
SDPA_ROWS = (
    Backend(AUTO, "the backend that PyTorch chooses by default", _ALL_DEVICES),
    Backend(
        "flash",
        "FlashAttention: FA3 or FA4 if activated, otherwise the FA2 built into PyTorch",
        _ALL_DEVICES,
        _only("flash"),
    ),
    Backend("efficient", "memory-efficient attention (CUTLASS)", (CUDA,), _only("efficient")),
    Backend("cudnn", "cuDNN's fused attention", (CUDA,), _only("cudnn")),
    Backend("math", "matmul, softmax and matmul as separate ATen ops", _ALL_DEVICES, _only("math")),
    Backend(
        ALL_DISABLED,
        "the legacy sdp_kernel with flash, math and efficient turned off and cuDNN left on",
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
"""For each type of device, the backends that a run uses if --backend is not given."""
TORCH_ROWS = (
    # flex is limited to GPUs, because its users expect a fused Triton kernel. On a CPU, Inductor
    # would generate C++, which takes half a minute to compile and has no backward pass. Without
    # compilation, flex is not fused.
    GpuBackend(
        "flex",
        "flex_attention under torch.compile (Triton), with causal and window masks passed as a "
        "block mask",
        load=refuse_if_unloadable("flex_attention", _in_worker("flex", None)),
        supports=functools.partial(outside_contract, takes=OPTIONAL),
        absent=needs_module("triton", "pip install triton"),
    ),
    GpuBackend(
        "flex-flash",
        "flex_attention with the kernel option BACKEND=FLASH (FA4 kernels)",
        load=refuse_if_unloadable("flex_attention", _in_worker("flex", {"BACKEND": "FLASH"})),
        supports=check_limits(dtypes=HALF, takes=WINDOW),
        absent=_in_worker("flex_flash_absent"),
        packages=("flash-attn-4",),
        isolated=True,
    ),
    GpuBackend(
        "varlen",
        "torch.nn.attention.varlen on packed inputs (packing copies them, unless layout=bshd)",
        load=_in_worker("varlen"),
        supports=check_limits(
            dtypes=HALF, takes=WINDOW, square_causal=True, same_head_dim=True, max_head_dim=256
        ),
        absent=_in_worker("varlen_absent"),
    ),
    _flash_impl(
        "fa3",
        "SDPA with FlashAttention-3 in place of FA2",
        "flash_attn_interface",
        "build FlashAttention-3 from flash-attention's hopper folder",
        (9,),
    ),
    _flash_impl(
        "fa4",
        "SDPA with FlashAttention-4 in place of FA2",
        "flash_attn.cute",
        "pip install flash-attn-4",
        (9, 10),
    ),
    # This backend is limited to GPUs, because its users expect Triton kernels. On a CPU, Inductor
    # would generate C++.
    GpuBackend(
        NAIVE_COMPILED,
        "kernels/naive.py under torch.compile, where Inductor may replace it with SDPA",
        load=refuse_if_unloadable(NAIVE_COMPILED, _in_worker("naive_compiled")),
        supports=takes_window,
        absent=_in_worker("naive_compiled_absent"),
        isolated=True,
    ),
)
BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (*SDPA_ROWS, *TORCH_ROWS, *LIBRARY_BACKENDS, *SERVING_BACKENDS)
}


def expand_backends(named: Sequence[str], default: Sequence[str]) -> list[str]:
    """Return the named backends without duplicates. Raise UsageError for unknown names.

    `all` stands for PyTorch's own backends on the device, and `kernels` for every implementation in
    `kernels/` folders and entry points.
    """
    names: dict[str, None] = {}
    for name in named:
        if name == KERNELS:
            # use the path of the file if the registry has another backend with that name
            names |= dict.fromkeys(
                f"{KERNELS}/{own}.py" if own in BACKENDS else own for own in implementation_names()
            )
        else:
            names |= dict.fromkeys(default if name == ALL else (name,))
    if named and not names:
        raise UsageError(
            f"--backend {','.join(named)} selects nothing: kernels/ contains no implementation; "
            "`profharness new-kernel NAME` creates one"
        )
    return list(names)


def find_backend(
    text: str, sources: Mapping[str, str] | None = None, *, stored: Iterable[str] = ()
) -> Backend:
    """Find a backend by its name. Raise UsageError, which lists the known names, if there is no
    such backend.

    The name can be a key of `sources`, a name in the registry, a set or an order of SDPA's
    backends, `kernels/NAME.py`, an entry point, `file.py:function` or `package.module:function`.
    The error also suggests the names of `stored` backends.
    """
    # check the sources first, so that a worker uses the file for which the run was planned
    if sources and text in sources:
        return from_source(text, sources[text])
    if text in BACKENDS:
        return BACKENDS[text]
    if (setting := sdpa_setting(text)) is not None:
        return _of_setting(setting)
    backend = find_implementation(text)
    if backend is None:
        known = list(dict.fromkeys([*BACKENDS, *implementation_names(), *stored]))
        if near := near_names(text, known):
            raise UsageError(
                f"unknown backend {text!r}; {did_you_mean(near)} `profharness backends` lists all "
                "backends"
            )
        raise UsageError(
            f"unknown backend {text!r}; choose from {', '.join(known)}, or join SDPA's backends, as in "
            f"flash+math. To use your own implementation, give kernels/{text}.py, "
            "file.py:function or package.module:function"
        )
    return backend


def _of_setting(setting: SdpaSetting) -> Backend:
    names = setting.backends
    summary = f"PyTorch's choice among {' and '.join(names)}"
    if setting.ordered:
        summary = f"the first backend that supports the config, in the order {', '.join(names)}"
    absent = _in_worker("priority_absent") if setting.ordered else no_reason
    context = _in_worker("only", setting)
    return Backend(setting.name, summary, _ALL_DEVICES, context, absent=absent)


def find_backends(texts: Iterable[str]) -> dict[str, Backend]:
    """Return the backends by name, in the order of `texts`. Raise UsageError if two different
    backends have the same name.
    """
    backends: dict[str, Backend] = {}
    for backend in map(find_backend, texts):
        first = backends.setdefault(backend.name, backend)
        if first.source != backend.source:
            raise UsageError(
                f"two backends have the name {backend.name!r} ({first.source} and {backend.source}); "
                "rename one, or use relative paths below the working directory"
            )
    return backends


def check_names(named: Iterable[str]) -> None:
    """Raise UsageError if a value of `--backend` is not a backend, `all` or `kernels`."""
    find_backends(name for name in named if name not in (ALL, KERNELS))


def stored_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names that stored cells of these backends have. For example, cells contain a
    shortened file name.

    If `all` is among the names, return an empty tuple, which selects the cells of all backends.
    """
    reduced = []
    for name in () if ALL in names else names:
        try:
            reduced.append(find_backend(name).name)
        except UsageError:
            # the backend may exist only on another machine, so keep its name and let the store look
            # for it
            reduced.append(name)
    return tuple(reduced)


def fingerprints(backends: Iterable[Backend]) -> dict[str, str]:
    """Return the code version of each backend, such as `sha256:…` or `flash-attn 2.8.3`. Backends
    whose version is unknown are left out.
    """
    versions = {backend.name: fingerprint(backend) for backend in backends}
    return {name: version for name, version in versions.items() if version is not None}


def commits(backends: Iterable[Backend]) -> dict[str, str]:
    """Return the git commit of each backend whose file is in a git work tree."""
    hashes = {backend.name: commit(backend.file) for backend in backends if backend.file}
    return {name: text for name, text in hashes.items() if text is not None}


def write_sources(folder: Path, backends: Iterable[Backend]) -> None:
    """Write the paths of implementations to a file in a run folder, where the worker reads the
    paths. The paths are not part of run.json because the paths are valid only on this machine.
    """
    sources = {backend.name: backend.source for backend in backends if backend.source}
    if sources:
        (folder / SOURCES_FILE).write_bytes(msgspec.json.encode(sources))


def read_sources(folder: Path) -> dict[str, str]:
    """Return the paths that `write_sources` wrote to a run folder, by backend."""
    try:
        return msgspec.json.decode((folder / SOURCES_FILE).read_bytes(), type=dict[str, str])
    except FileNotFoundError:  # the run uses only built-in backends
        return {}
