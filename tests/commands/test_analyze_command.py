"""`analyze` and `kernels --steps` over the real H200 run, through the command line."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from profharness.cli import find_command
from profharness.errors import CaptureError, UsageError
from profharness.store import ingest_path, open_store

analyze = find_command("analyze")
kernels = find_command("kernels")

TRACES = Path(__file__).parents[2] / "traces"
FOREIGN = Path(__file__).parents[1] / "data" / "kineto_h200.json.gz"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("analyze") / "s.db"
    ingest_path(path, TRACES / "h200-torch-nsys-ncu")
    return path


def run(command: Any, *args: object) -> Result:
    return CliRunner().invoke(command, [str(arg) for arg in args])


def rows(command: Any, *args: object) -> list[dict[str, Any]]:
    result = run(command, *args, "--format", "json")
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["rows"]
    return found


def test_analyze_tells_figures_findings_and_remedies(store: Path) -> None:
    result = run(analyze, "--store", store, "--config", "2,8,512,64")
    assert result.exit_code == 0, result.output
    for text in (
        "NVIDIA H200, data sheet: 4,800 GB/s",
        "score traffic",
        "[derived: blocks 64",
        "remedy 1",
        "QK^T",
    ):
        assert text in " ".join(result.stdout.split())
    full = run(analyze, "--store", store, "--config", "2,8,512,64", "--full")
    assert len(full.stdout) > len(result.stdout)
    assert "resident" in full.stdout


def test_analyze_json_has_its_schema_and_csv_its_columns(store: Path) -> None:
    result = run(analyze, "--store", store, "--format", "json")
    told = json.loads(result.stdout)
    assert told["schema"] == "profharness.analyze/1"
    assert len(told["rows"]) == 24
    assert told["peaks"][0]["source"] == "data sheet"
    refused = [row for row in told["rows"] if row["status"] == "refused"]
    assert refused
    assert all(row["flops"] is None and row["findings"] == [] for row in refused)
    flash = next(row for row in told["rows"] if row["backend"] == "flash")
    assert {"code", "sentence", "severity", "grade", "evidence", "factor"} == set(
        flash["findings"][0]
    )
    table = run(analyze, "--store", store, "--format", "csv").stdout
    found = list(csv.DictReader(io.StringIO(table)))
    assert [row["backend"] for row in found] == [row["backend"] for row in told["rows"]]
    assert json.loads(found[1]["findings"]) == flash["findings"]


def test_analyze_measures_only_the_device_that_the_cells_ran_on(store: Path) -> None:
    pytest.importorskip("torch")
    result = run(analyze, "--store", store, "--config", "2,8,512,64", "--peaks", "measure")
    assert isinstance(result.exception, UsageError | CaptureError)
    assert "data-sheet" in str(result.exception)
    with open_store(store) as opened:
        assert opened.peaks(source="measured") is None


def test_steps_of_math_add_up_to_the_call(store: Path) -> None:
    found = [
        row
        for row in rows(kernels, "--store", store, "--config", "2,8,512,64", "--steps")
        if row["backend"] == "math"
    ]
    steps = {row["step"]: row for row in found}
    assert list(steps) == [
        *("QK^T", "scale and mask", "softmax", "PV", "casts, copies, fills", "launch gaps"),
        "cold refill, waiting for the host",
    ]
    assert sum(row["share"] for row in found) == pytest.approx(1)
    assert sum(row["call_ns"] for row in found) == pytest.approx(153888)  # the median event sample
    assert sum(row["launches_per_call"] or 0 for row in found) == 14
    assert steps["softmax"]["launches_per_call"] == 5
    assert steps["QK^T"]["tile"] == "128x128x8"
    assert steps["QK^T"]["mean_ns"] == pytest.approx(22460, abs=10)
    assert steps["scale and mask"]["mean_ns"] == pytest.approx(
        steps["scale and mask"]["call_ns"] / 2
    )


def test_steps_show_memory_growth_and_speed_up(store: Path) -> None:
    args = ("--store", store, "--config", "2,8,512,64", "--steps")
    lines = run(kernels, *args).stdout.splitlines()
    below = lines[next(n for n, line in enumerate(lines) if "peak MiB" in line) :]
    math = next(line.split() for line in below if line.startswith("math"))
    cudnn = next(line.split() for line in below if line.startswith("cudnn"))
    assert math[-1] == "S^2"
    assert math[4:8] == ["1.00x", "76.01", "76.01", "4.75"]  # 79,700,480 B; output 1 MiB
    assert cudnn[-1] == "S"
    assert cudnn[4] == "12.31x"


def test_steps_of_forward_and_backward_have_no_rest(store: Path) -> None:
    found = rows(kernels, "--store", store, "--config", "2,8,1024,64,causal,bwd", "--steps")
    steps = {row["step"] for row in found if row["backend"] == "math"}
    assert {"dV and dP", "softmax backward", "dQ and dK"} <= steps
    assert "other" not in {row["step"] for row in found}


def test_steps_want_one_profiler(store: Path) -> None:
    result = run(kernels, "--store", store, "--steps", "--profiler", "all")
    assert isinstance(result.exception, UsageError)


def test_analyze_captures_what_is_not_stored_and_keeps_measured_peaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    args = ("--store", "s.db", "--config", "1,2,{32,64},16,fp32", "--backend", "math")
    result = run(analyze, *args, "--peaks", "measure", "--format", "json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert [row["status"] for row in told["rows"]] == ["ok", "ok"]
    assert [peaks["source"] for peaks in told["peaks"]] == ["measured"]
    assert all(row["basis"] in ("wall", "kernel") for row in told["rows"])
    again = run(analyze, *args)
    assert "over seq_len 32 to 64" in again.stdout
    assert "measured: " in again.stdout


def test_a_foreign_trace_is_analyzed_by_its_calls(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    ingest_path(path, FOREIGN)
    found = rows(analyze, "--store", path)
    ran = [row for row in found if row["config"] == "b2-h8-s512-d64-fp16"]
    assert sorted(row["backend"] for row in ran) == ["cudnn", "efficient", "flash", "math"]
    for row in ran:
        assert row["basis"] == "kernel" and row["against"] == "data sheet"
        assert row["flops_share"] == row["flops_per_s"] / 989.5e12
        assert row["module"] is None
    math = next(row for row in ran if row["backend"] == "math")
    assert {kernel["role"] for kernel in math["kernels"]} >= {"softmax", "cast"}
    assert math["bottleneck"] == "score traffic"
    page = run(analyze, "--store", path, "--format", "html").stdout
    assert page.count("<svg") == 1 and "Roofline" in page
    assert "captured run" in run(kernels, "--store", path, "--steps").stdout


def test_a_run_without_counters_is_analyzed_by_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    ingest_path(path, TRACES / "h200-torch2.11")
    found = rows(analyze, "--store", path, "--config", "2,8,512,64", "--backend", "math,cudnn")
    assert all(row["dram_bytes"] is None for row in found)
    score = next(
        finding
        for row in found
        if row["backend"] == "math"
        for finding in row["findings"]
        if finding["code"] == "score_traffic"
    )
    assert score["grade"] == "derived"


def test_the_faster_backend_counts_also_where_only_one_is_asked_for(store: Path) -> None:
    (row,) = rows(analyze, "--store", store, "--config", "2,8,512,64", "--backend", "math")
    (faster,) = [found for found in row["findings"] if found["code"] == "faster_backend"]
    assert faster["evidence"][0]["value"] == "cudnn"
