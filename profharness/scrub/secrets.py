"""Passwords, keys and tokens in a text: by their well-known forms, and by the name before them.

Each rule is a gate that is cheap to search, a pattern, and what stands in place of a match, None to
let it be. Sources of the forms: the issuers' own pages on their tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache

import msgspec

SECRET = "secret"
HIDDEN = "<secret>"

_Replace = Callable[[re.Match[str]], str | None]

_MIXED = r"(?=[\w-]*[0-9A-Z]|[a-z]{20})"  # a short word of small letters alone is a name
_FORMS = (
    r"gh[pousr]_[A-Za-z0-9]{10,}",
    r"github_pat_\w{10,}",
    r"glpat-[\w-]{10,}",
    rf"hf_{_MIXED}[A-Za-z0-9]{{10,}}",
    rf"sk-{_MIXED}[\w-]{{12,}}",
    rf"(?:sk|rk|pk)_(?:live|test)_{_MIXED}\w{{10,}}",
    r"(?:AKIA|ASIA)[0-9A-Z]{12,}",
    r"AIza[\w-]{30,}",
    r"xox[abeoprs]-[\w-]{10,}",
    rf"(?:pypi|npm|nvapi|dckr_pat|xapp)[-_]{_MIXED}[\w-]{{16,}}",
    r"eyJ[\w-]{5,}\.[\w-]{5,}(?:\.[\w-]*)?",
)
# What names a secret when `=` or `:` follows it; the word may end a longer one, as HF_TOKEN does.
_NAMES = (
    r"(?:(?i:token|secret|passw(?:or)?d|passphrase|pass_?phrase|credentials?|authorization"
    r"|(?:api|access|private|secret|auth|ssh|signing|encryption|license|account)[_-]?key)"
    r"|(?:(?<=_)|(?<![A-Za-z]))(?:KEY|PASS|PWD|AUTH))"
)
_MARKS = r"[\"'\\]*+"  # quotes of JSON, also inside a text of JSON
_VALUE = (
    r"(?P<value>(?i:(?:bearer|basic|digest|token)\s+(?=[^\s<]))?"
    r"(?:(?<=[\"'])[^\"'\\\n<]+|[^\s,;\"'&<>()\[\]{}\\]+))"
)
# what follows `token=` in texts of models and types
_HARMLESS = re.compile(
    r"(?:\d{1,7}(?:\.\d+)?|none|null|nil|nan|true|false|str|int|float|bytes|bool|optional|any|\*+)",
    re.IGNORECASE,
)
_STRONG = re.compile(r"passw|passphrase|secret|PASS|PWD", re.IGNORECASE)


def _hide(_: re.Match[str]) -> str:
    return HIDDEN


def _hide_value(match: re.Match[str]) -> str | None:
    value = match["value"]
    number = value.replace(".", "", 1).isdecimal()
    if _HARMLESS.fullmatch(value) and not (number and _STRONG.search(match["name"])):
        return None
    whole, start = match[0], match.start("value") - match.start()
    return f"{whole[:start]}{HIDDEN}"


TOKENS: tuple[str, str, _Replace] = (
    r"gh[pousr]_|github_pat_|glpat-|hf_|sk-|[srp]k_(?:live|test)_|AKIA|ASIA|AIza|xox[abeoprs]-"
    r"|pypi[-_]|npm[-_]|nvapi[-_]|dckr_pat[-_]|xapp[-_]|eyJ|PRIVATE KEY-",
    rf"(?<![A-Za-z0-9])(?:{'|'.join(_FORMS)})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[\w+/=\s\\-]*?-----END [A-Z ]*PRIVATE KEY-----"
    r"|[\w+/=\s\\]*)",
    _hide,
)
BEARER: tuple[str, str, _Replace] = (
    r"[Bb]earer|BEARER",
    r"(?P<name>[Bb]earer|BEARER)\s+(?P<value>[\w.~+/=-]{6,})",
    _hide_value,
)
OPTION: tuple[str, str, _Replace] = (
    r"--[\w-]*(?i:token|passw|secret|key)",
    r"--(?P<name>[\w-]*(?i:token|password|passwd|secret|api-key))\s+(?P<value>[^\s\"'<-][^\s\"'<]*)",
    _hide_value,
)
ASSIGNED: tuple[str, str, _Replace] = (
    r"(?i:token|secret|passwd|password|phrase|credentials?|authorization|key|pass|pwd|auth)"
    rf"{_MARKS}\s*+[:=]",
    rf"(?P<name>{_NAMES}){_MARKS}\s*+(?:=(?!=)|:(?!:))\s*+\\*+[\"']?+{_VALUE}",
    _hide_value,
)
_ASSIGNED = re.compile(ASSIGNED[1])


# One of these stands, in small letters, in every text that a rule matches in; a search for words is
# ten times cheaper than the gates.
_HINTS = (
    "token", "secret", "pass", "credential", "auth", "key", "pwd", "bearer", "ghp_", "gho_", "ghu_",
    "ghs_", "ghr_", "github_pat_", "glpat-", "hf_", "sk-", "k_live", "k_test", "akia", "asia", "aiza",
    "xox", "pypi", "npm", "nvapi", "dckr_pat", "xapp", "eyj",
)  # fmt: skip
_BYTE_HINTS = tuple(hint.encode() for hint in _HINTS)


def may_hold(text: str) -> bool:
    """Whether any rule can match in a text."""
    small = text.lower()
    return any(hint in small for hint in _HINTS)


def may_hold_bytes(data: bytes) -> bool:
    """The same of ASCII bytes."""
    small = data.lower()
    return any(hint in small for hint in _BYTE_HINTS)


@lru_cache(maxsize=4096)
def names_a_secret(key: str) -> bool:
    """Whether a text that stands under this key is a secret."""
    return _ASSIGNED.search(f'"{key}": "x9"') is not None


def is_secret(key: str, value: object) -> bool:
    """Whether a member of a JSON object is a secret by its name; a count of tokens is none."""
    if not names_a_secret(key) or not isinstance(value, str | int | float):
        return False
    match = _ASSIGNED.search(f'"{key}": {msgspec.json.encode(value).decode()}')
    return match is not None and _hide_value(match) is not None
