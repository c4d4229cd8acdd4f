"""Read the journals of an observed program and match them with the attention calls of its trace.

Each process of the program writes a journal, which counts the attention calls of the process. Calls
with equal properties share one line of the journal, called a template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from profharness.attention.config import AUTO
from profharness.dtypes import OF_TORCH
from profharness.errors import UsageError, counted, with_count
from profharness.run import observed_journals, observed_rows
from profharness.trace import AttentionCall, TensorArgument
from profharness.traces.ops import OUTER, replay_config

INNER = "aten::_scaled_dot_product_"
INNER_OPS = {
    "flash": f"{INNER}flash_attention",
    "efficient": f"{INNER}efficient_attention",
    "cudnn": f"{INNER}cudnn_attention",
    "math": f"{INNER}attention_math",
    "overrideable": f"{INNER}fused_attention_overrideable",
}
COMPILED = (
    "torch.compile traced this call; only a trace shows which shapes it has and how often it runs"
)
NONE_RAN, RAISED = "none", "the call raised an error"
OTHER_FUNCTION = "a config cannot describe the mask or score functions of {}"

_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]  # the integers that a store can contain
_Lengths = tuple[tuple[tuple[int, ...], int], ...]


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """The calls of one process that have the same template.

    A field is None or empty if the journal does not record it.
    """

    call: AttentionCall
    count: int
    pid: int
    rank: int | None = None
    lengths: _Lengths = ()  # pairs of (batch, query length, key length) and a count
    file: str | None = None
    line: int | None = None
    function: str | None = None
    asked: str | None = None  # `auto` if all are allowed, or the allowed backends
    choice: str | None = None  # the backend that PyTorch selected
    ran: str | None = None  # the backend that computed the call, or `none` if it raised an error
    mask: str | None = None  # the kind of the first call's mask, or `none`
    enabled: tuple[str, ...] = ()  # the allowed backends, by priority

    @property
    def name(self) -> str | None:
        """The name of the range that encloses these calls in a trace."""
        return self.call.path or next(iter(self.call.modules[-1:]), None) or self.function


Journals = tuple[tuple[ObservedCall, ...], list[str]]
"""The calls of all processes, and warnings."""


@dataclass(frozen=True)
class _Tensor:
    dims: list[_Number] | None = None
    strides: list[int] | None = None
    dtype: str = ""
    requires_grad: bool = False


@dataclass(frozen=True)
class _Mask:
    contents: str | None = None


@dataclass(frozen=True)
class _Template:
    """A line of a journal that describes calls with equal properties.

    The recorder documents the fields.
    """

    template: _Number
    compiled: bool
    masked: bool | None = None
    kind: str = "sdpa"
    path: str | None = None
    modules: tuple[str, ...] = ()
    tensors: tuple[_Tensor | None, ...] = ()
    file: str | None = None
    line: _Number | None = None
    function: str | None = None
    causal: bool | None = None
    dropout: float | None = None
    scale: float | None = None
    gqa: bool | None = None
    grad: bool = False
    recompute: bool = False
    autocast: str | None = None
    enabled: dict[str, bool] | None = None
    priority: tuple[str, ...] | None = None
    choice: str | None = None
    ran: str | None = None
    mask: _Mask | None = None
    raised: bool = False


@dataclass(frozen=True)
class _Start:
    rank: str | None = None
    final_counts: bool = False


@dataclass(frozen=True)
class _Counts:
    counts: tuple[tuple[_Number, _Number, tuple[tuple[_Number, ...], ...]], ...]
    final: bool = False


CUT_SHORT = (
    "{n} [process|processes] did not write final counts (recording failed, or the files are "
    "incomplete), so some calls are not counted"
)
_EVENTS: dict[str | None, Any] = {"template": _Template, "start": _Start, "counts": _Counts}


def read_observed(folder: Path) -> tuple[ObservedCall, ...]:
    """Return the calls in all journals of a run folder.

    Raise TraceFormatError if a journal cannot be read.
    """
    return read_journals(folder)[0]


def read_journals(folder: Path) -> Journals:
    """Return the calls in all journals of a run folder, and warnings.

    The warnings count damaged lines and processes whose last counts are missing. If there are no
    calls at all, a warning reports this. Raise TraceFormatError if a journal cannot be read.
    """
    calls: list[ObservedCall] = []
    warnings, cut_short = [], 0
    for path in observed_journals(folder):
        found, whole, damaged = _journal(path)
        calls += found
        cut_short += not whole
        if damaged:
            warnings.append(f"{path.name}: skipped {counted(damaged, 'line')} that cannot be read")
    if cut_short:
        warnings.append(with_count(CUT_SHORT, cut_short))
    if not calls:
        warnings.append("none of the program's processes recorded an attention call")
    return tuple(calls), warnings


def _journal(path: Path) -> tuple[list[ObservedCall], bool, int]:
    """Return the calls in a journal, whether the counts are final, and how many lines are damaged.

    Older recorders did not mark their last counts, which are assumed to be final.
    """
    templates: list[_Template] = []
    counts: dict[int, Any] = {}
    rank, damaged, whole = None, 0, True
    for row in observed_rows(path):
        name = (row or {}).get("event")
        try:
            event = msgspec.convert(row, _EVENTS.get(name if isinstance(name, str) else None, dict))
        except msgspec.ValidationError:
            damaged += 1
            continue
        if isinstance(event, _Template):
            templates.append(event)
        elif isinstance(event, _Start):
            whole = not event.final_counts
            text = event.rank or ""
            rank = int(text) if text.isdecimal() and len(text) < 10 else None
        elif isinstance(event, _Counts):  # each such line repeats all counts
            counts = {number: (count, lengths) for number, count, lengths in event.counts}
            whole = whole or event.final
    # If a later process has the same pid, its journal has a name such as `123-2`
    stem = path.stem.partition("-")[0]
    pid = int(stem) if stem.isdecimal() else 0
    calls = []
    for template in templates:
        count, rows = counts.get(template.template, (0 if template.compiled else 1, ()))
        lengths = tuple((tuple(key), calls_of) for *key, calls_of in rows)
        calls.append(_call(template, count, lengths, pid, rank))
    return calls, whole, damaged


def _call(
    row: _Template, count: int, lengths: _Lengths, pid: int, rank: int | None
) -> ObservedCall:
    given = tuple(_tensor(item, row.autocast) for item in row.tensors[:4])
    tensors = (*given, *(None,) * (4 - len(given)))
    backward = row.grad and any(item and item.requires_grad for item in row.tensors)
    is_sdpa = row.kind == "sdpa"
    config, reason = None, None
    if row.compiled:
        reason = COMPILED
    elif row.raised:
        reason = RAISED
    elif not is_sdpa:
        reason = OTHER_FUNCTION.format(f"{row.kind}_attention")
    else:
        flags = {name: getattr(row, name) for name in ("causal", "dropout", "scale", "gqa")}
        try:
            config = replay_config(tensors, backward=backward, **flags)
        except UsageError as error:
            reason = str(error)
    allowed = (row.enabled or {}) if is_sdpa else {}
    enabled = tuple(name for name in row.priority or tuple(allowed) if allowed.get(name))
    mask = row.mask.contents if row.mask else None
    if is_sdpa and (row.masked is False if row.compiled else tensors[3] is None):
        mask = "none"
    return ObservedCall(
        call=AttentionCall(
            kind=row.kind,
            op=OUTER if is_sdpa else row.kind,
            sdpa_op=None,
            compiled=row.compiled,
            recompute=row.recompute,
            backward=backward,
            modules=row.modules,
            config=config,
            reason=reason,
            tensors=tensors,
            path=row.path,
            pid=pid,
        ),
        count=count,
        pid=pid,
        rank=rank,
        lengths=lengths,
        file=row.file,
        line=row.line,
        function=row.function,
        asked=(AUTO if all(allowed.values()) else ",".join(enabled)) if allowed else None,
        choice=row.choice,
        ran=NONE_RAN if row.raised else row.ran,
        mask=mask,
        enabled=enabled,
    )


def _tensor(recorded: _Tensor | None, autocast: str | None) -> TensorArgument | None:
    """Convert a recorded tensor. The result has the dtype to which autocast casts the tensor.

    Return None if the dims were not recorded.
    """
    if recorded is None or recorded.dims is None:
        return None
    dims, strides, dtype = tuple(recorded.dims), tuple(recorded.strides or ()), recorded.dtype
    if autocast is not None and dtype == "float32":
        dtype = autocast
    known = strides if strides and len(strides) == len(dims) else None
    return TensorArgument(dims, known, OF_TORCH.get(dtype, dtype))


def match_calls(
    calls: Sequence[AttentionCall], observed: Sequence[ObservedCall]
) -> list[int | None]:
    """Return the index of the observed call that matches each call of a trace.

    The index is None if no observed call matches, or if several observed calls match but contain
    different information.
    """
    named: dict[str | None, list[int]] = {}
    for index, item in enumerate(observed):
        if item.name is not None and not item.call.compiled:
            named.setdefault(item.name, []).append(index)
    pids = {item.pid for item in observed}
    known: dict[Any, int | None] = {}
    found = []
    for call in calls:
        # The pids of a trace and of a journal may differ, for example if only one of them is from
        # inside a container. Then, calls of all processes are candidates.
        pid = call.pid if call.pid in pids else None
        key = (call.path, pid, call.kind, call.compiled, call.recompute, call.backward,
               call.tensors, call.config, call.sdpa_op)  # fmt: skip
        if key not in known:
            near = [
                index
                for index in named.get(call.path, ())
                if pid in (None, observed[index].pid) and _fits(call, observed[index])
            ]
            known[key] = _nearest(call, observed, near)
        found.append(known[key])
    return found


def completed(call: AttentionCall, item: ObservedCall) -> AttentionCall:
    """Return a call of a trace, completed with information from the observed call that matches it.

    A trace of nsys lacks the dtype, so the call gets the config of the observed call. This config
    describes the first call of the template, so only calls with the same lengths get the config.
    Uncompiled flex_attention appears in a trace as eager attention, so the kind of such a call is
    corrected.
    """
    other = item.call
    if _is_unfused(call, other):
        return replace(call, kind=other.kind, compiled=False, config=None, reason=other.reason)
    if call.config is not None or other.config is None:
        return call
    if _length_key(call.tensors) != _length_key(other.tensors):
        return call
    return replace(call, config=other.config, reason=other.reason)


def _is_unfused(call: AttentionCall, other: AttentionCall) -> bool:
    """Return whether a call of a trace may be uncompiled flex_attention.

    In a trace, uncompiled flex_attention looks like eager attention. The dtype of its matrix
    products differs from the dtype of the call, and PyTorch marks the products as part of a
    compiled region.
    """
    return (call.kind, other.kind, other.compiled) == ("eager", "flex", False)


def _fits(call: AttentionCall, item: ObservedCall) -> bool:
    other = item.call
    given = call.tensors[:3]
    if _is_unfused(call, other):
        given = tuple(tensor and replace(tensor, dtype=None) for tensor in given)
    elif (call.kind, call.compiled) != (other.kind, False):
        return False
    if call.recompute != other.recompute or not all(map(_is_like, given, other.tensors[:3])):
        return False
    mine, theirs = call.tensors[3], other.tensors[3]
    if (mine is None) != (theirs is None):
        return False
    if mine and theirs:
        ones = [[size == 1 for size in mask.dims] for mask in (mine, theirs)]
        if not _has_same_dtype(mine, theirs) or ones[0] != ones[1]:
            return False
    causal = {one.causal for one in (call.config, other.config) if one}
    lengths = {key for key, _ in item.lengths} or {_length_key(other.tensors)}
    return len(causal) < 2 and _length_key(call.tensors) in lengths


def _is_like(mine: TensorArgument | None, theirs: TensorArgument | None) -> bool:
    """Return whether two tensors have the same number of heads, head dim and dtype, if recorded."""
    if mine is None or theirs is None:
        return mine is theirs
    same = len(mine.dims) == len(theirs.dims) and _has_same_dtype(mine, theirs)
    return same and (mine.dims[-3:-2], mine.dims[-1:]) == (theirs.dims[-3:-2], theirs.dims[-1:])


def _has_same_dtype(mine: TensorArgument, theirs: TensorArgument) -> bool:
    return None in (mine.dtype, theirs.dtype) or mine.dtype == theirs.dtype


def _length_key(tensors: Sequence[TensorArgument | None]) -> tuple[int, ...]:
    """Return the batch size and the query and key length, or () if they are unknown."""
    query, key = [item.dims if item else () for item in tensors[:2]]
    if len(query) < 3 or len(key) < 3:
        return ()
    return (query[0] if len(query) == 4 else 1, query[-2], key[-2])


def _nearest(
    call: AttentionCall, observed: Sequence[ObservedCall], near: Iterable[int]
) -> int | None:
    """Return the index of the observed call that matches best, or None.

    If several calls match equally well, return the index of the first call if all of them contain
    the same information, and None otherwise.
    """
    rules: tuple[Callable[[ObservedCall], bool], ...] = (
        lambda item: _order(item.call) == _order(call),
        lambda item: (
            bool(item.ran)
            and (call.sdpa_op or "").startswith(INNER_OPS.get(item.ran or "", item.ran or ""))
        ),
        lambda item: item.call.backward == call.backward,
        lambda item: item.call.config == call.config,
    )
    kept = list(near)
    for rule in rules:
        kept = [index for index in kept if rule(observed[index])] or kept
    # Ignore fields such as shapes and counts, which may differ between calls of a template
    no_shapes: dict[str, Any] = {
        "config": None,
        "tensors": (),
        "backward": False,
        "reason": None,
        "pid": 0,
    }
    contents = set()
    for item in (observed[index] for index in kept):
        call_alone = replace(item.call, **no_shapes)
        contents.add(replace(item, call=call_alone, count=0, lengths=(), pid=0, rank=None))
    return kept[0] if len(contents) == 1 else None


def _order(call: AttentionCall) -> list[list[int]]:
    """Return the order in which the dims of query, key and value are stored, outermost first."""
    return [
        sorted(range(len(item.dims)), key=lambda at: -(item.strides or item.dims)[at])
        for item in call.tensors[:3]
        if item
    ]
