"""The profiler window of an observed process: opened once nothing new comes, closed after a few steps."""

from __future__ import annotations

import os
from typing import Any

import torch

from profharness.observer.journal import Journal, say

TRIES = 3  # windows that another profiler may break
SUFFIX = ".torch.json.gz"


class Window:
    """steps: how many steps the window holds; warmup: steps without a new template before it opens.
    profiler is `torch`, `nsys` or `none`.
    """

    def __init__(self, journal: Journal, profiler: str, steps: int, warmup: int) -> None:
        self.journal = journal
        self.steps, self.warmup, self.profiler = steps, warmup, profiler
        self.state = "waiting" if profiler != "none" and steps > 0 else "off"
        self.quiet = self.passed = self.tries = 0
        self.waited = False  # for the user's own profiler, and told so
        self.active: Any = None
        nsys = profiler == "nsys"
        self.ranged: Any = torch.cuda.nvtx.range if nsys else torch.profiler.record_function
        self.step_range: Any = None

    @property
    def open(self) -> bool:
        """Whether calls are to be marked."""
        return self.state == "open"

    def fresh(self) -> None:
        """A new template came."""
        self.quiet = -1  # this step does not count

    def step(self) -> None:
        """A step has ended, and the next one begins."""
        if self.state == "open":
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
        """The first call is about to be made."""
        if self.state == "waiting" and self.warmup == 0:
            self._begin()

    def close(self) -> None:
        """End the window and write its trace."""
        if self.state == "ending":
            self.end_ops()
        if self.state != "open":
            return
        self.state = "closing"
        self._end_step()
        if self.profiler == "nsys":
            torch.cuda.profiler.stop()
            self.state = "ending"
            self.journal.write("window", state="closed", steps=self.passed)
            return
        active, self.active = self.active, None
        try:
            if not torch.autograd._profiler_enabled():
                raise RuntimeError("another profiler ended it")
            active.stop()
            events = active.profiler.kineto_results.events()
            if not events:
                raise RuntimeError("it holds no event")
            name = self._write(active)
        except Exception as error:
            self._lost(error)
            return
        self.state = "done"
        self.journal.write("window", state="closed", steps=self.passed, trace=name)

    def end_ops(self) -> None:
        """Let ops be no ranges any more. A window closes inside of the range of an optimizer's step, of
        whose end PyTorch would warn then; the next call of the model lies outside.
        """
        active, self.active = self.active, None
        self.state = "done"
        active.__exit__(None, None, None)

    def forget(self) -> None:
        """The parent's window is not this forked child's."""
        self.active = self.step_range = None
        self.state = "off"

    def _begin(self) -> None:
        if torch.autograd._profiler_enabled():
            if not self.waited:
                self.waited = True
                say("the program runs a profiler of its own; the window waits for its end")
                self.journal.write("window", state="waiting", why="the program's own profiler")
            return
        self.passed = 0
        try:
            if self.profiler == "nsys":
                torch.cuda.profiler.start()
                # ops with the sizes of their tensors become NVTX ranges, else no call can be told
                self.active = torch.autograd.profiler.emit_nvtx(record_shapes=True)
                self.active.__enter__()
            else:
                self.active = torch.profiler.profile(record_shapes=True)
                self.active.start()
        except Exception as error:
            self.tries = TRIES
            self._lost(error)
            return
        self.state = "open"
        self.journal.write("window", state="open")
        self._begin_step()

    def _begin_step(self) -> None:
        self.step_range = self.ranged(f"ProfilerStep#{self.passed}")
        self.step_range.__enter__()

    def _end_step(self) -> None:
        if self.step_range is not None:
            self.step_range.__exit__(None, None, None)
            self.step_range = None

    def _write(self, active: Any) -> str:
        folder = self.journal.folder
        assert folder is not None
        name = f"{os.environ.get('RANK') or os.getpid()}{SUFFIX}"
        if os.path.exists(os.path.join(folder, name)):  # noqa: PTH110, PTH118
            name = f"{os.environ.get('RANK', 0)}-{os.getpid()}{SUFFIX}"
        active.export_chrome_trace(os.path.join(folder, name))  # noqa: PTH118
        return name

    def _lost(self, error: Exception) -> None:
        self.tries += 1
        self.quiet = 0
        self.state = "waiting" if self.tries < TRIES else "off"
        again = "; it is opened again" if self.state == "waiting" else ""
        say(f"the profiler window was lost: {error}{again}")
        self.journal.write("window", state="lost", why=str(error))
