"""Make a large Kineto trace in libkineto's byte layout, by replaying a real one with shifted times
and ids.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

SEPARATOR = b"\n  },\n  {\n"
OPEN = b'"traceEvents": [\n'
GAP_NS = 1_000_000
STACK_DEPTH = 5  # Python frames then make up 70 % of the bytes
NUMBER = re.compile(
    rb'("ts": |"correlation": |"External id": |"Ev Idx": |"Python id": |"Python parent id": '
    rb'|"id": )'
    rb"(-?\d+)(?:\.(\d{1,3}))?"
)
DEVICE_CATS = (b'"cat": "cuda', b'"cat": "kernel"', b'"cat": "gpu_', b'"cat": "ac2g"')
# unchanged; without its Python frames; without shapes; with invented Python frames
PROFILES = ("attention", "bare", "train", "stack")
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
SHAPES = re.compile(
    rb', "(?:Concrete Inputs|Input type|Input Strides|Input Dims)": \[[^\n]*\](?=, "|\n)'
)
THREAD = re.compile(rb'"pid": (\S+), "tid": (\S+),\s+"ts": ([\d.]+), "dur": ([\d.]+)')
ROOT = Path(__file__).resolve().parents[1]
DEFAULT = ROOT / "tests" / "data" / "kineto_h200.json.gz"
STACKED = (
    ROOT / "traces" / "models" / "llama_train.json.gz"
)  # one real step, with its Python frames
FRAME = b'"cat": "python_function"'

Piece = tuple[bytes, bytes, int]  # literal text, key, number to shift


def read_events(path: Path) -> tuple[bytes, list[bytes]]:
    """Return the header up to the first event, and the body of each event without the lines of its
    outer braces.
    """
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    head, _, body = data.partition(OPEN)
    if not body:  # a scrubbed copy has another layout
        return laid_out(json.loads(data))
    body = body[body.index(b"{\n") + 2 : body.rindex(b"\n  }\n  ]")]
    return head, body.split(SEPARATOR)


def laid_out(trace: dict[str, Any]) -> tuple[bytes, list[bytes]]:
    """Return header and event bodies of any trace, in the layout of libkineto."""
    events = trace.pop("traceEvents")
    trace.pop("traceName", None)
    return (json.dumps(trace, indent=2)[:-2] + ",\n  ").encode(), list(map(body_of, events))


def body_of(event: dict[str, Any]) -> bytes:
    """Return an event without the lines of its outer braces. Times have three decimals. An arrow
    has its time in its first line.
    """
    if event["ph"] in ("s", "f") and "id" in event:
        own = ("ph", "id", "pid", "tid")
        head = json.dumps({key: event[key] for key in own})[1:-1]
        rest = {key: value for key, value in event.items() if key not in (*own, "ts")}
        return f'    {head}, "ts": {event["ts"]:.3f},\n    {json.dumps(rest)[1:-1]}'.encode()
    times = [f'"{key}": {event[key]:.3f}' for key in ("ts", "dur") if key in event]
    plain = {key: value for key, value in event.items() if key not in ("ts", "dur", "args")}
    lines = [json.dumps(plain)[1:-1], ", ".join(times)]
    if "args" in event:
        lines.append(f'"args": {{\n      {json.dumps(event["args"])[1:-1]}\n    }}')
    return ("    " + ",\n    ".join(filter(None, lines))).encode()


def stack_events(event: bytes, number: int) -> Iterator[bytes]:
    """Yield Python frames around a cpu_op: STACK_DEPTH nested python_function events with the same
    interval.
    """
    match = THREAD.search(event)
    if match is None or b'"cat": "cpu_op"' not in event:
        return
    pid, tid, ts, dur = match.groups()
    for depth in range(STACK_DEPTH):
        me = number * STACK_DEPTH + depth + 1
        name = b"torch/nn/modules/module.py(%d): _wrapped_call_impl" % (1700 + depth)
        yield (
            b'    "ph": "X", "cat": "python_function", "name": "%s", "pid": %s, "tid": %s,\n'
            b'    "ts": %s, "dur": %s,\n    "args": {\n      "Python id": %d,'
            b'"Python parent id": %d, '
            b'"Ev Idx": %d\n    }'
        ) % (name, pid, tid, ts, dur, me, me - 1 if depth else 0, 100_000 + me)


def sections(events: list[bytes], profile: str) -> list[list[bytes]]:
    """Return the events in the order in which libkineto writes a long trace: ops, Python frames,
    device and runtime, metadata.
    """
    host = [e for e in events if b'"cat"' in e and not any(c in e for c in DEVICE_CATS)]
    device = [e for e in events if any(c in e for c in DEVICE_CATS)]
    meta = [e for e in events if b'"cat"' not in e]
    if profile == "bare":
        host = [event for event in host if FRAME not in event]
    if profile == "train":
        host = [SHAPES.sub(b"", event) for event in host]
    frames: list[bytes] = []
    if profile == "stack":
        frames = [f for number, event in enumerate(host) for f in stack_events(event, number)]
    return [host, frames, device, meta]


def compile_event(event: bytes) -> tuple[list[Piece], bytes]:
    """Return an event as pieces that end in a number to shift, and the text after the last one."""
    pieces: list[Piece] = []
    at = 0
    for match in NUMBER.finditer(event):
        key, whole, part = match.groups()
        number = int(whole)
        if key == b'"ts": ':
            number = number * 1000 + int((part or b"0").ljust(3, b"0"))
        pieces.append((event[at : match.start()] + key, key, number))
        at = match.end()
    return pieces, event[at:]


def strides(events: list[bytes]) -> dict[bytes, int]:
    """Return by how much each kind of number increases from one replay to the next."""
    low: dict[bytes, int] = {}
    high: dict[bytes, int] = {}
    for event in events:
        for _, key, number in compile_event(event)[0]:
            low[key] = min(low.get(key, number), number)
            high[key] = max(high.get(key, number), number)
    found = {key: high[key] + 1 for key in high}
    found[b'"ts": '] = high[b'"ts": '] - low[b'"ts": '] + GAP_NS
    # flow ids of ac2g events are correlation ids
    both = max(found.get(b'"id": ', 0), found.get(b'"correlation": ', 0))
    return found | {b'"id": ': both, b'"correlation": ': both}


def replay(section: list[bytes], shift: dict[bytes, int], times: int) -> Iterator[bytes]:
    """Yield the events of a section `times` over with shifted numbers, about 1 MB at a time."""
    compiled = [compile_event(event) for event in section]
    for turn in range(times):
        parts: list[bytes] = []
        for pieces, tail in compiled:
            for text, key, number in pieces:
                value = number + turn * shift[key]
                if key == b'"ts": ':
                    parts.append(b"%s%d.%03d" % (text, value // 1000, value % 1000))
                else:
                    parts.append(b"%s%d" % (text, value))
            parts.append(tail)
            parts.append(SEPARATOR)
        yield b"".join(parts)


def make_trace(source: Path, out: Path, size: int, profile: str) -> None:
    """Write at least `size` bytes of JSON. If the name ends in .gz, compress it with gzip level 9,
    as torch does.
    """
    head, events = read_events(source)
    *bodies, meta = sections(events, profile)
    once = sum(len(event) + len(SEPARATOR) for body in bodies for event in body)
    times = max(1, -(-size // once))
    shift = strides([event for body in bodies for event in body])
    opened = gzip.open(out, "wb", 9) if out.suffix == ".gz" else out.open("wb")  # noqa: SIM115
    with cast(BinaryIO, opened) as file:
        file.write(head + OPEN + b"  {\n")
        for body in bodies:
            for data in replay(body, shift, times):
                file.write(data)
        file.write(SEPARATOR.join(meta) + b'\n  }\n  ],\n  "traceName": "trace.json"\n}')


def parse_size(text: str) -> int:
    """Parse `100MB`, `1GB` or a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]B)?", text, re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r}: a size such as 100MB or 1GB")
    return int(float(match[1]) * UNITS.get((match[2] or "").upper(), 1))


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", type=parse_size, default="100MB")
    parser.add_argument("--profile", choices=PROFILES, default="attention")
    parser.add_argument("--source", type=Path, default=DEFAULT)
    options = parser.parse_args()
    make_trace(options.source, options.out, options.size, options.profile)


if __name__ == "__main__":
    main()
