"""The four witnesses of which backend ran: the rules, PyTorch's own answer, the op in the trace, the
kernels' families; and where they disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from profharness.answers.expect import SDPA_BACKENDS, backend_of_op, ran_backends
from profharness.rows import NAIVE_COMPILED, REPLACEMENTS, CellRow, KernelRow

OWN_CHOICE = ("auto", "all-disabled")
FAILED = ("error", "crashed")
_NONE = ("none", "error")
_BUILT_IN = "pytorch_flash"  # the namespace of the flash kernels that PyTorch brings
_OTHER_FLASH = {"fa3": "FlashAttention-3", "fa4": "FlashAttention-4"}


@dataclass(frozen=True, slots=True)
class Witness:
    """One witness: the backends that it names (more than one only for kernels; `none`: nothing
    ran), and the clause that says so. name: `rules` `choice` `op` `kernels` `status`.
    """

    name: str
    backends: frozenset[str]
    text: str


def witnesses(cell: CellRow, rows: Sequence[KernelRow]) -> list[Witness]:
    """Those of a cell that say anything, from the prediction to the kernels. rows are the cell's."""
    found = [_rules(cell), _choice(cell), _op(cell, rows), _kernels(cell, rows), _status(cell)]
    return [each for each in found if each is not None]


def disagreements(cell: CellRow, rows: Sequence[KernelRow]) -> list[str]:
    """One line for each point on which the witnesses of a cell disagree, naming those on both
    sides; empty when they agree. rows are the cell's kernels.
    """
    sides = [list(group) for _, group in groupby(witnesses(cell, rows), lambda each: each.backends)]
    lines = [f"mismatch: {_joined(one)}, but {_joined(other)}" for one, other in pairwise(sides)]
    return lines + _other_kernels(cell, rows)


def _joined(group: Sequence[Witness]) -> str:
    *most, last = [each.text for each in group]
    return f"{', '.join(most)} and {last}" if most else last


def _rules(cell: CellRow) -> Witness | None:
    """The prediction; where there is none, a forced backend's own name is what to hold the others
    against.
    """
    if cell.backend in OWN_CHOICE:
        if cell.predicted is None:
            return None
        text = "that PyTorch raises" if cell.predicted == "none" else cell.predicted
        return Witness("rules", frozenset({cell.predicted}), f"the rules predict {text}")
    if cell.backend not in SDPA_BACKENDS:
        return None
    if cell.predicted == "refused":
        return Witness("rules", frozenset({"none"}), f"the rules refuse {cell.backend}")
    if cell.predicted is None and cell.status != "ok":
        return None
    what = "the rules take it" if cell.predicted else "it is the one permitted"
    return Witness("rules", frozenset({cell.backend}), f"{cell.backend} is asked for, {what}")


def _choice(cell: CellRow) -> Witness | None:
    if cell.choice is None:
        return None
    if cell.choice in _NONE:
        return Witness("choice", frozenset({"none"}), "PyTorch says that no backend takes it")
    return Witness("choice", frozenset({cell.choice}), f"PyTorch chose {cell.choice}")


def _op(cell: CellRow, rows: Sequence[KernelRow]) -> Witness | None:
    op = cell.sdpa_op or next((row.sdpa_op for row in rows if row.sdpa_op), None)
    backend = backend_of_op(op)
    if backend is None:
        return None
    name = "overrideable" if backend == "fused" else backend
    return Witness("op", frozenset({name}), f"the op that ran is {op} ({name})")


def _kernels(cell: CellRow, rows: Sequence[KernelRow]) -> Witness | None:
    ran = ran_backends(rows)
    families = sorted({row.family for row in rows if ran_backends([row])})
    if not ran and {"gemm", "softmax"} <= {row.family for row in rows}:
        ran, families = {"math"}, ["gemm", "softmax"]
    if not ran or cell.status != "ok":
        return None
    return Witness("kernels", frozenset(ran), f"the kernels are of family {', '.join(families)}")


def _status(cell: CellRow) -> Witness | None:
    """A cell that did not run, of a backend that PyTorch's dispatcher knows; out of memory says
    nothing.
    """
    if cell.backend not in (*OWN_CHOICE, *SDPA_BACKENDS):
        return None
    if cell.status == "refused":
        return Witness("status", frozenset({"none"}), "PyTorch refused the call")
    if cell.status in FAILED:
        first = (cell.message or "no message").splitlines()[0]
        return Witness("status", frozenset({"none"}), f"the call failed: {first}")
    return None


def _other_kernels(cell: CellRow, rows: Sequence[KernelRow]) -> list[str]:
    """FlashAttention-3 or -4 under PyTorch's flash op: the backend is the same, the kernels are not
    those that PyTorch brings.
    """
    op = backend_of_op(cell.sdpa_op)
    if op != "flash" or cell.backend not in (*OWN_CHOICE, "flash"):
        return []
    asked = [r for r in rows if r.family.startswith("flash") and _BUILT_IN not in r.kernel]
    asked = [row for row in asked if row.kernel_kind == "kernel"]
    if not asked:
        return []
    from profharness.kernel_names import parse_kernel_name

    found = dict.fromkeys(parse_kernel_name(row.kernel).backend for row in asked)
    return [
        f"mismatch: the op that ran is {cell.sdpa_op} (flash), but the kernels are "
        f"{_OTHER_FLASH[name]}'s, not PyTorch's own; activate_flash_attention_impl does that"
        for name in found
        if name in _OTHER_FLASH
    ]


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
