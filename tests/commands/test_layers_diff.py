"""`profharness diff` of two programs, layer by layer, on real traces of small models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from small_models import Model, record

import profharness
from profharness.cli import cli
from profharness.errors import GateError, NotFoundError, UsageError
from profharness.store import ingest_path

STEPS = 3
SHAPE = "b3-h4-kv2-s16-d8"
CAPTURED = Path(__file__).parents[2] / "traces" / "h200-torch2.11"
FOREIGN = Path(__file__).parents[1] / "data" / "kineto_h200.json.gz"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
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


def diff(store: dict[str, str], left: str, right: str, *options: str) -> Any:
    names = [store.get(name, name) for name in (left, right)]
    return CliRunner().invoke(cli, ["diff", *names, *options, "--store", store["store"]])


def layers(store: dict[str, str], left: str, right: str) -> list[dict[str, Any]]:
    result = diff(store, left, right, "--format", "json")
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["schema"] == "profharness.diff/1"
    assert {"baseline", "candidate", "environment", "rows"} <= answer.keys()
    found: list[dict[str, Any]] = answer["layers"]
    return found


def test_a_model_written_out_pairs_by_layer_and_is_changed(store: dict[str, str]) -> None:
    (row,) = layers(store, "sdpa", "eager")
    assert row["baseline"]["module"] == "Model_0.Attention_{0-1}"
    assert (row["baseline"]["ran"], row["candidate"]["ran"]) == ("flash", "eager")
    assert (row["verdict"], row["changed"], row["backend_changed"]) == ("changed", True, True)
    assert row["baseline"]["calls"] == row["candidate"]["calls"] == 2
    assert row["baseline"]["config"].startswith(SHAPE)
    times = [row[side]["forward_ns"] for side in ("baseline", "candidate")]
    assert row["ratio"] == pytest.approx(times[1] / times[0]) and row["basis"] == "forward"
    assert row["baseline"]["backward_ns"] is None
    text = " ".join(diff(store, "sdpa", "eager").stdout.split())
    assert "whether the environments are the same is not told" in text
    assert "Attention by layer" in text and "flash → eager" in text


def test_another_dtype_pairs_and_changes_no_backend(store: dict[str, str]) -> None:
    (row,) = layers(store, "sdpa", "bf16")
    assert (row["baseline"]["ran"], row["candidate"]["ran"]) == ("flash", "flash")
    assert "-bf16" in row["candidate"]["config"]
    assert not row["changed"] and row["verdict"] == row["speed"] != "changed"
    assert any("-fp32-" in text and "-bf16-" in text for text in row["reasons"])


def test_a_trace_without_modules_pairs_by_the_calls_place(store: dict[str, str]) -> None:
    for left, right in (("sdpa", "bare"), ("bare", "sdpa"), ("bare", "bare")):
        rows = layers(store, left, right)
        assert [row["baseline"]["ran"] for row in rows] == ["flash"], rows
        assert sum(row["baseline"]["calls"] for row in rows) in (2, 2 * STEPS)


def test_forward_alone_is_compared_where_one_side_has_a_backward(store: dict[str, str]) -> None:
    (row,) = layers(store, "sdpa", "train")
    assert row["basis"] == "forward" and row["candidate"]["backward_ns"] > 0
    assert "only the candidate has a backward" in row["reasons"]


def test_other_sizes_are_other_layers(store: dict[str, str]) -> None:
    rows = layers(store, "sdpa", "longer")
    assert [row["verdict"] for row in rows] == ["removed", "added"]
    assert rows[0]["candidate"] is None and rows[1]["baseline"] is None
    failed = diff(store, "sdpa", "longer", "--fail-on", "added").exception
    assert isinstance(failed, GateError) and "no such layer" in str(failed)


def test_a_program_against_itself_is_the_same(store: dict[str, str]) -> None:
    (row,) = layers(store, "sdpa", "sdpa")
    assert (row["verdict"], row["ratio"], row["changed"]) == ("same", 1.0, False)
    assert diff(store, "sdpa", "sdpa", "--fail-on", "changed,slower,backend-changed").exit_code == 0


def test_gates_hold_for_layers(store: dict[str, str]) -> None:
    for gate in ("backend-changed", "changed"):
        failed = diff(store, "sdpa", "eager", "--fail-on", gate).exception
        assert isinstance(failed, GateError) and failed.exit_code == 3
        assert "Model_0.Attention_{0-1}: changed" in str(failed) and "flash → eager" in str(failed)
    assert diff(store, "sdpa", "bf16", "--fail-on", "backend-changed").exit_code == 0
    wrong = diff(store, "sdpa", "eager", "--fail-on", "backend")
    assert isinstance(wrong.exception, UsageError) and "backend-changed" in str(wrong.exception)


def test_a_gate_on_backends_without_attention_is_not_met(store: dict[str, str]) -> None:
    failed = diff(store, "sdpa", "other", "--fail-on", "backend-changed").exception
    assert isinstance(failed, GateError) and "nothing to compare" in str(failed)
    answer = json.loads(diff(store, "sdpa", "other", "--format", "json").stdout)
    assert "layers" not in answer


def test_a_named_config_picks_its_layers(store: dict[str, str]) -> None:
    label = layers(store, "sdpa", "again")[0]["baseline"]["config"]
    answer = diff(store, "sdpa", "again", "--config", label, "--format", "json")
    assert len(json.loads(answer.stdout)["layers"]) == 1
    none = diff(store, "sdpa", "again", "--config", "1,1,64,64").exception
    assert isinstance(none, NotFoundError)
    assert "has no cells and no kernels of what was asked for" in str(none)


def test_captures_have_no_layers(tmp_path: Path) -> None:
    ingest_path(tmp_path / "s.db", CAPTURED)
    path = str(tmp_path / "s.db")
    answer = CliRunner().invoke(
        cli, ["diff", "flash", "cudnn", "--store", path, "--format", "json"]
    )
    assert set(json.loads(answer.stdout)) == {
        *("schema", "rows", "baseline", "candidate", "environment", "costs"),
    }
    gate = ["diff", "flash", "cudnn", "--store", path, "--fail-on", "backend-changed"]
    failed = CliRunner().invoke(cli, gate).exception
    assert isinstance(failed, GateError) and "nothing to compare" in str(failed)


def test_the_python_interface_has_the_layers(store: dict[str, str]) -> None:
    frame = profharness.diff(store["sdpa"], store["eager"], store=store["store"])
    assert [row["backend_changed"] for row in frame.attrs["layers"]] == [True]
