"""A parsed trace: what every parser returns and the store takes in, whatever profiler wrote the
file.

Small tables (names, launch configurations, ranges) are plain lists; launches come in column
batches, because there can be millions. A batch refers to the small tables by index. Times are
integer nanoseconds on the trace's own absolute clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from profharness.config import Config
from profharness.devices import Device

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Column = NDArray[np.int64]


CELL_RANGE_PREFIX = "profharness:"
WARMUP_RANGE = "profharness:warmup"
NONE = -1  # in a column: "no such row" (index columns) or "not known" (value columns)


def cell_range(cell: str) -> str:
    """The name of the range that the worker opens around each profiled call of a cell."""
    return f"{CELL_RANGE_PREFIX}{cell}"


def range_cell(name: str) -> str | None:
    """The cell id that a range name stands for; None for warm-up and for other people's ranges."""
    if not name.startswith(CELL_RANGE_PREFIX) or name == WARMUP_RANGE:
        return None
    return name[len(CELL_RANGE_PREFIX) :]


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Grid, block and resources of a launch; None where not known, as for an op on the CPU."""

    grid: tuple[int, int, int] | None
    block: tuple[int, int, int] | None
    registers_per_thread: int | None = None
    static_shared_bytes: int | None = None
    dynamic_shared_bytes: int | None = None
    shared_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Range:
    """One user range (record_function or NVTX) on one thread; parent is an index, or None."""

    name: str
    start_ns: int
    duration_ns: int
    pid: int
    tid: int
    parent: int | None = None


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """A tensor that an op was given. strides and dtype are None where the trace does not tell them;
    a dtype that configs know has their name.
    """

    dims: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One attention call of a program. Times are those of its ops on the CPU.

    kind is `sdpa` (scaled_dot_product_attention), `inner` (the op below it alone, as compiled code
    calls it), `fast_path` (nn.TransformerEncoder's), `flex`, `custom` (a package's op), `eager`
    (matrix products around a softmax) or `replay` (kernels of a CUDA graph whose ops the trace does
    not have). graph: a CUDA graph replayed it. op is what was called, sdpa_op what computed it, None
    where that is not told. recompute: it repeats a forward during a backward. backward: a gradient was
    computed or prepared for. modules are the nn.Modules around it, outermost first; path is their
    dotted name where a marker tells it. config replays the call; reason says why there is none, or
    what of the call a config does not say. tensors are query, key, value and mask.
    """

    kind: str
    op: str
    sdpa_op: str | None
    compiled: bool
    recompute: bool
    backward: bool
    modules: tuple[str, ...]
    config: Config | None
    reason: str | None
    tensors: tuple[TensorArgument | None, ...]
    path: str | None = None
    step: int | None = None
    pid: int = NONE
    tid: int = NONE
    start_ns: int = 0
    duration_ns: int = 0
    graph: bool = False


@dataclass(frozen=True, slots=True)
class CallSpan:
    """A stretch of a thread whose launches belong to the call of that index, in a direction."""

    call: int
    direction: str


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a program; its name is that of the range or module that bounds it."""

    name: str
    start_ns: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class LaunchBatch:
    """Columns of equal length, one element a launch, all int64; NONE (-1) where there is no such
    thing.

    kernel, launch_config, op_path, range, api and call_span are indices into the Trace's lists. cell_range is
    the index of the enclosing `profharness:` range: on the launching thread if one is open there,
    else one of the same process that was open at the time of the launch call (autograd launches
    from a thread of its own). range is the innermost user range of the launching thread, else equal
    to cell_range. launch_ns is when the launching call began; start_ns and duration_ns are the
    device's. device is -1 for the CPU (an op of a CPU-only trace
    with the time that is its own, not its child ops').
    """

    kernel: Column
    launch_config: Column
    op_path: Column
    range: Column
    cell_range: Column
    api: Column
    device: Column
    stream: Column
    correlation: Column
    graph_node: Column
    pid: Column
    tid: Column
    launch_ns: Column
    start_ns: Column
    duration_ns: Column
    bytes: Column  # moved by a memcpy or memset
    call_span: Column  # the stretch of an attention call in which it was launched


@dataclass(frozen=True, slots=True)
class Metrics:
    """Hardware counters of a trace's launches, under the profiler's own names and units.

    values: [launches, names] float64, NaN where a launch has no such value; row i is the i-th
    launch in the order of the batches.
    """

    names: list[str]
    units: list[str]
    values: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Trace:
    """One parsed file. Call `batches()` once; `close()` gives its temporary files back.

    kernels are canonical names (as Kineto prints them; a memcpy or memset under its trace name),
    kernel_kinds says for each `kernel memcpy memset op`. op_paths are folded stacks of
    ATen/autograd ops, outermost first, joined by ";", the innermost op last. environment holds what
    the file itself says (cuda_runtime_version, cupti_version, distributedInfo, …), never host,
    user, path or command line. skipped counts unreadable events. created_s is when the file says that
    it was made, in seconds since 1970.
    """

    profiler: str
    devices: tuple[Device, ...]
    environment: dict[str, object]
    kernels: list[str]
    kernel_kinds: list[str]
    launch_configs: list[LaunchConfig]
    op_paths: list[str]
    apis: list[str]
    ranges: list[Range]
    num_launches: int
    skipped: int
    batches: Callable[[], Iterator[LaunchBatch]]
    close: Callable[[], None]
    warnings: tuple[str, ...] = field(default=())
    calls: tuple[AttentionCall, ...] = ()
    call_spans: tuple[CallSpan, ...] = ()
    steps: tuple[Step, ...] = ()
    metrics: Metrics | None = None
    created_s: int | None = None
