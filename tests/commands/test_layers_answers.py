"""The sentences with which `layers` and `observe` begin, on real traces, and what gates say."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from profharness.attention.config import parse_config
from profharness.cli import cli
from profharness.columns import Column
from profharness.commands.explain import savings
from profharness.commands.layers.answer import layers_answer, told_change
from profharness.commands.layers.tables import SEE_ADVICE, layers_document
from profharness.commands.report.program import program_advice
from profharness.errors import GateError
from profharness.measurements.agreement import computes_attention
from profharness.program.layer_map import LayerMap, find_layers, suggestions
from profharness.render.document import Code, Note, Table, format_value
from profharness.render.terminal import render_table
from profharness.store import Selection, ingest_path, open_store

MODELS = Path(__file__).parents[2] / "traces" / "models"
SLOWED = " (under the profiler, which slows the CPU)"
FUSED = (
    '"void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous '
    "namespace)::FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::"
    'FusedAdamMathFunctor<float, 4, (at::native::ADAM_MODE)1, false>>(int)"'
)
REMEDY = "; capture the step into a CUDA graph, or compile the model with mode='reduce-overhead'."


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("answers") / "s.db"


def the_map(store: Path, name: str, torch: str | None = None) -> LayerMap:
    (ingested,) = ingest_path(store, MODELS / f"{name}.json.gz")
    with open_store(store) as opened:
        return find_layers(opened, ingested.run, torch=torch)


def ask(store: Path, *words: str) -> Any:
    return CliRunner().invoke(cli, ["layers", *words, "--store", str(store)])


@pytest.mark.parametrize(
    ("name", "sentences"),
    [
        (
            "llama_eager",
            [
                "Eager attention in LlamaAttention_{0-2} takes 58 % of the GPU time (2.36 ms of 4.08 "
                "ms): use scaled_dot_product_attention (in transformers: attn_implementation='sdpa'), "
                "predicted to save about 2.23 ms of GPU time per step.",
                f"The GPU is idle for 58 % of the traced step{SLOWED}: launch overhead is a limit too, so the "
                f"step itself may not get shorter{REMEDY}",
            ],
        ),
        (
            "llama_prefill",
            [
                "Attention takes 6 % of the GPU time (104 µs of 1.70 ms); all 3 layers run on cudnn, "
                "none on math.",
                f"The GPU is idle for 82 % of the traced step{SLOWED}: launch overhead, not attention, is the "
                f"limit{REMEDY}",
            ],
        ),
        (
            "llama_graph",
            [
                "Attention takes 12 % of the GPU time (228 µs of 1.96 ms); all 3 calls run on cudnn, "
                "none on math."
            ],
        ),
        (
            "bert_fp32",
            [
                "Attention takes 11 % of the GPU time (482 µs of 4.49 ms); all 3 layers run on "
                "efficient, none on math.",
                f"The GPU is idle for 58 % of the traced step{SLOWED}, mostly in one gap of 3.37 ms before "
                "the first kernel.",
            ],
        ),
        (
            "unet",
            [
                "Attention takes 61 % of the GPU time (210 µs of 343 µs); all 6 layers run on cudnn, "
                "none on math.",
                f"The GPU is idle for 95 % of the traced step{SLOWED}: launch overhead, not attention, is the "
                f"limit{REMEDY}",
            ],
        ),
        (
            "whisper",
            [
                "Attention takes 17 % of the GPU time (120 µs of 700 µs); all 6 layers run on cudnn, "
                "none on math.",
                f"The GPU is idle for 95 % of the traced step{SLOWED}: launch overhead, not attention, is the "
                f"limit{REMEDY}",
            ],
        ),
    ],
)
def test_the_answer_of_a_model(store: Path, name: str, sentences: list[str]) -> None:
    layers = the_map(store, name)
    assert list(layers_answer(layers, told_change(layers))) == sentences
    # every format shows the answer first
    text = " ".join(ask(store, layers.run).stdout.split())
    answer = text.partition(" Attention of run ")[0]
    assert answer.startswith(sentences[0]) and answer.endswith(" ".join(sentences[1:]))


def test_launches_of_attention_make_its_overhead_that_of_attention(store: Path) -> None:
    """Bug: the answer on uncompiled flex_attention, which makes 282 of 343 launches, said that
    launch overhead, not attention, was the limit.
    """
    (ingested,) = ingest_path(store, MODELS / "flex")
    with open_store(store) as opened:
        layers = find_layers(opened, ingested.run)
    assert sum(step.launches for step in layers.steps) == 343
    limit = f"The GPU is idle for 90 % of the traced step{SLOWED}: launch overhead is the limit"
    of_attention = f"{limit}, and attention makes 82 % of the launches"
    so = f"{of_attention}, so the change above reduces it, too{REMEDY}"
    assert layers_answer(layers, told_change(layers))[-1] == so
    assert layers_answer(layers)[-1] == f"{of_attention}{REMEDY}"


def test_slow_steps_do_not_hide_the_launches_of_the_others(store: Path) -> None:
    """Bug: all gaps that were read were in slow steps, so the other steps had no cause or remedy."""
    (ingested,) = ingest_path(store, MODELS / "llama_generate")
    with open_store(store) as opened:
        layers = find_layers(opened, ingested.run)
    slow = [step for step in layers.steps if step not in layers.usual_steps]
    assert len(slow) == 3 and len(layers.steps) == 8
    assert layers_answer(layers)[-1] == (
        f"The GPU is idle for 91 % of the other steps{SLOWED}: launch overhead, not attention, is "
        f"the limit{REMEDY}"
    )


def test_kernels_and_layers_tell_what_they_count(store: Path) -> None:
    """Bug: `kernels` gave 115 µs and `layers` 120 µs, because only `layers` counts memsets."""
    layers = the_map(store, "whisper")
    done = CliRunner().invoke(cli, ["kernels", layers.run, "--store", str(store)])
    text = " ".join(done.stdout.split())
    assert "137 launches of 32 different kernels" in text
    alone = "Attention kernels (cudnn) take 115 µs, 16 %, excluding memsets and other launches of their calls."
    assert alone in text
    with open_store(store) as opened:
        rows, _ = opened.rows(Selection(layers.run))
    counted = [row for row in rows if row.sdpa_op]
    assert sum(row.total_ns or 0 for row in counted) == pytest.approx(layers.attention_ns)


def test_generated_kernels_are_not_attention(store: Path) -> None:
    the_map(store, "llama_compile")
    kernels = CliRunner().invoke(cli, ["kernels", "llama_compile.json.gz", "--store", str(store)])
    told = "Attention kernels (cudnn) take 230 µs, 18 %, excluding memsets"
    assert told in " ".join(kernels.stdout.split())
    assert "Attention takes 18 % of the GPU time" in ask(store, "llama_compile.json.gz").stdout
    assert computes_attention("triton", "_attn_fwd") and computes_attention("flex", "triton_flex")
    assert not computes_attention("triton", "triton_poi_fused_add_0")


def test_a_report_counts_launches_and_says_what_its_rows_are(store: Path) -> None:
    """Bug: 32 kernels of one kind each were called rows, one per kernel and kind."""
    for name, detail in (
        ("whisper", "(the 15 longest of 32 kernels)"),
        ("llama_train", "(the 15 longest of 69 rows, one per kernel and kind)"),
    ):
        run = the_map(store, name).run
        done = CliRunner().invoke(cli, ["report", run, "--format", "md", "--store", str(store)])
        _, _, top = done.stdout.partition("## Top kernels")
        assert top.startswith(f" {detail}\n")
        assert "| launches/step |" in top


def test_a_prediction_for_the_same_gpu_keeps_the_saving(store: Path) -> None:
    """Bugs: --gpu left out the saving of eager attention, and printed `42.1 to 42.1`."""
    run = the_map(store, "llama_eager").run
    saving = "predicted to save about 2.23 ms of GPU time per step"
    texts = [
        " ".join(ask(store, run, *gpu).stdout.split())
        for gpu in ((), ("--gpu", "H200", "--torch", "2.11"))
    ]
    assert all(saving in text for text in texts)
    assert "90 % interval" not in texts[1] and "42.1 to 42.1" not in texts[1]
    # On another GPU, the times before and after the change differ in more than the change.
    assert saving not in " ".join(
        ask(store, run, "--gpu", "A100", "--torch", "2.11").stdout.split()
    )


def test_an_interval_has_two_ends_that_look_different() -> None:
    column = Column("interval", "90 % interval", "interval")
    assert format_value(column, (42_100.0, 42_101.0)) == "42.1 µs"
    assert format_value(column, (42_100.0, 43_100.0)) == "42.1 µs to 43.1 µs"


def test_only_modes_other_than_eager_are_shown(store: Path) -> None:
    """`eager` in the column `ran` is a kind of attention."""
    runs = {name: the_map(store, name).run for name in ("llama_eager", "llama_compile")}
    eager, compiled = (ask(store, run).stdout for run in runs.values())
    assert " mode " not in eager and " eager " in eager
    assert " mode " in compiled and " compile " in compiled
    record = json.loads(ask(store, runs["llama_eager"], "--format", "json").stdout)["rows"][0]
    assert record["mode"] == "eager"


def test_recomputed_layers_differ_in_a_narrow_terminal(store: Path) -> None:
    document = layers_document(the_map(store, "llama_checkpoint"))
    text = render_table(document, width=80, cut=True, full=False)
    assert re.findall(r"train|recompute", text) == ["train", "recompute"]


def test_layers_are_counted_once(store: Path) -> None:
    """Bugs: `all 6 layers` of a model with 3, of which checkpointing recomputes each, and `all 3 layers
    fall back to math` where only their decode calls do.
    """
    assert "; all 3 layers run on cudnn" in layers_answer(the_map(store, "llama_checkpoint"))[0]
    layers = the_map(store, "llama_prefill")
    (prefill,) = layers.rows
    decode = replace(prefill, ran="math", phase="decode", forward_ns=2e5, calls=6.0)
    both = layers_answer(replace(layers, rows=(prefill, decode)))[0]
    assert both.endswith("; 6 of 9 calls fall back to math (12 % of the GPU time).")
    alone = replace(decode, names=decode.names[:1], calls=1 / 3)
    assert "; it falls back to math (" in layers_answer(replace(layers, rows=(alone,)))[0]
    without = replace(alone, names=())
    both = layers_answer(replace(layers, rows=(replace(prefill, names=()), without)))[0]
    assert "; 0.33 of 3.33 calls fall back to math (" in both


def test_training_has_forward_and_backward(store: Path) -> None:
    first, *_ = layers_answer(the_map(store, "llama_train"))
    assert "forward 103 µs, backward 337 µs); all 3 layers run on cudnn, none on math." in first


def test_a_prediction_is_no_upper_bound(store: Path) -> None:
    """Bug: the answer said "at most 2.23 ms", but the real change saved 2.26 ms."""
    layers = the_map(store, "llama_eager")
    saving = "predicted to save about 2.23 ms of GPU time per step"
    assert saving in layers_answer(layers, told_change(layers))[0]
    _, note, code, *_ = program_advice(layers).blocks
    assert isinstance(code, Code)
    assert isinstance(note, Note)
    assert f"P{saving[1:]} (55 % of GPU time)." in note.text


def test_a_numbered_layer_has_the_name_before_the_number(store: Path) -> None:
    layers = the_map(store, "llama_eager")
    for module, where in (("model.layers.{0-2}", " in layers.{0-2}"), ("{0-2}", ""), (None, "")):
        rows = tuple(replace(row, module=module) for row in layers.rows)
        named = replace(layers, rows=rows)
        first = layers_answer(named, told_change(named))[0]
        assert first.startswith(f"Eager attention{where} takes")


def test_a_fallback_to_math_has_its_layers_and_the_saving(store: Path) -> None:
    layers = the_map(store, "llama_prefill", torch="2.11")
    assert layers.platform is not None
    config = "b2-h32-s1024-d65-bf16"
    _, change = suggestions(parse_config(config), layers.platform)[0]
    assert change is not None
    advice = (f"cudnn: {change.change}",)
    rows = tuple(
        replace(row, ran="math", config=config, advice=advice, forward_ns=3e6)
        for row in layers.rows
    )
    layers = replace(layers, rows=rows)
    _, second, _ = layers_answer(layers, told_change(layers))
    assert second == (
        f"In LlamaAttention_{{0-2}}, to run on cudnn: {change.change}. Predicted to save about 2.83 "
        "ms of GPU time per step, minus the time to prepare the inputs."
    )


def test_a_saving_that_cannot_be_predicted_has_a_reason(store: Path) -> None:
    """Bug: a trace of a GPU without an atlas got advice without a word about its saving."""
    layers = replace(the_map(store, "llama_eager"), gpu="NVIDIA L40S")
    notes = [each.text for each in layers_document(layers).blocks if isinstance(each, Note)]
    assert "The saving is not predicted, because there is no atlas for L40S." in notes


def test_the_reason_against_a_prediction_is_not_the_backward_pass(store: Path) -> None:
    """Bug: the backward pass was the reason for flex_attention and for a CPU, and prevented the
    predictions for eager attention in training.
    """
    (ingested,) = ingest_path(store, MODELS / "flex")
    with open_store(store) as opened:
        flex = find_layers(opened, ingested.run)
    cpu = replace(flex, gpu=None, steps=tuple(step._replace(busy_ns=0) for step in flex.steps))
    for layers, why in (
        (flex, "the atlas has no times for flex_attention"),
        (cpu, "there is no atlas for CPUs"),
    ):
        change = told_change(layers)
        assert change is not None and change.why_unknown == why
    eager = the_map(store, "llama_eager")
    rows = tuple(replace(row, config=f"{row.config}-bwd", backward_ns=6e6) for row in eager.rows)
    forward, trained = told_change(eager), told_change(replace(eager, rows=rows))
    assert forward and forward.saves and trained and trained.saves
    ((_, less),), ((_, more),) = forward.saves, trained.saves
    assert less < more < less + 6e6  # the backward pass of SDPA takes time, too


def test_a_choice_without_times_is_the_answer(store: Path) -> None:
    """Bug: the answer was that no time is known, although the choice was predicted."""
    run = the_map(store, "llama_prefill").run
    first = ask(store, run, "--gpu", "MI300X", "--torch", "2.11").stdout.splitlines()[0]
    assert first == "On an MI300X, PyTorch is predicted to choose flash; the times are unknown."


@pytest.mark.parametrize(
    ("name", "phase"), [("llama_prefill", "prefill"), ("vit", "self"), ("llama_train", "train")]
)
def test_only_causal_attention_is_a_prefill(store: Path, name: str, phase: str) -> None:
    """Bug: the attention of encoders was called prefill."""
    assert {row.phase for row in the_map(store, name).rows} == {phase}


@pytest.mark.parametrize(
    ("name", "phases", "kinds"),
    [
        ("whisper", ["-", "-", "prefill"], ["self", "cross", "self"]),
        ("unet", None, ["self", "self", "cross", "self", "cross", "cross"]),
        ("vit", None, None),
        ("llama_train", ["training"], None),
        ("llama_prefill", ["prefill"], None),
    ],
)
def test_a_phase_and_a_kind_of_attention_are_two_columns(
    store: Path, name: str, phases: list[str] | None, kinds: list[str] | None
) -> None:
    """Bug: the column `phase` contained `self` and `cross`."""
    document = layers_document(the_map(store, name))
    table = next(each for each in document.blocks if isinstance(each, Table))
    shown = {
        column.key: [format_value(column, value) for value in values]
        for column, values in zip(table.columns, zip(*table.rows, strict=True), strict=True)
    }
    assert (shown.get("phase"), shown.get("attention")) == (phases, kinds)


def test_nothing_is_predicted_without_advice(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(savings, "known_atlases", lambda _: pytest.fail("an atlas was read"))
    assert told_change(the_map(store, "llama_prefill")) is None


def test_several_programs_keep_their_advice(store: Path) -> None:
    runs = [the_map(store, name).run for name in ("llama_prefill", "llama_eager")]
    assert ask(store, *runs).stdout.count("in transformers: attn_implementation='sdpa'") == 1


def test_equal_notes_of_several_layers_are_one(store: Path) -> None:
    run = the_map(store, "llama_eager").run
    text = " ".join(ask(store, run).stdout.split())
    assert text.count("in transformers: attn_implementation='sdpa'") == 1
    assert "would help" not in text and "is not told" not in text


def test_a_gate_that_passes_says_so_and_names_eager_attention(store: Path) -> None:
    run, name = the_map(store, "llama_prefill").run, "llama_prefill.json.gz"
    done = ask(
        store, run, "--fail-on", "math-fallback,unseen", "--expect", "cudnn@LlamaAttention_*"
    )
    assert done.exit_code == 0
    assert done.stderr == (
        f"gate passed: --fail-on math-fallback in {name}: 3 calls checked, none ran on math\n"
        f"gate passed: --fail-on unseen in {name}: 3 calls checked, none has an unknown backend\n"
        f"gate passed: --expect cudnn@LlamaAttention_* in {name}: 3 calls checked, none ran on a "
        "backend other than cudnn\n"
    )
    run, name = the_map(store, "llama_eager").run, "llama_eager.json.gz"
    done = ask(store, run, "--fail-on", "math-fallback")
    assert done.exit_code == 0
    where = "LlamaForCausalLM_0.LlamaModel_0.LlamaDecoderLayer_{0-2}.LlamaAttention_{0-2}"
    assert done.stderr == (
        f"gate passed: --fail-on math-fallback in {name}: 3 calls checked, none ran on math, but "
        f"{where} computes attention eagerly, without scaled_dot_product_attention; to fail on this, "
        "add --fail-on eager-attention\n"
    )
    failed = ask(store, run, "--fail-on", "math-fallback,eager-attention")
    assert isinstance(failed.exception, GateError) and "gate passed" not in failed.output


def test_predictions_are_marked_in_the_table(store: Path) -> None:
    text = ask(store, the_map(store, "whisper").run, "--gpu", "H200").stdout
    assert text.startswith("Predicted for an H200: attention takes 119 µs of a step (")
    titles = next(line for line in text.splitlines() if "saves µs" in line)
    for title in ("predicted backend", "predicted µs/call", "source", "predicted µs/step"):
        assert title in titles


def test_csv_names_the_file_of_a_run(store: Path) -> None:
    """Bug: a row of CSV had only the id of the run."""
    done = ask(store, str(MODELS / "llama_train.json.gz"), "--format", "csv")
    (row,) = csv.DictReader(io.StringIO(done.stdout))
    assert row["run"].startswith("trace-") and row["run_name"] == "llama_train.json.gz"


def test_a_program_with_phases_has_one_column_of_phases(store: Path) -> None:
    """Bug: `step phase` and `phase` seemed to be two names of one thing."""
    done = ask(store, str(MODELS.parent / "serving" / "shapes.json.gz"), "--format", "md")
    (titles,) = (line for line in done.stdout.splitlines() if line.startswith("| module"))
    assert titles.count(" phase ") == 1 and "step phase" not in titles


def test_the_foreach_kernels_of_an_optimizer(store: Path) -> None:
    """Bug: a table of attention at 6 % of the GPU time did not mention an optimizer at 27 %."""
    layers = the_map(store, "llama_train")
    told = (
        "The optimizer's foreach kernels take 27 % of the GPU time; use fused=True "
        "(torch.optim.AdamW(…, fused=True))."
    )
    assert told in layers_document(layers).answer
    (work,) = (each for each in layers.other_work if each.kind == "foreach")
    for other in (
        replace(layers, other_work=(replace(work, ns=0.09 * layers.gpu_ns),)),  # too little
        replace(layers, other_work=(replace(work, ns=0.99 * layers.attention_ns),)),
    ):
        assert not any("optimizer" in text for text in layers_document(other).answer)
    assert all(each.kind != "foreach" for each in the_map(store, "bert_fp32").other_work)


def test_fused_kernels_and_other_optimizers_are_not_foreach(tmp_path: Path) -> None:
    trace = gzip.decompress((MODELS / "llama_train.json.gz").read_bytes()).decode()
    for change in (
        lambda text: re.sub(
            r'"void at::native::[^"]*?multi_tensor_apply_kernel<[^"]*"', FUSED, text
        ),
        lambda text: text.replace("Optimizer.step#AdamW", "Optimizer.step#NAdam"),
    ):
        (tmp_path / "t.json").write_text(change(trace))
        (ingested,) = ingest_path(tmp_path / "s.db", tmp_path / "t.json")
        with open_store(tmp_path / "s.db") as opened:
            found = find_layers(opened, ingested.run).other_work
        assert all(each.kind != "foreach" for each in found)


def test_only_a_detailed_trace_has_a_slow_cpu(tmp_path: Path) -> None:
    trace = json.loads(gzip.decompress((MODELS / "unet.json.gz").read_bytes()))
    assert trace.pop("with_stack") and trace.pop("record_shapes")
    (tmp_path / "plain.json").write_text(json.dumps(trace))
    (ingested,) = ingest_path(tmp_path / "s.db", tmp_path / "plain.json")
    with open_store(tmp_path / "s.db") as opened:
        assert not any(
            "slows the CPU" in text for text in layers_answer(find_layers(opened, ingested.run))
        )


def test_advice_with_code_has_a_hint(store: Path) -> None:
    """Bug: the answer on eager attention did not say that `explain` has the code."""
    for name in ("llama_eager", "bert_fp32"):
        layers = the_map(store, name, torch="2.11")
        document = layers_document(layers, full=True)
        hint = f"{SEE_ADVICE}: {layers.command('explain')}"
        assert [block.text for block in document.blocks if isinstance(block, Note)].count(hint) == 1
        words = " ".join(
            CliRunner().invoke(cli, ["explain", layers.run, "--store", str(store)]).stdout.split()
        )
        assert "The following code makes the advised change" in words
