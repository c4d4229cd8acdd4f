"""Compare the document of a diff with golden files."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from view_rows import CONFIG, kernel

from profharness.commands.diff.result import Change, Cost, Diff, DiffRow
from profharness.commands.diff.tables import diff_document
from profharness.program.changes import EnvChange
from profharness.render.renderers import RENDERERS

GOLDEN = Path(__file__).parent / "golden"


def sample() -> Diff:
    split = kernel(
        backend="auto", family="flash_splitkv", kernel_short="flash_fwd_splitkv", grid=(8, 2, 16)
    )
    rows = (
        DiffRow(
            *(CONFIG, "flash", "auto", "call", (), (), 1.25, "slower", ("+25 %, p = 0.001",), ()),
            baseline_ns=8000.0,
            candidate_ns=10000.0,
            basis="graph",
        ),
        DiffRow(
            *(CONFIG, "flash", "auto", "attention", (kernel(),), (split,), 1.0, "changed"),
            ("another grid",),
            (Change("grid", (4, 2, 8), (8, 2, 16)),),
            changed=True,
        ),
        DiffRow(CONFIG, "flash", "auto", "combine", (), (split,), None, "added", (), ()),
    )
    environment = (EnvChange("torch", "2.10.0", "2.11.0", "another choice of backend"),)
    return Diff("a:flash", "b:auto", environment, rows)


@pytest.mark.parametrize("name", list(RENDERERS))
def test_diff_matches_the_golden_file(name: str) -> None:
    text = RENDERERS[name](diff_document(sample()))
    path = GOLDEN / f"diff.{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_environment_comes_before_any_kernel() -> None:
    text = RENDERERS["table"](diff_document(sample()))
    assert text.index("2.11.0") < text.index(CONFIG) < text.index("flash_fwd_splitkv")


def test_json_is_that_of_the_diff() -> None:
    diff = sample()
    assert json.loads(RENDERERS["json"](diff_document(diff))) == json.loads(
        json.dumps(diff.to_json())
    )


def test_full_shows_whole_names() -> None:
    assert kernel().kernel in RENDERERS["table"](diff_document(sample(), full=True))


def test_differences_of_memory_and_launches_name_their_config() -> None:
    costs = (
        Cost(CONFIG, "flash", "auto", "memory", 1024.0, 3072.0, "more", 3.0),
        Cost(CONFIG, "flash", "auto", "launches", 1.0, 1.0, "same", 1.0),
        Cost(CONFIG, "flash", "auto", "refused", "ok", "ok", "same"),
    )
    text = RENDERERS["table"](diff_document(replace(sample(), costs=costs)))
    assert "more: 1.0 → 3.0 KiB at the peak, 3.00x" in text
    assert "a call" not in text
    same = DiffRow(CONFIG, "flash", "auto", "call", verdict="same")
    short = diff_document(Diff("a", "b", (), (same,), costs=costs), changed_first=True)
    assert "peak memory" in RENDERERS["table"](short)
