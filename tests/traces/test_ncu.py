"""Nsight Compute reports: compare a real H200 report with Kineto's trace of the same cells, and
all readers with each other.
"""

from __future__ import annotations

import gzip
import os
import stat
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from waiting import PATIENCE_S, alive, start_limits_with, until, written_pid

from profharness.cli import find_command
from profharness.errors import MissingExtraError, TraceFormatError
from profharness.recording.profilers.ncu import check_file
from profharness.trace import NONE, LaunchBatch, LaunchConfig, Trace
from profharness.traces import load_parser, open_trace, sniff
from profharness.traces import ncu_readers as readers
from profharness.traces.ncu import nanoseconds, parse_ncu
from profharness.traces.ncu_readers import MODULE, has_package, report_to_csv

ingest = find_command("ingest")

DATA = Path(__file__).parents[1] / "data"
# Positions in the report: the start of a block, fields without a value, an id of a name.
BLOCK, FIELDS, NAME_OF_A_KERNEL = 501004, 38181, 580747
Kernel = tuple[str, LaunchConfig]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a report of 82 kernels in 17 ranges on an H200, metrics only, by ncu 2025.3.1."""
    path = tmp_path_factory.mktemp("ncu") / "h200.ncu-rep"
    path.write_bytes(gzip.decompress((DATA / "ncu_h200.ncu-rep.gz").read_bytes()))
    return path


@pytest.fixture(scope="module")
def table(report: Path) -> Path:
    """Return the same report as ncu's raw CSV."""
    path = report.with_suffix(".csv")
    report_to_csv(report, path)
    return path


def columns(trace: Trace) -> LaunchBatch:
    (batch,) = trace.batches()
    return batch


def launches(trace: Trace) -> dict[str, list[Kernel]]:
    """Return kernels with their launch configurations by range, in the order of launches."""
    found: dict[str, list[Kernel]] = defaultdict(list)
    for batch in trace.batches():
        for row in range(len(batch.kernel)):
            name = trace.ranges[batch.range[row]].name if batch.range[row] >= 0 else ""
            config = trace.launch_configs[batch.launch_config[row]]
            if trace.kernel_kinds[batch.kernel[row]] == "kernel":
                found[name].append((trace.kernels[batch.kernel[row]], config))
    return dict(found)


def same(left: Trace, right: Trace) -> None:
    """Assert that launches, ranges, devices and metrics are equal."""
    for name in ("kernels", "kernel_kinds", "launch_configs", "ranges", "devices", "warnings"):
        assert getattr(left, name) == getattr(right, name), name
    a, b = columns(left), columns(right)
    for name in LaunchBatch.__slots__:
        assert np.array_equal(getattr(a, name), getattr(b, name)), name
    assert left.metrics is not None and right.metrics is not None
    assert left.metrics.names == right.metrics.names
    assert left.metrics.units == right.metrics.units
    assert np.array_equal(left.metrics.values, right.metrics.values, equal_nan=True)


def test_the_fixture_contains_nothing_private(report: Path, table: Path) -> None:
    for path in (report, table):
        data = path.read_bytes()
        for word in (b"/usr/", b"/tmp/", b"/opt/", b"/home/", b"/root", b"127.0.0.1", b"python3"):
            assert word not in data, (path, word)


def test_kernels_and_launches_equal_those_of_kineto(report: Path) -> None:
    """ncu recorded one call of each range, Kineto three. Backward kernels start in a thread of
    their own, which the push/pop filter of that capture missed.
    """
    ours = launches(open_trace(report))
    kineto = open_trace(DATA / "kineto_h200.json.gz")
    theirs = launches(kineto)
    assert len(ours) == 17
    compared = 0
    for name, kernels in ours.items():
        seen = {
            (kernel, one.grid, one.block, one.registers_per_thread, one.shared_bytes)
            for kernel, one in theirs[name]
        }
        for kernel, one in kernels:
            key = (kernel, one.grid, one.block, one.registers_per_thread, one.shared_bytes)
            assert key in seen, key
            compared += 1
        if "-bwd/" not in name:
            assert [kernel for kernel, _ in theirs[name]] == [one for one, _ in kernels] * 3, name
    assert compared == 82
    kineto.close()


def test_the_report_has_metrics_devices_and_versions(report: Path) -> None:
    trace = open_trace(report)
    assert (trace.profiler, trace.num_launches, trace.skipped) == ("ncu", 82, 0)
    assert trace.environment == {"ncu_version": "2025.3.1.0"}
    (device,) = trace.devices
    assert (device.name, device.num_sms, device.compute_major) == ("NVIDIA H200", 132, 9)
    assert device.shared_bytes_per_block_optin == 232448
    config = trace.launch_configs[0]
    assert config == LaunchConfig((64, 1, 1), (384, 1, 1), 168, 0, 134144, 134144)
    assert trace.metrics is not None
    value = dict(zip(trace.metrics.names, trace.metrics.values[0].tolist(), strict=True))
    assert value["launch__shared_mem_per_block_driver"] == 1024
    assert value["gpu__time_duration.sum"] == 9536
    assert value["sm__warps_active.avg.pct_of_peak_sustained_active"] == 14.266260204582906
    units = dict(zip(trace.metrics.names, trace.metrics.units, strict=True))
    assert units["dram__bytes_read.sum"] == "byte" and units["gpu__time_duration.sum"] == "ns"
    assert not any(name.startswith(("device__", "nvlink__")) for name in value)
    assert trace.warnings == ()


def test_launches_are_placed_end_to_end_within_their_ranges(report: Path) -> None:
    trace = open_trace(report)
    batch = columns(trace)
    assert batch.start_ns[0] == 0 and (batch.duration_ns > 0).all()
    assert np.array_equal(batch.start_ns[1:], (batch.start_ns + batch.duration_ns)[:-1])
    for name in ("launch_ns", "correlation", "pid", "tid", "graph_node", "api", "cell_range"):
        assert (getattr(batch, name) == NONE).all(), name
    for index, item in enumerate(trace.ranges):
        inside = batch.range == index
        assert item.start_ns == batch.start_ns[inside][0]
        assert item.duration_ns == batch.duration_ns[inside].sum()


def test_all_readers_agree(report: Path, table: Path, tmp_path: Path) -> None:
    package = parse_ncu(report)
    same(package, parse_ncu(table))
    utf16 = tmp_path / "powershell.csv"
    utf16.write_text(table.read_text(), encoding="utf-16")
    same(package, open_trace(utf16))


def install(folder: Path, script: str) -> Path:
    """Install a script as `ncu`, found before any other."""
    folder.mkdir(parents=True, exist_ok=True)
    tool = folder / "ncu"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    return tool


@pytest.fixture
def no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine without the package and without ncu."""
    monkeypatch.setitem(sys.modules, "ncu_report", None)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("PROFHARNESS_NCU", raising=False)


@pytest.mark.usefixtures("no_package")
def test_the_error_without_a_reader_names_all_three(report: Path, table: Path) -> None:
    if any(Path("/").glob("opt/nvidia/nsight-compute/*/ncu")):
        pytest.skip("an Nsight Compute is installed")
    with pytest.raises(MissingExtraError) as caught:
        parse_ncu(report)
    for way in ("profharness[ncu]", "extras/python", "ncu --import"):
        assert way in str(caught.value)
    assert parse_ncu(table).num_launches == 82


def bring_extras(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the module in an Nsight Compute installation whose ncu does nothing."""
    tool = install(folder / "2025.3.1" / "target" / "linux", "exit 1")
    monkeypatch.setenv("PROFHARNESS_NCU", str(tool))
    extras = folder / "2025.3.1" / "extras" / "python"
    extras.mkdir(parents=True)
    return extras


def test_the_module_inside_nsight_compute_reads_reports(
    report: Path, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put the package's files into extras/python, where the module is found by ncu's own path."""
    spec = find_spec(MODULE)
    assert has_package() and spec is not None and spec.origin is not None
    extras = bring_extras(tmp_path, monkeypatch)
    for file in Path(spec.origin).parent.iterdir():
        name = "ncu_report.py" if file.name == "__init__.py" else file.name
        (extras / name).symlink_to(file)
    monkeypatch.setitem(sys.modules, MODULE, None)
    same(parse_ncu(report), parse_ncu(table))
    assert MODULE not in {name for name, module in sys.modules.items() if module}


FAULTS = {
    "abort": ("import os\nos.abort()", r"was killed by SIGABRT"),
    "loop": ("while True:\n    pass", r"was stopped after 1 s of work"),
    "sleep": ("import time\ntime.sleep(86400)", r"was stopped after \d s of work"),
    "memory": ("held = bytearray(1 << 40)", r"used too much memory"),
    "error": ("raise AttributeError('unit')", r"failed with code 1"),
    "silent": ("import os\nos._exit(0)", r"ended without a result"),
}


@pytest.mark.usefixtures("no_package")
@pytest.mark.parametrize(("body", "why"), FAULTS.values(), ids=FAULTS)
def test_a_failure_of_the_module_affects_only_one_file(
    report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, why: str
) -> None:
    """A module in place of the real one fails in the child as the real one does with some file."""
    extras = bring_extras(tmp_path, monkeypatch)
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    (extras / "ncu_report.py").write_text(f"def load_report(path):\n{lines}")
    monkeypatch.setattr(readers, "CPU_S", 0.1)
    monkeypatch.setattr(readers, "CPU_S_PER_MB", 0.1)
    monkeypatch.setattr(readers, "WAITING", 2 if "sleep" in body else 60)
    match = rf"h200\.ncu-rep: this report was written by ncu .* \({why}\) and ncu --import cannot read it"
    with pytest.raises(TraceFormatError, match=match) as caught:
        parse_ncu(report)
    assert caught.value.path == report


@pytest.mark.skipif(sys.platform != "linux", reason="the module's files are Linux's")
def test_a_report_that_aborts_the_module_affects_only_itself(report: Path, tmp_path: Path) -> None:
    """64 bytes of another part of the file replace the start of a block: `Check failed: count >=
    0`.
    """
    data = report.read_bytes()
    path = tmp_path / "damaged.ncu-rep"
    path.write_bytes(data[:BLOCK] + data[FIELDS : FIELDS + 64] + data[BLOCK + 64 :])
    match = r"damaged\.ncu-rep: .* ncu_report \(was killed by SIGABRT\) cannot read"
    with pytest.raises(TraceFormatError, match=match):
        parse_ncu(path)
    result = CliRunner().invoke(ingest, [str(path), str(report), "--store", str(tmp_path / "s.db")])
    assert result.exit_code == 1 and "82 launches" in result.output, result.output


def test_values_that_the_module_returns_as_none_are_counted(report: Path, tmp_path: Path) -> None:
    """Damage one byte of a kernel name's index in the report's strings."""
    data = bytearray(report.read_bytes())
    data[NAME_OF_A_KERNEL] = ord("b")
    path = tmp_path / "damaged.ncu-rep"
    path.write_bytes(data)
    trace = parse_ncu(path)
    assert trace.num_launches == 82 and "unknown" in trace.kernels
    assert "1 of 82 kernels have no name" in trace.warnings
    assert "1 names or metrics in the report could not be read" in trace.warnings


def test_results_that_the_module_misses_are_counted(report: Path) -> None:
    known = check_file(report)
    counted = readers.read_report(report, replace(known, results=90))
    assert counted.warnings == ("the file contains 90 results, but only 82 could be read",)


@pytest.mark.usefixtures("no_package")
def test_ncu_itself_reads_reports(
    report: Path, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program in place of ncu receives the arguments and the locale, and its table is read."""
    tool = install(
        tmp_path, f'echo "$LC_ALL $@" > {tmp_path}/told\n/bin/echo ==PROF== hello\n/bin/cat {table}'
    )
    monkeypatch.setenv("PROFHARNESS_NCU", str(tool))
    trace = parse_ncu(report)
    same(trace, parse_ncu(table))
    told = (tmp_path / "told").read_text().split()
    assert told[0] == "C"
    assert told[told.index("--import") + 1] == str(report)
    assert told[told.index("--print-kernel-base") + 1] == "mangled"
    assert told[told.index("--print-units") + 1] == "base"
    install(tmp_path, "echo '==ERROR== Failed to load report file'; exit 1")
    with pytest.raises(TraceFormatError, match=r"ncu 2025\.3\.1\.0, but ncu --import cannot"):
        parse_ncu(report)


def test_a_hanging_ncu_is_killed_with_its_children(
    report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = install(tmp_path, f"sleep 86400 & echo $! > {tmp_path}/pid; wait")
    start_limits_with(monkeypatch, lambda: written_pid(tmp_path / "pid"))
    with pytest.raises(TraceFormatError, match="more than 1 s"):
        readers.import_csv(tool, report, timeout_s=1.0)
    child = int((tmp_path / "pid").read_text())
    until(lambda: not alive(child))


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "not an Nsight Compute report"),
        (b"hello" * 1000, "not an Nsight Compute report"),
        (b"NVR\0", "cut off"),
        (b"NVR\0\x02\0\0\0\x08\x07\x03\0\0\0\xff\xff\xff", "damaged block"),
    ],
    ids=["empty", "garbage", "magic", "block"],
)
def test_garbage_is_refused(tmp_path: Path, data: bytes, match: str) -> None:
    path = tmp_path / "x.ncu-rep"
    path.write_bytes(data)
    with pytest.raises(TraceFormatError, match=match):
        open_trace(path)


@pytest.mark.parametrize("part", [0.1, 0.5, 0.999999])
def test_a_truncated_report_is_refused(report: Path, tmp_path: Path, part: float) -> None:
    """The module would read the first half of the kernels of such a file without an error."""
    data = report.read_bytes()
    path = tmp_path / "cut.ncu-rep"
    path.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(TraceFormatError, match="cut off") as caught:
        open_trace(path)
    assert caught.value.offset == path.stat().st_size


def test_a_report_without_kernels_gives_a_warning(report: Path, tmp_path: Path) -> None:
    """The head of the real report is a complete file whose only block has no results."""
    path = tmp_path / "none.ncu-rep"
    head = 8 + 2 + 4 + int.from_bytes(report.read_bytes()[10:14], "little")
    path.write_bytes(report.read_bytes()[:head])
    assert check_file(path).results == 0
    trace = open_trace(path)
    assert trace.num_launches == 0 and list(trace.batches()) == [] and trace.metrics is None
    assert "no kernel" in trace.warnings[0]


def test_check_file_counts_what_was_profiled(report: Path) -> None:
    known = check_file(report)
    assert (known.results, known.version) == (82, "2025.3.1.0")


def test_only_files_of_ncu_are_recognized(report: Path, table: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("ID,Name\n1,x\n")
    assert [sniff(path) for path in (report, table, other)] == ["ncu", "ncu", None]
    assert load_parser("ncu") is parse_ncu
    with pytest.raises(TraceFormatError, match="not a trace"):
        open_trace(other)


def test_every_unit_of_time_is_converted() -> None:
    assert [nanoseconds(84.48, unit) for unit in ("ns", "usecond", "us", "ms")] == [
        84, 84480, 84480, 84480000,
    ]  # fmt: skip
    with pytest.raises(KeyError):
        nanoseconds(1, "cycle")


def test_reading_does_not_import_torch_or_pandas() -> None:
    code = (
        "import sys, profharness.traces.ncu, profharness.traces.ncu_readers\n"
        "assert not {'torch', 'pandas', 'ncu_report'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ}, timeout=PATIENCE_S)
