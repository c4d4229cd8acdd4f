"""A Kineto trace without what names its machine: event by event, in bounded memory; numbers keep
their digits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import IO, Any

import msgspec

from profharness.parse.chrome_read import (
    MAX_PIECE,
    Layout,
    Window,
    decode_lenient,
    object_end,
    probe,
    skip_space,
)
from profharness.scrub.rules import (
    HIDDEN,
    is_hash,
    is_secret,
    may_hold_bytes,
    names_a_secret,
    words,
)
from profharness.scrub.text import PRIVATE_KEYS, Cleaner, names_in_stream

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
LABELS = re.compile(r"(?:CPU|GPU \d+)$")
TRACK = re.compile(r"(?:stream|thread) \d+")


_LINE = re.compile(rb"\n\s*")  # JSON has no line break inside a string
_KEYS = re.compile(rf'"(?:{"|".join(sorted(PRIVATE_KEYS))})"'.encode())
_RawEvent = dict[str, msgspec.Raw]
_Gate = Callable[[bytes], object]
_decode = msgspec.json.Decoder(_RawEvent).decode
_encode = msgspec.json.Encoder().encode


def private_names_in(path: Path) -> frozenset[str]:
    """Host and user names anywhere in the trace. Raises TraceFormatError if it cannot be read."""

    def blocks(window: Window) -> Iterator[bytes]:
        while window.fill():
            yield window.buffer
            window.seek(window.end)

    with closing(Window(path)) as window:
        return names_in_stream(blocks(window))


def scrub_kineto(path: Path, out: IO[bytes], cleaner: Cleaner) -> None:
    """Write the copy as plain JSON, one event a line: known keys of the header and all events.

    Texts are cleaned. Raises TraceFormatError when the file is no Kineto trace or is cut short.
    """
    with closing(Window(path)) as window:
        layout = probe(window)
        out.write(b"[" if layout.bare else _head(layout.header, cleaner))
        separator = b"\n"
        value = partial(_value, cleaner, {})
        gates: list[_Gate] = [
            *(gate.search for gate in (_KEYS, *cleaner.byte_gates)),
            may_hold_bytes,
        ]
        for event, doubts in _events(window, layout, partial(_doubts, gates)):
            plain = _plain(event) and not any(doubt(event) for doubt in doubts)
            done = _LINE.sub(b" ", event) if plain else _event(event, value, cleaner)
            out.write(separator + done)
            separator = b",\n"
        out.write(b"\n]" if layout.bare else b"\n]" + _tail(window, cleaner) + b"}")
        out.write(b"\n")


def _head(header: dict[str, Any], cleaner: Cleaner) -> bytes:
    kept = _allowed(header, cleaner)
    return bytes(_encode(kept)[:-1]) + (b"," if kept else b"") + b'"traceEvents":['


def _tail(window: Window, cleaner: Cleaner) -> bytes:
    """The known keys behind the events; the window stands at the closing bracket."""
    data = window.rest()[1:]
    at = skip_space(data, 0)
    mark, tail = data[at : at + 1], data[at + 1 :]
    try:
        trailer = decode_lenient(b"{" + (tail if mark == b"," else data[at:]))
    except ValueError:
        message = "the file does not close behind its events"
        raise window.error(message, offset=window.base, expected="}") from None
    kept = _allowed(trailer, cleaner) if isinstance(trailer, dict) else {}
    return b"," + bytes(_encode(kept)[1:-1]) if kept else b""


def _allowed(header: dict[str, Any], cleaner: Cleaner) -> dict[str, Any]:
    kept = {key: value for key, value in header.items() if key in HEADER_KEYS}
    devices = kept.get("deviceProperties")
    if isinstance(devices, list):
        kept["deviceProperties"] = [
            {key: value for key, value in device.items() if key in DEVICE_KEYS}
            for device in devices
            if isinstance(device, dict)
        ]
    cleaned: dict[str, Any] = cleaner.clean_json(kept)
    return cleaned


def _doubts(gates: Sequence[_Gate], stretch: bytes) -> list[_Gate]:
    """The gates that open somewhere in a stretch of events: one search each instead of thousands."""
    return [gate for gate in gates if gate(stretch)]


def _events(
    window: Window, layout: Layout, doubts_of: Callable[[bytes], list[_Gate]]
) -> Iterator[tuple[bytes, list[_Gate]]]:
    """The events as bytes, and the gates that open in the stretch around each; leaves the window at
    the closing bracket.
    """
    window.seek(layout.first)
    at = 0
    doubts = doubts_of(window.buffer)
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
            yield window.buffer[at:end], doubts
            at = end
            continue
        if mark not in (b"", b"{"):
            raise window.error("not an event", offset=window.base + at, expected="{")
        window.seek(window.base + at)
        at = 0
        size = min(max(1 << 17, len(window.buffer)), MAX_PIECE // 4)
        if len(window.buffer) > MAX_PIECE or not window.fill(size):
            raise window.error("the file ends inside traceEvents", expected="a whole event")
        doubts = doubts_of(window.buffer)


def _plain(event: bytes) -> bool:
    """Whether a gate can tell what is in an event: no escapes, no names of processes."""
    return not (b"\\" in event or b'"M"' in event) and event.isascii()


def _event(data: bytes, clean: Any, cleaner: Cleaner) -> bytes:
    try:
        event = _decode(data)
        if bytes(event.get("ph", b"")) == b'"M"' and "args" in event:
            args = _metadata(event.get("name"), msgspec.json.decode(event["args"]), cleaner)
            event["args"] = msgspec.Raw(_encode(args))
        if "args" in event and bytes(event["args"])[:1] == b"{":
            event["args"] = msgspec.Raw(_encode(_cleaned(_decode(event["args"]), clean)))
        return bytes(_encode(_cleaned(event, clean)))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        # NaN, a control character: readable for the parser, so kept, at the price of digits
        return bytes(_encode(cleaner.clean_json(decode_lenient(data))))


def _cleaned(values: _RawEvent, clean: Any) -> dict[str, Any]:
    return {
        clean(key): _member(key, value, clean)
        for key, value in values.items()
        if key not in PRIVATE_KEYS
    }


def _member(key: str, value: msgspec.Raw, clean: Any) -> Any:
    if names_a_secret(key) and is_secret(key, msgspec.json.decode(value)):
        return HIDDEN
    if bytes(value)[:1] == b'"' and is_hash(key, msgspec.json.decode(value)):
        return value
    return clean(value)


def _metadata(name: msgspec.Raw | None, args: Any, cleaner: Cleaner) -> Any:
    """The args of a metadata event; of names only those that Kineto makes up are kept."""
    kind = bytes(name or b"").strip(b'"')
    if not isinstance(args, dict):
        return {}
    if kind == b"process_name":
        return {"name": "process"}
    if kind == b"process_labels":
        return {"labels": _only(LABELS, args.get("labels"))}
    if kind == b"thread_name":
        return {"name": _only(TRACK, args.get("name")) or "thread"}
    return cleaner.clean_json(args)


def _only(pattern: re.Pattern[str], text: object) -> str:
    match = pattern.match(text) if isinstance(text, str) else None
    return match[0] if match else ""


def _value(cleaner: Cleaner, texts: dict[bytes, bytes], value: msgspec.Raw | str) -> Any:
    """A raw JSON value with its texts cleaned; numbers and lists of numbers stay as they stand."""
    if isinstance(value, str):
        return cleaner.clean(value)
    data = bytes(value)
    if b'"' not in data:
        return value
    if data not in texts:
        decoded = msgspec.json.decode(data)
        cleaned = cleaner.clean_json(decoded)
        if len(texts) >= 1 << 15:
            texts.clear()
        texts[data] = data if cleaned == decoded else bytes(_encode(cleaned))
    return msgspec.Raw(texts[data])
