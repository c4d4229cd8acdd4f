"""Findings of analyze about repeated reads: by the grid, and by ncu's counters of the caches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_analyze import MACHINE, cell, evidence, kernel

from profharness.commands.analyze.cells import analyze_cell
from profharness.commands.analyze.figures import MEASURED
from profharness.rows import KernelRow


def seen_by_ncu(row: KernelRow, **counted: float) -> list[KernelRow]:
    """Return the row under torch and under ncu, with these counters."""
    names = {"l1": "l1tex__t_bytes.sum", "l2": "lts__t_bytes.sum"}
    metrics = {names[key]: (value, "byte") for key, value in counted.items()}
    return [row, replace(row, profiler="ncu", metrics=metrics)]


def test_one_query_a_block_has_an_intensity_below_1_and_ncu_counts_its_repeats() -> None:
    """64 queries read 64 rows of K and V of 8192 floats each: 2 FLOPs a float of K or V."""
    config = "b1-h4-s64-d8192-fp32"
    row = kernel((64, 4, 1), 1_000_000, 384, (256, 1, 1), 40)
    moved = 64 * 2 * 4 * 64 * 8192 * 4  # 1.07 GB, 32 times the 33.6 MB of Q, K, V and output
    found = analyze_cell(cell(config), seen_by_ncu(row, l1=1.02 * moved, l2=0.4 * moved), MACHINE)
    assert evidence(found, "kv_reread")["intensity of it"] == 0.5
    counted = evidence(found, "cache_traffic")
    assert counted["L1 bytes"] == round(1.02 * moved)
    assert counted["L2 bytes"] == round(0.4 * moved)
    assert counted["intensity of it"] == pytest.approx(0.5 / 1.02, abs=1e-3)
    finding = found.finding("cache_traffic")
    assert finding is not None
    assert (finding.severity, finding.grade) == ("major", MEASURED)
    assert "32.6 times the compulsory 33.6 MB" in finding.sentence
    (remedy,) = [each for each in found.remedies if "more query rows" in each.text]
    assert remedy.findings == ("kv_reread", "cache_traffic", "unused_shared")
    assert found.bottleneck == "K and V traffic"
    few = analyze_cell(cell("b1-h1-s16-d8192-fp32"), [kernel((16, 1, 1))], MACHINE)
    assert few.bottleneck == "few blocks"
    assert few.finding("kv_reread") is not None


@given(st.floats(0.01, 1.5))
def test_what_ncu_did_not_count_is_not_said_to_be_read(part: float) -> None:
    """Blocks that divide head_dim have the same grid as blocks that read all of it."""
    row = kernel((64, 4, 1), shared=384)
    moved = 64 * 2 * 4 * 64 * 8192 * 4
    rows = seen_by_ncu(row, l2=part * moved)
    found = analyze_cell(cell("b1-h4-s64-d8192-fp32"), rows, MACHINE)
    said = [found.finding(code) is not None for code in ("kv_reread", "unused_shared")]
    assert said == [part >= 0.5] * 2
    assert found.finding("cache_traffic") is not None


def test_without_counters_a_kernel_of_nobodys_is_only_supposed_to_read_again() -> None:
    row = kernel((64, 4, 1))
    label = "b1-h4-s64-d8192-fp32"
    alone = analyze_cell(cell(label), [row], MACHINE)
    assert alone.finding("cache_traffic") is None
    supposed = alone.finding("kv_reread")
    assert supposed is not None
    assert "--metrics cache` counts it" in supposed.sentence
    known = analyze_cell(cell(label), [replace(row, family="efficient")], MACHINE).finding(
        "kv_reread"
    )
    assert known is not None
    assert "counts it" not in known.sentence
    counted = analyze_cell(cell(label), seen_by_ncu(row, l1=2e9), MACHINE).finding("kv_reread")
    assert counted is not None
    assert "counts it" not in counted.sentence
