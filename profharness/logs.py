"""The log that PROFHARNESS_LOG asks a worker for: what was compiled, and what came from a cache."""

from __future__ import annotations

import logging
import os

LOG_VARIABLE = "PROFHARNESS_LOG"
LEVELS = ("debug", "info", "warning", "error")


def log_wanted() -> bool:
    """Whether the environment asks for a log."""
    return bool(os.environ.get(LOG_VARIABLE))


def start_log() -> None:
    """Send what loggers of `profharness` say at the wanted level to stderr, a worker's worker.log;
    those of torch stay as they are. Raises ValueError for a level that there is not.
    """
    level = os.environ.get(LOG_VARIABLE, "")
    if not level:
        return
    if level.lower() not in LEVELS:
        raise ValueError(f"{LOG_VARIABLE}={level}: no such level; take {', '.join(LEVELS)}")
    logger = logging.getLogger("profharness")
    logger.setLevel(level.upper())
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
