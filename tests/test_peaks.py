"""Peaks: the data-sheet table, a real measurement in a child process, and the store's copy."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from profharness.devices import (
    TABLE,
    Device,
    Peaks,
    cores,
    data_sheet,
    device_facts,
    flop_peak,
    ridge,
)
from profharness.errors import CaptureError
from profharness.run import Cell, Protocol, Run, write_run
from profharness.store import ingest_path, open_store

NAMES = {
    "NVIDIA H200": (4.8e12, 989.5e12, 132),
    "NVIDIA H200 NVL": (4.8e12, 835.5e12, 132),
    "NVIDIA H100 80GB HBM3": (3.35e12, 989.4e12, 132),
    "NVIDIA H100 PCIe": (2.039e12, 756e12, 114),
    "NVIDIA A100-SXM4-80GB": (2.039e12, 312e12, 108),
    "NVIDIA A100-SXM4-40GB": (1.555e12, 312e12, 108),
    "NVIDIA A100 80GB PCIe": (1.935e12, 312e12, 108),
    "NVIDIA L4": (0.3e12, 121e12, 58),
    "NVIDIA L40S": (0.864e12, 362e12, 142),
    "NVIDIA RTX A6000": (0.768e12, 154.8e12, 84),
    "NVIDIA RTX 4000 Ada Generation": (0.36e12, 106.9e12, 48),
    "NVIDIA GeForce RTX 4090": (1.008e12, 165.2e12, 128),
    "NVIDIA B200": (7.7e12, 2250e12, 148),
    "Tesla T4": (0.32e12, 65e12, 40),
}


CORES = {  # the figures of NVIDIA's data sheets and whitepapers for these boards
    ("Tesla V100-SXM2-16GB", (7, 0), 80): (5120, 640),
    ("Tesla T4", (7, 5), 40): (2560, 320),
    ("NVIDIA GeForce GTX 1660", (7, 5), 22): (1408, 0),
    ("NVIDIA A100-SXM4-40GB", (8, 0), 108): (6912, 432),
    ("NVIDIA GeForce RTX 3090", (8, 6), 82): (10496, 328),
    ("NVIDIA GeForce RTX 4090", (8, 9), 128): (16384, 512),
    ("NVIDIA H200", (9, 0), 132): (16896, 528),
    ("NVIDIA RTX PRO 6000 Blackwell", (12, 0), 188): (24064, 752),
    ("a GPU of tomorrow", (42, 0), 7): (None, None),
}


@pytest.mark.parametrize(("board", "expected"), CORES.items())
def test_cores_of_boards(
    board: tuple[str, tuple[int, int], int], expected: tuple[int | None, int | None]
) -> None:
    name, capability, sms = board
    assert cores(Device(0, name, *capability, sms)) == expected


@pytest.mark.parametrize("name", NAMES)
def test_each_device_gets_its_own_row(name: str) -> None:
    bandwidth, tensor, sms = NAMES[name]
    found = data_sheet(name)
    assert found is not None
    assert (found.bandwidth_bytes_per_s, found.num_sms) == (pytest.approx(bandwidth), sms)
    assert found.flops_per_s["fp16"] == pytest.approx(tensor)
    assert found.device == name
    assert found.source == "data sheet"
    assert found.origin


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA L400",
        "NVIDIA A1000",
        "AMD Radeon Graphics",
        "AMD Instinct MI100",
        "AMD Instinct MI250X / MI250",
    ],
)
def test_a_device_outside_of_the_table_has_no_peaks(name: str) -> None:
    assert data_sheet(name) is None


INSTINCTS = {  # compute units of a device, bandwidth, clock in MHz, generation
    "AMD Instinct MI210": (104, 1.6384e12, 1700, 2),
    "AMD Instinct MI250X": (110, 1.6384e12, 1700, 2),
    "AMD Instinct MI300A": (228, 5.3e12, 2100, 3),
    "AMD Instinct MI300X": (304, 5.3e12, 2100, 3),
    "AMD Instinct MI300X OAM": (304, 5.3e12, 2100, 3),
    "AMD Instinct MI300X VF": (304, 5.3e12, 2100, 3),
    "AMD Instinct MI325X": (304, 6e12, 2100, 3),
    "AMD Instinct MI350X": (256, 8e12, 2200, 4),
    "AMD Instinct MI355X": (256, 8e12, 2400, 4),
}
# FLOPs per clock of the matrix cores of a compute unit: white papers of CDNA 2, 3 and 4
PER_CLOCK = {
    2: {"fp16": 1024, "bf16": 1024, "fp32": 256, "fp64": 256},
    3: {"fp8": 4096, "fp16": 2048, "bf16": 2048, "tf32": 1024, "fp32": 256, "fp64": 256},
    4: {"fp8": 8192, "fp16": 4096, "bf16": 4096, "fp32": 256, "fp64": 128},
}


@pytest.mark.parametrize("name", INSTINCTS)
def test_data_sheets_of_amd(name: str) -> None:
    units, bandwidth, mhz, generation = INSTINCTS[name]
    found = data_sheet(name)
    assert found is not None
    assert (found.bandwidth_bytes_per_s, found.num_sms) == (pytest.approx(bandwidth), units)
    rates = {key: units * mhz * 1e6 * flops for key, flops in PER_CLOCK[generation].items()}
    assert found.flops_per_s == pytest.approx(rates, rel=2e-3)
    assert found.l2_bytes in (8 << 20, 24 << 20, 32 << 20)
    assert "AMD Instinct" in found.origin


def test_a_partition_has_no_data_sheet() -> None:
    assert data_sheet("AMD Instinct MI300X", 304) == data_sheet("AMD Instinct MI300X")
    assert data_sheet("AMD Instinct MI300X", 38) is None  # one of eight dies (CPX)
    assert data_sheet("NVIDIA H200", 16) == data_sheet("NVIDIA H200")


def test_facts_of_an_amd_gpu() -> None:
    device = Device(0, "AMD Instinct MI210", 9, 0, 104, 68702699520, warp_size=64)
    facts = {fact.name: fact.value for fact in device_facts(device, [])}
    assert facts["architecture"] == "gfx90a"
    assert (facts["compute units"], facts["LDS per compute unit"]) == (104, 64)
    assert (facts["VGPRs per SIMD and lane"], facts["maximum waves per SIMD"]) == (512, 8)
    assert "CUDA cores (fp32)" not in facts  # version 9.0 of ROCm is not that of Hopper
    assert cores(device) == (None, None)


def test_the_table_is_sane() -> None:
    """fp32 = 2 x cores x clock with 64 or 128 cores per SM and a clock of 1.2 to 2.7 GHz. Tensor
    rates are multiples of it.
    """
    for sheet in (gpu for gpu in TABLE if gpu.pattern):
        assert sheet.sm_count
        per_sm = sheet.fp32 * 1e12 / sheet.sm_count / 2
        clocks = [per_sm / cores / 1e9 for cores in (64, 128)]
        assert any(1.2 <= clock <= 2.7 for clock in clocks), (sheet.pattern, clocks)
        assert sheet.tensor >= 1.9 * sheet.fp32
        if sheet.tf32 is not None:
            assert 0.45 <= sheet.tf32 / sheet.tensor <= 0.55
        assert sheet.origin


def test_the_ridge_is_rate_over_bandwidth_of_the_dtype() -> None:
    h200 = data_sheet("NVIDIA H200")
    assert h200 is not None
    assert ridge(h200, "fp16") == pytest.approx(206.1, abs=0.1)
    assert flop_peak(h200, "fp32") == ("fp32", 67e12)
    assert flop_peak(h200, "fp32", tf32=True) == ("tf32", 494.7e12)
    t4 = data_sheet("Tesla T4")
    assert t4 is not None
    assert flop_peak(t4, "bf16") is None
    assert ridge(t4, "bf16") is None


def run_folder(root: Path, environment: dict[str, object]) -> Path:
    folder = root / "20261121-000000-aaaa"
    folder.mkdir()
    from profharness.attention.config import parse_config

    cells = (Cell("c0", parse_config("1,1,64,64,fp16"), "auto", "ok", samples={"wall": [5, 6]}),)
    made = "2026-11-21T00:00:00+00:00"
    write_run(folder, Run(folder.name, made, ("events",), Protocol(), cells, dict(environment)))
    return folder


def test_the_store_prefers_measured_peaks_and_keeps_them_without_the_run(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    environment: dict[str, object] = {"device_type": "cuda", "gpu": "NVIDIA H200", "torch": "2.11"}
    ingest_path(path, run_folder(tmp_path, environment))
    with open_store(path, write=True) as store:
        sheet = store.peaks()
        assert sheet is not None
        assert sheet.source == "data sheet"
        assert store.peaks(source="measured") is None
        for rate in (700e12, 720e12):
            measured = Peaks("NVIDIA H200", "measured", 4.2e12, {"fp16": rate}, 60 << 20, 132, "x")
            store.add_peaks(measured, "2026-11-21T00:00:00+00:00", environment)
        assert store.peaks() == measured
        assert store.peaks(source="data sheet") == sheet
        store.delete_run("latest")
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT device, environment FROM peaks").fetchall()
    assert len(rows) == 2
    assert json.loads(rows[0][1]) == environment


def test_a_real_measurement_in_a_child_process() -> None:
    pytest.importorskip("torch")
    from profharness.recording.probe import measure_peaks

    found = measure_peaks("cpu")
    peaks = found.peaks
    assert peaks.source == "measured"
    assert peaks.device == found.environment["cpu"]
    assert peaks.bandwidth_bytes_per_s is not None
    assert 1e8 < peaks.bandwidth_bytes_per_s < 1e12
    assert set(peaks.flops_per_s) == {"fp32"}
    assert 1e8 < peaks.flops_per_s["fp32"] < 1e14
    assert found.created[:2] == "20"


def test_a_process_that_dies_has_its_reason() -> None:
    pytest.importorskip("torch")
    from profharness.recording.probe import measure_peaks

    with pytest.raises(CaptureError, match="data-sheet"):
        measure_peaks("no-such-device")
    with pytest.raises(CaptureError, match=r"more than 0\.01 s"):
        measure_peaks("cpu", timeout_s=0.01)
