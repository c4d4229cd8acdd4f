"""Lanes on real GPUs: each runs groups, with its own key and clocks, and all form one run."""

from __future__ import annotations

from pathlib import Path

import pytest

from profharness.attention.config import expand_configs
from profharness.environment import visible_gpus
from profharness.jobs import campaign
from profharness.jobs.into_store import capture_into_store
from profharness.run import CaptureOptions, Fleet, read_run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(len(visible_gpus()) < 2, reason="needs two NVIDIA GPUs"),
]


def test_every_gpu_runs_a_part_of_the_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "GROUP_S", 0.5)
    monkeypatch.setattr(campaign, "SMALLEST_S", 0.5)
    configs = expand_configs("2,8,{512:4096:*2},64")
    options = CaptureOptions(("events",), tmp_path / "runs", fleet=Fleet("local:2"))
    captured = capture_into_store(configs, ("flash", "math"), tmp_path / "s.db", options)
    assert {cell.status for cell in captured.run.cells} == {"ok"}
    groups = [read_run(path) for path in (captured.folder / "groups").iterdir()]
    keys = {group.environment["gpu_key"] for group in groups}
    assert keys <= {gpu.key for gpu in visible_gpus()}
    assert len(keys) == min(2, len(groups))
    assert all("sm_mhz" in cell.clocks for cell in captured.run.cells)
    assert captured.run.environment["gpu_key"] == ",".join(sorted(keys))
