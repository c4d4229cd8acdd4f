"""Write texts as HTML that wraps only where a line may end."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape

from profharness.errors import FIGURE, one_line

_BREAK = re.compile(r"(?<=[.,_<])(?=\w)")
_UNBROKEN = re.compile(rf"(\{{[0-9]+-[0-9]+\}}|(?<![\w-])--[a-z][\w-]*|{FIGURE})")


def plain(text: str) -> str:
    """Return the HTML of a text."""
    return escape(one_line(text), quote=True)


def prose(text: str) -> str:
    """Return the HTML of a text that does not wrap within `{0-23}`, an option such as `--full`, or
    a figure such as `27 %`.
    """
    return _unbroken(text, plain)


def wrapping(text: str) -> str:
    """Return the HTML of a text like `prose`, which also wraps between the parts of a path."""
    return _unbroken(
        text, lambda part: "<wbr>".join(map(plain, _BREAK.sub("\0", part).split("\0")))
    )


def _unbroken(text: str, other: Callable[[str], str]) -> str:
    """Return the HTML of a text. `other` returns the HTML of the parts that may wrap."""
    return "".join(
        f'<span class="span">{plain(part)}</span>' if at % 2 else other(part)
        for at, part in enumerate(_UNBROKEN.split(one_line(text)))
    )
