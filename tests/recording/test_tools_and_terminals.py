"""Output of tools, processes that they leave, and Ctrl-Z, with real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import PATIENCE_S, alive, until, written_pid

from profharness import processes
from profharness.processes import (
    KEPT_BYTES,
    LOG_BYTES,
    hollow,
    orphans_adopted,
    read_end,
    run_briefly,
    run_to_end,
    shorten,
    start_group,
    stopped_together,
    wait_for,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(86400)
    os._exit(0)
os.wait()
while not os.path.exists(sys.argv[1]) or not open(sys.argv[1]).read():
    time.sleep(0.01)
"""


def python(code: str, *arguments: object) -> list[str]:
    return [sys.executable, "-IS", "-c", code, *map(str, arguments)]


def environment(mark: dict[str, str]) -> dict[str, str]:
    return {**os.environ, **mark}


def test_long_log_keeps_head_and_tail_and_the_size_of_the_gap(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"first\n" + b"x" * LOG_BYTES)
        assert shorten(log) > 0
        writer.write(b"y" * LOG_BYTES + b"\nlast\n")  # as if by a process that still has it open
        assert shorten(log) > 0
    data = log.read_bytes()
    assert data.startswith(b"first\n")
    assert data.endswith(b"\nlast\n")
    assert len(data) < 2 * KEPT_BYTES + 100
    (told,) = re.findall(rb"\[(\d+) bytes are left out here\]", data)
    assert int(told) + 2 * KEPT_BYTES == 2 * LOG_BYTES + len(b"first\n\nlast\n")
    assert shorten(log) == 0
    assert read_end(log, limit=6) == "\nlast\n"
    assert shorten(tmp_path / "none") == 0
    assert read_end(tmp_path / "none") == ""


def test_endless_output_does_not_fill_the_disk(tmp_path: Path) -> None:
    code = (
        "import os\nfor _ in range(400): os.write(1, b'z' * 1_000_000)\nprint('done', flush=True)"
    )
    log = tmp_path / "log"
    assert run_to_end(python(code), log, os.environ, PATIENCE_S, short=True) == 0
    assert log.stat().st_size <= LOG_BYTES
    assert read_end(log).endswith("done\n")


def test_middle_of_a_growing_log_takes_no_space(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"first\n" + b"x" * 3 * LOG_BYTES + b"\nlast\n")
        if not hollow(log):
            pytest.skip("this file system cannot free the middle of a file")
        writer.write(b"more\n")
    assert log.stat().st_blocks * 512 < LOG_BYTES
    assert log.stat().st_size == 3 * LOG_BYTES + len("first\n\nlast\nmore\n")
    shorten(log)
    assert log.read_bytes().startswith(b"first\n")
    assert read_end(log, limit=11) == "\nlast\nmore\n"[-11:]


def test_endless_version_output_is_cut_and_leaves_no_child(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    code = (
        "import os, subprocess, sys\n"
        "child = subprocess.Popen(['sleep', '86400'])\n"
        "open(sys.argv[1], 'w').write(str(child.pid))\n"
        "print('version 1.2.3', flush=True)\n"
        "while True: os.write(1, b'z' * 1_000_000)\n"
    )
    done = run_briefly(python(code, pid), PATIENCE_S)
    assert done is not None
    assert done.stdout.startswith("version 1.2.3\n")
    assert len(done.stdout) < 2 * processes.BRIEF_BYTES
    child = written_pid(pid)
    assert child is not None
    until(lambda: not alive(child))


def test_hanging_wrapper_leaves_no_child(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    wrapper = tmp_path / "nsys"
    wrapper.write_text(f"#!/bin/sh\nsleep 86400 &\necho $! > {pid}\nwait\n")
    wrapper.chmod(0o755)
    assert run_briefly([str(wrapper), "--version"], 1.0) is None
    child = written_pid(pid)
    if child is not None:  # the time limit may end the wrapper before it does anything
        until(lambda: not alive(child))


def test_output_is_complete_although_a_child_keeps_the_pipe_open(tmp_path: Path) -> None:
    done = run_briefly(["sh", "-c", "sleep 86400 & echo hello; echo ohoh >&2; exit 3"], PATIENCE_S)
    assert done is not None
    assert (done.stdout, done.stderr, done.returncode) == ("hello\n", "ohoh\n", 3)
    assert run_briefly([str(tmp_path / "none")], 1.0) is None


def test_daemon_in_its_own_session_is_ended(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    with orphans_adopted() as mark:
        tool = start_group(python(DAEMON, path), tmp_path / "log", environment(mark))
        assert wait_for(tool, PATIENCE_S)
        daemon = written_pid(path)
        assert daemon is not None
        assert alive(daemon)
    assert not alive(daemon)


def test_unidentifiable_daemon_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "pid"
    told: list[str] = []
    try:
        with orphans_adopted(told.append):
            tool = start_group(python(DAEMON, path), tmp_path / "log", os.environ)
            assert wait_for(tool, PATIENCE_S)
        daemon = written_pid(path)
        assert daemon is not None
        assert alive(daemon)
        assert [f"process {daemon} (" in text for text in told] == [True]
    finally:
        if (daemon := written_pid(path)) is not None:
            os.kill(daemon, signal.SIGKILL)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


STOPPED = """
import sys, time, os
from pathlib import Path
from profharness.processes import has_ended, orphans_adopted, start_group, stopped_together
folder = Path(sys.argv[1])
with orphans_adopted() as mark:
    child = start_group(["sleep", "86400"], folder / "log", {**os.environ, **mark})
    with stopped_together(child, mark):
        (folder / "pid").write_text(str(child.pid))
        while not (folder / "enough").exists():
            time.sleep(0.01)
    child.kill()
    child.wait()
print(child.paused_s)
"""


def test_ctrl_z_stops_the_worker_too(tmp_path: Path) -> None:
    """The process has its own group in this session: the shell must stop it, not the kernel."""
    parent = subprocess.Popen(
        [sys.executable, "-c", STOPPED, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    )
    until(lambda: written_pid(tmp_path / "pid"), parent)
    child = written_pid(tmp_path / "pid")
    assert child is not None
    parent.send_signal(signal.SIGTSTP)
    until(lambda: state(child) == "T" and state(parent.pid) == "T", parent)
    parent.send_signal(signal.SIGCONT)
    until(lambda: state(child) == "S", parent)
    (tmp_path / "enough").touch()
    output, _ = parent.communicate(timeout=PATIENCE_S)
    assert parent.returncode == 0
    assert float(output) > 0


WOKEN = """
import os, sys, time
from pathlib import Path
from profharness.processes import start_group
folder = Path(sys.argv[1])
code = (
    "import os, sys, time; from profharness.processes import wake_with_parent; "
    "wake_with_parent(); open(sys.argv[1], 'w').write(str(os.getpid())); "
    "parent = os.getppid()\\nwhile os.getppid() == parent: time.sleep(0.01)"
)
start_group([sys.executable, "-c", code, str(folder / "pid")], folder / "log", os.environ)
time.sleep(86400)
"""


def test_stopped_worker_ends_with_its_killed_parent(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", WOKEN, str(tmp_path)])
    until(lambda: written_pid(tmp_path / "pid"), parent)
    child = written_pid(tmp_path / "pid")
    assert child is not None
    os.kill(child, signal.SIGSTOP)
    until(lambda: state(child) == "T", parent)
    parent.kill()
    parent.wait()
    until(lambda: not alive(child))


def test_stop_signal_with_a_handler_is_not_intercepted(tmp_path: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTSTP, lambda number, _: seen.append(number))
    try:
        with orphans_adopted() as mark:
            child = start_group(["sleep", "86400"], tmp_path / "log", environment(mark))
            with stopped_together(child, mark):
                signal.raise_signal(signal.SIGTSTP)
            child.kill()
            child.wait()
    finally:
        signal.signal(signal.SIGTSTP, before)
    assert seen == [signal.SIGTSTP]
