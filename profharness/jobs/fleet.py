"""Which lanes a run goes to: none of its own, those of this host, or those of a cluster."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from profharness.environment import visible_gpus
from profharness.errors import UsageError
from profharness.jobs.campaign import (
    Campaign,
    cut_groups,
    open_groups,
    plan_campaign,
    read_campaign,
)
from profharness.jobs.local import LocalLanes, local_lanes
from profharness.jobs.window import Transport, Window
from profharness.run import Fleet, Run, read_run
from profharness.runner.capture import write_folder
from profharness.runner.supervise import Progress


def open_transport(fleet: Fleet, device: str) -> Transport | None:
    """The lanes that a scheduler names; where none is named those of this host, if it has several GPUs.
    None: a run of one process, without lanes. Raises UsageError.
    """
    if fleet.scheduler is None:
        several = device != "cpu" and len(visible_gpus()) > 1
        return LocalLanes(local_lanes(None, device)) if several else None
    local = re.fullmatch(r"local(?::([1-9]\d{0,3}))?", fleet.scheduler)
    if local is None:
        raise UsageError(
            f"--scheduler {fleet.scheduler!r} is none: say local, or local:2 for so many lanes"
        )
    return LocalLanes(local_lanes(int(local[1]) if local[1] else None, device))


def run_on_lanes(
    run: Run,
    backends: Sequence[str],
    out: Path,
    fleet: Fleet,
    progress: Progress | None,
    python: str | None = None,
) -> Path | None:
    """Run a planned run as a campaign and return its folder; None where it is no work for lanes, and
    nothing was done. Raises as `capture` does.
    """
    transport = open_transport(fleet, run.protocol.device)
    if transport is None:
        return None
    groups = cut_groups(run, backends, len(transport.lanes()))
    if fleet.scheduler is None and len(groups) < 2:
        return None
    folder = write_folder(out, run, backends)
    campaign = Campaign(tuple(backends), tuple(groups), python=python)
    plan_campaign(folder, campaign)
    Window(folder, campaign, transport, progress).carry_out()
    return folder


def resume_on_lanes(folder: Path, fleet: Fleet, progress: Progress | None) -> None:
    """Go on with a campaign, on this host's lanes unless others are named. Raises UsageError for one
    that is finished, and as `capture` does.
    """
    run, campaign = read_run(folder), read_campaign(folder)
    if why := why_not_resumed(folder, run):
        raise UsageError(f"--resume: {why}")
    device = run.protocol.device
    transport = open_transport(fleet, device) or LocalLanes(local_lanes(None, device))
    Window(folder, campaign, transport, progress).carry_out()


def why_not_resumed(folder: Path, run: Run) -> str | None:
    """Why a campaign cannot go on; None where it can."""
    pending = any(cell.status == "pending" for cell in run.cells)
    if pending or open_groups(folder, read_campaign(folder)):
        return None
    return f"run {run.run} is finished: each of its {len(run.cells)} cell(s) has a result"
