"""Define the data structures of a parsed trace.

The parsers for all profilers return a `Trace`, and the store ingests it.

Small tables (names, launch configurations, ranges) are plain lists. A trace can contain millions of
launches, so launches are delivered in batches. A batch consists of columns, which refer to the small
tables by index. Times are integers in nanoseconds on the absolute clock of the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from profharness.attention.config import Config
from profharness.devices import Device

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Int64Column = NDArray[np.int64]


CELL_RANGE_PREFIX = "profharness:"
WARMUP_RANGE = "profharness:warmup"
# In an index column, NONE means that there is no referenced row. In a value column, it means that
# the value is unknown.
NONE = -1
# Why the config of an attention call in a CUDA graph, or of bare kernels, is unknown
NO_SHAPES = "the call belongs to a CUDA graph, so the trace does not contain its shapes"
NO_OP = "the kernels of the call were launched without an op, so the trace does not show its shapes"
LAUNCHED_WITHOUT_OP = (
    "were launched without an op, so the trace does not show their shapes, and FLOPs and bytes are "
    "unknown"
)
"""The end of a sentence on all calls of a step whose reason is NO_OP."""


def cell_range(cell: str) -> str:
    """Return the name of the range that the worker opens around each profiled call of a cell."""
    return f"{CELL_RANGE_PREFIX}{cell}"


def range_cell(name: str) -> str | None:
    """Return the cell id in the name of a range, or None if the range does not belong to a cell."""
    is_cell = name.startswith(CELL_RANGE_PREFIX) and name != WARMUP_RANGE
    return name.removeprefix(CELL_RANGE_PREFIX) if is_cell else None


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Grid, block and resources of a launch.

    A field is None if the value is unknown. All fields are None for an op on the CPU.
    """

    grid: tuple[int, int, int] | None
    block: tuple[int, int, int] | None
    registers_per_thread: int | None = None
    """Registers per thread. On AMD GPUs, these are the vector registers (VGPRs)."""
    static_shared_bytes: int | None = None
    dynamic_shared_bytes: int | None = None
    shared_bytes: int | None = None
    """Shared memory per block. On AMD GPUs, this is the local data share (LDS)."""
    accum_registers_per_thread: int | None = None
    scalar_registers: int | None = None  # registers that the threads of a wavefront share
    scratch_bytes_per_thread: int | None = None


@dataclass(frozen=True, slots=True)
class Range:
    """A range that a user opened on a thread with record_function or NVTX."""

    name: str
    start_ns: int
    duration_ns: int
    pid: int
    tid: int
    parent: int | None = None
    """Index of the enclosing range, or None if no range encloses this range."""


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """A tensor argument of an op."""

    dims: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    """Strides in elements, or None if the trace does not contain the strides."""
    dtype: str | None = None
    """The dtype's name in configs, or its name in the trace if configs do not support it."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """An attention call of a program. The start and the duration are measured on the CPU."""

    kind: str
    """How the program called attention:

    - `sdpa`: through scaled_dot_product_attention
    - `inner`: through an op that scaled_dot_product_attention would call, as compiled code does
    - `fast_path`: through the fast path of nn.TransformerEncoder
    - `flex`: through flex_attention
    - `custom`: through an op of another package
    - `eager`: as two matrix products with a softmax between them
    - `replay`: as kernels of a CUDA graph whose ops are not in the trace
    """
    op: str  # the op that the program called
    sdpa_op: str | None  # the op that computed the attention, or None if it is unknown
    compiled: bool
    recompute: bool  # whether the call repeats a forward pass during a backward pass
    backward: bool
    """Whether the backward pass of the call ran, or the call stored data for a backward pass."""
    modules: tuple[str, ...]  # the nn.Modules that were being called, outermost first
    config: Config | None  # a config that describes the call, or None if no config can describe it
    reason: str | None
    """The reason why there is no config, or the properties of the call that are not in the config."""
    tensors: tuple[TensorArgument | None, ...]
    """The query, key, value and mask. A tensor is None if it was not given or is unknown."""
    path: str | None = None
    """Dotted path of the innermost module, such as `layers.0.self_attn`.

    The path is None if no marker in the trace contains it.
    """
    step: int | None = None
    pid: int = NONE
    tid: int = NONE
    start_ns: int = 0
    duration_ns: int = 0
    graph: bool = False  # whether a CUDA graph replayed the call


@dataclass(frozen=True, slots=True)
class CallSpan:
    """A time interval on a thread in which all launches belong to one direction of one call."""

    call: int  # index of the call in the list of calls
    direction: str  # `forward`, `backward` or `recompute`


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """A step of a program, with the name of the range or module that spans the step."""

    name: str
    start_ns: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class LaunchBatch:
    """A batch of launches, stored as int64 columns of equal length.

    NONE (-1) represents a missing value. The columns kernel, launch_config, op_path, range, api and
    call_span contain indices into the lists of the Trace.
    """

    kernel: Int64Column
    launch_config: Int64Column
    op_path: Int64Column
    range: Int64Column
    """Index of the innermost user range that was open on the launching thread.

    If no user range was open, the value is the same as in `cell_range`.
    """
    cell_range: Int64Column
    """Index of the `profharness:` range that encloses the launch.

    Autograd launches kernels from a separate thread. Therefore, if the launching thread has no open
    range, the index refers to an open range of another thread in the process.
    """
    api: Int64Column
    device: Int64Column
    """Index of the GPU, or -1 for the CPU.

    If a trace contains only CPU events, launches are ops, and the duration of an op excludes child
    ops.
    """
    stream: Int64Column
    correlation: Int64Column
    graph_node: Int64Column
    pid: Int64Column
    tid: Int64Column
    launch_ns: Int64Column  # start of the API call that launched the kernel, on the CPU
    start_ns: Int64Column  # start of the kernel on the device
    duration_ns: Int64Column  # duration of the kernel on the device
    bytes: Int64Column  # number of bytes that a memcpy copied or a memset set
    call_span: Int64Column  # index of the CallSpan that contains the launch


@dataclass(frozen=True, slots=True)
class HardwareMetrics:
    """Values of hardware counters for the launches of a trace, with the profiler's names."""

    names: list[str]
    units: list[str]
    values: NDArray[np.float64]
    """An array of shape [launches, names].

    Row i belongs to the i-th launch in the order of the batches. NaN means that the launch has no
    value for the counter.
    """


@dataclass(frozen=True, slots=True)
class Trace:
    """A parsed trace file.

    Call `batches()` once to read the launches. Then call `close()` to delete the temporary files.
    """

    profiler: str
    devices: tuple[Device, ...]
    environment: dict[str, object]
    """Properties recorded in the file, such as cuda_runtime_version and distributedInfo.

    Host and user names, paths and the command line are excluded.
    """
    kernels: list[str]
    """Canonical names as in Kineto. The names of memcpy and memset are not changed."""
    kernel_kinds: list[str]  # the kind of each kernel: `kernel`, `memcpy`, `memset` or `op`
    launch_configs: list[LaunchConfig]
    op_paths: list[str]
    """Stacks of ATen and autograd ops, from the outermost to the innermost, separated by ";"."""
    apis: list[str]
    ranges: list[Range]
    num_launches: int
    skipped: int  # number of events that could not be read and were skipped
    batches: Callable[[], Iterator[LaunchBatch]]
    close: Callable[[], None]
    warnings: tuple[str, ...] = field(default=())
    calls: tuple[AttentionCall, ...] = ()
    call_spans: tuple[CallSpan, ...] = ()
    steps: tuple[ProgramStep, ...] = ()
    metrics: HardwareMetrics | None = None
    created_s: int | None = None
    """Creation time in seconds since 1970, or None if the file does not contain this time."""
