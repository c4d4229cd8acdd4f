"""Parsed traces: the result of every parser and the input of the store's ingest, for all profilers.

Small tables (names, launch configurations, ranges) are plain lists. There can be millions of
launches, so they come in batches of columns, which refer to the small tables by index. Times are
integer nanoseconds on the trace's own absolute clock.
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
NONE = -1  # in a column: no such row (index columns) or unknown (value columns)


def cell_range(cell: str) -> str:
    """Return the name of the range that the worker opens around each profiled call of a cell."""
    return f"{CELL_RANGE_PREFIX}{cell}"


def range_cell(name: str) -> str | None:
    """Return the cell id in a range name. None for warm-up and for ranges of other programs."""
    if not name.startswith(CELL_RANGE_PREFIX) or name == WARMUP_RANGE:
        return None
    return name[len(CELL_RANGE_PREFIX) :]


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """Grid, block and resources of a launch. None if unknown, as for an op on the CPU."""

    grid: tuple[int, int, int] | None
    block: tuple[int, int, int] | None
    registers_per_thread: int | None = None
    static_shared_bytes: int | None = None
    dynamic_shared_bytes: int | None = None
    shared_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Range:
    """One user range (record_function or NVTX) on one thread."""

    name: str
    start_ns: int
    duration_ns: int
    pid: int
    tid: int
    parent: int | None = None
    """Index of the enclosing range, or None."""


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """A tensor argument of an op."""

    dims: tuple[int, ...]
    strides: tuple[int, ...] | None = None
    """None if the trace does not contain them."""
    dtype: str | None = None
    """Config name of the dtype if it has one. None if the trace does not contain it."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One attention call of a program. Times are those of its ops on the CPU."""

    kind: str
    """`sdpa` (scaled_dot_product_attention), `inner` (only the op below it, as in compiled code),
    `fast_path` (that of nn.TransformerEncoder), `flex`, `custom` (an op of a package), `eager`
    (matrix products around a softmax) or `replay` (kernels of a CUDA graph whose ops the trace
    lacks).
    """
    op: str
    """The op that was called."""
    sdpa_op: str | None
    """The op that computed it. None if unknown."""
    compiled: bool
    recompute: bool
    """Repeats a forward pass during a backward pass."""
    backward: bool
    """A gradient was computed or prepared for."""
    modules: tuple[str, ...]
    """The nn.Modules around it, outermost first."""
    config: Config | None
    """A config that replays the call, or None."""
    reason: str | None
    """Why there is no config, or what the config does not cover."""
    tensors: tuple[TensorArgument | None, ...]
    """Query, key, value and mask."""
    path: str | None = None
    """Dotted path of the modules, if a marker contains it."""
    step: int | None = None
    pid: int = NONE
    tid: int = NONE
    start_ns: int = 0
    duration_ns: int = 0
    graph: bool = False
    """Whether a CUDA graph replayed the call."""


@dataclass(frozen=True, slots=True)
class CallSpan:
    """An interval of a thread whose launches belong to a call in one direction."""

    call: int
    """Index of the call."""
    direction: str


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """One step of a program. It has the name of the range or the module that bounds it."""

    name: str
    start_ns: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class LaunchBatch:
    """Columns of launches: int64 arrays of equal length. NONE (-1) marks a missing value.

    kernel, launch_config, op_path, range, api and call_span are indices into the lists of the
    Trace.
    """

    kernel: Int64Column
    launch_config: Int64Column
    op_path: Int64Column
    range: Int64Column
    """Innermost user range of the launching thread, else cell_range."""
    cell_range: Int64Column
    """Index of the enclosing `profharness:` range: one that is open on the launching thread, else
    one of the same process that was open at the time of the launch (autograd launches from its own
    thread).
    """
    api: Int64Column
    device: Int64Column
    """-1 for the CPU: an op of a CPU-only trace, whose time excludes its child ops."""
    stream: Int64Column
    correlation: Int64Column
    graph_node: Int64Column
    pid: Int64Column
    tid: Int64Column
    launch_ns: Int64Column
    """Start of the launching call."""
    start_ns: Int64Column
    """On the device."""
    duration_ns: Int64Column
    """On the device."""
    bytes: Int64Column
    """Moved by a memcpy or memset."""
    call_span: Int64Column
    """Interval of an attention call that contains the launch."""


@dataclass(frozen=True, slots=True)
class HardwareMetrics:
    """Hardware counters of a trace's launches, with the profiler's names and units."""

    names: list[str]
    units: list[str]
    values: NDArray[np.float64]
    """[launches, names] float64. NaN if a launch has no such value. Row i is the i-th launch in the
    order of the batches.
    """


@dataclass(frozen=True, slots=True)
class Trace:
    """One parsed file. Call `batches()` once, and `close()` to delete its temporary files."""

    profiler: str
    devices: tuple[Device, ...]
    environment: dict[str, object]
    """Properties recorded in the file (cuda_runtime_version, cupti_version, distributedInfo, …),
    without host, user, paths and command line.
    """
    kernels: list[str]
    """Canonical names as Kineto prints them. A memcpy or memset has its name in the trace."""
    kernel_kinds: list[str]
    """`kernel`, `memcpy`, `memset` or `op` for each kernel."""
    launch_configs: list[LaunchConfig]
    op_paths: list[str]
    """Folded stacks of ATen and autograd ops, outermost first, joined by ";"."""
    apis: list[str]
    ranges: list[Range]
    num_launches: int
    skipped: int
    """Number of unreadable events."""
    batches: Callable[[], Iterator[LaunchBatch]]
    close: Callable[[], None]
    warnings: tuple[str, ...] = field(default=())
    calls: tuple[AttentionCall, ...] = ()
    call_spans: tuple[CallSpan, ...] = ()
    steps: tuple[ProgramStep, ...] = ()
    metrics: HardwareMetrics | None = None
    created_s: int | None = None
    """When the file was made, as recorded in it, in seconds since 1970."""
