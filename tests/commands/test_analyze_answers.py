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
    ingest_path(path, TRACES / "serving" / "shapes.json.gz")
    return path


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (
            # Bug: the upper bound followed the sentence `The keys are already split`.
            ["shapes.json.gz"],
            "DecoderLayer_{0-5}.RadixAttention_{0-5} on flashinfer (11.1 µs per call) is limited by "
            "latency, with neither compute nor memory near its peak. Batch more sequences into one "
            "call (the keys are already split): at most 1.27 times as fast.",
        ),
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
            "cudnn, the fastest backend of b2-h8-s512-d64-fp16 by kernel times (8.22 µs per call), is limited by too "
            "few thread blocks to fill the GPU. Batch more sequences or heads into one call, or use a "
            "kernel with smaller query tiles: at most 2.06 times as fast.",
        ),
        (
            ["20261121-165619-f5ef"],
            "The most frequent bottleneck is latency, with neither compute nor memory near its peak "
            "(7 of the 17 cells that ran, without all-disabled), followed by memory traffic of the score "
            "matrix and the overhead of launching kernels (3 each).",
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
    assert text == "Nothing to analyze: no backend produced usable results for these configs."


def test_a_remedy_of_several_cells_has_the_range_of_its_gains_and_their_basis(store: Path) -> None:
    """Bug: "flash and efficient on 2 configs: measured 3.37 times as fast", for 3 cells."""
    ingest_path(store, TRACES / "h200-torch2.11")
    given = ["analyze", "h200-torch2.11", "--peaks", "data-sheet", "--store", str(store)]
    text = " ".join(CliRunner().invoke(cli, given).stdout.split())
    assert (
        "In 3 of these cells (flash on 1 config; efficient on 2 configs), use cudnn, with "
        "torch.nn.attention.sdpa_kernel(SDPBackend.CUDNN_ATTENTION): measured 1.55 to 3.57 times "
        "as fast (mean kernel times)." in text
    )
    assert "Measured 1.55 to 24.8 times as fast (mean kernel times)." in text


def test_outputs_with_rates_name_their_basis(store: Path) -> None:
    """Bug: `analyze` and `bench` showed different TFLOP/s of a cell without saying of what."""
    ingest_path(store, TRACES / "h200-torch2.11")
    for command, basis in (
        ("analyze", "rates of kernel times"),
        ("bench", "Medians of 30 cold calls"),
    ):
        given = [command, "h200-torch2.11", "--store", str(store)]
        text = " ".join(CliRunner().invoke(cli, given, env={"COLUMNS": "80"}).stdout.split())
        assert basis in text
