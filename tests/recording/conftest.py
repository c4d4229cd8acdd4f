"""Fixtures for captures under fake tools of profilers."""

from __future__ import annotations

from pathlib import Path

import pytest

from profharness.recording.profilers import PROFILERS


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for fake tools that is first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    for profiler in PROFILERS.values():
        if profiler.variable:
            monkeypatch.delenv(profiler.variable, raising=False)
    return folder
