"""`profharness layers` with a column a class of GPU, and `--savings`: real traces of an H200, and of the same
steps under another GPU's name with longer kernels.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from small_models import Model, record
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from waiting import PATIENCE_S
from written_benches import US, bench_run

from profharness.attention.config import parse_config
from profharness.attention.dispatch.by_rule import named_platforms
from profharness.cli import cli
from profharness.errors import GateError, NotFoundError, ProfharnessError, UsageError
from profharness.jobs import into_store as recording
from profharness.measurements.evaluation import evaluate_bench
from profharness.program.gates import check_gates, parse_gates, require_recorded
from profharness.program.layer_map import LayerMap, find_layers, suggestions
from profharness.program.regret import regret_configs, regret_map
from profharness.rows import StepRow
from profharness.run import BenchOptions
from profharness.store import Selection, ingest_path, open_store

TRACES = Path(__file__).parents[2] / "traces"
H100, H200, L40S = "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA L40S"
WIDE = {"COLUMNS": "250"}
ENCODER = "WhisperModel_0.WhisperEncoder_0.WhisperEncoderLayer_{0-1}.WhisperAttention_{0-1}"


def on(gpu: str, model: str, times: float, path: Path) -> Path:
    """The trace of a model as another GPU of this speed would have made it."""
    trace = json.loads(gzip.decompress((TRACES / "models" / f"{model}.json.gz").read_bytes()))
    for device in trace["deviceProperties"]:
        device["name"] = gpu
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel":
            event["dur"] *= times
    path.write_text(json.dumps(trace))
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Whisper on three classes; a Llama with another backend on the second; a capture of configs."""
    folder = tmp_path_factory.mktemp("classes")
    sources = {
        "whisper": TRACES / "models" / "whisper.json.gz",
        "slower": on(H100, "whisper", 1.25, folder / "slower.json"),
        "slowest": on(L40S, "whisper", 4, folder / "slowest.json"),
        "llama": TRACES / "models" / "llama_prefill.json.gz",
        "eager": on(H100, "llama_eager", 1, folder / "eager.json"),
        "train": on(H100, "llama_train", 2, folder / "train.json"),
        "configs": TRACES / "h200-torch2.11",
    }
    path = folder / "s.db"
    runs = {name: ingest_path(path, source)[0].run for name, source in sources.items()}
    return {**runs, "store": str(path)}


def ask(store: dict[str, str], *words: str) -> Any:
    arguments = [store.get(word, word) for word in words]
    return CliRunner().invoke(cli, ["layers", *arguments, "--store", store["store"]], env=WIDE)


def answer(store: dict[str, str], *words: str) -> dict[str, Any]:
    done = ask(store, *words, "--format", "json")
    assert done.exit_code == 0, done.output
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def test_each_class_is_a_column(store: dict[str, str]) -> None:
    text = ask(store, "slower", "whisper", "slowest").stdout
    table = text[text.index("Runs compared") :]
    header, first = table.splitlines()[1:3]
    for title in (
        "ran",
        "H100 median forward µs/call",
        "H200 median forward µs/call",
        "H200 speed-up",
        "L40S speed-up",
    ):
        assert title in header
    figures = ["cudnn", "44.5", "35.7", "141", "1.24x", "0.316x"]
    assert first.split()[-9:-3] == figures
    assert all(f"{gpu} % of roofline" in header for gpu in ("H100", "H200", "L40S"))
    assert "another backend" not in table
    answer = (
        "H200 is 1.24 times as fast as H100 in attention (148 µs → 120 µs per step); the largest "
        "difference is in"
    )
    assert answer in " ".join(text.split())


def test_two_runs_are_compared_as_in_diff(store: dict[str, str]) -> None:
    """Bugs: `llama_eager µs/call` beside notes on `llama_eager.json.gz`, and a column for each run."""
    models = Path(__file__).parents[2] / "traces" / "models"
    names = ("llama_eager.json.gz", "llama_prefill.json.gz")
    paths = [str(models / name) for name in names]
    text = ask(store, *paths).stdout
    assert " ".join(text.split()).startswith(
        f"{names[1]} is 22.6 times as fast as {names[0]} in attention (2.36 ms → 104 µs per step)"
    )
    table = text[text.index("Runs compared") :].splitlines()
    assert table[0] == f"Runs compared  {' → '.join(names)}, median kernel time per call"
    for title in ("  median forward µs/call  ", "  speed-up", "  % of roofline"):
        assert title in table[1]
    assert table[1].index("config") < table[1].index("calls/step") < table[1].index("ran")
    for value in ("eager → cudnn", "786 → 34.8", "22.6x", "2.2 → 25.0"):
        assert value in table[2]
    # Bug: the table had the config of the first run, and a note below it had both configs.
    configs = "b2-h32-s1024-d64-bf16 → b2-h32-kv8-s1024-d64-bf16-causal-layout=bshd"
    assert configs in table[2] and text.count(configs) == 1


def test_programs_read_the_same_figures(store: dict[str, str]) -> None:
    told = answer(store, "slower", "whisper")
    assert told["schema"] == "profharness.layers/1"
    assert [row["run"] for row in told["rows"]] == [store["slower"]] * 3 + [store["whisper"]] * 3
    assert [each["device"] for each in told["classes"]] == [H100, H200]
    for row in told["layers"]:
        ratio = row["call_ns"][0] / row["call_ns"][1]
        assert 1.2 < ratio < 1.3
        assert [side["ran"] for side in row["sides"]] == ["cudnn", "cudnn"]
    assert told["layers"][0]["sides"][0]["module"] == ENCODER
    side = told["layers"][0]["sides"][1]
    config = parse_config(side["config"])
    batch, heads, queries, keys, dim = (
        *(config.batch, config.num_heads, config.seq_len_q, config.seq_len_kv, config.head_dim),
    )
    work = 4 * batch * heads * queries * keys * dim
    moved = 2 * batch * heads * dim * 2 * (queries + keys)
    least = max(work / 989.5e12, moved / 4.8e12)  # the data sheet of the H200
    assert side["roofline_share"] == pytest.approx(1e9 * least / side["forward_ns"])
    assert side["kernels"] and "cudnn" in side["kernels"][0]
    alone = answer(store, "whisper")
    assert {"classes", "layers"}.isdisjoint(alone)


def test_other_backends_and_configs_are_reported(store: dict[str, str]) -> None:
    text = ask(store, "llama", "eager", "train").stdout
    text = text[text.index("Runs compared") :]
    assert "H100 (eager.json) median forward µs/call" in text  # two runs of one device
    assert "H100 (eager.json) runs a different backend than H200 in 1 of 1 row." in text
    assert "config: b2-h32-kv8-s1024-d64-bf16-causal-layout=bshd → b2-h32-s1024-d64-bf16" in text
    assert "Only the forward pass is compared, because not all runs have a backward pass." in text


def test_rates_include_the_passes_that_are_compared(store: dict[str, str]) -> None:
    program = str(TRACES / "models/llama_train.json.gz")
    found = CliRunner().invoke(
        cli, ["analyze", program, "--store", store["store"], "--format", "json"], env=WIDE
    )
    (cell,) = json.loads(found.stdout)["rows"]
    training = answer(store, program, str(TRACES / "models/llama_checkpoint.json.gz"))["layers"][0]
    assert training["basis"] == "forward and backward"
    assert training["sides"][0]["roofline_share"] == pytest.approx(cell["flops_share"], rel=0.01)
    forward = answer(store, program, str(TRACES / "models/llama_prefill.json.gz"))["layers"][0]
    assert forward["basis"] == "forward"
    left, right = (side["roofline_share"] for side in forward["sides"])
    assert left == pytest.approx(right, rel=0.05)


def test_layers_of_one_gpu_alone_have_rows(store: dict[str, str]) -> None:
    told = answer(store, "whisper", "eager")
    there = [tuple(side is not None for side in row["sides"]) for row in told["layers"]]
    assert sorted(there) == [(False, True), *[(True, False)] * 3]
    text = " ".join(ask(store, "whisper", "eager").stdout.split())
    assert "has no matching layer" not in text


def test_runs_without_a_common_layer_are_not_compared(store: dict[str, str]) -> None:
    text = ask(store, "whisper", "eager").output
    asked = "H100 has no layer in common with H200. Layers are compared by their names and the sizes of their calls."
    assert text.startswith(asked)
    assert "another backend" not in text and "Runs compared" not in text


def test_gates_apply_to_each_run(store: dict[str, str]) -> None:
    assert ask(store, "llama", "whisper", "--fail-on", "eager-attention").exit_code == 0
    done = ask(store, "llama", "eager", "--fail-on", "eager-attention")
    assert isinstance(done.exception, GateError)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("whisper", "slower", "--step", "0"), "apply to one run"),
        (("whisper", "slower", "--gpu", "H200"), "apply to one run"),
        (("whisper", "--gpu", "H200,H200"), "the same GPU"),
        (("whisper", "--gpu", "H200,NVIDIA H200"), "H200 and NVIDIA H200 are the same GPU"),
        (("whisper", "--gpu", "H200,,H100"), "a GPU name is empty"),
    ],
)
def test_layers_refuses_runs_and_options_that_exclude_each_other(
    store: dict[str, str], words: tuple[str, ...], message: str
) -> None:
    error = ask(store, *words).exception
    assert isinstance(error, UsageError)
    assert message in str(error)


def test_layers_refuses_a_captured_run(store: dict[str, str]) -> None:
    for words in (("configs",), ("configs", "--gpu", "H100,H200")):
        error = ask(store, *words).exception
        assert isinstance(error, NotFoundError)
        remedy = "to show them, use: profharness kernels h200-torch2.11"
        assert f"contains configs, not a program; {remedy}" in str(error)


def test_layers_names_bench_for_a_benchmark(tmp_path: Path) -> None:
    """Bug: the error named `kernels`, which does not compare the times of a benchmark."""
    path, run = tmp_path / "s.db", str(TRACES / "serving_bench")
    error = CliRunner().invoke(cli, ["layers", run, "--store", str(path)]).exception
    assert isinstance(error, NotFoundError)
    assert "to show them, use: profharness bench serving_bench" in str(error)


def test_a_comparison_leaves_captured_runs_out(store: dict[str, str]) -> None:
    """Bug: `layers FOLDER` ingested all runs of a folder, and then failed because of one of them."""
    done = ask(store, "whisper", "slower", "configs")
    assert done.exit_code == 0 and "Runs compared" in done.stdout
    told = "h200-torch2.11 contains no attention call of a program and cannot be compared."
    assert told in done.stdout.splitlines()
    error = ask(store, "whisper", "configs", "--fail-on", "math-fallback").exception
    assert isinstance(error, GateError) and "cannot check the gates" in str(error)


def test_predictions_and_measured_times_share_a_table(store: dict[str, str]) -> None:
    done = ask(store, "whisper", "--gpu", "H200,B200")
    text = done.stdout[done.stdout.index("GPUs compared") :]
    # Without an atlas of the B200, the columns of its times are empty.
    for title in ("H200 measured", " H200 predicted", "B200 predicted", "H200 speed-up"):
        assert title in text.splitlines()[1]
    assert "torch 2.11.0" in done.stdout and "torch 2.13.0" not in done.stdout
    told = answer(store, "whisper", "--gpu", "H200,B200")
    assert [each["gpu"] for each in told["classes"]] == [
        row["predicted_gpu"] for row in told["rows"][::3]
    ]
    assert told["predicted"] == told["classes"][0]
    assert {row["predicted_source"] for row in told["rows"]} == {"model", "floor"}
    (one,) = {row["predicted_gpu"] for row in answer(store, "whisper", "--gpu", "H200")["rows"]}
    assert one == told["classes"][0]["gpu"]


def test_diff_of_two_gpus_has_verdicts_that_name_the_gpus(store: dict[str, str]) -> None:
    """Bug: a ratio was printed next to the verdict `unknown`, and the answer said `faster`."""
    runs = store["train"], store["llama"], "--store", store["store"]
    told = json.loads(CliRunner().invoke(cli, ["diff", *runs, "--format", "json"]).stdout)
    (gpu,) = told["environment"]
    assert (gpu["key"], gpu["baseline"], gpu["candidate"]) == ("gpu", H100, H200)
    (layer,) = told["layers"]
    assert (layer["verdict"], layer["speed"]) == ("faster", "faster")
    differ = "the GPUs differ (H100 and H200)"
    assert all(differ in row["reasons"] for row in (layer, *told["rows"]) if row["ratio"])
    text = CliRunner().invoke(cli, ["diff", *runs]).stdout
    assert text.startswith("llama_prefill.json.gz is 1.94 times as fast as train.json")
    assert "The environments may also differ in other ways" in text
    assert differ[1:] in " ".join(text.split())  # the note may begin with these words


def test_few_calls_have_no_verdict_on_two_gpus_either(store: dict[str, str]) -> None:
    runs = store["slower"], store["whisper"], "--store", store["store"]
    text = CliRunner().invoke(cli, ["diff", *runs]).stdout
    assert text.startswith("No verdict on the attention forward pass (148 µs → 120 µs per step)")
    assert "too few calls (2 and 2 calls; each side needs" in " ".join(text.split())


FILES = ("slower.json", "whisper.json.gz", "slowest.json")


def report(store: dict[str, str], *names: str) -> Any:
    runs = [store[name] for name in names]
    return CliRunner().invoke(cli, ["report", *runs, "--store", store["store"]], env=WIDE)


def test_a_report_on_programs_has_the_columns(store: dict[str, str], tmp_path: Path) -> None:
    done = report(store, "slower", "whisper", "slowest")
    asked = ask(store, "slower", "whisper", "slowest").stdout
    assert asked[asked.index("Runs compared") :].strip() in done.stdout
    headings = [line for line in done.stdout.splitlines() if line.startswith(FILES)]
    assert [line.split()[0] for line in headings][-3:] == [*FILES]
    assert done.stdout.count("\nLayers\n") == 3
    page = tmp_path / "report.html"
    runs = store["slower"], store["whisper"], "--store", store["store"]
    assert CliRunner().invoke(cli, ["report", *runs, "-o", str(page)]).exit_code == 0
    assert "H100 → H200" in page.read_text()
    told = json.loads(CliRunner().invoke(cli, ["report", *runs, "--format", "json"]).stdout)
    maps = answer(store, "slower", "whisper")
    assert told["layers"] == maps["rows"]
    assert told["layer_classes"] == {name: maps[name] for name in ("classes", "layers")}


def test_a_report_with_one_program_has_its_map_alone(store: dict[str, str]) -> None:
    for names in (("whisper",), ("whisper", "configs")):
        done = report(store, *names)
        assert done.exit_code == 0 and "Runs compared" not in done.stdout
        assert done.stdout.count("\nLayers\n") == 1
    runs = store["whisper"], "--store", store["store"], "--format", "json"
    told = json.loads(CliRunner().invoke(cli, ["report", *runs]).stdout)
    assert told["layers"] == answer(store, "whisper")["rows"]
    assert "layer_classes" not in told


@pytest.fixture(scope="module")
def benches(store: dict[str, str]) -> dict[str, str]:
    """The store with benches of whisper's configs: flash is the fastest on the second and third class,
    and of the third nothing tells kernel times, or what `auto` takes of the last config.
    """
    labels = [row["config"] for row in answer(store, "whisper")["rows"]]
    times = {
        "b100": (H100, 45, 50, {}),
        "b200": (H200, 36, 30, {}),
        "b40s": (L40S, 90, 60, {"measurement": "cold"}),
    }
    runs = {}
    for name, (gpu, cudnn, flash, more) in times.items():
        both = (("auto", cudnn), ("cudnn", cudnn), ("flash", flash))
        cells = {(label, backend): us * US for label in labels for backend, us in both}
        if more:
            del cells[labels[-1], "auto"]
        machine = {"device_type": "cuda", "gpu": gpu, "torch": "2.12.0" if more else "2.11.0"}
        chosen = {"measurement": "kernel", "choice": "cudnn"} | more
        runs[name] = bench_run(Path(store["store"]), name, cells, machine, **chosen)
    return {**store, **runs, "both": f"{runs['b100']},{runs['b200']}"}


def test_benches_of_one_program_have_a_column_each(benches: dict[str, str]) -> None:
    text = ask(benches, "whisper", "--bench", "both").stdout
    assert "12.0 µs per step" in text  # of its own GPU what the fastest saves
    table = text[text.index("Benchmarks compared") :]
    header, first = table.splitlines()[1:3]
    for title in (
        "ran",
        "H100 median µs",
        "H200 median µs",
        "H200 speed-up",
        "H200 median fastest µs",
    ):
        assert title in header
    assert first.split()[-8:] == [
        *("cudnn", "45.0", "36.0", "1.25x"),
        *("cudnn", "45.0", "flash", "30.0"),
    ]
    summed = "270 µs on H100 and 216 µs on H200 (1.25x), summed over 3 of 3 rows"
    assert f"In these benchmarks, attention of a step takes {summed}" in " ".join(table.split())
    assert (
        "On H200, the fastest correct backends save 36.0 µs of the kernel time of a step" in table
    )
    assert "on H100, the fastest" not in table
    told = answer(benches, "whisper", "--bench", "both")
    assert {"classes", "layers"}.isdisjoint(told)
    assert [each["program"] for each in told["benches"]] == [None, benches["whisper"]]
    assert [each["measurement"] for each in told["benches"]] == ["kernel", "kernel"]
    assert told["benches"][1]["regret"] == told["regret"]
    assert told["regret"]["saves_ns"] == 36 * US
    for layer in told["benched"]:
        assert [call["best"] for call in layer["calls"]] == ["cudnn", "flash"]
        assert [call["ns"] for call in layer["calls"]] == [45 * US, 36 * US]


def test_recomputed_calls_are_timed_as_forward_calls(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    store = {"store": str(path)}
    ingest_path(path, TRACES / "models" / "llama_checkpoint.json.gz")
    whole, forward = ask(store, "--savings", "--list-configs").stdout.split()
    runs = []
    for name, gpu in (("h100", H100), ("h200", H200)):
        cells = {(whole, "cudnn"): 90 * US, (forward, "cudnn"): 30 * US}
        machine = {"device_type": "cuda", "gpu": gpu, "torch": "2.11.0"}
        runs.append(bench_run(path, name, cells, machine, measurement="kernel"))
    told = answer(store, "--bench", ",".join(runs))
    times = {layer["direction"]: layer["calls"][1]["ns"] for layer in told["benched"]}
    assert times == {"forward": 90 * US, "recompute": 30 * US}
    text = ask(store, "--bench", ",".join(runs)).stdout
    (line,) = [line for line in text.splitlines() if "(recompute)" in line and "30.0" in line]
    assert line.split()[2] == forward


def test_each_of_several_programs_has_the_bench_of_its_gpu(
    benches: dict[str, str], tmp_path: Path
) -> None:
    told = answer(benches, "slower", "whisper", "--bench", benches["b200"], "--bench", "b100")
    assert [each["run"] for each in told["benches"]] == [benches["b100"], benches["b200"]]
    assert [each["program"] for each in told["benches"]] == [benches["slower"], benches["whisper"]]
    assert [each["regret"]["saves_ns"] for each in told["benches"]] == [0, 36 * US]
    assert [row["best"] for row in told["rows"]] == ["cudnn"] * 3 + ["flash"] * 3
    assert len(told["classes"]) == 2 and len(told["layers"]) == len(told["benched"]) == 3
    text = ask(benches, "slower", "whisper", "--bench", "b200").stdout
    assert "--bench names no benchmark on H100" in text and "H100: no benchmark" in text
    page = tmp_path / "benches.html"
    done = ask(benches, "slower", "whisper", "--bench", "both", "-o", str(page))
    assert done.exit_code == 0 and "H200 median fastest µs" in page.read_text()


def test_missing_and_different_measurements_are_reported(benches: dict[str, str]) -> None:
    text = " ".join(
        ask(benches, "whisper", "--bench", f"{benches['both']},{benches['b40s']}").stdout.split()
    )
    assert "Kernel times on H100 and cold times on L40S cannot be compared" in text
    assert "The benchmark on L40S also ran with different versions: torch 2.11.0 → 2.12.0" in text
    assert f"Run {benches['b40s']} has no correct auto result for b2-h8-s32" in text
    assert "so PyTorch's choice is unknown" in text
    told = answer(benches, "whisper", "--bench", f"{benches['b200']},{benches['b40s']}")
    last = next(each for each in told["benched"] if "-s32-" in each["sides"][0]["config"])
    assert [call["backend"] for call in last["calls"]] == ["cudnn", None]
    assert [call["best"] for call in last["calls"]] == ["flash", "flash"]
    unlike = ask(benches, "whisper", "--bench", f"{benches['b200']},{benches['b40s']}").stdout
    assert "x " not in unlike[unlike.index("Benchmarks compared") :].splitlines()[2]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("whisper", "slower", "--bench", "b40s"), "none of these programs ran on this device"),
        (("whisper", "--bench", "both", "--bench", "configs"), "name one run per GPU model"),
        (("whisper", "--bench", "both", "--bench", "whisper"), "has no cells"),
        (("whisper", "--bench", "b200", "--bench", "latest~99"), "latest~99"),
        (("llama", "--bench", "both"), "--savings --list-configs` prints"),
        (("eager", "--bench", "both"), "no config describes these calls"),
        (("whisper", "--bench", "both", "--gpu", "H100,H200"), "apply to one run"),
        (("whisper", "--bench", "both", "--step", "0"), "apply to one run"),
        (("whisper", "--bench", "both", "--backend", "flash"), "apply to one run"),
        (("whisper", "slower", "--savings"), "--savings without --bench"),
        (("whisper", "--bench", "b200", "--gpu", "H100"), "use --bench RUN,RUN without --gpu"),
    ],
)
def test_layers_refuses_benches_of_other_layers_or_gpus(
    benches: dict[str, str], words: tuple[str, ...], message: str
) -> None:
    error = ask(benches, *words).exception
    assert isinstance(error, ProfharnessError)
    assert message in str(error)


ROOT = Path(__file__).resolve().parents[2]
ON_H200 = {"device_type": "cuda", "gpu": "NVIDIA H200", "torch": "2.11.0"}


class Decoder(torch.nn.Module):
    """One query against ever more keys."""

    def forward(self, q: Any, k: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, k)


class Half(torch.nn.Module):
    """Two layers of which the first runs on another backend than the second."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Decoder() for _ in range(2))

    def forward(self, q: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            self.layers[0](q, q)
        return self.layers[1](q, q)


def traced(folder: Path, name: str, work: Any) -> Path:
    """A store with the trace of the work alone."""
    store = folder / f"{name}.db"
    ingest_path(store, record(folder / f"{name}.json", work))
    return store


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores: math (a training), decode (lengths 16 to 48), half and twice (two backends)."""
    place = tmp_path_factory.mktemp("regret")
    x, model = torch.randn(3, 16, 32), Model()
    half, decoder, q = Half().eval(), Decoder(), torch.randn(1, 2, 32, 8)

    def train() -> None:
        with sdpa_kernel(SDPBackend.MATH):
            model(x).sum().backward()

    def decode() -> None:
        for length in (16, 20, 24, 32, 48):
            decoder(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, length, 8))

    def twice() -> None:
        decoder(q, q)
        with sdpa_kernel(SDPBackend.MATH):
            decoder(q, q)

    traced(place, "math", train)
    with torch.no_grad():
        traced(place, "decode", decode)
        traced(place, "half", lambda: half(q))
        traced(place, "twice", twice)
    return place


def the_map(store: Path, **changes: Any) -> LayerMap:
    with open_store(store) as opened:
        return replace(
            find_layers(opened, opened.find_run(Selection(), "attention calls")), **changes
        )


def times_of(layers: LayerMap) -> dict[tuple[str, str], Any]:
    """Whole calls of 100 µs on math and 40 on flash, forwards of 30 and 20."""
    whole, forward = regret_configs(layers)
    return {
        (whole.label, "auto"): 41 * US,
        (whole.label, "math"): 100 * US,
        (whole.label, "flash"): 40 * US,
        (forward.label, "math"): 30 * US,
        (forward.label, "flash"): 20 * US,
    }


def judged(store: Path, layers: LayerMap, name: str, times: Any, *machine: Any) -> LayerMap:
    """Return the map with the savings by a bench of these times."""
    run = bench_run(store, name, times, *machine)
    with open_store(store) as opened:
        return regret_map(layers, evaluate_bench(opened, run))


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(cli, [str(item) for item in arguments])


def test_regret_of_a_stored_bench(folder: Path) -> None:
    store = folder / "math.db"
    layers = the_map(store)
    run = bench_run(store, "aaaa", times_of(layers))
    answer = invoke(
        *("layers", layers.run, "--bench", run, "--format", "json"),
        *("--store", store),
    )
    assert answer.exit_code == 0, answer.output
    told = json.loads(answer.stdout)
    (row,) = told["rows"]
    assert (row["ran"], row["best"], row["calls"]) == ("math", "flash", 2)
    assert (row["ran_ns"], row["best_ns"]) == (100 * US, 40 * US)
    saved = [row[f"saves_{name}ns"] for name in ("", "forward_", "backward_")]
    assert saved == [120 * US, 20 * US, 100 * US]
    regret = told["regret"]
    assert (regret["run"], regret["measurement"], regret["saves_ns"]) == (run, "wall", 120 * US)
    assert not regret["launch_bound"]  # a CPU's step waits for nothing else
    text = invoke("layers", layers.run, "--bench", run, "--store", store).stdout
    assert "120 µs (20.0 µs forward, 100 µs backward) per step" in " ".join(text.split())
    assert "which then chooses flash: 2.50 times as fast, saves 120 µs" in " ".join(text.split())
    assert "The profiler lengthens the traced step" in " ".join(text.split())


def test_regret_advises_no_equal_wrong_or_undecided_backend(folder: Path) -> None:
    store = folder / "math.db"
    layers = the_map(store)
    times = times_of(layers)
    whole = next(iter(times))[0]
    for name, ns, text in (
        (
            "bbbb",
            99 * US,
            "No backend with correct output is significantly faster",
        ),  # within the threshold
        (
            "cccc",
            [40 * US] * 3,
            "no significant difference between math and flash",
        ),  # too few samples
    ):
        told = judged(store, layers, name, times | {(whole, "flash"): ns})
        (row,) = told.rows
        assert (row.best, row.saves_ns) == ("math", 0)
        assert told.regret is not None and text in "; ".join(told.regret.conclusions)
    with open_store(store) as opened:
        found = evaluate_bench(opened, told.regret.run)
    cheat = tuple(
        replace(row, verified=False, median_ns=1.0) if row.backend == "flash" else row
        for row in found.rows
    )
    told = regret_map(layers, replace(found, rows=cheat))
    assert told.rows[0].best == "math" and told.regret
    assert any("because of wrong output" in text for text in told.regret.conclusions)


def test_regret_is_an_upper_bound_for_launch_bound_steps(folder: Path) -> None:
    """The trace is the CPU's; only where the rest of a GPU's would stand is filled in."""
    store = folder / "math.db"
    layers = the_map(store, gpu="NVIDIA H200")
    for name, busy, bound in (("dddd", 80, True), ("d2d2", 950, False)):
        step = StepRow(1, 0, "s", 0, 1000 * US, busy * US)
        found = judged(store, replace(layers, steps=(step,)), name, times_of(layers), ON_H200)
        told = found.regret
        assert ("saves at most 120 µs" in found.rows[0].advice[0]) == bound
        assert told is not None and told.launch_bound == bound
        first = told.conclusions[0]
        assert (
            "busy for only 8 % of the traced step" in first and "at most 120 µs" in first
        ) == bound
        assert any(
            "times include the launch cost" in text for text in told.conclusions
        )  # event is no kernel time


def test_advice_of_the_rules_has_its_measured_gain(folder: Path) -> None:
    """Float32 on a GPU of torch 2.11: flash wants another dtype."""
    store = folder / "math.db"
    place = named_platforms("2.11", "H200")[0]
    layers = the_map(store, gpu="NVIDIA H200", platform=place)
    config = parse_config(str(layers.rows[0].config))
    advice = tuple(
        f"{name}: {change.change}" for name, change in suggestions(config, place) if change
    )
    layers = replace(layers, rows=(replace(layers.rows[0], advice=advice),))
    changed = [each for each in regret_configs(layers) if each.dtype == "bf16" and each.bwd]
    times = times_of(the_map(store)) | {
        (each.label, backend): 10 * US for each in changed for backend in ("flash", "cudnn")
    }
    told = judged(store, layers, "eeee", times, ON_H200).rows[0]
    gain = "10.0 times as fast, saves at most 180 µs per step"
    assert any("bf16" in text and gain in text for text in told.advice), told.advice


def test_decoding_is_timed_at_three_lengths(folder: Path) -> None:
    layers = the_map(folder / "decode.db")
    (row,) = layers.rows
    assert row.phase == "decode" and row.lengths == (16, 48) and row.calls == 5 / len(layers.steps)
    weights = {
        parse_config(label).seq_len_kv: part * len(layers.steps) for label, part in row.points
    }
    assert weights == pytest.approx({16: 1.5, 24: 2.0 - 0.5 + 2 / 3, 48: 1 + 1 / 3})
    assert sum(weights.values()) == pytest.approx(5)
    lengths = [config.seq_len_kv for config in regret_configs(layers)]
    assert lengths == [16, 24, 48]


def test_recomputed_calls_save_forward_time_only(tmp_path: Path) -> None:
    store = tmp_path / "s.db"
    ingest_path(store, ROOT / "traces" / "models" / "llama_checkpoint.json.gz")
    layers = the_map(store)
    whole, forward = (config.label for config in regret_configs(layers))
    times = {
        (whole, "cudnn"): 100 * US,
        (whole, "flash"): 40 * US,
        (forward, "cudnn"): 30 * US,
        (forward, "flash"): 20 * US,
    }
    told = judged(store, layers, "3333", times, ON_H200)
    saves = {row.direction: (row.saves_ns, row.saves_backward_ns) for row in told.rows}
    assert saves == {"forward": (180 * US, 150 * US), "recompute": (30 * US, None)}


def test_regret_needs_times_of_the_backend_that_ran(folder: Path) -> None:
    store = folder / "math.db"
    layers = the_map(store)
    times = times_of(layers)
    (whole, forward) = regret_configs(layers)
    del times[forward.label, "math"]
    run = bench_run(store, "ffff", times)
    with open_store(store) as opened:
        told = regret_map(layers, evaluate_bench(opened, run))
    assert told.rows[0].saves_ns == 120 * US and told.rows[0].saves_forward_ns is None
    assert told.regret is not None and told.regret.saves_forward_ns is None
    other = bench_run(store, "1111", {("1,1,8,8,fp32", "math"): US})
    elsewhere = bench_run(store, "2222", times_of(layers), ON_H200)
    for arguments, error in (
        (["--bench", other], "contains no times of the backends that ran"),
        (["--bench", elsewhere], "was timed on NVIDIA H200"),
        (["--bench", run, "--max-time", "1s"], "--max-time limits measurements"),
        (["--backend", "flash"], "requires --savings"),
        (["--list-configs", "--bench", run], "use only one of these options"),
    ):
        failed = invoke("layers", layers.run, *arguments, "--store", store).exception
        assert isinstance(failed, ProfharnessError) and error in str(failed)
    printed = invoke("layers", layers.run, "--savings", "--list-configs", "--store", store).stdout
    assert printed == f"{whole}\n{forward}\n"


def test_gates(folder: Path) -> None:
    half = the_map(folder / "half.db")
    for fail_on, expect, told in (
        ("math-fallback", (), ["math-fallback in ", ":\n  Half_0.Decoder_0"]),
        ("eager-attention,unseen,backend-changed", (), []),
        ("", ("math@*.Decoder_0", "flash,math@*"), []),
        ("", ("flash",), ["--expect flash in ", ":\n  Half_0.Decoder_0", "math ran"]),
        ("", ("flash@model.layers.*",), ["matches no call", "Half_0.Decoder_0"]),
        ("", ("flash@Decoder_1",), []),
    ):
        gates = parse_gates([fail_on], expect)
        if not told:
            check_gates(half, gates)
            continue
        with pytest.raises(GateError) as failed:
            check_gates(half, gates)
        assert all(text in str(failed.value) for text in told)
    with pytest.raises(
        GateError, match=r"(?s)backend-changed in .*:\n  .*flash and math ran for equal calls"
    ):
        check_gates(the_map(folder / "twice.db"), parse_gates(["backend-changed"], []))
    both = tuple(replace(row, ran="flash and math") for row in half.rows)
    with pytest.raises(GateError, match=r"math-fallback in .*:\n  Half_0"):
        check_gates(replace(half, rows=both), parse_gates(["math-fallback"], []))


def test_a_gate_fails_if_no_backend_is_known(folder: Path) -> None:
    half = the_map(folder / "half.db")
    unseen = replace(half, rows=tuple(replace(row, ran=None) for row in half.rows))
    for gate in ("math-fallback", "backend-changed"):
        with pytest.raises(
            GateError,
            match=rf"{gate} in .*:\n  the result is unknown, because no call shows which backend ran",
        ):
            check_gates(unseen, parse_gates([gate], []))
    check_gates(unseen, parse_gates(["eager-attention"], []))  # a call of SDPA is none


def test_gates_on_masks_and_requests_need_an_observed_program(folder: Path) -> None:
    half = the_map(folder / "half.db")
    for name in ("noop-mask", "requested-not-run"):
        with pytest.raises(UsageError, match=f"cannot check --fail-on {name} in run"):
            require_recorded(half, parse_gates([name], []))
        with pytest.raises(GateError, match=rf"{name} in .*:\n  the result is unknown"):
            check_gates(half, parse_gates([name], []))
    rows = tuple(replace(row, mask="nothing", asked="flash") for row in half.rows)
    gates = parse_gates(["noop-mask,requested-not-run"], [])
    with pytest.raises(GateError) as failed:
        check_gates(replace(half, rows=rows), gates)
    assert len(re.findall("the mask hides nothing", str(failed.value))) == 2
    assert "the program allowed flash, but math ran" in str(failed.value)
    rows = tuple(replace(row, mask="none", asked=row.ran) for row in half.rows)
    check_gates(replace(half, rows=rows), gates)
    check_gates(replace(half, rows=rows), parse_gates(["math-fallback"], []))  # it was asked for


def test_gates_of_the_command(folder: Path) -> None:
    store = ("--store", folder / "half.db")
    passed = invoke("layers", "--fail-on", "unseen", "--expect", "math,flash", *store)
    assert passed.exit_code == 0
    failed = invoke("layers", "--fail-on", "math-fallback", *store)
    assert isinstance(failed.exception, GateError) and "Decoder_0" in failed.stdout
    for arguments in (["--fail-on", "maths"], ["--expect", "fash@*"], ["--expect", "flash@"]):
        assert isinstance(invoke("layers", *arguments, *store).exception, UsageError)
    refused = invoke("layers", "--fail-on", "noop-mask", *store)
    assert isinstance(refused.exception, UsageError) and not refused.stdout


def test_regret_refuses_to_time_on_another_gpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "gpu_name", lambda: "NVIDIA L4")
    layers = the_map(folder / "math.db", gpu="NVIDIA H200")
    with pytest.raises(ProfharnessError, match="on NVIDIA H200, but this machine has NVIDIA L4"):
        recording.time_layers(layers, BenchOptions(), folder / "math.db")


def test_check_regret_compares_predictions_with_savings(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [
            *(sys.executable, str(ROOT / "scripts" / "check_regret.py"), "--device", "cpu"),
            *("--tiny", "--phases", "train", "--json", str(figures)),
        ],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    (told,) = json.loads(figures.read_text())
    assert told["attention_ns"] > 0 and told["predicted_ns"] >= 0
    assert "train (own), math forced" in done.stdout
    assert (told["real_ns"] is None) == (told["advised"] is None)


def on_amd(model: str, path: Path) -> Path:
    """The trace of a model as PyTorch on an MI300X would have made it: flash by AOTriton, and neither
    registers nor shared memory.
    """
    text = gzip.decompress((TRACES / "models" / f"{model}.json.gz").read_bytes()).decode()
    trace = json.loads(text.replace("product_cudnn_attention", "product_flash_attention"))
    for device in trace["deviceProperties"]:
        device |= {"name": "AMD Instinct MI300X", "numSms": 304}
    for event in trace["traceEvents"]:
        if event.get("cat") == "kernel":
            if event["name"].startswith("cudnn"):
                event["name"] = "attn_fwd"
            for unknown in ("registers per thread", "shared memory", "blocks per SM"):
                event["args"].pop(unknown, None)
            event["args"]["kind"] = "Dispatch Kernel"
    path.write_text(json.dumps(trace))
    return path


def test_vendors_are_compared_by_library_and_roofline(tmp_path: Path) -> None:
    store = {"store": str(tmp_path / "s.db")}
    nvidia = on(H100, "llama_prefill", 1, tmp_path / "h100.json")
    amd = on_amd("llama_prefill", tmp_path / "mi300x.json")
    told = answer(store, str(nvidia), str(amd))
    assert [each["device"] for each in told["classes"]] == [H100, "AMD Instinct MI300X"]
    (row,) = told["layers"]
    left, right = row["sides"]
    assert (left["ran"], left["library"]) == ("cudnn", None)
    assert (right["ran"], right["library"]) == ("flash", "AOTriton")
    assert right["kernels"][0] == "attn_fwd"
    # In the same time, the GPU with the higher peak is farther from its limit.
    assert 0 < right["roofline_share"] < left["roofline_share"] < 1
    text = ask(store, "h100.json", "mi300x.json").stdout
    assert text.count("flash (AOTriton)") == 2
    diff = CliRunner().invoke(
        cli, ["diff", "h100.json", "mi300x.json", "--store", store["store"]], env=WIDE
    )
    assert (
        "% of roofline" in diff.stdout and "pass both runs to `profharness layers`" in diff.stdout
    )
    # Bug: `diff` named the backend without its library, and gave no ratio of two GPUs.
    assert "flash (AOTriton)" in diff.stdout
    assert "No verdict" not in diff.stdout


def test_a_run_without_attention_does_not_end_a_comparison(tmp_path: Path) -> None:
    """Bug: one such trace made `layers A B C` fail, and the error named no other command."""
    store = {"store": str(tmp_path / "s.db")}
    model = TRACES / "models" / "whisper.json.gz"
    other = on(H100, "whisper", 1.25, tmp_path / "slower.json")
    trace = json.loads(gzip.decompress(model.read_bytes()))
    kernels = {"kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver"}
    trace["traceEvents"] = [each for each in trace["traceEvents"] if each.get("cat") in kernels]
    for event in trace["traceEvents"]:
        if event["cat"] == "kernel":
            event["name"] = "void gemmSN_TN_kernel(int)"
    bare = tmp_path / "bare.json"
    bare.write_text(json.dumps(trace))
    alone = ask(store, str(bare))
    assert alone.exit_code != 0
    assert "profharness kernels bare.json" in alone.output + str(alone.exception)
    text = ask(store, str(bare), str(model), str(other)).stdout
    assert "Runs compared" in text
    assert "bare.json contains no attention call of a program and cannot be compared" in text
    one = ask(store, str(bare), str(model))
    assert one.exit_code == 0 and one.stdout.startswith("Attention takes 17 % of the GPU time")
    assert "bare.json contains no attention call" in one.stdout
    gate = ask(store, str(bare), str(model), "--fail-on", "math-fallback")
    assert isinstance(gate.exception, GateError) and "cannot check the gates" in str(gate.exception)
    assert answer(store, str(bare), str(model))["classes"]
    # The overview of many programs also says that a run was left out.
    others = [TRACES / "models" / f"{name}.json.gz" for name in ("vit", "unet", "llama_eager")]
    text = ask(store, str(bare), str(model), str(other), *map(str, others)).stdout
    assert text.startswith("5 programs: ") and "bare.json contains no attention call" in text


def test_a_layer_that_differs_in_the_other_direction_is_named(tmp_path: Path) -> None:
    """One layer is slower on the second GPU, although attention as a whole is faster."""
    store = {"store": str(tmp_path / "s.db")}
    first = TRACES / "models" / "whisper.json.gz"
    trace = json.loads(gzip.decompress(first.read_bytes()))
    for device in trace["deviceProperties"]:
        device["name"] = H100
    kernels = [event for event in trace["traceEvents"] if event.get("cat") == "kernel"]
    grids = {str(each["args"]["grid"]) for each in kernels if each["name"].startswith("cudnn")}
    assert len(grids) > 1
    for event in kernels:
        event["dur"] *= 3 if str(event["args"]["grid"]) == min(grids) else 0.2
    second = tmp_path / "h100.json"
    second.write_text(json.dumps(trace))
    text = " ".join(ask(store, str(first), str(second)).stdout.split())
    assert re.search(r"; it is [\d.]+ times as fast in Whisper", text)


def test_many_programs_have_one_row_each(tmp_path: Path) -> None:
    """Bug: `layers traces/models` printed a thousand lines."""
    store = {"store": str(tmp_path / "s.db")}
    models = [str(path) for path in sorted((TRACES / "models").glob("llama_*.json.gz"))]
    # Bug: flex_attention without torch.compile was called eager attention, and its row had `flex`.
    flex = [str(TRACES / "models" / name) for name in ("flex", "flex_compile")]
    with_flex = ask(store, *models, *flex).stdout
    assert (
        "eager or math attention runs in llama_eager.json.gz; flex_attention without torch.compile "
        "runs in flex."
    ) in " ".join(with_flex.split())
    ran = {line.split()[0]: line for line in with_flex.splitlines() if line.startswith("flex")}
    assert ran["flex"].endswith(" flex (eager)")
    assert ran["flex_compile"].endswith(" flex")
    done = ask(store, *models)
    assert done.stdout.startswith(
        f"{len(models)} programs: attention takes 6 % to 58 % of the GPU time"
    )
    assert "eager or math attention runs in llama_eager.json.gz" in " ".join(done.stdout.split())
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("llama_")]
    rows = rows[: len(models)]  # caveats follow
    assert [row[0] for row in rows] == [Path(model).name for model in models]
    assert {row[0]: row[-1] for row in rows}["llama_eager.json.gz"] == "eager"
    assert "Attention of run" in ask(store, *models, "--full").stdout
    told = json.loads(ask(store, *models, "--format", "json").stdout)
    assert len(told["classes"]) == len(models) and told["rows"]
