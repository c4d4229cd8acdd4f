"""Read the journals of an observed program, which count the attention calls of its processes, and
match them with the calls of its trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from profharness.attention.config import AUTO
from profharness.dtypes import OF_TORCH
from profharness.errors import UsageError
from profharness.run import observed_journals, observed_rows
from profharness.trace import AttentionCall, TensorArgument
from profharness.traces.ops import OUTER
from profharness.traces.replay import replay_config

INNER = "aten::_scaled_dot_product_"
INNER_OPS = {
    "flash": f"{INNER}flash_attention",
    "efficient": f"{INNER}efficient_attention",
    "cudnn": f"{INNER}cudnn_attention",
    "math": f"{INNER}attention_math",
    "overrideable": f"{INNER}fused_attention_overrideable",
}
COMPILED = "torch.compile traced this call; its shapes and how often it runs are in a trace"
NONE_RAN, RAISED = "none", "the call raised an error"
OTHER_FUNCTION = "no config says what the mask and score functions of {} do"

_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]  # the range that a store can hold
_Lengths = tuple[tuple[tuple[int, ...], int], ...]


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """The calls with one template in one process.

    `lengths` maps (batch, query, key) to numbers of calls. `enabled` are the allowed backends by
    priority. `asked` is `auto` if no backend was ruled out, else their names joined by commas.
    `choice` is the backend that torch selected, `ran` the backend that computed the call, or `none`
    if the call raised an error. `mask` is the class of the first call's mask, or `none`. Each is
    None or empty if the journal does not record it.
    """

    call: AttentionCall
    count: int
    pid: int
    rank: int | None = None
    lengths: _Lengths = ()
    file: str | None = None
    line: int | None = None
    function: str | None = None
    asked: str | None = None
    choice: str | None = None
    ran: str | None = None
    mask: str | None = None
    enabled: tuple[str, ...] = ()

    @property
    def name(self) -> str | None:
        """The name of the range around such a call in a trace."""
        return self.call.path or next(iter(self.call.modules[-1:]), None) or self.function


@dataclass(frozen=True, slots=True)
class Journals:
    """The calls of all processes, and a warning per damaged journal or if there are no calls."""

    calls: tuple[ObservedCall, ...]
    warnings: tuple[str, ...] = ()


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
    """A line of the journal. The observer's recorder documents the fields."""

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
    "{n} process(es) left no last counts (recording failed, or the files are incomplete): some of "
    "their calls are not counted"
)
_EVENTS: dict[str | None, Any] = {"template": _Template, "start": _Start, "counts": _Counts}


def read_observed(folder: Path) -> tuple[ObservedCall, ...]:
    """Return the calls in all journals of a run folder. Raise TraceFormatError as `read_journals`
    does.
    """
    return read_journals(folder).calls


def read_journals(folder: Path) -> Journals:
    """Return the calls in all journals of a run folder. Damaged lines are skipped and counted.

    Raise TraceFormatError if a journal cannot be read.
    """
    calls: list[ObservedCall] = []
    warnings, cut_short = [], 0
    for path in observed_journals(folder):
        templates, rank, counts, whole, damaged = _journal(path)
        cut_short += not whole
        stem = path.stem.partition("-")[0]  # a later process with the same pid writes `123-2`
        pid = int(stem) if stem.isdecimal() else 0
        for template in templates:
            count, lengths = counts.get(template.template, (0 if template.compiled else 1, ()))
            calls_by_lengths = tuple((tuple(key), calls_of) for *key, calls_of in lengths)
            calls.append(_call(template, count, calls_by_lengths, pid, rank))
        if damaged:
            warnings.append(f"{path.name}: {damaged} line(s) cannot be read and are left out")
    if cut_short:
        warnings.append(CUT_SHORT.format(n=cut_short))
    if not calls:
        warnings.append("no process of the program recorded an attention call")
    return Journals(tuple(calls), tuple(warnings))


def _journal(path: Path) -> tuple[list[_Template], int | None, dict[int, Any], bool, int]:
    """Read a journal.

    Return its templates, the rank, counts and lengths by template, whether the counts are final,
    and the number of damaged lines. Journals without a final mark count as final.
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
        elif isinstance(event, _Counts):  # each line contains all counts so far
            counts = {number: (count, lengths) for number, count, lengths in event.counts}
            whole = whole or event.final
    return templates, rank, counts, whole, damaged


def _call(
    row: _Template, count: int, lengths: _Lengths, pid: int, rank: int | None
) -> ObservedCall:
    given = tuple(_tensor(item, row.autocast) for item in row.tensors[:4])
    tensors = (*given, *(None,) * (4 - len(given)))
    backward = row.grad and any(item and item.requires_grad for item in row.tensors)
    config, reason = None, _why_no_config(row)
    if reason is None:
        try:
            config = replay_config(
                tensors,
                causal=row.causal,
                dropout=row.dropout,
                scale=row.scale,
                gqa=row.gqa,
                backward=backward,
            )
        except UsageError as error:
            reason = str(error)
    allowed = (row.enabled or {}) if row.kind == "sdpa" else {}
    enabled = tuple(name for name in row.priority or tuple(allowed) if allowed.get(name))
    asked = (AUTO if all(allowed.values()) else ",".join(enabled)) if allowed else None
    mask = row.mask.contents if row.mask else None
    unmasked = row.masked is False if row.compiled else tensors[3] is None
    if row.kind == "sdpa" and unmasked:
        mask = "none"
    call = AttentionCall(
        kind=row.kind,
        op=OUTER if row.kind == "sdpa" else row.kind,
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
    )
    place = row.file, row.line, row.function
    ran = NONE_RAN if row.raised else row.ran
    return ObservedCall(
        call, count, pid, rank, lengths, *place, asked, row.choice, ran, mask, enabled
    )


def _why_no_config(row: _Template) -> str | None:
    if row.compiled:
        return COMPILED
    if row.raised:
        return RAISED
    return None if row.kind == "sdpa" else OTHER_FUNCTION.format(f"{row.kind}_attention")


def _tensor(recorded: _Tensor | None, autocast: str | None) -> TensorArgument | None:
    """Return a tensor as autocast passes it on: float32 becomes the autocast dtype."""
    if recorded is None or recorded.dims is None:
        return None
    dtype = recorded.dtype
    if autocast is not None and dtype == "float32":
        dtype = autocast
    strides = (
        recorded.strides
        if recorded.strides and len(recorded.strides) == len(recorded.dims)
        else None
    )
    return TensorArgument(
        tuple(recorded.dims), tuple(strides) if strides else None, OF_TORCH.get(dtype, dtype)
    )


def match_calls(
    calls: Sequence[AttentionCall], observed: Sequence[ObservedCall]
) -> list[int | None]:
    """Return for each call of a trace the index of its observed call.

    Return None if none matches, or if several match that carry different information.
    """
    named: dict[str | None, list[int]] = {}
    for index, item in enumerate(observed):
        if item.name is not None and not item.call.compiled:
            named.setdefault(item.name, []).append(index)
    pids = {item.pid for item in observed}
    known: dict[Any, int | None] = {}
    found = []
    for call in calls:
        # Pids in a container may differ from those outside
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
    """Return a call of a trace, completed from its template.

    Traces such as nsys' may lack the dtype. The template's config is that of its first call, so
    only calls of the same lengths get it. Uncompiled flex_attention is plain products in a trace.
    """
    other = item.call
    if _is_unfused(call, other):
        return replace(call, kind=other.kind, compiled=False, config=None, reason=other.reason)
    if call.config is not None or other.config is None:
        return call
    if length_key(call.tensors) != length_key(other.tensors):
        return call
    return replace(call, config=other.config, reason=other.reason)


def _is_unfused(call: AttentionCall, other: AttentionCall) -> bool:
    """Return whether a call of a trace may be uncompiled flex_attention.

    In a trace, that consists of plain products, in another dtype and in what PyTorch marks as a
    compiled region.
    """
    return (call.kind, other.kind, other.compiled) == ("eager", "flex", False)


def _fits(call: AttentionCall, item: ObservedCall) -> bool:
    """Return whether a call of a trace matches a template."""
    other = item.call
    given = call.tensors[:3]
    if _is_unfused(call, other):
        given = tuple(tensor and replace(tensor, dtype=None) for tensor in given)
    elif (call.kind, call.compiled) != (other.kind, False):
        return False
    if call.recompute != other.recompute or not all(map(_like, given, other.tensors[:3])):
        return False
    mine, theirs = call.tensors[3], other.tensors[3]
    if (mine is None) != (theirs is None):
        return False
    if mine and theirs and not (_same_dtype(mine, theirs) and _ones(mine) == _ones(theirs)):
        return False
    causal = {one.causal for one in (call.config, other.config) if one}
    lengths = {key for key, _ in item.lengths} or {length_key(other.tensors)}
    return len(causal) < 2 and length_key(call.tensors) in lengths


def _like(mine: TensorArgument | None, theirs: TensorArgument | None) -> bool:
    """Return whether number of heads, head dim and dtype are equal."""
    if mine is None or theirs is None:
        return mine is theirs
    same = len(mine.dims) == len(theirs.dims) and _same_dtype(mine, theirs)
    return same and (mine.dims[-3:-2], mine.dims[-1:]) == (theirs.dims[-3:-2], theirs.dims[-1:])


def _same_dtype(mine: TensorArgument, theirs: TensorArgument) -> bool:
    return None in (mine.dtype, theirs.dtype) or mine.dtype == theirs.dtype


def _ones(mask: TensorArgument) -> list[bool]:
    return [size == 1 for size in mask.dims]


def length_key(tensors: Sequence[TensorArgument | None]) -> tuple[int, ...]:
    """Return batch, query length and key length as the recorder does, or () for less than 3 dims."""
    query, key = [item.dims if item else () for item in tensors[:2]]
    if len(query) < 3 or len(key) < 3:
        return ()
    return (query[0] if len(query) == 4 else 1, query[-2], key[-2])


def _nearest(
    call: AttentionCall, observed: Sequence[ObservedCall], near: Iterable[int]
) -> int | None:
    """Return the best match. On a tie, return one only if all candidates carry the same
    information.
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
    contents = {_information(observed[index]) for index in kept}
    return kept[0] if len(contents) == 1 else None


def _order(call: AttentionCall) -> list[list[int]]:
    """Return the memory order of query, key and value."""
    return [
        sorted(range(len(item.dims)), key=lambda at: -(item.strides or item.dims)[at])
        for item in call.tensors[:3]
        if item
    ]


def _information(item: ObservedCall) -> ObservedCall:
    """Return a call without what may differ between calls of a template: shapes and counts."""
    bare = replace(item.call, config=None, tensors=(), backward=False, reason=None, pid=0)
    return replace(item, call=bare, count=0, lengths=(), pid=0, rank=None)
