"""The shape of the package: no circular imports, and unique names of test files."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

CIRCLES = (
    "circles of files, type checking counted",
    "circles of folders, type checking counted",
)


def printed(root: Path) -> dict[str, int]:
    """Return the figures that the script prints for a checkout."""
    command = [sys.executable, str(ROOT / "scripts" / "house.py"), "--root", str(root)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.findall(r"^(.*?)\s{2,}([\d,]+)", done.stdout, re.MULTILINE)
    return {name: int(figure.replace(",", "")) for name, figure in found}


def test_there_are_no_circular_imports() -> None:
    figures = printed(ROOT)
    assert {name: figures[name] for name in CIRCLES if figures[name]} == {}


def test_a_circle_under_type_checking_and_a_lazy_import_are_counted(tmp_path: Path) -> None:
    package = tmp_path / "profharness"
    package.mkdir()
    guarded = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from profharness import other\n"
    )
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text(guarded)
    (package / "other.py").write_text(
        "def work():\n    from profharness import one\n    return one\n"
    )
    figures = printed(tmp_path)
    assert figures["circles of files, type checking counted"] == 1
    assert figures["imports inside functions"] == 1
    assert figures["files"] == 3


def test_test_files_have_unique_names() -> None:
    # modules of one name shadow each other, and pytest-xdist reports that only at the end
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
