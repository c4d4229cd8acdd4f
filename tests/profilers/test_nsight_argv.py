"""Command lines and environments of nsys and ncu."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from fake_tools import Scenario, environments, install, invocations

from profharness.recording.profilers import ncu, nsys

DEFAULTS = ",".join(ncu.DEFAULT_METRICS)
COMMAND = ["python", "-P", "-m", "profharness.recording.worker", "run folder"]


def test_nsys_profile() -> None:
    assert nsys.profile_argv(Path("/n/nsys"), Path("runs/r1/c0001.nsys-rep"), COMMAND) == [
        *("/n/nsys", "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none"),
        *("--cuda-graph-trace=node", "--wait=primary", "--force-overwrite=true"),
        *("--output=runs/r1/c0001.nsys-rep", *COMMAND),
    ]


def ncu_argv(*middle: str) -> list[str]:
    return [
        *("/n/ncu", "--config-file", "off", "--target-processes", "all"),
        *("--replay-mode", "kernel", "--clock-control", "none", "--import-sass", "no"),
        *("--nvtx", "--nvtx-include", "regex:profharness@profharness:c[0-9]+", *middle),
        *("--disable-extra-suffixes", "--log-file", "runs/ncu.log", "-f"),
        *("-o", "runs/c0001.ncu-rep", *COMMAND),
    ]


@pytest.mark.parametrize(
    ("options", "middle"),
    [
        ({}, ["--metrics", DEFAULTS]),
        ({"metrics": ["a.sum", "b.avg"]}, ["--metrics", f"{DEFAULTS},a.sum,b.avg"]),
        (
            {"sections": ["SpeedOfLight", "Occupancy"]},
            ["--metrics", DEFAULTS, "--section", "SpeedOfLight", "--section", "Occupancy"],
        ),
        (
            {"metrics": ["a.sum"], "sections": ["Occupancy"]},
            ["--metrics", f"{DEFAULTS},a.sum", "--section", "Occupancy"],
        ),
    ],
    ids=["default", "metrics", "sections", "both"],
)
def test_ncu_profile(options: dict[str, list[str]], middle: list[str]) -> None:
    report, log = Path("runs/c0001.ncu-rep"), Path("runs/ncu.log")
    argv = ncu.profile_argv(Path("/n/ncu"), report, COMMAND, log=log, **options)
    assert argv == ncu_argv(*middle)


@pytest.mark.parametrize(
    ("version", "knows"),
    [("2024.2.0.0", False), ("2025.3.1.0", True), ("2025.10.0", True), (None, True)],
)
def test_old_ncu_gets_no_unknown_option(version: str | None, knows: bool) -> None:
    report, log = Path("runs/c0001.ncu-rep"), Path("runs/ncu.log")
    argv = ncu.profile_argv(Path("/n/ncu"), report, COMMAND, log=log, version=version)
    expected = ncu_argv("--metrics", DEFAULTS)
    if not knows:
        expected.remove("--import-sass")
        expected.remove("no")
    assert argv == expected


def test_ncu_csv() -> None:
    assert ncu.csv_argv(Path("/n/ncu"), Path("a.ncu-rep")) == [
        *("/n/ncu", "--config-file", "off", "--import", "a.ncu-rep", "--csv"),
        *("--page", "raw", "--print-units", "base"),
    ]


def test_default_metrics_are_unique_and_need_one_pass() -> None:
    assert len(set(ncu.DEFAULT_METRICS)) == len(ncu.DEFAULT_METRICS)
    # Throughputs are breakdowns of dozens of counters and need more passes.
    assert not [name for name in ncu.DEFAULT_METRICS if "throughput" in name]


@pytest.mark.parametrize("name", ["c0001", "c0001.qdrep", "c0001.sqlite"])
def test_reports_need_their_suffix(name: str) -> None:
    with pytest.raises(ValueError, match=r"must end in \.nsys-rep"):
        nsys.profile_argv(Path("nsys"), Path(name), COMMAND)
    with pytest.raises(ValueError, match=r"must end in \.ncu-rep"):
        ncu.profile_argv(Path("ncu"), Path(name), COMMAND, log=Path("log"))


def test_report_names_may_look_like_macros(tmp_path: Path) -> None:
    """%p would be a process id, %q{HOME} the home folder."""
    log = install(tmp_path / "bin", Scenario())
    folder = tmp_path / "reports%q{HOME}%p"
    folder.mkdir()
    for argv in (
        nsys.profile_argv(tmp_path / "bin/nsys", folder / "a.nsys-rep", ["true"]),
        ncu.profile_argv(
            tmp_path / "bin/ncu", folder / "a.ncu-rep", ["true"], log=tmp_path / "log"
        ),
    ):
        subprocess.run(argv, check=True)
    assert sorted(path.name for path in folder.iterdir()) == ["a.ncu-rep", "a.nsys-rep"]
    written = [word for argv in invocations(log) for word in argv if "q{HOME}" in word]
    assert len(written) == 2
    assert all("reports%%q{HOME}%%p" in word for word in written)


def test_environments_reach_the_tools(tmp_path: Path) -> None:
    log = install(tmp_path / "bin", Scenario())
    base = {
        **os.environ,
        "LC_ALL": "en_US.UTF-8",
        "TMPDIR": "/no/such",
        "CUDA_INJECTION64_PATH": "/x/lib.so",
        "GREETING": "hello",
    }
    before = dict(base)
    own = tmp_path / "tmp"
    subprocess.run(
        nsys.profile_argv(tmp_path / "bin/nsys", tmp_path / "a.nsys-rep", ["true"]),
        env=nsys.child_environment(base, own),
        check=True,
    )
    subprocess.run(
        ncu.profile_argv(tmp_path / "bin/ncu", tmp_path / "a.ncu-rep", ["true"], log=own),
        env=ncu.child_environment(base, own),
        check=False,
    )
    of_nsys, of_ncu = environments(log)
    for environ in (of_nsys, of_ncu):
        assert environ["TMPDIR"] == str(own)
        assert environ["LC_ALL"] == "C"
        assert environ["GREETING"] == "hello"
    assert of_nsys["NSYS_NVTX_PROFILER_REGISTER_ONLY"] == "0"
    assert of_ncu["NV_COMPUTE_PROFILER_DISABLE_STOCK_FILE_DEPLOYMENT"] == "1"
    assert "CUDA_INJECTION64_PATH" not in of_ncu
    assert base == before
