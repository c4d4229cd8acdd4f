"""Options that exclude each other are refused before anything is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import profharness
from profharness import processes
from profharness.cli import cli
from profharness.commands.layers.answer import _every
from profharness.errors import ProfharnessError, UsageError

ROOT = Path(__file__).parents[2]
CONFIG = ("--config", "2,8,512,64")
WRONG: dict[tuple[str, ...], str] = {
    ("layers", "--driver", "580"): "require --gpu NAME",
    ("layers", "a", "b", "--step", "0"): "apply to one run",
    ("layers", "--bench", "a,b", "--gpu", "H200"): "apply to one run",
    ("layers", "--gpu", "H200", "--savings"): "--gpu cannot be combined with",
    ("layers", "--list-configs", "--bench", "a"): "use only one of these options",
    ("layers", "--list-configs", "-o", "calls.json"): "--list-configs > calls.txt",
    ("layers", "--list-configs", "--format", "json"): "--list-configs > calls.txt",
    ("layers", "--bench", "a", "--max-time", "1s"): "measures nothing",
    ("layers", "--backend", "flash"): "requires --savings",
    ("layers", "--fail-on", "unheard"): "'unheard'",
    ("scrub", "nosuch", "--check", "-o", "copy"): "cannot be combined with -o or --force",
    ("scrub", "nosuch", "--check", "--force"): "cannot be combined with -o or --force",
    ("explain", *CONFIG, "--gpu", "ZX81", "--device", "cpu"): "--device applies only",
    ("explain", *CONFIG, "--gpu", "ZX81", "--measure"): "--measure runs on this machine",
    ("explain", *CONFIG, "--gpu", "ZX81", "--bisect", "head_dim", "--full"): "only finds choices",
    ("explain", *CONFIG, "--gpu", "ZX81", "--bisect", "dtype"): "'dtype'",
}


@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_usage_errors_come_before_reading(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PROFHARNESS_STORE", str(tmp_path / "none.db"))
    error = CliRunner().invoke(cli, words).exception
    assert isinstance(error, UsageError), error
    assert WRONG[words] in str(error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["capture", "bench", "verify"])
def test_an_unknown_backend_is_refused_before_a_worker_starts(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: `capture --backend flsh` started a worker, and then reported the name."""

    def start(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(processes.PrewarmedWorker, "start", start)
    monkeypatch.setattr(processes, "start_group", start)
    error = CliRunner().invoke(cli, [command, "1,2,64,32", "--backend", "flsh"]).exception
    assert isinstance(error, UsageError), error
    assert "unknown backend 'flsh'; did you mean flash?" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_a_python_function_refuses_options_as_the_command_line_does(tmp_path: Path) -> None:
    store = tmp_path / "none.db"
    words = ["explain", *CONFIG, "--gpu", "H200", "--device", "cpu"]
    error = CliRunner().invoke(cli, words).exception
    with pytest.raises(UsageError) as raised:
        profharness.explain(CONFIG[1], gpu="H200", device="cpu")
    assert str(raised.value) == str(error)
    assert len(profharness.explain(CONFIG[1], gpu="H200", torch="2.11", device="auto")) == 1
    with pytest.raises(UsageError, match="require --gpu NAME"):
        profharness.layers(driver="580", store=store)
    with pytest.raises(UsageError, match="apply to one run"):
        profharness.layers("a", "b", step=0, store=store)
    with pytest.raises(UsageError, match="cannot be combined with -o or --force"):
        profharness.scrub_run("nosuch", check=True, force=True, store=store)
    with pytest.raises(ProfharnessError, match="the store does not exist"):
        profharness.layers("a", "b", store=store)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("layres",), "error: no such command 'layres'; did you mean layers?"),
        (("compare",), "error: no such command 'compare'; did you mean diff?"),
        (("why",), "error: no such command 'why'; did you mean explain?"),
        (
            ("layers", "--gup", "H200"),
            "error: no such option '--gup'; did you mean '--gpu'? for help, use: profharness layers --help",
        ),
        (
            ("layers", "--rn", "x"),
            "error: no such option '--rn'; for help, use: profharness layers --help",
        ),  # --run is hidden
        (
            ("explain", "2,8,512,64,casual"),
            "error: config '2,8,512,64,casual': cannot read 'casual'; did you mean causal? "
            "to list all options of a config, use: profharness capture --help",
        ),
        (
            ("kernels", "--step", "3"),
            "error: no such option '--step'; it belongs to layers; for help, use: profharness kernels --help",
        ),
        (("explain", "2,8,512,64,widow=3"), "did you mean window=3?"),
        (
            ("explain", "2,8,512,64,qqq"),
            "cannot read 'qqq'; to list all options of a config, use: profharness",
        ),
        (
            ("explain", "2,8,512,64,fp8"),
            "cannot read 'fp8'; the dtypes are fp16, bf16 and fp32; kv_dtype= sets the dtype of a "
            "paged cache",
        ),
        (("explain", "2,8,512,64,int8"), "cannot read 'int8'; the dtypes are fp16, bf16 and fp32"),
        (("bench", "1,4,-3,64"), "error: config '1,4,-3,64': '-3' must be a positive integer"),
        (
            ("layers", "--step", "x"),
            "error: invalid value for '--step': 'x' is not a number; for help, use: ",
        ),
        (
            ("layers", "--savings", "--max-time", "soon"),
            "error: invalid value for '--max-time': 'soon' is not a duration; write 10s, 500ms or "
            "2m; for help, use: profharness layers --help",
        ),
        (
            ("diff", "a", "b", "--threshold", "0%"),
            "error: invalid value for '--threshold': '0%' is too small; write a fraction above 0",
        ),
        (("diff",), "error: missing argument 'BASELINE'; for help, use: profharness diff --help"),
        (
            ("explain", "trace.json.gz"),
            "error: trace.json.gz: no such file or folder",
        ),
        (
            ("predict", "trace.json.gz"),
            "error: trace.json.gz: no such file or folder",
        ),
        (
            ("predict", "latest"),
            "latest is not a config, such as 2,8,512,64,bf16; if it is a trace file or a run, "
            "to show its attention, use: profharness layers latest",
        ),
        (
            ("kernels", "1,1,16,16", "--gpu", "H200,A100"),
            "kernels predicts for one GPU; name only one GPU",
        ),
        (
            ("predict", "1,1,16,16", "--torch", "2.9..2.11"),
            "predict predicts for one release; name",
        ),
        (
            ("layers", "--torch", "2.9,2.11"),
            "error: layers predicts for one release; name only one",
        ),
    ],
)
def test_mistyped_words_are_corrected(
    tmp_path: Path, arguments: tuple[str, ...], told: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "profharness", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert told in line and "--run" not in line and "--out" not in line


def test_a_name_that_does_not_exist_is_wrong_input(tmp_path: Path) -> None:
    trace, store = ROOT / "traces" / "models" / "vit.json.gz", tmp_path / "s.db"
    for words, text in (
        (("layers", trace, "--step", "7"), "--step 7: run vit.json.gz has only step 0"),
        (("layers", "nosuch"), "no run 'nosuch'"),
        (("kernels", "nosuch.json"), "nosuch.json: no such file or folder"),
        (("atlas", "export", "nosuch", "-o", tmp_path / "a.npz"), "no atlas or file 'nosuch'"),
    ):
        where = () if words[0] == "atlas" else ("--store", store)
        error = CliRunner().invoke(cli, [*map(str, (*words, *where))]).exception
        assert isinstance(error, ProfharnessError), error
        assert error.exit_code == 2 and text in str(error)


def test_a_warning_names_its_file_once(tmp_path: Path) -> None:
    event = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1.0, "dur": 2.0}
    event |= {"args": {"device": 0, "stream": 7, "correlation": 1}}
    trace = tmp_path / "x.json"
    trace.write_text(json.dumps({"traceEvents": [event, event | {"ts": 5.0, "dur": -1.0}]}))
    for command in ("ingest", "diff"):
        store = ("--store", str(tmp_path / f"{command}.db"))
        sources = [str(trace)] * (2 if command == "diff" else 1)
        done = CliRunner().invoke(cli, [command, *sources, *store])
        (line,) = [each for each in done.stderr.splitlines() if "negative duration" in each]
        assert line.startswith(f"warning: {trace}: 1 event"), line
        assert line.endswith("."), line
    # A table that follows does not repeat the warning. From the store, it has the warning.
    words = ["kernels", str(trace), "--store", str(tmp_path / "kernels.db")]
    first, second = CliRunner().invoke(cli, words), CliRunner().invoke(cli, words)
    assert first.stderr.count("negative duration") == 1 and "negative" not in second.stderr
    assert first.stdout.count("negative duration") + second.stdout.count("negative duration") < 3


def test_a_number_of_calls_that_is_not_whole_is_an_average() -> None:
    assert _every(3.0, "call") == "all 3 calls"
    assert _every(2.913, "call") == "the 2.91 calls per step"


def test_a_file_instead_of_a_command_names_the_command_for_it(tmp_path: Path) -> None:
    """Bug: the error said only that there is no such command."""
    trace = tmp_path / "a trace.json.gz"
    trace.touch()
    done = CliRunner().invoke(cli, [str(trace)])
    assert done.exit_code == 2
    assert f"to look into it, use: profharness layers '{trace}'" in " ".join(done.output.split())
    assert "No such command" in CliRunner().invoke(cli, ["nothing.json.gz"]).output


@pytest.mark.parametrize("command", ["explain", "bench"])
def test_the_default_timeout_has_the_same_form(command: str) -> None:
    """Bug: the help of `explain` had 120.0, and that of `bench` had 120."""
    text = " ".join(CliRunner().invoke(cli, [command, "--help"]).output.split())
    assert "[default: 120s]" in text and "120.0" not in text
