"""What is compiled when the package is installed; without it the same is done slower."""

FORM = 3  # of what goes in and comes out, as scanner.c has it
try:
    from profharness.parse._scanner import FORM as COMPILED
    from profharness.parse._scanner import Scanner, parents
except ImportError:  # installed without a C compiler
    COMPILED = 0
if COMPILED != FORM:  # or compiled from an older source
    Scanner = parents = None  # type: ignore[assignment, misc]

__all__ = ["Scanner", "parents"]
