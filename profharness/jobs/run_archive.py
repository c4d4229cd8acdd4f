"""Publish finished run folders.

Lanes that cannot access the folder of the campaign send their run folders as archives.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, cast

from profharness.errors import CaptureError, TraceFormatError
from profharness.files import open_input
from profharness.run import read_run, unwritable

BLOCK = 1 << 20
UNPACKING = ".unpacking"  # suffix of a folder while it is unpacked


def content_hash(folder: Path) -> str:
    """Return a hash of the names and bytes of a folder's regular, visible files."""
    digest = hashlib.blake2b(digest_size=16)
    for name, path in _files(folder):
        with open_input(path, within=folder) as file:
            digest.update(f"{name}\0{file.size}\0".encode())
            while block := file.read(BLOCK):
                digest.update(block)
    return digest.hexdigest()


def pack(folder: Path) -> bytes:
    """Return a tar archive of the files that `content_hash` covers, without owners and times."""
    buffer = io.BytesIO()
    # without compression, because traces are already compressed
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, path in _files(folder):
            member = tarfile.TarInfo(name)
            with open_input(path, within=folder) as file:
                member.size = file.size
                archive.addfile(member, cast("IO[bytes]", file))
    return buffer.getvalue()


def unpack(data: bytes, folder: Path, expected: str) -> bool:
    """Create a folder from an archive of `pack`. Return False if the folder already exists.

    The folder appears either complete or not at all. Raise CaptureError if a member of the archive
    is no regular file or leads outside of the folder, if the hash differs from `expected`, or if the
    archive contains no run record. Raise UnwritableError if the folder cannot be written.
    """
    if folder.exists():
        return False
    part = folder.with_name(f".{folder.name}.{os.urandom(6).hex()}{UNPACKING}")
    try:
        part.mkdir(parents=True)
        _extract(data, part)
        if content_hash(part) != expected:
            raise CaptureError(
                f"{folder.name}: the archive sent by the lane does not match its hash"
            )
        read_run(part)
        return publish(part, folder)
    except (tarfile.TarError, TraceFormatError) as error:
        raise CaptureError(
            f"{folder}: the archive sent by the lane is no run folder: {error}"
        ) from None
    except OSError as error:
        # name the campaign's folder, which the user can resume
        raise unwritable(folder.parent.parent, f"{folder.name}: {error.strerror}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def publish(part: Path, final: Path) -> bool:
    """Rename the folder of a finished group to its final name.

    Return False if another lane has already published the group.
    """
    try:
        part.rename(final)
    except OSError:
        if not final.is_dir():
            raise
        shutil.rmtree(part, ignore_errors=True)
        return False
    return True


def _extract(data: bytes, part: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        for member in archive:
            name = PurePosixPath(member.name)
            plain = member.isreg() and not member.issparse() and "\0" not in member.name
            # `_files` skips hidden names, so the hash does not cover them
            hidden = any(part.startswith(".") for part in name.parts)
            if not plain or name.is_absolute() or hidden or not name.parts:
                raise CaptureError(
                    f"the archive sent by the lane contains {member.name!r}, which is refused"
                )
            path = part.joinpath(*name.parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            content = archive.extractfile(member)
            assert content is not None
            if path.exists():
                raise CaptureError(f"the archive sent by the lane contains {member.name!r} twice")
            with content, path.open("xb") as file:
                shutil.copyfileobj(content, file, BLOCK)


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the names and paths of the visible regular files below a folder, sorted by name."""
    files = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    }
    for name in sorted(files):
        if not any(part.startswith(".") for part in PurePosixPath(name).parts):
            yield name, files[name]
