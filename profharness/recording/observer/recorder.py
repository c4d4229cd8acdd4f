"""Record the attention calls of a process as templates and counts, without a profiler.

A template has the properties that similar calls share, and each template is written only once.
Every call is looked up by its exact key, which contains for example the shapes of its tensors. Only
a call with a new key is inspected further, because it may have a new template.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import threading
import weakref
from _thread import get_ident
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from profharness.recording.observer.journal import Counts, Journal, print_error
from profharness.recording.observer.window import ProfilerWindow

C: Any = torch._C
CALL: CodeType = torch.nn.Module._call_impl.__code__
# The code that calls CALL. Reading `self` from its frame is faster, because it has fewer variables.
OUTER: CodeType | None = getattr(
    getattr(torch.nn.Module, "_wrapped_call_impl", None), "__code__", None
)
MARKER = "profharness-attention:"
TORCH = os.path.dirname(torch.__file__)  # noqa: PTH120
# Among the first GRADED_PASSES passes, passes with gradients are not counted as steps. Few programs
# accumulate gradients over more passes before an optimizer step.
GRADED_PASSES = 16
MOST_TEMPLATES, MOST_KEYS = 10_000, 4096
CAST_BYTES = 64 << 20  # maximum size of a tensor created to query the backend under autocast
# Old releases of torch cannot hide ops from a profiler.
HIDES_OPS = hasattr(torch.autograd, "_enable_record_function")
MASK_BYTES = 16 << 20  # maximum size of a mask whose contents are read
NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
FUNCTIONS = "functions of flex_attention"  # a key that differs from the names of all arguments
BLOCK_MASK = 4  # index of the `block_mask` argument of flex_attention
# An exact key begins with three parts for the position: the code, the instruction, and the
# functions of flex_attention, whose index is FLEX. The key ends with eight flags.
POSITION_PARTS, FLEX, FLAG_PARTS = 3, 2, 8
WATCHED = ("waiting", "open", "ending")  # states in which the window must learn about each call
# Names that wrappers insert into the path of a module, and wrappers that contain the model as
# `module`.
INSERTED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
PARALLEL = ("DistributedDataParallel", "DataParallel")
PLAIN = (torch.Tensor, torch.nn.Parameter)
CHOICES = {-1: "none", 0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
# Maps the C++ name of an autograd node to the backend that ran.
NODES = {
    "ScaledDotProductFlashAttentionBackward": "flash",
    "ScaledDotProductFlashAttentionForCpuBackward": "flash",
    "ScaledDotProductEfficientAttentionBackward": "efficient",
    "ScaledDotProductCudnnAttentionBackward": "cudnn",
    "ScaledDotProductFusedAttentionOverrideableBackward": "overrideable",
}

_flash = C._get_flash_sdp_enabled
_efficient = C._get_mem_efficient_sdp_enabled
_math = C._get_math_sdp_enabled
_cudnn = getattr(C, "_get_cudnn_sdp_enabled", bool)
_priority = getattr(C, "_get_sdp_priority_order", None)  # from torch 2.6 on
_deterministic = C._get_deterministic_algorithms
_grad = torch.is_grad_enabled
_task = getattr(C, "_current_graph_task_id", int)
_tracing = C._is_tracing
_autocast = C._is_any_autocast_enabled
_modes = C._len_torch_function_stack
_Tensor = torch.Tensor


class Entry:
    """All calls with the same exact key.

    The element `at` of the array `cells` is the number of these calls.
    """

    __slots__ = ("at", "cells", "marker", "template")

    def __init__(self, template: int, marker: str, cells: Any, at: int) -> None:
        self.template, self.marker, self.cells, self.at = template, marker, cells, at


class Site:
    """A module that calls attention, or all code outside of modules."""

    __slots__ = ("last", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.last: tuple[Any, Any] = (None, None)  # exact key and entry of the last call


class Recorder:
    """Records the attention calls of all threads of this process.

    The lock protects state that threads share. Counts need no lock, because `+=` on an array
    element does not release the GIL.
    """

    def __init__(self, journal: Journal, window: ProfilerWindow) -> None:
        self.journal, self.window = journal, window
        self.on = True
        self.templates: list[dict[str, Any]] = []
        self._reset()

    def _reset(self) -> None:
        self.lock = threading.RLock()  # reentrant, because a signal handler may call attention
        self.counts = Counts(self.journal.path(".counts"))
        self.entries: dict[Any, Entry] = {}
        self.numbers: dict[Any, int] = {}  # template numbers by the shared properties
        self.templates.clear()
        self.compiled: set[str] = set()
        self.codes: dict[int, CodeType] = {}  # keeps code objects alive, so ids are not reused
        self.sites: dict[int, Site] = {}  # by module id
        self.outside = Site(0)
        self.kept: dict[int, Any] = {}  # weak references to modules, by module id
        self.paths: dict[int, tuple[str | None, str | None]] = {}  # path and root class by id
        self.next_site = 1
        self.first_site: Site | None = None
        self.passes = 0
        self.optimized = False
        self.started = False

    def forked(self) -> None:
        self.journal.begin()
        self._reset()
        self.window.forget()

    def note(
        self, frame: FrameType, a: tuple[Any, ...], k: dict[str, Any], *, silent: bool = False
    ) -> tuple[Entry, bool] | None:
        """Count a call. If it has a new template or must be marked for the profiler, return its
        entry and whether the template is new. Otherwise, return None.

        Calls without real tensors and calls during tracing are not counted. For flex_attention, `k`
        contains the names of its functions under the key FUNCTIONS. `silent` is set if
        `__torch_function__` handlers are disabled.
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
            # the sizes of these subclasses cannot be read
            fake = type(q).__name__ in ("FakeTensor", "FunctionalTensor")
            if fake or not isinstance(q, torch.Tensor) or key is None or v is None:
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
        # The key omits the priority order of backends and the dims of `value`, because they rarely
        # change unless another part of the key changes too.
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
        if last != exact:  # this comparison is cheaper than the look-up
            entry = self.entries.get((site.number, exact))
            if entry is None:
                entry, fresh = self._new_entry(site, exact, above, frame, (q, key, v, mask), a, k)
            site.last = (exact, entry)
        entry.cells[entry.at] += 1
        marked = self.window.state in WATCHED and self._pass(site)
        return (entry, fresh) if fresh or marked else None

    def learn(self, entry: Entry, a: tuple[Any, ...], k: dict[str, Any], output: Any) -> None:
        """Add properties to a new template that are known only after the call, and write it."""
        template = self.templates[entry.template]
        if template["kind"] == "flex":
            blocks = block_mask(a[BLOCK_MASK], recorded=self._recorded())
            template |= {"ran": "flex", "mask": blocks}
            self._write(template)
            return
        given = dict(zip(NAMES, a, strict=False)) | k
        made = getattr(output, "grad_fn", None)
        # the node's name ends in a number
        node = None if made is None else str(made.name()).rstrip("0123456789")
        mask = given.get("attn_mask")
        choice = select_backend([given[name] for name in NAMES[:3]], mask, template)
        template |= {"node": node, "choice": choice, "ran": NODES.get(node or "", choice)}
        if mask is not None:
            template["mask"] = mask_contents(mask, recorded=self._recorded())
        self._write(template)

    def _recorded(self) -> bool:
        """Return whether the program would notice the ops that read a mask.

        While the window is open, `unrecorded` hides them from its profiler.
        """
        if self.window.state == "open" and not self.window.others and HIDES_OPS:
            return in_mode_or_capture()
        return in_mode_or_capture() or torch.autograd._profiler_enabled()

    def raised(self, entry: Entry) -> None:
        """Forget a new template whose call raised an exception.

        The next similar call then creates a new template.
        """
        number = entry.template
        with self.lock:
            self.entries = {key: one for key, one in self.entries.items() if one.template != number}
            self._forget_last()
            self.numbers = {key: one for key, one in self.numbers.items() if one != number}
        self._write(self.templates[number] | {"raised": True})

    def note_compiled(self, properties: dict[str, Any]) -> None:
        """Record a call that Dynamo traces. The number of its executions is unknown."""
        key = repr(sorted(properties.items()))
        with self.lock:
            if key in self.compiled:
                return
            self.compiled.add(key)
            template = {"template": len(self.templates), "kind": "sdpa", "compiled": True}
            template |= properties
            self.templates.append(template)
        self._write(template)

    def optimizer_stepped(self) -> None:
        if get_ident() == self.window.home:
            self.optimized = True
            if self.templates:
                self.window.step()

    def _pass(self, site: Site) -> bool:
        """Report a step to the window if a call starts a new pass through the model.

        Return whether to mark the call. A pass starts when the first attention module of the model
        runs again. Once an optimizer has stepped, only its steps are reported. Among the first
        GRADED_PASSES passes, passes with gradients are not reported, because an optimizer may step
        after them.
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
        shown = self.window.state == "open"
        self.window.calls += shown
        return shown

    def _forget_last(self) -> None:
        for site in (self.outside, *list(self.sites.values())):
            site.last = (None, None)

    def _new_site(self, module: Any) -> Site:
        identity = id(module)

        def gone(_: Any) -> None:
            for table in (self.sites, self.kept, self.paths):
                table.pop(identity, None)

        with self.lock:
            if identity not in self.sites:  # another thread may have added it
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
        described = [describe_tensor(item) for item in tensors]
        patterns, relation = map(_pattern, described), _relation(described)
        common = (*patterns, relation, *options.values(), *exact[-FLAG_PARTS:])
        query, key = [tuple((item or {}).get("dims") or ()) for item in described[:2]]
        lengths: tuple[int, ...] = ()
        if len(query) >= 3 and len(key) >= 3:
            lengths = (query[0] if len(query) == 4 else 1, query[-2], key[-2])
        with self.lock:
            if entry := self.entries.get((site.number, exact)):
                return entry, False  # another thread has added it
            if len(self.entries) >= MOST_KEYS:
                self.entries.clear()
                self._forget_last()
            shared = (site.number, *exact[:POSITION_PARTS], common)
            number = self.numbers.get(shared)
            fresh = number is None
            if number is None:
                number = len(self.templates)
                if number >= MOST_TEMPLATES:
                    raise RuntimeError(
                        f"the program makes more than {MOST_TEMPLATES} kinds of calls"
                    )
                self.codes[id(frame.f_code)] = frame.f_code
                self.templates.append(
                    {"template": number, "kind": "flex" if exact[FLEX] else "sdpa"}
                    | {"compiled": False, "functions": exact[FLEX]}
                    | self._position(above, frame)
                    | {"tensors": described, **options}
                    | {"grad": _grad(), "inference": torch.is_inference_mode_enabled()}
                    | {"recompute": _task() >= 0, "autocast": autocast(tensors[0].device.type)}
                    | flags()
                )
                self.numbers[shared] = number
                self.window.quiet = -1  # the current step does not count as quiet
            template = self.templates[number]
            name = template["path"] or template["module_class"] or template["function"]
            entry = Entry(number, f"{MARKER}{name}", *self.counts.row(number, lengths))
            self.entries[site.number, exact] = entry
        return entry, fresh

    def _position(self, above: FrameType | None, frame: FrameType) -> dict[str, Any]:
        """Return the modules around a call, and the line of the innermost code outside torch."""
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
            "file": _relative_file(outside.f_code.co_filename),
            "line": outside.f_lineno,
            "function": outside.f_code.co_qualname,
        }

    def _path(self, modules: list[Any]) -> tuple[str | None, str | None]:
        """Return the path of the innermost module, and the class of the outermost module.

        The path starts at the outermost module. An example is `layers.0.self_attn`.
        """
        innermost, outermost = modules[0], modules[-1]
        root = type(outermost).__name__
        if id(innermost) not in self.paths:
            for name, module in outermost.named_modules():
                if id(module) in self.sites:
                    parts = [part for part in name.split(".") if part not in INSERTED]
                    if root in PARALLEL and parts[:1] == ["module"]:
                        del parts[0]
                    self.paths[id(module)] = (".".join(parts) or None, root)
        return self.paths.get(id(innermost), (None, root))

    def _write(self, template: dict[str, Any]) -> None:
        if template["template"] == 0:
            rank = {
                name.lower(): os.environ[name]
                for name in ("RANK", "WORLD_SIZE")
                if name in os.environ
            }
            self.counts.open()
            self.journal.write("start", environment=environment(), final_counts=True, **rank)
        self.journal.write("template", **template)

    def fail(self, error: BaseException) -> None:
        if not self.on:
            return
        self.on = False
        print_error(f"attention is no longer recorded: {error!r}; the program continues")
        with contextlib.suppress(Exception):  # the disk may be full
            self.journal.write("failed", why=repr(error))


def _pattern(tensor: dict[str, Any] | None) -> Any:
    """Return the properties of a tensor that are equal in all calls of a template, such as the
    number of heads, the head dim and the memory order.
    """
    if tensor is None or tensor["dims"] is None:
        return None if tensor is None else tensor["dtype"]
    dims, strides, dtype = tensor["dims"], tensor["strides"], tensor["dtype"]
    order = sorted(range(len(dims)), key=lambda at: (-strides[at], at)) if strides else ()
    wide = tuple(at for at in order if dims[at] != 1)
    fixed = (dims[-3] if len(dims) > 2 else None, dims[-1]) if dtype != "bool" else None
    return len(dims), fixed, dtype, tensor["requires_grad"], wide, tensor.get("class")


def _relation(tensors: list[dict[str, Any] | None]) -> tuple[Any, ...]:
    """Return which of query and key is longer, and which dims of the mask have size 1."""
    query, key, mask = [(tensors[at] or {}).get("dims") for at in (0, 1, 3)]
    if not query or not key or len(query) < 2 or len(key) < 2:
        return ()
    rows, columns = query[-2], key[-2]
    relation = "one" if rows == 1 < columns else (rows > columns) - (rows < columns)
    return relation, tuple(size == 1 for size in mask) if mask else None


def _relative_file(path: str) -> str:
    best = path
    for folder in (os.getcwd(), *sys.path):  # noqa: PTH109
        begin = folder.rstrip(os.sep) + os.sep
        if folder and path.startswith(begin) and len(path) - len(begin) < len(best):
            best = path[len(begin) :]
    return best


def describe_tensor(value: Any) -> dict[str, Any] | None:
    """Return properties of a tensor such as dims and dtype, or None if the value is no tensor.

    The dims are None if they are symbolic.
    """
    if not isinstance(value, torch.Tensor):
        return None
    dims, dtype = list(value.shape), str(value.dtype).removeprefix("torch.")
    if not all(type(size) is int for size in dims):
        return {"dims": None, "dtype": dtype}
    plain = value.layout == torch.strided and not value.is_nested
    return {
        "dims": dims,
        "strides": list(value.stride()) if plain else None,
        "dtype": dtype,
        "device": value.device.type,
        "requires_grad": value.requires_grad,
        **({} if type(value) in PLAIN else {"class": type(value).__name__}),
    }


def flags() -> dict[str, Any]:
    """Return the flags of PyTorch that influence which backend is selected."""
    enabled = {"flash": _flash(), "efficient": _efficient(), "math": _math()}
    if _cudnn is not bool:
        enabled["cudnn"] = _cudnn()
    numbers = map(int, _priority()) if _priority else ()
    return {
        "enabled": enabled,
        "priority": [CHOICES.get(number, str(number)) for number in numbers] or None,
        "deterministic": _deterministic(),
    }


def autocast(device: str) -> str | None:
    if device == "meta" or not torch.is_autocast_enabled(device):
        return None
    return str(torch.get_autocast_dtype(device)).removeprefix("torch.")


def select_backend(inputs: list[Any], mask: Any, options: dict[str, Any]) -> str | None:
    """Return the backend that torch would select, or None if this cannot be queried without side
    effects or without creating a large tensor.
    """
    tensors, device = [*inputs, mask], inputs[0].device.type
    if device == "meta" or any(type(item) not in PLAIN for item in inputs) or _in_mode():
        return None
    if torch.is_autocast_enabled(device) and inputs[0].dtype == torch.float32:
        dtype = torch.get_autocast_dtype(device)
        for at, item in enumerate(tensors):
            if item is not None and item.dtype != torch.bool:
                if item.numel() * 2 > CAST_BYTES:
                    return None
                strides, on = item.stride(), item.device
                tensors[at] = torch.empty_strided(item.shape, strides, dtype=dtype, device=on)
    number = torch._fused_sdp_choice(
        *tensors,
        options["dropout"],
        options["causal"],
        scale=options["scale"],
        enable_gqa=options["gqa"],
    )
    return CHOICES.get(int(number), str(number))


def environment() -> dict[str, Any]:
    """Return the software versions and the device of this process.

    The keys are the same as in the environment of a run.
    """
    keys: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "torch": str(torch.__version__),
        "torch_git": torch.version.git_version,
        "torch_cuda": torch.version.cuda,
        "num_threads": torch.get_num_threads(),
        "device_type": "cuda" if torch.cuda.is_initialized() else "cpu",
    }
    if torch.cuda.is_initialized():
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        keys |= {
            "gpu": device.name,
            "capability": f"{device.major}.{device.minor}",
            "num_sms": device.multi_processor_count,
            "gpu_memory_bytes": device.total_memory,
            "cudnn": torch.backends.cudnn.version(),
        }
    return keys


def mask_contents(mask: Any, *, recorded: bool) -> dict[str, Any] | None:
    """Return the kind of a mask, such as `causal`, `key_padding` or `window`, and its properties.

    Return None if the mask is too large, or if `recorded` forbids ops that read it.
    """
    if type(mask) not in PLAIN or mask.device.type == "meta":
        return None
    if mask.numel() == 0 or not 2 <= mask.dim() <= 4 or recorded:
        return None
    size = 1
    for length, stride in zip(mask.shape, mask.stride(), strict=True):
        size *= length if stride else 1
    if size * mask.element_size() > MASK_BYTES:
        return None
    with unrecorded(), torch.no_grad():
        # Read broadcast dims only once.
        distinct = mask.detach()[
            tuple(slice(0, 1) if s == 0 else slice(None) for s in mask.stride()[:-2])
        ]
        if distinct.numel() * mask.element_size() > MASK_BYTES:
            return None
        return _classify(distinct.to("cpu"))


def block_mask(mask: Any, *, recorded: bool) -> dict[str, Any]:
    """Describe a block mask of flex_attention, with its masked fraction unless `recorded` is set."""
    if mask is None:
        return {"contents": "none"}
    if type(mask.kv_num_blocks) is not torch.Tensor or recorded:
        return {"contents": "block_mask"}
    with unrecorded(), torch.no_grad():
        return {"contents": "block_mask", "masked": float(mask.sparsity()) / 100}


def _in_mode() -> bool:
    """Return whether a dispatch mode or a function transform would intercept our ops."""
    functorch = getattr(C, "_functorch", None)
    transform = functorch is not None and functorch.peek_interpreter_stack() is not None
    return bool(transform or C._len_torch_dispatch_stack())


def in_mode_or_capture() -> bool:
    """Return whether a mode or a CUDA graph would record ops of the observer."""
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return _in_mode() or capturing


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Hide the ops within the block from profilers of this thread, except copies from a GPU."""
    if not (HIDES_OPS and torch.autograd._profiler_enabled()):
        yield
        return
    torch.autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)


def _classify(mask: Any) -> dict[str, Any]:
    rows, columns = mask.shape[-2:]
    kept = mask if mask.dtype == torch.bool else mask.float() > torch.finfo(mask.dtype).min / 2
    masked = 1.0 - float(kept.float().mean())

    def found(contents: str, **more: Any) -> dict[str, Any]:
        return {"contents": contents, "masked": masked, **more}

    if mask.dtype != torch.bool and bool((mask[kept] != 0).any()):
        return found("bias")
    if masked == 0.0:
        return found("nothing")
    flat = kept.reshape(-1, rows, columns)
    lower = torch.ones(rows, columns, dtype=torch.bool)
    if rows > 1:
        for name, offset in (("causal", 0), ("causal_lower_right", columns - rows)):
            if bool((flat == lower.tril(offset)).all()):
                return found(name)
    if bool((flat == flat[:, :1]).all()):
        return found("key_padding")
    if rows == columns:
        padding = flat.any(dim=1, keepdim=True)
        if bool((flat == (padding & lower.tril())).all()):
            return found("causal_and_key_padding")
    distance = torch.arange(columns)[None, :] - torch.arange(rows)[:, None] - (columns - rows)
    inside = distance[flat[0]]
    if inside.numel():
        # how far a band extends to the left and right of the diagonal
        left, right = int(inside.min()), int(inside.max())
        if bool((flat == (distance >= left) & (distance <= right)).all()):
            return found("window", window=[-left, right])
    return found("other")
