"""Names of hosts and users that a source gives away, so that they are found where they stand alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from profharness.scrub.text import COMMON_NAMES, MIN_NAME, private_names

OVERLAP = 1 << 10
# Seen in a text before the patterns below are tried: they cost a hundred times more.
_GATES = (
    b"home", b"Users", b"users", b"host_name", b"hostname", b"HOST", b"user_name", b"username",
    b'"user"', b"USER", b"LOGNAME",
)  # fmt: skip
_WORD = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"
# A last part with a dot (`/home/run.py`) is a file's name.
_HOME = re.compile(
    r"[/\\](?:home\d*|[Uu]sers)[/\\]+(?:(?P<name>[A-Za-z_][\w.-]*)(?=[/\\])"
    r"|(?P<last>[A-Za-z_][\w-]*)(?![\w/\\-]|\.\w))"
)
_TOLD = re.compile(
    r"(?:\"(?:host_?name|HOSTNAME|user_?name|user|USER|LOGNAME)\"\s*:\s*\""
    r"|\b(?:HOST|HOSTNAME|USER|USERNAME|LOGNAME)=[\"']?)(?P<name>[A-Za-z_][\w.-]*)"
)


def names_in(texts: Iterable[str]) -> frozenset[str]:
    """The names worth looking for that texts give away: owners of home folders, and values of keys
    and variables such as `host_name` and `USER`.
    """
    users: set[str] = set()
    told: set[str] = set()
    for text in texts:
        users.update(match["name"] or match["last"] for match in _HOME.finditer(text))
        told.update(match["name"] for match in _TOLD.finditer(text))
    return private_names(told) | {
        name for name in users if len(name) >= MIN_NAME and name.lower() not in COMMON_NAMES
    }


def names_in_stream(blocks: Iterable[bytes]) -> frozenset[str]:
    """The same of a file in blocks of at least OVERLAP bytes."""
    return names_in(_windows(blocks))


def _windows(blocks: Iterable[bytes]) -> Iterator[str]:
    """Texts that overlap and do not end inside a word."""
    carried = b""
    for block in blocks:
        window = carried + block
        if any(gate in window for gate in _GATES):
            yield _text(window.rstrip(_WORD))
        carried = window[-OVERLAP:]
    yield _text(carried)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace").replace("\\/", "/")
