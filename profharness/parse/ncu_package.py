"""An .ncu-rep through NVIDIA's `ncu_report` module: the PyPI package, or the copy inside Nsight
Compute.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from profharness.parse.ncu_rows import CONSTANTS, NcuLaunch, NcuReport, NvtxRange

MODULE = "ncu_report"
EXTRAS = Path("extras", "python", f"{MODULE}.py")
KERNEL = 0  # IAction.workload_type(); 1 and up are ranges, command lists and graphs
STRING, FLOATS, INTEGERS = 2, (3, 4), (5, 6)  # IMetric.kind()


def import_package() -> Any | None:
    """The installed `ncu_report` module; None where there is none or it does not load."""
    try:
        return importlib.import_module(MODULE)
    except ImportError:
        return None


def import_from_tool(ncu: Path) -> Any | None:
    """The `ncu_report` module of the Nsight Compute that this ncu belongs to, else None.

    Its folder is on sys.path only while it is imported.
    """
    for folder in ncu.resolve().parents[:5]:
        if (folder / EXTRAS).is_file():
            sys.path.insert(0, str((folder / EXTRAS).parent))
            try:
                return import_package()
            finally:
                sys.path.pop(0)
    return None


def read_with(module: Any, path: Path) -> NcuReport | None:
    """The report as the module reads it; None when it finds nothing in it, which is how it tells
    of a file that it cannot read.
    """
    context = module.load_report(str(path))
    if not context.num_ranges():
        return None
    units: dict[str, str] = {}
    launches: list[NcuLaunch] = []
    devices: set[int] = set()
    skipped = 0
    for action in _actions(context):
        if action.workload_type() == KERNEL:
            launches.append(_launch(action, units, devices))
        else:
            skipped += 1
    return NcuReport(launches, units, skipped)


def _actions(context: Any) -> Iterator[Any]:
    for place in range(context.num_ranges()):
        part = context.range_by_idx(place)
        for index in range(part.num_actions()):
            yield part.action_by_idx(index)


def _launch(action: Any, units: dict[str, str], devices: set[int]) -> NcuLaunch:
    device = _index(action, "launch__device_id")
    if device is None:
        device = _index(action, "device__attribute_device_index") or 0
    values: dict[str, float] = {}
    texts: dict[str, str] = {}
    for name in action.metric_names():
        if device in devices and name.startswith(CONSTANTS):
            continue
        metric = action.metric_by_name(name)
        if name not in units:
            units[name] = metric.unit()
        kind = metric.kind()
        if kind == STRING:
            texts[name] = metric.as_string()
        elif kind in FLOATS or kind in INTEGERS:
            value = float(metric.as_uint64() if kind in INTEGERS else metric.as_double())
            if math.isfinite(value):
                values[name] = value
    devices.add(device)
    start_end, push_pop = _nvtx(action)
    return NcuLaunch(
        name=action.name(action.NameBase_MANGLED),
        values=values,
        texts=texts,
        device=device,
        stream=_index(action, "launch__stream_id"),
        start_end=start_end,
        push_pop=push_pop,
    )


def _index(action: Any, name: str) -> int | None:
    metric = action.metric_by_name(name)
    return None if metric is None else int(metric.as_uint64())


def _nvtx(action: Any) -> tuple[tuple[NvtxRange, ...], tuple[NvtxRange, ...]]:
    """The start/end ranges and the push/pop stacks of every domain at the launch."""
    state = action.nvtx_state()
    if state is None:
        return (), ()
    domains = [state.domain_by_id(one) for one in sorted(state.domains())]
    named = [(domain.name(), domain) for domain in domains]
    return (
        tuple(NvtxRange(name, text) for name, one in named for text in one.start_end_ranges()),
        tuple(NvtxRange(name, text) for name, one in named for text in one.push_pop_ranges()),
    )
