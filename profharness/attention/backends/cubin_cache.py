"""The cache of compiled CUDA sources: one cubin file per source, options and architecture.

cuda.core's own program cache cannot store name expressions and does not track included files.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from profharness.errors import UsageError
from profharness.files import atomic_file, read_input

MAGIC = b"profharness-1"
SOURCE_BYTES = 16_000_000  # maximum size of a source file, in bytes
_SPLICE = re.compile(rb"\\[ \t]*\r?\n")
# The first pattern matches an include that contains a file name. The second matches anything that
# may be an include, also one with a comment or a macro.
_INCLUDE = re.compile(
    rb'(?:(?:#|%:)[ \t\v\f]*include(?:_next)?|__has_include(?:_next)?[ \t]*\()[ \t\v\f]*["<]([^">\n]+)[">]'
)
_ANY_INCLUDE = re.compile(
    rb"(?:#|%:|\?\?=|\*/)[ \t\v\f]*include(?:_next)?\b|__has_include(?:_next)?[ \t]*\("
)


@dataclass(frozen=True)
class CompiledSource:
    """A cubin for one architecture."""

    cubin: bytes
    names: Mapping[str, str]
    """The mangled name of each C++ name expression."""
    arch: str
    nvrtc: str
    """The compiler's version, such as `13.0`."""
    from_cache: bool = False


class _Trailer(msgspec.Struct, frozen=True):
    """The data that follows the cubin in a cache file. `sha256` is the hash of the cubin."""

    names: dict[str, str]
    arch: str
    nvrtc: str
    sha256: str


def cache_folder() -> Path:
    """Return the folder of the cache: `profharness/cuda` in $XDG_CACHE_HOME, or in `~/.cache` if
    the variable is not set.
    """
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(base) / "profharness" / "cuda"


def is_source(path: Path) -> bool:
    """Return whether a path is a regular file that is small enough to be source code."""
    return path.is_file() and path.stat().st_size <= SOURCE_BYTES


def local_files(
    source: Path, text: bytes, folders: Sequence[Path] = (), before: Sequence[str] = ()
) -> tuple[dict[Path, bytes], bool]:
    """Return the contents of the source and of all local files that it may include, and whether the
    list of files is complete. `text` is the content of the source.

    Includes are searched in the folder of the including file, in the folder of the source, and in
    `folders`. `before` contains the names of files that are included before the source. The search
    order of the compiler depends on the kind of include. Therefore the result contains every file
    that a name may refer to. A name that is in none of the folders is left out: either the compiler
    reports it, or a macro disables the include.
    """
    files: dict[Path, bytes] = {}
    complete = True
    places = [source.parent, *folders]
    todo = [source, *(Path.cwd() / name for name in before)]
    todo += [folder / name for folder in places for name in before]
    while todo:
        # Each file has one key, even if includes spell its path differently.
        path = Path(os.path.normpath(spelled := todo.pop()))
        if path in files or not (path.exists() or path == source):
            continue
        # If the path contains a link, `..` may lead to another folder.
        complete &= path == spelled or (spelled.exists() and path.samefile(spelled))
        if path != source and not is_source(path):
            complete &= path.is_dir()
            continue
        files[path] = text if path == source else read_input(path, limit=SOURCE_BYTES)
        spliced = _SPLICE.sub(b"", files[path])
        names = _INCLUDE.findall(spliced)
        complete &= len(names) == len(_ANY_INCLUDE.findall(spliced))
        todo += [folder / os.fsdecode(name) for folder in (path.parent, *places) for name in names]
    return files, complete


def cache_key(files: Mapping[Path, bytes], parts: Iterable[str]) -> str:
    """Return a hash of 32 hex digits of the files, their paths and the parts. The paths are
    included because line information contains them.
    """
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
    """Return why another user may have written a cache file. The check uses the owner and the mode
    of the file and of its folder. Return None if only this user can write the file, or if it does
    not exist.
    """
    for place in (path.parent, path):
        try:
            # Use lstat, because the owner of a link can change its target.
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
