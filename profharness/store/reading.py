"""Small helpers of the questions: which stored configs are meant, and lists in SQL."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import fields

from profharness.config import WORDS, Config

_FIELDS = tuple(field.name for field in fields(Config))


def config_of(values: Sequence[object]) -> Config:
    """The Config of a `configs` row, columns in Config's field order."""
    row = dict(zip(_FIELDS, values, strict=True))
    row |= {name: bool(row[name]) for name in WORDS}
    return Config(**row)  # type: ignore[arg-type]


def config_ids(connection: sqlite3.Connection, asked: Sequence[Config]) -> set[int]:
    """Ids of the stored configs that any of the asked ones matches (no dtype asked: any dtype)."""
    rows = connection.execute(f"SELECT id, {', '.join(_FIELDS)} FROM configs").fetchall()
    stored = [(row[0], config_of(row[1:])) for row in rows]
    return {one for one, config in stored if any(each.matches(config) for each in asked)}


def in_list(ids: Iterable[int]) -> str:
    """Integers as the inside of an SQL IN (...)."""
    return ", ".join(str(int(one)) for one in sorted(ids))
