"""scripts/check_forecast.py: H200 traces of models against the predictions for their layers."""

from __future__ import annotations

import tarfile
from pathlib import Path

import check_forecast
import pytest

ARCHIVE = Path(__file__).parents[1] / "traces" / "forecast-h200.tar.xz"
SOME = ("llama-8b-decode-1", "gpt-2-0", "sdxl-3", "bert-train-0", "fp32-0")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[check_forecast.Row]:
    """Return the layers of some of the models."""
    folder = tmp_path_factory.mktemp("traced")
    with tarfile.open(ARCHIVE) as archive:
        for name in SOME:
            archive.extract(f"{name}.json", folder, filter="data")
    return list(check_forecast.compared(folder, "H200"))


def test_backends_and_kernels_of_real_layers_are_predicted(rows: list[check_forecast.Row]) -> None:
    assert sorted(row.name for row in rows) == sorted(SOME)
    assert all(row.ran == row.takes and row.kernels_right for row in rows)
    assert {row.ran for row in rows} == {"cudnn", "efficient"}
    assert all(0.75 < (row.ratio or 0) < 1.3 for row in rows)


def test_a_regime_has_a_line(rows: list[check_forecast.Row]) -> None:
    line = check_forecast.summary("all", rows)
    assert line.startswith("| all | 5 | 5 | 5 | 5 | ")
    assert {check_forecast.regime(row) for row in rows} == {
        "cross", "decode", "training", "under 50 µs", "50 µs and more",
    }  # fmt: skip
