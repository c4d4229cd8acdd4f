"""The profilers whose launches can be stored, in the order in which an answer prefers them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from profharness.errors import UsageError
from profharness.profilers.base import NsightSession
from profharness.profilers.ncu import NcuSession
from profharness.profilers.nsys import NsysSession
from profharness.profilers.tools import Tool, require_tool
from profharness.run import Protocol


@dataclass(frozen=True)
class Profiler:
    """suffix is the end of its traces' names, if it leaves any; session what wraps the worker, None
    where it works inside; iterations the profiled calls per cell, None for the protocol's own;
    patience how many times the seconds of --timeout a cell may take.
    """

    name: str
    summary: str
    suffix: str | None
    session: type[NsightSession] | None = None
    iterations: int | None = None
    patience: float = 1.0


PROFILERS: dict[str, Profiler] = {
    profiler.name: profiler
    for profiler in (
        Profiler("torch", "PyTorch profiler (Kineto) inside the worker", "torch.json.gz"),
        Profiler("events", "timing only, no trace", None),
        Profiler("nsys", "Nsight Systems around the worker", "nsys-rep", NsysSession, None, 2.0),
        # Counters do not scatter as times do, and each launch costs milliseconds.
        Profiler("ncu", "Nsight Compute: hardware counters", "ncu-rep", NcuSession, 1, 10.0),
    )
}


def find_profilers(names: Sequence[str]) -> tuple[Profiler, ...]:
    """The profilers of those names, repeats dropped. Raises UsageError listing the known ones."""
    for name in names:
        if name not in PROFILERS:
            raise UsageError(f"no profiler {name!r}; known are {', '.join(PROFILERS)}")
    return tuple(PROFILERS[name] for name in dict.fromkeys(names))


def require_tools(profilers: Sequence[Profiler]) -> dict[str, Tool]:
    """The command-line tool of every profiler that needs one. Raises NsightError for one that is
    nowhere.
    """
    return {item.name: require_tool(item.name) for item in profilers if item.session}


def new_report(profiler: Profiler, folder: Path) -> Path:
    """A name in the folder that no start has used: nsys-1.nsys-rep, nsys-2.nsys-rep, …"""
    number = 1
    while any(folder.glob(f"{profiler.name}-{number}.*")):
        number += 1
    return folder / f"{profiler.name}-{number}.{profiler.suffix}"


def open_session(
    profiler: Profiler,
    tools: dict[str, Tool],
    folder: Path,
    protocol: Protocol,
    tell: Callable[[str], None] = lambda _: None,
) -> NsightSession:
    """A session of a wrapping profiler for the next start of the worker; tell hears what the user
    has to wait for.
    """
    assert profiler.session is not None
    report = new_report(profiler, folder)
    return profiler.session(profiler.name, tools[profiler.name], report, protocol, tell=tell)
