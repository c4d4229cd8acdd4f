"""`profharness layers` on real traces of small models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from small_models import Model, record

from profharness.attention.config import parse_config
from profharness.cli import cli
from profharness.errors import ProfharnessError
from profharness.program.layer_map import merge_numbered
from profharness.store import Selection, open_store

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


def test_a_line_is_a_group_of_like_layers(store: Path) -> None:
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


def test_eager_attention_is_named_with_what_helps(store: Path) -> None:
    text = run("layers", "--store", store)
    assert "eager" in text and "scaled_dot_product_attention" in text
    message = run("layers", "--configs", "--store", store, code=1)
    assert message == ""
    assert "no kernels recorded, times are of CPU ops, attention" in text and "GPU busy" not in text


def test_its_configs_are_what_capture_takes(store: Path, tmp_path: Path) -> None:
    with open_store(store) as opened:
        train = next(row.run for row in reversed(opened.runs()))
    lines = run("layers", train, "--configs", "--store", store)
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


def test_what_is_not_there_is_named(store: Path, tmp_path: Path) -> None:
    x, layer = torch.randn(2, 8), torch.nn.Linear(8, 8)
    run("ingest", record(tmp_path / "t.json", lambda: layer(x)), "--store", tmp_path / "s.db")
    for arguments, error in (
        (["--store", str(tmp_path / "s.db")], "no stored run has attention calls"),
        (["--step", "9", "--store", str(store)], "has 1 steps, 0 to 0"),
        (["--torch", "x", "--store", str(store)], "'x'"),
        (["--configs", "-o", "calls.txt", "--store", str(store)], "--configs > calls.txt"),
        (["--configs", "--format", "json", "--store", str(store)], "--configs > calls.txt"),
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


def test_a_call_that_is_no_config_is_shown_with_its_dims(tmp_path: Path) -> None:
    """nsys tells sizes and no dtype."""
    report = Path(__file__).parents[1] / "data" / "llama_train.nsys.sqlite.gz"
    store = ("--store", tmp_path / "s.db")
    run("ingest", report, *store)
    (row,) = json.loads(run("layers", "--format", "json", *store))["rows"]
    assert row["config"] is None
    assert row["dims"][:3] == [[2, 32, 1024, 64], [2, 8, 1024, 64], [2, 8, 1024, 64]]
    assert "dims q 2x32x1024x64, k v 2x8x1024x64" in run("layers", *store)
