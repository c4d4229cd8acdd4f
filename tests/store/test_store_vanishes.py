"""An error with the right counts reports a store that is deleted or replaced while it is written."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import profharness
from profharness.cli import cli
from profharness.commands import ingest as command
from profharness.errors import ProfharnessError, StoreError
from profharness.jobs import into_store as recording
from profharness.recording.capture import RunFolder
from profharness.run import read_run
from profharness.store import ingest, ingest_path, open_store

SOURCES = 5
EVENT = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 5, "dur": 1, "args": {}}
Change = Callable[[Path], object]
Folder = Callable[..., Path]


def delete(store: Path) -> None:
    for path in store.parent.glob(f"{store.name}*"):
        path.unlink()


def rename(store: Path) -> None:
    store.rename(store.with_name("renamed.db"))


def put_text_there(store: Path) -> None:
    text = store.with_name("text")
    text.write_text("no store")
    text.replace(store)


def put_store_there(store: Path) -> None:
    shutil.copyfile(store.with_name("other.db"), store.with_name("copy.db"))
    store.with_name("copy.db").replace(store)


CHANGES: tuple[Change, ...] = (delete, Path.unlink, rename, put_text_there, put_store_there)


@pytest.fixture
def sources(tmp_path: Path, kineto: Path) -> Path:
    """Return a folder of traces beside a store with another run."""
    folder = tmp_path / "traces"
    folder.mkdir()
    for number in range(SOURCES):
        trace = {"traceEvents": [EVENT | {"name": f"kernel {number}"}]}
        (folder / f"{number}.json").write_text(json.dumps(trace))
    ingest_path(tmp_path / "other.db", kineto)
    return folder


def names(store: Path) -> set[str]:
    """Return the files whose runs a store contains; none if there is no valid store."""
    try:
        with open_store(store) as opened:
            assert opened.connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            return {Path(row.path).name for row in opened.runs()} - {"kineto_h200.json.gz"}
    except StoreError:
        return set()


def require_error(text: str, store: Path, sources: Path) -> None:
    """Check that the message counts stored sources, and that its command stores the others."""
    found = re.search(
        r"(\d+) of (\d+) sources were stored, because the file was deleted, replaced or damaged",
        text,
    )
    assert found and (int(found[1]), int(found[2])) == (len(names(store)), SOURCES), text
    if store.exists() and store.read_bytes() == b"no store":
        store.unlink()
    CliRunner().invoke(cli, ["ingest", str(sources), "--store", str(store)], catch_exceptions=False)
    assert len(names(store)) == SOURCES


each_change = pytest.mark.parametrize(
    ("change", "scheduler"), [*((change, None) for change in CHANGES), (delete, "local:1")]
)


@each_change
def test_ingest_fails_for_sources_not_stored(
    sources: Path, change: Change, scheduler: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file changes when the second source is stored."""
    store, report = sources.parent / "s.db", command._report

    def watched(source: Path, results: list[ingest.IngestResult]) -> None:
        report(source, results)
        if source.name == "1.json":
            change(store)

    monkeypatch.setattr(command, "_report", watched)
    options = ["--scheduler", scheduler] if scheduler else []
    done = CliRunner().invoke(cli, ["ingest", str(sources), "--store", str(store), *options])
    monkeypatch.undo()
    assert isinstance(done.exception, StoreError) and done.exception.exit_code == 1, done.output
    require_error(str(done.exception), store, sources)
    assert len(done.stdout.splitlines()) >= 2 or scheduler


@each_change
def test_python_interface_fails_for_sources_not_stored(
    sources: Path, change: Change, scheduler: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file changes just before the rows of the second source are committed."""
    store = sources.parent / "s.db"
    change_at_commit(store, change, monkeypatch, after=1)
    with pytest.raises(StoreError) as caught:
        profharness.ingest(sources, store=store, scheduler=scheduler)
    monkeypatch.undo()
    if change is rename:  # no rows are lost
        assert names(store.with_name("renamed.db")) == {"0.json", "1.json"}
    if change is put_text_there:
        assert store.read_text() == "no store"
    else:
        require_error(str(caught.value), store, sources)


def change_at_commit(
    store: Path, change: Change, monkeypatch: pytest.MonkeyPatch, after: int = 0
) -> None:
    require = ingest.require_no_less
    calls: list[None] = []

    def watched(*arguments: object) -> None:
        require(*arguments)  # type: ignore[arg-type]
        calls.append(None)
        if len(calls) == after + 1:
            change(store)

    monkeypatch.setattr(ingest, "require_no_less", watched)


@pytest.mark.parametrize("change", CHANGES)
def test_job_names_run_folder_that_is_not_stored(
    sources: Path, run_folder: Folder, change: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capture, bench, verify and campaigns end with this check."""
    store, folder = sources.parent / "s.db", run_folder()
    ingest_path(store, sources)
    change_at_commit(store, change, monkeypatch)
    with pytest.raises(ProfharnessError) as caught:
        recording._ingest_run_folder(RunFolder(folder, read_run(folder)), store)
    assert caught.value.exit_code == 1
    assert f"profharness ingest {folder} --store {store}" in str(caught.value)
    assert "s.db: 0 of 1 sources were stored" in str(caught.value)
