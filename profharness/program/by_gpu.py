"""Compare the attention of one model on several GPU models, layer by layer."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from profharness.device_types import device_name
from profharness.errors import NotFoundError, UsageError
from profharness.program.changes import environment_changes
from profharness.program.layer_map import LayerMap, find_layers
from profharness.program.matching import MatchedLayers, find_program, match_layers
from profharness.store import Store

SOFTWARE = ("torch", "torch_cuda", "cudnn", "driver")  # keys of an environment


@dataclass(frozen=True, slots=True)
class GpuLayers:
    """One run and its device."""

    name: str  # the device's, with the run if two have the same
    device: str
    layers: LayerMap
    attention_ns: float
    changes: tuple[str, ...]  # versions that differ from those of the first run


@dataclass(frozen=True, slots=True)
class LayersByGpu:
    """The map of each run, and the matched layers of all of them."""

    classes: tuple[GpuLayers, ...]
    rows: tuple[MatchedLayers, ...]


def find_layers_by_gpu(
    store: Store, runs: Sequence[str], *, torch: str | None = None
) -> LayersByGpu:
    """Compare several runs with the first. `torch` as in `find_layers`. Raise NotFoundError for a
    run without attention calls, UsageError for a capture of configs.
    """
    if captures := [run for run in runs if store.cells(run)]:
        remedy = "leave it out"
        if len(captures) == len(runs):
            remedy = f"compare such runs with profharness report {' '.join(runs)}"
        raise UsageError(f"run {captures[0]} is of configs, and layers are a program's; {remedy}")
    return compare_maps(store, [find_layers(store, run, torch=torch) for run in runs])


def find_programs(store: Store, runs: Sequence[str]) -> LayersByGpu:
    """Compare those of the runs that are programs, which may be none or one."""
    maps = []
    for run in runs:
        with contextlib.suppress(NotFoundError):  # a trace without attention
            maps += [] if store.cells(run) else [find_layers(store, run)]
    return compare_maps(store, maps)


def compare_maps(store: Store, maps: Sequence[LayerMap]) -> LayersByGpu:
    """Compare programs by their maps."""
    runs = [layers.run for layers in maps]
    environments = [store.environment(run) for run in runs]
    devices = [
        layers.gpu or device_name(environment) or "CPU"
        for layers, environment in zip(maps, environments, strict=True)
    ]
    alike = Counter(devices)
    classes = tuple(
        GpuLayers(
            name=device if alike[device] == 1 else f"{device} ({layers.run})",
            device=device,
            layers=layers,
            attention_ns=sum(row.kernel_ns for row in layers.rows),
            changes=software_changes(environments[0], environment),
        )
        for device, layers, environment in zip(devices, maps, environments, strict=True)
    )
    programs = [find_program(store, run, ()) for run in runs]
    return LayersByGpu(classes, match_layers([each for each in programs if each is not None]))


def software_changes(one: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the versions that differ between two environments, `torch 2.11.0 → 2.12.0`."""
    return tuple(
        f"{each.key} {each.baseline} → {each.candidate}"
        for each in environment_changes(one, other)
        if each.key in SOFTWARE
    )
