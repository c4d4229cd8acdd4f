"""Nsight Compute: command lines, failures, and completeness of reports.

The failure texts were observed with ncu 2022.3 to 2025.3, or come from NVIDIA's manuals and
binaries and from users' public reports. Source of the outer format of an .ncu-rep: NVIDIA's
ProfilerReport.proto (in Nsight Compute, extras/FileFormat) and a report of ncu 2025.3. After the
magic number there is a sized FileHeader, then blocks: a sized BlockHeader, whose field 2 counts
results, field 3 contains the session and field 5 is the size of the payload that follows.
"""

from __future__ import annotations

import io
import itertools
import re
import signal
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from profharness.errors import TraceFormatError
from profharness.files import open_input
from profharness.processes import read_end
from profharness.recording.profilers.base import (
    LOADER,
    NO_SANDBOX,
    OWN_TMPDIR,
    TOOL_OPTIONS,
    Ended,
    FailureRule,
    FailureRules,
    ToolSession,
    diagnose,
    escape_macros,
    report_damaged,
    version_key,
)
from profharness.recording.profilers.ncu_metrics import QUERY_METRICS
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


RULES = FailureRules(
    NCU,
    (
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
            "unknown_set",
            r"No metrics to collect found in sections",
            "the requested set or sections contain no metrics",
            "`ncu --list-sets` and `ncu --list-sections` list them",
        ),
        FailureRule(
            "unknown_option",
            r"unrecogni[sz]ed option '(?P<option>[^']*)'",
            "this ncu does not know the option {option}",
            TOOL_OPTIONS.replace("{tool}", "ncu"),
        ),
        FailureRule(
            "executable_missing",
            r"^==ERROR== '(?P<path>[^']*)' does not exist or is not an executable",
            "{path} does not exist or is not an executable",
            "give the program's absolute path",
        ),
        FailureRule(
            "executable_missing",
            r"^==ERROR== Missing executable to launch",
            "ncu was given no program to start",
            "name the program behind ncu's options",
        ),
        FailureRule(
            "output_exists",
            r"^==ERROR== File (?P<path>.*?) ?already exists",
            "{path} was there already, and ncu left it as it was",
            "remove it, or pass -f",
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
            "child_processes",
            r"requires the --target-processes all option",
            "the kernels ran in a child process, which ncu did not follow",
            "pass --target-processes all",
        ),
        FailureRule(
            "no_kernels_matched",
            r"^==WARNING== No kernels were profiled",
            "ncu profiled no kernel for {report}: none ran, or none ran inside the ranges of cells",
            "see whether the cells launch kernels at all (`--profiler torch`); a filter needs its name "
            "escaped, a slash at the end for push/pop ranges and none for start/end ranges",
        ),
        FailureRule(
            "tool_library_missing",
            r"\bncu: " + LOADER,
            "ncu did not start for want of the library {library}",
            "install the package that has it",
        ),
        FailureRule(
            "killed",
            r"\A(?P<how>signal \d+)$",
            "ncu was ended by {how} before it wrote {report}",
            "see the kernel log for out-of-memory, then run again with fewer cells",
            written=False,
        ),
    ),
    timeout=(
        FailureRule(
            "lock_file",
            r"nsight-compute-lock",
            "ncu waited too long for the lock of another ncu",
            "set TMPDIR to a folder of your own, or let the other ncu end",
        ),
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
    if output.suffix != SUFFIX:
        raise ValueError(f"{output}: the report of ncu must end in {SUFFIX}")
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
        *("-o", escape_macros(output)),
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

    def judge(self, ended: Ended) -> tuple[Problem | None, Path | None]:
        text = f"{ended.text}\n{read_end(self.log)}"
        problem = diagnose(RULES, ended.returncode, text, self.report, self.started)
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
    """What the blocks of a report say about it."""

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
    if file.read(len(MAGIC)) != MAGIC:
        raise TraceFormatError(path, "not an Nsight Compute report", expected=EXPECTED)
    _sized(path, file, size)
    results, version, created_s = 0, None, None
    for count in itertools.count():
        begin = file.tell()
        if begin >= size:
            break
        if count == MAX_BLOCKS:
            message = f"more than {MAX_BLOCKS:,} blocks"
            raise TraceFormatError(path, message, offset=begin, expected=EXPECTED)
        header = _sized(path, file, size)
        try:
            if not header:
                raise ValueError
            numbers, session = _fields(header)
            created_s = created_s or _created(session)
        except (IndexError, ValueError):
            message = "a damaged block"
            raise TraceFormatError(path, message, offset=begin, expected=EXPECTED) from None
        results += numbers.get(RESULTS, 0)
        match = None if version else _VERSION.search(session)
        version = match[1].decode() if match else version
        _inside(path, file, numbers.get(PAYLOAD, 0), size)
        file.seek(numbers.get(PAYLOAD, 0), 1)
    return NcuFile(results, version, created_s)


def _sized(path: Path, file: BinaryIO, size: int) -> bytes:
    """Return the bytes after a 32-bit count."""
    _inside(path, file, SIZE.size, size)
    (count,) = SIZE.unpack(file.read(SIZE.size))
    _inside(path, file, count, size)
    if count > MAX_HEADER:
        message = f"a header of {count} bytes"
        raise TraceFormatError(path, message, offset=file.tell(), expected=EXPECTED)
    return file.read(count)


def _inside(path: Path, file: BinaryIO, count: int, size: int) -> None:
    if file.tell() + count > size:
        expected = f"{file.tell() + count - size} more bytes; copy or capture it again"
        raise TraceFormatError(path, "the report is cut off", offset=size, expected=expected)


def _created(session: bytes) -> int | None:
    try:
        # the time is optional
        return _fields(session)[0].get(CREATED)
    except (IndexError, ValueError):
        return None


def _fields(message: bytes) -> tuple[dict[int, int], bytes]:
    """Return the numbers of a protobuf message by field, and the bytes of its session."""
    numbers: dict[int, int] = {}
    session = b""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        field, wire = key >> 3, key & 7
        if wire == VARINT:
            numbers[field], place = _varint(message, place)
            continue
        if wire == SIZED:
            count, place = _varint(message, place)
        elif wire in (EIGHT_BYTES, FOUR_BYTES):
            count = 8 if wire == EIGHT_BYTES else 4
        else:
            raise ValueError(wire)
        if place + count > len(message):
            raise ValueError(count)
        if field == SESSION:
            session = message[place : place + count]
        place += count
    return numbers, session


def _varint(message: bytes, place: int) -> tuple[int, int]:
    value = 0
    # a protobuf number has at most ten bytes
    for shift in range(0, 70, 7):
        byte = message[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError(place)
