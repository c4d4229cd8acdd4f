"""Events as libkineto lays them out, in lines: cut by the ends of the lines, and read as columns by
the places of their fields. No event that nobody needs is decoded.

What is laid out in another way is left to the decoder: an event, or the whole segment.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from profharness.parse.chrome_events import (
    GPU,
    LAUNCH,
    MODULES,
    UNDECODABLE,
    Collector,
    GpuArgs,
    fits,
)
from profharness.parse.columns import MAX_INT, Flags, GpuRows, Ids, Ints, LaunchRows, OpRows, Tables
from profharness.parse.ops import MODULE

Words = NDArray[np.uint64]
Places = tuple[Ints, Ints]  # where texts begin and end

SEPARATOR = b"},\n  {"  # from the end of one event to the start of the next
SEGMENT = 3 << 19  # bytes at once: fewer cost more calls, more do not stay in the CPU's cache
CACHED = 1 << 16  # bytes looked at several times in a row
MARGIN = 64  # bytes behind an event in which its places may lie
SHORTEST = 40  # bytes that an event has at least
MAX_KNOWN = 1 << 15  # different texts that are remembered
THREAD_BITS = 24
MAX_DIGITS = 15  # before the point; as nanoseconds they are within an int64
COMMA, POINT, OPEN, CLOSED, NEWLINE = b",.{}\n"


def _word(text: bytes) -> np.uint64:
    """Eight bytes as they compare in one step."""
    assert len(text) == 8
    return np.uint64(int.from_bytes(text, "little"))


BORDER, PHASE, ARGS = _word(b" },\n  {\n"), _word(b'    "ph"'), _word(b'    "arg')
TIME, LASTED, DURATION = _word(b'    "ts"'), _word(b'    "dur'), _word(b', "dur":')
CATEGORY, MARK = _word(b'"cat": "'), _word(b"cpu_inst")
OP, CALL, DEVICE, FRAME, MODULE_CALL = range(1, 6)  # kinds of spans, and how categories begin
KINDS = (
    (_word(b'cpu_op",'), OP), (_word(b"cuda_run"), CALL), (_word(b"cuda_dri"), CALL),
    (_word(b'kernel",'), DEVICE), (_word(b"gpu_memc"), DEVICE), (_word(b"gpu_mems"), DEVICE),
    (_word(b"python_f"), FRAME),
)  # fmt: skip
MODULE_NAME, CORRELATION = _word(MODULE.encode()[:8]), _word(b'ation": ')
TO_DEVICE, TO_BACKWARD = _word(b'ac2g", "'), _word(b'fwdbwd",')
# by the number of digits: what of eight bytes is kept, and zeros for the rest
KEEP = np.array([((1 << 64) - 1) & ~((1 << 8 * (8 - n)) - 1) for n in range(9)], np.uint64)
ZEROS = np.uint64(0x3030303030303030)
CORRELATED, CORRELA, EXTERNAL = b'"correlation": ', _word(b'"correla'), _word(b'"Externa')


@dataclass(frozen=True, slots=True)
class Form:
    """One of libkineto's layouts. Lines count from an event's `{`, places are bytes from the start of
    its first line of fields.
    """

    span: np.uint64  # what stands before the category of a span, and of an instant
    instant: np.uint64
    begins: np.uint64  # the phase of an arrow's ends
    ends: np.uint64
    category: int  # the place of a span's category
    mark: int  # and of an instant's
    name: int  # from a frame's category to its name
    head: int  # the last line of the head: phase, category, name and thread
    args: int  # the line of a span's args
    arrow: int  # the line of an arrow's category, and of its time
    moment: int
    lines: int  # of an arrow
    key: int  # the place of an arrow's id, and what stands before and behind it
    before_key: np.uint64
    process: np.uint64
    time: bytes  # what stands between an arrow's thread and its time


FORMS = (
    Form(  # to 2.12
        span=_word(b'": "X", '), instant=_word(b'": "i", '),
        begins=_word(b': "s", "'), ends=_word(b': "f", "'),
        category=23, mark=23, name=len(MODULES + '", "name": "'), head=1, args=3, arrow=2, moment=1,
        lines=4, key=21, before_key=_word(b', "id": '), process=_word(b', "pid":'),
        time=b', "ts": ',
    ),
    Form(  # from 2.13 on, each field in a line
        span=_word(b'X",\n    '), instant=_word(b'   \n    '),
        begins=_word(b': "s",\n '), ends=_word(b': "f",\n '),
        category=27, mark=32, name=len(MODULES + '",\n    "name": "'), head=5, args=9, arrow=6,
        moment=5, lines=10, key=25, before_key=_word(b'  "id": '), process=_word(b',\n    "p'),
        time=b',\n    "ts": ',
    ),
)  # fmt: skip


class _Place(msgspec.Struct, gc=False):
    """The thread of an event, read as the decoder reads it."""

    pid: int | str | float | None = None
    tid: int | str | float | None = None


class _Head(_Place, gc=False, kw_only=True):
    """The head of a span."""

    name: str
    cat: str


_HEAD, _PLACE = msgspec.json.Decoder(_Head), msgspec.json.Decoder(_Place)
_GPU_ARGS = msgspec.json.Decoder(GpuArgs)


class _Known(dict[bytes, int]):
    """Texts to numbers, each read once; -1 for what cannot be read."""

    def __missing__(self, text: bytes) -> int:
        try:
            number = self.read(text)
        except UNDECODABLE:
            number = -1
        if len(self) >= MAX_KNOWN:
            self.clear()
        self[text] = number
        return number

    def read(self, text: bytes) -> int:
        """The number of a text. Raises UNDECODABLE."""
        raise NotImplementedError

    def column(self, texts: Iterable[bytes]) -> Ints:
        """The number of each."""
        return np.array([self[text] for text in texts], np.int64)


class _Heads(_Known):
    """Heads of spans to the numbers of their name, by its category, and of their thread, in one."""

    def __init__(self, tables: Tables, modules: Ids) -> None:
        super().__init__()
        self._kernels, self._threads = tables.kernels, tables.threads
        self._names = {"cpu_op": tables.names, MODULES: modules}
        self._names |= dict.fromkeys(LAUNCH, tables.apis)

    def read(self, text: bytes) -> int:
        head = _HEAD.decode(b"{%b}" % text)
        if head.cat in GPU:
            return self._kernels[head.cat.removeprefix("gpu_"), head.name] << THREAD_BITS
        thread = self._threads[head.pid, head.tid]
        if head.cat not in self._names or thread >> THREAD_BITS:
            return -1
        return self._names[head.cat][head.name] << THREAD_BITS | thread


class _Threads(_Known):
    """The part of arrows that tells the thread to its number."""

    def __init__(self, threads: Ids) -> None:
        super().__init__()
        self._threads = threads

    def read(self, text: bytes) -> int:
        place = _PLACE.decode(b"{%b}" % text.lstrip(b", \n"))
        return self._threads[place.pid, place.tid]


class _DeviceArgs(_Known):
    """Args of kernels without those that count launches, to places in rows: config, device, stream,
    node and bytes.
    """

    def __init__(self, configs: Ids) -> None:
        super().__init__()
        self._configs = configs
        self.rows: list[tuple[int, ...]] = []
        self._table = np.empty((5, 0), np.int64)

    def read(self, text: bytes) -> int:
        if len(self.rows) >= MAX_KNOWN:
            return -1
        whole = text.lstrip(b", ").replace(CORRELATED + b",", CORRELATED + b"0,")
        args = _GPU_ARGS.decode(b"{%b}" % whole)
        config = (args.grid, args.block, args.registers, args.shared)
        numbers = (args.device, args.stream, args.graph_node or -1, args.bytes)
        if not fits(config) or max(map(abs, numbers)) > MAX_INT:
            return -1
        self.rows.append((self._configs[config], *numbers))
        return len(self.rows) - 1

    def table(self) -> Ints:
        """A column for each place, and a last one of -1 for those that cannot be read."""
        if self._table.shape[1] != len(self.rows) + 1:
            self._table = np.array([*self.rows, (-1,) * 5], np.int64).T
        return self._table


@dataclass(frozen=True, slots=True)
class _Rows:
    """Spans of a segment: their numbers there, and columns; times are ns, name and thread ids, mark the
    correlation of those that have one.
    """

    events: Ints
    kind: Ints
    start: Ints
    duration: Ints
    name: Ints
    thread: Ints
    mark: Ints

    def where(self, keep: Flags) -> _Rows:
        """The rows that are kept."""
        at = np.flatnonzero(keep)
        return _Rows(*(getattr(self, item.name)[at] for item in fields(self)))


class Segment:
    """Events of a text, by lines. ends: where each line ends; first: of each event the number of its
    first line; the last element of both stands behind the last event.
    """

    def __init__(self, text: bytes, ends: Ints, first: Ints) -> None:
        self.text = text
        self.raw = np.frombuffer(text, np.uint8)
        self.form = FORMS[text[16] == NEWLINE]
        self.ends = ends
        self.first = first
        # places of the last event may lie behind the text: then it is decoded
        self.count = len(first) - (1 if len(text) - ends[-1] >= MARGIN else 2)

    @classmethod
    def cut(cls, text: bytes, stop: int) -> Segment | None:
        """The events of text[:stop], the first at 0; None where they are laid out in another way."""
        controls = np.flatnonzero(np.frombuffer(text, np.uint8, stop) < 32)
        opening = np.flatnonzero(np.diff(controls) == len("  {\n")) + 1
        if not len(opening) or stop - controls[opening[-1]] < SHORTEST:
            return None
        first = np.concatenate([[0], opening, [len(controls) + 1]])
        segment = cls(text, np.append(controls, stop), first)
        return segment if segment._fits(controls) else None

    def _fits(self, controls: Ints) -> bool:
        """Whether all control characters end lines, and all events begin and end as they should."""
        border = self.first[1:-1]
        end = self.ends[border - 1]
        return bool(
            self.ends[0] == 1
            and (self.raw[controls] == NEWLINE).all()
            and (self.word(self.ends[border] - 7) == BORDER).all()
            and (end - self.ends[border - 2] == len("  },\n")).all()
            and self._is_balanced()
        )

    def _is_balanced(self) -> bool:
        """Whether quotes and brackets come in pairs: damage to what nobody reads mostly breaks some."""
        counts, same = [0, 0, 0], np.empty(CACHED, np.bool_)
        for begin in range(0, int(self.ends[-1]), CACHED):
            part = self.raw[begin : min(begin + CACHED, int(self.ends[-1]))]
            for at, mark in enumerate(b'"[]'):
                counts[at] += int(np.count_nonzero(np.equal(part, mark, out=same[: len(part)])))
        return counts[0] % 2 == 0 and counts[1] == counts[2]

    def left(self, done: Flags) -> list[bytes]:
        """The texts of the events that are not done with, which may be fewer than all."""
        rest = np.ones(len(self.first) - 1 - len(done), np.bool_)
        left = np.flatnonzero(np.append(~done, rest))
        begins, stops = self.ends[self.first[left]] - 1, self.ends[self.first[left + 1] - 1]
        stops[left < len(self.first) - 2] -= 1  # the comma
        places = zip(begins.tolist(), stops.tolist(), strict=True)
        return [self.text[begin:stop] for begin, stop in places]

    def have_args(self, events: Ints, line: int) -> Flags:
        """Whether events have args from that line of theirs to their end."""
        first, behind = self.first[events], self.first[events + 1]
        at = first + np.minimum(line, behind - first - 1)
        last = self.ends[behind - 2]
        return np.asarray(
            (behind - first >= line + 4)
            & (self.word(self.ends[at - 1] + 1) == ARGS)
            & (self.raw[self.ends[at] - 1] == OPEN)
            & (self.ends[at] - self.ends[at - 1] == len('    "args": {\n'))
            & (self.raw[self.ends[at - 1] - 1] == COMMA)
            & (self.raw[last - 1] == CLOSED)
            & (last - self.ends[behind - 3] == len("    }\n"))
        )

    def word(self, places: Ints) -> Words:
        """The word from each place on."""
        return self.blocks(places, 1)[:, 0]

    def behind_digits(self, places: Ints) -> Ints:
        """The first place from each on, of at most 19, that has no digit."""
        behind, left = places.copy(), np.arange(len(places))
        for _ in range(MAX_DIGITS + 4):
            character = self.raw[behind[left]]
            left = left[(character >= ord("0")) & (character <= ord("9"))]
            if not len(left):
                break
            behind[left] += 1
        return behind

    def blocks(self, places: Ints, count: int) -> Words:
        """So many words in a row from each place on; one copy costs as much as that of one word."""
        shape, item = (len(self.text) - 8 * count + 1,), f"V{8 * count}"
        rows: Any = np.ndarray(shape, item, self.text, strides=(1,))
        blocks: Words = rows[places].view("<u8").reshape(-1, count)
        return blocks

    def distances(self, places: Ints, word: np.uint64, widths: Iterable[int]) -> Ints:
        """How far behind each place the word stands; a negative width is before it. 0: nowhere."""
        found = np.zeros(len(places), np.int64)
        left = np.arange(len(places))
        for width in widths:
            hit = self.word(places[left] + width) == word
            found[left[hit]] = width
            left = left[~hit]
            if not len(left):
                break
        return found

    def numbers(self, begin: Ints, end: Ints) -> tuple[Ints, Flags]:
        """The whole numbers that stand there, and where there is one."""
        count = end - begin
        low = self.blocks(end - 8, 1)[:, 0]
        keep = KEEP[np.clip(count, 0, 8)]
        value, known = _digits(low & keep | ZEROS & ~keep)
        long = np.flatnonzero(count > 8)
        if len(long):
            keep = KEEP[np.minimum(count[long] - 8, 8)]
            high, is_number = _digits(self.blocks(end[long] - 16, 1)[:, 0] & keep | ZEROS & ~keep)
            value[long] += high * 10**8
            known[long] &= is_number
        return value, known & (count >= 1) & (count <= MAX_DIGITS)

    def moments(self, begin: Ints, end: Ints) -> tuple[Ints, Flags]:
        """Thousandths of the decimal numbers with no or three decimals that stand there, and where
        there is one.
        """
        point = end - 4
        words = self.blocks(point - 16, 3)
        if not ((words[:, 2] & np.uint64(0xFF)) == POINT).all():  # no decimals
            decimals = (words[:, 2] & np.uint64(0xFF)) == POINT
            value, known = self.numbers(begin, end)
            if decimals.any():
                more, also = self.moments(begin[decimals], end[decimals])
                value[~decimals] *= 1000
                value[decimals], known[decimals] = more, also
            else:
                value *= 1000
            return value, known
        count = point - begin
        keep = KEEP[np.clip(count, 0, 8)]
        value, known = _digits(words[:, 1] & keep | ZEROS & ~keep)
        if count.max(initial=0) > 8:
            keep = KEEP[np.clip(count - 8, 0, 8)]
            high, also = _digits(words[:, 0] & keep | ZEROS & ~keep)
            value += high * 10**8
            known &= also
        decimals = (words[:, 2] << np.uint64(32)) & KEEP[3] | ZEROS & ~KEEP[3]
        part, also = _digits(decimals)
        known &= also & (count >= 1) & (count <= MAX_DIGITS)
        return value * 1000 + part, known

    def times(self, events: Ints) -> tuple[Places, Places, Flags]:
        """Where starts and durations of spans stand, and which do."""
        line = self.first[events] + self.form.head
        begin, end = self.ends[line] + 1, self.ends[line + 1] - 1
        known = (self.word(begin) == TIME) & (self.raw[end] == COMMA)
        known &= self.raw[begin - 2] == COMMA
        begin = begin + len('    "ts": ')
        if self.form.args - self.form.head > 2:  # the duration has a line of its own
            lasted = self.ends[line + 1] + 1
            known &= self.word(lasted) == LASTED
            return (begin, end), (lasted + len('    "dur": '), self.ends[line + 2]), known
        # most have as many digits as the first has
        width = self.text.find(b",", int(begin[0])) - int(begin[0]) if len(begin) else 0
        stop = begin + self.distances(begin, DURATION, _first(width, range(1, 20)))
        return (begin, stop), (stop + len(', "dur": '), end), known

    def correlations(self, events: Ints) -> Places:
        """Where the correlation stands that ends the args of launch calls."""
        end = self.ends[self.first[events + 1] - 3]
        # most have as many digits as the last has
        last = self.text.rfind(CORRELATED, 0, int(end[-1])) + len(CORRELATED) if len(end) else 0
        width = last - 8 - int(end[-1]) if len(end) else 0
        at = self.distances(end, CORRELATION, _first(width, range(-9, -19, -1)))
        return end + np.where(self.word(end + at - 7) == CORRELA, at, 0) + 8, end

    def heads(self, events: Ints) -> list[bytes]:
        """The text of each span's head without the comma behind it."""
        first = self.first[events]
        begins, ends = self.ends[first] + 1, self.ends[first + self.form.head] - 1
        text, places = self.text, zip(begins.tolist(), ends.tolist(), strict=True)
        return [text[begin:end] for begin, end in places]

    def arguments(self, event: int) -> bytes:
        """The args of a span that has some, with their braces."""
        begin = int(self.ends[self.first[event] + self.form.args]) - 1
        return self.text[begin : int(self.ends[self.first[event + 1] - 2])]


def _first(guess: int, widths: range) -> list[int]:
    """The widths, the guess first if it is one of them."""
    return [guess, *widths] if guess in widths else [*widths]


def _digits(words: Words) -> tuple[Ints, Flags]:
    """Eight digits each as a number, the first byte counting most, and where all are digits."""
    digits = words ^ ZEROS
    other = (digits | digits + np.uint64(0x7676767676767676)) & np.uint64(0x8080808080808080)
    digits = (digits * np.uint64(10) + (digits >> np.uint64(8))) & np.uint64(0x00FF00FF00FF00FF)
    digits = (digits * np.uint64(100) + (digits >> np.uint64(16))) & np.uint64(0x0000FFFF0000FFFF)
    digits = (digits * np.uint64(10000) + (digits >> np.uint64(32))) & np.uint64(0xFFFFFFFF)
    return digits.astype(np.int64), other == 0


class Lines:
    """Takes segments of libkineto's layouts into a collector."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector
        tables, self._modules = collector.tables, Ids()
        self._heads = _Heads(tables, self._modules)
        self._threads = _Threads(tables.threads)
        self._args = _DeviceArgs(tables.configs)

    def take(self, text: bytes, stop: int, part: int) -> bool:
        """Take in the events of text[:stop], the first at 0, as those of a part of the file; False,
        and nothing is taken, where they are laid out in another way. Raises NeedExactTimes.
        """
        segment = Segment.cut(text, stop)
        if segment is None:
            return False
        kind, done = _kinds(segment)
        spans, arrows = np.flatnonzero(kind), _arrows(segment, done)
        starts, durations, known = segment.times(spans)
        heads = self._heads.column(segment.heads(spans))
        kind, known = kind[spans], known & (heads >= 0)
        args, correlations = self._device_args(segment, spans[kind == DEVICE])
        calls = segment.correlations(spans[kind == CALL])
        moments = zip(starts, arrows.times, strict=True)
        times, are_times = segment.moments(*map(np.concatenate, moments))
        duration, lasted = segment.moments(*durations)
        marks = zip(calls, correlations, arrows.keys, strict=True)
        numbers, are_numbers = segment.numbers(*map(np.concatenate, marks))
        known &= are_times[: len(spans)] & lasted
        mark, borders = np.zeros(len(spans), np.int64), [0, len(calls[0])]
        borders.append(borders[1] + len(correlations[0]))
        for each, (low, high) in zip((CALL, DEVICE), pairwise(borders), strict=True):
            mark[kind == each], have = numbers[low:high], are_numbers[low:high]
            known[kind == each] &= have
        known[kind == DEVICE] &= args[0] >= 0
        name, thread = heads >> THREAD_BITS, heads & ((1 << THREAD_BITS) - 1)
        rows = _Rows(spans, kind, times[: len(spans)], duration, name, thread, mark)
        moment, key = times[len(spans) :], numbers[borders[2] :]
        arrived = are_times[len(spans) :] & are_numbers[borders[2] :]
        self._collector.settle(part)
        self._take_arrows(segment, arrows, key, moment, arrived, done)
        self._take_spans(segment, rows, args, known, done, part)
        self._collector.tables.events += int(np.count_nonzero(done))
        self._collector.add_texts(segment.left(done))
        return True

    def _take_spans(
        self, segment: Segment, rows: _Rows, args: Ints, known: Flags, done: Flags, part: int
    ) -> None:
        """Write the spans that are known, by their kinds. args: of the device's, as _DeviceArgs has
        them.
        """
        for number in (CALL, DEVICE):  # all of a segment or none, so that they keep their order
            is_kind = rows.kind == number
            if not known[is_kind].all():
                known = known & ~is_kind
        done[rows.events[known]] = True
        ops, calls, device, modules = (
            rows.where(known & (rows.kind == kind)) for kind in (OP, CALL, DEVICE, MODULE_CALL)
        )
        places = ops.events.tolist()
        columns = OpRows(ops.start, ops.start + ops.duration, ops.thread, ops.name)
        add = self._collector
        add.add_ops(part, columns, lambda row: segment.arguments(places[row]))
        add.add_launches(part, LaunchRows(calls.mark, calls.name, calls.thread, calls.start))
        if len(device.events):
            config, number, stream, node, size = args
            times = (device.start, device.duration, device.name)
            add.add_device(part, GpuRows(*times, config, number, stream, device.mark, node, size))
        names = list(self._modules)
        add.add_modules(
            [names[name] for name in modules.name.tolist()],
            (modules.start, modules.start + modules.duration, modules.thread),
        )

    def _device_args(self, segment: Segment, events: Ints) -> tuple[Ints, Places]:
        """Columns as _DeviceArgs has them, -1 where args cannot be read, and where correlations stand."""
        text, begins = segment.text, segment.ends[segment.first[events] + segment.form.args] + 1
        ends = segment.ends[segment.first[events + 1] - 3]
        # an external id counts as the correlation does
        counted = segment.word(begins + 6) == EXTERNAL
        begins = np.where(
            counted, segment.behind_digits(begins + len('      "External id": ')), begins
        )
        near = text.find(CORRELATED, int(begins[0])) - int(begins[0]) if len(begins) else 0
        places = begins + near
        off = segment.word(places) != CORRELA
        off |= segment.word(places + len(CORRELATED) - 8) != CORRELATION
        for row in np.flatnonzero(off).tolist():
            places[row] = text.find(CORRELATED, int(begins[row]), int(ends[row]))
        places = np.where(places < begins, begins, places + len(CORRELATED))
        behind = segment.behind_digits(places)
        columns = zip(*(c.tolist() for c in (begins, places, behind, ends)), strict=True)
        texts = [text[begin:at] + text[comma:end] for begin, at, comma, end in columns]
        numbers = self._args.column(texts)
        return self._args.table()[:, numbers], (places, behind)

    def _take_arrows(
        self, segment: Segment, arrows: _Arrows, key: Ints, moment: Ints, known: Flags, done: Flags
    ) -> None:
        """Write arrows, given their keys and times where known."""
        keep = known & arrows.known
        places = (arrows.keys[1][keep], arrows.times[0][keep] - len(segment.form.time))
        columns = zip(*(place.tolist() for place in places), strict=True)
        threads = self._threads.column(segment.text[begin:end] for begin, end in columns)
        made = np.stack([key[keep], arrows.begins[keep].astype(np.int64), threads, moment[keep]])
        self._collector.add_arrows(made[:, threads >= 0])
        done[arrows.events[keep][threads >= 0]] = True


def _kinds(segment: Segment) -> tuple[Ints, Flags]:
    """The kind of each event that is a span of some, else 0; and which nobody needs."""
    first, form = segment.first[: segment.count], segment.form
    head = segment.ends[first] + 1
    phase, named, category = segment.blocks(head + form.category - 16, 3).T
    is_span = (phase == form.span) & (named == CATEGORY)
    is_span[is_span] = segment.have_args(np.flatnonzero(is_span), form.args)
    kind = np.zeros(len(first), np.int64)
    for word, number in KINDS:
        kind[category == word] = number
    for number in (CALL, DEVICE):  # all of a segment or none, so that they keep their order
        if (kind[~is_span] == number).any():
            kind[kind == number] = 0
    kind[~is_span] = 0
    frames = np.flatnonzero(kind == FRAME)
    name = segment.word(head[frames] + form.category + form.name)
    kind[frames] = np.where(name == MODULE_NAME, MODULE_CALL, 0)
    done = np.zeros(len(first), np.bool_)
    done[frames[name != MODULE_NAME]] = True
    other = np.flatnonzero(~is_span)
    phase, named, category = segment.blocks(head[other] + form.mark - 16, 3).T
    other = other[(phase == form.instant) & (named == CATEGORY) & (category == MARK)]
    if len(other):
        done[other] = segment.have_args(other, form.args + 1)
    return kind, done


@dataclass(frozen=True, slots=True)
class _Arrows:
    """Ends of arrows from forward to backward: their numbers in a segment, where their key and time
    stand, whether they begin there, and which are known to be such.
    """

    events: Ints
    keys: Places
    times: Places
    begins: Flags
    known: Flags


def _arrows(segment: Segment, done: Flags) -> _Arrows:
    """Those of a segment; done with are those from launch calls to the device, that nobody needs."""
    form, first = segment.form, segment.first[: segment.count]
    events = np.flatnonzero(segment.first[1 : segment.count + 1] - first == form.lines)
    place = segment.ends[first[events] + form.arrow - 1] + len('\n    "cat": "')
    named, category = segment.blocks(place - 8, 2).T
    category = np.where(named == CATEGORY, category, ZEROS)
    done[events[category == TO_DEVICE]] = True
    events = events[category == TO_BACKWARD]
    head = segment.ends[first[events]] + 1
    end = segment.ends[first[events] + form.moment] - 1
    phase, key = segment.word(head + 8), head + form.key
    process = key + segment.distances(key, form.process, range(1, MAX_DIGITS))
    word = _word(form.time[-8:])
    moment = end + segment.distances(end, word, range(-9, -13 - MAX_DIGITS, -1)) + 8
    begins = phase == form.begins
    known = (segment.word(head) == PHASE) & (segment.word(key - 8) == form.before_key)
    known &= (begins | (phase == form.ends)) & (segment.raw[end] == COMMA)
    known &= moment - process > len(form.time)
    return _Arrows(events, (key, process), (moment, end), begins, known)
