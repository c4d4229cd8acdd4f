"""Read an .ncu-rep with the first available reader in this list that can read the file:

1. the `ncu_report` package
2. the `ncu_report` module in the installation folder of Nsight Compute
3. ncu itself

A damaged report can make NVIDIA's module abort, run forever or use all memory. The module also
never frees memory. The module is therefore loaded only in child processes. Each child reads a part
of the report and writes this part as msgpack.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from profharness.errors import MissingExtraError, ProfharnessError, TraceFormatError
from profharness.files import read_input
from profharness.processes import child_environment as python_environment
from profharness.processes import run_to_end
from profharness.recording.profilers import find_tool
from profharness.recording.profilers.ncu import NcuFile, check_file, child_environment, csv_argv
from profharness.rows import NCU
from profharness.traces.ncu_csv import (
    CONSTANTS,
    LaunchCompactor,
    NcuLaunch,
    NcuReport,
    NvtxRange,
    read_csv_text,
    write_csv,
)

MODULE = "ncu_report"
EXTRAS = Path("extras", "python", f"{MODULE}.py")
CHILD = "from profharness.traces.ncu_readers import main; main()"
IMPORT_TIMEOUT_S = 600.0
# The value of IAction.workload_type() for a kernel. Ranges, command lists and graphs have larger
# values.
KERNEL = 0
STRING, FLOATS, INTEGERS = 2, (3, 4), (5, 6)  # values of IMetric.kind()
# The index of a device or stream must be less than this. A larger value means that -1 was stored in
# an unsigned field.
MAX_INDEX = 1 << 31
MAX_NAMES = 1 << 16  # maximum number of ranges per launch and domain
# Limits on processor time. A real report of 1.2 MB takes 0.4 s of processor time and 180 MB of
# memory, of which the library itself uses 120 MB.
CPU_S, CPU_S_PER_MB = 12.0, 4.0
# If a child uses more than ENOUGH_KIB of memory, the next child reads the rest of the report.
# MOST_BYTES is the maximum memory of a child.
ENOUGH_KIB, MOST_BYTES = 240 << 10, 450 << 20
# Ratio of the limit on wall time to the limit on processor time. Wall time may be longer than
# processor time, because a child may sleep or share its processor with other processes.
WAITING = 4
NO_MODULE, NOTHING_FOUND, NO_MEMORY = 3, 4, 5  # exit codes of the child


def report_to_csv(report: Path, output: Path) -> None:
    """Convert an .ncu-rep to a CSV, as `ncu --csv --page raw --print-units base
    --print-kernel-base mangled` does.

    `parse_ncu` reads the same launches and metrics from the CSV as from the .ncu-rep. Doubles have
    all digits, whereas ncu rounds them to two decimals. The ids of processes and the threads of
    ranges are 0. The names of processes and hosts are empty. Raise the errors that `read_report`
    raises.
    """
    write_csv(read_report(report, check_file(report)), output)


class MissingReaderError(MissingExtraError):
    """Raised if no program on this machine can read an .ncu-rep."""

    def __init__(self, path: Path) -> None:
        ProfharnessError.__init__(
            self,
            f"{path}: no reader of Nsight Compute reports is installed. Install the package ncu_report "
            '(pip install "profharness[ncu]"), put Nsight Compute on PATH, or set PROFHARNESS_NCU to it '
            "(profharness then uses its extras/python, or ncu itself). Alternatively, create a CSV "
            "where ncu is installed: "
            "ncu --import REPORT --csv --page raw --print-units base "
            "--print-kernel-base mangled > REPORT.csv",
        )


def read_report(path: Path, file: NcuFile) -> NcuReport:
    """Read the kernels of a report. `file` is the result of `check_file`.

    Raise TraceFormatError if no reader can read the report, and MissingReaderError if no reader is
    available.
    """
    if not file.results:
        return NcuReport([], {})
    tried = []
    for name, report in _attempts(path):
        if isinstance(report, NcuReport):
            readable = len(report.launches) + report.skipped
            if readable == file.results:
                return report
            text = f"the file contains {file.results} results, but only {readable} could be read"
            return replace(report, warnings=(*report.warnings, text))
        tried.append(f"{name} ({report})" if report else name)
    if not tried:
        raise MissingReaderError(path)
    made = f"ncu {file.version}" if file.version else "an unknown version of ncu"
    raise TraceFormatError(
        path,
        f"this report was written by {made}, but {' and '.join(tried)} cannot read it. If the file "
        "is truncated, copy it again. Otherwise, update ncu-report (pip install -U ncu-report) or "
        "use a newer ncu",
        expected="a complete report from a version of ncu that the installed readers can read",
    )


def _attempts(path: Path) -> Iterator[tuple[str, NcuReport | str]]:
    """Yield the name of each available reader, and the report or the reason why it failed.

    The reason is "" if the reader does not recognize the file.
    """
    if has_package() and (report := _read_native(path)) is not None:
        yield "ncu_report", report
    tool = find_tool(NCU)
    if tool is None:
        return
    # The folder that contains the module of ncu's own installation
    folders = [(folder / EXTRAS).parent for folder in tool.path.resolve().parents[:5]]
    folder = next((folder for folder in folders if (folder / EXTRAS.name).is_file()), None)
    if folder is not None and (report := _read_native(path, folder)) is not None:
        yield "Nsight Compute's ncu_report", report
    output = import_csv(tool.path, path)
    yield "ncu --import", "" if output is None else read_csv_text(output, path)


def import_csv(ncu: Path, report: Path, *, timeout_s: float = IMPORT_TIMEOUT_S) -> str | None:
    """Return the CSV that `ncu --import` prints, or None if ncu cannot read the report."""
    argv = csv_argv(ncu, report.resolve())
    if "--print-kernel-base" not in argv:
        argv += ["--print-kernel-base", "mangled"]
    with tempfile.TemporaryDirectory(prefix="profharness-ncu-") as name:
        folder = Path(name)
        output, environment = folder / "output", child_environment(os.environ, folder)
        options = {"cwd": folder, "stderr": subprocess.DEVNULL}
        try:
            returncode = run_to_end(argv, output, environment, timeout_s, **options)
        except OSError as error:
            raise TraceFormatError(report, f"{ncu} cannot be started: {error.strerror}") from None
        if returncode is None:
            message = f"{ncu} --import took more than {timeout_s:g} s and was stopped"
            raise TraceFormatError(report, message)
        return read_input(output).decode("utf-8", "replace") if returncode == 0 else None


_Launch = tuple[
    str, int, int | None, dict[int, float], dict[int, str], list[NvtxRange], list[NvtxRange]
]
"""The fields of NcuLaunch. The keys of `values` and `texts` are indices into `_Report.names`."""


class _Report(msgspec.Struct, array_like=True):
    """The part of a report that a child has read."""

    names: list[str]
    units: list[str]
    launches: list[_Launch]
    skipped: int
    unreadable: int
    rest: int | None  # index of the first result that the next child must read, or None


def has_package() -> bool:
    """Return whether the package `ncu_report` is installed, without importing it."""
    try:
        return importlib.util.find_spec(MODULE) is not None
    except (ImportError, ValueError):
        return False


def _read_native(path: Path, folder: Path | None = None) -> NcuReport | str | None:
    """Read a report with the installed `ncu_report` module, or with the module in `folder`.

    Return None if the module cannot be imported, "" if it does not recognize the file, and a
    description of any other failure.
    """
    size = path.stat().st_size
    seconds = math.ceil(CPU_S + CPU_S_PER_MB * size / 1e6)
    until, compactor = _children_s() + seconds, LaunchCompactor(path, size)
    launches: list[NcuLaunch] = []
    units: dict[str, str] = {}
    skipped = unreadable = 0
    first: int | None = 0
    while first is not None:
        left = math.ceil(until - _children_s())
        part = _read_part(path, folder, first, left) if left > 0 else _failure(None, seconds)
        if not isinstance(part, _Report):
            return part
        names = part.names
        for name, device, stream, values, texts, start_end, push_pop in part.launches:
            # each child reads the constants again; drop them if they are known
            left_out = CONSTANTS if device in compactor.devices else ()
            kept = {names[at]: v for at, v in values.items() if not names[at].startswith(left_out)}
            words = {
                names[at]: sys.intern(text)
                for at, text in texts.items()
                if not names[at].startswith(left_out)
            }
            ranges = tuple(start_end), tuple(push_pop)
            launch = NcuLaunch(name, kept, words, device, stream, *ranges)
            launches.append(compactor.compact(launch))
        units.update(zip(part.names, part.units, strict=True))
        skipped, unreadable = skipped + part.skipped, unreadable + part.unreadable
        first = part.rest
    doubt = f"{unreadable} names or metrics in the report could not be read"
    return NcuReport(launches, units, skipped, (doubt,) if unreadable else ())


def _children_s() -> float:
    """Return the processor time that all ended child processes have used, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _read_part(path: Path, folder: Path | None, first: int, seconds: int) -> _Report | str | None:
    """Return the part of a report that a child reads, starting with the result `first`.

    If the child fails, return the same values as `_read_native`.
    """
    limits = (str(seconds), str(MOST_BYTES), str(first))
    with tempfile.TemporaryDirectory(prefix="profharness-ncu-") as name:
        output = Path(name) / "output"
        argv = [sys.executable, "-c", CHILD, str(path.resolve()), str(output), *limits]
        argv += [] if folder is None else [str(folder)]
        log, environment = Path(os.devnull), python_environment()
        code = run_to_end(argv, log, environment, seconds * WAITING, cwd=name)
        if code == NO_MODULE:
            return None
        if code == NOTHING_FOUND:
            return ""
        if code != 0:
            return _failure(code, seconds)
        try:
            return msgspec.msgpack.decode(read_input(output), type=_Report)
        except (OSError, msgspec.MsgspecError):
            return "ended without a result"


def _failure(code: int | None, seconds: int) -> str:
    if code is None or code == -getattr(signal, "SIGXCPU", 0):
        return f"was stopped after {seconds} s of work"
    if code == NO_MEMORY:
        return "used too much memory"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
    return f"failed with code {code}"


def main() -> None:
    """Run in the child process. The arguments are REPORT OUTPUT SECONDS BYTES FIRST [FOLDER]."""
    report, output, seconds, size, first, *folder = sys.argv[1:]
    with contextlib.suppress(ValueError, OSError):  # the parent still limits the time
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 1))
        resource.setrlimit(resource.RLIMIT_AS, (int(size), int(size)))
    sys.path[:0] = folder
    try:
        module = importlib.import_module(MODULE)
    except ImportError:
        sys.exit(NO_MODULE)
    try:
        context = module.load_report(report)
        if not context.num_ranges():
            sys.exit(NOTHING_FOUND)
        Path(output).write_bytes(msgspec.msgpack.encode(_Reader().read(context, int(first))))
    except MemoryError:
        sys.exit(NO_MEMORY)


def _peak_kib() -> int:
    """Return the peak memory of this process. `ru_maxrss` may include the memory of the parent."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


class _Reader:
    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._units: list[str] = []
        self._devices: set[int] = set()
        self._unreadable = 0  # number of names and metrics that the module could not return

    def read(self, context: Any, first: int) -> _Report:
        """Read results from the index `first` on, until the process uses ENOUGH_KIB of memory."""
        parts = [context.range_by_idx(place) for place in range(context.num_ranges())]
        results = [(part, index) for part in parts for index in range(part.num_actions())]
        launches: list[_Launch] = []
        done, rest = first, None
        for part, index in results[first:]:
            action = part.action_by_idx(index)
            if action.workload_type() == KERNEL:
                launches.append(self._launch(action))
            done += 1
            if _peak_kib() > ENOUGH_KIB:
                rest = done if done < len(results) else None
                break
        skipped = done - first - len(launches)
        return _Report(list(self._places), self._units, launches, skipped, self._unreadable, rest)

    def _launch(self, action: Any) -> _Launch:
        device = _index(action, "launch__device_id")
        if device is None:
            device = _index(action, "device__attribute_device_index") or 0
        values: dict[int, float] = {}
        texts: dict[int, str] = {}
        start_end: list[NvtxRange] = []
        push_pop: list[NvtxRange] = []
        title = self._text(action.name(action.NameBase_MANGLED)) or ""
        for raw_name in action.metric_names():
            if device in self._devices and raw_name.startswith(CONSTANTS):
                continue
            name, metric = self._text(raw_name), action.metric_by_name(raw_name)
            if metric is None or not name:
                self._unreadable += 1
                continue
            place = self._places.setdefault(name, len(self._places))
            if place == len(self._units):
                self._units.append(self._text(metric.unit()) or "")
            kind = metric.kind()
            if kind == STRING:
                texts[place] = self._text(metric.as_string()) or ""
            elif kind in FLOATS or kind in INTEGERS:
                value = float(metric.as_uint64() if kind in INTEGERS else metric.as_double())
                if math.isfinite(value):
                    values[place] = value
        self._devices.add(device)
        if (state := action.nvtx_state()) is not None:
            for domain in map(state.domain_by_id, sorted(state.domains())):
                start_end += self._ranges(domain, domain.start_end_ranges())
                push_pop += self._ranges(domain, domain.push_pop_ranges())
        stream = _index(action, "launch__stream_id")
        return title, device, stream, values, texts, start_end, push_pop

    def _ranges(self, domain: Any, names: Any) -> list[NvtxRange]:
        title = self._text(domain.name()) or ""
        return [(title, self._text(name) or "") for name in list(names)[:MAX_NAMES]]

    def _text(self, value: object) -> str | None:
        """Return a text without lone surrogates, or None if the value is not a text.

        SWIG converts bytes that are not UTF-8 to lone surrogates.
        """
        if not isinstance(value, str):
            self._unreadable += 1
            return None
        return value.encode("utf-8", "replace").decode("utf-8")


def _index(action: Any, name: str) -> int | None:
    metric = action.metric_by_name(name)
    number = None if metric is None else int(metric.as_uint64())
    return None if number is None or number >= MAX_INDEX else number
