"""Which lanes a run goes to: none of its own, those of this host, or those of a cluster."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from profharness import __version__
from profharness.environment import lacking, visible_gpus
from profharness.errors import MissingExtraError, UsageError
from profharness.jobs.campaign import (
    Campaign,
    cut_groups,
    open_groups,
    plan_campaign,
    read_campaign,
)
from profharness.jobs.local import LocalLanes, local_lanes
from profharness.jobs.window import Transport, Window, is_of_class
from profharness.run import Fleet, Run, read_run
from profharness.runner.capture import write_folder
from profharness.runner.supervise import Progress

SCHEDULERS = "local, local:2, tls://head:8786"
ONE_ENVIRONMENT = ("torch", "driver")  # of what a lane tells, the same in all of a run


class Remote(Transport, Protocol):
    """A transport to other hosts."""

    def close(self) -> None:
        """Leave them; what runs there goes on."""
        ...


def open_transport(fleet: Fleet, device: str) -> Transport | None:
    """The lanes that a scheduler names; where none is named those of this host, if it has several GPUs.
    None: a run of one process, without lanes. Raises UsageError, MissingExtraError and CaptureError.
    """
    if fleet.scheduler is None:
        several = device != "cpu" and len(visible_gpus()) > 1
        if not several and not fleet.gpus:
            return None
        return _on_this_host(None, fleet, device)
    local = re.fullmatch(r"local(?::([1-9]\d{0,3}))?", fleet.scheduler)
    if local is not None:
        return _on_this_host(int(local[1]) if local[1] else None, fleet, device)
    if "://" in fleet.scheduler:
        return open_cluster(fleet)
    raise UsageError(f"--scheduler {fleet.scheduler!r} is none: say one of {SCHEDULERS}")


def lanes_device(fleet: Fleet, device: str) -> str:
    """The device that lanes on other hosts compute on, where none is named: `cuda` unless no lane
    that is there has a GPU. That of lanes on this host is as it was asked for.
    """
    if device != "auto" or fleet.scheduler is None or fleet.scheduler.startswith("local"):
        return device
    if "://" not in fleet.scheduler:
        return "cuda"
    with closing(open_cluster(fleet)) as cluster:
        return "cuda" if any(lane.get("gpu") for lane in cluster.lanes()) else "cpu"


def open_cluster(fleet: Fleet) -> Remote:
    """The lanes of a Dask scheduler. Raises MissingExtraError without the extra, and as `Cluster`."""
    if lacking("cluster"):
        raise MissingExtraError(f"--scheduler {fleet.scheduler}", "cluster")
    # the one file that imports distributed
    cluster = import_module("profharness.jobs.cluster")
    remote: Remote = cluster.Cluster(fleet.scheduler, insecure=fleet.insecure)
    return remote


def _on_this_host(count: int | None, fleet: Fleet, device: str) -> LocalLanes:
    lanes = local_lanes(count, device)
    for gpu in fleet.gpus:
        if not any(is_of_class(lane, gpu) for lane in lanes):
            here = ", ".join(sorted({str(lane["gpu"] or "no GPU") for lane in lanes}))
            raise UsageError(f"--gpu {gpu}: this host has {here}")
    return LocalLanes(lanes)


def run_on_lanes(
    run: Run,
    backends: Sequence[str],
    out: Path,
    fleet: Fleet,
    progress: Progress | None,
    python: str | None = None,
) -> list[Path]:
    """Run a planned run as a campaign, on each class of GPU that is named, and return their folders;
    none where it is no work for lanes, and nothing was done. Raises as `capture` does.
    """
    transport = open_transport(fleet, run.protocol.device)
    if transport is None:
        return []
    lanes = transport.lanes()
    if fleet.scheduler is None and len(cut_groups(run, backends, len(lanes))) < 2:
        return []
    folders = []
    for gpu in fleet.gpus or (None,):
        own = run if len(fleet.gpus) < 2 else replace(run, run=f"{run.run}-{_word(str(gpu))}")
        count = sum(gpu is None or is_of_class(lane, gpu) for lane in lanes)
        groups = cut_groups(own, backends, count, gpu)
        folder = write_folder(out, own, backends)
        plan_campaign(folder, Campaign(tuple(backends), tuple(groups), gpu, python))
        folders.append(folder)
    Window(folders, transport, progress, agreeing()).carry_out()
    return folders


def _word(gpu: str) -> str:
    """The name of a class as a part of a run's id, which is the name of a folder too."""
    return re.sub(r"[^a-z0-9]+", "", gpu.casefold()) or "gpu"


def agreeing() -> Callable[[dict[str, Any]], str | None]:
    """Why a lane cannot take part: it has another profharness than this host, or another torch or
    driver than the first lane with a GPU of its name. A run has one environment.
    """
    first: dict[str | None, dict[str, Any]] = {}

    def why_not(lane: dict[str, Any]) -> str | None:
        if lane["profharness"] != __version__:
            return f"it has profharness {lane['profharness']}, and this host {__version__}"
        other = first.setdefault(lane["gpu"], lane)
        for key in ONE_ENVIRONMENT:
            if lane[key] != other[key]:
                return f"it has {key} {lane[key]}, and {other['lane']} {other[key]}"
        return None

    return why_not


def resume_on_lanes(folder: Path, fleet: Fleet, progress: Progress | None) -> None:
    """Go on with a campaign, on this host's lanes unless others are named. Raises UsageError for one
    that is finished, and as `capture` does.
    """
    run, campaign = read_run(folder), read_campaign(folder)
    if why := why_not_resumed(folder, run):
        raise UsageError(f"--resume: {why}")
    device = run.protocol.device
    fleet = replace(fleet, gpus=(campaign.gpu,) if campaign.gpu else ())
    transport = open_transport(fleet, device) or LocalLanes(local_lanes(None, device))
    Window([folder], transport, progress, agreeing()).carry_out()


def why_not_resumed(folder: Path, run: Run) -> str | None:
    """Why a campaign cannot go on; None where it can."""
    pending = any(cell.status == "pending" for cell in run.cells)
    if pending or open_groups(folder, read_campaign(folder)):
        return None
    return f"run {run.run} is finished: each of its {len(run.cells)} cell(s) has a result"
