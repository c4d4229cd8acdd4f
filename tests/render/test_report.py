"""Check sections, formats and files of reports on captured runs and on a made one."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from profharness.attention.config import parse_config
from profharness.attention.dispatch.advice import FLEX_BLOCKS, PACKED
from profharness.cli import find_command
from profharness.columns import Column
from profharness.commands._answers import OF_ALL_DISABLED
from profharness.commands._output import FORMATS, SUFFIX_FORMATS, sentences
from profharness.commands.analyze import analyze
from profharness.commands.analyze.tables import analyze_document
from profharness.commands.bench.tables import latency_charts, rate_blocks
from profharness.commands.diff.compare import Diff, DiffRow
from profharness.commands.explain.calls import program_calls
from profharness.commands.report import (
    FIELDS,
    GLOSSARY,
    WITHOUT_KERNELS,
    _bottleneck_blocks,
    diff_blocks,
    environment_blocks,
    glossary_blocks,
    report_document,
    selection_blocks,
    without_options,
)
from profharness.commands.report.program import program_advice
from profharness.errors import NotFoundError, UsageError
from profharness.measurements.measurements import LENGTH, busy_text, family
from profharness.program.changes import Verdict
from profharness.program.layer_map import CHANGE_CODE, find_layers
from profharness.render.document import (
    Chart,
    Code,
    Document,
    Heading,
    Note,
    Table,
    Timeline,
    for_reading,
)
from profharness.render.renderers import RENDERERS
from profharness.render.terminal import render_table
from profharness.rows import TORCH, Refusal
from profharness.run import Cell, Check, Problem, Protocol, Run, read_run, write_run
from profharness.store import Store, ingest_path, open_store

command = find_command("report")

TRACES = Path(__file__).parents[2] / "traces"


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "store.db"
    for folder in sorted(TRACES.glob("h200-*")):
        ingest_path(path, folder)
    return path


@pytest.fixture
def swept(tmp_path: Path) -> Path:
    """Return a store with a run over three lengths. Math refuses the longest, and a profiler
    failed.
    """
    cells = []
    for place, length in enumerate((128, 256, 512)):
        config = parse_config(f"2,8,{length},64,fp16")
        for name, factor in (("auto", 1), ("flash", 1), ("math", 4)):
            ident = f"c{len(cells):04}"
            if name == "math" and length == 512:
                refusals = (Refusal("memory", "too <large>"),)
                cells.append(Cell(ident, config, name, "refused", refusals=refusals))
                continue
            choice = "math" if name == "math" or length == 128 else "flash"
            times = 4 if choice == "math" and name == "auto" else factor
            samples = [times * 1000 * 4**place + n for n in range(7)]
            cells.append(Cell(ident, config, name, "ok", choice=choice, samples={"event": samples}))
    folder = tmp_path / "swept"
    folder.mkdir()
    problem = Problem("ncu", "no_counters", "no rights", "ask root")
    when = "2026-01-01T00:00:00+00:00"
    environment = {"gpu": "NVIDIA H200", "torch": "2.11"}
    run = Run("20260101-aaaa", when, ("events",), Protocol(), tuple(cells), environment)
    write_run(folder, Run(**{**vars(run), "problems": (problem,)}))
    ingest_path(tmp_path / "store.db", folder)
    return tmp_path / "store.db"


def report(path: Path, *refs: str, **options: Any) -> Document:
    with open_store(path) as store:
        return report_document(store, refs or ("latest",), **options)


def headings(document: Document, level: int = 2) -> list[str]:
    blocks = [block for block in document.blocks if isinstance(block, Heading)]
    return [block.text for block in blocks if block.level == level]


def charts(document: Document) -> dict[str, Chart]:
    return {block.title: block for block in document.blocks if isinstance(block, Chart)}


def invoke(*args: object) -> Result:
    return CliRunner().invoke(command, [str(arg) for arg in args])


def test_run_with_traces_has_its_sections(captured: Path) -> None:
    document = report(captured)
    assert headings(document) == [
        *(
            "Advice",
            "Time per call",
            "Bottlenecks",
            "Selection map",
            "Top kernels",
            "Cells",
            "All times per call",
            "Disagreements",
        ),
        *("Steps of math", "All kernels", "Compared with the atlas", "Device", "Environment"),
        "What the words mean",
    ]
    folded = [each for each in document.blocks if isinstance(each, Heading) and each.folded]
    assert folded[0].text == "Cells"
    assert len(folded) == 9
    assert {chart.kind for chart in charts(document).values()} == {
        "map",
        "dots",
        "roofline",
        "stack",
    }
    assert "b2-h8-s512-d64-fp16" in headings(document, 3)


def test_the_charts_name_the_measurement_of_the_answer(captured: Path) -> None:
    """Bug: `Medians of 30 cold calls` above charts titled `(graph)`."""
    document = report(captured)
    assert any("CUDA-graph replays" in sentence for sentence in document.answer)
    titles = [
        title for title in charts(document) if title.startswith(("Time per call by", "Roofline"))
    ]
    assert titles and all("(CUDA-graph replays)" in title for title in titles)


def test_pages_and_markdown_have_no_hints_of_the_command_line() -> None:
    blocks = Heading("Kernels"), Note("--full shows more", level="hint"), Note("plain")
    document = Document("profharness.test/1", "Test", blocks, (), ())
    assert "--full shows more" in RENDERERS["table"](document)
    for name in ("html", "md"):
        text = RENDERERS[name](document)
        assert "--full shows more" not in text and "plain" in text


def test_two_programs_on_one_gpu_are_compared_once(tmp_path: Path) -> None:
    """Bug: the section `Runs compared` repeated `What changed`."""
    models = Path(__file__).parents[2] / "traces" / "models"
    for name in ("llama_eager", "llama_prefill"):
        ingest_path(tmp_path / "s.db", models / f"{name}.json.gz")
    document = report(tmp_path / "s.db", "latest~1", "latest")
    assert "What changed" in headings(document) and "Runs compared" not in headings(document)
    assert document.extra["layer_classes"]["layers"]


def test_two_runs_have_one_part_each_and_a_diff(captured: Path) -> None:
    document = report(captured, "latest~1", "latest", "latest")
    names = headings(document)
    assert names[0] == "What changed"
    assert names[1:] == [
        *("h200-torch2.11", "h200-torch-nsys-ncu"),
        "What the words mean",
    ]
    assert document.answer and "slower in 2 of the 20 cells" in document.answer[0]
    chart = next(each for each in charts(document).values() if each.kind == "dumbbell")
    assert {row["side"] for row in chart.rows} == {"baseline", "candidate"}
    assert len(document.extra["runs"]) == 2 and document.extra["diff"]["rows"]


def test_same_cells_on_two_gpus_are_side_by_side(swept: Path, tmp_path: Path) -> None:
    run = read_run(tmp_path / "swept")
    other = replace(run, run="20260102-h100", environment={"gpu": "NVIDIA H100 PCIe"})
    (tmp_path / "other").mkdir()
    write_run(tmp_path / "other", other)
    ingest_path(swept, tmp_path / "other")
    document = report(swept, run.run, other.run)
    assert "GPUs compared" in headings(document)
    assert [each["device"] for each in document.extra["classes"]] == [
        *("NVIDIA H200", "NVIDIA H100 PCIe"),
    ]
    # two runs on one kind of GPU have none
    again = replace(run, run="20260103-h200")
    (tmp_path / "again").mkdir()
    write_run(tmp_path / "again", again)
    ingest_path(swept, tmp_path / "again")
    assert "GPUs compared" not in headings(report(swept, run.run, again.run))


def test_steps_of_math_add_up(captured: Path) -> None:
    document = report(captured)
    place = document.blocks.index(
        next(b for b in document.blocks if getattr(b, "text", "") == "Steps of math")
    )
    table = next(block for block in document.blocks[place:] if isinstance(block, Table))
    shares: dict[tuple[str, str], float] = {}
    steps: dict[tuple[str, str], set[str]] = {}
    for config, backend, step, _, _, share in table.rows:
        shares[config, backend] = shares.get((config, backend), 0) + share
        steps.setdefault((config, backend), set()).add(step)
    assert all(total == pytest.approx(1) for total in shares.values())
    assert {"QK^T", "softmax", "PV"} <= steps["b2-h8-s512-d64-fp16", "math"]
    assert ("b2-h8-s512-d64-fp16", "flash") not in shares


def test_records_contain_every_cell_and_json_the_rest(captured: Path) -> None:
    read = json.loads(RENDERERS["json"](report(captured)))
    assert read["schema"] == "profharness.report/1"
    assert list(read["rows"][0]) == list(FIELDS)
    assert {(row["config"], row["backend"]) for row in read["rows"]} == {
        (cell["config"], cell["backend"]) for cell in read["cells"]
    }
    refused = [row for row in read["rows"] if row["status"] == "refused"]
    assert refused and all(row["median_ns"] is None for row in refused)
    assert read["kernels"] and read["runs"][0]["environment"]["gpu"] == "NVIDIA H200"


def test_sweep_is_drawn_as_lines(swept: Path) -> None:
    document = report(swept)
    found = charts(document)
    (latency,) = [each for title, each in found.items() if title.startswith("Time per call")]
    assert latency.kind == "lines"
    points = {(row["seq_len"], row["backend"]): row["µs"] for row in latency.rows}
    assert points[512, "flash"] == pytest.approx(16.003)
    assert (512, "math") not in points
    (rate,) = [each for title, each in found.items() if title.startswith("TFLOP/s")]
    flops = 4 * 2 * 8 * 512 * 512 * 64
    mine = next(row for row in rate.rows if row["seq_len"] == 512 and row["backend"] == "flash")
    assert mine["TFLOP/s"] == pytest.approx(flops / 16.003e-6 / 1e12)


def test_summary_comes_first_in_a_few_sentences(captured: Path, swept: Path) -> None:
    document = report(captured)
    told = document.extra["summary"][0]["sentences"]
    assert document.answer[0].startswith(
        "auto already runs the fastest available backend: cudnn on 3 of 4 configs"
    )
    assert 3 <= len(told) <= 6
    assert told[0].startswith("4 configs on 6 backends") and "24 cells: 20 ok, 4 refused" in told[0]
    assert "; H200, torch 2.11" in told[0]
    assert "cudnn 1 of 4 (head_dim_multiple)" in told[1]
    assert told[2] == "auto ran cudnn on 3 configs, flash on 1 config."
    assert told[3] == (
        "On 4 configs, no other backend that accepts the call is significantly faster than auto."
    )
    assert [item["sentences"] for item in document.extra["summary"]] == [told]
    # charts come before all tables
    kinds = [type(block) for block in document.blocks]
    assert kinds.index(Chart) < kinds.index(Table)

    told = report(swept).extra["summary"][0]["sentences"]
    assert "1 of 3" in report(swept).answer[0]
    assert "math on 1 config" in told[2]
    assert any("On 1 of 3 configs, auto was slower than the fastest" in text for text in told)
    assert "Use flash on 1 config" in told[-2] and "1 profiler or GPU problem" in told[-1]
    assert any(isinstance(block, Code) for block in report(swept).blocks)


def test_glossary_has_only_words_of_the_page() -> None:
    columns = (Column("waves", "waves"), Column("a", "occ%", meaning="of `a`"), Column("b", "b"))
    blocks = [Heading("A"), Table(columns, ((1.0, 2.0, None),)), Note("eager, % slower than it")]
    other = (Column("c", "occ%", meaning="of c"), Column("d", "occ%", meaning="of"))
    blocks.append(Table(other, ((1.0, 2.0),)))
    heading, *notes = glossary_blocks(blocks, ["The GPU time is short."])
    assert isinstance(heading, Heading)
    told = {note.label: note.text for note in notes if isinstance(note, Note)}
    assert list(told) == ["occ%", "GPU time", "waves", "-"]
    assert told["occ%"] == "of a; of c"
    assert glossary_blocks([Heading("paragraph, wavesome")]) == []
    own = (Column("a", "waves", meaning="of the sea"), Column("b", "foam", meaning="on top"))
    texts = {note.label: note.text for note in glossary_blocks([Table(own, ())])[1:]}
    assert texts == {"waves": "of the sea", "foam": "on top"}
    for word, meaning in GLOSSARY.items():
        assert word and meaning and "\n" not in meaning


def test_problems_come_early_with_reasons(swept: Path) -> None:
    document = report(swept)
    assert headings(document)[0] == "Problems"
    assert Note("no rights; ask root", "ncu no_counters", "error") in document.blocks
    assert "too &lt;large&gt;" in RENDERERS["html"](document)


def test_selection_map_shows_what_auto_took(swept: Path) -> None:
    with open_store(swept) as store:
        blocks = selection_blocks(store.cells())
        assert selection_blocks(store.cells(configs=[parse_config("2,8,128,64,fp16")])) == []
    table = blocks[-1]
    assert isinstance(table, Table)
    assert [row[1] for row in table.rows] == ["math", "flash", "flash"]


def test_wrong_backend_has_no_rate() -> None:
    medians = [("b2-h8-s128-d64-fp16", name, 1000.0) for name in ("flash", "mine")]
    medians += [("b2-h8-s256-d64-fp16", name, 2000.0) for name in ("flash", "mine")]
    wrong = {("b2-h8-s128-d64-fp16", "mine"), ("b2-h8-s256-d64-fp16", "mine")}
    chart, note = rate_blocks(medians, "event", None, wrong=wrong)
    assert isinstance(chart, Chart) and {row["backend"] for row in chart.rows} == {"flash"}
    assert isinstance(note, Note) and note.level == "error" and "mine" in note.text


def test_decode_steps_are_a_separate_family() -> None:
    square, decode = parse_config("1,8,256,64,fp16"), parse_config("1,8,1,64,fp16,seq_kv=256")
    assert family(square.label, LENGTH.token) == "b1-h8-d64-fp16"
    assert family(decode.label, LENGTH.token) == "b1-h8-sq1-d64-fp16"
    (chart,) = latency_charts([(each.label, "flash", 1.0) for each in (square, decode)], "event")
    assert chart.kind == "dots"


def test_figures_of_bench_are_added_on_request(captured: Path) -> None:
    document = report(captured, bench=True)
    # Bug: an empty section `Time per call` preceded the section with the table.
    assert "Bench" not in headings(document)
    names = [each.text for each in document.blocks if isinstance(each, Heading)]
    assert names[names.index("Time per call") + 1].startswith("Benchmark of run ")
    assert {row["measurement"] for row in document.extra["bench"]} >= {"event", "graph"}
    assert "bench" not in report(captured).extra


def test_checks_have_a_section(tmp_path: Path) -> None:
    config = parse_config("1,2,16,64,fp16")
    checks = (Check("out", False, "off by one", 1.0, 0.1, 1.0, 0.1),)
    cell = Cell("c1", config, "mine", "ok", checks=checks, case="plain", asked=config.label)
    folder = tmp_path / "run"
    folder.mkdir()
    when = "2026-01-01T00:00:00+00:00"
    write_run(folder, Run("20260101-bbbb", when, ("events",), Protocol(), (cell,), {"torch": "2"}))
    ingest_path(tmp_path / "store.db", folder)
    with pytest.raises(NotFoundError, match="profharness report run"):
        report(tmp_path / "store.db")
    document = report(tmp_path / "store.db", "20260101")
    assert "Verification" in headings(document)
    assert document.extra["verifications"][0]["passed"] is False
    assert "off by one" in RENDERERS["md"](document)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_can_be_printed(swept: Path, name: str) -> None:
    result = invoke("--store", swept, "--format", name)
    assert result.exit_code == 0, result.output
    assert "b2-h8-s128-d64-fp16" in result.stdout


def test_suffix_selects_the_format(swept: Path, tmp_path: Path) -> None:
    assert set(SUFFIX_FORMATS.values()) == set(FORMATS)
    for suffix in SUFFIX_FORMATS:
        result = invoke("--store", swept, "-o", tmp_path / f"out{suffix}")
        assert result.exit_code == 0, result.output
    assert (tmp_path / "out.html").read_text().startswith("<!DOCTYPE html>")
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    rows = list(csv.DictReader(io.StringIO((tmp_path / "out.csv").read_text())))
    assert [json.loads(line)["backend"] for line in lines] == [row["backend"] for row in rows]
    with pytest.raises(UsageError, match=r"no format has this suffix"):
        command.main(["--store", str(swept), "-o", f"{tmp_path}/a.xyz"], standalone_mode=False)


@pytest.mark.parametrize(("kind", "start"), [("svg", b"<svg"), ("png", b"\x89PNG")])
def test_markdown_has_its_pictures_next_to_it(
    swept: Path, tmp_path: Path, kind: str, start: bytes
) -> None:
    result = invoke("--store", swept, "-o", tmp_path / "out.md", "--images", kind)
    assert result.exit_code == 0, result.output
    text = (tmp_path / "out.md").read_text()
    pictures = sorted(tmp_path.glob(f"out-*.{kind}"))
    assert len(pictures) == len(charts(report(swept)))
    for picture in pictures:
        assert f"(<{picture.name}>)" in text
        assert picture.read_bytes().startswith(start)


def test_existing_picture_is_an_error_before_anything_is_written(
    swept: Path, tmp_path: Path
) -> None:
    (tmp_path / "out-2.svg").write_text("mine")
    result = invoke("--store", swept, "-o", tmp_path / "out.md")
    assert isinstance(result.exception, UsageError)
    assert not (tmp_path / "out.md").exists() and not (tmp_path / "out-1.svg").exists()
    assert (tmp_path / "out-2.svg").read_text() == "mine"


def test_without_charts_nothing_is_drawn(swept: Path, tmp_path: Path) -> None:
    code = (  # in a new process
        "import sys\nfrom profharness.cli import find_command\ncommand = find_command('report')\n"
        f"command.main(['--store', {str(swept)!r}, '--no-charts', '-o', 'o.html'], standalone_mode=False)\n"
        "assert not {'altair', 'vl_convert', 'pandas', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert "<svg" not in (tmp_path / "o.html").read_text()


def test_charts_that_need_the_extra_are_left_out_with_a_hint(
    captured: Path, tmp_path: Path
) -> None:
    for name in ("o.html", "o.md"):
        code = (
            "import sys\nsys.modules['altair'] = None\nfrom profharness.cli import main\n"
            f"sys.argv = ['profharness', 'report', '--store', {str(captured)!r}, '-o', {name!r}]\n"
            "main()"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "pip install 'profharness[report]'" in done.stderr
    page = (tmp_path / "o.html").read_text()
    assert "<svg" not in page
    assert "Kernel time by step" in page  # a chart that needs no library
    assert "![" not in (tmp_path / "o.md").read_text()


def test_changes_come_before_equal_rows() -> None:
    labels = ("b1-h1-s64-d64-fp16", "b2-h1-s64-d64-fp16", "b3-h1-s64-d64-fp16")
    verdicts: tuple[Verdict, ...] = ("same", "slower", "same")
    rows = [
        DiffRow(label, "flash", "flash", "call", verdict=verdict)
        for label, verdict in zip(labels, verdicts, strict=True)
    ]
    blocks = diff_blocks(Diff("a", "b", (), tuple(rows)))
    titles = [block.text for block in blocks if isinstance(block, Heading)]
    assert titles[2:] == [labels[1], "Cells without any difference in kernels"]
    notes = [(block.label, block.text) for block in blocks if isinstance(block, Note)]
    assert [(labels[0], "flash"), (labels[2], "flash")] == notes[-2:]


def test_trace_without_machine_has_no_environment() -> None:
    blocks = environment_blocks({"schemaVersion": 1, "trace_id": "AB12"})
    assert [type(block) for block in blocks] == [Heading, Note]
    table = environment_blocks({"schemaVersion": 1, "gpu": "H200"})[1]
    assert isinstance(table, Table) and table.rows == (("gpu", "H200"),)


def test_report_on_both_captured_runs_is_small(captured: Path) -> None:
    assert len(RENDERERS["html"](report(captured, "latest~1", "latest"))) < 2_000_000


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Document:
    """The report on a program of which the advice is to replace eager attention."""
    path = tmp_path_factory.mktemp("eager") / "s.db"
    ingest_path(path, Path(__file__).parents[2] / "traces" / "models" / "llama_eager.json.gz")
    return report(path)


def test_a_report_names_its_file_and_puts_advice_first(eager: Document) -> None:
    assert eager.title == "llama_eager.json.gz: attention report"
    shown = ["Advice", "The step", "Layers", "Top kernels", "Timeline", "All kernels"]
    assert headings(eager)[: len(shown)] == shown


@pytest.fixture(scope="module")
def efficient(tmp_path_factory: pytest.TempPathFactory) -> Document:
    """The report on a program that runs efficient, although its H200 has a faster backend."""
    path = tmp_path_factory.mktemp("efficient") / "s.db"
    ingest_path(path, Path(__file__).parents[2] / "traces" / "models" / "bert_fp32.json.gz")
    return report(path)


def test_the_answer_on_a_program_says_why_and_what_is_faster(efficient: Document) -> None:
    cost, why, change, *_ = efficient.answer
    assert cost.startswith("Attention takes 11 % of the GPU time")
    assert why.startswith("efficient ran because PyTorch refuses flash (")
    assert change == (
        "To run cudnn, compute in bf16 instead of fp32: predicted to save about 381 µs of GPU time "
        "per step, minus the time to prepare the inputs (33.6 µs instead of 161 µs per call)."
    )
    blocks = efficient.blocks
    assert blocks[0] == Heading("Advice")
    code = next(block for block in blocks if isinstance(block, Code))
    assert "torch.autocast" in code.text and blocks.index(code) == 2
    # Bug: the code cast only the inputs of attention, and left most products in fp32.
    assert sum("torch.autocast" in each.text for each in blocks if isinstance(each, Code)) == 1
    saves = blocks[3]
    assert isinstance(saves, Note) and saves.text.endswith(
        "minus the time to prepare the inputs (33.6 µs instead of 161 µs per call). "
        "torch.autocast also speeds up the fp32 matrix products "
        "outside attention, which take 84 % of the GPU time."
    )
    # Bug: the products that take most of the time and are also in fp32 were not named.
    products = (
        "The fp32 matrix products outside attention take 84 % of the GPU time; bf16 (torch.autocast) "
        "speeds these up, too."
    )
    assert products in efficient.answer
    notes = [block.text for block in blocks if isinstance(block, Note)]
    assert why.rstrip(".") not in notes  # said once


def test_fp32_products_have_advice_of_their_own_beside_attention_in_bf16(tmp_path: Path) -> None:
    ingest_path(tmp_path / "s.db", TRACES / "models" / "bert_fp32.json.gz")
    with open_store(tmp_path / "s.db") as store:
        layers = find_layers(store, store.resolve("latest"))
    assert not program_calls(replace(layers, other_work=())).autocast
    blocks = program_advice(replace(layers, platform=None)).blocks
    head, code = blocks[1:3]
    title = "Compute the fp32 matrix products in bf16"
    assert head == Heading(title, "84 % of the GPU time", level=3)
    assert isinstance(code, Code) and "torch.autocast" in code.text
    little = tuple(replace(work, ns=0.19 * layers.gpu_ns) for work in layers.other_work)
    assert not program_advice(replace(layers, platform=None, other_work=little)).blocks


def test_explain_and_report_have_one_code_for_a_change(tmp_path: Path, efficient: Document) -> None:
    code = next(block for block in efficient.blocks if isinstance(block, Code))
    trace = TRACES / "models" / "bert_fp32.json.gz"
    arguments = [str(trace), "--store", str(tmp_path / "s.db")]
    done = CliRunner().invoke(find_command("explain"), arguments)
    assert all(line.strip() in done.stdout for line in code.text.splitlines())


def test_comments_in_code_are_short(tmp_path: Path) -> None:
    """Bug: a phone wrapped a comment, so that its second line looked like code."""
    trace = TRACES / "models" / "bert_fp32.json.gz"
    ingest_path(tmp_path / "s.db", trace)
    codes = [block.text for block in report(tmp_path / "s.db").blocks if isinstance(block, Code)]
    codes += [PACKED, FLEX_BLOCKS, *CHANGE_CODE.values()]
    comments = [line for code in codes for line in code.splitlines() if line.startswith("#")]
    assert any("then compute in bf16" in line for line in comments)
    assert max(map(len, comments)) <= 64


def test_advice_that_is_not_faster_is_not_given(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    ingest_path(path, Path(__file__).parents[2] / "traces" / "models" / "vit.json.gz")
    document = report(path)
    assert headings(document, 3)[0] == "Reduce the launch overhead"
    assert not any(text.startswith("To run") for text in [*document.answer, *headings(document, 3)])


def test_top_kernels_name_the_kernel_of_each_backend(captured: Path) -> None:
    """Bug: 11 of the 15 kernels prepared others on math."""
    blocks = report(captured).blocks
    place = next(n for n, each in enumerate(blocks) if getattr(each, "text", "") == "Top kernels")
    heading, table = blocks[place : place + 2]
    assert isinstance(heading, Heading) and isinstance(table, Table)
    assert heading.detail.startswith("the longest kernel of each config on each backend; ")
    cells = [row[:2] for row in table.rows]
    assert len(cells) == len(set(cells))
    assert {backend for _, backend in cells} >= {"auto", "flash", "efficient", "cudnn", "math"}


def test_the_glossary_explains_the_columns_of_this_page(eager: Document) -> None:
    """Bug: it had the meanings that the words have in reports on benchmarks."""
    shown = for_reading(eager).blocks
    tables = [block for block in shown if isinstance(block, Table)]
    meanings = {each.title: each.meaning for table in tables for each in table.columns}
    place = next(n for n, b in enumerate(shown) if getattr(b, "text", "") == "What the words mean")
    told = {note.label: note.text for note in shown[place + 1 :] if isinstance(note, Note)}
    assert told["ran"] == "the backend that computed the calls"
    for meaning in ("time per step", "total time of the kernel's launches per step"):
        assert meaning in told["mean µs/step"]
    assert told["launches"] == "number of launches in the range, such as a step"
    shares = [title for title in meanings if title.startswith("% of")]
    assert set(shares) == {"% of step", "% of GPU time", "% of smem"}
    # The tables of kernels and of layers have one name for a share, with the meaning of each.
    assert all(meanings[title] in told[title] for title in shares)
    assert not {"eager", "cell", "median"} & set(told)


def test_a_chart_shows_the_times_of_the_tables(eager: Document) -> None:
    """Bug: the legend had 0.781 ms for a time that other texts called 781 µs.

    Later bug: the GPU was idle for 58 % of the step in the answer, and for 58.5 % in the chart.
    """
    (step,) = (block for block in eager.blocks if isinstance(block, Chart))
    assert [row["label"] for row in step.rows][:2] == ["2.36 ms · 25 %", "781 µs · 8 %"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Document:
    """The report on a program with a mask in fp32, for which several changes are possible."""
    path = tmp_path_factory.mktemp("bert") / "s.db"
    ingest_path(path, TRACES / "models" / "bert_fp32.json.gz")
    return report(path)


def test_a_report_does_not_name_options_of_other_commands(bert: Document) -> None:
    """Bug: a page said `specify another with --torch`."""
    notes = [
        block.text for block in bert.blocks if isinstance(block, Note) and block.level != "hint"
    ]
    assert "The run does not record its PyTorch release, so 2.11.0 is assumed." in notes
    assert not [text for text in (*notes, *bert.answer) if "--" in text]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("It assumes 2.11; specify another with --torch.", "It assumes 2.11."),
        ("It is not read; to compare calls, write: profharness bench 2,8,512,64", "It is not read"),
        ("It has no shapes; record it with record_shapes=True", None),
        ("The trace has no modules. Record it with `profharness observe` under nsys.", None),
    ],
)
def test_a_clause_on_another_command_is_left_out(text: str, shown: str | None) -> None:
    assert without_options(text) == (shown or text)


def test_a_report_folds_the_other_changes_that_explain_shows(bert: Document) -> None:
    """Bug: the report had only the first of five changes."""
    start = next(
        at
        for at, block in enumerate(bert.blocks)
        if isinstance(block, Heading) and block.text == "Other changes"
    )
    heading, *rest = bert.blocks[start:]
    assert isinstance(heading, Heading) and heading.folded and heading.level == 3
    assert heading.detail == "b8-h12-s384-d64-fp32-mask=bool-mask_shape=b1qk-layout=bshd"
    own = rest[: next(at for at, block in enumerate(rest) if isinstance(block, Heading))]
    notes = [block.text for block in own if isinstance(block, Note)]
    assert len(notes) == sum(isinstance(block, Code) for block in own) == 4
    assert "cudnn takes 14.2 µs plus the time to prepare the inputs, instead of 161 µs" in notes[0]
    assert "cudnn takes 16.0 µs plus the time to prepare the inputs, instead of 161 µs" in notes[1]
    assert "pack the sequences" in notes[2]
    assert notes[3].startswith("To run flex: turn the mask into a BlockMask")


def test_the_table_of_latencies_leaves_shortest_samples_to_the_details(tmp_path: Path) -> None:
    ingest_path(tmp_path / "s.db", TRACES / "h200-torch2.11")
    tables = [
        [column.title for column in block.columns]
        for block in report(tmp_path / "s.db").blocks
        if isinstance(block, Table) and "p10_ns" in [column.key for column in block.columns]
    ]
    first, whole = tables
    assert "min µs/call" not in first and "min µs/call" in whole


def test_the_timeline_as_a_table_lists_launches(eager: Document) -> None:
    place, heading = next(
        (number, block)
        for number, block in enumerate(eager.blocks)
        if isinstance(block, Heading) and block.text == "The timeline as a table"
    )
    assert heading.detail == "the 100 longest of 194 launches"
    table = eager.blocks[place + 1]
    assert isinstance(table, Table)  # the trace has one stream
    assert [each.key for each in table.columns] == [
        *("start_ns", "duration_ns", "name", "series", "detail"),
    ]
    named = [row[2] for row in table.rows if row[2] in eager.full_names]
    assert all(len(name) < min(map(len, eager.full_names[name])) for name in named)
    assert named


def test_kernels_with_one_short_name_have_rows_of_their_own(tmp_path: Path) -> None:
    """Bug: two convolutions of cuDNN were one row, because their short names are equal."""
    ingest_path(tmp_path / "s.db", TRACES / "models" / "whisper.json.gz")
    document = report(tmp_path / "s.db")
    assert Heading("Top kernels", "the 15 longest of 32 kernels") in document.blocks
    tables = [each for each in document.blocks if isinstance(each, Table)]
    top = next(each for each in tables if each.columns[0].key == "kernel_short")
    names = [row[0] for row in top.rows]
    assert len(set(names)) == 15
    convolutions = [name for name in names if "tilesize" in name]
    assert [name.partition("tilesize")[2][:3] for name in convolutions] == ["64x", "256"]
    (timeline,) = (each for each in document.blocks if isinstance(each, Timeline))
    drawn = {span.name for lane in timeline.lanes for span in lane.spans}
    assert drawn.issuperset(convolutions)
    assert all(len(document.full_names[name]) == 1 for name in convolutions)


def test_a_warning_on_a_program_stands_in_its_report_once(tmp_path: Path) -> None:
    """Bug: the warnings of a trace stood under the problems and under the layers."""
    trace = json.loads(gzip.decompress((TRACES / "models" / "vit.json.gz").read_bytes()))
    calls = [each for each in trace["traceEvents"] if each.get("cat") == "cuda_runtime"]
    left_out = [id(each) for each in calls[::5]]
    trace["traceEvents"] = [each for each in trace["traceEvents"] if id(each) not in left_out]
    (tmp_path / "vit.json").write_text(json.dumps(trace))
    ingest_path(tmp_path / "s.db", tmp_path / "vit.json")
    text = RENDERERS["md"](report(tmp_path / "s.db"))
    assert text.count("launches have no API call") == 1


def test_text_formats_have_the_times_of_a_step_by_kind(tmp_path: Path) -> None:
    """Bug: the section on the step was empty without its bar."""
    trace = Path(__file__).parents[2] / "traces" / "models" / "llama_train.json.gz"
    ingest_path(tmp_path / "s.db", trace)
    text = RENDERERS["md"](report(tmp_path / "s.db"))
    for line in ("| attention: cudnn | 0.440 | 1.3 |", "| idle | 25.5 | 77.4 |"):
        assert line in text


def test_the_advice_for_an_optimizer_has_its_code(tmp_path: Path) -> None:
    """Bug: the change with the largest effect was only in the answer, without code."""
    ingest_path(tmp_path / "s.db", TRACES / "models" / "llama_train.json.gz")
    document = report(tmp_path / "s.db")
    at = document.blocks.index(Heading("Use a fused optimizer", "27 % of the GPU time", level=3))
    fused = Code("optimizer = torch.optim.AdamW(model.parameters(), fused=True)")
    assert document.blocks[at + 1] == fused
    assert any("take 27 % of the GPU time; use fused=True" in text for text in document.answer)


def test_the_remedy_for_an_idle_gpu_has_its_code(tmp_path: Path) -> None:
    """Bug: the advice had only the optimizer, although the GPU was idle for 77 % of the step."""
    ingest_path(tmp_path / "s.db", TRACES / "models" / "llama_train.json.gz")
    blocks = report(tmp_path / "s.db").blocks
    idle = "the GPU is idle for 77 % of the traced step"
    at = blocks.index(Heading("Reduce the launch overhead", idle, level=3))
    assert blocks[at + 1] == Code('model = torch.compile(model, mode="reduce-overhead")')


@pytest.mark.parametrize(
    ("trace", "subjects"),
    [
        ("llama_train", {"Use a fused optimizer": "optimizer"}),
        ("whisper", {"To run flash on": "To run flash on"}),
    ],
)
def test_the_advice_has_the_order_of_the_answer(
    tmp_path: Path, trace: str, subjects: dict[str, str]
) -> None:
    """Bug: the remedy for the idle GPU came first in the advice, but last in the answer."""
    ingest_path(tmp_path / "s.db", TRACES / "models" / f"{trace}.json.gz")
    document = report(tmp_path / "s.db")
    subjects |= {"Reduce the launch overhead": "The GPU is idle"}
    advised = headings(document, 3)[: len(subjects)]
    assert all(title.startswith(each) for title, each in zip(advised, subjects, strict=True))
    details = [each for each in document.blocks if isinstance(each, Heading) and each.detail]
    assert not any(each.detail in each.text for each in details)  # the config stood there twice
    answer = "\n".join(document.answer)
    places = [answer.index(sentence) for sentence in subjects.values()]
    assert places == sorted(places)


def test_the_remedy_for_an_engine_has_no_code(tmp_path: Path) -> None:
    ingest_path(tmp_path / "s.db", TRACES / "serving" / "eager.json.gz")
    _, change, remedy = report(tmp_path / "s.db").blocks[:3]
    assert isinstance(change, Heading) and change.text == "Reduce the launch overhead"
    assert remedy == Note("Let SGLang use CUDA graphs (do not set --disable-cuda-graph).")


def test_a_single_layer_has_no_chart(tmp_path: Path) -> None:
    """Bug: its bar said 100 %, beside its share of the GPU's busy time."""
    trace = Path(__file__).parents[2] / "traces" / "models" / "llama_graph.json.gz"
    ingest_path(tmp_path / "s.db", trace)
    document = report(tmp_path / "s.db")
    assert "Layers" in headings(document)
    assert [block.title for block in document.blocks if isinstance(block, Chart)] == [""]


def test_a_bench_of_kernels_names_the_fastest_backend_and_draws_it(tmp_path: Path) -> None:
    """Bug: without samples of whole calls, the report had no verdict and no chart."""
    ingest_path(tmp_path / "s.db", Path(__file__).parents[2] / "traces" / "serving_bench")
    document = report(tmp_path / "s.db")
    assert document.answer[0].startswith("flashinfer-fa3 is the fastest on 1 of 2 configs")
    assert "Time per call by config and backend (kernel times)" in charts(document)


def test_the_latencies_of_a_capture_need_no_unfolding(tmp_path: Path) -> None:
    ingest_path(tmp_path / "s.db", Path(__file__).parents[2] / "traces" / "h200-torch2.11")
    document = report(tmp_path / "s.db")
    blocks = list(document.blocks)
    start = next(
        at for at, each in enumerate(blocks) if getattr(each, "text", "") == "Time per call"
    )
    table = next(each for each in blocks[start:] if isinstance(each, Table))
    assert [column.key for column in table.columns][-1] == "regret"
    assert len(table.rows) == 24  # bug: the refused cells had no row
    refused = [row[:3] for row in table.rows if row[2] == "refused"]
    assert len(refused) == 4
    assert refused[0] == ("b1-h32-kv8-sq1-skv4096-d128-bf16", "efficient", "refused")


def test_a_capture_does_not_rank_all_disabled(tmp_path: Path) -> None:
    """Bug: `all-disabled` was 0.99x of the fastest in the tables, and the charts showed it."""
    ingest_path(tmp_path / "s.db", Path(__file__).parents[2] / "traces" / "h200-torch2.11")
    document = report(tmp_path / "s.db")
    tables = [each for each in document.blocks if isinstance(each, Table)]
    ranked = [each for each in tables if each.columns[-1].title == "time vs fastest"]
    ranked = [each for each in ranked if each.columns[2].key in ("median_ns", "measurement")]
    assert len(ranked) == 2  # the table below the charts, and all latencies
    for table in ranked:
        for _, backend, *values, ratio in table.rows:
            if "refused" in values:
                continue
            assert (ratio is None) == (backend == "all-disabled")
    drawn = [each for each in document.blocks if isinstance(each, Chart)]
    drawn = [each for each in drawn if each.kind in ("dots", "roofline")]
    assert len(drawn) == 2
    for chart in drawn:
        series = {row[chart.series] for row in chart.rows}
        assert "cudnn" in series and "all-disabled" not in series
    # Bug: another note was between the table and the reason for its blank cells.
    for table in ranked:
        at = document.blocks.index(table)
        assert document.blocks[at + 1] == Note(OF_ALL_DISABLED, "all-disabled")


def test_notes_below_the_table_explain_missing_marks(captured: Path) -> None:
    """Bug: only folded sections told that efficient and cudnn have no marks for some configs.

    Later bugs: the notes stood between the two charts, and then between a chart and the table.
    """
    blocks = list(report(captured).blocks)
    at = next(at for at, each in enumerate(blocks) if getattr(each, "label", "") == "efficient")
    notes = blocks[at : at + 3]
    before = [each for each in blocks[:at] if not isinstance(each, Note)][-1]
    assert isinstance(before, Table) and len(before.rows) == 24
    dim = "refused on b2-h8-s512-d100-fp16: head_dim=100 is not a multiple of 8"
    assert [(note.label, note.text) for note in notes if isinstance(note, Note)] == [
        (
            "efficient",
            "refused on b1-h32-kv8-sq1-skv4096-d128-bf16: num_heads=32 with kv_heads=8 is not "
            "supported",
        ),
        ("efficient", dim),
        ("cudnn", dim),
    ]


def test_the_answer_tells_once_that_auto_is_fine(captured: Path) -> None:
    """Bug: three sentences of the answer said that no backend is faster than auto."""
    told = [text for text in report(captured).answer if re.search(r"\bauto\b", text)]
    assert len(told) == 1
    assert told[0].startswith(
        "auto already runs the fastest available backend: cudnn on 3 of 4 configs"
    )


def test_the_heading_of_advice_says_what_to_change_and_what_it_saves(tmp_path: Path) -> None:
    """Bug: the label of the advice was the config.

    Later bug: the heading repeated a whole sentence of the answer.
    """
    models = Path(__file__).parents[2] / "traces" / "models"
    ingest_path(tmp_path / "s.db", models / "bert_fp32.json.gz")
    blocks = list(report(tmp_path / "s.db").blocks)
    at = next(at for at, each in enumerate(blocks) if getattr(each, "text", "") == "Advice")
    heading, code, note = blocks[at + 1 : at + 4]
    assert isinstance(heading, Heading) and isinstance(code, Code) and isinstance(note, Note)
    assert heading.text == "To run cudnn, compute in bf16 instead of fp32"
    assert heading.detail.startswith("b8-h12-s384")
    assert note.text.startswith("Predicted to save about 381 µs of GPU time per step")


def test_the_mean_of_several_steps_is_called_so(tmp_path: Path) -> None:
    """Bug: the bar had the mean without saying so, above a table that began with the median."""
    ingest_path(tmp_path / "s.db", Path(__file__).parents[2] / "traces" / "serving/eager.json.gz")
    document = report(tmp_path / "s.db")
    chart = next(each for each in document.blocks if isinstance(each, Chart))
    assert list(dict.fromkeys(row[chart.y] for row in chart.rows)) == [
        "decode, mean of 5 steps:",
        "prefill",
    ]
    headed = [each for each in document.blocks if isinstance(each, Heading)]
    heading = next(each for each in headed if each.text == "Steps by phase")
    assert heading.detail == "decode mean 1.86 ms (5 steps); prefill 5.29 ms (1 step)"


def test_the_table_of_layers_has_bars_and_each_layer_is_folded(tmp_path: Path) -> None:
    """Bug: bars repeated the table of layers, and a folded table with few rows repeated the bars."""
    ingest_path(tmp_path / "s.db", TRACES / "models" / "llama_train.json.gz")
    document = report(tmp_path / "s.db")
    at = document.blocks.index(Heading("Layers"))
    table, heading, each = document.blocks[at + 1 : at + 4]
    assert isinstance(table, Table) and table.bars == ("forward_ns", "backward_ns")
    assert heading == Heading("Attention of each layer", "3 layers", level=3, folded=True)
    assert isinstance(each, Table) and len(each.rows) == 3
    (_, *_, share) = table.rows[0][: [column.key for column in table.columns].index("share") + 1]
    assert sum(row[-1] for row in each.rows) == pytest.approx(share)


def test_layers_that_have_rows_of_their_own_have_one_table(tmp_path: Path) -> None:
    ingest_path(tmp_path / "s.db", TRACES / "models" / "llama_graph.json.gz")
    assert "Attention of each layer" not in headings(report(tmp_path / "s.db"), 3)


def test_possible_changes_of_attention_without_advice_are_folded_at_the_end(tmp_path: Path) -> None:
    """Bug: a page began with the heading `Advice` above a folded section only."""
    ingest_path(tmp_path / "s.db", TRACES / "models" / "unet.json.gz")
    found = [block for block in report(tmp_path / "s.db").blocks if isinstance(block, Heading)]
    titles = [heading.text for heading in found]
    assert titles[:3] == ["Advice", "Reduce the launch overhead", "The step"]
    changes = titles.index("Possible changes")
    assert changes > titles.index("Timeline")
    assert (found[changes].level, found[changes].folded) == (2, True)


def test_cells_have_the_words_of_explain(captured: Path) -> None:
    """Bug: the predicted backend was `eligible` or `none`, and the reason was PyTorch's message."""
    document = report(captured, "h200-torch2.11")
    at = next(n for n, each in enumerate(document.blocks) if getattr(each, "text", "") == "Cells")
    table = document.blocks[at + 1]
    assert isinstance(table, Table)
    titles = [column.title for column in table.columns]
    assert "peak MiB" in titles
    told = {row[titles.index("predicted backend")] for row in table.rows}
    # Bug: the column also had the verdict `could run`, which is no backend.
    assert told == {"cudnn", "flash", "efficient", "math", "refused"}
    backends = {
        (row[titles.index("backend")], row[titles.index("predicted backend")]) for row in table.rows
    }
    assert ("math", "math") in backends and ("flash", "cudnn") not in backends
    reasons = {row[titles.index("reason")] for row in table.rows} - {""}
    assert reasons == {
        "num_heads=32 with kv_heads=8 is not supported",
        "head_dim=100 is not a multiple of 8",
        "cudnn: head_dim=100 is not a multiple of 8",
    }
    assert reasons <= document.full_names.keys()


def test_old_cold_calls_are_called_cold(captured: Path) -> None:
    """Bug: `event` for the measurement that `bench` calls cold."""
    document = report(captured, "h200-torch2.11", bench=True)
    text = render_table(document, width=200)
    assert re.search(r" cold +30 +12\.2 ", text) and not re.search(r"\bevent\b", text)
    assert any(block.label == "cold" for block in document.blocks if isinstance(block, Note))


def test_top_kernels_have_the_order_of_kernels(captured: Path, eager: Document) -> None:
    for blocks, per in ((report(captured).blocks, "call"), (eager.blocks, "step")):
        at = next(n for n, each in enumerate(blocks) if getattr(each, "text", "") == "Top kernels")
        table = blocks[at + 1]
        assert isinstance(table, Table)
        titles = [column.title for column in table.columns]
        assert titles.index(f"launches/{per}") + 1 == titles.index(f"mean µs/{per}")


def test_a_terminal_has_no_headings_of_charts(tmp_path: Path) -> None:
    """Bug: `The steps compared` and `Time per call` stood above nothing."""
    models = Path(__file__).parents[2] / "traces" / "models"
    for name in ("llama_eager", "llama_prefill"):
        ingest_path(tmp_path / "s.db", models / f"{name}.json.gz")
    document = report(tmp_path / "s.db", "latest~1", "latest")
    assert "The steps compared" in headings(document)
    text = render_table(document)
    assert "The steps compared" not in text and "What changed" in text


def test_a_report_of_backends_names_diff(captured: Path) -> None:
    with pytest.raises(UsageError, match="profharness diff flash math"):
        report(captured, "flash", "math")


def test_a_report_on_many_programs_begins_with_their_overview(tmp_path: Path) -> None:
    """Bug: the report on a folder had a table with three columns per program, and no answer."""
    models = sorted((TRACES / "models").glob("llama_*.json.gz"))
    for model in models:
        ingest_path(tmp_path / "s.db", model)
    document = report(tmp_path / "s.db", *(model.name for model in models))
    assert document.answer[0].startswith(f"{len(models)} programs: attention takes")
    assert headings(document)[0] == "The programs compared"
    assert "Runs compared" not in headings(document)


def test_a_table_has_the_bottleneck_of_each_backend_and_is_folded_if_it_is_long(
    tmp_path: Path,
) -> None:
    """Bug: the answer said what limits 2 configs, but nothing on the page named these configs."""
    ingest_path(tmp_path / "s.db", TRACES / "h200-torch2.11")
    document = report(tmp_path / "s.db")
    at = next(
        at for at, each in enumerate(document.blocks) if getattr(each, "text", "") == "Bottlenecks"
    )
    head, table = document.blocks[at : at + 2]
    # Bug: the section was folded, although the whole map below it was open.
    assert isinstance(head, Heading) and not head.folded
    # Bug: the section was at the end of the page, far from the times that it explains.
    titles = headings(document)
    assert titles[titles.index("Bottlenecks") - 1] == "Time per call"
    analyses = analyze(store=tmp_path / "s.db").attrs["analyses"]
    analyzed = analyze_document(analyses)
    (whole,) = (each for each in analyzed.blocks if isinstance(each, Table))
    # Bug: even a short table was folded, although it says what limits each backend.
    for count, folded in ((24, False), (25, True)):
        ran = [each for each in analyses if each.figures]
        head, short, *_ = _bottleneck_blocks([*ran, *ran][:count])
        assert isinstance(short, Table) and len(short.rows) == count
        assert isinstance(head, Heading) and head.folded == folded
    assert isinstance(table, Table) and len(table.rows) == 20
    count = len(table.columns)  # the kernels are in another section
    assert whole.columns[:count] == table.columns and whole.columns[count].key == "kernel"
    assert [row[:count] for row in whole.rows] == [*table.rows]
    places = [[each.key for each in table.columns].index(key) for key in ("backend", "bottleneck")]
    found = Counter(row[places[1]] for row in table.rows if row[places[0]] == "cudnn")
    assert found == {"few blocks": 1, "launch": 1, "latency": 1}
    (sentence,) = (each for each in document.answer if "is limited by" in each)
    assert sentence.startswith("On 2 configs, the fastest backend is limited by latency")


def test_the_answer_on_a_capture_has_the_verdict_on_auto(tmp_path: Path) -> None:
    """Bug: only the folded details said that auto is the fastest."""
    ingest_path(tmp_path / "s.db", Path(__file__).parents[2] / "traces" / "h200-torch2.11")
    document = report(tmp_path / "s.db")
    answer = " ".join(document.answer)
    assert "auto already runs the fastest available backend" in answer
    # Bugs: the report said that no change is necessary, although `explain` advises one. Later, only
    # a note under the table had the change, without its code.
    head, change, code, note = document.blocks[:4]
    assert head == Heading("Advice")
    assert isinstance(change, Heading) and isinstance(code, Code) and isinstance(note, Note)
    assert change.detail == "b2-h8-s512-d100-fp16"
    assert change.text == (
        "To run cudnn, pad head_dim from 100 to 104, keep the scale and slice the output"
    )
    assert "F.pad(each, (0, 4))" in code.text
    # Bug: 35.3 µs seemed to contradict the 52.8 µs of a cold call in the table.
    times = "predicted to take 11.4 µs plus the time to prepare the inputs, instead of 35.6 µs per call."
    assert note.text.startswith(f"P{times[1:]} ")
    assert "Both times are kernel times. In this run, the median of" in note.text
    (sentence,) = (each for each in document.answer if "head_dim" in each)
    assert sentence.startswith("To run cudnn on b2-h8-s512-d100-fp16, pad head_dim")
    assert times in sentence
    assert "the fastest backend is limited by latency" in answer


def test_a_report_has_the_warning_that_the_machine_was_busy(
    captured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: `kernels` and `analyze` had this warning, but not the report of the same run."""
    with open_store(captured) as store:
        cells, rows = store.cells("h200-torch2.11"), store.kernels("h200-torch2.11")
    scattered = [
        replace(row, kernel_kind="op", total_ns=4 * (row.total_ns or 0))
        for row in rows
        if row.profiler == TORCH
    ]
    warning = sentences(str(busy_text(scattered, cells)))
    assert warning.startswith("The machine was busy")
    assert warning not in report(captured, "h200-torch2.11").answer
    monkeypatch.setattr(Store, "kernels", lambda *_, **__: scattered)
    assert warning in report(captured, "h200-torch2.11").answer


def test_a_report_has_the_warnings_about_the_traces_of_its_run(
    captured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: only `kernels` had the warnings about incomplete traces."""
    with open_store(captured) as store:
        run = store.resolve("h200-torch2.11")
    monkeypatch.setattr(Store, "warnings", lambda *_: {run: ("a trace is incomplete",)})
    document = report(captured, "h200-torch2.11")
    assert document.blocks[:2] == (
        Heading("Problems"),
        Note("a trace is incomplete", level="warning"),
    )


def test_a_report_without_a_bottleneck_has_only_the_findings(captured: Path) -> None:
    """Bug: the section on bottlenecks repeated the table of times if none was known."""
    analyses = analyze(run="h200-torch2.11", store=captured).attrs["analyses"]
    unknown = [
        replace(
            each,
            bottleneck=None,
            findings=tuple(found for found in each.findings if found.code != "bottleneck"),
        )
        for each in analyses[:4]
    ]
    head, *notes = _bottleneck_blocks(unknown)
    assert head == Heading("Findings")
    assert notes and all(isinstance(each, Note) and each.label for each in notes)
    assert _bottleneck_blocks([replace(each, findings=(), remedies=()) for each in unknown]) == []


def test_a_report_on_a_cpu_has_the_code_of_its_advice_and_says_what_is_missing(
    tmp_path: Path,
) -> None:
    """Bug: the page had neither the code that `explain` shows, nor a word on the missing timeline."""
    torch = pytest.importorskip("torch")
    model = torch.nn.TransformerEncoderLayer(64, nhead=2, batch_first=True)
    with torch.profiler.profile(record_shapes=True, with_stack=True) as recorded:
        model(torch.ones(2, 32, 64))
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    ingest_path(tmp_path / "s.db", tmp_path / "trace.json")
    document = report(tmp_path / "s.db")
    assert Note(WITHOUT_KERNELS) in document.blocks
    head, advice, code, *_ = document.blocks
    assert head == Heading("Advice") and isinstance(advice, Note)
    assert "dropout" in advice.text
    assert isinstance(code, Code) and "F.scaled_dot_product_attention(q, k, v)" in code.text
