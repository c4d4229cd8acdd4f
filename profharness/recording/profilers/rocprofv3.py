"""rocprofv3, AMD's profiler of ROCm: command line, the database of the worker, and failures.

The texts of failures are those in the source of rocprofv3 (rocprofiler-sdk, `source/bin/rocprofv3.py`).
This module was tested with a stand-in that writes databases in the format of rocprofv3. It has not run
on an AMD GPU.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from profharness.errors import TraceFormatError
from profharness.processes import kill
from profharness.recording.profilers.base import (
    LIBRARY_MISSING,
    OWN_TMPDIR,
    FailureRule,
    ToolSession,
    count_rows,
    diagnose,
    report_damaged,
)
from profharness.rows import ROCPROFV3
from profharness.run import Problem

DISPATCHES = "rocpd_kernel_dispatch*"  # the name continues with an id of the recording
ROCM = "install ROCm 7.0 or newer, whose rocprofv3 writes rocpd databases"

RULES = (
    FailureRule(
        "killed",
        r"\Asignal 9$",
        "rocprofv3 was killed (SIGKILL) before it wrote {report}",
        "check the kernel log for out-of-memory kills, then try again",
    ),
    FailureRule(
        "unknown_option",
        r"^rocprofv3(?:\.py)?: error: (?P<words>.*)",
        "this version of rocprofv3 does not accept the options: {words}",
        ROCM,
        written=False,
    ),
    FailureRule(
        "tool_crashed",
        r"^Fatal error: (?P<words>.*)",
        "rocprofv3 ended before it wrote {report}: {words}",
        ROCM + "; `--profiler torch` works without rocprofv3",
        written=False,
    ),
    FailureRule(
        "gpu_unavailable",
        r"Unable to open /dev/kfd read-write: (?P<words>.*)",
        "the worker cannot use the AMD GPU: /dev/kfd: {words}",
        "join the groups render and video, or pass /dev/kfd and /dev/dri to the container",
        written=False,
    ),
    FailureRule(
        "tmpdir_unusable",
        r"No space left on device",
        "rocprofv3 could not write its database",
        OWN_TMPDIR,
        written=False,
    ),
    LIBRARY_MISSING,
)


def profile_argv(tool: Path, folder: Path, command: Sequence[str]) -> list[str]:
    """Return the command line of rocprofv3 that profiles a command.

    Every process writes its own database `PID_results.db`, because rocprofv3 also profiles the
    processes that the command starts.
    """
    return [
        str(tool),
        "--kernel-trace",
        "--hip-runtime-trace",
        "--memory-copy-trace",
        "--marker-trace",
        "--output-format",
        "rocpd",
        "--output-directory",
        str(folder),
        "--output-file",
        "%pid%",
        "--",
        *command,
    ]


class Rocprofv3Session(ToolSession):
    """The worker under `rocprofv3`, which replaces itself with the worker."""

    def argv(self, command: list[str]) -> list[str]:
        return profile_argv(self.tool.path, self.scratch, command)

    def environment(self, base: dict[str, str]) -> dict[str, str]:
        return {**base, "TMPDIR": str(self.scratch), "LC_ALL": "C"}

    def judge(self, returncode: int | None, text: str) -> tuple[Problem | None, Path | None]:
        try:
            kernels = self._take_report()
        except TraceFormatError as error:
            return report_damaged(ROCPROFV3, self.report, str(error)), None
        problem = diagnose(ROCPROFV3, RULES, returncode, text, self.report, self.started)
        if not self.report.exists():
            return problem, None
        if kernels == 0:
            problem = problem or Problem(
                ROCPROFV3,
                "no_kernels",
                f"rocprofv3 recorded no kernels in {self.report.name}",
                "check that torch is a ROCm build and sees the GPU (see rocminfo and "
                "torch.cuda.is_available()); `--profiler torch` works without rocprofv3",
            )
        return problem, self.report

    def _take_report(self) -> int:
        """Move the database with the most kernels into the run folder. Return the number of kernels.

        The other databases belong to processes that the worker started. Raise TraceFormatError if a
        database is damaged.
        """
        found = sorted(self.scratch.rglob("*.db"))
        counts = {path: count_rows(path, DISPATCHES, "a rocpd database") for path in found}
        if not counts:
            return 0
        own = max(counts, key=counts.__getitem__)
        shutil.move(own, self.report)  # maybe to another file system
        return counts[own]

    def interrupt(self, process: subprocess.Popen[bytes]) -> None:
        kill(process.pid, signal.SIGINT)
