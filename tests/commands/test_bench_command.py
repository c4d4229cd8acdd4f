"""`profharness bench` as a user runs it: a real process, a real worker, a real store."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import PATIENCE_S

import profharness

WRONG = """
import torch.nn.functional as F

def attention(q, k, v, *, is_causal=False, scale=None, enable_gqa=False):
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale) * 1.5
"""
QUICK = ("--processes", "1", "--iterations", "8", "--warmup", "1", "--device", "cpu")


def bench(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "profharness", "bench", *arguments],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )


# its fixtures are costly: one process makes them once
pytestmark = pytest.mark.xdist_group("bench-command")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a verified bench of two configs and a wrong implementation, written to out/."""
    place = tmp_path_factory.mktemp("bench")
    (place / "wrong.py").write_text(WRONG)
    done = bench(
        place, "--config", "1,2,{16,32},8", "--dtype", "fp32", "--backend", "auto,naive,cudnn,wrong.py",
        "--verify", "--explain", "--baseline", "1,2,16,8", "-o", "out", *QUICK,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (place / "stdout.txt").write_text(" ".join(done.stdout.split()))
    return place


def test_a_folder_gets_every_format_and_the_environment(folder: Path) -> None:
    names = {path.name for path in (folder / "out").iterdir()}
    suffixes = ("json", "jsonl", "csv", "md", "html", "txt")
    assert names == {*(f"bench.{suffix}" for suffix in suffixes), "environment.json"}
    told = json.loads((folder / "out" / "bench.json").read_text())
    assert told["schema"] == "profharness.bench/1"
    assert [len(told["rows"]), told["ranking"]] == [8, "wall"]
    lines = (folder / "out" / "bench.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == told["rows"]
    with (folder / "out" / "bench.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["backend"] for row in rows] == [row["backend"] for row in told["rows"]]
    assert json.loads((folder / "out" / "environment.json").read_text())["device_type"] == "cpu"
    assert "| config |" in (folder / "out" / "bench.md").read_text()


def test_what_verification_finds_wrong_is_shown_and_not_ranked(folder: Path) -> None:
    told = json.loads((folder / "out" / "bench.json").read_text())
    rows = {(row["config"], row["backend"]): row for row in told["rows"]}
    wrong = rows["b1-h2-s16-d8-fp32", "wrong.py"]
    assert (wrong["verified"], wrong["regret"], wrong["speedup"]) == (False, None, None)
    assert wrong["median_ns"] > 0
    right = rows["b1-h2-s16-d8-fp32", "naive"]
    assert right["verified"] is True and right["regret"] is not None
    assert right["queries_per_s"] == pytest.approx(1 * 2 * 16 * 1e9 / right["median_ns"])
    assert right["median_ns"] <= right["p90_ns"] <= right["p99_ns"]
    assert all(each["backend"] != "wrong.py" for each in told["winners"])
    text = (folder / "stdout.txt").read_text()
    assert "WRONG" in text and "Not ranked because of wrong output" in text


def test_refusals_are_explained_under_the_table(folder: Path) -> None:
    text = (folder / "stdout.txt").read_text()
    assert re.search(r"cudnn refused.*: cudnn attention does not exist on cpu", text)


def test_a_stored_bench_answers_again_without_measuring(folder: Path) -> None:
    told = json.loads((folder / "out" / "bench.json").read_text())
    done = bench(folder, "--run", told["run"], "--format", "json", "--raw")
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout)
    plain = [{k: v for k, v in row.items() if k != "samples_ns"} for row in again["rows"]]
    assert [row["verified"] for row in plain] == [row["verified"] for row in told["rows"]]
    assert [row["median_ns"] for row in plain] == [row["median_ns"] for row in told["rows"]]
    assert {len(row["samples_ns"]) for row in again["rows"] if row["status"] == "ok"} == {8}


def test_the_python_function_gives_the_same_rows(folder: Path) -> None:
    told = json.loads((folder / "out" / "bench.json").read_text())
    frame = profharness.bench(run=told["run"], store=folder / "profharness.db")
    assert list(frame["median_ns"].dropna()) == [
        row["median_ns"] for row in told["rows"] if row["median_ns"]
    ]
    assert frame.attrs["answer"].ranking == "wall"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--config", "1,1,8,8", "--precision", "fast"), "is not a fraction; write 3% or 0.03"),
        (
            ("--config", "1,1,8,8", "--max-time", "soon"),
            "is not a duration; write 10s, 500ms or 2m",
        ),
        (("--config", "1,1,8,8", "--measurement", "wall"), "cold, graph, kernel, eager"),
        (("--config", "1,1,8,8", "--dtype", "fp8"), "unknown dtype 'fp8'"),
        (("--config", "1,1,8,8", "--backend", "nobody"), "unknown backend 'nobody'"),
        (("--config", "1,1,8,8", "--backend", "flsh"), "did you mean flash?"),
        (("--run", "latest", "--verify"), "--verify requires"),
        ((), "no config"),
    ],
)
def test_what_cannot_be_meant_is_told_before_any_work(
    tmp_path: Path, arguments: tuple[str, ...], text: str
) -> None:
    done = bench(tmp_path, *arguments)
    assert done.returncode == 2, done.stderr
    assert text in done.stderr
    assert not (tmp_path / "traces").exists()


def test_files_of_a_folder_are_not_overwritten(folder: Path) -> None:
    done = bench(folder, "--config", "1,1,8,8", "-o", "out")
    assert done.returncode == 2
    assert "already exists; --force" in done.stderr


def test_an_interrupt_keeps_what_is_done_and_resume_goes_on(tmp_path: Path) -> None:
    slow = ("--processes", "1", "--precision", "0.0001%", "--max-time", "20s", "--device", "cpu")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "profharness", "bench", "--config", "1,4,{8,2048},64"),
            *("--backend", "auto", *slow),
        ],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    first = process.stderr.readline()  # the first config has its result
    assert "[1/2]" in first
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGINT)
    _, told = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert (
        "the results so far are kept; to resume the run, use: profharness capture --resume" in told
    )
    (record,) = (tmp_path / "traces" / "runs").glob("*/run.json")
    cells = json.loads(record.read_text())["cells"]
    assert [cell["status"] for cell in cells] == ["ok", "pending"]
    assert cells[0]["samples"]["wall"]


def test_what_was_measured_is_named_when_it_cannot_be_written(tmp_path: Path) -> None:
    """The folder of -o goes away while the cells run; the implementation removes it."""
    (tmp_path / "gone").mkdir()
    code = WRONG + "\nimport pathlib, shutil\nshutil.rmtree('gone', ignore_errors=True)\n"
    (tmp_path / "mine.py").write_text(code.replace("'gone'", repr(str(tmp_path / "gone"))))
    store = ("--store", "s.db")
    done = bench(
        tmp_path, "--config", "1,1,8,8", "--backend", "mine.py", "-o", "gone/b.csv", *store, *QUICK
    )
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    (line,) = [
        line for line in done.stderr.splitlines() if "the measured results are stored" in line
    ]
    again = shlex.split(line.partition("to see them, use: profharness bench ")[2])
    assert again[-2:] == ["--store", "s.db"]
    shown = bench(tmp_path, *again)
    assert shown.returncode == 0 and "mine.py" in shown.stdout
