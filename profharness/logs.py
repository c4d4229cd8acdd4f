"""The worker's log of compilations and cache hits, enabled by PROFHARNESS_LOG."""

from __future__ import annotations

import logging
import os

LOG_VARIABLE = "PROFHARNESS_LOG"
LEVELS = ("debug", "info", "warning", "error")


def log_wanted() -> bool:
    """Return whether PROFHARNESS_LOG is set."""
    return bool(os.environ.get(LOG_VARIABLE))


def start_log() -> None:
    """Log messages of profharness's loggers at the requested level to stderr, which is worker.log
    in a worker. torch's loggers are unchanged. Raise ValueError for an unknown level.
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
