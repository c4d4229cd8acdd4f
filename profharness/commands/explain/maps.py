"""Find how the choice of a backend depends on the properties of a config.

A map shows the choices over two properties. A bisection finds the values of one property at which
the choice changes. Properties have the names of the config grammar, such as `heads`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby, pairwise
from typing import Annotated

from profharness.attention.config import FIELDS, NUMERIC, Config
from profharness.columns import column
from profharness.errors import UsageError

Value = int | float | str | bool | None
_DEFAULTS = {field.name: field.default for field in fields(Config)}


def get(config: Config, name: str) -> Value:
    """Return the value of a property of a config.

    For `seq`, return the length of the queries. For `head_dim_v` and `kv_batch`, return the default
    value if they are not set.
    """
    filled = {"head_dim_v": "value_dim", "kv_batch": "key_batch"}
    value: Value = getattr(config, filled.get(name, FIELDS[name]))
    return value


def put(config: Config, name: str, value: int) -> Config | None:
    """Return a copy of the config in which a numeric property has this value.

    If kv_heads equals heads, or head_dim_v equals head_dim, both change together. Return None if
    the result is not a valid config, because kv_heads does not divide heads, or because the batches
    of queries and keys differ and neither is 1.
    """
    # Strides are valid only for the sizes of the original config.
    config = replace(config, q_strides=None, k_strides=None, v_strides=None, mask_strides=None)
    if name == "seq":
        return replace(config, seq_len_q=value, seq_len_kv=value)
    if name == "head_dim_v":
        return replace(config, head_dim_v=None if value == config.head_dim else value)
    changed = replace(config, **{FIELDS[name]: value})  # type: ignore[arg-type]
    if changed.key_batch == changed.batch:
        changed = replace(changed, kv_batch=None)
    if changed.kv_batch is not None and 1 not in (changed.kv_batch, changed.batch):
        return None
    if name == "heads" and config.num_kv_heads == config.num_heads:
        changed = replace(changed, num_kv_heads=value)
    if name == "head_dim" and config.head_dim_v == value:
        changed = replace(changed, head_dim_v=None)
    return changed if changed.num_heads % changed.num_kv_heads == 0 else None


# Maps other names of properties, such as the fields of Config, to the names of the grammar.
ALIASES = {field: name for name, field in FIELDS.items()} | {"seq_len": "seq"}


def numeric_name(text: str) -> str:
    """Return the grammar's name of a numeric property, such as `seq` for `seq_len`.

    Raise UsageError if there is no such property, or if it is not numeric.
    """
    name = ALIASES.get(text, text)
    if name not in NUMERIC:
        fault = "is not a numeric property" if name in FIELDS else "is not a property"
        names = " ".join(NUMERIC)
        raise UsageError(f"--bisect {text!r} {fault}; choose a numeric property: seq_len {names}")
    return name


def varying(configs: Sequence[Config]) -> list[str]:
    """Return the names of the properties that differ between configs, in grammar order."""
    return [name for name, values in _values(configs).items() if len(values) > 1]


def _values(configs: Sequence[Config]) -> dict[str, set[Value]]:
    """Return the set of values of each property of the configs, in the order of the grammar.

    If the lengths of queries and keys are equal in all configs, they count as one property, `seq`.
    Omit kv_heads, head_dim_v and kv_batch if they equal heads, head_dim and batch in all configs.
    """
    square = all(config.seq_len_q == config.seq_len_kv for config in configs)
    omitted = {"seq_q", "seq_kv"} if square else {"seq"}
    if all(config.num_kv_heads == config.num_heads for config in configs):
        omitted.add("kv_heads")
    for name in ("head_dim_v", "kv_batch"):
        if all(getattr(config, name) is None for config in configs):
            omitted.add(name)
    return {name: {get(each, name) for each in configs} for name in FIELDS if name not in omitted}


@dataclass(frozen=True)
class Edge:
    """Two neighbouring values on an axis of a map at which different backends are chosen."""

    along: str  # the property that changes from `before` to `after`
    before: Value
    after: Value
    choice_before: str
    choice_after: str
    everywhere: bool  # whether the choice changes at all values of the other axis
    at: tuple[Value, ...]  # the values of the other axis at which the choice changes


@dataclass(frozen=True)
class Map:
    """A table of choices over the values of two properties."""

    # The properties that distinguish this map from other maps, with their values.
    fixed: tuple[tuple[str, Value], ...]
    rows: str  # "" if only one property varies
    columns: str
    row_values: tuple[Value, ...]
    column_values: tuple[Value, ...]
    # Maps (row value, column value) to the choice. Combinations that were not queried are missing.
    cells: Mapping[tuple[Value, Value], str]
    edges: tuple[Edge, ...]
    shared: tuple[tuple[str, Value], ...] = ()  # properties that are equal in all configs

    @property
    def title(self) -> str:
        """The properties that all configs of the map share, such as `causal=yes, dtype=bf16`."""
        properties = (*self.fixed, *self.shared)
        return ", ".join(f"{name}={value_text(value)}" for name, value in properties)

    @property
    def choices(self) -> list[list[str | None]]:
        """The choices row by row, with None for each combination that was not queried."""
        return [
            [self.cells.get((row, column)) for column in self.column_values]
            for row in self.row_values
        ]


def draw_maps(
    configs: Sequence[Config], choices: Sequence[str], *, with_edges: bool = True
) -> list[Map]:
    """Return maps of choices, given one choice per config.

    The axes are the two varying properties with the most values. Numeric properties are preferred.
    There is one map for each combination of values of the other properties. Set `with_edges` to
    False if `choices` contains values that are not choices.
    """
    values_of = _values(configs)
    names = [name for name, values in values_of.items() if len(values) > 1]
    ranked = sorted(names, key=lambda name: (name not in NUMERIC, -len(values_of[name])))
    axes = sorted(ranked[:2], key=names.index) or ["head_dim"]
    rows, columns = axes if len(axes) == 2 else ("", *axes)
    rest = [name for name in names if name not in axes]
    shared = [
        (name, next(iter(values)))
        for name, values in values_of.items()
        if len(values) == 1 and name not in axes and values != {_DEFAULTS[FIELDS[name]]}
    ]
    groups: dict[tuple[Value, ...], dict[tuple[Value, Value], str]] = {}
    for config, choice in zip(configs, choices, strict=True):
        cells = groups.setdefault(tuple(get(config, name) for name in rest), {})
        cells[get(config, rows) if rows else "", get(config, columns)] = choice
    maps = []
    for values, cells in groups.items():
        row_values = _in_order({row for row, _ in cells})
        column_values = _in_order({column for _, column in cells})
        flipped = {(column, row): choice for (row, column), choice in cells.items()}
        edges = _edges(rows, row_values, column_values, cells) if rows else []
        edges += _edges(columns, column_values, row_values, flipped)
        fixed = tuple(zip(rest, values, strict=True))
        axes_of = (rows, columns, row_values, column_values, cells)
        maps.append(Map(fixed, *axes_of, tuple(edges) if with_edges else (), tuple(shared)))
    return maps


def are_sparse(maps: Sequence[Map]) -> bool:
    """Return whether most combinations are missing, so that a list shows the configs better."""
    size = sum(len(each.row_values) * len(each.column_values) for each in maps)
    filled = sum(len(each.cells) for each in maps)
    return 2 * filled <= size or filled < 2 * len(maps)


def _edges(
    along: str,
    values: Sequence[Value],
    others: Sequence[Value],
    cells: Mapping[tuple[Value, Value], str],
) -> list[Edge]:
    """Return the edges between neighbouring values on the axis `along`.

    Equal changes of the choice at several values of the other axis are merged into one edge.
    """
    edges = []
    for before, after in pairwise(values):
        where: dict[tuple[str, str], list[Value]] = {}
        shared = [value for value in others if (before, value) in cells and (after, value) in cells]
        for value in shared:
            where.setdefault((cells[before, value], cells[after, value]), []).append(value)
        edges += [
            Edge(along, before, after, *choices, len(at) == len(shared), tuple(at))
            for choices, at in where.items()
            if choices[0] != choices[1]
        ]
    return edges


def _in_order(values: set[Value]) -> tuple[Value, ...]:
    """Sort values: None first, then numbers by size, then words."""
    return tuple(sorted(values, key=lambda v: (isinstance(v, str), v is not None, v or 0, str(v))))


def value_text(value: Value) -> str:
    """Format a value for a map. A flag becomes `yes` or `no`."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


DEFAULT_ENDS = (1, 65_536)
# No fused kernel supports a head dimension above 1024.
HEAD_DIM_ENDS = (1, 1024)
ALL_OF = 256  # If a range has at most this many values, all of them are queried.
NEAR_8 = 1024  # Up to this value, all multiples of 8 and their neighbours are queried.
# If the choice changes more than twice in the last RESTLESS values below NEAR_8, the multiples of 8
# and their neighbours are queried up to the end of the range.
RESTLESS = 128
# Up to this value, all multiples of 64 and their neighbours are queried, because some dispatch
# rules check a length modulo 128.
NEAR_64 = 65_536
# Each round divides a gap into this many parts. There should be few rounds, because each may start
# a worker.
WAYS = 16
Choose = Callable[[Sequence[Config]], list[str]]
"""A function that returns the chosen backend for each config."""


@dataclass(frozen=True)
class Stretch:
    """A range of neighbouring values for which the same backend is chosen.

    Both ends belong to the range and were queried.
    """

    first: Annotated[int, column("from", "count", meaning="the smallest value")]
    last: Annotated[int, column("to", "count", importance="answer", meaning="the largest value")]
    choice: Annotated[str, column("choice", importance="answer", meaning="the choice of `auto`")]


@dataclass(frozen=True)
class Bisection:
    """The choices for one config if only the property `name` varies."""

    config: str  # label of a config that the user gave
    name: str
    # The stretches cover the whole range. The last value of each and the first value of the next
    # were queried.
    stretches: tuple[Stretch, ...]
    asked: tuple[int, ...]  # the values that were queried
    possible: int  # number of values for which a valid config exists

    @property
    def flips(self) -> tuple[tuple[int, int], ...]:
        """The pairs of values (before, after) between which the choice changes."""
        return tuple((left.last, right.first) for left, right in pairwise(self.stretches))


def bisect_all(configs: Sequence[Config], name: str, choose: Choose) -> list[Bisection]:
    """Return one bisection for each group of configs that differ only in this property.

    Each bisection covers the range from the smallest to the largest value in the group. If there is
    only one value, it covers 1 to 65,536, or 1 to 1,024 for a head dimension. Raise UsageError if
    the property is not numeric, or if it is `seq` and the lengths of queries and keys differ.
    """
    name = numeric_name(name)
    groups: dict[Config, list[Config]] = {}
    for config in configs:
        if name == "seq" and config.seq_len_q != config.seq_len_kv:
            raise UsageError(
                f"--bisect seq: {config.label} has different lengths; bisect seq_q or seq_kv"
            )
        groups.setdefault(_without(config, name, configs), []).append(config)
    bisections = []
    for group in groups.values():
        values = sorted({value for c in group if isinstance(value := get(c, name), int)})
        default = HEAD_DIM_ENDS if name.startswith("head_dim") else DEFAULT_ENDS
        ends = (values[0], values[-1]) if len(values) > 1 else default
        # Prefer a config in which kv_heads differs from heads, or head_dim_v from head_dim, because
        # this value should stay constant.
        base = max(group, key=lambda c: (c.num_kv_heads != c.num_heads, c.head_dim_v is not None))
        bisections.append(bisect_one(base, name, ends, choose))
    return bisections


def bisect_one(base: Config, name: str, ends: tuple[int, int], choose: Choose) -> Bisection:
    """Find the values of a property between two ends at which the choice changes.

    Changes between two queried values with equal choices are not found. Raise UsageError if no
    value in the range gives a valid config.
    """
    domain = _domain(base, name, ends)
    if not domain:
        raise UsageError(
            f"--bisect {name}: no value from {ends[0]} to {ends[1]} is valid for {base.label}"
        )
    choices: dict[int, str] = {}  # by index into the domain

    def ask(indices: Iterable[int]) -> None:
        # Do not query a value twice, because a live query is slow.
        new = sorted(set(indices) - choices.keys())
        configs = [_set(base, name, domain[index]) for index in new]
        choices.update(zip(new, choose(configs) if configs else (), strict=True))

    ask(first_indices(domain))
    if domain[-1] > NEAR_8:
        last = [choices[i] for i in sorted(choices) if NEAR_8 - RESTLESS < domain[i] <= NEAR_8]
        if sum(left != right for left, right in pairwise(last)) > 2:
            ask(_near(domain, set(range(0, domain[-1] + 1, 8))))
    while gaps := [
        (left, right)
        for left, right in pairwise(sorted(choices))
        if right - left > 1 and choices[left] != choices[right]
    ]:
        cuts = (
            left + (right - left) * part // WAYS for left, right in gaps for part in range(1, WAYS)
        )
        ask(cuts)
    stretches: list[Stretch] = []
    values = sorted(choices)
    for choice, group in groupby(values, key=choices.__getitem__):
        indices = list(group)
        stretches.append(Stretch(domain[indices[0]], domain[indices[-1]], choice))
    return Bisection(
        base.label, name, tuple(stretches), tuple(domain[i] for i in values), len(domain)
    )


def first_indices(domain: Sequence[int]) -> list[int]:
    """Return the indices of the values to query in the first round.

    There are many values, because the choice may change back and forth, for example at multiples
    of 8.
    """
    if len(domain) <= ALL_OF:
        return list(range(len(domain)))
    low, high = domain[0], domain[-1]
    marks = {low, high, *range(0, NEAR_8 + 1, 8), *range(0, NEAR_64 + 1, 64)}
    marks |= {scale << bit for bit in range(high.bit_length()) for scale in (1, 3)}
    return _near(domain, marks)


def _near(domain: Sequence[int], marks: set[int]) -> list[int]:
    low, high = domain[0], domain[-1]
    near = {mark + step for mark in marks for step in (-1, 0, 1)}
    inside = (value for value in near if low <= value <= high)
    return sorted({min(bisect_left(domain, value), len(domain) - 1) for value in inside})


def _domain(base: Config, name: str, ends: tuple[int, int]) -> Sequence[int]:
    """Return the values of a property in a range that give a valid config.

    Values of kv_heads must divide heads. Values of heads must be multiples of kv_heads, unless
    kv_heads changes with heads.
    """
    low, high = ends
    if name == "kv_heads":
        heads = base.num_heads
        divisors = [value for value in range(1, heads + 1) if heads % value == 0]
        return divisors[bisect_left(divisors, low) : bisect_right(divisors, high)]
    if name == "heads" and base.num_kv_heads != base.num_heads:
        step = base.num_kv_heads
        return range(-(-low // step) * step, high + 1, step)
    return range(low, high + 1)


def _set(base: Config, name: str, value: int) -> Config:
    config = put(base, name, value)
    if config is None:
        raise UsageError(f"--bisect {name}: {value} is not valid for {base.label}")
    return config


def _without(config: Config, name: str, configs: Sequence[Config]) -> Config:
    """Return the config with a placeholder for a property.

    The result is equal for all configs that differ only in this property.
    """
    if name == "kv_heads":
        # 0 can be the placeholder, because no config has 0 heads.
        return replace(config, num_kv_heads=0)
    if name == "heads" and any(c.num_kv_heads != c.num_heads for c in configs):
        return replace(config, num_heads=0)
    if name == "head_dim" and any(c.head_dim_v is not None for c in configs):
        return replace(config, head_dim=0, head_dim_v=config.value_dim)
    return put(config, name, 0) or config
