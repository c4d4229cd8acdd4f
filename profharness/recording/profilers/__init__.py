"""The registry of profilers, and the search for their tools on this machine.

To add a profiler, add a row to PROFILERS, a module with its session and failure rules to this
folder, its name to `rows.LAUNCH_PROFILERS` (and to `rows.COUNTERS` if it reads hardware counters),
and its parser and file suffixes to `traces`.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from profharness.errors import UsageError
from profharness.processes import run_briefly
from profharness.recording.profilers.base import Tool, ToolError, ToolSession, version_key
from profharness.recording.profilers.ncu import NcuSession
from profharness.recording.profilers.nsys import NsysSession
from profharness.recording.profilers.rocprofv3 import Rocprofv3Session
from profharness.rows import EVENTS, NCU, NSYS, ROCPROFV3, TORCH
from profharness.run import Problem, Protocol

VERSION_TIMEOUT_S = 20.0
NVIDIA, AMD = "NVIDIA", "AMD"


@dataclass(frozen=True)
class Profiler:
    """A profiler, and how to find and start its tool."""

    name: str
    summary: str
    suffix: str | None = None  # suffix of its trace files, or None if it writes none
    session: type[ToolSession] | None = None  # None if the profiler runs inside the worker
    iterations: int | None = None  # profiled calls per cell, or None for the protocol's number
    patience: float = 1.0  # factor by which the seconds of --timeout are multiplied
    product: str = ""
    variable: str = ""  # environment variable that names another executable
    # Glob patterns of the paths at which installers put the executable, in order of preference. If
    # several files match the same pattern, the newest version is preferred.
    patterns: tuple[str, ...] = ()
    remedy: str = ""  # appended to the remedy if the tool is missing
    vendor: str = NVIDIA  # vendor of the GPUs that the tool profiles


PROFILERS: dict[str, Profiler] = {
    profiler.name: profiler
    for profiler in (  # in order of preference
        Profiler(TORCH, "runs the PyTorch profiler (Kineto) inside the worker", "torch.json.gz"),
        Profiler(EVENTS, "timing only, no trace"),
        Profiler(
            NSYS,
            "runs the worker under Nsight Systems",
            "nsys-rep",
            NsysSession,
            patience=2.0,
            product="NVIDIA Nsight Systems",
            variable="PROFHARNESS_NSYS",
            patterns=(
                "opt/nvidia/nsight-systems/*/bin/nsys",
                "opt/nvidia/nsight-systems-cli/*/bin/nsys",
                "usr/local/cuda*/bin/nsys",
                "opt/nvidia/nsight-compute/*/host/target-linux-x64/nsys",  # includes an importer
            ),
            remedy=" (Nsight Compute also includes nsys)",
        ),
        Profiler(
            NCU,
            "runs the worker under Nsight Compute, which reads hardware counters",
            "ncu-rep",
            NcuSession,
            iterations=1,  # counters vary little, and each profiled launch takes milliseconds
            patience=10.0,
            product="NVIDIA Nsight Compute",
            variable="PROFHARNESS_NCU",
            patterns=("opt/nvidia/nsight-compute/*/ncu", "usr/local/cuda*/bin/ncu"),
        ),
        Profiler(
            ROCPROFV3,
            "runs the worker under ROCm's rocprofv3 (not tested on an AMD GPU)",
            "db",
            Rocprofv3Session,
            patience=2.0,
            product="ROCm 7.0 or newer (package rocprofiler-sdk)",
            variable="PROFHARNESS_ROCPROFV3",
            patterns=("opt/rocm/bin/rocprofv3", "opt/rocm-*/bin/rocprofv3"),
            vendor=AMD,
        ),
    )
}


def find_profilers(names: Sequence[str]) -> tuple[Profiler, ...]:
    """Return the named profilers without duplicates. Raise UsageError for an unknown name."""
    for name in names:
        if name not in PROFILERS:
            raise UsageError(f"unknown profiler {name!r}; choose from {', '.join(PROFILERS)}")
    return tuple(PROFILERS[name] for name in dict.fromkeys(names))


def require_tools(profilers: Sequence[Profiler]) -> dict[str, Tool]:
    """Return the tool of every profiler that needs one. Raise ToolError if one is missing."""
    return {item.name: require_tool(item.name) for item in profilers if item.session}


def open_session(
    profiler: Profiler,
    tools: dict[str, Tool],
    folder: Path,
    protocol: Protocol,
    notify: Callable[[str], None] = lambda _: None,
) -> ToolSession:
    """Return a session for the next start of the worker under a profiler.

    The report gets an unused name (nsys-1.nsys-rep, nsys-2.nsys-rep, …). `notify` receives messages
    for the user.
    """
    assert profiler.session is not None
    number = 1
    # a resumed run keeps its earlier reports
    while any(folder.glob(f"{profiler.name}-{number}.*")):
        number += 1
    report = folder / f"{profiler.name}-{number}.{profiler.suffix}"
    return profiler.session(tools[profiler.name], report, protocol, notify)


def find_tool(name: str) -> Tool | None:
    """Find the tool of a profiler by its environment variable, on PATH, or in usual folders.

    Return None if the tool is not found. Raise ToolError (tool_missing) if the environment variable
    is set but names no executable file. In that case, no other executable is used, because the user
    would not notice the difference.
    """
    variable = PROFILERS[name].variable
    named = os.environ.get(variable)
    on_path = shutil.which(name)
    if named:
        path = Path(named)
        if not _executable(path):
            message = f"{variable} is {named!r}, which is not an executable file"
            remedy = f"set {variable} to the path of {name}, or unset the variable"
            raise ToolError(Problem(name, "tool_missing", message, remedy))
    elif on_path is not None:
        path = Path(on_path)
    elif paths := installed(name):
        path = paths[0]
    else:
        return None
    same = on_path is not None and path.resolve() == Path(on_path).resolve()
    try:
        state = path.stat()
    except OSError:
        return None  # the file was deleted or replaced in the meantime
    # the file's time and size are part of the cache key, so that a replaced tool is queried again
    return Tool(name, path, _ask_version(str(path), state.st_mtime_ns, state.st_size), same)


def require_tool(name: str) -> Tool:
    tool = find_tool(name)
    if tool is None:
        raise ToolError(tool_missing(name))
    return tool


def tool_missing(name: str) -> Problem:
    profiler = PROFILERS[name]
    return Problem(
        name,
        "tool_missing",
        f"{name} was not found on PATH or in the folders of {profiler.vendor}'s installers",
        f"install {profiler.product}, or set {profiler.variable} to the executable"
        f"{profiler.remedy}; `--profiler torch` works without {name}",
    )


def installed(name: str, root: Path = Path("/")) -> list[Path]:
    """Return the executables that installers put below `root`, in order of preference."""
    paths: list[Path] = []
    for pattern in PROFILERS[name].patterns:
        paths += sorted(filter(_executable, root.glob(pattern)), key=version_key, reverse=True)
    return paths


@functools.lru_cache(maxsize=16)
def _ask_version(path: str, _mtime_ns: int, _size: int) -> str | None:
    done = run_briefly([path, "--version"], VERSION_TIMEOUT_S)
    return parse_version(done.stdout) if done else None


def parse_version(text: str) -> str | None:
    """Return the version in the output of a tool's `--version`, such as `2025.3.1.0`, or None."""
    match = re.search(r"\bversion:?\s+(\d+(?:\.\d+)+)", text, re.IGNORECASE)
    return match[1] if match else None


def _executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
