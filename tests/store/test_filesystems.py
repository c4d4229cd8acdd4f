"""Stores on network file systems, which are detected by the mounts of the process."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from profharness.errors import StoreError
from profharness.store import ingest_path, open_store, schema
from profharness.store.schema import NETWORK, connect, network_type

LINES = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a blank in its name that is listed as a mount of Lustre."""
    folder = tmp_path / "shared folder"
    folder.mkdir()
    point = str(folder).replace(" ", "\\040")
    table = tmp_path / "mountinfo"
    table.write_text(f"{LINES}30 22 0:40 / {point} rw shared:1 - lustre mds@tcp:/fs rw\n")
    monkeypatch.setattr(schema, "MOUNTS", table)
    return folder


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "gpfs", "fuse.sshfs", "ext4", "fuse.lxcfs"])
def test_network_file_system_is_detected_by_type(kind: str, mounted: Path) -> None:
    schema.MOUNTS.write_text(schema.MOUNTS.read_text().replace("lustre", kind))
    name = kind.removeprefix("fuse.")
    assert network_type(mounted / "s.db") == (name if name in NETWORK else None)


def test_innermost_and_latest_mount_counts(mounted: Path, tmp_path: Path) -> None:
    assert network_type(mounted / "deep" / "s.db") == "lustre"
    assert network_type(tmp_path / "s.db") is None
    assert network_type(tmp_path / "shared folder2" / "s.db") is None
    (tmp_path / "link").symlink_to(mounted)
    assert network_type(tmp_path / "link" / "s.db") == "lustre"
    text = schema.MOUNTS.read_text()
    schema.MOUNTS.write_text(text + text.splitlines()[1].replace("lustre", "xfs") + "\n")
    assert network_type(mounted) is None


def test_store_on_network_is_not_written(mounted: Path) -> None:
    with pytest.raises(StoreError, match=r"\(lustre\), .*\(--store /.*profharness.db"):
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
    with pytest.raises(StoreError, match=r"\(lustre\) and has a log"):
        open_store(mounted / "s.db")
