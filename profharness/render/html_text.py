"""Write texts as HTML that wraps only where a line may end."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape

from profharness.errors import FIGURE, one_line

_AFTER_SLASH = re.compile(r"(?<=\w/)(?=\w{3})")
_AFTER_SIGN = re.compile(r"(?<=[,<])(?=\w)|(?<=\.)(?=[^\W\d])")
# A part such as `_0` or `_7_64x128x64` stays whole.
_AFTER_UNDERSCORE = re.compile(r"(?<=[^\W_]{2}_)(?=[^\W\d_]|\d+[a-z])")
_LONG_WORD = re.compile(r"\w{17,}")
_UNBROKEN = re.compile(rf"(\{{[0-9]+-[0-9]+\}}|(?<![\w-])--[a-z][\w-]*|{FIGURE})")
_CODE = re.compile(r"`([^`]+)`")


def plain(text: str) -> str:
    """Return the HTML of a text."""
    return escape(one_line(text), quote=True)


def prose(text: str) -> str:
    """Return the HTML of a text that does not wrap within `{0-23}`, an option such as `--full`, or
    a figure such as `27 %`.
    """
    return _unbroken(text, plain)


def marked(text: str) -> str:
    """Return the HTML of a text like `prose`, with the parts between backticks as code."""
    return "".join(
        f"<code>{plain(part)}</code>" if at % 2 else prose(part)
        for at, part in enumerate(_CODE.split(one_line(text)))
    )


def wrapping(text: str) -> str:
    """Return the HTML of a text like `prose`, which also wraps between the parts of a name.

    A path wraps only after slashes, and a name wraps after underscores only if it is long.
    """
    return _unbroken(
        text,
        lambda part: "<wbr>".join(map(plain, re.sub(r"\S+", _parts, part).split("\0"))),
    )


def _parts(name: re.Match[str]) -> str:
    """Return a name with a null character in each place where a line may end."""
    if "/" in name[0]:
        return _AFTER_SLASH.sub("\0", name[0])
    parts = _AFTER_SIGN.sub("\0", name[0])
    return _LONG_WORD.sub(lambda word: _AFTER_UNDERSCORE.sub("\0", word[0]), parts)


def _unbroken(text: str, other: Callable[[str], str]) -> str:
    """Return the HTML of a text. `other` returns the HTML of the parts that may wrap."""
    return "".join(
        f'<span class="span">{plain(part)}</span>' if at % 2 else other(part)
        for at, part in enumerate(_UNBROKEN.split(one_line(text)))
    )
