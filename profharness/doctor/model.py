"""What a check finds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """One finding. state: `ok`, `warning` (works, but less than it could), `missing`, or `absent`
    (optional, not there).
    """

    name: str
    state: str
    detail: str
    remedy: str = ""
