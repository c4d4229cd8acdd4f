"""The compiled parts of the parsers, which are None if they were not built at installation."""

FORM = 3  # version of the arguments and results, as in scanner.c
try:
    from profharness.traces._scanner import FORM as COMPILED
    from profharness.traces._scanner import Scanner, parents
except ImportError:  # installed without a C compiler
    COMPILED = 0
if COMPILED != FORM:  # compiled from an older source
    Scanner = parents = None  # type: ignore[assignment, misc]


__all__ = ["Scanner", "is_compiled", "parents"]


def is_compiled() -> bool:
    """Return whether the scanner was compiled from this source at installation."""
    return Scanner is not None
