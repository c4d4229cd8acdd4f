"""`analyze` and `kernels --steps` over the real H200 run, through the command line."""

from __future__ import annotations

import csv
import io
import json
import re
import tarfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import profharness
from profharness.attention.config import parse_config
from profharness.cli import find_command
from profharness.commands._output import sentences
from profharness.commands.analyze.cells import analyze_rows
from profharness.commands.analyze.figures import CellAnalysis, KernelFigures
from profharness.commands.analyze.tables import analyze_document, traffic_points
from profharness.commands.kernels.tables import kernels_document
from profharness.devices import DATA_SHEET, MEASURED, Peaks, l1_bytes
from profharness.errors import CaptureError, UsageError
from profharness.measurements.measurements import busy_text
from profharness.program.counters import Counters
from profharness.recording.profilers.ncu import ACTIVE_THREADS, PRESETS, TENSOR_PIPE_OF_ADA
from profharness.render.document import Chart, Heading, Note, Table
from profharness.render.terminal import render_table
from profharness.rows import TORCH
from profharness.store import Selection, ingest_path, open_store

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
        "Data sheet peaks of H200: 4,800 GB/s",
        "unfused ops",
        "bottleneck auto, cudnn, all-disabled: too few blocks.",
        "at least 68 SMs are idle. (derived)",
        "bottleneck flash, efficient: latency. Neither the fp16 rate (4.9 to 8.5 % of the peak)",
        "remedy flash, efficient, math: Use cudnn",
        "1.36 to 10.9 times as fast (CUDA-graph replays)",
    ):
        assert text in " ".join(result.stdout.split())
    full = run(analyze, "--store", store, "--config", "2,8,512,64", "--full")
    assert len(full.stdout) > len(result.stdout)
    assert "QK^T" in full.stdout and "QK^T" not in result.stdout
    assert "[derived: blocks 64" in " ".join(full.stdout.split())
    assert "resident" in full.stdout


def test_many_cells_have_one_table_and_what_most_of_them_share(store: Path) -> None:
    analyses = profharness.analyze(peaks="data-sheet", store=store).attrs["analyses"]
    brief, full = (analyze_document(analyses, full=full) for full in (False, True))
    assert (brief.records, brief.extra) == (full.records, full.extra)
    (table,) = [block for block in brief.blocks if isinstance(block, Table)]
    assert len(table.rows) == sum(each.figures is not None for each in analyses)
    notes = [block for block in brief.blocks if isinstance(block, Note)]
    assert "4 of 24 cells did not run: 4 refused" in [note.text for note in notes]
    labels = [note.label for note in notes]
    counts = [labels.count(name) for name in ("bottleneck", "finding", "remedy")]
    assert counts == [0, 2, 2]
    shown = {each.bottleneck for each in analyses if each.bottleneck}
    # Bug: some names of bottlenecks in the legend began with a capital, unlike in the column.
    legend = {note.label: note.text for note in notes if note.label in shown}
    assert legend.keys() == shown
    # Bug: each line of the legend repeated "The calls are limited by".
    assert legend["few blocks"] == "too few thread blocks to fill the GPU"
    assert legend["latency"] == "neither compute nor memory is near its peak"
    headings = [block.text for block in full.blocks if isinstance(block, Heading)]
    assert {"Best backend for", "Device", "auto over head_dim 64 to 100"} <= {*headings}


def test_notes_have_the_same_labels_for_one_config_and_for_several(store: Path) -> None:
    """Bug: `Bottleneck:` stood in the text for one config, and long labels had their own lines."""
    analyses = profharness.analyze(peaks="data-sheet", store=store).attrs["analyses"]
    one = [each for each in analyses if each.config == analyses[0].config]
    for chosen in (one, analyses):
        for full in (False, True):
            document = analyze_document(chosen, full=full)
            notes = [block for block in document.blocks if isinstance(block, Note) and block.label]
            labels = {note.label for note in notes if note.level != "hint"}
            assert {"remedy", *(("bottleneck",) if full or chosen is one else ())} <= labels
            refused = [note for note in notes if note.text.startswith("refused: ")]
            values = {each.bottleneck for each in chosen}  # which the legend explains
            backends = {each.label for each in refused}
            assert labels <= {"bottleneck", "finding", "remedy", "all-disabled"} | values | backends
            texts = {note.label: note.text for note in refused}
            if chosen is analyses and full:
                assert texts["cudnn"] == "refused: head_dim should be a multiple of 8"
            assert not any(": Bottleneck:" in note.text for note in notes)


def test_analyze_warns_of_a_busy_machine(store: Path) -> None:
    """Bug: `kernels` warned of unreliable times of ops, and `analyze` of the same run did not."""
    with open_store(store) as opened:
        rows, cells = opened.rows(Selection("latest"))
    scattered = [
        replace(row, kernel_kind="op", total_ns=4 * (row.total_ns or 0))
        for row in rows
        if row.profiler == TORCH
    ]
    warning = sentences(str(busy_text(scattered, cells)))
    assert "The machine was busy" in warning
    analyses = analyze_rows(store, cells, scattered, DATA_SHEET)
    for full in (False, True):
        assert analyze_document(analyses, full=full).answer[1] == warning
    assert kernels_document(scattered, cells).answer[-1] == warning
    calm = analyze_rows(store, cells, rows, DATA_SHEET)
    assert not any(each.machine.busy for each in calm)


def test_the_columns_and_the_context_of_full_have_the_order_of_the_table(store: Path) -> None:
    """Bug: --full put the share of the peak before TFLOP/s, and named the vendor of the GPU."""
    analyses = profharness.analyze(
        parse_config("2,8,512,64"), peaks="data-sheet", store=store
    ).attrs["analyses"]
    for full in (False, True):
        page = analyze_document(analyses, full=full)
        text = render_table(page, width=80, cut=True, full=full)
        words = (line.split() for line in text.splitlines())
        titles = next(each for each in words if "backend" in each and "TFLOP/s" in each)
        assert titles.index("TFLOP/s") < titles.index("FLOP/s")
        assert "H200, torch 2.11.0" in text and "NVIDIA H200, torch" not in text
    # Bug: the units of the device's figures stood in a second block of columns.
    device = text.partition("\nDevice")[2].splitlines()
    assert device[1].split() == ["figure", "value", "unit"]
    assert re.search(r"^memory +139\.8  GiB$", "\n".join(device), re.MULTILINE)


def test_a_remedy_follows_its_finding(store: Path) -> None:
    asked = ("--config", "2,8,1024,64,causal,bwd", "--backend", "flash", "--full")
    text = " ".join(run(analyze, "--store", store, *asked).stdout.split())
    parts = (
        "bottleneck flash: launch overhead",
        "remedy flash: Capture the call into a CUDA graph",
        "finding flash: Copies before and after the attention kernel",
        "remedy flash: Pass inputs in the layout",
    )
    places = [text.find(part) for part in parts]
    assert -1 not in places and places == sorted(places)


def test_sizes_have_binary_units(store: Path) -> None:
    """Bug: `analyze` showed MB and kB, but `kernels` and `diff` showed MiB and KiB."""
    text = run(analyze, "--store", store, "--config", "2,8,512,64", "--full").stdout
    assert re.search(r"\d [MK]iB\b", text) and not re.search(r"\b[kMG]B(?!/s)\b", text)


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
    assert {"code", "sentence", "severity", "grade", "evidence", "factor", "basis"} == set(
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


def test_steps_show_memory_growth_and_relative_times(store: Path) -> None:
    args = ("--store", store, "--config", "2,8,512,64", "--steps")
    lines = run(kernels, *args).stdout.splitlines()
    below = lines[next(n for n, line in enumerate(lines) if "peak MiB" in line) :]
    math = next(line.split() for line in below if line.startswith("math"))
    cudnn = next(line.split() for line in below if line.startswith("cudnn"))
    assert math[-1] == "S^2"
    assert math[4:8] == ["12.3x", "76.0", "76.01", "4.75"]  # 79,700,480 B; output 1 MiB
    assert cudnn[-1] == "S"
    assert cudnn[4] == "1.00x"


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
    again = run(analyze, *args, "--full")
    assert "over seq_len 32 to 64" in again.stdout
    brief = run(analyze, *args).stdout
    assert "over seq_len" not in brief and "Device" not in brief


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
    assert math["bottleneck"] == "unfused ops"
    page = run(analyze, "--store", path, "--format", "html").stdout
    assert page.count("<svg") == 2 and "Roofline" in page  # for a desktop and for a phone
    assert "captured run" in run(kernels, "--store", path, "--steps").stdout


def test_the_table_of_a_program_does_not_contradict_its_findings(tmp_path: Path) -> None:
    """Bugs: `limited by memory traffic` beside 0.9 % of the bandwidth, which is the rate of the
    compulsory bytes, blocks of an unnamed kernel, and a mean that looks like the median of `diff`.
    """
    path = tmp_path / "s.db"
    for name in ("llama_eager", "unet"):
        ingest_path(path, TRACES / "models" / f"{name}.json.gz")
    (eager,) = rows(analyze, "--run", "llama_eager.json.gz", "--store", path)
    assert eager["bottleneck"] == "unfused ops" and eager["bandwidth_share"] < 0.01
    text = run(analyze, "--run", "llama_eager.json.gz", "--store", path).stdout
    assert "GB/s " not in text and "% of peak GB/s" not in text
    assert " µs/call " in text and "unrolled_elementwise<direct_copy>  131,072" in text
    assert "% of peak GB/s" in run(analyze, "--run", "unet.json.gz", "--store", path).stdout


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


ARCHIVE = Path(__file__).parents[2] / "traces" / "counters.tar.xz"
LIMITS = [
    f"launch__occupancy_limit_{what}" for what in ("blocks", "registers", "shared_mem", "warps")
]
Cells = dict[tuple[str, str], CellAnalysis]
SQUARE, DECODE = "b2-h8-s512-d64-fp16", "b1-h32-kv8-sq1-skv4096-d128-bf16"


@pytest.fixture(scope="module")
def counters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("counters")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    path = folder / "s.db"
    for name in ("presets", "head_dim"):
        (result,) = ingest_path(path, folder / "counters" / name)
        assert not result.warnings
    return path


@pytest.fixture(scope="module")
def cells(counters: Path) -> Cells:
    with open_store(counters) as opened:
        runs = [row.run for row in opened.runs()]
    return {
        (analysis.config.label, analysis.backend): analysis
        for run in runs
        for analysis in profharness.analyze(run=run, peaks="data-sheet", store=counters).attrs[
            "analyses"
        ]
    }


def counted(analysis: CellAnalysis, part: str) -> KernelFigures:
    (kernel,) = [each for each in analysis.kernels if part in each.kernel]
    return kernel


def test_every_preset_metric_is_in_the_report_and_every_figure_is_read(
    counters: Path, cells: Cells
) -> None:
    with open_store(counters) as opened:
        (row,) = [
            row
            for row in opened.kernels("latest")
            if row.profiler == "ncu" and row.backend == "tiled" and "d2048" in (row.config or "")
        ]
    # The counters of the committed run were taken before ACTIVE_THREADS joined a preset
    absent = {TENSOR_PIPE_OF_ADA, ACTIVE_THREADS}
    asked = {name for names in PRESETS.values() for name in names} - absent
    assert asked <= row.metrics.keys()
    flash = counted(cells[SQUARE, "flash"], "flash_fwd_splitkv_kernel")
    read = {item.name for item in fields(Counters)} - {"active_threads"}
    assert all(getattr(flash.counters, name) is not None for name in read)


def test_figures_of_fused_kernels_are_those_that_ncu_wrote(cells: Cells) -> None:
    flash = counted(cells[SQUARE, "flash"], "flash_fwd_splitkv_kernel")
    assert flash.counters.tensor_pipe == pytest.approx(0.178, abs=1e-3)
    assert flash.counters.l2_hit_rate == pytest.approx(0.670, abs=1e-3)
    assert flash.counters.load_sectors == pytest.approx(16)
    assert flash.shared_share == pytest.approx(72 / 228)
    assert flash.dram_bytes_per_s == pytest.approx(363.9e9, rel=1e-3)
    cudnn = counted(cells[SQUARE, "cudnn"], "cudnn_sdpa")
    assert cudnn.counters.load_sectors is None  # it loads by TMA
    assert next(iter(cudnn.counters.warp_states)) == "barrier"


def test_math_runs_fp32_products_beside_the_tensor_cores(cells: Cells) -> None:
    finding = cells[SQUARE, "math"].finding("no_tensor_cores")
    assert finding.severity == "major"
    assert finding.sentence.startswith("sm80_xmma_gemm_f32")


def test_a_combine_kernel_of_few_blocks_waits_for_memory(cells: Cells) -> None:
    finding = cells[DECODE, "flash"].finding("stalls")
    assert "flash_fwd_splitkv_combine<128,m4,split32> spend 82.8 %" in finding.sentence
    assert "issue an instruction in 3.4 % of the cycles" in finding.sentence


def test_traffic_stands_beside_compulsory_bytes_and_tma_is_not_taken_for_no_traffic(
    cells: Cells,
) -> None:
    levels = {
        backend: [point["level"] for point in traffic_points(cells[SQUARE, backend])]
        for backend in ("flash", "cudnn", "naive")
    }
    assert levels["flash"] == ["compulsory", "DRAM", "L2", "L1"]
    assert levels["cudnn"] == levels["naive"] == ["compulsory", "DRAM", "L2"]
    past = {cell for cell, each in cells.items() if each.figures and each.figures.past_l1}
    # cudnn's kernel for decoding does not use TMA
    assert past == {(SQUARE, "cudnn"), (SQUARE, "naive"), (DECODE, "naive")}
    math = {point["level"]: point for point in traffic_points(cells[SQUARE, "math"])}
    assert math["DRAM"]["ratio"] == pytest.approx(25.0, abs=0.1)
    assert math["L2"]["ratio"] > math["DRAM"]["ratio"] > 1
    document = analyze_document([*cells.values()], full=True)
    notes = [block for block in document.blocks if isinstance(block, Note)]
    (products,) = [note for note in notes if "bypass the L1" in note.text and "128x8" in note.text]
    assert products.text.startswith("naive: ") and "nvjet_sm90" in products.text
    charts = {block.title: block for block in document.blocks if isinstance(block, Chart)}
    rows = charts["Roofline on measured traffic"].rows
    assert len(rows) == sum(len(traffic_points(analysis)) for analysis in cells.values())
    assert {row["backend"] for row in rows} == {
        f"{level} bytes" for level in ("compulsory", "DRAM", "L2", "L1")
    }
    assert f"flash {SQUARE}" in {row["label"] for row in rows}


def test_what_shared_memory_leaves_of_the_l1_is_never_less_than_ncu_saw(counters: Path) -> None:
    """ncu reports the carve-out that the driver chose, which may be larger than the blocks need."""
    with open_store(counters) as opened:
        seen = [
            (device, row)
            for run in opened.runs()
            for device in opened.devices(run.run)
            for row in opened.kernels(run.run)
            if row.profiler == "ncu" and row.occupancy and row.shared_bytes is not None
        ]
    assert len(seen) > 40
    exact = 0
    for device, row in seen:
        fits = int(min(value for name, (value, _) in row.metrics.items() if name in LIMITS))
        left = l1_bytes(device, fits, row.shared_bytes or 0)
        carve_out = row.metrics["launch__shared_mem_config_size"][0]
        assert left is not None and left >= 256 * 1024 - carve_out
        exact += left == 256 * 1024 - carve_out
    assert exact >= 10


def test_k_and_v_as_large_as_the_whole_unified_l1_do_not_fit_in_it(cells: Cells) -> None:
    analysis = cells["b1-h4-s64-d512-fp32", "single_query"]
    assert analysis.figures.kv_head_bytes == 256 * 1024
    assert analysis.kv_places == ("L2 (61,440 KiB)",)


def test_one_table_tells_the_device(cells: Cells) -> None:
    machine = cells[SQUARE, "flash"].machine
    facts = {fact.name: (fact.value, fact.unit, fact.source) for fact in machine.facts()}
    assert facts["SMs"][0] == 132 and facts["L2"][:2] == (60, "MiB")
    assert facts["SM clock"][:2] == (1980, "MHz")
    assert facts["maximum shared memory per block"][:2] == (227, "KiB")
    assert facts["bandwidth"] == (4800, "GB/s", "data sheet")
    assert (facts["CUDA cores (fp32)"][0], facts["tensor cores"][0]) == (16896, 528)
    host = {"os": "Ubuntu 24.04", "os_kernel": "6.18.44", "cpu": "AMD EPYC", "cpu_cores": 16}
    told = {fact.name: fact.value for fact in replace(machine, host=host).facts()}
    assert told["operating system"] == "Ubuntu 24.04" and told["CPU cores"] == 16
    older = replace(machine, host={"platform": "Linux x86_64"}).facts()[-1]
    assert (older.name, older.value) == ("operating system", "Linux x86_64")
    measured = Peaks("NVIDIA H200", MEASURED, 4.2e12, {"fp16": 700e12})
    both = [fact for fact in replace(machine, peaks=measured).facts() if fact.name == "bandwidth"]
    assert [(fact.value, fact.source) for fact in both] == [
        (4800, "data sheet"),
        (4200, "measured"),
    ]
    document = analyze_document([cells[SQUARE, "flash"]], full=True)
    heading = [block for block in document.blocks if isinstance(block, Heading)][-1]
    assert (heading.text, heading.detail) == ("Device", "H200")
    (record,) = document.extra["devices"]
    assert record["facts"][1] == {
        "name": "SMs",
        "value": 132,
        "unit": "",
        "source": "trace",
    }
