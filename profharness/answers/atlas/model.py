"""What a GPU does with configs on backends: measured cells of its atlas, else a floor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from profharness.answers.atlas.data import NOTHING, Atlas, AtlasCell, Launch
from profharness.config import AUTO, Config
from profharness.costs import compulsory_bytes, flops
from profharness.devices import data_sheet, find_gpu, flop_peak
from profharness.dispatch.machine import Machine, from_config, machine_for
from profharness.dispatch.predict import predict
from profharness.errors import UsageError


@dataclass(frozen=True)
class Estimate:
    """A config on a backend. source: `measured` in the atlas, `model` between its cells, `floor`
    where nothing but the rules and a roofline is known; then kernel_us is None and low_us a bound.
    error is the model's relative error in this regime, which 90 % of its cells keep. outside says
    why a config lies outside of what the atlas sampled.
    """

    backend: str
    source: str
    choice: str | None
    status: str
    launches: tuple[Launch, ...] = ()
    kernel_us: float | None = None
    low_us: float | None = None
    high_us: float | None = None
    error: float | None = None
    graph_us: float | None = None
    bottleneck: str | None = None
    outside: str | None = None


def estimate(
    atlas: Atlas | None,
    configs: Sequence[Config],
    backends: Sequence[str],
    gpu: str,
    torch: str,
    *,
    measured: bool = True,
) -> list[Estimate]:
    """What each config does on each backend, in the order configs x backends. measured=False asks
    the model alone. Raises UsageError for an unknown GPU.
    """
    configs = [config.resolve("cuda") for config in configs]
    rows = (
        atlas.rows(configs, backends)
        if atlas is not None and measured
        else [NOTHING] * (len(configs) * len(backends))
    )
    machine = machine_for(gpu, torch)
    asked = ((config, backend) for config in configs for backend in backends)
    return [
        _measured(atlas.cell(row))
        if atlas is not None and row != NOTHING
        else _floor(config, backend, machine, gpu)
        for (config, backend), row in zip(asked, rows, strict=True)
    ]


def _measured(cell: AtlasCell) -> Estimate:
    return Estimate(
        cell.backend,
        "measured",
        cell.choice,
        cell.status,
        cell.launches,
        cell.kernel_us,
        cell.kernel_us,
        cell.kernel_us,
        0.0 if cell.kernel_us is not None else None,
        cell.graph_us,
    )


def _floor(config: Config, backend: str, machine: Machine, gpu: str) -> Estimate:
    """The choice by rule, and the least time that the data sheet's rates allow."""
    prediction = predict(from_config(config), machine)
    if backend == AUTO:
        choice = prediction.choice if prediction.choice in prediction.backends else None
        status = "ok" if choice else prediction.choice
    else:
        eligible = prediction.backends[backend].eligible
        choice = backend if eligible else None
        status = {True: "ok", False: "refused", None: "unknown"}[eligible]
    bound = Estimate(backend, "floor", choice, status)
    return replace(bound, low_us=floor_us(config, gpu)) if status == "ok" else bound


def floor_us(config: Config, gpu: str) -> float | None:
    """The roofline bound by the data sheet; None for a GPU without one."""
    try:
        peaks = data_sheet(find_gpu(gpu).name)
    except UsageError:
        return None
    if peaks is None or not peaks.bandwidth_bytes_per_s:
        return None
    rate = flop_peak(peaks, str(config.dtype))
    times = [compulsory_bytes(config) / peaks.bandwidth_bytes_per_s]
    times += [flops(config) / rate[1]] if rate else []
    return 1e6 * max(times)
