"""The profilers: one row each in PROFILERS, and where their tools are on this machine.

A new profiler is a row here, a module beside this one with its session and its failures, its name in
`rows.TRACE_PROFILERS` (and `COUNTERS`), and a parser that `parse.PARSERS` knows.
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
from profharness.profilers.base import Failure, Tool, ToolError, ToolSession, version_key
from profharness.profilers.ncu import NcuSession
from profharness.profilers.nsys import NsysSession
from profharness.run import Protocol

VERSION_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Profiler:
    """One row. suffix is the end of its traces' names, None where it leaves none. session wraps the
    worker, None where the profiler works inside of it. iterations are the profiled calls per cell,
    None for the protocol's own. patience is how many times the seconds of --timeout a cell may take.

    variable names another executable. places are where installers put it outside PATH, the
    preferred one first; within a line the newest version counts. remedy follows what is said where
    there is none.
    """

    name: str
    summary: str
    suffix: str | None = None
    session: type[ToolSession] | None = None
    iterations: int | None = None
    patience: float = 1.0
    product: str = ""
    variable: str = ""
    places: tuple[str, ...] = ()
    remedy: str = ""


PROFILERS: dict[str, Profiler] = {
    profiler.name: profiler
    for profiler in (  # in the order in which an answer prefers them
        Profiler("torch", "PyTorch profiler (Kineto) inside the worker", "torch.json.gz"),
        Profiler("events", "timing only, no trace"),
        Profiler(
            "nsys",
            "Nsight Systems around the worker",
            "nsys-rep",
            NsysSession,
            patience=2.0,
            product="NVIDIA Nsight Systems",
            variable="PROFHARNESS_NSYS",
            places=(
                "opt/nvidia/nsight-systems/*/bin/nsys",
                "opt/nvidia/nsight-systems-cli/*/bin/nsys",
                "usr/local/cuda*/bin/nsys",
                "opt/nvidia/nsight-compute/*/host/target-linux-x64/nsys",  # with its importer
            ),
            remedy=" (Nsight Compute carries an nsys too)",
        ),
        Profiler(
            "ncu",
            "Nsight Compute: hardware counters",
            "ncu-rep",
            NcuSession,
            iterations=1,  # counters do not scatter as times do, and a launch costs milliseconds
            patience=10.0,
            product="NVIDIA Nsight Compute",
            variable="PROFHARNESS_NCU",
            places=("opt/nvidia/nsight-compute/*/ncu", "usr/local/cuda*/bin/ncu"),
        ),
    )
}


def find_profilers(names: Sequence[str]) -> tuple[Profiler, ...]:
    """The profilers of those names, repeats dropped. Raises UsageError listing the known ones."""
    for name in names:
        if name not in PROFILERS:
            raise UsageError(f"no profiler {name!r}; known are {', '.join(PROFILERS)}")
    return tuple(PROFILERS[name] for name in dict.fromkeys(names))


def require_tools(profilers: Sequence[Profiler]) -> dict[str, Tool]:
    """The tool of every profiler that needs one. Raises ToolError for one that is nowhere."""
    return {item.name: require_tool(item.name) for item in profilers if item.session}


def open_session(
    profiler: Profiler,
    tools: dict[str, Tool],
    folder: Path,
    protocol: Protocol,
    notify: Callable[[str], None] = lambda _: None,
) -> ToolSession:
    """A session of a wrapping profiler for the next start of the worker, with a report that no
    start has used (nsys-1.nsys-rep, nsys-2.nsys-rep, …). notify gets the sentence on what the user
    has to wait for.
    """
    assert profiler.session is not None
    number = 1
    # a resumed run keeps the reports of its earlier starts
    while any(folder.glob(f"{profiler.name}-{number}.*")):
        number += 1
    report = folder / f"{profiler.name}-{number}.{profiler.suffix}"
    return profiler.session(tools[profiler.name], report, protocol, notify)


def find_tool(name: str) -> Tool | None:
    """The tool of a profiler: from its variable, then PATH, then its places; None if there is none.

    Raises ToolError (tool_missing) when the variable is set but names no executable file: another
    one in its place would go unnoticed.
    """
    variable = PROFILERS[name].variable
    named = os.environ.get(variable)
    on_path = shutil.which(name)
    if named:
        path = Path(named)
        if not _executable(path):
            message = f"{variable} is {named!r}, which is not an executable file"
            remedy = f"set it to the path of {name}, or unset it"
            raise ToolError(Failure("tool_missing", message, remedy))
        same = on_path is not None and path.resolve() == Path(on_path).resolve()
        return Tool(name, path, tool_version(path), same)
    if on_path is not None:
        return Tool(name, Path(on_path), tool_version(Path(on_path)), True)
    paths = installed(name)
    return Tool(name, paths[0], tool_version(paths[0]), False) if paths else None


def require_tool(name: str) -> Tool:
    """The tool. Raises ToolError (tool_missing) saying how to get or name one."""
    tool = find_tool(name)
    if tool is None:
        raise ToolError(tool_missing(name))
    return tool


def tool_missing(name: str) -> Failure:
    """The failure of a tool that is nowhere."""
    profiler = PROFILERS[name]
    return Failure(
        "tool_missing",
        f"{name} is neither on PATH nor where NVIDIA's installers put it",
        f"install {profiler.product}, or set {profiler.variable} to the executable"
        f"{profiler.remedy}; `--profiler torch` works without it",
    )


def installed(name: str, root: Path = Path("/")) -> list[Path]:
    """Executables of a profiler in its places below root, the preferred one first."""
    paths: list[Path] = []
    for pattern in PROFILERS[name].places:
        paths += sorted(filter(_executable, root.glob(pattern)), key=version_key, reverse=True)
    return paths


def tool_version(path: Path) -> str | None:
    """What the executable answers to --version, such as `2025.3.1.0`; None without an answer."""
    try:
        stat = path.stat()
    except OSError:
        return None
    # a tool that was replaced is asked again
    return _ask_version(str(path), stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=16)
def _ask_version(path: str, _mtime_ns: int, _size: int) -> str | None:
    done = run_briefly([path, "--version"], VERSION_TIMEOUT_S)
    return parse_version(done.stdout) if done else None


def parse_version(text: str) -> str | None:
    """The version in what a tool prints for --version."""
    match = re.search(r"\bversion\s+(\d+(?:\.\d+)+)", text, re.IGNORECASE)
    return match[1] if match else None


def _executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
