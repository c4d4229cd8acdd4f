"""Interrupts of a capture under a tool that ignores them: messages, duration, and what is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fake_tools import Behaviour, Scenario, install
from kill_lanes import stand_in
from waiting import PATIENCE_S, until

from profharness.errors import NotFoundError, UsageError
from profharness.jobs.background_ingest import open_background_ingest
from profharness.jobs.into_store import find_run_folder, resume_into_store
from profharness.processes import (
    defer_signals,
    delay_signals,
    has_ended,
    raise_deferred_signals,
    wait_for,
)
from profharness.recording.profilers import base
from profharness.run import read_run
from profharness.store import open_store

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# The command line, giving the tool more time than any test waits; a second interrupt ends it.
UNHURRIED = """
from profharness.cli import main
from profharness.recording.profilers import base
base.GRACE_S = base.HURRIED_S = (86400.0,) * 3
main()
"""
# The command line, giving the tool unlimited time unless it is interrupted.
PATIENT = """
from profharness.cli import main
from profharness.recording.profilers import base
base.GRACE_S = (86400.0,) * 3
main()
"""
# Sends SIGTERM at the n-th import after the run folder exists, in any thread.
AIMED = """
import os, signal, sys
left, seen = int(sys.argv.pop(1)), False
def hook(event, arguments):
    global left, seen
    if event == "os.mkdir" and "runs/" in str(arguments[0]):
        seen = True
    elif event == "import" and seen:
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGTERM)
sys.addaudithook(hook)
from profharness.cli import main
main()
"""
STUBBORN = Scenario(nsys=Behaviour(hang=True, ignore_signals=True, report="none"))


def running(marks: tuple[Path, ...]) -> list[str]:
    """Return the command lines of living processes that name one of the paths."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line, state = (path / "cmdline").read_bytes(), (path / "stat").read_text()
        except OSError:
            continue
        if any(os.fsencode(mark) in line for mark in marks) and ") Z" not in state:
            found.append(line.replace(b"\0", b" ").decode())
    return found


def start(
    folder: Path, scenario: Scenario, program: Sequence[str] = ("-m", "profharness")
) -> subprocess.Popen[str]:
    """Start a capture whose only cell has ended under a stand-in for nsys, which goes on."""
    for name in ("bin", "tmp"):
        (folder / name).mkdir()
    install(folder / "bin", scenario)
    environment = {
        **os.environ,
        "PATH": f"{folder / 'bin'}:/usr/bin:/bin",
        "TMPDIR": str(folder / "tmp"),
        "PROFHARNESS_NSYS": "",
    }
    process = subprocess.Popen(
        [
            *(sys.executable, *program, "capture", "--config", "1,2,16,16"),
            *("--backend", "math", "--profiler", "nsys", "--device", "cpu", "--samples", "0"),
            *("--out", str(folder / "runs"), "--store", str(folder / "s.db")),
            *("--python", str(stand_in(folder))),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    until(lambda: any(b'"end"' in each.read_bytes() for each in journals(folder)), process)
    return process


def journals(folder: Path) -> list[Path]:
    return list((folder / "runs").glob("*/journal.jsonl"))


def ended(process: subprocess.Popen[str], folder: Path) -> tuple[int, str]:
    """Return the exit code and stderr, and check that no process is left."""
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert running((folder / "bin", folder / "runs")) == []
    assert list((folder / "tmp").glob("profharness-*")) == []
    return process.returncode, errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_second_interrupt_ends_the_tool_at_once(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, STUBBORN, ("-c", UNHURRIED))
    process.send_signal(number)
    assert process.stderr is not None
    told = ""
    while (
        "stopping nsys, which is still writing its report (press Ctrl-C again to stop it now)"
        not in told
    ):
        told = process.stderr.readline()
        assert told, process.communicate()
    process.send_signal(number)
    code, errors = ended(process, tmp_path)
    assert code == 128 + number
    assert "capture --resume" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("pause_s", [0.02, 0.1])
def test_many_interrupts_skip_no_cleanup(tmp_path: Path, pause_s: float) -> None:
    process = start(tmp_path, STUBBORN)
    for _ in range(12):
        process.send_signal(signal.SIGINT)
        time.sleep(pause_s)
        if process.poll() is not None:
            break
    code, _ = ended(process, tmp_path)
    assert code in (130, -signal.SIGINT)  # the last one may arrive while Python shuts down


def test_one_interrupt_prints_a_notice_and_waits_briefly(tmp_path: Path) -> None:
    assert sum(base.HURRIED_S) < 20
    process = start(tmp_path, STUBBORN, ("-c", PATIENT))
    process.send_signal(signal.SIGTERM)
    code, errors = ended(process, tmp_path)
    assert code == 143
    assert "stopping nsys" in errors


def test_tool_that_obeys_an_interrupt_is_not_a_timeout(tmp_path: Path) -> None:
    process = start(tmp_path, Scenario(nsys=Behaviour(hang=True)))
    process.send_signal(signal.SIGINT)
    code, _ = ended(process, tmp_path)
    assert code == 130
    (record,) = (tmp_path / "runs").glob("*/run.json")
    assert '"timeout"' not in record.read_text().replace('"timeout_s"', "")
    assert "took too long" not in record.read_text()


def test_interrupted_verification_says_what_is_kept_and_cannot_resume(tmp_path: Path) -> None:
    runs, store = tmp_path / "runs", tmp_path / "s.db"
    argv = [
        *(sys.executable, "-m", "profharness", "verify", "--config", "1,4,64,16,fp32"),
        *("--backend", "math,flash", "--device", "cpu", "--out", str(runs), "--store", str(store)),
    ]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until(lambda: any(b'"end"' in each.read_bytes() for each in journals(tmp_path)), process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    (folder,) = runs.iterdir()
    assert process.returncode == 130
    stopped = read_run(folder)
    done = [cell for cell in stopped.cells if cell.checks]
    assert 0 < len(done) < len(stopped.cells)
    assert "--resume" not in errors
    assert f"{len(done)} of {len(stopped.cells)} checks are done" in errors
    command = f"profharness ingest {folder} --store {store}"
    assert command in errors
    with pytest.raises(UsageError, match="profharness verify"):
        resume_into_store(folder, store)
    with pytest.raises(NotFoundError, match="profharness verify"):
        find_run_folder("latest", runs)
    assert read_run(folder) == stopped
    subprocess.run([sys.executable, "-m", *command.split()], check=True, capture_output=True)
    with open_store(store) as opened:
        rows = opened.verifications(folder.name)
    assert {(row.case, row.backend) for row in rows} == {(cell.case, cell.backend) for cell in done}


def test_interrupted_run_in_a_temporary_folder_offers_nothing_to_resume(tmp_path: Path) -> None:
    for name in ("kernels", "tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "kernels" / "slow.py").write_text(
        "import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(86400)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "profharness", "backends"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
    )
    until((tmp_path / "begun").exists, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, "interrupted" in errors) == (130, True), errors
    assert "Traceback" not in errors
    assert "--resume" not in errors
    assert running((tmp_path / "tmp",)) == []


@pytest.mark.parametrize("moment", [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 120])
def test_signal_at_any_moment_of_the_start_ends_a_capture(tmp_path: Path, moment: int) -> None:
    argv = [
        *(sys.executable, "-c", AIMED, str(moment), "capture", "--config", "1,1,8,8"),
        *("--backend", "math", "--device", "cpu", "--out", str(tmp_path / "runs")),
        *("--store", str(tmp_path / "s.db")),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (143, False), done.stderr
    assert f"capture --resume {tmp_path / 'runs'}" in done.stderr
    assert running((tmp_path / "runs",)) == []


def test_deferred_signals_are_raised_on_demand_and_at_the_end() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt), defer_signals():
        signal.raise_signal(signal.SIGINT)
        steps.append("put off")
        with delay_signals():
            raise_deferred_signals()
            steps.append("held")
        with defer_signals():
            steps.append("within")
        raise_deferred_signals()
        steps.append("never")
    with pytest.raises(KeyboardInterrupt):
        with defer_signals():
            signal.raise_signal(signal.SIGINT)
        steps.append("never")
    assert steps == ["put off", "held", "within"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_preparation_in_a_thread_is_not_interrupted(tmp_path: Path) -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt), open_background_ingest(tmp_path / "s.db"):
        signal.raise_signal(signal.SIGINT)
        steps.append("goes on")
        raise_deferred_signals()
        steps.append("never")
    assert steps == ["goes on"]


def test_held_signals_are_raised_after_the_block() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt):
        with delay_signals():
            signal.raise_signal(signal.SIGINT)
            steps.append("inside")
        steps.append("after")
    assert steps == ["inside"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_held_does_nothing_in_another_thread() -> None:
    steps = []

    def work() -> None:
        with delay_signals():
            steps.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert steps == [signal.default_int_handler]


def storm(times: int, body: Callable[[], object]) -> None:
    """Interrupt the body that many times, each time microseconds after its start."""
    interrupted = 0
    chance = random.Random(1)
    alarm = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        while interrupted < times:
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 4e-4))
                while True:
                    body()
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, alarm)


def test_process_can_be_waited_for_after_interrupts_at_any_moment() -> None:
    """With Popen.poll() alone, its lock is soon left locked, and wait() never returns."""
    process = subprocess.Popen(["sleep", "86400"])
    try:
        storm(2000, lambda: has_ended(process))
    finally:
        process.kill()
    assert wait_for(process, PATIENCE_S)
    assert process.wait(PATIENCE_S) == -signal.SIGKILL


def test_wait_for_gives_up() -> None:
    process = subprocess.Popen(["sleep", "86400"])
    try:
        begin = time.monotonic()
        assert not wait_for(process, 0.2)
        assert time.monotonic() - begin >= 0.2
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


LOST = """
import os, signal, sys, weakref
from profharness.cli import _end_in_order

class Module: ...

_end_in_order()
module = Module()
lost = weakref.ref(module, lambda _: os.kill(os.getpid(), int(sys.argv[1])))
try:
    del module
    signal.pause()
except KeyboardInterrupt as error:
    print(type(error).__name__, *error.args)
"""


@pytest.mark.parametrize(
    ("number", "raised"),
    [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "TerminatedError 15")],
)
def test_interrupt_in_a_callback_is_not_lost(number: signal.Signals, raised: str) -> None:
    """Python prints and drops exceptions there. The callback of an import lock is an example."""
    argv = [sys.executable, "-c", LOST, str(int(number))]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.stdout.strip(), done.stderr) == (raised, "")
