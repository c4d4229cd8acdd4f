"""Kineto events as typed Structs of one tagged union; categories nobody needs are syntax-checked
and built as empty.
"""

from __future__ import annotations

import re
import types
from decimal import Decimal
from typing import Any

import msgspec

GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH = ("cuda_runtime", "cuda_driver")
IGNORED = (
    "python_function", "ac2g", "async_cpu_to_gpu", "fwdbwd", "forward_backward",
    "cpu_instant_event", "overhead", "Trace", "gpu_user_annotation", "cuda_sync", "cuda_event",
    "cuda_profiler_range", "collective_comm", "async_gpu", "async",
)  # fmt: skip

Id = int | str | float | None
Triple = tuple[int, int, int]

_NOT_FINITE = re.compile(
    rb'"(?:[^"\\]|\\.)*+"|-?\b(?:NaN|nan|Infinity|infinity|inf)\b', re.DOTALL | re.ASCII
)


class GpuArgs(msgspec.Struct, gc=False):
    """`args` of a kernel, memcpy or memset."""

    device: int = -1
    stream: int = -1
    correlation: int = -1
    graph_node: int | None = msgspec.field(default=None, name="graph node id")
    registers: int | None = msgspec.field(default=None, name="registers per thread")
    shared: int | None = msgspec.field(default=None, name="shared memory")
    grid: Triple | None = None
    block: Triple | None = None
    bytes: int = -1


class LaunchArgs(msgspec.Struct, gc=False):
    """`args` of a runtime or driver call."""

    correlation: int = -1


class LooseArgs(msgspec.Struct, gc=False):
    """`args` of a category not known here: a launch if it has a correlation and no stream."""

    correlation: Any = -1
    stream: Any = None


_TIMES = {False: float, True: Decimal}


class Events:
    """The union's classes and decoders for one file; `exact` reads ts as Decimal (beyond float's
    exactness).
    """

    def __init__(self, *, exact: bool, extra: tuple[str, ...] = ()) -> None:
        self.exact = exact
        self.extra = list(extra)
        self._build()

    def _build(self) -> None:
        time = _TIMES[self.exact]
        timed: list[tuple[str, Any]] = [("name", str), ("ts", time), ("dur", float)]
        thread: list[Any] = [("pid", Id, None), ("tid", Id, None)]
        self.gpu = [_struct(cat, [*timed, ("args", GpuArgs)]) for cat in GPU]
        launch: list[Any] = [("name", str), ("ts", time), ("args", LaunchArgs), *thread]
        self.launch = [_struct(cat, launch) for cat in LAUNCH]
        loose: list[Any] = [
            ("name", str, ""),
            ("ts", Any, None),
            ("args", Any, None),
            *thread,
        ]
        self.loose = [_struct(cat, loose) for cat in self.extra]
        self.op = _struct("cpu_op", [*timed, *thread])
        self.range = _struct("user_annotation", [*timed, *thread])
        self.ignored = [_struct(cat, []) for cat in IGNORED]
        union: Any = self.op | self.range
        for cls in (*self.gpu, *self.launch, *self.loose, *self.ignored):
            union = union | cls
        self.many: Any = msgspec.json.Decoder(types.GenericAlias(list, (union,)))
        self.one: Any = msgspec.json.Decoder(union)
        self.known = {*GPU, *LAUNCH, "cpu_op", "user_annotation", *IGNORED, *self.extra}

    def decode_one(self, data: bytes) -> tuple[Any, bool]:
        """One event of a segment that did not decode as a whole: (event or None, whether it was
        bad).

        Events without a category and ones without a duration are none of ours and not bad. Numbers
        that are not finite
        become null: Kineto writes `inf` for the bandwidth of a copy that took no time.
        """
        try:
            return self.one.decode(data), False
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass
        data = _NOT_FINITE.sub(_null, data)
        try:
            head = _HEAD.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None, True
        if not isinstance(head.cat, str) or head.ph not in (None, "X"):
            return None, False
        if head.cat not in self.known:
            if len(self.extra) >= 256:
                return None, False
            self.extra.append(head.cat)
            self._build()
        try:
            return self.one.decode(data), False
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None, True


class _Head(msgspec.Struct):
    cat: Any = None
    ph: Any = None


_HEAD = msgspec.json.Decoder(_Head)


def _struct(category: str, fields: list[Any]) -> Any:
    name = "Event_" + re.sub(r"\W", "_", category)
    return msgspec.defstruct(name, fields, tag_field="cat", tag=category, gc=False)


def _null(match: re.Match[bytes]) -> bytes:
    return match.group() if match.group().startswith(b'"') else b"null"
