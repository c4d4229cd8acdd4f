"""Replace each text, or the end of a text, that is not known to be harmless."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from profharness.scrub.allowed import (
    BY_KEY,
    REPLACEMENT,
    is_known_name,
    known_length,
    without_package_roots,
)

EXCERPT = 80
MAX_KEY = 24
# The keys of these objects are names of backends. An unknown key is replaced and not dropped.
BY_BACKEND = frozenset({"backend_code", "backend_commit", "implementations"})
_BACKEND = re.compile(r"(?P<file>.+\.(?:py|cu|ptx)):(?P<function>\w+)")


@dataclass
class Scrubber:
    """Replaces texts, and records each replacement once.

    A private text gets the same number wherever it occurs in one copy. Unlike the hash of a short
    text, the number reveals nothing about the text.
    """

    changes: dict[tuple[str, str, str], None] = field(default_factory=dict)
    """Each key consists of the place, the kind of change, and an excerpt without the private part.

    The excerpt has at most EXCERPT characters.
    """
    where: str = ""
    looks_for_deleted: bool = False  # whether to look for deleted texts in SQLite pages
    _numbers: dict[str, int] = field(default_factory=dict)

    def record(self, kind: str, text: str, where: str = "") -> None:
        """Record that something is replaced or dropped."""
        self.changes.setdefault((where or self.where, kind, text[:EXCERPT]))

    def clean(self, text: str, key: str = "", *, where: str = "") -> str:
        """Return the text up to its first unknown word, with a placeholder for the rest."""
        if key == "Call stack" and ";" in text:
            return ";".join(self.clean(frame, key, where=where) for frame in text.split(";"))
        plain = without_package_roots(text)
        length = known_length(plain, key)
        if length == len(plain):
            if plain != text:
                self.record("path", plain, where)
            return plain
        rest = plain[length:].rstrip()
        match = _BACKEND.fullmatch(rest)
        tail = ""
        if match and known_length(match["function"]) == len(match["function"]):
            rest, tail = match["file"], f":{match['function']}"
        number = self._numbers.setdefault(rest, len(self._numbers) + 1)
        cleaned = f"{plain[:length]}{REPLACEMENT}{number}{tail}"
        self.record("text", cleaned, where)
        return cleaned

    def value(self, value: Any, key: str = "") -> Any:
        """Return a JSON value with cleaned texts and without members whose keys are unknown.

        `key` is the name of the innermost member that contains the value.
        """
        if isinstance(value, str):
            return self.clean(value, key)
        if isinstance(value, dict):
            return dict(self._members(value, key))
        if isinstance(value, list | tuple):
            return [self.value(item, key) for item in value]
        return value

    def _members(self, value: dict[Any, Any], around: str) -> Iterator[tuple[str, Any]]:
        for key, item in value.items():
            key = str(key)
            if around in BY_BACKEND:
                yield self.clean(key), self.value(item, around)
            elif self.is_known_key(key):
                yield key, self.value(item, key)
            elif item not in (None, "", [], {}, ()):
                self.drop(key)

    def is_known_key(self, key: str) -> bool:
        """Return whether a key consists of known words."""
        return bool(key) and (key in BY_KEY or known_length(key) == len(key))

    def is_known_name(self, name: str) -> bool:
        """Return whether the name of a table or column consists of known words."""
        return re.fullmatch(r"\w{1,80}", name, re.ASCII) is not None and is_known_name(name)

    def drop(self, key: str) -> None:
        """Record that the member of an object is dropped."""
        is_plain = re.fullmatch(rf"[A-Za-z_]{{1,{MAX_KEY}}}", key) is not None
        self.record("key", key if is_plain else "a key that is not known")
