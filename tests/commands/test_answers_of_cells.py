"""The sentences with which `kernels`, `bench`, `explain`, `predict` and `verify` answer, on stored
runs.
"""

from __future__ import annotations

import json
import tarfile
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


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "auto is within 10 % of the fastest backend on all 4 configs."),
        (
            ("--config", "2,8,512,64,fp16"),
            "auto takes 12.2 µs on cuDNN, which is the fastest backend.",
        ),
        (
            ("--config", "2,8,512,64,fp16", "--backend", "auto,flash"),
            "auto takes 12.2 µs on cuDNN; no other backend is faster (17.2 µs on flash).",
        ),
        (
            ("--config", "2,8,512,64,fp16", "--backend", "flash,math,cudnn"),
            "cuDNN is the fastest: 11.7 µs; math is the slowest: 137 µs.",
        ),
        (
            ("--backend", "cudnn,math"),
            "cuDNN is the fastest on 3 of 4 configs and math on 1.",
        ),
        (("--config", "2,8,512,64,fp16", "--backend", "flash"), "flash takes 17.2 µs on b2-h8-s512-d64-fp16."),
        (
            ("--backend", "flash"),
            "flash takes 17.2 µs (b2-h8-s512-d64-fp16) to 149 µs (b2-h8-s1024-d64-fp16-causal-bwd).",
        ),
    ],
)  # fmt: skip
def test_bench_of_an_h200(store: Path, words: tuple[str, ...], sentence: str) -> None:
    measured = (
        "Medians of 30 cold calls (timed by an older version) on NVIDIA H200 with PyTorch 2.11.0."
    )
    found = answer("bench", "--store", store, "--run", "20261121-151544-59c7", *words)
    assert found == [sentence, measured]


def test_bench_names_the_backend_to_call_instead(tmp_path: Path) -> None:
    folder = "runs/backend-investigation/bench/20261122-170254-e772"
    with tarfile.open(ROOT / "traces" / "studies.tar.xz") as archive:
        archive.extract(f"{folder}/run.json", tmp_path, filter="data")
    store = tmp_path / "profharness.db"
    ingest_path(store, tmp_path / folder)
    assert answer("bench", "--store", store, "--run", "latest") == [
        "auto loses more than 10 % on all 3 configs; the worst is b1-h1-s16-d8192-fp32: 34.1 times as "
        "long (356 µs on efficient, 10.4 µs on tiled). Call tiled itself instead.",
        "Medians of 90 to 150 cold calls (caches flushed before each) on NVIDIA H200 with PyTorch 2.11.0.",
    ]  # fmt: skip
    shown = invoke("bench", "--store", store, "--run", "latest").stdout
    assert "cold is one call with caches flushed before it, as between the layers" in " ".join(
        shown.split()
    )
    few = ("--backend", "auto,math,efficient", "--config", "1,1,16,8192,fp32")
    assert answer("bench", "--store", store, "--run", "latest", *few)[0] == (
        "auto takes 9.18 times as long: 356 µs on efficient, 38.8 µs on math. Use "
        "sdpa_kernel([SDPBackend.MATH]); the code is below."
    )


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
