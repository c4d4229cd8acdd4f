"""Scrub a Kineto trace event by event in bounded memory.

Only known keys and texts are kept. Numbers are copied without rounding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import msgspec

from profharness.scrub.allowed import Scrubber, words
from profharness.traces.chrome import (
    MAX_PIECE,
    Layout,
    Window,
    decode_lenient,
    object_end,
    probe,
    skip_space,
)

HEADER_KEYS = words(
    "schemaVersion deviceProperties record_shapes profile_memory with_flops with_modules with_stack "
    "cuda_driver_version cuda_runtime_version cupti_version hip_driver_version hip_runtime_version "
    "displayTimeUnit baseTimeNanoseconds"
)
DEVICE_KEYS = words(
    "id name totalGlobalMem computeMajor computeMinor maxThreadsPerBlock numSms regsPerBlock "
    "maxThreadsPerMultiprocessor regsPerMultiprocessor warpSize sharedMemPerBlock "
    "sharedMemPerBlockOptin sharedMemPerMultiprocessor"
)
EVENT_KEYS = words("name ph ts dur tdur tts pid tid id bp s cat args cname")
LABELS = re.compile(r"(?:CPU|GPU \d{1,3})\Z")
PROCESS = re.compile(r"python[0-9.]*\Z")
TRACK = re.compile(
    r"(?:stream|thread) \d{1,10}(?: ?\Z| \((?:python[0-9.]*|pt_[a-z_]+(?:_\d)?)\)\Z)?"
)
MAX_CACHED = 1 << 15

_RawEvent = dict[str, msgspec.Raw]
_decode = msgspec.json.Decoder(_RawEvent).decode
_encode = msgspec.json.Encoder().encode


def scrub_kineto(path: Path, out: IO[bytes], scrubber: Scrubber) -> None:
    """Write a scrubbed copy of a Kineto trace as uncompressed JSON, with one event per line.

    Raise TraceFormatError if the file is not a Kineto trace or is cut off.
    """
    with closing(Window(path)) as window:
        layout = probe(window)
        scrubber.where = "header"
        if layout.bare:
            out.write(b"[")
        else:
            kept = _allowed(layout.header, scrubber)
            out.write(_encode(kept)[:-1] + (b"," if kept else b"") + b'"traceEvents":[')
        separator = b"\n"
        events = _Events(scrubber)
        for number, event in enumerate(_events(window, layout), 1):
            scrubber.where = f"event {number}"
            out.write(separator + events.scrub(event))
            separator = b",\n"
        scrubber.where = "header"
        out.write(b"\n]" if layout.bare else b"\n]" + _tail(window, scrubber) + b"}")
        out.write(b"\n")


def _tail(window: Window, scrubber: Scrubber) -> bytes:
    """Return the known members of the trace that follow its events, as JSON without braces.

    The window must be at the closing bracket of the list of events.
    """
    data = window.rest()[1:]
    at = skip_space(data, 0)
    mark, tail = data[at : at + 1], data[at + 1 :]
    try:
        trailer = decode_lenient(b"{" + (tail if mark == b"," else data[at:]))
    except ValueError:
        message = "the JSON is incomplete after the events"
        raise window.error(message, offset=window.base, expected="}") from None
    kept = _allowed(trailer, scrubber) if isinstance(trailer, dict) else {}
    return b"," + bytes(_encode(kept)[1:-1]) if kept else b""


def _allowed(header: dict[str, Any], scrubber: Scrubber) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in _only(header, HEADER_KEYS, scrubber).items():
        if key == "deviceProperties" and isinstance(value, list):
            devices = [device for device in value if isinstance(device, dict)]
            value = [_only(device, DEVICE_KEYS, scrubber) for device in devices]
        kept[key] = scrubber.value(value, key)
    return kept


def _only(members: dict[str, Any], keys: frozenset[str], scrubber: Scrubber) -> dict[str, Any]:
    for key in members.keys() - keys:
        scrubber.drop(key)
    return {key: value for key, value in members.items() if key in keys}


def _events(window: Window, layout: Layout) -> Iterator[bytes]:
    """Yield each event as bytes. At the end, the window is at the closing bracket of the list."""
    window.seek(layout.first)
    at = 0
    while True:
        at = skip_space(window.buffer, at)
        mark = window.buffer[at : at + 1]
        if mark == b",":
            at += 1
            continue
        if mark == b"]":
            window.seek(window.base + at)
            return
        end = None
        if mark == b"{":
            cut = window.buffer.find(layout.separator, at) if layout.certain else -1
            end = cut + 1 if cut >= 0 else object_end(window.buffer, at)
        if end is not None:
            yield window.buffer[at:end]
            at = end
            continue
        if mark not in (b"", b"{"):
            raise window.error("not an event", offset=window.base + at, expected="{")
        window.seek(window.base + at)
        at = 0
        size = min(max(1 << 17, len(window.buffer)), MAX_PIECE // 4)
        if len(window.buffer) > MAX_PIECE or not window.fill(size):
            raise window.error("the file ends inside traceEvents", expected="a complete event")


class _Events:
    """Scrubs events. Cleaned values are cached, because most texts occur many times."""

    def __init__(self, scrubber: Scrubber) -> None:
        self.scrubber = scrubber
        self.cleaned: dict[tuple[str, bytes], msgspec.Raw] = {}

    def scrub(self, data: bytes) -> bytes:
        """Return an event with cleaned texts and without unknown keys."""
        try:
            event = _only(_decode(data), EVENT_KEYS, self.scrubber)
            args = event.get("args", msgspec.Raw(b"null"))
            if bytes(event.get("ph", b"")) == b'"M"':
                plain = msgspec.json.decode(args)
                event["args"] = msgspec.Raw(_encode(self._metadata(event.get("name"), plain)))
            elif bytes(args)[:1] == b"{":
                event["args"] = msgspec.Raw(_encode(self._members(_decode(args))))
            return _encode(self._members(event))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            # The event is not valid JSON, because it contains NaN or a control character. It is
            # kept, because the parser of traces accepts such an event too. Numbers may be rounded.
            lenient = self.scrubber.value(decode_lenient(data))
            is_object = isinstance(lenient, dict)
            return _encode(_only(lenient, EVENT_KEYS, self.scrubber) if is_object else {})

    def _members(self, values: _RawEvent) -> dict[str, msgspec.Raw]:
        kept = {}
        for key, value in values.items():
            if self.scrubber.is_known_key(key):
                # the arguments have already been cleaned
                is_clean = key == "args" or b'"' not in bytes(value)
                kept[key] = value if is_clean else self._value(key, value)
            else:
                self.scrubber.drop(key)
        return kept

    def _value(self, key: str, value: msgspec.Raw) -> msgspec.Raw:
        data = bytes(value)
        if (key, data) not in self.cleaned:
            decoded = msgspec.json.decode(data)
            cleaned = self.scrubber.value(decoded, key)
            if len(self.cleaned) >= MAX_CACHED:
                self.cleaned.clear()
            raw = data if cleaned == decoded else _encode(cleaned)
            self.cleaned[key, data] = msgspec.Raw(raw)
        return self.cleaned[key, data]

    def _metadata(self, name: msgspec.Raw | None, args: Any) -> Any:
        """Return the cleaned arguments of a metadata event.

        The name of a process or thread is kept only if it is a name that Kineto generates.
        """
        kind = bytes(name or b"").strip(b'"')
        if not isinstance(args, dict):
            return {}
        if kind == b"process_name":
            kept = {"name": _match(PROCESS, args.get("name")) or "process"}
        elif kind == b"process_labels":
            kept = {"labels": _match(LABELS, args.get("labels"))}
        elif kind == b"thread_name":
            kept = {"name": _match(TRACK, args.get("name")) or "thread"}
        else:
            return self.scrubber.value(args)
        if kept != args:
            self.scrubber.record("text", next(iter(kept.values())))
        return kept


def _match(pattern: re.Pattern[str], text: object) -> str:
    match = pattern.match(text) if isinstance(text, str) else None
    return match[0] if match else ""
