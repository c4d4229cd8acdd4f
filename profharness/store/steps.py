"""Compute the durations of a trace's steps, and the times in which the GPUs are busy."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from profharness.rows import StepRow

Step = tuple[int, str, int, int]
"""The number, name, start and duration of a step of the program."""
Launch = tuple[int, int, int, int]
"""The device of a launch, the start and end on the device, and the time of the launch call."""


def step_rows(trace: int, steps: Sequence[Step], launches: Iterable[Launch]) -> list[StepRow]:
    """Return the rows of a trace's steps. `launches` must be sorted by start.

    A step ends when the program's step and all kernels launched in this step have ended. A step
    begins with the program's step, but not before the end of the previous step. Therefore, steps do
    not overlap.
    """
    begins = [start for *_, start, _ in steps]
    ends = [start + duration for *_, start, duration in steps]
    found, program_ends = list(launches), ends.copy()
    for _, _, end, launched in found:
        at = bisect_right(begins, launched) - 1
        if at >= 0 and launched < program_ends[at]:
            ends[at] = max(ends[at], end)
    until = begins[0] if begins else 0
    for at, begin in enumerate(begins):
        begins[at] = max(begin, until)
        until = ends[at] = max(begins[at], ends[at])
    busy, count = [0] * len(steps), [0] * len(steps)
    busy_until: dict[int, int] = {}
    for device, start, end, _ in found:
        at = bisect_right(begins, start) - 1
        if at >= 0 and start < ends[at]:
            count[at] += 1
        begin = max(start, busy_until.get(device, start))
        busy_until[device] = max(begin, end)
        at = max(bisect_right(begins, begin) - 1, 0)
        while at < len(begins) and begins[at] < end:
            busy[at] += max(0, min(end, ends[at]) - max(begin, begins[at]))
            at += 1
    devices = max(len(busy_until), 1)
    return [
        StepRow(trace, number, name, begin, end - begin, ns // devices, devices, launches)
        for (number, name, *_), begin, end, ns, launches in zip(
            steps, begins, ends, busy, count, strict=True
        )
    ]
