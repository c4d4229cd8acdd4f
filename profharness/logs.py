"""Start the log of compilations and cache hits (PROFHARNESS_LOG), and format durations."""

from __future__ import annotations

import logging
import os

LOG_VARIABLE = "PROFHARNESS_LOG"
LEVELS = ("debug", "info", "warning", "error")


def log_wanted() -> bool:
    """Return whether PROFHARNESS_LOG is set."""
    return bool(os.environ.get(LOG_VARIABLE))


def start_log() -> None:
    """Make profharness's loggers write messages of the requested level to stderr.

    In a worker, stderr is the file worker.log. The loggers of torch are not changed. Raise
    ValueError if the level is unknown.
    """
    level = os.environ.get(LOG_VARIABLE, "")
    if not level:
        return
    if level.lower() not in LEVELS:
        raise ValueError(f"{LOG_VARIABLE}={level}: unknown level; choose from {', '.join(LEVELS)}")
    logger = logging.getLogger("profharness")
    logger.setLevel(level.upper())
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)


def duration(seconds: float) -> str:
    """Format seconds as `40 s`, `12 min` or `2.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
