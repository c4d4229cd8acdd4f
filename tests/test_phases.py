"""The phases of programs: each row of a layer map refers to the steps of its own phase."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from profharness.attention.config import parse_config
from profharness.cli import cli
from profharness.commands.layers.answer import layers_answer
from profharness.commands.layers.by_gpu import (
    compare_maps,
    layers_by_gpu_document,
    runs_answer,
)
from profharness.commands.layers.tables import layers_document
from profharness.program.gates import check_gates, parse_gates
from profharness.program.layer_map import LayerMap, find_layers
from profharness.program.phases import (
    attention_kind,
    busy_share,
    find_phases,
    middle_steps,
    phase_of,
    phases_detail,
    slow_steps,
    step_phases,
    step_place,
    steps_by_phase,
)
from profharness.program.regret import saved
from profharness.render.document import Note
from profharness.render.terminal import render_table
from profharness.rows import CallRow, StepRow
from profharness.store import ingest_path, open_store
from profharness.traces.engine_log import EngineLog

TRACES = Path(__file__).resolve().parents[1] / "traces"
ENGINES = [f"serving/{name}" for name in ("eager.json.gz", "shapes.json.gz", "graph")]
GENERATE = "models/llama_generate"
WITH_PHASES = [*ENGINES, GENERATE]
ALL = [
    *ENGINES,
    *(f"models/{path.name}" for path in sorted((TRACES / "models").iterdir()) if path.suffix != ".md"),
]  # fmt: skip


def layers_of(name: str, folder: Path) -> LayerMap:
    (result,) = ingest_path(folder / "store.db", TRACES / name)
    with open_store(folder / "store.db") as store:
        return find_layers(store, result.run)


def invoke(folder: Path, *words: str) -> str:
    result = CliRunner().invoke(cli, [*words, "--store", str(folder / "store.db")])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("name", WITH_PHASES)
def test_the_rows_of_a_phase_add_up_to_the_phase(name: str, tmp_path: Path) -> None:
    """Bug: the table of layers had means over all steps, and the table of phases had others."""
    layers = layers_of(name, tmp_path)
    groups = {group.phase: group for group in layers.groups}
    assert list(groups) == [phase.phase for phase in layers.phases]
    for phase in layers.phases:
        group = groups[phase.phase]
        assert {row.steps for row in group.rows} == {phase.steps} == {len(group.steps)}
        assert sum(row.kernel_ns for row in group.rows) == pytest.approx(phase.attention_ns)
        assert sum(row.share or 0 for row in group.rows) == pytest.approx(phase.attention_share)
        assert group.attention_ns == pytest.approx(phase.attention_ns)
        assert group.step_ns == pytest.approx(phase.mean_ns)
    assert sum(phase.steps for phase in layers.phases) == len(layers.steps)
    whole = sum(phase.attention_ns * phase.steps for phase in layers.phases)
    assert layers.attention_ns == pytest.approx(whole / len(layers.steps))


@pytest.mark.parametrize("name", ALL)
def test_calls_per_step_are_whole_and_shares_at_most_one(name: str, tmp_path: Path) -> None:
    """Bug: a generate loop had 0.38 calls per step in its prefill, which is in 1 of 8 steps."""
    layers = layers_of(name, tmp_path)
    for row in layers.rows:
        assert row.calls is None or row.calls == round(row.calls)
    for group in layers.groups:
        for key in ("share", "step_share"):
            assert sum(getattr(row, key) or 0 for row in group.rows) <= 1 + 1e-9
    assert check_gates(layers, parse_gates(["unseen"], []))


@pytest.mark.parametrize("name", ALL)
def test_only_generation_and_engines_have_phases(name: str, tmp_path: Path) -> None:
    layers = layers_of(name, tmp_path)
    assert bool(layers.phases) == bool(layers.step_phases) == (name in WITH_PHASES)
    (told, *_) = layers_answer(layers)
    assert (" steps, attention takes " in told) == (name in WITH_PHASES)


def test_the_phases_of_a_generate_loop(tmp_path: Path) -> None:
    layers = layers_of(GENERATE, tmp_path)
    assert [(row.phase, row.step_phase, row.calls, row.steps) for row in layers.rows] == [
        ("decode", "decode", 3, 7),
        ("prefill", "prefill", 3, 1),
    ]
    assert [row.step for row in layers.rows] == ["7 decode steps", "ProfilerStep#3"]
    told = layers_answer(layers)
    assert told[0] == (
        "In decode steps, attention takes 4 % of the GPU time (15.9 µs of 415 µs); in prefill "
        "steps, 3 % of the GPU time (21.1 µs of 657 µs)."
    )
    assert told[1] == "All 3 layers run on cudnn, none on math."
    page = invoke(tmp_path, "layers", "--format", "md")
    assert "8 steps (7 decode, 1 prefill), 151 ms in all" in page
    assert "requests" not in page and "tokens/s" not in page  # no engine told them


def test_the_phase_that_takes_the_most_time_comes_first(tmp_path: Path) -> None:
    layers = layers_of("serving/shapes.json.gz", tmp_path)
    totals = [phase.mean_ns * phase.steps for phase in layers.phases]
    assert totals == sorted(totals, reverse=True)
    assert [row.step_phase for row in layers.rows] == [phase.phase for phase in layers.phases]
    assert layers_answer(layers)[0].startswith("In decode steps, attention takes 25 % of the GPU ")


@pytest.mark.parametrize("name", ENGINES)
def test_tokens_per_second_follow_from_the_table(name: str, tmp_path: Path) -> None:
    """Bug: 4 tokens in a median step of 0.279 ms beside 5,109 tokens/s, from a mean not shown."""
    layers = layers_of(name, tmp_path)
    for phase in layers.phases:
        assert phase.tokens_per_s == pytest.approx(
            1e9 * (phase.mean_new_tokens or 0) / phase.mean_ns
        )
        assert phase.median_step_tokens_per_s == pytest.approx(
            1e9 * (phase.median_step_new_tokens or 0) / phase.step_ns
        )
    page = invoke(tmp_path, "layers", "--format", "md")
    assert "% busy and tokens/s of the median step" in page
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    at = next(place for place, line in enumerate(lines) if line.startswith("| phase "))
    titles, *rows = (
        [cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines[at:]
    )
    for row in rows[1:]:
        shown = dict(zip(titles, row, strict=True))
        title = next(
            name for name in titles if name.startswith("median ") and name.endswith("/step")
        )
        time, _, unit = shown[title].partition(" ")
        ms = float(time) / (1000 if "µs" in (unit or title) else 1)
        tokens, rate = (float(shown[name].replace(",", "")) for name in ("new tokens", "tokens/s"))
        assert tokens / ms * 1000 == pytest.approx(rate, rel=0.01)


def test_a_program_on_a_cpu_has_no_busy_share(tmp_path: Path) -> None:
    """Bug: `median % busy  0.0` for steps that used no GPU."""
    layers = layers_of(GENERATE, tmp_path)
    steps = [step._replace(busy_ns=0) for step in layers.steps]
    assert busy_share(steps) is None and busy_share(layers.steps)
    phases = [
        replace(phase, busy_share=None, median_step_busy_share=None) for phase in layers.phases
    ]
    assert phases_detail(phases) == "attention as the mean of all steps"
    assert phases_detail(layers.phases).startswith("% busy of the median step; ")


def test_a_slow_step_does_not_stand_for_its_phase(tmp_path: Path) -> None:
    """Bug: one cold step of five made the GPU idle for 65 % of the time, at 5,109 tokens/s."""
    layers = layers_of("serving/graph", tmp_path)
    told = layers_answer(layers)
    assert told[1:] == (
        "1 of 5 decode steps takes more than twice the median of 279 µs: step 0 (2.71 ms).",
    )
    (decode,) = layers.phases
    assert decode.median_step_busy_share and decode.median_step_busy_share > 0.97
    assert decode.median_step_tokens_per_s == pytest.approx(14_348, abs=1)
    page = invoke(tmp_path, "layers")
    assert "5 steps, median 279 µs, mean 783 µs, GPU busy 98 % of the median step" in page


def test_the_median_step_of_an_even_number_is_the_mean_of_two() -> None:
    steps = [step(number)._replace(duration_ns=ns) for number, ns in enumerate((9, 1, 4, 2))]
    assert [each.duration_ns for each in middle_steps(steps)] == [2, 4]
    assert [each.duration_ns for each in slow_steps(steps)] == [9]
    assert middle_steps([]) == slow_steps([]) == []


@pytest.mark.parametrize("name", WITH_PHASES)
def test_the_tables_of_phases_fit(name: str, tmp_path: Path) -> None:
    document = layers_document(layers_of(name, tmp_path))
    for width in (80, 100, 120, 200):
        lines = render_table(document, width=width, cut=True).splitlines()
        assert all(len(line) <= width or line.startswith("profharness ") for line in lines)


def test_a_report_has_the_step_and_the_kernels_of_each_phase(tmp_path: Path) -> None:
    layers = layers_of("serving/shapes.json.gz", tmp_path)
    answer = json.loads(invoke(tmp_path, "report", layers.run, "--format", "json"))
    (program,) = answer["programs"]
    assert [(each["phase"], each["steps"]) for each in program["phases"]] == [
        ("decode", 5),
        ("prefill", 1),
    ]
    for each, phase in zip(program["phases"], layers.phases, strict=True):
        assert each["step_ns"] == pytest.approx(phase.mean_ns)
        kernels = [row["total_ns"] for row in each["kernels"] if row["kind"] == "attention"]
        assert sum(kernels) == pytest.approx(phase.attention_ns)
    whole = sum(each["step_ns"] * each["steps"] for each in program["phases"])
    assert program["step_ns"] * program["steps"] == pytest.approx(whole)
    page = invoke(tmp_path, "report", layers.run, "--format", "md")
    assert "## Steps by phase (decode mean 1.77 ms (5 steps); prefill 5.30 ms (1 step))" in page
    assert "## Top kernels of decode steps" in page


def test_a_forecast_has_the_time_of_a_step_of_each_phase(tmp_path: Path) -> None:
    layers = layers_of(GENERATE, tmp_path)
    answer = json.loads(invoke(tmp_path, "layers", "--gpu", "H200", "--format", "json"))
    rows, whole = answer["rows"], answer["predicted"]
    assert [row["step_phase"] for row in rows] == ["decode", "prefill"]
    times = [row["predicted_total_ns"] for row in rows]
    assert whole["ns"] == pytest.approx((7 * times[0] + times[1]) / 8)
    assert [each["ns"] for each in whole["groups"]] == pytest.approx(times)
    assert sum(row["predicted_share"] for row in rows) == pytest.approx(1)
    assert whole["calls"] == 3
    told = invoke(tmp_path, "layers", layers.run, "--gpu", "H200")
    assert " of a decode step " in " ".join(told.split())


def test_json_names_the_phase_of_each_row_and_step(tmp_path: Path) -> None:
    layers_of("serving/eager.json.gz", tmp_path)
    answer = json.loads(invoke(tmp_path, "layers", "--format", "json"))
    assert [(row["step_phase"], row["steps"]) for row in answer["rows"]] == [
        ("decode", 5),
        ("prefill", 1),
    ]
    assert Counter(step["phase"] for step in answer["steps"]) == {"decode": 5, "prefill": 1}


def test_one_step_has_the_figures_of_its_phase(tmp_path: Path) -> None:
    whole = layers_of("serving/eager.json.gz", tmp_path)
    answer = json.loads(invoke(tmp_path, "layers", "--step", "0", "--format", "json"))
    (row,), (prefill,) = answer["rows"], [row for row in whole.rows if row.step_phase == "prefill"]
    assert (row["step_phase"], row["forward_ns"]) == ("prefill", prefill.forward_ns)


def test_a_diff_compares_the_steps_of_a_phase(tmp_path: Path) -> None:
    layers = layers_of(GENERATE, tmp_path)
    answer = json.loads(invoke(tmp_path, "diff", layers.run, layers.run, "--format", "json"))
    sides = [row["baseline"] for row in answer["layers"]]
    assert [(side["step_phase"], side["calls"]) for side in sides] == [
        ("decode", 3),
        ("prefill", 3),
    ]
    for side, row in zip(sides, layers.rows, strict=True):
        assert side["forward_step_ns"] == pytest.approx(row.forward_ns)


def test_runs_are_compared_by_phase(tmp_path: Path) -> None:
    layers = layers_of(GENERATE, tmp_path)
    with open_store(tmp_path / "store.db") as store:
        compared = compare_maps(store, [layers, layers])
    assert [row.first.step_phase for row in compared.rows] == ["decode", "prefill"]
    told = runs_answer(compared)
    assert all(text.startswith("Attention takes as long in ") for text in told)
    assert [text.rpartition(" per ")[2] for text in told] == ["decode step).", "prefill step)."]
    page = render_table(layers_by_gpu_document(compared), width=200, cut=True)
    lines = page.partition("Runs compared")[2].splitlines()
    rows = [line.split() for line in lines if line.startswith("layers.")]
    assert [row[3] for row in rows] == ["decode", "prefill"]


def test_a_diff_of_an_engine_and_a_generate_loop(tmp_path: Path) -> None:
    """A generate loop has no numbers of tokens, which a sentence about an engine may contain."""
    one, other = (layers_of(name, tmp_path).run for name in (GENERATE, "serving/shapes.json.gz"))
    told = invoke(tmp_path, "diff", one, other)
    assert told.startswith("The median decode step takes 5.14 ms → 1.78 ms. Attention in these ")


# Steps without annotations, described by the configs of their calls
DECODING, PREFILLING = "b2-h8-sq1-skv100-d64-fp16", "b2-h8-s100-d64-fp16-causal"
PADDED, CROSS = "b2-h8-s100-d64-fp16-mask=bool", "b2-h8-sq32-skv100-d64-fp16"


def step(number: int, name: str = "ProfilerStep#1") -> StepRow:
    return StepRow(1, number, name, 1000 * number, 1000, 100)


def call(number: int, config: str | None) -> CallRow:
    return CallRow(
        *("run", 1, number, number, "sdpa", "scaled_dot_product_attention", None, False, False),
        *(False, None, (), config, None, (None, None, None), 0, 0),
    )


@pytest.mark.parametrize(
    ("configs", "phases"),
    [
        ([[PREFILLING], [DECODING], [DECODING]], ["prefill", "decode", "decode"]),
        ([[PADDED], [DECODING]], ["prefill", "decode"]),
        ([[PADDED, CROSS], [DECODING]], ["prefill", "decode"]),
        ([[PREFILLING], [DECODING], []], ["prefill", "decode", "other"]),
        ([[PREFILLING], [DECODING], [CROSS]], ["prefill", "decode", "other"]),
        ([[PREFILLING, DECODING], [DECODING]], ["mixed", "decode"]),
        # every step holds a whole generation
        ([[PREFILLING, DECODING], [PREFILLING, DECODING]], []),
        ([[DECODING], [DECODING]], []),
        ([[PREFILLING], [PADDED]], []),
        ([[None], [DECODING]], []),
    ],
)
def test_the_calls_of_a_step_give_its_phase(
    configs: list[list[str | None]], phases: list[str]
) -> None:
    steps = [step(number) for number in range(len(configs))]
    calls = [call(number, config) for number, own in enumerate(configs) for config in own]
    found = step_phases(steps, calls)
    assert list(found.values()) == phases
    assert list(found) == ([step_place(each) for each in steps] if phases else [])
    rows = find_phases(steps, calls, found, None)
    assert sum(row.steps for row in rows) == (len(steps) if phases else 0)
    assert len(steps_by_phase(steps, found)) == max(len(set(phases)), 1)


def test_the_configs_of_these_tests_have_the_phases_that_they_are_named_after() -> None:
    names = [phase_of(call(0, each)) for each in (DECODING, PREFILLING, PADDED, CROSS)]
    assert names == ["decode", "prefill", "self", "cross"]
    kinds = [attention_kind(each) for each in (DECODING, PREFILLING, PADDED, CROSS)]
    assert kinds == [None, "self", "self", "cross"]
    assert parse_config(PADDED).mask != "none"


def test_a_note_tells_that_steps_contain_a_whole_generation(tmp_path: Path) -> None:
    layers = layers_of(GENERATE, tmp_path)
    rows = tuple(replace(row, step_phase=None, steps=8) for row in layers.rows)
    whole = replace(layers, rows=rows, phases=(), step_phases={})
    note = "Each step consists of a prefill and the decoding that follows."
    texts = [
        [getattr(block, "text", "") for block in layers_document(each).blocks]
        for each in (whole, layers)
    ]
    assert [any(text.startswith(note) for text in own) for own in texts] == [True, False]


def test_the_saving_of_a_program_is_the_mean_over_all_its_steps(tmp_path: Path) -> None:
    layers = layers_of(GENERATE, tmp_path)
    rows = tuple(
        replace(row, saves_ns=ns) for row, ns in zip(layers.rows, (1000.0, 9000.0), strict=True)
    )
    timed = replace(layers, rows=rows)
    assert saved(timed).saves_ns == pytest.approx((7 * 1000 + 1 * 9000) / 8)
    assert [saved(group).saves_ns for group in timed.groups] == [1000, 9000]


def test_calls_without_shapes_leave_no_empty_column(tmp_path: Path) -> None:
    """Bug: a column `config` of hyphens kept its place, and the names of modules were cut instead."""
    layers = layers_of("serving/eager.json.gz", tmp_path)
    text = render_table(layers_document(layers), width=80, cut=True)
    assert not re.search(r"\bconfig\b", text)
    words = " ".join(text.split())
    # Bug: there was a note for each phase.
    told = (
        "The kernels of all 6 attention calls of a decode or prefill step were launched without an "
        "op, so the trace does not show their shapes, and FLOPs and bytes are unknown."
    )
    # Bug: another note said that the kernels were launched without an op.
    assert words.count("launched without an op") == words.count(told) == 1
    # Bug: the command contained a config that has nothing to do with the trace.
    assert "with configs that you write by hand, use: profharness bench CONFIG" in words
    for example in ("4,HEADS,1,HEAD_DIM,seq_kv=364 (decode)", "4,HEADS,362,HEAD_DIM,causal"):
        assert example in words


def test_an_engine_has_a_switch_for_cuda_graphs(tmp_path: Path) -> None:
    """Bug: the users of an engine were told to call torch.compile."""
    layers = layers_of("serving/eager.json.gz", tmp_path)
    remedies = {
        "step[DECODE bs=4]": "let SGLang use CUDA graphs (do not set --disable-cuda-graph).",
        "execute_context_0(0)_generation_4(4)": "let vLLM use CUDA graphs (do not set "
        "--enforce-eager).",
        "decode[bs=4 tok=4 d=4]": "enable CUDA graphs in the engine.",
    }
    for name, remedy in remedies.items():
        steps = tuple(each._replace(name=name) for each in layers.steps)
        rows = tuple(replace(row, sdpa_op=None) for row in layers.rows)
        told = layers_answer(replace(layers, steps=steps, rows=rows))
        assert told[-1].endswith(f"is the limit; {remedy}")
    logged = replace(layers, engine=EngineLog(engine="vLLM"))
    assert "do not set --enforce-eager" in layers_answer(logged)[-1]
    # The annotation with all sums is written by several engines, so the op decides.
    sums = "execute_4_context_0(sq0sk0sqsq0sqsk0)_generation_4(sq4sk9sqsq4sqsk9)"
    steps = tuple(each._replace(name=sums) for each in layers.steps)
    rows = tuple(replace(row, sdpa_op="vllm::unified_attention") for row in layers.rows)
    assert "let vLLM use" in layers_answer(replace(layers, steps=steps, rows=rows))[-1]


def test_paged_calls_have_configs_with_the_mean_lengths(tmp_path: Path) -> None:
    """Bug: the column `config` contained sizes of tensors, which no command accepts."""
    layers = layers_of("serving/shapes.json.gz", tmp_path)
    configs = [
        "b4-h32-kv8-sq1-skv364-d128-bf16-page=16",
        "b4-h32-kv8-s362-d128-bf16-causal-page=16",
    ]
    assert [row.mean_config for row in layers.rows] == configs
    assert [row.config for row in layers.rows] == [None, None]  # as docs/contracts.md says
    assert [[label for label, _ in phase.points] for phase in layers.phases] == [
        [config] for config in configs
    ]
    words = " ".join(render_table(layers_document(layers), width=200).split())
    assert "dims" not in words and all(words.count(config) == 2 for config in configs)
    told = "The lengths in the configs are the mean lengths of the requests in a step."
    assert words.count(told) == 1
    # Without annotations, the lengths are unknown.
    rows = tuple(replace(row, mean_config=None) for row in layers.rows)
    words = " ".join(render_table(layers_document(replace(layers, rows=rows)), width=200).split())
    assert "dims q 4x32x128, k v 93x16x8x128" in words and told not in words


def test_an_example_of_a_config_has_the_context_that_is_known(tmp_path: Path) -> None:
    """Bug: the user had to look up the context, which the annotations contain."""
    layers = layers_of("serving/eager.json.gz", tmp_path)

    def hint(keys: dict[str, float | None]) -> str:
        phases = tuple(replace(each, mean_keys=keys[each.phase]) for each in layers.phases)
        blocks = layers_document(replace(layers, phases=phases)).blocks
        return next(
            each.text for each in blocks if isinstance(each, Note) and "HEAD_DIM" in each.text
        )

    assert hint({"decode": 1454, "prefill": 1450}).endswith(
        "4,HEADS,1,HEAD_DIM,seq_kv=364 (decode) and 4,HEADS,362,HEAD_DIM,causal (prefill); replace "
        "the words in capitals with the sizes of the model"
    )
    # the prefix of a prompt may be cached
    assert "4,HEADS,362,HEAD_DIM,seq_kv=600,page=16,causal" in hint({"decode": 4, "prefill": 2400})
    unknown = hint({"decode": None, "prefill": None})
    assert "seq_kv=CONTEXT (decode) and 4,HEADS,362,HEAD_DIM,causal (prefill)" in unknown
    assert unknown.endswith("with the context and the sizes of the model")
