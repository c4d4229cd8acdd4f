"""What can compute attention, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from profharness.backends.base import Backend
from profharness.backends.registry import LIBRARY_BACKENDS, SDPA_BACKENDS, TORCH_BACKENDS
from profharness.backends.sources import (
    find_implementation,
    fingerprint,
    from_source,
    implementation_names,
)
from profharness.errors import UsageError

BACKENDS: dict[str, Backend] = {
    backend.name: backend for backend in (*SDPA_BACKENDS, *TORCH_BACKENDS, *LIBRARY_BACKENDS)
}
DEFAULT_BACKENDS = ("auto", "flash", "efficient", "cudnn", "math")
CPU_BACKENDS = ("auto", "flash", "math")
ALL = "all"
KERNELS = "kernels"
SOURCES_FILE = "sources.json"


def expand_backends(named: Sequence[str], default: Sequence[str]) -> list[str]:
    """The named backends, each once. `all` stands for the default ones, PyTorch's own on the device;
    `kernels` for every implementation that `kernels/` folders and entry points offer. Raises
    UsageError for names that stand for nothing.
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
    """The backend of that name: a known source, the registry, `kernels/NAME.py`, an entry point; or
    of `file.py:function` or `package.module:function`. Raises UsageError listing the known ones.
    """
    if sources and text in sources:
        return from_source(text, sources[text])
    if text in BACKENDS:
        return BACKENDS[text]
    backend = find_implementation(text)
    if backend is None:
        names = ", ".join(dict.fromkeys([*BACKENDS, *implementation_names()]))
        raise UsageError(
            f"no backend {text!r}; known are {names}; one of your own is kernels/{text}.py, "
            "or given as file.py:function or package.module:function"
        )
    return backend


def find_backends(texts: Iterable[str]) -> dict[str, Backend]:
    """The backends by name, in that order. Raises UsageError if two of them would have one name."""
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
    """Backends as cells name them: `all` means no filter, a file is known by its reduced name."""
    reduced = []
    for name in () if ALL in names else names:
        try:
            reduced.append(find_backend(name).name)
        except UsageError:
            reduced.append(name)  # of another machine, perhaps; the store knows
    return tuple(reduced)


def fingerprints(backends: Iterable[Backend]) -> dict[str, str]:
    """Name to code version of each backend that has one: `sha256:…` of a file, or a package's."""
    versions = {backend.name: fingerprint(backend) for backend in backends}
    return {name: version for name, version in versions.items() if version is not None}


def write_sources(folder: Path, backends: Iterable[Backend]) -> None:
    """Leave in a run folder where its worker finds implementations. Not in run.json: these are
    paths of this machine.
    """
    sources = {backend.name: backend.source for backend in backends if backend.source}
    if sources:
        (folder / SOURCES_FILE).write_bytes(msgspec.json.encode(sources))


def read_sources(folder: Path) -> dict[str, str]:
    """What `write_sources` left, or nothing."""
    try:
        return msgspec.json.decode((folder / SOURCES_FILE).read_bytes(), type=dict[str, str])
    except FileNotFoundError:
        return {}
