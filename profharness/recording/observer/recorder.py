"""Templates of attention calls: the properties of a call, recorded once, and the number of such
calls.

One look-up finds the entry of a call by its exact key. Only calls with a new key are inspected
further, and only calls with a new template are written.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from _thread import get_ident
from types import CodeType, FrameType
from typing import Any

import torch

from profharness.recording.observer import facts
from profharness.recording.observer.journal import Counts, Journal, print_error
from profharness.recording.observer.window import ProfilerWindow

C: Any = torch._C
CALL: CodeType = torch.nn.Module._call_impl.__code__
# It calls CALL and has few local variables, so that reading them is faster.
OUTER: CodeType | None = getattr(
    getattr(torch.nn.Module, "_wrapped_call_impl", None), "__code__", None
)
MARKER = "profharness-attention:"
TORCH = os.path.dirname(torch.__file__)  # noqa: PTH120
GRADED_PASSES = (
    16  # maximum passes with gradients before passes count; few programs accumulate over more
)
MOST_TEMPLATES, MOST_KEYS = 10_000, 4096
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
FUNCTIONS = "functions of flex_attention"  # no argument of any function
BLOCK_MASK = 4  # the place of an argument of flex_attention
FLEX = 2  # the place of what tells flex_attention in an exact key
PLACE, STATES = 3, 8  # how many parts of an exact key, its first and last, tell place and state
WATCHED = ("waiting", "open", "ending")  # states of a window that has to know of calls
# parts of a path that wrappers put in, and wrappers whose own name is not the model's
INSERTED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
PARALLEL = ("DistributedDataParallel", "DataParallel")

_flash = C._get_flash_sdp_enabled
_efficient = C._get_mem_efficient_sdp_enabled
_math = C._get_math_sdp_enabled
_cudnn = getattr(C, "_get_cudnn_sdp_enabled", bool)
_deterministic = C._get_deterministic_algorithms
_grad = torch.is_grad_enabled
_task = getattr(C, "_current_graph_task_id", int)
_tracing = C._is_tracing
_autocast = C._is_any_autocast_enabled
_modes = C._len_torch_function_stack
_Tensor = torch.Tensor


class Entry:
    """The calls of one exact key, counted in one element of an array."""

    __slots__ = ("at", "cells", "marker", "template")

    def __init__(self, template: int, marker: str, cells: Any, at: int) -> None:
        self.template, self.marker, self.cells, self.at = template, marker, cells, at


class Site:
    """A module that calls attention, or all code outside of modules.

    `last` contains the exact key and the entry of the last call.
    """

    __slots__ = ("last", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.last: tuple[Any, Any] = (None, None)


class Recorder:
    """The calls of this process in all threads.

    The lock protects state that threads share, except counts: `+=` on an array element does not
    release the GIL.
    """

    def __init__(self, journal: Journal, window: ProfilerWindow) -> None:
        self.journal, self.window = journal, window
        self.on = True
        self.templates: list[dict[str, Any]] = []
        self._reset()

    def _reset(self) -> None:
        self.lock = threading.RLock()  # a handler of a signal may call attention too
        self.counts = Counts(self.journal.path(".counts"))
        self.entries: dict[Any, Entry] = {}
        self.numbers: dict[
            Any, int
        ] = {}  # template numbers, by the properties that their calls share
        self.templates.clear()
        self.compiled: dict[Any, int] = {}
        self.codes: dict[int, CodeType] = {}  # by id, which lasts as long as they do
        self.sites: dict[int, Site] = {}  # by the module's id
        self.outside = Site(0)
        self.kept: dict[int, Any] = {}  # module id -> weak reference
        self.paths: dict[int, tuple[str | None, str | None]] = {}  # module id -> path, root class
        self.next_site = 1
        self.first_site: Site | None = None
        self.passes = 0
        self.optimized = False
        self.started = False

    def forked(self) -> None:
        """Reset the state in a forked child, with a journal of its own."""
        self.journal.begin()
        self._reset()
        self.window.forget()

    def note(
        self, frame: FrameType, a: tuple[Any, ...], k: dict[str, Any], *, silent: bool = False
    ) -> tuple[Entry, bool] | None:
        """Count a call. Return its entry and whether its template is new, if more work is needed.

        Return None for a known call, and for calls that are not recorded: without tensors, or
        during tracing. `k` contains the names of the functions of flex_attention under FUNCTIONS.
        With `silent`, reading a tensor's attributes calls no handler of the program.
        """
        n = len(a)
        option = k.get
        q: Any = a[0] if n > 0 else option("query")
        key: Any = a[1] if n > 1 else option("key")
        v: Any = a[2] if n > 2 else option("value")
        mask: Any = a[3] if n > 3 else option("attn_mask")
        if not silent and (
            not type(q) is type(key) is type(v) is _Tensor
            or (mask is not None and type(mask) is not _Tensor)
            or _modes()
        ):
            if not _recordable(q) or key is None or v is None:
                return None
            with C.DisableTorchFunction():
                return self.note(frame, a, k, silent=True)
        if not self.on or _tracing():
            return None
        above: FrameType | None = frame
        while above is not None and above.f_code is not CALL:
            above = above.f_back
        if above is None:
            site = self.outside
        else:
            outer = above.f_back
            holder = outer if outer is not None and outer.f_code is OUTER else above
            module = holder.f_locals["self"]
            site = self.sites.get(id(module)) or self._new_site(module)
        # The key omits the priority order and the dims of value, which rarely change alone.
        exact = (
            id(frame.f_code), frame.f_lasti, option(FUNCTIONS),
            q.shape, q.stride(), q.dtype, q.requires_grad, key.shape, key.stride(), v.stride(),
            None if mask is None else (mask.shape, mask.stride(), mask.dtype),
            a[4:] if n > 4 else None,
            option("dropout_p"), option("is_causal"), option("scale"), option("enable_gqa"),
            _flash(), _efficient(), _math(), _cudnn(), _deterministic(), _grad(), _task() >= 0,
            _autocast(),
        )  # fmt: skip
        last, entry = site.last
        fresh = False
        if last != exact:  # cheaper than the look-up
            entry = self.entries.get((site.number, exact))
            if entry is None:
                entry, fresh = self._new_entry(site, exact, above, frame, (q, key, v, mask), a, k)
            site.last = (exact, entry)
        entry.cells[entry.at] += 1
        marked = self.window.state in WATCHED and self._pass(site)
        return (entry, fresh) if fresh or marked else None

    def learn(self, entry: Entry, a: tuple[Any, ...], k: dict[str, Any], output: Any) -> None:
        """Add the properties to a new template that only the completed call has, and write it."""
        template = self.templates[entry.template]
        if template["kind"] == "flex":
            template |= {"ran": "flex", "mask": facts.block_mask(a[BLOCK_MASK])}
            self._write(template)
            return
        given = dict(zip(NAMES, a, strict=False)) | k
        template["node"] = facts.node(output)
        options = {name: template[name] for name in ("dropout", "causal", "scale", "gqa")}
        mask = given.get("attn_mask")
        template["choice"] = facts.choice([given[name] for name in NAMES[:3]], mask, options)
        template["ran"] = facts.ran(template["node"], template["choice"])
        if mask is not None:
            template["mask"] = facts.mask_contents(mask)
        self._write(template)

    def raised(self, entry: Entry) -> None:
        """Forget a new template whose call raised, so that the next such call records it again."""
        number = entry.template
        with self.lock:
            self.entries = {key: one for key, one in self.entries.items() if one.template != number}
            self._forget_last()
            self.numbers = {key: one for key, one in self.numbers.items() if one != number}
        self._write(self.templates[number] | {"raised": True})

    def note_compiled(self, what: dict[str, Any]) -> None:
        """Record a call that Dynamo traces. The number of its executions is unknown."""
        key = repr(sorted(what.items()))
        with self.lock:
            if key in self.compiled:
                return
            number = self.compiled[key] = len(self.templates)
            template = {"template": number, "kind": "sdpa", "compiled": True, **what}
            self.templates.append(template)
        self._write(template)

    def optimizer_stepped(self) -> None:
        """Record the end of an optimizer's step."""
        if get_ident() == self.window.home:
            self.optimized = True
            if self.templates:
                self.window.step()

    def _pass(self, site: Site) -> bool:
        """Detect the start of a pass over the model. Return whether to mark the call.

        A pass starts when the first attention of the model runs again. Once an optimizer has
        stepped, its steps count instead of passes. The first GRADED_PASSES passes with gradients do
        not count, because an optimizer may follow.
        """
        if get_ident() != self.window.home:
            if _task() < 0:  # otherwise, autograd's thread recomputes a call of the main thread
                self.window.pass_elsewhere()
                return False
        elif self.window.state == "ending":
            self.window.end_ops()
        elif not self.started:
            self.started = True
            self.first_site = site
            self.window.first()
        elif site is self.first_site and not self.optimized:
            self.passes += 1
            if not _grad() or self.passes > GRADED_PASSES:
                self.window.step()
        return self.window.open

    def _forget_last(self) -> None:
        for site in (self.outside, *list(self.sites.values())):
            site.last = (None, None)

    def _new_site(self, module: Any) -> Site:
        identity = id(module)

        def gone(_: Any) -> None:
            self.sites.pop(identity, None)
            self.kept.pop(identity, None)
            self.paths.pop(identity, None)

        with self.lock:
            if identity not in self.sites:  # another thread may have been first
                self.kept[identity] = weakref.ref(module, gone)
                self.sites[identity] = Site(self.next_site)
                self.next_site += 1
            return self.sites[identity]

    def _new_entry(
        self,
        site: Site,
        exact: tuple[Any, ...],
        above: FrameType | None,
        frame: FrameType,
        tensors: tuple[Any, ...],
        a: tuple[Any, ...],
        k: dict[str, Any],
    ) -> tuple[Entry, bool]:
        given = dict(zip(NAMES, a, strict=False)) | k
        options = {
            "dropout": given.get("dropout_p", 0.0),
            "causal": bool(given.get("is_causal", False)),
            "scale": given.get("scale"),
            "gqa": bool(given.get("enable_gqa", False)),
        }
        told = tuple(facts.tensor(item) for item in tensors)
        common = (*map(_pattern, told), _relation(told), *options.values(), *exact[-STATES:])
        lengths = _lengths(told)
        with self.lock:
            if entry := self.entries.get((site.number, exact)):
                return entry, False  # another thread was first
            if len(self.entries) >= MOST_KEYS:
                self.entries.clear()
                self._forget_last()
            place = (site.number, *exact[:PLACE])
            number = self.numbers.get((place, common))
            fresh = number is None
            if number is None:
                number = len(self.templates)
                if number >= MOST_TEMPLATES:
                    raise RuntimeError(f"more than {MOST_TEMPLATES} kinds of calls")
                self.codes[id(frame.f_code)] = frame.f_code
                self.templates.append(
                    {"template": number, "kind": "flex" if exact[FLEX] else "sdpa"}
                    | {"compiled": False, "functions": exact[FLEX]}
                    | self._place(above, frame)
                    | {"tensors": told, **options}
                    | _state(tensors[0].device.type)
                )
                self.numbers[place, common] = number
                self.window.fresh()
            template = self.templates[number]
            name = template["path"] or template["module_class"] or template["function"]
            entry = Entry(number, f"{MARKER}{name}", *self.counts.row(number, lengths))
            self.entries[site.number, exact] = entry
        return entry, fresh

    def _place(self, above: FrameType | None, frame: FrameType) -> dict[str, Any]:
        """Return where a call is made: its modules, and the line outside of torch."""
        modules = []
        walked = above
        while walked is not None:
            if walked.f_code is CALL:
                modules.append(walked.f_locals["self"])
            walked = walked.f_back
        path, root = self._path(modules) if modules else (None, None)
        outside: FrameType | None = frame
        while outside is not None and outside.f_code.co_filename.startswith(TORCH):
            outside = outside.f_back
        outside = outside or frame
        return {
            "path": path,
            "root": root,
            "module_class": type(modules[0]).__name__ if modules else None,
            "modules": [type(module).__name__ for module in reversed(modules)],
            "file": _shown_file(outside.f_code.co_filename),
            "line": outside.f_lineno,
            "function": outside.f_code.co_qualname,
        }

    def _path(self, modules: list[Any]) -> tuple[str | None, str | None]:
        """Return the dotted name of the innermost module within the outermost one, and the latter's
        class.
        """
        innermost, outermost = modules[0], modules[-1]
        if id(innermost) not in self.paths:
            root = type(outermost).__name__
            for name, module in outermost.named_modules():
                if id(module) in self.sites:
                    self.paths[id(module)] = (_clean(name, root) or None, root)
        return self.paths.get(id(innermost), (None, type(outermost).__name__))

    def _write(self, template: dict[str, Any]) -> None:
        if template["template"] == 0:
            self._write_start()
        self.journal.write("template", **template)

    def _write_start(self) -> None:
        rank = {
            name.lower(): os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ
        }
        self.counts.open()
        self.journal.write("start", environment=facts.environment(), final_counts=True, **rank)

    def fail(self, error: BaseException) -> None:
        """Stop recording, and print the reason once."""
        if not self.on:
            return
        self.on = False
        print_error(f"attention is no longer recorded: {error!r}; the program goes on")
        with contextlib.suppress(
            Exception
        ):  # the disk may be full, and the error is already printed
            self.journal.write("failed", why=repr(error))


def _recordable(query: Any) -> bool:
    """Return whether the sizes of a tensor subclass can be read."""
    return isinstance(query, torch.Tensor) and type(query).__name__ not in (
        "FakeTensor",
        "FunctionalTensor",
    )


def _state(device: str) -> dict[str, Any]:
    return {
        "grad": _grad(),
        "inference": torch.is_inference_mode_enabled(),
        "recompute": _task() >= 0,
        "autocast": facts.autocast(device),
        **facts.flags(),
    }


def _pattern(told: dict[str, Any] | None) -> Any:
    """Return the properties of a tensor that calls of one template share: heads, head dim, memory
    order.
    """
    if told is None or told["dims"] is None:
        return None if told is None else told["dtype"]
    dims, strides = told["dims"], told["strides"]
    order = sorted(range(len(dims)), key=lambda at: (-strides[at], at)) if strides else ()
    wide = [at for at in order if dims[at] != 1]
    fixed = (dims[-3] if len(dims) > 2 else None, dims[-1]) if told["dtype"] != "bool" else None
    return len(dims), fixed, told["dtype"], told["requires_grad"], tuple(wide), told.get("class")


def _relation(told: tuple[dict[str, Any] | None, ...]) -> tuple[Any, ...]:
    """Return how the lengths of query and key relate, and which dims of a mask are 1."""
    query, key, mask = [(told[at] or {}).get("dims") for at in (0, 1, 3)]
    if not query or not key or len(query) < 2 or len(key) < 2:
        return ()
    rows, columns = query[-2], key[-2]
    relation = "one" if rows == 1 < columns else (rows > columns) - (rows < columns)
    return relation, tuple(size == 1 for size in mask) if mask else None


def _lengths(told: tuple[dict[str, Any] | None, ...]) -> tuple[int, ...]:
    """Return batch, query length and key length."""
    query, key = [tuple((item or {}).get("dims") or ()) for item in told[:2]]
    if len(query) < 3 or len(key) < 3:
        return ()
    return (query[0] if len(query) == 4 else 1, query[-2], key[-2])


def _clean(name: str, root: str) -> str:
    parts = [part for part in name.split(".") if part not in INSERTED]
    if root in PARALLEL and parts[:1] == ["module"]:
        del parts[0]
    return ".".join(parts)


def _shown_file(path: str) -> str:
    """Return a path relative to the working folder or to an entry of sys.path."""
    best = path
    for place in (os.getcwd(), *sys.path):  # noqa: PTH109
        begin = place.rstrip(os.sep) + os.sep
        if place and path.startswith(begin) and len(path) - len(begin) < len(best):
            best = path[len(begin) :]
    return best
