"""Where nsys and ncu are on this machine, and which version answers."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from profharness.profilers.failures import Failure, NsightError

VERSION_TIMEOUT_S = 20.0
VARIABLES = {"nsys": "PROFHARNESS_NSYS", "ncu": "PROFHARNESS_NCU"}
PRODUCTS = {"nsys": "Nsight Systems", "ncu": "Nsight Compute"}


# Where installers put the tools outside PATH, in the order of preference; within a line the newest
# version counts. Nsight Compute carries an nsys of its own, with its importer.
PLACES = {
    "nsys": (
        "opt/nvidia/nsight-systems/*/bin/nsys",
        "opt/nvidia/nsight-systems-cli/*/bin/nsys",
        "usr/local/cuda*/bin/nsys",
        "opt/nvidia/nsight-compute/*/host/target-linux-x64/nsys",
    ),
    "ncu": ("opt/nvidia/nsight-compute/*/ncu", "usr/local/cuda*/bin/ncu"),
}


@dataclass(frozen=True)
class Tool:
    """One executable. version is what it answers to --version (`2025.3.1.0`), None if it does not
    answer; on_path says whether the shell would start the same file by its name.
    """

    name: str
    path: Path
    version: str | None
    on_path: bool


def find_tool(name: str) -> Tool | None:
    """`nsys` or `ncu`: from PROFHARNESS_NSYS or PROFHARNESS_NCU, then PATH, then PLACES; None if
    there is none.

    Raises NsightError (tool_missing) when the variable is set but names no executable file: another
    one in its place would go unnoticed.
    """
    on_path = shutil.which(name)
    named = os.environ.get(VARIABLES[name])
    if named:
        path = Path(named)
        if not _executable(path):
            raise NsightError(_wrong_variable(name, named))
        return Tool(name, path, tool_version(path), on_path is not None and _same(path, on_path))
    if on_path is not None:
        return Tool(name, Path(on_path), tool_version(Path(on_path)), True)
    places = installed(name)
    return Tool(name, places[0], tool_version(places[0]), False) if places else None


def require_tool(name: str) -> Tool:
    """The tool. Raises NsightError (tool_missing) saying how to get or name one."""
    tool = find_tool(name)
    if tool is None:
        raise NsightError(tool_missing(name))
    return tool


def tool_missing(name: str) -> Failure:
    """What is said when there is no such tool."""
    remedy = f"install NVIDIA {PRODUCTS[name]}, or set {VARIABLES[name]} to the executable"
    if name == "nsys":
        remedy += " (Nsight Compute carries an nsys too)"
    places = "neither on PATH nor where NVIDIA's installers put it"
    return Failure(
        "tool_missing",
        f"{name} is {places}",
        f"{remedy}; `--profiler torch` works without it",
    )


def installed(name: str, root: Path = Path("/")) -> list[Path]:
    """Executables of that name in PLACES below root, the preferred one first."""
    found: list[Path] = []
    for pattern in PLACES[name]:
        found += sorted(filter(_executable, root.glob(pattern)), key=version_key, reverse=True)
    return found


def version_key(text: str | Path) -> tuple[int, ...]:
    """The numbers in a version or a path, so that 2025.10 comes after 2025.9."""
    return tuple(int(number) for number in re.findall(r"\d+", str(text)))


def tool_version(path: Path) -> str | None:
    """What the executable answers to --version, such as `2025.3.1.0`; None without an answer."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return _ask_version(str(path), stat.st_mtime_ns, stat.st_size)


def parse_version(text: str) -> str | None:
    """The version in what nsys or ncu prints for --version."""
    match = re.search(r"\bversion\s+(\d+(?:\.\d+)+)", text, re.IGNORECASE)
    return match[1] if match else None


@functools.lru_cache(maxsize=16)
def _ask_version(path: str, _mtime_ns: int, _size: int) -> str | None:
    try:
        done = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=VERSION_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return parse_version(done.stdout)


def _executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _same(path: Path, other: str) -> bool:
    return path.resolve() == Path(other).resolve()


def _wrong_variable(name: str, value: str) -> Failure:
    return Failure(
        "tool_missing",
        f"{VARIABLES[name]} is {value!r}, which is not an executable file",
        f"set it to the path of {name}, or unset it",
    )
