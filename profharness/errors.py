"""The exceptions of profharness. A message names the failure, the affected object, and a remedy."""

from __future__ import annotations

import copyreg
import re
import shutil
import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

# Matches a command after a colon or in backticks, which users may want to copy.
_COMMAND = re.compile(r"(?<=: )(?:profharness|pip) [^;]*|`[^`]*`")
NO_BREAK = "\N{NO-BREAK SPACE}"
_UNIT = r"(?:%|[µmn]?s|(?:[kKMGT]i?)?B(?:/s)?|[MGTP]?FLOP/s|[kMG]?Hz|W)(?![\w/])"
FIGURE = rf"\d[\d.,]* {_UNIT}"  # matches a number and its unit
_BEFORE_UNIT = re.compile(rf"(?<=\d) (?={_UNIT})")


def printable(text: str, kept: str = "\n\t") -> str:
    """Return untrusted text in a printable form.

    Replace control characters, bidirectional marks, invisible characters and lone surrogates with
    escapes, except for the characters in `kept`.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in kept else char.encode("unicode_escape").decode()
        for char in text
    )


def one_line(text: str) -> str:
    """Return text as one printable line. Replace line breaks and tabs with single spaces."""
    return text if text.isprintable() else printable(" ".join(text.split()))


def printable_path(path: str | Path) -> str:
    """Return a path as one printable line."""
    return printable(str(path), kept="")


def wrapped_for(stream: TextIO, text: str) -> str:
    """If the stream is a terminal, wrap the lines of a message to the width of the terminal."""
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines += wrapped(line, width, indent) or [""]
    return "\n".join(lines)


def wrapped(text: str, width: int, indent: str = "", lead: str = "") -> list[str]:
    """Break a text into lines at blanks, but not between a number and its unit.

    Do not break a command either, so that users can copy it. A command that is longer than `width`
    has a line of its own. The first line begins with `lead`, and the others begin with `indent`.
    """
    whole = _COMMAND.sub(lambda command: command[0].replace(" ", NO_BREAK), text)
    lines = textwrap.wrap(
        _BEFORE_UNIT.sub(NO_BREAK, whole),
        width,
        initial_indent=lead,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(NO_BREAK, " ") for line in lines]


def join_few(names: Collection[str], most: int) -> str:
    """Join the first `most` names, and append the number of remaining names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(list(names)[:most]) + more


def join_and(names: Collection[str]) -> str:
    """Join names for a sentence: `flash, cuDNN and math`."""
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last


def percent(share: float, digits: int = 0) -> str:
    """Format a share as a percentage, such as `58 %`."""
    return f"{100 * share:.{digits}f} %"


def counted(count: float, one: str, several: str = "") -> str:
    """Return a number with its noun: `1 kernel`, `1,200 kernels`. `several` is the plural."""
    number = f"{count:,.2f}".rstrip("0").rstrip(".") if isinstance(count, float) else f"{count:,}"
    return f"{number} {one if count == 1 else several or f'{one}s'}"


SIMILAR_STEMS = 0.6  # minimum similarity of two names without their suffixes


def near_names(text: str, names: Iterable[str], most: int = 3) -> list[str]:
    """Return the names that contain a text, that are spelled like it, or that it contains.

    The best match is first: a name that begins with the text, and then the shortest name.

    The text may lack the suffixes of a name: `lama_eager` is spelled like `llama_eager.json.gz`.
    """
    import difflib  # needed only for error messages

    known = list(dict.fromkeys(names))
    if within := [name for name in known if len(text) > 2 and text in name]:
        return sorted(within, key=lambda name: (not name.startswith(text), len(name)))[:most]
    spelled: dict[str, str] = {}
    for name in known:
        spelled.setdefault(name.partition(".")[0], name)
    spelled |= {name: name for name in known}
    near = difflib.get_close_matches(text, spelled, n=most, cutoff=0.7)
    if "." in text:  # files with equal suffixes are not alike for that reason
        stems = {name: (text.partition(".")[0], name.partition(".")[0]) for name in near}
        ratios = {
            name: difflib.SequenceMatcher(None, *each).ratio() for name, each in stems.items()
        }
        near = [name for name in near if ratios[name] >= SIMILAR_STEMS]
    if not near:  # such as `FLASH` or `flash-attn` instead of `flash`
        return [name for name in known if len(name) > 2 and name in text.lower()][:most]
    return list(dict.fromkeys(spelled[each] for each in near))


def did_you_mean(names: Sequence[str]) -> str:
    """Return a question that names the candidates, or "" if there are none."""
    return f"did you mean {' or '.join(names)}?" if names else ""


def with_clause(text: str, clause: str) -> str:
    """Append a clause to a message. A semicolon separates them, unless the message ends with a question."""
    return f"{text}{'' if text.endswith('?') else ';'} {clause}"


def choose_from(name: str, known: Sequence[str]) -> str:
    """Return the end of an error message about an unknown name: similar names, and all names."""
    choices = f"choose from {', '.join(known)}"
    near = near_names(name, known)
    return with_clause(did_you_mean(near), choices) if near else choices


_FORMS = re.compile(r"\[([^|\]]*)\|([^|\]]*)\]")


def with_count(text: str, count: int) -> str:
    """Replace `{n}` in a text by a number, and `[row|rows]` by the form that fits the number."""
    fitting = _FORMS.sub(r"\1" if count == 1 else r"\2", text)
    return fitting.replace("{n}", f"{count:,}")


class ProfharnessError(Exception):
    """Base class of all errors with a remedy in the message.

    The command line prints the message and exits with `exit_code`: 2 if the user must change the
    input, and 1 if the machine, a tool or profharness failed.
    """

    exit_code = 1
    label = "error"
    """The word that the command line prints before the message."""

    def __reduce__(self) -> tuple[Any, ...]:
        # recreate the exception without __init__, whose parameters differ from `args` in subclasses
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class UsageError(ProfharnessError):
    """The user's input is invalid, for example a config or the name of a backend."""

    exit_code = 2


class GateError(ProfharnessError):
    """The condition of a gate (`--fail-on`, `--expect`) is not met."""

    exit_code = 3
    label = "gate failed"


@dataclass(frozen=True, slots=True)
class GateResult:
    """The result of one gate in one run. The gate failed if there are findings."""

    condition: str  # as the user wrote it, such as `--fail-on slower`
    run: str  # or the pair `BASELINE → CANDIDATE`
    findings: tuple[str, ...]
    passed: str  # what was checked, such as `4 calls checked, none ran on math`

    @property
    def place(self) -> str:
        return f"{self.condition} in {self.run}" if self.run else self.condition


def require_passed(results: Iterable[GateResult]) -> list[str]:
    """Return a line for each gate, which says what it checked.

    Raise GateError if a gate failed. The message lists the findings of all failed gates, one on
    each line. A finding of several gates is listed once, below the names of these gates.
    """
    results = list(results)
    failed: dict[tuple[str, str], list[str]] = {}  # conditions by run and finding
    for result in results:
        for finding in result.findings:
            failed.setdefault((result.run, finding), []).append(result.condition)
    findings: dict[str, list[str]] = {}  # findings by the place of their gates
    for (run, finding), conditions in failed.items():
        place = GateResult(join_and(dict.fromkeys(conditions)), run, (), "").place
        findings.setdefault(place, []).append(finding)
    if findings:
        texts = ["\n  ".join([f"{place}:", *of]) for place, of in findings.items()]
        raise GateError(f"\n{GateError.label}: ".join(texts))
    return [f"gate passed: {result.place}: {result.passed}" for result in results]


class CaptureError(ProfharnessError):
    """A run could not be recorded. A failed cell is a result, and not an error."""


class UnwritableError(CaptureError):
    """The run folder is not writable. The run can be resumed later."""


class StoreError(ProfharnessError):
    """The store is damaged, cannot be read or written, or was created by another version."""


class NotAStoreError(StoreError):
    """The user named a store that profharness did not create, or a folder that does not exist."""

    exit_code = 2


class NotFoundError(StoreError):
    """The data that the user asked for, such as a run, a config or a store, does not exist."""

    exit_code = 2


class UnknownNameError(NotFoundError):
    """The user named a run, a file or an atlas that does not exist."""


class AmbiguousNameError(UnknownNameError):
    """The user gave a name that several runs have."""


class MissingExtraError(ProfharnessError):
    """A feature needs a package of an optional extra, and the package is not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(
            f"{feature} requires a package that is not installed; install it with: "
            f"{install_command(extra)}"
        )


def install_command(extra: str) -> str:
    """Return the command that installs an extra of pyproject.toml."""
    return f"pip install 'profharness[{extra}]'"


PACKED = (".gz", ".xz")  # suffixes of compressed files


class TraceFormatError(ProfharnessError):
    """A file is not a valid trace.

    `offset` is the position of the error in the uncompressed content, in bytes, or None if the error
    concerns the whole file. `expected` describes the expected content.
    """

    exit_code = 2

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
        where = printable_path(path)
        if offset is not None:
            of = " of the decompressed data" if self.path.suffix in PACKED else ""
            where = f"{where}, byte {offset:,}{of}"
        tail = f"; expected {expected}" if expected else ""
        super().__init__(f"{where}: {message}{tail}")


class NotATraceError(TraceFormatError):
    """The user named a file that is missing or no trace, or a folder without traces."""


class Interrupted(KeyboardInterrupt):
    """The user interrupted a run.

    `folder` contains the results so far. The `capture --resume` command continues the run. The
    command line sets `command` to the interrupted command, and `store` to the store of that
    command.
    """

    command = ""
    store: Path | None = None

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder
