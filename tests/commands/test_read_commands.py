"""The reading commands over a real store, as functions and as real processes."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from profharness.attention.config import expand_configs
from profharness.cli import COMMANDS as MODULES
from profharness.cli import find_command
from profharness.commands._output import capture_progress, on_terminal
from profharness.errors import GateError, NotFoundError, ProfharnessError, UsageError
from profharness.recording.supervise import Step
from profharness.rows import Refusal
from profharness.run import Cell, Protocol, Run, write_run
from profharness.store import ingest_path

COMMANDS = ("kernels", "diff", "runs", "ingest", "export")
H200_TRACE = Path(__file__).parents[1] / "data" / "kineto_h200.json.gz"
HEAVY = ("pandas", "torch", "sqlite_utils", "rich", "numpy")


def command(name: str) -> click.Command:
    found: click.Command = find_command(name.replace("_", "-"))
    return found


def invoke(name: str, *args: object) -> Result:
    return CliRunner().invoke(command(name), [str(arg) for arg in args])


def run_folder(root: Path, run: str = "20250102-030405-ab12") -> Path:
    """A run folder of three cells without a trace: one timed, one refused, one crashed."""
    (config,) = expand_configs("2,8,512,64,fp16")
    cells = (
        Cell("0", config, "flash", "ok", iterations=5, samples={"event": [7000, 7100, 7200]}),
        Cell("1", config, "efficient", "refused", refusals=(Refusal("DTYPE", "no such dtype"),)),
        Cell("2", config, "math", "crashed", message="the worker died of SIGABRT"),
    )
    folder = root / run
    folder.mkdir(parents=True)
    write_run(folder, Run(run, "2025-01-02T03:04:05+00:00", ("events",), Protocol(), cells))
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"
    ingest_path(path, run_folder(tmp_path / "runs"))
    return path


def test_kernels_says_why_a_backend_has_none(store: Path) -> None:
    result = invoke("kernels", "--store", store)
    assert result.exit_code == 0, result.output
    assert "b2-h8-s512-d64-fp16" in result.stdout
    assert "efficient  refused: no such dtype" in result.stdout
    assert "math       crashed: the worker died of SIGABRT" in result.stdout


def test_bench_and_kernels_show_the_same_decisive_refusal(tmp_path: Path) -> None:
    folder, store = Path(__file__).parents[2] / "traces" / "h200-torch2.11", tmp_path / "s.db"
    for name in ("bench", "kernels"):
        output = " ".join(invoke(name, folder, "--store", store).stdout.split())
        shown = output.rpartition("all-disabled refused")[2]
        assert "cudnn: head_dim=100 is not a multiple of 8" in shown
        assert "runtime disabled" not in shown


def test_json_is_the_whole_of_stdout(store: Path) -> None:
    read = json.loads(invoke("kernels", "--store", store, "--format", "json").stdout)
    assert read["schema"] == "profharness.kernels/1"
    assert [cell["status"] for cell in read["cells"]] == ["ok", "refused", "crashed"]


def test_csv_tells_on_stderr_what_it_cannot_hold(store: Path) -> None:
    result = invoke("kernels", "--store", store, "--format", "csv")
    assert len(result.stdout.splitlines()) == 1
    assert "efficient: refused: no such dtype" in result.stderr


def test_a_gate_without_evidence_is_not_met(store: Path) -> None:
    result = invoke("kernels", "--store", store, "--expect", "flash")
    assert isinstance(result.exception, GateError)
    assert "neither an op nor a kernel" in str(result.exception)
    nothing = invoke("kernels", "--store", store, "--backend", "math", "--expect", "math")
    assert "nothing to check" in str(nothing.exception)


def test_no_store_and_unknown_names_are_told(tmp_path: Path, store: Path) -> None:
    assert isinstance(invoke("kernels", "--store", tmp_path / "none.db").exception, NotFoundError)
    assert isinstance(invoke("kernels", "--store", store, "--expect", "x").exception, UsageError)
    unknown = invoke("diff", "flash", "flahs", "--store", store).exception
    assert isinstance(unknown, NotFoundError)
    assert "flahs" in str(unknown)
    assert isinstance(
        invoke("diff", "flash", "math", "--fail-on", "worse", "--store", store).exception,
        UsageError,
    )


def test_diff_gates_on_a_changed_status(store: Path) -> None:
    shown = invoke("diff", "flash", "math", "--store", store)
    assert shown.exit_code == 0, shown.output
    assert "crashed" in shown.stdout
    gated = invoke("diff", "flash", "math", "--store", store, "--fail-on", "changed,slower")
    assert isinstance(gated.exception, GateError)
    same = invoke("diff", "flash", "flash", "--store", store, "--fail-on", "slower")
    assert isinstance(same.exception, UsageError)


@pytest.mark.parametrize("value", ["nan", "inf", "0", "-1"])
def test_a_threshold_is_a_finite_number_above_zero(value: str) -> None:
    for name, *arguments in (("diff", "flash", "math"), ("ranks",)):
        done = invoke(name, *arguments, "--threshold", value)
        assert done.exit_code == 2
        assert "Invalid value for '--threshold'" in done.output


def test_runs_lists_and_deletes(store: Path) -> None:
    (row,) = json.loads(invoke("runs", "--store", store, "--format", "json").stdout)["rows"]
    assert (row["run"], row["cells"], row["failed_cells"]) == ("20250102-030405-ab12", 3, 1)
    assert invoke("runs", "--store", store, "--delete", "20250102").exit_code == 0
    assert json.loads(invoke("runs", "--store", store, "--format", "json").stdout)["rows"] == []


def test_tables_of_runs_have_short_names_and_json_has_recorded_ones(tmp_path: Path) -> None:
    """Bug: the answer counted `1 benchmark`, but the table called the run `bench`."""
    path, (config,) = tmp_path / "store.db", expand_configs("2,8,512,64,fp16")
    environment = {"device_type": "cuda", "gpu": "NVIDIA H100 80GB HBM3", "torch": "2.11.0+cu130"}
    cells = (Cell("0", config, "flash", "ok", iterations=5, samples={"event": [7000]}),)
    for kind, name in (("bench", "20250102-030405-ab12"), ("capture", "20250102-030405-ab13")):
        made = Run(name, "2025-01-02T03:04:05+00:00", ("events",), Protocol(), cells, environment)
        folder = tmp_path / name
        folder.mkdir()
        write_run(folder, replace(made, kind=kind))
        ingest_path(path, folder)
    text = invoke("runs", "--store", path).stdout
    assert "1 benchmark" in text and " benchmark " in text.split("\n\n")[1]
    assert " bench " not in text and " H100 " in text and " 2.11.0 " in text
    rows = json.loads(invoke("runs", "--store", path, "--format", "json").stdout)["rows"]
    assert {row["device"] for row in rows} == {"NVIDIA H100 80GB HBM3"}
    assert {row["torch"] for row in rows} == {"2.11.0+cu130"}
    assert {(row["source"], row["kind"]) for row in rows} == {
        ("capture", "bench"),
        ("capture", "capture"),
    }


def test_ingest_goes_on_after_a_bad_source(tmp_path: Path) -> None:
    store, bad = tmp_path / "s.db", tmp_path / "bad.json"
    bad.write_text('{"traceEvents": [{')
    folder = run_folder(tmp_path / "runs")
    first = invoke("ingest", bad, folder, "--store", store)
    assert isinstance(first.exception, ProfharnessError)
    assert first.exception.exit_code == 1
    assert ": new, run 20250102-030405-ab12" in first.stdout
    again = invoke("ingest", folder, "--store", store)
    assert again.exit_code == 0, again.output
    assert "unchanged" in again.stdout


def test_export_writes_whole_files_and_overwrites_only_by_force(store: Path) -> None:
    ingest_path(store, H200_TRACE)
    out = store.parent / "trace.json.gz"
    assert invoke("export", "latest", "-o", out, "--store", store).exit_code == 0
    assert "traceEvents" in json.loads(gzip.decompress(out.read_bytes()))
    before = out.read_bytes()
    refused = invoke("export", "latest", "-o", out, "--store", store)
    assert isinstance(refused.exception, UsageError)
    assert out.read_bytes() == before
    assert invoke("export", "latest", "-o", out, "--force", "--store", store).exit_code == 0
    assert sorted(path.name for path in store.parent.iterdir() if "part" in path.name) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_an_example(name: str) -> None:
    text = invoke(name, "--help").stdout
    assert re.search(r"Examples?:\n", text)
    assert f"  profharness {name} " in text


def test_importing_the_commands_is_light() -> None:
    modules = ", ".join(MODULES[name][0] for name in COMMANDS)
    code = f"import sys, {modules}; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_reader_that_goes_away_is_no_error(store: Path) -> None:
    ingest_path(store, H200_TRACE)
    read_end, write_end = os.pipe()
    os.close(read_end)
    args = [sys.executable, "-m", "profharness.cli", "export", "latest", "--store", str(store)]
    done = subprocess.run(args, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write_end)
    assert done.stderr == ""
    assert done.returncode == 0


@pytest.mark.filterwarnings("ignore")  # the other reader's use of pandas is out of date
def test_an_exported_trace_says_what_the_original_said(tmp_path: Path) -> None:
    from hta.trace_analysis import TraceAnalysis

    original, store, out = tmp_path / "in.json.gz", tmp_path / "s.db", tmp_path / "out.json.gz"
    original.write_bytes(H200_TRACE.read_bytes())
    assert invoke("ingest", original, "--store", store).exit_code == 0
    assert invoke("export", "latest", "-o", out, "--store", store).exit_code == 0
    events = [
        json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] for path in (original, out)
    ]
    kernels = [
        sorted(
            (event["name"], event["dur"], event["args"]["grid"], event["args"]["correlation"])
            for event in each
            if event.get("cat") == "kernel"
        )
        for each in events
    ]
    assert kernels[0] == kernels[1]
    assert len(kernels[0]) > 300
    analysis = TraceAnalysis(trace_files={0: str(out)}, trace_dir=str(tmp_path))
    frame = analysis.t.get_trace(0)
    on_gpu = frame[frame.stream >= 0]
    assert len(on_gpu) == sum("stream" in event.get("args", {}) for event in events[0])
    assert (on_gpu.index_correlation > 0).all()


def test_the_gate_tells_the_backends_of_a_real_trace_apart(tmp_path: Path) -> None:
    store = tmp_path / "s.db"
    assert invoke("ingest", H200_TRACE, "--store", store).exit_code == 0
    gated = invoke("kernels", "--store", store, "--expect", "cudnn")
    assert isinstance(gated.exception, GateError)
    said = str(gated.exception)
    assert "range b2h8s512d64-fp16/math: expected cudnn, but math ran" in said
    assert "range b2h8s512d64-fp16/cudnn" not in said
    every = invoke("kernels", "--store", store, "--expect", "cudnn,flash,efficient,math")
    assert every.exit_code == 0, every.output


def test_runs_says_that_the_duration_of_a_trace_is_not_that_of_its_step(tmp_path: Path) -> None:
    """Bug: `runs` showed 11.1 ms for a trace whose step takes 10.8 ms, and only --help said why."""
    path = tmp_path / "s.db"
    text = "duration  that of a trace includes the time outside its steps"
    ingest_path(path, run_folder(tmp_path / "runs"))
    assert text not in invoke("runs", "--store", path).stdout
    ingest_path(path, Path(__file__).parents[2] / "traces" / "models" / "bert_fp32.json.gz")
    assert text in invoke("runs", "--store", path).stdout


def test_a_trace_has_no_number_of_cells(tmp_path: Path) -> None:
    """Bug: the table had 0 cells and 0 failed cells for a trace."""
    path = tmp_path / "s.db"
    ingest_path(path, Path(__file__).parents[2] / "traces" / "models" / "bert_fp32.json.gz")
    ingest_path(path, run_folder(tmp_path / "runs"))
    table = invoke("runs", "--store", path).stdout
    trace = next(line for line in table.splitlines() if "  trace  " in line)
    assert trace.split()[-3:] == ["-", "-", "71"]


@pytest.mark.parametrize("name", ["kernels", "runs"])
def test_a_file_whose_name_says_no_format_is_refused(
    name: str, store: Path, tmp_path: Path
) -> None:
    for output in ("k.xyz", "b.pdf", "bare"):
        with pytest.raises(UsageError, match=r"add --format, or use .*\.json .*\.html"):
            command(name).make_context(name, ["--store", str(store), "-o", str(tmp_path / output)])
    result = invoke(name, "--store", store, "-o", tmp_path / "k.xyz", "--format", "json")
    assert result.exit_code == 0
    assert json.loads((tmp_path / "k.xyz").read_text())["rows"] is not None


def test_a_dash_is_stdout(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs", "kernels"):
        result = invoke(name, "--store", store, "-o", "-", "--format", "json")
        assert json.loads(result.stdout)["schema"] == f"profharness.{name}/1"
    assert not (tmp_path / "-").exists()


def test_a_report_says_which_run_it_wrote(store: Path, tmp_path: Path) -> None:
    result = invoke("report", "--store", store, "-o", tmp_path / "r.json")
    assert result.stderr == f"wrote {tmp_path / 'r.json'}: run 20250102-030405-ab12\n"


def test_a_foreign_trace_has_nothing_to_bench(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    ingest_path(path, H200_TRACE)
    result = invoke("bench", "--run", "latest", "--store", path)
    assert isinstance(result.exception, NotFoundError)
    assert "has no cells" in str(result.exception)


def test_an_observed_program_has_nothing_to_bench(tmp_path: Path) -> None:
    record = {
        "schema": "profharness.run/1",
        "run": "20261122-135311-3058",
        "kind": "observe",
        "created": "2026-11-22T13:53:11+00:00",
        "profilers": ["torch"],
        "cells": [],
        "environment": {"torch": "2.13.0+cpu"},
        "traces": [],
        "note": None,
        "problems": [],
        "protocol": {},
        "profharness": "0.1.0",
    }
    (tmp_path / "run.json").write_text(json.dumps(record))
    ingest_path(tmp_path / "s.db", tmp_path)
    failed = invoke("bench", "--run", record["run"], "--store", tmp_path / "s.db").exception
    assert isinstance(failed, NotFoundError) and "(observe) has no cells" in str(failed)


def test_a_line_of_progress_names_the_case_of_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    (config,) = expand_configs("1,4,256,64,fp32")
    with on_terminal(), capture_progress() as show:
        for case in ("large", "equal", None):
            cell = Cell("0", config, "math", "ok", case=case)
            show(Step(1, 3, cell, "ok"))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"[1/3] {config.label} math{case}: ok" for case in (" (large)", " (equal)", "")
    ]


def test_kernels_prints_its_hints_after_the_result(tmp_path: Path, store: Path) -> None:
    three = tmp_path / "three.db"
    ingest_path(three, Path(__file__).parents[2] / "traces" / "h200-torch-nsys-ncu")
    other = "ncu, nsys recorded these kernels too"
    without = "efficient: refused: no such dtype"
    for path, text, words in ((three, other, ()), (store, without, ("--format", "csv"))):
        done = invoke("kernels", "--store", path, *words)
        assert done.exit_code == 0 and text in done.stderr
        assert done.output == done.stdout + done.stderr
