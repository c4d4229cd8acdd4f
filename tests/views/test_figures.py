"""Figures as people read them: small ones are not nothing, and unknown columns are not shown."""

from __future__ import annotations

import pytest

from profharness.views.analyze import COLUMNS, _filled
from profharness.views.document import Column, format_value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.001514321, "0.001514"),
        (0.000002, "0.000002"),
        (12.3456, "12.35"),
        (1234.56, "1,235"),
        (1234567.0, "1,234,567"),
        (0.0, "0"),
        (100.0, "100"),
    ],
)
def test_four_figures_of_any_size(value: float, text: str) -> None:
    assert format_value(Column("rate", "TFLOP/s", "figures"), value) == text


def test_a_column_that_nobody_knows_is_left_out() -> None:
    row = dict.fromkeys((column.key for column in COLUMNS), None) | {"backend": "math", "waves": 2}
    assert [column.key for column in _filled(COLUMNS, [row]).columns] == ["backend", "waves"]
