"""docs/reference.md agrees with the declarations of commands and columns."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_reference_page_is_current() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "make_reference.py"), "check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
