"""Findings of analyze from the counters of the presets of `--metrics`."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from test_analyze import MACHINE, cell, kernel

from profharness.commands.analyze.cells import analyze_cell
from profharness.commands.analyze.counter_rules import THRESHOLDS, WARP_STATE_WORDS
from profharness.commands.analyze.figures import MEASURED, CellAnalysis, analyze_record
from profharness.program.counters import read_counters
from profharness.recording.profilers.ncu_metrics import (
    BANK_CONFLICTS,
    FMA_PIPE,
    ISSUE_ACTIVE,
    L1_HIT_RATE,
    L2_HIT_RATE,
    LOAD_REQUESTS,
    LOAD_SECTORS,
    PRESETS,
    SHARED_WAVEFRONTS,
    STORE_REQUESTS,
    STORE_SECTORS,
    TENSOR_INSTRUCTIONS,
    TENSOR_PIPE,
    TENSOR_PIPE_OF_ADA,
    WARP_STATES,
    warp_state,
)
from profharness.rows import DRAM_READ, DRAM_WRITE

CODES = (
    *("tensor_pipe", "no_tensor_cores", "uncoalesced", "narrow_access", "bank_conflicts"),
    *("hit_rates", "stalls"),
)


def counted(config: str = "b2-h8-s512-d64-fp16", **metrics: float) -> CellAnalysis:
    """Return the analysis of a cell whose only kernel has these counters."""
    row = kernel((128, 1, 1))
    named = {name: (value, "") for name, value in metrics.items()}
    rows = [row, replace(row, profiler="ncu", metrics=named)]
    return analyze_cell(cell(config), rows, MACHINE)


def test_a_finding_needs_its_counter() -> None:
    analysis = counted()
    assert [code for code in CODES if analysis.finding(code)] == []
    assert analysis.kernels[0].counters == read_counters({})


def test_products_without_tensor_cores_are_told_and_what_runs_instead() -> None:
    none = {TENSOR_PIPE: 0.0, TENSOR_INSTRUCTIONS: 0.0, FMA_PIPE: 41.0}
    finding = counted(**none).finding("no_tensor_cores")
    assert finding is not None and finding.severity == "major" and finding.grade == MEASURED
    assert "the FMA pipe is at work in 41.0 %" in finding.sentence
    plain = counted("b2-h8-s512-d64-fp32", **none).finding("no_tensor_cores")
    assert plain is not None and plain.severity == "note" and "without TF32" in plain.sentence
    assert plain.sentence.startswith("my_attention multiplies without tensor cores: their pipe")
    low = counted(**{TENSOR_PIPE: 23.5, TENSOR_INSTRUCTIONS: 1e6})
    assert low.finding("no_tensor_cores") is None
    pipe = low.finding("tensor_pipe")
    assert pipe is not None and "23.5 % of the cycles" in pipe.sentence
    assert counted(**{TENSOR_PIPE: 75.0}).finding("tensor_pipe") is None


def test_on_ada_the_second_name_of_the_tensor_pipe_counts() -> None:
    metrics = {TENSOR_PIPE: (3.0, "%"), TENSOR_PIPE_OF_ADA: (50.0, "%")}
    assert read_counters(metrics).tensor_pipe == 0.5


@pytest.mark.parametrize(
    ("sectors", "code"),
    [(32.0, "uncoalesced"), (16.0, None), (4.0, None), (2.0, "narrow_access")],
)
def test_sectors_of_a_request_tell_scattered_and_narrow_accesses(
    sectors: float, code: str | None
) -> None:
    analysis = counted(**{LOAD_SECTORS: sectors, LOAD_REQUESTS: 100.0})
    made = [each for each in ("uncoalesced", "narrow_access") if analysis.finding(each)]
    assert made == ([code] if code else [])


def test_a_kernel_without_such_requests_has_no_sectors() -> None:
    counters = read_counters(
        {
            LOAD_SECTORS: (0.0, ""),
            LOAD_REQUESTS: (0.0, ""),
            STORE_SECTORS: (math.nan, ""),
            STORE_REQUESTS: (5.0, ""),
        }
    )
    assert (counters.load_sectors, counters.store_sectors) == (None, None)


@pytest.mark.parametrize(("conflicts", "severity"), [(5, None), (20, "minor"), (60, "major")])
def test_bank_conflicts_are_a_part_of_the_passes(conflicts: float, severity: str | None) -> None:
    finding = counted(**{BANK_CONFLICTS: conflicts, SHARED_WAVEFRONTS: 100.0}).finding(
        "bank_conflicts"
    )
    assert (finding and finding.severity) == severity
    if finding:
        assert f"{conflicts:.1f} %" in finding.sentence


def test_hit_rates_are_a_note_for_ncu_starts_with_cold_caches() -> None:
    finding = counted(**{L1_HIT_RATE: 12.5, L2_HIT_RATE: 40.0}).finding("hit_rates")
    assert finding is not None and finding.severity == "note"
    assert "the L1 12.5 % and the L2 40.0 % had" in finding.sentence


def test_dram_bytes_are_told_over_the_time_that_ncu_saw() -> None:
    analysis = counted(**{DRAM_READ: 5e7, DRAM_WRITE: 5e6})
    assert analysis.kernels[0].dram_bytes_per_s == pytest.approx(5.5e7 / 10_000 * 1e9)


@pytest.mark.parametrize(("backend", "helped"), [("mine", True), ("math", False)])
def test_only_the_author_of_a_kernel_can_mend_its_bank_conflicts(
    backend: str, helped: bool
) -> None:
    metrics = {BANK_CONFLICTS: (60.0, ""), SHARED_WAVEFRONTS: (100.0, "")}
    row = kernel((128, 1, 1))
    rows = [row, replace(row, profiler="ncu", metrics=metrics)]
    analysis = analyze_cell(cell("b2-h8-s512-d64-fp16", backend), rows, MACHINE)
    assert analysis.finding("bank_conflicts") is not None
    assert any("swizzle" in remedy.text for remedy in analysis.remedies) == helped


def test_the_state_that_most_warps_wait_in_is_named_with_what_helps() -> None:
    states = {warp_state("long_scoreboard"): 5.0, warp_state("wait"): 2.0}
    states |= {warp_state("selected"): 1.0, warp_state("barrier"): 2.0}
    finding = counted(**states, **{ISSUE_ACTIVE: 25.0}).finding("stalls")
    assert finding is not None
    assert "50.0 % of their time waiting for data from global or local memory" in finding.sentence
    assert "issue in 25.0 % of the cycles" in finding.sentence
    assert counted(**states, **{ISSUE_ACTIVE: 90.0}).finding("stalls") is None
    even = {warp_state(name): 1.0 for name in WARP_STATES}
    assert counted(**even, **{ISSUE_ACTIVE: 25.0}).finding("stalls") is None


def test_every_state_but_the_one_that_issues_has_words() -> None:
    assert {*WARP_STATE_WORDS} == {*WARP_STATES} - {"selected"}
    assert all(source for _, source in THRESHOLDS.values())


def test_every_metric_of_the_presets_is_read() -> None:
    """With all of them every figure of a kernel is known, except those that only Ada has."""
    names = {name for preset in PRESETS.values() for name in preset}
    counters = read_counters(dict.fromkeys(names, (50.0, "")))
    record = analyze_record(counted(**dict.fromkeys(names, 50.0)))["kernels"][0]["counters"]
    assert all(value is not None for value in record.values())
    assert len(counters.warp_states) == len(WARP_STATES)
    assert sum(counters.warp_states.values()) == pytest.approx(1)
