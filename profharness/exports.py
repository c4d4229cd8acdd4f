"""A stored run as a Chrome trace file."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from isal import igzip

from profharness.files import atomic_file
from profharness.report.chrome import Section, write_chrome_trace

if TYPE_CHECKING:
    from profharness.store import Store


def write_run_file(store: Store, run: str, output: Path, *, force: bool = False) -> int:
    """Write the run to a file, compressed if the name ends in .gz; the number of launches in it.

    Raises UsageError if the file exists and force is not given.
    """
    with atomic_file(output, force=force) as file:
        if output.suffix != ".gz":
            return write_run(store, run, file)
        # no time stamp and no name inside, so that the same run gives the same bytes
        with igzip.GzipFile(
            filename="", mode="wb", compresslevel=2, fileobj=file, mtime=0
        ) as packed:
            return write_run(store, run, cast("IO[bytes]", packed))


def write_run(store: Store, run: str, out: IO[bytes]) -> int:
    """Write the run as plain JSON; the number of launches in it."""
    ranges = store.ranges(run)
    profilers = next(row.profilers for row in store.runs() if row.run == run)
    sections = (
        Section(
            store.launches(run, profiler=profiler),
            [each for each in ranges if each.profiler == profiler],
        )
        for profiler in profilers
    )
    return write_chrome_trace(
        out,
        sections,
        devices=store.devices(run),
        properties={"traceName": f"profharness run {run}"},
    )
