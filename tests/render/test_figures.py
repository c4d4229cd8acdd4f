"""Check number formats, columns without values, and columns declared at fields."""

from __future__ import annotations

from dataclasses import fields

import pytest

from profharness.columns import Column, columns_of, pick
from profharness.commands.analyze.tables import COLUMNS
from profharness.program.layer_map import LayerForecast, LayerRow
from profharness.render.document import filled_columns, format_value
from profharness.rows import CellRow, KernelRow, RunRow


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
def test_figures_have_four_digits(value: float, text: str) -> None:
    assert format_value(Column("rate", "TFLOP/s", "figures"), value) == text


def test_columns_without_a_value_are_left_out() -> None:
    row = dict.fromkeys((column.key for column in COLUMNS), None) | {"backend": "math", "waves": 0}
    other = row | {"bottleneck": "", "places": ()}
    assert [column.key for column in filled_columns(COLUMNS, [row, other])] == ["backend", "waves"]
    assert filled_columns(COLUMNS, [row], optional=("backend",)) == list(COLUMNS)
    assert "flops_per_s" not in [
        each.key for each in filled_columns(COLUMNS, [row], ("flops_per_s",))
    ]


def test_field_declares_its_column() -> None:
    columns = columns_of(KernelRow)
    assert columns["duration_ns"] == Column(
        "duration_ns", "µs", "us", right=True, meaning="median time of one launch"
    )
    keys = list(columns)
    assert keys.index("run") < keys.index("source") < keys.index("call_ns"), "properties come last"
    assert pick(KernelRow, "grid", "backend") == (columns["grid"], columns["backend"])


@pytest.mark.parametrize("row_type", [RunRow, CellRow, KernelRow, LayerRow, LayerForecast])
def test_every_field_has_a_meaning(row_type: type) -> None:
    columns = columns_of(row_type)
    assert [each.name for each in fields(row_type) if each.name not in columns] == []
    assert [key for key, column in columns.items() if not column.meaning] == []
