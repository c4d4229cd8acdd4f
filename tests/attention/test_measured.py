"""Compare the rules with PyTorch's answers on an H200, with what ran there, and with the CPU dispatcher."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from waiting import PATIENCE_S

from profharness.attention.config import SDPA_BACKENDS, parse_config
from profharness.attention.dispatch.machine import (
    AttentionParams,
    Machine,
    Mask,
    from_config,
    machine_for,
    parse_release,
)
from profharness.attention.dispatch.predict import hazards, predict
from profharness.measurements.agreement import backend_of_op

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data" / "dispatch_h200.jsonl.gz"
WITNESSES = ROOT / "tests" / "data" / "witnesses_h200.jsonl.gz"
H200 = machine_for("H200", "2.11.0", "91900")
SCRIPT = ROOT / "scripts" / "check_dispatch.py"

# Builds tensors from params, queries torch, and prints one line of JSON per case.
ASK = r"""
import json, sys, warnings
import torch
warnings.simplefilter("ignore")
torch.set_num_threads(1)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32,
          "fp64": torch.float64, "fp8_e4m3": torch.float8_e4m3fn}

def tensor(shape, p):
    shape = shape if p["ndim"] == 4 else shape[1:] if p["ndim"] == 3 else [1, *shape]
    made = torch.empty([*shape[:-1], shape[-1] * p["last_stride"]], dtype=DTYPES[p["dtype"]])
    made = made[..., :: p["last_stride"]]
    return made.requires_grad_() if p["requires_grad"] else made

def mask(m, p):
    if m is None:
        return None
    made = torch.empty([*m["shape"][:-1], m["shape"][-1] * m["last_stride"]],
                       dtype=torch.bool if m["kind"] == "bool" else torch.float32)
    made = made[..., :: m["last_stride"]]
    return made.requires_grad_() if m["requires_grad"] else made

names = {-1: "none", 0: "math", 1: "flash"}
print(json.dumps(torch.__version__))
for line in sys.stdin:
    p = json.loads(line)
    b = p["batch"] if p["batch_kv"] is None else p["batch_kv"]
    h = p["kv_heads"] if p["kv_heads_v"] is None else p["kv_heads_v"]
    d = p["head_dim"] if p["head_dim_v"] is None else p["head_dim_v"]
    q = tensor([p["batch"], p["heads"], p["seq_q"], p["head_dim"]], p)
    k = tensor([b, p["kv_heads"], p["seq_kv"], p["head_dim"]], p)
    v = tensor([b, h, p["seq_kv"], d], p)
    for backend, set_flag in (("flash", torch.backends.cuda.enable_flash_sdp),
                              ("math", torch.backends.cuda.enable_math_sdp)):
        set_flag(backend in p["enabled"])
    try:
        call = dict(attn_mask=mask(p["mask"], p), dropout_p=p["dropout"],
                    is_causal=p["is_causal"], enable_gqa=p["enable_gqa"])
        answer = names[torch._fused_sdp_choice(q, k, v, **call)]
        if answer == "math" and p["is_causal"] and p["mask"]:
            # whatever else is wrong with the call, it must not run
            try:
                torch.nn.functional.scaled_dot_product_attention(q, k, v, **call)
            except (RuntimeError, IndexError):
                answer = "none"
    except RuntimeError as error:
        known = "No available kernel", "No viable backend"
        answer = "none" if any(text in str(error) for text in known) else str(error)
    print(json.dumps(answer))
"""


def random_mask(rng: random.Random, p: dict[str, Any]) -> Mask | None:
    if rng.random() < 0.5:
        return None
    rows = (rng.choice([p["seq_q"], p["seq_q"], 1]), rng.choice([p["seq_kv"], p["seq_kv"], 1]))
    if rng.random() < 0.08:
        rows = (rows[0] + 1, rows[1])
    if rng.random() < 0.08:
        rows = (rows[0], rows[1] + 2)
    lead: tuple[int, ...] = rng.choice([(), (1, 1), (p["batch"], p["heads"]), (p["batch"], 1)])
    if rng.random() < 0.15:
        lead = rng.choice([(1,), (1, 1, 1), (p["batch"] + 1, 1), (1, p["heads"] + 1)])
    kind = rng.choice(["bool", "float"])
    grad = kind == "float" and rng.random() < 0.15
    step = 2 if not grad and rng.random() < 0.1 else 1
    return Mask((*lead, *rows), kind, requires_grad=grad, last_stride=step)


def random_params(rng: random.Random) -> AttentionParams:
    heads = rng.choice([1, 2, 4, 6, 8])
    rare = rng.random
    p: dict[str, Any] = {
        "batch": rng.choice([1, 2, 3]),
        "heads": heads,
        "kv_heads": heads if rare() < 0.6 else rng.choice([1, 2, 3, 4]),
        "seq_q": 0 if rare() < 0.04 else rng.choice([1, 2, 7, 16]),
        "seq_kv": 0 if rare() < 0.04 else rng.choice([1, 2, 7, 16]),
        "head_dim": rng.choice([1, 3, 8, 16, 63, 264]),
        "dtype": rng.choice(["fp16", "bf16", "fp32", "fp32", "fp64"]),
        "device": "cpu",
        "ndim": rng.choice([3, 5]) if rare() < 0.06 else 4,
        "enable_gqa": rare() < 0.4,
        "is_causal": rare() < 0.3,
        "dropout": 0.1 if rare() < 0.1 else 0.0,
        "last_stride": 2 if rare() < 0.08 else 1,
    }
    p["requires_grad"] = rare() < 0.2
    p["batch_kv"] = p["batch"] + 1 if rare() < 0.05 else None
    p["kv_heads_v"] = rng.choice([1, 2, 4]) if rare() < 0.08 else None
    p["head_dim_v"] = rng.choice([8, 32]) if rare() < 0.08 else None
    off = frozenset(name for name in ("flash", "math") if rare() < 0.05)
    return AttentionParams(**p, mask=random_mask(rng, p), enabled=frozenset(SDPA_BACKENDS) - off)


@pytest.fixture(scope="module")
def measured() -> list[dict[str, Any]]:
    with gzip.open(DATA, "rt") as lines:
        return [json.loads(line) for line in lines]


def run_script(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_every_answer_of_the_h200_is_predicted() -> None:
    done = run_script(DATA)
    figures = "choice 100.00%, flash 100.00%, efficient 100.00%, cudnn 100.00%"
    assert (done.returncode, done.stdout) == (0, f"1070 configs: {figures}\n")


def test_the_script_fails_and_names_the_line_when_an_answer_is_wrong(
    measured: list[dict[str, Any]], tmp_path: Path
) -> None:
    rows = measured[:100]
    rows[6] = rows[6] | {"choice": "flash" if rows[6]["choice"] == "math" else "math"}
    file = tmp_path / "wrong.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run_script(file)
    assert done.returncode == 1
    assert done.stdout.startswith("line 7: choice measured ")
    assert "choice 99.00%" in done.stdout
    assert run_script(file, "--torch", "2.10").returncode == 1


@pytest.mark.parametrize("text", ["", "{}\n", "not json\n"])
def test_the_script_refuses_a_file_without_measured_rows(text: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(text)
    done = run_script(file)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")


def test_the_cpu_dispatcher_agrees_on_2000_random_calls() -> None:
    rng = random.Random(2026)
    cases = [random_params(rng) for _ in range(2000)]
    text = "".join(
        json.dumps(
            asdict(case)
            | {"enabled": sorted(case.enabled), "mask": case.mask and case.mask._asdict()}
        )
        + "\n"
        for case in cases
    )
    done = subprocess.run(
        [sys.executable, "-c", ASK], input=text, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    version, *answers = [json.loads(line) for line in done.stdout.splitlines()]
    machine = Machine(parse_release(version))
    assert machine.known, f"the installed torch {version} is not in the table"
    predicted = [predict(case, machine).choice for case in cases]
    wrong = [
        (case, answer, choice)
        for case, answer, choice in zip(cases, answers, predicted, strict=True)
        if answer != choice
    ]
    assert not wrong, (len(wrong), wrong[:3])
    assert min(Counter(answers)[name] for name in ("flash", "math", "none")) >= 30


def records() -> list[dict[str, Any]]:
    with gzip.open(WITNESSES, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def test_the_predicted_backend_was_chosen_and_ran() -> None:
    found = records()
    assert len(found) == 500
    for record in found:
        predicted = predict(from_config(parse_config(record["config"])), H200).choice
        assert predicted == record["predicted"] == record["choice"], record
        if record["status"] == "ok":
            assert backend_of_op(record["op"]) == predicted, record
            assert not record["kernels"] or record["kernels"] == [predicted], record


def test_the_two_calls_that_raised_are_known_hazards() -> None:
    raised = [record for record in records() if record["status"] != "ok"]
    assert len(raised) == 2
    for record in raised:
        assert record["predicted"] == "cudnn"
        assert "cuDNN Frontend error" in record["message"]
        assert hazards("cudnn", from_config(parse_config(record["config"])), H200)
    quiet = [r for r in records() if r["status"] == "ok" and r["choice"] == "cudnn"]
    warned = [r for r in quiet if hazards("cudnn", from_config(parse_config(r["config"])), H200)]
    assert len(warned) < 0.1 * len(quiet)
