"""Kernel names as nsys spells them."""

from __future__ import annotations

import re


def as_nsys(name: str) -> str:
    """nsys's and ncu's spelling of a Kineto name, as their exports of the same launches have it."""
    text = re.sub(r"(?<=[<, ])(\d+)(?=[,>])", r"(int)\1", name)
    text = re.sub(r"\btrue\b", "(bool)1", text)
    text = re.sub(r"\bfalse\b", "(bool)0", text)
    return text.replace("(anonymous namespace)", "<unnamed>").replace("> >", ">>")
