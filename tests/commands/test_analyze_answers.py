"""The sentences with which `analyze` begins, on real traces and captures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from profharness.cli import cli
from profharness.commands.analyze.answer import analyze_answer
from profharness.store import ingest_path

TRACES = Path(__file__).parents[2] / "traces"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("analyses") / "s.db"
    for name in ("models/llama_eager.json.gz", "models/llama_train.json.gz", "h200-torch-nsys-ncu"):
        ingest_path(path, TRACES / name)
    return path


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (
            ["llama_eager.json.gz"],
            "LlamaDecoderLayer_{0-2}.LlamaAttention_{0-2} on eager (787 µs per call) is limited by "
            "memory traffic of the score matrix. Call "
            "torch.nn.functional.scaled_dot_product_attention (in transformers: "
            "attn_implementation='sdpa') to get a fused backend.",
        ),
        (
            ["llama_train.json.gz"],
            "LlamaDecoderLayer_{0-2}.LlamaAttention_{0-2} on cudnn (147 µs per call) is limited by "
            "latency, with neither compute nor memory near its peak.",
        ),
        (
            ["20261121-165619-f5ef", "--config", "2,8,512,64"],
            "cudnn, the fastest backend of b2-h8-s512-d64-fp16 (8.22 µs per call), is limited by too "
            "few thread blocks to fill the GPU. Batch more sequences or heads into one call, or use a "
            "kernel with smaller query tiles: at most 2.06 times as fast.",
        ),
        (
            ["20261121-165619-f5ef"],
            "The most frequent bottleneck is latency, with neither compute nor memory near its peak "
            "(8 of 20 cells), followed by the overhead of launching kernels (4).",
        ),
    ],
)
def test_the_answer_of_an_analysis(store: Path, words: list[str], answer: str) -> None:
    given = ["analyze", "--run", *words, "--peaks", "data-sheet", "--store", str(store)]
    done = CliRunner().invoke(cli, given)
    assert done.exit_code == 0, done.output
    assert " ".join(done.stdout.split()).startswith(answer)


def test_layers_are_ordered_by_their_time(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    ingest_path(path, TRACES / "models" / "unet.json.gz")
    rows = {}
    for command in ("analyze", "layers"):
        words = [command, "--store", str(path), "--format", "json"]
        rows[command] = json.loads(CliRunner().invoke(cli, words).stdout)["rows"]
    spent = {row["config"]: row["forward_ns"] for row in rows["layers"]}
    times = [spent[row["config"]] for row in rows["analyze"]]
    assert len(times) == 6 and times == sorted(times, reverse=True)


def test_nothing_to_analyze_is_said() -> None:
    (text,) = analyze_answer([])
    assert text == "Nothing to analyze: no backend computed these configs."
