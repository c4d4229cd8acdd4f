"""What no table can hold, found before there is a store: numbers beyond 64 bits, names that are no
text, cells of one name.
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

MAX_INT = (1 << 63) - 1  # of SQLite


def check_record(path: Path, run: Run) -> None:
    """Raise TraceFormatError, before there is a store, for a record that no table can hold."""
    (name, count), *_ = Counter(cell.cell for cell in run.cells).most_common(1) or [("", 0)]
    if count > 1:
        raise TraceFormatError(path, f"{count} cells are called {name!r}", expected="unique names")
    for cell in run.cells:
        # tuning is kept as text
        if _largest(msgspec.to_builtins(replace(cell, tuning=None))) > MAX_INT:
            raise TraceFormatError(
                path, f"a number of cell {cell.cell!r} is too large", expected="64 bits at most"
            )


def _largest(value: object) -> int:
    """The largest absolute integer anywhere in plain data, 0 without one."""
    if isinstance(value, dict):
        return max(map(_largest, value.values()), default=0)
    if isinstance(value, list | tuple):
        if set(map(type, value)) == {int}:  # thousands of samples
            largest: int = max(max(value), -min(value))
            return largest
        return max(map(_largest, value), default=0)
    return abs(value) if isinstance(value, int) else 0


def check_tables(path: Path, trace: Trace) -> None:
    """Raise TraceFormatError, before there is a store, for numbers and names that no table can hold."""
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
        # a lone surrogate is a str that SQLite cannot keep
        "".join(names).encode()
    except (UnicodeEncodeError, TypeError) as error:
        raise TraceFormatError(path, f"holds a name that is no text: {error}") from None


def _flat(config: LaunchConfig) -> Iterator[int | None]:
    for value in (getattr(config, item.name) for item in fields(config)):
        yield from value if isinstance(value, tuple) else (value,)
