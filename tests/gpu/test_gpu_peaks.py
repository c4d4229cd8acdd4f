"""Measured peaks on a real GPU, and an analysis that uses them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from profharness.cli import find_command
from profharness.devices import data_sheet
from profharness.environment import gpu_name
from profharness.recording.probe import measure_peaks
from profharness.store import open_store

command = find_command("analyze")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpu_name() is None, reason="no NVIDIA GPU"),
]


def test_measured_peaks_lie_below_the_data_sheet_and_not_far() -> None:
    peaks = measure_peaks("cuda").peaks
    assert peaks.device == gpu_name()
    assert {"fp16", "fp32"} <= set(peaks.flops_per_s)
    assert peaks.bandwidth_bytes_per_s is not None
    sheet = data_sheet(peaks.device)
    if sheet is None or sheet.bandwidth_bytes_per_s is None:
        pytest.skip(f"{peaks.device} has no row in the table")
    assert 0.6 < peaks.bandwidth_bytes_per_s / sheet.bandwidth_bytes_per_s < 1.02
    for name, rate in peaks.flops_per_s.items():
        assert 0.4 < rate / sheet.flops_per_s[name] < 1.1, name


def test_analyze_measures_once_and_sweeps_over_head_dim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    args = ["--store", str(tmp_path / "s.db"), "--config", "1,4,64,{512,1024},fp32"]
    args += ["--backend", "math", "--format", "json"]
    for _ in range(2):
        result = CliRunner().invoke(command, args)
        assert result.exit_code == 0, result.output
        told = json.loads(result.stdout)
        assert [peaks["source"] for peaks in told["peaks"]] == ["measured"]
        assert all(row["flops_share"] < 1 for row in told["rows"])
    with open_store(tmp_path / "s.db") as store:
        (count,) = store.connection.execute("SELECT count(*) FROM peaks").fetchone()
        assert count == 1
