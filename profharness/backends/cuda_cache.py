"""Compiled CUDA sources on disk: what decides whether one is still right, and files that several
processes may write at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

MAGIC = b"profharness-1"

_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*["<]([^">\n]+)[">]', re.MULTILINE)


@dataclass(frozen=True)
class CompiledSource:
    """A cubin for one architecture. names: each name expression to its mangled name; nvrtc: the
    compiler's version, such as `13.0`; from_cache: nothing was compiled for it.
    """

    cubin: bytes
    names: Mapping[str, str]
    arch: str
    nvrtc: str
    from_cache: bool = False


class _Trailer(msgspec.Struct, frozen=True):
    """What stands behind the cubin in a cache file; sha256 is the cubin's."""

    names: dict[str, str]
    arch: str
    nvrtc: str
    sha256: str


def cache_folder() -> Path:
    """`profharness/cuda` below $XDG_CACHE_HOME, or below `.cache` of the user's folder."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(base) / "profharness" / "cuda"


def local_files(source: Path, text: bytes) -> dict[Path, bytes]:
    """The source, whose content is text, and the content of every file that it includes as `"..."`,
    directly or not.

    A name is looked for beside the including file, then beside the source, as NVRTC does. One that
    is in neither place is left out: the compiler will say so, or a macro hides the include.
    """
    found: dict[Path, bytes] = {}
    todo = [source]
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found[path] = text if path == source else path.read_bytes()
        for name in _INCLUDE.findall(found[path]):
            places = (folder / os.fsdecode(name) for folder in (path.parent, source.parent))
            todo += [Path(os.path.normpath(place)) for place in places if place.is_file()][:1]
    return found


def cache_key(files: Mapping[Path, bytes], parts: Iterable[str]) -> str:
    """32 hex digits of everything that decides the cubin: the files with their paths (which line
    information names) and the parts in their order.
    """
    digest = hashlib.sha256(MAGIC)
    texts = [part.encode() for part in parts]
    for path in sorted(files):
        texts += [os.fsencode(path), files[path]]
    for text in texts:
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()[:32]


def read_cached(path: Path) -> CompiledSource | None:
    """What `write_cached` left, or None if the file is missing, unreadable or damaged."""
    try:
        content = path.read_bytes()
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
    """Write the file whole or not at all; False where the folder cannot be written to.

    The cubin comes first, so that cuobjdump and nvdisasm read the file as it is.
    """
    digest = hashlib.sha256(compiled.cubin).hexdigest()
    names = dict(compiled.names)
    trailer = msgspec.json.encode(_Trailer(names, compiled.arch, compiled.nvrtc, digest))
    content = compiled.cubin + trailer + len(trailer).to_bytes(8, "little") + MAGIC
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                Path(temporary).unlink()
        return False
    return True
