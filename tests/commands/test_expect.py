"""The gate: both witnesses must agree with what was expected."""

from __future__ import annotations

import pytest
from render.view_rows import cell, kernel, math_kernels

from profharness.errors import UsageError
from profharness.measurements.agreement import (
    backend_of_op,
    check_expected_names,
    disagreements,
    unmet_expectations,
)

MATH = "aten::_scaled_dot_product_attention_math"


@pytest.mark.parametrize(
    ("op", "backend"),
    [
        ("aten::_scaled_dot_product_flash_attention", "flash"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "flash"),
        ("aten::_scaled_dot_product_efficient_attention_backward", "efficient"),
        ("aten::_scaled_dot_product_cudnn_attention", "cudnn"),
        (MATH, "math"),
        ("aten::scaled_dot_product_attention", None),
        ("aten::mm", None),
        (None, None),
    ],
)
def test_the_op_names_its_backend(op: str | None, backend: str | None) -> None:
    assert backend_of_op(op) == backend


def test_the_expected_backend_passes() -> None:
    assert unmet_expectations(["flash"], [kernel()], [cell()]) == []


def test_a_silent_fall_to_math_is_caught() -> None:
    cells = [cell(cell="1", backend="auto", sdpa_op=MATH)]
    (line,) = unmet_expectations(["cudnn"], math_kernels(), cells)
    assert "expected cudnn, but math ran" in line
    assert "auto" in line


def test_one_wrong_cell_of_two_fails() -> None:
    cells = [cell(), cell(cell="1", backend="auto", sdpa_op=MATH)]
    assert len(unmet_expectations(["flash"], [kernel(), *math_kernels()], cells)) == 1
    assert unmet_expectations(["flash", "math"], [kernel(), *math_kernels()], cells) == []


def test_kernels_that_contradict_the_op_fail_either_way() -> None:
    cells, rows = [cell(sdpa_op=MATH)], [kernel(sdpa_op=MATH)]
    assert unmet_expectations(["math"], rows, cells)
    assert unmet_expectations(["flash"], rows, cells)
    said = disagreements(cells[0], rows)
    assert any("(math)" in line and "family flash" in line for line in said)
    assert disagreements(cell(), [kernel()]) == []


def test_a_family_covers_its_op_and_its_combine_kernel_only() -> None:
    rows = [kernel(family="flash_splitkv"), kernel(family="flash_combine")]
    assert unmet_expectations(["flash_splitkv"], rows, [cell()]) == []
    assert unmet_expectations(["flash_combine"], rows, [cell()])
    assert unmet_expectations(["flash"], rows, [cell()]) == []


def test_attention_of_a_serving_library_is_judged_by_its_family() -> None:
    rows = [
        kernel(family=family, sdpa_op=None, cell=None, config=None, backend=None)
        for family in ("fmha", "fmha_combine", "moe", "norm", "collective")
    ]
    assert unmet_expectations(["fmha"], rows, []) == []
    (line,) = unmet_expectations(["flash"], rows, [])
    assert "expected flash, but fmha ran (fmha kernels; fmha_combine kernels)" in line


def test_math_without_an_op_shows_by_its_kernels() -> None:
    rows = [kernel(family=family, sdpa_op=None) for family in ("gemm", "softmax", "gemm")]
    assert unmet_expectations(["math"], rows, [cell(sdpa_op=None)]) == []
    assert unmet_expectations(["flash"], rows, [cell(sdpa_op=None)])


def test_a_gate_that_judged_nothing_is_not_met() -> None:
    refused = [cell(status="refused")]
    assert "nothing to judge" in unmet_expectations(["flash"], [], refused)[0]
    assert "nothing to judge" in unmet_expectations(["flash"], [], [])[0]
    unknown = unmet_expectations(["flash"], [], [cell(sdpa_op=None)])
    assert "neither an op nor a kernel" in unknown[0]


def test_a_foreign_trace_is_judged_by_its_ranges() -> None:
    foreign = {"cell": None, "config": None, "backend": None}
    rows = [kernel(**foreign, range="a"), kernel(**foreign, range="b", family="gemm", sdpa_op=None)]
    assert unmet_expectations(["flash"], rows, []) == []
    assert "range a" in unmet_expectations(["cudnn"], rows, [])[0]


def test_a_name_that_cannot_be_expected_is_refused() -> None:
    check_expected_names(["flash", "cudnn_bwd"])
    with pytest.raises(UsageError, match="flahs"):
        check_expected_names(["flahs"])
