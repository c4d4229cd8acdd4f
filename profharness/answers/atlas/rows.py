"""What an atlas and its model say of configs as the rows that a store would have of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from profharness.answers.atlas.answer import Place, Predicted, nanoseconds, predict_all
from profharness.answers.atlas.data import Launch
from profharness.config import Config
from profharness.devices import Device, find_gpu, occupancy
from profharness.kernel_names import parse_kernel_name
from profharness.rows import CellRow, KernelRow

PROFILER = "atlas"  # who tells the rows of kernels that no profiler saw


def kernel_rows(
    place: Place, configs: Sequence[Config], backends: Sequence[str]
) -> tuple[list[KernelRow], list[CellRow]]:
    """What `kernels` shows of a place: rows as of a store, marked by their source. run is the place."""
    rows: list[KernelRow] = []
    cells: list[CellRow] = []
    for answer in predict_all(place, configs):
        for told in answer:
            if told.backend in backends:
                cells.append(_cell_row(told, place))
                rows += _kernel_rows(told, place)
    return rows, cells


def _cell_row(told: Predicted, place: Place) -> CellRow:
    message = told.outside if told.status == "ok" else None
    return CellRow(
        run=place.text,
        cell=f"{told.config} {told.backend}",
        config=told.config,
        backend=told.backend,
        status=told.status,
        message=message,
        choice=told.choice,
        sdpa_op=None,
        iterations=1,
        refusals=told.reasons,
        warnings=(),
        predicted=told.choice,
    )


def _kernel_rows(told: Predicted, place: Place) -> Iterator[KernelRow]:
    """Launches of one kernel in one configuration are one row, as of a capture."""
    groups: dict[tuple[Any, ...], list[tuple[int, Launch]]] = {}
    for order, launch in enumerate(told.kernels or ()):
        key = (launch.kernel, launch.grid, launch.block, launch.registers, launch.shared_bytes)
        groups.setdefault(key, []).append((order, launch))
    whole = sum(nanoseconds(launch.time_us) or 0 for launch in told.kernels or ())
    for same in groups.values():
        yield _kernel_row(told, place, same, whole)


def _kernel_row(
    told: Predicted, place: Place, same: Sequence[tuple[int, Launch]], whole_ns: int
) -> KernelRow:
    order, launch = same[0]
    name = parse_kernel_name(launch.kernel)
    times = sorted(ns for _, each in same if (ns := nanoseconds(each.time_us)) is not None)
    total = sum(times) if len(times) == len(same) else None
    filled = None
    if launch.block is not None and None not in (launch.registers, launch.shared_bytes):
        major, minor = place.rules.capability
        device = Device(0, place.gpu, major, minor, find_gpu(place.gpu).sm_count or 0)
        x, y, z = launch.block
        filled = occupancy(x * y * z, launch.registers or 0, launch.shared_bytes or 0, device)
    return KernelRow(
        run=place.text,
        config=told.config,
        backend=told.backend,
        cell=f"{told.config} {told.backend}",
        profiler=PROFILER,
        status=told.status,
        range=None,
        kernel=launch.kernel,
        kernel_short=name.short,
        kernel_kind="kernel" if launch.grid is not None else "memset",
        family=name.family,
        grid=launch.grid,
        block=launch.block,
        registers_per_thread=launch.registers,
        static_shared_bytes=None,
        dynamic_shared_bytes=None,
        shared_bytes=launch.shared_bytes,
        launches=len(same),
        launches_per_call=float(len(same)),
        duration_ns=times[len(times) // 2] if total is not None else None,
        total_ns=total,
        min_ns=times[0] if total is not None else None,
        max_ns=times[-1] if total is not None else None,
        share=total / whole_ns if total is not None and whole_ns else None,
        first_ns=order,
        op_path=None,
        sdpa_op=None,
        occupancy=filled.fraction if filled else None,
        occupancy_limiter=filled.limiter if filled else None,
        device=0,
        shared_share=filled.shared_share if filled else None,
        source=told.source,
    )
