"""Compare the witnesses of the backend that ran.

A witness is a source of information: the dispatch rules, the backend that PyTorch reports, the op
in the trace, the families of the kernels, or the status of the cell. This module also implements
`kernels --expect`, and detects attention that torch.compile replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, pairwise
from pathlib import Path

from profharness.attention.config import AUTO, SDPA_BACKENDS, parse_config, pytorch_chooses
from profharness.errors import NotFoundError, UsageError, join_few
from profharness.files import shell_command
from profharness.rows import (
    NAIVE_COMPILED,
    REPLACEMENTS,
    CellRow,
    KernelRow,
    preferred_profiler_rows,
)
from profharness.store import ALL_RUNS, Need, Selection, Store, open_store
from profharness.traces.ops import UNFUSED_FLEX

OF_PACKAGES = "fmha"  # the backend name for kernels of packages other than PyTorch
ANOTHER_PACKAGE = "another package"  # how sentences and tables name OF_PACKAGES
# Maps the families of kernels that compute attention to their backends.
FAMILY_BACKENDS = {
    **dict.fromkeys(("flash", "flash_splitkv", "flash_combine", "flash_bwd"), "flash"),
    **dict.fromkeys(("efficient", "efficient_bwd"), "efficient"),
    **dict.fromkeys(("cudnn", "cudnn_bwd"), "cudnn"),
    "flex": "flex",
    "triton": "triton",
    # Kernels of libraries other than PyTorch. The kernel name contains the name of the library.
    **dict.fromkeys(("fmha", "fmha_combine", "fmha_bwd"), OF_PACKAGES),
    **dict.fromkeys(("aotriton", "aotriton_bwd"), "aotriton"),
    **dict.fromkeys(("ck", "ck_combine", "ck_bwd"), "ck"),
    **dict.fromkeys(("aiter", "aiter_combine", "aiter_bwd"), "aiter"),
}
# Libraries of attention kernels on ROCm with their names, and the backends whose ops run them
AMD_LIBRARIES = {"aotriton": "AOTriton", "ck": "Composable Kernel", "aiter": "AITER"}
_ROCM_BACKENDS = ("flash", "efficient")
EAGER = "eager"  # attention without a call of scaled_dot_product_attention
EXPECTED = tuple(dict.fromkeys([*SDPA_BACKENDS, EAGER, *FAMILY_BACKENDS]))
# The math backend and eager attention have no kernels of their own. Both run these families.
_UNFUSED_FAMILIES = {"gemm", "softmax"}
# Maps an expected family to other families that are also accepted, because their kernels complete
# the work of the expected family.
_IMPLIED = {"flash_splitkv": ("flash_combine",)}
_SDPA_OP = re.compile(r"_scaled_dot_product_(flash|efficient|cudnn|fused)?_?attention(_math)?")
_BUILT_IN = "pytorch_flash"  # the namespace of the flash kernels that are part of PyTorch
_OTHER_FLASH = {"fa3": "FlashAttention-3", "fa4": "FlashAttention-4"}


def predicted_rows(
    path: Path, selection: Selection, *, by_op: bool = False, needs: Sequence[Need] = ()
) -> tuple[list[KernelRow], list[CellRow]]:
    """Return the selected kernels, and the selected cells with their predictions. Raise
    NotFoundError if nothing is selected, and UsageError for an unknown backend.
    """
    with open_store(path) as store:
        run = store.find_runs(selection, *needs)
        rows, cells = store.rows(replace(selection, run=run), by_op=by_op)
        if rows or cells:
            return rows, with_predictions(store, cells)
        store.check_backends(selection.backends)
        lack = None if run == ALL_RUNS else store.lack_of_kernels(run)
        if run != ALL_RUNS and lack is None:
            store.require_cells(run, selection.configs, selection.backends)
        where = "the store" if run == ALL_RUNS else f"run {store.run_name(run)}"
    names = [f"config {config}" for config in selection.configs]
    names += [f"backend {name}" for name in selection.backends]
    names += [f"profiler {name}" for name in selection.profilers]
    missing = f"{where} contains nothing for {', '.join(names) or 'kernels'}"
    see = f"to see what is stored, use: {shell_command('runs', store=path)}"
    raise NotFoundError(lack or f"{missing}; {see}")


def with_predictions(store: Store, cells: Sequence[CellRow]) -> list[CellRow]:
    """Return cells of a store with the `predicted` field filled in."""
    environment = lru_cache(maxsize=256)(store.environment)

    @lru_cache(maxsize=4096)
    def predicted(label: str, backend: str, run: str) -> str | None:
        # imported here, because only cells of PyTorch's backends need this module
        from profharness.attention.dispatch.predict import predict_cell

        return predict_cell(parse_config(label), backend, environment(run))

    return [
        replace(cell, predicted=predicted(cell.config, cell.backend, cell.run))
        if of_pytorch(cell.backend)
        else cell
        for cell in cells
    ]


def of_pytorch(backend: str) -> bool:
    """Return whether a backend is one of PyTorch's own, or lets PyTorch choose."""
    return backend in SDPA_BACKENDS or pytorch_chooses(backend)


@dataclass(frozen=True, slots=True)
class Witness:
    """One source of information about the backend that ran, and the backends that it names.

    `name` is `rules`, `choice`, `op`, `kernels` or `status`. The `none` backend means that no
    backend ran.
    """

    name: str
    backends: frozenset[str]
    text: str


def backend_of_op(op: str | None) -> str | None:
    """Return the backend of an ATen op, such as `aten::_scaled_dot_product_flash_attention`. Return
    None for other ops.
    """
    match = _SDPA_OP.search(op or "")
    if match is None:
        return None
    return "math" if match.group(2) else match.group(1)


def backend_that_ran(cell: CellRow) -> str | None:
    """Return the backend of the op in the trace. If there is no such op, return the backend that
    PyTorch reported.
    """
    return backend_of_op(cell.sdpa_op) or cell.choice


def backend_seen(cell: CellRow, rows: Iterable[KernelRow]) -> str | None:
    """Return the backend that ran in a cell, according to its op or, failing that, its kernels.

    Return "none" if PyTorch refused the config, and None if the backend is unknown.
    """
    if cell.status != "ok":
        return "none" if cell.status == "refused" else None
    if (backend := backend_of_op(cell.sdpa_op)) is not None:
        return backend
    ran = ran_backends(rows)
    return ran.pop() if len(ran) == 1 else None


def times_of_auto(cells: Sequence[CellRow], rows: Sequence[KernelRow]) -> dict[str, float]:
    """Return the measured kernel time of a call of `auto` for each config, in ns.

    It is the mean over the profiled calls. Configs whose kernels were not all timed are left out.
    """
    rows_of: dict[str | None, list[KernelRow]] = {}
    for row in preferred_profiler_rows(rows):
        rows_of.setdefault(row.cell, []).append(row)
    times: dict[str, float] = {}
    for cell in cells:
        own = rows_of.get(cell.cell, []) if cell.backend == AUTO else []
        # On a CPU, profiling makes an op take longer.
        known = [row.call_ns for row in own if row.kernel_kind != "op"]
        timed = [time for time in known if time is not None]
        if timed and len(timed) == len(own):
            times.setdefault(cell.config, sum(timed))
    return times


def backend_of_family(family: str, sdpa_op: str | None = None) -> str | None:
    """Return the backend that a kernel belongs to, or None if the kernel does not compute
    attention.

    On ROCm, PyTorch's flash and efficient ops run kernels of AMD's libraries. Such a kernel belongs
    to the backend of its op `sdpa_op`. Outside of these ops, it belongs to its library.
    """
    backend, of_op = FAMILY_BACKENDS.get(family), backend_of_op(sdpa_op)
    return of_op if backend in AMD_LIBRARIES and of_op in _ROCM_BACKENDS else backend


def computes_attention(family: str, kernel: str) -> bool:
    """Return whether a kernel belongs to a fused attention backend.

    `triton` is also the family of Inductor's generated kernels, which have no direction in their
    names and do not compute attention.
    """
    if family != "triton":
        return family in FAMILY_BACKENDS
    from profharness.traces.kernel_names import parse_kernel_name

    return parse_kernel_name(kernel).direction is not None


def _is_generated(row: KernelRow) -> bool:
    """Return whether a kernel is one of Inductor's that computes no attention."""
    return row.family == "triton" and not computes_attention(row.family, row.kernel)


def backend_text(name: str) -> str:
    """Return a backend, or several joined by `and`, as sentences and tables name them."""
    names = (ANOTHER_PACKAGE if each == OF_PACKAGES else each for each in name.split(" and "))
    return " and ".join(names)


def backend_of_kernel(family: str, kernel: str) -> str | None:
    """Return the backend that a kernel belongs to, or None if it is not attention.

    The backend of a kernel from another package than PyTorch is its library, if that is known.
    """
    backend = FAMILY_BACKENDS.get(family)
    if backend != OF_PACKAGES:
        return backend if computes_attention(family, kernel) else None
    from profharness.traces.kernel_names import parse_kernel_name

    library = parse_kernel_name(kernel).backend
    return backend if library == "unknown" else library


def is_another(backend: str, cell: CellRow) -> bool:
    """Return whether a cell neither requested a backend nor ran it."""
    return backend not in (cell.backend, backend_that_ran(cell))


def ran_backends(rows: Iterable[KernelRow], sdpa_op: str | None = None) -> set[str]:
    """Return the backends that the kernels belong to. `math` has no families of its own.

    `sdpa_op` is the op of the kernels whose own op was not recorded.
    """
    names = {
        backend_of_family(row.family, row.sdpa_op or sdpa_op)
        for row in rows
        if computes_attention(row.family, row.kernel)
    }
    return {name for name in names if name is not None}


def witnesses(cell: CellRow, rows: Sequence[KernelRow]) -> list[Witness]:
    """Return the witnesses of a cell that name a backend, in the order of `Witness.name`."""
    clauses: list[tuple[str, Iterable[str], str]] = []
    if pytorch_chooses(cell.backend):
        if cell.predicted is not None:
            text = "an error" if cell.predicted == "none" else cell.predicted
            clauses.append(("rules", [cell.predicted], f"the rules predict {text}"))
    elif cell.backend in SDPA_BACKENDS:
        if cell.predicted == "refused":
            clauses.append(("rules", ["none"], f"the rules refuse {cell.backend}"))
        elif cell.predicted is not None or cell.status == "ok":
            text = f"{cell.backend} was requested as the only backend"
            if cell.predicted:
                text = f"{cell.backend} was requested, and the rules allow this backend"
            clauses.append(("rules", [cell.backend], text))
    if cell.choice in ("none", "error"):
        clauses.append(("choice", ["none"], "PyTorch reports that no backend supports the call"))
    elif cell.choice is not None:
        clauses.append(("choice", [cell.choice], f"PyTorch chose {cell.choice}"))
    op = _op_of(cell, rows)
    if backend := backend_of_op(op):
        name = "overrideable" if backend == "fused" else backend
        clauses.append(("op", [name], f"the op that ran is {op} ({name})"))
    families = {row.family for row in rows if not _is_generated(row)}
    ran, named = ran_backends(rows, op), families & FAMILY_BACKENDS.keys()
    if not ran and (unfused := _unfused_backend(rows, cell)):
        ran, named = {unfused}, _UNFUSED_FAMILIES
    if ran and cell.status == "ok":
        text = f"the kernels belong to family {', '.join(sorted(named))}"
        clauses.append(("kernels", ran, text))
    # The status `oom` is left out, because it does not show which backend was chosen.
    if cell.status in ("refused", "error", "crashed") and of_pytorch(cell.backend):
        text = f"the call failed: {(cell.message or 'no message').splitlines()[0]}"
        if cell.status == "refused":
            text = "PyTorch refused the call"
        clauses.append(("status", ["none"], text))
    return [Witness(name, frozenset(backends), text) for name, backends, text in clauses]


def disagreements(cell: CellRow, rows: Sequence[KernelRow]) -> list[str]:
    """Return a line for each disagreement between the witnesses of a cell."""
    clauses = []
    for _, group in groupby(witnesses(cell, rows), lambda witness: witness.backends):
        *most, last = [witness.text for witness in group]
        clauses.append(f"{', '.join(most)} and {last}" if most else last)
    lines = [f"mismatch: {left}, but {right}" for left, right in pairwise(clauses)]
    return lines + _other_kernels(cell, rows)


def _op_of(cell: CellRow, rows: Sequence[KernelRow]) -> str | None:
    return cell.sdpa_op or next((row.sdpa_op for row in rows if row.sdpa_op), None)


def _other_kernels(cell: CellRow, rows: Sequence[KernelRow]) -> list[str]:
    """Return a line if PyTorch's flash op ran kernels of FlashAttention-3 or FlashAttention-4."""
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
        (
            f"mismatch: the op that ran is {cell.sdpa_op} (flash), but its kernels come from "
            f"{_OTHER_FLASH[name]} and not from PyTorch; the program may have called "
            "activate_flash_attention_impl"
        )
        for name in others
        if name in _OTHER_FLASH
    ]


# Evidence that a backend computed attention: the backend, the family of the kernels, and a text.
# The family is None if the evidence is an op. Backends that cannot be told apart are joined by _OR.
Sign = tuple[str, str | None, str]
_OR = " or "


def _unfused_backend(rows: Sequence[KernelRow], cell: CellRow | None) -> str | None:
    """Return what ran matrix products and a softmax without an SDPA op, or None if they did not run.

    The cells of PyTorch's backends call scaled_dot_product_attention, so they ran math. Elsewhere,
    only recorded ops show that it was not called.
    """
    unfused = [row for row in rows if row.family in _UNFUSED_FAMILIES]
    if {row.family for row in unfused} != _UNFUSED_FAMILIES:
        return None
    if cell is not None and of_pytorch(cell.backend):
        return "math"
    if any(UNFUSED_FLEX in (row.op_path or "").split(";") for row in unfused):
        return "flex"
    return EAGER if all(row.op_path for row in unfused) else f"math{_OR}{EAGER}"


def _signs(rows: Sequence[KernelRow], cell: CellRow | None = None) -> list[Sign]:
    sdpa_op = None if cell is None else cell.sdpa_op
    ops = dict.fromkeys([sdpa_op, *(row.sdpa_op for row in rows)])
    families = dict.fromkeys(
        (row.family, row.sdpa_op or sdpa_op) for row in rows if not _is_generated(row)
    )
    signs: list[Sign] = [
        (backend, None, f"op {op}") for op in ops if (backend := backend_of_op(op))
    ]
    signs += dict.fromkeys(
        (backend, family, f"{family} kernels")
        for family, op in families
        if (backend := backend_of_family(family, op))
    )
    if not signs and (unfused := _unfused_backend(rows, cell)):
        unknown = "; the trace does not contain their ops" if _OR in unfused else ""
        signs.append((unfused, None, f"gemm and softmax kernels{unknown}"))
    return signs


def _accepts(expected: Sequence[str], backend: str, family: str | None) -> bool:
    """Return whether an op or a family of kernels was expected. `family` is None for an op.

    An expected backend accepts its op and all its families. An expected family accepts itself and
    the ops that run it. Of backends that cannot be told apart, all must be expected.
    """
    return {*backend.split(_OR)} <= {*expected} or any(
        name == family
        or family in _IMPLIED.get(name, ())
        or (FAMILY_BACKENDS.get(family or "") == name)
        or (family is None and backend in _backends_of_ops(name))
        for name in expected
    )


def _backends_of_ops(family: str) -> tuple[str | None, ...]:
    """Return the backends whose ops run kernels of a family."""
    backend = FAMILY_BACKENDS.get(family)
    return _ROCM_BACKENDS if backend in AMD_LIBRARIES else (backend,)


def check_expected_names(expected: Sequence[str]) -> None:
    """Raise UsageError for a name that is neither a backend nor a family of attention kernels."""
    for name in expected:
        if name not in EXPECTED:
            raise UsageError(f"unknown --expect {name!r}; choose from {', '.join(EXPECTED)}")


def unmet_expectations(
    expected: Sequence[str],
    rows: Sequence[KernelRow],
    cells: Sequence[CellRow],
    names: Mapping[str, str],
) -> list[str]:
    """Return a line for each cell, and for each range of a foreign trace, whose backend is
    unexpected or unknown. Ignore refused and failed cells. If there is nothing to check, return a
    line that reports this. `names` maps the ids of runs to their names.
    """
    judged: list[tuple[str, list[Sign]]] = []
    for cell in cells:
        if cell.status == "ok":
            own = [row for row in rows if (row.run, row.cell) == (cell.run, cell.cell)]
            judged.append((f"{cell.config} {cell.backend}", _signs(own, cell)))
    foreign = [row for row in rows if row.cell is None]
    for run, name in dict.fromkeys((row.run, row.range) for row in foreign):
        own = [row for row in foreign if (row.run, row.range) == (run, name)]
        if signs := _signs(own):
            judged.append((f"run {names.get(run, run)}, range {name or '(none)'}", signs))
    if not judged:
        return ["nothing to check: none of the cells shown has run"]
    wanted, lines = " or ".join(expected), []
    for place, signs in judged:
        wrong = [sign for sign in signs if not _accepts(expected, *sign[:2])]
        if not signs:
            lines.append(
                f"{place}: expected {wanted}, but neither an op nor a kernel shows what ran"
            )
        elif wrong:
            ran = ", ".join(dict.fromkeys(backend for backend, _, _ in wrong))
            texts = "; ".join(text for _, _, text in wrong)
            lines.append(f"{place}: expected {wanted}, but {ran} ran ({texts})")
    return lines


SHOWN = 3  # maximum number of configs that a note about replacements lists


def replaced_by(cell: CellRow, rows: Sequence[KernelRow] = ()) -> str | None:
    """Return the backend that ran because torch.compile replaced naive attention in a cell. Return
    an empty string if the backend is unknown, and None if there is no evidence of a replacement.
    """
    if cell.backend != NAIVE_COMPILED or cell.status != "ok":
        return None
    # Inductor generates kernels of the family `triton` if it does not replace the attention.
    ran = {backend_of_op(_op_of(cell, rows)), *ran_backends(rows)} - {None, "triton"}
    if not ran and not (cell.tuning or {}).get(REPLACEMENTS):
        return None
    return " and ".join(sorted(map(str, ran)))


def replacement_text(backend: str) -> str:
    """Return a sentence about a replacement. `backend` is the result of `replaced_by`."""
    which = f", which ran {backend}" if backend else ""
    return f"torch.compile replaced the attention with scaled_dot_product_attention{which}"


def replacement_notes(cells: Iterable[CellRow]) -> list[tuple[str, str]]:
    """Return notes about cells whose attention torch.compile replaced. Each note is a pair of a text
    that names the cells and a sentence about them.
    """
    configs: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        if (backend := replaced_by(cell)) is not None:
            configs.setdefault((cell.backend, backend), []).append(cell.config)
    return [
        (f"{name} at {join_few(labels, SHOWN)}", replacement_text(backend))
        for (name, backend), labels in configs.items()
    ]
