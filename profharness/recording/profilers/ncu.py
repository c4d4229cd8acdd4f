"""Nsight Compute: command lines, failures, completeness of reports, and metrics.

The failure texts were observed with ncu 2022.3 to 2025.3, or come from NVIDIA's manuals and
binaries and from users' public reports. Source of the outer format of an .ncu-rep: NVIDIA's
ProfilerReport.proto (in Nsight Compute, extras/FileFormat) and a report of ncu 2025.3. After the
magic number there is a sized FileHeader, then blocks: a sized BlockHeader, whose field 2 counts
results, field 3 contains the session and field 5 is the size of the payload that follows.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import signal
import struct
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from profharness.errors import TraceFormatError, UsageError
from profharness.files import open_input
from profharness.processes import read_end
from profharness.recording.profilers.base import (
    LIBRARY_MISSING,
    NO_SANDBOX,
    OWN_TMPDIR,
    TOOL_OPTIONS,
    FailureRule,
    ToolSession,
    diagnose,
    output_argument,
    report_damaged,
    version_key,
)
from profharness.rows import NCU
from profharness.run import Problem

SUFFIX = ".ncu-rep"
DOMAIN = "profharness"
# The ranges around profiled calls of cells, not those around warm-up.
CELL_FILTER = f"regex:{DOMAIN}@profharness:c[0-9]+"
# One pass on GH100. launch__* need no pass; those listed here exist in every ncu since 2022.3, and
# launch__sm_count (2024 and later) is always included.
DEFAULT_METRICS: tuple[str, ...] = (
    "gpu__time_duration.sum",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "sm__maximum_warps_per_active_cycle_pct",
    "launch__occupancy_limit_blocks",
    "launch__occupancy_limit_registers",
    "launch__occupancy_limit_shared_mem",
    "launch__occupancy_limit_warps",
    "launch__waves_per_multiprocessor",
)
# ncu 2024.2 does not know --import-sass, and 2025.3 does. Without this option, reports are about 50
# times larger.
IMPORT_SASS_SINCE = (2025, 3)
QUERY_METRICS = "`ncu --query-metrics` lists what this GPU has"


RULES = (
    FailureRule(
        "no_driver",
        r"Nsight Compute failed to connect to the CUDA driver",
        "ncu found no CUDA driver and did not start the program: no {report}",
        "run on a machine with an NVIDIA GPU and driver; libcuda.so on the library path must not be "
        "the stub of the toolkit",
    ),
    FailureRule(
        "counters_forbidden",
        r"ERR_NVGPUCTRPERM",
        "this user may not read the GPU's hardware counters (ERR_NVGPUCTRPERM)",
        "either run as root (in a container with CAP_SYS_ADMIN), or load the driver with "
        "NVreg_RestrictProfilingToAdminUsers=0 and start anew; on WSL allow it in the Windows NVIDIA "
        "control panel; `--profiler torch` works without counters",
    ),
    FailureRule(
        "library_not_loaded",
        r"LibraryNotLoaded",
        "ncu cannot start its counter library (LibraryNotLoaded) and ended the program: this driver "
        "is older than ncu, or this is a gVisor container, or ncu does not know the GPU",
        "match ncu to the driver (2025.3 goes with 580), see that /dev/nvidia-caps is there, and "
        + NO_SANDBOX.replace("{tool}", "ncu"),
    ),
    FailureRule(
        "counters_busy",
        r"driver resource was unavailable",
        "another tool holds the GPU's hardware counters",
        "stop it: `dcgmi profile --pause` before and `dcgmi profile --resume` after, or wait for the "
        "other ncu to end",
    ),
    FailureRule(
        "injection",
        r"CUDA_INJECTION64_PATH is set to (?P<path>.*?)(?:\. To run|$)",
        "another tool is already injected (CUDA_INJECTION64_PATH is {path})",
        "unset CUDA_INJECTION64_PATH, and do not run ncu inside nsys or nsys inside ncu",
    ),
    FailureRule(
        "lock_file",
        r"Failed to open/create lock file (?P<path>\S+)",
        "the lock file {path} belongs to somebody else",
        "set TMPDIR to a folder of your own; ncu keeps its lock there",
    ),
    FailureRule(
        "driver_too_old",
        r"Insufficient driver version to profile on device (?P<device>\d+)",
        "the driver is too old for this ncu to profile device {device}",
        "update the driver, or use an older Nsight Compute",
    ),
    FailureRule(
        "metrics_unavailable",
        r"Failed to access the following metrics",
        "some metrics are out of reach on this GPU, as on a MIG slice",
        "use a whole GPU, or ask for fewer metrics with --metrics",
    ),
    FailureRule(
        "unknown_metric",
        r"Failed to find metric (?P<metric>.*)",
        "ncu knows no metric {metric} on this GPU",
        QUERY_METRICS,
    ),
    FailureRule(
        "unknown_section",
        r"Option '--section (?P<section>[^']*)' did not match any section",
        "ncu has no section {section}",
        "`ncu --list-sections` lists them",
    ),
    FailureRule(
        "unknown_option",
        r"unrecogni[sz]ed option '(?P<option>[^']*)'",
        "this ncu does not know the option {option}",
        TOOL_OPTIONS.replace("{tool}", "ncu"),
    ),
    FailureRule(
        "tmpdir_unusable",
        r"Failed to create temporary file",
        "ncu cannot write its temporary file (TMPDIR)",
        OWN_TMPDIR,
    ),
    FailureRule(
        "tool_error",
        r"^==ERROR== (?!The application returned an error code)(?P<words>.+)",
        "ncu reported an error for {report}: {words}",
        "see the log of ncu for the lines around it",
    ),
    FailureRule(
        "target_failed",
        r"^==ERROR== The application returned an error code \((?P<exit>\d+)\)",
        "the profiled program ended with code {exit} before ncu wrote {report}",
        "run the program without ncu and fix it first",
        quoted=True,
        written=False,
    ),
    # These rules apply only if no rule above matches and the target did not fail.
    FailureRule(
        "no_kernels_matched",
        r"^==WARNING== No kernels were profiled",
        "ncu profiled no kernel for {report}: none ran, or none ran inside the ranges of cells",
        "see whether the cells launch kernels at all (`--profiler torch`); a filter needs its name "
        "escaped, a slash at the end for push/pop ranges and none for start/end ranges",
    ),
    replace(LIBRARY_MISSING, pattern=r"\bncu: " + LIBRARY_MISSING.pattern),
    FailureRule(
        "killed",
        r"\A(?P<how>signal \d+)$",
        "ncu was ended by {how} before it wrote {report}",
        "see the kernel log for out-of-memory, then run again with fewer cells",
        written=False,
    ),
    FailureRule(
        "lock_file",
        r"nsight-compute-lock",
        "ncu waited too long for the lock of another ncu",
        "set TMPDIR to a folder of your own, or let the other ncu end",
        late=True,
    ),
)


def profile_argv(
    tool: Path,
    output: Path,
    command: Sequence[str],
    *,
    log: Path,
    metrics: Sequence[str] = (),
    sections: Sequence[str] = (),
    version: str | None = None,
) -> list[str]:
    """Return the argv that profiles the kernels in the ranges of cells.

    `output` must end in `.ncu-rep`. `metrics` and `sections` are added to DEFAULT_METRICS. Clocks
    are not changed, so that durations are comparable with other profilers; caches are flushed
    before each pass (the default of ncu). `version` is that of the tool, to omit options that it
    does not know; None means the newest. Raise ValueError for another suffix.
    """
    knows_sass = version is None or version_key(version) >= IMPORT_SASS_SINCE
    return [
        str(tool),
        # a config file in the working directory would change what is measured
        *("--config-file", "off"),
        *("--target-processes", "all"),
        *("--replay-mode", "kernel"),
        *("--clock-control", "none"),
        *(("--import-sass", "no") if knows_sass else ()),
        "--nvtx",
        *("--nvtx-include", CELL_FILTER),
        *("--metrics", ",".join(dict.fromkeys([*DEFAULT_METRICS, *metrics]))),
        *(word for section in sections for word in ("--section", section)),
        # only the requested metrics, without avg, min and max of each
        "--disable-extra-suffixes",
        *("--log-file", str(log)),
        "-f",
        *("-o", output_argument(output, SUFFIX)),
        *command,
    ]


def csv_argv(tool: Path, report: Path) -> list[str]:
    """Return the argv that prints a report, one row per kernel, in base units. It needs no GPU."""
    return [
        str(tool),
        *("--config-file", "off"),
        *("--import", str(report)),
        "--csv",
        *("--page", "raw"),
        *("--print-units", "base"),
    ]


def child_environment(base: Mapping[str, str], tmpdir: Path) -> dict[str, str]:
    """Return the environment for ncu and its target.

    In other locales than C, numbers in CSV have thousands separators. The common TMPDIR may contain
    another user's lock file. Sections are read where they are installed, not copied into the home
    folder. Another tool's injection is removed.
    """
    kept = {name: value for name, value in base.items() if name != "CUDA_INJECTION64_PATH"}
    own = {"NV_COMPUTE_PROFILER_DISABLE_STOCK_FILE_DEPLOYMENT": "1"}
    return {**kept, "TMPDIR": str(tmpdir), "LC_ALL": "C", **own}


class NcuSession(ToolSession):
    """The worker under `ncu`, in one process for all cells of a start."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.log = self.scratch / "log"  # output of ncu itself, without the worker's
        self.logs = (self.log,)

    def argv(self, command: list[str]) -> list[str]:
        return profile_argv(
            self.tool.path,
            self.report,
            command,
            log=self.log,
            metrics=self.protocol.metrics,
            sections=self.protocol.sections,
            version=self.tool.version,
        )

    def environment(self, base: dict[str, str]) -> dict[str, str]:
        return child_environment(base, self.scratch)

    def judge(self, returncode: int | None, text: str) -> tuple[Problem | None, Path | None]:
        text = f"{text}\n{read_end(self.log)}"
        problem = diagnose(NCU, RULES, returncode, text, self.report, self.started)
        if not self.report.exists():
            return problem, None
        try:
            check_file(self.report)
        except TraceFormatError as error:
            return problem or report_damaged(NCU, self.report, str(error)), None
        return problem, self.report

    def interrupt(self, process: subprocess.Popen[bytes]) -> None:  # noqa: ARG002
        """End the target, so that ncu writes its report."""
        self.signal_workers(signal.SIGTERM)


MAGIC = b"NVR\0"
EXPECTED = "a report that `ncu -o` wrote"
SIZE = struct.Struct("<I")
VARINT, EIGHT_BYTES, SIZED, FOUR_BYTES = 0, 1, 2, 5  # protobuf wire types
RESULTS, SESSION, PAYLOAD = 2, 3, 5
CREATED = 2  # field of the session
# a damaged count must not exhaust the memory
MAX_HEADER, MAX_BLOCKS = 1 << 24, 1_000_000
_VERSION = re.compile(rb"(\d{4}\.\d+\.\d+(?:\.\d+)?) \(build \d+\)")


@dataclass(frozen=True, slots=True)
class NcuFile:
    """Properties of a report, read from its blocks."""

    results: int  # number of profiled kernels
    version: str | None  # of the ncu that wrote it
    created_s: int | None = None  # start of the session in seconds since 1970


def check_file(path: Path) -> NcuFile:
    """Walk the blocks of a report.

    Raise TraceFormatError, with the offset, for another format and for a truncated or damaged file.
    `ncu_report` reads such a file as far as possible, without an error.
    """
    try:
        with io.BufferedReader(raw := open_input(path)) as file:
            return _walk(path, file, raw.size)
    except OSError as error:
        raise TraceFormatError(path, f"cannot be read: {error.strerror}") from None


def _walk(path: Path, file: BinaryIO, size: int) -> NcuFile:
    def error(message: str, offset: int | None = None, expected: str = EXPECTED) -> Exception:
        return TraceFormatError(path, message, offset=offset, expected=expected)

    def require(count: int) -> None:
        missing = file.tell() + count - size
        if missing > 0:
            expected = f"{missing} more bytes; copy or capture it again"
            raise error("the report is cut off", size, expected)

    def read_sized() -> bytes:
        """Return the bytes after a 32-bit count."""
        require(SIZE.size)
        (count,) = SIZE.unpack(file.read(SIZE.size))
        require(count)
        if count > MAX_HEADER:
            raise error(f"a header of {count} bytes", file.tell())
        return file.read(count)

    if file.read(len(MAGIC)) != MAGIC:
        raise error("not an Nsight Compute report")
    read_sized()
    results, version, created_s = 0, None, None
    for count in itertools.count():
        begin = file.tell()
        if begin >= size:
            break
        if count == MAX_BLOCKS:
            raise error(f"more than {MAX_BLOCKS:,} blocks", begin)
        header = read_sized()
        try:
            if not header:
                raise ValueError
            numbers, session = _fields(header)
        except (IndexError, ValueError):
            raise error("a damaged block", begin) from None
        with contextlib.suppress(IndexError, ValueError):  # the time is optional
            created_s = created_s or _fields(session)[0].get(CREATED)
        results += numbers.get(RESULTS, 0)
        match = None if version else _VERSION.search(session)
        version = match[1].decode() if match else version
        require(numbers.get(PAYLOAD, 0))
        file.seek(numbers.get(PAYLOAD, 0), 1)
    return NcuFile(results, version, created_s)


def _fields(message: bytes) -> tuple[dict[int, int], bytes]:
    """Return the numbers of a protobuf message by field, and the bytes of its session."""
    numbers: dict[int, int] = {}
    session = b""
    offset = 0
    while offset < len(message):
        key, offset = _varint(message, offset)
        field, wire = key >> 3, key & 7
        if wire == VARINT:
            numbers[field], offset = _varint(message, offset)
            continue
        if wire == SIZED:
            count, offset = _varint(message, offset)
        elif wire in (EIGHT_BYTES, FOUR_BYTES):
            count = 8 if wire == EIGHT_BYTES else 4
        else:
            raise ValueError(wire)
        if offset + count > len(message):
            raise ValueError(count)
        if field == SESSION:
            session = message[offset : offset + count]
        offset += count
    return numbers, session


def _varint(message: bytes, offset: int) -> tuple[int, int]:
    value = 0
    # a protobuf number has at most ten bytes
    for shift in range(0, 70, 7):
        byte = message[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
    raise ValueError(offset)


# The hardware counters that answers use, and the presets of `--metrics`. Which GPU has which name comes
# from NVIDIA's table (libnvperf_host of CUDA 13.5) for sm_80, sm_89, sm_90, sm_100 and sm_120. All
# have all names except those in SOME_GPUS.
# Tensor pipe. On Ada, only the second name counts what the first one misses.
TENSOR_PIPE = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
TENSOR_PIPE_OF_ADA = "sm__pipe_tensor_cycles_active_v2.avg.pct_of_peak_sustained_elapsed"
TENSOR_INSTRUCTIONS = "sm__inst_executed_pipe_tensor.sum"
FMA_PIPE = "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_elapsed"
SM_THROUGHPUT = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
# Memory: bytes, and throughput relative to the peak.
L1_BYTES, L2_BYTES = "l1tex__t_bytes.sum", "lts__t_bytes.sum"
DRAM_THROUGHPUT = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
L2_THROUGHPUT = "lts__throughput.avg.pct_of_peak_sustained_elapsed"
L1_THROUGHPUT = "l1tex__throughput.avg.pct_of_peak_sustained_active"
L1_HIT_RATE, L2_HIT_RATE = "l1tex__t_sector_hit_rate.pct", "lts__t_sector_hit_rate.pct"
# Sectors of 32 bytes requested by one instruction of a warp.
LOAD_SECTORS = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio"
STORE_SECTORS = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio"
LOAD_REQUESTS = "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"
STORE_REQUESTS = "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum"
# Passes of shared memory, and those added by bank conflicts.
SHARED_WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
BANK_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
# Schedulers: how often one issues, and what the other warps wait for.
ISSUE_ACTIVE = "smsp__issue_active.avg.pct_of_peak_sustained_active"
WARP_STATES = (
    *("selected", "not_selected", "wait", "barrier", "membar", "sleeping"),
    *("long_scoreboard", "short_scoreboard", "lg_throttle", "mio_throttle", "tex_throttle"),
    *("math_pipe_throttle", "gmma", "branch_resolving", "no_instruction", "imc_miss"),
    *("dispatch_stall", "drain", "misc"),
)


def warp_state(name: str) -> str:
    """Return the metric for one of WARP_STATES: warps in that state on average per issue."""
    return f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio"


_CACHES = (L1_BYTES, L2_BYTES, L1_HIT_RATE, L2_HIT_RATE)
PRESETS: dict[str, tuple[str, ...]] = {
    "tensor": (TENSOR_PIPE, TENSOR_PIPE_OF_ADA, TENSOR_INSTRUCTIONS, FMA_PIPE, SM_THROUGHPUT),
    "memory": (
        *(L1_BYTES, L2_BYTES, DRAM_THROUGHPUT, L2_THROUGHPUT, L1_THROUGHPUT),
        *(LOAD_SECTORS, LOAD_REQUESTS, STORE_SECTORS, STORE_REQUESTS),
        *(SHARED_WAVEFRONTS, BANK_CONFLICTS),
    ),
    "cache": _CACHES,
    "stalls": (ISSUE_ACTIVE, *map(warp_state, WARP_STATES)),
}
"""Preset of `--metrics` -> metrics, in addition to ncu's default ones."""
SOME_GPUS = frozenset({TENSOR_PIPE_OF_ADA, warp_state("gmma"), warp_state("imc_miss")})
"""Metrics of presets that exist only on Ada, on Hopper, or before Blackwell, in that order."""


def metric_names(asked: Sequence[str]) -> tuple[str, ...]:
    """Return the metrics that presets and names of ncu stand for, without duplicates.

    Raise UsageError for a word that is neither, which ncu would silently ignore.
    """
    names: list[str] = []
    for word in asked:
        # every name of ncu starts with its unit (`sm__`), or is a `group:` or a `regex:`
        if word not in PRESETS and "__" not in word and ":" not in word:
            raise UsageError(
                f"--metrics {word}: no preset of that name (there are {', '.join(PRESETS)}), and no "
                "metric of ncu, such as sm__inst_executed.sum"
            )
        names += PRESETS.get(word, (word,))
    return tuple(dict.fromkeys(names))


def unmeasured(asked: Sequence[str], measured: Collection[str]) -> list[str]:
    """Return the requested metrics that ncu silently skipped, without those in SOME_GPUS.

    A name without its suffix stands for any suffix.
    """
    return [
        name
        for name in asked
        if name not in SOME_GPUS
        and not any(metric == name or metric.startswith(f"{name}.") for metric in measured)
    ]
