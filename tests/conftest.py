"""Settings and fixtures for all tests. No test's result depends on how busy the machine is."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from waiting import MARK, Clock

if TYPE_CHECKING:
    from profharness.atlas.data import Atlas

# With several torch threads in each of several tests, most of the time is spent waiting.
os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture(scope="session")
def packaged() -> Atlas:
    """Return the packaged atlas of an H200."""
    from profharness.atlas.data import packaged_atlases, read_atlas  # few tests need numpy

    (path,) = packaged_atlases()
    return read_atlas(path)


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make only a process that runs `waiting.HANG` exceed its time limit, so that the limit of a
    cell can be hours. Return the file with that process's id.

    While such a process lives, the supervisor's clock runs fast.
    """
    mark = tmp_path / "hangs.pid"
    monkeypatch.setenv(MARK, str(mark))
    monkeypatch.setattr("profharness.recording.supervise.time", Clock(mark))
    return mark


# A shell that starts the tests in the background makes them ignore these signals, and children
# inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
