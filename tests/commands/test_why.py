"""Why the backends of a program ran: the reasons in `layers`, and `explain` of a trace."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import profharness
from profharness.atlas.predictions import assumed_release
from profharness.attention.config import parse_config
from profharness.attention.dispatch.by_rule import (
    CONDITIONS,
    conditions,
    explain_by_rule,
    named_platforms,
    why_ran,
)
from profharness.attention.dispatch.predict import TABLES
from profharness.cli import cli
from profharness.commands.explain.calls import Call, ProgramCalls, find_calls, mean_ns
from profharness.commands.explain.faster import (
    explained_calls,
    faster_changes,
    faster_ways,
    summarize_changes,
)
from profharness.commands.explain.tables import explain_document, program_document
from profharness.commands.layers.tables import SEE_ADVICE, faster_change, layers_document
from profharness.errors import NotFoundError, ProfharnessError, UsageError
from profharness.program.layer_map import CHANGE_CODE, EAGER, LayerMap, find_layers
from profharness.render.document import Note
from profharness.render.terminal import render_table
from profharness.store import ingest_path, open_store
from profharness.units import time_text

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "traces" / "models"
OF_BERT = (
    "efficient ran because PyTorch refuses flash (attn_mask and fp32 are not supported) and cudnn "
    "(fp32 is not supported)"
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("why") / "s.db"


def the_map(store: Path, name: str, **options: Any) -> LayerMap:
    (ingested,) = ingest_path(store, MODELS / name)
    with open_store(store) as opened:
        return find_layers(opened, ingested.run, **{"assume": assumed_release} | options)


def run_cli(store: Path, *words: str) -> str:
    done = CliRunner().invoke(cli, [*words, "--store", str(store)])
    assert done.exit_code == 0, done.output
    return " ".join(done.stdout.split())


def refused(store: Path, path: Path) -> str:
    done = CliRunner().invoke(cli, ["explain", str(path), "--store", str(store)])
    assert isinstance(done.exception, ProfharnessError)
    return str(done.exception)


def explained(store: Path, name: str, *words: str) -> dict[str, Any]:
    done = CliRunner().invoke(
        cli, ["explain", str(MODELS / name), *words, "--format", "json", "--store", str(store)]
    )
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_layers_says_why_efficient_ran(store: Path) -> None:
    layers = the_map(store, "bert_fp32.json.gz")
    (row,) = layers.rows
    assert row.why == OF_BERT and row.reasons == (OF_BERT,)
    text = run_cli(store, "layers", str(MODELS / "bert_fp32.json.gz"))
    assert text.count(OF_BERT) == 1
    assert "does not record its PyTorch release, so 2.11.0 is assumed" in text
    assert f"{SEE_ADVICE}: profharness explain bert_fp32.json.gz --store {store}" in text


def test_a_run_is_assumed_to_use_the_release_of_its_prediction(store: Path) -> None:
    """Bug: the heading named the release of the prediction, and the note another one for the run."""
    text = run_cli(store, "layers", str(MODELS / "bert_fp32.json.gz"), "--gpu", "H200")
    assert ", torch 2.11.0, cuDNN" in text
    assert "does not record its PyTorch release, so 2.11.0 is assumed" in text


@pytest.mark.parametrize("gpu", ["H200", "H100"])
def test_a_release_that_the_user_gives_is_not_assumed(store: Path, gpu: str) -> None:
    """Bug: the note asked for --torch although it was given."""
    words = ("layers", str(MODELS / "bert_fp32.json.gz"), "--gpu", gpu, "--torch", "2.9")
    text = run_cli(store, *words)
    assert ", torch 2.9.1, cuDNN" in text
    assert "efficient ran because" in text
    assert "does not record its PyTorch release" not in text


def test_analyze_names_the_assumed_release_below_the_tables(store: Path) -> None:
    """Bug: stderr named the release before the answer, where `layers` names it in its last note."""
    path = str(MODELS / "bert_fp32.json.gz")
    done = CliRunner().invoke(cli, ["analyze", path, "--store", str(store)])
    assumed = "The run does not record its PyTorch release, so 2.11.0 is assumed"
    assert done.exit_code == 0 and assumed not in done.stderr
    last = " ".join(done.stdout[done.stdout.rindex("Data sheet peaks") :].split())
    assert f"{assumed}; to see the code of the change, use: profharness explain" in last
    (caveat,) = json.loads(run_cli(store, "analyze", path, "--format", "json"))["caveats"]
    assert caveat.startswith(assumed)
    frame = profharness.analyze(run=path, store=store)
    assert frame.attrs["caveats"] == [caveat]


@pytest.mark.parametrize("command", ["layers", "explain", "analyze"])
def test_the_assumed_mask_of_eager_attention_is_told(store: Path, command: str) -> None:
    """Bug: a saving was predicted without a word on the mask, which the trace does not show."""
    text = run_cli(store, command, str(MODELS / "llama_eager.json.gz"))
    assert "2.23 ms of GPU time per step" in text
    assert text.count("The predicted saving assumes attention without a mask.") == 1


OF_CUDNN = (
    "To run cudnn, compute in bf16 instead of fp32: predicted to save about 381 µs of GPU time "
    "per step, minus the time to prepare the inputs (33.6 µs instead of 161 µs per call)."
)


def the_faster_change(layers: LayerMap) -> tuple[tuple[str, ...], tuple[Note, ...]]:
    return faster_change(layers, faster_changes(layers))


def test_the_advice_of_a_row_contains_the_change_that_the_answer_advises(store: Path) -> None:
    """Bug: the answer advised bf16, but the `advice` of the row was empty."""
    path = str(MODELS / "bert_fp32.json.gz")
    found = json.loads(run_cli(store, "layers", path, "--format", "json"))
    assert OF_CUDNN in found["answer"]
    (advice,) = found["rows"][0]["advice"]
    assert advice.startswith("cudnn: compute in bf16 instead of fp32")
    frame = profharness.layers(path, store=store)
    assert list(frame["advice"][0]) == [advice]


def test_layers_has_the_change_and_the_saving_of_a_report(store: Path) -> None:
    """Bug: the saving was per call, below the table, and compared with a predicted time."""
    layers = the_map(store, "bert_fp32.json.gz")
    text = run_cli(store, "layers", str(MODELS / "bert_fp32.json.gz"))
    assert layers_document(layers).answer[1] == OF_CUDNN
    assert text.index(OF_CUDNN) < text.index("Attention of run")
    unknown = replace(layers.rows[0], lengths=(1, 2))  # no measured time describes all its calls
    (told,), _ = the_faster_change(replace(layers, rows=(unknown,)))
    assert told.endswith(
        "387 µs of GPU time per step, minus the time to prepare the inputs (33.6 µs instead of 163 µs "
        "per call)."
    )
    # The times of a benchmark are better than predictions.
    benched = render_table(layers_document(replace(layers, benched="bench-1")))
    assert "To run cudnn" not in benched
    assert f"{SEE_ADVICE}: profharness explain" in " ".join(benched.split())


def test_predictions_for_the_same_gpu_have_the_same_advice(store: Path) -> None:
    """Bug: `--gpu` said that no backend is faster, beside the advice of `layers` alone."""
    run = the_map(store, "bert_fp32.json.gz").run
    own = " ".join(run_cli(store, "layers", run, "--gpu", "H200", "--torch", "2.11").split())
    assert "No other backend that accepts the calls is predicted to be faster." in own
    # The time before the change is the predicted one, as in the table.
    predicted = OF_CUDNN.replace("381 µs", "387 µs").replace("161 µs", "163 µs")
    assert own.count(predicted) == 1 and own.index(predicted) < own.index("Attention of run")
    for other in (("MI300X", "2.11"), ("H200", "2.9"), ("H200,MI300X", "2.11")):
        text = run_cli(store, "layers", run, "--gpu", other[0], "--torch", other[1])
        assert "To run cudnn" not in text


def test_predictions_give_one_saving(store: Path) -> None:
    """Bug: other backends saved 15.4 µs, the advice 16.2 µs, and the rows of the table 16.5 µs."""
    run = the_map(store, "whisper.json.gz").run
    given = ("layers", run, "--gpu", "H200", "--torch", "2.11")
    text = " ".join(run_cli(store, *given).split())
    assert "other backends would save 15.4 µs." in text
    assert "predicted to save about 15.4 µs of GPU time per step (10.5 µs instead of" in text
    lines = text.partition("Predicted kernel times")[2]
    assert "cudnn 0 " in lines and "flash 15.4 " in lines and "efficient - " in lines
    assert (
        "No saving is given where the predicted times of both backends do not clearly differ."
        in lines
    )
    rows = json.loads(run_cli(store, *given, "--format", "json"))["rows"]
    assert [row["predicted_certain"] for row in rows] == [True, True, False]
    assert rows[2]["predicted_saves_ns"] > 0


def test_layers_names_the_config_that_a_change_is_for(store: Path) -> None:
    layers = the_map(store, "bert_fp32.json.gz")
    (row,) = layers.rows
    other = replace(row, config="b8-h12-s384-d64-bf16", ran="cudnn", why=None)
    (told,), (code,) = the_faster_change(replace(layers, rows=(row, other)))
    assert told.startswith(f"To run cudnn on {row.config}, compute in bf16")
    assert code.text == f"{SEE_ADVICE}: {layers.command('explain')}"


def test_a_program_on_a_cpu_has_no_faster_backend(store: Path) -> None:
    """Bug: the prediction failed, because a CPU has no atlas."""
    layers = the_map(store, "bert_fp32.json.gz")
    assert layers.platform is not None
    cpu = replace(layers.platform, device="cpu", gpu=None)
    assert not list(faster_ways(explained_calls(replace(layers, platform=cpu))))


def test_the_reason_equals_that_of_explain(store: Path) -> None:
    (row,) = the_map(store, "bert_fp32.json.gz").rows
    text = run_cli(store, "explain", str(row.config), "--gpu", "H200", "--torch", "2.11")
    for backend, reason in (
        ("cudnn", "fp32 is not supported"),
        ("flash", "attn_mask and fp32 are not supported"),
    ):
        assert f"{backend} ({reason})" in str(row.why)
        assert f"{backend} ({reason})" in text


def test_the_first_choice_needs_no_reason(store: Path) -> None:
    layers = the_map(store, "unet.json.gz")
    assert {row.ran for row in layers.rows} == {"cudnn"}
    assert not any(row.why or row.reasons for row in layers.rows)
    assert not layers.caveats  # nothing rests on the assumed release
    # Bug: the hint named only the reasons, but `explain` also advises changes with their code.
    path = str(MODELS / "unet.json.gz")
    assert f"{SEE_ADVICE}: profharness explain" in run_cli(store, "layers", path)
    # Bug: that command gave no reason unless --full was added.
    assert run_cli(store, "explain", path).count("cudnn is PyTorch's first choice.") == 1


def test_a_hint_names_a_renamed_file_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the hint named a file that is stored under another name by a name that selects no run."""
    monkeypatch.chdir(tmp_path)
    first, other = Path("first.json.gz"), Path("sub/other.json.gz")
    shutil.copy(MODELS / "unet.json.gz", first)
    run_cli(Path("s.db"), "layers", str(first))
    other.parent.mkdir()
    first.rename(other)
    text = " ".join(run_cli(Path("s.db"), "layers", str(other)).split())
    assert f"{SEE_ADVICE}: profharness explain {other}" in text


def test_another_prediction_is_told_and_explains_nothing(store: Path) -> None:
    (row,) = the_map(store, "llama_prefill.json.gz", torch="2.8").rows
    assert row.why == "the dispatch rules of PyTorch 2.8.0 predict flash, but cudnn ran"
    answer = explained(store, "llama_prefill.json.gz", "--torch", "2.8")["rows"][0]
    assert (answer["predicted"], answer["observed"], answer["agree"]) == ("flash", "cudnn", False)
    text = run_cli(store, "explain", str(MODELS / "llama_prefill.json.gz"), "--torch", "2.8")
    assert text.startswith(
        "llama_prefill.json.gz ran cudnn, but the rules of PyTorch 2.8 predict flash for an H200."
    )
    assert "mismatch The rules predict flash and a stored run shows cudnn" in text


def test_the_measured_time_is_beside_the_prediction(store: Path) -> None:
    found = explained(store, "bert_fp32.json.gz")
    (answer,) = found["rows"]
    (row,) = the_map(store, "bert_fp32.json.gz").rows
    assert row.forward_ns is not None and row.calls
    assert answer["observed_ns"] == pytest.approx(row.forward_ns / row.calls)
    told = (
        f"efficient took {time_text(answer['observed_ns'])} per call "
        f"(predicted: {time_text(answer['prediction']['kernel_ns'])}); no other backend"
    )
    assert told in run_cli(store, "explain", str(MODELS / "bert_fp32.json.gz"))
    assert "mean µs/call" in run_cli(store, "explain", str(MODELS / "whisper.json.gz"))
    # a forward pass that checkpointing repeats is no call of its own
    for name in ("llama_train.json.gz", "llama_checkpoint.json.gz"):
        ingest_path(store, MODELS / name)
        (answer,) = explained(store, name)["rows"]
        assert 144_000 < answer["observed_ns"] < 149_000, name
    ingest_path(store, MODELS / "llama_generate")
    rows = explained(store, "llama_generate")["rows"]
    # Bug: calls with 257 to 263 keys had no time here, but 5.30 µs in `analyze`.
    assert [round(each["observed_ns"], -1) for each in rows] == [5300, 7030]
    decode = next(row for row in the_map(store, "llama_generate").rows if row.phase == "decode")
    assert mean_ns([decode]) == pytest.approx(decode.forward_ns / decode.calls)
    assert mean_ns([replace(decode, lengths=(257, 300))]) is None


def test_calls_that_the_config_does_not_fully_describe_contradict_nothing() -> None:
    (platform,) = named_platforms("2.11", "H200")
    call = Call(parse_config("2,8,512,64,bf16"), "efficient", "auto", ("a",), 1000.0)
    assert call.explain(platform, (), advice=False).agree is False
    doubtful = replace(call, doubt="the strides are unknown").explain(platform, (), advice=False)
    assert (doubtful.agree, doubtful.predicted, doubtful.observed) == (None, "unknown", "efficient")
    assert why_ran(doubtful, doubtful.observed) is None
    reason = "The config does not fully describe the calls: the strides are unknown."
    assert reason in doubtful.caveats
    agreeing = replace(call, ran="cudnn", doubt="the strides are unknown")
    assert agreeing.explain(platform, (), advice=False).agree is True


def test_without_a_release_nothing_is_assumed_by_default(store: Path) -> None:
    assert [row.why for row in the_map(store, "bert_fp32.json.gz", assume=None).rows] == [None]


def test_a_set_of_backends_limits_the_reasons() -> None:
    (platform,) = named_platforms("2.11", "H200")
    config = parse_config("2,8,512,64,fp32,mask=bool")
    answer = explain_by_rule(config, platform, asked="flash+math")
    assert why_ran(answer, "math") == (
        "math ran because PyTorch refuses flash (attn_mask and fp32 are not supported)"
    )
    assert why_ran(answer, "eager") is None


@pytest.mark.parametrize(
    ("name", "count", "ran"),
    [
        ("bert_fp32", 1, "efficient"),
        ("llama_prefill", 1, "cudnn"),
        ("vit", 1, "cudnn"),
        ("unet", 6, "cudnn"),
        ("llama_train", 1, "cudnn"),  # the recomputed calls of a layer have the same config
        ("llama_checkpoint", 1, "cudnn"),
    ],
)
def test_explain_accepts_a_trace(store: Path, name: str, count: int, ran: str) -> None:
    found = explained(store, f"{name}.json.gz")
    assert len(found["rows"]) == count and found["run"].startswith("trace-")
    for answer in found["rows"]:
        assert (answer["predicted"], answer["observed"], answer["agree"]) == (ran, ran, True)
        assert answer["environment"]["torch"] == "2.11.0" and answer["modules"]
    text = run_cli(store, "explain", str(MODELS / f"{name}.json.gz"))
    every = f" on all {count} configs" if count > 1 else ""
    assert text.startswith(
        f"{name}.json.gz ran {ran}{every}, as the rules of PyTorch 2.11 predict for an H200."
    )


def test_explain_uses_the_recorded_release_and_the_latest_run(store: Path) -> None:
    ingest_path(store, MODELS / "llama_generate")
    by_path = explained(store, "llama_generate")
    assert {each["environment"]["gpu"] for each in by_path["rows"]} == {"NVIDIA H200"}
    text = run_cli(store, "explain", "20261122-171834")
    assert "ran cudnn on both configs" in text and "does not record" not in text


def test_explain_of_another_gpu_does_not_compare(store: Path) -> None:
    found = explained(store, "bert_fp32.json.gz", "--gpu", "A100", "--torch", "2.11")
    (answer,) = found["rows"]
    assert answer["observed"] is None and answer["environment"]["gpu"] == "A100"
    several = run_cli(store, "explain", str(MODELS / "unet.json.gz"), "--torch", "2.10..2.11")
    assert "The chosen backend differs between releases for 6 of 6 configs" in several


def test_explain_of_a_run_of_configs_explains_the_configs(store: Path) -> None:
    path = str(ROOT / "traces" / "h200-torch2.11")
    words = ("explain", path, "--store", str(store), "--format", "json")
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert len(rows) == 4 and all(row["agree"] for row in rows)
    assert {row["environment"]["torch"] for row in rows} == {"2.11.0"}
    assert {row["environment"]["gpu"] for row in rows} == {"NVIDIA H200"}
    assert "on an A100" in run_cli(store, "explain", path, "--gpu", "A100", "--torch", "2.11")


def test_a_config_outside_the_atlas_says_why_it_has_no_time(store: Path) -> None:
    """Bug: `explain` had no predicted times and no reason, but `predict` had the reason."""
    text = run_cli(store, "explain", str(MODELS / "encoder.json.gz"))
    assert "predicted µs/call" not in text
    assert "No time is predicted for this config: the atlas has no configs with dropout. " in text


def test_the_predicted_saving_follows_the_advice(store: Path) -> None:
    (answer,) = explained(store, "bert_fp32.json.gz")["rows"]
    (advice, *_) = next(each["advice"] for each in answer["backends"] if each["backend"] == "cudnn")
    times = advice["predicted"]
    assert times["before_ns"] == answer["prediction"]["kernel_ns"]
    assert times["speed_up"] == pytest.approx(times["before_ns"] / times["after_ns"])
    assert times["certain"] is True and times["source"] == "model"
    # Bug: the time before was the predicted one here, but the measured one in `layers`.
    before = answer["observed_ns"]
    told = (
        f"Predicted: cudnn takes {time_text(times['after_ns'])} plus the time to prepare the inputs, "
        f"instead of {time_text(before)} per call."
    )
    text = run_cli(store, "explain", str(MODELS / "bert_fp32.json.gz"))
    each = f"{time_text(times['after_ns'])} instead of {time_text(before)} per call"
    assert each in run_cli(store, "layers", str(MODELS / "bert_fp32.json.gz"))
    # Bug: the changes for a backend had numbers, which differed with --full.
    assert text.count(" to run cudnn ") == 3 and "(1)" not in text
    assert text.count(told) == 1  # in the answer, which the advice does not repeat
    # Bug: the ratio did not include the time to cast the inputs.
    assert "times as fast" not in text
    assert text.count("only 8 of its 24 significant bits") == 1
    # The described advice comes first, then advice with a known gain, by its gain, then the rest.
    first, second = text.index("cudnn takes 14.2 µs plus"), text.index("cudnn takes 16.0 µs plus")
    # Bug: the condition of a change followed its time, so several notes began alike.
    places = [
        text.index(
            "If no sequence is padded and the mask is lower triangular: pass is_causal=True instead of "
        ),
        first,
        text.index("If no sequence is padded: leave out attn_mask (pass is_causal=True if it is "),
        second,
        text.index("If the mask hides only padding: pack the sequences without it and call "),
    ]
    assert places == sorted(places)
    full = run_cli(store, "explain", str(MODELS / "bert_fp32.json.gz"), "--full")
    order = ["33.6 µs plus", "14.2 µs plus", "16.0 µs plus", "19.9 µs plus"]
    places = [*map(full.rindex, order), full.index("varlen_attn"), full.index("BlockMask")]
    assert places == sorted(places)


def test_a_predicted_gain_precedes_a_change_without_a_prediction(store: Path) -> None:
    """Bug: `explain` led with packing, whose time is unknown, and `layers` left the mask out."""
    path = str(MODELS / "llama_compile.json.gz")
    condition = "If no sequence is padded, leave out attn_mask (pass is_causal=True if it is lower triangular)"
    saving = "42.1 µs instead of 77.3 µs per call"
    text = run_cli(store, "explain", path)
    assert f"{condition} (code below). Predicted: cudnn takes {saving} (1.84 times" in text
    code = text.index("scaled_dot_product_attention(q, k, v)")
    assert code < text.index("(2.37 times as fast)") < text.index("pack the sequences")
    assert "from torch.nn.attention.varlen import" not in text
    told = run_cli(store, "layers", path)
    saves = f"predicted to save about 106 µs of GPU time per step ({saving})"
    # Bug: `layers` did not mention padding, although it is the usual reason for such a mask.
    assert f"{condition}: {saves}. Otherwise, pack the sequences, so that no padding" in told


def test_a_change_without_a_predicted_time_gives_those_of_other_changes(store: Path) -> None:
    """Bug: only --full showed what flash would save, and nothing said that varlen_attn has no time."""
    path = str(MODELS / "bert_fp32.json.gz")
    text = run_cli(store, "explain", path)
    assert (
        "The time of this change cannot be predicted, because it depends on how much padding the mask "
        "hides. Without packing, a call of flash is predicted to take 22.9 µs if no sequence is padded "
        "and 19.9 µs if no sequence is padded and the mask is lower triangular, instead of 161 µs."
    ) in text
    assert "because the atlas has no times for flex_attention" in text
    assert "cannot be predicted" not in run_cli(store, "explain", path, "--gpu", "A100")


def test_code_is_shown_for_the_first_change_only(store: Path) -> None:
    """Bug: explain printed the code of two changes, and said that --full shows that of each."""
    path = str(MODELS / "bert_fp32.json.gz")
    text, full = (run_cli(store, "explain", path, *more) for more in ((), ("--full",)))
    assert text.count("with torch.autocast") == 1 and "import torch.nn.f" in full
    assert "import torch.nn.f" not in text
    assert "--full also shows the code of the other changes." in text and "--full" not in full


def test_full_prints_each_message_and_the_agreement_once(store: Path) -> None:
    """Bug: --full repeated the messages of the table, and the agreement in the answer, as notes."""
    full = run_cli(store, "explain", str(MODELS / "bert_fp32.json.gz"), "--full")
    assert full.count("Flash Attention does not support non-null attn_mask") == 1
    assert "agree" not in full


def test_a_refusal_has_the_same_words_in_the_answer_and_in_the_table(store: Path) -> None:
    """Bug: cudnn had PyTorch's message on the dtype, and flash had a shorter text."""
    path = str(MODELS / "bert_fp32.json.gz")
    text, full = (run_cli(store, "explain", path, *more) for more in ((), ("--full",)))
    assert text.count("fp32 is not supported") == 3  # for cudnn, and for both in the table
    assert "flash (attn_mask and fp32 are not supported)" in text
    message = "Expected query, key and value to all be of dtype: {Half, BFloat16}"
    assert message not in text
    assert message in full
    assert "no other backend that accepts the call is faster. To run cudnn: compute in bf16" in text


def test_each_reason_of_the_rules_has_one_text_for_all_backends() -> None:
    """Bug: a text for each message, so the same condition read differently for two backends."""
    codes = {rule.code for table in TABLES.values() for rule in table}
    assert codes <= CONDITIONS.keys()
    for config, platform in (
        ("2,8,512,100,fp32,mask=bool,dropout=0.1", "H200"),
        ("1,32,1,512,bf16,kv_heads=8,seq_kv=4096,causal", "H200"),
        ("2,8,512,100,fp16,bwd", "MI300X"),
    ):
        (where,) = named_platforms("2.11", platform)
        texts: dict[str, set[str]] = {}
        for side in explain_by_rule(parse_config(config), where).backends:
            for reason, text in zip(
                side.reasons, conditions(parse_config(config), side), strict=True
            ):
                assert side.eligible is not False or text != reason.message
                texts.setdefault(reason.code, set()).add(text)
        assert all(len(each) == 1 for code, each in texts.items() if code != "head_dim")


def test_explain_in_python(store: Path) -> None:
    path = str(MODELS / "bert_fp32.json.gz")
    for made in (
        profharness.explain(path, store=store),
        profharness.explain(run=path, store=store),
    ):
        assert list(made["observed"]) == ["efficient"] and list(made["agree"]) == [True]
    with pytest.raises(NotFoundError, match="has no attention call of b2-h8-s512-d64; it has"):
        profharness.explain("2,8,512,64", run=path, store=store)
    with pytest.raises(UsageError, match="name only one run"):
        profharness.explain([path, str(MODELS / "vit.json.gz")], store=store)
    with pytest.raises(UsageError, match="--measure applies to configs"):
        run = CliRunner().invoke(
            cli, ["explain", path, "--measure", "--store", str(store)], standalone_mode=False
        )
        raise run.exception or AssertionError(run.output)


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (MODELS / "llama_graph.json.gz", "the shapes of the replayed calls are unknown"),
        (MODELS / "nothing.json.gz", "no such file or folder"),
    ],
)
def test_runs_without_a_choice_are_refused(store: Path, path: Path, told: str) -> None:
    assert told in refused(store, path)


def test_explain_answers_for_eager_attention(store: Path) -> None:
    """Bug: explain failed, although layers knew what to change, and what it saves."""
    saving = "predicted to save about 2.23 ms of GPU time per step."
    path = str(MODELS / "llama_eager.json.gz")
    assert saving in run_cli(store, "layers", path)
    text, _, code = run_cli(store, "explain", path).partition(" The following code makes ")
    assert text == (
        "In llama_eager.json.gz, eager attention uses no backend of scaled_dot_product_attention. "
        "Use scaled_dot_product_attention (in transformers: attn_implementation='sdpa'), "
        + saving
        # Bug: the answer did not say what would run after the change.
        + " With PyTorch 2.11, scaled_dot_product_attention is predicted to run cudnn."
    )
    # Bug: the change had no code, here and in the report.
    call = "out = F.scaled_dot_product_attention( q, k, v, is_causal=..., "
    assert call in code
    assert call in run_cli(store, "report", path, "--format", "md", "-o", "-")
    assert explained(store, "llama_eager.json.gz", "--gpu", "H100")["rows"] == []
    assert profharness.explain(path, store=store).empty


def test_the_code_for_eager_attention_runs_only_after_the_mask_is_known() -> None:
    """Bug: pasted into a causal model, the code computed attention without a mask."""
    torch = pytest.importorskip("torch")
    q = torch.randn(1, 2, 8, 16)
    code = CHANGE_CODE[EAGER]
    with pytest.raises(TypeError):
        exec(code, {"q": q, "k": q, "v": q})
    names = {"q": q, "k": q, "v": q}
    exec(code.replace("is_causal=...", "is_causal=True"), names)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    assert torch.equal(names["out"], sdpa(q, q, q, is_causal=True))


CROSS = "b2-h8-sq32-skv1500-d64-fp16-scale=1"


def test_a_program_has_the_faster_backend_of_its_configs(store: Path) -> None:
    """Bug: explain and layers were silent on a backend that `explain CONFIG` calls the fastest."""
    path = str(MODELS / "whisper.json.gz")
    one = run_cli(store, "explain", CROSS, "--gpu", "H200", "--torch", "2.11")
    assert "flash is the fastest: 10.5 µs" in one
    lead = f"To run flash on {CROSS}, select it with sdpa_kernel: predicted to"
    text = run_cli(store, "explain", path)
    told = f"{lead} take 10.5 µs instead of 18.7 µs per call (1.77 times as fast)."
    assert told in text and text.index(told) < text.index("Predicted backends")
    assert "to run flash The following code makes the advised change:" in text
    assert "with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):" in text
    assert re.search(rf"{CROSS} cudnn 18.7 cudnn flash( 10.5)? ", text)
    saved = f"{lead} save about 16.2 µs of GPU time per step (10.5 µs instead of 18.7 µs per call)."
    assert saved in run_cli(store, "layers", path)
    report = run_cli(store, "report", path, "--format", "md", "-o", "-")
    assert saved in report.replace("\\", "")
    # The other backends of this program are not clearly faster.
    assert "faster" not in run_cli(store, "explain", str(MODELS / "unet.json.gz"))


def test_one_change_of_many_configs_is_told_once(store: Path) -> None:
    explanations = explained_calls(the_map(store, "whisper.json.gz"))
    ((answer, way),) = faster_ways(explanations)
    same = [(replace(answer, config=f"{CROSS}-{at}"), way) for at in range(20)]
    (told,), notes = summarize_changes(same, 25)
    assert not notes
    assert told == (
        "To run flash on 20 of 25 configs, select it with sdpa_kernel: predicted to be 1.77 times as "
        "fast."
    )
    cast = replace(way, advice=replace(way.advice, steps=("bf16",), change="compute in bf16"))
    (told,), _ = summarize_changes([(answer, cast) for answer, _ in same], 25)
    assert told.endswith("1.77 times as fast, but preparing the inputs takes time, too.")


@pytest.mark.parametrize(
    ("path", "told"),
    [
        (
            MODELS / "flex_compile",
            "In flex_compile, flex_attention uses no backend of scaled_dot_product_attention.",
        ),
        (
            ROOT / "traces" / "serving" / "eager.json.gz",
            "In eager.json.gz, flashinfer computes the attention, not scaled_dot_product_attention.",
        ),
    ],
)
def test_explain_answers_for_calls_without_a_choice(store: Path, path: Path, told: str) -> None:
    """Bug: explain failed, although it answered for calls with advice, and named no package."""
    text = run_cli(store, "explain", str(path))
    assert text.startswith(f"{told} To show its attention, use: profharness layers {path.name}")
    assert explained(store, str(path))["rows"] == []


def test_a_trace_without_attention_is_refused(store: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.json"
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2, "pid": 1, "tid": 1}
    empty.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [event]}))
    assert "contains no attention call" in refused(store, empty)


@pytest.mark.parametrize("width", [80, 100, 120, 200])
@pytest.mark.parametrize("name", ["unet", "encoder", "llama_compile", "whisper", "bert_fp32"])
def test_configs_can_be_copied_at_each_width(store: Path, name: str, width: int) -> None:
    layers = the_map(store, f"{name}.json.gz")
    text = render_table(layers_document(layers), width=width, cut=True)
    assert max(map(len, text.splitlines())) <= max(width, len(layers.command("explain")) + 5)
    joined = re.sub(r"-\n *", "-", text)  # a config may continue on the next line after a token
    assert all(str(row.config) in joined for row in layers.rows)


def test_list_configs_prints_the_configs_of_a_run(store: Path) -> None:
    layers = the_map(store, "unet.json.gz")
    printed = run_cli(store, "layers", "unet.json.gz", "--list-configs")
    assert all(str(row.config) in printed for row in layers.rows)


def test_advice_names_the_faster_backend_that_pytorch_chooses_after_the_change(store: Path) -> None:
    """Bug: `explain` advised flash at 168 µs, where `predict` knew that auto takes 83 µs on cudnn."""
    config = "2,16,2048,128,bf16,mask=bool"
    gpu = ("--gpu", "H200", "--torch", "2.11")
    (row,) = json.loads(run_cli(store, "explain", config, *gpu, "--format", "json"))["rows"]
    advice = {each["backend"]: each["advice"] for each in row["backends"]}
    (causal,) = (each for each in advice["cudnn"] if each["config"].endswith("-causal"))
    (flash,) = (each for each in advice["flash"] if each["config"] == causal["config"])
    assert causal["predicted"]["after_ns"] < flash["predicted"]["after_ns"]
    assert "sdpa_kernel" in flash["code"] and "sdpa_kernel" not in causal["code"]
    assert "sdpa_kernel" not in causal["change"] and causal["choice"] == "cudnn"
    changed = config.replace("mask=bool", "causal")
    told = CliRunner().invoke(cli, ["predict", changed, *gpu, "--format", "json"]).stdout
    times = {each["backend"]: each["kernel_ns"] for each in json.loads(told)["rows"]}
    assert causal["predicted"]["after_ns"] == times["cudnn"]
    text = run_cli(store, "explain", config, *gpu)
    assert (
        "If the mask is lower triangular, pass is_causal=True instead of attn_mask (code below)."
        in text
    )
    assert "To run cudnn" not in text  # it runs already
    assert "flash takes" not in text  # it is slower


def test_one_config_of_a_program_is_explained(store: Path) -> None:
    run = the_map(store, "bert_fp32.json.gz").run
    own = "b8-h12-s384-d64-fp32-mask=bool-mask_shape=b1qk-layout=bshd"
    assert run_cli(store, "explain", run, own) == run_cli(store, "explain", run)
    with pytest.raises(NotFoundError, match=f"no attention call of b1-h1-s1-d8; it has {own}"):
        find_calls(store, run, [parse_config("1,1,1,8")])


def test_a_capture_is_explained_like_a_trace(tmp_path: Path) -> None:
    """Bug: explain showed neither what a capture ran nor its time, and 80 columns hid `refused`."""
    store = tmp_path / "s.db"
    (ingested,) = ingest_path(store, ROOT / "traces" / "h200-torch2.11")
    assert run_cli(store, "explain", ingested.run).startswith(
        "h200-torch2.11 ran cudnn on 3 of 4 configs and flash on 1, as the rules of PyTorch 2.11 "
        # Bug: only `bench`, `report` and `analyze` had the change that makes a config faster.
        "predict for an H200. To run cudnn on b2-h8-s512-d100-fp16, pad head_dim from 100 to 104, "
        # Bug: 3.13 times as fast, although flash pads the inputs in the 35.6 µs.
        "keep the scale and slice the output: predicted to take 11.4 µs plus the time to prepare the "
        # Bug: the time before the change was predicted, above a table with the measured time.
        "inputs, instead of 35.6 µs per call. "
    )
    # The change is one for the platform of the run.
    assert "pad head_dim" not in run_cli(store, "explain", ingested.run, "--gpu", "A100")
    # Bug: a run and one of its configs were an error, although `kernels` accepts both.
    of_one = run_cli(store, "explain", ingested.run, "2,8,512,100")
    assert of_one.startswith("h200-torch2.11 ran flash, as the rules of PyTorch 2.11 predict")
    assert "flash took 35.6 µs per call" in of_one
    of_two = run_cli(store, "explain", ingested.run, "2,8,512,100,fp16", "2,8,512,64")
    assert of_two.startswith("h200-torch2.11 ran cudnn on 1 of 2 configs and flash on 1")
    on_a100 = run_cli(store, "explain", ingested.run, "2,8,512,100", "--gpu", "A100")
    assert "b2-h8-s512-d100-fp16 A100" in on_a100 and "d64" not in on_a100
    lacking = r"b2-h8-s512-d104; did you mean b2-h8-s512-d100-fp16\? it also has b2-h8-s51"
    with pytest.raises(NotFoundError, match=f"no cell for config {lacking}"):
        find_calls(store, ingested.run, [parse_config("2,8,512,104")])
    found = find_calls(store, ingested.run)
    assert isinstance(found, ProgramCalls) and found.platform is not None
    assert [call.ran for call in found.calls] == ["cudnn", "cudnn", "cudnn", "flash"]
    assert found.calls[0].mean_ns == pytest.approx(8_210, rel=0.01)  # as in `kernels`
    page = program_document(found, found.explain(found.platform, advice=False))
    shown = render_table(page, width=80, cut=True)
    assert "refused\n" in shown and "efficient: num_heads" in shown
    assert shown.count("--full") == 1


def test_the_source_of_all_reasons_is_said_once(store: Path) -> None:
    """Bug: each row repeated the source that the heading names."""
    text = run_cli(
        store, "explain", "2,8,512,64,fp32", "--gpu", "H200", "--torch", "2.11", "--full"
    )
    assert ", by rule" in text and not re.search(r"\bsource\b", text)
    (answer,) = explained_calls(the_map(store, "bert_fp32.json.gz"))
    first, *others = answer.backends
    inferred = replace(
        first, reasons=tuple(replace(each, source="inferred") for each in first.reasons)
    )
    mixed = replace(answer, backends=(inferred, *others))
    assert re.search(r"\bsource\b.*\n.*\binferred\b", render_table(explain_document([mixed])))


def test_the_verdicts_have_the_predicted_times_of_backends_that_could_run(store: Path) -> None:
    """Bug: only the chosen backend and the advised changes had times."""
    words = ("explain", "2,8,512,64", "--gpu", "H200", "--torch", "2.11")
    (row,) = json.loads(run_cli(store, *words, "--format", "json"))["rows"]
    times = {each["backend"]: each["predicted_ns"] for each in row["backends"]}
    assert times["cudnn"] == row["prediction"]["kernel_ns"] and all(times.values())
    text = run_cli(store, *words)
    for backend, ns in times.items():
        shown = re.escape(time_text(ns).removesuffix(" µs"))
        assert re.search(rf" {backend} (could run|runs) {shown} ", text)
    text = run_cli(store, "explain", "2,8,512,64,fp32", "--gpu", "H200", "--torch", "2.11")
    assert " flash refused dtype fp32 is not supported " in text
    assert re.search(r" math could run [\d.]+ to run cudnn ", text)
    without_atlas = run_cli(store, "explain", "2,8,512,64", "--gpu", "A100", "--torch", "2.11")
    assert "predicted µs/call" not in without_atlas


def test_advice_without_a_gain_on_a_less_preferred_backend_is_shown_only_in_full(
    store: Path,
) -> None:
    """Bug: flash was the first choice, but the answer explained how to run efficient."""
    words = ("explain", str(MODELS / "llama_prefill.json.gz"), "--gpu", "A100", "--torch", "2.11")
    text = run_cli(store, *words)
    assert "run flash on an A100, its first choice" in text
    assert "To run efficient" not in text and "sdpa_kernel" not in text
    assert "--full also shows how to run efficient and cudnn." in text
    assert "to run efficient Repeat the 8 key and value heads" in run_cli(store, *words, "--full")
    assert "To run efficient" in run_cli(store, *words, "--backend", "efficient")


def test_diff_and_layers_have_one_title_for_the_same_times(store: Path) -> None:
    """Bug: `layers` of two runs called them `median µs/call`, `diff` `median forward µs/call`."""
    for command in ("layers", "diff"):
        words = (command, *(str(MODELS / f"llama_{name}.json.gz") for name in ("eager", "prefill")))
        assert "median forward µs/call" in run_cli(store, *words), command


def test_a_lower_bound_has_the_name_of_its_source(store: Path) -> None:
    """Bug: the column was titled `roofline bound µs/call`, and the source was `floor`."""
    path = str(MODELS / "bert_fp32.json.gz")
    text = run_cli(store, "layers", path, "--gpu", "A100", "--torch", "2.11")
    assert "floor µs/call source" in text and "roofline bound" not in text
