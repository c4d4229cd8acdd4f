"""Predictions for a program's attention on another GPU: real H200 traces, and programs that run
here on a CPU and on tensors without data.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from waiting import PATIENCE_S
from written_benches import US, bench_run

from profharness.atlas.data import packaged_atlases, read_atlas
from profharness.attention.config import parse_config
from profharness.cli import find_command
from profharness.commands.layers import find_places
from profharness.commands.layers.forecast_map import forecast_map
from profharness.errors import NotFoundError
from profharness.program.layer_map import find_layers
from profharness.store import Selection, ingest_path, open_store

layers = find_command("layers")

MODELS = Path(__file__).parents[2] / "traces" / "models"
TRACED = ("llama_train", "llama_checkpoint", "llama_compile", "unet", "whisper", "bert_fp32")
PLAIN, FORCED = "b4-h12-s1369-d72-bf16", "b2-h6-s784-d128-bf16"  # cells of the atlas
PROGRAM = """
import sys, torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa


class Layer(nn.Module):
    def forward(self, q, k):
        return sdpa(q, k, k)


class Forced(Layer):
    def forward(self, q, k):
        with sdpa_kernel(SDPBackend.MATH):
            return super().forward(q, k)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.plain = nn.ModuleList([Layer(), Layer()])
        self.forced, self.decode, self.odd = Forced(), Layer(), Layer()

    def forward(self, tensor):
        q = tensor(4, 12, 1369, 72)
        for layer in self.plain:
            layer(q, q)
        q = tensor(2, 6, 784, 128)
        self.forced(q, q)
        for length in range(100, 120):
            self.decode(tensor(1, 8, 1, 64), tensor(1, 8, length, 64))
        q = tensor(1, 2, 16, 64).double()
        self.odd(q, q)


with torch.device("meta"), torch.no_grad():
    Model()(lambda *dims: torch.empty(dims, dtype=torch.bfloat16))
q = torch.ones(1, 2, 64, 64)
Layer()(q, q)
print("the program's own")
sys.exit(7)
"""


def told(done: Result) -> dict[str, Any]:
    assert done.exit_code == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def map_of(store: Path, *words: str) -> Result:
    return CliRunner().invoke(layers, [*words, "--store", str(store)])


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a store per model."""
    folder = tmp_path_factory.mktemp("traced")
    for name in (*TRACED, "llama_eager"):
        ingest_path(folder / f"{name}.db", MODELS / f"{name}.json.gz")
    return {path.stem: path for path in folder.glob("*.db")}


@pytest.mark.parametrize("name", TRACED)
def test_a_trace_of_the_gpu_agrees_with_the_prediction(name: str, traced: dict[str, Path]) -> None:
    answer = told(map_of(traced[name], "--gpu", "H200", "--format", "json"))
    rows, whole = answer["rows"], answer["predicted"]
    for row in rows:
        assert row["predicted_backend"] == row["ran"]
        assert row["predicted_source"] in ("measured", "model", "floor")
        times = [row[f"predicted_{key}ns"] for key in ("low_", "", "high_")]
        if row["predicted_ns"] is None:
            assert row["predicted_source"] == "floor" and row["predicted_total_ns"] is None
            assert times[0] > 0
        else:
            assert times == sorted(times)
            assert row["predicted_total_ns"] == pytest.approx(row["predicted_ns"] * row["calls"])
            assert row["predicted_best_ns"] <= row["predicted_ns"]
    assert whole["of"] == "step" and whole["machine"].startswith("NVIDIA H200, torch 2.11.0")
    assert whole["ns"] == pytest.approx(sum(row["predicted_total_ns"] or 0 for row in rows))
    calls = sum(row["calls"] for row in rows)
    assert whole["calls"] + whole["unpredicted_calls"] == pytest.approx(calls)
    bare = told(map_of(traced[name], "--format", "json"))
    assert bare["predicted"] is None
    assert all(row["predicted_backend"] is None for row in bare["rows"])


def test_recomputation_is_only_a_forward(traced: dict[str, Path]) -> None:
    answer = told(map_of(traced["llama_checkpoint"], "--gpu", "H200", "--format", "json"))
    times = {
        row["direction"]: row["predicted_ns"] or row["predicted_low_ns"] for row in answer["rows"]
    }
    assert times["recompute"] < times["forward"]


def test_a_gpu_without_an_atlas_has_a_choice_and_a_bound(traced: dict[str, Path]) -> None:
    done = map_of(traced["llama_train"], "--gpu", "A100", "--torch", "2.8", "--format", "json")
    answer = told(done)
    (row,) = answer["rows"]
    assert (row["predicted_backend"], row["predicted_source"]) == ("flash", "floor")
    assert row["predicted_ns"] is None and row["predicted_low_ns"] > 0
    assert answer["predicted"]["machine"] is None and answer["predicted"]["calls"] == 0
    assert any("no atlas for" in text for text in answer["predicted"]["conclusions"])


def test_eager_attention_is_predicted_as_a_call_of_sdpa(traced: dict[str, Path]) -> None:
    """Bug: the advised call could not be predicted: `eager attention calls no backend`."""
    answer = told(map_of(traced["llama_eager"], "--gpu", "H200", "--format", "json"))
    (row,) = answer["rows"]
    assert (row["ran"], row["predicted_backend"]) == ("eager", "cudnn")
    assert row["predicted_total_ns"] == pytest.approx(126_189, rel=1e-3)
    assert any(
        "replaces eager attention by scaled_dot" in text
        for text in answer["predicted"]["conclusions"]
    )


def test_eager_attention_without_shapes_is_not_predicted(traced: dict[str, Path]) -> None:
    with open_store(traced["llama_eager"]) as opened:
        layers = find_layers(opened, opened.find_run(Selection(None), "attention calls"))
    layers = replace(layers, rows=tuple(replace(row, config=None) for row in layers.rows))
    ((place, _),) = find_places("H200", None)
    with pytest.raises(NotFoundError, match="record the trace with record_shapes=True"):
        forecast_map(layers, place)


@pytest.mark.parametrize("other", ["--savings", "--list-configs", "--fail-on=math-fallback"])
def test_options_about_what_ran_are_refused(other: str, traced: dict[str, Path]) -> None:
    done = map_of(traced["unet"], "--gpu", "H200", other)
    assert "--gpu cannot be combined with" in str(done.exception)


@pytest.fixture(scope="module")
def observed(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("observed")
    (folder / "model.py").write_text(PROGRAM)
    words = ["observe", "--gpu", "H200", "--profiler", "none", "--", sys.executable, "model.py"]
    done = subprocess.run(
        [sys.executable, "-m", "profharness", *words],
        cwd=folder, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    return folder / "profharness.db", done


def test_the_map_is_printed_to_stderr_and_stdout_is_the_programs(
    observed: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, done = observed
    assert (done.returncode, done.stdout) == (7, "the program's own\n"), done.stderr
    assert "  H200, torch 2.11.0, cuDNN 91900" in done.stderr
    assert "layers" in done.stderr.splitlines()[-1] and "--gpu" in done.stderr.splitlines()[-1]


def test_calls_on_tensors_without_data_are_predicted(
    observed: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    answer = told(map_of(observed[0], "--gpu", "H200", "--format", "json"))
    rows = {row["module"] or row["config"]: row for row in answer["rows"]}
    atlas = read_atlas(packaged_atlases()[0])
    cells = {
        (label, name): atlas.find(parse_config(label), name)
        for label, name in ((PLAIN, "auto"), (FORCED, "math"), (FORCED, "cudnn"))
    }
    times = {key: 1e3 * (cell.kernel_us or 0) for key, cell in cells.items() if cell}
    plain = rows["plain.{0-1}"]
    assert (plain["config"], plain["program_calls"], plain["ran"]) == (PLAIN, 2, None)
    assert (plain["predicted_backend"], plain["predicted_source"]) == ("cudnn", "measured")
    assert plain["predicted_ns"] == pytest.approx(times[PLAIN, "auto"])
    assert plain["predicted_total_ns"] == pytest.approx(2 * times[PLAIN, "auto"])
    assert plain["predicted_kernels"]
    forced = rows["forced"]
    assert (forced["asked"], forced["predicted_backend"]) == ("math", "math")
    assert (forced["predicted_best"], forced["predicted_certain"]) == ("cudnn", True)
    saved = times[FORCED, "math"] - times[FORCED, "cudnn"]
    assert forced["predicted_saves_ns"] == pytest.approx(saved)
    decode = rows["decode"]
    points = decode["program_points"]
    assert decode["lengths"] == [100, 119]
    assert len(points) <= 16 and sum(calls for _, calls in points) == 20
    odd = rows["odd"]
    assert odd["config"] is None and odd["predicted_backend"] is None
    assert "fp64" in odd["predicted_reason"]
    whole = answer["predicted"]
    assert whole["of"] == "program" and whole["unpredicted_calls"] >= 1
    assert any(text.startswith("No time for odd: ") for text in whole["conclusions"])


def test_an_unknown_gpu_is_reported_before_the_program_runs(tmp_path: Path) -> None:
    program = [sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')"]
    words = ["observe", "--gpu", "ZX81", "--", *program]
    done = subprocess.run(
        [sys.executable, "-m", "profharness", *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2 and "ZX81" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_benches_of_the_requested_gpus(
    observed: tuple[Path, subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Calls outside of steps belong to the whole program, with the backends that it allowed."""
    store = tmp_path / "s.db"
    shutil.copy(observed[0], store)
    labels = map_of(store, "--savings", "--list-configs").stdout.split()
    assert {PLAIN, FORCED} < {*labels} and len(labels) > 10  # decoding at many lengths
    runs = []
    for name, speed in (("NVIDIA H100 80GB HBM3", 30), ("NVIDIA H200", 20)):
        took = {"auto": speed, "cudnn": speed, "math": 9 * speed}
        cells = {(label, backend): us * US for label in labels for backend, us in took.items()}
        machine = {"device_type": "cuda", "gpu": name, "torch": "2.11.0"}
        made = bench_run(store, f"of{speed}", cells, machine, measurement="kernel", choice="cudnn")
        runs.append(made)
    done = map_of(store, "--bench", ",".join(runs), "--format", "json")
    sides = {
        layer["sides"][0]["module"] or "own": (layer["sides"][0], layer["calls"])
        for layer in told(done)["benched"]
    }
    taken = {name: [call["backend"] for call in calls] for name, (_, calls) in sides.items()}
    assert taken["plain.{0-1}"] == taken["decode"] == ["cudnn", "cudnn"]
    assert taken["forced"] == ["math", "math"] and taken["odd"] == [None, None]
    assert [call["best"] for call in sides["forced"][1]] == ["cudnn", "cudnn"]
    assert [call["calls"] for call in sides["decode"][1]] == [20, 20]
    assert [call["ns"] for call in sides["decode"][1]] == pytest.approx([30 * US, 20 * US])
    text = map_of(store, "--bench", ",".join(runs)).stdout
    assert "In these benchmarks, attention of the whole program takes" in " ".join(text.split())
