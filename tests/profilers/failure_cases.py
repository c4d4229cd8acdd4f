"""Observed failures of nsys: (behaviour of the tool, target, exit code, code of the failure or
None).
"""

from __future__ import annotations

import sys

from fake_tools import Behaviour

TARGET = [sys.executable, "-ISc", "print('the target ran')"]
IMPORTER = "Unable to retrieve the importer version: skipping importation of the QDSTRM file.\n"
QDSTRM = "Generated:\n    {tmpdir}/nsys-report-c7d8.qdstrm\n"
GENERATED = "Generated:\n    {report}\n"


def target_code(code: int) -> list[str]:
    return [sys.executable, "-ISc", f"raise SystemExit({code})"]


def target_signal(number: int) -> list[str]:
    return [sys.executable, "-ISc", f"import os; os.kill(os.getpid(), {number})"]


Case = tuple[Behaviour, list[str], int, str | None]

NSYS: dict[str, Case] = {
    "all well": (Behaviour(stdout=GENERATED), TARGET, 0, None),
    "target exits 3": (Behaviour(stdout=GENERATED), target_code(3), 3, None),
    "target dies of SIGSEGV": (Behaviour(stdout=GENERATED), target_signal(11), 139, None),
    "target dies of SIGKILL": (Behaviour(stdout=GENERATED), target_signal(9), 137, None),
    "bad option": (
        Behaviour(
            stderr="unrecognised option '--bogus'\n\nusage: nsys profile [<args>] [application]\n",
            returncode=1,
            report="none",
            run_target=False,
        ),
        TARGET,
        1,
        "unknown_option",
    ),
    "bad value of an option": (
        Behaviour(
            stderr="Illegal --trace argument 'bogus'.\nusage: nsys profile [<args>]\n",
            returncode=1,
            report="none",
            run_target=False,
        ),
        TARGET,
        1,
        "unknown_option",
    ),
    "importer missing": (
        Behaviour(
            stdout=QDSTRM,
            stderr="Importer error status: The importer binary and its dependencies were not found.\n"
            + IMPORTER,
            report="none",
        ),
        TARGET,
        0,
        "importer_missing",
    ),
    "library of the importer missing": (
        Behaviour(
            stdout=QDSTRM,
            stderr="Importer error status: An unknown error occurred.\n" + IMPORTER,
            report="none",
        ),
        TARGET,
        0,
        "importer_library_missing",
    ),
    "importer fails otherwise": (
        Behaviour(stdout=QDSTRM, stderr="Importer error status: Import failed.\n", report="none"),
        TARGET,
        0,
        "import_failed",
    ),
    "importer of another version": (
        Behaviour(
            stdout=QDSTRM,
            stderr="Qdstrm version 2025.3.1.0 is not supported. The QdstrmImporter and qdstrm file "
            "versions must match to import successfully.\n",
            report="none",
        ),
        TARGET,
        0,
        "version_mismatch",
    ),
    "importer too old, but a report": (
        Behaviour(
            stdout=GENERATED,
            stderr="**** Analysis failed with:\nData member TimestampType was not initialized\n"
            "**** Errors occurred while processing the raw events. ****\n",
        ),
        TARGET,
        0,
        "version_mismatch",
    ),
    "import stopped in the middle": (
        Behaviour(
            stdout=GENERATED,
            stderr="**** Errors occurred while processing the raw events. ****\n",
        ),
        TARGET,
        0,
        "import_incomplete",
    ),
    "no /sys": (
        Behaviour(stderr="Failed to get number of the device CPUs.\n", returncode=2, report="none"),
        TARGET,
        2,
        "sys_missing",
    ),
    "output not writable": (
        Behaviour(
            stderr="Failed to create '{report}': Permission denied.\n",
            report="tmpdir",
        ),
        TARGET,
        0,
        "output_unwritable",
    ),
    "capture range never entered": (
        Behaviour(stdout="Generated:\n", report="none"),
        TARGET,
        0,
        "capture_range_missed",
    ),
    "no CUDA seen": (
        Behaviour(
            stdout=GENERATED, stderr="No CUDA events collected. Does the process use CUDA?\n"
        ),
        TARGET,
        0,
        "no_cuda_events",
    ),
    "TMPDIR missing": (
        Behaviour(
            stderr="boost::filesystem::temp_directory_path: Not a directory [system:20]: "
            '"/no/such"\n',
            returncode=1,
            report="none",
            run_target=False,
        ),
        TARGET,
        1,
        "tmpdir_unusable",
    ),
    "TMPDIR missing, nsys 2022.4": (
        Behaviour(stderr="Agent launcher failed.\n", returncode=1, report="none", run_target=False),
        TARGET,
        1,
        "tmpdir_unusable",
    ),
    "gVisor": (
        Behaviour(
            stderr="FATAL ERROR: /src/TimeConversion.cpp(123): Throw in function "
            "ConvertGpuTicksToSyncNs InternalErrorException\n",
            returncode=1,
            report="none",
        ),
        TARGET,
        1,
        "sandboxed",
    ),
    "another break-down": (
        Behaviour(stderr="FATAL ERROR: something else\n", returncode=1, report="none"),
        TARGET,
        1,
        "tool_crashed",
    ),
    "library of nsys missing": (
        Behaviour(
            stderr="nsys: error while loading shared libraries: libelf.so.1: cannot open shared "
            "object file: No such file or directory\n",
            returncode=127,
            report="none",
            run_target=False,
        ),
        TARGET,
        127,
        "tool_library_missing",
    ),
    "a child outlives the target": (
        Behaviour(
            stdout="The target application terminated. One or more process it created re-parented. "
            "Waiting for termination of re-parented processes.\n" + GENERATED
        ),
        TARGET,
        0,
        None,
    ),
    "nothing said, no report": (Behaviour(report="none"), TARGET, 0, "report_missing"),
    "an empty report": (Behaviour(stdout=GENERATED, report="empty"), TARGET, 0, "report_empty"),
    "killed": (Behaviour(kill_self=True, report="none"), TARGET, -9, "killed"),
}
