"""The cache of compiled CUDA sources: one cubin file per source, options and architecture.

cuda.core's own program cache cannot store name expressions and does not track included files.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from profharness.errors import UsageError
from profharness.files import atomic_file, read_input

MAGIC = b"profharness-1"
SOURCE_BYTES = 16_000_000  # of a file of source code
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.MULTILINE)


@dataclass(frozen=True)
class CompiledSource:
    """A cubin for one architecture."""

    cubin: bytes
    names: Mapping[str, str]
    """The mangled name of each name expression."""
    arch: str
    nvrtc: str
    """The compiler's version, such as `13.0`."""
    from_cache: bool = False


class _Trailer(msgspec.Struct, frozen=True):
    """The data that follows the cubin in a cache file. sha256 is the hash of the cubin."""

    names: dict[str, str]
    arch: str
    nvrtc: str
    sha256: str


def cache_folder() -> Path:
    """Return `profharness/cuda` in $XDG_CACHE_HOME, or in `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(base) / "profharness" / "cuda"


def is_source(path: Path) -> bool:
    """Return whether a path is a regular file small enough to be source code."""
    return path.is_file() and path.stat().st_size <= SOURCE_BYTES


def local_files(source: Path, text: bytes) -> dict[Path, bytes]:
    """Return the contents of the source (`text`) and of all local files that it includes.

    Names are searched in the folder of the including file, then in that of the source, as NVRTC
    does. Files in neither folder are omitted: the compiler reports them, or a macro disables the
    include.
    """
    files: dict[Path, bytes] = {}
    todo = [source]
    while todo:
        path = todo.pop()
        if path in files:
            continue
        files[path] = text if path == source else path.read_bytes()
        for name in _INCLUDE.findall(files[path]):
            places = (folder / os.fsdecode(name) for folder in (path.parent, source.parent))
            # One key per file, regardless of how its includes spell the path.
            todo += [Path(os.path.normpath(place)) for place in places if is_source(place)][:1]
    return files


def cache_key(files: Mapping[Path, bytes], parts: Iterable[str]) -> str:
    """Hash the files, their paths (line information contains them) and the parts to 32 hex digits."""
    digest = hashlib.sha256(MAGIC)
    texts = [part.encode() for part in parts]
    # The order of the includes must not change the key.
    for path in sorted(files):
        texts += [os.fsencode(path), files[path]]
    for text in texts:
        # The length prefix distinguishes `ab`, `c` from `a`, `bc`.
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()[:32]


def distrust_reason(path: Path) -> str | None:
    """Return why another user may have written a cache file, based on the owner and mode of the file
    and its folder. Return None if only this user can write it, or if it is missing.
    """
    for place in (path.parent, path):
        try:
            # lstat: the owner of a link can change its target.
            state = place.lstat()
        except OSError:
            return None
        if state.st_uid != os.geteuid():
            return f"{place} belongs to another user"
        if stat.S_ISLNK(state.st_mode) or state.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return f"{place} is a link or can be written by others"
    return None


def read_cached(path: Path) -> CompiledSource | None:
    """Read a file that `write_cached` wrote. Return None if it is missing, unreadable or damaged."""
    try:
        content = read_input(path)
    except OSError:
        return None
    length_at = len(content) - len(MAGIC) - 8
    if length_at < 0 or not content.endswith(MAGIC):
        return None
    trailer_at = length_at - int.from_bytes(content[length_at : length_at + 8], "little")
    if trailer_at < 0:
        return None
    try:
        trailer = msgspec.json.decode(content[trailer_at:length_at], type=_Trailer)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    cubin = content[:trailer_at]
    if hashlib.sha256(cubin).hexdigest() != trailer.sha256:
        return None
    return CompiledSource(cubin, trailer.names, trailer.arch, trailer.nvrtc, from_cache=True)


def write_cached(path: Path, compiled: CompiledSource) -> bool:
    """Write a cache file atomically in a folder that only this user can access.

    Return False if the folder is not writable or belongs to another user. The cubin comes first, so
    that cuobjdump and nvdisasm can read the file.
    """
    digest = hashlib.sha256(compiled.cubin).hexdigest()
    names = dict(compiled.names)
    trailer = msgspec.json.encode(_Trailer(names, compiled.arch, compiled.nvrtc, digest))
    content = compiled.cubin + trailer + len(trailer).to_bytes(8, "little") + MAGIC
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.parent.stat().st_uid != os.geteuid():
            return False
        # An existing folder may have another mode.
        path.parent.chmod(0o700)
        with atomic_file(path, force=True) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(content)
    except (OSError, UsageError):
        return False
    return True
