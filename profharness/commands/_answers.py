"""Build the sentences that the answers of several commands share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from profharness.attention.config import in_usual_order
from profharness.errors import counted, join_and
from profharness.rows import CellRow

LAUNCH_REMEDY = "into a CUDA graph, or compile the model with mode='reduce-overhead'"
"""The remedy if the GPU waits for the CPU to launch kernels. It follows `capture the step`."""
NOT_FAILED = ("ok", "refused", "unknown")


def split_text(counts: Counter[str], total: int | None = None) -> str:
    """Return text such as `cudnn on 3 of 4 configs and flash on 1`.

    `counts` maps each backend to its number of configs. By default, `total` is the sum of these
    numbers.
    """
    total = sum(counts.values()) if total is None else total
    (first, most), *others = counts.most_common()
    lead = f"{first} on {most} of {total} configs"
    if most == total:
        where = {1: "", 2: " on both configs"}.get(total, f" on all {total} configs")
        lead = f"{first}{where}"
    return join_and([lead, *(f"{name} on {count}" for name, count in others)])


def refused_and_failed(cells: Sequence[CellRow], *, several: bool) -> Iterator[str]:
    """Yield a sentence with the refused backends, and one with those that failed.

    If `several` is set, the sentences count the configs.
    """
    refused = Counter(cell.backend for cell in cells if cell.status == "refused")
    failed = Counter(each.backend for each in cells if each.status not in NOT_FAILED)
    for lead, found in (("Refused", refused), ("Failed", failed)):
        if found and several:
            names = in_usual_order(found)
            parts = (f"{name} ({counted(found[name], 'config')})" for name in names)
            yield f"{lead}: {', '.join(parts)}."
        elif found:
            yield f"{lead}: {join_and(in_usual_order(found))}."
