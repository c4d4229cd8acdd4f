"""Exports of a real run with two profilers, and of a real nsys export that was ingested directly."""

from __future__ import annotations

import gzip
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from profharness.attention.config import parse_config
from profharness.cli import find_command
from profharness.errors import NotFoundError, UsageError
from profharness.run import Cell, Protocol, Run, TraceFile, write_run
from profharness.store import ingest_path

command = find_command("export")

DATA = Path(__file__).parents[1] / "data"
RANGE = "b2h8s512d64-fp16/"
CELLS = {"c1": "flash", "c2": "math"}


def unpacked(folder: Path) -> Path:
    path = folder / "nsys-1.sqlite"
    path.write_bytes(gzip.decompress((DATA / "nsys_h200.sqlite.gz").read_bytes()))
    return path


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with one run of two cells, recorded by torch and nsys on an H200."""
    root = tmp_path_factory.mktemp("watched")
    folder = root / "run"
    folder.mkdir()
    text = gzip.decompress((DATA / "kineto_h200.json.gz").read_bytes()).decode()
    with closing(sqlite3.connect(unpacked(folder))) as db:
        for cell, backend in CELLS.items():
            text = text.replace(f'"{RANGE}{backend}"', f'"profharness:{cell}"')
            db.execute(
                "UPDATE NVTX_EVENTS SET text = ? WHERE text = ?",
                (f"profharness:{cell}", f"{RANGE}{backend}"),
            )
        db.commit()
    (folder / "torch.json").write_text(text)
    config = parse_config("2,8,512,64,fp16")
    cells = tuple(Cell(cell, config, backend, "ok") for cell, backend in CELLS.items())
    traces = (TraceFile("nsys", "nsys-1.sqlite"), TraceFile("torch", "torch.json"))
    created = "2026-11-21T10:00:00+00:00"
    profilers = ("events", "nsys", "torch")
    write_run(folder, Run("r1", created, profilers, Protocol(), cells, {}, traces))
    ingest_path(root / "store.db", folder)
    return root / "store.db"


def export(store: Path, *args: str) -> Result:
    return CliRunner().invoke(command, ["latest", "--store", str(store), *args])


def events(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    read: list[dict[str, Any]] = json.loads(result.stdout)["traceEvents"]
    return read


def profilers_of(found: list[dict[str, Any]]) -> set[str]:
    return {event["args"]["profiler"] for event in found if event.get("cat") == "kernel"}


@pytest.mark.parametrize(
    ("options", "profiler", "hint"),
    [
        (
            (),
            "torch",
            "wrote only the launches that torch recorded; to write others, use --profiler nsys or "
            "--profiler all\n",
        ),
        (("--profiler", "nsys"), "nsys", ""),
    ],
)
def test_one_profiler_is_written(
    watched: Path, options: tuple[str, ...], profiler: str, hint: str
) -> None:
    result = export(watched, *options)
    assert profilers_of(events(result)) == {profiler}
    assert result.stderr == hint


def test_all_profilers_stand_apart_and_begin_at_zero(watched: Path) -> None:
    found = events(export(watched, "--profiler", "all"))
    names = {
        e["pid"]: e["args"]["name"].split(":")[0] for e in found if e["name"] == "process_name"
    }
    assert set(names.values()) == {"torch", "nsys"}
    for profiler in ("torch", "nsys"):
        mine = [event for event in found if names[event["pid"]] == profiler]
        assert min(event["ts"] for event in mine if event["ph"] == "X") == 0
        kernels = [event for event in mine if event.get("cat") == "kernel"]
        assert len(kernels) > 10
        assert {event["args"]["profiler"] for event in kernels} == {profiler}
        assert max(event["ts"] for event in kernels) < 60_000_000


def test_a_profiler_without_launches_is_refused(watched: Path) -> None:
    for name, kind in (("ncu", NotFoundError), ("events", UsageError), ("vtune", UsageError)):
        result = export(watched, "--profiler", name)
        assert isinstance(result.exception, kind)
        assert "torch, nsys" in str(result.exception) or "nsys, torch" in str(result.exception)


@pytest.mark.parametrize("name", ["nsys_h200", "nsys_h200_startend"])
def test_an_export_of_nsys_has_all_that_a_torch_run_has(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    path.write_bytes(gzip.decompress((DATA / f"{name}.sqlite.gz").read_bytes()))
    with closing(sqlite3.connect(path)) as db:
        (kernels,) = db.execute("SELECT count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL").fetchone()
    ingest_path(tmp_path / "store.db", path)
    found = events(export(tmp_path / "store.db"))
    by_category: dict[str, list[dict[str, Any]]] = {}
    for event in found:
        by_category.setdefault(f"{event['ph']} {event.get('cat')}", []).append(event)
    assert len(by_category["X kernel"]) == kernels
    assert by_category["X user_annotation"]
    calls = by_category["X cuda_runtime"] + by_category["X cuda_driver"]
    launched = {event["args"]["flow"] for event in calls}
    assert {event["id"] for event in by_category["s ac2g"]} == launched
    assert {event["id"] for event in by_category["f ac2g"]} == launched
    assert len(launched) >= kernels
    assert all(
        e["args"]["grid"] and e["args"]["registers per thread"] for e in by_category["X kernel"]
    )
    for kernel in by_category["X kernel"]:
        call = next(each for each in calls if each["args"]["flow"] == kernel["args"]["flow"])
        assert call["ts"] <= kernel["ts"]
