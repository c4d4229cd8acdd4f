"""A store that this user may not write is refused in words that name --store."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from profharness.cli import cli
from profharness.errors import StoreError

MODELS = Path(__file__).resolve().parents[2] / "traces" / "models"
ASKED = "vit.json.gz", "encoder.json.gz"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A working folder with two traces and a store that has the first. Root has no rights in it."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        made, user = Path(name), os.geteuid()
        for trace in ASKED:
            shutil.copy(MODELS / trace, made)
        # Every module must be imported before the rights are given up.
        for command in ("layers", "ingest"):
            assert invoke(command, ASKED[0]).exit_code == 0
        if user == 0:
            for path in (made, *made.iterdir()):
                os.chown(path, 65534, 65534)
            os.seteuid(65534)
        try:
            yield made
        finally:
            os.seteuid(user)
            made.chmod(0o755)


@pytest.mark.parametrize("command", ["layers", "ingest"])
def test_a_folder_without_write_permission(folder: Path, command: str) -> None:
    (folder / "profharness.db").unlink()
    folder.chmod(0o555)
    error = invoke(command, ASKED[0]).exception
    assert isinstance(error, StoreError)
    told = f"profharness.db: no permission to write in the folder {folder}; choose another store with --store"
    assert str(error) == told


def test_a_store_without_write_permission_is_still_read(folder: Path) -> None:
    (folder / "profharness.db").chmod(0o444)
    folder.chmod(0o555)
    assert invoke("layers", ASKED[0]).exit_code == 0
    error = invoke("layers", ASKED[1]).exception
    told = "profharness.db: no permission to write this store; choose another store with --store"
    assert isinstance(error, StoreError) and str(error) == told


def test_a_link_to_a_store_may_be_in_a_folder_without_write_permission(folder: Path) -> None:
    made = folder / "made"
    made.mkdir()
    (folder / "profharness.db").rename(made / "store.db")
    (folder / "profharness.db").symlink_to(made / "store.db")
    folder.chmod(0o555)
    assert invoke("ingest", ASKED[1]).exit_code == 0
