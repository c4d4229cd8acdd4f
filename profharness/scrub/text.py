"""A text without what is private, and the host and user names that texts give away."""

from __future__ import annotations

import contextlib
import getpass
import re
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from profharness.scrub.rules import (
    HASH_NAME,
    HIDDEN,
    RULES,
    SECRET,
    SECRETS,
    Rule,
    is_argument,
    is_hash,
    is_secret,
    may_hold,
    words,
)

REMOVED = "<removed>"
MAX_PASSES = 4
OVERLAP = 1 << 10
MIN_NAME = 3
LONG_NAME = 5


# Host and user names that half the world has, or that are words of traces.
COMMON_NAMES = words(
    "admin app aten attention autograd backward bench bool build cell char conda const container copy "
    "cuda cudnn cutlass data debian default dev device docker double ec2-user fedora fill flash float "
    "forward gemm gpu graph guest half home host index int jovyan kernel launch linuxbrew local "
    "localhost long lost+found main math max mean memcpy memset min model mul name native nccl nobody "
    "none notebook nvidia object ops process profharness public python python3 range reduce root run "
    "runner server shared softmax sort src step stream string sum temp tensor test thread time tmp "
    "torch train triton ubuntu user username users vector void vscode warmup work worker workspace"
)
# JSON keys whose value names a machine, a person or a job, whatever the value looks like.
PRIVATE_KEYS = words(
    "host_name hostname HOSTNAME traceName trace_id distributedInfo argv cmdline command_line env "
    "user username USER LOGNAME HOME PWD PATH LD_LIBRARY_PATH"
)

# Seen in a text before the patterns below are tried: they cost a hundred times more.
_GATES = (
    b"home", b"Users", b"users", b"host_name", b"hostname", b"HOST", b"user_name", b"username",
    b'"user"', b"USER", b"LOGNAME",
)  # fmt: skip
_WORD = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-"
# A last part with a dot (`/home/run.py`) is a file's name.
_HOME = re.compile(
    r"(?:[/\\]|%2[Ff])(?:home\d*|[Uu]sers)(?:[/\\]|%2[Ff])+(?:(?P<name>[A-Za-z_][\w.-]*)(?=[/\\%])"
    r"|(?P<last>[A-Za-z_][\w-]*)(?![\w/\\-]|\.\w))"
)
_NAMED = re.compile(
    r"(?:\"(?:host_?name|HOSTNAME|user_?name|user|USER|LOGNAME)\"\s*:\s*\""
    r"|\b(?:HOST|HOSTNAME|USER|USERNAME|LOGNAME)=[\"']?)(?P<name>[A-Za-z_][\w.-]*)"
)


def names_in(texts: Iterable[str]) -> frozenset[str]:
    """Private names that texts give away: owners of home folders, values of `USER` and the like."""
    users, values = set[str](), set[str]()
    for text in texts:
        users.update(match["name"] or match["last"] for match in _HOME.finditer(text))
        values.update(match["name"] for match in _NAMED.finditer(text))
    return private_names(values) | set(filter(_worth_looking_for, users))


def windows(blocks: Iterable[bytes], overlap: int) -> Iterator[tuple[int, bytes]]:
    """Each block behind the last bytes of those before it, and where in all of them that begins."""
    offset, carried = 0, b""
    for block in blocks:
        window = carried + block
        yield offset - len(carried), window
        offset += len(block)
        carried = window[-overlap:]


def names_in_stream(blocks: Iterable[bytes]) -> frozenset[str]:
    """The same of a file in blocks of at least OVERLAP bytes."""

    def texts() -> Iterator[bytes]:
        """Texts that overlap and do not end inside a word."""
        window = b""
        for _, window in windows(blocks, OVERLAP):
            if any(gate in window for gate in _GATES):
                yield window.rstrip(_WORD)
        yield window[-OVERLAP:]

    return names_in(text.decode("utf-8", "replace").replace("\\/", "/") for text in texts())


def private_names(names: Iterable[str]) -> frozenset[str]:
    """The names with and without their domain, without common words."""
    variants = {part for name in names for part in (name.strip(), name.strip().partition(".")[0])}
    return frozenset(filter(_worth_looking_for, variants))


def _worth_looking_for(name: str) -> bool:
    common = name.lower() in COMMON_NAMES or name.isdecimal()
    return len(name) >= MIN_NAME and not common


def machine_names() -> frozenset[str]:
    """This machine's host name and this user's name, if they are no common words."""
    names = [socket.gethostname()]
    with contextlib.suppress(OSError, KeyError, ImportError):
        names.append(getpass.getuser())
    return private_names(names)


class Match(NamedTuple):
    """One private thing in a text; of a secret text is the placeholder."""

    kind: str
    text: str


@dataclass(frozen=True)
class Cleaner:
    """The rules, and the host and user names that are private besides. files are paths of backends,
    each with the name that stands in its place wherever it is.
    """

    names: frozenset[str] = frozenset()
    files: tuple[tuple[str, str], ...] = ()
    _other: tuple[Rule, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rules = RULES[len(SECRETS) :]
        if self.names:
            either = "|".join(re.escape(name) for name in sorted(self.names, key=len, reverse=True))
            # long names also as a part of `alice_run`; short ones are parts of words too often
            long = [re.escape(name) for name in self.names if len(name) >= LONG_NAME]
            parts = f"|(?<![A-Za-z0-9])(?:{'|'.join(long)})(?![A-Za-z0-9])" if long else ""
            pattern = re.compile(rf"(?<![\w-])(?:{either})(?![\w-]){parts}")
            rules += (Rule("host or user name", re.compile(either), pattern, "<name>"),)
        if self.files:
            names = dict(self.files)
            either = "|".join(re.escape(path) for path in sorted(names, key=len, reverse=True))
            named = re.compile(rf"(?<![\w.])(?:{either})(?!\w)")
            path = Rule("path", re.compile(either), named, lambda match: names[match[0]])
            rules = (path, *rules)
        object.__setattr__(self, "_other", rules)

    @property
    def byte_gates(self) -> list[re.Pattern[bytes]]:
        """The gates for ASCII bytes; where none opens, only secrets are to be cleaned."""
        return [re.compile(rule.gate.pattern.encode()) for rule in self._other]

    def rules(self, text: str) -> tuple[Rule, ...]:
        """The rules that can match in a text."""
        return (*SECRETS, *self._other) if may_hold(text) else self._other

    def find(self, text: str) -> Iterator[Match]:
        """Everything private in the text, rule by rule; no part of it under one kind twice."""
        covered: dict[str, list[tuple[int, int]]] = {}
        for rule in self.rules(text):
            if not rule.gate.search(text):
                continue
            spans = covered.setdefault(rule.kind, [])
            for match in rule.pattern.finditer(text):
                start, end = match.span()
                replacement = rule.replace(match)
                if replacement is None or any(a <= start and end <= b for a, b in spans):
                    continue
                spans.append((start, end))
                yield Match(rule.kind, replacement if rule.kind == SECRET else match[0])

    def clean(self, text: str) -> str:
        """The text with a placeholder for each thing that `find` finds; what resists is removed."""
        return _clean(self, text)

    def clean_json(self, value: Any) -> Any:
        """A JSON value with all its texts cleaned, keys too, and without PRIVATE_KEYS."""
        if isinstance(value, str):
            return self.clean(value)
        if isinstance(value, dict):
            return {
                self.clean(str(key)): self.clean_member(str(key), item)
                for key, item in value.items()
                if key not in PRIVATE_KEYS
            }
        if isinstance(value, list | tuple):
            before = [None, *value][: len(value)]
            return [
                HIDDEN if is_argument(first, item) else self.clean_json(item)
                for first, item in zip(before, value, strict=True)
            ]
        return value

    def clean_member(self, key: str, value: Any) -> Any:
        """The value of an object's key, cleaned; a hash of content under the name of one is kept."""
        if is_secret(key, value):
            return HIDDEN
        if isinstance(value, dict) and HASH_NAME.fullmatch(key):
            hashes = {str(name): item for name, item in value.items() if is_hash(key, item)}
            return self.clean_json(value) | {self.clean(name): hashes[name] for name in hashes}
        return value if is_hash(key, value) else self.clean_json(value)


@lru_cache(maxsize=1 << 14)
def _clean(cleaner: Cleaner, text: str) -> str:
    for _ in range(MAX_PASSES):
        before = text
        for rule in cleaner.rules(text):
            text = rule.clean(text)
        if text == before:
            return text
    return text if next(cleaner.find(text), None) is None else REMOVED
