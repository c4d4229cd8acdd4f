"""The choice of `auto` over many configs: maps of two properties, and the exact values where it
changes. Properties have the names of the grammar.
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
    """Return a property's value. `seq` is seq_len_q; head_dim_v and kv_batch have their default
    filled in.
    """
    filled = {"head_dim_v": "value_dim", "kv_batch": "key_batch"}
    value: Value = getattr(config, filled.get(name, FIELDS[name]))
    return value


def put(config: Config, name: str, value: int) -> Config | None:
    """Return the config with a numeric property set. kv_heads follows heads and head_dim_v head_dim
    if they were equal, and strides are dropped. Return None if no such config exists (kv_heads that
    does not divide heads, two different batches of which none is 1).
    """
    # strides fit only the sizes that they were given with
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


# Other names that users see: those of the tables and of Config.
ALIASES = {field: name for name, field in FIELDS.items()} | {"seq_len": "seq"}


def numeric_name(text: str) -> str:
    """Return a numeric property's name in the grammar, `seq` for `seq_len`. Raise UsageError."""
    name = ALIASES.get(text, text)
    if name not in NUMERIC:
        fault = "is a word, not a number" if name in FIELDS else "is no property"
        names = " ".join(NUMERIC)
        raise UsageError(f"--bisect {text!r} {fault}; numeric properties are seq_len {names}")
    return name


def varying(configs: Sequence[Config]) -> list[str]:
    """Return the properties that differ among configs, numbers first."""
    return [name for name, values in _values(configs).items() if len(values) > 1]


def _values(configs: Sequence[Config]) -> dict[str, set[Value]]:
    """Return the values of each property that distinguishes configs, numbers first. seq is both
    lengths if they are always equal. kv_heads and head_dim_v are left out if they only follow.
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
    """Two neighbouring points on a map for which different backends are chosen."""

    along: str  # the property that changes from `before` to `after`
    before: Value
    after: Value
    choice_before: str
    choice_after: str
    everywhere: bool  # whether the choice changes at all values of the other axis
    at: tuple[Value, ...]  # values of the other axis


@dataclass(frozen=True)
class Map:
    """Choices by the values of two properties."""

    # the properties that distinguish this map from the other maps
    fixed: tuple[tuple[str, Value], ...]
    rows: str  # "" if only one property varies
    columns: str
    row_values: tuple[Value, ...]
    column_values: tuple[Value, ...]
    # (row value, column value) to the choice, for queried combinations
    cells: Mapping[tuple[Value, Value], str]
    edges: tuple[Edge, ...]
    shared: tuple[tuple[str, Value], ...] = ()  # what all configs have in common

    @property
    def title(self) -> str:
        """`causal=yes, dtype=bf16`: what distinguishes the map, and what all configs share."""
        properties = (*self.fixed, *self.shared)
        return ", ".join(f"{name}={value_text(value)}" for name, value in properties)

    @property
    def choices(self) -> list[list[str | None]]:
        """Return the choices row by row, with None for a combination that was not queried."""
        return [
            [self.cells.get((row, column)) for column in self.column_values]
            for row in self.row_values
        ]


def draw_maps(
    configs: Sequence[Config], choices: Sequence[str], *, with_edges: bool = True
) -> list[Map]:
    """Return one map per combination of the other varying properties. The axes are the two numeric
    properties with the most values, in the order of the grammar. `choices` has one choice per
    config. Use `with_edges=False` if these are figures.
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


def _edges(
    along: str,
    values: Sequence[Value],
    others: Sequence[Value],
    cells: Mapping[tuple[Value, Value], str],
) -> list[Edge]:
    """Return edges between neighbouring values. An edge at all values of the other axis is merged
    into one.
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
    """Sort numbers by size, then words, None first."""
    return tuple(sorted(values, key=lambda v: (isinstance(v, str), v is not None, v or 0, str(v))))


def value_text(value: Value) -> str:
    """Return a value as text for a map: `yes` and `no` for flags."""
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


DEFAULT_ENDS = (1, 65_536)
# No fused kernel supports a larger head dimension. Above, only multiples of 8 matter.
HEAD_DIM_ENDS = (1, 1024)
ALL_OF = 256  # maximum number of values in a range that is queried completely
NEAR_8 = 1024  # multiples of 8 with their neighbours are queried up to this value
RESTLESS = 128  # if the choice still changes this close to that end, query the whole range
NEAR_64 = 65_536  # multiples of 64 too, because some rules check a length modulo 128
WAYS = 16  # parts per stretch and round; few rounds, as each may start a worker
Choose = Callable[[Sequence[Config]], list[str]]
"""Returns the choice of `auto`, one per config."""


@dataclass(frozen=True)
class Stretch:
    """A range of neighbouring values for which the same backend is chosen.

    Both ends belong to the range and were queried.
    """

    first: Annotated[int, column("from", "count", meaning="the smallest value")]
    last: Annotated[int, column("to", "count", meaning="the largest value")]
    choice: Annotated[str, column("choice", meaning="the choice of `auto`")]


@dataclass(frozen=True)
class Bisection:
    """The choices along property `name` of one config."""

    config: str  # its label has the first value
    name: str
    # They cover all possible values. Both sides of each edge were queried.
    stretches: tuple[Stretch, ...]
    asked: tuple[int, ...]  # the values that were queried
    possible: int  # number of values for which a valid config exists

    @property
    def flips(self) -> tuple[tuple[int, int], ...]:
        """The values before and after each change of the choice."""
        return tuple((left.last, right.first) for left, right in pairwise(self.stretches))


def bisect_all(configs: Sequence[Config], name: str, choose: Choose) -> list[Bisection]:
    """Return one bisection per config that remains without the property. The ends are the smallest
    and the largest value of the configs. If they have only one value, the ends are 1 and 65,536, or
    1 and 1,024 for a head dimension. Raise UsageError for a property that is no number, and for
    `seq` of configs with different lengths.
    """
    name = numeric_name(name)
    groups: dict[Config, list[Config]] = {}
    for config in configs:
        if name == "seq" and config.seq_len_q != config.seq_len_kv:
            raise UsageError(
                f"--bisect seq: {config.label} has unlike lengths; bisect seq_q or seq_kv"
            )
        groups.setdefault(_without(config, name, configs), []).append(config)
    bisections = []
    for group in groups.values():
        values = sorted({value for c in group if isinstance(value := get(c, name), int)})
        default = HEAD_DIM_ENDS if name.startswith("head_dim") else DEFAULT_ENDS
        ends = (values[0], values[-1]) if len(values) > 1 else default
        # Prefer a config whose kv_heads or head_dim_v does not just follow: it keeps the value.
        base = max(group, key=lambda c: (c.num_kv_heads != c.num_heads, c.head_dim_v is not None))
        bisections.append(bisect_one(base, name, ends, choose))
    return bisections


def bisect_one(base: Config, name: str, ends: tuple[int, int], choose: Choose) -> Bisection:
    """Find all changes of `choose` along a property between two ends, as far as the sweep shows
    them.
    """
    domain = _domain(base, name, ends)
    if not domain:
        raise UsageError(f"--bisect {name}: no value from {ends[0]} to {ends[1]} fits {base.label}")
    choices: dict[int, str] = {}  # by index into the domain

    def ask(indices: Iterable[int]) -> None:
        # a live query is slow, so no value is queried twice
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
    label = _set(base, name, domain[0]).label
    return Bisection(label, name, tuple(stretches), tuple(domain[i] for i in values), len(domain))


def first_indices(domain: Sequence[int]) -> list[int]:
    """Return the indices of the first queries. They are many because the choice is not monotonic."""
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
    """Return the values that make a config: divisors of heads for kv_heads, multiples of a fixed
    kv_heads for heads, else all.
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
        raise UsageError(f"--bisect {name}: {value} does not fit {base.label}")
    return config


def _without(config: Config, name: str, configs: Sequence[Config]) -> Config:
    """Return a config that is equal for configs that differ in this property only."""
    if name == "kv_heads":
        # no config has 0 of them, so 0 represents any number
        return replace(config, num_kv_heads=0)
    if name == "heads" and any(c.num_kv_heads != c.num_heads for c in configs):
        return replace(config, num_heads=0)
    if name == "head_dim" and any(c.head_dim_v is not None for c in configs):
        return replace(config, head_dim=0, head_dim_v=config.value_dim)
    return put(config, name, 0) or config
