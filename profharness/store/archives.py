"""Read the traces in an archive (`.tar`, `.tar.gz`), such as the traces of all ranks of a job.

The members are unpacked one at a time, so that a large archive needs little disk space. The path
of a member is the path of the archive, followed by the name of the member.
"""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from profharness.errors import TraceFormatError
from profharness.store.sources import ARCHIVES, Source, read_source
from profharness.traces import SUFFIXES, errors_that_name, open_file, without_room

EXPECTED = "an archive of traces (.tar, .tar.gz or .tgz)"
MAX_MEMBERS = 100_000


@contextmanager
def members(path: Path) -> Iterator[Iterator[tuple[Path, Path]]]:
    """Yield an iterator over the traces in an archive.

    Each item consists of a temporary file, which is deleted at the next iteration, and the path of
    the member. The iterator raises TraceFormatError if the archive is damaged, cut off, or contains
    no trace.
    """
    file, _ = open_file(path)
    with (
        closing(file),
        without_room(),
        tempfile.TemporaryDirectory(prefix="profharness-") as folder,
    ):
        yield _unpacked(path, cast("IO[bytes]", file), Path(folder))


def _unpacked(path: Path, file: IO[bytes], folder: Path) -> Iterator[tuple[Path, Path]]:
    found = seen = 0
    try:
        # as a stream, because a compressed file cannot seek
        with tarfile.open(fileobj=file, mode="r|") as archive:
            for member in archive:
                seen += 1
                if seen > MAX_MEMBERS:
                    message = f"contains more than {MAX_MEMBERS:,} files"
                    raise TraceFormatError(path, message, expected=EXPECTED)
                name = PurePosixPath(member.name).name
                data = archive.extractfile(member) if _is_trace(member, name) else None
                if data is None:
                    continue
                found += 1
                plain = folder / name
                with plain.open("wb") as out:
                    shutil.copyfileobj(data, out, 1 << 20)
                os.utime(plain, (member.mtime, member.mtime))
                yield plain, path / member.name.lstrip("/")
                plain.unlink()
    except (tarfile.TarError, EOFError, OverflowError) as error:
        raise TraceFormatError(path, f"damaged or cut off: {error}", expected=EXPECTED) from None
    if not found:
        raise TraceFormatError(path, "contains no trace", expected=EXPECTED)


def _is_trace(member: tarfile.TarInfo, name: str) -> bool:
    is_nested = name.lower().endswith(ARCHIVES)
    is_trace = name.lower().endswith(tuple(SUFFIXES)) and not name.startswith(".")
    return member.isreg() and is_trace and not is_nested


@contextmanager
def member_source(plain: Path, shown: Path) -> Iterator[Source]:
    """Yield the source of an unpacked member. Errors contain the path in the archive."""
    with errors_that_name(plain, shown):
        source = read_source(plain)
        raws: tuple[Any, ...] = tuple(replace(raw, name=shown.name) for raw in source.raws)
        yield replace(source, path=shown, raws=raws)
