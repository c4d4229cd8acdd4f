"""Refuse records and traces that no table can contain, before a store is created for them.

These are integers beyond 64 bits, names that are not valid Unicode, and cells with the same name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from itertools import chain
from pathlib import Path

import msgspec

from profharness.errors import TraceFormatError
from profharness.run import Run
from profharness.trace import LaunchConfig, Trace

MAX_INT = (1 << 63) - 1  # the largest integer of SQLite


def check_record(path: Path, run: Run) -> None:
    """Raise TraceFormatError if no table can contain a record."""
    (name, count), *_ = Counter(cell.cell for cell in run.cells).most_common(1) or [("", 0)]
    if count > 1:
        raise TraceFormatError(path, f"{count} cells are called {name!r}", expected="unique names")
    for cell in run.cells:
        # tuning is stored as text
        if _largest(msgspec.to_builtins(replace(cell, tuning=None))) > MAX_INT:
            raise TraceFormatError(
                path, f"a number of cell {cell.cell!r} is too large", expected="64 bits at most"
            )


def _largest(value: object) -> int:
    """Return the largest absolute integer anywhere in plain data, 0 if there is none."""
    if isinstance(value, dict):
        return max(map(_largest, value.values()), default=0)
    if isinstance(value, list | tuple):
        if set(map(type, value)) == {int}:  # a fast path for thousands of samples
            largest: int = max(max(value), -min(value))
            return largest
        return max(map(_largest, value), default=0)
    return abs(value) if isinstance(value, int) else 0


def check_tables(path: Path, trace: Trace) -> None:
    """Raise TraceFormatError if no table can contain the numbers and names of a trace."""
    numbers = chain(
        chain.from_iterable(asdict(device).values() for device in trace.devices),
        (number for launch in trace.launch_configs for number in _flat(launch)),
        (number for r in trace.ranges for number in (r.start_ns, r.duration_ns, r.pid, r.tid)),
    )
    largest = max((abs(number) for number in numbers if isinstance(number, int)), default=0)
    if largest > MAX_INT:
        raise TraceFormatError(
            path, f"a number of {largest.bit_length()} bits", expected="64 bits at most"
        )
    names = chain(
        *(trace.kernels, trace.op_paths, trace.apis, (item.name for item in trace.ranges)),
        (device.name for device in trace.devices),
    )
    try:
        # SQLite cannot store a str with a lone surrogate
        "".join(names).encode()
    except (UnicodeEncodeError, TypeError) as error:
        raise TraceFormatError(path, f"holds a name that is no text: {error}") from None


def _flat(config: LaunchConfig) -> Iterator[int | None]:
    for value in (getattr(config, item.name) for item in fields(config)):
        yield from value if isinstance(value, tuple) else (value,)
