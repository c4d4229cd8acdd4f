"""Real exports of nsys from an H200, uncompressed once."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(scope="session")
def nsys(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the export of that name in its own file."""
    folder = tmp_path_factory.mktemp("nsys")

    def unpack(name: str) -> Path:
        path = folder / f"{name}.sqlite"
        if not path.exists():
            path.write_bytes(gzip.decompress((DATA / f"{name}.sqlite.gz").read_bytes()))
        return path

    return unpack
