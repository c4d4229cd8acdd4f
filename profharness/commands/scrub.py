"""`profharness scrub`: make a publishable copy of a run or a trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from profharness.commands._command import command, declaration_of, document, gate, usage
from profharness.commands._options import Option
from profharness.commands._output import hint, quiet_stdout
from profharness.commands._runs import require_run, require_single
from profharness.commands._types import PathLike, Store, complete_runs, store_path
from profharness.errors import GateResult, UsageError, counted, printable

if TYPE_CHECKING:
    from profharness.scrub import Finding, Scrubbed


@dataclass(frozen=True)
class Audit:
    """The result of `scrub --check`: the texts in a run or a trace that `scrub` would replace."""

    source: Path
    findings: tuple[Finding, ...]


Source = Annotated[PathLike, Option(metavar="RUN", complete=complete_runs, type=click.STRING)]
CopyPath = Annotated[
    PathLike | None,
    Option(
        ("-o", "--output"),
        type=click.Path(path_type=Path),
        metavar="PATH",
        help="The path to which the copy is written.  [default: <name>-scrubbed beside the source]",
    ),
]
Replace = Annotated[bool, Option(("--force",), help="Replace an earlier copy.")]
OnlyCheck = Annotated[
    bool,
    Option(
        ("--check",),
        help="Report the texts that would be replaced, without making a copy, and exit with code 3 if "
        "there are any.",
    ),
]


def _to_path(done: Scrubbed | Audit) -> Path:
    return done.source if isinstance(done, Audit) else done.output


@command("scrub", frame=_to_path)
def scrub_run(
    source: Source,
    path: CopyPath = None,
    *,
    force: Replace = False,
    check: OnlyCheck = False,
    store: Store = None,
) -> Scrubbed | Audit:
    """Make a publishable copy of a run or a trace.

    The source is a stored run (an id, a unique prefix, latest or latest~1), a run folder or a trace file.

    The copy keeps only text that is known to be harmless: the names of kernels, operators and
    modules, shapes, times, versions, and known messages. Any text that is not known to be harmless
    is replaced by `removed_1`, `removed_2` and so on; identical texts get the same number. A raw
    nsys or ncu report is replaced by its export. An existing export is used if it is newer than the
    report; otherwise, a new export is created. Other files are omitted. The source is never
    changed. The command audits the copy, and deletes the copy if the audit fails.

    \b
    Examples:
      profharness scrub latest
      profharness scrub traces/runs/20261121-152530-4142
      profharness scrub --check traces/runs

    In Python the result is the path of the copy.
    """
    # loads the code that runs workers, which --help does not need
    from profharness.jobs.into_store import find_source
    from profharness.scrub import audit, scrub

    path_of_store = store_path(store)
    if not Path(source).exists():
        require_run(str(source), path_of_store)
    elif not check:
        require_single(str(source))
    original = find_source(str(source), path_of_store)
    if not check:
        return scrub(original, None if path is None else Path(path), force=force)
    return Audit(original, tuple(audit(original)))


@usage(scrub_run)
def check_options(
    *, path: PathLike | None = None, force: bool = False, check: bool = False
) -> None:
    """Raise UsageError if --check is combined with -o or --force."""
    if check and (path is not None or force):
        raise UsageError("--check cannot be combined with -o or --force")


@document(scrub_run)
def show(done: Scrubbed | Audit) -> None:
    """Print the findings of --check, or a summary of the copy."""
    if isinstance(done, Audit):
        with quiet_stdout() as stream:
            for finding in done.findings:
                stream.write(f"{printable(str(finding))}\n".encode())
        if not done.findings:
            hint(f"{done.source}: found no text to replace")
        return
    for name, instead in done.replaced:
        hint(f"replaced {name} with {instead}")
    for name in done.left_out:
        hint(f"omitted {name}")
    hint(
        f"wrote {done.output}: {counted(len(done.files), 'file')}; the audit of the copy found no "
        "text left to replace"
    )


@gate(scrub_run)
def check(done: Scrubbed | Audit) -> list[GateResult]:
    """Return the result of --check, which failed if it found texts that `scrub` would replace."""
    if not isinstance(done, Audit):
        return []
    found = counted(len(done.findings), "text")
    remedy = f"{found} not known to be harmless; make a clean copy with `profharness scrub`"
    passed = "all texts checked, none is left to replace"
    return [GateResult("--check", str(done.source), (remedy,) if done.findings else (), passed)]


DECLARATION = declaration_of(scrub_run)
