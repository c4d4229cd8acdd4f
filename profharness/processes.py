"""Start child processes, wait for child processes, end them, and handle interrupts."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL_S = 0.02
STEP_S = 0.1  # polling interval of waits that a signal can interrupt
END_GRACE_S = 2.0
ALONE_S = 0.5  # time in which processes may end on their own after the profiler has ended
LOG_BYTES = 10_000_000  # maximum size of the output of a tool and its target
KEPT_BYTES = 1_000_000  # bytes that are kept at the start and at the end of a longer output
MARK_BYTES = 100  # maximum size of the line that replaces the middle of a longer output
PUNCH_HOLE = 1 | 2  # FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE of <linux/falloc.h>
CUT = re.compile(rb"\n\[(\d+) bytes are left out here\]\n")
MAX_TEXT_BYTES = 1 << 20
BRIEF_BYTES = 1 << 20
STARTED_BY = "PROFHARNESS_STARTED_BY"
PR_SET_PDEATHSIG = 1  # this and the next two constants are defined in <linux/prctl.h>
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37


class _SignalDelay:
    """Signal handler that collects the signals received during a `delay_signals` block.

    Before and after the block, forward a signal to the previous handler. Signals can arrive at such
    a time while the handlers are being replaced, or if an exception left this handler installed.
    """

    def __init__(self, *, passes: bool) -> None:
        self.passes = passes
        self.caught: list[int] = []
        self.holds = self.done = False
        handlers = {number: _unwrapped(number) for number in SIGNALS}
        self.before = {number: handler for number, handler in handlers.items() if callable(handler)}

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.holds:
            self.caught.append(number)
        else:
            self.before[signal.Signals(number)](number, frame)


def _unwrapped(number: signal.Signals) -> Any:
    """Return the handler of a signal, ignoring any `_SignalDelay` whose block has ended."""
    handler = signal.getsignal(number)
    while isinstance(handler, _SignalDelay) and handler.done:
        handler = handler.before[number]
    return handler


@contextlib.contextmanager
def delay_signals(*, passes: bool = False) -> Iterator[None]:
    """Delay signals until the block ends, then raise them again.

    If `passes` is set, `raise_deferred_signals` can raise the signals earlier. In threads other
    than the main thread, do nothing, because only the main thread receives signals. Delay only calls
    of Python handlers. A signal without a Python handler still ends the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hold = _SignalDelay(passes=passes)
    try:
        for number in hold.before:
            signal.signal(number, hold)
        hold.holds = True
        yield
    finally:
        hold.holds, hold.done = False, True
        for number, handler in hold.before.items():
            signal.signal(number, handler)
        # raise a repeated signal only once, as the kernel does for pending signals
        for late in dict.fromkeys(hold.caught):
            signal.raise_signal(late)


@contextlib.contextmanager
def defer_signals() -> Iterator[None]:
    """Delay signals until the block ends or calls `raise_deferred_signals`.

    Otherwise, a signal could interrupt code that another thread waits for, such as an import that
    holds the import lock.
    """
    if _holds():
        yield
        return
    with delay_signals(passes=True):
        yield


def raise_deferred_signals() -> None:
    """Raise the signals that a `defer_signals` block has delayed.

    Do nothing within a `delay_signals` block.
    """
    for hold in _holds() if threading.current_thread() is threading.main_thread() else ():
        while hold.passes and hold.caught:
            number = hold.caught[0]
            hold.caught = [caught for caught in hold.caught if caught != number]
            hold.before[signal.Signals(number)](number, None)


def _holds() -> list[_SignalDelay]:
    """Return a list with the `_SignalDelay` that currently receives signals, or an empty list."""
    handlers = (_unwrapped(number) for number in SIGNALS)
    return [handler for handler in handlers if isinstance(handler, _SignalDelay)][:1]


@contextlib.contextmanager
def garbage_collection_off() -> Iterator[None]:
    """Disable the cyclic garbage collector while many objects without cycles are created.

    With the collector, an ingest takes about 10 % longer.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class ProcessGroup(subprocess.Popen[bytes]):
    """A child process that leads a process group and a session."""

    logs: tuple[Path, ...] = ()
    cut_bytes: int = 0  # number of bytes that were removed from the first log
    paused_s: float = 0.0

    def shorten_logs(self) -> None:
        """Free the disk space of the middle of each log that is too long.

        If the process has ended, or if the file system cannot free blocks within a file, remove the
        middle from the file.
        """
        for log in self.logs:
            if self.returncode is None and hollow(log):
                continue
            cut = shorten(log)
            self.cut_bytes += cut if log == self.logs[0] else 0


def hollow(log: Path) -> bool:
    """Free the disk blocks in the middle of a file that is larger than LOG_BYTES.

    All other bytes keep their positions in the file, so concurrent writes are not lost. Return
    False if the file system cannot free blocks within a file.
    """
    try:
        state = log.stat()
        length = state.st_size - 2 * KEPT_BYTES
        # st_blocks counts units of 512 bytes on every disk
        if min(state.st_size, state.st_blocks * 512) <= LOG_BYTES or length <= 0:
            return True
        begin = KEPT_BYTES + MARK_BYTES  # after the line that `shorten` may have inserted earlier
        with log.open("r+b") as file:
            # os.posix_fallocate cannot punch holes
            fallocate = ctypes.CDLL(None).fallocate64
            fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
            return int(fallocate(file.fileno(), PUNCH_HOLE, begin, length)) == 0
    except AttributeError:
        return False
    except OSError:
        return True  # the file was deleted in the meantime


def shorten(log: Path) -> int:
    """Replace the middle of a file that is larger than LOG_BYTES with one line.

    The line contains the number of removed bytes. Programs that have opened the file for appending
    continue at the new end of the file. Return the number of bytes by which the size decreased, or
    0 if the file was not changed.
    """
    try:
        state = log.stat()
        if state.st_size <= LOG_BYTES:
            return 0
        with log.open("r+b") as file, log.open("ab", buffering=0) as end:
            file.seek(KEPT_BYTES)
            earlier = CUT.match(file.read(MARK_BYTES))
            file.seek(state.st_size - KEPT_BYTES)
            tail = file.read(KEPT_BYTES)
            left_out = state.st_size - 2 * KEPT_BYTES
            omitted = left_out + (int(earlier[1]) - len(earlier[0]) if earlier else 0)
            mark = b"\n[%d bytes are left out here]\n" % omitted
            file.truncate(KEPT_BYTES)
            end.write(mark + tail)
    except OSError:  # the file was deleted in the meantime, or the disk is full
        return 0
    return left_out - len(mark)


def read_end(path: Path, begin: int = 0, limit: int = MAX_TEXT_BYTES) -> str:
    """Return at most the last `limit` bytes of a text file. Ignore the bytes before `begin`.

    Return an empty string if the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(begin, file.seek(0, os.SEEK_END) - limit))
            return file.read(limit).decode(errors="replace")
    except OSError:
        return ""


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Return whether a process has ended. Shorten the logs of a ProcessGroup.

    Delay signals during Popen.poll(), because an exception from a signal handler could leave Popen's
    lock locked. In that case, wait() would never return.
    """
    with delay_signals():
        ended = process.poll() is not None
        if isinstance(process, ProcessGroup):
            process.shorten_logs()
        return ended


def wait_for(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait at most `seconds` for a process to end, and return whether it has ended.

    Signals interrupt the wait.
    """
    deadline = time.monotonic() + seconds
    while not has_ended(process):
        raise_deferred_signals()
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


@contextlib.contextmanager
def stopped_together(process: ProcessGroup, mark: Mapping[str, str]) -> Iterator[None]:
    """Stop and continue the marked processes together with this process while the block runs.

    Ctrl-Z (SIGTSTP) stops this process and all processes with `mark` in their environment. When this
    process continues, the marked processes also continue. Do nothing if SIGTSTP already has a handler.
    """

    def stop(number: int, _: FrameType | None) -> None:
        begin = time.monotonic()
        pids = _marked(mark)
        # SIGSTOP, because SIGTSTP does not stop processes in a session without a shell
        for pid in pids:
            kill(pid, signal.SIGSTOP)
        try:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)  # stops this process here
        finally:
            signal.signal(number, stop)
            for pid in pids:
                kill(pid, signal.SIGCONT)
            process.paused_s += time.monotonic() - begin

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTSTP) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTSTP, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)


@contextlib.contextmanager
def orphans_adopted(
    report: Callable[[str], None] = lambda _: None, mark: Mapping[str, str] | None = None
) -> Iterator[dict[str, str]]:
    """Adopt the orphaned descendants of this process during the block, and end them afterward.

    Yield an environment variable as a mark for child processes. End only processes with this
    variable in their environment. Other orphans may belong to another program, so call `report`
    with a sentence about each orphan. This function has an effect only on Linux.
    """
    # the mark must be unique, because another profharness may run at the same time
    mark = dict(mark or new_mark())
    # processes that existed before the block belong to another program
    adopts, before = _adopt(1), set(_adopted())
    try:
        yield mark
    finally:
        with delay_signals():
            end_marked(mark)
            for pid, name in _adopted().items():
                if pid not in before:
                    report(f"process {pid} ({name}) is still running; end it with: kill {pid}")
            if adopts is not None:
                _adopt(adopts)


def new_mark() -> dict[str, str]:
    """Return a unique environment variable that marks child processes and their descendants."""
    return {STARTED_BY: secrets.token_hex(8)}


def _adopted() -> dict[int, str]:
    """Return the names of this process's children in other sessions, by process id."""
    names = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            # the process name in parentheses may contain spaces
            name, _, rest = path.read_text(errors="replace").rpartition(")")
            state, parent, _, session = rest.split()[:4]
            own = int(parent) == os.getpid() and int(session) != os.getsid(0)
            if own and state != "Z":
                names[int(path.parent.name)] = name.partition("(")[2]
    return names


def wake_with_parent() -> None:
    """Ask the kernel to continue this process when its parent ends.

    Otherwise, a stopped process would not notice that its parent has ended.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGCONT), 0, 0, 0)


def end_with_parent(parent: int) -> None:
    """Ask the Linux kernel to send SIGTERM to this process when the parent thread ends.

    If the parent has already ended, raise SIGTERM now.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        signal.raise_signal(signal.SIGTERM)


def _adopt(on: int) -> int | None:
    """Set whether orphaned descendants of this process become its children.

    Return the previous setting, or None if the system does not support such a setting.
    """
    before = ctypes.c_int()
    try:
        prctl = ctypes.CDLL(None).prctl
    except (AttributeError, OSError):
        return None
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, on, 0, 0, 0)
    return before.value


def end_marked(mark: Mapping[str, str]) -> None:
    """End all processes that have `mark` in their environment.

    Wait briefly until the processes end on their own, then send SIGTERM, and finally SIGKILL.
    """
    ended: set[int] = set()
    for number, seconds in ((None, ALONE_S), (signal.SIGTERM, 1.0), (signal.SIGKILL, END_GRACE_S)):
        deadline = time.monotonic() + seconds
        while pids := _marked(mark):
            ended.update(pids)
            for pid in pids:
                if number is not None:
                    kill(pid, number)
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
    for pid in ended:
        with contextlib.suppress(ChildProcessError):
            # adopted processes are children of this process, and without a wait they become zombies
            os.waitpid(pid, os.WNOHANG)


def _marked(mark: Mapping[str, str]) -> list[int]:
    ((name, value),) = mark.items()
    text, pids = os.fsencode(f"{name}={value}"), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        # the process belongs to another user, or has just ended
        with contextlib.suppress(OSError):
            if text in path.read_bytes().split(b"\0"):
                pids.append(int(path.parent.name))
    return pids


WORKER_SCRIPT = Path(__file__).resolve().parent / "recording" / "worker" / "foreign_python.py"
"""Script that starts the worker in a Python that does not have profharness installed."""


def find_workers(folder: Path) -> list[int]:
    """Return the process IDs of the workers that have the run folder as their last argument.

    The result includes workers whose parent process has died.
    """
    pids, script = [], os.fsencode(WORKER_SCRIPT)
    for path in Path("/proc").glob("[0-9]*"):
        try:
            # cmdline ends with a NUL byte
            arguments = (path / "cmdline").read_bytes().split(b"\0")[:-1]
        except OSError:
            continue
        if (
            arguments
            and (arguments[0] == os.fsencode(sys.executable) or script in arguments)
            and arguments[-1] == os.fsencode(folder)
        ):
            pids.append(int(path.name))
    return pids


def kill(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may no longer exist."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def kill_group(process: subprocess.Popen[bytes], number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to all processes of the group that a process leads."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def start_group(
    argv: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    *,
    short: bool = False,
    **options: Any,
) -> ProcessGroup:
    """Start a child process that leads its own process group and session.

    Append stdout and stderr of the child to `log`, unless `options` redirects them. If `short` is
    set, `shorten_logs` keeps the log below LOG_BYTES. Raise OSError if the process does not start.
    """
    with log.open("ab") as file:
        group = ProcessGroup(
            argv,
            stdout=file,
            env=environment,
            start_new_session=True,
            **{"stdin": subprocess.DEVNULL, "stderr": file, **options},
        )
    group.logs = (log,) if short else ()
    return group


@dataclass
class PrewarmedWorker:
    """A worker that loads torch while this process plans the run."""

    group: ProcessGroup
    line: socket.socket
    environment: dict[str, str]
    mark: dict[str, str]
    used: bool = False

    @classmethod
    def start(cls) -> PrewarmedWorker:
        """Start the process. Raise OSError if the process does not start."""
        mine, its = socket.socketpair()
        environment, mark = child_environment(), new_mark()
        argv = [sys.executable, "-P", "-m", "profharness.recording.worker"]
        with its, delay_signals():
            group = start_group(argv, Path(os.devnull), environment | mark, stdin=its)
        return cls(group, mine, environment, mark)

    def send(
        self, arguments: Sequence[str], log: Path, descriptors: Sequence[int]
    ) -> ProcessGroup | None:
        """Send the worker its arguments. Return the process, or None if the process has ended."""
        try:
            with log.open("ab") as file:
                order = "\0".join(arguments).encode()
                socket.send_fds(self.line, [order], [file.fileno(), *descriptors])
        except OSError:  # the process has ended
            self.end()
            return None
        self.line.close()
        self.group.logs = (log,)
        self.used = True
        return self.group

    def end(self) -> None:
        """End the process, unless `send` has turned it into the worker of a run."""
        if self.used:
            return
        with delay_signals():
            self.line.close()
            kill_group(self.group)
            wait_for(self.group, END_GRACE_S)


@contextlib.contextmanager
def prewarmed_worker(*, wanted: bool = True) -> Iterator[PrewarmedWorker | None]:
    """Yield a PrewarmedWorker, and end it if the block does not use it.

    Yield None if `wanted` is False or if the process does not start. After a failed start, the caller
    starts a worker in the usual way and reports the cause.
    """
    worker = None
    if wanted:
        with contextlib.suppress(OSError):
            worker = PrewarmedWorker.start()
    try:
        yield worker
    finally:
        if worker is not None:
            worker.end()


def run_to_end(
    argv: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    timeout_s: float,
    **options: Any,
) -> int | None:
    """Start a child process with `start_group`, and wait until it ends or the timeout expires.

    Then end the whole process group, even if the wait was interrupted. Return the exit code of the
    process, or None if the timeout expired.
    """
    process: ProcessGroup | None = None
    try:
        with delay_signals():  # an interrupt inside Popen() would leave an untracked child
            process = start_group(argv, log, environment, **options)
        return _waited(process, timeout_s)
    finally:
        if process is not None:
            _end_group(process)
            process.shorten_logs()


def _waited(process: ProcessGroup, timeout_s: float) -> int | None:
    """Wait for a process and return its exit code, or None after the timeout.

    Signals interrupt the wait.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(max(0.0, min(STEP_S, deadline - time.monotonic())))
        raise_deferred_signals()
        process.shorten_logs()
        if time.monotonic() > deadline:
            return None


def _end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        kill_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_GRACE_S)
    finally:
        kill_group(process)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_GRACE_S)


def run_briefly(
    argv: Sequence[str], timeout_s: float, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str] | None:
    """Run a short child process, and return its exit code and output.

    Then end the whole process group. If the process writes BRIEF_BYTES to stdout or stderr, end the
    group early. Return None if the process does not start or takes longer than `timeout_s`.
    """
    process: ProcessGroup | None = None
    try:
        with delay_signals():
            process = ProcessGroup(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        texts = _both_streams(process, time.monotonic() + timeout_s)
    except OSError:
        return None
    finally:
        if process is not None:
            _end_group(process)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
    if texts is None:
        return None
    output, errors = (text.decode(errors="replace") for text in texts)
    return subprocess.CompletedProcess(argv, process.returncode, output, errors)


def _both_streams(process: ProcessGroup, deadline: float) -> list[bytearray] | None:
    """Read stdout and stderr until the process ends or one stream contains BRIEF_BYTES.

    Return None if the deadline passes first.
    """
    assert process.stdout is not None and process.stderr is not None
    streams = (process.stdout, process.stderr)
    for stream in streams:
        # a blocking read of one stream would deadlock if the child fills the pipe of the other one
        os.set_blocking(stream.fileno(), False)
    texts = [bytearray(), bytearray()]
    while True:
        ended = has_ended(process)
        for text, stream in zip(texts, streams, strict=True):
            while len(text) < BRIEF_BYTES and (more := stream.read(1 << 16)):
                text += more
        if ended or any(len(text) >= BRIEF_BYTES for text in texts):
            return texts
        raise_deferred_signals()
        if time.monotonic() > deadline:
            return None
        time.sleep(POLL_S)


def child_environment() -> dict[str, str]:
    """Return an environment in which a child process can import profharness.

    Copy the environment of this process, and append the folder of the package to PYTHONPATH.
    """
    root = str(Path(__file__).resolve().parents[1])
    path = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{root}" if path else root}


def with_startup(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return a copy of the environment with the folder as the first entry of PYTHONPATH."""
    path = environment.get("PYTHONPATH")
    return {**environment, "PYTHONPATH": f"{folder}{os.pathsep}{path}" if path else str(folder)}


def start_python(code: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start a child process that runs `code` in this Python, with pipes to its stdin and stdout.

    Tracebacks of the child are lost unless `options` redirects stderr. The option -P excludes the
    working directory from sys.path.
    """
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        **{"env": child_environment(), "stderr": subprocess.DEVNULL, **options},
    )


FORWARDED = (*SIGNALS, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
FROM_KERNEL = 0x80  # SI_KERNEL, the code of a signal that a terminal sent to the process group


def run_in_place(argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run a child process that shares the streams and the process group of this process.

    Forward signals to the child, except signals that a terminal has sent to both processes. Return
    the exit code of the child. Raise OSError if the child does not start.
    """
    # SIGCHLD ends the wait when the child ends
    wanted = {signal.SIGCHLD, *FORWARDED}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
    try:
        child = subprocess.Popen(
            argv,
            env=environment,
            # otherwise, the child would inherit the mask and receive none of these signals
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),
        )
        while child.poll() is None:
            received = signal.sigtimedwait(wanted, STEP_S)
            if received and received.si_signo != signal.SIGCHLD and received.si_code != FROM_KERNEL:
                kill(child.pid, signal.Signals(received.si_signo))
        return child.returncode
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
