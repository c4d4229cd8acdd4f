"""Insert the observed calls of a program, and match the calls of its traces with them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence

import msgspec

from profharness.attention.config import Config
from profharness.store.insert import config_ids
from profharness.store.schema import insert_row
from profharness.trace import AttentionCall
from profharness.traces.observed import Journals, ObservedCall, completed, match_calls

_OF_CALL = ("kind", "op", "path", "compiled", "recompute", "backward", "reason")
_OF_TEMPLATE = (
    "pid", "rank", "name", "asked", "choice", "ran", "mask", "file", "line", "function"
)  # fmt: skip


def insert_journals(
    connection: sqlite3.Connection,
    run_id: int,
    journals: Journals,
    calls: Sequence[AttentionCall],
) -> list[str]:
    """Insert observed calls, and link the stored calls of the traces to them.

    A linked call gets the values that its trace lacks. Return warnings.
    """
    if not journals.calls:
        return list(journals.warnings)
    labels = (item.call.config for item in journals.calls)
    configs = config_ids(connection, (config for config in labels if config))
    ids = _insert_templates(connection, run_id, journals.calls, configs)
    places = match_calls(calls, journals.calls)
    rows = []
    for at, call in zip(places, calls, strict=True):
        whole = call if at is None else completed(call, journals.calls[at])
        config = configs[whole.config] if whole.config and call.config is None else None
        number = None if at is None else ids[at]
        rows.append((number, whole.kind, whole.compiled, config, whole.reason))
    _link_calls(connection, run_id, rows)
    lost = sum(at is None and call.path is not None for at, call in zip(places, calls, strict=True))
    text = f"{lost} call(s) of the traces fit no observed kind of call, or several"
    return [*journals.warnings, *([text] if lost else [])]


def _insert_templates(
    connection: sqlite3.Connection,
    run_id: int,
    observed: Sequence[ObservedCall],
    configs: Mapping[Config, int],
) -> list[int]:
    """Return the row ids of the observed calls, in order. `configs` has the row ids of configs."""
    ids = []
    for item in observed:
        call = item.call
        row = {name: getattr(call, name) for name in _OF_CALL}
        row |= {name: getattr(item, name) for name in _OF_TEMPLATE}
        row |= {
            "run_id": run_id,
            "config_id": configs[call.config] if call.config else None,
            "modules": json.dumps(call.modules),
            "tensors": json.dumps(msgspec.to_builtins(call.tensors)),
            "calls": item.count,
            "lengths": json.dumps(item.lengths),
            "enabled": json.dumps(item.enabled),
        }
        ids.append(insert_row(connection, "templates", row))
    return ids


def _link_calls(
    connection: sqlite3.Connection,
    run_id: int,
    rows: Sequence[tuple[int | None, str, bool, int | None, str | None]],
) -> None:
    """Link the calls of a run's traces, in order, to their templates, and complete their values."""
    calls = connection.execute(
        "SELECT c.id FROM calls c JOIN traces t ON t.id = c.trace_id WHERE t.run_id = ? "
        "ORDER BY t.id, c.ordinal",
        (run_id,),
    ).fetchall()
    numbered = ((*row, *call) for row, call in zip(rows, calls, strict=True))
    connection.executemany(
        "UPDATE calls SET template_id = ?, kind = ?, compiled = ?, "
        "config_id = coalesce(?, config_id), reason = ? WHERE id = ?",
        numbered,
    )
