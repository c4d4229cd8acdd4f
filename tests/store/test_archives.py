"""Archives of the traces of several ranks."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from profharness.cli import cli
from profharness.errors import TraceFormatError
from profharness.store import open_store
from profharness.store.ingest import ingest_path


def trace(rank: int) -> bytes:
    """Return a Kineto trace of a rank."""
    kernel = {
        "ph": "X", "cat": "kernel", "name": f"sgemm_{rank}", "ts": 100, "dur": 5, "pid": 0, "tid": 7,
        "args": {"device": 0, "stream": 7, "correlation": 1},
    }  # fmt: skip
    header = {"distributedInfo": {"rank": rank, "world_size": 2}}
    return json.dumps({**header, "traceEvents": [kernel]}).encode()


def archive(path: Path, files: dict[str, bytes]) -> Path:
    mode = "w" if path.suffix == ".tar" else "w:gz"
    with tarfile.open(path, mode) as tar:
        folder = tarfile.TarInfo("ranks")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(data), 1_700_000_000
            tar.addfile(member, io.BytesIO(data))
    return path


FILES = {
    "ranks/rank0.json": trace(0),
    "ranks/rank1.json.gz": gzip.compress(trace(1)),
    "ranks/._rank1.json": b"\0",
    "ranks/notes.txt": b"nothing",
}


@pytest.mark.parametrize("name", ["r.tar.gz", "r.tgz", "r.tar"])
def test_each_trace_of_an_archive_is_a_run(tmp_path: Path, name: str) -> None:
    path = archive(tmp_path / name, FILES)
    results = ingest_path(tmp_path / "s.db", path)
    assert [result.source for result in results] == [
        path / "ranks/rank0.json",
        path / "ranks/rank1.json.gz",
    ]
    again = ingest_path(tmp_path / "s.db", path)
    assert [result.status for result in again] == ["unchanged", "unchanged"]
    with open_store(tmp_path / "s.db") as store:
        rows = store.runs()
        assert sorted((row.rank, row.created[:10]) for row in rows) == [
            (0, "2023-11-14"),
            (1, "2023-11-14"),
        ]
        kernels = {kernel.kernel for row in rows for kernel in store.kernels(row.run)}
    assert kernels == {"sgemm_0", "sgemm_1"}


def test_a_trace_that_cannot_be_read_leaves_the_others(tmp_path: Path) -> None:
    path = archive(tmp_path / "r.tar.gz", FILES | {"ranks/rank2.json": b'{"a": 1}'})
    with pytest.raises(
        TraceFormatError, match=r"1 trace in this archive.*r\.tar\.gz/ranks/rank2\.json"
    ):
        ingest_path(tmp_path / "s.db", path)
    with open_store(tmp_path / "s.db") as store:
        assert len(store.runs()) == 2


def test_wrong_archives_are_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "r.tar.gz", FILES)
    plain = gzip.decompress(path.read_bytes())
    wrong = {
        "contains no trace": archive(tmp_path / "none.tar.gz", {"a.txt": b""}).read_bytes(),
        "the gzip stream is truncated": path.read_bytes()[:-200],
        "damaged or cut off": gzip.compress(plain[:1300]),
        "rank0.json.*not JSON": gzip.compress(
            plain.replace(FILES["ranks/rank0.json"][:9], b"x" * 9)
        ),
        "damaged or cut off: ": gzip.compress(b"no archive" * 100),
    }
    for match, data in wrong.items():
        path.write_bytes(data)
        with pytest.raises(TraceFormatError, match=match):
            ingest_path(tmp_path / "s.db", path)


def test_a_name_cannot_leave_the_temporary_folder(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    path = archive(tmp_path / "in" / "r.tar", {"../../evil.json": trace(0), "/abs.json": trace(1)})
    ingest_path(tmp_path / "s.db", path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in", "s.db"]


def test_an_archive_is_ingested_by_the_command(tmp_path: Path) -> None:
    path = archive(tmp_path / "r.tar.gz", FILES)
    store = str(tmp_path / "s.db")
    result = CliRunner().invoke(cli, ["ingest", str(path), "--store", store])
    assert result.exit_code == 0, result.output
    assert "rank1.json.gz" in result.output
    result = CliRunner().invoke(cli, ["kernels", str(path), "--store", store])
    assert result.exit_code == 1
