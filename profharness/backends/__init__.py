"""What can compute attention, by name. Each entry is a `Backend`; torch is imported by their
functions only.
"""

from __future__ import annotations

from profharness.backends.sdpa import SDPA_BACKENDS, Backend
from profharness.errors import UsageError

BACKENDS: dict[str, Backend] = {backend.name: backend for backend in SDPA_BACKENDS}

DEFAULT_BACKENDS = ("auto", "flash", "efficient", "cudnn", "math")
CPU_BACKENDS = ("auto", "flash", "math")


def find_backend(name: str) -> Backend:
    """The backend of that name. Raises UsageError listing the known ones."""
    try:
        return BACKENDS[name]
    except KeyError:
        raise UsageError(f"no backend {name!r}; known are {', '.join(BACKENDS)}") from None
