"""Check that tables fit terminals of each width, and that their times have fitting units."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

import profharness.commands._command as command_module
from profharness.attention.cases import VerificationRow
from profharness.attention.config import without_strides
from profharness.cli import find_command
from profharness.columns import Column, Importance, pick
from profharness.commands import bench, report
from profharness.commands.kernels.tables import kernels_document, longer_names
from profharness.commands.verify import verify_document
from profharness.errors import NotFoundError
from profharness.program.layer_map import LayerForecast, LayerRow
from profharness.render.document import (
    Code,
    Document,
    Heading,
    More,
    Note,
    Table,
    for_reading,
    formatted_rows,
    with_time_units,
)
from profharness.render.fitting import (
    OPTIONAL,
    Layout,
    chunks,
    distinct_cuts,
    fit_columns,
    is_key,
)
from profharness.render.renderers import RENDERERS, render_markdown
from profharness.render.terminal import render_table
from profharness.rows import KernelRow, RunRow
from profharness.store import Selection, ingest_path, open_store
from profharness.traces.kernel_names import parse_kernel_name
from profharness.units import UNITS, common_unit, time_text

ROOT = Path(__file__).parents[2]
WIDTHS = (80, 100, 120, 200)
GPU = ("--gpu", "H200")
ON_TRACES = (
    ("runs",),
    ("kernels",),
    ("kernels", "--full"),
    ("kernels", "--steps"),
    ("kernels", "--profiler", "all"),
    ("kernels", "2,8,512,64", "--profiler", "all"),
    ("kernels", "--config", "2,8,512,64,bf16", *GPU),
    ("analyze",),
    ("diff", "flash", "math"),
    ("diff", "flash", "math", "--full"),
    ("explain", "--config", "2,8,512,64", *GPU, "--torch", "2.11"),
    ("explain", "--config", "2,8,{64:512:*2},{64,512}", *GPU, "--torch", "2.11"),
    ("predict", "--config", "4,32,4096,128,bf16,causal", *GPU),
    ("predict", "--config", "2,8,{64:8192:*2},64", *GPU),
    ("explain-kernel", "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128> >()"),
    ("atlas", "list"),
    ("report", "--no-charts"),
    ("backends",),
    ("doctor",),
)
KEYS = ("kernel_short", "share", "call_ns", "launches_per_call")
MODELS = tuple(sorted((ROOT / "traces" / "models").glob("*.json.gz")))


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "store.db"
    for name in ("h200-torch2.11", "h200-torch-nsys-ncu"):
        ingest_path(path, ROOT / "traces" / name)
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """Return a store with the traces of models, and the id of each run by the name of the file."""
    path = tmp_path_factory.mktemp("models") / "store.db"
    runs = {}
    for trace in MODELS:
        runs[trace.name.partition(".")[0]] = ingest_path(path, trace)[0].run
    return path, runs


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[str, str]]]:
    """Return the store of the studies, and the id and kind of each run."""
    folder = tmp_path_factory.mktemp("studies")
    script = str(ROOT / "scripts" / "make_studies.py")
    command = [sys.executable, script, "store", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    store = folder / "store.db"
    rows = documents("runs", "--store", str(store))[0].records
    return store, [(str(row["run"]), str(row["kind"])) for row in rows]


def documents(*words: str) -> list[Document]:
    """Return the documents that a command displays."""
    shown: list[Document] = []

    def emit(document: Document, *_: object, **__: object) -> None:
        shown.append(document)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()):
        for module in (command_module, bench, report):
            patch.setattr(module, "emit", emit)
        find_command(words[0]).main(list(words[1:]), standalone_mode=False)
    return shown


def layouts(document: Document, width: int, *, full: bool) -> Iterator[tuple[Table, Layout]]:
    tables: dict[tuple[Column, ...], list[Table]] = {}
    for block in with_time_units(document).blocks:
        if isinstance(block, Table):
            tables.setdefault(block.columns, []).append(block)
    for columns, own in tables.items():
        rows = [row for table in own for row in formatted_rows(table)]
        joined = Table(columns, tuple(row for table in own for row in table.rows))
        yield joined, fit_columns(columns, rows, width, full=full)


def check_fit(document: Document) -> int:
    """Check the tables of a document at each width, and return their number."""
    tables = tuple(block for block in document.blocks if isinstance(block, Table))
    alone = replace(document, blocks=tables, answer=())
    for width in WIDTHS:
        for full in (False, True):
            text = render_table(alone, width=width, cut=True, full=full)
            too_long = [line for line in text.splitlines() if cell_len(line) > width]
            assert not too_long
            for table, layout in layouts(document, width, full=full):
                check_layout(table, layout, full=full)
    return len(tables)


def check_layout(table: Table, layout: Layout, *, full: bool) -> None:
    shown = [place for line in layout.lines for place in line]
    assert sorted((*shown, *layout.hidden, *layout.shared)) == list(range(len(table.columns)))
    keys = {at for at, column in enumerate(table.columns) if is_key(column, at)}
    assert not full or not layout.hidden
    assert not full or {*layout.cuts} <= (keys if layout.blocks else set())
    in_blocks = [at for block in layout.blocks for at in block if at not in keys]
    assert not layout.blocks or sorted(in_blocks) == sorted({*shown} - keys)
    assert not layout.hidden or {table.columns[at].importance for at in layout.hidden} <= {
        None,
        *OPTIONAL,
    }
    for place, cuts in layout.cuts.items():
        texts = {row[place] for row in formatted_rows(table)}
        assert len({cuts.get(text, text) for text in texts}) == len(texts)


@pytest.mark.parametrize("words", ON_TRACES, ids=" ".join)
def test_tables_of_each_command_fit(traces: Path, words: tuple[str, ...]) -> None:
    place = (
        ()
        if words[0] in ("explain", "explain-kernel", "predict", "atlas", "backends")
        else ("--store", str(traces))
    )
    shown = documents(*words, *place)
    assert sum(map(check_fit, shown))


def titles(document: Document, *, full: bool) -> tuple[set[str], set[str]]:
    """Return the titles of the columns that a narrow terminal shows, and of those that it hides."""
    shown, hidden = set[str](), set[str]()
    for table, layout in layouts(for_reading(document), 80, full=full):
        shown |= {table.columns[at].title for line in layout.lines for at in line}
        hidden |= {table.columns[at].title for at in layout.hidden}
    return shown, hidden


@pytest.mark.parametrize("words", ON_TRACES, ids=" ".join)
def test_full_shows_the_columns_that_a_narrow_terminal_hides(
    traces: Path, words: tuple[str, ...]
) -> None:
    command = find_command(words[0])
    if isinstance(command, click.Group):
        command = command.commands[words[1]]
    options = {name for each in command.params for name in each.opts}
    assert "--full" in options
    if "--full" in words:
        pytest.skip("has it already")
    place = ("--store", str(traces)) if "--store" in options else ()
    hidden = {title for each in documents(*words, *place) for title in titles(each, full=False)[1]}
    whole = documents(*words, "--full", *place)
    assert hidden <= {title for each in whole for title in titles(each, full=True)[0]}


@pytest.mark.parametrize("name", [path.name.partition(".")[0] for path in MODELS])
@pytest.mark.parametrize("options", [(), ("--full",), GPU, ("--gpu", "H100,H200")], ids=" ".join)
def test_tables_of_layers_fit(
    models: tuple[Path, dict[str, str]], name: str, options: tuple[str, ...]
) -> None:
    store, runs = models
    try:
        (shown,) = documents("layers", runs[name], *options, "--store", str(store))
    except NotFoundError as error:
        assert "can be predicted" in str(error)  # a trace without the shapes of its calls
        return
    assert check_fit(shown)
    if "--full" not in options:
        assert check_fit(documents("kernels", "--run", runs[name], "--store", str(store))[0])


@pytest.mark.parametrize("name", [path.name.partition(".")[0] for path in MODELS])
def test_different_values_of_real_traces_differ_at_every_width(
    models: tuple[Path, dict[str, str]], name: str
) -> None:
    store, runs = models
    for command in ("kernels", "layers", "analyze"):
        try:
            (shown,) = documents(command, "--run", runs[name], "--store", str(store))
        except NotFoundError:  # a trace without the shapes of its calls
            continue
        for width in range(60, 204, 4):
            for table, layout in layouts(for_reading(shown), width, full=False):
                check_layout(table, layout, full=False)


@pytest.mark.parametrize("name", [path.name.partition(".")[0] for path in MODELS])
def test_different_kernels_have_different_names(
    models: tuple[Path, dict[str, str]], name: str
) -> None:
    store, runs = models
    with open_store(store) as opened:
        rows, _ = opened.rows(Selection(runs[name]))
    shorts = {row.kernel: row.kernel_short for row in rows}
    longer = longer_names(rows)
    assert len({longer.get(kernel, short) for kernel, short in shorts.items()}) == len(shorts)
    counts = Counter(shorts.values())
    assert set(longer) == {kernel for kernel, short in shorts.items() if counts[short] > 1}


def test_tables_of_a_diff_of_programs_fit(models: tuple[Path, dict[str, str]]) -> None:
    store, runs = models
    names = runs["llama_prefill"], runs["llama_eager"]
    for options in ((), ("--full",)):
        assert check_fit(documents("diff", *names, *options, "--store", str(store))[0])


def test_tables_of_ranks_fit(models: tuple[Path, dict[str, str]]) -> None:
    store, runs = models
    names = runs["llama_train"], runs["llama_checkpoint"], runs["llama_graph_train"]
    assert check_fit(documents("ranks", *names, "--store", str(store))[0])


OF_A_KIND = {
    "bench": (("bench",), ("bench", "--explain"), ("report", "--no-charts")),
    "capture": (("analyze",), ("kernels", "--steps"), ("report", "--no-charts")),
}


@pytest.mark.parametrize("kind", OF_A_KIND)
def test_tables_of_studies_fit(studies: tuple[Path, list[tuple[str, str]]], kind: str) -> None:
    store, runs = studies
    for run in [run for run, own in runs if own == kind][:2]:
        for name, *options in OF_A_KIND[kind]:
            place = (run,) if name == "report" else ("--run", run)
            shown = documents(name, *place, *options, "--store", str(store))
            assert sum(map(check_fit, shown))


def test_tables_of_verify_fit() -> None:
    checks = [
        VerificationRow(
            run="r",
            asked="b2-h8-s512-d64-fp16",
            config="b2-h8-s512-d64-fp16-mask=bool-mask_shape=b1qk",
            case=case,
            backend=f"kernels/long_name_of_a_file.py:function_{number}",
            what="out",
            error=0.001,
            allowance=0.002,
            relative_error=0.001,
            relative_allowance=0.002,
            passed=not number,
            message=None if number else "the result with the causal mask one column too far",
            status="ok",
        )
        for number in range(3)
        for case in ("plain", "one key is hidden from one query", "a row is hidden whole")
    ]
    for full in (False, True):
        assert check_fit(verify_document(checks, full=full))


TITLES = st.text("abc µ/%", min_size=0, max_size=12).map(str.strip)
COLUMN = st.builds(
    Column,
    st.just("key"),
    TITLES,
    right=st.booleans(),
    shrink=st.booleans(),
    wrap=st.booleans(),
    repeat=st.booleans(),
    importance=st.none() | st.sampled_from(get_args(Importance)),
)
CELL = st.one_of(
    st.text(max_size=90),
    st.builds("layers.{}.attention_{}".format, st.integers(0, 10**9), st.integers(0, 10**40)),
    st.builds("{}-q_strides={}x1".format, st.sampled_from(("b1-h2", "b" * 90)), st.integers(0)),
)


@given(st.data(), st.integers(40, 200), st.booleans())
def test_no_line_is_too_long_and_no_text_is_ambiguous(
    data: st.DataObject, width: int, full: bool
) -> None:
    columns = data.draw(st.lists(COLUMN, min_size=1, max_size=14).map(tuple))
    row = st.tuples(*([CELL] * len(columns)))
    table = Table(columns, tuple(data.draw(st.lists(row, max_size=6))))
    document = Document("t/1", "t", (table,), (), ())
    text = render_table(document, width=width, cut=True, full=full)
    assert all(cell_len(line) <= width for line in text.splitlines())
    check_layout(table, fit_columns(columns, formatted_rows(table), width, full=full), full=full)


def fitted(columns: Sequence[Column], *rows: tuple[object, ...], width: int = 40) -> list[str]:
    document = Document("t/1", "t", (Table(tuple(columns), rows),), (), ())
    return render_table(document, width=width, cut=True, full=False).splitlines()


def test_the_least_important_columns_are_hidden_first() -> None:
    kinds: list[Importance] = ["answer", "normal", "detail", "normal", "detail", "answer"]
    columns = [Column("k", "layer"), *(Column(kind, kind, importance=kind) for kind in kinds)]
    row = ("attn", *("x" * 7 for _ in kinds))
    hidden = []
    for width in (59, 50, 41, 32, 23):
        layout = fit_columns(columns, [list(row)], width)
        assert len(layout.lines) == 1
        hidden.append(layout.hidden)
    assert hidden == [(), (5,), (3, 5), (3, 4, 5), (2, 3, 4, 5)]


def test_long_names_are_shortened_before_details_are_hidden() -> None:
    columns = [
        Column("k", "kernel", shrink=True),
        Column("d", "grid", importance="detail"),
        Column("a", "µs", importance="answer"),
    ]
    rows = ("n" * 60, "1,1,1", "7.44"), ("m" * 60, "1,1,1", "7.44")
    assert fitted(columns, *rows, width=53)[1] == f"{'n' * 39}…  1,1,1  7.44"
    # Names of up to COMFORTABLE characters remain whole at the cost of details.
    assert fitted(columns, *rows, width=52)[1] == f"{'n' * 45}…  7.44"
    assert fitted(columns, *rows, width=30)[1] == f"{'n' * 23}…  7.44"


def test_each_width_hides_details_in_one_order() -> None:
    columns = pick(
        KernelRow,
        *("kernel_short", "grid", "block", "shared_bytes", "shared_share"),
        *("registers_per_thread", "launches", "duration_ns", "total_ns", "share", "occupancy"),
    )
    row = ["vectorized_elementwise<8, float16_copy>", "65536,1,1", "128,1,1", "131.0", "57.5"]
    row += ["168", "1", "7.46", "7.44", "90.6", "100.0"]
    shown: set[str] = set()
    for width in range(60, 140):
        layout = fit_columns(columns, [row], width)
        kept = {columns[at].title for line in layout.lines for at in line}
        assert shown <= kept
        shown = kept
        assert ("% of smem" in kept) <= ("block" in kept) <= ("smem KiB" in kept)
        if {"block", "smem KiB", "regs", "% occupancy"} & kept:
            assert layout.cuts.get(0, {}).get(row[0], row[0]) == row[0]
    assert len(shown) == len(columns)


def test_names_of_kernels_keep_their_end() -> None:
    names = ("cudnn_sdpa_sm90_fprop_wgmma_knob_7_64x128x64", "nvjet_sm90_hsh_128x96_64x7_bias_TNT")
    assert distinct_cuts(names, 30) == {
        names[0]: "cudnn_sdpa_sm90_…64x128x64",
        names[1]: "nvjet_sm90_hsh_…64x7_bias_TNT",
    }


def test_lines_contain_no_blank_that_only_keeps_names_whole() -> None:
    lines = chunks("attn<a, b> of b2-h8-s512-d64-fp16-causal-mask=bool", 32)
    assert "".join(lines) == "attn<a, b> of b2-h8-s512-d64-fp16-causal-mask=bool"


def test_names_of_kernels_are_cut_between_words() -> None:
    """Bug: `knob_7` was cut into `b_7`, and `flash_fwd_splitkv_kernel` ended in `ker…`."""
    knob = "cudnn_sdpa_sm90_fprop_wgmma_knob_7_64x128x64"
    assert distinct_cuts([knob], 40) == {knob: "cudnn_sdpa_sm90_fprop_…knob_7_64x128x64"}
    pair = ("flash_fwd_splitkv_kernel<64,64x256,w4>", "flash_fwd_splitkv_combine<64,m8,split2>")
    assert [*distinct_cuts(pair, 20).values()] == ["flash_fwd_…kernel<…>", "flash_…combine<…>"]
    assert [*distinct_cuts(pair, 34).values()] == [
        "flash_fwd_splitkv_kernel<64,…w4>",
        "flash_fwd_splitkv_combine<…split2>",
    ]


def test_template_arguments_of_a_kernel_are_cut_in_the_middle() -> None:
    names = ("vectorized_elementwise<8, float16_copy>", "elementwise<128, 2, where, bf16>")
    assert distinct_cuts(names, 38) == {names[0]: "vectorized_elementwise<…float16_copy>"}
    assert distinct_cuts(names, 30)[names[1]] == "elementwise<128,…where, bf16>"
    others = ("vectorized_elementwise<8, f16_copy>", "vectorized_elementwise<8, f32_copy>")
    assert [*distinct_cuts(others, 28).values()] == [
        "vectorized_…<8, f16_copy>",
        "vectorized_…<8, f32_copy>",
    ]
    nested = "vectorized_elementwise<4, AUnary<MulFunctor>>"
    assert distinct_cuts([nested], 36) == {nested: "vectorized_elementwise<…MulFunctor>"}


@pytest.mark.parametrize(
    ("width", "cut"),
    [
        (42, "vectorized_…<…GeluCUDAKernelImpl, bf16>"),
        (34, "vectorized_…<…GeluCUDAKernelImpl…>"),
        (24, "vectorize…<…GeluCUDAKe…>"),
    ],
)
def test_a_cut_name_of_a_kernel_keeps_its_functor(width: int, cut: str) -> None:
    """Bug: GELU was `vectorized_elementwise<4,…>`, which does not say what the kernel computes."""
    name = "vectorized_elementwise<4, GeluCUDAKernelImpl, bf16>"
    assert distinct_cuts([name], width) == {name: cut}


def check_wider_terminals(document: Document) -> None:
    """Check that a wider terminal shows no less of the names of kernels than a narrower one."""
    shown: dict[tuple[int, str], str] = {}
    for width in WIDTHS:
        for number, (table, layout) in enumerate(layouts(for_reading(document), width, full=False)):
            for at, column in enumerate(table.columns):
                if column.key in ("kernel_short", "kernel") and at not in layout.hidden:
                    for text in {row[at] for row in formatted_rows(table)}:
                        name = layout.cuts.get(at, {}).get(text, text)
                        assert cell_len(name) >= cell_len(shown.get((number, text), ""))
                        shown[number, text] = name


@pytest.mark.parametrize("words", ON_TRACES, ids=" ".join)
def test_a_wider_terminal_shows_no_less_of_a_name(traces: Path, words: tuple[str, ...]) -> None:
    """Bug: with 120 columns, `kernels --profiler all` cut names that were whole with 80 columns."""
    options = {name for each in find_command(words[0]).params for name in each.opts}
    place = ("--store", str(traces)) if "--store" in options else ()
    for shown in documents(*words, *place):
        check_wider_terminals(shown)


@pytest.mark.parametrize("name", [path.name.partition(".")[0] for path in MODELS])
def test_a_wider_terminal_shows_no_less_of_the_names_of_a_program(
    models: tuple[Path, dict[str, str]], name: str
) -> None:
    """Bug: with 120 columns, details took the width that names had with 80 columns.

    `block` is the least important of the columns of a launch: no table shows it while it hides the
    number of launches.
    """
    store, runs = models
    with open_store(store) as opened:
        document = kernels_document(opened.rows(Selection(runs[name]))[0])
    check_wider_terminals(document)
    for width in WIDTHS:
        ((table, layout),) = layouts(for_reading(document), width, full=False)
        hidden = {table.columns[at].key for at in layout.hidden}
        assert "launches" not in hidden or "block" in hidden


def test_configs_are_whole_if_shorter_modules_make_room() -> None:
    """Bug: configs were reduced to the parts that differ, although they fitted next to modules that
    were cut."""
    columns = [
        Column("m", "module", shrink=True),
        Column("c", "config", shrink=True, importance="key"),
        Column("a", "ran", importance="answer"),
    ]
    labels = [f"b2-h8-{lengths}-d64-fp16-scale=1" for lengths in ("s1500", "sq32-skv1500")]
    modules = [f"Whisper{end}Layer_0.WhisperAttention_0" for end in ("Encoder", "Decoder")]
    rows = list(zip(modules, labels, ("cudnn", "flash"), strict=True))
    text = "\n".join(fitted(columns, *rows, width=80))
    assert all(label in text for label in labels)


def test_calls_are_shown_before_the_share_of_a_step() -> None:
    columns = pick(
        LayerRow, "module", "calls", "config", "phase", "ran", "forward_ns", "step_share"
    )
    row = ("Unet_0.Block_0", 1, "b2-h8-s4096-d40-fp16", "self", "cudnn", 7_440, 0.1)
    other = ("Unet_0.Block_1", 2, "b1-h16-s77-d80-bf16", *row[3:])
    lines = fitted(columns, row, other, width=70)
    assert "calls/" in lines[0] + lines[1] and lines[-1].startswith("--full also shows: % of step")


def test_a_long_text_that_all_rows_share_stands_above_the_table() -> None:
    columns = pick(LayerRow, "module", "config", "phase", "ran", "forward_ns")
    label = "b2-h32-kv8-s1024-d64-bf16-causal-layout=bshd-bwd"
    rows = [
        ("model.layers.{0-2}.LlamaAttention_{0-2}", label, phase, "cudnn", 7_440)
        for phase in ("train", "recompute")
    ]
    for width in (60, 80):
        lines = fitted(columns, *rows, width=width)
        assert f"config  {label}" in lines[:2]
        assert sum(label[:10] in line for line in lines) == 1
        assert sum("LlamaAttention_{0-2}" in line for line in lines) == 1
    assert fitted(columns, *rows, width=140)[0].startswith("module ")  # all columns fit
    strides = label.replace(
        "-layout=bshd", "-q_strides=1x2x3x4-k_strides=1x2x3x4-v_strides=1x2x3x4"
    )
    alone = fitted(columns, (rows[0][0], strides, *rows[0][2:]), width=80)
    assert alone[0].endswith("-")  # a config continues on the next line after a whole token
    assert alone[1].startswith(" " * len("config  "))  # and does not look like another name
    assert alone[0] + alone[1].lstrip() == f"config  {strides}"


@pytest.mark.parametrize("phases", [("decode",), ("decode", "prefill")], ids=len)
def test_a_name_that_all_rows_share_stands_above_the_table_before_it_is_cut(
    phases: tuple[str, ...],
) -> None:
    """Bug: each row had the same cut name, unless columns would have been hidden as well."""
    columns = pick(LayerRow, "module", "config", "phase", "ran", "forward_ns")
    module = "LlamaDecoderLayer_{0-2}.LlamaAttention_{0-2}"
    rows = [(module, f"b{len(at)}-h32-s1024-d64-bf16", at, "cudnn", 7_440) for at in phases]
    for width in range(60, 130):
        text = "\n".join(fitted(columns, *rows, width=width))
        assert module in text and "…" not in text


@pytest.mark.parametrize("trace", ["models/llama_eager", "serving/eager", "serving/shapes"])
@pytest.mark.parametrize("width", WIDTHS)
def test_the_module_of_a_real_trace_is_whole_if_all_rows_share_it(
    tmp_path: Path, trace: str, width: int
) -> None:
    """Bug: at 80 or 120 columns, rows had `…Layer_{0-5}.RadixAttention_{0-5}`."""
    store = tmp_path / "s.db"
    run = ingest_path(store, ROOT / "traces" / f"{trace}.json.gz")[0].run
    (shown,) = documents("layers", run, "--store", str(store))
    lines = render_table(shown, width=width, cut=True).splitlines()
    assert any(re.search(r"(^| )\w*DecoderLayer_\{\S+Attention_", line) for line in lines)
    assert "whole names" not in lines[-1]


def test_columns_without_values_are_left_out() -> None:
    columns = (
        Column("k", "kernel"),
        Column("g", "grid"),
        Column("r", "regs", "count"),
        Column("a", "µs", "time", importance="answer"),
    )
    first = Table(columns, (("mm", None, None, None),))
    alone = Document("t/1", "t", (first,), ("k", "g"), ({"k": "mm", "g": None},))
    second = Table(columns, (("bmm", None, 32, 7_440),))
    both = replace(alone, blocks=(first, second))
    assert render_table(alone).splitlines()[0].split() == ["kernel", "µs"]
    assert "grid" not in render_markdown(alone) and ">grid<" not in RENDERERS["html"](alone)
    assert '"g": null' in RENDERERS["json"](alone) and RENDERERS["csv"](alone).startswith("k,g")
    # Tables with the same columns still have the same columns.
    titles = [line.split() for line in render_table(both).splitlines() if "kernel" in line]
    assert titles == [["kernel", "regs", "µs"]]


def test_strides_of_a_config_are_shortened_first() -> None:
    columns = [Column("c", "config"), Column("v", "ran")]
    label = "b1-h2-s3-d4-fp16-q_strides=100x10x1-k_strides=100x10x1-bwd"
    assert fitted(columns, (label, "flash"))[1] == "b1-h2-s3-d4-fp16-strides…-bwd  flash"
    assert fitted(columns, (label, "flash"), width=80)[1].startswith(label)
    # strides remain if they are all that differs
    other = label.replace("100x10x1-bwd", "900x10x1-bwd")
    texts = " ".join(fitted(columns, (label, "flash"), (other, "flash")))
    assert "strides…" not in texts and "900x10x1" in texts


def test_a_long_name_gets_its_own_line_as_the_last_resort() -> None:
    columns = [Column("k", "config"), Column("a", "ran", importance="answer")]
    rows = [("b" * 36, "flash"), ("c" * 36, "math")]
    assert fitted(columns, *rows) == [
        "config",
        "  ran",
        "b" * 36,
        "  flash",
        "c" * 36,
        "  math",
    ]


def test_repeated_values_get_their_own_line_before_columns_are_hidden() -> None:
    columns = [
        Column("config", "config", repeat=False),
        Column("backend", "backend", importance="key"),
        Column("time", "µs", "time"),
    ]
    rows = [("b" * 30, "flash", 1000), ("b" * 30, "math", 2000)]
    assert fitted(columns, *rows) == [
        "config",
        "  backend    µs",
        "b" * 30,
        "  flash    1.00",
        "  math     2.00",
    ]


def test_repeated_values_get_their_own_line_before_names_are_cut() -> None:
    """Bug: the longest backend took the width that the names of kernels needed."""
    columns = [
        Column("backend", "backend", repeat=False),
        Column("kernel", "kernel", importance="key", shrink=True),
        Column("time", "mean µs", "time"),
    ]
    names = [f"{name}_{'x' * 24}" for name in ("one", "two")]
    rows = [("all-disabled", names[0], 1000), ("all-disabled", names[1], 2000)]
    assert fitted(columns, *rows)[-3:] == [
        "all-disabled",
        f"  {names[0]}     1.00",
        f"  {names[1]}     2.00",
    ]
    # If no name is cut, each row stays on one line.
    assert fitted(columns, *rows, width=60)[1].startswith("all-disabled  one_x")


def test_a_long_role_takes_no_width_from_the_names_of_kernels() -> None:
    """Bug: one long role in a diff cut the names of all kernels to 20 characters."""
    columns = [
        Column("role", "role", repeat=False),
        Column("side", "side", importance="key"),
        Column("kernel", "kernel", importance="key", shrink=True),
    ]
    name = "flash_bwd_convert_{}_kernel"
    rows = [
        ("call", "", "graph"),
        ("bwd_postprocess", "baseline", name.format("dq")),
        ("", "candidate", name.format("dkv")),
    ]
    assert fitted(columns, *rows, width=42)[-3:] == [
        "bwd_postprocess",
        f"  baseline   {name.format('dq')}",
        f"  candidate  {name.format('dkv')}",
    ]


def test_long_sentences_continue_in_their_column() -> None:
    columns = [Column("k", "check"), Column("t", "found", importance="answer", wrap=True)]
    lines = fitted(columns, ("CUDA", "no NVIDIA GPU: captures run on the CPU, as ATen ops"))
    assert lines == [
        "check  found",
        "CUDA   no NVIDIA GPU: captures run on",
        "       the CPU, as ATen ops",
    ]


@pytest.mark.parametrize("width", range(18, 40))
def test_short_words_are_not_split(width: int) -> None:
    """Bug: `head_dim_multiple` was split after `head_dim_`, because no blank was near the end."""
    text = "efficient: head_dim_multiple, cudnn: head_dim_multiple"
    lines = list(chunks(text, width))
    assert " ".join(lines) == text
    assert max(map(len, lines)) <= width


def test_a_word_that_is_as_wide_as_the_line_stays_on_it() -> None:
    """Bug: the last word was moved to the next line, or split, although it fitted."""
    name = "a_very_long_name_of_a_backend"
    assert next(chunks(f"cudnn: head_dim {name}", 15)) == "cudnn: head_dim"


def test_long_words_are_split_at_a_separator() -> None:
    assert list(chunks("a kernel_name_of_many_words_and_more", 24)) == [
        "a kernel_name_of_many_",
        "words_and_more",
    ]


def test_two_configs_are_split_after_the_arrow() -> None:
    configs = "b2-h32-kv8-s1024-d64-bf16-causal", "b2-h32-s1024-d64-bf16-mask=bool-mask_shape=b1qk"
    assert list(chunks(" → ".join(configs), 50)) == [f"{configs[0]} →", configs[1]]


def test_runs_have_whole_names_in_an_overview(models: tuple[Path, dict[str, str]]) -> None:
    """Bug: `llama_reduce_overhead.js…` cannot be given to a command."""
    store, runs = models
    (shown,) = documents("layers", *runs.values(), "--store", str(store))
    text = render_table(shown, width=80, cut=True)
    assert "\nllama_reduce_overhead.json.gz  " in text and "…" not in text


@pytest.mark.parametrize("width", [40, 57, 78])
def test_the_name_of_a_module_is_split_after_a_dot(width: int) -> None:
    """Bug: lists and cells broke `WhisperAttention_{0-1}` into `WhisperAttention_{0-` and `1}`."""
    name = "WhisperModel_0.WhisperEncoder_0.WhisperEncoderLayer_{0-1}.WhisperAttention_{0-1}"
    lines = [*chunks(name, width)]
    assert "".join(lines) == name and len(lines) > 1
    assert all(line.endswith(".") for line in lines[:-1])
    assert all(cell_len(line) <= width for line in lines)


@pytest.mark.parametrize("width", [80, 120])
def test_layers_do_not_break_lines_within_a_module(
    models: tuple[Path, dict[str, str]], width: int
) -> None:
    store, runs = models
    (document,) = documents("layers", runs["whisper"], "--full", "--store", str(store))
    text = render_table(document, width=width, cut=True, full=True)
    assert "WhisperAttention_{0-1}" in text
    assert not re.search(r"\{[\d,-]*$|^\s*[\d,-]*\}", text, re.MULTILINE)


@pytest.mark.parametrize("name", ["whisper", "unet", "llama_eager", "llama_padded", "encoder"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("full", [False, True])
def test_modules_and_configs_of_real_traces_are_whole(
    models: tuple[Path, dict[str, str]], name: str, width: int, full: bool
) -> None:
    """Bug: at 80 columns, modules and configs were cut, or were in full only below the table."""
    store, runs = models
    words = ("--full",) if full else ()
    (shown,) = documents("layers", runs[name], "--store", str(store), *words)
    lines = render_table(for_reading(shown), width=width, cut=True, full=full).splitlines()
    text = "".join(line.strip() for line in lines)  # a long name continues on the next line
    table = next(block for block in for_reading(shown).blocks if isinstance(block, Table))
    rows = formatted_rows(table)
    layout = fit_columns(table.columns, rows, width, full=full)
    keys = [column.key for column in table.columns]
    assert rows and len(layout.lines) <= (3 if full or width == 80 else 2)
    for row in rows:
        module, config = row[keys.index("module")], row[keys.index("config")]
        assert module in text
        # A config is shortened only if it does not fit on a line of its own.
        assert config in text or (len(config) > width - 2 and without_strides(config) in text)


def test_names_have_a_line_of_their_own_before_they_are_cut() -> None:
    columns = (
        Column("m", "module", shrink=True),
        Column("c", "config", shrink=True, importance="key"),
        Column("r", "ran", importance="answer"),
        Column("t", "median µs/call", "time", importance="answer"),
        Column("s", "% of step", "percent"),
    )
    modules = [f"Whisper{part}Layer_{{0-1}}.WhisperAttention_{{0-1}}" for part in ("En", "De")]
    configs = [f"b2-h8-{part}-d64-fp16-scale=1" for part in ("s1500", "sq32-skv1500")]
    rows = [(*names, "cudnn", 7_440, 0.1) for names in zip(modules, configs, strict=True)]
    for width in (50, 60, 70):
        lines = fitted(columns, *rows, width=width)
        assert all(lines.count(name) == 1 for name in modules)
        assert all(any(config in line for line in lines) for config in configs)
    assert all("cudnn" in line for line in fitted(columns, *rows, width=120)[1:])


def test_names_of_kernels_have_their_own_lines_if_most_would_be_cut() -> None:
    """Bug: at 80 columns, the tiles and functors of nearly all kernels of a program were cut."""
    columns = pick(KernelRow, "kernel_short", "grid", "duration_ns")
    names = [f"nvjet_sm90_tst_{tile}_64x4_1x2_h_bz_coopA_TNT" for tile in ("256x128", "64x512")]
    rows = [(name, (at, 66, 1), 7_440) for at, name in enumerate((*names, "gemm", "softmax"))]
    lines = fitted(columns, *rows, width=50)
    assert all(name in lines for name in names)
    lines = fitted(
        columns, *rows, *((f"gemm_{at}", (at, 1, 1), 7_440) for at in range(9)), width=56
    )
    assert len(lines) == 2 + 13 + 1  # a few names are cut instead


MODULES = (
    Column("m", "module", shrink=True),
    Column("c", "config", shrink=True, importance="key"),
    Column("s", "calls/step", "count"),
    Column("r", "ran", importance="answer"),
    Column("t", "median µs/call", "time", importance="answer"),
)


def test_modules_and_configs_stand_side_by_side_above_the_figures() -> None:
    """Bug: the config stood between the figures, and `calls/step` above the module's line."""
    rows = [
        ("Unet_0.Block_0", "b2-h8-s4096-d40-fp16-layout=bshd", 1, "cudnn", 7_440),
        ("Unet_0.Block_1", "b2-h8-sq4096-skv77-d40-fp16-layout=bshd", 2, "flash", 17_440),
    ]
    assert fitted(MODULES, *rows, width=60) == [
        "module          config",
        "  calls/step  ran    median µs/call",
        "Unet_0.Block_0  b2-h8-s4096-d40-fp16-layout=bshd",
        "           1  cudnn            7.44",
        "Unet_0.Block_1  b2-h8-sq4096-skv77-d40-fp16-layout=bshd",
        "           2  flash            17.4",
    ]


def test_modules_and_configs_that_do_not_fit_on_one_line_take_two() -> None:
    rows = [
        (
            f"{part}Layer_0.{part}Attention_0",
            f"b2-h8-s{1500 + at}-d64-fp16-scale=1",
            2,
            "cudnn",
            7_440,
        )
        for at, part in enumerate(("Encoder", "Decoder"))
    ]
    assert fitted(MODULES, *rows, width=40)[:6] == [
        "module",
        "  config",
        "  calls/step  ran    median µs/call",
        "EncoderLayer_0.EncoderAttention_0",
        "  b2-h8-s1500-d64-fp16-scale=1",
        "           2  cudnn            7.44",
    ]


@pytest.mark.parametrize("name", ["whisper", "unet", "llama_eager", "bert_fp32"])
@pytest.mark.parametrize("width", WIDTHS)
def test_layers_hide_no_column_that_fits(
    models: tuple[Path, dict[str, str]], name: str, width: int
) -> None:
    """Bug: tables with names above the figures hid details that fitted."""
    store, runs = models
    (shown,) = documents("layers", runs[name], "--store", str(store))
    for table, layout in layouts(for_reading(shown), width, full=False):
        if layout.hidden:  # the column that is hidden last does not fit
            line = [*layout.lines[-1], layout.hidden[0]]
            titles = [len(table.columns[at].title) if layout.lines[1:] else 0 for at in line]
            sizes = [max(layout.widths[at], title) for at, title in zip(line, titles, strict=True)]
            indent = 2 if layout.lines[1:] else 0  # figures below names have titles on one line
            assert indent + sum(sizes) + len("  ") * (len(line) - 1) > width
        first = [table.columns[at].key for at in layout.lines[-1]]
        names = {*first} & {"module", "config"}
        assert names == {*first[: len(names)]}  # figures follow names


def test_kernels_of_a_program_have_one_line_each_at_80_columns(
    models: tuple[Path, dict[str, str]],
) -> None:
    """Bug: the grid made each row two lines long."""
    store, runs = models
    (shown,) = documents("kernels", runs["llama_eager"], "--store", str(store))
    ((table, layout),) = layouts(for_reading(shown), 80, full=False)
    keys = [table.columns[at].key for at in layout.lines[0]]
    assert keys == ["kernel_short", "launches", "mean_launch_ns", "total_ns", "share"]
    assert len(layout.lines) == 1 and table.columns[layout.hidden[0]].key == "grid"
    ((table, layout),) = layouts(for_reading(shown), 120, full=False)
    assert "grid" in [table.columns[at].key for at in layout.lines[0]]


def test_runs_have_one_line_each_at_80_columns() -> None:
    """Bug: the duration made each row two lines long if a GPU had a long name."""
    columns = pick(RunRow, "name", "kind", "created", "duration_ns", "device")
    rows = [
        (name, "benchmark", "2026-11-26 18:31", 7_530_000, device)
        for name, device in (("serving_bench", "H100"), ("mi250_of_a_job", "AMD Radeon Graphics"))
    ]
    rows += [(f"trace_of_rank_{'0' * 10}.json", *rows[0][1:])]
    lines = fitted(columns, *rows, width=80)
    assert len(lines) == 1 + len(rows) + 1 and lines[-1] == "--full also shows: duration"


def test_a_note_on_a_hidden_column_is_hidden_too() -> None:
    """Bug: `runs` explained `duration` on a terminal that was too narrow for this column."""
    columns = (Column("k", "run"), Column("d", "duration", importance="detail"))
    blocks = (Table(columns, (("a", "x" * 60),)), Note("of the steps", "duration"), Note("Last."))
    document = Document("t/1", "t", blocks, (), ())
    assert "of the steps" not in render_table(document, width=60, cut=True)
    for full, width in ((True, 60), (False, 100)):
        assert "of the steps" in render_table(document, width=width, cut=True, full=full)


def test_a_title_that_a_table_shows_is_not_called_hidden() -> None:
    """Bug: `layers` hid the shares of the phases, but showed a column of this title above them."""
    share = Column("s", "share", importance="detail")
    shown = Table((Column("k", "layer"), share), (("a", "5"),))
    hiding = Table((Column("k", "phase"), replace(share, key="p")), (("b" * 50, "x" * 20),))
    document = Document("t/1", "t", (shown, hiding), (), ())
    assert "--full" not in render_table(document, width=60, cut=True)
    only = replace(document, blocks=(hiding,))
    assert render_table(only, width=60, cut=True).endswith("--full also shows: share\n")


def test_one_line_at_the_end_names_all_that_full_adds() -> None:
    """Bug: several lines below one output began with `--full shows` or `--full also shows`."""
    other = Table(
        (Column("k", "op"), Column("e", "path", importance="detail")), (("mm", "y" * 60),)
    )
    table = Table(
        (Column("k", "layer"), Column("d", "note", importance="detail")), (("a", "x" * 60),)
    )
    document = Document("t/1", "t", (table, other), (), ())
    text = render_table(document, width=60, cut=True)
    assert text.count("--full") == 1 and text.endswith("\n--full also shows: note, path\n")
    blocks = (table, More("all kernels"), other, More("all kernels"), More("why"), Note("last"))
    said = " ".join(render_table(replace(document, blocks=blocks), width=60, cut=True).split())
    assert said.endswith("last. --full also shows all kernels, why and these columns: note, path")
    for name in ("md", "html"):
        assert "all kernels" not in RENDERERS[name](replace(document, blocks=blocks))
    assert "--full" not in render_table(replace(document, blocks=blocks), width=60, full=True)


def test_a_column_that_distinguishes_rows_is_never_hidden() -> None:
    """Bug: two rows differed only in a shortened config, and their phases were hidden."""
    columns = [
        Column("m", "module"),
        Column("c", "config", shrink=True, importance="key"),
        Column("p", "phase"),
        Column("a", "ran", importance="answer"),
    ]
    ends = (("d64-fp16", "decode"), ("d128-bf16", "prefill"))
    rows = [("layers.0", f"x2-h32-{'s1-' * 20}{end}", phase, "flash") for end, phase in ends]
    assert 2 not in fit_columns(columns, rows, 34).hidden
    alike = [(*row[:2], "decode", row[3]) for row in rows]
    assert 2 in fit_columns(columns, alike, 34).hidden


def test_a_table_of_details_that_do_not_fit_is_shown() -> None:
    """Bug: the layout of such a table had no lines, which raised an error."""
    columns = (Column("d", "note", importance="detail"),)
    document = Document("t/1", "t", (Table(columns, (("x" * 90,), ("y" * 90,))),), (), ())
    assert render_table(document, width=40, cut=True).startswith("note\nx")


def test_rows_of_different_tables_need_no_column_that_distinguishes_them() -> None:
    """Bug: names of kernels were cut to show a grid that differed only between two tables."""
    columns = (Column("k", "kernel", shrink=True), Column("g", "grid", importance="detail"))
    tables = tuple(
        Table(columns, (("flash_fwd_kernel", grid), ("convert_dq_kernel", "3,1,1")))
        for grid in ("1,1,1", "2,1,1")
    )
    apart = Document("t/1", "t", (tables[0], Heading("Other"), tables[1]), (), ())
    assert "1,1,1" not in render_table(apart, width=22, cut=True)
    joined = Document("t/1", "t", (Table(columns, (*tables[0].rows, *tables[1].rows)),), (), ())
    assert "1,1,1" in render_table(joined, width=22, cut=True)


def test_the_name_behind_a_mark_is_cut_and_continued_like_other_names() -> None:
    """Bug: a marked name lost its end, and its second line was not indented."""
    name = "cudnn_sdpa_sm90_fprop_wgmma_knob_7_64x128x64"
    cut = distinct_cuts([name], 34)[name]
    assert cut.endswith("64x128x64")
    assert distinct_cuts([f"- {name}", "attention", f"+ {name}"], 36) == {
        f"- {name}": f"- {cut}",
        f"+ {name}": f"+ {cut}",
    }
    lines = [*chunks(f"+ {name}", 40)]
    assert lines[1].startswith("  ") and "".join(line[2:] for line in lines) == name


def test_a_blank_cell_repeats_the_value_above() -> None:
    """Bug: a blank cell was compared as if it were a value."""
    columns = [
        Column("b", "backend", repeat=False),
        Column("k", "kernel", importance="answer"),
        Column("p", "phase"),
    ]
    alike = [("auto", "gemm", "decode"), ("", "gemm", "prefill")]  # differ only in the phase
    assert fit_columns(columns, alike, 20).hidden == ()
    apart = [("auto", "gemm", "decode"), ("", "softmax", "decode")]
    apart += [("flash", "copy", "decode"), ("", "softmax", "prefill")]  # of another backend
    apart += [(name, "sdpa", "decode") for name in ("cudnn", "math", "fa3", "fa2", "naive")]
    assert fit_columns(columns, apart, 20).hidden == (2,)


def test_a_wide_table_is_printed_in_blocks_of_columns_with_full() -> None:
    """Bug: each row was a list of names and values, so rows could not be compared by eye."""
    columns = [
        Column("b", "backend", repeat=False),
        Column("k", "kernel", repeat=False, shrink=True),
        *(Column(f"v{at}", f"value {at}", "count") for at in range(5)),
    ]
    rows = (("auto", "k" * 50, 1, 2, 3, 4, 5), ("auto", "gemm", 10, 2, 3, 4, 50))
    document = Document("t/1", "t", (Table(tuple(columns), rows),), (), ())
    assert render_table(document, width=52, cut=True, full=True).splitlines() == [
        "backend",
        "                                 value  value  value",
        "  kernel                             0      1      2",
        "auto",
        f"  {'k' * 29}      1      2      3",
        f"  {'k' * 21}",
        "  gemm                              10      2      3",
        "",
        "backend",
        "                                 value  value",
        "  kernel                             3      4",
        "auto",
        f"  {'k' * 29}      4      5",
        f"  {'k' * 21}",
        "  gemm                               4     50",
    ]


def test_wide_rows_are_lists_of_names_and_values_if_no_value_fits_beside_the_keys() -> None:
    """Bug: one could not see where a row began, and which value belonged to which title."""
    columns = [
        Column("b", "backend", repeat=False),
        Column("k", "kernel", repeat=False),
        *(Column(f"v{at}", f"value {at}", "count") for at in range(5)),
        Column("n", "note"),
    ]
    rows = (("auto", "k" * 50, 1, 2, 3, 4, 5, "n" * 30), ("auto", "gemm", 10, 2, 3, 4, 50, "m"))
    document = Document("t/1", "t", (Table(tuple(columns), rows),), (), ())
    assert render_table(document, width=60, cut=True, full=True).splitlines() == [
        "backend  auto",
        f"kernel   {'k' * 50}",
        f"note     {'n' * 30}",
        "  value 0  1     value 1  2    value 2  3    value 3  4",
        "  value 4  5",
        "",
        "backend  auto",
        "kernel   gemm",
        "note     m",
        "  value 0  10    value 1  2    value 2  3    value 3  4",
        "  value 4  50",
    ]


def test_configs_below_a_shared_module_have_a_line_of_their_own_with_full(tmp_path: Path) -> None:
    """Bug: `layers --full` printed four tables of two rows, each of which repeated the configs."""
    folder, store = ROOT / "traces" / "models" / "llama_generate", tmp_path / "s.db"
    run = ingest_path(store, folder)[0].run
    (shown,) = documents("layers", run, "--full", "--store", str(store))
    lines = render_table(shown, width=80, cut=True, full=True).splitlines()
    assert lines.count("b2-h32-kv8-s256-d64-bf16-causal-q_strides=524288x64x2048x1") == 1
    assert sum("b2-h32-kv8-s256-d64-bf16-causal" in line for line in lines) == 1


def test_a_single_wide_row_has_its_values_in_the_order_of_the_columns() -> None:
    """Bug: the config came before the number of calls, and the figures stood side by side."""
    columns = [
        Column("module", "module"),
        Column("calls", "calls/step", "count"),
        Column("config", "config", importance="key"),
        Column("ran", "ran"),
    ]
    table = Table(tuple(columns), (("m" * 36, 3, "b2-h32", "eager"),))
    document = Document("t/1", "t", (table,), (), ())
    assert render_table(document, width=50, cut=True, full=True).splitlines() == [
        f"module      {'m' * 36}",
        "calls/step  3",
        "config      b2-h32",
        "ran         eager",
    ]


def test_a_shared_text_stands_above_the_table_before_columns_are_hidden() -> None:
    columns = [
        Column("m", "module", shrink=True),
        Column("c", "config", shrink=True, importance="key"),
        Column("n", "calls/step", importance="detail"),
    ]
    rows = [
        ("decoder.0.attention", "b2-h8-s512-d64-fp16", "3"),
        ("decoder.1.attention", "b2-h8-s512-d64-fp16", "4"),
    ]
    assert fit_columns(columns, rows, 80).shared == ()
    layout = fit_columns(columns, rows, 40)
    assert (layout.shared, layout.hidden) == ((1,), ())
    same = [("decoder.0.attention", *row[1:]) for row in rows]
    assert fit_columns(columns, same, 24).shared == (0, 1)


def test_a_shortened_name_refers_to_full() -> None:
    """Bug: nothing said how to print the names that a table shortens."""
    columns = (
        Column("k", "kernel", shrink=True),
        Column("a", "ran", importance="answer"),
        Column("d", "note", importance="detail"),
    )
    rows = (("flash_fwd_splitkv_kernel<128,64x128,w4>", "flash", "x"), ("gemm", "math", "y" * 40))
    short = Table(columns[:2], tuple(row[:2] for row in rows))
    document = Document("t/1", "t", (short,), (), ())
    said = " ".join(render_table(document, width=30, cut=True).split())
    assert said.endswith("--full also shows whole names.")
    hiding = replace(document, blocks=(Table(columns, rows),))
    said = " ".join(render_table(hiding, width=30, cut=True).split())
    assert said.endswith("--full also shows whole names and this column: note")


def test_one_line_names_the_hidden_columns_of_equal_tables() -> None:
    columns = (Column("k", "layer"), Column("d", "note", importance="detail"))
    table = Table(columns, (("attn", "x" * 60),))
    blocks = (Heading("a"), table, Heading("b"), table, Note("last"))
    document = Document("t/1", "t", blocks, (), ())
    text = render_table(document, width=60, cut=True, full=False)
    assert text.count("--full also shows: note\n") == 1
    assert text.index("--full") > text.index("b\n")
    assert "--full" not in render_table(document, width=60, cut=True, full=True)


TIMES = (
    Column("k", "layer"),
    Column("a", "forward µs", "time"),
    Column("b", "low µs", "time"),
    Column("c", "total µs", "time"),
)


def times(*rows: tuple[object, ...]) -> Document:
    return Document("t/1", "t", (Table(TIMES, rows),), ("k", "a"), ({"k": "attn", "a": 7_440},))


def test_a_title_has_the_unit_if_all_times_of_the_column_have_the_same() -> None:
    small, large = ("attn", 7_440, 7_000, 1_000_000), ("mlp", 440, 0, 2_345_678)
    lines = render_table(times(small, large)).splitlines()
    assert lines[0].split() == ["layer", "forward", "µs", "low", "µs", "total", "ms"]
    assert lines[1].split() == ["attn", "7.44", "7.00", "1.00"]
    assert lines[2].split() == ["mlp", "0.440", "0", "2.35"]
    seconds = render_table(times(("attn", 7_440, 7_000, 2e9))).splitlines()
    assert seconds[0].split()[-2:] == ["total", "s"] and seconds[1].split()[-1] == "2.00"


@pytest.mark.parametrize(
    ("attn", "mlp", "unit", "shown"),
    [
        (74_400, 2_345_678, "µs", ("74.4", "2,350")),
        (7_440, 234_567_800, "µs", ("7.44", "235,000")),
        (1_230_000, 2_345_678, "ms", ("1.23", "2.35")),
    ],
)
def test_all_times_of_a_column_have_one_unit(
    attn: int, mlp: int, unit: str, shown: tuple[str, str]
) -> None:
    """Bug: `forward µs` became `forward time` if some times were in µs and others in ms."""
    lines = render_table(times(("attn", attn, 7_000, 1), ("mlp", mlp, 0, 1))).splitlines()
    assert lines[0].split() == ["layer", "forward", unit, "low", "µs", "total", "µs"]
    assert tuple(line.split()[1] for line in lines[1:3]) == shown


@pytest.mark.parametrize(
    ("values", "unit"),
    [
        ((268_000, 90_000, 1_360_000), "µs"),
        ((268_000, 1_360_000), "µs"),
        ((268_000, 1_360_000, 1_400_000), "ms"),
        ((999_960, 2_000_000), "ms"),  # rounded to 1.00 ms
        ((0, 0, 1_360_000), "ms"),
        ((-5_000_000_000, 2_000_000), "ms"),
        ((-5_000_000_000, 2_000_000, 3e9), "s"),
        ((), "µs"),
    ],
)
def test_the_unit_of_a_column_suits_half_of_its_times(values: tuple[float, ...], unit: str) -> None:
    """Bug: one slow backend moved all times to ms, and the answer had 268 µs instead of 0.268 ms."""
    assert common_unit(values) == unit


@pytest.mark.parametrize("values", [(7_440,), (7_440, 2_345_678), (1_000_000,), (0.4, 999_600)])
def test_a_time_is_the_same_in_a_table_and_in_a_sentence(values: tuple[float, ...]) -> None:
    table = Table((TIMES[1],), tuple((value,) for value in values))
    shown = with_time_units(Document("t/1", "t", (table,), (), ())).blocks[0]
    assert isinstance(shown, Table)
    for value, (text,) in zip(values, formatted_rows(shown), strict=True):
        unit = shown.columns[0].title.split()[-1]
        if text.startswith("<"):
            assert time_text(value) == f"{text} {unit}" == "<0.001 µs"
        else:
            number = float(text.replace(",", ""))
            assert time_text(number * UNITS[unit]) == time_text(value)


def test_two_times_of_a_cell_have_one_unit() -> None:
    columns = (Column("a", "call µs", "time"),)

    def lines(*values: object) -> list[str]:
        table = Table(columns, tuple((value,) for value in values))
        return render_table(Document("t/1", "t", (table,), (), ())).splitlines()

    assert lines((7_440, 8_000)) == ["    call µs", "7.44 → 8.00"]
    assert lines((7_440, 2_000_000)) == ["     call µs", "7.44 → 2,000"]
    assert lines((1_200_000, 2_000_000)) == ["    call ms", "1.20 → 2.00"]
    assert lines((7_440, None), (5_000, 5_000)) == [" call µs", "7.44 → -", "    5.00"]


def test_columns_with_the_same_scale_have_the_same_unit() -> None:
    columns = tuple(replace(each, scale="call") for each in TIMES[1:])
    table = Table(columns, ((7_440, 7_000, 2_000_000),))
    lines = render_table(Document("t/1", "t", (table,), (), ())).splitlines()
    assert lines[0].split() == ["forward", "µs", "low", "µs", "total", "µs"]
    assert lines[1].split() == ["7.44", "7.00", "2,000"]


def test_a_cut_name_has_no_ellipsis_where_nothing_is_left_out() -> None:
    """Bug: names with a common end were cut to `…mi300_Qwen_…`, although they begin with mi300."""
    names = [f"{gpu}_Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz" for gpu in ("h100", "mi300")]
    cuts = distinct_cuts(names, 30)
    assert all(cuts[name].startswith(name[:10]) for name in names) and len(set(cuts.values())) == 2


def test_an_interval_has_the_unit_of_its_time() -> None:
    """The title of the interval names no unit."""
    columns = pick(LayerForecast, "predicted_ns", "predicted_interval")
    table = Table(columns, ((1_200_000, (900_000, 1_400_000)),))
    text = render_table(Document("t/1", "t", (table,), (), ()))
    assert text.split()[:2] == ["predicted", "ms/call"]
    assert "1.20  0.900 to 1.40" in text


def test_tables_with_the_same_columns_have_the_same_units() -> None:
    first, second = times(("attn", 7_440, 1, 1)), times(("mlp", 744_000_000, 1, 1))
    document = replace(first, blocks=first.blocks + second.blocks)
    text = render_table(document)
    assert "forward µs" in text and "forward ms" not in text
    assert re.findall(r"^(?:attn|mlp) +(\S+)", text, re.M) == ["7.44", "744,000"]


def test_each_table_below_a_heading_or_a_text_has_a_header() -> None:
    """Bug: tables with the same columns began with bare rows, far below their header."""
    columns = (Column("k", "kernel"), Column("t", "regs", "count"))
    first, second = (Table(columns, ((name, 7),)) for name in ("mm", "bmm"))
    other = Table((Column("m", "module"),), (("attn",),))
    blocks = (Heading("c1"), first, Note("slow"), Heading("c2"), second, first, other, first)
    lines = render_table(Document("t/1", "t", blocks, (), ())).splitlines()
    assert lines == [
        *("c1", "kernel  regs", "mm         7", "slow.", "", "c2", "kernel  regs", "bmm        7"),
        *("", "mm         7"),  # continues the table above
        *("", "module", "attn", "", "kernel  regs", "mm         7"),
    ]


def test_each_line_of_a_row_has_its_own_titles() -> None:
    """Bug: the first line of a title of figures stood beside the title of the groups, like a column."""
    columns = [
        Column("backend", "backend", repeat=False),
        Column("kernel", "kernel", importance="key", shrink=True),
        Column("time", "mean µs/call", "count", importance="answer"),
    ]
    rows = [("all-disabled", "k" * 24, 1), ("all-disabled", "j" * 24, 2)]
    assert fitted(columns, *rows, width=36) == [
        "backend",
        "                               mean",
        "  kernel                    µs/call",
        "all-disabled",
        f"  {'k' * 24}        1",
        f"  {'j' * 24}        2",
    ]


def test_kernels_that_differ_in_their_grid_do_not_look_alike() -> None:
    """Bug: a diff showed two rows with the same name, because it hid the grid."""
    columns = [
        Column("kernel", "kernel", importance="key", shrink=True),
        Column("grid", "grid", "triple", importance="detail"),
        Column("time", "mean µs/call", "count", importance="answer"),
    ]
    rows = [("k" * 30, (512, 1, 1), 1), ("k" * 30, (4096, 1, 1), 2)]
    layout = fit_columns(columns, formatted_rows(Table(tuple(columns), tuple(rows))), 44)
    assert not layout.hidden
    apart = [(f"{name * 30}", *rest) for name, (_, *rest) in zip("ab", rows, strict=True)]
    layout = fit_columns(columns, formatted_rows(Table(tuple(columns), tuple(apart))), 44)
    assert layout.hidden == (1,)


def test_blocks_are_similarly_wide_and_begin_with_the_answer() -> None:
    """Bug: the verdict of a diff stood alone in the last block."""
    columns = (
        Column("k", "kernel", importance="key", shrink=True),
        *(Column(f"v{at}", f"value {at}", "count", importance="detail") for at in range(6)),
        Column("verdict", "verdict", importance="answer"),
    )
    rows = [(name * 40, *range(6), "faster") for name in "ab"]
    layout = fit_columns(columns, formatted_rows(Table(columns, tuple(rows))), 60, full=True)
    assert layout.blocks == ((0, 7, 1, 2), (0, 3, 4, 5, 6))
    assert not layout.cuts  # names continue on a second line


def test_pages_and_markdown_have_the_units_of_the_terminal_and_json_has_ns() -> None:
    document = times(("attn", 7_440, 7_000, 2_345_678))
    page, text = RENDERERS["html"](document), render_markdown(document)
    assert 'data-v="2345678">2.35</td>' in page and "total ms" in page
    assert "| total ms |" in text and "| 2.35 |" in text
    assert json.loads(RENDERERS["json"](document))["rows"] == [{"k": "attn", "a": 7_440}]
    assert "7440" in RENDERERS["csv"](document)


def test_code_is_neither_wrapped_nor_cut() -> None:
    code = "x = 1  # " + "y" * 100
    assert code in render_table(Document("t/1", "t", (Code(code),), (), ()), width=80, cut=True)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "words",
    [("kernels", "2,8,512,64", "--run", "h200-torch2.11"), ("diff", "flash", "math")],
    ids=" ".join,
)
def test_full_keeps_short_names_and_lists_full_names_once(
    traces: Path, words: tuple[str, ...], width: int
) -> None:
    """Bug: the names in the table were shorter with --full, and the full ones had no short names."""
    (shown,) = documents(*words, "--full", "--store", str(traces))
    text = render_table(shown, width=width, cut=True, full=True)
    tables, _, names = text.partition("Full names of the kernels\n")
    assert "…" not in tables and "names in full" not in text
    short, full = "flash_fwd_splitkv_combine<64,m8,split2>", "softmax_warp_forward<float, float"
    assert names.count(f"{short}\n    void") == 1
    assert len(re.findall(r"softmax_warp_forward<fp32,9>\s+void \(anonymous", names)) == 1
    assert full not in tables


def test_kernels_of_the_same_name_in_other_namespaces_are_numbered(traces: Path) -> None:
    with open_store(traces) as opened:
        row = opened.rows(Selection("h200-torch2.11"))[0][0]
    one, other = (
        replace(row, kernel=f"{space}::k<1>(int)", kernel_short="k") for space in ("a", "b")
    )
    assert longer_names([one, other]) == {
        "a::k<1>(int)": "k #1",
        "b::k<1>(int)": "k #2",
    }


def test_kernels_that_differ_only_in_a_lambda_are_numbered(
    models: tuple[Path, dict[str, str]],
) -> None:
    """Bug: --full cut their names to `vectorized_elementwis…1}, array<char*, 2ul> >(int, pow_…`."""
    store, runs = models
    with open_store(store) as opened:
        names = {*longer_names(opened.rows(Selection(runs["llama_train"]))[0]).values()}
    short = "vectorized_elementwise<4, pow_tensor_scalar>"
    assert names == {f"{short} #1", f"{short} #2"}


def test_kernels_whose_short_names_leave_out_the_type_are_told_apart(traces: Path) -> None:
    with open_store(traces) as opened:
        row = opened.rows(Selection("h200-torch2.11"))[0][0]
    names = [
        "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<"
        "(flashinfer::MaskMode)0, 16u, 1u, 2u, 8u, 8u, 1u, 4u, (flashinfer::PosEncodingMode)0, "
        f"{dtype}, {dtype}, {dtype}, float, int, flashinfer::DefaultAttention<false, false, false, "
        "false> >, PagedParams>(PagedParams)"
        for dtype in ("__half", "__nv_bfloat16")
    ]
    shorts = {parse_kernel_name(name).short for name in names}
    assert shorts == {"BatchPrefillWithPagedKVCacheKernel<128,16x128,w4>"}
    rows = [replace(row, kernel=name, kernel_short=next(iter(shorts))) for name in names]
    shown = longer_names(rows)
    assert "__half" in shown[names[0]] and "bfloat16" in shown[names[1]]


def test_negligible_kernels_of_a_call_share_a_line(traces: Path) -> None:
    """Bug: the small kernels of math hid the fused kernels."""
    words = ("kernels", "--run", "h200-torch2.11", "--backend", "math", "--store", str(traces))
    (shown,), (whole,) = documents(*words), documents(*words, "--full")
    assert shown.records == whole.records
    tables, full = ([b for b in doc.blocks if isinstance(b, Table)] for doc in (shown, whole))
    folded = 0
    for table, rest in zip(tables, full, strict=True):
        (name, share, time, launches), keys = (
            [[column.key for column in each.columns].index(key) for key in KEYS]
            for each in (table, rest)
        )
        for at, other in zip((share, time, launches), keys[1:], strict=True):
            total = sum(row[at] for row in table.rows)
            assert total == pytest.approx(sum(row[other] for row in rest.rows))
        assert sum(row[share] < 0.01 for row in table.rows) <= 1
        folded += any(str(row[name]).endswith(" other kernels") for row in table.rows)
    assert folded == 2
    assert any(isinstance(b, More) and b.text == "all kernels" for b in shown.blocks)
