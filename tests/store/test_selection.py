"""`latest` selects the newest run that has the data that a command needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from profharness.attention.config import parse_config
from profharness.errors import NotFoundError
from profharness.run import Cell, Check, Protocol, Run, write_run
from profharness.store import Need, Selection, ingest_path, open_store
from profharness.store.names import StoredRun, name_runs
from profharness.store.selection import older_runs

Folder = Callable[..., Path]
HALF = parse_config("2,8,512,64,fp16")
OTHER = parse_config("1,1,64,64,fp16")
CAPTURED, EXPLAINED, TIMED, TIMED_TOO, CHECKED = (
    "1-captured",
    "2-explain",
    "3-bench",
    "4-bench",
    "5-verify",
)


@pytest.fixture
def path(tmp_path: Path, run_folder: Folder, kineto: Path) -> Path:
    """Return a store with, from old to new, a trace, a capture, `explain --measure`, two timed runs
    and a verification.
    """
    ok = Cell("0", HALF, "flash", "ok", iterations=5, samples={"event": [7000, 7100, 7200]})
    refused = Cell("1", HALF, "cudnn", "refused")
    pending = Cell("2", HALF, "math")
    elsewhere = replace(ok, config=OTHER)
    checked = replace(ok, samples={}, case="plain", checks=(Check("out", True),), asked=HALF.label)
    store = tmp_path / "s.db"
    ingest_path(store, kineto)
    ingest_path(store, run_folder(CAPTURED, "2027-01-01T00:00:00+00:00"))
    explained = run_folder(EXPLAINED, "2027-01-02T00:00:00+00:00", {"c0": ["flash"]})
    (explained / "run.json").write_text(
        (explained / "run.json").read_text().replace('"kind": null', '"kind": "explain"')
    )
    ingest_path(store, explained)
    for name, kind, profilers, cells in (
        (TIMED, "bench", ("events",), (ok, elsewhere)),
        (TIMED_TOO, "capture", ("events",), (ok, refused, pending)),
        (CHECKED, "verify", (), (checked, replace(refused, case="plain"))),
    ):
        cells = tuple(replace(cell, cell=f"c{place}") for place, cell in enumerate(cells))
        created = f"2027-01-0{name[0]}T00:00:00+00:00"
        (tmp_path / name).mkdir()
        write_run(
            tmp_path / name,
            Run(name, created, profilers, Protocol(), cells, {"torch": "2.11"}, kind=kind),
        )
        ingest_path(store, tmp_path / name)
    return store


@pytest.mark.parametrize(
    ("selection", "needs", "run"),
    [
        (Selection(), ("kernels",), CAPTURED),
        (Selection("latest"), ("kernels",), CAPTURED),
        (Selection("latest"), ("run",), TIMED_TOO),
        (Selection("latest"), ("times",), TIMED_TOO),
        (Selection("latest~1"), ("times",), TIMED),
        (Selection("latest~2"), ("times",), CAPTURED),
        (Selection("latest"), ("kernels of configs", "times"), CAPTURED),
        (Selection(None, [HALF]), ("kernels",), EXPLAINED),
        (Selection(None, [HALF], ["flash", "efficient"]), ("kernels",), CAPTURED),
        (Selection(None, [HALF], ["cudnn"]), ("kernels",), EXPLAINED),
        (Selection(None, (), ["flash", "cudnn"]), ("kernels",), CAPTURED),
        (Selection(None, [OTHER]), ("times",), TIMED),
        (Selection(CHECKED), ("kernels",), CHECKED),
        (Selection("3"), ("kernels",), TIMED),
        (Selection(None, (), (), ["nsys"]), ("kernels", "run"), TIMED_TOO),
        (Selection("latest", [OTHER]), ("times",), TIMED_TOO),
        (Selection("latest", (), ["efficient"]), ("kernels",), CAPTURED),
        (Selection("latest", [HALF], ["no-such"]), ("times",), TIMED_TOO),
    ],
)
def test_latest_is_newest_run_with_needed_data(
    path: Path, selection: Selection, needs: tuple[Need, ...], run: str
) -> None:
    with open_store(path) as store:
        assert store.find_run(selection, *needs) == run


@pytest.mark.parametrize(
    ("selection", "needs", "told"),
    [
        (
            Selection(),
            ("kernels",),
            f"Using {CAPTURED}, the latest run that has kernels, not the newest run, {CHECKED} (verify).",
        ),
        (
            Selection(None, [OTHER], ["flash"]),
            ("times",),
            f"Using {TIMED}, the latest run that has times of {OTHER} on flash, not the newest run, "
            f"{CHECKED} (verify).",
        ),
        (
            Selection("latest~1"),
            ("times",),
            f"Using {TIMED} as latest~1, which counts only runs that have times.",
        ),
    ],
)
def test_a_sentence_names_a_run_that_is_not_the_newest(
    path: Path, selection: Selection, needs: tuple[Need, ...], told: str
) -> None:
    with open_store(path) as store, older_runs() as older:
        store.find_run(selection, *needs)
    assert list(older.values()) == [told]


def test_no_sentence_names_the_newest_run_or_a_run_that_the_user_named(path: Path) -> None:
    with open_store(path, write=True) as store, older_runs() as older:
        store.find_run(Selection(TIMED), "times")
        store.find_run(Selection("latest"), "times")
        assert older
        store.delete_run(CHECKED)
        assert store.find_run(Selection("latest"), "times") == TIMED_TOO
    assert not older


def test_earlier_run_has_needed_data_too(path: Path) -> None:
    with open_store(path) as store:
        assert store.find_run(Selection("latest~1")).startswith("trace-")
        with pytest.raises(
            NotFoundError,
            match=f"only 2 stored runs have kernels: {CAPTURED}, kineto_h200.json.gz",
        ):
            store.find_run(Selection("latest~2"))


@pytest.mark.parametrize(
    ("selection", "told"),
    [
        (
            Selection(None, [OTHER]),
            rf"run {TIMED} \(bench --profiler events\) has no kernels; to see it, use",
        ),
        (Selection(None, [OTHER]), rf"use: profharness bench {TIMED} --store \S+/s.db$"),
        (
            Selection(None, [HALF], ["math"]),
            "no stored run has kernels of b2-h8-s512-d64-fp16 on math",
        ),
        (Selection("latest", (), (), ["ncu"]), "no stored run has kernels under ncu"),
    ],
)
def test_error_names_command_that_shows_the_run(
    path: Path, selection: Selection, told: str
) -> None:
    with open_store(path) as store, pytest.raises(NotFoundError, match=told):
        store.find_run(selection)


def test_message_names_how_run_without_kernels_was_made(path: Path) -> None:
    with open_store(path) as store:
        assert store.lack_of_kernels(CAPTURED) is None
        assert f"profharness report {CHECKED}" in str(store.lack_of_kernels(CHECKED))
        assert store.shown_by(CAPTURED) == f"profharness kernels {CAPTURED} --store {path}"
        assert f"({CHECKED[2:]})" in str(store.lack_of_kernels(CHECKED))


def test_rows_of_latest_come_from_run_with_kernels(path: Path) -> None:
    with open_store(path) as store:
        assert {row.run for row in store.kernels()} == {CAPTURED}
        assert len(list(store.launches())) == len(list(store.launches(CAPTURED))) > 0


def test_a_run_that_is_stored_while_runs_are_listed_has_a_name(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may store a run between two queries."""
    with open_store(path) as store:
        whole = {row.run: row.name for row in store.runs()}
        monkeypatch.setattr(type(store), "stored_runs", lambda _: [])
        assert {row.run: row.name for row in store.runs()} == whole
        assert store.run_name(CAPTURED) == store.run_reference(CAPTURED) == CAPTURED


def test_a_folder_that_the_user_named_names_its_run() -> None:
    runs = [
        StoredRun("20260101-000000-aaaa", "run", "/runs/20260101-000000-aaaa"),
        StoredRun("20260101-000000-bbbb", "run", "/models/flex"),
        StoredRun("trace-1", "trace", "/old/flex/trace.json"),
        StoredRun("20260101-000000-cccc", "run", "/old/flex"),
    ]
    assert name_runs(runs) == {
        "20260101-000000-aaaa": "20260101-000000-aaaa",
        "20260101-000000-bbbb": "models/flex",
        "trace-1": "trace.json",
        "20260101-000000-cccc": "old/flex",
    }
