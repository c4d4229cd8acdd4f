"""Replace texts that are not known to be harmless, except for a harmless start of the text.

A harmless text consists of small numbers and of technical words that are listed in words.txt, or
matches one of a few patterns.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from typing import Any

from profharness.environment import CHANGED
from profharness.traces.demangle import canonical_names
from profharness.traces.engine_steps import has_only_numbers

REPLACEMENT = "removed_"  # a number follows; the result is also a valid name of a kernel or module
MAX_TEXT = 1 << 16
MAX_DIGITS = 5  # maximum number of digits in a number
MAX_DIGITS_IN_NAME = 6
EXCERPT = 80
MAX_KEY = 24
MAX_SHORT = 3  # maximum number of one- and two-letter words in one part of a name
_OLD = "path|name|variable|secret|url|host|address|mail|command|uuid|bus|removed"

_WORD_LIST = resources.files(__package__).joinpath("words.txt").read_text("ascii")


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MARKED = words(_WORD_LIST.partition("\n")[2])
NUMBERED_WORDS = frozenset(word[:-1] for word in _MARKED if word.endswith("#"))
WORDS = frozenset(word.rstrip("#") for word in _MARKED)

# Matches the words and the groups of digits in a name. For example, `CompiledFxGraph2` consists of
# `Compiled`, `Fx`, `Graph` and `2`.
_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_EXTENTS = re.compile(r"[1-9][0-9]{0,4}(?:x[0-9]{1,5})+")
_CONFIG = re.compile(
    r"b[0-9]{1,7}h[0-9]{1,5}(?:kv[0-9]{1,5})?sq?[0-9]{1,8}(?:s(?:kv)?[0-9]{1,8})?d[0-9]{1,5}(?:dv[0-9]{1,5})?"
    r"|0x[0-9a-f]{1,4}|(?:[0-9]{1,2}d[ec]*)+"
    r"|(?:(?:bf|f|fp|tf|s|u|i)[0-9]{1,2}){2,4}"
)
_OBJECT = re.compile(r"(?<=object at )0x[0-9a-f]{6,12}(?=>|\Z)")
_REPLACED = re.compile(rf"{REPLACEMENT}[0-9]{{1,9}}")
_HEX = re.compile(r"0x|[0-9]+[a-f]{2}")

_TOKEN = re.compile(
    rf"(?P<old><(?:{_OLD})>)"
    r"|(?P<number>[0-9]{1,3}(?:,[0-9]{3})+(?![\w,])|[0-9]{1,2}/[0-9]{1,2}(?![\w/.])"
    r"|[0-9]+(?:\.[0-9]+)*(?!\w))"
    r"|(?P<name>[A-Za-z0-9_]+)"
    r"|(?P<mark>[][:<>(){},*&.=+\-/|;!?'\"#%^`])"
)
_NUMBER = re.compile(
    r"[0-9]{1,3}(?:,[0-9]{3}){1,4}|[0-9]{1,2}/[0-9]{1,2}"
    rf"|[0-9]{{1,{MAX_DIGITS}}}(?:\.[0-9]{{1,4}})?|[0-9]{{1,4}}\.[0-9]{{1,3}}\.[0-9]{{1,3}}"
)
# Matches a text that consists of a single harmless number.
_ALONE = re.compile(rf"[0-9]{{1,{MAX_DIGITS}}}(?:\.[0-9]{{1,4}})?")
_SPELLED = re.compile(r"(?<![A-Za-z0-9])(?:[A-Za-z][^A-Za-z0-9]{1,3}){5,}[A-Za-z](?![A-Za-z0-9])")
# Matches the shapes of chunks that may be an address, a path or a date. A chunk is a text without
# spaces. In its shape, `w` stands for a name, `n` for a whole number and `f` for a number with a
# decimal point. For example, the shape of `a.b/8` is `w.w/n`.
_UNSAFE = re.compile(
    r"[nf][-:.+/]+[-+]?[nf]|f,f|w\+w|\.\.+/|//|(?:\A|[^wnf)\]>*])/+[wnf.<]|w[.:]n[.:]n|n\.w.*n\.w|n-w-n"
    r"|:f|\A(?!\.\.\.\Z|--\Z)[.-]{2,}\Z|\[\.|&#|(?<![\[(<,n])n(?:,n){3}|%w|\Aw?:/"
)

HASH = re.compile(rf"(?:[0-9a-f]{{40}}|sha256:[0-9a-f]{{16}})(?:{CHANGED})?")
_SCALAR = r"-?[0-9]{1,6}(?:\.[0-9]{0,20})?(?:e[-+]?[0-9]{1,3})?"
SCALARS = re.compile(rf"\[?(?:{_SCALAR}(?:, )?)*\]?|9223372036854775807")
NUMBER_CELL = re.compile(r"-?(?:[0-9]{1,3}(?:,[0-9]{3}){0,6}|[0-9]{1,12})(?:\.[0-9]{1,20})?%?")
_INDUCTOR = r"[a-z2-7]{51,52}"
_VERSION = re.compile(
    r"[0-9]{1,4}(?:\.[0-9]{1,4}){1,2}(?:[a-z]{1,3}[0-9]{1,8})?(?:\+[a-z]{2,4}[0-9]{0,4})?"
)
_SYSTEMS = "|".join(
    (
        *(
            "Ubuntu",
            "Debian GNU/Linux",
            "Rocky Linux",
            "AlmaLinux",
            "CentOS Linux",
            "CentOS Stream",
        ),
        *(
            "Red Hat Enterprise Linux",
            "Fedora Linux",
            "Amazon Linux",
            "Oracle Linux Server",
            "SLES",
        ),
        *("openSUSE Leap", "Alpine Linux", "Darwin", "Windows"),
    )
)
# Maps keys to patterns of values that are harmless only under this key.
BY_KEY = {
    "torch_git": HASH,
    "backend_code": HASH,
    "backend_commit": HASH,
    "implementations": HASH,
    "gpu_key": re.compile(r"[0-9a-f]{12}(?:,[0-9a-f]{12})*"),
    "kernel_hash": re.compile(_INDUCTOR),
    "kernel_file": re.compile(rf"{_INDUCTOR}\.py"),
    **dict.fromkeys(("Concrete Inputs", "Process Group Ranks"), SCALARS),
    **dict.fromkeys(("python", "torch", "triton", "driver", "profharness"), _VERSION),
    "os": re.compile(rf"(?:{_SYSTEMS})(?: [0-9]{{1,4}}(?:\.[0-9]{{1,3}}){{0,2}})?"),
    "os_kernel": re.compile(r"[0-9]{1,4}(?:\.[0-9]{1,4}){1,2}"),
    "bytes": re.compile(r"[0-9]{1,12}"),
    "stream": re.compile(r"0x[0-9a-f]{1,4}"),
    "run": re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{4}"),
    "created": re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}(?:\.[0-9]{1,6})?(?:\+00:00|Z)"),
}
# Matches the text that PyTorch appends to the name of an NVTX range.
_TAIL = re.compile(
    r"(?:, seq = [0-9]{1,12})?(?:, op_id = [0-9]{1,12})?(?:, sizes = [][0-9, ]*)?"
    r"(?:, input_op_ids = [][()0-9, -]*)?\Z"
)
# Matches the name of the range around a compiled graph. The name contains the hash of the graph.
_GRAPH = re.compile(rf"## Call CompiledFxGraph {_INDUCTOR} ##")
_PACKAGES = re.compile(r"[^\s\"'(]*?[/\\](?:site-packages|dist-packages|lib/python3\.[0-9]+)[/\\]+")


# Objects whose keys are names of backends. Their unknown keys are replaced instead of dropped.
BY_BACKEND = frozenset({"backend_code", "backend_commit", "implementations"})
_BACKEND = re.compile(r"(?P<file>.+\.(?:py|cu|ptx)):(?P<function>\w+)")


def is_known_name(name: str) -> bool:
    """Return whether each part of an identifier is a known word or a small number."""
    return bool(_REPLACED.fullmatch(name)) or all(map(_is_known_part, name.split("_")))


@lru_cache(maxsize=1 << 15)
def _is_known_part(part: str) -> bool:
    if not part or part.lower() in WORDS or part.strip("w") == "" or _CONFIG.fullmatch(part):
        return True
    tokens = _PARTS.findall(_EXTENTS.sub("8", part))
    lengths = [len(token) for token in tokens if not token.isdigit()]
    groups = len(tokens) - len(lengths)
    short = sum(length < 3 for length in lengths)
    # a name with many alternations between letters and digits may be a key or a hash
    if groups > 2 or short > MAX_SHORT or (groups and lengths.count(1) > 1):
        return False
    if groups == 2 and lengths.count(1) and len(part) > 4:
        return False
    return all(itertools.starmap(_may_follow, itertools.pairwise(["", *map(str.lower, tokens)])))


def _may_follow(before: str, token: str) -> bool:
    """Return whether a token is known and may follow the token `before`."""
    if token.isdigit():
        return len(token) <= MAX_DIGITS_IN_NAME and (len(before) < 2 or before in NUMBERED_WORDS)
    return (len(token) == 1 or token in WORDS) and not _HEX.fullmatch(before + token)


def _shape(chunk: str) -> str | None:
    """Return the shape of a chunk, or None if the chunk has an unknown part or an unsafe shape."""
    shape = []
    at = 0
    while at < len(chunk):
        match = _TOKEN.match(chunk, at)
        if match is None:
            return None
        kind, text = match.lastgroup, match[0]
        if kind == "name":
            if not is_known_name(text):
                return None
            if text[0].isdigit() and at and chunk[at - 1] in ".-:":
                return None  # it may be part of an address or an id
            shape.append("w")
        elif kind == "number":
            if not _NUMBER.fullmatch(text):
                return None
            shape.append("f" if "." in text else "n")
        else:
            shape.append("w" if kind == "old" else text)
        at = match.end()
    joined = "".join(shape)
    return None if _UNSAFE.search(joined) else joined


def _unknown_at(text: str) -> int:
    """Return the position of the first unknown chunk, or the length of a text without any."""
    number = ""  # shape of the previous chunk if that chunk was a number
    word_before = False
    depth = 0  # number of open brackets; a list of numbers must be in brackets
    for match in re.finditer(r"[^ \t\n]+", text):
        shape = _shape(match[0])
        if shape is None:
            return match.start()
        if "w" in shape:
            number, word_before = shape if shape.endswith("f,") else "", True
        elif "n" in shape or "f" in shape:
            in_list = depth > 0 and number.endswith(",") and not ("f" in number and "f" in shape)
            if not (in_list if number else word_before or _word_follows(text, match.end())):
                return match.start()
            number = shape
        depth += sum(map(shape.count, "([<")) - sum(map(shape.count, ")]>"))
    return len(text)


def _word_follows(text: str, at: int) -> bool:
    following = re.compile(r"[ \t\n]+([^ \t\n]+)").match(text, at)
    if following is None:
        return _ALONE.fullmatch(text) is not None
    return "w" in (_shape(following[1]) or "")


@lru_cache(maxsize=1 << 15)
def known_length(text: str, key: str = "") -> int:
    """Return how many characters at the start of a text are known to be harmless.

    `key` is the name of the member, column or argument that contains the text. Some texts are
    harmless only under certain keys.
    """
    form = BY_KEY.get(key)
    if not text or (form is not None and form.fullmatch(text)) or _GRAPH.fullmatch(text):
        return len(text)
    if len(text) <= MAX_TEXT and has_only_numbers(text):
        return len(text)
    if len(text) > MAX_TEXT or not text.isascii():
        return 0 if len(text) > MAX_TEXT else _known_start(text)
    text = _OBJECT.sub(lambda match: "w" * len(match[0]), text)
    if text.startswith("_Z") and (plain := canonical_names([text])[0].get(text)):
        return len(text) if plain != text and _known_start(plain) == len(plain) else 0
    tail = _TAIL.search(text)
    end = tail.start() if tail else len(text)
    known = _known_start(text[:end])
    return len(text) if known == end else known


def _known_start(text: str) -> int:
    spelled = _SPELLED.search(text)
    end = spelled.start() if spelled else len(text)
    return min(end, _unknown_at(text))


@dataclass
class Scrubber:
    """Replaces texts, and records each replacement once.

    In one copy, the same private text is always replaced with the same number. Unlike a hash, the
    number reveals nothing about the text.
    """

    changes: dict[tuple[str, str, str], None] = field(default_factory=dict)
    """The keys are tuples of a place, the kind of change, and a short text without private data."""
    where: str = ""
    looks_for_deleted: bool = False  # whether to look for deleted texts in SQLite pages
    _numbers: dict[str, int] = field(default_factory=dict)

    def record(self, kind: str, text: str, where: str = "") -> None:
        """Record that data at a place is replaced or dropped. `text` must not be private."""
        self.changes.setdefault((where or self.where, kind, text[:EXCERPT]))

    def clean(self, text: str, key: str = "", *, where: str = "") -> str:
        """Return the text up to its first unknown word, with a placeholder for the rest."""
        if key == "Call stack" and ";" in text:
            return ";".join(self.clean(frame, key, where=where) for frame in text.split(";"))
        # make paths of installed packages relative to the folder that contains the packages
        plain = _PACKAGES.sub("", text) if "/" in text or "\\" in text else text
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

        `key` is the key of the innermost object member that contains the value.
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
        """Record that a member with an unknown key is dropped from an object."""
        is_plain = re.fullmatch(rf"[A-Za-z_]{{1,{MAX_KEY}}}", key) is not None
        self.record("key", key if is_plain else "an unknown key")
