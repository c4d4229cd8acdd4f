"""Maps: the backend by two properties that vary, and the edges between neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from profharness.config import Config
from profharness.explaining.properties import NUMERIC, Value, get, varying


@dataclass(frozen=True)
class Edge:
    """Neighbours on a map with different choices. along: the property that changes from `before`
    to `after`; at: the values of the other axis where it does so; everywhere: at all of them.
    """

    along: str
    before: Value
    after: Value
    choice_before: str
    choice_after: str
    at: tuple[Value, ...]
    everywhere: bool


@dataclass(frozen=True)
class Map:
    """Choices by the values of two properties. fixed: what tells this map from its neighbours.

    rows is "" where only one property varies; cells: (row value, column value) to the choice,
    without the combinations that were not asked.
    """

    fixed: tuple[tuple[str, Value], ...]
    rows: str
    columns: str
    row_values: tuple[Value, ...]
    column_values: tuple[Value, ...]
    cells: Mapping[tuple[Value, Value], str]
    edges: tuple[Edge, ...]

    @property
    def title(self) -> str:
        """`causal=True, dtype=bf16`, or empty where there is only one map."""
        return ", ".join(f"{name}={_word(value)}" for name, value in self.fixed)


def draw_maps(configs: Sequence[Config], choices: Sequence[str]) -> list[Map]:
    """One map per combination of what varies besides two properties: the two numeric ones with the
    most values, in the order of the grammar; choices has one for each config.
    """
    names = varying(configs)
    axes = _axes(configs, names)
    rest = [name for name in names if name not in axes]
    groups: dict[tuple[Value, ...], list[tuple[Config, str]]] = {}
    for config, choice in zip(configs, choices, strict=True):
        groups.setdefault(tuple(get(config, name) for name in rest), []).append((config, choice))
    rows, columns = axes if len(axes) == 2 else ("", *axes)
    return [
        _map(tuple(zip(rest, values, strict=True)), rows, columns, group)
        for values, group in groups.items()
    ]


def _axes(configs: Sequence[Config], names: Sequence[str]) -> tuple[str, ...]:
    if not names:
        return ("head_dim",)
    count = {name: len({get(each, name) for each in configs}) for name in names}
    ranked = sorted(names, key=lambda name: (name not in NUMERIC, -count[name]))
    return tuple(sorted(ranked[:2], key=names.index))


def _map(
    fixed: tuple[tuple[str, Value], ...],
    rows: str,
    columns: str,
    group: Sequence[tuple[Config, str]],
) -> Map:
    cells = {
        (get(config, rows) if rows else "", get(config, columns)): choice
        for config, choice in group
    }
    row_values = _in_order({row for row, _ in cells})
    column_values = _in_order({column for _, column in cells})
    flipped = {(column, row): choice for (row, column), choice in cells.items()}
    edges = [
        *(_edges(rows, row_values, column_values, cells) if rows else ()),
        *_edges(columns, column_values, row_values, flipped),
    ]
    return Map(fixed, rows, columns, row_values, column_values, cells, tuple(edges))


def _edges(
    along: str,
    values: Sequence[Value],
    others: Sequence[Value],
    cells: Mapping[tuple[Value, Value], str],
) -> list[Edge]:
    """Edges between neighbouring values; those that are the same at several values of the other
    axis are one.
    """
    found = []
    for before, after in pairwise(values):
        where: dict[tuple[str, str], list[Value]] = {}
        asked = [o for o in others if (before, o) in cells and (after, o) in cells]
        for other in asked:
            pair = (cells[before, other], cells[after, other])
            if pair[0] != pair[1]:
                where.setdefault(pair, []).append(other)
        found += [
            Edge(along, before, after, *pair, tuple(at), len(at) == len(asked))
            for pair, at in where.items()
        ]
    return found


def _in_order(values: set[Value]) -> tuple[Value, ...]:
    """Numbers by size, then words, none first."""
    return tuple(sorted(values, key=lambda v: (isinstance(v, str), v is not None, v or 0, str(v))))


def _word(value: Value) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
