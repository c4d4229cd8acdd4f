"""Copies of runs and traces that are fit to publish, and the audit that says whether they are."""

from __future__ import annotations

from profharness.scrub.audit import Finding, PrivateDataError, audit
from profharness.scrub.job import Scrubbed, scrub

__all__ = ["Finding", "PrivateDataError", "Scrubbed", "audit", "scrub"]
