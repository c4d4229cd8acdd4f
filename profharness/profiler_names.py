"""The profilers whose launches can be stored, in the order in which an answer prefers them."""

from __future__ import annotations

# How they work stands in runner/profilers.py; readers need no more than the names.
PROFILERS = ("torch", "nsys", "ncu")
