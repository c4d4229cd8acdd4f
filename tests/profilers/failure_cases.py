"""Observed failures of nsys and ncu: (behaviour of the tool, target, code of the failure or None)."""

from __future__ import annotations

import sys
from typing import Any

from fake_tools import Behaviour

TARGET = [sys.executable, "-ISc", "print('the target ran')"]
Case = tuple[Behaviour, list[str], str | None]


def target_code(code: int) -> list[str]:
    return [sys.executable, "-ISc", f"raise SystemExit({code})"]


def target_signal(number: int) -> list[str]:
    return [sys.executable, "-ISc", f"import os; os.kill(os.getpid(), {number})"]


def nsys_case(text: str, code: str | None, stdout: str = "", **more: Any) -> Case:
    """Return a case of an nsys that prints texts and leaves no report."""
    options: dict[str, Any] = {"report": "none", "returncode": 1, "run_target": False} | more
    return Behaviour(stdout=stdout, stderr=text + "\n", **options), TARGET, code


def ncu_case(text: str, code: str | None, **more: Any) -> Case:
    """Return a case of an ncu that prints lines into its log and leaves no report."""
    return nsys_case("", code, text + "\n", **more)


GENERATED = "Generated:\n    {report}\n"
QDSTRM = "Generated:\n    {tmpdir}/nsys-report-c7d8.qdstrm\n"
IMPORTER = "Importer error status: "
STOPPED = "**** Errors occurred while processing the raw events. ****"
LOADER = "error while loading shared libraries: libelf.so.1: cannot open shared object file"
WELL = Behaviour(stdout=GENERATED)
NEW = {"report": "new", "returncode": 0}

NSYS: dict[str, Case] = {
    "all well": (WELL, TARGET, None),
    "target exits 3": (WELL, target_code(3), None),
    "target dies of SIGSEGV": (WELL, target_signal(11), None),
    "target dies of SIGKILL": (WELL, target_signal(9), None),
    "bad option": nsys_case("unrecognised option '--bogus'\n\nusage: nsys", "unknown_option"),
    "bad value of an option": nsys_case("Illegal --trace argument 'bogus'.", "unknown_option"),
    "importer missing": nsys_case(
        f"{IMPORTER}The importer binary and its dependencies were not found.",
        "importer_missing",
        QDSTRM,
        returncode=0,
    ),
    "library of the importer missing": nsys_case(
        f"{IMPORTER}An unknown error occurred.", "importer_library_missing", QDSTRM, returncode=0
    ),
    "importer fails otherwise": nsys_case(
        f"{IMPORTER}Import failed.", "import_failed", QDSTRM, returncode=0
    ),
    "importer of another version": nsys_case(
        "Qdstrm version 2025.3.1.0 is not supported. The QdstrmImporter and qdstrm file versions "
        "must match to import successfully.",
        "version_mismatch",
        QDSTRM,
        returncode=0,
    ),
    "importer too old, but a report": nsys_case(
        f"Analysis failed with:\nData member TimestampType was not initialized\n{STOPPED}",
        "version_mismatch",
        GENERATED,
        **NEW,
    ),
    "import stopped in the middle": nsys_case(STOPPED, "import_incomplete", GENERATED, **NEW),
    "no /sys": nsys_case("Failed to get number of the device CPUs.", "sys_missing", returncode=2),
    "output not writable": nsys_case(
        "Failed to create '{report}': Permission denied.",
        "output_unwritable",
        report="tmpdir",
        returncode=0,
    ),
    "capture range never entered": nsys_case(
        "", "capture_range_missed", "Generated:\n", returncode=0
    ),
    "no CUDA seen": nsys_case(
        "No CUDA events collected. Does the process use CUDA?", "no_cuda_events", GENERATED, **NEW
    ),
    "TMPDIR missing": nsys_case(
        'boost::filesystem::temp_directory_path: Not a directory [system:20]: "/no/such"',
        "tmpdir_unusable",
    ),
    "TMPDIR missing, nsys 2022.4": nsys_case("Agent launcher failed.", "tmpdir_unusable"),
    "gVisor": nsys_case(
        "FATAL ERROR: /src/TimeConversion.cpp(123): Throw in function ConvertGpuTicksToSyncNs",
        "sandboxed",
    ),
    "another break-down": nsys_case("FATAL ERROR: something else", "tool_crashed"),
    "library of nsys missing": nsys_case(f"nsys: {LOADER}", "tool_library_missing", returncode=127),
    "a child outlives the target": nsys_case(
        "Waiting for termination of re-parented processes.", None, GENERATED, **NEW
    ),
    "nothing said, no report": (Behaviour(report="none"), TARGET, "report_missing"),
    "an empty report": (Behaviour(stdout=GENERATED, report="empty"), TARGET, "report_empty"),
    "killed": (Behaviour(kill_self=True, report="none"), TARGET, "killed"),
}

NOTHING = "==WARNING== No kernels were profiled.\n"
TARGET_FAILED = "==ERROR== The application returned an error code "
BUSY = (
    "==ERROR== Profiling failed because a driver resource was unavailable. Ensure that no other tool "
    "(like DCGM) is concurrently collecting profiling data."
)
NCU: dict[str, Case] = {
    "all well": (Behaviour(stdout="==PROF== Report: {report}\n"), TARGET, None),
    "target exits 3, a report": (
        Behaviour(stdout=f"{TARGET_FAILED}(3).\n"),
        target_code(3),
        None,
    ),
    "target exits 3, no report": ncu_case(
        f"{TARGET_FAILED}(3).\n{NOTHING}", "target_failed", returncode=3
    ),
    "no driver": nsys_case(
        "==ERROR== Nsight Compute failed to connect to the CUDA driver (stub libcuda.so on path?).",
        "no_driver",
        f"{TARGET_FAILED}(1).\n{NOTHING}",
    ),
    "unknown option": ncu_case("==ERROR== unrecognised option '--bogus'.", "unknown_option"),
    "unknown section": ncu_case(
        "==ERROR== Option '--section nosuch' did not match any section.", "unknown_section"
    ),
    "unknown metric": ncu_case("==ERROR== Failed to find metric foo__bar.sum", "unknown_metric"),
    "another injection": ncu_case(
        "==ERROR== Another tool/injection might be loaded since CUDA_INJECTION64_PATH is set to "
        "/x/libToolsInjection64.so. To run Nsight Compute unset CUDA_INJECTION64_PATH.",
        "injection",
    ),
    "lock of another user": ncu_case(
        "==ERROR== Failed to open/create lock file /tmp/nsight-compute-lock. Please check.",
        "lock_file",
    ),
    "TMPDIR not writable": ncu_case(
        "==ERROR== Failed to create temporary file. Specify the TMPDIR environment variable.",
        "tmpdir_unusable",
    ),
    "an error nobody knows": ncu_case("==ERROR== Something new.", "tool_error"),
    "counters forbidden": ncu_case(
        "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU "
        f"Performance Counters\n{NOTHING}",
        "counters_forbidden",
    ),
    "library not loaded": ncu_case(
        f"==ERROR== Failed to initialize the profiler: LibraryNotLoaded.\n{TARGET_FAILED}(9).",
        "library_not_loaded",
        returncode=9,
    ),
    "counters busy": ncu_case(BUSY, "counters_busy", returncode=9),
    "counters busy after some kernels": ncu_case(BUSY, "counters_busy", returncode=9, report="new"),
    "driver too old": ncu_case(
        "==ERROR== Insufficient driver version to profile on device 0.", "driver_too_old"
    ),
    "MIG": ncu_case(
        "==ERROR== Failed to access the following metrics. When profiling on a MIG instance, …",
        "metrics_unavailable",
        **NEW,
    ),
    "filter matches nothing": ncu_case(NOTHING, "no_kernels_matched", returncode=0),
    "filter matches nothing, a report": ncu_case(NOTHING, "no_kernels_matched", **NEW),
    "library of ncu missing": nsys_case(f"ncu: {LOADER}", "tool_library_missing", returncode=127),
    "nothing said, no report": (Behaviour(report="none"), TARGET, "report_missing"),
    "an empty report": (Behaviour(report="empty"), TARGET, "report_empty"),
    "killed": (Behaviour(kill_self=True, report="none"), TARGET, "killed"),
}
