"""scripts/check_atlas.py: it reads lines, shards and archives, and its figures come from the model alone."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import check_atlas
import pytest

from profharness.atlas.data import Atlas
from profharness.atlas.shards import shard_lines

HELD_OUT = Path(__file__).parents[1] / "traces" / "atlas-h200-held-out.tar.xz"


@pytest.fixture(scope="module")
def pairs(packaged: Atlas, tmp_path_factory: pytest.TempPathFactory) -> list[check_atlas.Pair]:
    """Return every eighth config of the held-out set, from a file of lines."""
    path = tmp_path_factory.mktemp("lines") / "cells.jsonl"
    rows = (row for row in shard_lines(HELD_OUT) if "config" in row)
    groups = (list(cells) for _, cells in itertools.groupby(rows, key=lambda row: row["config"]))
    kept = ("config", "backend", "choice", "status", "kernel_us", "graph_us", "kernels")
    with path.open("w") as file:
        for cells in itertools.islice(groups, 0, None, 8):
            for cell in cells:
                line = {name: cell[name] for name in kept if name in cell}
                file.write(json.dumps(line) + "\n")
    return check_atlas.pairs_of(path, packaged, "H200", "2.11")


def test_the_model_keeps_its_limits_on_cells_that_it_has_not_seen(
    pairs: list[check_atlas.Pair],
) -> None:
    apart = [each for each in pairs if not each.known]
    assert len(apart) > 0.8 * len(pairs)
    assert {each.estimate.source for each in apart} <= {"model", "floor"}
    figures = check_atlas.figures(apart)
    missed = {name for name, value in figures.items() if not check_atlas.keeps(name, value)}
    # with so few configs, one more or less is half a percent
    few = {"best backend within 3 %": 0.94, "names of kernels in order": 0.965}
    assert missed <= set(few)
    assert all(figures[name] > least for name, least in few.items())
    fused = [each for each in apart if each.estimate.choice != "math"]
    figures = check_atlas.figures(fused)
    assert figures["names of kernels in order"] > 0.99
    assert figures["grid, block, registers, shared memory"] > 0.985


def test_a_wrong_answer_is_counted(pairs: list[check_atlas.Pair]) -> None:
    timed = [each for each in pairs if each.estimate.kernel_us and each.has_launches][:50]
    assert check_atlas.figures(timed)["names of kernels in order"] == 1
    wrong = [
        replace(each, estimate=replace(each.estimate, launches=(), kernel_us=1e9, choice="none"))
        for each in timed
    ]
    figures = check_atlas.figures(wrong)
    assert figures["choice"] == 0
    assert figures["median error of kernel time"] > 1
    assert figures["inside the 90 % interval"] == pytest.approx(
        check_atlas.figures(timed)["inside the 90 % interval"]
    )


def test_a_file_without_cells_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "none.jsonl"
    path.write_text("")
    assert check_atlas.main([str(path)]) == 2
    assert "no cell that ran or was refused" in capsys.readouterr().err
    path.write_text("not JSON\n")
    assert check_atlas.main([str(path)]) == 2
    assert "the line is not a JSON object" in capsys.readouterr().err
