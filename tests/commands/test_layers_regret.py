"""`profharness layers --regret` and its gates: real traces of small models, benches whose samples are
written by hand, and a real bench by scripts/check_regret.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from small_models import Model, record
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from waiting import PATIENCE_S
from written_benches import US, bench_run

from profharness.attention.config import parse_config
from profharness.attention.dispatch.by_rule import named_platforms
from profharness.cli import cli
from profharness.errors import GateError, ProfharnessError, UsageError
from profharness.jobs import into_store as recording
from profharness.measurements.evaluation import evaluate_bench
from profharness.program.gates import check_gates, parse_gates, require_recorded
from profharness.program.layer_map import LayerMap, find_layers, suggestions
from profharness.program.regret import regret_configs, regret_map
from profharness.rows import StepRow
from profharness.run import BenchOptions
from profharness.store import Selection, ingest_path, open_store

ROOT = Path(__file__).resolve().parents[2]
H200 = {"device_type": "cuda", "gpu": "NVIDIA H200", "torch": "2.11.0"}


class Decoder(torch.nn.Module):
    """One query against ever more keys."""

    def forward(self, q: Any, k: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, k)


class Half(torch.nn.Module):
    """Two layers of which the first runs on another backend than the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Decoder() for _ in range(2))

    def forward(self, q: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            self.layers[0](q, q)
        return self.layers[1](q, q)


def traced(folder: Path, name: str, work: Any) -> Path:
    """A store with the trace of the work alone."""
    store = folder / f"{name}.db"
    ingest_path(store, record(folder / f"{name}.json", work))
    return store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores: math (a training), decode (lengths 16 to 48), half and twice (two backends)."""
    place = tmp_path_factory.mktemp("regret")
    x, model = torch.randn(3, 16, 32), Model()
    half, decoder, q = Half().eval(), Decoder(), torch.randn(1, 2, 32, 8)

    def train() -> None:
        with sdpa_kernel(SDPBackend.MATH):
            model(x).sum().backward()

    def decode() -> None:
        for length in (16, 20, 24, 32, 48):
            decoder(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, length, 8))

    def twice() -> None:
        decoder(q, q)
        with sdpa_kernel(SDPBackend.MATH):
            decoder(q, q)

    traced(place, "math", train)
    with torch.no_grad():
        traced(place, "decode", decode)
        traced(place, "half", lambda: half(q))
        traced(place, "twice", twice)
    return place


def the_map(store: Path, **changes: Any) -> LayerMap:
    with open_store(store) as opened:
        return replace(
            find_layers(opened, opened.find_run(Selection(), "attention calls")), **changes
        )


def times_of(layers: LayerMap) -> dict[tuple[str, str], Any]:
    """Whole calls of 100 µs on math and 40 on flash, forwards of 30 and 20."""
    whole, forward = regret_configs(layers)
    return {
        (whole.label, "auto"): 41 * US,
        (whole.label, "math"): 100 * US,
        (whole.label, "flash"): 40 * US,
        (forward.label, "math"): 30 * US,
        (forward.label, "flash"): 20 * US,
    }


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(cli, [str(item) for item in arguments])


def test_regret_of_a_stored_bench(folder: Path) -> None:
    store = folder / "math.db"
    layers = the_map(store)
    run = bench_run(store, "aaaa", times_of(layers))
    answer = invoke(
        *("layers", layers.run, "--bench", run, "--format", "json"),
        *("--store", store),
    )
    assert answer.exit_code == 0, answer.output
    told = json.loads(answer.stdout)
    (row,) = told["rows"]
    assert (row["ran"], row["best"], row["calls"]) == ("math", "flash", 2)
    assert (row["ran_ns"], row["best_ns"]) == (100 * US, 40 * US)
    saved = [row[f"saves_{name}ns"] for name in ("", "forward_", "backward_")]
    assert saved == [120 * US, 20 * US, 100 * US]
    regret = told["regret"]
    assert (regret["run"], regret["measurement"], regret["saves_ns"]) == (run, "wall", 120 * US)
    assert not regret["launch_bound"]  # a CPU's step waits for nothing else
    text = invoke("layers", layers.run, "--bench", run, "--store", store).stdout
    assert "120.0 µs (20.0 µs forward, 100.0 µs backward) a step" in " ".join(text.split())
    assert "which takes flash there: 2.50x as fast, saves 120.0 µs" in " ".join(text.split())
    assert "under the profiler" in text


def test_what_is_as_fast_or_wrong_or_unclear_is_not_advised(folder: Path) -> None:
    store = folder / "math.db"
    layers = the_map(store)
    times = times_of(layers)
    whole = next(iter(times))[0]
    for name, ns, text in (
        ("bbbb", 99 * US, "is shown to be faster"),  # within the threshold
        ("cccc", [40 * US] * 3, "is not told apart from flash"),  # too few samples
    ):
        run = bench_run(store, name, times | {(whole, "flash"): ns})
        with open_store(store) as opened:
            told = regret_map(layers, evaluate_bench(opened, run))
        (row,) = told.rows
        assert (row.best, row.saves_ns) == ("math", 0)
        assert told.regret is not None and text in "; ".join(told.regret.conclusions)
    with open_store(store) as opened:
        found = evaluate_bench(opened, run)
    cheat = tuple(
        replace(row, verified=False, median_ns=1.0) if row.backend == "flash" else row
        for row in found.rows
    )
    told = regret_map(layers, replace(found, rows=cheat))
    assert told.rows[0].best == "math" and told.regret
    assert any("its output is wrong" in text for text in told.regret.conclusions)


def test_a_step_that_waits_for_the_cpu_saves_at_most_that(folder: Path) -> None:
    """The trace is the CPU's; only where the rest of a GPU's would stand is filled in."""
    store = folder / "math.db"
    layers = the_map(store, gpu="NVIDIA H200")
    run = bench_run(store, "dddd", times_of(layers), H200)
    for busy, bound in ((80, True), (950, False)):
        step = StepRow(1, 0, "s", 0, 1000 * US, busy * US)
        with open_store(store) as opened:
            found = regret_map(replace(layers, steps=(step,)), evaluate_bench(opened, run))
        told = found.regret
        assert ("saves at most 120.0 µs" in found.rows[0].advice[0]) == bound
        assert told is not None and told.launch_bound == bound
        first = told.conclusions[0]
        assert ("busy 8% of the traced step" in first and "at most 120.0 µs" in first) == bound
        assert any("launches too" in text for text in told.conclusions)  # event is no kernel time


def test_the_change_that_the_rules_name_has_its_measured_gain(folder: Path) -> None:
    """Float32 on a GPU of torch 2.11: flash wants another dtype."""
    store = folder / "math.db"
    place = named_platforms("2.11", "H200")[0]
    layers = the_map(store, gpu="NVIDIA H200", platform=place)
    config = parse_config(str(layers.rows[0].config))
    advice = tuple(item.text for item in suggestions(config, place) if item.advice)
    layers = replace(layers, rows=(replace(layers.rows[0], advice=advice),))
    changed = [each for each in regret_configs(layers) if each.dtype == "bf16" and each.bwd]
    times = times_of(the_map(store)) | {
        (each.label, backend): 10 * US for each in changed for backend in ("flash", "cudnn")
    }
    run = bench_run(store, "eeee", times, H200)
    with open_store(store) as opened:
        told = regret_map(layers, evaluate_bench(opened, run)).rows[0]
    gain = "10.00x as fast, saves at most 180.0 µs a step"
    assert any("bf16" in text and gain in text for text in told.advice), told.advice


def test_decoding_is_timed_at_three_lengths(folder: Path) -> None:
    layers = the_map(folder / "decode.db")
    (row,) = layers.rows
    assert row.phase == "decode" and row.lengths == (16, 48) and row.calls == 5 / len(layers.steps)
    weights = {
        parse_config(label).seq_len_kv: part * len(layers.steps) for label, part in row.points
    }
    assert weights == pytest.approx({16: 1.5, 24: 2.0 - 0.5 + 2 / 3, 48: 1 + 1 / 3})
    assert sum(weights.values()) == pytest.approx(5)
    lengths = [config.seq_len_kv for config in regret_configs(layers)]
    assert lengths == [16, 24, 48]


def test_what_is_recomputed_saves_a_forward_alone(tmp_path: Path) -> None:
    store = tmp_path / "s.db"
    ingest_path(store, ROOT / "traces" / "models" / "llama_checkpoint.json.gz")
    layers = the_map(store)
    whole, forward = (config.label for config in regret_configs(layers))
    times = {
        (whole, "cudnn"): 100 * US,
        (whole, "flash"): 40 * US,
        (forward, "cudnn"): 30 * US,
        (forward, "flash"): 20 * US,
    }
    run = bench_run(store, "3333", times, H200)
    with open_store(store) as opened:
        told = regret_map(layers, evaluate_bench(opened, run))
    saves = {row.direction: (row.saves_ns, row.saves_backward_ns) for row in told.rows}
    assert saves == {"forward": (180 * US, 150 * US), "recompute": (30 * US, None)}


def test_bench_answers_only_for_what_it_has(folder: Path) -> None:
    store = folder / "math.db"
    layers = the_map(store)
    times = times_of(layers)
    (whole, forward) = regret_configs(layers)
    del times[forward.label, "math"]
    run = bench_run(store, "ffff", times)
    with open_store(store) as opened:
        told = regret_map(layers, evaluate_bench(opened, run))
    assert told.rows[0].saves_ns == 120 * US and told.rows[0].saves_forward_ns is None
    assert told.regret is not None and told.regret.saves_forward_ns is None
    other = bench_run(store, "1111", {("1,1,8,8,fp32", "math"): US})
    elsewhere = bench_run(store, "2222", times_of(layers), H200)
    for arguments, error in (
        (["--bench", other], "has no time of what ran"),
        (["--bench", elsewhere], "was timed on NVIDIA H200"),
        (["--bench", run, "--max-time", "1s"], "--max-time is for measuring"),
        (["--backend", "flash"], "add --regret"),
        (["--configs", "--bench", run], "leave one out"),
    ):
        failed = invoke("layers", layers.run, *arguments, "--store", store).exception
        assert isinstance(failed, ProfharnessError) and error in str(failed)
    printed = invoke("layers", layers.run, "--regret", "--configs", "--store", store).stdout
    assert printed == f"{whole}\n{forward}\n"


def test_gates(folder: Path) -> None:
    half = the_map(folder / "half.db")
    for fail_on, expect, told in (
        ("math-fallback", (), ["math-fallback: Half_0.Decoder_0"]),
        ("eager-attention,unseen,backend-changed", (), []),
        ("", ("math@*.Decoder_0", "flash,math@*"), []),
        ("", ("flash",), ["--expect flash: Half_0.Decoder_0", "math ran"]),
        ("", ("flash@model.layers.*",), ["matches no call", "Half_0.Decoder_0"]),
        ("", ("flash@Decoder_1",), []),
    ):
        gates = parse_gates([fail_on], expect)
        if not told:
            check_gates(half, gates)
            continue
        with pytest.raises(GateError) as failed:
            check_gates(half, gates)
        assert all(text in str(failed.value) for text in told)
    with pytest.raises(GateError, match=r"backend-changed: .*flash and math ran for like calls"):
        check_gates(the_map(folder / "twice.db"), parse_gates(["backend-changed"], []))
    both = tuple(replace(row, ran="flash and math") for row in half.rows)
    with pytest.raises(GateError, match="math-fallback: Half_0"):
        check_gates(replace(half, rows=both), parse_gates(["math-fallback"], []))


def test_a_gate_on_what_nothing_tells_is_not_green(folder: Path) -> None:
    half = the_map(folder / "half.db")
    unseen = replace(half, rows=tuple(replace(row, ran=None) for row in half.rows))
    for gate in ("math-fallback", "backend-changed"):
        with pytest.raises(
            GateError, match=f"{gate}: nothing to judge, what ran is told of no call"
        ):
            check_gates(unseen, parse_gates([gate], []))
    check_gates(unseen, parse_gates(["eager-attention"], []))  # a call of SDPA is none


def test_gates_of_what_only_an_observed_program_tells(folder: Path) -> None:
    half = the_map(folder / "half.db")
    for name in ("noop-mask", "asked-not-ran"):
        with pytest.raises(UsageError, match=f"--fail-on {name}: .* does not tell it"):
            require_recorded(half, parse_gates([name], []))
        with pytest.raises(GateError, match=f"{name}: not told"):
            check_gates(half, parse_gates([name], []))
    rows = tuple(replace(row, mask="nothing", asked="flash") for row in half.rows)
    gates = parse_gates(["noop-mask,asked-not-ran"], [])
    with pytest.raises(GateError) as failed:
        check_gates(replace(half, rows=rows), gates)
    assert len(re.findall("its mask hides nothing", str(failed.value))) == 2
    assert "asked for flash, math ran" in str(failed.value)
    rows = tuple(replace(row, mask="none", asked=row.ran) for row in half.rows)
    check_gates(replace(half, rows=rows), gates)
    check_gates(replace(half, rows=rows), parse_gates(["math-fallback"], []))  # it was asked for


def test_gates_of_the_command(folder: Path) -> None:
    store = ("--store", folder / "half.db")
    passed = invoke("layers", "--fail-on", "unseen", "--expect", "math,flash", *store)
    assert passed.exit_code == 0
    failed = invoke("layers", "--fail-on", "math-fallback", *store)
    assert isinstance(failed.exception, GateError) and "Decoder_0" in failed.stdout
    for arguments in (["--fail-on", "maths"], ["--expect", "fash@*"], ["--expect", "flash@"]):
        assert isinstance(invoke("layers", *arguments, *store).exception, UsageError)
    refused = invoke("layers", "--fail-on", "noop-mask", *store)
    assert isinstance(refused.exception, UsageError) and not refused.stdout


def test_a_trace_of_a_gpu_that_is_not_here_is_not_timed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "gpu_name", lambda: "NVIDIA L4")
    layers = the_map(folder / "math.db", gpu="NVIDIA H200")
    with pytest.raises(ProfharnessError, match="of NVIDIA H200, and this machine has NVIDIA L4"):
        recording.time_layers(layers, BenchOptions(), folder / "math.db")


def test_the_script_that_holds_predictions_against_savings(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "scripts" / "check_regret.py"), "--device", "cpu"),
            *("--tiny", "--phases", "train", "--json", str(figures)),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    (told,) = json.loads(figures.read_text())
    assert told["attention_ns"] > 0 and told["predicted_ns"] >= 0
    assert "train (own), math forced" in done.stdout
    assert (told["real_ns"] is None) == (told["advised"] is None)
