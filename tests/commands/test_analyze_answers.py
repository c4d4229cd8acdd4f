"""The sentences with which `analyze` begins, on real traces and captures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import profharness
from profharness.cli import cli
from profharness.commands._answers import OF_ALL_DISABLED
from profharness.commands.analyze.answer import analyze_answer
from profharness.commands.analyze.changes import launch_limit
from profharness.program.layer_map import find_layers
from profharness.store import ingest_path, open_store

TRACES = Path(__file__).parents[2] / "traces"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("analyses") / "s.db"
    for name in ("llama_eager.json.gz", "llama_train.json.gz", "llama_generate"):
        ingest_path(path, TRACES / "models" / name)
    ingest_path(path, TRACES / "h200-torch-nsys-ncu")
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
            "unfused ops outside of the matrix products. Use scaled_dot_product_attention (in transformers: "
            "attn_implementation='sdpa'), predicted to save about 2.23 ms of GPU time per step. The "
            "GPU is idle for 58 % of the traced step (under the profiler, which slows the CPU): launch "
            "overhead is a limit too, so the step itself may not get shorter; capture the step into a "
            "CUDA graph, or compile the model with mode='reduce-overhead'. Bottlenecks",
        ),
        (
            # Bug: the advice to split the keys "as cuDNN does", for a call that ran on cuDNN.
            ["llama_generate"],
            "layers.{0-2}.self_attn on cudnn (5.30 µs per call) is limited by too few thread blocks "
            "to fill the GPU. Batch more sequences into one call, so that each takes less time: at "
            "most 8.25 times as fast.",
        ),
        (
            # Bug: only `layers` said that the launches limit the step.
            ["llama_train.json.gz"],
            "LlamaDecoderLayer_{0-2}.LlamaAttention_{0-2} on cudnn (147 µs per call) is limited by "
            "latency, with neither compute nor memory near its peak. The GPU is idle for 77 % of the "
            "traced step (under the profiler, which slows the CPU): launch overhead, not attention, is "
            "the limit; capture the step into a CUDA graph, or compile the model with "
            "mode='reduce-overhead'. Bottlenecks",
        ),
        (
            ["20261121-165619-f5ef", "--config", "2,8,512,64"],
            "cudnn, the fastest backend of b2-h8-s512-d64-fp16 in CUDA-graph replays "
            "(9.96 µs per call), is limited by too few thread blocks to fill the "
            "GPU. Batch more sequences or heads into one call, or use a "
            "kernel with smaller query tiles: at most 2.06 times as fast.",
        ),
        (
            ["20261121-165619-f5ef"],
            "The most frequent bottleneck is latency, with neither compute nor memory near its peak "
            "(7 of the 17 cells that ran, without all-disabled), followed by unfused ops outside of the "
            "matrix products and the overhead of launching kernels (3 each).",
        ),
    ],
)
def test_the_answer_of_an_analysis(store: Path, words: list[str], answer: str) -> None:
    given = ["analyze", "--run", *words, "--peaks", "data-sheet", "--store", str(store)]
    done = CliRunner().invoke(cli, given)
    assert done.exit_code == 0, done.output
    assert " ".join(done.stdout.split()).startswith(answer)


def test_the_launch_limit_names_a_change_only_if_the_answer_contains_it(store: Path) -> None:
    analyses = profharness.analyze(
        run="llama_eager.json.gz", peaks="data-sheet", store=store
    ).attrs["analyses"]
    with open_store(store) as opened:
        layers = find_layers(opened, analyses[0].run)
    clause = "launch overhead is a limit too, so the step itself may not get shorter;"
    assert clause in launch_limit(layers, analyses)
    assert "launch overhead is a limit too;" in launch_limit(layers, [])


def test_one_wave_of_a_persistent_kernel_is_not_a_cause(tmp_path: Path) -> None:
    """Bug: 132 blocks on 132 SMs, for at least 192 tiles, were called the cause of latency."""
    path = tmp_path / "s.db"
    ingest_path(path, TRACES / "models" / "whisper.json.gz")
    encoder = profharness.analyze(peaks="data-sheet", store=path).attrs["analyses"][0]
    assert (encoder.main.blocks, encoder.machine.num_sms) == (132, 132)
    assert encoder.bottleneck == "latency"
    assert "one wave" not in encoder.finding("bottleneck").sentence


def test_analyze_advises_what_layers_advises(tmp_path: Path) -> None:
    """Bug: advice on tiles, at most 1.38 times as fast, where cudnn in bf16 is 4.77 times as fast."""
    path = tmp_path / "s.db"
    ingest_path(path, TRACES / "models" / "bert_fp32.json.gz")

    def told(command: str, *more: str) -> str:
        done = CliRunner().invoke(cli, [command, *more, "--store", str(path)])
        assert done.exit_code == 0, done.output
        return " ".join(done.stdout.split())

    change = (
        "To run cudnn, compute in bf16 instead of fp32: predicted to save about 381 µs of GPU time "
        "per step, minus the time to prepare the inputs (33.6 µs instead of 161 µs per call)."
    )
    assert change in told("layers")
    shown = told("analyze", "--peaks", "data-sheet")
    assert (
        f"near its peak. {change} Bottlenecks" in shown
    )  # and no advice on the tiles of efficient
    assert "query tile" not in told("analyze", "--full", "--peaks", "data-sheet")
    (row,) = json.loads(told("analyze", "--format", "json"))["rows"]
    (remedy,) = row["remedies"]
    assert remedy["text"] == change and remedy["grade"] == "predicted"
    assert remedy["factor"] == pytest.approx(4.77, abs=0.01)
    assert remedy["findings"] == ["tail"]


def test_analyze_of_a_capture_advises_what_explain_advises(tmp_path: Path) -> None:
    """Bug: at most 1.55 times as fast by padding, where explain says 3.13 times as fast."""
    path = tmp_path / "s.db"
    ingest_path(path, TRACES / "h200-torch2.11")

    def told(*more: str) -> str:
        given = ["analyze", *more, "--peaks", "data-sheet", "--store", str(path)]
        done = CliRunner().invoke(cli, given)
        assert done.exit_code == 0, done.output
        return " ".join(done.stdout.split())

    change = (
        "To run cudnn, pad head_dim from 100 to 104, keep the scale and "
        "slice the output: predicted to take 11.4 µs plus the time to prepare the inputs, instead of "
        "35.6 µs per call."
    )
    assert f"near its peak. {change}" in told("2,8,512,100")
    assert "Pad head_dim 100" not in told("2,8,512,100", "--full")
    remedies = {
        row["backend"]: row["remedies"]
        for row in json.loads(told("2,8,512,100", "--format", "json"))["rows"]
    }
    for backend in ("auto", "flash"):
        first = remedies[backend][0]
        assert first["text"] == change and first["grade"] == "predicted"
        assert first["factor"] == pytest.approx(3.13, abs=0.01)
    # The change is not one to the calls that math computes.
    assert "predicted" not in {each["grade"] for each in remedies["math"]}
    # A config that cudnn runs has no such change, and the answer does not tell that of another one.
    assert "pad head_dim" not in told("2,8,512,64")
    assert "on b2-h8-s512-d100-fp16, pad head_dim" in told("--full")
    # Bug: the answer for all configs led with backends that `auto` already beats.
    answer = told().partition("Bottlenecks")[0]
    assert "(3 each). To run cudnn on b2-h8-s512-d100-fp16, pad head_dim from 100 to 104" in answer
    assert answer.count("pad head_dim") == 1 and "use cudnn, with" not in answer


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
    """Bugs: "flash and efficient on 2 configs: measured 3.37 times as fast", for 3 cells, and "these
    cells", which could be all 17.
    """
    ingest_path(store, TRACES / "h200-torch2.11")
    given = ["analyze", "h200-torch2.11", "--peaks", "data-sheet", "--store", str(store)]
    forced = [*given, "--backend", "flash,efficient,cudnn,math"]
    text = " ".join(CliRunner().invoke(cli, forced).stdout.split())
    assert (
        "In 3 of the 5 cells limited by latency (flash on 1 config; efficient on 2 configs), use cudnn, with "
        "torch.nn.attention.sdpa_kernel(SDPBackend.CUDNN_ATTENTION): measured 1.37 to 3.37 times "
        "as fast (CUDA-graph replays)." in text
    )
    text = " ".join(CliRunner().invoke(cli, given).stdout.split())
    assert (
        "Measured 1.37 to 23.1 times as fast (CUDA-graph replays). Applies to 8 cells: flash and math "
        "on 3 configs each; efficient on 2 configs." in text
    )


def test_a_kernel_of_both_passes_is_split_into_its_roles(store: Path) -> None:
    """Bug: the products of both passes were one kernel with the role `qk+pv`."""
    ingest_path(store, TRACES / "h200-torch2.11")
    given = [
        "analyze",
        "h200-torch2.11",
        "--backend",
        "math",
        "--config",
        "2,8,1024,64,fp16,causal,bwd",
    ]
    given += ["--peaks", "data-sheet", "--store", str(store), "--format", "json"]
    (row,) = json.loads(CliRunner().invoke(cli, given).stdout)["rows"]
    products = [each["role"] for each in row["kernels"] if "gemm" in each["kernel"]]
    assert products == ["qk", "pv", "dV", "dP", "dK", "dQ"]
    assert sum(each["share"] for each in row["kernels"]) == pytest.approx(1)


def test_outputs_with_rates_name_their_basis(store: Path) -> None:
    """Bug: `analyze` and `bench` showed different TFLOP/s of a cell without saying of what."""
    ingest_path(store, TRACES / "h200-torch2.11")
    for command, basis in (
        ("analyze", "rates of kernel times"),
        ("bench", "Medians of 30 CUDA-graph replays"),
    ):
        given = [command, "h200-torch2.11", "--store", str(store)]
        text = " ".join(CliRunner().invoke(cli, given, env={"COLUMNS": "80"}).stdout.split())
        assert basis in text


def test_the_answer_names_both_of_two_configs(store: Path) -> None:
    """Bug: the answer was about the first config only, and had no remedy."""
    ingest_path(store, TRACES / "serving_bench")
    given = ["analyze", "serving_bench", "--store", str(store)]
    answer, *_ = CliRunner().invoke(cli, given, env={"COLUMNS": "80"}).stdout.split("\n\n")
    text = " ".join(answer.split())
    for config in ("s362-d128-bf16-causal-page=16", "sq1-skv364-d128-bf16-page=16"):
        assert f"the fastest backend of b4-h32-kv8-{config} by kernel times" in text
    assert "Batch more sequences into one call" in text


def test_commands_give_one_ratio_for_two_backends(store: Path) -> None:
    """Bug: three ratios of one pair in one run: 1.37 (graph), 1.47 (cold) and 1.55 (kernel)."""
    ingest_path(store, TRACES / "h200-torch2.11")
    config = ["--config", "2,8,512,64", "--store", str(store)]
    of_run = ["h200-torch2.11", *config, "--backend", "flash,cudnn"]
    for words, expected in (
        (["diff", "h200-torch2.11:flash", "h200-torch2.11:cudnn", *config], "1.37 times as fast"),
        (["analyze", *of_run], "Measured 1.37 times as fast (CUDA-graph replays)."),
        (["bench", *of_run], "1.37x"),
    ):
        text = " ".join(CliRunner().invoke(cli, words, env={"COLUMNS": "80"}).stdout.split())
        assert expected in text and ("replays" in text or words[0] == "bench"), words


@pytest.mark.parametrize("command", ["kernels", "analyze", "bench"])
def test_tables_explain_all_disabled(store: Path, command: str) -> None:
    """Bug: only `bench` and `report` said what this row is, in different words."""
    ingest_path(store, TRACES / "h200-torch2.11")
    given = [command, "h200-torch2.11", "--config", "2,8,512,64", "--store", str(store)]
    text = " ".join(CliRunner().invoke(cli, given, env={"COLUMNS": "80"}).stdout.split())
    assert text.count(OF_ALL_DISABLED) == 1


def test_bench_notes_are_few_and_missing_values_are_dashes(store: Path) -> None:
    """Bugs: 11 lines of notes, mostly on the machine, and blank cells of refused backends."""
    for run in ("serving_bench", "h200-torch2.11"):
        ingest_path(store, TRACES / run)
    given = ["bench", "serving_bench", "--store", str(store)]
    text = CliRunner().invoke(cli, given, env={"COLUMNS": "80"}).stdout
    notes = text.partition("\nmedian ")[2].splitlines()
    assert "Notes" not in text.split()  # no other command has a heading for its notes
    assert len(notes) <= 8 and not any("driver" in line for line in notes)
    assert "driver 580" in " ".join(CliRunner().invoke(cli, [*given, "--full"]).stdout.split())
    given = ["bench", "h200-torch2.11", "--store", str(store)]
    text = CliRunner().invoke(cli, given, env={"COLUMNS": "80"}).stdout
    assert re.search(r" efficient +refused( +-)+$", text.replace(" \n", "\n"), re.MULTILINE)
    assert re.search(r" flash +13.4", text, re.MULTILINE)


def test_bench_says_which_of_the_fastest_backends_auto_ran(store: Path) -> None:
    """Bug: `auto` took 9.56 µs and cudnn 9.82 µs, and both were 1.00x of the fastest, because the
    ratios are relative to cudnn, which `auto` ran.
    """
    ingest_path(store, TRACES / "h200-torch2.11")
    for words in (["bench"], ["kernels", "--breakdown"]):
        given = [*words, "h200-torch2.11", "--config", "2,8,512,64", "--store", str(store)]
        text = CliRunner().invoke(cli, given, env={"COLUMNS": "200"}).stdout
        assert re.search(r"\bauto .* = cudnn\b", text)
        assert re.search(r"^ +cudnn .* 1\.00x|^cudnn .* 1\.00x", text, re.MULTILINE)
        assert "auto ran cudnn, so both rows time the same kernels" in " ".join(text.split())


def test_a_breakdown_names_the_time_that_its_shares_refer_to(store: Path) -> None:
    """Bug: a kernel had 90.6 and 60.9 % of a call, because the shares had different bases."""
    ingest_path(store, TRACES / "h200-torch2.11")
    given = ["kernels", "h200-torch2.11", "--config", "2,8,512,64", "--store", str(store)]
    text = CliRunner().invoke(cli, [*given, "--breakdown"], env={"COLUMNS": "200"}).stdout
    assert "mean µs/call  % of cold call" in text
    assert (
        "mean µs/call  % of call" in CliRunner().invoke(cli, given, env={"COLUMNS": "200"}).stdout
    )
