"""Registries of what nsys and ncu write when they fail: one rule a text, the first that matches
counts.

The texts were seen with nsys 2022.4 to 2025.3 and ncu 2022.3 to 2025.3, or read in NVIDIA's
manuals, binaries and public reports of users.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from profharness.errors import ProfharnessError


@dataclass(frozen=True)
class Failure:
    """Why a tool left nothing to work with. code is stable; message says what failed, on what;
    remedy what to do.
    """

    code: str
    message: str
    remedy: str


@dataclass(frozen=True)
class Rule:
    """pattern is searched with `^` and `$` at line ends. message and remedy may name its groups in
    braces, and {report}, the name of the file that was to be written.
    """

    code: str
    pattern: str
    message: str
    remedy: str

    def failure(self, report: Path, groups: Mapping[str, str | None] | None = None) -> Failure:
        """The failure with its blanks filled in."""
        words = {"report": report.name, **(groups or {})}
        return Failure(self.code, self.message.format(**words), self.remedy.format(**words))


_NO_SANDBOX = "profile on a virtual machine or bare metal; `--profiler torch` works without {tool}"
_OWN_TMPDIR = "set TMPDIR to a folder that exists and is writable"
_TOOL_OPTIONS = "install a version from 2022.4 to 2026.2, or see `{tool} --help` for its options"
_SAME_VERSION = (
    "capture, import and export with one and the same nsys, on the machine that captured, and carry "
    "the .sqlite file away"
)
_LOADER = r"error while loading shared libraries: (?P<library>[^:\s]+)"
_DEBIAN = "libdw1, libelf1, libssh-4 on Debian and Ubuntu"


NO_CUDA_EVENTS = Rule(
    "no_cuda_events",
    r"No CUDA events collected|CUDA profiling might have not been started correctly",
    "nsys saw no CUDA work for {report}",
    "see that the program uses the GPU (nvidia-smi, torch.cuda.is_available()) and that nsys is not "
    "older than the CUDA that torch was built with; `--profiler torch` works without nsys",
)


# Those hold even where a report was written: it is cut short or empty of kernels.
NSYS_REPORT_RULES = (
    Rule(
        "version_mismatch",
        r"Qdstrm version (?P<version>\S+) is not supported",
        "the importer cannot read a raw file of nsys {version}, so {report} is not usable",
        _SAME_VERSION,
    ),
    Rule(
        "version_mismatch",
        r"Supplied input buffer of size \d+ is too small"
        r"|Unknown runtime API function index: \d+"
        r"|Data member TimestampType was not initialized",
        "nsys and its importer, or nsys and the CUDA of the program, are of different versions: "
        "{report} lacks events",
        _SAME_VERSION + "; a CUDA 13 program needs nsys 2025.3 or newer",
    ),
    Rule(
        "import_incomplete",
        r"Errors occurred while processing the raw events",
        "the importer stopped in the middle: {report} lacks events",
        _SAME_VERSION,
    ),
    NO_CUDA_EVENTS,
)


NSYS_RULES = (
    Rule(
        "sandboxed",
        r"ConvertGpuTicksToSyncNs",
        "nsys cannot relate GPU time to host time here, as in a gVisor container: no {report}",
        _NO_SANDBOX.replace("{tool}", "nsys"),
    ),
    Rule(
        "executable_missing",
        r"Executable not found in current directory or standard search paths"
        r"|^No such file or directory: \S",
        "nsys found no program to start for {report}",
        "give the program's absolute path",
    ),
    Rule(
        "unknown_option",
        r"unrecogni[sz]ed option '(?P<option>[^']*)'",
        "this nsys does not know the option {option}",
        _TOOL_OPTIONS.replace("{tool}", "nsys profile"),
    ),
    Rule(
        "unknown_option",
        r"Illegal --(?P<option>[\w-]+) arguments?\b(?P<value>.*)",
        "this nsys does not take the value given to --{option}:{value}",
        _TOOL_OPTIONS.replace("{tool}", "nsys profile"),
    ),
    Rule(
        "tmpdir_unusable",
        r"boost::filesystem::temp_directory_path|^Agent launcher failed",
        "nsys cannot start its background process or write its raw files (TMPDIR)",
        _OWN_TMPDIR,
    ),
    Rule(
        "importer_missing",
        r"The importer binary and its dependencies were not found",
        "nsys left a raw .qdstrm file and no {report}: its importer (QdstrmImporter) is not where it "
        "looks, in host-linux-x64 beside its own target-linux-x64",
        "link it there (Debian: `ln -s /usr/lib/nsight-systems/host-linux-x64 "
        "/usr/lib/x86_64-linux-gnu/nsight-systems/host-linux-x64`), or install NVIDIA's own package",
    ),
    Rule(
        "importer_library_missing",
        r"Importer error status: An unknown error occurred",
        "nsys left a raw .qdstrm file and no {report}: its importer (QdstrmImporter) does not start, "
        "most often for want of a library",
        "`ldd QdstrmImporter | grep 'not found'` names it; install the package that has it "
        f"({_DEBIAN})",
    ),
    Rule(
        "sys_missing",
        r"Failed to get number of the device CPUs",
        "the importer of nsys cannot read /sys, so there is no {report}",
        "mount /sys and /proc in the container",
    ),
    Rule(
        "import_failed",
        r"Importer error status: (?P<words>.*)|Import Failed with (?P<more>.*)"
        r"|^File is corrupted\.",
        "nsys could not turn its raw .qdstrm file into {report}",
        "run `QdstrmImporter -i FILE.qdstrm` of the same version by hand to see why; see whether the "
        "disk is full",
    ),
    Rule(
        "output_exists",
        r"Failed to create '(?P<path>[^']*)': File exists",
        "{path} was there already: nsys left it as it was and wrote the new report to TMPDIR",
        "remove the old file, or pass --force-overwrite true",
    ),
    Rule(
        "output_folder_missing",
        r"Failed to create '(?P<path>[^']*)': No such file or directory",
        "the folder of {path} does not exist: nsys wrote the report to TMPDIR",
        "make the folder first",
    ),
    Rule(
        "output_unwritable",
        r"Failed to create '(?P<path>[^']*)': (?P<why>[^.\n]+)",
        "nsys could not write {path}: {why}",
        "choose a folder that is writable and has room",
    ),
    Rule(
        "tool_library_missing",
        _LOADER,
        "a program did not start for want of the library {library}, and there is no {report}",
        "install the package that has it (libelf1 for libelf.so.1, libdw1 for libdw.so.1)",
    ),
    Rule(
        "capture_range_missed",
        r"^Generated:\s*+(?!\S*\.(?:nsys-rep|qdstrm|qdrep))",
        "the program never entered the range that nsys waits for, so there is no {report}",
        "check the range's name, and set NSYS_NVTX_PROFILER_REGISTER_ONLY=0",
    ),
    Rule(
        "sampling_forbidden",
        r"requires root privileges or a paranoid level of (?P<level>\d)",
        "nsys may not sample the CPU here, and there is no {report}",
        "pass --sample=none --cpuctxsw=none, or set kernel.perf_event_paranoid to {level}",
    ),
    Rule(
        "tool_crashed",
        r"FATAL ERROR: (?P<words>.*)",
        "nsys broke down before it wrote {report}: {words}",
        "try another version of Nsight Systems; `--profiler torch` works without nsys",
    ),
)


NSYS_TIMEOUT_RULES = (
    Rule(
        "children_outlive_target",
        r"Waiting for termination of re-parented processes",
        "the program ended, but a process that it left behind kept nsys waiting for {report}",
        "pass --wait=primary, or see that the program ends its own children",
    ),
)


EXPORT_RULES = (
    Rule(
        "output_exists",
        r"Exportation error: File already exists: '(?P<path>[^']*)'",
        "{path} was there already, and nsys export left it as it was",
        "remove it, or pass --force-overwrite true",
    ),
    Rule(
        "report_missing",
        r"Exportation error: File not found: '(?P<path>[^']*)'",
        "nsys export found no report {path}",
        "check the path; nsys profile may have left none",
    ),
    Rule(
        "version_mismatch",
        r"ProtobufParseException|Version not supported: (?P<build>\S+)"
        r"|Version number is invalid: (?P<version>\S+)",
        "the report was made by a newer nsys than the one that exports it",
        _SAME_VERSION,
    ),
    Rule(
        "report_damaged",
        r"Version tag is not found in the stream|Cannot read from stream|Section Table Reference magic number mismatch",
        "the file is not an nsys report, or was cut short",
        "copy it again, or capture again",
    ),
    Rule(
        "tool_library_missing",
        _LOADER,
        "nsys did not start for want of the library {library}",
        "install the package that has it (libelf1 for libelf.so.1, libdw1 for libdw.so.1)",
    ),
    Rule(
        "export_failed",
        r"Exportation error: (?P<words>.*)",
        "nsys export failed: {words}",
        "export with the nsys that made the report, and see whether the disk is full",
    ),
)


NCU_RULES = (
    Rule(
        "no_driver",
        r"Nsight Compute failed to connect to the CUDA driver",
        "ncu found no CUDA driver and did not start the program: no {report}",
        "run on a machine with an NVIDIA GPU and driver; libcuda.so on the library path must not be "
        "the stub of the toolkit",
    ),
    Rule(
        "counters_forbidden",
        r"ERR_NVGPUCTRPERM",
        "this user may not read the GPU's hardware counters (ERR_NVGPUCTRPERM)",
        "either run as root (in a container with CAP_SYS_ADMIN), or load the driver with "
        "NVreg_RestrictProfilingToAdminUsers=0 and start anew; on WSL allow it in the Windows NVIDIA "
        "control panel; `--profiler torch` works without counters",
    ),
    Rule(
        "library_not_loaded",
        r"LibraryNotLoaded",
        "ncu cannot start its counter library (LibraryNotLoaded) and ended the program: this driver "
        "is older than ncu, or this is a gVisor container, or ncu does not know the GPU",
        "match ncu to the driver (2025.3 goes with 580), see that /dev/nvidia-caps is there, and "
        + _NO_SANDBOX.replace("{tool}", "ncu"),
    ),
    Rule(
        "counters_busy",
        r"driver resource was unavailable",
        "another tool holds the GPU's hardware counters",
        "stop it: `dcgmi profile --pause` before and `dcgmi profile --resume` after, or wait for the "
        "other ncu to end",
    ),
    Rule(
        "injection",
        r"CUDA_INJECTION64_PATH is set to (?P<path>.*?)(?:\. To run|$)",
        "another tool is already injected (CUDA_INJECTION64_PATH is {path})",
        "unset CUDA_INJECTION64_PATH, and do not run ncu inside nsys or nsys inside ncu",
    ),
    Rule(
        "lock_file",
        r"Failed to open/create lock file (?P<path>\S+)",
        "the lock file {path} belongs to somebody else",
        "set TMPDIR to a folder of your own; ncu keeps its lock there",
    ),
    Rule(
        "driver_too_old",
        r"Insufficient driver version to profile on device (?P<device>\d+)",
        "the driver is too old for this ncu to profile device {device}",
        "update the driver, or use an older Nsight Compute",
    ),
    Rule(
        "metrics_unavailable",
        r"Failed to access the following metrics",
        "some metrics are out of reach on this GPU, as on a MIG slice",
        "use a whole GPU, or ask for fewer metrics with --metrics",
    ),
    Rule(
        "unknown_metric",
        r"Failed to find metric (?P<metric>.*)",
        "ncu knows no metric {metric} on this GPU",
        "`ncu --query-metrics` lists those of this GPU",
    ),
    Rule(
        "unknown_section",
        r"Option '--section (?P<section>[^']*)' did not match any section",
        "ncu has no section {section}",
        "`ncu --list-sections` lists them",
    ),
    Rule(
        "unknown_set",
        r"No metrics to collect found in sections",
        "the set or sections asked for hold no metrics",
        "`ncu --list-sets` and `ncu --list-sections` list them",
    ),
    Rule(
        "unknown_option",
        r"unrecogni[sz]ed option '(?P<option>[^']*)'",
        "this ncu does not know the option {option}",
        _TOOL_OPTIONS.replace("{tool}", "ncu"),
    ),
    Rule(
        "executable_missing",
        r"^==ERROR== '(?P<path>[^']*)' does not exist or is not an executable",
        "{path} does not exist or is not an executable",
        "give the program's absolute path",
    ),
    Rule(
        "executable_missing",
        r"^==ERROR== Missing executable to launch",
        "ncu was given no program to start",
        "name the program behind ncu's options",
    ),
    Rule(
        "output_exists",
        r"^==ERROR== File (?P<path>.*?) ?already exists",
        "{path} was there already, and ncu left it as it was",
        "remove it, or pass -f",
    ),
    Rule(
        "tmpdir_unusable",
        r"Failed to create temporary file",
        "ncu cannot write its temporary file (TMPDIR)",
        _OWN_TMPDIR,
    ),
    Rule(
        "report_damaged",
        r"Failed to load report file '(?P<path>[^']*)'",
        "{path} is not a report of ncu, or was made by a newer ncu",
        "read it with the ncu that made it, or with the package ncu-report",
    ),
    Rule(
        "report_missing",
        r"Could not open report file '(?P<path>[^']*)'",
        "there is no report {path}",
        "check the path; ncu may have left none",
    ),
    Rule(
        "tool_error",
        r"^==ERROR== (?!The application returned an error code)(?P<words>.+)",
        "ncu reported an error for {report}: {words}",
        "see the log of ncu for the lines around it",
    ),
)


# Only where no rule above and no failure of the target explains it.
NCU_EMPTY_RULES = (
    Rule(
        "child_processes",
        r"requires the --target-processes all option",
        "the kernels ran in a child process, which ncu did not follow",
        "pass --target-processes all",
    ),
    Rule(
        "no_kernels_matched",
        r"^==WARNING== No kernels were profiled",
        "ncu profiled no kernel for {report}: none ran, or none ran inside the ranges of cells",
        "see whether the cells launch kernels at all (`--profiler torch`); a filter needs its name "
        "escaped, a slash at the end for push/pop ranges and none for start/end ranges",
    ),
    Rule(
        "tool_library_missing",
        r"\bncu: " + _LOADER,
        "ncu did not start for want of the library {library}",
        "install the package that has it",
    ),
)


NCU_TIMEOUT_RULES = (
    Rule(
        "lock_file",
        r"nsight-compute-lock",
        "ncu waited too long for the lock of another ncu",
        "set TMPDIR to a folder of your own, or let the other ncu end",
    ),
)


__all__ = [
    "Failure",
    "NsightError",
    "diagnose_ncu",
    "diagnose_ncu_import",
    "diagnose_nsys",
    "diagnose_nsys_export",
    "interrupted",
    "no_cuda_events",
    "report_damaged",
    "report_state",
]


# A file written after `started` may bear an earlier time: the kernel stamps with its last tick, and
# some file systems keep whole or even seconds only.
TICK_S = 0.1
WHOLE_SECONDS_S = 2.0
LAST_LINES = 3
LAST_CHARACTERS = 400


SQLITE_MAGIC = b"SQLite format 3\0"


class NsightError(ProfharnessError):
    """A call of nsys or ncu failed. raw is everything that the tool and its target wrote."""

    def __init__(self, failure: Failure, raw: str = "") -> None:
        super().__init__(f"{failure.message}; {failure.remedy} [{failure.code}]")
        self.failure = failure
        self.raw = raw


def diagnose_nsys(
    returncode: int | None, text: str, report: Path, started: float
) -> Failure | None:
    """Why `nsys profile` left no usable report; None when it did.

    returncode None: it was ended for taking too long. text: all that nsys and the target wrote.
    started: `time.time()` before the start. The exit code proves nothing either way: nsys exits 0
    without a report, and with the target's code although the report is fine.
    """
    if returncode is None:
        return _first(NSYS_TIMEOUT_RULES, text, report) or _timeout("nsys", report)
    state = report_state(report, started)
    if returncode == -9:
        return Failure(
            "killed",
            f"nsys was killed (SIGKILL) while it profiled for {report.name}",
            "end what it left behind with `nsys shutdown --kill=sigterm --session=profile-PID` "
            "(PID is that of the killed nsys); see the kernel log for out-of-memory, then run again",
        )
    if state == "fresh":
        return _first(NSYS_REPORT_RULES, text, report)
    return _first((*NSYS_RULES, *NSYS_REPORT_RULES), text, report) or _no_report(
        "nsys", returncode, text, report, state
    )


def diagnose_nsys_export(returncode: int | None, text: str, output: Path) -> Failure | None:
    """Why `nsys export` left no SQLite file at output; None when it did.

    It leaves an empty or half-filled file behind when it fails, so a file alone proves nothing.
    """
    if returncode is None:
        return _timeout("nsys export", output)
    failure = _first(EXPORT_RULES, text, output)
    if failure is not None or returncode != 0:
        return failure or Failure(
            "export_failed",
            f"nsys export failed ({_how(returncode)}){_quoted(text)}",
            "export with the nsys that made the report: `nsys export --type sqlite REPORT`",
        )
    try:
        with output.open("rb") as file:
            good = file.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC
    except OSError:
        good = False
    if good:
        return None
    return Failure(
        "export_empty",
        f"nsys export ended well but left no SQLite file{_quoted(text)}",
        "see whether the disk is full; export with the nsys that made the report",
    )


def diagnose_ncu(returncode: int | None, text: str, report: Path, started: float) -> Failure | None:
    """Why ncu left no usable report; None when it did. Arguments as for `diagnose_nsys`.

    text holds the log file as well as both streams. Error lines of ncu count even where a report
    was written: it then lacks kernels or metrics.
    """
    if returncode is None:
        return _first(NCU_TIMEOUT_RULES, text, report) or _timeout("ncu", report)
    failure = _first(NCU_RULES, text, report)
    if failure is not None:
        return failure
    state = report_state(report, started)
    target = re.search(r"^==ERROR== The application returned an error code \((\d+)\)", text, re.M)
    if state != "fresh" and target:
        return Failure(
            "target_failed",
            f"the profiled program ended with code {target[1]} before ncu wrote {report.name}"
            f"{_quoted(text)}",
            "run the program without ncu and mend it first",
        )
    failure = _first(NCU_EMPTY_RULES, text, report)
    if failure is not None:
        return failure
    if returncode < 0 and state != "fresh":
        return Failure(
            "killed",
            f"ncu was ended by {_how(returncode)} before it wrote {report.name}",
            "see the kernel log for out-of-memory, then run again with fewer cells",
        )
    return None if state == "fresh" else _no_report("ncu", returncode, text, report, state)


def diagnose_ncu_import(returncode: int | None, text: str, report: Path) -> Failure | None:
    """Why `ncu --import` printed nothing of use; text: both streams. A filter that matches nothing
    makes it exit 0 and print nothing.
    """
    if returncode is None:
        return _timeout("ncu --import", report)
    rows = [line for line in text.splitlines() if line.strip() and not line.startswith("==")]
    if returncode == 0 and rows:
        return None
    failure = _first(NCU_RULES, text, report)
    if failure is not None:
        return failure
    if returncode != 0:
        return Failure(
            "export_failed",
            f"ncu --import failed on {report.name} ({_how(returncode)}){_quoted(text)}",
            "read it with the ncu that made it, or with the package ncu-report",
        )
    return Failure(
        "no_kernels_matched",
        f"ncu --import found no kernel in {report.name}",
        "see whether the program launched kernels inside the ranges of cells",
    )


def no_cuda_events(report: Path, diagnostics: Iterable[str] = ()) -> Failure:
    """What is said of an export without kernels; diagnostics: the texts of its DIAGNOSTIC_EVENT."""
    said = [text for text in diagnostics if re.search(NO_CUDA_EVENTS.pattern, text)]
    failure = NO_CUDA_EVENTS.failure(report)
    return Failure(failure.code, failure.message + _quoted("\n".join(said)), failure.remedy)


def report_damaged(tool: str, report: Path, why: str) -> Failure:
    """What is said of a file that the tool left and that nobody can read; why: the reader's words."""
    return Failure(
        "report_damaged",
        f"{tool} left {report.name}, which cannot be read: {why}",
        "see whether the disk is full and whether something ended the tool while it wrote, then "
        "capture again",
    )


def interrupted(tool: str, report: Path) -> Failure:
    """What is said where the user ended the capture before the report was whole."""
    return Failure(
        "interrupted",
        f"{tool} was interrupted before {report.name} was complete",
        "`profharness capture --resume RUN` does what is left",
    )


def report_state(report: Path, started: float) -> str:
    """`missing`, `empty`, `stale` (older than started, a `time.time()`) or `fresh`."""
    try:
        stat = report.stat()
    except OSError:
        return "missing"
    if not report.is_file() or stat.st_size == 0:
        return "empty"
    slack = WHOLE_SECONDS_S if stat.st_mtime_ns % 1_000_000_000 == 0 else TICK_S
    return "stale" if stat.st_mtime < started - slack else "fresh"


def _first(rules: Sequence[Rule], text: str, report: Path) -> Failure | None:
    for rule in rules:
        match = re.search(rule.pattern, text, re.MULTILINE)
        if match:
            return rule.failure(report, match.groupdict())
    return None


def _timeout(tool: str, report: Path) -> Failure:
    return Failure(
        "timeout",
        f"{tool} took too long and was ended before {report.name} was complete",
        "allow more time with --timeout, or give it less to do: fewer cells, smaller configs, "
        "fewer metrics",
    )


def _no_report(tool: str, returncode: int, text: str, report: Path, state: str) -> Failure:
    what = {
        "missing": f"{tool} ended ({_how(returncode)}) without writing {report.name}",
        "empty": f"{tool} ended ({_how(returncode)}) and left {report.name} empty",
        "stale": f"{tool} ended ({_how(returncode)}) and left the older {report.name} as it was",
    }[state]
    remedy = {
        "missing": "run `profharness doctor`; see the log for what the tool and the target wrote",
        "empty": "see whether the disk is full, then run again",
        "stale": "remove the old report or write to a new folder, then run again",
    }[state]
    return Failure(f"report_{state}", what + _quoted(text), remedy)


def _quoted(text: str) -> str:
    """The last lines of a text as a clause."""
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    tail = " / ".join(lines[-LAST_LINES:])
    if len(tail) > LAST_CHARACTERS:
        tail = "…" + tail[-LAST_CHARACTERS:]
    return f"; it said: {tail}" if tail else ""


def _how(returncode: int) -> str:
    return f"signal {-returncode}" if returncode < 0 else f"exit code {returncode}"
