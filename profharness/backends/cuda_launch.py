"""Compiled CUDA kernels on a device: loaded into torch's own context, launched on its streams."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import stat
import struct
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from profharness.backends.base import ImplementationError

MAGIC = b"profharness-1"
PORTABLE_CLUSTER = 8
"""Blocks in a cluster that every GPU with clusters takes (CUDA C++ Programming Guide)."""
DEFAULT_SHARED_BYTES = 48 * 1024
"""Dynamic shared memory that a launch may have without asking for more."""
Dim = int | tuple[int, ...]
_SUCCESS = 0
_INVALID_CONTEXT = 201
_STICKY = {700, 702, 714, 715, 716, 717, 718, 719}  # after these all later calls fail too
_MAX_CONFIGS = 256
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.MULTILINE)


@dataclass(frozen=True)
class CompiledSource:
    """A cubin for one architecture. names: each name expression to its mangled name; nvrtc: the
    compiler's version, such as `13.0`; from_cache: nothing was compiled for it.
    """

    cubin: bytes
    names: Mapping[str, str]
    arch: str
    nvrtc: str
    from_cache: bool = False


class _Trailer(msgspec.Struct, frozen=True):
    """What stands behind the cubin in a cache file; sha256 is the cubin's."""

    names: dict[str, str]
    arch: str
    nvrtc: str
    sha256: str


def cache_folder() -> Path:
    """`profharness/cuda` below $XDG_CACHE_HOME, or below `.cache` of the user's folder."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(base) / "profharness" / "cuda"


def local_files(source: Path, text: bytes) -> dict[Path, bytes]:
    """The source, whose content is text, and the content of every file that it includes as `"..."`,
    directly or not.

    A name is looked for beside the including file, then beside the source, as NVRTC does. One that
    is in neither place is left out: the compiler will say so, or a macro hides the include.
    """
    files: dict[Path, bytes] = {}
    todo = [source]
    while todo:
        path = todo.pop()
        if path in files:
            continue
        files[path] = text if path == source else path.read_bytes()
        for name in _INCLUDE.findall(files[path]):
            places = (folder / os.fsdecode(name) for folder in (path.parent, source.parent))
            # one key a file, however its includes spell the way to it
            todo += [Path(os.path.normpath(place)) for place in places if place.is_file()][:1]
    return files


def cache_key(files: Mapping[Path, bytes], parts: Iterable[str]) -> str:
    """32 hex digits of the files, their paths (line information names them) and the parts in order."""
    digest = hashlib.sha256(MAGIC)
    texts = [part.encode() for part in parts]
    # the order of the includes must not change the key
    for path in sorted(files):
        texts += [os.fsencode(path), files[path]]
    for text in texts:
        # the lengths keep `ab`, `c` apart from `a`, `bc`
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()[:32]


def why_not_trusted(path: Path) -> str | None:
    """Why a cache file may be somebody else's: its owner, or who may write to it or its folder. None
    for one that is this user's, and for one that is missing.
    """
    for place in (path.parent, path):
        try:
            # of a link its own owner counts, who may point it elsewhere
            state = place.lstat()
        except OSError:
            return None
        if state.st_uid != os.geteuid():
            return f"{place} belongs to another user"
        if stat.S_ISLNK(state.st_mode) or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"{place} is a link or can be written by others"
    return None


def read_cached(path: Path) -> CompiledSource | None:
    """What `write_cached` left, or None if the file is missing, unreadable or damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    length_at = len(content) - len(MAGIC) - 8
    if length_at < 0 or not content.endswith(MAGIC):
        return None
    trailer_at = length_at - int.from_bytes(content[length_at : length_at + 8], "little")
    if trailer_at < 0:
        return None
    try:
        trailer = msgspec.json.decode(content[trailer_at:length_at], type=_Trailer)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    cubin = content[:trailer_at]
    if hashlib.sha256(cubin).hexdigest() != trailer.sha256:
        return None
    return CompiledSource(cubin, trailer.names, trailer.arch, trailer.nvrtc, from_cache=True)


def write_cached(path: Path, compiled: CompiledSource) -> bool:
    """Write the file whole or not at all, in a folder that is this user's alone; False where the
    folder cannot be written to or belongs to another user. The cubin comes first, so that cuobjdump
    and nvdisasm read the file as it is.
    """
    digest = hashlib.sha256(compiled.cubin).hexdigest()
    names = dict(compiled.names)
    trailer = msgspec.json.encode(_Trailer(names, compiled.arch, compiled.nvrtc, digest))
    content = compiled.cubin + trailer + len(trailer).to_bytes(8, "little") + MAGIC
    temporary = None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.parent.stat().st_uid != os.geteuid():
            return False
        # the folder may be older than this, with another mode
        path.parent.chmod(0o700)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
        return False
    return True


class LaunchError(ImplementationError):
    """A kernel cannot be loaded or launched as asked."""


class Arguments:
    """Kernel arguments of one row of Python types, laid out as C lays out a struct. A buffer may be
    filled again as soon as the launch returned: the driver copies from it.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        formats = "".join(_format(index, arg) for index, arg in enumerate(args))
        self._struct = struct.Struct(f"@{formats}")
        self.sizes = [struct.calcsize(f"@{letter}") for letter in formats]
        # calcsize pads before each member: its end less its size is where it starts
        ends = [struct.calcsize(f"@{formats[: n + 1]}") for n in range(len(formats))]
        self.offsets = [end - size for end, size in zip(ends, self.sizes, strict=True)]
        self._tensors = [hasattr(arg, "data_ptr") for arg in args]
        self._nulls = any(arg is None for arg in args)
        self._free: list[tuple[Any, int, Any]] = []

    def fill(self, args: Sequence[Any]) -> tuple[Any, int, Any]:
        """A buffer with these values: itself, the address of its array of pointers, that array.

        Raises LaunchError for a number that its type cannot hold. Give it back with `release`.
        """
        try:
            buffer = self._free.pop()  # never shared: two threads may launch at once
        except IndexError:
            buffer = self._new_buffer()
        values = [
            arg.data_ptr() if tensor else arg
            for arg, tensor in zip(args, self._tensors, strict=True)
        ]
        if self._nulls:
            values = [0 if value is None else value for value in values]
        try:
            self._struct.pack_into(buffer[0], 0, *values)
        except (struct.error, OverflowError) as error:
            raise LaunchError(
                f"kernel arguments {values}: {error}; an int is passed as int32, wrap larger "
                "ones in numpy.int64"
            ) from None
        return buffer

    def release(self, buffer: tuple[Any, int, Any]) -> None:
        """Allow the buffer to be filled again."""
        self._free.append(buffer)

    def _new_buffer(self) -> tuple[Any, int, Any]:
        storage = ctypes.create_string_buffer(max(self._struct.size, 1) + 16)
        start = ctypes.addressof(storage)
        skip = -start % 16
        places = [start + skip + offset for offset in self.offsets]
        pointers = (ctypes.c_void_p * max(len(places), 1))(*places)
        view = memoryview(storage)[skip:]
        # the array goes along, as the driver gets its bare address
        return view, ctypes.addressof(pointers), pointers


class CudaKernel:
    """A kernel that is loaded on one device; `CudaSource.kernel` makes it."""

    def __init__(
        self, driver: Any, function: Any, name: str, device: int, shared_bytes: int, cluster: int
    ) -> None:
        self.name = name
        self.device = device
        self.shared_bytes = shared_bytes
        self.cluster = cluster
        self._driver = driver
        self._function = function
        self._context = _checked("cuCtxGetCurrent", driver.cuCtxGetCurrent())
        self._stream = _stream_getter()
        self._arguments: dict[tuple[type, ...], Arguments] = {}
        self._configs: dict[tuple[Any, ...], Any] = {}
        attributes = driver.CUfunction_attribute
        self.registers = self._attribute(attributes.CU_FUNC_ATTRIBUTE_NUM_REGS)
        self.local_bytes = self._attribute(attributes.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES)
        self.static_shared_bytes = self._attribute(attributes.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)

    def launch(
        self,
        grid: Dim,
        block: Dim,
        *args: Any,
        cluster: Dim | None = None,
        cooperative: bool = False,
        overlap: bool = False,
    ) -> None:
        """Launch on torch's current stream of the kernel's device. Nothing waits for it.

        grid counts blocks, also with clusters; it must be a multiple of the cluster. cooperative:
        all blocks are resident together, or the launch is refused. overlap: blocks may start while
        the kernel before in the stream ends, so the kernel must wait by itself (griddepcontrol.wait)
        before it reads or writes. A tensor is passed as its pointer, None as a null pointer, bool
        and int as int32, float as float32, numpy scalars as they are. Raises LaunchError if the
        arguments are not those of the kernel, or with the driver's reason.
        """
        types = tuple(map(type, args))
        arguments = self._arguments.get(types) or self._learn(types, args)
        key = (grid, block, cluster, self._stream(self.device), cooperative, overlap)
        config = self._configs.get(key) or self._configured(*key)
        buffer = arguments.fill(args)
        (status,) = self._driver.cuLaunchKernelEx(config, self._function, buffer[1], 0)
        if int(status) == _INVALID_CONTEXT:
            # a thread that has not touched the GPU yet, such as one of autograd's
            self._driver.cuCtxSetCurrent(self._context)
            (status,) = self._driver.cuLaunchKernelEx(config, self._function, buffer[1], 0)
        arguments.release(buffer)
        if int(status) != _SUCCESS:
            what = f"{self.name} with grid {grid}, block {block}, cluster {cluster or self.cluster}"
            raise LaunchError(f"{what}, {self.shared_bytes} B shared: {reason(status)}")

    def max_active_clusters(self, grid: Dim, block: Dim, cluster: Dim) -> int:
        """How many clusters of such a launch can be on the device at once; 0 if none fits."""
        config = self._configured(grid, block, cluster, 0, False, False)
        answer = self._driver.cuOccupancyMaxActiveClusters(self._function, config)
        return int(_checked(f"clusters of {self.name}", answer))

    def blocks_per_sm(self, block: Dim) -> int:
        """How many blocks of that many threads can be on one SM at once."""
        x, y, z = _three(block)
        answer = self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
            self._function, x * y * z, self.shared_bytes
        )
        return int(_checked(f"occupancy of {self.name}", answer))

    def _attribute(self, which: Any) -> int:
        answer = self._driver.cuFuncGetAttribute(which, self._function)
        return int(_checked(f"attributes of {self.name}", answer))

    def _learn(self, types: tuple[type, ...], args: Sequence[Any]) -> Arguments:
        """The layout of a row of types that was not passed before, held against the kernel's."""
        arguments = Arguments(args)
        sizes = self._sizes()
        if sizes is not None and sizes != arguments.sizes:
            raise LaunchError(
                f"{self.name} takes arguments of {sizes} B; the call passes {arguments.sizes} B "
                f"({', '.join(kind.__name__ for kind in types)})"
            )
        self._arguments[types] = arguments
        return arguments

    def _sizes(self) -> list[int] | None:
        """Bytes of each argument of the kernel; None where the driver is older than CUDA 12.4."""
        sizes: list[int] = []
        try:
            while True:
                status, _, size = self._driver.cuFuncGetParamInfo(self._function, len(sizes))
                if int(status) != _SUCCESS:
                    return sizes
                sizes.append(int(size))
        except (AttributeError, RuntimeError):
            return None

    def _configured(
        self,
        grid: Dim,
        block: Dim,
        cluster: Dim | None,
        stream: int,
        cooperative: bool,
        overlap: bool,
    ) -> Any:
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = _three(grid)
        config.blockDimX, config.blockDimY, config.blockDimZ = _three(block)
        config.sharedMemBytes = self.shared_bytes
        config.hStream = stream
        attributes = []

        def attribute(name: str) -> Any:
            made = driver.CUlaunchAttribute()
            made.id = getattr(driver.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
            attributes.append(made)
            return made.value

        dims = _three(self.cluster if cluster is None else cluster)
        if dims != (1, 1, 1):
            size = attribute("CLUSTER_DIMENSION").clusterDim
            size.x, size.y, size.z = dims
        if cooperative:
            attribute("COOPERATIVE").cooperative = 1
        if overlap:
            value = attribute("PROGRAMMATIC_STREAM_SERIALIZATION")
            value.programmaticStreamSerializationAllowed = 1
        if attributes:
            config.attrs = attributes
            config.numAttrs = len(attributes)
        # a program may go through any number of grids and streams
        if len(self._configs) >= _MAX_CONFIGS:
            self._configs.clear()
        self._configs[grid, block, cluster, stream, cooperative, overlap] = config
        return config


def load_kernel(
    compiled: CompiledSource, name: str, device: int, shared_bytes: int, cluster: int
) -> CudaKernel:
    """Load one kernel of a cubin on a device, and lift its limits of shared memory and cluster."""
    from cuda.bindings import driver

    _enter_context(driver, device)
    what = f"{name} ({compiled.arch}, NVRTC {compiled.nvrtc})"
    module = _checked(what, driver.cuModuleLoadData(compiled.cubin))
    mangled = compiled.names[name].encode()
    function = _checked(what, driver.cuModuleGetFunction(module, mangled))
    attributes = driver.CUfunction_attribute
    if shared_bytes > DEFAULT_SHARED_BYTES:
        limit = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        answer = driver.cuFuncSetAttribute(function, limit, shared_bytes)
        _checked(f"{name} with {shared_bytes} B of shared memory", answer)
    if cluster > PORTABLE_CLUSTER:
        allowed = attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        answer = driver.cuFuncSetAttribute(function, allowed, 1)
        _checked(f"{name} with clusters of {cluster}", answer)
    return CudaKernel(driver, function, name, device, shared_bytes, cluster)


def reason(status: Any) -> str:
    """The driver's words for a result; those that end the context say `CUDA error`."""
    name = getattr(status, "name", str(status))
    return f"CUDA error: {name}" if int(status) in _STICKY else name


def _enter_context(driver: Any, device: int) -> None:
    """Make the device's primary context, which is torch's, current in this thread if none is."""
    import torch

    torch.cuda.init()
    _checked("cuInit", driver.cuInit(0))
    current = _checked("cuCtxGetCurrent", driver.cuCtxGetCurrent())
    primary = _checked("the context", driver.cuDevicePrimaryCtxRetain(device))
    if int(current) != int(primary):
        _checked("cuCtxSetCurrent", driver.cuCtxSetCurrent(primary))


def _stream_getter() -> Callable[[int], int]:
    """What tells the handle of torch's current stream on a device; 0.1 µs where torch offers it."""
    import torch

    def stream(device: int) -> int:
        return int(torch.cuda.current_stream(device).cuda_stream)

    getter: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", stream)
    return getter


def _checked(what: str, answer: tuple[Any, ...]) -> Any:
    """The value in an answer of the driver. Raises LaunchError naming what was asked."""
    status, *values = answer
    if int(status) != _SUCCESS:
        raise LaunchError(f"{what}: {reason(status)}")
    return values[0] if values else None


def _three(dim: Dim) -> tuple[int, int, int]:
    x, y, z = (*((dim,) if isinstance(dim, int) else dim), 1, 1, 1)[:3]
    return int(x), int(y), int(z)


def _format(index: int, arg: Any) -> str:
    """The `struct` letter that an argument is passed as."""
    if arg is None or hasattr(arg, "data_ptr"):
        return "P"
    if isinstance(arg, bool | int):
        return "i"
    # numpy.float64 is a float too, and is passed as the double that it is
    if isinstance(arg, float) and type(arg) is float:
        return "f"
    kind = getattr(getattr(arg, "dtype", None), "str", "")[1:]
    letters = {
        "i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "i8": "q", "u8": "Q",
        "f2": "e", "f4": "f", "f8": "d", "b1": "?",
    }  # fmt: skip
    if getattr(arg, "ndim", None) == 0 and kind in letters:
        return letters[kind]
    raise LaunchError(
        f"argument {index} is a {type(arg).__name__}; a kernel takes tensors, bool, int, float, "
        "numpy scalars and None"
    )
