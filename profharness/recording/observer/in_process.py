"""Record the attention calls of a block of code in this process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from profharness.recording.observer import wrapper
from profharness.recording.observer.journal import Journal, print_error
from profharness.recording.observer.recorder import Recorder
from profharness.recording.observer.window import ProfilerWindow


class AttentionCalls:
    """The attention calls recorded so far."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @property
    def calls(self) -> list[dict[str, Any]]:
        """One dict per kind of call, in order of first occurrence.

        Keys are `count`, `path`, `file`, `line`, `tensors`, `causal`, `mask`, `choice` (the backend
        that torch would select), `ran` and the other keys of a journal.
        """
        count = self._recorder.counts.of_template
        return [
            {"count": count(number), **template}
            for number, template in enumerate(self._recorder.templates)
        ]

    @property
    def backends(self) -> set[str]:
        """The backends that computed the calls: `flash`, `efficient`, `cudnn`, `math`, or `unknown`
        if torch does not report one, as in compiled code.
        """
        return {template.get("ran") or "unknown" for template in self._recorder.templates}


def _direct_importers() -> list[str]:
    """Return the modules other than torch's that imported the original function by name."""
    modules = {id(module): name for name, module in reversed(list(sys.modules.items()))}
    return sorted(
        name
        for name in modules.values()
        if name.partition(".")[0] not in ("torch", "profharness")
        and any(
            value is wrapper.sd
            for value in list(getattr(sys.modules.get(name), "__dict__", {}).values())
        )
    )


@contextlib.contextmanager
def observe() -> Iterator[AttentionCalls]:
    """Record the attention calls of a block. Raise RuntimeError at its end if recording failed."""
    journal = Journal(None)
    recorder = Recorder(journal, ProfilerWindow(journal, "none", 0, 0))
    wrapper.install()
    if importers := _direct_importers():
        print_error(
            f"{', '.join(importers)} imported {wrapper.NAME} by name before the first block: those calls "
            "are not recorded; call it as torch.nn.functional's"
        )
    wrapper.recorders = (*wrapper.recorders, recorder)
    try:
        yield AttentionCalls(recorder)
    finally:
        wrapper.recorders = tuple(each for each in wrapper.recorders if each is not recorder)
    if not recorder.on:
        raise RuntimeError("recording attention failed; stderr contains the error")
