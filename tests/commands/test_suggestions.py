"""A misspelled file, run or gate gets a suggestion, and wrong input has one exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from profharness.attention.config import nearest_config, parse_config
from profharness.cli import cli
from profharness.errors import ProfharnessError, near_names
from profharness.store import ingest_path

ROOT = Path(__file__).parents[2]
EVENT = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 5, "dur": 3, "args": {}}


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for at, name in enumerate(("llama_eager.json", "whisper.json")):
        (tmp_path / name).write_text(json.dumps({"traceEvents": [EVENT | {"ts": 5 + at}] * 2}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def run_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("suggested") / "s.db"
    ingest_path(path, ROOT / "traces" / "h200-torch2.11")
    return path


def told(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, [*words, "--store", "s.db"])
    if isinstance(done.exception, ProfharnessError):
        return done.exception.exit_code, str(done.exception)
    return done.exit_code, done.stderr


@pytest.mark.usefixtures("traces")
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("lama_eager.json", "llama_eager.json"),
        ("./lama_eager.json", "llama_eager.json"),
        ("llama_eager", "llama_eager.json"),
        ("whispr", "whisper.json"),
    ],
)
def test_a_misspelled_file_is_suggested(given: str, meant: str) -> None:
    code, error = told("kernels", given)
    assert code == 2
    assert f"no such file or folder; did you mean {meant}?" in error
    assert not Path("s.db").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("kernels", "{run}", "2,8,513,64"),
        ("bench", "{run}", "2,8,513,64"),
        ("analyze", "{run}", "2,8,513,64"),
        ("explain", "{run}", "2,8,513,64"),
        ("diff", "flash", "cudnn", "2,8,513,64", "{run}"),
        ("diff", "flash", "cudnn", "2,8,513,64"),
    ],
)
def test_the_most_similar_config_is_suggested(words: tuple[str, ...], run_store: Path) -> None:
    """Bug: `diff` named only the backends of a run that lacks the config."""
    run = str(ROOT / "traces" / "h200-torch2.11")
    given = [word.format(run=run) for word in words]
    done = CliRunner().invoke(cli, [*given, "--store", str(run_store)])
    assert "b2-h8-s513-d64; did you mean b2-h8-s512-d64-fp16? " in str(done.exception).replace(
        " on flash;", ";"
    )


@pytest.mark.parametrize(
    ("config", "near"),
    [
        ("1,8,900,64", ["b1-h8-s1024-d64-fp16"]),  # the closest numbers
        ("1,8,512,64,bf16,causal", ["b1-h8-s512-d64-bf16"]),
        ("1,8,1024,64,fp16", ["b1-h8-s1024-d64-fp16"]),
        ("1,4,700,64,fp16", ["b1-h8-s512-d64-fp16"]),  # two properties, which are four fields
        ("2,32,1000,64,kv_heads=8", ["b2-h32-kv8-s1024-d64-bf16-causal-layout=bshd"]),
        ("1,8,16,64,fp16", []),  # far from each number
        ("3,5,17,48", []),
    ],
)
def test_a_similar_config_has_few_different_fields(config: str, near: list[str]) -> None:
    labels = ["b1-h8-s512-d64-fp16", "b1-h8-s1024-d64-fp16", "b1-h8-s512-d64-bf16"]
    labels.append("b2-h32-kv8-s1024-d64-bf16-causal-layout=bshd")
    assert nearest_config(parse_config(config), labels) == near


def test_a_misspelled_file_in_another_folder_is_suggested(
    traces: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    code, error = told("kernels", str(traces / "lama_eager.json"))
    assert (code, f"did you mean {traces / 'llama_eager.json'}?" in error) == (2, True)
    assert told("kernels", "nowhere/lama_eager.json")[0] == 2


def test_a_misspelled_run_is_suggested(
    traces: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert told("ingest", str(traces / "llama_eager.json"))[0] == 0
    for given in ("llama_eager", "lama_eagr"):
        code, error = told("kernels", given)
        assert code == 2
        assert f"no run '{given}' in s.db; did you mean llama_eager.json?" in error


def test_a_stored_run_is_suggested_rather_than_files_that_are_no_traces(
    traces: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the error suggested a page and a picture, but not the run."""
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert told("ingest", str(traces / "llama_eager.json"))[0] == 0
    for name in ("lama_eager.html", "lama_eager.json-390.png"):
        Path(name).touch()
    code, error = told("layers", "lama_eager.json")
    assert (code, "did you mean llama_eager.json?" in error) == (2, True)
    Path("lama_eager.json.gz").touch()
    _, error = told("layers", "lama_eager.json")
    assert "did you mean lama_eager.json.gz or llama_eager.json?" in error


@pytest.mark.usefixtures("traces")
def test_a_gate_is_suggested() -> None:
    code, error = told("layers", "whisper.json", "--fail-on", "math")
    assert (code, "unknown --fail-on 'math'; did you mean math-fallback? " in error) == (2, True)


@pytest.mark.usefixtures("traces")
@pytest.mark.parametrize(("name", "text"), [("a.txt", "hello"), ("a.json", '{"a": 1}')])
def test_a_file_that_is_no_trace_is_wrong_input(name: str, text: str) -> None:
    """Bug: the exit code was 1, but 2 for a missing file. A damaged trace is wrong input too."""
    Path(name).write_text(text)
    assert told("kernels", name)[0] == 2
    Path("empty").mkdir()
    assert told("kernels", "empty")[0] == 2
    Path("damaged.json").write_text('{"traceEvents": [')
    assert told("kernels", "damaged.json")[0] == 2


def test_near_names() -> None:
    assert near_names("math", ["flash-only", "math-fallback"]) == ["math-fallback"]
    assert near_names("lamma", ["llama.json", "bert.json"]) == ["llama.json"]
    assert near_names("xyz", ["llama.json"]) == []
    assert near_names("nope.json.gz", ["unet.json.gz", "shapes.json.gz"]) == []
    assert near_names("lama.json.gz", ["unet.json.gz", "llama.json.gz"]) == ["llama.json.gz"]
    assert near_names("", ["llama.json"]) == []


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("explain", "2,8,512,64,kv=4"), "did you mean kv_heads=4?"),
        (("explain", "2,8,512,64", "--backend", "flsh"), "did you mean flash? choose from"),
        (("predict", "2,8,512,64,fp16", "--backend", "flsh"), "did you mean flash? choose from"),
        (("explain", "2,8,512,64", "--torch", "2.99"), "the newest known release is 2.15.0"),
        (("explain", "2,8,512,64,gqa=4"), "did you mean kv_heads=4?"),
        (("explain", "2,8,512,64,skv=128"), "did you mean seq_kv=128?"),
        (("explain", "2,8,512,64,droput=0.1"), "did you mean dropout=0.1?"),
        (("explain", "2,8,512,64,backward"), "did you mean bwd?"),
        (("explain", "2,8,512,64,mask=boole"), "did you mean bool? choose from"),
        (("explain", "2,8,512,64,layout=bsdh"), "did you mean bshd? choose from"),
        (("explain", "2x8x512x64"), "write 2,8,512,64"),
        (("explain", "2,8,512,64", "--format", "jsno"), "did you mean json?"),
        (("kernels", "--configs", "2,8,512,64"), "use: --config 2,8,512,64"),
        (("diff", "flash", "math", "--fail-on", "slow"), "did you mean slower? choose from"),
        (("diff", "flash", "math", "--fail-on", "mem"), "did you mean memory? choose from"),
        (("layers", "--fail-on", "eager"), "did you mean eager-attention? choose from"),
        (("layers", "--expect", "flahs"), "did you mean flash? choose from"),
    ],
    ids=lambda each: each if isinstance(each, str) else " ".join(each),
)
def test_a_typo_gets_a_suggestion(
    words: tuple[str, ...], meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = (sys.executable, "-m", "profharness", *words)
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert meant in " ".join(done.stderr.split())
    assert "?;" not in done.stderr


@pytest.mark.parametrize("typo", ["flas", "FLASH", "flsh"])
def test_a_misspelled_backend_of_stored_runs_is_suggested(
    typo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert told("ingest", str(ROOT / "traces" / "h200-torch2.11"))[0] == 0
    for words in (("kernels",), ("kernels", "h200-torch2.11"), ("kernels", "all"), ("bench",)):
        code, error = told(*words, "--backend", typo)
        assert (code, f"unknown backend '{typo}'; did you mean flash" in error) == (2, True)
    code, error = told("kernels", "--backend", "zebra")
    assert (code, "unknown backend 'zebra'; choose from auto, flash" in error) == (2, True)
    code, error = told("kernels", "--backend", "fa3")
    assert (code, "see what is stored" in error) == (2, True)
    code, error = told("kernels", "h200-torch2.11", "--backend", "fa3")
    assert (code, "it has auto, flash, efficient, cudnn" in error) == (2, True)
    assert "did you mean math" in told("diff", "flash", "maths")[1]
