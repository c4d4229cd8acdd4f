"""Every error that profharness raises on purpose; a message says what failed, on what, and what to
do.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path


def printable(text: str, kept: str = "\n\t") -> str:
    """Return a text of anybody's for a terminal: escapes stand for what does not print, such as control
    characters, marks that turn the direction of text around, invisible ones and lone surrogates.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in kept else char.encode("unicode_escape").decode()
        for char in text
    )


def one_line(text: str) -> str:
    """Return a printable text on one line, with single spaces for line breaks and tabs."""
    return text if text.isprintable() else printable(" ".join(text.split()))


def shown(path: str | Path) -> str:
    """Return a path as one line that any terminal and any store takes."""
    return printable(str(path), kept="")


def few(names: Collection[str], most: int) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(list(names)[:most]) + more


class ProfharnessError(Exception):
    """Base of all errors with a remedy; the command line prints it and exits with `exit_code`."""

    exit_code = 1


class UsageError(ProfharnessError):
    """The user asked for something that cannot be meant: a bad config token, an unknown backend."""

    exit_code = 2


class GateError(ProfharnessError):
    """A gate (`--fail-on`, `--expect`) was not met."""

    exit_code = 3


class CaptureError(ProfharnessError):
    """A run could not be made at all (a single failed cell is a result, not an error)."""


class UnwritableError(CaptureError):
    """A run folder cannot be written to; what stands in it can be gone on with."""


class StoreError(ProfharnessError):
    """The store is missing, foreign, or newer than this profharness."""


class NotFoundError(StoreError):
    """Nothing in the store answers the question."""


class MissingExtraError(ProfharnessError):
    """A feature needs a package that is not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(
            f"{feature} needs a package that is not installed; {pip_line(extra)} brings it"
        )


def pip_line(extra: str) -> str:
    """The command that installs an extra of pyproject.toml."""
    return f"pip install 'profharness[{extra}]'"


class TraceFormatError(ProfharnessError):
    """A file is not the trace that it should be.

    path is the file, offset the byte (of the uncompressed content) where reading failed, None when
    the whole file is meant, expected what should have stood there.
    """

    def __init__(
        self,
        path: str | Path,
        message: str,
        *,
        offset: int | None = None,
        expected: str | None = None,
    ) -> None:
        self.path = Path(path)
        self.offset = offset
        self.expected = expected
        where = shown(path) if offset is None else f"{shown(path)}, byte {offset}"
        tail = f"; expected {expected}" if expected else ""
        super().__init__(f"{where}: {message}{tail}")


class Interrupted(KeyboardInterrupt):
    """The user stopped a run. folder holds what was done; `profharness capture --resume` goes on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder
