"""Compare four sources that say which backend ran, which are called witnesses: the rules, the
backend that PyTorch reports, the op in the trace, and the families of the kernels.

This module also has the gate of `kernels --expect`, detects what torch.compile replaced, and
compares kernels between profilers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from profharness.attention.config import SDPA_BACKENDS, parse_config, pytorch_chooses
from profharness.errors import NotFoundError, UsageError, join_few
from profharness.files import shell_command
from profharness.rows import (
    NAIVE_COMPILED,
    NCU,
    NSYS,
    REPLACEMENTS,
    TORCH,
    TRACE_PROFILERS,
    CellRow,
    KernelRow,
    Triple,
)
from profharness.store import ALL_RUNS, Need, Selection, Store, open_store

# The kernel families that compute attention, and the backend of each.
FAMILY_BACKENDS = {
    **dict.fromkeys(("flash", "flash_splitkv", "flash_combine", "flash_bwd"), "flash"),
    **dict.fromkeys(("efficient", "efficient_bwd"), "efficient"),
    **dict.fromkeys(("cudnn", "cudnn_bwd"), "cudnn"),
    "flex": "flex",
    "triton": "triton",
    # from libraries other than PyTorch; the name of the kernel contains the library
    **dict.fromkeys(("fmha", "fmha_combine", "fmha_bwd"), "fmha"),
}
EXPECTED = tuple(dict.fromkeys([*SDPA_BACKENDS, *FAMILY_BACKENDS]))
# families of the kernels that the math backend runs, which has no kernels of its own
_MATH_FAMILIES = {"gemm", "softmax"}
# Families whose kernels only finish the work of another family. If the other family is expected,
# they are accepted too.
_IMPLIED = {"flash_splitkv": ("flash_combine",)}
_SDPA_OP = re.compile(r"_scaled_dot_product_(flash|efficient|cudnn|fused)?_?attention(_math)?")
_BUILT_IN = "pytorch_flash"  # the namespace of the flash kernels that are part of PyTorch
_OTHER_FLASH = {"fa3": "FlashAttention-3", "fa4": "FlashAttention-4"}


def predicted_rows(
    path: Path, selection: Selection, *, by_op: bool = False, needs: Sequence[Need] = ()
) -> tuple[list[KernelRow], list[CellRow]]:
    """Return the selected kernels and cells, with the field `predicted` of the cells filled in.
    Raise NotFoundError if the selection is empty.
    """
    with open_store(path) as store:
        run = store.find_runs(selection, *needs)
        rows, cells = store.rows(replace(selection, run=run), by_op=by_op)
        if rows or cells:
            return rows, with_predictions(store, cells)
        lack = None if run == ALL_RUNS else store.lack_of_kernels(run)
    names = [f"config {config}" for config in selection.configs]
    names += [f"backend {name}" for name in selection.backends]
    names += [f"profiler {name}" for name in selection.profilers]
    where = "the store" if run == ALL_RUNS else f"run {run}"
    stored = shell_command("runs", store=path)
    raise NotFoundError(
        lack
        or f"{where} has nothing of: {', '.join(names) or 'kernels'}; see what is stored with: {stored}"
    )


def with_predictions(store: Store, cells: Sequence[CellRow]) -> list[CellRow]:
    """Return cells of a store with the field `predicted` filled in. Equal cells of one run are
    evaluated only once.
    """
    environment = lru_cache(maxsize=256)(store.environment)

    @lru_cache(maxsize=4096)
    def predicted(label: str, backend: str, run: str) -> str | None:
        from profharness.attention.dispatch.predict import (
            predict_cell,
        )  # imported here because only cells of PyTorch's backends need it

        return predict_cell(parse_config(label), backend, environment(run))

    return [
        replace(cell, predicted=predicted(cell.config, cell.backend, cell.run))
        if of_pytorch(cell.backend)
        else cell
        for cell in cells
    ]


def of_pytorch(backend: str) -> bool:
    """Return whether PyTorch's dispatcher decides which backend runs. This is so for SDPA's own
    backends, and for settings that permit several of them.
    """
    return backend in SDPA_BACKENDS or pytorch_chooses(backend)


@dataclass(frozen=True, slots=True)
class Witness:
    """The backends that one source of evidence names. The source is `rules`, `choice`, `op`,
    `kernels` or `status`. The backend `none` means that nothing ran.
    """

    name: str
    backends: frozenset[str]
    text: str


def backend_of_op(op: str | None) -> str | None:
    """Return the SDPA backend of an ATen op, such as flash for
    `aten::_scaled_dot_product_flash_attention_for_cpu`.
    """
    match = _SDPA_OP.search(op or "")
    if match is None:
        return None
    return "math" if match.group(2) else match.group(1)


def backend_that_ran(cell: CellRow) -> str | None:
    """Return the backend of the op in the trace. If there is no trace, return the backend that
    PyTorch chose.
    """
    return backend_of_op(cell.sdpa_op) or cell.choice


def is_another(backend: str, cell: CellRow) -> bool:
    """Return whether a backend is neither the backend that the cell requested nor the backend that
    ran.
    """
    return backend not in (cell.backend, backend_that_ran(cell))


def ran_backends(rows: Iterable[KernelRow]) -> set[str]:
    """Return the backends to which the families of the kernels belong. The result is empty for
    math, which has no kernels of its own.
    """
    return {FAMILY_BACKENDS[row.family] for row in rows if row.family in FAMILY_BACKENDS}


def witnesses(cell: CellRow, rows: Sequence[KernelRow]) -> list[Witness]:
    """Return the witnesses of a cell that name a backend, in the order from the prediction to the
    kernels.
    """
    clauses = {
        "rules": _predicted_clause(cell),
        "choice": _choice(cell),
        "op": _op(cell, rows),
        "kernels": _kernels(cell, rows),
        "status": _failure_clause(cell),
    }
    return [
        Witness(name, frozenset(clause[0]), clause[1]) for name, clause in clauses.items() if clause
    ]


def disagreements(cell: CellRow, rows: Sequence[KernelRow]) -> list[str]:
    """Return one line for each disagreement between the witnesses of a cell. The line names both
    sides.
    """
    clauses = []
    for _, group in groupby(witnesses(cell, rows), lambda witness: witness.backends):
        *most, last = [witness.text for witness in group]
        clauses.append(f"{', '.join(most)} and {last}" if most else last)
    lines = [f"mismatch: {left}, but {right}" for left, right in pairwise(clauses)]
    return lines + _other_kernels(cell, rows)


_Clause = tuple[set[str], str]  # the backends that a witness names, and a text


def _predicted_clause(cell: CellRow) -> _Clause | None:
    """Return what the rules predict. If there is no prediction for a forced backend that ran,
    return that backend itself.
    """
    if pytorch_chooses(cell.backend):
        if cell.predicted is None:
            return None
        text = "that PyTorch raises" if cell.predicted == "none" else cell.predicted
        return {cell.predicted}, f"the rules predict {text}"
    if cell.backend not in SDPA_BACKENDS:
        return None
    if cell.predicted == "refused":
        return {"none"}, f"the rules refuse {cell.backend}"
    if cell.predicted is None and cell.status != "ok":
        return None
    what = "the rules take it" if cell.predicted else "it is the one permitted"
    return {cell.backend}, f"{cell.backend} is asked for, {what}"


def _choice(cell: CellRow) -> _Clause | None:
    if cell.choice in ("none", "error"):
        return {"none"}, "PyTorch says that no backend takes it"
    return ({cell.choice}, f"PyTorch chose {cell.choice}") if cell.choice is not None else None


def _op_of(cell: CellRow, rows: Sequence[KernelRow]) -> str | None:
    return cell.sdpa_op or next((row.sdpa_op for row in rows if row.sdpa_op), None)


def _op(cell: CellRow, rows: Sequence[KernelRow]) -> _Clause | None:
    op = _op_of(cell, rows)
    backend = backend_of_op(op)
    if backend is None:
        return None
    name = "overrideable" if backend == "fused" else backend
    return {name}, f"the op that ran is {op} ({name})"


def _kernels(cell: CellRow, rows: Sequence[KernelRow]) -> _Clause | None:
    families = {row.family for row in rows}
    ran, named = ran_backends(rows), families & FAMILY_BACKENDS.keys()
    if not ran and families >= _MATH_FAMILIES:
        ran, named = {"math"}, _MATH_FAMILIES
    if not ran or cell.status != "ok":
        return None
    return ran, f"the kernels are of family {', '.join(sorted(named))}"


def _failure_clause(cell: CellRow) -> _Clause | None:
    """Return the clause of a cell that failed, if PyTorch's dispatcher selects its backend. A cell
    that ran out of memory has no clause, because this says nothing about the choice.
    """
    if not of_pytorch(cell.backend):
        return None
    if cell.status == "refused":
        return {"none"}, "PyTorch refused the call"
    if cell.status in ("error", "crashed"):
        return {"none"}, f"the call failed: {(cell.message or 'no message').splitlines()[0]}"
    return None


def _other_kernels(cell: CellRow, rows: Sequence[KernelRow]) -> list[str]:
    """Return a line for each FlashAttention-3 or -4 that ran under PyTorch's flash op. In this case
    the backend is right, but its kernels are not PyTorch's own.
    """
    if backend_of_op(cell.sdpa_op) != "flash" or not of_pytorch(cell.backend):
        return []
    names = dict.fromkeys(
        row.kernel
        for row in rows
        if row.family.startswith("flash")
        and row.kernel_kind == "kernel"
        and _BUILT_IN not in row.kernel
    )
    if not names:
        return []
    # loading the patterns of kernel_names takes 20 ms, and most queries do not need them
    from profharness.traces.kernel_names import parse_kernel_name

    others = dict.fromkeys(parse_kernel_name(name).backend for name in names)
    return [
        f"mismatch: the op that ran is {cell.sdpa_op} (flash), but the kernels are "
        f"{_OTHER_FLASH[name]}'s, not PyTorch's own; activate_flash_attention_impl does that"
        for name in others
        if name in _OTHER_FLASH
    ]


# Evidence of what computed attention: the backend, the family of the kernels (None for an op) and a
# text.
Sign = tuple[str, str | None, str]


def _signs(sdpa_op: str | None, rows: Sequence[KernelRow]) -> list[Sign]:
    """Return the evidence of what computed attention, which is each op and each attention family.
    If there are none, gemm and softmax kernels are evidence of math.
    """
    ops = dict.fromkeys([sdpa_op, *(row.sdpa_op for row in rows)])
    families = dict.fromkeys(row.family for row in rows)
    signs: list[Sign] = [
        (backend, None, f"op {op}") for op in ops if (backend := backend_of_op(op))
    ]
    signs += [
        (FAMILY_BACKENDS[family], family, f"{family} kernels")
        for family in families
        if family in FAMILY_BACKENDS
    ]
    if not signs and families.keys() >= _MATH_FAMILIES:
        signs.append(("math", None, "gemm and softmax kernels"))
    return signs


def _accepts(expected: Sequence[str], backend: str, family: str | None) -> bool:
    """Return whether a backend or family was expected. The name of a backend covers its op and its
    families. The name of a family covers the family itself and the op of its backend.
    """
    return any(
        name in (backend, family)
        or family in _IMPLIED.get(name, ())
        or (family is None and FAMILY_BACKENDS.get(name) == backend)
        for name in expected
    )


def check_expected_names(expected: Sequence[str]) -> None:
    """Raise UsageError for a name that is neither an SDPA backend nor an attention family."""
    for name in expected:
        if name not in EXPECTED:
            raise UsageError(f"--expect {name!r}: not one of {', '.join(EXPECTED)}")


def unmet_expectations(
    expected: Sequence[str], rows: Sequence[KernelRow], cells: Sequence[CellRow]
) -> list[str]:
    """Return one line for each cell in which something else ran than expected. For a foreign trace,
    return one line per range. Refused and failed cells are ignored. If nothing at all could be
    checked, return a line that says so, so that the gate fails.
    """
    judged: list[tuple[str, list[Sign]]] = []
    for cell in cells:
        if cell.status == "ok":
            own = [row for row in rows if (row.run, row.cell) == (cell.run, cell.cell)]
            judged.append((f"{cell.config} {cell.backend}", _signs(cell.sdpa_op, own)))
    foreign = [row for row in rows if row.cell is None]
    for run, name in dict.fromkeys((row.run, row.range) for row in foreign):
        own = [row for row in foreign if (row.run, row.range) == (run, name)]
        if signs := _signs(None, own):
            judged.append((f"run {run}, range {name or '(none)'}", signs))
    if not judged:
        return ["nothing to judge: no cell that ran is shown"]
    names, lines = " or ".join(expected), []
    for place, signs in judged:
        wrong = [sign for sign in signs if not _accepts(expected, *sign[:2])]
        if not signs:
            lines.append(
                f"{place}: expected {names}, but neither an op nor a kernel tells what ran"
            )
        elif wrong:
            ran = ", ".join(dict.fromkeys(backend for backend, _, _ in wrong))
            texts = "; ".join(text for _, _, text in wrong)
            lines.append(f"{place}: expected {names}, but {ran} ran ({texts})")
    return lines


SHOWN = 3  # maximum number of configs in a sentence about replacements


@dataclass(frozen=True, slots=True)
class Replacement:
    """A cell whose attention torch.compile replaced by SDPA."""

    backend: str
    config: str
    took: str | None  # None if the counter of Inductor is the only evidence of the replacement


def replacement(cell: CellRow, rows: Sequence[KernelRow] = ()) -> Replacement | None:
    """Return what replaced the attention of a cell. Return None if there is no evidence of a
    replacement in the op, the kernels (`rows`) or the `tuning` of the cell.
    """
    if cell.backend != NAIVE_COMPILED or cell.status != "ok":
        return None
    # `triton` is the family of the kernel that Inductor generates if it does not replace the
    # attention
    ran = {backend_of_op(_op_of(cell, rows)), *ran_backends(rows)} - {None, "triton"}
    if not ran and not (cell.tuning or {}).get(REPLACEMENTS):
        return None
    return Replacement(cell.backend, cell.config, " and ".join(sorted(map(str, ran))) or None)


def replacements(cells: Iterable[CellRow]) -> tuple[Replacement, ...]:
    """Return the cells in which PyTorch ran another backend than the requested one."""
    return tuple(entry for entry in map(replacement, cells) if entry is not None)


def replacement_text(took: str | None) -> str:
    """Return a sentence about a replacement. `took` is the backend that SDPA then selected, or None
    if it is unknown.
    """
    which = f", which took {took}" if took else ""
    return f"torch.compile replaced it by scaled_dot_product_attention{which}"


def replacement_notes(replaced: Sequence[Replacement]) -> list[tuple[str, str]]:
    """Return pairs of a text that names the cells, such as `naive-compiled at b1-…-fp16`, and a
    sentence about them. There is one pair for each backend and each backend that replaced it.
    """
    configs: dict[tuple[str, str | None], list[str]] = {}
    for entry in replaced:
        configs.setdefault((entry.backend, entry.took), []).append(entry.config)
    notes = []
    for (backend, took), labels in configs.items():
        notes.append((f"{backend} at {join_few(labels, SHOWN)}", replacement_text(took)))
    return notes


MAX_TIME_RATIO = 1.25
MIN_TIME_DIFFERENCE_NS = 2000
# kinds of rows that ncu does not see, because it profiles kernels only
UNSEEN_BY_NCU = ("memcpy", "memset", "op")
# The values on which all profilers must agree: the field of the row, the code of a disagreement,
# and the name of the value.
_COMPARED = (
    ("launches_per_call", "launches", "launches per call"),
    ("registers_per_thread", "registers", "registers per thread"),
    ("shared_bytes", "shared_memory", "bytes of shared memory"),
)
_Key = tuple[str | None, str | None, str, Triple | None, Triple | None, int]


@dataclass(frozen=True, slots=True)
class Disagreement:
    """One disagreement between profilers."""

    code: str  # one of `missing`, `launches`, `registers`, `shared_memory` and `time`
    text: str


@dataclass(frozen=True, slots=True)
class JoinedKernel:
    """One kernel of one cell, as each of the profilers recorded it."""

    config: str | None
    backend: str | None
    kernel: str
    kernel_short: str
    grid: Triple | None
    block: Triple | None
    rows: dict[str, KernelRow]  # the rows of this kernel by profiler
    disagreements: tuple[Disagreement, ...] = ()

    def value(self, name: str) -> Any:
        """Return the value of a field from the first profiler that recorded it, in the order of
        TRACE_PROFILERS.
        """
        return next(iter(_values(self.rows, name).values()), None)

    def metric(self, name: str) -> float | None:
        """Return the value of a counter, or None if ncu did not collect it for this kernel."""
        row = self.rows.get(NCU)
        return row.metrics[name][0] if row is not None and name in row.metrics else None


def join_kernels(rows: Iterable[KernelRow]) -> list[JoinedKernel]:
    """Join the kernels of all cells across profilers. Two rows belong together if they have the
    same canonical name, grid and block. The result is in the order of the first row of each kernel.

    For each profiler, only the newest run that has a config on a backend is used. `rows` must start
    with the newest run. If a profiler has several rows with the same key, they are joined in the
    order of their first launch.
    """
    runs: dict[tuple[str | None, str | None, str], str] = {}
    places: dict[tuple[Any, ...], int] = {}
    joined: dict[_Key, dict[str, KernelRow]] = {}
    for row in rows:
        if runs.setdefault((row.config, row.backend, row.profiler), row.run) != row.run:
            continue
        key = (row.config, row.backend, row.kernel, row.grid, row.block)
        place = places[row.profiler, *key] = places.get((row.profiler, *key), -1) + 1
        joined.setdefault((*key, place), {})[row.profiler] = row
    profilers: dict[tuple[str | None, str | None], set[str]] = {}
    for config, backend, profiler in runs:
        profilers.setdefault((config, backend), set()).add(profiler)
    return [_joined_kernel(key, own, profilers[key[:2]]) for key, own in joined.items()]


def _joined_kernel(key: _Key, rows: dict[str, KernelRow], profilers: set[str]) -> JoinedKernel:
    config, backend, kernel, grid, block, _ = key
    first = next(iter(rows.values()))
    expected = {name for name in profilers if name != NCU or first.kernel_kind not in UNSEEN_BY_NCU}
    points = [
        Disagreement("missing", f"{name} did not see it")
        for name in TRACE_PROFILERS
        if name in expected - rows.keys()
    ]
    for name, code, what in _COMPARED:
        values = _values(rows, name)
        if len(set(values.values())) > 1:
            texts = ", ".join(f"{profiler} {value:g}" for profiler, value in values.items())
            points.append(Disagreement(code, f"{what}: {texts}"))
    points += _times(rows)
    return JoinedKernel(
        config, backend, kernel, first.kernel_short, grid, block, rows, tuple(points)
    )


def _values(rows: dict[str, KernelRow], name: str) -> dict[str, Any]:
    """Return the values of a field by profiler, in the order of TRACE_PROFILERS. Values that are
    None are left out.
    """
    ordered = [profiler for profiler in TRACE_PROFILERS if profiler in rows]
    values = {profiler: getattr(rows[profiler], name) for profiler in ordered}
    return {profiler: value for profiler, value in values.items() if value is not None}


def _times(rows: dict[str, KernelRow]) -> list[Disagreement]:
    """Compare the kernel times of the profilers. A difference between nsys and torch is reported in
    both directions. ncu is reported only if its time is shorter, because its cold caches make
    kernels slower.
    """
    torch, nsys, ncu = rows.get(TORCH), rows.get(NSYS), rows.get(NCU)
    points = []
    for warm, other, both_ways in ((torch, nsys, True), (torch or nsys, ncu, False)):
        if warm is None or other is None or not warm.duration_ns or not other.duration_ns:
            continue
        ratio = other.duration_ns / warm.duration_ns
        odd = ratio < 1 / MAX_TIME_RATIO or (both_ways and ratio > MAX_TIME_RATIO)
        if odd and abs(other.duration_ns - warm.duration_ns) > MIN_TIME_DIFFERENCE_NS:
            text = f"{other.profiler} takes {ratio:.2f} times as long as {warm.profiler}"
            points.append(Disagreement("time", text))
    return points


def cold_ratios(joined: Sequence[JoinedKernel]) -> list[float]:
    """Return the ratio of ncu's time to torch's time for each kernel. If torch has no time, nsys's
    time is used.
    """
    return [
        ncu.duration_ns / warm.duration_ns
        for kernel in joined
        if (ncu := kernel.rows.get(NCU))
        and (warm := kernel.rows.get(TORCH) or kernel.rows.get(NSYS))
        and ncu.duration_ns
        and warm.duration_ns
    ]
