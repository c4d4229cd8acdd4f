"""Fit the help of the commands into the width of the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import click

from profharness.errors import NO_BREAK, wrapped

UNCHANGED = "\b"
"""A line that marks a paragraph whose line breaks Click keeps, such as a list of examples."""
CONTINUED = " \\"  # at the end of a line of a command that continues on the next line
_INDENT = 2  # indentation of a continued line relative to its first line
_LEAD = re.compile(r" *(?:\S+  +)?")  # the indentation of a line, and the word that it explains
_COMMAND = re.compile(r" *profharness ")
# a quoted text, and an option up to its value
_TOGETHER = re.compile(r"'[^']*'|\"[^\"]*\"|--?[a-z][a-z-]* (?!-)")


def legend(words: Mapping[str, str]) -> str:
    """Return a paragraph of a help text with a line for each word and its meaning."""
    width = max(map(len, words))
    return "\n".join([UNCHANGED, *(f"{word:{width}}  {text}" for word, text in words.items())])


class HelpFormatter(click.HelpFormatter):
    """A formatter that also wraps the lines whose line breaks Click keeps."""

    def write_text(self, text: str) -> None:
        super().write_text("\n".join(_fitted_lines(text, self.width - self.current_indent)))


class HelpContext(click.Context):
    """A context whose help texts fit into the terminal."""

    formatter_class = HelpFormatter


class HelpCommand(click.Command):
    """A command whose help fits into the terminal."""

    context_class = HelpContext


class HelpGroup(click.Group):
    """A group of commands whose help fits into the terminal."""

    context_class = HelpContext


def _fitted_lines(text: str, width: int) -> Iterator[str]:
    """Yield the lines of a help text. Break the long lines of paragraphs that Click does not wrap."""
    unchanged = False
    for line in text.splitlines():
        unchanged = line.strip() == UNCHANGED or (unchanged and bool(line))
        yield from _broken(line, width) if unchanged and len(line) > width else [line]


def _broken(line: str, width: int) -> list[str]:
    """Return the lines of a line that is too long.

    A command can still be copied. The meaning of a word continues below its beginning.
    """
    indent = len(line) - len(line.lstrip())
    if _COMMAND.match(line):
        whole = _TOGETHER.sub(lambda match: match[0].replace(" ", NO_BREAK), line)
        parts = wrapped(whole, width - len(CONTINUED), " " * (indent + _INDENT))
        return f"{CONTINUED}\n".join(parts).splitlines()
    lead = len(_LEAD.match(line)[0])  # type: ignore[index]
    return wrapped(line, width, " " * (lead if lead > indent else indent + _INDENT))
