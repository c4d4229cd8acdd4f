"""Runs kernels of a .cu file on the CPU, thread by thread, in a program of its own.

The .cu is compiled by g++ with headers beside this file in place of device.cuh; see docs/kernels.md.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from waiting import PATIENCE_S

HERE = Path(__file__).resolve().parent
COMPILER = shutil.which("g++")
FLAGS = (
    *("-std=c++20", "-O1", "-march=native", "-fno-strict-aliasing", "-pipe"),
    *("-g1", "-gdwarf-4", "-no-pie", "-fno-pie", "-fstack-clash-protection"),
    "-ftrivial-auto-var-init=pattern",  # variables without a value show
    *("-fsanitize=alignment,bounds", "-fsanitize-undefined-trap-on-error"),
    *("-Wno-unknown-pragmas", "-Wno-attributes"),
)
KERNELS = HERE.parents[2] / "kernels"
MAX_SHARED_BYTES = 232_448  # a block of sm_90 (CUDA programming guide, compute capabilities)
MAX_BLOCK_THREADS, MAX_CLUSTER_BLOCKS, MAX_RESIDENT_BLOCKS = 1024, 16, 132

Dims = int | Sequence[int]
Three = tuple[int, int, int]


class EmulatorError(Exception):
    """A kernel that does not compile, a launch that does not fit it, or a mistake that it made."""


@dataclass(frozen=True)
class _Tensor:
    """One argument: a part of `memory`, all of which is carried to the program and back."""

    memory: np.ndarray[Any, np.dtype[np.uint8]]
    offset: int
    low: int
    high: int
    item_bytes: int


def emulate(
    source: Path,
    kernel: str,
    grid: Dims,
    block: Dims,
    args: Sequence[object],
    *,
    shared_bytes: int = 0,
    cluster: Dims = (1, 1, 1),
    cooperative: bool = False,
    seed: int = 0,
    together: Sequence[str] = (),
    timeout_s: float = PATIENCE_S,
) -> None:
    """Launches `kernel`, a C++ expression such as `attention<fp16, 64>`, and waits for it.

    CPU tensors and numpy arrays are pointers and changed in place, None is a null pointer; bool and
    int are int32, float is float32, a numpy scalar stays what it is. The order of threads, warps and
    clusters is drawn from `seed`; seeds 0 to 3 modulo 4 interrupt warps never, seldom, often, hardly
    ever. Raises EmulatorError with thread, block and line of a mistake; tensors are then as they
    were. To compile takes seconds; kernels named in `together` share one program. Only the blocks of
    a cluster are there at the same time; with `cooperative` it stands for blocks of a cooperative
    launch that wait for each other, and may be larger than a cluster of a GPU.
    """
    shape = (_three(grid), _three(block), _three(cluster))
    _check(*shape, shared_bytes, MAX_RESIDENT_BLOCKS if cooperative else MAX_CLUSTER_BLOCKS)
    kernels = tuple(dict.fromkeys((*together, kernel)))
    program = compile_kernels(Path(source), kernels)
    tensors = [_tensor(arg) for arg in args]
    memories = _distinct(tensors)
    with tempfile.TemporaryDirectory(prefix="profharness-emulator-") as folder:
        data, request = Path(folder, "data"), Path(folder, "request")
        with data.open("wb") as file:
            for memory in memories:
                file.write(memory.data)
        numbers = " ".join(str(n) for dims in shape for n in dims)
        lines = [f"launch {numbers} {shared_bytes} {seed % 2**63} {data}"]
        lines += [f"region {memory.nbytes}" for memory in memories]
        lines += [_line(a, t, memories) for a, t in zip(args, tensors, strict=True)]
        request.write_text("\n".join(lines) + "\n")
        _run([program, request, str(kernels.index(kernel))], kernel, timeout_s)
        with data.open("rb") as file:
            for memory in memories:
                result = np.frombuffer(file.read(memory.nbytes), np.uint8)
                if not np.array_equal(memory, result):
                    memory[:] = result


def compile_kernels(source: Path, kernels: Sequence[str]) -> Path:
    """The program that runs `kernels` of `source`; compiled once for one state of all its files."""
    if COMPILER is None:
        raise EmulatorError(
            "g++ was not found; install it (version 12 or later) to emulate kernels"
        )
    cases = "".join(f"case {i}: return emulator::run(w[1], {k});\n" for i, k in enumerate(kernels))
    main = (
        f'#include "{source.resolve()}"\n'
        f"int main(int, char** w) {{ switch (atoi(w[2])) {{\n{cases}}} return 1; }}\n"
    )
    digest = hashlib.sha256(main.encode() + _compiler_state())
    for path in (*_files(source.resolve(), set()), *sorted(HERE.glob("*.hpp"))):
        digest.update(path.read_bytes())
    folder = Path(tempfile.gettempdir(), f"profharness-emulator-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    program = folder / digest.hexdigest()[:32]
    if program.exists():
        return program
    with tempfile.TemporaryDirectory(dir=folder) as build:
        code, out = Path(build, "main.cpp"), Path(build, "program")
        code.write_text(main)
        where = ["-I", str(KERNELS), "-include", str(HERE / "cuda.hpp")]
        command = [COMPILER, *FLAGS, *where, str(code), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise EmulatorError(f"{source.name} does not compile:\n{done.stderr[:6000]}")
        out.replace(program)
    return program


def _files(source: Path, seen: set[Path]) -> list[Path]:
    """The source and what it includes, directly or not, from its own folder or that of the kernels."""
    if source in seen or not source.is_file():
        return []
    seen.add(source)
    names = re.findall(r'^#include "(.+)"', source.read_text(encoding="utf-8"), re.MULTILINE)
    found = [(folder / name).resolve() for name in names for folder in (source.parent, KERNELS)]
    return [source, *(path for each in found for path in _files(each, seen))]


@cache
def _compiler_state() -> bytes:
    words = [str(COMPILER), "-march=native", "-Q", "--help=target", "--version"]
    shown = subprocess.run(words, capture_output=True, check=False).stdout
    return shown + " ".join(FLAGS).encode()


def _run(words: list[Path | str], kernel: str, timeout_s: float) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as slow:
        raise EmulatorError(f"{kernel} was still running after {timeout_s} s") from slow
    if done.returncode != 0:
        said = done.stderr.strip() or f"the program ended with {done.returncode} and said nothing"
        raise EmulatorError(f"{kernel}: {_with_line(said, str(words[0]))}")


def _with_line(message: str, program: str) -> str:
    """`@0x401234: ...` with the line of the source in place of the address, where addr2line knows it."""
    match = re.match(r"@(0x[0-9a-f]+): ", message)
    if match is None:
        return message
    tool = shutil.which("addr2line")
    where = match[1]
    if tool is not None:
        words = [tool, "-e", program, match[1]]
        found = subprocess.run(words, capture_output=True, text=True, check=False).stdout.split()
        where = Path(found[0]).name if found and not found[0].startswith("?") else where
    return f"{where}: {message[match.end() :]}"


def _three(dims: Dims) -> Three:
    values = (dims,) if isinstance(dims, int) else tuple(int(n) for n in dims)
    if not 1 <= len(values) <= 3 or any(n < 1 for n in values):
        raise EmulatorError(f"{dims!r} is no size; give one to three numbers from 1 up")
    x, y, z = (*values, 1, 1)[:3]
    return x, y, z


def _check(grid: Three, block: Three, cluster: Three, shared_bytes: int, most: int) -> None:
    if int(np.prod(block)) > MAX_BLOCK_THREADS:
        raise EmulatorError(f"a block of {block}; at most {MAX_BLOCK_THREADS} threads are possible")
    if int(np.prod(cluster)) > most:
        raise EmulatorError(f"a cluster of {cluster}; at most {most} blocks are possible")
    if any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise EmulatorError(f"the grid {grid} is no multiple of the cluster {cluster}")
    if not 0 <= shared_bytes <= MAX_SHARED_BYTES:
        raise EmulatorError(
            f"{shared_bytes} bytes of shared memory; at most {MAX_SHARED_BYTES} are"
        )


def _tensor(arg: object) -> _Tensor | None:
    if isinstance(arg, torch.Tensor):
        if arg.device.type != "cpu":
            raise EmulatorError(f"a tensor on {arg.device}; the emulator takes tensors on the CPU")
        storage = arg.untyped_storage()
        memory = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        start = arg.storage_offset() * arg.element_size()
        steps = [(n - 1) * s for n, s in zip(arg.shape, arg.stride(), strict=True)]
        end = start + (sum(steps) + 1) * arg.element_size() if arg.numel() else start
        return _Tensor(memory, start, start, end, arg.element_size())
    if isinstance(arg, np.ndarray):
        if not arg.flags.c_contiguous:
            raise EmulatorError("a numpy array that is not contiguous; copy it first")
        memory = arg.reshape(-1).view(np.uint8)
        return _Tensor(memory, 0, 0, memory.nbytes, arg.itemsize)
    return None


def _distinct(tensors: Sequence[_Tensor | None]) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    found = {t.memory.ctypes.data: t.memory for t in tensors if t is not None}
    return list(found.values())


def _line(
    arg: object, tensor: _Tensor | None, memories: list[np.ndarray[Any, np.dtype[np.uint8]]]
) -> str:
    if tensor is not None:
        at = [m.ctypes.data for m in memories].index(tensor.memory.ctypes.data)
        return f"tensor {at} {tensor.offset} {tensor.low} {tensor.high} {tensor.item_bytes}"
    if arg is None:
        return "value p 8 0 0 0 0 0 0 0 0"
    if isinstance(arg, np.generic):
        pass  # np.float64 is a float too
    elif isinstance(arg, bool | int):
        if not -(2**31) <= arg < 2**31:
            raise EmulatorError(f"{arg} does not fit an int32; give np.int64({arg})")
        arg = np.int32(arg)
    elif isinstance(arg, float):
        arg = np.float32(arg)
    if not isinstance(arg, np.generic):
        raise EmulatorError(f"{type(arg).__name__} is no argument; give a tensor, array or number")
    value = arg.tobytes()
    kind = "f" if isinstance(arg, np.floating) else "i"
    return f"value {kind} {len(value)} {' '.join(str(byte) for byte in value)}"
