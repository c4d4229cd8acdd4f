"""Convert rows to pandas DataFrames.

Integer columns stay integers, and a DataFrame without rows still has all columns.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, get_type_hints

from profharness.errors import UsageError
from profharness.rows import Refusal, Triple, axes
from profharness.store.queries import Store, median
from profharness.store.schema import find_damage, is_damage

if TYPE_CHECKING:
    import pandas as pd

Record = dict[str, Any]
_INTEGERS = (int, int | None, Triple | None)
_READS = "only SELECT statements are allowed, without ATTACH"


def to_frame(rows: Sequence[Any], kind: Any = None) -> pd.DataFrame:
    """Convert rows to a DataFrame with flat columns.

    `kind` is the type of the rows, and determines the columns if there are no rows. A grid or block
    becomes three columns (`grid_x`, …). A tuple of strings becomes one string joined by "; ". Raw
    samples become a count and a median (`event_samples`, `event_median_ns`). Each metric becomes a
    column with the name that the profiler uses, without the unit. Other dicts become one column per
    key. Unknown values are missing, never 0.
    """
    kind = type(rows[0]) if rows else kind
    if kind is None:
        return frame([])
    hints = get_type_hints(kind)
    names = [each.name for each in fields(kind)] if is_dataclass(kind) else kind._fields
    records = [
        dict(chain.from_iterable(_columns(name, getattr(row, name)).items() for name in names))
        for row in rows
    ]
    integers = [column for name in names if hints[name] in _INTEGERS for column in _flat(name)]
    # Omit dicts, because their columns depend on their keys.
    plain = (name for name in names if not str(hints[name]).startswith("dict"))
    columns = None if records else list(chain.from_iterable(map(_flat, plain)))
    return frame(records, columns, integers=integers)


def frame(
    rows: list[Any], columns: list[str] | None = None, *, integers: Collection[str] = ()
) -> pd.DataFrame:
    """Return a DataFrame of rows or records.

    A column of integers with missing values has the dtype Int64. A column in `integers` has this
    dtype even if all its values are missing.
    """
    # imported here, because most commands do not need pandas
    import pandas as pd

    made = pd.DataFrame(rows, columns=columns)
    for index, name in enumerate(made.columns):
        column = made.iloc[:, index]
        # pandas converts integers with missing values to floats, which are inexact beyond 2**53
        if column.dtype.kind not in "fO" or not (column.isna().any() or name in integers):
            continue
        values = [row.get(name) if isinstance(row, dict) else row[index] for row in rows]
        kinds = {type(value) for value in values} - {type(None)}
        if kinds == {int} or (name in integers and not kinds):
            # set by position, because two columns of a query may have the same name
            made.isetitem(index, pd.array(values, dtype="Int64"))
    return made


def query(store: Store, sql: str, params: Sequence[Any] | Mapping[str, Any] = ()) -> pd.DataFrame:
    """Return the result of any SELECT statement over the store's tables and views.

    Raise UsageError for other SQL statements.
    """
    connection = store.connection
    connection.set_authorizer(_deny_attach)
    try:
        cursor = connection.execute(sql, params)
        columns = [column[0] for column in cursor.description or ()]
        return frame(cursor.fetchall(), columns)
    except (sqlite3.OperationalError, sqlite3.ProgrammingError, sqlite3.Warning) as error:
        if is_damage(error) or find_damage(connection):
            raise  # Store.__exit__ reports that the file is damaged
        raise UsageError(f"the query failed: {error}; {_READS}") from None
    except sqlite3.DatabaseError as error:
        # sqlite3 has no separate exception for a denied statement
        if "not authorized" not in str(error):
            raise
        raise UsageError(f"the query was refused; {_READS}") from None
    finally:
        # the store continues to use this connection
        connection.set_authorizer(None)


def _deny_attach(action: int, *_: object) -> int:
    # ATTACH creates a file even on a read-only connection
    refused = action in (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH)
    return sqlite3.SQLITE_DENY if refused else sqlite3.SQLITE_OK


def _flat(name: str) -> list[str]:
    return list(axes(name, None)) if name in ("grid", "block") else [name]


def _columns(name: str, value: Any) -> Record:
    if name in ("grid", "block"):
        return axes(name, value)
    if name == "samples":
        columns: Record = {}
        for kind, numbers in value.items():
            columns[f"{kind}_samples"] = len(numbers)
            columns[f"{kind}_median_ns"] = median(numbers) if numbers else None
        return columns
    if name == "metrics":
        return {key: number for key, (number, _) in value.items()}
    if isinstance(value, dict):
        return {f"{name}_{key}": inner for key, inner in value.items()}
    if isinstance(value, tuple):
        texts = (item.code if isinstance(item, Refusal) else str(item) for item in value)
        return {name: "; ".join(texts)}
    return {name: value}
