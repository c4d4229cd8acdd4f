"""Read a Kineto file in small blocks, and find its events and the separator between them.

The file may be compressed with gzip.
"""

from __future__ import annotations

import json
import os
import re
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from profharness.errors import TraceFormatError
from profharness.files import JSON_WEIGHT, has_too_many_values
from profharness.traces.packed import GzipReader, open_file

BLOCK = 128 * 1024  # sizes from 32 to 256 KiB are fastest, because bigger buffers cost page faults
MAX_PIECE = 32 << 20  # maximum size of an event, of the header and of the trailer, in bytes

_EVENTS_KEY = b'"traceEvents"'
_ARRAY = re.compile(rb"\s*+:\s*+\[")
_SPACE_AND_COLON = re.compile(rb"\s*+:?+\s*+")
_SPACE = re.compile(rb"[ \t\r\n]*")
_GAP = re.compile(rb"[ \t\r\n]*,[ \t\r\n]*(?=\{)")
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_TOKEN = re.compile(_STRING + rb'|[{}\[\]"]', re.DOTALL)
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")
# Matches text that needs no change, however long it is.
_PLAIN = rb"(?:[^\\]++|\\(?!u[dD][89a-fA-F]).|%s%s)++" % (_HIGH, _LOW)
_ESCAPE = re.compile(rb"%s|(%s|%s)" % (_PLAIN, _HIGH, _LOW), re.DOTALL)
_KEY = re.compile(rb"\{[ \t\r\n]*" + _STRING, re.DOTALL)


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a file.

    `first` is the offset of the first event. `separator` is the text from the `}` that ends an event
    to the beginning of the next event. `gap` is the number of bytes between that `}` and the `{` of
    the next event. `certain` is True if the separator contains a newline. A JSON string cannot
    contain a newline, so every occurrence of such a separator is an event boundary. `bare` is True if
    the file consists only of the array of events. `empty` is True if traceEvents is `[]`. In that
    case, `first` is the offset of the `]`.
    """

    first: int
    separator: bytes
    gap: int
    certain: bool
    bare: bool
    empty: bool
    header: dict[str, Any]
    first_ts: str


class Window:
    """A window on the uncompressed bytes of a file.

    `buffer` contains the bytes from offset `base` on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.buffer = b""
        self.base = 0
        self.eof = False
        self._file, _ = open_file(path)

    @property
    def end(self) -> int:
        """The offset at which the buffer ends."""
        return self.base + len(self.buffer)

    def fill(self, size: int = BLOCK) -> bool:
        """Append up to `size` bytes to the buffer. Return False at the end of the file.

        Raise TraceFormatError if the file is damaged.
        """
        kept = len(self.buffer)
        if 0 < kept < size // 8 and not isinstance(self._file, GzipReader) and not self.eof:
            self._file.seek(self.base)  # reading a few bytes again is faster than joining buffers
            data = self._read(kept + size)
            self.eof = len(data) <= kept
            self.buffer = self.buffer if self.eof else data
            return not self.eof
        data = b"" if self.eof else self._read(size)
        self.eof = not data
        self.buffer = self.buffer + data if kept else data
        return bool(data)

    def read_into(self, segment: memoryview) -> int:
        """Read the bytes from `base` on into `segment`. The window does not move.

        Return the number of bytes read. It is always 0 if the file is compressed.
        """
        if isinstance(self._file, GzipReader):
            return 0
        try:
            self._file.seek(self.base)
            size = self._file.readinto(segment)
            self._file.seek(self.end)
        except OSError:
            return 0  # `fill` reports the error
        return size or 0

    def seek(self, offset: int) -> None:
        """Move the beginning of the window to `offset`, which must not be less than `base`.

        If the file is shorter, the window moves to the end of the file and is empty.
        """
        if offset > self.end and not isinstance(self._file, GzipReader):
            offset = min(offset, self._file.seek(0, os.SEEK_END))
            self._file.seek(offset)
            self.base, self.buffer = offset, b""
        while offset > self.end:
            self.base, self.buffer = self.end, b""
            if not self.fill():
                return
        self.base, self.buffer = offset, self.buffer[offset - self.base :]

    def rest(self) -> bytes:
        """Return all bytes from `base` to the end of the file.

        Raise TraceFormatError if there are more than MAX_PIECE bytes.
        """
        begin = self.end
        while self.fill(max(BLOCK, len(self.buffer))):
            if len(self.buffer) > MAX_PIECE:
                message = f"more than {MAX_PIECE >> 20} MiB follow the events"
                raise self.error(message, offset=begin, expected="the end of the file")
        return self.buffer

    def error(self, message: str, *, offset: int | None = None, expected: str) -> TraceFormatError:
        """Return a TraceFormatError that names this file and `offset`, which defaults to the end of
        the buffer.
        """
        where = self.end if offset is None else offset
        return TraceFormatError(self.path, message, offset=where, expected=expected)

    def too_long(self, offset: int) -> TraceFormatError:
        """Return the error for an event that is longer than MAX_PIECE."""
        message = f"an event of more than {MAX_PIECE >> 20} MiB"
        return self.error(message, offset=offset, expected="an event")

    def close(self) -> None:
        self._file.close()

    def _read(self, size: int) -> bytes:
        try:
            return self._file.read(size) or b""
        except OSError as error:
            message = f"cannot be read: {error.strerror}"
            raise self.error(message, expected="an undamaged file") from None


def object_end(data: bytes, start: int, stop: int | None = None) -> int | None:
    """Return the offset after the JSON object that starts at `start`.

    Return None if the object does not end before `stop`.
    """
    depth = 0
    for match in _TOKEN.finditer(data, start, len(data) if stop is None else stop):
        token = data[match.start()]
        if token in b"{[":
            depth += 1
        elif token in b"}]":
            depth -= 1
            if depth == 0:
                return match.end()
        elif match.end() - match.start() == 1:
            return None
    return None


def skip_space(data: bytes, position: int) -> int:
    """Return the index of the first byte from `position` on that is not JSON white space."""
    match = _SPACE.match(data, position)
    return match.end() if match else position


def decode_lenient(data: bytes) -> Any:
    """Decode JSON that may contain NaN, invalid UTF-8 or control characters.

    Raise ValueError if the data is not JSON, has too many values or is nested too deeply.
    """
    if has_too_many_values(data):
        raise ValueError(f"more than {JSON_WEIGHT:,} values")
    try:
        try:
            return msgspec.json.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return json.loads(whole_characters(data).decode("utf-8", "replace"), strict=False)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def whole_characters(data: bytes) -> bytes:
    r"""Replace escape sequences of lone surrogates, such as `\ud800`, by U+FFFD.

    No text can contain a lone surrogate.
    """
    if not _HALF.search(data):
        return data
    return _ESCAPE.sub(lambda match: b"\\ufffd" if match[1] else match[0], data)


def probe(window: Window) -> Layout:
    """Determine the layout of a file. The window must be at the beginning of the file.

    Raise TraceFormatError if the file is not JSON, has no traceEvents or is truncated.
    """
    window.fill()
    if not window.buffer:
        raise window.error("the file is empty", expected="a Kineto trace")
    start = skip_space(window.buffer, 3 if window.buffer.startswith(b"\xef\xbb\xbf") else 0)
    opening = window.buffer[start : start + 1]
    if opening == b"[":
        return _layout(window, start + 1, {}, bare=True)
    if opening != b"{":
        raise window.error("not JSON", offset=start, expected="{ or [, the start of a Kineto trace")
    position, header = _find_events(window, start)
    return _layout(window, position, header, bare=False)


def _find_events(window: Window, start: int) -> tuple[int, dict[str, Any]]:
    """Return the offset after the `[` that starts the top-level traceEvents, and the header.

    The header contains the keys before traceEvents.
    """
    depth, position = 0, start
    while True:
        for match in _TOKEN.finditer(window.buffer, position):
            position, opening = match.span()[0], match[0][:1]
            if match[0] == b'"':
                break  # the string does not end in the buffer
            if depth == 1 and match[0] == _EVENTS_KEY:
                behind = _ARRAY.match(window.buffer, match.end())
                if behind is None and _SPACE_AND_COLON.fullmatch(window.buffer, match.end()):
                    break
                if behind is not None:
                    return behind.end(), _header(window, start, behind.end())
            depth += (opening in b"{[") - (opening in b"]}")
            position = match.end()
            if not depth:
                raise _foreign(window)
        if len(window.buffer) > MAX_PIECE:
            message = f"no traceEvents in the first {MAX_PIECE >> 20} MiB"
            raise window.error(message, expected='"traceEvents": [')
        if not window.fill(min(max(BLOCK, len(window.buffer)), MAX_PIECE // 4)):
            raise _foreign(window)


def _header(window: Window, start: int, end: int) -> dict[str, Any]:
    try:
        header: dict[str, Any] = decode_lenient(window.buffer[start:end] + b"]}")
    except ValueError:
        raise _foreign(window) from None
    return header


def _foreign(window: Window) -> TraceFormatError:
    try:
        value = decode_lenient(window.buffer.removeprefix(b"\xef\xbb\xbf"))
    except json.JSONDecodeError as error:
        offset = len(error.doc[: error.pos].encode("utf-8", "replace"))
        message = f"not whole JSON: {error.msg}"
        return window.error(message, offset=offset, expected='"traceEvents": [')
    except ValueError as error:
        return window.error(f"not JSON: {error}", expected='"traceEvents": [')
    if isinstance(value, dict) and "traceEvents" in value:
        return window.error("traceEvents is not an array", expected='"traceEvents": [')
    return window.error("JSON, but not a Kineto trace", offset=0, expected='the key "traceEvents"')


def _layout(window: Window, position: int, header: dict[str, Any], *, bare: bool) -> Layout:
    """Find the separator between the first two events, and return the layout of the file."""
    header.pop("traceEvents", None)
    between, tail, certain = b",", b"{", False  # defaults, used if there is no second event
    size = BLOCK
    while True:
        first = skip_space(window.buffer, position)
        opening = window.buffer[first : first + 1]
        if opening == b"]":
            return Layout(first, b"", 0, True, bare, True, header, "")
        if opening and opening != b"{":
            raise window.error("not an event", offset=first, expected="{, the start of an event")
        end = object_end(window.buffer, first) if opening else None
        if end is not None and (gap := _GAP.match(window.buffer, end)):
            certain = b"\n" in gap.group()
            key = None if certain else _KEY.match(window.buffer, gap.end())
            if certain or key:
                between, tail = gap.group(), key.group() if key else tail
                break
        elif end is not None and window.buffer[skip_space(window.buffer, end) :][:1] == b"]":
            break
        if len(window.buffer) - position > MAX_PIECE:
            raise window.too_long(first)
        if not window.fill(size):
            if end is None:
                message = "the file ends inside its first event"
                raise window.error(message, expected="a whole event")
            break
        size = min(max(BLOCK, len(window.buffer)), MAX_PIECE // 4)
    time = re.search(rb'"ts"\s*:\s*([-+.\deE]+)', window.buffer[first:end])
    ts = time[1].decode() if time else ""
    return Layout(first, b"}" + between + tail, len(between), certain, bare, False, header, ts)


def read_trailer(path: Path, layout: Layout, end: int) -> dict[str, Any]:
    """Return the keys before and after the events. The array of events ends at the offset `end`.

    Raise TraceFormatError if the file is truncated or continues after the trace.
    """
    with closing(Window(path)) as window:
        window.fill()
        window.seek(end + 1)
        data = window.rest()
        at = skip_space(data, 0)
        if layout.bare:
            if data[at:].strip(b" \t\r\n\0"):
                message = "something follows the events"
                raise window.error(message, offset=end + 1 + at, expected="the end of the file")
            return {}
        mark = data[at : at + 1]
        try:
            if mark not in (b",", b"}"):
                raise ValueError("no closing }")
            tail = data[at + 1 :] if mark == b"," else data[at:]
            trailer = decode_lenient(b"{" + tail.rstrip(b" \t\r\n\0"))
            if "traceEvents" in trailer:
                raise ValueError("traceEvents stands there twice")
        except ValueError as error:
            message = f"the file is not whole behind the events: {error}"
            raise window.error(message, expected="}, the end of the trace") from None
        return {**trailer, **layout.header}
