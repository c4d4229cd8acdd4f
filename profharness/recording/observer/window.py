"""The profiler window of an observed process, which is the period that the profiler records.

The window opens when no new kind of call has occurred for some steps, and closes after a few steps.
Only the thread that started PyTorch's profiler can stop it. The main thread lives until the process
ends, so only its steps open and close the window. A process has only one session of the underlying
tracer, so a profiler of the program ends the window early. A fork also ends the window early.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
import threading
from _thread import get_ident
from collections.abc import Callable, Iterator
from typing import Any

import torch

from profharness.recording.observer.journal import Journal

TRIES = 3  # number of lost windows after which no window opens again
SUFFIX = ".torch.json.gz"
ELSEWHERE = "attention ran in other threads, but the profiler records only the main thread"
OWN_PROFILER = "the program ran its own profiler"
TOO_SHORT = "the program ended just after the profiler had started"
STARTS, STOP = ("_prepare_profiler", "_enable_profiler"), "_disable_profiler"


class ProfilerWindow:
    """The profiler window of a process.

    The window opens after `warmup` steps without a new template, and closes after `steps` more
    steps. `profiler` is `torch`, `nsys` or `none`.
    """

    def __init__(self, journal: Journal, profiler: str, steps: int, warmup: int) -> None:
        self.journal = journal
        self.steps, self.warmup, self.profiler = steps, warmup, profiler
        self.state = "waiting" if profiler != "none" and steps > 0 else "off"
        self.quiet = 0  # steps since the last new kind of call
        self.passed = 0  # steps since the window opened
        self.calls = 0  # attention calls since the window opened
        self.tries = 0  # windows that ended early
        self.waited = False  # whether the journal mentions that another profiler runs
        self.others: set[int] = set()  # threads in which the program's own profilers run
        self.busy = False  # whether the window is starting or stopping its profiler
        self.used = False  # whether the profiler was ever started
        self.taken = False  # whether a profiler in another thread uses the tracer's session
        # The id of the main thread, or 0 if another thread imports torch. Only steps of this thread
        # count, because the tracer prints an error in other threads.
        self.home = get_ident() if threading.current_thread() is threading.main_thread() else 0
        self.elsewhere = 0  # number of calls in other threads while the window waits or is open
        self.active: Any = None
        nsys = profiler == "nsys"
        self.ranged: Any = torch.cuda.nvtx.range if nsys else torch.profiler.record_function
        self.step_range: Any = None

    def step(self) -> None:
        if self.state == "open" and self.taken:
            if not self.others:
                self.give_way(OWN_PROFILER)
        elif self.state == "open":
            self._end_step()
            self.passed += 1
            if self.passed >= self.steps:
                self.close()
            else:
                self._begin_step()
        elif self.state == "waiting":
            self.quiet += 1
            if self.quiet >= self.warmup:
                self._begin()

    def first(self) -> None:
        """Open the window before the first call if there is no warm-up."""
        if self.state == "waiting" and self.warmup == 0:
            self._begin()

    def pass_elsewhere(self) -> None:
        self.elsewhere += 1
        if self.elsewhere == 1 and self.state == "waiting":
            self.journal.write("window", state="waiting", why=ELSEWHERE)

    def close(self) -> None:
        if get_ident() != self.home:
            return
        if self.state == "ending":
            self.end_ops()
        if self.state != "open":
            return
        self.state = "closing"
        self._end_step()
        counts = {"steps": self.passed, "elsewhere": self.elsewhere}
        if self.profiler == "nsys":
            torch.cuda.profiler.stop()
            self.state = "ending"
            self.journal.write("window", state="closed", **counts)
            return
        folder = self.journal.folder
        name = f"{os.environ.get('RANK') or os.getpid()}{SUFFIX}"
        if os.path.exists(f"{folder}/{name}"):  # noqa: PTH110
            name = f"{os.environ.get('RANK', 0)}-{os.getpid()}{SUFFIX}"
        try:
            active = self._stop()
            events = active.profiler.kineto_results.events()
            if not (self.passed or self.calls or any("attention" in e.name() for e in events)):
                raise RuntimeError(TOO_SHORT)
            active.export_chrome_trace(f"{folder}/{name}")
        except Exception as error:
            self._lost(str(error))
            return
        self.state = "done"
        self.journal.write("window", state="closed", trace=name, **counts)

    def give_way(self, why: str) -> None:
        """End the window early. It may open again later, but not under nsys. Raise no exception."""
        if get_ident() != self.home:
            return
        if self.profiler == "nsys":  # nsys can record only once
            with contextlib.suppress(Exception):
                self.close()
                self.close()
        elif self.state == "open":
            self.state = "closing"
            with contextlib.suppress(Exception):
                self._end_step()
                self._stop()
            self._lost(why)

    def end_ops(self) -> None:
        """Stop recording ops as NVTX ranges.

        This is delayed until the next call of the model. The window may close inside the range of
        an optimizer step, and PyTorch would warn at the end of that range.
        """
        active, self.active = self.active, None
        self.state = "done"
        with self._own():
            active.__exit__(None, None, None)

    def forget(self) -> None:
        """Discard the parent's window in a forked child."""
        self.active = self.step_range = None
        self.state = "off"
        if not self.used:
            return
        # The destructor of PyTorch's tracer would wait forever for a thread that only the parent
        # has. Therefore skip all destructors at exit, but keep the exit code and flush the output.
        libc = ctypes.CDLL(None)
        with contextlib.suppress(AttributeError):  # only glibc has on_exit
            libc.on_exit(libc._exit, None)
            libc.__cxa_atexit(libc.fflush, None, None)  # the last registered function runs first

    def watch_profilers(self) -> None:
        """End the window early whenever the program starts a profiler."""
        for name in (*STARTS, STOP):
            call = getattr(torch.autograd.profiler, name)
            setattr(torch.autograd.profiler, name, self._watched(call, starts=name != STOP))

    def _watched(self, call: Callable[..., Any], *, starts: bool) -> Callable[..., Any]:
        @functools.wraps(call)
        def watched(*a: Any, **k: Any) -> Any:
            thread = get_ident()
            if not (self.busy and thread == self.home):
                (self.others.add if starts else self.others.discard)(thread)
                if starts and thread != self.home:
                    self.taken |= self.state == "open"
                elif starts:
                    self.give_way(OWN_PROFILER)
            return call(*a, **k)

        return watched

    @contextlib.contextmanager
    def _own(self) -> Iterator[None]:
        self.busy = True
        try:
            yield
        finally:
            self.busy = False

    def _stop(self) -> Any:
        """Stop the profiler and return it.

        Raise RuntimeError if another profiler has ended it or has used the tracer's session.
        """
        active, self.active = self.active, None
        taken, self.taken = self.taken, False
        with self._own():
            if not torch.autograd._profiler_enabled():
                raise RuntimeError("another profiler stopped it")
            if taken:
                active.profiler._prepare_trace()  # without a session, stop() crashes
            active.stop()
        if taken:
            raise RuntimeError(OWN_PROFILER)
        return active

    def _begin(self) -> None:
        if self.others or torch.autograd._profiler_enabled():
            if not self.waited:
                self.waited = True
                self.journal.write("window", state="waiting", why=OWN_PROFILER)
            return
        self.passed = self.elsewhere = self.calls = 0
        try:
            with self._own():
                self._start()
        except Exception as error:
            self.tries = TRIES
            self._lost(str(error))
            return
        self.state = "open"
        self.journal.write("window", state="open")
        self._begin_step()

    def _start(self) -> None:
        if self.profiler == "nsys":
            torch.cuda.profiler.start()
            # Ops become NVTX ranges with the sizes of their tensors, from which the parser
            # recognizes attention calls.
            self.active = torch.autograd.profiler.emit_nvtx(record_shapes=True)
            self.active.__enter__()
        else:
            self.used = True
            self.active = active = torch.profiler._KinetoProfile(record_shapes=True)
            # This does the same as start(), but does not import torch._inductor. That import fails
            # if another thread imports a part of torch._inductor at the same time.
            active.profiler = torch.autograd.profiler.profile(
                use_device=active.use_device, record_shapes=True, use_kineto=True
            )
            config = sys.modules.get("torch._inductor.config")
            active.has_cudagraphs = getattr(getattr(config, "triton", None), "cudagraphs", False)
            active.profiler._prepare_trace()
            active.start_trace()

    def _begin_step(self) -> None:
        self.step_range = self.ranged(f"ProfilerStep#{self.passed}")
        self.step_range.__enter__()

    def _end_step(self) -> None:
        if self.step_range is not None:
            self.step_range.__exit__(None, None, None)
            self.step_range = None

    def _lost(self, why: str) -> None:
        self.tries += 1
        self.quiet = self.elsewhere = 0
        self.state = "waiting" if self.tries < TRIES else "off"
        with contextlib.suppress(OSError):  # the recorder reports if the disk is full
            self.journal.write("window", state="lost", why=why)
