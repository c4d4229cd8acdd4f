"""Events as libkineto lays them out, in lines: cut by the ends of the lines, and read as columns by
the places of their fields. No event that nobody needs is decoded.

What is laid out in another way is left to the decoder: an event, or the whole segment.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
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
from profharness.parse.columns import MAX_INT, Flags, GpuRows, Ids, Ints, LaunchRows, OpRows
from profharness.parse.ops import MODULE

Words = NDArray[np.uint64]

SEPARATOR = b"},\n  {"  # from the end of one event to the start of the next
SEGMENT = 1 << 20  # bytes at once: fewer cost more calls, more do not stay in the CPU's cache
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
CATEGORY, OP, FRAME, MARK = map(_word, (b'"cat": "', b'cpu_op",', b"python_f", b"cpu_inst"))
CALLS = _word(b"cuda_run"), _word(b"cuda_dri")
DEVICE = _word(b'kernel",'), _word(b"gpu_memc"), _word(b"gpu_mems")
MODULE_NAME, CORRELATION = _word(MODULE.encode()[:8]), _word(b'ation": ')
TO_DEVICE, TO_BACKWARD = _word(b'ac2g", "'), _word(b'fwdbwd",')
# by the number of digits: what of eight bytes is kept, and zeros for the rest
KEEP = np.array([((1 << 64) - 1) & ~((1 << 8 * (8 - n)) - 1) for n in range(9)], np.uint64)
ZEROS = np.uint64(0x3030303030303030)
CORRELATED, EXTERNAL = b'"correlation": ', b'      "External id": '


@dataclass(frozen=True, slots=True)
class Form:
    """One of libkineto's layouts. Lines count from an event's `{`, places are bytes from the start of
    its first line of fields.
    """

    span: np.uint64  # the phase of a span, of an instant, and of an arrow's ends
    instant: np.uint64
    begins: np.uint64
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
        span=_word(b': "X", "'), instant=_word(b': "i", "'),
        begins=_word(b': "s", "'), ends=_word(b': "f", "'),
        category=23, mark=23, name=len(MODULES + '", "name": "'), head=1, args=3, arrow=2, moment=1,
        lines=4, key=21, before_key=_word(b', "id": '), process=_word(b', "pid":'),
        time=b', "ts": ',
    ),
    Form(  # from 2.13 on, each field in a line
        span=_word(b': "X",\n '), instant=_word(b': "i",\n '),
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
    """Heads of spans to the numbers of their name and thread, in one."""

    def __init__(self, names: Ids, threads: Ids, categories: Collection[str]) -> None:
        super().__init__()
        self._names, self._threads, self._categories = names, threads, categories

    def read(self, text: bytes) -> int:
        head = _HEAD.decode(b"{%b}" % text)
        thread = self._threads[head.pid, head.tid]
        if head.cat not in self._categories or thread >> THREAD_BITS:
            return -1
        return self._names[head.name] << THREAD_BITS | thread


class _Kernels(_Known):
    """Heads of what ran on the device to the number of its kind and name."""

    def __init__(self, kernels: Ids) -> None:
        super().__init__()
        self._kernels = kernels

    def read(self, text: bytes) -> int:
        head = _HEAD.decode(b"{%b}" % text)
        return self._kernels[head.cat.removeprefix("gpu_"), head.name] if head.cat in GPU else -1


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

    def read(self, text: bytes) -> int:
        args = _GPU_ARGS.decode(b"{%b}" % text)
        config = (args.grid, args.block, args.registers, args.shared)
        numbers = (args.device, args.stream, args.graph_node or -1, args.bytes)
        if not fits(config) or max(map(abs, numbers)) > MAX_INT:
            return -1
        self.rows.append((self._configs[config], *numbers))
        return len(self.rows) - 1

    def clear(self) -> None:
        super().clear()
        self.rows.clear()


@dataclass(frozen=True, slots=True)
class _Rows:
    """Spans of a segment: their numbers there, and columns; times are ns."""

    events: Ints
    start: Ints
    duration: Ints
    head: Ints

    @property
    def name(self) -> Ints:
        """Numbers of names, where heads are of _Heads."""
        return self.head >> THREAD_BITS

    @property
    def thread(self) -> Ints:
        """Numbers of threads, where heads are of _Heads."""
        return self.head & ((1 << THREAD_BITS) - 1)

    def where(self, keep: Flags) -> _Rows:
        """The rows that are kept."""
        columns = (self.events, self.start, self.duration, self.head)
        return self if keep.all() else _Rows(*(column[keep] for column in columns))


class Segment:
    """Events of a text, by lines. ends: where each line ends; first: of each event the number of its
    first line; the last element of both stands behind the last event.
    """

    def __init__(self, text: bytes, ends: Ints, first: Ints) -> None:
        self.text = text
        self.raw = np.frombuffer(text, np.uint8)
        self.words: Words = np.ndarray((len(text) - 7,), "<u8", text, strides=(1,))
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
            and (self.words[self.ends[border] - 7] == BORDER).all()
            and (end - self.ends[border - 2] == len("  },\n")).all()
        )

    def left(self, done: Flags) -> list[bytes]:
        """The texts of the events that are not done with, which may be fewer than all."""
        rest = np.ones(len(self.first) - 1 - len(done), np.bool_)
        left = np.flatnonzero(np.append(~done, rest))
        begins, stops = self.ends[self.first[left]] - 1, self.ends[self.first[left + 1] - 1]
        stops[left < len(self.first) - 2] -= 1  # the comma
        places = zip(begins.tolist(), stops.tolist(), strict=True)
        return [self.text[begin:stop] for begin, stop in places]

    def have_args(self, first: Ints, line: int) -> Flags:
        """Whether events that begin with these lines have args from that line to their end."""
        behind = self.first[1 : len(first) + 1]
        at = first + np.minimum(line, behind - first - 1)
        last = self.ends[behind - 2]
        return np.asarray(
            (behind - first >= line + 4)
            & (self.words[self.ends[at - 1] + 1] == ARGS)
            & (self.raw[self.ends[at] - 1] == OPEN)
            & (self.ends[at] - self.ends[at - 1] == len('    "args": {\n'))
            & (self.raw[self.ends[at - 1] - 1] == COMMA)
            & (self.raw[last - 1] == CLOSED)
            & (last - self.ends[behind - 3] == len("    }\n"))
        )

    def distances(self, places: Ints, word: np.uint64, widths: Iterable[int]) -> Ints:
        """How far behind each place the word stands; a negative width is before it. 0: nowhere."""
        found = np.zeros(len(places), np.int64)
        left = np.arange(len(places))
        for width in widths:
            hit = self.words[places[left] + width] == word
            found[left[hit]] = width
            left = left[~hit]
            if not len(left):
                break
        return found

    def numbers(self, begin: Ints, end: Ints) -> tuple[Ints, Flags]:
        """Thousandths of the decimal numbers with no or three decimals that stand there, and where
        there is one.
        """
        decimals = (self.raw[end - 4] == POINT) & (end - begin > 4)
        whole, known = self.digits(begin, end - 4 * decimals)
        part, exact = _digits(self.words[end - 8] & KEEP[3] | ZEROS & ~KEEP[3])
        return whole * 1000 + np.where(decimals, part, 0), known & (exact | ~decimals)

    def digits(self, begin: Ints, end: Ints) -> tuple[Ints, Flags]:
        """The whole numbers that stand there, and where there is one."""
        count = end - begin
        known = (count >= 1) & (count <= MAX_DIGITS)
        keep = KEEP[np.clip(count, 0, 8)]
        value, is_number = _digits(self.words[end - 8] & keep | ZEROS & ~keep)
        if count.max(initial=0) > 8:
            keep = KEEP[np.clip(count - 8, 0, 8)]
            high, also = _digits(self.words[end - 16] & keep | ZEROS & ~keep)
            value, is_number = value + high * 10**8, is_number & also
        return value, known & is_number

    def times(self, events: Ints) -> tuple[Ints, Ints, Flags]:
        """Start and duration of spans, and where they are known."""
        line = self.first[events] + self.form.head
        begin, end = self.ends[line] + 1, self.ends[line + 1] - 1
        known = (self.words[begin] == TIME) & (self.raw[end] == COMMA)
        begin = begin + len('    "ts": ')
        if self.form.args - self.form.head > 2:  # the duration has a line of its own
            stop, last = end, self.ends[line + 2]
            lasted = self.ends[line + 1] + 1
            known &= self.words[lasted] == LASTED
            lasted = lasted + len('    "dur": ')
        else:
            # most have as many digits as the first has
            width = self.text.find(b",", int(begin[0])) - int(begin[0]) if len(begin) else 0
            stop = begin + self.distances(
                begin, DURATION, [width, *range(1, 20)] if 0 < width < 20 else range(1, 20)
            )
            last = end
            lasted = stop + len(', "dur": ')
        start, is_time = self.numbers(begin, stop)
        duration, is_duration = self.numbers(lasted, last)
        return start, duration, known & is_time & is_duration

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
        self._ops = _Heads(tables.names, tables.threads, ("cpu_op",))
        self._calls = _Heads(tables.apis, tables.threads, LAUNCH)
        self._frames = _Heads(self._modules, tables.threads, (MODULES,))
        self._threads = _Threads(tables.threads)
        self._kernels = _Kernels(tables.kernels)
        self._args = _DeviceArgs(tables.configs)

    def take(self, text: bytes, stop: int, part: int) -> bool:
        """Take in the events of text[:stop], the first at 0, as those of a part of the file; False,
        and nothing is taken, where they are laid out in another way. Raises NeedExactTimes.
        """
        segment = Segment.cut(text, stop)
        if segment is None:
            return False
        first, form = segment.first[: segment.count], segment.form
        head = segment.ends[first] + 1
        phase, category = segment.words[head + 8], segment.words[head + form.category]
        is_event = segment.words[head] == PHASE
        is_named = is_event & (segment.words[head + form.category - 8] == CATEGORY)
        is_span = is_named & (phase == form.span) & segment.have_args(first, form.args)
        is_frame = is_span & (category == FRAME)
        is_module = is_frame & (segment.words[head + form.category + form.name] == MODULE_NAME)
        done = is_frame & ~is_module
        done |= is_event & _are_marks(segment, first, head)
        collector = self._collector
        collector.settle(part)
        self._take_arrows(segment, done)
        self._take_ops(segment, np.flatnonzero(is_span & (category == OP)), done, part)
        is_call = is_span & np.isin(category, CALLS)
        self._take_calls(segment, np.flatnonzero(is_call), done, part)
        is_device = np.isin(category, DEVICE)
        if (is_span[is_device]).all():
            self._take_device(segment, np.flatnonzero(is_device), done, part)
        self._take_modules(segment, np.flatnonzero(is_module), done)
        collector.tables.events += int(np.count_nonzero(done))
        collector.add_texts(segment.left(done))
        return True

    @staticmethod
    def _spans(segment: Segment, events: Ints, heads: _Known) -> _Rows:
        """The spans of which head and times can be read."""
        numbers = heads.column(segment.heads(events))
        start, duration, known = segment.times(events)
        end = segment.ends[segment.first[events] + segment.form.head]
        keep = known & (numbers >= 0) & (segment.raw[end - 1] == COMMA)
        return _Rows(events, start, duration, numbers).where(keep)

    def _take_ops(self, segment: Segment, events: Ints, done: Flags, part: int) -> None:
        rows = self._spans(segment, events, self._ops)
        places = rows.events.tolist()
        columns = OpRows(rows.start, rows.start + rows.duration, rows.thread, rows.name)
        self._collector.add_ops(part, columns, lambda row: segment.arguments(places[row]))
        done[rows.events] = True

    def _take_calls(self, segment: Segment, events: Ints, done: Flags, part: int) -> None:
        """Launch calls that end with their correlation."""
        rows = self._spans(segment, events, self._calls)
        end = segment.ends[segment.first[rows.events + 1] - 3]
        begin = end + segment.distances(end, CORRELATION, range(-9, -19, -1)) + 8
        correlation, known = segment.digits(begin, end)
        rows, correlation = rows.where(known), correlation[known]
        columns = LaunchRows(correlation, rows.name, rows.thread, rows.start)
        self._collector.add_launches(part, columns)
        done[rows.events] = True

    def _take_device(self, segment: Segment, events: Ints, done: Flags, part: int) -> None:
        """Kernels, memcpys and memsets: all of a segment or none, so that they keep their order."""
        rows = self._spans(segment, events, self._kernels)
        args, begin, end = self._device_args(segment, rows.events)
        correlation, known = segment.digits(begin, end)
        if len(rows.events) < len(events) or args is None or not known.all():
            return
        config, device, stream, node, size = args
        kernel = rows.head
        columns = (rows.start, rows.duration, kernel, config, device, stream, correlation, node)
        self._collector.add_device(part, GpuRows(*columns, size))
        done[events] = True

    def _device_args(self, segment: Segment, events: Ints) -> tuple[Ints | None, Ints, Ints]:
        """Columns as _DeviceArgs has them, and where each correlation begins and ends; no columns
        where some args cannot be read.
        """
        text, known, read = segment.text, self._args, []
        begins = segment.ends[segment.first[events] + segment.form.args] + 1
        ends = segment.ends[segment.first[events + 1] - 3]
        places: list[tuple[int, int]] = []
        lines: Any = zip(begins.tolist(), ends.tolist(), strict=True)
        for begin, end in lines:
            at = text.find(CORRELATED, begin, end) + len(CORRELATED)
            comma = text.find(b",", at, end)
            if at < len(CORRELATED) or comma < 0:
                return None, begins, begins
            if text.startswith(EXTERNAL, begin):  # which counts, as the correlation does
                begin = text.find(b",", begin, at) + 1
            number = known[text[begin:at] + b"0" + text[comma:end]]
            if number < 0:
                return None, begins, begins
            read.append(known.rows[number])
            places.append((at, comma))
        columns: Ints = np.array(read, np.int64).reshape(-1, 5).T
        of_number: Ints = np.array(places, np.int64).reshape(-1, 2).T
        return columns, of_number[0], of_number[1]

    def _take_modules(self, segment: Segment, events: Ints, done: Flags) -> None:
        rows = self._spans(segment, events, self._frames)
        names = list(self._modules)
        columns = (rows.start, rows.start + rows.duration, rows.thread)
        self._collector.add_modules([names[name] for name in rows.name.tolist()], columns)
        done[rows.events] = True

    def _take_arrows(self, segment: Segment, done: Flags) -> None:
        """Ends of arrows: those from launch calls to the device are needed by nobody."""
        form, first = segment.form, segment.first[: segment.count]
        events = np.flatnonzero(segment.first[1 : segment.count + 1] - first == form.lines)
        place = segment.ends[first[events] + form.arrow - 1] + len('\n    "cat": "')
        is_named = segment.words[place - 8] == CATEGORY
        category = segment.words[place]
        done[events[is_named & (category == TO_DEVICE)]] = True
        events = events[is_named & (category == TO_BACKWARD)]
        head = segment.ends[first[events]] + 1
        end = segment.ends[first[events] + form.moment] - 1
        phase, key = segment.words[head + 8], head + form.key
        process = key + segment.distances(key, form.process, range(1, MAX_DIGITS))
        word = _word(form.time[-8:])
        moment = end + segment.distances(end, word, range(-9, -13 - MAX_DIGITS, -1)) + 8
        keys, has_key = segment.digits(key, process)
        times, has_time = segment.numbers(moment, end)
        keep = has_key & has_time & (segment.words[head] == PHASE)
        keep &= segment.words[key - 8] == form.before_key
        keep &= ((phase == form.begins) | (phase == form.ends)) & (segment.raw[end] == COMMA)
        keep &= moment - process > len(form.time)
        stop = moment[keep] - len(form.time)
        columns = zip(process[keep].tolist(), stop.tolist(), strict=True)
        threads = self._threads.column(segment.text[begin:stop] for begin, stop in columns)
        begins = phase[keep] == form.begins
        made = np.stack([keys[keep], begins.astype(np.int64), threads, times[keep]])
        self._collector.add_arrows(made[:, threads >= 0])
        done[events[keep][threads >= 0]] = True


def _are_marks(segment: Segment, first: Ints, head: Ints) -> Flags:
    """Which events are instants of the CPU, such as a change of memory, that nobody needs."""
    form = segment.form
    place = head + form.mark
    is_mark = (segment.words[head + 8] == form.instant) & (segment.words[place] == MARK)
    is_mark &= segment.words[place - 8] == CATEGORY
    result: Flags = is_mark & segment.have_args(first, form.args + 1)
    return result
