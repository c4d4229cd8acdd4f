"""Stores on network file systems, which are detected by the mounts of the process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from profharness.errors import StoreError
from profharness.store import filesystems, ingest_path, open_store
from profharness.store.filesystems import NETWORK, network_name
from profharness.store.schema import connect

LINES = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a blank in its name that is listed as a mount of Lustre."""
    folder = tmp_path / "shared folder"
    folder.mkdir()
    point = str(folder).replace(" ", "\\040")
    table = tmp_path / "mountinfo"
    table.write_text(f"{LINES}30 22 0:40 / {point} rw shared:1 - lustre mds@tcp:/fs rw\n")
    monkeypatch.setattr(filesystems, "MOUNTS", table)
    return folder


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "gpfs", "fuse.sshfs", "ext4", "fuse.lxcfs"])
def test_network_file_system_is_detected_by_type(kind: str, mounted: Path) -> None:
    filesystems.MOUNTS.write_text(filesystems.MOUNTS.read_text().replace("lustre", kind))
    assert network_name(mounted / "s.db") == NETWORK.get(kind.removeprefix("fuse."))


def test_innermost_and_latest_mount_counts(mounted: Path, tmp_path: Path) -> None:
    assert network_name(mounted / "deep" / "s.db") == "Lustre"
    assert network_name(tmp_path / "s.db") is None
    assert network_name(tmp_path / "shared folder2" / "s.db") is None
    (tmp_path / "link").symlink_to(mounted)
    assert network_name(tmp_path / "link" / "s.db") == "Lustre"
    text = filesystems.MOUNTS.read_text()
    filesystems.MOUNTS.write_text(text + text.splitlines()[1].replace("lustre", "xfs") + "\n")
    assert network_name(mounted) is None


def test_store_on_network_is_not_written(mounted: Path) -> None:
    with pytest.raises(StoreError, match=r"lies on Lustre, .*\(--store /.*profharness.db"):
        connect(mounted / "s.db", write=True)
    assert list(mounted.iterdir()) == []


def test_store_on_network_is_read_unless_it_has_a_log(
    mounted: Path, tmp_path: Path, kineto: Path
) -> None:
    ingest_path(tmp_path / "s.db", kineto)
    shutil.copyfile(tmp_path / "s.db", mounted / "s.db")
    with open_store(mounted / "s.db") as store:
        assert len(store.runs()) == 1
    assert [path.name for path in mounted.iterdir()] == ["s.db"]
    (mounted / "s.db-wal").write_bytes(b"x")
    with pytest.raises(StoreError, match="lies on Lustre and has a log beside it"):
        open_store(mounted / "s.db")
