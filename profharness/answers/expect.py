"""The gate of `kernels --expect`: which backend ran, by two independent witnesses, and whether it
was the expected one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from profharness.errors import UsageError
from profharness.rows import CellRow, KernelRow

SDPA_BACKENDS = ("flash", "efficient", "cudnn", "math")


# Kernel families that compute attention, and the backend each belongs to.
FAMILY_BACKENDS = {
    "flash": "flash",
    "flash_splitkv": "flash",
    "flash_combine": "flash",
    "flash_bwd": "flash",
    "efficient": "efficient",
    "efficient_bwd": "efficient",
    "cudnn": "cudnn",
    "cudnn_bwd": "cudnn",
    "flex": "flex",
    "triton": "triton",
}
EXPECTED = tuple(dict.fromkeys([*SDPA_BACKENDS, *FAMILY_BACKENDS]))
# Kernels that only ever finish another family's work: expecting the one allows the other.
_IMPLIED = {"flash_splitkv": ("flash_combine",)}


_SDPA_OP = re.compile(r"_scaled_dot_product_(flash|efficient|cudnn|fused)?_?attention(_math)?")


@dataclass(frozen=True, slots=True)
class Evidence:
    """One sign of what ran: the op in the trace, or a kernel family. family is None for an op."""

    backend: str
    family: str | None
    text: str


def backend_of_op(op: str | None) -> str | None:
    """The SDPA backend whose ATen op this is (`aten::_scaled_dot_product_flash_attention_for_cpu`
    -> flash), or None."""
    found = _SDPA_OP.search(op or "")
    if found is None:
        return None
    return "math" if found.group(2) else found.group(1)


def ran_backends(rows: Iterable[KernelRow]) -> set[str]:
    """The backends that the kernels' families name; empty for math, which has no kernels of its
    own."""
    return {FAMILY_BACKENDS[row.family] for row in rows if row.family in FAMILY_BACKENDS}


def evidence(sdpa_op: str | None, rows: Sequence[KernelRow]) -> list[Evidence]:
    """All signs of what computed attention: the op, each attention family, or gemm and softmax
    kernels for math."""
    signs: list[Evidence] = []
    ops = dict.fromkeys([sdpa_op, *(row.sdpa_op for row in rows)])
    for op in ops:
        backend = backend_of_op(op)
        if backend is not None:
            signs.append(Evidence(backend, None, f"op {op}"))
    signs += [
        Evidence(FAMILY_BACKENDS[family], family, f"{family} kernels")
        for family in dict.fromkeys(row.family for row in rows)
        if family in FAMILY_BACKENDS
    ]
    if not signs and {"gemm", "softmax"} <= {row.family for row in rows}:
        signs.append(Evidence("math", None, "gemm and softmax kernels"))
    return signs


def accepts(expected: Sequence[str], sign: Evidence) -> bool:
    """Whether one of the expected names covers the sign: a backend covers its op and families, a
    family itself and its op."""
    for name in expected:
        if name in (sign.backend, sign.family) or sign.family in _IMPLIED.get(name, ()):
            return True
        if sign.family is None and FAMILY_BACKENDS.get(name) == sign.backend:
            return True
    return False


def check_expected_names(expected: Sequence[str]) -> None:
    """Raise UsageError for a name that is neither an SDPA backend nor an attention family."""
    for name in expected:
        if name not in EXPECTED:
            raise UsageError(f"--expect {name!r}: not one of {', '.join(EXPECTED)}")


def failures(
    expected: Sequence[str], rows: Sequence[KernelRow], cells: Sequence[CellRow]
) -> list[str]:
    """One line for each cell (or, in a foreign trace, range) where something else ran; empty when
    the gate is met.

    A cell that was refused or failed ran nothing and is passed over, but a gate that judged nothing
    at all is not met.
    """
    judged = 0
    lines: list[str] = []
    for cell in cells:
        if cell.status != "ok":
            continue
        judged += 1
        own = [row for row in rows if (row.run, row.cell) == (cell.run, cell.cell)]
        lines += _judge(expected, f"{cell.config} {cell.backend}", evidence(cell.sdpa_op, own))
    foreign = [row for row in rows if row.cell is None]
    for key in dict.fromkeys((row.run, row.range) for row in foreign):
        signs = evidence(None, [row for row in foreign if (row.run, row.range) == key])
        if signs:
            judged += 1
            lines += _judge(expected, f"run {key[0]}, range {key[1] or '(none)'}", signs)
    if not judged:
        return ["nothing to judge: no cell that ran is shown"]
    return lines


def _judge(expected: Sequence[str], what: str, signs: Sequence[Evidence]) -> list[str]:
    wanted = " or ".join(expected)
    if not signs:
        return [f"{what}: expected {wanted}, but neither an op nor a kernel tells what ran"]
    wrong = [sign for sign in signs if not accepts(expected, sign)]
    if not wrong:
        return []
    found = ", ".join(dict.fromkeys(sign.backend for sign in wrong))
    return [f"{what}: expected {wanted}, but {found} ran ({'; '.join(s.text for s in wrong)})"]
