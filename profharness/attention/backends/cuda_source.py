"""Compile CUDA sources at run time with NVRTC, which needs no ATen, linker or host compiler.

A cache contains one cubin file for each combination of source, options and architecture. The
program cache of cuda.core is not used because it cannot store name expressions and does not track
included files.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import stat
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from profharness.attention.backends.base import ImplementationError, RefusedError
from profharness.attention.backends.cuda_launch import CompiledSource, CudaKernel, load_kernel
from profharness.attention.backends.sources import SOURCE_BYTES, hash_of, local_files
from profharness.errors import UsageError, install_command
from profharness.files import atomic_file, read_input

LOG = logging.getLogger(__name__)
REMEDY = install_command("kernels")
# With these options, NVRTC reads other files, so the result is not cached.
UNCACHED = ("include_path", "pre_include", "pch", "create_pch", "use_pch")
MAGIC = b"profharness-2"


class CompileError(ImplementationError):
    """Raised if a CUDA source does not compile.

    The text of the exception is the output of the compiler, which names files and lines.
    """


class CudaSource:
    """A CUDA source, which is a `.cu` file or text in a Python file. Creating a CudaSource imports
    and compiles nothing.

    If `text` is a string literal in the Python file `path`, error messages contain line numbers of
    this Python file. `options` are options of cuda.core's ProgramOptions, such as
    `{"max_register_count": 128}` or `{"define_macro": [("TILE", "64")]}`. The default options are
    -std=c++17 and -lineinfo. The source can include files in its folder as `"name.cuh"`. Loaded
    kernels stay loaded, so an edit of the source takes effect in the next process.
    """

    def __init__(
        self, path: Path, options: Mapping[str, Any] | None = None, *, text: str | None = None
    ) -> None:
        # -lineinfo stores the path, and ncu opens the source by this path, so it must be absolute.
        self.path = Path(path).resolve()
        self._given = text
        self._options: dict[str, Any] = {"std": "c++17", "lineinfo": True, **(options or {})}
        self._kernels: dict[tuple[int, str, int, int], CudaKernel] = {}

    def cubin(self, names: Sequence[str], arch: str) -> CompiledSource:
        """Compile kernels for an architecture such as `sm_90a`, or read the kernels from the cache.

        No GPU and no driver are needed.

        `names` are C++ name expressions (`tile<float, 64>`) or names of `extern "C"` kernels. Raise
        CompileError, which contains the output of the compiler, if the source does not compile.
        Raise RefusedError (`absent`) if cuda-core or NVRTC is not installed.
        """
        version = nvrtc_version()
        try:
            files, complete = local_files(self.path, self._text())
        except OSError as error:
            raise CompileError(f"cannot read {self.path.name}: {error.strerror}") from None
        if not complete or any(self._options.get(name) for name in UNCACHED):
            LOG.debug("%s may include unknown files, so it is not cached", self.path.name)
            return self._compile(files[self.path], names, arch, version)
        # The order of includes and options must not change the key. The key depends on the paths,
        # because the line information in a cubin contains them.
        options = (f"{name}={value!r}" for name, value in sorted(self._options.items()))
        texts = [arch, version, *names, *options]
        contents = [part for path in sorted(files) for part in (os.fsencode(path), files[path])]
        key = hash_of([MAGIC, *(text.encode() for text in texts), *contents])[:32]
        stem = f"{self.path.stem}-{arch}-{key}.cubin"
        path = cache_folder() / stem
        distrust = distrust_reason(path)
        if distrust is not None:
            LOG.warning("%s; ignoring the cached file and compiling the source again", distrust)
        cached = read_cached(path) if distrust is None else None
        if cached is not None:
            LOG.debug("read %s for %s from %s", ", ".join(names), arch, path)
            return cached
        compiled = self._compile(files[self.path], names, arch, version)
        if not write_cached(path, compiled):
            LOG.debug(
                "cannot write to %s; the next process will compile the source again", path.parent
            )
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
        # the file does not contain the text if the text was generated or contains escapes
        if at < 0:
            return text
        line = content[:at].count(b"\n") + 1
        return f'#line {line} "{self.path}"\n'.encode() + text

    def _compile(
        self, text: bytes, names: Sequence[str], arch: str, version: str
    ) -> CompiledSource:
        try:
            from cuda.core import Program, ProgramOptions
        except ImportError as error:
            missing = f"CUDA sources need the cuda-core package ({REMEDY})"
            raise RefusedError("absent", missing) from error
        begin = time.perf_counter()
        log = io.StringIO()
        more = self._options.get("include_path") or ()
        folders = [str(self.path.parent), *([more] if isinstance(more, str) else more)]
        given = {**self._options, "name": str(self.path), "arch": arch, "include_path": folders}
        try:
            program = Program(text.decode(errors="replace"), "c++", ProgramOptions(**given))
            try:
                code = program.compile("cubin", name_expressions=tuple(names), logs=log)
            finally:
                program.close()
        except Exception as error:  # cuda.core's exception types are private
            output = str(error).split("compilation log:", 1)[-1].replace("\0", "").strip()
            output = output.replace(f"{self.path.parent}{os.sep}", "")
            raise CompileError(
                f"{self.path.name} does not compile for {arch}:\n{output}"
            ) from error
        LOG.debug(
            "compiled %s from %s for %s with NVRTC %s in %.2f s %s",
            ", ".join(names), self.path, arch, version, time.perf_counter() - begin, log.getvalue(),
        )  # fmt: skip
        # cuda.core returns a mangled name either as bytes or as str
        mangled = {name: code.symbol_mapping[name] for name in names}
        texts = {
            name: symbol.decode() if isinstance(symbol, bytes) else symbol
            for name, symbol in mangled.items()
        }
        return CompiledSource(bytes(code.code), texts, arch, version)


def architecture(major: int, minor: int) -> str:
    """Return NVRTC's name of an architecture, such as `sm_80`. For capability 9.0, return `sm_90a`,
    because the wgmma instructions need the suffix `a`.
    """
    return "sm_90a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"


def nvrtc_version() -> str:
    """Return the version of NVRTC, such as `13.0`. Raise RefusedError (`absent`) if NVRTC cannot be
    loaded.
    """
    try:
        from cuda.bindings import nvrtc

        status, major, minor = nvrtc.nvrtcVersion()
    except ImportError as error:
        text = f"CUDA sources need the cuda-bindings package ({REMEDY})"
        raise RefusedError("absent", text) from error
    except Exception as error:
        text = f"CUDA sources need NVRTC, which cannot be loaded ({REMEDY}): {error}"
        raise RefusedError("absent", text) from error
    if int(status):
        raise RefusedError("absent", f"NVRTC does not report its version: {status.name} ({REMEDY})")
    return f"{major}.{minor}"


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "profharness" / "cuda"


def distrust_reason(path: Path) -> str | None:
    """Return why another user may have written a cache file, judging by the owner and the mode of
    the file and of its folder. Return None if only this user can write the file, or if the file
    does not exist.
    """
    for each in (path.parent, path):
        try:
            # Use lstat to detect a symbolic link, because the owner of a link can change its
            # target.
            state = each.lstat()
        except OSError:
            return None
        if state.st_uid != os.geteuid():
            return f"{each} belongs to another user"
        if stat.S_ISLNK(state.st_mode) or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"{each} is a symbolic link, or other users can write to it"
    return None


def write_cached(path: Path, compiled: CompiledSource) -> bool:
    """Write a cache file atomically in a folder that only this user can access.

    Return False if the folder is not writable or belongs to another user. The file contains the
    cubin, the names and versions as JSON, the length of the JSON, a hash of these parts, and MAGIC.
    The cubin comes first, so that cuobjdump and nvdisasm can read the file.
    """
    facts = msgspec.json.encode([dict(compiled.names), compiled.arch, compiled.nvrtc])
    content = compiled.cubin + facts + len(facts).to_bytes(8, "little")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.parent.stat().st_uid != os.geteuid():
            return False
        # mkdir does not change the mode of an existing folder.
        path.parent.chmod(0o700)
        with atomic_file(path, force=True) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(content + hashlib.sha256(content).digest() + MAGIC)
    except (OSError, UsageError):
        return False
    return True


def read_cached(path: Path) -> CompiledSource | None:
    """Read a file that `write_cached` wrote. Return None if the file is missing, unreadable or
    damaged.
    """
    try:
        hashed = read_input(path).removesuffix(MAGIC)
    except OSError:
        return None
    content, digest = hashed[:-32], hashed[-32:]
    if hashlib.sha256(content).digest() != digest:
        return None
    at = len(content) - 8 - int.from_bytes(content[-8:], "little")
    names, arch, nvrtc = msgspec.json.decode(content[at:-8])
    return CompiledSource(content[:at], names, arch, nvrtc, from_cache=True)
