"""Every command reports the same mistake in the same words, and names the run as the user typed it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from profharness.cli import cli

TRACES = Path(__file__).resolve().parents[2] / "traces"
CAPTURE = TRACES / "h200-torch2.11"
PROGRAM = TRACES / "models" / "vit.json.gz"
COMMANDS_OF_CONFIGS = ("capture", "predict", "verify", "explain")
READERS = ("kernels", "analyze", "bench", "repro")  # the commands that read the cells of a run


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("errors") / "s.db"
    done = CliRunner().invoke(cli, ["ingest", str(CAPTURE), str(PROGRAM), "--store", str(path)])
    assert done.exit_code == 0, done.stderr
    return path


def invoke(store: Path, *words: str | Path) -> Result:
    result = CliRunner().invoke(cli, [*map(str, words), "--store", str(store)])
    assert result.exception is not None
    return result


@pytest.mark.parametrize("command", ["explain", "predict", "verify", "bench", "repro"])
def test_a_missing_config(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is what to type. Commands that accept a run name that, too."""
    monkeypatch.chdir(tmp_path)  # a folder without a store
    text = str(CliRunner().invoke(cli, [command]).exception)
    found = re.fullmatch(
        r"no config given; name a config \(such as 2,8,512,64,bf16\)"
        r"(, a run \(such as latest\))? or --configs FILE",
        text,
    )
    assert found, text
    assert bool(found[1]) is (command in ("explain", "bench", "repro"))
    assert not list(tmp_path.iterdir())


def test_the_latest_run_is_the_default(tmp_path: Path) -> None:
    """Bug: `explain` and `repro` required a run, and the other readers used the latest run."""
    store = tmp_path / "s.db"
    at = ("--store", str(store))
    runner = CliRunner()
    for source in (PROGRAM, TRACES / "h200-torch2.11"):
        assert runner.invoke(cli, ["ingest", str(source), *at]).exit_code == 0
    named = runner.invoke(cli, ["explain", "latest", *at])
    assert named.exit_code == 0 and runner.invoke(cli, ["explain", *at]).stdout == named.stdout
    choice = ("--backend", "flash")
    several = str(runner.invoke(cli, ["repro", *at, *choice]).exception)
    assert "cells of run h200-torch2.11 match" in several  # the program has no cells
    script = runner.invoke(cli, ["repro", *at, *choice, "2,8,512,64"])
    assert script.exit_code == 0
    assert "no config given" in str(runner.invoke(cli, ["bench", *at]).exception)


@pytest.mark.parametrize(
    "command",
    [*COMMANDS_OF_CONFIGS, *READERS, "layers", "export", "ingest", "report", "ranks", "scrub"],
)
def test_a_missing_file(command: str, store: Path) -> None:
    missing = PROGRAM.with_name("vitt.json.gz")
    words = [command, str(missing)]
    if command != "predict":
        words += ["--store", str(store)]
    error = CliRunner().invoke(cli, words).exception
    start = f"{missing}: no such file or folder; did you mean {PROGRAM}"
    assert str(error).startswith(start), error
    assert getattr(error, "exit_code", None) == 2


@pytest.mark.parametrize("command", READERS)
def test_a_backend_that_a_run_lacks(command: str, store: Path) -> None:
    error = invoke(store, command, CAPTURE, "--backend", "fa3").exception
    assert str(error) == (
        "run h200-torch2.11 has no cell for backend fa3; it has auto, flash, efficient, cudnn, "
        "math, all-disabled"
    )


@pytest.mark.parametrize("command", READERS)
def test_a_config_that_a_run_lacks(command: str, store: Path) -> None:
    error = invoke(store, command, CAPTURE, "1,2,3,4").exception
    assert str(error).startswith(
        "run h200-torch2.11 has no cell for config b1-h2-s3-d4; it has b2-h8-s512-d64-fp16, "
    )


@pytest.mark.parametrize("command", ["bench", "repro"])
def test_a_program_has_no_cells(command: str, store: Path) -> None:
    error = invoke(store, command, PROGRAM).exception
    show = f"profharness layers vit.json.gz --store {store}"
    assert str(error) == f"run vit.json.gz (trace) has no cells; to show it, use: {show}"


def test_kernels_of_a_run_are_not_predicted(store: Path) -> None:
    """Bug: the message first named three options that the user had not typed."""
    error = invoke(store, "kernels", PROGRAM, "--gpu", "H200").exception
    assert str(error).endswith(f"use: profharness layers {PROGRAM} --gpu H200")
    assert "--driver" not in str(error)


def test_a_folder_of_several_runs_is_not_scrubbed(store: Path) -> None:
    error = invoke(store, "scrub", TRACES / "serving").exception
    assert "serving contains 3 runs; choose one of them: " in str(error)
