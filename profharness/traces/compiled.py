"""Import the compiled parts of the parsers. They are None if they were not built at installation."""

FORM = 4  # version of the arguments and results; it must be the same as in scanner.c
try:
    from profharness.traces._scanner import FORM as COMPILED
    from profharness.traces._scanner import Scanner, parents
except ImportError:  # installed without a C compiler
    COMPILED = 0
if COMPILED != FORM:  # compiled from an older source
    Scanner = parents = None  # type: ignore[assignment, misc]


__all__ = ["Scanner", "is_compiled", "parents"]


def is_compiled() -> bool:
    """Return whether the compiled scanner is available and matches this source."""
    return Scanner is not None
