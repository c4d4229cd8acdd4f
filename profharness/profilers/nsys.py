"""How nsys is called: to profile a command, to export its report to SQLite, to end a session."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from profharness.errors import TraceFormatError
from profharness.processes import kill
from profharness.profilers.base import Argv, Ended, NsightSession
from profharness.profilers.failures import (
    Failure,
    NsightError,
    diagnose_nsys,
    diagnose_nsys_export,
    no_cuda_events,
    report_damaged,
)
from profharness.profilers.tools import require_tool

SUFFIX = ".nsys-rep"
EXPORT_TIMEOUT_S = 900.0
END_GRACE_S = 2.0


def profile_argv(tool: Path, output: Path, command: Sequence[str]) -> list[str]:
    """The argv that profiles a command; output ends in `.nsys-rep`, which nsys then leaves alone.

    CUDA and NVTX alone are traced: sampling needs permissions and says nothing about kernels.
    graph-trace=node, because kernels inside a CUDA graph are not recorded otherwise. wait=primary,
    because a process that the target left behind would hold nsys for ever. Raises ValueError for
    another suffix.
    """
    if output.suffix != SUFFIX:
        raise ValueError(f"{output}: the report of nsys must end in {SUFFIX}")
    return [
        str(tool),
        "profile",
        "--trace=cuda,nvtx",
        "--sample=none",
        "--cpuctxsw=none",
        "--cuda-graph-trace=node",
        "--wait=primary",
        "--force-overwrite=true",
        f"--output={escape_macros(output)}",
        *command,
    ]


def escape_macros(path: Path) -> str:
    """A path in which nsys and ncu expand nothing: both read %p, %h and %q{NAME} in output names."""
    return str(path).replace("%", "%%")


def export_argv(tool: Path, report: Path, output: Path) -> list[str]:
    """The argv that writes a report's tables into a SQLite file."""
    return [
        str(tool),
        "export",
        "--type=sqlite",
        "--force-overwrite=true",
        f"--output={output}",
        str(report),
    ]


def shutdown_argv(tool: Path, pid: int) -> list[str]:
    """The argv that ends what an nsys with that pid left behind when it was killed: its background
    process and the target stand in sessions of their own, which no signal to nsys's group reaches.

    nsys 2022.4 answers exit code 1, "Failed to find session", and leaves the target running: end it
    by its own pid as well.
    """
    return [str(tool), "shutdown", "--kill=sigterm", f"--session=profile-{pid}"]


def child_environment(base: Mapping[str, str], tmpdir: Path) -> dict[str, str]:
    """The environment for nsys and its target.

    A TMPDIR of its own, because nsys puts raw files there; LC_ALL=C for messages that can be read;
    the last one makes nsys record ranges whose names are not registered strings.
    """
    return {
        **base,
        "TMPDIR": str(tmpdir),
        "LC_ALL": "C",
        "NSYS_NVTX_PROFILER_REGISTER_ONLY": "0",
    }


def export_report(
    report: Path,
    output: Path,
    tool: Path | None = None,
    *,
    timeout_s: float = EXPORT_TIMEOUT_S,
) -> None:
    """Export a `.nsys-rep` to SQLite; output appears whole or not at all and replaces an old one.

    tool: the nsys, by default the one that `require_tool` finds. Raises NsightError.
    """
    nsys = require_tool("nsys").path if tool is None else tool
    try:
        folder = tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent)
    except OSError as error:
        raise NsightError(_unwritable(output, error)) from None
    with folder as name:
        part = Path(name) / "export.sqlite"
        log = Path(name) / "log"
        returncode = _run(export_argv(nsys, report, part), Path(name), log, timeout_s)
        text = log.read_text(encoding="utf-8", errors="replace")
        failure = diagnose_nsys_export(returncode, text, part)
        if failure is not None:
            raise NsightError(failure, text)
        part.replace(output)


def _run(argv: list[str], tmpdir: Path, log: Path, timeout_s: float) -> int | None:
    """Exit code, None when it was ended for taking too long; both streams go to log."""
    with log.open("wb") as file:
        try:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=child_environment(os.environ, tmpdir),
                start_new_session=True,
            )
        except OSError as error:
            raise NsightError(_not_started(argv[0], error)) from None
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Nothing of the process's group is left afterwards, whatever interrupts the wait."""
    try:
        _signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_GRACE_S)
    finally:
        _signal_group(process, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_GRACE_S)


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _unwritable(output: Path, error: OSError) -> Failure:
    return Failure(
        "output_unwritable",
        f"{output} cannot be written: {error.strerror}",
        "name a file in a folder that exists and is writable",
    )


def _not_started(path: str, error: OSError) -> Failure:
    return Failure(
        "tool_missing",
        f"{path} cannot be started: {error.strerror}",
        "set PROFHARNESS_NSYS to the nsys executable, or install NVIDIA Nsight Systems",
    )


class NsysSession(NsightSession):
    """Under `nsys profile`; the report is exported to SQLite at once, by the nsys that wrote it."""

    def argv(self, command: Argv) -> Argv:
        return profile_argv(self.tool.path, self.report, command)

    def environment(self, base: dict[str, str]) -> dict[str, str]:
        return child_environment(base, self.scratch)

    def judge(self, ended: Ended) -> tuple[Failure | None, Path | None]:
        failure = diagnose_nsys(ended.returncode, ended.text, self.report, self.started)
        if not self.report.exists():
            return failure, None
        exported = self.report.with_suffix(".sqlite")
        export_report(self.report, exported, self.tool.path)
        try:
            kernels = count_kernels(exported)
        except TraceFormatError as error:
            return report_damaged("nsys", exported, str(error)), None
        if kernels == 0:
            failure = failure or no_cuda_events(self.report)
        return failure, exported

    def interrupt(self, process: subprocess.Popen[bytes]) -> None:
        kill(process.pid, signal.SIGINT)

    def force(self, pid: int, timeout_s: float) -> None:
        """nsys leaves a daemon in a session of its own, which holds the target."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                shutdown_argv(self.tool.path, pid),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_s,
                check=False,
            )


def count_kernels(export: Path) -> int:
    """Kernels in an nsys export; 0 where the table is missing too. Raises TraceFormatError for a
    file that is no SQLite database or is cut off.
    """
    with export.open("rb") as file:
        header = file.read(100)
    if not header.startswith(SQLITE_MAGIC) or len(header) < 100:
        raise TraceFormatError(export.name, "not an SQLite file", expected="an export of nsys")
    page = int.from_bytes(header[16:18], "big")
    # 1 stands for 65,536; a writer that does not keep the count leaves the two counters different
    expected = int.from_bytes(header[28:32], "big") * (65536 if page == 1 else page)
    size = export.stat().st_size
    if header[24:28] == header[92:96] and size < expected:
        raise TraceFormatError(export.name, "cut off", offset=size, expected=f"{expected} bytes")
    connection = sqlite3.connect(f"{export.absolute().as_uri()}?mode=ro", uri=True)
    try:
        return int(connection.execute(f"SELECT count(*) FROM {KERNEL_TABLE}").fetchone()[0])
    except sqlite3.OperationalError:
        return 0
    except sqlite3.DatabaseError as error:
        raise TraceFormatError(export.name, f"damaged: {error}") from None
    finally:
        connection.close()


KERNEL_TABLE = "CUPTI_ACTIVITY_KIND_KERNEL"
SQLITE_MAGIC = b"SQLite format 3\0"
