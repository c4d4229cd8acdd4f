"""Observed failures of ncu, as in `failure_cases`."""

from __future__ import annotations

from failure_cases import TARGET, Case, target_code
from fake_tools import Behaviour

NOTHING = "==WARNING== No kernels were profiled.\n"
SHUT = "==PROF== Trying to shutdown target application\n"
COUNTERS = (
    "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance "
    "Counters on the target device 0. For instructions see "
    "https://developer.nvidia.com/ERR_NVGPUCTRPERM\n==PROF== Disconnected from process 7508\n"
    + NOTHING
)
NOT_LOADED = (
    "==ERROR== An error was reported by the counter measurement library:\n"
    "==ERROR== Failed to initialize the profiler: LibraryNotLoaded. Check that a compatible driver "
    "library is loaded.\n" + SHUT + "==ERROR== The application returned an error code (9).\n"
)
BUSY = (
    "==ERROR== An error was reported by the driver\n"
    "==ERROR== Profiling failed because a driver resource was unavailable. Ensure that no other tool "
    "(like DCGM) is concurrently collecting profiling data.\n"
    '==ERROR== Failed to profile "kern" in process 7508\n' + SHUT
)
NCU: dict[str, Case] = {
    "all well": (Behaviour(stdout="==PROF== Report: {report}\n"), TARGET, 0, None),
    "target exits 3, a report": (
        Behaviour(stdout="==ERROR== The application returned an error code (3).\n"),
        target_code(3),
        3,
        None,
    ),
    "target exits 3, no report": (
        Behaviour(
            stdout="==ERROR== The application returned an error code (3).\n" + NOTHING,
            report="none",
        ),
        target_code(3),
        3,
        "target_failed",
    ),
    "no driver": (
        Behaviour(
            stderr="==ERROR== Nsight Compute failed to connect to the CUDA driver (stub "
            "libcuda.so[.1] on path?).\n",
            stdout="==ERROR== The application returned an error code (1).\n" + NOTHING,
            returncode=1,
            report="none",
            run_target=False,
        ),
        TARGET,
        1,
        "no_driver",
    ),
    **{
        case: (
            Behaviour(stdout=text, returncode=1, report="none", run_target=False),
            TARGET,
            1,
            code,
        )
        for case, text, code in (
            (
                "unknown option",
                "==ERROR== unrecognised option '--bogus'. Use --help for further details.\n",
                "unknown_option",
            ),
            (
                "unknown section",
                "==ERROR== Option '--section nosuch' did not match any section.\n",
                "unknown_section",
            ),
            ("unknown metric", "==ERROR== Failed to find metric foo__bar.sum\n", "unknown_metric"),
            (
                "another injection",
                "==ERROR== Another tool/injection might be loaded since CUDA_INJECTION64_PATH is set "
                "to /x/libToolsInjection64.so. To run Nsight Compute unset CUDA_INJECTION64_PATH "
                "environment variable.\n",
                "injection",
            ),
            (
                "lock of another user",
                "==ERROR== Failed to open/create lock file /tmp/nsight-compute-lock. Please check.\n",
                "lock_file",
            ),
            (
                "TMPDIR not writable",
                "==ERROR== Failed to create temporary file. Specify the TMPDIR environment variable "
                "or use --export option.\n",
                "tmpdir_unusable",
            ),
            ("an error nobody knows", "==ERROR== Something new.\n", "tool_error"),
        )
    },
    "counters forbidden": (
        Behaviour(stdout=COUNTERS, returncode=1, report="none"),
        TARGET,
        1,
        "counters_forbidden",
    ),
    "library not loaded": (
        Behaviour(stdout=NOT_LOADED, returncode=9, report="none"),
        TARGET,
        9,
        "library_not_loaded",
    ),
    "counters busy": (
        Behaviour(stdout=BUSY, returncode=9, report="none"),
        TARGET,
        9,
        "counters_busy",
    ),
    "counters busy after some kernels": (
        Behaviour(stdout=BUSY, returncode=9),
        TARGET,
        9,
        "counters_busy",
    ),
    "driver too old": (
        Behaviour(
            stdout="==ERROR== Insufficient driver version to profile on device 0.\n", report="none"
        ),
        TARGET,
        0,
        "driver_too_old",
    ),
    "MIG": (
        Behaviour(
            stdout="==ERROR== Failed to access the following metrics. When profiling on a MIG "
            "instance, …\n"
        ),
        TARGET,
        0,
        "metrics_unavailable",
    ),
    "filter matches nothing": (
        Behaviour(stdout=NOTHING + "Available Kernels:\n1. wmma_cxx_kernel\n", report="none"),
        TARGET,
        0,
        "no_kernels_matched",
    ),
    "filter matches nothing, a report": (
        Behaviour(stdout=NOTHING),
        TARGET,
        0,
        "no_kernels_matched",
    ),
    "library of ncu missing": (
        Behaviour(
            stderr="ncu: error while loading shared libraries: libfoo.so.1: cannot open shared "
            "object file\n",
            returncode=127,
            report="none",
            run_target=False,
        ),
        TARGET,
        127,
        "tool_library_missing",
    ),
    "nothing said, no report": (Behaviour(report="none"), TARGET, 0, "report_missing"),
    "an empty report": (Behaviour(report="empty"), TARGET, 0, "report_empty"),
    "killed": (Behaviour(kill_self=True, report="none"), TARGET, -9, "killed"),
}
