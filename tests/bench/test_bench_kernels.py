"""scripts/bench_kernels.py: floors and ratios by hand, targets at their edges, and a run on this CPU."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from written_samples import answer, cell, steady

from profharness.attention.config import expand_configs, parse_config
from profharness.devices import data_sheet

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "bench_kernels.py"
H200 = data_sheet("NVIDIA H200")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_kernels", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_kernels"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "floor_us", "by"),
    [
        ("1,1,16,8192,fp32", 4 * 16 * 8192 * 4 / 4.3e6, "bytes"),
        ("1,4,64,8192,fp32", 4 * 4 * 64 * 64 * 8192 / 67e6, "FLOP"),
        ("4,4,128,4096,fp16", 4 * 4 * 4 * 128 * 4096 * 2 / 4.3e6, "bytes"),
        ("4,16,4096,128,bf16", 4 * 4 * 16 * 4096**2 * 128 / 989.5e6, "FLOP"),
    ],
)
def test_the_floor_by_hand(script: ModuleType, text: str, floor_us: float, by: str) -> None:
    floor, what = script.floor_of(parse_config(text), H200)
    assert (floor / 1e3, what) == (pytest.approx(floor_us, rel=1e-6), by)
    assert script.floor_of(parse_config(text), None) is None


def shape(script: ModuleType, text: str, **times_us: float) -> Any:
    named = {name.replace("_compiled", "-compiled"): us * 1e3 for name, us in times_us.items()}
    return script.shape_of(parse_config(text), named, H200)


def test_the_best_of_each_side_and_what_is_missing(script: ModuleType) -> None:
    found = shape(script, "1,1,16,8192,fp16", naive_compiled=107, naive=11.4, tiled=4, slow=900)
    assert (found.best, found.peer, found.ratio) == ("tiled", "naive", pytest.approx(4 / 11.4))
    assert found.to_floor == pytest.approx(4e3 / found.floor_ns)
    alone = shape(script, "1,1,16,8192,fp16", naive=11.4)
    assert (alone.best, alone.ratio, alone.to_floor) == (None, None, None)
    assert "-" in script.table([alone])
    assert all(each.met is None for each in script.targets_of([alone], None))


def test_targets_at_their_edges(script: ModuleType) -> None:
    table = shape(script, "1,1,16,8192,fp16", auto=100, tiled=20)
    beside = shape(script, "1,1,16,8192,bf16", auto=100, tiled=80)
    large = parse_config("4,4,128,4096,fp32")
    floor_us = script.floor_of(large, H200)[0] / 1e3
    at = shape(script, "4,4,128,4096,fp32", tiled=1.49 * floor_us)
    triton = shape(script, script.TRITON_CONFIG, flash_triton=100, cudnn=59)
    found = {each.what: each for each in script.targets_of([table, beside, at], triton)}
    values = [each.value for each in found.values()]
    assert values == pytest.approx([0.2, math.sqrt(0.2 * 0.8), 0.8, 1.49, 0.59])
    assert [each.met for each in found.values()] == [True, True, True, True, False]
    assert "missed: TFLOP/s of flash_triton over cudnn" in script.verdict(list(found.values())[-1])
    over = shape(script, "4,4,128,4096,fp32", tiled=1.51 * floor_us)
    assert [e.met for e in script.targets_of([over], None) if "floor" in e.what] == [False]


def test_an_answer_becomes_shapes_and_what_has_no_time_is_named(
    script: ModuleType, tmp_path: Path
) -> None:
    refused = {"status": "refused", "message": "head_dim 8192 is too large\nmore"}
    note = "no CUDA-graph timing: operation not permitted when stream is capturing"
    text = "1,1,16,8192,fp16"
    cells = [
        cell(text, "naive", {"graph": steady(11_400), "event": steady(60_000)}),
        cell(text, "flash", {}, **refused),
        cell(text, "tiled", {"graph": steady(4_000), "event": steady(50_000)}),
        cell(text, "math", {"event": steady(70_000)}, warnings=(note,)),
    ]
    h200 = {"device_type": "cuda", "gpu": "NVIDIA H200", "tf32": False}
    found = answer(tmp_path, cells, h200, rank_by=("graph",))
    (one,) = script.shapes_of(found, H200)
    assert one.times_ns == {"naive": 11_400, "tiled": 4_000}  # no event time among graph times
    assert (one.best, one.peer, one.ratio) == ("tiled", "naive", pytest.approx(4 / 11.4))
    assert script.absent(found) == [
        "flash, b1-h1-s16-d8192-fp16, refused: head_dim 8192 is too large",
        f"math, b1-h1-s16-d8192-fp16, ok: {note}",
    ]
    assert script.told(found)[0].startswith("TF32 is off")


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=12), st.floats(0.1, 10))
def test_a_geometric_mean_scales_and_lies_between(
    script: ModuleType, ratios: list[float], factor: float
) -> None:
    mean = script.geometric_mean(ratios)
    assert min(ratios) * 0.999 <= mean <= max(ratios) * 1.001
    assert script.geometric_mean([factor * each for each in ratios]) == pytest.approx(factor * mean)
    assert script.geometric_mean([]) is None


def test_the_table_is_the_ten_shapes_and_bf16_beside_each_fp16(script: ModuleType) -> None:
    labels = [c.label for text in (*script.TABLE, *script.BF16) for c in expand_configs(text)]
    assert len(set(labels)) == 14
    assert {c.replace("bf16", "fp16") for c in labels if "bf16" in c} == {
        c for c in labels if c.endswith("-fp16")
    }


def test_on_a_cpu_it_says_what_it_needs_and_exits_0(tmp_path: Path) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "mine.py").write_text((ROOT / "kernels" / "naive.py").read_text())
    argv = [sys.executable, str(SCRIPT), "--config", "1,2,16,16,fp32", "--quick"]
    done = subprocess.run(
        [*argv, "--kernels", "mine", "--json", "out.json"],
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads((tmp_path / "out.json").read_text())
    (found,) = told["shapes"]
    if told["measurement"] == "graph":
        pytest.skip("there is a GPU here")
    assert found["best"] == "mine"
    assert found["ratio"] == pytest.approx(found["best_ns"] / found["peer_ns"])
    assert "CUDA-graph times need an NVIDIA GPU" in done.stdout
    assert "TF32 is off" in done.stdout
    assert "cudnn, b1-h2-s16-d16-fp32, refused: cudnn attention does not exist" in done.stdout
    assert not any(word in done.stdout for word in ("met:", "missed:"))
    wrong = subprocess.run(
        [sys.executable, str(SCRIPT), "--config", "1,2", "--json", "wrong.json"],
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert wrong.returncode == 0
    assert "nothing was measured" in wrong.stdout
    assert "error" in json.loads((tmp_path / "wrong.json").read_text())
