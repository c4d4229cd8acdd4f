"""scripts/check_install.py: it finds pins that contradict torch's, and a missing network is no failure."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from check_install import PYTHONS

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "check_install.py"


def write_wheel(folder: Path, name: str, version: str, requires: str = "") -> None:
    """Write an empty wheel whose metadata an index would list."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            f"{info}/METADATA", metadata + (f"Requires-Dist: {requires}\n" * (requires > ""))
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def check(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the script on the project in a folder, with an empty cache."""
    return subprocess.run(
        [sys.executable, SCRIPT, "torch==2.13.0"],
        cwd=folder,
        env=os.environ | {"UV_CACHE_DIR": str(folder / "cache")} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Create a project whose extra requires triton, and wheels of which torch pins another one."""
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "p"\nversion = "1"\noptional-dependencies = {kernels = ["triton"]}\n'
    )
    write_wheel(tmp_path, "torch", "2.13.0", "triton==3.7.1")
    for version in ("3.7.1", "3.9.0"):
        write_wheel(tmp_path, "triton", version)
    return tmp_path


@pytest.mark.parametrize(("pin", "solved"), [("", True), ("triton==3.9.0\n", False)])
def test_pins_that_contradict_torch_are_found(project: Path, pin: str, solved: bool) -> None:
    (project / "constraints.txt").write_text(pin)
    done = check(project, UV_NO_INDEX="1", UV_FIND_LINKS=str(project))
    assert done.returncode == (0 if solved else 1), done.stderr
    for version in PYTHONS:
        assert (f"Python {version}: ok" in done.stdout) == solved
    assert ("torch==2.13.0 depends on triton" in done.stdout) != solved


def test_an_index_out_of_reach_is_no_failure(project: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    done = check(project, UV_DEFAULT_INDEX=nowhere, ALL_PROXY=nowhere, NO_PROXY="")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("check_install: skipped: ") and done.stdout.count("\n") == 1
