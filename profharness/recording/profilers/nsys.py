"""Nsight Systems: command lines, export of reports to SQLite, and failures.

The failure texts were observed with nsys 2022.4 to 2025.3, or come from NVIDIA's manuals and
binaries and from users' public reports.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from profharness.errors import TraceFormatError
from profharness.files import open_input
from profharness.processes import kill, read_end, run_briefly, run_to_end
from profharness.recording.profilers.base import (
    LIBRARY_MISSING,
    NO_SANDBOX,
    OWN_TMPDIR,
    SQLITE_MAGIC,
    TOOL_OPTIONS,
    FailureRule,
    ToolError,
    ToolSession,
    count_rows,
    diagnose,
    match_rules,
    output_argument,
    quoted,
    report_damaged,
)
from profharness.rows import NSYS
from profharness.run import Problem

SUFFIX = ".nsys-rep"
EXPORT_BASE_S = 120.0
EXPORT_BYTES_PER_S = 100_000  # assumed minimum rate of exports; nsys is usually much faster
KERNEL_TABLE = "CUPTI_ACTIVITY_KIND_KERNEL"
_SAME_VERSION = (
    "capture, import and export with the same nsys on the same machine, and copy the "
    ".sqlite file from there"
)

NO_CUDA_EVENTS = FailureRule(
    "no_cuda_events",
    r"No CUDA events collected|CUDA profiling might have not been started correctly",
    "nsys recorded no CUDA work in {report}",
    (
        "check that the program uses the GPU (see nvidia-smi and torch.cuda.is_available()) and "
        "that nsys is not older than torch's CUDA release; `--profiler torch` works without nsys"
    ),
)


# These rules also apply if a report was written. The report is then incomplete or has no kernels.
WRITTEN_RULES = (
    FailureRule(
        "version_mismatch",
        r"Qdstrm version (?P<version>\S+) is not supported",
        "the importer cannot read raw files from nsys {version}, so {report} cannot be used",
        _SAME_VERSION,
    ),
    FailureRule(
        "version_mismatch",
        r"Supplied input buffer of size \d+ is too small"
        r"|Unknown runtime API function index: \d+"
        r"|Data member TimestampType was not initialized",
        (
            "nsys does not match its importer or the program's CUDA version, so events are "
            "missing from {report}"
        ),
        _SAME_VERSION + "; a CUDA 13 program requires nsys 2025.3 or newer",
    ),
    FailureRule(
        "import_incomplete",
        r"Errors occurred while processing the raw events",
        "the importer stopped before the end, so events are missing from {report}",
        _SAME_VERSION,
    ),
    NO_CUDA_EVENTS,
)


# These rules apply only if no report was written.
UNWRITTEN_RULES = (
    FailureRule(
        "sandboxed",
        r"ConvertGpuTicksToSyncNs",
        (
            "nsys cannot convert GPU time to host time here (this happens in gVisor containers), "
            "so {report} was not written"
        ),
        NO_SANDBOX.replace("{tool}", "nsys"),
    ),
    FailureRule(
        "unknown_option",
        r"unrecogni[sz]ed option '(?P<option>[^']*)'",
        "this version of nsys has no option {option}",
        TOOL_OPTIONS.replace("{tool}", "nsys profile"),
    ),
    FailureRule(
        "unknown_option",
        r"Illegal --(?P<option>[\w-]+) arguments?\b(?P<value>.*)",
        "this version of nsys does not accept the value of --{option}:{value}",
        TOOL_OPTIONS.replace("{tool}", "nsys profile"),
    ),
    FailureRule(
        "tmpdir_unusable",
        r"boost::filesystem::temp_directory_path|^Agent launcher failed",
        "nsys cannot start its background process or cannot write its raw files to the folder in "
        "TMPDIR",
        OWN_TMPDIR,
    ),
    FailureRule(
        "importer_missing",
        r"The importer binary and its dependencies were not found",
        (
            "nsys wrote a raw .qdstrm file but not {report}: its importer (QdstrmImporter) is "
            "not in the folder host-linux-x64 beside nsys's target-linux-x64"
        ),
        "create a link to the importer's folder where nsys looks for it (on Debian: `ln -s "
        "/usr/lib/nsight-systems/host-linux-x64 "
        "/usr/lib/x86_64-linux-gnu/nsight-systems/host-linux-x64`), or install NVIDIA's own package",
    ),
    FailureRule(
        "importer_library_missing",
        r"Importer error status: An unknown error occurred",
        (
            "nsys wrote a raw .qdstrm file but not {report}: its importer (QdstrmImporter) does "
            "not start, usually because a library is missing"
        ),
        (
            "`ldd QdstrmImporter | grep 'not found'` shows the missing library; install the "
            "package that contains it (on Debian and Ubuntu: libdw1, libelf1 or libssh-4)"
        ),
    ),
    FailureRule(
        "sys_missing",
        r"Failed to get number of the device CPUs",
        "nsys's importer cannot read /sys, so {report} was not written",
        "mount /sys and /proc in the container",
    ),
    FailureRule(
        "import_failed",
        r"Importer error status: (?P<words>.*)|Import Failed with (?P<more>.*)"
        r"|^File is corrupted\.",
        "nsys could not convert its raw .qdstrm file to {report}",
        (
            "check whether the disk is full; to see the reason, run `QdstrmImporter -i "
            "FILE.qdstrm` from the same version of nsys"
        ),
    ),
    FailureRule(
        "output_unwritable",
        r"Failed to create '(?P<path>[^']*)': (?P<why>[^.\n]+)",
        "nsys could not write {path}: {why}",
        "choose a writable folder with enough free space",
    ),
    LIBRARY_MISSING,
    FailureRule(
        "capture_range_missed",
        r"^Generated:\s*+(?!\S*\.(?:nsys-rep|qdstrm|qdrep))",
        ("the program never entered the range that nsys waited for, so {report} was not written"),
        "check the range's name, and set NSYS_NVTX_PROFILER_REGISTER_ONLY=0",
    ),
    FailureRule(
        "tool_crashed",
        r"FATAL ERROR: (?P<words>.*)",
        "nsys crashed before it wrote {report}: {words}",
        "try another version of Nsight Systems; `--profiler torch` works without nsys",
    ),
)


KILLED = FailureRule(
    "killed",
    r"\Asignal 9$",
    "nsys was killed (SIGKILL) before it wrote {report}",
    (
        "stop the remaining nsys processes with `nsys shutdown --kill=sigterm "
        "--session=profile-PID`, where PID is the process id of the killed nsys; then check the "
        "kernel log for out-of-memory kills, and try again"
    ),
)

RULES = (
    # first, because the kill explains all other messages in the log
    KILLED,
    *(replace(rule, written=False) for rule in UNWRITTEN_RULES),
    *WRITTEN_RULES,
    FailureRule(
        "children_outlive_target",
        r"Waiting for termination of re-parented processes",
        ("the program ended, but one of its child processes kept running, and nsys waited for it"),
        "pass --wait=primary, or let the program end its child processes",
        late=True,
    ),
)

EXPORT_RULES = (
    FailureRule(
        "version_mismatch",
        r"ProtobufParseException|Version not supported: (?P<build>\S+)"
        r"|Version number is invalid: (?P<version>\S+)",
        "the report was written by a newer version of nsys than the one that exports it",
        _SAME_VERSION,
    ),
    FailureRule(
        "report_damaged",
        r"Version tag is not found in the stream|Cannot read from stream"
        r"|Section Table Reference magic number mismatch",
        "the file is not an nsys report, or it is truncated",
        "copy the report again, or capture again",
    ),
    LIBRARY_MISSING,
    FailureRule(
        "export_failed",
        r"Exportation error: (?P<words>.*)",
        "nsys export failed: {words}",
        "export with the nsys that wrote the report, and check whether the disk is full",
    ),
    FailureRule(
        "export_failed",
        r"\A(?P<how>signal \d+|exit code [1-9]\d*)$",
        "nsys export failed ({how})",
        "export with the nsys that wrote the report: `nsys export --type sqlite REPORT`",
        quoted=True,
    ),
    FailureRule(
        "timeout",
        r"\A",
        "nsys export took too long and was stopped",
        (
            "run `nsys export --type sqlite REPORT` yourself, and ingest the .sqlite file that "
            "it writes"
        ),
        late=True,
    ),
)


def profile_argv(tool: Path, output: Path, command: Sequence[str]) -> list[str]:
    """Return the command line of nsys that profiles a command.

    Only CUDA and NVTX are traced, because CPU sampling needs permissions and adds no information
    about kernels. `--cuda-graph-trace=node` is required to record kernels inside CUDA graphs.
    Because of `--wait=primary`, nsys does not wait for processes that the command leaves behind.
    Raise ValueError if `output` does not end in `.nsys-rep`.
    """
    return [
        str(tool),
        "profile",
        "--trace=cuda,nvtx",
        "--sample=none",
        "--cpuctxsw=none",
        "--cuda-graph-trace=node",
        "--wait=primary",
        "--force-overwrite=true",
        f"--output={output_argument(output, SUFFIX)}",
        *command,
    ]


def child_environment(base: Mapping[str, str], tmpdir: Path) -> dict[str, str]:
    """Return the environment for nsys and its target.

    nsys writes raw files to TMPDIR. LC_ALL=C ensures that messages are in English, so that they can
    be parsed. NSYS_NVTX_PROFILER_REGISTER_ONLY=0 makes nsys accept ranges whose names are not
    registered strings.
    """
    own = {"NSYS_NVTX_PROFILER_REGISTER_ONLY": "0"}
    return {**base, "TMPDIR": str(tmpdir), "LC_ALL": "C", **own}


def export_limit_s(report: Path) -> float:
    """Return the time limit in seconds for exporting a report."""
    try:
        return EXPORT_BASE_S + report.stat().st_size / EXPORT_BYTES_PER_S
    except OSError:
        return EXPORT_BASE_S


def export_report(
    report: Path, output: Path, tool: Path, *, timeout_s: float | None = None
) -> None:
    """Export a `.nsys-rep` file to SQLite, and replace the file `output` atomically.

    The default of `timeout_s` is the result of `export_limit_s`. Raise ToolError if the export
    fails.
    """
    timeout_s = export_limit_s(report) if timeout_s is None else timeout_s
    try:
        # in the same folder as the output, so that the file can be moved there atomically
        folder = tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent)
    except OSError as error:
        message = f"cannot write {output}: {error.strerror}"
        remedy = "choose a file in a folder that exists and is writable"
        raise ToolError(Problem(NSYS, "output_unwritable", message, remedy)) from None
    with folder as name:
        part, log = Path(name) / "export.sqlite", Path(name) / "log"
        environment = child_environment(os.environ, Path(name))
        argv = [str(tool), "export", "--type=sqlite", "--force-overwrite=true"]
        argv += [f"--output={part}", str(report)]
        try:
            returncode = run_to_end(argv, log, environment, timeout_s, short=True)
        except OSError as error:
            message = f"{tool} cannot be started: {error.strerror}"
            remedy = "set PROFHARNESS_NSYS to the nsys executable, or install NVIDIA Nsight Systems"
            raise ToolError(Problem(NSYS, "tool_missing", message, remedy)) from None
        text = read_end(log)
        problem = diagnose_export(returncode, text, part)
        if problem is not None:
            raise ToolError(problem)
        part.replace(output)


def diagnose_export(returncode: int | None, text: str, output: Path) -> Problem | None:
    """Return the problem if `nsys export` failed, or None if it succeeded.

    A failed export may leave an empty or incomplete file, so `output` must also be an SQLite file.
    """
    problem = match_rules(NSYS, EXPORT_RULES, returncode, text, output)
    if problem is not None:
        return problem
    with contextlib.suppress(OSError), open_input(output) as file:
        if file.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC:
            return None
    return Problem(
        NSYS,
        "export_empty",
        f"nsys export succeeded but wrote no SQLite file{quoted(text)}",
        "check whether the disk is full, and export with the nsys that wrote the report",
    )


class NsysSession(ToolSession):
    """The worker under `nsys profile`. The same nsys then exports the report to SQLite."""

    def argv(self, command: list[str]) -> list[str]:
        return profile_argv(self.tool.path, self.report, command)

    def environment(self, base: dict[str, str]) -> dict[str, str]:
        return child_environment(base, self.scratch)

    def judge(self, returncode: int | None, text: str) -> tuple[Problem | None, Path | None]:
        problem = diagnose(NSYS, RULES, returncode, text, self.report, self.started)
        if not self.report.exists():
            return problem, None
        exported = self.report.with_suffix(".sqlite")
        export_report(self.report, exported, self.tool.path)
        try:
            kernels = count_rows(exported, KERNEL_TABLE, "an nsys export")
        except TraceFormatError as error:
            return report_damaged(NSYS, exported, str(error)), None
        if kernels == 0:
            # if a rule has matched, its problem is more specific
            problem = problem or NO_CUDA_EVENTS.problem(NSYS, self.report, {})
        return problem, exported

    def interrupt(self, process: subprocess.Popen[bytes]) -> None:
        kill(process.pid, signal.SIGINT)

    def force(self, pid: int, timeout_s: float) -> None:
        """End the daemon of nsys, which has its own process session, and the target.

        nsys 2022.4 does not find the profiling session, so the target keeps running.
        """
        session = f"--session=profile-{pid}"
        run_briefly([str(self.tool.path), "shutdown", "--kill=sigterm", session], timeout_s)
