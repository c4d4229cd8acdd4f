"""Parse the JSON files of rocprofv3.

The whole file is decoded at once, so its size is limited. A rocpd database has no such limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, cast

import msgspec

from profharness.devices import Device
from profharness.errors import TraceFormatError
from profharness.rows import ROCPROFV3
from profharness.trace import Trace
from profharness.traces import open_file
from profharness.traces.columns import whole
from profharness.traces.rocm import (
    Counters,
    Dispatch,
    Recording,
    copy_name,
    gpu,
    limits_of,
    plain_name,
    read_parts,
    triple,
)

MAX_BYTES = 1 << 29
EXPECTED = "a JSON file from rocprofv3"
GPU_AGENT = 2
ROWS = 8192
RANGES = "MARKER_CORE_RANGE_API"
WIDE = "roctxRangeStart"


class _Handle(msgspec.Struct, frozen=True, gc=False):
    handle: Any = None


class _Call(msgspec.Struct, frozen=True, gc=False):
    internal: Any = None


class _Size(msgspec.Struct, frozen=True, gc=False):
    x: Any = None
    y: Any = None
    z: Any = None


class _Info(msgspec.Struct, frozen=True, gc=False):
    agent_id: _Handle = _Handle()
    kernel_id: Any = None
    dispatch_id: Any = None
    private_segment_size: Any = None
    group_segment_size: Any = None
    workgroup_size: _Size = _Size()
    grid_size: _Size = _Size()


class _Launch(msgspec.Struct, frozen=True, gc=False):
    dispatch_info: _Info = _Info()
    start_timestamp: Any = None
    end_timestamp: Any = None
    correlation_id: _Call = _Call()
    stream_id: _Handle = _Handle()


class _Copy(msgspec.Struct, frozen=True, gc=False):
    kind: Any = None
    operation: Any = None
    start_timestamp: Any = None
    end_timestamp: Any = None
    correlation_id: _Call = _Call()
    stream_id: _Handle = _Handle()
    dst_agent_id: _Handle = _Handle()
    src_agent_id: _Handle = _Handle()
    bytes: Any = None


class _Api(msgspec.Struct, frozen=True, gc=False):
    kind: Any = None
    operation: Any = None
    thread_id: Any = None
    start_timestamp: Any = None
    end_timestamp: Any = None
    correlation_id: _Call = _Call()


class _Value(msgspec.Struct, frozen=True, gc=False):
    counter_id: _Handle = _Handle()
    value: Any = None


class _Counted(msgspec.Struct, frozen=True, gc=False):
    dispatch_data: _Launch = _Launch()
    records: list[_Value] = []


class _Records(msgspec.Struct, frozen=True):
    kernel_dispatch: list[_Launch] = []
    memory_copy: list[_Copy] = []
    hip_api: list[_Api] = []
    hsa_api: list[_Api] = []
    marker_api: list[_Api] = []


class _Callbacks(msgspec.Struct, frozen=True):
    counter_collection: list[_Counted] = []


class _Kind(msgspec.Struct, frozen=True):
    kind: Any = None
    operations: list[Any] = []


class _Marker(msgspec.Struct, frozen=True):
    key: Any = None
    value: Any = None


class _Strings(msgspec.Struct, frozen=True):
    buffer_records: list[_Kind] = []
    marker_api: list[_Marker] = []


class _Counter(msgspec.Struct, frozen=True):
    id: _Handle = _Handle()
    name: Any = None


class _Metadata(msgspec.Struct, frozen=True):
    pid: Any = None


class _Process(msgspec.Struct, frozen=True):
    metadata: _Metadata = _Metadata()
    agents: list[dict[str, Any]] = []
    kernel_symbols: list[dict[str, Any]] = []
    counters: list[_Counter] = []
    strings: _Strings = _Strings()
    buffer_records: _Records = _Records()
    callback_records: _Callbacks = _Callbacks()


class File(msgspec.Struct, frozen=True):
    processes: list[_Process] = msgspec.field(name="rocprofiler-sdk-tool")


def parse_rocprofv3_json(path: Path) -> Trace:
    """Parse a JSON of rocprofv3, which may be compressed. The caller must close the returned Trace.

    Raise TraceFormatError if the file is damaged, cut off or too large.
    """
    path = Path(path)
    processes = decode_file(path)[1].processes
    with ExitStack() as stack:
        recording = Recording(path, stack)
        readers = [_Reader(process, recording, index) for index, process in enumerate(processes)]
        has_calls = any(
            process.buffer_records.hip_api or process.buffer_records.hsa_api
            for process in processes
        )
        return read_parts(recording, stack, readers, ROCPROFV3, has_calls=has_calls)


def decode_file(path: Path) -> tuple[bytearray, File]:
    """Return the JSON of a file, and the records in it.

    Raise TraceFormatError if the file is damaged, cut off or too large.
    """
    file, _ = open_file(path)
    data = bytearray()
    with closing(file):
        while more := file.read(1 << 20):
            data += more
            if len(data) > MAX_BYTES:
                message = f"is larger than {MAX_BYTES >> 20} MiB"
                raise TraceFormatError(
                    path, message, expected="a smaller file, or a rocpd database from rocprofv3"
                )
    try:
        return data, msgspec.json.decode(data, type=File)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TraceFormatError(path, f"damaged or cut off: {error}", expected=EXPECTED) from None


class _Reader:
    """Reads the records of one process."""

    def __init__(self, process: _Process, recording: Recording, index: int) -> None:
        self._process, self._recording, self._index = process, recording, index
        self._pid = whole(process.metadata.pid)
        self._agents = {
            _handle(agent): _number(agent.get("logical_node_type_id", agent.get("node_id")))
            for agent in process.agents
            if agent.get("type") == GPU_AGENT
        }
        self._symbols = {
            symbol.get("kernel_id"): symbol
            for symbol in process.kernel_symbols
            if isinstance(symbol.get("kernel_id"), int)
        }

    def read_activities(self, counters: Counters) -> None:
        """Read the dispatches, their counters, and the copies."""
        records, counted = self._process.buffer_records, self._process.callback_records
        launches = list(records.kernel_dispatch)
        seen = {launch.dispatch_info.dispatch_id for launch in launches}
        # without --kernel-trace, a dispatch is recorded only with its counters
        for item in counted.counter_collection:
            if item.dispatch_data.dispatch_info.dispatch_id not in seen:
                seen.add(item.dispatch_data.dispatch_info.dispatch_id)
                launches.append(item.dispatch_data)
        positions: dict[object, int] = {}
        for batch in _batches(launches):
            first = self._recording.count
            kept = self._recording.add_activities(
                [self._launch(launch) for launch in batch], "kernel_dispatch"
            )
            for launch, keep in zip(batch, kept.tolist(), strict=True):
                if keep:
                    positions[launch.dispatch_info.dispatch_id] = first
                    first += 1
        names = {counter.id.handle: counter.name for counter in self._process.counters}
        for item in counted.counter_collection:
            position = positions.get(item.dispatch_data.dispatch_info.dispatch_id)
            for record in item.records if position is not None else ():
                name = names.get(record.counter_id.handle)
                if isinstance(name, str) and isinstance(record.value, int | float):
                    counters.add(cast(int, position), name[:200], float(record.value))
                else:
                    self._recording.doubt("{n} counter [value|values] could not be read")
        for copies in _batches(records.memory_copy):
            self._recording.add_activities([self._copy(copy) for copy in copies], "memory_copy")

    def _launch(self, launch: _Launch) -> tuple[object, ...]:
        info = launch.dispatch_info
        sizes = (
            getattr(size, axis) for size in (info.grid_size, info.workgroup_size) for axis in "xyz"
        )
        return (
            launch.start_timestamp, launch.end_timestamp,
            self._agents.get(info.agent_id.handle, -1), _number(launch.stream_id.handle),
            _number(launch.correlation_id.internal), _number(self._pid), -1, self._index,
            info.kernel_id, *sizes, info.group_segment_size, info.private_segment_size,
        )  # fmt: skip

    def _copy(self, copy: _Copy) -> tuple[object, ...]:
        ends = (copy.dst_agent_id.handle, copy.src_agent_id.handle)
        device = next((self._agents[end] for end in ends if end in self._agents), -1)
        return (
            copy.start_timestamp, copy.end_timestamp, device, _number(copy.stream_id.handle),
            _number(copy.correlation_id.internal), _number(self._pid), _number(copy.bytes),
            self._index, self._operation(copy.kind, copy.operation),
        )  # fmt: skip

    def read_calls(self) -> None:
        """Read the API calls that started activities, and the roctx ranges."""
        records, pid = self._process.buffer_records, _number(self._pid)
        for what, calls in (("hip_api", records.hip_api), ("hsa_api", records.hsa_api)):
            for batch in _batches(calls):
                rows = [
                    (
                        _number(call.correlation_id.internal), pid, _number(call.thread_id),
                        call.start_timestamp, self._operation(call.kind, call.operation),
                    )
                    for call in batch
                ]  # fmt: skip
                self._recording.add_calls(rows, what)
        texts = {
            marker.key: marker.value
            for marker in self._process.strings.marker_api
            if isinstance(marker.key, int)
        }
        for mark in sorted(records.marker_api, key=lambda each: _number(each.start_timestamp)):
            text = texts.get(_number(mark.correlation_id.internal))
            # a mark has no duration
            is_range = (
                self._kind(mark.kind) == RANGES and mark.start_timestamp != mark.end_timestamp
            )
            if is_range and isinstance(text, str) and text:
                function = self._operation(mark.kind, mark.operation) or ""
                self._recording.add_range(
                    text, mark.start_timestamp, mark.end_timestamp, pid, _number(mark.thread_id),
                    wide=function.startswith(WIDE),
                )  # fmt: skip

    def environment(self) -> dict[str, object]:
        """Return an empty dict, because the file describes neither the machine nor its software."""
        return {}

    def describe(self, values: Sequence[Any]) -> tuple[str, Dispatch]:
        """Return the kind and the properties of an activity."""
        if len(values) == 1:
            return "memcpy", Dispatch(copy_name(values[0]))
        kernel, *sizes, shared, scratch = values
        symbol = self._symbols.get(kernel, {})
        names = (plain_name(symbol.get(key)) for key in ("formatted_kernel_name", "kernel_name"))
        return "kernel", Dispatch(
            name=next(filter(None, names), None),
            threads=triple(*sizes[:3]),
            block=triple(*sizes[3:]),
            registers=whole(symbol.get("arch_vgpr_count")),
            accum_registers=whole(symbol.get("accum_vgpr_count")),
            scalar_registers=whole(symbol.get("sgpr_count")),
            shared_bytes=whole(shared),
            static_shared_bytes=whole(symbol.get("group_segment_size")),
            scratch_bytes=whole(scratch),
        )

    def devices(self) -> Iterator[Device]:
        """Yield the GPUs. Impossible properties become warnings."""
        for agent in self._process.agents:
            if agent.get("type") == GPU_AGENT:
                device, doubts = gpu(
                    agent.get("logical_node_type_id", agent.get("node_id")),
                    [agent.get(key) for key in ("product_name", "model_name", "name")],
                    limits_of(agent),
                    agent.get("gfx_target_version"),
                )
                for each in doubts:
                    self._recording.doubt(each)
                if device is not None:
                    yield device

    def _kind(self, kind: object) -> str | None:
        number, kinds = whole(kind), self._process.strings.buffer_records
        return str(kinds[number].kind) if number is not None and number < len(kinds) else None

    def _operation(self, kind: object, operation: object) -> str | None:
        number, of_kind, kinds = whole(operation), whole(kind), self._process.strings.buffer_records
        if number is None or of_kind is None or of_kind >= len(kinds):
            return None
        names = kinds[of_kind].operations
        return str(names[number])[:200] if number < len(names) else None


def _handle(agent: dict[str, Any]) -> object:
    number = agent.get("id")
    handle = number.get("handle") if isinstance(number, dict) else number
    return handle if isinstance(handle, int) else None


def _number(value: object) -> int:
    number = whole(value)
    return -1 if number is None else number


def _batches(rows: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for begin in range(0, len(rows), ROWS):
        yield rows[begin : begin + ROWS]
