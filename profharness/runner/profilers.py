"""The profilers that a run can be watched by; one that wraps a command is a pure function from argv
to argv.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from profharness.errors import UsageError

Argv = list[str]


@dataclass(frozen=True)
class Profiler:
    """wrap turns the worker's argv into the argv that is started; suffix is the end of its trace
    files' names, if it leaves any.
    """

    name: str
    summary: str
    wrap: Callable[[Argv], Argv]
    suffix: str | None


PROFILERS: dict[str, Profiler] = {
    "torch": Profiler(
        "torch", "PyTorch profiler (Kineto) inside the worker", lambda argv: argv, "torch.json.gz"
    ),
    "events": Profiler("events", "timing only, no trace", lambda argv: argv, None),
}


def find_profilers(names: Sequence[str]) -> tuple[Profiler, ...]:
    """The profilers of those names, repeats dropped. Raises UsageError listing the known ones."""
    for name in names:
        if name not in PROFILERS:
            raise UsageError(f"no profiler {name!r}; known are {', '.join(PROFILERS)}")
    return tuple(PROFILERS[name] for name in dict.fromkeys(names))
