"""Makes runs: plans cells, runs the worker under a profiler, and keeps the run folder whole
whatever happens.
"""

from __future__ import annotations

from profharness.runner.capture import capture, resume

__all__ = ["capture", "resume"]
