"""Copies of runs and traces that contain only what is known to be harmless, and their audit."""

from __future__ import annotations

from profharness.scrub.check import Finding, PrivateDataError, audit
from profharness.scrub.copies import Scrubbed, scrub

__all__ = ["Finding", "PrivateDataError", "Scrubbed", "audit", "scrub"]
