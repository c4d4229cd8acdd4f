"""Make copies of runs and traces that contain only harmless data, and audit files."""

from __future__ import annotations

from profharness.scrub.copies import Finding, PrivateDataError, Scrubbed, audit, scrub

__all__ = ["Finding", "PrivateDataError", "Scrubbed", "audit", "scrub"]
