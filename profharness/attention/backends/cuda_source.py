"""Compile CUDA sources at run time with NVRTC. This needs neither ATen nor a link step nor a host
compiler.
"""

from __future__ import annotations

import io
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from profharness.attention.backends.base import ImplementationError, RefusedError
from profharness.attention.backends.cubin_cache import (
    SOURCE_BYTES,
    CompiledSource,
    cache_folder,
    cache_key,
    distrust_reason,
    local_files,
    read_cached,
    write_cached,
)
from profharness.attention.backends.cuda_launch import CudaKernel, load_kernel
from profharness.errors import install_command
from profharness.files import read_input

__all__ = ["CompileError", "CompiledSource", "CudaSource"]

LOG = logging.getLogger(__name__)
REMEDY = install_command("kernels")
# options of NVRTC that read or write precompiled headers
PRECOMPILED = ("pch", "create_pch", "use_pch")
LOG_MARK = "compilation log:"


class CompileError(ImplementationError):
    """A CUDA source does not compile. The text of the exception is the output of the compiler,
    which contains files and lines.
    """


class CudaSource:
    """A CUDA source, which is a `.cu` file or text in a Python file. Creating a CudaSource imports
    and compiles nothing.

    If `text` is a string literal in the Python file `path`, error messages contain the lines of
    that file. `options` are options of cuda.core's ProgramOptions, such as `{"max_register_count":
    128}` or `{"define_macro": [("TILE", "64")]}`. The default options are -std=c++17 and -lineinfo.
    The source can include files in its folder as `"name.cuh"`. Loaded kernels stay loaded, so an
    edit of the source takes effect in the next process.
    """

    def __init__(
        self, path: Path, options: Mapping[str, Any] | None = None, *, text: str | None = None
    ) -> None:
        # The path must be absolute, because -lineinfo stores it and ncu opens the source with it.
        self.path = Path(path).resolve()
        self._given = text
        self._options: dict[str, Any] = {"std": "c++17", "lineinfo": True, **(options or {})}
        self._kernels: dict[tuple[int, str, int, int], CudaKernel] = {}

    def cubin(self, names: Sequence[str], arch: str) -> CompiledSource:
        """Compile kernels for an architecture such as `sm_90a`, or read them from the cache. This
        needs neither a GPU nor a driver.

        `names` are C++ name expressions (`tile<float, 64>`) or names of `extern "C"` kernels. Raise
        CompileError, which contains the output of the compiler, if the source does not compile.
        Raise RefusedError (`absent`) if cuda-core or NVRTC is not installed.
        """
        version = nvrtc_version()
        try:
            folders = [Path(each).absolute() for each in _texts(self._options.get("include_path"))]
            before = _texts(self._options.get("pre_include"))
            files, complete = local_files(self.path, self._text(), folders, before)
        except OSError as error:
            raise CompileError(f"{self.path.name} cannot be read: {error.strerror}") from None
        if not complete or any(self._options.get(name) for name in PRECOMPILED):
            LOG.debug("%s includes files that are not known, so it is not cached", self.path.name)
            return self._compile(files[self.path], names, arch, version)
        # The order of the options must not change the cache key.
        parts = [
            arch,
            version,
            *names,
            *map(str, folders),
            *(f"{k}={v!r}" for k, v in sorted(self._options.items())),
        ]
        stem = f"{self.path.stem}-{arch}-{cache_key(files, parts)}.cubin"
        place = cache_folder() / stem
        distrust = distrust_reason(place)
        if distrust is not None:
            LOG.warning("%s; the cached file is ignored and the source compiled again", distrust)
        cached = read_cached(place) if distrust is None else None
        if cached is not None:
            LOG.debug("%s for %s read from %s", ", ".join(names), arch, place)
            return cached
        compiled = self._compile(files[self.path], names, arch, version)
        if not write_cached(place, compiled):
            LOG.debug("%s cannot be written to; the next process compiles again", place.parent)
        return compiled

    def kernel(self, name: str, *, shared_bytes: int = 0, cluster: int = 1) -> CudaKernel:
        """Compile and load a kernel for torch's current device. Later calls return the same object.

        `shared_bytes` is the size of the dynamic shared memory of every launch. Clusters have
        (cluster, 1, 1) blocks, unless a launch specifies another size. Raise the same errors as
        `cubin`, and LaunchError if the device refuses the kernel.
        """
        import torch

        if not torch.cuda.is_available():
            raise RefusedError("absent", f"{self.path.name} needs an NVIDIA GPU to run")
        device = torch.cuda.current_device()
        key = (device, name, shared_bytes, cluster)
        kernel = self._kernels.get(key)
        if kernel is None:
            compiled = self.cubin([name], architecture(*torch.cuda.get_device_capability(device)))
            kernel = load_kernel(compiled, name, device, shared_bytes, cluster)
            self._kernels[key] = kernel
        return kernel

    def _text(self) -> bytes:
        content = read_input(self.path, limit=SOURCE_BYTES)
        if self._given is None:
            return content
        text = self._given.encode()
        at = content.find(text)
        # the text was generated or contains escapes, so its lines in the file are unknown
        if at < 0:
            return text
        line = content[:at].count(b"\n") + 1
        return f'#line {line} "{self.path}"\n'.encode() + text

    def _compile(
        self, text: bytes, names: Sequence[str], arch: str, version: str
    ) -> CompiledSource:
        program_type, options_type = _compiler()
        folder = str(self.path.parent)
        begin = time.perf_counter()
        log = io.StringIO()
        try:
            folders = [folder, *_texts(self._options.get("include_path"))]
            options = options_type(
                **{**self._options, "name": str(self.path), "arch": arch, "include_path": folders}
            )
            program = program_type(text.decode(errors="replace"), "c++", options)
            try:
                code = program.compile("cubin", name_expressions=tuple(names), logs=log)
            finally:
                program.close()
        except Exception as error:
            # cuda.core's exception types are private.
            raise CompileError(self._explained(str(error), arch)) from error
        LOG.debug(
            "%s compiled from %s for %s by NVRTC %s in %.2f s %s",
            ", ".join(names), self.path, arch, version, time.perf_counter() - begin, log.getvalue(),
        )  # fmt: skip
        mangled = code.symbol_mapping
        return CompiledSource(
            bytes(code.code), {name: _decoded(mangled[name]) for name in names}, arch, version
        )

    def _explained(self, text: str, arch: str) -> str:
        """Return the output of the compiler, with file names relative to the folder of the source."""
        log = text.split(LOG_MARK, 1)[-1].replace("\0", "").strip()
        log = log.replace(f"{self.path.parent}{os.sep}", "")
        return f"{self.path.name} does not compile for {arch}:\n{log}"


def architecture(major: int, minor: int) -> str:
    """Return NVRTC's name of an architecture. This is `sm_90a` for 9.0, because wgmma needs the
    `a`, and `sm_XY` for all others.
    """
    return "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"


def nvrtc_version() -> str:
    """Return the version of NVRTC, such as `13.0`. Raise RefusedError (`absent`) if NVRTC cannot be
    loaded.
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise RefusedError(
            "absent", f"CUDA sources need the package cuda-bindings ({REMEDY})"
        ) from error
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except Exception as error:
        text = f"CUDA sources need NVRTC, which cannot be loaded ({REMEDY}): {error}"
        raise RefusedError("absent", text) from error
    if int(status):
        raise RefusedError("absent", f"NVRTC does not report its version: {status.name} ({REMEDY})")
    return f"{major}.{minor}"


def _compiler() -> tuple[Any, Any]:
    """Return cuda.core's Program and ProgramOptions."""
    try:
        from cuda.core import Program, ProgramOptions
    except ImportError as error:
        text = f"CUDA sources need the package cuda-core ({REMEDY})"
        raise RefusedError("absent", text) from error
    return Program, ProgramOptions


def _texts(option: str | Sequence[str] | None) -> list[str]:
    """Return an option as a list. Its value may be a single text, several texts or None."""
    return [option] if isinstance(option, str) else list(option or ())


def _decoded(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
