"""A stored run as a Chrome trace file."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from isal import igzip

from profharness.errors import NotFoundError
from profharness.files import atomic_file
from profharness.report.chrome import Section, write_chrome_trace

if TYPE_CHECKING:
    from profharness.store import Store


# Which of a run's profilers tells most of its course; ncu replays kernels, so its clock tells little.
PREFERRED = ("torch", "nsys", "ncu")
ALL = "all"


def choose_profilers(store: Store, run: str, profiler: str | None = None) -> tuple[str, ...]:
    """The profilers that an export of the run is made of, out of those that left launches.

    None: the first of PREFERRED; `all`: every one. Raises NotFoundError for a profiler that the run
    has no launches of. Empty where the run has none at all and none is asked for.
    """
    row = next(row for row in store.runs() if row.run == run)
    found = [name for name in row.profilers if next(store.launches(run, profiler=name), None)]
    if profiler not in (None, ALL, *found):
        there = f"there are those of {', '.join(found)}" if found else "it has none at all"
        raise NotFoundError(f"run {run} has no launches of profiler {profiler!r}; {there}")
    if profiler not in (None, ALL):
        return (str(profiler),)
    ordered = [name for name in PREFERRED if name in found]
    ordered += [name for name in found if name not in PREFERRED]
    return tuple(ordered if profiler == ALL else ordered[:1])


def write_run_file(
    store: Store, run: str, output: Path, *, force: bool = False, profiler: str | None = None
) -> int:
    """Write the run to a file, compressed if the name ends in .gz; the number of launches in it.

    profiler as for `choose_profilers`. Raises UsageError if the file exists and force is not given.
    """
    chosen = choose_profilers(store, run, profiler)
    with atomic_file(output, force=force) as file:
        if output.suffix != ".gz":
            return write_run(store, run, file, chosen)
        # no time stamp and no name inside, so that the same run gives the same bytes
        with igzip.GzipFile(
            filename="", mode="wb", compresslevel=2, fileobj=file, mtime=0
        ) as packed:
            return write_run(store, run, cast("IO[bytes]", packed), chosen)


def write_run(store: Store, run: str, out: IO[bytes], profilers: tuple[str, ...]) -> int:
    """Write what these profilers saw of the run as plain JSON; the number of launches in it.

    Profilers have clocks of their own: each part starts at 0, and of several each has processes of
    its own that bear the profiler's name.
    """
    ranges = store.ranges(run)
    sections = (
        Section(
            store.launches(run, profiler=profiler),
            [each for each in ranges if each.profiler == profiler],
            profiler if len(profilers) > 1 else None,
        )
        for profiler in profilers
    )
    return write_chrome_trace(
        out,
        sections,
        devices=store.devices(run),
        properties={"traceName": f"profharness run {run}"},
    )
