"""Detect network file systems.

SQLite's write-ahead log does not work on a network file system. Its index is in shared memory,
which other hosts cannot access, and file locks are unreliable. See https://sqlite.org/wal.html.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from profharness.errors import StoreError
from profharness.files import DEFAULT_STORE, STORE_VARIABLE

# names of network file systems, by the type in mountinfo without the prefix `fuse.`
NETWORK = {
    "9p": "9P",
    "afs": "AFS",
    "beegfs": "BeeGFS",
    "ceph": "CephFS",
    "ceph-fuse": "CephFS",
    "cifs": "CIFS",
    "gcsfuse": "Cloud Storage FUSE",
    "glusterfs": "GlusterFS",
    "goofys": "S3 (goofys)",
    "gpfs": "GPFS",
    "juicefs": "JuiceFS",
    "lustre": "Lustre",
    "nfs": "NFS",
    "nfs4": "NFS",
    "orangefs": "OrangeFS",
    "panfs": "PanFS",
    "pvfs2": "PVFS",
    "rclone": "rclone",
    "s3fs": "S3 (s3fs)",
    "smb3": "SMB",
    "smbfs": "SMB",
    "sshfs": "SSHFS",
    "wekafs": "WekaFS",
}
MOUNTS = Path("/proc/self/mountinfo")
ROOT = "/"
_OCTAL = re.compile(r"\\([0-7]{3})")


def network_name(path: Path) -> str | None:
    """Return the name of the network file system that contains a path. The path need not exist.

    Return None if the path is on a local disk, or if the mounts cannot be read.
    """
    with contextlib.suppress(OSError):
        real = os.path.realpath(path)
        under = [
            (len(point), kind)
            for point, kind in _mounts(MOUNTS.read_text(errors="surrogateescape"))
            if point == ROOT or real == point or real.startswith(f"{point}/")
        ]
        # a later mount covers an earlier one at the same point
        length = max((length for length, _ in under), default=0)
        kinds = [kind for place, kind in under if place == length]
        if kinds and not (
            kinds[-1] == "9p" and length == len(ROOT)
        ):  # the root of a sandbox is often mounted with 9P
            return NETWORK.get(kinds[-1].removeprefix("fuse."))
    return None


def _mounts(text: str) -> Iterator[tuple[str, str]]:
    """Yield the mount point and type of each line of mountinfo."""
    for line in text.splitlines():
        fields, dash, rest = line.partition(" - ")
        places = fields.split(" ")
        if dash and len(places) > 4:
            point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), places[4])
            yield point, rest.split(" ")[0]


def refuse_network(path: Path) -> None:
    """Raise StoreError if a store that is to be written is on a network file system."""
    name = network_name(path)
    if name is not None:
        raise StoreError(
            f"{path}: lies on {name}, where several hosts would damage it; keep the store on a disk of "
            f"one host (--store {_elsewhere()}, or {STORE_VARIABLE}); run folders and traces may stay"
        )


def file_beside(path: Path, suffix: str) -> Path:
    """Return the path of a file that SQLite creates next to a store, such as its log.

    Symbolic links are resolved.
    """
    return Path(f"{os.path.realpath(path)}{suffix}")


def may_be_read(path: Path) -> str | None:
    """Return the name of the network file system that contains a store, or None for a local disk.

    Raises StoreError if the store is on a network file system and has a log, because another host
    may be writing to it.
    """
    name = network_name(path)
    log = file_beside(path, "-wal")
    with contextlib.suppress(OSError):
        if name is not None and log.stat().st_size:
            raise StoreError(
                f"{path}: lies on {name} and has a log beside it ({log.name}): another host may be "
                f"writing to it; copy both to a disk of this host and name that with --store"
            )
    return name


def _elsewhere() -> Path:
    """Suggest a path on a local disk for a store, in the user's home or in a temporary folder."""
    places = [Path.home(), Path("/var/tmp"), Path(tempfile.gettempdir())]
    usable = (
        place for place in places if os.access(place, os.W_OK) and network_name(place) is None
    )
    return next(usable, places[-1]) / DEFAULT_STORE
