"""Find ops among the NVTX ranges of an nsys export.

PyTorch's `emit_nvtx`, which `nsys profile --pytorch=autograd-shapes-nvtx` enables, describes an op
in the range's text: `aten::mm, seq = 5, op_id = 7, sizes = [[2, 3], [3, 4]], input_op_ids = [(1,0),
(2,0)]`.
"""

from __future__ import annotations

import json
import re
import sys
from array import array
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from profharness.traces.columns import Block, EvaluationRows, Ints, Spool, Tables
from profharness.traces.ops import (
    EVALUATION,
    NO_ARGUMENTS,
    Flow,
    HostSpan,
    OpArguments,
    has_arguments,
    is_detailed,
)

BLOCK_ROWS = 65536
# The tail of a text, by getNvtxStr of torch/csrc/profiler/util.cpp; nsys may truncate its lists.
TAIL = re.compile(
    r", (?=(?:seq|op_id|sizes|input_op_ids) = )(?:seq = (?P<sequence>\d{1,18})(?:, |\Z))?"
    r"(?:op_id = (?P<id>\d+)(?:, |\Z))?(?:sizes = (?P<sizes>[\[\]\d, ]*))?"
    r"(?:input_op_ids = [\[\]()\d, -]*)?\Z",
    re.ASCII,
)
OWN = ("aten::", "autograd::", "torch::")
NAMESPACED = re.compile(r"[a-z_]\w*::\w")
BARE = re.compile(r"detach_?|triton_\w+")  # ops without a namespace
A_SIZE = re.compile(r"[0-9]")
NODE = re.compile(r"Backwards?\d*$")


class OpText(NamedTuple):
    """The parts of the text of PyTorch's range. `is_op` is false for a user's `record_function`."""

    name: str
    sequence: int
    sizes: str | None
    is_op: bool


def read_text(text: str) -> OpText | None:
    """Parse a text of PyTorch. Return None for any other text.

    PyTorch numbers every op. A `record_function` has that number too, but neither a sequence number
    nor a tensor.
    """
    match = TAIL.search(text)
    if match is None or not match.start():
        return None
    name = sys.intern(text[: match.start()])
    sequence, number, sizes = match.group("sequence", "id", "sizes")
    own = name.startswith(OWN)
    if number is None and not own:
        return None
    has_details = sequence is not None or bool(sizes and A_SIZE.search(sizes))
    is_op = own or has_details or bool(NAMESPACED.match(name) or BARE.fullmatch(name))
    return OpText(name, int(sequence or -1), sizes, is_op)


@lru_cache(maxsize=4096)
def op_arguments(text: str) -> OpArguments | None:
    """Parse shapes such as `[[2, 3], []]`. Return None for anything but a list of lists."""
    try:
        shapes = json.loads(text.removesuffix(", "))
        return OpArguments(tuple(map(tuple, shapes)))
    except (ValueError, TypeError, RecursionError):
        return None


class OpRanges:
    """Adds ops to the tables and the spool. `unread` counts ops with unreadable sizes."""

    def __init__(self, tables: Tables, spool: Spool) -> None:
        self.unread = 0
        self._tables = tables
        self._spool = spool
        self._any = False
        self._renamed: dict[int, str] = {}  # texts of ranges by number, before the first op
        self._pending: list[tuple[int, int, int, int]] = []
        self._evaluations = array("q")  # EvaluationRows, one after the other
        self._numbered = array("q")  # thread, start, sequence number and name of each numbered op

    def collect(self, text: str, start: int, stop: int, thread: int) -> str | None:
        """Collect a range that is an op. Return the name of any other range. Times are in ns."""
        op = read_text(text)
        if op is None:
            return text
        if op.name.startswith(EVALUATION):
            self._evaluations.extend((start, stop, thread, op.sequence))
        elif is_detailed(op.name):
            self._detail(op, start, stop, thread)
        if not op.is_op:
            if not self._any:
                self._renamed[len(self._tables.ranges.names)] = text
            return op.name
        self._any = True
        name = self._tables.names[op.name]
        if op.sequence >= 0:
            self._numbered.extend((thread, start, op.sequence, name))
        self._pending.append((start, stop, thread, name))
        if len(self._pending) == BLOCK_ROWS:
            self._flush()
        return None

    def finish(self) -> None:
        """Write the pending ops. Without any op, the ranges are not PyTorch's."""
        self._flush()
        if not self._any:
            self._tables.details.clear()
            self._evaluations = array("q")
            for number, text in self._renamed.items():
                self._tables.ranges.names[number] = text
        rows = np.array(self._evaluations, np.int64).reshape(-1, len(EvaluationRows._fields))
        self._tables.evaluations.append(rows.T)
        self._renamed.clear()

    def _detail(self, op: OpText, start: int, stop: int, thread: int) -> None:
        wanted = op.sizes and has_arguments(op.name)
        arguments = op_arguments(op.sizes) if wanted else NO_ARGUMENTS
        self.unread += arguments is None
        detail = HostSpan(op.name, start, stop, thread, arguments or NO_ARGUMENTS, op.sequence)
        self._tables.details.append(detail)

    def _flush(self) -> None:
        if not self._pending:
            return
        columns = np.array(self._pending, np.int64).T
        low, high = int(columns[0].min()), int(columns[1].max())
        offset = self._spool.write(columns)
        self._tables.ops.append(Block(offset, len(columns), len(self._pending), low, high))
        self._pending.clear()

    def flows(self) -> tuple[Ints, int]:
        """Return a row of Flow for each arrow from a forward to a backward op, by start, and the
        number of backward ops whose sequence number belongs to several threads.

        Autograd numbers the backward ops that a thread prepares. The forward op is the last op that
        started with the number.
        """
        rows = np.array(self._numbered, np.int64).reshape(-1, 4).T
        ids = self._tables.names
        names = list(ids)
        nodes = [number for name, number in ids.items() if EVALUATION + name in ids]
        is_node = np.isin(rows[3], nodes)
        processes = np.array([pid for pid, _ in self._tables.threads], np.int64)
        key = _keys(processes[rows[0]], rows[2])
        forward = np.flatnonzero(~is_node)
        thread, start = rows[0, forward], rows[1, forward]
        forward = forward[np.lexsort((start, thread, key[forward]))]
        changes = np.diff(key[forward], append=-1) | np.diff(rows[0, forward], append=-1)
        last = forward[changes != 0]
        backward = np.flatnonzero(is_node)
        low, high = (np.searchsorted(key[last], key[backward], side) for side in ("left", "right"))
        matched, unclear = [], 0
        columns = (backward.tolist(), low.tolist(), high.tolist())
        for node, begin, end in zip(*columns, strict=True):
            ops = last[begin:end].tolist()
            if len(ops) > 1:
                wanted = _stem(names[rows[3, node]])
                ops = [op for op in ops if _stem(names[rows[3, op]]) == wanted]
                unclear += len(ops) != 1
            if len(ops) == 1 and rows[1, ops[0]] < rows[1, node]:
                matched.append(Flow(*rows[:2, ops[0]].tolist(), *rows[:2, node].tolist()))
        matched.sort(key=lambda flow: flow.start)
        return np.array(matched, np.int64).reshape(-1, 4), unclear


def _keys(process: Ints, sequence: Ints) -> Ints:
    """Return a number per pair, equal for equal pairs."""
    sequences, number = np.unique(sequence, return_inverse=True)
    keys: Ints = np.unique(process, return_inverse=True)[1] * len(sequences) + number
    return keys


def _stem(name: str) -> str:
    """Return `mm` for both `aten::mm` and its `MmBackward0`."""
    return NODE.sub("", name.rpartition("::")[2]).replace("_", "").lower()
