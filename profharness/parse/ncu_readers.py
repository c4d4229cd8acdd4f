"""The ways to read an .ncu-rep, in the order of preference: the `ncu_report` package, the same
module inside Nsight Compute, and ncu itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from profharness.errors import MissingExtraError, ProfharnessError, TraceFormatError
from profharness.nsight.ncu_file import NcuFile, check_file
from profharness.parse import ncu_package
from profharness.parse.ncu_csv import read_csv_text
from profharness.parse.ncu_rows import NcuReport

IMPORT_TIMEOUT_S = 600.0


class MissingReaderError(MissingExtraError):
    """Nothing on this machine can read an .ncu-rep."""

    def __init__(self, path: Path) -> None:
        ProfharnessError.__init__(
            self,
            f"{path}: nothing here can read an Nsight Compute report. Any one of three helps: "
            'pip install "profharness[ncu]" (the package ncu_report); '
            "Nsight Compute on PATH or named by PROFHARNESS_NCU (its extras/python is used, else "
            "ncu itself); or a CSV made where ncu is: "
            "ncu --import REPORT --csv --page raw --print-units base "
            "--print-kernel-base mangled > REPORT.csv",
        )


class _Unavailable(Exception):
    """This way is not there on this machine."""


def read_report(path: Path, *, known: NcuFile | None = None) -> NcuReport:
    """The kernels of a report by the first way that can read it. known: what `check_file` said.

    Raises TraceFormatError when the file is no whole report or no way understands it, and
    MissingReaderError when there is no way.
    """
    known = known or check_file(path)
    if not known.results:
        return NcuReport([], {})
    tried = []
    for name, read in READERS.items():
        try:
            report = read(path)
        except _Unavailable:
            continue
        if report is not None:
            return report
        tried.append(name)
    if not tried:
        raise MissingReaderError(path)
    made = f"ncu {known.version}" if known.version else "an unknown ncu"
    raise TraceFormatError(
        path,
        f"a report of {made} that {' and '.join(tried)} cannot read",
        expected="a report no newer than its reader; pip install -U ncu-report, or use a newer ncu",
    )


def _by_package(path: Path) -> NcuReport | None:
    module = ncu_package.import_package()
    if module is None:
        raise _Unavailable
    return ncu_package.read_with(module, path)


def _by_extras(path: Path) -> NcuReport | None:
    module = ncu_package.import_from_tool(_find_ncu())
    if module is None:
        raise _Unavailable
    return ncu_package.read_with(module, path)


def _by_ncu(path: Path) -> NcuReport | None:
    output = import_csv(_find_ncu(), path)
    return None if output is None else read_csv_text(output, path)


READERS: dict[str, Callable[[Path], NcuReport | None]] = {
    "ncu_report": _by_package,
    "Nsight Compute's ncu_report": _by_extras,
    "ncu --import": _by_ncu,
}


def _find_ncu() -> Path:
    from profharness.nsight.tools import find_tool

    tool = find_tool("ncu")
    if tool is None:
        raise _Unavailable
    return tool.path


def import_csv(ncu: Path, report: Path, *, timeout_s: float = IMPORT_TIMEOUT_S) -> str | None:
    """What `ncu --import` prints of a report as CSV; None when it cannot read the report.

    ncu and all that it started are gone when this returns. Raises TraceFormatError when it takes
    longer than timeout_s or does not start.
    """
    from profharness.nsight.ncu import child_environment, csv_argv

    argv = csv_argv(ncu, report.resolve())
    if "--print-kernel-base" not in argv:
        argv += ["--print-kernel-base", "mangled"]
    with tempfile.TemporaryDirectory(prefix="profharness-ncu-") as folder:
        try:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=folder,
                env=child_environment(os.environ, Path(folder)),
                start_new_session=True,
            )
        except OSError as error:
            raise TraceFormatError(report, f"{ncu} does not start: {error.strerror}") from None
        try:
            output, _ = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            message = f"{ncu} --import took more than {timeout_s:g} s and was ended"
            raise TraceFormatError(report, message) from None
        finally:
            _end(child)
    return output.decode("utf-8", errors="replace") if child.returncode == 0 else None


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child's whole session; its pid cannot have been taken anew while it leads a group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for pipe in (child.stdout, child.stderr):
        if pipe:
            pipe.close()
