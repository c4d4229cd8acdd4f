"""Build the sentences that the answers of several commands share."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from profharness.attention.config import ALL_DISABLED, AUTO, in_usual_order
from profharness.columns import VS_FASTEST
from profharness.errors import counted, join_and
from profharness.measurements.agreement import backend_that_ran
from profharness.render.document import Note, Table, status_note
from profharness.rows import CellRow

LAUNCH_REMEDY = "into a CUDA graph, or compile the model with mode='reduce-overhead'"
"""The remedy if the GPU waits for the CPU to launch kernels. It follows `capture the step`."""
WARM_KERNELS = (
    "The times are kernel times with a warm L2 cache; they exclude launch costs and the gaps between "
    "kernels."
)
"""What the times of kernels are, for kernels that were not run under ncu."""
OF_ALL_DISABLED = (
    "the legacy sdp_kernel with flash, efficient and math off, which leaves only cudnn, so it is "
    "not ranked"
)
SAME = "= "
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


def cell_reason(cell: CellRow, *, full: bool = False) -> str:
    """Return why a cell did not run.

    The reason of a refusal is short, unless `full` is set. It is then PyTorch's own message.
    """
    if cell.status == "refused" and cell.refusals and not full:
        # Imported here because only refused cells need the dispatch rules.
        from profharness.attention.dispatch.by_rule import short_reason

        return short_reason(cell.config, cell.refusals)
    return cell.reason or "no reason recorded"


def not_run_notes(
    cells: Sequence[CellRow],
    reasons_of: Callable[[CellRow], Iterable[str]] = lambda cell: [cell_reason(cell)],
) -> Iterator[Note]:
    """Yield a note for each reason why a backend did not run a config.

    `cells` also contains the cells that ran. If the reason does not apply to all configs, the note
    names its config, or says how many there are.
    """
    total = len({cell.config for cell in cells})
    found: dict[tuple[str, str, str], dict[str, None]] = {}
    for cell in cells:
        for reason in () if cell.status == "ok" else reasons_of(cell):
            found.setdefault((cell.backend, cell.status, reason), {})[cell.config] = None
    for (backend, status, reason), configs in found.items():
        where = "" if len(configs) == total else on_configs(configs, total)
        yield status_note(status, reason, backend, where=where)


def on_configs(configs: Collection[str], total: int) -> str:
    """Return ` on CONFIG` for one config, or ` on 2 of 3 configs` for several of all `total` configs."""
    several = f"{len(configs)} of {total} configs"
    return f" on {next(iter(configs)) if len(configs) == 1 else several}"


def all_disabled_notes(backends: Iterable[str | None]) -> Iterator[Note]:
    """Yield a note on `all-disabled` if it is among the backends of a table."""
    if ALL_DISABLED in backends:
        yield Note(OF_ALL_DISABLED, ALL_DISABLED)


def choices_of_auto(cells: Iterable[CellRow]) -> dict[str, str | None]:
    """Return the backend that `auto` ran for each config."""
    return {cell.config: backend_that_ran(cell) for cell in cells if cell.backend == AUTO}


def same_as_fastest(backend: str, choice: str | None, fastest: Collection[str]) -> str | None:
    """Return `= cudnn` for `auto` if it ran cudnn and cudnn is the fastest, and else None.

    A table shows this text in place of a ratio. `fastest` are the fastest backends of the config.
    """
    return f"{SAME}{choice}" if backend == AUTO and choice in fastest else None


def same_kernels_notes(table: Table) -> Iterator[Note]:
    """Yield a note on what `= cudnn` means if a table contains such a text."""
    values = (value for row in table.rows for value in row if isinstance(value, str))
    if text := next((value for value in values if value.startswith(SAME)), None):
        ran = text.removeprefix(SAME)
        yield Note(
            f"{text} means that auto ran {ran}, so both rows time the same kernels, and a difference "
            "between them is noise",
            VS_FASTEST,
        )


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


# Matches a number such as `1,234.5`, but no digits inside a kernel name or a dtype such as `fp16`.
NUMBER = re.compile(r"(?<![\w<>,.x-])(\d+(?:,\d{3})*(?:\.\d+)?)(?![\w<>x]|,\d)")


def merged_text(texts: Sequence[str]) -> str:
    """Merge texts that differ only in their numbers. A number that varies becomes `low to high`."""
    ranges = []
    for numbers in zip(*(NUMBER.findall(text) for text in texts), strict=True):
        ranked = sorted(numbers, key=lambda number: float(number.replace(",", "")))
        low, high = ranked[0], ranked[-1]
        ranges.append(low if low == high else f"{low} to {high}")
    merged = iter(ranges)
    return NUMBER.sub(lambda _: next(merged), texts[0])
