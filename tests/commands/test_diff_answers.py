"""The sentences with which `diff` begins, and the kernels of programs, on real traces."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import profharness
from profharness.attention.config import parse_config
from profharness.cli import cli
from profharness.commands._output import sentences
from profharness.commands.diff import check, diff_document, show
from profharness.commands.diff.answer import _most, diff_caveats
from profharness.commands.diff.compare import MEMORY, Cost, diff_cells, find_sides
from profharness.errors import GateError, NotFoundError, UsageError
from profharness.measurements.measurements import busy_text
from profharness.program.matching import LayerDiff, LayerSide, layer_labels, layer_names
from profharness.render.document import FORMATS, Note
from profharness.render.terminal import render_table
from profharness.store import ingest_path, open_store
from profharness.units import by_how_much

TRACES = Path(__file__).parents[2] / "traces"
RUN = "h200-torch2.11"
UNTOLD = (
    "The environments cannot be compared, because the traces do not record their PyTorch versions."
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("diffs") / "s.db"
    models = ("prefill", "eager", "compile", "reduce_overhead", "train", "checkpoint", "graph")
    names = ("unet", "whisper", *(f"llama_{name}" for name in models))
    sources = [TRACES / "models" / f"{name}.json.gz" for name in names]
    for source in (*sources, TRACES / "h200-torch2.11", TRACES / "h200-torch-nsys-ncu"):
        ingest_path(path, source)
    return path


def diff(store: Path, *words: str) -> Any:
    names = [
        f"{word}.json.gz" if word.startswith(("llama", "unet", "whisper")) else word
        for word in words
    ]
    return CliRunner().invoke(cli, ["diff", *names, "--store", str(store)])


def test_a_diff_counts_cells_that_ran_below_as_in_the_answer(store: Path) -> None:
    """Bug: the last heading had `18 of 24` configs, which were cells, four of them refused."""
    text = diff(store, "h200-torch2.11", "h200-torch-nsys-ncu").stdout
    heading = next(line for line in text.splitlines() if line.startswith("Cells without"))
    assert heading.split("  ") == [
        "Cells without any difference in kernels",
        "14 of the 20 cells that ran, and 4 cells that did not run",
    ]


@pytest.mark.parametrize(
    ("sides", "answer"),
    [
        (
            ("llama_prefill", "llama_eager"),
            "llama_eager.json.gz takes 22.6 times as long as llama_prefill.json.gz in the "
            "attention forward pass (104 µs → 2.36 ms per step): attention changed from cudnn to eager in 3 calls "
            "per step. The step takes 9.68 ms → 9.63 ms; the GPU is idle for most of it on both sides. "
            "llama_prefill.json.gz → llama_eager.json.gz ",
        ),
        (
            ("llama_prefill", "llama_train"),
            "The attention forward pass takes as long in llama_train.json.gz as in "
            "llama_prefill.json.gz (104 µs → 103 µs per step); every layer runs on the same backend "
            "on both sides. The step takes 9.68 ms → 32.9 ms (3.40 times as long). "
            "llama_prefill.json.gz → ",
        ),
        (
            ("llama_prefill", "unet"),
            "llama_prefill.json.gz and unet.json.gz have no attention layers of equal size in common. "
            "llama_prefill.json.gz → unet.json.gz ",
        ),
        (
            ("llama_train", "llama_checkpoint"),
            "llama_checkpoint.json.gz takes 1.23 times as long as llama_train.json.gz in attention (440 "
            "µs → 542 µs per step); every layer runs on the same backend on both sides. Only "
            "llama_checkpoint.json.gz uses checkpointing: in each step, its backward pass spends "
            "103 µs repeating the forward pass of 3 calls. The step takes",
        ),
        (
            ("flash", "math"),
            "Compared with flash in CUDA-graph replays, math is slower in all 4 configs (3.14 "
            "to 12.7 times as long). math uses more memory in 4 configs (up to 438x) and launches more "
            "kernels in 4 configs (up to 8.00x). The environments are the same.",
        ),
        (
            ("20261121-151544-59c7", "20261121-165619-f5ef"),
            "Compared with h200-torch2.11 in CUDA-graph replays, h200-torch-nsys-ncu is slower "
            "in 2 of the 20 cells that ran (1.03 times as long) and the same in 18 "
            "cells. The environments are the same.",
        ),
    ],
)
def test_the_answer_of_a_diff(store: Path, sides: tuple[str, str], answer: str) -> None:
    done = diff(store, *sides)
    assert done.exit_code == 0, done.output
    assert " ".join(done.stdout.split()).startswith(answer)


def test_a_single_trace_without_a_version_is_named(store: Path) -> None:
    with open_store(store) as opened:
        sides = find_sides(opened, "llama_eager.json.gz", "llama_prefill.json.gz")
    known = replace(sides[1], environment={"torch": "2.11.0"})
    last = diff_caveats(diff_cells(sides[0], known))[-1]
    assert last.endswith("llama_eager.json.gz does not record its PyTorch version.")


def test_caveats_are_below_the_tables(store: Path) -> None:
    """Bug: three caveats were above the table, between the sentences of the answer."""
    sides = ("llama_prefill", "llama_eager")
    caveats = [
        "The compared calls may have different configs (kv8 and causal only in "
        "llama_prefill.json.gz), which a trace of eager attention does not show.",
        UNTOLD,
    ]
    text = " ".join(diff(store, *sides).stdout.split())
    assert " ".join(caveats) in text.partition(" Attention by layer ")[2]
    answer = json.loads(diff(store, *sides, "--format", "json").stdout)
    assert answer["caveats"] == caveats and not {*caveats} & {*answer["answer"]}
    assert caveats[0] in diff(store, *sides, "--format", "csv").stderr
    shorter = " ".join(diff(store, "llama_eager", "llama_compile").stdout.split())
    below = shorter.partition(" Attention by layer ")[2]
    assert "The GPU is idle for most of the step on both sides." in below
    alike = json.loads(diff(store, RUN, "flash", "cudnn", "--format", "json").stdout)
    assert "caveats" not in alike


def test_a_table_of_all_configs_comes_first_and_long_kernels_need_full(store: Path) -> None:
    """Bug: `diff flash math RUN` printed 85 lines of kernels, and no table of the configs."""
    head = "config                            median µs/call  speed-up  verdict"
    few = diff(store, RUN, "flash", "math").stdout
    lines = few.splitlines()
    at = lines.index(head)
    assert [line.split()[0] for line in lines[at + 1 : at + 5]] == [
        "b2-h8-s512-d64-fp16",
        "b2-h8-s1024-d64-fp16-causal-bwd",
        "b1-h32-kv8-sq1-skv4096-d128-bf16",
        "b2-h8-s512-d100-fp16",
    ]
    assert re.fullmatch(r"b2-h8-s512-d64-fp16 +13.4 → 108 +0.125x  slower", lines[at + 1])
    assert lines[-1] == "--full also shows the kernels of each config."
    assert len(lines) < 20 and "softmax_warp_forward" not in few
    full = diff(store, RUN, "flash", "math", "--full").stdout
    assert full.index("b2-h8-s512-d100-fp16 ") < full.index("softmax_warp_forward")
    page = diff(store, RUN, "flash", "math", "--format", "md").stdout
    assert "softmax_warp_forward" in page  # a page has no --full
    short = diff(store, RUN, "cudnn", "efficient").stdout
    assert short.index(head) < short.index("fmha_cutlassF_f16") and "refused" in short
    one = diff(store, RUN, "flash", "math", "2,8,512,64").stdout
    assert "config  " not in one and "softmax_warp_forward" in one


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (1.2, 1.997, "1.20 to 2.00 times as fast"),
        (1.05, 1.05, "1.05 times as fast"),
        (0.0442, 0.97, "1.03 to 22.6 times as long"),
        (1000, 13_000, "1,000 to 13,000 times as fast"),
    ],
)
def test_factors_have_no_exponent(low: float, high: float, text: str) -> None:
    """Bug: `slower in all 2 configs (20 to 1e+02 %)`."""
    assert by_how_much(low, most=high) == text


def test_a_small_increase_of_memory_has_two_decimals() -> None:
    """Bug: `uses more memory in 1 config (up to 1.0 times)`."""
    costs = [Cost("c", "flash", "math", MEMORY, 100, 103, "more", 1.03)]
    assert _most(costs) == " (up to 1.03x)"


def test_a_program_is_the_same_as_itself(store: Path) -> None:
    """Bug: kernels with fewer than three launches were unknown although their times were equal."""
    with open_store(store) as opened:
        sides = find_sides(opened, "llama_train.json.gz", "llama_train.json.gz")
    found = diff_cells(*sides)
    assert {row.verdict for row in found.rows} == {"same"}


def test_the_backward_pass_is_shown_at_80_columns(store: Path) -> None:
    with open_store(store) as opened:
        sides = find_sides(opened, "llama_train.json.gz", "llama_checkpoint.json.gz")
    text = render_table(diff_document(diff_cells(*sides)), width=80, cut=True)
    assert "112 → 113" in text and "LlamaDecoderLayer_{0-2}.LlamaAttention_{0-2}" in text


def test_the_kernels_of_a_program_need_full(store: Path) -> None:
    sides = "llama_prefill", "llama_eager"
    short, full = diff(store, *sides).stdout, diff(store, *sides, "--full").stdout
    assert len(short.splitlines()) < 20 and "softmax_warp_forward" not in short
    assert "--full also shows a comparison of all kernels of the traces" in " ".join(short.split())
    assert "softmax_warp_forward" in full and "--full" not in full


def test_differences_of_layers_are_one_short_note(store: Path) -> None:
    """Bug: five lines of module, config with all strides, and mode."""
    with open_store(store) as opened:
        sides = find_sides(opened, "llama_eager.json.gz", "llama_compile.json.gz")
    found = diff_cells(*sides)
    caveats = diff_caveats(found)
    assert caveats[0] == (
        "The compared calls may have different configs (mask=float and mask_shape=b1qk only in "
        "llama_compile.json.gz), which a trace of eager attention does not show."
    )
    notes = [
        block.text
        for block in diff_document(found).blocks
        if isinstance(block, Note) and block.level != "hint"
    ]
    assert tuple(notes[-3:]) == caveats
    assert notes[:-3] == [
        "mode: - → compile; module: …LlamaAttention_{0-2} → …LlamaForCausalLM_0; config: "
        "b2-h32-s1024-d64-bf16 → …-mask=float-mask_shape=b1qk-strides…",
    ]
    full = render_table(diff_document(found, full=True))
    assert "q_strides=2097152x64x2048x1" in full and "mode: eager → compile" in full
    assert "median forward µs/call" in " ".join(render_table(diff_document(found)).split())


def test_a_recomputed_forward_has_its_own_phase(store: Path) -> None:
    text = diff(store, "llama_train", "llama_checkpoint").stdout
    rows = [line.split()[:2] for line in text.splitlines() if line.startswith("LlamaDecoder")]
    layer = "LlamaDecoderLayer_{0-2}.LlamaAttention_{0-2}"
    assert rows == [[layer, "training"], [layer, "recompute"]]
    assert " phase " not in diff(store, "llama_prefill", "llama_train").stdout


def test_added_and_removed_layers_are_marked_alike(store: Path) -> None:
    with open_store(store) as opened:
        sides = find_sides(opened, "llama_prefill.json.gz", "unet.json.gz")
    levels = {
        block.level
        for block in diff_document(diff_cells(*sides)).blocks
        if isinstance(block, Note) and "no matching layer" in block.text
    }
    assert levels == {"warning"}


def test_a_kernel_of_attention_and_of_other_ops_is_split(store: Path) -> None:
    """The scores of eager attention and the last linear layer share a kernel, and the product of
    the rotary embedding comes before the softmax as the scores do.
    """
    done = diff(store, "llama_prefill", "llama_eager", "--format", "json")
    rows = {row["role"]: row for row in json.loads(done.stdout)["rows"]}

    def kernels(role: str, side: str) -> list[tuple[str, list[int] | None, int]]:
        found = rows[role][side]
        return [(row["kernel_short"], row["grid"], row["launches"]) for row in found]

    rotary = ("cutlass_80_simt_sgemm_128x32_8x5_nn_align1", [8, 1, 1], 1)
    assert rotary in kernels("matmul", "baseline") and rotary in kernels("matmul", "candidate")
    scores = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT"
    assert (scores, [2, 66, 1], 1) in kernels("linear", "baseline")
    assert (scores, [2, 66, 1], 1) in kernels("linear", "candidate")
    assert kernels("attention", "candidate") == [
        (scores, [2, 66, 1], 3),
        ("softmax_warp_forward<fp32,10>", [16384, 1, 1], 3),
        ("nvjet_sm90_tst_64x512_64x2_1x2_h_bz_coopB_NNT", [2, 64, 1], 3),
    ]


def test_a_gate_that_passes_says_what_was_compared(store: Path) -> None:
    passed = diff(store, "flash", "math", "--fail-on", "faster")
    assert passed.exit_code == 0
    assert re.fullmatch(
        r"gate passed: --fail-on faster in \S+:flash → \S+:math: 4 configs checked, none is faster\n",
        passed.stderr.partition("\n")[2],
    )
    failed = diff(store, "flash", "math", "--fail-on", "slower,memory")
    blocks = f"gate failed: {failed.exception}".split("gate failed: ")[1:]
    assert [block.partition(" in ")[0] for block in blocks] == [
        "--fail-on slower",
        "--fail-on memory",
    ]
    for block in blocks:
        head, *findings = block.splitlines()
        assert head.endswith(":math:") and findings
        assert all(line.startswith("  b") for line in findings)


def test_replays_without_names_pair_with_as_many_calls(store: Path) -> None:
    told = json.loads(diff(store, "llama_prefill", "llama_graph", "--format", "json").stdout)
    (row,) = told["layers"]
    assert (row["verdict"], row["speed"]) == ("changed", "slower")
    assert "mode: eager → graph" in row["reasons"] and any("sizes are" in x for x in row["reasons"])
    assert not any("None" in reason for reason in row["reasons"])
    other = json.loads(diff(store, "whisper", "llama_graph", "--format", "json").stdout)
    assert {row["verdict"] for row in other["layers"]} == {"removed", "added"}


def side_of(module: str | None = None, **fields: Any) -> LayerSide:
    known = {"config": None, "calls": 1, "phase": None, "mode": "eager", "ran": None}
    rest = {"sdpa_op": None, "forward_ns": None, "backward_ns": None}
    return LayerSide(module, **{**known, **rest, **fields})


def test_layers_have_names_of_their_own() -> None:
    """Bug: all calls without a module were `a call`, and modules were named twice."""
    sides = [
        side_of(kernels=("fmha_fwd",)),
        side_of(kernels=("paged",), sdpa_op="op"),
        side_of(sdpa_op="op"),
        side_of(),
        side_of(),
        side_of("a.attn", dims=((4, 8, 64), None)),
        side_of("a.attn", dims=((9, 8, 64), None)),
        side_of("b.attn", phase="decode"),
        side_of("b.attn", phase="prefill"),
        side_of("c.attn", mode="graph"),
        side_of("c.attn"),
    ]
    rows = [LayerDiff("forward", baseline=side) for side in sides]
    names = layer_names(rows, full=True)
    assert names == [
        *("fmha_fwd", "paged", "op", "a call #1", "a call #2"),
        *("a.attn (4x8x64)", "a.attn (9x8x64)", "b.attn", "b.attn"),
        *("c.attn (graph)", "c.attn (eager)"),
    ]
    labels = layer_labels(rows, full=True)
    assert labels[7:9] == ["b.attn (decode)", "b.attn (prefill)"]
    assert labels[:7] == names[:7]


def test_a_label_has_no_strides() -> None:
    """Bug: the label of a note had all strides, and was wider than the terminal."""
    label = "b2-h8-s64-d64-fp16-q_strides=32768x64x512x1"
    row = LayerDiff("forward", candidate=side_of(config=label))
    assert layer_names([row], full=False) == ["b2-h8-s64-d64-fp16-strides…"]
    assert layer_names([row], full=True) == [label]


def test_kernels_that_pair_share_a_row_and_others_have_the_mark_of_their_side(store: Path) -> None:
    """Bug: every kernel had two rows, marked `-` and `+`, even if both sides launched it alike."""
    config = ("--full", "--config", "2,8,512,64,fp16")
    same = diff(store, "20261121-151544-59c7:cudnn", "20261121-165619-f5ef:cudnn", *config).stdout
    assert not re.search(r"^[-+] ", same, re.MULTILINE)
    assert re.search(r"^call \(graph\) .* → ", same, re.MULTILINE)
    assert re.search(r"^= cudnn_sdpa", same, re.MULTILINE)
    other = diff(store, "20261121-151544-59c7:flash", "20261121-151544-59c7:cudnn", *config).stdout
    assert re.search(r"^- flash_fwd", other, re.MULTILINE)
    assert re.search(r"^\+ cudnn_sdpa", other, re.MULTILINE)
    assert not re.search(r"^= ", other, re.MULTILINE)


@pytest.mark.parametrize("width", [80, 100, 120, 200])
@pytest.mark.parametrize("configs", [("2,8,512,64",), ()])
def test_the_table_of_kernels_has_one_layout(
    store: Path, width: int, configs: tuple[str, ...]
) -> None:
    """Bug: the role and the side were lines of their own at 80 columns, or for several configs."""
    with open_store(store) as opened:
        sides = find_sides(opened, f"{RUN}:flash", f"{RUN}:cudnn", list(map(parse_config, configs)))
    text = render_table(diff_document(diff_cells(*sides)), width=width, cut=True)
    begin = r"^call \(graph\) +13\.4 → 9\.82 +1\.37x +faster\nattention +12\.7 → 7\.42 +1\.71x +faster\n- flash_fwd"
    assert re.search(begin, text, re.MULTILINE)
    assert re.search(r"^memory +- → 0\.768 +- +added\n\+ Memset ", text, re.MULTILINE)


def test_run_names_the_run_of_two_backends(store: Path) -> None:
    """Bug: there was no option --run, and three arguments gave an error without the right form."""
    run = "h200-torch2.11"
    named = diff(store, f"{run}:flash", f"{run}:cudnn")
    assert named.exit_code == 0 and named.stdout
    assert diff(store, "flash", "cudnn", "--run", run).stdout == named.stdout
    refused = diff(store, run, "flash", "--run", run).exception
    assert f"'{run}' is not a stored backend (stored: " in str(refused)


def test_a_run_and_two_of_its_backends_are_three_arguments(store: Path) -> None:
    """Bug: `diff RUN flash cudnn` was an error, although its message knew the command that was meant."""
    for configs in ((), ("2,8,512,64",), ("--config", "2,8,512,64")):
        named = diff(store, f"{RUN}:flash", f"{RUN}:cudnn", *configs)
        assert named.exit_code == 0
        assert diff(store, RUN, "flash", "cudnn", *configs).stdout == named.stdout
    in_python = profharness.diff(RUN, "flash", configs=("cudnn", "2,8,512,64"), store=store)
    assert set(in_python["backend_candidate"]) == {"cudnn"}


@pytest.mark.parametrize(
    "words",
    [
        ("flash", "cudnn", "TRACE", "2,8,512,64"),
        ("flash", "cudnn", "2,8,512,64", "TRACE"),
        ("flash", "TRACE", "2,8,512,64", "cudnn"),
        ("2,8,512,64", "TRACE", "flash", "cudnn"),
    ],
)
def test_the_run_of_two_backends_may_stand_anywhere(words: tuple[str, ...], tmp_path: Path) -> None:
    """Bug: a run after its backends was `not a config`, even if it was not stored yet."""
    trace = str(TRACES / RUN)
    done = diff(tmp_path / "s.db", *(trace if word == "TRACE" else word for word in words))
    assert done.exit_code == 0, done.exception
    assert done.stdout.startswith("cudnn is 1.37 times as fast as flash in CUDA-graph replays.")
    in_python = profharness.diff(
        "flash", "cudnn", configs=(trace, "2,8,512,64"), store=tmp_path / "t.db"
    )
    assert set(in_python["backend_candidate"]) == {"cudnn"}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("flash", "cudn"), "'cudn'"),
        ((RUN, "flash"), repr(RUN)),
        (("math", "2x8x512"), "'2x8x512'"),
    ],
)
def test_a_third_argument_needs_two_stored_backends(
    store: Path, words: tuple[str, str], named: str
) -> None:
    refused = diff(store, RUN, *words).exception
    assert isinstance(refused, UsageError)
    assert str(refused).startswith(f"{named} is not a stored backend (")
    assert "profharness diff RUN BACKEND BACKEND [CONFIG]..." in str(refused)


@pytest.mark.parametrize("sides", [("flash", "math"), ("llama_eager.json.gz", "unet.json.gz")])
def test_a_third_argument_without_a_run_is_a_config(store: Path, sides: tuple[str, str]) -> None:
    """Bug: a mistyped config was called a backend, and files were named by the ids of their runs."""
    with pytest.raises(UsageError, match="config '2x8': found only 1 of the 4 numbers"):
        profharness.diff(*sides, configs=("2x8",), store=store)


def test_configs_may_follow_the_sides(store: Path) -> None:
    """Bug: other commands accept configs as arguments, and `diff` only accepted --config."""
    shown = diff(store, "flash", "cudnn", "2,8,512,64")
    assert shown.exit_code == 0 and "b2-h8-s512-d64-fp16" in shown.stdout
    assert shown.stdout == diff(store, "flash", "cudnn", "--config", "2,8,512,64").stdout
    both = diff(store, "flash", "cudnn", "2,8,512,64", "--config", "2,8,512,100")
    assert "b2-h8-s512-d100-fp16" in both.stdout
    # A shell turns braces without quotes into several arguments.
    torn = diff(store, "flash", "cudnn", "--config", "2,8,512,64", "2,8,512,100")
    assert torn.stdout == both.stdout


def test_diff_warns_of_a_busy_machine(store: Path) -> None:
    """Bug: `kernels` warned of unreliable times of ops, and `diff` of the same run did not."""
    with open_store(store) as opened:
        calm = find_sides(opened, "h200-torch2.11:flash", "h200-torch2.11:cudnn")
    rows = [
        replace(row, kernel_kind="op", total_ns=4 * (row.total_ns or 0)) for row in calm[0].kernels
    ]
    busy = replace(calm[0], kernels=tuple(rows)), calm[1]
    cells = [cell for cell in calm[0].cells if cell.backend == "flash"]
    warning = sentences(str(busy_text(rows, cells)))
    assert "The machine was busy" in warning and "(flash on " in warning
    for full in (False, True):
        assert show((diff_cells(*busy), busy), full=full).answer[1] == warning
        assert warning not in show((diff_cells(*calm), calm), full=full).answer


def test_a_kernel_of_both_passes_is_split(store: Path) -> None:
    """Bug: a product with the same kernel and grid in both passes counted as forward only."""
    config = ("--config", "2,8,1024,64,causal,bwd")
    done = diff(store, "h200-torch2.11:flash", "h200-torch2.11:math", *config, "--format", "json")
    rows = {row["role"]: row for row in json.loads(done.stdout)["rows"]}
    shared = "sm80_xmma_gemm_f32_tn_128x64x8"
    for role, speed_up in (("attention", "0.0561x"), ("attention_bwd", "0.157x")):
        assert FORMATS["ratio"](rows[role]["speedup"]) == speed_up
        (product,) = (row for row in rows[role]["candidate"] if row["kernel_short"] == shared)
        assert product["launches_per_call"] == 1


def test_the_speed_up_of_several_kernels_has_its_own_line(store: Path) -> None:
    """Bug: the first kernel of a role showed the speed-up of all its kernels."""
    text = diff(store, "llama_eager", "llama_prefill", "--full").stdout
    assert re.search(r"^attention +6\.88x +faster$", text, re.MULTILINE)
    assert re.search(r"^- nvjet_sm90_tst_256x128\S+ .* 41\.6 → -$", text, re.MULTILINE)
    config = ("--config", "2,8,1024,64,causal,bwd")
    text = diff(store, "h200-torch2.11:flash", "h200-torch2.11:math", *config, "--full").stdout
    assert re.search(r"^attention_bwd +59\.0 → 375 +0\.157x +slower", text, re.MULTILINE)


def test_the_notes_on_roles_are_true_and_few(store: Path) -> None:
    """Bug: a note named the math backend, which did not run, and 16 notes differed in figures only."""
    text = " ".join(diff(store, "llama_eager", "llama_prefill", "--full").stdout.split())
    assert "math" not in text
    assert text.count("total time of the unfused kernels") == 1
    assert text.count("too few launches to compare") == 1
    assert "add, all, arange and 14 more There are too few launches to compare (at least 3" in text
    assert re.search(r" ne 1\.00x unknown = vectorized_elementwise", text)


def test_the_heading_counts_configs(store: Path) -> None:
    """Bug: the heading counted roles without saying so, and the answer counted configs."""
    text = diff(store, "h200-torch2.11:flash", "h200-torch2.11:math").stdout
    assert "h200-torch2.11:flash → h200-torch2.11:math  configs: 4 slower\n" in text
    refusal = diff(store, "h200-torch2.11:flash", "h200-torch2.11:cudnn").stdout
    assert "  configs: 3 faster, 1 refused\n" in refusal
    assert "  roles: " in diff(store, "llama_eager", "llama_prefill", "--full").stdout


def test_a_refused_config_counts_once(store: Path) -> None:
    """Bug: the config also counted as changed, and the table said `changed`."""
    text = diff(store, RUN, "flash", "cudnn").stdout
    sentences = " ".join(text.partition("\n\n")[0].split())
    assert sentences == (
        "Compared with flash in CUDA-graph replays, cudnn is faster in 3 of 4 configs (1.37 to 1.77 "
        "times as fast) and refused in 1 config. The environments are the same."
    )
    told = "\ncudnn  refused on b2-h8-s512-d100-fp16: head_dim=100 is not a multiple of 8\n"
    assert told in text
    other = " ".join(diff(store, RUN, "cudnn", "flash").stdout.split())
    assert "times as long) and the only side that runs 1 config." in other
    assert "configs: 3 slower, 1 accepted " in other


def test_a_program_and_a_capture_are_of_different_kinds(store: Path) -> None:
    """Bug: the error listed a step and configs, and the exit code was that of missing data."""
    run = "20261121-151544-59c7"
    for sides in (("llama_eager", run), (run, "llama_eager")):
        done = diff(store, *sides)
        assert isinstance(done.exception, NotFoundError) and done.exception.exit_code == 2
        assert str(done.exception) == (
            "nothing to compare: llama_eager.json.gz is the trace of a program, but h200-torch2.11 "
            "is a capture of configs; compare two traces or two captures"
        )
    gated = diff(store, "llama_eager", run, "--fail-on", "slower")
    assert isinstance(gated.exception, GateError)


@pytest.mark.parametrize(
    "sides",
    [
        ("flash", "h200-torch-nsys-ncu"),
        ("flash", "flash"),
        ("h200-torch-nsys-ncu:flash", "h200-torch-nsys-ncu"),
        (RUN, f"{RUN}:flash"),
    ],
)
def test_a_backend_is_not_compared_with_itself(store: Path, sides: tuple[str, str]) -> None:
    """Bug: without a second backend, flash was compared with itself, and nothing differed."""
    refused = diff(store, *sides).exception
    assert isinstance(refused, UsageError) and refused.exit_code == 2
    named = RUN if RUN in sides else "h200-torch-nsys-ncu"  # the latest run
    assert str(refused).startswith(
        f"both sides are flash of run {named}; name a second run, or a second backend to "
        "compare with flash, for example: profharness diff flash efficient "
    )
    command = str(refused).rpartition(": profharness diff ")[2]
    assert CliRunner().invoke(cli, ["diff", *command.split()]).exit_code == 0


def test_a_gate_on_speed_judges_calls_and_kernels_only_with_full(store: Path) -> None:
    """Bug: cudnn was faster in all configs, but --fail-on slower failed on a hidden kernel."""
    sides = (RUN, "flash", "cudnn")
    passed = diff(store, *sides, "--fail-on", "slower")
    assert passed.exit_code == 0 and "none is slower" in passed.stderr
    failed = diff(store, *sides, "--fail-on", "slower", "--full").exception
    assert isinstance(failed, GateError) and "bwd_preprocess: slower" in str(failed)
    assert isinstance(diff(store, *sides, "--fail-on", "changed").exception, GateError)
    assert isinstance(
        diff(store, RUN, "cudnn", "flash", "--fail-on", "slower").exception, GateError
    )


def test_a_refusal_on_both_sides_is_one_note_with_its_backend(store: Path) -> None:
    """Bug: two notes on `baseline` and `candidate` counted two backends as two configs."""
    configs = ("b2-h8-s512-d64-fp16", "b2-h8-s512-d100-fp16", "b1-h32-kv8-sq1-skv4096-d128-bf16")
    text = " ".join(diff(store, RUN, "h200-torch-nsys-ncu", *configs).stdout.split())
    reason = "refused on b2-h8-s512-d100-fp16: head_dim=100 is not a multiple of 8"
    assert text.count(reason) == 2 and "2 of 3 configs" not in text
    assert f"efficient {reason}" in text and f"cudnn {reason}" in text


def test_kernels_of_another_backend_are_judged_if_its_call_has_no_time(store: Path) -> None:
    """Bug: the time of one backend's call hid slower kernels of all backends of the config."""
    with open_store(store) as opened:
        sides = find_sides(opened, RUN, "h200-torch-nsys-ncu")
    found = diff_cells(*sides)
    (call, *_) = (
        row for row in found.rows if row.role == "call" and row.backend_baseline == "flash"
    )
    rows = [
        replace(row, verdict="slower") if row.call == call.call else row
        for row in found.rows
        if row is not call
    ]
    results = check((replace(found, rows=tuple(rows)), sides), fail_on="slower")
    assert any("attention: slower" in text for text in results[0].findings)


def test_a_report_has_the_caveats_of_its_diff(store: Path) -> None:
    names = [f"{name}.json.gz" for name in ("llama_eager", "llama_prefill")]
    arguments = ["report", *names, "--format", "json", "--store", str(store)]
    told = json.loads(CliRunner().invoke(cli, arguments).stdout)
    assert UNTOLD in told["diff"]["caveats"]


def test_a_graph_of_compiled_code_is_compared_with_the_layers_before(store: Path) -> None:
    """Bug: after both changes that `layers` advises, `diff` found no layer in common."""
    text = " ".join(diff(store, "llama_eager", "llama_reduce_overhead").stdout.split())
    assert text.startswith("llama_reduce_overhead.json.gz is 10.5 times as fast as llama_eager")
    assert "attention changed from eager to cudnn in 3 calls per step" in text
    assert "The step takes 9.63 ms → 2.94 ms (3.28 times as fast)." in text and "1 changed" in text
    text = " ".join(diff(store, "llama_compile", "llama_reduce_overhead").stdout.split())
    assert "replays CUDA graphs" in text and "runs compiled code" not in text  # both run such code


def test_a_finding_of_several_gates_is_listed_once(store: Path) -> None:
    """Bug: each gate repeated the findings that it shares with another gate."""
    sides = ("llama_eager", "llama_compile")
    failed = diff(store, *sides, "--fail-on", "faster,backend-changed,launches").exception
    assert isinstance(failed, GateError)
    lines = str(failed).splitlines()
    assert lines[0].startswith("--fail-on faster and --fail-on backend-changed in llama_eager")
    assert [line for line in lines if "changed, faster: eager → cudnn" in line] == [lines[1]]
    assert lines[2].startswith("gate failed: --fail-on launches in llama_eager")
    assert len(lines) == 4


def test_an_unknown_side_gets_the_nearest_backend(store: Path) -> None:
    """Bug: the error for `mth` listed runs first, and did not name `math`."""
    told = str(diff(store, "flash", "mth").exception)
    assert told.startswith("'mth' is not a stored backend (did you mean math?); no run 'mth' in ")
    other = str(diff(store, "flash", "foo").exception)
    assert other.startswith("'foo' is not a stored backend (stored: all-disabled, auto, cudnn, ")
    # A terminal does not break a command at the end of a message, so nothing may follow it.
    assert re.search(r"to list all runs, use: profharness runs[^;]*$", other)


def test_kernels_of_a_diff_do_not_look_alike_at_80_columns(store: Path) -> None:
    """Bug: `flash_fwd_splitkv_kernel` and `flash_fwd_splitkv_combine` were both `flash_fwd_s…`.

    Later, two launches of one kernel had the same name and no grid.
    """
    config = [parse_config("2,8,512,64,fp16")]
    with open_store(store) as opened:
        sides = find_sides(opened, "h200-torch2.11:flash", "h200-torch2.11:math", config)
    found = diff_document(diff_cells(*sides))
    narrow = render_table(found, width=80, cut=True)
    assert "flash_fwd_splitkv_kernel<" in narrow and "flash_fwd_splitkv_combine<" in narrow
    assert re.search(r"vectorized_…<8, float16_copy> +4096,1,1 ", narrow)
    assert re.search(r"vectorized_…<8, float16_copy> +512,1,1 ", narrow)


def test_a_gate_on_programs_checks_attention_and_other_kernels_only_with_full(store: Path) -> None:
    """Bug: a gate failed on a kernel outside attention, which the output did not show."""
    words = ("llama_eager", "llama_prefill", "--fail-on", "slower")
    done = diff(store, *words)
    assert done.exit_code == 0, done.output
    done = diff(store, *words, "--full")
    assert isinstance(done.exception, GateError) and "silu" in str(done.exception)
    done = diff(store, "llama_prefill", "llama_eager", "--fail-on", "slower")
    assert isinstance(done.exception, GateError)
    assert "the candidate takes 22.6 times as long" in str(done.exception) and "2162" not in str(
        done.exception
    )
