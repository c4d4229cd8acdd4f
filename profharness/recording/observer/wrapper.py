"""The replacement of scaled_dot_product_attention in an observed process, and the recording of a
block of code in this process.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from profharness.recording.observer.hook import after_import
from profharness.recording.observer.journal import Journal, print_error
from profharness.recording.observer.recorder import FUNCTIONS, Entry, Recorder, flags
from profharness.recording.observer.window import ProfilerWindow

OPTIONS_FILE = "observe.json"  # written by `profharness observe` into the run folder
FLEX_MODULE = "torch.nn.attention.flex_attention"
NAME = "scaled_dot_product_attention"
sd: Any = getattr(torch._C._nn, NAME)
in_dynamo = torch.compiler.is_dynamo_compiling
comptime: Any = None  # torch._dynamo's function, once Dynamo is imported
recorders: tuple[Recorder, ...] = ()
_Left = list[tuple[Recorder, Entry, bool]]
_getframe = sys._getframe


class Sdpa:
    """Call the builtin with unchanged arguments, and record the call.

    It hashes and compares like the builtin, so that tables and compilers that know the builtin accept
    it.
    """

    __name__ = NAME
    __qualname__ = NAME

    def __init__(self) -> None:
        self.__doc__ = sd.__doc__

    def __call__(self, *a: Any, **k: Any) -> Any:
        if in_dynamo():
            if comptime is not None:
                if (a[3] if len(a) > 3 else k.get("attn_mask")) is None:
                    comptime(at_compile_unmasked)
                else:
                    comptime(at_compile)
            return sd(*a, **k)
        left = _note(_getframe(1), a, k)
        return sd(*a, **k) if left is None else _watched(left, sd, a, k)

    def __eq__(self, other: object) -> bool:
        return other is self or other is sd

    def __hash__(self) -> int:
        return hash(sd)

    def __repr__(self) -> str:
        return repr(sd)

    def __reduce__(self) -> Any:
        return copy.copy, (sd,)  # the builtin, where it is loaded

    def __copy__(self) -> Sdpa:
        return self

    def __deepcopy__(self, _: Any) -> Sdpa:
        return self


Sdpa.__module__ = sd.__module__
wrapper = Sdpa()


def _note(frame: Any, a: tuple[Any, ...], k: dict[str, Any]) -> _Left | None:
    """Return the work that is left for recorders after a call."""
    left = None
    for recorder in recorders:
        try:
            noted = recorder.note(frame, a, k)
        except Exception as error:
            recorder.fail(error)
        else:
            if noted is not None:
                left = [*(left or ()), (recorder, *noted)]
    return left


def flex_wrapper(flex: Any) -> Any:
    # parameters are explicit, because with `*a, **k` Dynamo would compile calls with other spellings again
    @functools.wraps(flex)
    def flex_attention(
        query: Any,
        key: Any,
        value: Any,
        score_mod: Any = None,
        block_mask: Any = None,
        scale: Any = None,
        enable_gqa: Any = False,
        return_lse: Any = False,
        kernel_options: Any = None,
        **newer: Any,
    ) -> Any:
        functions = (score_mod, block_mask)
        a = (query, key, value, *functions, scale, enable_gqa, return_lse, kernel_options)
        if in_dynamo():
            if comptime is not None:
                comptime(at_compile_flex)
            return flex(*a, **newer)
        names = tuple(
            None if function is None else getattr(function, "__qualname__", type(function).__name__)
            for function in (score_mod, getattr(block_mask, "mask_mod", None))
        )
        options = {FUNCTIONS: names, "scale": scale, "enable_gqa": enable_gqa}
        left = _note(_getframe(1), a[:3], options)
        return flex(*a, **newer) if left is None else _watched(left, flex, a, newer)

    return flex_attention


def _watched(left: _Left, call: Any, a: Any, k: Any) -> Any:
    """Make a call that is marked for a profiler, or whose template is new."""
    markers = [
        one.window.ranged(entry.marker) for one, entry, _ in left if one.window.state == "open"
    ]
    fresh = [(recorder, entry) for recorder, entry, new in left if new]
    try:
        with markers[-1] if markers else contextlib.nullcontext():
            output = call(*a, **k)
    except BaseException:
        for recorder, entry in fresh:
            with contextlib.suppress(Exception):
                recorder.raised(entry)
        raise
    for recorder, entry in fresh:
        try:
            with torch._C.DisableTorchFunction():  # no handler of the program's sees our ops
                recorder.learn(entry, a, k, output)
        except Exception as error:
            recorder.fail(error)
    return output


def at_compile(context: Any, **known: Any) -> None:
    """Record a call with a mask while Dynamo traces it. The mask's contents are unknown.

    Dynamo's module stack is private. If it cannot be read, the path is None. The current flags
    determine the backend of the compiled code, even if they have changed when it runs.
    """
    known = known or {"masked": True}
    for recorder in recorders:
        try:
            call = {"path": None, "module_class": None, "modules": [], "tensors": [], **flags()}
            with contextlib.suppress(AttributeError, IndexError, KeyError, TypeError):
                stack = list(context._ComptimeContext__tx.nn_module_stack.values())
                call["path"] = _dotted(stack[-1][0]) if stack else None
                call["modules"] = [getattr(kind, "__name__", str(kind)) for _, kind in stack]
                call["module_class"] = call["modules"][-1] if stack else None
            recorder.note_compiled(call | known)
        except Exception as error:
            recorder.fail(error)


def at_compile_unmasked(context: Any) -> None:
    at_compile(context, masked=False)


def at_compile_flex(context: Any) -> None:
    at_compile(context, kind="flex", ran="flex")


def _dotted(source: str) -> str:
    """Return `L['self'].model.layers.0.self_attn` without its prefix.

    torch 2.5 spells `_modules['layers']`.
    """
    text = re.sub(r"""\[["']|["']\]""", ".", source.replace("_modules['", "."))
    parts = [part for part in text.split(".") if part not in ("_orig_mod", "")]
    return ".".join(parts[2:] if parts[:2] == ["L", "self"] else parts)


def install() -> None:
    if F.scaled_dot_product_attention is wrapper:
        return
    torch.jit._builtins._register_builtin(wrapper, f"aten::{NAME}")
    F.scaled_dot_product_attention = wrapper
    after_import("torch._dynamo", _bind_comptime)
    after_import(FLEX_MODULE, _wrap_flex)


def _bind_comptime() -> None:
    global comptime
    comptime = getattr(sys.modules.get("torch._dynamo.comptime"), "comptime", None)


def _wrap_flex() -> None:
    module = sys.modules[FLEX_MODULE]
    module.flex_attention = flex_wrapper(module.flex_attention)  # type: ignore[attr-defined]


def install_for(folder: str) -> None:
    """Record this process into a run folder, with the folder's options."""
    global recorders
    with open(os.path.join(folder, OPTIONS_FILE), encoding="utf-8") as file:  # noqa: PTH118
        options = json.load(file)
    journal = Journal(folder)
    ranks = (None, str(options["rank"]))
    chosen = options["rank"] == "all" or os.environ.get("RANK") in ranks
    profiler = options["profiler"] if chosen else "none"
    window = ProfilerWindow(journal, profiler, options["steps"], options["warmup"])
    recorder = Recorder(journal, window)
    recorders = (*recorders, recorder)
    install()
    if window.state != "off":

        def stepped(*_: Any) -> None:
            if torch.compiler.is_compiling() or not recorder.on:
                return
            try:
                recorder.optimizer_stepped()
            except Exception as error:
                recorder.fail(error)

        register_optimizer_step_post_hook(stepped)
        window.watch_profilers()
        if profiler == "torch":
            os.register_at_fork(before=lambda: window.give_way("the program forked"))
    os.register_at_fork(after_in_child=recorder.forked)
    atexit.register(_end, recorder)


def _end(recorder: Recorder) -> None:
    if not recorder.on:
        return
    try:
        recorder.window.close()
    except Exception as error:
        recorder.fail(error)


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


@contextlib.contextmanager
def observe() -> Iterator[AttentionCalls]:
    """Record the attention calls of a block. Raise RuntimeError at its end if recording failed."""
    global recorders
    journal = Journal(None)
    recorder = Recorder(journal, ProfilerWindow(journal, "none", 0, 0))
    install()
    # the first name of each module, because __main__ may have two
    names = {id(module): name for name, module in reversed(list(sys.modules.items()))}
    importers = sorted(
        name
        for name, module in list(sys.modules.items())
        if names.get(id(module)) == name
        and name.partition(".")[0] not in ("torch", "profharness")
        and any(value is sd for value in list(getattr(module, "__dict__", {}).values()))
    )
    if importers:
        print_error(
            f"{', '.join(importers)} imported {NAME} by name before the first block: those calls "
            "are not recorded; call it as torch.nn.functional's"
        )
    recorders = (*recorders, recorder)
    try:
        yield AttentionCalls(recorder)
    finally:
        recorders = tuple(each for each in recorders if each is not recorder)
    if not recorder.on:
        raise RuntimeError("recording attention failed; stderr contains the error")
