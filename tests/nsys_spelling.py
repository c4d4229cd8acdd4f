"""Kernel names in nsys's spelling."""

from __future__ import annotations

import re


def as_nsys(name: str) -> str:
    """Convert a Kineto name to the spelling of nsys and ncu, as in their exports of the same launches."""
    text = re.sub(r"(?<=[<, ])(\d+)(?=[,>])", r"(int)\1", name)
    text = re.sub(r"\btrue\b", "(bool)1", text)
    text = re.sub(r"\bfalse\b", "(bool)0", text)
    return text.replace("(anonymous namespace)", "<unnamed>").replace("> >", ">>")
