"""Run folders as bytes: unpacking restores what was packed, and nothing outside the folder is
written.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from profharness.errors import CaptureError
from profharness.jobs.lane import archive_hash, pack, unpack
from profharness.run import Protocol, Run, write_run


def run_folder(path: Path) -> Path:
    (path / "sources").mkdir(parents=True)
    write_run(path, Run("r", "", (), Protocol(), ()))
    (path / "sources" / "naive.py").write_text("x = 1\n")
    (path / ".lock").write_text("process 1")
    return path


def archive(name: str, kind: bytes = tarfile.REGTYPE, count: int = 1) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for _ in range(count):
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, "/etc/passwd", 0
            file.addfile(member, io.BytesIO())
    return buffer.getvalue()


def test_unpacking_restores_a_folder_once(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "there" / "g1")
    data = pack(folder)
    back = tmp_path / "here" / "g1"
    assert unpack(data, back, archive_hash(data))
    assert pack(back) == data
    assert (back / "sources" / "naive.py").read_text() == "x = 1\n"
    assert not (back / ".lock").exists()
    assert not unpack(data, back, archive_hash(data))
    assert [path.name for path in back.parent.iterdir()] == ["g1"]


@pytest.mark.parametrize(
    "data",
    [
        archive("../outside"),
        archive("/outside"),
        archive("a/../../outside"),
        archive("link", tarfile.SYMTYPE),
        archive("link", tarfile.LNKTYPE),
        archive("pipe", tarfile.FIFOTYPE),
        archive("twice", count=2),
        archive(".hidden"),
        b"no archive at all",
        pack(Path(__file__).parent / "nowhere"),
    ],
)
def test_unsafe_archives_are_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(CaptureError):
        unpack(data, tmp_path / "campaign" / "g1", archive_hash(data))
    assert [path.name for path in tmp_path.rglob("*")] == ["campaign"]


def test_archive_of_another_hash_is_refused(tmp_path: Path) -> None:
    data = pack(run_folder(tmp_path / "g1"))
    with pytest.raises(CaptureError, match="does not match its hash"):
        unpack(data, tmp_path / "g2", "0" * 32)
    assert not (tmp_path / "g2").exists()
