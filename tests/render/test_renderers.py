"""Compare every renderer with golden files, and check its properties for any text. Check number
formats, declared columns and the reference page.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from view_rows import kernel, sample

from profharness.atlas.predictions import Predicted
from profharness.atlas.rows import AtlasComparison
from profharness.attention.cases import VerificationRow
from profharness.attention.dispatch.by_rule import Explanation
from profharness.columns import Column, columns_of, pick
from profharness.commands.analyze.tables import COLUMNS
from profharness.commands.diff.compare import DiffRow
from profharness.commands.kernels.tables import kernels_document
from profharness.measurements.measurements import BenchRow
from profharness.program.changes import EnvChange
from profharness.program.layer_map import LayerForecast, LayerRow
from profharness.render.document import (
    Document,
    Heading,
    Note,
    Table,
    filled_columns,
    format_value,
)
from profharness.render.fitting import MIN_SHRUNK, distinct_cuts
from profharness.render.renderers import RENDERERS, escape_markdown, harmless
from profharness.rows import CellRow, KernelRow, RunRow
from profharness.traces.kernel_names import parse_kernel_name
from profharness.units import share_text, time_text

GOLDEN = Path(__file__).parent / "golden"
DATA = Path(__file__).parents[1] / "data"


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", list(RENDERERS))
def test_kernels_match_the_golden_file(name: str) -> None:
    check_golden(f"kernels.{name}.txt", RENDERERS[name](kernels_document(*sample())))


def test_full_names_match_the_golden_file() -> None:
    check_golden("kernels.full.txt", RENDERERS["table"](kernels_document(*sample(), full=True)))


def test_json_has_no_nan() -> None:
    text = RENDERERS["json"](kernels_document([kernel(share=float("nan"))]))
    assert json.loads(text)["rows"][0]["share"] is None


def test_empty_answer_has_all_keys() -> None:
    document = kernels_document([])
    assert json.loads(RENDERERS["json"](document)) == {
        "schema": "profharness.kernels/1",
        "answer": ["No kernels were recorded."],
        "rows": [],
        "cells": [],
    }
    assert RENDERERS["csv"](document).splitlines()[0].startswith("run,config,backend")


def test_terminal_table_fits_and_keeps_numbers_whole() -> None:
    text = RENDERERS["table"](kernels_document(*sample()), width=100, cut=True)
    assert max(map(len, text.splitlines())) <= 100
    for number in ("4,2,8", "18.5", "2.5"):
        assert number in text
    assert "…" in text
    assert "these columns: block, smem\nKiB" in text


@pytest.mark.parametrize("width", range(30, 200, 10))
def test_important_numbers_survive_any_width(width: int) -> None:
    text = RENDERERS["table"](kernels_document(*sample()), width=width, cut=True)
    assert {"18.5", "50.0"} <= set(text.split())


def test_color_is_only_used_on_request() -> None:
    document = kernels_document(*sample())
    colored = RENDERERS["table"](document, color=True)
    plain = RENDERERS["table"](document)
    assert "\x1b[" in colored
    assert "\x1b" not in plain
    assert re.sub(r"\x1b\[[0-9;]*m", "", colored).split() == plain.split()


def test_long_label_does_not_indent_other_notes() -> None:
    label = "efficient refused, 2 configs"
    notes = (
        Note("word " * 19 + "word", "short"),
        Note("word " * 19 + "word", label),
        Note("brief", label),
    )
    document = Document("t/1", "t", notes, ("a",), ())
    lines = RENDERERS["table"](document, width=80).splitlines()
    assert [line.partition("word")[0].rstrip() for line in lines] == [
        *("short", ""),
        *(label, "", ""),
        f"{label}  brief",
    ]
    assert lines[1].startswith("       word") and lines[3].startswith("    word")
    assert max(map(len, lines)) <= 80


def _document(text: str) -> Document:
    columns = (Column("name", "name", shrink=True), Column("count", "n", "count"))
    blocks = (Heading(text), Table(columns, ((text, 1), ("x", 2))), Note(text, "on"))
    return Document("t/1", "title", blocks, ("name",), ({"name": text},))


@given(st.text())
def test_any_text_survives_json_and_csv(text: str) -> None:
    document = _document(text)
    assert json.loads(RENDERERS["json"](document))["rows"] == [{"name": text}]
    rows = list(csv.reader(io.StringIO(RENDERERS["csv"](document), newline="")))
    assert rows[1:] == [[harmless(text)]]


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=HYPERLINK(1)", "'=HYPERLINK(1)"),
        ("+1", "'+1"),
        ("-1", "'-1"),
        ("@SUM", "'@SUM"),
        ("\uff1d1+1", "'\uff1d1+1"),
        ("\uff0b1", "'\uff0b1"),
        (" \uff20SUM", "' \uff20SUM"),
        ("\tx", "'\tx"),
        ("a=b", "a=b"),
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x9b31m", r"\x9b31m"),
        ("\ud800", r"\ud800"),
        ("a\rb", "a\nb"),
    ],
)
def test_csv_cell_is_harmless(text: str, cell: str) -> None:
    document = _document(text)
    rows = list(csv.reader(io.StringIO(RENDERERS["csv"](document), newline="")))
    assert rows[1:] == [[cell]]


@given(st.text(st.characters(exclude_categories=())))
def test_machine_formats_escape_control_characters(text: str) -> None:
    for name in ("json", "jsonl", "csv"):
        shown = RENDERERS[name](_document(text))
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", shown)
        shown.encode()
    assert json.loads(RENDERERS["jsonl"](_document(text)))["name"] == text


@given(st.text())
def test_no_text_breaks_a_table_or_controls_the_terminal(text: str) -> None:
    document = _document(text)
    markdown = RENDERERS["md"](document)
    rows = [line for line in markdown.splitlines() if line.startswith("| ")]
    assert len(rows) == 4
    assert all(len(re.findall(r"(?<!\\)(?:\\\\)*\|", row)) == 3 for row in rows)
    table = RENDERERS["table"](document)
    assert all(char.isprintable() for char in table.replace("\n", ""))


def test_markdown_escapes_markup() -> None:
    assert escape_markdown("a<b|c>*") == "a&lt;b\\|c&gt;\\*"
    assert escape_markdown("flash_fwd _x_") == "flash_fwd \\_x\\_"


def test_table_refuses_ragged_rows() -> None:
    with pytest.raises(ValueError, match="a row has 2 values for 1 columns"):
        Table((Column("a", "a"),), ((1, 2),))


@given(width=st.integers(1, 200))
def test_name_is_whole_unless_a_terminal_cuts_it(width: int) -> None:
    assert "n" * 80 in RENDERERS["table"](_document("n" * 80), width=width)


def measured_names() -> list[str]:
    data = json.loads((DATA / "h200_kernel_rows.json").read_text(encoding="utf-8"))
    return list(dict.fromkeys(parse_kernel_name(name).short for name in data["kernels"]))


@pytest.mark.parametrize("width", range(MIN_SHRUNK, 64))
def test_cut_names_of_real_kernels_stay_apart(width: int) -> None:
    names = measured_names()
    shown = [distinct_cuts(names, width).get(name, name) for name in names]
    assert len(names) > 10
    assert len(set(shown)) == len(names)
    assert max(map(len, shown)) <= width


def test_cut_shows_where_names_differ() -> None:
    names = ["elementwise<4, mul>", "elementwise<4, add>", "another_elementwise"]
    assert list(distinct_cuts(names, 12).values()) == [
        "eleme…<…mul>",
        "eleme…<…add>",
        "another_…",
    ]


@given(texts=st.lists(st.text(min_size=1), unique=True), width=st.integers(MIN_SHRUNK, 40))
def test_cut_never_exceeds_its_width(texts: list[str], width: int) -> None:
    assert all(cell_len(cut) <= width for cut in distinct_cuts(texts, width).values())


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
    assert columns["launches_per_call"] == Column(
        "launches_per_call",
        "launches/call",
        "count",
        right=True,
        meaning="number of launches of the kernel in one call",
    )
    keys = list(columns)
    assert keys.index("run") < keys.index("source") < keys.index("call_ns"), "properties come last"
    assert pick(KernelRow, "grid", "backend") == (columns["grid"], columns["backend"])


@pytest.mark.parametrize(
    "row_type",
    [
        *(RunRow, CellRow, KernelRow, LayerRow, LayerForecast, BenchRow, DiffRow, EnvChange),
        *(Predicted, AtlasComparison, VerificationRow, Explanation),
    ],
)
def test_every_field_has_a_meaning(row_type: type) -> None:
    columns = columns_of(row_type)
    assert [each.name for each in fields(row_type) if each.name not in columns] == []
    assert [key for key, column in columns.items() if not column.meaning] == []


ROOT = Path(__file__).resolve().parents[2]


def test_reference_page_is_current() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "make_reference.py"), "check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 µs"),
        (1, "0.001 µs"),
        (512, "0.512 µs"),
        (7_444, "7.44 µs"),
        (440_000, "440 µs"),
        (999_400, "999 µs"),
        (999_600, "1.00 ms"),
        (7_450_000, "7.45 ms"),
        (999_600_000, "1.00 s"),
        (132_000_000_000, "132 s"),
        (9_876_000_000_000, "9,880 s"),
        (-7_444, "-7.44 µs"),
    ],
)
def test_a_time_in_a_sentence_has_three_figures(ns: float, text: str) -> None:
    assert time_text(ns) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, "0 %"),
        (0.0001, "<0.1 %"),
        (0.004, "0.4 %"),
        (0.01, "1 %"),
        (0.0134, "1.3 %"),
        (0.0196, "2 %"),
        (0.0593, "6 %"),
        (0.77, "77 %"),
        (0.9912, "99.1 %"),
        (0.9999, ">99.9 %"),
        (1, "100 %"),
        (1.5, "150 %"),
    ],
)
def test_a_share_in_a_sentence_has_no_more_digits_than_matter(share: float, text: str) -> None:
    assert share_text(share) == text
