"""Provide the part of isal that the worker uses, for a Python in which isal is not installed."""

import gzip as igzip

__all__ = ["igzip"]
