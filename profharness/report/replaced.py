"""Where torch.compile put scaled_dot_product_attention in the place of the plain form that it was
given, so that the figures are not those of the plain form.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from profharness.report.expect import backend_of_op, ran_backends
from profharness.rows import NAIVE_COMPILED, REPLACEMENTS, CellRow, KernelRow

SHOWN = 3


@dataclass(frozen=True, slots=True)
class Replacement:
    """One cell where it happened. took is the SDPA backend that ran, None where only Inductor's own
    count says that there was one.
    """

    backend: str
    config: str
    took: str | None


def replacement(cell: CellRow, rows: Sequence[KernelRow] = ()) -> Replacement | None:
    """What happened to a cell, None where nothing says that it was replaced. Three witnesses: the op
    in its trace, the families of its kernels (rows are the cell's), and Inductor's count in its
    `tuning`.
    """
    if cell.backend != NAIVE_COMPILED or cell.status != "ok":
        return None
    op = cell.sdpa_op or next((row.sdpa_op for row in rows if row.sdpa_op), None)
    # `triton` is what Inductor writes for the plain form itself
    ran = {backend_of_op(op), *ran_backends(rows)} - {None, "triton"}
    counted = (cell.tuning or {}).get(REPLACEMENTS)
    if not ran and not counted:
        return None
    return Replacement(cell.backend, cell.config, " and ".join(sorted(map(str, ran))) or None)


def replacements(cells: Iterable[CellRow]) -> tuple[Replacement, ...]:
    """Those of the cells that have one, in order."""
    found = map(replacement, cells)
    return tuple(each for each in found if each is not None)


def replacement_text(found: Sequence[Replacement]) -> str:
    """One sentence for cells of one backend that took the same way."""
    took = found[0].took
    which = f", which took {took}" if took else ""
    return f"torch.compile replaced it by scaled_dot_product_attention{which}"


def replacement_notes(found: Sequence[Replacement]) -> list[tuple[str, str]]:
    """(where, sentence), one for each backend and way: `naive-compiled at b1-…-fp16`."""
    groups: dict[tuple[str, str | None], list[Replacement]] = {}
    for each in found:
        groups.setdefault((each.backend, each.took), []).append(each)
    notes = []
    for (backend, _), group in groups.items():
        left = len(group) - SHOWN
        more = f" and {left} more" if left > 0 else ""
        places = ", ".join(each.config for each in group[:SHOWN])
        notes.append((f"{backend} at {places}{more}", replacement_text(group)))
    return notes
