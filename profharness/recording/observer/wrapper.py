"""The replacement of scaled_dot_product_attention in an observed process. It hashes and compares
like the builtin, so that tables and compilers that know the builtin accept it.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import os
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from profharness.recording.observer.facts import flags
from profharness.recording.observer.hook import after_import
from profharness.recording.observer.journal import Journal, read_options
from profharness.recording.observer.recorder import BLOCK_MASK, FUNCTIONS, Entry, Recorder
from profharness.recording.observer.window import ProfilerWindow

FLEX_MODULE = "torch.nn.attention.flex_attention"
NAME = "scaled_dot_product_attention"
sd: Any = getattr(torch._C._nn, NAME)
in_dynamo = torch.compiler.is_dynamo_compiling
comptime: Any = None  # torch._dynamo's function, once Dynamo is imported
recorders: tuple[Recorder, ...] = ()
_getframe = sys._getframe


class Sdpa:
    """Call the builtin with unchanged arguments, and record the call."""

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
        left = None  # work that is left for recorders after the call
        for recorder in recorders:
            try:
                noted = recorder.note(_getframe(1), a, k)
            except Exception as error:
                recorder.fail(error)
            else:
                if noted is not None:
                    left = [*(left or ()), (recorder, *noted)]
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


def flex_wrapper(flex: Any) -> Any:
    """Return a replacement of flex_attention. Its parameters are explicit: with `*a, **k` Dynamo
    would compile calls with other spellings again.
    """

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
        left = _note_flex(_getframe(1), a)
        return _watched(left, flex, a, newer) if left else flex(*a, **newer)

    return flex_attention


def _note_flex(frame: Any, a: tuple[Any, ...]) -> list[tuple[Recorder, Entry, bool]]:
    """Return the work that is left for a call of flex_attention."""
    left = []
    for recorder in recorders:
        try:
            options = {FUNCTIONS: _functions(a), "scale": a[5], "enable_gqa": a[6]}
            noted = recorder.note(frame, a[:3], options)
        except Exception as error:
            recorder.fail(error)
        else:
            left += [(recorder, *noted)] if noted is not None else []
    return left


def _functions(a: tuple[Any, ...]) -> tuple[str | None, ...]:
    """Return the names of the score function and the mask function of a call of flex_attention."""
    return tuple(
        None if function is None else getattr(function, "__qualname__", type(function).__name__)
        for function in (a[3], getattr(a[BLOCK_MASK], "mask_mod", None))
    )


def _watched(left: list[tuple[Recorder, Entry, bool]], call: Any, a: Any, k: Any) -> Any:
    """Make a call that is marked for a profiler, or whose template is new."""
    markers = [one.window.ranged(entry.marker) for one, entry, _ in left if one.window.open]
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


def at_compile(context: Any) -> None:
    """Record a call with a mask while Dynamo traces it. The mask's contents are unknown."""
    _note_compiled(context, masked=True)


def at_compile_unmasked(context: Any) -> None:
    """Record a call without a mask while Dynamo traces it."""
    _note_compiled(context, masked=False)


def at_compile_flex(context: Any) -> None:
    """Record a call of flex_attention while Dynamo traces it."""
    _note_compiled(context, kind="flex", ran="flex")


def _note_compiled(context: Any, **what: Any) -> None:
    for recorder in recorders:
        try:
            recorder.note_compiled(_traced(context) | what)
        except Exception as error:
            recorder.fail(error)


def _traced(context: Any) -> dict[str, Any]:
    """Return the properties of a traced call.

    Dynamo's module stack is private. If it cannot be read, the path is None. The current
    flags determine the backend of the compiled code, even if they have changed when it runs.
    """
    told: dict[str, Any] = {"path": None, "module_class": None, "modules": [], "tensors": []}
    told |= flags()
    try:
        transaction = context._ComptimeContext__tx
        stack = list(transaction.nn_module_stack.values())
        told["path"] = _dotted(stack[-1][0]) if stack else None
        told["modules"] = [getattr(kind, "__name__", str(kind)) for _, kind in stack]
        told["module_class"] = told["modules"][-1] if stack else None
    except (AttributeError, IndexError, KeyError, TypeError):
        pass
    return told


def _dotted(source: str) -> str:
    """Return `L['self'].model.layers.0.self_attn` without its prefix. torch 2.5 spells
    `_modules['layers']`.
    """
    text = (
        source.replace("']._modules['", ".").replace("._modules['", ".").replace("_modules['", "")
    )
    text = text.replace("['", ".").replace("']", "").replace('["', ".").replace('"]', "")
    text = text.removeprefix("L.self.").removeprefix("L.self")
    parts = [part for part in text.split(".") if part not in ("_orig_mod", "")]
    return ".".join(parts)


def install() -> None:
    """Replace the builtin once."""
    if F.scaled_dot_product_attention is wrapper:
        return
    torch.jit._builtins._register_builtin(wrapper, f"aten::{NAME}")
    F.scaled_dot_product_attention = wrapper
    after_import("torch._dynamo", _bind_comptime)
    after_import(FLEX_MODULE, _wrap_flex)


def _bind_comptime() -> None:
    global comptime
    found = sys.modules.get("torch._dynamo.comptime")
    comptime = getattr(found, "comptime", None)


def _wrap_flex() -> None:
    module = sys.modules[FLEX_MODULE]
    module.flex_attention = flex_wrapper(module.flex_attention)  # type: ignore[attr-defined]


def install_for(folder: str) -> None:
    """Record this process into a run folder, with the folder's options."""
    global recorders
    options = read_options(folder)
    journal = Journal(folder)
    ranks = (None, str(options["rank"]))
    chosen = options["rank"] == "all" or os.environ.get("RANK") in ranks
    profiler = options["profiler"] if chosen else "none"
    window = ProfilerWindow(journal, profiler, options["steps"], options["warmup"])
    recorder = Recorder(journal, window)
    recorders = (*recorders, recorder)
    install()
    if window.state != "off":
        register_optimizer_step_post_hook(_stepped(recorder))
        window.watch_profilers()
        if profiler == "torch":
            os.register_at_fork(before=lambda: window.give_way("the program forked"))
    os.register_at_fork(after_in_child=recorder.forked)
    atexit.register(_end, recorder)


def _stepped(recorder: Recorder) -> Any:
    def hook(*_: Any) -> None:
        if torch.compiler.is_compiling() or not recorder.on:
            return
        try:
            recorder.optimizer_stepped()
        except Exception as error:
            recorder.fail(error)

    return hook


def _end(recorder: Recorder) -> None:
    if not recorder.on:
        return
    try:
        recorder.window.close()
    except Exception as error:
        recorder.fail(error)
