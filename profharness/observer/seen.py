"""The attention calls of a block of code in this process."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from profharness.observer import wrapper
from profharness.observer.journal import Journal, say
from profharness.observer.recorder import Recorder
from profharness.observer.window import Window


class Seen:
    """What a block called so far."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @property
    def calls(self) -> list[dict[str, Any]]:
        """One dict a kind of call, in order of their first: `count`, `path`, `file`, `line`, `tensors`,
        `causal`, `mask`, `choice` (what torch would take), `ran`, and what else a journal tells.
        """
        count = self._recorder.counts.of_template
        return [
            {"count": count(number), **template}
            for number, template in enumerate(self._recorder.templates)
        ]

    @property
    def backends(self) -> set[str]:
        """The backends that computed the calls: `flash`, `efficient`, `cudnn`, `math`; `unknown` where
        torch does not tell, as in compiled code.
        """
        return {template.get("ran") or "unknown" for template in self._recorder.templates}


def _unwatched() -> list[str]:
    """The modules besides torch's own that hold the function itself, which nothing stands in for."""
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
def observe() -> Iterator[Seen]:
    """Record the attention calls of the block. Raises RuntimeError at its end if recording failed."""
    journal = Journal(None)
    recorder = Recorder(journal, Window(journal, "none", 0, 0))
    wrapper.install()
    if holders := _unwatched():
        say(
            f"{', '.join(holders)} imported {wrapper.NAME} by name before the first block: those calls "
            "are not seen; call it as torch.nn.functional's"
        )
    wrapper.recorders = (*wrapper.recorders, recorder)
    try:
        yield Seen(recorder)
    finally:
        wrapper.recorders = tuple(each for each in wrapper.recorders if each is not recorder)
    if not recorder.on:
        raise RuntimeError("recording attention failed; what it said stands on stderr")
