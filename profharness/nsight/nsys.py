"""How nsys is called: to profile a command, to export its report to SQLite, to end a session."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from profharness.nsight.failures import Failure, NsightError, diagnose_nsys_export
from profharness.nsight.tools import require_tool

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
