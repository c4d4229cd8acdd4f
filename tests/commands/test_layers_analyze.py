"""`profharness analyze` of a program's trace, and what `kernels` says of one."""

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
from profharness.errors import NotFoundError
from profharness.store import ingest_path, open_store


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


def test_written_out_attention_is_told_its_own_findings(runs: dict[str, str]) -> None:
    (row,) = rows(runs, "eager")
    codes = {finding["code"] for finding in row["findings"]}
    assert row["backend"] == "eager" and "score_traffic" in codes and "fp32_products" not in codes
    assert row["phases"] == []
    assert any("scaled_dot_product_attention" in remedy["text"] for remedy in row["remedies"])


def test_math_is_taken_apart_as_math(runs: dict[str, str]) -> None:
    (row,) = rows(runs, "math")
    assert row["backend"] == "math" and row["phases"]
    assert {"qk+pv", "softmax"} <= {kernel["role"] for kernel in row["kernels"]}
    assert "score_traffic" in {finding["code"] for finding in row["findings"]}


def test_the_latest_program_answers_where_no_run_has_configs(runs: dict[str, str]) -> None:
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


def test_calls_whose_config_is_not_known_are_named(tmp_path: Path) -> None:
    x, model = torch.randn(3, 16, 32), Model()
    trace = record(tmp_path / "t.json", lambda: model(x), record_shapes=False)
    run = ingest_path(tmp_path / "s.db", trace)[0].run
    arguments = ["analyze", "--run", run, "--store", str(tmp_path / "s.db")]
    failed = CliRunner().invoke(cli, arguments).exception
    assert isinstance(failed, NotFoundError) and "has no figures" in str(failed)


def test_the_python_interface_analyzes_programs(runs: dict[str, str]) -> None:
    frame = profharness.analyze(run=runs["train"], store=runs["store"])
    assert frame["module"].tolist() == ["Model_0.Attention_{0-1}"]


def test_kernels_names_the_map_of_a_program_alone(runs: dict[str, str]) -> None:
    program = invoke(runs, "kernels", "--run", runs["train"])
    assert f"profharness layers {runs['train']}" in program.stderr
    plain = invoke(runs, "kernels", "--run", runs["plain"])
    assert "layers" not in plain.stderr and "layers" not in plain.stdout
