"""The wrappers that record calls of scaled_dot_product_attention and flex_attention.

`install_for` records a whole process, and `observe` records a block of code.
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
comptime: Any = None  # `torch._dynamo.comptime.comptime` once Dynamo is imported
recorders: tuple[Recorder, ...] = ()
_Left = list[tuple[Recorder, Entry, bool]]
_getframe = sys._getframe


class Sdpa:
    """A function that records each call and passes it unchanged to PyTorch's builtin function.

    The wrapper is equal to the builtin and has the same hash, so that look-up tables and compilers
    that know the builtin accept the wrapper.
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
        return copy.copy, (sd,)  # unpickling returns the builtin

    def __copy__(self) -> Sdpa:
        return self

    def __deepcopy__(self, _: Any) -> Sdpa:
        return self


Sdpa.__module__ = sd.__module__
wrapper = Sdpa()


def _note(frame: Any, a: tuple[Any, ...], k: dict[str, Any]) -> _Left | None:
    """Count a call in every recorder, and return the recorders that must do more work.

    Each recorder is returned with the entry of the call and whether the template is new. Return
    None if no recorder must do more work.
    """
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
    # The parameters are explicit. With `*a, **k`, Dynamo would recompile the program if a call
    # passes the same arguments in another way.
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
    """Call the function. Mark the call if a profiler window is open, and complete new templates."""
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
            with torch._C.DisableTorchFunction():  # hides our ops from the program's handlers
                recorder.learn(entry, a, k, output)
        except Exception as error:
            recorder.fail(error)
    return output


def at_compile(context: Any, **known: Any) -> None:
    """Record a call while Dynamo traces it.

    `known` are properties of the call. By default, the call has a mask with unknown contents. The
    path is None if Dynamo's private module stack cannot be read. The flags during compilation
    determine the backend of the compiled code, even if the flags have changed when the code runs.
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
    """Return the dotted path of a module from the name that Dynamo gives the module.

    For example, `L['self'].model.layers.0.self_attn` becomes `model.layers.0.self_attn`. torch 2.5
    writes `_modules['layers']` instead of `layers`.
    """
    text = re.sub(r"""["']\]""", "", re.sub(r"""\.?(?:_modules)?\[["']""", ".", source))
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
    """Start recording this process into a run folder. Read the options from the same folder."""
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

        The keys are `count`, `path`, `file`, `line`, `tensors`, `causal`, `mask`, `choice` (the
        backend that torch would select), `ran` (the backend that ran) and the other properties of a
        template.
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

    @property
    def fallbacks(self) -> list[str]:
        """The calls that ran on math although other backends were allowed, one line per kind."""
        return [_describe_fallback(call) for call in self.calls if _is_fallback(call)]


def _is_fallback(call: dict[str, Any]) -> bool:
    return call.get("ran") == "math" and set(_allowed(call)) != {"math"}


def _allowed(call: dict[str, Any]) -> list[str]:
    return [name for name, enabled in call["enabled"].items() if enabled]


def _describe_fallback(call: dict[str, Any]) -> str:
    """Return a line such as `self_attn (model.py:12): calls on math: 2, with query [2, 8, 128, 64]`."""
    name = call["path"] or call["module_class"] or call["function"]
    shapes = zip(("query", "key", "value", "attn_mask"), call["tensors"], strict=True)
    tensors = [f"{word} {each['dims']} {each['dtype']}" for word, each in shapes if each]
    return (
        f"{name} ({call['file']}:{call['line']}): calls on math: {call['count']}, with "
        f"{', '.join(tensors)}, dropout {call['dropout']}; allowed: {', '.join(_allowed(call))}"
    )


@contextlib.contextmanager
def observe() -> Iterator[AttentionCalls]:
    """Record the attention calls in a `with` block.

    Raise RuntimeError at the end of the block if recording failed.
    """
    global recorders
    journal = Journal(None)
    recorder = Recorder(journal, ProfilerWindow(journal, "none", 0, 0))
    install()
    # only the first name of each module, because `__main__` may be loaded under two names
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
            f"{', '.join(importers)} imported {NAME} by name before the first block, so "
            f"their calls are not recorded; call torch.nn.functional.{NAME} instead"
        )
    recorders = (*recorders, recorder)
    try:
        yield AttentionCalls(recorder)
    finally:
        recorders = tuple(each for each in recorders if each is not recorder)
    if not recorder.on:
        raise RuntimeError("recording attention failed; see stderr for the error")
