"""Planning and execution of runs: the worker, profilers around it, and the run folder."""

from __future__ import annotations

from profharness.runner.capture import capture, resume

__all__ = ["capture", "resume"]
