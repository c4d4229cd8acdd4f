"""Match the templates that the observer recorded with the attention calls in traces.

A template describes attention calls of one process that differ only in their lengths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from profharness.attention.config import Config, parse_config
from profharness.rows import UNTRACED, CallRow, CallSignature

# The batch size, the number of queries, and the number of keys. The number of keys is None if the
# call decodes.
Lengths = tuple[int | None, ...]
MOST_POINTS = 16  # maximum number of configs that represent the calls of one row
# The template number of a kind of call, and the lengths of a call. The lengths are None if the call
# is in no trace.
KindLengths = tuple[int, Lengths | None]


class ObservedCalls:
    """The observed calls of a run.

    Equal templates of several processes are merged into one kind. The kind has the number of the
    first template. `traced` contains the calls in traces.
    """

    def __init__(self, templates: Iterable[CallSignature], traced: Sequence[CallRow]) -> None:
        rows = list(templates)
        self.processes = len({row.pid for row in rows})
        alike: dict[str, list[CallSignature]] = {}
        for row in rows:
            bare = replace(row, template=0, pid=0, rank=None, calls=0, lengths=())
            alike.setdefault(repr(bare), []).append(row)
        self._distinct: list[CallSignature] = []
        self._kinds: dict[int, CallSignature] = {}  # maps numbers of templates to kinds
        for equal in alike.values():
            counted = Counter[tuple[int, ...]]()
            for row in equal:
                counted.update(dict(row.lengths))
            calls = sum(row.calls for row in equal)
            kind = replace(equal[0], calls=calls, lengths=tuple(counted.items()))
            self._distinct.append(kind)
            self._kinds.update({row.template: kind for row in equal})
        self._compiled = any(call.compiled for call in traced)
        self._shown = {found for call in traced if (found := self._kind_lengths(call))}

    def __bool__(self) -> bool:
        return bool(self._kinds)

    def kind(self, call: CallRow) -> CallSignature | None:
        """Return the kind of a call, or None if the observer recorded nothing about the call."""
        return None if call.template is None else self._kinds[call.template]

    def common_field(self, call: CallRow, name: str) -> str | None:
        """Return the value of a field of a call's kind, or None if it is unknown.

        A fused op in compiled code may belong to any kind of call in compiled code. The value is
        known only if all these kinds have the same value.
        """
        kinds: Iterable[CallSignature | None] = [self.kind(call)]
        if call.compiled and call.template is None and call.kind == "inner":
            kinds = [kind for kind in self.hidden() if kind.kind == "sdpa"]
        values = {getattr(kind, name) if kind else None for kind in kinds}
        return values.pop() if len(values) == 1 else None

    def hidden(self) -> list[CallSignature]:
        """Return the kinds of calls in compiled code. Return no kinds if no traced call is compiled.

        These kinds cannot be matched with particular calls in a trace.
        """
        return [kind for kind in self._distinct if kind.compiled and self._compiled]

    def untraced(self) -> list[CallRow]:
        """Return one representative call for each kind that has calls outside of all traces."""
        linked = {number for number, _ in self._shown}
        return [
            _as_call(kind)
            for kind in self._distinct
            if not (self._compiled if kind.compiled else kind.template in linked)
            or (not kind.compiled and self._untraced_lengths(kind))
        ]

    def lengths(self, group: Iterable[CallRow]) -> list[int]:
        """Return the numbers of keys of the calls in a group that are in no trace."""
        kinds = (self.kind(call) for call in group if call.trace == UNTRACED)
        return [key[2] for kind in kinds if kind for key in self._untraced_lengths(kind) if key]

    def points(self, group: Iterable[CallRow]) -> tuple[tuple[str, float], ...]:
        """Return (config, number of calls) for the calls in a group that are in no trace."""
        made = Counter[Config]()
        for call in group:
            kind = self.kind(call)
            if call.trace == UNTRACED and kind and kind.config and not kind.compiled:
                config = parse_config(kind.config)
                left = self._untraced_lengths(kind) if kind.lengths else {(): kind.calls}
                for key, count in left.items():
                    made[_with_lengths(config, key)] += count
        return tuple((config.label, calls) for config, calls in _representatives(made))

    def counts(self, groups: Sequence[Sequence[CallRow]]) -> list[int | None]:
        """Return the number of calls of each group in the whole program.

        The number is None for replays of a CUDA graph, for compiled code, and for calls that belong
        to several groups.
        """
        found = [{self._kind_lengths(call) for call in group} for group in groups]
        groups_with = Counter(each for group in found for each in group)
        counts: list[int | None] = []
        for group, calls in zip(found, groups, strict=True):
            known = [
                each
                for each in group
                if each and groups_with[each] == 1 and not self._kinds[each[0]].compiled
            ]
            if len(known) < len(group) or any(call.graph for call in calls):
                counts.append(None)
            else:
                counts.append(sum(map(self._count, known)))
        return counts

    def _kind_lengths(self, call: CallRow) -> KindLengths | None:
        kind = self.kind(call)
        if kind is None:
            return None
        if call.trace == UNTRACED:
            return kind.template, None
        query, key = (dims or () for dims in call.dims[:2])
        lengths: tuple[int, ...] = ()
        if len(query) >= 3 and len(key) >= 3:
            lengths = (query[0] if len(query) == 4 else 1, query[-2], key[-2])
        return kind.template, _key(kind, lengths)

    def _untraced_lengths(self, kind: CallSignature) -> dict[tuple[int, ...], int]:
        """Return the number of a kind's untraced calls by the lengths of the calls."""
        return {
            key: count
            for key, count in kind.lengths
            if (kind.template, _key(kind, key)) not in self._shown
        }

    def _count(self, found: KindLengths) -> int:
        kind = self._kinds[found[0]]
        if found[1] is None:
            return sum(self._untraced_lengths(kind).values()) if kind.lengths else kind.calls
        return sum(count for key, count in kind.lengths if _key(kind, key) == found[1])


def _with_lengths(config: Config, lengths: tuple[int, ...]) -> Config:
    """Return the config with other lengths, and without the strides of the first call."""
    own = (config.batch, config.seq_len_q, config.seq_len_kv)
    if lengths in ((), own) or config.kv_batch is not None:
        return config
    batch, queries, keys = lengths
    bare = replace(config.contiguous(), mask_strides=None)
    return replace(bare, batch=batch, seq_len_q=queries, seq_len_kv=keys)


def _representatives(made: Counter[Config]) -> list[tuple[Config, int]]:
    """Return at most MOST_POINTS configs, each with the number of calls that it represents.

    Calls of similar size share a config.
    """

    def size(item: tuple[Config, int]) -> tuple[int, str]:
        config = item[0]
        return config.batch * config.seq_len_q * config.seq_len_kv, config.label

    whole, before = made.total(), 0
    groups: dict[int, list[tuple[Config, int]]] = {}
    for number, (config, calls) in enumerate(sorted(made.items(), key=size)):
        middle = (2 * before + calls) / (2 * whole)
        group = int(middle * MOST_POINTS) if len(made) > MOST_POINTS else number
        groups.setdefault(group, []).append((config, calls))
        before += calls
    return [
        (group[len(group) // 2][0], sum(calls for _, calls in group)) for group in groups.values()
    ]


def _key(kind: CallSignature, lengths: tuple[int, ...]) -> Lengths:
    """Return the lengths that the calls of a row have in common.

    The number of keys is None for decoding calls, because the number differs between these calls.
    """
    if kind.backward or kind.recompute or not lengths or not lengths[1] == 1 < lengths[2]:
        return lengths
    return (*lengths[:2], None)


def _as_call(kind: CallSignature) -> CallRow:
    return CallRow(
        run="",
        trace=UNTRACED,
        call=kind.template,
        step=None,
        kind=kind.kind,
        op=kind.op,
        sdpa_op=None,
        compiled=kind.compiled,
        recompute=kind.recompute,
        backward=kind.backward,
        path=kind.name,
        modules=kind.modules,
        config=kind.config,
        reason=kind.reason,
        tensors=kind.tensors,
        start_ns=0,
        duration_ns=0,
        template=kind.template,
    )
