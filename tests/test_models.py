"""docs/models.md agrees with traces/models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_maps_of_the_page_agree_with_the_traces() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "make_models_page.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
