"""Interned rows: names, launch configurations and paths that many launches share, each stored
once.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable
from dataclasses import fields

from profharness.config import Config
from profharness.kernel_names import parse_kernel_name
from profharness.trace import LaunchConfig

SDPA_OP = re.compile(r"aten::_scaled_dot_product_\w*attention\w*")

_LAUNCH_CONFIG_COLUMNS = (
    "grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "registers_per_thread",
    "static_shared_bytes", "dynamic_shared_bytes", "shared_bytes",
)  # fmt: skip
_CONFIG_COLUMNS = tuple(field.name for field in fields(Config))
_KERNEL_COLUMNS = (
    "short", "family", "backend", "arch", "dtype", "head_dim", "tile_m", "tile_n", "stages",
    "warps", "direction", "causal", "dropout",
)  # fmt: skip


def sdpa_op(path: str) -> str | None:
    """The innermost SDPA implementation op of a folded op path; the composite op that dispatches to
    it does not count.
    """
    for op in reversed(path.split(";")):
        if SDPA_OP.fullmatch(op):
            return op
    return None


def kernels(connection: sqlite3.Connection, names: list[str], kinds: list[str]) -> list[int]:
    """Ids of kernels by canonical name and kind, in the order given."""
    return [_kernel(connection, name, kind) for name, kind in zip(names, kinds, strict=True)]


def _kernel(connection: sqlite3.Connection, name: str, kind: str) -> int:
    found = connection.execute(
        "SELECT id FROM kernels WHERE name = ? AND kind = ?", (name, kind)
    ).fetchone()
    if found:
        return int(found[0])
    parsed = parse_kernel_name(name, kind)
    values = {column: getattr(parsed, column) for column in _KERNEL_COLUMNS}
    return _insert(connection, "kernels", {"name": name, "kind": kind} | values)


def launch_configs(connection: sqlite3.Connection, configs: Iterable[LaunchConfig]) -> list[int]:
    """Ids of launch configurations, in the order given."""
    ids = []
    for config in configs:
        values = (
            *(config.grid or (None,) * 3),
            *(config.block or (None,) * 3),
            config.registers_per_thread,
            config.static_shared_bytes,
            config.dynamic_shared_bytes,
            config.shared_bytes,
        )
        row = dict(zip(_LAUNCH_CONFIG_COLUMNS, values, strict=True))
        ids.append(_same_row(connection, "launch_configs", row))
    return ids


def configs(connection: sqlite3.Connection, asked: Iterable[Config]) -> dict[Config, int]:
    """Ids of attention configs."""
    ids = {}
    for config in set(asked):
        row = {name: getattr(config, name) for name in _CONFIG_COLUMNS}
        ids[config] = _same_row(connection, "configs", {"label": config.label} | row)
    return ids


def op_paths(connection: sqlite3.Connection, paths: Iterable[str]) -> list[int]:
    """Ids of folded op paths, in the order given."""
    ids = []
    for path in paths:
        found = connection.execute("SELECT id FROM op_paths WHERE path = ?", (path,)).fetchone()
        row: dict[str, object] = {"path": path, "sdpa_op": sdpa_op(path)}
        ids.append(int(found[0]) if found else _insert(connection, "op_paths", row))
    return ids


def names(connection: sqlite3.Connection, table: str, values: Iterable[str]) -> list[int]:
    """Ids of names in a table of id and name (`apis`, `range_names`), in the order given."""
    known: dict[str, int] = {}
    ids = []
    for value in values:
        if value not in known:
            known[value] = _same_row(connection, table, {"name": value})
        ids.append(known[value])
    return ids


def _same_row(connection: sqlite3.Connection, table: str, row: dict[str, object]) -> int:
    """The id of the row with exactly these values, NULLs included, inserted if there is none."""
    where = " AND ".join(f"{column} IS ?" for column in row)
    found = connection.execute(
        f"SELECT id FROM {table} WHERE {where}", tuple(row.values())
    ).fetchone()
    return int(found[0]) if found else _insert(connection, table, row)


def _insert(connection: sqlite3.Connection, table: str, row: dict[str, object]) -> int:
    marks = ", ".join("?" * len(row))
    cursor = connection.execute(
        f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values())
    )
    return int(cursor.lastrowid or 0)
