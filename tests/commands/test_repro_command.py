"""`repro`: its scripts make the worker's own inputs, results and refusals, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from profharness.cli import cli
from profharness.errors import ProfharnessError
from profharness.store import open_store

CONFIGS = (
    ("1,2,8,16", "math"),
    ("2,4,8,16,kv_heads=2,bwd,layout=bshd", "auto"),
    ("1,2,8,16,bwd,mask=float_grad,layout=strided_last", "math"),
    ("2,2,8,16,layout=offset1,mask=bool,mask_shape=b1qk,scale=0.5", "auto"),
    ("2,2,8,16,layout=broadcast_batch,seq_kv=12,causal,bf16", "math"),
    ("2,2,8,16,q_strides=256x16x32x1,mask=bool,mask_strides=0x0x8x1", "auto"),
    ("1,2,8,16,mask=float_bh,head_dim_v=24", "math"),
    ("1,4,8,16,kv_heads=2,causal", "naive"),
    ("1,4,8,16,kv_heads=2,causal,window=3,seq_kv=12", "naive"),
    ("1,2,8,16,window=3,bwd", "math"),
)
REFUSED = "b1-h2-s8-d16-fp32-dropout=0.1"
RAN = "b1-h2-s8-d16-fp32"

# Threads that wait for cores would take the time that the calls do not.
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}

# Runs each script as a program would be, then does the worker's part in the same process.
CHILD = """
import contextlib, io, json, runpy, sys
import torch
from profharness.attention.backends import find_backend
from profharness.attention.config import parse_config
from profharness.recording.worker.attention import make_call, make_inputs, sdpa_mask

for path, text, name, seed in json.load(sys.stdin):
    said, code, names = io.StringIO(), 0, {}
    with contextlib.redirect_stdout(said):
        try:
            names = runpy.run_path(path)
        except SystemExit as end:
            code = end.code
    answer = {"text": said.getvalue(), "code": code}
    if names:
        config, backend = parse_config(text).resolve("cpu"), find_backend(name)
        inputs = make_inputs(config, "cpu", seed)
        attention = backend.load() if backend.load else None
        expected = vars(inputs) | ({} if attention else {"mask": sdpa_mask(config, inputs)})
        for field, ours in expected.items():
            theirs = names.get(field)
            same = ours is theirs is None or (
                torch.equal(ours, theirs)
                and (ours.stride(), ours.storage_offset(), ours.requires_grad)
                == (theirs.stride(), theirs.storage_offset(), theirs.requires_grad)
            )
            answer[field] = bool(same)
        with backend.context():
            result = make_call(config, inputs, attention)()
        results = result if isinstance(result, tuple) else (result,)
        answer["checksums"] = [names["checksum"](each) for each in results]
    print(json.dumps(answer))
"""


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["repro", *map(str, arguments)])


def answers(asked: list[tuple[Path, str, str, int]], folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps([(str(path), *rest) for path, *rest in asked]),
        cwd=folder,
        env=ONE_THREAD,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store that has a cell that ran and one that was refused."""
    folder = tmp_path_factory.mktemp("repro")
    command = [
        *(sys.executable, "-m", "profharness", "capture", "--backend", "flash", "--seed", "11"),
        *("--config", REFUSED, "--config", RAN, "--profiler", "events", "--device", "cpu"),
    ]
    command += ["--samples", "1", "--iterations", "1"]
    subprocess.run(command, cwd=folder, env=ONE_THREAD, capture_output=True, text=True, check=True)
    return folder


def test_scripts_make_the_worker_s_inputs_and_results(captured: Path) -> None:
    asked: list[tuple[Path, str, str, int]] = []
    for number, (config, backend) in enumerate(CONFIGS):
        path = captured / f"{number}.py"
        done = invoke("--config", config, "--backend", backend, "--seed", number, "-o", path)
        assert done.exit_code == 0, done.output
        asked.append((path, config, backend, number))
    store = captured / "profharness.db"
    for name, config in (("refused.py", REFUSED), ("ran.py", RAN)):
        done = invoke(
            "--run", "latest", "--config", config, "--store", store, "-o", captured / name
        )
        assert done.exit_code == 0, done.output
        asked.append((captured / name, config, "flash", 11))
    *direct, refused, ran = answers(asked, captured)
    for (config, _), answer in zip([*CONFIGS, (RAN, "")], [*direct, ran], strict=True):
        inputs = {field: answer[field] for field in ("query", "key", "value", "mask", "grad")}
        assert all(inputs.values()), (config, inputs)
        assert answer["checksums"]
        for checksum in answer["checksums"]:
            assert f"sha256 {checksum}\n" in answer["text"], config
        assert "time: " in answer["text"]
    assert "choice: math\n" in direct[0]["text"]
    assert "choice: flash\n" in ran["text"]
    assert refused["code"] == 1
    with open_store(store) as opened:
        (cell,) = (each for each in opened.cells() if each.config == REFUSED)
    assert cell.status == "refused"
    assert cell.refusals
    for refusal in cell.refusals:
        assert refusal.message in refused["text"]
    assert "failed: RuntimeError: No available kernel" in refused["text"]


def test_a_script_tells_what_was_stored(captured: Path) -> None:
    store = captured / "profharness.db"
    done = invoke("--run", "latest", "--config", REFUSED, "--store", store)
    lines = [line for line in done.stdout.splitlines() if line.startswith("# ")]
    assert lines[0] == f"# {REFUSED} on flash"
    assert any(": refused: " in line for line in lines)
    assert any("Environment: torch " in line for line in lines)
    assert "SEED = 11\n" in done.stdout
    assert 'DEVICE = "cpu"\n' in done.stdout
    assert str(captured) not in done.stdout


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        ("cudnn", "SDPBackend.CUDNN_ATTENTION"),
        *((name, "") for name in ("fa3", "fa4", "flex", "flex-flash", "naive-compiled", "tiled")),
    ],
)
def test_every_script_compiles_and_chooses_its_device(backend: str, text: str) -> None:
    done = invoke("--config", "1,2,8,16,causal,fp16", "--backend", backend)
    assert done.exit_code == 0, done.output
    compile(done.stdout, "repro.py", "exec")
    assert "if torch.cuda.is_available() else" in done.stdout and text in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "no config given; name a config (such as 2,8,512,64,bf16), a run (such as latest) or"),
        (("--config", "1,2,{8,16},16"), "name one config, not 2"),
        (("--config", "1,2,8,16", "--backend", "math,auto"), "not math,auto; name one with"),
        (("--config", "1,2,8,16", "--backend", "all"), "runs only one backend, not all; name one"),
        (("--config", "1,2,8,16", "--backend", "varlen"), "no script"),
        (("--config", "1,2,8,16", "--backend", "nothing"), "unknown backend 'nothing'"),
    ],
)
def test_what_is_no_single_cell_is_refused(arguments: tuple[str, ...], text: str) -> None:
    error = invoke(*arguments).exception
    assert isinstance(error, ProfharnessError)
    assert text in str(error)


def test_several_stored_cells_are_named(captured: Path) -> None:
    error = invoke("--run", "latest", "--store", captured / "profharness.db").exception
    assert isinstance(error, ProfharnessError)
    assert f"{REFUSED} flash" in str(error)
    error = invoke(
        *("--run", "latest", "--config", "9,9,9,9", "--store", captured / "profharness.db")
    ).exception
    assert isinstance(error, ProfharnessError)
