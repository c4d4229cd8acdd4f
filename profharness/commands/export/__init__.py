"""`profharness export`: write a stored run as a Chrome trace."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from profharness.commands._command import as_is, command, declaration_of, document
from profharness.commands._options import Option
from profharness.commands._output import hint, quiet_stdout
from profharness.commands._types import (
    Force,
    OutputFile,
    Store,
    complete_runs,
    require_profilers,
    store_path,
)
from profharness.commands.export.chrome_trace import (
    choose_profilers,
    find_exported,
    write_run,
    write_run_file,
)
from profharness.store import open_store

ExportedRun = Annotated[str, Option(complete=complete_runs)]
Profiler = Annotated[
    str | None,
    Option(
        ("--profiler",),
        metavar="NAME",
        check=require_profilers,
        help="Write the launches that this profiler recorded: torch, nsys, ncu, or all.  [default: the first that "
        "the run has]",
    ),
]


@command("export", frame=as_is)
def export(
    run: ExportedRun,
    path: OutputFile = None,
    *,
    profiler: Profiler = None,
    force: Force = False,
    store: Store = None,
) -> int:
    """Write a run as a Chrome trace. The run may come from any profiler.

    The file opens in Perfetto, chrome://tracing and HolisticTraceAnalysis. It has one track per cell
    with its kernels. Each launch has its resources, theoretical occupancy, op stack and counters of
    ncu. The tracks of threads contain ranges, launch calls, and ops that launched kernels. The store
    has no times of ops, so an op is drawn from its first launch to its last. If FILE ends in .gz, it
    is compressed. Without -o, the trace is written to stdout as plain JSON.

    Each profiler of a run has its own clock. With `--profiler all`, each gets its own processes in
    the file, and all start at 0.

    \b
    Example:
      profharness export latest -o trace.json.gz

    In Python the result is the number of launches in the trace.
    """
    with open_store(store_path(store)) as opened:
        name = find_exported(opened, run, profiler)
        chosen = choose_profilers(opened, name, profiler)
        # each profiler has its own clock, so only one is written unless `all` is given
        others = set(choose_profilers(opened, name, "all")) - set(chosen)
        if others and profiler is None:
            hint(
                f"this is what {chosen[0]} saw; --profiler {'|'.join(sorted(others))}|all for more"
            )
        if path is None:
            # 0 if the reader of stdout closed it
            launches = 0
            with quiet_stdout() as stream:
                launches = write_run(opened, name, stream, chosen)
        else:
            launches = write_run_file(opened, name, Path(path), force=force, profiler=profiler)
            hint(f"wrote {path}: {launches:,} launches of run {name}")
    return launches


@document(export)
def show(launches: int) -> None:
    """Print nothing: the trace is written."""


DECLARATION = declaration_of(export)
