"""The sentences with which `kernels`, `bench`, `explain`, `predict` and `verify` answer, on stored
runs.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from profharness.cli import find_command
from profharness.errors import GateError
from profharness.store import ingest_path

ROOT = Path(__file__).parents[2]
H200 = ROOT / "traces" / "h200-torch2.11"

# its fixture takes seconds: one process makes it once
pytestmark = pytest.mark.xdist_group("answers-of-cells")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("answers") / "profharness.db"
    ingest_path(path, H200)
    return path


def invoke(*words: object) -> Result:
    name, *arguments = map(str, words)
    return CliRunner().invoke(find_command(name), arguments)


def answer(*words: object) -> list[str]:
    done = invoke(*words, "--format", "json")
    assert done.exit_code == 0, (done.output, done.exception)
    found: list[str] = json.loads(done.stdout)["answer"]
    return found


@pytest.mark.parametrize(
    ("words", "sentences"),
    [
        (
            ("--config", "2,8,512,64,fp16"),
            ["auto runs cuDNN: 1 kernel and 1 memset, 8.21 µs a call; flash takes 12.7 µs in 2 kernels."],
        ),
        (
            ("--run", "latest"),
            [
                "auto runs cuDNN on 3 of 4 configs and flash on 1.",
                "By kernel time auto is within 10 % of the fastest backend everywhere.",
                "Refused: efficient (2 configs), cuDNN (1 config), all-disabled (1 config).",
            ],
        ),
        (
            ("--config", "2,8,512,100,fp16"),
            [
                "auto runs flash: 8 kernels, 35.6 µs a call; math takes 112 µs in 14 kernels.",
                "efficient, cuDNN and all-disabled refuse this config.",
            ],
        ),
        (
            ("--config", "2,8,512,64,fp16", "--backend", "flash,math"),
            ["flash is the fastest: 12.7 µs a call in 2 kernels; math is the slowest: 102 µs in 14 kernels."],
        ),
        (("--config", "2,8,512,64,fp16", "--backend", "flash"), ["flash launches 2 kernels, 12.7 µs a call."]),
        (("--config", "2,8,512,100,fp16", "--backend", "cudnn"), ["cuDNN refuses this config."]),
    ],
)  # fmt: skip
def test_kernels_of_an_h200(store: Path, words: tuple[str, ...], sentences: list[str]) -> None:
    assert answer("kernels", "--store", store, *words) == sentences


def test_kernels_from_an_atlas_are_marked_as_predicted() -> None:
    words = ("kernels", "--config", "2,8,512,64,bf16", "--gpu", "H200", "--torch", "2.11")
    (sentence,) = answer(*words)
    assert sentence == (
        "auto is predicted to run cuDNN: 1 kernel and 1 memset, 8.38 µs a call; flash takes 14.3 µs in "
        "2 kernels."
    )
    for kind in ("table", "md", "html"):
        shown = invoke(*words, "--format", kind).stdout
        assert all(f"{backend} (predicted)" in shown for backend in ("auto", "flash", "math"))
    (sentence,) = answer(
        "kernels", "--config", "2,8,512,64,bf16", "--gpu", "A100", "--torch", "2.11"
    )
    assert sentence == "auto is predicted to take flash; its kernels are unknown."


def test_all_profilers_agree_on_an_h200(store: Path) -> None:
    ingest_path(store, ROOT / "traces" / "h200-torch-nsys-ncu")
    last = answer("kernels", "--store", store, "--profiler", "all")[-1]
    assert last == "The profilers agree on all 104 kernels."


def test_a_gate_that_is_met_says_so_on_stderr(store: Path) -> None:
    asked = ("kernels", "--store", store, "--backend", "flash")
    met = invoke(*asked, "--expect", "flash")
    assert met.exit_code == 0
    assert met.stderr.splitlines()[-1] == "gate passed: --expect flash"
    assert "gate passed" not in met.stdout
    assert "gate passed" not in invoke(*asked).stderr
    unmet = invoke(*asked, "--expect", "math")
    assert isinstance(unmet.exception, GateError)
    assert "gate passed" not in unmet.stderr
