"""Known failures of the tools, through real child processes, and their codes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from failure_cases import NCU, NSYS, TARGET
from fake_tools import Behaviour, Scenario, install
from hypothesis import given
from hypothesis import strategies as st
from waiting import PATIENCE_S, alive, until, written_pid

from profharness.recording.profilers import ncu, nsys
from profharness.recording.profilers.base import FailureRule, Tool, diagnose, report_state
from profharness.run import Problem, Protocol

REGISTRIES = {"nsys": nsys.RULES, "ncu": ncu.RULES, "nsys export": nsys.EXPORT_RULES}


def run(folder: Path, name: str, behaviour: Behaviour, target: list[str]) -> Problem | None:
    """Run a fake tool, and return its diagnosis."""
    install(folder / "bin", Scenario(**{name: behaviour}))
    tool, report, log = folder / "bin" / name, folder / f"c0001.{name}-rep", folder / "ncu.log"
    if name == "nsys":
        argv = nsys.profile_argv(tool, report, target)
        environment = nsys.child_environment(os.environ, folder)
    else:
        argv = ncu.profile_argv(tool, report, target, log=log)
        environment = ncu.child_environment(os.environ, folder)
    started = time.time()
    done = subprocess.run(
        argv, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    text = done.stdout + done.stderr + (log.read_text() if log.exists() else "")
    return diagnose(name, REGISTRIES[name], done.returncode, text, report, started)


@pytest.mark.parametrize(
    ("tool", "case"),
    [(tool, case) for tool, cases in (("nsys", NSYS), ("ncu", NCU)) for case in cases],
)
def test_failure_is_recognized(tool: str, case: str, tmp_path: Path) -> None:
    behaviour, target, expected = {"nsys": NSYS, "ncu": NCU}[tool][case]
    problem = run(tmp_path, tool, behaviour, target)
    assert (problem.code if problem else None) == expected, problem


def test_every_rule_has_a_case() -> None:
    """A rule without a recorded text could become wrong unnoticed."""
    cases = [
        (table, behaviour.stdout + behaviour.stderr)
        for table, cases in (("nsys", NSYS), ("ncu", NCU))
        for behaviour, *_ in cases.values()
    ]
    unreached = [
        f"{tool}: {rule.code}: {rule.pattern}"
        for tool, registry in (
            ("nsys", nsys.RULES),
            ("ncu", [rule for rule in ncu.RULES if not rule.late]),
        )
        for rule in registry
        if not any(
            table == tool and re.search(rule.pattern, text, re.MULTILINE) for table, text in cases
        )
        and rule.code != "killed"  # depends on how the tool ended, not on a text
    ]
    assert not unreached


def test_old_report_is_not_mistaken_for_a_new_one(tmp_path: Path) -> None:
    report = tmp_path / "c0001.nsys-rep"
    report.write_bytes(b"of an earlier run")
    os.utime(report, (time.time() - 60, time.time() - 60))
    problem = run(tmp_path, "nsys", Behaviour(report="tmpdir"), TARGET)
    assert problem is not None and problem.code == "report_stale"
    assert report.read_bytes() == b"of an earlier run"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nsys_writes_its_report_after_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    """A runner sends signals at its time limit. The report exists; the failure is `timeout` only if
    the runner passes no exit code.
    """
    install(tmp_path / "bin", Scenario())
    report, sign = tmp_path / "c0001.nsys-rep", tmp_path / "started"
    target = [sys.executable, "-ISc", f"open({str(sign)!r}, 'w'); import time; time.sleep(86400)"]
    started = time.time()
    process = subprocess.Popen(nsys.profile_argv(tmp_path / "bin" / "nsys", report, target))
    until(sign.exists, process)
    process.send_signal(number)
    assert process.wait(PATIENCE_S) == 128 + number
    assert report_state(report, started) == "fresh"
    assert diagnose("nsys", nsys.RULES, 128 + number, "", report, started) is None
    late = diagnose("nsys", nsys.RULES, None, "", report, started)
    assert late is not None
    assert late.code == "timeout"


def test_shutdown_ends_the_target_of_a_killed_nsys(tmp_path: Path) -> None:
    install(tmp_path / "bin", Scenario(nsys=Behaviour(kill_self=True)))
    tool, sign = tmp_path / "bin" / "nsys", tmp_path / "pid"
    target = [
        sys.executable,
        "-ISc",
        f"import os, time; open({str(sign)!r}, 'w').write(str(os.getpid())); time.sleep(86400)",
    ]
    process = subprocess.Popen(nsys.profile_argv(tool, tmp_path / "x.nsys-rep", target))
    assert process.wait(PATIENCE_S) == -9
    until(lambda: written_pid(sign))
    pid = int(sign.read_text())
    assert alive(pid)
    session = nsys.NsysSession(Tool("nsys", tool, None, True), tmp_path / "x.nsys-rep", Protocol())
    session.force(process.pid, PATIENCE_S)
    until(lambda: not alive(pid))


def test_target_gets_stdin_and_environment(tmp_path: Path) -> None:
    install(tmp_path / "bin", Scenario())
    code = "import os, sys; print(sys.stdin.read() + os.environ['GREETING'])"
    for argv in (
        nsys.profile_argv(tmp_path / "bin/nsys", tmp_path / "x.nsys-rep", ["python3", "-c", code]),
        ncu.profile_argv(
            tmp_path / "bin/ncu",
            tmp_path / "x.ncu-rep",
            ["python3", "-c", code],
            log=tmp_path / "log",
        ),
    ):
        done = subprocess.run(
            argv,
            input="hello, ",
            env={**os.environ, "GREETING": "world"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == "hello, world\n"


@pytest.mark.parametrize(
    ("tool", "text", "code"),
    [
        ("nsys", "Waiting for termination of re-parented processes.", "children_outlive_target"),
        ("nsys", "", "timeout"),
        ("ncu", "==PROF== Waiting for /tmp/nsight-compute-lock", "lock_file"),
        ("ncu", "", "timeout"),
    ],
)
def test_timeout(tool: str, text: str, code: str, tmp_path: Path) -> None:
    failure = diagnose(tool, REGISTRIES[tool], None, text, tmp_path / f"x.{tool}-rep", 0.0)
    assert failure is not None
    assert failure.code == code


EVERY_RULE = [rule for registry in REGISTRIES.values() for rule in registry]


@pytest.mark.parametrize("rule", EVERY_RULE, ids=lambda rule: rule.code)
def test_rules_fill_their_placeholders_and_have_a_remedy(rule: FailureRule) -> None:
    groups = re.compile(rule.pattern).groupindex
    failure = rule.problem("nsys", Path("c0001.rep"), dict.fromkeys(groups, "WORD"))
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", failure.code)
    assert len(failure.remedy) > 10
    assert "{" not in failure.message + failure.remedy
    assert "None" not in failure.message + failure.remedy


@given(
    st.one_of(st.none(), st.integers(-64, 255)),
    st.lists(st.sampled_from([b.stdout + b.stderr for b, *_ in (*NSYS.values(), *NCU.values())])),
    st.text(),
)
def test_missing_report_is_a_failure_for_any_text(
    returncode: int | None, texts: list[str], noise: str
) -> None:
    report = Path("there/is/no/such.report")
    text = noise + "".join(texts) + noise
    for failure in (
        diagnose("nsys", nsys.RULES, returncode, text, report, 0.0),
        diagnose("ncu", ncu.RULES, returncode, text, report, 0.0),
        nsys.diagnose_export(returncode, text, report),
    ):
        assert failure is not None
        assert failure.code
        assert failure.message


def test_report_with_a_coarse_timestamp_is_fresh(tmp_path: Path) -> None:
    report = tmp_path / "report"
    report.write_bytes(b"x")
    os.utime(report, ns=(0, 1_000_000_000_000_000_000))  # as if stored in whole seconds
    assert report_state(report, 1_000_000_000.9) == "fresh"
    assert report_state(report, 1_000_000_003.0) == "stale"
    os.utime(report, ns=(0, 1_000_000_000_950_000_000))
    assert report_state(report, 1_000_000_001.0) == "fresh"
    assert report_state(report, 1_000_000_001.9) == "stale"


def test_docs_list_every_code() -> None:
    codes = [rule.code for rule in EVERY_RULE]
    page = Path(__file__).parents[2].joinpath("docs", "nsight.md").read_text(encoding="utf-8")
    assert len(codes) > 30
    assert [code for code in codes if f"`{code}`" not in page] == []
