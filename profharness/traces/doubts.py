"""Reasons why a config does not replay an attention call, and warnings about traces that lack or
contradict information about attention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from profharness.traces.ops import HostSpan
from profharness.traces.replay import flag, sizes

NO_SHAPES = (
    "the trace has no shapes; record it with record_shapes=True, "
    "under nsys with --pytorch=autograd-shapes-nvtx"
)
VARLEN = "sequences of unequal length in one tensor (varlen), which no config says"
NESTED = "the trace does not tell the shapes of query, key and value, as of nested tensors"
UNREADABLE = "the shapes in the trace are not those of query, key and value"
NO_STRIDES = "the trace does not tell the strides of query, key and value"
NO_CAUSAL = "the trace does not tell is_causal"
BY_ITSELF = "{op} was called by itself; a config replays scaled_dot_product_attention"
CUMULATED = 4  # position of the cumulated lengths in the ops for packed sequences

ORPHANS = (
    "no arrow leads from a forward in the trace to {n} backward ops of attention: their time is in no "
    "layer"
)
CONTRADICTED = (
    "the arrows of {n} attention calls lead to other backward ops: their backward is not told"
)
OVERLAPS = "{n} calls of modules begin in another and end after it: the layers may be wrong"


def is_packed(op: HostSpan) -> bool:
    """Return whether an op's tensors are sequences of unequal length, packed into one."""
    return bool(sizes(op.arguments.dims, CUMULATED))


def is_unlike_sdpa(reason: str | None) -> bool:
    """Return whether the arguments of a call are not those of scaled_dot_product_attention."""
    return reason == VARLEN or bool(reason and reason.endswith(BY_ITSELF.format(op="")))


def doubt(op: HostSpan, names: str, places: Mapping[str, int]) -> str | None:
    """Return the argument of an op that a config would have to guess, or None.

    `names` has a letter per position (query, key, value, mask), `places` the positions of the
    flags. nsys records only dims, so the missing dtype is reported elsewhere.
    """
    if not op.arguments.dims:
        return NO_SHAPES
    if not places:
        return BY_ITSELF.format(op=op.name)
    at = [names.find(name) for name in "qkv"]
    if not any(op.arguments.dims[place] for place in at if place < len(op.arguments.dims)):
        return NESTED
    dims = [sizes(op.arguments.dims, place) for place in at]
    if not all(dims):
        return UNREADABLE
    if not op.arguments.types:
        return None
    strides = [sizes(op.arguments.strides, place) for place in at]
    if list(map(len, strides)) != list(map(len, dims)):
        return NO_STRIDES
    if "causal" in places and flag(op, places["causal"]) is None:
        return NO_CAUSAL
    return None


def warnings(
    reasons: Sequence[str | None], counted: Mapping[str, int], overlaps: int
) -> tuple[str, ...]:
    """Return a warning per kind of doubt, with its count. `reasons` has one entry per call, `overlaps`
    counts overlapping modules.
    """
    counts = {
        text: f"{count:,} attention calls" for text, count in Counter(reasons).items() if text
    }
    damaged = [text for text in (UNREADABLE, NO_STRIDES, NO_CAUSAL) if text in counts]
    some = reasons.count(NO_SHAPES)
    texts = [f"{counts[text]}: {text}" for text in damaged]
    if 0 < some < len(reasons):
        texts.append(
            f"{some:,} of {len(reasons):,} attention calls have no shapes, the others have"
        )
    numbers = {**counted, OVERLAPS: overlaps}
    return (*texts, *(text.format(n=f"{n:,}") for text, n in numbers.items() if n))
