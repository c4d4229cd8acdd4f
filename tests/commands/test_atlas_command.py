"""`profharness atlas`: list, add, merge and export, refused input, and atlases made from a store."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from profharness.atlas import predictions
from profharness.atlas.data import (
    Atlas,
    build_atlas,
    read_atlas,
    write_atlas,
)
from profharness.atlas.merge import merge
from profharness.atlas.shards import shard_lines
from profharness.cli import find_command
from profharness.errors import NotFoundError, ProfharnessError, UsageError
from profharness.store import ingest_path

command = find_command("atlas")

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "traces" / "h200-torch2.11"
NAME = "h200-torch2.11.0-cuda13.0-cudnn91900-driver580.159.04"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture
def other(packaged: Atlas, tmp_path: Path) -> Path:
    """Return an atlas of a machine that the package does not have."""
    machine = replace(packaged.machine, gpu="NVIDIA H100 80GB HBM3")
    write_atlas(part(packaged, 0, 40, machine=machine), tmp_path / "h100.npz")
    return tmp_path / "h100.npz"


def part(atlas: Atlas, first: int, last: int, **changed: object) -> Atlas:
    machine = changed.get("machine", atlas.machine)
    return build_atlas(machine, itertools.islice(atlas.cells(), first, last), "part")  # type: ignore[arg-type]


def run(*args: object) -> Result:
    return CliRunner().invoke(command, [str(arg) for arg in args], catch_exceptions=True)


def ok(*args: object) -> Result:
    result = run(*args)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def test_list_has_the_package_and_added_atlases(other: Path) -> None:
    assert NAME in ok("list").stdout
    said = ok("add", other).stderr
    assert "40 new cells of 40" in said
    rows = json.loads(ok("list", "--format", "json").stdout)["rows"]
    assert [(row["origin"], row["gpu"]) for row in rows] == [
        ("package", "NVIDIA H200"),
        ("user", "NVIDIA H100 80GB HBM3"),
    ]
    assert rows[0]["cells"] == sum(rows[0]["statuses"].values()) > 40_000
    again = ok("add", other).stderr
    assert "0 new cells of 40" in again


def test_an_export_can_be_added_again(other: Path, tmp_path: Path) -> None:
    ok("add", other)
    for suffix in ("jsonl", "npz"):
        out = tmp_path / f"out.{suffix}"
        ok("export", "H100", "-o", out)
        ok("add", out, "--atlas", tmp_path / suffix)
        (made,) = (tmp_path / suffix).iterdir()
        assert list(read_atlas(made).cells()) == list(read_atlas(other).cells())
        assert read_atlas(made).machine == read_atlas(other).machine
    first = next(shard_lines(tmp_path / "out.jsonl"))
    assert first["environment"]["gpu"] == "NVIDIA H100 80GB HBM3"


def test_parts_of_one_machine_merge(packaged: Atlas, tmp_path: Path) -> None:
    write_atlas(part(packaged, 0, 30), tmp_path / "a.npz")
    write_atlas(part(packaged, 20, 50), tmp_path / "b.npz")
    ok("merge", "a.npz", "b.npz", "-o", "c.npz")
    assert list(read_atlas(tmp_path / "c.npz").cells()) == list(part(packaged, 0, 50).cells())


def test_merging_does_not_list_all_cells(packaged: Atlas) -> None:
    atlas = part(packaged, 0, 4000)
    tracemalloc.start()
    try:
        merged = merge([atlas])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(merged) == 4000
    assert peak < 5_000_000  # a list of the cells takes 10 MB


def test_different_machines_and_conflicting_cells_are_not_merged(
    packaged: Atlas, other: Path, tmp_path: Path
) -> None:
    write_atlas(part(packaged, 0, 40), tmp_path / "a.npz")
    mixed = run("merge", "a.npz", other, "-o", "c.npz")
    assert isinstance(mixed.exception, UsageError)
    assert "is for gpu NVIDIA H200" in str(mixed.exception)
    cells = list(part(packaged, 0, 40).cells())
    wrong = [
        replace(cell, launches=cell.launches[:-1], choice="math") if at < 3 else cell
        for at, cell in enumerate(cells)
        if cell.status == "ok"
    ]
    write_atlas(build_atlas(packaged.machine, wrong), tmp_path / "b.npz")
    apart = run("merge", "a.npz", "b.npz", "-o", "c.npz")
    assert isinstance(apart.exception, ProfharnessError)
    assert f"of {len(wrong)} shared cells disagree: " in str(apart.exception)
    slow = [replace(cell, kernel_us=(cell.kernel_us or 0) * 1.3) for cell in wrong[3:]]
    write_atlas(build_atlas(packaged.machine, slow), tmp_path / "d.npz")
    slower = run("merge", "a.npz", "d.npz", "-o", "c.npz")
    assert "the median ratio of the times is 1.30" in str(slower.exception)
    assert not (tmp_path / "c.npz").exists()
    added = run("add", "b.npz")
    assert isinstance(added.exception, ProfharnessError)
    assert not (tmp_path / "data").exists()


def test_cells_that_the_package_has_are_not_copied(
    packaged: Atlas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = list(part(packaged, 0, 20).cells())
    write_atlas(build_atlas(packaged.machine, cells), tmp_path / "same.npz")
    assert "0 new cells of 20, so nothing was written" in ok("add", "same.npz").stderr
    assert not (tmp_path / "data").exists()
    new = replace(cells[0], config=replace(cells[0].config, batch=7, seq_len_q=77))
    write_atlas(build_atlas(packaged.machine, [*cells, new]), tmp_path / "more.npz")
    assert "1 new cells of 21" in ok("add", "more.npz").stderr
    (own,) = (tmp_path / "data" / "profharness" / "atlases").iterdir()
    assert [cell.config for cell in read_atlas(own).cells()] == [new.config]
    # a package of as few cells, for all of them take seconds to be merged and packed
    monkeypatch.setattr(predictions, "packaged_atlases", lambda: (tmp_path / "same.npz",))
    ok("export", "H200", "-o", "whole.npz")
    assert len(read_atlas(tmp_path / "whole.npz")) == 21


def test_atlases_of_two_drivers_are_separate(packaged: Atlas, tmp_path: Path) -> None:
    for driver in ("1.1", "2.2"):
        machine = replace(packaged.machine, driver=driver)
        write_atlas(part(packaged, 0, 5, machine=machine), tmp_path / f"{driver}.npz")
        assert "5 new cells of 5" in ok("add", f"{driver}.npz").stderr
    rows = json.loads(ok("list", "--format", "json").stdout)["rows"]
    assert [row["driver"] for row in rows if row["origin"] == "user"] == ["1.1", "2.2"]


def test_a_store_becomes_an_atlas(tmp_path: Path) -> None:
    ingest_path(tmp_path / "store.db", RUN)
    said = ok("add", "--store", "store.db", "--atlas", tmp_path / "own").stderr
    assert "new cells of" in said
    paths = list((tmp_path / "own").iterdir())
    assert paths
    whole = [cell for path in paths for cell in read_atlas(path).cells() if cell.regime == "own"]
    ran = {(cell.config.label, cell.backend): cell for cell in whole}
    cell = ran["b2-h8-s512-d64-fp16", "cudnn"]
    assert (cell.status, len(cell.launches)) == ("ok", 2)
    assert cell.kernel_us == pytest.approx(8.2, abs=1)
    assert cell.graph_us
    assert cell.launches[1].grid == (64, 1, 1)
    none = run("add", "--store", "store.db", "--run", "nothing")
    assert isinstance(none.exception, NotFoundError)


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("add",), "requires an atlas file, or --store"),
        (("add", ".", "--run", "latest"), "add --store"),
        (("merge", "-o", "x.npz"), "at least two files"),
        (("export", "H200"), "requires -o FILE"),
        (("export", "H200", "-o", "x.txt"), "must end in *.npz or *.jsonl"),
        (("export", "B200", "-o", "x.npz"), f"choose from {NAME}"),
    ],
)
def test_errors_name_a_remedy(args: tuple[str, ...], text: str) -> None:
    error = run(*args).exception
    assert isinstance(error, ProfharnessError)
    assert text in str(error)
