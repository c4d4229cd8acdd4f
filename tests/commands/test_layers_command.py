"""`profharness layers`, `diff` and `analyze` on real traces of small models."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from small_models import Model, record
from torch.nn import functional as F

import profharness
from profharness.attention.config import parse_config
from profharness.attention.costs import compulsory_bytes, flops
from profharness.cli import cli
from profharness.errors import GateError, NotFoundError, ProfharnessError, UsageError
from profharness.program.layer_map import merge_numbered
from profharness.store import Selection, ingest_path, open_store

LABEL = (
    "b3-h4-kv2-s16-d8-fp32-causal-q_strides=1024x8x64x1-k_strides=1024x8x64x1-v_strides=1024x8x64x1"
)


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(cli, [str(item) for item in arguments], catch_exceptions=True)
    assert result.exit_code == code, result.output
    return result.stdout


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training of SDPA, then inference of eager attention."""
    folder = tmp_path_factory.mktemp("layers")
    x = torch.randn(3, 16, 32)
    sdpa, eager = Model(), Model(eager=True)
    run(
        *("ingest", record(folder / "train.json", lambda: sdpa(x).sum().backward())),
        *("--store", folder / "s.db"),
    )
    with torch.no_grad():
        record(folder / "eager.json", lambda: eager(x))
    run("ingest", folder / "eager.json", "--store", folder / "s.db")
    return folder / "s.db"


def test_equal_layers_are_one_line(store: Path) -> None:
    with open_store(store) as opened:
        train = next(row.run for row in reversed(opened.runs()))
    answer = json.loads(run("layers", train, "--format", "json", "--store", store))
    assert answer["schema"] == "profharness.layers/1"
    (row,) = answer["rows"]
    assert row["module"] == "Model_0.Attention_{0-1}" and row["module_class"] == "Attention"
    assert (row["config"], row["calls"]) == (f"{LABEL}-bwd", 2)
    assert (row["phase"], row["mode"], row["ran"]) == ("train", "eager", "flash")
    assert row["replayable"] and row["forward_ns"] > 0 < row["backward_ns"]
    assert row["share"] is None and 0 < row["step_share"] < 1  # a CPU is no GPU that could be busy
    text = run("layers", train, "--store", store)
    assert "Model_0.Attention_{0-1}" in text and "flash" in text


def test_eager_attention_has_advice(store: Path) -> None:
    text = run("layers", "--store", store)
    assert "eager" in text and "scaled_dot_product_attention" in text
    message = run("layers", "--list-configs", "--store", store, code=1)
    assert message == ""
    assert (
        "Eager attention in Attention_{0-1} takes" in text
        and "times of CPU ops" in text
        and "GPU busy" not in text
    )


def test_capture_accepts_the_printed_configs(store: Path, tmp_path: Path) -> None:
    with open_store(store) as opened:
        train = next(row.run for row in reversed(opened.runs()))
    lines = run("layers", train, "--list-configs", "--store", store)
    assert run("layers", train, "--configs", "--store", store) == lines  # the earlier spelling
    assert "\n  --configs" not in run("layers", "--help")
    assert lines == f"{LABEL}-bwd  # Model_0.Attention_{{0-1}}\n"
    (tmp_path / "calls.txt").write_text(lines)
    run(
        *("capture", "--configs", tmp_path / "calls.txt", "--backend", "auto"),
        *("--out", tmp_path / "runs", "--store", tmp_path / "s.db", "--iterations", 1),
        *("--samples", 1, "--device", "cpu"),
    )
    with open_store(tmp_path / "s.db") as opened:
        (cell,) = opened.cells()
        assert opened.calls() == []  # what a cell calls is the cell
        assert (cell.status, cell.choice) == ("ok", "flash")
        assert parse_config(cell.config) == parse_config(f"{LABEL}-bwd")
        assert opened.rows(Selection(configs=[parse_config(f"{LABEL}-bwd")]))[1]


def test_layers_names_what_is_missing(store: Path, tmp_path: Path) -> None:
    x, layer = torch.randn(2, 8), torch.nn.Linear(8, 8)
    run("ingest", record(tmp_path / "t.json", lambda: layer(x)), "--store", tmp_path / "s.db")
    for arguments, error in (
        (["--store", str(tmp_path / "s.db")], "no stored run has attention calls"),
        (["--step", "9", "--store", str(store)], "has only step 0"),
        (["--torch", "x", "--store", str(store)], "'x'"),
        (
            ["--list-configs", "-o", "calls.txt", "--store", str(store)],
            "--list-configs > calls.txt",
        ),
        (
            ["--list-configs", "--format", "json", "--store", str(store)],
            "--list-configs > calls.txt",
        ),
    ):
        failed = CliRunner().invoke(cli, ["layers", *arguments]).exception
        assert isinstance(failed, ProfharnessError) and error in str(failed)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["model.layers.0.attn", "model.layers.1.attn"], "model.layers.{0-1}.attn"),
        (["a.3.b", "a.3.b"], "a.3.b"),
        (["L_0.A_1", "L_1.A_3", "L_2.A_5"], "L_{0-2}.A_{1,3,5}"),
        (["attn2"], "attn2"),
    ],
)
def test_numbers_of_layers_are_joined(names: list[str], text: str) -> None:
    assert merge_numbered(names) == text


def test_a_call_without_a_config_is_shown_with_its_dims(tmp_path: Path) -> None:
    """nsys tells sizes and no dtype."""
    report = Path(__file__).parents[1] / "data" / "llama_train.nsys.sqlite.gz"
    store = ("--store", tmp_path / "s.db")
    run("ingest", report, *store)
    (row,) = json.loads(run("layers", "--format", "json", *store))["rows"]
    assert row["config"] is None
    assert row["dims"][:3] == [[2, 32, 1024, 64], [2, 8, 1024, 64], [2, 8, 1024, 64]]
    assert "dims q 2x32x1024x64, k v 2x8x1024x64" in run("layers", *store)


STEPS = 3
SHAPE = "b3-h4-kv2-s16-d8"
CAPTURED = Path(__file__).parents[2] / "traces" / "h200-torch2.11"
FOREIGN = Path(__file__).parents[1] / "data" / "kineto_h200.json.gz"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Runs of one model: SDPA, the same again, written out, under autocast, trained, longer."""
    folder = tmp_path_factory.mktemp("layers")
    torch.manual_seed(0)
    sdpa, eager = Model(), Model(eager=True)
    x, longer = torch.randn(3, 16, 32), torch.randn(3, 24, 32)

    def infer(model: Model, x: torch.Tensor = x) -> None:
        with torch.no_grad():
            for _ in range(STEPS):
                model(x)

    def autocast() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            infer(sdpa)

    works = {
        "sdpa": lambda: infer(sdpa),
        "again": lambda: infer(sdpa),
        "eager": lambda: infer(eager),
        "bf16": autocast,
        "train": lambda: sdpa(x).sum().backward(),
        "longer": lambda: infer(sdpa, longer),
        "other": lambda: torch.randn(8, 8) @ torch.randn(8, 8),
    }
    runs = {"store": str(folder / "s.db")}
    for name, work in works.items():
        trace = record(folder / f"{name}.json", work)
        runs[name] = ingest_path(folder / "s.db", trace)[0].run
    plain = record(folder / "bare.json", lambda: infer(sdpa), with_stack=False)
    runs["bare"] = ingest_path(folder / "s.db", plain)[0].run
    return runs


def diff(programs: dict[str, str], left: str, right: str, *options: str) -> Any:
    names = [programs.get(name, name) for name in (left, right)]
    return CliRunner().invoke(cli, ["diff", *names, *options, "--store", programs["store"]])


def layers(programs: dict[str, str], left: str, right: str) -> list[dict[str, Any]]:
    result = diff(programs, left, right, "--format", "json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["schema"] == "profharness.diff/1"
    assert {"baseline", "candidate", "environment", "rows"} <= answer.keys()
    found: list[dict[str, Any]] = answer["layers"]
    return found


def test_a_model_written_out_pairs_by_layer_and_is_changed(programs: dict[str, str]) -> None:
    (row,) = layers(programs, "sdpa", "eager")
    assert row["baseline"]["module"] == "Model_0.Attention_{0-1}"
    assert (row["baseline"]["ran"], row["candidate"]["ran"]) == ("flash", "eager")
    assert (row["verdict"], row["changed"], row["backend_changed"]) == ("changed", True, True)
    assert row["baseline"]["calls"] == row["candidate"]["calls"] == 2
    assert row["baseline"]["config"].startswith(SHAPE)
    times = [row[side]["forward_ns"] for side in ("baseline", "candidate")]
    assert row["ratio"] == pytest.approx(times[1] / times[0]) and row["basis"] == "forward"
    assert row["baseline"]["backward_ns"] is None
    text = " ".join(diff(programs, "sdpa", "eager").stdout.split())
    assert (
        "The environments cannot be compared, because the traces do not record their PyTorch versions."
        in text
    )
    assert "Attention by layer" in text and "flash → eager" in text


def test_another_dtype_pairs_and_changes_no_backend(programs: dict[str, str]) -> None:
    (row,) = layers(programs, "sdpa", "bf16")
    assert (row["baseline"]["ran"], row["candidate"]["ran"]) == ("flash", "flash")
    assert "-bf16" in row["candidate"]["config"]
    assert not row["changed"] and row["verdict"] == row["speed"] != "changed"
    assert any("-fp32-" in text and "-bf16-" in text for text in row["reasons"])


def test_a_trace_without_modules_pairs_calls_by_position(programs: dict[str, str]) -> None:
    for left, right in (("sdpa", "bare"), ("bare", "sdpa"), ("bare", "bare")):
        rows = layers(programs, left, right)
        assert [row["baseline"]["ran"] for row in rows] == ["flash"], rows
        assert sum(row["baseline"]["calls"] for row in rows) in (2, 2 * STEPS)


def test_diff_compares_forward_times_if_one_side_has_no_backward(programs: dict[str, str]) -> None:
    (row,) = layers(programs, "sdpa", "train")
    assert row["basis"] == "forward" and row["candidate"]["backward_ns"] > 0
    assert "only the candidate has a backward pass" in row["reasons"]


def test_other_sizes_are_other_layers(programs: dict[str, str]) -> None:
    rows = layers(programs, "sdpa", "longer")
    assert [row["verdict"] for row in rows] == ["removed", "added"]
    assert rows[0]["candidate"] is None and rows[1]["baseline"] is None
    failed = diff(programs, "sdpa", "longer", "--fail-on", "added").exception
    assert isinstance(failed, GateError) and "no matching layer" in str(failed)


def test_a_program_against_itself_is_the_same(programs: dict[str, str]) -> None:
    (row,) = layers(programs, "sdpa", "sdpa")
    assert (row["verdict"], row["ratio"], row["changed"]) == ("same", 1.0, False)
    assert (
        diff(programs, "sdpa", "sdpa", "--fail-on", "changed,slower,backend-changed").exit_code == 0
    )


def test_gates_apply_to_layers(programs: dict[str, str]) -> None:
    for gate in ("backend-changed", "changed"):
        failed = diff(programs, "sdpa", "eager", "--fail-on", gate).exception
        assert isinstance(failed, GateError) and failed.exit_code == 3
        assert "Model_0.Attention_{0-1}: changed" in str(failed) and "flash → eager" in str(failed)
    assert diff(programs, "sdpa", "bf16", "--fail-on", "backend-changed").exit_code == 0
    wrong = diff(programs, "sdpa", "eager", "--fail-on", "backend")
    assert isinstance(wrong.exception, UsageError) and "backend-changed" in str(wrong.exception)


def test_a_gate_on_backends_without_attention_is_not_met(programs: dict[str, str]) -> None:
    failed = diff(programs, "sdpa", "other", "--fail-on", "backend-changed").exception
    assert isinstance(failed, GateError) and "nothing to compare" in str(failed)
    answer = json.loads(diff(programs, "sdpa", "other", "--format", "json").stdout)
    assert "layers" not in answer


def test_a_named_config_picks_its_layers(programs: dict[str, str]) -> None:
    label = layers(programs, "sdpa", "again")[0]["baseline"]["config"]
    answer = diff(programs, "sdpa", "again", "--config", label, "--format", "json")
    assert len(json.loads(answer.stdout)["layers"]) == 1
    none = diff(programs, "sdpa", "again", "--config", "1,1,64,64").exception
    assert isinstance(none, NotFoundError)
    assert "has no matching cells or kernels" in str(none)


def test_captures_have_no_layers(tmp_path: Path) -> None:
    ingest_path(tmp_path / "s.db", CAPTURED)
    path = str(tmp_path / "s.db")
    answer = CliRunner().invoke(
        cli, ["diff", "flash", "cudnn", "--store", path, "--format", "json"]
    )
    assert set(json.loads(answer.stdout)) == {
        *("schema", "answer", "rows", "baseline", "candidate", "environment", "costs"),
        *("baseline_name", "candidate_name"),
    }
    gate = ["diff", "flash", "cudnn", "--store", path, "--fail-on", "backend-changed"]
    failed = CliRunner().invoke(cli, gate).exception
    assert isinstance(failed, GateError) and "nothing to compare" in str(failed)


def test_the_python_interface_has_the_layers(programs: dict[str, str]) -> None:
    frame = profharness.diff(programs["sdpa"], programs["eager"], store=programs["store"])
    assert [row["backend_changed"] for row in frame.attrs["layers"]] == [True]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model trained, the same written out, one by math, and a program without attention."""
    folder = tmp_path_factory.mktemp("programs")
    sdpa, eager, x = Model(), Model(eager=True), torch.randn(3, 16, 32)
    q = torch.randn(2, 4, 16, 8)

    def by_math() -> None:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            F.scaled_dot_product_attention(q, q, q)

    works = {
        "plain": lambda: torch.randn(8, 8) @ torch.randn(8, 8),
        "math": by_math,
        "eager": lambda: eager(x),
        "train": lambda: sdpa(x).sum().backward(),
    }
    found = {"store": str(folder / "s.db")}
    for name, work in works.items():
        trace = record(folder / f"{name}.json", work)
        found[name] = ingest_path(folder / "s.db", trace)[0].run
    return found


def invoke(runs: dict[str, str], *arguments: str) -> Any:
    return CliRunner().invoke(cli, [*arguments, "--store", runs["store"]])


def rows(runs: dict[str, str], name: str, *options: str) -> list[dict[str, Any]]:
    result = invoke(runs, "analyze", "--run", runs[name], *options, "--format", "json")
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["rows"]
    return found


def test_rates_are_of_the_kernels_of_a_call_and_its_backward(runs: dict[str, str]) -> None:
    (row,) = rows(runs, "train")
    config = parse_config(row["config"])
    assert config.bwd and row["module"] == "Model_0.Attention_{0-1}"
    assert (row["backend"], row["status"], row["basis"]) == ("flash", "ok", "kernel")
    assert (row["flops"], row["compulsory_bytes"]) == (flops(config), compulsory_bytes(config))
    with open_store(Path(runs["store"])) as store:
        spent = [
            sum(kernel.total_ns for kernel in call.kernels) for call in store.calls(runs["train"])
        ]
        backward = [
            k for c in store.calls(runs["train"]) for k in c.kernels if k.direction == "backward"
        ]
    assert backward and row["duration_ns"] == pytest.approx(sum(spent) / len(spent), abs=0.5)
    assert row["flops_per_s"] == pytest.approx(row["flops"] / row["duration_ns"] * 1e9)
    assert "achieved" in {finding["code"] for finding in row["findings"]}


def test_eager_attention_has_its_own_findings(runs: dict[str, str]) -> None:
    (row,) = rows(runs, "eager")
    codes = {finding["code"] for finding in row["findings"]}
    assert row["backend"] == "eager" and "score_traffic" in codes and "fp32_products" not in codes
    assert row["phases"] == []
    assert any("scaled_dot_product_attention" in remedy["text"] for remedy in row["remedies"])


@pytest.mark.parametrize("name", ["math", "eager"])
def test_analyze_names_no_bottleneck_of_cpu_ops(runs: dict[str, str], name: str) -> None:
    """Bugs: `limited by memory traffic of the score matrix` at 0.07 GB/s, and `kernel times`."""
    (row,) = rows(runs, name)
    assert row["bottleneck"] is None
    text = " ".join(invoke(runs, "analyze", "--run", runs[name]).stdout.split())
    assert text.startswith("These measurements show no bottleneck for ")
    assert "% of the op time is not spent on matrix products." in text
    assert "rates of op times" in text and "kernel" not in text.replace("sdpa_kernel", "")
    assert "--peaks measure" not in text  # the trace does not record its CPU


@pytest.mark.parametrize("command", ["layers", "kernels", "report"])
def test_the_tables_of_a_cpu_trace_have_ops_and_no_gpu(runs: dict[str, str], command: str) -> None:
    """Bugs: shares of ops as `% of GPU time`, an empty column of that title, and `87 more kernels`."""
    form = ["--format", "md"] if command == "report" else []
    text = " ".join(invoke(runs, command, "--run", runs["train"], *form).stdout.split())
    text = text.replace("No kernels on a GPU were recorded", "")
    assert text and "GPU" not in text and "kernel" not in text.split("What the words mean")[0]
    if command != "layers":
        assert "% of op time" in text and "mean µs/call" in text


def test_analyze_has_the_roles_of_math_kernels(runs: dict[str, str]) -> None:
    (row,) = rows(runs, "math")
    assert row["backend"] == "math" and row["phases"]
    assert {"qk+pv", "softmax"} <= {kernel["role"] for kernel in row["kernels"]}
    assert "score_traffic" in {finding["code"] for finding in row["findings"]}


def test_analyze_uses_the_latest_program_if_no_run_has_configs(runs: dict[str, str]) -> None:
    result = invoke(runs, "analyze")
    assert result.exit_code == 0 and "Model_0.Attention_{0-1}" in result.stdout
    table = invoke(runs, "analyze", "--format", "csv").stdout
    assert next(csv.DictReader(io.StringIO(table)))["module"] == "Model_0.Attention_{0-1}"


def test_configs_and_backends_select_calls(runs: dict[str, str]) -> None:
    label = rows(runs, "train")[0]["config"]
    assert len(rows(runs, "train", "--config", label, "--backend", "flash")) == 1
    for options in (("--config", "1,1,8,8"), ("--backend", "math")):
        failed = invoke(runs, "analyze", "--run", runs["train"], *options).exception
        assert isinstance(failed, NotFoundError) and "no attention call of" in str(failed)


def test_a_trace_without_attention_is_refused(runs: dict[str, str]) -> None:
    failed = invoke(runs, "analyze", "--run", runs["plain"]).exception
    assert isinstance(failed, NotFoundError) and "record_shapes=True" in str(failed)


def test_analyze_names_calls_without_a_config(tmp_path: Path) -> None:
    x, model = torch.randn(3, 16, 32), Model()
    trace = record(tmp_path / "t.json", lambda: model(x), record_shapes=False)
    run = ingest_path(tmp_path / "s.db", trace)[0].run
    arguments = ["analyze", "--run", run, "--store", str(tmp_path / "s.db")]
    failed = CliRunner().invoke(cli, arguments).exception
    assert isinstance(failed, NotFoundError) and "cannot be analyzed" in str(failed)


def test_the_python_interface_analyzes_programs(runs: dict[str, str]) -> None:
    frame = profharness.analyze(run=runs["train"], store=runs["store"])
    assert frame["module"].tolist() == ["Model_0.Attention_{0-1}"]


def test_kernels_suggests_layers_for_programs_only(runs: dict[str, str]) -> None:
    program = invoke(runs, "kernels", "--run", runs["train"])
    assert "profharness layers train.json" in program.stderr
    plain = invoke(runs, "kernels", "--run", runs["plain"])
    assert "layers" not in plain.stderr and "layers" not in plain.stdout
