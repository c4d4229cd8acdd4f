"""Nsight Compute: command lines, failures, completeness of reports, and metrics.

The failure texts were observed with ncu 2022.3 to 2025.3, or come from NVIDIA's manuals and
binaries and from users' public reports.

The format of an .ncu-rep file is known from NVIDIA's ProfilerReport.proto (in the folder
extras/FileFormat of Nsight Compute) and from a report of ncu 2025.3. The file consists of a magic
number, a FileHeader and blocks. Each block consists of a BlockHeader and a payload. The size of
each header precedes the header. In a BlockHeader, field 2 is the number of results, field 3 is the
session, and field 5 is the size of the payload.
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
# Selects the ranges around profiled calls of cells, but not the ranges around warm-up calls.
CELL_FILTER = f"regex:{DOMAIN}@profharness:c[0-9]+"
# On GH100, ncu measures all of these metrics in one pass. Metrics that begin with launch__ need no
# pass. The launch__ metrics listed here exist in every version since 2022.3. Reports of ncu 2024
# and later always include launch__sm_count.
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
QUERY_METRICS = "`ncu --query-metrics` lists the metrics of this GPU"


RULES = (
    FailureRule(
        "no_driver",
        r"Nsight Compute failed to connect to the CUDA driver",
        "ncu found no CUDA driver and did not start the program, so {report} was not written",
        (
            "run on a machine with an NVIDIA GPU and driver; check that libcuda.so on the "
            "library path is not the toolkit's stub"
        ),
    ),
    FailureRule(
        "counters_forbidden",
        r"ERR_NVGPUCTRPERM",
        "this user is not allowed to read the GPU's hardware counters (ERR_NVGPUCTRPERM)",
        (
            "run as root (or, in a container, with CAP_SYS_ADMIN), load the driver with "
            "NVreg_RestrictProfilingToAdminUsers=0, allow access in the Windows NVIDIA control "
            "panel (on WSL), or use `--profiler torch`, which does not need the counters"
        ),
    ),
    FailureRule(
        "library_not_loaded",
        r"LibraryNotLoaded",
        (
            "ncu could not load its counter library (LibraryNotLoaded) and stopped the program; "
            "the driver is too old for this version of ncu, ncu is running in a gVisor "
            "container, or ncu does not support the GPU"
        ),
        (
            "use an ncu version that matches the driver (ncu 2025.3 for driver 580), check that "
            "/dev/nvidia-caps exists, and profile on a virtual machine or bare metal; `--profiler "
            "torch` works without ncu"
        ),
    ),
    FailureRule(
        "counters_busy",
        r"driver resource was unavailable",
        "another tool is using the GPU's hardware counters",
        (
            "run `dcgmi profile --pause` before the capture and `dcgmi profile --resume` after "
            "it, or wait until the other tool ends"
        ),
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
        "the lock file {path} belongs to another user",
        "set TMPDIR, the folder in which ncu keeps its lock, to a folder that you own",
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
        "some metrics are not available on this GPU, for instance on a MIG slice",
        "use a whole GPU, or request fewer metrics with --metrics",
    ),
    FailureRule(
        "unknown_metric",
        r"Failed to find metric (?P<metric>.*)",
        "ncu has no metric {metric} on this GPU",
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
        "this version of ncu has no option {option}",
        TOOL_OPTIONS.replace("{tool}", "ncu"),
    ),
    FailureRule(
        "tmpdir_unusable",
        r"Failed to create temporary file",
        "ncu cannot write its temporary file to the folder in TMPDIR",
        OWN_TMPDIR,
    ),
    FailureRule(
        "tool_error",
        r"^==ERROR== (?!The application returned an error code)(?P<words>.+)",
        "ncu reported an error for {report}: {words}",
        "see ncu's log for details",
    ),
    FailureRule(
        "target_failed",
        r"^==ERROR== The application returned an error code \((?P<exit>\d+)\)",
        "the profiled program exited with code {exit} before ncu wrote {report}",
        "run the program without ncu, and fix its error first",
        quoted=True,
        written=False,
    ),
    # These rules apply only if no rule above matches and the target did not fail.
    FailureRule(
        "no_kernels_matched",
        r"^==WARNING== No kernels were profiled",
        (
            "ncu profiled no kernels for {report}, because none ran inside the NVTX ranges "
            "of the cells"
        ),
        (
            "check with `--profiler torch` whether the cells launch kernels; if you filter NVTX "
            "ranges, escape their names, and end only the names of push/pop ranges with a slash"
        ),
    ),
    replace(LIBRARY_MISSING, pattern=r"\bncu: " + LIBRARY_MISSING.pattern),
    FailureRule(
        "killed",
        r"\A(?P<how>signal \d+)$",
        "ncu was killed by {how} before it wrote {report}",
        "check the kernel log for out-of-memory kills, then try again with fewer cells",
        written=False,
    ),
    FailureRule(
        "lock_file",
        r"nsight-compute-lock",
        "ncu waited too long for another ncu to release its lock",
        "set TMPDIR to a folder that you own, or wait until the other ncu ends",
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
    """Return the command line of ncu that profiles the kernels in the ranges of cells.

    `metrics` and `sections` are measured in addition to DEFAULT_METRICS. Clocks are not locked, so
    that durations are comparable with those of other profilers. Caches are flushed before each
    pass, which is the default of ncu. Options that the given `version` of ncu does not know are
    omitted. If `version` is None, the newest version is assumed. Raise ValueError if `output` does
    not end in `.ncu-rep`.
    """
    knows_sass = version is None or version_key(version) >= IMPORT_SASS_SINCE
    return [
        str(tool),
        # a config file in the working directory could change the options
        *("--config-file", "off"),
        *("--target-processes", "all"),
        *("--replay-mode", "kernel"),
        *("--clock-control", "none"),
        *(("--import-sass", "no") if knows_sass else ()),
        "--nvtx",
        *("--nvtx-include", CELL_FILTER),
        *("--metrics", ",".join(dict.fromkeys([*DEFAULT_METRICS, *metrics]))),
        *(word for section in sections for word in ("--section", section)),
        # ncu would otherwise add the average, minimum and maximum of each metric
        "--disable-extra-suffixes",
        *("--log-file", str(log)),
        "-f",
        *("-o", output_argument(output, SUFFIX)),
        *command,
    ]


def csv_argv(tool: Path, report: Path) -> list[str]:
    """Return the command line of ncu that prints a report as CSV. The command needs no GPU.

    The CSV has one row per kernel, and its numbers are in base units.
    """
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

    LC_ALL is C, because numbers in CSV have thousands separators in other locales. TMPDIR is a
    separate folder, because the default folder may contain another user's lock file. ncu does not
    copy its section files into the home folder. The variable by which another tool injects a
    library is removed.
    """
    kept = {name: value for name, value in base.items() if name != "CUDA_INJECTION64_PATH"}
    own = {"NV_COMPUTE_PROFILER_DISABLE_STOCK_FILE_DEPLOYMENT": "1"}
    return {**kept, "TMPDIR": str(tmpdir), "LC_ALL": "C", **own}


class NcuSession(ToolSession):
    """The worker under `ncu`. All cells of a start run in one process."""

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
EXPECTED = "a report written by `ncu -o`"
SIZE = struct.Struct("<I")
VARINT, EIGHT_BYTES, SIZED, FOUR_BYTES = 0, 1, 2, 5  # protobuf wire types
RESULTS, SESSION, PAYLOAD = 2, 3, 5
CREATED = 2  # number of the session's field that contains the start time
# limits, so that a damaged size does not exhaust the memory
MAX_HEADER, MAX_BLOCKS = 1 << 24, 1_000_000
_VERSION = re.compile(rb"(\d{4}\.\d+\.\d+(?:\.\d+)?) \(build \d+\)")


@dataclass(frozen=True, slots=True)
class NcuFile:
    """Properties of a report, read from its blocks."""

    results: int  # number of profiled kernels
    version: str | None  # version of the ncu that wrote the report
    created_s: int | None = None  # start of the session in seconds since 1970


def check_file(path: Path) -> NcuFile:
    """Check whether a report is complete, and return its properties.

    Raise TraceFormatError if the file is no report, is cut off or is damaged. NVIDIA's module
    `ncu_report` raises no error for such a file, and reads only its intact part.
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
        """Read a 32-bit size, and return as many of the following bytes."""
        require(SIZE.size)
        (count,) = SIZE.unpack(file.read(SIZE.size))
        require(count)
        if count > MAX_HEADER:
            raise error(
                f"the report contains a header of {count} bytes, which is too large", file.tell()
            )
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
            raise error(f"the report contains more than {MAX_BLOCKS:,} blocks", begin)
        header = read_sized()
        try:
            if not header:
                raise ValueError
            numbers, session = _fields(header)
        except (IndexError, ValueError):
            raise error("the report contains a damaged block", begin) from None
        with contextlib.suppress(IndexError, ValueError):  # the time is optional
            created_s = created_s or _fields(session)[0].get(CREATED)
        results += numbers.get(RESULTS, 0)
        match = None if version else _VERSION.search(session)
        version = match[1].decode() if match else version
        require(numbers.get(PAYLOAD, 0))
        file.seek(numbers.get(PAYLOAD, 0), 1)
    return NcuFile(results, version, created_s)


def _fields(message: bytes) -> tuple[dict[int, int], bytes]:
    """Return the integers of a protobuf message by field number, and the bytes of its session."""
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


# The metrics that profharness evaluates, and the presets of `--metrics`. According to NVIDIA's
# table (libnvperf_host of CUDA 13.5), sm_80, sm_89, sm_90, sm_100 and sm_120 have all of these
# metrics except those in SOME_GPUS.
#
# Utilization of the tensor and FMA pipes. On Ada, TENSOR_PIPE_OF_ADA counts the cycles that
# TENSOR_PIPE misses.
TENSOR_PIPE = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed"
TENSOR_PIPE_OF_ADA = "sm__pipe_tensor_cycles_active_v2.avg.pct_of_peak_sustained_elapsed"
TENSOR_INSTRUCTIONS = "sm__inst_executed_pipe_tensor.sum"
FMA_PIPE = "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_elapsed"
SM_THROUGHPUT = "sm__throughput.avg.pct_of_peak_sustained_elapsed"
# Bytes that the memory levels transferred, and their throughput relative to the peak.
L1_BYTES, L2_BYTES = "l1tex__t_bytes.sum", "lts__t_bytes.sum"
DRAM_THROUGHPUT = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
L2_THROUGHPUT = "lts__throughput.avg.pct_of_peak_sustained_elapsed"
L1_THROUGHPUT = "l1tex__throughput.avg.pct_of_peak_sustained_active"
L1_HIT_RATE, L2_HIT_RATE = "l1tex__t_sector_hit_rate.pct", "lts__t_sector_hit_rate.pct"
# Numbers of requests to global memory, and sectors of 32 bytes per request. A request is one
# instruction of a warp.
LOAD_SECTORS = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio"
STORE_SECTORS = "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio"
LOAD_REQUESTS = "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"
STORE_REQUESTS = "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum"
# Wavefronts (passes) of shared memory, and the wavefronts that bank conflicts add.
SHARED_WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
BANK_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
# How often a scheduler issues an instruction, and the states in which warps wait.
ISSUE_ACTIVE = "smsp__issue_active.avg.pct_of_peak_sustained_active"
# Threads of a warp that are active in an instruction, on average. The rest has left the kernel or
# takes another branch.
ACTIVE_THREADS = "smsp__average_thread_inst_executed_per_inst_executed.ratio"
WARP_STATES = (
    *("selected", "not_selected", "wait", "barrier", "membar", "sleeping"),
    *("long_scoreboard", "short_scoreboard", "lg_throttle", "mio_throttle", "tex_throttle"),
    *("math_pipe_throttle", "gmma", "branch_resolving", "no_instruction", "imc_miss"),
    *("dispatch_stall", "drain", "misc"),
)


def warp_state(name: str) -> str:
    """Return the metric for the average number of warps in one of WARP_STATES per issue."""
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
    "stalls": (ISSUE_ACTIVE, ACTIVE_THREADS, *map(warp_state, WARP_STATES)),
}
"""Maps each preset of `--metrics` to the metrics that it adds to DEFAULT_METRICS."""
SOME_GPUS = frozenset({TENSOR_PIPE_OF_ADA, warp_state("gmma"), warp_state("imc_miss")})
"""Metrics that exist only on some GPUs: only on Ada, only on Hopper, and only before Blackwell."""


def metric_names(asked: Sequence[str]) -> tuple[str, ...]:
    """Return metrics without duplicates, and replace each preset with its metrics.

    Raise UsageError for a word that is neither a preset nor a metric of ncu, because ncu would
    silently ignore the word.
    """
    names: list[str] = []
    for word in asked:
        # every metric of ncu starts with a hardware unit such as `sm__`, with `group:` or `regex:`
        if word not in PRESETS and "__" not in word and ":" not in word:
            raise UsageError(
                f"--metrics {word}: neither a preset ({', '.join(PRESETS)}) nor an ncu "
                "metric such as sm__inst_executed.sum"
            )
        names += PRESETS.get(word, (word,))
    return tuple(dict.fromkeys(names))


def unmeasured(asked: Sequence[str], measured: Collection[str]) -> list[str]:
    """Return the requested metrics that ncu silently skipped, except the metrics in SOME_GPUS.

    A name without a suffix, such as `sm__inst_executed`, is measured if any suffix is measured.
    """
    return [
        name
        for name in asked
        if name not in SOME_GPUS
        and not any(metric == name or metric.startswith(f"{name}.") for metric in measured)
    ]
