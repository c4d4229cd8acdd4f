"""The gates of docs/ci.md that are ready to copy: the GitHub Action, whose steps run here as a runner
executes them, and the example of the pytest fixture.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
MODELS = ROOT / "traces" / "models"
EXPRESSION = re.compile(r"\$\{\{ *inputs\.([\w-]+) *\}\}")


def blocks(kind: str) -> list[str]:
    """Return the code blocks of docs/ci.md of this kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Ended:
    """What a runner sees of a step."""

    code: int
    log: str
    summary: str
    outputs: dict[str, str]


def run_step(number: int, folder: Path, **inputs: str) -> Ended:
    """Run a step of action.yml in a folder, with the environment that GitHub's runner sets."""
    step = ACTION["runs"]["steps"][number]
    values = {name: each.get("default", "") for name, each in ACTION["inputs"].items()}
    values |= {"python": sys.executable}
    values |= {name.replace("_", "-"): text for name, text in inputs.items()}
    files = {name: folder / name.lower() for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
    for path in files.values():
        path.write_text("")
    script = folder / "step.sh"
    script.write_text(step["run"])
    environment = os.environ | {name: str(path) for name, path in files.items()}
    environment |= {"GITHUB_ACTION_PATH": str(ROOT), "RUNNER_TEMP": str(folder), "CI": "true"}
    environment |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    for name, text in step["env"].items():
        environment[name] = EXPRESSION.sub(lambda found: values[found[1]], text)
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", script],
        cwd=folder,
        env=environment,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=PATIENCE_S,
        check=False,
    )
    lines = files["GITHUB_OUTPUT"].read_text().splitlines()
    outputs = dict(line.split("=", 1) for line in lines)
    summary = files["GITHUB_STEP_SUMMARY"].read_text()
    return Ended(done.returncode, done.stdout, summary, outputs)


def run_gate(folder: Path, **inputs: str) -> Ended:
    ended = run_step(1, folder, **inputs)
    assert ended.outputs["exit-code"] == str(ended.code), ended.log
    assert Path(ended.outputs["summary"]).read_text() == ended.summary
    return ended


def test_inputs_reach_the_shell_only_in_the_environment() -> None:
    assert [step["shell"] for step in ACTION["runs"]["steps"]] == ["bash", "bash"]
    used = set()
    for step in ACTION["runs"]["steps"]:
        assert "${{" not in step["run"]
        for text in step["env"].values():
            used.add(EXPRESSION.fullmatch(text)[1])  # type: ignore[index]
    assert used == set(ACTION["inputs"])


def test_a_gate_that_passes_shows_the_answer_on_the_page_of_the_job(tmp_path: Path) -> None:
    trace = str(MODELS / "llama_prefill.json.gz")
    ended = run_gate(tmp_path, trace=trace, fail_on="math-fallback,eager-attention")
    assert ended.code == 0, ended.log
    assert "::error" not in ended.log
    assert "LlamaAttention" in ended.summary and "| cudnn |" in ended.summary
    assert not (tmp_path / "profharness.db").exists()  # the store is not left in the workspace


def test_a_gate_that_fails_is_an_annotation_and_exit_code_3(tmp_path: Path) -> None:
    trace = str(MODELS / "llama_eager.json.gz")
    ended = run_gate(tmp_path, trace=trace, fail_on="math-fallback,eager-attention")
    assert ended.code == 3, ended.log
    (line,) = (each for each in ended.log.splitlines() if each.startswith("::error"))
    title = "A gate of profharness layers failed"
    assert line.startswith(f"::error title=profharness::{title}%0Agate failed: ")
    assert "eager-attention" in line and "LlamaAttention" in line
    assert f"**{title}**" in ended.summary and "| eager |" in ended.summary


def test_two_traces_are_compared(tmp_path: Path) -> None:
    names = ("llama_prefill", "llama_eager")
    baseline, trace = (str(MODELS / f"{name}.json.gz") for name in names)
    options = {"command": "diff", "fail_on": "backend-changed"}
    ended = run_gate(tmp_path, baseline=baseline, trace=trace, **options)
    assert ended.code == 3 and "cudnn → eager" in ended.summary, ended.log
    ended = run_gate(tmp_path, baseline=baseline, trace=baseline, **options)
    assert ended.code == 0, ended.log


def test_expectations_and_arguments_are_one_per_line(tmp_path: Path) -> None:
    trace = str(MODELS / "llama_prefill.json.gz")
    expect = "cudnn@*LlamaAttention_*\nflash,cudnn@*"
    ended = run_gate(tmp_path, trace=trace, expect=expect, args="--step\n0\n--full")
    assert ended.code == 0, ended.log
    ended = run_gate(tmp_path, trace=trace, expect=f"{expect}\nmath@*", args="--step\n0")
    assert ended.code == 3 and "--expect math@*" in ended.log
    assert "--expect flash" not in ended.log


def test_a_config_needs_no_trace(tmp_path: Path) -> None:
    inputs = {"command": "kernels", "config": "1,2,64,16,fp32", "backend": "auto"}
    assert run_gate(tmp_path, **inputs, expect="flash").code == 0
    ended = run_gate(tmp_path, **inputs, expect="cudnn")
    assert ended.code == 3 and "expected cudnn, but flash ran" in ended.summary, ended.log


def test_an_error_is_no_failed_gate(tmp_path: Path) -> None:
    for inputs, code in (({"trace": "missing.json.gz"}, 2), ({"fail_on": "nonsense"}, 2)):
        ended = run_gate(tmp_path, **({"trace": str(MODELS / "vit.json.gz")} | inputs))
        assert ended.code == code, ended.log
        assert f"profharness layers failed with exit code {code}%0A" in ended.log
        assert "A gate of" not in ended.log + ended.summary


HOSTILE = "$(touch hacked)`touch hacked`\";touch hacked;'"


@pytest.mark.parametrize("name", ["command", "trace", "config", "fail_on", "expect", "args"])
def test_hostile_inputs_run_no_code_and_give_no_workflow_commands(
    tmp_path: Path, name: str
) -> None:
    text = f"{HOSTILE}\n::add-mask::hacked\n--output=hacked"
    ended = run_gate(tmp_path, **{name: text})
    assert ended.code in (1, 2), ended.log
    assert not (tmp_path / "hacked").exists()
    shown = re.sub(r"^::stop-commands::(\w+)$.*?^::\1::$", "", ended.log, flags=re.M | re.S)
    commands = [line for line in shown.splitlines() if line.lstrip().startswith("::")]
    assert [line.split(" ")[0] for line in commands] == ["::error"], ended.log


def test_the_first_step_installs_the_checkout_of_the_action(tmp_path: Path) -> None:
    """A stand-in for pip's command line takes the place of pip, which would need the network."""
    stand_in = tmp_path / "python"
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stand_in.chmod(0o755)
    assert run_step(0, tmp_path, python=str(stand_in)).log.splitlines()[-1] == str(ROOT)
    named = run_step(0, tmp_path, python=str(stand_in), package="profharness==0.1.0")
    assert named.log.splitlines()[:3] == ["-m", "pip", "install"]
    assert named.log.splitlines()[-2:] == ["--", "profharness==0.1.0"]


def uses_of_the_action() -> list[dict[str, str]]:
    workflow, step = (yaml.safe_load(text) for text in blocks("yaml"))
    steps = [*workflow["jobs"]["gate"]["steps"], *step]
    return [each["with"] for each in steps if "profharness@" in each.get("uses", "")]


def test_the_workflow_uses_inputs_that_exist() -> None:
    uses = uses_of_the_action()
    assert [each.get("command", "layers") for each in uses] == ["layers", "diff", "kernels"]
    assert {name for each in uses for name in each} <= set(ACTION["inputs"])
    documented = re.findall(r"^\| `([a-z-]+)` \|", PAGE.partition("| input |")[2], re.MULTILINE)
    assert documented == list(ACTION["inputs"])
    assert len(blocks("yaml")[0].splitlines()) <= 80


def test_the_workflow_runs_on_the_traces_that_it_names(tmp_path: Path) -> None:
    files = {
        "trace.json.gz": "llama_prefill",
        "tests/data/attention_baseline.json.gz": "llama_eager",
    }
    for name, model in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((MODELS / f"{model}.json.gz").read_bytes())
    codes = [
        run_gate(tmp_path, **{key.replace("-", "_"): value for key, value in each.items()}).code
        for each in uses_of_the_action()
    ]
    assert codes == [0, 3, 0]


def run_example(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_attention.py").write_text(text)
    plugin = ("-p", "profharness.recording.observer.fixture")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin]
    return subprocess.run(
        [*command, "test_attention.py"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        text=True,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_the_pytest_example_passes_and_fails_on_math(tmp_path: Path) -> None:
    (example,) = (text for text in blocks("python") if "def test_" in text)
    (shown,) = (text for text in blocks("text") if text.startswith("E "))
    done = run_example(tmp_path, example)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
    done = run_example(tmp_path, example.replace("SelfAttention()(", "SelfAttention(dropout=0.1)("))
    assert done.returncode == 1 and shown in done.stdout, done.stdout
