"""Findings of analyze about many cells: common findings, advice per scenario, sweeps and drops."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_analyze import MACHINE, cell, kernel

from profharness.attention.config import parse_config
from profharness.commands.analyze.cells import analyze_all, analyze_cell
from profharness.commands.analyze.figures import CellAnalysis, Evidence, Finding
from profharness.commands.analyze.several import (
    LITTLE_MEMORY,
    changed_problems,
    choices,
    common_findings,
    common_remedies,
    drops,
    merged_text,
    missing_scenarios,
    sweep,
    where,
)
from profharness.commands.analyze.tables import analyze_document
from profharness.render.document import Heading, Note

SQUARE, DECODE = "b2-h8-s512-d64-fp16", "b1-h32-kv8-sq1-skv4096-d128-bf16"
TRAINING = "b2-h8-s512-d64-fp16-causal-bwd"


def cells(**graphs: dict[str, int]) -> list[CellAnalysis]:
    """Return the analyses of configs (by name) with the median graph time of each backend."""
    configs = {"square": SQUARE, "decode": DECODE, "training": TRAINING}
    rows = [
        replace(
            cell(configs[name], backend, graph=(time_ns,) * 30),
            cell=f"{name}-{backend}",
            peak_memory_bytes=(1 + place) << 20,
        )
        for name, times in graphs.items()
        for place, (backend, time_ns) in enumerate(times.items())
    ]
    return analyze_all(rows, [], MACHINE)


def test_numbers_in_names_are_no_figures() -> None:
    one = "flash_kernel<64,64x256,w4> takes 10.0 µs of 1,024 B in fp16, 25.0 % (2 waves)."
    other = "flash_kernel<64,64x256,w4> takes 9.5 µs of 16,384 B in fp16, 25.0 % (3 waves)."
    assert merged_text([one, other]) == (
        "flash_kernel<64,64x256,w4> takes 9.5 to 10.0 µs of 1,024 to 16,384 B in fp16, 25.0 % "
        "(2 to 3 waves)."
    )


@given(st.lists(st.floats(0, 1e9).map(lambda value: f"{value:,.1f}"), min_size=1))
def test_a_merged_figure_spans_all_of_them(numbers: list[str]) -> None:
    text = merged_text([f"It takes {number} µs." for number in numbers])
    values = [float(number.replace(",", "")) for number in numbers]
    ends = [float(part.replace(",", "")) for part in text[9:-4].split(" to ")]
    assert (ends[0], ends[-1]) == (min(values), max(values))


def few_blocks(config: str, backend: str, blocks: int) -> CellAnalysis:
    row = replace(cell(config, backend), cell=f"{config}-{backend}")
    return analyze_cell(row, [kernel((blocks, 1, 1))], MACHINE)


def test_like_findings_are_told_once_with_where_they_hold() -> None:
    labels = ["b1-h1-s64-d64-fp16", "b1-h2-s64-d64-fp16", "b1-h4-s64-d64-fp16"]
    analyses = [few_blocks(label, name, 16) for label in labels for name in ("mine", "other")]
    analyses.append(few_blocks(labels[0], "third", 132 * 2))
    pairs = [(each, item) for each in analyses for item in each.findings]
    (members,) = [own for each, own in common_findings(pairs) if each.code == "few_blocks"]
    assert where(members) == "mine, other at 3 configs"
    remedies = common_remedies([(each, item) for each in analyses for item in each.remedies])
    assert {where(members) for _, members in remedies} == {"mine, other at 3 configs"}
    document = analyze_document(analyses)
    headings = [block.text for block in document.blocks if isinstance(block, Heading)]
    assert "In several configs" in headings
    texts = [block.text for block in document.blocks if isinstance(block, Note)]
    assert len([text for text in texts if "SMs have nothing to do" in text]) == 1
    whole = [
        block.text
        for block in analyze_document(analyses, full=True).blocks
        if isinstance(block, Note)
    ]
    assert len([text for text in whole if "SMs have nothing to do" in text]) == len(analyses) - 1


def test_a_finding_of_one_config_stays_at_its_cell() -> None:
    pairs = [(few_blocks(SQUARE, name, 16),) * 2 for name in ("mine", "other")]
    finding = Finding("few_blocks", "16 blocks.", "major", "derived", (Evidence("b", 16, "", "x"),))
    assert common_findings([(analysis, finding) for analysis, _ in pairs]) == []


def test_idle_warps_beside_missing_blocks_have_one_remedy() -> None:
    row = kernel((16, 1, 1))
    metrics = {"sm__warps_active.avg.pct_of_peak_sustained_active": (2.0, "%")}
    analysis = analyze_cell(cell(), [row, replace(row, profiler="ncu", metrics=metrics)], MACHINE)
    assert analysis.finding("idle_warps") and analysis.finding("few_blocks")
    assert not [each for each in analysis.remedies if each.findings == ("idle_warps",)]
    assert [each for each in analysis.remedies if each.findings == ("few_blocks",)]


def test_the_best_backend_for_each_scenario_with_its_figures() -> None:
    analyses = cells(
        square={"flash": 10_000, "cudnn": 10_100, "math": 50_000},
        training={"flash": 84_000, "cudnn": 55_000, "auto": 55_000},
    )
    made = {(each.scenario, each.config.label): each for each in choices(analyses)}
    prefill = made["prefill", SQUARE]
    assert prefill.best == ("flash", "cudnn") and prefill.runner_up == "math"
    assert prefill.factor == pytest.approx(5)
    training = made["training", TRAINING]
    assert (training.best, training.value, training.runner_up) == (("cudnn",), 55_000, "flash")
    assert made[LITTLE_MEMORY, SQUARE].best == ("flash",)
    assert missing_scenarios(analyses) == {"decode": "1,32,1,128,bf16,kv_heads=8,seq_kv=4096"}
    for scenario, example in (("decode", missing_scenarios(analyses)["decode"]),):
        assert scenario not in missing_scenarios(
            [replace(analyses[0], config=parse_config(example))]
        )


def test_wrong_results_are_never_the_best() -> None:
    analyses = cells(decode={"flash": 10_000, "cudnn": 20_000, "math": 30_000})
    wrong = [replace(each, wrong=each.backend == "flash") for each in analyses]
    assert [each.best for each in choices(wrong)] == [("cudnn",), ("cudnn",)]
    assert choices(cells(decode={"flash": 10_000})) == []


def sized(label: str, time_ns: int) -> CellAnalysis:
    row = replace(cell(label), cell=label)
    return analyze_cell(row, [kernel((264, 1, 1), time_ns)], MACHINE)


def test_drops_of_a_sweep_are_told_where_they_are() -> None:
    labels = [f"b1-h4-s64-d{dim}-fp32" for dim in (512, 1024, 2048)]
    analyses = [sized(*each) for each in zip(labels, (10_000, 21_000, 130_000), strict=True)]
    ((name, group),) = sweep(analyses)
    assert list(drops(name, group)) == [(1024, 2048, pytest.approx(130 / 42))]
    notes = [each.text for each in analyze_document(analyses).blocks if isinstance(each, Note)]
    assert "TFLOP/s fall 3.1 times from head_dim 1024 to 2048" in notes
    assert not list(changed_problems(analyses))


def test_configs_that_change_more_than_head_dim_are_no_sweep() -> None:
    """The published sweep: heads x queries x keys shrink as head_dim grows."""
    labels = ["b1-h4-s64-d512-fp32", "b1-h4-s64-d2048-fp32", "b1-h2-s32-d4096-fp32"]
    labels.append("b1-h1-s16-d8192-fp32")
    ((_, scores),) = changed_problems([sized(label, 10_000) for label in labels])
    assert scores == {512: 16384, 2048: 16384, 4096: 2048, 8192: 256}
    document = analyze_document([sized(label, 10_000) for label in labels])
    (note,) = [
        each
        for each in document.blocks
        if isinstance(each, Note) and "not of head_dim" in each.text
    ]
    assert "16,384, 16,384, 2,048, 256" in note.text
